"""Workloads that take containers apart and put them together."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from workload import Context, State, Workload, build, flat, nested

SIZES = ((2, 1), (2, 10), (10, 10), (10, 100), (100, 1), (100, 10), (100, 100))


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    found = []
    for items, leaves in SIZES:
        near_floor = "near_floor" if leaves == 10 else ""
        label = f"{items} items, {leaves} leaves" if leaves > 1 else f"{items} items, 1 leaf"
        whole = build(flat(leaves, items * 2, 4), (items * 2,))
        rows = build(flat(leaves, items, 4), (items,))
        found += [
            Workload(f"stack, {label}", _parts(items, leaves), _stack, _stack_floor, target=near_floor),
            Workload(f"unbind, {label}", rows, lambda s: s.td.unbind(0), _unbind_floor, target=near_floor),
            Workload(f"cat, {label}", _parts(items, leaves), _cat, _cat_floor),
            Workload(f"split(2), {label}", whole, lambda s: s.td.split(2), _split_floor),
        ]
        if leaves == 10:
            found.append(_chunk(f"chunk, {label}", whole, items))
    found += [
        Workload("split([..]), 3 items, 10 leaves", build(flat(10, 32, 4)), _uneven, _uneven_floor),
        Workload(
            "tensor_split(3), 10 leaves",
            build(flat(10, 32, 4)),
            lambda s: s.td.tensor_split(3),
            _thirds_floor,
        ),
        Workload("list(td), 32 items, 10 leaves", build(flat(10, 32, 4)), lambda s: list(s.td), _unbind_floor),
        Workload(
            "stack(dim=1), 10 items, 10 leaves",
            _parts(10, 10),
            lambda s: torch.stack(s.tds, 1),
            _stack_1_floor,
        ),
        Workload("stack(out=), 10 items, 10 leaves", _with_out, _stack_out, _stack_out_floor),
        Workload("stack, 10 items, 10 x 10 leaves", _nested_parts(10), _stack, _nested_stack_floor),
        Workload("unbind, 10 items, 10 x 10 leaves", build(nested(10, 10, 10, 4), (10,)), _unbind, _nested_unbind),
        Workload(
            "tuple by torch.unbind, 10 items, 10 leaves",
            build(flat(10, 10, 4), (10,)),
            _torch_unbind,
            _unbind_floor,
        ),
        Workload("__getitems__, 32 of 32", build(flat(10, 32, 4)), _getitems, _getitems_floor),
    ]
    return found


def _chunk(name: str, setup: Callable[[ModuleType], State], items: int) -> Workload:
    def floor(state: State) -> Any:
        return _rows(state.data, [value.chunk(items) for value in state.data.values()])

    return Workload(name, setup, lambda s: s.td.chunk(items), floor)


def _rows(data: dict[str, Any], pieces: list[Any]) -> list[dict[str, Any]]:
    """Turn each leaf's pieces into a dict per item."""
    keys = list(data)
    return [dict(zip(keys, row, strict=True)) for row in zip(*pieces, strict=True)]


def _parts(items: int, leaves: int) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        data = [flat(leaves, 3, 4) for _ in range(items)]
        return State(module=module, data=data, tds=[module.TensorDict(part, [3]) for part in data])

    return setup


def _nested_parts(items: int) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        data = [nested(10, 10, 3, 4) for _ in range(items)]
        return State(module=module, data=data, tds=[module.TensorDict(part, [3]) for part in data])

    return setup


def _stack(state: State) -> Any:
    return torch.stack(state.tds, 0)


def _stack_floor(state: State) -> Any:
    data = state.data
    return {key: torch.stack([part[key] for part in data]) for key in data[0]}


def _stack_1_floor(state: State) -> Any:
    data = state.data
    return {key: torch.stack([part[key] for part in data], 1) for key in data[0]}


def _nested_stack_floor(state: State) -> Any:
    return {
        node: {key: torch.stack([part[node][key] for part in state.data]) for key in leaves}
        for node, leaves in state.data[0].items()
    }


def _cat(state: State) -> Any:
    return torch.cat(state.tds, 0)


def _cat_floor(state: State) -> Any:
    data = state.data
    return {key: torch.cat([part[key] for part in data]) for key in data[0]}


def _split_floor(state: State) -> Any:
    return _rows(state.data, [value.split(2) for value in state.data.values()])


def _unbind(state: State) -> Any:
    return state.td.unbind(0)


def _torch_unbind(state: State) -> Any:
    return torch.unbind(state.td, 0)


def _unbind_floor(state: State) -> Any:
    return _rows(state.data, [value.unbind(0) for value in state.data.values()])


def _nested_unbind(state: State) -> Any:
    nodes = [_rows(node, [value.unbind(0) for value in node.values()]) for node in state.data.values()]
    return _rows(state.data, nodes)


def _uneven(state: State) -> Any:
    return state.td.split([2, 10, 20])


def _uneven_floor(state: State) -> Any:
    return _rows(state.data, [value.split([2, 10, 20]) for value in state.data.values()])


def _thirds_floor(state: State) -> Any:
    return _rows(state.data, [value.tensor_split(3) for value in state.data.values()])


def _with_out(module: ModuleType) -> State:
    state = _parts(10, 10)(module)
    state.out_data = flat(10, 10, 3, 4)
    state.out = module.TensorDict(state.out_data, [10, 3])
    return state


def _stack_out(state: State) -> Any:
    return torch.stack(state.tds, 0, out=state.out)


def _stack_out_floor(state: State) -> Any:
    data, out = state.data, state.out_data
    for key in data[0]:
        torch.stack([part[key] for part in data], out=out[key])
    return out


_ORDER = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()


def _getitems(state: State) -> Any:
    return state.td.__getitems__(_ORDER)


def _getitems_floor(state: State) -> Any:
    index = torch.tensor(_ORDER)
    return {key: value[index] for key, value in state.data.items()}
