"""What CSV and JSON have in common: files that have to be seen whole before it is known what their columns are."""

from __future__ import annotations

import os
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


class Columns(Protocol):
    """What the columns of some files are, as far as these were seen, and their rows as that.

    shown: what errors call the file that is read now.
    row: the number of the row that comes next in it, as errors tell it.
    """

    shown: str
    row: int

    def pieces(self, path: str, together: bool) -> Iterator[Any]:
        """The record batches of a local file: read one by one, or all at once where that takes less time.

        It is called for each of the files in turn, `shown` being told before.
        """

    def look(self, piece: Any) -> Any:
        """Find out what the columns are, as far as this batch tells, and give it as that."""

    def table(self, piece: Any) -> Any:
        """The record batch of one that was read or looked at, now that all columns are known."""


class TextTables:
    """The tables of Arrow that are in files whose columns have one type all through them.

    Args:
        files: one or more.
        columns: finds out what is in them.
        nulls: whether columns that become tensors may lack values.
    """

    def __init__(self, files: Sequence[SourceFile], columns: Columns, nulls: bool) -> None:
        self._files = files
        self._columns = columns
        self._nulls = nulls

    def whole(self) -> Any:
        """One table of all rows; the files are read once, and kept in memory meanwhile."""
        kept: list[tuple[str, int, Any]] = []
        with progress_bar(None, "reading", None, "row") as shown:
            for file, row, piece in self._pieces(together=True):
                kept.append((file, row, self._columns.look(piece)))
                if shown is not None:
                    shown.add(len(piece))
        return arrow.pyarrow().Table.from_batches(self._made(kept))

    def containers(self, reading: TableOptions) -> Iterator[Any]:
        """Containers of the rows, one in memory at a time, of the same entries: the files are read twice.

        With `nulls="mask"` they are read three times: what is missing is only seen when it is known what columns are.
        """
        found = False
        for _, _, piece in self._pieces():
            self._columns.look(piece)
            found = True
        if reading.nulls and found:
            reading = replace(reading, masks=arrow.masks_of(self._made(self._pieces()), reading))
        for batch in self._made(self._pieces() if found else ()):
            yield arrow.container_of_table(batch, reading)

    def _pieces(self, together: bool = False) -> Iterator[tuple[str, int, Any]]:
        """The pieces of all files, with the file and the row where each begins."""
        columns = self._columns
        for file in self._files:
            columns.shown = file.path
            with file.local() as path:
                for piece in columns.pieces(path, together):
                    row = columns.row
                    yield file.path, row, piece
                    columns.row = row + len(piece)

    def _made(self, pieces: Iterable[tuple[str, int, Any]]) -> Iterator[Any]:
        columns = self._columns
        rows = 0
        for columns.shown, columns.row, piece in pieces:
            row = columns.row
            table = columns.table(piece)
            if not self._nulls:
                _refuse_nulls(table, columns.shown, row)
            rows += len(piece)
            yield table
        if not rows:
            names = ", ".join(repr(file.path) for file in self._files[:3])
            raise ValueError(f"{names}: there are no rows, so that nobody can say what the columns hold")


def _refuse_nulls(table: Any, shown: str, row: int) -> None:
    """Refuse columns that become tensors and lack values."""
    for name, array in zip(table.schema.names, table.columns):
        found = _first_null(array, name)
        if found is not None:
            name, at, count = found
            raise ValueError(
                f"{shown}, column {name!r}, row {row + at}: there is no value ({count} of those in {len(table)} rows "
                f"read are missing): fill=0 puts a number there, nulls='mask' adds a leaf {name + '_mask'!r}"
            )


def _first_null(array: Any, name: str) -> tuple[str, int, int] | None:
    """The column inside an array that becomes a tensor and lacks values, the first row that does, and how many do."""
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
    write: Callable[[BinaryIO], None],
    check: Callable[[str], None] | None = None,
    durable: bool = False,
) -> None:
    """Write one file in one step, at a path or a URL: a reader sees the old file or the new one.

    Args:
        check: raises unless the file that is there may be replaced without `overwrite`; by default it is empty.
        durable: return when the file has reached the disk.

    Raises:
        SaveError: there is a file with content, without `overwrite`.
    """

    def save(local: PathLike) -> None:
        with FileTransaction(local, durable=durable, check=None if overwrite else check or _refuse) as transaction:
            with (
                transaction.new_file(transaction.path) as fd,
                progress_bar(None, "writing", None) as shown,
                WatchedFile(fd, shown) as file,
            ):
                write(file)
            transaction.commit()

    write_file(path, storage_options, overwrite, save)


def _refuse(path: str) -> None:
    if os.path.getsize(path):
        raise SaveError(f"there is a file at {path!r} already: pass overwrite=True to replace it")
