"""Passes that rewrite float graphs in place, one per file. In eval mode a graph computes the same afterwards."""
