"""Workloads that lock and unlock trees of containers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from workload import Context, State, Workload, build, chain, flat, nested


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    trees = {"10 keys": flat(10), "100 keys": flat(100), "10 x 10 keys": nested(10, 10), "20 deep": chain(20)}
    found = [
        Workload(f"lock_, unlock_, {label}", _with_nodes(data), _lock_unlock, _lock_unlock_floor)
        for label, data in trees.items()
    ]
    found += [
        Workload("is_locked, 10 x 10 keys", _lock_tree(nested(10, 10)), lambda s: s.td.is_locked, None),
        Workload(
            "lock_ of a locked tree, 10 x 10",
            _lock_tree(nested(10, 10)),
            lambda s: s.td.lock_().is_locked,
            None,
        ),
        Workload("with td.unlock_(), 10 keys", _lock_tree(flat(10)), _unlocked_block, None),
        Workload("with td.unlock_(), 10 x 10 keys", _lock_tree(nested(10, 10)), _unlocked_block, None),
        Workload("td[key] of a locked tree", _lock_tree(nested(10, 10)), lambda s: s.td["n5", "k5"], _lookup),
        Workload("keys(nested, leaves) of a locked tree", _lock_tree(nested(10, 10)), _leaf_keys, None),
        Workload("values(nested, leaves) of a locked tree", _lock_tree(nested(10, 10)), _leaf_values, None),
    ]
    return found


class _Node:
    """A node that the floor locks: entries and a flag."""

    __slots__ = ("entries", "locked")

    def __init__(self, tree: dict[str, Any]) -> None:
        self.entries = {key: _Node(value) if type(value) is dict else value for key, value in tree.items()}
        self.locked = False

    def lock(self, locked: bool) -> None:
        """Set the flag of this node and of those below."""
        self.locked = locked
        for value in self.entries.values():
            if type(value) is _Node:
                value.lock(locked)


def _with_nodes(data: dict[str, Any]) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = build(data)(module)
        state.nodes = _Node(data)
        return state

    return setup


def _lock_unlock(state: State) -> bool:
    state.td.lock_()
    state.td.unlock_()
    return state.td.is_locked


def _lock_unlock_floor(state: State) -> bool:
    state.nodes.lock(True)
    state.nodes.lock(False)
    return state.nodes.locked


def _lock_tree(data: dict[str, Any]) -> Callable[[ModuleType], State]:
    def setup(module: ModuleType) -> State:
        state = build(data)(module)
        state.td.lock_()
        return state

    return setup


def _unlocked_block(state: State) -> bool:
    with state.td.unlock_():
        pass
    return state.td.is_locked


def _lookup(state: State) -> Any:
    return state.data["n5"]["k5"]


def _leaf_keys(state: State) -> Any:
    return list(state.td.keys(True, True))


def _leaf_values(state: State) -> Any:
    return list(state.td.values(True, True))
