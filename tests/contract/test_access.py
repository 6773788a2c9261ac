"""Reading and writing single entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, addresses, as_key, assert_leaf, assert_matches, by_number, changed, leaves, nodes
from tensordict import TensorDict, get_defaults_to_none, set_get_defaults_to_none
from tensordict.base import NO_DEFAULT


def test_every_form_of_key_reads_the_same(td: Any, plain: Plain) -> None:
    for path, leaf in leaves(plain).items():
        nested: Any = path[-1]
        for name in reversed(path[:-1]):
            nested = (name, nested)
        for found in (td[path], td.get(path), td.get(nested), td[as_key(path)], td.get(as_key(path))):
            assert_leaf(found, leaf, path)


def test_nodes_are_the_same_object_each_time(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.keeps_identity:
        pytest.skip("this kind makes nodes as they are read")
    for path in nodes(plain):
        assert td[path] is td.get(path)


def test_missing_keys(td: Any, kind: Kind) -> None:
    for key in ("absent", ("absent", "below"), *([("b", "absent")] if kind.nested else [])):
        assert td.get(key) is None
        assert td.get(key, 7) == 7
        assert td.get(key, None) is None
        assert td.get(key, default="text") == "text"
        for read in (td.__getitem__, lambda key: td.get(key, NO_DEFAULT), lambda key: td.get(key, default=NO_DEFAULT)):
            with pytest.raises(KeyError, match="absent"):
                read(key)
        if kind.batch_size:
            assert td.get_at(key, 0) is None and td.get_at(key, 0, 7) == 7
            with pytest.raises(KeyError, match="absent"):
                td.get_at(key, 0, NO_DEFAULT)


def test_key_below_a_leaf(td: Any) -> None:
    with pytest.raises((KeyError, ValueError), match="a"):
        td["a", "below"]


def test_get_default_switch(td: Any) -> None:
    assert get_defaults_to_none() is True
    set_get_defaults_to_none(False)
    try:
        assert get_defaults_to_none() is False
        with pytest.raises(KeyError, match="absent"):
            td.get("absent")
        assert td.get("absent", None) is None
    finally:
        set_get_defaults_to_none(True)
    assert td.get("absent") is None


def test_set_new(writable: Any, plain: Plain, kind: Kind) -> None:
    top, deep = torch.rand(*kind.batch_size, 3), torch.rand(kind.batch_size)
    assert writable.set("new", top) is writable
    assert writable.set(("one", "two", "three"), deep) is writable
    writable["other"] = top
    writable["b2", "c2"] = deep
    plain |= {"new": top, "one": {"two": {"three": deep}}, "other": top, "b2": {"c2": deep}}
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    if kind.keeps_identity:
        assert writable["new"] is top and writable["one", "two", "three"] is deep


def test_set_replaces(writable: Any, plain: Plain, kind: Kind) -> None:
    for path, leaf in leaves(plain).items():
        other = torch.rand(*leaf.shape, 2)
        writable.set(path, other, overwrite=True)
        assert_leaf(writable[path], other, path)
    assert writable.batch_size == torch.Size(kind.batch_size)


def test_set_dict_makes_a_node(writable: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(kind.batch_size)
    writable["new"] = {"x": value, "deep": {"y": value}}
    assert_matches(writable, plain | {"new": {"x": value, "deep": {"y": value}}}, kind.batch_size, kind.extra)
    assert writable["new", "deep"].names == writable.names
    writable["a"] = {"x": value}
    assert_matches(writable["a"], {"x": value}, kind.batch_size)


def test_set_in_place_keeps_the_memory(td: Any, plain: Plain, kind: Kind) -> None:
    memory = addresses(td)
    for path, leaf in leaves(plain).items():
        assert td.set(path, changed(leaf), inplace=True) is td
        assert_leaf(td[path], changed(leaf), path)
        assert not kind.in_memory or addresses(td) == memory
        assert td.set_(path, leaf) is td
        assert_leaf(td[path], leaf, path)
        assert not kind.in_memory or addresses(td) == memory
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_set_in_place_casts(td: Any, plain: Plain) -> None:
    td.set_("a", plain["a"].double() + 1)
    assert_leaf(td["a"], plain["a"] + 1, "a")


def test_set_inplace_of_a_missing_key_writes_it(writable: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(kind.batch_size)
    writable.set("new", value, inplace=True)
    assert_matches(writable, plain | {"new": value}, kind.batch_size, kind.extra)


def test_set_underscore_of_a_missing_key(td: Any, plain: Plain, kind: Kind) -> None:
    for key in ("absent", ("b", "absent"), ("absent", "x")):
        with pytest.raises(KeyError, match="absent|b"):
            td.set_(key, torch.zeros(kind.batch_size))
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_wrong_shape_names_the_key_and_changes_nothing(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("every shape fits an empty batch size")
    for write in (writable.set, writable.__setitem__, writable.set_, writable.setdefault):
        with pytest.raises((RuntimeError, ValueError, KeyError), match="n.*wrong"):
            write(("n", "wrong"), torch.zeros(7, 7))
    for path in leaves(plain):
        with pytest.raises((RuntimeError, ValueError), match=path[-1]):
            writable.set_(path, torch.zeros(7, 7))
        with pytest.raises((RuntimeError, ValueError), match=path[-1]):
            writable.set(path, torch.zeros(7, 7))
        with pytest.raises((RuntimeError, ValueError), match=path[-1]):
            writable.set(path, torch.zeros(7, 7), inplace=True)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("key", [1, (), None, ("new", 1), 2.5])
def test_no_key(writable: Any, plain: Plain, kind: Kind, key: Any) -> None:
    with pytest.raises(TypeError):
        writable.set(key, torch.zeros(kind.batch_size))
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_a_container_cannot_hold_itself(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.keeps_identity:
        pytest.skip("setting a container copies it")
    for write in (lambda: writable.set("a", writable), lambda: writable.update({"a": writable})):
        with pytest.raises(ValueError, match="'a': a container cannot hold itself"):
            write()
        assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_setting_below_a_leaf(writable: Any, plain: Plain, kind: Kind) -> None:
    with pytest.raises((KeyError, ValueError, RuntimeError), match="a"):
        writable.set(("a", "below"), torch.zeros(kind.batch_size))
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_get_at_and_set_at(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    for path, leaf in leaves(plain).items():
        assert_leaf(td.get_at(path, 0), leaf[0], path)
        assert_leaf(td.get_at(path, slice(1, None)), leaf[1:], path)
        assert td.set_at_(path, changed(leaf[0]), 0) is td
        leaf[0] = changed(leaf[0])
        assert_leaf(td[path], leaf, path)
    assert td.set_at_("a", 5, (..., 0) if len(kind.batch_size) == 1 else (slice(None), 0)) is td
    assert td.get_at("absent", 0) is None and td.get_at("absent", 0, 3) == 3
    with pytest.raises(KeyError, match="absent"):
        td.set_at_("absent", 1, 0)


REACHING: list[Any] = [
    (..., 0), (..., 0, slice(None)), (..., slice(0, 1)), (..., [0, 0]), (..., None), (None, ..., 0), 0, (0, 0),
    (0, 0, 0),
    ([0, 0], [0, 0], 0), (slice(None), [0, 0]), (0, slice(None), [0]), np.array([0]), range(1),
]  # fmt: skip


@pytest.mark.parametrize("index", REACHING, ids=repr)
def test_parts_of_entries_are_those_of_the_tensor(td: Any, plain: Plain, index: Any) -> None:
    for path, leaf in leaves(plain).items():
        try:
            part = leaf[index]
        except IndexError:
            with pytest.raises(IndexError):
                td.get_at(path, index)
            with pytest.raises(IndexError):
                td.set_at_(path, 0, index)
            continue
        assert_leaf(td.get_at(path, index), part, path)
        expected = leaf.clone()
        expected[index] = changed(part)
        assert td.set_at_(path, changed(part), index) is td
        assert_leaf(td[path], expected, path)
        expected[index] = part
        assert td.update_at_({path: part}, index) is td
        assert_leaf(td[path], expected, path)
        expected[index] = 1
        assert td.update_at_(TensorDict({path: torch.ones((), dtype=leaf.dtype)}), index) is td
        assert_leaf(td[path], expected, path)


def test_update_at_that_fails_behind_the_batch_changes_nothing(td: Any, plain: Plain) -> None:
    first, *_, last = leaves(plain)
    with pytest.raises(RuntimeError, match="broadcast"):
        td.update_at_({first: 0, last: torch.zeros(2, 3, 5, 7, 11, dtype=plain["a"].dtype)}, (..., 0))
    assert_matches(td, plain)


def test_the_default_of_get_at_is_not_indexed(td: Any) -> None:
    default = torch.arange(3)
    assert td.get_at("absent", 0, default) is default
    assert td.get_at("absent", (..., 9), default=default) is default


def test_a_part_of_a_tensor_is_no_container(td: Any, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    before = td.clone()
    for value in (TensorDict(x=torch.zeros(2)), TensorDict(), {}, {"x": 1}):
        with pytest.raises(TypeError, match="entry 'a' is a tensor and cannot be assigned a"):
            td.set_at_("a", value, 0)
        with pytest.raises(TypeError, match="entry 'a' is a tensor and cannot be assigned a"):
            td.update_at_({"a": value}, 0)
    with pytest.raises(TypeError, match="entry 'a' is a tensor and cannot be"):
        td.set_at_("a", "text", 0)
    assert (td == before).all()


def test_set_at_out_of_bounds(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    with pytest.raises(IndexError):
        td.set_at_("a", 0, 100)
    with pytest.raises(IndexError):
        td.get_at("a", 100)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_setdefault(writable: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(kind.batch_size)
    assert_leaf(writable.setdefault("a", value), plain["a"], "a")
    assert_leaf(writable.setdefault("new", value), value, "new")
    assert_leaf(writable.setdefault(("n", "new"), value), value, "new")
    assert_matches(writable, plain | {"new": value, "n": {"new": value}}, kind.batch_size, kind.extra)


def test_pop(writable: Any, plain: Plain, kind: Kind) -> None:
    assert_leaf(writable.pop("a"), plain.pop("a"), "a")
    if kind.nested:
        assert_leaf(writable.pop(("b", "c")), plain["b"].pop("c"), "c")
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    for key in ("a", ("b", "c"), ("absent", "x")):
        assert writable.pop(key, 3) == 3
        assert writable.pop(key, default=None) is None
        with pytest.raises(KeyError):
            writable.pop(key)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_popitem(writable: Any, plain: Plain, kind: Kind) -> None:
    for _ in range(len(plain)):
        name, value = writable.popitem()
        if kind.keeps_order:
            assert name == list(plain)[-1]
        expected = plain.pop(name)
        if isinstance(expected, torch.Tensor):
            assert_leaf(value, expected, name)
        assert_matches(writable, plain, kind.batch_size, kind.extra)
    with pytest.raises(KeyError):
        writable.popitem()


def test_deleting(writable: Any, plain: Plain, kind: Kind) -> None:
    assert writable.del_("a") is writable
    del writable["mask"]
    del plain["a"], plain["mask"]
    if kind.nested:
        del writable["b", "c"]
        del plain["b"]["c"]
        writable.del_(("b", "d"))
        del plain["b"]["d"]
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    for key in ("a", ("b", "c"), "absent"):
        with pytest.raises(KeyError):
            writable.del_(key)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_rename_key(writable: Any, plain: Plain, kind: Kind) -> None:
    assert writable.rename_key_("a", "renamed") is writable
    plain["renamed"] = plain.pop("a")
    writable.rename_key_("mask", ("other", "mask"))
    plain["other"] = {"mask": plain.pop("mask")}
    if kind.nested:
        writable.rename_key_(("b", "c"), "c")
        plain["c"] = plain["b"].pop("c")
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_rename_key_onto_another(writable: Any, plain: Plain, kind: Kind) -> None:
    with pytest.raises(KeyError, match="mask"):
        writable.rename_key_("a", "mask", safe=True)
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    writable.rename_key_("a", "mask")
    plain["mask"] = plain.pop("a")
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    with pytest.raises(KeyError, match="absent"):
        writable.rename_key_("absent", "x")
    writable.rename_key_("mask", "mask")
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_rename_key_into_itself(writable: Any, plain: Plain, kind: Kind) -> None:
    """A node cannot become its own child; whatever the answer, no entry may be lost."""
    if not kind.nested:
        pytest.skip("needs a node")
    try:
        writable.rename_key_("b", ("b", "inner"))
    except (KeyError, ValueError, RuntimeError):
        assert_matches(writable, plain, kind.batch_size, kind.extra)
    else:
        plain["b"] = {"inner": plain["b"]}
        assert_matches(writable, plain, kind.batch_size)


def test_entries_of_a_node_are_entries_of_the_tree(writable: Any, plain: Plain, kind: Kind) -> None:
    if not (kind.nested and kind.keeps_identity):
        pytest.skip("needs nodes with an identity")
    value = torch.rand(kind.batch_size)
    writable["b"].set("new", value)
    plain["b"]["new"] = value
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_fill_and_zero(td: Any, plain: Plain, kind: Kind) -> None:
    assert td.fill_("a", 3) is td
    assert_leaf(td["a"], torch.full_like(plain["a"], 3), "a")
    assert td.zero_() is td
    for path, leaf in leaves(plain).items():
        assert_leaf(td[path], torch.zeros_like(leaf), path)


def test_writes_reach_the_right_batch_elements(td: Any, plain: Plain, kind: Kind) -> None:
    """In-place writes through the tensor that a key gives change the container."""
    if not kind.reads_memory:
        pytest.skip("what a key gives is a copy")
    tensor = td["a"]
    by_number(tensor, kind.batch_size)[0] = 99
    by_number(plain["a"], kind.batch_size)[0] = 99
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_device_carrying_parent_and_value(kind: Kind) -> None:
    made = TensorDict({}, batch_size=kind.batch_size, device="meta")
    made["x"] = torch.zeros(kind.batch_size)
    made["n", "y"] = torch.zeros(kind.batch_size)
    made["m"] = TensorDict({"y": torch.zeros(kind.batch_size)}, kind.batch_size)
    assert {leaf.device.type for leaf in made.values(True, True)} == {"meta"}
