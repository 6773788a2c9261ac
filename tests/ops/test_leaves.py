"""The memory behind the leaves, their sizes, and their gradients."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensordict import TensorAttrs, TensorDict
from tensordict.memmap import MemoryMappedTensor


def params() -> TensorDict:
    return TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.full((3,), 2.0)}}, [3]).requires_grad_()


def doubled(td: TensorDict) -> Any:
    return td.apply(lambda leaf: 2 * leaf)


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_counts() -> None:
    shared = torch.ones(3, dtype=torch.float64)
    td = TensorDict({"a": shared, "b": shared, "c": shared[:], "n": {"d": torch.ones(3, 2)}}, [3])
    assert td.param_count() == 15 and td.param_count(count_duplicates=False) == 12
    assert td.bytes() == 9 * 8 + 6 * 4 and td.bytes(count_duplicates=False) == 6 * 8 + 6 * 4
    assert td.numel() == 3 and TensorDict().numel() == 1 and TensorDict(batch_size=[0]).numel() == 1
    assert TensorDict().bytes() == TensorDict().param_count() == 0
    trained = params()
    before = trained.bytes()
    doubled(trained).sum(reduce=True).backward()
    assert trained.bytes() == 2 * before


def test_is_floating_point() -> None:
    assert params().is_floating_point() and TensorDict().is_floating_point()
    assert not TensorDict(a=torch.ones(1), b=torch.ones(1, dtype=torch.int64)).is_floating_point()


def test_data_ptr() -> None:
    td = TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3)}}, [3], device="cpu")
    pointers = td.data_ptr()
    assert pointers.batch_size == torch.Size([]) and pointers["a"].dtype is torch.int64
    assert pointers["n", "b"] == td["n", "b"].data_ptr()
    assert (pointers == td.copy().data_ptr()).all() and not (pointers == td.clone().data_ptr()).any()
    assert td[1:].data_ptr()["a"] != pointers["a"]
    assert (td[1:].data_ptr(storage=True) == td.data_ptr(storage=True)).all()


def test_as_tensor(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"p": nn.Parameter(torch.ones(3))}}, [3], names=["t"])
    plain = td.as_tensor()
    assert plain["a"] is td["a"] and type(plain["n", "p"]) is Tensor
    assert plain["n", "p"].data_ptr() == td["n", "p"].data_ptr()
    assert plain.names == ["t"] and not plain.is_locked
    mapped = td.detach().clone().memmap_(tmp_path)
    assert type(mapped["a"]) is MemoryMappedTensor
    assert type(mapped.as_tensor()["a"]) is Tensor and mapped.as_tensor().is_locked
    assert (mapped.as_tensor() == mapped).all()


# --- gradients --------------------------------------------------------------------------------------------------------


def test_requires_grad() -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"i": torch.arange(3)}}, [3])
    assert not td.requires_grad and not TensorDict().requires_grad
    with pytest.raises(RuntimeError, match=r"\('n', 'i'\)"):
        td.requires_grad_()
    assert not td["a"].requires_grad
    td = params()
    assert td.requires_grad and not td.requires_grad_(False).requires_grad
    mixed = TensorDict(a=torch.ones(1, requires_grad=True), n={"made": torch.ones(1, requires_grad=True) * 2})
    with pytest.raises(RuntimeError, match=r"\('n', 'made'\)"):
        mixed.requires_grad_(False)
    assert mixed["a"].requires_grad


def test_detach_and_data() -> None:
    td = doubled(params()).lock_()
    for cut in (td.detach(), td.data):
        assert not cut.requires_grad and cut.is_locked
        assert cut["a"].data_ptr() == td["a"].data_ptr()
    assert td.requires_grad and not td.detach_().requires_grad


def test_detach_in_place_of_views() -> None:
    td = TensorDict(made=torch.ones(3, requires_grad=True) * 2, part=torch.ones(3)[:2])
    assert td.detach_() is td and not td.requires_grad and td["part"]._is_view()
    td = TensorDict(made=torch.ones(3, requires_grad=True) * 2, n={"part": torch.ones(3, requires_grad=True)[:2]})
    with pytest.raises(RuntimeError, match=r"Can't detach views in-place: entry \('n', 'part'\)"):
        td.detach_()
    assert td["made"].requires_grad and td["n", "part"].requires_grad


def test_grad_and_zero_grad() -> None:
    td = params()
    td.names = ["t"]
    assert td.grad is None and TensorDict().grad is None
    td["n", "b"].sum().backward()
    assert td.grad["n", "b"].tolist() == [1, 1, 1] and "a" not in td.grad.keys()
    assert td.grad.names == ["t"] and td.grad.batch_size == td.batch_size and not td.grad.is_locked
    gradient = td["n", "b"].grad
    assert td.zero_grad(set_to_none=False) is td
    assert td["n", "b"].grad is not None and gradient.tolist() == [0, 0, 0] and td["a"].grad is None
    assert td.zero_grad().grad is None
    td["a"].sum().backward()
    assert td.lock_().grad.is_locked


def test_zero_grad_forgets_the_graph_of_a_gradient() -> None:
    td = TensorDict(a=torch.ones(2, requires_grad=True))
    with pytest.warns(UserWarning, match="create_graph"):
        (td["a"] ** 3).sum().backward(create_graph=True)
    td.zero_grad(set_to_none=False)
    assert not td["a"].grad.requires_grad and td["a"].grad.tolist() == [0, 0]


def test_backward() -> None:
    td = params()
    losses = doubled(td).sum()
    losses["step"] = torch.tensor(3)
    assert losses.backward() is None
    assert td.grad["a"].unique().tolist() == [2] and td.grad["n", "b"].unique().tolist() == [2]
    td.zero_grad()
    out = doubled(td)
    weights = TensorDict({"a": torch.rand(3, 2), "n": {"b": torch.rand(3)}, "more": torch.zeros(3)}, [3])
    out.backward(weights, retain_graph=True)
    assert torch.equal(td.grad["a"], 2 * weights["a"]) and torch.equal(td.grad["n", "b"], 2 * weights["n", "b"])
    td.zero_grad()
    out.backward(weights, inputs=td.select("a"), retain_graph=True)
    assert list(td.grad.keys()) == ["a"]
    out.backward(weights, inputs=[td["n", "b"]], retain_graph=True)
    out.backward(weights, inputs=td["n", "b"], create_graph=False)
    assert torch.equal(td.grad["n", "b"], 4 * weights["n", "b"])


def test_backward_refuses_before_it_computes() -> None:
    td = params()
    out = doubled(td)
    with pytest.raises(RuntimeError, match=r"'a' has shape \[3, 2\]"):
        out.backward()
    with pytest.raises(TypeError, match="Tensor"):
        out.backward(torch.ones(3))
    with pytest.raises(KeyError, match=r"\('n', 'b'\)"):
        out.backward(TensorDict({"a": torch.ones(3, 2)}, [3]))
    with pytest.raises(RuntimeError, match=r"^entry \('n', 'b'\).*\[3, 1\].*\[3\]"):
        out.backward(TensorDict({"a": torch.ones(3, 2), "n": {"b": torch.ones(3, 1)}}, [3]))
    for nothing in (TensorDict(), TensorDict(a=torch.ones(()))):
        with pytest.raises(RuntimeError, match="requires grad"):
            nothing.backward()
    with pytest.raises(RuntimeError):
        out.sum().backward(inputs=TensorDict())
    assert td.grad is None


def test_autograd_grad_between_containers() -> None:
    td = params()
    out = doubled(td)
    weights = out.apply(torch.rand_like)
    found = torch.autograd.grad(out, td, weights)
    assert found.batch_size == td.batch_size and not found.is_locked
    assert torch.equal(found["a"], 2 * weights["a"]) and torch.equal(found["n", "b"], 2 * weights["n", "b"])
    assert torch.autograd.grad(doubled(td).sum(), td.lock_()).is_locked
    assert td.grad is None


def test_autograd_grad_of_tensors_and_containers() -> None:
    td = params()
    loss = (td["a"] ** 2).sum() + td["n", "b"].sum()
    found = torch.autograd.grad(loss, td, create_graph=True)
    assert found["a"].requires_grad and torch.equal(found["a"], 2 * td["a"])
    other = torch.ones(2, requires_grad=True)
    loss = (td["a"] * other).sum() + td["n", "b"].sum()
    of_td, of_other = torch.autograd.grad([loss], (td, other), [torch.tensor(2.0)])
    assert of_other.tolist() == [6, 6] and of_td["n", "b"].tolist() == [2, 2, 2]
    (alone,) = torch.autograd.grad(doubled(td).sum(), td["a"], allow_unused=True)
    assert alone.unique().tolist() == [2]
    several = torch.autograd.grad([doubled(td), td["a"].sum()], td, [td.apply(torch.ones_like), None])
    assert several["a"].unique().tolist() == [3]


def test_autograd_grad_of_unused_entries() -> None:
    td = params()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(td["a"].sum(), td)
    assert list(torch.autograd.grad(td["a"].sum(), td, allow_unused=True).keys(True, True)) == ["a"]
    zeros = torch.autograd.grad(td["a"].sum(), td, allow_unused=True, materialize_grads=True)
    assert zeros["n", "b"].tolist() == [0, 0, 0]
    nothing = torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), td, allow_unused=True)
    assert nothing.is_empty() and nothing.batch_size == td.batch_size


def test_autograd_grad_names_what_it_refuses() -> None:
    td = params()
    with pytest.raises(RuntimeError, match="entry 'i'"):
        torch.autograd.grad(td["a"].sum(), TensorDict(a=td["a"], i=torch.arange(3)))
    out = doubled(td)
    with pytest.raises(RuntimeError, match=r"entry 'a'.*\[3\].*\[3, 2\]"):
        torch.autograd.grad(out, td, TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, [3]))
    with pytest.raises(RuntimeError, match="2 grad_outputs do not fit 1"):
        torch.autograd.grad(out, td, [td, td])


# --- descriptions -----------------------------------------------------------------------------------------------------


def test_attrs_describe_and_to_follows_the_description() -> None:
    td = TensorDict({"a": torch.ones(3, dtype=torch.int8), "n": {"b": torch.ones(3, 2)}}, [3], names=["t"])
    wanted = td.attrs()
    assert wanted.batch_size == torch.Size([]) and wanted.device is None and not wanted.is_locked
    assert isinstance(wanted["n", "b"], TensorAttrs)
    assert wanted["n", "b"].tgt_shape == torch.Size([3, 2]) and wanted["a"].tgt_device == torch.device("cpu")
    assert wanted.clone()["a"].tgt_dtype is torch.int8
    other = TensorDict({"a": torch.rand(3), "n": {"b": torch.rand(3, 2)}, "more": torch.rand(3)}, [3], names=["s"])
    found = other.lock_().to(wanted)
    assert found["a"].dtype is torch.int8 and found["n", "b"] is other["n", "b"] and found["more"] is other["more"]
    assert found.is_locked and found.names == ["s"] and found.batch_size == other.batch_size
    only = td.attrs(fields=["dtype"])["a"]
    assert (only.tgt_device, only.tgt_dtype, only.tgt_shape) == (None, torch.int8, None)
    assert td.to(td.attrs(fields=()))["a"] is td["a"]


def test_bad_descriptions() -> None:
    td = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3)}}, [3])
    with pytest.raises(ValueError, match="strides"):
        td.attrs(fields=["strides"])
    with pytest.raises(TypeError, match=r"\('n', 'b'\)"):
        td.to(TensorDict({"n": {"b": {"c": torch.ones(3)}}}).attrs())
    with pytest.raises(TypeError, match="non_blocking"):
        td.to(td.attrs(), non_blocking=True)
