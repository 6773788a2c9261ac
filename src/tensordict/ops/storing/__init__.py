"""Containers in files, stores, shared memory and tables."""
