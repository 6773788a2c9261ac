"""Lazy stacks along their dims: indexing, assignment, and the shape operations."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.containers.lazy.core import LazyCore, elements_of
from tensordict.containers.lazy.members import Members
from tensordict.core import settings
from tensordict.core.context import remember
from tensordict.core.contract import Contract, Names, Rename
from tensordict.core.errors import ShapeError, StackError
from tensordict.core.indexing import leaf_index, result_size
from tensordict.core.shapes import as_dim, as_dims, as_ints, as_new_dim, expanded, inferred
from tensordict.ops.indexing import _is_mask

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.ops.collection import TensorCollection

_FULL = slice(None)
_MASKS = (torch.bool, torch.uint8)


@dataclass(slots=True)
class _Picks:
    """What an index takes of a lazy stack.

    positions: the members that it takes, in the order of the result.
    rest: the index that is left for each of them; `()` when they are taken whole.
    dim: where the dims that run over `positions` are in the result.
    block: the sizes of these dims: none for an int, one for a slice.
    """

    positions: list[int]
    rest: tuple[Any, ...]
    dim: int
    block: tuple[int, ...]


class LazyDims(LazyCore):
    """An operation on the stack dim reorders the members; one on other dims is done by each of them.

    Where neither will do, the dense stack does it; an operation that only rearranges the elements of the batch gives
    lazy stacks of single elements when the shapes of the leaves do not allow a dense one.
    """

    # --- indexing ---------------------------------------------------------------------------------------------------

    def _index(self, index: Any) -> Any:
        members, dim = self._entries.containers, self._entries.dim
        if type(index) is int and dim == 0 and -len(members) <= index < len(members):
            return members[index]
        size = self._batch_size
        at = leaf_index(index, size)
        picks = self._picks(at) if members else None
        if picks is None:
            # A mask of several dims has become one tensor for each of them, which would tell names of dims.
            return self._rearranged(lambda stack: stack[index if _is_mask(index) else at])
        rest, taken = picks.rest, [members[position] for position in picks.positions]
        if rest:
            taken = [member._index(rest) for member in taken]
        if not picks.block:
            return taken[0]
        if len(picks.block) == 1:
            if taken:
                return self._like(taken, picks.dim)
            return self._like([], picks.dim, members[0]._index(rest) if rest else members[0].copy())
        if not taken:
            return self._rearranged(lambda stack: stack[at])
        # Lists of lists, the last dim changing fastest: nested stacks, whose dims all have the name of the stack dim.
        name = self._entries.name
        for length in reversed(picks.block):
            rows = range(0, len(taken), length)
            taken = [self._over(Members(taken[row : row + length], picks.dim, name=name)) for row in rows]
        return taken[0]

    def _picks(self, at: Any) -> _Picks | None:
        """What `at`, an output of `leaf_index`, takes of the members; `None` when it mixes them up."""
        dim = self._entries.dim
        # Torch takes an integer tensor without dims for an int.
        items: list[Any] = [int(item) if _is_scalar(item) else item for item in (at if type(at) is tuple else (at,))]
        position = found = 0
        while found < len(items) and position + _width(items[found]) <= dim:
            position += _width(items[found])
            found += 1
        if found == len(items):
            items += [_FULL] * (dim - position + 1)
            found = len(items) - 1
        item = items[found]
        rest = items[:found] + items[found + 1 :]
        if any(isinstance(other, bool) for other in items):
            return None
        before = sum(other is None or isinstance(other, slice) for other in items[:found])
        advanced = [i for i, other in enumerate(items) if isinstance(other, Tensor) and i != found]
        count = len(self._entries.containers)
        if isinstance(item, Tensor):
            if advanced or _width(item) != 1:
                return None
            if item.dtype in _MASKS:
                item = item.nonzero().squeeze(1)
            chosen = _checked_positions(item, count, dim)
            return _Picks(chosen, _trimmed(rest), before, tuple(item.shape))
        if advanced:
            # Torch puts the dims that index tensors make in the place of the first of them; in front when they are
            # apart, which they may no longer be without the stack dim.
            apart = _apart(items)
            if apart and not _apart(rest) and _basic_before(rest):
                return None
            if apart or advanced[0] < found:
                before += max(1 if items[i].dtype in _MASKS else items[i].ndim for i in advanced)
        if isinstance(item, int):
            result_size(item, torch.Size((count,)))
            return _Picks([item % count], _trimmed(rest), 0, ())
        result_size(item, torch.Size((count,)))
        chosen = list(range(count))[item]
        return _Picks(chosen, _trimmed(rest), before, (len(chosen),))

    def _rearranged(self, fn: Callable[[Any], Any]) -> Any:
        """`fn`, which rearranges the elements of the batch, of the dense stack, or else element by element.

        The dense stack has the entries of all members, in one shape; or there is none.
        """
        if _uniform(self):
            with contextlib.suppress(StackError):
                return fn(self._dense())
        return self._of_elements(fn(self._numbers()))

    def _numbers(self) -> Tensor:
        """The numbers of the elements of the batch."""
        self._check_sizes()
        return torch.arange(math.prod(self._batch_size)).reshape(self._batch_size)

    def _check_sizes(self) -> None:
        """Raise when the members have different batch sizes."""
        if -1 in self._batch_size:
            raise ShapeError(
                f"the members of this lazy stack have different batch sizes, {list(self._batch_size)} together: their "
                "elements can be taken and rearranged in each member only"
            )

    def _of_elements(self, numbers: Tensor) -> Any:
        """Lazy stacks, along dim 0, of the elements of the batch that have these numbers."""
        elements = self._elements()

        def packed(part: Any) -> Any:
            if not isinstance(part, list):
                return elements[part]
            return type(self)._over(
                Members([packed(item) for item in part], 0, template=elements[0] if elements else None)
            )

        return packed(numbers.tolist())

    def _elements(self) -> list[Any]:
        """All elements of the batch, as views, in the order of their numbers."""
        store, size = self._entries, self._batch_size
        inner = math.prod(size[store.dim + 1 :])
        columns = [elements_of(member) for member in store.containers]
        count = len(columns)
        return [columns[n // inner % count][n // (inner * count) * inner + n % inner] for n in range(math.prod(size))]

    # --- cutting ----------------------------------------------------------------------------------------------------

    def unbind(self, dim: int = 0) -> tuple[TensorCollection, ...]:  # type: ignore[override]
        """The members, along the stack dim; else lazy stacks of their elements. Arguments as for any container."""
        store = self._entries
        dim = as_dim(dim, len(self._batch_size))
        if dim == store.dim:
            return tuple(store.containers)
        if not store.containers:
            return self._dense().unbind(dim)  # type: ignore[no-any-return]
        inner, after = (dim, store.dim - 1) if dim < store.dim else (dim - 1, store.dim)
        rows = zip(*[member.unbind(inner) for member in store.containers], strict=True)
        return tuple([self._like(list(row), after) for row in rows])

    def _pieces(self, lengths: list[int], dim: int, cuts: tuple[int, ...] | None = None) -> tuple[Self, ...]:
        store = self._entries
        if not store.containers:
            pieces = self._dense()._pieces(lengths, dim, cuts)
        elif cuts is not None:
            parts = torch.arange(self._batch_size[dim]).tensor_split(cuts)
            bounds = [(int(part[0]), int(part[-1]) + 1) if len(part) else (0, 0) for part in parts]
            pieces = tuple([self._index((*[_FULL] * dim, slice(*bound))) for bound in bounds])
        elif dim == store.dim:
            pieces = tuple(
                [
                    self._like(store.containers[start:stop], None, None if stop > start else store.containers[0].copy())
                    for start, stop in _running(lengths)
                ]
            )
        else:
            inner = dim if dim < store.dim else dim - 1
            rows = zip(*[member._pieces(lengths, inner) for member in store.containers], strict=True)
            pieces = tuple([self._like(list(row)) for row in rows])
        return self._all_locked(pieces)

    def _all_locked(self, pieces: tuple[Self, ...]) -> tuple[Self, ...]:
        if self._locked:
            for piece in pieces:
                piece._lock_tree()
        return pieces

    # --- another form of the batch ----------------------------------------------------------------------------------

    def _lazily(self, members: list[Any], dim: int, name: bool = True) -> Self:
        """The result of a shape operation: a stack of other members, locked if this one is."""
        result = self._like(members, dim)
        if not name:
            result._entries.name = None
        if self._locked:
            result._lock_tree()
        return result

    def _resized(self, new: torch.Size, fn: str) -> Any:
        """The elements in the same order under another batch size; `fn` is `view` or `reshape`."""
        old, store = self._batch_size, self._entries
        if new == old:
            return self
        count = len(store.containers)
        head = math.prod(old[: store.dim])
        for dim, length in enumerate(new):
            if length == count and math.prod(new[:dim]) == head and math.prod(new) == math.prod(old) and count:
                inner = new[:dim] + new[dim + 1 :]
                try:
                    return self._lazily([getattr(member, fn)(inner) for member in store.containers], dim, name=False)
                except RuntimeError:
                    if not any(leaf.is_nested for leaf in self._leaves()):
                        raise
                    break  # ragged rows have no other batch size, but each of them can be taken by itself
        if not math.prod(old) or not new:
            return self._dense().reshape(new)
        result = self._of_elements(self._numbers().reshape(new))
        if self._locked:
            result._lock_tree()
        return result

    def view(self, *shape: Any, size: Any = None, batch_size: Any = None) -> Self:
        """The same memory under another batch size, or dtype; arguments as for any container.

        The stack dim can be merged with others: the result is then a lazy stack of single elements.
        """
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return super().view(*shape, batch_size=batch_size)
        self._check_sizes()
        old = self._batch_size
        new = inferred(as_ints(shape, size), old)
        if new == old:
            return self._unchanged()
        if settings.lazy_legacy_possible and settings.lazy_legacy():
            return super().view(new)
        return remember(self._resized(new, "view"), self, methodcaller("reshape", old))  # type: ignore[no-any-return]

    def reshape(self, *args: Any, shape: Any = None, size: Any = None, inplace: bool = False) -> Self:
        """The same elements under another batch size; arguments as for any container, result as :meth:`view`."""
        self._refuse_inplace(inplace, "reshape")
        self._check_sizes()
        new = inferred(as_ints(args, size if shape is None else shape), self._batch_size)
        return self._resized(new, "reshape")  # type: ignore[no-any-return]

    def flatten(self, start_dim: int | None = None, end_dim: int | None = None, *, inplace: bool = False) -> Self:
        """Merge neighbouring batch dims into one; arguments as for any container, result as :meth:`view`."""
        old = self._batch_size
        self._refuse_inplace(inplace, "flatten")
        self._check_sizes()
        lead = len(old)
        start = 0 if start_dim is None else as_dim(start_dim, lead)
        end = lead - 1 if end_dim is None else as_dim(end_dim, lead)
        if end < start:
            raise ShapeError(f"flatten needs start_dim before end_dim, got {start_dim} and {end_dim}")
        new = torch.Size((*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :]))
        names = self.names
        result = self if new == old else self._resized(new, "reshape")
        after = [*names[:start], names[start] if start == end else None, *names[end + 1 :]]
        return self._named_after(result, after, methodcaller("reshape", old))  # type: ignore[no-any-return]

    def unflatten(self, dim: int, unflattened_size: Any, *, inplace: bool = False) -> Self:
        """Cut one batch dim into several; arguments as for any container, result as :meth:`view`."""
        old = self._batch_size
        self._refuse_inplace(inplace, "unflatten")
        self._check_sizes()
        dim = as_dim(dim, len(old))
        parts = inferred(as_ints((unflattened_size,)), old[dim : dim + 1])
        if not parts:
            raise ShapeError("unflatten needs at least one size")
        names, added = self.names, len(parts)
        result = self._resized(old[:dim] + parts + old[dim + 1 :], "view")
        back = methodcaller("flatten", dim, dim + added - 1)
        after = [*names[:dim], *[None] * (added - 1), *names[dim:]]
        return self._named_after(result, after, back)  # type: ignore[no-any-return]

    def _named_after(self, result: Any, names: Names, back: Callable[[Any], Any]) -> Any:
        """`result`, its dims named, as one that `back` undoes."""
        if result is self:
            return self._unchanged()
        if any(name is not None for name in names):
            result._names = names
        return remember(result, self, back)

    def _refuse_inplace(self, inplace: bool, what: str) -> None:
        if inplace:
            raise ShapeError(f"{what} cannot change a lazy stack in place: its batch size is that of its members")

    # --- another order of the dims ----------------------------------------------------------------------------------

    def _permuted(self, order: tuple[int, ...]) -> Self:
        if order == tuple(range(len(order))):
            return self._unchanged()
        if not self._entries.containers:
            return self._dense()._permuted(order)  # type: ignore[no-any-return]
        dim = self._entries.dim
        inner = tuple([d - (d > dim) for d in order if d != dim])
        still = inner == tuple(range(len(inner)))
        members = self._entries.containers
        result = self._lazily(
            members.copy() if still else [member.permute(inner) for member in members], order.index(dim)
        )
        back = [order.index(d) for d in range(len(order))]
        return remember(result, self, lambda out: out.permute(back))

    def _transposed(self, dim0: int, dim1: int) -> Self:
        order = list(range(len(self._batch_size)))
        order[dim0], order[dim1] = dim1, dim0
        return self._permuted(tuple(order))

    # --- dims of size 1, and expansion ------------------------------------------------------------------------------

    def squeeze(self, dim: int | tuple[int, ...] | None = None) -> Self:
        """Without batch dims of size 1; arguments as for any container. Without the stack dim, the only member."""
        old, store = self._batch_size, self._entries
        given = range(len(old)) if dim is None else as_dims(dim, len(old))
        dropped = [d for d in given if old[d] == 1]
        if not dropped:
            return self._unchanged()
        inner = tuple([d - (d > store.dim) for d in dropped if d != store.dim])
        if store.dim in dropped:
            if settings.lazy_legacy_possible and settings.lazy_legacy():
                return super().squeeze(tuple(dropped))
            result = store.containers[0].squeeze(inner) if inner else store.containers[0].copy()
            if self._locked and not result._locked:
                result._lock_tree()
        elif not store.containers:
            result = self._dense().squeeze(tuple(dropped))
        else:
            after = store.dim - sum(d < store.dim for d in dropped)
            result = self._lazily([member.squeeze(inner) for member in store.containers], after)
        return remember(result, self, methodcaller("reshape", old))  # type: ignore[no-any-return]

    def unsqueeze(self, dim: int) -> Self:
        """With a batch dim of size 1 added at `dim`; arguments and errors as for any container."""
        store = self._entries
        dim = as_new_dim(dim, len(self._batch_size))
        inner, after = (dim, store.dim + 1) if dim <= store.dim else (dim - 1, store.dim)
        if store.containers:
            result = self._lazily([member.unsqueeze(inner) for member in store.containers], after)
        else:
            result = self._dense().unsqueeze(dim)
        return remember(result, self, methodcaller("squeeze", dim))

    def expand(self, *args: Any, size: Any = None, shape: Any = None) -> Self:
        """With batch dims of size 1 repeated, and dims added in front; arguments and errors as for any container."""
        old, store = self._batch_size, self._entries
        new = expanded(as_ints(args, shape if size is None else size), old)
        if not store.containers:
            return self._dense().expand(new)  # type: ignore[no-any-return]
        after = store.dim + len(new) - len(old)
        inner = new[:after] + new[after + 1 :]
        members = [member.expand(inner) for member in store.containers]
        if new[after] != len(members):
            members = [members[0].copy() for _ in range(new[after])]
            if not members:
                return self._dense().expand(new)  # type: ignore[no-any-return]
        return self._lazily(members, after)

    # --- the same dims, other elements ------------------------------------------------------------------------------

    def flip(self, dims: int | tuple[int, ...]) -> Self:
        """Copies with the elements in reverse order along batch dims; arguments and errors as for any container."""
        store = self._entries
        turned = as_dims(dims, len(self._batch_size))
        inner = tuple([d - (d > store.dim) for d in turned if d != store.dim])
        members = [member.flip(inner) if inner else member.clone() for member in store.containers]
        if not members:
            return self._dense().flip(turned)  # type: ignore[no-any-return]
        return self._lazily(members[::-1] if store.dim in turned else members, store.dim)

    def narrow(self, dim: int, start: int | Tensor, length: int) -> Self:
        """The elements `start` to `start + length` of a batch dim; arguments and errors as for any container."""
        # Torch's own checks and messages, on an index of the batch.
        dim = as_dim(dim, len(self._batch_size))
        kept = torch.arange(self._batch_size[dim]).narrow(0, start, length)
        first = int(kept[0]) if length else 0
        result = self._index((*[_FULL] * dim, slice(first, first + length)))
        return self._all_locked((result,))[0]

    def repeat(self, *repeats: Any, inplace: bool = False) -> Self:
        """Copies with the batch repeated along its dims; arguments and errors as for any container."""
        store, lead = self._entries, len(self._batch_size)
        self._refuse_inplace(inplace, "repeat")
        times = as_ints(repeats, what="number of repetitions")
        added = len(times) - lead
        after = store.dim + added
        if added < 0 or min(times, default=0) < 0 or not store.containers or not times[after]:
            return self._dense().repeat(*repeats)  # type: ignore[no-any-return]
        inner = times[:after] + times[after + 1 :]
        members = [
            member.repeat(inner) if inner else member.clone()
            for _ in range(times[after])
            for member in store.containers
        ]
        return self._lazily(members, after)

    def repeat_interleave(
        self, repeats: Tensor | int, dim: int | None = None, *, output_size: int | None = None, inplace: bool = False
    ) -> Self:
        """Copies with every element of a batch dim repeated; arguments and errors as for any container."""
        self._refuse_inplace(inplace, "repeat_interleave")
        if dim is None and len(self._batch_size) != 1:
            return self.flatten().repeat_interleave(repeats, 0, output_size=output_size)
        store = self._entries
        dim = as_dim(0 if dim is None else dim, len(self._batch_size))
        if dim != store.dim and store.containers:
            inner = dim - (dim > store.dim)
            members = [member.repeat_interleave(repeats, inner, output_size=output_size) for member in store.containers]
            return self._lazily(members, store.dim)
        order = torch.arange(len(store.containers)).repeat_interleave(torch.as_tensor(repeats).cpu()).tolist()
        if not order:
            return self._dense().repeat_interleave(repeats, dim)  # type: ignore[no-any-return]
        return self._lazily([store.containers[position].clone() for position in order], dim)

    def roll(
        self, shifts: int | tuple[int, ...], dims: int | tuple[int, ...] | None = None, *, inplace: bool = False
    ) -> Self:
        """Copies with the elements shifted along batch dims; arguments and errors as for any container."""
        store, lead = self._entries, len(self._batch_size)
        places = (dims,) if isinstance(dims, int) else dims
        steps = (shifts,) if isinstance(shifts, int) else shifts
        self._refuse_inplace(inplace, "roll")
        if places is None or len(places) != len(steps) or not store.containers:
            return self._dense().roll(shifts, dims)  # type: ignore[no-any-return]
        inner = [(step, as_dim(d, lead)) for step, d in zip(steps, places, strict=True)]
        order, elsewhere = torch.arange(len(store.containers)), []
        for step, d in inner:
            if d == store.dim:
                order = order.roll(step)
            else:
                elsewhere.append((step, d - (d > store.dim)))
        members = [store.containers[position] for position in order.tolist()]
        if not elsewhere:
            return self._lazily([member.clone() for member in members], store.dim)
        moves = tuple(zip(*elsewhere, strict=True))
        return self._lazily([member.roll(*moves) for member in members], store.dim)

    def _reshaped(
        self,
        fn: Callable[[Any], Any],
        size: torch.Size,
        lead: int,
        rename: Rename | None,
        whole: Callable[[Any], Any] | None = None,
        view: bool = False,
    ) -> Self:
        return self._dense()._reshaped(fn, size, lead, rename)  # type: ignore[no-any-return]


def _uniform(node: Contract) -> bool:
    """Whether the members of all stacks in a tree have the same entries."""
    if not isinstance(node, LazyCore):
        return all(_uniform(value) for value in node._outline().values() if isinstance(value, Contract))
    first, *rest = node._entries.sample
    keys = set(first.keys(True, True))
    return all(set(other.keys(True, True)) == keys for other in rest) and all(map(_uniform, node._entries.sample))


def _is_scalar(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim == 0 and item.dtype not in _MASKS


def _width(item: Any) -> int:
    """How many dims one component of an index addresses."""
    if item is None or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype in _MASKS else 1


def _trimmed(items: list[Any]) -> tuple[Any, ...]:
    """An index without the full slices at its end."""
    while items and isinstance(items[-1], slice) and items[-1] == _FULL:
        items.pop()
    return tuple(items)


def _checked_positions(item: Tensor, count: int, dim: int) -> list[int]:
    if item.is_floating_point() or item.is_complex():
        raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, got one of {item.dtype}")
    positions: list[int] = item.flatten().tolist()
    for position in positions:
        if not -count <= position < count:
            raise IndexError(f"index {position} is out of bounds for dimension {dim} with size {count}")
    return positions


def _apart(items: list[Any]) -> bool:
    """Whether something that keeps a dim is between the tensors of an index."""
    kinds = [isinstance(item, Tensor) for item in items if not isinstance(item, int)]
    first, last = kinds.index(True), len(kinds) - 1 - kinds[::-1].index(True)
    return not all(kinds[first:last])


def _basic_before(items: list[Any]) -> bool:
    """Whether a dim is kept or made before the first tensor of an index."""
    for item in items:
        if isinstance(item, Tensor):
            return False
        if not isinstance(item, int):
            return True
    return False


def _running(lengths: list[int]) -> list[tuple[int, int]]:
    """The (start, stop) of pieces of these lengths, one behind the other."""
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))
