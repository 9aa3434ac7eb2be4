"""Rewrites the graph into forms that runtimes have fast kernels for; outputs stay equal."""
