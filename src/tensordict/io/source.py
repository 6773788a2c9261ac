"""Where a loader finds the files of a save: in the folders of the file system, or in an archive."""

from __future__ import annotations

import errno
import os
import stat
from typing import Protocol

import torch
from torch import Tensor

from tensordict.errors import SaveError
from tensordict.keys import Path
from tensordict.memmap import MemoryMappedTensor, map_file


class Source(Protocol):
    """The files of a save, under absolute paths that begin with the path of the save itself."""

    def read(self, path: str) -> bytes:
        """The content of a small file (`meta.json`, a pickle).

        Raises:
            OSError: as the system gives it: `FileNotFoundError` when there is none.
            SaveError: it is no regular file.
        """
        ...

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """The tensor over a file, whose length is checked first; errors as those of `read`, naming `key`."""
        ...

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder."""
        ...

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder."""
        ...


class Folders:
    """The file system as a source."""

    def read(self, path: str) -> bytes:
        # Not blocking, so that a pipe of that name cannot hang the loader.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            mode = os.fstat(fd).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(mode):
                raise SaveError(f"{path!r} is not a regular file")
            return file.read()

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> MemoryMappedTensor:
        return map_file(path, dtype, shape, key)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)


FOLDERS = Folders()
