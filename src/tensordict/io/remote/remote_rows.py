"""Containers behind URLs whose tensors are fetched by rows: those that are used, when they are used."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core import registry
from tensordict.core.contract import is_node
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.io.formats.loading import LoadOptions, load_directory, read_directory
from tensordict.io.formats.structure import Complain
from tensordict.io.formats.value_files import skip_unpickling
from tensordict.io.remote.cache import merged
from tensordict.io.remote.remote_saves import Access, RaggedFiles, RemoteArchive, RemoteFolder, RemoteSave, read_remote
from tensordict.io.specification import LeafSpec, Specification
from tensordict.memory import system
from tensordict.memory.mapped import PathLike
from tensordict.memory.stored_tensors import Selection, StoredTensor


def open_rows(url: PathLike, access: Access, check: Callable[[Callable[[str], bytes]], None]) -> Any:
    """Open an archive or a folder behind a URL, whose tensors are fetched by rows when rows are used.

    The structure with its values is fetched at once, and so are ragged tensors. Nothing can be written.

    Args:
        url: where.
        access: how it is reached.
        check: is called with a function that reads a document of the save by its name; raises to refuse the save.

    Raises:
        FileNotFoundError: there is nothing.
        SaveError: it cannot be reached, or is broken, or of another format; names the URL.
    """
    return read_remote(url, access, partial(_open, check))


def _open(check: Callable[[Callable[[str], bytes]], None], save: RemoteSave) -> Any:
    if save.format not in ("directory", "archive"):
        raise SaveError(f"{save.url!r} is of the format {save.format!r}, which is not read by rows")
    container = load_directory(save.path, LoadOptions(source=_ByRows(save)))
    check(lambda name: save.source().read(f"{save.path}/{name}"))
    # The tensors hold it, and keep what is fetched for as long as they are there.
    save.kept_for(save.source())
    return _in_place(container)


def _in_place(container: Any) -> Any:
    """A container that gives what is read of the tensors in one that stand for others."""
    inner = container._wrapped_container()
    entries = {
        name: _in_place(value) if is_node(value) and not value._is_non_tensor else value
        for name, value in inner._entries.items()
    }
    make = registry.lookup("FileSelection")._of
    return container._rewrap(make(entries, inner._batch_size, inner._device, inner._names))


def describe_rows(save: RemoteSave, complain: Complain | None) -> Specification:
    """The specification of an archive or a folder; rows of its tensors are fetched when they are asked for."""
    options = LoadOptions(unpickle=skip_unpickling, complain=complain, source=_Described(save))
    found = read_directory(save.path, options)
    save.kept_for(save.source())
    return found


class _ByRows:
    """The files of a save as a source of loaders, whose tensors are read later, except ragged ones."""

    def __init__(self, save: RemoteSave) -> None:
        self._save, self._source = save, save.source()
        self.read, self.exists, self.is_folder = self._source.read, self._source.exists, self._source.is_folder
        self._ragged = RaggedFiles()

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """The tensor, or what stands for it."""
        if self._ragged.is_of_one(path) or not shape or 0 in shape:
            return self._source.map(path, dtype, shape, key)
        self._source.check_size(path, dtype, shape, key)
        return StoredTensor.of(RemoteArray(self._save, self._source, path, dtype, shape, key), dtype, None, key)


class _Described(_ByRows):
    """The same, of which nothing is fetched but what ragged tensors are."""

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Any:
        """The tensor, or what reads it."""
        if self._ragged.is_of_one(path):
            return self._source.map(path, dtype, shape, key)
        self._source.check_size(path, dtype, shape, key)
        later: Any = partial(self._source.map, path, dtype, shape, key)
        if shape and 0 not in shape and not self._source.is_compressed(path):
            later = StoredTensor.of(RemoteArray(self._save, self._source, path, dtype, shape, key), dtype, None, key)
        return LeafSpec(dtype, shape, math.prod(shape) * dtype.itemsize, False, later)


class RemoteArray:
    """A tensor in a file of a save behind a URL, as an `Array` (memory/stored_tensors.py)."""

    spread = rows_together = 1

    def __init__(
        self,
        save: RemoteSave,
        source: RemoteArchive | RemoteFolder,
        path: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        key: Path,
    ) -> None:
        self._save, self._source, self._path = save, source, path
        self.dtype, self.shape, self.key = dtype, shape, key
        self._row = torch.Size(shape[1:])

    def check(self) -> None:
        """Nothing can be closed."""

    def read(self, selection: Selection, dtype: object = None) -> Tensor:
        """The selected elements; the rows that they are in are fetched."""
        first, *others = selection or (slice(None),)
        rows = _rows(first, self.shape[0])
        with self._save.naming():
            found = self._fetched(rows)
        taken = found[0] if isinstance(first, (int, np.integer)) else found
        at = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in others)
        return taken if not at else taken[at if isinstance(first, (int, np.integer)) else (slice(None), *at)].clone()

    def write(self, selection: Selection, values: object) -> None:
        """Refused."""
        raise SaveError(f"{self._save.url!r} is only read: nothing is written into what is behind a URL")

    def _fetched(self, rows: Iterable[int]) -> Tensor:
        """Rows, in memory of their own."""
        nbytes = self._row.numel() * self.dtype.itemsize
        numbers = list(rows)
        ranges = [(row * nbytes, (row + 1) * nbytes) for row in numbers]
        placed = self._source.place(self._path, ranges)
        if placed is None:
            # It is compressed: all of it is unpacked.
            return self._source.map(self._path, self.dtype, self.shape, self.key)[numbers]
        file, start = placed
        out = torch.empty((len(numbers), *self._row), dtype=self.dtype, device="cpu")
        view = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        with file.held() as fd:
            file.ensure((start + low, start + high) for low, high in ranges)
            for low, high in merged(ranges):
                _read_into(fd, view[done : done + high - low], start + low, file.path)
                done += high - low
        return out


def _rows(first: Any, count: int) -> range | list[int]:
    if isinstance(first, slice):
        return range(count)[first]
    return [int(first)] if isinstance(first, (int, np.integer)) else first.tolist()


def _read_into(fd: int, target: memoryview, at: int, path: str) -> None:
    while len(target):
        piece = system.pread(fd, len(target), at)
        if not piece:
            raise OSError(errno.EIO, "the local copy was cut short", os.fspath(path))
        target[: len(piece)] = piece
        target, at = target[len(piece) :], at + len(piece)
