"""Operations that rearrange the batch dims, each compared with torch on a tensor of the batch size."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_leaf, assert_matches, index_map, leaves, mapped, picked
from tensordict import TensorDict, assert_close

Op = Callable[[Any], Any]

# Written once for containers and tensors alike; the id is the call.
CALLS = """
view(-1) | view(12) | view(4, 3) | view((4, 3)) | view(torch.Size([2, 6])) | view(2, -1) | view(3, 4, 1) | view(1)
view([]) | view(5) | view(-1, -1) | view(1, 4) | view(6) | view(0)
reshape(-1) | reshape(12) | reshape(4, 3) | reshape((2, 6)) | reshape(2, 2, 3)
reshape(5) | reshape(()) | reshape(1, 1)
flatten() | flatten(0, 1) | flatten(0, -1) | flatten(1, 2) | flatten(1)
flatten(-2, -1) | flatten(1, 0) | flatten(0, 5)
unflatten(0, (3, 1)) | unflatten(0, (2, 2)) | unflatten(-1, (2, 2)) | unflatten(1, [4, 1]) | unflatten(0, (-1, 2))
unflatten(1, (3, 2)) | unflatten(5, (1, 1)) | unflatten(-1, (-1, 3))
permute(0) | permute(1, 0) | permute((1, 0)) | permute([-1, 0])
permute(2, 0, 1) | permute(0, 1, 2) | permute(dims=(1, 0))
permute(0, 0) | permute(0, 5) | permute(()) | permute(-1, -2, -3)
transpose(0, 1) | transpose(-1, -2) | transpose(0, 0) | transpose(0, 2) | transpose(1, 7) | transpose(-1, 0)
movedim(0, 1) | movedim(0, -1) | movedim((0, 1), (1, 0)) | movedim(0, 5) | moveaxis(-1, 0) | movedim((0, 1), (2, 0))
swapaxes(0, 1) | swapdims(0, -1) | swapaxes(0, 4)
squeeze() | squeeze(0) | squeeze(1) | squeeze(-1) | squeeze(-2) | squeeze(5) | squeeze(dim=0)
unsqueeze(0) | unsqueeze(-1) | unsqueeze(1) | unsqueeze(2) | unsqueeze(-2)
unsqueeze(9) | unsqueeze(-9) | unsqueeze(dim=0)
expand(2, 3, 4) | expand((2, 3, 4)) | expand(3, 4) | expand(4) | expand(5, 4)
expand(2, 5, 3) | expand(4, 4) | expand(3)
expand(-1, -1) | expand(7, -1, -1) | expand(2, -1, 3) | expand(2) | expand((5, 2, 1, 3)) | expand(-1)
broadcast_to((2, 3, 4)) | broadcast_to((2, 4)) | broadcast_to((5,)) | broadcast_to((2, 6, 3))
expand_as(torch.zeros(2, 3, 4)) | expand_as(torch.zeros(4)) | expand_as(torch.zeros(6))
repeat(2) | repeat(2, 1) | repeat(1, 3) | repeat(2, 1, 3) | repeat(0, 1)
repeat_interleave(2, 0) | repeat_interleave(2, dim=1) | repeat_interleave(2, dim=-1) | repeat_interleave(3)
repeat_interleave(torch.tensor([1, 2, 0]), 0) | repeat_interleave(torch.tensor([0, 1, 2, 0]), -1)
repeat_interleave(torch.tensor([1, 2, 0]), dim=0, output_size=3) | repeat_interleave(2, 6)
tile((2,)) | tile((2, 1)) | tile((2, 1, 2)) | tile((3, 1, 1, 1))
roll(1) | roll(1, 0) | roll(-1, -1) | roll((1, 2), (0, 1)) | roll(5, 0) | roll(1, 7) | roll((1, 1), (0, 0))
flip(0) | flip((0, 1)) | flip(-1) | flip((0,)) | flip(6) | flip((1, -1)) | flip(())
fliplr() | flipud() | rot90() | rot90(2) | rot90(-1, (1, 0)) | rot90(1, (0, 2)) | rot90(3, [0, 1]) | rot90(1, (0, 0))
split(2) | split(1) | split(2, 1) | split(3, -1) | split([1, 2])
split([1, 3], 1) | split([1, 1], 0) | split(0) | split(-1)
split(2, 5) | split([2, 2]) | split(99) | split([0, 3], dim=0) | split((1, 2), 0)
tensor_split(2) | tensor_split(3, 1) | tensor_split((1, 2)) | tensor_split([1], -1)
tensor_split(5) | tensor_split((2, 1))
chunk(2) | chunk(3, 1) | chunk(2, -1) | chunk(0) | chunk(9) | chunk(1, 8) | chunk(4)
unbind(0) | unbind(-1) | unbind(1) | unbind(4) | unbind(dim=0)
narrow(0, 1, 2) | narrow(0, -2, 2) | narrow(1, 1, 2) | narrow(0, 0, 0)
narrow(0, 1, 9) | narrow(3, 0, 1) | narrow(-1, 0, 1)
gather(0, torch.zeros(2, 4, dtype=torch.int64)) | gather(0, torch.tensor([3, 1, 1]))
gather(1, torch.tensor([[2], [0], [1]]))
gather(-1, torch.tensor([[0, 1, 3], [1, 1, 1], [2, 0, 3]])) | gather(5, torch.zeros(1, dtype=torch.int64))
gather(0, torch.tensor([9])) | gather(2, torch.zeros(2, 1, 2, dtype=torch.int64))
masked_select(torch.eye(3, 4).bool()) | masked_select(torch.tensor([True, False, True, True]))
masked_select(torch.zeros(3, 4).bool()) | masked_select(torch.ones(2, 1, 3).bool()) | masked_select(torch.tensor(True))
atleast_1d() | atleast_2d()
"""
CALLS_BY_NAME: dict[str, Op] = {
    call.strip(): eval(f"lambda x: x.{call.strip()}", {"torch": torch})
    for line in CALLS.strip().splitlines()
    for call in line.split("|")
}

# Functions of torch that tensors lack as methods.
NO_TENSOR_METHODS = {"atleast_1d", "atleast_2d"}

# What torch does to a 0-dim tensor as if it had a dim 0, and a container refuses, since its leaves can have a dim 0 of
# their own.
OF_A_DIMENSION = {"flip((0,))", "flip(-1)", "flip(0)", "moveaxis(-1, 0)", "movedim(0, -1)", "squeeze(-1)", "squeeze(0)",
                  "squeeze(dim=0)", "swapdims(0, -1)", "transpose(-1, 0)", "transpose(0, 0)"}  # fmt: skip


def expected(call: str, kind: Kind) -> Any:
    """The numbers of the batch elements in the result, the error that torch raises, or None where masks broadcast."""
    numbers = index_map(kind.batch_size)
    name = call.partition("(")[0]
    try:
        if name in NO_TENSOR_METHODS:
            return getattr(torch, name)(numbers)
        if name == "masked_select" and numbers.shape != eval(call[len(name) :], {"torch": torch}).shape:
            return None
        return CALLS_BY_NAME[call](numbers)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        return error


@pytest.mark.parametrize("call", CALLS_BY_NAME)
def test_like_torch(td: Any, plain: Plain, kind: Kind, call: str) -> None:
    numbers = expected(call, kind)
    if not kind.batch_size and call in OF_A_DIMENSION:
        numbers = IndexError()
    if numbers is None:
        pytest.skip("masks of fewer dimensions are the business of indexing")
    if isinstance(numbers, Exception):
        with pytest.raises(type(numbers)):
            CALLS_BY_NAME[call](td)
        assert_matches(td, plain, kind.batch_size, kind.extra)
        return
    result = CALLS_BY_NAME[call](td)
    if isinstance(numbers, torch.Tensor):
        result, numbers = [result], [numbers]
    assert len(result) == len(numbers)
    for part, part_numbers in zip(result, numbers, strict=True):
        shape = tuple(part_numbers.shape)
        assert_matches(part, picked(plain, kind.batch_size, part_numbers), shape, kind.extra)
        assert part.device == td.device and len(part.names) == len(shape)
    assert_matches(td, plain, kind.batch_size, kind.extra)


VIEWS = ["view(-1)", "permute(1, 0)", "transpose(0, 1)", "unsqueeze(0)", "flatten()", "movedim(0, 1)", "unbind(0)",
         "squeeze()", "split(1)", "chunk(2)", "narrow(0, 0, 1)", "unflatten(0, (-1, 1))"]  # fmt: skip


@pytest.mark.parametrize("call", VIEWS)
def test_views_share_memory(td: Any, plain: Plain, kind: Kind, call: str) -> None:
    op = eval(f"lambda x: x.{call}", {"torch": torch})
    try:
        op(index_map(kind.batch_size))
    except (RuntimeError, IndexError):
        pytest.skip("no such operation on this batch size")
    if not kind.holds_views:
        pytest.skip("this kind copies")
    parts = op(td)
    for part in parts if isinstance(parts, (tuple, list)) else [parts]:
        part.zero_()
    if call == "narrow(0, 0, 1)":
        for leaf in leaves(plain).values():
            leaf[:1] = 0
    else:
        plain = mapped(torch.zeros_like, plain)
    assert_matches(td, plain, kind.batch_size, kind.extra)


@pytest.mark.parametrize("call", ["expand(2, 3, 4)", "expand_as(td)", "broadcast_to((3, 4))"])
def test_expanding_a_container_by_another(call: str) -> None:
    small = TensorDict({"a": torch.arange(4), "n": {"b": torch.zeros(4, 2)}}, [4])
    td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3, 4, 2)}}, [3, 4])
    result = eval(f"small.{call}", {"small": small, "td": td})
    assert result.batch_size[-2:] == torch.Size([3, 4])
    assert_leaf(result["a"], torch.arange(4).expand(result.batch_size), "a")
    assert result["a"].untyped_storage().nbytes() == small["a"].untyped_storage().nbytes()


def test_masked_fill(td: Any, plain: Plain, kind: Kind) -> None:
    mask = index_map(kind.batch_size) % 2 == 0
    numbers = index_map(kind.batch_size)

    def filled(leaf: torch.Tensor) -> torch.Tensor:
        result = leaf.clone()
        result[mask] = 1
        return result

    assert_matches(td.masked_fill(mask, 1), mapped(filled, plain), kind.batch_size, kind.extra)
    assert_matches(td, plain, kind.batch_size, kind.extra)
    assert td.masked_fill_(mask, 1) is td
    assert_matches(td, mapped(filled, plain), kind.batch_size, kind.extra)
    assert numbers.shape == td.batch_size


def test_where(td: Any, plain: Plain, kind: Kind) -> None:
    condition = index_map(kind.batch_size) % 2 == 0
    other = mapped(lambda leaf: torch.ones_like(leaf), plain)

    def chosen(leaf: torch.Tensor) -> torch.Tensor:
        result = torch.ones_like(leaf)
        result[condition] = leaf[condition]
        return result

    assert_matches(td.where(condition, TensorDict(other, kind.batch_size)), mapped(chosen, plain), kind.batch_size)
    with pytest.raises(KeyError, match="a"):
        td.where(condition, TensorDict(other, kind.batch_size).exclude("a"))
    padded = td.where(condition, TensorDict(other, kind.batch_size).exclude("a"), pad=1)
    assert_matches(padded, mapped(chosen, plain), kind.batch_size)
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_where_with_a_scalar(td: Any, plain: Plain, kind: Kind) -> None:
    condition = index_map(kind.batch_size) % 2 == 0
    result = td.select("a").where(condition, 5)
    expanded = condition.reshape(*kind.batch_size, 1).expand(plain["a"].shape)
    assert_leaf(result["a"], plain["a"].where(expanded, 5), "a")


@pytest.mark.parametrize("name", ["new_zeros", "new_ones", "new_empty", "new_full"])
def test_new(td: Any, plain: Plain, kind: Kind, name: str) -> None:
    args = (2,) if name == "new_full" else ()
    made = getattr(td, name)((6, 2), *args)
    assert made.batch_size == torch.Size([6, 2])
    for path, leaf in leaves(plain).items():
        shape = (6, 2, *leaf.shape[len(kind.batch_size) :])
        assert made[path].shape == shape and made[path].dtype == leaf.dtype
        if name != "new_empty":
            value = {"new_zeros": 0, "new_ones": 1, "new_full": 2}[name]
            assert_leaf(made[path], torch.full(shape, value, dtype=leaf.dtype), path)


NAMES = {
    "permute(1, 0)": ["env", "time"],
    "transpose(0, 1)": ["env", "time"],
    "movedim(0, 1)": ["env", "time"],
    "unsqueeze(0)": [None, "time", "env"],
    "unsqueeze(-1)": ["time", "env", None],
    "unsqueeze(0).squeeze(0)": ["time", "env"],
    "expand(2, 3, 4)": [None, "time", "env"],
    "unbind(0)[0]": ["env"],
    "unbind(1)[0]": ["time"],
    "split(1)[0]": ["time", "env"],
    "chunk(2)[0]": ["time", "env"],
    "tensor_split(2)[0]": ["time", "env"],
    "narrow(0, 0, 1)": ["time", "env"],
    "roll(1, 0)": ["time", "env"],
    "flip(0)": ["time", "env"],
    "rot90()": ["env", "time"],
    "repeat(2, 1)": ["time", "env"],
    "repeat_interleave(2, 0)": ["time", "env"],
    "gather(0, torch.zeros(2, 4, dtype=torch.int64))": ["time", "env"],
    "view(-1)": [None],
    "reshape(12)": [None],
    "flatten(0, 1)": [None],
    "masked_select(torch.ones(3, 4, dtype=torch.bool))": [None],
    "clone()": ["time", "env"],
    "contiguous()": ["time", "env"],
    "to(torch.float64)": ["time", "env"],
    "select('a')": ["time", "env"],
    "exclude('a')": ["time", "env"],
    "flatten_keys()": ["time", "env"],
    "empty()": ["time", "env"],
}


@pytest.mark.parametrize(("call", "names"), NAMES.items(), ids=NAMES.keys())
def test_names_follow_their_dimension(call: str, names: list[str | None]) -> None:
    td = TensorDict({"a": torch.zeros(3, 4, 2), "n": {"b": torch.zeros(3, 4)}}, [3, 4], names=["time", "env"])
    result = eval(f"td.{call}", {"td": td, "torch": torch})
    assert result.names == names
    if "n" in result.keys():
        assert result["n"].names == names


def test_reshape_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    if not kind.resizes or kind.is_module or kind.stack_dims or kind.stacked_at or kind.batch_size != (3, 4):
        pytest.skip("needs a container of two dims whose leaves can be exchanged")
    assert writable.reshape(2, -1, inplace=True) is writable
    assert_matches(writable, mapped(lambda leaf: leaf.reshape(2, 6, *leaf.shape[2:]), plain), (2, 6))
    with pytest.raises(RuntimeError, match="locked"):
        writable.lock_().reshape(12, inplace=True)


def test_masked_select_in_place(writable: Any, plain: Plain, kind: Kind) -> None:
    if kind.batch_size != (3, 4) or kind.is_module:
        pytest.skip("needs a container of two dims whose leaves can be exchanged")
    for mask in (torch.tensor([True, False, True]), index_map((3, 4)) % 3 == 1):
        expected, target = writable.masked_select(mask), writable.clone()
        if target._members() is not None or kind.stacked_at:
            with pytest.raises(NotImplementedError, match="lazy stack"):
                target.masked_select(mask, inplace=True)
            assert_matches(target, plain, kind.batch_size, kind.extra)
            continue
        keys = list(target.keys(True))
        assert target.masked_select(mask, inplace=True) is target
        assert_matches(target, mapped(itemgetter(mask), plain), expected.batch_size)
        assert list(target.keys(True)) == keys and target.names == expected.names
    with pytest.raises(IndexError, match="mask"):
        writable.masked_select(torch.ones(2, dtype=torch.bool), inplace=True)
    assert_matches(writable, plain, kind.batch_size, kind.extra)
    with pytest.raises(RuntimeError, match=r"locked|lazy stack"):
        writable.lock_().masked_select(mask, inplace=True)


def test_sizes_of_a_split_are_a_tensor(td: Any, kind: Kind) -> None:
    """Indices follow a list, or an int where the tensor has no dims."""
    if not kind.batch_size:
        pytest.skip("needs a batch dim")
    for sizes in ([1, kind.batch_size[0] - 1], 2):
        expected = td.split(sizes)
        pieces = td.split(torch.tensor(sizes))
        assert [piece.batch_size for piece in pieces] == [piece.batch_size for piece in expected]
        for piece, other in zip(pieces, expected):
            assert_close(piece, other)
    with pytest.raises(TypeError, match="split_size is an int"):
        td.split(torch.tensor([[1, 1]]))
    with pytest.raises(TypeError, match="split_size is an int"):
        td.split(torch.tensor(1.0))
