"""`RowFiles`: the files of a container that was loaded before, whose rows are mapped again or read without it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tensordict.core.keys import Path
from tensordict.memory import system
from tensordict.memory.file_maps import identify_file
from tensordict.memory.rows import Values

# The most containers whose files are open at once.
_AT_ONCE = 64
_READ = os.O_RDONLY | system.NONBLOCK | system.CLOEXEC


class RowFiles(NamedTuple):
    """The files with the tensors of a container.

    Args:
        path: the beginning of the paths of all files.
        tensors: for each tensor its path in the container, the rest of the path of its file, and its first byte.
        identity: a hash that tells the files from others.
        rows: the number of rows.
        sizes: the bytes of a row of each tensor.
    """

    path: str
    tensors: tuple[tuple[Path, str, int], ...]
    identity: int
    rows: int
    sizes: Mapping[Path, int]

    def map(self) -> dict[Path, Values] | None:
        """Return the rows of each tensor as arrays of raw bytes over new maps; `None` if a file is another one."""
        identities = {rest: identify_file(self.path + rest) for _, rest, _ in self.tensors}
        if hash_identities(identities) != self.identity:
            return None
        files = {rest: _map_file(self.path + rest, status[2]) for rest, status in identities.items()}
        columns = {}
        for key, rest, first in self.tensors:
            content, size = files[rest], self.sizes[key]
            if content is None or len(content) < first + self.rows * size:
                return None
            columns[key] = content[first : first + self.rows * size].view(f"V{size}")
        return columns

    def open(self, fds: list[int]) -> dict[str, int] | None:
        """Open the files for reading, and append the descriptors to `fds`; `None` if a file is another one."""
        opened, identities = {}, {}
        try:
            for _, rest, _ in self.tensors:
                if rest not in opened:
                    opened[rest] = fd = os.open(self.path + rest, _READ)
                    fds.append(fd)
                    identities[rest] = identify_file(fd)
        except OSError:
            return None
        return opened if hash_identities(identities) == self.identity else None


def hash_identities(identities: Mapping[str, tuple[int, ...]]) -> int:
    """Return a hash of what `identify_file` returned for some files."""
    return hash(tuple(identities.values()))


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
    changed = set()
    done = 0
    for start in range(0, len(sources), _AT_ONCE):
        fds: list[int] = []
        plan: list[tuple[int, int, memoryview, int]] = []
        try:
            for at, source in enumerate(sources[start : start + _AT_ONCE], start):
                begin, done = done, done + len(rows[at])
                opened = source.open(fds)
                if opened is None:
                    changed.add(at)
                    continue
                places = {key: (opened[rest], first) for key, rest, first in source.tensors}
                for key, (target, size) in targets.items():
                    fd, first = places[key]
                    for place, row in enumerate(rows[at], begin):
                        offset = first + row * size
                        system.announce_read(fd, offset, size)
                        plan.append((at, fd, target[place * size : (place + 1) * size], offset))
            for at, fd, content, offset in plan:
                if system.pread_into(fd, content, offset) != len(content):
                    changed.add(at)
        finally:
            for fd in fds:
                os.close(fd)
    return changed


def _map_file(path: str, nbytes: int) -> Values | None:
    """Map the first bytes of a file for reading, without a descriptor that stays open; `None` if that fails."""
    try:
        return torch.from_file(path, False, nbytes, dtype=torch.uint8, device="cpu").numpy()
    except RuntimeError:
        return None
