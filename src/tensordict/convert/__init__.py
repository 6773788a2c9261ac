"""Conversion between containers and foreign structures: one file for each format or library."""
