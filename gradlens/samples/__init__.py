"""How many samples a batch has, and which of them each row belongs to."""
