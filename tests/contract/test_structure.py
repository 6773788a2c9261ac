"""Parts and copies: select, exclude, split_keys, empty, clear, copy, clone and conversions to plain containers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Path, Plain, addresses, assert_leaf, assert_matches, changed, leaves, nested_keys, nodes
from tensordict import TensorDict


def without(plain: Plain, *paths: Path) -> Plain:
    """The content less these keys; dicts that become empty stay."""
    kept: Plain = {}
    for name, value in plain.items():
        if (name,) in paths:
            continue
        below = [path[1:] for path in paths if path[0] == name and len(path) > 1]
        kept[name] = without(value, *below) if below else value
    return kept


def test_select(td: Any, plain: Plain, kind: Kind) -> None:
    assert_matches(td.select("a"), {"a": plain["a"]}, kind.batch_size)
    assert_matches(td.select("mask", "a"), {"a": plain["a"], "mask": plain["mask"]}, kind.batch_size)
    assert_matches(td.select(), {}, kind.batch_size)
    if kind.nested:
        picked = td.select(("b", ("d", "e")), "a")
        assert_matches(picked, {"a": plain["a"], "b": {"d": plain["b"]["d"]}}, kind.batch_size, kind.extra)
        assert_matches(td.select("b"), {"b": plain["b"]}, kind.batch_size, kind.extra)
    part = td.select("a")
    assert part.names == td.names and part.device == td.device and not part.is_locked
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_select_shares_entries(td: Any, kind: Kind) -> None:
    if kind.in_memory:
        assert set(addresses(td.select("a"))) < set(addresses(td))
        assert set(addresses(td.exclude("mask"))) < set(addresses(td))
    for share in (td.select("a"), td.exclude("mask"), td.copy()):
        share.set_("a", changed(share["a"]))
        assert_leaf(td["a"], share["a"], "a")


def test_select_strict(td: Any, plain: Plain, kind: Kind) -> None:
    for key in ("absent", ("absent", "x")):
        with pytest.raises(KeyError, match="absent"):
            td.select("a", key)
        assert_matches(td.select("a", key, strict=False), {"a": plain["a"]}, kind.batch_size)
    if kind.nested:
        with pytest.raises(KeyError, match="absent"):
            td.select(("b", "absent"))


def test_select_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    keys: list[Any] = ["a", ("b", "c")] if kind.nested else ["a"]
    node = writable.get("b")
    assert writable.select(*keys, inplace=True) is writable
    expected = {"a": plain["a"]} | ({"b": {"c": plain["b"]["c"]}} if kind.nested else {})
    assert_matches(writable, expected, kind.batch_size)
    if kind.nested and kind.keeps_identity:
        assert writable["b"] is node
    with pytest.raises(KeyError, match="absent"):
        writable.select("absent", inplace=True)
    assert_matches(writable, expected, kind.batch_size)
    assert_matches(writable.select("absent", inplace=True, strict=False), {}, kind.batch_size)


def test_exclude(td: Any, plain: Plain, kind: Kind) -> None:
    assert_matches(td.exclude("a"), without(plain, ("a",)), kind.batch_size, kind.extra)
    assert_matches(td.exclude("absent"), plain, kind.batch_size, kind.extra)
    assert_matches(td.exclude(("absent", "x")), plain, kind.batch_size, kind.extra)
    if kind.nested:
        assert_matches(td.exclude(("b", "c"), "z"), without(plain, ("b", "c"), ("z",)), kind.batch_size, kind.extra)
        assert_matches(td.exclude(("b", "d", "e")), without(plain, ("b", "d", "e")), kind.batch_size, kind.extra)
    assert not td.exclude("a").is_locked and td.exclude("a").names == td.names
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_exclude_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    assert writable.exclude("a", "absent", inplace=True) is writable
    assert_matches(writable, without(plain, ("a",)), kind.batch_size, kind.extra)
    if kind.nested:
        writable.exclude(("b", "c"), inplace=True)
        assert_matches(writable, without(plain, ("a",), ("b", "c")), kind.batch_size, kind.extra)


def test_split_keys(td: Any, plain: Plain, kind: Kind) -> None:
    first, second, rest = td.split_keys(["a"], ["mask"])
    assert_matches(first, {"a": plain["a"]}, kind.batch_size)
    assert_matches(second, {"mask": plain["mask"]}, kind.batch_size)
    assert_matches(rest, without(plain, ("a",), ("mask",)), kind.batch_size, kind.extra)
    if kind.nested:
        part, rest = td.split_keys([("b", "c"), "a"])
        assert_matches(part, {"a": plain["a"], "b": {"c": plain["b"]["c"]}}, kind.batch_size)
        assert_matches(rest, without(plain, ("a",), ("b", "c")), kind.batch_size, kind.extra)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_split_keys_missing(td: Any, plain: Plain, kind: Kind) -> None:
    with pytest.raises(KeyError, match="absent"):
        td.split_keys(["a", "absent"])
    part, rest = td.split_keys(["a", "absent"], strict=False)
    assert_matches(part, {"a": plain["a"]}, kind.batch_size)
    assert_matches(rest, without(plain, ("a",)), kind.batch_size, kind.extra)


def test_split_keys_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    part, rest = writable.split_keys(["a"], inplace=True)
    assert rest is writable
    assert_matches(part, {"a": plain["a"]}, kind.batch_size)
    assert_matches(writable, without(plain, ("a",)), kind.batch_size, kind.extra)


def test_failed_split_keys_changes_nothing(writable: Any, plain: Plain, kind: Kind) -> None:
    with pytest.raises(KeyError, match="absent"):
        writable.split_keys(["a"], ["absent"], inplace=True)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_empty(td: Any, plain: Plain, kind: Kind) -> None:
    bare = td.empty()
    assert_matches(bare, {}, kind.batch_size)
    assert bare.device == td.device and bare.names == td.names and not bare.is_locked
    tree = td.empty(recurse=True)
    assert set(tree.keys(True)) == {key for key in td.keys(True) if not isinstance(td[key], torch.Tensor)}
    for path in nodes(plain):
        assert tree[path].batch_size == td[path].batch_size
    assert td.empty(batch_size=[2]).batch_size == torch.Size([2])
    assert td.empty(device="cpu").device == torch.device("cpu")
    bare["new"] = torch.zeros(kind.batch_size)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_is_empty_and_clear(writable: Any, plain: Plain, kind: Kind) -> None:
    assert not writable.is_empty()
    assert writable.clear() is writable
    assert_matches(writable, {}, kind.batch_size)
    assert writable.is_empty()
    writable.create_nested(("only", "nodes"))
    assert writable.is_empty() and len(writable.keys(True)) == 2


def test_filter_empty(writable: Any, plain: Plain, kind: Kind) -> None:
    writable.create_nested("hollow")
    writable.create_nested(("deep", "hollow"))
    writable["deep", "kept"] = torch.zeros(kind.batch_size)
    assert writable.filter_empty_() is writable
    assert_matches(writable, plain | {"deep": {"kept": torch.zeros(kind.batch_size)}}, kind.batch_size, kind.extra)


def test_create_nested(writable: Any, plain: Plain, kind: Kind) -> None:
    assert writable.create_nested("new") is writable
    writable.create_nested(("n", "m"))
    assert_matches(writable, plain | {"new": {}, "n": {"m": {}}}, kind.batch_size, kind.extra)
    assert writable["n", "m"].batch_size == writable.batch_size
    assert writable["n", "m"].device == writable.device and writable["n", "m"].names == writable.names


def test_copy(td: Any, plain: Plain, kind: Kind) -> None:
    for shallow in (td.copy(), td.clone(recurse=False), td.clone(False)):
        assert_matches(shallow, plain, kind.batch_size, kind.extra)
        assert not shallow.is_locked and shallow.names == td.names and shallow.device == td.device
        if kind.in_memory:
            assert addresses(shallow) == addresses(td)
        shallow["new"] = torch.zeros(kind.batch_size)
        for path in nodes(plain):
            shallow[path]["new"] = torch.zeros(shallow[path].batch_size)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_clone(td: Any, plain: Plain, kind: Kind) -> None:
    for deep in (td.clone(), td.to_tensordict()):
        assert_matches(deep, plain, kind.batch_size, kind.extra)
        assert not deep.is_locked and deep.names == td.names
        assert not set(addresses(deep)) & set(addresses(td))
        for path in leaves(plain):
            of_own_kind = kind.is_module and type(deep) is type(td)
            assert type(deep[path]) is (type(td[path]) if of_own_kind else torch.Tensor)
            deep.set_(path, changed(deep[path]))
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_contiguous(td: Any, plain: Plain, kind: Kind) -> None:
    assert td.is_contiguous() == (kind.in_memory and not kind.stack_dims)
    assert_matches(td.contiguous(), plain, kind.batch_size, kind.extra)
    if len(kind.batch_size) == 2:
        turned = td.transpose(0, 1)
        assert not turned.is_contiguous()
        packed = turned.contiguous()
        assert packed.is_contiguous() and packed.batch_size == turned.batch_size
        for path in leaves(plain):
            assert_leaf(packed[path], turned[path], path)


def test_to_dict(td: Any, plain: Plain, kind: Kind) -> None:
    def compare(found: Any, expected: Any) -> None:
        assert type(found) is dict and found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, dict):
                compare(found[name], value)
            else:
                assert_leaf(found[name], value, name)

    compare(td.to_dict(retain_none=False), plain)
    if kind.reads_memory:
        assert td.to_dict()["a"].data_ptr() == td["a"].data_ptr()


def test_mapping_protocol(td: Any, plain: Plain) -> None:
    assert dict(td.items()).keys() == plain.keys()
    assert {**td}.keys() == plain.keys()
    with pytest.raises(RuntimeError):
        bool(td)


def test_entry_queries(td: Any, plain: Plain) -> None:
    assert td.get_item_shape("a") == plain["a"].shape
    for path in nested_keys(plain):
        assert issubclass(td.entry_class(path), torch.Tensor) == (path in leaves(plain))


def test_depth() -> None:
    assert TensorDict({"a": 1}).depth == 0
    assert TensorDict({"a": {"b": {"c": 1}}, "d": 1}).depth == 2
