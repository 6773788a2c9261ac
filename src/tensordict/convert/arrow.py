"""Tables of Arrow: containers over their memory, and tables over that of containers.

Numbers share their memory both ways. What torch has no dtype for stands as numbers with a note of what they are, or as
values: see `from_arrow`. The columns are described in `columns.py`; the description of the container is in the metadata
of the schema under the key `tensordict`, which other programs leave alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

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
from tensordict.io.values import NotJson, decode, encode_without_tensors
from tensordict.memory import kernel

if TYPE_CHECKING:
    pass

METADATA = b"tensordict"
# Decimals of so many digits are exact as float64.
_EXACT_DIGITS = 15
# What has no type in Arrow is written as one that holds it exactly.
WIDER = {
    torch.bfloat16: torch.float32,
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
WIDER |= {getattr(torch, name): torch.float32 for name in dir(torch) if name.startswith("float8_")}


def pyarrow() -> Any:
    """The library; `require` asks the machinery of imports, which takes 5 us, and this is called for every column."""
    return sys.modules.get("pyarrow") or require("pyarrow", "tabular")


def _compute() -> Any:
    """Its functions, which it does not import itself."""
    return require("pyarrow.compute", "tabular")


@cache
def _numbers() -> dict[int, torch.dtype]:
    """The dtypes of types that are numbers, by their ids."""
    pa = pyarrow()
    names = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
    return {getattr(pa, name)().id: getattr(torch, name) for name in names}


@cache
def _types() -> dict[torch.dtype, Any]:
    """The types of numbers by their dtypes."""
    pa = pyarrow()
    return {dtype: getattr(pa, str(dtype).removeprefix("torch."))() for dtype in _numbers().values()}


# --- to containers ----------------------------------------------------------------------------------------------------


def container_of_table(table: Any, reading: TableOptions) -> Any:
    """The container of a table, or of a record batch, or of what gives one by Arrow's stream interface.

    Raises:
        TypeError: it is none.
        ValueError: it has no columns, or one lacks values and nothing was said of them.
    """
    pa = pyarrow()
    if not isinstance(table, (pa.RecordBatch, pa.Table)):
        if not hasattr(table, "__arrow_c_stream__") and not hasattr(table, "__arrow_c_array__"):
            raise TypeError(f"from_arrow reads a table or a record batch of Arrow, got {type(table).__name__}")
        table = pa.table(table)
    schema = table.schema
    structure = _structure_of(schema)
    if not len(schema) and structure is None:
        raise ValueError("the table has no columns, so that there is nothing to make entries of")
    return container_of(_columns(table, structure, reading), table.num_rows, structure, reading)


def _columns(table: Any, structure: TableStructure | None, reading: TableOptions) -> list[TableColumn]:
    if not isinstance(table, pyarrow().Table):
        table = pyarrow().Table.from_batches([table])
    reader = Reader(reading, {} if structure is None else structure.notes, table.num_rows)
    names = table.schema.names
    for name, path, column in zip(names, paths_of(names, reading.separator), table.itercolumns()):
        reader.column(path, (name,), column)
    for column in reader.found if reading.masks else ():
        if (by_elements := reading.masks.get(column.path)) is not None:
            column.valid = _as_mask(column, by_elements)
    return reader.found


def _as_mask(column: TableColumn, by_elements: bool) -> Tensor | None:
    """Where a column has values, in the form that this has in all parts of a table."""
    values, valid = column.values, column.valid
    if not isinstance(values, Tensor) or (valid is not None and (not by_elements or valid.dim() == values.dim())):
        return valid
    ones = torch.ones_like(values, dtype=torch.bool) if by_elements else torch.ones(len(values), dtype=torch.bool)
    # Of ragged rows that are missing there are no elements.
    return ones if valid is None or values.is_nested else ones & valid.view(-1, *[1] * (values.dim() - 1))


def masks_of(tables: Iterable[Any], reading: TableOptions) -> dict[Path, bool]:
    """The columns that lack values in any part of a table, and whether elements of them are missing, not rows alone.

    With these as `masks`, all parts have the same entries.
    """
    found: dict[Path, bool] = {}
    for table in tables:
        for column in _columns(table, _structure_of(table.schema), reading):
            if column.valid is not None:
                found[column.path] = found.get(column.path, False) or column.valid.dim() > 1
    return found


def _structure_of(schema: Any) -> TableStructure | None:
    return TableStructure.of_text((schema.metadata or {}).get(METADATA))


def notes_of(schema: Any) -> dict[Path, dict[str, Any]]:
    """What the types of columns do not say, by their paths in the table; see `TableStructure`.

    Raises:
        SaveError: it is broken.
    """
    structure = _structure_of(schema)
    return {} if structure is None else structure.notes


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers, and what they stand for, as a `TableColumn` says it."""

    array: Any
    type: str | None = None
    categories: list[Any] | None = None


class Reader:
    """Makes `TableColumn`s of arrays.

    Args:
        notes: what the structure says of columns, by their paths in the table.
        rows: how many there are.
    """

    def __init__(self, reading: TableOptions, notes: dict[Path, dict[str, Any]], rows: int) -> None:
        self.reading = reading
        self.notes = notes
        self.rows = rows
        self.numbers = _numbers()
        self.share = ragged.SharedOffsets()
        self.found: list[TableColumn] = []
        self._read_only: kernel.ReadOnly | None = None

    def column(self, path: Path, place: Path, column: Any) -> None:
        """Take one column, whose nested key is `path`, and which is at `place` in the table."""
        dtype = self.numbers.get(column.type.id)
        note = self.notes.get(place)
        if dtype is not None and note is None and column.num_chunks == 1:
            array = column.chunk(0)
            if not array.null_count and len(array):
                self.found.append(TableColumn(path, self._over(array, dtype)))
                return
        self._array(path, place, _joined(column), note or {})

    def _over(self, array: Any, dtype: torch.dtype) -> Tensor:
        """The numbers of an array without gaps, over its memory; a copy where that cannot be written to."""
        buffer = array.buffers()[1]
        if buffer.is_mutable:
            return torch.frombuffer(buffer, dtype=dtype, count=len(array), offset=array.offset * dtype.itemsize)
        if self._read_only is None:
            self._read_only = kernel.ReadOnly()
        # A map of a file: who writes to a tensor over it would end the process.
        tensor = from_dlpack(array)
        return tensor if self._read_only.lift(buffer.address, buffer.size) else tensor.clone()

    def _array(self, path: Path, place: Path, array: Any, note: dict[str, Any]) -> None:
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
                self._array((*path, field.name), inner, part, self.notes.get(inner, {}))
            if len({field.name for field in kind}) < len(kind):
                raise DuplicateKeyError(
                    f"column {_shown(place)!r} has two fields of one name: rename one of them first"
                )
            return
        if "values" in note:
            self._values(path, place, array, note)
        elif is_list(kind):
            self._list(path, place, array, note, extension)
        elif (numbers := self._numbers(array)) is None:
            self._values(path, place, array, note)
        else:
            values, valid = self._flat(numbers.array, place, note)
            column = TableColumn(path, _as_dtype(values, note, place), numbers.type, numbers.categories)
            self.found.append(self._filled(column, valid, place))

    def _numbers(self, array: Any) -> _Numbers | None:
        """What torch has for the values of an array; `None` for those that are no numbers."""
        pa = pyarrow()
        types, kind = pa.types, array.type
        if types.is_dictionary(kind):
            codes = array.indices
            if codes.null_count and types.is_unsigned_integer(codes.type):
                codes = codes.cast(pa.int64())  # which has -1
            return _Numbers(codes, ORDERED if kind.ordered else None, array.dictionary.to_pylist())
        if types.is_decimal(kind) and kind.precision <= _EXACT_DIGITS:
            return _Numbers(array.cast(pa.float64()), str(kind))
        if types.is_temporal(kind) and not types.is_interval(kind):
            return _Numbers(array.view(_types()[_INTEGERS[kind.bit_width]]), str(kind))
        if kind.id in self.numbers or types.is_boolean(kind):
            return _Numbers(array)
        return None

    def _values(self, path: Path, place: Path, array: Any, note: dict[str, Any]) -> None:
        types = pyarrow().types
        if str(array.type) in ("string_view", "binary_view"):
            array = array.cast(
                pyarrow().large_string() if str(array.type) == "string_view" else pyarrow().large_binary()
            )
        kind = array.type
        if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
            values = array.to_numpy(zero_copy_only=False).tolist()
        else:
            values = array.to_pylist()
        fill = self.reading.fill
        if isinstance(fill, Mapping) and _shown(place) in fill:
            values = [fill[_shown(place)] if value is None else value for value in values]
        if note.get("values") == "json":
            try:
                values = [decode(parse_json(value)) for value in values]
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(
                    f"column {_shown(place)!r}: a value is not the JSON that was written: {error}"
                ) from None
        batch = checks.ints(note.get("batch", []), f"the batch size of column {_shown(place)!r}")
        self.found.append(TableColumn(path, values, batch=batch))

    # --- lists --------------------------------------------------------------------------------------------------------

    def _list(self, path: Path, place: Path, array: Any, note: dict[str, Any], extension: Any) -> None:
        """A column of lists of numbers at any depth: a leaf with more dims, ragged where lengths differ."""
        types, whole = pyarrow().types, array
        form: list[int] = []
        lengths: list[Tensor] = []
        while is_list(array.type):
            fixed = types.is_fixed_size_list(array.type)
            form.append(array.type.list_size if fixed else -1)
            count = len(array)
            if fixed:
                lengths.append(torch.full((count,), form[-1]))
                # Those of lists that are missing may be anything.
                array = array.values.slice(array.offset * form[-1], count * form[-1])
            else:
                array, sizes = _items(array)
                lengths.append(sizes)
        numbers = self._numbers(array)
        if numbers is None:
            return self._values(path, place, whole, note)
        valid = self._valid(whole, place)
        flat, inner = self._flat(numbers.array, place, note)
        kind = numbers.type
        if -1 not in form:
            shape = form
            is_tensor = extension is not None and extension.extension_name == "arrow.fixed_shape_tensor"
            if is_tensor:
                shape, kind = [*extension.shape, *form[1:]], TENSOR
            leaf = flat.reshape(self.rows, *shape)
            if is_tensor and extension.permutation:
                leaf = leaf.permute(0, *[1 + dim for dim in extension.permutation])
            column = TableColumn(path, _as_dtype(leaf, note, place), kind, numbers.categories)
            if inner is not None:
                inner = inner.reshape(self.rows, *shape)
                if valid is None:
                    valid = inner
                elif not inner[valid].all():
                    valid = inner & valid.view(-1, *[1] * len(shape))
            self.found.append(self._filled(column, valid, place))
            return
        row_sizes = _rectangular(lengths)
        row = note.get("ragged", _only_ragged(form))
        if row_sizes is None:
            return self._values(path, place, whole, note)
        try:
            row = None if row is None else checks.sizes(row, "the form of its rows", -1)
            flat = _as_dtype(flat, note, place)
            fits = count_elements(row_sizes, row) == len(flat)
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"column {_shown(place)!r}: its rows are not of the form {row} that was noted with it")
        column = self._filled(TableColumn(path, flat, kind, numbers.categories), inner, place)
        column.values = self._rows(column.values, row_sizes, row)
        if column.valid is not None:
            column.valid = self._rows(column.valid, row_sizes, row)
        elif self.reading.nulls == "mask":
            # A row without a list is one without elements, which a fill would not change.
            column.valid = valid
        self.found.append(column)

    def _rows(self, flat: Tensor, sizes: Tensor, row: Sequence[int] | None) -> Tensor:
        """The ragged leaf of these elements, which has the same offsets as others of these sizes."""
        leaf = join_ragged(flat, sizes, row, False, self.share)
        assert isinstance(leaf, Tensor)  # and no column, as of lazy stacks
        return leaf

    # --- values that are missing --------------------------------------------------------------------------------------

    def _flat(self, array: Any, place: Path, note: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The numbers of an array over its memory, and where there is one; `None` for everywhere."""
        pa = pyarrow()
        if array.null_count and "missing" in note and pa.types.is_signed_integer(array.type):
            array = array.fill_null(-1)
        valid = self._valid(array, place)
        if pa.types.is_boolean(array.type):
            if valid is not None:
                array = array.fill_null(False)
            return torch.from_numpy(_writable(array.to_numpy(zero_copy_only=False))), valid
        if not len(array):
            return torch.empty(0, dtype=self.numbers[array.type.id]), valid
        if valid is not None:
            # Without the bits that say what is missing, which torch does not take.
            buffers = [None, array.buffers()[1]]
            array = pa.Array.from_buffers(array.type, len(array), buffers, 0, array.offset)
        return self._over(array, self.numbers[array.type.id]), valid

    def _valid(self, array: Any, place: Path) -> Tensor | None:
        if not array.null_count:
            return None
        reading = self.reading
        if reading.nulls is None and reading.fill_of(_shown(place)) is None:
            raise ValueError(
                f"column {_shown(place)!r} lacks {array.null_count} of {len(array)} values: fill=0 puts a number in "
                "their place, nulls='mask' adds a leaf that says where there are values"
            )
        return torch.from_numpy(_writable(array.is_valid().to_numpy(zero_copy_only=False)))

    def _filled(self, column: TableColumn, valid: Tensor | None, place: Path) -> TableColumn:
        """A column with something in the place of what is missing, and with a mask where one was asked for."""
        if valid is None:
            return column
        fill = self.reading.fill_of(_shown(place))
        if fill is None:
            fill = -1 if column.categories is not None else 0
        dtype = column.values.dtype
        try:
            value = torch.tensor(fill, dtype=dtype)
            # Floating point numbers are the nearest ones.
            fits = value.item() == fill or fill != fill or (dtype.is_floating_point and not value.isinf())
        except (RuntimeError, ValueError, TypeError, OverflowError):
            fits = False
        if not fits:
            raise ValueError(f"column {_shown(place)!r} is of {dtype}, which has no {fill!r} to fill in")
        there = valid.view(*valid.shape, *[1] * (column.values.dim() - valid.dim()))
        column.values = torch.where(there, column.values, value)
        if self.reading.nulls == "mask":
            column.valid = valid
        return column


_INTEGERS = {32: torch.int32, 64: torch.int64}


def _joined(column: Any) -> Any:
    """The one array of a chunked column; several are copied into one."""
    pa = pyarrow()
    if column.num_chunks == 1:
        return column.chunk(0)
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _shown(place: Path) -> str:
    """How a column is called in errors, and in `fill`."""
    return ".".join(place)


def _writable(values: Any) -> Any:
    return values if values.flags.writeable else values.copy()


def _as_dtype(leaf: Tensor, note: dict[str, Any], place: Path) -> Tensor:
    """A leaf of the dtype that was noted with its column."""
    name = note.get("dtype")
    if name is None:
        return leaf
    dtype = getattr(torch, name, None) if type(name) is str else None
    if dtype not in WIDER or WIDER[dtype] is not leaf.dtype:
        raise ValueError(f"column {_shown(place)!r} of {leaf.dtype} is said to be of the dtype {name!r:.80}")
    if not dtype.is_complex:
        return leaf.to(dtype)
    if leaf.shape[-1:] != (2,):
        raise ValueError(f"column {_shown(place)!r} is said to be of the dtype {name}, which has two parts")
    return torch.view_as_complex(leaf.contiguous())


def is_list(kind: Any) -> bool:
    """Whether a type is one of lists, of one length or of any."""
    types = pyarrow().types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or _is_view(kind))


def _is_view(kind: Any) -> bool:
    return str(kind).startswith(("list_view<", "large_list_view<"))


def _items(array: Any) -> tuple[Any, Tensor]:
    """The items of all lists, one list behind the other, and how many each has; none where there is no list."""
    pa = pyarrow()
    lengths = _compute().list_value_length(array).fill_null(0).cast(pa.int64())
    items = array.flatten()
    return items, torch.from_numpy(_writable(lengths.to_numpy(zero_copy_only=False)))


def _only_ragged(form: Sequence[int]) -> list[int] | None:
    """The form of rows that differ along their first dim only; `None` for others."""
    return list(form) if form[0] == -1 and -1 not in form[1:] else None


def _rectangular(lengths: Sequence[Tensor]) -> Tensor | None:
    """The sizes of rows whose lists are all of one length; `None` where a row has lists of unequal lengths."""
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
    """The table of a container: its nested containers are structs, or with `separator` columns with joined names.

    Args:
        text_categories: whether codes are dictionaries only where their categories are text or bytes.
        nulls: `"mask"` makes nulls where leaves `<name>_mask` say that there is no value, and no columns of these.

    Raises:
        UnsupportedEntryError: an entry has no form as a column.
        ValueError: two entries would be one column, or there is none.
    """
    pa = pyarrow()
    columns, rows, structure = columns_of(container, text_categories, nulls)
    tree: dict[str, Any] = {}
    for column, place in zip(columns, places_of(columns, separator)):
        array, note = array_of(column)
        if note:
            structure.notes[place] = note
        _into(tree, place, array)
    if not tree:
        raise ValueError("the container has no entries, so that there is nothing to make columns of")
    arrays = [_struct(array, rows) if type(array) is dict else array for array in tree.values()]
    try:
        schema = pa.schema([(name, array.type) for name, array in zip(tree, arrays)], {METADATA: structure.text()})
        return pa.Table.from_arrays(arrays, schema=schema)
    except UnicodeEncodeError as error:
        raise UnsupportedEntryError(f"the name of an entry is no text that a table can hold: {error}") from None


def _into(tree: dict[str, Any], place: Path, array: Any) -> None:
    for name in place[:-1]:
        tree = tree.setdefault(name, {})
    tree[place[-1]] = array


def _struct(fields: dict[str, Any], rows: int) -> Any:
    arrays = [_struct(array, rows) if type(array) is dict else array for array in fields.values()]
    return pyarrow().StructArray.from_arrays(arrays, names=list(fields))


def array_of(column: TableColumn) -> tuple[Any, dict[str, Any]]:
    """The array of a column, and what its type does not say."""
    leaf = column.values
    if not isinstance(leaf, Tensor):
        return _array_of_values(column)
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
        # Codes of nothing are written as null.
        note["missing"] = True
    if leaf.is_nested:
        flat, sizes, row = split_ragged(leaf)
        if elements is not None:
            elements = split_ragged(elements)[0]
        array, by_default = _ragged_array(_typed(flat, column, elements), sizes, row)
        form = None if row is None else list(row)
        if form != by_default:
            note["ragged"] = form
        return _lacking(array, rows), note
    array = _typed(leaf, column, elements)
    if column.type == TENSOR:
        pa, shape = pyarrow(), leaf.shape[1:]
        kind = pa.fixed_shape_tensor(array.type, list(shape))
        return pa.ExtensionArray.from_storage(kind, _lacking(_fixed(array, (len(leaf), shape.numel())), rows)), note
    return (array if leaf.dim() == 1 else _lacking(_fixed(array, leaf.shape), rows)), note


def _lacking(array: Any, valid: Tensor | None) -> Any:
    """An array with null where `valid` is false, over the same memory."""
    if valid is None or valid.all():
        return array
    pa, kind = pyarrow(), array.type
    bits = pa.array(valid.reshape(-1).numpy(force=True)).buffers()[1]
    children = [array.values] if is_list(kind) else None
    return pa.Array.from_buffers(kind, len(array), [bits, *array.buffers()[1 : kind.num_buffers]], children=children)


def _flat_array(leaf: Tensor) -> Any:
    """All numbers of a tensor, over its memory where that can be."""
    pa = pyarrow()
    if leaf.dtype is torch.bool:
        return pa.array(leaf.reshape(-1).numpy(force=True))
    kind = _types().get(leaf.dtype)
    if kind is None:
        raise UnsupportedEntryError(f"tensors of {leaf.dtype} have no form in a table: convert them with .to(dtype)")
    if not leaf.is_cpu or leaf.is_neg() or not leaf.is_contiguous():
        leaf = leaf.cpu().resolve_neg().contiguous()
    count = leaf.numel()
    if not count:
        return pa.array([], kind)
    # Unlike a `foreign_buffer`, one that says that it may be written to.
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(leaf.numpy())])


def _fixed(array: Any, shape: Sequence[int]) -> Any:
    """The array of rows of one shape: lists of fixed sizes."""
    pa = pyarrow()
    for dim in range(len(shape) - 1, 0, -1):
        kind = pa.list_(array.type, shape[dim])
        count = int(torch.Size(shape[:dim]).numel())
        array = pa.Array.from_buffers(kind, count, [None], children=[array])
    return array


def _ragged_array(array: Any, sizes: Tensor, row: Sequence[int] | None) -> tuple[Any, list[int] | None]:
    """The array of ragged rows of these elements, and the form that a reader takes them for."""
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
        array = kind.from_arrays(_flat_array(offsets if large else offsets.to(torch.int32)), array)
    return array, _only_ragged(dims)


def _typed(leaf: Tensor, column: TableColumn, valid: Tensor | None) -> Any:
    """The array of what all numbers of a tensor stand for, null where `valid` is false."""
    pa = pyarrow()
    kind = column.type
    if column.categories is not None:
        there = torch.from_numpy(leaf.reshape(-1).numpy(force=True) >= 0)
        valid = there if valid is None else there & valid.reshape(-1)
    array = _lacking(_flat_array(leaf), valid)
    try:
        if column.categories is not None:
            values = pa.array(column.categories, None if column.categories else pa.string())
            if not _is_same(values.to_pylist(), column.categories):
                raise pa.ArrowInvalid(f"Arrow makes {values.type} of the categories, which changes them")
            return pa.DictionaryArray.from_arrays(array, values, ordered=kind == ORDERED, safe=True)
        if kind is None or kind == TENSOR:
            return array
        target = _type_named(kind)
        if not pa.types.is_decimal(target):
            return array.view(target)
        made = array.cast(target, safe=False)
        if not made.cast(array.type).equals(array):
            raise pa.ArrowInvalid("some have more digits, or are no finite numbers")
        return made
    except (pa.ArrowException, ValueError, TypeError, IndexError) as error:
        name = joined((*column.path[:-1], column.path[-1] + (TYPE if column.categories is None else CATEGORIES)))
        what = "categories" if column.categories is not None else kind
        raise ValueError(
            f"{entry_of(column.path)}its values are not the {what} that the entry {name!r} says: {error}; without that "
            "entry they are written as numbers"
        ) from None


def _type_named(name: str) -> Any:
    """The type of times or decimals that Arrow writes so."""
    pa = pyarrow()
    base, _, inner = name.partition("[")
    if found := re.fullmatch(r"decimal(\d+)\((\d+), (-?\d+)\)", name):
        return getattr(pa, f"decimal{found[1]}")(int(found[2]), int(found[3]))
    if base in ("date32", "date64"):
        return getattr(pa, base)()
    unit, _, zone = inner.removesuffix("]").partition(", tz=")
    if base == "timestamp":
        return pa.timestamp(unit, zone or None)
    return getattr(pa, base)(unit)


def _array_of_values(column: TableColumn) -> tuple[Any, dict[str, Any]]:
    """The array of values that are no tensors: as Arrow has them, or as JSON."""
    pa = pyarrow()
    values, path = column.values, column.path
    note: dict[str, Any] = {"batch": list(column.batch)} if column.batch else {}
    kinds = set(map(type, values)) - {type(None)}
    try:
        if kinds <= {str} or kinds == {bytes}:
            if kinds:
                return _whole(pa.array(values, pa.string() if kinds == {str} else pa.binary())), note
            return pa.array(values, pa.string()), note
        array = _whole(pa.array(values))
        if kinds != {dict} and _is_same(array.to_pylist(), values):
            return array, {**note, "values": "plain"}
    except UnicodeEncodeError:
        raise UnsupportedEntryError(f"{entry_of(path)}a str with lone surrogates is no text of a table") from None
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError):
        pass  # mixed types, and objects that Arrow does not know, have JSON below or an error that names them
    try:
        texts = [json.dumps(encode_without_tensors(value)) for value in values]
    except NotJson as error:
        raise UnsupportedEntryError(f"{entry_of(path)}{error}, and none in a table") from None
    return pa.array(texts, pa.string()), {**note, "values": "json"}


def _whole(array: Any) -> Any:
    """The one array of what may be in chunks, as text of more than two gigabytes is."""
    pa = pyarrow()
    if isinstance(array, pa.ChunkedArray):
        large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
        array = _joined(array.cast(large.get(array.type, array.type)))
    return array


def _is_same(read: Any, written: Any) -> bool:
    """Whether values come back as they were, of the same types."""
    if type(read) is list and type(written) is list:
        return len(read) == len(written) and all(map(_is_same, read, written))
    return type(read) is type(written) and same_value(read, written)
