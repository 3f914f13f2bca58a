"""Per-sample gradients of one parameter, in the structured forms that layers give them."""
