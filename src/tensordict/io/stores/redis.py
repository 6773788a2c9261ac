"""Containers on a Redis server, or another one of its protocol, as stores; the layout is in `redis_wire.py`.

What is known of the leaves (paths, shapes, dtypes) is kept. Each request for elements asks whether that is still so,
and those of whole containers whether the names are: a seal stands for all of it. All that one call writes goes in one
request, which the server carries out whole or not at all; what is larger than a request goes ahead under another name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import unquote

import torch

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.locks import Lock
from tensordict.io.stores.array_store import Item, Pick, StaleError, Store
from tensordict.io.stores.redis_items import WireArray, WireGroup, WireText, addresses
from tensordict.io.stores.redis_layout import (
    Ahead,
    Meta,
    Scope,
    decoded,
    is_one,
    notes_of,
    portions,
    raw_of,
    request_of,
)
from tensordict.io.stores.redis_wire import LIMIT, Address, Request, State, Wire, only_frees
from tensordict.memory.stored_tensors import Selection


class Server(Store):
    """A container on a server."""

    backend = "redis"
    kind = "container"
    a_kind = "a container on a Redis server"
    rewrites = False
    _wire = Wire

    def __init__(self, address: Address) -> None:
        super().__init__(str(address), "r+")
        self.address = address
        self.wire: Wire = self._wire(address)
        self.header: dict[str, bytes] = {}
        # As it was noted here, for the case that the server has forgotten it.
        self._own_header: dict[str, bytes] = {}
        self._open = True
        self._metas: dict[str, Meta] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        # The last answers of the server to requests for the same leaves, until something changes.
        self._states: dict[tuple[str, ...], State] = {}
        self._last = 0  # the number of the entry that was made last
        # Threads share what is known: each change of it is one step, and counted.
        self._knowing, self._changes = Lock(), 0
        self._look()
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
        self.header = {}

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
        """Return whether the container existed at the last request."""
        return bool(self.header or self._metas or self._notes)

    @property
    def is_stack(self) -> bool:
        """Return whether the container is a lazy stack."""
        return self.header.get("__type__") == b"lazy_stack"

    def sync(self, requests: Sequence[Request] = ()) -> tuple[set[str], list[Any]]:
        """Return the paths of the current leaves, and the answers to requests. The known metadata is updated."""
        self.check()
        asked = tuple([request.path for request in requests])
        while True:
            with self._knowing.held:
                changes = self._changes
                last = self._states.get(asked) if self.address.cached else None
            state, answers = self.wire.state(requests, last)
            if state is last:
                return state.paths, answers
            known = self._metas.copy() if self.address.cached else {}
            changed = {path for path, answer in zip(asked, answers, strict=True) if answer is None}
            metas = {path: meta for path, meta in known.items() if path in state.paths and path not in changed}
            new = [path for path in state.paths if path not in metas]
            # One that is deleted meanwhile has no fields.
            found = [(path, Meta(fields)) for path, fields in zip(new, self.wire.metas(new) if new else ()) if fields]
            metas.update(found)
            with self._knowing.held:
                # Another thread may have learned something newer meanwhile.
                if self._changes != changes:
                    continue
                self._changes += 1
                self.header = dict(state.header)
                self._own_header.update(state.header)
                notes = {path: notes_of(raw) for path, raw in state.groups.items()}
                is_new = bool(new) or metas.keys() != self._metas.keys() or notes.keys() != self._notes.keys()
                self._metas, self._notes = metas, notes
                if is_new:
                    self._look()
                    self._states.clear()
                if not changed and len(found) == len(new):
                    self._states[asked] = state
            return state.paths, answers

    def _look(self) -> None:
        """Have what is known of the paths say which nodes there are."""
        # The parts below each node; the parts of requested nodes are in order.
        self._sorted: dict[str, list[str]] = {}
        self._children: dict[str, set[str]] = {"": set()}
        # Never less than before: an entry that was dropped may come back under its number.
        self._last = max([self._last, *filter(None, map(self.order, itertools.chain(self._metas, self._notes)))])
        for path in self._metas:
            self._link(path)
        for path in filter(None, self._notes):
            self._look_at(path)

    def _look_at(self, path: str) -> None:
        """Have a nested container be known, though there may be nothing in it."""
        if path not in self._children:
            self._link(path)
            self._children[path] = set()
        self._sorted.clear()

    def _link(self, path: str) -> None:
        parent, _, part = path.rpartition(".")
        if parent not in self._children:
            self._link(parent)
            self._children[parent] = set()
        self._children[parent].add(part)
        self._sorted.clear()

    def forget(self) -> None:
        """Ask anew for all that is known, as a write may have come through or not."""
        with self._knowing.held:
            self._changes += 1
            self._metas, self._notes, self._children = {}, {}, {"": set()}
            self._states.clear()
            self._sorted.clear()

    def find_meta(self, path: str) -> Meta | None:
        """Return the metadata of a leaf; `None` for a nested container; raises a `KeyError` if the path is absent."""
        scope = self.scope
        if not self.address.cached and (scope is None or not (scope.is_listed or scope.adds)):
            self._list_level()
        for asked in (False, True):
            with self._knowing.held:
                if path in self._metas:
                    return self._metas[path]
                if path in self._children:
                    return None
            if asked or (scope is not None and scope.is_listed):
                break
            self._list_level()
        raise KeyError(decoded(path.rpartition(".")[2]))

    def _list_level(self) -> None:
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
        self._list_level()
        with self._knowing.held:
            found = self._sorted.get(path)
            if found is None:
                start = f"{path}." if path else ""
                found = sorted(self._children.get(path, ()), key=lambda part: self._rank(start + part))
                self._sorted[path] = found
            return found

    def _rank(self, path: str) -> tuple[bool, int, str]:
        """Return the sort key of the entries of one level: our entries by creation, then others by name."""
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

    def read_note(self, path: str) -> dict[str, Any]:
        """Return the notes of a nested container."""
        return self._notes.get(path, {})

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
                self.wire.discard([*scope.uploads])
            raise
        finally:
            self._local.scope = None

    def _read_ahead(self, scope: Scope, items: Iterable[Item], pick: Pick) -> None:
        """Read the names and the first leaves ahead. If only values are wanted, the first access reads them."""
        if not self.address.cached or not self._metas:
            self._list_level()
        paths = [path for item in items if isinstance(item, (WireGroup, WireArray)) for path in self.below(item.place)]
        for path in paths:
            meta = self._metas.get(path)
            if meta is None:
                continue
            if meta.is_value:
                scope.wanted[path] = Ahead(meta, (), Request(path), ())
                continue
            with contextlib.suppress(ValueError, IndexError, SaveError):  # told by those who come to that leaf
                selection = pick(meta.parse_meta().shape or ())
                if selection is not None:
                    request, shape = request_of(path, meta, selection)
                    if request.run and is_one(request):
                        scope.wanted[path] = Ahead(meta, selection, request, shape)
        if any(ahead.request.run for ahead in scope.wanted.values()):
            self._read_portion(scope)

    def _read_portion(self, scope: Scope, path: str | None = None, key: Path = ()) -> None:
        """Read what is wanted, of a leaf first, as much as one answer should carry; and the names, when it is time."""
        aheads = scope.portion(path)
        requests = [ahead.request for ahead in aheads]
        if scope.is_listed:
            answers = self.wire.read(requests, key)
        else:
            scope.is_listed = True
            answers = self.sync(requests)[1]
        for ahead, answer in zip(aheads, answers, strict=True):
            ahead.answer = answer
            scope.ready[ahead.request.path] = ahead

    def ahead(self, path: str, meta: Meta | None, selection: Selection, key: Path) -> Ahead | None:
        """Take the content of a leaf that was read ahead, if it is exactly this selection."""
        scope = self.scope
        found = None if scope is None else scope.ready.get(path) or scope.wanted.get(path)
        if scope is None or found is None or scope.writes(found.request):
            return None
        if not (found.is_of(meta, selection) if meta is not None else not found.request.run):
            return None
        self.check()
        if path in scope.wanted:
            self._read_portion(scope, path, key)
        del scope.ready[path]
        return found

    def fetch(self, request: Request, key: Path) -> Any:
        """The answer to a request.

        Raises:
            StaleError: the leaf was removed, or its shape or dtype changed.
        """
        self.check()
        scope = self.scope
        if scope is not None and scope.writes(request):
            self.send(scope)
        (answer,) = self.wire.read([request], key)
        return self.take_answer(request, answer, key)

    def take_answer(self, request: Request, answer: Any, key: Path) -> Any:
        """An answer; a `StaleError` when there is none."""
        if answer is None:
            raise self._stale(request.path, key)
        return answer

    def _stale(self, path: str, key: Path) -> StaleError:
        with self._knowing.held:
            self._changes += 1
            self._metas.pop(path, None)
            self._states.clear()
        paths, _ = self.sync()
        what = (
            "has another shape or dtype by now"
            if path in paths
            else ("is no longer there: it was deleted, it expired, or the server was started anew without what it held")
        )
        return StaleError(f"entry {joined(key)!r} of the {self.kind} {self.name!r} {what}; nothing was written to it")

    # --- writing ------------------------------------------------------------------------------------------------------

    def send(self, scope: Scope) -> None:
        """Send what was written so far."""
        checks, commands, checked_, adds = list(scope.checks.values()), scope.commands, scope.checked, scope.adds
        keys = list(map(self.key_of, scope.touched))
        scope.begin()
        scope.ready.clear()
        if adds:
            scope.is_listed = False
            if not only_frees(commands):
                commands += [("SETNX", self.wire.base + name, value) for name, value in self._own_header.items()]
        try:
            failed = self.wire.write(checks, commands, keys)
        except BaseException:
            self.forget()
            raise
        if not failed:
            if scope.uploads:
                self.wire.discard([*scope.uploads])
                scope.uploads.clear()
            self._renew(adds)
            return
        self.forget()
        path, key = checked_[failed - 1]
        if checks[failed - 1][2]:
            raise self._stale(path, key)
        raise self.wire.lost_upload(key)

    def _renew(self, always: bool) -> None:
        ttl = self.address.ttl
        if ttl is None:
            return
        now = time.monotonic()
        if always or now - self._renewed > ttl / 10:
            self.wire.renew()
            self._renewed = now

    def upload(self, name: str, offset: int, data: memoryview, key: Path) -> str:
        """Upload bytes ahead, under this name or, without one, under a new one, which is returned.

        They are deleted when the scope fails.
        """
        scope, name = self.scope, name or self.wire.ahead()
        assert scope is not None
        held = scope.uploads.setdefault(name, 0)
        self.wire.upload(name, offset, data, key, held)
        scope.uploads[name] = max(held, offset + len(data))
        return name

    def write_pieces(self, array: WireArray, run: int, offsets: bytes, data: memoryview) -> None:
        """Write pieces of an array, each of `run` bytes; what is more than one request carries is uploaded ahead."""
        path, meta, wire = array.place, array.meta, self.wire
        name = wire.data(path)
        check = (wire.meta(path), name, meta.shape_text, meta.dtype_text, meta.nbytes)
        with self.together():
            scope = self.scope
            assert scope is not None
            if scope.adds and path in scope.touched:
                # The check is made before anything of the transaction is carried out.
                self.send(scope)
            scope.check(path, array.key, check)
            at = 0
            for part in portions(Request(path, run=run, offsets=offsets)):
                piece = data[at : at + part.nbytes]
                at += part.nbytes
                if scope.size + len(piece) > LIMIT:
                    ahead = self.upload("", 0, piece, array.key)
                    # It stays until the answer has come, so that the write may be sent again.
                    scope.check(path, array.key, (ahead, name, b"", b"", 0))
                    scope.commands.append(wire.place(ahead, name, part.run, part.offsets))
                else:
                    scope.commands.append(wire.put(name, part.run, part.offsets, piece))
                    scope.size += len(piece)
                scope.note_written(part)

    def set_header(self, name: str, value: bytes | None) -> None:
        """Note something of the container as a whole; `None` takes it away."""
        if self.header.get(name) == value:
            return
        with self._knowing.held:
            self._changes += 1
            self._states.clear()
        with self.together():
            assert self.scope is not None
            self.undo_on_failure(functools.partial(self._restore_header, self.header.copy(), self._own_header.copy()))
            if value is None:
                self.header.pop(name, None)
                self._own_header.pop(name, None)
                self.scope.command("DEL", self.wire.base + name)
            else:
                self.header[name] = self._own_header[name] = value
                self.scope.command("SET", self.wire.base + name, value)

    def _restore_header(self, header: dict[str, bytes], own: dict[str, bytes]) -> None:
        """Restore the header that is known, and the one for a server that has lost its own."""
        self.header, self._own_header = header, own

    def undo_on_failure(self, undo: Callable[[], None]) -> None:
        if self.scope is not None:
            self.scope.undos.append(undo)

    def note(self, path: str, notes: Mapping[str, Any]) -> None:
        """Have the server keep what is noted of a nested container."""
        kept = {name: value for name, value in notes.items() if value is not None}
        if path:
            kept.setdefault("_order", self._next())
        with self._knowing.held:
            self._changes += 1
            self._notes[path] = kept
            self._states.clear()
            self._look_at(path)
        with self.together():
            assert self.scope is not None
            self.scope.touch(path)
            self.scope.command("HSET", self.wire.base + "__groups__", path, json.dumps(kept))

    def drop(self, path: str) -> None:
        """Delete what is at and below a path."""
        wire = self.wire
        with self.together():
            scope = self.scope
            assert scope is not None
            scope.adds = True
            scope.touch(path)
            with self._knowing.held:
                self._changes += 1
                self._states.clear()
                for leaf in self.below(path):
                    scope.command("SREM", wire.base + "__keys__", leaf)
                    for name in (wire.meta(leaf), wire.data(leaf), wire.data(leaf) + ":idx"):
                        scope.command("DEL", name)
                    del self._metas[leaf]
                for node in [node for node in self._notes if node == path or node.startswith(path + ".")]:
                    scope.command("HDEL", wire.base + "__groups__", node)
                    del self._notes[node]
                self._look()

    def add(self, path: str, fields: Mapping[str, Any], item: WireArray | WireText, order: int | None = None) -> None:
        """Add a leaf: its hash, and its data, which are uploaded ahead where they are large; `order` as before."""
        wire = self.wire
        scope = self.scope
        assert scope is not None
        scope.adds = True
        scope.touch(path)
        fields = {**fields, "_order": self._next() if order is None else order}
        data = wire.data(path)
        item.store_data(scope, path, data)
        scope.command("DEL", wire.meta(path))
        scope.command("HSET", wire.meta(path), *itertools.chain.from_iterable(fields.items()))
        scope.command("SADD", wire.base + "__keys__", path)
        with self._knowing.held:
            self._changes += 1
            self._states.clear()
            self._metas[path] = Meta({name.encode(): raw_of(value) for name, value in fields.items()})
            self._link(path)
