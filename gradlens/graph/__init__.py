"""Private names of torch, a loss's graph, its kinds of nodes and its loss, and hooks."""
