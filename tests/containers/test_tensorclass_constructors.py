"""Tensorclasses whose `__init__` assigns the fields, and classes of tensors and containers only."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import sys
import typing
from collections import UserDict
from dataclasses import InitVar, field
from typing import Any

import pytest
import torch

import tensordict.base
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorClass,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    TypedTensorDict,
    from_dict,
    lazy_stack,
    tensorclass,
)


class Grid(TensorClass):
    """A class whose constructor assigns the fields and then checks them."""

    points: torch.Tensor
    cells: torch.Tensor
    _memo: Any = None

    def __init__(self, points: torch.Tensor, cells: torch.Tensor | None = None, *, closed: bool = False) -> None:
        assert self.cells is None and list(self.keys()) == []
        self.points = points
        self.cells = points[:0] if cells is None else cells
        self.__post_init__()
        if closed:
            self._memo = "closed"

    def __post_init__(self) -> None:
        if self.points.ndim != 2:
            raise ValueError(f"points have 2 dims, got {self.points.ndim}")


@tensorclass(tensor_only=True, shadow=True)
class Mesh:
    """As programs write them: containers beside tensors, made of whatever mapping is given."""

    points: torch.Tensor
    data: TensorDict
    extra: TensorDictBase | None
    _cache: TensorDict[str, Grid]

    def __init__(self, points: torch.Tensor, data: Any = None, extra: Any = None, *, _cache: Any = None) -> None:
        self.points = points
        self.data = data
        self.extra = extra
        self._cache = _cache
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.data is None:
            self.data = TensorDict({}, batch_size=[])
        self.data.batch_size = self.points.shape[:1]


# --- a constructor of its own ---------------------------------------------------------------------------------------


@tensorclass
class Decorated:
    points: torch.Tensor
    cells: torch.Tensor
    _memo: Any = None

    def __init__(self, points: torch.Tensor, cells: Any = None, *, closed: bool = False) -> None:
        self.points = points
        self.cells = points[:0] if cells is None else cells
        self._memo = "closed" if closed else None
        if points.ndim != 2:
            raise ValueError(f"points have 2 dims, got {points.ndim}")


@pytest.mark.parametrize("made", [Grid, Decorated])
def test_fields_are_assigned_one_by_one(made: Any) -> None:
    points = torch.rand(4, 2)
    grid = made(points)
    assert grid.points is points and grid.cells.shape == (0, 2) and grid._memo is None
    assert grid.batch_size == torch.Size([]) and grid.device is None and not grid.is_locked
    assert made(points, closed=True)._memo == "closed"
    with pytest.raises(ValueError, match="points have 2 dims, got 1"):
        made(torch.zeros(3))
    with pytest.raises(TypeError, match="unknown"):
        made(points, unknown=1)
    with pytest.raises(TypeError, match="points"):
        made()


def test_the_arguments_of_every_tensorclass() -> None:
    points = torch.rand(4, 2)
    grid: Any = Grid(points, points, batch_size=[4], device="cpu", names=["n"], lock=True)  # type: ignore[call-arg]
    assert grid.batch_size == torch.Size([4]) and grid.device == torch.device("cpu") and grid.names == ["n"]
    assert grid.is_locked and grid[1].points.shape == (2,) and type(grid[1:]) is Grid
    assert Grid(points, points, batch_size=4).batch_size == (4,)  # type: ignore[call-arg]
    assert Grid(points, points, batch_size=None).batch_size == ()  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match=r"Grid: entry 'points' has shape \[4, 2\].*\[3\]"):
        Grid(points, points, batch_size=[3])  # type: ignore[call-arg]
    names = list(inspect.signature(Grid).parameters)
    assert names == ["points", "cells", "closed", "batch_size", "device", "names", "lock"]
    assert list(inspect.signature(Grid.__init__).parameters) == ["self", *names]


def test_what_an_instance_can_do() -> None:
    grid: Any = Grid(torch.rand(4, 2), torch.rand(4, 3), batch_size=[4])  # type: ignore[call-arg]
    for same in (grid.clone(), grid + 0, copy.deepcopy(grid), pickle.loads(pickle.dumps(grid)), torch.cat([grid])):
        assert type(same) is Grid and torch.equal(same.points, grid.points) and same.batch_size == (4,)
    assert torch.stack([grid, grid]).cells.shape == (2, 4, 3)
    assert lazy_stack([Grid(torch.zeros(n, 2)) for n in (1, 2)])[1].points.shape == (2, 2)
    assert Grid.from_tensordict(TensorDict(points=torch.zeros(4, 2))).cells is None


def test_arguments_that_the_constructor_has_itself() -> None:
    class Sized(TensorClass):
        x: torch.Tensor

        def __init__(self, x: torch.Tensor, batch_size: Any = None) -> None:
            self.batch_size = x.shape[:1] if batch_size is None else batch_size
            self.x = x

    class Handing(TensorClass):
        x: torch.Tensor
        y: torch.Tensor

        def __init__(self, x: torch.Tensor, **kwargs: Any) -> None:
            super().__init__(x=x, y=x + 1, **kwargs)

    class Closed(TensorClass):
        x: torch.Tensor

        def __init__(self, x: torch.Tensor) -> None:
            super().__init__(x=x)

    x = torch.arange(3.0)
    assert Closed(x, lock=True).is_locked  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Closed\(\) got 'batch_size'.*pass them on"):
        Closed(x, batch_size=[3])  # type: ignore[call-arg]
    assert Sized(x).batch_size == (3,) and Sized(x, batch_size=[]).batch_size == ()
    assert Sized(x, device="cpu").device == torch.device("cpu")  # type: ignore[call-arg]
    made = Handing(x, batch_size=[3], lock=True)
    assert made.batch_size == (3,) and made.is_locked and made.y.tolist() == [1, 2, 3]
    assert list(inspect.signature(Handing).parameters) == ["x", "kwargs"]


def test_constructors_of_subclasses() -> None:
    class Wide(Grid):
        def area(self) -> int:
            return self.points.numel()

    class Coloured(Grid):
        colour: torch.Tensor

        def __init__(self, points: torch.Tensor, colour: torch.Tensor) -> None:
            super().__init__(points, closed=True)
            self.colour = colour

    class Declared(Grid):
        colour: torch.Tensor | None = None

    points = torch.zeros(4, 2)
    assert Wide(points, closed=True)._memo == "closed" and Wide(points).area() == 8
    made: Any = Coloured(points, torch.ones(4), device="cpu")  # type: ignore[call-arg]
    assert made._memo == "closed" and made.colour.tolist() == [1] * 4 and made.device == torch.device("cpu")
    # One with fields of its own and no constructor is given one, as a dataclass is.
    assert Declared(points=points, cells=points, colour=points, batch_size=[4]).colour is points  # type: ignore[call-arg]


def test_the_constructor_that_is_written() -> None:
    class Base(TensorClass):
        self: torch.Tensor
        locals: str = "none"
        scale: InitVar[float] = 1.0
        tags: list[str] = field(default_factory=lambda: ["a", "b"])
        fixed: str = field(default="seven", init=False)
        made: dict[str, int] = field(default_factory=dict, init=False)
        late: torch.Tensor = field(kw_only=True)

        def __post_init__(self, scale: float) -> None:
            self.late = self.late * scale

    class Child(Base):
        more: torch.Tensor | None = None

    x = torch.ones(2)
    shown = list(inspect.signature(Base).parameters.values())
    own = ["batch_size", "device", "names", "non_blocking", "lock"]
    assert [p.name for p in shown] == ["self", "locals", "scale", "tags", "late", *own]
    assert [p.name for p in shown if p.default is p.empty] == ["self", "late"]
    assert [p.name for p in shown if p.kind is p.KEYWORD_ONLY] == ["late", *own]
    assert repr(shown[3].default) == "<factory>" and shown[1].annotation == "str"
    assert list(inspect.signature(Base.__init__).parameters.values())[1:] == shown
    assert Base.__init__.__qualname__ == "test_the_constructor_that_is_written.<locals>.Base.__init__"
    assert Base.__init__.__annotations__["lock"] is bool and Base.__init__.__module__ == __name__
    for cls in (Base, Child):
        made: Any = cls(x, late=x, scale=2.0, tags=["c", "d"], batch_size=2, lock=True)
        # Fields keep their order, whatever the order of the arguments.
        assert list(made.keys()) == ["self", "locals", "tags", "fixed", "made", "late"]
        assert (made.locals, made.tags, made.fixed, made.made) == ("none", ["c", "d"], "seven", {}) and made.is_locked
        assert made.late.tolist() == [2, 2] and made.batch_size == (2,)
        first, second = cls(x, late=x), cls(x, late=x)
        assert first.tags == ["a", "b"] and first.get("made") is not second.get("made")
        with pytest.raises(TypeError, match=rf"{cls.__name__}\(\) is missing 'late', which"):
            cls(x)
        with pytest.raises(TypeError, match=rf"{cls.__name__}\(\) is missing 'late', 'self', which"):
            cls()
        with pytest.raises(TypeError, match=rf"{cls.__name__}\(\) got 'fixed'.*init=False"):
            cls(x, late=x, fixed=1)
        with pytest.raises(TypeError, match=rf"{cls.__name__}\(\) got 'tag'.*did you mean 'tags'"):
            cls(x, late=x, tag=["a"])


def test_parents_whose_constructor_is_called() -> None:
    class Parent(TensorClass):
        x: torch.Tensor

    class Child(Parent):
        y: torch.Tensor

        def __init__(self, x: torch.Tensor, **given: Any) -> None:
            super().__init__(x, **given)
            self.y = x + 1

    class Grandchild(Child):
        pass

    for cls in (Child, Grandchild):
        made: Any = cls(torch.zeros(2), batch_size=[2], lock=False)
        assert type(made) is cls and made.y.tolist() == [1, 1] and made.batch_size == (2,)
        # It takes the fields of its own class, like the constructor of a dataclass.
        with pytest.raises(TypeError, match=r"Parent\(\) got 'y', which is no field of Parent"):
            cls(torch.zeros(2), y=torch.zeros(2))


def test_values_that_do_not_fit() -> None:
    class Kept(TensorClass):
        x: torch.Tensor
        y: torch.Tensor | None = None

        def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
            with contextlib.suppress(RuntimeError):
                super().__init__(x, y, batch_size=[2])

    made = Kept(torch.zeros(2), torch.zeros(3))
    assert list(made.keys()) == ["x"] and made[0].x.shape == ()


def test_attributes_that_are_no_fields() -> None:
    class Odd(TensorClass):
        x: torch.Tensor

        def __init__(self, x: torch.Tensor) -> None:
            self.other = 3

    with pytest.raises(AttributeError, match="'other', which is no field of Odd"):
        Odd(torch.zeros(1))


def test_frozen_with_a_constructor() -> None:
    class Fixed(TensorClass["frozen"]):  # type: ignore[misc, type-arg]
        x: torch.Tensor

        def __init__(self, x: torch.Tensor) -> None:
            super().__init__(x=x)

    assert Fixed(torch.zeros(1)).is_locked


@pytest.mark.seconds
def test_compiled_construction() -> None:
    def build(points: torch.Tensor) -> torch.Tensor:
        grid: Any = Grid(points, points, batch_size=[4])  # type: ignore[call-arg]
        mesh: Any = Mesh(points, {"a": points})
        return (grid + 1).points + mesh.data["a"]  # type: ignore[no-any-return]

    points = torch.rand(4, 2)
    torch.testing.assert_close(torch.compile(build, fullgraph=True, backend="eager")(points), build(points))


# --- classes of tensors and containers ------------------------------------------------------------------------------


def test_containers_in_a_class_of_tensors() -> None:
    points = torch.rand(4, 2)
    mesh: Any = Mesh(points)
    assert type(mesh.data) is TensorDict and mesh.data.batch_size == (4,) and mesh.extra is None
    given = TensorDict(t=torch.zeros(4), batch_size=[4])
    mesh = Mesh(points, given, given, _cache={"grid": Grid(points)})
    assert mesh.data is given and mesh.extra is given and type(mesh._cache) is TensorDict
    assert type(mesh._cache["grid"]) is Grid
    mesh = Mesh(points, {"t": [1, 2, 3, 4], "n": {"u": torch.zeros(4, 5)}}, UserDict(k=1.0))
    assert mesh.data["t"].tolist() == [1, 2, 3, 4] and mesh.data["n"].batch_size == (4,)
    assert type(mesh.extra) is TensorDict and mesh.extra["k"] == 1
    assert type(mesh[...].data) is TensorDict and mesh.to(torch.float64).data["n", "u"].dtype == torch.float64


def test_writing_containers() -> None:
    class Two(TensorClass, tensor_only=True):
        x: torch.Tensor
        c: TensorDict | None = None

    made: Any = Two(torch.zeros(3), {"a": [1, 2, 3]}, batch_size=[3])
    assert made.c.batch_size == (3,) and made.c["a"].tolist() == [1, 2, 3]
    for write in (
        lambda value: setattr(made, "c", value),
        lambda value: made.set("c", value),
        lambda value: made.__setitem__("c", value),
        lambda value: made.update({"c": value}),
    ):
        made.c = None
        write({"b": torch.ones(3)})
        assert type(made.c) is TensorDict and made.c.batch_size == (3,) and list(made.c.keys()) == ["b"]
    # A container stores other values, and gives them back unchanged.
    tensor = torch.ones(3, 2)
    made.c = tensor
    assert made.c is tensor
    made.c = [4, 5, 6]
    assert made.c.tolist() == [4, 5, 6]
    for value in ("text", NonTensorData("text", batch_size=[3])):
        made.c = value
        assert made.c == "text"
    with pytest.raises(RuntimeError, match=r"Two: entry 'c' has shape \[\].*\[3\]"):
        made.c = 1.5
    with pytest.raises(RuntimeError, match="'c'.*'a'"):
        made.c = {"a": torch.zeros(7)}
    # A field of tensors takes a container too, and still no value.
    made.x = TensorDict(a=torch.zeros(3), batch_size=[3])
    assert type(made.x) is TensorDict and made.x["a"].shape == (3,)
    with pytest.raises(TypeError, match=r"Two\.x is a field of a tensor_only class, got a str"):
        made.x = "text"


@pytest.mark.parametrize(
    "hint",
    [
        TensorDict, TensorDictBase, TensorDict | None, typing.Optional[TensorDict], Grid, "Grid | None",  # noqa: UP045
        LazyStackedTensorDict, torch.Tensor | TensorDict, TensorDict[str, Grid], "TensorDictBase[str, Grid] | None",
    ],
    ids=str,
)  # fmt: skip
def test_annotations_of_containers(hint: Any) -> None:
    body = {"__annotations__": {"f": hint}, "__module__": __name__}
    made: Any = type("Made", (TensorClass["tensor_only"],), body)
    assert type(made({"points": torch.zeros(1, 2)}).f) is TensorDict


@pytest.mark.parametrize(
    "hint", [str, dict, Any, "list[TensorDict]", "TensorDict | str", dict[str, TensorDict]], ids=str
)
def test_annotations_of_other_values(hint: Any) -> None:
    body = {"__annotations__": {"f": hint}, "__module__": __name__}
    with pytest.raises(TypeError, match="Made is tensor_only, but its field 'f' is annotated .* TensorDict"):
        type("Made", (TensorClass["tensor_only"],), body)


@pytest.mark.parametrize("cls", [TensorDict, TensorDictBase, LazyStackedTensorDict, TensorDictParams])
def test_containers_with_arguments_in_annotations(cls: Any) -> None:
    hint = cls[str, Grid]
    assert typing.get_origin(hint) is cls and typing.get_args(hint) == (str, Grid)
    assert typing.get_args(hint | None) == (hint, type(None))
    assert typing.get_type_hints(type("Made", (), {"__annotations__": {"f": hint}}))["f"] == hint


def test_fields_of_containers_with_arguments() -> None:
    class Domain(TensorClass, autocast=True):
        parts: TensorDict[str, Grid]  # type: ignore[type-arg]

    made = Domain({"left": Grid(torch.zeros(4, 2))})  # type: ignore[arg-type]
    assert type(made.parts) is TensorDict and type(made.parts["left"]) is Grid


def test_what_set_says_of_values() -> None:
    class Only(TypedTensorDict, tensor_only=True):
        x: torch.Tensor

    class Fields(TensorClass):
        x: torch.Tensor
        y: Any = None

    only: Any = Only(x=torch.zeros(2), batch_size=[2])
    for write in (
        lambda: only.set("x", "text"),
        lambda: setattr(only, "x", "text"),
        lambda: only.update({"x": "text"}),
    ):
        with pytest.raises(TypeError, match=r"Only\.x is a field of a tensor_only class, got a str"):
            write()
    made: Any = Fields(torch.zeros(2), batch_size=[2])
    assert made.set("y", "text") is made and made.get("y") == "text" and made.y == "text"
    assert made.set("y", {"k": 1}).y == {"k": 1} and made.set("y", None).y is None and "y" not in made
    assert made.set("x", torch.ones(2), inplace=True).x.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match=r"Fields: entry 'x' has shape \[3\]"):
        made.set("x", torch.zeros(3))
    with pytest.raises(AttributeError, match="'z', which is no field of Fields"):
        made.set("z", torch.zeros(2))
    with pytest.raises(RuntimeError, match="locked"):
        made.lock_().set("y", "text")


# --- options and methods of level 0.15.3 -----------------------------------------------------------------------------


class Pose(TensorClass):
    q: torch.Tensor
    label: str | None = None


class Observation(TensorClass):
    pose: Pose
    other: Pose | None = None
    free: Any = None


def test_nested_fields_become_their_class() -> None:
    tree = {name: {"q": torch.zeros(5, 4)} for name in ("pose", "other", "free")}
    made = Observation.from_dict(tree, batch_size=[5])
    assert type(made.pose) is Pose and type(made.other) is Pose and type(made.free) is TensorDict
    td = TensorDict(tree, [5])
    wrapped = Observation.from_tensordict(td)
    assert type(wrapped.pose) is Pose and wrapped.pose.q is td["pose", "q"]
    assert type(td["pose"]) is TensorDict  # the container keeps its own entries
    locked = Observation.from_tensordict(td.lock_())
    assert type(locked.pose) is Pose and locked.is_locked and locked.pose.is_locked
    back = Observation.from_tensordict(wrapped.to_tensordict())
    assert type(back.pose) is Pose and (back == wrapped).all()


def test_nested_containers_with_other_keys_stay_containers() -> None:
    made = Observation.from_dict({"pose": {"unknown": torch.zeros(1)}})
    assert type(made.pose) is TensorDict
    stack = lazy_stack([TensorDict(pose={"q": torch.zeros(2)}) for _ in range(2)])
    assert type(Observation.from_tensordict(stack)._tensordict) is type(stack)
    plain = TensorDict(free=torch.zeros(1))
    assert Observation.from_tensordict(plain)._tensordict is plain
    assert Observation.from_tensordict(plain, safe=None)._tensordict is plain


def rebuild(td: Any) -> Any:
    return Observation.from_tensordict(td) * 2


def test_nested_fields_become_their_class_in_compiled_code() -> None:
    td = TensorDict(pose={"q": torch.ones(2)})
    assert type(Observation.from_tensordict(td).pose) is Pose  # the annotations are evaluated outside compiled code
    made = torch.compile(rebuild, fullgraph=True, backend="eager")(td)
    assert type(made.pose) is Pose and (made.pose.q == 2).all()


def test_fields_by_name_only() -> None:
    @tensorclass(kw_only=True)
    class Decorated:
        b: int = 1
        a: torch.Tensor  # may follow a field with a default

    class Keyword(TensorClass, kw_only=True):
        a: torch.Tensor

    class Single(TensorClass):
        q: torch.Tensor

    class Child(Keyword):
        b: torch.Tensor

    @tensorclass(kw_only=True)
    class Decorated2(Single):
        extra: torch.Tensor

    assert Decorated(a=torch.ones(1)).b == 1  # type: ignore[call-arg]
    for cls in (Decorated, Keyword):
        with pytest.raises(TypeError, match="takes 0 fields by position"):
            cls(torch.ones(1))
    child = Child(torch.ones(2), a=torch.zeros(2), batch_size=[2])
    assert child[0].b == 1 and (child.a == 0).all()
    assert Decorated2(torch.ones(1), extra=torch.ones(1)).q == 1
    with pytest.raises(TypeError, match="takes 1 fields by position"):
        Decorated2(torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("chosen", [False, True])
def test_post_init_runs_for_new_instances_only(chosen: bool) -> None:
    calls = []

    @tensorclass(skip_post_init_on_rebuild=chosen)
    class Counting:
        a: torch.Tensor

        def __post_init__(self) -> None:
            calls.append(1)

    class Bracketed(TensorClass["skip_post_init_on_rebuild"]):  # type: ignore[name-defined]
        a: torch.Tensor

    data: Any = Counting(torch.ones(2), batch_size=[2])  # type: ignore[call-arg]
    _ = data[0], data.clone(), torch.stack([data, data])
    assert len(calls) == 1 and Bracketed(torch.ones(1)).a == 1
    data.__replace__(a=torch.zeros(2))
    assert len(calls) == 2


def test_replaced_fields() -> None:
    class Locked(TensorClass, frozen=True):
        x: torch.Tensor
        y: torch.Tensor | None = None

    for cls in (Locked, Pose):
        name = next(iter(cls._layout.names))
        data: Any = cls(torch.zeros(2), batch_size=[2], names=["t"], device="cpu")
        new = data.__replace__(**{name: torch.ones(2)})
        assert type(new) is cls and (new.get(name) == 1).all() and (data.get(name) == 0).all()
        assert new.batch_size == (2,) and new.names == ["t"] and new.device == torch.device("cpu")
        assert data.__replace__(batch_size=[], names=None).batch_size == ()
        with pytest.raises(TypeError, match="no field"):
            data.__replace__(unknown=1)
    pose = Pose(torch.zeros(2), label="a")
    assert pose.__replace__(q=torch.ones(2)).label == "a" and pose.__replace__(label=None).label is None
    assert pose.__replace__(label="b").q is pose.q
    many = torch.stack([Pose(torch.zeros(2), label="a"), Pose(torch.zeros(2), label="b")])
    assert many.__replace__(q=torch.ones(2, 2)).label == ["a", "b"]
    assert not pose.lock_().__replace__(label="b").is_locked
    holder = NonTensorData("a", batch_size=[2]).__replace__(data="b")
    assert holder.data == "b" and holder.batch_size == (2,)
    if sys.version_info >= (3, 13):
        assert copy.replace(many, q=torch.ones(2, 2)).batch_size == (2,)


def test_dicts_with_names_and_without_checks() -> None:
    tree = {"a": torch.ones(2, 3)}
    for make in (from_dict, tensordict.base.from_dict):
        assert make(tree, batch_size=[2], names=["t"]).names == ["t"]
        assert make(tree, auto_batch_size=True, names=["t", "u"]).names == ["t", "u"]
        with pytest.raises(ValueError, match="names"):
            make(tree, batch_size=[2], names=["t", "u"])

    class Step(TypedTensorDict):
        a: torch.Tensor
        b: torch.Tensor

    with pytest.raises(TypeError, match="missing 'b'"):
        Step.from_dict(tree)
    step = Step.from_dict({**tree, "c": 1}, check=False, batch_size=[], names=None)
    assert type(step) is Step and step.a.shape == (2, 3) and "c" in step
    with pytest.raises(AttributeError):
        _ = step.b
