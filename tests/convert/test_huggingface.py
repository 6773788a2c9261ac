"""Data sets of Hugging Face: their features, memory that is shared, and back."""

from __future__ import annotations

import gc
import pathlib
import sys

import pytest
import torch

from tensordict import TensorDict

datasets = pytest.importorskip("datasets")


def table() -> object:
    features = {
        "x": datasets.Value("int64"),
        "f": datasets.Value("float32"),
        "ragged": datasets.List(datasets.Value("int32")),
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["no", "yes"]),
        "image": datasets.Array2D((2, 2), "int32"),
        "fixed": datasets.List(datasets.Value("float32"), length=2),
        "inner": {"y": datasets.Value("bool")},
    }
    content = {
        "x": [1, 2, 3], "f": [1.0, 2.0, 3.0], "ragged": [[1, 2], [3], []], "text": ["a", "b", None],
        "label": [0, 1, 0], "image": [[[1, 2], [3, i]] for i in range(3)], "fixed": [[1.0, 2.0]] * 3,
        "inner": [{"y": True}, {"y": False}, {"y": True}],
    }  # fmt: skip
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def test_features() -> None:
    data = table()
    td = TensorDict.from_hf(data)
    assert td.batch_size == (3,) and td["f"].dtype == torch.float32 and td["x"].tolist() == [1, 2, 3]
    assert td["image"].shape == (3, 2, 2) and td["image"][:, 1, 1].tolist() == [0, 1, 2]
    assert td["fixed"].shape == (3, 2) and [row.tolist() for row in td["ragged"].unbind()] == [[1, 2], [3], []]
    assert td["text"] == ["a", "b", None] and td["inner", "y"].tolist() == [True, False, True]
    assert td["label"].tolist() == [0, 1, 0] and td["label_categories"] == ["no", "yes"]
    assert td["f"].data_ptr() == data.data.column("f").chunk(0).buffers()[1].address
    chosen = TensorDict.from_hf(data.select([2, 0]), metadata=False)
    assert chosen["x"].tolist() == [3, 1] and "label_categories" not in chosen.keys()
    splits = TensorDict.from_hf(datasets.DatasetDict(train=data, test=data.select([0])))
    assert splits["train", "x"].shape == (3,) and splits["test"].batch_size == (1,)


def test_and_back() -> None:
    td = TensorDict.from_hf(table())
    made = td.to_hf()
    assert made.features["label"].names == ["no", "yes"] and made[1]["image"] == [[1, 2], [3, 1]]
    again = TensorDict.from_hf(made)
    assert set(again.keys(True, True)) == set(td.keys(True, True))
    for key in ("x", "f", "image", "fixed", "label", ("inner", "y")):
        assert again[key].equal(td[key]) and again[key].dtype == td[key].dtype
    assert made.data.column("f").chunk(0).buffers()[1].address == td["f"].data_ptr()
    assert TensorDict(a={"b": torch.zeros(2)}, batch_size=2).to_hf(separator="/").column_names == ["a/b"]


def test_what_is_none_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in (table().to_iterable_dataset(), [1, 2], None):
        with pytest.raises(TypeError, match=r"from_hf reads a datasets.Dataset"):
            TensorDict.from_hf(wrong)
    with pytest.raises(ValueError, match="'x'"):
        TensorDict.from_hf(datasets.Dataset.from_dict({"x": [1, None]}))
    missing = datasets.Dataset.from_dict(
        {"l": [-1, 1]}, features=datasets.Features({"l": datasets.ClassLabel(names=["a", "b"])})
    )
    for data in (missing, TensorDict.from_hf(missing).to_hf()):
        labels = TensorDict.from_hf(data)
        assert labels["l"].tolist() == [-1, 1] and labels["l_categories"] == ["a", "b"] and data["l"][:] == [-1, 1]
    td = TensorDict(a=torch.zeros(2), batch_size=2)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"tensordict\[hf\]"):
        td.to_hf()


@pytest.mark.parametrize("kept_in_memory", [False, True])
def test_data_sets_on_disk(tmp_path: pathlib.Path, kept_in_memory: bool) -> None:
    table().save_to_disk(tmp_path / "data")
    files = {path: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    data = datasets.load_from_disk(tmp_path / "data", keep_in_memory=kept_in_memory)
    td = TensorDict.from_hf(data)
    assert td["x"].tolist() == [1, 2, 3] and td["image"][2, 1].tolist() == [3, 2] and td["text"] == ["a", "b", None]
    assert td["f"].data_ptr() == data.data.column("f").chunk(0).buffers()[1].address
    # This process sees its writes; the file does not change.
    for name in ("x", "f", "image", "fixed", "label"):
        td[name].add_(1)
    td["ragged"].values().mul_(2)
    assert td["x"].tolist() == [2, 3, 4] and td["image"][2, 1].tolist() == [4, 3] and td["label"].tolist() == [1, 2, 1]
    assert [row.tolist() for row in td["ragged"].unbind()] == [[2, 4], [6], []]
    assert {path: path.read_bytes() for path in (tmp_path / "data").iterdir()} == files
    assert datasets.load_from_disk(tmp_path / "data")["x"][:] == [1, 2, 3]
    again = tmp_path / "again"
    td.exclude("label_categories").to_hf().save_to_disk(again)
    back = TensorDict.from_hf(datasets.load_from_disk(again))
    assert back["fixed"].equal(td["fixed"]) and back["x"].equal(td["x"])
    del data, back
    gc.collect()
    assert td["f"].tolist() == [2.0, 3.0, 4.0]  # the map lives as long as the tensors


def test_to_hf_does_not_hash_the_data(monkeypatch):
    # The hash of a table is computed from its pickle, which copies the data several times.
    def fail(*_):
        raise AssertionError("the data were hashed")

    monkeypatch.setattr(datasets.arrow_dataset, "generate_fingerprint", fail)
    made = TensorDict(a=torch.arange(3), batch_size=[3]).to_hf()
    assert made["a"][:] == [0, 1, 2]
    assert made._fingerprint
