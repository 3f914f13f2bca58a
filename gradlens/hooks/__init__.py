"""Hooks on modules, tensors and ``backward``, and the private names of torch."""
