"""Workloads of lazy stacks: what reading, writing, indexing and the walks over members cost."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, flat, tree_map

MEMBERS = 8
SHAPE = (4, 3)


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    data = flat(10, *SHAPE)
    nested = {"n": flat(10, *SHAPE), **flat(5, *SHAPE)}
    first, second = _stack(data), _stack(data, dim=1)
    found = [
        Workload("lazy_stack of 8", first, lambda s: s.module.lazy_stack(s.members)),
        Workload("maybe_dense_stack of 8 equal", first, lambda s: s.module.maybe_dense_stack(s.members), _stack_all),
        Workload("maybe_dense_stack of 8 unequal", _unequal, lambda s: s.module.maybe_dense_stack(s.members).stack_dim),
        Workload("td[key]", first, lambda s: s.td["k3"], lambda s: torch.stack([m["k3"] for m in s.data])),
        Workload("td.get(key)", first, lambda s: s.td.get("k3"), lambda s: torch.stack([m["k3"] for m in s.data])),
        Workload("td[key], stack dim 1", second, lambda s: s.td["k3"], _read_second),
        Workload("td[nested key]", _stack(nested), lambda s: s.td["n", "k3"], _read_nested),
        Workload("td[node]", _stack(nested), lambda s: s.td["n"]),
        Workload("get(as_list=True)", _unequal, lambda s: s.td.get("k3", as_list=True), _as_list),
        Workload("td[key] = tensor", first, _write),
        Workload("td[0]", first, lambda s: s.td[0], lambda s: s.data[0]),
        Workload("td[2:6]", first, lambda s: s.td[2:6]),
        Workload("td[:, 0]", first, lambda s: s.td[:, 0]),
        Workload("td[0], stack dim 1", second, lambda s: s.td[0]),
        Workload("td[1:3], stack dim 1", second, lambda s: s.td[1:3]),
        Workload("td[mask]", first, lambda s: s.td[_MASK]),
        Workload("td[int tensor]", first, lambda s: s.td[_INTS]),
        Workload("td[0] = row", _with_row, _assign),
        Workload("unbind", first, lambda s: s.td.unbind(0), lambda s: tuple(s.data)),
        Workload("permute", first, lambda s: s.td.permute(1, 0)),
        Workload("clone", first, lambda s: s.td.clone()),
        Workload("apply", first, lambda s: s.td.apply(_double)),
        Workload("apply_", first, lambda s: s.td.apply_(_same)),
        Workload("to(float64)", first, lambda s: s.td.to(torch.float64)),
        Workload("td == td", first, lambda s: s.td == s.td),
        Workload("update", _with_source, lambda s: s.td.update(s.source)),
        Workload("update_", _with_source, lambda s: s.td.update_(s.source)),
        Workload("list(keys)", first, lambda s: list(s.td.keys()), _common_keys),
        Workload("list(keys(True, True))", _stack(nested), lambda s: list(s.td.keys(True, True))),
        Workload("list(items)", first, lambda s: list(s.td.items()), _stack_all),
        Workload("key in td", first, lambda s: "k3" in s.td, lambda s: all("k3" in m for m in s.data)),
        Workload("select", first, lambda s: s.td.select("k1", "k2")),
        Workload("lock_, unlock_", first, lambda s: s.td.lock_().unlock_()),
        Workload("append", first, _append, before=_renew, after=_renew),
        Workload("batch_size", first, lambda s: s.td.batch_size),
        Workload("densify", first, lambda s: s.td.densify(), _stack_all),
        Workload("to_tensordict", first, lambda s: s.td.to_tensordict(), _stack_all),
        Workload("contiguous", first, lambda s: s.td.contiguous(), _stack_all),
        Workload("torch.stack of 2 stacks", first, lambda s: torch.stack([s.td, s.td])),
        Workload("torch.cat of 2 stacks", first, lambda s: torch.cat([s.td, s.td])),
    ]
    return found


_MASK = torch.arange(MEMBERS) % 2 == 0
_INTS = torch.tensor([1, 3, 6])


def _stack(data: dict[str, Any], dim: int = 0) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        trees = [tree_map(Tensor.clone, data) for _ in range(MEMBERS)]
        members = [module.TensorDict(tree, SHAPE[:1]) for tree in trees]
        plain = [tree_map(Tensor.clone, data) for _ in range(MEMBERS)]
        state = State(data=plain, members=members, td=module.lazy_stack(list(members), dim), module=module)
        _renew(state)
        return state

    return setup


def _unequal(module: ModuleType) -> State:
    trees = [flat(10, 4, 2 + i) for i in range(MEMBERS)]
    members = [module.TensorDict(tree_map(Tensor.clone, tree), [4]) for tree in trees]
    return State(data=trees, members=members, td=module.lazy_stack(list(members)), module=module)


def _double(value: Tensor) -> Tensor:
    return value * 2


def _same(value: Tensor) -> Tensor:
    return value + 0


def _stack_all(state: State) -> dict[str, Tensor]:
    return {key: torch.stack([tree[key] for tree in state.data]) for key in state.data[0]}


def _read_second(state: State) -> Tensor:
    return torch.stack([tree["k3"] for tree in state.data], 1)


def _read_nested(state: State) -> Tensor:
    return torch.stack([tree["n"]["k3"] for tree in state.data])


def _as_list(state: State) -> list[Tensor]:
    return [tree["k3"] for tree in state.data]


def _common_keys(state: State) -> list[str]:
    # A stack has the keys that all members share, so the floor looks at all members, too.
    first, *rest = state.data
    if all(other.keys() == first.keys() for other in rest):
        return list(first)
    return [key for key in first if all(key in other for other in rest)]


_VALUE = torch.ones(MEMBERS, *SHAPE)


def _write(state: State) -> Any:
    state.td["k3"] = _VALUE
    return state.td


def _with_row(module: ModuleType) -> State:
    state = _stack(flat(10, *SHAPE))(module)
    state.rows = {key: torch.ones(SHAPE) for key in state.data[0]}
    state.source = module.TensorDict(state.rows, SHAPE[:1])
    return state


def _assign(state: State) -> Any:
    state.td[0] = state.source
    return state.td


def _with_source(module: ModuleType) -> State:
    state = _stack(flat(10, *SHAPE))(module)
    rows = {key: torch.ones(MEMBERS, *SHAPE) for key in state.data[0]}
    state.rows = rows
    state.source = module.TensorDict(rows, [MEMBERS, *SHAPE[:1]])
    return state


def _append(state: State) -> Any:
    state.fresh.append(state.members[0])
    return state.fresh


def _renew(state: State) -> None:
    state.fresh = state.module.lazy_stack(list(state.members))
