"""CSV as tables of Arrow: strict about rows and types, a piece of the file at a time.

A column is what its first cell that is not empty is: numbers, `true` and `false`, or text. Arrow reads the cells as
what the first rows tell, as long as it takes them for that; on all processors as long as no cell is in quotes, so that
a line is a row. From there on they are read as bytes, which takes twice the time, and converted by rules that do not
depend on where a piece ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tensordict.convert.sources import SourceFile
from tensordict.convert.text_tables import TextTables, refuse_duplicates
from tensordict.core.extras import require

if TYPE_CHECKING:
    pass

# Cells that stand for no value in columns of numbers and truth values, beside the empty one: those of pandas, except
# NaN, which is a number.
_MISSING = ("NA", "N/A", "n/a", "NULL", "null", "None", "<NA>", "#N/A", "#NA")
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_INTEGER = r"^[+-]?[0-9]+$"
_NUMBER = r"^[+-]?(?:[0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|(?i:nan|inf|infinity))$"
_TEXT = "text"
_CALLED = {"int": "a number", "float": "a number", "bool": "true or false"}
# The cells that tell what a column most likely is.
_FIRST = 256
# The bytes that are parsed at a time, of which Arrow reads 32 times as many ahead: a row may not be longer.
_BLOCK = 2 << 20
# Those that are enough for the first rows, mostly.
_HEAD = 1 << 15
# Those that all processors parse together, and those of them that each takes at a time.
_TOGETHER, _SHARE = 8 << 20, 1 << 20


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
        """Those that keyword arguments of pandas ask for; `None` when there are others among them."""
        given = dict(kwargs)
        if "delimiter" in given:
            given.setdefault("sep", given.pop("delimiter"))
        if "header" in given:
            if given["header"] not in (None, "infer", 0):
                return None
            given["header"] = given["header"] is not None
        if given.get("names") is not None:
            given["names"] = [str(name) for name in given["names"]]
            given.setdefault("header", False)
        if isinstance(given.get("na_values"), str):
            given["na_values"] = [given["na_values"]]
        known = {name: value for name, value in given.items() if name in _FROM_PANDAS and value is not None}
        lists = [known.get(name, []) for name in ("usecols", "na_values")]
        are_names = all(
            isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given) for given in lists
        )
        if len(known) < sum(value is not None for value in given.values()) or not are_names:
            return None
        one_letter = all(len(known.get(name, ",")) == 1 for name in ("sep", "quotechar", "escapechar"))
        return CsvOptions(dtype=dtype, **known) if one_letter else None


_FROM_PANDAS = ("sep", "names", "header", "usecols", "na_values", "quotechar", "escapechar", "encoding")


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


@contextlib.contextmanager
def _naming(shown: str, wrong: list[Any]) -> Iterator[None]:
    """Give errors of Arrow the name of the file, the row and the column."""
    pa = require("pyarrow", "tabular")
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown}: {_NOT_UTF8.format(error.object[error.start : error.start + 1])}") from error
    except pa.ArrowInvalid as error:
        if wrong:
            row = wrong[0]
            least = min(row.expected_columns, row.actual_columns)
            odd = "missing" if least == row.actual_columns else "too many"
            raise ValueError(
                f"{shown}, row {row.number}: {row.actual_columns} cells, where the rows above have "
                f"{row.expected_columns}; column {least + 1} is {odd}: {row.text[:80]!r}"
            ) from None
        if "straddling" in str(error):
            raise ValueError(
                f"{shown}: a row has more than {_BLOCK >> 20} MiB; low_memory=False has pandas read the file"
            ) from error
        raise ValueError(f"{shown}: {error}") from error
    except pa.ArrowKeyError as error:
        raise ValueError(f"{shown}: there is no such column: {error.args[0]}") from error


_NOT_UTF8 = "the byte {!r} is no UTF-8: encoding='latin-1', or what it is, reads other encodings"


def _has_hexadecimal(block: bytes | bytearray, begin: int = 0, end: int | None = None) -> bool:
    """Whether there may be hexadecimal integers in these bytes, of which the first may stand in those before."""
    return block[begin : begin + 1] in (b"x", b"X") or any(
        block.find(sign, begin, end) >= 0 and block.find(b"0" + sign, begin, end) >= 0 for sign in (b"x", b"X")
    )


def _behind(done: int, batches: Iterable[Any]) -> Iterator[Any]:
    """The rows of record batches, without so many first ones."""
    for batch in batches:
        if done < len(batch):
            yield batch[done:]
        done = max(done - len(batch), 0)


class _CsvColumns:
    """What the columns of a file are, as far as it was seen, and their cells as that; see `text_tables.Columns`."""

    def __init__(self, options: CsvOptions) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.shown = ""
        self.options = options
        self.row = 1
        self.kinds: dict[str, str] = {}
        self.names: list[str] = []

    def pieces(self, path: str) -> Iterator[Any]:
        """The record batches of a file, `None` where cells are empty and without quotes.

        Columns are of what they are, as far as it is known, or all of bytes from the piece on that has other cells.
        """
        options, shown = self.options, self.shown
        self.row = 2 if options.header else 1
        wrong: list[Any] = []

        opened = functools.partial(self._opened, path, wrong)
        with _naming(shown, wrong):
            try:
                names = opened(options.names, {}, _HEAD).schema.names
            except self.pa.ArrowInvalid:  # a row longer than that, or any error
                wrong.clear()
                names = opened(options.names, {}).schema.names
            given = options.names
            if not options.header and given is None:
                names = given = [str(position) for position in range(len(names))]
            refuse_duplicates(names, shown)
            if self.names and names != self.names:
                raise ValueError(f"{shown}: the columns are {names}, and those of the files before {self.names}")
            self.names = names
            as_bytes = dict.fromkeys(names, self.pa.binary())
            done = 0
            with contextlib.suppress(self.pa.ArrowInvalid):
                for batch in itertools.islice(opened(given, as_bytes, _HEAD), 1):
                    self.look(batch[:_FIRST])
                for batch in self._by_threads(path, given):
                    if batch is None:
                        break
                    yield batch
                    done += len(batch)
                else:
                    return
                for batch in _behind(done, opened(given, self._types(self._is_exact(path)))):
                    yield batch
                    done += len(batch)
                return
            wrong.clear()
            yield from _behind(done, opened(given, as_bytes))

    def _by_threads(self, path: str, given: list[str] | None) -> Iterator[Any]:
        """The record batches of a file as long as a line is a row, and `None` where it goes on with other ones."""
        csv = require("pyarrow.csv", "tabular")
        options = self._options([], given, self._types(True), _SHARE, use_threads=True)
        for block in self._lines(path):
            if block is None:
                yield None
                return
            yield from csv.read_csv(self.pa.BufferReader(block), *options).to_batches()

    def _lines(self, path: str) -> Iterator[Any]:
        """Whole lines of a file, many together, each time behind its header and in the same memory.

        `None` is given where there is a quote, in which a line may end, or what Arrow would not read exactly.
        """
        options, has_integers = self.options, "int" in self.kinds.values()
        quote = options.quotechar.encode()
        # No more than is needed, as all of it is set to zero; what is compressed may need more than that.
        buffer = bytearray(min(_TOGETHER, max(os.path.getsize(path), _SHARE)))
        view = memoryview(buffer)
        with self.pa.input_stream(path) as file:
            filled = file.readinto(view)
            first = buffer.find(b"\n", 0, filled) + 1 if options.header else 0
            is_plain = self._is_utf8() and not options.escapechar and not buffer.count(quote, 0, first) % 2
            if not is_plain or (options.header and not buffer[:first].strip()):
                yield None
                return
            more = filled
            while filled > first:
                # The last line may have no end.
                end = buffer.rfind(b"\n", first, filled) + 1 if more else filled
                is_plain = end > first and buffer.find(quote, first, end) < 0
                if not is_plain or (has_integers and _has_hexadecimal(buffer, first, end)):
                    yield None
                    return
                yield view[:end]
                view[first : first + filled - end] = view[end:filled]
                filled += first - end
                more = file.readinto(view[filled:])
                filled += more

    def _opened(
        self, path: str, wrong: list[Any], given: list[str] | None, types: dict[str, Any], block: int = 0
    ) -> Any:
        """Arrow's reader of columns of these names and types; it adds the rows that it refuses to `wrong`."""
        csv = require("pyarrow.csv", "tabular")
        return csv.open_csv(path, *self._options(wrong, given, types, block or _BLOCK))

    def _options(
        self, wrong: list[Any], given: list[str] | None, types: dict[str, Any], block: int, use_threads: bool = False
    ) -> tuple[Any, Any, Any]:
        """Those of Arrow's readers; with threads, for files in which each line is a row."""
        csv, options = require("pyarrow.csv", "tabular"), self.options

        def refuse(row: Any) -> str:
            wrong.append(row)
            return "error"

        return (
            csv.ReadOptions(
                use_threads=use_threads,
                block_size=block,
                encoding=options.encoding,
                column_names=given,
                skip_rows=1 if options.header and given else 0,
                autogenerate_column_names=not options.header and given is None,
            ),
            csv.ParseOptions(
                delimiter=options.sep,
                quote_char=options.quotechar,
                escape_char=options.escapechar or False,
                newlines_in_values=not use_threads,
                invalid_row_handler=refuse,
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

    def _is_utf8(self) -> bool:
        return self.options.encoding.lower() in ("utf-8", "utf8")

    def _is_exact(self, path: str) -> bool:
        """Whether Arrow reads the integers of a file exactly; it reads hexadecimal ones, too."""
        if not self._is_utf8() or "int" not in self.kinds.values():
            return self._is_utf8()
        with self.pa.input_stream(path) as file:
            return not any(_has_hexadecimal(block) for block in iter(lambda: file.read(_BLOCK), b""))

    def _types(self, exact: bool) -> dict[str, Any]:
        """The types that Arrow reads columns as: their own, and bytes where that is not known or would not be exact."""
        pa = self.pa
        made = {"bool": pa.bool_(), "float": pa.float64(), _TEXT: pa.string()}
        if exact:
            made["int"] = self._type("int")
        return {name: made.get(self.kinds.get(name, ""), pa.binary()) for name in self.names}

    def look(self, batch: Any) -> None:
        """Find out what the columns are, as far as this batch tells."""
        for name, column in zip(self.names, batch.columns):
            if self.pa.types.is_binary(column.type):
                self.kinds[name] = self._widened(name, column, self.kinds.get(name, ""))

    def table(self, batch: Any) -> Any:
        """The batch with its columns as what they are."""
        columns = [self._converted(name, column) for name, column in zip(self.names, batch.columns)]
        return self.pa.RecordBatch.from_arrays(columns, names=self.names)

    def _widened(self, name: str, column: Any, kind: str) -> str:
        """What a column is when it was `kind` in the batches before; "" is nothing yet."""
        pc = self.pc
        cells = self._text(name, column)
        kind = kind or self._kind(cells[:_FIRST]) or self._kind(self._values(cells).drop_null()[:1])
        # Nothing, or texts such as "NA" only, of which later rows tell.
        if kind in ("", _TEXT) or self._quick(cells, kind) is not None:
            return kind
        values = self._values(cells)
        pattern_holds = (
            pc.is_in(values, value_set=self.pa.array([*_TRUE, *_FALSE]))
            if kind == "bool"
            else pc.match_substring_regex(values, _INTEGER if kind == "int" else _NUMBER)
        )
        if kind == "int" and pc.any(pc.invert(pattern_holds)).as_py():
            kind = "float"
            pattern_holds = pc.match_substring_regex(values, _NUMBER)
        odd = pc.index(pattern_holds, self.pa.scalar(False)).as_py()
        if odd >= 0:
            self._refuse(
                name,
                odd,
                f"{cells[odd].as_py()!r} is not {_CALLED[kind]}, as those above are; converters={{{name!r}: str}} "
                "reads all of the column as text",
            )
        return kind

    def _quick(self, cells: Any, kind: str) -> Any:
        """Cells that Arrow itself takes for such numbers; `None` where a closer look is needed."""
        if kind not in ("int", "float"):
            return None
        try:
            numbers = cells.cast(self._type(kind))
        except self.pa.ArrowInvalid:
            return None
        # It reads hexadecimal integers, too.
        odd = [self.pc.any(self.pc.match_substring(cells, sign)).as_py() for sign in "xX"] if kind == "int" else []
        return None if any(odd) else numbers

    def _type(self, kind: str) -> Any:
        """The type of a column of numbers."""
        pa, dtype = self.pa, self.options.dtype
        if kind == "float" or (dtype is not None and dtype.is_floating_point):
            return pa.float64()
        return pa.uint64() if dtype == torch.uint64 else pa.int64()

    def _kind(self, cells: Any) -> str:
        """What a column of these cells is by the first of them in which there is a value; "" without one."""
        texts = ((cell.as_py() or "").strip() for cell in cells)
        first = next((text for text in texts if text and text not in _MISSING), "")
        if not first or first in (*_TRUE, *_FALSE):
            return "bool" if first else ""
        return "int" if re.match(_INTEGER, first) else "float" if re.match(_NUMBER, first) else _TEXT

    def _text(self, name: str, column: Any) -> Any:
        try:
            return column.cast(self.pa.string())
        except self.pa.ArrowInvalid:
            for row, cell in enumerate(column.to_pylist()):
                try:
                    (cell or b"").decode()
                except UnicodeDecodeError as error:
                    self._refuse(name, row, _NOT_UTF8.format(error.object[error.start : error.start + 1]))
            raise

    def _values(self, cells: Any) -> Any:
        """Cells without the space around them, and null where they say that there is no value."""
        pc = self.pc
        trimmed = pc.utf8_trim_whitespace(cells)
        missing = pc.is_in(trimmed, value_set=self.pa.array(["", *_MISSING]))
        return pc.if_else(missing, None, trimmed) if pc.any(missing).as_py() else trimmed

    def _converted(self, name: str, column: Any) -> Any:
        pa, pc = self.pa, self.pc
        kind = self.kinds[name]
        if not pa.types.is_binary(column.type):
            return (
                column.cast(pa.float64(), safe=False)
                if kind == "float" and pa.types.is_integer(column.type)
                else column
            )
        cells = self._text(name, column)
        if kind in (_TEXT, ""):
            return cells
        if (numbers := self._quick(cells, kind)) is not None:
            return numbers
        values = self._values(cells)
        if kind == "bool":
            made = pc.if_else(pc.is_valid(values), pc.is_in(values, value_set=pa.array(_TRUE)), None)
        else:
            made = self._numbers(name, kind, pc.replace_substring_regex(values, r"^\+", ""))
        return made

    def _numbers(self, name: str, kind: str, values: Any) -> Any:
        pa, wanted = self.pa, self._type(kind)
        try:
            return values.cast(wanted)
        except pa.ArrowInvalid:
            limit = range(2**64) if wanted == pa.uint64() else range(-(2**63), 2**63)
            for row, value in enumerate(values.to_pylist()):
                if value is not None and int(value) not in limit:
                    self._refuse(
                        name,
                        row,
                        f"{value} is beyond {wanted}; dtype=torch.float64 reads the nearest floating point number",
                    )
            raise

    def _refuse(self, name: str, row: int, why: str) -> NoReturn:
        raise ValueError(f"{self.shown}, column {name!r}, row {self.row + row}: {why}")
