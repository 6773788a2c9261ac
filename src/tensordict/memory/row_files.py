"""`RowFiles`: the files of a container that was loaded before, whose rows are mapped again or read without it."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from tensordict.core.keys import Path
from tensordict.memory import files, system
from tensordict.memory.file_maps import identify_file
from tensordict.memory.rows import Values

# The most containers whose files are open at once.
_AT_ONCE = 64
_READ = os.O_RDONLY | system.NONBLOCK | system.CLOEXEC
# The arrays over the maps of this process that `RowFiles.map` made, by identity.
_MAPS: WeakValueDictionary[int, Values] = WeakValueDictionary()


class RowFiles(NamedTuple):
    """The files with the tensors of a container.

    Args:
        path: the beginning of the paths of all files.
        tensors: for each tensor its path in the container, the rest of the path of its file, and its first byte.
        identity: a hash of what `identify_file` returned for the files.
        sizes: the bytes of a row of each tensor.
    """

    path: str
    tensors: tuple[tuple[Path, str, int], ...]
    identity: int
    sizes: Mapping[Path, int]

    def map(self) -> dict[Path, Values]:
        """Return arrays of raw bytes over new maps, with the rows of each tensor and more; nothing if that fails.

        The maps need no descriptor that stays open.
        """
        paths = {rest: self.path + rest for _, rest, _ in self.tensors}
        try:
            maps = {
                rest: torch.from_file(path, False, os.path.getsize(path), dtype=torch.uint8, device="cpu").numpy()
                for rest, path in (paths if self._are_same(paths) else {}).items()
            }
        except (OSError, RuntimeError):
            return {}
        # Another process may have replaced a file before it was mapped.
        if not maps or not self._are_same(paths):
            return {}
        _MAPS.update((id(array), array) for array in maps.values())
        return {key: _as_rows(maps[rest][first:], self.sizes[key]) for key, rest, first in self.tensors}

    def open(self, fds: list[int]) -> dict[Path, tuple[int, int]]:
        """Open the files, and append the descriptors to `fds`.

        Returns:
            the descriptor and the first byte of each tensor; nothing if a file is missing or another one.
        """
        opened: dict[str, int] = {}
        try:
            for _, rest, _ in self.tensors:
                if rest not in opened:
                    opened[rest] = os.open(self.path + rest, _READ)
                    fds.append(opened[rest])
        except OSError:
            return {}
        return {key: (opened[rest], first) for key, rest, first in self.tensors} if self._are_same(opened) else {}

    def _are_same(self, files: Mapping[str, str | int]) -> bool:
        """Return True if these paths or open files are the files that were loaded."""
        return hash(tuple(map(identify_file, files.values()))) == self.identity


def count_maps() -> int:
    """Return how many maps that `RowFiles.map` made this process has."""
    return len(_MAPS)


def read_rows(sources: Sequence[RowFiles], rows: Sequence[Sequence[int]], out: Mapping[Path, Values]) -> set[int]:
    """Read rows of several containers from their files, without mapping them.

    A process may have some ten thousand maps, and a new map takes ten times as long as reading a row. The kernel is
    told of the rows of some files before they are read, so that a disk reads them together.

    Args:
        sources: the files of each container.
        rows: the rows to read from each container.
        out: takes the rows of some tensors: arrays of raw bytes, as long as all rows together.

    Returns:
        the positions in `sources` of containers whose files are missing, or are others. Their rows are not filled.
    """
    targets = {key: (array.view(np.uint8).data, array.itemsize) for key, array in out.items()}
    changed, done = set[int](), 0
    for start in range(0, len(sources), _AT_ONCE):
        fds: list[int] = []
        plan: list[tuple[int, int, memoryview, int]] = []
        try:
            for at, source in enumerate(sources[start : start + _AT_ONCE], start):
                begin, done = done, done + len(rows[at])
                places = source.open(fds)
                if not places:
                    changed.add(at)
                for key, (target, size) in targets.items() if places else ():
                    fd, first = places[key]
                    for place, row in enumerate(rows[at], begin):
                        offset = first + row * size
                        system.announce_read(fd, offset, size)
                        plan.append((at, fd, target[place * size : (place + 1) * size], offset))
            for at, fd, content, offset in plan:
                try:
                    found = system.pread(fd, len(content), offset)
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise files.named_os_error(error, "read rows of", sources[at].path) from error
                    # Another machine has removed the file since it was opened.
                    found = b""
                content[: len(found)] = found
                if len(found) < len(content):
                    changed.add(at)
        finally:
            for fd in fds:
                os.close(fd)
    return changed


def _as_rows(content: Values, size: int) -> Values:
    return content[: len(content) // size * size].view(f"V{size}")
