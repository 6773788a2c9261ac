"""The nodes of a Zarr store: their documents, `zarr.json`, are read and written here, the chunks of arrays by zarr.

A node of Zarr v3 is there once its document is. So that of a *draft* is kept in memory until all of it is written, and
set last: what fails, or is killed, leaves no node behind. A draft is written where the node will be; where something is
in the way, beside it, and the two change places.

Each call of zarr goes through the thread of its event loop, which takes longer than reading a small file: so documents
in a folder are read and written here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zarr.abc.store import RangeByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, WrapperStore, ZipStore

from tensordict.core.json_text import parse_json
from tensordict.io import commit
from tensordict.io.source import Save

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest, Store
    from zarr.core.buffer import Buffer, BufferPrototype

Document = dict[str, Any]

DOCUMENT = "zarr.json"
# The files of a group that are no nodes in it.
_OWN_FILES = (DOCUMENT, ".zgroup", ".zattrs", ".zmetadata")
# What the names of drafts begin with that are written beside what they replace.
HIDDEN = ".tensordict-"
# How long others may take to change the notes of a node, in seconds.
_PATIENCE = 60
_MISSING = (FileNotFoundError, NotADirectoryError)


class NodeStore(WrapperStore[Any]):
    """A store whose drafts are seen by who writes them only.

    Attributes:
        drafts: the paths of nodes that are not seen yet.
        is_old: whether it is of Zarr v2, and only read.
        is_folder: whether it is a folder here.
        is_here: whether it is a folder or a file here, which is as long as the disk says.
        links: refuses links that lead out of the folder; `None` for other stores.
        lists: whether `children` can be asked for.
    """

    def __init__(self, store: Store, is_given: bool = False) -> None:
        super().__init__(store)
        self._is_given = is_given
        self.drafts: set[str] = set()
        # The documents and listings that have been read, while they are kept: always, where nothing is written, else in
        # the blocks of `keeping`; all of them, where the root has the documents of all.
        self.known: dict[str, Document] = {}
        self._names: dict[str, list[str]] = {}
        self._knows_all = False
        self._blocks: set[object] = set()
        self.is_old = False
        # The documents of drafts, by path, those of nested nodes too.
        self._pending: dict[str, bytes] = {}
        self._root = os.fspath(store.root) if type(store) is LocalStore else None
        self.is_folder = self._root is not None
        self.links = None if self._root is None else Save(self._root)
        # Nothing in a zip file can be written again, so documents are kept until it is closed.
        self._is_zip = isinstance(store, ZipStore)
        self.is_here = self.is_folder or self._is_zip
        if self._root is None:
            sync(store._ensure_open())

    @property
    def keeps(self) -> bool:
        """Whether what has been read is kept; of a folder, only where nothing is written, as reading it is fast."""
        return self.read_only or bool(self._blocks)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """A block in which each document is read once, unless it is of a folder."""
        block = object()
        if self._root is None:
            self._blocks.add(block)
        try:
            yield
        finally:
            self._blocks.discard(block)
            if not self.keeps:
                self._forget()

    def _forget(self) -> None:
        if not self.read_only:
            self.known.clear()
            self._names.clear()

    @property
    def lists(self) -> bool:
        return self._knows_all or self._store.supports_listing

    def is_draft(self, path: str) -> bool:
        """Whether a path is that of a draft, or in one."""
        return bool(self.drafts) and any(_is_in(path, draft) for draft in self.drafts.copy())

    def folder_of(self, path: str) -> str | None:
        """The folder of a node, where the store is a folder."""
        return None if self._root is None else f"{self._root}/{path}"

    def limit_chunks(self, limit: int | None) -> Store:
        """Return the store for an array whose chunks have at most `limit` bytes; `None` allows any number."""
        return self if limit is None else BoundedChunks(self, limit)

    # --- what zarr asks -----------------------------------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if (path := self._path_kept(key)) is not None:
            content = self._pending.get(path)
            return None if content is None else prototype.buffer.from_bytes(content)
        self.refuse_link(key)
        return await super().get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        if (path := self._path_kept(key)) is not None:
            return path in self._pending
        return await super().exists(key)

    async def set(self, key: str, value: Buffer) -> None:
        if (path := self._path_kept(key)) is not None:
            self._pending[path] = value.to_bytes()
            return
        if self._is_zip and await super().exists(key):
            raise ValueError(f"{key} is in the zip file already, in which nothing is replaced: write to a folder")
        self.refuse_link(key)
        if key.endswith(DOCUMENT):
            self._forget()
        await super().set(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        if not await self.exists(key):
            await self.set(key, value)

    def refuse_link(self, key: str) -> None:
        """Raise a `SaveError` where a link on the way to a file leads out of the folder; zarr follows any."""
        if self.links is not None:
            self.links.check(f"{self._root}/{key}", ())

    def _path_kept(self, key: str) -> str | None:
        """The path of the node whose document a key is, if that is kept in memory."""
        if key != DOCUMENT and not key.endswith(f"/{DOCUMENT}"):
            return None
        path = key[: -len(DOCUMENT) - 1]
        return path if (self._is_zip and not self.read_only) or self.is_draft(path) else None

    # --- documents ----------------------------------------------------------------------------------------------------

    def document(self, path: str) -> Document | None:
        """The document of the node at a path; `None` when there is none.

        Raises:
            ValueError: it is none of a node.
        """
        found = self.known.get(path)
        if found is None and not self._knows_all:
            found = self._old_document(path) if self.is_old else _parsed(self._content(path, DOCUMENT))
        if self.keeps and found is not None and not self.is_draft(path):
            self.known[path] = found
        return found

    def _content(self, path: str, name: str) -> bytes | None:
        key = _key(path, name)
        if self._path_kept(key) is not None:
            return self._pending.get(path)
        if self._root is not None:
            self.refuse_link(key)
            try:
                with open(f"{self._root}/{key}", "rb") as file:
                    return file.read()
            except _MISSING:
                return None
        found = sync(self.get(key, default_buffer_prototype()))
        return None if found is None else found.to_bytes()

    def _old_document(self, path: str) -> Document | None:
        """The document of a node of Zarr v2 in the form of v3."""
        array = _parsed(self._content(path, ".zarray"))
        group = None if array is not None else _parsed(self._content(path, ".zgroup"))
        if array is None and group is None:
            return None
        attributes = _parsed(self._content(path, ".zattrs")) or {}
        kind = "group" if array is None else "array"
        return {**(array or {}), "zarr_format": 2, "node_type": kind, "attributes": attributes}

    @contextlib.contextmanager
    def alone(self, path: str) -> Iterator[None]:
        """A block in which no other process changes the notes of a node in a folder; those of a server may be."""
        if self._root is None or self.is_draft(path):
            yield
            return
        with commit.locked(f"{self._root}/{path}", patience=_PATIENCE):
            yield

    def write_document(self, path: str, document: Document) -> None:
        """Have a node have a document."""
        self._write(path, json.dumps(document, indent=2).encode())

    def _write(self, path: str, content: bytes) -> None:
        key = _key(path, DOCUMENT)
        if self._path_kept(key) is not None:
            self._pending[path] = content
        elif self._root is not None:
            _replace_file(f"{self._root}/{key}", content)
        else:
            sync(self.set(key, default_buffer_prototype().buffer.from_bytes(content)))

    def version(self, path: str) -> int:
        """A number that changes when another node takes the place of that at `path`; -1 when there is none."""
        key = _key(path, DOCUMENT)
        if self._root is not None and not self.is_draft(path):
            try:
                found = os.stat(f"{self._root}/{key}")
            except _MISSING:
                return -1
            return hash((path, found.st_ino, found.st_mtime_ns)) & (1 << 62) - 1
        document = self.document(path)
        return -1 if document is None else hash((path, json.dumps(document))) & (1 << 62) - 1

    def is_gone(self, path: str) -> bool:
        """Whether a node that was in a folder is no longer there; of another store that is not asked."""
        return self._root is not None and self.version(path) == -1

    def children(self, path: str) -> list[str]:
        """The names of the nodes in a group, sorted."""
        if (known := self._names.get(path)) is not None:
            return list(known)
        if self._knows_all:
            return sorted({name for inner in self.known if (name := _name_in(inner, path)) is not None})
        names = self._found_in(path)
        if self.keeps and not self.is_draft(path):
            self._names[path] = names
        return list(names)

    def _found_in(self, path: str) -> list[str]:
        found = {name for inner in self._pending.copy() if (name := _name_in(inner, path)) is not None}
        if self._root is not None and not self.is_old:
            folder = f"{self._root}/{path}"
            with contextlib.suppress(*_MISSING):
                found.update(name for name in os.listdir(folder) if os.path.isfile(f"{folder}/{name}/{DOCUMENT}"))
        else:
            for name in sync(self._listed(path)):
                inner = f"{path}/{name}" if path else name
                if self._is_node(inner):
                    found.add(name)
        return sorted(name for name in found if not name.startswith(HIDDEN))

    def _is_node(self, path: str) -> bool:
        try:
            return path in self._pending or self.document(path) is not None
        except ValueError:
            # It has a document, which is broken: that is told when it is asked for.
            return True

    async def _listed(self, path: str) -> list[str]:
        listed = [name.rstrip("/") async for name in self._store.list_dir(path)]
        names = [name for name in listed if name not in _OWN_FILES]
        if self.keeps and not self.is_old:
            # All at once: each may be a way to a server.
            inner = [f"{path}/{name}" if path else name for name in names]
            buffers = [self._store.get(_key(name, DOCUMENT), default_buffer_prototype()) for name in inner]
            for name, found in zip(inner, await asyncio.gather(*buffers), strict=True):
                with contextlib.suppress(ValueError):
                    if (document := _parsed(None if found is None else found.to_bytes())) is not None:
                        self.known[name] = document
        return names

    def consolidated(self) -> bool:
        """Take over the documents of all nodes from that of the root, if they are in it; whether they are."""
        root = self.document("")
        found = None if root is None else root.get("consolidated_metadata")
        if not isinstance(found, dict) or not self.read_only:
            return isinstance(found, dict)
        nodes = found.get("metadata")
        if not isinstance(nodes, dict) or not all(_is_path(path) and isinstance(nodes[path], dict) for path in nodes):
            raise ValueError("its consolidated metadata is no mapping of paths to documents")
        self.known.update(nodes)
        self._knows_all = True
        return True

    # --- drafts -------------------------------------------------------------------------------------------------------

    def begin(self, path: str) -> str:
        """The path at which a draft of the node at `path` is written: there, unless there is something already."""
        if self.is_draft(path):
            return path
        if self.is_taken(path):
            if self._is_zip:
                raise ValueError("nothing in a zip file is replaced: write to a folder")
            path = _hidden_beside(path)
        self.drafts.add(path)
        return path

    def is_taken(self, path: str) -> bool:
        """Return whether a path has anything. The root has more than the claim of a saver."""
        if self._root is not None:
            where = f"{self._root}/{path}"
            return os.path.lexists(where) if path else os.path.isdir(where) and bool(os.listdir(where))
        return path in self._pending or (self.lists and sync(self._any_in(path)))

    async def _any_in(self, path: str) -> bool:
        names = [name async for name in self._store.list_dir(path) if path or name != commit.JOURNAL]
        return bool(names)

    def keys_in(self, path: str) -> frozenset[str] | None:
        """The keys below a node, without the path before them; `None` where the store lists none."""
        if not self._store.supports_listing:
            return None
        return sync(self._list_keys(f"{path}/"))

    async def _list_keys(self, prefix: str) -> frozenset[str]:
        return frozenset([key.removeprefix(prefix) async for key in self._store.list_prefix(prefix)])

    def size_of(self, key: str) -> int | None:
        """How many bytes are under a key; `None` when there is nothing."""
        try:
            size: int = sync(self._store.getsize(key))
            return size
        except _MISSING:
            return None

    def is_there(self, key: str) -> bool:
        """Whether there is anything under a key."""
        return sync(self.exists(key))

    def clear_all(self) -> None:
        """Delete all that is in the store but the claim of a saver; a zip file that is written is empty."""
        self._pending.clear()
        if self._root is not None:
            if os.path.isdir(self._root):
                commit.empty(self._root)
        elif not self._is_zip:
            # From then on nobody reads what is deleted.
            sync(self._store.delete(DOCUMENT))
            sync(self._store.delete_dir(""))

    def publish_root(self, many: int) -> bool:
        """Have the root seen, with the documents of all nodes in its own where they are many; whether they are."""
        is_many = len(self._pending) > many
        self.publish("", "", is_many)
        return is_many

    def publish(self, draft: str, path: str, consolidate: bool = False) -> None:
        """Have a draft seen at `path`, in the place of what is there.

        Args:
            draft: what `begin` gave.
            path: of the node.
            consolidate: have the documents of all nodes in that of the draft, which is the root.
        """
        self.drafts.remove(draft)
        self._forget()
        nested = sorted((inner for inner in self._pending.copy() if _is_in(inner, draft)), key=len, reverse=True)
        if consolidate:
            self._pending[draft] = _with_all({inner: json.loads(self._pending[inner]) for inner in reversed(nested)})
        if self._is_zip:
            return
        is_moved = draft != path
        if is_moved and self._root is None:
            sync(self._move(draft, path))
        target = path if self._root is None else draft
        contents = {target + inner[len(draft) :]: self._pending.pop(inner) for inner in nested}
        own = contents.pop(target)
        if self._root is None:
            sync(self._set_all(contents))
        else:
            for inner, content in contents.items():
                self._write(inner, content)
        self._write(target, own)
        if is_moved and self._root is not None:
            self._exchange(draft, path)

    async def _set_all(self, contents: dict[str, bytes]) -> None:
        buffer = default_buffer_prototype().buffer
        sets = [self._store.set(_key(path, DOCUMENT), buffer.from_bytes(content)) for path, content in contents.items()]
        await asyncio.gather(*sets)

    def _exchange(self, draft: str, path: str) -> None:
        new, old = f"{self._root}/{draft}", f"{self._root}/{path}"
        if not os.path.lexists(old):
            os.rename(new, old)
            return
        commit.swap(new, old)
        shutil.rmtree(new)

    async def _move(self, source: str, target: str) -> None:
        await self._store.delete_dir(target)
        async for key in self._store.list_prefix(f"{source}/"):
            await self._store.set(target + key[len(source) :], await self._store.get(key, default_buffer_prototype()))
        await self._store.delete_dir(source)

    def discard(self, draft: str) -> None:
        """Delete a draft and what was written of it."""
        self.drafts.discard(draft)
        self._forget()
        if not draft:
            self.clear_all()
            return
        for path in [path for path in self._pending.copy() if _is_in(path, draft)]:
            del self._pending[path]
        if self._root is not None:
            shutil.rmtree(f"{self._root}/{draft}", ignore_errors=True)
        elif not self._is_zip and not self.read_only:
            sync(self._store.delete_dir(draft))

    def delete_node(self, path: str) -> None:
        """Delete the node at a path."""
        if self._is_zip:
            raise ValueError("nothing in a zip file is deleted: write to a folder")
        self._forget()
        if self.is_draft(path):
            self.discard(path)
        elif self._root is not None:
            aside = f"{self._root}/{_hidden_beside(path)}"
            os.rename(f"{self._root}/{path}", aside)
            shutil.rmtree(aside)
        else:
            sync(self._store.delete(_key(path, DOCUMENT)))
            sync(self._store.delete_dir(path))

    def close(self) -> None:
        """Write what is left to write, and close the store."""
        if self._is_zip and not self.read_only:
            sync(self._set_all(self._pending))
            self._pending = {}
        if not self._is_given:
            super().close()


class BoundedChunks(WrapperStore[Any]):
    """The store of one array: it reads no more of a chunk than the array allows.

    Args:
        store: the nodes.
        limit: the length of a chunk, or of a shard, in bytes.
    """

    def __init__(self, store: NodeStore, limit: int) -> None:
        super().__init__(store)
        self._limit = limit

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        # The index of a shard says where its chunks are, and may say anything.
        if isinstance(byte_range, RangeByteRequest) and (count := byte_range.end - byte_range.start) > self._limit:
            raise ValueError(f"a part of {key!r} has {count:,} bytes, where its array allows {self._limit:,} in all")
        # The byte behind the limit shows that a chunk is too long.
        wanted = RangeByteRequest(0, self._limit + 1) if byte_range is None else byte_range
        found: Buffer | None = await self._store.get(key, prototype, wanted)
        if found is not None and len(found) > self._limit:
            raise ValueError(f"{key!r} has more than the {self._limit:,} bytes that its array allows")
        return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block without the warnings of zarr of what is no part of the specification yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _key(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}/")


def _name_in(path: str, group: str) -> str | None:
    """The name of a node in a group; `None` for what is not right in it."""
    if not path or not _is_in(path, group) or path == group:
        return None
    name = path[len(group) + 1 :] if group else path
    return None if "/" in name else name


def _is_path(path: str) -> bool:
    return all(part and part.strip(".") for part in path.split("/"))


def _hidden_beside(path: str) -> str:
    return _key(path.rpartition("/")[0], f"{HIDDEN}{uuid.uuid4().hex}")


def _replace_file(path: str, content: bytes) -> None:
    part = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        file = open(part, "xb")  # noqa: SIM115
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = open(part, "xb")  # noqa: SIM115
    try:
        with file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        commit.unless_it_fails(os.unlink, part)
        raise


def _parsed(content: bytes | None) -> Document | None:
    if content is None:
        return None
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"its document is broken: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("its document is no JSON object")
    return found


def _with_all(documents: dict[str, Document]) -> bytes:
    """The document of the root, with those of all nodes in it."""
    root = documents.pop("")

    def inside(nodes: dict[str, Document]) -> Document:
        return {"kind": "inline", "must_understand": False, "metadata": nodes}

    nodes = {
        path: {**document, "consolidated_metadata": inside({})} if document["node_type"] == "group" else document
        for path, document in sorted(documents.items())
    }
    return json.dumps({**root, "consolidated_metadata": inside(nodes)}, indent=2).encode()
