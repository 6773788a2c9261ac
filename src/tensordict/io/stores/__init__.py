"""Stores of arrays behind containers: the interface, and one file per kind of store."""
