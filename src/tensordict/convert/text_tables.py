"""The shared part of the CSV and JSON readers, which infer the types of columns from all rows of all files."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO, Protocol

from tensordict.convert import arrow
from tensordict.convert.columns import TableOptions
from tensordict.convert.input_files import SourceFile
from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require
from tensordict.io.remote.uploads import write_file
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.progress import WatchedFile, progress_bar
from tensordict.io.saving.transaction import FileTransaction
from tensordict.memory.mapped import PathLike

# The number of bytes of rows that are copied at a time.
_BLOCK = 16 << 20


class TextReader(Protocol):
    """A reader of one format, which infers the types of the columns while it reads.

    source: the name of the current file, for errors.
    row: the number of its next row, for errors.
    """

    source: str
    row: int

    def read_batches(self, path: str, at_once: bool) -> Iterator[Any]:
        """Yield the record batches of a local file. With `at_once`, the reader may read the whole file first.

        The caller sets `source` before, and calls it for the files one after the other.
        """

    def infer(self, piece: Any) -> Any:
        """Update the types of the columns from a batch, and return the batch converted to them."""

    def convert(self, piece: Any) -> Any:
        """Convert a batch to the final types of the columns, once all batches have been looked at."""


class TextTables:
    """The rows of some files as Arrow tables, in which each column has one type in all files.

    Args:
        files: one or more files.
        reader: the reader of their format.
        nulls: allow nulls in columns that become tensors.
    """

    def __init__(self, files: Sequence[SourceFile], reader: TextReader, nulls: bool) -> None:
        self._files = files
        self._reader = reader
        self._nulls = nulls

    def read_table(self) -> Any:
        """Return one table of all rows. The files are read once, and kept in memory meanwhile.

        Raises:
            ValueError: the rows have no columns.
        """
        kept: deque[tuple[str, int, Any]] = deque()
        with progress_bar(None, "reading", None, "row") as shown:
            for file, row, piece in self._read_batches(at_once=True):
                kept.append((file, row, self._reader.infer(piece)))
                shown.add(len(piece))
        # Each batch is released when its block has been made, and each column of the blocks when it has been joined.
        batches = self._convert(kept.popleft() for _ in range(len(kept)))
        table = arrow.join_tables(list(_join_blocks(batches)))
        if not table.num_columns:
            raise ValueError("the rows have no columns, so there is nothing to make entries of")
        return table

    def iterate_containers(self, reading: TableOptions) -> Iterator[Any]:
        """Yield containers with the same entries, one in memory at a time. This reads the files twice.

        With `nulls="mask"` it reads them three times, because nulls can only be found once the types are known.
        """
        found = False
        for _, _, piece in self._read_batches():
            self._reader.infer(piece)
            found = True
        if reading.nulls and found:
            reading = replace(reading, masks=arrow.masks_of(self._convert(self._read_batches()), reading))
        for batch in self._convert(self._read_batches() if found else ()):
            yield arrow.container_of_table(batch, reading)

    def _read_batches(self, at_once: bool = False) -> Iterator[tuple[str, int, Any]]:
        """Yield the batches of all files, each with its file and the number of its first row."""
        reader = self._reader
        for file in self._files:
            reader.source = file.path
            with file.local() as path:
                for piece in reader.read_batches(path, at_once):
                    row = reader.row
                    yield file.path, row, piece
                    reader.row = row + len(piece)

    def _convert(self, pieces: Iterable[tuple[str, int, Any]]) -> Iterator[Any]:
        reader = self._reader
        rows = 0
        for reader.source, reader.row, piece in pieces:
            row = reader.row
            table = reader.convert(piece)
            if not self._nulls:
                _refuse_nulls(table, reader.source, row)
            rows += len(piece)
            yield table
        if not rows:
            names = ", ".join(repr(file.path) for file in self._files[:3])
            raise ValueError(f"{names}: there are no rows, so the types of the columns are unknown")


def _join_blocks(batches: Iterable[Any]) -> Iterator[Any]:
    """Join consecutive batches of the same schema to tables of about `_BLOCK` bytes, with one chunk for each column."""
    table = arrow.pyarrow().Table
    block: list[Any] = []
    nbytes = 0
    for batch in batches:
        block.append(batch)
        nbytes += batch.nbytes
        if nbytes >= _BLOCK:
            yield table.from_batches(block).combine_chunks()
            block, nbytes = [], 0
    if block:
        yield table.from_batches(block).combine_chunks()


def _refuse_nulls(table: Any, shown: str, row: int) -> None:
    """Raise if a column that becomes a tensor has nulls."""
    for name, array in zip(table.schema.names, table.columns):
        found = _first_null(array, name)
        if found is not None:
            name, at, count = found
            raise ValueError(
                f"{shown}, column {name!r}, row {row + at}: there is no value ({count} values in {len(table)} rows "
                f"are missing): fill=0 replaces them by a number, nulls='mask' adds a leaf {name + '_mask'!r}"
            )


def _first_null(array: Any, name: str) -> tuple[str, int, int] | None:
    """Find nulls in an array, or in a field of it, that becomes a tensor.

    Returns the name of the column or field, its first row with a null, and the number of nulls; otherwise `None`.
    """
    types, inner = arrow.pyarrow().types, array.type
    if not array.null_count and not types.is_nested(inner):
        return None
    if types.is_struct(inner):
        fields = zip(inner, array.flatten())
        return next(filter(None, (_first_null(part, f"{name}.{field.name}") for field, part in fields)), None)
    while arrow.is_list(inner):
        inner = inner.value_type
    if types.is_string(inner) or types.is_null(inner) or types.is_struct(inner):
        return None
    if array.null_count:
        return name, array.is_null().index(True).as_py(), array.null_count
    if array.type == inner:
        return None
    found = _first_null(array.flatten(), name)
    parents = require("pyarrow.compute", "tabular").list_parent_indices
    return None if found is None else (name, parents(array)[found[1]].as_py(), found[2])


def write_text(
    path: PathLike,
    overwrite: bool,
    storage_options: StorageOptions | None,
    write: Callable[[BinaryIO], object],
    check: Callable[[str], None] | None = None,
    durable: bool = False,
) -> None:
    """Write one file in one step, at a path or a URL. Other processes see the old file or the new one.

    Args:
        check: raises unless an existing file may be replaced without `overwrite`. By default it must be empty.
        durable: return when the file has reached the disk.

    Raises:
        SaveError: the existing file has content, and `overwrite` is false.
    """

    def save(local: PathLike) -> None:
        with FileTransaction(
            local, durable=durable, check=None if overwrite else check or _refuse_nonempty_file
        ) as transaction:
            with (
                transaction.new_file(transaction.path) as fd,
                progress_bar(None, "writing", None) as shown,
                WatchedFile(fd, shown) as file,
            ):
                write(file)
            transaction.commit()

    write_file(path, storage_options, overwrite, save)


def _refuse_nonempty_file(path: str) -> None:
    """Raise if the file at `path` is not empty."""
    if os.path.getsize(path):
        raise SaveError(f"there is a file at {path!r} already: pass overwrite=True to replace it")
