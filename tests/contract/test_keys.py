"""Keys, values and items as live views, and the forms of nested keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Path, Plain, as_key, as_path, assert_leaf, assert_matches, leaves, nested_keys
from tensordict import TensorDict, unravel_key, unravel_key_list
from tensordict.base import _NESTED_TENSORS_AS_LISTS


def ordered(keys: Any, kind: Kind) -> list[Any]:
    """The keys as a list, which is compared in order where the kind promises one."""
    return list(keys) if kind.keeps_order else sorted(keys, key=str)


def test_keys(td: Any, plain: Plain, kind: Kind) -> None:
    assert ordered(td.keys(), kind) == ordered(plain, kind)
    everything = [as_key(path) for path in nested_keys(plain)]
    assert ordered(td.keys(include_nested=True), kind) == ordered(everything, kind)
    bottom = [as_key(path) for path in leaves(plain)]
    assert ordered(td.keys(include_nested=True, leaves_only=True), kind) == ordered(bottom, kind)
    top = [name for name, value in plain.items() if not isinstance(value, dict)]
    assert ordered(td.keys(leaves_only=True), kind) == ordered(top, kind)


def test_replaced_entries_keep_their_place(writable: Any, plain: Plain, kind: Kind) -> None:
    writable["new2"] = torch.zeros(*kind.batch_size, 2, dtype=torch.bool)
    writable.set("new2", torch.zeros(kind.batch_size, dtype=torch.int64), overwrite=True)
    writable["new1"] = torch.zeros(kind.batch_size)
    assert ordered(writable.keys(), kind) == ordered([*plain, "new2", "new1"], kind)


def members_apart(plain: Plain, dims: tuple[int, ...], at: Path) -> dict[Path, torch.Tensor]:
    """The leaves of the members of lazy stacks that run over these dims of the entry at `at`, the outermost first."""
    found: dict[Path, torch.Tensor] = {}
    for path, leaf in leaves(plain).items():
        pieces = {path[: len(at)]: leaf}
        for dim in dims if path[: len(at)] == at else ():
            pieces = {(*way, str(i)): row for way, piece in pieces.items() for i, row in enumerate(piece.unbind(dim))}
        found.update({(*way, *path[len(at) :]): piece for way, piece in pieces.items()})
    return found


def test_items_of_members_apart(td: Any, plain: Plain, kind: Kind) -> None:
    expected = members_apart(plain, kind.stack_dims, kind.stacked_at)
    items = td.items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)
    assert {as_path(key) for key, _ in items} == expected.keys() and len(items) == len(list(items)) == len(expected)
    for key, leaf in items:
        assert_leaf(leaf, expected[as_path(key)], key)
    values = td.values(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)
    assert len(values) == len(expected)
    for value, (key, leaf) in zip(values, items, strict=True):
        assert_leaf(value, leaf, key)
    for arguments in ((True, True), (True, False), (False, True), (False, False)):
        assert list(td.keys(*arguments, is_leaf=_NESTED_TENSORS_AS_LISTS)) == list(td.keys(*arguments))
    shown: dict[Any, torch.Tensor] = {}
    named = td.named_apply(shown.__setitem__, nested_keys=True, is_leaf=_NESTED_TENSORS_AS_LISTS, filter_empty=True)
    assert named is None and {as_path(key) for key in shown} == expected.keys()


def test_len_of_views(td: Any, plain: Plain) -> None:
    assert len(td.keys()) == len(td.values()) == len(td.items()) == len(plain)
    assert len(td.keys(True)) == len(nested_keys(plain))
    assert len(td.keys(True, True)) == len(leaves(plain))


def test_len_of_nested_values_and_items(td: Any, plain: Plain) -> None:
    assert len(td.values(True)) == len(td.items(True)) == len(nested_keys(plain))
    assert len(td.values(True, True)) == len(td.items(True, True)) == len(leaves(plain))


def test_membership(td: Any, plain: Plain) -> None:
    for path in nested_keys(plain):
        assert as_key(path) in td.keys(True)
        assert path in td.keys(True)
        assert path in td
    for name, value in plain.items():
        assert name in td.keys() and name in td
        assert (name in td.keys(leaves_only=True)) == (not isinstance(value, dict))
    assert "absent" not in td.keys() and "absent" not in td and "absent" not in td.keys(True, True)
    assert ("b", "absent") not in td.keys(True)
    assert ("a", "below a leaf") not in td.keys(True)


@pytest.mark.parametrize("key", [1, None, 2.5, ("a", 1)])
def test_membership_of_no_key(td: Any, key: Any) -> None:
    with pytest.raises(TypeError):
        key in td.keys(True)  # noqa: B015


def test_values_and_items(td: Any, plain: Plain) -> None:
    for options in ((), (True,), (True, True)):
        keys = list(td.keys(*options))
        found = [key for key, _ in td.items(*options)]
        # The views may place a node before or after its children; leaves keep their order.
        assert found == keys if options != (True,) else sorted(found, key=str) == sorted(keys, key=str)
        assert len(list(td.values(*options))) == len(keys)
        for (key, item), value in zip(td.items(*options), td.values(*options), strict=True):
            for found in (item, value):
                if isinstance(found, torch.Tensor):
                    assert_leaf(found, leaves(plain)[(key,) if isinstance(key, str) else key], key)
                else:
                    assert set(found.keys()) == set(td[key].keys())


def test_sorted_views(td: Any, plain: Plain) -> None:
    for options in ((), (True, True)):
        keys = list(td.keys(*options, sort=True))
        assert keys == sorted(td.keys(*options), key=lambda key: key if isinstance(key, str) else ".".join(key))
        assert [key for key, _ in td.items(*options, sort=True)] == keys
        expected = [td[key] for key in keys]
        for value, same in zip(td.values(*options, sort=True), expected, strict=True):
            assert type(value) is type(same) and value.shape == same.shape
    assert list(td.sorted_keys) == sorted(plain)


def test_is_leaf_decides_where_to_stop(td: Any, plain: Plain) -> None:
    stops = td.keys(True, True, is_leaf=lambda cls: True)
    assert {name for name in stops if isinstance(name, str)} == set(plain)


def test_views_are_live(writable: Any, plain: Plain, kind: Kind) -> None:
    keys, nested, items = writable.keys(), writable.keys(True, True), writable.items()
    writable.set("fresh", torch.zeros(kind.batch_size))
    writable.set(("deep", "fresh"), torch.zeros(kind.batch_size))
    assert "fresh" in keys and "fresh" in dict(items) and ("deep", "fresh") in nested
    assert len(keys) == len(plain) + 2
    writable.del_("a")
    assert "a" not in keys and "a" not in set(nested)


def test_keys_view_is_reusable(td: Any) -> None:
    view = td.keys(True, True)
    assert list(view) == list(view)
    values = td.values(True, True)
    assert len(list(values)) == len(list(values)) == len(list(view))


def test_dot_is_no_separator(writable: Any, kind: Kind) -> None:
    value = torch.zeros(kind.batch_size)
    if not kind.any_names:
        # No attribute has such a name, so it is an error and does not mean `y` in the declared `x`.
        with pytest.raises(TypeError, match=r"'x\.y'"):
            writable["x.y"] = value
        assert "x" not in writable.keys()
        return
    writable["x.y"] = value
    assert "x.y" in writable.keys() and "x" not in writable.keys()
    assert ("x", "y") not in writable.keys(True)
    assert_leaf(writable["x.y"], value, "x.y")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a", "a"),
        (("a",), "a"),
        (("a", "b"), ("a", "b")),
        (("a", ("b", "c")), ("a", "b", "c")),
        ((("a",), (("b",), "c")), ("a", "b", "c")),
        ("a.b", "a.b"),
        ((), ()),
        ((0,), ()),
        (("a", 0), "a"),
        ((None, "a", 1.5, ("b", "c")), ("a", "b", "c")),
        # A nested tuple with an invalid part is left out as a whole.
        (("a", ("b", 0), ()), "a"),
    ],
)
def test_unravel_key(key: Any, expected: Any) -> None:
    assert unravel_key(key) == expected


def test_unravel_key_list() -> None:
    assert unravel_key_list([("a",), "b", ("c", ("d",))]) == ["a", "b", ("c", "d")]
    assert unravel_key_list(("a", ("b",))) == ["a", "b"]
    assert unravel_key_list([("a", 0), (0,)]) == ["a", ()]
    with pytest.raises(TypeError):
        unravel_key_list("a")


@pytest.mark.parametrize("key", [1, None, 1.5, {"a"}, ["a"], b"a"])
def test_unravel_no_key(key: Any) -> None:
    with pytest.raises(RuntimeError, match=r"should be a Sequence<NestedKey>.* got .* of type"):
        unravel_key(key)
    with pytest.raises(RuntimeError, match=r"should be a Sequence<NestedKey>"):
        unravel_key_list(["a", key])


@pytest.mark.parametrize("separator", [".", "_", "--", "/"])
def test_flatten_and_unflatten_keys(td: Any, plain: Plain, kind: Kind, separator: str) -> None:
    flat = td.flatten_keys(separator)
    expected = {separator.join(path): leaf for path, leaf in leaves(plain).items()}
    assert_matches(flat, expected, kind.batch_size)
    assert flat.names == td.names and flat.device == td.device
    assert_matches(flat.unflatten_keys(separator), plain, kind.batch_size)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_flatten_keys_default_separator(td: Any, plain: Plain) -> None:
    assert set(td.flatten_keys().keys()) == {".".join(path) for path in leaves(plain)}
    assert_matches(td.flatten_keys().unflatten_keys(), plain)


def test_flatten_keys_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    assert writable.flatten_keys("/", inplace=True) is writable
    assert_matches(writable, {"/".join(path): leaf for path, leaf in leaves(plain).items()}, kind.batch_size)
    assert writable.unflatten_keys("/", inplace=True) is writable
    assert_matches(writable, plain, kind.batch_size)


def test_flattening_into_an_existing_key() -> None:
    td = TensorDict({"a.b": 1, "a": {"b": 2}})
    with pytest.raises(KeyError, match="a.*b"):
        td.flatten_keys(".")
    with pytest.raises(KeyError, match="a.*b"):
        td.flatten_keys(".", inplace=True)
    assert td["a.b"] == 1 and td["a", "b"] == 2


@pytest.mark.parametrize("entries", [{"a": 1, "a.b": 2}, {"a": {"b": 1}, "a.b": 2}])
def test_unflattening_into_an_existing_key(entries: Plain) -> None:
    td = TensorDict(entries)
    before = td.to_dict()
    for inplace in (False, True):
        with pytest.raises(KeyError, match="a"):
            td.unflatten_keys(".", inplace=inplace)
        assert td.to_dict().keys() == before.keys()


@pytest.mark.parametrize("turn", [1, -1])
def test_unflatten_joins_existing_nodes(turn: int) -> None:
    entries = {"a": {"c": 1}, "a.b": 2, "a.d.e": 3, "a.d": {"f": 4}}
    td = TensorDict(dict(list(entries.items())[::turn]))
    node = td["a"]
    assert td.unflatten_keys(".").to_dict() == {"a": {"c": 1, "b": 2, "d": {"e": 3, "f": 4}}}
    assert node.to_dict() == {"c": 1}


def test_ipython_completes_the_keys(td: Any, plain: Plain) -> None:
    assert td._ipython_key_completions_() == list(td.keys(include_nested=True)) != []
