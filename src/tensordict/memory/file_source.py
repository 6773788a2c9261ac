"""`FileSource`: the file behind a mapped tensor, and the identity that tells it from a later file at the same path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from tensordict.core.exceptions import SaveError
from tensordict.memory import system

# Takes the place of the time of birth in the identity of a file, once another file has taken its path.
_REPLACED = -1


@dataclass(eq=False, slots=True)
class FileSource:
    """The file that a tensor maps.

    Args:
        path: its absolute path.
        device, inode: identify the file, so that another file at the same path is noticed.
        shared: writes to the tensor reach the file.
        sparse: the disk may lack room for writes to the tensor.
        shape: the shape of the tensor in the file, if it is known.
    """

    # True once this process has mapped a sparse file. Until then, writes skip all checks for room on the disk.
    any_sparse: ClassVar[bool] = False

    path: str
    device: int
    inode: int
    shared: bool
    sparse: bool = False
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, path: str, status: os.stat_result, shared: bool) -> FileSource:
        """Describe the file at a path, whose status the caller has read."""
        sparse = shared and is_sparse(status)
        if sparse:
            cls.any_sparse = True
        return cls(path, status.st_dev, status.st_ino, shared, sparse)

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


def is_sparse(status: os.stat_result) -> bool:
    """Return True if a file has fewer blocks than bytes. Compressing file systems may report that for whole files."""
    return bool(getattr(status, "st_blocks", status.st_size) * 512 < status.st_size)


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
