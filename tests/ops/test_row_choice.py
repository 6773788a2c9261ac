"""`filter`, `head`, `sample`, `sort_by`, `where_value`, `allclose`, and texts that compare by element."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tensordict import (
    DatasetWriter,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictParams,
    TypedTensorDict,
    group_by,
    lazy_cat,
    lazy_stack,
    open_dataset,
)
from tensordict.core.equality import same_value

DAYS = ["mon", "tue", "mon", "sun", "tue", "mon"]


class Steps(TensorClass):
    day: str
    x: torch.Tensor
    inner: TensorDict


def make_content() -> dict[str, Any]:
    inner = TensorDict({"y": torch.arange(6) * 10, "name": [f"n{i}" for i in range(6)]}, [6])
    return {"day": DAYS, "x": torch.tensor([3.0, 1.0, 2.0, 5.0, 1.0, 0.0]), "inner": inner}


def make_dataset(folder: pathlib.Path, content: Any) -> Any:
    with DatasetWriter(folder / "data", rows_per_shard=4) as writer:
        writer.extend(content)
    return open_dataset(folder / "data")


KINDS: dict[str, Callable[[pathlib.Path], Any]] = {
    "dense": lambda folder: TensorDict(make_content(), [6]),
    "locked": lambda folder: TensorDict(make_content(), [6]).lock_(),
    "tensorclass": lambda folder: Steps(**make_content(), batch_size=[6]),
    "lazy": lambda folder: lazy_stack(list(TensorDict(make_content(), [6]))),
    "lazy of tensorclass": lambda folder: lazy_stack(list(Steps(**make_content(), batch_size=[6]))),
    "cat": lambda folder: lazy_cat(TensorDict(make_content(), [6]).split([1, 3, 2])),
    "loaded": lambda folder: TensorDict(make_content(), [6]).memmap(folder / "save"),
    "dataset": lambda folder: make_dataset(folder, TensorDict(make_content(), [6])),
    "dataset of tensorclass": lambda folder: make_dataset(folder, Steps(**make_content(), batch_size=[6])),
    "view": lambda folder: make_dataset(folder, TensorDict(make_content(), [6])).sort_by("x").sort_by(("inner", "y")),
}


@pytest.fixture(params=KINDS)
def td(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Any:
    return KINDS[request.param](tmp_path)


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else value.tolist()  # type: ignore[no-any-return]


def assert_rows(td: Any, result: Any, rows: list[int]) -> None:
    assert result.batch_size == (len(rows),)
    assert isinstance(result, Steps) is isinstance(td, Steps)
    assert as_list(result.get("day")) == [DAYS[row] for row in rows]
    assert result.get("x").tolist() == [make_content()["x"][row] for row in rows]
    assert result.get(("inner", "y")).tolist() == [row * 10 for row in rows]
    if rows:
        assert as_list(result.get(("inner", "name"))) == [f"n{row}" for row in rows]
        assert [row.get(("inner", "y")).item() for row in result] == [row * 10 for row in rows]
        last = result[[len(rows) - 1, 0]]
        assert last.get(("inner", "y")).tolist() == [rows[-1] * 10, rows[0] * 10]
        assert result[1:].get("x").tolist() == result.get("x").tolist()[1:]


def test_filter(td: Any) -> None:
    assert_rows(td, td.filter(lambda rows: rows.get("x") > 1), [0, 2, 3])
    assert_rows(td, td.filter(lambda rows: rows.where_value("day", "mon")), [0, 2, 5])
    assert_rows(td, td.filter(lambda rows: torch.zeros(len(rows), dtype=torch.bool)), [])
    twice = td.filter(lambda rows: rows.get("x") > 0).filter(lambda rows: rows.where_value("day", "tue"))
    assert_rows(td, twice, [1, 4])


def test_texts_compare_by_element(td: Any) -> None:
    for entry in (td["day"] if not isinstance(td, Steps) else td.day, td.get("day")):
        mask = entry == "mon"
        assert torch.equal(mask, torch.tensor([True, False, True, False, False, True]))
        assert torch.equal(entry != "mon", ~mask)
        assert torch.equal("mon" == entry, mask)  # noqa: SIM300
    assert_rows(td, td[td.get("day") == "mon"], [0, 2, 5])
    assert torch.equal(td.where_value("day", "mon"), mask)
    assert torch.equal(td.where_value(("inner", "name"), "n4"), torch.arange(6) == 4)


def test_head_and_sample(td: Any) -> None:
    assert_rows(td, td.head(2), [0, 1])
    assert_rows(td, td.head(), [0, 1, 2, 3, 4])
    assert len(td.head(9)) == 6 and len(td.head(0)) == 0
    generator = torch.Generator().manual_seed(5)
    expected = torch.randperm(6, generator=torch.Generator().manual_seed(5))[:4].tolist()
    assert_rows(td, td.sample(4, generator=generator), expected)
    assert len(td.sample(6).get("x")) == 6 and len(td.sample(0)) == 0


def test_sort_by(td: Any) -> None:
    assert_rows(td, td.sort_by("x"), [5, 1, 4, 2, 0, 3])
    assert_rows(td, td.sort_by("x", descending=True), [3, 0, 2, 1, 4, 5])
    assert_rows(td, td.sort_by("day"), [0, 2, 5, 3, 1, 4])
    assert_rows(td, td.sort_by(("inner", "name"), descending=True), [5, 4, 3, 2, 1, 0])
    assert_rows(td, td.sort_by("x").head(2), [5, 1])
    assert_rows(td, td.sort_by("x").filter(lambda rows: rows.get("x") > 1), [2, 0, 3])


def test_group_by(td: Any) -> None:
    values, groups = group_by(td, "day")
    assert values == ["mon", "sun", "tue"]
    for group, rows in zip(groups, ([0, 2, 5], [3], [1, 4]), strict=True):
        assert_rows(td, group, rows) if len(rows) > 1 else None
        assert group.get("x").tolist() == [make_content()["x"][row] for row in rows]


def test_allclose(td: Any) -> None:
    other = td.clone()
    assert td.allclose(other) is True and torch.allclose(td, other)
    near = td.to_tensordict()
    near["x"] = near["x"] + 1e-3
    assert not td.to_tensordict().allclose(near) and td.to_tensordict().allclose(near, atol=1e-2)
    texts = td.to_tensordict()
    texts["day"] = ["mon"] * 6
    assert not td.to_tensordict().allclose(texts)
    assert not td.allclose(td.head(3))
    with pytest.raises(KeyError, match="inner"):
        td.to_tensordict().allclose(texts.exclude("inner"))


def test_nan_and_dtypes() -> None:
    td = TensorDict(x=torch.tensor([1.0, float("nan")]), batch_size=[2])
    assert not td.allclose(td.clone()) and td.allclose(td.clone(), equal_nan=True)
    assert not td.allclose(td.double(), equal_nan=True)
    assert td.sort_by("x", descending=False)["x"][0] == 1
    with pytest.raises(TypeError, match="two containers"):
        td.allclose(1)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_lists_of_texts_stay_lists() -> None:
    days = TensorDict(day=["a", "b"], batch_size=[2])["day"]
    assert isinstance(days, list) and type(days) is not list
    assert days == ["a", "b"] and (days != ["a", "b"]) is False and (days == ["a"]) is False
    assert (days == None) is False and (days == 1) is False and days != None  # noqa: E711
    assert days in [["a", "b"], 3] and "a" in days and days.index("b") == 1 and days.count("a") == 1
    assert days in ("a", ["a", "b"]) and days not in ("a", "b") and days != "a"
    assert type((days == "a") & (days != "b")) is torch.Tensor and (days == "a").any()
    with pytest.raises(TypeError, match="unhashable"):
        hash(days)


def test_masks_have_the_batch_size() -> None:
    plane = TensorDict(day=NonTensorStack(NonTensorStack(*"ab"), NonTensorStack(*"ba")), batch_size=[2, 2])
    assert (plane["day"] == "a").tolist() == [[True, False], [False, True]]
    assert (plane.get("day") == "a").tolist() == [[True, False], [False, True]]
    plane["x"] = torch.arange(4).view(2, 2)
    assert plane[plane["day"] == "a"]["x"].tolist() == [0, 3]
    mixed = TensorDict(value=NonTensorStack("a", 1, ["a"], None), batch_size=[4])
    assert (mixed["value"] == "a").tolist() == [True, False, False, False]
    ragged = lazy_stack(
        [TensorDict(t=NonTensorStack(*"ab"), batch_size=[2]), TensorDict(t=NonTensorStack("a"), batch_size=[1])]
    )
    with pytest.raises(RuntimeError, match="ragged batch"):
        ragged["t"] == "a"  # noqa: B015
    with pytest.raises(RuntimeError, match="'t' has the ragged batch size"):
        ragged.where_value("t", "a")


def test_one_text_for_all_rows() -> None:
    td = TensorDict(unit="s", x=torch.arange(3), batch_size=[3])
    assert td["unit"] == "s" and type(td["unit"]) is str
    assert td.where_value("unit", "s").tolist() == [True] * 3
    assert td[td.where_value("unit", "m")]["x"].tolist() == []
    assert td.where_value("unit", 3).tolist() == [False] * 3
    with pytest.raises(TypeError, match=r"got True.*td.where_value"):
        td.filter(lambda rows: rows["unit"] == "s")
    assert (NonTensorData("s") == "s") is False


def test_values_stay_different() -> None:
    days = TensorDict(day=["a", "a"], batch_size=[2])["day"]
    assert not same_value(days, "a") and not same_value("a", days) and same_value(days, ["a", "a"])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_chosen() -> None:
    td = TensorDict(make_content(), [6])
    td["wide"] = torch.zeros(6, 2)
    with pytest.raises(TypeError, match=r"boolean tensor.*got a tensor of torch.float32"):
        td.filter(lambda rows: rows["x"])
    with pytest.raises(RuntimeError, match=r"mask of shape \[6\].*got \[6, 2\]"):
        td.filter(lambda rows: rows["wide"] > 0)
    with pytest.raises(RuntimeError, match=r"'wide' has the shape \[6, 2\]"):
        td.sort_by("wide")
    with pytest.raises(TypeError, match="'inner' is a TensorDict"):
        td.sort_by("inner")
    with pytest.raises(KeyError, match="absent"):
        td.sort_by("absent")
    with pytest.raises(KeyError, match="absent"):
        td.where_value("absent", 1)
    with pytest.raises(TypeError, match=r"'x' is a Tensor; compare a tensor with =="):
        td.where_value("x", 1)
    with pytest.raises(ValueError, match=r"there are 6, got n=7"):
        td.sample(7)
    with pytest.raises(ValueError, match="n=-1"):
        td.head(-1)
    for call in (lambda td: td.head(), lambda td: td.filter(len), lambda td: td.sample(0), lambda td: td.sort_by("a")):
        with pytest.raises(RuntimeError, match="no batch dims"):
            call(TensorDict(a=1))
    with pytest.raises(TypeError, match="hashable and have an order"):
        TensorDict(v=NonTensorStack("a", None), batch_size=[2]).sort_by("v")


# --- names ------------------------------------------------------------------------------------------------------------


def test_fields_with_the_names_of_these_methods_win() -> None:
    class Old(TensorClass):
        head: torch.Tensor
        sample: torch.Tensor
        filter: str = "none"
        allclose: torch.Tensor | None = None
        sort_by: str = "x"
        where_value: Any = None

    old = Old(torch.arange(3), sample=torch.ones(3), batch_size=[3])
    assert old.head.tolist() == [0, 1, 2] and old.filter == "none" and old[1:].head.tolist() == [1, 2]
    assert old.allclose is None and old.sort_by == "x"
    old.head = torch.zeros(3)
    assert lazy_stack([old, old]).sample.shape == (2, 3) and torch.allclose(old.to_tensordict(), old.to_tensordict())

    class Typed(TypedTensorDict):
        head: torch.Tensor
        filter: str

    assert Typed(head=torch.ones(2), filter="f", batch_size=[2]).filter == "f"


def test_parameters_with_the_names_of_these_methods_win() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(2, 1), nn.Linear(2, 2)

    params = TensorDictParams(TensorDict.from_module(Net()).data)
    assert params.head.weight.shape == (1, 2) and params.body.weight.shape == (2, 2)
    plain = TensorDictParams(TensorDict(w=torch.arange(3.0), batch_size=[3]))
    assert plain.head(2)["w"].tolist() == [0, 1] and callable(TensorDictParams.head)


# --- views of data sets -----------------------------------------------------------------------------------------------


def test_a_data_set_is_read_shard_by_shard(tmp_path: pathlib.Path) -> None:
    data = make_dataset(tmp_path, TensorDict(make_content(), [6]))
    seen: list[int] = []

    def choose(rows: Any) -> torch.Tensor:
        seen.append(len(rows))
        return rows["x"] < 3

    chosen = data.filter(choose)
    assert seen == [4, 2] and type(chosen) is type(data[:])
    assert chosen["x"].tolist() == [1, 2, 1, 0] and chosen.select("x")["x"].tolist() == [1, 2, 1, 0]
    assert chosen[[3, 1]]["inner", "y"].tolist() == [50, 20] and chosen[-1]["x"] == 0
    assert chosen[1:3].to_tensordict()["day"] == ["mon", "tue"]


def test_views_are_pickled_and_written(tmp_path: pathlib.Path) -> None:
    import pickle

    make_dataset(tmp_path, TensorDict(make_content(), [6]))
    data = open_dataset(tmp_path / "data", mode="r+")
    ordered = data.sort_by("x")
    assert pickle.loads(pickle.dumps(ordered))["inner", "name"] == ["n5", "n1", "n4", "n2", "n0", "n3"]
    part = ordered.select("x", ("inner", "y"))
    part[1:3] = {"x": torch.tensor([70.0, 80.0]), "inner": {"y": torch.tensor([7, 8])}}
    part[[5, 0]] = {"x": torch.tensor([-3.0, -5.0]), "inner": {"y": torch.tensor([-3, -5])}}
    expected = open_dataset(tmp_path / "data")
    assert expected["x"].tolist() == [3, 70, 2, -3, 80, -5]
    assert expected["inner", "y"].tolist() == [0, 7, 20, -3, 8, -5]
    part.set_("x", torch.arange(6.0))
    assert open_dataset(tmp_path / "data").sort_by(("inner", "y"))["x"].tolist() == [0, 5, 4, 1, 2, 3]


def test_added_entries_follow_the_rows(tmp_path: pathlib.Path) -> None:
    data = make_dataset(tmp_path, TensorDict(make_content(), [6]))[:]
    data["new"] = torch.arange(6)
    assert data.sort_by("x")["new"].tolist() == [5, 1, 4, 2, 0, 3]
    assert data[2:].filter(lambda rows: rows["new"] != 3)["new"].tolist() == [2, 4, 5]
    with pytest.raises(RuntimeError, match="cannot be added to a view"):
        data.sort_by("x").extend([])
