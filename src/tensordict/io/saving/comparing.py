"""The comparison of two specifications, structure first and then elements, for `diff` and open-or-create."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core.equality import same_value
from tensordict.core.keys import Path
from tensordict.io.formats.meta import DTYPES
from tensordict.io.formats.stack_columns import split_ragged
from tensordict.io.saving.progress import NO_BAR, Progress
from tensordict.io.specification import DeferredValue, LeafSpec, Specification
from tensordict.memory.stored_tensors import read_stored

# The size of the pieces that are compared, in bytes. A comparison needs a few times as much memory.
_PIECE = 8 << 20
# Torch cannot compare the numbers of these dtypes, so their bytes are compared.
OPAQUE = {dtype for name, dtype in DTYPES.items() if re.fullmatch(r"torch\.(u?int[1-7]|bits.*|float4.*)", name)}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The limit below which elements count as equal: `abs(a - b) <= atol + rtol * abs(b)`."""

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = False

    @property
    def is_exact(self) -> bool:
        """True if only equal elements count as equal."""
        return not (self.rtol or self.atol)


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two saves.

    what: "missing" (in the second), "additional", "kind", "batch size", "names", "stack dim", "dtype", "shape",
        "value" or "elements".
    one, other: the kind, size, value, ... in the first and in the second save.
    differing, count: for "elements", the number of elements that differ, and of all elements.
    max_abs: for "elements", the largest absolute difference; `nan` if only NaN and infinity differ.
    """

    key: Path
    what: str
    one: Any = None
    other: Any = None
    differing: int = 0
    count: int = 0
    max_abs: float = math.nan


def find_differences(
    one: Specification | LeafSpec,
    other: Specification | LeafSpec,
    tolerance: Tolerance | None,
    key: Path = (),
    progress: Progress = NO_BAR,
) -> Iterator[Difference]:
    """Yield the differences between two saves, in the order of the first.

    With `tolerance=None` only the structure is compared: elements and values may differ, and so may names of dims that
    only one of the saves has. `progress` counts the bytes of the first save that were compared.
    """
    if isinstance(one, LeafSpec) and isinstance(other, LeafSpec):
        yield from _leaf_differences(one, other, tolerance, key, progress)
    elif isinstance(one, Specification) and isinstance(other, Specification):
        yield from _node_differences(one, other, tolerance, key, progress)
    else:
        yield Difference(key, "kind", describe_kind(one), describe_kind(other))


def describe_kind(node: Specification | LeafSpec) -> str:
    """Return the class of a node or the kind of a leaf, in one or two words."""
    if isinstance(node, Specification):
        return node.kind
    return "ragged Tensor" if node.ragged else "Tensor"


def _node_differences(
    one: Specification, other: Specification, tolerance: Tolerance | None, key: Path, progress: Progress
) -> Iterator[Difference]:
    values = one.is_value and other.is_value
    for what, mine, theirs in (
        ("kind", one.kind, other.kind),
        ("batch size", list(one.batch_size), list(other.batch_size)),
        ("names", one.names and list(one.names), other.names and list(other.names)),
        ("stack dim", one.stack_dim, other.stack_dim),
    ):
        if mine == theirs:
            continue
        if tolerance is None and ((values and what != "batch size") or (what == "names" and not (mine and theirs))):
            continue
        yield Difference(key, what, mine, theirs)
    if values and tolerance is not None and not same_value(mine := _value(one), theirs := _value(other)):
        yield Difference(key, "value", mine, theirs)
    entries, others = one.fields(), other.fields()
    for name, entry in entries.items():
        if name in others:
            yield from find_differences(entry, others[name], tolerance, (*key, name), progress)
        else:
            yield Difference((*key, name), "missing", describe_kind(entry))
    for name, entry in others.items():
        if name not in entries:
            yield Difference((*key, name), "additional", None, describe_kind(entry))


def _leaf_differences(
    one: LeafSpec, other: LeafSpec, tolerance: Tolerance | None, key: Path, progress: Progress
) -> Iterator[Difference]:
    alike = True
    for what, mine, theirs in (
        ("kind", describe_kind(one), describe_kind(other)),
        ("dtype", str(one.dtype), str(other.dtype)),
        ("shape", list(one.shape), list(other.shape)),
    ):
        if mine != theirs:
            alike = False
            yield Difference(key, what, mine, theirs)
    if not alike:
        return
    if tolerance is None and not one.ragged:
        return
    a, b = open_source(one), open_source(other)
    shape = one.shape
    if one.ragged:
        (a, rows, _), (b, others, _) = split_ragged(a), split_ragged(b)
        if not torch.equal(rows, others):
            yield Difference(key, "shape", rows.tolist(), others.tolist())
            return
        shape = tuple(a.shape)
    if tolerance is None:
        return
    found = _ElementComparison()
    for index in cut_pieces(shape, one.dtype.itemsize):
        piece = read_piece(a, index)
        found.compare(piece, read_piece(b, index), tolerance)
        progress.add(piece.nbytes)
    if found.differing:
        yield Difference(key, "elements", None, None, found.differing, math.prod(shape), found.max_abs)


def open_source(spec: LeafSpec) -> Any:
    """Return the tensor of a leaf, or the column of a lazy stack."""
    source: Any = spec.source
    return source if isinstance(source, Tensor) or not callable(source) else source()


def _value(node: Specification) -> Any:
    if isinstance(node.value, DeferredValue):
        return node.value.read(None)
    # The tensors in a value are compared as entries, so only the rest of the value is returned.
    return node.form if node.entries else node.value


def cut_pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int | slice, ...]]:
    """Yield indices that cut a tensor of this shape into consecutive pieces of at most 8 MiB (or one element)."""
    if math.prod(shape) * itemsize <= _PIECE:
        yield ()
        return
    row = math.prod(shape[1:]) * itemsize
    if row > _PIECE:
        for position in range(shape[0]):
            for index in cut_pieces(shape[1:], itemsize):
                yield (position, *index)
        return
    step = _PIECE // row
    for start in range(0, shape[0], step):
        yield (slice(start, start + step),)


def read_piece(source: Tensor, index: tuple[int | slice, ...]) -> Tensor:
    """Read the part of a tensor at an index into memory."""
    piece: Tensor = read_stored(source[index] if index else source)
    return piece.detach().as_subclass(Tensor)


class _ElementComparison:
    """The running result of comparing two tensors piece by piece."""

    def __init__(self) -> None:
        self.differing = 0
        self.max_abs = math.nan

    def compare(self, one: Tensor, other: Tensor, tolerance: Tolerance) -> None:
        """Compare two pieces of one dtype and one shape."""
        if one.dtype is torch.complex32:
            one, other = one.to(torch.complex64), other.to(torch.complex64)
        elif one.dtype in OPAQUE:
            unsigned = torch.uint16 if one.itemsize == 2 else torch.uint8
            one, other = one.view(unsigned), other.view(unsigned)
        if torch.equal(one, other):
            return
        differ = ~_are_close(one, other, tolerance)
        count = int(differ.sum())
        if count:
            self.differing += count
            gaps = [gap for gap in (self.max_abs, _find_largest_gap(one[differ], other[differ])) if not math.isnan(gap)]
            self.max_abs = max(gaps, default=math.nan)


def _are_close(one: Tensor, other: Tensor, tolerance: Tolerance) -> Tensor:
    equal = one == other
    has_nan = one.is_floating_point() or one.is_complex()
    if tolerance.is_exact:
        return equal | (one.isnan() & other.isnan()) if tolerance.equal_nan and has_nan else equal
    wide = torch.complex128 if one.is_complex() else torch.float64
    return equal | torch.isclose(
        one.to(wide), other.to(wide), rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=tolerance.equal_nan
    )


def _find_largest_gap(one: Tensor, other: Tensor) -> float:
    """Return the largest absolute difference: exact for ints, and `nan` if all differences are NaN."""
    if one.is_floating_point() or one.is_complex():
        wide = torch.complex128 if one.is_complex() else torch.float64
        gaps = (one.to(wide) - other.to(wide)).abs()
        numbers = gaps[~gaps.isnan()]
        return float(numbers.max()) if numbers.numel() else math.nan
    a, b = one.numpy(), other.numpy()
    # Subtract the smaller from the larger modulo 2**64, which is exact for signed and for unsigned ints.
    unsigned_a, unsigned_b = a.astype(np.uint64), b.astype(np.uint64)
    return int(np.where(a > b, unsigned_a - unsigned_b, unsigned_b - unsigned_a).max())
