"""Containers on Redis servers as array stores, for `TensorDictStore`; `redis_wire.py` describes the layout.

The paths, shapes and dtypes of leaves are cached. Each read or write of elements compares them on the server, and
requests for whole containers list the names again. Each call sends its writes in one request, which the server executes
completely or not at all. Data that is larger than a request is uploaded first, under a temporary name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.locks import Lock
from tensordict.io import checks
from tensordict.io.stores.array_store import SIZE, Item, Pick, StaleError, Store, decode_name
from tensordict.io.stores.entries import CLASS
from tensordict.io.stores.redis_items import Meta, WireArray, WireGroup, addresses, parse_notes
from tensordict.io.stores.redis_wire import FORGOTTEN, LIMIT, Address, Check, Command, Request, Wire, is_freeing


class Scope:
    """The requests of one block of `Server.together`: prefetched reads and pending writes.

    Attributes:
        has_names: True once the names were read.
        wanted: requests that will be read, in order.
        ready: answers to prefetched requests.
        checks, commands: the arguments of `Wire.write`; `checks` also has the path and key of each.
        size: the length of `commands` in bytes.
        adds: True if `commands` add or delete leaves.
        token: identifies a write that is not idempotent; empty if all are.
        touched: the range of bytes that `commands` write, by path of the entry, in order.
        uploads: the temporary names of uploads.
        undos: the functions passed to `Store.undo_on_failure`.
        given: items that elements of a lazy stack were given, by path and number of the element.
        noted: attributes that elements of a lazy stack were given, in the same way.
    """

    def __init__(self) -> None:
        self.has_names = False
        self.wanted: dict[Request, None] = {}
        self.ready: dict[Request, Any] = {}
        self.given: dict[str, dict[int, Any]] = {}
        self.noted: dict[str, dict[int, dict[str, Any]]] = {}
        self.uploads: list[str] = []
        self.undos: list[Callable[[], None]] = []
        self.begin()

    def begin(self) -> None:
        self.checks: dict[str, tuple[Check, str, Path]] = {}
        self.commands: list[Command] = []
        self.touched: dict[str, tuple[int, int]] = {}
        self.size = 0
        self.adds, self.token = False, ""

    def command(self, *words: Any) -> None:
        self.commands.append(words)

    def check(self, path: str, key: Path, check: Check) -> None:
        """Make all writes of the block depend on a check. Only the first check of a leaf counts."""
        self.checks.setdefault(check[0], (check, path, key))

    def touch(self, path: str, start: int = 0, stop: int = sys.maxsize) -> None:
        """Record that the block writes at a path, by default all of it. The empty path stands for the container."""
        if path:
            first, last = self.touched.get(path, (start, stop))
            self.touched[path] = min(first, start), max(last, stop)

    def writes(self, request: Request) -> bool:
        """Return True if a pending write may change the answer to a request."""
        path, (start, stop) = request.path, _span(request)
        while path:
            first, last = self.touched.get(path, (0, 0))
            if start < last and first < stop:
                return True
            path = path.rpartition(".")[0]
        return False

    def portion(self, first: Request | None = None) -> list[Request]:
        """Take the next requests from `wanted`, beginning with `first`, up to the size of one answer."""
        found: list[Request] = []
        size = 0
        for request in [*filter(None, [first]), *(request for request in self.wanted if request != first)]:
            size += request.nbytes
            if size > LIMIT and found:
                break
            found.append(request)
        for request in found:
            del self.wanted[request]
        return found


def _span(request: Request) -> tuple[int, int]:
    """Return the range of bytes that a request covers; for a value the first byte, which stands for all of it."""
    offsets = np.frombuffer(request.offsets, "<u8") if request.run else np.zeros(1, "<u8")
    return int(offsets.min()), int(offsets.max()) + (request.run or 1)


class Server(Store):
    """An open container on a server."""

    backend = "redis"
    kind = "container"
    a_kind = "a container on a Redis server"
    rewrites = False
    # Key of the batch size, and whether a prefetched answer is used only once.
    size_name = "__batch_size__"
    gives_once = True

    def __init__(self, address: Address) -> None:
        super().__init__(str(address), "r+")
        self.address = address
        self.wire = Wire(address)
        self.header: dict[str, bytes] = {}
        self._open = True
        self._metas: dict[str, Meta] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        # The listing that the caches were built from; `None` after a change.
        self._listing: tuple[Any, ...] | None = None
        self._last = 0  # highest `_order` of an entry
        # Cache of `tree`.
        self._tree: dict[str, dict[str, None]] | None = None
        # Threads share the caches: each change happens under this lock, and is counted.
        self._knowing, self._changes = Lock(), 0
        self._root = WireGroup(self, (), "", next(addresses))
        self._local = threading.local()
        self._renewed = 0.0
        self.sync()

    @classmethod
    def open(cls, name: Any, mode: str, *, locking: object = None) -> Server:
        return cls(name)

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise TypeError(f"a container on a server has no options for its tensors, got {sorted(options)}")
        return options

    @property
    def source(self) -> Address:
        return self.address

    @property
    def root(self) -> WireGroup:
        self.check()
        return self._root

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def device(self) -> torch.device | None:
        """The device that is stored with the container."""
        raw = self.header.get("__device__")
        with self.errors(()):
            return torch.device(raw.decode()) if raw else None

    def clear(self) -> None:
        """Delete the container on the server."""
        self.check_writable()
        self.wire.send([("DEL", *self.wire.list_keys())])
        self.forget()

    def flush(self) -> None:
        """Do nothing, because writes are on the server already."""

    def close(self) -> None:
        self._open = False

    @staticmethod
    def key_of(path: str) -> Path:
        """Return the nested key of the entry at a path; the path of the root is empty."""
        return tuple(map(decode_name, filter(None, path.split("."))))

    # --- cached metadata ----------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """True if the server had the container at the last listing."""
        return bool(self.header or self._metas or self._notes)

    @property
    def is_stack(self) -> bool:
        """True for a lazy stack."""
        return self.header.get("__type__") == b"lazy_stack"

    def sync(self, requests: Sequence[Request] = ()) -> list[Any]:
        """Refresh the caches from the server, and return the answers to requests of the same moment."""
        self.check()
        while True:
            changes = self._changes
            listing, answers = self.wire.state(requests)
            header, paths, groups = listing
            stale = {request.path for request, answer in zip(requests, answers, strict=True) if answer is None}
            with self._knowing.held:
                if listing == self._listing and not stale and self.address.cached:
                    return answers
                kept = paths - stale if self.address.cached else set()
                metas = {path: meta for path, meta in self._metas.items() if path in kept}
            # A leaf that was deleted meanwhile has no fields.
            new = list(paths - metas.keys())
            fields = self.wire.metas(new) if new else []
            metas.update((path, Meta(found)) for path, found in zip(new, fields) if found)
            with self._knowing.held:
                # Another thread may have stored newer metadata meanwhile.
                if self._changes != changes:
                    continue
                self._mark_changed()
                # Keep the header if the server lost its data, to write it again.
                self.header, self._metas = header or self.header, metas
                self._notes = {path: parse_notes(raw) for path, raw in groups.items()}
                # Never decrease: a deleted entry may come back with its old number.
                self._last = max(self._last, *(self.order(path) or 0 for path in (*metas, *groups)), 0)
                self._listing = listing if len(metas) == len(paths) else None
            return answers

    def _mark_changed(self) -> None:
        """Count a change of the caches, and drop what was derived from them."""
        self._changes += 1
        self._listing = self._tree = None

    def forget(self) -> None:
        """Drop the caches, because a failed write may or may not have reached the server."""
        with self._knowing.held:
            self._mark_changed()
            self._metas, self._notes = {}, {}

    def find_leaf(self, path: str) -> Meta | None:
        """Return the metadata of a leaf; `None` for a nested container. Raises `KeyError` if the path is missing."""
        scope = self.scope
        if not self.address.cached and (scope is None or not scope.adds):
            self._refresh_names()
        for is_fresh in (False, True):
            with self._knowing.held:
                if path in self._metas:
                    return self._metas[path]
                if self.is_node(path):
                    return None
            if not is_fresh:
                self._refresh_names()
        raise KeyError(decode_name(path.rpartition(".")[2]))

    def is_node(self, path: str) -> bool:
        """Return True if a path is a nested container in the cache."""
        return path in self._notes or path in self.tree

    def _refresh_names(self) -> None:
        """List the leaves on the server; within a block only once."""
        scope = self.scope
        if scope is None:
            self.sync()
        elif not scope.has_names:
            if scope.adds:
                self.send(scope)
            self._read_portion(scope)

    def children(self, path: str) -> list[str]:
        """List the entries of a nested container on the server, as parts of paths."""
        self._refresh_names()
        with self._knowing.held:
            return list(self.tree.get(path, ()))

    @property
    def tree(self) -> dict[str, dict[str, None]]:
        """The cached entries of each nested container, as ordered parts of paths."""
        if self._tree is None:
            self._tree = {}
            for other in sorted({*self._metas, *self._notes}, key=self._rank):
                while other:
                    outer, _, part = other.rpartition(".")
                    self._tree.setdefault(outer, {})[part] = None
                    other = outer
        return self._tree

    def _rank(self, path: str) -> tuple[bool, int, str]:
        """Sort key of an entry: the order of creation. Entries of other programs come last, by name."""
        order = self.order(path)
        return order is None, order or 0, path

    def order(self, path: str) -> int | None:
        """Return the position of an entry in the order of creation; `None` if another program wrote it."""
        meta = self._metas.get(path)
        if meta is not None:
            return meta.order
        found = self._notes.get(path, {}).get("_order")
        return found if type(found) is int else None

    def _take_number(self) -> int:
        self._last += 1
        return self._last

    def attributes_at(self, path: str) -> dict[str, Any]:
        """Return the attributes of a nested container, or of the root."""
        notes = self._notes.get(path, {})
        if path:
            return notes
        size, name = self.header.get(self.size_name), self.header.get("__tensorclass__")
        sizes = None if size is None else list(checks.sizes(parse_json(size), "its batch size"))
        return {**notes, SIZE: sizes, CLASS: None if name is None else name.decode()}

    def below(self, path: str) -> list[str]:
        """Return the cached paths of leaves at and below a path, sorted."""
        start = path + "." if path else ""
        return sorted(other for other in self._metas.copy() if other == path or other.startswith(start))

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> Scope | None:
        return getattr(self._local, "scope", None)

    @property
    def is_together(self) -> bool:
        return self.scope is not None

    @contextlib.contextmanager
    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> Iterator[Any]:
        """See `Store.together`. Returns the `Scope` of the block."""
        if self.scope is not None or not self.is_open:
            yield self.scope
            return
        scope, header, is_lost = Scope(), self.header.copy(), False
        self._local.scope = scope
        try:
            if pick is not None:
                self._prefetch(scope, items, pick)
            yield scope
            self._settle(scope)
            if scope.commands:
                self.send(scope)
        except BaseException as error:
            self.header = header
            if scope.commands:
                self.forget()
            for undo in reversed(scope.undos):
                undo()
            is_lost = isinstance(error, ConnectionError)
            raise
        finally:
            self._local.scope = None
            # The uploads of a lost connection expire.
            if scope.uploads and not is_lost:
                self.wire.send([("DEL", *scope.uploads)])

    def _settle(self, scope: Scope) -> None:
        """Complete the commands of a block, before they are sent."""

    def _prefetch(self, scope: Scope, items: Iterable[Item], pick: Pick) -> None:
        """Read the names and the first requests. If only values are wanted, they are read when the first is used."""
        if not self.address.cached or not self._metas:
            self._refresh_names()
        scope.wanted = dict.fromkeys(self._requests(items, pick))
        if any(request.run for request in scope.wanted):
            self._read_portion(scope)

    def _requests(self, items: Iterable[Item], pick: Pick) -> Iterator[Request]:
        """Yield the requests for the selection `pick` of the leaves below items. Broken leaves are skipped here."""
        paths = [path for item in items if isinstance(item, (WireGroup, WireArray)) for path in self.below(item.place)]
        for path in paths:
            meta = self._metas.get(path)
            if meta is not None and meta.is_value:
                yield Request(path)
            elif meta is not None:
                with contextlib.suppress(ValueError, IndexError, SaveError):
                    selection = pick(meta.parse().shape or ())
                    if selection is not None:
                        yield from WireArray(self, (), path, meta).requests(selection)[1]

    def _read_portion(self, scope: Scope, first: Request | None = None, key: Path = ()) -> None:
        """Read the next requests, beginning with `first`; also the names, unless the block has read them."""
        requests = scope.portion(first)
        if scope.has_names:
            answers = self.wire.read(requests, key)
        else:
            scope.has_names = True
            answers = self.sync(requests)
        scope.ready.update(zip(requests, answers, strict=True))

    def fetch(self, request: Request, key: Path) -> Any:
        """Return the answer to a request, which may have been prefetched.

        Raises:
            StaleError: the leaf was deleted, or has another shape or dtype.
        """
        self.check()
        scope = self.scope
        if scope is not None and scope.touched and scope.writes(request):
            self.send(scope)
        elif scope is not None and request in scope.wanted:
            self._read_portion(scope, request, key)
        if scope is not None and request in scope.ready:
            answer = scope.ready.pop(request) if self.gives_once else scope.ready[request]
        else:
            (answer,) = self.wire.read([request], key)
        if answer is None:
            raise self._stale(request.path, key)
        return answer

    def _stale(self, path: str, key: Path) -> StaleError:
        with self._knowing.held:
            self._mark_changed()
            self._metas.pop(path, None)
        self.sync()
        what = "is no longer there: it was deleted, it expired, or the server was started anew without it"
        if path in self._metas:
            what = "has another shape or dtype by now"
        return StaleError(f"entry {joined(key)!r} of the {self.kind} {self.name!r} {what}; nothing was written to it")

    # --- writing ------------------------------------------------------------------------------------------------------

    def send(self, scope: Scope) -> None:
        """Send the pending writes of a block."""
        checks, commands, adds, token = list(scope.checks.values()), scope.commands, scope.adds, scope.token
        keys = list(map(self.key_of, scope.touched))
        scope.begin()
        scope.ready.clear()
        if adds:
            scope.has_names = False
            if not is_freeing(commands):
                commands += [("SETNX", self.wire.base + name, value) for name, value in self.header.items()]
        try:
            failed = self.wire.write([check for check, _, _ in checks], commands, keys, token)
        except BaseException:
            self.forget()
            raise
        if not failed:
            self._renew(adds)
            return
        self.forget()
        check, path, key = checks[failed - 1]
        raise self._stale(path, key) if check[2] else self._lost_upload(key)

    def _renew(self, always: bool) -> None:
        ttl, now = self.address.ttl, time.monotonic()
        if ttl is not None and (always or now - self._renewed > ttl / 10):
            time_left = max(1, int(ttl * 1000))
            self.wire.send([self.wire.script([("PEXPIRE", name, time_left) for name in self.wire.list_keys()])])
            self._renewed = now

    def upload(self, scope: Scope, path: str, data: memoryview, key: Path) -> str:
        """Upload bytes of a leaf under a temporary name, which is returned; several requests.

        Raises:
            SaveError: the server lost an earlier part. It would fill the gap with zeros.
        """
        name, step = f"{self.wire.base}t:{uuid.uuid4()}", LIMIT // 2
        scope.uploads.append(name)
        for at in range(0, len(data), step):
            write = ("SETRANGE", name, at, data[at : at + step])
            before, *_ = self.wire.send([("STRLEN", name), write, ("PEXPIRE", name, FORGOTTEN)], [key])
            if before < at:
                raise self._lost_upload(key)
        # Keep the upload until the write is answered, so that the write can be repeated.
        scope.check(path, key, (name, self.wire.data(path), b"", b"", 0))
        return name

    def _lost_upload(self, key: Path) -> SaveError:
        return SaveError(
            f"{entry_of(key)}of the {self.kind} {self.name!r}: the server has lost what was uploaded, as when it is "
            "started anew; nothing was written: the same call works again"
        )

    def write_pieces(self, array: WireArray, run: int, offsets: bytes, data: memoryview) -> None:
        """Write pieces of an array, each of `run` bytes. Data beyond the size of a request is uploaded first."""
        path, meta = array.place, array.meta
        name = self.wire.data(path)
        with self.together() as scope:
            if not (scope.adds and path in scope.touched):
                check = (self.wire.meta(path), name, meta.shape_text, meta.dtype_text, meta.nbytes)
                scope.check(path, array.key, check)
            scope.touch(path, *_span(Request(path, run=run, offsets=offsets)))
            if scope.size + len(data) > LIMIT:
                scope.command("PLACE", self.upload(scope, path, data, array.key), name, run, offsets)
                return
            scope.size += len(data)
            if len(offsets) == 8:
                scope.command("SETRANGE", name, int.from_bytes(offsets, "little"), data)
            else:
                scope.command("WRITE", name, run, offsets, data)

    def set_header(self, name: str, value: bytes | None) -> None:
        """Set a header field of the container; `None` deletes it."""
        if self.header.get(name) == value:
            return
        with self.together() as scope:
            with self._knowing.held:
                self._mark_changed()
                self.header.pop(name, None)
                if value is not None:
                    self.header[name] = value
            name = self.wire.base + name
            scope.commands.append(("DEL", name) if value is None else ("SET", name, value))

    def undo_on_failure(self, undo: Callable[[], None]) -> None:
        if self.scope is not None:
            self.scope.undos.append(undo)

    def note(self, path: str, notes: Mapping[str, Any]) -> None:
        """Write the attributes of a nested container, or of the root."""
        kept = {name: value for name, value in notes.items() if value is not None}
        with self.together() as scope:
            if path:
                kept.setdefault("_order", self._take_number())
            else:
                size, name = kept.pop(SIZE, None), kept.pop(CLASS, None)
                self.set_header(self.size_name, None if size is None else json.dumps(size).encode())
                self.set_header("__tensorclass__", None if name is None else name.encode())
                if kept == self._notes.get(path, {}):
                    return
            with self._knowing.held:
                self._mark_changed()
                self._notes[path] = kept
            # Attributes change no bytes of the entries below.
            scope.touch(path, 0, 0)
            scope.command("HSET", self.wire.base + "__groups__", path, json.dumps(kept))

    def drop(self, path: str) -> None:
        """Delete the entry at a path and everything below it."""
        wire = self.wire
        with self.together() as scope:
            scope.adds = True
            scope.touch(path)
            with self._knowing.held:
                self._mark_changed()
                for leaf in self.below(path):
                    scope.command("DEL", wire.meta(leaf), wire.data(leaf), wire.data(leaf) + ":idx")
                    scope.command("SREM", wire.base + "__keys__", leaf)
                    del self._metas[leaf]
                for node in [node for node in self._notes if node == path or node.startswith(path + ".")]:
                    scope.command("HDEL", wire.base + "__groups__", node)
                    del self._notes[node]

    def add(self, path: str, fields: Mapping[str, Any], data: Any, order: int | None = None) -> None:
        """Add a leaf.

        Args:
            path: its path.
            fields: its hash.
            data: its bytes; `None` for zeros.
            order: its position in the order of creation; a new one by default.
        """
        wire, scope, name = self.wire, self.scope, self.wire.data(path)
        assert scope is not None
        scope.adds = True
        scope.touch(path)
        fields = {**fields, "_order": self._take_number() if order is None else order}
        meta = Meta.of_texts(fields)
        if data is None:
            size = meta.parse().nbytes
            scope.command("DEL", name)
            scope.commands.append(("SETRANGE", name, size - 1, b"\0") if size else ("SET", name, b""))
        elif scope.size + len(data) <= LIMIT:
            scope.command("SET", name, data)
            scope.size += len(data)
        else:
            scope.command("TAKE", self.upload(scope, path, data, self.key_of(path)), name, FORGOTTEN)
        scope.command("DEL", wire.meta(path))
        scope.command("HSET", wire.meta(path), *itertools.chain.from_iterable(fields.items()))
        with self._knowing.held:
            self._mark_changed()
            self._metas[path] = meta
        scope.command("SADD", wire.base + "__keys__", path)
