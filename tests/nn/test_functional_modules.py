"""Functions of older levels for stateless modules, and containers as leaves of pytrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tensordict import TensorClass, TensorDict, TensorDictParams, lazy_stack
from tensordict.nn import functional_modules
from tensordict.nn.functional_modules import _exclude_td_from_pytree, set_tensor, set_tensor_dict


class Point(TensorClass):
    x: torch.Tensor


def make() -> TensorDict:
    return TensorDict(a=torch.arange(3.0), b={"c": torch.ones(3)}, batch_size=[3])


@pytest.mark.parametrize(
    "name", ["make_functional", "get_functional", "is_functional", "repopulate_module", "extract_weights_and_buffers"]
)
def test_what_is_removed_says_what_to_use(name):
    net = nn.Linear(2, 2)
    arguments = (net, TensorDict.from_module(net)) if name == "repopulate_module" else (net,)
    with pytest.raises(RuntimeError, match=f"{name} has been removed.*from_module.*to_module"):
        getattr(functional_modules, name)(*arguments)


def test_set_tensor_in_each_place_of_a_module():
    ones = torch.ones(2)
    for put in (set_tensor, lambda net, name, value: set_tensor_dict(net.__dict__, net, name, value)):
        net = nn.BatchNorm1d(2)
        put(net, "weight", ones)
        put(net, "running_mean", ones)
        put(net, "other", ones)
        assert net.weight is net.running_mean is net.other is ones
        assert [name for name, _ in net.named_parameters()] == ["bias"]
        assert [name for name, _ in net.named_buffers()] == ["running_mean", "running_var", "num_batches_tracked"]
        parameter = nn.Parameter(ones)
        put(net, "weight", parameter)
        assert dict(net.named_parameters())["weight"] is parameter and "weight" not in net.__dict__
        put(net, "weight", None)
        assert net.weight is None


@pytest.mark.parametrize(
    "container", [make(), TensorDictParams(make()), lazy_stack([make(), make()]), Point(torch.ones(3))]
)
def test_containers_are_leaves_in_the_block(container):
    to_form = tree_leaves([container])
    with _exclude_td_from_pytree():
        (leaf,) = tree_leaves([container])
        assert leaf is container
        assert tree_map(lambda value: value, {"k": container})["k"] is container
    with pytest.raises(KeyError, match="left"), _exclude_td_from_pytree():
        raise KeyError("left")
    again = tree_leaves([container])
    assert len(again) == len(to_form) and all(map(torch.equal, again, to_form))


def test_blocks_within_blocks_and_without_end():
    td = make()
    switch = _exclude_td_from_pytree()
    switch.set()
    try:
        with _exclude_td_from_pytree():
            pass
        _exclude_td_from_pytree().unset()
        assert tree_leaves(td)[0] is td
    finally:
        switch.unset()
    switch.unset()
    assert len(tree_leaves(td)) == 2


def test_vmap_maps_over_the_leaves():
    td, point = make(), Point(torch.arange(3.0), batch_size=[3])
    with _exclude_td_from_pytree():
        result, total = torch.vmap(lambda td, point: (td.set("d", td["a"] + point.x), point.x))(td, point)
        nested = torch.vmap(lambda tree: tree["k"]["a"] + 1)({"k": td})
    assert result.batch_size == (3,) and torch.equal(result["d"], 2 * td["a"])
    assert torch.equal(total, point.x) and torch.equal(nested, td["a"] + 1)
