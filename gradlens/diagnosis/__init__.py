"""Says what is wrong with a run, from what was recorded of it; needs no torch."""
