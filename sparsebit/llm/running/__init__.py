"""Load, stream, generate, and measure perplexity and tasks."""
