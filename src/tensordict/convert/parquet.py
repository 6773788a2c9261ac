"""Reading and writing Parquet files as Arrow tables, whole or some rows at a time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from tensordict.convert import arrow
from tensordict.convert.columns import Nulls, TableOptions, paths_of
from tensordict.convert.input_files import SourceFile, files_of
from tensordict.convert.text_tables import write_text
from tensordict.core.exceptions import SaveError, UnsupportedEntryError, suggest
from tensordict.core.extras import require
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.progress import progress_bar
from tensordict.memory.mapped import PathLike

# Arrow can write files whose schema has more levels than this, but cannot read them.
_MOST_LEVELS = 100
# The number of bytes of columns that are read at a time.
_GROUP = 64 << 20


def container_of_files(path: PathLike, access: Access, options: TableOptions) -> Any:
    """Read all rows of one or more files into a container.

    Raises:
        SaveError: a file is broken, or has other columns than the first. The error names the file.
        ValueError: a requested column is missing, or a column cannot become an entry.
    """
    files = files_of(path, access)
    tables: list[Any] = []
    with progress_bar(None, "reading", len(files), "file") as shown:
        for file in files:
            with file.local() as local, _name_file_in_errors(file):
                tables.append(_read_file(local, options.columns, options.arguments))
                if len(tables) > 1:
                    _check_same(tables[0].schema, tables[-1].schema, files[0])
            shown.add(1)
    with _name_file_in_errors(files[-1]):
        return arrow.container_of_table(arrow.join_tables(tables), options)


def _check_same(first: Any, schema: Any, file: SourceFile) -> None:
    """Raise unless a file has the columns of the first one, and the same notes on them."""
    if not schema.equals(first):
        raise SaveError(
            f"its columns are {_format_schema(schema)}, but {file.path!r} has the columns {_format_schema(first)}"
        )
    if arrow.notes_of(schema) != arrow.notes_of(first):
        raise SaveError(
            f"its columns have the types of those in {file.path!r}, but stand for other dtypes or values: read the "
            "file by itself, or some rows at a time with batch_size_rows="
        )


def _format_schema(schema: Any) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _read_file(path: str, columns: Sequence[str] | None, options: Mapping[str, Any]) -> Any:
    """Read the table in one file, or in the files of a folder."""
    parquet, _ = _import_parquet()
    if os.path.isdir(path):
        return parquet.read_table(path, columns=_to_list(columns), **options)
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        _check_columns(file.schema_arrow, columns)
        if not options:
            return _read_columns(file, columns)
    if inner := [name for name in columns or () if name not in names]:
        raise ValueError(
            f"with {sorted(options)}, columns can only be read as a whole, but {inner[0]!r} is a field of one: "
            "select the whole column"
        )
    # By default, Arrow would derive columns from the names of the folders.
    return parquet.read_table(path, columns=_to_list(columns), **{"partitioning": None, **options})


def _read_columns(file: Any, columns: Sequence[str] | None) -> Any:
    """Read some columns at a time, because Arrow has several copies of a column while it reads the row groups."""
    groups = list(_group_columns(file, columns))
    if len(groups) == 1:
        return file.read(columns=groups[0])
    pa = arrow.pyarrow()
    parts = [arrow.join_tables([file.read(columns=group)]) for group in groups]
    schema = pa.schema([field for part in parts for field in part.schema], parts[0].schema.metadata)
    return pa.Table.from_arrays([column for part in parts for column in part.columns], schema=schema)


def _group_columns(file: Any, columns: Sequence[str] | None) -> Iterator[list[str] | None]:
    """Divide the columns to read into groups of about `_GROUP` bytes, in the order that Arrow returns."""
    metadata, names = file.metadata, file.schema_arrow.names
    stored = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
    nbytes = max(stored, 8 * metadata.num_rows * metadata.num_columns)
    known, fields = set(names), dict[str, list[str]]()
    # Arrow reads a column 'a.b' and a column 'a' with a field 'b' by the same name.
    if nbytes <= _GROUP or any(name[: at.start()] in known for name in names for at in re.finditer(r"\.", name)):
        yield _to_list(columns)
        return
    for name in names if columns is None else columns:
        fields.setdefault(name if name in known else name.partition(".")[0], []).append(name)
    count, parts = max(1, len(names) * _GROUP // nbytes), list(fields.values())
    for start in range(0, max(len(parts), 1), count):
        yield [name for part in parts[start : start + count] for name in part]


def batches_of_files(path: PathLike, access: Access, rows: int, options: TableOptions) -> Iterator[Any]:
    """Yield containers with `rows` rows each, one in memory at a time. The last one of a file may be shorter.

    Raises:
        ValueError: `rows` is not a positive int. Reading raises the errors of `container_of_files`.
    """
    if type(rows) is not int or rows < 1:
        raise ValueError(f"batch_size_rows is a number of rows, at least 1, got {rows!r}")
    return _iterate_containers(files_of(path, access), rows, options)


def _iterate_containers(files: Sequence[SourceFile], rows: int, options: TableOptions) -> Iterator[Any]:
    if options.nulls:
        batches = (batch for _, batch in iterate_batches(files, rows, options, nullable_only=True))
        options = replace(options, masks=arrow.masks_of(batches, options))
    for file, batch in iterate_batches(files, rows, options):
        with _name_file_in_errors(file):
            container = arrow.container_of_table(batch, options)
        yield container


def iterate_batches(
    files: Sequence[SourceFile], rows: int, options: TableOptions, nullable_only: bool = False
) -> Iterator[tuple[SourceFile, Any]]:
    """Yield record batches of `rows` rows. With `nullable_only`, read only the columns that may have nulls."""
    parquet, _ = _import_parquet()
    for file in files:
        with file.local() as local, contextlib.ExitStack() as held:
            with _name_file_in_errors(file):
                # With `pre_buffer`, Arrow would keep the whole file in memory.
                opened = held.enter_context(parquet.ParquetFile(local, pre_buffer=False))
                _check_columns(opened.schema_arrow, options.columns)
                columns = _find_nullable(opened, options.columns) if nullable_only else _to_list(options.columns)
                batches = opened.iter_batches(rows, columns=columns, **options.arguments)
            while True:
                with _name_file_in_errors(file):
                    batch = next(batches, None)
                if batch is None:
                    break
                yield file, batch


def _find_nullable(file: Any, columns: Sequence[str] | None) -> list[str]:
    """Return the columns that may have nulls: their statistics do not exclude it."""
    metadata = file.metadata
    found: set[str] = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(metadata.num_columns)):
            statistics = column.statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count:
                found.add(column.path_in_schema.partition(".")[0])
    names = file.schema_arrow.names if columns is None else columns
    return [name for name in names if name in found or name.partition(".")[0] in found]


def write(
    container: Any,
    path: PathLike,
    separator: str | None,
    nulls: Nulls,
    overwrite: bool,
    durable: bool,
    storage_options: StorageOptions | None,
    options: dict[str, Any],
) -> None:
    """Write one file in one step. Other processes see the old file or the new one.

    Raises:
        SaveError: the existing file is not a saved container, and `overwrite` is false.
        UnsupportedEntryError: an entry has no form in a table.
    """
    parquet, pa = _import_parquet()
    # Parquet keeps the codes only for categories of text or bytes.
    table = arrow.table_of(container, separator, text_categories=True, nulls=nulls)
    refuse_unreadable(table.schema)

    def save(file: BinaryIO) -> None:
        try:
            parquet.write_table(table, file, **options)
        except pa.ArrowException as error:
            raise SaveError(f"the container cannot be written to the Parquet file {path!r}: {error}") from error

    write_text(path, overwrite, storage_options, save, _refuse_other, durable)


def refuse_unreadable(schema: Any) -> None:
    """Raise if Arrow could not read a file of this schema back: rows have no elements, or a column has many levels.

    Raises:
        UnsupportedEntryError: names the column.
    """
    for field in schema:
        # The root of the schema counts as a level.
        if (levels := 1 + _count_levels(field.type, field.name)) > _MOST_LEVELS:
            raise UnsupportedEntryError(
                f"column {field.name!r} needs {levels} levels of a Parquet schema, and files with more than "
                f"{_MOST_LEVELS} cannot be read: flatten_keys() gives fewer levels"
            )


def _count_levels(kind: Any, name: str) -> int:
    """Return the levels of a column or of a field in it. Raises for rows without elements."""
    types = arrow.pyarrow().types
    if types.is_struct(kind):
        return 1 + max((_count_levels(inner.type, f"{name}.{inner.name}") for inner in kind), default=0)
    kind = getattr(kind, "storage_type", kind)
    if not arrow.is_list(kind):
        return 1
    if types.is_fixed_size_list(kind) and not kind.list_size:
        raise UnsupportedEntryError(
            f"column {name!r} has rows without elements, which Parquet cannot store: leave it out with td.exclude, or "
            "save in another format"
        )
    # A list is a group with a repeated group in it.
    return 2 + _count_levels(kind.value_type, name)


def _refuse_other(path: str) -> None:
    parquet, pa = _import_parquet()
    if not os.path.getsize(path):
        return
    try:
        metadata = parquet.read_schema(path).metadata or {}
    except (pa.ArrowException, OSError):
        metadata = {}
    if arrow.METADATA not in metadata:
        raise SaveError(
            f"the file at {path!r} is not a saved container: pass overwrite=True to replace it nevertheless, or save "
            "elsewhere"
        )


def _import_parquet() -> tuple[Any, Any]:
    return require("pyarrow.parquet", "tabular"), arrow.pyarrow()


def _to_list(columns: Sequence[str] | None) -> list[str] | None:
    return None if columns is None else list(columns)


def _check_columns(schema: Any, columns: Sequence[str] | None) -> None:
    names = schema.names
    paths_of(names, None)
    for name in columns or ():
        if name not in names and name.partition(".")[0] not in names:
            raise ValueError(f"there is no column {name!r}{suggest(name, names)}")


@contextlib.contextmanager
def _name_file_in_errors(file: SourceFile) -> Iterator[None]:
    """Add the path of the file to the errors that a block raises."""
    pa = arrow.pyarrow()
    try:
        yield
    except pa.ArrowException as error:
        raise SaveError(f"{file.path!r} cannot be read as a Parquet file: {error}") from error
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise type(error)(f"{error} (in {file.path!r})") from error
