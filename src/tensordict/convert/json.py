"""Reading and writing JSON as Arrow tables: one object per line, an array of objects, or an object of columns."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from typing import Any, BinaryIO, NoReturn

import numpy as np

from tensordict.convert import arrow
from tensordict.convert.input_files import SourceFile
from tensordict.convert.text_tables import TextTables
from tensordict.core.extras import require
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io.values import decode

# The maximal numbers of rows and bytes that are written at a time.
_ROWS, _NBYTES = 1 << 15, 4 << 20
# The number of bytes that are read at a time, extended to the end of a line.
_BLOCK = 1 << 20
_SPACE = b" \t\r\n"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
# The maximal nesting depth of a line. Arrow's parser recurses without a limit and would overflow the stack.
_DEEPEST = 500
_WORDS = {bool: "true or false", str: "text", dict: "an object", list: "an array"}


def json_tables(files: Sequence[SourceFile], lines: bool, nulls: bool) -> TextTables:
    """Return the tables in some files with the same columns."""
    return TextTables(files, _JsonReader(lines), nulls)


def write_json(file: BinaryIO, tables: Iterable[Any], lines: bool) -> None:
    """Write the rows of tables of `arrow.table_of` as objects: one per line, or in one array.

    NaN becomes null, because JSON has no NaN. Values that the tables contain as JSON text are written as such.

    Raises:
        ValueError: a number is infinite.
        TypeError: JSON cannot represent a value.
    """
    begin, between, end = (b"", b"\n", b"\n") if lines else (b"[", b",\n", b"]\n")
    wrote = False
    file.write(begin)
    for table in tables:
        writer = _JsonWriter(table.schema)
        # Limits the rows that are in memory as text at a time.
        step = max(1, min(_ROWS, _NBYTES * table.num_rows // max(table.nbytes, 1)))
        for batch in table.to_batches(max_chunksize=step):
            if len(batch):
                file.write(between if wrote else b"")
                file.write(writer.format_rows(batch, between.decode()))
                wrote = True
    if wrote or not lines:
        file.write(end)


class _JsonWriter:
    """Converts the rows of tables of one schema to text with Arrow functions, column by column.

    This takes 0.1 us per number. Python objects for each row and cell would take 0.75 us.
    """

    def __init__(self, schema: Any) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.text = self.pa.large_string()
        self.as_json = {place for place, note in arrow.notes_of(schema).items() if note.get("values") == "json"}

    def format_rows(self, batch: Any, between: str) -> Any:
        """Return a buffer with the rows of a record batch, one JSON object for each row."""
        texts = self._to_texts((), batch.to_struct_array())
        return self._join_runs(texts, self.pa.array([len(texts)]), between)[0].as_buffer()

    def _to_texts(self, place: Path, array: Any) -> Any:
        """Convert the values of the column at `place` to an array of JSON texts."""
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
                parts += [self._to_texts((*place, field.name), values)]
            texts = self._concatenate(*parts, "}")
        elif arrow.is_list(kind):
            lengths = pc.list_value_length(array).fill_null(0)
            texts = self._concatenate("[", self._join_runs(self._to_texts(place, array.flatten()), lengths, ", "), "]")
        elif pa.types.is_floating(kind):
            texts = self._format_floats(place, array.cast(pa.float64()))
        elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
            texts = array.cast(self.text)
        elif self._is_plain_text(array) and place not in self.as_json:
            texts = self._concatenate('"', array.cast(self.text), '"')
        else:
            texts = pa.array([self._format_value(place, value) for value in array.to_pylist()], self.text)
        if not array.null_count:
            return texts
        return pc.if_else(array.is_valid(), texts, self._repeat("null"))

    def _join_runs(self, texts: Any, lengths: Any, between: str) -> Any:
        """Join consecutive runs of texts; `lengths` gives the number of texts in each run."""
        offsets = self.pa.concat_arrays([self.pa.array([0]), self.pc.cumulative_sum(lengths.cast(self.pa.int64()))])
        return self.pc.binary_join(self.pa.LargeListArray.from_arrays(offsets, texts), self._repeat(between))

    def _concatenate(self, *parts: Any) -> Any:
        return self.pc.binary_join_element_wise(
            *(self._repeat(part) if isinstance(part, str) else part for part in (*parts, ""))
        )

    def _repeat(self, text: str) -> Any:
        """Return a scalar, which Arrow repeats for all rows."""
        return self.pa.scalar(text, self.text)

    def _format_floats(self, place: Path, array: Any) -> Any:
        """Convert floats. Appends ".0" to whole numbers, which Arrow writes like integers, and writes null for NaN."""
        pc = self.pc
        texts = array.cast(self.text)
        whole = pc.equal(pc.trunc(array), array)
        if pc.any(whole).as_py():
            short = pc.and_(whole, pc.invert(pc.match_substring(texts, "e")))
            texts = pc.if_else(short, self._concatenate(texts, ".0"), texts)
        if pc.all(pc.is_finite(array)).as_py():
            return texts
        if pc.any(pc.is_inf(array)).as_py():
            raise ValueError(f"column {'.'.join(place)!r}: {_INFINITE}")
        return pc.if_else(pc.is_nan(array), self._repeat("null"), texts)

    def _is_plain_text(self, array: Any) -> bool:
        """Return whether an array contains strings that need no escapes in JSON."""
        if not self.pa.types.is_string(array.type) and not self.pa.types.is_large_string(array.type):
            return False
        return not self.pc.any(self.pc.match_substring_regex(array, r'[\x00-\x1f"\\]')).as_py()

    def _format_value(self, place: Path, value: Any) -> str:
        if value is not None and place in self.as_json:
            value = decode(json.loads(value))
        try:
            return _encoder.encode(_replace_nan(value))
        except (ValueError, TypeError) as error:
            raise type(error)(f"column {'.'.join(place)!r}: {error}") from None


def _encode_other(value: Any) -> str:
    if hasattr(value, "isoformat"):
        text: str = value.isoformat()
        return text
    raise TypeError(
        f"JSON has no {type(value).__name__} ({value!r}): use to_parquet, or leave the entry out with td.exclude"
    )


_INFINITE = "JSON has no infinite numbers: use to_parquet, or td.clamp first"
_encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_encode_other)


def _replace_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise ValueError(_INFINITE)
    if isinstance(value, dict):
        return {key: _replace_nan(inner) for key, inner in value.items()}
    return [_replace_nan(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# --- reading ----------------------------------------------------------------------------------------------------------


def _split_array(file: BinaryIO) -> Iterator[bytes]:
    """Convert an array of objects to one object per line by replacing bytes. Yields some lines at a time.

    A replacement inside a row makes invalid JSON (an array without a comma between objects, or a string with a line
    break), which Arrow then refuses.

    Raises:
        ValueError: the format is unusual.
    """
    rest = file.read(_BLOCK).lstrip(_SPACE)
    known = (b"},\n{", b"},{", b"}, {")
    between = next((between for between in known if between in rest), known[0])
    is_plain, ended = rest.startswith(b"["), False
    rest = rest[1:]
    while is_plain and not ended:
        # Reading as much again copies the bytes of a long row a few times only.
        block = file.read(max(_BLOCK, len(rest)))
        rest += block
        ended = not block
        if ended:
            rest = rest.rstrip(_SPACE)
            is_plain = rest.endswith(b"]")
            lines = rest[:-1]
        elif between in rest:
            lines, _, rest = rest.rpartition(between)
            lines, rest = lines + b"}", b"{" + rest
        else:
            continue
        breaks = lines.count(between) if between == known[0] else 0
        is_plain = is_plain and lines.count(b"\n") == breaks
        if is_plain:
            yield lines.replace(between, b"}\n{").strip(_SPACE)
    if not is_plain:
        raise ValueError("the rows are not arranged as lines")


def _list_rows(found: Any, shown: str) -> list[Any]:
    """Return the rows of an array of objects, or of an object of columns."""
    if isinstance(found, dict):
        rows = next((values for values in found.values() if isinstance(values, dict)), {})
        for name, values in found.items():
            if isinstance(values, dict):  # pandas writes a column as an object, with row names as keys.
                if values.keys() != rows.keys():
                    raise ValueError(f"{shown}, column {name!r}: its row names differ from those of other columns")
                found[name] = [values[row] for row in rows]
            elif not isinstance(values, list):
                raise ValueError(f"{shown}, column {name!r}: a column is an array, got {_describe_type(values)}")
        lengths = {name: len(values) for name, values in found.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{shown}: the columns have different numbers of rows: {lengths}")
        found = [dict(zip(found, row)) for row in zip(*found.values())]
    if not isinstance(found, list):
        raise ValueError(f"{shown}: expected an array of objects, or an object of columns, got {_describe_type(found)}")
    for row, record in enumerate(found, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{shown}, row {row}: a row is an object, got {_describe_type(record)}")
    return found


def _describe_type(value: object) -> str:
    if value is None:
        return "null"
    return _WORDS.get(type(value), "a number")


def _measure_depth(line: bytes) -> int:
    """Return the nesting depth of the brackets in a line."""
    letters = np.frombuffer(_STRING.sub(b"", line), np.uint8) | 0x20  # Converts brackets to braces.
    return int(np.cumsum((letters == ord("{")).astype(np.int64) - (letters == ord("}"))).max(initial=0))


def _find_large_int(value: Any) -> int | None:
    """Search a value, its lists and its dicts for an integer beyond int64; return the first, or `None`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = next((large for large in map(_find_large_int, inner) if large is not None), None)
    return value if type(value) is int and not -(2**63) <= value < 2**63 else found


class _JsonReader:
    """Reads JSON files, and infers the types of their columns; see `text_tables.TextReader`."""

    def __init__(self, lines: bool) -> None:
        self.pa, self.pc = require("pyarrow", "tabular"), require("pyarrow.compute", "tabular")
        self.source = ""
        self.row = 1
        self.lines = lines
        self.types: dict[str, Any] = {}
        # The types of columns whose text Arrow would convert to times.
        self.texts = self.pa.schema([])

    def read_batches(self, path: str, at_once: bool) -> Iterator[Any]:
        """Yield the record batches of a file, one for about a megabyte of lines."""
        self.row = 1
        with open(path, "rb") as opened:
            if self.lines:
                yield from self._split_blocks(opened)
                return
            file = opened if opened.seekable() else BytesIO(opened.read())
            # Cutting an array into lines takes a fifth of the time of parsing it with `json`.
            with contextlib.suppress(ValueError):
                yield from [self._read_lines(lines) for lines in _split_array(file) if lines]
                return
            file.seek(0)
            content = file.read()
        yield from self._split_blocks(BytesIO(self._convert_to_lines(content)))

    def _split_blocks(self, file: BinaryIO) -> Iterator[Any]:
        while block := file.read(_BLOCK):
            if text := (block + file.readline()).strip(_SPACE):
                yield self._read_lines(text)

    def _convert_to_lines(self, content: bytes) -> bytes:
        """Convert an array of objects, or an object of columns, to lines of objects."""
        if not content.strip():
            raise ValueError(f"{self.source} is empty")
        try:
            found = parse_json(content.decode("utf-8-sig"))
        except ValueError as error:
            advice = ": lines=True reads a file with one object per line" if "Extra data" in str(error) else ""
            raise ValueError(f"{self.source}: {error}{advice}") from None
        return "\n".join(map(json.dumps, _list_rows(found, self.source))).encode()

    def _read_lines(self, text: bytes) -> Any:
        """Parse some lines to a record batch. Errors name the row and the column."""
        pa = self.pa
        for row, line in enumerate(text.split(b"\n"), self.row):
            if len(line) > _DEEPEST and _measure_depth(line) > _DEEPEST:
                raise ValueError(f"{self.source}, row {row}: it is nested too deeply")
        try:
            if not text.isascii():
                text.decode()  # Raises for invalid UTF-8, which Arrow accepts.
            table = self._parse_lines(text)
            if (found := self._replace_times(pa.struct(table.schema))) is not None:
                self.texts = pa.unify_schemas([self.texts, pa.schema(found)], promote_options="permissive")
                table = self._parse_lines(text)
        except (UnicodeDecodeError, pa.ArrowException) as error:
            self._explain(text, str(error))
            raise ValueError(f"{self.source}: {error}") from error
        if not all(map(self._has_no_large_floats, table.columns)):
            self._explain(text, "")
        return table.combine_chunks().to_batches()[0]

    def _parse_lines(self, text: bytes) -> Any:
        reader = require("pyarrow.json", "tabular")
        return reader.read_json(
            self.pa.BufferReader(text),
            reader.ReadOptions(use_threads=False, block_size=len(text) + 1),
            reader.ParseOptions(explicit_schema=self.texts),
        )

    def _explain(self, text: bytes, problem: str) -> None:
        """Raise an error for the first row that cannot be read, or has an integer that does not fit into int64.

        Args:
            text: lines of objects.
            problem: the error message of Arrow, which contains the column and the row of a type mismatch.
        """
        said = re.match(r"JSON parse error: (?:Column\(/([^/)]*).*?\) )?(.*) in row (\d+)$", problem)
        for row, line in enumerate(filter(bytes.strip, text.split(b"\n"))):
            where = f"{self.source}, row {self.row + row}"
            try:
                record = parse_json(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: a line is one object of JSON, got {line[:80]!r}")
            for name, value in record.items():
                if (large := _find_large_int(value)) is not None:
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
        raise ValueError(f"{self.source}, column {name!r}, row {self.row + row}: {why}")

    def _replace_times(self, kind: Any) -> Any:
        """Return a copy of a type that has only its times, each replaced by text; `None` if it has no times."""
        pa = self.pa
        if pa.types.is_struct(kind):
            fields = [(field.name, self._replace_times(field.type)) for field in kind]
            fields = [field for field in fields if field[1] is not None]
            return pa.struct(fields) if fields else None
        if pa.types.is_list(kind):
            inner = self._replace_times(kind.value_type)
            return None if inner is None else pa.list_(inner)
        return pa.string() if pa.types.is_temporal(kind) else None

    def _has_no_large_floats(self, array: Any) -> bool:
        """Return whether no float in an array can come from an integer beyond int64 or from an invalid word."""
        pc, types = self.pc, self.pa.types
        if types.is_struct(array.type):
            return all(map(self._has_no_large_floats, array.flatten()))
        if types.is_list(array.type):
            return self._has_no_large_floats(pc.list_flatten(array))
        return not types.is_floating(array.type) or pc.all(pc.less(pc.abs(array), 2.0**63)).as_py()

    def infer(self, batch: Any) -> Any:
        """Update the types of the columns from a batch, and return the batch."""
        pa = self.pa
        for name, column in zip(batch.schema.names, batch.columns):
            kind = self._narrow_type(column)
            known = self.types.get(name, pa.null())
            try:
                schemas = [pa.schema([(name, known)]), pa.schema([(name, kind)])]
                self.types[name] = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
            except pa.ArrowTypeError:
                row = column.is_valid().index(True).as_py()
                self._refuse_value(name, row, column[row].as_py(), f"they are of {known}, and it is of {kind}")
        return batch

    def convert(self, batch: Any) -> Any:
        """Convert a batch to all columns with their final types. Missing columns are null."""
        nulls = self.pa.nulls(len(batch))
        columns = [
            (batch.column(name) if name in batch.schema.names else nulls).cast(kind, safe=False)
            for name, kind in self.types.items()
        ]
        return self.pa.RecordBatch.from_arrays(columns, schema=self.pa.schema(list(self.types.items())))

    def _narrow_type(self, array: Any) -> Any:
        """Return the type of an array, with fixed-size lists where all lists have the same length."""
        pa, types = self.pa, self.pa.types
        kind = array.type
        if types.is_struct(kind):
            return pa.struct([(field.name, self._narrow_type(array.field(i))) for i, field in enumerate(kind)])
        if not types.is_list(kind):
            return kind
        lengths = array.value_lengths().unique().to_pylist()
        inner = self._narrow_type(array.flatten())
        return pa.list_(inner, lengths[0]) if len(lengths) == 1 and lengths[0] else pa.list_(inner)
