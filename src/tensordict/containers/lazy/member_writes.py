"""LazyWrites: writing to lazy stacks, which splits a value along the stack dim and gives each member its piece."""

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
from tensordict.ops.entries.assigning import (
    Assign,
    AssignWithin,
    drop_leading_dims,
    fit_value,
    refuse_container,
    refuse_other_size,
)
from tensordict.ops.entries.locking import raise_locked
from tensordict.ops.entries.numbers import make_entry, to_tensor
from tensordict.ops.entries.write_plans import Copy, Resize, Write, check_expandable
from tensordict.ops.entries.writing import check_path_through
from tensordict.ops.math.pairing import broadcast_pieces, have_as_many_feature_dims

_SCALAR = torch.Size(())
# Stands for the feature dims of a leaf whose number of dims differs between the members.
_RANKS_DIFFER = torch.Size([-2])
_NUMBERS = frozenset((bool, int, float, complex))


class LazyWrites(LazyDims):
    """Writes to the members of a lazy stack, after all of them were checked."""

    def _write_name(self, name: str, item: object, non_blocking: bool = False, path: Path | None = None) -> None:
        path = path or (name,)
        if type(item) in (list, tuple) and self._entries.containers:
            self._write_to_members((name,), item, path, non_blocking)
        else:
            self._check_members(path)
            super()._write_name(name, item, non_blocking, path)

    def _write_to_members(self, target: Path, item: object, path: Path, non_blocking: bool) -> None:
        """Split an entry and store the pieces at `target` of each member. Errors name it as `path`."""
        self._check_members(path)
        members = self._entries.containers
        values = []
        for member, piece in zip(members, self._split(item, path, False), strict=True):
            check_path_through(member, target, path)
            values.append(member._admit(piece, path, non_blocking))
        with self._at_once():
            for member, value in zip(members, values, strict=True):
                member._write(target, value)

    def _check_members(self, path: Path) -> None:
        """Raise if a member is locked, even if the stack is not, or is a value, which holds no entries."""
        for member in self._entries.containers:
            if member._locked:
                raise_locked(f"set the entry {joined(path)!r}")
            if member._is_non_tensor:
                member._write_name(path[-1], None, path=path)

    def _split(self, item: object, path: Path, in_place: bool) -> Sequence[Any]:
        """Split a value into one piece for each member.

        A value that is copied in place and broadcasts along the stack dim, such as a number, goes to all members.
        """
        store = self._entries
        if isinstance(item, Mapping) and not isinstance(item, Contract):
            columns = {key: self._split(value, (*path, *path_of(key)), in_place) for key, value in item.items()}
            return [{key: column[i] for key, column in columns.items()} for i in range(len(store.containers))]
        if type(item) in (list, tuple):
            return self._split_list(item, path, in_place)
        if not isinstance(item, (Tensor, Contract)):
            item = make_entry(item, path, self._batch_size, None)
        if in_place and isinstance(item, Tensor) and item.ndim < len(self._batch_size) - store.dim:
            return [item] * len(store.containers)
        if in_place and isinstance(item, Tensor) and item.shape[store.dim : store.dim + 1] == (1,):
            return [item.select(store.dim, 0)] * len(store.containers)  # one row for all members, as copy_() broadcasts
        item = store.apply_hook_in(item)
        if isinstance(item, LazyCore) and item._entries.dim == store.dim and item._batch_size == self._batch_size:
            return item._entries.containers
        return pieces_of(self._admit(item, path), store.dim, len(store.containers))

    def _split_list(self, item: Any, path: Path, in_place: bool) -> Sequence[Any]:
        """Split a nested list along the stack dim; return the item for each member.

        The nesting levels of the list are the first batch dims, as in the result of `Tensor.tolist`. A list of numbers
        is converted to one dtype. Numbers in a list with other objects are stored as non-tensor values.
        """
        dim, size = self._entries.dim, self._batch_size
        found = set(_leaf_kinds(item))
        stacks = type(item) is list and settings.list_to_stack()
        # With `set_list_to_stack`, tuples are values, and so are the items of a list with uneven depth.
        numeric = all(map(_is_numeric, found)) and not (stacks and not _is_array(item))
        if not numeric and not stacks:
            # Without `set_list_to_stack`, such a list is one value in any container, and goes to every member.
            return [item] * len(self._entries.containers)
        if numeric and found <= _NUMBERS:
            item = _unify_dtype(item, path)
        columns = _split_lists(list(item), dim, size, path)
        if not numeric:
            columns = _wrap_values(columns, size[:dim] + size[dim + 1 :])
        values = [
            torch.stack(column) if dim and isinstance(column, list) and _are_tensors(column) else column
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
            # A member may be the value of the next one, as in `stack[1:].update_(stack[:-1])`.
            write.plan.separates = write.inplace
            if write.inplace:
                source = _copy_when_compiling(source)
            for member, piece in zip(members, self._source_pieces(source, prefix, write.inplace), strict=True):
                member._plan_write(write, piece, prefix)

    def _source_pieces(self, source: Any, prefix: Path, in_place: bool) -> Sequence[Any]:
        """Split the source of an update into one for each member."""
        size = self._batch_size
        if isinstance(source, Contract):
            theirs = source._batch_size
            if theirs[: len(size)] == size and self._entries.hook_in is None:
                return self._pieces_of(source)
            if in_place and theirs != size and have_as_many_feature_dims(self, source):
                pieces = broadcast_pieces(self, source)
                if pieces is not None:
                    return pieces
        return self._split(dict(source.items()), prefix, in_place)

    def _plan_part(self, write: Assign | AssignWithin, source: Any, prefix: Path) -> None:
        """Split an assignment to a part of the batch into assignments to the members."""
        if isinstance(write, AssignWithin):
            self._plan_within(write, source, prefix)
            return
        if not write.fills and not isinstance(source, (Contract, Mapping)):
            source = dict.fromkeys(self.keys(True, True), source)
        source = _copy_when_compiling(source)
        members, own = self._entries.containers, self._batch_size
        # An assignment to one entry may index its dims behind the batch.
        size, behind = write.size + own[len(write.indexed) :], write.indexed[len(own) :]
        fills = write.fills and not behind
        # Compiled code cannot look up which members an index tensor selects.
        hidden = fills and not write.basic and torch.compiler.is_compiling()
        picks = None if hidden else self._split_index(write.at)
        if picks is None and fills:
            self._plan_fill(write, source, prefix)
            return
        if picks is None:
            # The index mixes elements of the members, so assign to each element.
            source = self._plan_new_entries(write, source, prefix)
            numbers = self._numbers()[write.at].flatten().tolist()
            dim, width, adds = 0, len(size), write.adds and self._locked
            inner = torch.Size(())
            if any(member._is_in_file for member in members):
                # Indexing a stored member gives a copy, so write to the member by index.
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
            ndim = len(own) + len(behind)
            pieces = _split_part(source, len(targets), dim, width, size, prefix, self, ndim, write.adds)
        for target, rest, piece in zip(targets, rests, pieces, strict=True):
            indexed = target._batch_size + behind if rest or picks is not None else inner
            plan = write.plan if len(targets) == 1 else write.plan.add_part()
            target._plan_write(Assign(rest, indexed, inner, adds, write.fills, plan), piece, prefix)

    def _plan_new_entries(self, write: Assign, source: Any, prefix: Path) -> Any:
        """Plan to add the entries that no member has, if `write` adds entries, and return the source of the others."""
        if not write.adds or self._locked or write.fills:
            return source
        known = {name for member in self._entries.containers for name in member._entries}
        new = {key: item for key, item in source.items() if path_of(key)[0] not in known}
        if not new:
            return source
        write.into(self, new, prefix)
        return {key: item for key, item in source.items() if key not in new}

    def _plan_fill(self, write: Assign, number: object, prefix: Path) -> None:
        """Plan to write a number to the elements that an index selects, by one mask for each member."""
        selected = torch.zeros(self._batch_size, dtype=torch.bool)
        selected[write.at] = True
        for member, mask in zip(self._entries.containers, selected.unbind(self._entries.dim), strict=True):
            # Compiled code cannot skip a member, because that depends on the elements of the index.
            if torch.compiler.is_compiling() or mask.any():
                size, at = member._batch_size, leaf_index(mask, member._batch_size)
                member._plan_write(Assign(at, size, size, False, True, write.plan.add_part()), number, prefix)

    def _plan_within(self, write: AssignWithin, source: Mapping[str, Any], prefix: Path) -> None:
        """Do the same as `_plan_part` for one entry, whose shape may differ between the members."""
        ((name, value),) = source.items()
        own, path = self._batch_size, (*prefix, name)
        if self._node(name) is not None:
            write.into(self, source, prefix)
            return
        shape = self._shape_of(name)
        at = leaf_index(write.index, shape)
        picks, even = self._split_index(at), -1 not in shape
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


def _copy_when_compiling(source: Any) -> Any:
    """Copy a lazy stack in compiled code, which cannot look up whether values share memory with targets."""
    return source.clone() if torch.compiler.is_compiling() and isinstance(source, LazyCore) else source


def _is_array(items: list[Any]) -> bool:
    """Return whether lists are nested to the same depth everywhere, without tuples."""
    nested = [item for item in items if type(item) in (list, tuple)]
    return not nested or (len(nested) == len(items) and all(type(item) is list and _is_array(item) for item in nested))


def _leaf_kinds(item: Any) -> Iterator[type[Any]]:
    """Yield the class of each item of nested lists. Tensors and containers count as `Tensor`."""
    for value in item:
        if isinstance(value, (list, tuple)):
            yield from _leaf_kinds(value)
        else:
            yield Tensor if isinstance(value, (Tensor, Contract)) else type(value)


def _is_numeric(kind: type[Any]) -> bool:
    """Return whether instances of a class are numbers, tensors or containers, or convert to tensors."""
    return kind in _NUMBERS or kind is Tensor or (hasattr(kind, "__array__") and not issubclass(kind, (str, bytes)))


def _wrap_values(columns: list[Any], size: torch.Size) -> list[Any]:
    """Wrap pieces of a list of values in holders; in stacks if all are lists, as `NonTensorStack.from_list` does."""
    if all(isinstance(column, list) for column in columns):
        return [makers.value_list(column) for column in columns]
    return [column if isinstance(column, Contract) else makers.value(column, size) for column in columns]


def _unify_dtype(item: Any, path: Path) -> Any:
    """Convert nested lists of numbers to a tensor, or to a list of tensors of one dtype if rows differ in length."""
    try:
        return to_tensor(item, path, None)
    except (TypeError, ValueError, RuntimeError):
        rows = [make_entry(row, path, _SCALAR, None) for row in item]
        if not _are_tensors(rows):
            return item
        dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
        return [row.to(dtype) for row in rows]


def _are_tensors(column: list[Any]) -> bool:
    return all(isinstance(item, Tensor) for item in column)


def _split_lists(item: list[Any], dim: int, size: torch.Size, path: Path) -> list[Any]:
    """Split nested lists, whose levels are the dims of `size`, along `dim`."""
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
            rows.append(_split_lists(list(row), dim - 1, size[1:], path))
        else:
            raise TypeError(f"entry {joined(path)!r}: a list of {dim + 1} levels is needed, got {type(row).__name__}")
    return [list(column) for column in zip(*rows, strict=True)]


def _split_part(
    value: Any, count: int, dim: int, width: int, size: torch.Size, path: Path, target: Any, batch_dims: int, adds: bool
) -> list[Any]:
    """Split a value that is assigned to a part of a lazy stack, along some batch dims of the part.

    Args:
        value: a container or tensor with the batch size of the part or broadcastable to it, or a mapping of these.
        count: the number of pieces.
        dim: the first dim to split.
        width: the number of dims to split.
        size: the batch size of the part.
        path: the key that errors name.
        target: the container that is assigned to, or the feature dims of a leaf; `None` if there is neither.
        batch_dims: the number of batch dims of the stack.
        adds: true if missing entries are added.
    """
    if isinstance(value, Mapping) and not isinstance(value, Contract):
        columns = {}
        for key, item in value.items():
            inner, name = _find_target(target, key, batch_dims), (*path, *path_of(key))
            columns[key] = _split_part(item, count, dim, width, size, name, inner, batch_dims, adds)
        return [{key: column[i] for key, column in columns.items()} for i in range(count)]
    if type(value) in _NUMBERS and isinstance(target, Contract) and target._is_non_tensor:
        return [value] * count  # a value stays a value
    if not isinstance(value, (Tensor, Contract)):
        value = make_entry(value, path, size, None)
    if isinstance(target, torch.Size) and not isinstance(value, Tensor):
        refuse_container(value, path)
    if isinstance(value, Tensor):
        if not value.ndim or (isinstance(value, Contract) and not isinstance(target, torch.Size)):
            return [value] * count  # a number, or an `UnbatchedTensor`, which each member holds whole
        if isinstance(target, torch.Size):
            shape = size + target
            ranks_differ = target == _RANKS_DIFFER
            if value.shape[: len(size)] != size or (value.ndim < len(shape) and not ranks_differ):
                # Dims that differ between members stay as they are: each member checks whether they fit its own leaf.
                if ranks_differ:
                    shape = size + value.shape
                else:
                    own = ((1,) * len(target) + value.shape)[-len(target) :]
                    shape = size + torch.Size([m if n == -1 else n for n, m in zip(target, own)])
                    check_expandable(value.shape, shape, path)
                    value = drop_leading_dims(value, len(shape))
                value = value.expand(shape)
    if not width:
        return [value]
    if target is None and isinstance(value, Tensor):
        if not adds:
            return [value] * count  # each member refuses it: there is no such entry
        refuse_other_size(value.shape, size, path)
    if width > 1:
        value = value.flatten(dim, dim + width - 1)
    return list(value.unbind(dim))


def _find_target(node: Any, key: Any, batch_dims: int) -> Any:
    """Return the nested container at `key`, or the feature dims of the leaf there; `None` if there is neither.

    Feature dims that differ between members are -1; if their number differs, the result is `_RANKS_DIFFER`.
    """
    path = path_of(key)
    for name in path[:-1]:
        node = node._node(name) if isinstance(node, Contract) else None
    if not isinstance(node, Contract) or path[-1] not in node._entries:
        return None
    inner = node._node(path[-1])
    if inner is not None:
        return inner
    shape = node._shape_of(path[-1])
    return _RANKS_DIFFER if shape[:1] == (-1,) else shape[batch_dims:]
