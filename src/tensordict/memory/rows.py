"""Reading scattered rows of tensors that lie in mapped files, as random mini-batches are.

A page that is missing makes the kernel read far around it, megabytes for a row of some bytes, one page after the other.
So it is told beforehand which pages are wanted, all at once. Measured with rows of 12 KiB in files of three times the
memory: 14,000 rows a second instead of 100.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.memory import files, kernel, system

# Smaller files are in memory after a few of the kernel's readings anyway.
_LARGE = 32 << 20
# At most this much is asked for before it is copied: more might be dropped again before it is used.
_AHEAD = 64 << 20
_MANY_PAGES = 8 << 20
# Of how many rows the kernel is asked whether they are in memory, and for how many batches not, after it was wrong.
_SAMPLE = 16
_DISTRUST = 256
_mistaken: dict[int, int] = {}
_INTEGERS = (torch.int64, torch.int32)

# From so many elements on, torch's threads share the copy of one row.
_GRAIN = 32768
# Rows of so many bytes are copied without the lock of the interpreter.
_LONG = 8 << 10
# Several threads copy long rows of so many bytes in all.
_SHARED = 4 << 20
# With fewer rows of each tensor on average, rows are copied one by one.
_MANY = 8

# Rows as `records` gives them, or numbers of rows.
Values = np.ndarray[Any, np.dtype[Any]]
# The number of a tensor, and the number of a row in it.
Place = tuple[int, int]

# The large maps that are no part of a `MemoryMappedTensor`, which knows by itself: where they begin and end.
maps: dict[int, int] = {}

_reading = threading.local()


@contextlib.contextmanager
def into_shared_memory() -> Iterator[None]:
    """Have the rows that this thread reads lie in shared memory: another process gets them without one more copy."""
    _reading.shared = True
    try:
        yield
    finally:
        _reading.shared = False


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for the rows that are read."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes or not getattr(_reading, "shared", False):
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = internals.new_shared_storage(nbytes)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)


def remember(owner: object, start: int, nbytes: int) -> None:
    """Have rows of tensors over a map, which lives as long as its owner, be read as those of a `MemoryMappedTensor`."""
    if nbytes >= _LARGE:
        maps[start] = start + nbytes
        weakref.finalize(owner, maps.pop, start, None)


def reader(at: Any) -> Callable[[Any], Any]:
    """What gives `leaf[at]`, fast for leaves in `maps`; `at` is an output of `leaf_index`."""

    def read(leaf: Any) -> Any:
        if type(leaf) is Tensor and type(at) is Tensor and _lies_in_map(leaf) and picks_rows(leaf, at):
            return rows_of(leaf, at)
        return leaf[at]

    return read


def picks_rows(leaf: Tensor, at: Tensor) -> bool:
    """Whether `at` picks rows of a large leaf, each in one piece, and nothing looks at how this is done."""
    return (
        at.dtype in _INTEGERS
        and at.ndim > 0
        and at.is_cpu
        and at.numel() > 0
        and not leaf.is_nested
        and leaf.ndim > 0
        and leaf.numel() * leaf.itemsize >= _LARGE
        and leaf.is_contiguous()
        and not leaf.requires_grad
        and not torch.compiler.is_compiling()
        and not internals.is_transformed(at)
    )


def rows_of(leaf: Tensor, at: Tensor) -> Tensor:
    """The same as `leaf[at]`, where `leaf` lies in a mapped file and `picks_rows(leaf, at)`."""
    count = leaf.shape[0]
    low, high = (int(bound) for bound in at.aminmax())
    if not -count <= low <= high < count:
        raise IndexError(f"an index from {low} to {high} is out of bounds for dimension 0 with size {count}")
    positions = at.reshape(-1).long()
    if low < 0:
        positions = torch.where(positions < 0, positions + count, positions)
    shape = (*at.shape, *leaf.shape[1:])
    out = fresh((len(positions), *leaf.shape[1:]), leaf.dtype)
    if out.nbytes >= _MANY_PAGES:
        # In pages of 4 KiB, making 38 MiB of memory takes as long again as copying them.
        kernel.prefer_large_pages(out.data_ptr(), out.nbytes)
    row = leaf.stride(0) * leaf.itemsize
    for start in range(0, len(positions), step := max(1, _AHEAD // row)):
        part = positions[start : start + step]
        asked = not _seem_in_memory(leaf.data_ptr(), row, part)
        if asked:
            _ask_for(leaf.data_ptr(), row, part)
        faults = 0 if asked else system.major_faults()
        _copy(leaf, part, out[start : start + step])
        if not asked and system.major_faults() - faults > len(part) // _SAMPLE:
            _mistaken[leaf.data_ptr()] = _DISTRUST
    return out.view(shape)


def _copy(leaf: Tensor, positions: Tensor, out: Tensor) -> None:
    """Copy the rows at these positions, which are not negative; `leaf` and `out` are contiguous."""
    if leaf.stride(0) < _GRAIN:
        # Several times faster than `leaf[positions]`, which goes element by element.
        torch.index_select(leaf, 0, positions, out=out)
    else:
        # Torch would have all threads meet at every row, which on busy cores takes ten times as long as the copy.
        _copy_long([records(leaf)], [(0, position) for position in positions.tolist()], records(out))


# --- rows of many tensors ---------------------------------------------------------------------------------------------


def records(leaf: Tensor) -> Values:
    """Return the rows of a contiguous CPU tensor as an array with one element of raw bytes for each row.

    The array keeps the memory of the tensor, and checks the bounds of an index.
    """
    content = leaf.detach().as_subclass(Tensor).view(-1).view(torch.uint8).numpy()
    return content.view(f"V{leaf.nbytes // len(leaf)}")


class Picks:
    """Rows that are taken of several tensors, in any order.

    Attributes:
        local: for each row, which one of its tensor it is.
        hit: the numbers of the tensors that rows are taken of, rising.
        order: the rows by tensor.
        cuts: where the rows of each tensor begin in `order`, and the number of rows.
    """

    def __init__(self, numbers: Values, local: Values, count: int) -> None:
        self.local = local
        # NumPy sorts integers of two bytes several times as fast as those of eight.
        self.order = numbers.astype(np.min_scalar_type(count)).argsort(kind="stable")
        ordered = numbers[self.order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        self.hit: list[int] = ordered[first].tolist()
        self.cuts: list[int] = [*first.tolist(), len(numbers)]

    @functools.cached_property
    def which(self) -> Values:
        """For each row, the place of its tensor in `hit`."""
        which = np.empty_like(self.order)
        which[self.order] = np.repeat(np.arange(len(self.hit)), np.diff(self.cuts))
        return which

    @functools.cached_property
    def places(self) -> list[Place]:
        """For each row, `which` and `local`."""
        return list(zip(self.which.tolist(), self.local.tolist(), strict=True))


def gather(sources: Sequence[Values], picks: Picks, out: Tensor, missed: int = 0) -> int:
    """Copy rows of many tensors to the rows of one.

    To ask the kernel of rows in many files whether they are in memory takes as long as copying them, so it is told that
    they are needed for some time after many were not.

    Args:
        sources: the rows of each tensor in `picks.hit`, as `records` gives them.
        picks: the rows.
        out: contiguous and on the CPU; its rows have at least a byte.
        missed: the result of the call before for rows of the same files.

    Returns:
        for how many more calls the kernel is told.

    Raises:
        IndexError: a tensor has no such row.
    """
    target = records(out)
    size = target.itemsize
    faults = 0 if missed else system.major_faults()
    if missed:
        begin = np.array([source.__array_interface__["data"][0] for source in sources])
        kernel.will_need(torch.from_numpy(begin[picks.which] + picks.local * size), size)
    if size >= _LONG:
        _copy_long(sources, picks.places, target)
    elif len(target) < _MANY * len(sources):
        # One by one takes 0.17 us a row, all rows of one tensor at once 2 us.
        for at, (which, local) in enumerate(picks.places):
            target[at] = sources[which][local]
    else:
        for source, start, stop in zip(sources, picks.cuts, picks.cuts[1:], strict=False):
            rows = picks.order[start:stop]
            target[rows] = source[picks.local[rows]]
    if missed:
        return missed - 1
    return _DISTRUST if system.major_faults() - faults > len(target) // _SAMPLE else 0


def _copy_long(sources: Sequence[Values], places: Sequence[Place], target: Values) -> None:
    """Copy long rows one by one, in several threads when there are many bytes."""
    given, taken = [_as_bytes(source) for source in sources], _as_bytes(target)

    def copy(start: int) -> None:
        for row, (which, local) in zip(taken[start:], places[start : start + step], strict=False):
            row[:] = given[which][local]

    num_threads = torch.get_num_threads() if target.nbytes >= _SHARED else 1
    step = -(-len(places) // num_threads)
    files.run_all([functools.partial(copy, start) for start in range(0, len(places), step)], num_threads)


def _as_bytes(rows: Values) -> Values:
    return rows.view(np.uint8).reshape(len(rows), -1)


def _lies_in_map(leaf: Tensor) -> bool:
    if leaf.nbytes < _LARGE or internals.is_transformed(leaf):
        return False
    start = leaf.data_ptr()
    return any(begin <= start < end for begin, end in maps.copy().items())


def _seem_in_memory(start: int, size: int, positions: Tensor) -> bool:
    """Whether a sample of the rows is in memory: asking for 256 rows takes 500 us, copying them 150.

    Where the kernel turns out to be wrong, it is not believed for some time.
    """
    left = _mistaken.pop(start, 0)
    if left:
        _mistaken[start] = left - 1
        return False
    sample = positions[:: max(1, len(positions) // _SAMPLE)].tolist()
    return kernel.are_in_memory(start + position * size for position in sample)


def _ask_for(start: int, size: int, positions: Tensor) -> None:
    """Tell the kernel that the rows of `size` bytes at these positions will be needed."""
    kernel.will_need(positions * size + start, size)
