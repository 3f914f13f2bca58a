"""cockpit's package of utilities."""
