"""What is not the same on every operating system: Linux has all of what saving uses, and stand-ins take the rest.

What there is decides, not the name of the system: without locks, saving goes on as on a file system that has none;
without reserved space, files are sparse; without positioned reads and writes, the position is moved under a lock.
"""

from __future__ import annotations

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

# How files are opened; 0 is what a system knows nothing of. Where there is text, files are opened as bytes.
CLOEXEC: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)

MapT = TypeVar("MapT", bound=mmap.mmap)


class Descriptor(Protocol):
    """What a file descriptor is taken from: one of this process, or a `DupFd` of multiprocessing's in a message."""

    def detach(self) -> int:
        """The descriptor, in this process; whoever calls this closes it."""


HAS_LOCKS = fcntl is not None


def has_folder_descriptors() -> bool:
    """Tell whether this system has users, and opens files through the descriptor of their folder."""
    calls = {os.open, os.stat, os.unlink, os.rename}
    return calls <= os.supports_dir_fd and bool(DIRECTORY and NOFOLLOW) and hasattr(os, "geteuid")


_position = threading.Lock()


def explain_shared_memory(error: RuntimeError) -> RuntimeError:
    """Torch's error that it got no shared memory, with what to do where the system has no place for it."""
    if os.name != "posix" or os.path.isdir("/dev/shm") or os.path.isdir("/System"):
        return error
    return RuntimeError(f"{error}. This system has no /dev/shm: mount one, or use memmap_(), which does without")


def _own_library() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):
        return None


# The C library, whose functions may be missing; `None` where a program is not linked to one.
libc: Any = _own_library()


# Offsets in the answer of `statx`: flags of what it knows are at 0, then come the inode number and the time of birth.
_STATX_SIZE, _STATX_INODE, _STATX_BIRTH = 256, 32, 80
_AT_FDCWD, _ASK_INODE, _ASK_BIRTH = -100, 0x100, 0x800


def identity_of(path: str) -> tuple[int, int]:
    """Tell a file from any other one that has its path earlier or later, whatever is written into either.

    Returns:
        the number of the inode, and the time at which the file was made in ns, as a file system gives the number to
        another file when this one is removed. The time is 0 where the system does not tell it.

    Raises:
        OSError: there is no such file.
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
    """Lock an open file or folder; `BlockingIOError` when somebody else has. Needs `HAS_LOCKS`."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Give up the lock."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def major_faults() -> int:
    """How many pages this process had to wait for; 0 where the system does not count."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_majflt  # type: ignore[redundant-expr]


def pread(fd: int, size: int, offset: int) -> bytes:
    """Read at a position, as `os.pread`."""
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, size)


def pwrite(fd: int, content: bytes | memoryview | ctypes.Array[ctypes.c_char], offset: int) -> int:
    """Write at a position, as `os.pwrite`."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, content, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, content)


def pwritev(fd: int, contents: Sequence[ctypes.Array[ctypes.c_char]], offset: int) -> int:
    """Write several buffers at a position, as `os.pwritev`, which may write a part."""
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, contents, offset)
    done = 0
    for content in contents:
        written = pwrite(fd, content, offset + done)
        done += written
        if written < len(content):
            break
    return done


# Glibc has this name for files of any length on 32-bit systems too.
_FALLOCATE = next((name for name in ("fallocate64", "fallocate") if hasattr(libc, name)), "")
_KEEP_SIZE = 1
_RESERVES_NOTHING = (errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)


def reserve(fd: int, start: int, size: int, keep_size: bool = False) -> bool:
    """Have the disk keep room for a part of a file, and change nothing in it.

    The C library's `posix_fallocate` would write where the file system cannot reserve; this writes nothing.

    Args:
        fd: a descriptor of the file.
        start: the byte at which the part begins.
        size: its length; at least 1.
        keep_size: leave the length of a file that ends before the part does.

    Returns:
        `False` if the system or the file system cannot reserve: nothing has been done then.

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
    """The descriptor of new memory of zeros, which other processes can map: on disk where the system has no other."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tensordict", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


def map_privately(fd: int, nbytes: int, offset: int = 0, *, kind: type[MapT]) -> MapT:
    """Map a part of a file, from a multiple of the page size on, so that what is written to it stays in this process.

    `kind` is the class of the map.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):
        return kind(fd, nbytes, access=mmap.ACCESS_COPY, offset=offset)
    # Not counted as memory that may be needed: nobody writes to all of it.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
    return kind(fd, nbytes, flags, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)


# That of Linux, which Python's module does not always know.
_NO_RESERVE = 0x4000 if hasattr(os, "memfd_create") else 0


def sent(fd: int) -> Descriptor:
    """How `multiprocessing` sends a descriptor to another process.

    Raises:
        OSError: it cannot, on this system.
    """
    send = getattr(reduction, "DupFd", None)
    if send is None:
        raise OSError(
            "this system hands no descriptors to other processes: save to a folder with memmap(prefix), and send that"
        )
    descriptor: Descriptor = send(fd)
    return descriptor


def give_back_memory() -> None:
    """Have memory that was freed go back to the system, where the C library does so when it is asked (glibc)."""
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
