"""Gathering, masking and choosing elements along the batch dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensordict import NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack
from tensordict.core.exceptions import ShapeError

SIZE = (3, 4)


def make(size: tuple[int, ...] = SIZE, names: list[str | None] | None = None) -> TensorDict:
    count = torch.Size(size).numel()
    td = TensorDict(
        {
            "a": torch.arange(count * 2.0).reshape(*size, 2),
            "n": {"b": torch.arange(count).reshape(size)},
            "m": TensorDict({"c": torch.arange(count * 10.0).reshape(*size, 5, 2)}, [*size, 5]),
        },
        batch_size=size,
    )
    if names is not None:
        td.names = names
    return td


def leaves(td: TensorDict) -> dict[Any, torch.Tensor]:
    return {key: td[key] for key in td.keys(True, True)}


def on_right(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(*tensor.shape, *[1] * (like.ndim - tensor.ndim))


# --- gather ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "index"),
    [
        (1, torch.tensor([[0, 3], [2, 2], [1, 0]])),
        (-1, torch.tensor([[0], [3]])),
        (0, torch.tensor([[2, 1, 0, 2], [0, 0, 0, 0]])),
        (0, torch.tensor([[2, 1]])),
        (1, torch.zeros(3, 0, dtype=torch.long)),
    ],
)
def test_gather(dim: int, index: torch.Tensor) -> None:
    td = make(names=["x", "y"])
    result = td.gather(dim, index)
    assert result.batch_size == result["n"].batch_size == index.shape
    assert result["m"].batch_size == (*index.shape, 5)
    assert result.names == ["x", "y"]
    for key, leaf in leaves(td).items():
        features = leaf.shape[2:]
        want = leaf.gather(dim % 2, on_right(index, leaf).expand(*index.shape, *features))
        assert torch.equal(result[key], want)


def test_gather_with_an_index_of_fewer_dims_takes_whole_slices() -> None:
    td = make()
    index = torch.tensor([2, 0])
    result = td.gather(0, index)
    assert result.batch_size == (2, 4)
    for key, leaf in leaves(td).items():
        assert torch.equal(result[key], leaf[index])


def test_gather_into_out() -> None:
    td = make()
    index = torch.tensor([[0], [2], [1]])
    out = make((3, 1)).zero_().lock_()
    before = leaves(out)
    assert td.gather(1, index, out=out) is out
    for key, leaf in leaves(td.gather(1, index)).items():
        assert out[key] is before[key]
        assert torch.equal(out[key], leaf)
    with pytest.raises(RuntimeError, match=r"\[3, 1\].*\[3, 4\]"):
        td.gather(1, index, out=make())


def test_gather_errors() -> None:
    td = make()
    index = torch.zeros(3, 1, dtype=torch.long)
    with pytest.raises(IndexError, match="out of range"):
        td.gather(2, index)
    with pytest.raises(RuntimeError, match="out of bounds"):
        td.gather(1, index + 4)
    with pytest.raises(RuntimeError, match="size 4 in dim 0"):
        td.gather(1, torch.zeros(4, 1, dtype=torch.long))
    with pytest.raises(RuntimeError, match="dims"):
        td.gather(1, torch.zeros(3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="dims"):
        td.gather(1, torch.zeros(3, 1, 1, dtype=torch.long))
    with pytest.raises(TypeError, match="list"):
        td.gather(1, [0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both"):
        td.gather(1, index, out=make((3, 1)), inplace=True)


# --- masks ----------------------------------------------------------------------------------------------------------


def random_mask(size: tuple[int, ...]) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(3)) > 0.5


@pytest.mark.parametrize("size", [(3,), (3, 4)])
def test_masked_select(size: tuple[int, ...]) -> None:
    td, mask = make(), random_mask(size)
    result = td.masked_select(mask)
    assert result.batch_size == torch.zeros(SIZE)[mask].shape
    for key, leaf in leaves(td).items():
        assert torch.equal(result[key], leaf[mask])


def test_masked_select_errors() -> None:
    with pytest.raises(TypeError, match="boolean"):
        make().masked_select(torch.ones(3))
    with pytest.raises(IndexError, match=r"\[4\]"):
        make().masked_select(torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("size", [(), (3,), (3, 4), (3, 1), (1, 4)])
def test_masked_fill(size: tuple[int, ...]) -> None:
    td, mask = make(names=["x", "y"]), random_mask(size)
    want = {key: leaf.masked_fill(on_right(mask, leaf), 7) for key, leaf in leaves(td).items()}
    result = td.masked_fill(mask, 7)
    assert result.names == ["x", "y"]
    assert result["m"].batch_size == (3, 4, 5)
    originals = leaves(td.lock_())
    assert td.masked_fill_(mask, torch.tensor(7)) is td
    for key, leaf in want.items():
        assert torch.equal(result[key], leaf)
        assert td[key] is originals[key]
        assert torch.equal(td[key], leaf)


@pytest.mark.parametrize("size", [(4,), (3, 4, 1), (2,), (3, 3)])
def test_masks_that_do_not_fit_change_nothing(size: tuple[int, ...]) -> None:
    td = make()
    for call in (td.masked_fill, td.masked_fill_):
        with pytest.raises(RuntimeError, match=r"mask has shape .*\[3, 4\]"):
            call(torch.ones(size, dtype=torch.bool), 0)
    assert torch.equal(td["a"], make()["a"])
    with pytest.raises(TypeError, match="boolean"):
        td.masked_fill(torch.ones(3), 0)


# --- where ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(), (3,), (3, 4), (1, 4)])
@pytest.mark.parametrize("other", [0, -1.5, torch.tensor(2.0)])
def test_where_with_a_scalar(size: tuple[int, ...], other: Any) -> None:
    td, mask = make(names=["x", "y"]), random_mask(size)
    result = td.where(mask, other)
    assert result.batch_size == SIZE
    assert result.names == ["x", "y"]
    for key, leaf in leaves(td).items():
        assert torch.equal(result[key], torch.where(on_right(mask, leaf), leaf, other))


def test_where_with_a_container_and_with_a_tensor() -> None:
    td, mask = make(), random_mask(SIZE)
    other = td.apply(lambda leaf: -leaf)
    values = torch.rand(SIZE)
    for result in (td.where(mask, other), torch.where(mask, td, other)):
        for key, leaf in leaves(td).items():
            assert torch.equal(result[key], torch.where(on_right(mask, leaf), leaf, -leaf))
    result = td.where(mask, values)
    for key, leaf in leaves(td).items():
        assert torch.equal(result[key], torch.where(on_right(mask, leaf), leaf, on_right(values, leaf)))
    swapped = torch.where(mask, 0.0, td)
    assert torch.equal(swapped["a"], torch.where(on_right(mask, td["a"]), 0.0, td["a"]))


def test_where_pads_what_one_side_lacks() -> None:
    td, mask = make(), random_mask(SIZE)
    for ours, theirs in ((td.exclude("a"), td), (td, td.exclude("m")), (td, td.exclude(("n", "b")))):
        with pytest.raises(KeyError, match=r"'a'|'m'|'n', 'b'"):
            ours.where(mask, theirs)
    fewer = td.exclude("a", "m")
    right = td.where(mask, fewer, pad=-1)
    left = fewer.where(mask, td, pad=-1)
    for key in ("a", ("m", "c")):
        cond = on_right(mask, td[key])
        assert torch.equal(right[key], torch.where(cond, td[key], -1))
        assert torch.equal(left[key], torch.where(cond, -1, td[key]))
    assert left["m"].batch_size == (*SIZE, 5)
    assert torch.equal(right["n", "b"], td["n", "b"])


def test_where_into_out() -> None:
    td, mask = make(), random_mask(SIZE)
    want = td.where(mask, 0)
    out = td.clone()
    before, old = leaves(out), leaves(out.clone())
    assert td.where(mask, 0, out=out) is out
    for key, leaf in leaves(want).items():
        assert out[key] is not before[key] and torch.equal(before[key], old[key])
        assert torch.equal(out[key], leaf)
    partial = td.select("a").clone()
    td.where(mask, 0, out=partial)
    assert set(partial.keys()) == {"a", "n", "m"}
    with pytest.raises(RuntimeError, match=r"\[3, 4\].*\[3\]"):
        td.where(mask, 0, out=TensorDict(batch_size=[3]))
    resized = td.where(mask, 0, out=TensorDict(batch_size=[3]), update_batch_size=True)
    assert resized.batch_size == SIZE
    assert torch.equal(resized["a"], want["a"])
    # Replaced entries need not fit.
    resized = td.where(mask, 0, out=TensorDict(a=torch.zeros(7), batch_size=[7]), update_batch_size=True)
    assert resized.batch_size == SIZE and torch.equal(resized["a"], want["a"])
    other = TensorDict(a=torch.zeros(7), kept=torch.zeros(7), batch_size=[7])
    with pytest.raises(RuntimeError, match="'kept'"):
        td.where(mask, 0, out=other, update_batch_size=True)
    assert other.batch_size == (7,) and set(other.keys()) == {"a", "kept"}
    with pytest.raises(TypeError, match="container, got dict"):
        td.where(mask, 0, out={})


def test_where_errors() -> None:
    td = make()
    with pytest.raises(RuntimeError, match="condition"):
        td.where(torch.ones(4, dtype=torch.bool), 0)
    with pytest.raises(RuntimeError, match=r"\[3, 4\].*\[3\]"):
        td.where(torch.ones(3, dtype=torch.bool), make((3,)))
    with pytest.raises(TypeError, match="'n'"):
        td.where(torch.ones(3, dtype=torch.bool), td.exclude("n").set("n", torch.zeros(SIZE)))


def test_where_broadcasts_a_container_by_its_batch_size() -> None:
    td = TensorDict({"a": torch.zeros(2, 3, 4), "n": {"b": torch.zeros(2, 3)}}, [2, 3])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    for size in ((1, 3), (3,), (2, 1), (1, 1), (1,)):
        other = TensorDict({"a": torch.rand(*size, 4), "n": {"b": torch.rand(size)}}, size)
        for result in (td.where(mask, other), torch.where(mask, td, other), td.to_lazystack(1).where(mask, other)):
            assert result.batch_size == (2, 3)
            assert torch.equal(result["a"], torch.where(mask[..., None], td["a"], other["a"]))
            assert torch.equal(result["n", "b"], torch.where(mask, td["n", "b"], other["n", "b"]))
    for size in ((2,), (1, 2, 3)):
        with pytest.raises(RuntimeError, match="broadcasts to"):
            td.where(mask, TensorDict(batch_size=size))


def test_where_broadcasts_the_entries_of_a_container_without_batch_dims() -> None:
    td = TensorDict({"a": torch.zeros(3, 4), "n": {"b": torch.zeros(3)}, "v": "x"}, [3])
    mask = torch.tensor([True, False, True])
    for shape in ((4,), (1,), (), (3, 4)):
        other = TensorDict({"a": torch.rand(shape), "n": {"b": torch.rand(())}, "v": "y"})
        for result in (td.where(mask, other), torch.where(mask, td, other), td.to_lazystack().where(mask, other)):
            assert result.batch_size == (3,)
            assert torch.equal(result["a"], torch.where(mask[:, None], td["a"], other["a"]))
            assert torch.equal(result["n", "b"], torch.where(mask, td["n", "b"], other["n", "b"]))
            assert [result[i]["v"] for i in range(3)] == ["x", "y", "x"]
    uneven = lazy_stack([TensorDict(a=torch.zeros(n, 2)) for n in (1, 2, 3)])
    chosen = uneven.where(mask, TensorDict(a=torch.ones(2)))
    assert [row["a"].tolist() for row in chosen.unbind()] == [[[0, 0]], [[1, 1]] * 2, [[0, 0]] * 3]
    padded = td.where(mask, other.set("more", torch.ones(2)), pad=5)
    assert padded["more"].tolist() == [[5, 5], [1, 1], [5, 5]]
    with pytest.raises(RuntimeError, match=r"'n', 'b'.*\[2\].*\[3\]"):
        td.where(mask, other.set(("n", "b"), torch.ones(2)))


def test_a_mask_with_no_part_for_an_unbatched_tensor_changes_nothing() -> None:
    td = TensorDict(a=torch.zeros(2), u=UnbatchedTensor(torch.zeros(3)), batch_size=[2])
    with pytest.raises(ShapeError, match="UnbatchedTensor"):
        td.masked_fill_(torch.tensor([True, False]), 1)
    assert not td["a"].any()


def test_masked_fill_in_place_of_ragged_leaves_beside_dense_ones() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    td = TensorDict({"a": torch.zeros(2), "r": ragged}, batch_size=[2])
    td.masked_fill_(torch.tensor([True, False]), 5)
    assert td["a"].tolist() == [5, 0]
    assert [row.tolist() for row in td["r"].unbind()] == [[5, 5], [1, 1, 1]]


@pytest.mark.parametrize("other", [0.0, torch.zeros(2, 1)], ids=["number", "tensor"])
def test_where_gives_each_member_of_a_nested_stack_its_part_of_the_mask(other: Any) -> None:
    stack = lazy_stack([TensorDict({"x": torch.ones(1, n)}, [1]) for n in (3, 4)], 0)
    result = TensorDict({"a": stack}, [2, 1]).where(torch.tensor([[True], [False]]), other)
    assert [member["x"].tolist() for member in result["a"].tensordicts] == [[[1.0] * 3], [[0.0] * 4]]


def make_ragged() -> TensorDict:
    rows = torch.nested.nested_tensor([torch.arange(2), torch.arange(3), torch.arange(1)], layout=torch.jagged)
    nested = TensorDict({"r": rows}, batch_size=[3])
    return TensorDict({"d": torch.arange(3), "n": nested, "v": NonTensorStack("x", "y", "z")}, batch_size=[3])


def test_masked_select_in_place_selects_ragged_rows() -> None:
    td = make_ragged()
    assert td.masked_select(torch.tensor([True, False, True]), inplace=True) is td
    assert td["d"].tolist() == [0, 2] and [row.tolist() for row in td["n", "r"].unbind()] == [[0, 1], [0]]
    assert td["v"] == ["x", "z"] and td.batch_size == td["n"].batch_size == (2,)


@pytest.mark.parametrize(
    "operation",
    [lambda td: td.gather(0, torch.tensor([0, 2]), inplace=True), lambda td: td.reshape(3, 1, inplace=True)],
)
def test_what_a_ragged_leaf_refuses_in_place_changes_nothing(operation: Any) -> None:
    td = make_ragged()
    with pytest.raises((RuntimeError, NotImplementedError)):
        operation(td)
    assert td.batch_size == (3,) and td["d"].shape == (3,) and td["n", "r"].shape[0] == 3


def test_masked_select_in_place_keeps_each_ragged_entry_of_a_file(tmp_path: Any) -> None:
    pytest.importorskip("zarr")
    rows = [torch.zeros(2), torch.zeros(3)]
    ragged = {f"r{i}": torch.nested.nested_tensor([row + i for row in rows], layout=torch.jagged) for i in range(8)}
    plain = {f"p{i}": torch.full((2,), 100.0 + i) for i in range(8)}
    stored = TensorDict(ragged | plain, batch_size=[2]).to_zarr(tmp_path / "save.zarr")
    for _ in range(5):
        stored.masked_select(torch.tensor([True, True]), inplace=True)
    assert all(stored[key].values().equal(leaf.values()) for key, leaf in ragged.items())
    assert all(stored[key].equal(leaf) for key, leaf in plain.items())
