"""Measures the sensitivity of every quantized tensor, and chooses the bits of each under budgets."""
