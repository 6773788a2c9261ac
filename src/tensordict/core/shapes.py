"""Check and convert the sizes and dims that users pass to methods, and compute the resulting batch sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tensordict.core.exceptions import DimError, ShapeError

_NO_DIMS = torch.Size(())


def as_size(size: Any) -> torch.Size:
    """Convert an int, a sequence of ints, a `torch.Size` or `None` (no batch dims) to a batch size.

    Raises:
        TypeError: `size` is none of these.
        ValueError: a dim is negative.
    """
    kind = type(size)
    if kind is torch.Size:
        return size  # type: ignore[no-any-return]
    if size is None:
        return _NO_DIMS
    if kind is not list and kind is not tuple:
        if isinstance(size, (int, torch.SymInt)):
            size = (size,)
        elif isinstance(size, str) or not isinstance(size, Iterable):
            raise TypeError(f"a batch size is an int or a sequence of ints, got {size!r} of type {kind.__name__}")
    out = torch.Size(size)
    for length in out:
        # -1 stands for the ragged dim of a nested tensor, which is never the first dim.
        if length < 0 and (length != -1 or out[0] == -1):
            raise ValueError(f"a batch size cannot have negative dims, got {list(out)}")
    return out


class PerNdim(dict[int, tuple[int, ...]]):
    """Caches the int arguments of an operation, computed once per number of dims of the leaves.

    They are passed unpacked, as in `v.expand(*args[v.dim()])`. Passing a tuple or `torch.Size` costs 0.5 to 1.5 us
    more.
    """

    def __init__(self, make: Callable[[int], tuple[int, ...]]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, ndim: int) -> tuple[int, ...]:
        made = self[ndim] = self._make(ndim)
        return made


def refuse_two_sizes(auto_batch_size: bool, batch_size: object) -> None:
    """Raise an error if a batch size is given, and is to be found too.

    Raises:
        TypeError: both arguments are given.
    """
    if auto_batch_size and batch_size is not None:
        raise TypeError("batch_size and auto_batch_size=True exclude each other: pass one of them")


def as_dim(dim: Any, ndim: int) -> int:
    """Convert a dim of a container with `ndim` batch dims to a non-negative dim.

    Raises:
        IndexError: the dim is out of range.
        TypeError: the dim is not an int.
    """
    if type(dim) is not int:
        if isinstance(dim, bool):
            raise TypeError(f"a dim is an int, got {dim!r} of type bool")
        try:
            dim = operator.index(dim)
        except TypeError:
            raise TypeError(f"a dim is an int, got {dim!r} of type {type(dim).__name__}") from None
    if 0 <= dim < ndim:
        return dim  # type: ignore[no-any-return]
    if -ndim <= dim < 0:
        return dim + ndim  # type: ignore[no-any-return]
    if not ndim:
        raise DimError(f"dim {dim} given, but the container has no batch dims (batch_size=[])")
    raise DimError(
        f"dim {dim} is out of range: the container has {ndim} batch dims, so dims go from {-ndim} to {ndim - 1}"
    )


def as_new_dim(dim: object, ndim: int) -> int:
    """Convert the position of a new dim among `ndim` batch dims to a non-negative one; raises like `as_dim`."""
    if type(dim) is int and not -ndim - 1 <= dim <= ndim:
        raise DimError(f"dim {dim} is out of range: a dim added to {ndim} batch dims can be at {-ndim - 1} to {ndim}")
    return dim if type(dim) is int and dim >= 0 else as_dim(dim, ndim + 1)


def as_dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Convert an int or a sequence of ints to distinct non-negative dims; raises like `as_dim`."""
    if isinstance(dims, int):
        return (as_dim(dims, ndim),)
    items = tuple(dims)
    out = tuple([as_dim(dim, ndim) for dim in items])
    if len(set(out)) != len(out):
        raise ShapeError(f"each dim can be given once, got {items} for {ndim} batch dims")
    return out


def as_ints(args: tuple[Any, ...], keyword: object = None, what: str = "size") -> tuple[int, ...]:
    """Collect the ints of the calls `f(1, 2)`, `f((1, 2))` or `f(size=(1, 2))`.

    Raises:
        TypeError: no ints were given, or both by position and by keyword, or the items are not ints.
    """
    if keyword is not None:
        if args:
            raise TypeError(f"give the {what} by position or by keyword, not both: got {args} and {keyword!r}")
        args = (keyword,)
    if len(args) == 1 and not isinstance(args[0], (int, torch.SymInt)):
        if not isinstance(args[0], Iterable) or isinstance(args[0], str):
            raise TypeError(f"the {what} is made of ints, got {args[0]!r} of type {type(args[0]).__name__}")
        args = tuple(args[0])
    for item in args:
        if not isinstance(item, (int, torch.SymInt)):
            if hasattr(item, "__index__"):
                return tuple([int(item) for item in args])
            raise TypeError(f"the {what} is made of ints, got {item!r} of type {type(item).__name__}")
    return args


def infer_shape(shape: tuple[int, ...], size: torch.Size) -> torch.Size:
    """Fill in the `-1` of `shape`, if any, as the new shape of a batch of size `size`.

    Raises:
        RuntimeError: the numbers of elements differ.
    """
    count = size.numel()
    if shape == (-1,):
        return torch.Size((count,))
    holes = [i for i, n in enumerate(shape) if n < 0]
    if not holes:
        out = torch.Size(shape)
        if out.numel() == count:
            return out
    elif len(holes) == 1 and shape[holes[0]] == -1:
        rest = math.prod([n for n in shape if n >= 0])
        if rest and not count % rest:
            return torch.Size((*shape[: holes[0]], count // rest, *shape[holes[0] + 1 :]))
        if not rest and not count:
            raise ShapeError(f"shape {list(shape)} of a batch without elements leaves -1 open; write the size out")
    else:
        raise ShapeError(f"only one dim can be -1 and none can be below it, got shape {list(shape)}")
    raise ShapeError(f"shape {list(shape)} is invalid for a batch size {list(size)} of {count} elements")


def expand_size(shape: tuple[int, ...], size: torch.Size) -> torch.Size:
    """Return the size after expanding a batch of size `size` to `shape`; `-1` keeps a dim.

    Raises:
        RuntimeError: the size cannot be expanded to this shape.
    """
    extra = len(shape) - len(size)
    if extra < 0:
        raise ShapeError(f"cannot expand the batch size {list(size)} to the fewer dims of {list(shape)}")
    out = list(shape)
    for i, old in enumerate(size, extra):
        if out[i] == -1:
            out[i] = old
        elif old not in (1, out[i]):
            raise ShapeError(
                f"cannot expand the batch size {list(size)} to {list(shape)}: only dims of size 1 can be expanded"
            )
    if any(n < 0 for n in out):
        raise ShapeError(f"cannot expand the batch size {list(size)} to {list(shape)}: a new dim needs its size")
    return torch.Size(out)


def permutation(dims: tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Convert `dims` to non-negative dims, and check that they name each of `ndim` batch dims once."""
    order = as_dims(dims, ndim)
    if len(order) != ndim:
        raise ShapeError(f"a permutation names each of the {ndim} batch dims once, got {dims}")
    return order


def move_dims(source: object, destination: object, ndim: int) -> tuple[int, ...]:
    """Convert the arguments of `movedim` to a permutation."""
    origins = as_dims(source, ndim)
    targets = as_dims(destination, ndim)
    if len(origins) != len(targets):
        raise ShapeError(f"movedim needs as many sources as destinations, got {source} and {destination}")
    placed = dict(zip(targets, origins, strict=True))
    rest = iter([dim for dim in range(ndim) if dim not in origins])
    return tuple([placed[i] if i in placed else next(rest) for i in range(ndim)])


def find_swapped_pair(order: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the two dims that a permutation swaps; `None` for any other permutation."""
    moves = [i for i, dim in enumerate(order) if i != dim]
    return (moves[0], moves[1]) if len(moves) == 2 else None


def joined_size(items: Sequence[Any], dim: int, stacked: bool) -> torch.Size:
    """Return the batch size of stacked containers, or of containers concatenated along `dim`."""
    size = list(items[0]._batch_size)
    if stacked:
        size.insert(dim, len(items))
    else:
        size[dim] = sum([item._batch_size[dim] for item in items])
    return torch.Size(size)


def with_dim(size: torch.Size, dim: int, length: int) -> torch.Size:
    """Return `size` with its dim `dim` set to `length`."""
    sizes = list(size)
    sizes[dim] = length
    return torch.Size(sizes)


def split_lengths(length: int, split_size: object) -> list[int]:
    """Return the lengths of the pieces that `split(split_size)` makes of a dim of `length`.

    An integer tensor without dims counts as an int, a one-dimensional one as a list of ints.

    Raises:
        TypeError: `split_size` is neither an int nor a sequence of ints.
        ValueError: the int is not positive, or the ints do not add up to `length`.
    """
    if isinstance(split_size, torch.Tensor) and split_size.dim() < 2 and split_size.dtype is not torch.bool:
        split_size = split_size.tolist()
    if isinstance(split_size, int):
        if split_size < 0 or (split_size == 0 and length):  # a dim without elements is one piece, as in torch
            raise ShapeError(f"split_size must be positive, got {split_size}")
        # Counted in a loop: `[split_size] * count` would fix the sizes of a compiled graph, and Dynamo lacks `divmod`.
        lengths = []
        while length > split_size:
            lengths.append(split_size)
            length -= split_size
        return [*lengths, length]
    if not isinstance(split_size, (list, tuple)) or not all(isinstance(n, int) for n in split_size):
        raise TypeError(
            f"split_size is an int or a list of ints, got {split_size!r} of type {type(split_size).__name__}"
        )
    if any(n < 0 for n in split_size) or sum(split_size) != length:
        found = sum(split_size)
        raise ShapeError(
            f"the sizes {list(split_size)} do not add up to the {length} elements of the dim, but to {found}"
        )
    return list(split_size)


def even_lengths(length: int, sections: int) -> list[int]:
    """Return the lengths of `sections` pieces that differ by at most one, longer pieces first."""
    if sections <= 0:
        raise ShapeError(f"the number of sections must be positive, got {sections}")
    # No `divmod`: compiled code does not support it for varying sizes.
    short, longer = length // sections, length % sections
    return [short + 1] * longer + [short] * (sections - longer)


def nested_lists(values: Sequence[Any], size: Sequence[int]) -> Any:
    """Arrange values in nested lists whose levels are the dims of `size`; return the single value for no dims."""
    if not size:
        return values[0]
    step = math.prod(size[1:])
    return [nested_lists(values[i * step : (i + 1) * step], size[1:]) for i in range(size[0])]


def broadcasts_to(size: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether a tensor of this size broadcasts to `target` without enlarging it."""
    return len(size) <= len(target) and all(a in (1, b) for a, b in zip(size[::-1], target[::-1], strict=False))
