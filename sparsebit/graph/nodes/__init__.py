"""A captured graph, and what is known about its nodes."""
