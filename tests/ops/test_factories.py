"""New containers of the same structure, filling in place, and torch's `*_like` functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tensordict import TensorDict

KINDS = [("new_zeros", 0), ("new_ones", 1), ("new_empty", None)]


def make() -> TensorDict:
    td = TensorDict({"a": torch.ones(3, 4, 2), "n": {"b": torch.ones(3, 4, dtype=torch.int64)}}, [3, 4])
    td["m"] = TensorDict({"c": torch.ones(3, 4, 5, 2)}, [3, 4, 5])
    return td


@pytest.mark.parametrize(("name", "value"), KINDS)
@pytest.mark.parametrize("args", [(2,), ((2,),), ([2],), (torch.Size([2]),)])
def test_new(name: str, value: int | None, args: tuple[Any, ...]) -> None:
    td = getattr(make().lock_(), name)(*args)
    assert td.batch_size == td["n"].batch_size == (2,)
    assert td["m"].batch_size == (2, 5)
    assert (td["a"].shape, td["n", "b"].shape, td["m", "c"].shape) == ((2, 2), (2,), (2, 5, 2))
    assert td["n", "b"].dtype is torch.int64
    assert not td.is_locked
    if value is not None:
        assert all((td[key] == value).all() for key in td.keys(True, True))


def test_new_full_and_options() -> None:
    td = make().new_full((2, 1), 7, dtype=torch.float64, device="meta")
    assert td["a"].shape == (2, 1, 2)
    assert td["a"].dtype is torch.float64
    assert td["a"].device == td.device == td["n"].device == torch.device("meta")
    assert (make().new_full((2,), 7)["m", "c"] == 7).all()
    assert make().select("a").new_zeros(1, requires_grad=True)["a"].requires_grad
    assert make().new_zeros((3, 4), device=None).device is None


def test_names_stay_where_the_dims_do() -> None:
    td = make()
    td.names = ["x", "y"]
    assert td.new_zeros(5, 6).names == ["x", "y"]
    assert td.new_zeros(5).names == [None]


def test_new_tensor() -> None:
    td = make()
    data = td.apply(lambda leaf: leaf * 3)
    copy = td.new_tensor(data)
    assert copy.batch_size == (3, 4)
    assert torch.equal(copy["m", "c"], data["m", "c"])
    assert copy["a"].data_ptr() != data["a"].data_ptr()
    same = td.new_tensor(torch.arange(3))
    assert same.batch_size == (3,)
    assert same["a"].tolist() == same["n", "b"].tolist() == [0, 1, 2]
    assert same["a"].dtype is torch.float32
    assert td.new_tensor([1, 2], dtype=torch.int8)["a"].dtype is torch.int8
    with pytest.raises(KeyError, match='"a"'):
        td.new_tensor(data.exclude("a"))
    with pytest.raises(TypeError, match="'a'"):
        td.new_tensor(data.exclude("a").set("a", {}))


def test_zero_and_fill() -> None:
    td = make().lock_()
    leaf = td["m", "c"]
    assert td.fill_("m", 3) is td
    assert (leaf == 3).all()
    assert td.fill_(("n", "b"), 5) is td
    assert (td["n", "b"] == 5).all()
    assert (td["a"] == 1).all()
    assert td.zero_() is td
    assert leaf.sum() == td["a"].sum() == td["n", "b"].sum() == 0
    with pytest.raises(KeyError, match='"q"'):
        td.fill_("q", 1)


@pytest.mark.parametrize(
    ("like", "value"),
    [(torch.zeros_like, 0), (torch.ones_like, 1), (lambda x, **kw: torch.full_like(x, 4, **kw), 4)],
)
def test_like(like: Any, value: int) -> None:
    td = make()
    td.names = ["x", "y"]
    result = like(td.lock_())
    assert result.names == ["x", "y"]
    assert result["m"].batch_size == (3, 4, 5)
    assert result["n", "b"].dtype is torch.int64
    assert all((result[key] == value).all() for key in td.keys(True, True))
    assert not result.is_locked
    assert like(td, dtype=torch.float16)["n", "b"].dtype is torch.float16
    elsewhere = like(td, device="meta")
    assert elsewhere.device == elsewhere["n"].device == elsewhere["a"].device == torch.device("meta")


@pytest.mark.parametrize("like", [torch.empty_like, torch.rand_like, torch.randn_like])
def test_random_like(like: Any) -> None:
    td = make().select("a", "m")
    result = like(td)
    assert result["a"].shape == (3, 4, 2)
    assert result["a"].data_ptr() != td["a"].data_ptr()
    if like is not torch.empty_like:
        assert result["m", "c"].unique().numel() > 100
