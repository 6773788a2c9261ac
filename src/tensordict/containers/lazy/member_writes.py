"""Writing to lazy stacks: what is written is split along the stack dim, and each member gets its piece."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.lazy.core import LazyCore
from tensordict.containers.lazy.dims import LazyDims
from tensordict.containers.lazy.members import pieces_of
from tensordict.core import makers, settings
from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.indices import checked_size, is_beyond, leaf_index
from tensordict.core.keys import Path, joined, path_of
from tensordict.ops.entries.assigning import Assign, AssignWithin, drop_leading_dims, fit_value, refuse_container
from tensordict.ops.entries.locking import raise_locked
from tensordict.ops.entries.numbers import make_entry
from tensordict.ops.entries.write_plans import Copy, Resize, Write, check_expandable
from tensordict.ops.entries.writing import check_path_through

_SCALAR = torch.Size(())
_NUMBERS = frozenset((bool, int, float, complex))


class LazyWrites(LazyDims):
    """Writing to lazy stacks, member by member; all members are checked before the first is written."""

    def _write_name(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> None:
        path = path or (name,)
        if type(item) in (list, tuple) and self._entries.containers:
            self._write_to_members((name,), item, path, non_blocking)
        else:
            self._refuse_locked_members(path)
            super()._write_name(name, item, non_blocking, path)

    def _write_to_members(self, target: Path, item: object, path: Path, non_blocking: bool) -> None:
        """Store an entry at `target`; `path` leads there from where the write began."""
        self._refuse_locked_members(path)
        members = self._entries.containers
        values = []
        for member, piece in zip(members, self._split(item, path, False), strict=True):
            check_path_through(member, target, path)
            values.append(member._admit(piece, path, non_blocking))
        with self._at_once():
            for member, value in zip(members, values, strict=True):
                member._write(target, value)

    def _refuse_locked_members(self, path: Path) -> None:
        """A stack that is not locked may have members that are."""
        for member in self._entries.containers:
            if member._locked:
                raise_locked(f"set the entry {joined(path)!r}")

    def _split(self, item: object, path: Path, in_place: bool) -> Sequence[Any]:
        """The pieces of a value that belong to the members; a number goes to all when it is copied in place."""
        store = self._entries
        if isinstance(item, Mapping) and not isinstance(item, Contract):
            columns = {key: self._split(value, (*path, *path_of(key)), in_place) for key, value in item.items()}
            return [{key: column[i] for key, column in columns.items()} for i in range(len(store.containers))]
        if type(item) in (list, tuple):
            return self._split_list(item, path, in_place)
        if not isinstance(item, (Tensor, Contract)):
            item = make_entry(item, path, self._batch_size, None)
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
            make_entry(value, path, _SCALAR, None) if in_place and not isinstance(value, (Tensor, Contract)) else value
            for value in values
        ]

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        members = self._entries.containers
        if isinstance(write, (Assign, AssignWithin)):
            self._plan_part(write, source, prefix)
        elif isinstance(write, Resize):
            if self._is_non_tensor and len(source) > len(self._batch_size):
                raise ShapeError(
                    f"values for a batch of size {list(self._batch_size)} cannot be spread over {list(source)}"
                )
            inner = self._inner_size(source)
            for member in self._entries.sample:
                member._plan_write(write, inner, prefix)
            write.changes.append((self, source))
        elif write.adds and not members:
            super()._plan_write(write, source, prefix)
        else:
            for member, piece in zip(members, self._source_pieces(source, prefix, write.inplace), strict=True):
                member._plan_write(write, piece, prefix)

    def _source_pieces(self, source: Any, prefix: Path, in_place: bool) -> Sequence[Any]:
        """What an update reads from, one for each member."""
        if isinstance(source, Contract) and source._batch_size == self._batch_size and self._entries.hook_in is None:
            return self._pieces_of(source)
        return self._split(dict(source.items()), prefix, in_place)

    def _plan_part(self, write: Assign | AssignWithin, source: Any, prefix: Path) -> None:
        """Hand what is assigned to a part of the batch to the members that the part is of."""
        if isinstance(write, AssignWithin):
            self._plan_within(write, source, prefix)
            return
        if not write.fills and not isinstance(source, (Contract, Mapping)):
            source = dict.fromkeys(self.keys(True, True), source)
        members, own = self._entries.containers, self._batch_size
        # An assignment to one entry may index its dims behind the batch.
        size, behind = write.size + own[len(write.indexed) :], write.indexed[len(own) :]
        picks = self._picks(write.at)
        if picks is None:
            # The index mixes up the members: element by element.
            numbers = self._numbers()[write.at].flatten().tolist()
            dim, width, adds = 0, len(size), write.adds and self._locked
            inner = torch.Size(())
            if any(member._is_in_file for member in members):
                # Their elements are no views.
                places = [list(map(int, np.unravel_index(number, own))) for number in numbers]
                targets = [members[place.pop(self._entries.dim)] for place in places]
                rests: list[tuple[Any, ...]] = [tuple(place) for place in places]
            else:
                elements = self._elements()
                targets, rests = [elements[number] for number in numbers], [()] * len(numbers)
            if self._locked:
                for element in targets:
                    element._lock_tree()
        else:
            targets = [members[position] for position in picks.positions]
            dim, width, adds = picks.dim, len(picks.block), write.adds
            rests, inner = [picks.rest] * len(targets), size[:dim] + size[dim + width :]
        if write.fills:
            pieces = [source] * len(targets)
        else:
            pieces = _pieces(source, len(targets), dim, width, size, prefix, self, len(own) + len(behind))
        for target, rest, piece in zip(targets, rests, pieces, strict=True):
            indexed = target._batch_size + behind if rest or picks is not None else inner
            plan = write.plan if len(targets) == 1 else write.plan.add_part()
            target._plan_write(Assign(rest, indexed, inner, adds, write.fills, plan), piece, prefix)

    def _plan_within(self, write: AssignWithin, source: Mapping[str, Any], prefix: Path) -> None:
        """As `_plan_part` for a part of one entry, whose shape may differ between the members."""
        ((name, value),) = source.items()
        own, path = self._batch_size, (*prefix, name)
        if self._node(name) is not None:
            write.into(self, source, prefix)
            return
        shape = self._shape_of(name)
        at = leaf_index(write.index, shape)
        picks, even = self._picks(at), -1 not in shape
        if even and picks is not None:
            write.into(self, source, prefix)
        elif even:
            entry = self._entries.read(name)
            entry[at] = fit_value(entry, value, checked_size(at, shape), path)
            self._plan_write(Copy(write.plan), {name: entry}, prefix)
        elif picks is not None and (not picks.block or not isinstance(value, Tensor) or not value.ndim):
            for position in picks.positions:
                self._entries.containers[position]._plan_write(AssignWithin(picks.rest, write.plan), source, prefix)
        elif is_beyond(write.index, own):
            raise ShapeError(
                f"entry {joined(path)!r} has the shape {list(shape)}, which differs between the members: assign to "
                "each of them, as in td[0].set_at_(key, value, index)"
            )
        else:
            at = leaf_index(write.index, own)
            self._plan_write(Assign(at, own, checked_size(at, own), adds=False, plan=write.plan), source, prefix)


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
        return [makers.value_list(column) for column in columns]
    return [column if isinstance(column, Contract) else makers.value(column, size) for column in columns]


def _of_one_dtype(item: Any, path: Path) -> Any:
    """Nested lists of numbers as a tensor; where rows are of different lengths, as lists of tensors of one dtype."""
    try:
        return torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError):
        rows = [make_entry(row, path, _SCALAR, None) for row in item]
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


def _pieces(
    value: Any, count: int, dim: int, width: int, size: torch.Size, path: Path, target: Any, batch_dims: int
) -> list[Any]:
    """What is assigned to a part of a lazy stack, in one piece for each element of some of its dims.

    Args:
        value: a container or tensor over the batch of the part, what broadcasts to it, or a mapping of these.
        count: the number of pieces.
        dim: the first of the dims that are taken apart.
        width: how many dims are.
        size: the batch size of the part.
        path: what errors name.
        target: the container that is assigned to, or the shape of the features of a leaf; `None` when there is neither.
        batch_dims: the number of batch dims of the stack.
    """
    if isinstance(value, Mapping) and not isinstance(value, Contract):
        columns = {
            key: _pieces(
                item, count, dim, width, size, (*path, *path_of(key)), _entry(target, key, batch_dims), batch_dims
            )
            for key, item in value.items()
        }
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if not isinstance(value, (Tensor, Contract)):
        value = make_entry(value, path, size, None)
    if isinstance(target, torch.Size) and not isinstance(value, Tensor):
        refuse_container(value, path)
    if isinstance(value, Tensor):
        if not value.ndim:
            return [value] * count
        if isinstance(target, torch.Size):
            shape = size + target
            if value.ndim < len(shape) or value.shape[: len(size)] != size:
                check_expandable(value.shape, shape, path)
                value = drop_leading_dims(value, len(shape)).expand(shape)
    if not width:
        return [value]
    if width > 1:
        value = value.flatten(dim, dim + width - 1)
    return list(value.unbind(dim))


def _entry(node: Any, key: Any, batch_dims: int) -> Any:
    """The nested container at `key`, or the shape of the features of the leaf there; `None` when there is neither."""
    path = path_of(key)
    for name in path[:-1]:
        node = node._node(name) if isinstance(node, Contract) else None
    if not isinstance(node, Contract) or path[-1] not in node._entries:
        return None
    inner = node._node(path[-1])
    return node._shape_of(path[-1])[batch_dims:] if inner is None else inner
