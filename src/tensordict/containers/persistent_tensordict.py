"""PersistentTensorDict: the container over an array store, such as an HDF5 file or a Zarr group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from tensordict.containers.dense import TensorDict
from tensordict.containers.on_disk import StoredContainer
from tensordict.core import makers, pytree, ragged, registry
from tensordict.core.contract import Contract, Names
from tensordict.core.devices import as_device
from tensordict.core.exceptions import SaveError, ShapeError
from tensordict.core.keys import Path, joined
from tensordict.core.replacing import is_replacing
from tensordict.core.shapes import as_size, refuse_two_sizes
from tensordict.io.formats import pickled_containers
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.specification import find_class, to_container
from tensordict.io.stores import entries as stored_entries
from tensordict.io.stores.array_store import ArrayItem, ForeignArray, Group, Item, Pick, Store, UnreadableItem
from tensordict.io.stores.backends import backend_of
from tensordict.io.stores.entries import read_state
from tensordict.memory.stored_tensors import StoredTensor

if TYPE_CHECKING:
    from tensordict.containers.tensordict_base import TensorDictBase
    from tensordict.io.remote.urls import StorageOptions

__all__ = ["PersistentTensorDict"]


def _close(container: Contract) -> None:
    container._wrapped_container().close()


@pytree.register
@registry.register
class PersistentTensorDict(StoredContainer):
    """A container over an HDF5 file or a Zarr group, for data that does not fit in memory.

    - Reading an entry reads its array and returns a tensor in memory.
    - Indexing gives a view of these rows, which reads them when they are used and writes to the file.
      `data[torch.randint(len(data), (256,))]` is a mini-batch; `.to_tensordict()` reads it into memory at once.
    - Writing an entry writes to the file, and so does everything that writes in place: `data[3] = item`, `set_`,
      `data.mul_(2)`. An existing entry keeps its dtype and shape: the value is cast and broadcast, or the write raises.
      `data.set(key, value, overwrite=True)` replaces the entry.
    - A nested container is a group, and is read as a `PersistentTensorDict`. Keys, shapes, `repr` and the batch size
      read no tensors.
    - `to(device)` gives a container over the same file. Other operations return `TensorDict`s in memory.

    Non-tensor values are stored as JSON. Dim names, batch sizes and the classes of tensorclasses are stored in
    attributes, which other programs ignore. Links to other files are never followed. Ragged entries, which a Zarr group
    can hold, are read and replaced as a whole.

    As a context manager, the container closes its file at the end of the block. A pickle contains the path, and loading
    it opens the file anew. A process that was forked while the file is open for writing can read from it.

    Args:
        batch_size: the leading dims that all entries share. `None` takes the batch size in the file, or no batch dims.
        filename: the HDF5 file, or the folder, zip file, URL or `zarr.abc.store.Store` of a Zarr group. Exclusive with
            `group`.
        group: an `h5py.File`, `h5py.Group` or `zarr.Group`; with `filename`, the path of a group in the file.
        mode: `"r"` (read only), `"r+"` (read and write), `"w"` (create, replacing an old file), `"x"` (create, fail if
            the file exists), `"a"` (read and write, create if necessary).
        backend: `"h5"` or `"zarr"`.
        device: tensors are moved there when they are read.
        validate_batch_size: check the batch size against the shapes in the file.
        non_tensor_as_stack, allow_pickle: as in :meth:`TensorDict.from_zarr`. HDF5 files hold no pickles.
        storage_options: for a URL, as in :meth:`TensorDict.load_memmap`.
        **kwargs: passed to `h5py.Group.create_dataset` for entries that are written: `compression="gzip"`,
            `chunks=...` (an int is the number of rows of a chunk). For a Zarr group, the options of
            :meth:`TensorDict.to_zarr`.

    Attributes:
        LOCKING: passed to `h5py.File` as `locking`. `None` leaves the choice to the HDF5 library; `False` is for file
            systems without locks.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a shape in the file does not begin with the batch size, or the file is not an HDF5 file.
        ModuleNotFoundError: h5py, or zarr, is not installed.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import PersistentTensorDict
        >>> folder = tempfile.TemporaryDirectory()
        >>> with PersistentTensorDict(filename=f"{folder.name}/data.h5", mode="w", batch_size=[1000]) as data:
        ...     data["image"] = torch.zeros(1000, 8, 8)
        ...     data[3] = {"image": torch.ones(8, 8)}
        ...     data[[3, 1, 3]]["image"].mean((1, 2))
        tensor([1., 0., 1.])
    """

    LOCKING: bool | str | None = None
    _gives_views = True
    # The name of the tensorclass that was saved, if any.
    _class_name: str | None = None
    # The class of nested containers.
    _plain: ClassVar[type[PersistentTensorDict]]
    # `with data:` closes the file at the end.
    _default_undo = (None, _close)

    def __init__(
        self,
        *,
        batch_size: object = None,
        filename: object = None,
        group: Any = None,
        mode: str = "r",
        backend: str = "h5",
        device: object = None,
        validate_batch_size: bool = True,
        non_tensor_as_stack: bool = False,
        allow_pickle: bool | None = None,
        storage_options: StorageOptions | None = None,
        **kwargs: object,
    ) -> None:
        if (filename is None) == (group is None or isinstance(group, str)):
            raise RuntimeError(
                "a PersistentTensorDict needs a filename or an h5py group, and not both; with a filename, group may be "
                "the path of a group in the file"
            )
        with self._opening(backend_of(backend), filename, group, mode, device, storage_options, kwargs):
            self._store.reads_stacks, self._store.allow_pickle = non_tensor_as_stack, bool(allow_pickle)
            self._adopt_size(None if batch_size is None else as_size(batch_size), validate_batch_size)

    @contextmanager
    def _opening(
        self,
        kind: type[Store],
        filename: Any,
        group: Any,
        mode: str,
        device: object,
        storage_options: StorageOptions | None,
        options: Mapping[str, Any],
    ) -> Iterator[None]:
        """Open the store at a path, or over a group that its library has opened, for the duration of a block.

        If the block fails, a store that was opened from a path is closed.
        """
        if storage_options is not None and kind.opens_urls and is_url(filename):
            filename = Remote(filename, storage_options)
        options = kind.check_options(options)
        store, found = kind.over(group) if filename is None else (kind.open(filename, mode, locking=self.LOCKING), None)
        try:
            found = found or store.group_at(group or "/")
            self._open(found, (), options, None if device is None else as_device(device))
            yield
        except BaseException:
            if filename is not None:
                store.close()
            raise

    def _open(
        self, group: Group, above: tuple[int, ...], options: Mapping[str, Any], device: torch.device | None
    ) -> None:
        self._store = group.store
        self._group = group
        # The addresses of the enclosing groups, which must not be stored inside this one.
        self._lineage = stored_entries.lineage_of(group, above)
        self._options = dict(options)
        # The items found by earlier look-ups, and the containers over groups, made once each.
        self._items: dict[str, Item] = {}
        self._nested: dict[str, tuple[Item, Any]] = {}
        if device is not None:
            self._device = device
        self._size = torch.Size(())
        self._dim_names: Names | None = None

    def _adopt_size(self, size: torch.Size | None, check: bool) -> torch.Size | None:
        """Set the batch size, and return the one recorded in the store.

        Args:
            size: the batch size, which is recorded in the store; `None` for the recorded one. Recorded dim names apply
                in both cases.
            check: compare the batch size with the shapes in the store.
        """
        noted, names, self._class_name = read_state(self._group)
        self._size = noted if size is None and noted is not None else size or torch.Size(())
        self._dim_names = _fit_names(names, self._size)
        if check:
            self._check_shapes()
        if size is not None and noted != size:
            self._record_state(size, self._dim_names)
        return noted

    def _check_shapes(self) -> None:
        for name in self._list_names():
            item = self._item(name)
            if stored_entries.is_ragged(item):
                stored_entries.check_rows(item, self._size)
            elif isinstance(item, Group) and not stored_entries.is_value(item):
                self._over_group(name, item)._check_shapes()
            else:
                self._check_shape(item)

    def _check_shape(self, item: Item) -> None:
        size = self._size
        if isinstance(item, ArrayItem) and item.shape[: len(size)] != size:
            raise SaveError(
                f"entry {joined(item.key)!r} of the {self._store.kind} {self._store.name!r} has shape "
                f"{list(item.shape)}, which does not begin with the batch size {list(size)}"
            )

    # --- the file -----------------------------------------------------------------------------------------------------

    @classmethod
    def _open_store(
        cls,
        source: object,
        *,
        backend: str = "h5",
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: object = None,
        device: object = None,
        non_tensor_as_stack: bool = False,
        allow_pickle: bool = False,
        storage_options: StorageOptions | None = None,
        options: Mapping[str, Any] | None = None,
        is_new: bool = False,
    ) -> Any:
        """Open a store at a path, or wrap a group that its library has opened; see `from_h5`.

        `is_new` tells that the store has just been written, so that its shapes need no check.
        """
        refuse_two_sizes(auto_batch_size, batch_size)
        kind = backend_of(backend)
        is_handle = kind.is_handle(source)
        self = object.__new__(cls)
        filename, group = (None, source) if is_handle else (source, None)
        with self._opening(kind, filename, group, mode, device, storage_options, options or {}):
            self._store.reads_stacks, self._store.allow_pickle = non_tensor_as_stack, allow_pickle
            noted = self._adopt_size(None if batch_size is None else as_size(batch_size), False)
            if is_new:
                return self._as_saved_class()
            with self._store.together():
                if batch_size is None and (auto_batch_size or noted is None):
                    with self._store.suspend_notes():
                        self.auto_batch_size_(batch_dims)
                self._check_shapes()
                return self._as_saved_class()

    def _as_saved_class(self) -> Any:
        """Return this container, wrapped in the tensorclass that was saved, if any."""
        name = self._class_name
        if name is None:
            return self
        cls = find_class(name)
        unknown = sorted(set(self._list_names()) - cls.__expected_keys__)
        if unknown:
            raise SaveError(f"{joined(self._group.key)!r} is saved as a {name}, which has no fields {unknown}")
        return cls._wrap_container(self)

    @classmethod
    def from_dict(  # type: ignore[override]
        cls,
        input_dict: object,
        filename: Any,
        *,
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: object = None,
        device: object = None,
        backend: str = "h5",
        **kwargs: Any,
    ) -> PersistentTensorDict:
        """Write a (nested) dict, or another container, as an HDF5 file or a Zarr group.

        Example:
            >>> import tempfile
            >>> from tensordict import PersistentTensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> data = PersistentTensorDict.from_dict({"a": [1, 2], "b": {"c": [3.0, 4.0]}}, f"{folder.name}/data.h5")
            >>> data["b", "c"]
            tensor([3., 4.])

        Args:
            input_dict: a container, or any input of :meth:`TensorDict.from_dict`.
            filename: the file or folder. A container saved there is replaced, as by :meth:`to_h5` and :meth:`to_zarr`.
            auto_batch_size: without a `batch_size`, give every level the longest batch size that its entries share.
            batch_dims: the maximum number of batch dims to find.
            batch_size: the batch size; by default the one of a container, and for a dict as with `auto_batch_size`.
            device: tensors are moved there when they are read.
            backend: `"h5"` or `"zarr"`.
            **kwargs: arguments of :meth:`to_h5` or :meth:`to_zarr`.

        Returns:
            a :class:`PersistentTensorDict` over the new file, open for writing.

        Raises:
            ValueError: for another backend.
            OSError: the file cannot be written.
        """
        if batch_size is None and not auto_batch_size:
            if isinstance(input_dict, Contract):
                batch_size = input_dict._batch_size
            else:
                auto_batch_size = True
        source = TensorDict.from_dict(
            input_dict, auto_batch_size=auto_batch_size, batch_dims=batch_dims, batch_size=batch_size
        )
        target = None if device is None else as_device(device)
        result: PersistentTensorDict = source._to_store(backend, filename, **kwargs)
        result._device = target
        return result

    @overload  # type: ignore[override]
    def clone(self, recurse: Literal[True] = ..., *, newfile: None = None, **kwargs: Any) -> TensorDict: ...
    @overload
    def clone(self, recurse: bool, *, newfile: None = None, **kwargs: Any) -> TensorDictBase: ...
    @overload
    def clone(self, recurse: bool = ..., *, newfile: Any, **kwargs: Any) -> PersistentTensorDict: ...
    def clone(self, recurse: bool = True, *, newfile: Any = None, **kwargs: Any) -> Any:
        """Copy the container into memory, or into another file or group of the same kind.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> with TensorDict(a=torch.zeros(2)).to_h5(f"{folder.name}/data.h5") as data:
            ...     with data.clone(newfile=f"{folder.name}/copy.h5") as copy:
            ...         copy["a"] = torch.ones(2)
            ...     data["a"]
            tensor([0., 0.])

        Args:
            recurse: without `newfile`, `False` copies the structure only and shares the entries, as :meth:`copy` does.
            newfile: write the copy to this file, as :meth:`to_h5` or :meth:`to_zarr` does, with the options that this
                container was opened with.
            **kwargs: without `newfile`, passed to `torch.Tensor.clone`; with it, to :meth:`to_h5`.

        Returns:
            a `TensorDict`; with `newfile`, a :class:`PersistentTensorDict` over it, open for writing.

        Raises:
            ValueError: `newfile` is the file of this container.
        """
        if newfile is None:
            return super().clone(recurse, **kwargs)
        at_path = isinstance(newfile, (str, bytes, os.PathLike)) and os.path.exists(self._store.name)
        if at_path and os.path.exists(newfile) and os.path.samefile(newfile, self._store.name):
            raise SaveError(f"the container is in {os.fspath(newfile)!r} itself: pass the name of another file")
        with self._store.together():
            result: Any = self._to_store(self._store.backend, newfile, **{**self._options, **kwargs})
        result._wrapped_container()._device = self._device
        return result

    def close(self) -> None:
        """Close the file, for all containers over it. Does nothing if it is closed already.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> data = TensorDict(a=torch.zeros(2)).to_h5(f"{folder.name}/data.h5")
            >>> data.close()
        """
        self._store.close()

    def __getstate__(self) -> dict[str, Any]:
        self._store.check()
        self._store.flush()
        return {
            "backend": self._store.backend,
            "filename": self._store.source,
            "mode": self._store.mode,
            "group": self._group.path,
            "path": self._group.key,
            "options": self._options,
            "size": self._size,
            "names": self._dim_names,
            "device": self._device,
            "locked": self._locked,
            "values": (self._store.reads_stacks, self._store.allow_pickle),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        foreign = pickled_containers.is_hdf5_state(state)
        if foreign:
            state, nested = pickled_containers.convert_hdf5_state(type(self), state)
            for container in nested:
                # These hold the file open for reading, and it may have to be opened for writing below.
                container.close()
        store = backend_of(state.get("backend", "h5")).open(state["filename"], state["mode"], locking=self.LOCKING)
        try:
            self._open(store.group_at(state["group"], state["path"]), (), state["options"], state["device"])
            self._size, self._dim_names = state["size"], state["names"]
            self._store.reads_stacks, self._store.allow_pickle = state.get("values", (False, False))
            if foreign:
                self._check_shapes()
        except BaseException:
            store.close()
            raise
        if state["locked"]:
            self._lock_tree()

    def _move_to(self, device: torch.device | None, entries: dict[str, Any]) -> Any:
        for name, value in entries.items():
            if isinstance(value, Contract):
                stays = value._is_non_tensor or isinstance(value._wrapped_container(), PersistentTensorDict)
            else:
                stays = type(value) is StoredTensor or (value.is_nested and value.dtype is self._sketch(name).dtype)
            if not stays:
                return None
        moved = object.__new__(self._plain)
        moved._open(self._group, (), self._options, device)
        moved._lineage, moved._size, moved._dim_names = self._lineage, self._size, self._dim_names
        return moved

    @property
    def filename(self) -> Any:
        """The path, URL or store that the container was opened from."""
        return self._store.source

    @property
    def mode(self) -> str:
        """`"r"`, or `"r+"` if the store is open for writing."""
        return self._store.mode

    @property
    def file(self) -> Any:
        """The open `h5py.File` or `zarr.Group`; for a nested container, its group."""
        return self._group.handle

    @property
    def kwargs(self) -> dict[str, Any]:
        """The options for arrays that are written."""
        return dict(self._options)

    # --- the state ----------------------------------------------------------------------------------------------------

    @property
    def _is_reopened(self) -> bool:  # type: ignore[override]
        source = self._store.source
        return self._store.mode == "r" and isinstance(source, str) and os.path.exists(source)

    @property
    def _batch_size(self) -> torch.Size:
        return self._size

    @_batch_size.setter
    def _batch_size(self, size: torch.Size) -> None:
        self._record_state(size, self._dim_names)

    @property
    def _names(self) -> Names | None:
        return self._dim_names

    @_names.setter
    def _names(self, names: Names | None) -> None:
        self._record_state(self._size, names)

    def _record_state(self, size: torch.Size, names: Names | None) -> None:
        """Set the batch size and names, and record them in the store if it is open for writing."""
        store = self._store
        if store.is_open and store.mode != "r" and store.notes:
            store.undo_on_failure(partial(self._set_state, self._size, self._dim_names))
            with store.together():
                stored_entries.note(self._group, size, names)
        self._set_state(size, names)

    def _set_state(self, size: torch.Size, names: Names | None) -> None:
        self._size, self._dim_names = size, names

    # --- the entries --------------------------------------------------------------------------------------------------

    def _together(self, pick: Pick | None) -> AbstractContextManager[None] | None:
        store = self._store
        return None if store.is_together else store.together((self._group,), pick)

    def _list_names(self) -> list[str]:
        self._store.check()
        return self._group.names()

    def _item(self, name: str) -> Item:
        """Look up a name in the store.

        Raises:
            KeyError: the entry does not exist.
        """
        if not isinstance(name, str):
            raise KeyError(name)
        found = self._items[name] = self._group.find(name, self._items.get(name))
        return found

    def _get_unread(self, name: str) -> Any:
        item = self._item(name)
        if isinstance(item, ArrayItem):
            return item.tensor(self._device)
        if stored_entries.is_ragged(item):
            return stored_entries.ragged_in(item, self._size, self._device)
        if stored_entries.is_value(item):
            holder = to_container(stored_entries.value_of(item, self._size, self._device, self._dim_names), item.key)
            if self._locked:
                holder._lock_tree()
            return holder
        if isinstance(item, Group):
            return self._node_over(name, item)
        if isinstance(item, ForeignArray):
            return to_container(stored_entries.foreign_value(item, self._size, self._device, self._dim_names), item.key)
        assert isinstance(item, UnreadableItem)
        raise item.refusal()

    def _node_over(self, name: str, group: Group) -> Any:
        known, node = self._nested.get(name, (None, None))
        if known is not group:
            node = self._over_group(name, group)._as_saved_class()
            self._nested[name] = group, node
        return node

    def _over_group(self, name: str, group: Group) -> PersistentTensorDict:
        """Return the nested container over a group, without the tensorclass that was saved."""
        if name in self._nested and self._nested[name][0] is group:
            return self._nested[name][1]._wrapped_container()  # type: ignore[no-any-return]
        child = object.__new__(self._plain)
        child._open(group, self._lineage, self._options, self._device)
        noted, names, child._class_name = read_state(group)
        batch_dims = len(self._size)
        child._size = self._size if noted is None or noted[:batch_dims] != self._size else noted
        child._dim_names = _fit_names(names, child._size)
        return child

    def _holds(self, name: str) -> bool:
        return self._group.has(name)

    def _write_entries(self, entries: Mapping[str, Any]) -> None:
        self._store.check_writable()
        with self._store.together():
            self._write_in_order(entries)

    def _write_in_order(self, entries: Mapping[str, Any]) -> None:
        group = self._group
        written: list[tuple[ArrayItem, Tensor]] = []
        links: dict[str, Item] = {}
        for name, value in entries.items():
            key = (*group.key, name)
            group.check_name(name)
            array, value = self._fit_value(name, value, key)
            if array is None:
                links[name] = stored_entries.write_item(group, value, self._options, key, self._lineage)
            else:
                written.append((array, value))
        for array, value in written:
            stored_entries.fill(array, value)
        for name, made in links.items():
            group.attach(name, made)
            self._items.pop(name, None)

    def _fit_value(self, name: str, value: Any, key: Path) -> tuple[ArrayItem | None, Any]:
        """Return the existing array to write a tensor into, and the tensor cast and broadcast to it.

        The array is `None` if the entry is new, or is replaced.

        Raises:
            ShapeError: the tensor does not broadcast to the shape of the existing array.
        """
        if not self._store.rewrites or isinstance(value, (Contract, StoredTensor)) or not self._holds(name):
            return None, value
        item = self._item(name)
        if not isinstance(item, ArrayItem):
            return None, value
        stored_entries.check_leaf(self._store, value, key)
        if value.is_nested or item.dtype is not value.dtype or item.shape != value.shape:
            if is_replacing():
                return None, value
            try:
                value = value.to(item.dtype).expand(item.shape)
            except RuntimeError:
                raise ShapeError(
                    f"entry {joined(key)!r} of the {self._store.kind} {self._store.name!r} has shape "
                    f"{list(item.shape)}, and a value of shape {list(ragged.shape_of(value))} does not broadcast to "
                    f"it: td.set({joined(key)!r}, value, overwrite=True) replaces the entry"
                ) from None
        return (item if item.has_one_name else None), value

    def _delete_entry(self, name: str) -> None:
        self._item(name)
        self._group.delete(name)
        self._items.pop(name, None)

    def _sketch(self, name: str) -> Any:
        try:
            item = self._item(name)
        except KeyError:  # not compiled: it reads a file
            raise SaveError(
                f"the {self._store.kind} {self._store.name!r} is broken: it lists "
                f"{joined((*self._group.key, name))!r}, but there is no such entry"
            ) from None
        if isinstance(item, UnreadableItem):
            # Describing such an entry is fine; reading it raises.
            return makers.value(f"<{item.why}>", self._size, self._device)
        return super()._sketch(name)

    def _closed_text(self) -> str:
        if self._store.is_open:
            return ""
        return f"{type(self).__name__}(closed {self._store.kind.split()[-1]} {self._store.name!r})"


PersistentTensorDict._plain = PersistentTensorDict


class _H5Backend:
    """The backend class that pickles of the reference name."""


def _fit_names(names: Names | None, size: torch.Size) -> Names | None:
    """Return recorded names if they fit this batch size and are not all `None`; otherwise `None`."""
    return names if names is not None and len(names) == len(size) and any(names) else None


registry.speak_for(PersistentTensorDict, (StoredContainer,))


makers.open_store = PersistentTensorDict._open_store
