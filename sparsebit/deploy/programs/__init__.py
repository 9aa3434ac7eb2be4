"""Programs of `torch.export` with quantize and dequantize ops, and the runtimes that take such a program."""
