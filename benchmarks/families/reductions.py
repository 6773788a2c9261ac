"""Workloads that reduce: over a batch dim, over features, per leaf, to one tensor; and that ask all leaves."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload, build, flat, nested, tree_leaves, tree_map

_OPS = ("sum", "mean", "std", "amax", "prod")


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    found = []
    for label, data in (("10 keys", flat(10)), ("100 keys", flat(100)), ("10 x 10 keys", nested(10, 10))):
        setup = build(data)
        for name in _OPS:
            found += _along(name, label, setup)
        found += [
            Workload(f"sum(reduce=True), {label}", setup, lambda s: s.td.sum(reduce=True), _pool(torch.sum)),
            Workload(f"mean(reduce=True), {label}", setup, lambda s: s.td.mean(reduce=True), _pool(torch.mean)),
            Workload(f'sum("feature", reduce=True), {label}', setup, _feature_sum, _rows(torch.sum)),
            Workload(f"sum(0, reduce=True), {label}", setup, lambda s: s.td.sum(0, reduce=True), _ends(torch.sum)),
            Workload(f"max(0), {label}", setup, lambda s: s.td.max(0), _pairs(lambda v: v.max(0))),
            Workload(f"cummax(0), {label}", setup, lambda s: s.td.cummax(0), _pairs(lambda v: v.cummax(0))),
            Workload(f"norm(), {label}", setup, lambda s: s.td.norm(), _norms),
            Workload(f"logsumexp(0), {label}", setup, lambda s: s.td.logsumexp(0), _each(lambda v: v.logsumexp(0))),
            Workload(f"all(), {label}", setup, lambda s: s.td.all(), _pool(lambda row: bool(row.all()))),
            Workload(f"param_count(), {label}", setup, lambda s: s.td.param_count(), _count),
            Workload(f"bytes(), {label}", setup, lambda s: s.td.bytes(), None),
            Workload(f"data_ptr(), {label}", setup, _addresses, None),
        ]
    ten = build(flat(10))
    found += [
        Workload("max(), 10 keys", ten, lambda s: s.td.max(), _maxima),
        Workload("min(0), 10 keys", ten, lambda s: s.td.min(0), _pairs(lambda v: v.min(0))),
        Workload("nansum(0), 10 keys", ten, lambda s: s.td.nansum(0), _each(lambda v: v.nansum(0))),
        Workload("nanmean(0), 10 keys", ten, lambda s: s.td.nanmean(0), _each(lambda v: v.nanmean(0))),
        Workload("var(reduce=True), 10 keys", ten, lambda s: s.td.var(reduce=True), _pool(torch.var)),
        Workload(
            "quantile(0.5, 0), 10 keys", ten, lambda s: s.td.quantile(0.5, 0), _each(lambda v: v.quantile(0.5, 0))
        ),
        Workload("softmax(0), 10 keys", ten, lambda s: s.td.softmax(0), _each(lambda v: v.softmax(0))),
        Workload("all(0), 10 keys", ten, lambda s: s.td.all(0), _each(lambda v: v.all(0))),
        Workload("mean((0, 1)), 3 keys of different shapes", _setup_shapes, lambda s: s.td.mean((0, 1)), _mixed_means),
        Workload("sum(reduce=True), 10 keys of 100,000", build(flat(10, 32, 3125)), _large_sum, _large_sums),
        *_gradients(),
    ]
    return found


def _along(name: str, label: str, setup: Callable[[ModuleType], State]) -> list[Workload]:
    method = getattr(Tensor, name)
    return [
        Workload(f"{name}(), {label}", setup, lambda s: getattr(s.td, name)(), _each(method)),
        Workload(f"{name}(0), {label}", setup, lambda s: getattr(s.td, name)(0), _each(lambda v: method(v, 0))),
    ]


def _gradients() -> list[Workload]:
    def setup(module: ModuleType) -> State:
        state = build(nested(10, 10))(module)
        state.td.requires_grad_()
        for leaf in state.td.values(True, True):
            leaf.grad = torch.zeros_like(leaf)
        return state

    return [
        Workload("grad, 10 x 10 keys", setup, lambda s: s.td.grad, None),
        Workload("data, 10 x 10 keys", setup, lambda s: s.td.data, _each(lambda v: v.data)),
        Workload("zero_grad(False), 10 x 10 keys", setup, lambda s: s.td.zero_grad(set_to_none=False), None),
        Workload("requires_grad_(), 10 x 10 keys", setup, lambda s: s.td.requires_grad_(), None),
    ]


def _each(fn: Callable[[Tensor], Any]) -> Callable[[State], Any]:
    return lambda s: tree_map(fn, s.data)


def _pool(fn: Callable[[Tensor], Any]) -> Callable[[State], Any]:
    return lambda s: fn(torch.cat([leaf.flatten() for leaf in tree_leaves(s.data)]))


def _rows(fn: Callable[..., Any]) -> Callable[[State], Any]:
    return lambda s: fn(torch.cat(tree_leaves(s.data), -1), -1)


def _ends(fn: Callable[..., Any]) -> Callable[[State], Any]:
    return lambda s: fn(torch.cat(tree_leaves(s.data)), 0)


def _feature_sum(state: State) -> Any:
    return state.td.sum(dim="feature", reduce=True)


def _pairs(fn: Callable[[Tensor], Any]) -> Callable[[State], Any]:
    """Two trees, of the values and of the indices."""

    def floor(state: State) -> Any:
        pairs = iter([fn(leaf) for leaf in tree_leaves(state.data)])
        seconds = []

        def first(leaf: Tensor) -> Tensor:
            value, index = next(pairs)
            seconds.append(index)
            return value

        values = tree_map(first, state.data)
        remaining = iter(seconds)
        return values, tree_map(lambda leaf: next(remaining), state.data)

    return floor


def _norms(state: State) -> Any:
    found = iter(torch._foreach_norm(tree_leaves(state.data)))
    return tree_map(lambda leaf: next(found), state.data)


def _maxima(state: State) -> Any:
    return dict(zip(state.data, torch._foreach_max(list(state.data.values())), strict=True))


def _addresses(state: State) -> None:
    # No result: addresses are others in every process.
    state.td.data_ptr()


def _count(state: State) -> Any:
    return sum([leaf.numel() for leaf in tree_leaves(state.data)])


def _large_sum(state: State) -> Any:
    return state.td.sum(reduce=True)


def _large_sums(state: State) -> Any:
    return torch.stack([leaf.sum() for leaf in state.data.values()]).sum()


def _setup_shapes(module: ModuleType) -> State:
    data = {"a": torch.randn(8, 4), "b": torch.randn(8, 4, 3), "c": torch.randn(8, 4, 2, 2)}
    return build(data, (8, 4))(module)


def _mixed_means(state: State) -> Any:
    return {key: leaf.mean((0, 1)) for key, leaf in state.data.items()}
