"""Operations on the batch dims as objects: each computes the new size, names and leaves, and knows its inverse.

The public methods of `shape.py` and `stacking.py` check their arguments and build one of these objects. `_on_batch` and
`_cut` run it. A `LazyView` runs it when an entry is read, and runs its inverse when an entry is written. The end of a
`with` block also runs the inverse.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter, methodcaller
from typing import Any

import torch
from torch import Size, Tensor

from tensordict.core import ragged
from tensordict.core.contract import LeafFn, Names
from tensordict.core.exceptions import ShapeError
from tensordict.core.shapes import PerNdim, find_swapped_pair, with_dim

ForMembers = tuple["BatchOp | None", int | None]


class BatchOp:
    """An operation on the batch dims of a container. Immutable.

    Attributes:
        name: the public method.
        old: the batch size before the operation. Nested containers may have more dims.
        size: the batch size after it.
        leaf: applies the operation to a tensor whose leading dims are the batch dims.
        args: the other arguments of the constructor. Dims are counted from the front.
        is_view: True if the result is a view. A view of memory-mapped or shared memory is also marked so.
        copies: True if members of a lazy stack are copied even if the operation does not change them.
        new_dims: the dims of the result that the operation inserts, for which a non-tensor value becomes a stack.
    """

    __slots__ = ("leaf", "old", "size")

    name: str
    old: Size
    size: Size
    leaf: LeafFn
    args: tuple[Any, ...] = ()
    is_view: bool = False
    copies: bool = False
    new_dims: Sequence[int] = ()

    def rename(self, names: Names) -> Names:
        """Return the dim names after the operation; `names` are the names before it."""
        return names

    def inverse(self) -> BatchOp:
        """Return the operation that leads from `size` back to `old`, with every element in its old position."""
        return Reshape(self.size, self.old)

    def __call__(self, result: Any) -> Any:
        """Undo the operation, at the end of a `with` block over its result."""
        if result._batch_size[: len(self.size)] != self.size:
            raise ShapeError(
                f"{self.name} made the batch size {list(self.size)} and cannot be undone for "
                f"{list(result._batch_size)}: the batch size was changed meanwhile"
            )
        return result._on_batch(self.inverse())

    def with_size(self, size: Size) -> BatchOp:
        """Return the same operation for a container of another batch size: other lengths, or more trailing dims."""
        return type(self)(size, *self.args)  # type: ignore[call-arg]

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        """Translate the operation to a lazy stack of `count` members along `dim`.

        Returns:
            the operation for each member, `None` if members do not change; and the new stack dim, `None` if the result
            is the only member itself. Without the pair, `None`: only a dense stack can do this operation.
        """
        return None

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        """Select the members of a lazy stack that the result consists of.

        Returns:
            the old position of each member of the result; `None` if the members stay the same, in the same order.
        """
        return None

    def on_stack(self, stack: Any) -> Any:
        """Apply the operation to a lazy stack."""
        return stack._by_members(self)

    def call(self) -> tuple[Any, ...]:
        """Return the public method and its arguments, for example `("permute", 1, 0)`."""
        return (self.name, *self.args)

    def same_as(self, other: BatchOp) -> bool:
        """Return whether two operations are equal."""
        return (type(self), self.old, self.size, self.args) == (type(other), other.old, other.size, other.args)


# --- reshaping --------------------------------------------------------------------------------------------------------


class Reshape(BatchOp):
    """Give the elements another batch size, in the same order. `method` is "view" or "reshape"."""

    method = "reshape"

    def __init__(self, old: Size, size: Size, method: str = "reshape") -> None:
        self.old, self.size, self.is_view = old, size, method == "view"
        self.name = self.method = method
        if old and len(size) == 1 and not self.is_view:
            self.leaf = methodcaller("flatten", 0, len(old) - 1)
        else:
            self.leaf = _make_reshape(Tensor.view if self.is_view else Tensor.reshape, tuple(size), len(old))

    def rename(self, names: Names) -> Names:
        return [None] * len(self.size)

    def with_size(self, size: Size) -> BatchOp:
        return Reshape(size, self.size + size[len(self.old) :], self.method)

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        # The new size must have a dim that steps through the members exactly as the stack dim does.
        before = math.prod(self.old[:dim])
        for after, length in enumerate(self.size):
            if length == count and math.prod(self.size[:after]) == before:
                old, new = drop_dim(self.old, dim), drop_dim(self.size, after)
                return None if new == old else Reshape(old, new, self.method), after
        return None

    def call(self) -> tuple[Any, ...]:
        return (self.name, *self.size)


class Flatten(Reshape):
    """Merge the dims from `start` to `end`, inclusive. A container without batch dims gets one."""

    name = "flatten"

    def __init__(self, old: Size, start: int, end: int) -> None:
        self.old, self.start, self.end = old, start, end
        self.size = Size((*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :]))
        self.leaf = methodcaller("flatten", start, end) if old else methodcaller("unsqueeze", 0)

    def rename(self, names: Names) -> Names:
        start, end = self.start, self.end
        return [*names[:start], names[start] if names and start == end else None, *names[end + 1 :]]


class Unflatten(Reshape):
    """Split one dim into several dims of the sizes `parts`."""

    name = "unflatten"
    method = "view"

    def __init__(self, old: Size, dim: int, parts: Size) -> None:
        sizes = tuple(parts)
        self.old, self.dim, self.added = old, dim, len(sizes) - 1
        self.size = old[:dim] + parts + old[dim + 1 :]
        self.leaf = lambda v: torch.unflatten(v, dim, sizes)

    def rename(self, names: Names) -> Names:
        return [*names[: self.dim], *[None] * self.added, *names[self.dim :]]

    def inverse(self) -> BatchOp:
        return Flatten(self.size, self.dim, self.dim + self.added)


# --- reordering dims --------------------------------------------------------------------------------------------------


class Permute(BatchOp):
    """Reorder the dims."""

    __slots__ = ("args", "order")
    name = "permute"
    is_view = True
    order: Sequence[int]

    def __init__(self, old: Size, *order: int) -> None:
        batch_dims = len(old)
        args = PerNdim(lambda ndim: (*order, *range(batch_dims, ndim)))
        self.old, self.size = old, Size([old[dim] for dim in order])
        self.order = self.args = order
        self.leaf = lambda v: v.permute(*args[v.dim()])

    def rename(self, names: Names) -> Names:
        return [names[dim] for dim in self.order]

    def inverse(self) -> BatchOp:
        return Permute(self.size, *[self.order.index(dim) for dim in range(len(self.old))])

    def with_size(self, size: Size) -> BatchOp:
        return make_permute(size, (*self.order, *range(len(self.old), len(size))))

    def on_members(self, dim: int, count: int) -> ForMembers:
        order = self.order
        inner = to_member_dims(order, dim)
        member_op = None if list(inner) == sorted(inner) else make_permute(drop_dim(self.old, dim), inner)
        return member_op, order.index(dim)


class Transpose(Permute):
    """Swap two dims. Torch does this faster than a general permutation."""

    __slots__ = ()
    name = "transpose"

    def __init__(self, old: Size, dim0: int, dim1: int) -> None:
        self.old, self.args = old, (dim0, dim1) if dim0 < dim1 else (dim1, dim0)

    # `leaf` and `size` are computed on demand: a lazy stack whose members do not change needs neither.

    @property
    def leaf(self) -> LeafFn:  # type: ignore[override]
        return methodcaller("transpose", *self.args)

    @property
    def size(self) -> Size:  # type: ignore[override]
        size, (dim0, dim1) = list(self.old), self.args
        size[dim0], size[dim1] = size[dim1], size[dim0]
        return Size(size)

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        order = list(range(len(self.old)))
        dim0, dim1 = self.args
        order[dim0], order[dim1] = dim1, dim0
        return order

    def rename(self, names: Names) -> Names:
        dim0, dim1 = self.args
        swapped = list(names)
        swapped[dim0], swapped[dim1] = names[dim1], names[dim0]
        return swapped

    def inverse(self) -> BatchOp:
        return Transpose(self.size, *self.args)


def make_permute(old: Size, order: tuple[int, ...]) -> Permute:
    """Build the operation that reorders the dims: a `Transpose` if it only swaps two."""
    pair = find_swapped_pair(order)
    return Permute(old, *order) if pair is None else Transpose(old, *pair)


# --- dims of size 1, and expansion ------------------------------------------------------------------------------------


class Squeeze(BatchOp):
    """Drop dims of size 1."""

    __slots__ = ("args", "kept")
    name = "squeeze"
    is_view = True

    def __init__(self, old: Size, *dropped: int) -> None:
        self.old, self.args = old, dropped
        self.kept = [dim for dim in range(len(old)) if dim not in dropped]
        self.size = Size([old[dim] for dim in self.kept])
        self.leaf = methodcaller("squeeze", dropped[0] if len(dropped) == 1 else dropped)

    def rename(self, names: Names) -> Names:
        return [names[dim] for dim in self.kept]

    def inverse(self) -> BatchOp:
        return Unsqueeze(self.size, *self.args) if len(self.args) == 1 else super().inverse()

    def on_members(self, dim: int, count: int) -> ForMembers:
        dropped = self.args
        inner = to_member_dims(dropped, dim)
        after = None if dim in dropped else dim - sum(d < dim for d in dropped)
        return Squeeze(drop_dim(self.old, dim), *inner) if inner else None, after

    def call(self) -> tuple[Any, ...]:
        return (self.name, self.args[0] if len(self.args) == 1 else self.args)


class Unsqueeze(BatchOp):
    """Insert a dim of size 1."""

    __slots__ = ("args", "new_dims")
    name = "unsqueeze"
    is_view = True

    def __init__(self, old: Size, dim: int) -> None:
        size = list(old)
        size.insert(dim, 1)
        self.old, self.size, self.args, self.new_dims = old, Size(size), (dim,), (dim,)
        # Indexing a tensor with None takes a quarter less time than `unsqueeze`.
        self.leaf = itemgetter(None) if dim == 0 else methodcaller("unsqueeze", dim)

    def rename(self, names: Names) -> Names:
        (dim,) = self.args
        return [*names[:dim], None, *names[dim:]]

    def inverse(self) -> BatchOp:
        return Squeeze(self.size, *self.args)

    def on_members(self, dim: int, count: int) -> ForMembers:
        (new,) = self.args
        inner, after = (new, dim + 1) if new <= dim else (new - 1, dim)
        return Unsqueeze(drop_dim(self.old, dim), inner), after


class Expand(BatchOp):
    """Repeat dims of size 1 and add leading dims, without copying."""

    __slots__ = ("new_dims",)
    name = "expand"

    def __init__(self, old: Size, size: Size) -> None:
        head, batch_dims = tuple(size), len(old)
        extents = PerNdim(lambda ndim: head + (-1,) * (ndim - batch_dims))
        self.old, self.size, self.new_dims = old, size, range(len(size) - len(old))
        self.leaf = (lambda v: v.expand(*extents[v.dim()])) if head else (lambda v: v.expand(extents[v.dim()]))

    def rename(self, names: Names) -> Names:
        return [*[None] * (len(self.size) - len(self.old)), *names]

    def with_size(self, size: Size) -> BatchOp:
        return Expand(size, self.size + size[len(self.old) :])

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        after = dim + len(self.size) - len(self.old)
        return (Expand(drop_dim(self.old, dim), drop_dim(self.size, after)), after) if self.size[after] else None

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        wanted = self.size[dim + len(self.size) - len(self.old)]
        return None if wanted == count else [0] * wanted


# --- moving elements --------------------------------------------------------------------------------------------------


class Flip(BatchOp):
    """Reverse the order of the elements along some dims."""

    name = "flip"
    copies = True

    def __init__(self, old: Size, *dims: int) -> None:
        self.old, self.size, self.args = old, old, dims
        # Torch parses an int 0.6 us faster than a tuple of one int.
        self.leaf = methodcaller("flip", dims[0] if len(dims) == 1 else dims)

    def on_members(self, dim: int, count: int) -> ForMembers:
        inner = to_member_dims(self.args, dim)
        return Flip(drop_dim(self.old, dim), *inner) if inner else None, dim

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        return range(count)[::-1] if dim in self.args else None


class Rot90(BatchOp):
    """Rotate by 90 degrees, `k` times, in the plane of two dims."""

    name = "rot90"

    def __init__(self, old: Size, k: int, *plane: int) -> None:
        self.order = list(range(len(old)))
        if k % 2:
            self.order[plane[0]], self.order[plane[1]] = plane[1], plane[0]
        self.old, self.size = old, Size([old[dim] for dim in self.order])
        self.leaf, self.args = methodcaller("rot90", k, plane), (k, *plane)

    def rename(self, names: Names) -> Names:
        return [names[dim] for dim in self.order]


class Roll(BatchOp):
    """Shift the elements along some dims. With `dims=None`, shift along the first `flat` dims as if flattened."""

    name = "roll"
    copies = True

    def __init__(self, old: Size, shifts: Any, dims: tuple[int, ...] | None, flat: int = 0) -> None:
        self.old, self.size, self.args = old, old, (shifts, dims, flat)
        if dims is None:
            self.leaf = methodcaller("roll", shifts, 0) if flat == 1 else _roll_flat(shifts, flat)
        else:
            one = len(dims) == 1
            self.leaf = methodcaller("roll", shifts[0], dims[0]) if one else methodcaller("roll", shifts, dims)

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        shifts, dims, _ = self.args
        if dims is None:
            return None
        steps = tuple([shift for shift, d in zip(shifts, dims, strict=True) if d != dim])
        return Roll(drop_dim(self.old, dim), steps, to_member_dims(dims, dim)) if steps else None, dim

    def positions(self, dim: int, count: int) -> Sequence[int]:
        shifts, dims, _ = self.args
        shift = sum(shift for shift, d in zip(shifts, dims, strict=True) if d == dim)
        return [(position - shift) % count for position in range(count)]


class Narrow(BatchOp):
    """Select the elements `start` to `start + length` of a dim."""

    name = "narrow"
    is_view = True

    def __init__(self, old: Size, dim: int, start: int, length: int) -> None:
        self.old, self.size, self.args = old, with_dim(old, dim, length), (dim, start, length)
        self.leaf = methodcaller("narrow", dim, start, length)

    def on_members(self, dim: int, count: int) -> ForMembers:
        at, start, length = self.args
        return None if at == dim else Narrow(drop_dim(self.old, dim), at - (at > dim), start, length), dim

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        at, start, length = self.args
        return range(start, start + length) if at == dim else None


# --- repetition -------------------------------------------------------------------------------------------------------


class Repeat(BatchOp):
    """Repeat the batch along its dims, and along new leading dims."""

    name = "repeat"
    copies = True

    def __init__(self, old: Size, *times: int) -> None:
        batch_dims, added = len(old), len(times) - len(old)
        counts = PerNdim(lambda ndim: times + (1,) * (ndim - batch_dims))
        self.old, self.args = old, times
        self.size = Size([n * size for n, size in zip(times, (1,) * added + tuple(old), strict=True)])
        self.leaf = (lambda v: v.repeat(*counts[v.dim()])) if times else (lambda v: v.repeat(counts[v.dim()]))

    def rename(self, names: Names) -> Names:
        return [*[None] * (len(self.size) - len(self.old)), *names]

    def with_size(self, size: Size) -> BatchOp:
        return Repeat(size, *self.args, *[1] * (len(size) - len(self.old)))

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        times = self.args
        after = dim + len(times) - len(self.old)
        inner = times[:after] + times[after + 1 :]
        return (Repeat(drop_dim(self.old, dim), *inner) if inner else None, after) if times[after] else None

    def positions(self, dim: int, count: int) -> Sequence[int]:
        return [*range(count)] * self.args[dim + len(self.args) - len(self.old)]


class RepeatInterleave(BatchOp):
    """Repeat every element of a dim `repeats` times. A tensor gives each element its own number."""

    name = "repeat_interleave"
    copies = True

    def __init__(
        self, old: Size, dim: int, repeats: Tensor | int, output_size: int | None, device: torch.device | None
    ) -> None:
        # All leaves share one index. Torch's repeat_interleave would compute it again for each leaf. A length of -1
        # means that the members of a lazy stack have different lengths. The index is then computed for each member.
        index = torch.arange(max(old[dim], 0), device=repeats.device if isinstance(repeats, Tensor) else device)
        if old[dim] >= 0:
            index = index.repeat_interleave(repeats, 0, output_size=output_size)
        placed = {index.device: index}

        def leaf(v: Tensor) -> Tensor:
            if v.device not in placed:
                placed[v.device] = index.to(v.device)
            return v.index_select(dim, placed[v.device])

        self.old, self.size, self.leaf = old, with_dim(old, dim, len(index)), leaf
        self.index, self.args = index, (dim, repeats, output_size, device)

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        at, *how = self.args
        if at != dim:
            return RepeatInterleave(drop_dim(self.old, dim), at - (at > dim), *how), dim
        return (None, dim) if len(self.index) else None

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        return self.index.tolist() if self.args[0] == dim else None


# --- splitting --------------------------------------------------------------------------------------------------------


class Cut:
    """Split the batch along `dim` into pieces of given lengths, or into single elements without that dim.

    Attributes:
        old: the batch size before the split; see `BatchOp.old`.
        lengths: the lengths of the pieces; `None` for single elements.
        starts: the first position of each piece; `None` if each piece starts at the end of the previous one.
        leaf: splits a tensor.
    """

    __slots__ = ("dim", "leaf", "lengths", "old", "starts")
    leaf: Callable[[Any], Sequence[Any]]

    def __init__(
        self, old: Size, dim: int, lengths: list[int] | None = None, starts: Sequence[int] | None = None
    ) -> None:
        self.old, self.dim, self.lengths, self.starts = old, dim, lengths, starts
        if lengths is None:
            self.leaf = methodcaller("unbind", dim)
        elif starts is None:
            self.leaf = methodcaller("split_with_sizes", lengths, dim)
        else:
            self.leaf = lambda v: [v.narrow(dim, *bound) for bound in zip(starts, lengths, strict=True)]

    def sizes(self) -> list[Size]:
        """Return the batch sizes of the pieces."""
        if self.lengths is None:
            rest = list(self.old)
            return rest.pop(self.dim) * [Size(rest)]
        if torch.compiler.is_compiling():
            # A set of lengths would make them constants of the graph.
            return [with_dim(self.old, self.dim, length) for length in self.lengths]
        by_length = {length: with_dim(self.old, self.dim, length) for length in set(self.lengths)}
        return [by_length[length] for length in self.lengths]

    def rename(self, names: Names) -> Names:
        """Return the dim names of each piece; `names` are the names before the split."""
        return names[: self.dim] + names[self.dim + 1 :] if self.lengths is None else names

    def bounds(self) -> tuple[Iterable[int], list[int]]:
        """Return the first positions and the lengths of the pieces."""
        lengths = self.lengths or []
        return self.starts or [0, *itertools.accumulate(lengths)][: len(lengths)], lengths

    def make_ragged_leaf(self) -> Callable[[Any], Sequence[Any]]:
        """Return a function that splits ragged leaves as well as dense ones."""
        dim = self.dim
        return (lambda leaf: ragged.unbind(leaf, dim)) if self.lengths is None else ragged.Split(*self.bounds(), dim)

    def with_size(self, size: Size, dim: int) -> Cut:
        """Return the same split for a container of another batch size, along another dim."""
        return Cut(size, dim, self.lengths, self.starts)

    def on_stack(self, stack: Any) -> Any:
        """Split a lazy stack."""
        return stack._cut_by_members(self)


# --- helpers ----------------------------------------------------------------------------------------------------------


def drop_dim(size: Size, dim: int) -> Size:
    """Return a size without one of its dims."""
    return size[:dim] + size[dim + 1 :]


def to_member_dims(dims: Iterable[int], dim: int) -> tuple[int, ...]:
    """Convert dims of a lazy stack along `dim` to dims of its members. The stack dim itself is dropped."""
    return tuple([d - (d > dim) for d in dims if d != dim])


def _make_reshape(method: Callable[..., Tensor], head: tuple[int, ...], batch_dims: int) -> LeafFn:
    """Return a function that replaces the first `batch_dims` dims of a leaf by dims of the sizes `head`.

    Args:
        method: `Tensor.view` or `Tensor.reshape`.
        head: the new sizes.
        batch_dims: the number of dims that they replace.
    """
    # `view()` and `reshape()` without sizes raise an error, so an empty head needs the Size form.
    if not head:
        return lambda v: method(v, v.shape[batch_dims:])

    # Torch parses ints 0.5 to 1.5 us faster than a tuple or a Size.
    def fn(v: Tensor) -> Tensor:
        features = v.dim() - batch_dims
        if features == 1:
            return method(v, *head, v.size(-1))
        return method(v, *head, *v.shape[batch_dims:]) if features else method(v, *head)

    return fn


def _roll_flat(shifts: Any, batch_dims: int) -> LeafFn:
    """Roll the `batch_dims` leading dims of a leaf as if they were one."""

    def fn(v: Tensor) -> Tensor:
        flat = v.flatten(0, batch_dims - 1) if batch_dims else v.unsqueeze(0)
        return flat.roll(shifts, 0).view(v.shape)

    return fn
