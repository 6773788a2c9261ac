"""Workloads on tensorclasses: making them, their fields, and the operations of containers on them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload

_MANY = [f"field{i}" for i in range(20)]


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family."""
    return [
        Workload("init, 1 field", _setup, lambda s: s.Inner(s.w, batch_size=[32]), lambda s: _check(w=s.w)),
        Workload("init, 20 fields", _setup, lambda s: s.Many(**s.many, batch_size=[32]), lambda s: _check(**s.many)),
        Workload("init, nested", _setup, _init_nested, lambda s: {**_check(x=s.x), "inner": _check(w=s.w)}),
        Workload("init, value field", _setup, lambda s: s.Outer(s.x, label="a", batch_size=[32]), None),
        Workload("from_tensordict", _setup, lambda s: s.Inner.from_tensordict(s.plain), None),
        Workload("read a tensor", _setup, lambda s: s.item.x, lambda s: s.fields.x),
        Workload("read a tensor, depth 2", _setup, lambda s: s.item.inner.w, lambda s: s.fields.inner.w),
        Workload("read a value", _setup, lambda s: s.item.label, lambda s: s.fields.label),
        Workload("read a value, depth 2", _setup, lambda s: s.item.inner.label, lambda s: s.fields.inner.label),
        Workload("write a tensor", _setup, _write_tensor, lambda s: setattr(s.fields, "x", s.x)),
        Workload("write a tensor, depth 2", _setup, _write_tensor_below, lambda s: setattr(s.fields.inner, "w", s.w)),
        Workload("write a value", _setup, _write_value, lambda s: setattr(s.fields, "label", "b")),
        Workload("write a value, depth 2", _setup, _write_value_below, lambda s: setattr(s.fields.inner, "label", "b")),
        Workload("get", _setup, lambda s: s.item.get("x"), lambda s: s.fields.x),
        Workload("set", _setup, lambda s: s.item.set("x", s.x).x, _set_floor),
        Workload("batch_size", _setup, lambda s: s.item.batch_size, None),
        Workload("index, int", _setup, lambda s: s.item[3], _each(lambda t: t[3])),
        Workload("index, slice", _setup, lambda s: s.item[2:9], _each(lambda t: t[2:9])),
        Workload("index, tensor", _setup, lambda s: s.item[s.index], _index_floor),
        Workload("stack of 100", _setup, lambda s: torch.stack(s.hundred), _stack_floor),
        Workload("lazy stack of 100", _setup, lambda s: s.module.lazy_stack(s.hundred), None),
        Workload("cat of 100", _setup, lambda s: torch.cat(s.hundred), _cat_floor),
        Workload("split", _setup, lambda s: s.item.split(4), _split_floor),
        Workload("unbind", _setup, lambda s: s.item.unbind(0), _unbind_floor),
        Workload("reshape", _setup, lambda s: s.item.reshape(4, 8), _each(lambda t: t.reshape(4, 8, *t.shape[1:]))),
        Workload("clone", _setup, lambda s: s.item.clone(), _each(lambda t: t.clone())),
        Workload("zeros_like", _setup, lambda s: torch.zeros_like(s.item), _each(torch.zeros_like)),
        Workload("ones_like", _setup, lambda s: torch.ones_like(s.item), _each(torch.ones_like)),
        Workload("apply", _setup, lambda s: s.item.apply(_same), _each(_same)),
        Workload("to_tensordict", _setup, lambda s: s.item.to_tensordict(), _each(lambda t: t.clone())),
    ]


def _setup(module: ModuleType) -> State:
    @module.tensorclass
    class Inner:
        w: torch.Tensor
        label: str | None = None

    @module.tensorclass
    class Outer:
        x: torch.Tensor
        inner: Inner | None = None
        label: str | None = None

    many = module.tensorclass(type("Many", (), {"__annotations__": dict.fromkeys(_MANY, torch.Tensor)}))

    def make(x: Tensor, w: Tensor) -> Any:
        return Outer(x, Inner(w, label="below", batch_size=[32]), "above", batch_size=[32])

    tensors = [(torch.randn(32, 4), torch.randn(32)) for _ in range(100)]
    x, w = tensors[0]
    return State(
        module=module,
        Inner=Inner,
        Outer=Outer,
        Many=many,
        many={name: torch.randn(32, 4) for name in _MANY},
        x=x,
        w=w,
        index=torch.arange(0, 32, 3),
        item=make(x, w),
        hundred=[make(*pair) for pair in tensors],
        plain=module.TensorDict({"w": w}, [32]),
        fields=SimpleNamespace(x=x, label="above", inner=SimpleNamespace(w=w, label="below")),
        tensors=tensors,
    )


def _check(**fields: Tensor) -> dict[str, Tensor]:
    for value in fields.values():
        if value.shape[0] != 32:
            raise RuntimeError
    return dict(fields)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _init_nested(state: State) -> Any:
    return state.Outer(state.x, state.Inner(state.w, batch_size=[32]), batch_size=[32])


def _write_tensor(state: State) -> None:
    state.item.x = state.x


def _write_tensor_below(state: State) -> None:
    state.item.inner.w = state.w


def _write_value(state: State) -> None:
    state.item.label = "b"


def _write_value_below(state: State) -> None:
    state.item.inner.label = "b"


def _set_floor(state: State) -> Tensor:
    state.fields.x = state.x
    return state.fields.x


def _each(fn: Callable[[Tensor], Tensor]) -> Callable[[State], Any]:
    return lambda state: {"x": fn(state.x), "inner": {"w": fn(state.w)}}


def _index_floor(state: State) -> Any:
    return {"x": state.x[state.index], "inner": {"w": state.w[state.index]}}


def _split_floor(state: State) -> Any:
    return _pieces(state.x.split(4), state.w.split(4))


def _unbind_floor(state: State) -> Any:
    return _pieces(state.x.unbind(0), state.w.unbind(0))


def _pieces(outer: tuple[Tensor, ...], inner: tuple[Tensor, ...]) -> Any:
    return [{"x": x, "inner": {"w": w}} for x, w in zip(outer, inner, strict=True)]


def _stack_floor(state: State) -> Any:
    return _join(torch.stack, state)


def _cat_floor(state: State) -> Any:
    return _join(torch.cat, state)


def _join(join: Callable[[list[Tensor]], Tensor], state: State) -> Any:
    return {"x": join([x for x, _ in state.tensors]), "inner": {"w": join([w for _, w in state.tensors])}}
