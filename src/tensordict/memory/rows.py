"""Reading scattered rows of tensors that lie in mapped files, as random mini-batches are.

A page that is missing makes the kernel read far around it, megabytes for a row of some bytes, one page after the other.
So it is told beforehand which pages are wanted, all at once. Measured with rows of 12 KiB in files of three times the
memory: 14,000 rows a second instead of 100.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.memory import kernel, system

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
# Longer rows are copied as integers of these sizes, in pieces of at least so many.
_WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_SHORTEST = 512

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
        return
    # Torch would have all threads meet at every row, which on busy cores takes ten times as long as the copy.
    row = leaf.stride(0) * leaf.itemsize
    start = leaf.storage_offset() * leaf.itemsize
    width = next(width for width in _WIDTHS if not (row % width or start % width or leaf.data_ptr() % width))
    pieces = _pieces(row // width)
    if not pieces:
        source, target = leaf.data_ptr(), out.data_ptr()
        for number, position in enumerate(positions.tolist()):
            ctypes.memmove(target + number * row, source + position * row, row)
        return
    if pieces > 1:
        positions = (positions.unsqueeze(1) * pieces + torch.arange(pieces, device="cpu")).view(-1)
    torch.index_select(_as_words(leaf, width, pieces), 0, positions, out=_as_words(out, width, pieces))


def _as_words(rows: Tensor, width: int, pieces: int) -> Tensor:
    """Rows as integers of `width` bytes, each row cut into so many."""
    flat = torch.empty(0, dtype=_WIDTHS[width], device="cpu")
    flat.set_(rows.untyped_storage(), rows.storage_offset() * rows.itemsize // width, (rows.nbytes // width,), (1,))
    return flat.view(len(rows) * pieces, -1)


@functools.lru_cache(maxsize=256)
def _pieces(length: int) -> int:
    """Into how many equal pieces a row of so many elements is cut, each of less than a grain; 0 when it cannot be."""
    least = length // _GRAIN + 1
    return next((count for count in range(least, length // _SHORTEST + 1) if length % count == 0), 0)


def copy_from(addresses: np.ndarray[Any, np.dtype[np.int64]], out: Tensor, aligned: int, missed: int = 0) -> int:
    """Copy the rows at these addresses to those of a contiguous tensor; they may lie in many files.

    To ask the kernel of rows in many files whether they are in memory takes as long as copying them, so it is told that
    they are needed for some time after many were not.

    Args:
        addresses: where each row begins; it is as long as a row of `out`, in one piece, and stays mapped meanwhile.
        out: on the CPU; with as many rows, of at least a byte.
        aligned: 8, 4, 2 or 1: a number of bytes, of which the place of the first row of each file is a multiple.
        missed: what the call before gave, for rows of the same files.

    Returns:
        for how many calls more the kernel is told.
    """
    row = out.stride(0) * out.itemsize
    faults = 0 if missed else system.major_faults()
    # Of the largest integers that all rows consist of.
    width = (bits := row | aligned) & -bits
    pieces = _pieces(row // width) or 1
    count = row // width // pieces
    # A tensor over all memory, one row for each integer in it, of which no others than the rows asked for are touched.
    words = torch.frombuffer(_everything, dtype=_WIDTHS[width], count=_SIZE // width)
    target = out.view(len(out), -1).view(_WIDTHS[width]).view(-1, count)
    windows = words.as_strided((_SIZE // width - count + 1, count), (1, 1))
    for start in range(0, len(addresses), step := max(1, _AHEAD // row)):
        part = addresses[start : start + step]
        if missed:
            kernel.will_need(torch.from_numpy(part), row)
        at = (part - _FIRST) // width
        if pieces > 1:
            at = np.add.outer(at, np.arange(pieces) * count).reshape(-1)
        here = target if step >= len(addresses) else target[start * pieces : (start + step) * pieces]
        torch.index_select(windows, 0, torch.from_numpy(at), out=here)
    if missed:
        return missed - 1
    return _DISTRUST if system.major_faults() - faults > len(addresses) // _SAMPLE else 0


# What a process can address at most, but for the first page, which nothing is in.
_FIRST = 4096
_SIZE = min(1 << 48, sys.maxsize) - _FIRST
_everything = (ctypes.c_char * _SIZE).from_address(_FIRST)


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
