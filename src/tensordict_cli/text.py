"""Escape text for terminals; used by all commands."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape the characters that could control the terminal or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
