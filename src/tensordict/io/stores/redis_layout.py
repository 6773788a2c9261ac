"""The layout of containers on a Redis server: names, shapes, and the bytes that a selection takes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import torch

from tensordict.core.errors import SaveError
from tensordict.core.keys import Path
from tensordict.io import checked
from tensordict.io.stores.redis_wire import LIMIT, Request
from tensordict.memory.stored_tensors import Selection, Values, stored_dtype

# What the parts of paths begin with that the layout cannot hold as they are; the rest is percent-encoded.
_ENCODED = "_%"
_DTYPES = {str(found): found for found in vars(torch).values() if isinstance(found, torch.dtype)}


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
    """What the server says of a leaf: the texts, and what they mean."""

    __slots__ = ("dtype", "dtype_text", "fields", "order", "shape", "shape_text")

    def __init__(self, fields: Mapping[bytes, bytes]) -> None:
        self.fields = fields
        self.shape_text = fields.get(b"shape", b"")
        self.dtype_text = fields.get(b"dtype", b"")
        order = fields.get(b"_order", b"")
        self.order = int(order) if order.isdigit() and len(order) < 20 else None
        self.shape: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> Meta:
        return cls({b"shape": json.dumps(list(shape)).encode(), b"dtype": str(dtype).encode()}).parsed()

    @property
    def is_value(self) -> bool:
        return b"is_non_tensor" in self.fields

    def parsed(self) -> Meta:
        """Itself, with its shape and dtype; a `ValueError` when the texts are none."""
        if self.shape is None:
            dtype = _DTYPES.get(self.dtype_text.decode())
            if dtype is None:
                raise ValueError(f"{self.dtype_text!r:.80} is no dtype")
            stored_dtype(dtype)
            self.shape, self.dtype = checked.shape(json.loads(self.shape_text)), dtype
        return self

    @property
    def nbytes(self) -> int:
        assert self.shape is not None and self.dtype is not None
        return math.prod(self.shape) * self.dtype.itemsize


class Scope:
    """What is done together: names that were read once, what will be read, what was read ahead, what will be written.

    checks, words, keys: what `Wire.write` takes; `checked` are the paths, and `size` says how many bytes they are.
    """

    def __init__(self) -> None:
        self.paths: set[str] | None = None
        self.wanted: dict[Request, None] = {}
        self.ready: dict[Request, Any] = {}
        self.begin()

    def begin(self) -> None:
        self.checks: list[Any] = []
        self.words: list[Any] = []
        self.keys: list[str] = []
        self.checked: list[tuple[str, Path]] = []
        self.size = 0
        self.adds = False

    def command(self, *words: Any) -> None:
        """Have the server run a command on the key that is its second word."""
        self.words += (len(words), *words)
        self.keys.append(words[1])

    def portion(self, request: Request) -> list[Request]:
        """What is read with one that is wanted: it and others, as many as one answer should carry."""
        size, found = request.nbytes, [request]
        for other in self.wanted:
            if other != request:
                size += other.nbytes
                if size > LIMIT:
                    break
                found.append(other)
        for other in found:
            del self.wanted[other]
        return found


def raw_of(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def notes_of(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- what is selected -------------------------------------------------------------------------------------------------


def pieces(shape: Sequence[int], itemsize: int, selection: Selection) -> tuple[tuple[int, ...], int, Values]:
    """The shape of what is selected of an array in C order, the length in bytes of its pieces, and their offsets.

    Example: of the rows 2 and 4 of 3 floats each, `((2, 3), 12, [24, 48])`.
    """
    if len(selection) == 1 and shape and type(selection[0]) in (int, slice):
        # Rows, which most are: a third of the time.
        pick, row = selection[0], math.prod(shape[1:]) * itemsize
        if type(pick) is int:
            return tuple(shape[1:]), row, np.array([pick * row])
        start, stop, step = pick.indices(shape[0])
        if step == 1 and stop > start:
            return (stop - start, *shape[1:]), (stop - start) * row, np.array([start * row])
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
    offsets = np.zeros(1, dtype=np.int64)
    if last < 0:
        return picked, math.prod(shape) * itemsize, offsets
    run, outer = strides[last], taken[: last + 1]
    if isinstance(taken[last], range) and taken[last].step == 1:
        offsets += taken[last].start * run
        run, outer = run * len(taken[last]), taken[:last]
    for pick, stride in zip(outer, strides):
        at = np.atleast_1d(np.asarray(pick, dtype=np.int64)) * stride
        offsets = np.add.outer(offsets, at).reshape(-1)
    return picked, run, offsets


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
    raw = offsets.astype("<u8").tobytes() if run and len(offsets) else b""
    return Request(path, meta.shape_text, meta.dtype_text, run if raw else 0, raw), shape


def noted_in(notes: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """What is noted under a name, known to be a text or integers; a `ValueError` when it is neither."""
    value = notes.get(name, default)
    if type(value) is int:
        return [value]
    if value is None or type(value) is str or (type(value) is list and all(type(item) is int for item in value)):
        return value
    raise ValueError(f"what is noted as {name!r} is no text and no row of integers")


def portions(request: Request) -> Iterator[Request]:
    """A request as several, none of which is answered by more bytes than one should carry."""
    if request.nbytes <= 2 * LIMIT:
        yield request
    elif request.run <= LIMIT:
        step = 8 * max(1, LIMIT // request.run)
        for start in range(0, len(request.offsets), step):
            yield request._replace(offsets=request.offsets[start : start + step])
    else:
        for offset in np.frombuffer(request.offsets, "<u8").tolist():
            for at in range(0, request.run, LIMIT):
                raw = (offset + at).to_bytes(8, "little")
                yield request._replace(run=min(LIMIT, request.run - at), offsets=raw)
