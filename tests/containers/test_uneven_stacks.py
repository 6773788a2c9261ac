"""Lazy stacks whose members have leaves of different shapes, or different keys: what can be done without stacking."""

from __future__ import annotations

import copy
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tensordict import (
    LazyStackedTensorDict,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    is_leaf_nontensor,
    lazy_stack,
    load,
    save,
)
from tensordict.base import _NESTED_TENSORS_AS_LISTS, _NESTED_TENSORS_AS_LISTS_NONTENSOR
from tensordict.core.exceptions import StackError, UnsupportedEntryError


def is_tensor(cls: type) -> bool:
    return issubclass(cls, torch.Tensor)


def uneven(count: int = 2, offset: float = 0) -> Any:
    """Members whose entry "a" is longer each time; all but the first have an entry of their own."""
    members = []
    for i in range(count):
        value = torch.full((i + 1,), offset + i)
        entries = {"a": value, "b": {"c": torch.full((2,), offset + i)}, "note": f"note {i}"}
        members.append(TensorDict(entries | ({"b": {"c": value, "d": value}} if i else {})))
    return lazy_stack(members)


# --- views --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_keys_with_an_idea_of_leaves(inside: bool) -> None:
    stack = uneven()
    td, prefix = (TensorDict(l=stack, batch_size=[2]), ("l",)) if inside else (stack, ())

    def under(*paths: tuple[str, ...]) -> list[Any]:
        found = [(*prefix, *path) for path in paths]
        return [path[0] if len(path) == 1 else path for path in found]

    leaves = under(("a",), ("b", "c"))
    assert list(td.keys(True, True, is_leaf=is_tensor)) == leaves and len(td.keys(True, True, is_leaf=is_tensor)) == 2
    assert sorted(td.keys(True, True, is_leaf=is_leaf_nontensor), key=str) == sorted(
        [*leaves, *under(("note",))], key=str
    )
    assert leaves[1] in td.keys(True, True, is_leaf=is_tensor)
    if not inside:
        assert list(td.keys(False, True, is_leaf=is_tensor)) == ["a"]
        assert list(td.keys(leaves_only=True)) == ["a"] and list(td.keys(sort=True)) == ["a", "b", "note"]


def test_members_apart() -> None:
    stack = uneven()
    first, second = stack.tensordicts
    for td, prefix in ((stack, ()), (TensorDict(l=stack, batch_size=[2]), ("l",))):
        items = dict(td.items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS))
        assert items.keys() == {
            (*prefix, *path) for path in [("0", "a"), ("0", "b", "c"), ("1", "a"), ("1", "b", "c"), ("1", "b", "d")]
        }
        assert items[(*prefix, "1", "a")] is second["a"] and items[(*prefix, "0", "b", "c")] is first["b", "c"]
        values = list(td.values(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS))
        assert [value.data_ptr() for value in values] == [value.data_ptr() for value in items.values()]
        everything = dict(td.items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS_NONTENSOR))
        assert everything.keys() - items.keys() == {(*prefix, "0", "note"), (*prefix, "1", "note")}
        with_nodes = [key for key, _ in td.items(True, is_leaf=_NESTED_TENSORS_AS_LISTS)]
        assert (*prefix, "0", "b") in with_nodes and (("l" in with_nodes) is bool(prefix))
    top = [key for key, _ in stack.items(is_leaf=_NESTED_TENSORS_AS_LISTS)]
    assert top == [("0", "a"), ("0", "b"), ("0", "note"), ("1", "a"), ("1", "b"), ("1", "note")]
    assert [key for key, _ in stack.items(leaves_only=True, is_leaf=_NESTED_TENSORS_AS_LISTS)] == [
        ("0", "a"),
        ("1", "a"),
    ]
    ordered = [key for key, _ in stack.items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS, sort=True)]
    assert ordered == sorted(ordered)


def test_members_apart_of_stacks_of_stacks() -> None:
    stacks = [uneven(2), uneven(3)]
    keys = [
        key for key, _ in lazy_stack([stacks[0], stacks[1][:2]]).items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)
    ]
    assert keys[0] == ("0", "0", "a") and ("1", "1", "b", "d") in keys and len(keys) == 10


def test_members_apart_of_tensorclasses() -> None:
    class Row(TensorClass):
        x: torch.Tensor
        y: Any = None

    rows = lazy_stack([Row(torch.zeros(1), Row(torch.zeros(2))), Row(torch.zeros(3), Row(torch.zeros(4)))])
    items = {key: value.numel() for key, value in rows.items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)}
    assert items == {("0", "x"): 1, ("0", "y", "x"): 2, ("1", "x"): 3, ("1", "y", "x"): 4}


def test_names_of_members_apart() -> None:
    stack = uneven()
    names: list[Any] = []
    result = stack.named_apply(
        lambda name, x: names.append(name) or x + 1, nested_keys=True, is_leaf=_NESTED_TENSORS_AS_LISTS
    )
    assert set(names) == {key for key, _ in stack.items(True, True, is_leaf=_NESTED_TENSORS_AS_LISTS)}
    assert torch.equal(result[1]["b", "d"], stack[1]["b", "d"] + 1)
    plain: list[Any] = []
    stack.named_apply(lambda name, x: plain.append(name), nested_keys=True)
    assert set(plain) == {"a", ("b", "c"), ("b", "d")}


def test_the_marker_stays_the_same_object() -> None:
    for marker in (_NESTED_TENSORS_AS_LISTS, _NESTED_TENSORS_AS_LISTS_NONTENSOR):
        assert pickle.loads(pickle.dumps(marker)) is marker and copy.deepcopy(marker) is marker
        assert marker(torch.Tensor) and not marker(TensorDict)


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [slice(0, 2), [0, 1], torch.tensor([True, True, False])], ids=str)
def test_update_at(index: Any) -> None:
    stack, new = uneven(3), uneven(2, 10)
    held = [member["a"] for member in stack.tensordicts]
    assert stack.update_at_(new, index) is stack
    assert [leaf.tolist() for leaf in held] == [[10], [11, 11], [2, 2, 2]]
    assert stack[1]["b", "d"].tolist() == [11, 11] and stack[0]["note"] == "note 0"


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("features", [[], [3]], ids=["same batch size", "longer batch size"])
def test_update_of_a_nested_container_keeps_entries_of_single_members(inplace: bool, features: list[int]) -> None:
    members = [TensorDict(batch_size=features, b=torch.full((3,), i)) for i in (1.0, 2.0)]
    members[1]["z"] = torch.ones(3)
    nested = TensorDict(batch_size=[2], b=torch.zeros(2, 3), own=torch.tensor([7.0, 8.0]))
    td = TensorDict(batch_size=[2], nested=nested)
    td.update({"nested": lazy_stack(members)}, inplace=inplace)
    assert td["nested", "b"].tolist() == [[1.0] * 3, [2.0] * 3]
    assert td["nested", "own"].tolist() == [7.0, 8.0]
    assert "z" not in td["nested"][0]
    assert td["nested"][1]["z"].tolist() == [1.0] * 3
    assert nested["b"].any() == inplace


def nest_uneven(dim: int, deeper: bool) -> Any:
    """A lazy stack of one member along `dim`, whose nested lazy stack has an entry of its second member only."""
    rows = [TensorDict(batch_size=[3], a=torch.zeros(3)) for _ in range(2)]
    rows[1]["z"] = torch.ones(3)
    member = TensorDict(batch_size=[2, 3], s=lazy_stack(rows))
    return lazy_stack([TensorDict(batch_size=[2, 3], n=member) if deeper else member], dim)


@pytest.mark.parametrize("deeper", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_block_over_a_reshaped_stack_keeps_entries_of_single_members(dim: int, deeper: bool) -> None:
    stack = nest_uneven(dim, deeper)
    key = ("n", "s") if deeper else "s"
    a = stack.tensordicts[0][key].tensordicts[0]["a"]
    with stack.flatten(0, -1) as flat:
        flat["new"] = torch.ones(6)
        for element in flat.tensordicts:
            if "z" in element[key]:
                element[key]["z"] = torch.tensor(5.0)
    first, second = stack.tensordicts[0][key].tensordicts
    assert "z" not in first and second["z"].tolist() == [5.0] * 3
    assert first["a"] is a and stack["new"].all()


@pytest.mark.parametrize("deeper", [False, True])
def test_vmap_over_a_stack_keeps_entries_of_single_members_of_members(deeper: bool) -> None:
    key = ("n", "s") if deeper else "s"
    result = torch.vmap(lambda td: td.add_(1))(nest_uneven(0, deeper))
    first, second = result.tensordicts[0][key].tensordicts
    assert "z" not in first and second["z"].tolist() == [1.0] * 3  # unchanged, because the function does not see it
    assert first["a"].tolist() == second["a"].tolist() == [1.0] * 3


@pytest.mark.parametrize("depth", [2, 3])
def test_vmap_over_stacks_of_stacks_keeps_entries_of_single_members(depth: int) -> None:
    first = lazy_stack([TensorDict(batch_size=[4], a=torch.zeros(4)), TensorDict(batch_size=[4], a=torch.zeros(4))])
    first[1]["z"] = torch.ones(4)
    stack = first
    for _ in range(depth - 1):
        stack = lazy_stack([stack, stack.clone()])
    result = torch.vmap(lambda td: td.set("new", torch.zeros(td.batch_size)).add_(1))(stack)
    assert result.batch_size == stack.batch_size and (result["new"] == 1).all()
    for row in (result[(0,) * depth], result[(1,) * (depth - 1) + (0,)]):
        assert "z" not in row and row["a"].tolist() == [1.0] * 4
    assert result[(1,) * depth]["z"].tolist() == [1.0] * 4


@pytest.mark.parametrize("length", [0, 1, 3])
@pytest.mark.parametrize("lazy", [False, True])
def test_update_with_another_number_of_members(length: int, lazy: bool) -> None:
    stack = lazy_stack([TensorDict(batch_size=[2], a=torch.zeros(2)) for _ in range(2)], 1)
    new = TensorDict(batch_size=[2, 3], a=torch.arange(6).view(2, 3), b=torch.ones(2, 3))[:, :length]
    source = new.to_lazystack(1) if lazy and length else new
    assert stack.update(source, update_batch_size=True) is stack
    assert stack.batch_size == (2, length) and len(stack.tensordicts) == length
    for key in ("a", "b") if length else ():
        assert stack[key].tolist() == new[key].tolist()
    stack["c"] = torch.zeros(2, length)
    assert "c" not in source


def test_update_with_another_number_of_members_loses_no_entries() -> None:
    stack = lazy_stack([TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(2), z=torch.ones(()))])
    with pytest.raises(RuntimeError, match="not present in the source.*'z'"):
        stack.update(TensorDict(batch_size=[3], a=torch.ones(3, 2)), update_batch_size=True)
    assert stack.batch_size == (2,) and not stack["a"].any() and "z" in stack[1]


def test_a_locked_nested_container_takes_no_entries_of_single_members() -> None:
    td = TensorDict(batch_size=[2], nested=TensorDict(batch_size=[2], b=torch.zeros(2))).lock_()
    members = [TensorDict(b=torch.ones(())), TensorDict(b=torch.ones(()), z=torch.ones(()))]
    with pytest.raises(RuntimeError, match="cannot update the entry 'nested'"):
        td.update({"nested": lazy_stack(members)}, inplace=True)
    assert not td["nested", "b"].any()


def test_failed_update_at_changes_nothing() -> None:
    stack, new = uneven(3), uneven(2, 10)
    new[1]["extra"] = torch.zeros(1)
    with pytest.raises(KeyError, match="extra"):
        stack.update_at_(new, slice(0, 2))
    with pytest.raises(RuntimeError, match="entry 'a'"):
        stack.update_at_(uneven(2, 10), slice(1, 3))
    assert [leaf.tolist() for leaf in stack.get("a", as_list=True)] == [[0], [1, 1], [2, 2, 2]]
    assert "extra" not in stack[1]


@pytest.mark.parametrize("flatten", [lambda td: td.reshape(-1), lambda td: td.flatten()], ids=["reshape", "flatten"])
def test_rows_of_members_of_unequal_sizes_become_one_stack(flatten: Any) -> None:
    rows = [TensorDict(a=torch.tensor([i]), t=f"row {i}") for i in range(5)]
    stack = lazy_stack([lazy_stack(rows[:2]), lazy_stack(rows[2:])])
    flat = flatten(stack)
    assert flatten(stack[None])["a"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert flatten(stack[True])["a"].flatten().tolist() == [0, 1, 2, 3, 4]
    assert flatten(stack[1, True])["a"].flatten().tolist() == [2, 3, 4] and stack[False].batch_size == (0, 2, -1)
    assert flat.batch_size == (5,) and flat["a"].flatten().tolist() == [0, 1, 2, 3, 4] and flat["t"][4] == "row 4"
    flat[4]["a"].fill_(9)
    assert stack[1][2]["a"] == 9
    empty = flatten(lazy_stack([lazy_stack(rows)[:0], lazy_stack(rows)[:0].expand(2, 0)[0]]))
    assert empty.batch_size == (0,) and empty["a"].shape == (0, 1)
    with pytest.raises(RuntimeError, match="different batch sizes"):
        lazy_stack([lazy_stack(rows[:2]), lazy_stack(rows[2:])], 1).reshape(-1)


def test_padding_with_a_mask() -> None:
    stack = lazy_stack([TensorDict(a=torch.ones(2, 1)), TensorDict(a=torch.ones(3, 2))])
    for holder, key in ((stack, "a"), (TensorDict(n=stack), ("n", "a"))):
        for side in ("left", "right"):
            tensor, mask = holder.get(key, as_padded_tensor=True, padding_side=side, padding_value=7, return_mask=True)
            assert mask.dtype is torch.bool and mask.shape == tensor.shape == (2, 3, 2)
            assert torch.equal(tensor == 7, ~mask) and mask.sum() == 2 + 6
    with pytest.raises(ValueError, match="as_padded_tensor=True only"):
        stack.get("a", return_mask=True)


def test_where_of_a_nested_stack_whose_members_hold_different_kinds() -> None:
    members = [TensorDict({"a": torch.tensor(float(i))}) for i in range(2)] + [TensorDict({"a": "text"})]
    td = TensorDict({"n": lazy_stack(members)}, [3])
    result = td.where(torch.tensor([True, False, True]), td.apply(torch.neg))
    assert result["n"].get("a", as_list=True)[0] == 0.0
    assert result["n"][1]["a"] == -1.0 and result["n"][2]["a"] == "text"


def test_densify_with_an_unbatched_tensor_that_some_members_lack() -> None:
    stack = lazy_stack([TensorDict(), TensorDict({"c": TensorDict({"b": UnbatchedTensor(torch.ones(2))})})])
    dense = stack.densify()
    assert type(dense["c"]) is TensorDict and dense["c"].batch_size == (2,) and dense["c", "b"].tolist() == [1, 1]


def episodes() -> Any:
    """Members that are not as long as each other."""
    made = [TensorDict(x=torch.arange(n), y={"z": torch.ones(n, 2)}, note=f"{n}", batch_size=[n]) for n in (2, 4, 3)]
    stack = lazy_stack(made)
    stack.names = ["episode", "time"]
    return stack


def test_densify_keeps_the_batch_dims_that_have_a_size() -> None:
    dense = episodes().densify(torch.jagged)
    assert dense.batch_size == dense["y"].batch_size == (3,) and dense.names == dense["y"].names == ["episode"]
    assert dense[1].batch_size == () and dense[1]["x"].tolist() == [0, 1, 2, 3] and dense[1:]["y", "z"].size(0) == 2
    assert [dense[i]["note"] for i in range(3)] == [["2"] * 2, ["4"] * 4, ["3"] * 3]


@pytest.mark.parametrize("name", ["folder", "a.tdz", "a.zarr", "a.safetensors"])
def test_what_was_densified_is_saved(name: str, tmp_path: Path) -> None:
    dense = episodes().exclude("note").densify(torch.jagged)
    save(dense, tmp_path / name)
    loaded = load(tmp_path / name)
    assert loaded.batch_size == (3,) and loaded.names == ["episode"] and loaded[1]["x"].tolist() == [0, 1, 2, 3]
    assert [len(row) for row in loaded["y", "z"].unbind()] == [2, 4, 3]


@pytest.mark.parametrize("name", ["folder", "a.tdz", "a.zarr", "a.h5", "a.safetensors"])
def test_a_batch_size_that_no_reader_takes_is_refused_before_what_is_there_is_replaced(
    name: str, tmp_path: Path
) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    save(TensorDict(x=torch.ones(2), batch_size=[2]), tmp_path / name)
    for td in (TensorDict({}, [2, -1]), TensorDict({"n": TensorDict({"x": rows}, rows.shape)})):
        with pytest.raises(RuntimeError, match=r"batch size is \[2, (-1|j\d+)\] cannot be stored.*td.batch_size"):
            save(td, tmp_path / name)
        assert load(tmp_path / name)["x"].tolist() == [1, 1] and len(list(tmp_path.iterdir())) == 1


def test_setdefault_of_rows_that_do_not_stack_changes_nothing() -> None:
    stack = lazy_stack([TensorDict(), TensorDict()])
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for key in ("r", ("n", "r")):
        with pytest.raises(RuntimeError, match="'r'"):
            stack.setdefault(key, rows)
        assert not list(stack.keys()) and not list(stack[0].keys())


def test_set_at_of_an_entry_that_only_some_members_have() -> None:
    stack = uneven()
    stack.set_at_(("b", "d"), 5, 1)
    assert stack.tensordicts[1]["b", "d"].tolist() == [5.0, 5.0]
    with pytest.raises(KeyError, match="b.*d"):
        stack.set_at_(("b", "d"), 5, slice(None))


# --- saving ---------------------------------------------------------------------------------------------------------


def stacks_of_stacks() -> dict[str, Any]:
    inner = lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(2), z=torch.zeros(1))])
    return {"z": lazy_stack([inner, inner]), "('q', 'z')": lazy_stack([TensorDict(q=inner, batch_size=[2])] * 2)}


@pytest.mark.parametrize("key", ["z", "('q', 'z')"])
def test_no_format_loses_entries_of_inner_members(key: str, tmp_path: Path) -> None:
    stack = stacks_of_stacks()[key]
    assert any("z" in name for name in stack.state_dict())
    for method in ("to_h5", "to_zarr"):
        with pytest.raises(UnsupportedEntryError, match=re.escape(key.strip("'"))):
            getattr(stack, method)(tmp_path / method)
    with pytest.raises(UnsupportedEntryError, match="different keys"):
        stack.to_parquet(tmp_path / "x.parquet")
    assert os.listdir(tmp_path) == []


def test_no_entry_of_members_of_members_is_lost() -> None:
    rows = lazy_stack(
        [
            TensorDict(a=torch.ones(2, 3), b=torch.ones(2, 3), batch_size=[2]),
            TensorDict(a=torch.ones(2, 3), batch_size=[2]),
        ]
    )
    stack = lazy_stack([rows, rows.clone()])
    with pytest.raises(StackError, match="entry 'b' is missing in some members of a member"):
        stack.densify()
    with pytest.raises(StackError, match="entry 'b' is missing"):
        TensorDict(nested=stack).densify()
    dense = lazy_stack([member.densify(torch.jagged) for member in stack.unbind(0)])
    assert set(dense.keys()) == {"a", "b"}


@pytest.mark.parametrize("index", [True, False, (0, True), (slice(None), True)], ids=str)
def test_bool_indices_keep_the_names_of_dims(index: Any) -> None:
    stack = lazy_stack([TensorDict(batch_size=[3]), TensorDict(batch_size=[3], z=torch.zeros(3))])
    td = TensorDict(batch_size=[2, 3], s=stack, names=["t", "v"])
    assert td[index]["s"].names == td[index].names == TensorDict(batch_size=[2, 3], names=["t", "v"])[index].names


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda td: td.rot90(),
        lambda td: td.rot90(0),
        lambda td: td.roll(1),
        lambda td: td.gather(0, torch.tensor([[0, 0], [1, 1], [2, 2], [1, 0]])),
    ],
)
def test_rearranged_elements_keep_the_entries_of_single_members(rearrange: Any) -> None:
    members = [TensorDict({"a": torch.arange(2.0) + 2 * i}, [2]) for i in range(4)]
    members[1]["z"] = torch.ones(2)
    dense = TensorDict({"a": torch.arange(8.0).view(4, 2), "z": torch.tensor([[0, 0], [1, 1], [0, 0], [0, 0]])}, [4, 2])
    stack = lazy_stack(members)
    expected = rearrange(dense)
    for result in (rearrange(stack), rearrange(TensorDict({"n": stack}, [4, 2]))["n"]):
        assert result.batch_size == expected.batch_size and result["a"].equal(expected["a"])
        for row, wanted in zip(result.reshape(-1).unbind(0), expected["z"].flatten(), strict=True):
            assert ("z" in row.keys()) == bool(wanted)


def test_comparisons_with_another_batch_size_keep_the_entries_of_single_members() -> None:
    members = [TensorDict({"a": torch.arange(3.0) + i, "v": "text"}, [3]) for i in range(2)]
    for member in members:
        member["n"] = lazy_stack([TensorDict({}), TensorDict({"z": torch.ones(())}), TensorDict({})])
    stack = lazy_stack(members)
    for other in (stack[:1], stack[0]):
        result = stack > other
        assert result.batch_size == (2, 3) and result["a"].tolist() == [[False] * 3, [True] * 3]
        assert [list(element.keys()) for element in result[1]["n"].unbind(0)] == [[], ["z"], []]
    assert (stack[:1] > stack).batch_size == (2, 3) and "z" in (stack[:1] > stack)[1]["n"][1].keys()


def test_the_device_reaches_containers_of_single_members() -> None:
    stack = lazy_stack([TensorDict({"n": {"a": 1}}), TensorDict({"m": {"a": 1}})])
    stack.auto_device_()
    assert stack[0]["n"].device == stack[1]["m"].device == torch.device("cpu")
    stack.clear_device_()
    assert stack[0]["n"].device is None


def test_only_the_nested_container_is_locked_and_takes_no_entries_of_single_members() -> None:
    td = TensorDict(batch_size=[2], nested=TensorDict(batch_size=[2], b=torch.zeros(2)).lock_())
    members = [TensorDict(b=torch.ones(())), TensorDict(b=torch.ones(()), z=torch.ones(()))]
    with pytest.raises(RuntimeError, match="cannot update the entry 'nested'"):
        td.update({"nested": lazy_stack(members)})
    assert not td["nested", "b"].any() and td["nested"].is_locked
    td.update({"nested": lazy_stack(members)}, ignore_lock=True)
    assert td["nested", "b"].all() and "z" in td["nested"][1]


def test_an_update_refuses_entries_of_single_members_of_another_batch_size() -> None:
    td = TensorDict(batch_size=[3], nested=TensorDict(batch_size=[3], b=torch.zeros(3)))
    members = [TensorDict(y=torch.ones(())), TensorDict(z=torch.ones(()))]
    with pytest.raises(RuntimeError, match=r"'nested'.*batch size \[2\].*batch size \[3\]"):
        td.update({"nested": lazy_stack(members)})
    assert type(td["nested"]) is TensorDict and not td["nested", "b"].any()


@pytest.mark.parametrize("lazy", [False, True])
def test_an_update_of_the_batch_size_keeps_the_device(lazy: bool) -> None:
    td = TensorDict(batch_size=[2], device="meta", a=torch.zeros(2))
    td = td.to_lazystack(0) if lazy else td
    td.update(TensorDict(batch_size=[3], a=torch.ones(3)), update_batch_size=True)
    assert td.batch_size == (3,) and td.device == td["a"].device == torch.device("meta")


def test_members_with_a_field_called_keys_may_have_different_keys() -> None:
    class Holder(TensorClass["shadow"]):  # type: ignore[misc]
        keys: torch.Tensor
        other: Any = None

    holders = [Holder(keys=torch.zeros(()), batch_size=[]), Holder(torch.ones(()), torch.ones(()), batch_size=[])]
    td = TensorDict({"n": TensorDict({"keys": torch.zeros(2)}, [2])}, [2])
    td.update({"n": LazyStackedTensorDict(*holders)})
    assert td["n", "keys"].tolist() == [0, 1]
