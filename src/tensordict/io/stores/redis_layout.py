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

from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io import checks
from tensordict.io.stores.redis_protocol import Word
from tensordict.io.stores.redis_wire import LIMIT, Check, Request
from tensordict.memory.stored_tensors import Selection, Values, stored_dtype

# The prefix of parts of paths that the layout does not support; the rest of such a part is percent-encoded.
_ENCODED = "_%"
# Pieces of an array that one request asks for at most, so that the server answers others in between.
_PIECES = 1 << 14
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


@functools.lru_cache(1 << 12)
def encode_part(name: str) -> str:
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
    """The metadata of a leaf on the server: the texts, and their meaning.

    Of a leaf of a lazy stack whose elements differ in shape, `shapes` has all of them, with `None` for those that lack
    it, `starts` where in bytes each element begins, and the end; `shape_text` is the digest of the text that says so.
    """

    __slots__ = ("dtype", "dtype_text", "fields", "is_value", "order", "shape", "shape_text", "shapes", "starts")

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self.fields = fields
        self.shape_text = fields.get(b"shape", b"")
        self.shapes: list[tuple[int, ...] | None] | None = None
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
        return cls({b"shape": json.dumps(list(shape)).encode(), b"dtype": str(dtype).encode()}).parse_meta()

    def parse_meta(self) -> Meta:
        """Itself, with its shape and dtype; a `ValueError` when the texts are none."""
        if self.shape is None:
            dtype = _DTYPES.get(self.dtype_text.decode())
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
        self.shapes = [None if shape is None else checks.shape(shape) for shape in shapes]
        sizes = [0 if shape is None else math.prod(shape) * dtype.itemsize for shape in self.shapes]
        self.starts = [0, *itertools.accumulate(sizes)]

    def shape_at(self, at: int) -> tuple[int, ...] | None:
        """The shape of an element of a lazy stack; `None` where it lacks this leaf."""
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


class Ahead:
    """A planned read of a leaf: its selection as a request, the shape of the result, and later the answer."""

    __slots__ = ("answer", "meta", "request", "selection", "shape")

    def __init__(self, meta: Meta, selection: Selection, request: Request, shape: tuple[int, ...]) -> None:
        self.meta = meta
        self.selection = selection
        self.request = request
        self.shape = shape
        self.answer: Any = None

    def is_of(self, meta: Meta, selection: Selection) -> bool:
        """Return whether it reads exactly this selection."""
        return (
            self.meta is meta
            and len(selection) == len(self.selection)
            and all(map(_are_one, selection, self.selection))
        )


def _are_one(pick: Any, other: Any) -> bool:
    """Return whether two selections are equal."""
    if type(pick) is not type(other):
        return False
    return np.array_equal(pick, other) if isinstance(pick, np.ndarray) else bool(pick == other)


class Scope:
    """The state of one call: names that it has read, content that it has read ahead, and pending writes.

    is_listed: whether the names were read.
    wanted: what will be read of leaves, by their paths; `ready` what was read of them.
    checks, commands: what `Wire.write` takes; `checked` are the paths and keys, `size` says how many bytes they are,
        `written` where in the leaves they write, from one byte up to another.
    adds: whether leaves are added or deleted.
    touched: the written paths, each once, in order; errors name them.
    uploads: the names that something was uploaded under ahead, and how many bytes.
    undos: the functions that `Store.undo_on_failure` was given.
    pieces: of lazy stacks, what was read ahead of a leaf: the bytes that the pieces begin at, in order, and the pieces.
    values: of lazy stacks, the values at a path that were read, and what is noted of each.
    given: of lazy stacks, what elements were given at a path, by their numbers; it is written as one at the end.
    sizes: the same, of batch sizes.
    moved: of lazy stacks, the leaves that a second write of the same would find changed, and what tells whose it was.
    """

    def __init__(self) -> None:
        self.is_listed = False
        self.wanted: dict[str, Ahead] = {}
        self.ready: dict[str, Ahead] = {}
        self.pieces: dict[str, tuple[list[int], list[memoryview]]] = {}
        self.values: dict[str, tuple[list[Any], list[dict[str, Any]]]] = {}
        self.given: dict[str, dict[int, Any]] = {}
        self.sizes: dict[str, dict[int, list[int]]] = {}
        self.moved: dict[str, str] = {}
        self.uploads: dict[str, int] = {}
        self.undos: list[Callable[[], None]] = []
        self.begin()

    def begin(self) -> None:
        self.checks: dict[str, Check] = {}
        self.checked: list[tuple[str, Path]] = []
        self.commands: list[Sequence[Word]] = []
        self.written: dict[str, list[tuple[int, int]]] = {}
        self.touched: dict[str, None] = {}
        self.size = 0
        self.adds = False

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
        """Know that what the request asks for will be written; pieces come in order, mostly."""
        start, stop = _span(request)
        spans = self.written.setdefault(request.path, [])
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, stop))

    def writes(self, request: Request) -> bool:
        """Return whether pending writes may change the content of a request."""
        if self.adds or not request.run:
            path = request.path
            while path and path not in self.touched:
                path = path.rpartition(".")[0]
            return bool(path)
        start, stop = _span(request)
        return any(start < end and begin < stop for begin, end in self.written.get(request.path, ()))

    def portion(self, path: str | None = None) -> list[Ahead]:
        """Choose the next reads: this one and others that are planned, up to the size of one answer."""
        found = [] if path is None else [self.wanted.pop(path)]
        size = found[0].request.nbytes if found else 0
        for ahead in list(self.wanted.values()):
            size += ahead.request.nbytes
            if size > LIMIT and found:
                break
            found.append(self.wanted.pop(ahead.request.path))
        return found


def _span(request: Request) -> tuple[int, int]:
    """Return the first byte of the request, and the byte after its last one."""
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
    """Return the shape of a selection of an array in C order, the length of its pieces in bytes, and their offsets.

    Example: of the rows 2 and 4 of 3 floats each, `((2, 3), 12, ...)` with the integers 24 and 48 as 64 bits each.
    """
    whole = [slice(0, size, 1) for size in shape[1:]]
    if (
        len(selection) == len(shape)
        and all(type(pick) is slice for pick in selection[1:])
        and [*selection[1:]] == whole
    ):
        # A whole leaf needs no offsets.
        selection = selection[:1]
    if len(selection) == 1 and shape:
        # Rows, which most are: a tenth of the time.
        pick, row = selection[0], math.prod(shape[1:]) * itemsize
        if type(pick) is int:
            return tuple(shape[1:]), row, (pick * row).to_bytes(8, "little")
        if type(pick) is slice:
            start, stop, step = pick.indices(shape[0])
            if step == 1 and stop > start:
                return (stop - start, *shape[1:]), (stop - start) * row, (start * row).to_bytes(8, "little")
        if isinstance(pick, np.ndarray):
            return (len(pick), *shape[1:]), row, (pick * row).astype("<u8", copy=False).tobytes()
    picks = full(selection, len(shape))
    taken = [range(*pick.indices(size)) if isinstance(pick, slice) else pick for pick, size in zip(picks, shape)]
    picked = tuple(len(pick) for pick in taken if not isinstance(pick, (int, np.integer)))
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    last = (
        max((dim for dim, pick in enumerate(taken) if pick != range(shape[dim])), default=-1)
        if all(not isinstance(pick, np.ndarray) for pick in taken)
        else max(dim for dim, pick in enumerate(taken) if isinstance(pick, np.ndarray) or pick != range(shape[dim]))
    )
    if last < 0:
        return picked, math.prod(shape) * itemsize, bytes(8)
    offsets = np.zeros(1, dtype=np.int64)
    run, outer = strides[last], taken[: last + 1]
    if isinstance(taken[last], range) and taken[last].step == 1:
        offsets += taken[last].start * run
        run, outer = run * len(taken[last]), taken[:last]
    for pick, stride in zip(outer, strides):
        at = np.atleast_1d(np.asarray(pick, dtype=np.int64)) * stride
        offsets = np.add.outer(offsets, at).reshape(-1)
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


def request_of(path: str, meta: Meta, selection: Selection) -> tuple[Request, tuple[int, ...]]:
    """The request for a part of an array, and the shape of that part."""
    assert meta.shape is not None and meta.dtype is not None
    shape, run, offsets = pieces(meta.shape, meta.dtype.itemsize, selection)
    return request_for(path, meta, run, offsets), shape


def request_for(path: str, meta: Meta, run: int, offsets: bytes) -> Request:
    """The request for pieces of an array, all of `run` bytes."""
    return Request(path, meta.shape_text, meta.dtype_text, run if offsets else 0, offsets)


def noted_in(notes: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the note under a name, a text or integers; raises a `ValueError` for anything else."""
    value = notes.get(name, default)
    if type(value) is int:
        return [value]
    if value is None or type(value) is str or (type(value) is list and all(type(item) is int for item in value)):
        return value
    raise ValueError(f"what is noted as {name!r} is no text and no row of integers")


def is_one(request: Request) -> bool:
    """Return whether one request may have this many bytes and pieces."""
    return request.nbytes <= 2 * LIMIT and len(request.offsets) <= 8 * _PIECES


def portions(request: Request) -> Iterator[Request]:
    """Split a request into requests that `is_one` accepts."""
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
