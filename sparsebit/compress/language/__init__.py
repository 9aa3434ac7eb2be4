"""Candidates of language models: recipes, folders, rungs, results."""
