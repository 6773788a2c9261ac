"""Workloads that call a function on every leaf."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, flat, nested, tree_leaves, tree_map


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    found = []
    for label, data in (("10 keys", flat(10)), ("100 keys", flat(100)), ("10 x 10 keys", nested(10, 10))):
        found += [
            Workload(f"apply(identity), {label}", build(data), lambda s: s.td.apply(_identity), _identity_floor),
            Workload(f"apply(neg), {label}", build(data), lambda s: s.td.apply(torch.neg), _neg_floor),
            Workload(f"apply_(zero_), {label}", build(data), lambda s: s.td.apply_(Tensor.zero_), _zero_floor),
            Workload(f"apply(add, other), {label}", _with_other(data), _add, _add_floor),
            Workload(f"named_apply, {label}", build(data), lambda s: s.td.named_apply(_take_name), _identity_floor),
        ]
    found += [
        Workload(
            "named_apply(nested_keys=True), 10 x 10 keys",
            build(nested(10, 10)),
            lambda s: s.td.named_apply(_take_name, nested_keys=True),
            _identity_floor,
        ),
        Workload(
            "apply(batch_size=), 10 keys",
            build(flat(10)),
            lambda s: s.td.apply(_first, batch_size=[]),
            lambda s: tree_map(_first, s.data),
        ),
        Workload("apply(inplace=True), 10 keys", build(flat(10)), _abs_in_place, _abs_in_place_floor),
        Workload("apply(filter_empty=True), 10 x 10 keys", build(nested(10, 10)), _filter_all, _filtered_floor),
    ]
    return found


def _identity(leaf: Tensor) -> Tensor:
    return leaf


def _take_name(key: Any, leaf: Tensor) -> Tensor:
    return leaf


def _first(leaf: Tensor) -> Tensor:
    return leaf[0]


def _nothing(leaf: Tensor) -> None:
    return None


def _identity_floor(state: State) -> Any:
    return tree_map(_identity, state.data)


def _neg_floor(state: State) -> Any:
    return tree_map(torch.neg, state.data)


def _zero_floor(state: State) -> Any:
    tree_map(Tensor.zero_, state.data)
    return state.data


def _with_other(data: dict[str, Any]) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = build(data)(module)
        state.other_data = tree_map(torch.ones_like, data)
        state.other = module.TensorDict(state.other_data, [32])
        return state

    return setup


def _add(state: State) -> Any:
    return state.td.apply(torch.add, state.other)


def _add_floor(state: State) -> Any:
    return _add_trees(state.data, state.other_data)


def _add_trees(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _add_trees(value, right[key]) if type(value) is dict else torch.add(value, right[key])
        for key, value in left.items()
    }


def _abs_in_place(state: State) -> Any:
    return state.td.apply(torch.abs, inplace=True)


def _abs_in_place_floor(state: State) -> Any:
    for value in state.data.values():
        value.copy_(torch.abs(value))
    return state.data


def _filtered_floor(state: State) -> Any:
    for leaf in tree_leaves(state.data):
        _nothing(leaf)
    return {}


def _filter_all(state: State) -> Any:
    found = state.td.apply(_nothing, filter_empty=True)
    return {} if found is None else found
