"""Comparison and logic operators, `all`, `any`, and `assert_close`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tensordict import TensorDict, assert_allclose_td, assert_close, lazy_stack
from tensordict.core.exceptions import KeyMismatchError

COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


def make(**kwargs: Any) -> TensorDict:
    return TensorDict({"a": torch.arange(12.0).view(3, 4), "b": {"c": torch.arange(3)}}, [3], **kwargs)


@pytest.mark.parametrize("op", COMPARISONS)
def test_with_a_container_a_mapping_and_a_scalar(op: Callable[[Any, Any], Any]) -> None:
    td = make()
    other = TensorDict({"b": {"c": torch.ones(3)}, "a": torch.full((3, 4), 5.0)}, [3])
    for right in (other, other.to_dict()):
        result = op(td, right)
        assert type(result) is TensorDict
        assert result.batch_size == result["b"].batch_size == torch.Size([3])
        assert result.dtype == torch.bool
        assert torch.equal(result["a"], op(td["a"], other["a"]))
        assert torch.equal(result["b", "c"], op(td["b", "c"], other["b", "c"]))
    for scalar in (2, 2.5, True, torch.tensor(2), np.float32(2), np.array(2)):
        result = op(td, scalar)
        assert torch.equal(result["a"], op(td["a"], float(scalar)))
        assert torch.equal(result["b", "c"], op(td["b", "c"], float(scalar)))
    assert torch.equal(op(2, td)["a"], op(2, td["a"]))


@pytest.mark.parametrize("op", COMPARISONS)
def test_a_tensor_meets_the_batch_dims_first(op: Callable[[Any, Any], Any]) -> None:
    td = TensorDict({"a": torch.arange(12.0).view(3, 2, 2), "b": {"c": torch.arange(6).view(3, 2)}}, [3, 2])
    for right in (torch.arange(6).view(3, 2), torch.arange(2), torch.arange(3)[:, None], torch.ones(1)):
        spread = right.expand(3, 2)
        result = op(td, right)
        assert torch.equal(result["a"], op(td["a"], spread[..., None]))
        assert torch.equal(result["b", "c"], op(td["b", "c"], spread))
    assert torch.equal(op(td, np.arange(2))["b", "c"], op(td["b", "c"], torch.arange(2)))


def test_a_tensor_on_the_left() -> None:
    td = make()
    assert torch.equal((torch.arange(3) == td)["b", "c"], torch.tensor([True, True, True]))
    assert torch.equal((torch.ones(()) < td)["b", "c"], torch.tensor([False, False, True]))


def test_a_tensor_that_does_not_fit() -> None:
    for wrong in (torch.zeros(4), torch.zeros(3, 4), torch.zeros(3, 1)):
        with pytest.raises(RuntimeError, match=r"does not broadcast to the batch size \[3\]"):
            make() == wrong  # noqa: B015


def test_containers_of_different_batch_sizes() -> None:
    td = make()
    assert (td == TensorDict(td.to_dict())).batch_size == torch.Size([3])
    assert (TensorDict(td.to_dict()) == td).batch_size == torch.Size([])
    one = td[:1]
    result = one < td
    assert result.batch_size == result["b"].batch_size == torch.Size([3])
    assert torch.equal(result["a"], one["a"] < td["a"])
    # Alignment at the right would enlarge a batch dim of size 1 behind its back.
    left = TensorDict({"a": torch.zeros(2, 1)}, [2, 1])
    right = TensorDict({"a": torch.zeros(2, 1, 4)}, [2, 1])
    with pytest.raises(RuntimeError, match="'a'.*does not begin with the batch size"):
        left == right  # noqa: B015


def test_devices_and_names() -> None:
    td = make(device="cpu", names=["x"])
    assert (td == td).device == torch.device("cpu")
    assert (td == make()).device == torch.device("cpu") and (make() == td).device is None
    assert (td == 1).names == ["x"]
    assert not (make().lock_() == 1).is_locked


@pytest.mark.parametrize("op", [*COMPARISONS, operator.and_])
def test_mismatched_keys_are_named(op: Callable[[Any, Any], Any]) -> None:
    td = make().int()
    with pytest.raises(KeyMismatchError, match=r"\['b'\]"):
        op(td, td.exclude("b"))
    with pytest.raises(KeyError, match=r"under 'b'.*\['c', 'd'\]"):
        op(td, td.clone().rename_key_(("b", "c"), ("b", "d")))
    with pytest.raises(RuntimeError, match="entry 'a'"):
        op(td, TensorDict({"a": torch.zeros(7), "b": {"c": torch.zeros(3)}}).int())


def test_other_objects_are_not_equal() -> None:
    td = make()
    for other in ("a", None, object()):
        assert (td == other) is False
        assert (td != other) is True
        with pytest.raises(TypeError):
            td < other  # noqa: B015


def test_no_hash_and_no_truth_value() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(make())
    with pytest.raises(RuntimeError, match=r"td\.all\(\)"):
        bool(make() == make())


def test_logic() -> None:
    td = make()
    low = td < 2
    even = TensorDict({"a": td["a"] % 2 == 0, "b": {"c": td["b", "c"] % 2 == 0}}, [3])
    for key in ("a", ("b", "c")):
        x, y = low[key], even[key]
        assert torch.equal((low & even)[key], x & y)
        assert torch.equal((low | even)[key], x | y)
        assert torch.equal((low ^ even)[key], x ^ y)
        assert torch.equal((~low)[key], ~x)
        assert torch.equal((True ^ low)[key], ~x)
        assert torch.equal((False | low)[key], x)
        assert torch.equal((True & low)[key], x)
    assert torch.equal((TensorDict(a=torch.tensor(6)) & 3)["a"], torch.tensor(2))


def test_all_and_any() -> None:
    td = make()
    assert (td == td).all() is True
    assert td.all() is False
    assert td.any() is True
    assert (td < 0).any() is False
    assert TensorDict().all() is True
    assert TensorDict().any() is False
    one_off = TensorDict({"a": torch.ones(3), "b": {"c": torch.tensor([True, True, False])}}, [3])
    assert one_off.all() is False


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_all_and_any_along_a_batch_dim(dim: int) -> None:
    td = TensorDict(
        {"a": torch.rand(3, 2, 4) < 0.7, "b": TensorDict({"c": torch.rand(3, 2, 5) < 0.3}, [3, 2, 5])},
        [3, 2],
        names=["x", "y"],
    )
    positive = dim % 2
    for name in ("all", "any"):
        result = getattr(td, name)(dim)
        kept = [2, 3][positive]
        assert result.batch_size == torch.Size([kept])
        assert result["b"].batch_size == torch.Size([kept, 5])
        assert result.names == [["y"], ["x"]][positive]
        for key in ("a", ("b", "c")):
            assert torch.equal(result[key], getattr(td[key], name)(dim=positive))


def test_all_of_a_dim_that_is_not_a_batch_dim() -> None:
    with pytest.raises(IndexError, match="from -1 to 0"):
        make().all(dim=1)
    with pytest.raises(IndexError, match="no batch dims"):
        TensorDict(a=torch.ones(3)).any(dim=0)


def test_assert_close_accepts_what_is_close() -> None:
    td = make()
    assert assert_close(td, make()) is True
    assert assert_close(td, TensorDict(td.to_dict(), device="cpu")) is True
    assert assert_close(td, td.clone().apply(lambda x: x + 1e-7 if x.is_floating_point() else x))
    assert assert_close(td, make().exclude("b"), intersection=True)
    nan = TensorDict(a=torch.tensor([float("nan")]))
    assert assert_close(nan, nan)
    assert assert_close(td.memmap(), td)
    assert assert_allclose_td is assert_close


def test_assert_close_names_every_leaf_that_differs() -> None:
    td, other = make(), make()
    other["a"] = other["a"] + 1
    other["b", "c"] = other["b", "c"] * 2
    other["same"] = td["same"] = torch.zeros(3)
    with pytest.raises(AssertionError) as caught:
        assert_close(td, other, msg="the message", prefix=("outer", "inner"))
    text = str(caught.value)
    assert "('outer', 'inner', 'a') does not match" in text
    assert "('outer', 'inner', 'b', 'c') does not match" in text
    assert "same" not in text
    assert text.endswith("the message")
    assert assert_close(td, other, atol=10)
    with pytest.raises(AssertionError, match="'a'"):
        assert_close(td, other, atol=0.5)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3), {"c": torch.zeros(3)}),
        (torch.tensor(True), torch.tensor(False)),
    ],
)
def test_assert_close_compares_shapes_dtypes_and_structure(actual: Any, expected: Any) -> None:
    with pytest.raises(AssertionError, match="key 'a' does not match"):
        assert_close(TensorDict({"a": actual}), TensorDict({"a": expected}))


def test_assert_close_refuses() -> None:
    with pytest.raises(KeyMismatchError, match=r"\['b'\]"):
        assert_close(make(), make().exclude("b"))
    with pytest.raises(TypeError, match=r"torch\.testing"):
        assert_close(torch.zeros(1), torch.zeros(1))
    nan = TensorDict(a=torch.tensor([float("nan")]))
    with pytest.raises(AssertionError):
        assert_close(nan, nan, equal_nan=False)


@pytest.mark.parametrize("stacked", [False, True])
def test_the_left_side_gives_its_device_to_the_result(stacked: bool) -> None:
    left = TensorDict({"a": torch.tensor(True), "n": {"b": torch.tensor(True)}}, device="cpu")
    right = TensorDict({"a": torch.tensor(False), "n": {"b": torch.tensor(True)}})
    if stacked:
        left, right = lazy_stack([left]), lazy_stack([right])
    for result in (left & right, left | right, left ^ right, left == right, left != right):
        assert result.device == result["n"].device == torch.device("cpu")
    assert (right == left).device is None
