"""Tests of errors for unknown options: they name the method that was called."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from tensordict import TensorDict, TensorDictParams


@pytest.mark.parametrize("method", ["memmap", "load_memmap", "load", "load_memmap_", "load_"])
@pytest.mark.parametrize("cls", [TensorDict, TensorDictParams])
def test_unknown_options_name_the_method(cls: Any, method: str, tmp_path: pathlib.Path) -> None:
    td = cls(TensorDict(a=torch.ones(2)))
    TensorDict(a=torch.zeros(2)).memmap(tmp_path / "saved")
    name = method if method != "load_" else "load_memmap_"
    with pytest.raises(TypeError, match=f"^{name}.. takes no argument keyz$"):
        getattr(td, method)(tmp_path / ("new" if method == "memmap" else "saved"), keyz=["a"])
    assert (td["a"] == 1).all() and not (tmp_path / "new").exists()


def test_from_zarr_names_unknown_options(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("zarr")
    TensorDict(a=torch.zeros(2)).to_zarr(tmp_path / "a.zarr").close()
    with pytest.raises(TypeError, match="^from_zarr.. takes no argument cache_dir$"):
        TensorDict.from_zarr(tmp_path / "a.zarr", cache_dir=tmp_path)


@pytest.mark.parametrize("source", [{"a": 1}, (1, 2)], ids=str)
def test_from_any_names_unknown_options(source: Any) -> None:
    with pytest.raises(TypeError, match="^from_any.. takes no argument names$"):
        TensorDict.from_any(source, names=None)
