"""Zarr groups (v3) as array stores: a group per container, an array per leaf; in a folder, a zip file or a Zarr store.

The attribute `__tensordict__` of a node holds the batch size and other state, in the form of the reference. A value is
an array with the bytes of its JSON, marked by the attribute `__tensordict_non_tensor__`.

Groups of Zarr v2 can only be read. Arrays of other programs may use any codec except those that unpickle.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import weakref
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from tensordict.core import extras
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.remote.claims import Claim
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.stores.array_store import (
    DTYPE,
    ENCODED,
    SIZE,
    ArrayItem,
    ForeignArray,
    Group,
    Item,
    Pick,
    Store,
    Text,
    UnreadableItem,
    decode_name,
    decode_names,
    encode_name,
)
from tensordict.io.stores.entries import KIND, NAMES, STACK_DIM
from tensordict.io.stores.zarr_chunks import find_damaged_chunks, make_layout
from tensordict.io.stores.zarr_raw import RawChunks
from tensordict.memory.names import local_path
from tensordict.memory.stored_tensors import SPREAD, Selection, stored_dtype, tensor_dtype

if TYPE_CHECKING:
    from tensordict.io.stores.zarr_nodes import Document, Nodes

_NOTES, _VALUE = "__tensordict__", "__tensordict_non_tensor__"
# Attribute with the batch size of a stack of values that the reference wrote.
_STACK = "__tensordict_stack__"
# Key of the state of a group that lists the parts of paths of its nodes, in the order of creation.
_ORDER = "keys"
_DOCUMENTS = ("zarr.json", ".zgroup")
# Prefix of the names of drafts.
_HIDDEN = ".tensordict-"
_ZIP = ".zip"
_MODES = ("r", "r+", "w", "w-", "x", "a")
_OPTIONS = ("chunks", "shards", "compressors", "filters", "serializer", "fill_value", "order")
# Attribute of an array: the shape that a save wrote in full. Every chunk of that shape must exist.
WRITTEN = "_written"
_CODECS = {"gzip": "GzipCodec", "zstd": "ZstdCodec", "blosc": "BloscCodec"}
# Read at most this many bytes to pick rows from them.
_BETWEEN = 64 << 20
# From this number of nodes on, the document of the root also holds the documents of all nodes.
_MANY = 16


@functools.cache
def zarr() -> Any:
    """Import zarr; raises an error that names the extra if it is missing."""
    return extras.require("zarr", "zarr")


class ZarrStore(Store):
    """An open Zarr store.

    Attributes:
        nodes: the nodes of the store.
    """

    backend = "zarr"
    kind = "Zarr store"
    a_kind = "a Zarr store"
    suffixes = (".zarr",)
    texts_are_json = True
    opens_urls = True
    holds_ragged = True
    holds_pickles = True
    is_open = False

    def __init__(self, nodes: Nodes, source: Any, name: str, mode: str, root: Document) -> None:
        super().__init__(name, mode)
        self.nodes = nodes
        self._source = source
        self.is_open = True
        # Claim on the URL while a save to it is incomplete.
        self._claim: Claim | None = None
        # Document of the root that was read to open the store; used once.
        self._found: Document | None = root
        self._is_consolidated = isinstance(root.get("consolidated_metadata"), dict)
        if self._is_consolidated and mode == "r":
            with self.errors(()):
                nodes.take_over_all(root)

    @classmethod
    def open(cls, name: Any, mode: str, *, locking: Any = None) -> ZarrStore:
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
        nodes, source, shown = _open_nodes(name, mode)
        claim = Claim(source) if mode not in ("r", "r+") and isinstance(source, Remote) else None
        try:
            root = _find_root(nodes, shown, mode)
            if root is None:
                root = _make_group()
                nodes.set_document("", root)
            return cls(nodes, source, shown, "r" if mode == "r" else "r+", root)
        except BaseException:
            nodes.close()
            raise
        finally:
            if claim is not None:
                claim.release()

    @classmethod
    def create(cls, name: Any, overwrite: bool = False) -> ZarrStore:
        """Open a new store as a draft: nobody sees it before `flush`, and closing it before deletes it.

        Args:
            name: a free path, an empty folder, an empty file, or a Zarr store.
            overwrite: delete the content of a store first.

        Raises:
            SaveError: the store has content; or another process or thread is saving to the URL.
        """
        nodes, source, shown = _open_nodes(name, "")
        claim = Claim(source) if isinstance(source, Remote) else None
        try:
            if nodes.is_taken(""):
                if not overwrite:
                    raise SaveError(f"there is something in {shown!r}: pass overwrite=True to delete all of it")
                nodes.clear_all()
            root = _make_group()
            nodes.begin_at("", root)
            self = cls(nodes, source, shown, "r+", root)
        except BaseException:
            if claim is not None:
                claim.release()
            raise
        self._claim = claim
        return self

    @classmethod
    def over(cls, handle: Any) -> tuple[ZarrStore, Group]:
        mode = "r" if handle.read_only else "r+"
        self = cls.open(handle.store, mode)
        return self, self.group_at(handle.path)

    @staticmethod
    def is_folder(path: str) -> bool:
        return not path.endswith(_ZIP)

    @staticmethod
    def choose_mode(path: str) -> str:
        return "r" if path.endswith(_ZIP) else "r+"

    @staticmethod
    def is_handle(value: object) -> bool:
        return type(value).__module__.partition(".")[0] == "zarr" and hasattr(value, "store_path")

    @property
    def source(self) -> Any:
        return self._source

    @property
    def root(self) -> Group:
        self.check()
        found, self._found = self._found or self.nodes.document(""), None
        if found is None or found.get("node_type") != "group":
            raise SaveError(f"the {self.kind} {self.name!r} has lost its outermost group")
        return _ZarrGroup(self, (), "", found, -1 if "" in self.nodes.drafts else None)

    @property
    def is_together(self) -> bool:
        return self.nodes.is_folder or self.nodes.keeps

    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> contextlib.AbstractContextManager[None]:
        return self.nodes.keeping()

    def drop_consolidated(self) -> None:
        """Delete the consolidated documents from the root; called before a published node changes."""
        self.check_writable()
        if self._is_consolidated:
            document = self.nodes.document("")
            if document is not None and document.pop("consolidated_metadata", None) is not None:
                self.nodes.set_document("", document)
            self._is_consolidated = False

    def flush(self) -> None:
        """Publish the draft group. Later writes are visible at once."""
        if "" in self.nodes.drafts:
            if self._claim is not None:
                self._claim.check()
            self._is_consolidated = self.nodes.publish("", "", _MANY)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            try:
                if "" in self.nodes.drafts and (self._claim is None or self._claim.is_valid()):
                    self.nodes.discard("")
            finally:
                if self._claim is not None:
                    self._claim.release()
            self.nodes.close()

    def find_damage(self, num_threads: int) -> list[str]:
        root = self.root
        assert isinstance(root, _ZarrGroup)
        return list(root.find_damage(num_threads))

    @staticmethod
    def is_at(path: str) -> bool:
        if os.path.isdir(path):
            return any(os.path.isfile(f"{path}/{name}") for name in _DOCUMENTS)
        if not os.path.isfile(path) or not zipfile.is_zipfile(path):
            return False
        with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            return any(name in archive.NameToInfo for name in _DOCUMENTS)
        return False

    @staticmethod
    def strangers(path: str, container: Any) -> Collection[str]:
        # This package and the reference both write the batch size to the root group.
        store = ZarrStore.open(path, "r")
        with contextlib.closing(store), store.errors(()):
            names = store.nodes.find_children("")
            if store.root.numbers(SIZE) is None:
                return names or ["zarr.json"]
            if not os.path.isdir(path):
                return ()
            known = {*names, *_DOCUMENTS}
            return [name for name in sorted(os.listdir(path)) if name not in known and not name.startswith(_HIDDEN)]

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise TypeError(f"{unknown} are no options of Zarr arrays for tensors; known: {list(_OPTIONS)}")
        return options

    @staticmethod
    def choose_compression(name: str) -> Mapping[str, Any]:
        if name not in _CODECS:
            raise ValueError(f"a Zarr store is compressed by {', '.join(map(repr, _CODECS))}, and not by {name!r}")
        return {"compressors": getattr(zarr().codecs, _CODECS[name])()}


def _open_nodes(name: Any, mode: str) -> tuple[Nodes, Any, str]:
    """Open a path, a URL or a zarr store in a mode. Saves pass an empty mode.

    Returns:
        The nodes, the argument that reopens them, and their name for errors.
    """
    library = zarr()
    from tensordict.io.stores.zarr_nodes import Nodes

    if isinstance(name, library.abc.store.Store):
        inner = name.with_read_only(True) if mode == "r" and not name.read_only else name
        if mode != "r" and inner.read_only:
            raise SaveError(f"{str(name)!r} is read only: it cannot be opened with mode={mode!r}")
        # Closing a zip file completes it. A save leaves it open for the container that is returned.
        is_closed = bool(mode) and isinstance(inner, library.storage.ZipStore)
        return Nodes(inner, is_given=not is_closed), name, str(name)
    if isinstance(name, Remote) or is_url(name):
        from tensordict.io.stores.zarr_remote import RemoteStore  # needs aiohttp

        remote = name if isinstance(name, Remote) else Remote(name)
        return Nodes(RemoteStore(remote, mode == "r")), remote, remote.url
    if not isinstance(name, str | bytes | os.PathLike):
        raise TypeError(f"a Zarr store is a path, a URL or a zarr.abc.store.Store, got {type(name).__name__}")
    path = local_path(os.fsdecode(name))
    if not os.path.isfile(path) and (not path.endswith(_ZIP) or os.path.isdir(path)):
        return Nodes(library.storage.LocalStore(path, read_only=mode == "r")), path, path
    is_there = os.path.isfile(path)
    if mode == "r+" or (mode == "a" and is_there):
        raise SaveError(
            f"{path!r} is a zip file, in which nothing can be replaced: open it with mode='r', or write to a folder"
        )
    _check_mode(path, mode, is_there, is_there and ZarrStore.is_at(path))
    return Nodes(library.storage.ZipStore(path, mode="r" if mode == "r" else "w")), path, path


def _check_mode(shown: str, mode: str, is_there: bool, is_group: bool) -> None:
    """Refuse to open a missing group and to create an existing one. Saves pass an empty mode."""
    if not is_there and mode in ("r", "r+"):
        raise FileNotFoundError(2, "there is no Zarr group", shown)
    if is_there and mode in ("x", "w-"):
        raise FileExistsError(17, os.strerror(17), shown)
    if is_there and not is_group and mode:
        why = "mode='w' would delete what is there" if mode == "w" else "it has no zarr.json of one"
        raise SaveError(f"{shown!r} is no Zarr group: {why}")


def _find_root(nodes: Nodes, shown: str, mode: str) -> Document | None:
    """Return the document of the root group, or `None` if the caller must create it; deletes a group that it replaces.

    Raises:
        SaveError: the path holds something that is not a group, or that the mode does not replace.
        OSError: the path is free, or already taken.
    """
    try:
        found = nodes.document("")
        if found is None and nodes.content.read(".zgroup") is not None:
            nodes.is_old = True
            found = nodes.document("")
    except (ValueError, OSError) as error:
        raise SaveError(f"{shown!r} cannot be opened as a Zarr group: {error}") from error
    is_group = found is not None and found.get("node_type") == "group"
    _check_mode(shown, mode, is_group or found is not None or nodes.is_taken(""), is_group)
    if mode == "w" and found is not None:
        nodes.is_old = False
        nodes.clear_all()
        return None
    if nodes.is_old and mode != "r":
        raise SaveError(f"{shown!r} is a group of Zarr v2, which is only read: open it with mode='r'")
    return found


def _make_group() -> Document:
    return {"attributes": {_NOTES: {"version": 1}}, "zarr_format": 3, "node_type": "group"}


# --- what is in a group -----------------------------------------------------------------------------------------------


def _notes(document: Document) -> Mapping[str, Any]:
    """Return the state that this package or the reference wrote to a node."""
    attributes = document.get("attributes") or {}
    notes = attributes.get(_NOTES) if isinstance(attributes, dict) else None
    if notes is not None and not isinstance(notes, dict):
        raise ValueError(f"the attribute {_NOTES!r} is no mapping")
    return notes or {}


class _ZarrNode(Item):
    """Base class of the items of a Zarr store: `at` is the path of the node, `document` its `zarr.json`."""

    store: ZarrStore

    def __init__(self, store: ZarrStore, key: Path, at: str, document: Document, address: int | None = None) -> None:
        super().__init__(store, key, store.nodes.version(at) if address is None else address)
        self.at = at
        self.document = document

    def attribute(self, name: str) -> str | list[int] | None:
        found = _notes(self.document).get(name.removeprefix("_"))
        if found is None or isinstance(found, str):
            return found
        if name == NAMES:
            return json.dumps(found)
        numbers = found if isinstance(found, list) else [found]
        return list(checks.ints(numbers, f"the attribute {name!r}"))

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        self.set_attributes({name: value})

    def set_attributes(self, values: Mapping[str, str | int | Sequence[int] | None]) -> None:
        def change(notes: dict[str, Any]) -> None:
            for name, value in values.items():
                notes.pop(name.removeprefix("_"), None)
                if value is not None:
                    plain: Any = list(value) if isinstance(value, tuple) else value
                    notes[name.removeprefix("_")] = json.loads(plain) if name == NAMES else plain

        self._note(change)

    def _note(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the state of a node by a function that edits it in place."""
        nodes = self.store.nodes
        if self.address == -1:
            # No other process sees a draft.
            change(self.document["attributes"].setdefault(_NOTES, {}))
            return
        self.store.drop_consolidated()
        with self.store.errors(self.key), nodes.alone(self.at):
            # Another container may have changed the state meanwhile.
            self.document = nodes.document(self.at) or self.document
            notes = dict(before := _notes(self.document))
            change(notes)
            if notes != before:
                attributes = {**(self.document.get("attributes") or {}), _NOTES: {**notes, "version": 1}}
                self.document = {**self.document, "attributes": attributes}
                nodes.set_document(self.at, self.document)
                self.address = nodes.version(self.at)


def _texts(noted: Any) -> list[str]:
    """Return the value if it is a list of texts, else an empty list."""
    return noted if isinstance(noted, list) and all(type(text) is str for text in noted) else []


class _ZarrText(_ZarrNode, Text):
    def _elements(self) -> Any:
        return np.asarray(self.store.nodes.array_over(self.at, self.document)[...])

    def attribute(self, name: str) -> str | list[int] | None:
        found = super().attribute(name)
        if found is not None or name not in (KIND, SIZE, STACK_DIM):
            return found
        stack = self.document["attributes"].get(_STACK)
        if not isinstance(stack, list):
            return "NonTensorData" if name == KIND else None
        if name == KIND:
            return "NonTensorStack"
        return list(checks.ints(stack, f"the attribute {_STACK!r}")) if name == SIZE else [0]

    @property
    def _encoding(self) -> object:
        attributes = self.document["attributes"][_VALUE]
        return attributes.get("encoding") if isinstance(attributes, dict) else None

    @property
    def is_pickled(self) -> bool:
        return self._encoding == "pickle"

    def pickled(self) -> bytes:
        return bytes(self._elements())

    def content(self) -> str:
        if self._encoding != "json":
            raise ValueError(f"a value is kept as JSON, and not as {self._encoding!r:.40}, which is not read")
        return bytes(self._elements()).decode()


class _Strings(_ZarrText):
    """A text or a list of texts of another program, or a stack of texts of the reference."""

    is_pickled = False

    def attribute(self, name: str) -> str | list[int] | None:
        shape = list(self.document["shape"])
        known = {KIND: "NonTensorStack" if shape else "NonTensorData", SIZE: shape, STACK_DIM: [0]}
        return known.get(name)

    def content(self) -> str:
        return json.dumps(self._elements().astype(object).tolist())


class _ZarrArray(_ZarrNode, ArrayItem):
    def __init__(
        self, store: ZarrStore, key: Path, at: str, document: Document, address: int, array: Any, dtype: torch.dtype
    ) -> None:
        super().__init__(store, key, at, document, address)
        self.array = array
        self.dtype = dtype
        self.shape = torch.Size(array.shape)

    @property
    def has_one_name(self) -> bool:
        return True

    @property
    def is_blank(self) -> bool:
        return self.address == -1 and self.store.mode != "r" and not self.array.fill_value

    @property
    def spread(self) -> int:
        # Rows in between can lie in chunks that were not requested.
        return SPREAD if not self.shape or self.array.chunks[0] >= self.shape[0] else 1

    @property
    def rows_together(self) -> int:
        return (self.array.shards or self.array.chunks)[0] if self.shape else 1

    def _check_there(self) -> None:
        # zarr reads missing chunks as zeros.
        nodes = self.store.nodes
        if self.store.mode != "r" and nodes.is_folder and nodes.version(self.at) == -1:
            raise ValueError("was deleted")

    def read(self, selection: Selection, dtype: Any) -> Any:
        self.store.check()
        with self.store.errors(self.key):
            if self.address != -1:
                self._check_there()
            found = None if self._raw is None else self._raw.read(selection)
            if found is not None:
                return found.astype(dtype, copy=False)
            if not _has_positions(selection):
                found = self.array[selection]
            elif self._touches_all_chunks(selection):
                first, *rest = selection
                between = (slice(first[0], first[-1] + 1), *rest)
                found = self.array[between][first - first[0]]
            else:
                found = self.array.oindex[selection]
            return np.asarray(found).astype(dtype, copy=False)

    def _touches_all_chunks(self, selection: Selection) -> bool:
        """Return True if the rows touch every chunk in between. A slice reads these faster than positions."""
        first, *rest = selection
        if _has_positions(tuple(rest)) or not isinstance(first, np.ndarray) or any(type(pick) is int for pick in rest):
            return False
        chunks = first // self.array.chunks[0]
        nbytes = int(first[-1] - first[0] + 1) * math.prod(self.shape[1:]) * self.dtype.itemsize
        return nbytes <= _BETWEEN and len(np.unique(chunks)) == chunks[-1] - chunks[0] + 1

    def write(self, selection: Selection, values: Any) -> None:
        if self.address != -1:
            self.store.check_writable()
        if not values.size:
            return
        with self.store.errors(self.key):
            if self.address != -1:
                self._check_there()
            elif values.shape == self.shape and self._raw is not None and self._raw.write_new(values):
                return
            if _has_positions(selection):
                self.array.oindex[selection] = values
            else:
                self.array[selection] = values

    @functools.cached_property
    def _raw(self) -> RawChunks | None:
        """The chunks, if they are files that hold the elements in their memory layout; else `None`."""
        content: Any = self.store.nodes.content
        if not self.store.nodes.is_folder:
            return None
        return RawChunks.of(f"{content.root}/{self.at}", self.document, self.array, content.links)

    def find_damage(self, num_threads: int) -> list[str]:
        """See `Store.find_damage`."""
        where = self.store.nodes, self.at, self.document, self.array
        try:
            with self.store.errors(self.key):
                damage = find_damaged_chunks(*where, self.numbers(WRITTEN), num_threads)
                return [f"entry {joined(self.key)!r}: {each}" for each in damage]
        except SaveError as error:
            return [str(error)]

    def record_written(self) -> None:
        written = {WRITTEN: list(self.shape)}
        if self.address == -1:
            self.document["attributes"][_NOTES][WRITTEN[1:]] = written[WRITTEN]
        elif self.numbers(WRITTEN) != written[WRITTEN]:
            self.set_attributes(written)


def _has_positions(selection: Selection) -> bool:
    return any(isinstance(pick, np.ndarray) for pick in selection)


T = TypeVar("T", bound=_ZarrNode)


class _ZarrGroup(_ZarrNode, Group):
    @property
    def handle(self) -> Any:
        self.store.flush()
        return zarr().open_group(self.store.nodes.store, path=self.at, mode=self.store.mode)

    @property
    def path(self) -> str:
        return f"/{self.at}"

    def names(self) -> list[str]:
        with self.store.errors(self.key):
            nodes = self.store.nodes
            parts = nodes.find_children(self.at) if nodes.lists else self._read_parts()
            order = {part: place for place, part in enumerate(self._order())}
            parts.sort(key=lambda part: order.get(part, len(order)))
            return decode_names(parts)

    def _read_parts(self) -> list[str]:
        """Return the parts of paths of all nodes from the state, for stores that cannot list them."""
        if not (noted := self._order()):
            raise ValueError(
                "servers of HTTP do not list what they have, and it is not noted: have zarr.consolidate_metadata(...) "
                "do that where the group can be written to"
            )
        return noted

    def _order(self) -> list[str]:
        """Return the parts of paths in the order of creation, as far as the state lists them."""
        return _texts(_notes(self.store.nodes.document(self.at) or {}).get(_ORDER))

    def find_damage(self, num_threads: int) -> Iterator[str]:
        """See `Store.find_damage`. A node of this package without its document is damage, too."""
        nodes = self.store.nodes
        known = set(nodes.find_children(self.at)) if nodes.lists else set(self._order())
        for part in self._order():
            if part not in known and nodes.is_taken(f"{self.at}/{part}".lstrip("/")):
                yield f"entry {joined((*self.key, decode_name(part)))!r}: its zarr.json is missing"
        for name in self.names():
            try:
                item = self.find(name)
            except OSError:
                # Reading the structure already reported this error.
                continue
            if isinstance(item, _ZarrGroup | _ZarrArray):
                yield from item.find_damage(num_threads)

    def check_name(self, name: str) -> None:
        self._path_of(name)

    def _path_of(self, name: str) -> str:
        try:
            part = _encode_name(name)
        except UnicodeEncodeError as error:
            where = joined((*self.key, name))
            raise SaveError(f"entry {where!r}: this name has no UTF-8 form and cannot be held by a store") from error
        return f"{self.at}/{part}" if self.at else part

    def find(self, name: str, known: Item | None = None) -> Item:
        store, key = self.store, (*self.key, name)
        store.check()
        if known is not None and store.mode == "r":
            return known
        try:
            path = self._path_of(name)
        except SaveError:
            raise KeyError(name) from None
        with store.errors(key):
            address = -1 if store.mode == "r" else store.nodes.version(path)
            if known is not None and known.address == address:
                return known
            document = None if store.mode != "r" and address == -1 else store.nodes.document(path)
            if document is not None:
                # A read-only store never changes, so the path identifies the item.
                return _make_item(store, key, path, document, hash(path) & (1 << 62) - 1 if address == -1 else address)
        raise KeyError(name)

    def new_group(self, key: Path) -> Group:
        self.store.check_writable()
        document = _make_group()
        with self.store.errors(key):
            return _delete_with(_ZarrGroup(self.store, key, self._begin(key, document), document, -1))

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        plain, name = stored_dtype(dtype)
        notes = {} if name is None else {DTYPE[1:]: name}
        with self.store.errors(key):
            layout = make_layout(options, key, tuple(shape), plain.itemsize)
            where, array = self._create(key, shape, plain, {_NOTES: {"version": 1, **notes}}, layout)
            return _delete_with(_ZarrArray(*where, array, dtype))

    def new_text(self, key: Path, content: str) -> Text:
        return self._new_bytes(key, content.encode(), "json")

    def new_pickle(self, key: Path, content: bytes) -> Text:
        return self._new_bytes(key, content, "pickle")

    def _new_bytes(self, key: Path, content: bytes, encoding: str) -> Text:
        raw = np.frombuffer(content, dtype=np.uint8)
        with self.store.errors(key):
            layout = {"chunks": (max(raw.size, 1),), "compressors": None}
            attributes = {_NOTES: {"version": 1}, _VALUE: {"encoding": encoding}}
            where, array = self._create(key, raw.shape, raw.dtype, attributes, layout)
            if raw.size:
                array[...] = raw
            return _delete_with(_ZarrText(*where))

    def _begin(self, key: Path, document: Document) -> str:
        path = self._path_of(key[-1])
        if self.address != -1:
            return self.store.nodes.begin(path, document)
        self.store.nodes.begin_at(path, document, is_nested=True)
        return path

    def _create(
        self, key: Path, shape: Sequence[int], dtype: Any, attributes: dict[str, Any], layout: dict[str, Any]
    ) -> tuple[tuple[ZarrStore, Path, str, Document, int], Any]:
        """Begin the draft of an array; returns the arguments for its item, and the array."""
        from tensordict.io.stores.zarr_nodes import make_array

        self.store.check_writable()
        document, metadata = make_array(shape, dtype, attributes, layout)
        at = self._begin(key, document)
        return (self.store, key, at, document, -1), self.store.nodes.array_over(at, document, metadata)

    def attach(self, name: str, item: Item) -> None:
        assert isinstance(item, _ZarrNode)
        if item.at in self.store.nodes.drafts:
            self.store.drop_consolidated()
            with self.store.errors((*self.key, name)):
                self.store.nodes.publish(item.at, self._path_of(name))
        part = _encode_name(name)
        if self.address == -1:
            self.document["attributes"][_NOTES].setdefault(_ORDER, []).append(part)
            return

        def add(notes: dict[str, Any]) -> None:
            order = _texts(notes.get(_ORDER))
            notes[_ORDER] = order if part in order else [*order, part]

        self._note(add)

    def delete(self, name: str) -> None:
        self.store.drop_consolidated()
        path = self._path_of(name)
        if self.store.nodes.version(path) == -1:
            raise KeyError(name)
        with self.store.errors((*self.key, name)):
            self.store.nodes.delete(path)
        part = _encode_name(name)

        def drop(notes: dict[str, Any]) -> None:
            if _ORDER in notes:
                notes[_ORDER] = [other for other in _texts(notes[_ORDER]) if other != part]

        self._note(drop)


@functools.lru_cache(maxsize=4096)
def _encode_name(name: str) -> str:
    """Return the part of a path for a name. Names that Zarr reserves or would parse as a path are encoded.

    Raises:
        UnicodeEncodeError: the name cannot be encoded as UTF-8.
    """
    name.encode()
    is_plain = bool(name.strip(".")) and not {"/", "\\"} & set(name) and name.isprintable() and name.strip() == name
    if not is_plain or name.startswith(("__", ENCODED, _HIDDEN)) or name in _DOCUMENTS:
        return encode_name(name)
    return name


def _delete_with(item: T) -> T:
    """Delete the draft of an item when the item is garbage collected before it gets a name; returns the item."""
    nodes, path = item.store.nodes, item.at
    if path in nodes.drafts:
        weakref.finalize(item, _discard, nodes, path).atexit = False
    return item


def _discard(nodes: Nodes, path: str) -> None:
    if path in nodes.drafts:
        nodes.discard(path)


def _make_item(store: ZarrStore, key: Path, path: str, document: Document, address: int) -> Item:
    where = store, key, path, document, address
    if document.get("node_type") == "group":
        return _ZarrGroup(*where)
    if document.get("node_type") != "array":
        raise ValueError(f"it is neither a group nor an array, but {document.get('node_type')!r:.40}")
    try:
        _check_codecs(document)
        array = store.nodes.array_over(path, document)
        dtype = np.dtype(array.dtype)
        checks.shape(list(array.shape))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        return UnreadableItem(store, key, address, f"an array that cannot be read ({error})")
    if _VALUE in (document.get("attributes") or {}):
        if dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"a value is kept as bytes, and not as {dtype} of shape {list(array.shape)}")
        return _ZarrText(*where)
    is_stack = _STACK in (document.get("attributes") or {})
    if _holds_strings(dtype, document) and (array.ndim <= 1 or is_stack):
        return _Strings(*where)
    kind = tensor_dtype(dtype, _ZarrNode(*where).text(DTYPE)) if dtype.kind in "biufc" else None
    if kind is None:
        return ForeignArray(store, key, address, array, array.dtype)
    return _ZarrArray(*where, array, kind)


def _holds_strings(dtype: np.dtype[Any], document: Document) -> bool:
    filters = document.get("filters") or ()
    return dtype.kind in "TU" or (dtype.kind == "O" and any(each.get("id") == "vlen-utf8" for each in filters))


def _check_codecs(document: Document) -> None:
    """Refuse an array whose codecs unpickle its elements."""
    told = [document.get("compressor"), *(document.get("filters") or ()), *(document.get("codecs") or ())]
    for codec in told:
        name = codec.get("id") or codec.get("name") if isinstance(codec, dict) else codec
        if name is not None and "pickle" in str(name).lower():
            raise ValueError(f"its elements are pickled (codec {name!r:.40}), which is not read")
