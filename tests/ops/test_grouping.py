"""`group_by`: rows of a container by the value of an entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tensordict import NonTensorStack, TensorClass, TensorDict, group_by, lazy_stack


class Rows(TensorClass):
    user: torch.Tensor
    name: Any
    pair: torch.Tensor
    inner: TensorDict


def make_content() -> dict[str, Any]:
    return {
        "user": torch.tensor([2, 0, 2, 1, 0]),
        "name": NonTensorStack(*"babab"),
        "pair": torch.tensor([[1, 0], [0, 1], [1, 0], [2, 2], [0, 1]]),
        "inner": TensorDict({"row": torch.arange(5)}, [5]),
    }


KINDS: dict[str, Callable[[], Any]] = {
    "dense": lambda: TensorDict(make_content(), [5]),
    "locked": lambda: TensorDict(make_content(), [5]).lock_(),
    "tensorclass": lambda: Rows(**make_content(), batch_size=[5]),
    "lazy": lambda: lazy_stack(list(TensorDict(make_content(), [5]))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_equal_values_are_a_group(kind: str) -> None:
    td = KINDS[kind]()
    rows = {
        "user": ([0, 1, 2], [[1, 4], [3], [0, 2]]),
        "name": (["a", "b"], [[1, 3], [0, 2, 4]]),
        "pair": ([[0, 1], [1, 0], [2, 2]], [[1, 4], [0, 2], [3]]),
        ("inner", "row"): ([0, 1, 2, 3, 4], [[0], [1], [2], [3], [4]]),
    }
    for key, (expected, numbers) in rows.items():
        values, groups = group_by(td, key)
        assert (values if isinstance(values, list) else values.tolist()) == expected
        assert [group["inner", "row"].tolist() for group in groups] == numbers
        assert all(isinstance(group, Rows) is (kind == "tensorclass") for group in groups)


def test_more_batch_dims() -> None:
    names = NonTensorStack(NonTensorStack(*"abc"), NonTensorStack(*"abd"), NonTensorStack(*"abc"))
    td = TensorDict({"name": names, "row": torch.arange(9).reshape(3, 3)}, [3, 3])
    values, groups = group_by(td, "name")
    assert values == [("a", "b", "c"), ("a", "b", "d")]
    assert [group.batch_size for group in groups] == [torch.Size([2, 3]), torch.Size([1, 3])]
    assert groups[0]["row"].tolist() == [[0, 1, 2], [6, 7, 8]]


def test_one_value_for_all_rows_and_no_rows() -> None:
    values, groups = group_by(TensorDict({"day": "mon", "x": torch.arange(3)}, [3]), "day")
    assert values == ["mon"] and groups[0]["x"].tolist() == [0, 1, 2]
    values, groups = group_by(TensorDict({"x": torch.zeros(0)}, [0]), "x")
    assert values.shape == (0,) and groups == ()


def test_what_cannot_be_grouped() -> None:
    td = TensorDict({**make_content(), "mixed": NonTensorStack(1, "a", 2, "b", 3)}, [5])
    with pytest.raises(TypeError, match="takes a container, got list"):
        group_by([1, 2], "a")
    with pytest.raises(ValueError, match="no batch dims"):
        group_by(TensorDict(a=1), "a")
    with pytest.raises(KeyError, match="absent"):
        group_by(td, "absent")
    with pytest.raises(TypeError, match="'inner' is a TensorDict"):
        group_by(td, "inner")
    with pytest.raises(TypeError, match="the values of 'mixed' must be hashable and have an order"):
        group_by(td, "mixed")
