"""Which channels must be removed together: labels that flow through the graph, and the groups they form."""
