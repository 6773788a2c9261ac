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


@registry.register
class Summary(TensorDict):
    """A container of statistics, as `td.describe()` returns it. It prints as a table with one line for each leaf.

    Each leaf of `td` is replaced by a container of scalars: `summary["obs", "mean"]`.

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
        rows = list(_list_rows(self))
        if not rows or any(value.dim() for _, values in rows for value in values.values()):
            # Not the statistics of one container; for example, a stack of several summaries.
            return super().__repr__()
        lines = [["", *_list_titles(rows)], *_format_lines(rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines
        )

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str | None]:
        """Return the HTML table for notebooks."""
        rows = list(_list_rows(self))
        if not rows or any(value.dim() for _, values in rows for value in values.values()):
            return {"text/plain": repr(self), "text/html": self._repr_html_()}
        head = "".join(f"<th>{html.escape(title)}</th>" for title in ["", *_list_titles(rows)])
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in _format_lines(rows)
        )
        table = f'<table style="text-align: right"><tr>{head}</tr>{body}</table>'
        return {"text/plain": repr(self), "text/html": f'<div class="tensordict">{table}</div>'}


def _list_rows(node: Contract, path: Path = ()) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the dotted key of each described leaf, with its statistics."""
    entries = node._entries
    if values := {name: value for name, value in entries.items() if not isinstance(value, Contract)}:
        yield ".".join(path), values
    for name, value in entries.items():
        if isinstance(value, Contract) and not value._is_non_tensor:
            yield from _list_rows(value, (*path, name))


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
