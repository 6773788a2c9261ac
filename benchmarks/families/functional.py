"""Workloads on modules and their parameters, and on what containers are made of and turned into."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from workload import Context, Limit, State, Workload, flat, nested, tree_leaves, tree_map

_SWAP = (Limit("floor", at_most=1.5, called="the attribute swap"),)
_MEMBERS = 8

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    """A plain dataclass, as programs have them."""

    x: Tensor
    y: Tensor


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    return _modules() + _params() + _conversions()


# --- modules ----------------------------------------------------------------------------------------------------------


def _modules() -> list[Workload]:
    swaps = [
        Workload(f"to_module, {name}", _set_swap(make), _to_module, _attributes, {"dict writes": _writes}, limits=_SWAP)
        for name, make in (("MLP", _mlp), ("transformer", _transformer))
    ]
    ensemble = _set_swap(_mlp, stacked=True)
    return [
        Workload("from_module, MLP", _parameters_of(_mlp), _from_module, _plain_parameters),
        Workload("from_module, transformer", _parameters_of(_transformer), _from_module, _plain_parameters),
        Workload("from_module, lock", _parameters_of(_transformer), lambda s: s.make(s.net, lock=True), None),
        Workload("from_modules, ensemble", _ensemble, lambda s: s.make(*s.nets), _stacked_floor),
        *swaps,
        Workload("to_module, ensemble", ensemble, _to_module, _attributes, {"dict writes": _writes}, limits=_SWAP),
        Workload("to_module, values", _set_swap(_mlp, values=True), _to_module, _attributes),
        Workload("to_module and a forward pass", _set_swap(_mlp), _forward, _forward_floor),
        Workload("vmap over an ensemble", ensemble, _run_vmap, None),
    ]


def _mlp(device: Any = None) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(8, 8, device=device), nn.Tanh()]
    return nn.Sequential(*layers)


def _transformer(device: Any = None) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True, device=device)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


def _parameters_of(make: Callable[[], nn.Module]) -> Callable[[ModuleType], State]:
    return lambda module: State(net=make(), make=module.TensorDict.from_module)


def _from_module(state: State) -> Any:
    return state.make(state.net)


def _plain_parameters(state: State) -> Any:
    return _tree(state.net)


def _tree(net: nn.Module) -> dict[str, Any]:
    entries: dict[str, Any] = {name: value for name, value in net._parameters.items() if value is not None}
    for name, child in net._modules.items():
        inner = _tree(child) if child is not None else None
        if inner:
            entries[name] = inner
    return entries


def _ensemble(module: ModuleType) -> State:
    return State(nets=[_mlp() for _ in range(_MEMBERS)], make=module.TensorDict.from_modules)


def _stacked_floor(state: State) -> Any:
    return _stack([_tree(net) for net in state.nets])


def _stack(trees: list[dict[str, Any]]) -> dict[str, Any]:
    stacks: dict[str, Any] = {}
    for name, value in trees[0].items():
        column = [tree[name] for tree in trees]
        stacks[name] = _stack(column) if isinstance(value, dict) else nn.Parameter(torch.stack(column).detach())
    return stacks


def _set_swap(
    make: Callable[..., nn.Module], stacked: bool = False, values: bool = False
) -> Callable[[ModuleType], State]:
    """A module and other parameters for it: stacks of them, or plain tensors."""

    def setup(module: ModuleType) -> State:
        net = make("meta") if stacked else make()
        nets = [make() for _ in range(_MEMBERS)]
        TensorDict = module.TensorDict
        params = TensorDict.from_modules(*nets) if stacked else TensorDict.from_module(nets[0])
        params = params.data if values else params
        named = {".".join((key,) if isinstance(key, str) else key): leaf for key, leaf in params.items(True, True)}
        # As a module keeps them: plain tensors are parameters of it for the time.
        named = {name: leaf if isinstance(leaf, nn.Parameter) else nn.Parameter(leaf) for name, leaf in named.items()}
        places = [(net.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in named]
        return State(net=net, params=params, places=places, news=list(named.values()), x=torch.ones(2, 8))

    return setup


def _to_module(state: State) -> None:
    with state.params.to_module(state.net):
        pass


def _attributes(state: State) -> None:
    """As a program does it by hand."""
    olds = [getattr(module, name) for module, name in state.places]
    for (module, name), new in zip(state.places, state.news, strict=True):
        setattr(module, name, new)
    for (module, name), old in zip(state.places, olds, strict=True):
        setattr(module, name, old)


def _writes(state: State) -> None:
    """Behind the back of the module."""
    olds = [module._parameters[name] for module, name in state.places]
    for (module, name), new in zip(state.places, state.news, strict=True):
        module._parameters[name] = new
    for (module, name), old in zip(state.places, olds, strict=True):
        module._parameters[name] = old


def _forward(state: State) -> Any:
    with state.params.to_module(state.net):
        return state.net(state.x)


def _forward_floor(state: State) -> Any:
    olds = [getattr(module, name) for module, name in state.places]
    for (module, name), new in zip(state.places, state.news, strict=True):
        setattr(module, name, new)
    y = state.net(state.x)
    for (module, name), old in zip(state.places, olds, strict=True):
        setattr(module, name, old)
    return y


def _run_vmap(state: State) -> Any:
    def call(params: Any, x: Tensor) -> Tensor:
        with params.to_module(state.net):
            return state.net(x)

    return torch.vmap(call, (0, None))(state.params, state.x)


# --- TensorDictParams -------------------------------------------------------------------------------------------------


def _params() -> list[Workload]:
    return [
        Workload("params: make", _wrap, lambda s: s.module.TensorDictParams(s.fresh.copy()), None),
        Workload("params: read", _wrap, lambda s: s.params["0", "weight"], lambda s: s.tree["0"]["weight"]),
        Workload("params: get", _wrap, lambda s: s.params.get(("0", "weight")), lambda s: s.tree["0"]["weight"]),
        Workload("params: items", _wrap, lambda s: list(s.params.items(True, True)), None),
        Workload("params: parameters", _wrap, lambda s: list(s.params.parameters()), lambda s: tree_leaves(s.tree)),
        Workload("params: named_parameters", _wrap, lambda s: dict(s.params.named_parameters()), None),
        Workload("params: data", _wrap, lambda s: s.params.data, lambda s: tree_map(_data, s.tree)),
        Workload("params: state_dict", _wrap, lambda s: dict(s.params.state_dict()), None),
        Workload("params: set", _wrap, lambda s: s.params.set("new", s.value)["new"], lambda s: nn.Parameter(s.value)),
        Workload("params: update", _wrap, lambda s: s.params.update(s.other), None),
        Workload("params: update_", _wrap, lambda s: s.params.update_(s.other), _copy_floor),
        Workload("params: clone", _wrap, lambda s: s.params.clone(), lambda s: tree_map(_clone, s.tree)),
        Workload("params: to_module", _wrap, _to_module, None),
        Workload("params: a step of SGD", _wrap, _step, _step_floor),
    ]


def _wrap(module: ModuleType) -> State:
    net = _mlp()
    params = module.TensorDictParams(module.TensorDict.from_module(_mlp()))
    tree = _tree(_mlp())
    tree_like = params.data.to_dict()
    return State(
        module=module,
        net=net,
        params=params,
        tree=tree_map(lambda leaf: nn.Parameter(leaf.clone()), tree_like),
        other=params.data.clone(),
        leaves=tree_leaves(tree),
        fresh=params.data.clone(),
        value=torch.ones(8),
    )


def _data(tensor: Tensor) -> Tensor:
    return tensor.data


def _clone(tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor.detach().clone())


def _copy_floor(state: State) -> Any:
    with torch.no_grad():
        torch._foreach_copy_(tree_leaves(state.tree), tree_leaves(state.other.to_dict()))
    return state.tree


def _step(state: State) -> None:
    with torch.no_grad():
        state.params.data.add_(state.other, alpha=-0.0)


def _step_floor(state: State) -> None:
    with torch.no_grad():
        torch._foreach_add_(state.leaves, state.leaves, alpha=-0.0)


# --- conversions ------------------------------------------------------------------------------------------------------


def _conversions() -> list[Workload]:
    return [
        Workload("from_dict, 10 leaves", _sources, lambda s: s.cls.from_dict(s.flat), lambda s: dict(s.flat)),
        Workload("from_dict, nested", _sources, lambda s: s.cls.from_dict(s.nested), _copy_of_nested),
        Workload("from_dict, auto_batch_size", _sources, lambda s: s.cls.from_dict(s.flat, auto_batch_size=True), None),
        Workload("to_dict, 10 leaves", _sources, lambda s: s.td.to_dict(), lambda s: dict(s.flat)),
        Workload("to_dict, nested", _sources, lambda s: s.deep.to_dict(), _copy_of_nested),
        Workload("from_any, nested dict", _sources, lambda s: s.module.from_any(s.nested), _copy_of_nested),
        Workload("from_any, mixed", _sources, lambda s: s.module.from_any(s.mixed), None),
        Workload("from_namedtuple", _sources, lambda s: s.cls.from_namedtuple(s.pair), None),
        Workload("to_namedtuple", _sources, lambda s: tuple(s.td.to_namedtuple()), lambda s: tuple(s.flat.values())),
        Workload("from_tuple", _sources, lambda s: s.cls.from_tuple(s.items), None),
        Workload("from_dataclass", _sources, lambda s: s.cls.from_dataclass(s.record), None),
        Workload("from_pytree", _sources, lambda s: s.cls.from_pytree(s.nested), None),
        Workload("to_pytree", _pytrees, lambda s: s.td.to_pytree(), None),
        Workload("from_struct_array", _sources, lambda s: s.cls.from_struct_array(s.array), _views_of_fields),
        Workload("to_struct_array", _sources, lambda s: s.td.to_struct_array().shape, None),
        Workload("numpy", _sources, lambda s: sorted(s.td.numpy()), None),
        Workload(
            "tolist", _sources, lambda s: s.one.tolist(), lambda s: [{"k0": row} for row in s.flat["k0"].unbind(0)]
        ),
    ]


def _sources(module: ModuleType) -> State:
    tensors, tree = flat(10), nested(5, 4)
    array = np.zeros(32, dtype=[("x", "f8"), ("y", "i8"), ("z", "f8", (3,))])
    pair = Pair(torch.randn(32, 4), torch.randn(32))
    return State(
        module=module,
        cls=module.TensorDict,
        flat=tensors,
        nested=tree,
        td=module.TensorDict(tensors, [32]),
        deep=module.TensorDict(tree, [32]),
        one=module.TensorDict({"k0": tensors["k0"]}, [32]),
        mixed={"pair": pair, "record": Record(*pair), "items": (1.0, pair.first), "number": 3},
        pair=pair,
        items=tuple(tensors.values()),
        record=Record(*pair),
        array=array,
    )


def _pytrees(module: ModuleType) -> State:
    return State(td=module.TensorDict.from_pytree(nested(5, 4)))


def _copy_of_nested(state: State) -> Any:
    return {name: dict(inner) for name, inner in state.nested.items()}


def _views_of_fields(state: State) -> Any:
    return {name: torch.from_numpy(state.array[name]) for name in state.array.dtype.names}
