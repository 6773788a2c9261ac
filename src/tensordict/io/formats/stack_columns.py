"""The columns of ragged lazy stacks, used by all formats: one tensor for each key with the rows of all members.

Without columns, a stack whose members have the same keys and leaves of different shapes would need files, or
descriptions, for every member. A column stores the rows of an entry one after the other, with a table of their shapes.
If all rows have the same shape, it is one dense tensor. Readers build the members from views of the columns.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from tensordict.core import makers, ragged
from tensordict.core.contract import Contract
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.core.keys import Path, entry_of
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor, _wrap, make_nested_view
from tensordict.memory.stored_tensors import SPREAD, Selection, StoredTensor, as_array, stored_dtype

# Stacks of fewer members are stored member by member, in the form of the reference, so that it can read them as stacks.
MIN_MEMBERS = 4
_VALUES = ("NonTensorData", "MetaData")
# The reference cannot load a folder with a ragged tensor of these dtypes.
_UNSUPPORTED = {getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))}
# A broken file may claim any number of members without entries. This is the most that is accepted.
_MOST_EMPTY = 1 << 20


@dataclass(slots=True)
class Column:
    """The rows of one entry of a ragged stack.

    flat: the elements of all rows in C order, a tensor of one dim.
    sizes: the shapes of the rows, an int64 table of shape (rows, dims), on the CPU.
    """

    flat: Tensor
    sizes: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return self.flat.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the stacked rows, with -1 for sizes that differ between rows."""
        rows = self.sizes
        if not len(rows):
            return torch.Size([0] * (1 + rows.shape[1]))
        same = (rows == rows[:1]).all(0).tolist()
        return torch.Size([len(rows), *[n if one else -1 for n, one in zip(rows[0].tolist(), same, strict=True)]])

    def jagged_form(self) -> tuple[int, ...] | None:
        """Return the shape of a row with -1 as its first dim, if the rows differ in that dim only; else `None`."""
        form = self.shape[1:]
        return (-1, *form[1:]) if len(form) and -1 not in form[1:] else None

    def rows(self) -> list[Tensor]:
        """Return the rows as views."""
        shapes = self.sizes.tolist()
        # Splitting a plain tensor and wrapping the pieces is three times faster than splitting the mapped tensor.
        source = getattr(self.flat, "_source", None)
        pieces = torch.split(self.flat.detach().as_subclass(Tensor), self.sizes.prod(-1).tolist())
        return [_wrap_row(piece.view(shape), source) for piece, shape in zip(pieces, shapes, strict=True)]


def split_ragged(leaf: Any) -> tuple[Tensor, Tensor, tuple[int, ...] | None]:
    """Split a ragged leaf or a column into the parts that are stored: its elements, sizes of rows, and row shape."""
    if isinstance(leaf, Column):
        return leaf.flat, leaf.sizes, None
    return ragged.flatten_in_row_order(leaf.detach()), ragged.row_sizes(leaf), ragged.row_form(leaf)


def join_ragged(
    flat: Tensor, sizes: Tensor, row: Sequence[int] | None, column: bool, share: ragged.SharedOffsets
) -> Tensor | Column:
    """Build a column of a lazy stack, or a ragged tensor, from the parts that `split_ragged` returned.

    Args:
        flat: the elements. The result is memory-mapped if they are.
        sizes, row: the sizes of the rows and the row shape.
        column: build a column.
        share: shares the offsets of leaves with rows of the same sizes.
    """
    if column:
        return Column(flat, sizes)
    if row is not None:
        return ragged.from_row_order(flat.detach().as_subclass(Tensor), sizes, row.index(-1) + 1, row, share)
    return make_nested_view(flat, sizes) if isinstance(flat, MemoryMappedTensor) else ragged.from_buffer(flat, sizes)


def count_elements(sizes: Tensor, row: Sequence[int] | None) -> int:
    """Return the number of elements of rows of these sizes. `row` is their common shape, with -1 where they differ.

    Raises:
        ValueError: `sizes` is not a table of sizes, or does not fit `row`.
    """
    fits = sizes.dtype is torch.int64 and sizes.dim() == 2 and sizes.shape[1] and bool((sizes >= 0).all())
    # Count in floating point first, because the products of sizes in a broken file may overflow int64.
    count = float(sizes.double().prod(-1).sum()) if fits else 0.0
    if fits and row is not None:
        fits = len(row) == sizes.shape[1] and row.count(-1) == 1
        fits = fits and all(bool((sizes[:, dim] == size).all()) for dim, size in enumerate(row) if size != -1)
    if not fits or count >= 2**53:
        raise ValueError("the sizes of its rows are broken")
    return int(count)


def is_ragged_leaf(leaf: object) -> bool:
    """Return True for a ragged tensor and for a column."""
    return isinstance(leaf, Column) or (isinstance(leaf, Tensor) and leaf.is_nested)


def find_file(leaf: object) -> str | None:
    """Return the path of the file that a leaf or a part of it is mapped from; `None` for a leaf in memory."""
    flat = leaf.flat if isinstance(leaf, Column) else leaf
    parts = flat.array.parts if type(flat) is StoredTensor and isinstance(flat.array, _JoinedArray) else [flat]
    for part in parts:
        if isinstance(part, MemoryMappedTensor) and isinstance(part._source, FileSource):
            return part._source.path
    return None


def densify_rows(stack: Any, key: Path) -> Any:
    """Make one container of a lazy stack, with jagged leaves if its rows differ in one dim, else with strided ones.

    Raises:
        UnsupportedEntryError: the rows have no such form; the error names `key`.
    """
    try:
        return stack.densify(torch.jagged)
    except RuntimeError:
        try:
            return stack.densify()
        except RuntimeError as error:
            raise UnsupportedEntryError(f"{entry_of(key)}the lazy stack has no form as rows: {error}") from None


# --- from members to columns ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class NestedColumns:
    """Nested containers of the same name, one for each member, and the columns of their entries."""

    containers: list[Any]
    entries: dict[str, Any]


def collect_columns(members: Sequence[Any], key: Path = ()) -> dict[str, Any] | None:
    """Collect the entries of the members of a lazy stack by column.

    Returns:
        By name: a `Column`, a tensor whose first dim runs over the members, the list of the holders of values, or
        `NestedColumns`. Returns `None` for members with equal shapes, for members that differ in more than shapes, and
        for fewer than `MIN_MEMBERS`.
    """
    if len(members) < MIN_MEMBERS or not _differ_in_shape(members):
        return None
    try:
        return _collect(members, key)
    except _UnlikeMembersError:
        return None


def stacked_size(members: Sequence[Any], dim: int) -> torch.Size:
    """Return the batch size of a lazy stack of members, with -1 for sizes that differ between them."""
    sizes = [tuple(member.batch_size) for member in members]
    common = [column[0] if len(set(column)) == 1 else -1 for column in zip(*sizes, strict=False)]
    return torch.Size([*common[:dim], len(sizes), *common[dim:]])


class _UnlikeMembersError(Exception):
    """Members differ in more than the shapes of their leaves, or have entries that cannot be saved as columns."""


def _differ_in_shape(members: Sequence[Any]) -> bool:
    """Return True if a tensor has different shapes in the members, which may differ in other ways too."""
    for name, value in members[0]._structure().items():
        column = [member._structure().get(name) for member in members]
        if isinstance(value, Tensor):
            if any(isinstance(other, Tensor) and other.shape != value.shape for other in column):
                return True
            continue
        nodes = all(isinstance(other, Contract) and not other._is_non_tensor for other in column)
        if nodes and _differ_in_shape(column):
            return True
    return False


def _collect(members: Sequence[Any], key: Path) -> dict[str, Any]:
    _check_alike(members)
    found: dict[str, Any] = {}
    for name, value in members[0]._entries.items():
        column = [member._entries[name] for member in members]
        if isinstance(value, Tensor):
            _check_tensors_alike(column)
            found[name] = _build_column(column, (*key, name))
        elif not isinstance(value, Contract) or any(type(item) is not type(value) for item in column):
            raise _UnlikeMembersError
        elif not value._is_non_tensor:
            inner = _collect([item._wrapped_container() for item in column], (*key, name))
            found[name] = NestedColumns(column, inner)
        elif type(value).__name__ in _VALUES and all(item._names == value._names for item in column):
            found[name] = column
        else:
            raise _UnlikeMembersError
    return found


def _check_alike(members: Sequence[Any]) -> None:
    """Raise an error for members that differ in more than shapes, or whose entries are not in a dict."""
    first = members[0]
    if getattr(first, "_stored_as", type(first).__name__) != "TensorDict" or type(first._entries) is not dict:
        raise _UnlikeMembersError
    keys, names, ndim = first._entries.keys(), first._names, len(first._batch_size)
    for member in members:
        if (
            type(member) is not type(first)
            or member._entries.keys() != keys
            or member._names != names
            or len(member._batch_size) != ndim
        ):
            raise _UnlikeMembersError


def _check_tensors_alike(column: Sequence[Any]) -> None:
    first = column[0]
    for leaf in column:
        if (
            not isinstance(leaf, Tensor)
            or isinstance(leaf, Contract)
            or leaf.dtype is not first.dtype
            or leaf.ndim != first.ndim
            or leaf.layout is not torch.strided
            or leaf.is_nested
            or leaf.is_meta
            or leaf.is_quantized
            or type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__
        ):
            raise _UnlikeMembersError


def _build_column(leaves: list[Tensor], key: Path) -> Any:
    shapes = [tuple(leaf.shape) for leaf in leaves]
    dtype = leaves[0].dtype
    try:
        if len(set(shapes)) == 1:
            shape = (len(leaves), *shapes[0])
            return StoredTensor.of(_JoinedArray(leaves, shape), dtype, None, key)
        if dtype in _UNSUPPORTED:
            raise _UnlikeMembersError
        source = _JoinedArray(leaves, None)
    except UnsupportedEntryError:
        raise _UnlikeMembersError from None
    flat = StoredTensor.of(source, dtype, None, key)
    return Column(flat, torch.tensor(shapes, dtype=torch.int64))


class _JoinedArray:
    """Several tensors as one `Array`. Reading a range copies only the tensors that it touches.

    Args:
        parts: the tensors, on any device.
        shape: the shape of their stack; `None` to concatenate their elements.
    """

    spread, rows_together = SPREAD, 1

    def __init__(self, parts: list[Tensor], shape: tuple[int, ...] | None) -> None:
        self.parts = parts
        self.stacked = shape is not None
        lengths = (1 if self.stacked else part.numel() for part in parts)
        # The end of each part along the first dim.
        self.ends = list(itertools.accumulate(lengths))
        self.shape = (self.ends[-1],) if shape is None else shape
        stored_dtype(parts[0].dtype)

    def check(self) -> None:
        """Do nothing, because the parts are in memory or mapped."""

    def write(self, selection: Selection, values: object) -> NoReturn:
        """Raise an error, because the array is only read."""
        raise UnsupportedEntryError("tensors that are joined to be saved are not written to")

    def read(self, selection: Selection, dtype: object) -> Any:
        first, *rest = selection or (slice(None),)
        rows = range(self.shape[0])[first] if isinstance(first, slice) else range(first, first + 1)
        low, high = bisect.bisect_right(self.ends, rows[0]), bisect.bisect_right(self.ends, rows[-1])
        start = self.ends[low - 1] if low else 0
        touched = [part.detach().cpu() for part in self.parts[low : high + 1]]
        found = torch.stack(touched) if self.stacked else torch.cat([part.reshape(-1) for part in touched])
        array = as_array(found[rows.start - start : rows.stop - start : rows.step], found.dtype)
        within: tuple[Any, ...] = (slice(None) if isinstance(first, slice) else 0, *rest)
        return array[within]


# --- from columns to members ------------------------------------------------------------------------------------------


def build_members(
    entries: Mapping[str, Any], size: torch.Size, dim: int, device: torch.device | None, names: Any
) -> list[Any]:
    """Build the members of a lazy stack from its stored columns.

    Args:
        entries: by name, a `Column`, a tensor whose first dim runs over the members, a lazy stack of nested containers
            (or a tensorclass over one), or a holder of the list of values.
        size: the batch size of the stack, with -1 for sizes that differ between the members.
        dim: the stack dim.
        device, names: the device and the dim names of the members.

    Raises:
        ValueError: an entry does not fit the batch size.
    """
    count, own = size[dim], size[:dim] + size[dim + 1 :]
    for name, value in entries.items():
        if _count_rows(value) != count:
            raise ValueError(f"the entry {name!r} has {_count_rows(value)} rows for {count} members")
    if not entries and count > _MOST_EMPTY:
        raise ValueError(f"{count} members without entries are too many")
    sizes = _find_batch_sizes(entries, count, own)
    parts = {name: _split_rows(value, sizes) for name, value in entries.items()}
    make = makers.dense
    rows = zip(*parts.values(), strict=True) if parts else itertools.repeat(())
    keys = list(parts)
    return [make(dict(zip(keys, row, strict=True)), at, device, names) for at, row in zip(sizes, rows)]


def _count_rows(value: Any) -> int:
    """Return the number of rows of an entry."""
    if isinstance(value, Column):
        return len(value.sizes)
    if isinstance(value, Tensor):
        return value.shape[0]
    rows = getattr(value, "_value", None) if value._is_non_tensor else value._wrapped_container()._members()
    if not isinstance(rows, list):
        raise ValueError(f"a {type(value).__name__} has no rows")
    return len(rows)


def _find_batch_sizes(entries: Mapping[str, Any], count: int, own: torch.Size) -> list[torch.Size]:
    """Return the batch size of every member: the first dims of its rows, which must be equal in all entries."""
    batch_dims = len(own)
    table: Tensor | None = None
    if -1 not in own:
        table = torch.tensor(own, dtype=torch.int64).expand(count, batch_dims)
    for name, value in entries.items():
        found = _first_dims(value, batch_dims)
        if found is None:
            continue
        if table is None:
            table = found
        if found.shape != (count, batch_dims) or not torch.equal(found, table):
            raise ValueError(f"the entry {name!r} does not fit {count} members of batch size {list(own)}")
    if table is None:
        raise ValueError(f"its members have the batch sizes {list(own)}, and no entry to find -1 from")
    for at, expected in enumerate(own):
        if expected != -1 and not bool((table[:, at] == expected).all()):
            raise ValueError(f"the batch sizes of its members are not {list(own)}")
    return [torch.Size(row) for row in table.tolist()]


def _first_dims(value: Any, batch_dims: int) -> Tensor | None:
    """Return the first dims of the rows of an entry as a table; `None` for values, which have no dims."""
    if isinstance(value, Column):
        return value.sizes[:, :batch_dims]
    if isinstance(value, Tensor):
        return torch.tensor(value.shape[1 : 1 + batch_dims], dtype=torch.int64).expand(value.shape[0], -1)
    if value._is_non_tensor:
        return None
    members = value._wrapped_container()._members()
    sizes = [list(member._batch_size[:batch_dims]) for member in members]
    return torch.tensor(sizes, dtype=torch.int64).reshape(len(members), batch_dims)


def _split_rows(value: Any, sizes: list[torch.Size]) -> Sequence[Any]:
    if isinstance(value, Column):
        return value.rows()
    if isinstance(value, Tensor):
        source = getattr(value, "_source", None)
        return [_wrap_row(row, source) for row in value.detach().as_subclass(Tensor).unbind(0)]
    if not value._is_non_tensor:
        return [value._rewrap(member) for member in value._wrapped_container()._members()]
    holders = [value._of(item, size, value._device, None) for item, size in zip(value._value, sizes, strict=True)]
    if value._place is not None:
        for position, holder in enumerate(holders):
            holder._put_at(value._place.at(position), False)
            holder._memmap_prefix = value._memmap_prefix
    return holders


def _wrap_row(row: Tensor, source: Any) -> Tensor:
    return row if source is None else _wrap(row, source)
