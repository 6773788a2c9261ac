"""The command `tensordict`: what it prints, its exit codes, and that it gets by without what it should not need."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import h5py
import pytest
import torch

import tensordict
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, lazy_stack
from tensordict.core import registry
from tensordict.core.exceptions import SaveError
from tensordict.io.formats import opening as formats
from tensordict.io.formats.detect import detect_format
from tensordict.io.saving import progress
from tensordict.io.saving.progress import count_bytes, count_disk_usage
from tensordict.tensorclass import tensorclass
from tensordict_cli.runners import main

SUFFIX = {
    "directory": "",
    "archive": ".tdz",
    "consolidated": ".consolidated",
    "h5": ".h5",
    "zarr": ".zarr",
    "safetensors": ".safetensors",
}
# HDF5 holds one dataset per entry, and so no lazy stacks and no ragged tensors.
STACKED = [name for name in SUFFIX if name not in ("h5", "zarr")]


@tensorclass
class Sample:
    """A tensorclass of this module, which a subprocess does not know."""

    data: torch.Tensor
    label: str = "none"


def container() -> TensorDict:
    """One of every kind that all formats keep."""
    td = TensorDict(
        a=torch.arange(6.0).view(2, 3),
        flags=torch.tensor([True, False]),
        inner={"deep": {"half": torch.ones(2, 2, dtype=torch.bfloat16)}, "none": torch.zeros(2, 0)},
        batch_size=[2],
        names=["time"],
    )
    td["item"] = Sample(data=torch.ones(2), label="seven", batch_size=[2])
    td["value"] = NonTensorData({"lr": 0.5}, batch_size=[2])
    td["words"] = NonTensorStack("x", "y")
    return td


@pytest.fixture(params=formats.FORMATS)
def save(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    """The container saved in every format."""
    path = tmp_path / f"save{SUFFIX[request.param]}"
    formats.write_save(container(), path, request.param)
    return path


def lines(text: str) -> list[list[str]]:
    """The words of each line, without the branches of the tree."""
    return [[word for word in line.split() if word.strip("├─└│")] for line in text.splitlines()]


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_prints_the_tree(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(save)]) == 0
    output = capsys.readouterr().out
    head, root, *tree = output.splitlines()
    name = detect_format(save)
    assert head.startswith(f"{save}: {name}, 5 tensors, 3 values, 4 containers, 42 B of tensors, ")
    assert root.split() == [".", "TensorDict", "[2]", "names", "time"]
    found = lines("\n".join(tree))
    assert ["a", "float32", "[2,", "3]", "24", "B"] in found
    assert ["half", "bfloat16", "[2,", "2]", "8", "B"] in found
    assert ["none", "float32", "[2,", "0]", "0", "B"] in found
    assert ["item", f"{__name__}.Sample", "[2]"] in found
    assert ["label", "NonTensorData", "[2]", "'seven'"] in found
    assert ["words", "NonTensorStack", "[2]", "['x',", "'y']"] in found
    # The tree is drawn: `half` is two levels down, in a branch that goes on.
    assert any(line.startswith(("│  └─ half", "│     └─ half", "│  │  └─ half")) for line in tree)


def test_inspect_json(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(save)]) == 0
    report = json.loads(capsys.readouterr().out)
    root = report.pop("root")
    size = report.pop("bytes_on_disk")
    assert size == count_bytes(save) > 42
    assert report.pop("bytes_allocated") == count_disk_usage(save)
    assert report == {
        "problems": [],
        "path": str(save),
        "format": detect_format(save),
        "nbytes": 42,
        "tensors": 5,
        "values": 3,
        "containers": 4,
    }
    entries = root.pop("entries")
    assert root == {"type": "container", "kind": "TensorDict", "batch_size": [2], "names": ["time"], "stack_dim": None}
    leaf = {"type": "tensor", "dtype": "torch.float32", "shape": [2, 3], "nbytes": 24, "ragged": False}
    assert entries["a"] == leaf
    item = entries["item"]
    assert (item["kind"], sorted(item["entries"])) == (f"{__name__}.Sample", ["data", "label"])
    assert item["entries"]["label"]["value"] == "seven"
    value = entries["value"]
    assert (value["type"], value["value"], value["pickled"]) == ("value", {"lr": 0.5}, False)
    assert (entries["words"]["value"], entries["words"]["stack_dim"]) == (["x", "y"], 0)


def test_only_convert_needs_the_tensorclass(
    save: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(registry._DECLARED, f"{__name__}.Sample")
    for command in (["inspect", str(save)], ["verify", str(save)], ["diff", str(save), str(save)]):
        assert main(command) == 0
    assert f"{__name__}.Sample" in capsys.readouterr().out
    assert main(["convert", str(save), str(tmp_path / "copy")]) == 2
    assert f"use --import {__name__}\n" in capsys.readouterr().err


def test_inspect_a_part(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"a": torch.zeros(3), "b": {"c.d": torch.ones(5), "e": {"f": torch.ones(1), "s": "x"}}}
    TensorDict(content).save(tmp_path / "x")

    def shown(*options: str) -> list[list[str]]:
        assert main(["inspect", str(tmp_path / "x"), *options]) == 0
        return lines(capsys.readouterr().out)[1:]

    assert shown("--depth", "0") == [[".", "TensorDict", "[]", "36", "B"]]
    assert [line[0] for line in shown("--depth", "1")] == [".", "a", "b"]
    assert shown("--key", "b.e") == [
        ["b.e", "TensorDict", "[]"],
        ["f", "float32", "[1]", "4", "B"],
        ["s", "NonTensorData", "[]", "'x'"],
    ]
    assert shown("--key", "b.c.d") == [["b.c.d", "float32", "[5]", "20", "B"]]
    assert shown("--key", "b", "--depth", "1")[-1] == ["e", "TensorDict", "[]", "4", "B"]
    assert main(["inspect", str(tmp_path / "x"), "--key", "b.ee"]) == 2
    assert "there is nothing at the key 'b.ee'; did you mean 'b.e'?" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "x"), "--json", "--depth", "0"]) == 0
    assert "entries" not in json.loads(capsys.readouterr().out)["root"]


def test_inspect_goes_on_past_what_is_broken(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(5), "e": {"f": torch.ones(1)}}}).save(tmp_path / "x")
    os.truncate(tmp_path / "x/b/c.memmap", 3)
    (tmp_path / "x/b/e/meta.json").write_text("{")
    assert main(["inspect", str(tmp_path / "x")]) == 1
    output = capsys.readouterr()
    assert lines(output.out)[1:] == [
        [".", "TensorDict", "[]"],
        ["a", "float32", "[3]", "12", "B"],
        ["b", "TensorDict", "[]"],
        ["c", "broken"],
        ["e", "broken"],
    ]
    assert [line.split(": ")[0] for line in output.err.splitlines()] == ["entry ('b', 'c')", "entry ('b', 'e')"]
    assert main(["inspect", "--json", str(tmp_path / "x")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert len(report["problems"]) == 2 and report["root"]["entries"]["b"]["entries"]["c"]["type"] == "broken"


def spoil_consolidated(path: pathlib.Path) -> None:
    content = path.read_bytes()
    assert content.count(b'"c":["torch.float32",[5]') == 1
    path.write_bytes(content.replace(b'"c":["torch.float32",[5]', b'"c":["torch.float32",[6]'))


def spoil_safetensors(path: pathlib.Path) -> None:
    content = path.read_bytes()
    assert content.count(b'"b.c":{"dtype":"F32","shape":[5]') == 1
    path.write_bytes(content.replace(b'"b.c":{"dtype":"F32","shape":[5]', b'"b.c":{"dtype":"F32","shape":[6]'))


def spoil_h5(path: pathlib.Path) -> None:
    with h5py.File(path, "r+") as file:
        file["b/c"].attrs["_dtype"] = "torch.nonsense"


@pytest.mark.parametrize(
    ("to", "spoil"),
    [("consolidated", spoil_consolidated), ("safetensors", spoil_safetensors), ("h5", spoil_h5)],
)
def test_inspect_goes_on_in_one_file(
    to: str, spoil: Callable[[pathlib.Path], None], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    td = TensorDict({"a": torch.zeros(3), "b": {"c": torch.ones(5), "e": {"f": torch.ones(1)}}, "z": torch.ones(2)})
    path = tmp_path / "x"
    formats.write_save(td, path, to)
    spoil(path)
    with pytest.raises(SaveError, match="c'"):
        formats.describe_save(path)
    assert main(["inspect", str(path)]) == 1
    output = capsys.readouterr()
    assert sorted(lines(output.out)[1:]) == sorted(
        [
            [".", "TensorDict", "[]"],
            ["a", "float32", "[3]", "12", "B"],
            ["b", "TensorDict", "[]"],
            ["c", "broken"],
            ["e", "TensorDict", "[]"],
            ["f", "float32", "[1]", "4", "B"],
            ["z", "float32", "[2]", "8", "B"],
        ]
    )
    assert len(output.err.splitlines()) == 1 and "c'" in output.err
    assert main(["inspect", str(path), "--key", "b.e"]) == 1


def test_inspect_shows_what_files_take(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(a=torch.zeros(3)).save(tmp_path / "x")
    with open(tmp_path / "x/a.memmap", "ab") as file:
        file.truncate(1 << 26)  # A hole, which takes nothing.
    assert main(["inspect", "--json", str(tmp_path / "x")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bytes_on_disk"] > 1 << 26 > report["bytes_allocated"] > 0


@pytest.mark.parametrize("name", STACKED)
def test_inspect_lazy_stack(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"save{SUFFIX[name]}"
    formats.write_save(lazy_stack([TensorDict(x=torch.zeros(1)), TensorDict(x=torch.ones(2))]), path, name)
    assert main(["inspect", str(path)]) == 0
    head, *tree = capsys.readouterr().out.splitlines()
    assert ": " + name + ", 2 tensors, 3 containers, 12 B of tensors, " in head
    assert lines("\n".join(tree)) == [
        [".", "LazyStackedTensorDict", "[2]", "stack", "dim", "0"],
        ["0", "TensorDict", "[]"],
        ["x", "float32", "[1]", "4", "B"],
        ["1", "TensorDict", "[]"],
        ["x", "float32", "[2]", "8", "B"],
    ]
    assert main(["inspect", "--json", str(path)]) == 0
    root = json.loads(capsys.readouterr().out)["root"]
    assert [root["entries"][i]["entries"]["x"]["shape"] for i in ("0", "1")] == [[1], [2]]
    assert (root["kind"], root["stack_dim"], root["batch_size"]) == ("LazyStackedTensorDict", 0, [2])
    for other in STACKED:
        assert main(["convert", str(path), str(tmp_path / f"other{SUFFIX[other]}")]) == 0
        assert main(["diff", str(path), str(tmp_path / f"other{SUFFIX[other]}")]) == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_inspect_ragged(layout: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
    TensorDict(rows=rows, batch_size=[2]).save(tmp_path / "save")
    assert main(["inspect", str(tmp_path / "save")]) == 0
    assert ["rows", "float32,", "ragged", "[2,", "*,", "3]", "72", "B"] in lines(capsys.readouterr().out)
    assert main(["inspect", "--json", str(tmp_path / "save")]) == 0
    leaf = json.loads(capsys.readouterr().out)["root"]["entries"]["rows"]
    assert (leaf["shape"], leaf["ragged"], leaf["nbytes"]) == ([2, -1, 3], True, 72)


def test_inspect_reads_no_tensor(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor of a TiB in a file without blocks would take an hour to read."""
    folder = tmp_path / "save"
    TensorDict(x=torch.zeros(4, dtype=torch.uint8), batch_size=[4]).save(folder)
    meta = json.loads((folder / "meta.json").read_text())
    meta["x"]["shape"], meta["shape"] = [1 << 40], [1 << 40]
    (folder / "meta.json").write_text(json.dumps(meta))
    os.truncate(folder / "x.memmap", 1 << 40)
    assert main(["inspect", str(folder)]) == 0
    assert "1.0 TiB of tensors" in capsys.readouterr().out


def test_inspect_does_not_unpickle(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(a=torch.ones(1), v=NonTensorData("x")).save(tmp_path / "save")
    meta = json.loads((tmp_path / "save/v/meta.json").read_text())
    del meta["data"]
    (tmp_path / "save/v/meta.json").write_text(json.dumps(meta))
    content = pickle.dumps({"data": Bomb(str(tmp_path / "exploded"))})
    (tmp_path / "save/v/other.pickle").write_bytes(content)
    assert main(["inspect", str(tmp_path / "save")]) == 0
    assert f"pickled, {len(content)} bytes" in capsys.readouterr().out
    assert main(["inspect", "--json", str(tmp_path / "save")]) == 0
    value = json.loads(capsys.readouterr().out)["root"]["entries"]["v"]
    assert (value["value"], value["pickled"]) == (None, True)
    assert main(["convert", str(tmp_path / "save"), str(tmp_path / "copy")]) == 2
    assert "allow" in capsys.readouterr().err
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "copy").exists()


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_names_cannot_write_to_the_terminal(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"\x1b[2Jx\ny": torch.ones(1), "v": NonTensorData("\x1b[2J")}).save(tmp_path / "save")
    assert main(["inspect", str(tmp_path / "save")]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and len(output.splitlines()) == 4
    assert r"\x1b[2Jx\ny" in output


# --- diff -------------------------------------------------------------------------------------------------------------


def test_diff_of_the_same(save: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats.write_save(container(), tmp_path / "other", "directory")
    for one, other in ((save, tmp_path / "other"), (tmp_path / "other", save)):
        assert main(["diff", str(one), str(other)]) == 0
        assert capsys.readouterr().out == "the same: 5 tensors\n"
    assert main(["diff", "--json", str(save), str(save)]) == 0
    assert json.loads(capsys.readouterr().out) == {"same": True, "differences": []}


def differences(capsys: pytest.CaptureFixture[str], one: Any, other: Any, *options: str) -> list[dict[str, Any]]:
    code = main(["diff", "--json", *options, str(one), str(other)])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["same"]) == ((1, False) if report["differences"] else (0, True))
    found: list[dict[str, Any]] = report["differences"]
    return found


def test_diff_of_structure(save: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = container()
    del changed["flags"]
    changed["new"] = torch.ones(2)
    changed["a"] = torch.zeros(2, 4)
    changed["inner", "deep", "half"] = torch.ones(2, 2)
    changed["inner", "none"] = TensorDict(batch_size=[2])
    changed["value"] = NonTensorData({"lr": 0.25}, batch_size=[2])
    changed["item"] = TensorDict(data=torch.ones(2), label=NonTensorData("seven", batch_size=[2]), batch_size=[2])
    formats.write_save(changed, tmp_path / "changed", "directory")
    found = differences(capsys, save, tmp_path / "changed")
    by_key = {(*entry.pop("key"), entry.pop("what")): entry for entry in found}
    assert by_key == {
        ("a", "shape"): {"a": [2, 3], "b": [2, 4]},
        ("flags", "missing"): {"a": "Tensor", "b": None},
        ("new", "additional"): {"a": None, "b": "Tensor"},
        ("inner", "deep", "half", "dtype"): {"a": "torch.bfloat16", "b": "torch.float32"},
        ("inner", "none", "kind"): {"a": "Tensor", "b": "TensorDict"},
        ("value", "value"): {"a": {"lr": 0.5}, "b": {"lr": 0.25}},
        ("item", "kind"): {"a": f"{__name__}.Sample", "b": "TensorDict"},
    }
    assert main(["diff", str(save), str(tmp_path / "changed")]) == 1
    output = lines(capsys.readouterr().out)
    assert ["'a'", "shape", "[2,", "3]", "and", "[2,", "4]"] in output
    assert ["('inner',", "'deep',", "'half')", "dtype", "torch.bfloat16", "and", "torch.float32"] in output
    assert output[-1] == ["7", "differences"]


def test_diff_of_sizes_and_names(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(x=torch.ones(2, 3), batch_size=[2, 3], names=["a", None]).save(tmp_path / "1")
    TensorDict(x=torch.ones(2, 3), batch_size=[2], names=["b"]).save(tmp_path / "2")
    found = differences(capsys, tmp_path / "1", tmp_path / "2")
    assert [(entry["key"], entry["what"], entry["a"], entry["b"]) for entry in found] == [
        ([], "batch size", [2, 3], [2]),
        ([], "names", ["a", None], ["b"]),
    ]
    stacks = [lazy_stack([TensorDict(x=torch.ones(2), batch_size=[2])] * 2, dim) for dim in (0, 1)]
    for dim, stack in enumerate(stacks):
        assert isinstance(stack, LazyStackedTensorDict)
        stack.save(tmp_path / f"stack{dim}")
    found = differences(capsys, tmp_path / "stack0", tmp_path / "stack1")
    assert [(entry["what"], entry["a"], entry["b"]) for entry in found] == [("stack dim", 0, 1)]


# Of each dtype: two tensors, how many elements differ, and by how much at most.
ELEMENTS = {
    "float32": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 7.0]), 2, 4.0),
    "infinite": (torch.tensor([torch.inf, 1.0]), torch.tensor([1.0, 1.5]), 2, None),
    "bool": (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1),
    "int64": (torch.tensor([2**63 - 1, 5]), torch.tensor([-(2**63), 5]), 1, 2**64 - 1),
    "uint64": (torch.tensor([2**64 - 1, 0], dtype=torch.uint64), torch.zeros(2, dtype=torch.uint64), 1, 2**64 - 1),
    "uint16": (torch.tensor([1, 9], dtype=torch.uint16), torch.tensor([3, 9], dtype=torch.uint16), 1, 2),
    "bfloat16": (torch.ones(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), 3, 1.0),
    "float8": (torch.ones(2).to(torch.float8_e5m2), torch.tensor([1.0, 4.0]).to(torch.float8_e5m2), 1, 3.0),
    "complex64": (torch.tensor([3j, 1]), torch.tensor([4 + 0j, 1]), 1, 5.0),
    "complex32": (torch.tensor([3j]), torch.tensor([4 + 0j]), 1, 5.0),
    "int4": (*(torch.tensor([1, n], dtype=torch.uint8).view(torch.int4) for n in (2, 5)), 1, 3),
    "bits16": (*(torch.tensor([1, n], dtype=torch.int16).view(torch.bits16) for n in (2, -1)), 1, 2**16 - 3),
    "scalar": (torch.tensor(1.0), torch.tensor(2.0), 1, 1.0),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", ELEMENTS)
def test_diff_of_elements(name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, count, largest = ELEMENTS[name]
    if name == "complex32":
        one, other = one.to(torch.complex32), other.to(torch.complex32)
    TensorDict(x=one).save(tmp_path / "1")
    TensorDict(x=other).save(tmp_path / "2")
    expected = {"key": ["x"], "what": "elements", "differing": count, "of": one.numel(), "max_abs": largest}
    assert differences(capsys, tmp_path / "1", tmp_path / "2") == [expected]
    assert differences(capsys, tmp_path / "1", tmp_path / "1") == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_diff_of_even_rows(layout: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A ragged tensor whose rows are all of one length is not the tensor of the same elements."""
    TensorDict(x=torch.nested.nested_tensor([torch.ones(3)] * 2, layout=layout), batch_size=[2]).save(tmp_path / "1")
    TensorDict(x=torch.ones(2, 3), batch_size=[2]).save(tmp_path / "2")
    for one, other, kinds in (("1", "2", ("ragged Tensor", "Tensor")), ("2", "1", ("Tensor", "ragged Tensor"))):
        first = differences(capsys, tmp_path / one, tmp_path / other)[0]
        assert (first["key"], first["what"], first["a"], first["b"]) == (["x"], "kind", *kinds)


def test_diff_within_tolerance(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.tensor([100.0, 1.0, torch.nan, torch.inf])
    TensorDict(x=values).save(tmp_path / "1")
    TensorDict(x=values + torch.tensor([1.0, 0.5, 0.0, 0.0])).save(tmp_path / "2")
    paths = (tmp_path / "1", tmp_path / "2")
    counts = {
        (): 3,
        ("--equal-nan",): 2,
        ("--rtol", "0.02"): 2,
        ("--rtol", "0.02", "--equal-nan"): 1,
        ("--atol", "1", "--equal-nan"): 0,
    }
    for options, count in counts.items():
        found = differences(capsys, *paths, *options)
        assert [entry["differing"] for entry in found] == ([count] if count else []), options
    assert differences(capsys, paths[0], paths[0])[0]["max_abs"] is None


def test_diff_reads_piece_by_piece(
    save: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows smaller and larger than a piece, with one other element near the end of each."""
    name = detect_format(save)
    td = TensorDict(rows=torch.zeros(5000, 1000), wide=torch.zeros(2, 3, 1 << 20), flat=torch.zeros(3 << 20))
    formats.write_save(td, tmp_path / f"1{SUFFIX[name]}", name)
    td["rows"][4998, 3] = 1
    td["wide"][1, 2, -1] = 2
    td["flat"][-1] = 3
    formats.write_save(td, tmp_path / "2", "directory")
    found = differences(capsys, tmp_path / f"1{SUFFIX[name]}", tmp_path / "2")
    assert [(entry["key"], entry["differing"], entry["of"], entry["max_abs"]) for entry in found] == [
        (["rows"], 1, 5_000_000, 1.0),
        (["wide"], 1, 6 << 20, 2.0),
        (["flat"], 1, 3 << 20, 3.0),
    ]


def test_diff_of_ragged(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, lengths, fill in (("1", (2, 4), 1.0), ("2", (2, 4), 2.0), ("3", (3, 3), 1.0)):
        rows = [torch.full((length, 2), fill) for length in lengths]
        TensorDict(x=torch.nested.nested_tensor(rows, layout=torch.jagged), batch_size=[2]).save(tmp_path / name)
    found = differences(capsys, tmp_path / "1", tmp_path / "2")
    assert [(entry["differing"], entry["of"], entry["max_abs"]) for entry in found] == [(12, 12, 1.0)]
    found = differences(capsys, tmp_path / "1", tmp_path / "3")
    assert [(entry["what"], entry["a"], entry["b"]) for entry in found] == [
        ("shape", [[2, 2], [4, 2]], [[3, 2], [3, 2]])
    ]


# --- convert ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", formats.FORMATS)
def test_convert(save: pathlib.Path, to: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / f"converted{SUFFIX[to]}"
    assert main(["convert", str(save), str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: {to}, ")
    assert detect_format(target) == to
    assert main(["diff", str(save), str(target)]) == 0
    again = formats.open_save(target)
    assert (again["item"].label, again["a"].tolist(), again.names) == ("seven", [[0, 1, 2], [3, 4, 5]], ["time"])


def test_convert_shows_progress_on_a_terminal(
    save: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = detect_format(save)
    big = TensorDict(x=torch.zeros(5 << 20, dtype=torch.uint8))
    formats.write_save(big, tmp_path / f"big{SUFFIX[name]}", name)
    assert main(["convert", str(tmp_path / f"big{SUFFIX[name]}"), str(tmp_path / "1")]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    assert main(["convert", str(tmp_path / f"big{SUFFIX[name]}"), str(tmp_path / f"2{SUFFIX[name]}")]) == 0
    error = capsys.readouterr().err
    assert "saving: 100%" in error and "5.00M/5.00M" in error


def test_h5_of_another_program(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "foreign.h5", "w") as file:
        file["x"] = [[1.0, 2.0], [3.0, 4.0]]
        file["inner/y"] = [1, 2]
    assert main(["convert", str(tmp_path / "foreign.h5"), str(tmp_path / "save")]) == 0
    assert main(["diff", str(tmp_path / "foreign.h5"), str(tmp_path / "save")]) == 0
    with h5py.File(tmp_path / "foreign.h5", "a") as file:
        file["names"] = h5py.ExternalLink("elsewhere.h5", "/names")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "foreign.h5")]) == 0
    found = lines(capsys.readouterr().out)
    assert ["x", "float64", "[2,", "2]", "32", "B"] in found
    assert ["names", "NonTensorData", "[2]", "<a", "link", "to", "another", "file>"] in found


@pytest.mark.parametrize("command", ["inspect", "verify", "convert"])
def test_files_of_torch_save_are_named(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "weights.pt"
    torch.save(TensorDict(a=torch.zeros(2)), file)
    code = main([command, str(file), *([str(tmp_path / "save")] if command == "convert" else [])])
    printed = capsys.readouterr()
    assert code == 2
    assert "was written by torch.save: torch.load reads it" in printed.out + printed.err
    assert not (tmp_path / "save").exists()


def test_convert_by_name_of_format(save: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert main(["convert", "--to", "archive", str(save), str(tmp_path / "odd.suffix")]) == 0
    assert detect_format(tmp_path / "odd.suffix") == "archive"


def test_convert_replaces_only_when_told(
    save: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"old{SUFFIX[detect_format(save)]}"
    formats.write_save(TensorDict(old=torch.ones(1)), target, detect_format(save))
    assert main(["convert", str(save), str(target)]) == 2
    assert capsys.readouterr().err == f"tensordict: error: {str(target)!r} exists already; use --force to replace it\n"
    assert "old" in formats.open_save(target).keys()
    assert main(["convert", "--force", str(save), str(target)]) == 0
    assert main(["diff", str(save), str(target)]) == 0


def test_convert_spares_what_is_no_save(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(x=torch.ones(1)).save(tmp_path / "save")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").write_text("dear")
    for target, said in (("home", "other content"), ("home/letter", "is a file"), ("save", "are the same")):
        assert main(["convert", "--force", "--to", "directory", str(tmp_path / "save"), str(tmp_path / target)]) == 2
        assert said in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "save"), str(tmp_path / "save/inside.tdz")]) == 2
    assert "one is in the other" in capsys.readouterr().err
    assert main(["convert", "--force", "--to", "archive", str(tmp_path / "save"), str(tmp_path / "home")]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "save")) == ["meta.json", "x.memmap"]
    assert os.listdir(tmp_path / "home") == ["letter"]


def test_convert_with_a_tensorclass_of_another_module(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class is defined in the current folder, which is not on the path of modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    name = f"points_{tmp_path.name}"
    lines = [
        "import torch",
        "from tensordict import tensorclass",
        "@tensorclass",
        "class Point:",
        "    x: torch.Tensor",
    ]
    (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n")
    Sample(data=torch.ones(2), batch_size=[2]).save("save")
    meta = (tmp_path / "save/meta.json").read_text()
    (tmp_path / "save/meta.json").write_text(meta.replace(f"{__name__}.Sample", f"{name}.Point"))
    os.rename("save/_tensordict/data.memmap", "save/_tensordict/x.memmap")
    shutil.rmtree("save/_tensordict/label")
    inner = json.loads((tmp_path / "save/_tensordict/meta.json").read_text())
    inner["x"] = inner.pop("data")
    del inner["label"]
    (tmp_path / "save/_tensordict/meta.json").write_text(json.dumps(inner))

    assert main(["convert", "save", "copy.tdz"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--import {name}\n" in error and not os.path.exists("copy.tdz")
    assert main(["convert", "--import", "nowhere", "save", "copy.tdz"]) == 2
    assert capsys.readouterr().err == "tensordict: error: No module named 'nowhere'\n"
    assert main(["convert", "--import", name, "save", "copy.tdz"]) == 0
    assert main(["diff", "save", "copy.tdz"]) == 0
    assert type(formats.open_save("copy.tdz")).__module__ == name
    monkeypatch.delitem(registry._DECLARED, f"{name}.Point")
    monkeypatch.delitem(sys.modules, name)


def test_convert_with_options(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    td = TensorDict(x=torch.zeros(1000), v=NonTensorData({1, 2}), batch_size=[])
    td.save(tmp_path / "save", allow_pickle=True)
    save, archive = str(tmp_path / "save"), str(tmp_path / "small.tdz")
    assert main(["convert", "--compression", "deflate", save, archive]) == 2
    assert "the value at 'v' is pickled" in capsys.readouterr().err
    assert main(["convert", "--compression", "deflate", "--allow-pickle", save, archive]) == 0
    assert os.path.getsize(archive) < 2000
    assert formats.open_save(archive, allow_pickle=True)["v"] == {1, 2}
    # The compressed tensor is described without unpacking it, and compared.
    assert main(["diff", save, archive]) == 0
    assert main(["diff", archive, archive]) == 0
    assert main(["inspect", archive]) == 0
    assert ["x", "float32", "[1000]", "3.9", "KiB"] in lines(capsys.readouterr().out)

    assert main(["convert", "--checksum", "sha256", "--allow-pickle", archive, str(tmp_path / "summed")]) == 0
    assert "sha256:" in (tmp_path / "summed/meta.json").read_text()
    for options in (["--compression", "gzip"], ["--checksum", "crc32"]):
        target = str(tmp_path / ("other" if options[0] == "--compression" else "other.tdz"))
        assert main(["convert", *options, "--allow-pickle", save, target]) == 2
        assert "format" in capsys.readouterr().err and not os.path.exists(target)


def test_diff_of_compressed(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    for name, fill in (("1", 1), ("2", 2)):
        td = TensorDict(x=torch.full((2, 5), fill), rows=rows * fill, batch_size=[2])
        formats.write_save(td, tmp_path / f"{name}.tdz", "archive", compression="deflate")
    found = differences(capsys, tmp_path / "1.tdz", tmp_path / "2.tdz")
    assert {entry["key"][0]: entry["differing"] for entry in found} == {"x": 10, "rows": 18}


# --- verify -----------------------------------------------------------------------------------------------------------


def test_verify_of_a_sound_save(save: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(save)]) == 0
    name = detect_format(save)
    summed = ", 5 with checksums" if name == "archive" else ""
    sound = "sound" if summed else "sound, no checksums recorded"
    assert capsys.readouterr().out == f"{save}: {name}, 5 tensors, 42 B{summed}: {sound}\n"
    assert main(["verify", "--json", str(save)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("checksummed") == (5 if summed else 0)
    expected = {"path": str(save), "format": name, "ok": True, "tensors": 5, "nbytes": 42, "problems": []}
    assert report == expected


def test_verify_of_a_broken_save(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(x=torch.zeros(4), y=torch.zeros(4), z=torch.zeros(1)).save(tmp_path / "save", checksum=True)
    os.truncate(tmp_path / "save/x.memmap", 3)
    (tmp_path / "save/y.memmap").write_bytes(b"0123456789abcdef")
    assert main(["verify", str(tmp_path / "save")]) == 1
    head, *problems = capsys.readouterr().out.splitlines()
    assert head == f"{tmp_path / 'save'}: directory: 2 problems"
    assert [problem.split(":")[0] for problem in problems] == ["  entry 'x'", "  entry 'y'"]
    assert main(["verify", "--json", str(tmp_path / "save")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], len(report["problems"])) == (False, 2)


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["convert", "-"], ["diff", "-"]], ids=lambda c: c[0])
def test_trouble_is_one_line(command: list[str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict(x=torch.ones(100)).save(tmp_path / "cut")
    os.truncate(tmp_path / "cut/x.memmap", 10)
    (tmp_path / "foreign").write_text("dear")
    (tmp_path / "empty").mkdir()
    rest = [str(tmp_path / "new")] if command[0] == "convert" else [str(tmp_path / "cut")] * (command[0] == "diff")
    for name in ("missing", "foreign", "empty", "cut"):
        code = main([command[0], str(tmp_path / name), *rest])
        captured = capsys.readouterr()
        if command[0] == "verify" and name == "cut":
            assert (code, captured.err) == (1, "")
            continue
        if command[0] == "inspect" and name == "cut":
            assert code == 1 and captured.err.startswith("entry 'x': ") and captured.err.count("\n") == 1
            assert ["└─", "x", "broken"] in [line.split() for line in captured.out.splitlines()]
            continue
        assert (code, captured.out) == (2, "")
        assert captured.err.startswith("tensordict: error: ") and captured.err.count("\n") == 1
        assert name in captured.err
    assert not (tmp_path / "new").exists()


def test_wrong_usage(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["inspect"], ["diff", "a"], ["convert", "a", "b", "--to", "zip"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        error = capsys.readouterr().err
        assert caught.value.code == 2
        assert error.startswith("tensordict: error: ") and error.count("\n") == 1
    TensorDict(x=torch.ones(1)).save(tmp_path / "save")
    assert main(["convert", str(tmp_path / "save"), str(tmp_path / "save.xyz")]) == 2
    assert "stands for no format; use --to, or one of none (directory), .tdz (archive)" in (
        said := capsys.readouterr().err
    )
    assert ".parquet (parquet), .csv (csv), .json (json), .jsonl (json lines)" in said


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "diff"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"\n  tensordict {command} " in capsys.readouterr().out.partition("examples:")[2]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tensordict {tensordict.__version__}\n"


def test_version_of_the_process() -> None:
    script = pathlib.Path(sys.executable).parent / "tensordict"
    for command in ([str(script)], [sys.executable, "-m", "tensordict"]):
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=120)
        assert (result.stdout, result.stderr) == (f"tensordict {tensordict.__version__}\n", "")


def test_help_imports_no_torch() -> None:
    program = """
import sys
from tensordict_cli import main
for arguments in (["--help"], ["--version"], ["inspect", "--help"], ["nonsense"], []):
    try:
        main(arguments)
    except SystemExit:
        pass
    else:
        raise AssertionError(arguments)
assert not {"torch", "numpy", "tensordict"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspct", "x"], "there is no command 'inspct'; did you mean 'inspect'?"),
        (["list"], "there are inspect, verify, convert, diff, report, compact, tidy, doctor, ifeval"),
        (["inspect", "x", "--jsn"], "inspect does not take '--jsn'; did you mean '--json'?"),
        (["convert", "x", "y", "--compresion=deflate"], "did you mean '--compression'?"),
        (["verify", "x", "y"], "verify does not take 'y'"),
        (["inspect", "x", "--depth", "-1"], "a number is 0 or more, got '-1'"),
    ],
)
def test_typos(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert told in error and error.count("\n") == 1


def test_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def interrupted(path: Any, complain: Any) -> Any:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("tensordict_cli.runners.inspect.describe_save", interrupted)
    assert main(["inspect", str(tmp_path)]) == 130


def test_broken_pipe(tmp_path: pathlib.Path) -> None:
    """More than a pipe holds is printed to a reader that takes one line."""
    TensorDict({f"entry{i}": torch.ones(1) for i in range(3000)}).save(tmp_path / "save")
    script = f"{sys.executable} -m tensordict inspect save | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stderr == ""
    assert result.stdout.splitlines() == [result.stdout.splitlines()[0], "141"]


def test_exit_codes_of_the_process(tmp_path: pathlib.Path) -> None:
    """`python -m tensordict`, and the script that is installed; both without a line of a traceback."""
    TensorDict(x=torch.ones(1)).save(tmp_path / "1")
    TensorDict(x=torch.zeros(1)).save(tmp_path / "2")
    script = pathlib.Path(sys.executable).parent / "tensordict"
    for command, code in (
        ([str(script), "diff", "1", "2"], 1),
        ([sys.executable, "-m", "tensordict", "verify", "3"], 2),
    ):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert (result.returncode, len((result.stdout + result.stderr).splitlines())) == (code, 3 - code)


def on_terminal(path: pathlib.Path) -> str:
    """Return the output of the command on a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tensordict", "inspect", str(path)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        try:
            while part := os.read(ours, 65536):
                output += part
        except OSError:
            pass  # Linux reports with this error that the other end of a terminal is closed.
    os.close(ours)
    assert process.returncode == 0
    return output.decode().replace("\r\n", "\n")


def test_styles_on_a_terminal_only(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "save"
    TensorDict({"[bold]x": torch.ones(1)}).save(path)
    assert main(["inspect", str(path)]) == 0
    plain = capsys.readouterr().out
    styled = on_terminal(path)
    assert "\x1b[" in styled and "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", styled).splitlines() == plain.splitlines()

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for variable, value, is_styled in (("TERM", "xterm", True), ("NO_COLOR", "1", False), ("TERM", "dumb", False)):
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setenv(variable, value)
            assert main(["inspect", str(path)]) == 0
        output = capsys.readouterr().out
        assert ("\x1b[" in output) is is_styled
        assert is_styled or output == plain
    # Without rich.
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out == plain
