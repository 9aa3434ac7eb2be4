"""The symbolic tracer."""
