"""Saving to folders and loading from them."""

from __future__ import annotations

import concurrent.futures
import gc
import json
import os
import pathlib
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tensordict
from tensordict import MemoryMappedTensor, TensorDict
from tensordict.core.exceptions import SaveError
from tensordict.memory import files

SAMPLES = pathlib.Path(__file__).parents[1] / "data" / "format"
EXPECTED = json.loads((SAMPLES / "expected.json").read_text())


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}, "e": torch.zeros(3, 0)}, [3])


def tree(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def leaves(td: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(td.items(include_nested=True, leaves_only=True))


def raw(value: torch.Tensor) -> torch.Tensor:
    if value.dtype.itemsize == 1:
        # Torch copies no elements that are less than a byte (int1, ...).
        value = value.view(torch.uint8)
    return value.contiguous().view(-1).view(torch.uint8)


def assert_same(left: TensorDict, right: TensorDict) -> None:
    assert leaves(left).keys() == leaves(right).keys()
    for key, value in leaves(left).items():
        other = leaves(right)[key]
        assert (value.shape, value.dtype) == (other.shape, other.dtype), key
        assert torch.equal(raw(value), raw(other)), key


# --- the format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", ["dense", "keys", "names"])
def test_reads_what_the_reference_wrote(sample: str) -> None:
    expected = EXPECTED[sample]
    td = TensorDict.load_memmap(SAMPLES / "samples" / sample)
    assert list(td.batch_size) == expected["batch_size"]
    found = {}
    for key, value in leaves(td).items():
        found[json.dumps(key)] = {"bits": raw(value).tolist(), "dtype": str(value.dtype), "shape": list(value.shape)}
    assert found == {json.dumps(_joined(json.loads(key))): leaf for key, leaf in expected["leaves"].items()}


def _joined(key: Any) -> Any:
    return key if isinstance(key, str) else key[0] if len(key) == 1 else key


@pytest.mark.parametrize("sample", ["dense", "keys", "names"])
def test_writes_what_the_reference_wrote(sample: str, tmp_path: pathlib.Path) -> None:
    source = SAMPLES / "samples" / sample
    td = TensorDict.load_memmap(source)
    td.memmap(tmp_path, copy_existing=True)
    for file in tree(source):
        ours, theirs = (tmp_path / file).read_bytes(), (source / file).read_bytes()
        if file.endswith(".json"):
            assert json.loads(ours) == json.loads(theirs)
        else:
            assert ours == theirs
    # Beyond the reference, a tensor without elements has an (empty) file.
    extra = set(tree(tmp_path)) - set(tree(source))
    assert all((tmp_path / file).stat().st_size == 0 for file in extra)


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_every_dtype_and_odd_name_comes_back(tmp_path: pathlib.Path) -> None:
    from tensordict.io.formats.meta import DTYPES

    source = torch.arange(32, dtype=torch.uint8).fmod(2)
    entries: dict[str, Any] = {name: source.view(dtype) for name, dtype in DTYPES.items()}
    # Not contiguous, without elements, and without dims.
    bits = {name: entries[name].view(torch.uint8).reshape(2, -1) for name in DTYPES}
    entries |= {f"{name}-odd": bits[name].view(dtype).t() for name, dtype in DTYPES.items()}
    entries |= {f"{name}-empty": entries[name][:0].view(0, 3) for name in DTYPES}
    entries |= {f"{name}-one": entries[name][1] for name in DTYPES}
    td = TensorDict(entries, [])
    for name in (
        "",
        ".",
        "..",
        "a/b",
        "../x",
        "meta.json",
        "shape",
        "device",
        "_type",
        "_names",
        "_entries",
        "_x",
        "%",
    ):
        td[name] = torch.ones(2)
    for name in ("node.memmap", "x y"):
        td[name] = {"leaf": torch.zeros(1)}
    td["node"] = torch.ones(1)
    td.memmap(tmp_path / "saved")
    assert_same(td, TensorDict.load_memmap(tmp_path / "saved"))
    assert os.listdir(tmp_path) == ["saved"]
    assert [f for f in tree(tmp_path) if "%tmp" in f] == []


def test_container_called_meta_json(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"meta.json": {"a": torch.ones(2)}}, [2])
    td.memmap(tmp_path)
    assert_same(td, TensorDict.load_memmap(tmp_path))


def test_names_and_batch_sizes_come_back(tmp_path: pathlib.Path) -> None:
    inner = TensorDict({"x": torch.zeros(3, 4)}, [3, 4], names=["t", None])
    td = TensorDict({"i": inner}, [3], names=["t"])
    saved = td.memmap(tmp_path)
    for result in (saved, TensorDict.load_memmap(tmp_path), td.memmap_like()):
        assert (result.names, result["i"].names) == (["t"], ["t", None])
        assert (result.batch_size, result["i"].batch_size) == ((3,), (3, 4))


def test_plain_names(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a b": torch.ones(2), "n m": {"%": torch.ones(2)}}, [2])
    td.memmap(tmp_path, robust_key=False)
    assert tree(tmp_path) == ["a b.memmap", "meta.json", "n m/%.memmap", "n m/meta.json"]
    for robust in (True, False, None):
        assert_same(td, TensorDict.load_memmap(tmp_path, robust_key=robust))
    with pytest.raises(SaveError, match="robust_key=True"):
        TensorDict({"../x": torch.ones(1)}, []).memmap(tmp_path / "in", robust_key=False)
    assert not (tmp_path / "in").exists()
    td.memmap(tmp_path / "robust")
    with pytest.raises(FileNotFoundError, match="a b"):
        TensorDict.load_memmap(tmp_path / "robust", robust_key=False)


# --- what saving gives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("prefix", [True, False], ids=["folder", "anonymous"])
@pytest.mark.parametrize("method", ["memmap", "memmap_", "save", "dumps", "memmap_like"])
def test_state_after_saving(method: str, prefix: bool, num_threads: int, tmp_path: pathlib.Path) -> None:
    td = make()
    path = tmp_path / "saved" if prefix else None
    saved = getattr(td, method)(path, num_threads=num_threads)
    assert (saved is td) == (method == "memmap_")
    assert saved.saved_path == path
    assert saved["b"].saved_path == (path / "b" if path else None)
    for node in (saved, saved["b"]):
        assert node.is_locked
        assert node.is_memmap()
        assert node.device == torch.device("cpu")
    for value in leaves(saved).values():
        assert type(value) is MemoryMappedTensor
    if method == "memmap_like":
        assert all(not value.any() for value in leaves(saved).values())
    else:
        assert_same(saved, make())
    saved.unlock_()
    for node in (saved, saved["b"]):
        assert not node.is_memmap()
        with pytest.raises(AttributeError, match="saved path"):
            _ = node.saved_path


def test_memmap_leaves_the_original_alone(tmp_path: pathlib.Path) -> None:
    td = make()
    td.memmap(tmp_path)["a"].zero_()
    assert not td.is_memmap()
    assert not td.is_locked
    assert type(td["a"]) is torch.Tensor
    assert td["a"].tolist() == [0, 1, 2]


def test_many_anonymous_leaves_need_few_descriptors() -> None:
    td = TensorDict({str(i): torch.full((3,), i) for i in range(300)}, [])
    before = len(os.listdir("/proc/self/fd"))
    saved = td.memmap()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert_same(saved, td)
    assert saved.memmap()["7"] is saved["7"]


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("method", ["memmap", "memmap_", "memmap_like"])
def test_return_early(method: str, num_threads: int, tmp_path: pathlib.Path) -> None:
    td = make()
    future = getattr(td, method)(tmp_path, num_threads=num_threads, return_early=True)
    assert isinstance(future, concurrent.futures.Future)
    saved = future.result(60)
    assert (saved is td) == (method == "memmap_")
    assert saved.is_memmap()
    if method != "memmap_like":
        assert_same(TensorDict.load_memmap(tmp_path), make())


def test_large_leaves_are_split_over_threads(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensordict.io.saving.leaf_writer._SPLIT", 10_000)
    td = TensorDict({"big": torch.arange(20_001), "small": torch.arange(3), "t": torch.rand(200, 100).t()}, [])
    assert_same(td.memmap(tmp_path, num_threads=3), td)
    assert_same(TensorDict.load_memmap(tmp_path), td)


def test_memmap_like_does_not_materialise(tmp_path: pathlib.Path) -> None:
    datum = TensorDict({"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "label": torch.tensor(0)}, [])
    data = datum.expand(10_000).memmap_like(tmp_path)
    assert data["image"].shape == (10_000, 3, 64, 64)
    assert (tmp_path / "image.memmap").stat().st_size == 10_000 * 3 * 64 * 64
    data[5] = datum.apply(lambda x: x + 1)
    assert TensorDict.load_memmap(tmp_path)["label"][4:7].tolist() == [0, 1, 0]


def test_memmap_like_of_meta_tensors(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a": torch.empty(3, device="meta")}, [3])
    assert td.memmap_like(tmp_path)["a"].tolist() == [0, 0, 0]
    with pytest.raises(SaveError, match="'a' is on the meta device"):
        td.memmap()


def test_views_of_a_memory_mapped_container(tmp_path: pathlib.Path) -> None:
    saved = make().memmap(tmp_path)
    row = saved[1]
    assert type(row["a"]) is MemoryMappedTensor
    assert row["a"].filename == str(tmp_path / "a.memmap")
    row["a"].fill_(7)
    assert TensorDict.load_memmap(tmp_path)["a"].tolist() == [0, 7, 2]


# --- saving again ---------------------------------------------------------------------------------------------------


def test_saving_memory_mapped_entries_again(tmp_path: pathlib.Path) -> None:
    first = make().memmap(tmp_path / "first")
    assert first.memmap()["a"] is first["a"]
    assert first.memmap(tmp_path / "first")["b", "c"] is first["b", "c"]
    assert first.memmap_like(tmp_path / "first")["a"].tolist() == [0, 1, 2]
    for method in ("memmap", "memmap_"):
        with pytest.raises(RuntimeError, match=r"'a'.*copy_existing=True"):
            getattr(first, method)(tmp_path / "second")
        assert not (tmp_path / "second").exists()
    second = first.memmap(tmp_path / "second", copy_existing=True)
    assert_same(second, make())
    second["a"].zero_()
    assert first["a"].tolist() == [0, 1, 2]
    assert second["a"].filename == str(tmp_path / "second" / "a.memmap")
    part = first[:2].memmap(tmp_path / "part", copy_existing=True)
    assert part["a"].tolist() == [0, 1]


def test_a_save_over_a_save_does_not_touch_what_is_mapped(tmp_path: pathlib.Path) -> None:
    old = TensorDict({"a": torch.zeros(10_000)}, []).memmap(tmp_path)
    new = TensorDict({"a": torch.ones(2)}, []).memmap(tmp_path)
    assert tree(tmp_path) == ["a.memmap", "meta.json"]
    assert old["a"].sum() == 0
    assert new["a"].filename == old["a"].filename
    # The old entries map a file that is gone from the folder: saving them is a write like any other.
    assert old.memmap(tmp_path)["a"].shape == (10_000,)
    assert TensorDict.load_memmap(tmp_path)["a"].shape == (10_000,)
    assert new["a"].tolist() == [1, 1]


def test_private_changes_are_copied_too(tmp_path: pathlib.Path) -> None:
    mapped = MemoryMappedTensor.from_tensor(torch.zeros(3), filename=tmp_path / "x")
    mapped._source.shared = False  # type: ignore[union-attr]
    mapped.fill_(2)
    saved = TensorDict({"a": mapped}, []).memmap(tmp_path / "copy", copy_existing=True)
    assert saved["a"].tolist() == [2, 2, 2]


def test_existsok(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path, existsok=False)
    before = {file: (tmp_path / file).stat().st_ino for file in tree(tmp_path)}
    for method in ("memmap", "memmap_", "memmap_like"):
        with pytest.raises(RuntimeError, match="existsok=True"):
            getattr(make(), method)(tmp_path, existsok=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.memmap").write_bytes(b"mine")
    with pytest.raises(RuntimeError, match=r"'a'.*existsok=True"):
        make().memmap(tmp_path / "other", existsok=False)
    assert {file: (tmp_path / file).stat().st_ino for file in before} == before
    assert (tmp_path / "other" / "a.memmap").read_bytes() == b"mine"


# --- loading --------------------------------------------------------------------------------------------------------


def test_loaded_container(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path)
    for load in (TensorDict.load_memmap, TensorDict.load, tensordict.load, tensordict.load_memmap):
        td = load(tmp_path)
        assert type(td) is TensorDict
        assert_same(td, make())
        assert not td.is_locked
        assert (td.saved_path, td["b"].saved_path) == (tmp_path, tmp_path / "b")
        assert td.device == torch.device("cpu")
        assert td["a"].filename == str(tmp_path / "a.memmap")
    td["a"][0] = 9
    assert tensordict.load(tmp_path)["a"][0] == 9


def test_functions(tmp_path: pathlib.Path) -> None:
    assert_same(tensordict.save(make(), tmp_path / "save"), make())
    assert_same(tensordict.memmap(make(), tmp_path / "memmap", num_threads=2), make())
    assert_same(tensordict.load(tmp_path / "save"), tensordict.load_memmap(tmp_path / "memmap"))


def test_meta_and_fake_tensors_open_no_data_file(tmp_path: pathlib.Path) -> None:
    td = make()
    td.save(tmp_path)
    for file in tmp_path.rglob("*.memmap"):
        file.unlink()
    meta = TensorDict.load_memmap(tmp_path, device="meta")
    assert meta.device == meta["b"].device == torch.device("meta")
    with FakeTensorMode():
        fake = TensorDict.load_memmap(tmp_path)
        assert type(fake["a"]).__name__ == "FakeTensor"
    for result in (meta, fake):
        assert {key: (x.shape, x.dtype) for key, x in leaves(result).items()} == {
            key: (x.shape, x.dtype) for key, x in leaves(td).items()
        }


def test_subpath(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"x": {"y/z": {"a": torch.ones(2)}, "w": {"a": torch.zeros(2)}}}, [2])
    td.memmap(tmp_path)
    assert_same(TensorDict.load_memmap(tmp_path, subpath="x/w"), td["x", "w"])
    assert_same(TensorDict.load_memmap(tmp_path, subpath=("x", ("y/z",))), td["x", "y/z"])
    assert TensorDict.load_memmap(tmp_path, subpath="x").saved_path == tmp_path / "x"
    for bad, text in (
        ("q", "'q'.*there are"),
        ("x/w/a", "is a tensor"),
        ("..", "no container"),
        ("x/../x", "no container"),
    ):
        with pytest.raises(ValueError, match=text):
            TensorDict.load_memmap(tmp_path, subpath=bad)


def test_out(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path)
    out = TensorDict({"a": torch.zeros(3), "b": {"old": torch.zeros(3)}, "gone": torch.zeros(3)}, [3])
    inner = out["b"]
    assert TensorDict.load_memmap(tmp_path, out=out) is out
    assert out["b"] is inner
    assert_same(out, make())
    other = TensorDict(batch_size=[3])
    assert other.load_memmap_(tmp_path) is other.load_(tmp_path) is other
    assert_same(other, make())


def test_out_that_does_not_fit_is_unchanged(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path)
    out = TensorDict({"b": TensorDict({"z": torch.zeros(3, 4)}, [3, 4])}, [3])
    with pytest.raises(SaveError, match=r"\('b', 'c'\).*\[3, 2\].*\[3, 4\]"):
        TensorDict.load_memmap(tmp_path, out=out)
    assert set(out.keys(True, True)) == {("b", "z")}
    with pytest.raises(RuntimeError, match="locked"):
        TensorDict.load_memmap(tmp_path, out=TensorDict(batch_size=[3]).lock_())
    with pytest.raises(ValueError, match="device='meta'"):
        TensorDict.load_memmap(tmp_path, device="meta", out=TensorDict(batch_size=[3], device="cpu"))


def test_mode_and_compression(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path)
    assert_same(TensorDict.load_memmap(tmp_path, mode="r+"), make())
    with pytest.raises(ValueError, match="'w'"):
        TensorDict.load_memmap(tmp_path, mode="w")
    with pytest.raises(ValueError, match="only archives are compressed"):
        make().memmap(tmp_path / "x", compression="deflate")


# --- adding to a saved folder ---------------------------------------------------------------------------------------


def test_make_memmap_and_refresh(tmp_path: pathlib.Path) -> None:
    writer = make().memmap_(tmp_path)
    reader = TensorDict.load_memmap(tmp_path)
    kept = reader["a"]
    new = writer.make_memmap(("b", "new"), (3, 2), dtype=torch.int32)
    new.fill_(4)
    writer.make_memmap(("n", "m", "deep"), torch.Size([3]))
    writer.make_memmap_from_tensor("t", torch.arange(3))
    writer.make_memmap_from_tensor("zero", torch.arange(3), copy_data=False)
    writer.make_memmap_from_storage("s", torch.ones(3).untyped_storage(), (3,))
    writer.make_memmap("shape", (3,))
    assert writer["n", "m"].is_memmap()
    assert writer["n", "m"].is_locked
    assert writer["n", "m"].saved_path == tmp_path / "n" / "m"
    assert_same(TensorDict.load_memmap(tmp_path), writer)
    assert set(reader.keys()) == {"a", "b", "e"}
    assert reader.memmap_refresh_() is reader
    assert reader["a"] is kept
    assert_same(reader, writer)
    assert (reader["zero"].tolist(), reader["s"].tolist(), reader["b", "new"].sum()) == ([0] * 3, [1] * 3, 24)
    with pytest.raises(RuntimeError, match="locked"):
        writer["n"].unlock_()
    again = TensorDict({"a": torch.full((3,), 5.0)}, [3])
    again.memmap(tmp_path)
    writer.memmap_refresh_()
    assert_same(writer, again)
    assert writer.is_memmap()


def test_make_memmap_refuses(tmp_path: pathlib.Path) -> None:
    saved = make().memmap_(tmp_path / "saved")
    with pytest.raises(RuntimeError, match="'a' already exists"):
        saved.make_memmap("a", (3,))
    with pytest.raises(RuntimeError, match=r"'x'.*\[4\].*\[3\]"):
        saved.make_memmap("x", (4,))
    with pytest.raises(RuntimeError, match="'a' is a tensor"):
        saved.make_memmap(("a", "x"), (3,))
    with pytest.raises(RuntimeError, match="memory-mapped container"):
        make().make_memmap("x", (3,))
    storage = torch.UntypedStorage.from_file(str(tmp_path / "saved" / "a.memmap"), True, 12)
    with pytest.raises(RuntimeError, match=r"'x'.*a\.memmap"):
        saved.make_memmap_from_storage("x", storage, (3,))
    for shape in (torch.tensor([2, 3]), torch.ones(3, 2), torch.full((3, 1), -1), torch.ones(3, 0).long()):
        with pytest.raises(TypeError, match=r"'x'.*int64 tensor of shape \(rows, dims\)"):
            saved.make_memmap("x", shape)
    with pytest.raises(RuntimeError, match=r"'x'.*\[2, 1, 1\].*\[3\]"):
        saved.make_memmap("x", torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="refresh"):
        make().memmap_refresh_()
    with pytest.raises(RuntimeError, match="refresh"):
        make().memmap_().memmap_refresh_()
    assert_same(TensorDict.load_memmap(tmp_path / "saved"), make())


def test_ragged_entries_that_are_refused(tmp_path: pathlib.Path) -> None:
    saved = make().memmap_(tmp_path)
    table = torch.tensor([[1], [2], [3]])
    saved.make_memmap("x", table).unbind()[2].fill_(4)
    saved.make_memmap("y.shape", (3,), dtype=torch.int64)
    (tmp_path / "z.shape.memmap").write_bytes(files.to_bytes(table + 1))
    (tmp_path / "other.memmap").write_bytes(bytes(4))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for key, shape, what in (
        ("x.shape", (3,), r"'x' and 'x.shape' would both use the file x\.shape\.memmap"),
        ("y", table, r"'y.shape' and 'y' would both use the file y\.shape\.memmap"),
        ("z", table, r"'z'.*z\.shape\.memmap' exists and has the shapes of other rows"),
        ("other", table, r"'other'.*4 bytes.*needs 24"),
    ):
        with pytest.raises(SaveError, match=what):
            saved.make_memmap(key, shape, dtype=torch.int64 if key == "x.shape" else None)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [row.tolist() for row in saved["x"].unbind()] == [[0], [0, 0], [4, 4, 4]]
    # The next call reuses the files of a killed one.
    (tmp_path / "z.shape.memmap").write_bytes(files.to_bytes(table))
    assert len(saved.make_memmap("z", table).unbind()) == 3


def test_storage_of_a_file_that_another_save_has_removed(tmp_path: pathlib.Path) -> None:
    """TorchRL's checkpointers save a new shape over the folder of the old save in this way."""
    old = TensorDict().memmap_(tmp_path)
    storage = old.make_memmap("x", (6,)).fill_(3).untyped_storage()
    new = TensorDict(batch_size=[2]).memmap_(tmp_path)
    assert not (tmp_path / "x.memmap").exists()
    table = torch.tensor([[1, 2], [2, 2]])
    new.make_memmap_from_storage("x", storage, table, dtype=torch.float32)
    rows = TensorDict.load_memmap(tmp_path)["x"].unbind()
    assert [row.tolist() for row in rows] == [[[3.0, 3.0]], [[3.0, 3.0], [3.0, 3.0]]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_ragged_entry_in_several_batch_dims(tmp_path: pathlib.Path) -> None:
    rows = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(3, 5)])
    TensorDict({"a": rows}, [2, 3]).memmap(tmp_path / "saved")
    assert TensorDict.load_memmap(tmp_path / "saved")["a"].unbind()[1].shape == (3, 5)
    path = tmp_path / "saved" / "meta.json"
    path.write_text(path.read_text().replace('"shape":[2,3]', '"shape":[2,4]'))
    with pytest.raises(SaveError, match=r"\[2, 3, -1\] of 'a' does not begin with \[2, 4\]"):
        TensorDict.load_memmap(tmp_path / "saved")


def test_make_memmap_in_anonymous_memory() -> None:
    saved = make().memmap_()
    assert saved.make_memmap(("n", "x"), (3,)).tolist() == [0, 0, 0]
    assert type(saved.make_memmap_from_tensor("y", torch.ones(3))) is MemoryMappedTensor
    rows = saved.make_memmap("rows", torch.tensor([[1], [2], [3]]))
    rows.unbind()[1].fill_(2)
    assert saved["rows"] is rows and [row.tolist() for row in rows.unbind()] == [[0], [2, 2], [0, 0, 0]]
    assert saved["n"].is_locked


# --- figures -------------------------------------------------------------------------------------------------------


def test_saving_takes_no_extra_memory(tmp_path: pathlib.Path) -> None:
    program = f"""
import torch
from tensordict import TensorDict
def peak():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmHWM"))
big = TensorDict(x=torch.ones(64 << 20))
TensorDict(x=torch.ones(1)).memmap({str(tmp_path / "warm")!r}, num_threads=2)
before = peak()
big.memmap({str(tmp_path / "big")!r}, num_threads=2)
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 16 << 10, f"saving 256 MiB took {int(result.stdout) >> 10} MiB more"


@pytest.mark.parametrize(("asked", "nbytes", "used"), [(0, 1 << 20, 0), (0, 64 << 20, 3), (1, 64 << 20, 1), (2, 1, 2)])
def test_threads_of_large_saves(monkeypatch: pytest.MonkeyPatch, asked: int, nbytes: int, used: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert files.choose_threads(asked, nbytes) == used


@pytest.mark.parametrize("save", ["memmap", "save"])
def test_what_is_loaded_is_given_back_at_once(save: str, tmp_path: pathlib.Path) -> None:
    """Nothing that loading made refers to itself: the files are closed with the container, and not some time later."""
    getattr(TensorDict(a=torch.ones(3), b=TensorDict(c=torch.ones(2))), save)(tmp_path / "saved")
    gc.collect()
    gc.disable()
    try:
        leaf = weakref.ref(TensorDict.load(tmp_path / "saved")["b", "c"])
        assert leaf() is None
    finally:
        gc.enable()
