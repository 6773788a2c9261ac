"""`pack_sequences` and `unpack_sequences`, and the rows that `collate` packs."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorClass,
    TensorDict,
    collate,
    pack_sequences,
    pad_sequence,
    unpack_sequences,
)
from tensordict.ops.dims.token_rows import plan_rows

LENGTHS = (3, 5, 0, 1, 4, 2, 5)


class Sample(TensorClass):
    ids: torch.Tensor
    label: torch.Tensor
    score: Any = None


def make_sample(n: int, number: int = 0) -> TensorDict:
    """Return a sample with nested entries, and feature dims, without batch dims."""
    ids = torch.arange(n) + 10 * number
    inner = TensorDict({"z": torch.full((n, 2, 3), float(number))}, [n])
    return TensorDict(ids=ids, inner=inner, deep={"mask": ids % 2 == 0})


def with_batch_size(n: int, number: int = 0) -> TensorDict:
    td = make_sample(n, number)
    words = NonTensorStack(*[f"{number}.{at}" for at in range(n)]) if n else NonTensorStack("a")[:0]
    return TensorDict({**dict(td.items()), "words": words, "w": torch.zeros(n, 4)}, [n], names=["token"])


def as_class(n: int, number: int = 0) -> Sample:
    return Sample(ids=torch.arange(n), label=torch.full((n,), number), batch_size=[n])


def make_all(make: Any, lengths: Any = LENGTHS) -> list[Any]:
    return [make(n, number) for number, n in enumerate(lengths)]


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right) and left.batch_size == right.batch_size and left.names == right.names
    assert set(left.keys(True)) == set(right.keys(True))
    for key in left.keys(True, True):
        one, other = left[key], right[key]
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other)
        else:
            assert one == other
    for key in left.keys(True):
        assert type(left.get(key)) is type(right.get(key)) and left.get(key).shape == right.get(key).shape


@pytest.mark.parametrize("make", [make_sample, with_batch_size, as_class])
def test_unpacking_restores_the_sequences(make: Any) -> None:
    sequences = make_all(make)
    rows = pack_sequences(sequences, 6)
    back = unpack_sequences(rows)
    assert type(back) is LazyStackedTensorDict or make is as_class
    assert len(back) == len(sequences)
    for sequence, one in zip(sequences, back, strict=True):
        assert_same(one, sequence)


def test_the_entries_of_rows() -> None:
    rows = pack_sequences([TensorDict(ids=torch.arange(n)) for n in (3, 4, 1, 0)], max_tokens=4)
    assert rows.batch_size == (2,)
    row = rows[0]
    assert row.batch_size == () and row["tokens", "ids"].tolist() == row["position_ids"].tolist() == [0, 1, 2, 0]
    assert row["cu_seqlens"].tolist() == [0, 3, 4] and row["cu_seqlens"].dtype == torch.int32
    assert row["max_seqlen"] == 3 and type(row["max_seqlen"]) is int
    assert row["indices"].tolist() == [0, 2] and row["position_ids"].dtype == torch.int64
    assert rows[1]["cu_seqlens"].tolist() == [0, 4, 4] and rows[1]["indices"].tolist() == [1, 3]
    assert set(row.keys()) == {"tokens", "position_ids", "cu_seqlens", "max_seqlen", "indices"}


def test_attention_by_cumulative_lengths_is_attention_in_each_sequence() -> None:
    """A mask of blocks stands for flash attention, which needs a GPU."""
    sequences = [TensorDict(x=torch.randn(n, 2, 8)) for n in (3, 5, 2, 0)]
    attend = torch.nn.functional.scaled_dot_product_attention
    rows = pack_sequences(sequences, 8)
    for row in rows:
        x, ends = row["tokens", "x"].transpose(0, 1), row["cu_seqlens"]
        block = torch.bucketize(torch.arange(x.shape[1]), ends[1:], right=True)
        row["tokens", "out"] = attend(x, x, x, block[:, None] == block).transpose(0, 1)
        assert ends[-1] == x.shape[1] and ends.diff().max() == row["max_seqlen"]
    for one, sequence in zip(unpack_sequences(rows), sequences, strict=True):
        x = sequence["x"].transpose(0, 1)
        torch.testing.assert_close(one["out"], attend(x, x, x).transpose(0, 1))


def smallest_number_of_rows(lengths: list[int], most: int) -> int:
    """Try all assignments."""
    for count in range(1, len(lengths) + 1):
        for rows in itertools.product(range(count), repeat=len(lengths)):
            sums = [0] * count
            for row, length in zip(rows, lengths, strict=True):
                sums[row] += length
            if max(sums) <= most:
                return count
    raise AssertionError


def test_plans() -> None:
    assert plan_rows([4, 2, 6, 3, 1], 7) == [[0, 3], [1], [2, 4]]  # the fullest row has space for the last
    assert plan_rows([2, 2, 2, 2], 4) == [[0, 1], [2, 3]] and plan_rows([1], 1) == [[0]]
    assert plan_rows([0, 4, 0], 4) == [[0, 1, 2]] and plan_rows([0, 0], 1) == [[0, 1]]
    draw = random.Random(0)
    for _ in range(60):
        most, count = draw.randint(3, 12), draw.randint(1, 6)
        lengths = [draw.randint(0, most) for _ in range(count)]
        plan = plan_rows(lengths, most)
        assert sorted(number for row in plan for number in row) == list(range(count))
        assert all(row == sorted(row) and sum(lengths[number] for number in row) <= most for row in plan)
        assert [row[0] for row in plan] == sorted(row[0] for row in plan)
        assert len(plan) <= 11 / 9 * smallest_number_of_rows(lengths, most) + 1


def test_full_rows_of_many_sequences() -> None:
    lengths = [random.Random(n).randint(1, 500) for n in range(2000)]
    plan = plan_rows(lengths, 2048)
    assert len(plan) <= sum(lengths) / 2048 + 2


def test_keys_name_the_entries_of_tokens() -> None:
    samples = [
        TensorDict(ids=torch.arange(n), score=torch.tensor(n / 2), text=f"text {n}", inner={"m": torch.ones(n), "s": n})
        for n in (2, 4, 1)
    ]
    rows = pack_sequences(samples, 4, keys=["ids", ("inner", "m")])
    assert rows[0]["indices"].tolist() == [0, 2] and set(rows[0]["tokens"].keys(True, True)) == {"ids", ("inner", "m")}
    assert rows[0]["sequences", "score"].tolist() == [1, 0.5] and rows[0]["sequences", "text"] == ["text 2", "text 1"]
    assert rows[0]["sequences", "inner", "s"].tolist() == [2, 1]
    for sample, one in zip(samples, unpack_sequences(rows), strict=True):
        assert_same(one, sample)
    assert set(rows[0]["tokens"].keys(True, True)) == {"ids", ("inner", "m")}  # unpacking leaves the rows alone
    typed = [Sample(ids=torch.arange(n), label=torch.arange(n), score=n * 0.5) for n in (2, 3)]
    for sample, one in zip(typed, unpack_sequences(pack_sequences(typed, 8, keys=["ids", "label"])), strict=True):
        assert type(one) is Sample and one.score == sample.score and torch.equal(one.ids, sample.ids)
    assert "sequences" not in pack_sequences([make_sample(2)], 4, keys=["ids", "inner", "deep"])[0].keys()


def test_outputs_of_a_model_and_gradients() -> None:
    weight = torch.ones(3, requires_grad=True)
    rows = pack_sequences([TensorDict(x=torch.ones(n) * weight[n - 1]) for n in (1, 2, 3)], 4)
    for row in rows:
        row["tokens", "loss"] = row["tokens", "x"] * 2
    sequences = unpack_sequences(rows)
    assert [one["loss"].numel() for one in sequences] == [1, 2, 3]
    sum(one["loss"].sum() for one in sequences).backward()
    assert weight.grad.tolist() == [2, 4, 6]


def test_some_rows_are_unpacked() -> None:
    sequences = make_all(make_sample, (4, 1, 3, 4))
    rows = pack_sequences(sequences, 4)
    assert [row["indices"].tolist() for row in rows] == [[0], [1, 2], [3]]
    assert [one["ids"].numel() for one in unpack_sequences(rows[1])] == [1, 3]
    assert [one["ids"].numel() for one in unpack_sequences([rows[2], rows[1]])] == [1, 3, 4]
    assert [one["ids"].numel() for one in unpack_sequences(rows[[2, 0]])] == [4, 4]


def test_rows_are_saved_and_loaded(tmp_path: Any) -> None:
    sequences = make_all(make_sample)
    rows = pack_sequences(sequences, 6)
    for sequence, one in zip(sequences, unpack_sequences(rows.memmap(tmp_path / "rows")), strict=True):
        assert torch.equal(one["ids"], sequence["ids"])
    loaded = TensorDict.load_memmap(tmp_path / "rows")
    assert loaded[0]["cu_seqlens"].dtype == torch.int32 and loaded[0]["max_seqlen"] == rows[0]["max_seqlen"]
    for sequence, one in zip(sequences, unpack_sequences(loaded), strict=True):
        assert torch.equal(one["inner", "z"], sequence["inner", "z"])


def test_rows_of_equal_length_by_padding() -> None:
    rows = pack_sequences([TensorDict(ids=torch.arange(n)) for n in (3, 4, 2)], 5)
    padded = pad_sequence(
        [row.select("tokens", "position_ids") for row in rows],
        padding_value={("tokens", "ids"): -1},
        pad_to_multiple_of=3,
    )
    assert padded["tokens", "ids"].tolist() == [[0, 1, 2, 0, 1, -1], [0, 1, 2, 3, -1, -1]]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.seconds)])
def test_collate_packs(workers: int) -> None:
    samples = [(TensorDict(ids=torch.arange(n), score=torch.tensor(float(n))), n) for n in (3, 4, 1)]
    fn = partial(collate, max_tokens=4, pack_keys=["ids"])
    rows, lengths = next(iter(DataLoader(samples, batch_size=3, collate_fn=fn, num_workers=workers)))
    assert lengths.tolist() == [3, 4, 1] and lengths[rows[0]["indices"]].tolist() == [3, 1]
    assert rows[0]["cu_seqlens"].tolist() == [0, 3, 4] and rows[0]["sequences", "score"].tolist() == [3, 1]
    assert [one["ids"].numel() for one in unpack_sequences(rows)] == [3, 4, 1]
    plain = collate([sample.select("ids") for sample, _ in samples], max_tokens=100)
    assert len(plain) == 1 and plain[0]["cu_seqlens"].tolist() == [0, 3, 7, 8]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: pack_sequences(s, 4), ValueError, "sequence 1 has 5 tokens, which exceeds max_tokens=4"),
        (lambda s: pack_sequences(s, 0), ValueError, "at least 1, got 0"),
        (lambda s: pack_sequences(s, 4.0), TypeError, "float"),
        (lambda s: pack_sequences([], 4), ValueError, "at least one sequence"),
        (lambda s: pack_sequences([s[0], 3], 4), TypeError, "got int at position 1"),
        (lambda s: pack_sequences(s, 9, keys="ids"), TypeError, r"pass \['ids'\]"),
        (lambda s: pack_sequences(s, 9, keys=["ids", "no"]), KeyError, "sequence 0 has no entry 'no'"),
        (lambda s: pack_sequences([s[0], s[1].exclude("ids")], 9), KeyError, "only some of them have .'ids'"),
        (
            lambda s: pack_sequences([s[0].clone().set("k", torch.ones(2))], 9),
            ValueError,
            r"'k' of sequence 0 .*\[2\].* 3",
        ),
        (lambda s: pack_sequences([TensorDict(k=1, ids=torch.ones(2))], 9), ValueError, r"'k' of sequence 0 .* keys="),
        (lambda s: pack_sequences([TensorDict(ids=torch.ones(2), t="text")], 9), ValueError, "'t' of sequence 0"),
        (lambda s: pack_sequences([TensorDict(t="text")], 9), ValueError, "sequence 0 has no tensor"),
        (
            lambda s: pack_sequences([TensorDict(x=torch.ones(n, n)) for n in (1, 2)], 9),
            RuntimeError,
            "entry 'x' cannot be concatenated",
        ),
        (
            lambda s: pack_sequences([s[0], TensorDict(s[1].to_dict(), [5])], 9),
            ValueError,
            r"sequence 1 has 5 tokens and batch size \[5\], but .* batch size \[\]",
        ),
        (lambda s: unpack_sequences(s[0]), KeyError, "row 0 has no 'tokens'"),
        (lambda s: unpack_sequences([1]), TypeError, "got int"),
        (lambda s: unpack_sequences([]), ValueError, "at least one row"),
        (lambda s: unpack_sequences([*pack_sequences(s, 9)] * 2), ValueError, "sequence 0 is in several rows"),
        (lambda s: collate(s, pack_keys=["ids"]), ValueError, "pass max_tokens"),
        (lambda s: collate(s, max_tokens=9, pad_keys={"ids": 0}), ValueError, "omit pad_keys"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(make_all(make_sample, (3, 5)))


def test_an_output_of_another_length_is_refused() -> None:
    row = pack_sequences(make_all(make_sample, (3, 5)), 9)[0]
    row["tokens", "inner"] = TensorDict(out=torch.ones(7))
    with pytest.raises(ValueError, match=r"entry \('tokens', 'inner', 'out'\) has the shape \[7\], .* 8 tokens"):
        unpack_sequences(row)
