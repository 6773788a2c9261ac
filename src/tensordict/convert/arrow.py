"""Conversion between containers and Arrow tables, which share the memory of numbers.

Types without a torch dtype become numbers with a note of their type, or values; see `from_arrow`. `columns.py`
describes the columns. The description of the container is in the metadata of the schema, under the key `tensordict`,
which other programs ignore.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from tensordict.convert.columns import (
    CATEGORIES,
    ORDERED,
    TENSOR,
    TYPE,
    Nulls,
    TableColumn,
    TableOptions,
    TableStructure,
    columns_of,
    container_of,
    insert_entry,
    paths_of,
    places_of,
)
from tensordict.core import ragged
from tensordict.core.equality import same_value
from tensordict.core.exceptions import DuplicateKeyError, UnsupportedEntryError
from tensordict.core.extras import require
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.formats.stack_columns import count_elements, join_ragged, split_ragged
from tensordict.io.values import decode, encode_entry
from tensordict.memory import kernel

METADATA = b"tensordict"
# Decimals with up to this many digits are exact as float64.
_EXACT_DIGITS = 15
# Dtypes without an Arrow type are written as one that holds their values exactly.
WIDER = {
    torch.bfloat16: torch.float32,
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
WIDER |= {getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")}


def pyarrow() -> Any:
    """Return the module `pyarrow`.

    It is called for every column. Looking in `sys.modules` first is 5 us faster than `require`.
    """
    return sys.modules.get("pyarrow") or require("pyarrow", "tabular")


def _compute() -> Any:
    """Return the module `pyarrow.compute`, which `pyarrow` does not import."""
    return require("pyarrow.compute", "tabular")


@cache
def _dtypes_by_type_id() -> dict[int, torch.dtype]:
    """Return the dtypes of the numeric Arrow types, by type id."""
    pa = pyarrow()
    names = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
    return {getattr(pa, name)().id: getattr(torch, name) for name in names}


@cache
def _types_by_dtype() -> dict[torch.dtype, Any]:
    """Return the numeric Arrow types, by dtype."""
    pa = pyarrow()
    return {dtype: getattr(pa, str(dtype).removeprefix("torch."))() for dtype in _dtypes_by_type_id().values()}


# --- to containers ----------------------------------------------------------------------------------------------------


def container_of_table(table: Any, reading: TableOptions) -> Any:
    """Make a container from a table, a record batch, or an object with Arrow's stream interface.

    Raises:
        TypeError: the object is none of these.
        ValueError: a column has nulls and the options do not allow them.
    """
    pa = pyarrow()
    if not isinstance(table, (pa.RecordBatch, pa.Table)):
        if not hasattr(table, "__arrow_c_stream__") and not hasattr(table, "__arrow_c_array__"):
            raise TypeError(f"from_arrow reads a table or a record batch of Arrow, got {type(table).__name__}")
        table = pa.table(table)
    structure = _structure_of(table.schema)
    return container_of(_read_columns(table, structure, reading), table.num_rows, structure, reading)


def _read_columns(table: Any, structure: TableStructure | None, reading: TableOptions) -> list[TableColumn]:
    if not isinstance(table, pyarrow().Table):
        table = pyarrow().Table.from_batches([table])
    reader = ColumnReader(reading, {} if structure is None else structure.notes, table.num_rows)
    names = table.schema.names
    for name, path, column in zip(names, paths_of(names, reading.separator), table.itercolumns()):
        reader.read_column(path, (name,), column)
    for column in reader.found if reading.masks else ():
        if (by_elements := reading.masks.get(column.path)) is not None:
            column.valid = _unify_mask(column, by_elements)
    return reader.found


def _unify_mask(column: TableColumn, by_elements: bool) -> Tensor | None:
    """Return the mask of a column in the shape that it has in all parts of a table."""
    values, valid = column.values, column.valid
    if not isinstance(values, Tensor) or (valid is not None and (not by_elements or valid.dim() == values.dim())):
        return valid
    ones = torch.ones_like(values, dtype=torch.bool) if by_elements else torch.ones(len(values), dtype=torch.bool)
    # Ragged rows that are missing have no elements, so their mask needs no change.
    return ones if valid is None or values.is_nested else ones & valid.view(-1, *[1] * (values.dim() - 1))


def masks_of(tables: Iterable[Any], reading: TableOptions) -> dict[Path, bool]:
    """Find the columns of a table that have nulls in any of its parts.

    Returns:
        for each of these columns, by its path: true if the elements of lists are null, false if only rows are. Pass it
        as `TableOptions.masks`, so that all parts get the same entries.
    """
    found: dict[Path, bool] = {}
    for table in tables:
        for column in _read_columns(table, _structure_of(table.schema), reading):
            if column.valid is not None:
                found[column.path] = found.get(column.path, False) or column.valid.dim() > 1
    return found


def _structure_of(schema: Any) -> TableStructure | None:
    return TableStructure.from_json((schema.metadata or {}).get(METADATA))


def notes_of(schema: Any) -> dict[Path, dict[str, Any]]:
    """Return the notes in the metadata of a schema, by the path of the column; see `TableStructure`.

    Raises:
        SaveError: the metadata is broken.
    """
    structure = _structure_of(schema)
    return {} if structure is None else structure.notes


@dataclass(frozen=True, slots=True)
class _NumericArray:
    """An array of numbers, with the type and the categories that they stand for; see `TableColumn`."""

    array: Any
    type: str | None = None
    categories: list[Any] | None = None


class ColumnReader:
    """Converts Arrow arrays to `TableColumn`s, and collects them in `found`.

    Args:
        notes: the notes of the `TableStructure`, by the path of the column in the table.
        rows: the number of rows.
    """

    def __init__(self, reading: TableOptions, notes: dict[Path, dict[str, Any]], rows: int) -> None:
        self.reading = reading
        self.notes = notes
        self.rows = rows
        self.numbers = _dtypes_by_type_id()
        self.share = ragged.SharedOffsets()
        self.found: list[TableColumn] = []
        self._read_only: kernel.ReadOnly | None = None

    def read_column(self, path: Path, place: Path, column: Any) -> None:
        """Convert one column. `path` is its nested key in the container, `place` its path in the table."""
        dtype = self.numbers.get(column.type.id)
        note = self.notes.get(place)
        if dtype is not None and note is None and column.num_chunks == 1:
            array = column.chunk(0)
            if not array.null_count and len(array):
                self.found.append(TableColumn(path, self._share_memory(array, dtype)))
                return
        self._read_array(path, place, _combine_chunks(column), note or {})

    def _share_memory(self, array: Any, dtype: torch.dtype) -> Tensor:
        """Return the numbers of an array without nulls as a tensor over its memory; a copy if that is read-only."""
        buffer = array.buffers()[1]
        if buffer.is_mutable:
            shared = torch.frombuffer(buffer, dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)
            return shared.clone() if self.reading.copy else shared
        if self._read_only is None:
            self._read_only = kernel.ReadOnly()
        # Writing to a read-only file mapping would crash the process (SIGSEGV), so lift the protection or copy.
        tensor = from_dlpack(array)
        shares = not self.reading.copy and self._read_only.lift(buffer.address, buffer.size)
        return tensor if shares else tensor.clone()

    def _read_array(self, path: Path, place: Path, array: Any, note: dict[str, Any]) -> None:
        pa = pyarrow()
        types, kind, extension = pa.types, array.type, None
        if isinstance(kind, pa.BaseExtensionType):
            array, kind, extension = array.storage, array.type.storage_type, kind
        if types.is_run_end_encoded(kind):
            array = _compute().run_end_decode(array)
            kind = array.type
        if types.is_struct(kind):
            for field, part in zip(kind, array.flatten()):
                inner = (*place, field.name)
                self._read_array((*path, field.name), inner, part, self.notes.get(inner, {}))
            if len({field.name for field in kind}) < len(kind):
                raise DuplicateKeyError(
                    f"column {_format_place(place)!r} has two fields of one name: rename one of them first"
                )
            return
        if "values" in note:
            self._read_values(path, place, array, note)
        elif is_list(kind):
            self._read_list(path, place, array, note, extension)
        elif (numbers := self._to_numbers(array)) is None:
            self._read_values(path, place, array, note)
        else:
            values, valid = self._read_numbers(numbers.array, place, note)
            column = TableColumn(path, _restore_dtype(values, note, place), numbers.type, numbers.categories)
            self.found.append(self._fill_missing(column, valid, place))

    def _to_numbers(self, array: Any) -> _NumericArray | None:
        """Convert the values of an array to numbers that torch has; `None` if they are not numeric."""
        pa = pyarrow()
        types, kind = pa.types, array.type
        if types.is_dictionary(kind):
            codes = array.indices
            if codes.null_count and types.is_unsigned_integer(codes.type):
                codes = codes.cast(pa.int64())  # Null becomes -1.
            return _NumericArray(codes, ORDERED if kind.ordered else None, array.dictionary.to_pylist())
        if types.is_decimal(kind) and kind.precision <= _EXACT_DIGITS:
            return _NumericArray(array.cast(pa.float64()), str(kind))
        if types.is_temporal(kind) and not types.is_interval(kind):
            return _NumericArray(array.view(pa.int32() if kind.bit_width == 32 else pa.int64()), str(kind))
        if kind.id in self.numbers or types.is_boolean(kind):
            return _NumericArray(array)
        return None

    def _read_values(self, path: Path, place: Path, array: Any, note: dict[str, Any]) -> None:
        types = pyarrow().types
        kind = array.type
        if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
            values = array.to_numpy(zero_copy_only=False).tolist()
        else:
            values = array.to_pylist()
        fill = self.reading.fill
        if isinstance(fill, Mapping) and _format_place(place) in fill:
            values = [fill[_format_place(place)] if value is None else value for value in values]
        if note.get("values") == "json":
            try:
                values = [decode(parse_json(value)) for value in values]
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"column {_format_place(place)!r}: a value is not the JSON that was written: {error}"
                ) from None
        batch = checks.ints(note.get("batch", []), f"the batch size of column {_format_place(place)!r}")
        column = TableColumn(path, values, batch=batch)
        if self.reading.mask_key and array.null_count:
            column.valid = self._find_valid(array, place)
        self.found.append(column)

    # --- lists --------------------------------------------------------------------------------------------------------

    def _read_list(self, path: Path, place: Path, array: Any, note: dict[str, Any], extension: Any) -> None:
        """Convert nested lists of numbers to a leaf with more dims, which is ragged if lengths differ."""
        types, whole = pyarrow().types, array
        form: list[int] = []
        lengths: list[Tensor] = []
        if place in self.reading.shapes and not array.null_count:
            form = list(self.reading.shapes[place])
            array = _flatten_levels(array, form, place)
        while is_list(array.type):
            fixed = types.is_fixed_size_list(array.type)
            form.append(array.type.list_size if fixed else -1)
            count = len(array)
            if fixed:
                lengths.append(torch.full((count,), form[-1]))
                # The items of lists that are null are arbitrary.
                array = array.values.slice(array.offset * form[-1], count * form[-1])
            else:
                array, sizes = _flatten_lists(array)
                lengths.append(sizes)
        numbers = self._to_numbers(array)
        if numbers is None:
            return self._read_values(path, place, whole, note)
        valid = self._find_valid(whole, place)
        flat, inner = self._read_numbers(numbers.array, place, note)
        kind = numbers.type
        if -1 not in form:
            shape = form
            is_tensor = extension is not None and extension.extension_name == "arrow.fixed_shape_tensor"
            if is_tensor:
                shape, kind = [*extension.shape, *form[1:]], TENSOR
            leaf = flat.reshape(self.rows, *shape)
            if is_tensor and extension.permutation:
                leaf = leaf.permute(0, *[1 + dim for dim in extension.permutation])
            column = TableColumn(path, _restore_dtype(leaf, note, place), kind, numbers.categories)
            if inner is not None:
                inner = inner.reshape(self.rows, *shape)
                if valid is None:
                    valid = inner
                elif not inner[valid].all():
                    valid = inner & valid.view(-1, *[1] * len(shape))
            self.found.append(self._fill_missing(column, valid, place))
            return
        row_sizes = _find_row_sizes(lengths)
        row = note.get("ragged", _default_form(form))
        if row_sizes is None:
            return self._read_values(path, place, whole, note)
        try:
            row = None if row is None else checks.sizes(row, "the form of its rows", -1)
            flat = _restore_dtype(flat, note, place)
            fits = count_elements(row_sizes, row) == len(flat)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"column {_format_place(place)!r}: its rows do not have the form {row} of its note")
        column = self._fill_missing(TableColumn(path, flat, kind, numbers.categories), inner, place)
        column.values = self._make_rows(column.values, row_sizes, row)
        if column.valid is not None:
            column.valid = self._make_rows(column.valid, row_sizes, row)
        elif self.reading.nulls == "mask":
            # Filling changes no elements here, because a null list becomes an empty row.
            column.valid = valid
        self.found.append(column)

    def _make_rows(self, flat: Tensor, sizes: Tensor, row: Sequence[int] | None) -> Tensor:
        """Make a ragged leaf of these elements. Leaves of the same sizes share their offsets."""
        leaf = join_ragged(flat, sizes, row, False, self.share)
        assert isinstance(leaf, Tensor)  # With `False`, it is never a column of a lazy stack.
        return leaf

    # --- nulls --------------------------------------------------------------------------------------------------------

    def _read_numbers(self, array: Any, place: Path, note: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return the numbers of an Arrow array, and a mask that is true where they are valid (`None` if all are).

        The tensor of numbers shares the memory of the array if possible.
        """
        pa = pyarrow()
        if array.null_count and "missing" in note and pa.types.is_signed_integer(array.type):
            array = array.fill_null(-1)
        valid = self._find_valid(array, place)
        if pa.types.is_boolean(array.type):
            if valid is not None:
                array = array.fill_null(False)
            return torch.from_numpy(_writable(array.to_numpy(zero_copy_only=False))), valid
        if not len(array):
            return torch.empty(0, dtype=self.numbers[array.type.id]), valid
        if valid is not None:
            # Drops the validity bitmap, which torch does not accept.
            buffers = [None, array.buffers()[1]]
            array = pa.Array.from_buffers(array.type, len(array), buffers, 0, array.offset)
        return self._share_memory(array, self.numbers[array.type.id]), valid

    def _find_valid(self, array: Any, place: Path) -> Tensor | None:
        if not array.null_count:
            return None
        reading = self.reading
        if not reading.fills and reading.fill_of(_format_place(place)) is None:
            raise ValueError(
                f"column {_format_place(place)!r} lacks {array.null_count} of {len(array)} values: fill=0 replaces "
                "them by a number, nulls='mask' adds a leaf that is true where there are values"
            )
        return torch.from_numpy(_writable(array.is_valid().to_numpy(zero_copy_only=False)))

    def _fill_missing(self, column: TableColumn, valid: Tensor | None, place: Path) -> TableColumn:
        """Replace missing values of a column, and add a mask if the options ask for one."""
        if valid is None:
            return column
        fill = self.reading.fill_of(_format_place(place))
        if fill is None:
            is_number = column.values.dtype.is_floating_point and column.type is None
            fill = -1 if column.categories is not None else self.reading.default_fill if is_number else 0
        dtype = column.values.dtype
        try:
            value = torch.tensor(fill, dtype=dtype)
            # A float fill may be rounded to the nearest number of the dtype.
            fits = value.item() == fill or fill != fill or (dtype.is_floating_point and not value.isinf())
        except (RuntimeError, ValueError, TypeError, OverflowError):
            fits = False
        if not fits:
            raise ValueError(
                f"column {_format_place(place)!r} is of {dtype}, which cannot hold the fill value {fill!r}"
            )
        there = valid.view(*valid.shape, *[1] * (column.values.dim() - valid.dim()))
        column.values = torch.where(there, column.values, value)
        if self.reading.nulls == "mask":
            column.valid = valid
        return column


def _combine_chunks(column: Any) -> Any:
    """Return the only chunk of a column, or a copy that joins all chunks."""
    pa = pyarrow()
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def join_tables(tables: list[Any]) -> Any:
    """Join tables of the same schema to one with a single chunk for each column.

    This empties the list, and releases the chunks of a column when it has been copied. So if nothing else refers to the
    tables, one column is in memory twice at a time.
    """
    pa = pyarrow()
    if len(tables) == 1 and all(column.num_chunks == 1 for column in tables[0].itercolumns()):
        return tables.pop()
    schema = tables[0].schema
    columns = [[chunk for table in tables for chunk in table.column(at).chunks] for at in range(len(schema))]
    rows = sum(table.num_rows for table in tables)
    tables.clear()
    if not columns:
        return pa.table({"": pa.nulls(rows)}).select([])
    return pa.Table.from_arrays([_join_arrays(field.type, columns.pop(0)) for field in schema], schema=schema)


def _join_arrays(kind: Any, chunks: list[Any]) -> Any:
    """Join the chunks of a column, or the chunks of each field of a struct, and release them."""
    pa = pyarrow()
    if not pa.types.is_struct(kind) or len(chunks) < 2 or not len(kind) or any(chunk.null_count for chunk in chunks):
        return _combine_chunks(pa.chunked_array(chunks, kind))
    fields = [list(parts) for parts in zip(*(chunk.flatten() for chunk in chunks))]
    chunks.clear()
    arrays = [_join_arrays(field.type, fields.pop(0)) for field in kind]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _format_place(place: Path) -> str:
    """Return the name of a column in errors and in `fill`."""
    return ".".join(place)


def _writable(values: Any) -> Any:
    return values if values.flags.writeable else values.copy()


def _restore_dtype(leaf: Tensor, note: dict[str, Any], place: Path) -> Tensor:
    """Convert a leaf to the dtype in the note of its column."""
    name = note.get("dtype")
    if name is None:
        return leaf
    dtype = getattr(torch, name, None) if type(name) is str else None
    if dtype not in WIDER or WIDER[dtype] is not leaf.dtype:
        raise ValueError(f"column {_format_place(place)!r} of {leaf.dtype} is said to be of the dtype {name!r:.80}")
    if not dtype.is_complex:
        return leaf.to(dtype)
    if leaf.shape[-1:] != (2,):
        raise ValueError(f"column {_format_place(place)!r} is said to be of the dtype {name}, which has two parts")
    return torch.view_as_complex(leaf.contiguous())


def is_list(kind: Any) -> bool:
    """Return whether a type is a list type, of fixed or variable length."""
    types = pyarrow().types
    known = types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view
    return any(is_of_kind(kind) for is_of_kind in known)


def _flatten_lists(array: Any) -> tuple[Any, Tensor]:
    """Return the items of all lists in one array, and the length of each list (0 for null)."""
    pa = pyarrow()
    lengths = _compute().list_value_length(array).fill_null(0).cast(pa.int64())
    items = array.flatten()
    return items, torch.from_numpy(_writable(lengths.to_numpy(zero_copy_only=False)))


def _flatten_levels(array: Any, shape: Sequence[int], place: Path) -> Any:
    """Return the items in all levels of lists, after checking that their number fits rows of this shape."""
    rows = len(array)
    while is_list(array.type):
        array = array.flatten()
    if len(array) != rows * math.prod(shape):
        raise ValueError(
            f"column {_format_place(place)!r}: {rows} rows of shape {list(shape)} were expected, and they have "
            f"{len(array)} numbers"
        )
    return array


def _default_form(form: Sequence[int]) -> list[int] | None:
    """Return the form of rows if they differ along their first dim only; otherwise `None`."""
    return list(form) if form[0] == -1 and -1 not in form[1:] else None


def _find_row_sizes(lengths: Sequence[Tensor]) -> Tensor | None:
    """Return the size of each row from the list lengths per level; `None` if a row has lists of unequal lengths."""
    counts = torch.ones(len(lengths[0]), dtype=torch.int64)
    sizes = []
    for level in lengths:
        ends = counts.cumsum(0)
        firsts = (ends - counts).clamp(max=max(len(level) - 1, 0))
        size = torch.where(counts > 0, level[firsts], 0) if len(level) else torch.zeros_like(counts)
        if not torch.equal(size.repeat_interleave(counts), level):
            return None
        sizes.append(size)
        counts = counts * size
    return torch.stack(sizes, 1)


# --- to tables --------------------------------------------------------------------------------------------------------


def table_of(container: Any, separator: str | None = None, text_categories: bool = False, nulls: Nulls = None) -> Any:
    """Make a table from a container. Nested containers become structs, or with `separator` columns with joined names.

    Args:
        text_categories: write codes as a dictionary only if their categories are text or bytes.
        nulls: `"mask"` writes null where a leaf `<name>_mask` is false, and omits the mask itself.

    Raises:
        UnsupportedEntryError: an entry has no form as a column.
        ValueError: two entries would be one column, or the container has no entries.
    """
    pa = pyarrow()
    columns, _, structure = columns_of(container, text_categories, nulls)
    tree: dict[str, Any] = {}
    for column, place in zip(columns, places_of(columns, separator)):
        array, note = array_of(column)
        if note:
            structure.notes[place] = note
        insert_entry(tree, place, array)
    if not tree:
        raise ValueError("the container has no entries, so there is nothing to make columns of")
    arrays = [_make_struct(array) if type(array) is dict else array for array in tree.values()]
    try:
        schema = pa.schema([(name, array.type) for name, array in zip(tree, arrays)], {METADATA: structure.to_json()})
        return pa.Table.from_arrays(arrays, schema=schema)
    except UnicodeEncodeError as error:
        raise UnsupportedEntryError(f"the name of an entry is not valid text for a table: {error}") from None


def _make_struct(fields: dict[str, Any]) -> Any:
    arrays = [_make_struct(array) if type(array) is dict else array for array in fields.values()]
    return pyarrow().StructArray.from_arrays(arrays, names=list(fields))


def array_of(column: TableColumn) -> tuple[Any, dict[str, Any]]:
    """Make the array of a column, and a note of the facts that its type does not express."""
    leaf = column.values
    if not isinstance(leaf, Tensor):
        return _make_value_array(column)
    note: dict[str, Any] = {}
    if leaf.requires_grad:
        leaf = leaf.detach()
    if type(leaf) is not Tensor and not leaf.is_nested:
        leaf = leaf.as_subclass(Tensor)
    if leaf.dtype in WIDER:
        note["dtype"] = str(leaf.dtype).removeprefix("torch.")
        if leaf.is_nested and leaf.dtype.is_complex:
            raise UnsupportedEntryError(f"{entry_of(column.path)}ragged complex numbers have no form in a table")
        leaf = torch.view_as_real(leaf.resolve_conj()) if leaf.dtype.is_complex else leaf.to(WIDER[leaf.dtype])
    rows = elements = column.valid
    if rows is not None and rows.dim() == leaf.dim() > 1:
        rows = None
    elif leaf.dim() > 1:
        elements = None
    if column.categories is not None and column.valid is None:
        # Negative codes are written as null; the note makes the reader restore -1.
        note["missing"] = True
    if leaf.is_nested:
        flat, sizes, row = split_ragged(leaf)
        if elements is not None:
            elements = split_ragged(elements)[0]
        array, by_default = _make_ragged_lists(_make_typed_array(flat, column, elements), sizes, row)
        form = None if row is None else list(row)
        if form != by_default:
            note["ragged"] = form
        return _set_nulls(array, rows), note
    array = _make_typed_array(leaf, column, elements)
    if column.type == TENSOR:
        pa, shape = pyarrow(), leaf.shape[1:]
        kind = pa.fixed_shape_tensor(array.type, list(shape))
        storage = _set_nulls(_make_fixed_lists(array, (len(leaf), shape.numel())), rows)
        return pa.ExtensionArray.from_storage(kind, storage), note
    return (array if leaf.dim() == 1 else _set_nulls(_make_fixed_lists(array, leaf.shape), rows)), note


def _set_nulls(array: Any, valid: Tensor | None) -> Any:
    """Return an array over the same memory that is null where `valid` is false."""
    if valid is None or valid.all():
        return array
    pa, kind = pyarrow(), array.type
    bits = pa.array(valid.reshape(-1).numpy(force=True)).buffers()[1]
    children = [array.values] if is_list(kind) else None
    return pa.Array.from_buffers(kind, len(array), [bits, *array.buffers()[1 : kind.num_buffers]], children=children)


def _make_flat_array(leaf: Tensor) -> Any:
    """Make an array of all elements of a tensor, over its memory if possible."""
    pa = pyarrow()
    if leaf.dtype is torch.bool:
        return pa.array(leaf.reshape(-1).numpy(force=True))
    kind = _types_by_dtype().get(leaf.dtype)
    if kind is None:
        raise UnsupportedEntryError(f"tensors of {leaf.dtype} have no form in a table: convert them with .to(dtype)")
    if not leaf.is_cpu or leaf.is_neg() or not leaf.is_contiguous():
        leaf = leaf.cpu().resolve_neg().contiguous()
    count = leaf.numel()
    if not count:
        return pa.array([], kind)
    # `pa.py_buffer` makes a mutable buffer. The buffer of `pa.foreign_buffer` would be read-only.
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(leaf.numpy())])


def _make_fixed_lists(array: Any, shape: Sequence[int]) -> Any:
    """Arrange the elements of rows of equal shape in lists of fixed sizes."""
    pa = pyarrow()
    for dim in range(len(shape) - 1, 0, -1):
        kind = pa.list_(array.type, shape[dim])
        count = int(torch.Size(shape[:dim]).numel())
        array = pa.Array.from_buffers(kind, count, [None], children=[array])
    return array


def _make_ragged_lists(array: Any, sizes: Tensor, row: Sequence[int] | None) -> tuple[Any, list[int] | None]:
    """Arrange elements in lists of ragged rows, and return them with the form that a reader would assume."""
    pa = pyarrow()
    dims = list(row) if row is not None else [-1] * sizes.shape[1]
    lengths = []
    counts = torch.ones(len(sizes), dtype=torch.int64)
    for dim in range(len(dims)):
        lengths.append(sizes[:, dim].repeat_interleave(counts))
        counts = counts * sizes[:, dim]
    for dim, level in zip(reversed(dims), reversed(lengths)):
        if dim != -1:
            array = pa.Array.from_buffers(pa.list_(array.type, dim), len(level), [None], children=[array])
            continue
        offsets = torch.zeros(len(level) + 1, dtype=torch.int64)
        torch.cumsum(level, 0, out=offsets[1:])
        large = int(offsets[-1]) >= 2**31
        kind = pa.LargeListArray if large else pa.ListArray
        array = kind.from_arrays(_make_flat_array(offsets if large else offsets.to(torch.int32)), array)
    return array, _default_form(dims)


def _make_typed_array(leaf: Tensor, column: TableColumn, valid: Tensor | None) -> Any:
    """Make an array of the column's type from the numbers of a tensor. It is null where `valid` is false."""
    pa = pyarrow()
    kind = column.type
    if column.categories is not None:
        there = torch.from_numpy(leaf.reshape(-1).numpy(force=True) >= 0)
        valid = there if valid is None else there & valid.reshape(-1)
    array = _set_nulls(_make_flat_array(leaf), valid)
    try:
        if column.categories is not None:
            values = pa.array(column.categories, None if column.categories else pa.string())
            if not _are_equal(values.to_pylist(), column.categories):
                raise pa.ArrowInvalid(f"Arrow converts the categories to {values.type}, which changes them")
            return pa.DictionaryArray.from_arrays(array, values, ordered=kind == ORDERED, safe=True)
        if kind is None or kind == TENSOR:
            return array
        target = _parse_type(kind)
        if not pa.types.is_decimal(target):
            return array.view(target)
        made = array.cast(target, safe=False)
        if not made.cast(array.type).equals(array):
            raise pa.ArrowInvalid("some have more digits, or are not finite")
        return made
    except (pa.ArrowException, ValueError, TypeError, IndexError) as error:
        name = joined((*column.path[:-1], column.path[-1] + (TYPE if column.categories is None else CATEGORIES)))
        what = "categories" if column.categories is not None else kind
        raise ValueError(
            f"{entry_of(column.path)}its values do not fit the {what} in the entry {name!r}: {error}; without that "
            "entry they are written as numbers"
        ) from None


def _parse_type(name: str) -> Any:
    """Parse the name of an Arrow type for times or decimals."""
    pa = pyarrow()
    if found := re.fullmatch(r"decimal(\d+)\((\d+), (-?\d+)\)", name):
        return getattr(pa, f"decimal{found[1]}")(int(found[2]), int(found[3]))
    if found := re.fullmatch(r"timestamp\[(\w+), tz=(.+)\]", name):
        return pa.timestamp(found[1], found[2])
    return pa.type_for_alias(name)


def _make_value_array(column: TableColumn) -> tuple[Any, dict[str, Any]]:
    """Make an array of non-tensor values: of an Arrow type if it preserves them, otherwise of JSON text."""
    pa = pyarrow()
    values, path = column.values, column.path
    note: dict[str, Any] = {"batch": list(column.batch)} if column.batch else {}
    kinds = set(map(type, values)) - {type(None)}
    try:
        if kinds <= {str} or kinds == {bytes}:
            return _join_chunks(pa.array(values, pa.binary() if kinds == {bytes} else pa.string())), note
        array = _join_chunks(pa.array(values))
        if kinds != {dict} and _are_equal(array.to_pylist(), values):
            return array, {**note, "values": "plain"}
    except UnicodeEncodeError:
        raise UnsupportedEntryError(f"{entry_of(path)}a str with lone surrogates cannot be in a table") from None
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError):
        pass  # Mixed types and other objects are tried as JSON below.
    texts = [json.dumps(encode_entry(value, path, ", and none in a table", tensors=False).form) for value in values]
    return pa.array(texts, pa.string()), {**note, "values": "json"}


def _join_chunks(array: Any) -> Any:
    """Join the chunks that Arrow makes of text with more than two gigabytes."""
    pa = pyarrow()
    if isinstance(array, pa.ChunkedArray):
        large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
        array = _combine_chunks(array.cast(large.get(array.type, array.type)))
    return array


def _are_equal(read: Any, written: Any) -> bool:
    """Return whether values that were read equal the written ones, in types too."""
    if type(read) is list and type(written) is list:
        return len(read) == len(written) and all(map(_are_equal, read, written))
    return type(read) is type(written) and same_value(read, written)
