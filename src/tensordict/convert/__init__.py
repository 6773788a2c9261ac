"""Containers from foreign structures, one file per kind."""
