"""Writable tensors over read-only buffers, for unpickling objects out of shared stores such as Ray's.

Torch has no read-only tensors. A tensor over a buffer of the store would change the object for all processes, or crash.
So this module opens the file behind the memory again and maps it privately (MAP_PRIVATE in mmap(2)): the system copies
a page when this process first writes to it, and no other process sees the change.

`memory/kernel.py` finds and opens the file. If that fails or is switched off, this module copies the bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from tensordict.memory import kernel, system
from tensordict.memory.flat_buffers import new_bytes
from tensordict.memory.kernel import Region

# Alignment that suffices for tensors of every dtype.
_ALIGN = 16
# Finding the file behind the memory takes 0.7 ms; copying fewer bytes than this is no slower.
_MIN_MAPPED = 4 << 20

# A NumPy array of bytes.
_Bytes = Any


def as_writable_tensors(buffers: Sequence[Any]) -> list[Tensor]:
    """Return a writable tensor of the bytes of each buffer.

    Args:
        buffers: objects with the buffer protocol.

    Returns:
        1-dimensional uint8 tensors. A tensor shares the memory of a writable buffer. For a read-only buffer, it has
        the same content but is independent of it.
    """
    arrays = [numpy.frombuffer(buffer, dtype=numpy.uint8) for buffer in buffers]
    found = {
        number: torch.from_numpy(array)
        for number, array in enumerate(arrays)
        if array.flags.writeable and _address(array) % _ALIGN == 0
    }
    rest = {number: array for number, array in enumerate(arrays) if number not in found}
    if sum(array.size for array in rest.values()) >= _MIN_MAPPED:
        found.update(_map_again(rest))
    return [_copy(array) if number not in found else found[number] for number, array in enumerate(arrays)]


def _address(array: _Bytes) -> int:
    return int(array.ctypes.data)


def _copy(array: _Bytes) -> Tensor:
    storage = new_bytes(array.size)
    ctypes.memmove(storage.data_ptr(), _address(array), array.size)
    return storage


# --- mapping again ----------------------------------------------------------------------------------------------------


class _PrivateMap(mmap.mmap):
    """A private map that keeps the mapped buffers alive. Without them, a store could reuse the memory."""

    __slots__ = ("origin",)
    origin: list[_Bytes]


def _map_again(arrays: dict[int, _Bytes]) -> dict[int, Tensor]:
    """Map the memory of arrays again, with one map for each file. Return the tensors by the numbers of the arrays.

    Arrays that cannot be mapped again are missing in the result.
    """
    regions = kernel.list_shared_maps()
    starts = [region.start for region in regions]
    within: dict[Region, list[int]] = {}
    for number, array in arrays.items():
        first = _address(array)
        at = bisect.bisect_right(starts, first) - 1
        if array.size and first % _ALIGN == 0 and at >= 0 and first + array.size <= regions[at].stop:
            within.setdefault(regions[at], []).append(number)
    found: dict[int, Tensor] = {}
    for region, numbers in within.items():
        fd = kernel.open_region(region)
        if fd is None:
            continue
        firsts = [_address(arrays[number]) for number in numbers]
        start = min(firsts) // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = max(first + arrays[number].size for first, number in zip(firsts, numbers, strict=True)) - start
        try:
            again = system.map_privately(fd, nbytes, region.offset + start - region.start, kind=_PrivateMap)
        except OSError:
            # The file system has larger pages, or the process has too many maps. The caller copies instead.
            continue
        finally:
            os.close(fd)
        again.origin = [arrays[number] for number in numbers]
        for first, number in zip(firsts, numbers, strict=True):
            size = arrays[number].size
            found[number] = torch.frombuffer(again, dtype=torch.uint8, count=size, offset=first - start)
    return found
