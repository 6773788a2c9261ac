"""Arithmetic and functions of each element, on every kind of container, against the same done to plain tensors."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_matches, changed, index_map, leaves, mapped
from tensordict import TensorDict

ARITHMETIC = [operator.add, operator.mul, operator.truediv, operator.mod, operator.floordiv]


def nonzero(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.abs() + 1


@pytest.fixture
def numbers(writable: Any, plain: Plain) -> Any:
    """The container without its bools, for which torch defines less."""
    del plain["mask"]
    writable.del_("mask")
    return writable


def beside(tensor: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return tensor.reshape([*tensor.shape, *[1] * (leaf.ndim - tensor.ndim)])


def test_functions_of_one_operand(numbers: Any, plain: Plain, kind: Kind) -> None:
    for name in ("abs", "neg", "exp", "sqrt", "sign", "trunc", "sigmoid", "reciprocal", "isfinite", "isnan", "isreal"):
        fn = getattr(torch, name)
        assert_matches(getattr(numbers, name)(), mapped(fn, plain), kind.batch_size, kind.extra)
    assert_matches(-numbers, mapped(torch.neg, plain), kind.batch_size, kind.extra)
    assert_matches(abs(numbers), mapped(torch.abs, plain), kind.batch_size, kind.extra)
    assert_matches(numbers, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("op", ARITHMETIC, ids=lambda op: op.__name__)
def test_with_numbers(numbers: Any, plain: Plain, kind: Kind, op: Any) -> None:
    for number in (3, 1.5):
        assert_matches(op(numbers, number), mapped(lambda leaf, n=number: op(leaf, n), plain), kind.batch_size)
    positive = numbers.abs() + 1
    for number in (3, 1.5):
        expected = mapped(lambda leaf, n=number: op(n, nonzero(leaf)), plain)
        assert_matches(op(number, positive), expected, kind.batch_size, kind.extra)


@pytest.mark.parametrize("op", ARITHMETIC, ids=lambda op: op.__name__)
def test_with_containers(numbers: Any, plain: Plain, kind: Kind, op: Any) -> None:
    expected = mapped(lambda leaf: op(leaf, nonzero(leaf)), plain)
    backwards = dict(reversed(mapped(nonzero, plain).items()))
    for other in (numbers.abs() + 1, TensorDict(backwards, kind.batch_size)):
        assert_matches(op(numbers, other), expected, kind.batch_size, kind.extra)
    left = TensorDict(mapped(nonzero, plain), kind.batch_size)
    assert_matches(op(left, numbers.abs() + 1), mapped(lambda leaf: op(nonzero(leaf), nonzero(leaf)), plain))


def test_with_a_tensor_of_the_batch_size(numbers: Any, plain: Plain, kind: Kind) -> None:
    count = index_map(kind.batch_size) + 1
    for tensor in (count, count[..., :1] if kind.batch_size else count, torch.tensor(2.5)):
        spread = tensor.expand(kind.batch_size)
        expected = mapped(lambda leaf, t=spread: leaf * beside(t, leaf), plain)
        if tensor.ndim == 0 and kind.batch_size:
            expected = mapped(lambda leaf, t=tensor: leaf * t, plain)
        assert_matches(numbers * tensor, expected, kind.batch_size, kind.extra)
        assert_matches(tensor * numbers, expected, kind.batch_size, kind.extra)


def test_three_operands_and_bounds(numbers: Any, plain: Plain, kind: Kind) -> None:
    floats, exact = numbers.double(), mapped(torch.Tensor.double, plain)
    other = floats + 1
    expected = mapped(lambda leaf: torch.lerp(leaf, leaf + 1, 0.25), exact)
    assert_matches(floats.lerp(other, 0.25), expected, kind.batch_size, kind.extra)
    expected = mapped(lambda leaf: torch.addcmul(leaf, leaf + 1, leaf, value=2), exact)
    assert_matches(floats.addcmul(other, floats, value=2), expected, kind.batch_size, kind.extra)
    expected = mapped(lambda leaf: torch.addcdiv(leaf, leaf, leaf + 1), exact)
    assert_matches(floats.addcdiv(floats, other), expected, kind.batch_size, kind.extra)
    assert_matches(numbers.clamp(1, 3), mapped(lambda leaf: leaf.clamp(1, 3), plain), kind.batch_size, kind.extra)
    expected = mapped(lambda leaf: torch.maximum(leaf, -leaf + 2), plain)
    assert_matches(numbers.maximum(2 - numbers), expected, kind.batch_size, kind.extra)


def test_in_place(td: Any, plain: Plain, kind: Kind) -> None:
    mask = plain["mask"]
    was_locked = td.is_locked
    for part in (td.select("a"), td.select("z"), *([td["b"]] if kind.nested else [])):
        part += 2
        part.mul_(part.clone()).clamp_max_(50)
    td.logical_and(td)
    for path, leaf in leaves(plain).items():
        if path != ("mask",):
            leaf.copy_(((leaf + 2) ** 2).clamp(max=50))
    assert_matches(td, plain, kind.batch_size, kind.extra)
    assert td.is_locked is was_locked and torch.equal(td["mask"], mask)


def test_results_carry_the_lock_and_the_names(td: Any, kind: Kind) -> None:
    for result in (td.isnan(), td.logical_and(td), td.mul(1), td.add(td), td * torch.ones(kind.batch_size)):
        assert result.is_locked is td.is_locked
        assert result.names == td.names
        assert result.batch_size == td.batch_size
        assert result.device == td.device


def test_failures_change_nothing_and_name_the_entry(td: Any, plain: Plain, kind: Kind) -> None:
    with pytest.raises(RuntimeError, match="entry 'mask': "):
        td.neg_()
    with pytest.raises(RuntimeError, match=r"entry '(a|mask)': "):
        td.mul_(0.5)
    with pytest.raises(KeyError, match="mask"):
        td.mul_(td.exclude("mask"))
    with pytest.raises(RuntimeError, match="broadcast"):
        td.mul_(torch.ones(7, *kind.batch_size).bool())
    with pytest.raises(TypeError, match="str"):
        td.mul_("text")
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_keys_that_differ(td: Any, plain: Plain, kind: Kind) -> None:
    less = td.exclude("mask")
    for left, right in ((td, less), (less, td)):
        with pytest.raises(KeyError, match="mask"):
            left.mul(right)
        result = left.mul(right, default="intersection")
        assert "mask" not in result.keys()
        filled = left.mul(right, default=1)
        assert torch.equal(filled["mask"], plain["mask"] * torch.ones((), dtype=torch.int64))
        assert torch.equal(filled["z"], plain["z"] ** 2)


def test_gradients_flow(numbers: Any, plain: Plain, kind: Kind) -> None:
    td = numbers.float().apply(lambda leaf: leaf.detach().clone().requires_grad_())
    total = sum(leaf.sum() for leaf in ((td + 1) * td + changed(td)).values(True, True))
    total.backward()
    for path, leaf in leaves(plain).items():
        torch.testing.assert_close(td.grad[path], 2 * leaf.float())
