"""`FileSource`: the file behind a mapped tensor, and the identity that tells it from a later file at the same path."""

from __future__ import annotations

import os
from typing import ClassVar

from tensordict.core.exceptions import SaveError
from tensordict.memory import system

# Takes the place of the time of birth in the identity of a file, once another file has taken its path.
_REPLACED = -1


class FileSource:
    """The file that a tensor maps.

    Args:
        path: its absolute path.
        status: its status.
        shared: writes to the tensor reach the file.
        shape: the shape of the tensor in the file; `None` if unknown.

    Attributes:
        device, inode: identify the file, so that another file at the same path is noticed.
        sparse: the disk may lack room for writes to the tensor, because the file has fewer blocks than bytes.
            Compressing file systems may report that for whole files.
    """

    __slots__ = ("device", "inode", "path", "shape", "shared", "sparse")

    # True once this process has mapped a sparse file. Until then, writes skip all checks for room on the disk.
    any_sparse: ClassVar[bool] = False

    def __init__(self, path: str, status: os.stat_result, shared: bool, shape: tuple[int, ...] | None = None) -> None:
        self.path, self.shared, self.shape = path, shared, shape
        self.device, self.inode = status.st_dev, status.st_ino
        self.sparse = shared and getattr(status, "st_blocks", status.st_size) * 512 < status.st_size
        if self.sparse:
            FileSource.any_sparse = True

    def is_file(self, status: os.stat_result) -> bool:
        """Return True if a status belongs to the mapped file."""
        return status.st_ino == self.inode and status.st_dev == self.device

    def identify(self) -> tuple[int, int]:
        """Return the identity of the mapped file, for another process to check. See `system.identity_of`.

        The time is `_REPLACED` if another file has taken the path.
        """
        try:
            found = system.identity_of(self.path)
        except OSError:
            return self.inode, _REPLACED
        # No other file can get this inode number while the file is mapped.
        return found if found[0] == self.inode else (self.inode, _REPLACED)


def check_identity(path: str, identity: tuple[int, int]) -> None:
    """Refuse to unpickle a tensor whose file has been replaced by another one at the same path.

    Raises:
        SaveError: the file at the path has another identity.
    """
    (inode, birth), (found, found_birth) = identity, system.identity_of(path)
    # The time of birth is 0 on systems that do not report it.
    if birth == _REPLACED or inode != found or (birth and found_birth and birth != found_birth):
        raise SaveError(
            f"the file {path!r} is not the one that was pickled: another save has its path, or it was copied there (a "
            "pickle of a mapped tensor leads to its file, on one machine). Load what is there with load_memmap, or "
            "pickle clone() of the container, which holds the content"
        )
