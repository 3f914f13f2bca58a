"""What PyTorch reports to gradlens: hooks on modules, on the loss's graph and on ``backward``."""
