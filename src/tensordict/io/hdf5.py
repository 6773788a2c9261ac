"""HDF5 files: opening them, what the objects in them stand for, and writing containers as groups and datasets.

A group per container, a dataset per tensor. What only this package keeps is in attributes whose names begin with `_`:
the batch size and the names of a group, the class of a tensorclass, the dtype that NumPy has not, the kind of a value.
"""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from tensordict.core import extras
from tensordict.core.contract import Contract, Names
from tensordict.core.errors import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, joined
from tensordict.io.forms import BEHIND_FACE, DICT, LAZY, VALUE_STACK, VALUES, Form, from_form, to_form
from tensordict.io.progress import Progress
from tensordict.io.values import NotJson, exact, restored
from tensordict.memory import attributes
from tensordict.memory.datasets import DTYPE, SLAB, Stored, as_array, in_memory, slabs, stored_dtype, tensor_dtype
from tensordict.memory.mapped import check_storable
from tensordict.memory.names import local_path

SIZE, NAMES, CLASS, KIND, STACK_DIM, TEXT = "_batch_size", "_names", "_class", "_kind", "_stack_dim", "_text"
# What the links of names begin with that HDF5 cannot hold as they are; the rest is percent-encoded.
_ENCODED = "_%"
_MODES = ("r", "r+", "w", "w-", "x", "a")
# How deep groups may be nested in a file that is read.
_DEEPEST = 300
_HARD, _SOFT = 0, 1
# What HDF5 puts into a dataset that is made over, or cannot be had for one without dims or elements.
_LAYOUT = ("chunks", "compression", "compression_opts", "shuffle", "fletcher32", "scaleoffset", "maxshape")
# What may be asked for; the rest of what h5py takes is given by the tensor.
_OPTIONS = (*_LAYOUT, "fillvalue", "fill_time", "track_times", "track_order", "rdcc_nbytes", "rdcc_nslots", "rdcc_w0")


def h5py() -> Any:
    """The package h5py; a clear error when it is not installed."""
    return extras.require("h5py", "h5")


class File:
    """An HDF5 file that is open, shared by all containers over it."""

    def __init__(self, file: Any, mode: str) -> None:
        self._file = file
        self.name: str = file.filename
        self.mode = mode
        # Whether batch sizes and names that are set are noted in the file.
        self.notes = True
        # Is told of the bytes of the tensors that are written.
        self.progress: Progress | None = None
        self._process = os.getpid()
        if mode != "r":
            _writable_files.add(self)

    @classmethod
    def open(cls, path: Any, mode: str, locking: Any) -> File:
        """Open a file.

        Raises:
            OSError: as the system gives it, with the path: it is missing, there already, or locked by a writer.
            SaveError: it is no HDF5 file, or broken.
        """
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
        local_path(path)
        name = os.fspath(path)
        library = h5py()
        try:
            file = library.File(name, mode, locking=locking, track_order=True)
        except OSError as error:
            raise _opening_error(error, name, mode) from error
        return cls(file, "r" if mode == "r" else "r+")

    @property
    def root(self) -> Any:
        """The outermost group."""
        self.check()
        with self.named(()):
            return self._file["/"]

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return bool(self._file)

    def check(self) -> None:
        """Raise when it was closed."""
        if not self._file:
            raise SaveError(f"the HDF5 file {self.name!r} was closed; open it again with TensorDict.from_h5")

    def check_writable(self) -> None:
        """Raise when it cannot be written to: by nobody, or not by this process."""
        self.check()
        if self.mode == "r":
            raise SaveError(f"the HDF5 file {self.name!r} is open for reading only; open it with mode='r+' to write")
        if self._process != os.getpid():
            raise SaveError(
                f"the HDF5 file {self.name!r} was opened for writing by process {self._process}, from which this one "
                "was forked: only that process can write to it"
            )

    def flush(self) -> None:
        """Have the file hold what was written; other processes that open it then see it."""
        if self._file and self.mode != "r" and self._process == os.getpid():
            self._file.flush()

    def close(self) -> None:
        """Close it, for all containers over it; without effect when it is closed."""
        self._file.close()

    @contextlib.contextmanager
    def unnoted(self) -> Iterator[None]:
        """Batch sizes that are set in the block, as they were found by looking at the file, are not noted in it."""
        self.notes = False
        try:
            yield
        finally:
            self.notes = True

    @contextlib.contextmanager
    def named(self, key: Path) -> Iterator[None]:
        """Errors of the HDF5 library, with the path and the key."""
        try:
            yield
        except (SaveError, IndexError):
            raise
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            where = f"entry {joined(key)!r} " if key else ""
            if isinstance(error, OSError) and error.errno:
                raise OSError(error.errno, f"{where}cannot be read or written ({error})", self.name) from error
            raise SaveError(f"{where}of the HDF5 file {self.name!r}: {error}") from error


_writable_files: weakref.WeakSet[File] = weakref.WeakSet()


def _flush_all() -> None:
    # A forked process reads through its copy of the open file, `strangers` through another one: what is in the file.
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

LEAF, NODE, VALUE, ODD = "leaf", "node", "value", "odd"
_SCALAR = torch.Size(())


@dataclass(slots=True)
class Slot:
    """What a name of a group stands for; of a tensor, all but its elements.

    kind: `LEAF`, `NODE` (a container), `VALUE` (one that is no tensor) or `ODD`, for what is none of these.
    address: where the object is in the file, which tells it from one that took its place.
    why: of an odd one, what it is.
    held: the container that was made of a group, so that it is made once.
    """

    file: File
    key: Path
    kind: str
    address: int
    object: Any = None
    dtype: torch.dtype = torch.float32
    shape: torch.Size = _SCALAR
    why: str = ""
    held: Any = None

    def check(self) -> None:
        """Raise when the file was closed."""
        self.file.check()

    def dataset(self) -> Any:
        """The dataset, to be read."""
        self.file.check()
        return self.object

    def writable(self) -> Any:
        """The dataset, to be written to."""
        self.file.check_writable()
        return self.object

    def named(self, key: Path) -> Any:
        """See :meth:`File.named`."""
        return self.file.named(key)

    def stored(self, device: torch.device | None) -> Any:
        """The tensor in the dataset, not read."""
        return Stored.of(self, self.dtype, self.shape, device, self.key)

    def refusal(self) -> UnsupportedEntryError:
        """The error of reading what is odd."""
        return UnsupportedEntryError(
            f"entry {joined(self.key)!r} of the HDF5 file {self.file.name!r} is {self.why}, which has no form as a "
            "tensor or a container; td.select(...) takes the other entries"
        )


def link_name(name: str, key: Path) -> bytes:
    """The name of the link for an entry; those that HDF5 would take for a path are encoded.

    Raises:
        SaveError: the name has no UTF-8 form.
    """
    try:
        if not name or name in (".", "..") or "/" in name or "\0" in name or name.startswith(_ENCODED):
            return (_ENCODED + quote(name, safe="")).encode()
        return name.encode()
    except UnicodeEncodeError as error:
        raise SaveError(f"entry {joined(key)!r}: this name has no UTF-8 form and cannot be held by a file") from error


def entry_name(link: str) -> str:
    """The name of the entry that a link is of."""
    return unquote(link[len(_ENCODED) :]) if link.startswith(_ENCODED) else link


def names_of(group: Any) -> list[str]:
    """The names of the entries of a group, in the order in which they were made where the file keeps it.

    Raises:
        SaveError: the file is broken, or a name is no text.
    """
    with _sound(group):
        return [entry_name(link) for link in group]


@contextlib.contextmanager
def _sound(item: Any) -> Iterator[None]:
    """Errors of looking at an object of a file that is broken."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise SaveError(f"the HDF5 file {item.file.filename!r} is broken: {error}") from error


def looked_up(file: File, group: Any, name: str, key: Path, known: Slot | None) -> Slot:
    """What a name stands for, `known` being what it stood for the last time.

    Links out of the file are not followed.

    Raises:
        KeyError: there is no such entry.
        SaveError: the file was closed, or is broken.
    """
    file.check()
    try:
        link = link_name(name, key)
    except SaveError:
        raise KeyError(name) from None
    try:
        info = group.id.links.get_info(link)
    except (KeyError, RuntimeError):
        raise KeyError(name) from None
    if info.type == _HARD and known is not None and known.address == info.u:
        return known
    if info.type not in (_HARD, _SOFT):
        return Slot(file, key, ODD, -1, why="a link to another file")
    library = h5py()
    # One link at most, the one that was looked at: what lies behind it must not lead out of the file either.
    access = library.h5p.create(library.h5p.LINK_ACCESS)
    access.set_nlinks(1)
    try:
        opened = library.h5o.open(group.id, link, access)
    except (KeyError, RuntimeError, OSError, ValueError) as error:
        if info.type == _SOFT:
            return Slot(file, key, ODD, -1, why="a link that leads to no object of this file")
        raise SaveError(f"entry {joined(key)!r} of the HDF5 file {file.name!r} is broken: {error}") from error
    address = info.u if info.type == _HARD else -1
    with file.named(key):
        if isinstance(opened, library.h5g.GroupID):
            return Slot(file, key, NODE, address, library.Group(opened))
        if not isinstance(opened, library.h5d.DatasetID):
            return Slot(file, key, ODD, address, why="a named datatype")
        return _of_dataset(file, key, address, library.Dataset(opened, readonly=file.mode == "r"))


def _of_dataset(file: File, key: Path, address: int, dataset: Any) -> Slot:
    slot = Slot(file, key, ODD, address, dataset)
    library = h5py()
    if dataset.external:
        slot.why = "a dataset whose elements lie in other files"
    elif dataset.is_virtual:
        slot.why = "a virtual dataset, made of others"
    elif dataset.shape is None:
        slot.why = "an empty dataset, without a shape"
    elif library.check_string_dtype(dataset.dtype) is not None and dataset.shape == ():
        slot.kind = VALUE
    elif (dtype := _dtype_of(dataset, slot)) is not None:
        slot.kind, slot.dtype, slot.shape = LEAF, dtype, torch.Size(dataset.shape)
    elif library.check_string_dtype(dataset.dtype) is not None:
        slot.why = f"an array of strings of shape {list(dataset.shape)}"
    else:
        slot.why = f"a dataset of {dataset.dtype}"
    return slot


def _dtype_of(dataset: Any, slot: Slot) -> torch.dtype | None:
    try:
        return tensor_dtype(dataset)
    except SaveError as error:
        raise SaveError(f"entry {joined(slot.key)!r} of the HDF5 file {slot.file.name!r}: {error}") from None


def value_of(slot: Slot, size: torch.Size, device: torch.device | None, names: Names | None) -> Any:
    """The holder of the value in a dataset, in a container of this batch size, device and names.

    Raises:
        SaveError: what is written there is no form of a value.
    """
    with slot.named(slot.key):
        text = slot.object[()]
        text = text.decode() if isinstance(text, bytes) else str(text)
        noted = attributes.text(slot.object, KIND)
        kind = VALUES[0] if noted is None else noted
        if kind not in (*VALUES, VALUE_STACK):
            raise ValueError(f"{kind!r:.40} is no kind of a value")
        value = text if noted is None or TEXT in slot.object.attrs else restored(json.loads(text))
        dims = attributes.numbers(slot.object, STACK_DIM) if kind == VALUE_STACK else None
        dim = dims[0] if dims else None
        own = noted_size(slot.object, slot.key, slot.file)
        if kind != VALUE_STACK and own is not None and own[: len(size)] != size:
            # The container was given another batch size since: one value stands for any.
            own = None
        form = Form(kind, size if own is None else own, device, noted_names(slot.object, slot.key, slot.file) or names)
        form.stack_dim, form.value = dim, value
    return from_form(form, {}, slot.key)


def noted_size(holder: Any, key: Path, file: File) -> torch.Size | None:
    """The batch size in the attributes of a group or a dataset; `None` when there is none.

    Raises:
        SaveError: it is no batch size.
    """
    with file.named(key):
        sizes = attributes.numbers(holder, SIZE)
        if sizes is not None and any(n < 0 for n in sizes):
            raise ValueError(f"the batch size {sizes!r:.80} that is noted on it is none")
        return None if sizes is None else torch.Size(sizes)


def noted_names(holder: Any, key: Path, file: File) -> Names | None:
    """The names of the batch dims in the attributes of a group; `None` when there are none.

    Raises:
        SaveError: they are no names.
    """
    with file.named(key):
        text = attributes.text(holder, NAMES)
        names = None if text is None else json.loads(text)
        if text is not None and not (type(names) is list and all(name is None or type(name) is str for name in names)):
            raise ValueError(f"the names {names!r:.80} that are noted on it are none")
        return names


def noted_class(group: Any, key: Path, file: File) -> str | None:
    """The name of the tensorclass that a group is of; `None` when it is of none.

    Raises:
        SaveError: it is no text.
    """
    with file.named(key):
        return attributes.text(group, CLASS)


def note(holder: Any, size: torch.Size, names: Names | None) -> None:
    """Put a batch size and names into the attributes of a group or a dataset."""
    attributes.put_numbers(holder, SIZE, list(size))
    if names is not None:
        attributes.put_text(holder, NAMES, json.dumps(names))
    elif NAMES in holder.attrs:
        del holder.attrs[NAMES]


# --- writing ----------------------------------------------------------------------------------------------------------
# What is written has no name at first, and is given one when all of it is there: what fails leaves the file as it was.


def made(file: File, group: Any, value: Any, options: Mapping[str, Any], key: Path, above: tuple[int, ...] = ()) -> Any:
    """A dataset or group without a name in the file of `group`, with the content of an entry.

    What is in the file already is given one more name, and not copied: so a container holds what it is given.

    Args:
        above: where `group` and those that it is nested in are in the file.
        options: what `h5py.Group.create_dataset` takes, for tensors.
        key: what errors name.

    Raises:
        UnsupportedEntryError: it cannot be stored; the key is named.
    """
    there = _there(file, value, key, above)
    if there is not None:
        return there
    if isinstance(value, Contract):
        return _made_node(file, group, value, options, key, above)
    with file.named(key):
        return _made_leaf(file, group, value, options, key)


def _there(file: File, value: Any, key: Path, above: tuple[int, ...]) -> Any:
    """The object that a value is in this very file."""
    if isinstance(value, Stored):
        return value.source.dataset() if value.is_whole() and value.source.file is file else None
    inner = value._wrapped_container() if isinstance(value, Contract) else None
    if getattr(inner, "_file", None) is not file:
        return None
    group = inner._group  # type: ignore[union-attr]
    name = None if inner is value else f"{type(value).__module__}.{type(value).__qualname__}"
    if noted_class(group, key, file) != name:
        return None
    if address_of(group) in above:
        raise SaveError(f"entry {joined(key)!r} would be nested in itself")
    return group


def checked_leaf(value: Tensor, key: Path) -> tuple[Any, str | None]:
    """The dtype of the dataset for a tensor, and the name to note; an `UnsupportedEntryError` that names the key."""
    try:
        if value.is_nested:
            raise UnsupportedEntryError("an HDF5 file holds no ragged tensor; a folder or an archive (memmap) does")
        if not isinstance(value, Stored):
            check_storable(value)
        if value.is_meta:
            raise UnsupportedEntryError("a tensor on the meta device has no content that could be stored")
        return stored_dtype(value.dtype)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(key)!r}: {error}") from None


def _made_leaf(file: File, group: Any, value: Any, options: Mapping[str, Any], key: Path) -> Any:
    dtype, name = checked_leaf(value, key)
    shape = tuple(value.shape)
    dataset = group.create_dataset(None, shape=shape, dtype=dtype, **_layout(options, shape))
    if name is not None:
        attributes.put_text(dataset, DTYPE, name)
    fill(dataset, value, file.progress)
    return dataset


def fill(dataset: Any, value: Tensor, progress: Progress | None = None) -> None:
    """Write a tensor into a dataset of its shape and dtype, in pieces where it is not one piece of memory, or where a
    bar is to show how much has been written."""
    if not value.numel():
        return
    whole = progress is None and value.is_cpu and value.is_contiguous() and type(value) is not Stored
    if not value.ndim or value.nbytes <= SLAB or whole:
        dataset[...] = as_array(value, value.dtype)
        if progress is not None:
            progress.add(value.nbytes)
        return
    for start, stop in slabs(value):
        part = value[start:stop]
        dataset[start:stop] = as_array(in_memory(part), value.dtype)
        if progress is not None:
            progress.add(part.nbytes)


def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments for `h5py.Group.create_dataset`; a `TypeError` names those that it does not take."""
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(f"{unknown} are no arguments of h5py.Group.create_dataset for tensors; known: {_OPTIONS}")
    return options


def _layout(options: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """The options for a dataset of this shape; one without dims or elements has no chunks."""
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


def _made_node(
    file: File, group: Any, container: Any, options: Mapping[str, Any], key: Path, above: tuple[int, ...]
) -> Any:
    form = to_form(container, key, unread=True)
    if form.is_value:
        return _made_value(file, group, form, key)
    node = group.create_group(None, track_order=True)
    _filled(file, node, container, form, options, key, above)
    return node


def _filled(
    file: File, node: Any, container: Any, form: Form, options: Mapping[str, Any], key: Path, above: tuple[int, ...]
) -> None:
    if form.is_face:
        with file.named(key):
            attributes.put_text(node, CLASS, form.kind)
        container = form.entries[BEHIND_FACE]
        form = to_form(container, key, unread=True)
    if form.kind == LAZY:
        _check_even(container, key)
        form = Form(DICT, form.batch_size, form.device, form.names, container._entries)
    if form.kind != DICT:
        where = f"entry {joined(key)!r}: " if key else ""
        raise UnsupportedEntryError(f"{where}an HDF5 file holds no {form.kind}; a folder or an archive (memmap) does")
    with file.named(key):
        note(node, form.batch_size, form.names)
    for name in form.entries:
        path = (*key, name)
        link = link_name(name, path)
        entry = form.entries[name]
        node[link] = made(file, node, entry, options, path, above)


def write_file(path: str, container: Any, options: Mapping[str, Any], progress: bool) -> None:
    """Write a container as the outermost group of the file `path`, whose content is lost.

    Nobody else may be at that file: it is not locked.

    Raises:
        UnsupportedEntryError: an entry cannot be stored; it is named.
        OSError: the file cannot be written.
    """
    form = to_form(container, unread=True)
    if form.is_value:
        raise UnsupportedEntryError("a value that is no tensor is no HDF5 file by itself; put it into a TensorDict")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(File.open(path, "w", False)))
        if progress:
            file.progress = stack.enter_context(Progress("saving", _nbytes(container)))
        _filled(file, file.root, container, form, options, (), ())
        with file.named(()):
            file.flush()


def _nbytes(container: Any) -> int:
    entries = to_form(container, unread=True).entries.values()
    return sum(_nbytes(value) if isinstance(value, Contract) else value.numel() * value.itemsize for value in entries)


def _check_even(stack: Any, key: Path) -> None:
    """Refuse a lazy stack whose members do not allow that its leaves are read as one tensor each."""
    uneven = _uneven(stack, key)
    if uneven is not None:
        raise UnsupportedEntryError(
            f"entry {joined(uneven)!r} has different shapes in the members of a lazy stack, or is not in all of them, "
            "and has no form as one dataset: a folder or an archive (memmap) holds it as it is; or save a padded form"
        )


def _uneven(stack: Any, key: Path) -> Path | None:
    common = set(stack._entries)
    for member in stack._entries.containers:
        for name in member._entries:
            if name not in common:
                return (*key, name)
    for name, value in stack._outline().items():
        if isinstance(value, Contract):
            inner = value._wrapped_container()
            if not inner._is_non_tensor and getattr(inner, "_paired", None) and hasattr(inner._entries, "containers"):
                found = _uneven(inner, (*key, name))
                if found is not None:
                    return found
        elif -1 in stack._shape_of(name):
            return (*key, name)
    return None


def _made_value(file: File, group: Any, form: Form, key: Path) -> Any:
    value = form.value
    text = type(value) is str and "\0" not in value
    try:
        raw = (value if text else json.dumps(exact(value))).encode()
    except (NotJson, UnicodeEncodeError) as error:
        raise UnsupportedEntryError(
            f"entry {joined(key)!r}: {error}; values that are no tensors are kept as JSON in an HDF5 file"
        ) from None
    with file.named(key):
        # Not of a variable length: see `memory/attributes.py`.
        dtype = h5py().string_dtype("utf-8", max(len(raw), 1))
        dataset = group.create_dataset(None, data=np.array(raw, dtype=dtype), dtype=dtype)
        attributes.put_text(dataset, KIND, form.kind)
        if text:
            attributes.put_numbers(dataset, TEXT, 1)
        if form.stack_dim is not None:
            attributes.put_numbers(dataset, STACK_DIM, form.stack_dim)
        note(dataset, form.batch_size, form.names)
    return dataset


def strangers(path: str, container: Any) -> Collection[str]:
    """The names in an HDF5 file that neither this package nor the reference saved `container` under.

    This package notes the batch size in a file. The reference notes nothing: a file without attributes, all of whose
    names the container has, may be of its making.

    Raises:
        SaveError: the file cannot be read.
    """
    try:
        # Through Python, whose files neither are locked nor must be opened as those that are open here already.
        _flush_all()
        with open(path, "rb") as raw, h5py().File(raw, "r") as file:
            if SIZE in file.attrs:
                return ()
            found = list(file.attrs)
            file.visititems(lambda name, item: found.extend(f"{name}.{attribute}" for attribute in item.attrs))
            return found + _unknown(file, container, ())
    except (OSError, RuntimeError, ValueError) as error:
        raise SaveError(str(error)) from error


def _unknown(group: Any, container: Any, key: Path) -> list[str]:
    """The names in a group that a container has not; the links of the group are not followed."""
    entries = container._wrapped_container()._entries if isinstance(container, Contract) else {}
    found: list[str] = []
    for link in group:
        name = entry_name(link)
        if name not in entries:
            found.append(".".join((*key, name)))
        elif isinstance(group.get(link, getlink=True), h5py().HardLink) and isinstance(group[link], h5py().Group):
            found += _unknown(group[link], entries[name], (*key, name))
    return found


# --- checking ---------------------------------------------------------------------------------------------------------


def problems(path: Any) -> Iterator[str]:
    """What does not add up in an HDF5 file, found without reading tensors; nothing for a sound one.

    Raises:
        OSError: the file cannot be opened.
    """
    file = File.open(path, "r", None)
    try:
        yield from _problems(file, file.root, (), (), torch.Size(()))
    finally:
        file.close()


def _problems(file: File, group: Any, key: Path, above: tuple[int, ...], outer: torch.Size) -> Iterator[str]:
    where = f"entry {joined(key)!r}" if key else "the file"
    try:
        address, listed = address_of(group), names_of(group)
        own = noted_size(group, key, file)
        names = noted_names(group, key, file)
    except SaveError as error:
        yield str(error)
        return
    if address in above or len(above) > _DEEPEST:
        yield f"{where} is nested in itself, or too deep"
        return
    size = outer if own is None else own
    if size[: len(outer)] != outer:
        yield f"{where} has the batch size {list(size)}, which does not begin with {list(outer)}"
    if names is not None and len(names) != len(size):
        yield f"{where} has {len(names)} names for {len(size)} batch dims"
    for name in listed:
        path = (*key, name)
        try:
            slot = looked_up(file, group, name, path, None)
            if slot.kind == NODE:
                yield from _problems(file, slot.object, path, (*above, address), size)
            elif slot.kind == VALUE:
                value_of(slot, size, None, None)
            elif slot.kind == LEAF and slot.shape[: len(size)] != size:
                yield f"entry {joined(path)!r} has shape {list(slot.shape)}, which does not begin with {list(size)}"
        except (SaveError, KeyError, OSError) as error:
            yield str(error)


def address_of(group: Any) -> int:
    """Where a group is in its file; a `SaveError` when that is broken."""
    with _sound(group):
        return h5py().h5o.get_info(group.id).addr  # type: ignore[no-any-return]


def is_single(dataset: Any) -> bool:
    """Whether a dataset has one name only."""
    return h5py().h5o.get_info(dataset.id).rc == 1  # type: ignore[no-any-return]


def check_lineage(file: File, group: Any, key: Path, above: tuple[int, ...]) -> tuple[int, ...]:
    """The addresses of a group and those above it; a `SaveError` when it is nested in itself."""
    address = address_of(group)
    if address in above or len(above) > _DEEPEST:
        raise SaveError(f"entry {joined(key)!r} of the HDF5 file {file.name!r} is nested in itself, or too deep")
    return (*above, address)
