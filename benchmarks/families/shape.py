"""Workloads that change the shape of the batch, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, flat, nested, tree_map

BATCH = (8, 4)
LEAF = (8, 4, 3)

_INDEX = torch.tensor([[0, 1], [2, 3], [4, 5]])
_MASK = (torch.arange(32) % 3 == 0).view(8, 4)


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    views: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
        "view(-1)": (lambda td: td.view(-1), lambda v: v.view(32, 3)),
        "view(2, 4, 4)": (lambda td: td.view(2, 4, 4), lambda v: v.view(2, 4, 4, 3)),
        "reshape(4, 8)": (lambda td: td.reshape(4, 8), lambda v: v.reshape(4, 8, 3)),
        "flatten(0, 1)": (lambda td: td.flatten(0, 1), lambda v: v.flatten(0, 1)),
        "unflatten(0, (2, 4))": (lambda td: td.unflatten(0, (2, 4)), lambda v: v.unflatten(0, (2, 4))),
        "permute(1, 0)": (lambda td: td.permute(1, 0), lambda v: v.permute(1, 0, 2)),
        "transpose(0, 1)": (lambda td: td.transpose(0, 1), lambda v: v.transpose(0, 1)),
        "unsqueeze(0)": (lambda td: td.unsqueeze(0), lambda v: v.unsqueeze(0)),
        "unsqueeze(-1)": (lambda td: td.unsqueeze(-1), lambda v: v.unsqueeze(2)),
        "expand(5, 8, 4)": (lambda td: td.expand(5, 8, 4), lambda v: v.expand(5, 8, 4, 3)),
    }
    copies: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
        "repeat(2, 1)": (lambda td: td.repeat(2, 1), lambda v: v.repeat(2, 1, 1)),
        "repeat_interleave(2, dim=0)": (
            lambda td: td.repeat_interleave(2, dim=0),
            lambda v: v.repeat_interleave(2, dim=0),
        ),
        "flip(0)": (lambda td: td.flip(0), lambda v: v.flip(0)),
        "roll(1, 0)": (lambda td: td.roll(1, 0), lambda v: v.roll(1, 0)),
        "movedim(0, 1)": (lambda td: td.movedim(0, 1), lambda v: v.movedim(0, 1)),
        "narrow(0, 2, 3)": (lambda td: td.narrow(0, 2, 3), lambda v: v.narrow(0, 2, 3)),
    }
    found = [_workload(f"{name}, 10 leaves", flat(10, *LEAF), run, leaf) for name, (run, leaf) in views.items()]
    for name in ("view(-1)", "permute(1, 0)", "unsqueeze(0)", "expand(5, 8, 4)"):
        found.append(_workload(f"{name}, 10 x 10 leaves", nested(10, 10, *LEAF), *views[name]))
    found += [_workload(f"{name}, 10 leaves", flat(10, *LEAF), run, leaf) for name, (run, leaf) in copies.items()]
    found += [
        Workload(
            "squeeze(1), 10 leaves",
            build(flat(10, 8, 1, 3), (8, 1)),
            lambda s: s.td.squeeze(1),
            lambda s: tree_map(lambda v: v.squeeze(1), s.data),
        ),
        Workload(
            "squeeze(), 10 leaves",
            build(flat(10, 8, 1, 3), (8, 1)),
            lambda s: s.td.squeeze(),
            lambda s: tree_map(lambda v: v.squeeze(1), s.data),
        ),
        Workload("gather(0, index), 10 leaves", build(flat(10, *LEAF), BATCH), _gather, _gather_floor),
        Workload(
            "masked_select, 10 leaves",
            build(flat(10, *LEAF), BATCH),
            lambda s: s.td.masked_select(_MASK),
            _masked_select_floor,
        ),
        Workload(
            "masked_fill, 10 leaves",
            build(flat(10, *LEAF), BATCH),
            lambda s: s.td.masked_fill(_MASK, 0.0),
            _masked_fill_floor,
        ),
        Workload("where, 10 leaves", _with_other, lambda s: s.td.where(_MASK, s.other), _where_floor),
        Workload(
            "torch.permute, 10 leaves",
            build(flat(10, *LEAF), BATCH),
            lambda s: torch.permute(s.td, (1, 0)),
            lambda s: tree_map(lambda v: v.permute(1, 0, 2), s.data),
        ),
        Workload(
            "torch.zeros_like, 10 leaves",
            build(flat(10, *LEAF), BATCH),
            lambda s: torch.zeros_like(s.td),
            lambda s: tree_map(torch.zeros_like, s.data),
        ),
        Workload(
            "with td.view(-1) as v: write",
            build(flat(10, *LEAF), BATCH),
            _view_and_back,
            _view_and_back_floor,
        ),
    ]
    return found


def _workload(name: str, data: dict[str, Any], run: Callable[[Any], Any], leaf: Callable[[Tensor], Tensor]) -> Workload:
    return Workload(name, build(data, BATCH), lambda s: run(s.td), lambda s: tree_map(leaf, s.data))


def _gather(state: State) -> Any:
    return state.td.gather(0, _INDEX)


def _gather_floor(state: State) -> Any:
    index = _INDEX.unsqueeze(-1).expand(3, 2, 3)
    return {key: value.gather(0, index) for key, value in state.data.items()}


def _masked_select_floor(state: State) -> Any:
    index = _MASK.nonzero(as_tuple=True)
    return {key: value[index] for key, value in state.data.items()}


def _masked_fill_floor(state: State) -> Any:
    mask = _MASK.unsqueeze(-1)
    return {key: value.masked_fill(mask, 0.0) for key, value in state.data.items()}


def _with_other(module: ModuleType) -> State:
    state = build(flat(10, *LEAF), BATCH)(module)
    state.other_data = flat(10, *LEAF)
    state.other = module.TensorDict(state.other_data, BATCH)
    return state


def _where_floor(state: State) -> Any:
    mask = _MASK.unsqueeze(-1)
    other = state.other_data
    return {key: torch.where(mask, value, other[key]) for key, value in state.data.items()}


_ROWS = torch.ones(32, 3)


def _view_and_back(state: State) -> Any:
    with state.td.view(-1) as view:
        view["k0"] = _ROWS
    return state.td


def _view_and_back_floor(state: State) -> Any:
    view = {key: value.view(32, 3) for key, value in state.data.items()}
    view["k0"] = _ROWS
    state.data = {key: value.view(8, 4, 3) for key, value in view.items()}
    return state.data
