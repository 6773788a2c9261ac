"""Reads scattered rows of tensors in mapped files, for random mini-batches.

When a page is missing, the kernel reads megabytes around it, one page after the other. So this module announces all
needed pages first. Measured with rows of 12 KiB in files of three times the memory: 14,000 rows a second instead of
100.
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

# Smaller files are in memory after a few reads anyway.
_LARGE = 32 << 20
# The most bytes that are announced before they are copied; the kernel might drop more before they are used.
_AHEAD = 64 << 20
_MANY_PAGES = 8 << 20
# `_SAMPLE` rows of a batch are checked for being in memory. If the kernel was wrong about them, the next `_DISTRUST`
# batches are announced without a check.
_SAMPLE = 16
_DISTRUST = 256
_mistaken: dict[int, int] = {}
_INTEGERS = (torch.int64, torch.int32)

# Torch's threads share the copy of one row of at least so many elements.
_GRAIN = 32768
# Rows of at least so many bytes are copied without the GIL.
_LONG = 8 << 10
# Several threads copy long rows if all together have at least so many bytes.
_MIN_THREADED = 4 << 20
# With fewer rows for each tensor on average, rows are copied one by one.
_MANY = 8

# Rows as `records` gives them, or numbers of rows.
Values = np.ndarray[Any, np.dtype[Any]]
# The number of a tensor, and the number of a row in it.
Place = tuple[int, int]

# Start and end of each large map that plain tensors lie in. A `MemoryMappedTensor` knows its file without this table.
maps: dict[int, int] = {}

_this_thread = threading.local()


@contextlib.contextmanager
def into_shared_memory() -> Iterator[None]:
    """Read rows into shared memory in this thread, so that sending them to another process needs no copy."""
    _this_thread.shared = True
    try:
        yield
    finally:
        _this_thread.shared = False


def new_rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return uninitialized memory for rows; shared memory inside `into_shared_memory`."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes or not getattr(_this_thread, "shared", False):
        return torch.empty(shape, dtype=dtype, device="cpu")
    storage = internals.new_shared_storage(nbytes)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage).view(shape)


def register_map(owner: object, start: int, nbytes: int) -> None:
    """Register a map. Reads of rows of plain tensors over it then tell the kernel in advance which rows they need.

    Args:
        owner: the map ends when this object dies.
        start: the address of the map.
        nbytes: its size.
    """
    if nbytes >= _LARGE:
        maps[start] = start + nbytes
        weakref.finalize(owner, maps.pop, start, None)


def reader(at: Any) -> Callable[[Any], Any]:
    """Return a function that reads `leaf[at]`, fast for leaves in `maps`; `at` is an output of `leaf_index`."""

    def read(leaf: Any) -> Any:
        if type(leaf) is Tensor and type(at) is Tensor and _lies_in_map(leaf) and picks_rows(leaf, at):
            return rows_of(leaf, at)
        return leaf[at]

    return read


def picks_rows(leaf: Tensor, at: Tensor) -> bool:
    """Return True if `rows_of` can read `leaf[at]`: rows of a large contiguous leaf, outside autograd and compilers."""
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
    """Return `leaf[at]` of a leaf in a mapped file, provided that `picks_rows(leaf, at)`."""
    count = leaf.shape[0]
    low, high = (int(bound) for bound in at.aminmax())
    if not -count <= low <= high < count:
        raise IndexError(f"an index from {low} to {high} is out of bounds for dimension 0 with size {count}")
    positions = at.reshape(-1).long()
    if low < 0:
        positions = torch.where(positions < 0, positions + count, positions)
    shape = (*at.shape, *leaf.shape[1:])
    out = new_rows((len(positions), *leaf.shape[1:]), leaf.dtype)
    if out.nbytes >= _MANY_PAGES:
        # With pages of 4 KiB, allocating 38 MiB takes as long as copying them.
        kernel.prefer_large_pages(out.data_ptr(), out.nbytes)
    row = leaf.stride(0) * leaf.itemsize
    for start in range(0, len(positions), step := max(1, _AHEAD // row)):
        part = positions[start : start + step]
        asked = not _seem_in_memory(leaf.data_ptr(), row, part)
        if asked:
            _announce_rows(leaf.data_ptr(), row, part)
        faults = 0 if asked else system.major_faults()
        _copy(leaf, part, out[start : start + step])
        if not asked and system.major_faults() - faults > len(part) // _SAMPLE:
            _mistaken[leaf.data_ptr()] = _DISTRUST
    return out.view(shape)


def _copy(leaf: Tensor, positions: Tensor, out: Tensor) -> None:
    """Copy the rows at these positions, which are not negative; `leaf` and `out` are contiguous."""
    if leaf.stride(0) < _GRAIN:
        # Several times faster than `leaf[positions]`, which copies element by element.
        torch.index_select(leaf, 0, positions, out=out)
    else:
        # Torch would synchronize its threads at every row; on busy cores that takes ten times as long as the copy.
        _copy_long([records(leaf)], [(0, position) for position in positions.tolist()], records(out))


# --- rows of many tensors ---------------------------------------------------------------------------------------------


def records(leaf: Tensor) -> Values:
    """Return the rows of a contiguous CPU tensor as an array with one element of raw bytes for each row.

    The array keeps the memory of the tensor, and checks the bounds of an index.
    """
    content = leaf.detach().as_subclass(Tensor).view(-1).view(torch.uint8).numpy()
    return content.view(f"V{leaf.nbytes // len(leaf)}")


class Picks:
    """Rows to read from several tensors, in any order.

    Attributes:
        local: for each row, its position in its tensor.
        hit: the numbers of the tensors that have some of the rows, in rising order.
        order: the rows by tensor.
        cuts: where the rows of each tensor begin in `order`, and the number of rows.
    """

    def __init__(self, numbers: Values, local: Values, count: int) -> None:
        self.local = local
        # NumPy sorts 2-byte integers several times as fast as 8-byte ones.
        self.order = numbers.astype(np.min_scalar_type(count)).argsort(kind="stable")
        ordered = numbers[self.order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        self.hit: list[int] = ordered[first].tolist()
        self.cuts: list[int] = [*first.tolist(), len(numbers)]

    @functools.cached_property
    def which(self) -> Values:
        """For each row, the position of its tensor in `hit`."""
        which = np.empty_like(self.order)
        which[self.order] = np.repeat(np.arange(len(self.hit)), np.diff(self.cuts))
        return which

    @functools.cached_property
    def places(self) -> list[Place]:
        """For each row, `which` and `local`."""
        return list(zip(self.which.tolist(), self.local.tolist(), strict=True))


def gather(sources: Sequence[Values], picks: Picks, out: Tensor, announcements_left: int = 0) -> int:
    """Copy rows of many tensors to the rows of one.

    Checking whether rows of many files are in memory takes as long as copying them. So there is no check; after a call
    with many page faults, the next `_DISTRUST` calls tell the kernel which rows they will read.

    Args:
        sources: the rows of each tensor in `picks.hit`, as `records` gives them.
        picks: the rows.
        out: contiguous and on the CPU; its rows have at least a byte.
        announcements_left: the result of the previous call for the same files.

    Returns:
        the number of further calls that tell the kernel their rows.

    Raises:
        IndexError: a tensor has no such row.
    """
    target = records(out)
    size = target.itemsize
    faults = 0 if announcements_left else system.major_faults()
    if announcements_left:
        begin = np.array([source.__array_interface__["data"][0] for source in sources])
        kernel.announce_reads(torch.from_numpy(begin[picks.which] + picks.local * size), size)
    if size >= _LONG:
        _copy_long(sources, picks.places, target)
    elif len(target) < _MANY * len(sources):
        # A single row takes 0.17 us; all rows of one tensor together take 2 us.
        for at, (which, local) in enumerate(picks.places):
            target[at] = sources[which][local]
    else:
        for source, start, stop in zip(sources, picks.cuts, picks.cuts[1:], strict=False):
            rows = picks.order[start:stop]
            target[rows] = source[picks.local[rows]]
    if announcements_left:
        return announcements_left - 1
    return _DISTRUST if system.major_faults() - faults > len(target) // _SAMPLE else 0


def _copy_long(sources: Sequence[Values], places: Sequence[Place], target: Values) -> None:
    """Copy long rows one by one, in several threads when there are many bytes."""
    given, taken = [_as_bytes(source) for source in sources], _as_bytes(target)

    def copy(start: int) -> None:
        for row, (which, local) in zip(taken[start:], places[start : start + step], strict=False):
            row[:] = given[which][local]

    num_threads = torch.get_num_threads() if target.nbytes >= _MIN_THREADED else 1
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
    """Return True if a sample of the rows is in memory. Announcing 256 rows takes 500 us; copying them takes 150.

    After the kernel was wrong about a tensor, this returns False for some batches.
    """
    left = _mistaken.pop(start, 0)
    if left:
        _mistaken[start] = left - 1
        return False
    sample = positions[:: max(1, len(positions) // _SAMPLE)].tolist()
    return kernel.are_in_memory(start + position * size for position in sample)


def _announce_rows(start: int, size: int, positions: Tensor) -> None:
    """Tell the kernel that the rows of `size` bytes at these positions will be read."""
    kernel.announce_reads(positions * size + start, size)
