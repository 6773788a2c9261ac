"""A shard on its way: rows go into its files as they come, or into memory until there are enough of them."""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.datasets.folders import refuse_links
from tensordict.datasets.labels import GROUP_LABEL, describe_shard
from tensordict.datasets.lines import Line
from tensordict.datasets.location import Location, RemoteLocation
from tensordict.datasets.schema import Batch, Ragged, Rows, Schema, ragged_rows
from tensordict.io.formats.archive import plan_archive
from tensordict.io.formats.directory import FolderOptions, GrowingFolder, plan_save
from tensordict.io.formats.opening import ARCHIVE, DIRECTORY, SUFFIXES
from tensordict.io.remote.remote_saves import naming_url
from tensordict.io.stores.backends import backend_of
from tensordict.memory import files

# Memory for the rows of one shard, by entry.
Buffers = dict[Path, Tensor]
# So many bytes, and so many rows, are copied or compared at once.
_BLOCK, _MOST_ROWS = 16 << 20, 1 << 16
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
    """

    format: str
    durable: bool = False
    checksum: str = ""
    compression: str | None = None
    num_threads: int = 0

    @property
    def suffix(self) -> str:
        """What the names of shards end with."""
        return next((suffix for suffix, name in SUFFIXES.items() if name == self.format), "")


class Shard(ABC):
    """The rows of one shard, before they count.

    Args:
        schema: of the rows.
        capacity: how many there may be.
        place: the data set.
        label: names the shard.
        options: how it is saved.

    Attributes:
        count: how many there are.
        nbytes: of what is held in memory until the shard is saved.
        line: of the manifest, once the shard is complete.
        is_final: whether it takes no more rows, as what was saved of it may be there already.
    """

    def __init__(self, schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions) -> None:
        self.schema, self.capacity = schema, capacity
        self._place, self._label, self._options = place, label, options
        self._path = place.path(label.path)
        self.count = self.nbytes = 0
        self.line: Line | None = None
        self.is_final = False
        self._others: dict[Path, list[Any]] = {key: [] for key in schema.fields if key not in schema.dense}

    def add(self, batch: Batch, start: int, stop: int) -> None:
        """Take rows of a batch; when that fails, there are as many as before.

        Raises:
            OSError: a file cannot be written; the entry is named.
        """
        whole = stop - start == batch.count
        for key in self.schema.dense:
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

    def _described(self, path: str) -> Line:
        """Return the line of the manifest for the complete shard, whose files lie at a path on this machine."""
        nbytes, digest = describe_shard(path)
        return replace(self._label, rows=self.count, nbytes=nbytes, digest=digest)

    @abstractmethod
    def save(self) -> Line:
        """Complete the shard on disk, and return its line of the manifest; it may be tried again when that fails."""

    @abstractmethod
    def close(self) -> None:
        """Remove the files of the shard, unless it was saved."""


class FolderShard(Shard):
    """A shard whose tensors are written to their files at once, and never held in memory."""

    def __init__(self, schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions) -> None:
        super().__init__(schema, capacity, place, label, options)
        make_shard_folder(place, label.path, options.durable)
        self._folder = GrowingFolder(self._path, schema.sample(1), schema.dense, folder_options(options, label))

    def _put(self, key: Path, rows: Tensor) -> None:
        self._folder.write(key, rows, self.count * self.schema.sizes[key])

    def save(self) -> Line:
        if self.line is None:
            self._folder.commit(
                self._container({key: self._folder.written(key, self.count) for key in self.schema.dense})
            )
            self.line = self._described(self._path)
        return self.line

    def close(self) -> None:
        self._folder.close()


class MemoryShard(Shard):
    """A shard whose rows are in memory until it is saved, in any format.

    At a URL, the files are made on this machine first, and stay there until they are uploaded: an upload that is tried
    again has the same content, so it does not matter when an earlier one arrives.
    """

    def __init__(
        self, schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions, buffers: Buffers
    ) -> None:
        super().__init__(schema, capacity, place, label, options)
        self._buffers = buffers
        self._staged: tempfile.TemporaryDirectory[str] | None = None

    def _buffer(self, key: Path) -> Tensor:
        if key not in self._buffers:
            field = self.schema.fields[key]
            # Pages that no row is written to take no memory.
            self._buffers[key] = torch.empty((self.capacity, *field.shape), dtype=field.dtype, device="cpu")
        return self._buffers[key]

    def _put(self, key: Path, rows: Tensor) -> None:
        self._buffer(key)[self.count : self.count + len(rows)] = rows.detach()

    def save(self) -> Line:
        if self.line is None:
            try:
                self.line = self._save()
            except OSError as error:
                # Some errors name an entry only.
                if error.errno is None:
                    raise SaveError(f"cannot write the shard {self._path!r}: {error}") from error
                raise OSError(error.errno, f"cannot write the shard ({error})", self._path) from error
        return self.line

    def _save(self) -> Line:
        place = self._place
        if not isinstance(place, RemoteLocation):
            make_shard_folder(place, self._label.path, self._options.durable)
            self._save_at(self._path, self._options.durable)
            return self._described(self._path)
        if self._staged is None:
            self._staged = tempfile.TemporaryDirectory(prefix="tensordict-upload-")
        path = f"{self._staged.name}/{os.path.basename(self._path)}"
        if not self.is_final:
            with naming_url(path, self._path):
                self._save_at(path, durable=False)
            self.is_final = True
        place.upload(self._label.path, path)
        return self._described(path)

    def _save_at(self, path: str, durable: bool) -> None:
        dense = {key: self._buffer(key)[: self.count] for key in self.schema.dense}
        save_rows(self._container(dense), path, replace(self._options, durable=durable), self._label)

    def close(self) -> None:
        self._others.clear()
        if self._staged is not None:
            self._staged.cleanup()


def new_shard(
    schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions, buffers: Buffers
) -> Shard:
    """Begin a shard, which the label names; `buffers` are those of the shards before it, whose memory is used again."""
    if options.format == DIRECTORY and not place.is_remote:
        return FolderShard(schema, capacity, place, label, options)
    return MemoryShard(schema, capacity, place, label, options, buffers)


def make_shard_folder(place: Location, name: str, durable: bool) -> None:
    """Make the folder of a writer for a shard; `durable` has the names of all folders on the way reach the disk."""
    folder = os.path.dirname(place.path(name))
    os.makedirs(folder, exist_ok=True)
    refuse_links(place.root, os.path.dirname(name))
    if durable:
        for around in (os.path.dirname(folder), place.root, os.path.dirname(place.root)):
            files.sync_folder(around)


def folder_options(options: ShardOptions, label: Line) -> FolderOptions:
    """Return how the files of a shard are written in a folder or an archive."""
    return FolderOptions(
        num_threads=options.num_threads,
        durable=options.durable,
        checksum=options.checksum if options.format == DIRECTORY else "",
        copy_existing=True,
        label=label.label,
        compression=options.compression if options.format == ARCHIVE else None,
    )


def save_rows(container: Any, path: str, options: ShardOptions, label: Line) -> None:
    """Save a container as a shard on this machine.

    Raises:
        OSError: it cannot be written; names the path.
    """
    if options.format == DIRECTORY:
        plan_save(container, path, folder_options(options, label))()
    elif options.format == ARCHIVE:
        plan_archive(container, path, folder_options(options, label))()
    else:
        # One random row is to be read without all others.
        compressed = (
            {} if options.compression is None else backend_of(options.format).choose_compression(options.compression)
        )
        saved = container.to_zarr(path, chunks="rows", overwrite=True, **compressed)
        saved._wrapped_container()._group.set_attribute(GROUP_LABEL, json.dumps(label.label))
        saved.close()


def rows_per_block(schema: Schema) -> int:
    """Return how many rows are copied or compared at once; values and ragged rows are taken to be small."""
    return max(1, min(_MOST_ROWS, _BLOCK // max(1, schema.nbytes)))


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    if not isinstance(rows, Ragged):
        return rows[start:stop]
    ends = rows.sizes.prod(1).cumsum(0)
    first = int(ends[start - 1]) if start else 0
    return Ragged(rows.flat[first : int(ends[stop - 1])], rows.sizes[start:stop])
