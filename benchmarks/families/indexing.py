"""Workloads that index the batch dimensions, reading and writing."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, chain, flat, nested, tree_map

BATCH = (32, 4)
LEAF = (32, 4, 3)

_MASK = torch.arange(32) % 3 == 0
_INTS = torch.tensor([1, 5, 9, 30])
_LIST = [1, 5, 9, 30]


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    found = []
    for leaves in (1, 10, 100):
        target = "near_floor" if leaves == 10 else ""
        label = f"{leaves} leaf" if leaves == 1 else f"{leaves} leaves"
        found += [
            _read(f"td[3], {label}", flat(leaves, *LEAF), lambda: 3, target=target),
            _read(f"td[4:20], {label}", flat(leaves, *LEAF), lambda: slice(4, 20), target=target),
            _write(f"td[3] = row, {label}", flat(leaves, *LEAF), lambda: 3),
            _write(f"td[4:20] = rows, {label}", flat(leaves, *LEAF), lambda: slice(4, 20)),
        ]
    # The floor's index is what a careful programmer would pass to each of ten tensors: converted once.
    kinds: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "0:32:3": (lambda: slice(0, 32, 3), None),
        "range": (lambda: range(4, 20, 2), lambda: torch.arange(4, 20, 2)),
        "list": (lambda: _LIST, lambda: torch.tensor(_LIST)),
        "bool mask": (lambda: _MASK, lambda: _MASK.nonzero().squeeze(1)),
        "int tensor": (lambda: _INTS, None),
        "(2, :)": (lambda: (2, slice(None)), None),
        "(2, 1)": (lambda: (2, 1), None),
        "(1:9, int tensor)": (lambda: (slice(1, 9), _COLUMNS), None),
        "(..., 0)": (lambda: (Ellipsis, 0), lambda: (slice(None), 0)),
        "None": (lambda: None, None),
    }
    for kind, (index, floor_index) in kinds.items():
        found.append(_read(f"td[{kind}], 10 leaves", flat(10, *LEAF), index, floor_index))
    for kind in ("0:32:3", "range", "list", "bool mask", "int tensor", "(2, :)", "(..., 0)"):
        found.append(_write(f"td[{kind}] = rows, 10 leaves", flat(10, *LEAF), *kinds[kind]))
    found += [
        # Nothing need be done: the floor is the dict itself.
        Workload("td[...], 10 leaves", build(flat(10, *LEAF), BATCH), lambda s: s.td[...], lambda s: s.data),
        _read("td[3], 10 x 10 leaves", nested(10, 10, *LEAF), lambda: 3),
        _read("td[4:20], 10 x 10 leaves", nested(10, 10, *LEAF), lambda: slice(4, 20)),
        _read("td[3], 20 deep", chain(20, 1, *LEAF), lambda: 3),
        _write("td[3] = row, 10 x 10 leaves", nested(10, 10, *LEAF), lambda: 3),
        Workload("td[3] = 0, 10 leaves", build(flat(10, *LEAF), BATCH), _write_number, _write_number_floor),
        Workload("td[3] = dict, 10 leaves", _with_dict, _write_dict, _write_dict_floor),
    ]
    return found


_COLUMNS = torch.tensor([0, 2])


def _read(
    name: str,
    data: dict[str, Any],
    index: Callable[[], Any],
    floor_index: Callable[[], Any] | None = None,
    target: str = "",
) -> Workload:
    make = floor_index or index
    return Workload(
        name,
        build(data, BATCH),
        lambda s: s.td[index()],
        lambda s: _index_all(s.data, make()),
        target=target,
    )


def _index_all(tree: dict[str, Any], index: Any) -> dict[str, Any]:
    return {key: _index_all(v, index) if type(v) is dict else v[index] for key, v in tree.items()}


def _write(
    name: str, data: dict[str, Any], index: Callable[[], Any], floor_index: Callable[[], Any] | None = None
) -> Workload:
    make = floor_index or index

    def setup(module: ModuleType) -> State:
        state = build(tree_map(Tensor.clone, data), BATCH)(module)
        state.rows = tree_map(lambda leaf: torch.ones_like(leaf[make()]), data)
        state.source = state.module.TensorDict(state.rows, state.td[index()].batch_size)
        return state

    def run(state: State) -> Any:
        state.td[index()] = state.source
        return state.td

    def floor(state: State) -> Any:
        _write_all(state.data, make(), state.rows)
        return state.data

    return Workload(name, setup, run, floor)


def _write_all(tree: dict[str, Any], index: Any, rows: dict[str, Any]) -> None:
    for key, value in tree.items():
        if type(value) is dict:
            _write_all(value, index, rows[key])
        else:
            value[index] = rows[key]


def _write_number(state: State) -> Any:
    state.td[3] = 0
    return state.td


def _write_number_floor(state: State) -> Any:
    for value in state.data.values():
        value[3] = 0
    return state.data


def _with_dict(module: ModuleType) -> State:
    state = build(flat(10, *LEAF), BATCH)(module)
    state.rows = {key: torch.ones(LEAF[1:]) for key in state.data}
    return state


def _write_dict(state: State) -> Any:
    state.td[3] = state.rows
    return state.td


def _write_dict_floor(state: State) -> Any:
    for key, row in state.rows.items():
        state.data[key][3] = row
    return state.data
