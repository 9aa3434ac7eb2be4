"""Loads, streams and runs packed models: generation, perplexity and tasks."""
