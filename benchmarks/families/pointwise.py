"""Workloads that compute element by element: functions, arithmetic and bounds, in place and not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, flat, nested, tree_leaves, tree_map

_TREES = (("10 keys", flat(10)), ("100 keys", flat(100)), ("10 x 10 keys", nested(10, 10)))


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family.

    The floors are single `_foreach` calls on existing lists, whose results go into dicts. If torch lacks the `_foreach`
    function, the floor calls the function for each leaf.
    """
    found = []
    for label, data in _TREES:
        setup = _with_operands(data)
        for name, run, floor in (
            ("abs()", lambda s: s.td.abs(), lambda s: torch._foreach_abs(s.leaves)),
            ("abs_()", lambda s: s.td.abs_(), lambda s: torch._foreach_abs_(s.leaves)),
            ("td + td", _sum, _sum_floor),
            ("td * 2.5", lambda s: s.td * 2.5, lambda s: torch._foreach_mul(s.leaves, 2.5)),
            ("td * tensor", lambda s: s.td * s.tensor, _times_tensor_floor),
            ("1 - td", lambda s: 1 - s.td, lambda s: [1 - leaf for leaf in s.leaves]),
            ("mul_(td)", lambda s: s.td.mul_(s.ones), lambda s: torch._foreach_mul_(s.leaves, s.one_leaves)),
            ("mul_(1.0)", lambda s: s.td.mul_(1.0), lambda s: torch._foreach_mul_(s.leaves, 1.0)),
            ("isfinite()", lambda s: s.td.isfinite(), lambda s: [torch.isfinite(leaf) for leaf in s.leaves]),
        ):
            found.append(Workload(f"{name}, {label}", setup, run, _build_dicts(floor)))
    setup = _with_operands(flat(10))
    for name, run, floor in (
        ("td - td, keys in another order", lambda s: s.td - s.backwards, _minus_floor),
        ("add(td, default=tensor)", _add_default, _add_default_floor),
        ("td / tensor without dims", lambda s: s.td / s.scalar, lambda s: torch._foreach_div(s.leaves, s.scalar)),
        ("td ** 2", lambda s: s.td**2, lambda s: torch._foreach_pow(s.leaves, 2)),
        ("td % 2.5", lambda s: s.td % 2.5, lambda s: [leaf % 2.5 for leaf in s.leaves]),
        ("2 / td", lambda s: 2 / s.td, lambda s: [2 / leaf for leaf in s.leaves]),
        ("-td", lambda s: -s.td, lambda s: torch._foreach_neg(s.leaves)),
        ("exp()", lambda s: s.td.exp(), lambda s: torch._foreach_exp(s.leaves)),
        ("lerp", lambda s: s.td.lerp(s.other, 0.5), lambda s: torch._foreach_lerp(s.leaves, s.others, 0.5)),
        ("lerp_", lambda s: s.td.lerp_(s.td, 0.5), lambda s: torch._foreach_lerp_(s.leaves, s.leaves, 0.5)),
        ("addcmul", lambda s: s.td.addcmul(s.other, s.other), _addcmul_floor),
        ("clamp(0, 1)", lambda s: s.td.clamp(0.0, 1.0), _clamp_floor),
        ("maximum(td)", lambda s: s.td.maximum(s.other), lambda s: torch._foreach_maximum(s.leaves, s.others)),
        ("clamp_min_(-9)", lambda s: s.td.clamp_min_(-9.0), lambda s: torch._foreach_clamp_min_(s.leaves, -9.0)),
    ):
        found.append(Workload(f"{name}, 10 keys", setup, run, _build_dicts(floor)))
    for name, run, floor in (
        ("td + 1", lambda s: s.td + 1, lambda s: torch._foreach_add(s.leaves, 1)),
        ("mul_(1)", lambda s: s.td.mul_(1), lambda s: torch._foreach_mul_(s.leaves, 1)),
        ("mul_(td)", lambda s: s.td.mul_(s.ones), lambda s: torch._foreach_mul_(s.leaves, s.one_leaves)),
    ):
        found.append(Workload(f"{name}, 9 keys of mixed dtypes", _setup_dtypes, run, _build_dicts(floor)))
    setup = _setup_locked_operands(flat(10))
    found.append(Workload("td + td, locked, 10 keys", setup, _sum, _build_dicts(_sum_floor)))
    return found


def _with_operands(data: dict[str, Any]) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        other = tree_map(lambda leaf: leaf.sin() + 2, data)
        ones = tree_map(torch.ones_like, data)
        return State(
            td=module.TensorDict(tree_map(Tensor.clone, data), [32]),
            other=module.TensorDict(other, [32]),
            backwards=module.TensorDict(dict(reversed(other.items())), [32]),
            partial=module.TensorDict(dict(list(other.items())[1:]), [32]),
            ones=module.TensorDict(ones, [32]),
            tensor=torch.linspace(1, 2, 32),
            scalar=torch.tensor(2.5),
            data=data,
            leaves=tree_leaves(tree_map(Tensor.clone, data)),
            others=tree_leaves(other),
            one_leaves=tree_leaves(ones),
        )

    return setup


def _setup_locked_operands(data: dict[str, Any]) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = _with_operands(data)(module)
        state.td.lock_()
        state.other.lock_()
        return state

    return setup


def _setup_dtypes(module: ModuleType) -> State:
    dtypes = {"f": torch.float32, "i": torch.int64, "s": torch.int32}
    data = {f"{name}{i}": torch.full((32, 4), 3, dtype=dtype) for i in range(3) for name, dtype in dtypes.items()}
    ones = tree_map(torch.ones_like, data)
    return State(
        td=module.TensorDict(tree_map(Tensor.clone, data), [32]),
        ones=module.TensorDict(ones, [32]),
        data=data,
        leaves=tree_leaves(tree_map(Tensor.clone, data)),
        one_leaves=tree_leaves(ones),
    )


def _build_dicts(floor: Callable[[State], Any]) -> Callable[[State], Any]:
    """Return the floor with its list of results in dicts of the structure of the data."""

    def run(state: State) -> Any:
        found = floor(state)
        results = iter(state.leaves if found is None else found)
        data = state.data
        if type(next(iter(data.values()))) is not dict:
            return dict(zip(data, results, strict=True))
        return {key: dict(zip(names, results)) for key, names in data.items()}

    return run


def _sum(state: State) -> Any:
    return state.td + state.other


def _sum_floor(state: State) -> Any:
    return torch._foreach_add(state.leaves, state.others)


def _times_tensor_floor(state: State) -> Any:
    return torch._foreach_mul(state.leaves, [state.tensor[:, None]] * len(state.leaves))


def _minus_floor(state: State) -> Any:
    return torch._foreach_sub(state.leaves, state.others)


def _add_default(state: State) -> Any:
    return state.td.add(state.partial, default=state.scalar)


def _add_default_floor(state: State) -> Any:
    return torch._foreach_add(state.leaves, [state.scalar, *state.others[1:]])


def _addcmul_floor(state: State) -> Any:
    return torch._foreach_addcmul(state.leaves, state.others, state.others)


def _clamp_floor(state: State) -> Any:
    return [torch.clamp(leaf, 0.0, 1.0) for leaf in state.leaves]
