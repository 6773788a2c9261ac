"""Probabilistic modules, sequences that end in one, and composite distributions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Normal, constraints
from workload import Context, State, Workload

# The packages need not draw the same numbers to do the same work: a scale that vanishes beside the location, and a
# category that leaves nothing to others, make them equal.
_SCALE = 1e-12
_SURE = 1e4
_ONE = torch.Size()

# The keys of the parts of a composite distribution.
_PARTS: tuple[Any, ...] = ("x", "y", ("z", "w"))

# The bias of "biased_softplus_1.0": its softplus is 0.99, and the mapping adds 0.01 afterwards.
_SHIFT = math.log(math.expm1(0.99))

# Without the checks of their arguments and values, which take half the time of such rows on every side; the policies
# have them.
_UNCHECKED = {"validate_args": False}
_normal_of = partial(Normal, **_UNCHECKED)
_categorical_of = partial(Categorical, **_UNCHECKED)


class _Point(Distribution):
    """A distribution that takes next to no time: what is measured is the modules, not the arithmetic of densities."""

    has_rsample = True
    support = constraints.real
    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012 (as in torch)

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc = loc
        self.scale = scale
        super().__init__(loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    mode = median = mean

    def rsample(self, sample_shape: Any = _ONE) -> Tensor:
        return self.loc.expand(sample_shape + self.loc.shape) if sample_shape else self.loc

    sample = rsample

    def log_prob(self, value: Tensor) -> Tensor:
        return value

    def entropy(self) -> Tensor:
        return self.scale


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family with distributions."""
    return _modules() + _sequences() + _composites() + _parts()


def _modules() -> list[Workload]:
    kinds = {
        "deterministic": lambda dist: dist.mean,
        "mode": lambda dist: dist.mode,
        "median": lambda dist: dist.median,
        "mean": lambda dist: dist.mean,
        "random": lambda dist: dist.rsample(),
    }
    found = []
    for kind, take in kinds.items():
        for scored in (False, True):
            name = f"{kind}, log-prob" if scored else kind
            found.append(Workload(name, _normal(kind, scored), _call, _normal_by_hand(take, scored)))
    by_block = Workload("mode, by set_interaction_type", _normal("random", False), _in_block, _normal_by_hand(_mode))
    return [
        *found,
        by_block,
        Workload("random, 10 samples", _normal("random", False, 10), _call, _ten_by_hand),
        Workload("random, by position", _normal("random", False), _by_position, lambda s: _point(s).rsample()),
        Workload("categorical, random, log-prob", _categorical, _call, _categorical_by_hand),
        Workload("get_dist", _normal("random", False), lambda s: s.net.get_dist(s.td).loc, lambda s: _point(s).loc),
        Workload("log_prob", _normal("random", False), lambda s: s.net.log_prob(s.td), _log_prob_by_hand),
    ]


def _sequences() -> list[Workload]:
    policy, scored = _policy("deterministic", False), _policy("random", True)
    return [
        Workload("policy, deterministic", policy, _call, _policy_by_hand),
        Workload("policy, random, log-prob", scored, _call, _scored_policy_by_hand),
        Workload("policy, by position", policy, lambda s: s.net(s.x), _policy_values),
        Workload("policy: get_dist", policy, lambda s: s.net.get_dist(s.td).loc, lambda s: _policy_dist(s).loc),
        Workload("policy: log_prob", policy, lambda s: s.net.log_prob(s.td), _policy_log_prob),
        Workload("policy: log_prob, dist given", policy, _given_dist, lambda s: s.dist.log_prob(s.data["action"])),
        Workload("two values: forward", _two_values, _call, _two_values_by_hand),
        Workload("two values: log_prob", _two_values, lambda s: s.net.log_prob(s.td), _two_values_log_prob),
    ]


def _composites() -> list[Workload]:
    real = "composite of torch's"
    parts = [
        Workload("composite: make", _composite(), _made_composite, _parts_of),
        Workload("composite: sample", _composite(), lambda s: s.dist.sample(), _sampled_by_hand),
        Workload("composite: mode", _composite(), lambda s: s.dist.mode, _modes_by_hand),
        Workload("composite: log_prob", _composite(), _score, _scores_by_hand),
        Workload("composite: log_prob, sum", _composite(True), _score, _sum_by_hand),
        Workload("composite: entropy", _composite(), lambda s: s.dist.entropy(), _entropies_by_hand),
        Workload("composite: entropy, sum", _composite(True), lambda s: s.dist.entropy(), _entropy_by_hand),
        Workload(f"{real}: make", _composite(real=True), _made_composite, _parts_of),
        Workload(f"{real}: sample of 10", _composite(real=True), lambda s: s.dist.sample((10,)), _ten_sampled_by_hand),
        Workload(f"{real}: log_prob", _composite(real=True), _score, _scores_by_hand),
        Workload(f"{real}: log_prob, sum", _composite(True, real=True), _score, _sum_by_hand),
    ]
    modules = [
        Workload("composite module", _composite_module(False), _call, _module_by_hand(False)),
        Workload("composite module, log-prob", _composite_module(True), _call, _module_by_hand(True)),
        Workload("composite module, log-prob, sum", _composite_module(True, True), _call, _module_by_hand(True, True)),
    ]
    return parts + modules


def _parts() -> list[Workload]:
    return [
        Workload("NormalParamExtractor", _extractor, lambda s: s.net(s.both), lambda s: _extract(s.both)),
        Workload("NormalParamExtractor, module", _extractor, lambda s: s.wrapped(s.td), _extracted_by_hand),
        Workload("make a probabilistic module", _policy("random", True), _make_module, None),
        Workload("make a policy", _policy("random", True), _make_policy, None),
    ]


# --- states -----------------------------------------------------------------------------------------------------------


def _state(module: ModuleType, aggregate: bool = False) -> State:
    """A container, and the same as a dict, with the parameters of a normal distribution and a value of it."""
    names = importlib.import_module(f"{module.__name__}.nn")
    names.set_composite_lp_aggregate(aggregate).set()
    loc = torch.ones(32, 8)
    entries = {"loc": loc, "scale": torch.full_like(loc, _SCALE), "action": loc.clone(), "obs": torch.randn(32, 8)}
    return State(
        nn=names,
        module=module,
        td=module.TensorDict(dict(entries), [32]),
        data=dict(entries),
        x=entries["obs"],
        loc=entries["loc"],
        scale=entries["scale"],
        both=torch.randn(32, 16),
    )


def _normal(kind: str, scored: bool, num_samples: int | None = None) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = _state(module)
        state.net = state.nn.ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=_Point,
            default_interaction_type=kind,
            return_log_prob=scored,
            num_samples=num_samples,
        )
        return state

    return setup


def _categorical(module: ModuleType) -> State:
    state = _state(module)
    logits = torch.randn(32, 5)
    logits[:, 2] += _SURE
    state.td = module.TensorDict({"logits": logits}, [32])
    state.data = {"logits": logits}
    state.net = state.nn.ProbabilisticTensorDictModule(
        ["logits"], ["a"], distribution_class=_categorical_of, default_interaction_type="random", return_log_prob=True
    )
    return state


def _policy(kind: str, scored: bool) -> Callable[[ModuleType], State]:
    """A layer, what makes a location and a scale of its result, and a value of the normal distribution."""

    def setup(module: ModuleType) -> State:
        state = _state(module)
        state.layer = nn.Linear(8, 16)
        # So that the scale is at its bound, and samples differ by less than a digest shows.
        state.layer.weight.data.zero_()
        state.layer.bias.data.copy_(torch.cat([torch.ones(8), torch.full((8,), -100.0)]))
        state.extractor = state.nn.NormalParamExtractor("exp", _SCALE)
        state.kind, state.scored = kind, scored
        state.parts = [
            state.nn.TensorDictModule(state.layer, ["obs"], ["params"]),
            state.nn.TensorDictModule(state.extractor, ["params"], ["loc", "scale"]),
            _probabilistic(state),
        ]
        state.net = state.nn.ProbabilisticTensorDictSequential(*state.parts)
        state.dist = state.net.get_dist(state.td)
        return state

    return setup


def _probabilistic(state: State) -> Any:
    return state.nn.ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["action"],
        distribution_class=Normal,
        default_interaction_type=state.kind,
        return_log_prob=state.scored,
    )


def _two_values(module: ModuleType) -> State:
    """A sequence of two values; the second one depends on the first."""
    state = _state(module)
    make, draw = state.nn.TensorDictModule, state.nn.ProbabilisticTensorDictModule
    state.net = state.nn.ProbabilisticTensorDictSequential(
        draw(["loc", "scale"], ["a"], distribution_class=_normal_of),
        make(_shift, ["a"], [("b", "loc"), ("b", "scale")]),
        draw({"loc": ("b", "loc"), "scale": ("b", "scale")}, ["c"], distribution_class=_normal_of),
        return_composite=True,
    )
    state.td["a"] = state.td["c"] = state.data["a"] = state.data["c"] = state.loc
    return state


def _shift(a: Tensor) -> tuple[Tensor, Tensor]:
    return a + 1, torch.ones_like(a)


def _composite(aggregate: bool = False, real: bool = False) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = _state(module, aggregate)
        state.arguments = {name: {"loc": state.loc + i, "scale": state.scale} for i, name in enumerate(_PARTS)}
        if real:
            logits = torch.randn(32, 5)
            logits[:, 2] += _SURE
            state.arguments["y"] = {"logits": logits}
        state.params = module.TensorDict(state.arguments, [32])
        state.map = dict.fromkeys(_PARTS, _Point)
        if real:
            state.map = dict(zip(_PARTS, (_normal_of, _categorical_of, _normal_of), strict=True))
        state.dist = state.nn.CompositeDistribution(state.params, state.map)
        state.value = state.dist.sample()
        state.by_hand = _made_parts(state)
        state.values = [dist.sample() for dist in state.by_hand]
        return state

    return setup


def _composite_module(scored: bool, aggregate: bool = False) -> Callable[[ModuleType], State]:
    make = _composite(aggregate)

    def setup(module: ModuleType) -> State:
        state = make(module)
        state.td = module.TensorDict({"params": state.params}, [32])
        state.net = state.nn.ProbabilisticTensorDictModule(
            ["params"],
            list(_PARTS),
            distribution_class=state.nn.CompositeDistribution,
            distribution_kwargs={"distribution_map": state.map},
            default_interaction_type="random",
            return_log_prob=scored,
        )
        return state

    return setup


def _extractor(module: ModuleType) -> State:
    state = _state(module)
    state.td["both"] = state.data["both"] = state.both
    state.net = state.nn.NormalParamExtractor()
    state.wrapped = state.nn.TensorDictModule(state.net, ["both"], ["loc", "scale"])
    return state


# --- calls ------------------------------------------------------------------------------------------------------------


def _call(state: State) -> Any:
    return state.net(state.td)


def _in_block(state: State) -> Any:
    with state.nn.set_interaction_type("mode"):
        return state.net(state.td)


def _by_position(state: State) -> Any:
    return state.net(state.loc, state.scale)


def _score(state: State) -> Any:
    return state.dist.log_prob(state.value)


def _given_dist(state: State) -> Any:
    return state.net.log_prob(state.td, dist=state.dist)


def _made_composite(state: State) -> Any:
    dist = state.nn.CompositeDistribution(state.params, state.map)
    return [list(dist.dists), dist.dists["x"].loc]


def _make_module(state: State) -> Any:
    module = _probabilistic(state)
    return [list(module.in_keys), list(module.out_keys)]


def _make_policy(state: State) -> Any:
    module = state.nn.ProbabilisticTensorDictSequential(*state.parts)
    return [list(module.in_keys), list(module.out_keys)]


# --- the same by hand -------------------------------------------------------------------------------------------------


def _mode(dist: Normal) -> Tensor:
    return dist.mode


def _point(state: State) -> _Point:
    return _Point(loc=state.data["loc"], scale=state.data["scale"])


def _normal_by_hand(take: Callable[[Any], Tensor], scored: bool = False) -> Callable[[State], Any]:
    def call(state: State) -> Any:
        data, dist = state.data, _point(state)
        data["action"] = action = take(dist)
        if scored:
            data["action_log_prob"] = dist.log_prob(action)
        return data

    return call


def _ten_by_hand(state: State) -> Any:
    expanded = {name: value.expand(10, *value.shape) for name, value in state.data.items()}
    expanded["action"] = _point(state).rsample((10,))
    return expanded


def _log_prob_by_hand(state: State) -> Any:
    return _point(state).log_prob(state.data["action"])


def _categorical_by_hand(state: State) -> Any:
    data = state.data
    dist = _categorical_of(logits=data["logits"])
    data["a"] = a = dist.sample()
    data["a_log_prob"] = dist.log_prob(a)
    return data


def _policy_dist(state: State) -> Normal:
    data = state.data
    data["params"] = params = state.layer(data["obs"])
    data["loc"], data["scale"] = loc, scale = state.extractor(params)
    return Normal(loc=loc, scale=scale)


def _policy_by_hand(state: State) -> Any:
    state.data["action"] = _policy_dist(state).mean
    return state.data


def _scored_policy_by_hand(state: State) -> Any:
    dist, data = _policy_dist(state), state.data
    data["action"] = action = dist.rsample()
    data["action_log_prob"] = dist.log_prob(action)
    return data


def _policy_values(state: State) -> Any:
    params = state.layer(state.x)
    loc, scale = state.extractor(params)
    return params, loc, scale, Normal(loc=loc, scale=scale).mean


def _policy_log_prob(state: State) -> Any:
    return _policy_dist(state).log_prob(state.data["action"])


def _two_values_by_hand(state: State) -> Any:
    data = state.data
    data["a"] = a = _normal_of(loc=data["loc"], scale=data["scale"]).mean
    data["b"] = b = {}
    b["loc"], b["scale"] = _shift(a)
    data["c"] = _normal_of(loc=b["loc"], scale=b["scale"]).mean
    return data


def _two_values_log_prob(state: State) -> Any:
    data = state.data
    first = _normal_of(loc=data["loc"], scale=data["scale"])
    loc, scale = _shift(data["a"])
    second = _normal_of(loc=loc, scale=scale)
    return {"a_log_prob": first.log_prob(data["a"]), "c_log_prob": second.log_prob(data["c"])}


def _made_parts(state: State) -> list[Any]:
    return [make(**arguments) for make, arguments in zip(state.map.values(), state.arguments.values(), strict=True)]


def _parts_of(state: State) -> Any:
    dists = dict(zip(_PARTS, _made_parts(state), strict=True))
    return [list(dists), dists["x"].loc]


def _name_values(values: list[Tensor], suffix: str = "") -> dict[str, Any]:
    x, y, w = values
    return {f"x{suffix}": x, f"y{suffix}": y, "z": {f"w{suffix}": w}}


def _sampled_by_hand(state: State) -> Any:
    return _name_values([dist.sample() for dist in state.by_hand])


def _ten_sampled_by_hand(state: State) -> Any:
    return _name_values([dist.sample((10,)) for dist in state.by_hand])


def _modes_by_hand(state: State) -> Any:
    return _name_values([dist.mode for dist in state.by_hand])


def _scores(state: State) -> list[Tensor]:
    return [dist.log_prob(value) for dist, value in zip(state.by_hand, state.values, strict=True)]


def _scores_by_hand(state: State) -> Any:
    return _name_values(_scores(state), "_log_prob")


def _sum_by_hand(state: State) -> Any:
    return _sum_values(_scores(state))


def _entropies_by_hand(state: State) -> Any:
    return _name_values([dist.entropy() for dist in state.by_hand], "_entropy")


def _entropy_by_hand(state: State) -> Any:
    return _sum_values([dist.entropy() for dist in state.by_hand])


def _sum_values(values: list[Tensor]) -> Tensor:
    x, y, w = [value if value.ndim == 1 else value.sum(-1) for value in values]
    return x + y + w


def _module_by_hand(scored: bool, aggregate: bool = False) -> Callable[[State], Any]:
    def call(state: State) -> Any:
        dists = _made_parts(state)
        values = [dist.rsample() for dist in dists]
        found = {"params": {"x": state.arguments["x"], "y": state.arguments["y"]}, **_name_values(values)}
        found["params"]["z"] = {"w": state.arguments["z", "w"]}
        if scored:
            scores = [dist.log_prob(value) for dist, value in zip(dists, values, strict=True)]
            parts = _name_values(scores, "_log_prob")
            found["z"].update(parts.pop("z"))
            found.update(parts)
            if aggregate:
                found["sample_log_prob"] = _sum_values(scores)
        return found

    return call


def _extract(both: Tensor) -> tuple[Tensor, Tensor]:
    loc, scale = both.chunk(2, -1)
    return loc, (nn.functional.softplus(scale + _SHIFT) + 0.01).clamp_min(1e-4)


def _extracted_by_hand(state: State) -> Any:
    state.data["loc"], state.data["scale"] = _extract(state.data["both"])
    return state.data
