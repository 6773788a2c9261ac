"""`load`, which takes a save of any format."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tensordict
from tensordict import PersistentTensorDict, TensorDict
from tensordict.core.exceptions import SaveError

SAVES: dict[str, Callable[[TensorDict, pathlib.Path], Any]] = {
    "directory": lambda td, path: td.save(path),
    "archive": lambda td, path: td.save(path, archive=True),
    "consolidated": lambda td, path: td.consolidate(path),
    "safetensors": lambda td, path: td.to_safetensors(path),
    "h5": lambda td, path: td.to_h5(path).close(),
    "zarr": lambda td, path: td.to_zarr(path).close(),
}
STORES = ("h5", "zarr")
FILES = pytest.mark.parametrize("name", ["consolidated", "safetensors", "h5", "zarr"])


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3, 2)}, "note": "hello"}, [3])


@pytest.mark.parametrize("load", [tensordict.load, TensorDict.load])
@pytest.mark.parametrize("name", SAVES)
def test_load_takes_every_format(name: str, load: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    SAVES[name](make(), tmp_path / "x")
    td = load(tmp_path / "x")
    assert isinstance(td, PersistentTensorDict if name in STORES else TensorDict)
    assert (td["a"] == torch.arange(3)).all()
    assert td["b", "c"].shape == (3, 2)
    assert td["note"] == "hello" and td.batch_size == (3,)
    if name in STORES:
        td.close()


@pytest.mark.parametrize("name", [name for name in SAVES if name not in STORES])
def test_device(name: str, tmp_path: pathlib.Path) -> None:
    SAVES[name](make(), tmp_path / "x")
    assert tensordict.load(tmp_path / "x", "meta")["b", "c"].device.type == "meta"
    assert TensorDict.load(tmp_path / "x", device="meta").device.type == "meta"
    loaded = TensorDict.load(tmp_path / "x", device="cpu:1")
    assert loaded.device == loaded["b"].device == torch.device("cpu:1")
    assert loaded["a"].device == loaded["b", "c"].device == torch.device("cpu")


@FILES
@pytest.mark.parametrize(
    "argument",
    [{"keys": ["a"]}, {"out": make()}, {"subpath": "b"}, {"mode": "r+"}],
    ids=lambda given: next(iter(given)),
)
def test_what_a_format_has_not_is_refused(name: str, argument: dict[str, Any], tmp_path: pathlib.Path) -> None:
    SAVES[name](make(), tmp_path / "x")
    if name in STORES and "mode" in argument:
        with TensorDict.load(tmp_path / "x", **argument) as td:
            td["a"] = torch.zeros(3, dtype=torch.int64)
        with TensorDict.load(tmp_path / "x") as td:
            assert not td["a"].any()
        return
    with pytest.raises(ValueError, match=f"{name}.*{next(iter(argument))}"):
        TensorDict.load(tmp_path / "x", **argument)


def test_other_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").write_text("no save")
    with pytest.raises(SaveError, match="no format that is known"):
        tensordict.load(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        tensordict.load(tmp_path / "missing")
