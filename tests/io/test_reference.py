"""The reference reads what this package writes, and the other way round, each in its own environment."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from reference import Reference
from tensordict import TensorDict

ROOT = pathlib.Path(__file__).parents[2]
# The behaviour (0.14.3) and the speed (0.15.3) reference.
ENVIRONMENTS = [".venv-behaviour", ".venv-reference"]

READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
td = TensorDict.load_memmap(sys.argv[1])
found = {
    json.dumps(key): [str(x.dtype), list(x.shape), x.contiguous().view(-1).view(torch.uint8).tolist()]
    for key, x in td.items(True, True)
}
print(json.dumps([list(td.batch_size), found]))
"""

WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
odd = ["", ".", "..", "a/b", "sp ace", "%41", "cl\\u00e9", "q?*", "meta.json", "_x"]
td = TensorDict({name: torch.full((2, 3), i) for i, name in enumerate(odd)}, [2])
td["n"] = {"half": torch.ones(2, dtype=torch.bfloat16), "empty": torch.zeros(2, 0), "m o": {"x": torch.ones(2)}}
td.memmap(sys.argv[1])
TensorDict({"a": torch.ones(1000)}, []).memmap(sys.argv[1] + "-shorter")
TensorDict({"a": torch.zeros(10)}, []).memmap(sys.argv[1] + "-shorter")
TensorDict({"sp ace": {"a b": torch.ones(2)}}, []).memmap(sys.argv[1] + "-plain", robust_key=False)
"""


@pytest.mark.reference
def test_reference_reads_ours(reference: Reference, tmp_path: pathlib.Path) -> None:
    dtypes = ["bool", "uint8", "uint16", "int32", "int64", "float16", "bfloat16", "float64", "complex64", "complex128"]
    entries: dict[str, Any] = {name: torch.ones(2, 3).to(getattr(torch, name)) for name in dtypes}
    entries |= {name: torch.ones(2) for name in ("", ".", "..", "a/b", "sp ace", "%41", "clé", 'q?*":|', "meta.json")}
    entries["empty"] = torch.zeros(2, 0)
    entries["inner"] = {"x y": {"deep": torch.arange(2)}, "none": {}}
    td = TensorDict(entries, [2], names=["time"])
    # Entries that the reference cannot read, beside entries that it must read.
    td["eight"] = torch.ones(2).to(torch.float8_e5m2)
    td["shape"] = torch.ones(2)
    td.memmap(tmp_path, num_threads=2)
    again = TensorDict.load_memmap(tmp_path)
    assert (again.names, again["eight"].dtype, again["shape"].tolist()) == (["time"], torch.float8_e5m2, [1, 1])

    batch_size, found = json.loads(reference.run(READ, tmp_path))
    assert batch_size == [2]
    expected = {}
    for key, value in td.items(include_nested=True, leaves_only=True):
        raw = value.contiguous().view(-1).view(torch.uint8).tolist()
        dtype = "torch.uint8" if key == "eight" else str(value.dtype)
        expected[json.dumps(key)] = [dtype, list(value.shape), raw]
    del expected['"shape"']
    assert found == expected


@pytest.mark.reference
def test_reference_reads_preallocated_and_added_entries(reference: Reference, tmp_path: pathlib.Path) -> None:
    data = TensorDict({"a": torch.zeros(2)}, []).expand(5).memmap_like(tmp_path)
    data["a"][3] = 7
    data.make_memmap_from_tensor(("new", "b"), torch.arange(5, dtype=torch.int8))
    batch_size, found = json.loads(reference.run(READ, tmp_path))
    assert batch_size == [5]
    assert found['["new", "b"]'] == ["torch.int8", [5], [0, 1, 2, 3, 4]]
    assert sum(found['"a"'][2]) == 2 * sum(torch.tensor(7.0).view(1).view(torch.uint8).tolist())


RAGGED = """
import sys
import torch
from tensordict import MemoryMappedTensor, TensorDict
table = torch.tensor([[2, 3], [1, 3]])
td = TensorDict({}, [2]).memmap_(sys.argv[1])
made = td.make_memmap("zeros", table, dtype=torch.int64)
made[1].fill_(5)
elements = MemoryMappedTensor.from_tensor(torch.arange(9.0), filename=sys.argv[1] + "/stored.memmap")
td.make_memmap_from_storage("stored", elements.untyped_storage(), table, dtype=torch.float32)
td.make_memmap_from_tensor(("deep", "given"), torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)]))
# Of the calls that it refuses, the reference leaves entries in the folder.
td = TensorDict({"zeros": torch.zeros(2)}, [2]).memmap_(sys.argv[1] + "-refused")
for call in (
    lambda: td.make_memmap("short", torch.tensor([[1, 1]])),
    lambda: td.make_memmap("zeros", table),
    lambda: td.make_memmap_from_storage("long", torch.arange(3.0).untyped_storage(), table),
):
    try:
        call()
    except RuntimeError:
        print("refused")
"""
READ_RAGGED = """
import json, sys
import torch
from tensordict import TensorDict
td = TensorDict.load_memmap(sys.argv[1])
keys = ["zeros", "stored", ("deep", "given")]
print(json.dumps([[str(td[key].dtype), [row.tolist() for row in torch.Tensor.unbind(td[key], 0)]] for key in keys]))
print(json.dumps([list(td["stored"]._nested_tensor_size().shape), type(td["zeros"]).__name__]))
"""


@pytest.mark.reference
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_entries_are_made_as_the_reference_makes_them(
    behaviour: Reference, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ours(program: str, path: pathlib.Path) -> str:
        monkeypatch.setattr("sys.argv", ["-c", str(path)])
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    assert ours(RAGGED, tmp_path / "ours") == behaviour.run(RAGGED, tmp_path / "theirs") == "refused\n" * 3
    found = [ours(READ_RAGGED, tmp_path / name) for name in ("ours", "theirs")]
    found += [behaviour.run(READ_RAGGED, tmp_path / name) for name in ("ours", "theirs")]
    assert found == [found[0]] * 4 and "[5, 5, 5]" in found[0]
    names = ["zeros", "stored", "deep/given"]
    for name in [f"{name}{suffix}" for name in names for suffix in (".memmap", ".shape.memmap")]:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.reference
def test_ours_reads_the_reference(reference: Reference, tmp_path: pathlib.Path) -> None:
    reference.run(WRITE, tmp_path / "x")
    td = TensorDict.load_memmap(tmp_path / "x")
    odd = ["", ".", "..", "a/b", "sp ace", "%41", "cl\u00e9", "q?*", "meta.json", "_x"]
    assert set(td.keys()) == {*odd, "n"}
    assert [td[name].unique().tolist() for name in odd] == [[i] for i in range(len(odd))]
    assert (td["n", "half"].dtype, td["n", "empty"].shape, td["n", "m o", "x"].tolist()) == (
        torch.bfloat16,
        (2, 0),
        [1, 1],
    )
    assert TensorDict.load_memmap(tmp_path / "x-shorter")["a"].tolist() == [0] * 10
    assert TensorDict.load_memmap(tmp_path / "x-plain")["sp ace", "a b"].tolist() == [1, 1]
    # Saving over a save of the reference leaves a save that it reads.
    TensorDict({"_x": torch.ones(3), "n": {"half": torch.ones(3)}}, [3]).memmap(tmp_path / "x")
    assert set(json.loads(reference.run(READ, tmp_path / "x"))[1]) == {'"_x"', '["n", "half"]'}
