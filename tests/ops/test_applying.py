"""`apply` on whole containers and values: the function gets each leaf of `is_leaf` unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    is_leaf_nontensor,
    is_tensorclass,
    lazy_stack,
)


class Point(TensorClass):
    x: torch.Tensor
    note: Any = None


def made() -> TensorDict:
    return TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}, "s": "x", "l": ["p", "q", "r"]}, [3])


def seen(td: Any, **kwargs: Any) -> list[str]:
    """The classes of the arguments of a function."""
    found: list[str] = []

    def note(value: Any) -> Any:
        found.append(type(value).__name__)
        return value

    assert td.apply(note, **kwargs).keys() == td.keys()
    return found


def test_what_is_handed_over() -> None:
    td = made()
    assert seen(td) == ["Tensor", "Tensor"]
    assert seen(td, is_leaf=is_leaf_nontensor) == ["Tensor", "Tensor", "NonTensorData", "NonTensorStack"]
    assert seen(td, is_leaf=lambda cls: True) == ["Tensor", "TensorDict", "NonTensorData", "NonTensorStack"]
    assert seen(td, is_leaf=lambda cls: cls is TensorDict) == ["Tensor", "TensorDict"]
    holding = TensorDict(p=Point(torch.zeros(3), "n"), q=torch.zeros(3))
    assert seen(holding, is_leaf=is_tensorclass) == ["Point", "Tensor"]
    assert seen(Point(torch.zeros(2), "n"), is_leaf=is_leaf_nontensor) == ["Tensor", "NonTensorData"]
    lazy = lazy_stack([made()[:, None][0], made()[:, None][1]])
    assert seen(lazy, is_leaf=is_leaf_nontensor).count("NonTensorData") >= 2


def test_values_are_replaced() -> None:
    def louder(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        return NonTensorStack(*[v.upper() for v in value.tolist()]) if isinstance(value, NonTensorStack) else "NEW"

    td = made()
    result = td.apply(louder, is_leaf=is_leaf_nontensor)
    assert result is not None and result["s"] == "NEW" and result["l"] == ["P", "Q", "R"] and td["s"] == "x"
    assert result.get("s").batch_size == (3,)
    held = td.apply(lambda v: v if isinstance(v, torch.Tensor) else NonTensorData("held"), is_leaf=is_leaf_nontensor)
    assert held is not None and held["s"] == "held" and held.get("s").batch_size == (3,)
    dropped = td.apply(lambda v: v if isinstance(v, torch.Tensor) else None, is_leaf=is_leaf_nontensor)
    assert dropped is not None and set(dropped.keys()) == {"a", "b"}


def test_in_place_and_named() -> None:
    td = made()
    td.apply_(lambda v: v + 1 if isinstance(v, torch.Tensor) else NonTensorData("in"), is_leaf=is_leaf_nontensor)
    assert td["a"].tolist() == [1, 1, 1] and td["s"] == "in"
    names: list[Any] = []
    td.named_apply(lambda name, v: names.append(name), nested_keys=True, is_leaf=lambda cls: True, filter_empty=True)
    assert names == ["a", "b", "s", "l"]


def test_whole_containers() -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "b": {"c": torch.ones(3, 4)}}, [3])
    result = td.apply(lambda v, w: v if isinstance(v, torch.Tensor) else v + w, td, is_leaf=lambda cls: True)
    assert result is not None and (result["b", "c"] == 2).all()
    fresh = td.apply(lambda v: v if isinstance(v, torch.Tensor) else TensorDict(d=v["c"]), is_leaf=lambda cls: True)
    assert fresh is not None and fresh["b", "d"] is td["b", "c"] and fresh["b"].batch_size == (3,)
    with pytest.raises(RuntimeError, match=r"'b'.*\[3\]"):
        td.apply(lambda v: v if isinstance(v, torch.Tensor) else v[:2], is_leaf=lambda cls: True)


def test_containers_that_the_function_returns_get_the_device_of_the_result() -> None:
    td = TensorDict({"a": torch.ones(2), "n": TensorDict({"b": torch.ones(2)}, [2])}, [2], device="cpu")
    applied = td.apply(lambda leaf: TensorDict(q=leaf))
    assert applied["a"].device == applied["n", "b"].device == torch.device("cpu")
    assert td.apply(lambda leaf: TensorDict(q=leaf), device=None)["a"].device is None


def test_a_function_may_give_values_for_unbatched_tensors() -> None:
    td = TensorDict({"a": UnbatchedTensor(torch.ones(2))}, [1])
    assert td.named_apply(lambda name, leaf: name)["a"] == "a"
