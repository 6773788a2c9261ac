"""`Workload` and `Context`, and the raw data that families of workloads use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

State = SimpleNamespace
"""Holds `td` (what the package works on) and what else `run` and `floor` need, built outside the clock."""


@dataclass(frozen=True)
class Context:
    """The settings of a run that families depend on: small sizes or full ones, and the folder to write to."""

    quick: bool
    folder: Path


@dataclass(frozen=True)
class Limit:
    """How fast a workload must be, compared with the `side` "reference", "floor" or one of its rivals.

    Either `at_least` that many times as fast, or in `at_most` that many times the time. `called` says what the
    floor is.
    """

    side: str
    at_least: float = 0.0
    at_most: float = 0.0
    called: str = ""


@dataclass(frozen=True)
class Workload:
    """One measured call: `run` does it with a package, `floor` with the unavoidable torch and dict calls.

    `rivals` are other ways to the same result (`torch.save`, safetensors, ...), by name; they run where the floor does.

    `setup` receives the module `tensordict` of the package at hand. `run` and `floor` must leave the state as
    they found it, or in a state from which the same call does the same work again. A workload with `after`
    cannot be repeated without a clean-up: it is timed one call at a time, with `before` and `after` around
    it, untimed.
    """

    name: str
    setup: Callable[[ModuleType], State]
    run: Callable[[State], Any]
    floor: Callable[[State], Any] | None = None
    rivals: Mapping[str, Callable[[State], Any]] = field(default_factory=dict)
    before: Callable[[State], None] | None = None
    after: Callable[[State], None] | None = None
    target: str = ""
    """Which target of `report.py` this workload counts for, besides those that all of them count for."""
    limits: tuple[Limit, ...] = ()
    """Targets of this workload alone."""
    reference_refuses: bool = False
    """Whether the reference cannot do this: then it is measured beside the floor and the rivals alone."""
    payload_bytes: int = 0
    """Bytes moved by one call, for workloads whose throughput is of interest."""


def flat(leaves: int, *shape: int) -> dict[str, Any]:
    """Return `leaves` random float32 tensors of `shape` (default (32, 4)) under "k0", "k1", ..."""
    size = shape or (32, 4)
    return {f"k{i}": torch.randn(size) for i in range(leaves)}


def nested(nodes: int, leaves: int, *shape: int) -> dict[str, Any]:
    """Return `nodes` dicts of `leaves` tensors each, under "n0", "n1", ..."""
    return {f"n{i}": flat(leaves, *shape) for i in range(nodes)}


def chain(depth: int, leaves: int = 1, *shape: int) -> dict[str, Any]:
    """Return dicts nested `depth` deep, each level holding "n" and `leaves` tensors."""
    tree = flat(leaves, *shape)
    for _ in range(depth):
        tree = {"n": tree, **flat(leaves, *shape)}
    return tree


def tree_map(fn: Callable[[Tensor], Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts of the same structure holding `fn(leaf)`: the floor of most calls on trees."""
    return {key: tree_map(fn, value) if type(value) is dict else fn(value) for key, value in tree.items()}


def tree_leaves(tree: dict[str, Any]) -> list[Tensor]:
    """Return the leaves of nested dicts, depth first."""
    found: list[Tensor] = []
    for value in tree.values():
        if type(value) is dict:
            found.extend(tree_leaves(value))
        else:
            found.append(value)
    return found


def build(data: dict[str, Any], batch: tuple[int, ...] = (32,)) -> Callable[[ModuleType], State]:
    """Return a setup whose state has `data` (nested dicts) and `td` (a container), each with its own tensors.

    Their own, so that what a workload writes reaches neither the next workload nor its own floor.
    """

    def setup(module: ModuleType) -> State:
        td = module.TensorDict(tree_map(Tensor.clone, data), batch)
        return State(data=tree_map(Tensor.clone, data), td=td, module=module)

    return setup
