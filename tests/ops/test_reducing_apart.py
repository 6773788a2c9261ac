"""Reductions of lazy stacks with leaves of unequal shapes, and of ragged leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tensordict import LazyStackedTensorDict, TensorDict

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

OPS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, *args: x.sum(*args),
    "mean": lambda x, *args: x.mean(*args),
    "std": lambda x, *args: x.std(*args),
    "var": lambda x, *args: x.var(*args),
    "prod": lambda x, *args: x.prod(*args),
    "amin": lambda x, *args: x.amin(*args),
    "amax": lambda x, *args: x.amax(*args),
    "nansum": lambda x, *args: x.nansum(*args),
    "nanmean": lambda x, *args: x.nanmean(*args),
    "quantile": lambda x, *args: x.quantile(0.3, *args),
}


def op_reduced(name: str, td: Any) -> Tensor:
    """The reduction over the features of all leaves."""
    return td.quantile(0.3, "feature", reduce=True) if name == "quantile" else getattr(td, name)("feature", reduce=True)


ops = pytest.mark.parametrize("name", OPS)
dims = pytest.mark.parametrize("dim", [0, 1])


def member(i: int) -> TensorDict:
    torch.manual_seed(i)
    entries = {"a": torch.randn(3, i + 2), "n": {"b": torch.randn(3, 2, 4 - i)}}
    return TensorDict(entries, batch_size=[3], names=["time"])


def stack(dim: int) -> Any:
    result = LazyStackedTensorDict(*map(member, range(3)), stack_dim=dim)
    result.names = ["time", "env"] if dim else ["env", "time"]
    return result


def members_are(result: Any, call: Callable[[Any], Any]) -> None:
    assert isinstance(result, LazyStackedTensorDict) and len(result.tensordicts) == 3
    for i, part in enumerate(result.tensordicts):
        expected = call(member(i))
        assert part.batch_size == expected.batch_size and (part == expected).all()


# --- lazy stacks ----------------------------------------------------------------------------------------------------


@ops
@dims
def test_along_another_dim_than_the_stack(name: str, dim: int) -> None:
    op = OPS[name]
    result = op(stack(dim), "time")
    members_are(result, lambda part: op(part, 0))
    assert result.batch_size == (3,) and result.names == ["env"] and result.stack_dim == 0
    result = op(stack(dim), 1 - dim, True)
    members_are(result, lambda part: op(part, 0, True))
    assert result.names == stack(dim).names and result.stack_dim == dim


@ops
@dims
def test_over_features(name: str, dim: int) -> None:
    op = OPS[name]
    result = op(stack(dim), "feature")
    members_are(result, lambda part: op(part, "feature"))
    assert result.batch_size == (3, 3) and result.names == stack(dim).names
    assert torch.equal(op_reduced(name, stack(dim).select("a")), result["a"])


@ops
def test_over_everything(name: str) -> None:
    op = OPS[name]
    parts = [member(i) for i in range(3)]
    for keepdim in (False, True):
        result = op(stack(1), None, keepdim)
        assert result.batch_size == torch.Size([1, 1] if keepdim else [])
        for key, ndim in (("a", 3), (("n", "b"), 4)):
            row = torch.cat([part[key].flatten() for part in parts])
            torch.testing.assert_close(result[key], op(row).reshape([1] * ndim if keepdim else []))
    torch.testing.assert_close(stack(0).norm()["a"], torch.cat([part["a"].flatten() for part in parts]).norm())


@dims
def test_what_keeps_all_dims(dim: int) -> None:
    members_are(stack(dim).softmax("time"), lambda part: part.softmax(0))
    for name in ("cummin", "cummax"):
        for i in (0, 1):
            members_are(getattr(stack(dim), name)("time")[i], lambda part: getattr(part, name)(0)[i])  # noqa: B023
    for where in ("time", "feature"):
        for i in (0, 1):
            members_are(stack(dim).max(where)[i], lambda part: part.max(where)[i])  # noqa: B023
    members_are(stack(dim).all("time"), lambda part: part.all(0))


def test_quantiles_come_first() -> None:
    q = torch.tensor([0.1, 0.9])
    result = stack(1).quantile(q, dim="time")
    assert result.batch_size == (2, 3) and result.names == [None, "env"] and result.stack_dim == 1
    members_are(result, lambda part: part.quantile(q, dim=0))


def test_nested_stacks_and_members_of_other_sizes() -> None:
    nested = TensorDict({"deep": stack(0), "flat": torch.ones(3, 3)}, [3, 3])
    result = nested.sum(1)
    assert result.batch_size == (3,) and result["flat"].tolist() == [3, 3, 3]
    members_are(result["deep"], lambda part: part.sum(0))
    twice = LazyStackedTensorDict(stack(0), stack(0), stack_dim=2)
    assert twice.sum("time").batch_size == (3, 2)
    torch.testing.assert_close(twice.sum("time")[1, 0]["a"], member(1)["a"].sum(0))
    sizes = LazyStackedTensorDict(*[TensorDict(a=torch.ones(n), batch_size=[n]) for n in (2, 3)], stack_dim=0)
    assert sizes.sum(1)["a"].tolist() == [2, 3]


def test_new_keys() -> None:
    result = stack(0).sum("time", key_transform=lambda key: f"{key}_sum")
    assert set(result.keys(True, True)) == {"a_sum", ("n_sum", "b_sum")}
    assert torch.equal(result[1]["a_sum"], member(1)["a"].sum(0))


@dims
def test_along_the_stack_there_is_no_result(dim: int) -> None:
    for call in (
        lambda td: td.sum("env"),
        lambda td: td.sum(("env", "time")),
        lambda td: td.softmax("env"),
        lambda td: td.max("env"),
        lambda td: td.sum("time", reduce=True),
    ):
        with pytest.raises(RuntimeError, match="entry 'a' has different shapes in the members"):
            call(stack(dim))


def test_errors_name_the_entry() -> None:
    td = stack(0).to(torch.int64)
    td.set(("n", "c"), torch.ones(3, 3))
    td["a"] = torch.ones(3, 3)
    for call in (lambda td: td.mean("time"), lambda td: td.mean(), lambda td: td.mean("feature"), lambda td: td.norm()):
        with pytest.raises(RuntimeError, match=r"entry \('n', 'b'\): "):
            call(td)
    ints = TensorDict({"a": torch.ones(3, dtype=torch.int64)}, [3])
    for dim in (0, "feature", None):
        with pytest.raises(RuntimeError, match="entry 'a': mean"):
            ints.mean(dim, reduce=True)
    mixed = LazyStackedTensorDict(TensorDict(a=torch.ones(2)), TensorDict(a={"b": torch.ones(3)}), stack_dim=0)
    with pytest.raises(RuntimeError, match="entry 'a'"):
        mixed.sum()


def test_gradients_reach_the_members() -> None:
    td = stack(0).requires_grad_()
    td.sum("time").sum(reduce=True).backward()
    for part in td.tensordicts:
        assert all(torch.equal(part[key].grad, torch.ones_like(part[key])) for key in ("a", ("n", "b")))


# --- ragged leaves --------------------------------------------------------------------------------------------------


ROWS: dict[str, list[tuple[int, ...]]] = {
    "strided": [(3, 2), (1, 4)],
    "jagged": [(3,), (2,), (5,)],
    "features": [(3, 2), (2, 2)],
    "behind": [(4, 3), (4, 2)],
    "holes": [(3,), (2,)],
}
kinds = pytest.mark.parametrize("kind", ROWS)


def rows_for(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in ROWS[kind]]


def ragged_leaf(kind: str, rows: list[Tensor]) -> Tensor:
    if kind == "strided":
        return torch.nested.nested_tensor(rows)
    if kind == "behind":
        offsets = torch.tensor([0, *[row.shape[1] for row in rows]]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows, 1), offsets, jagged_dim=2)
    if kind == "holes":
        values = torch.full((10,), torch.nan)
        values[:3], values[5:7] = rows
        return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 5, 10]), torch.tensor([3, 2]))
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def with_ragged(kind: str) -> TensorDict:
    rows = rows_for(kind)
    return TensorDict({"r": ragged_leaf(kind, rows), "d": torch.arange(2.0 * len(rows)).view(-1, 2)}, [len(rows)])


@kinds
@ops
def test_ragged_over_everything(name: str, kind: str) -> None:
    td, op = with_ragged(kind), OPS[name]
    row = torch.cat([row.flatten() for row in rows_for(kind)])
    assert not op(row).isnan()
    result = op(td)
    torch.testing.assert_close(result["r"], op(row))
    torch.testing.assert_close(result["d"], op(td["d"]))
    both = {"sum": td.sum(reduce=True), "amax": td.amax(reduce=True), "mean": td.mean(reduce=True)}
    if name in both:
        torch.testing.assert_close(both[name], op(torch.cat([row, td["d"].flatten()])))
    torch.testing.assert_close(td.norm()["r"], row.norm())


@kinds
@ops
def test_ragged_over_features(name: str, kind: str) -> None:
    td, op = with_ragged(kind), OPS[name]
    expected = torch.stack([op(row.flatten(), 0) for row in rows_for(kind)])
    torch.testing.assert_close(op(td, "feature")["r"], expected)
    torch.testing.assert_close(op(td, "feature")["d"], op(td["d"], -1))


@kinds
def test_ragged_extremes(kind: str) -> None:
    values, indices = with_ragged(kind).max("feature")
    rows = [row.flatten() for row in rows_for(kind)]
    assert torch.equal(values["r"], torch.stack([row.max() for row in rows]))
    assert torch.equal(indices["r"], torch.stack([row.argmax() for row in rows]))
    q = torch.tensor([0.2, 0.8])
    result = with_ragged(kind).quantile(q, "feature")
    assert result.batch_size == (2, len(rows))
    torch.testing.assert_close(result["r"], torch.stack([row.quantile(q) for row in rows], 1))


@kinds
def test_ragged_along_the_rows_is_refused(kind: str) -> None:
    for call in (lambda td: td.sum(0), lambda td: td.std(0), lambda td: td.softmax(0), lambda td: td.max(0)):
        with pytest.raises(RuntimeError, match="entry 'r': "):
            call(with_ragged(kind))


def test_ragged_without_rows() -> None:
    td = TensorDict({"r": torch.nested.nested_tensor([])}, [0])
    assert td.sum()["r"] == 0
    assert td.sum("feature")["r"].shape == (0,) and td.all("feature")["r"].dtype == torch.bool
    assert td.quantile(torch.tensor([0.5, 0.6]), "feature")["r"].shape == (2, 0)


@kinds
def test_ragged_gradients(kind: str) -> None:
    leaf = ragged_leaf(kind, rows_for(kind)).detach().requires_grad_()
    TensorDict({"r": leaf}, [len(ROWS[kind])]).sum("feature")["r"].sum().backward()
    assert leaf.grad is not None and all(bool((row == 1).all()) for row in leaf.grad.unbind())
