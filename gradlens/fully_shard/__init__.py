"""Models that ``fully_shard`` was called with."""
