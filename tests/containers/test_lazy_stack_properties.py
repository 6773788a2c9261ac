"""Property tests of lazy stacks: whatever index is drawn, a stack does what the dense container of its content does."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import batch_sizes, indices, shuffled_dims
from tensordict import LazyStackedTensorDict, TensorDict, assert_close


def content(batch_size: tuple[int, ...]) -> TensorDict:
    """Entries whose elements all differ, nested ones too."""
    ramp = torch.arange(math.prod(batch_size) * 2.0).reshape(*batch_size, 2)
    return TensorDict({"a": ramp, "n": {"x": ramp[..., 0] + 0.5}}, batch_size)


def stacked(dense: TensorDict, dims: list[int]) -> Any:
    """Lazy stacks along these dims, each of the dims that are left."""
    if not dims:
        return dense
    return LazyStackedTensorDict(*[stacked(part, dims[1:]) for part in dense.unbind(dims[0])], stack_dim=dims[0])


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Any, TensorDict]:
    """A lazy stack, or a dense container that holds one, and the dense container of the same content."""
    batch_size = draw(batch_sizes(min_dims=1, min_side=1))
    dims = [draw(st.integers(0, len(batch_size) - 1))]
    if len(batch_size) > 1 and draw(st.booleans()):
        dims.append(draw(st.integers(0, len(batch_size) - 2)))
    stack = stacked(content(batch_size), dims)
    if draw(st.booleans()):
        return TensorDict({"deep": stack}, batch_size), TensorDict({"deep": content(batch_size)}, batch_size)
    return stack, content(batch_size)


@given(st.data())
def test_reading(data: st.DataObject) -> None:
    stack, dense = data.draw(stacks())
    index = data.draw(indices(tuple(dense.batch_size)))
    expected = dense[index]
    result = stack[index]
    assert result.batch_size == expected.batch_size
    assert_close(result, expected)


@given(st.data())
def test_assigning(data: st.DataObject) -> None:
    stack, dense = data.draw(stacks())
    batch_size = tuple(dense.batch_size)
    index = data.draw(indices(batch_size))
    taken = torch.arange(math.prod(batch_size)).reshape(batch_size)[index].flatten()
    values = dense[index].apply(lambda leaf: -leaf - 100)
    if data.draw(st.booleans()) or len(set(taken.tolist())) != len(taken):
        # An element that is written twice may get either value, so both are the same here.
        values = data.draw(st.sampled_from([7, torch.tensor(7.0)]))
    stack[index] = values
    dense[index] = values
    assert_close(stack, dense)


@given(st.data())
def test_rearranging(data: st.DataObject) -> None:
    stack, dense = data.draw(stacks())
    batch_size = tuple(dense.batch_size)
    dim = data.draw(st.integers(0, len(batch_size) - 1))
    name, *args = data.draw(
        st.sampled_from(
            [
                ("permute", *data.draw(shuffled_dims(batch_size))),
                ("unsqueeze", data.draw(st.integers(-len(batch_size) - 1, len(batch_size)))),
                ("squeeze",),
                ("view", -1),
                ("reshape", (*batch_size[1:], batch_size[0])),
                ("flatten", 0, dim),
                ("unflatten", dim, (1, -1)),
                ("flip", dim),
                ("roll", 1, dim),
                ("repeat_interleave", 2, dim),
                ("expand", (2, *batch_size)),
                ("narrow", dim, 0, 1),
            ]
        )
    )
    expected = getattr(dense, name)(*args)
    result = getattr(stack, name)(*args)
    assert result.batch_size == expected.batch_size
    assert_close(result, expected)
    for piece, part in zip(stack.split(2, dim), dense.split(2, dim), strict=True):
        assert piece.batch_size == part.batch_size
        assert_close(piece, part)
