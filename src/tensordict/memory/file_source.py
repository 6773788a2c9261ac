"""The file that a tensor maps, and its identity, which another file at its path lacks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

from tensordict.core.exceptions import SaveError
from tensordict.memory import system

# Stands for the time of birth of a file that has lost its path.
_REPLACED = -1


@dataclass(eq=False, slots=True)
class FileSource:
    """The file that a tensor maps: its absolute path, and what tells whether that path still is the same file.

    `shared` says whether what is written to the tensor goes to the file; `sparse`, whether the disk may still lack room
    for what is written there.
    """

    # Whether this process has mapped a sparse file: writes to other tensors look at nothing else.
    any_sparse: ClassVar[bool] = False

    path: str
    device: int
    inode: int
    shared: bool
    sparse: bool = False

    @classmethod
    def of(cls, path: str, status: os.stat_result, shared: bool) -> FileSource:
        """Describe the file of a status."""
        sparse = shared and is_sparse(status)
        if sparse:
            cls.any_sparse = True
        return cls(path, status.st_dev, status.st_ino, shared, sparse)

    def is_file(self, status: os.stat_result) -> bool:
        """Whether `status` describes the mapped file."""
        return status.st_ino == self.inode and status.st_dev == self.device

    def identify(self) -> tuple[int, int]:
        """Give the identity of the mapped file for another process, as `system.identity_of` does.

        The time is `_REPLACED` when another file has the path already.
        """
        try:
            found = system.identity_of(self.path)
        except OSError:
            return self.inode, _REPLACED
        # While it is mapped, no other file has its number.
        return found if found[0] == self.inode else (self.inode, _REPLACED)


def is_sparse(status: os.stat_result) -> bool:
    """Tell whether a file has fewer blocks than bytes; file systems that compress may say so of whole files."""
    return bool(getattr(status, "st_blocks", status.st_size) * 512 < status.st_size)


def check_identity(path: str, identity: tuple[int, int]) -> None:
    """Refuse a file that took the path of the one that a pickle is of.

    Raises:
        SaveError: it is another file.
    """
    (inode, made), (found, found_made) = identity, system.identity_of(path)
    # Systems that do not tell the time give 0.
    if made == _REPLACED or inode != found or (made and found_made and made != found_made):
        raise SaveError(
            f"the file {path!r} is not the one that was pickled: another save has its path, or it was copied there (a "
            "pickle of a mapped tensor leads to its file, on one machine). Load what is there with load_memmap, or "
            "pickle clone() of the container, which holds the content"
        )
