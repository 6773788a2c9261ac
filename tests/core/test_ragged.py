"""Ragged leaves of both layouts: everything that is done to containers, compared row by row with lists of tensors."""

from __future__ import annotations

import copy
import io
import json
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import Reference
from tensordict import LazyStackedTensorDict, TensorDict, assert_close, lazy_stack
from tensordict.core import ragged

# Torch says of its nested tensors, once, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

LENGTHS = (3, 0, 4, 2, 1)


def rows_for(kind: str) -> list[Tensor]:
    shapes = {
        "strided": [(n,) for n in LENGTHS],
        "strided_all_dims": [(n + 1, 5 - n) for n in LENGTHS],
        "jagged": [(n,) for n in LENGTHS],
        "jagged_features": [(n, 2) for n in LENGTHS],
        "jagged_holes": [(n,) for n in LENGTHS],
        "jagged_behind": [(3, n) for n in LENGTHS],
        "jagged_between": [(3, n, 2) for n in LENGTHS],
        "jagged_equal": [(2,) for _ in LENGTHS],
    }[kind]
    flat = torch.arange(1.0, 1000.0)
    out = []
    for shape in shapes:
        count = torch.Size(shape).numel()
        out.append(flat[:count].reshape(shape))
        flat = flat[count:]
    return out


def make(kind: str, rows: list[Tensor] | None = None) -> Tensor:
    rows = rows_for(kind) if rows is None else rows
    if kind.startswith("strided"):
        return torch.nested.nested_tensor(rows, layout=torch.strided)
    if kind in ("jagged_behind", "jagged_between"):
        values = torch.cat(rows, 1)
        offsets = torch.tensor([0, *[row.shape[1] for row in rows]]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    if kind == "jagged_holes":
        longest = max(len(row) for row in rows) + 1
        padded = torch.full((len(rows), longest), -100.0)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        lengths = torch.tensor([len(row) for row in rows])
        offsets = torch.arange(0, len(rows) * longest + 1, longest)
        return torch.nested.nested_tensor_from_jagged(padded.view(-1), offsets, lengths)
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


KINDS = (
    "strided",
    "strided_all_dims",
    "jagged",
    "jagged_features",
    "jagged_holes",
    "jagged_behind",
    "jagged_between",
    "jagged_equal",
)
kinds = pytest.mark.parametrize("kind", KINDS)


def container(kind: str) -> Any:
    return TensorDict(
        {"plain": torch.arange(5), "x": make(kind), "inner": {"y": make(kind)}}, batch_size=[len(LENGTHS)]
    )


def check(td: Any, expected: list[Tensor], kind: str) -> None:
    """That the ragged leaves of `td` are ragged, have these rows, and can be indexed again."""
    for key in ("x", ("inner", "y")):
        leaf = td[key]
        assert leaf.is_nested, key
        assert leaf.layout is (torch.strided if kind.startswith("strided") else torch.jagged)
        assert leaf.size(0) == len(expected)
        rows = leaf.unbind()
        assert [row.shape for row in rows] == [row.shape for row in expected]
        assert all(map(torch.equal, rows, expected))
    if expected:
        assert torch.equal(td[len(expected) - 1]["x"], expected[-1])
        again = td[[len(expected) - 1, 0]]
        assert again["x"].is_nested
        assert torch.equal(again["x"].unbind()[0], expected[-1])


@kinds
def test_set_and_get(kind: str) -> None:
    leaf = make(kind)
    td = TensorDict(batch_size=[5])
    td.set("a", leaf)
    td["b"] = leaf
    td.update({"c": leaf, "d": {"e": leaf}})
    assert td["a"] is td["b"] is td["c"] is td["d", "e"] is leaf
    with pytest.raises(RuntimeError, match="entry 'f' has shape .*batch size"):
        td["f"] = make(kind, rows_for(kind)[:3])
    with pytest.raises(RuntimeError, match="entry 'f' has shape"):
        TensorDict({"f": leaf}, batch_size=[4])
    assert "f" not in td


@kinds
@pytest.mark.parametrize(
    "index",
    [
        slice(1, 4),
        slice(0, 1),
        slice(None),
        slice(None, None, 2),
        slice(2, 2),
        slice(-2, None),
        [3, 0, 3],
        [2],
        range(1, 4),
        torch.tensor([4, 1]),
        torch.tensor([-1, 0]),
        torch.tensor([True, False, True, True, False]),
        torch.zeros(5, dtype=torch.bool),
        (slice(1, 3),),
        (Ellipsis, slice(1, 3)),
    ],
    ids=str,
)
def test_index(kind: str, index: Any) -> None:
    td = container(kind)
    numbers = torch.arange(5)[list(index) if isinstance(index, range) else index].tolist()
    part = td[index]
    assert part.batch_size == (len(numbers),)
    check(part, [rows_for(kind)[i] for i in numbers], kind)
    assert part["plain"].tolist() == numbers


@kinds
def test_an_integer_gives_a_row(kind: str) -> None:
    td = container(kind)
    for i, row in enumerate(rows_for(kind)):
        for index in (i, i - 5, torch.tensor(i)):
            assert not td[index]["x"].is_nested
            assert torch.equal(td[index]["inner", "y"], row)
    with pytest.raises(IndexError):
        td[5]


@pytest.mark.parametrize("kind", ["jagged_behind", "jagged_between"])
def test_index_regular_dims_before_the_ragged_one(kind: str) -> None:
    rows = rows_for(kind)
    td = TensorDict({"x": make(kind), "plain": torch.arange(15).view(5, 3)}, batch_size=[5, 3])
    cases: list[tuple[Any, list[Tensor]]] = [
        ((slice(None), 1), [row[1] for row in rows]),
        ((slice(1, 3), slice(1, None)), [row[1:] for row in rows[1:3]]),
        (([3, 0], slice(None), None), [rows[3][:, None], rows[0][:, None]]),
        ((slice(None), [2, 0]), [row[[2, 0]] for row in rows]),
        (([3, 0], [2, 1]), [rows[3][2], rows[0][1]]),
        ((slice(None), None, 2), [row[None, 2] for row in rows]),
        (torch.arange(15).view(5, 3) % 7 == 0, [rows[0][0], rows[2][1], rows[4][2]]),
        ((0, 1), []),
    ]
    for index, expected in cases:
        part = td[index]
        assert part.batch_size == part["plain"].shape
        if not expected:
            assert torch.equal(part["x"], rows[0][1])
            continue
        assert part["x"].is_nested
        for got, row in zip(part["x"].unbind(), expected, strict=True):
            assert torch.equal(got, row)
    for left, right in zip(td.unbind(1), range(3), strict=True):
        assert all(map(torch.equal, left["x"].unbind(), [row[right] for row in rows]))
    for got, sizes in zip(td.split([1, 2], 1), (slice(0, 1), slice(1, 3)), strict=True):
        assert all(map(torch.equal, got["x"].unbind(), [row[sizes] for row in rows]))
    joined = torch.cat(td.split([1, 2], 1), 1)
    assert all(map(torch.equal, joined["x"].unbind(), rows))
    stacked = torch.stack([td, td], 1)
    assert stacked.batch_size == (5, 2, 3)
    assert all(map(torch.equal, stacked["x"].unbind(), [torch.stack([row, row]) for row in rows]))


@kinds
def test_index_without_a_form_is_refused(kind: str) -> None:
    td = container(kind)
    for index in (None, torch.tensor([[0, 1], [2, 3]])):
        with pytest.raises(NotImplementedError, match="entry 'x': .*ragged"):
            td[index]


@kinds
def test_cut_and_join(kind: str) -> None:
    rows = rows_for(kind)
    td = container(kind)
    for pieces, bounds in (
        (td.split(2), [0, 2, 4, 5]),
        (td.split([1, 0, 4]), [0, 1, 1, 5]),
        (td.chunk(3), [0, 2, 4, 5]),
        (td.tensor_split([4]), [0, 4, 5]),
    ):
        for piece, start, stop in zip(pieces, bounds[:-1], bounds[1:], strict=True):
            check(piece, rows[start:stop], kind)
        check(torch.cat(pieces), rows, kind)
    overlapping = td.tensor_split([4, 1])
    check(overlapping[2], rows[1:], kind)
    for i, item in enumerate(td.unbind(0)):
        assert torch.equal(item["x"], rows[i])
    check(torch.cat([td]), rows, kind)
    check(torch.cat([td, td[1:2], td[:0]]), rows + rows[1:2], kind)


def test_pieces_of_the_jagged_layout_are_views() -> None:
    td = container("jagged")
    td[1:4]["x"].values().zero_()
    assert [row.sum().item() != 0 for row in td["x"].unbind()] == [True, False, False, False, True]
    td.split([2, 3])[1]["inner", "y"].values().zero_()
    assert not td["inner", "y"].unbind()[2].any()


def test_leaves_go_on_sharing_their_offsets() -> None:
    x = make("jagged")
    td = TensorDict(x=x, y=x * 2, batch_size=[5])
    for part in (
        td[1:3],
        td[[4, 0]],
        td.split(3)[1],
        torch.cat([td, td]),
        torch.cat(td.split(2)),
        td[td["x"].offsets()[1:] > 3],
    ):
        total = part["x"] + part["y"]
        assert total.is_nested
        assert torch.equal(total.values(), 3 * part["x"].values())


@kinds
def test_stack_keeps_the_rows(kind: str) -> None:
    td = container(kind)
    stacked = torch.stack([td, td.clone()])
    assert isinstance(stacked, LazyStackedTensorDict)
    assert stacked.batch_size == (2, 5)
    check(stacked[1], rows_for(kind), kind)
    check(stacked[0, 1:3], rows_for(kind)[1:3], kind)
    behind = torch.stack([td, td], 1)
    assert behind.batch_size == (5, 2)
    assert torch.equal(behind[2, 1]["x"], rows_for(kind)[2])


def test_stack_of_unequal_rows_is_lazy_along_any_dim() -> None:
    td = container("jagged")
    stacked = torch.stack([td, td[[1, 0, 2, 3, 4]]], 1)
    assert isinstance(stacked, LazyStackedTensorDict)
    assert torch.equal(stacked[0, 0]["x"], rows_for("jagged")[0])
    assert torch.equal(stacked[1, 1]["x"], rows_for("jagged")[0])


def test_joining_ragged_with_dense_is_refused() -> None:
    ragged_one, dense = TensorDict(x=make("jagged"), batch_size=[5]), TensorDict(x=torch.zeros(5, 4), batch_size=[5])
    for pair in ([ragged_one, dense], [dense, ragged_one]):
        with pytest.raises(RuntimeError, match="entry 'x': .*dense"):
            torch.cat(pair)


@kinds
def test_copies(kind: str) -> None:
    td = container(kind)
    rows = rows_for(kind)
    buffer = io.BytesIO()
    torch.save(td, buffer)
    buffer.seek(0)
    made = {
        "clone": td.clone(),
        "deepcopy": copy.deepcopy(td),
        "pickle": pickle.loads(pickle.dumps(td)),
        "torch.save": torch.load(buffer, weights_only=False),
        "contiguous": td.contiguous(),
        "to": td.to("cpu"),
        "apply": td.apply(lambda leaf: leaf * 1),
    }
    for name, result in made.items():
        check(result, rows, kind)
        if name not in ("contiguous", "to"):
            result["x"].unbind()[0].zero_()
            assert torch.equal(td["x"].unbind()[0], rows[0]), name
    check(td.to(torch.float64).to(torch.float32), rows, kind)
    assert td.to(torch.float64)["x"].dtype == torch.float64
    assert "x: " in repr(td)


@kinds
def test_equality(kind: str) -> None:
    td = container(kind)
    for other in (
        td,
        td.clone(),
        TensorDict(x=make(kind), inner={"y": make(kind)}, plain=torch.arange(5), batch_size=[5]),
    ):
        equal = td == other
        assert equal["x"].is_nested
        assert all(row.all() for row in equal["x"].unbind())
    changed = td.clone()
    changed["x"].unbind()[2][-1] = -1
    assert [row.all().item() for row in (td == changed)["x"].unbind()] == [i != 2 for i in range(5)]
    assert all((row == (want == 2)).all() for row, want in zip((td == 2)["x"].unbind(), rows_for(kind), strict=True))
    by_row = td == torch.arange(1, 6)
    for i, (got, row) in enumerate(zip(by_row["x"].unbind(), rows_for(kind), strict=True)):
        assert torch.equal(got, row == i + 1)
    assert (td == td.clone()).all()
    assert not (td == changed).all()
    assert (td == changed).any()
    if kind != "jagged_equal":
        with pytest.raises(RuntimeError, match="entry 'x': .*rows differ"):
            _ = td == td[[1, 0, 2, 3, 4]]
    assert_close(td, td.clone())
    with pytest.raises(AssertionError, match="'x'"):
        assert_close(td, changed)


@kinds
@pytest.mark.parametrize("index", [1, slice(1, 3), [3, 0], torch.tensor([True, False, False, True, True])], ids=str)
def test_assign(kind: str, index: Any) -> None:
    rows = rows_for(kind)
    numbers = torch.arange(5)[index].reshape(-1).tolist()
    new = [-row if i in numbers else row for i, row in enumerate(rows)]
    td = container(kind)
    kept = td["x"]
    source = td.apply(lambda leaf: -leaf)
    td[index] = source[index]
    assert td["x"] is kept
    check(td, new, kind)
    td = container(kind)
    td[index] = 7.0
    check(td, [torch.full_like(row, 7) if i in numbers else row for i, row in enumerate(rows)], kind)
    td[index] = {
        "x": source["x"].unbind()[1] if isinstance(index, int) else source[index]["x"],
        "inner": source[index]["inner"],
    }
    check(td, new, kind)
    td = container(kind)
    td.set_at_("x", source[index]["x"], index)
    td["inner"].set_at_("y", source[index]["inner", "y"], index)
    check(td, new, kind)
    assert td["plain"].tolist() == [0, 1, 2, 3, 4]


@kinds
def test_in_place_writes(kind: str) -> None:
    td = container(kind)
    kept = td["x"]
    other = td.apply(lambda leaf: leaf * 2)
    td.update_(other)
    check(td, [2 * row for row in rows_for(kind)], kind)
    td.set_("x", make(kind)).set_(("inner", "y"), make(kind))
    check(td, rows_for(kind), kind)
    td.update(other, inplace=True)
    check(td, [2 * row for row in rows_for(kind)], kind)
    assert td["x"] is kept


@kinds
@pytest.mark.parametrize("value", [2, torch.tensor(2.0)], ids=str)
def test_one_number_in_place(kind: str, value: object) -> None:
    td = container(kind)
    twos = [torch.full_like(row, 2) for row in rows_for(kind)]
    check(td.clone().update_({"x": value, ("inner", "y"): value}), twos, kind)
    check(td.clone().set_("x", value).set_(("inner", "y"), value), twos, kind)
    check(td.apply_(lambda leaf: value), twos, kind)


@kinds
def test_one_number_that_requires_grad_changes_nothing(kind: str) -> None:
    td = container(kind).set("first", torch.zeros(len(rows_for(kind))))
    with pytest.raises(ValueError, match="entry 'x': a ragged entry"):
        td.update_({"first": 1.0, "x": torch.tensor(2.0, requires_grad=True)})
    assert not td["first"].any()
    check(td.exclude("first"), rows_for(kind), kind)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jagged_equal"])
def test_writes_that_do_not_fit_change_nothing(kind: str) -> None:
    td = container(kind)
    wrong = td.clone()[[1, 0, 2, 3, 4]].apply(lambda leaf: leaf * 0)
    wrong["plain"] = torch.full((5,), -1)
    for write in (
        lambda: td.update_(wrong),
        lambda: td.__setitem__(slice(0, 2), wrong[0:2]),
        lambda: td.__setitem__([0, 1], wrong[0:2]),
        lambda: td.__setitem__(0, wrong[0]),
        lambda: td.update_({"plain": wrong["plain"], "x": torch.zeros(5, 7)}),
    ):
        with pytest.raises((RuntimeError, ValueError), match="entry 'x'"):
            write()
        check(td, rows_for(kind), kind)
        assert td["plain"].tolist() == [0, 1, 2, 3, 4]


def test_ragged_entries_are_not_allocated_by_parts() -> None:
    td = TensorDict(batch_size=[5])
    with pytest.raises(RuntimeError, match="the ragged entry 'x' does not exist"):
        td[1:3] = TensorDict(x=make("jagged"), batch_size=[5])[1:3]
    assert td.is_empty()


@kinds
def test_gradients_flow(kind: str) -> None:
    def leaf_of(rows: list[Tensor]) -> Tensor:
        if kind in ("jagged_behind", "jagged_between"):
            offsets = torch.tensor([0, *[row.shape[1] for row in rows]]).cumsum(0)
            return torch.nested.nested_tensor_from_jagged(torch.cat(rows, 1), offsets, jagged_dim=2)
        if kind == "jagged_holes":
            return make(kind, rows)
        return torch.nested.as_nested_tensor(rows, layout=torch.strided if kind.startswith("strided") else torch.jagged)

    for act, numbers in (
        (lambda td: td[1:4], [1, 2, 3]),
        (lambda td: td[[3, 0, 3]], [3, 0, 3]),
        (lambda td: td.split([2, 3])[1], [2, 3, 4]),
    ):
        rows = [row.clone().requires_grad_() for row in rows_for(kind)]
        td = TensorDict(x=leaf_of(rows), batch_size=[5])
        sum((row * (i + 2)).sum() for i, row in enumerate(act(td)["x"].unbind())).backward()
        for i, row in enumerate(rows):
            expected = sum(place + 2 for place, number in enumerate(numbers) if number == i)
            assert row.numel() == 0 or torch.equal(row.grad, torch.full_like(row, float(expected)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("jagged")])
def test_gradients_flow_through_cat_and_padding(kind: str) -> None:
    values = make(kind).values().clone().requires_grad_()
    leaf = make(kind)
    x = ragged.from_jagged(values, leaf.offsets(), leaf._ragged_idx, leaf.lengths())
    td = TensorDict(x=x, batch_size=[5])
    ragged.pack_elements(torch.cat([td, td])["x"]).sum().backward()
    assert values.grad.sum() == 2 * ragged.pack_elements(leaf).numel()
    values.grad = None
    td.to_padded_tensor()["x"].sum().backward()
    assert values.grad.sum() == ragged.pack_elements(leaf).numel()


POINTWISE: dict[str, Any] = {
    "add": lambda x, y, t: x + y,
    "sub, reflected": lambda x, y, t: t - x,
    "rsub, number": lambda x, y, t: 1 - x,
    "div": lambda x, y, t: y / x,
    "div, reflected": lambda x, y, t: 2 / x,
    "floor": lambda x, y, t: x // 2,
    "mod, reflected": lambda x, y, t: 7 % x,
    "pow": lambda x, y, t: x**t,
    "alpha": lambda x, y, t: x.add(y, alpha=2),
    "lerp": lambda x, y, t: x.lerp(y, t),
    "addcmul": lambda x, y, t: x.addcmul(y, y, value=2),
    "addcdiv": lambda x, y, t: x.addcdiv(y, y),
    "clamp": lambda x, y, t: x.clamp(y, y),
    "logical": lambda x, y, t: x.logical_and(y),
    "exp": lambda x, y, t: x.exp(),
    "lgamma": lambda x, y, t: x.lgamma(),
    "isfinite": lambda x, y, t: x.isfinite(),
    "isreal": lambda x, y, t: x.isreal(),
}
IN_PLACE: dict[str, Any] = {
    "add_": lambda x, y, t: x.add_(y),
    "mul_": lambda x, y, t: x.mul_(t),
    "number": lambda x, y, t: x.sub_(2),
    "itself": lambda x, y, t: x.mul_(x),
    "lerp_": lambda x, y, t: x.lerp_(y, 0.5),
    "addcmul_": lambda x, y, t: x.addcmul_(y, y),
    "exp_": lambda x, y, t: x.exp_(),
    "abs_": lambda x, y, t: x.abs_(),
    "clamp_max_": lambda x, y, t: x.clamp_max_(y),
}


def beside(kind: str) -> Any:
    """A container as `container` gives, whose ragged leaves have offsets of their own."""
    return TensorDict(
        {"inner": {"y": make(kind) + 1}, "x": make(kind) + 1, "plain": torch.arange(5.0) + 1}, batch_size=[len(LENGTHS)]
    )


def expected_rows(call: Any, kind: str) -> list[Tensor]:
    per_row = torch.arange(1.0, 6.0)
    return [call(row.clone(), row + 1, per_row[i]) for i, row in enumerate(rows_for(kind))]


@kinds
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str, kind: str) -> None:
    td = container(kind)
    td["plain"] = torch.arange(5.0)
    result = POINTWISE[name](td, beside(kind), torch.arange(1.0, 6.0))
    expected = expected_rows(POINTWISE[name], kind)
    check_close(result, expected, kind)
    assert torch.allclose(
        result["plain"].float(),
        POINTWISE[name](torch.arange(5.0), torch.arange(5.0) + 1, torch.arange(1.0, 6.0)).float(),
        equal_nan=True,
    )


@kinds
@pytest.mark.parametrize("name", IN_PLACE)
def test_pointwise_in_place(name: str, kind: str) -> None:
    td = container(kind).apply(lambda leaf: leaf.float()).lock_()
    leaf = td["x"]
    assert IN_PLACE[name](td, beside(kind), torch.arange(1.0, 6.0)) is td
    assert td["x"] is leaf
    check_close(td, expected_rows(IN_PLACE[name], kind), kind)


def check_close(td: Any, expected: list[Tensor], kind: str) -> None:
    for key in ("x", ("inner", "y")):
        leaf = td[key]
        assert leaf.is_nested and leaf.layout is (torch.strided if kind.startswith("strided") else torch.jagged)
        for row, wanted in zip(leaf.unbind(), expected, strict=True):
            assert row.shape == wanted.shape and row.dtype == wanted.dtype
            assert torch.allclose(row.double(), wanted.double(), equal_nan=True)


@kinds
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_over_the_rows(kind: str) -> None:
    texts: list[str] = []

    def fn(row: Any) -> Any:
        texts.append(repr(row))
        return (row * 2).set("new", row["plain"] + 1)

    mapped = torch.vmap(fn)(container(kind))
    assert mapped.batch_size == (5,) and mapped["new"].tolist() == [1, 2, 3, 4, 5]
    assert "x: Tensor(shape=torch.Size([-1" in texts[0]
    expected = [row * 2 for row in rows_for(kind)]
    assert all(map(torch.equal, mapped["x"].unbind(), expected))
    assert all(map(torch.equal, mapped["inner", "y"].unbind(), expected))
    # Beside the rows, the members of a lazy stack stay apart.
    stack = lazy_stack([container(kind), container(kind).select("x")], 1)
    mapped = torch.vmap(lambda row: row.clone(), in_dims=0)(stack)
    assert mapped.batch_size == (5, 2) and mapped.stack_dim == 1
    for member in mapped.tensordicts:
        assert member.batch_size == (5,)
        assert all(map(torch.equal, member["x"].unbind(), rows_for(kind)))


def test_vmap_over_another_dim_of_ragged_leaves_is_refused() -> None:
    td = TensorDict({"n": {"x": make("jagged_behind")}}, [5, 3])
    with pytest.raises(NotImplementedError, match=r"\('n', 'x'\) is ragged.*dim 0, not 1.*exclude"):
        torch.vmap(lambda row: row, in_dims=1)(td)
    stack = lazy_stack([container("jagged"), container("jagged")])
    with pytest.raises(RuntimeError, match=r"entry 'x' cannot be stacked.*select"):
        torch.vmap(lambda row: row)(stack)


MASK = torch.tensor([True, False, False, True, True])


@kinds
def test_where_and_masked_fill(kind: str) -> None:
    td, zero = container(kind), torch.zeros(())
    expected = [row if keep else torch.zeros_like(row) for row, keep in zip(rows_for(kind), MASK, strict=True)]
    for other in (0.0, torch.zeros(5), td.clone().zero_(), TensorDict(plain=zero.int(), x=zero, inner={"y": zero})):
        check(td.where(MASK, other), expected, kind)
    check(td.masked_fill(~MASK, 0), expected, kind)
    assert td.masked_fill_(~MASK, 0) is td
    check(td, expected, kind)


@kinds
def test_where_picks_whole_rows_of_other_lengths(kind: str) -> None:
    td, rows = container(kind), rows_for(kind)
    other = td[torch.tensor([4, 3, 2, 1, 0])]
    expected = [row if keep else rows[4 - i] for i, (row, keep) in enumerate(zip(rows, MASK, strict=True))]
    check(td.where(MASK, other), expected, kind)


def test_where_of_ragged_leaves_of_some_members() -> None:
    stack = lazy_stack([TensorDict(), TensorDict({"n": container("jagged")}), TensorDict({"n": container("jagged")})])
    result = stack.where(torch.tensor([True, True, False]), stack.apply(torch.neg))
    assert "n" not in result[0]
    check(result[1]["n"], rows_for("jagged"), "jagged")
    check(result[2]["n"], [-row for row in rows_for("jagged")], "jagged")


def test_in_place_keeps_what_is_in_the_holes() -> None:
    td = TensorDict({"x": make("jagged_holes")}, batch_size=[len(LENGTHS)])
    td.mul_(TensorDict({"x": make("jagged_holes")}, batch_size=[len(LENGTHS)]))
    assert (td["x"].values() == -100).sum() == 5 * len(LENGTHS) - sum(LENGTHS)


@kinds
def test_pointwise_with_other_rows_changes_nothing(kind: str) -> None:
    td = container(kind).apply(lambda leaf: leaf.float())
    other = beside(kind)
    dim = int(kind in ("jagged_behind", "jagged_between"))
    other["x"] = make(kind, [torch.cat([row] * 3, dim) for row in rows_for(kind)])
    with pytest.raises(RuntimeError, match="entry 'x': .*rows"):
        td + other
    for write in (td.add_, lambda other: td.addcmul_(other, other)):
        with pytest.raises(RuntimeError, match="entry 'x': .*rows"):
            write(other)
    check(td, rows_for(kind), kind)
    assert torch.equal(td["plain"], torch.arange(5.0))
    with pytest.raises(RuntimeError, match="entry 'plain': add_ cannot write a ragged result into a dense leaf"):
        td.add_(TensorDict({"plain": make(kind), "x": make(kind), "inner": {"y": make(kind)}}, [len(LENGTHS)]))
    check(td, rows_for(kind), kind)


@kinds
def test_pointwise_default(kind: str) -> None:
    td, other = container(kind), beside(kind).exclude("x")
    assert list(td.add(other, default="intersection").keys()) == ["plain", "inner"]
    for result in (td.mul(other, default=2.0), other.mul(td, default=2.0)):
        assert [row.tolist() for row in result["x"].unbind()] == [(row * 2).tolist() for row in rows_for(kind)]


@kinds
def test_gradients_of_pointwise(kind: str) -> None:
    x, y = make(kind).detach().requires_grad_(), make(kind).detach().requires_grad_()
    size = [len(LENGTHS)]
    result = TensorDict({"x": x}, size).mul(TensorDict({"x": y}, size)) * torch.arange(1.0, 6.0)
    ragged.pack_elements(result["x"]).sum().backward()
    for i, (row, wanted) in enumerate(zip(x.grad.unbind(), rows_for(kind), strict=True)):
        assert torch.equal(row, wanted * (i + 1))


@kinds
def test_gradients_of_containers(kind: str) -> None:
    size = [len(LENGTHS)]
    given = TensorDict({"x": make(kind)}, size)
    td = TensorDict({"x": make(kind)}, size).requires_grad_()
    (td * 2).backward(given)
    assert [row.tolist() for row in td.grad["x"].unbind()] == [(row * 2).tolist() for row in rows_for(kind)]
    td.zero_grad(set_to_none=False)
    assert [row.tolist() for row in td.grad["x"].unbind()] == [(row * 0).tolist() for row in rows_for(kind)]
    td = TensorDict({"x": make(kind)}, size).requires_grad_()
    found = torch.autograd.grad(td * 3, td, given)
    assert [row.tolist() for row in found["x"].unbind()] == [(row * 3).tolist() for row in rows_for(kind)]
    dim = int(kind in ("jagged_behind", "jagged_between"))
    for wrong in (make(kind, [torch.cat([row] * 3, dim) for row in rows_for(kind)]), torch.ones(5, 2)):
        with pytest.raises(RuntimeError, match="entry 'x': "):
            (td * 3).backward(TensorDict({"x": wrong}, size))


@kinds
def test_elements_and_sizes(kind: str) -> None:
    rows, leaf = rows_for(kind), make(kind)
    assert ragged.row_sizes(leaf).tolist() == [list(row.shape) for row in rows]
    assert ragged.flatten_in_row_order(leaf).tolist() == [x for row in rows for x in row.flatten().tolist()]
    assert ragged.pack_elements(leaf).numel() == sum(row.numel() for row in rows)
    td = TensorDict(x=leaf, batch_size=[5])
    assert td.auto_batch_size_().batch_size[0] == 5
    assert td.get_item_shape("x")[0] == 5
    assert td.param_count() == sum(row.numel() for row in rows)


# --- saving -----------------------------------------------------------------------------------------------------------


@kinds
def test_rows_as_arrays_and_lists(kind: str) -> None:
    td = TensorDict({"n": container(kind)})
    arrays = td.numpy()["n"]["x"]
    assert [array.tolist() for array in arrays] == [row.tolist() for row in rows_for(kind)]
    assert td.to_dict(convert_tensors=True)["n"]["x"] == [row.tolist() for row in rows_for(kind)]
    arrays[2][:] = -5  # a tuple of arrays over the memory of the leaf
    assert (td["n", "x"].unbind()[2] == -5).all()
    with pytest.raises(TypeError, match=r"\('n', 'x'\) is ragged.*pad it"):
        td.to_struct_array()


@kinds
@pytest.mark.parametrize("how", ["memmap", "memmap_", "loaded", "anonymous", "again"])
def test_saved(kind: str, how: str, tmp_path: Any) -> None:
    td = container(kind)
    made = {
        "memmap": lambda: td.memmap(tmp_path),
        "memmap_": lambda: td.memmap_(tmp_path),
        "loaded": lambda: (td.memmap(tmp_path, num_threads=2), TensorDict.load_memmap(tmp_path))[1],
        "anonymous": lambda: td.memmap(),
        "again": lambda: TensorDict.load_memmap(td.memmap(tmp_path).memmap(tmp_path)._memmap_prefix),
    }[how]()
    check(made, rows_for(kind), kind)
    check(made[1:3], rows_for(kind)[1:3], kind)
    check(made.clone(), rows_for(kind), kind)
    assert_close(made, td)
    check(pickle.loads(pickle.dumps(made)), rows_for(kind), kind)


@pytest.mark.parametrize("kind", ["strided", "jagged", "jagged_features"])
def test_writes_reach_the_file(kind: str, tmp_path: Any) -> None:
    saved = container(kind).memmap(tmp_path)
    saved[2] = 7.0
    saved["x"].unbind()[0].zero_()
    loaded = TensorDict.load_memmap(tmp_path)
    assert (loaded["x"].unbind()[2] == 7).all()
    assert (loaded["inner", "y"].unbind()[2] == 7).all()
    assert not loaded["x"].unbind()[0].any()


def test_loaded_leaves_share_their_offsets(tmp_path: Any) -> None:
    x = make("jagged")
    TensorDict(x=x, y=x * 2, batch_size=[5]).memmap(tmp_path)
    loaded = TensorDict.load_memmap(tmp_path)
    assert (loaded["x"] + loaded["y"]).is_nested
    part = loaded[1:3]
    assert (part["x"] + part["y"]).is_nested


@kinds
def test_saved_without_rows(kind: str, tmp_path: Any) -> None:
    container(kind)[:0].memmap(tmp_path)
    loaded = TensorDict.load_memmap(tmp_path)
    assert loaded.batch_size == (0,)
    assert loaded["x"].is_nested
    assert loaded["x"].unbind() == ()


def test_tables_of_sizes_need_a_free_name(tmp_path: Any) -> None:
    td = TensorDict({"x": make("jagged"), "x.shape": torch.zeros(5)}, batch_size=[5])
    with pytest.raises(RuntimeError, match="'x'.*'x.shape'"):
        td.memmap(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[3], [-1]], "broken"),
        ([[3], [2**62]], "broken|bytes"),
        ([[3], [1000]], "bytes"),
    ],
)
def test_broken_tables_are_refused(table: list[list[int]], message: str, tmp_path: Any) -> None:
    TensorDict(x=torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]), batch_size=[2]).memmap(tmp_path)
    (tmp_path / "x.shape.memmap").write_bytes(torch.tensor(table).numpy().tobytes())
    with pytest.raises(OSError, match=message):
        TensorDict.load_memmap(tmp_path)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["strided", "strided_all_dims", "jagged", "jagged_features", "jagged_behind"])
def test_the_reference_loads_what_is_saved_here(kind: str, behaviour: Reference, tmp_path: Any) -> None:
    container(kind).memmap(tmp_path)
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); import tensordict; "
        "td = tensordict.TensorDict.load_memmap(sys.argv[1]); print([td[i]['x'].tolist() for i in range(5)])"
    )
    assert behaviour.run(script, tmp_path).strip() == str([row.tolist() for row in rows_for(kind)])


def test_the_sample_of_the_reference_is_loaded() -> None:
    folder = pathlib.Path(__file__).parents[1] / "data" / "format"
    expected = json.loads((folder / "expected.json").read_text())["strided_nested"]
    td = TensorDict.load_memmap(folder / "samples" / "strided_nested")
    (leaf,) = expected["leaves"].values()
    assert td.batch_size == (2,)
    assert [row.tolist() for row in td["n"].unbind()] == leaf["nested"]
    assert td[[1]]["n"].unbind()[0].tolist() == leaf["nested"][1]


@pytest.mark.parametrize("grad", [True, False])
def test_a_number_that_a_ragged_leaf_refuses_is_assigned_to_none(grad: bool) -> None:
    rows = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged)
    td = TensorDict({"a": torch.zeros(2), "n": {"b": rows}}, [2])
    with torch.set_grad_enabled(grad):
        with pytest.raises(NotImplementedError, match="'b'.*before the rows of a ragged entry"):
            td[None] = 1
        assert not td["a"].any()
        td[:] = 1
    assert td["a"].tolist() == [1, 1] and td["n", "b"][1].tolist() == [1, 1]


MAKE_JAGGED = [
    "lazy_stack(rows).densify(torch.jagged)",
    "lazy_stack(rows).get('a', as_nested_tensor=True)",
    "load(path)",
]


@pytest.mark.parametrize("make", MAKE_JAGGED)
def test_the_first_jagged_tensor_logs_nothing(make: str, tmp_path: pathlib.Path) -> None:
    """Torch logs once, in its first call, that it calls a function that nobody should call. All else is logged."""
    path = tmp_path / "saved"
    lazy_stack([TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))]).densify(torch.jagged).save(path)
    program = (
        "import logging, torch\nfrom tensordict import TensorDict, lazy_stack, load\n"
        f"rows, path = [TensorDict(a=torch.ones(2)), TensorDict(a=torch.ones(3))], {str(path)!r}\n{make}\n"
        "logging.getLogger('torch.fx._symbolic_trace').warning('is_fx_tracing will return true, says another')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 1 and lines[0].endswith("says another"), done.stderr


@kinds
def test_set_at_takes_a_tensor_without_dims_as_index(kind: str) -> None:
    td, expected = container(kind), container(kind)
    td.set_at_("x", 1, torch.tensor(0))
    expected.set_at_("x", 1, 0)
    for row, other in zip(td["x"].unbind(), expected["x"].unbind(), strict=True):
        assert torch.equal(row, other)


@kinds
def test_reductions_keep_each_dim_of_a_ragged_leaf(kind: str) -> None:
    td = container(kind)
    assert td.amax(keepdim=True)["x"].shape == (1,) * td["x"].dim()


@pytest.mark.parametrize(
    ("index", "source", "expected"),
    [
        (slice(1, None), slice(-1), [0, 0, 1, 2]),
        (..., ..., [0, 1, 2, 3]),
        ([0, 1, 2, 3], [3, 2, 1, 0], [3, 2, 1, 0]),
    ],
    ids=["shifted", "whole", "reversed"],
)
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_rows_of_a_leaf_are_assigned_to_other_rows_of_it(
    index: Any, source: Any, expected: list[int], layout: torch.layout
) -> None:
    ragged = torch.nested.nested_tensor([torch.full((2,), float(i)) for i in range(4)], layout=layout)
    td = TensorDict(r=ragged, batch_size=[4])
    td[index] = td[source]
    assert [row.tolist() for row in td["r"].unbind()] == [[i, i] for i in expected]
