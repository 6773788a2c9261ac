"""Tensors over files and over memory that processes share: how they are mapped, read, written and pickled."""
