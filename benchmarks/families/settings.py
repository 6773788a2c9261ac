"""Workloads under `set_lazy_legacy`, and of lazy views."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from workload import Context, State, Workload, build, flat, nested

BATCH = (8, 4)
LEAF = (8, 4, 3)
DATA = {**flat(10, *LEAF), **nested(2, 10, *LEAF)}


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    flattened = _lazily(lambda td: td.view(-1))
    swapped = _lazily(lambda td: td.transpose(0, 1))
    return [
        Workload("set_lazy_legacy, a block", build(flat(1)), _block),
        Workload("a block with view(-1)", build(DATA, BATCH), _in_a_block(lambda td: td.view(-1))),
        Workload("a block with transpose(0, 1)", build(DATA, BATCH), _in_a_block(lambda td: td.transpose(0, 1))),
        Workload("a block with unsqueeze(0)", build(DATA, BATCH), _in_a_block(lambda td: td.unsqueeze(0))),
        Workload("read through view(-1)", flattened, lambda s: s.td["k3"], lambda s: s.data["k3"].view(32, 3)),
        Workload("read through transpose", swapped, lambda s: s.td["k3"], lambda s: s.data["k3"].transpose(0, 1)),
        Workload("read nested through view(-1)", flattened, lambda s: s.td["n1", "k3"], _nested_floor),
        Workload("write through view(-1)", flattened, _write_flat, _write_flat_floor),
        Workload("write through transpose", swapped, _write_swapped, _write_swapped_floor),
        Workload("set_ through view(-1)", flattened, _copy, _copy_floor),
        Workload("values(nested, leaves) through view(-1)", flattened, lambda s: list(s.td.values(True, True))),
        Workload("apply through transpose", swapped, lambda s: s.td.apply(torch.neg)),
    ]


def _lazily(step: Callable[[Any], Any]) -> Callable[[ModuleType], State]:
    """A setup whose `td` is a lazy view; the setting is off again when it is measured."""

    def setup(module: ModuleType) -> State:
        state = build(DATA, BATCH)(module)
        with module.set_lazy_legacy(True):
            state.td = step(state.td)
        state.flat, state.swapped = torch.zeros(32, 3), torch.zeros(4, 8, 3)
        return state

    return setup


def _in_a_block(step: Callable[[Any], Any]) -> Callable[[State], Any]:
    def run(s: State) -> Any:
        with s.module.set_lazy_legacy(True):
            return step(s.td)

    return run


def _block(s: State) -> None:
    with s.module.set_lazy_legacy(True):
        pass


def _write_flat(s: State) -> None:
    s.td["k3"] = s.flat


def _write_flat_floor(s: State) -> None:
    s.data["k3"] = s.flat.view(8, 4, 3)


def _write_swapped(s: State) -> None:
    s.td["k3"] = s.swapped


def _write_swapped_floor(s: State) -> None:
    s.data["k3"] = s.swapped.transpose(0, 1)


def _copy(s: State) -> None:
    s.td.set_("k3", s.flat)


def _copy_floor(s: State) -> None:
    s.data["k3"].view(32, 3).copy_(s.flat)


def _nested_floor(s: State) -> Any:
    return s.data["n1"]["k3"].view(32, 3)
