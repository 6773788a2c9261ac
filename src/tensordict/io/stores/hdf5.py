"""HDF5 files as array stores: a group per container, a dataset per leaf.

Attributes of this package begin with `_`, see `io/stores/entries.py`.

HDF5 keeps strings of variable length in a heap of the file and reads the heap without checks: a changed byte there can
make it loop or crash. Texts are therefore written with a fixed length, in the header of their object, and attributes
of other types are not read.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.core import extras
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, joined
from tensordict.io.stores.array_store import (
    DTYPE,
    ENCODED,
    SIZE,
    ArrayItem,
    ForeignArray,
    Group,
    Item,
    Store,
    Text,
    UnreadableItem,
    decode_name,
    decode_names,
    encode_name,
)
from tensordict.memory import files, system
from tensordict.memory.names import local_path
from tensordict.memory.stored_tensors import Selection, stored_dtype, tensor_dtype

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# Offsets where the signature may be: at the start, or after a user block of 512 bytes times a power of two.
_STARTS = (0, *(512 << shift for shift in range(12)))
_MODES = ("r", "r+", "w", "w-", "x", "a")
_HARD, _SOFT = 0, 1
# Options of the layout. HDF5 refuses them for datasets without dims or elements.
_LAYOUT = ("chunks", "compression", "compression_opts", "shuffle", "fletcher32", "scaleoffset", "maxshape")
# Options that callers may pass. The tensor determines the other arguments of `create_dataset`.
_OPTIONS = (*_LAYOUT, "fillvalue", "fill_time", "track_times", "track_order", "rdcc_nbytes", "rdcc_nslots", "rdcc_w0")


def h5py() -> Any:
    """Import h5py; raises an error that names the extra if it is missing."""
    return extras.require("h5py", "h5")


class File(Store):
    """An open HDF5 file."""

    backend = "h5"
    kind = "HDF5 file"
    a_kind = "an HDF5 file"
    suffixes = (".h5", ".hdf5")
    shares = True

    def __init__(self, file: Any, mode: str) -> None:
        super().__init__(file.filename, mode)
        self._file = file
        self._process = os.getpid()
        if mode != "r":
            _writable_files.add(self)

    @classmethod
    def open(cls, name: Any, mode: str, *, locking: Any = None) -> File:
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
        local_path(name)
        name = os.fspath(name)
        library = h5py()
        try:
            file = library.File(name, mode, locking=locking, track_order=True)
        except OSError as error:
            raise _opening_error(error, name, mode) from error
        return cls(file, "r" if mode == "r" else "r+")

    @classmethod
    def over(cls, handle: Any) -> tuple[File, Group]:
        file = cls(handle.file, handle.file.mode)
        return file, _Group(file, (), handle)

    @property
    def root(self) -> Group:
        self.check()
        with self.errors(()):
            return _Group(self, (), self._file["/"])

    @property
    def is_open(self) -> bool:
        return bool(self._file)

    def check(self) -> None:
        if not self._file:
            raise SaveError(f"the HDF5 file {self.name!r} was closed; open it again with TensorDict.from_h5")

    def check_writable(self) -> None:
        super().check_writable()
        if self._process != os.getpid():
            raise SaveError(
                f"the HDF5 file {self.name!r} was opened for writing by process {self._process}, from which this one "
                "was forked: only that process can write to it"
            )

    def flush(self) -> None:
        if self._file and self.mode != "r" and self._process == os.getpid():
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def is_at(path: str) -> bool:
        if not os.path.isfile(path):
            return False
        with files.closing(files.open_file(path)) as fd:
            size = os.fstat(fd).st_size
            starts = [start for start in _STARTS if start < size]
            return any(system.pread(fd, len(_SIGNATURE), start) == _SIGNATURE for start in starts)

    @staticmethod
    def strangers(path: str, container: Any) -> Collection[str]:
        # This package writes the batch size to the file. The reference writes no attributes: a file without attributes
        # whose names are all in the container may be a save of the reference.
        try:
            # A Python file needs no HDF5 lock, and may have another mode than a handle that this process has open.
            _flush_all()
            with open(path, "rb") as raw, h5py().File(raw, "r") as file:
                if SIZE in file.attrs:
                    return ()
                found = list(file.attrs)
                file.visititems(lambda name, item: found.extend(f"{name}.{attribute}" for attribute in item.attrs))
                return found + _list_unknown(file, container, ())
        except (OSError, RuntimeError, ValueError) as error:
            raise SaveError(str(error)) from error

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise TypeError(f"{unknown} are no arguments of h5py.Group.create_dataset for tensors; known: {_OPTIONS}")
        return options


_writable_files: weakref.WeakSet[File] = weakref.WeakSet()


def _flush_all() -> None:
    # A forked process and `strangers` read the file through other handles, so they see only what was flushed.
    for file in list(_writable_files):
        file.flush()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_flush_all)


def _opening_error(error: OSError, name: str, mode: str) -> OSError:
    if error.errno is not None and isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return type(error)(error.errno, os.strerror(error.errno), name)
    if isinstance(error, BlockingIOError) or "lock" in str(error):
        return SaveError(
            f"the HDF5 file {name!r} cannot be opened with mode={mode!r}: another process has it open for writing, or "
            f"it is open here for reading and should be written. Close it there first ({error})"
        )
    if error.errno:
        return OSError(error.errno, os.strerror(error.errno), name)
    return SaveError(f"{name!r} cannot be opened as an HDF5 file with mode={mode!r}: {error}")


# --- what is in a group -----------------------------------------------------------------------------------------------


class _Object(Item):
    """Base class of the items of a file; `object` is the h5py object."""

    store: File

    def __init__(self, store: File, key: Path, object: Any, address: int | None = None) -> None:
        if address is None:
            with store.errors(key):
                address = int(h5py().h5o.get_info(object.id).addr)
        super().__init__(store, key, address)
        self.object = object

    def attribute(self, name: str) -> str | list[int] | None:
        holder, library = self.object, h5py()
        if name not in holder.attrs:
            return None
        kind = library.h5a.open(holder.id, name.encode()).get_type()
        is_text = isinstance(kind, library.h5t.TypeStringID) and not kind.is_variable_str()
        if not is_text and not isinstance(kind, library.h5t.TypeIntegerID):
            raise ValueError(f"the attribute {name!r} is neither integers nor a text of fixed length")
        found = holder.attrs[name]
        if isinstance(found, bytes):
            return found.decode()
        if is_text or np.ndim(found) > 1:
            raise ValueError(f"the attribute {name!r} is no text and no row of integers")
        return [int(number) for number in np.atleast_1d(found)]

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        attributes = self.object.attrs
        if isinstance(value, str):
            raw = value.encode()
            dtype = h5py().string_dtype("utf-8", max(len(raw), 1))
            attributes.create(name, np.array(raw, dtype=dtype), dtype=dtype)
        elif value is not None:
            attributes[name] = np.asarray(value, dtype=np.int64)
        elif name in attributes:
            del attributes[name]


class _Text(_Object, Text):
    def content(self) -> str:
        text = self.object[()]
        return text.decode() if isinstance(text, bytes) else str(text)


class _Array(_Object, ArrayItem):
    def __init__(self, store: File, key: Path, object: Any, dtype: torch.dtype, address: int | None = None) -> None:
        super().__init__(store, key, object, address)
        self.dtype = dtype
        self.shape = torch.Size(object.shape)

    @property
    def has_one_name(self) -> bool:
        return bool(h5py().h5o.get_info(self.object.id).rc == 1)

    def read(self, selection: Selection, dtype: Any) -> Any:
        self.store.check()
        dataset = self.object
        with self.store.errors(self.key):
            return (dataset if dataset.dtype == dtype else dataset.astype(dtype))[selection]

    def write(self, selection: Selection, values: Any) -> None:
        self.store.check_writable()
        if values.size:
            with self.store.errors(self.key):
                self.object[selection] = values


class _Group(_Object, Group):
    @property
    def handle(self) -> Any:
        return self.object if self.key else self.object.file

    @property
    def path(self) -> str:
        if self.object.name is None:
            raise SaveError("this group was taken out of its HDF5 file, so it cannot be pickled by the path of that")
        return str(self.object.name)

    def names(self) -> list[str]:
        with self.store.errors(self.key):
            return decode_names(self.object)

    def check_name(self, name: str) -> None:
        self._link(name)

    def _link(self, name: str) -> bytes:
        """Return the link name of an entry. Names that HDF5 would parse as a path are encoded."""
        try:
            if not name or name in (".", "..") or "/" in name or "\0" in name or name.startswith(ENCODED):
                return encode_name(name).encode()
            return name.encode()
        except UnicodeEncodeError as error:
            where = joined((*self.key, name))
            raise SaveError(f"entry {where!r}: this name has no UTF-8 form and cannot be held by a file") from error

    def find(self, name: str, known: Item | None = None) -> Item:
        file, key, library = self.store, (*self.key, name), h5py()
        file.check()
        try:
            link = self._link(name)
            info = self.object.id.links.get_info(link)
        except (KeyError, RuntimeError, SaveError):
            raise KeyError(name) from None
        if info.type == _HARD and known is not None and known.address == info.u:
            return known
        if info.type not in (_HARD, _SOFT):
            return UnreadableItem(file, key, -1, "a link to another file")
        # Follow only this one link. A second link behind it could lead out of the file.
        access = library.h5p.create(library.h5p.LINK_ACCESS)
        access.set_nlinks(1)
        try:
            opened = library.h5o.open(self.object.id, link, access)
        except (KeyError, RuntimeError, OSError, ValueError) as error:
            if info.type == _SOFT:
                return UnreadableItem(file, key, -1, "a link that leads to no object of this file")
            raise SaveError(f"entry {joined(key)!r} of the HDF5 file {file.name!r} is broken: {error}") from error
        address = info.u if info.type == _HARD else -1
        with file.errors(key):
            if isinstance(opened, library.h5g.GroupID):
                return _Group(file, key, library.Group(opened), address if address >= 0 else None)
            if not isinstance(opened, library.h5d.DatasetID):
                return UnreadableItem(file, key, address, "a named datatype")
            return _wrap_dataset(file, key, address, library.Dataset(opened, readonly=file.mode == "r"))

    def new_group(self, key: Path) -> Group:
        return _Group(self.store, key, self.object.create_group(None, track_order=True), -1)

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        plain, name = stored_dtype(dtype)
        with self.store.errors(key):
            dataset = self.object.create_dataset(None, shape=shape, dtype=plain, **_layout(options, tuple(shape)))
            made = _Array(self.store, key, dataset, dtype, -1)
            if name is not None:
                made.set_attribute(DTYPE, name)
        return made

    def new_text(self, key: Path, content: str) -> Text:
        raw = content.encode()
        with self.store.errors(key):
            dtype = h5py().string_dtype("utf-8", max(len(raw), 1))
            dataset = self.object.create_dataset(None, data=np.array(raw, dtype=dtype), dtype=dtype)
            return _Text(self.store, key, dataset, -1)

    def attach(self, name: str, item: Item) -> None:
        assert isinstance(item, _Object)
        link = self._link(name)
        if link in self.object:
            del self.object[link]
        self.object[link] = item.object

    def delete(self, name: str) -> None:
        self.store.check_writable()
        del self.object[self._link(name)]


def _wrap_dataset(file: File, key: Path, address: int, dataset: Any) -> Item:
    library = h5py()
    is_text = library.check_string_dtype(dataset.dtype) is not None
    if dataset.external:
        why = "a dataset whose elements lie in other files"
    elif dataset.is_virtual:
        why = "a virtual dataset, made of others"
    elif dataset.shape is None:
        why = "an empty dataset, without a shape"
    elif is_text and dataset.shape == ():
        return _Text(file, key, dataset, address)
    elif (dtype := _find_dtype(file, key, dataset)) is not None:
        return _Array(file, key, dataset, dtype, address)
    elif is_text:
        return ForeignArray(file, key, address, dataset, "strings")
    else:
        why = f"a dataset of {dataset.dtype}"
    return UnreadableItem(file, key, address, why)


def _find_dtype(file: File, key: Path, dataset: Any) -> torch.dtype | None:
    if dataset.dtype.kind not in "biufc":
        return None
    with file.errors(key):
        return tensor_dtype(dataset.dtype, _Object(file, key, dataset, -1).text(DTYPE))


def _layout(options: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the options for a dataset of this shape. Datasets without dims or elements get no layout options."""
    if not shape or 0 in shape:
        return {name: value for name, value in options.items() if name not in _LAYOUT}
    found = dict(options)
    chunks = found.get("chunks")
    if type(chunks) is int:
        chunks = (chunks, *shape[1:])
    if isinstance(chunks, (tuple, list)):
        if len(chunks) != len(shape):
            raise ValueError(
                f"chunks={tuple(chunks)!r} do not fit the shape {list(shape)}: give an int, the number of rows of a "
                "chunk, or True"
            )
        found["chunks"] = tuple(min(chunk, size) for chunk, size in zip(chunks, shape, strict=True))
    return found


def _list_unknown(group: Any, container: Any, key: Path) -> list[str]:
    """List the names in a group that the container lacks. Soft links are not followed."""
    entries = container._wrapped_container()._entries if isinstance(container, Contract) else {}
    found: list[str] = []
    for link in group:
        name = decode_name(link)
        if name not in entries:
            found.append(".".join((*key, name)))
        elif isinstance(group.get(link, getlink=True), h5py().HardLink) and isinstance(group[link], h5py().Group):
            found += _list_unknown(group[link], entries[name], (*key, name))
    return found
