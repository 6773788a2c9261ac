"""Sequences of modules: their keys, where results go, selection, subsequences, and changes of their modules."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tensordict import LazyStackedTensorDict, TensorClass, TensorDict
from tensordict.core.exceptions import FieldError
from tensordict.nn import TensorDictModule, TensorDictSequential, WrapModule


def step(reads, writes):
    """Writes the sum of its inputs, plus one."""
    writes = [writes] if isinstance(writes, str) else writes
    return TensorDictModule(lambda *args: (sum(args) + 1,) * len(writes), list(reads), writes)


def chain(**options):
    return TensorDictSequential(step("x", "y"), step("y", "z"), **options)


def keys_of(modules):
    return [module.out_keys[0] for module in modules]


@pytest.mark.parametrize(
    ("steps", "in_keys", "out_keys"),
    [
        ([("x", "y"), ("yw", "z")], ["x", "w"], ["y", "z"]),
        ([("x", "x"), ("x", "z")], ["x"], ["x", "z"]),
        ([("x", "y"), ("x", "z"), ("x", "y")], ["x"], ["z", "y"]),
        ([("x", ["y", "_"]), ("y", ["_", "z"])], ["x"], ["y", "_", "z"]),
        ([("x", [("n", "y")]), (["n"], "z")], ["x", "n"], [("n", "y"), "z"]),
        ([("x", "n"), ([("n", "y")], "z")], ["x"], ["n", "z"]),
        ([("y", "z"), ("x", "y")], ["y", "x"], ["z", "y"]),
        ([], [], []),
    ],
)
def test_keys(steps, in_keys, out_keys):
    net = TensorDictSequential([step(*keys) for keys in steps])
    assert net.in_keys == in_keys and net.out_keys == out_keys and len(net) == len(steps)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: TensorDictSequential(a, b),
        lambda a, b: TensorDictSequential([a, b]),
        lambda a, b: TensorDictSequential({"first": a, "second": b}),
        lambda a, b: TensorDictSequential(nn.ModuleList([a, b])),
    ],
)
def test_modules_run_one_after_the_other(make):
    net = make(step("x", "y"), step("yw", "z"))
    td = TensorDict(x=1, w=2)
    assert net(td) is td and td["y"] == 2 and td["z"] == 5
    assert net(torch.tensor(1), torch.tensor(2)) == (torch.tensor(2), torch.tensor(5))
    assert net(x=torch.tensor(1), w=torch.tensor(2)) == (torch.tensor(2), torch.tensor(5))


def test_functions_and_plain_modules_are_wrapped():
    net = TensorDictSequential(lambda td: td.set("y", td["x"] + 1), step("y", "z"))
    assert type(net[0]) is WrapModule and net.in_keys == ["y"] and net.out_keys == ["z"]
    assert net(TensorDict(x=1))["z"] == 3
    assert type(TensorDictSequential(nn.Identity())[0]) is WrapModule
    with pytest.raises(TypeError, match="got int"):
        TensorDictSequential(3)


def test_state_names_and_repr():
    linear = TensorDictModule(nn.Linear(1, 1), ["x"], ["y"])
    assert list(TensorDictSequential(linear).state_dict()) == ["module.0.module.weight", "module.0.module.bias"]
    assert list(TensorDictSequential({"a": linear}).state_dict()) == ["module.a.module.weight", "module.a.module.bias"]
    assert repr(TensorDictSequential(linear)) == (
        "TensorDictSequential(\n"
        "    module=ModuleList(\n"
        "      (0): TensorDictModule(\n"
        "          module=Linear(in_features=1, out_features=1, bias=True),\n"
        "          in_keys=['x'],\n"
        "          out_keys=['y'])\n"
        "    ),\n"
        "    in_keys=['x'],\n"
        "    out_keys=['y'])"
    )


# --- where results go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [None, True, False, "empty"])
@pytest.mark.parametrize("select", [False, True])
def test_inplace(inplace, select):
    net = chain(inplace=inplace, selected_out_keys=["z"] if select else None)
    td = TensorDict(x=torch.ones(2), batch_size=[2])
    result = net(td)
    written = {"z"} if select else {"y", "z"}
    if inplace in (None, True):
        assert result is td and set(td.keys()) == {"x"} | written
    else:
        assert set(result.keys()) == written and set(td.keys()) == {"x"}
        assert result.batch_size == ((2,) if inplace == "empty" else ())
    assert result["z"].tolist() == [3, 3]


@pytest.mark.parametrize("select", [False, True])
def test_tensordict_out(select):
    net = chain(selected_out_keys=["z"] if select else None)
    td, out = TensorDict(x=1), TensorDict(q=1)
    assert net(td, tensordict_out=out) is out and net(td, out) is out
    assert set(out.keys()) == ({"q", "z"} if select else {"q", "y", "z"}) and set(td.keys()) == {"x"}


def test_modules_that_are_not_in_place():
    def make(inplace):
        first = TensorDictModule(lambda x: x + 1, ["x"], ["y"], inplace=False)
        return TensorDictSequential(
            first, TensorDictModule(lambda x: x + 1, ["y"], ["z"], inplace=False), inplace=inplace
        )

    td = TensorDict(x=torch.ones(2), batch_size=[2])
    assert set(make(None)(td).keys()) == {"z"} and set(td.keys()) == {"x"}
    assert make(True)(td) is td and set(td.keys()) == {"x", "z"}


def test_selected_out_keys():
    net = chain()
    assert net.select_out_keys("z") is net and net.out_keys == ["z"] and net.out_keys_source == ["y", "z"]
    assert net(torch.tensor(1)) == 3 and set(net(TensorDict(x=1)).keys()) == {"x", "z"}
    assert net(TensorDict(x=1, y=10))["y"] == 10
    assert net.reset_out_keys().out_keys == ["y", "z"] and set(net(TensorDict(x=1)).keys()) == {"x", "y", "z"}
    for wrong in ("q", "x"):
        with pytest.raises(ValueError, match=f"cannot select '{wrong}'"):
            net.select_out_keys(wrong)
    with pytest.raises(ValueError, match="cannot select 'q'"):
        chain(selected_out_keys=["q"])


def test_a_step_that_fails_leaves_what_earlier_ones_wrote():
    td = TensorDict(x=1)
    net = TensorDictSequential(step("x", "y"), TensorDictModule(lambda q: q + 1, ["q"], ["z"]))
    with pytest.raises(KeyError, match=r"reads 'q'.*\['x', 'y'\]"):
        net(td)
    assert set(td.keys()) == {"x", "y"}
    net.inplace = False
    td = TensorDict(x=1)
    with pytest.raises(KeyError, match="reads 'q'"):
        net(td)
    assert set(td.keys()) == {"x"}


def test_a_step_that_writes_no_field_leaves_the_instance_whole():
    class Fields(TensorClass):
        a: torch.Tensor

    td = TensorDict(x=1, fields=Fields(a=torch.zeros(2)))
    net = TensorDictSequential(step("x", "y"), step("y", ["w", ("fields", "b")]))
    with pytest.raises(FieldError, match="'b', which is no field of Fields"):
        net(td)
    assert set(td.keys(True, True)) == {"x", "y", ("fields", "a")}
    assert (td.clone() + 1)["fields"].a.tolist() == [1, 1]
    net.inplace = False
    td = TensorDict(x=1, fields=Fields(a=torch.zeros(2)))
    with pytest.raises(FieldError):
        net(td)
    assert set(td.keys(True, True)) == {"x", ("fields", "a")}


def test_other_arguments_are_refused():
    with pytest.raises(RuntimeError, match=r"keyword arguments other than.*\['x'\].*\['k'\]"):
        chain()(TensorDict(x=1), k=3)


def test_partial_tolerant():
    net = TensorDictSequential(step("x", "y"), step("q", "z"), partial_tolerant=True)
    assert set(net(TensorDict(x=1)).keys()) == {"x", "y"} and set(net(TensorDict(q=1)).keys()) == {"q", "z"}
    lazy = LazyStackedTensorDict(TensorDict(x=1), TensorDict(x=2, q=3))
    assert net(lazy) is lazy
    assert set(lazy[0].keys()) == {"x", "y"} and set(lazy[1].keys()) == {"x", "y", "q", "z"} and lazy[1]["z"] == 4


# --- subsequences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, "yzwf"),
        ({"out_keys": ["z"]}, "yz"),
        ({"in_keys": ["x"]}, "yz"),
        ({"in_keys": ["y"]}, "z"),
        ({"in_keys": ["x"], "out_keys": ["y"]}, "y"),
        ({"out_keys": ["w"]}, "w"),
        ({"in_keys": ["x", "q"], "out_keys": ["f"]}, "yzwf"),
        ({"in_keys": ["q"], "out_keys": ["f"]}, None),
        ({"out_keys": ["nothing"]}, None),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_subsequences(options, left, named):
    steps = [step("x", "y"), step("y", "z"), step("q", "w"), step("zw", "f")]
    net = TensorDictSequential({f"to_{s.out_keys[0]}": s for s in steps} if named else steps)
    if left is None:
        with pytest.raises(ValueError, match="No modules left after selection"):
            net.select_subsequence(**options)
        return
    part = net.select_subsequence(**options)
    assert "".join(keys_of(part)) == left and all(a in steps for a in part)
    if named:
        assert list(part.module) == [f"to_{key}" for key in left]


def test_subsequences_of_nested_sequences_and_containers():
    inner = TensorDictSequential(step("x", "y"), step("x", "v"))
    part = TensorDictSequential(inner, step("y", "z")).select_subsequence(out_keys=["z"])
    assert type(part[0]) is TensorDictSequential and keys_of(part[0]) == ["y"] and len(inner) == 2
    nested = TensorDictSequential(
        TensorDictModule(lambda x: TensorDict(y=x), ["x"], ["n"]), step([("n", "y")], "z"), step("x", "w")
    )
    assert keys_of(nested.select_subsequence(out_keys=["z"])) == ["n", "z"]
    assert keys_of(nested.select_subsequence(out_keys=[("n", "y")])) == ["n"]


# --- changes ----------------------------------------------------------------------------------------------------------


def test_indexing():
    net = TensorDictSequential(step("x", "y"), step("y", "z"), step("z", "w"))
    assert net[0].out_keys == ["y"] and net[-1].out_keys == ["w"] and net[:2].out_keys == ["y", "z"]
    assert keys_of(net) == ["y", "z", "w"] and net[1] in net and step("x", "y") not in net
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            net[wrong]
    named = TensorDictSequential({"a": step("x", "y"), "b": step("y", "z")})
    assert named["a"] is named[0] and named[-1] is named["b"] and list(named[:1].module) == ["a"] and "a" in named
    with pytest.raises(KeyError, match="q"):
        named["q"]


def test_keys_follow_changes():
    net = chain()
    net.append(step("zk", "w"))
    assert net.in_keys == ["x", "k"] and net.out_keys == ["y", "z", "w"]
    del net[1]
    assert net.in_keys == ["x", "z", "k"] and net.out_keys == ["y", "w"]
    net[0] = step("a", "b")
    assert net.in_keys == ["a", "z", "k"] and net.out_keys == ["b", "w"]
    net.insert(0, lambda td: td)
    assert len(net) == 3 and type(net[0]) is WrapModule
    assert net.pop(0) is not None and net.extend([step("w", "v"), step("v", "u")]) is net
    assert net.out_keys == ["b", "w", "v", "u"]
    net[2:] = [step("w", "end")]
    del net[:1]
    assert net.out_keys == ["w", "end"] and list(net.state_dict()) == []
    net.select_out_keys("end")
    net.append(step("end", "more"))
    assert net.out_keys == ["w", "end", "more"]


def test_named_modules_change_by_name():
    net = TensorDictSequential({"a": step("x", "y"), "b": step("y", "z")})
    del net["a"]
    assert net.in_keys == ["y"]
    net["c"] = step("z", "w")
    assert list(net.module) == ["b", "c"] and net.out_keys == ["z", "w"]
    net["b"] = net[1] = step("q", "r")
    assert net.in_keys == ["q"] and len(net) == 2
    assert net.pop("b").out_keys == ["r"] and len(net) == 1
    with pytest.raises(TypeError, match="have names"):
        net.append(step("x", "y"))


def test_keys_can_be_set():
    net = chain()
    net.in_keys, net.out_keys = ["x", "more"], ["z"]
    assert net.in_keys == ["x", "more"] and net.out_keys == ["z"] and net(torch.tensor(1)) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied):
    net = TensorDictSequential(
        TensorDictModule(nn.Linear(2, 3), ["x"], ["y"]), TensorDictModule(nn.Linear(3, 1), ["y"], ["z"])
    ).select_out_keys("z")
    other = copied(net)
    assert other.in_keys == ["x"] and other.out_keys == ["z"] and other.out_keys_source == ["y", "z"]
    torch.testing.assert_close(other(torch.ones(2)), net(torch.ones(2)))
    assert copied(chain())(torch.tensor(1))[1] == 3


def test_functional_calls_and_vmap():
    net = TensorDictSequential(
        TensorDictModule(nn.Linear(1, 1), ["x"], ["y"]), TensorDictModule(nn.Linear(1, 1), ["y"], ["z"])
    )
    params = TensorDict.from_module(net).data
    params = torch.stack([params * k for k in range(3)])

    def run(td, params):
        with params.to_module(net):
            return net(td)

    td = torch.vmap(run, (None, 0))(TensorDict(x=torch.ones(2, 1), batch_size=[2]), params)
    assert td.batch_size == (3, 2) and td["z"].shape == (3, 2, 1) and (td["z"][0] == 0).all()
    torch.testing.assert_close(td["z"][1], net(torch.ones(2, 1))[1])
