"""Containers behind URLs that fetch only the rows that are used, for data sets and reports."""

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
from tensordict.io.remote.cache import Range, merge_ranges
from tensordict.io.remote.remote_saves import Access, RemoteArchive, RemoteFolder, RemoteSave, read_remote
from tensordict.io.specification import LeafSpec, Specification
from tensordict.memory import system
from tensordict.memory.mapped import PathLike
from tensordict.memory.stored_tensors import Selection, StoredTensor

# Smaller archives are fetched as a whole, in one request: sending so much takes less time than a second answer.
_SMALL = 1 << 20
# The estimate of the bytes of an archive besides its tensors: headers, descriptions and the index.
_OTHERS = 64 << 10


def open_rows(
    url: PathLike, access: Access, check: Callable[[Callable[[str], bytes]], None], nbytes: int | None = None
) -> Any:
    """Open an archive or a folder behind a URL. Rows of its tensors are fetched when they are used.

    The structure, values and ragged tensors are fetched at once. The container is read-only. A small archive on S3 is
    fetched as a whole, and its tensors are private maps of the local copy.

    Args:
        url: the URL of the save.
        access: the storage options and the cache.
        check: called with a function that reads a document of the save by name; raises to refuse the save.
        nbytes: the estimated bytes of the tensors.

    Raises:
        FileNotFoundError: the URL has no save.
        SaveError: the save cannot be reached, is broken or has another format; names the URL.
    """
    use = partial(_open, check)
    if nbytes is None or nbytes + _OTHERS > _SMALL:
        return read_remote(url, access, use)
    return read_remote(url, access, use, (0, nbytes + _OTHERS))


def _open(check: Callable[[Callable[[str], bytes]], None], save: RemoteSave) -> Any:
    if save.format not in ("directory", "archive"):
        raise SaveError(f"{save.url!r} is of the format {save.format!r}, which is not read by rows")
    is_whole = save.is_whole
    container = load_directory(save.path, LoadOptions(source=save.source() if is_whole else _RowSource(save)))
    check(lambda name: save.source().read(f"{save.path}/{name}"))
    if is_whole:
        return container
    # The tensors hold the source, so the fetched bytes live as long as the tensors.
    save.keep_for(save.source())
    return _wrap_tensors(container)


def _wrap_tensors(container: Any) -> Any:
    """Wrap a container so that reading a stored tensor returns a tensor in memory."""
    inner = container._wrapped_container()
    entries = {
        name: _wrap_tensors(value) if is_node(value) and not value._is_non_tensor else value
        for name, value in inner._entries.items()
    }
    make = registry.lookup("FileSelection")._of
    return container._rewrap(make(entries, inner._batch_size, inner._device, inner._names))


def describe_rows(save: RemoteSave, complain: Complain | None) -> Specification:
    """Read the specification of an archive or a folder. Rows of its tensors are fetched when they are used."""
    options = LoadOptions(unpickle=skip_unpickling, complain=complain, source=_SpecSource(save))
    found = read_directory(save.path, options)
    save.keep_for(save.source())
    return found


class _RowSource:
    """The files of a save as a source of loaders. Tensors are read later, except ragged ones."""

    def __init__(self, save: RemoteSave) -> None:
        self._save, self._source = save, save.source()
        self.read, self.exists, self.is_folder = self._source.read, self._source.exists, self._source.is_folder
        self.map_ragged_file = self._source.map_ragged_file

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Return a tensor, or a stored tensor that is read later."""
        if not shape or 0 in shape:
            return self._source.map(path, dtype, shape, key)
        self._source.check_size(path, dtype, shape, key)
        return StoredTensor.of(RemoteArray(self._save, self._source, path, dtype, shape, key), dtype, None, key)


class _SpecSource(_RowSource):
    """A source that maps tensors to specifications. Only ragged tensors are fetched."""

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Any:
        """Return the specification of a tensor."""
        self._source.check_size(path, dtype, shape, key)
        later: Any = partial(self._source.map, path, dtype, shape, key)
        if shape and 0 not in shape and not self._source.is_compressed(path):
            later = StoredTensor.of(RemoteArray(self._save, self._source, path, dtype, shape, key), dtype, None, key)
        return LeafSpec(dtype, shape, math.prod(shape) * dtype.itemsize, False, later)


class RemoteArray:
    """A tensor in a file of a save behind a URL; implements the `Array` of `memory/stored_tensors.py`."""

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
        self.save, self.source, self._path = save, source, path
        self.name = path[len(source.path) + 1 :]
        self.dtype, self.shape, self.key = dtype, shape, key
        self._row = torch.Size(shape[1:])

    def check(self) -> None:
        """Do nothing, because a save behind a URL is never closed."""

    def read(self, selection: Selection, dtype: object = None) -> Tensor:
        """Return the selected elements, fetching the rows that contain them."""
        first, *others = selection or (slice(None),)
        rows = _rows(first, range(self.shape[0]))
        with self.save.naming():
            found = self._fetch_rows(rows)
        taken = found[0] if isinstance(first, (int, np.integer)) else found
        at = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in others)
        return taken if not at else taken[at if isinstance(first, (int, np.integer)) else (slice(None), *at)].clone()

    def write(self, selection: Selection, values: object) -> None:
        """Raise a `SaveError`: saves behind URLs are read-only."""
        raise SaveError(f"{self.save.url!r} is only read: nothing is written into what is behind a URL")

    def list_ranges(self, rows: range | list[int]) -> list[Range]:
        """Return the bytes of rows in the file."""
        nbytes = self._row.numel() * self.dtype.itemsize
        if isinstance(rows, range) and rows.step == 1:
            return [(rows.start * nbytes, rows.stop * nbytes)]
        return [(row * nbytes, (row + 1) * nbytes) for row in rows]

    def _fetch_rows(self, rows: range | list[int]) -> Tensor:
        """Fetch rows into a new tensor."""
        ranges = self.list_ranges(rows)
        placed = self.source.place(self._path, ranges)
        if placed is None:
            # A compressed file must be unpacked as a whole.
            return self.source.map(self._path, self.dtype, self.shape, self.key)[list(rows)]
        file, start = placed
        out = torch.empty((len(rows), *self._row), dtype=self.dtype, device="cpu")
        view = memoryview(out.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        done = 0
        with file.hold_open() as fd:
            # An eviction by another process may have removed the copy meanwhile.
            file.ensure((start + low, start + high) for low, high in ranges)
            for low, high in merge_ranges(ranges):
                _read_into(fd, view[done : done + high - low], start + low, file.path)
                done += high - low
        return out


def fetch_rows(leaves: Iterable[Any], rows: slice | Tensor) -> list[Any]:
    """Fetch rows of leaves of one save behind a URL in requests that run at once.

    Returns:
        the leaves that lie elsewhere, of which nothing was fetched.
    """
    wanted: dict[str, list[Range]] = {}
    others: list[Any] = []
    remote: Any = None
    for leaf in leaves:
        first: Any = rows
        array: Any = None
        stored = leaf
        while isinstance(stored, StoredTensor):
            first, array = _rows(first, stored.picks[0]), stored.array
            # A data set wraps the arrays of its shards.
            stored = getattr(array, "inner", None)
        if isinstance(array, RemoteArray):
            wanted[array.name] = array.list_ranges(first)
            remote = array
        else:
            others.append(leaf)
    if wanted:
        with remote.save.naming():
            remote.source.fetch(wanted)
    return others


def _rows(first: Any, picked: Any) -> range | list[int]:
    """Apply an index to the numbers of picked rows."""
    if isinstance(first, range):
        first = slice(first.start, first.stop, first.step)
    if isinstance(first, slice) and isinstance(picked, range):
        return picked[first]
    positions = [first] if isinstance(first, (int, np.integer)) else np.asarray(first).tolist()
    return [int(picked[row]) for row in positions]


def _read_into(fd: int, target: memoryview, at: int, path: str) -> None:
    while len(target):
        piece = system.pread(fd, len(target), at)
        if not piece:
            raise OSError(errno.EIO, "the local copy was cut short", os.fspath(path))
        target[: len(piece)] = piece
        target, at = target[len(piece) :], at + len(piece)
