"""ONNX files as models: `load_onnx` turns a float file into an `nn.Module` with layers and parameters."""
