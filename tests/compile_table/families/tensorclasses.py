"""Members that tensorclasses and typed containers add: fields, nested classes, methods."""

from __future__ import annotations

from typing import Any

import torch

from compile_table.forms import Form
from compile_table.kinds import Pair, ramp
from tensordict import TensorClass, TensorDict, is_tensorclass, lazy_stack, tensorclass


class Inner(TensorClass):
    x: torch.Tensor

    def double(self) -> Inner:
        return self * 2

    @property
    def total(self) -> torch.Tensor:
        return self.x.sum()

    @classmethod
    def make(cls, x: torch.Tensor) -> Inner:
        return cls(x=x, batch_size=x.shape[:1])

    @staticmethod
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Outer(TensorClass):
    inner: Inner
    y: torch.Tensor
    text: str = "word"


class Checked(TensorClass):
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


class Frozen(TensorClass["frozen"]):
    x: torch.Tensor


class Plain(TensorClass["nocast"]):
    x: Any


class Auto(TensorClass["autocast"]):
    x: torch.Tensor
    n: int


class Only(TensorClass["tensor_only"]):
    x: torch.Tensor
    y: torch.Tensor


class Shadow(TensorClass["shadow"]):
    get: torch.Tensor


@tensorclass
class Decorated:
    x: torch.Tensor
    y: torch.Tensor | None = None


class Defaulting(TensorClass):
    x: torch.Tensor
    y: torch.Tensor = torch.ones(2)


class Child(Inner):
    z: torch.Tensor | None = None


def make_outer(kind: str, count: int) -> tuple[Outer]:
    return (Outer(Inner(ramp(count, 2), batch_size=[count]), ramp(count), batch_size=[count]),)


def tensorclass_form(name: str, call: Any, quick: bool = False) -> Form:
    """A form on a nested tensorclass that is its second argument."""
    return Form(
        f"tensorclass: {name}",
        lambda td, outer: call(outer),
        ("single",),
        make_outer,
        quick="single" if quick else None,
    )


FORMS = [
    tensorclass_form("field", lambda outer: outer.y * 2),
    tensorclass_form("field of a field", lambda outer: outer.inner.x * 2, quick=True),
    tensorclass_form("text field", lambda outer: outer.text),
    tensorclass_form("branch on a text", lambda outer: outer.y * 2 if outer.text == "word" else outer.y),
    tensorclass_form("get", lambda outer: outer.get("y") + outer.get(("inner", "x"))[:, 0]),
    tensorclass_form("index", lambda outer: outer[1:3]),
    tensorclass_form("row", lambda outer: outer[0].inner.x),
    tensorclass_form("arithmetic", lambda outer: outer * 2 + 1),
    tensorclass_form("clone", lambda outer: outer.clone()),
    tensorclass_form("stack", lambda outer: torch.stack([outer, outer])),
    tensorclass_form("cat", lambda outer: torch.cat([outer, outer])),
    tensorclass_form("lazy stack", lambda outer: lazy_stack([outer, outer]).inner.x),
    tensorclass_form("reshape", lambda outer: outer.reshape(2, -1)),
    tensorclass_form("unbind", lambda outer: outer.reshape(2, -1).unbind(0)),
    tensorclass_form("to", lambda outer: outer.to(torch.float64)),
    tensorclass_form("set a field", lambda outer: setattr(outer, "y", outer.y * 2)),
    tensorclass_form("set a text", lambda outer: setattr(outer, "text", "other")),
    tensorclass_form("set a field of a field", lambda outer: setattr(outer.inner, "x", outer.inner.x * 2)),
    tensorclass_form("assign a row", lambda outer: outer.__setitem__(0, outer[1].clone())),
    tensorclass_form("replace", lambda outer: outer.replace(y=outer.y * 2)),
    tensorclass_form("update", lambda outer: outer.update({"y": outer.y * 2})),
    tensorclass_form("to_dict", lambda outer: outer.to_dict()),
    tensorclass_form("to_tensordict", lambda outer: outer.to_tensordict()),
    tensorclass_form("apply", lambda outer: outer.apply(lambda leaf: leaf + 1)),
    tensorclass_form("keys", lambda outer: list(outer.keys(True, True))),
    tensorclass_form("is_tensorclass", lambda outer: is_tensorclass(outer)),
    tensorclass_form("isinstance", lambda outer: (isinstance(outer, Outer), isinstance(outer.inner, Inner))),
    tensorclass_form("batch size", lambda outer: outer.batch_size),
    tensorclass_form("lock", lambda outer: outer.lock_()),
    tensorclass_form("method", lambda outer: outer.inner.double(), quick=True),
    tensorclass_form("property", lambda outer: outer.inner.total),
    tensorclass_form("class method", lambda outer: Inner.make(outer.y)),
    tensorclass_form("static method", lambda outer: Inner.scale(outer.y)),
    tensorclass_form("construct", lambda outer: Outer(outer.inner, outer.y, batch_size=outer.batch_size)),
    tensorclass_form(
        "construct with values", lambda outer: Outer(outer.inner, outer.y, "other", batch_size=outer.batch_size)
    ),
    tensorclass_form("post init", lambda outer: Checked(outer.y, batch_size=outer.batch_size)),
    tensorclass_form("frozen", lambda outer: Frozen(outer.y, batch_size=outer.batch_size)),
    tensorclass_form("nocast", lambda outer: Plain(3, batch_size=[])),
    tensorclass_form("autocast", lambda outer: Auto(outer.y, 3, batch_size=outer.batch_size)),
    tensorclass_form("tensor_only", lambda outer: Only(outer.y, outer.y, batch_size=outer.batch_size) * 2),
    tensorclass_form("shadow", lambda outer: Shadow(get=outer.y, batch_size=outer.batch_size).get * 2),
    tensorclass_form("decorated", lambda outer: Decorated(outer.y, batch_size=outer.batch_size) + 1),
    tensorclass_form("tensor default", lambda outer: Defaulting(outer.y) * 2),
    tensorclass_form("child", lambda outer: Child(outer.inner.x, outer.y, batch_size=outer.batch_size)[0]),
    tensorclass_form("equal", lambda outer: (outer == outer).inner.x.all()),
    tensorclass_form("sum", lambda outer: outer.sum(0)),
    tensorclass_form("in a container", lambda outer: TensorDict(o=outer, batch_size=outer.batch_size)["o"].y),
    tensorclass_form("nested in a container", lambda outer: TensorDict(o=outer, batch_size=outer.batch_size)[1:]),
    tensorclass_form("none field", lambda outer: Pair(a=outer.y, batch_size=outer.batch_size).z),
    tensorclass_form("branch on none", lambda outer: outer.y if Pair(a=outer.y).z is None else None),
    tensorclass_form("names", lambda outer: outer.names),
    tensorclass_form("flatten keys", lambda outer: outer.to_tensordict().flatten_keys(".")),
    tensorclass_form("vmap", lambda outer: torch.vmap(lambda row: row.x * 2)(outer.inner)),
    tensorclass_form("tree map", lambda outer: torch.utils._pytree.tree_map(lambda leaf: leaf * 2, outer)),
]
