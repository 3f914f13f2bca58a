"""Which sample each row of a loss's graph belongs to."""
