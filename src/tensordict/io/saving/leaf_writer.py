"""The writers of leaves, which formats use to write tensors with threads, checksums and a progress bar."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from tensordict.core.keys import Path
from tensordict.io.remote.credentials import StorageOptions
from tensordict.io.saving import checksums
from tensordict.io.saving.progress import NO_BAR, Progress, progress_bar
from tensordict.io.saving.transaction import Transaction
from tensordict.memory import files, system
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor, is_whole_file, map_file

# Several threads write a leaf that is larger than this, each thread one range.
_SPLIT = 64 << 20
# One job writes leaves of this many bytes together, and this many leaves at most.
_TOGETHER, _MOST_TOGETHER = 1 << 20, 64


@dataclass(slots=True)
class SaveOptions:
    """How to save, in any format; see `TensorDict.memmap`."""

    num_threads: int = 0
    # Flush everything to the disk before the commit.
    durable: bool = False
    # The algorithm of the checksums of leaves; empty to write no checksums.
    checksum: str = ""
    progress: bool | None = None
    # Replace foreign files, too; otherwise they raise an error.
    overwrite: bool = False
    # For a URL: the options of the storage.
    storage_options: StorageOptions | None = None


@dataclass(slots=True)
class PlannedLeaf:
    """A tensor that will be saved at `path`."""

    name: str
    key: Path
    tensor: Tensor
    path: str
    # The description for the `meta.json`.
    spec: dict[str, Any]
    # The mapped tensor over the saved file. Set in the plan if the file exists already and stays.
    result: MemoryMappedTensor | None = None
    # True if `memmap_like` saves the content too.
    always: bool = False
    # The path of the file in the save.
    file: str = ""
    # The path of the file until the commit, set by `LeafWriter.jobs`.
    staged: str = ""


@dataclass(slots=True)
class LeafWriter:
    """Writes the leaves of a save.

    Args:
        transaction: the transaction of the save.
        num_threads: the number of threads that will run the jobs.
        algorithm: the algorithm of the checksums; empty to write none.
        progress: the progress bar, which counts bytes.
        like: create the files without content, which reads as zeros, except for leaves that are `always` saved.
        reserve: reserve room on the disk for files without content.
    """

    transaction: Transaction
    num_threads: int = 0
    algorithm: str = ""
    progress: Progress = NO_BAR
    like: bool = False
    reserve: bool = True
    # The checksum of each piece of a file, by its first byte. Only filled if checksums are computed, because a save may
    # have thousands of leaves.
    _checksums: dict[str, dict[int, checksums.Checksum]] = field(default_factory=dict)

    def jobs(self, leaves: Iterable[PlannedLeaf]) -> list[Callable[[], None]]:
        """Return the functions that write the files of leaves. They may run in any order.

        If a leaf has a `result`, its staged file exists already, and only the checksum is computed.
        """
        found: list[Callable[[], None]] = []
        together: list[PlannedLeaf] = []
        size = 0
        for leaf in leaves:
            leaf.staged = f"{self.transaction.staged}/{leaf.file}"
            if self.algorithm:
                self._checksums[leaf.path] = {}
            if leaf.result is not None:
                if self.algorithm or self.transaction.durable:
                    found.append(partial(self._read_staged, leaf))
                continue
            tensor, zero = leaf.tensor, self.like and not leaf.always
            nbytes = tensor.numel() * tensor.element_size()
            is_one_job = self.num_threads <= 1 or nbytes <= _SPLIT or zero or not files.is_direct(tensor)
            if is_one_job or self.algorithm not in ("", "crc32"):
                together.append(leaf)
                size += nbytes
                if size >= _TOGETHER or len(together) == _MOST_TOGETHER:
                    found.append(partial(self._write, together))
                    together, size = [], 0
                continue
            with files.naming("write the file", leaf.path, leaf.key):
                os.close(self.transaction.create(leaf.staged))
            step = -(-nbytes // math.ceil(nbytes / _SPLIT) // 4096) * 4096
            for start in range(0, nbytes, step):
                found.append(partial(self._write_piece, leaf, start, min(start + step, nbytes)))
        if together:
            found.append(partial(self._write, together))
        return found

    def checksum(self, path: str) -> str:
        """Return the checksum of a file in its stored form once all jobs are done; empty if none is computed."""
        found = self._checksums.get(path)
        if not found:
            return ""
        return checksums.format_checksum(self.algorithm, checksums.combine([found[start] for start in sorted(found)]))

    def _write(self, leaves: Sequence[PlannedLeaf]) -> None:
        """Write the files of leaves, and map each while the system has its name and its status in caches."""
        for leaf in leaves:
            tensor, zero = leaf.tensor, self.like and not leaf.always
            try:
                fd = self.transaction.create(leaf.staged)
                try:
                    if zero:
                        files.allocate(fd, tensor.numel() * tensor.element_size(), self.reserve)
                    elif type(tensor) is Tensor or not self._copy_file(fd, tensor):
                        is_watched = self.algorithm or self.progress.is_shown
                        files.write_tensor(fd, tensor, 0, self._watch(leaf.path, 0) if is_watched else None)
                    if self.transaction.durable:
                        os.fsync(fd)
                    status = os.fstat(fd)
                finally:
                    os.close(fd)
            except OSError as error:
                doing = "reserve room, which preallocate=False does not, for" if zero else "write"
                raise files.named_os_error(error, f"{doing} the file", leaf.path, leaf.key) from error
            leaf.result = map_file(leaf.staged, tensor.dtype, tuple(tensor.shape), leaf.key, status=status)

    def _copy_file(self, fd: int, tensor: Tensor) -> bool:
        """Copy the file that a tensor maps as a whole. Returns `False` if the tensor must be written instead."""
        source = tensor._source if isinstance(tensor, MemoryMappedTensor) and not self.algorithm else None
        if not isinstance(source, FileSource) or not source.shared or not is_whole_file(tensor):
            return False
        if not tensor.numel() or not _copy_from(source, fd, tensor.nbytes):
            return False
        self.progress.add(tensor.nbytes)
        return True

    def _write_piece(self, leaf: PlannedLeaf, start: int, stop: int) -> None:
        try:
            with files.closing(os.open(leaf.staged, os.O_WRONLY | system.CLOEXEC)) as fd:
                files.write_tensor(fd, leaf.tensor, start, self._watch(leaf.path, start), start, stop)
                if self.transaction.durable:
                    os.fsync(fd)
        except OSError as error:
            raise files.named_os_error(error, "write the file", leaf.path, leaf.key) from error

    def _read_staged(self, leaf: PlannedLeaf) -> None:
        """Compute the checksum of a staged file, and sync it if the save is durable."""
        watch = self._watch(leaf.path, 0)
        if watch is not None and self.algorithm:
            files.show_content(leaf.tensor, watch)
        if self.transaction.durable:
            files.sync_file(leaf.staged)

    def _watch(self, path: str, start: int) -> files.Watch | None:
        """Return the callback for the bytes of a file from `start` on."""
        if not self.algorithm:
            return make_watch(None, self.progress)
        checksum = self._checksums[path][start] = checksums.new(self.algorithm)
        return make_watch(checksum, self.progress)


def _copy_from(source: FileSource, fd: int, nbytes: int) -> bool:
    """Copy a file to another. Returns `False` if another file has replaced the mapped one at its path."""
    try:
        opened = os.open(source.path, os.O_RDONLY | system.CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        if not source.is_file(os.fstat(opened)):
            return False
        files.copy_file(opened, fd, nbytes)
    finally:
        os.close(opened)
    return True


def make_watch(checksum: checksums.Checksum | None, progress: Progress) -> files.Watch | None:
    """Return a callback that adds written bytes to a checksum and a progress bar; `None` for neither."""
    if checksum is None:
        return (lambda piece: progress.add(len(piece))) if progress.is_shown else None
    if not progress.is_shown:
        return checksum.update

    def watch(piece: memoryview) -> None:
        checksum.update(piece)
        progress.add(len(piece))

    return watch


class TensorRun:
    """Tensors that are written one after another into a file, with their checksums.

    Args:
        tensors: the tensors, in the order of the file.
        algorithm: the algorithm of the checksums; empty to compute none.

    Example:
        >>> import torch
        >>> from tensordict.io.saving.leaf_writer import TensorRun
        >>> TensorRun([torch.ones(2)], "crc32").checksums()
        ['crc32:00000000']
    """

    def __init__(self, tensors: Sequence[Tensor], algorithm: str = "") -> None:
        self.tensors = tensors
        self._algorithm = algorithm
        self._checksums = [checksums.new(algorithm) if algorithm else None for _ in tensors]

    def write(self, fd: int, offset: int, num_threads: int = 0, progress: bool | None = None) -> None:
        """Write the tensors, the first at byte `offset`; `progress` shows a bar."""
        with progress_bar(progress, "saving", sum(t.numel() * t.itemsize for t in self.tensors)) as shown:
            watches = [watch for checksum in self._checksums if (watch := make_watch(checksum, shown)) is not None]
            files.write_row(fd, self.tensors, offset, num_threads, watches)

    def checksums(self) -> list[str]:
        """Return the checksums in their stored form; an empty list if none are computed.

        Before `write` they are the checksums of no bytes, which have the same length.
        """
        return [
            checksums.format_checksum(self._algorithm, checksum) for checksum in self._checksums if checksum is not None
        ]
