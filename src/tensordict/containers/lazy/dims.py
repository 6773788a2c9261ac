"""LazyDims: indexing of lazy stacks, and operations on their batch dims."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.containers.lazy.core import LazyCore
from tensordict.containers.lazy.members import Members
from tensordict.core import makers
from tensordict.core.context import elements_of
from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError, StackError
from tensordict.core.indices import is_mask, leaf_index, result_size
from tensordict.core.shapes import nested_lists
from tensordict.ops.dims.batch_ops import BatchOp, Cut, ForMembers, Reshape, drop_dim

_FULL = slice(None)
_MASKS = (torch.bool, torch.uint8)


@dataclass(slots=True)
class _SplitIndex:
    """An index of a lazy stack, split into an index of the stack dim and an index of each member.

    positions: the selected members, in the order of the result.
    rest: the index for each of them; `()` selects whole members.
    dim: the position in the result of the dims that come from `positions`.
    block: the sizes of these dims: empty for an int, one size for a slice.
    """

    positions: list[int]
    rest: tuple[Any, ...]
    dim: int
    block: tuple[int, ...]


class LazyDims(LazyCore):
    """Operations on the batch dims of a lazy stack.

    An operation on the stack dim reorders the members, and an operation on other dims runs in each member. All others
    run on the dense stack. If there is none, because the leaves differ in shape, an operation that only rearranges
    elements of the batch returns lazy stacks of single elements.
    """

    # --- indexing ---------------------------------------------------------------------------------------------------

    def _index(self, index: object) -> Any:
        members, dim = self._entries.containers, self._entries.dim
        if type(index) is int and dim == 0 and -len(members) <= index < len(members):
            return members[index]
        size = self._batch_size
        at = leaf_index(index, size)
        picks = self._split_index(at) if members else None
        if picks is None:
            # Passes a mask on unchanged: `leaf_index` has split it into one tensor per dim, which gives other names.
            return self._rearrange(lambda stack: stack[index if is_mask(index) else at])
        rest, taken = picks.rest, [members[position] for position in picks.positions]
        if rest:
            # A mask itself names its dim, which differs from the name that its parts give. It takes longer.
            inner = index if is_mask(index) and members[0]._names is not None else rest
            taken = [member._index(inner) for member in taken]
        if not picks.block:
            return taken[0]
        if len(picks.block) == 1:
            if taken:
                return self._like(taken, picks.dim)
            return self._like([], picks.dim, members[0]._index(rest) if rest else members[0].copy())
        if not taken:
            return self._rearrange(lambda stack: stack[at])
        # An index tensor of several dims gives nested stacks, whose dims all have the name of the stack dim.
        name = self._entries.name
        for length in reversed(picks.block):
            rows = range(0, len(taken), length)
            taken = [self._over(Members(taken[row : row + length], picks.dim, name=name)) for row in rows]
        return taken[0]

    def _split_index(self, at: object) -> _SplitIndex | None:
        """Split an index into an index of the stack dim and an index of each member.

        Returns `None` if no such pair selects the same elements, because the index combines elements across members.

        Args:
            at: the index, as `leaf_index` returns it.
        """
        dim = self._entries.dim
        # Torch treats an integer tensor without dims as an int.
        items: list[Any] = [int(item) if _is_scalar(item) else item for item in (at if type(at) is tuple else (at,))]
        if any(isinstance(item, bool) for item in items):
            if -1 not in self._batch_size:
                return None
            # Members of unequal sizes have no dense stack to index. Torch treats a bool as a mask without dims.
            items = [torch.tensor(item) if isinstance(item, bool) else item for item in items]
        position = found = 0
        while found < len(items) and position + _width(items[found]) <= dim:
            position += _width(items[found])
            found += 1
        if found == len(items):
            items += [_FULL] * (dim - position + 1)
            found = len(items) - 1
        item = items[found]
        rest = items[:found] + items[found + 1 :]
        before = sum(other is None or isinstance(other, slice) for other in items[:found])
        advanced = [i for i, other in enumerate(items) if isinstance(other, Tensor) and i != found]
        count = len(self._entries.containers)
        if isinstance(item, Tensor):
            if advanced or _width(item) != 1:
                return None
            if item.dtype in _MASKS:
                item = item.nonzero().squeeze(1)
            chosen = _check_positions(item, count, dim)
            return _SplitIndex(chosen, _trim(rest), before, tuple(item.shape))
        if advanced:
            # Torch inserts the dims of index tensors at the first of them if they are adjacent, and in front otherwise.
            # Removing the stack dim from the index can make tensors adjacent.
            apart = _are_tensors_apart(items)
            if apart and not _are_tensors_apart(rest) and _has_slice_before_tensors(rest):
                return None
            if apart or advanced[0] < found:
                before += max(1 if items[i].dtype in _MASKS else items[i].ndim for i in advanced)
        if isinstance(item, int):
            result_size(item, torch.Size((count,)))
            return _SplitIndex([item % count], _trim(rest), 0, ())
        result_size(item, torch.Size((count,)))
        chosen = list(range(count))[item]
        return _SplitIndex(chosen, _trim(rest), before, (len(chosen),))

    def _rearrange(self, fn: Callable[[Any], Any]) -> Any:
        """Apply `fn`, which rearranges elements of the batch, to the dense stack, or else element by element.

        The dense stack exists only if all members have the same entries in the same shapes.
        """
        if _has_uniform_keys(self):
            with contextlib.suppress(StackError):
                return fn(self._dense())
        numbers = fn(self._numbers())
        result = self._stack_elements(numbers.flatten().tolist(), numbers.shape)
        if (own := self._names) is not None:
            # The elements lose the names of the dims, so take them from a container without entries.
            names = fn(makers.dense({}, self._batch_size, None, own))._names
            if names is not None:
                result._name_tree(names)
        return result

    def _numbers(self) -> Tensor:
        """Number the elements of the batch from 0; return the numbers as a tensor of the batch size."""
        self._check_sizes()
        return torch.arange(math.prod(self._batch_size)).reshape(self._batch_size)

    def _check_sizes(self) -> None:
        """Raise if the members have different batch sizes."""
        if -1 in self._batch_size:
            raise ShapeError(
                f"the members of this lazy stack have different batch sizes, {list(self._batch_size)} together: their "
                "elements can be indexed and rearranged in each member only"
            )

    def _stack_elements(self, numbers: Sequence[int], size: torch.Size) -> Any:
        """Stack single elements to nested lazy stacks along dim 0.

        Args:
            numbers: the position of each element in the flattened batch of this stack.
            size: the batch size of the result.
        """
        elements = self._elements()
        sample = elements[0] if elements else _make_row(self._entries.sample[0])

        def pack(part: Any, inner: torch.Size) -> Any:
            if not isinstance(part, list):
                return part
            template = None if part else sample.expand(inner)
            return type(self)._over(Members([pack(item, inner[1:]) for item in part], 0, template=template))

        return pack(nested_lists([elements[number] for number in numbers], size), size[1:])

    def _elements(self) -> list[Any]:
        """Return all elements of the batch, as views, in the order of their numbers."""
        store, size = self._entries, self._batch_size
        inner = math.prod(size[store.dim + 1 :])
        columns = [elements_of(member) for member in store.containers]
        count = len(columns)
        return [columns[n // inner % count][n // (inner * count) * inner + n % inner] for n in range(math.prod(size))]

    # --- operations on the batch dims -------------------------------------------------------------------------------

    def _by_members(self, op: BatchOp) -> Any:
        """Apply `op`, made for this stack or a container around it, to the members.

        If the members cannot do it, it runs on the dense stack. A reshape then rearranges single elements.
        """
        own, store, given = self._batch_size, self._entries, op
        if len(own) > len(op.old):
            op = op.with_size(own)
        found = op.on_members(store.dim, len(store.containers)) if store.containers else None
        if isinstance(op, Reshape):
            if -1 in own and len(op.size) == 1 and math.prod(own[: store.dim]) == 1:
                # `reshape(-1)` takes members of unequal sizes: their elements follow each other.
                rows = [row for member in store.containers for row in elements_of(member)]
                return type(self)._over(Members(rows, 0, template=None if rows else _make_row(store.sample[0])))
            self._check_sizes()
            return self if op.size == op.old else self._reshape_by_members(op, found, given)
        if found is not None:
            return self._of_members(op, *found)
        return self._rearrange(lambda part: op.leaf(part) if isinstance(part, Tensor) else part._on_batch(op))

    def _reshape_by_members(self, op: Reshape, found: ForMembers | None, given: BatchOp) -> Any:
        """Return the elements in the same order with another batch size.

        `given` is the operation on the container around this stack. The dims behind it keep their names.
        """
        result = None
        if found is not None:
            try:
                result = self._of_members(op, *found)
            except RuntimeError:
                # Rows of ragged leaves cannot be reshaped, but can be selected one by one below.
                if not any(leaf.is_nested for leaf in self._leaves()):
                    raise
        if result is None:
            if not (self._batch_size.numel() and op.size):
                return self._dense()._on_batch(given)
            result = self._stack_elements(range(op.size.numel()), op.size)
        # `on_members` sets the stack dim name for other operations, so clear it before the reshape sets all names.
        result._entries.name = None
        if (names := self._rename_dims(len(given.size), len(given.old), given.rename)) is not None:
            result._name_tree(names)
        return result

    def _of_members(self, op: BatchOp, inner: BatchOp | None, dim: int | None) -> Any:
        """Apply `inner` to the members and stack the results along `dim`; `None` returns the result of the only one."""
        store = self._entries
        members = store.containers
        if dim is None:
            return members[0].copy() if inner is None else members[0]._on_batch(inner)
        positions = op.positions(store.dim, len(members))
        taken = members if positions is None else [members[position] for position in positions]
        if inner is not None:
            sized = [inner if m._batch_size == inner.old else inner.with_size(m._batch_size) for m in taken]
            taken = [member._on_batch(part) for member, part in zip(taken, sized, strict=True)]
        else:
            taken = [member.clone() for member in taken] if op.copies else taken.copy()
        return self._like(taken, dim, None if taken else members[0].copy())

    def _cut_by_members(self, op: Cut) -> Sequence[Any]:
        """Cut the members and stack the pieces. A cut along the stack dim selects whole members."""
        store, own = self._entries, self._batch_size
        if not store.containers:
            return self._dense()._split_batch(op.with_size(own, op.dim))  # type: ignore[no-any-return]
        if op.dim != store.dim:
            inner = op.with_size(drop_dim(own, store.dim), op.dim - (op.dim > store.dim))
            after = store.dim - (op.lengths is None and op.dim < store.dim)
            rows = zip(*[member._split_batch(inner) for member in store.containers], strict=True)
            return [self._like(list(row), after) for row in rows]
        if op.lengths is None:
            return store.containers
        parts = [store.containers[start : start + length] for start, length in zip(*op.bounds(), strict=True)]
        return [self._like(part, None, None if part else store.containers[0].copy()) for part in parts]


def _make_row(node: Contract) -> Any:
    """Return the keys, dtypes and shapes of a row of a batch without rows."""
    dims = len(node._batch_size)

    def make_leaf(leaf: Tensor) -> Tensor:
        shape = (0,) if leaf.is_nested else leaf.shape[dims:]
        return torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)

    return node._map(make_leaf, torch.Size(()), dims, lambda names: names[dims:])


def _has_uniform_keys(node: Contract) -> bool:
    """Return whether the members of each stack in a tree have the same keys, also of values and empty containers."""
    if not isinstance(node, LazyCore):
        return all(_has_uniform_keys(value) for value in node._structure().values() if isinstance(value, Contract))
    first, *rest = node._entries.sample
    keys = set(first.keys(True))
    return all(set(other.keys(True)) == keys for other in rest) and all(map(_has_uniform_keys, node._entries.sample))


def _is_scalar(item: object) -> bool:
    return isinstance(item, Tensor) and item.ndim == 0 and item.dtype not in _MASKS


def _width(item: object) -> int:
    """Return the number of dims that one component of an index addresses."""
    if item is None:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in _MASKS else 1


def _trim(items: list[Any]) -> tuple[Any, ...]:
    """Remove the full slices at the end of an index."""
    while items and isinstance(items[-1], slice) and items[-1] == _FULL:
        items.pop()
    return tuple(items)


def _check_positions(item: Tensor, count: int, dim: int) -> list[int]:
    if item.is_floating_point() or item.is_complex():
        raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, got one of {item.dtype}")
    positions: list[int] = item.flatten().tolist()
    for position in positions:
        if not -count <= position < count:
            raise IndexError(f"index {position} is out of bounds for dimension {dim} with size {count}")
    return positions


def _are_tensors_apart(items: list[Any]) -> bool:
    """Return whether the tensors of an index are separated by slices or `None`."""
    kinds = [isinstance(item, Tensor) for item in items if not isinstance(item, int)]
    first, last = kinds.index(True), len(kinds) - 1 - kinds[::-1].index(True)
    return not all(kinds[first:last])


def _has_slice_before_tensors(items: list[Any]) -> bool:
    """Return whether a slice or `None` comes before the first tensor of an index."""
    for item in items:
        if isinstance(item, Tensor):
            return False
        if not isinstance(item, int):
            return True
    return False
