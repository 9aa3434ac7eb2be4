"""Passes that rewrite float graphs, one per file."""
