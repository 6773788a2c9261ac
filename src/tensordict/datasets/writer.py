"""Writing a data set, by one of any number of writers."""

from __future__ import annotations

import atexit
import errno
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict.core.exceptions import SaveError, add_note
from tensordict.core.keys import Path, path_of
from tensordict.core.locks import Lock
from tensordict.datasets.index import Manifests
from tensordict.datasets.lines import SHARDS, Line, new_id
from tensordict.datasets.location import Location, Log
from tensordict.datasets.manifest import new_manifest, put_schema, read_schema_file
from tensordict.datasets.schema import Batch, Schema
from tensordict.datasets.shards import Buffers, Shard, ShardOptions, new_shard
from tensordict.io.formats.archive import Compression
from tensordict.io.formats.opening import ARCHIVE, DIRECTORY, FORMATS
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.progress import Progress
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import SCHEMA

if TYPE_CHECKING:
    from typing_extensions import Self

# What a shard has when nobody says how many rows, in bytes.
_SHARD = 128 << 20
# What shards are saved as: the formats that hold whatever a row can have.
_FORMATS = {"folder": DIRECTORY, **{name: name for name in (ARCHIVE, "zarr") if name in FORMATS}}

# Those that are not closed: when the interpreter ends, they are given up while it is still whole.
_open: weakref.WeakSet[DatasetWriter] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    for writer in list(_open):
        writer.__del__()


class DatasetWriter:
    """Adds rows to a data set: a folder of shards that :func:`open_dataset` reads as one container.

    Any number of writers, in threads, processes or nodes that share the path and nothing else, add to a data set at
    once: each writes shards of its own, and needs no lock. Rows are seen by readers once they were flushed. A writer
    that is killed, or never closed, loses what it had not flushed, and nothing else. The first rows that are flushed
    fix what every row is: keys, dtypes, shapes and classes.

    Args:
        path: the folder of the data set, or its URL, which is made with the first rows.
        rows_per_shard: the rows of a shard, except those that `flush` ends; by default as many as have 128 MiB.
        format: of the shards. "folder" (the default on disks) writes rows straight to the files of their tensors, and
            needs no memory; "archive" (the default at URLs; one file a shard, always with checksums) and "zarr"
            keep the rows of one shard in memory, and so does "folder" at a URL.
        durable: have rows reach the disk before they count, and `flush` return only then; for folders and archives.
            What is at a URL is as safe as its store is, in any case.
        checksum: of folders: record checksums for `verify`: `True` for CRC-32, or "sha256", "blake2b".
        compression: of formats that compress.
        num_threads: the number of threads that write a shard which is in memory.
        ragged: keys of entries whose rows differ in their first dim; those that are nested tensors, or differ in the
            first rows that are written, need not be told.
        progress: show a bar of the bytes that were taken (needs tqdm).
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Attributes:
        rows: how many rows it has taken.
        flushed: how many of them readers see.
        writer: its id, which names its files.

    Raises:
        ValueError: there is no such format, or it has no such option.
        SaveError: `path` is a folder or URL of something else, or cannot be reached.

    A process that is forked makes a writer of its own: this one is a `ValueError` there.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import DatasetWriter, TensorDict, open_dataset
        >>> folder = tempfile.TemporaryDirectory()
        >>> with DatasetWriter(folder.name + "/data", rows_per_shard=4) as writer:
        ...     writer.extend(TensorDict({"x": torch.arange(10)}, [10]))
        ...     writer.append(TensorDict({"x": torch.tensor(10)}, []))
        >>> data = open_dataset(folder.name + "/data")
        >>> len(data), data[8:]["x"]
        (11, tensor([ 8,  9, 10]))
    """

    def __init__(
        self,
        path: PathLike,
        *,
        rows_per_shard: int | None = None,
        format: str | None = None,
        durable: bool = False,
        checksum: bool | str = False,
        compression: str | None = None,
        num_threads: int = 0,
        ragged: Sequence[object] = (),
        progress: bool = False,
        storage_options: StorageOptions | None = None,
    ) -> None:
        if rows_per_shard is not None and rows_per_shard < 1:
            raise ValueError(f"a shard has one row or more, got rows_per_shard={rows_per_shard}")
        self._place = Location.of(path, Access(storage_options))
        # The URL of a place hides its secrets where it is shown.
        self.path = self._place.root if self._place.is_remote else os.fspath(path)
        self._options = shard_options(self._place, format, durable, checksum, compression, num_threads)
        self._rows_per_shard = rows_per_shard
        self._ragged: tuple[Path, ...] = tuple(path_of(key) for key in ragged)
        self.writer = new_id()
        self.rows = self.flushed = 0
        self._schema = read_schema(self._place)
        self._fixed = self._schema is not None
        self._manifest: Log | None = None
        self._shard: Shard | None = None
        self._buffers: Buffers = {}
        # How many shards were begun, which is what they are called after.
        self._begun = 0
        self._lock = Lock()
        self._progress = Progress("writing", None) if progress else None
        self._closed, self._process = False, os.getpid()
        _open.add(self)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def append(self, row: Any) -> None:
        """Add one row.

        Args:
            row: a container whose batch size is that of a row (often `[]`).

        Raises:
            SchemaError, OSError: as `extend`.
        """
        self.extend(row.unsqueeze(0))

    def extend(self, batch: Any) -> None:
        """Add many rows, which are copied.

        Args:
            batch: a container of rows along its first batch dim: of any kind, on any device. Ragged leaves, lazy stacks
                of rows of different shapes, nested containers, tensorclasses and values that JSON can hold (strings,
                numbers, lists, dicts) are rows, too.

        Raises:
            SchemaError: the rows do not fit; the key, shapes and dtypes are named, and nothing was added.
            UnsupportedEntryError: an entry has no rows, or a value has no form in JSON; likewise.
            OSError: a file cannot be written; `rows` says how many rows were taken all the same.
        """
        with self._lock.held:
            self._refuse_closed()
            schema = self._schema
            if schema is None:
                schema = Schema(batch, self._ragged)
            taken = schema.taken(batch)
            self._schema = schema
            before = self.rows
            try:
                self._take(schema, taken)
            except OSError as error:
                add_note(error, f"{self.rows - before} of {taken.count} rows were taken before")
                raise

    def _take(self, schema: Schema, batch: Batch) -> None:
        done = 0
        while done < batch.count:
            shard = self._shard
            if shard is not None and (shard.is_final or shard.count >= shard.capacity or shard.nbytes >= _SHARD):
                self._commit(shard)
                shard = None
            if shard is None:
                shard = self._shard = self._begin(schema)
            stop = min(batch.count, done + shard.capacity - shard.count)
            shard.add(batch, done, stop)
            self.rows += stop - done
            done = stop
        if self._progress is not None:
            self._progress.add(batch.count * schema.nbytes)

    def _begin(self, schema: Schema) -> Shard:
        row = schema.nbytes
        capacity = self._rows_per_shard or (max(1, _SHARD // row) if row else 1 << 16)
        if not self._place.is_remote:
            # The shard may have files at once, and its manifest comes first.
            self._open_manifest(schema)
        label = Line(f"{SHARDS}/{self.writer}/{self._begun:08}{self._options.suffix}")
        # A number is never used twice: a shard that could not be begun may have left something.
        self._begun += 1
        return new_shard(schema, capacity, self._place, label, self._options, self._buffers)

    def _open_manifest(self, schema: Schema) -> Log:
        if self._manifest is None:
            self._manifest = new_manifest(self._place, self.writer, schema.json, self._options.durable)
        return self._manifest

    # --- making them count --------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make all rows visible to readers that open or `refresh` the data set; with `durable`, and safe.

        The next row begins a new shard: small ones are merged by `tensordict compact`.

        Raises:
            SchemaError: another writer has fixed another schema meanwhile.
            OSError: a file cannot be written; the rows are kept, and flushing may be tried again.
        """
        with self._lock.held:
            self._refuse_closed()
            self._flush()

    def _flush(self) -> None:
        if self._shard is not None and self._shard.count:
            self._commit(self._shard)

    def _commit(self, shard: Shard) -> None:
        if not self._fixed:
            fix_schema(self._place, shard.schema, self._options.durable)
            self._fixed = True
        manifest = self._open_manifest(shard.schema)
        line = shard.save()
        # The line may arrive though adding it fails: the shard must stay what it says.
        shard.is_final = True
        manifest.add(line)
        self.flushed += shard.count
        self._shard = None
        shard.close()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and end: no more rows are taken. May be called again, and does nothing in a process that was forked.

        Raises:
            OSError: as `flush`; the writer is closed then, too, and what was not flushed is gone.
        """
        if self._process != os.getpid():
            return
        with self._lock.held:
            if self._closed:
                return
            self._closed = True
            try:
                self._flush()
            finally:
                self._release()

    def _release(self) -> None:
        self._buffers = {}
        parts = (self._progress, self._shard, self._manifest)
        self._shard = None
        for part in parts:
            if part is not None:
                part.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise ValueError(f"the writer of {self.path!r} is closed: make another one, which goes on behind its rows")
        if self._process != os.getpid():
            raise ValueError(
                f"the writer of {self.path!r} is that of the process {self._process}: make one in this one"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Not in a forked child, whose files these are not.
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            self._give_up()

    def _give_up(self) -> None:
        lost = self.rows - self.flushed
        self._closed = True
        self._release()
        if lost:
            text = f"the writer of {self.path!r} was not closed, and {lost:,} rows are lost: use it in a with block"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "closed, " if self._closed else ""
        return f"{type(self).__name__}({self.path!r}, {state}{self.rows:,} rows, {self.flushed:,} flushed)"


def shard_options(
    place: Location, format: str | None, durable: bool, checksum: bool | str, compression: str | None, num_threads: int
) -> ShardOptions:
    """How shards are saved, once that is known to be possible.

    Raises:
        ValueError: there is no such format, or it has no such option.
    """
    # One object each at a URL, and else what needs no memory.
    format = format or (ARCHIVE if place.is_remote else "folder")
    found = _FORMATS.get(format)
    if found is None:
        raise ValueError(f"the format of shards is one of {list(_FORMATS)}, got {format!r}")
    if durable and found not in (DIRECTORY, ARCHIVE):
        raise ValueError(f"durable=True is for the formats 'folder' and 'archive', got {format!r}")
    if compression is not None and found == DIRECTORY:
        raise ValueError("a folder is not compressed: format='archive' can be")
    if checksum and found != DIRECTORY:
        has = "always has CRC-32 checksums" if found == ARCHIVE else "has no checksums"
        raise ValueError(f"the format {format!r} {has}: checksum= is for format='folder'")
    if found == ARCHIVE:
        Compression.of(compression)
    algorithm = "crc32" if checksum is True else checksum or ""
    return ShardOptions(found, durable, algorithm, compression, num_threads)


# --- the schema -------------------------------------------------------------------------------------------------------


def read_schema(place: Location) -> Schema | None:
    """Return the schema of a data set; `None` while nobody has flushed a row.

    Raises:
        SaveError: the file is broken and no manifest tells the schema, or something else is there.

    Warns:
        UserWarning: the file is broken or missing, and the schema comes from a manifest.
    """
    found, problem = find_schema(place)
    if problem:
        warnings.warn(problem, stacklevel=2)
    return found


def find_schema(place: Location) -> tuple[Schema | None, str]:
    """Return what `read_schema` returns, and what is wrong with the file, for the caller to report.

    Raises:
        SaveError: as `read_schema`.
    """
    path, is_there = place.path(SCHEMA), True
    try:
        return Schema.from_json(read_schema_file(place)), ""
    except FileNotFoundError:
        is_there, problem = False, f"{path!r} is missing"
        if others := place.strangers():
            raise SaveError(
                f"{place.root!r} is of something else, with {others[0]!r}: no data set is made in it"
            ) from None
    except SaveError as error:
        problem = str(error)
    index = Manifests(place)
    index.read()
    for manifest in index.manifests.values():
        if manifest.lines:
            return Schema.from_json(manifest.schema), f"{problem}; the schema is read from a manifest"
    if is_there:
        raise SaveError(f"{problem}, and no manifest with a shard tells the schema")
    return None, ""


def schema_there(place: Location) -> Schema:
    """Return the schema of a data set that exists.

    Raises:
        FileNotFoundError: there is none, or nobody has flushed a row.
        SaveError: as `read_schema`.
    """
    found = read_schema(place)
    if found is None:
        what = f"there is no data set here, or nobody has flushed a row: {SCHEMA} is missing"
        raise FileNotFoundError(errno.ENOENT, what, str(place.root))
    return found


def fix_schema(place: Location, schema: Schema, durable: bool) -> None:
    """Make the schema that of the data set, unless another writer was first: then it must be the same.

    Raises:
        SchemaError: it is another one; names the entry.
        OSError: it cannot be written.
    """
    put_schema(place, schema.json, durable)
    # A URL without conditions keeps the last of several objects that are put at the same moment.
    Schema.from_json(read_schema_file(place)).refuse_other(schema, "what was written here")
