"""The proof that the captured copy computes what the model's own code computes."""
