"""`Shard`: a shard under construction, which collects rows in its files or in memory until a writer commits it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.datasets.folders import refuse_links
from tensordict.datasets.labels import GROUP_LABEL, describe_shard
from tensordict.datasets.lines import SHARDS, Line
from tensordict.datasets.location import Location, Log, RemoteLocation
from tensordict.datasets.schema import Batch, FlatRows, Rows, Schema, join_ragged_rows
from tensordict.io.formats.archive import plan_archive
from tensordict.io.formats.directory import FolderOptions, GrowingFolder, plan_save
from tensordict.io.formats.opening import ARCHIVE, DIRECTORY, SUFFIXES
from tensordict.io.remote.remote_saves import naming_url
from tensordict.io.stores.backends import backend_of
from tensordict.memory import files

# Memory for the rows of one shard, by entry.
Buffers = dict[Path, Tensor]
# The most bytes, and the most rows, that are copied or compared at once.
_BLOCK, _MOST_ROWS = 16 << 20, 1 << 16
# The suffixes of the names of shards, by format.
_SUFFIX_OF = {format: suffix for suffix, format in SUFFIXES.items()}
# The estimated bytes of a value.
_VALUE = 64


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """Options for saving shards.

    Args:
        format: the format, one of `io.formats.FORMATS`.
        durable: sync a shard to the disk before it is committed.
        checksum: the algorithm for checksums of tensors, if the format has a choice.
        compression: the compression, if the format compresses.
        num_threads: the number of threads that write a shard.
    """

    format: str
    durable: bool = False
    checksum: str = ""
    compression: str | None = None
    num_threads: int = 0

    def shard_path(self, writer: str, number: int) -> str:
        """Return the path of a shard in the data set, by the id of its writer and its number."""
        return f"{SHARDS}/{writer}/{number:08}{_SUFFIX_OF[self.format]}"


class Shard(ABC):
    """A shard under construction.

    Args:
        schema: the schema of the rows.
        capacity: the most rows.
        place: the data set.
        label: names the shard.
        options: the options for saving it.

    Attributes:
        count: the number of rows.
        nbytes: the bytes that stay in memory until the shard is saved.
        line: the line for the manifest, once the shard is complete.
        is_final: True if no more rows may be added, because readers or an object store may have seen the shard.
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
        """Add rows of a batch. If that fails, the shard has the same rows as before.

        Raises:
            OSError: a file cannot be written; the error names the entry.
        """
        whole = stop - start == batch.count
        for key in self.schema.dense:
            rows = batch.rows[key]
            assert isinstance(rows, Tensor)
            self._append_rows(key, rows if whole else rows[start:stop])
        for key, parts in self._others.items():
            rows = batch.rows[key] if whole else _slice_rows(batch.rows[key], start, stop)
            if isinstance(rows, FlatRows):
                parts.append(rows)
                self.nbytes += rows.flat.nbytes + rows.sizes.nbytes
            else:
                parts.extend(rows)
                self.nbytes += _VALUE * len(rows)
        self.count += stop - start

    @abstractmethod
    def _append_rows(self, key: Path, rows: Tensor) -> None:
        """Append rows to one entry."""

    def _make_folder(self) -> None:
        """Make the folder for shards of the writer. If the shard is durable, sync all names on its path to the disk."""
        root, folder = self._place.root, os.path.dirname(self._path)
        os.makedirs(folder, exist_ok=True)
        refuse_links(root, os.path.dirname(self._label.path))
        if self._options.durable:
            for around in (os.path.dirname(folder), root, os.path.dirname(root)):
                files.sync_folder(around)

    def _folder_options(self, durable: bool) -> FolderOptions:
        """Return the options for writing the shard as a folder or an archive."""
        options = self._options
        return FolderOptions(
            num_threads=options.num_threads,
            durable=durable,
            checksum=options.checksum if options.format == DIRECTORY else "",
            copy_existing=True,
            label=self._label.label,
            compression=options.compression if options.format == ARCHIVE else None,
        )

    def _container(self, dense: Mapping[Path, Tensor]) -> Any:
        leaves: dict[Path, Any] = dict(dense)
        for key, parts in self._others.items():
            field = self.schema.fields[key]
            leaves[key] = list(parts) if field.dtype is None else join_ragged_rows(field, parts)
        return self.schema.container(leaves, self.count)

    def _make_line(self, path: str) -> Line:
        """Make the line of the manifest for the complete shard, whose files lie at a local path."""
        nbytes, digest = describe_shard(path)
        return replace(self._label, rows=self.count, nbytes=nbytes, digest=digest)

    @abstractmethod
    def save(self) -> Line:
        """Complete the shard on disk, and return its line for the manifest. After an error you may try again."""

    @abstractmethod
    def close(self) -> None:
        """Remove the files of a shard that was not saved."""


class FolderShard(Shard):
    """A shard that writes rows of tensors straight to their files, without holding them in memory."""

    def __init__(self, schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions) -> None:
        super().__init__(schema, capacity, place, label, options)
        self._make_folder()
        form, how = schema.describe_sample(1), self._folder_options(options.durable)
        self._folder = GrowingFolder(self._path, form, schema.dense, how)

    def _append_rows(self, key: Path, rows: Tensor) -> None:
        self._folder.write(key, rows, self.count * self.schema.sizes[key])

    def save(self) -> Line:
        if self.line is None:
            self._folder.commit(
                self._container({key: self._folder.truncate(key, self.count) for key in self.schema.dense})
            )
            self.line = self._make_line(self._path)
        return self.line

    def close(self) -> None:
        self._folder.close()


class MemoryShard(Shard):
    """A shard of any format that holds its rows in memory until it is saved.

    For a URL, the files are made on this machine and stay until they are uploaded. A second try uploads the same
    content, so a late arrival of the first one does no harm.
    """

    def __init__(
        self, schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions, buffers: Buffers
    ) -> None:
        super().__init__(schema, capacity, place, label, options)
        self._buffers = buffers
        self._staged: tempfile.TemporaryDirectory[str] | None = None

    def _get_buffer(self, key: Path) -> Tensor:
        if key not in self._buffers:
            field = self.schema.fields[key]
            # Pages without rows take no memory.
            self._buffers[key] = torch.empty((self.capacity, *field.shape), dtype=field.dtype, device="cpu")
        return self._buffers[key]

    def _append_rows(self, key: Path, rows: Tensor) -> None:
        self._get_buffer(key)[self.count : self.count + len(rows)] = rows.detach()

    def save(self) -> Line:
        if self.line is None:
            try:
                self.line = self._save()
            except OSError as error:
                # Some errors name only an entry.
                if error.errno is None:
                    raise SaveError(f"cannot write the shard {self._path!r}: {error}") from error
                raise OSError(error.errno, f"cannot write the shard ({error})", self._path) from error
        return self.line

    def _save(self) -> Line:
        place = self._place
        if not isinstance(place, RemoteLocation):
            self._make_folder()
            self._save_at(self._path, self._options.durable)
            return self._make_line(self._path)
        if self._staged is None:
            self._staged = tempfile.TemporaryDirectory(prefix="tensordict-upload-")
        path = f"{self._staged.name}/{os.path.basename(self._path)}"
        if not self.is_final:
            with naming_url(path, self._path):
                self._save_at(path, durable=False)
            self.is_final = True
        place.upload(self._label.path, path)
        return self._make_line(path)

    def _save_at(self, path: str, durable: bool) -> None:
        """Save the rows at a path on this machine."""
        container = self._container({key: self._get_buffer(key)[: self.count] for key in self.schema.dense})
        format, compression = self._options.format, self._options.compression
        if format in (DIRECTORY, ARCHIVE):
            plan = plan_save if format == DIRECTORY else plan_archive
            plan(container, path, self._folder_options(durable))()
            return
        # With chunks of rows, a reader can load one row without many others.
        compressed = {} if compression is None else backend_of(format).choose_compression(compression)
        saved = container.to_zarr(path, chunks="rows", overwrite=True, **compressed)
        saved._wrapped_container()._group.set_attribute(GROUP_LABEL, json.dumps(self._label.label))
        saved.close()

    def close(self) -> None:
        self._others.clear()
        if self._staged is not None:
            self._staged.cleanup()


def new_shard(
    schema: Schema, capacity: int, place: Location, label: Line, options: ShardOptions, buffers: Buffers
) -> Shard:
    """Begin the shard that the label names. `buffers` is the memory of earlier shards of this writer, for reuse."""
    if options.format == DIRECTORY and not place.is_remote:
        return FolderShard(schema, capacity, place, label, options)
    return MemoryShard(schema, capacity, place, label, options, buffers)


def add_shard(
    manifest: Log, schema: Schema, blocks: Iterable[Any], place: Location, label: Line, options: ShardOptions
) -> None:
    """Write the shard that `label` names, of blocks of rows, and add it to a manifest."""
    with contextlib.closing(new_shard(schema, label.rows, place, label, options, {})) as shard:
        for rows in blocks:
            batch = schema.take_rows(rows)
            shard.add(batch, 0, batch.count)
        manifest.add(shard.save())


def rows_per_block(schema: Schema) -> int:
    """Return the number of rows to copy or compare at once, assuming that values and ragged rows are small."""
    return max(1, min(_MOST_ROWS, _BLOCK // max(1, schema.nbytes)))


def _slice_rows(rows: Rows, start: int, stop: int) -> Rows:
    if not isinstance(rows, FlatRows):
        return rows[start:stop]
    ends = rows.sizes.prod(1).cumsum(0)
    first = int(ends[start - 1]) if start else 0
    return FlatRows(rows.flat[first : int(ends[stop - 1])], rows.sizes[start:stop])
