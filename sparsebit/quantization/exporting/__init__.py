"""Quantizers as constants in an ONNX file, and the checks before it is kept."""
