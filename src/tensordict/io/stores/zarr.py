"""Zarr groups (v3) as stores: a group per container, an array per tensor; in a folder, a zip file or any Zarr store.

What is noted on a node, such as the batch size, stands in its attribute `__tensordict__`, as the reference writes it.
A value that is no tensor is an array of the bytes of its JSON, marked by the attribute `__tensordict_non_tensor__`.

Groups of Zarr v2 are read. Arrays of other programs may name any codec; one that unpickles is refused.
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
from urllib.parse import quote, unquote

import numpy as np
import torch

from tensordict.core import extras
from tensordict.core.errors import SaveError
from tensordict.core.keys import Path, joined, path_of
from tensordict.io import checked
from tensordict.io.claims import Claim
from tensordict.io.remote import Remote, is_url
from tensordict.io.stores.entries import KIND, NAMES, STACK_DIM
from tensordict.io.stores.store import DTYPE, SIZE, ArrayItem, Group, Item, Other, Pick, Store, Text, decode_names
from tensordict.io.stores.zarr_chunks import find_damaged_chunks, find_longest_chunk
from tensordict.io.stores.zarr_raw import RawChunks
from tensordict.memory.names import local_path
from tensordict.memory.stored_tensors import SPREAD, Selection, stored_dtype, tensor_dtype

if TYPE_CHECKING:
    from tensordict.io.stores.zarr_nodes import Document, Nodes

_NOTES, _VALUE = "__tensordict__", "__tensordict_non_tensor__"
# The names in a group in the order in which they were made, as parts of paths.
_ORDER = "keys"
_DOCUMENTS = ("zarr.json", ".zgroup")
# What the parts of paths begin with for names that cannot be such a part; the rest is percent-encoded.
_ENCODED, _HIDDEN = "_%", ".tensordict-"
_ZIP = ".zip"
_MODES = ("r", "r+", "w", "w-", "x", "a")
_OPTIONS = ("chunks", "shards", "compressors", "filters", "serializer", "fill_value", "order")
# A chunk that is written is there, whatever is in it: zarr would leave out, or delete, chunks of zeros.
_CONFIG: Any = {"write_empty_chunks": True}
# On an array: the shape of it that a save has written. All chunks with an element in it are there.
WRITTEN = "_written"
_CODECS = {"gzip": "GzipCodec", "zstd": "ZstdCodec", "blosc": "BloscCodec"}
# The size of a chunk with `chunks="rows"`, in bytes.
_ROWS = 1 << 20
# So many bytes at most are read to take rows out of them.
_BETWEEN = 64 << 20
# With so many nodes, their documents are put into that of the root too.
_MANY = 16


def zarr() -> Any:
    """The package zarr; a clear error when it is not installed."""
    return extras.require("zarr", "zarr")


class ZarrStore(Store):
    """A Zarr store that is open.

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

    def __init__(self, nodes: Nodes, source: Any, name: str, mode: str, root: Document) -> None:
        super().__init__(name, mode)
        self.nodes = nodes
        self._source = source
        self._is_open = True
        # Of a group at a URL, until it is whole.
        self._claim: Claim | None = None
        with self.errors(()):
            self._is_consolidated = nodes.take_over_all(root)

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
            name: a path at which there is nothing, an empty folder or an empty file, or a Zarr store.
            overwrite: delete what is in a store that is given.

        Raises:
            SaveError: there is something in it; or another process or thread is saving to the URL.
        """
        nodes, source, shown = _open_nodes(name, "")
        claim = Claim(source) if isinstance(source, Remote) else None
        try:
            if nodes.is_taken(""):
                if not overwrite:
                    raise SaveError(f"there is something in {shown!r}: pass overwrite=True to delete all of it")
                nodes.clear_all()
            root = _make_group()
            nodes.begin("", root)
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
    def mode_of_saved(path: str) -> str:
        return "r+" if ZarrStore.is_folder(path) else "r"

    @staticmethod
    def is_handle(value: object) -> bool:
        return type(value).__module__.partition(".")[0] == "zarr" and hasattr(value, "store_path")

    @property
    def source(self) -> Any:
        return self._source

    @property
    def root(self) -> Group:
        self.check()
        return _ZarrGroup(self, (), "", self._document(""), -1 if "" in self.nodes.drafts else None)

    def _document(self, path: str) -> Document:
        found = self.nodes.document(path)
        if found is None or found.get("node_type") != "group":
            raise SaveError(f"the {self.kind} {self.name!r} has lost its group {path!r}")
        return found

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_together(self) -> bool:
        return self.nodes.is_folder or self.nodes.keeps

    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> contextlib.AbstractContextManager[None]:
        return self.nodes.keeping()

    def changed(self) -> None:
        """Before a node that is seen changes: the documents of all nodes in that of the root are taken away."""
        self.check_writable()
        if self._is_consolidated:
            document = self.nodes.document("")
            if document is not None and document.pop("consolidated_metadata", None) is not None:
                self.nodes.set_document("", document)
            self._is_consolidated = False

    def flush(self) -> None:
        """Have what `create` has made seen; all else is once it is written."""
        if "" in self.nodes.drafts:
            if self._claim is not None:
                self._claim.check()
            with self.errors(()):
                self._is_consolidated = self.nodes.publish("", "", _MANY)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                if "" in self.nodes.drafts and (self._claim is None or self._claim.is_valid()):
                    self.nodes.discard("")
            finally:
                if self._claim is not None:
                    self._claim.release()
            self.nodes.close()

    def find_damage(self, num_threads: int) -> list[str]:
        found: list[str] = []
        groups = [self.root]
        while groups:
            group = groups.pop()
            assert isinstance(group, _ZarrGroup)
            found += [f"entry {joined((*group.key, name))!r}: its zarr.json is missing" for name in group.find_lost()]
            for name in group.names():
                try:
                    item = group.find(name)
                except OSError:
                    # Whoever has read the structure has reported it.
                    continue
                if isinstance(item, _ZarrGroup):
                    groups.append(item)
                elif isinstance(item, _ZarrArray):
                    found += item.find_damage(num_threads)
        return found

    @contextlib.contextmanager
    def errors(self, key: Path) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            if key and repr(joined(key)) not in str(error):
                raise SaveError(f"entry {joined(key)!r}: {error}") from error
            raise
        except IndexError:
            raise
        except Exception as error:
            # Codecs raise what they like.
            where = f"entry {joined(key)!r} " if key else ""
            if isinstance(error, OSError) and error.errno:
                raise OSError(error.errno, f"{where}cannot be read or written ({error})", self.name) from error
            raise SaveError(f"{where}of the {self.kind} {self.name!r}: {error}") from error

    @staticmethod
    def decoded(part: str) -> str:
        return unquote(part[len(_ENCODED) :]) if part.startswith(_ENCODED) else part

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
        # This package and the reference note the batch size on the outermost group.
        store = ZarrStore.open(path, "r")
        with contextlib.closing(store), store.errors(()):
            names = store.nodes.find_children("")
            if SIZE[1:] not in _notes(store._document("")):
                return names or ["zarr.json"]
            if not os.path.isdir(path):
                return ()
            known = {*names, *_DOCUMENTS}
            return [name for name in sorted(os.listdir(path)) if name not in known and not name.startswith(_HIDDEN)]

    @staticmethod
    def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise TypeError(f"{unknown} are no options of Zarr arrays for tensors; known: {list(_OPTIONS)}")
        return options

    @staticmethod
    def compressed_by(name: str) -> Mapping[str, Any]:
        if name not in _CODECS:
            raise ValueError(f"a Zarr store is compressed by {', '.join(map(repr, _CODECS))}, and not by {name!r}")
        return {"compressors": getattr(zarr().codecs, _CODECS[name])()}


def _open_nodes(name: Any, mode: str) -> tuple[Nodes, Any, str]:
    """Open the store at a path, or the one that is given, in a mode; the mode of a save is empty.

    Returns:
        The nodes, what opens them again, and what errors call them.
    """
    library = zarr()
    from tensordict.io.stores.zarr_nodes import Nodes
    from tensordict.io.stores.zarr_remote import RemoteStore

    if isinstance(name, library.abc.store.Store):
        inner = name.with_read_only(True) if mode == "r" and not name.read_only else name
        if mode != "r" and inner.read_only:
            raise SaveError(f"{str(name)!r} is read only: it cannot be opened with mode={mode!r}")
        return Nodes(inner, is_given=True), name, str(name)
    if isinstance(name, Remote) or is_url(name):
        remote = name if isinstance(name, Remote) else Remote(name)
        return Nodes(RemoteStore(remote, mode == "r")), remote, remote.url
    if not isinstance(name, str | bytes | os.PathLike):
        raise TypeError(f"a Zarr store is a path, a URL or a zarr.abc.store.Store, got {type(name).__name__}")
    path = local_path(os.fsdecode(name))
    if not os.path.isfile(path) and (not path.endswith(_ZIP) or os.path.isdir(path)):
        return Nodes(library.storage.LocalStore(path, read_only=mode == "r")), path, path
    _check_zip(path, mode)
    return Nodes(library.storage.ZipStore(path, mode="r" if mode == "r" else "w")), path, path


def _check_zip(path: str, mode: str) -> None:
    """Refuse to open a zip file in a mode."""
    is_there = os.path.isfile(path)
    if mode == "r" and not is_there:
        raise FileNotFoundError(2, os.strerror(2), path)
    if mode == "r" and not zipfile.is_zipfile(path):
        raise SaveError(f"{path!r} is no Zarr group: neither a folder nor a zip file")
    if mode == "r+" or (mode == "a" and is_there):
        raise SaveError(
            f"{path!r} is a zip file, in which nothing can be replaced: open it with mode='r', or write to a folder"
        )
    if mode in ("x", "w-") and is_there:
        raise FileExistsError(17, os.strerror(17), path)
    if mode == "w" and is_there and not ZarrStore.is_at(path):
        raise SaveError(f"{path!r} is no Zarr group: mode='w' would replace the file")


def _find_root(nodes: Nodes, shown: str, mode: str) -> Document | None:
    """Return the document of the outermost group, and `None` where a new one is to be made; empty what it replaces.

    Raises:
        SaveError: there is no group, or something that the mode does not replace.
        OSError: there is nothing, or something already.
    """
    try:
        found = nodes.document("")
        if found is None and nodes.content.read(".zgroup") is not None:
            nodes.is_old = True
            found = nodes.document("")
    except (ValueError, OSError) as error:
        raise SaveError(f"{shown!r} cannot be opened as a Zarr group: {error}") from error
    if found is None and nodes.is_taken(""):
        if mode in ("w-", "x"):
            raise FileExistsError(17, os.strerror(17), shown)
        why = "mode='w' would delete what is in it" if mode == "w" else "it has no zarr.json"
        raise SaveError(f"{shown!r} is no Zarr group: {why}")
    if found is None:
        if mode in ("r", "r+"):
            raise FileNotFoundError(2, "there is no Zarr group", shown)
    elif mode in ("w-", "x"):
        raise FileExistsError(17, os.strerror(17), shown)
    elif mode == "w":
        nodes.is_old = False
        nodes.clear_all()
        return None
    elif nodes.is_old and mode != "r":
        raise SaveError(f"{shown!r} is a group of Zarr v2, which is only read: open it with mode='r'")
    elif found.get("node_type") != "group":
        raise SaveError(f"{shown!r} is a Zarr {found.get('node_type')!r:.20} and no group")
    return found


def _make_group() -> Document:
    return {"attributes": {}, "zarr_format": 3, "node_type": "group"}


# --- what is in a group -----------------------------------------------------------------------------------------------


def _notes(document: Document) -> Mapping[str, Any]:
    """What this package or the reference has noted on a node."""
    attributes = document.get("attributes") or {}
    notes = attributes.get(_NOTES) if isinstance(attributes, dict) else None
    if notes is not None and not isinstance(notes, dict):
        raise ValueError(f"the attribute {_NOTES!r} is no mapping")
    return notes or {}


class _ZarrNode(Item):
    """What all nodes have in common; `path` is where one is, `document` what stands there."""

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
        return list(checked.ints(numbers, f"the attribute {name!r}"))

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        if name == NAMES and isinstance(value, str):
            value = json.loads(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = list(value)
        self._note(name.removeprefix("_"), lambda _: value)

    def _note(self, name: str, change: Callable[[Any], Any]) -> None:
        """Note what `change` makes of what is noted; `None` is nothing."""
        nodes = self.store.nodes
        if self.address == -1:
            # Nobody else sees a draft.
            self._change(name, change)
            nodes.set_document(self.at, self.document)
            return
        self.store.changed()
        with self.store.errors(self.key), nodes.alone(self.at):
            # Another container may have noted something since.
            self.document = nodes.document(self.at) or self.document
            if self._change(name, change):
                nodes.set_document(self.at, self.document)
                self.address = nodes.version(self.at)

    def _change(self, name: str, change: Callable[[Any], Any]) -> bool:
        """Put what `change` makes of a note into a new document; return whether it differs."""
        before = _notes(self.document)
        notes = {noted: before[noted] for noted in before if noted != name}
        if (value := change(before.get(name))) is not None:
            notes |= {name: value, "version": 1}
        self.document = {**self.document, "attributes": {**(self.document.get("attributes") or {}), _NOTES: notes}}
        return notes != before


def _texts(noted: Any) -> list[str]:
    """A list of texts; an empty one where anything else is noted."""
    return noted if isinstance(noted, list) and all(type(text) is str for text in noted) else []


class _ZarrText(_ZarrNode, Text):
    def _elements(self) -> Any:
        return np.asarray(_array_over(self.store.nodes, self.at, self.document)[...])

    def attribute(self, name: str) -> str | list[int] | None:
        found = super().attribute(name)
        return "NonTensorData" if found is None and name == KIND else found

    def content(self) -> str:
        attributes = self.document["attributes"][_VALUE]
        encoding = attributes.get("encoding") if isinstance(attributes, dict) else None
        if encoding != "json":
            raise ValueError(f"a value is kept as JSON, and not as {encoding!r:.40}, which is not read")
        return bytes(self._elements()).decode()


class _Strings(_ZarrText):
    """Strings of another program, one or a row of them, as values."""

    def attribute(self, name: str) -> str | list[int] | None:
        shape = list(self.document["shape"])
        known = {KIND: "NonTensorStack" if shape else "NonTensorData", SIZE: shape, STACK_DIM: [0]}
        return known.get(name)

    def content(self) -> str:
        found = self._elements()
        return json.dumps([str(text) for text in found] if found.ndim else str(found[()]))


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
        # What is between rows may be in chunks that nobody asked for.
        return SPREAD if not self.shape or self.array.chunks[0] >= self.shape[0] else 1

    @property
    def rows_together(self) -> int:
        return (self.array.shards or self.array.chunks)[0] if self.shape else 1

    def _check_there(self) -> None:
        # Where there are no chunks, zarr reads zeros.
        nodes = self.store.nodes
        if self.address != -1 and self.store.mode != "r" and nodes.is_folder and nodes.version(self.at) == -1:
            raise ValueError("was deleted")

    def read(self, selection: Selection, dtype: Any) -> Any:
        self.store.check()
        with self.store.errors(self.key):
            self._check_there()
            found = None if self._raw is None else self._raw.read(selection)
            if found is not None:
                return found.astype(dtype, copy=False)
            if not _has_positions(selection):
                found = self.array[selection]
            elif self._takes_all_between(selection):
                first, *rest = selection
                between = (slice(first[0], first[-1] + 1), *rest)
                found = self.array[between][first - first[0]]
            else:
                found = self.array.oindex[selection]
            return np.asarray(found).astype(dtype, copy=False)

    def _takes_all_between(self, selection: Selection) -> bool:
        """Whether rows are in all chunks between the first and last: a slice reads these faster than positions do."""
        first, *rest = selection
        if _has_positions(tuple(rest)) or not isinstance(first, np.ndarray) or any(type(pick) is int for pick in rest):
            return False
        chunks = first // self.array.chunks[0]
        nbytes = int(first[-1] - first[0] + 1) * math.prod(self.shape[1:]) * self.dtype.itemsize
        return nbytes <= _BETWEEN and len(np.unique(chunks)) == chunks[-1] - chunks[0] + 1

    def write(self, selection: Selection, values: Any) -> None:
        self.store.check_writable()
        if values.size:
            with self.store.errors(self.key):
                self._check_there()
                if self.address == -1 and self._raw is not None and self._raw.write_new(selection, values):
                    return
                if _has_positions(selection):
                    self.array.oindex[selection] = values
                else:
                    self.array[selection] = values

    @functools.cached_property
    def _raw(self) -> RawChunks | None:
        """Its chunks, if they are files of the elements as they are in memory."""
        content: Any = self.store.nodes.content
        if content.links is None:
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
        if self.numbers(WRITTEN) != list(self.shape):
            self.set_attribute(WRITTEN, self.shape)


def _has_positions(selection: Selection) -> bool:
    return any(isinstance(pick, np.ndarray) for pick in selection)


T = TypeVar("T", bound=_ZarrNode)


class _ZarrGroup(_ZarrNode, Group):
    @property
    def path(self) -> str:
        return f"/{self.at}"

    def names(self) -> list[str]:
        with self.store.errors(self.key):
            nodes = self.store.nodes
            parts = nodes.find_children(self.at) if nodes.lists else self._noted_parts()
            order = {part: place for place, part in enumerate(self._order())}
            parts.sort(key=lambda part: order.get(part, len(order)))
            return decode_names(parts, self.store.decoded)

    def _noted_parts(self) -> list[str]:
        """The parts of paths of all that is in it, where the store does not list them."""
        if not (noted := self._order()):
            raise ValueError(
                "servers of HTTP do not list what they have, and it is not noted: have zarr.consolidate_metadata(...) "
                "do that where the group can be written to"
            )
        return noted

    def _order(self) -> list[str]:
        """The parts of paths in the order in which they were made, as far as that is noted."""
        return _texts(_notes(self.store.nodes.document(self.at) or {}).get(_ORDER))

    def find_lost(self) -> list[str]:
        """The names of nodes that this package made and that have lost their documents."""
        nodes = self.store.nodes
        known = set(nodes.find_children(self.at)) if nodes.lists else set(self._order())
        lost = [part for part in self._order() if part not in known and nodes.is_taken(f"{self.at}/{part}".lstrip("/"))]
        return [self.store.decoded(part) for part in lost]

    def check_name(self, name: str) -> None:
        self._part(name)

    def _part(self, name: str) -> str:
        """The part of a path for a name; those that Zarr keeps for itself, or would take for a path, are encoded."""
        try:
            name.encode()
        except UnicodeEncodeError as error:
            where = joined((*self.key, name))
            raise SaveError(f"entry {where!r}: this name has no UTF-8 form and cannot be held by a store") from error
        is_plain = bool(name.strip(".")) and not {"/", "\\"} & set(name) and name.isprintable() and name.strip() == name
        if not is_plain or name.startswith(("__", _ENCODED, _HIDDEN)) or name in _DOCUMENTS:
            return _ENCODED + quote(name, safe="")
        return name

    def _path_of(self, name: str) -> str:
        part = self._part(name)
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
                # What is only read is told apart by where it is.
                return _item_of(store, key, path, document, hash(path) & (1 << 62) - 1 if address == -1 else address)
        raise KeyError(name)

    def new_group(self, key: Path) -> Group:
        self.store.check_writable()
        with self.store.errors(key):
            document = _make_group()
            return _watched(_ZarrGroup(self.store, key, self._begin(key, document), document, -1))

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        self.store.check_writable()
        plain, name = stored_dtype(dtype)
        notes = {} if name is None else {_NOTES: {DTYPE[1:]: name, "version": 1}}
        with self.store.errors(key):
            layout = _layout(options, key, tuple(shape), plain.itemsize)
            at, document, array = self._create(key, shape, plain, notes, layout)
            return _watched(_ZarrArray(self.store, key, at, document, -1, array, dtype))

    def new_text(self, key: Path, content: str) -> Text:
        self.store.check_writable()
        raw = np.frombuffer(content.encode(), dtype=np.uint8)
        with self.store.errors(key):
            layout = {"chunks": (max(raw.size, 1),), "compressors": None}
            at, document, array = self._create(key, raw.shape, raw.dtype, {_VALUE: {"encoding": "json"}}, layout)
            if raw.size:
                array[...] = raw
            return _watched(_ZarrText(self.store, key, at, document, -1))

    def _begin(self, key: Path, document: Document) -> str:
        return self.store.nodes.begin(self._path_of(key[-1]), document, is_nested=self.address == -1)

    def _create(
        self, key: Path, shape: Sequence[int], dtype: Any, attributes: dict[str, Any], layout: dict[str, Any]
    ) -> tuple[str, Document, Any]:
        """Begin a draft of an array; return where it is, its document and the array."""
        from zarr.core.buffer import default_buffer_prototype

        library = zarr()
        # Zarr writes the document into a store of its own.
        made = library.create_array(
            library.storage.MemoryStore(),
            shape=tuple(shape), dtype=dtype, zarr_format=3, attributes=attributes, config=_CONFIG, **layout,
        ).metadata  # fmt: skip
        document = json.loads(made.to_buffer_dict(default_buffer_prototype())[_DOCUMENTS[0]].to_bytes())
        at = self._begin(key, document)
        return at, document, _array_over(self.store.nodes, at, document, made)

    def put(self, name: str, item: Item) -> None:
        assert isinstance(item, _ZarrNode)
        if item.at in self.store.nodes.drafts:
            self.store.changed()
            with self.store.errors((*self.key, name)):
                self.store.nodes.publish(item.at, self._path_of(name))
        # What is in a draft is seen with it.
        part = self._part(name)
        self._note(_ORDER, lambda noted: order if part in (order := _texts(noted)) else [*order, part])

    def delete(self, name: str) -> None:
        self.store.changed()
        path = self._path_of(name)
        if self.store.nodes.version(path) == -1:
            raise KeyError(name)
        with self.store.errors((*self.key, name)):
            self.store.nodes.delete(path)
        part = self._part(name)
        self._note(_ORDER, lambda noted: None if noted is None else [other for other in _texts(noted) if other != part])


def _watched(item: T) -> T:
    """The item; a draft that is given no name is deleted with it."""
    nodes, path = item.store.nodes, item.at
    if path in nodes.drafts:
        weakref.finalize(item, _discard, nodes, path).atexit = False
    return item


def _discard(nodes: Nodes, path: str) -> None:
    if path in nodes.drafts:
        nodes.discard(path)


def _item_of(store: ZarrStore, key: Path, path: str, document: Document, address: int) -> Item:
    where = store, key, path, document, address
    if document.get("node_type") == "group":
        return _ZarrGroup(*where)
    if document.get("node_type") != "array":
        raise ValueError(f"it is neither a group nor an array, but {document.get('node_type')!r:.40}")
    try:
        _check_codecs(document)
        array = _array_over(store.nodes, path, document)
        dtype = np.dtype(array.dtype)
        checked.shape(list(array.shape))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        return Other(store, key, address, f"an array that cannot be read ({error})")
    if _VALUE in (document.get("attributes") or {}):
        if dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"a value is kept as bytes, and not as {dtype} of shape {list(array.shape)}")
        return _ZarrText(*where)
    if _is_of_strings(dtype, document) and array.ndim <= 1:
        return _Strings(*where)
    kind = tensor_dtype(dtype, _ZarrNode(*where).text(DTYPE)) if dtype.kind in "biufc" else None
    if kind is None:
        return Other(store, key, address, f"an array of {dtype} of shape {list(array.shape)}")
    return _ZarrArray(*where, array, kind)


def _array_over(nodes: Nodes, at: str, document: Document, metadata: Any = None) -> Any:
    """Return the array of zarr at a path; the metadata are those in its document."""
    from zarr.core.array_spec import ArrayConfig
    from zarr.storage import StorePath

    library, config = zarr(), ArrayConfig.from_dict(_CONFIG)
    array = library.AsyncArray(metadata or dict(document), StorePath(nodes.chunks_within(None), at), config)
    if not nodes.is_folder and not nodes.is_zip:
        store = nodes.chunks_within(find_longest_chunk(document, array))
        array = library.AsyncArray(array.metadata, StorePath(store, at), config)
    return library.Array(array)


def _is_of_strings(dtype: np.dtype[Any], document: Document) -> bool:
    filters = document.get("filters") or ()
    return dtype.kind in "TU" or (dtype.kind == "O" and any(each.get("id") == "vlen-utf8" for each in filters))


def _check_codecs(document: Document) -> None:
    """Refuse an array whose elements are pickled, or of objects of any kind."""
    told = [document.get("compressor"), *(document.get("filters") or ()), *(document.get("codecs") or ())]
    for codec in told:
        name = codec.get("id") or codec.get("name") if isinstance(codec, dict) else codec
        if name is not None and "pickle" in str(name).lower():
            raise ValueError(f"its elements are pickled (codec {name!r:.40}), which is not read")


# --- how an array is cut ----------------------------------------------------------------------------------------------


def _layout(options: Mapping[str, Any], key: Path, shape: tuple[int, ...], itemsize: int) -> dict[str, Any]:
    """The arguments of `zarr.create_array` for an entry: by default one chunk, not compressed."""
    found = {name: _of_key(value, key) for name, value in options.items()}
    found = {name: value for name, value in found.items() if value is not None}
    whole = tuple([max(n, 1) for n in shape])
    chunks, shards = found.pop("chunks", whole), found.pop("shards", None)
    if chunks == "rows":
        chunks = max(_ROWS // max(math.prod(whole[1:]) * itemsize, 1), 1)
    found["chunks"] = _fitted(chunks, whole, key, "chunks")
    if shards is not None and shape:
        # Zarr wants whole chunks in a shard.
        sizes = zip(_fitted(shards, whole, key, "shards"), found["chunks"], strict=True)
        found["shards"] = tuple([-(-size // chunk) * chunk for size, chunk in sizes])
    found.setdefault("compressors", None)
    return found


def _of_key(value: Any, key: Path) -> Any:
    """An option for an entry: one for all, or by key in a dict, in which that of a container holds for all in it."""
    if not isinstance(value, dict) or "name" in value:
        return value
    paths = {path_of(name): option for name, option in value.items()}
    return next((paths[key[:length]] for length in range(len(key), 0, -1) if key[:length] in paths), None)


def _fitted(given: Any, shape: tuple[int, ...], key: Path, what: str) -> tuple[int, ...]:
    """The sizes of chunks or shards: those of the leading dims, the others being whole; an int is a number of rows."""
    try:
        sizes = (given,) if type(given) is int else tuple(given)
        fits = all(type(n) is int and n >= 1 for n in sizes) and not isinstance(given, str)
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(
            f"entry {joined(key)!r}: {what}={given!r} is no size of {what}: give an int, the number of rows, a row of "
            f"sizes, one for each leading dim, {'the word rows, ' if what == 'chunks' else ''}or a dict of these by key"
        )
    sizes = (*sizes, *shape[len(sizes) :])
    return tuple([min(n, size) for n, size in zip(sizes, shape)])
