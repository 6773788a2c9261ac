"""JSON as tables of Arrow: lines with an object each, an array of objects, or one object of columns."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from tensordict.convert import arrow
from tensordict.convert.sources import SourceFile
from tensordict.convert.text_tables import TextTables
from tensordict.core.extras import require
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io.values import restored

if TYPE_CHECKING:
    pass

# The rows that are written at a time, or fewer where they have more bytes.
_ROWS, _NBYTES = 1 << 15, 4 << 20
# The bytes that are read at a time, up to the end of a line.
_BLOCK = 1 << 20
_SPACE = b" \t\r\n"
# The brackets in a line with which Arrow, which recurses without a limit, is trusted.
_BRACKETS = 500
_WORDS = {bool: "true or false", str: "text", dict: "an object", list: "an array"}


def json_tables(files: Sequence[SourceFile], lines: bool, nulls: bool) -> TextTables:
    """The tables that are in some files of the same columns."""
    return TextTables(files, _JsonColumns(lines), nulls)


def write_json(file: BinaryIO, tables: Iterable[Any], lines: bool) -> None:
    """Write the rows of tables that `arrow.table_of` made as objects: one a line, or in one array.

    NaN, which JSON has not, becomes null; values that the tables keep as JSON are that.

    Raises:
        ValueError: a number is infinite.
        TypeError: a value has no form in JSON.
    """
    begin, between, end = (b"", b"\n", b"\n") if lines else (b"[", b",\n", b"]\n")
    wrote = False
    file.write(begin)
    for table in tables:
        writer = _Texts(table.schema)
        # So many rows are in memory as text at a time.
        step = max(1, min(_ROWS, _NBYTES * table.num_rows // max(table.nbytes, 1)))
        for batch in table.to_batches(max_chunksize=step):
            if len(batch):
                file.write(between if wrote else b"")
                file.write(writer.rows(batch, between.decode()))
                wrote = True
    if wrote or not lines:
        file.write(end)


class _Texts:
    """The rows of tables of one schema as text: Arrow joins that of their columns, row by row.

    That takes 0.1 us for a number, an object of Python for each row and cell 0.75 us.
    """

    def __init__(self, schema: Any) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.text = self.pa.large_string()
        self.as_json = {place for place, note in arrow.notes_of(schema).items() if note.get("values") == "json"}

    def rows(self, batch: Any, between: str) -> Any:
        """A buffer of the rows of a record batch, one object for each."""
        texts = self._texts((), batch.to_struct_array())
        return self._joined(texts, self.pa.array([len(texts)]), between)[0].as_buffer()

    def _texts(self, place: Path, array: Any) -> Any:
        """What stands for the values of the column at `place`, as an array of text."""
        pa, pc = self.pa, self.pc
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        kind = array.type
        if pa.types.is_struct(kind) and len(kind):
            parts: list[Any] = []
            for field, values in zip(kind, array.flatten()):
                parts += [(", " if parts else "{") + _encoder.encode(field.name) + ": "]
                parts += [self._texts((*place, field.name), values)]
            texts = self._concatenated(*parts, "}")
        elif arrow.is_list(kind):
            lengths = pc.list_value_length(array).fill_null(0)
            texts = self._concatenated("[", self._joined(self._texts(place, array.flatten()), lengths, ", "), "]")
        elif pa.types.is_floating(kind):
            texts = self._numbers(place, array.cast(pa.float64()))
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            texts = array.cast(self.text)
        elif self._is_plain_text(array) and place not in self.as_json:
            texts = self._concatenated('"', array.cast(self.text), '"')
        else:
            texts = pa.array([self._text(place, value) for value in array.to_pylist()], self.text)
        if not array.null_count:
            return texts
        return pc.if_else(array.is_valid(), texts, self._same("null"))

    def _joined(self, texts: Any, lengths: Any, between: str) -> Any:
        """One text of the first so many, one of those behind them, ..."""
        offsets = self.pa.concat_arrays([self.pa.array([0]), self.pc.cumulative_sum(lengths.cast(self.pa.int64()))])
        return self.pc.binary_join(self.pa.LargeListArray.from_arrays(offsets, texts), self._same(between))

    def _concatenated(self, *parts: Any) -> Any:
        return self.pc.binary_join_element_wise(
            *(self._same(part) if isinstance(part, str) else part for part in (*parts, ""))
        )

    def _same(self, text: str) -> Any:
        """One text for all rows."""
        return self.pa.scalar(text, self.text)

    def _numbers(self, place: Path, array: Any) -> Any:
        """Floating point numbers, which come back as such: Arrow writes 1.0 as 1, and NaN, for which there is null."""
        pc = self.pc
        texts = array.cast(self.text)
        whole = pc.equal(pc.trunc(array), array)
        if pc.any(whole).as_py():
            short = pc.and_(whole, pc.invert(pc.match_substring(texts, "e")))
            texts = pc.if_else(short, self._concatenated(texts, ".0"), texts)
        if pc.all(pc.is_finite(array)).as_py():
            return texts
        if pc.any(pc.is_inf(array)).as_py():
            raise ValueError(f"column {'.'.join(place)!r}: {_INFINITE}")
        return pc.if_else(pc.is_nan(array), self._same("null"), texts)

    def _is_plain_text(self, array: Any) -> bool:
        """Whether these are texts that stand in JSON as they are."""
        if not self.pa.types.is_string(array.type) and not self.pa.types.is_large_string(array.type):
            return False
        return not self.pc.any(self.pc.match_substring_regex(array, r'[\x00-\x1f"\\]')).as_py()

    def _text(self, place: Path, value: Any) -> str:
        if value is not None and place in self.as_json:
            value = restored(json.loads(value))
        try:
            return _encoder.encode(_without_nan(value))
        except (ValueError, TypeError) as error:
            raise type(error)(f"column {'.'.join(place)!r}: {error}") from None


def _plain(value: Any) -> str:
    if hasattr(value, "isoformat"):
        text: str = value.isoformat()
        return text
    raise TypeError(
        f"JSON has no {type(value).__name__} ({value!r}): use to_parquet, or leave the entry out with td.exclude"
    )


_INFINITE = "JSON has no infinite numbers: use to_parquet, or td.clamp first"
_encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise ValueError(_INFINITE)
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# --- reading ----------------------------------------------------------------------------------------------------------


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Whole lines, of about a megabyte together."""
    while block := file.read(_BLOCK):
        yield block + file.readline()


def _count_plain(text: bytes) -> int:
    """How many lines there are, if each is one object as far as can be seen at its ends, and nests little; else 0."""
    if not text.startswith(b"{") or not text.endswith(b"}"):
        return 0
    letters = np.frombuffer(text, np.uint8)
    opened, ends = np.flatnonzero((letters | 0x20) == ord("{")), np.flatnonzero(letters == ord("\n"))
    if (letters[ends - 1] != ord("}")).any() or (letters[ends + 1] != ord("{")).any():
        return 0
    brackets = np.diff(np.searchsorted(opened, ends), prepend=0, append=len(opened))
    return len(brackets) if brackets.max() <= _BRACKETS else 0


def _parsed(line: bytes, shown: str, row: int) -> dict[str, Any]:
    found = _loads(line, f"{shown}, row {row}")
    if not isinstance(found, dict):
        raise ValueError(f"{shown}, row {row}: a line is one object of JSON, got {line[:80]!r}")
    return found


def _loads(content: bytes, where: str) -> Any:
    try:
        return parse_json(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: the byte {content[error.start : error.start + 1]!r} is no UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lines_of(content: bytes) -> bytes | None:
    """The rows of an array of objects, one a line; `None` where that is not plain to see.

    What was replaced elsewhere than between two rows, or stood there as a line, Arrow refuses: an array with no comma
    between objects, or a text with a line break.
    """
    text = content.strip(_SPACE)
    if not text.startswith(b"[") or not text.endswith(b"]"):
        return None
    known = (b"},\n{", b"},{", b"}, {")
    between = next((between for between in known if between in text[:_BLOCK]), known[0])
    breaks = text.count(between) if between == known[0] else 0
    return text[1:-1].replace(between, b"}\n{") if text.count(b"\n") == breaks else None


def _records(content: bytes, shown: str) -> list[dict[str, Any]]:
    """The rows of an array of objects, or an object of columns."""
    if not content.strip():
        raise ValueError(f"{shown} is empty")
    try:
        found = _loads(content, shown)
    except ValueError as error:
        if "Extra data" in str(error):
            raise ValueError(f"{error}: lines=True reads a file that has an object a line") from None
        raise
    if isinstance(found, dict):
        found = _rows_of_columns(found, shown)
    if not isinstance(found, list):
        raise ValueError(f"{shown}: an array of objects, or an object of columns, is read; this is {_word(found)}")
    for row, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{shown}, row {row}: a row is an object, got {_word(record)}")
    return found


def _rows_of_columns(columns: dict[str, Any], shown: str) -> list[dict[str, Any]]:
    lengths: dict[str, int] = {}
    rows: list[str] | None = None
    for name, values in columns.items():
        if isinstance(values, dict):  # as pandas writes columns, by the name of the row
            rows = list(values) if rows is None else rows
            if values.keys() != set(rows):
                raise ValueError(f"{shown}, column {name!r}: its rows have other names than those of other columns")
            values = columns[name] = [values[row] for row in rows]
        if not isinstance(values, list):
            raise ValueError(f"{shown}, column {name!r}: a column is an array, got {_word(values)}")
        lengths[name] = len(values)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{shown}: the columns have different numbers of rows: {lengths}")
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def _word(value: object) -> str:
    if value is None:
        return "null"
    return _WORDS.get(type(value), "a number")


class _JsonColumns:
    """What the columns of a file are, as far as it was seen, and its rows as that; see `text_tables.Columns`.

    A piece is a record batch where Arrow reads exactly what is there, which takes a fifth of the time, and else a list
    of the objects that `json` reads.
    """

    def __init__(self, lines: bool) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.shown = ""
        self.row = 1
        self.lines = lines
        self.types: dict[str, Any] = {}
        # Of columns in which Arrow would take text for times.
        self.texts: dict[str, Any] = {}

    def pieces(self, path: str) -> Iterator[Any]:
        """The rows of a file, some at a time; all at once where it is no lines."""
        self.row = 1
        with open(path, "rb") as file:
            if not self.lines:
                yield from self._pieces_of_array(file.read())
                return
            for block in _blocks(file):
                piece = self._by_arrow(block)
                if piece is None:
                    lines = (line for line in block.split(b"\n") if line and not line.isspace())
                    piece = [_parsed(line, self.shown, row) for row, line in enumerate(lines, self.row)]
                if len(piece):
                    yield piece

    def _pieces_of_array(self, content: bytes) -> list[Any]:
        lines = _lines_of(content)
        pieces = [] if lines is None else [self._by_arrow(block) for block in _blocks(BytesIO(lines))]
        return pieces if pieces and None not in pieces else [_records(content, self.shown)]

    def _by_arrow(self, block: bytes) -> Any:
        """The rows in some lines; `None` where Arrow would say something else than what is there, or refuses it."""
        text = block.rstrip(_SPACE)
        # Arrow minds neither the ends of lines, nor what is no UTF-8.
        count = _count_plain(text) if text.isascii() or _is_utf8(text) else 0
        if not count:
            return None
        try:
            table = self._table(text)
            texts = {field.name: self._without_times(field.type) for field in table.schema}
            texts = {name: kind for name, kind in texts.items() if kind != table.schema.field(name).type}
            if texts:
                self.texts |= texts
                table = self._table(text).select(table.schema.names)
        except self.pa.ArrowException:
            return None
        if len(table) != count or not all(map(self._is_exact, table.columns)):
            return None
        return table.combine_chunks().to_batches()[0]

    def _table(self, text: bytes) -> Any:
        reader = require("pyarrow.json", "tabular")
        schema = self.pa.schema(list(self.texts.items()))
        return reader.read_json(
            self.pa.BufferReader(text),
            reader.ReadOptions(use_threads=False, block_size=len(text) + 1),
            reader.ParseOptions(explicit_schema=schema),
        )

    def _without_times(self, kind: Any) -> Any:
        """A type with text in place of times."""
        pa = self.pa
        if pa.types.is_struct(kind):
            return pa.struct([(field.name, self._without_times(field.type)) for field in kind])
        if pa.types.is_list(kind):
            return pa.list_(self._without_times(kind.value_type))
        return pa.string() if pa.types.is_temporal(kind) else kind

    def _is_exact(self, array: Any) -> bool:
        """Whether no floating point number may have been an integer beyond int64, or a word that is no JSON."""
        pc, types = self.pc, self.pa.types
        if types.is_struct(array.type):
            return all(map(self._is_exact, array.flatten()))
        if types.is_list(array.type):
            return self._is_exact(pc.list_flatten(array))
        return not types.is_floating(array.type) or pc.all(pc.less(pc.abs(array), 2.0**63)).as_py()

    def look(self, piece: Any) -> None:
        """Find out what the columns are, as far as these rows tell."""
        are_objects = isinstance(piece, list)
        for name in dict.fromkeys(itertools.chain.from_iterable(piece)) if are_objects else piece.schema.names:
            known = self.types.get(name, self.pa.null())
            try:
                array = self.pa.array(self._values(name, piece)) if are_objects else piece.column(name)
                self.types[name] = self._merged(known, self._tight(array))
            except (self.pa.ArrowException, OverflowError, TypeError, ValueError):
                self.types[name] = self._one_by_one(name, self._values(name, piece), known)

    def table(self, piece: Any) -> Any:
        """The record batch of these rows."""
        columns = [self._array(name, piece, type) for name, type in self.types.items()]
        return self.pa.RecordBatch.from_arrays(columns, schema=self.pa.schema(list(self.types.items())))

    def _values(self, name: str, piece: Any) -> list[Any]:
        """The objects in a column."""
        if isinstance(piece, list):
            return [record.get(name) for record in piece]
        return piece.column(name).to_pylist() if name in piece.schema.names else [None] * len(piece)

    def _array(self, name: str, piece: Any, type: Any) -> Any:
        with contextlib.suppress(self.pa.ArrowInvalid, self.pa.ArrowNotImplementedError):
            if not isinstance(piece, list) and name in piece.schema.names:
                return piece.column(name).cast(type)
        values = self._values(name, piece)
        try:
            return self.pa.array(values, type=type)
        except self.pa.ArrowInvalid:
            # Integers among floating point numbers that these cannot hold exactly: the nearest ones.
            return self.pa.array([_rounded(value, self.pa.types, type) for value in values], type=type)

    def _one_by_one(self, name: str, values: list[Any], known: Any) -> Any:
        """The type of values that Arrow cannot take together; says which of them does not fit those before it."""
        for position, value in enumerate(values):
            try:
                known = self._merged(known, self._tight(self.pa.array([value])))
            except (self.pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                self._refuse(name, self.row + position, value, known, error)
        return known

    def _refuse(self, name: str, row: int, value: Any, known: Any, error: Exception) -> NoReturn:
        where = f"{self.shown}, column {name!r}, row {row}"
        if isinstance(error, OverflowError):
            raise ValueError(f"{where}: {value} is beyond int64") from None
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise ValueError(f"{where}: {shown} does not fit the rows above, which are of {known} ({error})") from None

    def _tight(self, array: Any) -> Any:
        """The type of an array, with lists that all have one length as lists of that length."""
        pa, types = self.pa, self.pa.types
        kind = array.type
        if types.is_struct(kind):
            return pa.struct([(field.name, self._tight(array.field(i))) for i, field in enumerate(kind)])
        if not types.is_list(kind):
            return kind
        lengths = array.value_lengths().unique().to_pylist()
        inner = self._tight(array.flatten())
        return pa.list_(inner, lengths[0]) if len(lengths) == 1 and lengths[0] else pa.list_(inner)

    def _merged(self, one: Any, other: Any) -> Any:
        """The type that holds what both hold."""
        pa, types = self.pa, self.pa.types
        if one == other or types.is_null(other):
            return one
        if types.is_null(one):
            return other
        if {one, other} == {pa.int64(), pa.float64()}:
            return pa.float64()
        if types.is_struct(one) and types.is_struct(other):
            fields = {field.name: field.type for field in one}
            for field in other:
                fields[field.name] = self._merged(fields.get(field.name, pa.null()), field.type)
            return pa.struct(list(fields.items()))
        if arrow.is_list(one) and arrow.is_list(other):
            inner = self._merged(one.value_type, other.value_type)
            sizes = {kind.list_size if types.is_fixed_size_list(kind) else -1 for kind in (one, other)}
            return pa.list_(inner, *(sizes if len(sizes) == 1 else {-1}))
        raise TypeError(f"it is of {other}")


def _rounded(value: Any, types: Any, type: Any) -> Any:
    """A value with floating point numbers where the type has them."""
    if value is None:
        return None
    if types.is_struct(type):
        return {field.name: _rounded(value.get(field.name), types, field.type) for field in type}
    if arrow.is_list(type):
        return [_rounded(inner, types, type.value_type) for inner in value]
    return float(value) if types.is_floating(type) else value
