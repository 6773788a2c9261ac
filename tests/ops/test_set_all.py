"""Several entries written as one: all of them are there afterwards or, when one cannot be written, none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.ops.entries.atomic_updates import set_all

NEW = torch.ones(2)


def _container(lazy: bool) -> Any:
    members = [TensorDict({"a": torch.zeros(()), "n": {"b": torch.zeros(())}}) for _ in range(2)]
    return LazyStackedTensorDict(*members) if lazy else TensorDict.stack(members)


@pytest.mark.parametrize("lazy", [False, True])
def test_all_are_written(lazy: bool) -> None:
    td = _container(lazy)
    set_all(td, ["a", ("n", "b"), ("n", "c"), ("x", "y", "z"), ("x", "w")], [NEW * i for i in range(5)])
    found = {key: value.tolist() for key, value in td.items(True, True)}
    assert found == {
        "a": [0, 0],
        ("n", "b"): [1, 1],
        ("n", "c"): [2, 2],
        ("x", "y", "z"): [3, 3],
        ("x", "w"): [4, 4],
    }


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("key", "value"),
    [("last", torch.ones(3)), (("n", "last"), torch.ones(3)), (("n", "b", "below"), NEW), (3, NEW)],
    ids=["shape", "nested shape", "below a tensor", "no key"],
)
def test_a_failure_leaves_what_was_there(lazy: bool, key: Any, value: Any) -> None:
    td = _container(lazy)
    before, names = {key: value.clone() for key, value in td.items(True, True)}, list(td.keys(True))
    keys = ["a", "new", ("n", "b"), ("n", "c"), ("x", "y"), ("x", "z"), key]
    with pytest.raises((RuntimeError, KeyError, TypeError)):
        set_all(td, keys, [*[NEW] * 6, value])
    assert list(td.keys(True)) == names
    assert all(bool((td[key] == value).all()) for key, value in before.items())


@pytest.mark.parametrize("lazy", [False, True])
def test_a_locked_part_leaves_what_was_there(lazy: bool) -> None:
    td = _container(lazy)
    td["n"].lock_()
    with pytest.raises(RuntimeError, match="lock"):
        set_all(td, ["a", "new", ("n", "b")], [NEW, NEW, NEW])
    assert set(td.keys(True)) == {"a", "n", ("n", "b")}
    assert td["a"].tolist() == td["n", "b"].tolist() == [0, 0]
