"""Stacks of the parameters of lazy modules get their sizes and first values with the first call."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tensordict import TensorDict, TensorDictParams

COUNT = 3

# The lazy modules, an input of one of them, and the shape of each parameter and buffer of one of them.
KINDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "linear": (lambda: nn.LazyLinear(4), (2, 5), {"weight": (4, 5), "bias": (4,)}),
    "convolution": (lambda: nn.LazyConv2d(4, 3), (2, 3, 8, 8), {"weight": (4, 3, 3, 3), "bias": (4,)}),
    "batch norm": (
        nn.LazyBatchNorm1d,
        (6, 5),
        {"weight": (5,), "bias": (5,), "running_mean": (5,), "running_var": (5,), "num_batches_tracked": ()},
    ),
    "batch norm without weights": (
        lambda: nn.LazyBatchNorm1d(affine=False),
        (6, 5),
        {"running_mean": (5,), "running_var": (5,), "num_batches_tracked": ()},
    ),
    "sequence": (
        lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)),
        (2, 5),
        {"0.weight": (4, 5), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)},
    ),
}


def build(make: Callable[[], nn.Module], as_module: bool = True) -> tuple[Any, Callable[..., Tensor]]:
    """Return the parameters of several modules, and a function that runs one module with given parameters."""
    params = TensorDict.from_modules(*[make() for _ in range(COUNT)], as_module=as_module)
    shell = make()

    def call(params: Any, x: Tensor) -> Tensor:
        with params.to_module(shell):
            return shell(x)

    return params, call


def leaves(params: Any) -> dict[str, Any]:
    return {key: params[tuple(key.split("."))] for key in params.flatten_keys(".").keys()}


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.parametrize("as_module", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_call_gives_the_sizes(kind: str, as_module: bool, randomness: str) -> None:
    make, size, shapes = KINDS[kind]
    params, call = build(make, as_module)
    before = leaves(params)
    assert before.keys() == shapes.keys()
    lazy = {key for key, leaf in before.items() if is_lazy(leaf)}
    assert lazy == shapes.keys() - {"num_batches_tracked"}
    x = torch.randn(COUNT, *size)
    out = torch.vmap(call, (0, 0), randomness=randomness)(params, x)
    after = leaves(params)
    for key, shape in shapes.items():
        assert after[key].shape == (COUNT, *shape) and after[key].isfinite().all()
        # The very leaves: an optimizer may have them already.
        assert after[key] is before[key] and not is_lazy(after[key])
        kind_of_leaf = nn.Parameter if key.rpartition(".")[2] in ("weight", "bias") else Tensor
        assert type(after[key]) is kind_of_leaf
    for place in range(COUNT):
        module = make()
        module(x[place])
        if kind.startswith("batch norm"):
            module.reset_running_stats()
        module.load_state_dict({key: leaf[place] for key, leaf in after.items()}, strict=False)
        torch.testing.assert_close(module(x[place]), out[place])


@pytest.mark.parametrize("in_dim", [None, 1])
def test_inputs_along_any_dim(in_dim: int | None) -> None:
    params, call = build(lambda: nn.LazyLinear(4))
    x = torch.randn(2, COUNT, 5) if in_dim == 1 else torch.randn(2, 5)
    out = torch.vmap(call, (0, in_dim))(params, x)
    assert params["weight"].shape == (COUNT, 4, 5) and out.shape == (COUNT, 2, 4)
    torch.testing.assert_close(torch.vmap(call, (0, in_dim))(params, x), out)


def test_values_are_drawn_once_for_all_modules() -> None:
    params, call = build(lambda: nn.LazyLinear(4))
    torch.manual_seed(0)
    torch.vmap(call, (0, None))(params, torch.randn(2, 5, generator=torch.Generator()))
    torch.manual_seed(0)
    whole = nn.LazyLinear(4)
    whole.weight.materialize((COUNT, 4, 5))
    whole.bias.materialize((COUNT, 4))
    nn.Linear.reset_parameters(whole)
    assert torch.equal(params["weight"], whole.weight) and torch.equal(params["bias"], whole.bias)


def test_an_optimizer_that_was_made_before_trains_them() -> None:
    params, call = build(lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(1)))
    optimizer = torch.optim.Adam(params.parameters(), 0.05)
    x = torch.randn(8, 5)
    losses = []
    for _ in range(30):
        loss = (torch.vmap(call, (0, None))(params, x) - x.sum(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in params.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("preserve", [True, False])
def test_stacks_that_are_in_the_module_already(preserve: bool) -> None:
    """TorchRL's networks with `use_td_params=False` register the stacks in the module that is run."""
    params = TensorDict.from_modules(*[nn.LazyLinear(4) for _ in range(COUNT)])
    shell = nn.LazyLinear(4, device="meta")
    TensorDict.from_module(shell).data.to_module(shell, preserve_module_state=False)
    params.to_module(shell, preserve_module_state=preserve)
    assert [parameter is params[name] for name, parameter in shell.named_parameters()] == [True, True]

    def call(params: Any, x: Tensor) -> Tensor:
        with params.to_module(shell, preserve_module_state=preserve):
            return shell(x)

    out = torch.vmap(call, (0, None))(params, torch.randn(2, 5))
    assert out.shape == (COUNT, 2, 4) and type(shell) is nn.Linear
    assert [tuple(parameter.shape) for parameter in shell.parameters()] == [(COUNT, 4, 5), (COUNT, 4)]


def test_running_statistics_of_each_module() -> None:
    params, call = build(nn.LazyBatchNorm1d)
    x = torch.randn(COUNT, 6, 5)
    torch.vmap(call, (0, 0))(params, x)
    torch.testing.assert_close(params["running_mean"], x.mean(1) * 0.1)
    assert params["num_batches_tracked"].tolist() == [1] * COUNT


def test_parameters_that_a_module_is_given_twice() -> None:
    params, call = build(lambda: nn.LazyLinear(5))
    out = torch.vmap(lambda params, x: call(params, call(params, x)), (0, None))(params, torch.randn(2, 5))
    assert params.is_locked and out.shape == (COUNT, 2, 5)


def test_other_transforms_around() -> None:
    params, call = build(lambda: nn.LazyLinear(4))

    def loss(x: Tensor) -> Tensor:
        return torch.vmap(call, (0, None))(params, x).square().sum()

    grad = torch.vmap(torch.func.grad(loss))(torch.randn(6, 5))
    assert grad.shape == (6, 5) and grad.isfinite().all()
    assert params["weight"].shape == (COUNT, 4, 5) and params["weight"].requires_grad


def test_a_lazy_module_that_looks_at_values() -> None:
    class Centered(nn.modules.lazy.LazyModuleMixin, nn.Module):  # type: ignore[misc]
        cls_to_become = None

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.UninitializedParameter()

        def initialize_parameters(self, x: Tensor) -> None:
            if self.has_uninitialized_params():
                with torch.no_grad():
                    self.scale.materialize(x.shape[1:])
                    self.scale.fill_(x.flatten()[0].item())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    params, call = build(Centered)
    x = torch.arange(COUNT * 10.0).view(COUNT, 2, 5) + 7
    torch.testing.assert_close(torch.vmap(call, (0, 0))(params, x), x * 7)


def test_a_call_that_fails_leaves_the_stack_without_a_size() -> None:
    class Failing(nn.LazyLinear):
        fails = True

        def reset_parameters(self) -> None:
            if self.fails and getattr(self, "in_features", 0):
                raise ArithmeticError
            super().reset_parameters()

    params, call = build(lambda: Failing(4))
    with pytest.raises(ArithmeticError):
        torch.vmap(call, (0, None))(params, torch.randn(2, 5))
    assert all(map(is_lazy, params.parameters()))
    Failing.fails = False
    assert torch.vmap(call, (0, None))(params, torch.randn(2, 5)).shape == (COUNT, 2, 4)


def test_a_block_without_a_call_leaves_no_hook() -> None:
    params = TensorDict.from_modules(*[nn.LazyLinear(4) for _ in range(COUNT)])
    shell = nn.LazyLinear(4)
    hooks = len(shell._forward_pre_hooks)

    def enter(params: Any) -> Tensor:
        with params.to_module(shell):
            assert len(shell._forward_pre_hooks) == hooks + 1
        return torch.ones(())

    torch.vmap(enter)(params)
    assert len(shell._forward_pre_hooks) == hooks
    shell(torch.ones(2, 5))
    assert shell.weight.shape == (4, 5) and is_lazy(params["weight"])


def test_a_call_outside_of_vmap_says_what_to_do() -> None:
    params, call = build(lambda: nn.LazyLinear(4))
    with pytest.raises(RuntimeError, match=r"stack for 3 lazy modules.*\[4, 5\].*in torch.vmap"):
        call(params, torch.ones(2, 5))
    assert all(map(is_lazy, params.parameters()))


def test_parameters_that_need_no_gradients() -> None:
    class Frozen(nn.LazyLinear):
        def __init__(self) -> None:
            super().__init__(4, bias=False)
            self.weight = nn.UninitializedParameter(requires_grad=False)

    params, call = build(Frozen)
    assert not params["weight"].requires_grad
    assert not torch.vmap(call, (0, None))(params, torch.randn(2, 5)).requires_grad
    assert type(params["weight"]) is nn.Parameter and not params["weight"].requires_grad


def test_modules_of_which_some_know_their_sizes() -> None:
    with pytest.raises(RuntimeError, match=r"'weight'.*1 of the 2 modules.*run it once"):
        TensorDict.from_modules(nn.Linear(5, 4), nn.LazyLinear(4))


def test_a_module_that_occurs_twice() -> None:
    module = nn.LazyLinear(4)
    params = TensorDict.from_modules(module, module, expand_identical=True)
    assert is_lazy(params["weight"]) and params["weight"].size(0) == 2


def test_states_of_lazy_modules() -> None:
    params = TensorDict.from_modules(nn.LazyLinear(4), nn.LazyLinear(4), use_state_dict=True)
    assert is_lazy(params["weight"]) and params["weight"].size(0) == 2


def test_printing() -> None:
    params, _ = build(lambda: nn.LazyLinear(4))
    assert "weight: StackedUninitializedParameter(shape=torch.Size([3, -1])" in repr(params)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(4, dtype=torch.float64), nn.LazyBatchNorm1d])
def test_copies_have_stacks_of_their_own(make: Callable[[], nn.Module], copied: Callable[[Any], Any]) -> None:
    params, call = build(make)
    other = copied(params)
    x = torch.randn(6, 5, dtype=params["weight"].dtype)
    torch.vmap(call, (0, None))(other, x)
    assert other["weight"].shape[0] == COUNT and other["weight"].dtype == params["weight"].dtype == x.dtype
    assert is_lazy(params["weight"]) and type(params["weight"]) is not type(other["weight"])


@pytest.mark.parametrize("single", [True, False])
def test_casts_and_moves(single: bool) -> None:
    module = nn.LazyLinear(4)
    params = TensorDict.from_module(module, as_module=True) if single else build(lambda: nn.LazyLinear(4))[0]
    double = params.to(torch.float64)
    assert type(double["weight"]) is type(params["weight"]) and double["weight"].dtype == torch.float64
    assert params["weight"].dtype == torch.float32
    assert type(params.to("meta")["weight"]) is type(params["weight"])
    holder = nn.Module()
    holder.params = params
    assert holder.double().params["weight"] is params["weight"] and params["weight"].dtype == torch.float64


@pytest.mark.parametrize("single", [True, False])
def test_loading_a_state_before_the_first_call(single: bool) -> None:
    def make() -> Any:
        if single:
            return TensorDict.from_module(nn.LazyLinear(4), as_module=True)
        return build(lambda: nn.LazyLinear(4))[0]

    count = () if single else (COUNT,)
    state = {"weight": torch.randn(*count, 4, 5), "bias": torch.randn(*count, 4)}
    params = make()
    weight = params["weight"]
    params.load_state_dict(state)
    assert params["weight"] is weight and type(weight) is nn.Parameter
    assert torch.equal(params["weight"], state["weight"]) and torch.equal(params["bias"], state["bias"])
    holder = nn.Module()
    holder.params = make()
    holder.load_state_dict({f"params.{key}": value for key, value in state.items()})
    assert torch.equal(holder.params["weight"], state["weight"])


def test_parameters_of_one_lazy_module_are_shared() -> None:
    params = TensorDict.from_module(nn.LazyLinear(4), as_module=True)
    weight, shell = params["weight"], nn.LazyLinear(4, device="meta")
    assert isinstance(params, TensorDictParams) and is_lazy(weight)
    with params.to_module(shell, preserve_module_state=False):
        assert shell(torch.ones(COUNT, 2, 5)).shape == (COUNT, 2, 4)
    assert params["weight"] is weight and weight.shape == (4, 5)
