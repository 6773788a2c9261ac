"""`DatasetWriter`: adds rows to a data set, next to any number of other writers."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tensordict.core.exceptions import SaveError, SchemaError, add_note
from tensordict.core.keys import Path, path_of
from tensordict.core.locks import Lock
from tensordict.datasets.index import Manifests
from tensordict.datasets.lines import Line, new_id
from tensordict.datasets.location import Location, Log
from tensordict.datasets.manifest import new_manifest, put_schema, read_schema_file
from tensordict.datasets.schema import Batch, Schema
from tensordict.datasets.shards import Buffers, Shard, ShardOptions, new_shard
from tensordict.io.formats.archive import Compression
from tensordict.io.formats.opening import ARCHIVE, DIRECTORY, FORMATS
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.progress import NO_BAR, Progress
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import SCHEMA

if TYPE_CHECKING:
    from typing_extensions import Self

# The bytes of a shard if the user does not choose the number of rows.
_SHARD = 128 << 20
# The formats of shards, by the argument `format`. They can hold everything that a row can have.
_FORMATS = {"folder": DIRECTORY, **{name: name for name in (ARCHIVE, "zarr") if name in FORMATS}}

# Writers that are not closed. They are abandoned when the interpreter exits, while everything they need still exists.
_open: weakref.WeakSet[DatasetWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for writer in list(_open):
        writer.__del__()


class DatasetWriter:
    """Adds rows to a data set: a folder of shards that :func:`open_dataset` reads as one container.

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

    Readers see rows after `flush` or `close`. A writer that is killed, or never closed, loses only the rows that it has
    not flushed. The first flushed rows fix the schema: keys, dtypes, shapes and classes. Any number of writers may add
    to a data set at once, in threads, processes or nodes that share the path. Each writes shards of its own, without
    locks.

    Args:
        path: the folder of the data set, or its URL; made with the first rows.
        rows_per_shard: the rows of a shard, unless `flush` ends it earlier; by default as many as have 128 MiB.
        format: the format of the shards. "folder" (the default on disks) writes rows straight to the files of their
            tensors, and needs no memory. "archive" (the default at URLs; one file for each shard, with checksums) and
            "zarr" keep the rows of one shard in memory, and so does "folder" at a URL.
        durable: sync rows to the disk before they are committed, and before `flush` returns; for folders and archives.
            The store of a URL decides by itself how safe its objects are.
        checksum: for folders, record checksums for `verify`: `True` for CRC-32, or "sha256", "blake2b".
        compression: the compression, for formats that compress.
        num_threads: the number of threads that write a shard from memory.
        ragged: keys of entries whose rows differ in their first dim. Nested tensors, and entries that differ in the
            first batch, are recognized without this.
        progress: show a bar of the bytes that were added (needs tqdm).
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Attributes:
        rows: the number of rows that were added.
        flushed: the number of rows that readers see.
        writer: the id of the writer, which names its files.

    Raises:
        ValueError: the format is unknown, or lacks an option.
        SaveError: `path` is a folder or URL of something else, or cannot be reached.

    A forked process must make its own writer: using this one there raises a `ValueError`.
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
        # `place.root` hides the secrets of a URL in messages.
        self.path = self._place.root if self._place.is_remote else os.fspath(path)
        self._options = choose_shard_options(self._place, format, durable, checksum, compression, num_threads)
        self._rows_per_shard = rows_per_shard
        self._ragged: tuple[Path, ...] = tuple(path_of(key) for key in ragged)
        self.writer = new_id()
        self.rows = self.flushed = 0
        self._schema = read_schema(self._place)
        self._fixed = self._schema is not None
        self._manifest: Log | None = None
        self._shard: Shard | None = None
        self._buffers: Buffers = {}
        # The number of shards that were begun, which is the name of the next one.
        self._begun = 0
        self._lock = Lock()
        self._progress = Progress("writing", None) if progress else NO_BAR
        self._closed, self._process = False, os.getpid()
        _open.add(self)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def append(self, row: Any) -> None:
        """Add one row.

        Args:
            row: a container with the batch size of a row (often `[]`).

        Raises:
            SchemaError, OSError: as `extend`.
        """
        self.extend(row.unsqueeze(0))

    def extend(self, batch: Any) -> None:
        """Add a copy of many rows.

        Args:
            batch: a container of any kind, on any device, with rows along its first batch dim. It may have ragged
                leaves, nested containers, tensorclasses and values that JSON can hold (strings, numbers, lists, dicts),
                or be a lazy stack of rows of different shapes.

        Raises:
            SchemaError: the rows do not fit, and none was added; the error names the key, shapes and dtypes.
            UnsupportedEntryError: an entry has no rows, or JSON cannot hold a value; no row was added.
            OSError: a file cannot be written; `rows` tells how many rows were added before.
        """
        with self._lock.held:
            self._check_open()
            schema = self._schema
            if schema is None:
                schema = Schema(batch, self._ragged)
            taken = schema.take_rows(batch)
            self._schema = schema
            before = self.rows
            try:
                self._add_rows(schema, taken)
            except OSError as error:
                add_note(error, f"{self.rows - before} of {taken.count} rows were taken before")
                raise

    def _add_rows(self, schema: Schema, batch: Batch) -> None:
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
        if self._progress.is_shown:
            self._progress.add(batch.count * schema.nbytes)

    def _begin(self, schema: Schema) -> Shard:
        row = schema.nbytes
        capacity = self._rows_per_shard or (max(1, _SHARD // row) if row else 1 << 16)
        if not self._place.is_remote:
            # Make the manifest first, because beginning a shard may make files.
            self._open_manifest(schema)
        label = Line(self._options.shard_path(self.writer, self._begun))
        # Never use a number twice: a shard that failed to begin may have left files.
        self._begun += 1
        return new_shard(schema, capacity, self._place, label, self._options, self._buffers)

    def _open_manifest(self, schema: Schema) -> Log:
        if self._manifest is None:
            made = new_manifest(self._place, self.writer, schema.json, self._options.durable)
            # `add_column` waits for open manifests, but not for writers without one.
            if self._fixed and read_schema_file(self._place) != schema.json:
                made.close()
                raise SchemaError(
                    f"the rows of {self._place.root!r} have a new entry since this writer was made: make another writer"
                )
            self._manifest = made
        return self._manifest

    # --- committing ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Make all rows visible to readers that open or `refresh` the data set; with `durable`, sync them to the disk.

        The next row begins a new shard. `tensordict compact` merges small shards.

        Raises:
            SchemaError: another writer has fixed another schema meanwhile.
            OSError: a file cannot be written; the writer keeps the rows, and you may flush again.
        """
        with self._lock.held:
            self._check_open()
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
        # The line may arrive even if adding it fails, so the shard must not change any more.
        shard.is_final = True
        manifest.add(line)
        self.flushed += shard.count
        self._shard = None
        shard.close()

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush, and release all files. A second call does nothing, and neither does a call in a forked process.

        Raises:
            OSError: as `flush`; the writer is closed all the same, and rows that were not flushed are lost.
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

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the writer of {self.path!r} is closed: make another writer, whose rows follow these")
        if self._process != os.getpid():
            raise ValueError(
                f"the writer of {self.path!r} belongs to the process {self._process}: make another one in this process"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The files belong to the parent process, so a forked child leaves them alone.
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


def choose_shard_options(
    place: Location, format: str | None, durable: bool, checksum: bool | str, compression: str | None, num_threads: int
) -> ShardOptions:
    """Check the options of a user, and return the options for saving shards.

    Raises:
        ValueError: the format is unknown, or lacks an option.
    """
    # By default a shard at a URL is a single object; a local shard needs no memory.
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
    """Return the schema of a data set; `None` if it has no flushed rows yet.

    Raises:
        SaveError: the file is broken and no manifest has the schema, or the place belongs to something else.

    Warns:
        UserWarning: the file is broken or missing, and the schema comes from a manifest.
    """
    found, problem = find_schema(place)
    if problem:
        warnings.warn(problem, stacklevel=2)
    return found


def find_schema(place: Location) -> tuple[Schema | None, str]:
    """Do the same as `read_schema`, but return the warning beside the schema; it is empty if the file is sound.

    Raises:
        SaveError: as `read_schema`.
    """
    is_there = True
    try:
        return Schema.from_json(read_schema_file(place)), ""
    except FileNotFoundError:
        is_there, problem = False, f"{place.path(SCHEMA)!r} is missing"
        if others := place.list_foreign_names():
            raise SaveError(
                f"{place.root!r} holds something else, such as {others[0]!r}: choose an empty or new place"
            ) from None
    except SaveError as error:
        problem = str(error)
    index = Manifests(place)
    index.read()
    for manifest in index.manifests.values():
        if manifest.lines:
            if not is_there:
                # A writer makes the file before its first line, so the file may have appeared since.
                with contextlib.suppress(FileNotFoundError):
                    return Schema.from_json(read_schema_file(place)), ""
            return Schema.from_json(manifest.schema), f"{problem}; the schema is read from a manifest"
    if is_there:
        raise SaveError(f"{problem}, and no manifest with a shard has the schema")
    return None, ""


def require_schema(place: Location) -> Schema:
    """Return the schema of a data set that exists.

    Raises:
        FileNotFoundError: the data set does not exist, or has no flushed rows yet.
        SaveError: as `read_schema`.
    """
    found = read_schema(place)
    if found is None:
        what = f"there is no data set here, or nobody has flushed a row: {SCHEMA} is missing"
        raise FileNotFoundError(errno.ENOENT, what, str(place.root))
    return found


def fix_schema(place: Location, schema: Schema, durable: bool) -> None:
    """Store the schema of the data set. If another writer was first, check that its schema is the same.

    Raises:
        SchemaError: the schemas differ; the error names the entry.
        OSError: the file cannot be written.
    """
    put_schema(place, schema.json, durable)
    # Read it back: a store without conditions keeps the last of several objects that are put at the same moment.
    found = read_schema_file(place)
    if found != schema.json:
        Schema.from_json(found).refuse_other(schema, "what was written here")
