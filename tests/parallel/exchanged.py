"""Containers of every kind that tests send between processes, and what tells whether they arrived."""

from __future__ import annotations

from typing import Any

import torch

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from tensordict.parallel import wire


@tensorclass
class Rollout:
    obs: torch.Tensor
    note: str
    inner: TensorDict | None = None


class Odd:
    """A value that JSON cannot hold."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


LARGE = wire.SMALL // 4 + 100


def plain(number: float = 1) -> TensorDict:
    """Small and large tensors of several dtypes, nested, contiguous and not."""
    fill = float(number)
    return TensorDict(
        {
            "a": torch.full((3,), fill, dtype=torch.float32),
            "flag": torch.full((3, 1), bool(fill)),
            "b": {
                "c": torch.full((3, 2), int(fill), dtype=torch.int64),
                "half": torch.full((3, 5), fill, dtype=torch.bfloat16),
                "deep": {"z": torch.full((3,), complex(fill, fill)), "nothing": torch.zeros(3, 0)},
            },
            "large": torch.full((3, LARGE), fill),
            "turned": torch.full((LARGE, 3), fill, dtype=torch.float64).T,
            "columns": torch.full((2, 3), int(fill), dtype=torch.int16).T,
        },
        [3],
        names=["time"],
    )


def kinds(number: int = 1) -> dict[str, Any]:
    """One container of each kind."""
    fill = float(number)
    dense = TensorDict({"x": torch.full((2, 4), fill), "note": f"v{number}"}, [2])
    return {
        "plain": plain(fill),
        "empty": TensorDict({}, [2]),
        "lazy": lazy_stack([plain(fill), plain(fill + 1)], 1),
        "unequal": lazy_stack([TensorDict({"x": torch.full((i + 1,), fill)}) for i in range(3)]),
        "values": TensorDict(
            {
                "text": f"v{number}",
                "json": NonTensorData({"k": [number, 2.5, None, ("t",)]}, [2]),
                "each": NonTensorStack(NonTensorData(f"p{number}"), NonTensorData("q")),
                "x": torch.full((2,), fill),
            },
            [2],
        ),
        "class": Rollout(obs=torch.full((2, LARGE), fill), note=f"v{number}", inner=dense, batch_size=[2]),
        "lazy class": lazy_stack(
            [Rollout(obs=torch.full((4,), fill), note=f"v{number}", batch_size=[]) for _ in range(2)]
        ),
        "odd": TensorDict(
            {
                "one": torch.tensor(fill),
                "half": torch.tensor([fill, fill]).bfloat16(),
                "eighth": torch.tensor([[fill], [fill]]).to(torch.float8_e4m3fn),
                "unsigned": torch.full((3,), number, dtype=torch.uint16),
                "conjugated": torch.full((3,), complex(fill, fill)).conj(),
                "nothing": {"at": {"all": {}}},
                "shared": UnbatchedTensor(torch.full((7,), fill)),
            }
        ),
        "no rows": TensorDict({"x": torch.full((0, 2), fill), "n": {"y": torch.full((0,), number)}}, [0]),
        "unbatched": TensorDict({"x": torch.full((3, 2), fill), "u": UnbatchedTensor(torch.full((7,), fill))}, [3]),
        "params": TensorDict.from_module(torch.nn.Linear(3, 3)).data.apply(lambda x: x.fill_(fill)).to_tensordict(),
    }


def ragged(number: float = 1) -> TensorDict:
    fill = float(number)
    rows = [torch.full((length, 2), fill) for length in (1, 4, 2)]
    return TensorDict(
        {
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "strided": torch.nested.nested_tensor([row.double() for row in rows]),
            "dense": torch.full((3,), fill),
        },
        [3],
    )


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.as_subclass(torch.Tensor)
    # Torch does not compare numbers of 8 bits.
    return plain.view(torch.uint8) if plain.dtype is torch.float8_e4m3fn else plain


def same(left: Any, right: Any) -> bool:
    """Return whether two containers have the same class and content."""
    if type(left) is not type(right) or left.batch_size != right.batch_size or left.names != right.names:
        return False
    if isinstance(left, LazyStackedTensorDict):
        pairs = zip(left.unbind(left.stack_dim), right.unbind(right.stack_dim), strict=True)
        return left.stack_dim == right.stack_dim and all(same(mine, theirs) for mine, theirs in pairs)
    if set(left.keys(True, True)) != set(right.keys(True, True)):
        return False
    for key in left.keys(True, True):
        mine, theirs = left.get(key), right.get(key)
        if isinstance(mine, torch.Tensor):
            if mine.is_nested:
                alike = all(torch.equal(a, b) for a, b in zip(mine.unbind(), theirs.unbind(), strict=True))
            else:
                alike = mine.dtype == theirs.dtype and torch.equal(_comparable(mine), _comparable(theirs))
            if not alike:
                return False
        elif left[key] != right[key]:
            return False
    return True


def holds(td: Any, number: float) -> bool:
    """Return whether the content equals `plain(number)`."""
    expected = plain(number)
    return all(torch.equal(td[key], expected[key]) for key in expected.keys(True, True))


# Containers that differ, and the words of the error.
MISFITS = {
    "missing": (lambda td: td.exclude(("b", "c")), r"\('b', 'c'\).*missing"),
    "more": (lambda td: td.set("new", torch.zeros(3)), r"'new'.*missing"),
    "shape": (
        lambda td: td.set(("b", "c"), torch.zeros(3, 4, dtype=torch.int64)),
        r"\('b', 'c'\).*\[3, 4\].*\[3, 2\]|\('b', 'c'\).*\[3, 2\].*\[3, 4\]",
    ),
    "dtype": (
        lambda td: td.set("large", torch.zeros(3, LARGE, dtype=torch.int32)),
        r"'large'.*(int32.*float32|float32.*int32)",
    ),
    "kind": (lambda td: td.set("a", TensorDict({"x": torch.zeros(3)}, [3])), r"'a'.*missing"),
    "value": (lambda td: td.set_non_tensor("a", "text"), r"'a'.*a value"),
}
