"""An ONNX model as a graph: files, nodes, initializers, types, quantization sites."""
