"""Saves, in memory and on disk: the description of containers, state dicts, formats, stores and remote storage."""
