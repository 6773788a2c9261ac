"""Decides whether new files without content reserve room on the disk or become sparse."""

from __future__ import annotations

import errno
import shutil
import warnings
from typing import Literal

# `True` reserves room, `False` makes sparse files. "auto" reserves if a tenth of the free space remains.
Preallocate = bool | Literal["auto"]
_LEFT = 10


def check_preallocate(preallocate: object) -> Preallocate:
    """Check the argument `preallocate` of a user.

    Raises:
        ValueError: the argument is neither a bool nor "auto".
    """
    if isinstance(preallocate, bool):
        return preallocate
    if preallocate != "auto":
        raise ValueError(f'preallocate is "auto", True or False, got {preallocate!r}')
    return "auto"


def reserves(preallocate: Preallocate, folder: str, nbytes: int, path: str) -> bool:
    """Return True if new files should reserve room on the disk.

    Args:
        preallocate: the argument of the user.
        folder: the folder of the new files.
        nbytes: their total length.
        path: the file or folder that messages name.

    Raises:
        OSError: `preallocate` is `True` and the disk has too little room.

    Warns:
        UserWarning: `preallocate` is `"auto"` and the disk has too little room, so the files become sparse.
    """
    if not preallocate or not nbytes:
        return False
    free = shutil.disk_usage(folder).free
    sizes = f"{nbytes:,} bytes, and the disk has {free:,} bytes free"
    if preallocate == "auto" and nbytes > free - free // _LEFT:
        warnings.warn(
            f"{path!r} takes {sizes}: its files are sparse, and take room with each write. preallocate=False "
            "makes sparse files without a warning, and preallocate=True reserves the room or raises an OSError",
            UserWarning,
            stacklevel=2,
        )
        return False
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"cannot reserve {sizes}: preallocate=False makes sparse files", path)
    return True
