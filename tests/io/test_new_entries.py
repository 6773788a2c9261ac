"""New entries of a loaded save: written beside the others with `mode="r+"`, reported once with any other mode."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import warnings
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, NonTensorStack, TensorClass, TensorDict, lazy_stack
from tensordict.core.exceptions import UnsupportedEntryError


class Point(TensorClass):
    x: torch.Tensor
    y: torch.Tensor | None = None


def save(path: pathlib.Path) -> str:
    folder = str(path / "save")
    content = {"a": torch.zeros(3), "b": {"c": torch.ones(3)}, "text": "old", "p": Point(torch.ones(3), batch_size=[3])}
    TensorDict(content, [3]).memmap(folder)
    return folder


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    return save(tmp_path)


def reload(folder: str) -> Any:
    return TensorDict.load_memmap(folder, mode="r")


def test_new_entries_are_written(folder: str) -> None:
    td = TensorDict.load_memmap(folder, mode="r+")
    td["new"] = torch.arange(3)
    td["b", "deep", "er"] = torch.ones(3, 2)
    td["b", "deep", "est"] = torch.full((3,), 5)
    td.update({"u": torch.ones(3, requires_grad=True), "b": {"v": torch.zeros(3)}})
    td.set("word", "hello").set("words", ["p", "q", "r"])
    td["ragged"] = torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 3)], layout=torch.jagged)
    td["point"] = Point(torch.ones(3), batch_size=[3])
    td.get("point").y = torch.ones(3)
    td.get("p").y = torch.full((3,), 2.0)
    td[1] = TensorDict(row=torch.ones(4))
    td.setdefault("default", torch.ones(3))
    td.rename_key_("a", "z")
    found = reload(folder)
    assert set(found.keys(True, True)) == set(td.keys(True, True)) | {"a"} | set(found.keys(True, True)) - {"a"}
    for key in td.keys(True, True):
        value = found[key]
        if isinstance(value, torch.Tensor) and not value.is_nested:
            assert torch.equal(value, td[key]) and isinstance(td[key], MemoryMappedTensor), key
    assert found["word"] == "hello" and found["words"] == ["p", "q", "r"] and found["row"].sum() == 4
    assert [len(row) for row in found["ragged"].unbind()] == [1, 2, 3]
    assert found["point"].y.tolist() == [1] * 3 and found["p"].y.tolist() == [2] * 3
    assert not td.is_locked and td["b", "deep", "est"].fill_(7) is not None
    assert reload(folder)["b", "deep", "est"].tolist() == [7] * 3


def test_what_is_replaced_is_written_in_place(folder: str) -> None:
    td = TensorDict.load_memmap(folder, mode="r+")
    leaf = td["a"]
    td["a"] = torch.full((3,), 4.0)
    td["text"] = "new"
    assert td["a"] is leaf and reload(folder)["a"].tolist() == [4] * 3 and reload(folder)["text"] == td["text"] == "new"
    td["text"] = NonTensorStack(*"abc")
    assert reload(folder)["text"] == ["a", "b", "c"]
    with pytest.warns(UserWarning, match="entry 'a' stays in memory: it has another kind, shape or dtype"):
        td["a"] = torch.zeros(3, 2)
    td["b"] = TensorDict(batch_size=[3])
    assert td["a"].shape == (3, 2) and reload(folder)["a"].tolist() == [4] * 3 and reload(folder)["b", "c"].sum() == 3


@pytest.mark.parametrize("mode", [None, "r"])
def test_the_first_new_entry_warns(folder: str, tmp_path: pathlib.Path, mode: Any) -> None:
    td = TensorDict.load_memmap(folder, mode=mode)
    with pytest.warns(UserWarning, match=r"new entry 'new' stays in memory.*mode=\"r\+\".*memmap_\(\)") as told:
        td["b", "new"] = torch.ones(3)
    assert told[0].filename == __file__
    td["more"] = torch.ones(3)
    td["b", "c"] = torch.zeros(3)
    assert "more" not in reload(folder).keys() and reload(folder)["b", "c"].sum() == 3
    folder = folder if mode is None else str(tmp_path / "other")
    td.memmap_(folder, copy_existing=mode == "r")
    assert reload(folder)["more"].tolist() == reload(folder)["b", "new"].tolist() == [1] * 3


def test_archives_warn_too(tmp_path: pathlib.Path) -> None:
    TensorDict(a=torch.zeros(3), batch_size=[3]).save(tmp_path / "x.tdz")
    with pytest.warns(UserWarning, match="new entry 'b' stays in memory"):
        TensorDict.load(tmp_path / "x.tdz").set("b", torch.ones(3))


def test_only_new_entries_of_the_save_warn(folder: str) -> None:
    td = TensorDict.load_memmap(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        td["a"] = torch.ones(3)
        td["text"] = "other"
        td.set_("a", torch.zeros(3)).update_({"b": {"c": torch.zeros(3)}})
        for other in (td.clone(), td.copy(), td[1:], td.select("a"), td.to_tensordict(), td.apply(torch.abs),
                      copy.deepcopy(td), copy.copy(td), pickle.loads(pickle.dumps(td)), torch.stack([td, td]),
                      td.exclude("b"), td.to("cpu", torch.float64), td.empty()):  # fmt: skip
            other["new"] = torch.ones(*other.batch_size)
        td.pop("a")
        del td["b", "c"]
    assert set(reload(folder).keys()) == {"a", "b", "text", "p"}


def test_lazy_stacks(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "stack"
    lazy_stack([TensorDict(a=torch.zeros(3)), TensorDict(a=torch.ones(3))]).memmap(path)
    td = TensorDict.load_memmap(path, mode="r+")
    td["new"] = torch.arange(4).view(2, 2)
    assert reload(str(path))["new"].tolist() == [[0, 1], [2, 3]]


def test_a_call_that_fails_changes_nothing(folder: str) -> None:
    td = TensorDict.load_memmap(folder, mode="r+")
    before = sorted(os.listdir(folder))
    with pytest.raises(UnsupportedEntryError, match="allow_pickle"):
        td["fn"] = object()
    with pytest.raises(RuntimeError, match="batch size"):
        td["bad"] = torch.ones(2)
    assert sorted(os.listdir(folder)) == before and set(td.keys()) == {"a", "b", "text", "p"}
    other = TensorDict.load_memmap(folder, mode="r+")
    other["new"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"'new' is in .* already.*memmap_refresh_"):
        td["new"] = torch.zeros(3)
    assert td.memmap_refresh_()["new"].tolist() == [1] * 3
    os.mkdir(f"{folder}/node")
    pathlib.Path(folder, "node", "mine.txt").write_text("x")
    with pytest.raises(RuntimeError, match="is not a save"):
        td["node"] = TensorDict(x=torch.ones(3), batch_size=[3])
    assert pathlib.Path(folder, "node", "mine.txt").read_text() == "x" and "node" not in td.keys()


KILLED = """
    import os, sys, torch
    from tensordict import TensorDict
    from tensordict.io.formats import meta
    folder, kind = sys.argv[1:]
    td = TensorDict.load_memmap(folder, mode="r+")
    meta.add_entry = lambda *args: os._exit(9)
    td["new"] = torch.ones(3) if kind == "tensor" else TensorDict(x=torch.ones(3), batch_size=[3])
"""


@pytest.mark.parametrize("kind", ["tensor", "container"])
def test_a_killed_process_leaves_the_old_save(tmp_path: pathlib.Path, kind: str) -> None:
    folder = str(tmp_path / "save")
    TensorDict(a=torch.zeros(3), batch_size=[3]).memmap(folder)
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), folder, kind]).returncode == 9
    assert list(reload(folder).keys()) == ["a"]
    td = TensorDict.load_memmap(folder, mode="r+")
    td["new"] = torch.zeros(3) if kind == "tensor" else TensorDict(z=torch.zeros(3), batch_size=[3])
    found = reload(folder)["new"]
    assert found.tolist() == [0] * 3 if kind == "tensor" else list(found.keys()) == ["z"]
