"""Reductions: gradients, dtypes, large and small leaves, the one call for leaves of one form, errors, `out`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tensordict import TensorDict

NAMES = ["sum", "mean", "std", "var", "prod", "nansum", "nanmean", "amin", "amax", "logsumexp"]


def alike(count: int = 6, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> TensorDict:
    """Leaves of one form, which some reductions stack."""
    size = shape or (5, 3)
    entries = {f"k{i}": torch.randn(size).to(dtype).requires_grad_(grad) for i in range(count)}
    return TensorDict(entries, batch_size=size[:1])


def same(td: TensorDict, result: TensorDict, op: Callable[[Tensor], Tensor]) -> None:
    for key in td.keys(True, True):
        torch.testing.assert_close(result[key], op(td[key]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_many_leaves_of_one_form_give_what_each_gives_alone(name: str, dtype: torch.dtype) -> None:
    td = alike(8, 6, 4, dtype=dtype)
    same(td, getattr(td, name)(0), lambda leaf: getattr(leaf, name)(0))
    same(td, getattr(td, name)(0, True), lambda leaf: getattr(leaf, name)(0, keepdim=True))
    if name != "logsumexp":
        same(td, getattr(td, name)(), lambda leaf: getattr(leaf, name)())
        same(td, getattr(td, name)("feature"), lambda leaf: getattr(leaf, name)(-1))


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 8),
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    batch=st.integers(1, 3),
    name=st.sampled_from(["mean", "nanmean", "sum", "amax"]),
    data=st.data(),
)
def test_any_form_and_any_dims(count: int, shape: list[int], batch: int, name: str, data: st.DataObject) -> None:
    batch = min(batch, len(shape))
    td = TensorDict({f"k{i}": torch.randn(shape) for i in range(count)}, shape[:batch])
    dims = tuple(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
    keepdim = data.draw(st.booleans())
    result = getattr(td, name)(dims, keepdim)
    same(td, result, lambda leaf: getattr(leaf, name)(dims, keepdim))
    expected = torch.zeros(shape[:batch]).sum(dims, keepdim).shape
    assert result.batch_size == expected


@pytest.mark.parametrize("name", [*NAMES, "min", "max", "norm", "softmax", "cummax", "quantile"])
@pytest.mark.parametrize("count", [2, 8])
def test_gradients_are_those_of_each_leaf(name: str, count: int) -> None:
    td = alike(count, dtype=torch.float64, grad=True)
    args: tuple[Any, ...] = {"norm": (), "quantile": (0.4, 0)}.get(name, (0,))
    result = getattr(td, name)(*args)
    result = result.values if name in ("min", "max", "cummax") else result
    result.backward(result.apply(torch.ones_like))
    for key in td.keys():
        leaf = td[key].detach().requires_grad_()
        alone = getattr(leaf, name)(*args)
        alone = alone.values if name in ("min", "max", "cummax") else alone
        alone.backward(torch.ones_like(alone))
        torch.testing.assert_close(td[key].grad, leaf.grad)


@pytest.mark.parametrize("name", ["sum", "mean", "std", "prod", "amax", "nansum"])
@pytest.mark.parametrize("size", [3, 20000])
def test_gradients_of_one_tensor(name: str, size: int) -> None:
    td = TensorDict(a=torch.rand(size, dtype=torch.float64) + 0.5, b={"c": torch.rand(size, 2, dtype=torch.float64)})
    td.requires_grad_()
    row = torch.cat([td["a"], td["b", "c"].flatten()]).detach().requires_grad_()
    result, expected = getattr(td, name)(reduce=True), getattr(row, name)()
    torch.testing.assert_close(result, expected)
    result.backward()
    expected.backward()
    torch.testing.assert_close(torch.cat([td["a"].grad, td["b", "c"].grad.flatten()]), row.grad)


def test_results_can_be_written_to_one_by_one() -> None:
    means = alike().mean(0)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * means["k0"]).sum()
    means["k1"].add_(1)
    loss.backward()
    assert torch.equal(weight.grad, means["k0"])
    means.requires_grad_()
    assert means["k2"].is_leaf


def test_dtypes() -> None:
    td = TensorDict({"i": torch.ones(3, 2, dtype=torch.int32), "b": torch.ones(3, 2, dtype=torch.bool)}, [3])
    assert {leaf.dtype for leaf in td.sum(0).values()} == {torch.int64}
    assert {leaf.dtype for leaf in td.sum(0, dtype=torch.float32).values()} == {torch.float32}
    assert td.mean(dtype=torch.float64)["i"].dtype is torch.float64
    assert td.prod("feature", dtype=torch.float16)["b"].dtype is torch.float16
    assert td.nansum(dtype=torch.float32, reduce=True).dtype is torch.float32
    mixed = TensorDict(i=torch.ones(2, dtype=torch.int64), f=torch.ones(2))
    assert mixed.sum(reduce=True).dtype is mixed.mean(reduce=True).dtype is torch.float32
    assert mixed.sum()["i"].dtype is torch.int64
    with pytest.raises(RuntimeError, match="entry 'i'"):
        mixed.mean()
    large = TensorDict(i=torch.ones(40000, dtype=torch.int64), f=torch.ones(40000))
    torch.testing.assert_close(large.sum(reduce=True), torch.tensor(80000.0))


def test_correction() -> None:
    td = alike()
    same(td, td.std(0, correction=0), lambda leaf: leaf.std(0, correction=0))
    same(td, td.var("feature", correction=2), lambda leaf: leaf.var(-1, correction=2))
    row = torch.cat([leaf.flatten() for leaf in td.values()])
    torch.testing.assert_close(td.var(reduce=True, correction=0), row.var(correction=0))


def test_prod_and_quantile_along_several_dims() -> None:
    td = TensorDict({"a": torch.rand(2, 3, 4, 5)}, [2, 3, 4])
    flat = td["a"].permute(1, 3, 0, 2).flatten(2)
    torch.testing.assert_close(td.prod((0, 2))["a"], flat.prod(-1))
    torch.testing.assert_close(td.quantile(0.3, (0, 2))["a"], flat.quantile(0.3, -1))
    q = torch.tensor([0.1, 0.9])
    several = td.quantile(q, (2, 0), True)
    assert several.batch_size == torch.Size([2, 1, 3, 1])
    torch.testing.assert_close(several["a"][:, 0, :, 0], flat.quantile(q, -1))
    assert td.prod((0, 2), True).batch_size == torch.Size([1, 3, 1])
    stacked = TensorDict({f"k{i}": torch.rand(3, 4) for i in range(6)}, [3])
    same(stacked, stacked.quantile(q, 0), lambda leaf: leaf.quantile(q, 0))
    same(stacked, stacked.quantile(q, "feature"), lambda leaf: leaf.quantile(q, -1))
    same(stacked, stacked.quantile(q), lambda leaf: leaf.quantile(q))
    kept = td.quantile(q, keepdim=True)
    assert kept.batch_size == torch.Size([2, 1, 1, 1])
    torch.testing.assert_close(kept["a"], td["a"].quantile(q).reshape(2, 1, 1, 1, 1))


def test_empty_containers() -> None:
    td = TensorDict(batch_size=[3, 4], names=["a", "b"])
    assert td.sum("a").batch_size == torch.Size([4]) and td.sum("a").names == ["b"]
    assert td.mean().is_empty() and td.softmax(0).batch_size == td.batch_size
    assert td.max(0).values.batch_size == torch.Size([4])
    for name in ("sum", "mean", "amax", "std", "nansum"):
        for dim in (None, 0, "feature"):
            with pytest.raises(ValueError, match="empty"):
                getattr(td, name)(dim=dim, reduce=True)
    assert td.norm().is_empty()
    nested = TensorDict(a=torch.ones(4), b={})
    assert nested.norm()["a"] == 2 and nested.norm()["b"].is_empty()


def test_leaves_without_elements() -> None:
    td = TensorDict({"n": {"x": torch.zeros(0, 3)}}, [0])
    assert torch.equal(td.sum(0)["n", "x"], torch.zeros(3))
    with pytest.raises(IndexError, match=r"entry \('n', 'x'\)"):
        td.amax(0)
    with pytest.raises(RuntimeError, match=r"entry \('n', 'x'\)"):
        td.amax()
    with pytest.raises(IndexError, match=r"entry \('n', 'x'\)"):
        td.max(0)


def test_bad_dims() -> None:
    td = alike()
    for call in (td.sum, td.max, td.softmax, td.cummin, td.logsumexp, td.all):
        for dim in (1, -2, "time"):
            with pytest.raises(IndexError):
                call(dim)
    with pytest.raises(TypeError, match="a dim is an int"):
        td.sum(object())
    with pytest.raises(IndexError, match="once"):
        td.sum((0, -1))
    with pytest.raises(TypeError, match="amin"):
        TensorDict({"a": torch.zeros(2, 3)}, [2, 3]).min((0, 1))
    with pytest.raises(TypeError, match="keepdim"):
        td.sum(keepdim=True, reduce=True)
    with pytest.raises(IndexError, match="no batch dims"):
        TensorDict(a=torch.zeros(2)).sum(0)
    with pytest.raises(ValueError, match="batch dims"):
        TensorDict(a=torch.zeros(2)).logsumexp()


def test_out() -> None:
    td = alike()
    out = td[0].clone().zero_().lock_()
    assert td.logsumexp(0, out=out) is out
    same(td, out, lambda leaf: leaf.logsumexp(0))
    wrong = TensorDict({key: torch.zeros(4, 3) for key in td.keys()}, [4])
    with pytest.raises(RuntimeError, match=r"\[\].*\[4\]"):
        td.logsumexp(0, out=wrong)
    with pytest.raises(KeyError):
        td.logsumexp(0, out=out.exclude("k0"))
    with pytest.raises(TypeError, match="Tensor"):
        td.norm(out=torch.zeros(1))
    norms = td.lock_().norm()
    assert norms.is_locked and td.norm(out=norms) is norms


def test_extremes_of_ties_and_across_leaves() -> None:
    td = TensorDict({"a": torch.tensor([1, 5]), "b": torch.tensor([5, 2])}, [2])
    values, indices = td.max(0, reduce=True)
    assert values == 5 and indices in (1, 2)
    assert td.max(0, reduce=True, return_indices=False) == 5
    assert td.min(reduce=True) == 1 and td.max()["a"] == 5
    together = td.cummax(0, reduce=True)
    assert together.values.tolist() == [1, 5, 5, 5]
    assert td.cummin(0, reduce=True, return_indices=False).tolist() == [1, 1, 1, 1]


def test_torch_functions() -> None:
    td = alike()
    for name in ("sum", "mean", "std", "var", "prod", "amax", "amin", "nansum", "nanmean", "logsumexp"):
        fn = getattr(torch, name)
        same(td, fn(td, 0), lambda leaf, fn=fn: fn(leaf, 0))
        assert fn(td, dim=0, keepdim=True).batch_size == torch.Size([1])
    same(td, torch.max(td, dim=0).values, lambda leaf: leaf.amax(0))
    same(td, torch.min(td, 0)[0], lambda leaf: leaf.amin(0))
    same(td, torch.softmax(td, 0), lambda leaf: leaf.softmax(0))
    same(td, torch.quantile(td, 0.5, 0), lambda leaf: leaf.quantile(0.5, 0))
    same(td, torch.cummax(td, 0).values, lambda leaf: leaf.cummax(0).values)


def test_vmap() -> None:
    td = TensorDict({f"k{i}": torch.rand(7, 5, 3) for i in range(5)}, [7, 5])
    result = torch.vmap(lambda item: item.mean(0))(td)
    assert result.batch_size == torch.Size([7])
    same(td, result, lambda leaf: leaf.mean(1))
    torch.testing.assert_close(torch.vmap(lambda item: item.norm()["k0"])(td), td["k0"].flatten(1).norm(dim=1))


def test_all_and_any_of_mixed_leaves() -> None:
    td = TensorDict(a=torch.ones(3), b=torch.ones(3, dtype=torch.bool))
    assert td.all() and td.any()
    td["b"][1] = False
    assert not td.all() and td.any()
    small = TensorDict(a=torch.tensor([1e-320], dtype=torch.float64), b=torch.ones(1, dtype=torch.float64))
    assert small.all()
    large = TensorDict(a=torch.zeros(40000), b=torch.zeros(40000))
    assert not large.any()
    large["b"][-1] = 1
    assert large.any() and not large.all()
    assert not TensorDict(a=torch.ones(0)).any() and TensorDict(a=torch.ones(0)).all()


@pytest.mark.parametrize("name", ["amax", "norm", "mean", "sum"])
def test_results_require_grad_where_their_leaf_does(name: str) -> None:
    td = TensorDict(a=torch.ones(2, requires_grad=True), b=torch.ones(2), batch_size=[2])
    result = getattr(td, name)()
    assert result["a"].requires_grad and not result["b"].requires_grad


def test_integers_beside_leaves_that_require_grad_are_reduced() -> None:
    td = TensorDict(a=torch.tensor([1.0, 2.0], requires_grad=True), b=torch.tensor([3, 4], dtype=torch.int32))
    result = td.amax()
    assert result["a"].requires_grad and result["a"] == 2.0
    assert not result["b"].requires_grad and result["b"] == 4 and result["b"].dtype == torch.int32


def test_prod_of_leaves_without_dims_has_the_dtype_of_the_others() -> None:
    td = TensorDict({"a": torch.tensor(3, dtype=torch.int16), "b": torch.tensor([3, 2], dtype=torch.int16)})
    result = td.prod(keepdim=True)
    assert result["a"].dtype == result["b"].dtype == torch.int64 and result["a"] == 3
