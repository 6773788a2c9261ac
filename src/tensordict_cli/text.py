"""Text for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text from a file without what would change the terminal or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
