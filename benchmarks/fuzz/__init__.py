"""Random training loops, each with gradlens and without."""
