"""Modules and sequences of them, called with containers and with tensors, and with parameters of their own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from workload import Context, Limit, State, Workload, flat

_WIDTH = 8
_COPIES = 8
_FOUR_LAYERS = (Limit("floor", at_most=2.0, called="the four layers called by hand"),)


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family that draw nothing."""
    return _containers() + _arguments() + _keys() + _parameters() + _construction()


def _containers() -> list[Workload]:
    found = []
    for keys in (4, 100):
        found.append(Workload(f"a function, {keys} keys", _module(keys=keys), _call, _by_hand))
        for count in (1, 4, 16):
            functions = _sequence(_function, count, keys)
            found.append(Workload(f"{count} functions in a sequence, {keys} keys", functions, _call, _by_hand))
        found.append(Workload(f"a layer, {keys} keys", _module(_layer, keys=keys), _call, _by_hand))
        layers = _sequence(_layer, 4, keys)
        found.append(Workload(f"4 layers in a sequence, {keys} keys", layers, _call, _by_hand, limits=_FOUR_LAYERS))
    sixteen = _sequence(_layer, 16)
    return [
        *found,
        Workload("16 layers in a sequence", sixteen, _call, _by_hand),
        Workload("4 layers, without gradients", _sequence(_layer, 4), _call_without_grad, _by_hand_without_grad),
        Workload("4 functions in two sequences", _sequence(_function, 4, halved=True), _call, _by_hand),
    ]


def _arguments() -> list[Workload]:
    four = _sequence(_layer, 4)
    return [
        Workload("a function, by position", _module(), lambda s: s.net(s.x), _first_by_hand),
        Workload("a function, by keyword", _module(), lambda s: s.net(k0=s.x), _first_by_hand),
        Workload("2 arguments, by position", _two_arguments, lambda s: s.net(s.x, s.x), lambda s: s.x + s.x),
        Workload("2 arguments, by keyword", _two_arguments, lambda s: s.net(k0=s.x, in_k1=s.x), lambda s: s.x + s.x),
        Workload("4 layers, by position", four, lambda s: s.net(s.x), _all_by_hand),
        Workload("4 layers, by keyword", four, lambda s: s.net(k0=s.x), _all_by_hand),
        Workload("dispatch, by position", _setup_decorated_module, lambda s: s.net(s.x, s.x), lambda s: s.x + s.x),
        Workload("dispatch, by keyword", _setup_decorated_module, lambda s: s.net(k0=s.x, k1=s.x), lambda s: s.x + s.x),
        Workload("dispatch, container", _setup_decorated_module, _call, _added_by_hand),
    ]


def _keys() -> list[Workload]:
    nested = _module(_function, ("in", "k0"), ("out", "a", "h"))
    several: dict[str, Any] = {"in_keys": ["k0"], "out_keys": ["h0", "h1", "h2"]}
    by_name = _module(_subtract, {"other": "k0", "input": "k1"})
    return [
        Workload("in-keys by name", by_name, _call, _subtracted_by_hand),
        Workload("nested keys", nested, _call, _nested_by_hand),
        Workload("4 functions, nested keys", _sequence(_function, 4, nested=True), _call, _nested_chain_by_hand),
        Workload("3 results", _module(_thrice, **several), _call, _thrice_by_hand),
        Workload("3 results, one dropped", _module(_thrice, "k0", ["h0", "_", "h2"]), _call, _two_of_three),
        Workload("a dict as result", _module(_as_dict, **several), _call, _thrice_by_hand),
        Workload("select_out_keys, 3 results", _setup_selection(_thrice), _call, _one_of_three),
        Workload("select_out_keys, 4 layers", _selected_sequence, _call, _last_of_four),
        Workload("inplace=False", _module(inplace=False), _call, _apart),
        Workload("inplace='empty'", _module(inplace="empty"), _call, _apart),
        Workload("4 functions, inplace=False", _sequence(_function, 4, inplace=False), _call, _apart_in_sequence),
        Workload("tensordict_out", _module(), lambda s: s.net(s.td, tensordict_out=s.out), _apart),
    ]


def _parameters() -> list[Workload]:
    return [
        Workload("with parameters, a layer", _functional(1), _with_parameters, _swapped_by_hand),
        Workload("with parameters, 4 layers", _functional(4), _with_parameters, _swapped_by_hand),
        Workload("ensemble of a layer", _ensemble(1), _call, _vmapped_by_hand),
        Workload("ensemble of 4 layers", _ensemble(4), _call, _vmapped_by_hand),
        Workload("vmap over parameters, 4 layers", _ensemble(4), _run_vmap, _vmapped_by_hand),
    ]


def _construction() -> list[Workload]:
    return [
        Workload(
            "make a module",
            _long,
            lambda s: _keys_of(s.nn.TensorDictModule(s.layers[0], ["a"], ["b"])),
            None,
        ),
        Workload("make a module, nested keys", _long, _make_nested, None),
        Workload(
            "make a sequence of 4",
            _long,
            lambda s: _keys_of(s.nn.TensorDictSequential(*s.modules)),
            None,
        ),
        Workload("make a sequence of 16", _long, lambda s: _keys_of(s.nn.TensorDictSequential(s.many)), None),
    ]


# --- what is wrapped --------------------------------------------------------------------------------------------------


def _layer() -> Callable[[Tensor], Tensor]:
    return nn.Linear(_WIDTH, _WIDTH)


def _function() -> Callable[[Tensor], Tensor]:
    """One that takes next to no time."""
    return torch.detach


def _thrice(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


def _as_dict(x: Tensor) -> dict[str, Tensor]:
    return {"h0": x, "h1": x, "h2": x}


def _subtract(input: Tensor, other: Tensor) -> Tensor:
    return input - other


# --- states -----------------------------------------------------------------------------------------------------------


def _state(module: ModuleType, keys: int = 4) -> State:
    """A container of `keys` entries, the same as a dict, and one of each whose entries are nested in "in"."""
    entries = flat(keys, 32, _WIDTH)
    return State(
        nn=importlib.import_module(f"{module.__name__}.nn"),
        module=module,
        td=module.TensorDict(dict(entries), [32]),
        data=dict(entries),
        x=entries["k0"],
        out=module.TensorDict({}, [32]),
        layers=[],
        steps=[],
    )


def _module(
    wrapped: Callable[..., Any] = _function, in_keys: Any = "k0", out_keys: Any = "h0", keys: int = 4, **options: Any
) -> Callable[[ModuleType], State]:
    """One module; `_layer` and `_function` make what is wrapped, anything else is wrapped itself."""

    def setup(module: ModuleType) -> State:
        layer = wrapped() if wrapped in (_layer, _function) else wrapped
        state = _state(module, keys)
        state.td["in"] = module.TensorDict({"k0": state.x}, [32])
        state.data["in"] = {"k0": state.x}
        state.layers, state.steps = [layer], [("k0", "h0")]
        state.net = state.nn.TensorDictModule(layer, in_keys=in_keys, out_keys=out_keys, **options)
        return state

    return setup


def _sequence(
    wrapped: Callable[[], Any], count: int, keys: int = 4, nested: bool = False, halved: bool = False, **options: Any
) -> Callable[[ModuleType], State]:
    """A chain of modules that begins at "k0" and ends at "h0"."""

    def setup(module: ModuleType) -> State:
        layers = [wrapped() for _ in range(count)]
        state = _state(module, keys)
        names = ["k0", *[f"h{i}" for i in range(count)]]
        path: list[Any] = [("in", name) for name in names] if nested else list(names)
        state.td["in"] = module.TensorDict({"k0": state.x}, [32])
        state.data["in"] = {"k0": state.x}
        state.layers, state.steps = layers, list(pairwise(names))
        make, join = state.nn.TensorDictModule, state.nn.TensorDictSequential
        chain = [make(layer, [a], [b]) for layer, (a, b) in zip(layers, pairwise(path), strict=True)]
        state.net = join(join(*chain[:2]), join(*chain[2:])) if halved else join(*chain, **options)
        return state

    return setup


def _two_arguments(module: ModuleType) -> State:
    state = _state(module)
    state.net = state.nn.TensorDictModule(torch.add, ["k0", ("in", "k1")], ["h0"])
    return state


def _setup_decorated_module(module: ModuleType) -> State:
    state = _state(module)

    class Add(nn.Module):
        in_keys = ("k0", "k1")
        out_keys = ("h0",)

        @state.nn.dispatch  # type: ignore[untyped-decorator]
        def forward(self, tensordict: Any) -> Any:
            return tensordict.set("h0", tensordict.get("k0") + tensordict.get("k1"))

    state.net = Add()
    return state


def _setup_selection(wrapped: Callable[..., Any]) -> Callable[[ModuleType], State]:
    make = _module(wrapped, "k0", ["h0", "h1", "h2"])

    def setup(module: ModuleType) -> State:
        state = make(module)
        state.net.select_out_keys("h1")
        return state

    return setup


def _selected_sequence(module: ModuleType) -> State:
    state = _sequence(_layer, 4)(module)
    state.net.select_out_keys("h3")
    return state


def _functional(count: int) -> Callable[[ModuleType], State]:
    """A chain, and other parameters for it."""

    def setup(module: ModuleType) -> State:
        state = _sequence(_layer, count)(module)
        if count == 1:
            state.net = state.net[0]
        values = {name: torch.full_like(leaf, 0.1) for name, leaf in state.net.named_parameters()}
        state.params = module.TensorDict.from_module(state.net).clone().detach()
        state.params.apply_(lambda leaf: leaf.fill_(0.1))
        state.places = [(layer, name) for layer in state.layers for name in ("weight", "bias")]
        state.news = [nn.Parameter(value) for value in values.values()]
        return state

    return setup


def _ensemble(count: int) -> Callable[[ModuleType], State]:
    """Copies of a chain, with parameters that do not depend on how they are reset."""

    def setup(module: ModuleType) -> State:
        state = _sequence(_layer, count)(module)
        if count == 1:
            state.net = state.net[0]
        state.td = state.td.select("k0")
        state.template = state.net
        state.net = state.nn.EnsembleModule(state.net, _COPIES)
        copies = [nn.Sequential(*[nn.Linear(_WIDTH, _WIDTH) for _ in range(count)]) for _ in range(_COPIES)]
        for parameter in [p for net in (state.net, *copies) for p in net.parameters()]:
            parameter.data.fill_(0.1)
        state.stacked, _ = stack_module_state(copies)
        state.plain = copies[0]
        return state

    return setup


def _long(module: ModuleType) -> State:
    state = _sequence(_layer, 16)(module)
    state.many = list(state.net)
    state.modules = state.many[:4]
    return state


# --- calls ------------------------------------------------------------------------------------------------------------


def _call(state: State) -> Any:
    return state.net(state.td)


def _call_without_grad(state: State) -> Any:
    with torch.no_grad():
        return state.net(state.td)


def _with_parameters(state: State) -> Any:
    with state.params.to_module(state.net):
        return state.net(state.td)


def _run_vmap(state: State) -> Any:
    def call(params: Any, td: Any) -> Any:
        with params.to_module(state.template):
            return state.template(td)

    return torch.vmap(call, (0, None))(state.net.params_td, state.td)


def _make_nested(state: State) -> Any:
    make = state.nn.TensorDictModule
    return _keys_of(make(state.layers[0], in_keys=[("a", "b")], out_keys=[("a", "c"), "d"], inplace=False))


def _keys_of(module: Any) -> Any:
    return [list(module.in_keys), list(module.out_keys)]


# --- the same by hand -------------------------------------------------------------------------------------------------


def _by_hand(state: State) -> Any:
    data = state.data
    for layer, (source, target) in zip(state.layers, state.steps, strict=True):
        data[target] = layer(data[source])
    return data


def _by_hand_without_grad(state: State) -> Any:
    with torch.no_grad():
        return _by_hand(state)


def _first_by_hand(state: State) -> Any:
    return state.layers[0](state.x)


def _all_by_hand(state: State) -> Any:
    values, x = [], state.x
    for layer in state.layers:
        x = layer(x)
        values.append(x)
    return tuple(values)


def _added_by_hand(state: State) -> Any:
    state.data["h0"] = state.data["k0"] + state.data["k1"]
    return state.data


def _subtracted_by_hand(state: State) -> Any:
    state.data["h0"] = _subtract(other=state.data["k0"], input=state.data["k1"])
    return state.data


def _nested_by_hand(state: State) -> Any:
    state.data.setdefault("out", {}).setdefault("a", {})["h"] = state.layers[0](state.data["in"]["k0"])
    return state.data


def _nested_chain_by_hand(state: State) -> Any:
    data = state.data
    for layer, (source, target) in zip(state.layers, state.steps, strict=True):
        data["in"][target] = layer(data["in"][source])
    return data


def _thrice_by_hand(state: State) -> Any:
    data = state.data
    data["h0"], data["h1"], data["h2"] = _thrice(data["k0"])
    return data


def _two_of_three(state: State) -> Any:
    data = state.data
    data["h0"], _, data["h2"] = _thrice(data["k0"])
    return data


def _one_of_three(state: State) -> Any:
    _, state.data["h1"], _ = _thrice(state.data["k0"])
    return state.data


def _last_of_four(state: State) -> Any:
    x = state.data["k0"]
    for layer in state.layers:
        x = layer(x)
    state.data["h3"] = x
    return state.data


def _apart(state: State) -> Any:
    return {"h0": state.layers[0](state.data["k0"])}


def _apart_in_sequence(state: State) -> Any:
    data = {"k0": state.data["k0"]}
    for layer, (source, target) in zip(state.layers, state.steps, strict=True):
        data[target] = layer(data[source])
    del data["k0"]
    return data


def _swapped_by_hand(state: State) -> Any:
    olds = [getattr(module, name) for module, name in state.places]
    for (module, name), new in zip(state.places, state.news, strict=True):
        setattr(module, name, new)
    result = _by_hand(state)
    for (module, name), old in zip(state.places, olds, strict=True):
        setattr(module, name, old)
    return result


def _vmapped_by_hand(state: State) -> Any:
    def call(params: dict[str, Tensor], x: Tensor) -> list[Tensor]:
        values, stride = [], 2
        names = list(params)
        for at in range(0, len(names), stride):
            pair = {"weight": params[names[at]], "bias": params[names[at + 1]]}
            x = functional_call(state.plain[at // stride], pair, (x,))
            values.append(x)
        return values

    values = torch.vmap(call, (0, None))(state.stacked, state.x)
    entries = {f"h{i}": value for i, value in enumerate(values)}
    return {"k0": state.x.expand(_COPIES, *state.x.shape), **entries}
