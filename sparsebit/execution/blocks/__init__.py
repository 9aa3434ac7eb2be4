"""A model block by block in bounded memory: inputs, targets, training, resume."""
