"""From the nodes of a backward pass to per-sample gradients and their reductions."""
