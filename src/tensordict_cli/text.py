"""Escape text for terminals, and suggest names; used by all commands. Imports neither torch nor `tensordict`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The largest number of names that a hint lists.
_MOST = 16


def printable(text: str) -> str:
    """Escape the characters that could control the terminal or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def suggest(word: str, known: Iterable[str], above: str = "") -> str:
    """Return a hint for an unknown word: the closest known word, behind `above`, or a list of the known words."""
    names = list(known)
    close = difflib.get_close_matches(word, names, 1)
    shown = ", ".join(names[:_MOST])
    return f"did you mean {above + close[0]!r}?" if close else f"there are {shown or 'no entries'}"
