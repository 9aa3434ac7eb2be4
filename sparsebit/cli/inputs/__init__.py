"""Models, weights, data and labels from the command line."""
