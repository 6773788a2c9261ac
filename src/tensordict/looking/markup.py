"""Build pieces of HTML: escaped text, readable sizes and numbers, and the style sheet; used by trees and reports."""

from __future__ import annotations

import functools
import html
from collections.abc import Iterable, Sequence
from importlib.resources import files


def escape(value: object) -> str:
    """Escape the text of a value for HTML."""
    return html.escape(printable(str(value)))


def printable(text: str) -> str:
    """Escape the characters that XML and terminals cannot hold; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def span(name: str, text: object) -> str:
    """Return a `<span>` of the class `td-name` with this text."""
    return f'<span class="td-{name}">{escape(text)}</span>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """Return an HTML table of text cells."""
    cells = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<table class="td-table {name}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'


def note(text: str) -> str:
    """Return a `<div>` with a remark."""
    return f'<div class="td-note">{escape(text)}</div>'


def pictures(urls: Sequence[str], more: int) -> str:
    """Return images by their data URLs in one line, with the number of those that are not shown."""
    cut = span("more", f" … {count_text(more, 'more image')}") if more > 0 else ""
    images = [f'<img src="{html.escape(url)}" alt="image {n}" title="image {n}"/>' for n, url in enumerate(urls)]
    return f"<div>{''.join(images)}{cut}</div>"


def first_values(numbers: Sequence[object], count: int) -> str:
    """Return the first of `count` numbers in one line."""
    more = ", …" if count > len(numbers) else ""
    return f"<div>{span('name', 'first')} {span('values', ', '.join(map(number_text, numbers)) + more)}</div>"


def shorten(text: str, most: int) -> str:
    """Cut a text after `most` characters, and say how many were cut."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def size_text(nbytes: float) -> str:
    """Format a number of bytes with its unit."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def shape_text(shape: Iterable[int]) -> str:
    """Format a shape, with `*` for dims of differing sizes, which are -1."""
    return f"[{', '.join('*' if size == -1 else str(size) for size in shape)}]"


def count_text(count: int, what: str) -> str:
    """Format a count with its noun, which gets a plural "s" unless the count is 1."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def number_text(value: object) -> str:
    """Format a number with at most five digits; integers keep all of theirs."""
    if isinstance(value, complex):
        return f"{value:.4g}"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


@functools.cache
def read_style(name: str) -> str:
    """Return a style sheet of this folder."""
    return files(__package__).joinpath(name).read_text("utf-8")
