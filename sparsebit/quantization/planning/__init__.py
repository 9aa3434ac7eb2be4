"""Config, graph and runtime rules to a plan: every quantized site, and why the rest is float."""
