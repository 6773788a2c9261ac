"""Archives: one zip file with the files of a saved folder, mapped when it is loaded."""

from __future__ import annotations

import bz2
import importlib.util
import json
import lzma
import os
import pathlib
import pickle
import re
import shutil
import stat
import struct
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import tensordict
from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    is_memmap_archive,
    load_memmap,
    pack_memmap,
    refresh_archive_checksums,
    tensorclass,
    unpack_memmap,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats import archive_reader, archive_writer, zipping
from tensordict.io.formats.archive import find_archive_problems
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.saving import checksums
from tensordict.io.saving.transaction import FileTransaction
from tensordict.memmap import MemoryMappedTensor
from tensordict.memory import files

# Torch says of its nested tensors, once, that they are a prototype.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

ROOT = pathlib.Path(__file__).parents[2]
SAMPLES = ROOT / "tests" / "data" / "format" / "samples"
METHODS = {"stored": 0, "deflate": 8, "bzip2": 12, "lzma": 14}
DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2"),
)


@tensorclass
class Item:
    x: torch.Tensor
    label: str
    extra: Any = None


def make() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), "b": {"c": torch.ones(3, 2)}}, [3], names=["time"])


def rich() -> TensorDict:
    """Everything that a folder can hold."""
    entries: dict[str, Any] = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in DTYPES}
    entries |= {name: torch.ones(2) for name in ("", ".", "..", "a/b", "sp ace", "%41", "clé", 'q?*":|', "meta.json")}
    entries |= {"empty": torch.zeros(2, 0), "turned": torch.arange(6).reshape(3, 2).t(), "none": {}}
    entries["deep"] = {"x y": {"z": torch.arange(2)}}
    entries["ragged"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    entries["jagged"] = torch.nested.nested_tensor([torch.ones(2, 2), torch.zeros(3, 2)], layout=torch.jagged)
    entries["value"] = NonTensorData({"a": [1, 2.5]}, [2])
    entries["stack"] = LazyStackedTensorDict(TensorDict(u=torch.ones(3)), TensorDict(u=torch.zeros(3)))
    entries["item"] = Item(x=torch.ones(2), label="seven", batch_size=[2])
    return TensorDict(entries, [2], names=["time"])


def assert_same(found: Any, expected: Any) -> None:
    assert found.batch_size == expected.batch_size
    assert found.names == expected.names
    keys = list(expected.keys(True, True))
    assert list(found.keys(True, True)) == keys
    for key in keys:
        old, new = expected.get(key), found.get(key)
        if not isinstance(old, torch.Tensor):
            assert new == old, key
            continue
        assert new.dtype == old.dtype, key
        pairs = list(zip(new.unbind(), old.unbind(), strict=True)) if old.is_nested else [(new, old)]
        for one, other in pairs:
            assert one.shape == other.shape, key
            assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)), key


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_everything_comes_back(method: str, threads: int, tmp_path: pathlib.Path) -> None:
    td = rich()
    saved = td.memmap(tmp_path / "x.tdz", compression=method, num_threads=threads)
    loaded = TensorDict.load_memmap(tmp_path / "x.tdz", num_threads=threads)
    for found in (saved, loaded):
        assert_same(found, td)
        assert type(found["item"]) is Item
        assert (found["item"].label, found["item"].extra) == ("seven", None)
        assert found["value"] == {"a": [1, 2.5]}
        assert not found.is_locked
        assert not found.is_memmap()
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert file.testzip() is None
        kinds = {item.filename.endswith(".memmap"): item.compress_type for item in file.infolist()}
    assert kinds == {True: METHODS[method], False: 0}


@pytest.mark.parametrize("method", METHODS)
def test_entries_are_the_files_of_the_folder(method: str, tmp_path: pathlib.Path) -> None:
    td = rich()
    td.memmap(tmp_path / "folder")
    td.memmap(tmp_path / "x.tdz", compression=method)
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert {name: file.read(name) for name in file.namelist()} == tree(tmp_path / "folder")
        file.extractall(tmp_path / "out")
    assert_same(TensorDict.load_memmap(tmp_path / "out"), td)


@pytest.mark.skipif(shutil.which("unzip") is None, reason="needs unzip")
def test_unzip_opens_it(tmp_path: pathlib.Path) -> None:
    rich().memmap(tmp_path / "x.tdz")
    subprocess.run(["unzip", "-tq", tmp_path / "x.tdz"], check=True, capture_output=True)


def test_stored_tensors_are_aligned_views_of_one_map(tmp_path: pathlib.Path) -> None:
    td = TensorDict({f"k{i}" * (1 + i % 40): torch.full((i % 7,), i, dtype=torch.uint8) for i in range(200)}, [])
    loaded = td.memmap(tmp_path / "x.tdz")
    assert_same(loaded, td)
    addresses = [value.data_ptr() for value in loaded.values() if value.numel()]
    assert all(address % 64 == 0 for address in addresses)
    assert max(addresses) - min(addresses) < os.path.getsize(tmp_path / "x.tdz")
    assert all(type(value) is torch.Tensor for value in loaded.values())


def test_large_leaves_are_written_in_pieces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_writer, "_PIECE", 1 << 16)
    monkeypatch.setattr(archive_writer, "_LARGE", 1 << 10)
    td = TensorDict(a=torch.randn(70_001), b=torch.randn(300, 300).t(), c=torch.randn(5), d=torch.randn(16384))
    for method, threads in (("stored", 0), ("stored", 3), ("deflate", 3)):
        assert_same(td.memmap(tmp_path / "x.tdz", num_threads=threads, compression=method), td)
        with zipfile.ZipFile(tmp_path / "x.tdz") as file:
            assert file.testzip() is None


def test_deflate_in_threads_gives_the_same_file(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.arange(1 << 20), b=torch.zeros(1 << 19), c=torch.zeros(0), d=torch.randn(1 << 18))
    for threads in (0, 2):
        td.memmap(tmp_path / f"{threads}.tdz", compression="deflate", num_threads=threads)
    contents = []
    for threads in (0, 2):
        with zipfile.ZipFile(tmp_path / f"{threads}.tdz") as file:
            contents.append([(item.filename, item.compress_size, item.CRC) for item in file.infolist()])
    assert contents[0] == contents[1]
    assert os.path.getsize(tmp_path / "0.tdz") < td.bytes() // 2


def test_more_entries_than_plain_zip_counts(tmp_path: pathlib.Path) -> None:
    count = 65_536
    empty = torch.zeros(0)
    archive = tmp_path / "x.tdz"
    parts = [archive_writer.make_part(f"{i}.memmap", (), 0, empty) for i in range(count)]
    with open(archive, "w+b") as file:
        archive_writer.write_plain_archive(file.fileno(), parts, 0)
    with zipfile.ZipFile(archive) as opened:
        assert len(opened.namelist()) == count
    assert len(Archive(str(archive)).entries) == count


def test_contents_of_more_than_4_gib(tmp_path: pathlib.Path) -> None:
    length = (1 << 32) + 5
    if shutil.disk_usage(tmp_path).free < 2 * length:
        pytest.skip("this disk has no room for an archive of 4.3 GB")
    # "end" lies behind "big", at a position that plain zip cannot count.
    item = TensorDict(big=torch.zeros((), dtype=torch.uint8).expand(length), end=torch.zeros(10_000, dtype=torch.int16))
    data = item.memmap_like(tmp_path / "x.tdz")
    data["big"][-1], data["end"][-1] = 3, -7
    loaded = TensorDict.load_memmap(tmp_path / "x.tdz")
    assert (loaded["big"][-1], loaded["end"][0], loaded["end"][-1]) == (3, 0, -7)
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        sizes = {info.filename: info.file_size for info in file.infolist()}
        assert (sizes["big.memmap"], sizes["end.memmap"]) == (length, 20_000)
        assert file.getinfo("end.memmap").header_offset > length
        # The checksum is that of the zeros that `memmap_like` wrote, and is checked where reading reaches the end.
        with file.open("end.memmap") as content:
            assert content.read(4) == bytes(4)
    # pytest would keep the file for three runs.
    (tmp_path / "x.tdz").unlink()


# --- which path makes an archive --------------------------------------------------------------------------------------


def test_suffix_and_argument(tmp_path: pathlib.Path) -> None:
    td = make()
    td.memmap(tmp_path / "plain", archive=True)
    assert is_memmap_archive(tmp_path / "plain")
    td.save(tmp_path / "a.tdz", archive=False)
    assert (tmp_path / "a.tdz" / "meta.json").exists()
    td.dumps(tmp_path / "new" / "folder" / "b.tdz")
    assert (tmp_path / "new" / "folder" / "b.tdz").is_file()
    td.memmap(tmp_path / "c.TDZ")
    assert (tmp_path / "c.TDZ").is_dir()
    assert td.clone().memmap_(tmp_path / "d.tdz").saved_path == tmp_path / "d.tdz"
    assert (tmp_path / "d.tdz").is_dir()
    with pytest.raises(SaveError, match="a folder"):
        td.memmap(tmp_path / "a.tdz")
    with pytest.raises(ValueError, match="needs a path"):
        td.memmap(archive=True)
    with pytest.raises(ValueError, match="only archives"):
        td.memmap(tmp_path / "e", compression="deflate")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("compression", [8, "DEFLATE", "deflated"])
def test_names_of_compressions(compression: Any, tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz", compression=compression)
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert file.getinfo("a.memmap").compress_type == zipfile.ZIP_DEFLATED


@pytest.mark.parametrize("compression", ["zip", 93, True, 1.5, "zstd"])
def test_unknown_compressions(compression: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="unknown compression"):
        make().memmap(tmp_path / "x.tdz", compression=compression)
    assert not os.listdir(tmp_path)


def test_checksums_are_always_there(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz", checksum=True)
    with pytest.raises(UnsupportedEntryError, match="always has CRC-32"):
        make().memmap(tmp_path / "y.tdz", checksum="sha256")
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_existsok(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tdz"
    first = make().memmap(path, existsok=False)
    before = path.read_bytes()
    with pytest.raises(SaveError, match="already exists"):
        make().memmap(path, existsok=False)
    assert path.read_bytes() == before
    TensorDict(a=torch.zeros(5)).memmap(path)
    assert TensorDict.load_memmap(path)["a"].tolist() == [0] * 5
    # Whoever has mapped the old one keeps it.
    assert first["a"].tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_a_link_is_followed_and_the_mode_is_kept(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there").mkdir()
    real = tmp_path / "there" / "real.tdz"
    make().memmap(real)
    os.chmod(real, 0o640)
    (tmp_path / "link.tdz").symlink_to(real)
    TensorDict(a=torch.zeros(5)).memmap(tmp_path / "link.tdz")
    assert (tmp_path / "link.tdz").is_symlink()
    assert TensorDict.load_memmap(real)["a"].tolist() == [0] * 5
    assert stat.S_IMODE(os.stat(real).st_mode) == 0o640


def test_return_early_and_progress(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    future = make().memmap(tmp_path / "x.tdz", return_early=True)
    assert isinstance(future, Future)
    assert future.result()["a"].tolist() == [0, 1, 2]
    for method in ("stored", "deflate"):
        make().memmap(tmp_path / "x.tdz", progress=True, compression=method, durable=True)
        assert "saving: 100%" in capsys.readouterr().err


def test_entries_mapped_from_elsewhere_are_copied(tmp_path: pathlib.Path) -> None:
    folder = make().memmap(tmp_path / "folder")
    assert_same(folder.memmap(tmp_path / "x.tdz"), make())
    # And an archive over itself.
    TensorDict.load_memmap(tmp_path / "x.tdz").memmap(tmp_path / "x.tdz")
    again = TensorDict.load_memmap(tmp_path / "x.tdz", mode="r+").memmap(tmp_path / "x.tdz")
    assert_same(again, make())
    back = again.memmap(tmp_path / "back")
    assert isinstance(back["a"], MemoryMappedTensor)
    assert_same(back, make())


def test_pickled_values(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=NonTensorData({1, 2}))
    with pytest.raises(UnsupportedEntryError, match="allow_pickle"):
        td.memmap(tmp_path / "x.tdz")
    assert not os.listdir(tmp_path)
    assert td.memmap(tmp_path / "x.tdz", allow_pickle=True)["a"] == {1, 2}
    with pytest.raises(SaveError, match="'a'.*pickle"):
        TensorDict.load_memmap(tmp_path / "x.tdz")
    assert TensorDict.load_memmap(tmp_path / "x.tdz", allow_pickle=True)["a"] == {1, 2}


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["stored", "deflate"])
def test_mode_r_keeps_writes_in_memory(method: str, tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz", compression=method)
    before = (tmp_path / "x.tdz").read_bytes()
    loaded = TensorDict.load_memmap(tmp_path / "x.tdz")
    loaded["a"].fill_(7)
    loaded["b", "c"] += 1
    assert loaded["a"].tolist() == [7, 7, 7]
    assert (tmp_path / "x.tdz").read_bytes() == before
    os.chmod(tmp_path / "x.tdz", 0o400)
    assert_same(TensorDict.load_memmap(tmp_path / "x.tdz"), make())


def test_mode_rplus_writes_through(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz")
    loaded = TensorDict.load_memmap(tmp_path / "x.tdz", mode="r+")
    loaded["a"].fill_(7)
    assert TensorDict.load_memmap(tmp_path / "x.tdz")["a"].tolist() == [7, 7, 7]
    with pytest.raises(SaveError, match=r"'a\.memmap'.*checksum"):
        unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert refresh_archive_checksums(tmp_path / "x.tdz", num_threads=2) == tmp_path / "x.tdz"
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert file.testzip() is None
    unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    assert TensorDict.load_memmap(tmp_path / "out")["a"].tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="'r', 'r\\+' or None"):
        TensorDict.load_memmap(tmp_path / "x.tdz", mode="w")


def test_mode_rplus_refuses_what_it_cannot_write(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz", compression="deflate")
    with pytest.raises(SaveError, match=r"'a'.*deflate.*mode='r'"):
        TensorDict.load_memmap(tmp_path / "x.tdz", mode="r+")
    make().memmap(tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "plain.zip", "w") as file:
        file.write(tmp_path / "folder" / "meta.json", "meta.json")
        file.write(tmp_path / "folder" / "b" / "meta.json", "b/meta.json")
        file.writestr("b/c.memmap", (tmp_path / "folder" / "b" / "c.memmap").read_bytes())
        offset = file.fp.tell() + 30 + len("a.memmap")  # type: ignore[union-attr]
        info = zipfile.ZipInfo("a.memmap")
        info.extra = struct.pack("<2H", 0x7777, 1 + (-offset - 1) % 4) + bytes(1 + (-offset - 1) % 4)
        file.writestr(info, (tmp_path / "folder" / "a.memmap").read_bytes())
    # Archives of other tools load; unaligned tensors are copied.
    assert_same(TensorDict.load_memmap(tmp_path / "plain.zip"), make())
    with pytest.raises(SaveError, match="not aligned"):
        TensorDict.load_memmap(tmp_path / "plain.zip", mode="r+")


def test_repacked_by_a_zip_tool(tmp_path: pathlib.Path) -> None:
    td = rich()
    td.memmap(tmp_path / "folder")
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "x.zip", "w", method) as file:
            for path in sorted((tmp_path / "folder").rglob("*")):
                file.write(path, path.relative_to(tmp_path / "folder"))
            file.comment = b"by hand"
        assert is_memmap_archive(tmp_path / "x.zip")
        assert_same(TensorDict.load_memmap(tmp_path / "x.zip"), td)


def test_written_by_a_stream(tmp_path: pathlib.Path) -> None:
    """With sizes that follow the data, as tools write them to a pipe."""
    make().memmap(tmp_path / "folder")
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as pool, open(read, "rb") as source:
        content = pool.submit(source.read)
        with open(write, "wb") as sink, zipfile.ZipFile(sink, "w") as file:
            for name, data in tree(tmp_path / "folder").items():
                file.writestr(name, data)
        (tmp_path / "x.tdz").write_bytes(content.result())
    assert_same(TensorDict.load_memmap(tmp_path / "x.tdz"), make())


@pytest.mark.parametrize("method", ["stored", "deflate"])
def test_parts(method: str, tmp_path: pathlib.Path) -> None:
    td = rich()
    td.memmap(tmp_path / "x.tdz", compression=method)
    for subpath in (("deep", "x y"), "deep/x y"):
        assert TensorDict.load_memmap(tmp_path / "x.tdz", subpath=subpath)["z"].tolist() == [0, 1]
    assert TensorDict.load_memmap(tmp_path / "x.tdz", subpath=("stack", "1"))["u"].tolist() == [0, 0, 0]
    some = TensorDict.load_memmap(tmp_path / "x.tdz", keys=["int8", ("deep", "x y")])
    assert sorted(some.keys()) == ["deep", "int8"]
    with pytest.raises(SaveError, match="'nope'"):
        TensorDict.load_memmap(tmp_path / "x.tdz", subpath="nope")
    with pytest.raises(SaveError, match="'int8'.*tensor"):
        TensorDict.load_memmap(tmp_path / "x.tdz", subpath="int8")
    out = TensorDict({"int8": torch.zeros(2)}, [2])
    assert TensorDict.load_memmap(tmp_path / "x.tdz", out=out, subpath=("deep", "x y")) is out
    assert list(out.keys()) == ["z"]
    assert TensorDict(batch_size=[2]).load_memmap_(tmp_path / "x.tdz")["int8"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_devices(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz")
    assert load_memmap(tmp_path / "x.tdz", device="meta")["a"].is_meta
    assert load_memmap(tmp_path / "x.tdz", device="cpu").device == torch.device("cpu")
    with torch._subclasses.FakeTensorMode():
        assert TensorDict.load_memmap(tmp_path / "x.tdz")["b", "c"].shape == (3, 2)


def test_it_is_not_a_memory_mapped_container(tmp_path: pathlib.Path) -> None:
    loaded = make().memmap(tmp_path / "x.tdz")
    with pytest.raises(AttributeError, match="no saved path"):
        _ = loaded.saved_path
    for call in (loaded.memmap_refresh_, lambda: loaded.make_memmap("new", (3,))):
        with pytest.raises(RuntimeError):
            call()


def test_pickling_a_leaf_takes_its_own_bytes(tmp_path: pathlib.Path) -> None:
    loaded = TensorDict({f"k{i}": torch.full((256,), i) for i in range(100)}, []).memmap(tmp_path / "x.tdz")
    loaded["k3"].fill_(7)
    content = pickle.dumps(loaded["k3"])
    assert len(content) < 256 * 8 + 1000
    assert pickle.loads(content).tolist() == [7] * 256


def test_memmap_like(tmp_path: pathlib.Path) -> None:
    data = make().expand(4, 3).memmap_like(tmp_path / "x.tdz")
    assert not data.is_locked
    assert data["b", "c"].tolist() == torch.zeros(4, 3, 2).tolist()
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert file.testzip() is None
    data[1] = make()
    assert TensorDict.load_memmap(tmp_path / "x.tdz")["a"].tolist() == [[0] * 3, [0, 1, 2], [0] * 3, [0] * 3]
    with pytest.raises(SaveError, match="already exists"):
        make().memmap_like(tmp_path / "x.tdz", existsok=False)


def test_many_archives_do_not_use_up_the_memory_that_may_be_promised(tmp_path: pathlib.Path) -> None:
    """A private map of more than the machine has, which would be refused if it were counted."""
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 43)
    mapped = archive_reader._map_file(str(tmp_path / "large"), False, None)
    assert mapped[(1 << 43) - 1] == 0


# --- packing and unpacking --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_pack_and_unpack(method: str, tmp_path: pathlib.Path) -> None:
    td = rich()
    td.memmap(tmp_path / "folder")
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    packed = pack_memmap(tmp_path / "folder", tmp_path / "x.tdz", compression=method, compresslevel=1, num_threads=2)
    assert packed == tmp_path / "x.tdz"
    assert_same(TensorDict.load_memmap(packed), td)
    assert unpack_memmap(packed, tmp_path / "out", num_threads=2) == tmp_path / "out"
    assert tree(tmp_path / "out") == tree(tmp_path / "folder")
    with zipfile.ZipFile(packed) as file:
        assert file.testzip() is None
        assert file.namelist()[0] == "meta.json"


def test_packing_refuses(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "folder")
    with pytest.raises(SaveError, match="no saved folder"):
        pack_memmap(tmp_path, tmp_path / "x.tdz")
    with pytest.raises(SaveError, match="would lie in"):
        pack_memmap(tmp_path / "folder", tmp_path / "folder" / "b" / "x.tdz")
    with pytest.raises(FileNotFoundError):
        pack_memmap(tmp_path / "folder", tmp_path / "missing" / "x.tdz")
    with pytest.raises(ValueError, match="compresslevel"):
        pack_memmap(tmp_path / "folder", tmp_path / "x.tdz", compression="bzip2", compresslevel=0)
    (tmp_path / "folder" / "b" / "link.memmap").symlink_to("/etc/passwd")
    with pytest.raises(SaveError, match=r"link\.memmap.*link"):
        pack_memmap(tmp_path / "folder", tmp_path / "x.tdz")
    assert os.listdir(tmp_path) == ["folder"]


def test_unpacking_over_a_save_replaces_it(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz")
    old = TensorDict(a=torch.zeros(5), old=torch.ones(3)).memmap(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    unpack_memmap(tmp_path / "x.tdz", tmp_path / "out", durable=True, progress=True)
    assert_same(TensorDict.load_memmap(tmp_path / "out"), make())
    assert old["a"].tolist() == [0] * 5
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert sorted(os.listdir(tmp_path / "out")) == ["a.memmap", "b", "meta.json", "notes.txt"]


def test_is_memmap_archive(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "x.tdz")
    (tmp_path / "text").write_text("PK")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as file:
        file.writestr("inner/meta.json", b"{}")
    found = [is_memmap_archive(tmp_path / name) for name in ("x.tdz", "text", "other.zip", "missing", ".")]
    assert found == [True, False, False, False, False]
    with pytest.raises(SaveError, match=r"no 'meta\.json'"):
        TensorDict.load_memmap(tmp_path / "other.zip")
    with pytest.raises(SaveError, match="no archive"):
        TensorDict.load_memmap(tmp_path / "text")
    with pytest.raises(TypeError):
        is_memmap_archive(None)  # type: ignore[arg-type]


# --- killed, full, crowded --------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys, time
import torch
from tensordict import TensorDict
from tensordict.io.formats.archive import find_archive_problems

torch.set_num_threads(1)
path = sys.argv[1]


def save(value):
    data = {f"k{i}": torch.full((size,), value) for size in (100, 200_000) for i in range(size, size + 9)}
    TensorDict(data, []).memmap(path)


save(0.0)
start = time.perf_counter()
save(0.5)
took = time.perf_counter() - start
for turn in range(20):
    child = os.fork()
    if not child:
        while True:
            save(turn + 1.0)
    time.sleep(took * (1 + turn / 10))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    loaded = TensorDict.load_memmap(path)
    values = {float(value) for leaf in loaded.values() for value in leaf.unique()}
    assert len(values) == 1, values
    assert not find_archive_problems(path)[0]
save(-1.0)
print(os.listdir(os.path.dirname(path)))
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_one_or_the_new_one(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "x.tdz")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.stdout, result.returncode) == ("['x.tdz']\n", 0), result.stderr


def test_what_a_killed_save_left_is_taken_over(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".x.tdz.tensordict-new").write_bytes(b"left" * 100_000)
    assert_same(make().memmap(tmp_path / "x.tdz"), make())
    assert os.listdir(tmp_path) == ["x.tdz"]
    with zipfile.ZipFile(tmp_path / "x.tdz") as file:
        assert file.testzip() is None


def test_only_one_saver_at_a_time(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "x.tdz")
    with FileTransaction(path):
        with pytest.raises(SaveError, match="another process or thread"):
            make().memmap(path)
        assert not os.path.exists(path)
    make().memmap(path)
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_a_save_that_fails_leaves_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    make().memmap(tmp_path / "x.tdz")
    before = (tmp_path / "x.tdz").read_bytes()
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left"):
        TensorDict(a=torch.zeros(5)).memmap(tmp_path / "x.tdz")
    with pytest.raises(OSError, match="No space left"):
        TensorDict(a=torch.zeros(5)).memmap(tmp_path / "made" / "y.tdz")
    assert (tmp_path / "x.tdz").read_bytes() == before
    assert os.listdir(tmp_path) == ["x.tdz"]


def test_short_writes_are_completed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, buffers: list[Any], offset: int) -> int:
        return os.pwrite(fd, b"".join(bytes(buffer) for buffer in buffers)[:7], offset)

    monkeypatch.setattr(os, "pwritev", short)
    assert_same(rich().memmap(tmp_path / "x.tdz"), rich())


# --- broken and hostile files -----------------------------------------------------------------------------------------


def patched(content: bytes, name: bytes, field: int, value: bytes, local: bool = False) -> bytes:
    """The archive with some bytes of the description of an entry replaced."""
    size = 30 if local else 46
    at = content.index(name, 0 if local else content.index(b"PK\1\2")) - size
    assert content[at : at + 4] == (b"PK\3\4" if local else b"PK\1\2")
    return content[: at + field] + value + content[at + field + len(value) :]


def renamed(content: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return content.replace(old, new)


def two(number: int) -> bytes:
    return struct.pack("<H", number)


def four(number: int) -> bytes:
    return struct.pack("<I", number)


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda c: b"", "empty"),
    "cut off": (lambda c: c[:-30], "no zip directory"),
    "cut off in the middle": (lambda c: c[: len(c) // 2], "no zip directory"),
    "without its start": (lambda c: c[64:], "does not fit|not its"),
    "something before it": (lambda c: b"x" * 64 + c, "does not fit|not its"),
    "something behind it": (lambda c: c + b"x", "no zip directory"),
    "absolute": (lambda c: renamed(c, b"a.memmap", b"/.memmap"), "lead out"),
    "parent": (lambda c: renamed(c, b"b/meta.json", b"../eta.json"), "lead out"),
    "parent inside": (lambda c: renamed(c, b"b/meta.json", b"b/../n.json"), "lead out"),
    "dot": (lambda c: renamed(c, b"b/meta.json", b"./meta.json"), "lead out"),
    "backslash": (lambda c: renamed(c, b"b/meta.json", b"b\\meta.json"), "lead out"),
    "drive": (lambda c: renamed(c, b"a.memmap", b"C:memmap"), "lead out"),
    "nul": (lambda c: renamed(c, b"a.memmap", b"a.mem\0ap"), "lead out"),
    "no name": (lambda c: patched(c, b"a.memmap", 28, two(0)), "lead out"),
    "not UTF-8": (
        lambda c: patched(renamed(c, b"a.memmap", b"\xff.memmap"), b"\xff.memmap", 8, two(0x800)),
        "not UTF-8",
    ),
    "encrypted": (lambda c: patched(c, b"a.memmap", 8, two(1)), "encrypted"),
    "link": (lambda c: patched(c, b"a.memmap", 38, four((stat.S_IFLNK | 0o777) << 16)), "link"),
    "device": (lambda c: patched(c, b"a.memmap", 38, four((stat.S_IFCHR | 0o777) << 16)), "link"),
    "other method": (lambda c: patched(c, b"a.memmap", 10, two(8)), "not its"),
    "unknown method": (
        lambda c: patched(patched(c, b"a.memmap", 10, two(93)), b"a.memmap", 8, two(93), local=True),
        "'a'|unknown method",
    ),
    "size": (lambda c: patched(c, b"a.memmap", 24, four(13)), "12 and 13 bytes|13"),
    "huge sizes": (
        lambda c: patched(
            patched(c, b"a.memmap", 20, four(2**32 - 2) * 2), b"a.memmap", 18, four(2**32 - 2) * 2, local=True
        ),
        "do not end",
    ),
    "zip64 without a record": (lambda c: patched(c, b"a.memmap", 24, four(2**32 - 1)), "zip64"),
    "larger than it says before": (lambda c: patched(c, b"a.memmap", 18, four(16) * 2, local=True), "sizes"),
    "another header": (lambda c: patched(c, b"a.memmap", 42, four(0)), "not its"),
    "header outside": (lambda c: patched(c, b"a.memmap", 42, four(2**31)), "outside"),
    "in the middle of another": (lambda c: patched(c, b"a.memmap", 42, four(64)), "not its"),
    "another disk": (lambda c: patched(c, b"a.memmap", 34, two(3)), "encrypted, patched or in another"),
    "header with another name": (lambda c: c.replace(b"a.memmap", b"z.memmap", 1), "not its"),
    "header without sign": (lambda c: patched(c, b"a.memmap", 0, b"XX", local=True), "not its"),
    "long extra field": (lambda c: patched(c, b"a.memmap", 28, two(60000), local=True), "do not end"),
    "content over the next": (lambda c: patched(c, b"b/meta.json", 28, two(300), local=True), "lies over|do not end"),
    "several parts": (lambda c: c[:-18] + two(1) + c[-16:], "several parts"),
    "fewer entries": (lambda c: c[:-14] + two(9) * 2 + c[-10:], "fewer|does not fit"),
    "more entries": (lambda c: c[:-14] + two(2) * 2 + c[-10:], "more than"),
    "directory elsewhere": (lambda c: c[:-6] + four(3) + c[-2:], "does not fit"),
    "directory beyond": (lambda c: c[:-6] + four(2**32 - 2) + c[-2:], "does not fit"),
    "broken meta": (lambda c: c.replace(b'"a":{', b'"a":['), "checksum"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_archives(change: Callable[[bytes], bytes], message: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tdz"
    make().memmap(path)
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    for mode in ("r", "r+"):
        with pytest.raises(SaveError, match=message) as caught:
            TensorDict.load_memmap(path, mode=mode)
        assert str(path) in str(caught.value)
    with pytest.raises(SaveError):
        unpack_memmap(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert find_archive_problems(path)[0]


def test_files_and_folders_of_one_name(tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.tdz", "w") as file:
        for name in ("meta.json", "a", "a/b/c"):
            file.writestr(name, b"{}")
    with pytest.raises(SaveError, match="'a'.*a file and a folder"):
        TensorDict.load_memmap(tmp_path / "x.tdz")


def test_an_error_in_a_checksum_stops_the_writer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, has_failed = [], threading.Event()

    def fail(*args: object) -> int:
        has_failed.set()
        raise MemoryError("no memory")

    def write(fd: int, content: memoryview, offset: int) -> None:
        has_failed.wait()
        written.append(len(content))

    monkeypatch.setattr("tensordict.io.saving.checksums.crc32", fail)
    monkeypatch.setattr(files, "write_bytes", write)
    td = TensorDict(a=torch.zeros(64 << 18))
    with pytest.raises(MemoryError, match="no memory"):
        td.memmap(tmp_path / "x.tdz", num_threads=2)
    assert len(written) <= 2  # of eight pieces
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicate_names(tmp_path: pathlib.Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.tdz", "w") as file:
        for name in ("meta.json", "a", "a"):
            file.writestr(name, b"{}")
    with pytest.raises(SaveError, match="'a'.*several"):
        TensorDict.load_memmap(tmp_path / "x.tdz")


def write_leaf(path: pathlib.Path, packed: bytes, size: int, method: int, crc: int = 0, numel: int = 1) -> None:
    """An archive with one leaf, whose content is what it is given."""
    spec = {"device": "cpu", "shape": [numel], "dtype": "torch.float32", "is_nested": False}
    node = {"a": spec, "shape": [], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    meta = json.dumps(node).encode()
    parts = [archive_writer.make_part("meta.json", (), len(meta), meta, align=False)]
    parts.append(archive_writer.make_part("a.memmap", ("a",), len(packed), packed))
    with open(path, "w+b") as file:
        archive_writer.write_plain_archive(file.fileno(), parts, 0)
    content = path.read_bytes()
    for local, method_at, sizes_at in ((True, 8, 14), (False, 10, 16)):
        content = patched(content, b"a.memmap", method_at, two(method), local)
        content = patched(content, b"a.memmap", sizes_at, four(crc) + four(len(packed)) + four(size), local)
    path.write_bytes(content)


def test_bombs(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tdz"
    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    zeros = deflater.compress(bytes(64 << 20)) + deflater.flush()
    # Unpacks to more than it says.
    write_leaf(path, zeros, 4, 8)
    with pytest.raises(SaveError, match=r"'a\.memmap'.*unpack to 4 bytes, and more"):
        TensorDict.load_memmap(path)
    # Says more than it could unpack to: nothing is allocated for it.
    write_leaf(path, zeros[:1000], (1 << 32) - 2, 8, numel=1 << 30)
    with pytest.raises(SaveError, match=r"'a.*\[1073741824\]"):
        TensorDict.load_memmap(path)
    write_leaf(path, zeros[:1000], (1 << 32) - 2, 8, numel=1 << 29)
    with pytest.raises(SaveError, match="do not unpack to 4294967294"):
        TensorDict.load_memmap(path)
    # Cut off, followed by something, and broken.
    for packed, message in ((zeros[:-5], "cut off"), (zeros + b"x", "more behind"), (b"\xff" * 70000, "broken")):
        write_leaf(path, packed, 64 << 20, 8, numel=16 << 20)
        with pytest.raises(SaveError, match=message):
            TensorDict.load_memmap(path)
    write_leaf(path, zeros, 64 << 20, 8, crc=1, numel=16 << 20)
    with pytest.raises(SaveError, match="checksum"):
        TensorDict.load_memmap(path)


def test_more_than_the_memory_of_the_machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TensorDict({f"k{i}": torch.zeros(1 << 18) for i in range(4)}, []).memmap(tmp_path / "x.tdz", compression="bzip2")
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 700 if name == "SC_PHYS_PAGES" else real(name))
    with pytest.raises(SaveError, match="unpack_memmap"):
        TensorDict.load_memmap(tmp_path / "x.tdz")


@pytest.mark.parametrize("method", [12, 14, 93])
def test_broken_streams_of_other_methods(method: int, tmp_path: pathlib.Path) -> None:
    for packed in (
        b"",
        b"\x09\x04\x05\x00",
        b"x" * 100,
        b"\x09\x04\x05\x00" + b"\xff" * 50,
        bz2.compress(b"abcd")[:-3],
    ):
        write_leaf(tmp_path / "x.tdz", packed, 4, method)
        with pytest.raises(SaveError, match=r"'a\.memmap'"):
            TensorDict.load_memmap(tmp_path / "x.tdz")
    huge = lzma.compress(b"abcd", lzma.FORMAT_ALONE)
    # A dictionary of 4 GiB, which the decompressor may not take.
    packed = b"\x09\x04\x05\x00" + huge[:1] + b"\xff" * 4 + huge[13:]
    write_leaf(tmp_path / "x.tdz", packed, 4, 14)
    with pytest.raises(SaveError, match="broken"):
        TensorDict.load_memmap(tmp_path / "x.tdz")


def test_a_disk_that_is_too_small_to_unpack(tmp_path: pathlib.Path) -> None:
    item = TensorDict(a=torch.zeros((), dtype=torch.uint8))
    item.expand(1 << 20).memmap_like(tmp_path / "x.tdz")
    content = (tmp_path / "x.tdz").read_bytes()
    assert not find_archive_problems(tmp_path / "x.tdz")[0]
    # A file with holes is larger than any disk.
    with open(tmp_path / "x.tdz", "wb") as file:
        parts = [
            archive_writer.make_part("meta.json", (), 2, b"{}"),
            archive_writer.make_part("a", (), 1 << 43, "", zero=True),
        ]
        position = archive_writer._lay_out(parts)
        stamp = zipping.Stamp()
        for part in parts:
            file.seek(part.header)
            file.write(zipping.local_header(part, stamp, part.padding))
        file.seek(position)
        file.write(zipping.directory(parts, stamp, position))
    assert os.path.getsize(tmp_path / "x.tdz") > (1 << 43)
    with pytest.raises(OSError, match="the disk has"):
        unpack_memmap(tmp_path / "x.tdz", tmp_path / "out")
    (tmp_path / "x.tdz").write_bytes(content)
    assert not (tmp_path / "out").exists()


def test_problems(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tdz"
    rich().memmap(path, compression="deflate")
    assert find_archive_problems(path)[0] == []
    make().memmap(path)
    TensorDict.load_memmap(path, mode="r+")["a"].fill_(5)
    assert [name for name, _ in find_archive_problems(path)[0]] == ["a.memmap"]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("originals")
    for method in METHODS:
        make().memmap(folder / method, archive=True, compression=method)
    return [(folder / method).read_bytes() for method in METHODS]


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_mutations(data: st.DataObject, originals: list[bytes], tmp_path: pathlib.Path) -> None:
    """A file with any bytes changed, put in or left out gives a container that can be used, or a `SaveError`."""
    content = bytearray(data.draw(st.sampled_from(originals)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.sampled_from(["set", "word", "cut", "insert", "copy"]))
        if change == "set":
            content[at] = data.draw(st.integers(0, 255))
        elif change == "word":
            odd = [0, 1, 0xFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000]
            content[at : at + 4] = four(data.draw(st.sampled_from(odd)))
        elif change == "cut":
            del content[at : at + data.draw(st.integers(1, 200))]
        elif change == "insert":
            content[at:at] = data.draw(st.binary(max_size=80))
        else:
            start = data.draw(st.integers(0, len(content) - 1))
            content[at:at] = content[start : start + data.draw(st.integers(1, 200))]
        if not content:
            content = bytearray(b"\0")
    path = tmp_path / "mutated.tdz"
    path.write_bytes(bytes(content))
    for mode in ("r", "r+"):
        try:
            loaded = TensorDict.load_memmap(path, mode=mode)
        except SaveError:
            continue
        for leaf in loaded.values(True, True):
            leaf.clone()
    is_memmap_archive(path)
    for _, problem in find_archive_problems(path)[0]:
        assert problem


# --- exchange with the reference --------------------------------------------------------------------------------------

READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict, is_memmap_archive, refresh_archive_checksums, unpack_memmap
assert is_memmap_archive(sys.argv[1])
td = TensorDict.load_memmap(sys.argv[1])
print(json.dumps({json.dumps(k): x.contiguous().view(-1).view(torch.uint8).tolist() for k, x in td.items(True, True)
                  if isinstance(x, torch.Tensor)}))
if "compressed" not in sys.argv[1]:
    td = TensorDict.load_memmap(sys.argv[1], mode="r+")
    td["int8"].fill_(99)
    refresh_archive_checksums(sys.argv[1])
unpack_memmap(sys.argv[1], sys.argv[1] + "-out")
"""

WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict, pack_memmap
td = TensorDict({name: torch.full((2, 3), i) for i, name in enumerate(["", "..", "a/b", "cl\\u00e9", "_x"])}, [2])
td["n"] = {"half": torch.ones(2, dtype=torch.bfloat16), "empty": torch.zeros(2, 0), "m o": {"x": torch.ones(2)}}
for compression in ("stored", "deflate", "bzip2", "lzma"):
    td.memmap(sys.argv[1] + "/" + compression + ".tdz", compression=compression)
td.memmap(sys.argv[1] + "/folder")
pack_memmap(sys.argv[1] + "/folder", sys.argv[1] + "/packed.tdz")
"""


@pytest.mark.reference
@pytest.mark.parametrize("method", METHODS)
def test_reference_reads_ours(method: str, behaviour: Reference, tmp_path: pathlib.Path) -> None:
    plain = [name for name in DTYPES if not name.startswith("float8")]
    entries: dict[str, Any] = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in plain}
    entries |= {name: torch.ones(2) for name in ("", ".", "..", "a/b", "sp ace", "%41", "clé", 'q?*":|', "meta.json")}
    entries |= {"empty": torch.zeros(2, 0), "inner": {"x y": {"deep": torch.arange(2)}, "none": {}}}
    td = TensorDict(entries, [2], names=["time"])
    path = tmp_path / ("x.tdz" if method == "stored" else "compressed.tdz")
    td.memmap(path, compression=method, num_threads=2)
    expected = {
        json.dumps(key): value.contiguous().view(-1).view(torch.uint8).tolist() for key, value in td.items(True, True)
    }
    assert json.loads(behaviour.run(READ, path)) == expected
    if method == "stored":
        td["int8"].fill_(99)
    assert_same(TensorDict.load_memmap(path), td)
    assert_same(TensorDict.load_memmap(f"{path}-out"), td)


@pytest.mark.reference
def test_ours_reads_the_reference(behaviour: Reference, tmp_path: pathlib.Path) -> None:
    behaviour.run(WRITE, tmp_path)
    for name in (*METHODS, "packed"):
        td = TensorDict.load_memmap(tmp_path / f"{name}.tdz", num_threads=2)
        assert set(td.keys()) == {"", "..", "a/b", "cl\u00e9", "_x", "n"}
        assert [td[key].unique().tolist() for key in ("", "..", "a/b", "cl\u00e9", "_x")] == [[i] for i in range(5)]
        assert (td["n", "half"].dtype, td["n", "empty"].shape) == (torch.bfloat16, (2, 0))
        assert td["n", "m o", "x"].tolist() == [1, 1]
        unpack_memmap(tmp_path / f"{name}.tdz", tmp_path / name)
        assert tree(tmp_path / name) == tree(tmp_path / "folder")
    written = TensorDict.load_memmap(tmp_path / "packed.tdz", mode="r+")
    written["_x"].fill_(3)
    assert TensorDict.load_memmap(refresh_archive_checksums(tmp_path / "packed.tdz"))["_x"].unique().tolist() == [3]


@pytest.mark.parametrize("name", ["dense", "dense_deflate"])
def test_samples(name: str) -> None:
    assert_same(TensorDict.load_memmap(SAMPLES / f"{name}.tdz"), TensorDict.load_memmap(SAMPLES / "dense"))


def test_leaves_that_are_written_to_are_shared_memory(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tdz"
    TensorDict(a=torch.zeros(4, 2), n={"b": torch.arange(3)}, batch_size=[]).memmap(path)
    td = TensorDict.load_memmap(path, mode="r+")
    leaf = td["a"]
    assert leaf.is_shared() and td["n", "b"].is_shared() and leaf[0].is_shared() and not leaf.clone().is_shared()
    assert not TensorDict.load_memmap(path)["a"].is_shared()
    # Torch sends the map itself, so later writes still reach the file and the receiver.
    received = pickle.loads(ForkingPickler.dumps(leaf))
    leaf.fill_(7)
    assert received.unique().tolist() == [7] and TensorDict.load_memmap(path)["a"].unique().tolist() == [7]
    received.fill_(8)
    assert leaf.unique().tolist() == [8] and TensorDict.load_memmap(path)["a"].unique().tolist() == [8]


@pytest.mark.parametrize("threads", [1, 4])
def test_several_threads_write_large_leaves(tmp_path, threads):
    td = TensorDict({f"k{i}": torch.rand(5 << 19) for i in range(3)}, [])
    td["across"] = torch.rand(1 << 10, 3 << 10).t()
    loaded = td.memmap(tmp_path / "a.tdz", num_threads=threads)
    assert (loaded == td).all()
    with zipfile.ZipFile(tmp_path / "a.tdz") as archive:
        assert archive.testzip() is None


@pytest.mark.skipif(not pathlib.Path("/proc/self/smaps").exists(), reason="needs the kernel's list of maps")
@pytest.mark.parametrize("compression", ["deflate", "bzip2", "lzma"])
def test_the_compressed_bytes_leave_memory(tmp_path, compression):
    noise = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8)
    TensorDict(a=noise).memmap(tmp_path / "a.tdz", compression=compression)
    archive = Archive(str(tmp_path / "a.tdz"))
    assert bytes(archive.inflate(archive.entries["a.memmap"])) == bytes(noise.numpy())
    maps = pathlib.Path("/proc/self/smaps").read_text().partition(archive.path)[2]
    resident = int(re.search(r"^Rss:\s+(\d+) kB$", maps, re.MULTILINE)[1])
    assert archive.data.size() > 4 << 20 and resident < 1024


CHANGING = {
    "archive": lambda td, path: td.memmap(path / "a.tdz"),
    "deflated": lambda td, path: td.save(path / "a.tdz", compression="deflate"),
    "directory": lambda td, path: td.memmap(path / "a", checksum=True),
    "consolidated": lambda td, path: td.consolidate(path / "a.consolidated", checksum=True),
    "safetensors": lambda td, path: td.to_safetensors(path / "a.safetensors", checksum=True),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_checksums_fit_the_file_if_a_tensor_changes_during_the_save(tmp_path, monkeypatch, kind):
    td = TensorDict(small=torch.zeros(8), large=torch.zeros(3 << 20))
    crc = checksums.crc32

    def change_before_and_after(data, value=0):
        td.apply_(lambda leaf: leaf.add_(1))
        found = crc(data, value)
        td.apply_(lambda leaf: leaf.add_(1))
        return found

    for module in (checksums, archive_writer):
        monkeypatch.setattr(module, "crc32", change_before_and_after)
    CHANGING[kind](td, tmp_path)
    monkeypatch.undo()
    (saved,) = tmp_path.iterdir()
    assert tensordict.verify(saved).ok
    assert td["small"].unique().item() > 0


def test_checksums_are_those_of_zlib_with_and_without_isal():
    program = (
        "import sys, zlib\n"
        "if sys.argv[1] == 'without':\n    sys.modules['isal'] = None\n"
        "from tensordict.io.saving import checksums\n"
        "crc = checksums.Crc32()\n"
        "crc.update(b'ab' * 1000)\n"
        "crc.update(memoryview(b'c' * 77))\n"
        "assert crc.value == zlib.crc32(b'ab' * 1000 + b'c' * 77)\n"
        "print(checksums.crc32.__module__)\n"
    )
    run = [
        subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True)
        for how in ("with", "without")
    ]
    assert run[1].stdout.strip() == "zlib"
    assert run[0].stdout.strip() == ("zlib" if importlib.util.find_spec("isal") is None else "isal.isal_zlib")
