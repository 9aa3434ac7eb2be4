"""The proof that the captured copy computes the same as the model's own code."""
