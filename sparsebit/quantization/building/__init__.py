"""The plan as modules: quantizers and quantized ops in the graph."""
