"""Model graphs: capture, pattern matching and rewriting with torch.fx. Does not depend on quantization."""
