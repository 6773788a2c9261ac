"""Containers over Zarr groups: what is written comes back, which chunks are read, other programs, broken stores."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import pathlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from reference import Reference

pytest.importorskip("zarr", reason="zarr needs Python 3.11")

import numcodecs
import zarr
from zarr.codecs import GzipCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore, WrapperStore, ZipStore

from tensordict import (
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    from_zarr,
    lazy_stack,
    verify,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats.detect import detect_format
from tensordict.io.formats.opening import describe_save
from tensordict.memory.stored_tensors import as_array, as_tensor, stored_dtype

ROOT = pathlib.Path(__file__).parents[2]
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float16, torch.bfloat16, torch.float64,
    torch.complex32, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


class Sample(TensorClass):
    """A tensorclass that is saved."""

    image: torch.Tensor
    label: Any = None


class Counting(WrapperStore[Any]):
    """A store that counts what is read, by key."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.reads: Counter[str] = Counter()

    def _with_store(self, store: Any) -> Counting:
        other = Counting(store)
        other.reads = self.reads
        return other

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        self.reads[key] += 1
        return await super().get(key, prototype, byte_range)

    def chunks(self, name: str) -> list[str]:
        """The chunks of an array that were read, and forget them."""
        found = sorted(key for key in self.reads if key.startswith(f"{name}/c"))
        self.reads.clear()
        return found


@pytest.fixture
def source() -> TensorDict:
    td = TensorDict(
        {"z": torch.arange(60.0).view(20, 3), "b": {"c": torch.rand(20, 2)}, "flag": torch.arange(20) % 3 == 0},
        [20],
        names=["time"],
    )
    td["b", "word"] = "text"
    td["rows"] = NonTensorStack(*[str(i) for i in range(20)])
    return td


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "data.zarr")


def assert_same(data: Any, source: Any) -> None:
    assert data.batch_size == source.batch_size and data.names == source.names
    assert list(data.keys(True)) == list(source.keys(True))
    assert (data.to_tensordict() == source).all()


# --- what is written comes back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["folder", "zip", "memory", "local"])
def test_round_trip(tmp_path: pathlib.Path, source: TensorDict, target: str) -> None:
    where: Any = {
        "folder": str(tmp_path / "x.zarr"),
        "zip": tmp_path / "x.zip",
        "memory": MemoryStore(),
        "local": LocalStore(tmp_path / "y.zarr"),
    }[target]
    with source.to_zarr(where) as data:
        assert type(data) is PersistentTensorDict
        assert_same(data, source)
        assert data["b", "word"] == "text" and data["rows"] == [str(i) for i in range(20)]
    for opened in (from_zarr(where), PersistentTensorDict(filename=where, backend="zarr")):
        with opened:
            assert_same(opened, source)
            with pytest.raises(SaveError, match=r"mode='r\+'"):
                opened["new"] = torch.zeros(20)


def test_folder_needs_nothing_for_urls(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiohttp", "tensordict.io.stores.zarr_remote"):
        monkeypatch.setitem(sys.modules, name, None)
    TensorDict(a=torch.ones(2)).to_zarr(path)
    assert (from_zarr(path)["a"] == 1).all()


def test_names_of_programs_that_read_it(path: str, source: TensorDict) -> None:
    source.to_zarr(path).close()
    group = zarr.open_group(path, mode="r")
    assert group["z"][:].tolist() == source["z"].tolist() and group["z"].chunks == (20, 3)
    assert group["z"].compressors == () and group["b/c"].dtype == np.float32
    assert group.attrs["__tensordict__"]["batch_size"] == [20] and group.attrs["__tensordict__"]["names"] == ["time"]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    store = MemoryStore()
    content = torch.arange(6).remainder(2).to(torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    for leaf in (content.view(2, 3), content.new_empty(2, 0)):
        data = TensorDict(a=leaf, batch_size=[2]).to_zarr(store, overwrite=True)
        assert data["a"].dtype is dtype and data["a"].shape == leaf.shape
        assert data["a"].view(torch.uint8).tolist() == leaf.view(torch.uint8).tolist()
    scalar = TensorDict(a=content[1]).to_zarr(store, overwrite=True, chunks=4)
    assert scalar["a"].shape == () and bytes(scalar["a"].untyped_storage()) == bytes(
        content[1].clone().untyped_storage()
    )


def test_tensorclass(path: str) -> None:
    saved = Sample(image=torch.rand(4, 2), label="cat", batch_size=[4])
    with TensorDict(s=saved, batch_size=[4]).to_zarr(path) as data:
        assert type(data["s"]) is Sample and data["s"].label == "cat"
    with saved.to_zarr(path) as data:
        assert type(data) is Sample and data.image.equal(saved.image)
    assert type(TensorDict.from_zarr(path)) is Sample


@pytest.mark.parametrize("name", ["a/b", "..", "zarr.json", "c", "__x", "_%", ".tensordict-x", "é ü", "\n", " ", "."])
def test_any_name(path: str, name: str) -> None:
    source = TensorDict({name: torch.ones(2), "n": {name: torch.zeros(2)}}, [2])
    with source.to_zarr(path) as data:
        assert_same(data, source)
        del data[name]
        data[name] = torch.full((2,), 3)
        assert list(data.keys()) == ["n", name]
    assert from_zarr(path)[name].tolist() == [3, 3]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_ragged_entries(path: str) -> None:
    rows = [torch.arange(2.0), torch.arange(3.0), torch.arange(0.0)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    strided = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 2), torch.zeros(4, 1)])
    td = TensorDict({"j": jagged, "n": {"s": strided}, "a": torch.ones(3)}, [3])
    with td.to_zarr(path) as data:
        assert [row.tolist() for row in data["j"].unbind()] == [row.tolist() for row in rows]
        assert data["j"].layout is torch.jagged and data["n", "s"].layout is torch.strided
        assert [row.shape for row in data["n", "s"].unbind()] == [row.shape for row in strided.unbind()]
        assert data[1]["j"].tolist() == [0, 1, 2] and list(data.keys()) == ["j", "n", "a"]
        data["j"] = torch.nested.nested_tensor([torch.ones(1)] * 3, layout=torch.jagged)
        assert data["j"].values().tolist() == [1, 1, 1]
        read = data.to_tensordict()
        # Read tensors are private copies.
        assert read.zero_()["j"].values().tolist() == [0, 0, 0] and data["j"].values().tolist() == [1, 1, 1]
        with pytest.raises(RuntimeError, match=r"'k' has shape .* batch size \[3\]"):
            data["k"] = torch.nested.nested_tensor([torch.ones(1)] * 2, layout=torch.jagged)
    assert verify(path).problems == []
    again = TensorDict.load(path)
    assert again["n", "s"].is_nested


@pytest.mark.parametrize(
    "write",
    [
        lambda data: data.zero_(),
        lambda data: data.mul_(2),
        lambda data: data.update_({"j": data["j"] + 1}),
        lambda data: data.set_at_("j", torch.zeros(3), 1),
        lambda data: data.apply_(lambda leaf: leaf.add_(1)),
        lambda data: data.__setitem__(0, 1.0),
        lambda data: data.select("j").fill_("j", 1.0),
    ],
)
def test_ragged_entries_are_not_written_in_place(write: Callable[[Any], object]) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    data = TensorDict(j=jagged, batch_size=[2]).to_zarr(MemoryStore())
    with pytest.raises(ValueError, match=r"'j'.*replace the whole entry"):
        write(data)
    assert data["j"].values().tolist() == [1.0] * 5


def test_broken_ragged_entries_are_named(path: str) -> None:
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    TensorDict(j=jagged, batch_size=[2]).to_zarr(path).close()
    group = zarr.open_group(path)
    group["j/sizes"][:] = [[2], [4]]
    with pytest.raises(SaveError, match="'j'.*rows of the sizes"):
        from_zarr(path)["j"]
    assert any("'j'" in problem for problem in verify(path, raises=False).problems)
    group["j/sizes"].resize((3, 1))
    with pytest.raises(SaveError, match=r"'j' is ragged and has \[3\] rows"):
        from_zarr(path)


def test_lazy_stacks(path: str) -> None:
    members = [TensorDict(a=torch.full((2,), i), batch_size=[2]) for i in range(3)]
    with lazy_stack(members, 1).to_zarr(path) as data:
        assert data.batch_size == (2, 3) and data["a"].tolist() == [[0, 1, 2]] * 2
    uneven = lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 2)])
    with pytest.raises(UnsupportedEntryError, match=r"\('n', 'x'\) has different shapes"):
        TensorDict(n=uneven).to_zarr(path)
    assert from_zarr(path).batch_size == (2, 3)


def test_writing_in_place(path: str) -> None:
    with PersistentTensorDict(filename=path, backend="zarr", mode="w", batch_size=[100]) as data:
        data["image"] = torch.zeros(100, 4, 4)
        data["n"] = {"x": torch.arange(100)}
        data[3] = {"image": torch.ones(4, 4), "n": {"x": torch.tensor(-1)}}
        data[[5, 1, 5]] = TensorDict(image=torch.full((3, 4, 4), 2.0), n={"x": torch.zeros(3, dtype=torch.int64)})
        data["n"].mul_(2)
        data.set("image", torch.ones(100, 2), overwrite=True)
        data.rename_key_("image", "i")
        data["n", "word"] = "x"
        data.batch_size = [100]
    data = from_zarr(path)
    assert list(data.keys()) == ["n", "i"] and list(data["n"].keys()) == ["x", "word"] and data["n", "word"] == "x"
    assert data["n", "x"][:7].tolist() == [0, 0, 4, -2, 8, 0, 12]
    assert data["i"].shape == (100, 2) and not (set(os.listdir(path)) - {"zarr.json", "i", "n"})


def test_what_fails_leaves_no_trace(path: str, source: TensorDict) -> None:
    source.to_zarr(path).close()
    before = sorted(map(str, pathlib.Path(path).rglob("*")))
    data = from_zarr(path, mode="r+")
    for value in (NonTensorData(object(), [20]), {"x": torch.zeros(20), "y": NonTensorData(object, [20])}):
        with pytest.raises(UnsupportedEntryError, match="new"):
            data["new"] = value
    bad = TensorDict({"a": torch.ones(20), "bad": NonTensorData(object)}, [20])
    with pytest.raises(UnsupportedEntryError, match="bad"):
        bad.to_zarr(path)
    assert sorted(map(str, pathlib.Path(path).rglob("*"))) == before
    assert_same(from_zarr(path), source)


def test_an_entry_that_is_deleted_is_not_read_as_zeros(path: str) -> None:
    data = TensorDict(n={"x": torch.ones(3)}, batch_size=[3]).to_zarr(path)
    nested = data["n"]
    del data["n"]
    with pytest.raises((KeyError, SaveError)):
        nested["x"]
    with pytest.raises(KeyError):
        data["n"]


def test_pickles_open_the_path(path: str, source: TensorDict) -> None:
    with source.to_zarr(path, chunks=5, compressors=GzipCodec()) as data:
        with pickle.loads(pickle.dumps(data)) as again:
            assert_same(again, source)
            again["more"] = torch.ones(20)
        assert "more" in data.keys()
        assert pickle.loads(pickle.dumps(data["b"]))["word"] == "text"
    assert zarr.open_group(path)["more"].chunks == (5,)


# --- how arrays are cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"a": ((30, 4), None), "b/c": ((30, 2, 5), None)}),
        ({"chunks": 7}, {"a": ((7, 4), None), "b/c": ((7, 2, 5), None)}),
        ({"chunks": (50, 1)}, {"a": ((30, 1), None), "b/c": ((30, 1, 5), None)}),
        ({"chunks": {"a": 3, "b": (4, 2)}}, {"a": ((3, 4), None), "b/c": ((4, 2, 5), None)}),
        ({"chunks": {("b", "c"): 3}}, {"a": ((30, 4), None), "b/c": ((3, 2, 5), None)}),
        ({"chunks": "rows"}, {"a": ((30, 4), None), "b/c": ((30, 2, 5), None)}),
        ({"chunks": 2, "shards": 9}, {"a": ((2, 4), (10, 4)), "b/c": ((2, 2, 5), (10, 2, 5))}),
    ],
    ids=str,
)
def test_chunks_and_shards(options: dict[str, Any], expected: dict[str, Any]) -> None:
    store = MemoryStore()
    td = TensorDict({"a": torch.rand(30, 4), "b": {"c": torch.rand(30, 2, 5)}}, [30])
    assert_same(td.to_zarr(store, **options), td)
    group = zarr.open_group(store)
    assert {name: (group[name].chunks, group[name].shards) for name in expected} == expected


def test_row_chunks_are_about_a_mebibyte() -> None:
    data = TensorDict(a=torch.zeros(5000, 1000), batch_size=[5000]).to_zarr(store := MemoryStore(), chunks="rows")
    assert zarr.open_group(store)["a"].chunks == (262, 1000) and data.batch_size == (5000,)


def test_compressors() -> None:
    td = TensorDict(a=torch.arange(1000), b=torch.arange(1000), batch_size=[1000])
    for given, expected in (
        (GzipCodec(), [(GzipCodec(),)] * 2),
        ({"b": ZstdCodec(level=3)}, [(), (ZstdCodec(level=3),)]),
        ({"name": "gzip", "configuration": {"level": 5}}, [(GzipCodec(),)] * 2),
    ):
        assert_same(td.to_zarr(store := MemoryStore(), compressors=given), td)
        assert [zarr.open_group(store)[name].compressors for name in "ab"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 0}, "entry 'a': chunks=0 .*int"),
        ({"chunks": "auto"}, "entry 'a': chunks='auto'"),
        ({"shards": (2, -1)}, "entry 'a': shards"),
        ({"compression": "gzip"}, r"\['compression'\] are no options .*compressors"),
        ({"compressors": "nothing"}, "'a'"),
    ],
)
def test_options_that_cannot_be_had(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TensorDict(a=torch.ones(3, 4), batch_size=[3]).to_zarr(path, **options)
    assert not os.path.exists(path)


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 20])
def test_only_the_chunks_asked_for_are_read(shards: int | None) -> None:
    td = TensorDict(a=torch.arange(300.0).view(100, 3), b={"c": torch.arange(100)}, batch_size=[100])
    td.to_zarr(store := Counting(MemoryStore()), chunks=10, shards=shards)
    data = from_zarr(store)
    store.reads.clear()
    size = shards or 10
    for index, rows in (
        (7, [7]),
        (slice(25, 35), [25, 34]),
        (slice(0, 100, 50), [0, 50]),
        (torch.tensor([95, 3, 95, 41]), [3, 41, 95]),
        ([12, 19], [12]),
        (torch.tensor([5, 25]), [5, 25]),
        (torch.arange(100) == 55, [55]),
    ):
        assert (data[index] == td[index]).all()
        chunks = sorted({row // size for row in rows})
        assert store.chunks("b/c") == sorted(f"b/c/c/{chunk}" for chunk in chunks), index
    data["a"]
    assert len(store.chunks("a")) == 100 // size
    assert data.batch_size == (100,) and repr(data) and data["b"].shape == (100,)
    assert not store.chunks("a") and not store.chunks("b/c")


def test_zeros_of_a_schema_take_no_room(path: str) -> None:
    schema = {"image": ([84, 84, 3], torch.uint8), "b": {"half": ([], torch.bfloat16)}}
    data = TensorDict.from_schema(schema, batch_size=[10**9], storage="zarr", filename=path, chunks="rows")
    assert sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file()) < 10_000
    data[10**9 - 1] = {"image": torch.ones(84, 84, 3), "b": {"half": torch.ones(())}}
    again = TensorDict.from_schema(schema, batch_size=[10**9], storage="zarr", filename=path)
    assert again[-2:]["image"].sum((1, 2, 3)).tolist() == [0, 84 * 84 * 3] and again[-1]["b", "half"] == 1
    store = MemoryStore()
    assert (
        TensorDict.from_schema({"a": ([], torch.bool)}, batch_size=[2], storage="zarr", filename=store)["a"].sum() == 0
    )
    with pytest.raises(SaveError, match="another structure.*'b' is not in the save"):
        TensorDict.from_schema({"b": ([], torch.float32)}, batch_size=[2], storage="zarr", filename=store)


@pytest.mark.parametrize("chunks", [40, 7, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_rows_of_plain_chunks_are_those_that_zarr_reads(path: str, chunks: int, dtype: torch.dtype) -> None:
    source = torch.arange(40 * 3 * 5).view(40, 3, 5).to(dtype)
    TensorDict(a=source).to_zarr(path, chunks=chunks, fill_value=1).close()
    stored, _ = stored_dtype(dtype)
    opened = zarr.open_array(path, path="a", mode="r+")
    assert np.asarray(opened[...]).tobytes() == as_array(source, dtype).tobytes() and opened.dtype == stored
    opened[7:14] = 1
    source[7:14] = as_tensor(np.asarray(opened[7:14]), dtype)
    rows = torch.tensor([39, 0, 8, 8, 21])
    indices: list[Any] = [
        3,
        -1,
        slice(2, 30),
        slice(1, 40, 3),
        slice(38, None),
        rows,
        (slice(None), 1),
        (rows, slice(0, 2)),
    ]
    indices += [
        (5, slice(None), 2),
        (slice(3, 20), rows[:2] // 20, 4),
        (..., 1),
        slice(0, 0),
        source.real[:, 0, 0] != 0,
    ]
    data = from_zarr(path)
    assert data["a"].equal(source)
    for index in indices:
        entry = data._unread["a"]
        assert entry[index].clone().equal(source[index]), index


def test_a_plain_chunk_that_was_cut_off_is_named(path: str) -> None:
    TensorDict(a=torch.ones(40, 3), b=torch.ones(2)).to_zarr(path, chunks=10).close()
    pathlib.Path(path, "a", "c", "1", "0").write_bytes(b"0" * 100)
    data = from_zarr(path)
    assert data["b"].sum() == 2 and data._unread["a"][30:].sum() == 30
    with pytest.raises(SaveError, match=r"'a' .*data\.zarr"):
        data["a"]


def test_whole_chunks_are_written_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A transposed tensor is written in pieces, which must not cut chunks: each would be read and written again.
    import tensordict.memory.stored_tensors as stored

    monkeypatch.setattr(stored, "SLAB", 1000)
    content = torch.arange(4000.0).view(10, 400).t()
    for chunks in (100, 400):
        store = Counting(MemoryStore())
        data = TensorDict(a=content, batch_size=[400]).to_zarr(store, chunks=chunks)
        assert not store.chunks("a") and data["a"].equal(content)


def test_many_nodes_are_opened_by_one_document() -> None:
    td = TensorDict({f"k{i}": torch.full((3,), i) for i in range(30)} | {"n": {"x": torch.ones(3)}}, [3])
    td.to_zarr(store := Counting(MemoryStore()))
    store.reads.clear()
    data = from_zarr(store)
    assert list(data.keys(True)) == list(td.keys(True))
    assert set(store.reads) <= {"zarr.json", ".zgroup"}
    assert zarr.open_consolidated(store)["n/x"][:].tolist() == [1, 1, 1]
    # Later writes are visible, to zarr too.
    from_zarr(store, mode="r+")["n", "later"] = torch.zeros(3)
    assert ("n", "later") in from_zarr(store).keys(True) and "later" in zarr.open_group(store, mode="r")["n"]


# --- what is there already --------------------------------------------------------------------------------------------


def test_saving_again_replaces_what_was_saved(path: str, source: TensorDict) -> None:
    source.to_zarr(path).close()
    old = from_zarr(path)
    for _ in range(2):
        TensorDict(a=torch.ones(2), batch_size=[2]).to_zarr(path, durable=True).close()
    assert list(from_zarr(path).keys()) == ["a"] and old.batch_size == (20,)
    assert os.listdir(os.path.dirname(path)) == ["data.zarr"]


def test_what_others_wrote_is_replaced_when_asked_only(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.ones(2), batch_size=[2])
    other = tmp_path / "other.zarr"
    zarr.open_group(other, mode="w").create_array("q", shape=3, dtype="f4")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    saved = tmp_path / "saved"
    td.memmap(saved)
    more = tmp_path / "more.zarr"
    td.to_zarr(more).close()
    (more / "notes.txt").write_text("mine")
    packed = tmp_path / "packed.zip"
    td.save(packed, archive=True)
    for path, message in (
        (other, "with 'q'"),
        (folder, "a folder of other files"),
        (saved, "a saved folder"),
        (more, r"notes\.txt"),
        (packed, "a zip file"),
    ):
        before = sorted(map(str, tmp_path.rglob("*")))
        with pytest.raises(SaveError, match=f"{message}.*overwrite=True"):
            td.to_zarr(path)
        assert sorted(map(str, tmp_path.rglob("*"))) == before
        with td.to_zarr(path, overwrite=True) as data:
            assert list(data.keys()) == ["a"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(SaveError, match="which is a file"):
        td.to_zarr(tmp_path / "file", overwrite=True)
    store = MemoryStore()
    td.to_zarr(store)
    with pytest.raises(SaveError, match="overwrite=True"):
        td.to_zarr(store)
    assert list(TensorDict(b=torch.ones(1)).to_zarr(store, overwrite=True).keys()) == ["b"]


def test_modes(tmp_path: pathlib.Path) -> None:
    path, size = tmp_path / "x.zarr", {"backend": "zarr", "batch_size": [2]}
    for mode in ("r", "r+"):
        with pytest.raises(FileNotFoundError):
            PersistentTensorDict(filename=path, mode=mode, **size)
    assert not path.exists()
    PersistentTensorDict(filename=path, mode="x", **size)["a"] = torch.ones(2)
    for mode in ("x", "w-"):
        with pytest.raises(FileExistsError):
            PersistentTensorDict(filename=path, mode=mode, **size)
    assert list(PersistentTensorDict(filename=path, mode="a", **size).keys()) == ["a"]
    assert not list(PersistentTensorDict(filename=path, mode="w", **size).keys())
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "mine").write_text("x")
    for mode in ("w", "a", "r"):
        with pytest.raises(SaveError, match="no Zarr group"):
            PersistentTensorDict(filename=tmp_path / "f", mode=mode, **size)
    with pytest.raises(ValueError, match="mode must be"):
        PersistentTensorDict(filename=path, mode="rw", **size)
    assert (tmp_path / "f" / "mine").read_text() == "x"
    with pytest.raises(TypeError, match="is a path, a URL or a zarr"):
        PersistentTensorDict(filename=3, **size)


def test_a_zip_file_is_written_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.zip"
    with PersistentTensorDict(filename=path, backend="zarr", mode="w", batch_size=[3]) as data:
        data["a"], data["n", "word"] = torch.ones(3), "x"
        data.names = ["time"]
        with pytest.raises(SaveError, match="zip"):
            data.set("a", torch.zeros(3, 2), overwrite=True)
    for mode in ("r+", "a"):
        with pytest.raises(SaveError, match="zip file"):
            PersistentTensorDict(filename=path, backend="zarr", mode=mode)
    with from_zarr(path) as data:
        assert data.names == ["time"] and data["a"].tolist() == [1, 1, 1] and data["n", "word"] == "x"
    assert zarr.open_group(ZipStore(path), mode="r")["a"][:].tolist() == [1, 1, 1]


# --- the other doors --------------------------------------------------------------------------------------------------


def test_load_and_formats(tmp_path: pathlib.Path, source: TensorDict) -> None:
    for name in ("x.zarr", "x.zip"):
        source.to_zarr(tmp_path / name).close()
        assert detect_format(tmp_path / name) == "zarr"
        assert_same(TensorDict.load(tmp_path / name), source)
        assert verify(tmp_path / name).problems == []
    with TensorDict.load(tmp_path / "x.zarr", mode="r+", device="meta") as data:
        assert data["z"].device.type == "meta"
    with pytest.raises(ValueError, match="keys"):
        TensorDict.load(tmp_path / "x.zarr", keys=["z"])
    # Archives stay what they are.
    source.save(tmp_path / "y.zip", archive=True)
    assert detect_format(tmp_path / "y.zip") == "archive"


def test_handles(path: str, source: TensorDict) -> None:
    source.to_zarr(path).close()
    assert_same(from_zarr(zarr.open_group(path, mode="r")), source)
    inner = from_zarr(zarr.open_group(path, mode="r+")["b"])
    inner["c"].sum()
    inner["new"] = torch.ones(20)
    assert from_zarr(path)["b", "new"].sum() == 20
    again = PersistentTensorDict(group=zarr.open_group(path, mode="r"), backend="zarr")
    assert again.batch_size == (20,) and again["b", "word"] == "text"
    assert TensorDict.from_any(zarr.open_group(path, mode="r"))["b", "word"] == "text"


def test_clone_and_from_dict(tmp_path: pathlib.Path) -> None:
    with PersistentTensorDict.from_dict(
        {"a": [1, 2], "b": {"c": [3.0, 4.0]}}, tmp_path / "x.zarr", backend="zarr", auto_batch_size=True
    ) as data:
        assert data.batch_size == (2,) and data["b", "c"].tolist() == [3, 4]
        with data.clone(newfile=tmp_path / "y.zarr") as copy:
            copy["a"] = torch.zeros(2)
        with pytest.raises(SaveError, match="itself"):
            data.clone(newfile=tmp_path / "x.zarr")
        assert data.clone(newfile=MemoryStore())["a"].tolist() == data["a"].tolist() == [1, 2]


# --- other programs ---------------------------------------------------------------------------------------------------


def test_a_group_of_xarray_and_anndata(tmp_path: pathlib.Path) -> None:
    root = zarr.open_group(tmp_path / "x.zarr", mode="w", attributes={"Conventions": "CF-1.8"})
    for name, shape in (("temperature", (10, 4)), ("time", (10,)), ("lat", (4,))):
        root.create_array(name, data=np.ones(shape, "f4"), chunks=(2,) * len(shape), dimension_names=["d"] * len(shape))
    obs = root.create_group("obs")
    names = obs.create_array("_index", shape=(10,), dtype=str)
    names[:] = np.array([f"cell {i}" for i in range(10)], dtype=object)
    obs.create_array("age", data=np.arange(10))
    obs.create_array("when", data=np.arange(10).astype("M8[s]"))
    root.create_array("title", shape=(), dtype=str)[...] = "a title"
    with TensorDict.from_zarr(tmp_path / "x.zarr") as data:
        assert data.batch_size == () and data["temperature"].shape == (10, 4) and data["title"] == "a title"
        assert data["obs", "age"].tolist() == list(range(10))
        assert data["obs", "_index"][3] == "cell 3" and data["obs"].batch_size == (10,)
        assert data["obs", "when"].dtype == "M8[s]" and data["obs"].to_tensordict()["when"].astype(int)[3] == 3
    with TensorDict.from_zarr(tmp_path / "x.zarr", mode="r+")["obs"] as data:
        data["age"] += 1
        assert zarr.open_group(tmp_path / "x.zarr")["obs/age"][:].tolist() == list(range(1, 11))
    # On request, the batch size that fits.
    with TensorDict.from_zarr(zarr.open_group(tmp_path / "x.zarr", mode="r")["obs"], auto_batch_size=True) as data:
        assert data.batch_size == (10,)


def test_a_group_of_zarr_v2_is_read(tmp_path: pathlib.Path) -> None:
    root = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2)
    root.create_group("data").create_array("action", data=np.arange(20.0).reshape(10, 2), chunks=(3, 2))
    root.create_group("meta").create_array("episode_ends", data=np.array([4, 10]))
    texts = root.create_array("task", shape=(2,), dtype=str)
    texts[:] = np.array(["push", "pull"], dtype=object)
    root.attrs["robot"] = "x"
    with TensorDict.from_zarr(tmp_path / "x.zarr") as data:
        assert data["data"].batch_size == (10, 2) and data["data", "action"][3].tolist() == [6, 7]
        assert data["meta", "episode_ends"].tolist() == [4, 10] and data["task"] == ["push", "pull"]
    assert detect_format(tmp_path / "x.zarr") == "zarr"
    with pytest.raises(SaveError, match="v2.*mode='r'"):
        TensorDict.from_zarr(tmp_path / "x.zarr", mode="r+")


class _Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def test_nothing_is_unpickled(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.zarr" / "a").mkdir(parents=True)
    (tmp_path / "x.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    array = {"shape": [1], "chunks": [1], "dtype": "|O", "fill_value": None, "order": "C", "zarr_format": 2}
    array |= {"filters": [{"id": "pickle", "protocol": 5}], "compressor": None}
    (tmp_path / "x.zarr" / "a" / ".zarray").write_text(json.dumps(array))
    content = numcodecs.Pickle().encode(np.array([_Evil()], dtype=object))
    (tmp_path / "x.zarr" / "a" / "0").write_bytes(content)
    data = TensorDict.from_zarr(tmp_path / "x.zarr")
    with pytest.raises(UnsupportedEntryError, match="'a'.*pickled"):
        data["a"]
    assert not (tmp_path / "unpickled").exists()


# --- broken and hostile stores ----------------------------------------------------------------------------------------


def _spoil(path: str, node: str, change: Callable[[dict[str, Any]], object]) -> None:
    file = pathlib.Path(path, node, "zarr.json")
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("node", "change"),
    [
        ("", lambda d: d["attributes"].update(__tensordict__=[1])),
        ("", lambda d: d["attributes"]["__tensordict__"].update(batch_size=[-1])),
        ("", lambda d: d["attributes"]["__tensordict__"].update(batch_size=[7])),
        ("", lambda d: d["attributes"]["__tensordict__"].update(names=[3])),
        ("", lambda d: d.update(node_type="array")),
        ("", lambda d: d.update(consolidated_metadata={"metadata": {"../../x": {}}})),
        ("n", lambda d: d.update(node_type="file")),
        ("v", lambda d: d["attributes"].update(__tensordict_non_tensor__={"encoding": "pickle"})),
        ("v", lambda d: d["attributes"].update(__tensordict_non_tensor__=3)),
        ("a", lambda d: d["attributes"].update(__tensordict__={"dtype": "bfloat16"})),
    ],
)
def test_broken_documents_are_named(path: str, node: str, change: Callable[[Any], object]) -> None:
    TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}, "v": "x"}, [2]).to_zarr(path).close()
    _spoil(path, node, change)
    with pytest.raises((SaveError, UnsupportedEntryError), match=rf"'{node or 'data'}|data\.zarr"):
        from_zarr(path).to_tensordict()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff"])
def test_broken_json(path: str, content: bytes) -> None:
    TensorDict({"a": torch.ones(2), "n": {"b": torch.ones(2)}}, [2]).to_zarr(path).close()
    pathlib.Path(path, "n", "zarr.json").write_bytes(content)
    with pytest.raises(SaveError, match=r"data\.zarr"):
        from_zarr(path).to_tensordict()
    assert verify(path, raises=False).problems
    pathlib.Path(path, "zarr.json").write_bytes(content)
    with pytest.raises(SaveError, match=r"data\.zarr"):
        from_zarr(path)


def test_broken_chunks_are_named(path: str) -> None:
    TensorDict(a=torch.rand(100), b=torch.ones(2)).to_zarr(path, compressors=GzipCodec()).close()
    chunk = pathlib.Path(path, "a", "c", "0")
    chunk.write_bytes(chunk.read_bytes()[:50])
    data = from_zarr(path)
    with pytest.raises(SaveError, match=r"'a' .*data\.zarr"):
        data["a"]
    assert data["b"].tolist() == [1, 1]


# --- several processes ------------------------------------------------------------------------------------------------


def _fill(path: str, rank: int, ready: Any) -> None:
    torch.set_num_threads(1)
    with from_zarr(path, mode="r+") as data:
        ready.wait()
        for start in range(rank * 10, 400, 40):
            data[start : start + 10] = TensorDict(
                a=torch.full((10, 3), float(rank + 1)), n={"b": torch.arange(start, start + 10)}, batch_size=[10]
            )
        for number in range(5):
            data[f"by{rank}.{number}"] = torch.full((400,), rank)


@pytest.mark.parametrize("shards", [None, 10])
def test_writers_of_different_chunks_lose_nothing(path: str, shards: int | None) -> None:
    zeros = TensorDict(a=torch.zeros(400, 3), n={"b": torch.zeros(400, dtype=torch.int64)}, batch_size=[400])
    zeros.to_zarr(path, chunks=10 if shards is None else 5, shards=shards).close()
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(4)
    writers = [context.Process(target=_fill, args=(path, rank, ready)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(100)
        assert writer.exitcode == 0
    data = from_zarr(path)
    assert data["n", "b"].tolist() == list(range(400))
    assert data["a"][:, 0].tolist() == [float(row // 10 % 4 + 1) for row in range(400)]
    names = [f"by{rank}.{number}" for rank in range(4) for number in range(5)]
    assert all(data[name].eq(int(name[2])).all() for name in names)
    # Nor is what is noted in the group lost.
    noted = json.loads(pathlib.Path(path, "zarr.json").read_text())["attributes"]["__tensordict__"]
    assert sorted(noted["keys"]) == sorted(["a", "n", *names]) and noted["batch_size"] == [400]
    assert [name for name in data.keys() if name.startswith("by0")] == names[:5]


# --- the reference ----------------------------------------------------------------------------------------------------


WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
td = TensorDict({"a": torch.arange(6).view(2, 3), "b": TensorDict({"c": torch.ones(2, 4, dtype=torch.float16)}, [2, 4]),
    "text": "hello", "m": torch.tensor([True, False]), "z": torch.zeros(2, 1)}, [2], names=["time"])
td["value"] = "x"
td.to_zarr(sys.argv[1], chunks=(1,))
"""
READ = """
import sys, json, warnings
warnings.simplefilter("ignore")
from tensordict import TensorDict
data = TensorDict.from_zarr(sys.argv[1])
items = [(json.dumps(key), value) for key, value in data.items(True, True) if hasattr(value, "dtype")]
found = {key: [str(value.dtype), value.tolist()] for key, value in items}
print(json.dumps([list(data.batch_size), list(data["n"].batch_size), data.names, data["n", "word"], found]))
"""


@pytest.mark.reference
@pytest.mark.parametrize("many", [False, True])
def test_the_reference_reads_what_we_write(reference: Reference, path: str, many: bool) -> None:
    td = TensorDict(
        {"a": torch.arange(6).view(2, 3), "n": TensorDict({"x": torch.rand(2, 4), "word": "hey"}, [2, 4])},
        batch_size=[2],
        names=["t"],
    )
    for i in range(20 if many else 0):
        td[f"k{i}"] = torch.full((2,), i)
    td.to_zarr(path).close()
    size, nested, names, word, found = json.loads(reference.run(READ, path))
    assert size == [2] and nested == [2, 4] and names == ["t"] and word == "hey"
    for key, value in td.items(True, True):
        if isinstance(value, torch.Tensor):
            assert found[json.dumps(key)] == [str(value.dtype), value.tolist()], key


@pytest.mark.reference
def test_we_read_what_the_reference_writes(reference: Reference, path: str) -> None:
    reference.run(WRITE, path)
    _check_written_by_the_reference(path)


def _check_written_by_the_reference(path: Any) -> None:
    with TensorDict.from_zarr(path) as data:
        assert data.batch_size == (2,) and data["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert data["b"].batch_size == (2, 4) and data.names == ["time"]
        assert data["b", "c"].dtype is torch.float16 and data["m"].tolist() == [True, False]
        assert data["text"] == "hello" and data["value"] == "x" and data["z"].tolist() == [[0], [0]]
    # It may be replaced, as any save of ours.
    TensorDict(q=torch.ones(1)).to_zarr(path).close()


def test_arrays_of_other_programs_as_values(tmp_path: pathlib.Path) -> None:
    root = zarr.open_group(tmp_path / "x.zarr", mode="w")
    root.create_array("x", data=np.zeros((3, 2)))
    root.create_array("when", data=np.arange(3).astype("M8[s]"))
    grid = root.create_array("grid", shape=(3, 2), dtype=str)
    grid[:] = np.array([["a", "b"], ["c", "d"], ["e", "f"]])
    with TensorDict.from_zarr(tmp_path / "x.zarr", batch_size=[3]) as data:
        assert data[1]["grid"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]
    with TensorDict.from_zarr(tmp_path / "x.zarr", batch_size=[3], non_tensor_as_stack=True) as data:
        assert data[1]["when"] == datetime.datetime(1970, 1, 1, 0, 0, 1) and data[1]["grid"] == ["c", "d"]
        assert type(data.get("grid")) is NonTensorStack and data.file["when"].shape == (3,)
    with from_zarr(tmp_path / "x.zarr", batch_size=[3, 2], non_tensor_as_stack=True) as data:
        assert data["grid"] == [["a", "b"], ["c", "d"], ["e", "f"]]
    with pytest.raises(TypeError, match="exclude each other"):
        from_zarr(tmp_path / "x.zarr", batch_size=[3], auto_batch_size=True)


def test_pickled_values_on_request(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.zeros(2), v=NonTensorData({1, 2}), e=NonTensorStack({1}, "x"), batch_size=[2])
    with pytest.raises(UnsupportedEntryError, match="'v'"):
        td.to_zarr(tmp_path / "x.zarr")
    with td.to_zarr(tmp_path / "x.zarr", allow_pickle=True) as data:
        assert data["v"] == {1, 2} and data["e"] == [{1}, "x"]
    with TensorDict.from_zarr(tmp_path / "x.zarr") as data:
        assert data["a"].tolist() == [0, 0]
        for name in ("v", "e"):
            with pytest.raises(SaveError, match=f"'{name}'.*allow_pickle=True"):
                data[name]
    assert "pickled" in repr(describe_save(tmp_path / "x.zarr")[1].entries["v"].value)
    with PersistentTensorDict(filename=tmp_path / "x.zarr", backend="zarr", mode="r+", allow_pickle=True) as data:
        data["more"] = NonTensorData({3}, batch_size=[2])
        assert pickle.loads(pickle.dumps(data))["more"] == {3} and data[1]["e"] == "x"
    td.to_zarr(zarr.storage.MemoryStore(), allow_pickle=True)
    td.save(tmp_path / "y.zarr", allow_pickle=True).close()
    with TensorDict.load(tmp_path / "y.zarr", allow_pickle=True) as data:
        assert data["v"] == {1, 2}


def test_a_zip_store_of_the_caller(tmp_path: pathlib.Path) -> None:
    td = TensorDict(a=torch.arange(3), n=TensorDict(b=torch.zeros(3), batch_size=[3]), batch_size=[3])
    data = td.to_zarr(zarr.storage.ZipStore(tmp_path / "x.zip", mode="w"))
    assert (data == td).all()
    data.close()
    with TensorDict.from_zarr(zarr.storage.ZipStore(tmp_path / "x.zip", mode="r")) as data:
        assert (data == td).all() and sorted(data.keys(True, True), key=str) == [("n", "b"), "a"]


@pytest.mark.reference
def test_values_of_the_reference(reference: Reference, tmp_path: pathlib.Path) -> None:
    reference.run(
        "import sys, torch, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from tensordict import *\n"
        "td = TensorDict(a=torch.zeros(2), v=NonTensorData({1, 2}), batch_size=[2])\n"
        "try:\n    td.set('s', NonTensorStack('x', 'y')).set('n', NonTensorStack(1, 2)).to_zarr(sys.argv[1])\n"
        "except AttributeError:\n    td.exclude('s', 'n').to_zarr(sys.argv[1])  # 0.14.3 stores no stacks\n",
        tmp_path / "x.zarr",
    )
    with TensorDict.from_zarr(tmp_path / "x.zarr", allow_pickle=True) as data:
        assert data["v"] == {1, 2}
        if "s" in data:
            assert data["s"] == ["x", "y"] and data["n"] == [1, 2]
    TensorDict(a=torch.zeros(2), v=NonTensorData({3}), batch_size=[2]).to_zarr(tmp_path / "y.zarr", allow_pickle=True)
    assert "{3}" in reference.run(
        "import sys, warnings\nwarnings.simplefilter('ignore')\nfrom tensordict import TensorDict\n"
        "print(TensorDict.from_zarr(sys.argv[1])['v'])",
        tmp_path / "y.zarr",
    )
