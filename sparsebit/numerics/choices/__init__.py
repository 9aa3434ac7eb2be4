"""One choice for each layer under budgets: an integer program."""
