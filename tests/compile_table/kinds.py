"""Kinds of container: functions that make one of a given size, with the same values each time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    UnbatchedTensor,
    lazy_stack,
    set_lazy_legacy,
)

try:
    from tensordict import lazy_cat
except ImportError:  # the reference has none
    lazy_cat = None

# The sizes that a row runs with, one after the other, in one compiled function. Torch compiles for the first, then for
# sizes that vary, and has no reason to compile for the third.
SIZES = (4, 6, 8)


class Pair(TensorClass):
    """The content of most kinds, and the names that forms write."""

    a: torch.Tensor
    b: Any = None
    z: Any = None
    y: Any = None


class Typed(TypedTensorDict):
    a: torch.Tensor
    b: TensorDict


def ramp(*shape: int) -> torch.Tensor:
    """Values between 0.1 and 0.9, which all pointwise functions take."""
    return torch.linspace(0.1, 0.9, math.prod(shape)).reshape(shape)


def make_nested(count: int, **options: Any) -> TensorDict:
    return TensorDict(
        {"a": ramp(count, 2, 4), "b": TensorDict({"c": ramp(count, 2)}, [count, 2])}, [count, 2], **options
    )


def make_lazy(count: int) -> LazyStackedTensorDict:
    return lazy_stack([member.clone() for member in make_nested(count).unbind(1)], 1)


def make_outer(count: int) -> LazyStackedTensorDict:
    return lazy_stack([make_nested(count), make_nested(count) + 1], 0)


def make_inside(count: int) -> TensorDict:
    td = make_nested(count)
    td["b"] = lazy_stack([member.clone() for member in td["b"].unbind(1)], 1)
    return td


def make_view(count: int) -> Any:
    source = make_nested(count).transpose(0, 1).clone()
    with set_lazy_legacy(True):
        return source.transpose(0, 1)


def make_concatenated(count: int) -> Any:
    td = make_nested(count)
    return lazy_cat([td[:1].clone(), td[1:].clone()])


def make_tensorclass(count: int) -> Pair:
    td = make_nested(count)
    return Pair(a=td["a"], b=td["b"], batch_size=[count, 2])


def make_lazy_tensorclass(count: int) -> Any:
    return lazy_stack([member.clone() for member in make_tensorclass(count).unbind(1)], 1)


def make_typed(count: int) -> Typed:
    td = make_nested(count)
    return Typed(a=td["a"], b=td["b"], batch_size=[count, 2])


def make_values(count: int) -> TensorDict:
    td = make_nested(count)
    td["text"] = NonTensorData("word", batch_size=td.batch_size)
    td["b", "number"] = NonTensorData(7, batch_size=td.batch_size)
    return td


def make_labels(count: int) -> TensorDict:
    td = make_nested(count)
    labels = [NonTensorData(text, batch_size=[count]) for text in ("first", "second")]
    td["labels"] = lazy_stack(labels, 1)
    return td


def make_unbatched(count: int) -> TensorDict:
    td = make_nested(count)
    td["u"] = UnbatchedTensor(ramp(3))
    return td


def make_flat(count: int) -> TensorDict:
    return TensorDict({"a": ramp(count, 2, 4), "c": ramp(count, 2)}, [count, 2])


def make_ragged(count: int) -> TensorDict:
    return TensorDict({"a": ramp(count, 3), "r": _ragged(count)}, [count])


def _ragged(count: int) -> torch.Tensor:
    lengths = torch.tensor([1, 3] * (count // 2))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(ramp(2 * count, 2), offsets)


def make_uneven(count: int) -> LazyStackedTensorDict:
    return lazy_stack([TensorDict({"a": ramp(count), "u": ramp(count, width)}, [count]) for width in (2, 5)], 1)


def make_ints(count: int) -> TensorDict:
    numbers = torch.arange(count * 2).reshape(count, 2)
    return TensorDict({"a": numbers, "b": TensorDict({"c": numbers * 2 + 1}, [count, 2])}, [count, 2])


def make_masks(count: int) -> TensorDict:
    return make_ints(count) > 5


def make_single(count: int) -> TensorDict:
    """A batch of one dim, whose size varies."""
    return TensorDict({"a": ramp(count, 4), "b": TensorDict({"c": ramp(count)}, [count])}, [count])


def make_scalar(count: int) -> TensorDict:
    """No batch; the sizes of the leaves vary."""
    return TensorDict({"a": ramp(count, 4), "b": TensorDict({"c": ramp(count)}, [])}, [])


def make_unit(count: int) -> TensorDict:
    """A batch with dims of one element."""
    return TensorDict(
        {"a": ramp(1, count, 1, 2), "b": TensorDict({"c": ramp(1, count, 1)}, [1, count, 1])}, [1, count, 1]
    )


KINDS: dict[str, Callable[[int], Any]] = {
    "nested": make_nested,
    "flat": make_flat,
    "single": make_single,
    "scalar": make_scalar,
    "unit": make_unit,
    "ints": make_ints,
    "masks": make_masks,
    "named": lambda count: make_nested(count, names=["time", "env"], device="cpu"),
    "locked": lambda count: make_nested(count).lock_(),
    "lazy": make_lazy,
    "outer": make_outer,
    "inside": make_inside,
    "view": make_view,
    "concatenated": make_concatenated,
    "tensorclass": make_tensorclass,
    "lazy-tensorclass": make_lazy_tensorclass,
    "typed": make_typed,
    "params": lambda count: TensorDictParams(make_nested(count)),
    "buffers": lambda count: TensorDictParams(make_nested(count), no_convert=True),
    "values": make_values,
    "labels": make_labels,
    "unbatched": make_unbatched,
    "ragged": make_ragged,
    "uneven": make_uneven,
}


def another(kind: str, count: int) -> tuple[Any]:
    """A second container of the same kind and size, with other values."""
    return (KINDS[kind](count) * 0.5 + 0.05,)


def a_tensor(kind: str, count: int) -> tuple[torch.Tensor]:
    """A tensor with the batch size of the container."""
    return (ramp(count, 2).flip(0),)


def a_mask(kind: str, count: int) -> tuple[torch.Tensor]:
    """A mask over the batch, whose sum grows with the size."""
    return (ramp(count, 2) > 0.4,)


def a_row_mask(kind: str, count: int) -> tuple[torch.Tensor]:
    """A mask over the first dim."""
    return (torch.arange(count) % 2 == 0,)


def rows_of_numbers(kind: str, count: int) -> tuple[torch.Tensor]:
    """Indices of rows."""
    return (torch.tensor([2, 0, 1]),)
