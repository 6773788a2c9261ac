"""Pytrees to containers and back: nothing is lost but the types of numbers."""

from __future__ import annotations

import collections
import pathlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree

import tensordict
from tensordict import TensorDict


class Pair(NamedTuple):
    a: Any
    b: Any


class Weird:
    pass


WEIRD = Weird()


def same(one: Any, other: Any) -> bool:
    """Compare types, keys and leaves of two pytrees; numbers come back as tensors."""
    if isinstance(one, (torch.Tensor, int, float, np.ndarray)) and isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, TensorDict):
        return bool((one == other).all())
    return bool(one == other)


EXAMPLES: list[Any] = [
    ([torch.arange(3), torch.zeros(2)], {"t": torch.ones(2), "td": TensorDict({"one": 1}), WEIRD: torch.ones(2)}),
    {"n": {"two": TensorDict({"two": torch.ones(1)}).to_namedtuple()}},
    Pair([1, 2, 3], Pair({"x": 1.5}, np.arange(3))),
    list(range(12)),
    {3: 1, ("x", "y"): 2, ("x",): 3, (): 4, None: 5, "x": {"y": 6}, 2.5: 7, "": 8},
    {"_pytree_type": 1, "<NON_NESTED>0": 2, "<NON_NESTED>1": [3]},
    {"s": "text", "none": None, "object": Weird, "l": ["x", 1]},
    [[], (), {}, [()]],
    collections.OrderedDict(b=1, a=[2]),
    collections.deque([1, {"a": 2}]),
    collections.defaultdict(list, b=[1], a=[2]),
]


@pytest.mark.parametrize("pytree", EXAMPLES, ids=range(len(EXAMPLES)))
def test_round_trip(pytree: Any) -> None:
    td = tensordict.from_pytree(pytree)
    assert type(td) is TensorDict
    again = td.to_pytree()
    assert same(pytree, again)
    if isinstance(pytree, dict):
        assert list(again) == list(pytree)


LEAVES = st.integers(-5, 5) | st.text(max_size=2) | st.none() | st.booleans().map(lambda flag: torch.tensor(flag))
KEYS = st.text(max_size=2) | st.integers(0, 3) | st.tuples(st.text(max_size=1), st.integers(0, 1)) | st.none()
PYTREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(st.lists(PYTREES, max_size=2))
def test_any_pytree_comes_back(pytree: Any) -> None:
    assert same(pytree, TensorDict.from_pytree(pytree).to_pytree())


def test_leaves_are_the_very_ones() -> None:
    leaf = torch.zeros(3)
    td = TensorDict.from_pytree({"a": [leaf]})
    assert td["a", "0"] is leaf and td.to_pytree()["a"][0] is leaf
    assert td["_pytree_type"] is dict and td["a", "_pytree_type"] is list
    assert TensorDict.from_pytree(leaf) is leaf and TensorDict.from_pytree(3) == 3
    plain = TensorDict(a=1)
    assert TensorDict.from_pytree(plain) is plain and plain.to_pytree() is plain


def test_torch_sees_the_same_structure() -> None:
    pytree = ([torch.ones(3)], {"n": TensorDict({"two": torch.ones(1)}).to_namedtuple()})
    again = TensorDict.from_pytree(pytree).to_pytree()
    checked = _pytree.tree_map(lambda a, b: bool((a == b).all()), pytree, again)
    assert all(_pytree.tree_leaves(checked))


def test_batch_sizes() -> None:
    pytree = [torch.zeros(3, 4), (torch.zeros(3, 4, 5), "x")]
    auto = TensorDict.from_pytree(pytree, auto_batch_size=True)
    assert auto.batch_size == (3, 4) and auto["1"].batch_size == (3, 4, 5)
    assert TensorDict.from_pytree(pytree, batch_dims=1)["1"].batch_size == (3,)
    given_size = TensorDict.from_pytree(pytree, batch_size=[3])
    assert given_size.batch_size == (3,) and same(pytree, given_size.to_pytree())
    with pytest.raises(RuntimeError, match="'0'"):
        TensorDict.from_pytree(pytree, batch_size=[4])


def test_operations_keep_the_form() -> None:
    pytree = [torch.arange(6).view(2, 3), {7: torch.ones(2)}]
    td = TensorDict.from_pytree(pytree, batch_size=[2])
    assert same([torch.arange(3), {7: torch.tensor(1.0)}], td[0].to_pytree())
    stacked = torch.stack([td, td + 1]).to_pytree()
    assert type(stacked) is list and stacked[1][7].tolist() == [[1, 1], [2, 2]]
    assert same(pytree, td.clone().to_pytree()) and same(pytree, torch.cat(td.split(1)).to_pytree())


def test_a_form_that_was_changed_is_refused() -> None:
    td = TensorDict.from_pytree({"a": [1, 2]})
    del td["a", "0"]
    with pytest.raises(ValueError, match=r"\['0'\] under 'a' was expected, got \['1'\]"):
        td.to_pytree()
    td = TensorDict.from_pytree({"a": [1, 2]})
    td["a", "_pytree_type"] = "list"
    with pytest.raises(ValueError, match="_pytree_type"):
        td.to_pytree()


# --- state dicts ------------------------------------------------------------------------------------------------------


def trained(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, **options)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("suffix", ["", ".tdz", ".h5", ".safetensors"])
def test_the_state_of_an_optimizer_is_saved_without_pickle(suffix: str, tmp_path: pathlib.Path) -> None:
    net, optimizer = trained()
    TensorDict.from_pytree(optimizer.state_dict()).save(tmp_path / f"state{suffix}")
    state = tensordict.load(tmp_path / f"state{suffix}").to_pytree()
    groups = optimizer.state_dict()["param_groups"]
    assert state["param_groups"] == groups and type(state["param_groups"][0]["lr"]) is float
    again, fresh = trained()
    fresh.load_state_dict(state)
    assert set(fresh.state) == set(again.parameters())
    for one, other in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[other]["exp_avg"])


def test_settings_stay_one_value() -> None:
    settings = [{"lr": 0.1, "foreach": None, "params": [0, 1]}]
    td = TensorDict.from_pytree({"groups": settings, "numbers": [1, 2], "mixed": ["x", torch.ones(2)], 7: ["a"]})
    assert td["groups"] is settings and td["numbers", "0"].dtype is torch.int64 and td["mixed", "0"] == "x"
    assert td.to_pytree()["groups"] == settings and td.to_pytree()[7] == ["a"]


@pytest.mark.parametrize(
    "write",
    [
        lambda state: TensorDict().set("opt", state),
        lambda state: TensorDict(opt=state),
        lambda state: TensorDict(opt={"a": 1}).update({"opt": state}),
        lambda state: TensorDict.from_dict({"opt": state}),
    ],
)
def test_a_state_dict_as_an_entry_is_refused_with_what_works(write: Any) -> None:
    state = trained()[1].state_dict()
    with pytest.raises(TypeError, match=r"got 0 .* under \('opt', 'state'\).*td\['opt'\] = NonTensorData.*save_checkp"):
        write(state)
    td = TensorDict(opt=tensordict.NonTensorData(state))
    assert td["opt"] is state
