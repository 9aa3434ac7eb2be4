"""Algorithms that round weights: tensors in, tensors out."""
