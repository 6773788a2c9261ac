"""Summary: the result of `describe`, a container of statistics that prints as a table."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.core import registry
from tensordict.core.contract import Contract
from tensordict.core.keys import Path
from tensordict.looking.texts import format_counts


@registry.register
class Summary(TensorDict):
    """A container of statistics, as `td.describe()` returns it. It prints as a table with one line for each leaf.

    Each leaf of `td` is replaced by a container of scalars: `summary["obs", "mean"]`. Below the table, it lists texts.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> summary = TensorDict(a=torch.arange(5), b={"c": torch.ones(3)}).describe(percentiles=[0.5])
        >>> print(summary)
             count  mean      std  min  50%  max  nan  zero
        a        5     2  1.58114    0    2    4    0   0.2
        b.c      3     1        0    1    1    1    0     0
    """

    _stored_as = "TensorDict"

    def __repr__(self) -> str:
        rows = self._rows()
        texts = list(_list_texts(self))
        if not rows and not texts:
            return super().__repr__()
        lines = [["", *_list_titles(rows)], *_format_lines(rows)] if rows else []
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            [
                *(
                    "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
                    for line in lines
                ),
                *texts,
            ]
        )

    def _rows(self) -> list[tuple[str, dict[str, Tensor]]]:
        """Return the rows of the table; none for the statistics of several containers, such as a stack of summaries."""
        rows = list(_list_rows(self))
        return [] if any(value.dim() for _, values in rows for value in values.values()) else rows

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str | None]:
        """Return the HTML table for notebooks."""
        rows, texts = self._rows(), list(_list_texts(self))
        if not rows and not texts:
            return {"text/plain": repr(self), "text/html": self._repr_html_()}
        head = "".join(f"<th>{html.escape(title)}</th>" for title in (["", *_list_titles(rows)] if rows else []))
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in _format_lines(rows)
        )
        table = f'<table style="text-align: right"><tr>{head}</tr>{body}</table>'
        below = "".join(f"<div>{html.escape(line)}</div>" for line in texts)
        return {"text/plain": repr(self), "text/html": f'<div class="tensordict">{table}{below}</div>'}


def _list_rows(node: Contract, path: Path = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the dotted key of each described leaf, with its statistics."""
    entries = node._entries
    if _counts_of(node) is None and (
        values := {name: value for name, value in entries.items() if not isinstance(value, Contract)}
    ):
        yield ".".join(path), values
    for name, value in entries.items():
        if isinstance(value, Contract) and not value._is_non_tensor:
            yield from _list_rows(value, (*path, name))


def _list_texts(node: Contract, path: Path = ()) -> Iterator[str]:
    """Yield a line for each described entry of texts."""
    for name, value in node._entries.items():
        if isinstance(value, Contract) and not value._is_non_tensor:
            if (counts := _counts_of(value)) is None:
                yield from _list_texts(value, (*path, name))
            else:
                yield f"{'.'.join((*path, name))}: {format_counts(counts)}"


def _counts_of(node: Contract) -> dict[str, int] | None:
    """Return the counts of the texts of a described entry; `None` for any other container."""
    held = node._entries.get("counts")
    counts = held._unwrap_value() if isinstance(held, Contract) and held._is_non_tensor else None
    return counts if isinstance(counts, dict) else None


def _list_titles(rows: list[tuple[str, dict[str, Tensor]]]) -> list[str]:
    """Return the names of all statistics, in the order of the leaf with most (complex leaves have no minimum)."""
    longest = max([values for _, values in rows], key=len)
    return list(dict.fromkeys([*longest, *(name for _, values in rows for name in values)]))


def _format_lines(rows: list[tuple[str, dict[str, Tensor]]]) -> list[list[str]]:
    titles = _list_titles(rows)
    return [
        [key, *(_format_cell(values[title].item()) if title in values else "" for title in titles)]
        for key, values in rows
    ]


def _format_cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (float, complex)) else str(value)
