"""Saves on the file system: transactions, locks, checksums, verification and comparison."""
