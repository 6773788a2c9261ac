"""`collate`, and what data loaders make of containers."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from tensordict import LazyStackedTensorDict, TensorClass, TensorDict, collate

Pair = namedtuple("Pair", "a b")


class Sample(TensorClass):
    x: torch.Tensor
    label: str = "none"
    mask: Any = None


def make_sample(n: int) -> TensorDict:
    return TensorDict(
        ids=torch.arange(1, n + 1),
        points=torch.full((n + 1, 3), float(n)),
        inner={"z": torch.full((n,), n), "same": torch.zeros(2)},
        score=torch.tensor(float(n)),
        text=f"text {n}",
    )


ALL = {"ids": 7, ("inner", "z"): -1, "points": 0.5}


def test_the_first_sample_decides_the_form() -> None:
    td = [TensorDict(a=torch.ones(2)) for _ in range(2)]
    assert type(collate(td)) is TensorDict and collate(td).batch_size == (2,)
    assert type(collate([td[0], TensorDict(a=torch.ones(3))])) is LazyStackedTensorDict
    assert type(collate([td[0], TensorDict(b=torch.ones(2))])) is LazyStackedTensorDict
    assert type(collate([Sample(torch.ones(n)) for n in (1, 2)])) is Sample
    assert collate([torch.ones(2)] * 3).shape == (3, 2)
    assert collate([1, 2]).tolist() == [1, 2] and collate(["a", "b"]) == ["a", "b"]
    stacked, numbers = collate([(td[0], 1), (td[1], 2)])
    assert stacked.batch_size == (2,) and numbers.tolist() == [1, 2]
    pairs = collate([Pair(td[0], 1), Pair(td[1], 2)])
    assert type(pairs) is Pair and pairs.a["a"].shape == (2, 2)
    nested = collate([{"a": {"b": (td[0], 1)}}, {"a": {"b": (td[1], 2)}}])
    assert nested["a"]["b"][0].batch_size == (2,)
    listed = collate([[td[0], 1], [td[1], 2]])
    assert listed[0].batch_size == (2,)


def test_anything_but_a_list_of_samples_stays_as_it_is() -> None:
    for batch in (TensorDict(a=torch.ones(2)), torch.ones(2), (1, 2), {"a": 1}, [], None):
        assert collate(batch) is batch
        assert collate(batch, pad_keys={"a": 0}) is batch


def test_data_loaders_without_a_function_do_the_same() -> None:
    samples = [TensorDict(a=torch.ones(n)) for n in (1, 2)]
    assert type(default_collate(samples)) is LazyStackedTensorDict
    batch, _ = next(iter(DataLoader([(td, 0) for td in samples], batch_size=2)))
    assert type(batch) is LazyStackedTensorDict
    assert type(next(iter(DataLoader([Sample(torch.ones(2))] * 2, batch_size=2)))) is Sample


def test_padded_entries_have_values_and_masks_of_their_own() -> None:
    batch = collate([make_sample(1), make_sample(2)], pad_keys=ALL, mask_key="mask")
    assert type(batch) is TensorDict and batch.batch_size == (2,)
    assert batch["ids"].tolist() == [[1, 7], [1, 2]]
    assert batch["inner", "z"].tolist() == [[1, -1], [2, 2]]
    assert batch["points"][0, :, 0].tolist() == [1, 1, 0.5]
    assert batch["mask", "points"].tolist() == [[True, True, False], [True] * 3]
    assert batch["mask", "inner", "z"].tolist() == batch["mask", "ids"].tolist() == [[True, False], [True, True]]
    assert batch["score"].tolist() == [1, 2] and batch["text"] == ["text 1", "text 2"]
    assert batch["inner", "same"].shape == (2, 2)


def test_sides_and_multiples_of_padded_entries() -> None:
    samples = [make_sample(1), make_sample(2)]
    batch = collate(samples, pad_keys=ALL, mask_key="mask", padding_side={"ids": "left"}, pad_to_multiple_of=4)
    assert batch["ids"].tolist() == [[7, 7, 7, 1], [7, 7, 1, 2]]
    assert batch["mask", "ids"].tolist() == [[False, False, False, True], [False, False, True, True]]
    assert batch["inner", "z"].tolist() == [[1, -1, -1, -1], [2, 2, -1, -1]] and batch["points"].shape == (2, 4, 3)
    left = collate(samples, pad_keys=ALL, padding_side="left")
    assert left["ids"].tolist() == [[7, 1], [1, 2]] and left["inner", "z"].tolist() == [[-1, 1], [2, 2]]


def test_entries_that_no_option_names_make_the_stack_lazy() -> None:
    samples = [make_sample(1), make_sample(2)]
    before = [list(sample.keys(True)) for sample in samples]
    batch = collate(samples, pad_keys={"ids": 7}, mask_key=("inner", "mask"))
    assert type(batch) is LazyStackedTensorDict
    assert batch["ids"].tolist() == [[1, 7], [1, 2]] and batch["inner", "mask", "ids"].shape == (2, 2)
    assert [list(sample.keys(True)) for sample in samples] == before  # the samples themselves stay as they are


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_entries_are_jagged_tensors() -> None:
    samples = [make_sample(1), make_sample(3)]
    batch = collate(samples, nested_keys=["points"], pad_keys={"ids": 0, ("inner", "z"): 0})
    assert batch["points"].layout is torch.jagged
    assert [row.shape for row in batch["points"].unbind()] == [(2, 3), (4, 3)]
    x = torch.ones(2, requires_grad=True)
    collate([TensorDict(x=x), TensorDict(x=torch.ones(3))], nested_keys=["x"])["x"].values().sum().backward()
    assert x.grad is not None and x.grad.tolist() == [1, 1]


def test_tensorclasses_stay_tensorclasses() -> None:
    batch = collate([Sample(torch.ones(n), label=f"{n}") for n in (1, 2)], pad_keys={"x": 3}, mask_key="mask")
    assert type(batch) is Sample
    assert batch.x.tolist() == [[1, 3], [1, 1]] and batch.label == ["1", "2"]
    assert batch.mask["x"].tolist() == [[True, False], [True, True]]
    inside = collate([TensorDict(t=Sample(torch.ones(n))) for n in (1, 2)], pad_keys={("t", "x"): 3}, mask_key="m")
    assert type(inside["t"]) is Sample and inside["t"].x.shape == (2, 2) and inside["t"].label == ["none", "none"]


def test_loaders_with_options_and_workers() -> None:
    samples = [(make_sample(n), n) for n in (1, 2, 3)]
    loader = DataLoader(samples, batch_size=3, collate_fn=partial(collate, pad_keys=ALL), num_workers=1)
    batch, numbers = next(iter(loader))
    assert batch["ids"].shape == (3, 3) and numbers.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pad_keys": {"absent": 0}}, KeyError, "sample 0 has no entry 'absent'"),
        ({"nested_keys": ["absent"]}, KeyError, "sample 0 has no entry 'absent'"),
        ({"pad_keys": {"inner": 0}}, KeyError, "padding value for .'inner'."),
        ({"nested_keys": ["inner"], "pad_keys": {"ids": 0, "points": 0}}, TypeError, "'inner' is a TensorDict"),
        ({"nested_keys": "ids"}, TypeError, "list of keys"),
        ({"pad_keys": {"ids": 0}, "nested_keys": ["ids"]}, ValueError, "both"),
        ({"mask_key": "mask"}, ValueError, "no pad_keys"),
        ({"pad_keys": ALL, "mask_key": "score"}, ValueError, "'score' is an entry of sample 0"),
        ({"nested_keys": ["points"]}, ValueError, "differ in keys or shapes"),
        ({"pad_keys": {"score": 0}}, IndexError, "entry 'score' has shape .* no dim 0"),
        ({"pad_keys": {"ids": "a"}}, TypeError, "entry 'ids'"),
        ({"pad_keys": ALL, "padding_side": {"score": "left"}}, KeyError, "padding side for .'score'."),
        ({"padding_side": "left"}, ValueError, "pad_keys, and there are none"),
        ({"pad_to_multiple_of": 8}, ValueError, "pad_keys, and there are none"),
    ],
)
def test_options_that_do_not_fit(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate([make_sample(1), make_sample(2)], **options)


def test_samples_that_do_not_fit() -> None:
    with pytest.raises(KeyError, match="sample 1 has no entry 'ids'"):
        collate([make_sample(1), make_sample(1).exclude("ids")], pad_keys={"ids": 0})
    with pytest.raises(ValueError, match="batch dim of sample 0"):
        collate([TensorDict(a=torch.ones(2), batch_size=[2])] * 2, pad_keys={"a": 0})
    with pytest.raises(AttributeError, match="no field of Sample"):
        collate([Sample(torch.ones(n)) for n in (1, 2)], pad_keys={"x": 3}, mask_key="other")
    with pytest.raises(RuntimeError, match=r"tuples of different lengths, \[1, 2\]"):
        collate([(1, 2), (1,)])


def collate_rows(x: torch.Tensor, y: torch.Tensor) -> Any:
    samples = [(TensorDict(a=x, b=y), x), (TensorDict(a=x[:2], b=y), x)]
    return collate(samples, pad_keys={"a": 2.0}, mask_key="mask")


def test_collate_compiles_to_one_graph() -> None:
    x, y = torch.ones(3), torch.ones(2)
    got, want = torch.compile(collate_rows, fullgraph=True, backend="eager")(x, y), collate_rows(x, y)
    assert (got[0] == want[0]).all() and torch.equal(got[1], want[1])
