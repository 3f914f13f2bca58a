"""One batch from several parts: of micro-batches, or of processes."""
