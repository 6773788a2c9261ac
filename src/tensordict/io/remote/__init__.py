"""Saves behind URLs: what is fetched, cached and uploaded."""
