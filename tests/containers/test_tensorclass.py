"""Tensorclasses as classes: declaring them, their fields, options, results, and what goes wrong.

`tests/contract/` tests them as containers; its kinds include them.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import pathlib
import pickle
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, Optional, Protocol, TypedDict, TypeVar, get_type_hints

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from typing_extensions import NotRequired

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    MetaData,
    NonTensorData,
    PersistentTensorDict,
    TensorClass,
    TensorCollection,
    TensorDict,
    TensorDictBase,
    TensorDictParams,
    TypedTensorDict,
    from_dataclass,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
    tensorclass,
)

T = TypeVar("T")


class Inner(TensorClass):
    w: torch.Tensor
    note: str | None = None


class Data(TensorClass):
    x: torch.Tensor
    inner: Inner | None = None
    label: str = "none"
    other: Optional[torch.Tensor] = None  # noqa: UP045 (one of the spellings under test)
    anything: Any = None


class Node(TensorClass):
    value: torch.Tensor
    child: Node | None = None


def data(n: int = 3) -> Data:
    return Data(torch.arange(n * 2.0).reshape(n, 2), Inner(torch.ones(n), batch_size=[n]), batch_size=[n])


# --- the class --------------------------------------------------------------------------------------------------------


def test_both_spellings_make_the_same_kind_of_class() -> None:
    @tensorclass
    class Decorated:
        x: torch.Tensor
        label: str = "a"

        def double(self) -> Any:
            return self.x * 2

    class Derived(TensorClass):
        x: torch.Tensor
        label: str = "a"

    for cls in (Decorated, Derived):
        made: Any = cls(torch.ones(2))  # type: ignore[call-arg]
        assert issubclass(cls, TensorClass) and isinstance(made, TensorClass) and isinstance(made, TensorCollection)
        assert not isinstance(made, TensorDictBase)
        assert is_tensorclass(cls) and is_tensorclass(made) and is_tensor_collection(made)
        assert dataclasses.is_dataclass(cls)
        assert [f.name for f in dataclasses.fields(cls)] == ["x", "label"] == [f.name for f in made.fields()]
        assert cls.__expected_keys__ == {"x", "label"}  # type: ignore[attr-defined]
        assert list(inspect.signature(cls).parameters)[:3] == ["x", "label", "batch_size"]
    assert torch.equal(Decorated(torch.ones(2)).double(), torch.full((2,), 2.0))
    assert not is_tensorclass(TensorDict()) and not is_tensorclass(3)


def test_places_to_import_from() -> None:
    from tensordict.prototype import tensorclass as in_prototype
    from tensordict.tensorclass import tensorclass as in_its_room

    assert tensorclass is in_prototype is in_its_room


def test_dataclass_features() -> None:
    class Features(TensorClass):
        constant: ClassVar[int] = 3
        x: torch.Tensor
        made: list[str] = field(default_factory=list)
        fixed: int = field(default=7, init=False)
        scale: InitVar[float] = 1.0
        named: torch.Tensor | None = field(default=None, kw_only=True)

        def __post_init__(self, scale: float) -> None:
            self.x = self.x * scale

    one, two = Features(torch.ones(2), ["a"], 2.0, named=torch.zeros(1)), Features(torch.ones(2))
    assert one.x.tolist() == [2.0, 2.0] and two.x.tolist() == [1.0, 1.0]
    assert one.made == ["a"] and one.named is not None and two.named is None
    assert Features.constant == one.constant == 3 and one.fixed == 7
    assert [f.name for f in dataclasses.fields(Features)] == ["x", "made", "fixed", "named"]
    with pytest.raises(TypeError, match=r"Features\(\) got 'fixed'"):
        Features(torch.ones(2), fixed=3)  # type: ignore[call-arg]


def test_inheritance() -> None:
    class Child(Data):
        extra: torch.Tensor | None = None
        x: torch.Tensor

    with pytest.raises(TypeError, match=r"Child\(\) is missing 'x'"):
        Child(label="given")  # type: ignore[call-arg]
    child = Child(torch.zeros(2), label="given", extra=torch.ones(2), batch_size=[2])
    assert isinstance(child, Data) and isinstance(child[0], Child)
    assert [f.name for f in Child.fields()] == ["x", "inner", "label", "other", "anything", "extra"]
    assert child.extra is not None and child.label == "given"


def test_a_plain_dataclass_becomes_a_tensorclass() -> None:
    @dataclass
    class Plain:
        x: torch.Tensor
        n: str = "n"

    @tensorclass
    class Below(Plain):
        y: torch.Tensor | None = None

    made: Any = Below(torch.zeros(3), y=torch.ones(3), batch_size=[3])  # type: ignore[call-arg]
    assert made[1:].y.shape == (2,) and isinstance(made, Plain)
    both: Any = tensorclass(Plain)(torch.zeros(3), batch_size=[3])
    assert both[0].x.shape == () and isinstance(both, TensorClass)


def test_super_in_a_decorated_class() -> None:
    @tensorclass
    class Louder:
        x: torch.Tensor

        def clone(self, recurse: bool = True) -> Any:
            return super().clone(recurse).apply(lambda leaf: leaf + 1)  # type: ignore[misc]

    assert Louder(torch.zeros(1)).clone().x.item() == 1


def test_generic_and_self_referring_classes() -> None:
    class Box(TensorClass, Generic[T]):
        item: T

    assert Box[torch.Tensor](torch.zeros(2)).item.shape == (2,)
    tree = Node(torch.zeros(2), Node(torch.ones(2), batch_size=[2]), batch_size=[2])
    stacked = torch.stack([tree, tree])
    assert type(stacked.child) is Node and stacked.child.value.shape == (2, 2) and stacked.child.child is None


def test_user_methods_properties_and_operators() -> None:
    class Mine(TensorClass):
        x: torch.Tensor

        @property
        def double(self) -> torch.Tensor:
            return self.x * 2

        @classmethod
        def ones(cls) -> Mine:
            return cls(torch.ones(2))

        def __add__(self, other: Any) -> Any:
            return "added"

        def reshape(self, *shape: Any) -> Any:  # type: ignore[override]
            return "mine"

    made = Mine.ones()
    assert made.double.tolist() == [2, 2] and made + 1 == "added" and made.reshape(2) == "mine"
    assert (made * 3).x.tolist() == [3, 3]
    with pytest.raises(AttributeError):
        made.double = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["reshape", "batch_size", "keys", "lock"])
def test_a_field_that_hides_a_method_is_refused(name: str) -> None:
    body = {"__annotations__": {name: torch.Tensor}}
    with pytest.raises(AttributeError, match=f"the field '{name}' of Hiding"):
        type("Hiding", (TensorClass,), dict(body))
    allowed: Any = type("Hiding", (TensorClass["shadow"],), dict(body))  # type: ignore[misc, arg-type]
    assert torch.equal(getattr(allowed(torch.ones(2)), name), torch.ones(2))


def test_shadowed_methods_do_not_disturb_operations() -> None:
    @tensorclass(shadow=True)
    class Hiding:
        keys: torch.Tensor
        values: torch.Tensor

    made: Any = Hiding(torch.zeros(3), torch.ones(3), batch_size=[3])  # type: ignore[call-arg]
    assert made[0].values == 1 and torch.stack([made, made]).keys.shape == (2, 3)
    assert (made + 1).values.tolist() == [2, 2, 2] and made.clone().keys.tolist() == [0, 0, 0]


def test_a_field_called_data_is_allowed() -> None:
    class Holder(TensorClass):
        data: torch.Tensor

    assert Holder(torch.ones(2)).data.tolist() == [1, 1]


# --- fields -----------------------------------------------------------------------------------------------------------


def test_fields_hold_anything() -> None:
    made = data()
    thing = object()
    made.anything = thing
    assert made.anything is thing and made.label == "none" and made.other is None
    made.other = torch.ones(3)
    made.label = "some"
    assert made.other.tolist() == [1, 1, 1] and made[1].label == "some"
    made.other = None
    assert made.other is None and "other" not in made.keys()
    made.anything = {"a": 1}
    assert made.anything == {"a": 1}
    single = Data(torch.zeros(2), anything=3)
    assert torch.equal(single.anything, torch.tensor(3))
    del made.label
    assert made.label is None


def test_get_and_set() -> None:
    made = data()
    assert made.get("x") is made.x and made.get(("inner", "w")) is made.inner.w  # type: ignore[union-attr]
    assert made.get("label") == "none" and made.get("other") is None and made.get("other", 3) is None
    before = made.x
    made.set("x", torch.ones(3, 2), inplace=True)
    assert made.x is before and before.sum() == 6
    made.set(("inner", "w"), torch.zeros(3))
    assert made.inner is not None and made.inner.w.sum() == 0
    assert made.set("x", torch.zeros(3, 2)) is made and made.x is not before
    made["x"] = before
    assert made["x"] is before


@pytest.mark.parametrize("write", ["attribute", "set", "update", "item", "assignment"])
def test_unknown_names_are_refused(write: str) -> None:
    made = data()
    value = torch.zeros(3)
    writes: dict[str, Callable[[], Any]] = {
        "attribute": lambda: setattr(made, "new", value),
        "set": lambda: made.set("new", value),
        "update": lambda: made.update({"x": torch.ones(3, 2), "new": value}),
        "item": lambda: made.__setitem__("new", value),
        "assignment": lambda: made.__setitem__(0, {"x": torch.zeros(2), "new": torch.zeros(())}),
    }
    with pytest.raises(
        (AttributeError, TypeError), match="'new', which is no field of Data; its fields are 'anything'"
    ):
        writes[write]()
    assert torch.equal(made.x, data().x)
    with pytest.raises(AttributeError, match="Data has no attribute 'new'"):
        made.new  # type: ignore[attr-defined]  # noqa: B018


def test_constructor_errors_name_class_and_field() -> None:
    with pytest.raises(TypeError, match=r"Data\(\) is missing 'x'"):
        Data()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Data\(\) got 'bad', which is no field of Data"):
        Data(torch.zeros(1), bad=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Data\.__init__\(\) got multiple values for argument 'x'"):
        Data(torch.zeros(1), x=torch.zeros(1))  # type: ignore[misc]
    with pytest.raises(TypeError, match="takes 5 fields by position"):
        Data(*[torch.zeros(1)] * 6)  # type: ignore[call-arg, arg-type]
    with pytest.raises(RuntimeError, match=r"Data: entry 'x' has shape \[2\].*batch size \[3\]"):
        Data(torch.zeros(2), batch_size=[3])
    with pytest.raises(RuntimeError, match="Data: entry 'x'"):
        data().x = torch.zeros(7)


def test_constructor_arguments() -> None:
    made = Data(torch.zeros(2), batch_size=2, device="cpu", names=["time"], lock=True)
    assert made.batch_size == (2,) and made.device == torch.device("cpu") and made.names == ["time"]
    assert made.is_locked
    with pytest.raises(RuntimeError, match="locked"):
        made.x = torch.ones(2)


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_number_in_a_batch_stays_one_where_the_field_is_for_numbers() -> None:
    """As in 0.15.3; 0.14.3 refuses it. Without batch dims both make a tensor."""

    class Counted(TensorClass):
        a: torch.Tensor
        n: int = 0
        weight: float | None = None

    made = Counted(torch.zeros(2, 3), batch_size=[2])
    assert type(made.n) is int and made[0].n == 0 and torch.stack([made, made]).n == [[0, 0], [0, 0]]
    made.n, made.weight = 4, 0.5
    assert made.n == 4 and made.weight == 0.5 and made.to_dict()["n"] == 4
    with pytest.raises(RuntimeError, match="entry 'n' has shape"):
        made.n = 2.5
    assert Counted(torch.zeros(3)).n.shape == ()


def test_autocast() -> None:
    class Cast(TensorClass["autocast"]):  # type: ignore[misc, type-arg]
        ten: torch.Tensor | None = None
        n: int = 0
        s: str = ""
        flag: bool | None = None
        table: dict | None = None  # type: ignore[type-arg]
        td: TensorDict | None = None
        inner: Inner | None = None

    made = Cast([1, 2], "3", 4, 1, {"a": 1}, {"a": torch.ones(1)}, {"w": torch.ones(1)})
    assert made.ten.tolist() == [1, 2] and made.n == 3 and made.s == "4" and made.flag is True
    assert made.table == {"a": 1} and type(made.td) is TensorDict and type(made.inner) is Inner
    made.n = torch.tensor(5)
    assert made.n == 5 and type(made.n) is int
    made.n = True
    assert made.n == 1 and type(made.n) is int
    # Any other value becomes the first field of the class.
    for value in ("text", 2.5, torch.ones(2), NonTensorData("text")):
        made.inner = value
        assert type(made.inner) is Inner and made.inner.w is not None
    with pytest.raises(TypeError, match=r"Cast\.n cannot be cast: it is annotated int"):
        made.n = "many"
    with pytest.raises(TypeError, match=r"Cast\.ten cannot be cast"):
        Cast("abc")


class Sized(Protocol):
    def size(self) -> int: ...


class Row(TypedDict):
    n: int


def test_autocast_leaves_what_annotations_do_not_name_a_class_for() -> None:
    class Cast(TensorClass["autocast"]):  # type: ignore[misc, type-arg]
        anything: Any = None
        maybe: Any | None = None
        sized: Sized | None = None
        row: Row | None = None
        pair: tuple[int, str] | None = None

    made = Cast(len, "a", {"no": "size"}, {"n": 1}, (1, "b"), batch_size=[2])
    assert made.anything is len and made.maybe == "a" and made.sized == {"no": "size"} and made.row == {"n": 1}
    assert made[0].pair == (1, "b")


@pytest.mark.parametrize("value", [(1, 2), (1.5, 2), (), range(3), torch.Size([1, 2]), (torch.zeros(2), 1)], ids=str)
def test_tuples_and_ranges_stay_what_they_are(value: Any) -> None:
    class Held(TensorClass):
        x: torch.Tensor
        pair: Any = None

    made = Held(torch.zeros(2), value, batch_size=[2])
    assert made.pair is value and made[0].pair is value and torch.cat([made, made]).pair is value
    made.pair = None
    made.pair = value
    assert made.set("pair", value).pair is value and made.replace(pair=value).pair is value
    assert made.update({"pair": value}).pair is value


def test_nocast() -> None:
    @tensorclass(nocast=True)
    class Kept:
        n: int
        x: Any = None

    made: Any = Kept(3, [1, 2])
    assert made.n == 3 and type(made.n) is int and made.x.tolist() == [1, 2]
    assert type(data().apply(lambda leaf: leaf)) is Data
    assert isinstance(Data(torch.zeros(1), other=3).other, torch.Tensor)  # type: ignore[arg-type]


def test_tensor_only() -> None:
    class Only(TensorClass, tensor_only=True):
        a: torch.Tensor
        b: torch.Tensor | None = None

    assert Only(3, [1, 2]).b.tolist() == [1, 2]  # type: ignore[arg-type, union-attr]
    with pytest.raises(TypeError, match=r"Only\.a is a field of a tensor_only class, got a str"):
        Only("abc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Wrong is tensor_only, but its field 's' is annotated"):

        class Wrong(TensorClass, tensor_only=True):
            s: str


def test_frozen() -> None:
    class Frozen(TensorClass["frozen"]):  # type: ignore[misc, type-arg]
        x: torch.Tensor

    made: Any = Frozen(torch.zeros(3), batch_size=[3])
    with pytest.raises(dataclasses.FrozenInstanceError, match="the field 'x' of the frozen Frozen"):
        made.x = torch.ones(3)
    with pytest.raises(RuntimeError, match="locked"):
        made.set("x", torch.ones(3))
    for name, value in ({"batch_size": [], "names": ["time"], "device": "cpu"}).items():
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot assign to '{name}' of the frozen Frozen"):
            setattr(made, name, value)
    assert made.batch_size == torch.Size([3]) and made.names == [None]
    for result in (made.reshape(3, 1), made.rename("time"), made.consolidate(), made.clone().share_memory_()):
        assert type(result) is Frozen
    assert made.is_locked and hash(made) == hash(made)
    assert made.apply(lambda leaf: leaf + 1, names=["time"]).names == ["time"]
    rows = Frozen.from_list([{"x": torch.zeros(3)}] * 2, batch_size=[2, 3], names=["row", None])
    assert rows.batch_size == (2, 3) and rows.names == ["row", None]
    made[0] = made[1].clone()
    assert made.to(torch.float64, batch_size=[]).batch_size == torch.Size([]) and made.batch_size == torch.Size([3])
    inside = TensorDict({"made": made}, [3], names=["time"])["made"]
    assert type(inside) is Frozen and (inside.names, made.names) == (["time"], [None])
    with pytest.raises(TypeError, match="unhashable"):
        hash(data())


def is_float(key: tuple[str, ...], leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point()


class Mesh(TensorClass, cast_filter=is_float):
    points: torch.Tensor
    cells: torch.Tensor


class Cut(Mesh):
    ends: torch.Tensor | None = None


class Every(Mesh, cast_filter=None):
    pass


@tensorclass(cast_filter=is_float)
class Grid:
    points: torch.Tensor
    cells: torch.Tensor

    def half(self) -> str:
        return "own"


CASTS: list[Callable[[Any], Any]] = [
    lambda mesh: mesh.bfloat16(),
    lambda mesh: mesh.type(torch.bfloat16),
    lambda mesh: mesh.to(torch.bfloat16),
    lambda mesh: mesh.to("cpu", torch.bfloat16),
    lambda mesh: mesh.to(torch.ones(1, dtype=torch.bfloat16)),
    lambda mesh: mesh.cpu(dtype=torch.bfloat16),
    lambda mesh: lazy_stack([mesh, mesh]).bfloat16()[0],
    lambda mesh: TensorDictParams(mesh, no_convert=True).to(torch.bfloat16),
    lambda mesh: pickle.loads(pickle.dumps(mesh)).bfloat16(),
]


@pytest.mark.parametrize("cast", CASTS)
def test_a_class_may_have_a_filter_of_casts(cast: Callable[[Any], Any]) -> None:
    for kind, keeps in ((Mesh, True), (Cut, True), (Grid, True), (Every, False)):
        if kind is Grid and "pickle" in cast.__code__.co_names:
            continue
        result = cast(kind(points=torch.zeros(3), cells=torch.arange(3)))
        assert result.get("points").dtype == torch.bfloat16
        assert result.get("cells").dtype == (torch.int64 if keeps else torch.bfloat16)


def test_the_filter_of_a_class_is_a_default() -> None:
    mesh = Mesh(points=torch.zeros(3), cells=torch.arange(3))
    assert mesh.double(cast_filter=None).cells.dtype == torch.float64
    assert mesh.to(torch.float64, cast_filter=None).cells.dtype == torch.float64
    assert mesh.double(cast_filter=lambda key, leaf: key == ("cells",)).points.dtype == torch.float32
    assert mesh.to("cpu").to(mesh.attrs()).cells.dtype == torch.int64
    # It does not concern casts of what holds the instance.
    assert TensorDict(mesh=mesh).double()["mesh"].cells.dtype == torch.float64
    grid: Any = Grid(points=torch.zeros(3), cells=torch.arange(3))
    assert grid.half() == "own" and grid.float16().cells.dtype == torch.int64
    with pytest.raises(TypeError, match="Broken: cast_filter"):
        type("Broken", (TensorClass,), {}, cast_filter=3)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"unknown options \['bad'\]"):
        TensorClass["bad"]  # type: ignore[misc]
    with pytest.raises(ValueError, match="exclusive features"):
        TensorClass["autocast", "nocast"]  # type: ignore[misc]


# --- containers -------------------------------------------------------------------------------------------------------


def test_results_are_of_the_class() -> None:
    made = data()
    results = [made[0], made[:2], made.clone(), made.reshape(3, 1), torch.stack([made, made]), torch.cat([made, made])]
    results += [*made.unbind(0), *made.split(2), made + 1, made == made, made.sum(0), torch.zeros_like(made)]
    results += [made.apply(lambda leaf: leaf), made.to("cpu"), made.double(), copy.deepcopy(made), made.expand(2, 3)]
    assert all(type(result) is Data and type(result.inner) is Inner for result in results)
    assert (made == made).all() and all(result.label == "none" for result in results[:4])


def test_lazy_stacks_of_unequal_shapes() -> None:
    stack = lazy_stack([data(2), data(3)])
    assert type(stack) is Data and type(stack.inner) is Inner and stack.batch_size == (2, -1)
    assert isinstance(stack._tensordict, LazyStackedTensorDict)
    assert [part.x.shape[0] for part in stack.unbind(0)] == [2, 3] and type(stack[1]) is Data
    assert stack[1].inner.w.shape == (3,) and type(stack + 1) is Data and (stack + 1)[0].x[0, 0] == 1
    stack.append(data(4))
    stack.extend([data(5)])
    assert stack.batch_size == (4, -1) and stack.stack_dim == 0
    assert type(torch.cat([stack, stack])) is Data and type(stack[[0, 2]]) is Data
    with pytest.raises(AttributeError, match="Data has no attribute 'append'"):
        data().append(data())
    with pytest.raises(AttributeError):
        data().extend(data())
    inside = lazy_stack([TensorDict(item=data(2)), TensorDict(item=data(3))])
    assert type(inside["item"]) is Data and inside["item"][1].x.shape == (3, 2)
    assert type(lazy_stack([data(), TensorDict({"x": torch.zeros(3)}, [3])])) is LazyStackedTensorDict


def test_from_and_to_tensordict() -> None:
    td = TensorDict({"x": torch.zeros(3)}, [3])
    made = Data.from_tensordict(td, {"label": "given"})
    assert made.x is td["x"] and made.label == "given" and "label" not in td.keys() and made.inner is None
    shared = Data.from_tensordict(td)
    shared.x = torch.ones(3)
    assert td["x"].sum() == 3 and shared._tensordict is td
    with pytest.raises(ValueError, match=r"Data.from_tensordict got \['q'\], which is no field of Data"):
        Data.from_tensordict(TensorDict(q=1))
    with pytest.raises(ValueError, match="'zz'"):
        Data.from_tensordict(td, {"zz": 1})
    with pytest.raises((TypeError, RuntimeError), match="needs a container, got dict"):
        Data.from_tensordict({"x": 1})
    plain = data().to_tensordict()
    assert type(plain) is TensorDict and type(plain["inner"]) is TensorDict and "other" not in plain.keys()
    assert data().to_tensordict(retain_none=True)["other"] is None
    assert data().to_dict()["other"] is None and "other" not in data().to_dict(retain_none=False)
    assert Data.from_dict({"x": torch.zeros(2), "label": "a", "other": None}).label == "a"


def test_replace_and_comparison() -> None:
    made = data()
    new = made.replace(x=torch.ones(3, 2))
    assert new.x.sum() == 6 and made.x.sum() == 15 and type(new) is Data
    assert not (made == new).all() and (made == made.to_tensordict()).all()
    assert torch.equal(dataclasses.replace(made, x=torch.ones(3, 2), batch_size=[3]).x, torch.ones(3, 2))


@pytest.mark.parametrize("join", [torch.stack, torch.cat, TensorDict.maybe_dense_stack])
def test_instances_of_different_classes_are_not_joined(join: Callable[..., Any]) -> None:
    class One(TensorClass):
        x: torch.Tensor

    class Other(TensorClass):
        x: torch.Tensor

    class Derived(One):
        pass

    one, other, derived = (cls(torch.zeros(3), batch_size=[3]) for cls in (One, Other, Derived))
    with pytest.raises(TypeError, match="the tensorclasses One and Other"):
        join([one, other])
    with pytest.raises(TypeError, match="entry 'n': .*the tensorclasses One and Other"):
        join([TensorDict(n=one, batch_size=[3]), TensorDict(n=other, batch_size=[3])])
    assert type(join([one, derived])) is One and type(join([derived, one])) is Derived
    assert type(join([one, one.to_tensordict()])) is One
    assert type(lazy_stack([one, other])) is LazyStackedTensorDict
    assert type(one + other) is type(one == other) is One


def test_typed_metadata_as_annotation() -> None:
    class Cast(TensorClass["autocast"]):  # type: ignore[misc]
        x: torch.Tensor
        version: MetaData[int]

    made = Cast(torch.zeros(3), 3, batch_size=[3])
    assert type(made.to_tensordict().get("version")) is MetaData[int] and torch.stack([made, made]).version == 3
    with pytest.raises(TypeError, match=r"Cast\.version cannot be cast: .*Expected data of type int"):
        Cast(torch.zeros(3), "3")

    class Typed(TypedTensorDict):
        version: MetaData[int]

    assert type(Typed(version=3).get("version")) is MetaData[int]
    with pytest.raises(TypeError, match="Expected data of type int"):
        Typed(version="3")


def test_containers_in_fields_of_tensors_stay_what_they_are() -> None:
    class Cast(TensorClass["autocast"]):  # type: ignore[misc]
        x: torch.Tensor

    class Only(TensorClass["tensor_only"]):  # type: ignore[misc]
        x: torch.Tensor

    for cls in (Cast, Only):
        made = cls(TensorDict(a=torch.ones(2), batch_size=[2]), batch_size=[2])
        assert type(made.x) is TensorDict and made.x["a"].sum() == 2
        made.x = NonTensorData("text", batch_size=[2])
        assert made.x == "text"
        assert cls([1.0, 2.0]).x.tolist() == [1, 2]
        made.set_non_tensor("x", "other")
        assert made.x == "other"


def test_tensor_only_with_nested_containers() -> None:
    class Part(TensorClass["tensor_only"]):  # type: ignore[misc]
        y: torch.Tensor

    class Whole(TensorClass["tensor_only"]):  # type: ignore[misc]
        x: torch.Tensor
        part: Part
        other: Optional["Part"] = None  # noqa: UP037, UP045
        later: Optional["Later"] = None  # type: ignore[name-defined]  # noqa: F821, UP037, UP045

    made = Whole(torch.zeros(3), Part(torch.ones(3), batch_size=[3]), batch_size=[3])
    assert made.other is None and type(made[0].part) is Part and torch.stack([made, made]).part.y.sum() == 6
    made.other, made.part = made.part, None
    assert made.part is None and made.other.y.sum() == 3


def test_annotations_can_be_read() -> None:
    assert get_type_hints(Data)["x"] is get_type_hints(Step)["obs"] is torch.Tensor


def test_texts_in_annotations_are_no_names() -> None:
    kinds = {"a": Literal["no name!"], "b": Annotated[torch.Tensor, "a text, too"]}
    made = type("Texts", (TensorClass["autocast"],), {"__annotations__": kinds})("no name!", torch.ones(1))  # type: ignore[misc]
    assert made.a == "no name!" and made.b.sum() == 1


def test_defaults_are_not_for_fields_that_are_none() -> None:
    made = Data(torch.zeros(2), batch_size=[2])
    for read in (made, lazy_stack([made, made])):
        assert read.get("other", 5) is read.get(("other",), 5) is read.get("other") is None
        assert read.get("unknown", 5) == 5


def test_nocast_keeps_arrays_and_numbers() -> None:
    class Kept(TensorClass["nocast"]):  # type: ignore[misc]
        x: Any

    for value in (np.ones(3), 3, 3.5, np.float64(2)):
        assert type(Kept(value).x) is type(value)
    assert Kept([1, 2]).x.tolist() == [1, 2]


def test_super_in_classes_derived_from_dataclasses() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    @dataclass
    class Base:
        x: torch.Tensor

        def hello(self) -> str:
            return "base"

        def __post_init__(self) -> None:
            self.x = self.x + 1

    @tensorclass
    class Derived(Base):
        y: torch.Tensor

        @logged
        def hello(self) -> str:
            return "derived " + super().hello()

        @functools.cached_property
        def kept(self) -> str:
            return super().hello()

        def __post_init__(self) -> None:
            super().__post_init__()
            self.y = self.y * 2

    made = Derived(torch.zeros(2), torch.ones(2), batch_size=[2])
    assert made.x.sum() == 2 and made.y.sum() == 4 and isinstance(made, Base)
    assert made[0].hello() == "derived base"
    assert repr(made).startswith("Derived(\n    x=Tensor(") and "y=Tensor(" in repr(made)
    assert type(made == made) is Derived and (made == made).all()


def test_shadowed_arguments_of_the_constructor() -> None:
    class Shadow(TensorClass["shadow"]):  # type: ignore[misc]
        x: torch.Tensor
        batch_size: torch.Tensor
        device: torch.Tensor
        names: Any = None

    made = Shadow(x=torch.zeros(3), batch_size=torch.ones(3), device=torch.ones(2))
    assert made.batch_size.sum() == 3 and made.device.sum() == 2 and made.names is None
    assert type(made + 1) is Shadow and torch.stack([made, made]).shape == (2,)
    with pytest.raises(TypeError, match="missing 'batch_size'"):
        Shadow(x=torch.zeros(3), device=torch.ones(2))


def test_repr_is_that_of_the_documents() -> None:
    expected = """\
Data(
    inner=Inner(
        w=Tensor(shape=torch.Size([3]), device=cpu, dtype=torch.float32, is_shared=False),
        note=None,
        batch_size=torch.Size([3]),
        device=None,
        is_shared=False),
    label=NonTensorData(data=none, batch_size=torch.Size([3]), device=None),
    x=Tensor(shape=torch.Size([3, 2]), device=cpu, dtype=torch.float32, is_shared=False),
    other=None,
    anything=None,
    batch_size=torch.Size([3]),
    device=None,
    is_shared=False)"""
    assert repr(data()) == expected


def test_copies_pickles_and_pytrees() -> None:
    made = data()
    for copied in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made.lock_()))):
        assert type(copied) is Data and (copied == made).all() and copied.label == "none"
    assert pickle.loads(pickle.dumps(made)).is_locked
    doubled = tree_map(lambda leaf: leaf * 2, made)
    assert type(doubled) is Data and type(doubled.inner) is Inner and torch.equal(doubled.x, made.x * 2)
    mapped = torch.vmap(lambda item: item + 1)(data())
    assert type(mapped) is Data and torch.equal(mapped.x, made.x + 1)
    stack = lazy_stack([data(), data()])
    assert type(tree_map(lambda leaf: leaf, stack)) is Data
    mapped = torch.vmap(lambda item: item + 1, (1,))(stack)
    assert mapped.batch_size == (3, 2) and type(mapped) is Data


def test_locking_reaches_nested_instances() -> None:
    made = data().lock_()
    assert made.inner is not None and made.inner.is_locked
    with pytest.raises(RuntimeError, match="nested in a locked one"):
        made.inner.unlock_()
    with made.unlock_():
        made.x = torch.zeros(3, 2)
    assert made.is_locked


def test_data_loader() -> None:
    loader = torch.utils.data.DataLoader(data(4), batch_size=2, collate_fn=lambda items: items)  # type: ignore[arg-type]
    batches: list[Any] = list(loader)
    assert [type(batch) for batch in batches] == [Data, Data] and batches[1].x.shape == (2, 2)


# --- on disk ----------------------------------------------------------------------------------------------------------


def tensors() -> Node:
    return Node(torch.arange(3.0), Node(torch.ones(3), batch_size=[3]), batch_size=[3])


@pytest.mark.parametrize("method", ["memmap", "memmap_", "save"])
def test_directory_format(tmp_path: pathlib.Path, method: str) -> None:
    saved = getattr(tensors(), method)(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    below = "_tensordict/child/_tensordict"
    assert found == {
        "meta.json",
        "_tensordict/meta.json",
        "_tensordict/value.memmap",
        "_tensordict/child/meta.json",
        f"{below}/meta.json",
        f"{below}/value.memmap",
    }
    loaded = TensorDict.load_memmap(tmp_path)
    for made in (saved, loaded):
        assert type(made) is Node and type(made.child) is Node and made.child.child is None
        assert isinstance(made.child.value, MemoryMappedTensor) and made.value.tolist() == [0, 1, 2]
    assert saved.is_memmap() and saved.is_locked
    nested = TensorDict({"item": tensors()}).memmap(tmp_path / "outer")
    assert type(TensorDict.load_memmap(tmp_path / "outer")["item"]) is Node and type(nested["item"]) is Node


def test_loading_a_class_that_is_not_there(tmp_path: pathlib.Path) -> None:
    tensors().memmap(tmp_path)
    meta = tmp_path / "meta.json"
    meta.write_text(meta.read_text().replace("test_tensorclass.Node", "test_tensorclass.Gone"))
    with pytest.raises(RuntimeError, match=r"test_tensorclass\.Gone'.*import the module that defines it"):
        TensorDict.load_memmap(tmp_path)
    meta.write_text(meta.read_text().replace("Gone", "Inner"))
    with pytest.raises(RuntimeError, match=r"entries \['child', 'value'\], which are no fields of"):
        TensorDict.load_memmap(tmp_path)


# --- dataclasses ------------------------------------------------------------------------------------------------------


def test_from_dataclass() -> None:
    @dataclass
    class Point:
        x: torch.Tensor
        label: Any = None

    made = from_dataclass(Point(torch.zeros(3), "a"), auto_batch_size=True)
    assert is_tensorclass(made) and made.batch_size == (3,) and made.label == "a" and type(made).__name__ == "Point_tc"
    cls = from_dataclass(Point, frozen=True)
    assert issubclass(cls, TensorClass) and cls(torch.zeros(1)).is_locked
    assert type(from_dataclass(Point(torch.zeros(3)), dest_cls=cls)) is cls
    td = TensorDict.from_dataclass(Point(torch.zeros(3), Point(torch.ones(3), "b")))
    assert type(td) is TensorDict and td["label", "x"].sum() == 3 and td["label", "label"] == "b"
    assert is_tensorclass(TensorDict.from_dataclass(Point(torch.zeros(3)), as_tensorclass=True))
    for convert in (from_dataclass, TensorDict.from_dataclass):
        with pytest.raises(TypeError, match="got int"):
            convert(3)


# --- typed dicts ------------------------------------------------------------------------------------------------------


class Step(TypedTensorDict):
    obs: torch.Tensor
    act: torch.Tensor
    reward: NotRequired[torch.Tensor]  # type: ignore[valid-type]


class Named(Step):
    name: NotRequired[str]  # type: ignore[valid-type]
    last: NotRequired[Step]  # type: ignore[valid-type]


def step() -> Step:
    return Step(obs=torch.zeros(3, 2), act=torch.ones(3), batch_size=[3])


def test_typed_dict_keys() -> None:
    made = step()
    assert isinstance(made, TensorDictBase) and Step.__required_keys__ == {"obs", "act"}
    assert Step.__optional_keys__ == {"reward"} and Named.__optional_keys__ == {"reward", "name", "last"}
    assert made.obs is made["obs"] and torch.equal(
        Step({"obs": torch.zeros(1), "act": torch.ones(1)}).act, torch.ones(1)
    )
    with pytest.raises(AttributeError, match=r"Step\.reward is declared but not set"):
        made.reward  # noqa: B018
    made.reward = torch.ones(3)
    assert made["reward"].sum() == 3
    del made.reward
    assert "reward" not in made
    for result in (made[0], torch.stack([made, made]), made + 1, made.clone(), tree_map(torch.neg, made)):
        assert type(result) is Step
    assert type(made.to_tensordict()) is TensorDict


def test_typed_dict_checks() -> None:
    with pytest.raises(TypeError, match=r"Step\(\) is missing 'act'"):
        Step(obs=torch.zeros(3))
    with pytest.raises(TypeError, match=r"Step\(\) got 'zz', which it does not declare"):
        Step(obs=torch.zeros(3), act=torch.zeros(3), zz=1)
    more = {"obs": torch.zeros(3), "act": torch.zeros(3), "reward": torch.zeros(3), "zz": torch.ones(3)}
    for made in (Step(more), Step(TensorDict(more)), Step.from_dict(more)):
        assert made["zz"].sum() == 3
    with pytest.raises(TypeError, match=r"Step\.obs is declared as Tensor and cannot hold a str"):
        Step(obs="x", act=torch.zeros(3))
    made = Named(obs=torch.zeros(3), act=torch.zeros(3), name="a")
    assert made.name == "a"
    with pytest.raises(TypeError, match=r"Named\.name is declared as str and cannot hold a Tensor"):
        made.name = torch.zeros(3)
    with pytest.raises(TypeError, match=r"Named\.name"):
        made["name"] = torch.zeros(3)
    with pytest.raises(TypeError, match=r"Named\.name"):
        made.update({"obs": torch.ones(3), "name": torch.zeros(3)})
    assert made.obs.sum() == 0 and made.name == "a"
    made.last = {"obs": torch.ones(1), "act": torch.ones(1)}
    assert type(made.last) is Step
    with pytest.raises(TypeError, match="is missing 'act'"):
        made.last = {"obs": torch.ones(1)}
    with pytest.raises(AttributeError, match="the key 'keys' of Hiding"):
        type("Hiding", (TypedTensorDict,), {"__annotations__": {"keys": torch.Tensor}})


def test_typed_dict_from_tensordict() -> None:
    td = TensorDict(obs=torch.zeros(3), act=torch.zeros(3), more=torch.zeros(3))
    made = Step.from_tensordict(td)
    assert type(made) is Step and made.obs is td["obs"] and "more" in made
    with pytest.raises(TypeError, match="is missing 'act'"):
        Step.from_tensordict(td.exclude("act"))
    assert type(Step.from_tensordict(td.exclude("act"), check=False)) is Step
    with pytest.raises(TypeError, match="needs a container, got dict"):
        Step.from_tensordict({})


@pytest.mark.parametrize("form", ["dense", "lazy", "ragged", "file", "mapped"])
def test_typed_dict_is_a_live_view(form: str, tmp_path: pathlib.Path) -> None:
    td: Any = TensorDict(obs=torch.zeros(2, 3), act=torch.zeros(2), inner={"n": torch.zeros(2)}, batch_size=[2])
    if form in ("lazy", "ragged"):
        td = lazy_stack(list(td.clone().unbind(0)))
    if form == "ragged":
        td[0]["obs"], td[1]["obs"] = torch.zeros(3), torch.zeros(5)
    if form == "file":
        td = PersistentTensorDict.from_dict(td, tmp_path / "td.h5")
    if form == "mapped":
        td = td.memmap_(tmp_path)
    made = Step.from_tensordict(td)
    assert made.is_locked is td.is_locked and made.is_memmap() is td.is_memmap() and made.batch_size == td.batch_size
    made.update_({"act": torch.ones(2)})
    assert td["act"].sum() == 2
    with td.unlock_() if form == "mapped" else contextlib.nullcontext():
        made.reward = torch.ones(2)
        made["inner", "more"] = torch.ones(2)
        made.update({"extra": torch.ones(2), "inner": {"other": torch.ones(2)}})
        assert {"reward", "extra", ("inner", "more"), ("inner", "other"), ("inner", "n")} <= set(td.keys(True))
        td["extra"] = torch.full((2,), 5.0)
        assert made["extra"].sum() == 10
        del made["extra"]
        assert "extra" not in td
    assert type(made[0]) is Step and repr(made).startswith("Step(\n    fields={")
    for result in (made.clone(), copy.deepcopy(made), tree_map(torch.neg, made) if form != "file" else made.clone()):
        assert type(result) is Step
    if form != "mapped":
        saved = made.memmap(tmp_path / "saved")
        assert form != "dense" or type(saved) is Step
        assert set(TensorDict.load_memmap(tmp_path / "saved").keys(True, True)) == set(td.keys(True, True))
    assert made.lock_() is made and td.is_locked


def test_typed_dict_over_another_container_checks_types() -> None:
    empty = TensorDict(batch_size=[2])
    made = Step.from_tensordict(empty, check=False)
    with pytest.raises(AttributeError, match=r"Step\.obs is declared but not set"):
        made.obs  # noqa: B018
    made.obs, made.act = torch.zeros(2), torch.ones(2)
    assert set(empty.keys()) == {"obs", "act"}
    with pytest.raises(TypeError, match=r"Step\.obs is declared as Tensor and cannot hold a str"):
        made.update(TensorDict(obs="text"))
    nested = TensorDict(obs=torch.zeros(1), act=torch.zeros(1), last={"obs": torch.ones(1), "act": torch.ones(1)})
    named = Named.from_tensordict(nested)
    assert type(named.last) is Step and type(nested["last"]) is TensorDict
    named.last.reward = torch.ones(1)
    named.update({"last": {"act": torch.full((1,), 3.0)}})
    assert nested["last", "reward"] == 1 and nested["last", "act"] == 3
    with pytest.raises(TypeError, match=r"Step.* is missing 'act'"):
        Named.from_tensordict(TensorDict(obs=torch.zeros(1), act=torch.zeros(1), last={"obs": torch.zeros(1)}))


def test_typed_dict_defaults() -> None:
    class Extended(TypedTensorDict):
        x: torch.Tensor
        y: torch.Tensor | None = None
        z: NotRequired[torch.Tensor] = torch.ones(1)  # type: ignore[valid-type]

    made = Extended(x=torch.zeros(2), batch_size=[2])
    assert made.y is None and made.z.sum() == 1 and list(made.keys()) == ["x"]
    assert Extended.__required_keys__ == {"x"} and Extended.__optional_keys__ == {"y", "z"}
    made.y = torch.ones(2)
    assert made.y.sum() == 2 and made[0].y == 1


def test_typed_dict_options() -> None:
    class Frozen(TypedTensorDict["frozen", "shadow"]):  # type: ignore[misc]
        keys: torch.Tensor
        batch_size: torch.Tensor
        device: NotRequired[str]  # type: ignore[valid-type]

    made = Frozen(keys=torch.zeros(2), batch_size=torch.ones(3))
    assert made.keys.sum() == 0 and made["batch_size"].sum() == 3 and made.is_locked
    with pytest.raises(RuntimeError, match="locked"):
        made.keys = torch.ones(2)
    assert Frozen(keys=torch.zeros(2), batch_size=torch.ones(2), device="any")["device"] == "any"
    td = TensorDict({"keys": torch.zeros(2), "batch_size": {"a": torch.zeros(2)}})
    with pytest.raises(TypeError, match="batch_size is declared as Tensor"):
        Frozen.from_tensordict(td)
    assert not Frozen.from_tensordict(td, check=False).is_locked
    with pytest.raises(ValueError, match=r"unknown options \['total'\]"):
        TypedTensorDict["total"]
    with pytest.raises(TypeError, match="exclusive features"):
        TypedTensorDict["autocast", "nocast"]

    class Cast(TypedTensorDict, autocast=True):
        x: torch.Tensor
        n: int

    cast = Cast(x=[1.0, 2.0], n="3")
    assert cast.n == 3 and cast.x.tolist() == [1, 2]
    cast.update({"n": 4.0})
    assert cast["n"] == 4 and type(cast["n"]) is int

    class Kept(TypedTensorDict["nocast"]):  # type: ignore[misc]
        n: float

    assert type(Kept(n=3).n) is int and type(Kept(n=3.5)["n"]) is float

    class Only(TypedTensorDict["tensor_only"]):  # type: ignore[misc]
        x: torch.Tensor
        inner: NotRequired[TensorDict]  # type: ignore[valid-type]

    assert Only(x=[1, 2], inner={"a": torch.zeros(1)}).inner["a"] == 0
    with pytest.raises(TypeError, match=r"Only\.x is a field of a tensor_only class, got a str"):
        Only(x="text")
    with pytest.raises(TypeError, match="tensor_only, but 's'"):
        type("Bad", (TypedTensorDict["tensor_only"],), {"__annotations__": {"s": str}})


class Counted(TensorClass):
    x: torch.Tensor
    y: Any


def test_doubles_of_numpy_are_numbers() -> None:
    # They are instances of `float`.
    assert Counted(torch.zeros(2), np.float64(3)).y.dtype == torch.float64


def test_scalars_of_numpy_and_complex_numbers_stay_values():
    for value in (np.int64(3), np.float32(0.5), 1 + 2j):
        pair = Counted(torch.zeros(2), value, batch_size=[2])
        assert pair.y == value and type(pair.y) is type(value)
        assert type(pair[0].y) is type(value)


def test_from_dict_instance_keeps_numbers_in_fields_that_hold_values() -> None:
    class Counted(TensorClass["autocast"]):
        a: torch.Tensor
        n: int = 3

    td = TensorDict({"d": Counted(a=torch.ones(2), batch_size=[2])})
    again = td.from_dict_instance(td.to_dict(), auto_batch_size=True)
    assert type(again["d"]) is Counted and again["d"].n == 3 and type(again["d"].n) is int
    assert again["d"].batch_size == (2,)


def test_select_as_tensordict_keeps_nested_classes_and_shares_memory() -> None:
    @tensorclass
    class Inner:
        a: torch.Tensor
        b: torch.Tensor | None = None

    @tensorclass
    class Outer:
        a: torch.Tensor
        child: Inner

    outer = Outer(a=torch.ones(2), child=Inner(a=torch.ones(2), b=torch.zeros(2)))
    selected = outer.select("a", ("child", "b"), as_tensordict=True)
    assert type(selected) is TensorDict and selected["a"] is outer.a
    assert type(selected["child"]) is Inner and selected["child"].a is None and selected["child"].b is outer.child.b


def test_set_of_a_dict_is_what_the_assignment_is() -> None:
    class Cast(TensorClass["autocast"]):
        a: torch.Tensor
        i: int = 0
        s: str = ""
        d: TensorDict = None
        o: collections.OrderedDict = None

    class Plain(TensorClass):
        a: torch.Tensor
        b: Any = None

    value = {"x": torch.zeros(3)}
    for write in (lambda obj, name: obj.set(name, value), lambda obj, name: setattr(obj, name, value)):
        plain = Plain(torch.zeros(2), batch_size=[2])
        write(plain, "b")
        assert plain.b is value
        for name in ("a", "i", "s"):
            cast = Cast(torch.zeros(2))
            write(cast, name)
            assert getattr(cast, name) is value
        cast = Cast(torch.zeros(2))
        write(cast, "d")
        write(cast, "o")
        assert type(cast.d) is TensorDict and type(cast.o) is collections.OrderedDict
    merged = Plain(torch.zeros(2), batch_size=[2]).update({"b": {"x": torch.zeros(2)}})
    assert type(merged.b) is TensorDict


@pytest.mark.parametrize("cls", [TensorClass, TypedTensorDict])
def test_arguments_of_classes_that_take_none(cls: Any) -> None:
    for item in (3, int, ("frozen", 3)):
        with pytest.raises(TypeError, match=f"{cls.__name__} is not a generic class.*'frozen'"):
            cls[item]


def test_typed_views_of_lazy_stacks_are_mapped(tmp_path: pathlib.Path) -> None:
    class View(TypedTensorDict):
        a: torch.Tensor

    for sizes in ((2, 2), (2, 3)):
        stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in sizes])
        view = View.from_tensordict(stack)
        for index, mapped in enumerate((view.memmap(), view.memmap(tmp_path / str(sizes)), view.memmap_like())):
            assert type(mapped) is View and mapped.is_memmap() and mapped.is_locked
            assert mapped[1].a.tolist() == [float(index < 2)] * sizes[1]
        nested = TensorDict(v=View.from_tensordict(stack)).memmap()
        assert type(nested["v"]) is View


def test_an_instance_set_in_a_block_in_the_place_of_a_tensor_keeps_its_class() -> None:
    @tensorclass
    class Point:
        x: torch.Tensor

    td = TensorDict({"a": torch.zeros(3), "b": torch.zeros(3)}, [3])
    with td.flatten_keys(".") as flat:
        flat["a"] = Point(x=torch.ones(3), batch_size=[3])
    assert type(td["a"]) is Point and td["a"].x.tolist() == [1, 1, 1] and list(td.keys()) == ["a", "b"]


def test_a_field_called_keys_does_not_disturb_a_block() -> None:
    class Holder(TensorClass["shadow"]):  # type: ignore[misc]
        a: torch.Tensor
        keys: Any = None

    holder = Holder(a=torch.ones(1, 2), keys="text", batch_size=[1])
    with holder.unsqueeze(0) as row:
        row.a = row.a + 1
    assert holder.a.tolist() == [[2, 2]] and holder.keys == "text"
