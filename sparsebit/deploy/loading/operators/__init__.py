"""The rule of every ONNX operator: a function each, registered by `@operator(name)`."""
