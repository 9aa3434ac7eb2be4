"""Sparsebit: small and fast PyTorch models."""
