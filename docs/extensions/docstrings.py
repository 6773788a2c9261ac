"""Rewrites the forms in docstrings of this package that Sphinx would misread, before it reads them."""

from __future__ import annotations

import re
from itertools import takewhile

from sphinx.application import Sphinx

# `Tensor`s: reStructuredText allows no letter after the closing backquote.
_QUOTED = re.compile(r"(``[^`]+``|`[^`]+`)(\w?)")
_SECTION = re.compile(r"(Args|Returns):$")


def rewrite(app: Sphinx, what: str, name: str, found: object, options: object, lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place."""
    lines[:] = add_spaces("\n".join(lines)).split("\n")
    at = 0
    while at < len(lines):
        if section := _SECTION.match(lines[at]):
            inside = list(takewhile(lambda line: not line or line.startswith(" "), lines[at + 1 :]))
            new = _arguments(inside) if section[1] == "Args" else [":returns:", *inside]
            lines[at + (section[1] == "Args") : at + 1 + len(inside)] = new
        at += 1
    if what in ("property", "attribute"):
        # Napoleon would take the text before a colon in the first line for a type.
        before, colon, behind = lines[0].partition(": ")
        lines[:1] = [before + colon.strip(), behind] if colon else [before]


def add_spaces(text: str) -> str:
    """Separate quoted code from a letter that follows it, with an escaped space."""
    return _QUOTED.sub(lambda quoted: quoted[1] + (rf"\ {quoted[2]}" if quoted[2] else ""), text)


def _arguments(lines: list[str]) -> list[str]:
    """Return the entries of a section of arguments, with the names of each in one line and asterisks escaped."""
    found: list[str] = []
    for line in lines:
        if found and found[-1].endswith(",") and ":" not in found[-1]:
            line = f"{found.pop()} {line.strip()}"
        found.append(line)
    return [re.sub(r"^( +)([*\w, ]+):", lambda names: f"{names[1]}{_escape(names[2])}:", line) for line in found]


def _escape(names: str) -> str:
    return names.replace("*", r"\*")


def setup(app: Sphinx) -> dict[str, bool]:
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", rewrite, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
