"""Per-sample gradients of one parameter, in the structured forms that layers lead to."""
