"""File formats of packed language models."""
