"""Graph to graph, one idea a file."""
