"""Containers of zeros from a description: `from_schema`."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from tensordict import PersistentTensorDict, TensorDict

SCHEMA: dict[Any, Any] = {
    "obs": ([4, 2], torch.uint8),
    ("agent", "reward"): ((), torch.float32),
    "info": {"done": (torch.Size([1]), torch.bool)},
}


@pytest.mark.parametrize("storage", [None, "shared", "memmap", "h5", "zarr"])
def test_zeros_everywhere(tmp_path: pathlib.Path, storage: str | None) -> None:
    places = {"memmap": {"prefix": tmp_path / "folder"}, "h5": {"filename": tmp_path / "file.h5"}}
    where = {**places, "zarr": {"filename": tmp_path / "x.zarr"}}.get(storage or "", {})
    td = TensorDict.from_schema(SCHEMA, batch_size=[3], storage=storage, **where)
    assert td.batch_size == (3,)
    assert td["obs"].shape == (3, 4, 2) and td["obs"].dtype == torch.uint8
    assert td["agent", "reward"].shape == (3,) and td["info", "done"].dtype == torch.bool
    assert all((leaf == 0).all() for leaf in td.values(True, True))
    td[1] = TensorDict.from_schema(SCHEMA).apply(lambda leaf: leaf + 1)
    assert td["obs"].sum() == 8 and td["agent", "reward"].tolist() == [0, 1, 0]
    assert td.is_memmap() == (storage == "memmap") and td.is_shared() == (storage == "shared")
    if storage == "memmap":
        assert TensorDict.load_memmap(tmp_path / "folder")["obs"].sum() == 8
    if storage in ("h5", "zarr"):
        assert isinstance(td, PersistentTensorDict)
        td.close()


def test_device() -> None:
    assert TensorDict.from_schema(SCHEMA, device="meta")["obs"].is_meta


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"schema": {"a": {"b": [3]}}}, TypeError, r"entry \('a', 'b'\)"),
        ({"schema": {"a": ([2], "float32")}}, TypeError, "entry 'a'"),
        ({"storage": "tape"}, ValueError, "storage is one of"),
        ({"prefix": "x"}, ValueError, r"takes no \['prefix'\]"),
        ({"storage": "h5"}, ValueError, "needs filename="),
        ({"storage": "zarr"}, ValueError, "needs filename="),
        ({"storage": "shared", "device": "meta"}, ValueError, "device='meta'"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        TensorDict.from_schema(**{"schema": SCHEMA, **options})
