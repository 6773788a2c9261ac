"""Convert tables (Parquet, CSV, JSON lines) to data sets and back, piece by piece; used by `tensordict convert`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from tensordict.convert.arrow import table_of
from tensordict.convert.columns import Fill, Nulls, TableOptions
from tensordict.convert.csv import CsvOptions, csv_tables, write_csv
from tensordict.convert.input_files import files_of
from tensordict.convert.json import json_tables, write_json
from tensordict.convert.parquet import batches_of_files, refuse_unreadable
from tensordict.convert.text_tables import write_text
from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require
from tensordict.datasets.importing import write_parts
from tensordict.io.formats.opening import CSV, JSON, JSON_LINES, PARQUET, TABLES, open_save
from tensordict.io.remote.remote_saves import Access, is_saved_at
from tensordict.io.remote.urls import is_url
from tensordict.io.saving.progress import has_viewer, progress_bar
from tensordict.memory.names import without_scheme
from tensordict_cli.runners.terminal import GOOD, count_text, show
from tensordict_cli.text import printable

# Limits of one piece in memory: rows of a Parquet file, bytes of a save.
_ROWS, _NBYTES = 1 << 16, 16 << 20
_SEPARATOR = "."


def kind_of(path: str) -> str:
    """Return the kind of table that the suffix of a path names; "" for any other suffix and for a folder."""
    return "" if os.path.isdir(path) else TABLES.get(os.path.splitext(path)[1].lower(), "")


def run(args: argparse.Namespace) -> int:
    """Convert from or to a table, and return 0."""
    source, target = without_scheme(args.source), without_scheme(args.target)
    with_metadata = bool(kind_of(target)) and not args.to
    fill, nulls = _parse_fill(args.fill), args.nulls
    if fill is not None and not kind_of(source):
        raise SaveError(f"--fill is for tables, but {source!r} is a save, which has all of its numbers")
    if nulls and not kind_of(source) and not with_metadata:
        raise SaveError(f"--nulls is for tables, and neither {source!r} nor {target!r} is one")
    if kind_of(source):
        parts = _read_table(source, TableOptions(separator=_SEPARATOR, nulls=nulls, fill=fill, metadata=with_metadata))
    else:
        parts = _read_save(source, args.allow_pickle)
    if not with_metadata and (args.to not in (None, "dataset") or os.path.splitext(target.rstrip("/"))[1]):
        raise SaveError(
            f"a table can be converted to a data set, which is a folder, or to another table, but {target!r} is "
            "neither: convert it to a data set first, and then convert that"
        )
    try:
        if with_metadata:
            rows = _write_table(parts, target, args.force, nulls)
        else:
            rows = write_parts(parts, target.rstrip("/"), progress=has_viewer())
    except ValueError as error:
        # The error names Python arguments. Name the options of the command line.
        text = str(error).replace("fill=0 ", "--fill 0 ").replace("nulls='mask' ", "--nulls mask ")
        raise SaveError(text) from error
    show([[(f"{printable(target)}: {count_text(rows, 'row')}", GOOD)]])
    return 0


def _parse_fill(given: list[str]) -> Fill:
    """Parse `--fill`: one number for all columns, or a dict with a number for each named column."""
    numbers = {name: _parse_number(text) for name, _, text in (each.rpartition("=") for each in given)}
    if "" not in numbers:
        return numbers or None
    if len(given) > 1:
        raise SaveError(f"--fill is one number for all columns, or COLUMN=VALUE for each, got {' and '.join(given)}")
    return numbers[""]


def _parse_number(text: str) -> float:
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        raise SaveError(f"--fill is a number, as 0, 0.5 or nan, or COLUMN=NUMBER, got {text!r}") from None


def _read_table(path: str, reading: TableOptions) -> Iterator[Any]:
    """Yield containers with some rows each."""
    kind, access = kind_of(path), Access.of(None)
    if kind == PARQUET:
        is_empty = True
        for part in batches_of_files(path, access, _ROWS, reading):
            yield part
            is_empty = False
        if is_empty:
            raise SaveError(f"{path!r}: the table has no rows, so there is nothing to write")
        return
    found, may_lack = files_of(path, access), reading.may_lack_values
    tables = (
        csv_tables(found, CsvOptions(), may_lack) if kind == CSV else json_tables(found, kind == JSON_LINES, may_lack)
    )
    try:
        yield from tables.iterate_containers(reading)
    except ValueError as error:
        # Errors about cells name the file already; errors about columns do not.
        raise error if any(file.path in str(error) for file in found) else SaveError(f"{path!r}: {error}") from error


def _read_save(path: str, allow_pickle: bool) -> Iterator[Any]:
    # Open the save again for each part: pages read from a mapped file count as memory until the map is closed.
    container = open_save(path, allow_pickle=allow_pickle)
    if not container.batch_dims:
        raise SaveError(f"{path!r} has no batch dims, but a table needs the first one as its rows")
    rows, nbytes = container.batch_size[0], container.bytes()
    step = max(1, _NBYTES * rows // max(nbytes, 1)) if nbytes else _ROWS
    with progress_bar(None, "converting", nbytes) as bar:
        for start in range(0, max(rows, 1), step):
            part = open_save(path, allow_pickle=allow_pickle)[start : start + step]
            yield part
            bar.add(part.bytes())


def _write_table(parts: Iterator[Any], target: str, overwrite: bool, nulls: Nulls) -> int:
    """Write a table and return its number of rows."""
    kind = kind_of(target)
    if not overwrite and (is_saved_at(target) if is_url(target) else os.path.lexists(target)):
        raise SaveError(f"{target!r} exists already; use --force to replace it")
    count = 0

    def tables() -> Iterator[Any]:
        nonlocal count
        first = None
        for part in parts:
            separator = _SEPARATOR if kind == CSV else None
            table = table_of(part, separator, text_categories=kind == PARQUET, nulls=nulls)
            first = table.schema if first is None else first
            if kind not in (JSON, JSON_LINES) and table.schema.metadata != first.metadata:
                raise SaveError(
                    f"{target!r}: from row {count} on, entries hold values of other types than above, and a column has "
                    "one type: convert to JSON lines, or load the save and write all of it at once"
                )
            count += table.num_rows
            yield table

    def write(file: Any) -> None:
        if kind == CSV:
            write_csv(file, tables())
        elif kind in (JSON, JSON_LINES):
            write_json(file, tables(), kind == JSON_LINES)
        else:
            _write_parquet(file, tables())

    write_text(target, overwrite, None, write)
    return count


def _write_parquet(file: Any, tables: Iterator[Any]) -> None:
    parquet = require("pyarrow.parquet", "tabular")
    first = next(tables)
    refuse_unreadable(first.schema)
    with parquet.ParquetWriter(file, first.schema) as writer:
        writer.write_table(first)
        for table in tables:
            writer.write_table(table.cast(first.schema))
