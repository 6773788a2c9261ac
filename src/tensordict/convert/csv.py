"""CSV as tables of Arrow, strict about rows and types.

A column is what its first cell that is not empty is: numbers, `true` and `false`, or text. Arrow reads the cells as the
types of the first rows. A file in which it finds other cells is read as bytes, which are cast to a type that is known.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from tensordict.convert.columns import paths_of
from tensordict.convert.input_files import SourceFile
from tensordict.convert.text_tables import TextTables
from tensordict.core.extras import require

# Cells without a value in columns of numbers and truth values. pandas has the same ones, and NaN, which is a number
# here.
_MISSING = ("", "NA", "N/A", "n/a", "NULL", "null", "None", "<NA>", "#N/A", "#NA")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
# The kinds of columns, from the narrowest one up, as errors call their cells.
_CALLED = {"int": "a number", "float": "a number", "bool": "true or false", "text": "text"}
# The kinds of the types of Arrow. Types of times are missing: cells that look like times stay text.
_KINDS = {"int64": "int", "uint64": "int", "double": "float", "bool": "bool", "string": "text", "null": ""}
_ENCODING = ": encoding='latin-1', or what it is, reads other encodings"
# The bytes that Arrow parses at a time, of which it reads 32 times as many ahead: a row may not be longer.
_BLOCK = 2 << 20
# The bytes whose rows tell the names of columns, unless a row is longer.
_HEAD = 1 << 15
# The bytes that are scanned at a time: they stay in the cache of a processor.
_SCANNED = 1 << 18
# Advice for errors of Arrow, by a part of their text.
_HINTS = {
    "straddl": f": a row has more than {_BLOCK >> 20} MiB; low_memory=False has pandas read the file",
    "codec can't decode": _ENCODING,
}


@dataclass(frozen=True)
class CsvOptions:
    """How a file is read: arguments of `pandas.read_csv` that keep their meaning.

    Attributes:
        names: of the columns, of a file that has no header; with `header=None` alone they are called "0", "1", ...
        na_values: cells that stand for no value.
        dtype: integers are read as numbers of this dtype at once, which may hold what int64 does not.
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
    def of(kwargs: dict[str, Any], dtype: torch.dtype | None) -> CsvOptions | None:
        """The options that keyword arguments of pandas ask for; `None` when there are others among them."""
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
    """The tables that are in some files of the same columns."""
    return TextTables(files, _CsvColumns(options), nulls)


def write_csv(file: Any, tables: Iterable[Any]) -> None:
    """Write tables of one schema to a binary file, with a header; text is in quotes, no value is an empty cell.

    Raises:
        ValueError: as `refuse_compound`; or there is one column, in which a value is missing.
    """
    csv = require("pyarrow.csv", "tabular")
    writer = None
    for table in tables:
        if writer is None:
            refuse_compound(table.schema)
            writer = csv.CSVWriter(file, table.schema)
        if table.num_columns == 1 and table.column(0).null_count:
            raise ValueError(
                f"column {table.schema.names[0]!r} lacks values, and a row of it alone is an empty line, which is no "
                "row for readers of CSV: use to_json or to_parquet, or write another column with it"
            )
        writer.write(table)
    if writer is not None:
        writer.close()


def refuse_compound(schema: Any) -> None:
    """Refuse tables with columns of more than one value a row, which have no form as a cell.

    Raises:
        ValueError: there is one; it is named.
    """
    pa = require("pyarrow", "tabular")
    kinds = pa.types
    for column in schema:
        if kinds.is_struct(column.type):
            raise ValueError(
                f"column {column.name!r} is a nested container, and CSV has one level: pass separator='.', which makes "
                f"columns like {column.name + '.' + column.type.field(0).name!r} of it"
                if column.type.num_fields
                else f"column {column.name!r} is an empty nested container, and CSV has no column for one"
            )
        if (
            kinds.is_nested(column.type)
            or kinds.is_binary(column.type)
            or isinstance(column.type, pa.BaseExtensionType)
        ):
            raise ValueError(
                f"column {column.name!r} is of {column.type}, and a cell of CSV holds one number or text: use "
                "to_parquet or to_json, or leave it out with td.exclude"
            )


class _CsvColumns:
    """What the columns of a file are, as far as it was seen, and their cells as that; see `text_tables.Columns`."""

    def __init__(self, options: CsvOptions) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.csv = require("pyarrow.csv", "tabular")
        self.options = options
        self.shown = ""
        self.row = 1
        self.names: list[str] = []
        # The kinds of columns, keys of `_CALLED`. A column without any value yet is missing here.
        self.kinds: dict[str, str] = {}

    # --- reading ------------------------------------------------------------------------------------------------

    def pieces(self, path: str, together: bool) -> Iterator[Any]:
        """The record batches of a file, of the types that its columns have in the first rows, or of bytes.

        Args:
            path: of the file.
            together: read all of it at once, by all processors.
        """
        self.row = 2 if self.options.header else 1
        with self._naming():
            head = self._head(path)
            names = head.schema.names
            if not self.options.header and not self.options.names:
                names = [str(position) for position in range(len(names))]
            paths_of(names, None)
            if self.names and names != self.names:
                raise ValueError(f"the columns are {names}, and those of the files before {self.names}")
            self.names = names
            may_break, is_odd = self._scan(path)
            as_bytes = dict.fromkeys(names, self.pa.binary())
            types = as_bytes | self._types(next(iter(head), None), is_odd)
            done = 0
            with contextlib.suppress(self.pa.ArrowInvalid):
                options = self._options(types, use_threads=together, may_break=may_break or not together)
                # The columns of a table are checked as a whole, which takes a seventh of the time.
                for part in [self.csv.read_csv(path, *options)] if together else self.csv.open_csv(path, *options):
                    if any(map(self._may_lose_digits, part.columns)):
                        break
                    yield from part.to_batches() if together else [part]
                    done += len(part)
                else:
                    return
            # Not all cells are of the types of the first rows, or Arrow refuses the file and says why.
            for batch in self.csv.open_csv(path, *self._options(as_bytes)):
                if done < len(batch):
                    yield batch[done:]
                done = max(done - len(batch), 0)

    def _head(self, path: str) -> Any:
        """Open a file; the reader takes the types of the columns from the first rows."""
        try:
            return self.csv.open_csv(path, *self._options({}, _HEAD))
        except self.pa.ArrowInvalid:  # a row longer than that, or any error
            return self.csv.open_csv(path, *self._options({}))

    def _scan(self, path: str) -> tuple[bool, bool]:
        """Look at the bytes of a file.

        Returns:
            whether lines may end in a cell, which takes a third more time; and whether there may be whole numbers that
            Arrow changes: hexadecimal ones, and codes as "007" in quotes.
        """
        quotechar, encoding = self.options.quotechar, self.options.encoding
        quote = quotechar.encode()
        if f"{quotechar}0x".encode(encoding) != quote + b"0x":
            return True, True
        code = re.compile(re.escape(quote) + rb"[+-]?0[0-9]")
        # A number may begin in one block and end in the next: each has the last bytes of the one before in front.
        buffer = bytearray(_SCANNED)
        has_quotes = is_odd = False
        with self.pa.input_stream(path) as file:
            end = 3 + file.readinto(memoryview(buffer)[3:])
            begin = buffer.find(b"\n", 0, end) + 1 if self.options.header else 0
            may_break = self.options.escapechar is not None or buffer.count(quote, 0, begin) % 2 == 1
            while end > 3:
                has_quotes = has_quotes or buffer.find(quote, begin, end) >= 0
                # Single letters first: looking for two takes ten times as long, as zeros are everywhere.
                is_odd = is_odd or any(
                    buffer.find(sign, begin, end) >= 0 and buffer.find(b"0" + sign, begin, end) >= 0
                    for sign in (b"x", b"X")
                )
                is_odd = is_odd or (has_quotes and code.search(buffer, begin, end) is not None)
                begin, buffer[:3] = 0, buffer[end - 3 : end]
                end = 3 + file.readinto(memoryview(buffer)[3:])
        return may_break or has_quotes, is_odd

    def _types(self, head: Any, is_odd: bool) -> dict[str, Any]:
        """Return the types of the columns for Arrow: known ones first, else those of the first rows."""
        pa = self.pa
        made = {"int": self._type("int"), "float": pa.float64(), "bool": pa.bool_(), "text": pa.string()}
        if is_odd:
            del made["int"]
        found = {}
        for name, column in zip(self.names, () if head is None else head.columns):
            kind = self.kinds.get(name) or _KINDS.get(str(column.type), "text")
            if kind == "text" and pa.types.is_string(column.type) and not self.kinds.get(name):
                kind = self._kind_of_first(column)
            if kind in made and not self._may_lose_digits(column):
                found[name] = made[kind]
        return found

    def _may_lose_digits(self, column: Any) -> bool:
        """Whether there are floating point numbers that Arrow may have made of whole numbers beyond int64."""
        pc = self.pc
        is_large = self.pa.types.is_floating(column.type) and pc.any(pc.greater_equal(pc.abs(column), 2.0**63)).as_py()
        return bool(is_large) and self._type("int") != self.pa.float64()

    def _options(self, types: dict[str, Any], block: int = 0, use_threads: bool = False, may_break: bool = True) -> Any:
        """The options of Arrow's readers; with `may_break`, cells in quotes may have several lines."""
        csv, options = self.csv, self.options
        # Without a header, the number of columns is known once the types are.
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
    def _naming(self) -> Iterator[None]:
        """Give errors the name of the file."""
        try:
            yield
        except (ValueError, self.pa.ArrowKeyError) as error:
            text = error.args[0] if isinstance(error, KeyError) else str(error)
            hint = next((hint for part, hint in _HINTS.items() if part in text), "")
            raise ValueError(f"{self.shown}: {text}{hint}") from error

    # --- cells --------------------------------------------------------------------------------------------------

    def look(self, batch: Any) -> Any:
        """Find out what the columns are, as far as this batch tells; the batch with its cells as that."""
        columns = [self._looked_at(name, column) for name, column in zip(self.names, batch.columns)]
        return self.pa.RecordBatch.from_arrays(columns, names=self.names)

    def table(self, batch: Any) -> Any:
        """The batch with its columns as what they are in all of the files."""
        columns = []
        for name, column in zip(self.names, batch.columns):
            kind = self.kinds.setdefault(name, "text")
            column = self._looked_at(name, column)
            columns.append(column.cast(self.pa.float64(), safe=False) if kind == "float" else column)
        return self.pa.RecordBatch.from_arrays(columns, names=self.names)

    def _looked_at(self, name: str, column: Any) -> Any:
        if not self.pa.types.is_binary(column.type):
            self.kinds[name] = self.kinds.get(name) or _KINDS[str(column.type)]
            if self.kinds[name] == "int" and self.pa.types.is_floating(column.type):
                self.kinds[name] = "float"
            return column
        cells = self._cast("text", column)
        if cells is None:
            self._refuse(name, column, "text", f"no UTF-8{_ENCODING}")
        kind = self.kinds.get(name) or self._kind_of_first(cells)
        made = self._as(kind, cells)
        if made is None and kind == "int":
            kind, made = "float", self._as("float", cells)
        if made is not None and self._may_lose_digits(made):
            values = self._values(cells)
            whole = self.pc.if_else(self.pc.match_substring_regex(values, "^-?[0-9]+$"), values, None)
            if self._cast("int", whole) is None:
                advice = "dtype=torch.float64 reads the nearest floating point number"
                self._refuse(name, whole, "int", f"beyond {self._type('int')}; {advice}")
        if made is None:
            advice = f"converters={{{name!r}: str}} reads all of the column as text"
            self._refuse(name, cells, kind, f"not {_CALLED[kind]}, as those above are; {advice}")
        if not kind:
            return column
        self.kinds[name] = kind
        return made

    def _refuse(self, name: str, cells: Any, kind: str, why: str) -> NoReturn:
        """Say why the first cell that is not of this kind cannot be read."""
        row = bisect.bisect_left(range(len(cells)), True, key=lambda row: self._as(kind, cells[: row + 1]) is None)
        shown = cells[row].as_py()
        shown = shown if kind == "int" else repr(shown)
        raise ValueError(f"{self.shown}, column {name!r}, row {self.row + row}: {shown} is {why}")

    def _kind_of_first(self, cells: Any) -> str:
        """What a column is by its first cell with a value; "" without one."""
        first = self._values(cells).drop_null()[:1]
        return next((kind for kind in _CALLED if self._as(kind, first) is not None), "") if len(first) else ""

    def _as(self, kind: str, cells: Any) -> Any:
        """The cells as values of a kind; `None` where one is something else."""
        made = self._cast(kind, cells)
        return self._cast(kind, self._values(cells)) if made is None and kind != "text" else made

    def _cast(self, kind: str, cells: Any) -> Any:
        pa, pc = self.pa, self.pc
        if kind == "":
            return cells
        if kind == "bool":
            true, false = (pc.is_in(cells, value_set=pa.array(words)) for words in (_TRUE, _FALSE))
            made = pc.if_else(pc.or_(true, false), true, None)
            return made if made.null_count == cells.null_count else None
        if kind != "text":
            # Arrow takes codes as 007 and hexadecimal numbers for numbers. The regular expression alone takes ten times
            # as long.
            is_odd = pc.or_(pc.starts_with(cells, "0"), pc.starts_with(cells, "-0"))
            odd = cells.filter(pc.and_(is_odd, pc.greater(pc.binary_length(cells), 1)))
            if pc.any(pc.match_substring_regex(odd, "^-?0[0-9xX]")).as_py():
                return None
        with contextlib.suppress(pa.ArrowInvalid):
            return cells.cast(pa.string() if kind == "text" else self._type(kind))
        return None

    def _type(self, kind: str) -> Any:
        """The type of a column of numbers."""
        pa, dtype = self.pa, self.options.dtype
        if kind == "float" or (dtype is not None and dtype.is_floating_point):
            return pa.float64()
        return pa.uint64() if dtype == torch.uint64 else pa.int64()

    def _values(self, cells: Any) -> Any:
        """Cells without spaces around them and without the sign +; null where they say that there is no value."""
        pc = self.pc
        trimmed = pc.replace_substring_regex(pc.utf8_trim_whitespace(cells), r"^\+([^+-])", r"\1")
        return pc.if_else(pc.is_in(trimmed, value_set=self.pa.array(_MISSING)), None, trimmed)
