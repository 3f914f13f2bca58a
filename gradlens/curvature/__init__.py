"""Curvature of the mini-batch loss: products, eigenvalues, traces, diagonals and densities."""
