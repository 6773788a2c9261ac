"""Writing many entries at once: update and its kin, which write all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, addresses, as_path, assert_leaf, assert_matches, changed, leaves, mapped
from tensordict import TensorClass, TensorDict


def test_update_from_every_kind_of_source(writable: Any, plain: Plain, kind: Kind) -> None:
    new = mapped(changed, plain)
    flat = dict(leaves(new))
    for source in (new, flat, TensorDict(new, kind.batch_size)):
        assert writable.update(source) is writable
        assert_matches(writable, new, kind.batch_size)
        writable.update(plain)
        assert_matches(writable, plain, kind.batch_size)


def test_update_merges_nodes(writable: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(kind.batch_size)
    writable.update({"b": {"new": value}, ("n", "m"): value})
    plain.setdefault("b", {})["new"] = value
    plain["n"] = {"m": value}
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    writable.update(TensorDict({"b": {"newer": value}}, kind.batch_size))
    plain["b"]["newer"] = value
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_update_with_keywords_and_nothing(writable: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(kind.batch_size)
    assert writable.update(None) is writable and writable.update({}) is writable
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    writable.update(new=value)
    assert_matches(writable, plain | {"new": value}, kind.batch_size, kind.extra)


def test_update_by_itself(writable: Any, plain: Plain, kind: Kind) -> None:
    assert writable.update(writable) is writable
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_update_clone(writable: Any, kind: Kind) -> None:
    if not kind.keeps_identity:
        pytest.skip("this kind copies on every write")
    value = torch.rand(kind.batch_size)
    assert writable.update({"x": value})["x"] is value
    assert writable.update({"x": value}, clone=True)["x"] is not value
    assert_leaf(writable["x"], value, "x")
    node = TensorDict({"y": value}, kind.batch_size)
    writable.update({"n": node}, clone=True)
    assert writable["n", "y"] is not value


def test_update_inplace(writable: Any, plain: Plain, kind: Kind) -> None:
    memory = addresses(writable)
    new = mapped(changed, plain)
    fresh = torch.rand(kind.batch_size)
    assert writable.update(new | {"fresh": fresh}, inplace=True) is writable
    assert_matches(writable, new | {"fresh": fresh}, kind.batch_size, kind.extra)
    assert not kind.in_memory or addresses(writable.exclude("fresh")) == memory


def test_update_keys_to_update(writable: Any, plain: Plain, kind: Kind) -> None:
    new = mapped(changed, plain)
    writable.update(new, keys_to_update=["a"])
    plain["a"] = new["a"]
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    if kind.nested:
        for source in (new, TensorDict(new, kind.batch_size), {("b", "c"): new["b"]["c"], "z": new["z"]}):
            writable.update(plain)
            writable.update(source, keys_to_update=[("b", "c")])
            assert_matches(writable, plain | {"b": plain["b"] | {"c": new["b"]["c"]}}, kind.batch_size)


def test_failed_update_writes_nothing(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("every shape fits an empty batch size")
    bad = {
        "a": changed(plain["a"]),
        "new": {"x": torch.rand(kind.batch_size)},
        "third": torch.zeros(7, 7),
    }
    for source in (bad, {"new": torch.rand(kind.batch_size), "n": {"third": torch.zeros(7, 7)}}):
        with pytest.raises((RuntimeError, ValueError), match="third"):
            writable.update(source)
        assert_matches(writable, plain, kind.batch_size, kind.extra)
        with pytest.raises((RuntimeError, ValueError), match="third"):
            writable.update(source, inplace=True)
        assert_matches(writable, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("source", [[1], 3, "text"])
def test_update_from_no_mapping(writable: Any, plain: Plain, kind: Kind, source: Any) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError)):
        writable.update(source)
    assert_matches(writable, plain, kind.batch_size, kind.extra)


def test_update_underscore_from_nothing_but_empty_containers(td: Any, plain: Plain, kind: Kind) -> None:
    td.update_({"absent": {}, "also": TensorDict(inner=TensorDict({}, kind.batch_size), batch_size=kind.batch_size)})
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_update_underscore(td: Any, plain: Plain, kind: Kind) -> None:
    """In place, so locked containers take it as well."""
    memory = addresses(td)
    new = mapped(changed, plain)
    for source in (new, dict(leaves(mapped(changed, new))), TensorDict(new, kind.batch_size)):
        assert td.update_(source) is td
    assert_matches(td, new, kind.batch_size, kind.extra)
    assert not kind.in_memory or addresses(td) == memory
    td.update_({"a": plain["a"], "mask": plain["mask"]}, keys_to_update=["a"])
    assert_matches(td, new | {"a": plain["a"]}, kind.batch_size, kind.extra)


def test_failed_update_underscore_writes_nothing(td: Any, plain: Plain, kind: Kind) -> None:
    absent = torch.zeros(kind.batch_size)
    for wrong in (
        {"absent": absent},
        {"absent": {"x": absent}},
        {"a": changed(plain["a"]), "mask": torch.zeros(7, 7)},
    ):
        with pytest.raises((KeyError, RuntimeError, ValueError), match="absent|mask"):
            td.update_(wrong)
        assert_matches(td, plain, kind.batch_size, kind.extra)


def test_update_underscore_leaves_out_what_is_not_there(td: Any, plain: Plain, kind: Kind) -> None:
    td.update_({"a": changed(plain["a"]), "absent": torch.zeros(kind.batch_size), "text": "a word"})
    assert_matches(td, plain | {"a": changed(plain["a"])}, kind.batch_size, kind.extra)


@pytest.mark.parametrize(
    "keys", [["b"], [("b",)], [("b", "d", "e")], [("b", "d"), "a"], [("b", "absent")], ["absent"]], ids=repr
)
def test_keys_to_update_name_what_is_written(
    build: Callable[[], Any], plain: Plain, kind: Kind, keys: list[Any]
) -> None:
    if not kind.nested:
        pytest.skip("needs a node")
    new = mapped(changed, plain)
    chosen = [as_path(key) for key in keys]
    expected = {
        path: leaves(new)[path] if any(path[: len(key)] == key for key in chosen) else leaf
        for path, leaf in leaves(plain).items()
    }
    for source in (new, leaves(new), TensorDict(new, kind.batch_size)):
        td = build()
        td = td.unlock_() if kind.locked else td
        td.update(source, keys_to_update=keys)
        for path, leaf in expected.items():
            assert_leaf(td[path], leaf, path)
        assert {as_path(key) for key in td.keys(True, True)} == set(expected)


def test_update_batch_size_merges_where_the_batch_is_the_same(writable: Any, plain: Plain, kind: Kind) -> None:
    new = changed(plain["a"])
    assert writable.update(TensorDict({"a": new}, kind.batch_size), update_batch_size=True) is writable
    assert writable.update({"a": new}, update_batch_size=True) is writable
    if kind.nested:
        plain["b"]["c"] = changed(plain["b"]["c"])
        writable.update(TensorDict({"b": {"c": plain["b"]["c"]}}, kind.batch_size), update_batch_size=True)
    assert_matches(writable, plain | {"a": new}, kind.batch_size, kind.extra)


class _Doubling(dict[str, torch.Tensor]):
    """A dict that makes its values when they are read."""

    def items(self) -> Any:
        return [(key, 2 * value) for key, value in super().items()]


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"clone": True}])
def test_update_takes_the_items_of_a_dict_subclass(options: dict[str, Any]) -> None:
    td = TensorDict({"a": torch.zeros(2), "nested": {"b": torch.zeros(2)}})
    td.update({"nested": _Doubling(b=torch.ones(2))}, **options)
    td.update(_Doubling(a=torch.ones(2)), **options)
    assert td["a"].tolist() == td["nested", "b"].tolist() == [2, 2]


def test_update_with_another_batch_size_needs_all_entries() -> None:
    td = TensorDict({"a": {"b": torch.zeros(3), "c": torch.zeros(3)}}, [3])
    with pytest.raises(RuntimeError, match=r"not present in the source.*'c'"):
        td.update(TensorDict({"a": {"b": torch.ones(2)}}, [2]), update_batch_size=True)
    source = TensorDict({"a": {"b": torch.ones(2), "c": torch.ones(2)}, "d": torch.ones(2)}, [2])
    for options in ({"inplace": True}, {"keys_to_update": ["a"]}):
        with pytest.raises(RuntimeError, match="batch size"):
            td.update(source, update_batch_size=True, **options)
    assert td.batch_size == (3,) and td.update(source, update_batch_size=True).batch_size == (2,)
    assert td["a", "c"].tolist() == [1, 1]


class Message(TensorClass["nocast"]):
    role: str
    content: str


def make_history(size: tuple[int, ...], length: int) -> Any:
    rows = torch.stack([Message(role="user", content=f"message {at}") for at in range(length)])
    return rows.expand(*size, length)


def test_update_with_another_batch_size_of_nested_ones(writable: Any, kind: Kind) -> None:
    """A history of messages that begins anew has the new length; the container keeps its own."""
    if not kind.any_names or not kind.in_memory:
        pytest.skip("holds no tensorclasses of any name")
    writable["history"] = make_history(kind.batch_size, 3)
    source = TensorDict({"history": make_history(kind.batch_size, 1)}, kind.batch_size)
    with pytest.raises(RuntimeError):
        writable.update(source)
    assert writable["history"].batch_size == (*kind.batch_size, 3)
    assert writable.update(source, update_batch_size=True) is writable
    assert writable.batch_size == kind.batch_size
    assert writable["history"].batch_size == (*kind.batch_size, 1)
    element = writable["history"][(0,) * len(kind.batch_size)].to_tensordict()
    assert element.get("content").tolist() == ["message 0"] and element.get("role").tolist() == ["user"]
    fewer = TensorDict({"history": TensorDict({"role": "user"}, (*kind.batch_size, 2))}, kind.batch_size)
    with pytest.raises(RuntimeError, match="not present in the source.*'content'"):
        writable.update(fewer, update_batch_size=True)
    assert writable["history"].batch_size == (*kind.batch_size, 1)


def test_update_at(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    for index in (0, slice(0, 1), [1, 0]):
        new = mapped(lambda leaf, at=index: changed(leaf[at]), plain)
        for source in (new, dict(leaves(new)), TensorDict(new, torch.empty(kind.batch_size)[index].shape)):
            assert td.update_at_(source, index) is td
        for path, leaf in leaves(plain).items():
            leaf[index] = leaves(new)[path]
        assert_matches(td, plain, kind.batch_size, kind.extra)
    absent = torch.zeros(kind.batch_size)[0]
    wrong: list[Any] = [{"absent": absent}]
    wrong += [{"b": {"absent": absent}}, {"b": {"d": {"absent": absent}}}] if kind.nested else []
    for source in wrong:
        with pytest.raises((KeyError, AttributeError), match="absent"):
            td.update_at_({"a": changed(plain["a"][0]), **source}, 0)
        assert_matches(td, plain, kind.batch_size, kind.extra)


def test_copy_underscore(td: Any, plain: Plain, kind: Kind) -> None:
    new = mapped(changed, plain)
    assert td.copy_(TensorDict(new, kind.batch_size)) is td
    assert_matches(td, new, kind.batch_size, kind.extra)


def test_replace(td: Any, plain: Plain, kind: Kind) -> None:
    value = torch.rand(*kind.batch_size, 7)
    new = td.replace({"a": value})
    assert new is not td
    assert_matches(new, plain | {"a": value}, kind.batch_size, kind.extra)
    assert_matches(td.replace(a=value), plain | {"a": value}, kind.batch_size, kind.extra)
    if kind.nested:
        new = td.replace({"b": {"c": value}})
        assert_matches(new, plain | {"b": plain["b"] | {"c": value}}, kind.batch_size, kind.extra)
    assert_matches(td, plain, kind.batch_size, kind.extra)
    assert_matches(td.replace(), plain, kind.batch_size, kind.extra)


class OfAUser(Mapping[str, Any]):
    """A mapping of a user's, whose attributes are its own."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._entries = {name: torch.zeros_like(value) for name, value in items.items()}
        self._items = items

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_mappings_are_read_by_their_items(td: Any, plain: Plain) -> None:
    tensors = {name: changed(leaf) for name, leaf in plain.items() if isinstance(leaf, torch.Tensor)}
    td.update_(OfAUser(tensors))
    for name, leaf in tensors.items():
        assert torch.equal(td[name], leaf)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_plain_entries_are_moved_to_the_device(count: int) -> None:
    given = {f"k{i}": torch.zeros(2, 3) for i in range(count)}
    elsewhere = {name: value.to("meta") for name, value in given.items()}
    for source in (given, TensorDict(given, [2]), TensorDict(given, [2], device="cpu"), TensorDict(given, [])):
        td = TensorDict(elsewhere, [2], device="meta")
        assert all(value.is_meta for value in td.update(source).values())
        assert td.set("k0", given["k0"])["k0"].is_meta
    # The same device: the tensors themselves are stored.
    td = TensorDict(batch_size=[2], device="cpu").update(given)
    assert all(td[name] is value for name, value in given.items())
    mixed = {**elsewhere, "here": torch.zeros(2)}
    assert all(value.is_meta for value in TensorDict(batch_size=[2], device="meta").update(mixed).values())
    with pytest.raises(RuntimeError, match="'bad' has shape"):
        td.update({"k0": torch.ones(2, 3), "bad": torch.zeros(3)})
    assert td["k0"] is given["k0"] and "bad" not in td


@pytest.mark.parametrize("count", [2, 3])
def test_update_underscore_of_plain_leaves(count: int) -> None:
    names = [f"k{i}" for i in range(count)]
    last = names[-1]

    def zeros(requires_grad: bool = False) -> TensorDict:
        return TensorDict({name: torch.zeros(3, requires_grad=requires_grad and name == last) for name in names})

    ones = {name: torch.ones(3) for name in names}
    for target, source in ((zeros(), {**ones, last: torch.ones(4)}), (zeros(requires_grad=True), ones)):
        with pytest.raises((RuntimeError, ValueError), match=last):
            target.update_(source)
        assert not any(value.any() for value in target.values())
    target = zeros()
    ones["k0"].requires_grad_()
    assert target.update_(ones)["k0"].requires_grad and not target[last].requires_grad
    target["k0"].sum().backward()
    assert ones["k0"].grad is not None


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("nested", [False, True])
def test_plain_entries_before_one_that_does_not_fit_are_not_written(count: int, nested: bool) -> None:
    """Plain tensors are stored without a plan only if all of them fit, in dicts below as well."""
    td = TensorDict({"n": {"a": torch.zeros(2)}, "b": torch.zeros(2)}, [2])
    before = td.clone()
    fitting: dict[Any, Any] = {f"k{i}": torch.ones(2) for i in range(count)}
    bad = {"a": torch.ones(2), "c": torch.ones(3)}
    with pytest.raises(RuntimeError, match="c"):
        td.update({"b": torch.ones(2), **fitting, **({"n": bad} if nested else bad)})
    td["n"].lock_()
    with pytest.raises(RuntimeError, match="lock"):
        td.update({"b": torch.ones(2), **fitting, "n": {"c": torch.ones(2)}})
    assert (td == before).all()
    assert set(td.keys(True)) == set(before.keys(True))


def test_plain_entries_beside_others_keep_their_order() -> None:
    td = TensorDict({"n": {"a": torch.zeros(2)}}, [2])
    td.update({"x": torch.ones(2), "n": {"b": torch.ones(2), "s": "text"}, "t": "text", "y": torch.ones(2)})
    assert list(td.keys()) == ["n", "x", "t", "y"]
    assert list(td["n"].keys()) == ["a", "b", "s"]
    assert td["n", "s"] == td["t"] == "text"
