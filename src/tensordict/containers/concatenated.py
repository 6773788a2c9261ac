"""LazyConcatenatedTensorDict: several containers joined along the first batch dim without a copy, for `lazy_cat` and
data sets of many shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.on_disk import FileSelection, StoredContainer, _ReadEntries
from tensordict.containers.parts import JoinedValues, Parts, RowRequest, RowsOfParts
from tensordict.containers.tensordict_base import FixedSize
from tensordict.core import indices, pytree, registry
from tensordict.core.contract import Contract, Names, is_node
from tensordict.core.exceptions import ShapeError
from tensordict.core.indices import INTEGERS, leaf_index, result_size
from tensordict.core.keys import Path, path_of
from tensordict.memory.stored_tensors import StoredTensor, Values
from tensordict.ops.entries.assigning import Assign
from tensordict.ops.entries.copying import TRANSIENT
from tensordict.ops.entries.write_plans import Resize, Write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict.containers.tensordict_base import TensorDictBase
    from tensordict.core.keys import Key


# The rows of a block of a view whose rows are in another order than in the parts.
_BLOCK_ROWS = 1 << 16


class _ConcatenatedEntries(_ReadEntries):
    """The entries of a concatenation. Indexing along the first dim gives views."""

    __slots__ = ()
    cuts_by_index = True
    owner: LazyConcatenatedTensorDict

    def share_entries(self) -> Mapping[str, Any]:
        # Returns `JoinedValues` unread: `_subset` puts them into the new concatenation.
        return MappingProxyType(self.owner._held)

    def node(self, name: str) -> Any:
        value = self.get(name) if isinstance(self.owner._held.get(name), JoinedValues) else super().node(name)
        return value if isinstance(value, Contract) else None


@pytree.register
@registry.register
class LazyConcatenatedTensorDict(FixedSize, StoredContainer):
    """Containers of equal schema, joined along the first batch dim without a copy.

    The parts stay in memory or in their files. The concatenation loads a part when its rows are used.

    - `td[i]` indexes the part with that row, and returns a view if the part holds tensors. A slice or a `range` gives
      another concatenation, over the selected rows.
    - A list, a tensor or a mask gives a `TensorDict` of these rows in this order. It reads these rows only.
    - Reading an entry concatenates it and returns a copy. A nested container is read as a concatenation.
    - Writing in place writes into the parts: `td[i] = row`, `td.set_(key, value)`, `td.mul_(2)`. Ragged entries support
      assignment, `set_` and `update_`; arithmetic in place and `apply_` raise. Non-tensor values are written with the
      rules of the parts: parts loaded from a save change in memory only.
    - `select`, `exclude` and `copy` read nothing and give concatenations. Adding, replacing or deleting an entry
      changes the concatenation and leaves the parts alone. Only :meth:`extend` changes its length.
    - Other operations return `TensorDict`s in memory.
    - When a list or tensor first selects rows of a part that is mapped from files, the concatenation records the
      addresses of its rows. Mini-batches from a thousand shards are then gathered as fast as from one folder. Such
      parts stay locked while the concatenation or one of its views exists.

    Args:
        parts: a sequence of containers. It may load a part when it is indexed, and should then keep the part. Each has
            at least one batch dim; all have the keys, dtypes, devices and shapes of the first, except for the number
            of rows. A part is checked when it is loaded.
        lengths: the number of rows of each part. Without it, all parts are loaded and checked at once.
        template: a container with the schema of the parts and any number of rows, even 0. Without it, the first part
            is loaded.

    Raises:
        ValueError: there is neither a part nor a template, or the number of lengths differs from the number of parts.
        RuntimeError: the batch size, keys, dtypes or shapes of a part differ from the template. The error names the
            part. It may come later, when the part is loaded.

    Example:
        >>> import torch
        >>> from tensordict import LazyConcatenatedTensorDict, TensorDict
        >>> parts = [TensorDict(a=torch.arange(n), batch_size=n) for n in (2, 3)]
        >>> td = LazyConcatenatedTensorDict(parts)
        >>> td.batch_size, td["a"], td[[4, 0, 2]]["a"]
        (torch.Size([5]), tensor([0, 1, 0, 1, 2]), tensor([2, 0, 0]))
        >>> td[1:3]["a"] += 10
        >>> parts[0]["a"]
        tensor([0, 1])
        >>> td[1:3] = {"a": torch.tensor([7, 8])}
        >>> parts[0]["a"], parts[1]["a"]
        (tensor([0, 7]), tensor([8, 1, 2]))
    """

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __getitem__(self, index: slice | range) -> LazyConcatenatedTensorDict: ...
        @overload
        def __getitem__(self, index: int) -> TensorDictBase: ...
        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: Any) -> TensorDict: ...
        def __getitem__(self, index: object) -> Any: ...
        def __iter__(self) -> Iterator[TensorDictBase]: ...  # type: ignore[override]
        def unbind(self, dim: int = 0) -> tuple[TensorDictBase, ...]: ...  # type: ignore[override]
        def split(  # type: ignore[override]
            self, split_size: int | Sequence[int] | Tensor, dim: int = 0
        ) -> tuple[LazyConcatenatedTensorDict, ...]: ...
        def chunk(self, chunks: int, dim: int = 0) -> tuple[LazyConcatenatedTensorDict, ...]: ...  # type: ignore[override]
        def copy(self) -> LazyConcatenatedTensorDict: ...
        def select(self, *keys: object, **options: object) -> LazyConcatenatedTensorDict: ...
        def exclude(self, *keys: object, **options: object) -> LazyConcatenatedTensorDict: ...

    _size_reason = (
        "a lazy concatenation",
        "the batch sizes of its parts",
        "extend adds parts, and to_tensordict() gives a copy of any batch size",
    )
    _joint: Parts
    # The rows of the parts that this container shows, and its path in the parts if it is nested.
    # Views of chosen rows have an array of their numbers in the parts.
    _rows: range | Values
    _path: Path
    # `StoredTensor`s over `RowsOfParts`, `JoinedValues`, nested concatenations, and entries that were added.
    _held: dict[str, Any]
    # True if entries were added, replaced or deleted at this level.
    _altered: bool = False
    _shows_rows = True

    def __init__(self, parts: Sequence[Any], *, lengths: Iterable[int] | None = None, template: object = None) -> None:
        joined = Parts(parts, lengths, template)
        self._open(joined, range(joined.total), (), joined.template)

    def _open(self, parts: Parts, rows: range | Values, path: Path, template: Any) -> None:
        """Initialize this container with all entries at `path` of the parts."""
        self._joint, self._rows, self._path = parts, rows, path
        self._size = torch.Size((len(rows), *template._batch_size[1:]))
        self._take_state(template._device, template._names)
        self._held = {name: self._open_entry(name, value, template) for name, value in template._structure().items()}

    def _take_state(self, device: torch.device | None, names: Names | None) -> None:
        if device is not None:
            self._device = device
        if names is not None:
            self._names = list(names)

    def _open_entry(self, name: str, sample: Any, template: Any) -> Any:
        """Return the entry `name` of all parts, without reading it. `sample` is that entry of the template."""
        path = (*self._path, name)
        if is_node(sample) and not sample._is_non_tensor:
            node = object.__new__(LazyConcatenatedTensorDict)
            node._open(self._joint, self._rows, path, sample._wrapped_container())
            return sample._rewrap(node)
        if isinstance(sample, Contract) or sample.is_nested or sample.layout is not torch.strided:
            return JoinedValues(self._joint, self._rows, path, sample)
        row = tuple(template._shape_of(name)[1:])
        return RowsOfParts(self._joint, self._rows, path, row, sample.dtype, sample.device).tensor()

    def _view_rows(
        self, rows: range | Values, held: dict[str, Any] | None = None, at: Any = slice(None)
    ) -> LazyConcatenatedTensorDict:
        """Return a view of the rows at `at`, whose numbers in the parts are `rows`. `held` replaces its entries."""
        view = object.__new__(LazyConcatenatedTensorDict)
        view._joint, view._rows, view._path, view._altered = self._joint, rows, self._path, self._altered
        view._size = torch.Size((len(rows), *self._size[1:]))
        view._take_state(self._device, self._names)
        if held is None:
            added = self._index_new_entries(at)
            held = {
                name: added[name] if name in added else self._narrow_entry(value, rows, at)
                for name, value in self._held.items()
            }
        view._held = held
        return view

    def _is_of_parts(self, value: Any) -> bool:
        """Return whether an entry comes from the parts, for the same rows, and was not added here."""
        if isinstance(value, JoinedValues):
            return True
        node = value._wrapped_container() if isinstance(value, Contract) else None
        own = node if isinstance(node, LazyConcatenatedTensorDict) else None
        rows = own._rows if own is not None else getattr(_column_of(value), "rows", None)
        same = rows is self._rows or (type(rows) is range and type(self._rows) is range and rows == self._rows)
        return same and (own is None or own._joint is self._joint)

    def _index_new_entries(self, index: Any) -> Mapping[str, Any]:
        """Index the entries that were added here."""
        if not self._altered:
            return {}
        added = {name: value for name, value in self._held.items() if not self._is_of_parts(value)}
        if not added:
            return added
        return TensorDict._make(added, self._size, self._device, None)._index(index)._entries

    def _narrow_entry(self, value: Any, rows: range | Values, at: Any) -> Any:
        """Restrict an entry of the parts to the rows of a view."""
        if isinstance(value, JoinedValues):
            return JoinedValues(self._joint, rows, value.path, value.sample)
        if (column := _column_of(value)) is not None:
            return column.over(rows).tensor()
        return value._rewrap(value._wrapped_container()._view_rows(rows, at=at))

    def extend(self, parts: Sequence[Any], lengths: Iterable[int] | None = None) -> None:
        """Add parts behind the last one. Existing views and nested containers keep their rows.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict, lazy_cat
            >>> td = lazy_cat([TensorDict(a=torch.zeros(2), batch_size=2)])
            >>> before = td[:]
            >>> td.extend([TensorDict(a=torch.ones(1), batch_size=1)])
            >>> td["a"], before["a"]
            (tensor([0., 0., 1.]), tensor([0., 0.]))

        Other threads may index the concatenation meanwhile. A thread that reads a whole entry, or the whole container,
        should first take a view (`td[:]`), whose length is fixed.

        Args:
            parts: further containers, as for the constructor.
            lengths: the number of rows of each. Without it, all of them are loaded and checked at once.

        Raises:
            RuntimeError: this is a view of some rows or a nested container; entries were added, replaced or deleted; or
                a part does not fit. No part is added then.
        """
        known = self._joint
        with known.growing.held:
            if self._path or type(self._rows) is not range or self._rows != range(known.total):
                raise ShapeError(
                    "parts cannot be added to a view or a nested container of a concatenation: add them to the "
                    "concatenation that has all rows of its parts"
                )
            if not self._has_part_entries_only():
                raise ShapeError(
                    "parts cannot be added after entries of the concatenation were added, replaced or deleted: an "
                    "added entry has no rows for new parts. Make such changes in td.copy()"
                )
            known.extend(parts, lengths)
            grown = self._view_rows(range(known.total))
            if self._locked:
                grown._lock_tree()
            self._rows, self._size, self._held = grown._rows, grown._size, grown._held

    # --- the state --------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Sequence[Any]:
        """The sequence of parts. Indexing it loads a part. A view has all parts of its concatenation."""
        return self._joint

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _ConcatenatedEntries(self)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in TRANSIENT}
        # A `StoredTensor` cannot be pickled; its array can.
        state["_held"] = {name: _column_of(value) or value for name, value in self._held.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._held = {name: _unpack_entry(value) for name, value in self._held.items()}
        if self._locked:
            self._lock_tree()

    # --- the entries ------------------------------------------------------------------------------------------------

    def _list_names(self) -> list[str]:
        return list(self._held.keys())

    def _holds(self, name: str) -> bool:
        return name in self._held

    def _get_unread(self, name: str) -> Any:
        value = self._held.get(name)
        if value is None:
            raise KeyError(name)
        return value.read() if isinstance(value, JoinedValues) else value

    def _with_values(self, name: str) -> Any:
        # `_sketch` would replace a value by `<values of 2 parts>`.
        return self._entries[name] if isinstance(self._held[name], JoinedValues) else self._sketch(name)

    def _sketch(self, name: str) -> Any:
        value = self._held[name]
        return value.sketch(self._size, self._device) if isinstance(value, JoinedValues) else super()._sketch(name)

    def _preview(self, name: str) -> str:
        value = self._held[name]
        return value.preview() if isinstance(value, JoinedValues) else ""

    def _write_entries(self, entries: Mapping[str, Any]) -> None:
        self._altered = True
        self._held.update(entries)

    def _delete_entry(self, name: str) -> None:
        del self._held[name]
        self._altered = True

    def _has_part_entries_only(self) -> bool:
        """Return whether all entries come from the parts: none was added, replaced or deleted."""
        if self._altered:
            return False
        nodes = (value._wrapped_container() for value in self._held.values() if is_node(value))
        return all(node._has_part_entries_only() for node in nodes)

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Any:
        if device != self._device:
            return FileSelection._of(entries, self._size, device, self._names)
        view = self._view_rows(self._rows, entries)
        view._altered = self._altered or entries.keys() != self._held.keys()
        return view

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        # The copy allows other threads to add entries meanwhile.
        read = [name for name, value in self._held.copy().items() if isinstance(value, JoinedValues)]
        if read and write.inplace and not isinstance(write, Resize):
            source = self._plan_values(write, source, prefix, read)
            if isinstance(source, dict) and not source:
                return
        super()._plan_write(write, source, prefix)

    def _plan_values(self, write: Write, source: Any, prefix: Path, read: list[str]) -> Any:
        """Plan a write to the `JoinedValues` named in `read`, and return the rest of `source`.

        The write changes copies in memory. A later step of the plan writes their changed rows to the parts.
        """
        rest: Any = source
        if isinstance(source, (Contract, Mapping)):
            items = list(rest.items())
            theirs = {key: value for key, value in items if path_of(key)[0] in read}
            rest = {key: value for key, value in items if key not in theirs}
            read, source = [name for name in read if any(path_of(key)[0] == name for key in theirs)], theirs
        if read:
            self._joint.refuse_values(self._path, {name: self._held[name] for name in read})
            values = TensorDict._make({name: self._get_unread(name) for name in read}, self._size, self._device, None)
            values._plan_write(write, source, prefix)
            touched = torch.ones(self._size, dtype=torch.bool)
            if isinstance(write, Assign) and write.indexed == self._size:
                touched.zero_()[write.at] = True
            write.plan.steps.append(
                (self._write_values, (values, touched.flatten(1).any(1) if touched.ndim > 1 else touched))
            )
        return rest

    def _write_values(self, values: TensorDict, touched: Tensor) -> None:
        """Write the rows marked in `touched` from `values` to their parts."""
        self._joint.refuse_read_only(self._path)
        for number, local, at in self._joint.pieces(self._rows):
            if touched[at].any():
                self._joint.node(number, self._path)[local] = values._index(at)

    # --- rows -------------------------------------------------------------------------------------------------------

    def _index(self, index: Any) -> Any:
        size = self._size
        if type(index) is range and index.step > 0 and index.start >= 0:
            index = slice(index.start, index.stop, index.step) if index.stop <= size[0] else index
        at = leaf_index(index, size)
        first, rest = (at[0], at[1:]) if type(at) is tuple and at else (at, ())
        if type(first) is int:
            result_size(first, size)
            position = first % size[0]
            number, local = self._joint.place(int(self._rows[position]))
            row = self._with_names(self._read_row(number, local, position), (self._names or [None])[1:])
            return row._index(rest) if rest else row
        if type(at) is slice:
            result_size(at, size)
            return self._lock_view(self._view_rows(self._rows[at], at=at))
        if type(at) is Tensor and at.dtype in INTEGERS and at.numel() and self._size[0]:
            return self._gather_rows(at)
        return super()._index(index)

    def _view_at(self, at: Tensor) -> Any:
        """Return a view of the rows at these positions, which are 0 or more, in this order."""
        positions = at.detach().cpu().numpy()
        own = self._rows
        if not len(positions):
            return self._lock_view(self._view_rows(range(0), at=slice(0, 0)))
        numbers = own[positions] if isinstance(own, np.ndarray) else own.start + positions * own.step
        return self._lock_view(self._view_rows(numbers, at=at))

    def _row_blocks(self) -> list[slice]:
        """Return runs of rows that lie in one part each; runs of a fixed length if the rows are in another order."""
        rows = self._rows
        if isinstance(rows, np.ndarray) and (rows[1:] <= rows[:-1]).any():
            return [slice(at, min(at + _BLOCK_ROWS, len(rows))) for at in range(0, len(rows), _BLOCK_ROWS)]
        if type(rows) is range and rows.step == 1:
            cuts = np.unique(self._joint.starts_array.clip(rows.start, rows.stop)) - rows.start
            return list(map(slice, cuts[:-1].tolist(), cuts[1:].tolist()))
        stops = [len(at) if isinstance(at, Tensor) else at.stop - at.start for *_, at in self._joint.pieces(rows)]
        ends = list(accumulate(stops))
        return [slice(end - count, end) for end, count in zip(ends, stops, strict=True)]

    def _lock_view(self, view: Any) -> Any:
        """Lock a view if this container is locked."""
        if self._locked:
            view._lock_tree()
            view._undo = None
        return view

    def _read_row(self, number: int, local: int, position: int) -> Any:
        """Return row `local` of part `number`, which is row `position` of this container."""
        if self._has_part_entries_only():
            return self._joint.node(number, self._path)._index(local)
        added = self._index_new_entries(position)
        entries = {
            name: added[name] if name in added else self._read_row_of_entry(value, number, local, position)
            for name, value in self._held.items()
        }
        names = None if self._names is None else self._names[1:]
        return TensorDict._make(entries, self._size[1:], self._device, names)

    def _read_row_of_entry(self, value: Any, number: int, local: int, position: int) -> Any:
        """Return that row of one entry of the parts."""
        if is_node(value):
            return value._rewrap(value._wrapped_container()._read_row(number, local, position))
        rows: Any = _column_of(value) or value
        return rows.index_part(number, local)

    def _gather_rows(self, at: Tensor) -> Any:
        """Read the rows at these positions from their parts."""
        size = self._size
        positions = at.detach().cpu().numpy().reshape(-1).astype(np.int64, copy=False)
        low, high = int(positions.min()), int(positions.max())
        if low < -size[0] or high >= size[0]:
            wrong = low if low < -size[0] else high
            raise IndexError(f"index {wrong} is out of bounds for dimension 0 with size {size[0]}")
        if low < 0:
            positions = np.where(positions < 0, positions + size[0], positions)
        own = self._rows
        if isinstance(own, np.ndarray):
            positions = own[positions]
        elif own.start or own.step != 1:
            positions = own.start + positions * own.step
        request = RowRequest(self._joint, positions)
        request.hold(self._part_entries)
        if self._joint.in_flight > 1:
            request.prefetch(list(self._part_entries()))
        return self._gather_entries(request, at)

    def _part_entries(self) -> Iterator[RowsOfParts | JoinedValues]:
        """Yield the entries that come from the parts, nested ones included."""
        for value in self._held.values():
            rows = value if isinstance(value, JoinedValues) else _column_of(value)
            if rows is not None:
                yield rows
            elif self._is_of_parts(value):
                yield from value._wrapped_container()._part_entries()

    def _count_rows_by_part(self, positions: Values) -> tuple[list[int], list[int]]:
        """Return the numbers of the parts that have the rows at these positions, in the order in which they come, and
        the number of all rows of each of them."""
        own = self._rows
        rows = own[positions] if isinstance(own, np.ndarray) else own.start + positions * own.step
        starts = self._joint.starts_array
        numbers, firsts = np.unique(starts.searchsorted(rows, "right") - 1, return_index=True)
        numbers = numbers[np.argsort(firsts)]
        return numbers.tolist(), (starts[numbers + 1] - starts[numbers]).tolist()

    def _row_nbytes(self) -> int:
        """Return the bytes of the tensors of one row."""
        return sum(entry.row_nbytes for entry in self._part_entries() if isinstance(entry, RowsOfParts))

    def _fetch_part(self, number: int) -> Any:
        """Fetch the entries of a part over the network. Its rows are read without it while the result is held."""
        part = self._joint[number]
        others = self._joint.fetch(self._part_entries(), number, slice(None))
        # Arrays of other formats return what they fetched.
        return part, [leaf.array.fetch() for leaf in others if hasattr(getattr(leaf, "array", None), "fetch")]

    def _gather_entries(self, request: RowRequest, at: Tensor) -> Any:
        added = self._index_new_entries(at)
        entries = {}
        for name, value in self._held.items():
            column = _column_of(value)
            if name in added:
                entries[name] = added[name]
            elif column is not None:
                rows = column.gather(request)
                entries[name] = rows if at.ndim == 1 else rows.view(*at.shape, *column.shape[1:])
            elif isinstance(value, JoinedValues):
                entries[name] = value.gather(request, at.shape)
            else:
                entries[name] = value._rewrap(value._wrapped_container()._gather_entries(request, at))
        size = at.shape + self._size[1:]
        names = None if self._names is None else indices.rename_dims(self._names, at, len(size))
        return TensorDict._make(entries, size, self._device, names)

    def _with_names(self, result: Any, names: Names) -> Any:
        """Give a result the dim names of this container. Copies it first, as it may belong to a part."""
        names = [*names, *[None] * (len(result._batch_size) - len(names))]
        if result.names != names:
            result = result.copy()
            result._name_tree(names)
        return result


def _unpack_entry(entry: Any) -> Any:
    return entry.tensor() if isinstance(entry, RowsOfParts) else entry


def _column_of(value: object) -> RowsOfParts | None:
    """Return the `RowsOfParts` behind a `StoredTensor`; `None` for other entries."""
    return value.array if type(value) is StoredTensor and isinstance(value.array, RowsOfParts) else None


registry.speak_for(LazyConcatenatedTensorDict, (StoredContainer,))
