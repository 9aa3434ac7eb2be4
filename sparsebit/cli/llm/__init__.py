"""The verbs of `sparsebit llm`."""
