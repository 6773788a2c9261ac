"""Workloads that make containers from their entries."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from workload import Context, State, Workload, build, chain, flat, nested


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    return [
        _from_dict("flat, 1 key", flat(1)),
        _from_dict("flat, 10 keys", flat(10)),
        _from_dict("flat, 100 keys", flat(100)),
        _from_dict("nested dicts, 10 x 10 keys", nested(10, 10)),
        _from_dict("nested dicts, 20 deep", chain(20)),
        Workload("empty, no arguments", build({}), lambda s: s.module.TensorDict(), lambda s: {}),
        Workload("empty, batch size", build({}), lambda s: s.module.TensorDict({}, [32]), lambda s: {}),
        Workload(
            "flat, 10 keys, batch_size=Size",
            _with_size,
            lambda s: s.module.TensorDict(s.data, s.size),
            _checked_copy,
        ),
        Workload(
            "flat, 10 keys, keywords",
            build(flat(10)),
            lambda s: s.module.TensorDict(**s.data, batch_size=[32]),
            _checked_copy,
        ),
        Workload(
            "flat, 10 keys, names",
            build(flat(10)),
            lambda s: s.module.TensorDict(s.data, [32], names=["time"]),
            _checked_copy,
        ),
        Workload(
            "flat, 10 keys, device",
            build(flat(10)),
            lambda s: s.module.TensorDict(s.data, [32], device="cpu"),
            _checked_copy,
        ),
        Workload(
            "flat, 10 keys, lock",
            build(flat(10)),
            lambda s: s.module.TensorDict(s.data, [32], lock=True),
            _checked_copy,
        ),
        Workload(
            "from a container, 10 keys",
            build(flat(10)),
            lambda s: s.module.TensorDict(s.td, [32]),
            _checked_copy,
        ),
        Workload(
            "from containers, 10 x 10 keys",
            _with_children,
            lambda s: s.module.TensorDict(s.children, [32]),
            lambda s: dict(s.data),
        ),
        Workload("tuple keys, 10", _with_tuple_keys, lambda s: s.module.TensorDict(s.tuples, [32]), _tuple_floor),
        Workload("10 numbers", _with_numbers, lambda s: s.module.TensorDict(s.data), _tensor_of_each),
        Workload("10 numpy arrays", _with_arrays, lambda s: s.module.TensorDict(s.data, [32]), _from_numpy_each),
        Workload(
            "fromkeys, 10 keys",
            lambda module: State(module=module, keys=[f"k{i}" for i in range(10)]),
            lambda s: s.module.TensorDict.fromkeys(s.keys, 0),
            lambda s: {key: torch.tensor(0) for key in s.keys},
        ),
        Workload(
            "from_dict, 10 x 10 keys",
            build(nested(10, 10)),
            lambda s: s.module.TensorDict.from_dict(s.data, batch_size=[32]),
            _checked_copy,
        ),
    ]


def _from_dict(name: str, data: dict[str, Any]) -> Workload:
    return Workload(name, build(data), lambda s: s.module.TensorDict(s.data, [32]), _checked_copy)


def _checked_copy(state: State) -> dict[str, Any]:
    return _copy_checking_shapes(state.data)


def _copy_checking_shapes(tree: dict[str, Any]) -> dict[str, Any]:
    """The floor: a dict per node, and each leaf's shape looked at once."""
    copied = {}
    for key, value in tree.items():
        if type(value) is dict:
            copied[key] = _copy_checking_shapes(value)
        elif value.shape[0] != 32:
            raise ValueError(key)
        else:
            copied[key] = value
    return copied


def _with_size(module: ModuleType) -> State:
    return State(module=module, data=flat(10), size=torch.Size([32]))


def _with_children(module: ModuleType) -> State:
    data = nested(10, 10)
    return State(module=module, data=data, children={k: module.TensorDict(v, [32]) for k, v in data.items()})


def _with_tuple_keys(module: ModuleType) -> State:
    return State(module=module, tuples={("n", key): leaf for key, leaf in flat(10).items()})


def _tuple_floor(state: State) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (node, key), leaf in state.tuples.items():
        if leaf.shape[0] != 32:
            raise ValueError(key)
        tree.setdefault(node, {})[key] = leaf
    return tree


def _with_numbers(module: ModuleType) -> State:
    return State(module=module, data={f"k{i}": float(i) for i in range(10)})


def _tensor_of_each(state: State) -> dict[str, Any]:
    return {key: torch.tensor(number) for key, number in state.data.items()}


def _with_arrays(module: ModuleType) -> State:
    return State(module=module, data={f"k{i}": np.full((32, 4), i, dtype=np.float32) for i in range(10)})


def _from_numpy_each(state: State) -> dict[str, Any]:
    return {key: torch.from_numpy(array) for key, array in state.data.items()}
