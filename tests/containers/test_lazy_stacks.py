"""Lazy stacks: members that differ, forms of reading them, and writes that reach each member.

`contract/` tests the behaviour that they share with every container.
"""

from __future__ import annotations

import copy
import math
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    lazy_stack,
    maybe_dense_stack,
    set_list_to_stack,
)

# Torch says of its nested tensors, once, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def member(i: int, width: int | None = None) -> TensorDict:
    """A container of batch size [3] whose entry "a" is as wide as told, and whose values say which one it is."""
    ramp = torch.arange(3.0) + 10 * i
    wide = ramp[:, None].repeat(1, 2 + i if width is None else width)
    return TensorDict({"a": wide, "n": {"x": ramp.clone()}, f"only{i}": ramp.clone()}, [3])


@pytest.fixture
def members() -> list[TensorDict]:
    return [member(i) for i in range(3)]


@pytest.fixture(params=[0, 1], ids=["dim0", "dim1"])
def stack(request: pytest.FixtureRequest, members: list[TensorDict]) -> Any:
    """Members of unequal leaf shapes, each with a key of its own."""
    return LazyStackedTensorDict(*members, stack_dim=request.param)


def element(stack: Any, position: tuple[int, int]) -> TensorDict:
    """The element at a position of the batch, read from the member that holds it."""
    dim = stack.stack_dim
    return stack.tensordicts[position[dim]][position[1 - dim]]


# --- construction -----------------------------------------------------------------------------------------------------


def test_keeps_its_members(stack: Any, members: list[TensorDict]) -> None:
    assert all(a is b for a, b in zip(stack.tensordicts, members, strict=True))
    assert stack.batch_size == torch.Size([3, 3])
    assert list(stack.keys()) == ["a", "n"] == list(stack.valid_keys())
    assert set(stack.keys(True, True)) == {"a", ("n", "x")}
    assert "a" in stack and ("n", "x") in stack and "only0" not in stack and ("n", "y") not in stack
    with pytest.raises(KeyError, match=r"only in \[1\]"):
        stack["only1"]


def test_bad_members() -> None:
    with pytest.raises(TypeError, match="Tensor at position 1"):
        LazyStackedTensorDict(TensorDict(), torch.zeros(2))
    with pytest.raises(TypeError, match="one by one"):
        LazyStackedTensorDict([TensorDict()])
    with pytest.raises(RuntimeError, match="position 1"):
        LazyStackedTensorDict(TensorDict({}, [3]), TensorDict({}, []))
    with pytest.raises(RuntimeError, match="strict_shape"):
        LazyStackedTensorDict(TensorDict({}, [3]), TensorDict({}, [4]), strict_shape=True)
    with pytest.raises(IndexError, match="dim 3"):
        LazyStackedTensorDict(TensorDict({}, [3]), stack_dim=3)
    with pytest.raises(RuntimeError, match=r"\[2, 3\]"):
        LazyStackedTensorDict(TensorDict({}, [3]), batch_size=[2, 3])
    with pytest.raises(RuntimeError, match="at least one"):
        lazy_stack([])


def test_sizes_names_and_devices() -> None:
    uneven = LazyStackedTensorDict(TensorDict({}, [3, 2]), TensorDict({}, [4, 2]))
    assert uneven.batch_size == torch.Size([2, -1, 2])
    named = LazyStackedTensorDict(member(0), member(1), stack_dim=-1, stack_dim_name="env")
    assert named.stack_dim == 1 and named.names == [None, "env"]
    named.names = ["time", "env"]
    assert named.tensordicts[0].names == ["time"] and named[:, 0].names == ["time"] and named["n"].names == named.names
    mixed = LazyStackedTensorDict(
        TensorDict(a=torch.zeros(2), device="cpu"), TensorDict(a=torch.zeros(2), device="meta")
    )
    assert mixed.device is None and [leaf.device.type for leaf in mixed.get("a", as_list=True)] == ["cpu", "meta"]
    with pytest.raises(RuntimeError, match="'a' is on different devices.*cpu, meta"):
        mixed["a"]
    mixed["b"] = torch.ones(2, 3)
    assert [m["b"].device.type for m in mixed.tensordicts] == ["cpu", "meta"]
    assert LazyStackedTensorDict(TensorDict(a=torch.zeros(2)), device="meta")["a"].device.type == "meta"


# --- reading ----------------------------------------------------------------------------------------------------------


def test_unequal_leaves_say_how_to_read_them(stack: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"'a' has different shapes.*\[3, 2\], \[3, 3\], \[3, 4\].*as_list=True.*nested.*padded"
    ):
        stack["a"]
    assert [leaf is m["a"] for leaf, m in zip(stack.get("a", as_list=True), stack.tensordicts, strict=True)] == [
        True
    ] * 3
    assert torch.equal(stack["n", "x"], torch.stack([m["n", "x"] for m in stack.tensordicts], stack.stack_dim))
    nested = lazy_stack([TensorDict(n=TensorDict(y=torch.zeros(i))) for i in range(2)])
    with pytest.raises(RuntimeError, match=r"\('n', 'y'\)"):
        nested["n", "y"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(stack: Any, side: str) -> None:
    padded = stack.get("a", as_padded_tensor=True, padding_side=side, padding_value=-1)
    assert padded.shape == (3, 3, 4)
    for i, leaf in enumerate(stack.get("a", as_list=True)):
        row = padded.select(stack.stack_dim, i)
        width = leaf.shape[1]
        kept, filled = (
            (row[:, 4 - width :], row[:, : 4 - width]) if side == "left" else (row[:, :width], row[:, width:])
        )
        assert torch.equal(kept, leaf) and (filled == -1).all()
    with pytest.raises(ValueError, match="padding_side"):
        stack.get("a", as_padded_tensor=True, padding_side="up")


def test_ellipsis_gives_a_new_stack_of_the_same_members(stack: Any) -> None:
    other = stack[...]
    assert other is not stack and isinstance(other, LazyStackedTensorDict)
    assert all(one is member for one, member in zip(other.tensordicts, stack.tensordicts, strict=True))


def test_padding_of_several_dims() -> None:
    stack = lazy_stack([TensorDict(a=torch.ones(1, 3)), TensorDict(a=torch.ones(2, 2))])
    expected = torch.tensor([[[1.0, 1, 1], [0, 0, 0]], [[1, 1, 0], [1, 1, 0]]])
    assert torch.equal(stack.get("a", as_padded_tensor=True), expected)
    with pytest.raises(RuntimeError, match=r"'a' has the shapes.*differ in one dim"):
        stack.get("a", as_nested_tensor=True)
    odd = lazy_stack([TensorDict(a=torch.ones(1)), TensorDict(a=torch.ones(2, 2))])
    with pytest.raises(RuntimeError, match="different numbers of dims"):
        odd.get("a", as_padded_tensor=True)


def test_nested_tensors_carry_gradients(members: list[TensorDict]) -> None:
    stack = lazy_stack(members).requires_grad_()
    ragged = stack.get("a", as_nested_tensor=True)
    assert ragged.layout is torch.jagged and ragged.offsets().tolist() == [0, 2, 5, 9]
    assert torch.equal(ragged.unbind()[1], members[1]["a"])
    ragged.values().sum().backward()
    assert all((m["a"].grad == 1).all() for m in stack.tensordicts)
    assert stack.get_nestedtensor("a", layout=torch.jagged).shape[:2] == (3, 3)
    filled = stack.get_nestedtensor("only0", torch.zeros(1), layout=torch.jagged)
    assert [row.shape[0] for row in filled.unbind()] == [3, 1, 1]
    assert stack.get_nestedtensor("only0", "none") == "none"
    with pytest.raises(KeyError, match="only0"):
        stack.get_nestedtensor("only0")
    with pytest.raises(RuntimeError, match="along dim 0"):
        lazy_stack(members, 1).get("a", as_nested_tensor=True)


def test_forms_of_what_is_missing_or_nested(stack: Any) -> None:
    assert stack.get("only0", as_list=True) is None
    assert stack.get(("n", "none"), 5, as_padded_tensor=True) == 5
    assert isinstance(stack.get("n", as_list=True), LazyStackedTensorDict)
    assert len(stack.get(("n", "x"), as_list=True)) == 3
    with pytest.raises(ValueError, match="one of"):
        stack.get("a", as_list=True, as_padded_tensor=True)
    twice = lazy_stack([stack, stack])
    assert [len(row) for row in twice.get("a", as_list=True)] == [3, 3]


def test_looking_around_reads_nothing(stack: Any) -> None:
    assert stack.get_item_shape("a") == torch.Size([3, 3, -1])
    assert stack.entry_class("n") is LazyStackedTensorDict and issubclass(stack.entry_class("a"), torch.Tensor)
    assert stack.depth == 1 and not stack.is_empty() and len(stack.keys(True)) == 3
    assert stack.bytes() == sum(m.bytes() for m in stack.tensordicts)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_writing_splits(stack: Any) -> None:
    value = torch.arange(9.0).view(3, 3)
    stack["n", "new", "y"] = value
    stack["b"] = TensorDict({"c": value}, [3, 3])
    for i, m in enumerate(stack.tensordicts):
        assert torch.equal(m["n", "new", "y"], value.select(stack.stack_dim, i))
        assert torch.equal(m["b", "c"], value.select(stack.stack_dim, i))
    del stack["b"]
    assert not any("b" in m for m in stack.tensordicts)
    with pytest.raises(RuntimeError, match="'bad' has shape"):
        stack["bad"] = torch.zeros(3, 2)


def test_lists_may_be_ragged(members: list[TensorDict]) -> None:
    first, second = lazy_stack(members), lazy_stack([m.copy() for m in members], 1)
    first["r"] = [torch.zeros(3, i) for i in range(3)]
    assert [leaf.shape[1] for leaf in first.get("r", as_list=True)] == [0, 1, 2]
    second["r"] = [[10 * row + column for column in range(3)] for row in range(3)]
    assert torch.equal(second["r"], torch.tensor([[0, 1, 2], [10, 11, 12], [20, 21, 22]]))
    before = [set(m.keys()) for m in members]
    with pytest.raises(RuntimeError, match="'s'.*3 items"):
        first["s"] = [1, 2]
    with pytest.raises(RuntimeError, match="'s'"):
        first["s"] = [torch.zeros(3), torch.zeros(3), torch.zeros(2)]
    assert [set(m.keys()) for m in members] == before


def test_nested_entries_that_some_members_lack_are_kept() -> None:
    stack = lazy_stack([TensorDict(n=TensorDict(own=torch.ones(()))), TensorDict()])
    stack["n", "x"] = torch.arange(2)
    assert set(stack[0]["n"].keys()) == {"own", "x"} and set(stack[1]["n"].keys()) == {"x"}
    dense = TensorDict({"deep": lazy_stack([TensorDict(n=TensorDict(own=torch.ones(()))), TensorDict()])}, [2])
    dense["deep", "n", "x"] = torch.arange(2)
    assert "own" in dense["deep"][0]["n"] and dense["deep", "n", "x"].tolist() == [0, 1]
    tensor_in_the_way = lazy_stack([TensorDict(), TensorDict(n=torch.zeros(()))])
    with pytest.raises(KeyError, match="'n'.*tensor"):
        tensor_in_the_way["n", "x"] = torch.zeros(2)
    assert list(tensor_in_the_way[0].keys()) == []


def test_in_place_writes_reach_the_members(stack: Any) -> None:
    memory = [m["n", "x"].data_ptr() for m in stack.tensordicts]
    value = torch.arange(9.0).view(3, 3)
    stack.set_(("n", "x"), value)
    assert torch.equal(stack["n", "x"], value)
    stack["n"].set_("x", value + 1)
    stack.update_({"n": {"x": value + 2}})
    stack.update({"n": {"x": value + 3}}, inplace=True)
    assert torch.equal(stack["n", "x"], value + 3)
    stack.set_at_(("n", "x"), 7.0, (slice(None), 1))
    assert (stack["n", "x"][:, 1] == 7).all()
    stack.fill_(("n", "x"), 1).apply_(lambda leaf: leaf + 1)
    assert (stack["n", "x"] == 2).all() and not (stack.zero_()["n", "x"]).any()
    assert [m["n", "x"].data_ptr() for m in stack.tensordicts] == memory
    for key in ("none", "only0"):
        with pytest.raises(KeyError, match=key):
            stack.set_(key, value)


def test_update_from_another_stack(stack: Any) -> None:
    other = stack.clone().apply(lambda leaf: -leaf - 1)
    stack.update_(other)
    assert_close(stack, other)
    dense = TensorDict({"n": {"x": torch.zeros(3, 3)}, "q": torch.ones(3, 3)}, [3, 3])
    stack.update(dense)
    assert torch.equal(stack["q"], dense["q"]) and not stack["n", "x"].any()
    assert "only1" in stack.tensordicts[1]


@pytest.mark.parametrize("dim", [0, 1])
def test_one_row_updates_all_members(dim: int) -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(4, 3), batch_size=[4]) for _ in range(2)], dim)
    row = torch.arange(12.0).reshape(4, 3).unsqueeze(dim)
    for written in (stack.update_({"a": row}), stack.zero_().copy_(TensorDict(a=row, batch_size=row.shape[:2]))):
        assert (written["a"] == row).all()


def test_a_value_with_the_last_batch_dims_only_updates_all_members() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(2), batch_size=[2]) for _ in range(3)])
    stack.update_({"a": torch.arange(2)})
    assert stack["a"].tolist() == [[0.0, 1.0]] * 3
    with pytest.raises(RuntimeError, match="begin with the batch size"):
        lazy_stack([TensorDict(a=torch.zeros(2), batch_size=[2])] * 3, 1).update_({"a": torch.arange(2)})


def test_a_failing_update_changes_nothing(stack: Any) -> None:
    before = stack.clone()
    good = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="bad"):
        stack.update({"n": {"x": good}, "bad": torch.zeros(2)})
    with pytest.raises(KeyError, match="absent"):
        stack.update_({"n": {"absent": good}, "absent": good})
    with pytest.raises(RuntimeError, match="'a'"):
        stack[0] = {"n": {"x": torch.zeros(3)}, "a": torch.zeros(3, 9)}
    assert_close(stack, before)


# --- indexing ---------------------------------------------------------------------------------------------------------

INDICES = [
    0, -1, slice(None), slice(1, None), slice(0, 3, 2), slice(0, 0), (1, 2), (slice(None), 0),
    (slice(1, 3), slice(0, 2)), (0, slice(1, 3)),
    None, (None, 0), (slice(None), None, 1), ..., (..., 1), (1, ...), [0, 2], [True, False, True],
    torch.tensor([2, 0, 2]), torch.tensor([[0, 1], [2, 2]]), torch.tensor(1), (slice(None), torch.tensor([1, 0])),
    (torch.tensor([0, 1]), torch.tensor([2, 2])), (torch.tensor([0, 1]), 1), (1, torch.tensor([0, 1])),
    (None, torch.tensor([0, 1])), (slice(None), torch.tensor([[1, 0]])), torch.eye(3, dtype=torch.bool),
    (slice(0, 2), torch.tensor([True, False, True])), range(2), ([0, 1], None, [1, 2]),
]  # fmt: skip


def check_elements(result: Any, stack: Any, numbers: torch.Tensor) -> None:
    """The result has at each position the element of that number, with the width that it has in its member."""
    assert result.batch_size == numbers.shape
    for at in (
        torch.cartesian_prod(*map(torch.arange, numbers.shape)).view(-1, numbers.ndim).tolist()
        if numbers.ndim
        else [[]]
    ):
        number = int(numbers[tuple(at)])
        found = result[tuple(at)] if at else result
        assert_close(found.exclude("only0", "only1", "only2"), element(stack, divmod(number, 3)).select("a", "n"))


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_every_index_on_unequal_shapes(stack: Any, index: Any) -> None:
    numbers = torch.arange(9).view(3, 3)[index]
    if numbers.numel():
        check_elements(stack[index], stack, numbers)
    else:
        assert stack[index].batch_size == numbers.shape


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_assignment_on_every_index(stack: Any, index: Any) -> None:
    expected = torch.arange(9.0).view(3, 3)
    stack["v"] = expected.clone()
    part = expected[index]
    values = torch.arange(part.numel()).view(part.shape) + 100.0
    stack[index] = TensorDict({"v": values}, part.shape)
    expected[index] = values
    assert torch.equal(stack["v"], expected)
    stack[index] = {"v": values + 5}
    expected[index] = values + 5
    assert torch.equal(stack["v"], expected)
    stack.select("v", "n")[index] = 3
    expected[index] = 3
    assert torch.equal(stack["v"], expected) and torch.equal(stack["n", "x"][index], torch.full_like(part, 3))


@pytest.mark.parametrize("shapes", [((3,), ()), ((2,), (3,)), ((2, 2), (2, 3))], ids=str)
@pytest.mark.parametrize("index", [slice(0, 1), [0], torch.tensor([True, False])], ids=str)
def test_assigning_a_member_to_a_part_of_an_uneven_stack(shapes: Any, index: Any) -> None:
    stack = lazy_stack([TensorDict(b=torch.zeros(shape)) for shape in shapes])
    stack[index] = TensorDict(b=torch.ones(shapes[0]))
    assert stack[0]["b"].tolist() == torch.ones(shapes[0]).tolist() and not stack[1]["b"].any()


def test_assigning_one_number_for_each_member_of_an_uneven_stack() -> None:
    stack = lazy_stack([TensorDict(b=torch.zeros(())), TensorDict(b=torch.zeros(1))])
    stack[:] = torch.tensor([1.0, 2.0])
    assert stack[0]["b"].tolist() == 1 and stack[1]["b"].tolist() == [2]


@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (1,), ()])
def test_assigning_a_tensor_to_an_uneven_stack_with_batches_broadcasts_it(shape: Any) -> None:
    stack = lazy_stack([TensorDict(b=torch.zeros(2, size), batch_size=[2]) for size in (2, 3)])
    value = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    stack[:] = value
    for size in (2, 3):
        assert stack[size - 2]["b"].tolist() == value.expand(2, size).tolist()


def test_assigning_what_does_not_fit_an_uneven_stack_changes_nothing() -> None:
    stack = lazy_stack([TensorDict(b=torch.zeros(2)), TensorDict(b=torch.zeros(3))])
    with pytest.raises(ValueError, match=r"entry 'b': a value of shape \[2\] does not broadcast to \[3\]"):
        stack[:2] = TensorDict(b=torch.ones(2))
    assert not stack[0]["b"].any() and not stack[1]["b"].any()


def test_members_and_views(members: list[TensorDict]) -> None:
    stack = lazy_stack(members)
    assert stack[1] is members[1] and stack[1:][0] is members[1] and stack.unbind(0)[2] is members[2]
    assert next(iter(stack)) is members[0]
    column = stack[:, 1]
    assert column.stack_dim == 0 and column["n", "x"].tolist() == [1, 11, 21]
    column.zero_()
    assert [m["n", "x"][1] for m in members] == [0, 0, 0] and not members[2]["a"][1].any()
    stack[2]["fresh"] = torch.zeros(3)
    assert "fresh" in members[2] and "fresh" not in stack
    for bad in (3, -4, (0, 3), torch.tensor([3]), [0, 5]):
        with pytest.raises(IndexError):
            stack[bad]


def test_assignment_to_members_in_files_is_written_there(tmp_path: pathlib.Path) -> None:
    rows = [TensorDict(a=torch.zeros(4, 2), batch_size=[4]).to_h5(tmp_path / f"{at}.h5") for at in range(3)]
    stack, plain = lazy_stack(list(rows)), torch.zeros(3, 4, 2)
    for value, index in enumerate(
        [torch.arange(12).view(3, 4) % 5 == 0, ([0, 1], [1, 2]), (torch.tensor([True, False, True]), [0, 1])], 1
    ):
        plain[index] = value
        stack[index] = TensorDict(a=torch.full_like(plain[index], value), batch_size=plain[index].shape[:-1])
        assert torch.equal(torch.stack([row["a"] for row in rows]), plain)
    for row in rows:
        row.close()


def test_assignment_allocates(members: list[TensorDict]) -> None:
    stack = lazy_stack(members)
    stack[:, 1] = {"fresh": torch.ones(3, 2)}
    assert torch.equal(stack["fresh"].sum((0, 2)), torch.tensor([0.0, 6, 0]))
    stack.lock_()
    with pytest.raises(RuntimeError, match="lock"):
        stack[0] = {"more": torch.ones(3)}
    stack[0] = {"fresh": torch.zeros(3, 2)}
    assert not stack[0]["fresh"].any()


# --- shapes -----------------------------------------------------------------------------------------------------------

SHAPES = [
    "permute(1, 0)", "transpose(0, 1)", "unsqueeze(0)", "unsqueeze(1)", "unsqueeze(-1)", "view(-1)", "view(3, 3, 1)",
    "view(1, 9)", "reshape(9, 1)", "flatten()", "unflatten(0, (3, 1))", "unflatten(1, (1, 3))", "expand(2, 3, 3)",
    "flip(0)", "flip((0, 1))", "narrow(0, 1, 2)", "narrow(1, 0, 1)", "roll(1, 0)", "roll((1, 2), (0, 1))",
    "repeat_interleave(2, 0)", "repeat_interleave(2, 1)", "movedim(0, 1)", "repeat(2, 1)", "repeat(1, 2)",
]  # fmt: skip


@pytest.mark.parametrize("call", SHAPES)
def test_shapes_of_unequal_leaves(stack: Any, call: str) -> None:
    numbers = eval(f"x.{call}", {"x": torch.arange(9).view(3, 3)})
    result = eval(f"x.{call}", {"x": stack})
    assert isinstance(result, LazyStackedTensorDict)
    check_elements(result, stack, numbers)


@pytest.mark.parametrize("dim", [0, 1])
def test_cutting_unequal_leaves(stack: Any, dim: int) -> None:
    numbers = torch.arange(9).view(3, 3)
    for cut in ("unbind(dim)", "split(2, dim)", "split([1, 2], dim)", "chunk(2, dim)", "tensor_split(2, dim)"):
        pieces, expected = (eval(f"x.{cut}", {"x": x, "dim": dim}) for x in (stack, numbers))
        assert len(pieces) == len(expected)
        for piece, part in zip(pieces, expected, strict=True):
            check_elements(piece, stack, part)


def test_squeeze_gives_the_only_member() -> None:
    stack = lazy_stack([member(0)])
    assert type(stack.squeeze(0)) is TensorDict and stack.squeeze().batch_size == torch.Size([3])
    assert stack.unsqueeze(0).squeeze().batch_size == torch.Size([3])
    assert stack.expand(4, 3)["n", "x"].shape == (4, 3)


def test_blocks_write_to_the_members(stack: Any) -> None:
    for call in ("view(-1)", "permute(1, 0)", "unsqueeze(0)", "flatten_keys()", "flatten()"):
        with eval(f"x.{call}", {"x": stack}) as other:
            other["new"] = torch.arange(9.0).view(other.batch_size)
        expected = torch.arange(9.0).view(3, 3)
        assert torch.equal(stack["new"], expected.T if call.startswith("permute") else expected)
        del stack["new"]
    assert [m["a"].shape[1] for m in stack.tensordicts] == [2, 3, 4]


# --- operations -------------------------------------------------------------------------------------------------------


def test_operations_stay_lazy(stack: Any) -> None:
    for result in (
        stack.clone(), stack.copy(), stack.apply(lambda x: x), stack.to(torch.float64), stack.to("cpu"), stack == stack,
        stack.select("a"), stack.exclude("n"), stack.empty(), stack.detach(), torch.zeros_like(stack),
        stack.flatten_keys(),
        stack.where(torch.ones(3, 3, dtype=torch.bool), 0), stack.masked_fill(torch.eye(3, dtype=torch.bool), 0),
        stack == torch.zeros(3, 3), stack < 3, copy.deepcopy(stack), pickle.loads(pickle.dumps(stack)),
        pytree.tree_map(lambda x: x + 1, stack),
    ):  # fmt: skip
        assert isinstance(result, LazyStackedTensorDict)
        assert result.batch_size == stack.batch_size and result.stack_dim == stack.stack_dim
    assert (stack == stack.clone()).all() and stack.to("cpu").device == torch.device("cpu")
    assert [list(m.keys()) for m in stack.select("only0", "a", strict=False).tensordicts] == [
        ["only0", "a"],
        ["a"],
        ["a"],
    ]
    assert [list(m.keys()) for m in stack.exclude("only0", "a").tensordicts] == [["n"], ["n", "only1"], ["n", "only2"]]


def test_tensors_meet_the_batch(stack: Any) -> None:
    mask = torch.eye(3, dtype=torch.bool)
    filled = stack.masked_fill(mask, -1.0)
    assert torch.equal(filled["n", "x"] == -1, mask)
    for position, widths in (((0, 0), 2), ((1, 1), 3), ((2, 2), 4)):
        assert (element(filled, position)["a"] == torch.full((widths,), -1.0)).all()
    kept = stack.where(mask, stack.apply(lambda x: x * 0 - 5))
    assert torch.equal(kept["n", "x"], torch.where(mask, stack["n", "x"], torch.tensor(-5.0)))
    stack.masked_fill_(mask, 99.0)
    assert (stack["n", "x"].diagonal() == 99).all()


def test_apply_with_others_and_a_new_batch_size(stack: Any) -> None:
    doubled = stack.apply(lambda x, y: x + y, stack)
    assert torch.equal(doubled["n", "x"], 2 * stack["n", "x"])
    with pytest.raises(RuntimeError, match="'a'"):
        stack.apply(lambda x: x.sum(1), batch_size=[3])
    reduced = stack.select("n").apply(lambda x: x.sum(1), batch_size=[3])
    assert torch.equal(reduced["n", "x"], stack["n", "x"].sum(1))
    assert stack.apply(lambda x: None) is None


def test_stacks_of_stacks(stack: Any) -> None:
    other = stack.apply(lambda x: -x)
    for dim in range(3):
        joint = torch.stack([stack, other], dim)
        assert isinstance(joint, LazyStackedTensorDict)
        assert torch.equal(joint["n", "x"], torch.stack([stack["n", "x"], other["n", "x"]], dim))
    for dim in range(2):
        joint = torch.cat([stack, other], dim)
        assert torch.equal(joint["n", "x"], torch.cat([stack["n", "x"], other["n", "x"]], dim))
    dense = stack.select("n").to_tensordict()
    assert torch.equal(torch.stack([dense, stack.select("n")])["n", "x"][1], stack["n", "x"])
    out = lazy_stack([dense.clone(), dense.clone()]).zero_()
    assert torch.stack([dense, dense], out=out) is out and torch.equal(out[1]["n", "x"], dense["n", "x"])


def test_a_lazy_stack_inside_a_dense_container(members: list[TensorDict]) -> None:
    td = TensorDict({"deep": lazy_stack(members), "t": torch.zeros(3, 3)}, [3])
    assert td[1]["deep"] is members[1] and isinstance(td[:2]["deep"], LazyStackedTensorDict)
    for result in (td.unsqueeze(0), td.clone(), td.expand(2, 3), td.flip(0), td.split(2)[0], td.apply(lambda x: x)):
        assert isinstance(result["deep"], LazyStackedTensorDict)
    td[1] = {"deep": {"n": {"x": torch.full((3,), 5.0)}}}
    assert (members[1]["n", "x"] == 5).all()
    td[:,] = 0
    assert not members[2]["a"].any()
    assert td.set_(("deep", "n", "x"), torch.ones(3, 3)) is td and (members[0]["n", "x"] == 1).all()
    assert isinstance(td.memmap()["deep"], LazyStackedTensorDict)


# --- members come and go ----------------------------------------------------------------------------------------------


def test_append_insert_extend() -> None:
    stack = LazyStackedTensorDict(member(0), stack_dim=1)
    stack.append(member(2))
    stack.insert(1, member(1))
    stack.extend([member(3), member(4)])
    assert stack.batch_size == torch.Size([3, 5]) and stack["n", "x"][0].tolist() == [0, 10, 20, 30, 40]
    for bad in (TensorDict({}, [4]), TensorDict({}, [])):
        with pytest.raises(RuntimeError, match=r"\[3\]"):
            stack.extend([member(5), bad])
    with pytest.raises(TypeError, match="Tensor"):
        stack.append(torch.zeros(3))
    assert len(stack.tensordicts) == 5
    stack.lock_()
    for call in (
        lambda: stack.append(member(5)),
        lambda: stack.insert(0, member(5)),
        lambda: stack.extend([member(5)]),
    ):
        with pytest.raises(RuntimeError, match="lock"):
            call()


def test_stacks_without_members() -> None:
    empty = LazyStackedTensorDict()
    assert (
        empty.batch_size == torch.Size([0]) and len(empty) == 0 and list(empty.keys()) == [] and empty.unbind(0) == ()
    )
    assert LazyStackedTensorDict(batch_size=[3], stack_dim=1).batch_size == torch.Size([3, 0])
    assert empty.clone().batch_size == torch.Size([0]) and "LazyStackedTensorDict" in repr(empty)
    with pytest.raises(IndexError):
        empty[0]
    with pytest.raises(KeyError, match='key "a" not found'):
        empty["a"]
    empty.append(member(0))
    assert empty.batch_size == torch.Size([1, 3])


def test_an_empty_cut_remembers_its_entries(members: list[TensorDict]) -> None:
    none = lazy_stack(members)[:0]
    assert isinstance(none, LazyStackedTensorDict) and none.batch_size == torch.Size([0, 3])
    assert none["n", "x"].shape == (0, 3) and none["a"].shape == (0, 3, 2)
    assert none.to_tensordict().batch_size == torch.Size([0, 3]) and none.unsqueeze(0).batch_size == torch.Size(
        [1, 0, 3]
    )
    none["q"] = torch.zeros(0, 3, 5)
    assert none["q"].shape == (0, 3, 5) and "q" not in members[0]
    none.append(members[1])
    assert none["a"].shape == (1, 3, 3)
    with pytest.raises(RuntimeError, match=r"\[3\]"):
        lazy_stack(members)[:0].append(TensorDict({}, [4]))


# --- locks, hooks, forms ----------------------------------------------------------------------------------------------


def test_an_unpickled_locked_stack_holds_its_members() -> None:
    stack = pickle.loads(pickle.dumps(lazy_stack([TensorDict(a=torch.zeros(2)) for _ in range(2)]).lock_()))
    with pytest.raises(RuntimeError, match="locked"):
        stack.tensordicts[0].unlock_()
    stack.unlock_()
    stack.tensordicts[0].lock_().unlock_()


def test_pieces_of_a_locked_stack_do_not_keep_it_locked() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(2)) for _ in range(2)]).lock_()
    pieces = [*stack.split(1), *stack.chunk(1)]
    assert all(piece.is_locked for piece in pieces)
    assert not stack.unlock_().is_locked
    stack["b"] = torch.zeros(2)


def test_locks_hold_the_members(members: list[TensorDict]) -> None:
    stack = lazy_stack(members).lock_()
    assert all(m.is_locked for m in members) and stack["n"].is_locked
    for held in (members[0], stack["n"], members[1]["n"]):
        with pytest.raises(RuntimeError, match="outermost"):
            held.unlock_()
    with pytest.raises(RuntimeError, match="lock"):
        stack["n"]["y"] = torch.zeros(3, 3)
    stack.unlock_()
    assert not any(m.is_locked for m in members)
    members[1].lock_()
    assert not stack.is_locked
    with pytest.raises(RuntimeError, match="lock"):
        stack["y"] = torch.zeros(3, 3)
    assert "y" not in members[0]
    assert lazy_stack([member(0).lock_(), member(1).lock_()]).is_locked
    with stack.lock_():
        assert stack.is_locked
    assert pickle.loads(pickle.dumps(stack.lock_())).is_locked


def test_hooks() -> None:
    stack = LazyStackedTensorDict(member(0, 2), member(1, 2), hook_out=lambda x: x + 1, hook_in=lambda x: x * 2)
    plain = torch.stack([m["a"] for m in stack.tensordicts])
    assert torch.equal(stack["a"], plain + 1) and torch.equal(stack.to_tensordict()["a"], plain + 1)
    stack["b"] = torch.ones(2, 3)
    assert (stack[0]["b"] == 2).all() and (stack["b"] == 3).all() and (stack.clone()["b"] == 3).all()
    odd = LazyStackedTensorDict(member(0), member(1), hook_in=lambda x: x[:1])
    with pytest.raises(RuntimeError, match="1 pieces for the 2 members"):
        odd["b"] = torch.ones(2, 3)
    assert "b" not in odd[0]


def test_dense_where_possible() -> None:
    equal, unequal = [member(0, 2), member(0, 2)], [member(0), member(1)]
    assert type(maybe_dense_stack(equal)) is TensorDict and maybe_dense_stack(equal, 1).batch_size == torch.Size([3, 2])
    assert isinstance(maybe_dense_stack(unequal), LazyStackedTensorDict)
    inner_odd = [member(0, 2), member(1, 3), member(0, 2)]
    assert isinstance(TensorDict.maybe_dense_stack(inner_odd), LazyStackedTensorDict)
    with pytest.raises(IndexError):
        maybe_dense_stack(equal, 7)
    with pytest.raises(RuntimeError, match="at least one"):
        maybe_dense_stack([])
    assert torch.equal(lazy_stack([torch.zeros(2), torch.ones(2)]), torch.stack([torch.zeros(2), torch.ones(2)]))
    out = TensorDict({"n": {"x": torch.zeros(2, 3)}, "a": torch.zeros(2, 3, 2), "only0": torch.zeros(2, 3)}, [2, 3])
    assert lazy_stack(equal, out=out) is out and torch.equal(out["n", "x"][1], equal[1]["n", "x"])


def test_densify_and_to_lazystack() -> None:
    rows = [TensorDict(a=torch.ones(i + 1), n=TensorDict(b=torch.ones(2))) for i in range(2)]
    rows[1]["n", "c"] = torch.ones(4)
    dense = lazy_stack(rows).densify(torch.jagged)
    assert type(dense) is TensorDict and type(dense["n"]) is TensorDict and dense["n", "b"].shape == (2, 2)
    assert dense["a"].offsets().tolist() == [0, 1, 3] and dense["n", "c"].offsets().tolist() == [0, 0, 4]
    rows[0]["scalar"] = torch.ones(())
    with pytest.raises(RuntimeError, match="'scalar' is missing"):
        lazy_stack(rows).densify()
    stack = TensorDict({"a": torch.arange(6).view(2, 3)}, [2, 3]).to_lazystack(1)
    assert stack.stack_dim == 1 and stack.to_lazystack(1) is stack and stack.to_lazystack(-2).stack_dim == 0
    assert torch.equal(stack.to_lazystack(0)["a"], torch.arange(6).view(2, 3))
    held = TensorDict({"s": stack, "t": torch.zeros(2)}, [2]).densify()
    assert type(held["s"]) is TensorDict


def test_repr_of_unequal_members() -> None:
    text = repr(lazy_stack([member(0), member(1)]))
    assert "a: Tensor(shape=torch.Size([2, 3, -1])" in text and "stack_dim=0)" in text
    assert "    exclusive_fields={\n        0 ->\n            only0: Tensor(shape=torch.Size([3])" in text
    assert "        1 ->\n            only1: Tensor" in text


def test_saving_says_what_to_do(tmp_path: pathlib.Path, members: list[TensorDict]) -> None:
    stack = LazyStackedTensorDict(*members, hook_out=lambda tensor: tensor)
    with pytest.raises(RuntimeError, match=r"'deep'.*hooks.*densify\(\)"):
        TensorDict(deep=stack).memmap(tmp_path)
    assert not list(tmp_path.iterdir())


# --- function transforms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stack_dim", [0, 1])
def test_vmap(dim: int, stack_dim: int) -> None:
    stack = lazy_stack([member(i, 2) for i in range(2)], stack_dim)

    def fn(td: Any) -> Any:
        return td["a"].sum(-1) + td["n", "x"]

    expected = torch.stack([fn(part) for part in stack.unbind(dim)])
    assert torch.equal(torch.vmap(fn, dim)(stack), expected)
    assert torch.equal(torch.vmap(lambda t, td: fn(td) * t, (None, dim))(torch.tensor(2.0), stack), 2 * expected)
    result = torch.vmap(lambda td: td.apply(lambda x: x * 2), dim)(stack)
    assert torch.equal(result["n", "x"], stack["n", "x"].movedim(dim, 0) * 2)
    assert torch.equal(torch.vmap(torch.vmap(lambda td: td["n", "x"] + 1))(stack), stack["n", "x"] + 1)


def test_vmap_of_unequal_leaves(stack: Any) -> None:
    dim = 1 - stack.stack_dim
    result = torch.vmap(lambda td: td.apply(lambda x: x + 1), dim)(stack)
    assert [m["a"].shape for m in result.tensordicts] == [m["a"].shape for m in stack.tensordicts]
    assert torch.equal(result["n", "x"], stack["n", "x"].movedim(dim, 0) + 1)
    with pytest.raises(RuntimeError, match="'a' has different shapes"):
        torch.vmap(lambda td: td["n", "x"], stack.stack_dim)(stack)
    with pytest.raises(RuntimeError, match=r"stack.select\(...\)"):
        torch.vmap(lambda td: td["n", "x"], stack.stack_dim)(stack)
    with pytest.raises(ValueError, match="in_dim=2"):
        torch.vmap(lambda td: td["n", "x"], 2)(stack)


@pytest.mark.parametrize("stack_dim", [0, 1, 2])
@pytest.mark.parametrize("in_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("out_dim", [0, 1, 2])
@pytest.mark.parametrize("nested", [False, True], ids=["itself", "in a container"])
def test_vmap_puts_the_mapped_dim_where_it_is_asked_for(
    stack_dim: int, in_dim: int, out_dim: int, nested: bool
) -> None:
    dense = TensorDict(
        {"a": torch.arange(24.0).reshape(2, 3, 4, 1), "n": {"x": torch.arange(24).reshape(2, 3, 4)}}, [2, 3, 4]
    )
    stack = dense.to_lazystack(stack_dim)
    source = TensorDict({"s": stack}, [2, 3, 4]) if nested else stack
    result = torch.vmap(lambda td: td.apply(lambda x: x + 1), in_dim, out_dim)(source)
    expected = dense.movedim(in_dim, out_dim).apply(lambda x: x + 1)
    assert result.batch_size == expected.batch_size
    if nested:
        result = result["s"]
        assert result.batch_size == expected.batch_size
    assert (result == expected).all()


def test_vmap_with_several_arguments_and_results() -> None:
    stack = lazy_stack([member(i, 2) for i in range(2)])
    out, other = torch.vmap(lambda td, t: (td.clone(), t + 1), (1, 0), (1, 0))(stack, torch.zeros(3))
    assert isinstance(out, LazyStackedTensorDict) and out.batch_size == torch.Size([2, 3])
    assert torch.equal(out["a"], stack["a"]) and torch.equal(other, torch.ones(3))
    chunked = torch.vmap(lambda td: td.clone(), 1, chunk_size=2)(stack)
    assert torch.equal(chunked["a"], stack["a"].transpose(0, 1))


def test_another_dtype_and_batch_size_make_a_stack_dense() -> None:
    stack = lazy_stack(
        [TensorDict(a=torch.ones(2, 4), t=["x", "y"], n=TensorDict(b=torch.ones(2)), batch_size=[2])] * 3
    )
    for size in ([], [3], [3, 2]):
        out = stack.view(torch.int32, batch_size=size)
        assert type(out) is TensorDict and out.batch_size == out["n"].batch_size == torch.Size(size)
        assert torch.equal(out["a"], stack["a"].view(torch.int32)) and out["t"] == stack["t"]
    assert TensorDict(s=stack, batch_size=[3]).view(torch.int32, batch_size=[])["s"].batch_size == ()
    assert isinstance(stack == stack.to_dict(), LazyStackedTensorDict)


def test_vmap_returns_a_stack_again() -> None:
    stack = lazy_stack([member(i, 2).select("a", "n") for i in range(3)])
    out = torch.vmap(lambda td: td.set("new", td["a"] + 1), 0, 1)(stack)
    assert isinstance(out, LazyStackedTensorDict) and out.stack_dim == 1 and "new" not in stack
    assert torch.equal(out["new"], stack["a"].transpose(0, 1) + 1)
    assert isinstance(torch.vmap(lambda td: td["n"])(stack), LazyStackedTensorDict)
    assert type(torch.vmap(lambda td: td.clone())(stack)) is TensorDict
    dense = TensorDict(stack=stack, x=torch.zeros(3), batch_size=[3])
    assert isinstance(torch.vmap(lambda td: td.set("x", td["x"] + 1))(dense)["stack"], LazyStackedTensorDict)
    chunked = torch.vmap(lambda td: td, chunk_size=2)(stack)
    assert torch.equal(chunked["a"], stack["a"]) and chunked.batch_size == stack.batch_size


IN_PLACE_WRITES: dict[str, Callable[[Any], object]] = {
    "set_": lambda td: td.set_("a", td["a"] + 1),
    "a leaf": lambda td: td["a"].add_(1),
    "an assignment": lambda td: td["a"].__setitem__(..., 5.0),
    "nested": lambda td: td["n"].set_("x", td["n", "x"] + 1),
    "add_": lambda td: td.add_(1),
    "update_": lambda td: td.update_({"a": td["a"] * 0}),
    "zero_": lambda td: td.zero_(),
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.seconds)], ids=["eager", "compiled"])
@pytest.mark.parametrize("write", IN_PLACE_WRITES.values(), ids=IN_PLACE_WRITES)
def test_in_place_writes_inside_vmap_reach_the_members(write: Callable[[Any], object], compiled: bool) -> None:
    stack = lazy_stack([member(i, 2).select("a", "n").apply(lambda leaf: leaf.float()) for i in range(3)])
    dense = stack.to_tensordict()

    def run(td: Any) -> Any:
        return torch.vmap(lambda row: (write(row), row)[1])(td)

    out = (torch.compile(run, backend="eager") if compiled else run)(stack)
    torch.vmap(lambda row: (write(row), row)[1])(dense)
    assert (stack == dense).all() and (out == dense).all()


def test_writes_inside_vmap_reach_the_members_only_if_the_function_returns() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(2), batch_size=[2]) for _ in range(3)])

    def fail(td: Any) -> None:
        td.zero_().add_(1)
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        torch.vmap(fail)(stack)
    assert not stack["a"].any()
    torch.vmap(lambda td: td.set("a", td["a"] + 1))(stack)
    assert not stack["a"].any()
    torch.vmap(torch.vmap(lambda td: td.set_("a", td["a"] + 1)))(stack)  # torch counts no writes of an inner `vmap`
    assert (stack["a"] == 1).all()
    with torch.inference_mode():
        inference = lazy_stack([TensorDict(a=torch.zeros(2), batch_size=[2]) for _ in range(3)])
        torch.vmap(lambda td: td.set_("a", td["a"] + 1))(inference)
        assert (inference["a"] == 1).all()
    outer = TensorDict(stack=stack, batch_size=[3])
    torch.vmap(lambda td: td["stack"].set_("a", td["stack", "a"] + 1))(outer)
    assert (stack["a"] == 2).all()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiled_vmap_reads_members_that_cannot_be_written(requires_grad: bool) -> None:
    rows = [torch.ones(3, requires_grad=True) if requires_grad else torch.ones(1).expand(3) for _ in range(2)]
    stack = lazy_stack([TensorDict(a=row, batch_size=[3]) for row in rows])
    out = torch.compile(torch.vmap(lambda td: td["a"] + 1), backend="eager", fullgraph=True)(stack)
    assert (out == 2).all()
    with pytest.raises(RuntimeError, match="memory location|in-place"):
        torch.vmap(lambda td: td.set_("a", td["a"] + 1))(stack)


@pytest.mark.parametrize("scale", [torch.ones(2), UnbatchedTensor(torch.ones(2))], ids=["tensor", "unbatched"])
def test_vmap_keeps_the_batch_size_of_stacks(scale: torch.Tensor) -> None:
    """The number of elements equals the batch size of the members: nothing may be read off the shapes."""
    stack = lazy_stack([TensorDict(a=torch.ones(2, 4), u=scale, batch_size=[2]) for _ in range(3)])
    out = torch.vmap(lambda td, x: td.set("z", td["a"] + x), (None, 0))(stack, torch.arange(2.0))
    assert out.batch_size == (2, 3, 2) and out["z"].shape == (2, 3, 2, 4)
    assert torch.vmap(lambda td: td.set("z", td["a"] + 1))(stack).batch_size == (3, 2)


def test_vmap_returns_the_entries_that_only_some_members_have() -> None:
    first = TensorDict({"z": torch.ones(2), "n": {"a": torch.zeros(2), "t": "text"}}, [2])
    stack = lazy_stack([first, TensorDict({"n": {"a": torch.zeros(2)}}, [2])])
    result: Any = torch.vmap(lambda td: td.set("new", torch.zeros(2)))(stack)
    assert set(result.tensordicts[0].keys(True, True)) == {"z", ("n", "a"), "new"}
    assert result.tensordicts[0]["n", "t"] == "text"
    assert set(result.tensordicts[1].keys(True, True)) == {("n", "a"), "new"}


def test_what_vmap_needs_of_torch() -> None:
    """Of private functions of torch, which a new version may change: this test says so first."""
    from torch._functorch import vmap as functorch

    from tensordict.containers.lazy import vmapping

    assert vmapping._KNOWN
    assert functorch._process_batched_inputs._knows_stacks and functorch._unwrap_batched._knows_stacks
    assert vmapping.map_over_stacks() and functorch._process_batched_inputs._knows_stacks  # not replaced twice


@pytest.mark.parametrize("change", ["parameters", "name"])
def test_another_torch_refuses_to_map_over_stacks_only(change: str) -> None:
    """With other private functions in torch, all works but `vmap` over a lazy stack, which says so."""
    code = f"""
import torch
from torch._functorch import vmap as functorch
original = functorch._unwrap_batched
if {change!r} == "parameters":
    functorch._unwrap_batched = lambda outputs, *rest: original(outputs, *rest)
else:
    functorch._put_together = functorch.__dict__.pop("_unwrap_batched")
    flat = functorch._flat_vmap
    functorch._flat_vmap = type(flat)(flat.__code__.replace(co_names=tuple(
        "_put_together" if name == "_unwrap_batched" else name for name in flat.__code__.co_names)), flat.__globals__)
from tensordict import TensorDict, lazy_stack
dense = TensorDict(a=torch.zeros(2, 3), batch_size=[2, 3])
assert torch.vmap(lambda t: t + 1)(torch.zeros(2)).shape == (2,)
assert torch.vmap(lambda td: td["a"] + 1)(dense).shape == (2, 3)
stack = dense.to_lazystack(1)
assert (stack + 1)["a"].sum() == 6
assert torch.utils._pytree.tree_map(lambda x: x + 1, stack)["a"].sum() == 6
torch.vmap(lambda td: td["a"] + 1)(stack)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError: torch.vmap cannot map over a lazy stack in this version of torch" in done.stderr
    assert torch.__version__ in done.stderr and "to_tensordict()" in done.stderr


# --- found by review --------------------------------------------------------------------------------------------------


def test_padding_of_stacks_of_stacks() -> None:
    groups = [lazy_stack([TensorDict(t=torch.full((n,), float(n))) for n in row]) for row in ((1, 3), (2, 2))]
    stack = lazy_stack(groups)
    padded = stack.get("t", as_padded_tensor=True, padding_value=-1)
    assert padded.tolist() == [[[1, -1, -1], [3, 3, 3]], [[2, 2, -1], [2, 2, -1]]]
    left = lazy_stack(groups, 1).get("t", as_padded_tensor=True, padding_side="left")
    assert left.tolist() == [[[0, 0, 1], [0, 2, 2]], [[3, 3, 3], [0, 2, 2]]]
    assert groups[0][:0].get("t", as_padded_tensor=True).shape[0] == 0


def test_nested_tensors_of_stacks_of_stacks() -> None:
    stack = lazy_stack([lazy_stack([TensorDict(t=torch.full((n,), 1.0))] * 2) for n in (1, 3)])
    rows = stack.get("t", as_nested_tensor=True)
    assert [tuple(row.shape) for row in rows.unbind()] == [(2, 1), (2, 3)]
    mixed = lazy_stack([lazy_stack([TensorDict(t=torch.zeros(n)) for n in (1, 2)])])
    with pytest.raises(RuntimeError, match=r"'t'.*as_padded_tensor"):
        mixed.get("t", as_nested_tensor=True)
    with pytest.raises(RuntimeError, match=r"'t'.*without members"):
        lazy_stack([TensorDict(t=torch.zeros(1))])[:0].get("t", as_nested_tensor=True)


def test_a_container_is_no_nested_tensor(stack: Any) -> None:
    with pytest.raises(TypeError, match="'n' is a container"):
        stack.get_nestedtensor("n")


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda s: s[[0, 1], [0, 1]],
        lambda s: s[torch.tensor([[True, False, True]] * 3)],
        lambda s: s.masked_select(torch.tensor([[True, False, True]] * 3)),
        lambda s: s[True],
        lambda s: s.reshape(-1),
    ],
    ids=["indices", "mask", "masked_select", "True", "reshape"],
)
@pytest.mark.parametrize("nested", [False, True])
def test_rearranging_keeps_what_only_some_members_have(rearrange: Any, nested: bool) -> None:
    stack = lazy_stack([member(i, 2) for i in range(3)])
    if nested:
        stack = TensorDict({"s": stack}, [3, 3]).to_lazystack(1)
        assert all(f"only{i}" in stack[i, 0]["s"].keys() for i in range(3))
    found: list[Any] = [rearrange(stack)]
    while isinstance(found[0], LazyStackedTensorDict):
        found = [inner for part in found for inner in part.tensordicts]
    for element in found:
        part = element["s"] if nested else element
        ramp = int(part["n", "x"])
        assert part[f"only{ramp // 10}"] == ramp


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("only", ["text", NonTensorStack("text", "text"), TensorDict({}, [2])], ids=str)
def test_masks_keep_values_that_only_some_members_have(only: Any, nested: bool) -> None:
    stack = lazy_stack(
        [TensorDict(a=torch.zeros(2), batch_size=[2]), TensorDict(a=torch.ones(2), v=only, batch_size=[2])]
    )
    td = TensorDict(n=stack, batch_size=[2, 2]) if nested else stack
    mask = torch.tensor([[True, False], [False, True]])
    for picked in (td[mask], td.masked_select(mask), td[[0, 1], [0, 1]]):
        found = picked["n"] if nested else picked
        assert [set(row.keys()) for row in found.unbind(0)] == [{"a"}, {"a", "v"}]
        assert isinstance(only, TensorDict) or found[1]["v"] == "text"


def test_an_unbatched_tensor_that_is_assigned_to_some_members_is_not_split() -> None:
    for at in (slice(0, 1), [0, 1]):
        stack = lazy_stack([TensorDict(a=torch.zeros(3), batch_size=[3]) for _ in range(2)])
        stack[at] = {"u": UnbatchedTensor(torch.arange(5))}
        assert stack[0]["u"].tolist() == [0, 1, 2, 3, 4]


def test_members_of_different_batch_sizes_have_no_common_elements() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(n), batch_size=[n]) for n in (2, 3)])
    for call in (
        lambda: torch.stack([stack, stack]).flatten(0, 1),
        lambda: stack[[0, 1], [0, 1]],
        lambda: stack.__setitem__(([0, 1], [0, 1]), 1.0),
    ):
        with pytest.raises(RuntimeError, match=r"different batch sizes, \[2,.* -1\]"):
            call()


def test_update_of_chosen_keys_reads_no_others(members: list[TensorDict]) -> None:
    stack, source = lazy_stack([m.clone() for m in members]), lazy_stack(members).apply(lambda x: x + 1)
    stack.update(source, keys_to_update=["a", ("n", "x"), "missing", ("a", "missing")])
    for after, new, old in zip(stack.tensordicts, source.tensordicts, members, strict=True):
        assert after["a"] is new["a"] and after["n", "x"] is new["n", "x"]
        assert torch.equal(after["a"], old["a"] + 1)
    stack.update_(lazy_stack(members), keys_to_update=[("n", "x")])
    assert torch.equal(stack[1]["n", "x"], members[1]["n", "x"])
    assert torch.equal(stack[1]["a"], members[1]["a"] + 1)


def test_cat_with_dense_and_empty_ones(members: list[TensorDict]) -> None:
    stack = lazy_stack(members)
    dense = TensorDict({"a": torch.zeros(1, 3, 9), "n": {"x": torch.zeros(1, 3)}}, [1, 3])
    for items in ([dense, stack], [stack, dense], [stack[:0], stack, dense], [dense, stack[:0], stack]):
        joint = torch.cat(items)
        assert isinstance(joint, LazyStackedTensorDict) and joint.batch_size == torch.Size([4, 3])
        assert any(part is members[2] for part in joint.tensordicts)
    assert torch.cat([LazyStackedTensorDict(stack_dim=0, batch_size=[3]), stack]).batch_size == torch.Size([3, 3])


def test_hooks_see_every_way_of_writing() -> None:
    stack = LazyStackedTensorDict(member(0, 2), member(1, 2), hook_out=lambda x: x - 1, hook_in=lambda x: x + 1)
    ones = torch.ones(2, 3)
    stack[("n", "y")] = ones
    stack.update({"u": ones, "m": {"v": ones}})
    stack.update(TensorDict({"w": ones}, [2, 3]))
    stack["c"] = TensorDict({"d": ones}, [2, 3])
    stack.set_(("n", "x"), ones)
    stack.update_({"a": torch.ones(2, 3, 2)})
    for key in (("n", "y"), "u", ("m", "v"), "w", ("c", "d"), ("n", "x"), "a"):
        assert (stack[0].get(key) == 2).all() and (stack[key] == 1).all(), key
    assert (stack.contiguous()["n", "y"] == 1).all()


def test_a_stack_without_members_along_a_later_dim() -> None:
    stack = LazyStackedTensorDict(stack_dim=1)
    with pytest.raises(RuntimeError, match="1 batch dims at least"):
        stack.append(TensorDict())
    with pytest.raises(RuntimeError, match=r"\[3\].*\[4\]"):
        stack.extend([TensorDict(batch_size=[3]), TensorDict(batch_size=[4])])
    stack.extend([TensorDict({"a": torch.zeros(3)}, [3])] * 2)
    assert stack.batch_size == torch.Size([3, 2]) and stack["a"].shape == (3, 2)


def test_entries_of_different_kinds_are_shown_and_kept() -> None:
    """Leaves of different numbers of dims, and containers beside leaves."""
    inner = TensorDict({"b": torch.zeros(2, 2)})
    for first, second in ((torch.zeros(2), torch.zeros(2, 2)), (torch.zeros(2), inner), (inner, torch.zeros(2))):
        stack = lazy_stack([TensorDict({"a": first}), TensorDict({"a": second})])
        assert "a: Tensor(shape=torch.Size([" in repr(stack)
        assert all(part is item for part, item in zip(stack.get("a", as_list=True), (first, second), strict=True))
        assert list(stack.keys(True)) == ["a"]
        for other in (stack.clone(), stack + 0, pickle.loads(pickle.dumps(stack)), stack.apply(lambda x: x * 1)):
            assert [type(m["a"]) for m in other.tensordicts] == [type(first), type(second)]
        with pytest.raises(RuntimeError, match="'a'.*as_list=True"):
            stack["a"]
        assert "a" not in stack.exclude("a")[1]
    ragged = lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2, 2)})])
    assert ragged.get_item_shape("a") == torch.Size([-1])
    ragged[:] = {"a": torch.ones(2, 2)}
    assert (ragged[0]["a"] == 1).all() and (ragged[1]["a"] == 1).all()


def agents(batch: int) -> TensorDict:
    """Steps of an environment with two agents whose observations differ in size."""
    each = [TensorDict({"obs": torch.ones(batch, k + 1), "act": torch.zeros(batch)}, [batch]) for k in range(2)]
    return TensorDict({"agents": lazy_stack(each, 1), "done": torch.zeros(batch, 1)}, [batch])


def test_joining_containers_of_uneven_stacks() -> None:
    stacked = torch.stack([agents(3), agents(3) + 1])
    assert stacked["agents"].batch_size == torch.Size([2, 3, 2]) and stacked["agents"].stack_dim == 2
    assert torch.equal(stacked[1, 0]["agents"][1]["obs"], torch.full((2,), 2.0))
    later = torch.stack([agents(3), agents(3) + 1], 1)
    assert later["agents"].batch_size == torch.Size([3, 2, 2]) and (later[:, 1]["agents"][:, 0]["obs"] == 2).all()
    joint = torch.cat([agents(3), agents(2)])
    assert joint["agents"].batch_size == torch.Size([5, 2]) and joint["done"].shape == (5, 1)
    assert [m["obs"].shape for m in joint["agents"].tensordicts] == [(5, 1), (5, 2)]
    mixed = agents(3)
    mixed["agents"] = mixed["agents"].select("act").to_tensordict()
    for items in ([mixed, agents(3).exclude(("agents", "obs"))], [agents(3).exclude(("agents", "obs")), mixed]):
        assert torch.cat(items)["agents", "act"].shape == (6, 2)
    odd = agents(3)
    odd["agents"].append(TensorDict({"obs": torch.zeros(3, 1), "act": torch.zeros(3)}, [3]))
    with pytest.raises(RuntimeError, match="agents"):
        torch.cat([agents(3), odd])


def test_comparing_containers_of_uneven_stacks() -> None:
    left, right = agents(3), agents(3)
    assert (left == right).all() and not (left != right).any()
    right["agents"][:, 1]["obs"][0] = 5
    assert (left == right)["agents"][:, 1]["obs"].sum() == 4
    empty = TensorDict({"s": left["agents"][:, :0].select("act")}, [3])
    assert (empty == empty).batch_size == torch.Size([3])


def test_forms_through_a_container() -> None:
    td = agents(3)
    assert [leaf.shape for leaf in td.get(("agents", "obs"), as_list=True)] == [(3, 1), (3, 2)]
    deep = TensorDict({"n": td}, [3]).get(("n", "agents", "obs"), as_padded_tensor=True, padding_value=7.0)
    assert deep.shape == (3, 2, 2) and deep[0, 0].tolist() == [1, 7]
    assert td.get("done", as_list=True) is td["done"] and td.get(("done", "x"), 3, as_list=True) == 3
    assert td.get(("agents", "missing"), None, as_list=True) is None
    with pytest.raises(TypeError, match="as_lists"):
        td.get("done", as_lists=True)


def test_forms_of_leaves_on_different_devices() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2, device="meta")})])
    for form in ({"as_padded_tensor": True}, {"as_nested_tensor": True}, {}):
        with pytest.raises(RuntimeError, match="'a' is on different devices.*cpu, meta"):
            stack.get("a", **form)


def test_common_names_keep_the_order_of_the_first() -> None:
    a, b, c = (dict.fromkeys(names, 0.0) for names in ("xyz", "zyxw", "yzx"))
    assert list(lazy_stack([TensorDict(a), TensorDict(b), TensorDict(c)]).keys()) == ["x", "y", "z"]
    assert list(lazy_stack([TensorDict(b), TensorDict(a), TensorDict(c), TensorDict(x=1.0)]).keys()) == ["x"]


def test_every_leaf_is_stacked_once() -> None:
    calls: list[Any] = []
    part = TensorDict({"a": torch.zeros(2), "n": {"x": torch.zeros(2)}})
    stack = LazyStackedTensorDict(part, part.clone(), hook_out=lambda x: calls.append(x) or x)
    for view in (stack.values(True, True), stack.items(True, True), stack["n"].values(True, True), stack.items(True)):
        calls.clear()
        count = sum(isinstance(x[1] if isinstance(x, tuple) else x, torch.Tensor) for x in view)
        assert len(calls) == count


def test_the_keys_are_shown(stack: Any) -> None:
    assert repr(stack.keys()) == "KeysView(['a', 'n'])"


def test_entries_of_members_with_batch_dims_of_their_own(tmp_path: pathlib.Path) -> None:
    """Those that nested containers and values do not share are theirs alone."""

    def make(nested: list[int], value: Any) -> TensorDict:
        inner = TensorDict(x=torch.ones(2, 3), batch_size=nested, names=["time"] * len(nested))
        return TensorDict(n=inner, s=value)

    stack = lazy_stack([make([2], NonTensorData("a", batch_size=[2], names=["time"])), make([], "b")])
    stack.names = ["member"]
    assert stack["n"].names == ["member"]
    assert stack["n"].batch_size == (2,) and stack["n", "x"].shape == (2, 2, 3)
    assert stack["s"] == [["a", "a"], "b"] and "x: Tensor" in repr(stack)
    stack.memmap(tmp_path)
    for other in (stack.clone(), pickle.loads(pickle.dumps(stack)), TensorDict.load_memmap(tmp_path)):
        assert [member["n"].batch_size for member in other.tensordicts] == [(2,), ()]
        assert other.names == other["n"].names == ["member"] and other.tensordicts[0]["n"].names == ["time"]
        assert other["n", "x"].sum() == 12 and other["s"] == [["a", "a"], "b"]
    assert stack.to_tensordict()["n"].batch_size == (2,) and torch.stack([stack, stack])["n"].batch_size == (2, 2)


def test_one_container_several_times_in_a_stack() -> None:
    member = TensorDict(x=torch.ones(2), y=torch.zeros(2))
    stack = lazy_stack([member, member])
    assert stack.pop("x").shape == (2, 2) and set(stack.del_("y").keys()) == set(member.keys()) == set()


def test_empty_of_another_batch_size_reads_nothing() -> None:
    stack = lazy_stack([TensorDict(x=torch.ones(2), n={"y": torch.ones(3)}), TensorDict(x=torch.ones(4), n={})])
    assert stack.empty(batch_size=[5]).batch_size == (5,) and stack.empty(batch_size=[]).is_empty()
    assert list(stack.empty(True, batch_size=[2, 3])["n"].keys()) == []


def _two(*batch: int) -> LazyStackedTensorDict:
    return lazy_stack([TensorDict(batch_size=batch) for _ in range(2)])


@pytest.mark.parametrize("write", ["set", "update"])
def test_lists_of_numbers_are_of_one_dtype(write: str) -> None:
    for batch, value, dtype in (
        ((), [3.5, 7], torch.float32),
        ((), [True, 2], torch.int64),
        ((2,), [[1, 2], [3, 4.5]], torch.float32),
        ((), [[1, 2], [3.5]], torch.float32),
    ):
        stack = _two(*batch)
        stack.set("l", value) if write == "set" else stack.update({"l": value})
        assert [member["l"].dtype for member in stack] == [dtype] * 2
        assert [member["l"].tolist() for member in stack] == value
    later = lazy_stack([TensorDict(batch_size=[2]) for _ in range(2)], 1)
    later["l"] = [[1, 2.5], [3, 4]]
    assert [member["l"].tolist() for member in later.tensordicts] == [[1, 3], [2.5, 4]]


def test_lists_of_mixed_values_keep_each() -> None:
    for value in (["a", 1], [True, "a"], [{"k": 1}, "a"], [1, None]):
        stack = _two()
        stack["l"] = value
        assert [member["l"] for member in stack] == value
        assert all(type(member.get("l")) is NonTensorData for member in stack)


def test_lists_of_values_give_each_member_its_item() -> None:
    for value in ([["l", 1], "text"], [(1, 2), "text"], [{"x": 1}, {"x": 2}], [[], "a"], [[1, 2], None], [set(), 1]):
        for write in ("set", "update"):
            stack = lazy_stack([TensorDict(), TensorDict()])
            stack.set("l", value) if write == "set" else stack.update({"l": value})
            assert [member["l"] for member in stack] == value
            assert all(type(member.get("l")) is NonTensorData for member in stack)
    stack = lazy_stack([TensorDict(), TensorDict()])
    stack["l"] = [[1, 2], ["a", None]]
    assert [type(member.get("l")) for member in stack] == [NonTensorStack] * 2
    assert stack["l"] == [[1, 2], ["a", None]]
    stack["l"] = ("a", "b")  # as in any container, a tuple is one value
    assert [member["l"] for member in stack] == [("a", "b")] * 2


def test_lists_that_make_no_stack_belong_to_every_member() -> None:
    for value in (["a", "b"], ["a", "b", "c"], [{"k": 1}, "text"]):
        stack = _two(1)
        with set_list_to_stack(False):
            stack["l"] = value
        assert [member["l"] for member in stack] == [value] * 2
    with set_list_to_stack(False):
        stack["n"] = [[1.0], [2.0]]
        stack["a"] = [np.zeros(1), np.ones(1)]
    assert [member["n"].item() for member in stack] == [1, 2]
    assert [member["a"].tolist() for member in stack] == [[0], [1]]


def test_other_batch_sizes_of_stacks_of_ragged_leaves() -> None:
    parts = [torch.nested.nested_tensor([torch.ones(n), torch.ones(2)], layout=torch.jagged) for n in (1, 3)]
    stack = lazy_stack([TensorDict({"x": part}, [2]) for part in parts])
    for result in (stack.view(2, 1, 2), stack.unflatten(1, [1, 2]), stack.unflatten(0, [2, 1]), stack.reshape(1, 4)):
        lengths = [len(item["x"]) for item in result.reshape(-1)]
        assert math.prod(result.batch_size) == 4 and lengths == [1, 2, 3, 2]
    one = torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged)
    assert lazy_stack([TensorDict({"x": one}, [1])]).flatten().batch_size == (1,)


def test_the_longest_batch_size_fits_what_only_some_members_have() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(2, 3), c=1), TensorDict(a=torch.zeros(2, 3))])
    assert stack.auto_batch_size_().batch_size == (2,)
    stack = lazy_stack([TensorDict(a=torch.zeros(2, 3), c=torch.zeros(2)), TensorDict(a=torch.zeros(2, 3))])
    assert TensorDict(n=stack).auto_batch_size_()["n"].batch_size == (2, 2)
    ahead = lazy_stack([TensorDict({"a": torch.zeros(2, 3)}, [2]), TensorDict({"a": torch.zeros(2, 3)}, [2])], 1)
    assert ahead.auto_batch_size_().batch_size == (2, 2, 3)
    only = lazy_stack([TensorDict(c=TensorDict(a=torch.zeros(2, 3))), TensorDict()])
    assert only.auto_batch_size_(2).batch_size == (2, 2) and only[0]["c"].batch_size == (2,)
    assert only.auto_batch_size_().batch_size == (2, 2, 3) and only[0]["c"].batch_size == (2, 3)


def test_lists_of_tuples_or_of_mixed_depth_give_members_values() -> None:
    for items in ([7, (1, 2)], [(1, 2), (3, 4)], [[1, 2], 3]):
        stack = lazy_stack([TensorDict(), TensorDict()])
        with set_list_to_stack(True):
            stack["v"] = items
        assert [member["v"] for member in stack.unbind(0)] == items


def test_a_write_to_members_of_which_one_is_locked_changes_none() -> None:
    stack = lazy_stack([TensorDict(), TensorDict(), TensorDict().lock_()])
    with pytest.raises(RuntimeError, match="locked"):
        stack["new"] = torch.zeros(2)
    assert "new" not in stack[0]


def test_one_container_as_two_members_changes_once() -> None:
    def make() -> LazyStackedTensorDict:
        member = TensorDict(a=torch.ones(3), b=torch.zeros(3), batch_size=[3])
        return lazy_stack([member, member])

    stack = make()
    name, value = stack.popitem()
    assert name == "b" and value.shape == (2, 3) and list(stack.keys()) == ["a"]
    stack = make()
    del stack["a"]
    assert list(stack.keys()) == ["b"]
    stack = make().rename_key_("a", "c")
    assert list(stack.keys()) == ["b", "c"] and stack["c"].sum() == 6


# --- from dicts -------------------------------------------------------------------------------------------------------


def test_a_stack_of_dicts() -> None:
    dicts = [{"a": torch.zeros(2)}, {"a": torch.ones(3)}]
    for stack in (
        LazyStackedTensorDict.from_dict(dicts),
        LazyStackedTensorDict.from_dict(input_dict=tuple(dicts)),
        LazyStackedTensorDict.from_dict(*dicts),
        LazyStackedTensorDict.from_dict({"1": dicts[1], "0": dicts[0]}),
        LazyStackedTensorDict.from_dict([TensorDict(item) for item in dicts]),
    ):
        assert type(stack) is LazyStackedTensorDict and stack.batch_size == (2,)
        assert [member["a"].shape[0] for member in stack.tensordicts] == [2, 3]
    assert LazyStackedTensorDict.from_dict(dicts, stack_dim_name="time").names == ["time"]
    assert LazyStackedTensorDict.from_dict(dicts, names=["time"], device="cpu").device == torch.device("cpu")
    even = [{"a": torch.zeros(2, 4), "n": {"b": torch.zeros(2)}}] * 3
    stack = LazyStackedTensorDict.from_dict(even, stack_dim=1, batch_size=[2], names=["x", "y"])
    assert stack.batch_size == (2, 3) and stack.stack_dim == 1 and stack.names == ["x", "y"]
    assert LazyStackedTensorDict.from_dict(even, auto_batch_size=True).batch_size == (3, 2)
    assert LazyStackedTensorDict.from_dict(even, batch_dims=1).batch_size == (3, 2)
    # Any other mapping becomes one container.
    for one in ({"a": torch.zeros(2)}, {"0": torch.zeros(2)}, {"0": {}, "2": {}}, {}):
        assert type(LazyStackedTensorDict.from_dict(one)) is TensorDict
    with pytest.raises(ValueError, match="one member"):
        LazyStackedTensorDict.from_dict([])
    with pytest.raises(IndexError):
        LazyStackedTensorDict.from_dict(dicts, stack_dim=1)


def test_an_entry_below_a_member_that_is_a_value_is_refused() -> None:
    td = TensorDict(n=lazy_stack([TensorDict(b={"k": 1}), TensorDict(b="text")]), batch_size=[2])
    for call in (
        lambda: td.set(("n", "b", "k"), torch.ones(2)),
        lambda: td.set(("n", "b", "k"), [1, 2]),
        lambda: td.create_nested(("n", "b", "new")),
    ):
        with pytest.raises(KeyError, match="the entry above it is a value that is no tensor"):
            call()
    assert td["n"].tensordicts[0]["b"].to_dict() == {"k": 1} and td["n"].tensordicts[1]["b"] == "text"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_stack_beside_a_ragged_leaf_is_cut_by_members() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(())), TensorDict(a=torch.ones(2))])
    ragged = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged)
    td = TensorDict(s=stack, r=ragged, batch_size=[2])
    for pieces in (
        td.split([1, 1]),
        td.split(1),
        (td[:1], td[1:]),
        (td[torch.tensor([0])], td[stack.batch_size[0] - 1 :]),
    ):
        assert [[leaf.shape for leaf in piece["s"].get("a", as_list=True)] for piece in pieces] == [[()], [(2,)]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_error_about_a_ragged_leaf_names_it_beside_an_uneven_stack() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(())), TensorDict(a=torch.ones(2))])
    ragged = torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged)
    td = TensorDict(s=stack, r=ragged, batch_size=[2])
    for call in (lambda: td.narrow(0, 0, 1), lambda: td.view(2, 1), lambda: td.flip(0)):
        with pytest.raises((RuntimeError, NotImplementedError), match="entry 'r': "):
            call()


def test_selecting_no_elements_of_an_uneven_stack() -> None:
    for side in (0, 2):
        first = TensorDict(a=torch.ones(side, 3), batch_size=[side])
        stack = lazy_stack([first, TensorDict(a=torch.ones(side, 3), z=torch.ones(side), batch_size=[side])])
        assert stack[torch.zeros(2, side, dtype=torch.bool)]["a"].shape == (0, 3)
        for shape in ((0, 3), (3, 0, 2)):
            nothing = torch.zeros(shape, dtype=torch.long)
            part = stack[nothing, nothing]
            assert part.batch_size == shape and part["a"].shape == (*shape, 3)


def test_update_at_refuses_a_new_entry_of_too_few_dims() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(3), batch_size=[3]) for _ in range(2)], 1)
    for value in (torch.ones(2), torch.ones(3, 2)):
        with pytest.raises(KeyError, match="'n1' was not found"):
            stack.update_at_({"a": torch.ones(3, 2), "n1": value}, ...)
    assert stack["a"].sum() == 0 and list(stack.keys()) == ["a"]


def test_a_mask_over_named_dims_leaves_nested_stacks_without_a_name() -> None:
    stack = lazy_stack([TensorDict(a=torch.ones(3), batch_size=[3]) for _ in range(2)])
    td = TensorDict(s=stack, batch_size=[2, 3], names=["x", "y"])
    mask = torch.tensor([[True, False, False], [False, True, True]])
    for result in (td[mask], td.masked_select(mask)):
        assert result.names == result["s"].names == [None] and result["s", "a"].shape == (3,)


def test_from_dict_instance_of_a_stack_whose_members_hold_different_kinds() -> None:
    stack = lazy_stack([TensorDict(b=torch.ones(())), TensorDict(b="text")])
    assert stack.from_dict_instance({"b": torch.ones(2)})["b"].tolist() == [1, 1]


def test_an_index_of_an_uneven_stack_without_rows() -> None:
    def member(**extra: Any) -> TensorDict:
        nested = TensorDict(z=torch.zeros(0, 2, 4), batch_size=[0, 2])
        return TensorDict({"v": "text", "n": nested, **extra}, batch_size=[0, 2])

    stack = lazy_stack([member(), member(b=torch.zeros(0, 2))], 1)
    mask = torch.zeros(0, 2, 2, dtype=torch.bool)
    for result in (stack[mask], stack.masked_select(mask)):
        assert result.batch_size == (0,) and set(result.keys()) == {"v", "n"} and result["n", "z"].shape == (0, 4)
        result.append(TensorDict({"v": "text", "n": {"z": torch.ones(4)}}))
        assert result["n", "z"].tolist() == [[1.0] * 4]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_index_of_an_uneven_stack_of_ragged_leaves_without_rows() -> None:
    ragged = torch.nested.nested_tensor([], dtype=torch.float64)
    stack = lazy_stack([TensorDict(r=ragged, batch_size=[0]), TensorDict(r=ragged, b=torch.zeros(0), batch_size=[0])])
    result = stack[torch.zeros(2, 0, dtype=torch.bool)]
    assert result.batch_size == (0,) and result["r"].dtype is torch.float64


@pytest.mark.parametrize("names", ["ab", "aa"])
def test_update_underscore_refuses_an_absent_stack_of_uneven_members(names: str) -> None:
    absent = lazy_stack([TensorDict({name: torch.zeros(size)}) for size, name in enumerate(names)])
    with pytest.raises(KeyError, match="'absent' was not found"):
        TensorDict(x=torch.zeros(2), batch_size=[2]).update_({"absent": absent})


@pytest.mark.parametrize(
    "index", [torch.tensor([[True, False], [False, True]]), (torch.tensor([0, 1]), torch.tensor([0, 1]))], ids=str
)
def test_an_index_across_members_adds_entries_as_a_dense_container_does(index: Any) -> None:
    dense = TensorDict({"a": torch.zeros(2, 2)}, [2, 2])
    stack = lazy_stack(list(dense.clone().unbind(0)))
    new = TensorDict({"a": torch.ones(2), "new": torch.ones(2), "n": {"b": torch.ones(2)}, "v": "text"}, [2])
    dense[index] = new
    stack[index] = new
    assert (stack.to_tensordict() == dense).all()
    assert set(stack[0].keys()) == {"a", "new", "n", "v"}
    locked = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]).lock_()])
    with pytest.raises(RuntimeError, match="locked"):
        locked[torch.tensor([[True, False]])] = TensorDict({"a": torch.ones(1), "new": torch.ones(1)}, [1])
    assert locked["a"].tolist() == [[0, 0]]


def test_the_dim_that_a_mask_makes_has_no_name() -> None:
    mask = torch.tensor([[True, False], [False, True]])
    stack = lazy_stack([TensorDict({"a": torch.zeros(2, 2)}, [2, 2]) for _ in range(3)], 2)
    stack.names = ["time", "env", "agent"]
    assert stack[mask].names == stack.contiguous()[mask].names == [None, "agent"]
    td = TensorDict({"n": stack}, [2, 2], names=["time", "env"])
    assert td[mask].names == [None] and td[mask]["n"].names == [None, "agent"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [(3, 3), (3,), (), (1, 3)])
def test_operands_of_fewer_batch_dims_broadcast_as_with_a_dense_container(dim: int, size: tuple[int, ...]) -> None:
    def make(size: tuple[int, ...]) -> TensorDict:
        count = math.prod(size)
        leaves = {"a": torch.arange(count * 3.0).view(*size, 3), "n": {"b": torch.arange(float(count)).view(size)}}
        return TensorDict({**leaves, "v": "text"}, size)

    stack = lazy_stack([make((3,)), make((3,)) * 10, make((3,)) * 100], dim)
    dense, other = stack.contiguous(), make(size) + 1
    assert ((stack + other).to_tensordict() == dense + other).all()
    assert ((stack.clamp_min(other)).to_tensordict() == dense.clamp_min(other)).all()
    dense.mul_(other)
    stack.mul_(other)
    assert (stack.to_tensordict() == dense).all()
    dense.update_(other)
    stack.update_(other)
    assert (stack.to_tensordict() == dense).all()


def test_an_operand_without_batch_dims_is_aligned_at_the_last_dims() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])
    other = TensorDict({"a": torch.arange(6.0).view(2, 3)})
    assert (stack + other)["a"].equal(other["a"])
    with pytest.raises(RuntimeError, match=r"batch size \[2\] cannot be split among the members .*\[2, 3\]"):
        stack + TensorDict({"a": torch.zeros(2)}, [2])


def test_tuples_of_numbers_have_the_dtype_that_numpy_gives_them() -> None:
    stack = lazy_stack([TensorDict(batch_size=[2]), TensorDict(batch_size=[2])])
    stack["y"] = [[1.5, 2.5], [3.5, 4.5]]
    assert stack["y"].dtype == torch.float32
    stack["x"] = ((1.5, 2.5), (3.5, 4.5))
    assert stack["x"].dtype == torch.float64


@pytest.mark.parametrize(
    "reshape",
    [
        lambda td: td.flatten(0, 1),
        lambda td: td.unflatten(1, (2, 2)),
        lambda td: td.unflatten(0, (1, 2)),
        lambda td: td.view(2, 2, 2),
        lambda td: td.reshape(-1),
    ],
    ids=["flatten", "unflatten a dim of the members", "unflatten the stack dim", "view", "reshape"],
)
@pytest.mark.parametrize(("dim", "length"), [(0, 3), (1, 3), (2, 3), (0, 0), (1, 0)])
def test_reshaped_nested_stacks_keep_the_names_of_their_own_dims(
    reshape: Callable[[Any], Any], dim: int, length: int
) -> None:
    inner = TensorDict(batch_size=[2, 4, length], a=torch.zeros(2, 4, length), n=TensorDict(batch_size=[2, 4, length]))
    td = TensorDict(batch_size=[2, 4], dense=inner, stack=inner.to_lazystack(dim))
    td["dense"].names = td["stack"].names = [None, None, "w"]
    td.names = ["t", "v"]
    result = reshape(td)
    assert result["dense"].names[-1] == "w"
    assert result["stack"].names == result["stack", "n"].names == result["dense"].names


@pytest.mark.parametrize("nested", [False, True])
def test_auto_batch_size_drops_the_names_of_dims_that_go(nested: bool) -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2])])
    td = TensorDict({"s": stack}, [1, 2]) if nested else stack
    td.names = ["time", "env"]
    td.auto_batch_size_(1)
    stack = td["s"] if nested else td
    assert td.batch_size == stack.batch_size == (1,) and td.names == stack.names == ["time"]
    assert stack[0].batch_size == () and stack[0].names == []


def test_a_tensor_does_not_fit_members_of_other_sizes() -> None:
    stack = lazy_stack([TensorDict({"a": torch.zeros(2)}, [2]), TensorDict({"a": torch.zeros(1)}, [1])])
    with pytest.raises(RuntimeError, match="does not broadcast to the batch size"):
        stack.minimum(torch.ones(2))
    assert [member["a"].tolist() for member in (stack + torch.ones(2, 1)).tensordicts] == [[1, 1], [1]]


def test_a_container_is_not_assigned_an_unbatched_tensor() -> None:
    stack = lazy_stack([TensorDict({"n": TensorDict({}), "a": torch.zeros(2)}, [2])])
    with pytest.raises(TypeError, match="'n' is a container and cannot be assigned an UnbatchedTensor"):
        stack.update_at_({"a": torch.ones(2), "n": UnbatchedTensor(torch.zeros(3))}, 0)
    assert stack["a"].sum() == 0
