"""LazyConcatenatedTensorDict: containers one behind the other along the first batch dim, which are kept as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.on_disk import FileSelection, OnDisk, Twin, _Read
from tensordict.containers.parts import JoinedValues, Parts, RowsOfParts, Taken
from tensordict.core import indices, pytree, registry
from tensordict.core.contract import Contract, Names, is_node
from tensordict.core.exceptions import ShapeError
from tensordict.core.indices import INTEGERS, leaf_index, result_size
from tensordict.core.keys import Path, path_of
from tensordict.memory.stored_tensors import StoredTensor
from tensordict.ops.entries.assigning import Assign
from tensordict.ops.entries.copying import TRANSIENT
from tensordict.ops.entries.write_plans import Resize, Write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tensordict.containers.tensordict_base import TensorDictBase
    from tensordict.core.keys import Key


class _Joint(_Read):
    """The entries; an index along the first dim gives views."""

    __slots__ = ()
    cuts_by_index = True
    owner: LazyConcatenatedTensorDict

    def share_entries(self) -> Mapping[str, Any]:
        # Values, which no tensor can stand for, are not read: `_subset` takes them over as they are.
        return MappingProxyType(self.owner._held)

    def node(self, name: str) -> Any:
        value = self.get(name) if isinstance(self.owner._held.get(name), JoinedValues) else super().node(name)
        return value if isinstance(value, Contract) else None


@pytree.register
@registry.register
class LazyConcatenatedTensorDict(OnDisk):
    """Containers of equal schema one behind the other along the first batch dim, none of which is copied.

    The parts stay where they are, in memory or in files, and are asked for when rows of them are used.

    - `td[i]` is a row of its part, as the part gives it: a view where it holds tensors. A slice, or a `range`, is a
      concatenation again, over the rows that it takes.
    - A list, a tensor or a mask gives a `TensorDict` of these rows in this order; they are read from the parts that
      hold them, and nothing else is.
    - Reading an entry concatenates it, and gives a copy. A nested container is read as such a concatenation.
    - What is written in place is written into the parts: `td[i] = row`, `td.set_(key, value)`, `td.mul_(2)`. In ragged
      entries, assignment, `set_` and `update_` do that; arithmetic in place and `apply_` are refused. Values that are
      no tensors are written as the parts take them: to those loaded from a save, in memory.
    - `select`, `exclude` and `copy` read nothing and give concatenations. Entries that are added, replaced or deleted
      are so in the concatenation only; the parts stay as they are. Its length is changed by :meth:`extend` alone.
    - The results of other operations are in memory, as `TensorDict`s.
    - Where the rows of parts lie that are mapped from files is noted when a list or tensor takes the first of them: a
      mini-batch out of a thousand shards is then gathered as one out of a single folder is. These parts are locked as
      long as the concatenation, and its views, are there.

    Args:
        parts: the containers, in any sequence, which may load a part when it is asked for it; it had better keep it.
            Each has one batch dim at least, and all have the keys, dtypes, devices and shapes of the first, but for the
            number of rows. A part is checked when it is asked for.
        lengths: the number of rows of each; without it, all parts are asked for, and checked, at once.
        template: a container with the schema of the parts, of any number of rows (none will do); without it, the first
            part is asked for.

    Raises:
        ValueError: there is neither a part nor a template, or there are not as many lengths as parts.
        RuntimeError: a part does not have the batch size, the keys, dtypes or shapes of the template; it is named. Also
            later, when it is asked for.

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

    _joint: Parts
    # The rows of the parts that it has, and where in the parts it is.
    _rows: range
    _path: Path
    _held: dict[str, Any]
    # Whether entries were added, replaced or deleted at this level.
    _altered: bool = False

    def __init__(self, parts: Sequence[Any], *, lengths: Iterable[int] | None = None, template: object = None) -> None:
        joined = Parts(parts, lengths, template)
        self._open(joined, range(joined.total), (), joined.template)

    def _open(self, parts: Parts, rows: range, path: Path, template: Any) -> None:
        """Have all entries that the container at `path` of the parts has."""
        self._joint, self._rows, self._path = parts, rows, path
        self._size = torch.Size((len(rows), *template._batch_size[1:]))
        self._take_state(template._device, template._names)
        self._held = {name: self._column(name, value, template) for name, value in template._structure().items()}

    def _take_state(self, device: torch.device | None, names: Names | None) -> None:
        if device is not None:
            self._device = device
        if names is not None:
            self._names = list(names)

    def _column(self, name: str, sample: Any, template: Any) -> Any:
        """The entry of a name, which is as `sample` in the template."""
        path = (*self._path, name)
        if is_node(sample) and not sample._is_non_tensor:
            node = object.__new__(LazyConcatenatedTensorDict)
            node._open(self._joint, self._rows, path, sample._wrapped_container())
            return sample._rewrap(node)
        if isinstance(sample, Contract) or sample.is_nested or sample.layout is not torch.strided:
            return JoinedValues(self._joint, self._rows, path, sample)
        row = tuple(template._shape_of(name)[1:])
        return RowsOfParts(self._joint, self._rows, path, row, sample.dtype, sample.device).tensor()

    def _over(self, rows: range, held: dict[str, Any] | None = None) -> LazyConcatenatedTensorDict:
        """A view of some of the rows; `held` are its entries, those of this one by default."""
        view = object.__new__(LazyConcatenatedTensorDict)
        view._joint, view._rows, view._path, view._altered = self._joint, rows, self._path, self._altered
        view._size = torch.Size((len(rows), *self._size[1:]))
        view._take_state(self._device, self._names)
        if held is None:
            own = self._rows
            first = (rows.start - own.start) // own.step if len(rows) else 0
            step = rows.step // own.step
            added = self._added(slice(first, first + len(rows) * step, step))
            held = {
                name: added[name] if name in added else self._narrowed(value, rows)
                for name, value in self._held.items()
            }
        view._held = held
        return view

    def _is_of_parts(self, value: Any) -> bool:
        """Whether an entry is one of the parts, for the same rows, and none that was added here."""
        if isinstance(value, JoinedValues):
            return True
        node = value._wrapped_container() if isinstance(value, Contract) else None
        own = node if isinstance(node, LazyConcatenatedTensorDict) else None
        rows = own._rows if own is not None else getattr(_column_of(value), "rows", None)
        return rows == self._rows and (own is None or own._joint is self._joint)

    def _added(self, index: Any) -> Mapping[str, Any]:
        """The entries that were added here, indexed along the batch."""
        if not self._altered:
            return {}
        added = {name: value for name, value in self._held.items() if not self._is_of_parts(value)}
        if not added:
            return added
        return TensorDict._make(added, self._size, self._device, None)._index(index)._entries

    def _narrowed(self, value: Any, rows: range) -> Any:
        """The same rows of an entry of the parts as its view has."""
        if isinstance(value, JoinedValues):
            return JoinedValues(self._joint, rows, value.path, value.sample)
        if (column := _column_of(value)) is not None:
            return column.over(rows).tensor()
        return value._rewrap(value._wrapped_container()._over(rows))

    def extend(self, parts: Sequence[Any], lengths: Iterable[int] | None = None) -> None:
        """Add parts behind the last one. Views that were made before, and nested containers, keep the rows they have.

        Other threads may index it meanwhile. One that reads all of an entry, or of the container, takes a view first
        (`td[:]`), of the rows that there are then.

        Args:
            parts: as those that the concatenation was made of.
            lengths: the number of rows of each; without it, all of them are asked for, and checked, at once.

        Raises:
            RuntimeError: this is a view of some rows or a nested container, or entries were added, replaced or deleted,
                or a part does not fit; nothing has been added then.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict, lazy_cat
            >>> td = lazy_cat([TensorDict(a=torch.zeros(2), batch_size=2)])
            >>> before = td[:]
            >>> td.extend([TensorDict(a=torch.ones(1), batch_size=1)])
            >>> td["a"], before["a"]
            (tensor([0., 0., 1.]), tensor([0., 0.]))
        """
        known = self._joint
        with known.growing.held:
            if self._path or self._rows != range(known.total):
                raise ShapeError(
                    "parts are added to the concatenation that has all rows of its parts, and not to a view or a "
                    "nested container of it"
                )
            if not self._is_as_parts():
                raise ShapeError(
                    "parts cannot be added to a concatenation whose entries are no longer those of its parts: what was "
                    "added has no rows for them. Make the changes in td.copy()"
                )
            known.extend(parts, lengths)
            grown = self._over(range(known.total))
            if self._locked:
                grown._lock_tree()
            self._rows, self._size, self._held = grown._rows, grown._size, grown._held

    # --- the state --------------------------------------------------------------------------------------------------

    @property
    def parts(self) -> Sequence[Any]:
        """The parts, each of which is asked for when it is read; a view has all parts of what it is a view of."""
        return self._joint

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _Joint(self)

    @property
    def _batch_size(self) -> torch.Size:
        return self._size

    @_batch_size.setter
    def _batch_size(self, size: torch.Size) -> None:
        self._refuse_size(size)

    def _refuse_size(self, size: torch.Size) -> None:
        if size != self._size:
            raise ShapeError(
                f"the batch size {list(self._size)} of a lazy concatenation follows from those of its parts and "
                f"cannot become {list(size)}: extend adds parts, and to_tensordict() gives a copy that can have any"
            )

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in TRANSIENT}
        # What stands for tensors has no pickle of its own.
        state["_held"] = {name: _packed(value) for name, value in self._held.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._held = {name: _unpacked(value) for name, value in self._held.items()}
        if self._locked:
            self._lock_tree()

    # --- the entries ------------------------------------------------------------------------------------------------

    def _listed(self) -> list[str]:
        return list(self._held.keys())

    def _holds(self, name: str) -> bool:
        return name in self._held

    def _target(self, name: str) -> Any:
        value = self._held.get(name)
        if value is None:
            raise KeyError(name)
        return value.read() if isinstance(value, JoinedValues) else value

    def _with_values(self, name: str) -> Any:
        # A sketch says `<values of 2 parts>` of a value.
        return self._entries[name] if isinstance(self._held[name], JoinedValues) else self._sketch(name)

    def _sketch(self, name: str) -> Any:
        value = self._held[name]
        return value.sketch(self._size, self._device) if isinstance(value, JoinedValues) else super()._sketch(name)

    def _put(self, entries: Mapping[str, Any]) -> None:
        self._altered = True
        self._held.update(entries)

    def _drop(self, name: str) -> None:
        del self._held[name]
        self._altered = True

    def _is_as_parts(self) -> bool:
        """Whether the entries are those of the parts, none added, replaced or deleted."""
        if self._altered:
            return False
        nodes = (value._wrapped_container() for value in self._held.values() if is_node(value))
        return all(node._is_as_parts() for node in nodes)

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Any:
        if device != self._device:
            return FileSelection._of(entries, self._size, device, self._names)
        view = self._over(self._rows, entries)
        view._altered = self._altered or entries.keys() != self._held.keys()
        return view

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        if isinstance(write, Resize):
            self._refuse_size(source)
        # A copy, as other threads may add entries meanwhile.
        read = [name for name, value in self._held.copy().items() if isinstance(value, JoinedValues)]
        if read and write.inplace and not isinstance(write, Resize):
            source = self._plan_values(write, source, prefix, read)
            if isinstance(source, dict) and not source:
                return
        super()._plan_write(write, source, prefix)

    def _plan_values(self, write: Write, source: Any, prefix: Path, read: list[str]) -> Any:
        """Have entries that no tensor stands for written where they are read, and then to the parts; gives the rest."""
        rest: Any = source
        if isinstance(source, (Contract, Mapping)):
            items = list(rest.items())
            theirs = {key: value for key, value in items if path_of(key)[0] in read}
            rest = {key: value for key, value in items if key not in theirs}
            read, source = [name for name in read if any(path_of(key)[0] == name for key in theirs)], theirs
        if read:
            self._joint.refuse_values(self._path, {name: self._held[name] for name in read})
            values = TensorDict._make({name: self._target(name) for name in read}, self._size, self._device, None)
            values._plan_write(write, source, prefix)
            touched = torch.ones(self._size, dtype=torch.bool)
            if isinstance(write, Assign) and write.indexed == self._size:
                touched.zero_()[write.at] = True
            write.plan.steps.append(
                (self._write_values, (values, touched.flatten(1).any(1) if touched.ndim > 1 else touched))
            )
        return rest

    def _write_values(self, values: TensorDict, touched: Tensor) -> None:
        """Write entries that were read to the parts that have rows that were touched."""
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
            row = self._row(first % size[0])
            return row._index(rest) if rest else row
        if type(at) is slice:
            result_size(at, size)
            return self._like(self._over(self._rows[at]))
        if type(at) is Tensor and at.dtype in INTEGERS and at.numel() and self._size[0]:
            return self._gathered(at)
        return super()._index(index)

    def _like(self, view: Any) -> Any:
        """A view, locked as this is."""
        if self._locked:
            view._lock_tree()
            view._undo = None
        return view

    def _row(self, position: int) -> Any:
        number, local = self._joint.place(self._rows[position])
        return self._named(self._taken(number, local, position), (self._names or [None])[1:])

    def _taken(self, number: int, local: int, position: int) -> Any:
        """A row of one part, which is at `position` here."""
        if self._is_as_parts():
            return self._joint.node(number, self._path)._index(local)
        added = self._added(position)
        entries = {
            name: added[name] if name in added else self._taken_entry(value, number, local, position)
            for name, value in self._held.items()
        }
        names = None if self._names is None else self._names[1:]
        return TensorDict._make(entries, self._size[1:], self._device, names)

    def _taken_entry(self, value: Any, number: int, local: int, position: int) -> Any:
        """The same of one entry of the parts."""
        if is_node(value):
            return value._rewrap(value._wrapped_container()._taken(number, local, position))
        rows: Any = _column_of(value) or value
        return rows.of_part(number, local)

    def _gathered(self, at: Tensor) -> Any:
        """The rows at these positions, each read from its part."""
        size = self._size
        positions = at.detach().cpu().numpy().reshape(-1).astype(np.int64, copy=False)
        low, high = int(positions.min()), int(positions.max())
        if low < -size[0] or high >= size[0]:
            wrong = low if low < -size[0] else high
            raise IndexError(f"index {wrong} is out of bounds for dimension 0 with size {size[0]}")
        if low < 0:
            positions = np.where(positions < 0, positions + size[0], positions)
        own = self._rows
        if own.start or own.step != 1:
            positions = own.start + positions * own.step
        taken = Taken(self._joint, positions)
        taken.hold()
        if self._joint.in_flight > 1:
            taken.read_ahead(list(self._all_of_parts()))
        return self._gathered_rows(taken, at)

    def _all_of_parts(self) -> Iterator[RowsOfParts | JoinedValues]:
        """The entries of the parts, those of nested containers, too."""
        for value in self._held.values():
            rows = value if isinstance(value, JoinedValues) else _column_of(value)
            if rows is not None:
                yield rows
            elif self._is_of_parts(value):
                yield from value._wrapped_container()._all_of_parts()

    def _gathered_rows(self, taken: Taken, at: Tensor) -> Any:
        added = self._added(at)
        entries = {}
        for name, value in self._held.items():
            column = _column_of(value)
            if name in added:
                entries[name] = added[name]
            elif column is not None:
                rows = column.gathered(taken)
                entries[name] = rows if at.ndim == 1 else rows.view(*at.shape, *column.shape[1:])
            elif isinstance(value, JoinedValues):
                entries[name] = value.gathered(taken, at.shape)
            else:
                entries[name] = value._rewrap(value._wrapped_container()._gathered_rows(taken, at))
        size = at.shape + self._size[1:]
        names = None if self._names is None else indices.rename_dims(self._names, at, len(size))
        return TensorDict._make(entries, size, self._device, names)

    def _named(self, result: Any, names: Names) -> Any:
        """What was taken of parts, with the names of dims that it has here."""
        names = [*names, *[None] * (len(result._batch_size) - len(names))]
        if result.names != names:
            result = result.copy()
            result._name_tree(names)
        return result


class _UnreadConcatenation(Twin, LazyConcatenatedTensorDict):
    """See `Twin`."""


LazyConcatenatedTensorDict._twin = _UnreadConcatenation


def _packed(entry: Any) -> Any:
    column = _column_of(entry)
    return column or entry


def _unpacked(entry: Any) -> Any:
    return entry.tensor() if isinstance(entry, RowsOfParts) else entry


def _column_of(value: object) -> RowsOfParts | None:
    """The rows of parts that a tensor stands for."""
    return value.array if type(value) is StoredTensor and isinstance(value.array, RowsOfParts) else None


registry.speak_for(LazyConcatenatedTensorDict, (OnDisk,))
