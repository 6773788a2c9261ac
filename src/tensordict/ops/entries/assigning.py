"""Assignment to parts of containers, as a `Write`, for `td[index] = value`, `set_at_` and `update_at_`."""

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
from tensordict.ops.entries.numbers import make_entry, to_tensor
from tensordict.ops.entries.update_sources import nest_under
from tensordict.ops.entries.write_plans import (
    Write,
    WritePlan,
    check_expandable,
    pair_plain,
    raise_no_entry,
)

# Stands for the size of a ragged dim.
_ANY_LENGTH = 2**30


class Assign(Write):
    """Assigns to a part of the batch: the entries of a mapping or container, or one tensor or number to every leaf.

    Attributes:
        at: the index, as `leaf_index` returns it.
        indexed: the shape that the index applies to: the batch size, or the shape of an entry if the index reaches its
            feature dims.
        size: the shape of the indexed part.
        fills: if true, torch assigns a number itself, and raises if the dtype cannot hold it.
    """

    # The last leaf shape that `part_of` was called with, and its result. The next leaf often has the same shape.
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
        self.plan = WritePlan(separates=True) if plan is None else plan
        self.adds = adds
        self.at = at
        self.indexed = indexed
        self.size = size
        self.fills = fills
        # A basic index gives views, and all copies into views are one call. With another index each leaf is assigned.
        self.basic = is_basic(at)

    def part_of(self, leaf: Any) -> torch.Size:
        """Return the shape of the indexed part of a leaf or value: `size`, followed by the dims behind `indexed`."""
        shape = leaf.shape
        if shape != self._shape or not shape:
            self._shape, self._part = shape, self.size + shape[len(self.indexed) :]
        return self._part

    def to_leaf(self, leaf: Tensor, item: Any, path: Path) -> None:
        """Plan to assign `item` to the indexed part of a leaf. Raises an error with `path` if it does not fit."""
        item = fit_value(leaf, item, self.part_of(leaf), path)
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
        # Members of a lazy stack are assigned with the index `()`. Views of all leaves would double the time.
        all_of_it = basic and at == ()
        part = None if all_of_it else at
        if basic and node is not self.refused and pair_plain(node, items, plan.targets, plan.values, part):
            return
        in_store = not isinstance(mapping, dict)
        for key, item in items.items():
            if type(key) is not str:
                key, *rest = path_of(key)
                item = nest_under(rest, item)
            current: Any = mapping.get(key)
            if type(current) is Tensor or isinstance(current, Tensor):
                if type(current) is not Tensor and isinstance(current, Contract):
                    continue  # An `UnbatchedTensor`, which has no part for the index.
                if in_store and current.is_nested:
                    _refuse_stored_leaf(current, (*prefix, key))
                try:
                    if basic:
                        # The view has the shape that the item needs, and `copy_` casts the item.
                        if not all_of_it:
                            current = current[at]
                        if type(item) is not Tensor or item.shape != current.shape:
                            item = fit_value(current, item, current.shape, (*prefix, key))
                        plan.targets.append(current)
                        plan.values.append(item)
                    else:
                        expected = self.part_of(current)
                        if type(item) is not Tensor or item.shape != expected or item.dtype is not current.dtype:
                            item = fit_value(current, item, expected, (*prefix, key))
                        plan.assigned.append((current, at, item))
                except REFUSALS:
                    leaf = mapping[key]
                    if not leaf.is_nested:
                        raise
                    plan.steps.append((_make_ragged_write(leaf, at, item, (*prefix, key)), ()))
                continue
            path = (*prefix, key)
            if current is None:
                self._allocate(node, key, item, path)
            elif current._is_non_tensor:
                plan.steps.append((current._replacing(node, key, item, at, self.part_of(current), path), ()))
            elif isinstance(item, Contract) and isinstance(item, Tensor):
                raise TypeError(f"entry {joined(path)!r} is a container and cannot be assigned an UnbatchedTensor")
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
                self.plan.steps.append((_make_ragged_write(leaf, self.at, value, path), ()))
            elif self.fills:
                self.plan.assigned.append((leaf, self.at, value))
            else:
                self.to_leaf(leaf, value, path)

    def _allocate(self, node: Any, name: str, item: Any, path: Path) -> None:
        """Plan a new entry: zeros for the whole batch, with `item` assigned to the indexed part."""
        if not self.adds:
            raise_no_entry(path, node)
        if node._locked:
            raise_locked(f"add the entry {joined(path)!r}")
        fresh = node._admit(_allocate_like(item, self.at, self.indexed, self.size, path), path)
        self.plan.steps.append((_add_entry, (node._entries, name, fresh)))


class AssignWithin(Write):
    """Assigns to a part of one entry, given as `{name: value}`. For a leaf, the index may reach the feature dims.

    Attributes:
        index: the index of the caller. In a nested container, and in values, it applies to the batch dims.
    """

    def __init__(self, index: object, plan: WritePlan | None = None) -> None:
        self.plan = WritePlan(separates=True) if plan is None else plan
        self.index = index

    def into(self, node: Any, source: Mapping[str, Any], prefix: Path) -> None:
        ((name, value),) = source.items()
        inner = node._node(name)
        shape = node._batch_size if is_node(inner) else node._shape_of(name)
        if any(type(n) is not int or n < 0 for n in shape):
            # The ragged dim has no size. The index is checked against each row when the row is written.
            shape = torch.Size([n if type(n) is int and n >= 0 else _ANY_LENGTH for n in shape])
        at = leaf_index(self.index, shape)
        write = Assign(at, shape, checked_size(at, shape), adds=False, plan=self.plan)
        if isinstance(inner, Tensor):
            for leaf in node._leaves_of(name):
                write.to_leaf(leaf, value, (*prefix, name))
        else:
            node._plan_write(write, source, prefix)


def drop_leading_dims(item: Tensor, ndim: int) -> Tensor:
    """Remove leading dims of size 1, as torch does in assignments, until `ndim` dims are left."""
    return item if item.ndim <= ndim else item.reshape(item.shape[item.ndim - ndim :])


def fit_value(target: Tensor, item: object, expected: torch.Size, path: Path) -> Tensor:
    """Return `item` as a tensor that can be assigned to a part of `target` of shape `expected`.

    Raises an error with `path` if it does not fit.
    """
    if not isinstance(item, Tensor):
        item = make_assignable(item, path, target.device)
    if target.is_nested:
        raise ShapeError(f"entry {joined(path)!r} is ragged")
    shape = ragged.shape_of(item)
    if shape != expected:
        check_expandable(shape, expected, path)
        item = drop_leading_dims(item, len(expected))
    # For a basic index torch casts the item, for an advanced one it raises. Here both cast.
    return item if item.dtype == target.dtype else item.to(target.dtype)


def make_assignable(item: object, path: Path, device: torch.device) -> Tensor:
    """Return a number, or a list or array of numbers, as a tensor that can be assigned to a part of a leaf."""
    refuse_container(item, path)
    return to_tensor(item, path, device)


def refuse_container(item: object, path: Path) -> None:
    """Raise if `item`, to be assigned to a part of a tensor, is a container or a mapping."""
    if isinstance(item, (Contract, Mapping)):
        raise TypeError(f"entry {joined(path)!r} is a tensor and cannot be assigned a {type(item).__name__}")


def _refuse_stored_leaf(leaf: Tensor, path: Path) -> None:
    """Raise an error with `path` if a ragged leaf is stored in a file, and so cannot be written row by row."""
    try:
        refuse_stored(leaf)
    except ShapeError as error:
        raise named_error(error, path) from None


def _make_ragged_write(leaf: Tensor, at: object, item: object, path: Path) -> Callable[[], Any]:
    """Return a function that assigns `item` to a part of a ragged leaf. Raises an error with `path` if it does not fit.

    The function takes no arguments.
    """
    if isinstance(item, Contract) or not isinstance(item, (Tensor, int, float, complex)):
        item = make_assignable(item, path, leaf.device)
    try:
        return ragged.assignment(leaf, at, item)
    except (RuntimeError, ValueError) as error:
        raise named_error(error, path) from None


def _spread(holder: Any, at: object, indexed: torch.Size, ndim: int) -> Any:
    """Return a holder for the whole batch, from a holder for the indexed part.

    One value for the part becomes the value of all elements. Several values are assigned at the index, and the other
    elements hold `None`. The first `ndim` batch dims of `holder` are the dims of the part.
    """
    if holder._members() is None:
        return makers.value(holder._value, indexed)
    return makers.value(None, indexed + holder._batch_size[ndim:])._assign_values(at, holder)


def _allocate_like(item: Any, at: Any, indexed: torch.Size, new_size: torch.Size, path: Path) -> Any:
    """Return zeros for the whole batch, shaped like `item` in the other dims, with `item` assigned at the index."""
    if isinstance(item, Contract):
        if isinstance(item, Tensor):
            return item
        if item._is_non_tensor:
            return _spread(item, at, indexed, len(new_size))
        size = indexed + item._batch_size[len(new_size) :]
        entries = {
            name: _allocate_like(value, at, indexed, new_size, (*path, name)) for name, value in item._entries.items()
        }
        names: Names | None = None
        if item._names is not None:
            names = [*([None] * len(indexed)), *item._names[len(new_size) :]]
        return item._build(entries, size, item._device, names)
    if isinstance(item, Mapping):
        return {
            key: _allocate_like(value, at, indexed, new_size, (*path, *path_of(key))) for key, value in item.items()
        }
    if not isinstance(item, Tensor):
        item = make_entry(item, path, new_size, None)
        if isinstance(item, Contract):
            return _spread(item, at, indexed, len(new_size))
    if item.is_nested:
        raise ShapeError(f"the ragged entry {joined(path)!r} does not exist: set all of it before assigning to parts")
    refuse_other_size(item.shape, new_size, path)
    fresh = item.new_zeros(indexed + item.shape[len(new_size) :])
    fresh[at] = item
    return fresh


def refuse_other_size(shape: torch.Size, size: torch.Size, path: Path) -> None:
    """Raise if the shape of a new entry does not begin with `size`, that of the part of the batch it is assigned to."""
    if shape[: len(size)] != size:
        raise ShapeError(
            f"entry {joined(path)!r} has shape {list(shape)}, which does not begin with the size "
            f"{list(size)} of the part of the batch it is assigned to"
        )


def _add_entry(entries: MutableMapping[str, Any], name: str, value: Any) -> None:
    """Add an entry, as a step of a plan. Dynamo does not trace `operator.setitem` of a dict."""
    entries[name] = value
