"""MDS, with MosaicML's own library in an environment of its own (`.venv-mds`), as its requirements go against ours."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest
import torch

from tensordict import TensorDict

ROOT = pathlib.Path(__file__).parents[2]
PYTHON = ROOT / ".venv-mds/bin/python"


@pytest.mark.seconds
@pytest.mark.skipif(not PYTHON.exists(), reason="without mosaicml-streaming: make .venv-mds/installed")
def test_rows_in_mds(tmp_path: pathlib.Path) -> None:
    env = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    child = subprocess.run(
        [PYTHON, pathlib.Path(__file__).with_name("streaming_rows.py"), tmp_path],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    said = json.loads(child.stdout.splitlines()[-1])
    assert said["same"] == said["packed"] == []
    assert said["columns"] == {
        "whole": "int",
        "small": "uint8",
        "half": "float16",
        "image": "ndarray:float32:2,4",
        "flag": "uint8",
        "brain": "float32",
        "same": "str",
        "text": "str",
        "data": "bytes",
        "ratio.price": "float32",
        "record": "json",
    }
    assert len(said["files"]) > 2 and said["files"][1].endswith(".mds.zstd")
    assert said["read by streaming"] == [5, "b", -1, True]
    assert said["uneven"] == [{"a": "int", "c": "ndarray:float32"}, [0, 1, 2], [[1, 2], [2, 2], [3, 2]]]
    assert said["ragged"] == [[1, 1], [1, 1, 1]]
    assert said["writer"] == [-2, -1, 0, 1, 2] * 2
    assert said["exists"][0] == "FileExistsError"
    assert said["complex"][0] == "UnsupportedEntryError" and "'z'" in said["complex"][1]
    assert said["object"][0] == "UnsupportedEntryError" and "'a.o'" in said["object"][1]
    assert said["wrong column"] and "'nothing'" in said["unknown column"][1]
    assert said["left"] == []
    assert said["pickled"][0] == "SaveError" and "['p']" in said["pickled"][1] and "runs code" in said["pickled"][1]
    assert said["clash"][0] == "ValueError" and "'a.b'" in said["clash"][1] and said["apart"] == ["a", "a.b"]
    assert said["elsewhere"][0] == "SaveError" and "passwd" in said["elsewhere"][1]
    assert said["broken"][0] == "SaveError" and "index.json" in said["broken"][1]
    assert said["missing"][0] == "FileNotFoundError"


def test_without_the_library(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "streaming", None)
    td = TensorDict(a=torch.arange(3), batch_size=3)
    for call in (lambda: td.to_mds(out=str(tmp_path / "x")), lambda: TensorDict.from_mds(tmp_path)):
        with pytest.raises(ModuleNotFoundError, match=r"tensordict\[mds\]"):
            call()
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="one of them"):
        td.to_mds()
