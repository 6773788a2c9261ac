"""The helpers of `tensordict.utils`, and the free functions that merge and stack containers of one structure."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import tensordict
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    UnbatchedTensor,
    assert_close,
    dense_stack_tds,
    is_batchedtensor,
    is_leaf_nontensor,
    lazy_stack,
    merge_tensordicts,
)
from tensordict.utils import expand_as_right, expand_right, isin, remove_duplicates


def test_expand_right() -> None:
    x = torch.arange(6).view(2, 3)
    wide = expand_right(x, [2, 3, 4])
    assert wide.shape == (2, 3, 4)
    assert wide.data_ptr() == x.data_ptr()
    assert torch.equal(wide[..., 3], x)
    assert expand_right(torch.zeros(1, 3), (2, 3, 4)).shape == (2, 3, 4)
    assert expand_right(TensorDict(a=torch.zeros(2, 5), batch_size=[2]), (2, 3))["a"].shape == (2, 3, 5)
    scalar = torch.tensor(3.0)
    for shape in ((), [], torch.Size([])):
        assert torch.equal(expand_right(scalar, shape), scalar)
    assert expand_right(TensorDict(a=torch.zeros(5)), ())["a"].shape == (5,)
    with pytest.raises(RuntimeError, match=r"\[2, 3\].*\[2\]"):
        expand_right(x, (2,))
    with pytest.raises(RuntimeError):
        expand_right(x, (3, 2, 4))


def test_expand_as_right() -> None:
    x = torch.arange(2)
    assert torch.equal(expand_as_right(x, torch.zeros(2, 3)), x[:, None].expand(2, 3))
    assert expand_as_right(x, TensorDict(batch_size=[2, 4])).shape == (2, 4)
    scalar = torch.tensor(3.0)
    assert torch.equal(expand_as_right(scalar, torch.tensor(1)), scalar)
    assert torch.equal(expand_as_right(scalar, TensorDict(a=1)), scalar)
    for dest in (torch.zeros(3, 2), torch.zeros(())):
        with pytest.raises(RuntimeError, match="does not begin with it"):
            expand_as_right(x, dest)


def test_isin() -> None:
    td = TensorDict(k=torch.tensor([[1, 2], [3, 4], [1, 2]]), v=torch.tensor([1.0, 2.0, 3.0]), batch_size=[3])
    reference = TensorDict(k=torch.tensor([[5, 6], [1, 2]]), v=torch.tensor([3.0, 9.0]), batch_size=[2])
    assert isin(td, reference, "k").tolist() == [True, False, True]
    assert isin(td, reference, "v").tolist() == [False, False, True]
    inside = [TensorDict(n=one, batch_size=one.batch_size) for one in (td, reference)]
    assert isin(*inside, ("n", "k"), -1).tolist() == [True, False, True]
    wide, narrow = (
        TensorDict(k=k, batch_size=k.shape) for k in (torch.tensor([[0, 1, 0], [1, 1, 1]]), torch.tensor([[0], [1]]))
    )
    assert isin(wide, narrow, "k", dim=1).tolist() == [True, False, True]
    assert isin(td[:0], reference, "k").tolist() == []
    with pytest.raises(KeyError, match="'z' in input, found nothing"):
        isin(td, reference, "z")
    with pytest.raises(KeyError, match="in reference"):
        isin(td, TensorDict(batch_size=[1]), "k")
    with pytest.raises(ValueError, match="dim 1"):
        isin(td, reference, "k", dim=1)
    with pytest.raises(RuntimeError, match=r"\[3, 2\] and \[1, 3\]"):
        isin(td, TensorDict(k=torch.zeros(1, 3), batch_size=[1]), "k")


def test_remove_duplicates() -> None:
    td = TensorDict(k=torch.tensor([[9, 9], [1, 0], [9, 9], [0, 5]]), v=torch.arange(4), batch_size=[4], names=["n"])
    result, where = remove_duplicates(td, "k", return_indices=True)
    assert result["k"].tolist() == [[0, 5], [1, 0], [9, 9]]
    assert result["v"].tolist() == where.tolist() == [3, 1, 0]
    assert result.names == ["n"]
    assert_close(remove_duplicates(td, "k", dim=-1), result)
    wide = TensorDict(k=torch.tensor([[0, 0, 1], [0, 0, 1]]), v=torch.arange(6).view(2, 3), batch_size=[2, 3])
    assert remove_duplicates(wide, "k", dim=1)["v"].tolist() == [[0, 2], [3, 5]]
    assert remove_duplicates(td[:0], "k").batch_size == (0,)
    nested = TensorDict(n=td, batch_size=[4])
    assert remove_duplicates(nested, ("n", "k"))["n", "v"].tolist() == [3, 1, 0]
    for key in ("n", "z"):
        with pytest.raises(KeyError, match=f"no tensor at '{key}'"):
            remove_duplicates(nested, key)
    with pytest.raises(ValueError, match="dim 1"):
        remove_duplicates(td, "k", dim=1)


def test_leaf_predicates() -> None:
    assert is_leaf_nontensor(torch.Tensor)
    assert is_leaf_nontensor(str)
    assert not is_leaf_nontensor(TensorDict)
    assert not is_leaf_nontensor(LazyStackedTensorDict)
    seen: list[bool] = []
    torch.vmap(lambda x: seen.append(is_batchedtensor(x)) or x)(torch.zeros(2))
    assert seen == [True]
    assert not is_batchedtensor(torch.zeros(2))


# --- merging ----------------------------------------------------------------------------------------------------------


def test_merge_of_uneven_stacks_keeps_what_only_some_members_have() -> None:
    stack = lazy_stack([TensorDict(c=torch.zeros(2)), TensorDict(z=torch.ones(3), u=UnbatchedTensor(torch.ones(4)))])
    merged = merge_tensordicts(stack, TensorDict(q=torch.arange(2), batch_size=[2]))
    assert [sorted(member.keys()) for member in merged.tensordicts] == [["c", "q"], ["q", "u", "z"]]
    assert merged[1]["q"] == 1 and type(merged[1]["u"]) is UnbatchedTensor
    merged = merge_tensordicts(stack, stack, callback_exist=lambda a, b: a + b)
    assert merged[1]["z"].tolist() == [2] * 3 and sorted(merged[0].keys()) == ["c"]


def test_merge_of_a_dense_container_and_an_uneven_stack_is_lazy() -> None:
    dense = TensorDict({"a": torch.zeros(2), "q": torch.arange(2)}, [2], names=["time"])
    some = lazy_stack([TensorDict(a=torch.ones(()), z=torch.ones(3)), TensorDict(a=torch.ones(()))])
    lengths = lazy_stack([TensorDict(z=torch.ones(n)) for n in (1, 2)])
    for first, second in ((dense, some), (TensorDict(n=dense), TensorDict(n=some))):
        merged = merge_tensordicts(first, second)
        merged = merged if first is dense else merged["n"]
        assert [sorted(member.keys()) for member in merged.unbind(0)] == [["a", "q", "z"], ["a", "q"]]
        assert merged["a"].tolist() == [0, 0] and merged.names == ["time"]
    merged = merge_tensordicts(dense, lengths)
    assert [member["z"].shape[0] for member in merged.tensordicts] == [1, 2]
    even = lazy_stack([TensorDict(z=torch.ones(2)) for _ in range(2)])
    assert type(merge_tensordicts(dense, even)) is TensorDict
    with pytest.raises(KeyError, match=r"only some members.*'z'"):
        merge_tensordicts(TensorDict(a=torch.zeros(2)), some)


def test_merge_of_a_value_and_a_tensor_gives_the_first() -> None:
    value, tensor = TensorDict(b="text"), TensorDict(b=torch.zeros(2))
    assert merge_tensordicts(value, tensor)["b"] == "text"
    assert merge_tensordicts(tensor, value)["b"].tolist() == [0, 0]
    assert merge_tensordicts(value, TensorDict(b="more"), callback_exist=lambda a, b: b)["b"] == "text"
    nested = TensorDict(b={"x": 1})
    assert merge_tensordicts(nested, value, TensorDict(b={"y": 2}))["b"].keys() == {"x", "y"}


def test_merge() -> None:
    a = TensorDict({"x": {"p": 0}, "both": 0, "s": 1}, names=[])
    b = TensorDict({"x": {"q": 1, "p": 5}, "both": 1, "t": 2})
    c = TensorDict({"x": {"p": 6}, "both": 2})
    before = a.clone()
    merged = merge_tensordicts(a, b, c)
    assert merged["both"] is a["both"]
    assert {key: value.item() for key, value in merged.items(True, True)} == {
        ("x", "p"): 0,
        ("x", "q"): 1,
        "both": 0,
        "s": 1,
        "t": 2,
    }
    assert_close(a, before)
    stacked = merge_tensordicts(a, b, c, callback_exist=lambda *values: torch.stack(values))
    assert stacked["both"].tolist() == [0, 1, 2]
    assert stacked["x", "p"].tolist() == [0, 5, 6]
    assert stacked["s"].item() == 1
    one = merge_tensordicts(a, b, c, callback_exist={("x", "p"): lambda *values: sum(values)})
    assert one["x", "p"].item() == 11
    assert one["both"].item() == 0


def test_merge_takes_after_the_first() -> None:
    a = TensorDict(a=torch.zeros(3), batch_size=[3], names=["n"]).lock_()
    merged = merge_tensordicts(a, TensorDict(b=torch.ones(3, 2)))
    assert merged.batch_size == (3,)
    assert merged.names == ["n"]
    assert not merged.is_locked


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ([], RuntimeError, "at least two"),
        ([{"a": 1}], TypeError, "got dict at position 1"),
        ([TensorDict(b=torch.zeros(4))], RuntimeError, "entry 'b' has shape"),
        ([TensorDict(a={"x": 1})], TypeError, "entry 'a' is a container in one"),
        ([TensorDict(n={"d": torch.zeros(2)})], RuntimeError, r"entry \('n', 'd'\)"),
    ],
)
def test_merge_refuses(others: list[Any], error: type[Exception], message: str) -> None:
    first = TensorDict({"a": torch.zeros(3), "n": {"c": torch.zeros(3)}}, batch_size=[3])
    with pytest.raises(error, match=message):
        merge_tensordicts(first, *others)


# --- dense stacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("inner_dim", [0, 1])
def test_dense_stack_keeps_nested_lazy_stacks(dim: int, inner_dim: int) -> None:
    members = [
        TensorDict(a=torch.zeros(3, 2), batch_size=[3]),
        TensorDict(a=torch.zeros(3, 5), b=torch.ones(3), batch_size=[3]),
    ]
    shape = (2, 3) if inner_dim == 0 else (3, 2)
    lazy = lazy_stack(members, inner_dim)
    first = TensorDict(lazy=lazy, d=torch.zeros(shape), batch_size=shape)
    second = first.apply(lambda leaf: leaf + 1)
    stack = dense_stack_tds([first, second], dim=dim)
    assert type(stack) is TensorDict
    assert isinstance(stack["lazy"], LazyStackedTensorDict)
    assert stack["lazy"].batch_size == stack.batch_size == (*shape[:dim], 2, *shape[dim:])
    for i, td in enumerate((first, second)):
        part = stack[(slice(None),) * dim + (i,)]
        assert torch.equal(part["d"], td["d"])
        for got, want in zip(part["lazy"].tensordicts, td["lazy"].tensordicts, strict=True):
            assert_close(got, want)
    assert_close(dense_stack_tds(lazy_stack([first, second], dim)), stack)


def test_dense_stack_of_other_things() -> None:
    a = TensorDict(a=torch.zeros(3, 2), batch_size=[3], names=["n"])
    dense = dense_stack_tds([a, a], -1)
    assert dense["a"].shape == (3, 2, 2)
    assert dense.names == ["n", None]
    for other in (TensorDict(a=torch.zeros(3, 4), batch_size=[3]), TensorDict(b=torch.zeros(3), batch_size=[3])):
        assert isinstance(dense_stack_tds([a, other], 0), LazyStackedTensorDict)
    with pytest.raises(ValueError, match="pass dim="):
        dense_stack_tds([a, a])
    with pytest.raises(TypeError, match="Tensor"):
        dense_stack_tds([torch.zeros(1)], 0)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("base", ["NO_DEFAULT", "TensorDictBase", "is_tensor_collection"]),
        ("tensorclass", ["NonTensorData", "NonTensorStack", "TensorClass", "is_tensorclass", "tensorclass"]),
        ("prototype", ["TensorClass", "from_dataclass", "tensorclass"]),
        ("utils", ["capture_non_tensor_stack", "list_to_stack", "set_capture_non_tensor_stack", "set_list_to_stack"]),
    ],
)
def test_modules_that_programs_import_from(module: str, names: list[str]) -> None:
    found = importlib.import_module(f"tensordict.{module}")
    for name in names:
        assert name in found.__all__ and getattr(found, name) is getattr(tensordict, name, getattr(found, name))


def test_isin_of_bools() -> None:
    td = TensorDict({"a": torch.tensor([True, False, True])}, [3])
    assert isin(td, td[:1], "a").tolist() == [True, False, True]
