"""Patterns of nodes, and their replacement."""
