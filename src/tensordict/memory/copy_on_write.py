"""Read-only buffers as tensors: their memory is mapped once more, for this process alone, and copied when written to.

An object store, such as Ray's, hands out what it holds as read-only buffers over memory that many processes see. Torch
has no tensors that cannot be written to: one over such a buffer would change the object of everybody, or crash. So the
file behind the memory is opened again and mapped privately (MAP_PRIVATE in mmap(2)): nothing is copied until it is
written to, then by the system, page by page, and nobody else sees it.

The file is found and opened by `memory/kernel.py`. Where there is none, this process may not open it, or the kernel is
not to be asked, the bytes are copied.
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
from tensordict.memory.flat_buffers import fresh
from tensordict.memory.kernel import Region

# What a tensor of any dtype may begin at.
_ALIGN = 16
# Copying less than this takes no longer than looking for what is behind the memory, some 0.7 ms.
_WORTH = 4 << 20

# What numpy makes of a buffer.
_Bytes = Any


def writable(buffers: Sequence[Any]) -> list[Tensor]:
    """A tensor of the bytes of each buffer, which may be written to.

    Args:
        buffers: objects with the buffer protocol.

    Returns:
        1-dimensional uint8 tensors. That of a buffer that may be written to is over its memory; that of any other has
        its content, and changes neither the buffer nor with it.
    """
    arrays = [numpy.frombuffer(buffer, dtype=numpy.uint8) for buffer in buffers]
    found = {
        number: torch.from_numpy(array)
        for number, array in enumerate(arrays)
        if array.flags.writeable and _address(array) % _ALIGN == 0
    }
    rest = {number: array for number, array in enumerate(arrays) if number not in found}
    if sum(array.size for array in rest.values()) >= _WORTH:
        found.update(_mapped_again(rest))
    return [_copied(array) if number not in found else found[number] for number, array in enumerate(arrays)]


def _address(array: _Bytes) -> int:
    return int(array.ctypes.data)


def _copied(array: _Bytes) -> Tensor:
    storage = fresh(array.size)
    ctypes.memmove(storage.data_ptr(), _address(array), array.size)
    return storage


# --- mapping again ----------------------------------------------------------------------------------------------------


class _PrivateMap(mmap.mmap):
    """A private map, which keeps alive what is mapped: a store may use the memory for something else afterwards."""

    __slots__ = ("origin",)
    origin: list[_Bytes]


def _mapped_again(arrays: dict[int, _Bytes]) -> dict[int, Tensor]:
    """The arrays whose memory can be mapped again, by number; those over one file are mapped together."""
    regions = kernel.shared_regions()
    starts = [region.start for region in regions]
    within: dict[Region, list[int]] = {}
    for number, array in arrays.items():
        first = _address(array)
        at = bisect.bisect_right(starts, first) - 1
        if array.size and first % _ALIGN == 0 and at >= 0 and first + array.size <= regions[at].stop:
            within.setdefault(regions[at], []).append(number)
    found: dict[int, Tensor] = {}
    for region, numbers in within.items():
        fd = kernel.opened(region)
        if fd is None:
            continue
        firsts = [_address(arrays[number]) for number in numbers]
        start = min(firsts) // mmap.PAGESIZE * mmap.PAGESIZE
        nbytes = max(first + arrays[number].size for first, number in zip(firsts, numbers, strict=True)) - start
        try:
            again = system.map_privately(fd, nbytes, region.offset + start - region.start, kind=_PrivateMap)
        except OSError:
            # A file system with larger pages, or more maps than a process may have: there is the copy.
            continue
        finally:
            os.close(fd)
        again.origin = [arrays[number] for number in numbers]
        for first, number in zip(firsts, numbers, strict=True):
            size = arrays[number].size
            found[number] = torch.frombuffer(again, dtype=torch.uint8, count=size, offset=first - start)
    return found
