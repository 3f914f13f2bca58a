"""Per-sample gradients as structured operators, found while backprop runs."""
