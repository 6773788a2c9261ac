"""Indexing, which follows torch's indexing of a tensor of the batch size: reading, assigning, iterating."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from contract.kinds import Kind
from contract.model import (
    Plain,
    assert_leaf,
    assert_matches,
    changed,
    index_map,
    leaves,
    mapped,
    nodes,
    picked,
    replaced,
)
from tensordict import TensorDict, lazy_stack

INDICES: list[Any] = [
    0, -1, 1, 3, 7, -9, True, False, None, ..., (), [],
    slice(None), slice(1, 3), slice(-2, None), slice(None, None, 2), slice(1, None, 3), slice(2, 1), slice(0, 99),
    slice(None, None, -1), slice(torch.tensor(0), torch.tensor(2)),
    [0], [1, 0], [0, 0, 1], [0, 7], [True, False], [True, False, True], [True, False, True, False], range(2), range(9),
    np.int64(1), np.int32(0), np.uint8(1), np.array(1), np.array([0, 1]), np.array([[0, 1], [1, 0]]),
    np.array([True, False, True]), np.array([True, False, True, True]), np.array([1, 0], dtype=np.int32),
    torch.tensor(1), torch.tensor(-1), torch.tensor([1, 0]), torch.tensor([[0, 1], [1, 1]]),
    torch.zeros(0, dtype=torch.int64), torch.tensor([1, 0], dtype=torch.int32), torch.tensor([7]),
    torch.tensor(True), torch.tensor(False), torch.tensor([True, False, True]),
    torch.tensor([True, False, True, False]),
    torch.ones(3, 4, dtype=torch.bool), torch.eye(3, 4, dtype=torch.bool), torch.zeros(3, 4, dtype=torch.bool),
    torch.ones(9, dtype=torch.bool), torch.tensor([0.5]), 1.5, {0: 1},
    (0,), (0, 1), (0, 1, 0), (0, 0, 2), (0, 0, 0, 0), (-1, -1), (0, 9),
    (slice(None), 0), (slice(None), 1), (slice(1, None), slice(None, 2)), (0, slice(1, 3)), (0, slice(None), None),
    (..., 0), (0, ...), (..., None), (None, ..., 0), (..., slice(1, None)), (None, 0), (slice(None), None), (0, ..., 0),
    (slice(None), ..., 1), (..., 0, 0), (None, None, slice(0, 1)), (..., ...),
    (slice(None), [0, 1]), ([0, 1], [1, 2]), ([0, 1], 0), (0, [0, 1]), ([0, 1], slice(1, 3)), ([0, 1], None, [0, 1]),
    (range(2), range(2)), (torch.tensor([0, 1]), 1), (1, torch.tensor([0, 1])), (torch.tensor([[0], [1]]), [0, 1]),
    (torch.tensor(1), torch.tensor(0)), (slice(None), torch.tensor([True, False, True, True])),
    (slice(None), np.array([0, 1])), (np.array([0, 1]), np.array([0, 1])), (1, True), (None, 0, [0, 1]),
    (slice(None), slice(None), [0, 2]), ([0, 1], slice(None), [0, 2]), (0, slice(None), [0, 1]),
    (torch.tensor([True, False, True]), 0), (torch.tensor([True, False, True]), [0, 1]),
    (slice(0, 0),), ([0, 1], [0, 1, 2]), (0, "text"),
]  # fmt: skip


def describe(index: Any) -> str:
    text = repr(index).replace("dtype=", "").replace("\n", "").replace(" ", "")
    return text.replace("None,None", ":")[:60]


def expected_numbers(index: Any, kind: Kind) -> torch.Tensor | None:
    """Which batch elements torch picks, or None where it refuses the index."""
    try:
        return index_map(kind.batch_size)[index]
    except (IndexError, TypeError, ValueError):
        return None


def refusal(index: Any, kind: Kind) -> type[Exception]:
    """The error of an index that torch refuses: its own, `IndexError`, but for steps backwards."""
    return ValueError if isinstance(index, slice) and kind.batch_size and index.step == -1 else IndexError


@pytest.mark.parametrize("index", INDICES, ids=describe)
def test_reading(td: Any, plain: Plain, kind: Kind, index: Any) -> None:
    numbers = expected_numbers(index, kind)
    if numbers is None:
        with pytest.raises(refusal(index, kind)):
            td[index]
        return
    result = td[index]
    assert result.batch_size == torch.zeros(kind.batch_size)[index].shape
    assert_matches(result, picked(plain, kind.batch_size, numbers), tuple(numbers.shape), kind.extra)
    assert result.device == td.device
    assert len(result.names) == numbers.ndim


@pytest.mark.parametrize("index", INDICES, ids=describe)
def test_assigning_a_container(td: Any, plain: Plain, kind: Kind, index: Any) -> None:
    numbers = expected_numbers(index, kind)
    if numbers is None:
        with pytest.raises(refusal(index, kind)):
            td[index] = 0
        assert_matches(td, plain, kind.batch_size, kind.extra)
        return
    values = mapped(changed, picked(plain, kind.batch_size, numbers))
    td[index] = TensorDict(values, numbers.shape)
    assert_matches(td, replaced(plain, kind.batch_size, numbers, values), kind.batch_size, kind.extra)


ASSIGNED: list[Any] = [0, slice(None, None, 2), [1, 0], torch.tensor([1, 0]), ..., None, np.array([1])]


@pytest.mark.parametrize("index", ASSIGNED, ids=describe)
def test_assigning_a_dict_a_scalar_a_tensor(td: Any, plain: Plain, kind: Kind, index: Any) -> None:
    numbers = expected_numbers(index, kind)
    if numbers is None:
        pytest.skip("no such index of this batch size")
    values = mapped(changed, picked(plain, kind.batch_size, numbers))
    td[index] = values
    assert_matches(td, replaced(plain, kind.batch_size, numbers, values), kind.batch_size, kind.extra)
    for scalar in (0, 1.0, True):
        td[index] = scalar
        filled = mapped(lambda leaf, value=scalar: torch.full_like(leaf, float(value)), values)
        assert_matches(td, replaced(plain, kind.batch_size, numbers, filled), kind.batch_size, kind.extra)


@pytest.mark.parametrize("scalar", [torch.tensor(1), torch.tensor(1.0), np.float32(1), np.int64(1)], ids=repr)
def test_assigning_a_scalar_tensor(td: Any, plain: Plain, kind: Kind, scalar: Any) -> None:
    td[...] = scalar
    assert_matches(td, mapped(torch.ones_like, plain), kind.batch_size, kind.extra)


def test_int_out_of_bounds(td: Any, kind: Kind) -> None:
    bad = 99 if not kind.batch_size else kind.batch_size[0]
    for index in (bad, -bad - 1):
        with pytest.raises((IndexError, RuntimeError)):
            td[index]
        with pytest.raises((IndexError, RuntimeError)):
            td[index] = 0


def test_too_many_indices(td: Any, kind: Kind) -> None:
    for index in ((0,) * (len(kind.batch_size) + 1), (slice(None),) * (len(kind.batch_size) + 1)):
        with pytest.raises((IndexError, RuntimeError)):
            td[index]


@pytest.mark.parametrize("index", [3, -4, (0, 4), (slice(None), 5), (0, 0, 0), [5], (slice(None),) * 3])
def test_empty_containers_keep_their_bounds(index: Any) -> None:
    with pytest.raises(IndexError):
        TensorDict({}, [3, 4])[index]
    with pytest.raises(IndexError):
        TensorDict({"n": {}}, [3, 4])[index]


def test_empty_containers_are_indexed() -> None:
    assert TensorDict({}, [3, 4])[:2, None, 0].batch_size == torch.Size([2, 1])


def test_views_share_memory(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size or not kind.holds_views:
        pytest.skip("no view to take")
    for index in (0, slice(0, 1), (..., 0)):
        td[index].zero_()
        for leaf in leaves(plain).values():
            leaf[index if index != (..., 0) else (slice(None),) * (len(kind.batch_size) - 1) + (0,)] = 0
        assert_matches(td, plain, kind.batch_size, kind.extra)


def test_masks_and_lists_copy_or_write(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    if 0 in kind.stacked:
        pytest.skip("an index on the dim of a lazy stack gives the members themselves")
    last = torch.arange(kind.batch_size[0]) == kind.batch_size[0] - 1
    for index in ([0], last):
        td[index].zero_()
        for leaf in leaves(plain).values() if kind.index_writes else ():
            leaf[index] = 0
        assert_matches(td, plain, kind.batch_size, kind.extra)


def test_results_keep_names(td: Any, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    assert td[:].names == td.names
    assert td[0].names == td.names[1:]
    assert td[:, None].names == [td.names[0], None, *td.names[1:]]
    assert td[[0]].names == td.names
    assert td[..., 0].names == td.names[:-1]


def test_wrong_values_change_nothing(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    rest = kind.batch_size[1:]
    wrong: list[Any] = [
        TensorDict({"a": torch.zeros(9, *rest, 2)}, [9]),
        {"a": changed(plain["a"][0]), "mask": torch.zeros(9, 9)},
        {"mask": changed(plain["mask"][0]), "a": torch.zeros(9, 9, 2)},
        torch.zeros(9, 9),
    ]
    if kind.nested:
        wrong.append({"a": changed(plain["a"][0]), "b": {"c": torch.zeros(9, 9)}})
    for value in wrong:
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            td[0] = value
        assert_matches(td, plain, kind.batch_size, kind.extra)


def test_wrong_shape_names_the_nested_key() -> None:
    td = TensorDict({"outer": {"inner": torch.zeros(3, 4)}}, [3])
    with pytest.raises((RuntimeError, ValueError), match="outer.*inner"):
        td[0] = {"outer": {"inner": torch.zeros(9)}}


def test_partial_assignment(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    value = changed(plain["a"][0])
    td[0] = {"a": value}
    plain["a"][0] = value
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_assigning_a_part_that_overlaps_with_the_place(td: Any, plain: Plain, kind: Kind) -> None:
    size = kind.batch_size
    if not size or size[0] < 3:
        pytest.skip("no parts that overlap")
    numbers = index_map(size)
    for index, part in ((slice(0, -1), slice(1, None)), ([0, 1], slice(1, 3)), (None, slice(1, 2))):
        values = picked(plain, size, numbers[part])
        td[index] = td[part]
        if index is None:
            values = mapped(lambda leaf: leaf.expand(1, size[0], *leaf.shape[1:]), values)
        plain = replaced(plain, size, numbers[index], values)
        assert_matches(td, plain, size, kind.extra)


def repeated(plain: Plain, count: int) -> Plain:
    """The same content along a new first dim."""
    return mapped(lambda leaf: leaf.expand(count, *leaf.shape), plain)


def test_a_container_of_the_last_dims_is_broadcast(td: Any, plain: Plain, kind: Kind) -> None:
    size = kind.batch_size
    if len(size) < 2:
        pytest.skip("needs dims that what is assigned can lack")
    numbers = index_map(size)
    for index in (slice(0, 2), torch.tensor([1, 0]), slice(None), (slice(None), slice(0, 1)), (..., [0, 0, 0])):
        part = numbers[index]
        values = mapped(changed, picked(plain, size, part[0]))
        td[index] = TensorDict(values, part.shape[1:])
        plain = replaced(plain, size, part, repeated(values, len(part)))
        assert_matches(td, plain, size, kind.extra)
    for fits in ((), (1,), (1, 1, *size), (1, size[-1]), (*size[:-1], 1)):
        value = torch.full((*fits, 2), 3, dtype=plain["a"].dtype)
        td[:] = TensorDict({"a": value}, fits)
        plain["a"] = torch.full_like(plain["a"], 3)
        assert_matches(td, plain, size, kind.extra)
    for wrong in ((size[-1] + 1,), (7, *size), (1, 7, *size)):
        with pytest.raises(RuntimeError, match="broadcasts to it"):
            td[:] = TensorDict({"a": torch.zeros(*wrong, 2)}, wrong)
    assert_matches(td, plain, size, kind.extra)


def test_leading_dims_of_size_1_are_left_out(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    for index in (0, slice(0, 1), [0]):
        values = mapped(lambda leaf, at=index: changed(leaf)[at][None, None], plain)
        size = index_map(kind.batch_size)[index].shape
        for value in (values, TensorDict(values), TensorDict(values, (1, 1, *size))):
            td[index] = value
            changes = mapped(lambda leaf: leaf[0, 0], values)
            assert_matches(
                td, replaced(plain, kind.batch_size, index_map(kind.batch_size)[index], changes), kind.batch_size
            )
        plain = replaced(plain, kind.batch_size, index_map(kind.batch_size)[index], changes)


def test_names_of_dims_that_index_tensors_make(td: Any, kind: Kind) -> None:
    if len(kind.batch_size) != 2 or kind.locked:
        pytest.skip("needs two dims to name")
    td = td.clone()
    td.names = ["t", "u"]
    pairs = torch.tensor([[0, 1], [1, 0]])
    mask = torch.ones(kind.batch_size, dtype=torch.bool)
    for index, names in (
        (pairs, ["t", "t", "u"]),
        ((slice(None), pairs), ["t", "u", "u"]),
        ((0, pairs), ["u", "u"]),
        ((None, [0]), [None, "t", "u"]),
        (([0, 1], [1, 0]), ["t"]),
        (mask, [None]),
        (mask.numpy(), [None]),
    ):
        assert td[index].names == names


def test_a_size_is_a_tuple_of_integers(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    index = torch.Size((0,) * len(kind.batch_size))
    assert_matches(td[index], picked(plain, kind.batch_size, index_map(kind.batch_size)[tuple(index)]), ())


def test_first_class_dims() -> None:
    dims = pytest.importorskip("functorch.dim").dims
    x, y = torch.rand(3, 4, 2), torch.rand(3, 4)
    td = TensorDict({"x": x, "n": {"y": y}}, [3, 4])
    i, j = dims(2)
    part = td[i, j]
    assert part.batch_size == () and part["n"].batch_size == () and part["x"].shape == (2,)
    assert torch.equal(part["n", "y"].order(j, i), y.T)
    assert td[:, j].batch_size == (3,) and torch.equal(td[:, j]["x"].order(j), x.transpose(0, 1))


def test_a_broadcast_container_is_allocated() -> None:
    buffer = TensorDict(batch_size=[3, 4])
    buffer[:2] = TensorDict({"a": torch.arange(4.0), "n": {"b": torch.ones(4, 2)}}, [4])
    assert torch.equal(buffer["a"], torch.stack([torch.arange(4.0)] * 2 + [torch.zeros(4)]))
    assert buffer["n", "b"].shape == (3, 4, 2) and buffer["n", "b"].sum() == 16
    assert buffer["n"].batch_size == torch.Size([3, 4])


def test_a_container_without_batch_dims_is_allocated_for_each_element() -> None:
    item = TensorDict({"z": torch.arange(3.0), "n": {"y": torch.ones(2)}})
    members = [TensorDict({}), TensorDict({"z": torch.ones(3)}), TensorDict({})]
    for buffer in (TensorDict(batch_size=[3]), lazy_stack(members)):
        buffer[:2] = item
        assert all(torch.equal(buffer[i]["z"], item["z"]) for i in range(2))
        assert buffer[0]["n", "y"].shape == (2,)


def test_a_new_entry_of_another_size_than_the_part_is_refused() -> None:
    """A lazy stack gave each member one element of such a tensor, and dropped the others."""
    for buffer in (TensorDict(batch_size=[3]), lazy_stack([TensorDict({}), TensorDict({"z": torch.ones(3)})])):
        with pytest.raises(RuntimeError, match="'z' has shape \\[3\\], which does not begin with the size \\[1\\]"):
            buffer[:1] = {"z": torch.ones(3)}
        assert "z" not in buffer[0]


@pytest.mark.parametrize("parts", [(slice(1, None), slice(None, -1)), (torch.tensor(True), None)], ids=str)
def test_assigning_a_part_of_the_container_itself(td: Any, plain: Plain, kind: Kind, parts: Any) -> None:
    """Values that overlap their target are read before the write; torch refuses them."""
    if not kind.batch_size or kind.batch_size[0] < 2:
        pytest.skip("nothing to shift")
    target, source = parts
    expected = mapped(lambda leaf: leaf.clone(), plain)
    for leaf in leaves(expected).values():
        leaf[target] = leaf.clone()[source]
    td[target] = td[source]
    assert_matches(td, expected, kind.batch_size, kind.extra)


@pytest.mark.parametrize("indexes_with", ["slice", "list"])
@pytest.mark.parametrize("dim", [0, 1])
def test_assigning_shifted_elements_is_the_same_as_assigning_their_copy(
    td: Any, plain: Plain, kind: Kind, dim: int, indexes_with: str
) -> None:
    """Torch detects only some overlaps. Otherwise, it writes elements that it reads later."""
    size = kind.batch_size
    if len(size) <= dim or size[dim] < 2:
        pytest.skip("nothing to shift")
    every = (slice(None),) * dim
    target = (*every, slice(1, None) if indexes_with == "slice" else list(range(1, size[dim])))
    part = td[(*every, slice(None, -1))].copy()
    numbers = index_map(size)
    values = picked(plain, size, numbers[(*every, slice(None, -1))])
    td[target] = part
    assert_matches(td, replaced(plain, size, numbers[target], values), size, kind.extra)


def test_rows_of_meta_tensors_are_written_into_each_other() -> None:
    td = TensorDict(a=torch.zeros(3, device="meta"), batch_size=[3])
    first, *_, last = td.unbind(0)
    first.update_(last)
    td[1:] = td[:-1]
    assert td["a"].is_meta and td["a"].shape == (3,)


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "write",
    [
        lambda td, at, part: td[at].update_(part),
        lambda td, at, part: td[at].update(part, inplace=True),
        lambda td, at, part: td[at].copy_(part),
        lambda td, at, part: td[at].set_("a", part["a"]),
        lambda td, at, part: td.set_at_("a", part["a"], at),
        lambda td, at, part: td.update_at_(part, at),
        lambda td, at, part: td.__setitem__(at, part.select("a")),
    ],
    ids=["update_", "update", "copy_", "set_", "set_at_", "update_at_", "assign"],
)
def test_writing_shifted_elements_is_the_same_as_writing_their_copy(write: Any, dim: int, is_lazy: bool) -> None:
    td = TensorDict(a=torch.arange(20).reshape(4, 5), batch_size=[4, 5])
    td = lazy_stack(list(td.clone().unbind(0))) if is_lazy else td
    expected = td.clone()
    every = (slice(None),) * dim
    target, source = (*every, slice(1, None)), (*every, slice(None, -1))
    write(td, target, td[source])
    write(expected, target, expected[source].clone())
    assert torch.equal(td["a"], expected["a"])


def test_assigning_entries_that_are_exchanged() -> None:
    td = TensorDict(a=torch.zeros(3), b=torch.ones(3), batch_size=[3])
    td[1:] = {"a": td["b"][1:], "b": td["a"][1:]}
    assert td["a"].tolist() == [0, 1, 1] and td["b"].tolist() == [1, 0, 0]
    place = td["a"].data_ptr()
    td[0] += 1
    assert td["a"].tolist() == [1, 1, 1] and td["a"].data_ptr() == place


def test_preallocation(td: Any, plain: Plain, kind: Kind) -> None:
    """Assigning items into an empty buffer allocates the item's entries at the buffer's size."""
    buffer = TensorDict({}, batch_size=[6, *kind.batch_size])
    for i in range(6):
        buffer[i] = td
    assert_matches(buffer, mapped(lambda leaf: torch.stack([leaf] * 6), plain), (6, *kind.batch_size), kind.extra)


def test_preallocation_by_one_item() -> None:
    buffer = TensorDict(batch_size=[2, 10])
    buffer[:, 3] = TensorDict({"a": torch.ones(2, 5), "n": TensorDict({"b": torch.ones(2, 7)}, [2, 7])}, [2])
    assert buffer["a"].shape == (2, 10, 5) and buffer["n"].batch_size == torch.Size([2, 10, 7])
    assert buffer["a"].sum() == 10 and torch.equal(buffer["a"][:, 3], torch.ones(2, 5))
    assert buffer["a"][:, :3].sum() == 0 and buffer["a"][:, 4:].sum() == 0
    buffer[0, 0] = {"extra": torch.full((3,), 2, dtype=torch.int16)}
    assert buffer["extra"].dtype == torch.int16 and buffer["extra"].shape == (2, 10, 3) and buffer["extra"].sum() == 6


def test_preallocation_in_a_locked_container(kind: Kind, td: Any, plain: Plain) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    td.lock_()
    with pytest.raises(RuntimeError, match="lock"):
        td[0] = {"a": changed(plain["a"][0]), "new": torch.zeros(kind.batch_size[1:])}
    assert_matches(td, plain, kind.batch_size, kind.extra)


def test_iteration_and_len(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        assert len(td) == 0
        with pytest.raises((RuntimeError, TypeError)):
            list(td)
        return
    assert len(td) == kind.batch_size[0]
    items = list(td)
    assert len(items) == len(td)
    for i, item in enumerate(items):
        assert_matches(item, mapped(lambda leaf, at=i: leaf[at], plain), kind.batch_size[1:], kind.extra)


def test_getitems(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    batch = td.__getitems__([1, 0])
    assert_matches(batch, mapped(lambda leaf: leaf[[1, 0]], plain), (2, *kind.batch_size[1:]), kind.extra)


def test_data_loader(td: Any, plain: Plain, kind: Kind) -> None:
    if not kind.batch_size:
        pytest.skip("nothing to index")
    torch.manual_seed(0)
    loader = DataLoader(td, batch_size=2, shuffle=True, collate_fn=lambda batch: batch)
    batches = list(loader)
    assert all(type(batch).__name__ == type(td[[0, 1]]).__name__ for batch in batches)
    assert sum(len(batch) for batch in batches) == len(td)
    joined = torch.cat(batches)
    order = joined["a"].reshape(len(td), -1)[:, 0].argsort()
    for path, leaf in leaves(plain).items():
        assert_leaf(joined[order][path], leaf, path)
    for path in nodes(plain):
        assert joined[path].batch_size == torch.Size((*kind.batch_size, *kind.extra.get(path, ())))
