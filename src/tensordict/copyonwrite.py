"""Read-only buffers as tensors: their memory is mapped once more, for this process alone, and copied when written to.

An object store, such as Ray's, hands out what it holds as read-only buffers over memory that many processes see. Torch
has no tensors that cannot be written to: one over such a buffer would change the object of everybody, or crash. So the
file behind the memory is opened again and mapped privately (MAP_PRIVATE in mmap(2)): nothing is copied until it is
written to, then by the system, page by page, and nobody else sees it.

A store's file often has no name any more, and no descriptor in this process; then one of the process that made it is
opened, by way of /proc. Where there is no such file, or another user has it, the bytes are copied.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from tensordict.blocks import fresh
from tensordict.io import files, system

# What a tensor of any dtype may begin at.
_ALIGN = 16
# Copying less than this takes no longer than looking for what is behind the memory, some 0.7 ms.
_WORTH = 4 << 20
# Buffers that are no further apart are mapped together.
_NEAR = 64 << 10

# What numpy makes of a buffer.
_Bytes = Any
# The first byte of a buffer, the one after its last, and its number.
_Place = tuple[int, int, int]


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


class _Again(mmap.mmap):
    """A private map, which keeps alive what is mapped: a store may use the memory for something else afterwards."""

    __slots__ = ("origin",)
    origin: list[_Bytes]


def _mapped_again(arrays: dict[int, _Bytes]) -> dict[int, Tensor]:
    """The arrays whose memory can be mapped again, by number."""
    found: dict[int, Tensor] = {}
    firsts = {number: _address(array) for number, array in arrays.items() if array.size}
    places = sorted((first, first + arrays[number].size, number) for number, first in firsts.items())
    for region, run in _runs([place for place in places if place[0] % _ALIGN == 0], _regions()):
        fd = _opened(region)
        if fd is None:
            continue
        start = run[0][0] - run[0][0] % mmap.PAGESIZE
        try:
            nbytes = run[-1][1] - start
            again: Any = files.map_privately(fd, nbytes, region.offset + start - region.start, _Again)
        except OSError:
            # A file system with larger pages, or more maps than a process may have: there is the copy.
            continue
        finally:
            os.close(fd)
        again.origin = [arrays[number] for _, _, number in run]
        for first, stop, number in run:
            found[number] = torch.frombuffer(again, dtype=torch.uint8, count=stop - first, offset=first - start)
    return found


def _runs(places: Sequence[_Place], regions: Sequence[_Region]) -> Iterator[tuple[_Region, list[_Place]]]:
    """The places in each region that lie close together; those in no region are left out. Both are in order."""
    starts = [region.start for region in regions]
    run: list[_Place] = []
    region = None
    for place in places:
        if region is not None and place[0] - run[-1][1] <= _NEAR and place[1] <= region.stop:
            run.append(place)
            continue
        if region is not None:
            yield region, run
        at = bisect.bisect_right(starts, place[0]) - 1
        region = regions[at] if at >= 0 and place[1] <= regions[at].stop else None
        run = [place]
    if region is not None:
        yield region, run


class _Region(NamedTuple):
    """A part of the address space that is a shared map of a file: see /proc/pid/maps in proc(5)."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    # As /proc has it: with " (deleted)" behind it when the file has no name any more.
    path: str


def _regions() -> list[_Region]:
    """In the order of their addresses."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            # What is private already may have been written to.
            if line[line.index(" ") + 4] != "s":
                continue
            span, _, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if path:
                start, _, stop = span.partition("-")
                major, _, minor = device.partition(":")
                place = int(start, 16), int(stop, 16), int(offset, 16)
                found.append(_Region(*place, os.makedev(int(major, 16), int(minor, 16)), int(inode), path[0]))
    return found


# Where the file of a device and inode was opened the last time; empty where there was nothing to open.
_places: dict[tuple[int, int], str] = {}
_MOST_PLACES = 64


def _opened(region: _Region) -> int | None:
    """A descriptor of the file of a region, to be read, or `None` when this process cannot have one."""
    key = region.device, region.inode
    known = _places.get(key)
    if known == "":
        return None
    for path in itertools.chain(filter(None, [known]), [region.path], _links_to(region.path)):
        fd = _opened_at(path, region)
        if fd is not None:
            break
    else:
        fd, path = None, ""
    if len(_places) >= _MOST_PLACES:
        _places.clear()
    _places[key] = path
    return fd


def _opened_at(path: str, region: _Region) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)
    except OSError:
        # Gone, or not ours: the caller goes on to the next, and copies after the last.
        return None
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == (region.device, region.inode):
        return fd
    os.close(fd)
    return None


def _links_to(target: str) -> Iterator[str]:
    """The descriptors of that file in the processes of this user: of this one first, then of the nearest in number."""
    own = os.getpid()
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), key=lambda pid: abs(pid - own)):
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            # It has ended, or is another user's.
            continue
        for name in names:
            path = f"{folder}/{name}"
            try:
                fits = os.readlink(path) == target
            except OSError:
                continue
            if fits:
                yield path
