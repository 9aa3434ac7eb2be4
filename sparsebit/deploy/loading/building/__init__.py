"""The torch.fx graph in progress, its values, the names of its layers, and the table of operators."""
