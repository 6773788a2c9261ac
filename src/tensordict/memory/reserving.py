"""Whether the disk keeps room for new files that have no content yet."""

from __future__ import annotations

import errno
import shutil
import warnings
from typing import Literal

# `True` reserves, `False` makes sparse files; "auto" reserves where a tenth of the free space is left.
Preallocate = bool | Literal["auto"]
_LEFT = 10


def check_preallocate(preallocate: object) -> Preallocate:
    """Check the argument of a user.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(preallocate, bool):
        return preallocate
    if preallocate != "auto":
        raise ValueError(f'preallocate is "auto", True or False, got {preallocate!r}')
    return "auto"


def reserves(preallocate: Preallocate, folder: str, nbytes: int, path: str) -> bool:
    """Tell whether the disk is to keep room for new files.

    Args:
        preallocate: what the user said.
        folder: where the files are made.
        nbytes: how long they are together.
        path: the file or folder that messages name.

    Raises:
        OSError: with `True`, the disk has less room.

    Warns:
        UserWarning: with `"auto"`, it has less room, so that the files become sparse.
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
