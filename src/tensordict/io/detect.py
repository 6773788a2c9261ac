"""Which format a save is of, by its content and not by its name."""

from __future__ import annotations

import errno
import json
import os
import stat

from tensordict.errors import SaveError
from tensordict.io import system
from tensordict.io.names import META, local_path
from tensordict.memmap import PathLike

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_HDF5 = b"\x89HDF\r\n\x1a\n"
# An HDF5 file may begin with a block of the user's, of 512 bytes or a multiple by a power of two.
_HDF5_STARTS = (0, *(512 << shift for shift in range(12)))
# As its own library has it.
_MOST_HEADER = 100_000_000


def detect_format(path: PathLike) -> str:
    """The format of a save: "directory", "archive", "consolidated", "h5" or "safetensors".

    Only what tells them apart is looked at: the save may still be broken, or the zip file one of something else.

    Raises:
        FileNotFoundError: there is nothing, or a folder without a save.
        SaveError: it is of none of these formats.
    """
    shown = os.fspath(path)
    local_path(path)
    if os.path.isdir(shown):
        if os.path.lexists(f"{shown}/{META}"):
            return "directory"
        raise FileNotFoundError(errno.ENOENT, f"there is no save in this folder: it has no {META}", shown)
    # Not blocking, so that a pipe cannot hang us.
    fd = os.open(shown, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)
    try:
        status = os.fstat(fd)
        found = _format_of(fd, status.st_size) if stat.S_ISREG(status.st_mode) else ""
        by_torch = found == "archive" and _is_of_torch(fd)
    finally:
        os.close(fd)
    if by_torch:
        raise SaveError(f"{shown!r} was written by torch.save: torch.load reads it")
    if not found:
        raise SaveError(
            f"{shown!r} is of no format that is known: it is no folder with {META}, archive, consolidated container, "
            "HDF5 file or safetensors file, or it was cut off"
        )
    return found


def _format_of(fd: int, size: int) -> str:
    head = system.pread(fd, 9, 0)
    if head[:4] in _ZIP:
        return "archive"
    if any(system.pread(fd, len(_HDF5), start) == _HDF5 for start in _HDF5_STARTS if start < size):
        return "h5"
    length = int.from_bytes(head[:8], "little")
    if 2 <= length <= min(_MOST_HEADER, size - 8) and head[8:] == b"{" and _is_object(system.pread(fd, length, 8)):
        return "safetensors"
    length = int.from_bytes(system.pread(fd, 8, size - 8), "little") if size >= 8 else 0
    if 2 <= length <= size - 8:
        first, last = system.pread(fd, 1, size - 8 - length), system.pread(fd, 1, size - 9)
        return "consolidated" if (first, last) == (b"{", b"}") else ""
    return ""


def _is_of_torch(fd: int) -> bool:
    """Whether the first entry of a zip file is the one that `torch.save` begins with."""
    length = int.from_bytes(system.pread(fd, 2, 26), "little")
    return system.pread(fd, length, 30).endswith(b"/data.pkl")


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False
