"""Print lines of text for people, styled by rich on a terminal and plain elsewhere; used by all commands."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import reprlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

from tensordict.io.values import NotJson, encode_plainly
from tensordict.looking.markup import count_text as count_text
from tensordict.looking.markup import size_text as size_text
from tensordict_cli.text import printable

# Pieces of text, each with its style for rich; "" for no style.
Line = Sequence[tuple[str, str]]

NAME, KIND, SHAPE, QUIET, VALUE, GOOD, BAD = "bold", "magenta", "cyan", "dim", "green", "green", "red"

_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = 60


def show(lines: Iterable[Line], paged: bool = False) -> None:
    """Print the lines.

    Args:
        lines: what to print.
        paged: use a pager when the lines do not fit on the terminal.
    """
    if paged and sys.stdout.isatty():
        kept = list(lines)
        size = shutil.get_terminal_size()
        rows = sum(1 + sum(len(text) for text, _ in line) // size.columns for line in kept)
        if rows >= size.lines and (command := find_pager()):
            _page(kept, command)
            return
        lines = kept
    _print(lines, sys.stdout)


def find_pager() -> str:
    """Return the command that pages long output, as git does: `$PAGER`, else less if installed, else ""."""
    command = os.environ.get("PAGER", "less" if shutil.which("less") else "")
    return "" if command.strip() in ("", "cat") or os.environ.get("TERM") == "dumb" else command


def _page(lines: Iterable[Line], command: str) -> None:
    # Git's settings: less shows colors, and leaves its text on the screen when it ends.
    environment = {"LESS": "FRX", "LV": "-c", **os.environ}
    text = io.StringIO()
    _print(lines, text)
    with subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, encoding="utf-8", env=environment) as process:
        given: str | None = text.getvalue()
        while process.poll() is None:
            # Ctrl-C is meant for the pager, which shares the terminal.
            with contextlib.suppress(KeyboardInterrupt):
                process.communicate(given)
            given = None


def _print(lines: Iterable[Line], file: IO[str]) -> None:
    console = _make_console(file)
    if console is None:
        for line in lines:
            print("".join(text for text, _ in line).rstrip(), file=file)
        return
    text = importlib.import_module("rich.text").Text
    for line in lines:
        console.print(text.assemble(*line))


def align(rows: Sequence[Line]) -> list[Line]:
    """Pad the cells of all rows to columns. A column that is empty in every row is left out."""
    columns = max(map(len, rows), default=0)
    widths = [max(len(row[column][0]) for row in rows if column < len(row)) for column in range(columns)]
    lines: list[Line] = []
    for row in rows:
        end = max((column for column, (text, _) in enumerate(row, 1) if text), default=0)
        cells = [(text.ljust(width + 2), style) for (text, style), width in zip(row[:end], widths) if width]
        lines.append([*cells[:-1], (cells[-1][0].rstrip(), cells[-1][1])] if cells else [])
    return lines


def shorten(value: object) -> str:
    """Return a short text for a value."""
    return printable(_shorten.repr(value))


def json_value(value: object) -> object:
    """Convert a value to JSON; `None` when JSON cannot hold it, as for a pickled value."""
    try:
        return encode_plainly(value)
    except NotJson:
        return None


def key_text(key: Sequence[str]) -> str:
    """Return a nested key in Python syntax."""
    return printable(repr(key[0] if len(key) == 1 else tuple(key))) if key else "the root"


def number_text(value: object) -> str:
    """Format a number with a few digits; "" for `None`."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)


def json_number(value: Any) -> Any:
    """Convert a number to JSON: `None` when it is not finite, a list of two parts when it is complex."""
    if isinstance(value, complex):
        return [json_number(value.real), json_number(value.imag)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_console(file: IO[str]) -> Any:
    """Return a rich console; `None` if the output is not a terminal, color is switched off, or rich is missing."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(file=file, force_terminal=True, highlight=False, soft_wrap=True)
