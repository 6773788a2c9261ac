"""The layout of containers on a Redis server: names, shapes, and the bytes that a selection takes."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch

from tensordict.core.errors import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io import checked
from tensordict.io.stores.redis_wire import LIMIT, Check, Request, Word
from tensordict.memory.stored_tensors import Selection, Values, stored_dtype

# What the parts of paths begin with that the layout cannot hold as they are; the rest is percent-encoded.
_ENCODED = "_%"
# Pieces of an array that one request asks for at most, so that the server answers others in between.
_PIECES = 1 << 14
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


@functools.lru_cache(1 << 12)
def encoded(name: str) -> str:
    """A name as a part of a path."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SaveError(f"entry {name!r}: this name has no UTF-8 form and cannot be held by a server") from error
    if not name or "." in name or name.startswith(_ENCODED) or name.endswith(":idx"):
        return _ENCODED + quote(name, safe="").replace(".", "%2E")
    return name


def decoded(part: str) -> str:
    return unquote(part[len(_ENCODED) :]) if part.startswith(_ENCODED) else part


class Meta:
    """What the server says of a leaf: the texts, and what they mean.

    Of a leaf of a lazy stack whose elements differ in shape, `shapes` has all of them, `starts` where in bytes each
    element begins, and the end; `shape_text` is the digest of the text that says so.
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
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Meta:
        return cls({b"shape": json.dumps(list(shape)).encode(), b"dtype": str(dtype).encode()}).parsed()

    def parsed(self) -> Meta:
        """Itself, with its shape and dtype; a `ValueError` when the texts are none."""
        if self.shape is None:
            dtype = _DTYPES.get(self.dtype_text.decode())
            if dtype is None:
                raise ValueError(f"{self.dtype_text!r:.80} is no dtype")
            stored_dtype(dtype)
            if b"shapes" in self.fields:
                self._parse_shapes(dtype)
            self.shape, self.dtype = checked.shape(parse_json(self.fields.get(b"shape", b""))), dtype
        return self

    def _parse_shapes(self, dtype: torch.dtype) -> None:
        shapes = parse_json(self.fields[b"shapes"])
        if type(shapes) is not list:
            raise ValueError(f"its shapes {shapes!r:.80} are no list of shapes")
        self.shapes = list(map(checked.shape, shapes))
        self.starts = [0, *itertools.accumulate(math.prod(shape) * dtype.itemsize for shape in self.shapes)]

    def shape_at(self, at: int) -> tuple[int, ...]:
        """The shape of an element of a lazy stack."""
        assert self.shape is not None
        return self.shape[1:] if self.shapes is None else self.shapes[at]

    def part(self, at: int) -> tuple[int, int]:
        """The bytes that an element of a lazy stack begins and ends at."""
        assert self.shape is not None and self.dtype is not None
        if self.shapes is not None:
            return self.starts[at], self.starts[at + 1]
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        return at * size, (at + 1) * size

    @property
    def nbytes(self) -> int:
        assert self.shape is not None and self.dtype is not None
        return math.prod(self.shape) * self.dtype.itemsize if self.shapes is None else self.starts[-1]


class Scope:
    """What is done together: names that were read once, what is read ahead, what will be written.

    is_listed: whether the names were read.
    wanted: what will be read; `ready` what was read of it, which is given once.
    checks, commands: what `Wire.write` takes; `checked` are the paths and keys, `size` says how many bytes they are,
        `written` where in the leaves they write, from one byte up to another.
    adds: whether leaves are added or deleted; `once` whether nothing may be sent twice.
    touched: the paths of what is written, each once, in order; errors name them.
    uploads: the names that something was uploaded under ahead, and how many bytes.
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
        self.uploads: dict[str, int] = {}
        self.undos: list[Callable[[], None]] = []
        self.begin()

    def begin(self) -> None:
        self.checks: dict[str, Check] = {}
        self.checked: list[tuple[str, Path]] = []
        self.commands: list[Sequence[Word]] = []
        self.written: dict[str, tuple[int, int]] = {}
        self.touched: dict[str, None] = {}
        self.size = 0
        self.adds = self.once = False

    def command(self, *words: Word) -> None:
        self.commands.append(words)

    def check(self, path: str, key: Path, check: Check) -> None:
        """Have nothing be written unless this is so, which is told once."""
        self.touch(path)
        if check[0] not in self.checks:
            self.checks[check[0]] = check
            self.checked.append((path, key))

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
        found, size = [], 0
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


def raw_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def notes_of(raw: bytes) -> dict[str, Any]:
    try:
        found = parse_json(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- what is selected -------------------------------------------------------------------------------------------------


def pieces(shape: Sequence[int], itemsize: int, selection: Selection) -> tuple[tuple[int, ...], int, bytes]:
    """The shape of what is selected of an array in C order, the length in bytes of its pieces, and their offsets.

    Example: of the rows 2 and 4 of 3 floats each, `((2, 3), 12, ...)` with the integers 24 and 48 as 64 bits each.
    """
    picks = full(selection, len(shape))
    while picks and type(picks[-1]) is slice and picks[-1].indices(size := shape[len(picks) - 1]) == (0, size, 1):
        # The dims at the end that are taken whole belong to each piece.
        picks.pop()
    count = len(picks)
    run = math.prod(shape[count:]) * itemsize
    if count == 1 and type(picks[0]) is int:
        # A row, which most are.
        return tuple(shape[1:]), run, (picks[0] * run).to_bytes(8, "little")
    taken = [
        np.arange(*pick.indices(size)) if type(pick) is slice else np.asarray(pick) for pick, size in zip(picks, shape)
    ]
    picked = (*[len(pick) for pick in taken if pick.ndim], *shape[count:])
    strides = [run * math.prod(shape[at + 1 : count]) for at in range(count)]
    if taken and type(picks[-1]) is slice and picks[-1].step in (None, 1):
        # Rows behind one another are one piece.
        run *= len(taken[-1])
        taken[-1] = taken[-1][:1]
    offsets = np.zeros(1, dtype=np.int64)
    for pick, stride in zip(taken, strides):
        offsets = np.add.outer(offsets, pick * stride).reshape(-1)
    return picked, run, offsets.astype("<u8").tobytes()


def bytes_of(values: Values) -> memoryview:
    """The bytes of an array in C order, without a copy."""
    flat: Any = values.reshape(-1).view(np.uint8)
    return memoryview(flat)


def full(selection: Selection, ndim: int) -> list[Any]:
    """A selection with a pick for each dim."""
    picks = list(selection)
    at = next((at for at, pick in enumerate(picks) if pick is Ellipsis), len(picks))
    missing = ndim - len(picks) + (at < len(picks))
    return [*picks[:at], *[slice(None)] * missing, *picks[at + 1 :]]


def noted_in(notes: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """What is noted under a name, known to be a text or integers; a `ValueError` when it is neither."""
    value = notes.get(name, default)
    if type(value) is int:
        return [value]
    if value is None or type(value) is str or (type(value) is list and all(type(item) is int for item in value)):
        return value
    raise ValueError(f"what is noted as {name!r} is no text and no row of integers")


def is_one(request: Request) -> bool:
    """Whether a request is answered by no more bytes, and takes the server no longer, than one should."""
    return request.nbytes <= 2 * LIMIT and len(request.offsets) <= 8 * _PIECES


def portions(request: Request) -> Iterator[Request]:
    """A request as several, each of which is one that `is_one` takes."""
    run, offsets = request.run, request.offsets
    if run > LIMIT:
        for (offset,) in struct.iter_unpack("<Q", offsets):
            for at in range(0, run, LIMIT):
                yield request._replace(run=min(LIMIT, run - at), offsets=(offset + at).to_bytes(8, "little"))
        return
    step = 8 * min(_PIECES, LIMIT // run)
    if len(offsets) <= step:
        yield request
        return
    for start in range(0, len(offsets), step):
        yield request._replace(offsets=offsets[start : start + step])
