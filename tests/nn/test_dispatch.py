"""Calling what takes a container with tensors, and leaving alone what a container has."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from tensordict import TensorClass, TensorDict
from tensordict.nn import (
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
    set_skip_existing,
    skip_existing,
)
from tensordict.nn.dispatch import _set_dispatch_td_nn_modules
from tensordict.nn.skipping import _set_skip_existing_None


class Add(nn.Module):
    in_keys = ["a", ("n", "c")]
    out_keys = ["b"]

    @dispatch
    def forward(self, tensordict, k=0, *, q=0):
        self.seen = tensordict.batch_size
        return tensordict.set("b", tensordict["a"] + tensordict["n", "c"] + k + q)


def one(value=1):
    return torch.tensor(value)


def test_by_position_by_name_and_as_a_container():
    add = Add()
    assert add(one(), one(2)) == add(one(), n_c=one(2)) == add(a=one(), n_c=one(2)) == 3
    td = TensorDict(a=1, n={"c": 2})
    assert add(td) is td and td["b"] == 3 and add(tensordict=td) is td


def test_further_arguments_follow_the_entries():
    add, td = Add(), TensorDict(a=1, n={"c": 2})
    assert add(td, 5)["b"] == 8 and add(td, k=5, q=7)["b"] == 15
    assert add(one(), one(2), 5) == 8 and add(one(), one(2), k=5) == 8 and add(one(), n_c=one(2), q=5) == 8


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ((torch.zeros(2, 3, 4), torch.zeros(2, 3, 1)), (2, 3)),
        ((torch.zeros(2, 3), torch.zeros(2, 3)), (2, 3)),
        ((torch.zeros(2, 3), torch.zeros(3)), ()),
        ((torch.zeros(2, 3), 3), ()),
    ],
)
def test_the_batch_size_is_what_all_share(args, size):
    add = Add()
    add(*args)
    assert add.seen == size


def test_without_a_batch_size():
    class Echo(nn.Module):
        @dispatch(source=["a"], dest=["a", ("n", "b")], auto_batch_size=False)
        def forward(self, tensordict):
            self.seen = tensordict.batch_size
            return tensordict.set(("n", "b"), tensordict["a"])

    echo = Echo()
    first, second = echo(torch.zeros(2, 3))
    assert echo.seen == () and first.shape == second.shape == (2, 3)


def test_separator_and_other_attributes():
    class Double(nn.Module):
        keys_in = [("a", "c")]
        keys_out = ["b"]

        @dispatch(separator="__", source="keys_in", dest="keys_out")
        def forward(self, tensordict):
            return tensordict.set("b", 2 * tensordict["a", "c"])

    assert Double()(a__c=one()) == 2


def test_keys_are_those_of_the_instance_at_the_call():
    class Double(nn.Module):
        out_keys = ["b"]

        def __init__(self, key):
            super().__init__()
            self.in_keys = [key]

        @dispatch
        def forward(self, tensordict):
            return tensordict.set("b", 2 * tensordict[self.in_keys[0]])

    x, y = Double("x"), Double("y")
    assert x(x=one()) == y(y=one()) == 2
    x.in_keys, x.out_keys = ["z"], ["b", "z"]
    assert x(z=one(3)) == (one(6), one(3)) and y(y=one()) == 2


def test_what_is_left_out_is_not_there():
    class Keys(nn.Module):
        in_keys = ["a", "c"]
        out_keys = []

        @dispatch
        def forward(self, tensordict):
            self.seen = set(tensordict.keys())
            return tensordict

    keys = Keys()
    assert keys(c=one()) == () and keys.seen == {"c"}
    assert keys() == () and keys.seen == set()


def test_errors():
    with pytest.raises(RuntimeError, match=r"'a' twice, by position and as 'a'"):
        Add()(one(), a=one())
    with pytest.raises(RuntimeError, match="must be named 'tensordict'"):

        class Other(nn.Module):
            @dispatch
            def forward(self, td):
                return td

    class Wrong(nn.Module):
        in_keys = ["a"]
        out_keys = ["b"]

        @dispatch
        def forward(self, tensordict):
            return tensordict["a"]

    with pytest.raises(TypeError, match="must return a container"):
        Wrong()(one())

    class Keyless(TensorDictModuleBase):
        @dispatch
        def forward(self, tensordict):
            return tensordict

    keyless = Keyless()
    with pytest.raises(AttributeError, match="in_keys"):
        keyless(one())


def test_tensorclasses_are_containers():
    class Pair(TensorClass):
        a: torch.Tensor
        b: torch.Tensor | None = None

    copy = TensorDictModule(lambda a: a + 1, ["a"], ["b"])
    pair = Pair(a=one())
    assert copy(pair) is pair and pair.b == 2


def test_the_signature_and_the_name_remain():
    assert Add.forward.__name__ == "forward"
    assert list(inspect.signature(Add.forward).parameters) == ["self", "tensordict", "k", "q"]


def test_dispatching_can_be_turned_off():
    class Raw(nn.Module):
        in_keys = ["a"]
        out_keys = ["b"]

        @dispatch
        def forward(self, tensordict):
            return tensordict

    with _set_dispatch_td_nn_modules(False):
        assert Raw()(one(3)) == 3
    with pytest.raises(KeyError, match="b"):
        Raw()(one(3))


# --- skipping ---------------------------------------------------------------------------------------------------------


def plus_one(in_keys=("x",), out_keys=("y",)):
    return TensorDictModule(lambda *args: tuple(x + 1 for x in args), list(in_keys), list(out_keys))


def test_what_exists_is_skipped():
    td = TensorDict(x=1, y=7)
    assert not skip_existing()
    with set_skip_existing():
        assert skip_existing()
        assert plus_one()(td) is td and td["y"] == 7
        assert plus_one()(TensorDict(x=1))["y"] == 2
        with set_skip_existing(False):
            assert plus_one()(td.clone())["y"] == 2
    assert plus_one()(td)["y"] == 2 and not skip_existing()


def test_what_is_read_and_written_is_not_skipped():
    with set_skip_existing(True):
        assert plus_one(["x"], ["x"])(TensorDict(x=1))["x"] == 2
        assert plus_one(["x"], [("n", "x")])(TensorDict(x=1, n={"x": 7}))["n", "x"] == 7


def test_sequences_skip_their_parts():
    net = TensorDictSequential(plus_one(["x"], ["y"]), plus_one(["y"], ["z"]))
    with set_skip_existing(True):
        assert net(TensorDict(x=1, y=10))["z"] == 11
        assert net(TensorDict(x=1, z=10))["y"] == 2
        td = net(TensorDict(x=1, y=5, z=10))
    assert td["y"] == 5 and td["z"] == 10


@pytest.mark.parametrize("decorator", [set_skip_existing(None), _set_skip_existing_None()])
def test_methods_are_skipped_as_the_block_says(decorator):
    calls = []

    class Mod(TensorDictModuleBase):
        in_keys = []
        out_keys = ["out"]

        @decorator
        def forward(self, tensordict):
            calls.append(skip_existing())
            return tensordict.set("out", torch.zeros(()))

    Mod()(TensorDict(out=1))
    with set_skip_existing(True):
        Mod()(TensorDict(out=1))
        Mod()(TensorDict())
    assert calls == [False, True]


def test_methods_with_a_mode_of_their_own():
    calls = []

    class Mod(nn.Module):
        reads = []
        writes = ["out"]

        @set_skip_existing(True, in_key_attr="reads", out_key_attr="writes")
        def forward(self, tensordict):
            calls.append(skip_existing())
            return tensordict

    Mod()(TensorDict(out=1))
    Mod()(TensorDict())
    assert calls == [True] and not skip_existing()


def test_a_block_needs_a_mode():
    with pytest.raises(RuntimeError, match="decorates methods"), set_skip_existing(None):
        raise AssertionError("not reached")


def test_get_source():
    class Module:
        my_keys = ("a", ("b", "c"))

    assert dispatch(source="my_keys").get_source(None, Module()) == ("a", ("b", "c"))
    assert dispatch(source=["a", ("b", ("c",))]).get_source(None, None) == ["a", ("b", "c")]
