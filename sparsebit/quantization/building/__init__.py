"""Turns the plan into modules: quantizers and quantized ops in the graph."""
