"""LazyConcatenatedTensorDict: containers one behind the other along the first batch dim, which are kept as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.parts import JoinedValues, Parts, RowsOfParts
from tensordict.containers.stored import FileSelection, OnDisk, Twin, _Read
from tensordict.core import indexing, pytree, registry
from tensordict.core.contract import Contract, Names, is_node
from tensordict.core.errors import ShapeError
from tensordict.core.indexing import leaf_index, result_size
from tensordict.core.keys import Path
from tensordict.memory.stored_tensors import StoredTensor
from tensordict.ops.copying import TRANSIENT
from tensordict.ops.stacking import cat_containers
from tensordict.ops.writes import Resize, Write

if TYPE_CHECKING:
    pass

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


class _Joint(_Read):
    """The entries; an index along the first dim gives views."""

    __slots__ = ()
    cuts_by_index = True


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
    - What is written in place is written into the parts: `td[i] = row`, `td.set_(key, value)`, `td.mul_(2)`.
    - `select`, `exclude` and `copy` read nothing and give concatenations. Entries that are added, replaced or deleted
      are so in the concatenation only; the parts stay as they are. Its length is changed by :meth:`extend` alone.
    - The results of other operations are in memory, as `TensorDict`s.

    Args:
        parts: the containers, in any sequence, which may load a part when it is asked for it, and may keep it or not.
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
        return RowsOfParts(self._joint, self._rows, path, row).tensor(sample.dtype, sample.device)

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
        added = {name: value for name, value in self._held.items() if not self._is_of_parts(value)}
        if not added:
            return added
        return TensorDict._make(added, self._size, self._device, None)._index(index)._entries

    def _narrowed(self, value: Any, rows: range) -> Any:
        """The same rows of an entry of the parts as its view has."""
        if isinstance(value, JoinedValues):
            return JoinedValues(self._joint, rows, value.path, value.sample)
        if (column := _column_of(value)) is not None:
            return RowsOfParts(self._joint, rows, column.path, column.shape[1:]).tensor(value.dtype, value.device)
        return value._rewrap(value._wrapped_container()._over(rows))

    def extend(self, parts: Sequence[Any], lengths: Iterable[int] | None = None) -> None:
        """Add parts behind the last one. Views that were made before, and nested containers, keep the rows they have.

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
        if self._path or self._rows != range(known.total):
            raise ShapeError(
                "parts are added to the concatenation that has all rows of its parts, and not to a view or a nested "
                "container of it"
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
        return list(self._held)

    def _holds(self, name: str) -> bool:
        return name in self._held

    def _target(self, name: str) -> Any:
        value = self._held[name]
        return value.read() if isinstance(value, JoinedValues) else value

    def _sketch(self, name: str) -> Any:
        value = self._held[name]
        return value.sketch() if isinstance(value, JoinedValues) else super()._sketch(name)

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
            return (FileSelection._of if entries else self._make)(entries, self._size, device, self._names)
        held = {}
        for name, value in entries.items():
            known = self._held[name]
            held[name] = known if isinstance(known, JoinedValues) else value
        view = self._over(self._rows, held)
        view._altered = self._altered or held.keys() != self._held.keys()
        return view

    def _plan_write(self, write: Write, source: Any, prefix: Path = ()) -> None:
        if isinstance(write, Resize):
            self._refuse_size(source)
        super()._plan_write(write, source, prefix)

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
        if type(at) is Tensor and at.dtype in _INTEGERS and at.numel() and self._size[0]:
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

    def _taken(self, number: int, local: Any, position: Any) -> Any:
        """Rows of one part, which are at `position` here."""
        node = self._joint.node(number, self._path)
        if self._is_as_parts():
            return node._index(local)
        added = self._added(position)
        entries = {
            name: added[name] if name in added else self._taken_entry(value, number, local, position)
            for name, value in self._held.items()
        }
        size = (local.shape if isinstance(local, Tensor) else ()) + self._size[1:]
        names = None if self._names is None else [*[None] * (len(size) - len(self._size) + 1), *self._names[1:]]
        return TensorDict._make(entries, torch.Size(size), self._device, names)

    def _taken_entry(self, value: Any, number: int, local: Any, position: Any) -> Any:
        """The same of one entry of the parts."""
        if is_node(value):
            return value._rewrap(value._wrapped_container()._taken(number, local, position))
        rows: Any = _column_of(value) or value
        return rows.of_part(number, local)

    def _gathered(self, at: Tensor) -> Any:
        """The rows at these positions, each read from its part."""
        size = self._size
        positions = at.detach().cpu().numpy().reshape(-1).astype(np.int64)
        low, high = int(positions.min()), int(positions.max())
        if low < -size[0] or high >= size[0]:
            wrong = low if low < -size[0] else high
            raise IndexError(f"index {wrong} is out of bounds for dimension 0 with size {size[0]}")
        positions = np.where(positions < 0, positions + size[0], positions)
        order, groups = self._joint.groups(self._rows.start + positions * self._rows.step)
        taken = [
            self._taken(number, torch.from_numpy(local), torch.from_numpy(positions[order[start:stop]]))
            for number, local, start, stop in groups
        ]
        joined = taken[0] if len(taken) == 1 else cat_containers(taken, 0)
        if at.ndim != 1 or (order[1:] < order[:-1]).any():
            back = np.empty_like(order)
            back[order] = np.arange(len(order))
            joined = joined._index(torch.from_numpy(back).view(at.shape))
        names = None if self._names is None else indexing.renamed(self._names, at, at.ndim + len(size) - 1)
        return self._named(joined, names or [None] * len(joined._batch_size))

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
    return entry if column is None else (column, entry.dtype, entry.device)


def _unpacked(entry: Any) -> Any:
    return entry[0].tensor(*entry[1:]) if type(entry) is tuple else entry


def _column_of(value: object) -> RowsOfParts | None:
    """The rows of parts that a tensor stands for."""
    return value.array if type(value) is StoredTensor and isinstance(value.array, RowsOfParts) else None


registry.speak_for(LazyConcatenatedTensorDict, (OnDisk,))
