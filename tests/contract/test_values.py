"""Values and unbatched tensors as entries of every kind of container."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from contract.kinds import Kind
from contract.model import Plain, index_map
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict, UnbatchedTensor, is_non_tensor, lazy_stack

TEXT = "a value"


@pytest.fixture
def holding(writable: Any, kind: Kind) -> Any:
    """A container of the kind with a value, and in `one` a string for every element of the batch."""
    if not kind.holds_values:
        pytest.skip("its entries are tensors")
    writable["x"] = TEXT
    if kind.batch_size:
        writable["one"] = strings(kind)
    return writable


def holder_of(td: Any, key: str) -> Any:
    """Return the holder of the value; `get` of a tensorclass returns the bare value."""
    return dict(td.non_tensor_items())[key]


def strings(kind: Kind) -> Any:
    return tree_map(str, index_map(kind.batch_size).tolist())


def check(result: Any, numbers: torch.Tensor, kind: Kind) -> None:
    """Check that the values belong to the elements with these numbers."""
    assert result["x"] == TEXT or set(flat(result["x"])) <= {TEXT}
    assert holder_of(result, "x").batch_size == result.batch_size == numbers.shape
    if kind.batch_size:
        holder = holder_of(result, "one")
        assert holder.batch_size == numbers.shape
        assert holder.tolist() == tree_map(str, numbers.tolist())


def flat(values: Any) -> list[Any]:
    return [item for part in values for item in flat(part)] if isinstance(values, list) else [values]


def test_values_that_were_read_are_those_of_the_rows_again(holding: Any, kind: Kind) -> None:
    if not kind.batch_size:
        return
    holding["one"] = holding["one"]
    assert holder_of(holding, "one").tolist() == strings(kind)
    other = TensorDict({"n": {"one": holding["one"]}}, kind.batch_size).update({"two": holding["one"]})
    assert other.get("two").tolist() == other.get(("n", "one")).tolist() == strings(kind)
    assert other[0]["two"] == other[0]["n", "one"] == strings(kind)[0]


def test_values_are_read(holding: Any, kind: Kind) -> None:
    check(holding, index_map(kind.batch_size), kind)
    assert is_non_tensor(holder_of(holding, "x"))
    assert holding.is_non_tensor("x") and not holding.is_non_tensor("a")
    assert "x" in holding and "x" not in list(holding.keys(True, True))
    assert {"x", "one"} & {key for key, _ in holding.non_tensor_items()} != set()
    assert not {"x", "one"} & set(holding.filter_non_tensor_data().keys())
    assert holding.to_dict()["x"] in (TEXT, holding["x"])


@pytest.mark.parametrize("index", ["0", "-1:", "None", "..., 0", "[1, 0]", "torch.tensor([1, 1])", "mask"])
def test_values_are_indexed(holding: Any, kind: Kind, index: str) -> None:
    numbers = index_map(kind.batch_size)
    try:
        expected = taken(numbers, index, numbers)
    except IndexError:
        pytest.skip("no such index of this batch size")
    check(taken(holding, index, numbers), expected, kind)


def taken(td: Any, index: str, numbers: torch.Tensor) -> Any:
    return eval(f"td[{index}]", {"td": td, "torch": torch, "mask": numbers % 2 == 0})


CALLS = [
    "reshape(-1)", "unsqueeze(0)", "unsqueeze(-1)", "transpose(0, -1)", "flatten()", "flip(0)", "roll(1, 0)",
    "repeat_interleave(2, 0)", "expand(2, *td.shape)", "clone()", "split(1)[1]", "unbind(0)[1]", "unbind(-1)[0]",
    "narrow(0, 1, 1)", "squeeze()",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_values_follow_the_batch(holding: Any, kind: Kind, call: str) -> None:
    numbers = index_map(kind.batch_size)
    try:
        expected = eval(f"td.{call}", {"td": numbers})
    except (RuntimeError, IndexError, TypeError):
        pytest.skip("no such shape of this batch size")
    if not kind.batch_size:
        pytest.skip("torch takes dim 0 of a scalar, a container need not")
    check(eval(f"td.{call}", {"td": holding}), expected, kind)


def test_values_are_joined(holding: Any, kind: Kind) -> None:
    numbers = index_map(kind.batch_size)
    check(torch.stack([holding, holding]), torch.stack([numbers, numbers]), kind)
    check(lazy_stack([holding, holding]), torch.stack([numbers, numbers]), kind)
    if kind.batch_size:
        check(torch.cat([holding, holding], -1), torch.cat([numbers, numbers], -1), kind)


def test_values_survive_copies_and_arithmetic(holding: Any, kind: Kind) -> None:
    numbers = index_map(kind.batch_size)
    for result in (
        holding.copy(),
        holding.to_tensordict(),
        copy.deepcopy(holding),
        pickle.loads(pickle.dumps(holding)),
        holding.float() + 1,
        holding + 1,
        holding.clone(),
        holding.apply(lambda leaf: leaf),
        holding.to("cpu"),
        tree_map(lambda leaf: leaf, holding),
    ):
        check(result, numbers, kind)


def test_values_are_assigned_to_parts(holding: Any, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("needs a batch dim")
    if kind.locked:
        holding.lock_()
    holding[0] = {"x": "first", "one": "first"}
    expected = index_map(kind.batch_size).tolist()
    for key in ("x", "one"):
        values = holder_of(holding, key).tolist()
        assert set(flat(values[0])) == {"first"}
        rest = flat(values[1:])
        assert rest == ([TEXT] * len(rest) if key == "x" else [str(n) for n in flat(expected[1:])])
        assert holder_of(holding, key).is_locked is kind.locked
    assert set(flat(holding[0]["x"])) == {"first"} and set(flat(holding[1]["x"])) == {TEXT}


def test_a_number_that_is_assigned_to_a_value_stays_a_value(holding: Any, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("needs a batch dim")
    holding[0] = {"x": 7}
    holding.set_at_("one", 8, 0)
    for key, number in (("x", 7), ("one", 8)):
        values = holder_of(holding, key).tolist()
        assert {(type(value), value) for value in flat(values[0])} == {(int, number)}
        assert all(type(value) is str for value in flat(values[1:]))


@pytest.mark.parametrize("index", [torch.tensor(False), False, slice(0, 0)], ids=str)
def test_an_index_that_selects_nothing_leaves_values_as_they_are(holding: Any, kind: Kind, index: Any) -> None:
    if not kind.batch_size and isinstance(index, slice):
        pytest.skip("no batch dims to slice")
    before = copy.deepcopy(holding["x"])
    holding.set_at_("x", "other", index)
    assert holding["x"] == before


@pytest.mark.parametrize("nested", [False, True])
def test_shifted_values_are_the_same_as_their_copy(nested: bool) -> None:
    """The values are read before the first of them is replaced."""
    stacks = NonTensorStack("a", "b", "c"), lazy_stack([TensorDict(x=f"{letter}") for letter in "abc"])
    for td in (TensorDict(x=stacks[0], batch_size=[3]), stacks[1]):
        parent = TensorDict(n=td, batch_size=[3]) if nested else td
        parent[1:] = parent[:-1]
        assert list(td["x"]) == ["a", "a", "b"]
        td[:-1].update_(td[1:])
        assert list(td["x"]) == ["a", "b", "b"]


def test_values_are_updated(holding: Any, kind: Kind) -> None:
    for number, write in enumerate(
        (
            lambda value: holding.update({"x": value}),
            lambda value: holding.set_("x", value),
            lambda value: holding.update_({"x": value}),
            lambda value: holding.set("x", value),
        )
    ):
        value: Any = object() if kind.any_values else f"value {number}"
        write(value)
        assert all(
            item is value or (item == value and not kind.any_values) for item in flat(holder_of(holding, "x").tolist())
        )
    assert holding.pop("x") is not None and "x" not in holding


def test_equality_looks_at_values(holding: Any, kind: Kind) -> None:
    assert (holding == holding.clone()).all()
    other = holding.clone()
    other["x"] = "another"
    assert not (holding == other).all()
    assert not (holding == other)["x"].any()


def test_unbatched_tensors_pass_through(writable: Any, plain: Plain, kind: Kind) -> None:
    own = torch.arange(7)
    if not kind.any_values:
        with pytest.raises(RuntimeError, match="'x'.*UnbatchedTensor"):
            writable["x"] = UnbatchedTensor(own)
        return
    writable["x"] = UnbatchedTensor(own)
    results = [writable, writable.clone(), writable + 0, torch.stack([writable, writable]), writable.unsqueeze(0)]
    if kind.batch_size:
        results += [writable[0], writable[-1:], writable.reshape(-1), *writable.unbind(0), *writable.split(1)]
    for result in results:
        assert type(result["x"]) is UnbatchedTensor
        assert torch.equal(result["x"].as_subclass(torch.Tensor), own)
        assert result["x"].batch_size == result.batch_size
        assert "x" in list(result.keys(True, True))


def test_a_stack_of_values_is_a_lazy_stack(holding: Any, kind: Kind) -> None:
    if kind.batch_size:
        assert type(holder_of(holding, "one")) is NonTensorStack
        assert isinstance(holder_of(holding, "one"), LazyStackedTensorDict)
