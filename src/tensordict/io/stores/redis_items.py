"""The items of containers on Redis servers, and the encoding of names, shapes and selections; for `redis.py`."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import torch

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.specification import VALUES
from tensordict.io.stores.array_store import ENCODED, ArrayItem, Group, Item, Text, UnreadableItem, decode_names
from tensordict.io.stores.entries import KIND, TEXT
from tensordict.io.stores.redis_wire import LIMIT, Request
from tensordict.memory.stored_tensors import Selection, Values, as_array, stored_dtype

if TYPE_CHECKING:
    from tensordict.io.stores.redis import Scope, Server

# Most pieces of an array in one request, so that the server can answer other clients in between.
_PIECES = 1 << 14


@functools.lru_cache(1 << 12)
def encode_part(name: str) -> str:
    """Encode a name as a part of a path."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SaveError(f"entry {name!r}: this name has no UTF-8 form and cannot be held by a server") from error
    if not name or "." in name or name.startswith(ENCODED) or name.endswith(":idx"):
        return ENCODED + quote(name, safe="").replace(".", "%2E")
    return name


class Meta:
    """The hash of a leaf on the server, parsed when it is needed.

    If the elements of a leaf of a lazy stack differ in shape, `shapes` lists the shape of each element, `starts` has
    their byte offsets and the end, and `shape_text` is the digest of the text of all shapes.
    """

    __slots__ = ("dtype", "dtype_text", "fields", "is_value", "order", "shape", "shape_text", "shapes", "starts")

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self.fields = fields
        self.shape_text = fields.get(b"shape", b"")
        self.shapes: list[tuple[int, ...]] | None = None
        self.starts: list[int] = []
        if b"shapes" in fields:
            self.shape_text = hashlib.sha1(fields[b"shapes"], usedforsecurity=False).hexdigest().encode()
        self.dtype_text = fields.get(b"dtype", b"")
        order = fields.get(b"_order", b"")
        self.order = int(order) if order.isdigit() and len(order) < 20 else None
        self.is_value = b"is_non_tensor" in fields
        self.shape: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None

    @classmethod
    def of_texts(cls, fields: Mapping[str, Any]) -> Meta:
        return cls({name.encode(): str(value).encode() for name, value in fields.items()})

    def parse(self) -> Meta:
        """Parse the shape and dtype, and return self; raises `ValueError` for invalid texts."""
        if self.shape is None:
            dtype = checks.DTYPES.get(self.dtype_text.decode())
            if dtype is None:
                raise ValueError(f"{self.dtype_text!r:.80} is no dtype")
            stored_dtype(dtype)
            if b"shapes" in self.fields:
                self._parse_shapes(dtype)
            self.shape, self.dtype = checks.shape(parse_json(self.fields.get(b"shape", b""))), dtype
        return self

    def _parse_shapes(self, dtype: torch.dtype) -> None:
        shapes = parse_json(self.fields[b"shapes"])
        if type(shapes) is not list:
            raise ValueError(f"its shapes {shapes!r:.80} are no list of shapes")
        self.shapes = list(map(checks.shape, shapes))
        self.starts = [0, *itertools.accumulate(math.prod(shape) * dtype.itemsize for shape in self.shapes)]

    def shape_at(self, at: int) -> tuple[int, ...]:
        """Return the shape of an element of a lazy stack."""
        assert self.shape is not None
        return self.shape[1:] if self.shapes is None else self.shapes[at]

    def part(self, at: int) -> tuple[int, int]:
        """Return the range of bytes of an element of a lazy stack."""
        assert self.shape is not None and self.dtype is not None
        if self.shapes is not None:
            return self.starts[at], self.starts[at + 1]
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        return at * size, (at + 1) * size

    @property
    def nbytes(self) -> int:
        assert self.shape is not None and self.dtype is not None
        return math.prod(self.shape) * self.dtype.itemsize if self.shapes is None else self.starts[-1]


def parse_notes(raw: bytes) -> dict[str, Any]:
    try:
        found = parse_json(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- selections -------------------------------------------------------------------------------------------------------


def pieces(shape: Sequence[int], itemsize: int, selection: Selection) -> tuple[tuple[int, ...], int, bytes]:
    """Return the shape of a selection of a C-ordered array, the length of its pieces in bytes, and their offsets.

    Example: the rows 2 and 4 of 3 floats each give `((2, 3), 12, ...)`, with the offsets 24 and 48 as 64-bit integers.
    """
    picks = complete_selection(selection, len(shape))
    while picks and type(pick := picks[-1]) is slice and pick.indices(size := shape[len(picks) - 1]) == (0, size, 1):
        # Trailing dims that are selected whole are part of each piece.
        picks.pop()
    count = len(picks)
    rest = tuple(shape[count:])
    run = row = math.prod(rest) * itemsize
    # Rows are common, and the general code would take 20 us.
    if count == 1 and type(picks[0]) is int:
        return rest, run, (picks[0] * run).to_bytes(8, "little")
    if count == 1 and isinstance(picks[0], slice):
        start, stop, step = picks[0].indices(shape[0])
        if step == 1 and start < stop:
            return (stop - start, *rest), (stop - start) * run, (start * run).to_bytes(8, "little")
    taken = [
        np.arange(*pick.indices(size)) if type(pick) is slice else np.asarray(pick) for pick, size in zip(picks, shape)
    ]
    picked = (*[len(pick) for pick in taken if pick.ndim], *rest)
    if taken and type(picks[-1]) is slice and picks[-1].step in (None, 1) and len(taken[-1]):
        # Adjacent rows are one piece.
        run *= len(taken[-1])
        taken[-1] = taken[-1][:1]
    at = np.ravel_multi_index(np.ix_(*map(np.atleast_1d, taken)), shape[:count]) if taken else np.zeros(1, np.int64)
    return picked, run, (at.reshape(-1) * row).astype("<u8").tobytes()


def bytes_of(values: Values) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    flat: Any = values.reshape(-1).view(np.uint8)
    return memoryview(flat)


def complete_selection(selection: Selection, ndim: int) -> list[Any]:
    """Complete a selection to one pick for each dim."""
    picks = list(selection)
    at = next((at for at, pick in enumerate(picks) if pick is Ellipsis), len(picks))
    missing = ndim - len(picks) + (at < len(picks))
    return [*picks[:at], *[slice(None)] * missing, *picks[at + 1 :]]


def read_note(notes: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return an attribute, a text or a list of integers; raises `ValueError` for other types."""
    value = notes.get(name, default)
    if type(value) is int:
        return [value]
    if value is None or type(value) is str or (type(value) is list and all(type(item) is int for item in value)):
        return value
    raise ValueError(f"what is noted as {name!r} is no text and no row of integers")


def portions(request: Request) -> Iterator[Request]:
    """Split a request so that no answer is too large, and none occupies the server for long."""
    run, offsets = request.run, request.offsets
    if run > LIMIT:
        for (offset,) in struct.iter_unpack("<Q", offsets):
            for at in range(0, run, LIMIT):
                yield request._replace(run=min(LIMIT, run - at), offsets=(offset + at).to_bytes(8, "little"))
    elif run:
        step = 8 * min(_PIECES, LIMIT // run)
        if len(offsets) <= step:
            yield request
            return
        for start in range(0, len(offsets), step):
            yield request._replace(offsets=offsets[start : start + step])


# --- items ------------------------------------------------------------------------------------------------------------


addresses = itertools.count()


class WireText(Text):
    """A value. Its attributes are stored with it, and are ignored if another program has replaced the value."""

    store: Server

    def __init__(self, store: Server, key: Path, place: str, content: str | None = None) -> None:
        super().__init__(store, key, next(addresses))
        self.place = place
        self._content = content
        self._noted: dict[str, Any] | None = None if content is None else {}

    def content(self) -> str:
        if self.place:
            raw, form = self.store.fetch(Request(self.place), self.key)
            self._content = raw.decode()
            noted = parse_notes(form) if form else {}
            self._noted = noted if noted.get("crc") == zlib.crc32(raw) else {}
        assert self._content is not None
        return self._content

    def attribute(self, name: str) -> Any:
        if self._noted is None:
            self.content()
        assert self._noted is not None
        return read_note(self._noted, name, VALUES[0] if name == KIND else None)

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        # The attributes of a value are written with it.
        assert self._noted is not None and not self.place
        self._noted[name] = value

    def fields(self) -> dict[str, Any]:
        assert self._content is not None and self._noted is not None
        if self._noted.pop(TEXT, None):
            self._content = json.dumps(self._content, ensure_ascii=False)
        noted = {name: value for name, value in self._noted.items() if value is not None}
        form = json.dumps({**noted, "crc": zlib.crc32(self._content.encode())})
        return {"is_non_tensor": "1", "encoding": "json", "_form": form}

    def data(self) -> bytes:
        assert self._content is not None
        return self._content.encode()


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
        self._content: Values | None = None

    def attribute(self, name: str) -> None:
        return None

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        raise SaveError(f"{entry_of(self.key)}nothing is noted of an array on a server")

    def pieces(self, selection: Selection) -> tuple[tuple[int, ...], int, bytes]:
        """Return the shape of a selection, the length of its pieces in bytes, and their offsets."""
        return pieces(self.shape, self.dtype.itemsize, selection)

    def requests(self, selection: Selection) -> tuple[tuple[int, ...], list[Request]]:
        """Return the shape of a selection, and the requests for it."""
        shape, run, offsets = self.pieces(selection)
        return shape, list(portions(Request(self.place, self.meta.shape_text, self.meta.dtype_text, run, offsets)))

    def read(self, selection: Selection, dtype: Any) -> Values:
        if not self.place:
            return np.array(self.content[selection])
        shape, requests = self.requests(selection)
        raw = bytearray().join(
            itertools.chain.from_iterable(self.store.fetch(request, self.key) for request in requests)
        )
        if len(raw) != sum(request.nbytes for request in requests):
            raise SaveError(
                f"entry {joined(self.key)!r} of the {self.store.kind} {self.store.name!r} has fewer bytes than its "
                f"shape {list(self.shape)} and dtype {self.dtype} say"
            )
        elements = np.frombuffer(raw, np.uint8)
        # Servers are untrusted, and a boolean tensor may only hold the bytes 0 and 1.
        found: Values = elements != 0 if self.dtype is torch.bool else elements.view(dtype)
        return found.reshape(shape)

    def write(self, selection: Selection, values: Any) -> None:
        self.store.check_writable()
        if not values.size:
            return
        shape, run, offsets = self.pieces(selection)
        if values.shape != shape:
            values = np.broadcast_to(values, shape)
        values = np.ascontiguousarray(values).reshape(shape)
        if self.place:
            self.store.write_pieces(self, run, offsets, bytes_of(values))
        elif run == self.meta.nbytes:
            self._content = values.view()
            # The array may share the memory of a tensor, so later writes must copy it.
            self._content.flags.writeable = False
        else:
            if not self.content.flags.writeable:
                self._content = self.content.copy()
            self.content[selection] = values

    def fields(self) -> dict[str, Any]:
        return {"shape": self.meta.shape_text.decode(), "dtype": self.meta.dtype_text.decode()}

    def data(self) -> memoryview | None:
        return None if self._content is None else bytes_of(self._content)

    @property
    def content(self) -> Values:
        """The elements of an array without a name; zeros if nothing was written."""
        if self._content is None:
            self._content = as_array(torch.zeros(self.shape, dtype=self.dtype), self.dtype)
        return self._content


class WireGroup(Group):
    """A container: at a path on the server, empty for the root; or, without a name yet, its items in memory."""

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
        return "/".join(ENCODED + quote(name, safe="") for name in self.store.key_of(self.place))

    def _below(self, name: str) -> str:
        return f"{self.place}.{encode_part(name)}" if self.place else encode_part(name)

    def attribute(self, name: str) -> Any:
        return read_note(self._attributes(), name)

    def _attributes(self) -> Mapping[str, Any]:
        return self._noted if self._place is None else self.store.attributes_at(self.place)

    def set_attribute(self, name: str, value: str | int | Sequence[int] | None) -> None:
        if self._place is None:
            self._noted[name] = value
        elif (notes := self._attributes()).get(name) != value:
            self._note({**notes, name: value})

    def _note(self, notes: dict[str, Any]) -> None:
        self.store.note(self.place, notes)

    def names(self) -> list[str]:
        with self.store.errors(self.key):
            return decode_names(self._parts())

    def _parts(self) -> list[str]:
        return self.store.children(self.place)

    def has(self, name: str) -> bool:
        self.store._refresh_names()
        return super().has(name)

    def find(self, name: str, known: Item | None = None) -> Item:
        store, key = self.store, (*self.key, name)
        store.check()
        place = self._below(name)
        meta = store.find_leaf(place)
        if meta is None:
            return known if isinstance(known, WireGroup) and known._place == place else self._group_at(place, key)
        if isinstance(known, WireArray) and known.meta is meta and known.place == place:
            return known
        if isinstance(known, WireText) and meta.is_value and known.place == place:
            return known
        with store.errors(key):
            return self._leaf_at(place, key, meta)

    def _group_at(self, place: str, key: Path) -> WireGroup:
        return WireGroup(self.store, key, place, next(addresses))

    def _leaf_at(self, place: str, key: Path, meta: Meta) -> Item:
        if not meta.is_value:
            return WireArray(self.store, key, place, meta.parse())
        encoding = meta.fields.get(b"encoding", b"json")
        if encoding == b"json":
            return WireText(self.store, key, place)
        return UnreadableItem(self.store, key, -1, f"a value in the encoding {encoding!r:.40}, which is not read")

    def check_name(self, name: str) -> None:
        encode_part(name)

    def new_group(self, key: Path) -> WireGroup:
        return WireGroup(self.store, key, None, -1)

    def new_array(self, key: Path, shape: Sequence[int], dtype: torch.dtype, options: Mapping[str, Any]) -> ArrayItem:
        return WireArray(self.store, key, "", Meta.of_texts({"shape": json.dumps(list(shape)), "dtype": dtype}).parse())

    def new_text(self, key: Path, content: str) -> Text:
        content.encode()
        return WireText(self.store, key, "", content)

    def attach(self, name: str, item: Item) -> None:
        if self._place is None:
            self._made[name] = item
            return
        self.store.check_writable()
        with self.store.together() as scope:
            self._assign(scope, self._below(name), item)

    def delete(self, name: str) -> None:
        self.store.check_writable()
        with self.store.together() as scope:
            self._assign(scope, self._below(name), None)

    def _assign(self, scope: Scope, place: str, item: Item | None) -> None:
        """Replace the item at a path; `None` deletes it."""
        order = self.store.order(place)
        if self.store.below(place) or place in self.store._notes:
            self.store.drop(place)
        if item is not None:
            self._add(scope, place, item, order)

    def _add(self, scope: Scope, place: str, item: Item, order: int | None = None) -> None:
        if isinstance(item, WireGroup):
            item._place = place
            self.store.note(place, {**item._noted, "_order": order})
            scope.adds = True
            for name, inner in item._made.items():
                item._add(scope, item._below(name), inner)
            item._made = {}
        else:
            assert isinstance(item, (WireArray, WireText))
            self.store.add(place, item.fields(), item.data(), order)
