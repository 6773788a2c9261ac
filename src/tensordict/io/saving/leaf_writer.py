"""Writing leaves to files, by one thread or several, with checksums of what is written and a bar that shows it."""

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
from tensordict.io.saving.progress import Progress, progress_bar
from tensordict.io.saving.transaction import Transaction
from tensordict.memory import files, system
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor, is_whole_file

# A leaf larger than this is written by several threads, each its own range.
_SPLIT = 64 << 20


@dataclass(slots=True)
class SaveOptions:
    """How to save, in any format; see `TensorDict.memmap`."""

    num_threads: int = 0
    # Have everything reach the disk before the save takes its place.
    durable: bool = False
    # The algorithm of the checksums of leaves; none when empty.
    checksum: str = ""
    progress: bool | None = None
    # Replace whatever is there: otherwise a file that belongs to no save is an error.
    overwrite: bool = False
    # Of a URL: how it is reached.
    storage_options: StorageOptions | None = None


@dataclass(slots=True)
class WriteOptions:
    """What leaves are written with.

    Args:
        transaction: what the files are part of.
        num_threads: how many threads will run the jobs.
        checksum: the algorithm; none when empty.
        progress: is told of every byte.
        reserve: have the disk keep room for files without content.
    """

    transaction: Transaction
    num_threads: int = 0
    checksum: str = ""
    progress: Progress | None = None
    reserve: bool = True


@dataclass(slots=True)
class LeafFile:
    """The file of a tensor, which is to be `path`.

    Args:
        zero: write no content, which is zero then.
        there: do not write: what is staged is the content of the tensor, and needs a checksum at most.
    """

    key: Path
    tensor: Tensor
    path: str
    options: WriteOptions
    zero: bool = False
    there: bool = False
    # By the byte at which a piece begins; made when there is a checksum, as thousands of leaves have none.
    _checksums: dict[int, checksums.Checksum] | None = None

    def jobs(self) -> Iterable[Callable[[], None]]:
        """The pieces of work that write it, which may run in any order."""
        if self.options.checksum:
            self._checksums = {}
        if self.there:
            return (self._look,) if self.options.checksum or self.options.transaction.durable else ()
        nbytes = self.tensor.numel() * self.tensor.element_size()
        one = self.options.num_threads <= 1 or nbytes <= _SPLIT or self.zero or not files.is_direct(self.tensor)
        if one or self.options.checksum not in ("", "crc32"):
            return (self._write,)
        with files.naming("write the file", self.path, self.key):
            os.close(self.options.transaction.create(self.path))
        step = -(-nbytes // math.ceil(nbytes / _SPLIT) // 4096) * 4096
        return [partial(self._write_piece, start, min(start + step, nbytes)) for start in range(0, nbytes, step)]

    def checksum(self) -> str:
        """The form of the checksum that a file keeps, once all jobs are done; empty for none."""
        if not self._checksums:
            return ""
        pieces = [self._checksums[start] for start in sorted(self._checksums)]
        return checksums.text(self.options.checksum, checksums.of_pieces(pieces))

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
                if options.progress is not None:
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

    def _look(self) -> None:
        watch = self._watch(0)
        if watch is not None and self.options.checksum:
            files.show_content(self.tensor, watch)
        transaction = self.options.transaction
        if transaction.durable:
            files.sync_file(transaction.at(self.path))

    def _watch(self, start: int) -> files.Watch | None:
        """What is shown the bytes from `start` on."""
        if self._checksums is None:
            return watching(None, self.options.progress)
        checksum = self._checksums[start] = checksums.new(self.options.checksum)
        return watching(checksum, self.options.progress)


def _copy_from(source: FileSource, fd: int, nbytes: int) -> bool:
    """Copy file to file; `False` when the path of the source no longer is the file that is mapped."""
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


def watching(checksum: checksums.Checksum | None, progress: Progress | None) -> files.Watch | None:
    """What is shown all that is written of a tensor, for its checksum and the progress bar; `None` for neither."""
    if checksum is None:
        return None if progress is None else lambda piece: progress.add(len(piece))
    if progress is None:
        return checksum.update

    def watch(piece: memoryview) -> None:
        checksum.update(piece)
        progress.add(len(piece))

    return watch


class TensorRun:
    """Tensors on their way into one file, one behind the other, and their checksums.

    Args:
        tensors: in their order.
        algorithm: of the checksums; none when empty.

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
        """Write them, the first at byte `offset`; `progress` shows a bar."""
        with progress_bar(progress, "saving", sum(t.numel() * t.itemsize for t in self.tensors)) as shown:
            watches: list[files.Watch | None] = []
            if self._algorithm or shown is not None:
                watches = [watching(checksum, shown) for checksum in self._checksums]
            files.write_row(fd, self.tensors, offset, num_threads, watches)

    def checksums(self) -> list[str]:
        """The form of the checksum of each that a file keeps: before `write`, of nothing, and as long; none if none."""
        return [checksums.text(self._algorithm, checksum) for checksum in self._checksums if checksum is not None]
