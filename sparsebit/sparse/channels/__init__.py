"""Which channels belong together: labels that flow through the graph, and the groups they form."""
