"""JSON as tables of Arrow: lines with an object each, an array of objects, or one object of columns."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import torch

from tensordict.convert import arrow
from tensordict.convert.sources import SourceFile
from tensordict.convert.text_tables import TextTables
from tensordict.core import registry
from tensordict.core.extras import require
from tensordict.io.values import restored
from tensordict.memory.mapped import PathLike

if TYPE_CHECKING:
    from tensordict.containers.dense import TensorDict

# The lines that are read at a time.
_LINES = 8192
_WORDS = {bool: "true or false", str: "text", dict: "an object", list: "an array"}


def from_json(
    path: PathLike,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: Any = None,
    batch_size: Any = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    lines: bool = False,
    **kwargs: Any,
) -> TensorDict:
    """A `TensorDict` of the records of a JSON file; see :meth:`TensorDict.from_json`, which has more arguments.

    Example:
        >>> import tempfile
        >>> from tensordict import TensorDict, from_json
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     TensorDict(a=[1, 2], batch_size=[2]).to_json(f"{folder}/td.json")
        ...     from_json(f"{folder}/td.json")["a"]
        tensor([1, 2])
    """
    return registry.lookup("TensorDict").from_json(
        path,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        lines=lines,
        **kwargs,
    )


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
    rows = itertools.chain.from_iterable(map(_rows_of_table, tables))
    file.write(begin)
    wrote = False
    for row in rows:
        file.write((between if wrote else b"") + _text(row).encode())
        wrote = True
    if wrote or not lines:
        file.write(end)


def _rows_of_table(table: Any) -> Iterator[dict[str, Any]]:
    """The rows of a table, of which some are in memory at a time."""
    texts = [place for place, note in arrow.notes_of(table.schema).items() if note.get("values") == "json"]
    for batch in table.to_batches(max_chunksize=_LINES):
        for row in batch.to_pylist():
            for *above, name in texts:
                level = row
                for key in above:
                    level = level[key]
                level[name] = restored(json.loads(level[name]))
            yield row


def _text(row: dict[str, Any]) -> str:
    try:
        return _encoder.encode(row)
    except (ValueError, TypeError):
        return "{" + ", ".join(f"{_encoder.encode(name)}: {_cell(name, value)}" for name, value in row.items()) + "}"


def _cell(name: str, value: Any) -> str:
    """What stands in a row for a value that may have NaN inside."""
    try:
        return _encoder.encode(_without_nan(value))
    except (ValueError, TypeError) as error:
        raise type(error)(f"column {name!r}: {error}") from None


def _plain(value: Any) -> str:
    if hasattr(value, "isoformat"):
        text: str = value.isoformat()
        return text
    raise TypeError(
        f"JSON has no {type(value).__name__} ({value!r}): use to_parquet, or leave the entry out with td.exclude"
    )


_encoder = json.JSONEncoder(allow_nan=False, ensure_ascii=False, default=_plain)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise ValueError("JSON has no infinite numbers: use to_parquet, or td.clamp first")
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, (list, tuple)) else value


# --- reading ----------------------------------------------------------------------------------------------------------


def _lines(path: str, shown: str) -> Iterator[list[dict[str, Any]]]:
    """The objects of a file that has one a line, some at a time."""
    with open(path, "rb") as file:
        lines = (line for line in file if not line.isspace())
        row = 1
        while piece := list(itertools.islice(lines, _LINES)):
            yield [_parsed(line, shown, row + position) for position, line in enumerate(piece)]
            row += len(piece)


def _parsed(line: bytes, shown: str, row: int) -> dict[str, Any]:
    found = _loads(line, f"{shown}, row {row}")
    if not isinstance(found, dict):
        raise ValueError(f"{shown}, row {row}: a line is one object of JSON, got {line[:80]!r}")
    return found


def _loads(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: the byte {content[error.start : error.start + 1]!r} is no UTF-8") from None
    except RecursionError:
        raise ValueError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two columns are called {next(name for name in names if names.count(name) > 1)!r}")
    return made


def _records(path: str, shown: str) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file that is an array of objects, or an object of columns."""
    with open(path, "rb") as file:
        content = file.read()
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
    yield found


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
    """What the columns of a file are, as far as it was seen, and its rows as that; see `text_tables.Columns`."""

    def __init__(self, lines: bool) -> None:
        self.pa = require("pyarrow", "tabular")
        self.shown = ""
        self.row = 1
        self.lines = lines
        self.types: dict[str, Any] = {}

    def pieces(self, path: str) -> Iterator[list[dict[str, Any]]]:
        """The rows of a file."""
        self.row = 1
        return _lines(path, self.shown) if self.lines else _records(path, self.shown)

    def look(self, piece: list[dict[str, Any]]) -> None:
        """Find out what the columns are, as far as these rows tell."""
        for name in dict.fromkeys(itertools.chain.from_iterable(piece)):
            values = [record.get(name) for record in piece]
            known = self.types.get(name, self.pa.null())
            try:
                self.types[name] = self._merged(known, self._tight(self.pa.array(values)))
            except (self.pa.ArrowException, OverflowError, TypeError, ValueError):
                self.types[name] = self._one_by_one(name, values, known)

    def table(self, piece: list[dict[str, Any]]) -> Any:
        """The record batch of these rows."""
        columns = [self._array([record.get(name) for record in piece], type) for name, type in self.types.items()]
        return self.pa.RecordBatch.from_arrays(columns, schema=self.pa.schema(list(self.types.items())))

    def _array(self, values: list[Any], type: Any) -> Any:
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
