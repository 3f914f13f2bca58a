"""Individual gradients as structured operators, found while backprop runs."""
