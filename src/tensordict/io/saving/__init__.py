"""Saves on the file system: their transaction, locks, checksums, checks and comparison."""
