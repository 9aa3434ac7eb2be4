"""ONNX files and the runtimes that execute them."""
