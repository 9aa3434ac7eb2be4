"""Removing channels and blocks: a smaller model of the same class, its folder, its export."""
