"""Ensembles: what each copy computes is what the template computes with the parameters of the copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tensordict import TensorDict, lazy_stack
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.ensemble import EnsembleModule


def linear(inputs=4, outputs=3, in_key="a", out_key="b"):
    return TensorDictModule(nn.Linear(inputs, outputs), in_keys=[in_key], out_keys=[out_key])


def data(*batch):
    return TensorDict(a=torch.randn(*batch, 4), batch_size=batch)


def by_hand(ensemble, x):
    """The results of the linear copies of an ensemble, one by one."""
    params = ensemble.params_td["module"]
    return torch.stack([nn.functional.linear(x, w, b) for w, b in zip(params["weight"], params["bias"], strict=True)])


@pytest.mark.parametrize("count", [1, 3])
def test_copies_run_on_the_same_input(count):
    ensemble, td = EnsembleModule(linear(), count), data(5)
    result = ensemble(td)
    assert result.batch_size == (count, 5) and set(td.keys()) == {"a"}
    torch.testing.assert_close(result["b"], by_hand(ensemble, td["a"]))
    torch.testing.assert_close(result["a"], td["a"].expand(count, 5, 4))
    torch.testing.assert_close(ensemble(td["a"]), result["b"])
    torch.testing.assert_close(ensemble(a=td["a"]), result["b"])


def test_other_entries_names_and_lazy_stacks_come_along():
    ensemble = EnsembleModule(linear(), 2)
    td = TensorDict(a=torch.randn(5, 4), n={"z": torch.arange(5)}, tag="t", batch_size=[5], names=["time"])
    result = ensemble(td)
    assert result.names == [None, "time"] and result["tag"] == "t"
    assert torch.equal(result["n", "z"], torch.arange(5).expand(2, 5))
    stack = lazy_stack([data(), data()])
    torch.testing.assert_close(ensemble(stack)["b"], by_hand(ensemble, stack["a"]))


def test_chained_without_expanding_again():
    first, second = EnsembleModule(linear(), 3), EnsembleModule(linear(3, 2, "b", "c"), 3, expand_input=False)
    net, td = TensorDictSequential(first, second), data(5)
    result = net(td)
    params = second.params_td["module"]
    expected = torch.baddbmm(params["bias"][:, None], by_hand(first, td["a"]), params["weight"].mT)
    torch.testing.assert_close(result["c"], expected)
    assert result.batch_size == (3, 5)
    without_batch = TensorDict(b=result["b"])
    torch.testing.assert_close(second(without_batch)["c"], expected)
    assert second(without_batch).batch_size == (3,) and without_batch.batch_size == ()
    with pytest.raises(ValueError, match=r"3 copies has batch size \[5\].*first dim must have 3"):
        second(TensorDict(b=torch.zeros(5, 3), batch_size=[5]))


def test_ensembles_of_ensembles():
    inner = EnsembleModule(linear(), 2)
    outer, td = EnsembleModule(inner, 3), data(5)
    result = outer(td)
    params = outer.params_td["params_td", "module"]
    expected = torch.einsum("noji,bi->nobj", params["weight"], td["a"]) + params["bias"][:, :, None]
    torch.testing.assert_close(result["b"], expected)
    assert params["weight"].shape == (3, 2, 3, 4) and params["weight"].flatten(0, 1).unique(dim=0).shape[0] == 6


def test_parameters_of_the_copies_differ_and_train():
    template = linear()
    before = template.module.weight.clone()
    ensemble = EnsembleModule(template, 3)
    weight = ensemble.params_td["module", "weight"]
    assert weight.unique(dim=0).shape[0] == 3 and torch.equal(template.module.weight, before)
    names = {name for name, _ in ensemble.named_parameters() if name.startswith("params_td")}
    assert names == {"params_td.module.weight", "params_td.module.bias"}
    td = data(5)
    ensemble(td)["b"].sum().backward()
    torch.testing.assert_close(weight.grad, td["a"].sum(0).expand(3, 3, 4))
    assert template.module.weight.grad is None


def test_buffers_frozen_and_tied_parameters_stay_what_they_are():
    norm, tied = nn.BatchNorm1d(4), nn.Linear(4, 4)
    tied.bias.requires_grad_(False)
    net = nn.Sequential(tied, norm, nn.Linear(4, 4))
    net[2].weight = tied.weight
    ensemble = EnsembleModule(TensorDictModule(net, in_keys=["a"], out_keys=["b"]), 2)
    params = ensemble.params_td["module"]
    assert params["0", "weight"] is params["2", "weight"]
    assert not isinstance(params["1", "running_mean"], nn.Parameter)
    assert not params["0", "bias"].requires_grad
    td = data(64)
    ensemble(td)
    torch.testing.assert_close(
        params["1", "running_mean"], 0.1 * (td["a"] @ params["0", "weight"].mT + params["0", "bias"][:, None]).mean(1)
    )
    assert params["1", "num_batches_tracked"].tolist() == [1, 1] and norm.num_batches_tracked == 0


def test_random_operations_differ_between_copies():
    net = TensorDictModule(nn.Dropout(0.5), in_keys=["a"], out_keys=["b"])
    first, second = EnsembleModule(net, 2)(TensorDict(a=torch.ones(100)))["b"]
    assert not torch.equal(first, second)


def test_reset_in_place():
    ensemble = EnsembleModule(linear(), 2)
    params = TensorDict.from_module(ensemble.module).data.expand(5, 2).clone()
    weight = params["module", "weight"]
    before = weight.clone()
    assert ensemble.reset_parameters_recursive(params) is params and params["module", "weight"] is weight
    assert weight.flatten(0, 1).unique(dim=0).shape[0] == 10 and not (weight == before).any()
    own = ensemble.params_td["module", "weight"].clone()
    ensemble.reset_parameters()
    assert not (ensemble.params_td["module", "weight"] == own).any()
    with pytest.raises(ValueError, match=r"pass a container of them, or call reset_parameters\(\)"):
        ensemble.reset_parameters_recursive()
    with pytest.raises(KeyError, match="unexpected keys.*other"):
        ensemble.reset_parameters_recursive(TensorDict(other=torch.zeros(2), batch_size=[2]))


def test_each_copy_is_reset_once():
    calls = []
    layer = nn.Linear(1, 1)
    layer.reset_parameters = lambda: calls.append(layer.weight)
    EnsembleModule(TensorDictModule(nn.Sequential(layer), in_keys=["a"], out_keys=["b"]), 2)
    assert len(calls) == 2 and calls[0].data_ptr() != calls[1].data_ptr()


def test_copies_states_and_pickles():
    ensemble, td = EnsembleModule(linear(), 3), data(5)
    expected = ensemble(td)["b"]
    other = EnsembleModule(linear(), 3)
    other.load_state_dict(ensemble.state_dict())
    for same in (other, copy.deepcopy(ensemble), pickle.loads(pickle.dumps(ensemble))):
        torch.testing.assert_close(same(td)["b"], expected)
        assert same.params_td["module", "weight"] is not ensemble.params_td["module", "weight"]
    assert {name: value.shape for name, value in ensemble.state_dict().items()} == {
        "module.module.weight": (3, 4),
        "module.module.bias": (3,),
        "params_td.module.weight": (3, 3, 4),
        "params_td.module.bias": (3, 3),
    }


def test_a_call_that_fails_leaves_the_template_as_it_was():
    ensemble = EnsembleModule(linear(), 2)
    weight = ensemble.module.module.weight
    with pytest.raises(KeyError, match="'a'"):
        ensemble(TensorDict(other=torch.zeros(2)))
    assert ensemble.module.module.weight is weight and ensemble(data(2)).batch_size == (2, 2)


@pytest.mark.parametrize("count", [0, -1, 2.0, "x", None])
def test_numbers_that_are_refused(count):
    with pytest.raises(ValueError, match="num_copies must be a positive integer"):
        EnsembleModule(linear(), count)


def test_modules_that_are_refused():
    with pytest.raises(TypeError, match="in_keys and out_keys, got Linear"):
        EnsembleModule(nn.Linear(2, 2), 2)
    with pytest.raises(RuntimeError, match="lazy module"):
        EnsembleModule(TensorDictModule(nn.LazyLinear(2), in_keys=["a"], out_keys=["b"]), 2)


def test_compiled():
    chain = TensorDictSequential(EnsembleModule(linear(), 2), EnsembleModule(linear(3, 2, "b", "c"), 2, False))
    nested = EnsembleModule(EnsembleModule(linear(), 2), 2)
    for net in (chain, nested):
        td = data(5)
        result, expected = torch.compile(net, fullgraph=True, backend="eager")(td), net(td)
        assert result.batch_size == expected.batch_size and result.keys() == expected.keys()
        for key in expected.keys():
            torch.testing.assert_close(result[key], expected[key])
