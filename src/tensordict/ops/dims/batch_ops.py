"""Operations on the batch dims as values: what each does to sizes, names and leaves, and how it is undone.

The public methods of `shape.py` and `stacking.py` check their arguments and make one of these, which `_on_batch` and
`_cut` do. A `LazyView` does it when it is read, and its inverse when it is written; the end of a `with` block does the
inverse.
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
from tensordict.core.shapes import PerNdim, swapped_pair, with_dim

ForMembers = tuple["BatchOp | None", int | None]


class BatchOp:
    """An operation on the batch dims of a container of batch size `old`; never changed once it is made.

    Attributes:
        name: the public method.
        old: the batch size before. What is nested in the container that it is made for may have further dims.
        size: that after.
        leaf: does it to a tensor that begins with the batch dims; dims count from the front.
        args: what else the class is made with.
        is_view: whether the result is a view, which is memory-mapped or shared where the original is.
        copies: whether members of a lazy stack to which nothing is done are copied.
    """

    __slots__ = ("leaf", "old", "size")

    name: str
    old: Size
    size: Size
    leaf: LeafFn
    args: tuple[Any, ...] = ()
    is_view: bool = False
    copies: bool = False

    def rename(self, names: Names) -> Names:
        """The names of the dims after it, given those before."""
        return names

    def inverse(self) -> BatchOp:
        """What makes batch size `old` of `size` again, the elements in their places."""
        return Reshape(self.size, self.old)

    def __call__(self, result: Any) -> Any:
        """Undo it, at the end of a `with` block over its result."""
        if result._batch_size[: len(self.size)] != self.size:
            raise ShapeError(
                f"{self.name} made the batch size {list(self.size)} and cannot be undone for "
                f"{list(result._batch_size)}: the batch size was changed meanwhile"
            )
        return result._on_batch(self.inverse())

    def over(self, size: Size) -> BatchOp:
        """The same for a container of this batch size: of other lengths, or with further dims behind."""
        return type(self)(size, *self.args)  # type: ignore[call-arg]

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        """What is done to the members of a lazy stack along `dim`, and the stack dim after it.

        `None` when only the dense stack can do it; in the place of the operation when nothing is done to the members;
        in the place of the dim when the result is no stack but its only member.
        """
        return None

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        """The members of a lazy stack that the result has, in order; `None` for all."""
        return None

    def on_stack(self, stack: Any) -> Any:
        """Do it to a lazy stack."""
        return stack._by_members(self)

    def call(self) -> tuple[Any, ...]:
        """The public method and its arguments, as in `("permute", 1, 0)`."""
        return (self.name, *self.args)

    def same_as(self, other: BatchOp) -> bool:
        """Whether two do the same."""
        return (type(self), self.old, self.size, self.args) == (type(other), other.old, other.size, other.args)


# --- another form of the same elements --------------------------------------------------------------------------------


class Reshape(BatchOp):
    """The elements, in their order, under another batch size; `method` is "view" or "reshape"."""

    method = "reshape"

    def __init__(self, old: Size, size: Size, method: str = "reshape") -> None:
        self.old, self.size, self.is_view = old, size, method == "view"
        self.name = self.method = method
        if old and len(size) == 1 and not self.is_view:
            self.leaf = methodcaller("flatten", 0, len(old) - 1)
        else:
            self.leaf = _to_sizes(Tensor.view if self.is_view else Tensor.reshape, tuple(size), len(old))

    def rename(self, names: Names) -> Names:
        return [None] * len(self.size)

    def over(self, size: Size) -> BatchOp:
        return Reshape(size, self.size + size[len(self.old) :], self.method)

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        # A dim of the new size has to run over the members as the stack dim does.
        before = math.prod(self.old[:dim])
        for after, length in enumerate(self.size):
            if length == count and math.prod(self.size[:after]) == before:
                old, new = without(self.old, dim), without(self.size, after)
                return None if new == old else Reshape(old, new, self.method), after
        return None

    def call(self) -> tuple[Any, ...]:
        return (self.name, *self.size)


class Flatten(Reshape):
    """The dims from `start` to `end`, included, as one; without dims, one is added."""

    name = "flatten"

    def __init__(self, old: Size, start: int, end: int) -> None:
        self.old, self.start, self.end = old, start, end
        self.size = Size((*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :]))
        self.leaf = methodcaller("flatten", start, end) if old else methodcaller("unsqueeze", 0)

    def rename(self, names: Names) -> Names:
        start, end = self.start, self.end
        return [*names[:start], names[start] if names and start == end else None, *names[end + 1 :]]


class Unflatten(Reshape):
    """The dim at `dim` as several, of the sizes `parts`."""

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


# --- another order of the dims ----------------------------------------------------------------------------------------


class Permute(BatchOp):
    """The dims in another order."""

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

    def over(self, size: Size) -> BatchOp:
        return permuted(size, (*self.order, *range(len(self.old), len(size))))

    def on_members(self, dim: int, count: int) -> ForMembers:
        order = self.order
        inner = lowered(order, dim)
        return None if list(inner) == sorted(inner) else permuted(without(self.old, dim), inner), order.index(dim)


class Transpose(Permute):
    """Two dims swapped, which torch does faster."""

    __slots__ = ()
    name = "transpose"

    def __init__(self, old: Size, dim0: int, dim1: int) -> None:
        self.old, self.args = old, (dim0, dim1) if dim0 < dim1 else (dim1, dim0)

    # Both are made when asked for: a lazy stack whose members stay as they are needs neither.

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


def permuted(old: Size, order: tuple[int, ...]) -> Permute:
    """The operation that brings the dims in another order."""
    pair = swapped_pair(order)
    return Permute(old, *order) if pair is None else Transpose(old, *pair)


# --- dims of size 1, and expansion ------------------------------------------------------------------------------------


class Squeeze(BatchOp):
    """Without some dims, whose size is 1."""

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
        inner = lowered(dropped, dim)
        after = None if dim in dropped else dim - sum(d < dim for d in dropped)
        return Squeeze(without(self.old, dim), *inner) if inner else None, after

    def call(self) -> tuple[Any, ...]:
        return (self.name, self.args[0] if len(self.args) == 1 else self.args)


class Unsqueeze(BatchOp):
    """With a dim of size 1 added."""

    __slots__ = ("args",)
    name = "unsqueeze"
    is_view = True

    def __init__(self, old: Size, dim: int) -> None:
        size = list(old)
        size.insert(dim, 1)
        self.old, self.size, self.args = old, Size(size), (dim,)
        # Torch's indexing with None is a quarter faster than its `unsqueeze`.
        self.leaf = itemgetter(None) if dim == 0 else methodcaller("unsqueeze", dim)

    def rename(self, names: Names) -> Names:
        (dim,) = self.args
        return [*names[:dim], None, *names[dim:]]

    def inverse(self) -> BatchOp:
        return Squeeze(self.size, *self.args)

    def on_members(self, dim: int, count: int) -> ForMembers:
        (new,) = self.args
        inner, after = (new, dim + 1) if new <= dim else (new - 1, dim)
        return Unsqueeze(without(self.old, dim), inner), after


class Expand(BatchOp):
    """Dims of size 1 repeated and dims added in front, without copying."""

    name = "expand"

    def __init__(self, old: Size, size: Size) -> None:
        head, batch_dims = tuple(size), len(old)
        extents = PerNdim(lambda ndim: head + (-1,) * (ndim - batch_dims))
        self.old, self.size = old, size
        self.leaf = (lambda v: v.expand(*extents[v.dim()])) if head else (lambda v: v.expand(extents[v.dim()]))

    def rename(self, names: Names) -> Names:
        return [*[None] * (len(self.size) - len(self.old)), *names]

    def over(self, size: Size) -> BatchOp:
        return Expand(size, self.size + size[len(self.old) :])

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        after = dim + len(self.size) - len(self.old)
        return (Expand(without(self.old, dim), without(self.size, after)), after) if self.size[after] else None

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        wanted = self.size[dim + len(self.size) - len(self.old)]
        return None if wanted == count else [0] * wanted


# --- the same dims, other elements ------------------------------------------------------------------------------------


class Flip(BatchOp):
    """The elements in reverse order along some dims."""

    name = "flip"
    copies = True

    def __init__(self, old: Size, *dims: int) -> None:
        self.old, self.size, self.args = old, old, dims
        # Torch parses an int 0.6 us faster than a tuple of one.
        self.leaf = methodcaller("flip", dims[0] if len(dims) == 1 else dims)

    def on_members(self, dim: int, count: int) -> ForMembers:
        inner = lowered(self.args, dim)
        return Flip(without(self.old, dim), *inner) if inner else None, dim

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        return range(count)[::-1] if dim in self.args else None


class Rot90(BatchOp):
    """Rotated by 90 degrees, `k` times, in the plane of two dims."""

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
    """The elements shifted along some dims, or along the first `flat` ones as if they were one."""

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
        return Roll(without(self.old, dim), steps, lowered(dims, dim)) if steps else None, dim

    def positions(self, dim: int, count: int) -> Sequence[int]:
        shifts, dims, _ = self.args
        shift = sum(shift for shift, d in zip(shifts, dims, strict=True) if d == dim)
        return [(position - shift) % count for position in range(count)]


class Narrow(BatchOp):
    """The elements `start` to `start + length` of a dim."""

    name = "narrow"
    is_view = True

    def __init__(self, old: Size, dim: int, start: int, length: int) -> None:
        self.old, self.size, self.args = old, with_dim(old, dim, length), (dim, start, length)
        self.leaf = methodcaller("narrow", dim, start, length)

    def on_members(self, dim: int, count: int) -> ForMembers:
        at, start, length = self.args
        return None if at == dim else Narrow(without(self.old, dim), at - (at > dim), start, length), dim

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        at, start, length = self.args
        return range(start, start + length) if at == dim else None


# --- repetition -------------------------------------------------------------------------------------------------------


class Repeat(BatchOp):
    """The batch repeated along its dims, and along dims added in front."""

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

    def over(self, size: Size) -> BatchOp:
        return Repeat(size, *self.args, *[1] * (len(size) - len(self.old)))

    def on_members(self, dim: int, count: int) -> ForMembers | None:
        times = self.args
        after = dim + len(times) - len(self.old)
        inner = times[:after] + times[after + 1 :]
        return (Repeat(without(self.old, dim), *inner) if inner else None, after) if times[after] else None

    def positions(self, dim: int, count: int) -> Sequence[int]:
        return [*range(count)] * self.args[dim + len(self.args) - len(self.old)]


class RepeatInterleave(BatchOp):
    """Every element of a dim repeated, as often as `repeats` says."""

    name = "repeat_interleave"
    copies = True

    def __init__(
        self, old: Size, dim: int, repeats: Tensor | int, output_size: int | None, device: torch.device | None
    ) -> None:
        # One index for all leaves: repeat_interleave itself would make it anew for each. Where the members of a lazy
        # stack have different lengths, each of them has one.
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
            return RepeatInterleave(without(self.old, dim), at - (at > dim), *how), dim
        return (None, dim) if len(self.index) else None

    def positions(self, dim: int, count: int) -> Sequence[int] | None:
        return self.index.tolist() if self.args[0] == dim else None


# --- cutting ----------------------------------------------------------------------------------------------------------


class Cut:
    """The batch in several pieces along `dim`: of these lengths, or single elements, which no longer have the dim.

    Attributes:
        old: the batch size before, as that of a `BatchOp`.
        lengths: those of the pieces; `None` for single elements.
        starts: where each piece begins; `None` when they lie one behind the other.
        leaf: cuts a tensor.
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
        """The batch sizes of the pieces."""
        if self.lengths is None:
            rest = list(self.old)
            return rest.pop(self.dim) * [Size(rest)]
        if torch.compiler.is_compiling():
            # A set of lengths fixes the sizes of a graph.
            return [with_dim(self.old, self.dim, length) for length in self.lengths]
        by_length = {length: with_dim(self.old, self.dim, length) for length in set(self.lengths)}
        return [by_length[length] for length in self.lengths]

    def rename(self, names: Names) -> Names:
        """The names of the dims of each piece, given those before."""
        return names[: self.dim] + names[self.dim + 1 :] if self.lengths is None else names

    def bounds(self) -> tuple[Iterable[int], list[int]]:
        """Where the pieces begin, and their lengths."""
        lengths = self.lengths or []
        return self.starts or [0, *itertools.accumulate(lengths)][: len(lengths)], lengths

    def ragged_leaf(self) -> Callable[[Any], Sequence[Any]]:
        """What cuts ragged leaves, too."""
        dim = self.dim
        return (lambda leaf: ragged.unbind(leaf, dim)) if self.lengths is None else ragged.Split(*self.bounds(), dim)

    def over(self, size: Size, dim: int) -> Cut:
        """The same for a container of this batch size, along this dim."""
        return Cut(size, dim, self.lengths, self.starts)

    def on_stack(self, stack: Any) -> Any:
        """Do it to a lazy stack."""
        return stack._cut_by_members(self)


# --- helpers ----------------------------------------------------------------------------------------------------------


def without(size: Size, dim: int) -> Size:
    """A size without one of its dims."""
    return size[:dim] + size[dim + 1 :]


def lowered(dims: Iterable[int], dim: int) -> tuple[int, ...]:
    """Dims of a lazy stack along `dim` as those of its members; the stack dim itself is left out."""
    return tuple([d - (d > dim) for d in dims if d != dim])


def _to_sizes(method: Callable[..., Tensor], head: tuple[int, ...], batch_dims: int) -> LeafFn:
    """`method`, such as `Tensor.view`, giving a leaf the sizes `head` in place of its `batch_dims` leading dims."""
    if not head:
        return lambda v: method(v, v.shape[batch_dims:])

    # Torch parses ints 0.5 to 1.5 us faster than a tuple or a Size; without batch dims there might be none to parse.
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
