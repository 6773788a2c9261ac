"""OnDisk: containers whose tensors stay in a file until they are used; FileSelection, some entries of one; FileView."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from tensordict.containers.dense import TensorDict
from tensordict.containers.tensordict_base import GivesTensorDicts
from tensordict.core import indices, pytree, ragged, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, EntryStore, Names, is_node, state_of
from tensordict.core.exceptions import ShapeError, UnsupportedEntryError, refuse_stored
from tensordict.core.indices import INTEGERS, checked_size, is_basic, leaf_index, result_size
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.ragged import REFUSALS
from tensordict.io.stores.array_store import Item, Pick, StaleError
from tensordict.memory.stored_tensors import SPREAD, Rows, RowsArray, Selection, StoredTensor, in_memory
from tensordict.ops.entries.assigning import Assign
from tensordict.ops.entries.write_plans import Write

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.containers.tensordict_base import TensorDictBase
    from tensordict.core.keys import Key

_NO_SIZE = torch.Size(())


class _Read(EntryStore, MutableMapping[str, Any]):  # guarded: `_target` asks
    """The entries: tensors that are read when they are asked for."""

    __slots__ = ("owner", "source")

    def __init__(self, owner: OnDisk) -> None:
        self.owner = owner
        self.source = owner._source

    def __getitem__(self, name: str) -> Any:
        try:
            return in_memory(self.owner._target(name))
        except StaleError:
            # What it is was known from before, and another process has replaced it.
            return in_memory(self.owner._target(name))

    def __setitem__(self, name: str, value: object) -> None:
        self.owner._put({name: value})

    def update(self, other: Any = (), /, **kwargs: Any) -> None:
        """Write several entries, or none when one of them cannot be written."""
        self.owner._put(dict(other, **kwargs))

    def __delitem__(self, name: str) -> None:
        self.owner._drop(name)

    def refuse_deletion(self) -> None:
        self.owner._refuse_deletion()

    def __iter__(self) -> Iterator[str]:
        return iter(self.owner._listed())

    def __len__(self) -> int:
        return len(self.owner._listed())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.owner._holds(name)

    def __repr__(self) -> str:
        return repr(self.owner._listed())

    def structure(self) -> Mapping[str, Any]:
        return {name: self.owner._sketch(name) for name in self.owner._listed()}

    def structure_with_values(self) -> Mapping[str, Any]:
        return {name: self.owner._with_values(name) for name in self.owner._listed()}

    def writable(self) -> Mapping[str, Any]:
        return _Unread(self.owner)

    def on_read(self, fn: Callable[..., Any], position: int, keep: bool) -> Callable[..., Any]:
        # Leaf by leaf, so that no more than the results are in memory. An index takes its part of the file; any other
        # function is given what is read.
        return self._part(fn) if isinstance(fn, itemgetter) else _OnRead(fn, position, keep)

    def together(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None] | None:
        if fn is None:
            return self.owner._together(None)
        return self.owner._together(self._part(fn).pick if isinstance(fn, itemgetter) else _all_of)

    def _part(self, fn: itemgetter[Any]) -> _LeafIndex:
        reduced: Any = fn.__reduce__()
        return _LeafIndex(reduced[1][0], self.owner._batch_size)

    def write_back(self, restored: Any, leaves: set[Any]) -> set[Any]:
        # What is in memory shows no changes by where it is: what fits its entry is compared and written into it.
        written = set()
        for key, value in restored.items(True, True):
            if key not in leaves or not isinstance(value, Tensor):
                continue
            current = self.owner._peek_unread(path_of(key))
            if type(current) is StoredTensor and current.shape == value.shape and current.dtype is value.dtype:
                written.add(key)
                if not torch.equal(current, value):
                    current.copy_(value)
        return written

    def node(self, name: str) -> Any:
        value = self.owner._sketch(name) if self.owner._holds(name) else None
        return value if isinstance(value, Contract) else None


class _Unread(_Read):
    """The entries with tensors that stand for those in the file: what is written into them is written to it."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        value = self.owner._target(name)
        if ragged.is_ragged(value):
            # For `refuse_stored`: what is written into it is written to no store.
            value._name_in_store = name  # type: ignore[attr-defined]
        return value


class OnDisk(GivesTensorDicts):
    """The walks of a container whose tensors are in a file.

    A subclass says which entries there are and where: `_listed`, `_holds`, `_target`, `_put` and `_drop`.
    """

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: Any) -> TensorDictBase: ...
        def __getitem__(self, index: object) -> Any: ...

    # What is saved of it elsewhere is what was read.
    _stored_as = "TensorDict"
    _is_in_file = True
    # The results of operations are in memory.
    _make: Any = TensorDict._make
    # The class that gives the entries unread.
    _twin: ClassVar[type[OnDisk]]
    # The container that this one shows entries or rows of.
    _source: Any = None
    # Whether an index gives a `FileView`, and no copy in memory.
    _gives_views: bool = False
    # Whether a pickle of this container names the file, which any process can open.
    _is_reopened: bool = False

    def _together(self, pick: Pick | None) -> AbstractContextManager[None] | None:
        """See `EntryStore.together`; `pick` says what is read of each tensor, `None` for nothing that is known."""
        return None

    def _listed(self) -> list[str]:
        """The names of the entries."""
        raise NotImplementedError

    def _holds(self, name: str) -> bool:
        """Whether there is an entry of this name."""
        raise NotImplementedError

    def _target(self, name: str) -> Any:
        """An entry; in the place of a tensor in the file a `StoredTensor`. A `KeyError` when there is none."""
        raise NotImplementedError

    def _put(self, entries: Mapping[str, Any]) -> None:
        """Write entries, all of them or none."""
        raise NotImplementedError

    def _drop(self, name: str) -> None:
        """Delete an entry."""
        raise NotImplementedError

    def _refuse_deletion(self) -> None:
        """Raise an error if entries cannot be deleted."""

    def _sketch(self, name: str) -> Any:
        """An entry as those see it who only ask what there is."""
        value = self._target(name)
        if not _is_stored(value):
            return value
        # A tensor of the class and the shape of what is read.
        return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)

    def __repr__(self) -> str:
        """As that of any container; reads no tensors."""
        return self._closed_text() or super().__repr__()

    def _closed_text(self) -> str:
        """What `repr` gives where the file was closed; empty where it is open."""
        return ""

    def _with_values(self, name: str) -> Any:
        """An entry as `EntryStore.structure_with_values` gives it."""
        return self._sketch(name)

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _Read(self)

    @property
    def _unread(self) -> Any:
        """This container with the tensors that stand for those in the file as its entries; both have one state."""
        twin = object.__new__(self._twin)
        twin.__dict__ = self.__dict__
        return twin

    def _build(
        self, entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None, names: Names | None
    ) -> Self:
        read = {name: _in_memory(value) for name, value in entries.items()}
        return self._make(read, batch_size, device, names)  # type: ignore[no-any-return]

    # --- writing into entries: into the tensors that stand for those in the file --------------------------------------

    def _plan_write(self, write: Write, source: object, prefix: Path = ()) -> None:
        with self._together(_nothing) or nullcontext():
            write.into(self._unread, source, prefix)

    # --- what shares the entries --------------------------------------------------------------------------------------

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Any:
        if device != self._device and (moved := self._moved_to(device, entries)) is not None:
            return moved
        stay = not entries or any(_is_stored(value) or isinstance(value, OnDisk) for value in entries.values())
        if not stay:
            return self._make(entries, self._batch_size, device, self._names)
        return FileSelection._of(entries, self._batch_size, device, self._names, self)

    def _moved_to(self, device: torch.device | None, entries: dict[str, Any]) -> Any:
        """This container on another device, where `entries` are there; `None` for a selection of them."""
        return None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _index(self, index: Any) -> Any:
        if not self._gives_views:
            return super()._index(index)
        size = self._batch_size
        at = leaf_index(index, size)
        if type(at) is Tensor:
            # A copy: the caller may change the tensor before the rows are read.
            at = at.clone() if at is index or isinstance(index, np.ndarray) else at
            shown = checked_size(at, size)
        else:
            shown = result_size(at, size)
        names = self._names
        if names is not None:
            names = indices.rename_dims(names, indices.index_for_names(index, at), len(shown))
        return self._view(at, shown, names)

    def _view(self, at: Any, size: torch.Size, names: Names | None) -> FileView:
        """The view of the rows at an output of `leaf_index`."""
        return FileView._over(self, _LeafIndex(at, self._batch_size, size), names)


class Twin(OnDisk):
    """A container over a file with its entries unread; see :attr:`OnDisk._unread`."""

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _Unread(self)

    @property
    def _unread(self) -> Any:
        return self


class _OverSource(OnDisk):
    """What shows entries or rows of another container, whose file it closes."""

    def close(self) -> None:
        """Close the file, for all containers over it; without effect when it is closed, or there is none.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> data = TensorDict(a=torch.zeros(2), batch_size=2).to_h5(f"{folder.name}/data.h5")
            >>> rows = data[:1]
            >>> rows.close()
            >>> "closed" in repr(data)
            True
        """
        close = getattr(self._source, "close", None)
        if close is not None:
            close()


@pytree.register
@registry.register
class FileSelection(_OverSource):
    """Entries of a container over a file, which stay in it: what `select`, `exclude` and `copy` give.

    They are read when they are used, and what is written in place is written to the file. Entries that are added or
    replaced are in memory, and the file does not have them. An index gives a view, as that of the container does.
    Pickled, it is a `TensorDict` of what is read.
    """

    @classmethod
    def _of(
        cls,
        entries: dict[str, Any],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names | None,
        source: OnDisk | None = None,
    ) -> FileSelection:
        self = object.__new__(cls)
        self._held = entries
        self._batch_size = batch_size
        self._source = source
        self._gives_views = source is not None and source._gives_views
        if device is not None:
            self._device = device
        if names is not None:
            self._names = list(names)
        return self

    _held: dict[str, Any]

    def _together(self, pick: Pick | None) -> AbstractContextManager[None] | None:
        arrays = [value.array for value in self._held.values() if type(value) is StoredTensor and value.is_whole()]
        items = [array for array in arrays if isinstance(array, Item) and not array.store.is_together]
        if not items:
            return None
        # Those of another store are asked for one by one.
        store = items[0].store
        return store.together([item for item in items if item.store is store], pick)

    def _listed(self) -> list[str]:
        return list(self._held)

    def _holds(self, name: str) -> bool:
        return name in self._held

    def _target(self, name: str) -> Any:
        return self._held[name]

    def _put(self, entries: Mapping[str, Any]) -> None:
        self._held.update(entries)

    def _drop(self, name: str) -> None:
        del self._held[name]

    def __reduce__(self) -> Any:
        return _pickled_as_read(self)


class _UnreadSelection(Twin, FileSelection):
    """See `Twin`."""


FileSelection._twin = _UnreadSelection


@pytree.register
@registry.register
class FileView(_OverSource):
    """Rows of a container over a file, which stay in it: what `data[index]` gives for HDF5 and Zarr.

    - Making a view reads nothing. Reading an entry reads these rows of it, each time, and gives a tensor in memory.
    - Writing an entry writes these rows of the file, and so does everything that writes in place. The value is cast to
      the dtype of the entry, and broadcasts to its shape. Of rows that the index takes several times, the last one is
      written.
    - A new entry is added to the container, with zeros in all other rows. A container that is set is merged with the
      nested one of that name.
    - Nested containers, and an index, give views again.
    - `to_tensordict()` and `clone()` copy the rows into memory, as do `to(device)` and all operations, which give
      `TensorDict`s.

    The device and the lock are those of the container; names of dims are the view's own. Its batch size cannot be
    changed, and entries cannot be deleted or renamed: they are there for all rows.

    A pickle of a view is a `TensorDict` of the rows. A process that is started with a view gets the view if the file is
    open for reading only, and opens the file itself. The workers of a `DataLoader` send a `TensorDict` of the rows.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict
        >>> folder = tempfile.TemporaryDirectory()
        >>> data = TensorDict(a=torch.zeros(4), batch_size=4).to_h5(f"{folder.name}/data.h5")
        >>> rows = data[[2, 0]]
        >>> rows["a"] = torch.tensor([7.0, 8.0])
        >>> data["a"]
        tensor([8., 0., 7., 0.])
        >>> data.close()
    """

    _is_over_another = True
    _gives_views = True
    _part: _LeafIndex
    _size: torch.Size
    _own_names: Names | None
    # Where the source is nested in the container that was indexed, for errors.
    _prefix: Path = ()

    @classmethod
    def _over(cls, source: Any, part: _LeafIndex, names: Names | None, prefix: Path = ()) -> FileView:
        self = object.__new__(cls)
        self._source, self._part, self._prefix = source, part, prefix
        self._size = part.shape_of(source._batch_size)
        self._own_names = names if names is not None and any(names) else None
        return self

    # --- the state is that of the source ----------------------------------------------------------------------------

    @property
    def _batch_size(self) -> torch.Size:
        return self._size

    @_batch_size.setter
    def _batch_size(self, size: torch.Size) -> None:
        self._refuse_size(size)

    def _refuse_size(self, size: torch.Size) -> None:
        if size != self._size:
            raise ShapeError(
                f"the batch size {list(self._size)} of rows of a file follows from their index and cannot become "
                f"{list(size)}; use td.to_tensordict(), a copy in memory"
            )

    @property
    def _names(self) -> Names | None:
        return self._own_names

    @_names.setter
    def _names(self, names: Names | None) -> None:
        if names is not None and len(names) != len(self._size):
            self._refuse_size(torch.Size(self._size[: len(names)]))
        self._own_names = names

    _device: torch.device | None = state_of("_source", "_device", lambda self: self._source._device)
    _locked: bool = state_of("_source", "_locked", lambda self: self._source._locked)

    @property
    def _is_reopened(self) -> bool:  # type: ignore[override]
        return isinstance(self._source, OnDisk) and self._source._is_reopened

    def __reduce__(self) -> Any:
        return _pickled_as_read(self)

    def _sent(self) -> Any:
        """What `__reduce__` gives for a view that is sent to another process."""
        # A worker of a `DataLoader` is there to read.
        if not self._is_reopened or get_worker_info() is not None:
            return self.__reduce__()
        return FileView._over, (self._source, self._part, self._own_names, self._prefix)

    def _dense(self, hooked: bool = False) -> Any:
        # All rows at once, without a tensor that stands for those of each entry.
        part, names = self._part, self._own_names
        fn, shown = itemgetter(part.index), (names or [None] * len(self._size))[: len(part.size)]
        try:
            read = self._source._map(fn, part.size, len(part.old), lambda _: shown, fn)
        except REFUSALS:
            return super()._dense(hooked)  # of ragged entries
        read._names = names and list(names)
        return read

    def _moved_to(self, device: torch.device | None, entries: dict[str, Any]) -> Any:
        # A copy: the rows would be read, and sent, each time that they are used.
        return self._build(entries, self._size, device, self._own_names)

    # --- the entries --------------------------------------------------------------------------------------------------

    def _together(self, pick: Pick | None) -> AbstractContextManager[None] | None:
        source = self._source
        if not isinstance(source, OnDisk):
            return None
        if pick is not None and pick is not _nothing:
            pick = _all_of if isinstance(source, FileView) else self._part.pick
        return source._together(pick)

    def _closed_text(self) -> str:
        source = self._source
        closed = source._closed_text() if isinstance(source, OnDisk) else ""
        return closed and f"{type(self).__name__}(rows of {closed})"

    def _listed(self) -> list[str]:
        return list(self._source._entries)

    def _holds(self, name: str) -> bool:
        return name in self._source._entries

    def _target(self, name: str) -> Any:
        return self._shown(name, self._source._writable()[name])

    def _sketch(self, name: str) -> Any:
        source = self._source
        value = source._sketch(name) if isinstance(source, OnDisk) else source._entries[name]
        if isinstance(value, Contract) or ragged.is_ragged(value):
            return self._shown(name, value)
        return torch.empty((), dtype=value.dtype, device=value.device).expand(self._part.shape_of(value.shape))

    def _shown(self, name: str, value: Any) -> Any:
        """An entry of the source as the view has it, no tensor being read."""
        part = self._part
        if not isinstance(value, Contract):
            return part.of(value, (*self._prefix, name))
        if isinstance(value, Tensor):
            return value._resized_along(part.size, len(part.old))  # type: ignore[attr-defined]
        if value._is_non_tensor:
            return value._index(part.index)
        node = value._wrapped_container()
        behind = node._batch_size[len(part.old) :]
        mine = self._own_names or [None] * len(self._size)
        theirs = [None] * len(behind) if node._names is None else node._names[len(part.old) :]
        return value._rewrap(FileView._over(node, part, [*mine, *theirs], (*self._prefix, name)))

    def _put(self, entries: Mapping[str, Any]) -> None:
        source, part = self._source, self._part
        for name, value in entries.items():
            if isinstance(value, Tensor) and not isinstance(value, Contract) and is_node(source._node(name)):
                raise TypeError(
                    f"entry {joined((*self._prefix, name))!r} is a container, and cannot be replaced by a tensor in "
                    "some of the rows"
                )
        write = Assign(part.index, part.old, part.size)
        source._plan_write(write, entries, self._prefix)
        write.plan.run(source)

    def _drop(self, name: str) -> None:
        if not self._holds(name):
            raise KeyError(name)
        self._refuse_deletion()

    def _refuse_deletion(self) -> None:
        raise UnsupportedEntryError(
            "entries of rows of a file cannot be deleted, renamed or moved, since all other rows have them too: do so "
            "in the container that was indexed, or in a copy in memory, td.to_tensordict()"
        )

    def _view(self, at: Any, size: torch.Size, names: Names | None) -> FileView:
        # An index of the source itself where there is one, so that no more than the rows are read.
        composed = self._part.then(at)
        if composed is None:
            return super()._view(at, size, names)
        part = self._part
        composed_size = size[: len(size) - (len(self._size) - len(part.size))]
        return FileView._over(self._source, _LeafIndex(composed, part.old, composed_size), names, self._prefix)


class _UnreadView(Twin, FileView):
    """See `Twin`."""


FileView._twin = _UnreadView
ForkingPickler.register(FileView, FileView._sent)


def _pickled_as_read(container: Any) -> Any:
    """What `__reduce__` gives for a container that is pickled as a `TensorDict` of what is read."""
    read = container._dense()
    if container._locked:
        read.lock_()
    return read.__reduce_ex__(4)


class _OnRead:
    """A function of leaves that is given what is read of them, and may write into that: then so is the file."""

    __slots__ = ("fn", "keep", "position")

    def __init__(self, fn: Callable[..., Any], position: int = 0, keep: bool = False) -> None:
        self.fn = fn
        self.position = position
        # Give back the tensor in the file for what is given back as it was read.
        self.keep = keep

    def __call__(self, *args: Any) -> Any:
        leaf = args[self.position]
        if ragged.is_ragged(leaf):
            return self._on_ragged(leaf, args)
        if not _is_stored(leaf):
            return self.fn(*args)
        read = leaf.read()
        before = internals.version_of(read)
        result = self.fn(*args[: self.position], read, *args[self.position + 1 :])
        if internals.version_of(read) != before:
            leaf.copy_(read)
        # Told by identity, what is given back as it came needs no more writing.
        return leaf if result is read and self.keep else result

    def _on_ragged(self, leaf: Tensor, args: tuple[Any, ...]) -> Any:
        elements = leaf.values() if leaf.layout is torch.jagged else leaf
        before = internals.version_of(elements)
        result = self.fn(*args)
        if internals.version_of(elements) != before:
            refuse_stored(leaf)
        return result


class _LeafIndex:
    """The part of each leaf that an index takes, of which no more is read.

    Attributes:
        index: an output of `leaf_index`.
        old: the batch size that it indexes; leaves have further dims.
        size: what becomes of that batch size, where it is known.
    """

    def __init__(self, index: Any, old: torch.Size, size: torch.Size = _NO_SIZE) -> None:
        self.index, self.old, self.size = index, old, size

    def __reduce__(self) -> Any:
        return _LeafIndex, (self.index, self.old, self.size)

    # Worked out once for all leaves.

    @cached_property
    def rows(self) -> Rows | None:
        """The rows along the first dim, with those between them; `None` for an index that takes something else."""
        return Rows.of_index(self.index, self.old[0], SPREAD) if self.old else None

    @cached_property
    def exact(self) -> Rows | None:
        """The same without those between them."""
        return Rows.of_index(self.index, self.old[0], 1)

    @property
    def pick(self) -> Pick | None:
        """What it reads of each tensor; `None` when only each tensor can tell."""
        rows = self.rows
        return None if rows is None else lambda shape: (rows.at,)

    def shape_of(self, shape: torch.Size) -> torch.Size:
        """The shape of the part of a leaf or container of a shape."""
        return self.size + shape[len(self.old) :]

    def __call__(self, leaf: Any) -> Any:
        """Read it."""
        if _is_stored(leaf) and leaf.is_whole() and self.rows is not None:
            return leaf.read_rows(self.rows if leaf.array.spread == SPREAD else self.exact)
        return in_memory(leaf[self.index])

    def of(self, leaf: Any, key: Path) -> Any:
        """It, not read: a `StoredTensor`. Of a ragged leaf, it is read."""
        if ragged.is_ragged(leaf):
            return ragged.Index(self.index)(leaf)
        shape = self.shape_of(leaf.shape)
        if _is_stored(leaf) and is_basic(self.index) and 0 not in shape:
            return leaf[self.index]
        array = RowsArray(leaf, self, leaf.array.check if _is_stored(leaf) else None, shape)
        return StoredTensor.of(array, leaf.dtype, leaf.device, key)

    def then(self, index: Any) -> Any:
        """The index that takes what another one takes of this part; `None` where there is none in a simple form."""
        first = self.index
        if type(index) is tuple:
            return None
        if type(first) is Tensor and first.ndim:
            found = first[index]
            return found if found.ndim else int(found)
        if type(first) is not slice:
            return None
        rows = range(self.old[0])[first]
        if type(index) is int:
            return rows[index]
        if type(index) is slice:
            rows = rows[index]
            return slice(rows.start, rows.stop, rows.step)
        if type(index) is Tensor and index.dtype in INTEGERS:
            return torch.where(index < 0, index + len(rows), index) * rows.step + rows.start
        return None


def _nothing(shape: tuple[int, ...]) -> None:
    return None


def _all_of(shape: tuple[int, ...]) -> Selection:
    return tuple([slice(0, size, 1) for size in shape])


def _in_memory(value: Any) -> Any:
    if ragged.is_ragged(value) and hasattr(value, "_name_in_store"):
        return value.detach()
    return in_memory(value)


def _is_stored(value: object) -> bool:
    return type(value) is StoredTensor
