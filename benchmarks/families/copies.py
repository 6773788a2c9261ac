"""Workloads that give another container of the same, or some of the same, entries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, chain, flat, nested, tree_leaves, tree_map

_HALF = [f"k{i}" for i in range(5)]
_NODES = [("n0", "k0"), ("n0", "k1"), ("n5", "k3"), "n7"]


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    found = []
    trees = {"10 keys": flat(10), "100 keys": flat(100), "10 x 10 keys": nested(10, 10), "20 deep": chain(20)}
    for label, data in trees.items():
        target = "near_floor" if label == "10 keys" else ""
        setup = build(data)
        found += [
            Workload(f"clone(), {label}", setup, lambda s: s.td.clone(), _clone_floor, target=target),
            Workload(f"clone(False), {label}", setup, lambda s: s.td.clone(False), _copy_floor),
            Workload(f"to_dict(), {label}", setup, lambda s: s.td.to_dict(), _copy_floor),
        ]
    for label, data in (("10 keys", flat(10)), ("10 x 10 keys", nested(10, 10))):
        setup = _with_source(data)
        found += [
            Workload(f"update(td), {label}", setup, _update, _update_floor),
            Workload(f"update(dict), {label}", setup, _update_from_dict, _update_floor),
            Workload(f"update_(td), {label}", setup, lambda s: s.td.update_(s.source), _update_in_place_floor),
            Workload(f"replace(td), {label}", setup, lambda s: s.td.replace(s.source), _replace_floor),
            Workload(f"to_tensordict(), {label}", build(data), lambda s: s.td.to_tensordict(), _clone_floor),
            Workload(f"empty(), {label}", build(data), lambda s: s.td.empty(), lambda s: {}),
            Workload(f"empty(recurse=True), {label}", build(data), lambda s: s.td.empty(recurse=True), _empty_floor),
            Workload(f"contiguous(), {label}", build(data), lambda s: s.td.contiguous(), _contiguous_floor),
            Workload(f"flatten_keys, {label}", build(data), lambda s: s.td.flatten_keys("."), _flatten_floor),
        ]
    found += [
        Workload(
            "update(dict), 5 keys and a node",
            _with_source({**flat(5), **nested(1, 5)}),
            _update_from_dict,
            _update_floor,
        ),
        Workload("copy(), 10 keys", build(flat(10)), lambda s: s.td.copy(), _copy_floor),
        Workload("torch.clone(td), 10 keys", build(flat(10)), lambda s: torch.clone(s.td), _clone_floor),
        Workload("update_at_(row, 3), 10 keys", _with_row, lambda s: s.td.update_at_(s.row, 3), _update_at_floor),
        Workload("select, 5 of 10 keys", build(flat(10)), lambda s: s.td.select(*_HALF), _select_floor),
        Workload("exclude, 5 of 10 keys", build(flat(10)), lambda s: s.td.exclude(*_HALF), _exclude_floor),
        Workload("select, nested keys", build(nested(10, 10)), lambda s: s.td.select(*_NODES), _select_nested_floor),
        Workload(
            "exclude, nested keys",
            build(nested(10, 10)),
            lambda s: s.td.exclude(*_NODES),
            _exclude_nested_floor,
        ),
        Workload("flatten_keys, 20 deep", build(chain(20)), lambda s: s.td.flatten_keys("."), _flatten_floor),
        Workload("unflatten_keys, 10 x 10 keys", _set_up_flat, lambda s: s.td.unflatten_keys("."), _unflatten_floor),
        Workload("split_keys, 5 of 10 keys", build(flat(10)), lambda s: s.td.split_keys(_HALF), _split_keys_floor),
    ]
    return found


def _with_source(data: dict[str, Any]) -> Any:
    def setup(module: ModuleType) -> State:
        state = build(data)(module)
        state.source_data = tree_map(torch.ones_like, data)
        state.source = module.TensorDict(state.source_data, [32])
        return state

    return setup


def _clone_floor(state: State) -> Any:
    return tree_map(Tensor.clone, state.data)


def _copy_floor(state: State) -> Any:
    return _copy(state.data)


def _copy(tree: dict[str, Any]) -> dict[str, Any]:
    copied = tree.copy()
    for key, value in tree.items():
        if type(value) is dict:
            copied[key] = _copy(value)
    return copied


def _contiguous_floor(state: State) -> Any:
    return tree_map(Tensor.contiguous, state.data)


def _empty_floor(state: State) -> Any:
    return _empty(state.data)


def _empty(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: _empty(value) for key, value in tree.items() if type(value) is dict}


def _update(state: State) -> Any:
    return state.td.update(state.source)


def _update_from_dict(state: State) -> Any:
    return state.td.update(state.source_data)


def _update_floor(state: State) -> Any:
    _merge(state.data, state.source_data)
    return state.data


def _merge(tree: dict[str, Any], source: dict[str, Any]) -> None:
    for key, value in source.items():
        if type(value) is dict:
            _merge(tree[key], value)
        elif value.shape[0] != 32:
            raise ValueError(key)
        else:
            tree[key] = value


def _update_in_place_floor(state: State) -> Any:
    torch._foreach_copy_(tree_leaves(state.data), tree_leaves(state.source_data))
    return state.data


def _replace_floor(state: State) -> Any:
    copied = _copy(state.data)
    _merge(copied, state.source_data)
    return copied


def _with_row(module: ModuleType) -> State:
    state = build(flat(10))(module)
    state.row_data = flat(10, 4)
    state.row = module.TensorDict(state.row_data, [])
    return state


def _update_at_floor(state: State) -> Any:
    for key, row in state.row_data.items():
        state.data[key][3] = row
    return state.data


def _select_floor(state: State) -> Any:
    data = state.data
    return {key: data[key] for key in _HALF}


def _exclude_floor(state: State) -> Any:
    left_out = set(_HALF)
    return {key: value for key, value in state.data.items() if key not in left_out}


def _select_nested_floor(state: State) -> Any:
    data = state.data
    chosen: dict[str, Any] = {}
    for name in _NODES:
        if isinstance(name, str):
            chosen[name] = data[name]
        else:
            node, key = name
            chosen.setdefault(node, {})[key] = data[node][key]
    return chosen


def _exclude_nested_floor(state: State) -> Any:
    left = state.data.copy()
    for name in _NODES:
        if isinstance(name, str):
            del left[name]
        else:
            node, key = name
            if left[node] is state.data[node]:
                left[node] = left[node].copy()
            del left[node][key]
    return left


def _flatten_floor(state: State) -> Any:
    flattened: dict[str, Any] = {}
    _flatten(state.data, "", flattened)
    return flattened


def _flatten(tree: dict[str, Any], prefix: str, flattened: dict[str, Any]) -> None:
    for key, value in tree.items():
        if type(value) is dict:
            _flatten(value, f"{prefix}{key}.", flattened)
        else:
            flattened[prefix + key] = value


def _set_up_flat(module: ModuleType) -> State:
    data = {f"n{i}.k{j}": torch.ones(32, 4) for i in range(10) for j in range(10)}
    return State(module=module, data=data, td=module.TensorDict(data, [32]))


def _unflatten_floor(state: State) -> Any:
    tree: dict[str, Any] = {}
    for name, value in state.data.items():
        node, key = name.split(".")
        tree.setdefault(node, {})[key] = value
    return tree


def _split_keys_floor(state: State) -> Any:
    return _select_floor(state), _exclude_floor(state)
