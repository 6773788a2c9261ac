"""Ragged leaves, as far as the reference takes them, and padding."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, flat, tree_map

# Torch would warn once in each worker that nested tensors are a prototype.
warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")

ROWS = 16


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    return [
        Workload("jagged: set, 10 leaves", _rows(torch.jagged), _set, _set_floor),
        Workload("jagged: clone, 10 leaves", _rows(torch.jagged), lambda s: s.td.clone(), _each(Tensor.clone)),
        Workload("jagged: unbind, 10 leaves", _rows(torch.jagged), lambda s: s.td.unbind(0), _unbind_floor),
        Workload("jagged: td[3], 10 leaves", _rows(torch.jagged), lambda s: s.td[3], _each(lambda v: v[3])),
        Workload(
            "jagged: td == 0, 10 leaves",
            _rows(torch.jagged),
            lambda s: s.td == 0,
            _each(lambda v: v == 0),
        ),
        Workload(
            "jagged: to_padded_tensor, 10 leaves",
            _rows(torch.jagged),
            lambda s: s.td.to_padded_tensor(),
            _each(lambda v: torch.nested.to_padded_tensor(v, 0.0)),
        ),
        # The strided layout has no sum, which the digest of a result needs.
        Workload(
            "strided: clone, 10 leaves",
            _rows(torch.strided),
            lambda s: len(s.td.clone()),
            lambda s: tree_map(Tensor.clone, s.data)["k0"].size(0),
        ),
        Workload(
            "strided: cat of 4, 10 leaves",
            _rows(torch.strided),
            lambda s: len(torch.cat([s.td] * 4)),
            lambda s: tree_map(lambda v: torch.cat([v] * 4), s.data)["k0"].size(0),
        ),
        Workload("strided: td[3], 10 leaves", _rows(torch.strided), lambda s: s.td[3], _each(lambda v: v[3])),
        Workload(
            "strided: to_padded_tensor, 10 leaves",
            _rows(torch.strided),
            lambda s: s.td.to_padded_tensor(),
            _each(lambda v: torch.nested.to_padded_tensor(v, 0.0)),
        ),
        Workload(
            "pad, 10 leaves",
            build(flat(10, 8, 4, 3), (8, 4)),
            lambda s: s.td.pad([1, 0, 0, 2]),
            _each(lambda v: torch.constant_pad_nd(v, (0, 0, 0, 2, 1, 0))),
        ),
        Workload("pad_sequence of 8, 10 leaves", _sequences, lambda s: s.module.pad_sequence(s.tds), _sequence_floor),
        Workload(
            "pad_sequence of 8 with masks",
            _sequences,
            lambda s: s.module.pad_sequence(s.tds, return_mask=True),
        ),
        Workload("merge_tensordicts of 3", _parts, lambda s: s.module.merge_tensordicts(*s.tds), _merge_floor),
        Workload("dense_stack_tds of 8", _equal, lambda s: s.module.dense_stack_tds(s.tds, 0), _stack_floor),
        Workload("isin, 256 rows", _setup_keys, lambda s: s.utils.isin(s.td, s.other, "k0")),
        Workload("remove_duplicates, 256 rows", _setup_keys, lambda s: s.utils.remove_duplicates(s.td, "k0")),
    ]


def _rows(layout: torch.layout) -> Any:
    rows = [[torch.randn(1 + (i * 7 + k) % 12) for i in range(ROWS)] for k in range(10)]

    def setup(module: ModuleType) -> State:
        data = {f"k{k}": torch.nested.nested_tensor(leaf, layout=layout) for k, leaf in enumerate(rows)}
        td = module.TensorDict(dict(data), [ROWS])
        return State(data=data, td=td, module=module)

    return setup


def _each(fn: Any) -> Any:
    return lambda s: tree_map(fn, s.data)


def _set(state: State) -> Any:
    return state.module.TensorDict(state.data, [ROWS])


def _set_floor(state: State) -> Any:
    # A ragged tensor is asked for its shape, or nobody knows that it fits: torch takes a microsecond to say it.
    return {key: value for key, value in state.data.items() if value.shape[0] == ROWS}


def _unbind_floor(state: State) -> Any:
    columns = [value.unbind(0) for value in state.data.values()]
    return [dict(zip(state.data, row, strict=True)) for row in zip(*columns, strict=True)]


def _sequences(module: ModuleType) -> State:
    state = _equal(module)
    state.data = [tree_map(lambda v, n=n: torch.randn(n, 4), one) for n, one in enumerate(state.data, 5)]
    state.tds = [module.TensorDict(one, []) for one in state.data]
    return state


def _sequence_floor(state: State) -> Any:
    columns = {key: [one[key] for one in state.data] for key in state.data[0]}
    return {key: torch._C._nn.pad_sequence(column, True, 0.0) for key, column in columns.items()}


def _equal(module: ModuleType) -> State:
    data = [flat(10, 4, 4) for _ in range(8)]
    return State(data=data, tds=[module.TensorDict(one, [4]) for one in data], module=module)


def _stack_floor(state: State) -> Any:
    return {key: torch.stack([one[key] for one in state.data]) for key in state.data[0]}


def _parts(module: ModuleType) -> State:
    data = [{f"{i}{key}" if i else key: value for key, value in flat(10).items()} for i in range(3)]
    return State(data=data, tds=[module.TensorDict(one, [32]) for one in data], module=module)


def _merge_floor(state: State) -> Any:
    return {**state.data[0], **state.data[1], **state.data[2]}


def _setup_keys(module: ModuleType) -> State:
    data = {"k0": torch.arange(512).view(256, 2) % 100, "k1": torch.randn(256, 4)}
    state = build(data, (256,))(module)
    state.other = module.TensorDict({"k0": data["k0"][::3]}, [86])
    state.utils = __import__(f"{module.__name__}.utils", fromlist=["utils"])
    return state
