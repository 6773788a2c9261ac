"""The writers of leaves, which formats use to write tensors with threads, checksums and a progress bar."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from tensordict.core.keys import Path
from tensordict.io.remote.credentials import StorageOptions
from tensordict.io.saving import checksums
from tensordict.io.saving.progress import NO_BAR, Progress, progress_bar
from tensordict.io.saving.transaction import Transaction
from tensordict.memory import files, system
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor, is_whole_file

# Several threads write a leaf that is larger than this, each thread one range.
_SPLIT = 64 << 20


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
class WriteOptions:
    """The settings that all leaves of a save share.

    Args:
        transaction: the transaction of the save.
        num_threads: the number of threads that will run the jobs.
        checksum: the algorithm of the checksums; empty to write none.
        progress: the progress bar, which counts bytes.
        reserve: reserve room on the disk for files without content.
    """

    transaction: Transaction
    num_threads: int = 0
    checksum: str = ""
    progress: Progress = NO_BAR
    reserve: bool = True


@dataclass(slots=True)
class LeafFile:
    """The file of a tensor, which the commit will put at `path`.

    Args:
        zero: create the file without content; it reads as zeros.
        is_staged: the staged file has the content of the tensor already, so only the checksum is computed.
    """

    key: Path
    tensor: Tensor
    path: str
    options: WriteOptions
    zero: bool = False
    is_staged: bool = False
    # The checksum of each piece, by its first byte. Created only if checksums are computed, because a save may have
    # thousands of leaves.
    _checksums: dict[int, checksums.Checksum] | None = None

    def jobs(self) -> Iterable[Callable[[], None]]:
        """Return the functions that write the file. They may run in any order."""
        if self.options.checksum:
            self._checksums = {}
        if self.is_staged:
            return (self._read_staged,) if self.options.checksum or self.options.transaction.durable else ()
        nbytes = self.tensor.numel() * self.tensor.element_size()
        is_one_job = self.options.num_threads <= 1 or nbytes <= _SPLIT or self.zero or not files.is_direct(self.tensor)
        if is_one_job or self.options.checksum not in ("", "crc32"):
            return (self._write,)
        with files.naming("write the file", self.path, self.key):
            os.close(self.options.transaction.create(self.path))
        step = -(-nbytes // math.ceil(nbytes / _SPLIT) // 4096) * 4096
        return [partial(self._write_piece, start, min(start + step, nbytes)) for start in range(0, nbytes, step)]

    def checksum(self) -> str:
        """Return the checksum in its stored form once all jobs are done; empty if none is computed."""
        if not self._checksums:
            return ""
        pieces = [self._checksums[start] for start in sorted(self._checksums)]
        return checksums.format_checksum(self.options.checksum, checksums.combine(pieces))

    def _write(self) -> None:
        try:
            fd = self.options.transaction.create(self.path)
            try:
                if self.zero:
                    files.allocate(fd, self.tensor.numel() * self.tensor.element_size(), self.options.reserve)
                else:
                    self._write_content(fd)
                if self.options.transaction.durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            doing = "reserve room, which preallocate=False does not, for" if self.zero else "write"
            raise files.named_os_error(error, f"{doing} the file", self.path, self.key) from error

    def _write_content(self, fd: int) -> None:
        tensor, options = self.tensor, self.options
        if isinstance(tensor, MemoryMappedTensor) and isinstance(tensor._source, FileSource) and not options.checksum:
            source = tensor._source
            if source.shared and is_whole_file(tensor) and tensor.numel() and _copy_from(source, fd, tensor.nbytes):
                options.progress.add(tensor.nbytes)
                return
        files.write_tensor(fd, tensor, 0, self._watch(0))

    def _write_piece(self, start: int, stop: int) -> None:
        transaction = self.options.transaction
        try:
            with files.closing(os.open(transaction.at(self.path), os.O_WRONLY | system.CLOEXEC)) as fd:
                files.write_range(fd, self.tensor, start, stop, start, self._watch(start))
                if transaction.durable:
                    os.fsync(fd)
        except OSError as error:
            raise files.named_os_error(error, "write the file", self.path, self.key) from error

    def _read_staged(self) -> None:
        """Compute the checksum of a staged file, and sync it if the save is durable."""
        watch = self._watch(0)
        if watch is not None and self.options.checksum:
            files.show_content(self.tensor, watch)
        transaction = self.options.transaction
        if transaction.durable:
            files.sync_file(transaction.at(self.path))

    def _watch(self, start: int) -> files.Watch | None:
        """Return the callback for the bytes from `start` on."""
        if self._checksums is None:
            return make_watch(None, self.options.progress)
        checksum = self._checksums[start] = checksums.new(self.options.checksum)
        return make_watch(checksum, self.options.progress)


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
