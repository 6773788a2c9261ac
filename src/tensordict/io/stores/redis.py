"""Containers on a Redis server, or another one of its protocol, as stores; the layout is in `redis_wire.py`.

What is known of the leaves (paths, shapes, dtypes) is kept. Each request for elements asks whether that is still so,
and those of whole containers for the names. All that one call writes goes in one request, which the server carries out
whole or not at all; what is larger than a request goes ahead under another name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import unquote

import numpy as np
import torch

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.locks import Lock
from tensordict.io import checks
from tensordict.io.stores.array_store import SIZE, Item, Pick, StaleError, Store
from tensordict.io.stores.entries import CLASS
from tensordict.io.stores.redis_items import (
    Meta,
    WireArray,
    WireGroup,
    addresses,
    decoded,
    notes_of,
    portions,
)
from tensordict.io.stores.redis_wire import FORGOTTEN, LIMIT, Address, Check, Contents, Request, Wire, Word, only_frees


class Scope:
    """What is done together: names that were read once, what is read ahead, what will be written.

    is_listed: whether the names were read.
    wanted: what will be read; `ready` what was read of it, which is given once.
    checks, commands: what `Wire.write` takes, with the paths and keys; `size` says how many bytes they are, `written`
        where in the leaves they write, from one byte up to another.
    adds: whether leaves are added or deleted.
    token: what says in the hash of a leaf that this was written, where it would not do the same a second time.
    touched: the paths of what is written, each once, in order; errors name them.
    uploads: the names that something was uploaded under ahead.
    undos: the functions that `Store.undo_on_failure` was given.
    given: of lazy stacks, what elements were given at a path, by their numbers; it is written as one at the end.
    noted: the same, of what is noted of nested containers.
    """

    def __init__(self) -> None:
        self.is_listed = False
        self.wanted: dict[Request, None] = {}
        self.ready: dict[Request, Any] = {}
        self.given: dict[str, dict[int, Any]] = {}
        self.noted: dict[str, dict[int, dict[str, Any]]] = {}
        self.uploads: list[str] = []
        self.undos: list[Callable[[], None]] = []
        self.begin()

    def begin(self) -> None:
        self.checks: dict[str, tuple[Check, str, Path]] = {}
        self.commands: list[Sequence[Word]] = []
        self.written: dict[str, tuple[int, int]] = {}
        self.touched: dict[str, None] = {}
        self.size = 0
        self.adds, self.token = False, ""

    def command(self, *words: Word) -> None:
        self.commands.append(words)

    def check(self, path: str, key: Path, check: Check) -> None:
        """Have nothing be written unless this is so, which is told once."""
        self.touch(path)
        self.checks.setdefault(check[0], (check, path, key))

    def touch(self, path: str) -> None:
        """Note that something is written at a path, which is empty for the container itself."""
        if path:
            self.touched[path] = None

    def note_written(self, request: Request) -> None:
        """Know that what the request asks for will be written."""
        start, stop = _span(request)
        first, last = self.written.get(request.path, (start, stop))
        self.written[request.path] = min(first, start), max(last, stop)

    def writes(self, request: Request) -> bool:
        """Whether what the request asks for may be among what will be written."""
        if self.adds or not request.run:
            path = request.path
            while path and path not in self.touched:
                path = path.rpartition(".")[0]
            return bool(path)
        first, last = self.written.get(request.path, (0, 0))
        start, stop = _span(request)
        return start < last and first < stop

    def portion(self, first: Request | None = None) -> list[Request]:
        """What is read next: this and others that are wanted, as much as one answer should carry."""
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
    """The first byte of what is asked for, and the one behind the last."""
    offsets = np.frombuffer(request.offsets, "<u8")
    return int(offsets.min()), int(offsets.max()) + request.run


# The fields of a leaf that the reference does not list, among what is noted.
HIDDEN = "_leaf"


class Server(Store):
    """A container on a server."""

    backend = "redis"
    kind = "container"
    a_kind = "a container on a Redis server"
    rewrites = False
    # Where the batch size is, and whether what was read ahead is asked for once.
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
        # The leaves that the reference does not list, and their fields.
        self._hidden: dict[str, Any] = {}
        # What the server said, as long as that is what is known.
        self._listing: Contents | None = None
        self._last = 0  # the number of the entry that was made last
        # The parts of the paths below each node, in order, once they were asked for.
        self._tree: dict[str, dict[str, None]] | None = None
        # Threads share what is known: each change of it is one step, and counted.
        self._knowing, self._changes = Lock(), 0
        self._root = WireGroup(self, (), "", next(addresses))
        self._local = threading.local()
        self._renewed = 0.0
        self.sync()

    @classmethod
    def open(cls, name: object, mode: str, *, locking: object = None) -> Server:
        if not isinstance(name, Address):
            raise TypeError(f"a container on a server is opened by its address, got {type(name).__name__}")
        return cls(name)

    @classmethod
    def over(cls, handle: object) -> NoReturn:
        raise TypeError("a container on a server is opened by its td_id; see TensorDictStore.from_store")

    @staticmethod
    def is_at(path: str) -> bool:
        return False

    @staticmethod
    def strangers(path: str, container: Any) -> Collection[str]:
        return ()

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
        """The device that is noted."""
        raw = self.header.get("__device__")
        with self.errors(()):
            return torch.device(raw.decode()) if raw else None

    def check(self) -> None:
        if not self._open:
            super().check()

    def clear(self) -> None:
        """Delete all of the container."""
        self.check_writable()
        self.wire.clear()
        self.forget()

    def flush(self) -> None:
        """Nothing: what was written is on the server."""

    def close(self) -> None:
        self._open = False

    @contextlib.contextmanager
    def errors(self, key: Path) -> Iterator[None]:
        try:
            yield
        except (SaveError, ConnectionError, IndexError):
            raise
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise SaveError(f"{entry_of(key)}of the {self.kind} {self.name!r}: {error}") from error

    @staticmethod
    def decode_part(part: str) -> str:
        return unquote(part)

    @staticmethod
    def key_of(path: str) -> Path:
        """Return the nested key of the entry at a path."""
        return tuple(map(decoded, path.split(".")))

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether there was such a container when it was asked for the last time."""
        return bool(self.header or self._metas or self._notes)

    @property
    def is_stack(self) -> bool:
        """Whether it is a lazy stack."""
        return self.header.get("__type__") == b"lazy_stack"

    def sync(self, requests: Sequence[Request] = ()) -> list[Any]:
        """The answers to requests; what is known is made of what there is now."""
        self.check()
        while True:
            with self._knowing.held:
                changes = self._changes
            listing, answers = self.wire.state(requests)
            changed = {request.path for request, answer in zip(requests, answers, strict=True) if answer is None}
            with self._knowing.held:
                if listing == self._listing and not changed and self.address.cached:
                    return answers
                known = self._metas.copy() if self.address.cached else {}
            header, paths, groups = listing.parsed()
            notes = {path: notes_of(raw) for path, raw in groups.items()}
            hidden = {path: noted[HIDDEN] for path, noted in notes.items() if isinstance(noted.get(HIDDEN), dict)}
            paths |= hidden.keys()
            changed |= {path for path in paths if hidden.get(path) != self._hidden.get(path)}
            metas = {path: meta for path, meta in known.items() if path in paths and path not in changed}
            metas.update((path, Meta.of_texts(hidden[path])) for path in hidden.keys() - metas.keys())
            new = [path for path in paths if path not in metas]
            # One that is deleted meanwhile has no fields.
            metas.update(
                (path, Meta(fields)) for path, fields in zip(new, self.wire.metas(new) if new else ()) if fields
            )
            with self._knowing.held:
                # What another thread did meanwhile may be newer than what was found.
                if self._changes != changes:
                    continue
                self._changed()
                # A server that has lost all is told the header again.
                self.header, self._metas = header or self.header, metas
                self._notes = {path: noted for path, noted in notes.items() if path not in hidden}
                self._hidden = hidden
                # Never less than before: an entry that was dropped may come back under its number.
                self._last = max(self._last, *(self.order(path) or 0 for path in (*metas, *groups)), 0)
                self._listing = listing if len(metas) == len(paths) else None
            return answers

    def _changed(self) -> None:
        """Note that what is known changes."""
        self._changes += 1
        self._listing = self._tree = None

    def forget(self) -> None:
        """Ask anew for all that is known, as a write may have come through or not."""
        with self._knowing.held:
            self._changed()
            self._metas, self._notes = {}, {}

    def known(self, path: str) -> Meta | None:
        """What is known of a leaf; `None` when there is none. Raises `KeyError` for what is not even a node."""
        scope = self.scope
        if not self.address.cached and (scope is None or not (scope.is_listed or scope.adds)):
            self._listed()
        for asked in (False, True):
            with self._knowing.held:
                if path in self._metas:
                    return self._metas[path]
                if self.is_node(path):
                    return None
            if asked or (scope is not None and scope.is_listed):
                break
            self._listed()
        raise KeyError(decoded(path.rpartition(".")[2]))

    def is_node(self, path: str) -> bool:
        """Whether a nested container is known at a path."""
        return path in self._notes or path in self.tree

    def _listed(self) -> None:
        """Ask which leaves there are, in a scope only once."""
        scope = self.scope
        if scope is not None and scope.adds:
            self.send(scope)
        if scope is None:
            self.sync()
        elif not scope.is_listed:
            self._read_portion(scope)

    def children(self, path: str) -> list[str]:
        """The parts of the paths below a node, as the server has them now."""
        self._listed()
        with self._knowing.held:
            return list(self.tree.get(path, ()))

    @property
    def tree(self) -> dict[str, dict[str, None]]:
        """The parts of the paths below each node, in order, as far as they are known."""
        if self._tree is None:
            self._tree = {}
            for other in sorted({*self._metas, *self._notes}, key=self._rank):
                while other:
                    outer, _, part = other.rpartition(".")
                    self._tree.setdefault(outer, {})[part] = None
                    other = outer
        return self._tree

    def under(self, path: str) -> Iterator[str]:
        """The paths below a path, as far as they are known."""
        for part in self.tree.get(path, ()):
            yield (other := f"{path}.{part}")
            yield from self.under(other)

    def _rank(self, path: str) -> tuple[bool, int, str]:
        """What the entries of one level are sorted by: as they were made, then those of others by their names."""
        order = self.order(path)
        return order is None, order or 0, path

    def order(self, path: str) -> int | None:
        """The number of an entry among all that were made; `None` for one of another program."""
        meta = self._metas.get(path)
        if meta is not None:
            return meta.order
        found = self._notes.get(path, {}).get("_order")
        return found if type(found) is int else None

    def _next(self) -> int:
        self._last += 1
        return self._last

    def noted(self, path: str) -> dict[str, Any]:
        """What is noted of a nested container, or of the outermost."""
        notes = self._notes.get(path, {})
        if path:
            return notes
        size, name = self.header.get(self.size_name), self.header.get("__tensorclass__")
        sizes = None if size is None else list(checks.sizes(parse_json(size), "its batch size"))
        return {**notes, SIZE: sizes, CLASS: None if name is None else name.decode()}

    def below(self, path: str) -> list[str]:
        """The paths of the leaves at and below a path, in order."""
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
    def together(self, items: Iterable[Item] = (), pick: Pick | None = None) -> Iterator[None]:
        if self.scope is not None or not self.is_open:
            yield
            return
        scope = self._local.scope = Scope()
        try:
            if pick is not None:
                self._read_ahead(scope, items, pick)
            yield
            if scope.commands:
                self.send(scope)
        except BaseException as error:
            if scope.commands:
                self.forget()
            for undo in reversed(scope.undos):
                undo()
            if scope.uploads and not isinstance(error, ConnectionError):
                self.wire.send([("DEL", *scope.uploads)])
            raise
        finally:
            self._local.scope = None

    def _read_ahead(self, scope: Scope, items: Iterable[Item], pick: Pick) -> None:
        """Read the names and the first of what will be read; values alone are read when the first is asked for."""
        if not self.address.cached or not self._metas:
            self._listed()
        scope.wanted = dict.fromkeys(self._requests(items, pick))
        if any(request.run for request in scope.wanted):
            self._read_portion(scope)

    def _requests(self, items: Iterable[Item], pick: Pick) -> Iterator[Request]:
        """The requests for what `pick` says of the leaves at and below items; those who come to a broken leaf tell."""
        paths = [path for item in items if isinstance(item, (WireGroup, WireArray)) for path in self.below(item.place)]
        for path in paths:
            meta = self._metas.get(path)
            if meta is not None and meta.is_value:
                yield Request(path)
            elif meta is not None:
                with contextlib.suppress(ValueError, IndexError, SaveError):
                    selection = pick(meta.parsed().shape or ())
                    if selection is not None:
                        yield from WireArray(self, (), path, meta).requests(selection)[1]

    def _read_portion(self, scope: Scope, first: Request | None = None, key: Path = ()) -> None:
        """Read what is wanted, one first, as much as one answer should carry; and the names, when it is time."""
        requests = scope.portion(first)
        if scope.is_listed:
            answers = self.wire.read(requests, key)
        else:
            scope.is_listed = True
            answers = self.sync(requests)
        scope.ready.update(zip(requests, answers, strict=True))

    def fetch(self, request: Request, key: Path) -> Any:
        """The answer to a request, which may have been read ahead.

        Raises:
            StaleError: the leaf is no longer there, or has another shape or dtype.
        """
        self.check()
        scope = self.scope
        if scope is not None and scope.writes(request):
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
            self._changed()
            self._metas.pop(path, None)
        self.sync()
        what = (
            "has another shape or dtype by now"
            if path in self._metas
            else ("is no longer there: it was deleted, it expired, or the server was started anew without what it held")
        )
        return StaleError(f"entry {joined(key)!r} of the {self.kind} {self.name!r} {what}; nothing was written to it")

    # --- writing ------------------------------------------------------------------------------------------------------

    def send(self, scope: Scope) -> None:
        """Send what was written so far."""
        checks, commands, adds, token = list(scope.checks.values()), scope.commands, scope.adds, scope.token
        keys = list(map(self.key_of, scope.touched))
        scope.begin()
        scope.ready.clear()
        if adds:
            scope.is_listed = False
            if not only_frees(commands):
                commands += [("SETNX", self.wire.base + name, value) for name, value in self.header.items()]
        try:
            failed = self.wire.write([check for check, _, _ in checks], commands, keys, token)
        except BaseException:
            self.forget()
            raise
        if not failed:
            if scope.uploads:
                self.wire.send([("DEL", *scope.uploads)])
                scope.uploads.clear()
            self._renew(adds)
            return
        self.forget()
        check, path, key = checks[failed - 1]
        raise self._stale(path, key) if check[2] else self.wire.lost_upload(key)

    def _renew(self, always: bool) -> None:
        ttl = self.address.ttl
        if ttl is None:
            return
        now = time.monotonic()
        if always or now - self._renewed > ttl / 10:
            self.wire.renew()
            self._renewed = now

    def upload(self, path: str, data: memoryview, key: Path) -> str:
        """Upload bytes of a leaf ahead, under a new name, which is returned; they are deleted when the scope fails."""
        scope, name = self.scope, f"{self.wire.base}t:{uuid.uuid4()}"
        assert scope is not None
        scope.uploads.append(name)
        self.wire.upload(name, data, key)
        # It stays until the answer has come, so that the write may be sent again.
        scope.check(path, key, (name, self.wire.data(path), b"", b"", 0))
        return name

    def write_pieces(self, array: WireArray, run: int, offsets: bytes, data: memoryview) -> None:
        """Write pieces of an array, each of `run` bytes; what is more than one request carries is uploaded ahead."""
        path, meta = array.place, array.meta
        name, at = self.wire.data(path), 0
        with self.together():
            scope = self.scope
            assert scope is not None
            if not (scope.adds and path in scope.touched):
                check = (self.wire.meta(path), name, meta.shape_text, meta.dtype_text, meta.nbytes)
                scope.check(path, array.key, check)
            for part in portions(Request(path, run=run, offsets=offsets)):
                piece = data[at : at + part.nbytes]
                at += part.nbytes
                scope.note_written(part)
                if scope.size + len(piece) > LIMIT:
                    scope.command("PLACE", self.upload(path, piece, array.key), name, part.run, part.offsets)
                    continue
                scope.size += len(piece)
                if len(part.offsets) == 8:
                    scope.command("SETRANGE", name, int.from_bytes(part.offsets, "little"), piece)
                else:
                    scope.command("WRITE", name, part.run, part.offsets, piece)

    def set_header(self, name: str, value: bytes | None) -> None:
        """Note something of the container as a whole; `None` takes it away."""
        if self.header.get(name) == value:
            return
        with self.together():
            assert self.scope is not None
            self.undo_on_failure(functools.partial(setattr, self, "header", self.header.copy()))
            with self._knowing.held:
                self._changed()
                self.header.pop(name, None)
                if value is not None:
                    self.header[name] = value
            name = self.wire.base + name
            self.scope.commands.append(("DEL", name) if value is None else ("SET", name, value))

    def undo_on_failure(self, undo: Callable[[], None]) -> None:
        if self.scope is not None:
            self.scope.undos.append(undo)

    def note(self, path: str, notes: Mapping[str, Any]) -> None:
        """Have the server keep what is noted of a nested container, or of the outermost."""
        kept = {name: value for name, value in notes.items() if value is not None}
        with self.together():
            assert self.scope is not None
            if path:
                kept.setdefault("_order", self._next())
            else:
                size, name = kept.pop(SIZE, None), kept.pop(CLASS, None)
                self.set_header(self.size_name, None if size is None else json.dumps(size).encode())
                self.set_header("__tensorclass__", None if name is None else name.encode())
                if kept == self._notes.get(path, {}):
                    return
            self.set_notes(path, kept)

    def set_notes(self, path: str, notes: dict[str, Any]) -> None:
        """Have the server keep just this of a nested container; to be called in a scope."""
        assert self.scope is not None
        with self._knowing.held:
            self._changed()
            self._notes[path] = notes
        self.scope.touch(path)
        self.scope.command("HSET", self.wire.base + "__groups__", path, json.dumps(notes))

    def drop(self, path: str) -> None:
        """Delete what is at and below a path."""
        wire = self.wire
        with self.together():
            scope = self.scope
            assert scope is not None
            scope.adds = True
            scope.touch(path)
            with self._knowing.held:
                self._changed()
                for leaf in self.below(path):
                    scope.command("DEL", wire.meta(leaf), wire.data(leaf), wire.data(leaf) + ":idx")
                    scope.command("SREM", wire.base + "__keys__", leaf)
                    if self._hidden.pop(leaf, None) is not None:
                        scope.command("HDEL", wire.base + "__groups__", leaf)
                    del self._metas[leaf]
                for node in [node for node in self._notes if node == path or node.startswith(path + ".")]:
                    scope.command("HDEL", wire.base + "__groups__", node)
                    del self._notes[node]

    def add(self, path: str, fields: Mapping[str, Any], data: Any, order: int | None = None) -> None:
        """Add a leaf: its hash, and its bytes, `None` for zeros; `order` as before."""
        wire, scope, name = self.wire, self.scope, self.wire.data(path)
        assert scope is not None
        scope.adds = True
        scope.touch(path)
        fields = {**fields, "_order": self._next() if order is None else order}
        meta = Meta.of_texts(fields)
        if data is None:
            size = meta.parsed().nbytes
            scope.command("DEL", name)
            scope.commands.append(("SETRANGE", name, size - 1, b"\0") if size else ("SET", name, b""))
        elif scope.size + len(data) <= LIMIT:
            scope.command("SET", name, data)
            scope.size += len(data)
        else:
            scope.command("TAKE", self.upload(path, data, self.key_of(path)), name, FORGOTTEN)
        scope.command("DEL", wire.meta(path))
        scope.command("HSET", wire.meta(path), *itertools.chain.from_iterable(fields.items()))
        with self._knowing.held:
            self._changed()
            self._metas[path] = meta
        self.list_leaf(path)

    def list_leaf(self, path: str) -> None:
        """Have the server list a leaf; to be called in a scope."""
        assert self.scope is not None
        self.scope.command("SADD", self.wire.base + "__keys__", path)
