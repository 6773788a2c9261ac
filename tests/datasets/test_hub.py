"""`push_to_hub` and `load_dataset`, against a stand-in of the Hub on this machine (`hub_server.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hub_server
import pytest
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.datasets import load_dataset, push_to_hub

pytest.importorskip("huggingface_hub")

# `huggingface_hub` reads the environment when it is imported, so a process of its own runs each program.
HEAD = """
import pathlib, sys
import torch
from huggingface_hub.errors import HfHubHTTPError
from tensordict import DatasetWriter, TensorClass, TensorDict, open_dataset, verify
from tensordict.datasets import load_dataset, push_to_hub
folder = pathlib.Path(sys.argv[1])
class Step(TensorClass):
    x: torch.Tensor
    text: str
def write(*numbers):
    with DatasetWriter(folder / "rows", rows_per_shard=2) as writer:
        writer.extend(Step(x=torch.tensor(numbers), text=[f"t{n}" for n in numbers], batch_size=[len(numbers)]))
    return open_dataset(folder / "rows")
"""


def run(program: str, folder: Path, endpoint: str, token: str = hub_server.TOKEN) -> str:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_TOKEN": token, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.seconds
def test_rows_that_were_pushed_are_loaded(tmp_path: Path) -> None:
    program = """
data = write(1, 2, 3)
(folder / "rows" / "notes.txt").write_text("mine")
first = push_to_hub(data, "me/rows", private=True)
old = load_dataset("me/rows")
assert type(old) is Step and old.x.tolist() == [1, 2, 3] and old.text == ["t1", "t2", "t3"]
assert verify(old._wrapped_container().path).ok
push_to_hub(write(4), "me/rows")
new = load_dataset("me/rows")
assert sorted(new.x.tolist()) == [1, 2, 3, 4] and old.x.tolist() == [1, 2, 3]
pinned = load_dataset("me/rows", revision=first.rpartition("/")[2])
assert pinned.x.tolist() == [1, 2, 3] and len(list((folder / "home" / "tensordict" / "me--rows").iterdir())) == 2
try:
    load_dataset("me/none")
except HfHubHTTPError as error:
    assert "404" in str(error)
print("works")
"""
    with hub_server.serve() as (endpoint, hub):
        assert run(program, tmp_path, endpoint).endswith("works\n")
        gets = [line for line in hub.requests if line.startswith("GET ") and "/resolve/" in line]
        assert len(gets) == len(set(gets))  # nothing was fetched twice
        assert hub.private == {"me/rows": True} and len(hub.commits["me/rows"]) == 3
        assert {name.partition("/")[0] for name in hub.commits["me/rows"][-1]} == {"schema.json", "shards", "writers"}
        assert hub.large  # values and leaves went the way of large files


@pytest.mark.seconds
def test_a_hostile_repository_writes_nothing_outside_of_its_folder(tmp_path: Path) -> None:
    program = """
try:
    load_dataset("me/evil")
except ValueError as error:
    print("evil:", error)
try:
    load_dataset("me/empty")
except FileNotFoundError as error:
    print("empty:", error)
"""
    with hub_server.serve() as (endpoint, hub):
        hub.commits["me/evil"] = [
            {"schema.json": b"{}", "shards/../../../evil": b"x", "shards/run.py": b"raise SystemExit"}
        ]
        hub.commits["me/empty"] = [{"README.md": b"# Nothing"}]
        told = run(program, tmp_path, endpoint)
    assert "evil:" in told and "shards/../../../evil" in told and "empty:" in told
    assert not list(tmp_path.rglob("evil"))


def test_what_cannot_be_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    with DatasetWriter("memory://hub-test/rows") as writer:
        writer.append(TensorDict(x=torch.tensor(1)))
    with pytest.raises(Exception, match="is a URL"):
        push_to_hub(open_dataset("memory://hub-test/rows"), "me/rows")
    with pytest.raises(TypeError, match="open_dataset, got a TensorDict"):
        push_to_hub(TensorDict(x=torch.zeros(2), batch_size=[2]), "me/rows")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModuleNotFoundError, match=r"tensordict\[hf\]"):
        load_dataset("me/rows")
