"""Reserves room on the disk before operations write to mapped sparse files.

If the disk is full, the system kills a process that writes into a map (SIGBUS); there is no error to catch. So every
operation that writes to leaves calls `make_room` first if `FileSource.any_sparse` is set.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.indices import is_basic
from tensordict.core.keys import Path, entry_of
from tensordict.memory import files, system
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor

# A range of bytes of a file: the first one, and the one behind the last.
Span = tuple[int, int]
_FULL = (errno.ENOSPC, errno.EDQUOT)


def make_room(written: Iterable[tuple[Tensor, Any]], container: Contract | None) -> None:
    """Reserve room on the disk for the next write to tensors over sparse files.

    Only a `MemoryMappedTensor` (a mapped leaf, or a view of one) knows its file; other tensors are skipped. If the file
    system cannot reserve room, this checks that there is enough free space.

    Args:
        written: tensors, each with the index of the part that will be written; `None` stands for the whole tensor.
        container: names the entry in the error.

    Raises:
        OSError: the disk is full; nothing has been written. The error names the entry, the file and the sizes.
    """
    if torch.compiler.is_compiling():
        return
    for tensor, at in written:
        if isinstance(tensor, MemoryMappedTensor):
            source = tensor._source
            if isinstance(source, FileSource) and source.sparse:
                _make_room(source, [(begin, end) for begin, end in _spans(tensor, at) if begin < end], container)


def _make_room(source: FileSource, spans: list[Span], container: Contract | None) -> None:
    fd = _open(source)
    nbytes = sum(end - begin for begin, end in spans)
    reserved = False
    try:
        if fd is not None:
            source.sparse = FileSource(source.path, os.fstat(fd), shared=True).sparse
            if not source.sparse:
                return
            reserved = all(system.reserve(fd, begin, end - begin, keep_size=True) for begin, end in spans)
    except OSError as error:
        if error.errno not in _FULL:
            key = _key_of(source, container)
            raise files.named_os_error(error, "reserve room in the file", source.path, key) from error
        raise _full(source, nbytes, container, error.errno) from error
    finally:
        if fd is not None:
            os.close(fd)
    if not reserved and nbytes > (_free_space(source) or nbytes):
        raise _full(source, nbytes, container)


def _open(source: FileSource) -> int | None:
    """Open the file for writing. Return `None` if that fails, or if another save has replaced the file."""
    try:
        fd = os.open(source.path, os.O_RDWR | system.NONBLOCK | system.CLOEXEC)
    except OSError:
        return None
    if source.is_file(os.fstat(fd)):
        return fd
    os.close(fd)
    return None


def _free_space(source: FileSource) -> int | None:
    """Return the free bytes of the disk, or `None` if the folder of the file is gone."""
    try:
        return shutil.disk_usage(os.path.dirname(source.path)).free
    except FileNotFoundError:
        return None


def _full(source: FileSource, nbytes: int, container: Contract | None, code: int = errno.ENOSPC) -> OSError:
    free = _free_space(source)
    where = "" if free is None else f", and the disk has {free:,} bytes free"
    what = f"cannot write to the sparse file: {nbytes:,} bytes of it are needed{where}"
    return OSError(code, f"{entry_of(_key_of(source, container))}{what} ({os.strerror(code)})", source.path)


def _key_of(source: FileSource, container: Contract | None) -> Path:
    """Return the nested key of the leaf over a file; empty if there is no such leaf."""
    for path, leaf in () if container is None else container._walk():
        if isinstance(leaf, MemoryMappedTensor) and leaf._source is source:
            return path
    return ()


def _spans(tensor: MemoryMappedTensor, at: Any) -> Iterator[Span]:
    """Yield the spans of the file that a tensor covers, or its part at the index `at`.

    A span includes the gaps between elements. An index tensor of the first dim gives a span for each run of rows.
    """
    if tensor.is_nested:
        yield 0, tensor.untyped_storage().nbytes()
        return
    if at is not None and is_basic(at):
        tensor, at = tensor[at], None  # type: ignore[assignment]
    rows = at[0] if isinstance(at, tuple) else at
    if not isinstance(rows, Tensor) or not tensor.numel() or not rows.numel():
        yield _extent(tensor)
        return
    begin, end = _extent(tensor[0])
    step = tensor.stride(0) * tensor.itemsize
    for first, last in _runs(rows.detach().cpu(), len(tensor)):
        yield begin + first * step, end + last * step


def _runs(rows: Tensor, count: int) -> list[Span]:
    """Return the first and the last row of each run in an index tensor."""
    # Torch refuses indices that are out of bounds later.
    known = torch.unique(torch.where(rows < 0, rows + count, rows).clamp(0, count - 1))
    ends = known.diff() != 1
    true = torch.ones(1, dtype=torch.bool)
    firsts, lasts = known[torch.cat((true, ends))], known[torch.cat((ends, true))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _extent(tensor: Tensor) -> Span:
    """Return the bytes from the first element of a tensor to behind the last one."""
    first = int(tensor.storage_offset())
    steps = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    last = first + sum(steps) + 1 if tensor.numel() else first
    return first * tensor.itemsize, last * tensor.itemsize
