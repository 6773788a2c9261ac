"""The containers, and what only they are made of."""
