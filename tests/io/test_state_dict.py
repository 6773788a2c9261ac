"""State dicts: what they hold, how they are loaded, and what is said when they do not fit."""

from __future__ import annotations

import io
import pathlib
from collections import OrderedDict
from typing import Any

import pytest
import torch

from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    lazy_stack,
    tensorclass,
)
from tensordict.core.exceptions import LockedError, SaveError, StateError, UnsupportedEntryError

ROOT = pathlib.Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("flatten", [True, False])


class Point(TensorClass):
    x: torch.Tensor
    label: str = "none"
    next: Point | None = None


def simple() -> TensorDict:
    return TensorDict({"a": torch.arange(6.0).reshape(3, 2), "b": {"c": torch.ones(3)}}, [3])


def many_kinds() -> TensorDict:
    td = simple()
    td.names = ["t"]
    td["s"] = "hello"
    td["meta"] = MetaData(("x", 1))
    td["values"] = NonTensorStack("a", "b", "c")
    td["empty"] = {}
    td["unbatched"] = UnbatchedTensor(torch.ones(5))
    td["point"] = Point(torch.zeros(3), "p", Point(torch.ones(3), batch_size=[3]), batch_size=[3])
    td["even"] = lazy_stack([TensorDict({"x": torch.full((2,), float(i)), "s": str(i)}) for i in range(3)])
    td["odd"] = lazy_stack([TensorDict({"x": torch.ones(i + 1), "n": i}) for i in range(3)])
    td["rows"] = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3), torch.ones(1)], layout=torch.jagged)
    return td


# --- what there is ----------------------------------------------------------------------------------------------------


def test_names_and_metadata() -> None:
    td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(3)}, "s": "x"}, [3], device="cpu")
    state = td.state_dict()
    assert type(state) is OrderedDict and list(state) == ["a", "b.c"]
    size, cpu = torch.Size([3]), torch.device("cpu")
    assert state._metadata[""] == state._metadata["b"] == {"batch_size": size, "device": cpu}
    assert state._metadata["s"]["_non_tensor"]["data"] == "x"
    nested = td.state_dict(flatten=False)
    assert list(nested) == ["a", "b", "s"] and list(nested["b"]) == ["c"] and not nested["s"]
    assert list(nested._metadata) == list(nested["b"]._metadata) == [""]
    assert list(td.state_dict(prefix="p.")) == ["p.a", "p.b.c"]
    assert list(td.state_dict(prefix="p.")._metadata) == ["p", "p.b", "p.s"]
    assert list(td.state_dict(values=True)) == ["a", "b.c", "s"]


def test_destinations() -> None:
    module = torch.nn.Linear(2, 1)
    state = module.state_dict()
    assert simple().state_dict(destination=state, prefix="td.") is state
    assert list(state) == ["weight", "bias", "td.a", "td.b.c"] and "td.b" in state._metadata
    plain: dict[str, Any] = {}
    assert simple().state_dict(plain) is plain and list(plain) == ["a", "b.c"]


def test_tensors_share_their_memory() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    td = TensorDict(
        {"a": leaf, "m": MemoryMappedTensor.from_tensor(torch.ones(2)), "u": UnbatchedTensor(torch.ones(1))}
    )
    state = td.state_dict()
    assert not state["a"].requires_grad and state["a"].data_ptr() == leaf.data_ptr()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    kept = td.state_dict(keep_vars=True)
    assert kept["a"] is leaf and kept["m"] is td["m"]


def test_names_that_two_entries_would_have() -> None:
    td = TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}})
    with pytest.raises(SaveError, match="'a.b'.*flatten=False"):
        td.state_dict()
    assert (td.clone().zero_().load_state_dict(td.state_dict(flatten=False)) == td).all()
    dotted = TensorDict({"a.b": torch.ones(2), "c": {"d.e": torch.ones(2)}})
    assert list(TensorDict().load_state_dict(dotted.state_dict()).keys(True, True)) == ["a.b", ("c", "d.e")]


# --- loading ----------------------------------------------------------------------------------------------------------


@BOTH
def test_in_place(flatten: bool) -> None:
    td, other = simple(), simple().zero_()
    leaf, address = other["a"], other["a"].data_ptr()
    assert other.load_state_dict(td.state_dict(flatten=flatten)) is other
    assert other["a"] is leaf and leaf.data_ptr() == address and (other == td).all()
    assigned = simple().zero_()
    state = td.state_dict(flatten=flatten)
    assigned.load_state_dict(state, assign=True)
    assert assigned["a"] is state["a"]
    locked = simple().zero_().lock_().load_state_dict(state)
    assert locked.is_locked and (locked == td).all()


@BOTH
def test_an_empty_container_becomes_what_was_saved(flatten: bool) -> None:
    td = many_kinds()
    again = TensorDict().load_state_dict(td.state_dict(flatten=flatten))
    assert (again.batch_size, again.names) == (td.batch_size, td.names)
    assert set(again.keys()) == set(td.keys())
    assert_close(again.exclude("rows"), td.exclude("rows"))
    assert (again["s"], again["meta"], again["values"]) == ("hello", ("x", 1), ["a", "b", "c"])
    assert isinstance(again["unbatched"], UnbatchedTensor) and isinstance(again["point"], Point)
    assert (again["point"].label, again["point"].next.label) == ("p", "none")
    assert isinstance(again["even"], LazyStackedTensorDict) and isinstance(again["odd"], LazyStackedTensorDict)
    assert again["odd"][2]["x"].shape == (3,) and again["odd"][1]["n"] == 1 and again["even"][2]["s"] == "2"
    assert again["rows"].values().tolist() == td["rows"].values().tolist()


@BOTH
def test_values_and_all_kinds_in_place(flatten: bool) -> None:
    td, other = many_kinds(), many_kinds()
    state = td.state_dict(flatten=flatten)
    other["s"], other["meta"], other["values"] = "bye", "y", NonTensorStack(1, 2, 3)
    other["point"].label, other["point"].next.label = "q", "q"
    other["even"][0]["s"] = "other"
    other.zero_()
    other.load_state_dict(state)
    assert_close(other.exclude("rows"), td.exclude("rows"))
    assert (other["s"], other["meta"], other["values"]) == ("hello", ("x", 1), ["a", "b", "c"])
    assert (other["point"].label, other["point"].next.label, other["even"][0]["s"]) == ("p", "none", "0")
    assert other["rows"].values().tolist() == td["rows"].values().tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda n: NonTensorData(n, batch_size=[2]),
        lambda n: NonTensorStack(n, n + 1),
        lambda n: Point(torch.full((2,), n), str(n), batch_size=[2]),
        lambda n: lazy_stack([Point(torch.full((i,), n), str(n)) for i in (1, 2)]),
        lambda n: lazy_stack([lazy_stack([TensorDict(x=torch.full((2,), n))]) for _ in range(2)], 1),
    ],
)
@BOTH
def test_roots_of_every_kind(make: Any, flatten: bool) -> None:
    td, other = make(1), make(7)
    other.load_state_dict(td.state_dict(flatten=flatten))
    assert (other == td).all()
    if td._is_non_tensor:
        assert other.tolist() == td.tolist()


def test_batch_sizes_and_names_follow() -> None:
    other = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}})
    td = simple()
    td.names = ["t"]
    other.load_state_dict(td.state_dict())
    assert (other.batch_size, other["b"].batch_size, other.names) == ((3,), (3,), ["t"])
    without = OrderedDict(td.state_dict())
    assert TensorDict(batch_size=[3]).load_state_dict(without).batch_size == (3,)
    assert TensorDict().load_state_dict(without)["b"].batch_size == ()


def test_forms_without_metadata() -> None:
    target = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2), "d.e": torch.zeros(2)}})
    flat = {"a": torch.ones(2), "b.c": torch.ones(2), "b.d.e": torch.ones(2)}
    for state, given in (
        (flat, None),
        (flat, True),
        ({"a": flat["a"], "b": {"c": flat["b.c"], "d.e": flat["b.c"]}}, None),
    ):
        assert (target.clone().load_state_dict(state, from_flatten=given) == 1).all()
    with pytest.raises(StateError, match="'b.c'"):
        target.load_state_dict(flat, from_flatten=False)
    older = OrderedDict(a=torch.ones(2), b={"c": torch.ones(2), "__batch_size": torch.Size([2]), "__device": None})
    older["__batch_size"] = torch.Size([])
    loaded = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}}).load_state_dict(older)
    assert loaded["b"].batch_size == (2,) and (loaded == 1).all()


def test_a_module_and_a_container() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    td = TensorDict().load_state_dict(module.state_dict())
    assert td["1", "running_mean"].shape == (3,) and td["0", "weight"].data_ptr() == module[0].weight.data_ptr()
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    other.load_state_dict(td.state_dict())
    assert torch.equal(other[0].weight, module[0].weight)


def test_not_strict() -> None:
    td = simple()
    other = TensorDict({"a": torch.zeros(3, 2), "more": torch.zeros(3)}, [3])
    other.load_state_dict(td.state_dict(), strict=False)
    assert list(other.keys()) == ["a", "more", "b"] and (other["b", "c"] == 1).all() and (other["more"] == 0).all()
    point = Point(torch.zeros(3), batch_size=[3])
    state = Point(torch.ones(3), next=Point(torch.ones(3), batch_size=[3]), batch_size=[3]).state_dict()
    with pytest.raises(StateError, match=r"not in the container: 'next'"):
        point.load_state_dict(state)
    point.load_state_dict(state, strict=False)
    assert isinstance(point.next, Point) and (point.x == 1).all()
    with pytest.raises(StateError, match="'zzz'"):
        point.load_state_dict({"x": torch.ones(3), "zzz": torch.ones(3)}, strict=False)


def test_parameters_and_dtypes() -> None:
    td = TensorDict({"p": torch.nn.Parameter(torch.zeros(2)), "i": torch.zeros(2, dtype=torch.int64)})
    parameter = td["p"]
    td.load_state_dict({"p": torch.ones(2), "i": torch.full((2,), 3.0)})
    assert td["p"] is parameter and parameter.tolist() == [1, 1] and td["i"].dtype is torch.int64
    td.load_state_dict({"p": torch.ones(2).numpy(), "i": torch.ones(2).numpy()})
    assert td["i"].tolist() == [1, 1]


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_listed_and_nothing_is_changed() -> None:
    td = many_kinds()
    before = td.clone()
    state = td.clone().apply_(lambda leaf: leaf.fill_(9)).state_dict()
    del state["b.c"]
    state["a"] = torch.zeros(3, 4)
    state["new.x"] = torch.zeros(3)
    state["odd.1.x"] = torch.zeros(2, 2)
    state["even.x"] = torch.zeros(4, 2)
    with pytest.raises(StateError) as caught:
        td.load_state_dict(state)
    message = str(caught.value)
    for part in (
        "missing in the state dict: ('b', 'c')",
        "'new.x'",
        "its shape is [3, 2], and [3, 4]",
        "('odd', 'x')",
        "('even', 'x')",
        "stack of 3",
    ):
        assert part in message, message
    assert_close(td.exclude("rows"), before.exclude("rows"))


@pytest.mark.parametrize(
    ("target", "state", "message"),
    [
        ({"a": torch.zeros(2)}, {"a": {"b": torch.zeros(2)}}, "'a': it is a tensor, and a container"),
        ({"a": {"b": torch.zeros(2)}}, {"a": torch.zeros(2)}, "'a': it is a container, and a Tensor"),
        ({"a": torch.zeros(2)}, {"a": "text"}, "'a': it is a tensor, and a str"),
        ({"a": torch.zeros(2)}, {"a": torch.empty(2, device="meta")}, "'a': it has no content"),
        ({"a": torch.zeros(2)}, {"a": torch.ones(2, dtype=torch.complex64)}, "'a': .*complex64"),
        ({"a": torch.zeros(1).expand(2)}, {"a": torch.ones(2)}, "'a': it is expanded.*assign=True"),
        ({"s": "text"}, {"s": {"b": torch.zeros(2)}}, "'s': it is a value"),
    ],
)
def test_kinds_that_do_not_fit(target: Any, state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        TensorDict(target).load_state_dict(state)


def test_batch_sizes_that_do_not_fit() -> None:
    td = simple()
    state = td.state_dict()
    state._metadata[""]["batch_size"] = torch.Size([4])
    with pytest.raises(StateError, match=r"'a': its shape \[3, 2\] does not begin with the batch size \[4\]"):
        td.load_state_dict(state)
    assert td.batch_size == (3,)


def test_locked_and_unknown() -> None:
    td = simple().lock_()
    with pytest.raises(LockedError, match="'a'.*unlock_"):
        td.load_state_dict(simple().state_dict(), assign=True)
    with pytest.raises(LockedError):
        TensorDict().lock_().load_state_dict(simple().state_dict())
    state = TensorDict({"p": Point(torch.zeros(1))}).state_dict()
    state._metadata["p"]["_class"] = "nowhere.Point"
    with pytest.raises(StateError, match=r"'p': .*nowhere.Point.*not known"):
        TensorDict().load_state_dict(state)
    assert issubclass(UnsupportedEntryError, SaveError)
    odd = lazy_stack([TensorDict(x=torch.zeros(i)) for i in (1, 2)]).state_dict()
    with pytest.raises(StateError, match="lazy stack of unequal members"):
        TensorDict().load_state_dict(odd)


# --- the reference ----------------------------------------------------------------------------------------------------

EXCHANGE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import *
@tensorclass
class Point:
    x: torch.Tensor
    label: str = "none"
    next: "Point" = None
def make(n):
    td = TensorDict({"a": torch.arange(6.).reshape(3, 2) + n, "b": {"c": torch.full((3,), float(n))}}, [3])
    td["s"] = f"text {n}"
    inner = Point(torch.full((3,), float(n)), label=f"inner {n}", batch_size=[3])
    td["point"] = Point(torch.full((3,), 2.0 * n), label=f"outer {n}", next=inner, batch_size=[3])
    td["stack"] = lazy_stack([TensorDict({"x": torch.full((2,), float(i + n))}) for i in range(3)])
    td["empty"] = {}
    return td
def save(folder):
    for flatten in (True, False):
        torch.save(make(1).state_dict(flatten=flatten), f"{folder}/{flatten}.pt")
def load(folder):
    for flatten in (True, False):
        td = make(5).load_state_dict(torch.load(f"{folder}/{flatten}.pt"))
        expected = make(1)
        for key in ("a", ("b", "c"), ("stack", "x")):
            assert torch.equal(td[key], expected[key]), key
        assert td["s"] == "text 1", td["s"]
        assert (td["point"].label, td["point"].next.label) == ("outer 1", "inner 1")
        assert torch.equal(td["point"].next.x, expected["point"].next.x)
"""


@pytest.mark.reference
def test_files_of_either_implementation_load_in_the_other(behaviour: Reference, tmp_path: pathlib.Path) -> None:
    ours: dict[str, Any] = {}
    exec(EXCHANGE.replace('warnings.simplefilter("ignore")', ""), ours)
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ours["save"](tmp_path / "ours")
    behaviour.run(f"{EXCHANGE}\nsave({str(tmp_path / 'theirs')!r})")
    ours["load"](tmp_path / "theirs")
    ours["load"](tmp_path / "ours")
    behaviour.run(f"{EXCHANGE}\nload({str(tmp_path / 'ours')!r})")


def test_torch_save_keeps_the_metadata() -> None:
    file = io.BytesIO()
    torch.save(many_kinds().state_dict(), file)
    file.seek(0)
    again = TensorDict().load_state_dict(torch.load(file, weights_only=True))
    assert again["values"] == ["a", "b", "c"] and again.names == ["t"]


@tensorclass
class Labelled:
    a: torch.Tensor
    b: str
    c: Any = None


def older(a: float, b: str) -> dict[str, Any]:
    """The state of an instance as older releases of the reference have it."""
    tensors = OrderedDict(a=torch.full((3,), a), __batch_size=torch.Size([3]), __device=None)
    holder = OrderedDict(__batch_size=torch.Size([3]), __device=None)
    values = {"data": b, "_is_non_tensor": True, "_metadata": None}
    tensors["b"] = {"_tensordict": holder, "_non_tensordict": values}
    return {"_tensordict": tensors, "_non_tensordict": {"c": None}}


@pytest.mark.parametrize("assign", [False, True])
def test_tensorclasses_in_the_layout_of_older_releases(assign: bool) -> None:
    loaded = Labelled(a=torch.zeros(3), b="x", batch_size=[3]).load_state_dict(older(7.0, "y"), assign=assign)
    assert type(loaded) is Labelled
    assert (loaded.a.tolist(), loaded.b, loaded.c, loaded.batch_size) == ([7.0] * 3, "y", None, (3,))
    nested = TensorDict(t=Labelled(a=torch.zeros(3), b="x", batch_size=[3]), batch_size=[3])
    state = OrderedDict(t=older(8.0, "z"), __batch_size=torch.Size([3]), __device=None)
    nested.load_state_dict(state, assign=assign)
    assert (nested["t"].a.tolist(), nested["t"].b) == ([8.0] * 3, "z")


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("from_flatten", [None, True])
@pytest.mark.parametrize("separate", [False, True])
def test_the_flat_layout_of_older_releases(assign: bool, from_flatten: bool | None, separate: bool) -> None:
    def make(value: float, text: str) -> Labelled:
        inner = Labelled(a=torch.full((3,), value + 1), b=text * 2, batch_size=[3])
        return Labelled(a=torch.full((3,), value), b=text, c=inner, batch_size=[3])

    state = {
        "_tensordict.a": torch.full((3,), 7.0),
        "_tensordict.c._tensordict.a": torch.full((3,), 8.0),
        "_tensordict.__batch_size": torch.Size([3]),
        "_tensordict.__device": None,
    }
    if separate:
        state |= {"_non_tensordict.b": "y", "_tensordict.c._non_tensordict.b": "yy"}
    else:
        state |= {"_non_tensordict": {"b": "y"}, "_tensordict.c._non_tensordict": {"b": "yy"}}
    for target, given in (
        (make(0.0, "x"), state),
        (TensorDict(t=make(0.0, "x"), batch_size=[3]), {f"t.{name}": value for name, value in state.items()}),
    ):
        target.load_state_dict(given, assign=assign, from_flatten=from_flatten)
        loaded = target["t"] if type(target) is TensorDict else target
        assert type(loaded) is type(loaded.c) is Labelled
        assert (loaded.a.tolist(), loaded.b, loaded.c.a.tolist(), loaded.c.b) == ([7.0] * 3, "y", [8.0] * 3, "yy")
        with pytest.raises(RuntimeError, match="'odd'"):
            target.load_state_dict({**given, "odd": torch.ones(3)}, from_flatten=from_flatten)


def test_older_values_among_the_fields_load_too() -> None:
    state = older(7.0, "y")
    del state["_tensordict"]["b"]
    state["_non_tensordict"]["b"] = "beside"
    assert Labelled(a=torch.zeros(3), b="x", batch_size=[3]).load_state_dict(state).b == "beside"


def test_older_states_that_do_not_fit_change_nothing() -> None:
    target = Labelled(a=torch.zeros(3), b="x", batch_size=[3])
    state = older(7.0, "y")
    state["_tensordict"]["odd"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="'odd'"):
        target.load_state_dict(state)
    assert (target.a.tolist(), target.b) == ([0.0] * 3, "x")


def test_lazy_stacks_with_a_tensor_of_its_own_shape() -> None:
    def stack(value: float) -> Any:
        return lazy_stack([TensorDict(u=UnbatchedTensor(torch.full((2,), value)), a=torch.ones(3)) for _ in range(2)])

    loaded = stack(0.0).load_state_dict(stack(4.0).state_dict())
    assert loaded["u"].tolist() == [4.0, 4.0]
    assert loaded[1]["u"].tolist() == [4.0, 4.0]


def test_values_take_the_batch_size_that_is_loaded() -> None:
    td = TensorDict({"note": "text", "a": torch.zeros(2)}, [2])
    td.load_state_dict(td[:1].state_dict(), assign=True)
    assert td.batch_size == td.get("note").batch_size == (1,)
    assert td["note"] == "text"
