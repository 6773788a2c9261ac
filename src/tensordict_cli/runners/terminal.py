"""Lines of text for people: styled by rich on a terminal, plain everywhere else."""

from __future__ import annotations

import importlib.util
import os
import reprlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tensordict.io.values import NotJson, plain
from tensordict_cli.text import printable

# Pieces of text with the style that rich gives them; "" for none.
Line = Sequence[tuple[str, str]]

NAME, KIND, SHAPE, QUIET, VALUE, GOOD, BAD = "bold", "magenta", "cyan", "dim", "green", "green", "red"

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 60


def show(lines: Iterable[Line]) -> None:
    """Print the lines."""
    console = _console()
    if console is None:
        for line in lines:
            print("".join(text for text, _ in line).rstrip())
        return
    from rich.text import Text

    for line in lines:
        console.print(Text.assemble(*line))


def aligned(rows: Sequence[Line]) -> list[Line]:
    """The rows with their cells padded to columns; a column that is empty in every row is left out."""
    columns = max(map(len, rows), default=0)
    widths = [max(len(row[column][0]) for row in rows if column < len(row)) for column in range(columns)]
    lines: list[Line] = []
    for row in rows:
        end = max((column for column, (text, _) in enumerate(row, 1) if text), default=0)
        cells = [(text.ljust(width + 2), style) for (text, style), width in zip(row[:end], widths) if width]
        lines.append([*cells[:-1], (cells[-1][0].rstrip(), cells[-1][1])] if cells else [])
    return lines


def shortened(value: object) -> str:
    """A value in a few words."""
    return printable(_shorten.repr(value))


def json_value(value: object) -> object:
    """A value for JSON; `None` when it has no form there, as one that is pickled."""
    try:
        return plain(value)
    except NotJson:
        return None


def key_text(key: Sequence[str]) -> str:
    """A nested key as it is written in Python."""
    return printable(repr(key[0] if len(key) == 1 else tuple(key))) if key else "the root"


def size_text(nbytes: float) -> str:
    """A number of bytes as people read it."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def count_text(count: int, what: str) -> str:
    """A number with its noun."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def has_tqdm() -> bool:
    """Whether progress can be shown."""
    return importlib.util.find_spec("tqdm") is not None


def _console() -> Any:
    """What prints styled text; `None` unless somebody watches, wants it, and has rich installed."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(highlight=False, soft_wrap=True)
