"""Lazy stacks joined with others, and brought up to date after a block, member by member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict.containers.lazy.core import LazyCore, elements_of
from tensordict.core.context import same_memory
from tensordict.core.errors import ShapeError
from tensordict.core.keys import path_of
from tensordict.ops.stacking import cat_containers, stack_containers


class LazyOps(LazyCore):
    """Joining lazy stacks keeps them lazy where their members allow it."""

    def _write_back(self, restored: Any, leaves: set[Any], gone_nodes: set[Any]) -> None:
        if restored._batch_size != self._batch_size or not self._entries.containers:
            super()._write_back(restored, leaves, gone_nodes)
            return
        for member, piece in zip(self._entries.containers, self._pieces_of(restored), strict=True):
            if isinstance(piece, LazyCore) and not isinstance(member, LazyCore):
                piece = _as_written(member, piece)
            member._write_back(piece, set(member.keys(True, True)), gone_nodes)

    # --- joining ----------------------------------------------------------------------------------------------------

    def _stacked_with(self, items: Sequence[Any], dim: int) -> Any:
        store = self._entries
        if not store.containers or not all(
            isinstance(item, LazyCore) and item._entries.dim == store.dim and item._batch_size == self._batch_size
            for item in items
        ):
            return None
        inner, after = (dim, store.dim + 1) if dim <= store.dim else (dim - 1, store.dim)
        columns = zip(*[item._entries.containers for item in items], strict=True)
        out = self._like([stack_containers(list(column), inner) for column in columns], after)
        if any(item._entries.name != store.name for item in items):
            out._entries.name = None
        return out

    def _concatenated_with(self, items: Sequence[Any], dim: int) -> Any:
        store = self._entries
        columns = [self._pieces_of(item) for item in items]
        if dim == store.dim and any(columns):
            return self._like([member for column in columns for member in column])
        if not store.containers:
            return None
        if len(set(map(len, columns))) > 1:
            shown = ", ".join(str(list(item._batch_size)) for item in items)
            raise ShapeError(f"cat along dim {dim} needs lazy stacks of the same number of members, got {shown}")
        inner = dim - (dim > store.dim)
        return self._like([cat_containers(list(row), inner) for row in zip(*columns, strict=True)])


def _as_written(member: Any, stack: Any) -> Any:
    """A lazy stack of the elements of `member` as a dense container, in which the leaves that are views of the
    member's are these themselves."""
    elements, parts = elements_of(member), elements_of(stack)
    out = stack.empty(recurse=True)._dense()
    for key in stack.keys(True, True):
        if member._has(path_of(key)) and all(
            same_memory(element.get(key), part.get(key)) for element, part in zip(elements, parts, strict=True)
        ):
            out._write(path_of(key), member.get(key))
        else:
            out._write(path_of(key), stack.get(key))
    return out
