"""Candidates of networks: recipes, files, rungs, results."""
