"""Sensitivity of every quantized tensor, and the bits of each chosen under budgets."""
