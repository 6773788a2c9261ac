"""Modules and containers of their parameters: `from_module`, `from_modules`, `to_module`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensordict
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, TensorDictParams


class Tied(nn.Module):
    """Two layers that share a weight, and one layer that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.again = self.one

    def forward(self, x):
        return self.again(self.two(self.one(x)))


class Counting(nn.Module):
    """Assigns a buffer anew on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_parameter("bias", None)

    def forward(self, x):
        self.calls = self.calls + 1
        return x * self.weight


def nets():
    return {
        "mlp": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (5, 3)),
        "norm": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3)),
        "tied": (Tied(), (5, 3)),
        "rnn": (nn.LSTM(3, 4), (5, 2, 3)),
        "transformer": (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), 2),
            (2, 5, 4),
        ),
        "parametrized": (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (5, 3)),
    }


NETS = list(nets())


def output(net, x):
    y = net(x)
    return y[0] if isinstance(y, tuple) else y


def state_of(net):
    """Map every place of a module to the identity of its tensor or container."""
    return [
        (name, table, key, id(value))
        for name, module in net.named_modules(remove_duplicate=False)
        for table in ("_parameters", "_buffers", "_modules")
        for key, value in getattr(module, table).items()
    ]


@pytest.mark.parametrize("name", NETS)
def test_from_module_gives_the_very_tensors(name):
    net, _ = nets()[name]
    params = TensorDict.from_module(net)
    assert params.batch_size == () and not params.is_locked
    named = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers(remove_duplicate=False))
    flat = {".".join((key,) if isinstance(key, str) else key): leaf for key, leaf in params.items(True, True)}
    assert flat.keys() == named.keys()
    assert all(flat[key] is named[key] for key in named)


@pytest.mark.parametrize("name", NETS)
def test_to_module_computes_with_the_entries_and_puts_back_the_rest(name):
    torch.manual_seed(0)  # of 300 random transformers, two round in another way under functional_call
    net, shape = nets()[name]
    net.eval()
    x = torch.randn(shape)
    params = TensorDict.from_module(net)
    doubled = params.data.apply(lambda leaf: leaf * 2)
    state = {key: value.detach() * 2 for key, value in net.state_dict().items()}
    expected = torch.func.functional_call(net, state, x, tie_weights=False)
    expected = expected[0] if isinstance(expected, tuple) else expected
    before, old = state_of(net), output(net, x)
    with doubled.to_module(net):
        torch.testing.assert_close(output(net, x), expected)
        assert state_of(net) != before
        names = [key for key, _ in net.named_parameters(remove_duplicate=False)]
        assert names == [key for key, _ in nets()[name][0].named_parameters(remove_duplicate=False)]
    assert state_of(net) == before
    torch.testing.assert_close(output(net, x), old)


def test_puts_back_after_an_exception_and_when_nested():
    net = nn.Linear(2, 2)
    before = state_of(net)
    ones, zeros = (TensorDict.from_module(net).data * 0 + value for value in (1, 0))
    with pytest.raises(KeyError, match="inside"), ones.to_module(net):
        raise KeyError("inside")
    assert state_of(net) == before
    with ones.to_module(net):
        with zeros.to_module(net):
            assert (net.weight == 0).all()
        assert (net.weight == 1).all()
    assert state_of(net) == before


def test_swap_gives_what_was_there():
    net = nn.Linear(2, 2)
    old = net.weight
    new = TensorDict(weight=nn.Parameter(torch.zeros(2, 2)))
    swap = new.to_module(net)
    assert net.weight is new["weight"] and swap["weight"] is old and list(swap.keys()) == ["weight"]
    kept = TensorDict()
    assert swap.to_module(net, swap_dest=kept) is kept
    assert net.weight is old and kept["weight"] is new["weight"]
    assert new.to_module(net, return_swap=False) is None


def test_what_takes_the_place_of_a_parameter():
    net = nn.Linear(2, 2, bias=False).requires_grad_(False)
    plain = torch.ones(2, 2)
    TensorDict(weight=plain).to_module(net)
    assert type(net.weight) is nn.Parameter and not net.weight.requires_grad
    assert net.weight.data_ptr() == plain.data_ptr()
    graph = torch.ones(2, 2, requires_grad=True) * 2
    TensorDict(weight=graph).to_module(net)
    assert net.weight is graph


def test_without_preserving_a_plain_tensor_is_an_attribute():
    net = nn.Linear(2, 2)
    before = state_of(net)
    with TensorDict(weight=torch.ones(2, 2)).to_module(net, preserve_module_state=False):
        assert type(net.weight) is torch.Tensor
        assert [name for name, _ in net.named_parameters()] == ["bias"]
    assert state_of(net) == before


@pytest.mark.parametrize("preserve", [True, False])
def test_a_parameter_in_the_place_of_a_plain_attribute_is_registered(preserve):
    net = nn.Linear(2, 2)
    TensorDict.from_module(net).data.to_module(net, preserve_module_state=False)
    before = state_of(net)
    params = TensorDict.from_module(nn.Linear(2, 2))
    with params.to_module(net, preserve_module_state=preserve):
        assert [name for name, _ in net.named_parameters()] == ["weight", "bias"]
        assert net.weight is params["weight"] and "weight" not in vars(net)
    assert state_of(net) == before and list(net.parameters()) == []


def test_buffers_assigned_anew_go_to_the_container():
    net = Counting()
    params = TensorDict.from_module(net).clone()
    with params.to_module(net):
        net(torch.ones(2))
        net(torch.ones(2))
    assert params["calls"] == 2 and net.calls == 0
    params.lock_()
    with params.to_module(net):
        net(torch.ones(2))
    assert params["calls"] == 2 and net.calls == 0


def test_entries_that_are_none_or_not_persistent():
    net = Counting()
    assert set(TensorDict.from_module(net).keys()) == {"weight", "calls", "hidden"}
    assert set(TensorDict.from_module(net, use_state_dict=True).keys()) == {"weight", "calls"}
    with pytest.raises(KeyError, match=r"unexpected keys \['bias'\]"):
        TensorDict(bias=torch.ones(2)).to_module(net)


def test_buffers_stay_buffers_and_parameters_parameters():
    net = nn.BatchNorm1d(2)
    held = nn.ModuleDict({"net": net, "params": TensorDictParams(TensorDict(w=torch.ones(2)))})
    names = [sorted(name for name, _ in every()) for every in (held.named_parameters, held.named_buffers)]
    swapped = TensorDict.from_module(held).data.clone()
    swapped["net", "running_mean"] = nn.Parameter(torch.full((2,), 3.0))
    with swapped.to_module(held):
        assert [sorted(name for name, _ in every()) for every in (held.named_parameters, held.named_buffers)] == names
        assert (net.running_mean == 3).all() and not isinstance(net.running_mean, nn.Parameter)
    with TensorDict(running_mean=nn.Parameter(torch.ones(2))).to_module(net, preserve_module_state=False):
        assert "running_mean" in dict(net.named_parameters()) and "running_mean" not in dict(net.named_buffers())
    assert [sorted(name for name, _ in every()) for every in (held.named_parameters, held.named_buffers)] == names


def test_inplace_copies():
    net = nn.Linear(2, 2)
    before, old = state_of(net), net.weight.detach().clone()
    with (TensorDict.from_module(net).data * 0).to_module(net, inplace=True):
        assert state_of(net) == before and (net.weight == 0).all()
    torch.testing.assert_close(net.weight.detach(), old)
    with pytest.raises(RuntimeError, match=r"'weight' has shape \[3\]"):
        TensorDict(bias=torch.zeros(2), weight=torch.zeros(3)).to_module(net, inplace=True)
    assert not (net.bias == 0).all()


def test_a_container_that_does_not_fit_changes_nothing():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = state_of(net)
    params = TensorDict.from_module(net).clone()
    params["1", "scale"] = torch.ones(2)
    del params["1", "bias"]
    with pytest.raises(
        KeyError, match=r"does not fit the module Linear: unexpected keys \['scale'\], missing keys \['bias'\]"
    ):
        params.to_module(net)
    assert state_of(net) == before
    with pytest.raises(KeyError, match="does not fit"):
        TensorDict({"0": torch.ones(2)}).to_module(net)
    with pytest.raises(KeyError, match="unexpected keys"):
        TensorDict(other=torch.ones(2)).to_module(net, use_state_dict=True)
    assert state_of(net) == before


def test_some_entries_are_enough():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bias = net[0].bias
    with TensorDict({"0": {"weight": torch.zeros(2, 2)}}).to_module(net):
        assert net[0].bias is bias and (net[0].weight == 0).all()


@pytest.mark.parametrize("inplace", [True, False])
def test_through_the_state_dict(inplace):
    calls = []
    net = nn.Linear(2, 2)
    net.register_state_dict_post_hook(lambda module, state, *_: state.update(extra=state.pop("weight")))
    net.register_load_state_dict_pre_hook(
        lambda module, state, *_: (calls.append(1), state.update(weight=state.pop("extra")))
    )
    params = TensorDict.from_module(net, use_state_dict=True)
    assert set(params.keys()) == {"extra", "bias"}
    old = net.weight.detach().clone()
    with (params * 0).to_module(net, use_state_dict=True, inplace=inplace):
        assert (net.weight == 0).all() and calls
    torch.testing.assert_close(net.weight.detach(), old)
    assert isinstance(net.weight, nn.Parameter)


def test_optimizers_reach_the_module_through_the_container():
    net = nn.Linear(3, 1)
    params = TensorDict.from_module(net)
    optimizer = torch.optim.SGD(list(params.values(True, True)), lr=0.1)
    old = net.weight.detach().clone()
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(net.weight.detach(), old)
    params.data.zero_()
    assert (net.weight == 0).all()


def test_grad_and_vmap_go_through():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    params, x = TensorDict.from_module(net), torch.randn(5, 3)

    def loss(params, x):
        with params.to_module(net):
            return net(x).pow(2).mean()

    grads = torch.func.grad(loss)(params.data, x)
    expected = torch.autograd.grad(net(x).pow(2).mean(), list(net.parameters()))
    for (name, _), grad in zip(net.named_parameters(), expected, strict=True):
        torch.testing.assert_close(grads[tuple(name.split("."))], grad)
    per_sample = torch.vmap(torch.func.grad(loss), (None, 0))(params.data, x)
    torch.testing.assert_close(per_sample["0", "weight"].mean(0), grads["0", "weight"])
    with params.data.clone().to_module(net):
        net(x).sum().backward()
    assert all(isinstance(p, nn.Parameter) and p.grad is None for p in net.parameters())


# --- ensembles --------------------------------------------------------------------------------------------------------


def linears(count=3):
    return [nn.Linear(3, 4) for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"lazy_stack": True}, {"as_module": True}], ids=str)
def test_ensembles_run_under_vmap(options):
    modules, empty, x = linears(), nn.Linear(3, 4, device="meta"), torch.randn(3)
    params = TensorDict.from_modules(*modules, **options)
    assert params.batch_size == (3,) and params.is_locked

    def run(params, x):
        with params.to_module(empty):
            return empty(x)

    y = torch.vmap(run, (0, None))(params, x)
    torch.testing.assert_close(y, torch.stack([module(x) for module in modules]))
    y.sum().backward()
    if options.get("lazy_stack"):
        assert isinstance(params, LazyStackedTensorDict)
        assert all(module.weight.grad is not None for module in modules)
    else:
        assert isinstance(params["weight"], nn.Parameter) and params["weight"].grad.norm() > 0
        assert modules[0].weight.grad is None
    assert isinstance(params, TensorDictParams) is bool(options.get("as_module"))


def test_ensemble_of_one_tensor_is_expanded():
    module = nn.Linear(3, 4)
    params = TensorDict.from_modules(module, module, expand_identical=True)
    assert params["weight"].shape == (2, 4, 3) and params["weight"].data_ptr() == module.weight.data_ptr()
    params["weight"].sum().backward()
    assert (module.weight.grad == 2).all()
    assert TensorDict.from_modules(module, module)["weight"].data_ptr() != module.weight.data_ptr()


def test_ensembles_that_cannot_be():
    with pytest.raises(KeyError, match="different parameters.*lazy_stack=True"):
        TensorDict.from_modules(nn.Linear(3, 4), nn.Linear(3, 4, bias=False))
    assert len(TensorDict.from_modules(nn.Linear(3, 4), nn.Linear(3, 4, bias=False), lazy_stack=True)) == 2
    with pytest.raises(ValueError, match="at least one"):
        TensorDict.from_modules()
    with pytest.raises(ValueError, match="excludes"):
        TensorDict.from_modules(*linears(), lazy_stack=True, as_module=True)
    with pytest.raises(RuntimeError, match="weight.*requires gradients"):
        TensorDict.from_modules(nn.Linear(3, 4), nn.Linear(3, 4).requires_grad_(False))


def test_free_functions():
    net = nn.Linear(3, 4)
    assert tensordict.from_module(net)["weight"] is net.weight
    assert isinstance(tensordict.from_module(net, as_module=True), TensorDictParams)
    assert tensordict.from_module(net, lock=True).is_locked
    assert tensordict.from_modules(net, net)["bias"].shape == (2, 4)


def test_modules_without_parameters_are_left_out():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert list(TensorDict.from_module(net).keys()) == ["0"]
    assert list(TensorDict.from_module(net, filter_empty=False).keys()) == ["0", "1"]


def test_clone_of_parameters_beside_integers():
    params = TensorDict.from_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    copied = params.clone()
    assert copied["1", "num_batches_tracked"] == 0
    assert copied["0", "weight"].requires_grad and not copied["1", "running_mean"].requires_grad


# --- modules with ways of their own -----------------------------------------------------------------------------------


def test_hooks_run_with_the_entries_that_are_in():
    net = nn.Linear(2, 2, bias=False)
    seen = []
    net.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    net.register_forward_hook(lambda module, args, y: y + 1)
    net.register_full_backward_hook(lambda module, grads, outputs: seen.append("backward"))
    params = TensorDict(weight=torch.zeros(2, 2))
    x = torch.ones(1, 2, requires_grad=True)
    with params.to_module(net):
        inside = net.weight
        y = net(x)
    assert (y == 1).all() and seen[0] is inside
    y.sum().backward()
    assert seen[1] == "backward" and inside.grad is not None and net.weight.grad is None


def test_hooks_on_state_dicts_do_not_run_on_plain_swaps():
    net = nn.Linear(2, 2)
    calls = []
    net.register_state_dict_post_hook(lambda *_: calls.append("save"))
    net.register_load_state_dict_pre_hook(lambda *_: calls.append("load"))
    with TensorDict.from_module(net).data.to_module(net):
        pass
    assert calls == []
    with TensorDict.from_module(net, use_state_dict=True).to_module(net, use_state_dict=True):
        pass
    assert set(calls) == {"save", "load"}


def test_parametrized_modules_compute_their_weights_of_the_entries():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).T

    net = nn.utils.parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())
    params = TensorDict.from_module(net)
    assert params["parametrizations", "weight", "original"] is net.parametrizations.weight.original
    ones = params.data.apply(torch.ones_like)
    with ones.to_module(net), nn.utils.parametrize.cached():
        assert (net.weight == 1).all() and (net(torch.ones(3)) == 4).all()
    assert not (net.weight == 1).any()


def test_spectral_norm_writes_into_the_container_not_the_module():
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    params = TensorDict.from_module(net).clone()
    params["parametrizations", "weight", "0", "_u"].fill_(0.5)
    vector = net.parametrizations.weight[0]._u
    old = vector.clone()
    with params.to_module(net):
        net(torch.ones(3))
    assert net.parametrizations.weight[0]._u is vector and torch.equal(vector, old)
    assert not (params["parametrizations", "weight", "0", "_u"] == 0.5).any()


def test_lazy_modules_before_and_after_they_know_their_sizes():
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    params = TensorDict.from_module(net)
    weight = params["0", "weight"]
    assert isinstance(weight, nn.UninitializedParameter) and weight is net[0].weight
    assert "UninitializedParameter(shape=torch.Size([-1])" in repr(params)
    assert params.copy()["0", "weight"] is weight
    net(torch.ones(2, 3))
    assert params["0", "weight"] is net[0].weight and params["0", "weight"].shape == (4, 3)
    doubled = params.data * 2
    with doubled.to_module(net):
        assert torch.equal(net[0].weight, doubled["0", "weight"])


def test_values_for_a_lazy_module():
    net = nn.LazyLinear(4)
    with TensorDict(weight=torch.ones(4, 3), bias=torch.zeros(4)).to_module(net):
        assert (net(torch.ones(2, 3)) == 3).all()
    assert isinstance(net.weight, nn.UninitializedParameter)
    other = nn.LazyLinear(4)
    TensorDict.from_module(other).to_module(net)
    assert net.weight is other.weight


def test_lazy_modules_where_sizes_are_needed():
    net = nn.LazyLinear(4)
    with pytest.raises(RuntimeError, match=r"'weight'.*lazy module.*run it once"):
        TensorDict(weight=torch.ones(4, 3)).to_module(net, inplace=True)
    with pytest.raises(RuntimeError, match=r"'w' has shape \[-1\]"):
        TensorDict(batch_size=[2]).set("w", nn.UninitializedParameter())


# --- tied ones --------------------------------------------------------------------------------------------------------


def test_tied_parameters_are_one_object():
    net = Tied()
    params = TensorDict.from_module(net)
    assert params["one", "weight"] is params["two", "weight"] is params["again", "weight"]
    for copied in (TensorDictParams(params).clone(), TensorDictParams(params).to(torch.float64)):
        assert copied["one", "weight"] is copied["two", "weight"] is not params["one", "weight"]
        assert [name for name, _ in copied.named_parameters()] == ["one.weight", "one.bias", "two.bias"]
        assert len(list(copied.parameters())) == 3
        assert len(list(copied.named_parameters(remove_duplicate=False))) == 6
    with TensorDictParams(params).clone().to_module(net):
        assert net.one.weight is net.two.weight and net.again is net.one
        assert len(list(net.parameters())) == 3


def test_gradients_of_tied_parameters_add_up():
    net = Tied()
    params = TensorDictParams(TensorDict.from_module(net)).clone()
    with params.to_module(net):
        net(torch.ones(1, 3)).sum().backward()
    expected = torch.autograd.grad(net(torch.ones(1, 3)).sum(), net.one.weight)[0]
    torch.testing.assert_close(params["two", "weight"].grad, expected)


# --- nesting, exceptions and options ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"preserve_module_state": False}, {"inplace": True}], ids=str)
def test_nested_blocks_with_exceptions(options):
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before, values = state_of(net), {name: value.clone() for name, value in net.state_dict().items()}
    ones, zeros = (TensorDict.from_module(net).data.apply(lambda leaf, v=v: torch.full_like(leaf, v)) for v in (1, 0))

    def fail():
        with zeros.to_module(net, **options):
            assert (net[0].weight == 0).all()
            with ones["0"].to_module(net[0], **options):
                assert (net[0].weight == 1).all()
                raise ZeroDivisionError

    with ones.to_module(net, **options):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert (net[0].weight == 1).all() and (net[1].running_mean == 1).all()
    assert state_of(net) == before
    for name, value in net.state_dict().items():
        assert torch.equal(value, values[name])


def test_swap_dest_in_a_block():
    net = nn.Linear(2, 2)
    weight, kept = net.weight, TensorDict()
    with TensorDict(weight=torch.zeros(2, 2)).to_module(net, swap_dest=kept) as swap:
        assert swap is kept and kept["weight"] is weight and (net.weight == 0).all()
    assert net.weight is weight


def test_calls_that_share_a_memo_visit_a_module_once():
    net = nn.Linear(2, 2)
    memo = {}
    first, second = (TensorDict(weight=torch.full((2, 2), value)) for value in (1.0, 2.0))
    first.to_module(net, memo=memo)
    second.to_module(net, memo=memo)
    assert (net.weight == 1).all()


def test_steps_of_an_optimizer_on_a_clone_leave_the_module():
    net = nn.Linear(3, 1)
    params = TensorDictParams(TensorDict.from_module(net)).clone()
    optimizer = torch.optim.Adam(params.parameters(), lr=0.1)
    weight = net.weight.detach().clone()
    for _ in range(2):
        with params.to_module(net):
            loss = net(torch.ones(2, 3)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert torch.equal(net.weight, weight) and not torch.equal(params["weight"], weight)


def test_one_submodule_of_a_container():
    net = nn.ModuleDict({"a": nn.Linear(2, 2)})
    with pytest.raises(
        KeyError, match=r"does not fit the module Linear: unexpected keys \['0'\], missing keys \['bias', 'weight'\]"
    ):
        TensorDict({"a": {"0": torch.zeros(2, 2)}}).to_module(net)


def test_expanded_ensembles_of_modules_that_share():
    shared = nn.Linear(3, 4)
    heads = [nn.Sequential(shared, nn.Linear(4, 1)) for _ in range(3)]
    params = TensorDict.from_modules(*heads, expand_identical=True)
    assert params["0", "weight"].data_ptr() == shared.weight.data_ptr() and params["0", "weight"].shape == (3, 4, 3)
    assert isinstance(params["1", "weight"], nn.Parameter) and params["1", "weight"].shape == (3, 1, 4)
    held = TensorDict.from_modules(*heads, expand_identical=True, as_module=True)
    assert [name for name, _ in held.named_parameters()] == ["1.weight", "1.bias"]
    assert {name for name, _ in held.named_buffers()} == {"0.weight", "0.bias"}


def test_what_locks_the_result():
    net = nn.Linear(2, 2)
    assert tensordict.from_module(net).is_locked
    assert not TensorDict.from_module(net).is_locked
    for kind in (TensorDictBase, LazyStackedTensorDict, TensorDictParams):
        assert type(kind.from_module(net)) is TensorDict and kind.from_module(net).is_locked
        assert kind.from_module(net, as_module=True).is_locked
        assert not kind.from_module(net, lock=False).is_locked
        assert kind.from_modules(net, net).is_locked and not kind.from_modules(net, net, lock=False).is_locked


@pytest.mark.parametrize("use_state_dict", [False, True])
def test_modules_without_parameters_are_kept_if_asked(use_state_dict):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    for make in (tensordict.from_module, TensorDict.from_module):
        params = make(net, use_state_dict=use_state_dict, filter_empty=False)
        assert set(params.keys(True)) == {"0", ("0", "weight"), ("0", "bias"), "1", ("1", "0")}
        assert list(make(net, use_state_dict=use_state_dict).keys()) == ["0"]
    with pytest.raises(RuntimeError, match="excludes"):
        tensordict.from_modules(nn.Linear(2, 2), lazy_stack=True, as_module=True)
