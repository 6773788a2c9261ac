"""Workloads that walk keys, values and items."""

from __future__ import annotations

from typing import Any

from workload import Context, State, Workload, build, chain, flat, nested


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    trees = {
        "flat, 10 keys": flat(10),
        "flat, 100 keys": flat(100),
        "10 x 10 keys": nested(10, 10),
        "20 deep": chain(20),
    }
    found = []
    for label, data in trees.items():
        if not label.startswith(("10 x", "20")):
            found += [
                Workload(
                    f"keys(), {label}",
                    build(data),
                    lambda s: list(s.td.keys()),
                    lambda s: list(s.data.keys()),
                ),
                Workload(f"values(), {label}", build(data), lambda s: list(s.td.values()), _values),
                Workload(f"items(), {label}", build(data), lambda s: list(s.td.items()), _items),
            ]
        found += [
            Workload(f"keys(nested), {label}", build(data), lambda s: list(s.td.keys(True)), _all_keys),
            Workload(f"keys(nested, leaves), {label}", build(data), _leaf_keys, _leaf_keys_floor),
            Workload(f"values(nested, leaves), {label}", build(data), _leaf_values, _leaf_values_floor),
            Workload(f"items(nested, leaves), {label}", build(data), _leaf_items, _leaf_items_floor),
        ]
    found += [
        Workload(
            "keys(nested, leaves, sort=True), 10 x 10 keys",
            build(nested(10, 10)),
            lambda s: list(s.td.keys(True, True, sort=True)),
            lambda s: sorted(_leaf_keys_floor(s)),
        ),
        Workload("items(nested), 10 x 10 keys", build(nested(10, 10)), lambda s: list(s.td.items(True)), _all_items),
        Workload(
            "key in keys(nested), 10 x 10 keys",
            build(nested(10, 10)),
            lambda s: ("n5", "k5") in s.td.keys(True),
            lambda s: "n5" in s.data and "k5" in s.data["n5"],
        ),
        Workload("len(keys()), 10 keys", build(flat(10)), lambda s: len(s.td.keys()), lambda s: len(s.data)),
        Workload(
            "key in keys(), 10 keys",
            build(flat(10)),
            lambda s: "k5" in s.td.keys(),
            lambda s: "k5" in s.data,
        ),
    ]
    return found


def _values(state: State) -> Any:
    return list(state.data.values())


def _items(state: State) -> Any:
    return list(state.data.items())


def _leaf_keys(state: State) -> Any:
    return list(state.td.keys(True, True))


def _leaf_values(state: State) -> Any:
    return list(state.td.values(True, True))


def _leaf_items(state: State) -> Any:
    return list(state.td.items(True, True))


def _all_keys(state: State) -> Any:
    found: list[Any] = []
    _collect_keys(state.data, (), False, found)
    return found


def _leaf_keys_floor(state: State) -> Any:
    found: list[Any] = []
    _collect_keys(state.data, (), True, found)
    return found


def _leaf_values_floor(state: State) -> Any:
    found: list[Any] = []
    _collect_values(state.data, found)
    return found


def _leaf_items_floor(state: State) -> Any:
    found: list[Any] = []
    _collect_items(state.data, (), True, found)
    return found


def _all_items(state: State) -> Any:
    found: list[Any] = []
    _collect_items(state.data, (), False, found)
    return found


def _collect_keys(tree: dict[str, Any], path: tuple[str, ...], leaves_only: bool, found: list[Any]) -> None:
    for key, value in tree.items():
        if type(value) is dict:
            below = (*path, key)
            if not leaves_only:
                found.append(below if path else key)
            _collect_keys(value, below, leaves_only, found)
        else:
            found.append((*path, key) if path else key)


def _collect_values(tree: dict[str, Any], found: list[Any]) -> None:
    for value in tree.values():
        if type(value) is dict:
            _collect_values(value, found)
        else:
            found.append(value)


def _collect_items(tree: dict[str, Any], path: tuple[str, ...], leaves_only: bool, found: list[Any]) -> None:
    for key, value in tree.items():
        if type(value) is dict:
            below = (*path, key)
            if not leaves_only:
                found.append((below if path else key, value))
            _collect_items(value, below, leaves_only, found)
        else:
            found.append(((*path, key) if path else key, value))
