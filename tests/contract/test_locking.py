"""Locking: a locked tree refuses structural writes, allows in-place ones, and holds its children."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_matches, changed, mapped, nodes
from tensordict import TensorDict

REFUSED = {
    "set new": lambda td, x: td.set("new", x),
    "set nested": lambda td, x: td.set(("n", "new"), x),
    "set old": lambda td, x: td.set("mask", x),
    "[]": lambda td, x: td.__setitem__("new", x),
    "update": lambda td, x: td.update({"mask": x}),
    "update new": lambda td, x: td.update({"new": x}, inplace=True),
    "setdefault": lambda td, x: td.setdefault("new", x),
    "pop": lambda td, x: td.pop("a"),
    "popitem": lambda td, x: td.popitem(),
    "del_": lambda td, x: td.del_("a"),
    "del": lambda td, x: td.__delitem__("a"),
    "rename_key_": lambda td, x: td.rename_key_("a", "b2"),
    "clear": lambda td, x: td.clear(),
    "create_nested": lambda td, x: td.create_nested("new"),
    "select": lambda td, x: td.select("a", inplace=True),
    "exclude": lambda td, x: td.exclude("a", inplace=True),
    "split_keys": lambda td, x: td.split_keys(["a"], inplace=True),
}


@pytest.mark.parametrize("write", REFUSED)
def test_structural_writes_are_refused(td: Any, plain: Plain, kind: Kind, write: str) -> None:
    td.lock_()
    with pytest.raises(RuntimeError, match="lock"):
        REFUSED[write](td, torch.ones(kind.batch_size, dtype=torch.bool))
    assert_matches(td, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("key", ["missing", ("missing", "too"), ("a", "too")])
def test_the_lock_is_looked_at_before_the_key(td: Any, plain: Plain, kind: Kind, key: Any) -> None:
    td.lock_()
    for write in (td.del_, td.__delitem__, lambda key: td.select(key, inplace=True)):
        with pytest.raises(RuntimeError, match="lock"):
            write(key)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_the_lock_of_a_nested_container_is_looked_at_before_the_key() -> None:
    td = TensorDict({"n": TensorDict({"x": 1}).lock_()})
    with pytest.raises(RuntimeError, match="lock"):
        del td["n", "missing"]
    with pytest.raises(KeyError, match="missing"):
        del td["missing"]


def test_flattening_in_place_is_refused(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.nested:
        pytest.skip("nothing to flatten")
    td.lock_()
    with pytest.raises(RuntimeError, match="lock"):
        td.flatten_keys(inplace=True)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_in_place_writes_are_allowed(td: Any, plain: Plain, kind: Kind) -> None:
    td.lock_()
    new = mapped(changed, plain)
    td.set_("a", new["a"])
    td.set("mask", new["mask"], inplace=True)
    td.update_(new)
    td.update(new, inplace=True)
    td.apply_(lambda x: x)
    assert_matches(td, new, kind.batch_size, kind.extra)
    if kind.batch_size:
        td[0] = 1
        td.set_at_("a", 1, 0)
    td.zero_()
    assert_matches(td, mapped(torch.zeros_like, plain), kind.batch_size, kind.extra)
    assert td.pop("absent", None) is None


def test_lock_and_unlock_reach_every_node(writable: Any, plain: Plain, kind: Kind) -> None:
    assert not writable.is_locked
    assert writable.lock_() is writable and writable.is_locked
    assert all(writable[path].is_locked for path in nodes(plain))
    assert writable.lock_() is writable
    assert writable.unlock_() is writable and not writable.is_locked
    assert not any(writable[path].is_locked for path in nodes(plain))
    writable.is_locked = True
    assert writable.is_locked
    writable.is_locked = False
    writable["new"] = torch.zeros(kind.batch_size)


def test_children_of_a_locked_tree_refuse_writes(td: Any, plain: Plain, kind: Kind) -> None:
    td.lock_()
    for path in nodes(plain):
        with pytest.raises(RuntimeError, match="lock"):
            td[path].set("new", torch.zeros(td[path].batch_size))
        with pytest.raises(RuntimeError, match="lock"):
            td.set((*path, "new"), torch.zeros(td[path].batch_size))
        with pytest.raises(RuntimeError):
            td[path].unlock_()
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_a_child_of_an_unlocked_parent_locks_alone(td: Any, kind: Kind) -> None:
    parent = TensorDict({"child": td}, kind.batch_size)
    td.lock_()
    assert not parent.is_locked
    with pytest.raises(RuntimeError, match="lock"):
        parent["child", "new"] = torch.zeros(kind.batch_size)
    parent["beside"] = torch.zeros(kind.batch_size)
    parent.lock_()
    with pytest.raises(RuntimeError):
        td.unlock_()
    assert not parent.unlock_()["child"].is_locked


def test_two_locked_parents(writable: Any, kind: Kind) -> None:
    first = TensorDict({"child": writable}, kind.batch_size).lock_()
    second = TensorDict({"deep": {"child": writable}}, kind.batch_size).lock_()
    first.unlock_()
    assert not first.is_locked and second.is_locked and writable.is_locked
    with pytest.raises(RuntimeError):
        writable.unlock_()
    with pytest.raises(RuntimeError, match="lock"):
        first["child", "new"] = torch.zeros(kind.batch_size)
    second.unlock_()
    assert not writable.is_locked
    writable["new"] = torch.zeros(kind.batch_size)


def test_one_parent_holding_a_child_twice(writable: Any, kind: Kind) -> None:
    parent = TensorDict({"one": writable, "two": {"three": writable}}, kind.batch_size).lock_()
    assert writable.is_locked
    parent.unlock_()
    assert not writable.is_locked


def test_a_dead_parent_holds_nothing(writable: Any, kind: Kind) -> None:
    # The earlier entries need not be checked.
    gc.freeze()
    parent = TensorDict({"deep": {"child": writable}}, kind.batch_size).lock_()
    del parent
    gc.collect()
    gc.unfreeze()
    assert writable.is_locked
    assert not writable.unlock_().is_locked


def test_copies_are_unlocked(td: Any) -> None:
    td.lock_()
    for copy in (td.clone(), td.copy(), td.select("a"), td.exclude("a"), td.empty(), td.flatten_keys()):
        assert not copy.is_locked
    assert td.is_locked


def test_unlocking_leaves_copies_alone(td: Any, kind: Kind) -> None:
    copy = td.clone().lock_()
    td.lock_().unlock_()
    assert copy.is_locked and not td.is_locked


@pytest.mark.parametrize(
    "write",
    [
        lambda td: td.rename_key_(("child", "x"), "moved"),
        lambda td: td.rename_key_(("child", "x"), ("child", "moved")),
        lambda td: td.pop(("child", "x")),
        lambda td: td.del_(("child", "x")),
        lambda td: td.exclude("free", ("child", "x"), inplace=True),
        lambda td: td.select(("child", "y"), inplace=True),
        lambda td: td.filter_empty_(),
    ],
    ids=["rename", "rename within", "pop", "del_", "exclude", "select", "filter_empty_"],
)
def test_a_child_that_another_parent_locks_is_not_changed_through_this_one(write: Any) -> None:
    child = TensorDict(x=torch.zeros(1), y=torch.ones(1), hollow=TensorDict())
    owner = TensorDict(child=child).lock_()
    td = TensorDict(free=torch.zeros(1), empty=TensorDict())
    td["child"] = child
    with pytest.raises(RuntimeError, match="lock"):
        write(td)
    assert set(td.keys()) == {"free", "empty", "child"}
    assert set(owner["child"].keys()) == {"x", "y", "hollow"}


def test_what_is_added_past_the_lock_is_locked() -> None:
    td = TensorDict({"n": {"x": 1}}).lock_()
    added = TensorDict({"m": {"y": 1}})
    td.update({"new": added, "n": {"below": {"z": 1}}}, ignore_lock=True)
    assert td["new"].is_locked and td["new", "m"].is_locked and td["n", "below"].is_locked
    for key in (("new", "q"), ("new", "m", "q"), ("n", "below", "q")):
        with pytest.raises(RuntimeError, match="lock"):
            td[key] = 1
    td.unlock_()
    assert not added.is_locked and not td["n", "below"].is_locked
