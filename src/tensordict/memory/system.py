"""Calls that differ between operating systems, with substitutes where a system lacks one.

Linux has everything that saving uses. On other systems this module tests for each call and not for the name of the
system: without locks, saving works as on a file system without locks; without reserved space, files are sparse; without
positioned reads and writes, the position moves under a lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any, Protocol, TypeVar

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

# The most bytes that one system call moves, so that interrupts and failures of other threads are noticed in between.
CHUNK = 64 << 20

# Flags for opening files; 0 if the system lacks the flag. Windows needs O_BINARY to open files as bytes.
CLOEXEC: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
# Flags for creating a file that must not exist.
CREATE: int = os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOEXEC

MapT = TypeVar("MapT", bound=mmap.mmap)


class Descriptor(Protocol):
    """A file descriptor on its way: one of this process, or a `DupFd` of multiprocessing's in a message."""

    def detach(self) -> int:
        """Return the descriptor in this process; the caller closes it."""


HAS_LOCKS = fcntl is not None


def has_folder_descriptors() -> bool:
    """Return True if this system has users and can open files through the descriptor of their folder."""
    calls = {os.open, os.stat, os.unlink, os.rename}
    return calls <= os.supports_dir_fd and bool(DIRECTORY and NOFOLLOW) and hasattr(os, "geteuid")


_position = threading.Lock()


def explain_shared_memory(error: RuntimeError) -> RuntimeError:
    """Add advice to torch's error about shared memory if the system has no /dev/shm."""
    if os.name != "posix" or os.path.isdir("/dev/shm") or os.path.isdir("/System"):
        return error
    return RuntimeError(f"{error}. This system has no /dev/shm: mount one, or use memmap_(), which does without")


def _own_library() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None


# The C library, some of whose functions may be missing; `None` in a program that is not linked to one.
libc: Any = _own_library()


# Offsets in the result of `statx`: the mask of filled fields is at 0; inode number and time of birth follow.
_STATX_SIZE, _STATX_INODE, _STATX_BIRTH = 256, 32, 80
_AT_FDCWD, _ASK_INODE, _ASK_BIRTH = -100, 0x100, 0x800


def identity_of(path: str) -> tuple[int, int]:
    """Return an identity that tells the file from earlier or later files at the same path.

    Returns:
        the number of the inode, and the time of birth in ns, because a file system gives the number of a removed file
        to another one. The time is 0 if the system does not report it.

    Raises:
        OSError: the file does not exist.
    """
    call = getattr(libc, "statx", None)
    if call is not None:
        found = ctypes.create_string_buffer(_STATX_SIZE)
        if not call(_AT_FDCWD, os.fsencode(path), 0, _ASK_INODE | _ASK_BIRTH, found):
            (mask,), (inode,) = struct.unpack_from("=I", found), struct.unpack_from("=Q", found, _STATX_INODE)
            seconds, rest = struct.unpack_from("=qI", found, _STATX_BIRTH)
            return inode, seconds * 10**9 + rest if mask & _ASK_BIRTH else 0
    status = os.stat(path)
    return status.st_ino, int(getattr(status, "st_birthtime", 0) * 10**9)


def lock(fd: int) -> None:
    """Lock an open file or folder; `BlockingIOError` if another process has locked it. Needs `HAS_LOCKS`."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Give up the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def major_faults() -> int:
    """Return the number of pages that this process had to wait for; 0 on systems that do not count them."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_majflt  # type: ignore[redundant-expr]


def pread(fd: int, size: int, offset: int) -> bytes:
    """Read at a position, as `os.pread`."""
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


def announce_read(fd: int, offset: int, size: int) -> None:
    """Tell the kernel that bytes of a file will be read soon, if it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)


def write_bytes(fd: int, content: bytes | memoryview | ctypes.Array[ctypes.c_char], offset: int = 0) -> None:
    """Write all of `content` at byte `offset`."""
    size, done = len(content), 0
    while done < size:
        # Content that one call can write needs no view, which takes 0.4 us.
        is_one_call = not done and size <= CHUNK
        piece = content if is_one_call else memoryview(content).cast("B")[done : done + CHUNK]
        if hasattr(os, "pwrite"):
            done += os.pwrite(fd, piece, offset + done)
            continue
        with _position:
            os.lseek(fd, offset + done, os.SEEK_SET)
            done += os.write(fd, piece)


def pwritev(fd: int, contents: Sequence[ctypes.Array[ctypes.c_char]], offset: int) -> int:
    """Write several buffers at a position, as `os.pwritev`. Return the number of bytes, which may be fewer."""
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, contents, offset)
    for content in contents:
        write_bytes(fd, content, offset)
        offset += len(content)
    return sum(map(len, contents))


# Glibc has this name for files of any length on 32-bit systems too.
_FALLOCATE = next((name for name in ("fallocate64", "fallocate") if hasattr(libc, name)), "")
_KEEP_SIZE = 1
_RESERVES_NOTHING = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def reserve(fd: int, start: int, size: int, keep_size: bool = False) -> bool:
    """Reserve room on the disk for a part of a file, without changing the content.

    On file systems that cannot reserve, the C library's `posix_fallocate` would write zeros; this writes nothing.

    Args:
        fd: a descriptor of the file.
        start: the byte at which the part begins.
        size: its length; at least 1.
        keep_size: leave the length of the file unchanged if it ends before the part does.

    Returns:
        `False` if the system or the file system cannot reserve room; nothing has changed then.

    Raises:
        OSError: the disk has no room for the part.
    """
    if not _FALLOCATE:
        return False
    call = getattr(libc, _FALLOCATE)
    while call(fd, _KEEP_SIZE if keep_size else 0, ctypes.c_int64(start), ctypes.c_int64(size)):
        code = ctypes.get_errno()
        if code in _RESERVES_NOTHING:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def new_memory(nbytes: int) -> int:
    """Return a descriptor of new, zeroed memory that other processes can map.

    Systems without `memfd_create` use a temporary file.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tensordict", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


def map_privately(fd: int, nbytes: int, offset: int = 0, *, kind: type[MapT]) -> MapT:
    """Map a part of a file privately, so that writes stay in this process.

    Args:
        fd: a descriptor of the file.
        nbytes: the length of the part.
        offset: where the part begins, a multiple of the page size.
        kind: the class of the map.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return kind(fd, nbytes, access=mmap.ACCESS_COPY, offset=offset)
    # The system need not set aside memory for the whole map, because nobody writes to all of it.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
    return kind(fd, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)


def drop_pages(content: mmap.mmap, start: int, stop: int) -> None:
    """Take the whole pages between two bytes of a map out of memory; they are read again from the file when needed.

    Nobody may have written to them in a private map. Without effect on systems that cannot do this.
    """
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    size = stop // mmap.PAGESIZE * mmap.PAGESIZE - first
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED, first, size)


# The value on Linux, for Pythons whose `mmap` lacks the name.
_NO_RESERVE = 0x4000 if hasattr(os, "memfd_create") else 0


def send_descriptor(fd: int) -> Descriptor:
    """Wrap a descriptor in an object that `multiprocessing` can send to another process.

    Raises:
        OSError: this system cannot send descriptors.
    """
    send = getattr(reduction, "DupFd", None)
    if send is None:
        raise OSError(
            "this system hands no descriptors to other processes: save to a folder with memmap(prefix), and send that"
        )
    descriptor: Descriptor = send(fd)
    return descriptor


def give_back_memory() -> None:
    """Return freed memory to the system, if the C library can (glibc)."""
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))


def count_maps_and_files() -> tuple[int, int]:
    """Return how many maps and how many open files the system allows this process."""
    maps = _DEFAULT_MAPS
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/vm/max_map_count") as file:
        maps = int(file.read())
    if resource is None:
        return maps, _DEFAULT_FILES  # type: ignore[unreachable]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return maps, files if files > 0 else maps


# The limits of most systems.
_DEFAULT_MAPS, _DEFAULT_FILES = 65_530, 1_024
