"""What was recorded, in memory and on disk; needs numpy alone."""
