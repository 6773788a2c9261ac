"""`pad`, `to_padded_tensor`, `pad_sequence` and `unpad_sequence`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorClass,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    pad,
    pad_sequence,
    unpad_sequence,
)

ragged_rows = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class Row(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


def source() -> Any:
    return TensorDict(
        {
            "a": torch.arange(1.0, 25).view(3, 4, 2),
            "i": torch.arange(1, 13).view(3, 4),
            "n": TensorDict({"b": torch.ones(3, 4, 5, dtype=torch.bool)}, batch_size=[3, 4, 5]),
        },
        batch_size=[3, 4],
        names=["x", "y"],
    )


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "pads", [[], [1, 2], [0, 1, 2, 0], (0, 0, 0, 3), [-1, 2], [2, -3, -1, 0], torch.tensor([1, 0])]
)
def test_pad_is_torch_pad_of_the_batch_dims(pads: Any, inplace: bool) -> None:
    td = source()
    expected = dict(td.items(True, True))
    result = pad(td, pads, 3, inplace=inplace) if inplace else td.pad(pads, 3)
    pads = [*pads.tolist()] if isinstance(pads, torch.Tensor) else [*pads]
    pads += [0] * (4 - len(pads))
    assert (result is td) is inplace
    assert result.batch_size == (3 + sum(pads[:2]), 4 + sum(pads[2:]))
    assert result["n"].batch_size == (*result.batch_size, 5)
    assert result.names == ["x", "y"]
    for key, value in expected.items():
        behind = [0, 0] * (value.ndim - 2)
        want = torch.nn.functional.pad(value, [*behind, *pads[2:], *pads[:2]], value=3)
        assert torch.equal(result[key], want)
        assert result[key].dtype == value.dtype


@pytest.mark.parametrize(
    ("pads", "error", "message"),
    [
        ([1], RuntimeError, "two ints for each dim"),
        ([1] * 6, RuntimeError, "has 2 batch dims"),
        ([0, -4], RuntimeError, "padding dim 0, of size 3"),
        ([5, -4], RuntimeError, "padding dim 0, of size 3"),
        ("ab", TypeError, "sequence of ints"),
        ([0.5, 1], TypeError, "integer"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_pads_change_nothing(pads: Any, error: type[Exception], message: str, inplace: bool) -> None:
    td = source()
    with pytest.raises(error, match=message):
        td.pad(pads, inplace=inplace)
    assert (td == source()).all()


def test_pad_of_a_locked_container() -> None:
    td = source().lock_()
    assert not td.pad([1, 1]).is_locked
    with pytest.raises(RuntimeError, match="locked"):
        td.pad([1, 1], inplace=True)
    assert td.batch_size == td["a"].shape[:2] == (3, 4)


def test_pad_carries_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    TensorDict(x=x, batch_size=[2]).pad([1, 1])["x"].pow(2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2]


def test_pad_of_a_lazy_stack() -> None:
    td = lazy_stack([TensorDict(a=torch.full((2,), i), batch_size=[2]) for i in (1, 2)])
    assert td.pad([0, 1, 1, 0])["a"].tolist() == [[0, 1, 1], [0, 2, 2], [0, 0, 0]]


@ragged_rows
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_pad_of_ragged_rows(layout: torch.layout) -> None:
    rows = [torch.ones(2), torch.ones(3)]
    td = TensorDict(x=torch.nested.nested_tensor(rows, layout=layout), batch_size=[2])
    padded = td.pad([1, 2])
    assert padded.batch_size == (5,)
    assert [len(row) for row in padded["x"].unbind()] == [0, 2, 3, 0, 0]
    assert [len(row) for row in td.pad([-1, 1])["x"].unbind()] == [3, 0]
    wide = TensorDict(x=torch.nested.nested_tensor([row.expand(3, -1) for row in rows]), batch_size=[2, 3])
    with pytest.raises(NotImplementedError, match="entry 'x'"):
        wide.pad([0, 0, 1, 0])
    with pytest.raises(NotImplementedError, match="entry 'x'"):
        wide.pad([0, 0, 1, 0], inplace=True)
    assert wide.batch_size == (2, 3)


@pytest.mark.parametrize("inplace", [False, True])
def test_the_padding_of_values_is_none(inplace: bool) -> None:
    """A value that stood for the whole batch becomes one value for each element."""
    content = {"one": "x", "many": NonTensorStack("a", "b"), "inner": TensorDict(one="y", batch_size=[2])}
    result = TensorDict(content, batch_size=[2]).pad([1, 1], inplace=inplace)
    assert result["one"] == [None, "x", "x", None] and result["many"] == [None, "a", "b", None]
    assert result["inner", "one"] == [None, "y", "y", None]
    assert TensorDict(one="x", batch_size=[2]).pad([0, 0])["one"] == "x"


# --- to_padded_tensor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "pads", "new"), [([0, 0], [2, 0, 2, 2], [2, 4]), ([0], [1, 1], [2])])
def test_values_of_an_empty_batch_are_padded_with_none(size: list[int], pads: list[int], new: list[int]) -> None:
    padded = TensorDict({"word": "x"}, batch_size=size).pad(pads, value=1)
    assert padded.get("word").batch_size == torch.Size(new)
    assert padded["word"] == np.full(new, None).tolist()


@ragged_rows
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16])
def test_to_padded_tensor(layout: torch.layout, dtype: torch.dtype) -> None:
    rows = [torch.ones(n, 2, dtype=dtype) for n in (2, 0, 3)]
    dense = torch.zeros(3)
    td = TensorDict(x=torch.nested.nested_tensor(rows, layout=layout), y={"d": dense}, batch_size=[3], names=["b"])
    result = td.to_padded_tensor(padding=1)
    assert result["x"].shape == (3, 3, 2)
    assert result["x"].dtype == dtype
    assert bool((result["x"] == 1).all())
    assert td.to_padded_tensor()["x"][:, :, 0].tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert result["y", "d"] is dense
    assert result.names == ["b"]
    with pytest.raises(RuntimeError, match="mask_key='m'"):
        td.to_padded_tensor(mask_key="m")


@ragged_rows
def test_to_padded_tensor_of_several_ragged_dims() -> None:
    rows = [torch.ones(1, 3), torch.ones(2, 2)]
    td = TensorDict(x=torch.nested.nested_tensor(rows), batch_size=[2]).to_padded_tensor(-1)
    assert td["x"].tolist() == [[[1, 1, 1], [-1, -1, -1]], [[1, 1, -1], [1, 1, -1]]]


@ragged_rows
def test_to_padded_tensor_closes_the_batch_size() -> None:
    rows = [torch.ones(2), torch.ones(4)]
    strided = TensorDict(x=torch.nested.nested_tensor(rows), batch_size=[2, -1])
    leaf = torch.nested.nested_tensor(rows, layout=torch.jagged)
    jagged = TensorDict(x=leaf, y=leaf * 2, n={"z": leaf}, batch_size=leaf.shape)
    for td in (strided, jagged):
        result = td.to_padded_tensor(padding=7, mask_key=("masks", "m"))
        assert result.batch_size == (2, 4)
        assert result["masks", "m"].tolist() == [[True, True, False, False], [True] * 4]
        assert result["x"].tolist() == [[1, 1, 7, 7], [1, 1, 1, 1]]
    assert jagged.to_padded_tensor()["n"].batch_size == (2, 4)
    longer = [torch.ones(2), torch.ones(5)]
    uneven = TensorDict(x=torch.nested.nested_tensor(rows), y=torch.nested.nested_tensor(longer), batch_size=[2, -1])
    with pytest.raises(ValueError, match="entry 'y'.*length 5"):
        uneven.to_padded_tensor()


# --- pad_sequence -----------------------------------------------------------------------------------------------------


def sequences(*lengths: int, batch: bool = False) -> list[Any]:
    return [
        TensorDict(
            {"a": torch.full((n, 2), n), "n": {"b": torch.full((n,), float(n))}}, batch_size=[n] if batch else []
        )
        for n in lengths
    ]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("key", [False, True, "m", ("x", "m")])
def test_pad_sequence(batch: bool, key: Any) -> None:
    result = pad_sequence(sequences(1, 3, batch=batch), padding_value=-1, return_mask=key)
    size = (2, 3) if batch else (2,)
    assert result.batch_size == size
    assert result["a"].tolist() == [[[1, 1], [-1, -1], [-1, -1]], [[3, 3]] * 3]
    assert result["n", "b"].tolist() == [[1, -1, -1], [3, 3, 3]]
    assert result["n"].batch_size == size
    if not key:
        assert set(result.keys()) == {"a", "n"}
        return
    masks = result["masks" if key is True else key]
    assert masks.batch_size == size
    assert masks["a"].tolist() == masks["n", "b"].tolist() == [[True, False, False], [True, True, True]]


@pytest.mark.parametrize(("dim", "size"), [(1, [2]), (-2, [2]), (1, [2, None]), (2, [2, 4])])
def test_pad_sequence_along_another_dim(dim: int, size: list[Any]) -> None:
    shapes = [(2, 4, n, 3) if dim == 2 else (2, n, 3) for n in (1, 3)]
    tds = [
        TensorDict(a=torch.ones(shape), batch_size=[n if s is None else s for s in size])
        for shape, n in zip(shapes, (1, 3), strict=True)
    ]
    result = pad_sequence(tds, pad_dim=dim, return_mask=True)
    want = [torch.nn.functional.pad(td["a"], [0, 0, 0, 3 - td["a"].shape[-2]]) for td in tds]
    assert torch.equal(result["a"], torch.stack(want))
    mask = result["masks", "a"]
    assert mask.shape == (2, *tds[1].batch_size, *([] if None in size else [3]))
    assert torch.equal(mask, torch.stack(want)[..., 0].bool())


def test_pad_sequence_into_out() -> None:
    tds = sequences(1, 2)
    a = torch.full((2, 2, 2), 9)
    out = TensorDict({"a": a, "other": torch.ones(2)}, batch_size=[2])
    assert pad_sequence(tds, out=out, return_mask=True) is out
    assert out["a"] is a
    assert a.tolist() == [[[1, 1], [0, 0]], [[2, 2], [2, 2]]]
    assert set(out.keys()) == {"a", "n", "other", "masks"}
    with pytest.raises(RuntimeError, match=r"batch size \[2\], got \[3\]"):
        pad_sequence(tds, out=TensorDict(batch_size=[3]))


def test_pad_sequence_joins_dtypes_names_and_devices() -> None:
    a, b = TensorDict(x=torch.ones(1, dtype=torch.int64)), TensorDict(x=torch.full((2,), 0.5))
    assert pad_sequence([a, b])["x"].tolist() == [[1, 0], [0.5, 0.5]]
    tds = [TensorDict(x=torch.ones(n), batch_size=[n], names=["t"], device="cpu") for n in (1, 2)]
    result = pad_sequence(tds)
    assert result.names == [None, "t"]
    assert result.device == torch.device("cpu")
    x = torch.ones(2, requires_grad=True)
    pad_sequence([TensorDict(x=x), TensorDict(x=torch.ones(3))])["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]


def test_pad_sequence_of_nested_containers_with_other_batch_dims() -> None:
    rows = [
        TensorDict({"n": TensorDict({"a": torch.ones(length, 2)}, size)}, [length])
        for length, size in ((2, [2]), (3, [3, 2]))
    ]
    for nodes in (rows, rows[::-1]):
        padded = pad_sequence(nodes, return_mask=True)
        assert padded["n"].batch_size == (2, 3) and padded["n", "a"].shape == (2, 3, 2)
        assert padded["masks", "n", "a"].sum().item() == 5


def test_pad_sequence_of_lazy_stacks() -> None:
    stacks = [lazy_stack([TensorDict(a=torch.full((n,), i)) for i in (1, 2)]) for n in (1, 2)]
    assert isinstance(stacks[0], LazyStackedTensorDict)
    assert pad_sequence(stacks, pad_dim=1)["a"].tolist() == [[[1, 0], [2, 0]], [[1, 1], [2, 2]]]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (list, RuntimeError, "at least one"),
        (lambda: [torch.ones(1)], TypeError, "got Tensor at position 0"),
        (lambda: [TensorDict(a=1.0)], IndexError, "entry 'a' has shape .* no dim 0"),
        (lambda: [TensorDict(a=torch.ones(1)), TensorDict(b=torch.ones(1))], KeyError, "'a', 'b'"),
        (lambda: [TensorDict(a=torch.ones(1, 2)), TensorDict(a=torch.ones(1, 3))], RuntimeError, "entry 'a'.*differ"),
        (lambda: [TensorDict(a=torch.ones(1, 2)), TensorDict(a=torch.ones(1))], RuntimeError, "entry 'a'.*differ"),
        (lambda: [TensorDict(a=torch.ones(1)), TensorDict(a={"b": 1.0})], TypeError, "entry 'a' is a container in one"),
        (lambda: [TensorDict(masks=torch.ones(1))], KeyError, "masks cannot go to 'masks'"),
    ],
)
def test_pad_sequence_refuses(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pad_sequence(make(), return_mask=True)


def test_sequences_of_tensorclasses_stay_tensorclasses() -> None:
    rows = [Row(x=torch.ones(n, 2), batch_size=[n]) for n in (1, 3)]
    padded = pad_sequence(rows)
    assert type(padded) is Row and padded.batch_size == (2, 3) and padded.x[0, 1:].eq(0).all() and padded.y is None
    inside = pad_sequence([TensorDict({"row": row}, row.batch_size) for row in rows], return_mask=True)
    assert type(inside["row"]) is Row and inside["masks", "row", "x"].tolist() == [[True, False, False], [True] * 3]


def test_masks_of_sequences_without_elements() -> None:
    empty = TensorDict({"x": torch.zeros(0)}, batch_size=[0])
    padded = pad_sequence([empty, empty], return_mask=True)
    assert padded["x"].shape == padded["masks", "x"].shape == (2, 0)


# --- sides and values of pad_sequence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True])
def test_padding_on_the_left(batch: bool) -> None:
    result = pad_sequence(sequences(1, 3, batch=batch), padding_value=-1, return_mask=True, padding_side="left")
    assert result["a"][:, :, 0].tolist() == [[-1, -1, 1], [3, 3, 3]]
    assert result["n", "b"].tolist() == [[-1, -1, 1], [3, 3, 3]]
    assert result["masks", "a"].tolist() == [[False, False, True], [True] * 3]
    wide = pad_sequence(
        [TensorDict(a=torch.ones(2, n)) for n in (1, 2)], pad_dim=1, return_mask=True, padding_side="left"
    )
    assert wide["a"].tolist() == [[[0, 1], [0, 1]], [[1, 1], [1, 1]]]
    assert wide["masks", "a"].tolist() == [[False, True], [True, True]]


def test_a_padding_value_for_each_entry() -> None:
    result = pad_sequence(sequences(1, 2), padding_value={("n", "b"): 7})
    assert result["a"][0, 1].tolist() == [0, 0] and result["n", "b"].tolist() == [[1, 7], [2, 2]]
    for key in ("absent", "n"):
        with pytest.raises(KeyError, match=f"padding value for .'{key}'."):
            pad_sequence(sequences(1, 2), padding_value={key: 7})
    with pytest.raises(TypeError, match="entry 'a'"):
        pad_sequence(sequences(1, 2), padding_value={"a": None})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'left' or 'right', got 'up'"):
        pad_sequence(sequences(1, 2), padding_side="up")  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [False, True])
def test_a_side_for_each_entry(batch: bool) -> None:
    rows = sequences(1, 3, batch=batch)
    result = pad_sequence(rows, padding_value=-1, return_mask=True, padding_side={("n", "b"): "left"})
    assert result["a"][:, :, 0].tolist() == [[1, -1, -1], [3, 3, 3]]
    assert result["n", "b"].tolist() == [[-1, -1, 1], [3, 3, 3]]
    assert result["masks", "a"].tolist() == [[True, False, False], [True] * 3]
    assert result["masks", "n", "b"].tolist() == [[False, False, True], [True] * 3]
    for row, one in zip(rows, unpad_sequence(result), strict=True):
        assert (row == one).all() and row.batch_size == one.batch_size
    with pytest.raises(KeyError, match="padding side for .'absent'."):
        pad_sequence(rows, padding_side={"a": "left", "absent": "left"})
    with pytest.raises(ValueError, match="'left' or 'right', got 'up'"):
        pad_sequence(rows, padding_side={"a": "up"})  # type: ignore[dict-item]


def test_values_beside_entries_that_are_padded_on_both_sides() -> None:
    rows = [TensorDict(a=torch.ones(n), b=torch.ones(n), word=["x"] * n, batch_size=[n]) for n in (1, 3)]
    padded = pad_sequence(rows, return_mask=True, padding_side={"a": "left", "word": "left"})
    assert padded["word"] == [[None, None, "x"], ["x"] * 3]
    with pytest.raises(ValueError, match="entry 'word' has no mask, .* pad all entries on one side"):
        unpad_sequence(padded)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_lengths_that_are_multiples_of_a_number(batch: bool, side: Any) -> None:
    rows = sequences(1, 3, batch=batch)
    result = pad_sequence(rows, padding_value=-1, return_mask=True, padding_side=side, pad_to_multiple_of=4)
    ones = [[1, -1, -1, -1], [3, 3, 3, -1]]
    assert result["n", "b"].tolist() == (ones if side == "right" else [row[::-1] for row in ones])
    assert result["masks", "a"].sum(1).tolist() == [1, 3] and result["a"].shape[:2] == (2, 4)
    assert result.batch_size == ((2, 4) if batch else (2,))
    for row, one in zip(rows, unpad_sequence(result), strict=True):
        assert (row == one).all() and row.batch_size == one.batch_size
    assert pad_sequence(rows, pad_to_multiple_of=3)["a"].shape[:2] == (2, 3)
    wide = pad_sequence([TensorDict(a=torch.ones(2, 3))] * 2, pad_dim=-1, padding_side=side, pad_to_multiple_of=5)
    assert wide["a"].shape == (2, 2, 5) and wide["a"].sum() == 12
    equal = pad_sequence(sequences(3, 3), padding_value=7, pad_to_multiple_of=5)
    assert equal["n", "b"].tolist() == [[3, 3, 3, 7, 7]] * 2
    for multiple in (0, 2.0):
        with pytest.raises(ValueError, match=f"at least 1, got {multiple}"):
            pad_sequence(rows, pad_to_multiple_of=multiple)  # type: ignore[arg-type]


def test_values_in_padded_batch_dims_are_none() -> None:
    rows = [TensorDict(a=torch.ones(n), one="x", many=[*"abc"[:n]], batch_size=[n]) for n in (1, 3)]
    rows[0].set("many", NonTensorStack("a"))
    rows[1].set("many", NonTensorStack(*"abc"))
    for side, one, many in (
        ("right", ["x", None, None], ["a", None, None]),
        ("left", [None, None, "x"], [None, None, "a"]),
    ):
        padded = pad_sequence(rows, padding_side=side, return_mask=True)  # type: ignore[arg-type]
        assert padded["one"] == [one, ["x"] * 3] and padded["many"] == [many, [*"abc"]]
        assert [row["many"] for row in unpad_sequence(padded)] == [["a"], [*"abc"]]


def test_containers_of_values_alone_lose_their_padding() -> None:
    rows = [TensorDict({"a": torch.ones(n), "n": TensorDict(word="x", batch_size=[n])}, [n]) for n in (1, 3)]
    short, long = unpad_sequence(pad_sequence(rows, return_mask=True))
    assert short["n"].batch_size == (1,) and long["n"].batch_size == (3,)
    assert short["n", "word"] == ["x"]


def test_unbatched_tensors_have_no_padding() -> None:
    rows = [TensorDict({"a": torch.ones(n), "u": UnbatchedTensor(torch.ones(2))}, [n]) for n in (1, 3)]
    short, long = unpad_sequence(pad_sequence(rows, return_mask=True))
    assert short["a"].shape == (1,) and short["u"].shape == long["u"].shape == (2,)


def pad_rows(x: torch.Tensor) -> Any:
    rows = [TensorDict(a=x[:1]), TensorDict(a=x)]
    return pad_sequence(rows, padding_value={"a": 3.0}, padding_side="left", return_mask=True)


def test_pad_sequence_compiles_to_one_graph() -> None:
    x = torch.ones(3)
    assert (torch.compile(pad_rows, fullgraph=True, backend="eager")(x) == pad_rows(x)).all()


# --- unpad_sequence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_unpad_sequence_undoes_pad_sequence(side: Any, batch: bool) -> None:
    rows = [td.set("label", "x") for td in sequences(1, 3, batch=batch)]
    padded = pad_sequence(rows, return_mask=True, padding_side=side)
    result = unpad_sequence(padded)
    assert type(result) is LazyStackedTensorDict and result.batch_size == ((2, -1) if batch else (2,))
    for got, want in zip(result.tensordicts, rows, strict=True):
        assert got.batch_size == want.batch_size and set(got.keys()) == {"a", "n", "label"}
        assert torch.equal(got["a"], want["a"]) and torch.equal(got["n", "b"], want["n", "b"])
    result.tensordicts[0]["a"].fill_(9)  # the tensors are views
    assert (padded["a"][0] == 9).any()


@pytest.mark.parametrize(("dim", "size"), [(1, [2]), (-1, [2]), (-1, []), (1, [2, None]), (2, [2])])
def test_unpad_sequence_along_another_dim(dim: int, size: list[Any]) -> None:
    tds = [
        TensorDict(
            a=torch.rand((2, 4, n) if dim == 2 else (2, n)),
            batch_size=[n if s is None else s for s in size],
            names=None,
        )
        for n in (1, 3)
    ]
    result = unpad_sequence(pad_sequence(tds, pad_dim=dim, return_mask=True), pad_dim=dim)
    for got, want in zip(result.tensordicts, tds, strict=True):
        assert got.batch_size == want.batch_size and torch.equal(got["a"], want["a"])


def test_one_mask_for_all_entries() -> None:
    padded = pad_sequence(sequences(1, 3, batch=True))
    result = unpad_sequence(padded, torch.tensor([[False, False, False], [False, True, True]]))
    assert [row.batch_size for row in result.tensordicts] == [(0,), (2,)]
    assert result.tensordicts[1]["n", "b"].tolist() == [3, 3]
    rows = [Row(x=torch.ones(n), batch_size=[n]) for n in (1, 2)]
    split = unpad_sequence(pad_sequence(rows), torch.tensor([[True, False], [True, True]]))
    assert type(split[0]) is Row and split[0].x.tolist() == [1] and split[0].batch_size == (1,)


@pytest.mark.parametrize("batch", [False, True])
def test_rows_keep_entries_that_others_lack(batch: bool) -> None:
    first = TensorDict(a=torch.arange(3), batch_size=[3] * batch)
    rows = [first, first.copy().update({"b": torch.arange(3) + 5, "n": first})]
    mask = torch.tensor([[True, False, False], [False, True, True]])
    for padded in (lazy_stack(rows), TensorDict(m=lazy_stack(rows), batch_size=[2])):
        result = unpad_sequence(padded, mask)
        short, long = result["m"].tensordicts if "m" in result else result.tensordicts
        assert set(short.keys()) == {"a"} and short.batch_size == (1,) * batch and short["a"].tolist() == [0]
        assert long["b"].tolist() == [6, 7] and long["n", "a"].tolist() == [1, 2] and long.batch_size == (2,) * batch


def test_unpadded_rows_keep_names_and_device() -> None:
    tds = [TensorDict(x=torch.ones(n), batch_size=[n], names=["t"], device="cpu") for n in (1, 2)]
    result = unpad_sequence(pad_sequence(tds, return_mask=True))
    assert result.names == [None, "t"] and result.device == torch.device("cpu")
    nested = [TensorDict(n=TensorDict(a=torch.ones(n, 2), batch_size=[n, 2])) for n in (1, 2)]
    back = unpad_sequence(pad_sequence(nested, return_mask=True))
    assert [row["n"].batch_size for row in back.tensordicts] == [(1, 2), (2, 2)]
    assert unpad_sequence(TensorDict(a=torch.ones(0, 3), batch_size=[0]), torch.ones(0, 3).bool()).batch_size == (0,)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda td: unpad_sequence(torch.ones(2)), TypeError, "got Tensor"),  # type: ignore[arg-type]
        (lambda td: unpad_sequence(TensorDict(a=1)), ValueError, "no batch dims"),
        (lambda td: unpad_sequence(td.exclude("masks")), ValueError, "needs masks"),
        (lambda td: unpad_sequence(td, [[True]]), TypeError, "got list"),
        (lambda td: unpad_sequence(td, torch.ones(2, 2).bool()), ValueError, "entry 'a' has the length 3 .* length 2"),
        (lambda td: unpad_sequence(td, torch.ones(3, 3).bool()), ValueError, r"shape \[2, longest row\], got \[3, 3\]"),
        (lambda td: unpad_sequence(td, torch.tensor([[1, 0, 1], [1, 1, 1]])), ValueError, "one contiguous run"),
        (lambda td: unpad_sequence(td.exclude("masks"), td["masks"].exclude("a")), KeyError, "no entry 'a'"),
        (lambda td: unpad_sequence(td, pad_dim=3), IndexError, "entry 'a' has rows of shape .* no dim 3"),
    ],
)
def test_unpad_sequence_refuses(call: Any, error: type[Exception], message: str) -> None:
    td = pad_sequence(sequences(1, 3), return_mask=True)
    with pytest.raises(error, match=message):
        call(td)


def test_masks_that_disagree_about_the_batch() -> None:
    td = pad_sequence(sequences(1, 3, batch=True))
    masks = td != -1
    masks["a"] = torch.tensor([[True, False, False], [True] * 3])
    masks["n", "b"] = torch.tensor([[True, True, False], [True] * 3])
    with pytest.raises(ValueError, match="entry 'n': its mask keeps the lengths"):
        unpad_sequence(td, masks)


def test_unpad_sequence_keeps_what_only_some_rows_have() -> None:
    rows = [TensorDict(z=torch.ones(3), batch_size=[3]), TensorDict(y=torch.arange(3), batch_size=[3])]
    mask = torch.tensor([[True, False, False], [True, True, False]])
    first, second = unpad_sequence(lazy_stack(rows), mask).unbind(0)
    assert first.batch_size == torch.Size([1]) and first["z"].tolist() == [1.0] and "y" not in first
    assert second.batch_size == torch.Size([2]) and second["y"].tolist() == [0, 1] and "z" not in second
    with pytest.raises(RuntimeError, match=r"exclusive keys.*\['y', 'z'\]"):
        unpad_sequence(lazy_stack(rows, 1), torch.ones(3, 2, dtype=torch.bool))


def test_rows_that_lack_entries_keep_their_class_and_need_a_mask_each() -> None:
    rows = [Row(x=torch.arange(3), batch_size=[3]), Row(x=torch.arange(3), y=torch.arange(3), batch_size=[3])]
    mask = torch.tensor([[True, False, False], [True, True, False]])
    first, second = unpad_sequence(lazy_stack(rows), mask).unbind(0)
    assert type(first) is type(second) is Row and first.y is None and second.y.tolist() == [0, 1]
    masks = TensorDict(x=mask, y=mask, batch_size=[2])
    for wrong in (masks[:1], torch.cat([masks, masks]), TensorDict(x=mask, y=mask)):
        with pytest.raises(ValueError, match="must begin with the number of rows, 2"):
            unpad_sequence(lazy_stack(rows), wrong)
    with pytest.raises(ValueError, match=r"has a mask of shape \[4, 3\]"):
        unpad_sequence(lazy_stack(rows[:1] * 2), TensorDict(x=torch.cat([mask, mask]), batch_size=[4]))
