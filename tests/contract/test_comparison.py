"""Comparison with containers, tensors and scalars, and what sums it up."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_matches, changed, index_map, leaves, mapped
from tensordict import TensorDict, assert_close
from tensordict.utils import assert_allclose_td

OPERATORS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_with_scalars_containers_and_tensors(td: Any, plain: Plain, kind: Kind, op: Any) -> None:
    assert_matches(op(td, 3), mapped(lambda leaf: op(leaf, 3), plain), kind.batch_size, kind.extra)
    assert_matches(op(td, 1.5), mapped(lambda leaf: op(leaf, 1.5), plain), kind.batch_size, kind.extra)
    other = TensorDict(mapped(changed, plain), kind.batch_size)
    assert_matches(op(td, other), mapped(lambda leaf: op(leaf, changed(leaf)), plain), kind.batch_size)
    assert_matches(op(td, torch.tensor(3)), mapped(lambda leaf: op(leaf, 3), plain), kind.batch_size, kind.extra)
    assert op(td, 3).names in (td.names, [None] * len(kind.batch_size))
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_with_a_tensor_of_the_batch_size(td: Any, plain: Plain, kind: Kind) -> None:
    numbers = index_map(kind.batch_size)

    def compared(leaf: torch.Tensor) -> torch.Tensor:
        rest = leaf.ndim - len(kind.batch_size)
        return leaf == numbers.reshape(*kind.batch_size, *[1] * rest)

    if len(kind.batch_size) == 1:
        assert_matches(td == numbers, mapped(compared, plain), kind.batch_size, kind.extra)


def test_equal_to_itself_and_to_a_copy(td: Any) -> None:
    assert (td == td).all()
    assert (td == td.clone()).all() and not (td != td.clone()).any()
    assert (td == td.to_dict(retain_none=False)).all()
    other = td.clone()
    other["a"] = other["a"] + (torch.arange(other["a"].numel()) == 0).view(other["a"].shape)
    assert not (td == other).all() and (td == other).any() and (td != other).any()


def test_other_types_are_unequal(td: Any) -> None:
    assert (td == "text") is False
    assert (td == None) is False  # noqa: E711
    assert (td != "text") is True


def test_keys_that_differ_are_named(td: Any, kind: Kind) -> None:
    for op in OPERATORS:
        with pytest.raises(KeyError, match="mask"):
            op(td, td.exclude("mask"))
        with pytest.raises(KeyError, match="mask"):
            op(td.exclude("mask"), td)
    if kind.nested:
        with pytest.raises(KeyError, match="c"):
            td == td.exclude(("b", "c"))  # noqa: B015


def test_all_and_any(td: Any, plain: Plain, kind: Kind) -> None:
    assert td.any() is True
    assert td.all() is False
    assert (td == td).all() is True
    assert (td != td).any() is False
    assert TensorDict().all() and not TensorDict().any()
    for dim in range(-len(kind.batch_size), len(kind.batch_size)):
        position = dim % len(kind.batch_size)
        shape = tuple(n for i, n in enumerate(kind.batch_size) if i != position)
        assert_matches(td.all(dim), mapped(lambda leaf, at=position: leaf.all(at), plain), shape, kind.extra)
        assert_matches(td.any(dim), mapped(lambda leaf, at=position: leaf.any(at), plain), shape, kind.extra)
    with pytest.raises((RuntimeError, IndexError)):
        td.all(len(kind.batch_size))


def test_logical_operators(td: Any, plain: Plain, kind: Kind) -> None:
    small, odd = td < 3, td != 1
    expected = mapped(lambda leaf: (leaf < 3) & (leaf != 1), plain)
    assert_matches(small & odd, expected, kind.batch_size, kind.extra)
    assert_matches(~small, mapped(lambda leaf: ~(leaf < 3), plain), kind.batch_size, kind.extra)
    assert_matches(small ^ odd, mapped(lambda leaf: (leaf < 3) ^ (leaf != 1), plain), kind.batch_size, kind.extra)
    assert_matches(small | odd, mapped(lambda leaf: (leaf < 3) | (leaf != 1), plain), kind.batch_size, kind.extra)


@pytest.mark.parametrize("check", [assert_close, assert_allclose_td])
def test_assert_close(td: Any, plain: Plain, check: Any) -> None:
    assert check(td, td.clone())
    near = td.clone()
    for path in leaves(plain):
        if near[path].is_floating_point():
            near.set_(path, near[path] + 1e-9)
    assert check(td, near)
    far = td.clone()
    far.set_("a", far["a"] + 5)
    with pytest.raises(AssertionError, match="a"):
        check(td, far)
    assert check(td, far, rtol=0, atol=10)
    with pytest.raises(KeyError, match="mask"):
        check(td, td.exclude("mask"))
    assert check(td, td.exclude("mask"), intersection=True)


def test_assert_close_and_nan() -> None:
    td = TensorDict({"n": {"x": torch.tensor([float("nan"), 1.0])}})
    assert assert_close(td, td.clone())
    with pytest.raises(AssertionError, match="x"):
        assert_close(td, td.clone(), equal_nan=False)
    with pytest.raises(AssertionError, match="my note"):
        assert_close(td, td.apply(lambda x: x + 1).apply(lambda x: x.nan_to_num(3)), msg="my note")
