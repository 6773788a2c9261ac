"""StoredContainer, the base of containers whose tensors are read when they are used, with FileSelection (some entries
of such a container) and FileView (some rows)."""

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
from tensordict.containers.tensordict_base import FixedSize, GivesTensorDicts
from tensordict.core import indices, pytree, ragged, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, Device, EntryStore, Names, is_node, state_of
from tensordict.core.exceptions import UnsupportedEntryError, refuse_stored
from tensordict.core.indices import INTEGERS, checked_size, is_basic, leaf_index, result_size
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.ragged import REFUSALS
from tensordict.io.stores.array_store import Item, Pick, StaleError
from tensordict.memory.stored_tensors import SPREAD, Rows, RowsArray, Selection, StoredTensor, read_stored
from tensordict.ops.entries.assigning import Assign
from tensordict.ops.entries.write_plans import Write

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.containers.tensordict_base import TensorDictBase
    from tensordict.core.keys import Key

_NO_SIZE = torch.Size(())


class _ReadEntries(EntryStore, MutableMapping[str, Any]):  # guarded: `_get_unread` asks
    """The entries of a `StoredContainer`. Indexing reads a tensor into memory."""

    __slots__ = ("owner", "source")

    def __init__(self, owner: StoredContainer) -> None:
        self.owner = owner
        self.source = owner._source

    def __getitem__(self, name: str) -> Any:
        try:
            return read_stored(self.owner._get_unread(name))
        except StaleError:
            # Another process has replaced the entry since it was looked up.
            return read_stored(self.owner._get_unread(name))

    def __setitem__(self, name: str, value: object) -> None:
        self.owner._write_entries({name: value})

    def update(self, other: Any = (), /, **kwargs: Any) -> None:
        """Write several entries; none of them if one cannot be written."""
        self.owner._write_entries(dict(other, **kwargs))

    def __delitem__(self, name: str) -> None:
        self.owner._delete_entry(name)

    def refuse_deletion(self) -> None:
        self.owner._refuse_deletion()

    def __iter__(self) -> Iterator[str]:
        return iter(self.owner._list_names())

    def __len__(self) -> int:
        return len(self.owner._list_names())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.owner._holds(name)

    def __repr__(self) -> str:
        return repr(self.owner._list_names())

    def structure(self) -> Mapping[str, Any]:
        return {name: self.owner._sketch(name) for name in self.owner._list_names()}

    def structure_with_values(self) -> Mapping[str, Any]:
        return {name: self.owner._with_values(name) for name in self.owner._list_names()}

    def preview(self, name: str) -> str:
        return self.owner._preview(name)

    def writable(self) -> Mapping[str, Any]:
        return _UnreadEntries(self.owner)

    def on_read(self, fn: Callable[..., Any], position: int, keep: bool) -> Callable[..., Any]:
        # Reads leaf by leaf, so that only the results are in memory. An index reads its part of the file; any other
        # function gets the whole tensor.
        return self._part(fn) if isinstance(fn, itemgetter) else _ReadingFunction(fn, position, keep)

    def together(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None] | None:
        if fn is None:
            return self.owner._together(None)
        return self.owner._together(self._part(fn).pick if isinstance(fn, itemgetter) else _all_of)

    def _part(self, fn: itemgetter[Any]) -> _LeafIndex:
        reduced: Any = fn.__reduce__()
        return _LeafIndex(reduced[1][0], self.owner._batch_size)

    def write_back(self, restored: Any, leaves: set[Any]) -> set[Any]:
        # Restored tensors are copies in memory, so their address does not tell whether they changed: compare elements.
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


class _UnreadEntries(_ReadEntries):
    """The entries as `StoredTensor`s. Writing into such a tensor writes to the file."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        value = self.owner._get_unread(name)
        if ragged.is_ragged(value):
            # Ragged tensors are copies in memory. `refuse_stored` raises on writes into one and names the entry.
            value._name_in_store = name  # type: ignore[attr-defined]
        return value


class StoredContainer(GivesTensorDicts):
    """The base of containers whose tensors are in a file, or in other containers, and are read when they are used.

    A subclass supplies the entries: `_list_names`, `_holds`, `_get_unread`, `_write_entries` and `_delete_entry`.
    """

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, index: Key) -> Any: ...
        @overload
        def __getitem__(self, index: Any) -> TensorDictBase: ...
        def __getitem__(self, index: object) -> Any: ...

    # Saving this container elsewhere stores it as a plain TensorDict.
    _stored_as = "TensorDict"
    _is_in_file = True
    # Operations return containers in memory.
    _make: Any = TensorDict._make
    # The same class with `UnreadMixin`, made for each subclass.
    _unread_class: ClassVar[type[Any]]
    _is_unread: ClassVar[bool] = False
    # The container whose entries or rows this one shows.
    _source: Any = None
    # True if indexing returns a `FileView` and not a copy in memory.
    _gives_views: bool = False
    # True if a pickle of this container names a file that any process can open.
    _is_reopened: bool = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if not cls._is_unread:
            cls._unread_class = type(f"_Unread{cls.__name__}", (UnreadMixin, cls), {})

    def _together(self, pick: Pick | None) -> AbstractContextManager[None] | None:
        """See `EntryStore.together`. `pick` returns the selection that is read of each tensor; `None` if unknown."""
        return None

    def _list_names(self) -> list[str]:
        """Return the names of the entries."""
        raise NotImplementedError

    def _holds(self, name: str) -> bool:
        """Return whether there is an entry of this name."""
        raise NotImplementedError

    def _get_unread(self, name: str) -> Any:
        """Return an entry without reading its tensor: a `StoredTensor`, a nested container or a value.

        Raises:
            KeyError: the entry does not exist.
        """
        raise NotImplementedError

    def _write_entries(self, entries: Mapping[str, Any]) -> None:
        """Write all of these entries; none of them if one cannot be written."""
        raise NotImplementedError

    def _delete_entry(self, name: str) -> None:
        """Delete an entry."""
        raise NotImplementedError

    def _refuse_deletion(self) -> None:
        """Raise an error if entries cannot be deleted."""

    def _sketch(self, name: str) -> Any:
        """Return an entry, or a tensor of its shape, dtype and device, for callers that do not use the elements."""
        value = self._get_unread(name)
        if not _is_stored_tensor(value):
            return value
        return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)

    def _preview(self, name: str) -> str:
        """Return a text for `EntryStore.preview`."""
        return ""

    def __repr__(self) -> str:
        """Print the container without reading tensors."""
        return self._closed_text() or super().__repr__()

    def _closed_text(self) -> str:
        """Return the `repr` of a container whose file is closed; an empty string while it is open."""
        return ""

    def _with_values(self, name: str) -> Any:
        """Return an entry for `EntryStore.structure_with_values`."""
        return self._sketch(name)

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _ReadEntries(self)

    @property
    def _unread(self) -> Any:
        """This container with `StoredTensor`s as entries. Both share one `__dict__`."""
        twin = object.__new__(self._unread_class)
        twin.__dict__ = self.__dict__
        return twin

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        read = {name: _in_memory(value) for name, value in entries.items()}
        return self._make(read, batch_size, device, names)  # type: ignore[no-any-return]

    # --- writing into entries -----------------------------------------------------------------------------------------

    def _plan_write(self, write: Write, source: object, prefix: Path = ()) -> None:
        with self._together(_nothing) or nullcontext():
            write.into(self._unread, source, prefix)

    # --- containers that share the entries ----------------------------------------------------------------------------

    def _subset(self, entries: dict[str, Any], device: torch.device | None) -> Any:
        if device != self._device and (moved := self._move_to(device, entries)) is not None:
            return moved
        stay = not entries or any(
            _is_stored_tensor(value) or isinstance(value, StoredContainer) for value in entries.values()
        )
        if not stay:
            return self._make(entries, self._batch_size, device, self._names)
        return FileSelection._of(entries, self._batch_size, device, self._names, self)

    def _move_to(self, device: torch.device | None, entries: dict[str, Any]) -> Any:
        """Return this container for another device, if it can move `entries` when they are read; otherwise `None`."""
        return None

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _index(self, index: Any) -> Any:
        if not self._gives_views:
            return super()._index(index)
        size = self._batch_size
        at = leaf_index(index, size)
        if type(at) is Tensor:
            # Copied because the caller may change the tensor before the rows are read.
            at = at.clone() if at is index or isinstance(index, np.ndarray) else at
            shown = checked_size(at, size)
        else:
            shown = result_size(at, size)
        names = self._names
        if names is not None:
            names = indices.rename_dims(names, indices.index_for_names(index, at), len(shown))
        return self._view(at, shown, names)

    def _view(self, at: Any, size: torch.Size, names: Names | None) -> FileView:
        """Return the view of the rows at `at`, an output of `leaf_index`."""
        return FileView._over(self, _LeafIndex(at, self._batch_size, size), names)


class UnreadMixin(StoredContainer):
    """Mixin for the class of :attr:`StoredContainer._unread`: its entries are `StoredTensor`s."""

    _is_unread = True

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _UnreadEntries(self)

    @property
    def _unread(self) -> Any:
        return self


class _DerivedContainer(StoredContainer):
    """The base of containers that show entries or rows of another container."""

    def close(self) -> None:
        """Close the file, for all containers over it. Does nothing if it is closed already, or without a file.

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
class FileSelection(_DerivedContainer):
    """Some entries of a container over a file: the result of its `select`, `exclude` and `copy`.

    The entries stay in the file and are read when they are used. Writing in place writes to the file. Entries that you
    add or replace are kept in memory and not written to the file. Indexing gives a view, as in the container itself. A
    pickle contains a `TensorDict` with all entries read.
    """

    @classmethod
    def _of(
        cls,
        entries: dict[str, Any],
        batch_size: torch.Size,
        device: torch.device | None,
        names: Names | None,
        source: StoredContainer | None = None,
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
        # Items of another store are read one by one.
        store = items[0].store
        return store.together([item for item in items if item.store is store], pick)

    def _list_names(self) -> list[str]:
        return list(self._held)

    def _holds(self, name: str) -> bool:
        return name in self._held

    def _get_unread(self, name: str) -> Any:
        return self._held[name]

    def _write_entries(self, entries: Mapping[str, Any]) -> None:
        self._held.update(entries)

    def _delete_entry(self, name: str) -> None:
        del self._held[name]

    def __reduce__(self) -> Any:
        return _reduce_as_read(self)


@pytree.register
@registry.register
class FileView(FixedSize, _DerivedContainer):
    """Some rows of a container over a file: the result of `data[index]` for HDF5 and Zarr.

    - Making a view reads nothing. Each read of an entry reads these rows from the file and returns a tensor in memory.
    - Writing an entry, in place or not, writes these rows of the file. The value is cast to the dtype of the entry and
      broadcast to its shape. If the index selects a row several times, the last value is written.
    - Setting a new key adds the entry to the file, with zeros in all other rows. Setting a container merges it with the
      nested container of that name.
    - Reading a nested container, and indexing a view, gives a view.
    - `to_tensordict()`, `clone()`, `to(device)` and all other operations read the rows and return a `TensorDict`.

    A view shares the device and the lock with its container and has its own dim names. Its batch size cannot be
    changed, and its entries cannot be deleted or renamed, because they belong to all rows.

    A pickle of a view contains a `TensorDict` of the rows. If the file is open for reading only, a process that is
    started with a view gets a view and opens the file itself. The workers of a `DataLoader` send a `TensorDict`.

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
    _size_reason = "a view of a file", "its index", "use td.to_tensordict(), a copy in memory"
    _part: _LeafIndex
    _own_names: Names | None
    # The path of the source in the container that was indexed, for errors.
    _prefix: Path = ()

    @classmethod
    def _over(cls, source: Any, part: _LeafIndex, names: Names | None, prefix: Path = ()) -> FileView:
        self = object.__new__(cls)
        self._source, self._part, self._prefix = source, part, prefix
        self._size = part.result_shape(source._batch_size)
        self._own_names = names if names is not None and any(names) else None
        return self

    # --- the state, most of it shared with the source ---------------------------------------------------------------

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
        return isinstance(self._source, StoredContainer) and self._source._is_reopened

    def __reduce__(self) -> Any:
        return _reduce_as_read(self)

    def _reduce_for_process(self) -> Any:
        """Reduce a view that is sent to another process."""
        # The main process wants the rows that a `DataLoader` worker has read.
        if not self._is_reopened or get_worker_info() is not None:
            return self.__reduce__()
        return FileView._over, (self._source, self._part, self._own_names, self._prefix)

    def _dense(self, hooked: bool = False) -> Any:
        # Reads the rows of all entries at once, without making a `StoredTensor` for each.
        part, names = self._part, self._own_names
        fn, shown = itemgetter(part.index), (names or [None] * len(self._size))[: len(part.size)]
        try:
            read = self._source._map(fn, part.size, len(part.old), lambda _: shown, fn)
        except REFUSALS:
            return super()._dense(hooked)  # ragged entries
        read._names = names and list(names)
        return read

    def _move_to(self, device: torch.device | None, entries: dict[str, Any]) -> Any:
        # A copy, because a view would read and transfer the rows at each use.
        return self._build(entries, self._size, device, self._own_names)

    # --- the entries --------------------------------------------------------------------------------------------------

    def _together(self, pick: Pick | None) -> AbstractContextManager[None] | None:
        source = self._source
        if not isinstance(source, StoredContainer):
            return None
        if pick is not None and pick is not _nothing:
            pick = _all_of if isinstance(source, FileView) else self._part.pick
        return source._together(pick)

    def _closed_text(self) -> str:
        source = self._source
        closed = source._closed_text() if isinstance(source, StoredContainer) else ""
        return closed and f"{type(self).__name__}(rows of {closed})"

    def _list_names(self) -> list[str]:
        return list(self._source._entries)

    def _holds(self, name: str) -> bool:
        return name in self._source._entries

    def _get_unread(self, name: str) -> Any:
        return self._restrict_entry(name, self._source._writable()[name])

    def _sketch(self, name: str) -> Any:
        source = self._source
        value = source._sketch(name) if isinstance(source, StoredContainer) else source._entries[name]
        if isinstance(value, Contract) or ragged.is_ragged(value):
            return self._restrict_entry(name, value)
        return torch.empty((), dtype=value.dtype, device=value.device).expand(self._part.result_shape(value.shape))

    def _restrict_entry(self, name: str, value: Any) -> Any:
        """Return the rows of the view of an entry of the source, without reading a tensor."""
        part = self._part
        if not isinstance(value, Contract):
            return part.of(value, (*self._prefix, name))
        if isinstance(value, Tensor):
            return value._resized_along(part.size, len(part.old))  # type: ignore[attr-defined]
        if value._is_non_tensor:
            return value._index(part.index)
        node = value._wrapped_container()
        behind = node._batch_size[len(part.old) :]
        mine = (self._own_names or [None] * len(self._size))[: len(part.size)]
        theirs = [None] * len(behind) if node._names is None else node._names[len(part.old) :]
        return value._rewrap(FileView._over(node, part, [*mine, *theirs], (*self._prefix, name)))

    def _write_entries(self, entries: Mapping[str, Any]) -> None:
        source, part = self._source, self._part
        for name, value in entries.items():
            if isinstance(value, Tensor) and not isinstance(value, Contract) and is_node(source._node(name)):
                raise TypeError(
                    f"entry {joined((*self._prefix, name))!r} is a container and cannot be replaced by a tensor in "
                    "some of its rows: replace it in the container that was indexed"
                )
        write = Assign(part.index, part.old, part.size)
        source._plan_write(write, entries, self._prefix)
        write.plan.run(source)

    def _delete_entry(self, name: str) -> None:
        if not self._holds(name):
            raise KeyError(name)
        self._refuse_deletion()

    def _refuse_deletion(self) -> None:
        raise UnsupportedEntryError(
            "entries of rows of a file cannot be deleted, renamed or moved, since all other rows have them too: do "
            "that in the container that was indexed, or in a copy in memory, td.to_tensordict()"
        )

    def _view(self, at: Any, size: torch.Size, names: Names | None) -> FileView:
        # Composes the two indices if it can, so that only the final rows are read.
        composed = self._part.then(at)
        if composed is None:
            return super()._view(at, size, names)
        part = self._part
        composed_size = size[: len(size) - (len(self._size) - len(part.size))]
        return FileView._over(self._source, _LeafIndex(composed, part.old, composed_size), names, self._prefix)


ForkingPickler.register(FileView, FileView._reduce_for_process)


def _reduce_as_read(container: Any) -> Any:
    """Reduce a container to a `TensorDict` with its entries read."""
    read = container._dense()
    if container._locked:
        read.lock_()
    return read.__reduce_ex__(4)


class _ReadingFunction:
    """Wraps a function of tensors, so that it accepts a `StoredTensor` as the argument at `position`.

    Each call reads the elements, passes them to the function, and writes them back if the function changed them in
    place.
    """

    __slots__ = ("fn", "keep", "position")

    def __init__(self, fn: Callable[..., Any], position: int = 0, keep: bool = False) -> None:
        self.fn = fn
        self.position = position
        # True if the `StoredTensor` is returned where the function returns the tensor that was read from it.
        self.keep = keep

    def __call__(self, *args: Any) -> Any:
        leaf = args[self.position]
        if ragged.is_ragged(leaf):
            return self._call_on_ragged(leaf, args)
        if not _is_stored_tensor(leaf):
            return self.fn(*args)
        read = leaf.read()
        before = internals.version_of(read)
        result = self.fn(*args[: self.position], read, *args[self.position + 1 :])
        if internals.version_of(read) != before:
            leaf.copy_(read)
        return leaf if result is read and self.keep else result

    def _call_on_ragged(self, leaf: Tensor, args: tuple[Any, ...]) -> Any:
        elements = leaf.values() if leaf.layout is torch.jagged else leaf
        before = internals.version_of(elements)
        result = self.fn(*args)
        if internals.version_of(elements) != before:
            refuse_stored(leaf)
        return result


class _LeafIndex:
    """An index along the batch dims that reads only the selected part of each leaf.

    Attributes:
        index: an output of `leaf_index`.
        old: the batch size that it indexes. Leaves have further dims.
        size: the batch size of the result, if known.
    """

    def __init__(self, index: Any, old: torch.Size, size: torch.Size = _NO_SIZE) -> None:
        self.index, self.old, self.size = index, old, size

    def __reduce__(self) -> Any:
        return _LeafIndex, (self.index, self.old, self.size)

    # `rows` and `exact` are computed once for all leaves.

    @cached_property
    def rows(self) -> Rows | None:
        """The rows along the first dim, and the gaps that are read with them; `None` for any other index."""
        return Rows.of_index(self.index, self.old[0], SPREAD) if self.old else None

    @cached_property
    def exact(self) -> Rows | None:
        """The rows along the first dim alone."""
        return Rows.of_index(self.index, self.old[0], 1)

    @property
    def pick(self) -> Pick | None:
        """A function from the shape of a tensor to the selection that is read; `None` if it depends on the tensor."""
        rows = self.rows
        return None if rows is None else lambda shape: (rows.at,)

    def result_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the result for a leaf or container of this shape."""
        return self.size + shape[len(self.old) :]

    def __call__(self, leaf: Any) -> Any:
        """Read the part of a leaf."""
        if _is_stored_tensor(leaf) and leaf.is_whole() and self.rows is not None:
            return leaf.read_rows(self.rows if leaf.array.spread == SPREAD else self.exact)
        return read_stored(leaf[self.index])

    def of(self, leaf: Any, key: Path) -> Any:
        """Return the part of a leaf as a `StoredTensor`. Reads the part of a ragged leaf."""
        if ragged.is_ragged(leaf):
            return ragged.Index(self.index)(leaf)
        shape = self.result_shape(leaf.shape)
        if _is_stored_tensor(leaf) and is_basic(self.index) and 0 not in shape:
            return leaf[self.index]
        array = RowsArray(leaf, self, leaf.array.check if _is_stored_tensor(leaf) else None, shape)
        return StoredTensor.of(array, leaf.dtype, leaf.device, key)

    def then(self, index: Any) -> Any:
        """Return one index for this one followed by another; `None` if it has no simple form."""
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
    return read_stored(value)


def _is_stored_tensor(value: object) -> bool:
    return type(value) is StoredTensor
