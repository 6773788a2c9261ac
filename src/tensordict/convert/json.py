"""JSON as tables of Arrow: lines with an object each, an array of objects, or one object of columns."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np

from tensordict.convert import arrow
from tensordict.convert.input_files import SourceFile
from tensordict.convert.text_tables import TextTables
from tensordict.core.extras import require
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io.values import decode

if TYPE_CHECKING:
    pass

# The rows that are written at a time, or fewer where they have more bytes.
_ROWS, _NBYTES = 1 << 15, 4 << 20
# The bytes that are read at a time, up to the end of a line.
_BLOCK = 1 << 20
_SPACE = b" \t\r\n"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
# The levels of a line that Arrow is trusted with, which recurses without a limit.
_DEEPEST = 500
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
            value = decode(json.loads(value))
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


def _lines_of(content: bytes) -> bytes | None:
    """The rows of an array of objects, one a line; `None` where that is not plain to see.

    What was replaced elsewhere than between two rows, or stood there as a line, Arrow refuses: an array with no comma
    between objects, or a text with a line break.
    """
    text = content.strip(_SPACE)
    known = (b"},\n{", b"},{", b"}, {")
    between = next((between for between in known if between in text[:_BLOCK]), known[0])
    breaks = text.count(between) if between == known[0] else 0
    is_plain = text.startswith(b"[") and text.endswith(b"]") and text.count(b"\n") == breaks
    return text[1:-1].replace(between, b"}\n{") if is_plain else None


def _rows_of(found: Any, shown: str) -> list[Any]:
    """The rows of an array of objects, or of an object of columns."""
    if isinstance(found, dict):
        rows = next((values for values in found.values() if isinstance(values, dict)), {})
        for name, values in found.items():
            if isinstance(values, dict):  # as pandas writes columns, by the name of the row
                if values.keys() != rows.keys():
                    raise ValueError(f"{shown}, column {name!r}: its rows have other names than those of other columns")
                found[name] = [values[row] for row in rows]
            elif not isinstance(values, list):
                raise ValueError(f"{shown}, column {name!r}: a column is an array, got {_word(values)}")
        lengths = {name: len(values) for name, values in found.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{shown}: the columns have different numbers of rows: {lengths}")
        found = [dict(zip(found, row)) for row in zip(*found.values())]
    if not isinstance(found, list):
        raise ValueError(f"{shown}: an array of objects, or an object of columns, is read; this is {_word(found)}")
    for row, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{shown}, row {row}: a row is an object, got {_word(record)}")
    return found


def _word(value: object) -> str:
    if value is None:
        return "null"
    return _WORDS.get(type(value), "a number")


def _depth(line: bytes) -> int:
    """How deep the brackets in a line nest."""
    letters = np.frombuffer(_STRING.sub(b"", line), np.uint8) | 0x20  # which makes braces of brackets
    return int(np.cumsum((letters == ord("{")).astype(np.int64) - (letters == ord("}"))).max(initial=0))


def _beyond_int64(value: Any) -> int | None:
    """An integer in a value that int64 does not hold."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = next((large for large in map(_beyond_int64, inner) if large is not None), None)
    return value if type(value) is int and not -(2**63) <= value < 2**63 else found


class _JsonColumns:
    """What the columns of a file are, as far as it was seen, and its rows as that; see `text_tables.Columns`."""

    def __init__(self, lines: bool) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.shown = ""
        self.row = 1
        self.lines = lines
        self.types: dict[str, Any] = {}
        # The types of columns in which Arrow would take text for times.
        self.texts = self.pa.schema([])

    def pieces(self, path: str, together: bool) -> Iterator[Any]:
        """The record batches of a file, one for about a megabyte of lines."""
        self.row = 1
        with open(path, "rb") as file:
            if self.lines:
                yield from self._batches(file)
                return
            content = file.read()
        # This takes a fifth of the time of `json`.
        if (lines := _lines_of(content)) is not None:
            with contextlib.suppress(ValueError):
                yield from list(self._batches(BytesIO(lines)))
                return
        yield from self._batches(BytesIO(self._as_lines(content)))

    def _batches(self, file: BinaryIO) -> Iterator[Any]:
        while block := file.read(_BLOCK):
            if text := (block + file.readline()).strip(_SPACE):
                yield self._read(text)

    def _as_lines(self, content: bytes) -> bytes:
        """What is an array of objects, or an object of columns, as lines of objects."""
        if not content.strip():
            raise ValueError(f"{self.shown} is empty")
        try:
            found = parse_json(content.decode("utf-8-sig"))
        except ValueError as error:
            advice = ": lines=True reads a file that has an object a line" if "Extra data" in str(error) else ""
            raise ValueError(f"{self.shown}: {error}{advice}") from None
        return "\n".join(map(json.dumps, _rows_of(found, self.shown))).encode()

    def _read(self, text: bytes) -> Any:
        """The rows in some lines; an error names the row and the column."""
        pa = self.pa
        for row, line in enumerate(text.split(b"\n"), self.row):
            if len(line) > _DEEPEST and _depth(line) > _DEEPEST:
                raise ValueError(f"{self.shown}, row {row}: it is nested too deeply")
        try:
            if not text.isascii():
                text.decode()  # Arrow does not mind what is no UTF-8
            table = self._table(text)
            if (found := self._texts_in(pa.struct(table.schema))) is not None:
                self.texts = pa.unify_schemas([self.texts, pa.schema(found)], promote_options="permissive")
                table = self._table(text)
        except (UnicodeDecodeError, pa.ArrowException) as error:
            self._explain(text, str(error))
            raise ValueError(f"{self.shown}: {error}") from error
        if not all(map(self._is_small, table.columns)):
            self._explain(text, "")
        return table.combine_chunks().to_batches()[0]

    def _table(self, text: bytes) -> Any:
        reader = require("pyarrow.json", "tabular")
        return reader.read_json(
            self.pa.BufferReader(text),
            reader.ReadOptions(use_threads=False, block_size=len(text) + 1),
            reader.ParseOptions(explicit_schema=self.texts),
        )

    def _explain(self, text: bytes, problem: str) -> None:
        """Raise for the first row that cannot be read, or has an integer that int64 does not hold.

        Args:
            text: lines of objects.
            problem: what Arrow says, which tells the column and the row where there are different types.
        """
        said = re.match(r"JSON parse error: (?:Column\(/([^/)]*).*?\) )?(.*) in row (\d+)$", problem)
        for row, line in enumerate(filter(bytes.strip, text.split(b"\n"))):
            where = f"{self.shown}, row {self.row + row}"
            try:
                record = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a line is one object of JSON, got {line[:80]!r}")
            for name, value in record.items():
                if (large := _beyond_int64(value)) is not None:
                    self._refuse(name, row, f"{large} is beyond int64")
            if said is not None and row == int(said[3]):
                if said[1] in record:
                    self._refuse_value(said[1], row, record[said[1]], f"it {said[2]}")
                raise ValueError(f"{where}: {said[2]}")

    def _refuse_value(self, name: str, row: int, value: Any, why: str) -> NoReturn:
        shown = json.dumps(value, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        self._refuse(name, row, f"{shown} does not fit the rows above: {why}")

    def _refuse(self, name: str, row: int, why: str) -> NoReturn:
        raise ValueError(f"{self.shown}, column {name!r}, row {self.row + row}: {why}")

    def _texts_in(self, kind: Any) -> Any:
        """What there is of a type with text in place of times, and nothing else; `None` without times."""
        pa = self.pa
        if pa.types.is_struct(kind):
            fields = [(field.name, self._texts_in(field.type)) for field in kind]
            fields = [field for field in fields if field[1] is not None]
            return pa.struct(fields) if fields else None
        if pa.types.is_list(kind):
            inner = self._texts_in(kind.value_type)
            return None if inner is None else pa.list_(inner)
        return pa.string() if pa.types.is_temporal(kind) else None

    def _is_small(self, array: Any) -> bool:
        """Whether no floating point number may have been an integer beyond int64, or a word that is no JSON."""
        pc, types = self.pc, self.pa.types
        if types.is_struct(array.type):
            return all(map(self._is_small, array.flatten()))
        if types.is_list(array.type):
            return self._is_small(pc.list_flatten(array))
        return not types.is_floating(array.type) or pc.all(pc.less(pc.abs(array), 2.0**63)).as_py()

    def look(self, batch: Any) -> Any:
        """Find out what the columns are, as far as these rows tell."""
        pa = self.pa
        for name, column in zip(batch.schema.names, batch.columns):
            kind = self._tight(column)
            known = self.types.get(name, pa.null())
            try:
                schemas = [pa.schema([(name, known)]), pa.schema([(name, kind)])]
                self.types[name] = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
            except pa.ArrowTypeError:
                row = column.is_valid().index(True).as_py()
                self._refuse_value(name, row, column[row].as_py(), f"they are of {known}, and it is of {kind}")
        return batch

    def table(self, batch: Any) -> Any:
        """The record batch with all columns, of the types that they have in all of the files."""
        nulls = self.pa.nulls(len(batch))
        columns = [
            (batch.column(name) if name in batch.schema.names else nulls).cast(kind, safe=False)
            for name, kind in self.types.items()
        ]
        return self.pa.RecordBatch.from_arrays(columns, schema=self.pa.schema(list(self.types.items())))

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
