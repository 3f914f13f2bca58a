"""BackPACK's extensions on a user's model."""
