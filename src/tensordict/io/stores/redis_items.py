"""The entries of a container on a Redis server as items of a store: tensors, values, nested containers."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import torch

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.specification import VALUES
from tensordict.io.stores.array_store import SIZE, ArrayItem, Group, Item, Text, UnreadableItem, decode_names
from tensordict.io.stores.entries import CLASS, KIND, TEXT
from tensordict.io.stores.redis_layout import (
    Meta,
    Scope,
    bytes_of,
    decoded,
    encode_part,
    is_one,
    noted_in,
    notes_of,
    pieces,
    portions,
    request_for,
)
from tensordict.io.stores.redis_wire import LIMIT, Request
from tensordict.memory.stored_tensors import Selection, Values

if TYPE_CHECKING:
    from tensordict.io.stores.redis import Server

addresses = itertools.count()


class WireText(Text):
    """A non-tensor value. Its class is stored with it, unless another program has replaced it since."""

    store: Server

    def __init__(self, store: Server, key: Path, place: str, content: str | None = None) -> None:
        super().__init__(store, key, next(addresses))
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
                else self.store.take_answer(request, ahead.answer, self.key)
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


class WireArray(ArrayItem):
    store: Server
    has_one_name = True

    def __init__(self, store: Server, key: Path, place: str, meta: Meta) -> None:
        super().__init__(store, key, next(addresses))
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
        """Return the shape of the selection, the length of its pieces in bytes, and their offsets."""
        return pieces(self.shape, self.dtype.itemsize, selection)

    def read(self, selection: Selection, dtype: Any) -> Values:
        store = self.store
        ahead = store.ahead(self.place, self.meta, selection, self.key)
        if ahead is not None:
            request, shape = ahead.request, ahead.shape
            raw: Values = self._check_form(request, store.take_answer(request, ahead.answer, self.key))
        else:
            shape, run, offsets = self.pieces(selection)
            request = request_for(self.place, self.meta, run, offsets)
            if not request.run:
                return np.empty(shape, dtype)
            if is_one(request):
                raw = self._check_form(request, store.fetch(request, self.key))
            else:
                raw, at = np.empty(request.nbytes, np.uint8), 0
                for part in portions(request):
                    raw[at : at + part.nbytes] = self._check_form(part, store.fetch(part, self.key))
                    at += part.nbytes
        # Any byte may have been sent; a tensor of booleans holds 0 and 1.
        found: Values = raw != 0 if self.dtype is torch.bool else raw.view(dtype)
        return found.reshape(shape)

    def _check_form(self, request: Request, raw: Any) -> Values:
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
            for at, (offset,) in enumerate(struct.iter_unpack("<Q", offsets)):
                self._ahead = self.store.upload(self._ahead, offset, data[at * run : (at + 1) * run], self.key)

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
            self._ahead = self.store.upload("", 0, data, self.key)
        if self._ahead:
            # Elements that were not written are zero.
            scope.check(path, self.key, (self._ahead, name, b"", b"", 0))
            scope.commands.append(wire.take(self._ahead, name))
            return
        scope.command("DEL", name)
        scope.command("SETRANGE", name, size - 1, b"\0") if size else scope.command("SET", name, b"")


class WireGroup(Group):
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
        return f"{self.place}.{encode_part(name)}" if self.place else encode_part(name)

    def attribute(self, name: str) -> Any:
        if self._place is None:
            return self._noted.get(name)
        header = {SIZE: "__batch_size__", CLASS: "__tensorclass__"}.get(name) if not self.place else None
        if header is None:
            return noted_in(self.store.read_note(self.place), name)
        raw = self.store.header.get(header)
        if raw is None:
            return None
        return raw.decode() if name == CLASS else list(checks.sizes(parse_json(raw), "its batch size"))

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        if self._place is None:
            self._noted[name] = value
            return
        header = {SIZE: "__batch_size__", CLASS: "__tensorclass__"}.get(name) if not self.place else None
        if header is not None:
            text = value if isinstance(value, str) or value is None else json.dumps(value)
            self.store.set_header(header, None if text is None else text.encode())
            return
        notes = self.store.read_note(self.place)
        if notes.get(name) != value:
            self.store.note(self.place, {**notes, name: value})

    def names(self) -> list[str]:
        with self.store.errors(self.key):
            return decode_names(self.store.children(self.place), decoded)

    def has(self, name: str) -> bool:
        self.store._list_level()
        return super().has(name)

    def find(self, name: str, known: Item | None = None) -> Item:
        store, place, key = self.store, self._below(name), (*self.key, name)
        store.check()
        meta = store.find_meta(place)
        if meta is None:
            if isinstance(known, WireGroup) and known._place == place:
                return known
            return WireGroup(store, key, place, next(addresses))
        if meta.is_value:
            encoding = meta.fields.get(b"encoding", b"json")
            if encoding != b"json":
                return UnreadableItem(store, key, -1, f"a value in the encoding {encoding!r:.40}, which is not read")
            return known if isinstance(known, WireText) else WireText(store, key, place)
        if isinstance(known, WireArray) and known.meta is meta:
            return known
        with store.errors(key):
            return WireArray(store, key, place, meta.parse_meta())

    def check_name(self, name: str) -> None:
        encode_part(name)

    def new_group(self, key: Path) -> WireGroup:
        return WireGroup(self.store, key, None, -1)

    def child(self, name: str, size: torch.Size) -> WireGroup:
        """The nested container of this name, which is made with this batch size where there is none."""
        if not self.has(name):
            made = self.new_group((*self.key, name))
            made.set_attribute(SIZE, list(size))
            self.attach(name, made)
        found = self.find(name)
        assert isinstance(found, WireGroup)
        return found

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        return WireArray(self.store, key, "", Meta.of(shape, dtype))

    def new_text(self, key: Path, content: str) -> Text:
        content.encode()
        return WireText(self.store, key, "", content)

    def attach(self, name: str, item: Item) -> None:
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
        if isinstance(item, WireGroup):
            item._place = place
            self.store.note(place, {**item._noted, "_order": order})
            assert self.store.scope is not None
            self.store.scope.adds = True
            for name, inner in item._made.items():
                item._add(item._below(name), inner)
            item._made = {}
            return
        assert isinstance(item, (WireArray, WireText))
        self.store.add(place, item.fields(), item, order)

    def delete(self, name: str) -> None:
        self.store.check_writable()
        self.store.drop(self._below(name))
