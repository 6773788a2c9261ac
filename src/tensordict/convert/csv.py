"""Reading and writing CSV as Arrow tables, with strict checks of rows and types.

The first non-empty cell of a column decides its kind: numbers, `true` and `false`, or text. Arrow parses the file with
the types of the first rows. If other cells follow, the file is read as bytes, and each column is cast to its kind.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from tensordict.convert.columns import paths_of
from tensordict.convert.input_files import SourceFile
from tensordict.convert.text_tables import TextTables
from tensordict.core.extras import require

# Cells that count as missing in columns of numbers and bools. pandas has the same, and NaN, which is a number here.
_MISSING = ("", "NA", "N/A", "n/a", "NULL", "null", "None", "<NA>", "#N/A", "#NA")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
# The kinds of columns, from the narrowest to the widest, with the description of their cells in errors.
_KIND_NAMES = {"int": "a number", "float": "a number", "bool": "true or false", "text": "text"}
# Rows that are looked at before a whole column is.
_FEW = 1000
# Larger whole numbers are written with an exponent.
_EXACT = 1e15
# The kind for each Arrow type. Time types are missing, because cells that look like times stay text.
_KINDS = {"int64": "int", "uint64": "int", "double": "float", "bool": "bool", "string": "text", "null": ""}
_ENCODING = ": pass the encoding of the file, such as encoding='latin-1'"
# The number of bytes that Arrow parses at a time. It reads up to 32 such blocks ahead. A row may not be longer.
_BLOCK = 2 << 20
# The number of bytes that are parsed for the names of the columns, unless a row is longer.
_HEAD = 1 << 15
# The number of bytes that are scanned at a time. They fit into the cache of a processor.
_SCANNED = 1 << 18
# Advice for errors of Arrow, by a part of their text.
_HINTS = {
    "straddl": f": a row has more than {_BLOCK >> 20} MiB; low_memory=False has pandas read the file",
    "codec can't decode": _ENCODING,
}


@dataclass(frozen=True)
class CsvOptions:
    """Options for reading a file, with the names and the meaning of arguments of `pandas.read_csv`.

    Attributes:
        names: the names of the columns, for a file without header. With `header=None` alone they are "0", "1", ...
        na_values: cells that count as missing.
        dtype: read integers as this dtype directly, as it may hold integers beyond int64.
    """

    sep: str = ","
    names: list[str] | None = None
    header: bool = True
    usecols: list[str] | None = None
    na_values: list[str] = field(default_factory=list)
    quotechar: str = '"'
    escapechar: str | None = None
    encoding: str = "utf-8"
    dtype: torch.dtype | None = None

    @staticmethod
    def of(kwargs: Mapping[str, Any], dtype: torch.dtype | None) -> CsvOptions | None:
        """Convert keyword arguments of pandas to options. Returns `None` if one of them has no counterpart."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        given.setdefault("sep", given.pop("delimiter", ","))
        has_header = kwargs.get("header", None if "names" in given else 0) in ("infer", 0)
        lists = {name: given.get(name, []) for name in ("usecols", "na_values")}
        if isinstance(lists["na_values"], str):
            given["na_values"] = lists["na_values"] = [lists["na_values"]]
        is_known = (
            given.pop("header", 0) in ("infer", 0)
            and given.keys() <= {"sep", "names", "usecols", "na_values", "quotechar", "escapechar", "encoding"}
            and all(len(given.get(name, ",")) == 1 for name in ("sep", "quotechar", "escapechar"))
            and all(isinstance(names, (list, tuple)) for names in lists.values())
            and all(isinstance(name, str) for names in lists.values() for name in names)
        )
        if "names" in given:
            given["names"] = [str(name) for name in given["names"]]
        return CsvOptions(header=has_header, dtype=dtype, **given) if is_known else None


def csv_tables(files: Sequence[SourceFile], options: CsvOptions, nulls: bool) -> TextTables:
    """Return the tables in some files with the same columns."""
    return TextTables(files, _CsvReader(options), nulls)


def write_csv(file: Any, tables: Iterable[Any]) -> None:
    """Write tables of one schema to a binary file, with a header. Text is quoted, and a null is an empty cell.

    Raises:
        ValueError: a column is compound, see `refuse_compound`; or the only column has nulls.
    """
    arrow = require("pyarrow.csv", "tabular")
    for number, table in enumerate(tables):
        if number == 0:
            refuse_compound(table.schema)
            header = io.StringIO()
            csv.writer(header, lineterminator="\n").writerow(table.schema.names)
            file.write(header.getvalue().encode())
        if table.num_columns == 1 and table.column(0).null_count:
            raise ValueError(
                f"column {table.schema.names[0]!r} lacks values and is the only one: its missing cells would be an "
                "empty line, which readers of CSV skip. Use to_json or to_parquet, or write another column with it"
            )
        arrow.write_csv(_mark_floats(table), file, arrow.WriteOptions(include_header=False))


def _mark_floats(table: Any) -> Any:
    """Convert floating point columns of whole numbers to decimals, which are written as `1.0`.

    Arrow writes floating point numbers as `1`, and a column of these would be read as integers.
    """
    pa = require("pyarrow", "tabular")
    for at, kind in enumerate(table.schema.types):
        if not pa.types.is_floating(kind):
            continue
        column = table.column(at)
        # NumPy sees a null as NaN.
        first = column[:_FEW].to_numpy()
        if not ((first == np.floor(first)) | np.isnan(first)).all():
            continue
        pc = require("pyarrow.compute", "tabular")
        values = column.cast(pa.float64())
        is_whole = pc.and_(pc.equal(pc.floor(values), values), pc.less(pc.abs(values), _EXACT))
        if not pc.all(is_whole, min_count=0).as_py():
            continue
        cells = values.cast(pa.decimal128(38, 1))
        numbers = values.to_numpy()
        if (negative := (numbers == 0) & np.signbit(numbers)).any():
            # A decimal has no negative zero. Text is quoted, which readers of numbers ignore.
            cells = pc.if_else(pa.array(negative), "-0.0", cells.cast(pa.string()).combine_chunks())
        table = table.set_column(at, table.schema.names[at], cells)
    return table


def refuse_compound(schema: Any) -> None:
    """Raise if a column has more than one value per row, which does not fit into a cell.

    Raises:
        ValueError: names the column.
    """
    pa = require("pyarrow", "tabular")
    types = pa.types
    for column in schema:
        name, kind = column.name, column.type
        if types.is_struct(kind):
            raise ValueError(
                f"column {name!r} is a nested container, and CSV has one level: pass separator='.', which makes "
                f"columns like {name + '.' + kind.field(0).name!r} of it"
                if kind.num_fields
                else f"column {name!r} is an empty nested container, and CSV has no column for one"
            )
        if types.is_nested(kind) or types.is_binary(kind) or isinstance(kind, pa.BaseExtensionType):
            raise ValueError(
                f"column {name!r} is of {kind}, and a cell of CSV holds one number or text: use to_parquet or to_json, "
                "or leave it out with td.exclude"
            )


class _CsvReader:
    """Reads CSV files, and infers the kinds of their columns; see `text_tables.TextReader`."""

    def __init__(self, options: CsvOptions) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.csv = require("pyarrow.csv", "tabular")
        self.options = options
        self.source = ""
        self.row = 1
        self.names: list[str] = []
        # The kind of each column, a key of `_KIND_NAMES`. Columns without any value so far are missing.
        self.kinds: dict[str, str] = {}

    # --- reading ------------------------------------------------------------------------------------------------

    def read_batches(self, path: str, at_once: bool) -> Iterator[Any]:
        """Yield the record batches of a file, with the types of its first rows, or as bytes.

        Args:
            path: the path of the file.
            at_once: read the whole file at once, on all processors.
        """
        self.row = 2 if self.options.header else 1
        with self._name_file_in_errors():
            head = self._open_with_inferred_types(path)
            names = head.schema.names
            if not self.options.header and not self.options.names:
                names = [str(position) for position in range(len(names))]
            paths_of(names, None)
            if self.names and names != self.names:
                raise ValueError(f"the columns are {names}, but the files before have {self.names}")
            self.names = names
            may_break, is_odd = self._scan(path)
            as_bytes = dict.fromkeys(names, self.pa.binary())
            types = as_bytes | self._choose_types(next(iter(head), None), is_odd)
            done = 0
            with contextlib.suppress(self.pa.ArrowInvalid):
                options = self._make_options(types, use_threads=at_once, may_break=may_break or not at_once)
                # Checking whole columns of a table takes a seventh of the time of checking batches.
                for part in [self.csv.read_csv(path, *options)] if at_once else self.csv.open_csv(path, *options):
                    if any(map(self._may_lose_digits, part.columns)):
                        break
                    yield from part.to_batches() if at_once else [part]
                    done += len(part)
                else:
                    return
            # Some cells do not have the types of the first rows. If the file is malformed, Arrow raises below.
            for batch in self.csv.open_csv(path, *self._make_options(as_bytes)):
                if done < len(batch):
                    yield batch[done:]
                done = max(done - len(batch), 0)

    def _open_with_inferred_types(self, path: str) -> Any:
        """Open a file. The reader infers the types of the columns from the first rows."""
        try:
            return self.csv.open_csv(path, *self._make_options({}, _HEAD))
        except self.pa.ArrowInvalid:  # A row is longer than the block, or the file is malformed.
            return self.csv.open_csv(path, *self._make_options({}))

    def _scan(self, path: str) -> tuple[bool, bool]:
        """Scan the bytes of a file for features that need special options.

        Returns:
            true if cells may contain line breaks, which makes parsing a third slower; and true if the file may contain
            text that Arrow would convert to integers: hexadecimal numbers, and codes such as "007" in quotes.
        """
        quotechar, encoding = self.options.quotechar, self.options.encoding
        quote = quotechar.encode()
        if f"{quotechar}0x".encode(encoding) != quote + b"0x":
            return True, True
        code = re.compile(re.escape(quote) + rb"[+-]?0[0-9]")
        # A number may extend over two blocks, so each block starts with the last 3 bytes of the one before.
        buffer = bytearray(_SCANNED)
        has_quotes = is_odd = False
        with self.pa.input_stream(path) as file:
            end = 3 + file.readinto(memoryview(buffer)[3:])
            begin = buffer.find(b"\n", 0, end) + 1 if self.options.header else 0
            may_break = self.options.escapechar is not None or buffer.count(quote, 0, begin) % 2 == 1
            while end > 3:
                has_quotes = has_quotes or buffer.find(quote, begin, end) >= 0
                # Looks for the letter first. Searching for two characters takes ten times as long, as zeros abound.
                is_odd = is_odd or any(
                    buffer.find(sign, begin, end) >= 0 and buffer.find(b"0" + sign, begin, end) >= 0
                    for sign in (b"x", b"X")
                )
                is_odd = is_odd or (has_quotes and code.search(buffer, begin, end) is not None)
                begin, buffer[:3] = 0, buffer[end - 3 : end]
                end = 3 + file.readinto(memoryview(buffer)[3:])
        return may_break or has_quotes, is_odd

    def _choose_types(self, head: Any, is_odd: bool) -> dict[str, Any]:
        """Choose the Arrow types of the columns: the known kinds, otherwise the types of the first rows."""
        pa = self.pa
        made = {"int": self._number_type("int"), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
        if is_odd:
            del made["int"]
        found = {}
        for name, column in zip(self.names, () if head is None else head.columns):
            kind = self.kinds.get(name) or _KINDS.get(str(column.type), "text")
            if kind == "text" and pa.types.is_string(column.type) and not self.kinds.get(name):
                kind = self._find_kind(column)
            if kind in made and not self._may_lose_digits(column):
                found[name] = made[kind]
        return found

    def _may_lose_digits(self, column: Any) -> bool:
        """Return whether a column has floats that Arrow may have converted from integers beyond int64."""
        pc = self.pc
        is_large = self.pa.types.is_floating(column.type) and pc.any(pc.greater_equal(pc.abs(column), 2.0**63)).as_py()
        return bool(is_large) and self._number_type("int") != self.pa.float64()

    def _make_options(
        self, types: dict[str, Any], block: int = 0, use_threads: bool = False, may_break: bool = True
    ) -> Any:
        """Make the options of Arrow's readers. With `may_break`, quoted cells may contain line breaks."""
        csv, options = self.csv, self.options
        # Without a header, `types` tells the number of columns.
        given = options.names or (list(types) or None if not options.header else None)
        return (
            csv.ReadOptions(
                use_threads=use_threads,
                block_size=block or _BLOCK,
                encoding=options.encoding,
                column_names=given,
                skip_rows=1 if options.header and given else 0,
                autogenerate_column_names=not options.header and given is None,
            ),
            csv.ParseOptions(
                delimiter=options.sep,
                quote_char=options.quotechar,
                escape_char=options.escapechar or False,
                newlines_in_values=may_break,
            ),
            csv.ConvertOptions(
                column_types=types,
                include_columns=options.usecols,
                null_values=["", *options.na_values],
                true_values=_TRUE,
                false_values=_FALSE,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    @contextlib.contextmanager
    def _name_file_in_errors(self) -> Iterator[None]:
        """Add the name of the file to errors."""
        try:
            yield
        except (ValueError, self.pa.ArrowKeyError) as error:
            text = error.args[0] if isinstance(error, KeyError) else str(error)
            hint = next((hint for part, hint in _HINTS.items() if part in text), "")
            raise ValueError(f"{self.source}: {text}{hint}") from error

    # --- cells --------------------------------------------------------------------------------------------------

    def infer(self, batch: Any) -> Any:
        """Update the kinds of the columns from a batch, and return the batch with its cells converted."""
        columns = [self._infer_column(name, column) for name, column in zip(self.names, batch.columns)]
        return self.pa.RecordBatch.from_arrays(columns, names=self.names)

    def convert(self, batch: Any) -> Any:
        """Convert a batch to the final types of its columns."""
        columns = []
        for name, column in zip(self.names, batch.columns):
            kind = self.kinds.setdefault(name, "text")
            column = self._infer_column(name, column)
            columns.append(column.cast(self.pa.float64(), safe=False) if kind == "float" else column)
        return self.pa.RecordBatch.from_arrays(columns, names=self.names)

    def _infer_column(self, name: str, column: Any) -> Any:
        if not self.pa.types.is_binary(column.type):
            self.kinds[name] = self.kinds.get(name) or _KINDS[str(column.type)]
            if self.kinds[name] == "int" and self.pa.types.is_floating(column.type):
                self.kinds[name] = "float"
            return column
        cells = self._try_cast("text", column)
        if cells is None:
            self._refuse(name, column, "text", f"not valid UTF-8{_ENCODING}")
        kind = self.kinds.get(name) or self._find_kind(cells)
        made = self._convert_cells(kind, cells)
        if made is None and kind == "int":
            kind, made = "float", self._convert_cells("float", cells)
        if made is not None and self._may_lose_digits(made):
            values = self._clean_cells(cells)
            whole = self.pc.if_else(self.pc.match_substring_regex(values, "^-?[0-9]+$"), values, None)
            if self._try_cast("int", whole) is None:
                advice = "dtype=torch.float64 reads the nearest floating point number"
                self._refuse(name, whole, "int", f"beyond {self._number_type('int')}; {advice}")
        if made is None:
            advice = f"converters={{{name!r}: str}} reads the whole column as text"
            self._refuse(name, cells, kind, f"not {_KIND_NAMES[kind]}, unlike the cells above; {advice}")
        if not kind:
            return column
        self.kinds[name] = kind
        return made

    def _refuse(self, name: str, cells: Any, kind: str, why: str) -> NoReturn:
        """Raise an error about the first cell that is not of this kind."""
        row = bisect.bisect_left(
            range(len(cells)), True, key=lambda row: self._convert_cells(kind, cells[: row + 1]) is None
        )
        shown = cells[row].as_py()
        shown = shown if kind == "int" else repr(shown)
        raise ValueError(f"{self.source}, column {name!r}, row {self.row + row}: {shown} is {why}")

    def _find_kind(self, cells: Any) -> str:
        """Return the kind of the first cell with a value; "" if all are missing."""
        first = self._clean_cells(cells).drop_null()[:1]
        kinds = _KIND_NAMES if len(first) else ()
        return next((kind for kind in kinds if self._convert_cells(kind, first) is not None), "")

    def _convert_cells(self, kind: str, cells: Any) -> Any:
        """Convert cells to values of a kind; return `None` if a cell is not of this kind."""
        made = self._try_cast(kind, cells)
        return self._try_cast(kind, self._clean_cells(cells)) if made is None and kind != "text" else made

    def _try_cast(self, kind: str, cells: Any) -> Any:
        pa, pc = self.pa, self.pc
        if kind == "":
            return cells
        if kind == "bool":
            true, false = (pc.is_in(cells, value_set=pa.array(words)) for words in (_TRUE, _FALSE))
            made = pc.if_else(pc.or_(true, false), true, None)
            return made if made.null_count == cells.null_count else None
        if kind != "text":
            # Arrow would convert codes such as 007 and hexadecimal numbers to numbers. Filtering the cells first is ten
            # times as fast as matching all of them.
            is_odd = pc.or_(pc.starts_with(cells, "0"), pc.starts_with(cells, "-0"))
            odd = cells.filter(pc.and_(is_odd, pc.greater(pc.binary_length(cells), 1)))
            if pc.any(pc.match_substring_regex(odd, "^-?0[0-9xX]")).as_py():
                return None
        with contextlib.suppress(pa.ArrowInvalid):
            return cells.cast(pa.string() if kind == "text" else self._number_type(kind))
        return None

    def _number_type(self, kind: str) -> Any:
        """Return the Arrow type of a column of numbers."""
        pa, dtype = self.pa, self.options.dtype
        if kind == "float" or (dtype is not None and dtype.is_floating_point):
            return pa.float64()
        return pa.uint64() if dtype == torch.uint64 else pa.int64()

    def _clean_cells(self, cells: Any) -> Any:
        """Remove surrounding spaces and a leading + from cells, and replace missing ones by null."""
        pc = self.pc
        trimmed = pc.replace_substring_regex(pc.utf8_trim_whitespace(cells), r"^\+([^+-])", r"\1")
        return pc.if_else(pc.is_in(trimmed, value_set=self.pa.array(_MISSING)), None, trimmed)
