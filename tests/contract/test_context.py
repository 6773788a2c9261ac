"""Containers as context managers: an action and its undoing, also when the block raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, addresses, assert_leaf, assert_matches, changed, index_map, leaves, mapped
from tensordict import NonTensorData, TensorClass, TensorDict, UnbatchedTensor

SHAPES = [
    "view(-1)", "view(4, 3)", "view(2, -1)", "permute(1, 0)", "permute(-1, 0, 1)", "transpose(0, 1)",
    "transpose(0, -1)",
    "squeeze(0)", "squeeze(1)", "squeeze(-1)", "unsqueeze(0)", "unsqueeze(-1)", "unsqueeze(1)", "flatten()",
    "flatten(0, 1)", "unflatten(0, (2, -1))", "unflatten(-1, (2, 2))", "unflatten(0, (1, 3))", "movedim(0, -1)",
]  # fmt: skip


class Point(TensorClass):
    x: torch.Tensor


def opened(td: Any, call: str) -> Any:
    return eval(f"td.{call}", {"td": td})


def skip_where_torch_refuses(kind: Kind, call: str) -> None:
    try:
        opened(index_map(kind.batch_size), call)
    except (RuntimeError, IndexError):
        pytest.skip("no such shape of this batch size")
    if not kind.batch_size and call not in ("view(-1)", "flatten()", "unsqueeze(0)", "unsqueeze(-1)"):
        pytest.skip("torch takes dim 0 of a scalar, a container need not")


@pytest.mark.parametrize("call", SHAPES)
@pytest.mark.parametrize("fails", [False, True], ids=["completes", "raises"])
def test_shape_blocks(writable: Any, plain: Plain, kind: Kind, call: str, fails: bool) -> None:
    skip_where_torch_refuses(kind, call)
    numbers = opened(index_map(kind.batch_size), call)
    expected = mapped(torch.clone, plain)

    def block() -> None:
        with opened(writable, call) as view:
            assert view.batch_size == numbers.shape
            view["new"] = numbers.clone()
            view["n", "new"] = numbers.clone()
            view.set_("a", changed(view["a"]))
            view["z"] = changed(view["z"])
            if kind.nested:
                view["b", "new"] = numbers.clone()
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            block()
    else:
        block()
    ramp = index_map(kind.batch_size)
    expected |= {"a": changed(plain["a"]), "z": changed(plain["z"]), "new": ramp, "n": {"new": ramp}}
    if kind.nested:
        expected["b"]["new"] = ramp
    assert_matches(writable, expected, kind.batch_size, kind.extra)
    assert not writable.is_locked


@pytest.mark.parametrize("call", SHAPES)
def test_deleting_in_a_shape_block(writable: Any, plain: Plain, kind: Kind, call: str) -> None:
    skip_where_torch_refuses(kind, call)
    with opened(writable, call) as view:
        del view["a"]
        view.rename_key_("mask", "renamed")
    plain["renamed"] = plain.pop("mask")
    del plain["a"]
    assert_matches(writable, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("call", ["view(-1)", "unsqueeze(0)"])
def test_nodes_in_a_shape_block(writable: Any, plain: Plain, kind: Kind, call: str) -> None:
    if not kind.nested:
        pytest.skip("needs a node")
    with opened(writable, call) as view:
        view.create_nested("hollow")
        view.rename_key_(("b", "d"), "moved")
        view["a"] = {"x": view["mask"].clone()}
        del view["b"]
        view["b"] = view["mask"].clone()
    expected = {name: plain[name] for name in ("mask", "z")}
    expected |= {"hollow": {}, "moved": plain["b"]["d"], "a": {"x": plain["mask"]}, "b": plain["mask"]}
    assert_matches(writable, expected, kind.batch_size)
    with opened(writable, call) as view:
        del view["moved"], view["hollow"]
    del expected["moved"], expected["hollow"]
    assert_matches(writable, expected, kind.batch_size)


@pytest.mark.parametrize("call", SHAPES)
def test_locked_containers_take_in_place_writes_in_a_block(td: Any, plain: Plain, kind: Kind, call: str) -> None:
    skip_where_torch_refuses(kind, call)
    td.lock_()
    with opened(td, call) as view:
        view.apply_(changed)
    assert td.is_locked
    assert_matches(td, mapped(changed, plain), kind.batch_size, kind.extra)


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "raises"])
def test_flatten_keys(writable: Any, plain: Plain, kind: Kind, fails: bool) -> None:
    value = torch.rand(kind.batch_size)

    def block() -> None:
        # This separator, so that a class can declare the flat names.
        with writable.flatten_keys("_") as flat:
            assert set(flat.keys()) == {"_".join(path) for path in leaves(plain)}
            flat["n_new"] = value
            flat["top"] = value
            flat.set_("a", changed(flat["a"]))
            flat["mask"] = value
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            block()
    else:
        block()
    expected = plain | {"a": changed(plain["a"]), "mask": value, "n": {"new": value}, "top": value}
    assert_matches(writable, expected, kind.batch_size, kind.extra)


def test_deleting_in_flatten_keys(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.nested:
        pytest.skip("needs a node")
    with writable.flatten_keys(".") as flat:
        del flat["b.c"]
        del flat["a"]
    del plain["b"]["c"], plain["a"]
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_nested_keys_written_under_flatten_keys(writable: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(kind.batch_size)
    with writable.flatten_keys("_") as flat:
        flat["n", "other"] = value
        flat["n_new"] = value  # a name that classes declare
        if kind.nested:
            flat["b", "mask"] = value  # beside "b_c", which leads to the same container
    expected = plain | {"n": {"new": value, "other": value}}
    if kind.nested:
        expected["b"] = plain["b"] | {"mask": value}
    assert_matches(writable, expected, kind.batch_size, kind.extra)


@pytest.mark.parametrize("inplace", [False, True])
def test_names_with_the_separator_survive_flatten_keys(inplace: bool) -> None:
    td = TensorDict({"a.b": 1, "n": {"x": 2, "m.k": 3}})
    with td.flatten_keys(".", inplace=inplace) as flat:
        flat["n", "y"] = 4
        flat["q.z"] = 5
    assert td.to_dict() == {"a.b": 1, "n": {"x": 2, "m.k": 3, "y": 4}, "q": {"z": 5}}


def test_one_key_written_twice_under_flatten_keys() -> None:
    td = TensorDict({"n": {"x": 1}})
    with pytest.raises(KeyError, match=r"two entries would be at \('n', 'x'\)"), td.flatten_keys(".") as flat:
        flat["n", "x"] = 2
    assert td.to_dict() == {"n": {"x": 1}}


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "raises"])
def test_unflatten_keys(kind: Kind, fails: bool) -> None:
    x, y = torch.rand(kind.batch_size), torch.rand(kind.batch_size)
    td = TensorDict({"a.b": x, "c": x}, kind.batch_size)

    def block() -> None:
        with td.unflatten_keys(".") as tree:
            tree["a", "new"] = y
            tree["a", "b"] = y
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            block()
    else:
        block()
    assert_matches(td, {"a.b": y, "c": x, "a.new": y}, kind.batch_size)


def test_unflatten_keys_leaves_what_was_nested(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.nested or kind.locked or not kind.any_names:
        pytest.skip("needs a node and free names")
    td["b.z"] = td["p.q"] = x = torch.rand(kind.batch_size)
    with td.unflatten_keys(".") as tree:
        assert tree["b", "z"].shape == tree["p", "q"].shape == x.shape
        tree["new"] = tree["b", "new"] = tree["p", "new"] = x
    plain["b"]["new"] = x
    assert_matches(td, {**plain, "b.z": x, "p.q": x, "p.new": x, "new": x}, kind.batch_size)


def test_containers_written_in_a_block_keep_their_class() -> None:
    td, value = TensorDict(), NonTensorData("x")
    with td.flatten_keys(".") as flat:
        flat["n"], flat["u"] = TensorDict({"value": value}), UnbatchedTensor(torch.ones(2))
        flat["k"] = Point(torch.ones(1))
    assert type(td["k"]) is Point and type(td["u"]) is UnbatchedTensor and td["n", "value"] == "x"


@pytest.mark.parametrize("fails", [False, True], ids=["completes", "raises"])
def test_unlock_and_lock(td: Any, plain: Plain, kind: Kind, fails: bool) -> None:
    value = torch.rand(kind.batch_size)

    def unlocked() -> None:
        with td.unlock_() as same:
            assert same is td and not td.is_locked
            td["new"] = value
            if fails:
                raise ZeroDivisionError

    def locked() -> None:
        with td.lock_():
            assert td.is_locked
            if fails:
                raise ZeroDivisionError

    for block, before in ((unlocked, True), (unlocked, False), (locked, False), (locked, True)):
        td.lock_() if before else td.unlock_()
        if fails:
            with pytest.raises(ZeroDivisionError):
                block()
        else:
            block()
        assert td.is_locked == before
        for node in td.values(True):
            assert isinstance(node, torch.Tensor) or node.is_locked == before
    td.unlock_()
    assert_matches(td, plain | {"new": value}, kind.batch_size, kind.extra)


def test_nested_blocks(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("needs a dimension")
    writable.lock_()
    ramp = index_map(kind.batch_size)
    with writable.unlock_(), writable.view(-1) as outer, outer.unsqueeze(0) as inner:
        inner["new"] = ramp.reshape(1, -1)
    assert writable.is_locked
    assert_matches(writable, plain | {"new": ramp}, kind.batch_size, kind.extra)


def test_blocks_of_one_container_one_after_the_other(writable: Any, plain: Plain, kind: Kind) -> None:
    for i in range(3):
        with writable.unsqueeze(0) as view:
            view[f"new{i}"] = torch.full((1, *kind.batch_size), i)
        plain[f"new{i}"] = torch.full(kind.batch_size, i)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_untouched_entries_stay_the_same_tensors(writable: Any, plain: Plain, kind: Kind) -> None:
    memory = addresses(writable)
    with writable.unsqueeze(-1) as view:
        view.set_("a", view["a"] * 2)
    if kind.in_memory:
        assert addresses(writable) == memory
    assert_leaf(writable["a"], plain["a"] * 2, "a")


_CHANGES = {
    "replaced": lambda v: v.update({"a": torch.full_like(v["a"], 7.0)}),
    "in place": lambda v: v["a"].zero_(),
    "added": lambda v: v.set("c", torch.ones(v.batch_size)),
    "deleted": lambda v: v.del_("a"),
    "renamed": lambda v: v.rename_key_("a", "c"),
    "swapped": lambda v: v.update({"a": v["b"], "b": v["a"]}),
    "nested": lambda v: v.update({"n": {"x": torch.ones(v.batch_size)}}),
    "the same": lambda v: v.update({"a": v["a"].view_as(v["a"])}),
}


def change(view: Any, name: str | None) -> None:
    if name in ("added", "nested") or (name is not None and "a" in view.keys()):
        _CHANGES[name](view)


@pytest.mark.parametrize("call", ["view(-1)", "permute(1, 0)", "unsqueeze(0)", "flatten(0, 1)"])
@pytest.mark.parametrize("early", [None, *_CHANGES])
@pytest.mark.parametrize("late", [None, *_CHANGES])
def test_what_was_done_to_a_view_of_tensors(call: str, early: str | None, late: str | None) -> None:
    """Before its block too: the end of the block brings all of it back."""
    td = TensorDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(2, 3), batch_size=[2, 3])
    alone = TensorDict(a=torch.arange(6.0).view(2, 3), b=torch.ones(2, 3), batch_size=[2, 3])
    view, expected = opened(td, call), opened(alone, call).clone()
    untouched = td["b"]
    change(expected, early)
    change(expected, late)
    change(view, early)
    with view as inner:
        change(inner, late)
    assert set(td.keys(True, True)) == set(expected.keys(True, True))
    back = opened(td, call)
    for key, value in expected.items(True, True):
        assert (back[key] == value).all(), key
    if "swapped" not in (early, late):
        assert td["b"] is untouched
