"""OnDisk: containers whose tensors stay in a file until they are used; FileSelection, some entries of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from tensordict.containers.base import GivesTensorDicts
from tensordict.containers.dense import TensorDict
from tensordict.core import pytree, ragged, registry
from tensordict.core.contract import Contract, EntryStore, Names
from tensordict.core.errors import refuse_stored
from tensordict.core.keys import Path, path_of
from tensordict.io.stores.store import Item, Pick, StaleError
from tensordict.memory.stored_tensors import SPREAD, Rows, Selection, StoredTensor, in_memory
from tensordict.ops.writes import Write

if TYPE_CHECKING:
    from typing_extensions import Self


class _Read(EntryStore, MutableMapping[str, Any]):  # guarded: `_target` asks
    """The entries: tensors that are read when they are asked for."""

    __slots__ = ("owner",)

    def __init__(self, owner: OnDisk) -> None:
        self.owner = owner

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

    def writable(self) -> Mapping[str, Any]:
        return _Unread(self.owner)

    def on_read(self, fn: Callable[..., Any], position: int, keep: bool) -> Callable[..., Any]:
        # Leaf by leaf, so that no more than the results are in memory. An index takes its part of the file; any other
        # function is given what is read.
        return _Indexed(fn, self.owner._batch_size) if isinstance(fn, itemgetter) else _OnRead(fn, position, keep)

    def together(self, fn: Callable[..., Any] | None = None) -> AbstractContextManager[None] | None:
        if fn is None:
            return self.owner._together(None)
        return self.owner._together(
            _Indexed(fn, self.owner._batch_size).pick if isinstance(fn, itemgetter) else _all_of
        )

    def write_back(self, restored: Any, leaves: set[Any]) -> set[Any]:
        # What is in memory shows no changes by where it is: what fits its entry is compared and written into it.
        written = set()
        for key, value in restored.items(True, True):
            if key not in leaves or not isinstance(value, Tensor):
                continue
            current = self.owner._unread_at(path_of(key))
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

    # What is saved of it elsewhere is what was read.
    _stored_as = "TensorDict"
    _is_in_file = True
    # The results of operations are in memory.
    _make: Any = TensorDict._make
    # The class that gives the entries unread.
    _twin: ClassVar[type[OnDisk]]

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

    def _sketch(self, name: str) -> Any:
        """An entry as those see it who only ask what there is."""
        value = self._target(name)
        if not _is_stored(value):
            return value
        # A tensor of the class and the shape of what is read.
        return torch.empty((), dtype=value.dtype, device=value.device).expand(value.shape)

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
        stay = not entries or any(_is_stored(value) or isinstance(value, OnDisk) for value in entries.values())
        return (FileSelection._of if stay else self._make)(entries, self._batch_size, device, self._names)


class Twin(OnDisk):
    """A container over a file with its entries unread; see :attr:`OnDisk._unread`."""

    @property
    def _entries(self) -> MutableMapping[str, Any]:  # type: ignore[override]
        return _Unread(self)

    @property
    def _unread(self) -> Any:
        return self


@pytree.register
@registry.register
class FileSelection(OnDisk):
    """Entries of a container over a file, which stay in it: what `select`, `exclude`, `copy` and `to(device)` give.

    They are read when they are used, and what is written in place is written to the file. Entries that are added or
    replaced are in memory, and the file does not have them. Pickled, it is a `TensorDict` of what is read.
    """

    @classmethod
    def _of(
        cls, entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None, names: Names | None
    ) -> FileSelection:
        self = object.__new__(cls)
        self._held = entries
        self._batch_size = batch_size
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
        read = self._dense()
        if self._locked:
            read.lock_()
        return read.__reduce_ex__(4)


class _UnreadSelection(Twin, FileSelection):
    """See `Twin`."""


FileSelection._twin = _UnreadSelection


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
        before = read._version
        result = self.fn(*args[: self.position], read, *args[self.position + 1 :])
        if read._version != before:
            leaf.copy_(read)
        # Told by identity, what is given back as it came needs no more writing.
        return leaf if result is read and self.keep else result

    def _on_ragged(self, leaf: Tensor, args: tuple[Any, ...]) -> Any:
        elements = leaf.values() if leaf.layout is torch.jagged else leaf
        before = elements._version
        result = self.fn(*args)
        if elements._version != before:
            refuse_stored(leaf)
        return result


class _Indexed:
    """An index of leaves that takes its part of each, and reads no more."""

    __slots__ = ("exact", "fn", "index", "rows", "size")

    def __init__(self, fn: itemgetter[Any], size: torch.Size) -> None:
        self.fn = fn
        reduced: Any = fn.__reduce__()
        self.index, self.size = reduced[1][0], size
        # Worked out once for all leaves; those that are read without what is between them only when there are any.
        self.rows = Rows.of_index(self.index, size[0], SPREAD) if size else None
        self.exact: Rows | None = None

    @property
    def pick(self) -> Pick | None:
        """What it reads of each tensor; `None` when only each tensor can tell."""
        rows = self.rows
        return None if rows is None else lambda shape: (rows.at,)

    def __call__(self, leaf: Any) -> Any:
        if self.rows is not None and _is_stored(leaf) and leaf.is_whole():
            if leaf.array.spread == SPREAD:
                return leaf.read_rows(self.rows)
            if self.exact is None:
                self.exact = Rows.of_index(self.index, self.size[0], 1)
            return leaf.read_rows(self.exact)
        return in_memory(self.fn(leaf))


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
