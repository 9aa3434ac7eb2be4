"""Graphs of models: capture, matching, rewriting. Knows torch.fx and nothing of quantization."""
