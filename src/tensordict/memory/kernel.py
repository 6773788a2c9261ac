"""Questions to the kernel about memory, which save time or memory and which `set_kernel_memory_info(False)` turns off.

The kernel can tell which file lies behind a part of the address space and open it, which pages of a private map were
written to, and which pages of a file are in memory; and it can read pages ahead. No result depends on the answers. Each
function has an answer for "unknown", which callers handle by a slower way. A kernel that lacks or forbids a call leads
to the same answer. docs/security.md describes the consequences for security.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from tensordict.core.settings import kernel_memory_info
from tensordict.memory import system

_PAGE = mmap.PAGESIZE
_libc = system.libc


# --- files behind memory ----------------------------------------------------------------------------------------------


class Region(NamedTuple):
    """A part of the address space that maps a file and is shared; see /proc/pid/maps in proc(5)."""

    start: int
    stop: int
    offset: int
    device: int
    inode: int
    # As /proc shows it: " (deleted)" follows the path of a file that was removed.
    path: str


def list_shared_maps() -> list[Region]:
    """Return the shared maps of this process, in the order of their addresses; an empty list if unknown."""
    found: list[Region] = []
    for line in _maps() or ():
        # Skip private maps: this process may have written to them.
        if line[line.index(" ") + 4] != "s":
            continue
        span, _, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
        if path:
            start, _, stop = span.partition("-")
            major, _, minor = device.partition(":")
            numbers = int(start, 16), int(stop, 16), int(offset, 16)
            found.append(Region(*numbers, os.makedev(int(major, 16), int(minor, 16)), int(inode), path[0]))
    return found


def file_spans() -> list[tuple[int, int]] | None:
    """Return the start and end of each map of a file on a disk, in the order of the addresses; `None` if unknown.

    Files under /dev, such as shared memory, are not on a disk.
    """
    if (lines := _maps()) is None:
        return None
    # Only the sixth field, the path, can begin like this.
    on_disk = [line for line in lines if " /" in line and " /dev/" not in line and " /memfd:" not in line]
    return [
        (int(start, 16), int(stop, 16)) for start, _, stop in (line.split(" ")[0].partition("-") for line in on_disk)
    ]


def _maps() -> list[str] | None:
    """Return the lines of /proc/self/maps, one for each part of the address space; `None` if unknown."""
    if not kernel_memory_info():
        return None
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            return maps.readlines()
    except OSError:
        return None


class ReadOnly:
    """The maps of this process that are read-only at the moment, because their files were opened for reading."""

    def __init__(self) -> None:
        # Start and end of each map, and True if the map is private; `None` if unknown.
        self._spans: list[tuple[int, int, bool]] | None = None
        if _libc is None or (lines := _maps()) is None:
            return
        fields = [line.split(maxsplit=2)[:2] for line in lines]
        spans = [(span.partition("-"), rights) for span, rights in fields if rights[1] != "w"]
        self._spans = [(int(start, 16), int(stop, 16), rights[3] == "p") for (start, _, stop), rights in spans]

    def lift(self, start: int, nbytes: int) -> bool:
        """Make memory writable if it lies in private maps. Return True if it is writable in the end."""
        if self._spans is None or _libc is None:
            return False
        stop = start + nbytes
        touched = [private for first, last, private in self._spans if first < stop and start < last]
        if not touched:
            return True
        first, last = start // _PAGE * _PAGE, -(-stop // _PAGE) * _PAGE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        return all(touched) and not _libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(last - first), rights)


def open_region(region: Region) -> int | None:
    """Open the file of a region for reading. Return `None` if this process may not.

    Ray's store is a file without a name; the kernel opens it for processes with the capability CAP_CHECKPOINT_RESTORE.
    Device and inode must match, so that the result is the file that is mapped already.
    """
    if not kernel_memory_info():
        return None
    for path in (f"/proc/self/map_files/{region.start:x}-{region.stop:x}", region.path):
        try:
            fd = os.open(path, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)
        except OSError:
            # The file was removed, or this process may not open it.
            continue
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) == (region.device, region.inode):
            return fd
        os.close(fd)
    return None


# --- pages of private maps --------------------------------------------------------------------------------------------

_PAGEMAP = "/proc/self/pagemap"
# Bits of an entry of a pagemap: the page is in memory or swapped out; the page belongs to the file and is unchanged.
_HAS_PAGE, _OF_FILE = numpy.uint64(3 << 62), numpy.uint64(1 << 61)
_ENTRY = 8
# The number of entries that are read at a time.
_PAGES = 1 << 18


def find_written_pages(start: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Find the pages of a private map that this process has written to. See /proc/pid/pagemap in proc(5).

    Args:
        start: the address of the map.
        nbytes: its length.

    Returns:
        first and last byte of each run of such pages, counted from `start`; `None` if unknown.
    """
    if not kernel_memory_info():
        return None
    try:
        fd = os.open(_PAGEMAP, os.O_RDONLY | system.CLOEXEC)
        try:
            return list(_find_written(fd, start, nbytes))
        finally:
            os.close(fd)
    except OSError:
        return None


def _find_written(pagemap: int, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    count = -(-nbytes // _PAGE)
    for at in range(0, count, _PAGES):
        pages = min(_PAGES, count - at)
        content = system.pread(pagemap, pages * _ENTRY, (start // _PAGE + at) * _ENTRY)
        if len(content) < pages * _ENTRY:
            raise OSError(f"{_PAGEMAP} has {len(content)} bytes on {pages} pages")
        entries = numpy.frombuffer(content, numpy.uint64)
        own = numpy.zeros(pages + 2, dtype=numpy.int8)
        own[1:-1] = ((entries & _HAS_PAGE) != 0) & ((entries & _OF_FILE) == 0)
        edges = (numpy.flatnonzero(numpy.diff(own)) + at) * _PAGE
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


# --- pages of files in memory -----------------------------------------------------------------------------------------

# The most ranges that one system call takes.
_RANGES = 1024
_WILL_NEED = 3
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def are_in_memory(addresses: Iterable[int]) -> bool:
    """Return True if the pages at these addresses are in memory, or if this is unknown.

    The kernel reports every page of a file as present if the process has no right to write to the file.
    """
    if not hasattr(_libc, "mincore") or not kernel_memory_info():
        return True
    there = (ctypes.c_ubyte * 1)()
    for address in addresses:
        page = address & ~(_PAGE - 1)
        if _libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), there) or not there[0] & 1:
            return False
    return True


def announce_reads(begin: Tensor, size: int) -> None:
    """Advise the kernel that the `size` bytes at each of these addresses will be read soon.

    If the kernel ignores the advice, it reads pages when they are touched.
    """
    if not kernel_memory_info():
        return
    first = begin & ~(_PAGE - 1)
    ranges = torch.stack((first, begin + size - first), dim=1)
    call = getattr(_libc, "process_madvise", None)
    if call is not None and hasattr(os, "pidfd_open"):
        own = os.pidfd_open(os.getpid())
        try:
            for part in torch.split(ranges, _RANGES):
                done = call(own, ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(len(part)), _WILL_NEED, 0)
                if done < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS, errno.EINVAL):
                    break
            else:
                return
        finally:
            os.close(own)
    advise = _libc.madvise
    for address, length in ranges.tolist():
        advise(ctypes.c_void_p(address), ctypes.c_size_t(length), _WILL_NEED)


def prefer_large_pages(start: int, nbytes: int) -> None:
    """Advise the kernel to use pages of 2 MiB for new memory."""
    if _HUGE is None or _libc is None or not kernel_memory_info():
        return
    first = -(-start // _PAGE) * _PAGE
    last = (start + nbytes) // _PAGE * _PAGE
    _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _HUGE)
