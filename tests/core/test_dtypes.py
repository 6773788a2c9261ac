"""Predicates over dtypes, and `unravel_key_to_tuple`."""

from __future__ import annotations

import pytest
import torch

import tensordict
from tensordict import TensorDict, is_bool, is_floating, is_inexact, is_integer, unravel_key_to_tuple

PREDICATES = {
    is_bool: {torch.bool},
    is_integer: {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64},
    is_floating: {torch.float16, torch.bfloat16, torch.float32, torch.float64},
    is_inexact: {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128},
}


@pytest.mark.parametrize("predicate", PREDICATES)
def test_predicates(predicate):
    for dtype in set().union(*PREDICATES.values()):
        value = torch.zeros(2, dtype=dtype)
        assert predicate(value) is predicate("key", value) is (dtype in PREDICATES[predicate])
    assert not any(map(predicate, ("text", 3, True, None)))
    with pytest.raises(TypeError, match="takes a value, or a key and a value"):
        predicate()


def test_predicates_choose_entries():
    td = TensorDict(a=torch.ones(2), b=torch.ones(2, dtype=torch.int64))
    chosen = td.apply(lambda leaf: leaf * 2 if is_floating(leaf) else leaf)
    assert chosen["a"].tolist() == [2, 2] and chosen["b"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("key", "expected"),
    [("a", ("a",)), (("a", ("b", ("c",))), ("a", "b", "c")), (("a", 1), ()), (1, ()), ((), ()), (["a"], ())],
)
def test_unravel_key_to_tuple(key, expected):
    assert unravel_key_to_tuple(key) == expected


def test_server_containers_are_at_the_root():
    assert tensordict.TensorDictStore is tensordict.store.TensorDictStore
    assert tensordict.LazyStackedTensorDictStore is tensordict.store.LazyStackedTensorDictStore
