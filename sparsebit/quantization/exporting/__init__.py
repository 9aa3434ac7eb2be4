"""Exports quantizers as constants of an ONNX file, and checks the file before it is kept."""
