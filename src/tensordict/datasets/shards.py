"""A shard on its way: rows go into its files as they come, or into memory until there are enough of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.core.keys import Path
from tensordict.datasets.location import writing
from tensordict.datasets.schema import Batch, Ragged, Rows, Schema, ragged_rows
from tensordict.io.directory import FolderOptions, GrowingFolder
from tensordict.io.formats import ARCHIVE, DIRECTORY, SUFFIXES
from tensordict.io.remote import StorageOptions, is_url
from tensordict.io.stores.backends import backend_of

# What a value that is no tensor is taken to need, in bytes.
_VALUE = 64


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How shards are saved.

    Args:
        format: of each; one of `io.formats.FORMATS`.
        durable: have a shard reach the disk before it counts.
        checksum: the algorithm of the checksums of tensors, where the format has a choice.
        compression: of the format.
        num_threads: that write a shard.
        storage_options: how its URL is reached.
    """

    format: str
    durable: bool = False
    checksum: str = ""
    compression: str | None = None
    num_threads: int = 0
    storage_options: StorageOptions | None = None

    @property
    def suffix(self) -> str:
        """What the names of shards end with."""
        return next((suffix for suffix, name in SUFFIXES.items() if name == self.format), "")


class Shard(ABC):
    """The rows of one shard, before they count.

    Args:
        schema: of the rows.
        capacity: how many there may be.

    Attributes:
        count: how many there are.
        nbytes: of what is held in memory until the shard is saved.
        saved: whether it is complete on disk, and only its line in the manifest is missing.
    """

    def __init__(self, schema: Schema, capacity: int) -> None:
        self.schema, self.capacity = schema, capacity
        self.count = self.nbytes = 0
        self.saved = False
        self._dense = [key for key, field in schema.fields.items() if field.is_dense]
        self._others: dict[Path, list[Any]] = {key: [] for key in schema.fields if key not in set(self._dense)}

    def add(self, batch: Batch, start: int, stop: int) -> None:
        """Take rows of a batch; when that fails, there are as many as before.

        Raises:
            OSError: a file cannot be written; the entry is named.
        """
        whole = stop - start == batch.count
        for key in self._dense:
            rows = batch.rows[key]
            assert isinstance(rows, Tensor)
            self._put(key, rows if whole else rows[start:stop])
        for key, parts in self._others.items():
            rows = batch.rows[key] if whole else _cut(batch.rows[key], start, stop)
            if isinstance(rows, Ragged):
                parts.append(rows)
                self.nbytes += rows.flat.nbytes + rows.sizes.nbytes
            else:
                parts.extend(rows)
                self.nbytes += _VALUE * len(rows)
        self.count += stop - start

    @abstractmethod
    def _put(self, key: Path, rows: Tensor) -> None:
        """Put rows behind those that there are."""

    def _container(self, dense: Mapping[Path, Tensor]) -> Any:
        leaves: dict[Path, Any] = dict(dense)
        for key, parts in self._others.items():
            field = self.schema.fields[key]
            leaves[key] = list(parts) if field.dtype is None else ragged_rows(field, parts)
        return self.schema.container(leaves, self.count)

    @abstractmethod
    def save(self) -> None:
        """Complete the shard on disk; it may be tried again when that fails."""

    @abstractmethod
    def close(self) -> None:
        """Take away what is on disk, unless the shard was saved."""


class FolderShard(Shard):
    """A shard whose tensors are written to their files at once, and never held in memory."""

    def __init__(self, schema: Schema, capacity: int, path: str, options: ShardOptions) -> None:
        super().__init__(schema, capacity)
        how = FolderOptions(durable=options.durable, checksum=options.checksum, num_threads=options.num_threads)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._folder = GrowingFolder(path, schema.sample(1), frozenset(self._dense), how)
        self._row_nbytes = row_nbytes(schema)

    def _put(self, key: Path, rows: Tensor) -> None:
        self._folder.write(key, rows, self.count * self._row_nbytes[key])

    def save(self) -> None:
        self._folder.commit(self._container({key: self._folder.written(key, self.count) for key in self._dense}))

    def close(self) -> None:
        self._folder.close()


class MemoryShard(Shard):
    """A shard whose rows are in memory until it is saved, in any format."""

    def __init__(self, schema: Schema, capacity: int, path: str, options: ShardOptions, buffers: Buffers) -> None:
        super().__init__(schema, capacity)
        self._path, self._options, self._buffers = path, options, buffers

    def _put(self, key: Path, rows: Tensor) -> None:
        self._buffers.of(key, self.schema, self.capacity)[self.count : self.count + len(rows)] = rows.detach()

    def save(self) -> None:
        dense = {key: self._buffers.of(key, self.schema, self.capacity)[: self.count] for key in self._dense}
        with writing("the shard", self._path):
            save_rows(self._container(dense), self._path, self._options)

    def close(self) -> None:
        self._others.clear()


class Buffers:
    """Memory for the rows of one shard, which the next one uses again."""

    def __init__(self) -> None:
        self._buffers: dict[Path, Tensor] = {}

    def of(self, key: Path, schema: Schema, capacity: int) -> Tensor:
        """That of an entry; pages that no row was written to take no memory."""
        found = self._buffers.get(key)
        if found is None:
            field = schema.fields[key]
            found = self._buffers[key] = torch.empty((capacity, *field.shape), dtype=field.dtype, device="cpu")
        return found


def new_shard(schema: Schema, capacity: int, path: str, options: ShardOptions, buffers: Buffers) -> Shard:
    """A shard without rows, to be saved at a path or URL."""
    if options.format == DIRECTORY and not is_url(path):
        return FolderShard(schema, capacity, path, options)
    return MemoryShard(schema, capacity, path, options, buffers)


def save_rows(container: Any, path: str, options: ShardOptions) -> None:
    """Save a container as a shard.

    Raises:
        OSError: it cannot be written; names the path.
    """
    if not (at_url := is_url(path)):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    if options.format in (DIRECTORY, ARCHIVE):
        container.memmap(
            path,
            copy_existing=True,
            num_threads=options.num_threads,
            archive=options.format == ARCHIVE,
            compression=options.compression,
            checksum=options.checksum if options.format == DIRECTORY and options.checksum else False,
            # Nothing is lost with what is staged for an upload.
            durable=options.durable and not at_url,
            # What is there is what an upload of this very shard has left that was thought to have failed.
            overwrite=at_url,
            storage_options=options.storage_options,
        )
        return
    # One random row is to be read without all others.
    compressed = {} if options.compression is None else backend_of(options.format).compressed_by(options.compression)
    how = {"overwrite": True, "storage_options": options.storage_options} if at_url else {}
    container.to_zarr(path, chunks="rows", **how, **compressed).close()


def row_nbytes(schema: Schema) -> dict[Path, int]:
    """The bytes of a row of each entry whose rows are all of one shape."""
    found: dict[Path, int] = {}
    for key, field in schema.fields.items():
        if field.is_dense and field.dtype is not None:
            found[key] = torch.Size(field.shape).numel() * field.dtype.itemsize
    return found


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    if not isinstance(rows, Ragged):
        return rows[start:stop]
    ends = rows.sizes.prod(1).cumsum(0)
    first = int(ends[start - 1]) if start else 0
    return Ragged(rows.flat[first : int(ends[stop - 1])], rows.sizes[start:stop])
