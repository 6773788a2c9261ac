"""Workloads that read and write single entries."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, chain, flat


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    found = [
        Workload("td[key], flat", _setup_keys(0), lambda s: s.td["k0"], lambda s: s.data["k0"]),
        Workload("get(key), flat", _setup_keys(0), lambda s: s.td.get("k0"), lambda s: s.data["k0"]),
        Workload(
            "get(key, default), missing",
            _setup_keys(0),
            lambda s: s.td.get("missing", None),
            lambda s: s.data.get("missing"),
        ),
        Workload("td[key] = leaf, flat", _setup_keys(0), _put_flat, _put_flat_floor),
        Workload("set(key, leaf), flat", _setup_keys(0), lambda s: s.td.set("k0", s.leaf), _put_flat_floor),
        Workload("set(key, leaf, inplace=True)", _setup_keys(0), _set_inplace, lambda s: s.data["k0"].copy_(s.leaf)),
        Workload("set_(key, leaf), flat", _setup_keys(0), _set_in_place, lambda s: s.data["k0"].copy_(s.leaf)),
        Workload("td[key] = container, flat", _setup_keys(0), _put_node, None),
        Workload("key in td", _setup_keys(0), lambda s: "k0" in s.td, lambda s: "k0" in s.data),
    ]
    for depth in (1, 4, 20):
        found += [
            Workload(f"td[key], depth {depth}", _setup_keys(depth), lambda s: s.td[s.key], _lookup),
            Workload(f"get(key), depth {depth}", _setup_keys(depth), lambda s: s.td.get(s.key), _lookup),
            Workload(f"td[key] = leaf, depth {depth}", _setup_keys(depth), _put_deep, _put_deep_floor),
            Workload(
                f"set(key, leaf), depth {depth}",
                _setup_keys(depth),
                lambda s: s.td.set(s.key, s.leaf),
                _put_deep_floor,
            ),
        ]
    found += [
        Workload("set(key, leaf) that makes 4 nodes", build({}), _make_nodes, _make_nodes_floor),
        Workload("get_at(key, 3)", _setup_keys(0), lambda s: s.td.get_at("k0", 3), lambda s: s.data["k0"][3]),
        Workload("set_at_(key, row, 3)", _setup_keys(0), _set_at, _set_at_floor),
        Workload("setdefault, present", _setup_keys(0), _setdefault, lambda s: s.data.setdefault("k0", s.leaf)),
        Workload("set, then pop", _setup_keys(0), _set_pop, _set_pop_floor),
        Workload("set, then del_", _setup_keys(0), _set_del, _set_pop_floor),
        Workload("rename_key_ and back", _setup_keys(0), _rename, _rename_floor),
        Workload("batch_size", _setup_keys(0), lambda s: tuple(s.td.batch_size), None),
        Workload("device", _setup_keys(0), lambda s: str(s.td.device), None),
        Workload("len", _setup_keys(0), lambda s: len(s.td), None),
        Workload("10 keys read with []", _setup_keys(0), lambda s: [s.td[k] for k in s.keys], _read_ten),
        Workload("10 keys written with []", _setup_keys(0), _write_ten, _write_ten_floor),
    ]
    return found


def _setup_keys(depth: int) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        data = chain(depth, 2) if depth else flat(10)
        state = build(data)(module)
        state.key = ("n",) * depth + ("k0",)
        state.keys = list(data)
        state.leaf = torch.ones(32, 4)
        state.row = torch.ones(4)
        state.node = module.TensorDict(flat(2), [32])
        return state

    return setup


def _lookup(state: State) -> Tensor:
    found = state.data
    for part in state.key:
        found = found[part]
    return found


def _put_flat(state: State) -> Any:
    state.td["k0"] = state.leaf
    return state.td


def _put_flat_floor(state: State) -> Any:
    leaf = state.leaf
    if leaf.shape[0] != 32:
        raise ValueError
    state.data["k0"] = leaf
    return state.data


def _put_node(state: State) -> Any:
    state.td["k0"] = state.node
    return state.td


def _put_deep(state: State) -> Any:
    state.td[state.key] = state.leaf
    return state.td


def _put_deep_floor(state: State) -> Any:
    leaf = state.leaf
    if leaf.shape[0] != 32:
        raise ValueError
    node = state.data
    *path, last = state.key
    for part in path:
        node = node[part]
    node[last] = leaf
    return state.data


def _set_inplace(state: State) -> Any:
    state.td.set("k0", state.leaf, inplace=True)
    return state.td["k0"]


def _set_in_place(state: State) -> Any:
    state.td.set_("k0", state.leaf)
    return state.td["k0"]


def _make_nodes(state: State) -> Any:
    td = state.module.TensorDict({}, [])
    return td.set(("a", "b", "c", "d", "e"), _SCALAR)


def _make_nodes_floor(state: State) -> Any:
    root: dict[str, Any] = {}
    node = root
    for part in ("a", "b", "c", "d"):
        node = node.setdefault(part, {})
    node["e"] = _SCALAR
    return root


_SCALAR = torch.ones(())


def _set_at(state: State) -> Any:
    state.td.set_at_("k0", state.row, 3)
    return state.td["k0"]


def _set_at_floor(state: State) -> Any:
    state.data["k0"][3] = state.row
    return state.data["k0"]


def _setdefault(state: State) -> Any:
    return state.td.setdefault("k0", state.leaf)


def _set_pop(state: State) -> Any:
    state.td.set("new", state.leaf)
    state.td.pop("new")
    return state.td


def _set_del(state: State) -> Any:
    state.td.set("new", state.leaf)
    state.td.del_("new")
    return state.td


def _set_pop_floor(state: State) -> Any:
    leaf = state.leaf
    if leaf.shape[0] != 32:
        raise ValueError
    state.data["new"] = leaf
    state.data.pop("new")
    return state.data


def _rename(state: State) -> Any:
    state.td.rename_key_("k0", "new")
    state.td.rename_key_("new", "k0")
    return state.td


def _rename_floor(state: State) -> Any:
    state.data["new"] = state.data.pop("k0")
    state.data["k0"] = state.data.pop("new")
    return state.data


def _read_ten(state: State) -> Any:
    data = state.data
    return [data[key] for key in state.keys]


def _write_ten(state: State) -> Any:
    td, leaf = state.td, state.leaf
    for key in state.keys:
        td[key] = leaf
    return td


def _write_ten_floor(state: State) -> Any:
    data, leaf = state.data, state.leaf
    for key in state.keys:
        if leaf.shape[0] != 32:
            raise ValueError
        data[key] = leaf
    return data
