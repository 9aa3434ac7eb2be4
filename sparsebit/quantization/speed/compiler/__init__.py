"""Fusions for torch.compile."""
