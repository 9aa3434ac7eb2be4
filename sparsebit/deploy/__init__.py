"""Writes ONNX files, runs them in their runtimes, and compares, audits and times them."""
