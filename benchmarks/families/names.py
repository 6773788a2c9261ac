"""Workloads on containers whose dims have names: giving them, changing them, and carrying them along."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, flat, nested, tree_map

_NAMES = ["time", "env"]


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    small, nodes = _setup_names(flat(4)), _setup_names(nested(10, 4))
    found = [
        Workload("TensorDict(..., names=), 4 keys", build(flat(4), (32, 4)), _construct, None),
        Workload("TensorDict(..., names=), 10 x 4 keys", build(nested(10, 4), (32, 4)), _construct, None),
        Workload("names, 4 keys", small, lambda s: s.td.names, None),
        Workload("names = [...], 10 x 4 keys", nodes, _assign, None),
        Workload("set nested, 10 x 4 keys", nodes, _set_nested, None),
    ]
    for label, setup in (("4 keys", small), ("10 x 4 keys", nodes)):
        found += [
            Workload(f"rename(...), {label}", setup, lambda s: s.td.rename("x", "y"), None),
            Workload(f"rename(time=), {label}", setup, lambda s: s.td.rename(time="x"), None),
            Workload(f"rename_(...), {label}", setup, lambda s: s.td.rename_("time", "env"), None),
            Workload(f"refine_names(...), {label}", setup, lambda s: s.td.refine_names(..., "env"), None),
            Workload(f"[0], {label}", setup, lambda s: s.td[0], _each(lambda v: v[0])),
            Workload(f"permute(1, 0), {label}", setup, lambda s: s.td.permute(1, 0), _each(lambda v: v.permute(1, 0))),
            Workload(f"stack, {label}", setup, lambda s: torch.stack([s.td, s.td]), _stacks),
            Workload(f"sum(0), {label}", setup, lambda s: s.td.sum(0), _each(lambda v: v.sum(0))),
            Workload(f"[:, 0], {label}", setup, lambda s: s.td[:, 0], _each(lambda v: v[:, 0])),
            Workload(f"unsqueeze(1), {label}", setup, lambda s: s.td.unsqueeze(1), _each(lambda v: v.unsqueeze(1))),
            Workload(f"unbind(1), {label}", setup, lambda s: s.td.unbind(1), _columns),
            Workload(f"cat, {label}", setup, lambda s: torch.cat([s.td, s.td]), _cats),
            Workload(f"mean(1), {label}", setup, lambda s: s.td.mean(1), _each(lambda v: v.mean(1))),
            Workload(f"clone(), {label}", setup, lambda s: s.td.clone(), _each(Tensor.clone)),
        ]
    return found


def _setup_names(data: dict[str, Any]) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = build(data, (32, 4))(module)
        state.td.names = _NAMES
        state.inner = module.TensorDict({"x": torch.zeros(32, 4)}, (32, 4))
        return state

    return setup


def _construct(state: State) -> Any:
    return state.module.TensorDict(state.data, (32, 4), names=_NAMES)


def _assign(state: State) -> None:
    state.td.names = _NAMES


def _set_nested(state: State) -> None:
    state.td["inner"] = state.inner


def _each(fn: Callable[[Tensor], Any]) -> Callable[[State], Any]:
    return lambda s: tree_map(fn, s.data)


def _columns(state: State) -> Any:
    rows = tree_map(lambda v: iter(v.unbind(1)), state.data)
    return [tree_map(next, rows) for _ in range(4)]


def _stacks(state: State) -> Any:
    return tree_map(lambda v: torch.stack([v, v]), state.data)


def _cats(state: State) -> Any:
    return tree_map(lambda v: torch.cat([v, v]), state.data)
