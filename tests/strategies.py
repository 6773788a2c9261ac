"""Hypothesis strategies that draw structures: keys, shapes, dtypes, nesting and indices."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

Plain = dict[str, Any]

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
)  # fmt: skip


def names(max_size: int = 3) -> st.SearchStrategy[str]:
    """Keys as people and machines write them: dots, slashes, spaces, other scripts, and names of methods."""
    return st.one_of(
        st.text("ab._/ é", min_size=1, max_size=max_size),
        st.sampled_from(["keys", "batch_size", "0", "a.b", "_", "self", "日本"]),
    )


def simple_names() -> st.SearchStrategy[str]:
    """Names without a separator, few enough to meet again."""
    return st.sampled_from(["a", "b", "c", "d", "e"])


def batch_sizes(min_dims: int = 0, max_dims: int = 3, min_side: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(min_side, 4), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def leaves(draw: st.DrawFn, batch_size: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose shape begins with the batch size; elements differ where the dtype allows it."""
    rest = draw(st.lists(st.integers(0, 3), max_size=2))
    dtype = draw(st.sampled_from(DTYPES))
    start = draw(st.integers(0, 50))
    shape = (*batch_size, *rest)
    count = math.prod(shape)
    numbers = (torch.arange(count) + start) % 100
    return (numbers % 2 == 0 if dtype is torch.bool else numbers.to(dtype)).reshape(shape)


def trees(
    batch_size: tuple[int, ...], keys: st.SearchStrategy[str] | None = None, min_size: int = 0
) -> st.SearchStrategy[Plain]:
    """Nested dicts of tensors that share the batch size."""
    keys = names() if keys is None else keys

    def extend(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.dictionaries(keys, inner, max_size=3)

    values = st.recursive(leaves(batch_size), extend, max_leaves=6)
    return st.dictionaries(keys, values, min_size=min_size, max_size=4)


@st.composite
def structures(
    draw: st.DrawFn, min_dims: int = 0, min_side: int = 0, keys: st.SearchStrategy[str] | None = None, min_size: int = 0
) -> tuple[Plain, tuple[int, ...]]:
    """A nested dict of tensors and the batch size that they share."""
    batch_size = draw(batch_sizes(min_dims=min_dims, min_side=min_side))
    return draw(trees(batch_size, keys, min_size)), batch_size


@st.composite
def indices(draw: st.DrawFn, batch_size: tuple[int, ...]) -> Any:
    """An index that torch takes for a tensor of this batch size."""
    parts: list[Any] = []
    for size in batch_size[: draw(st.integers(0, len(batch_size)))]:
        if draw(st.booleans()) and draw(st.booleans()):
            parts.append(None)
        parts.append(draw(_for_dim(size)))
    if draw(st.booleans()):
        parts.append(...)
    if len(parts) == 1 and draw(st.booleans()):
        return parts[0]
    return tuple(parts)


def _for_dim(size: int) -> st.SearchStrategy[Any]:
    slices = st.slices(size).map(lambda s: s if (s.step or 1) > 0 else slice(None))
    masks = st.lists(st.booleans(), min_size=size, max_size=size).map(lambda bits: torch.tensor(bits, dtype=torch.bool))
    if size == 0:
        return st.one_of(slices, masks)
    positions = st.integers(-size, size - 1)
    gathers = st.lists(positions, min_size=2, max_size=2)
    # Lists of one length, so that two of them in a tuple broadcast as torch wants.
    return st.one_of(positions, slices, gathers, gathers.map(torch.tensor))


def shuffled_dims(batch_size: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.permutations(range(len(batch_size))).map(tuple)
