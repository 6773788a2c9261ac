"""Arithmetic, reductions, comparison, gradients, and torch's own functions."""
