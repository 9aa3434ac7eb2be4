"""Goes through a model block by block in bounded memory: inputs, targets, training, resume."""
