"""Text for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """Text from a file without what would change the terminal or break the line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
