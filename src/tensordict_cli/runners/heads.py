"""The first rows of tensors and values that were saved; nothing else of them is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensordict.io.columns import taken
from tensordict.io.comparing import OPAQUE, read_piece, source_of
from tensordict.io.specification import LeafSpec, Specification, Unread
from tensordict_cli.runners.terminal import QUIET, VALUE, Line, json_number, json_value, number_text, shortened

# How many elements of a row are printed for people.
_MOST = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a tensor, or all of one without dims.

    shape: that of the whole row.
    elements: those of the row, or the first of them, in one dim; `None` for a dtype that torch has no numbers of.
    """

    shape: tuple[int, ...]
    elements: Tensor | None

    def as_json(self) -> Any:
        """The whole row as nested lists; `None` for numbers that are not finite."""
        return None if self.elements is None else _nested(self.elements.reshape(self.shape).tolist())

    def text(self) -> str:
        """The first elements."""
        if self.elements is None:
            return "no numbers of this dtype can be computed with"
        shown = [number_text(value) for value in self.elements.tolist()]
        return " ".join(shown) + (" …" if math.prod(self.shape) > len(shown) else "")


def head_of(node: LeafSpec | Specification, count: int, whole: bool) -> list[Any]:
    """The first `count` rows along the first dim, as `Row`s, or the first values.

    whole: read whole rows, and not only their first elements.
    """
    if isinstance(node, LeafSpec):
        return _ragged_rows(node, count, whole) if node.ragged else _rows(node, count, whole)
    if isinstance(node.value, Unread):
        return list(node.value.read(count))
    return node.value[:count] if node.stack_dim is not None and isinstance(node.value, list) else [node.value]


def head_lines(node: LeafSpec | Specification, head: list[Any]) -> list[Line]:
    """The cells of a line for each row: its number, its shape where rows differ, and what is in it."""
    if isinstance(node, Specification):
        return [[(f"  {at}", QUIET), (shortened(value), VALUE)] for at, value in enumerate(head)]
    if not node.shape:
        return [[("  ", QUIET), (row.text(), VALUE)] for row in head]
    return [
        [(f"  {at}", QUIET), (str(list(row.shape)) if node.ragged else "", QUIET), (row.text(), VALUE)]
        for at, row in enumerate(head)
    ]


def head_json(node: LeafSpec | Specification, head: list[Any]) -> list[Any]:
    """The same for JSON."""
    return [json_value(value) if isinstance(node, Specification) else value.as_json() for value in head]


def _rows(leaf: LeafSpec, count: int, whole: bool) -> list[Row]:
    source, shape = source_of(leaf), leaf.shape
    rows = shape[1:]
    if leaf.dtype in OPAQUE:
        return [Row(rows, None)] * min(count, shape[0] if shape else 1)
    if not shape:
        return [Row((), read_piece(source, ()).flatten())][:count]
    if not (number := min(count, shape[0])):
        return []
    read = read_piece(source, (slice(0, number), *(() if whole else _first(rows))))
    return [Row(rows, row.flatten()[: None if whole else _MOST]) for row in read.unbind(0)]


def _ragged_rows(leaf: LeafSpec, count: int, whole: bool) -> list[Row]:
    flat, sizes, _ = taken(source_of(leaf))
    found: list[Row] = []
    start = 0
    for shape in map(tuple, sizes[:count].tolist()):
        stop = start + math.prod(shape)
        shown = slice(start, stop if whole else min(stop, start + _MOST))
        found.append(Row(shape, read_piece(flat, (shown,))))
        start = stop
    return found


def _first(shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """An index that takes the first elements of a tensor of this shape, and few others."""
    if not shape:
        return ()
    inner = math.prod(shape[1:])
    if not inner:
        return ()
    return (0, *_first(shape[1:])) if inner >= _MOST else (slice(0, -(-_MOST // inner)),)


def _nested(value: Any) -> Any:
    return [_nested(item) for item in value] if isinstance(value, list) else json_number(value)
