"""UnbatchedTensor under `torch.vmap`: what is made of one element of the batch is no longer the same for all."""

from __future__ import annotations

import pytest
import torch

from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict, UnbatchedTensor, is_tensorclass


def made() -> TensorDict:
    return TensorDict(a=torch.arange(6.0).view(2, 3), u=UnbatchedTensor(torch.ones(5)), batch_size=[2])


def test_it_is_not_mapped_over() -> None:
    result = torch.vmap(lambda td: td + 1)(made())
    assert type(result["u"]) is UnbatchedTensor and result["u"].tolist() == [2] * 5
    assert result.batch_size == result.get("u").batch_size == (2,)


def test_what_depends_on_the_element_leaves_as_a_tensor() -> None:
    result = torch.vmap(lambda td: td.set("z", td["a"] * td["u"].sum()))(made())
    assert type(result["z"]) is torch.Tensor and torch.equal(result["z"], made()["a"] * 5)
    assert type(result["u"]) is UnbatchedTensor

    def fresh(td: TensorDict) -> TensorDict:
        return TensorDict(u=UnbatchedTensor(td["a"].sum() + torch.zeros(5)))

    result = torch.vmap(fresh)(made())
    assert result.batch_size == (2,) and torch.equal(result["u"], made()["a"].sum(1, keepdim=True).expand(2, 5))
    assert torch.equal(torch.vmap(lambda td: td["u"] * td["a"].sum())(made()), result["u"])


def test_two_levels() -> None:
    td = TensorDict(a=torch.arange(6.0).view(2, 3), u=UnbatchedTensor(torch.ones(5)), batch_size=[2, 3])
    inner = torch.vmap(lambda item: item.set("z", item["u"] * item["a"]))
    result = torch.vmap(inner)(td)
    assert result["z"].shape == (2, 3, 5) and torch.equal(result["z"][..., 0], td["a"])


@pytest.mark.parametrize("kind", [NonTensorData, MetaData])
def test_holders_count_as_tensorclasses(kind: type) -> None:
    assert is_tensorclass(kind) and is_tensorclass(kind(1))
    assert not is_tensorclass(NonTensorStack) and not is_tensorclass(UnbatchedTensor)
