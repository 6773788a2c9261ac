"""Read the first rows of saved tensors and values, for `tensordict inspect --head`; the other rows stay unread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensordict.io.formats.stack_columns import split_ragged
from tensordict.io.saving.comparing import OPAQUE, open_source, read_piece
from tensordict.io.specification import DeferredValue, LeafSpec, Specification
from tensordict.looking.read_limits import first_index
from tensordict_cli.runners.terminal import QUIET, VALUE, Line, json_number, json_value, number_text, shorten

# At most this many elements of a row are printed for people.
_MOST = 8


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a tensor, or a whole tensor that has no dims.

    shape: the shape of the whole row.
    elements: the elements of the row, or only the first ones, in one dim; `None` when torch cannot compute with the
    dtype.
    """

    shape: tuple[int, ...]
    elements: Tensor | None

    def as_json(self) -> Any:
        """Return the whole row as nested lists, with `None` for numbers that are not finite."""
        return None if self.elements is None else _clean_numbers(self.elements.reshape(self.shape).tolist())

    def text(self) -> str:
        """Return the first elements as text."""
        if self.elements is None:
            return "no numbers of this dtype can be computed with"
        shown = [number_text(value) for value in self.elements.tolist()]
        return " ".join(shown) + (" …" if math.prod(self.shape) > len(shown) else "")


def read_head(node: LeafSpec | Specification, count: int, whole: bool) -> list[Any]:
    """Return the first `count` rows along the first dim as `Row`s, or the first values.

    whole: read whole rows; otherwise only their first elements.
    """
    if isinstance(node, LeafSpec):
        return _read_ragged_rows(node, count, whole) if node.ragged else _read_rows(node, count, whole)
    if isinstance(node.value, DeferredValue):
        return list(node.value.read(count))
    return node.value[:count] if node.stack_dim is not None and isinstance(node.value, list) else [node.value]


def format_head(node: LeafSpec | Specification, head: list[Any]) -> list[Line]:
    """Return the cells of one line for each row: its number, its shape if rows differ in shape, and its elements."""
    if isinstance(node, Specification):
        return [[(f"  {at}", QUIET), (shorten(value), VALUE)] for at, value in enumerate(head)]
    if not node.shape:
        return [[("  ", QUIET), (row.text(), VALUE)] for row in head]
    return [
        [(f"  {at}", QUIET), (str(list(row.shape)) if node.ragged else "", QUIET), (row.text(), VALUE)]
        for at, row in enumerate(head)
    ]


def head_to_json(node: LeafSpec | Specification, head: list[Any]) -> list[Any]:
    """Return the head as JSON."""
    return [json_value(value) if isinstance(node, Specification) else value.as_json() for value in head]


def _read_rows(leaf: LeafSpec, count: int, whole: bool) -> list[Row]:
    source, shape = open_source(leaf), leaf.shape
    rows = shape[1:]
    if leaf.dtype in OPAQUE:
        return [Row(rows, None)] * min(count, shape[0] if shape else 1)
    if not shape:
        return [Row((), read_piece(source, ()).flatten())][:count]
    if not (number := min(count, shape[0])):
        return []
    read = read_piece(source, (slice(0, number), *(() if whole else first_index(rows, _MOST))))
    return [Row(rows, row.flatten()[: None if whole else _MOST]) for row in read.unbind(0)]


def _read_ragged_rows(leaf: LeafSpec, count: int, whole: bool) -> list[Row]:
    flat, sizes, _ = split_ragged(open_source(leaf))
    found: list[Row] = []
    start = 0
    for shape in map(tuple, sizes[:count].tolist()):
        stop = start + math.prod(shape)
        shown = slice(start, stop if whole else min(stop, start + _MOST))
        found.append(Row(shape, read_piece(flat, (shown,))))
        start = stop
    return found


def _clean_numbers(value: Any) -> Any:
    return [_clean_numbers(item) for item in value] if isinstance(value, list) else json_number(value)
