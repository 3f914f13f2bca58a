"""Facts of a run, which are recorded cheaply at every step, whatever is tracked."""
