"""Exports torch models to ONNX, and fake-quant operators to QuantizeLinear and DequantizeLinear."""
