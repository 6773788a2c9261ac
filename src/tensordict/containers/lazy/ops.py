"""Lazy stacks as containers of entries: writing, updating, applying, selecting and joining, member by member."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.containers.lazy.core import LazyCore, elements_of
from tensordict.containers.lazy.members import pieces_of
from tensordict.core import foreach, registry, settings
from tensordict.core.context import same_memory
from tensordict.core.contract import Contract, is_node
from tensordict.core.errors import ShapeError
from tensordict.core.keys import Path, joined, path_of
from tensordict.ops.locking import raise_locked
from tensordict.ops.numbers import stored
from tensordict.ops.stacking import cat_containers, stack_containers
from tensordict.ops.writing import _Copies, _Update, check_way

if TYPE_CHECKING:
    pass


_SCALAR = torch.Size(())
_NUMBERS = frozenset((bool, int, float, complex))


class LazyOps(LazyCore):
    """What is written is split along the stack dim, what is selected or applied is done by each member."""

    # --- writing ----------------------------------------------------------------------------------------------------

    def _write_name(self, name: str, item: Any, non_blocking: bool = False, path: Path | None = None) -> None:
        if type(item) not in (list, tuple):
            self._refuse_locked_members(path or (name,))
            super()._write_name(name, item, non_blocking, path)
            return
        self._write(path or (name,), item, non_blocking, name)

    def _refuse_locked_members(self, path: Path) -> None:
        """A stack that is not locked may have members that are: before the first of them is written."""
        for member in self._entries.containers:
            if member._locked:
                raise_locked(f"set the entry {joined(path)!r}")

    def _write(self, path: Path, item: Any, non_blocking: bool = False, name: str | None = None) -> None:
        if len(path) == 1 and type(item) not in (list, tuple):
            self._write_name(path[0], item, non_blocking)
            return
        store = self._entries
        self._refuse_locked_members(path)
        # Every value is checked before the first is written; `name` is what is left of a path that began further up.
        target = path if name is None else (name,)
        if not store.containers:
            super()._write(target, item, non_blocking)
            return
        pieces = self._split(item, path, False)
        values = []
        for member, piece in zip(store.containers, pieces, strict=True):
            check_way(member, target, path)
            values.append(member._admit(piece, path, non_blocking))
        for member, value in zip(store.containers, values, strict=True):
            member._write(target, value)

    def _graft(self, name: str, rest: Path, item: Any, path: Path, non_blocking: bool) -> None:
        # Members that have an entry of this name, which others lack, keep it.
        self._write((name, *rest), item, non_blocking)

    def _split(self, item: Any, path: Path, in_place: bool) -> Sequence[Any]:
        """The pieces of a value that belong to the members; a number goes to all when it is copied in place."""
        store = self._entries
        if isinstance(item, Mapping) and not isinstance(item, Contract):
            columns = {key: self._split(value, (*path, *path_of(key)), in_place) for key, value in item.items()}
            return [{key: column[i] for key, column in columns.items()} for i in range(len(store.containers))]
        if type(item) in (list, tuple):
            return self._split_list(item, path, in_place)
        if not isinstance(item, (Tensor, Contract)):
            item = stored(item, path, self._batch_size, None)
        if in_place and isinstance(item, Tensor) and not item.ndim:
            return [item] * len(store.containers)
        item = store.taken_in(item)
        if isinstance(item, LazyCore) and item._entries.dim == store.dim and item._batch_size == self._batch_size:
            return item._entries.containers
        return pieces_of(self._admit(item, path), store.dim, len(store.containers))

    def _split_list(self, item: Any, path: Path, in_place: bool) -> Sequence[Any]:
        """The pieces of a list, whose levels are the first batch dims as in `Tensor.tolist`.

        Numbers are of one dtype, as those of a tensor; beside what is no number they are values.
        """
        dim, size = self._entries.dim, self._batch_size
        found = set(_leaf_kinds(item))
        stacks = type(item) is list and settings.list_to_stack()
        # Where lists make stacks, tuples are values, and so is what stands beside a list of another depth.
        numeric = all(map(_is_numeric, found)) and not (stacks and not _is_array(item))
        if not numeric and not stacks:
            # What makes no stack in any container is one value, and belongs to every member.
            return [item] * len(self._entries.containers)
        if numeric and found <= _NUMBERS:
            item = _of_one_dtype(item, path)
        columns = _columns(list(item), dim, size, path)
        if not numeric:
            columns = _held(columns, size[:dim] + size[dim + 1 :])
        values = [
            torch.stack(column) if dim and isinstance(column, list) and _tensors(column) else column
            for column in columns
        ]
        return [
            stored(value, path, _SCALAR, None) if in_place and not isinstance(value, (Tensor, Contract)) else value
            for value in values
        ]

    def _plan_update(self, source: Any, prefix: Path, plan: _Update) -> None:
        members = self._entries.containers
        if not members:
            super()._plan_update(source, prefix, plan)
            return
        for member, piece in zip(members, self._source_pieces(source, prefix, plan.inplace), strict=True):
            member._plan_update(piece, prefix, plan)

    def _plan_copies(self, source: Any, prefix: Path, targets: _Copies, values: list[Any]) -> None:
        pieces = self._source_pieces(source, prefix, True)
        for member, piece in zip(self._entries.containers, pieces, strict=True):
            member._plan_copies(piece, prefix, targets, values)

    def _source_pieces(self, source: Any, prefix: Path, in_place: bool) -> Sequence[Any]:
        """What an update reads from, one for each member."""
        if isinstance(source, Contract) and source._batch_size == self._batch_size and self._entries.hook_in is None:
            return self._pieces_of(source)
        return self._split(dict(source.items()), prefix, in_place)

    def _copy_into(self, name: str, item: Any, path: Path | None, non_blocking: bool) -> None:
        if name not in self._entries:
            raise self._missing(name)
        targets = _Copies()
        values: list[Any] = []
        self._plan_copies({name: item}, path[:-1] if path else (), targets, values)
        foreach.copy_(targets, values, non_blocking)
        for write in targets.writes:
            write()

    def _copy_at(self, name: str, value: Any, index: Any, path: Path, non_blocking: bool) -> None:
        inner = self._node(name)
        if is_node(inner) and not inner._is_non_tensor:
            inner[index] = value
        else:
            self._plan_at(name, value, index, path).run()

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


def _is_array(items: list[Any]) -> bool:
    """Whether lists are nested to one depth, without tuples."""
    nested = [item for item in items if type(item) in (list, tuple)]
    return not nested or (len(nested) == len(items) and all(type(item) is list and _is_array(item) for item in nested))


def _leaf_kinds(item: Any) -> Iterator[type[Any]]:
    """The classes of what nested lists hold; all tensors count as one."""
    for value in item:
        if isinstance(value, (list, tuple)):
            yield from _leaf_kinds(value)
        else:
            yield Tensor if isinstance(value, (Tensor, Contract)) else type(value)


def _is_numeric(kind: type[Any]) -> bool:
    """Whether the instances of a class become tensors, or are containers."""
    return kind in _NUMBERS or kind is Tensor or (hasattr(kind, "__array__") and not issubclass(kind, (str, bytes)))


def _held(columns: list[Any], size: torch.Size) -> list[Any]:
    """The pieces of a list of values in holders: stacks where all are lists, as `NonTensorStack.from_list` has it."""
    if all(isinstance(column, list) for column in columns):
        return [registry.lookup("NonTensorStack").from_list(column) for column in columns]
    hold = registry.lookup("NonTensorData")._of
    return [column if isinstance(column, Contract) else hold(column, size) for column in columns]


def _of_one_dtype(item: Any, path: Path) -> Any:
    """Nested lists of numbers as a tensor; where rows are of different lengths, as lists of tensors of one dtype."""
    try:
        return torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError):
        rows = [stored(row, path, _SCALAR, None) for row in item]
        if not _tensors(rows):
            return item
        dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
        return [row.to(dtype) for row in rows]


def _tensors(column: list[Any]) -> bool:
    return all(isinstance(item, Tensor) for item in column)


def _columns(item: list[Any], dim: int, size: torch.Size, path: Path) -> list[Any]:
    """The pieces along `dim` of nested lists whose levels are the dims of `size`."""
    if len(item) != size[0]:
        raise ShapeError(
            f"entry {joined(path)!r}: a list for a batch of size {list(size)} has {size[0]} items, got {len(item)}"
        )
    if dim == 0:
        return item
    rows = []
    for row in item:
        if isinstance(row, Tensor):
            rows.append(list(row.unbind(dim - 1)))
        elif isinstance(row, (list, tuple)):
            rows.append(_columns(list(row), dim - 1, size[1:], path))
        else:
            raise TypeError(f"entry {joined(path)!r}: a list of {dim + 1} levels is needed, got {type(row).__name__}")
    return [list(column) for column in zip(*rows, strict=True)]
