"""Values in containers: NonTensorData, NonTensorStack, MetaData; and UnbatchedTensor."""

import copy
import operator
import pickle
import warnings
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorDataBase,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    capture_non_tensor_stack,
    dense_stack_tds,
    is_leaf_nontensor,
    is_non_tensor,
    lazy_stack,
    list_to_stack,
    maybe_dense_stack,
    pad,
    pad_sequence,
    set_capture_non_tensor_stack,
    set_list_to_stack,
)
from tensordict.containers.nontensor import unwrap, wrap


class Thing:
    """An object that equals only itself."""


def make(**entries):
    return TensorDict({"a": torch.arange(3.0), "s": "x", **entries}, batch_size=[3])


def values(container, key="s"):
    return container.get(key).tolist()


THING = Thing()


# --- storing and reading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["text", "", b"bytes", None, THING, {1, 2}, int, len, torch.float32, torch.device("cpu"), ("a", 1), np.str_("x")],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_given_back(value):
    td = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    td["v"] = value
    td["n", "v"] = value
    for source in (td, td[0], td.clone(False), td.unbind(0)[1], td.reshape(1, 2), td.lock_()):
        assert source["v"] is value
        assert source["n", "v"] is value
    assert type(td.get("v")) is NonTensorData
    assert td.get("v").data is value
    assert TensorDict(v=value)["v"] is value


def test_holders_have_the_batch_size_device_and_names_of_their_container():
    td = TensorDict({"s": "x", "n": {"t": "y"}}, batch_size=[2, 3], device="cpu", names=["b", "t"])
    for key in ("s", ("n", "t")):
        holder = td.get(key)
        assert holder.batch_size == (2, 3)
        assert holder.device == torch.device("cpu")
        assert holder.names == ["b", "t"]


def test_numbers_lists_and_mappings_stay_what_they_were():
    td = TensorDict(n=1, f=[1.0, 2.0], d={"x": "y"}, t=(1, 2), e=[])
    assert all(isinstance(td[key], torch.Tensor) for key in "nfte")
    assert isinstance(td["d"], TensorDict)
    assert td["d", "x"] == "y"


def test_set_non_tensor_keeps_anything_as_it_is():
    td = TensorDict(batch_size=[2])
    tensor = torch.zeros(5)
    td.set_non_tensor("d", {1: 2}).set_non_tensor(("n", "i"), 3).set_non_tensor("t", tensor).set_non_tensor("l", [1, 2])
    assert td["d"] == {1: 2}
    assert td["n", "i"] == 3 and type(td["n", "i"]) is int
    assert td["t"] is tensor
    assert td["l"] == [1, 2]
    assert td.set_non_tensor("h", NonTensorData("k"))["h"] == "k"
    with pytest.raises(RuntimeError, match="locked"):
        td.lock_().set_non_tensor("z", 1)


def test_get_non_tensor_and_is_non_tensor():
    td = TensorDict({"s": "x", "n": {"s": "y"}, "a": torch.zeros(1)})
    assert td.get_non_tensor("s") == "x"
    assert td.get_non_tensor(("n", "s")) == "y"
    assert td.get_non_tensor("a") is td["a"]
    assert td.get_non_tensor("missing", 3) == 3
    with pytest.raises(KeyError, match="missing"):
        td.get_non_tensor("missing")
    assert td.is_non_tensor("s") and td.is_non_tensor(("n", "s")) and not td.is_non_tensor("a")
    with pytest.raises(KeyError, match="missing"):
        td.is_non_tensor("missing")
    assert [is_non_tensor(x) for x in (td.get("s"), NonTensorStack("a"), MetaData(1), td, td["a"], "x")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip


def test_finding_and_leaving_out():
    td = TensorDict({"s": "x", "n": {"s": "y", "b": torch.zeros(1)}, "a": torch.zeros(1)})
    assert [key for key, _ in td.non_tensor_items()] == ["s"]
    assert [(key, holder.data) for key, holder in td.non_tensor_items(include_nested=True)] == [
        ("s", "x"),
        (("n", "s"), "y"),
    ]
    assert sorted(td.filter_non_tensor_data().keys(True, True), key=str) == [("n", "b"), "a"]


def test_views_leave_values_out_of_the_leaves_unless_asked():
    td = TensorDict({"a": torch.zeros(1), "s": "x", "n": {"s": "y"}})
    assert list(td.keys(True, True)) == ["a"]
    assert list(td.values(True, True)) == [td["a"]]
    assert list(td.keys(True, True, is_leaf=is_leaf_nontensor)) == ["a", "s", ("n", "s")]
    assert set(td.keys(True)) == {"a", "s", ("n", "s"), "n"}
    assert len(td.keys(True)) == 4
    assert td.depth == 1 and TensorDict(s="x").depth == 0
    assert not TensorDict(s="x").is_empty()


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        ([1, "a"], [1, "a"]),
        ([None, None], [None, None]),
        ([{"x": 1}, {"x": 2}], [{"x": 1}, {"x": 2}]),
        ([["a", "b"], ["c", "d"]], [["a", "b"], ["c", "d"]]),
        ([["a"], ["b", "c"]], [["a"], ["b", "c"]]),
        ([("a", 1), ("b", 2)], [("a", 1), ("b", 2)]),
        ([(1, 2), (3, 4)], [(1, 2), (3, 4)]),
        ([[(1, 2)], [(3, 4)]], [[(1, 2)], [(3, 4)]]),
        ([[1, 2], (3, 4)], [[1, 2], (3, 4)]),
    ],
)
def test_lists_become_stacks(items, expected):
    td = TensorDict({"s": items}, batch_size=[2])
    assert type(td.get("s")) is NonTensorStack
    assert td["s"] == expected
    assert td[1]["s"] == expected[1]


def test_lists_of_arrays_become_tensors_without_a_warning():
    stored = TensorDict({"a": [np.zeros(2), np.ones(2)], "b": [np.array("x"), np.array("y")]}, batch_size=[2])
    assert stored["a"].tolist() == [[0, 0], [1, 1]] and stored["b"] == ["x", "y"]


def test_lists_that_do_not_fit_are_refused_with_their_key():
    with pytest.raises(RuntimeError, match=r"'s'.*\[2\]"):
        TensorDict({"s": ["a", "b", "c"]}, batch_size=[2])
    with pytest.raises(RuntimeError, match="'s'"):
        TensorDict({"s": ["a", "b"]}, batch_size=[2, 3])
    with pytest.raises(TypeError, match="'s'.*regular array"):
        TensorDict({"s": [[1], [1, 2]]}, batch_size=[2])


def test_a_list_of_containers_is_stacked():
    td = TensorDict(items=[TensorDict(x=1), TensorDict(x=2)])
    assert td["items", "x"].tolist() == [1, 2]


def test_list_to_stack_is_a_setting():
    assert list_to_stack() is True and list_to_stack(allow_none=True) is None
    with set_list_to_stack(False):
        assert list_to_stack() is False
        td = TensorDict({"s": ["a", "b", "c"]}, batch_size=[2])
        assert td["s"] == ["a", "b", "c"] and type(td.get("s")) is NonTensorData
        assert td.set("rows", [(1, 2), (3, 4)])["rows"].tolist() == [[1, 2], [3, 4]]
        assert td.set("floats", [1.5, 2.5])["floats"].dtype == torch.float64
        with set_list_to_stack(True):
            assert list_to_stack()
    assert list_to_stack(allow_none=True) is None
    with pytest.raises(TypeError, match="True or False"):
        set_list_to_stack("yes")


def test_values_are_no_containers_to_write_through():
    td = make()
    with pytest.raises(KeyError, match=r"\('s', 'b'\)"):
        td["s", "b"] = 1
    with pytest.raises(KeyError):
        td["s", "b"]
    stack = make(s=["a", "b", "c"])
    with pytest.raises(KeyError, match="no tensor"):
        stack["s", "b"] = torch.zeros(3)
    assert ("s", "data") not in td


# --- holders by themselves --------------------------------------------------------------------------------------------


def test_holders():
    holder = NonTensorData("a", batch_size=[2], names=["t"], device="cpu")
    assert isinstance(holder, NonTensorDataBase)
    assert (holder.data, holder.batch_size, holder.names, len(holder)) == ("a", (2,), ["t"], 2)
    assert holder.tolist() == ["a", "a"]
    assert holder.to_dict() == "a"
    assert holder.get("data") == "a"
    assert list(holder.keys()) == []
    assert NonTensorData(holder).data == "a"
    assert NonTensorData(lambda x: x + 1)(2) == 3
    assert NonTensorData.fields()[0].name == "data"
    assert NonTensorData.from_tensordict(TensorDict(batch_size=[4]), {"data": "x"}).batch_size == (4,)
    with pytest.raises(ValueError, match="data"):
        NonTensorData.from_tensordict(TensorDict())
    with pytest.raises(ValueError, match="entries"):
        NonTensorData.from_tensordict(TensorDict(a=1), {"data": "x"})
    assert [item.data for item in holder] == ["a", "a"]


def test_replacing_the_value():
    holder = NonTensorData("a", batch_size=[2])
    holder.data = "b"
    assert holder.data == "b"
    holder.update(NonTensorData("c"))
    assert holder.data == "c"
    holder.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        holder.data = "d"
    with pytest.raises(RuntimeError, match="locked"):
        holder.update("d")
    assert holder.update_("d").data == "d"
    with pytest.raises(RuntimeError, match="one value"):
        holder.update_(NonTensorStack("a", "b"))
    with pytest.raises(RuntimeError, match="maybe_to_stack"):
        holder[0] = "e"
    holder[:] = "f"
    holder[0] = NonTensorData("f")
    assert holder.tolist() == ["f", "f"]
    with pytest.raises(RuntimeError, match="cannot grow"):
        holder.extend(["x"])


def test_to_stack():
    holder = NonTensorData("a", batch_size=[2, 3])
    stack = holder.maybe_to_stack()
    assert type(stack) is NonTensorStack and stack.batch_size == (2, 3)
    stack[1, 2] = "b"
    assert stack.tolist() == [["a"] * 3, ["a", "a", "b"]]
    assert holder.data == "a"
    single = NonTensorData("a")
    assert single.maybe_to_stack() is single and stack.maybe_to_stack() is stack


def test_wrap_and_unwrap():
    holder = wrap({"a": 1}, torch.Size([2]), None, None)
    assert unwrap(holder) == {"a": 1}
    assert wrap(holder, torch.Size([2]), None, None) is holder
    assert unwrap("x") == "x"
    assert unwrap(NonTensorStack("a", "b")) == ["a", "b"]


# --- stacks -----------------------------------------------------------------------------------------------------------


def test_stacks_are_made_of_values_and_holders():
    stack = NonTensorStack("a", NonTensorData("b"))
    assert isinstance(stack, LazyStackedTensorDict)
    assert stack.batch_size == (2,) and stack.tolist() == ["a", "b"]
    assert type(stack[0]) is NonTensorData
    assert NonTensorStack.from_list([["a"], ["b", "c"]]).batch_size == (2, -1)
    assert NonTensorStack.from_list([]).tolist() == [] and NonTensorStack().batch_size == (0,)
    assert NonTensorStack.from_list("a").tolist() == ["a"]
    assert NonTensorStack("a", "a").data == "a"
    with pytest.raises(AttributeError, match="tolist"):
        _ = stack.data
    with pytest.raises(RuntimeError, match="lazy_stack"):
        NonTensorStack(TensorDict())
    stack.append("c")
    stack.extend(["d", NonTensorData("e")])
    assert stack.tolist() == list("abcde")
    with pytest.raises(RuntimeError, match="TensorDict"):
        stack.append(TensorDict())


GRID = [["a", "b", "c"], ["d", "e", "f"]]
INDICES = [
    0,
    -1,
    slice(1, None),
    (slice(None), 1),
    (slice(None), slice(None, None, 2)),
    (0, 2),
    (None, 0),
    torch.tensor([1, 0, 1]),
    (slice(None), [2, 0]),
    (torch.tensor([0, 1]), torch.tensor([2, 0])),
    torch.tensor([[True, False, True], [False, True, False]]),
    torch.tensor([False, True]),
    (..., 0),
    slice(0, 0),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_stack_is_indexed_as_an_array(index):
    td = TensorDict({"s": GRID, "i": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    part = td[index]
    flat = [value for row in GRID for value in row]
    expected = tree_map(lambda i: flat[i], part["i"].tolist())
    assert unwrap(part.get("s")) == expected
    assert part.get("s").batch_size == part.batch_size


SHAPED = {
    "view": lambda td: td.view(3, 2),
    "reshape": lambda td: td.reshape(-1),
    "flatten": lambda td: td.flatten(0, 1),
    "unflatten": lambda td: td.unflatten(1, (3, 1)),
    "permute": lambda td: td.permute(1, 0),
    "transpose": lambda td: td.transpose(0, 1),
    "unsqueeze": lambda td: td.unsqueeze(-1),
    "squeeze": lambda td: td[:1].squeeze(0),
    "expand": lambda td: td.expand(2, 2, 3),
    "flip": lambda td: td.flip(1),
    "roll": lambda td: td.roll(1, 1),
    "roll-flat": lambda td: td.roll(2),
    "repeat": lambda td: td.repeat(2, 1),
    "repeat_interleave": lambda td: td.repeat_interleave(2, 0),
    "split": lambda td: td.split(2, 1)[0],
    "split-0": lambda td: td.split([1, 1], 0)[1],
    "chunk": lambda td: td.chunk(3, 1)[2],
    "unbind": lambda td: td.unbind(1)[2],
    "narrow": lambda td: td.narrow(1, 1, 2),
    "gather": lambda td: td.gather(1, torch.tensor([[2, 0], [1, 1]])),
    "masked_select": lambda td: td.masked_select(torch.tensor([[True, False, True], [False, False, True]])),
    "clone": lambda td: td.clone(),
    "to": lambda td: td.to("cpu"),
    "copy": lambda td: td.copy(),
    "add": lambda td: td + 0,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "deepcopy": copy.deepcopy,
    "cat": lambda td: torch.cat([td, td[:1]]),
    "cat-1": lambda td: torch.cat([td, td[:, :1]], 1),
    "stack": lambda td: torch.stack([td, td]),
    "stack-1": lambda td: torch.stack([td, td.flip(0)], 1),
    "lazy_stack": lambda td: lazy_stack([td, td.flip(0)], 2),
    "tree_map": lambda td: tree_map(lambda x: x, td),
    "to_tensordict": lambda td: td.to_tensordict(),
    "to_lazystack": lambda td: td.to_lazystack(1),
    "contiguous": lambda td: td.contiguous(),
}


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("form", ["stack", "stack-of-holders", "lazy"])
def test_stacks_follow_every_shape_operation(name, form):
    td = TensorDict({"s": GRID, "i": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    if form == "stack-of-holders":
        td["s"] = NonTensorStack(*[NonTensorData(value, batch_size=[2]) for value in "abc"], stack_dim=1)
    elif form == "lazy":
        td = lazy_stack(list(td.unbind(0)))
    flat = list("abcabc") if form == "stack-of-holders" else [value for row in GRID for value in row]
    result = SHAPED[name](td)
    holder = result.get("s")
    assert holder.batch_size == result.batch_size
    assert holder.tolist() == tree_map(lambda i: flat[i], result["i"].tolist())


@pytest.mark.parametrize("name", SHAPED)
def test_a_holder_follows_every_shape_operation(name):
    td = TensorDict({"s": "x", "i": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    with set_capture_non_tensor_stack(True):
        result = SHAPED[name](td)
        holder = result.get("s")
    assert type(holder) is NonTensorData
    assert holder.data == "x" and holder.batch_size == result.batch_size


def test_padding_has_no_value():
    td = TensorDict({"s": ["a", "b"], "i": torch.arange(2)}, batch_size=[2])
    assert values(pad(td, [1, 1], value=7)) == [None, "a", "b", None]


def test_results_do_not_share_values():
    one, two = TensorDict(s="x"), TensorDict(s="y")
    for joined in (torch.stack([one, two]), torch.cat([one.unsqueeze(0), two.unsqueeze(0)])):
        joined[0] = {"s": "z"}
        assert (one["s"], two["s"]) == ("x", "y")
        assert values(joined) == ["z", "y"]
    td = TensorDict({"s": ["a", "b"]}, batch_size=[2])
    picked = td[torch.tensor([0, 0, 1])].clone()
    picked[0] = {"s": "q"}
    assert values(picked) == ["q", "a", "b"] and values(td) == ["a", "b"]


def test_clone_copies_values_and_copy_shares_them():
    td = TensorDict(d=torch.zeros(1)).set_non_tensor("s", {"a": []})
    assert td.copy()["s"] is td["s"]
    for other in (td.clone(), copy.deepcopy(td), pickle.loads(pickle.dumps(td)), lazy_stack([td]).clone()[0]):
        assert other["s"] == {"a": []} and other["s"] is not td["s"] and other["s"]["a"] is not td["s"]["a"]


# --- joining ----------------------------------------------------------------------------------------------------------


def test_equal_values_collapse_when_captured():
    same = [TensorDict(s="x"), TensorDict(s="x")]
    assert capture_non_tensor_stack() is False and capture_non_tensor_stack(allow_none=True) is None
    assert type(torch.stack(same).get("s")) is NonTensorStack
    assert type(lazy_stack(same).get("s")) is NonTensorStack
    with set_capture_non_tensor_stack(True):
        assert type(torch.stack(same).get("s")) is NonTensorData
        assert lazy_stack(same)["s"] == "x"
        assert torch.stack(same).get("s").batch_size == (2,)
        different = torch.stack([*same, TensorDict(s="y")])
        assert type(different.get("s")) is NonTensorStack and different["s"] == ["x", "x", "y"]
        arrays = torch.stack([NonTensorData(np.zeros(2)), NonTensorData(np.zeros(2))])
        assert type(arrays) is NonTensorData
        assert type(torch.stack([NonTensorData(np.zeros(2)), NonTensorData(np.zeros(3))])) is NonTensorStack
        assert type(torch.stack([NonTensorData(torch.zeros(2)), NonTensorData(torch.ones(2))])) is NonTensorStack
    assert type(torch.cat([make(), make()]).get("s")) is NonTensorData


def test_mixed_inputs():
    assert torch.cat([NonTensorData("a", batch_size=[2]), NonTensorStack("b", "c")]).tolist() == list("aabc")
    stack = torch.stack([NonTensorData("a", batch_size=[2]), NonTensorStack("b", "c")], 1)
    assert stack.tolist() == [["a", "b"], ["a", "c"]]
    with pytest.raises(TypeError, match="'s'"):
        torch.stack([TensorDict(s="x"), TensorDict(s=TensorDict(s=1))])
    with pytest.raises(TypeError, match="'s'"):
        torch.stack([TensorDict(s="x"), TensorDict(s=torch.zeros(()))])


def test_meta_data_ignores_the_batch():
    td = TensorDict({"m": MetaData("v")}, batch_size=[2])
    assert td["m"] == "v" and td[0].get("m").batch_size == ()
    assert type(torch.stack([td, td]).get("m")) is MetaData
    other = TensorDict({"m": MetaData("w")}, batch_size=[2])
    assert torch.stack([td, other])["m"] == [["v", "v"], ["w", "w"]]
    assert torch.cat([td, other])["m"] == "v"
    assert lazy_stack([td, td])["m"] == "v"
    assert lazy_stack([td, other]).get("m").batch_size == (2, 2)
    assert type(td.clone().get("m")) is MetaData and type(tree_map(lambda x: x, td).get("m")) is MetaData


# --- assignment and update --------------------------------------------------------------------------------------------

PARTS = [
    (0, "y", ["y", "x", "x"]),
    (slice(0, 2), "y", ["y", "y", "x"]),
    (slice(None), "y", ["y", "y", "y"]),
    (slice(1, None), ["p", "q"], ["x", "p", "q"]),
    (torch.tensor([True, False, True]), "y", ["y", "x", "y"]),
    (torch.tensor([2, 0]), ["p", "q"], ["q", "x", "p"]),
    (slice(0, 2), "x", ["x", "x", "x"]),
]


@pytest.mark.parametrize(("index", "value", "expected"), PARTS, ids=str)
@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("form", ["holder", "stack", "lazy"])
def test_assignment_to_a_part(index, value, expected, locked, form):
    td = make() if form != "stack" else make(s=["x"] * 3)
    if form == "lazy":
        td = lazy_stack(list(td.unbind(0)))
    if locked:
        td.lock_()
    td[index] = {"s": value}
    assert values(td) == expected
    assert td.get("s").batch_size == (3,)
    assert td.get("s").is_locked is locked


def test_assignment_of_containers():
    td = make()
    td[0] = TensorDict(a=7.0, s="y")
    assert td["a"].tolist() == [7, 1, 2] and td["s"] == ["y", "x", "x"]
    td[1:] = TensorDict({"a": torch.zeros(2), "s": ["p", "q"]}, batch_size=[2])
    assert td["s"] == ["y", "p", "q"]
    td[:] = make()
    assert td["s"] == ["x", "x", "x"]
    td[0] = 5
    assert td["a"].tolist() == [5, 1, 2] and td["s"] == ["x", "x", "x"]


@pytest.mark.parametrize("index", [None, (None, slice(None)), torch.tensor(True)], ids=str)
def test_assignment_to_an_index_that_adds_a_dim(index):
    td = TensorDict({"a": torch.zeros(2), "s": NonTensorStack("a", "b"), "one": "x"}, batch_size=[2])
    other = TensorDict({"a": torch.ones(2), "s": NonTensorStack("c", "d"), "one": "y"}, batch_size=[2])
    td[index] = other
    assert td["s"] == ["c", "d"] and td.get("s").batch_size == (2,)
    assert values(td, "one") == ["y", "y"] and td.get("one").batch_size == (2,)
    td[index] = td.clone().unsqueeze(0)
    assert td["s"] == ["c", "d"] and td.get("s").batch_size == (2,)


def test_assignment_in_two_dims():
    td = TensorDict({"s": "x"}, batch_size=[2, 3])
    td[0, 1] = {"s": "y"}
    td[:, 2] = {"s": "z"}
    assert td["s"] == [["x", "y", "z"], ["x", "x", "z"]]
    td[torch.tensor([[True, False, False], [True, True, False]])] = {"s": ["1", "2", "3"]}
    assert td["s"] == [["1", "y", "z"], ["2", "3", "z"]]
    td[1] = {"s": ["a", "b", "c"]}
    assert td["s"][1] == ["a", "b", "c"]


def test_assignment_allocates():
    td = TensorDict(batch_size=[3])
    td[0] = TensorDict(s="y")
    assert td.get("s").data == "y"
    td[1:] = TensorDict({"t": ["p", "q"]}, batch_size=[2])
    assert td["t"] == [None, "p", "q"]
    td[0] = {"u": "v"}
    assert td["u"] == "v"


def test_a_failing_assignment_changes_nothing():
    td = make(b=torch.zeros(3, 2))
    with pytest.raises(RuntimeError, match="'b'"):
        td[0] = {"s": "y", "b": torch.zeros(5)}
    assert td["s"] == "x"
    with pytest.raises(RuntimeError, match="'s'"):
        td[:2] = {"a": 9.0, "s": ["p", "q", "r"]}
    assert td["a"].tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="'s'"):
        td[:2] = {"s": TensorDict(a=torch.zeros(2), batch_size=[2])}
    with pytest.raises(ValueError, match="'a'"):
        td.update_({"s": "y", "a": torch.zeros(7)})
    assert td["s"] == "x"


def test_in_place_updates_keep_the_holder():
    td = make()
    holder = td.get("s")
    for write in (
        lambda v: td.set_("s", v),
        lambda v: td.update_({"s": v}),
        lambda v: td.update({"s": v}, inplace=True),
        lambda v: td.set("s", v, inplace=True),
        lambda v: td.update_(TensorDict({"s": v}, batch_size=[3])),
        lambda v: td.lock_().update_({"s": v}),
    ):
        value = Thing()
        write(value)
        assert td["s"] is value and td.get("s") is holder
    for write in (
        lambda v: td.set_("s", v),
        lambda v: td.update_({"s": v}),
        lambda v: td.update({"s": v}, inplace=True),
        lambda v: td.set("s", v, inplace=True),
        lambda v: td.update_(TensorDict({"s": v}, batch_size=[3])),
    ):
        for other in (["a", "b", "c"], NonTensorStack("a", "b", "c"), torch.zeros(3)):
            with pytest.raises(ValueError, match="Failed to update 's' in tensordict"):
                write(other)
            assert td["s"] is value and td.get("s") is holder
    # Writing a part of the batch changes the kind of the entry.
    td[:] = {"s": ["a", "b", "c"]}
    assert td["s"] == ["a", "b", "c"] and td.get("s").is_locked


def test_tensors_are_not_written_into_values():
    for td in (make(), make(s=["a", "b", "c"]), lazy_stack(list(make(s=["a", "b", "c"]).unbind(0)))):
        before = td.get("s").tolist()
        for value in (torch.zeros(3), 3, [1, 2, 3]):
            with pytest.raises(ValueError, match="Failed to update 's' in tensordict"):
                td.set_("s", value)
        assert td.get("s").tolist() == before
    number = TensorDict(n=NonTensorData(3))
    number.set_("n", 4)
    assert number["n"] == 4


def test_updates_replace_values():
    td = TensorDict({"n": {"s": "x", "a": torch.zeros(1)}, "s": "x", "d": {"b": 1}})
    td.update({"n": {"s": "y"}, "s": torch.zeros(2), "d": "text"})
    assert td["n", "s"] == "y" and ("n", "a") in td
    assert td["s"].shape == (2,) and td["d"] == "text"
    td.update({"d": {"b": 2}})
    assert td["d", "b"] == 2
    td.update(TensorDict(n={"s": "z"}))
    assert td["n", "s"] == "z"
    with pytest.raises(RuntimeError, match="locked"):
        td.lock_().update({"n": {"s": "q"}})


def test_update_at_and_set_at():
    td = make()
    td.update_at_({"s": "y"}, 0)
    td.set_at_("s", "z", 2)
    assert td["s"] == ["y", "x", "z"]
    with pytest.raises(KeyError, match="missing"):
        td.update_at_(TensorDict(missing="x"), 0)


def test_tensors_are_not_updated_with_values():
    td = TensorDict(a=torch.zeros(1))
    for write in (lambda: td.set_("a", "x"), lambda: td.update_({"a": "x"})):
        with pytest.raises(TypeError, match="'a'"):
            write()
    assert td.update({"a": "x"})["a"] == "x"


def test_the_list_writes_through():
    td = TensorDict({"s": ["a", "b"]}, batch_size=[2])
    td["s"][0] = "q"
    assert td["s"] == ["q", "b"]
    grid = TensorDict({"s": GRID}, batch_size=[2, 3])
    grid["s"][1][2] = "z"
    assert grid["s"][1] == ["d", "e", "z"]
    assert repr(td["s"]) == "LinkedList(['q', 'b'])"
    words = td["s"]
    words.append("c")  # This changes the list only, and ends the link.
    words[0] = "r"
    assert words == ["r", "b", "c"] and td["s"] == ["q", "b"]


def test_a_value_under_a_new_dim_becomes_a_stack():
    single = TensorDict(a=torch.zeros(()), t="x", n=TensorDict(t="y"), origin=MetaData("camera"))
    for td in (single.unsqueeze(0), single.expand(1)):
        assert td["t"] == ["x"] and td["n", "t"] == ["y"] and td["origin"] == "camera"
        assert td.squeeze(0)["t"] == "x" and td.batch_size == td.get("t").batch_size
    row = TensorDict(a=torch.zeros(3), t="x", batch_size=[3], names=["time"])
    assert row.expand(2, 3)["t"] == [["x"] * 3] * 2 and row.unsqueeze(1)["t"] == [["x"]] * 3
    assert row.expand(2, 3).get("t").names == [None, "time"] and row.expand(3)["t"] == "x"
    assert row.reshape(3, 1)["t"] == "x" and row[None]["t"] == "x"
    pair = single.expand(2)
    pair[0] = {"t": "z"}
    assert pair["t"] == ["z", "x"] and single["t"] == "x"
    with set_capture_non_tensor_stack(True):
        assert single.unsqueeze(0)["t"] == "x"
    assert isinstance(NonTensorData("x").expand(2, 0), NonTensorStack) and NonTensorData("x").expand(0).batch_size == (
        0,
    )


def test_a_dict_compares_with_values_of_a_batch():
    td = TensorDict(a=torch.arange(3), t="x", n=TensorDict(t=["x", "y", "z"], batch_size=[3]), batch_size=[3])
    assert (td == td.to_dict()).all() and not (td != td.to_dict()).any()
    assert (td == {**td.to_dict(), "t": "y"})["t"].tolist() == [False] * 3


def test_where_of_holders_themselves():
    mask = torch.tensor([True, False, True])
    stack = NonTensorStack("x", "y", "z")
    assert stack.where(mask, NonTensorStack("1", "2", "3")).tolist() == ["x", "2", "z"]
    assert NonTensorData("x", batch_size=[3]).where(mask, stack).tolist() == ["x", "y", "x"]
    assert NonTensorData("x").where(torch.tensor(False), NonTensorData("y")).data == "y"
    assert stack.where(mask, 0).tolist() == ["x", "y", "z"]


def test_a_container_without_its_values_is_not_locked():
    td = TensorDict(t="x", n=TensorDict(a=torch.zeros(1))).lock_()
    td.filter_non_tensor_data()["n", "b"] = torch.ones(1)
    assert ("n", "b") not in td.keys(True)


def test_copy_at_asks_for_tensors_unless_told_otherwise():
    stack = NonTensorStack("x", "y")
    with pytest.raises(RuntimeError, match="fast=False"):
        stack.copy_at_(NonTensorData("q"), 0)
    assert stack.copy_at_(NonTensorData("q"), 0, fast=False).tolist() == ["q", "y"]


def test_lazy_stacks_take_values():
    stack = lazy_stack([TensorDict(a=torch.zeros(1)), TensorDict(a=torch.zeros(2))])
    stack["s"] = "x"
    assert [member["s"] for member in stack.tensordicts] == ["x", "x"]
    stack["s"] = ["p", "q"]
    assert stack["s"] == ["p", "q"] and stack[1]["s"] == "q"
    stack.set_("s", ["r", "t"])
    stack.update_({"s": "u"})
    assert stack["s"] == ["u", "u"]
    stack[0] = {"s": "v"}
    assert stack["s"] == ["v", "u"]
    assert list(stack.keys()) == ["a", "s"] or set(stack.keys()) == {"a", "s"}
    assert stack.densify(layout=torch.jagged)["s"] == ["v", "u"]


# --- what operations on tensors do with values ------------------------------------------------------------------------


def test_operations_on_leaves_keep_values():
    td = make()
    for result in (
        td + 1, td + td, td * torch.ones(3), -td, td.sum(), td.mean(0), td.zero_(), td.apply(lambda x: x + 1),
        td.named_apply(lambda name, x: x), td.apply(lambda x: x, filter_empty=True), td.masked_fill(td["a"] > 0, 1.0),
        torch.zeros_like(td), td.where(td["a"] > 0, td), td.float(), td.detach(), td == 0,
        td.apply(lambda x, y: x, td.select("a")), td < td,
    ):  # fmt: skip
        assert result["s"] == "x"
        assert result.get("s").batch_size == result.batch_size
    assert (td + make().set("s", "y"))["s"] == "x"
    assert (td + td.select("a"))["s"] == "x"
    assert list(td.grad.keys()) == [] if td.grad is not None else True
    assert td.apply(lambda x: "text")["a"] == "text"


def test_reducing_unequal_values_leaves_none():
    td = TensorDict({"s": ["a", "b"], "t": ["c", "c"], "a": torch.zeros(2)}, batch_size=[2])
    total = td.sum(0)
    assert total["s"] is None and total["t"] == "c" and total.get("s").batch_size == ()


def test_equality_compares_values():
    td = make()
    assert (td == make()).all()
    different = td == make().set("s", "y")
    assert different["s"].tolist() == [False] * 3 and not different.all()
    assert (td != make().set("s", "y"))["s"].all()
    one, two = make(s=["a", "b", "c"]), make(s=["a", "z", "c"])
    assert (one == two)["s"].tolist() == [True, False, True]
    assert (lazy_stack(list(one.unbind(0))) == two)["s"].tolist() == [True, False, True]
    assert torch.equal(NonTensorStack("a", "b") == NonTensorData("a", batch_size=[2]), torch.tensor([True, False]))
    assert (NonTensorData(np.zeros(2)) == NonTensorData(np.zeros(2))).item()
    assert (NonTensorData("a") == "a") is False


@pytest.mark.parametrize("fn", [operator.and_, operator.or_, operator.xor])
def test_logic_is_that_of_python(fn):
    one, other = {1, 2}, {2, 3}
    assert fn(NonTensorData(one), NonTensorData(other)).data == fn(one, other)
    assert fn(NonTensorData(one), other).data == fn(other, NonTensorData(one)).data == fn(one, other)
    assert fn(NonTensorData(6, batch_size=[2]), NonTensorData(3, batch_size=[2])).tolist() == [fn(6, 3)] * 2
    # Bools become a mask, as with tensors.
    assert torch.equal(fn(NonTensorData(True), NonTensorData(False)), torch.tensor(fn(True, False)))
    stacks = NonTensorStack(True, False), NonTensorStack(True, True)
    assert fn(*stacks).tolist() == [fn(True, True), fn(False, True)]
    assert fn(NonTensorStack({1}, {2}), NonTensorStack({1}, {3})).tolist() == [fn({1}, {1}), fn({2}, {3})]
    with pytest.raises(TypeError, match="unsupported operand"):
        fn(NonTensorData("a"), NonTensorData("b"))


@pytest.mark.parametrize("name", ["and_", "or_", "xor"])
def test_logic_of_values_in_containers(name):
    fn, in_place = getattr(operator, name), getattr(operator, f"i{name.rstrip('_')}")
    mask = torch.tensor([True, False, True])
    left = TensorDict({"m": mask, "s": NonTensorData({1, 2}, batch_size=[3]), "t": [True, False, True]}, [3])
    right = TensorDict({"m": ~mask, "s": NonTensorData({2, 3}, batch_size=[3]), "t": [True, True, False]}, [3])
    left["flags"], right["flags"] = NonTensorStack(True, False, True), NonTensorStack(False, False, True)
    for one, other in ((left, right), (lazy_stack(list(left.unbind(0))), lazy_stack(list(right.unbind(0))))):
        result = fn(one, other)
        assert result["s"] == fn({1, 2}, {2, 3}) or result["s"] == [fn({1, 2}, {2, 3})] * 3
        assert result["flags"].tolist() == [fn(True, False), fn(False, False), fn(True, True)]
    with pytest.raises(TypeError, match="entry 's': unsupported operand"):
        fn(TensorDict(s="a"), TensorDict(s="b"))
    value = NonTensorData({1, 2})
    assert in_place(value, NonTensorData({2, 3})).data == fn({1, 2}, {2, 3})


@pytest.mark.parametrize("name", ["and", "or", "xor"])
def test_logic_of_values_in_containers_in_place(name):
    fn, in_place = getattr(operator, f"__{name}__"), getattr(operator, f"i{name}")
    mask = torch.tensor([True, False])
    rows = [NonTensorStack({1, 2}, {2}), NonTensorStack({2, 3}, {2})]
    for make in (lambda td: td, lambda td: lazy_stack(list(td.unbind(0))), lambda td: td.lock_()):
        left, right = (make(TensorDict({"m": mask, "n": {"s": row.clone()}}, [2])) for row in rows)
        before = left
        left = in_place(left, right)
        assert left is before and left["m"].tolist() == fn(mask, mask).tolist()
        assert left["n", "s"] == [fn({1, 2}, {2, 3}), fn({2}, {2})]
    td = TensorDict({"m": mask, "s": NonTensorData(True, batch_size=[2]), "only": "here"}, [2])
    td = in_place(td, TensorDict({"m": mask, "s": NonTensorData(False, batch_size=[2])}, [2]))
    assert td["s"] is fn(True, False) and td["only"] == "here"
    td = in_place(td, True)
    with pytest.raises(TypeError, match="entry 'only': unsupported operand"):
        in_place(td, td.clone().update({"m": ~mask}))
    assert td["m"].tolist() == in_place(fn(mask, mask), True).tolist()


def test_parts_without_elements_of_stacks_of_values_are_such_stacks():
    stack = lazy_stack([TensorDict(b="x"), TensorDict(b="y")])
    for part in (stack.get_at("b", False), stack.get("b")[False], stack.get("b")[:, None][:, :0], stack[:0].get("b")):
        assert type(part) is NonTensorStack and 0 in part.batch_size
    assert stack.get_at("b", False).tolist() == []


def test_the_order_of_dicts_is_kept():
    one, other = {"a": 1}, {"a": 2}
    assert (NonTensorData(one) | other).data == other and (one | NonTensorData(other)).data == other


def test_typed_metadata():
    text = MetaData[str]
    assert text is MetaData[str] and issubclass(text, MetaData) and text.__name__ == "MetaData[str]"
    held = text("a", batch_size=[2])
    assert isinstance(held, text) and isinstance(held, MetaData)
    assert not isinstance(MetaData("a"), text) and not isinstance(MetaData[int](3), text)
    for kind, value in ((str, 3), (Optional[str], 3), (int | str, 3.5), (Literal["a"], "b"), (list[int], 3)):  # noqa: UP045
        with pytest.raises(TypeError, match="Expected data of type"):
            MetaData[kind](value)
    for kind, value in ((Optional[str], None), (int | str, 3), (Literal["a"], "a"), (list[int], [3])):  # noqa: UP045
        assert MetaData[kind](value).data == value
    td = TensorDict({"m": held, "x": torch.zeros(2)}, [2])
    for result in (td[0], td.clone(), torch.stack([td, td]), torch.cat([td, td]), lazy_stack([td, td])):
        assert type(result.get("m")) is text and result["m"] == "a"
    other = td.clone().set("m", text("b", batch_size=[2]))
    assert torch.stack([td, other])["m"] == [["a"] * 2, ["b"] * 2]
    assert type(pickle.loads(pickle.dumps(td)).get("m")) is text
    assert type(pickle.loads(pickle.dumps(MetaData("a")))) is MetaData
    assert type(copy.deepcopy(td).get("m")) is type(tree_map(torch.neg, td).get("m")) is text


def test_truth_value_is_refused():
    with pytest.raises(RuntimeError, match="Converting a tensorclass to boolean value is not permitted"):
        bool(NonTensorData(True))
    with pytest.raises(RuntimeError, match="Converting a tensordict to boolean value is not permitted"):
        bool(TensorDict(a=torch.zeros(1)))


def test_keys_and_structure():
    td = TensorDict({"n": make(), "s": "y"})
    flat = td.flatten_keys()
    assert set(flat.keys()) == {"n.a", "n.s", "s"} and flat["n.s"] == "x"
    assert flat.unflatten_keys()["n", "s"] == "x"
    assert list(td.select(("n", "s")).keys(True, is_leaf=is_leaf_nontensor, leaves_only=True)) == [("n", "s")]
    assert td.exclude("s").filter_non_tensor_data().keys() == {"n"}
    assert "s" in td.filter_empty_()
    assert td.pop("s").data == "y"
    one, rest = td.split_keys([("n", "s")])
    assert one["n", "s"] == "x" and ("n", "s") not in rest
    with td.flatten_keys() as flat:
        flat["n.t"] = "new"
    assert td["n", "t"] == "new" and td["n", "s"] == "x"
    assert td.empty().is_empty()


def test_plain_python():
    td = TensorDict({"a": torch.arange(2), "s": ["p", "q"], "n": {"t": "x"}}, batch_size=[2])
    assert td.to_dict(convert_tensors=True) == {"a": [0, 1], "s": ["p", "q"], "n": {"t": "x"}}
    assert td.tolist(convert_tensors=True) == [{"a": i, "s": "pq"[i], "n": {"t": "x"}} for i in (0, 1)]
    assert td.numpy()["s"] == ["p", "q"]
    again = TensorDict.from_dict(
        {"a": torch.zeros(3), "s": "x", "n": {"t": "y", "b": torch.zeros(3, 2)}}, auto_batch_size=True
    )
    assert again.batch_size == (3,) and again.get("s").batch_size == (3,) and again["n"].batch_size == (3, 2)


def test_printing():
    td = TensorDict({"s": "txt", "l": ["a", "b"]}, batch_size=[2])
    assert repr(td) == (
        "TensorDict(\n    fields={\n        l: NonTensorStack(\n            ['a', 'b'],\n"
        "            batch_size=torch.Size([2]),\n            device=None),\n"
        "        s: NonTensorData(data=txt, batch_size=torch.Size([2]), device=None)},\n"
        "    batch_size=torch.Size([2]),\n    device=None,\n    is_shared=False)"
    )
    assert "  ...  " in repr(NonTensorData("y" * 500)) and len(repr(NonTensorData("y" * 500))) == 107
    assert "'..." in repr(NonTensorStack("a" * 47)).split("\n")[1]
    assert "&lt;Thing" in TensorDict().set_non_tensor("a", "<Thing").to_tensordict()._repr_html_()


def test_pytrees_and_vmap():
    td = make(l=["p", "q", "r"])
    leaves, spec = tree_flatten(td)
    assert len(leaves) == 1 and spec == tree_flatten(make(l=["p", "q", "r"]))[1]
    assert spec != tree_flatten(make(l=["p", "q", "z"]))[1]
    wide = TensorDict({"a": torch.zeros(3, 4), "s": "x"}, batch_size=[3, 4])
    seen = []

    def look(part):
        seen.append((part["s"], part.get("s").batch_size, part.batch_size))
        return part + 1

    result = torch.vmap(look)(wide)
    assert seen == [("x", (4,), (4,))]
    assert result["s"] == "x" and result.get("s").batch_size == (3, 4)
    assert torch.vmap(lambda part: part)(td)["l"] == ["p", "q", "r"]


def test_locks_hold_for_holders():
    td = make(l=["p", "q", "r"]).lock_()
    assert td.get("s").is_locked and td.get("l").is_locked
    td[0] = {"s": "y"}
    with pytest.raises(RuntimeError):
        td.get("s").unlock_()
    td.unlock_()
    assert not td.get("s").is_locked and not td.get("l").is_locked
    td["s"] = "z"
    assert td["s"] == "z"


# --- tensors with a shape of their own --------------------------------------------------------------------------------


def with_unbatched():
    return TensorDict(
        {"i": torch.arange(6).reshape(2, 3), "u": UnbatchedTensor(torch.arange(5)), "n": {"v": UnbatchedTensor([1.0])}},
        batch_size=[2, 3],
    )


@pytest.mark.parametrize("name", SHAPED)
def test_unbatched_tensors_keep_their_shape(name):
    td = with_unbatched()
    result = SHAPED[name](td)
    for key, content in (("u", [0, 1, 2, 3, 4]), (("n", "v"), [1.0])):
        assert type(result[key]) is UnbatchedTensor
        assert result[key].tolist() == content
    assert result["u"].batch_size == result.batch_size


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_unbatched_tensors_are_not_indexed(index):
    part = with_unbatched()[index]
    assert part["u"].tolist() == [0, 1, 2, 3, 4] and part["u"].batch_size == part.batch_size


def test_unbatched_tensors_are_leaves():
    td = with_unbatched()
    assert isinstance(td["u"], torch.Tensor)
    assert list(td.keys(True, True)) == ["i", "u", ("n", "v")]
    assert len(td.keys(True, True)) == 3 and len(td.values(leaves_only=True)) == 2
    assert ("n", "v") in td.keys(True, True)
    assert (td + 1)["u"].tolist() == [1, 2, 3, 4, 5]
    assert (td + td)["u"].tolist() == [0, 2, 4, 6, 8]
    assert type((td * 2)["n", "v"]) is UnbatchedTensor
    assert td.apply(lambda x: x + 1)["u"].tolist() == [1, 2, 3, 4, 5]
    assert td.to(torch.float64)["u"].dtype is torch.float64
    assert td.clone()["u"].data_ptr() != td["u"].data_ptr()
    assert td[0]["u"].data_ptr() == td["u"].data_ptr()
    assert (td == td).all()
    assert td.sum(0)["u"].tolist() == [0, 1, 2, 3, 4]
    assert "UnbatchedTensor(shape=torch.Size([5])" in repr(td)
    assert td.to_dict()["u"] is td["u"]
    assert td.auto_batch_size_().batch_size == (2, 3)
    td.batch_size = []
    assert td["u"].batch_size == ()
    with pytest.raises(KeyError):
        td["u", "x"] = 1
    with pytest.raises(RuntimeError, match="UnbatchedTensor"):
        with_unbatched() * torch.ones(2, 3)


def test_unbatched_tensors_are_passed_by_in_assignments():
    td = with_unbatched()
    td[0] = with_unbatched()[1] + 1
    assert td["i"][0].tolist() == [4, 5, 6] and td["u"].tolist() == [0, 1, 2, 3, 4]
    td[0] = 7
    assert td["i"][0].tolist() == [7, 7, 7] and td["u"].tolist() == [0, 1, 2, 3, 4]
    td.update_({"u": torch.zeros(5, dtype=torch.int64)})
    assert td["u"].tolist() == [0] * 5
    td.set_at_("u", 1, 0)
    assert td["u"].tolist() == [1, 0, 0, 0, 0] and td.get_at("u", slice(2)).batch_size == td.batch_size
    td.set_("u", torch.ones(5, dtype=torch.int64))
    assert td["u"].sum() == 5


def test_joining_unbatched_tensors_keeps_the_first():
    one, two = (TensorDict(u=UnbatchedTensor(torch.full((2,), n))) for n in (0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.stack([one, one.clone()])["u"].tolist() == [0, 0]
    for join in (torch.stack, lazy_stack):
        with pytest.warns(UserWarning, match="different content"):
            assert join([one, two])["u"].tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="'u'"):
        torch.stack([one, TensorDict(u=UnbatchedTensor(torch.zeros(3)))])
    copied = one["u"].copy()
    assert type(copied) is UnbatchedTensor and copied.data_ptr() == one["u"].data_ptr()


# --- joining functions ------------------------------------------------------------------------------------------------


def test_joining_into_out():
    one, two = make(), make(s="y")
    for lock in (False, True):
        out = torch.stack([make(s="p"), make(s="q")])
        if lock:
            out.lock_()
        torch.stack([one, two], out=out)
        assert out["s"] == [["x"] * 3, ["y"] * 3] and out.get("s").is_locked is lock
    out = torch.cat([make(s="p"), make(s="q")])
    torch.cat([one, two], out=out)
    assert out["s"] == ["x"] * 3 + ["y"] * 3


def test_where_chooses_values():
    mask = torch.tensor([True, False, True])
    assert make().where(mask, make(s="y"))["s"] == ["x", "y", "x"]
    assert make(s=["a", "b", "c"]).where(mask, make(s=["p", "q", "r"]))["s"] == ["a", "q", "c"]
    lazy = lazy_stack(list(make().unbind(0)))
    assert lazy.where(mask, make(s="y"))["s"] == ["x", "y", "x"]
    assert make().where(torch.zeros(3, dtype=torch.bool), make(s="y"))["s"] == "y"
    assert make().where(torch.tensor(True), make(s="y"))["s"] in ("x", ["x"] * 3)


def test_functions_that_stack():
    parts = [TensorDict({"a": torch.ones(n), "s": "x", "l": ["p", "q"][:n]}, batch_size=[n]) for n in (1, 2)]
    padded = pad_sequence(parts, return_mask=True)
    assert padded.get("s").batch_size == (2, 2) and padded["s"] == [["x", None], ["x", "x"]]
    assert padded["l"] == [["p", None], ["p", "q"]]
    assert "s" not in padded["masks"]
    stack = lazy_stack([TensorDict(s="x"), TensorDict(s="y")])
    assert dense_stack_tds(stack)["s"] == ["x", "y"]
    assert maybe_dense_stack([TensorDict(s="x"), TensorDict(s="y")])["s"] == ["x", "y"]


def test_assert_close_compares_values():
    assert_close(make(), make())
    for one, two in (
        (make(), make(s="y")),
        (make(s=["a", "b", "c"]), make(s=["a", "z", "c"])),
        (make(), make(s=TensorDict(batch_size=[3]))),
        (TensorDict(u=UnbatchedTensor([1.0])), TensorDict(u=UnbatchedTensor([2.0]))),
    ):
        with pytest.raises(AssertionError, match="'[su]'"):
            assert_close(one, two)


def test_new_containers_of_another_dtype_have_no_values():
    stack = lazy_stack([TensorDict({"s": s, "a": torch.ones(2)}, [2]) for s in (["x", "y"], ["y", "z"])])
    for dtype in (torch.float64, torch.bool, torch.int8):
        for made in (stack.new_zeros(dtype=dtype), stack.new_ones(2, 1, dtype=dtype)):
            assert made["a"].dtype == dtype and set(flat(made["s"])) == {None}


def flat(values):
    return [item for part in values for item in flat(part)] if isinstance(values, list) else [values]


def test_descriptions_leave_values_out():
    td = make()
    assert set(td.attrs().keys()) == {"a"} and set(td.data_ptr().keys()) == {"a"}
    assert td.to(td.attrs())["s"] == "x"
    padded = make(l=["p", "q", "r"]).pad([1, 0], inplace=True)
    assert padded["l"] == [None, "p", "q", "r"] and padded["a"].shape == (4,) and padded.get("s").batch_size == (4,)


def test_nested_lists_of_containers_tensors_and_holders_are_stacked() -> None:
    rows = [[TensorDict(x=0), TensorDict(x=1)], [TensorDict(x=2), TensorDict(x=3)]]
    td = TensorDict({"c": rows, "t": [[torch.zeros(3)], [torch.ones(3)]]}, [2])
    td["v"] = [[NonTensorData("a")], [NonTensorData("b")]]
    assert td["c"].batch_size == (2, 2) and td["c", "x"].tolist() == [[0, 1], [2, 3]]
    assert td["t"].tolist() == [[[0, 0, 0]], [[1, 1, 1]]]
    assert td["v"] == [["a"], ["b"]]


def test_lists_beyond_the_batch_are_written_in_place(tmp_path: Path) -> None:
    TensorDict({"a": ["l", 1]}).memmap(tmp_path)
    saved = TensorDict.load_memmap(tmp_path)
    saved.update_(TensorDict.load_memmap(tmp_path))
    assert saved["a"] == ["l", 1]
    saved.update_({"a": ["m", 2]})
    assert TensorDict.load_memmap(tmp_path)["a"] == ["m", 2]
    writes: list[Any] = [
        lambda td: td.update_({"a": ["u", 2]}),
        lambda td: td.set_("a", NonTensorStack("u", 2)),
        lambda td: td.update({"a": ["u", 2]}, inplace=True),
        lambda td: td.__setitem__((), TensorDict({"a": ["u", 2]})),
    ]
    for write in writes:
        td = TensorDict({"a": ["l", 1]})
        holder = td.get("a")
        write(td)
        assert td["a"] == ["u", 2] and td.get("a") is holder
        with pytest.raises(RuntimeError, match="'a': values for a batch of size"):
            td.update_({"a": ["u", 2, 3]})


def test_lists_beyond_the_batch_are_assigned_to_a_part() -> None:
    for index, value in (
        (0, ["x", "y"]),
        (slice(1), [["x", "y"]]),
        ([0], [["x", "y"]]),
        ((0,), NonTensorStack("x", "y")),
    ):
        td = TensorDict({"v": [["a", "b"], ["c", "d"]]}, [2])
        td[index] = {"v": value}
        assert td["v"] == [["x", "y"], ["c", "d"]]
        fresh = TensorDict(batch_size=[2])
        fresh[index] = {"v": value}
        assert fresh["v"] == [["x", "y"], [None, None]]
    nested = TensorDict({"n": TensorDict({"v": "s", "a": torch.zeros(2, 2)}, [2, 2])}, [2])
    nested[0] = {"n": {"v": ["x", "y"]}}
    nested[1] = {"n": {"v": "z"}}
    assert nested["n", "v"] == [["x", "y"], ["z", "z"]]


def test_ragged_lists_of_values_are_replaced_by_such_of_the_same_lengths() -> None:
    td = TensorDict({"v": [["a"], ["b", "c"]]}, [2])
    td.update_({"v": [["x"], ["y", "z"]]})
    td[0] = {"v": ["w"]}
    assert td["v"] == [["w"], ["y", "z"]]
    for wrong in ({"v": [["x", "y"], ["z"]]}, {"v": [["x"], ["z"]]}):
        with pytest.raises(RuntimeError, match="'v': values for a batch"):
            td.update_(wrong)
        assert td["v"] == [["w"], ["y", "z"]]


def test_values_of_one_row_broadcast_as_tensors_do() -> None:
    td = TensorDict({"a": torch.zeros(3), "v": NonTensorStack("x", "y", "z")}, [3])
    td.update_(td[:1].clone())
    assert td["v"] == ["x", "x", "x"]
    with pytest.raises(RuntimeError, match="values for a batch"):
        td.exclude("a").update_(td[:2].exclude("a"))


def test_values_written_in_a_block_reach_the_original() -> None:
    td = TensorDict({"a": torch.zeros(3), "v": "old", "s": "same", "n": {"b": torch.zeros(3)}}, [3])
    with td.flatten_keys(".") as flat:
        flat["a"] = "text"
        flat["v"] = "new"
        flat["n.b"] = "nested"
    assert (td["a"], td["v"], td["s"], td["n", "b"]) == ("text", "new", "same", "nested")
    td.lock_()
    with td.unsqueeze(0):
        pass
    assert td["v"] == "new"


def test_a_list_of_another_length_says_what_to_write() -> None:
    td, values = TensorDict(x=torch.zeros(3), batch_size=[3]), ["u", "v"]
    writes = [
        lambda: TensorDict({"names": values}, batch_size=[3]),
        lambda: td.set("names", values),
        lambda: td.update({"names": values}),
        lambda: td.set(("n", "names"), values),
    ]
    for write in writes:
        with pytest.raises(
            RuntimeError, match=r"names.*, of batch size \[2\].*a list gives one value to each element; set_non_t"
        ):
            write()
    assert list(td.keys()) == ["x"]
    td.set_non_tensor("names", values)
    td["more"] = MetaData(values)
    assert td["names"] == td["more"] == values


@pytest.mark.parametrize("size", [[], [2], [3]], ids=str)
def test_empty_keeps_a_stack_of_values_or_gives_a_holder(size: list[int]) -> None:
    td = TensorDict({"n": TensorDict({"v": NonTensorStack("x", "y")}, [2])}, [2])
    result = td.empty(recurse=True, batch_size=size, device="meta")["n"].get("v")
    assert result.device == torch.device("meta") and list(result.batch_size) == (size or [2])
    assert result.tolist() == (["x", "y"] if size != [3] else [None] * 3)
    assert type(result) is (NonTensorStack if size != [3] else NonTensorData)
