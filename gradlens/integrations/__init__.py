"""Frameworks that run the training loop; each module needs its own framework."""
