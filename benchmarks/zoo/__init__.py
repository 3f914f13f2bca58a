"""Many small networks on which gradlens is compared with one backward pass for each sample."""
