"""Containers on a Redis server, or another one of its protocol, as stores; the layout is in `redis_wire.py`.

What is known of the leaves (paths, shapes, dtypes) is kept. Each request for elements asks whether that is still so,
and those of whole containers whether the names are: a seal stands for all of it. All that one call writes goes in one
request, which the server carries out whole or not at all; what is larger than a request goes ahead under another name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import numpy as np
import torch

from tensordict.core.errors import SaveError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checked
from tensordict.io.specification import VALUES
from tensordict.io.stores.entries import CLASS, KIND, TEXT
from tensordict.io.stores.redis_layout import (
    Ahead,
    Meta,
    Scope,
    bytes_of,
    decoded,
    encoded,
    is_one,
    noted_in,
    notes_of,
    pieces,
    portions,
    raw_of,
    request_for,
    request_of,
)
from tensordict.io.stores.redis_wire import LIMIT, Address, Request, State, Wire
from tensordict.io.stores.store import SIZE, ArrayItem, Group, Item, Other, Pick, StaleError, Store, Text
from tensordict.memory.stored_tensors import Selection, Values

_addresses = itertools.count()


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
        # What the server said, for requests for the same leaves, as long as that is what is known.
        self._states: dict[tuple[str, ...], State] = {}
        # The number of the entry that was made last.
        self._last = 0
        self._look()
        self._root = _WireGroup(self, (), "", next(_addresses))
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
    def checked_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise TypeError(f"a container on a server has no options for its tensors, got {sorted(options)}")
        return options

    @property
    def source(self) -> Address:
        return self.address

    @property
    def root(self) -> _WireGroup:
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
    def decoded(part: str) -> str:
        return unquote(part)

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether there was such a container when it was asked for the last time."""
        return bool(self.header or self._metas or self._notes)

    @property
    def is_stack(self) -> bool:
        """Whether it is a lazy stack."""
        return self.header.get("__type__") == b"lazy_stack"

    def sync(self, requests: Sequence[Request] = ()) -> tuple[set[str], list[Any]]:
        """The paths of the leaves that there are now, and the answers to requests; what is known is made of that."""
        self.check()
        if not self.address.cached:
            self._metas.clear()
            self._states.clear()
        asked = tuple([request.path for request in requests])
        last = self._states.get(asked)
        state, answers = self.wire.state(requests, last)
        if state is last:
            return state.paths, answers
        self.header = dict(state.header)
        self._own_header.update(state.header)
        nodes = self._notes.keys()
        self._notes = {path: notes_of(raw) for path, raw in state.groups.items()}
        changed = {path for path, answer in zip(asked, answers, strict=True) if answer is None}
        gone = [path for path in self._metas if path not in state.paths or path in changed]
        for path in gone:
            del self._metas[path]
        new = [path for path in state.paths if path not in self._metas]
        if new:
            for path, fields in zip(new, self.wire.metas(new), strict=True):
                self._metas[path] = Meta(fields)
        if new or gone or nodes != self._notes.keys():
            self._look()
            self._states.clear()
        if not changed:
            self._states[asked] = state
        return state.paths, answers

    def _look(self) -> None:
        """Have what is known of the paths say which nodes there are."""
        # The parts below each node, and in order for those that were asked for.
        self._sorted: dict[str, list[str]] = {}
        self._children: dict[str, set[str]] = {"": set()}
        known = itertools.chain(self._metas, self._notes)
        orders = (order for path in known if (order := self.order(path)) is not None)
        # Never less than before: an entry that was dropped may come back under its number.
        self._last = max([self._last, *orders])
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
        self._metas.clear()
        self._notes.clear()
        self._states.clear()
        self._sorted.clear()
        self._children = {"": set()}

    def known(self, path: str) -> Meta | None:
        """What is known of a leaf; `None` when there is none. Raises `KeyError` for what is not even a node."""
        scope = self.scope
        if scope is not None and scope.adds:
            self.send(scope)
        if not self.address.cached and (scope is None or not scope.is_listed):
            self._listed()
        for asked in (False, True):
            if path in self._metas:
                return self._metas[path]
            if path in self._children:
                return None
            if asked or (scope is not None and scope.is_listed):
                break
            self._listed()
        raise KeyError(decoded(path.rpartition(".")[2]))

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
        found = self._sorted.get(path)
        if found is None:
            start = f"{path}." if path else ""
            found = sorted(self._children.get(path, ()), key=lambda part: self._rank(start + part))
            self._sorted[path] = found
        return found

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
        """What is noted of a nested container."""
        return self._notes.get(path, {})

    def below(self, path: str) -> list[str]:
        """The paths of the leaves at and below a path, in order."""
        start = path + "." if path else ""
        return sorted(other for other in self._metas if other == path or other.startswith(start))

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
        except BaseException:
            if scope.commands:
                self.forget()
            raise
        finally:
            self._local.scope = None

    def _read_ahead(self, scope: Scope, items: Iterable[Item], pick: Pick) -> None:
        """Read the names and the first of what will be read; values alone are read when the first is asked for."""
        if not self.address.cached or not self._metas:
            self._listed()
        paths = [
            path for item in items if isinstance(item, (_WireGroup, _WireArray)) for path in self.below(item.place)
        ]
        for path in paths:
            meta = self._metas[path]
            if meta.is_value:
                scope.wanted[path] = Ahead(meta, (), Request(path), ())
                continue
            with contextlib.suppress(ValueError, IndexError, SaveError):  # told by those who come to that leaf
                selection = pick(meta.parsed().shape or ())
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
        """What was read ahead of a leaf, when it is just this selection; it is given once."""
        scope = self.scope
        if scope is None:
            return None
        if scope.commands:
            self.send(scope)
        found = scope.ready.get(path) or scope.wanted.get(path)
        if found is None or not (found.is_of(meta, selection) if meta is not None else not found.request.run):
            return None
        self.check()
        if path in scope.wanted:
            self._read_portion(scope, path, key)
        del scope.ready[path]
        return found

    def fetch(self, request: Request, key: Path) -> Any:
        """The answer to a request.

        Raises:
            StaleError: the leaf is no longer there, or has another shape or dtype.
        """
        self.check()
        scope = self.scope
        if scope is not None and scope.commands:
            self.send(scope)
        (answer,) = self.wire.read([request], key)
        return self.answered(request, answer, key)

    def answered(self, request: Request, answer: Any, key: Path) -> Any:
        """An answer; a `StaleError` when there is none."""
        if answer is None:
            raise self._stale(request.path, key)
        return answer

    def _stale(self, path: str, key: Path) -> StaleError:
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
        scope.begin()
        scope.ready.clear()
        if adds:
            scope.is_listed = False
            commands += [("SETNX", self.wire.base + name, value) for name, value in self._own_header.items()]
        key = checked_[0][1] if len(checked_) == 1 else ()
        try:
            failed = self.wire.write(checks, commands, key)
        except BaseException:
            self.forget()
            raise
        if not failed:
            self._renew(adds)
            return
        self.forget()
        path, key = checked_[failed - 1]
        if checks[failed - 1][2]:
            raise self._stale(path, key)
        raise SaveError(
            f"{entry_of(key)}of the {self.kind} {self.name!r}: the server has lost what was uploaded, as when it is "
            "started anew; nothing was written: the same call works again"
        )

    def _renew(self, always: bool) -> None:
        ttl = self.address.ttl
        if ttl is None:
            return
        now = time.monotonic()
        if always or now - self._renewed > ttl / 10:
            self.wire.renew(list(self._metas))
            self._renewed = now

    def write_pieces(self, array: _WireArray, run: int, offsets: bytes, data: memoryview) -> None:
        """Have pieces of an array written, each of `run` bytes, in as many requests as they need."""
        path, meta, wire = array.place, array.meta, self.wire
        name = wire.data(path)
        check = (wire.meta(path), name, meta.shape_text, meta.dtype_text, meta.nbytes)
        with self.together():
            scope = self.scope
            assert scope is not None
            at = 0
            for part in portions(Request(path, run=run, offsets=offsets)):
                piece = data[at : at + part.nbytes]
                at += part.nbytes
                if scope.size + len(piece) > LIMIT and scope.commands:
                    self.send(scope)
                scope.check(path, array.key, check)
                scope.commands.append(wire.put(name, part.run, part.offsets, piece))
                scope.size += len(piece)

    def set_header(self, name: str, value: bytes | None) -> None:
        """Note something of the container as a whole; `None` takes it away."""
        if self.header.get(name) == value:
            return
        self._states.clear()
        with self.together():
            assert self.scope is not None
            if value is None:
                self.header.pop(name, None)
                self._own_header.pop(name, None)
                self.scope.command("DEL", self.wire.base + name)
            else:
                self.header[name] = self._own_header[name] = value
                self.scope.command("SET", self.wire.base + name, value)

    def note(self, path: str, notes: Mapping[str, Any]) -> None:
        """Have the server keep what is noted of a nested container."""
        kept = {name: value for name, value in notes.items() if value is not None}
        if path:
            kept.setdefault("_order", self._next())
        self._notes[path] = kept
        self._states.clear()
        self._look_at(path)
        with self.together():
            assert self.scope is not None
            self.scope.command("HSET", self.wire.base + "__groups__", path, json.dumps(kept))

    def drop(self, path: str) -> None:
        """Delete what is at and below a path."""
        wire = self.wire
        with self.together():
            scope = self.scope
            assert scope is not None
            scope.adds = True
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

    def add(self, path: str, fields: Mapping[str, Any], item: _WireArray | _WireText, order: int | None = None) -> None:
        """Add a leaf: its hash, and its data, which are uploaded ahead where they are large; `order` as before."""
        wire = self.wire
        scope = self.scope
        assert scope is not None
        scope.adds = True
        self._states.clear()
        fields = {**fields, "_order": self._next() if order is None else order}
        data = wire.data(path)
        item.store_data(scope, path, data)
        scope.command("DEL", wire.meta(path))
        scope.command("HSET", wire.meta(path), *itertools.chain.from_iterable(fields.items()))
        scope.command("SADD", wire.base + "__keys__", path)
        self._metas[path] = Meta({name.encode(): raw_of(value) for name, value in fields.items()})
        self._link(path)


# --- what is in a group -----------------------------------------------------------------------------------------------


class _WireText(Text):
    """A value that is no tensor. What it is of is told with it, unless another program has replaced it since."""

    store: Server

    def __init__(self, store: Server, key: Path, place: str, content: str | None = None) -> None:
        super().__init__(store, key, next(_addresses))
        self.place = place
        self._content = content
        self._noted: dict[str, Any] | None = None if content is None else {}

    def content(self) -> str:
        if self.place:
            request = Request(self.place)
            ahead = self.store.ahead(self.place, None, (), self.key)
            raw, form = (
                self.store.fetch(request, self.key)
                if ahead is None
                else self.store.answered(request, ahead.answer, self.key)
            )
            self._content = raw.decode()
            noted = notes_of(form) if form else {}
            self._noted = noted if noted.get("crc") == zlib.crc32(raw) else {}
        assert self._content is not None
        return self._content

    def attribute(self, name: str) -> Any:
        if self._noted is None:
            self.content()
        assert self._noted is not None
        return noted_in(self._noted, name, VALUES[0] if name == KIND else None)

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        if self.place:
            raise SaveError(f"{entry_of(self.key)}what is noted of a value is written with it")
        assert self._noted is not None
        self._noted[name] = value

    def fields(self) -> dict[str, Any]:
        assert self._content is not None and self._noted is not None
        if self._noted.pop(TEXT, None):
            self._content = json.dumps(self._content, ensure_ascii=False)
        noted = {name: value for name, value in self._noted.items() if value is not None}
        form = json.dumps({**noted, "crc": zlib.crc32(self._content.encode())})
        return {"is_non_tensor": "1", "encoding": "json", "_form": form}

    def store_data(self, scope: Scope, path: str, name: str) -> None:
        assert self._content is not None
        scope.command("SET", name, self._content)


class _WireArray(ArrayItem):
    store: Server
    has_one_name = True

    def __init__(self, store: Server, key: Path, place: str, meta: Meta) -> None:
        super().__init__(store, key, next(_addresses))
        assert meta.shape is not None and meta.dtype is not None
        self.place = place
        self.meta = meta
        self.dtype = meta.dtype
        self.shape = torch.Size(meta.shape)
        # Before it has a name: what was written to it, or the name that it was uploaded under.
        self._content: Values | None = None
        self._ahead = ""

    def attribute(self, name: str) -> None:
        return None

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        raise SaveError(f"{entry_of(self.key)}nothing is noted of an array on a server")

    def pieces(self, selection: Selection) -> tuple[tuple[int, ...], int, bytes]:
        """The shape of what is selected, the length in bytes of its pieces, and where each begins."""
        return pieces(self.shape, self.dtype.itemsize, selection)

    def read(self, selection: Selection, dtype: Any) -> Values:
        store = self.store
        ahead = store.ahead(self.place, self.meta, selection, self.key)
        if ahead is not None:
            request, shape = ahead.request, ahead.shape
            raw: Values = self._checked(request, store.answered(request, ahead.answer, self.key))
        else:
            shape, run, offsets = self.pieces(selection)
            request = request_for(self.place, self.meta, run, offsets)
            if not request.run:
                return np.empty(shape, dtype)
            if is_one(request):
                raw = self._checked(request, store.fetch(request, self.key))
            else:
                raw, at = np.empty(request.nbytes, np.uint8), 0
                for part in portions(request):
                    raw[at : at + part.nbytes] = self._checked(part, store.fetch(part, self.key))
                    at += part.nbytes
        # Any byte may have been sent; a tensor of booleans holds 0 and 1.
        found: Values = raw != 0 if self.dtype is torch.bool else raw.view(dtype)
        return found.reshape(shape)

    def _checked(self, request: Request, raw: Any) -> Values:
        """An answer as an array of bytes that can be written to; a `SaveError` when it is too short."""
        if len(raw) != request.nbytes:
            raise SaveError(
                f"entry {joined(self.key)!r} of the {self.store.kind} {self.store.name!r} has fewer bytes than its "
                f"shape {list(self.shape)} and dtype {self.dtype} say"
            )
        return raw if isinstance(raw, np.ndarray) else np.frombuffer(bytearray(raw), np.uint8)

    def write(self, selection: Selection, values: Any) -> None:
        self.store.check_writable()
        if not values.size:
            return
        shape, run, offsets = self.pieces(selection)
        if values.shape != shape:
            values = np.broadcast_to(values, shape)
        values = np.ascontiguousarray(values)
        data = bytes_of(values)
        if self.place:
            self.store.write_pieces(self, run, offsets, data)
        elif self.meta.nbytes <= LIMIT:
            if run == self.meta.nbytes:
                self._content = values
                return
            if self._content is None:
                self._content = np.zeros(self.shape, values.dtype)
            self._content[selection] = values
        else:
            self._ahead = self._ahead or self.store.wire.ahead()
            for at, (offset,) in enumerate(struct.iter_unpack("<Q", offsets)):
                self.store.wire.upload(self._ahead, offset, data[at * run : (at + 1) * run], self.key)

    def resize(self, shape: Sequence[int]) -> NoReturn:
        raise SaveError(f"entry {joined(self.key)!r}: an array on a server does not grow; set the entry anew")

    def fields(self) -> dict[str, Any]:
        return {"shape": self.meta.shape_text, "dtype": self.meta.dtype_text}

    def store_data(self, scope: Scope, path: str, name: str) -> None:
        size, wire = self.meta.nbytes, self.store.wire
        if not self._ahead and self._content is not None:
            data = bytes_of(self._content)
            if scope.size + size <= LIMIT:
                scope.command("SET", name, data)
                scope.size += size
                return
            self._ahead = wire.ahead()
            wire.upload(self._ahead, 0, data, self.key)
        if self._ahead:
            # What was not written is zero.
            scope.check(path, self.key, (self._ahead, name, b"", b"", size))
            scope.commands.append(wire.take(self._ahead, name))
            return
        scope.command("DEL", name)
        scope.command("SETRANGE", name, size - 1, b"\0") if size else scope.command("SET", name, b"")


class _WireGroup(Group):
    """A container or nested container: its path, empty for the outermost; or items that have no place yet."""

    store: Server

    def __init__(self, store: Server, key: Path, place: str | None, address: int) -> None:
        super().__init__(store, key, address)
        self._place = place
        self._made: dict[str, Item] = {}
        self._noted: dict[str, Any] = {}

    @property
    def place(self) -> str:
        assert self._place is not None
        return self._place

    @property
    def path(self) -> str:
        return "/".join(quote(decoded(part), safe="") for part in self.place.split("."))

    def _below(self, name: str) -> str:
        return f"{self.place}.{encoded(name)}" if self.place else encoded(name)

    def attribute(self, name: str) -> Any:
        if self._place is None:
            return self._noted.get(name)
        header = {SIZE: "__batch_size__", CLASS: "__tensorclass__"}.get(name) if not self.place else None
        if header is None:
            return noted_in(self.store.noted(self.place), name)
        raw = self.store.header.get(header)
        if raw is None:
            return None
        return raw.decode() if name == CLASS else list(checked.sizes(json.loads(raw), "its batch size"))

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        if self._place is None:
            self._noted[name] = value
            return
        header = {SIZE: "__batch_size__", CLASS: "__tensorclass__"}.get(name) if not self.place else None
        if header is not None:
            text = value if isinstance(value, str) or value is None else json.dumps(value)
            self.store.set_header(header, None if text is None else text.encode())
            return
        notes = self.store.noted(self.place)
        if notes.get(name) != value:
            self.store.note(self.place, {**notes, name: value})

    def names(self) -> list[str]:
        return [decoded(part) for part in self.store.children(self.place)]

    def has(self, name: str) -> bool:
        self.store._listed()
        return super().has(name)

    def find(self, name: str, known: Item | None = None) -> Item:
        store, place, key = self.store, self._below(name), (*self.key, name)
        store.check()
        meta = store.known(place)
        if meta is None:
            if isinstance(known, _WireGroup) and known._place == place:
                return known
            return _WireGroup(store, key, place, next(_addresses))
        if meta.is_value:
            encoding = meta.fields.get(b"encoding", b"json")
            if encoding != b"json":
                return Other(store, key, -1, f"a value in the encoding {encoding!r:.40}, which is not read")
            return known if isinstance(known, _WireText) else _WireText(store, key, place)
        if isinstance(known, _WireArray) and known.meta is meta:
            return known
        with store.errors(key):
            return _WireArray(store, key, place, meta.parsed())

    def check_name(self, name: str) -> None:
        encoded(name)

    def new_group(self, key: Path) -> _WireGroup:
        return _WireGroup(self.store, key, None, -1)

    def child(self, name: str, size: torch.Size) -> _WireGroup:
        """The nested container of this name, which is made with this batch size where there is none."""
        if not self.has(name):
            made = self.new_group((*self.key, name))
            made.set_attribute(SIZE, list(size))
            self.put(name, made)
        found = self.find(name)
        assert isinstance(found, _WireGroup)
        return found

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        return _WireArray(self.store, key, "", Meta.of(shape, dtype))

    def new_text(self, key: Path, content: str) -> Text:
        content.encode()
        return _WireText(self.store, key, "", content)

    def put(self, name: str, item: Item) -> None:
        if self._place is None:
            self._made[name] = item
            return
        self.store.check_writable()
        place = self._below(name)
        with self.store.together():
            order = self.store.order(place)
            if self.store.below(place) or place in self.store._notes:
                self.store.drop(place)
            self._add(place, item, order)

    def _add(self, place: str, item: Item, order: int | None = None) -> None:
        if isinstance(item, _WireGroup):
            item._place = place
            self.store.note(place, {**item._noted, "_order": order})
            assert self.store.scope is not None
            self.store.scope.adds = True
            for name, inner in item._made.items():
                item._add(item._below(name), inner)
            item._made = {}
            return
        assert isinstance(item, (_WireArray, _WireText))
        self.store.add(place, item.fields(), item, order)

    def delete(self, name: str) -> None:
        self.store.check_writable()
        self.store.drop(self._below(name))
