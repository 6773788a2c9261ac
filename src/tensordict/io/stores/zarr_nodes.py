"""The nodes of a Zarr store, for `zarr.py`. This module reads and writes their documents, `zarr.json`; zarr the chunks.

A reader finds a node by its document. The documents of a *draft* therefore stay in memory, as dicts, until its chunks
are written. A save that fails or is killed leaves no node behind. The chunks of a draft are written to the path of the
node. If that path is taken, they are written next to it, and the two are swapped.

Each call of zarr passes through the thread of its event loop, which takes longer than reading a small file. `Folder`
therefore uses the file system directly, and `Objects` wraps every other store of zarr.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zarr
from zarr.abc.store import RangeByteRequest
from zarr.core.array_spec import ArrayConfig
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath, WrapperStore, ZipStore

from tensordict.core.json_text import parse_json
from tensordict.io.saving import commit
from tensordict.io.saving.source import SaveFolder
from tensordict.io.stores.zarr_chunks import find_longest_chunk

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

Document = dict[str, Any]

DOCUMENT = "zarr.json"
# Files that belong to a group itself, rather than to its nodes.
_OWN_FILES = (DOCUMENT, ".zgroup", ".zattrs", ".zmetadata")
# Prefix of the names of drafts that are written next to the node they replace.
HIDDEN = ".tensordict-"
# Seconds to wait while another process changes the state of a node.
_PATIENCE = 60
# Write chunks of zeros, too. By default zarr skips or deletes them.
_CONFIG = ArrayConfig("C", write_empty_chunks=True)
_MISSING = (FileNotFoundError, NotADirectoryError)


class Folder:
    """Reads and writes the files of a Zarr store in a folder; keys are paths below the folder."""

    def __init__(self, store: Any) -> None:
        self.root = os.fspath(store.root)

    @functools.cached_property
    def links(self) -> SaveFolder:
        """Guard that refuses links out of the folder, which zarr would follow."""
        return SaveFolder(self.root)

    def read(self, key: str) -> bytes | None:
        """Return the content of a file; `None` if it is missing."""
        path = f"{self.root}/{key}"
        self.links.check(path, ())
        try:
            with open(path, "rb") as file:
                return file.read()
        except _MISSING:
            return None

    def write(self, contents: Mapping[str, bytes]) -> None:
        """Write files, each atomically. The last one is written after all others."""
        for key, content in contents.items():
            _replace_file(f"{self.root}/{key}", content)

    def find_nodes(self, path: str) -> Iterable[str]:
        """Return the names of the nodes in a folder."""
        folder = f"{self.root}/{path}"
        with contextlib.suppress(*_MISSING):
            return [name for name in os.listdir(folder) if os.path.isfile(f"{folder}/{name}/{DOCUMENT}")]
        return ()

    def list_names(self, path: str) -> list[str]:
        """Return the names of the files and folders in a folder."""
        with contextlib.suppress(*_MISSING):
            return os.listdir(f"{self.root}/{path}")
        return []

    def list_keys(self, path: str) -> list[str]:
        """Return the keys below a path, without that path."""
        start = f"{self.root}/{path}"
        return [f"{folder}/{name}"[len(start) + 1 :] for folder, _, names in os.walk(start) for name in names]

    def exists(self, path: str) -> bool:
        """Return True if a path is taken; for the empty path, if the store has any content."""
        return os.path.lexists(f"{self.root}/{path}") if path else bool(self.list_names(""))

    def size_of(self, key: str) -> int | None:
        """Return the length of a file; `None` if it is missing."""
        try:
            return os.path.getsize(f"{self.root}/{key}")
        except _MISSING:
            return None

    def remove(self, path: str) -> None:
        """Remove a folder atomically for readers; the empty path removes the content of the store."""
        if path:
            aside = hide(path)
            os.rename(f"{self.root}/{path}", f"{self.root}/{aside}")
            shutil.rmtree(f"{self.root}/{aside}")
        elif os.path.isdir(self.root):
            commit.empty(self.root)

    def move(self, source: str, target: str) -> None:
        """Move a folder to a path, and remove the folder that was there."""
        new, old = f"{self.root}/{source}", f"{self.root}/{target}"
        if not os.path.lexists(old):
            os.rename(new, old)
            return
        commit.swap(new, old)
        shutil.rmtree(new)


class Objects:
    """Reads and writes the objects of any other Zarr store; the same methods as `Folder`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        sync(store._ensure_open())

    def read(self, key: str) -> bytes | None:
        return self.read_all([key])[0]

    def read_all(self, keys: Iterable[str]) -> list[bytes | None]:
        """Read several objects concurrently, because each may be a request to a server."""
        found = sync(_gather(lambda key: self.store.get(key, default_buffer_prototype()), keys))
        return [None if content is None else content.to_bytes() for content in found]

    def write(self, contents: Mapping[str, bytes]) -> None:
        *others, last = contents
        buffer = default_buffer_prototype().buffer
        for keys in (others, [last]):
            sync(_gather(lambda key: self.store.set(key, buffer.from_bytes(contents[key])), keys))

    def list_names(self, path: str) -> list[str]:
        # The claim file of a saver does not count as content.
        names = [name.rstrip("/") for name in sync(_collect(self.store.list_dir, path))]
        return [name for name in names if path or name != commit.JOURNAL]

    def list_keys(self, path: str) -> list[str]:
        return [key.removeprefix(f"{path}/") for key in sync(_collect(self.store.list_prefix, f"{path}/"))]

    def exists(self, path: str) -> bool:
        return self.store.supports_listing and bool(self.list_names(path))

    def size_of(self, key: str) -> int | None:
        try:
            size: int = sync(self.store.getsize(key))
            return size
        except _MISSING:
            return None

    def remove(self, path: str) -> None:
        # Readers need the document, so delete it first.
        sync(self.store.delete(join(path, DOCUMENT)))
        sync(self.store.delete_dir(path))

    def move(self, source: str, target: str) -> None:
        self.remove(target)
        for key in self.list_keys(source):
            self.write({f"{target}/{key}": self.read(f"{source}/{key}") or b""})
        sync(self.store.delete_dir(source))


# Some stores must be called from the event loop.
async def _gather(call: Callable[[str], Any], keys: Iterable[str]) -> list[Any]:
    return await asyncio.gather(*map(call, keys))


async def _collect(call: Callable[[str], Any], path: str) -> list[str]:
    return [name async for name in call(path)]


class Nodes:
    """The nodes of a store. Drafts are visible only here.

    Args:
        store: the store of zarr.
        is_given: True if the caller closes the store.

    Attributes:
        content: reads and writes the files or objects of the store.
        drafts: the paths of the drafts.
        is_old: True for a store of Zarr v2, which is read-only.
        is_folder, is_zip: True for a local folder or zip file.
        lists: True if the store supports `find_children`.
    """

    def __init__(self, store: Store, is_given: bool = False) -> None:
        self.store = store
        self._is_given = is_given
        self.drafts: set[str] = set()
        self.is_old = False
        self.is_folder = type(store) is LocalStore
        # Members of a zip file cannot be rewritten, so its documents stay pending until it is closed.
        self.is_zip = isinstance(store, ZipStore)
        self.content: Folder | Objects = Folder(store) if self.is_folder else Objects(store)
        # Documents that are not written yet, by path.
        self._pending: dict[str, Document] = {}
        # Cached documents, by path.
        self._known: dict[str, Document] = {}
        self._children: dict[str, list[str]] = {}
        self._knows_all = False
        self._blocks: set[object] = set()

    @property
    def keeps(self) -> bool:
        """True while documents are cached. Writable folders need no cache, because reading them is fast."""
        return self.store.read_only or bool(self._blocks)

    @property
    def lists(self) -> bool:
        return self._knows_all or self.store.supports_listing

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """Cache documents during a block, unless the store is a folder."""
        block = object()
        if not self.is_folder:
            self._blocks.add(block)
        try:
            yield
        finally:
            self._blocks.discard(block)
            if not self.keeps:
                self._forget()

    def _forget(self) -> None:
        self._known.clear()
        self._children.clear()

    def array_over(self, path: str, document: Document, metadata: Any = None) -> Any:
        """Return the zarr array at a path; `metadata` is the parsed document, if the caller has it."""
        metadata = metadata or dict(document)
        array: Any = zarr.AsyncArray(metadata, StorePath(Chunks(self), path), _CONFIG)
        if not self.is_folder and not self.is_zip:
            # Servers are untrusted: bound the size of their answers.
            chunks = Chunks(self, find_longest_chunk(document, array))
            array = zarr.AsyncArray(array.metadata, StorePath(chunks, path), _CONFIG)
        return zarr.Array(array)

    # --- documents ----------------------------------------------------------------------------------------------------

    def document(self, path: str) -> Document | None:
        """Return the document of the node at a path; `None` if it is missing.

        Raises:
            ValueError: the document is broken.
        """
        found = self._pending.get(path) if self.is_zip else self._known.get(path)
        if found is None and not self._knows_all:
            found = self._old_document(path) if self.is_old else self._read(path, DOCUMENT)
            if found is not None and self.keeps:
                self._known[path] = found
        return found

    def _read(self, path: str, name: str) -> Document | None:
        content = self.content.read(join(path, name))
        return None if content is None else _parse(content)

    def _old_document(self, path: str) -> Document | None:
        """Return the document of a node of Zarr v2, in the form of v3."""
        array = self._read(path, ".zarray")
        if array is None and self._read(path, ".zgroup") is None:
            return None
        attributes = self._read(path, ".zattrs") or {}
        kind = "group" if array is None else "array"
        return {**(array or {}), "zarr_format": 2, "node_type": kind, "attributes": attributes}

    @contextlib.contextmanager
    def alone(self, path: str) -> Iterator[None]:
        """Lock the node at a path against other processes during a block. Only folders have such a lock."""
        if not isinstance(self.content, Folder):
            yield
            return
        with commit.hold_lock(f"{self.content.root}/{path}", patience=_PATIENCE):
            yield

    def set_document(self, path: str, document: Document) -> None:
        """Write the document of a published node."""
        if self.is_zip:
            self._pending[path] = document
        else:
            self._forget()
            self._write({path: document})

    def _write(self, documents: Mapping[str, Document]) -> None:
        contents = {}
        for path, document in documents.items():
            contents[join(path, DOCUMENT)] = json.dumps(document, indent=2).encode()
        self.content.write(contents)

    def version(self, path: str) -> int:
        """Return a number that changes when the node at `path` is replaced; -1 if it is missing."""
        if isinstance(self.content, Folder):
            try:
                found = os.stat(f"{self.content.root}/{join(path, DOCUMENT)}")
            except _MISSING:
                return -1
            return hash((path, found.st_ino, found.st_mtime_ns)) & (1 << 62) - 1
        document = self.document(path)
        return -1 if document is None else hash((path, json.dumps(document))) & (1 << 62) - 1

    def find_children(self, path: str) -> list[str]:
        """Return the names of the nodes in a group, sorted."""
        found = self._children.get(path)
        if found is None:
            names = _names_in(self._known, path) if self._knows_all else self._list(path)
            found = sorted([name for name in names if not name.startswith(HIDDEN)])
            if self.keeps:
                self._children[path] = found
        return found.copy()

    def _list(self, path: str) -> Iterable[str]:
        if self.is_zip and not self.store.read_only:
            # A zip file that the caller opened may have been written to before.
            there = [
                name
                for name in self.content.list_names(path)
                if self.content.read(join(path, f"{name}/{DOCUMENT}")) is not None
            ]
            return {*_names_in(self._pending.copy(), path), *there}
        if isinstance(self.content, Folder) and not self.is_old:
            return self.content.find_nodes(path)
        names = [name for name in self.content.list_names(path) if name not in _OWN_FILES]
        if isinstance(self.content, Objects) and not self.is_old:
            contents = self.content.read_all([join(path, f"{name}/{DOCUMENT}") for name in names])
            found = {name: content for name, content in zip(names, contents, strict=True) if content is not None}
            for name, content in found.items() if self.keeps else ():
                # Reading a broken document later raises its error.
                with contextlib.suppress(ValueError):
                    self._known[join(path, name)] = _parse(content)
            return found
        return [name for name in names if self._old_document(join(path, name)) is not None]

    def take_over_all(self, root: Document) -> None:
        """Cache the documents of all nodes from the consolidated metadata of the root.

        Raises:
            ValueError: the consolidated metadata is broken.
        """
        nodes = root["consolidated_metadata"].get("metadata")
        if not isinstance(nodes, dict) or not all(_is_path(path) and isinstance(nodes[path], dict) for path in nodes):
            raise ValueError("its consolidated metadata is no mapping of paths to documents")
        self._known.update(nodes)
        self._knows_all = True

    # --- drafts -------------------------------------------------------------------------------------------------------

    def begin(self, path: str, document: Document) -> str:
        """Begin a draft of a node; returns the path to write to, next to the path of the node if that is taken."""
        if self.is_taken(path):
            if self.is_zip:
                raise ValueError("nothing in a zip file is replaced: write to a folder")
            path = hide(path)
        self.begin_at(path, document)
        return path

    def begin_at(self, path: str, document: Document, is_nested: bool = False) -> None:
        """Begin a draft at a free path. A draft nested in another one is published with it."""
        if not is_nested:
            self.drafts.add(path)
        self._pending[path] = document

    def is_taken(self, path: str) -> bool:
        """Return True if a path is taken."""
        return path in self._pending or self.content.exists(path)

    def clear_all(self) -> None:
        """Delete the content of the store except the claim of a saver. A new zip file is already empty."""
        self._pending.clear()
        if not self.is_zip:
            self.content.remove("")

    def publish(self, draft: str, path: str, many: int | None = None) -> bool:
        """Publish a draft at `path`, and remove the node that was there.

        Args:
            draft: the path of the draft.
            path: the path of the node.
            many: consolidate if the draft, the root, has more nodes than this.

        Returns:
            True if the document of the root holds the documents of all nodes.
        """
        self.drafts.remove(draft)
        self._forget()
        documents = self._find_pending(draft)
        is_many = many is not None and len(documents) > many
        if is_many:
            self._pending[draft] = documents[draft] = _with_all(documents)
        if self.is_zip:
            return is_many
        for inner in documents:
            del self._pending[inner]
        if draft != path and isinstance(self.content, Objects):
            self.content.move(draft, path)
            documents = {path + inner[len(draft) :]: document for inner, document in documents.items()}
            draft = path
        # The document of the draft itself is written last: it makes the draft visible.
        documents[draft] = documents.pop(draft)
        self._write(documents)
        if draft != path:
            self.content.move(draft, path)
        return is_many

    def _find_pending(self, draft: str) -> dict[str, Document]:
        """Return the documents of a draft and of the nodes in it."""
        pending, below = self._pending.copy(), f"{draft}/"
        if not draft:
            return pending
        return {path: pending[path] for path in pending if path == draft or path.startswith(below)}

    def discard(self, draft: str) -> None:
        """Delete a draft."""
        self.drafts.discard(draft)
        if not draft:
            self.clear_all()
            return
        for path in self._find_pending(draft):
            del self._pending[path]
        if not self.is_zip and not self.store.read_only:
            commit.try_to(self.content.remove, draft)

    def delete(self, path: str) -> None:
        """Delete the node at a path."""
        if self.is_zip:
            raise ValueError("nothing in a zip file is deleted: write to a folder")
        self._forget()
        self.content.remove(path)

    def close(self) -> None:
        """Close the store. A zip file gets its pending documents; elsewhere they are of a save that has failed."""
        if self._pending and self.is_zip and not self.store.read_only:
            self._write(self._pending)
            self._pending = {}
        if not self._is_given:
            self.store.close()


def make_array(shape: Sequence[int], dtype: Any, attributes: Document, layout: Document) -> tuple[Document, Any]:
    """Return the document of a new array, and its metadata; `layout` are arguments of `zarr.create_array`."""
    # zarr writes the document to a temporary store in memory.
    made = zarr.create_array(
        MemoryStore(), shape=tuple(shape), dtype=dtype, zarr_format=3, attributes=attributes, config=_CONFIG, **layout
    ).metadata
    return json.loads(made.to_buffer_dict(default_buffer_prototype())[DOCUMENT].to_bytes()), made


class Chunks(WrapperStore[Any]):
    """The store that zarr uses for one array; refuses links out of the folder and answers that are too long.

    Args:
        nodes: the nodes of the store.
        limit: the length of a chunk or shard in bytes; `None` for any length.
    """

    def __init__(self, nodes: Nodes, limit: int | None = None) -> None:
        super().__init__(nodes.store)
        self._nodes, self._limit = nodes, limit

    def _check(self, key: str) -> None:
        if isinstance(content := self._nodes.content, Folder):
            content.links.check(f"{content.root}/{key}", ())

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        self._check(key)
        if (limit := self._limit) is None:
            return await super().get(key, prototype, byte_range)
        # The index of a shard locates its chunks, and is untrusted.
        if isinstance(byte_range, RangeByteRequest) and (count := byte_range.end - byte_range.start) > limit:
            raise ValueError(f"a part of {key!r} has {count:,} bytes, where its array allows {limit:,} in all")
        # One byte past the limit reveals a chunk that is too long.
        wanted = RangeByteRequest(0, limit + 1) if byte_range is None else byte_range
        found = await super().get(key, prototype, wanted)
        if found is not None and len(found) > limit:
            raise ValueError(f"{key!r} has more than the {limit:,} bytes that its array allows")
        return found

    async def set(self, key: str, value: Buffer) -> None:
        self._check(key)
        if self._nodes.is_zip and await self.exists(key):
            raise ValueError(f"{key} is in the zip file already, in which nothing is replaced: write to a folder")
        await super().set(key, value)


def join(path: str, name: str) -> str:
    """Return the path of a name in the group at `path`; the path of the root is empty."""
    return f"{path}/{name}" if path else name


def hide(path: str) -> str:
    """Return an unused path next to `path` that readers ignore."""
    return join(path.rpartition("/")[0], f"{HIDDEN}{uuid.uuid4().hex}")


def _names_in(paths: Collection[str], group: str) -> Iterator[str]:
    for path in paths:
        outer, _, name = path.rpartition("/")
        if outer == group and name:
            yield name


def _is_path(path: str) -> bool:
    return all(part and part.strip(".") for part in path.split("/"))


def _replace_file(path: str, content: bytes) -> None:
    part = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(part, "xb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        commit.try_to(os.unlink, part)
        raise


def _parse(content: bytes) -> Document:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"its document is broken: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("its document is no JSON object")
    return found


def _with_all(documents: Mapping[str, Document]) -> Document:
    """Return the document of the root with consolidated metadata of all other nodes."""

    def inside(nodes: dict[str, Document]) -> Document:
        return {"kind": "inline", "must_understand": False, "metadata": nodes}

    nodes = {
        path: {**document, "consolidated_metadata": inside({})} if document["node_type"] == "group" else document
        for path, document in sorted(documents.items())
        if path
    }
    return {**documents[""], "consolidated_metadata": inside(nodes)}
