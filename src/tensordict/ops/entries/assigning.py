"""Assignment to parts of containers: what `td[index] = value`, `set_at_` and `update_at_` write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tensordict.core import makers, ragged
from tensordict.core.contract import Contract, Names, is_node, named_error
from tensordict.core.exceptions import ShapeError, refuse_stored
from tensordict.core.indices import checked_size, is_basic, leaf_index
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.ragged import REFUSALS
from tensordict.ops.entries.locking import raise_locked
from tensordict.ops.entries.numbers import stored, to_tensor
from tensordict.ops.entries.update_sources import nested_under
from tensordict.ops.entries.write_plans import Write, WritePlan, alike, check_expandable, plain_pairs, raise_no_entry

# Stands for the size of a ragged dim.
_ANY_LENGTH = 2**30


class Assign(Write):
    """What is assigned to a part of the batch: a mapping or container, or one tensor or number to every leaf.

    Attributes:
        at: the index, an output of `leaf_index`.
        indexed: the shape that it indexes: the batch size, or that of an entry whose other dims it reaches.
        size: the shape of the part.
        fills: whether torch is given a number as it is, and refuses what the dtype cannot hold.
    """

    # The shape of the last leaf that `part_of` was asked for, and its answer: the next often has the same shape.
    _shape = _part = torch.Size()

    def __init__(
        self,
        at: Any,
        indexed: torch.Size,
        size: torch.Size,
        adds: bool = True,
        fills: bool = False,
        plan: WritePlan | None = None,
    ) -> None:
        self.plan = WritePlan() if plan is None else plan
        self.adds = adds
        self.at = at
        self.indexed = indexed
        self.size = size
        self.fills = fills
        # A basic index makes views to copy into, all in one call; otherwise the leaves themselves are indexed.
        self.basic = is_basic(at)

    def part_of(self, leaf: Any) -> torch.Size:
        """The shape of the part of a leaf or value that is assigned: what is behind the dims indexed stays."""
        shape = leaf.shape
        if shape != self._shape or not shape:
            self._shape, self._part = shape, self.size + shape[len(self.indexed) :]
        return self._part

    def to_leaf(self, leaf: Tensor, item: Any, path: Path) -> None:
        """Have `item` assigned to its part of a leaf; raises naming `path` when it does not fit."""
        item = fitting(leaf, item, self.part_of(leaf), path)
        if self.basic:
            self.plan.targets.append(leaf[self.at])
            self.plan.values.append(item)
        else:
            self.plan.assigned.append((leaf, self.at, item))

    def into(self, node: Any, source: Any, prefix: Path) -> None:
        if not isinstance(source, (Contract, Mapping)):
            self._to_every_leaf(node, source, prefix)
            return
        items: Any = source
        mapping, plan = node._entries, self.plan
        at, basic = self.at, self.basic
        # As a member of a lazy stack is assigned: making a view of each leaf would double the time.
        all_of_it = basic and at == ()
        if basic and not all_of_it and (pairs := plain_pairs(mapping, items)) is not None:
            try:
                parts = [target[at] for target in pairs[0]]
            except REFUSALS:
                parts = []  # of ragged tensors, which are written row by row
            if parts and alike(parts, pairs[1]):
                plan.targets += parts
                plan.values += pairs[1]
                return
        in_store = type(mapping) is not dict
        for key, item in items.items():
            if type(key) is not str:
                key, *rest = path_of(key)
                item = nested_under(rest, item)
            current: Any = mapping.get(key)
            if type(current) is Tensor or isinstance(current, Tensor):
                if type(current) is not Tensor and isinstance(current, Contract):
                    continue  # An `UnbatchedTensor`, which has no part for the index.
                if in_store and current.is_nested:
                    _refuse_stored(current, (*prefix, key))
                try:
                    if basic:
                        # A view has the shape to compare with, and torch casts what is copied into it.
                        if not all_of_it:
                            current = current[at]
                        if type(item) is not Tensor or item.shape != current.shape:
                            item = fitting(current, item, current.shape, (*prefix, key))
                        plan.targets.append(current)
                        plan.values.append(item)
                    else:
                        expected = self.part_of(current)
                        if type(item) is not Tensor or item.shape != expected or item.dtype is not current.dtype:
                            item = fitting(current, item, expected, (*prefix, key))
                        plan.assigned.append((current, at, item))
                except REFUSALS:
                    leaf = mapping[key]
                    if not leaf.is_nested:
                        raise
                    plan.steps.append((_ragged_write(leaf, at, item, (*prefix, key)), ()))
                continue
            path = (*prefix, key)
            if current is None:
                self._allocate(node, key, item, path)
            elif current._is_non_tensor:
                plan.steps.append((current._replacing(node, key, item, at, self.part_of(current), path), ()))
            else:
                current._plan_write(self, item, path)

    def _to_every_leaf(self, node: Contract, value: object, prefix: Path) -> None:
        leaf: Any
        for name, leaf in node._entries.items():
            path = (*prefix, name)
            if type(leaf) is not Tensor and is_node(leaf):
                if not leaf._is_non_tensor:
                    leaf._plan_write(self, value, path)
            elif type(leaf) is not Tensor and isinstance(leaf, Contract):
                continue  # An `UnbatchedTensor`, which has no part for the index.
            elif leaf.is_nested:
                self.plan.steps.append((_ragged_write(leaf, self.at, value, path), ()))
            elif self.fills:
                self.plan.assigned.append((leaf, self.at, value))
            else:
                self.to_leaf(leaf, value, path)

    def _allocate(self, node: Any, name: str, item: Any, path: Path) -> None:
        """Have zeros for all of the batch added, with `item` assigned to its part."""
        if not self.adds:
            raise_no_entry(path, node)
        if node._locked:
            raise_locked(f"allocate the entry {joined(path)!r}, which is not there yet")
        fresh = node._admit(_allocated(item, self.at, self.indexed, self.size, path), path)
        self.plan.steps.append((_add_entry, (node._entries, name, fresh)))


class AssignWithin(Write):
    """What is assigned to a part of one entry, `{name: value}`; the index may reach its dims behind the batch.

    Attributes:
        index: as it was given. That into a nested container, or into values that are no tensors, is one into the batch.
    """

    def __init__(self, index: object, plan: WritePlan | None = None) -> None:
        self.plan = WritePlan() if plan is None else plan
        self.index = index

    def into(self, node: Any, source: Mapping[str, Any], prefix: Path) -> None:
        ((name, value),) = source.items()
        inner = node._node(name)
        shape = node._batch_size if is_node(inner) else node._shape_of(name)
        if any(type(n) is not int or n < 0 for n in shape):
            # The ragged dim has no size; whether an index fits it is seen row by row.
            shape = torch.Size([n if type(n) is int and n >= 0 else _ANY_LENGTH for n in shape])
        at = leaf_index(self.index, shape)
        write = Assign(at, shape, checked_size(at, shape), adds=False, plan=self.plan)
        if isinstance(inner, Tensor):
            for leaf in node._leaves_of(name):
                write.to_leaf(leaf, value, (*prefix, name))
        else:
            node._plan_write(write, source, prefix)


def without_leading(item: Tensor, ndim: int) -> Tensor:
    """`item` without what it has of dims of size 1 before its last `ndim`, as torch assigns it."""
    return item if item.ndim <= ndim else item.reshape(item.shape[item.ndim - ndim :])


def fitting(target: Tensor, item: object, expected: torch.Size, path: Path) -> Tensor:
    """`item` if it can be assigned to a part of `target` of shape `expected`; raises naming `path` when not."""
    if not isinstance(item, Tensor):
        item = assignable(item, path, target.device)
    if target.is_nested:
        raise ShapeError(f"entry {joined(path)!r} is ragged")
    shape = ragged.shape_of(item)
    if shape != expected:
        check_expandable(shape, expected, path)
        item = without_leading(item, len(expected))
    # Torch casts when a basic index is assigned and refuses when an advanced one is; here both cast.
    return item if item.dtype == target.dtype else item.to(target.dtype)


def assignable(item: object, path: Path, device: torch.device) -> Tensor:
    """Numbers, lists and arrays of them as a tensor, to be assigned to a part of one."""
    refuse_container(item, path)
    return to_tensor(item, path, device)


def refuse_container(item: object, path: Path) -> None:
    """Raise when a container or a mapping is to be assigned to a part of a tensor."""
    if isinstance(item, (Contract, Mapping)):
        raise TypeError(f"entry {joined(path)!r} is a tensor and cannot be assigned a {type(item).__name__}")


def _refuse_stored(leaf: Tensor, path: Path) -> None:
    try:
        refuse_stored(leaf)
    except ShapeError as error:
        raise named_error(error, path) from None


def _ragged_write(leaf: Tensor, at: object, item: object, path: Path) -> Callable[[], Any]:
    """What assigns `item` to a part of a ragged leaf, once called; raises naming `path` when it does not fit."""
    if isinstance(item, Contract) or not isinstance(item, (Tensor, int, float, complex)):
        item = assignable(item, path, leaf.device)
    try:
        return ragged.assignment(leaf, at, item)
    except (RuntimeError, ValueError) as error:
        raise named_error(error, path) from None


def _spread(holder: Any, at: object, indexed: torch.Size, ndim: int) -> Any:
    """A holder for all of the batch: of the one value, or of `None` where the values of `holder` are not assigned.

    The first `ndim` batch dims of `holder` are those of the part.
    """
    if holder._members() is None:
        return makers.value(holder._value, indexed)
    return makers.value(None, indexed + holder._batch_size[ndim:])._assign_values(at, holder)


def _allocated(item: Any, at: Any, indexed: torch.Size, new_size: torch.Size, path: Path) -> Any:
    """Zeros for all of the batch, shaped after `item`, with `item` assigned at the index."""
    if isinstance(item, Contract):
        if isinstance(item, Tensor):
            return item
        if item._is_non_tensor:
            return _spread(item, at, indexed, len(new_size))
        size = indexed + item._batch_size[len(new_size) :]
        entries = {
            name: _allocated(value, at, indexed, new_size, (*path, name)) for name, value in item._entries.items()
        }
        names: Names | None = None
        if item._names is not None:
            names = [*([None] * len(indexed)), *item._names[len(new_size) :]]
        return item._build(entries, size, item._device, names)
    if isinstance(item, Mapping):
        return {key: _allocated(value, at, indexed, new_size, (*path, *path_of(key))) for key, value in item.items()}
    if not isinstance(item, Tensor):
        item = stored(item, path, new_size, None)
        if isinstance(item, Contract):
            return _spread(item, at, indexed, len(new_size))
    if item.is_nested:
        raise ShapeError(f"entry {joined(path)!r} is ragged and not there yet: set all of it before assigning to parts")
    if item.shape[: len(new_size)] != new_size:
        raise ShapeError(
            f"entry {joined(path)!r} has shape {list(item.shape)}, which does not begin with the size "
            f"{list(new_size)} of the part of the batch it is assigned to"
        )
    fresh = item.new_zeros(indexed + item.shape[len(new_size) :])
    fresh[at] = item
    return fresh


def _add_entry(entries: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Add an entry at the end of a plan; Dynamo does not trace `operator.setitem` of a dict."""
    entries[name] = value
