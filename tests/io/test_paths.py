"""Paths that are URLs, and the functions that take what the methods take."""

from __future__ import annotations

import inspect
import os
import pathlib
from typing import Any

import pytest
import torch

import tensordict
from tensordict import MemoryMappedTensor, PersistentTensorDict, TensorDict, verify
from tensordict.core.exceptions import SaveError

pytest.importorskip("h5py")

URLS = ["s3://bucket/x", "gs://bucket/x", "https://host/x", "FTP://host/x", "odd+scheme://x", "hf://a/b"]


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3)}}, [3])


# Calls that need a local file, and no URL can replace it.
LOCAL: dict[str, Any] = {
    "memmap_": lambda url: make().memmap_(url),
    "memmap_like": lambda url: make().memmap_like(url),
    "h5": lambda url: PersistentTensorDict(filename=url, mode="w"),
    "from_tensor": lambda url: MemoryMappedTensor.from_tensor(torch.ones(2), filename=url),
    "empty": lambda url: MemoryMappedTensor.empty(2, filename=url, existsok=True),
    "pack": lambda url: tensordict.pack_memmap("saved", url),
    "unpack": lambda url: tensordict.unpack_memmap("saved.tdz", url),
    "from_filename": lambda url: MemoryMappedTensor.from_filename(url, torch.float32, (2,)),
    "unpack from": lambda url: tensordict.unpack_memmap(url, "elsewhere"),
}
WRITING: dict[str, Any] = {
    "memmap": lambda url: make().memmap(url),
    "save": lambda url: tensordict.save(make(), url),
    "archive": lambda url: make().save(url, archive=True),
    "consolidate": lambda url: make().consolidate(url),
    "to_h5": lambda url: make().to_h5(url),
    "to_safetensors": lambda url: make().to_safetensors(url),
    "from_schema": lambda url: TensorDict.from_schema({"a": ([], torch.float32)}, storage="h5", filename=url),
}
READING: dict[str, Any] = {
    "load_memmap": TensorDict.load_memmap,
    "load": tensordict.load,
    "from_consolidated": TensorDict.from_consolidated,
    "from_h5": TensorDict.from_h5,
    "from_safetensors": TensorDict.from_safetensors,
    "verify": verify,
}
CALLS = {**LOCAL, **WRITING, **READING}


@pytest.mark.parametrize("name", CALLS)
def test_a_url_is_no_folder(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make().save("saved")
    make().save("saved.tdz")
    before = sorted(os.listdir())
    for url in URLS if name in LOCAL else ():
        scheme = url.partition(":")[0].lower()
        with pytest.raises(SaveError, match=rf"URL \({scheme.replace('+', '.')}:\)"):
            CALLS[name](url)
    for url in ("s3://bucket/x", "https://host/x", "file:///x"):
        # The path as `pathlib` normalises it.
        with pytest.raises(SaveError, match="URL"):
            CALLS[name](pathlib.Path(url))
    with pytest.raises(SaveError, match="URL"):
        CALLS[name]("file://elsewhere/x")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "FILE://{}"])
def test_file_urls_are_paths(form: str, tmp_path: pathlib.Path) -> None:
    for name, saved in (("x", "memmap"), ("x.tdz", "save"), ("c", "consolidate"), ("s", "to_safetensors")):
        url = form.format(tmp_path / f"a b{name}")
        getattr(make(), saved)(url)
        assert (tensordict.load(url.replace(" ", "%20")) == make()).all()
        assert verify(url).ok and (tmp_path / f"a b{name}").exists()
    saved = make().memmap_(form.format(tmp_path / "in_place"))
    assert saved.saved_path == tmp_path / "in_place" and saved["b"].saved_path == tmp_path / "in_place" / "b"
    assert (TensorDict.load_memmap(tmp_path / "in_place") == make()).all()
    assert saved.make_memmap("new", (3,)).filename == str(tmp_path / "in_place" / "new.memmap")
    make().to_h5(form.format(tmp_path / "h")).close()
    with TensorDict.from_h5(form.format(tmp_path / "h")) as opened:
        assert opened["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["a:b", "c:/x", "time 12://x", "x/s3:/y"])
def test_names_that_are_no_urls(name: str, tmp_path: pathlib.Path) -> None:
    make().save(tmp_path / name)
    assert (TensorDict.load_memmap(tmp_path / name) == make()).all()


@pytest.mark.parametrize("name", ["memmap", "save", "load_memmap", "load"])
def test_functions_take_what_the_methods_take(name: str) -> None:
    method = "load_memmap" if name.startswith("load") else name
    function = inspect.signature(getattr(tensordict, name)).parameters
    parameters = inspect.signature(getattr(TensorDict, method)).parameters
    assert {key: function[key].default for key in parameters if key != "self"} == {
        key: parameter.default for key, parameter in parameters.items() if key != "self"
    }


def test_load_memmap_as_a_function(tmp_path: pathlib.Path) -> None:
    tensordict.memmap(make(), tmp_path / "x.tdz", compression="deflate")
    assert tensordict.load_memmap(tmp_path / "x.tdz", num_threads=2, subpath="b")["c"].tolist() == [1, 1, 1]
    tensordict.save(make(), tmp_path / "y", archive=True)
    tensordict.load_memmap(tmp_path / "y", mode="r+")["a"].fill_(7)
    assert tensordict.load(tmp_path / "y", subpath=None)["a"].tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="mode must be"):
        tensordict.load_memmap(tmp_path / "y", mode="w")
