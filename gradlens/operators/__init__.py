"""Structured forms of the per-sample gradients of a parameter."""
