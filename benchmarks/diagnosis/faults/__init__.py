"""Ways to have each fault of the catalogue, which are injected into the suite's problems."""
