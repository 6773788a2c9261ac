"""Modules that all others build on: the contract of containers, keys, indices, shapes, settings, errors."""
