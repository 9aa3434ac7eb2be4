"""Turns config, graph and runtime rules into a plan: every quantized site, and why the rest is float."""
