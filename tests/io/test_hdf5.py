"""Containers over HDF5 files: what is read and written, what comes back, foreign and broken files."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from reference import Reference
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorClass,
    TensorDict,
    from_h5,
    lazy_stack,
)
from tensordict.core.exceptions import SaveError, ShapeError, UnsupportedEntryError
from tensordict.io.stores.entries import specification_in
from tensordict.io.stores.hdf5 import File

ROOT = pathlib.Path(__file__).parents[2]
SAMPLE = pathlib.Path("/work/shared/format/samples/simple.h5")
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


class Sample(TensorClass):
    """A tensorclass that is saved."""

    image: torch.Tensor
    label: Any = None


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "data.h5")


@pytest.fixture
def source() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(60).view(20, 3), "b": {"c": torch.rand(20, 2, 2)}, "flag": torch.arange(20) % 3 == 0},
        batch_size=[20],
    )


@pytest.fixture
def data(source: TensorDict, path: str) -> Iterator[Any]:
    with source.to_h5(path) as data:
        yield data


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements each read of a dataset took."""
    taken: list[int] = []
    original = h5py.Dataset.__getitem__

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        taken.append(np.size(found))
        return found

    monkeypatch.setattr(h5py.Dataset, "__getitem__", counting)
    return taken


# --- what is read -----------------------------------------------------------------------------------------------------


def problems_of(path: Any) -> list[str]:
    found: list[str] = []
    with contextlib.closing(File.open(path, "r")) as file:
        try:
            specification_in(file.root, lambda error: found.append(str(error)))
        except SaveError as error:
            found.append(str(error))
    return found


def test_looking_reads_no_tensors(data: Any, reads: list[int]) -> None:
    assert "a: Tensor(shape=torch.Size([20, 3]), device=cpu, dtype=torch.int64" in repr(data)
    assert set(data.keys(True, True)) == {"a", ("b", "c"), "flag"}
    assert data.batch_size == (20,) and data["b"].batch_size == (20,) and len(data) == 20
    assert data.get_item_shape(("b", "c")) == (20, 2, 2) and data.entry_class("a") is torch.Tensor
    assert data.bytes() == 60 * 8 + 80 * 4 + 20 and data.depth == 1 and not data.is_empty()
    data.lock_().unlock_()
    data.batch_size = []
    data.auto_batch_size_(1)
    data.select("a", ("b", "c")).exclude("a")
    data.rename_key_("a", ("b", "a"))
    assert reads == []


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (3, 1),
        (-1, 1),
        (slice(2, 5), 3),
        (slice(1, 20, 5), 4),
        (slice(5, 5), 0),
        (None, 20),
        ([7, 7, 7], 1),
        ([19, 0], 2),
        (torch.tensor([4, 3, 4, 5]), 3),
        (torch.tensor([[19, 0], [0, 10]]), 3),
        (torch.arange(20) == 4, 1),
        (np.array([1, 2]), 2),
    ],
)
def test_an_index_reads_what_it_takes(data: Any, source: TensorDict, reads: list[int], index: Any, rows: int) -> None:
    view = data[index]
    assert view.batch_size == source[index].batch_size and set(view.keys()) == set(source.keys())
    assert view["b"].batch_size == view.batch_size and "FileView" in repr(view) and reads == []
    found = view.to_tensordict()
    assert sorted(reads) == ([rows, 3 * rows, 4 * rows] if rows else [])
    assert type(found) is TensorDict and (found == source[index]).all()
    reads.clear()
    assert torch.equal(view["b", "c"], source["b", "c"][index])
    assert reads == ([4 * rows] if rows else [])
    reads.clear()
    assert torch.equal(data.get_at(("b", "c"), index), source["b", "c"][index])
    assert reads == ([4 * rows] if rows else [])


def test_a_part_of_a_selection_reads_what_it_takes(data: Any, source: TensorDict, reads: list[int]) -> None:
    part = data.select("a").exclude("flag")[5:7]
    assert reads == [] and torch.equal(part["a"], source["a"][5:7]) and reads == [6]


def test_writes_write_what_they_change(data: Any, source: TensorDict, reads: list[int]) -> None:
    data[3] = {"a": torch.zeros(3, dtype=torch.int64)}
    data[[7, 5, 5]] = source[[0, 1, 1]]
    data.set_at_("flag", True, slice(0, 2))
    data.update_({("b", "c"): torch.ones(20, 2, 2)})
    assert sum(reads) <= 2, "only the two flags, which `fill_` writes into"
    source[3] = {"a": torch.zeros(3, dtype=torch.int64)}
    source[[7, 5]] = source[[0, 1]].clone()
    source["flag"][:2] = True
    source["b", "c"] = torch.ones(20, 2, 2)
    assert (data == source).all()


def test_random_minibatches(data: Any, source: TensorDict) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 64):
        index = torch.randint(-20, 20, (size,), generator=generator)
        assert (data[index] == source[index]).all()
        assert (data.__getitems__(index.tolist()) == source[index]).all()


@pytest.mark.parametrize("index", [20, -21, [0, 20], torch.tensor([-21]), torch.tensor([0.5])])
def test_out_of_bounds(data: Any, source: TensorDict, index: Any) -> None:
    with pytest.raises(IndexError):
        data[index]
    with pytest.raises(IndexError):
        data[index] = 0
    assert (data == source).all()


def test_in_place_operations_reach_the_file(data: Any, source: TensorDict, path: str) -> None:
    data.select("a", ("b", "c")).mul_(2).add_(data.select("a", ("b", "c")).clone())
    data["b"].apply_(lambda x: x + 1)
    data["b"].apply(lambda x: x.mul_(10), inplace=True)
    data.masked_fill_(torch.arange(20) < 2, 0)
    data.close()
    source.select("a", ("b", "c")).mul_(4)
    source["b", "c"].add_(1).mul_(10)
    source.masked_fill_(torch.arange(20) < 2, 0)
    with TensorDict.from_h5(path) as again:
        assert (again == source).all()


def test_gradients_are_those_of_what_was_read(path: str) -> None:
    weight = torch.ones(3, requires_grad=True)
    with TensorDict(x=torch.tensor([1.0, 2.0, 3.0])).to_h5(path) as data:
        product = (data * TensorDict(x=weight))["x"].sum()
        data.zero_()
    product.backward()
    assert weight.grad is not None and weight.grad.tolist() == [1, 2, 3]


def test_inference_mode(data: Any) -> None:
    with torch.inference_mode():
        data["b"].apply_(lambda x: x.zero_())
    assert not data["b", "c"].any()


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (3, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_shapes(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    bits = torch.arange(count) % (2 if dtype is torch.bool else 100)
    value = (
        bits.to(torch.uint8).view(dtype).reshape(shape) if shape else torch.ones(dtype.itemsize).byte().view(dtype)[0]
    )
    TensorDict(x=value, batch_size=shape[:1]).to_h5(path).close()
    with TensorDict.from_h5(path, mode="r+") as again:
        found = again["x"]
        assert found.dtype is dtype and found.shape == value.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
        again.set_("x", value)
        if shape == (3, 2):
            assert torch.equal(again[:2]["x"].reshape(-1).view(torch.uint8), value[:2].reshape(-1).view(torch.uint8))


def test_state_and_values(path: str) -> None:
    td = TensorDict(
        {
            "text": "a \u00e9",
            "none": None,
            "json": NonTensorData({"x": (1, float("inf")), "y": [True, None]}, batch_size=[2, 3]),
            "stack": NonTensorStack(NonTensorStack("a", 1, 2.5), NonTensorStack("d", "e", "f")),
            "in/side": {"": torch.zeros(2, 3), ".": torch.ones(2, 3), "_%a": torch.ones(2, 3, 1)},
            "deep": TensorDict({"x": torch.zeros(2, 3, 4)}, [2, 3, 4], names=["a", "b", "c"]),
        },
        batch_size=[2, 3],
        names=["a", "b"],
    )
    td.to_h5(path).close()
    with TensorDict.from_h5(path) as again:
        assert list(again.keys()) == list(td.keys()) and list(again["in/side"].keys()) == ["", ".", "_%a"]
        assert again["text"] == "a \u00e9" and again["none"] is None
        assert again["json"] == {"x": (1, float("inf")), "y": [True, None]}
        assert again.get("stack").tolist() == [["a", 1, 2.5], ["d", "e", "f"]]
        assert again.names == ["a", "b"] and again["deep"].names == ["a", "b", "c"]
        assert again["deep"].batch_size == (2, 3, 4) and again.batch_size == (2, 3)
        assert again[1]["stack"] == ["d", "e", "f"]


def test_tensorclasses(path: str) -> None:
    sample = Sample(image=torch.rand(4, 2), label=torch.arange(4), batch_size=[4])
    with TensorDict(inside=sample, batch_size=[4]).to_h5(path) as data:
        assert type(data["inside"]) is Sample and torch.equal(data["inside"].image, sample.image)
        data["inside"].label = torch.zeros(4)
        assert type(data[1]["inside"]) is Sample and data[1]["inside"].label == 0
    with sample.to_h5(path) as direct:
        assert type(direct) is Sample and type(direct[:2]) is Sample and direct[:2].label.tolist() == [0, 1]
    with h5py.File(path, "r+") as file:
        file.attrs["_class"] = np.bytes_(b"os.system")
    with pytest.raises(UnsupportedEntryError, match=r"os\.system"):
        TensorDict.from_h5(path)


def test_lazy_stacks(path: str) -> None:
    stack = lazy_stack([TensorDict(a=torch.full((2,), i), b=TensorDict(c=torch.ones(1))) for i in range(3)])
    with stack.to_h5(path) as data:
        assert type(data) is PersistentTensorDict and torch.equal(data["a"], stack["a"])
        assert data.batch_size == (3,) and data["b", "c"].shape == (3, 1)
    uneven = LazyStackedTensorDict(TensorDict(a=torch.zeros(2)), TensorDict(a=torch.zeros(3)))
    before = pathlib.Path(path).read_bytes()
    with pytest.raises(UnsupportedEntryError, match=r"\('n', 'a'\)|'n.a'"):
        TensorDict(n=uneven).to_h5(path)
    assert pathlib.Path(path).read_bytes() == before


def test_a_lazy_stack_of_files_is_one_dataset(tmp_path: pathlib.Path, reads: list[int]) -> None:
    parts = [TensorDict(a=torch.arange(6).view(3, 2) + i, batch_size=[3]).to_h5(tmp_path / f"{i}.h5") for i in range(2)]
    stack = lazy_stack(parts)
    assert stack.batch_size == (2, 3) and torch.equal(stack[1, 2]["a"], torch.tensor([5, 6]))
    assert reads == [2]
    stack.zero_()
    assert not parts[0]["a"].any() and not parts[1]["a"].any()


def test_state_that_is_set_is_kept(data: Any, path: str) -> None:
    data.batch_size = []
    data["b"].batch_size = [20, 2]
    data["b"].names = ["rows", None]
    data.close()
    with TensorDict.from_h5(path) as again:
        assert again.batch_size == () and again["b"].batch_size == (20, 2) and again["b"].names == ["rows", None]
    with TensorDict.from_h5(path, auto_batch_size=True, batch_dims=1) as again:
        assert again.batch_size == (20,)
    with TensorDict.from_h5(path, batch_size=[20]) as again:
        assert again.batch_size == (20,) and again["b"].batch_size == (20, 2)


def test_memmap_and_back(data: Any, source: TensorDict, tmp_path: pathlib.Path) -> None:
    mapped = data.memmap(tmp_path / "saved")
    assert (mapped == source).all() and (data.memmap() == source).all()
    with mapped.to_h5(tmp_path / "again.h5", chunks=4, compression="gzip") as again:
        assert (again == source).all()
        assert again._group.object["a"].chunks == (4, 3) and again._group.object["b/c"].compression == "gzip"
        again["new"] = torch.zeros(20)
        assert again._group.object["new"].chunks == (4,)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_failing_writes_change_nothing(data: Any, source: TensorDict) -> None:
    for value in (object(), torch.eye(20).to_sparse(), {"x": torch.zeros(20), "y": object()}):
        with pytest.raises((UnsupportedEntryError, SaveError), match="'new'|'y'|'new.y'"):
            data["new"] = value
        with pytest.raises((UnsupportedEntryError, SaveError)):
            data.update({"a": torch.zeros(20, 3), "new": value})
    with pytest.raises(RuntimeError):
        data["a"] = torch.zeros(3)
    with pytest.raises(RuntimeError):
        data[0] = {"a": torch.zeros(4), "flag": True}
    assert (data == source).all() and list(data.keys()) == list(source.keys())


def test_replacing(data: Any) -> None:
    kept = data._group.object["a"].id
    data["a"] = torch.zeros(20, 3, dtype=torch.int64)
    assert data._group.object["a"].id == kept, "written into the dataset that is there"
    data["a"] = torch.full((20, 1), 1.7)
    assert data["a"].eq(1).all() and data["a"].dtype is torch.int64 and data["a"].shape == (20, 3)
    for write in (data.__setitem__, data.set, lambda key, value: data.update({"flag": torch.ones(20), key: value})):
        with pytest.raises(ShapeError, match=r"'a'.*\[20, 3\].*\[20, 4\].*overwrite=True"):
            write("a", torch.zeros(20, 4))
        assert data["a"].eq(1).all()
    data.set("a", torch.zeros(20, 4), overwrite=True)
    assert data["a"].shape == (20, 4) and data["a"].dtype is torch.float32
    data["a"] = {"x": torch.ones(20)}
    data["b"] = torch.ones(20)
    assert data["a", "x"].all() and data["b"].all()
    nested = data["a"]
    data.rename_key_("a", ("c", "d"))
    data["c", "d", "x"] = torch.zeros(20)
    assert not nested["x"].any() and "a" not in data
    with pytest.raises(SaveError, match="nested in itself"):
        data["c", "d", "self"] = data["c"]
    data.create_nested("new")["new"].set("y", torch.ones(20))
    assert data["new", "y"].all()


def test_files_are_replaced_whole(source: TensorDict, path: str, tmp_path: pathlib.Path) -> None:
    source.to_h5(path).close()
    before = pathlib.Path(path).read_bytes()
    with pytest.raises(UnsupportedEntryError, match="'x'"):
        TensorDict(a=torch.zeros(3), x=object()).to_h5(path)
    with pytest.raises(TypeError, match="compresion"):
        source.to_h5(path, compresion="gzip")
    with pytest.raises(ValueError, match=r"'a'.*chunks"):
        source.to_h5(path, chunks=(1,))
    assert pathlib.Path(path).read_bytes() == before and os.listdir(tmp_path) == ["data.h5"]
    with TensorDict.from_h5(path) as reader:
        source.zero_().to_h5(path).close()
        assert reader["a"].any(), "who has the old file open keeps it"
    with pytest.raises(FileNotFoundError, match="absent"):
        source.to_h5(tmp_path / "absent" / "data.h5")


def test_reading_only(data: Any, source: TensorDict, path: str) -> None:
    data.close()
    with TensorDict.from_h5(path) as again:
        for write in (
            lambda: again.set("a", torch.zeros(20, 3)),
            lambda: again.set_("a", torch.zeros(20, 3)),
            lambda: again.del_("a"),
            lambda: again.__setitem__(0, source[0]),
            lambda: again.rename_key_("a", "z"),
            again.zero_,
        ):
            with pytest.raises(SaveError, match=r"mode='r\+'"):
                write()
        again.batch_size = []
        assert again.batch_size == ()
    with TensorDict.from_h5(path) as again:
        assert (again == source).all()


def test_device(data: Any, path: str) -> None:
    assert data.device is None
    data.close()
    with TensorDict.from_h5(path, device="cpu") as again:
        assert again.device == torch.device("cpu") == again["b"].device == again[0].device
    with TensorDict.from_h5(path) as again:
        moved = again.to("meta")
        assert moved["a"].is_meta and moved[0]["b", "c"].is_meta and moved.device.type == "meta"


# --- the file ---------------------------------------------------------------------------------------------------------


def test_closing(data: Any) -> None:
    nested, part = data["b"], data.select("a")
    with data:
        pass
    data.close()
    assert "closed" in repr(data)
    for use in (
        lambda: data["a"],
        lambda: nested["c"],
        lambda: data[0]["a"],
        lambda: part["a"],
        lambda: list(data.keys()),
    ):
        with pytest.raises(SaveError, match="was closed"):
            use()
    assert data.batch_size == (20,)


def test_modes(path: str, tmp_path: pathlib.Path) -> None:
    with PersistentTensorDict(filename=path, mode="w", batch_size=[2], compression="gzip") as data:
        data["a"] = torch.ones(2, 2)
        data["n", "s"] = torch.tensor([1, 2])
        assert data._group.object["a"].compression == "gzip"
    with pytest.raises(FileExistsError, match="data.h5"):
        PersistentTensorDict(filename=path, mode="x")
    with PersistentTensorDict(filename=path, mode="a", batch_size=[2]) as data:
        assert data["n"].batch_size == (2,)
    with PersistentTensorDict(filename=path, group="n") as data:
        assert data["s"].tolist() == [1, 2]
    with h5py.File(path) as file, PersistentTensorDict(group=file["n"], batch_size=[2]) as data:
        assert data[1]["s"] == 2 and from_h5(file)["a"].all()
    with pytest.raises(ValueError, match=r"'a'.*\[2, 2\].*\[3\]"):
        PersistentTensorDict(filename=path, batch_size=[3])
    with PersistentTensorDict(filename=path, batch_size=[3], validate_batch_size=False) as data:
        assert data.batch_size == (3,)
    with pytest.raises(FileNotFoundError, match="absent.h5"):
        TensorDict.from_h5(tmp_path / "absent.h5")
    for wrong, error in (
        ({"filename": path, "mode": "q"}, ValueError),
        ({"filename": path, "backend": "zarr"}, ValueError),
        ({}, RuntimeError),
        ({"filename": path, "group": "absent"}, KeyError),
        ({"filename": path, "chunk": 3}, TypeError),
    ):
        with pytest.raises(error):
            PersistentTensorDict(**wrong)
    with h5py.File(path, "r+"):
        pass  # A failed call has closed the file.


def test_locking(source: TensorDict, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import h5py, sys; h5py.File(sys.argv[1], 'r+')"
    with source.to_h5(path):
        assert subprocess.run([sys.executable, "-c", program, path], capture_output=True, check=False).returncode
    monkeypatch.setattr(PersistentTensorDict, "LOCKING", False)
    with TensorDict.from_h5(path, mode="r+"):
        subprocess.run([sys.executable, "-c", program, path], check=True)


def test_pickling(data: Any, source: TensorDict, path: str) -> None:
    data.lock_()
    again = pickle.loads(pickle.dumps(data))
    assert type(again) is PersistentTensorDict and again.is_locked and (again == source).all()
    assert torch.equal(pickle.loads(pickle.dumps(data["b"]))["c"], source["b", "c"])
    assert type(pickle.loads(pickle.dumps(data.select("a")))) is TensorDict
    data.close()
    with pytest.raises(SaveError, match="closed"):
        pickle.dumps(data)


def _identity(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(("method", "mode"), [("fork", "r"), ("fork", "r+"), ("spawn", "r")])
def test_data_loader(data: Any, source: TensorDict, path: str, method: str, mode: str) -> None:
    data.close()
    with TensorDict.from_h5(path, mode=mode) as again:
        if mode == "r+":
            again["a"] = source["a"] = torch.randint(100, (20, 3))
        loader = DataLoader(
            again, batch_size=6, num_workers=2, collate_fn=_identity, multiprocessing_context=method, shuffle=False
        )
        assert (torch.cat(list(loader)) == source).all()
        assert (again == source).all()


def _written_by_child(data: Any, found: Any) -> None:
    try:
        data["a"] = torch.zeros(20, 3)
    except SaveError as error:
        found.put(str(error))


def test_a_forked_process_does_not_write(data: Any) -> None:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    child = context.Process(target=_written_by_child, args=(data, found))
    child.start()
    assert "only that process" in found.get(timeout=60)
    child.join()


# --- files of others --------------------------------------------------------------------------------------------------


def test_foreign_files(path: str, tmp_path: pathlib.Path) -> None:
    with h5py.File(path, "w") as file:
        file["big"] = np.arange(6, dtype=">i4").reshape(2, 3)
        file["g/x"] = np.ones((2, 3, 4))
        file["text"] = "hello"
        file["fixed"] = np.bytes_("bytes")
        file["enum"] = np.array([True, False])
        file["soft"] = h5py.SoftLink("/g")
        file["odd"] = np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])
        file["names"] = ["x", "y"]
        file["null"] = h5py.Empty("f4")
        file["reference"] = np.array([file["big"].ref, file["big"].ref], dtype=h5py.ref_dtype)
        file["type"] = np.dtype("f4")
        file["dangling"] = h5py.SoftLink("/absent")
    with TensorDict.from_h5(path) as data:
        assert data.batch_size == (2,) and data["g"].batch_size == (2, 3, 4)
        assert torch.equal(data["big"], torch.arange(6, dtype=torch.int32).view(2, 3))
        assert data["text"] == "hello" and data["fixed"] == "bytes" and data["enum"].tolist() == [True, False]
        assert data["soft", "x"].shape == (2, 3, 4) and "names: NonTensorData" in repr(data)
        assert type(data.get("names")) is NonTensorData and data["names"].tolist() == [b"x", b"y"]
        odd = ["odd", "null", "reference", "type", "dangling"]
        assert set(odd) < set(data.keys())
        for name in odd:
            assert f"{name}: NonTensorData" in repr(data)
            with pytest.raises(UnsupportedEntryError, match=f"'{name}'.*data.h5"):
                data[name]
        with pytest.raises(UnsupportedEntryError):
            data[0].to_tensordict()
        assert data[1]["big"].tolist() == [3, 4, 5]
        assert data.exclude(*odd)[1]["big"].tolist() == [3, 4, 5]
        assert data.select("big", "g").to_tensordict()["g", "x"].all()
    with TensorDict.from_h5(path, batch_dims=1, non_tensor_as_stack=True) as data:
        assert data["g"].batch_size == (2,)
        assert data["names"] == [b"x", b"y"] and data[1]["names"] == b"y"
        assert pickle.loads(pickle.dumps(data))["names"] == [b"x", b"y"]


def test_links_out_of_the_file_are_not_followed(path: str, tmp_path: pathlib.Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.ones(2)
    (tmp_path / "secret.bin").write_bytes(bytes(16))
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(2)
        file["external"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/x")
        file["through"] = h5py.SoftLink("/group/x")
        file["group"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/")
        file.create_dataset("raw", (2,), "f8", external=[(str(tmp_path / "secret.bin"), 0, 16)])
        layout = h5py.VirtualLayout((2,), "f8")
        layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "x", (2,))
        file.create_virtual_dataset("virtual", layout)
    with TensorDict.from_h5(path) as data:
        assert data["x"].tolist() == [0, 0]
        for name in ("external", "through", "group", "raw", "virtual"):
            with pytest.raises(UnsupportedEntryError, match=name):
                data[name]


def test_groups_in_themselves(path: str) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("a/b")
        file["a/b/again"] = file["a"]
    with pytest.raises(SaveError, match="nested in itself"):
        TensorDict.from_h5(path)
    assert any("nested in itself" in line for line in problems_of(path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_batch_size", [-1]),
        ("_batch_size", [[2]]),
        ("_batch_size", [0.5]),
        ("_batch_size", [3]),
        ("_batch_size", "text"),
        ("_names", "no json"),
        ("_names", "[1]"),
        ("_names", 3),
    ],
)
def test_attributes_that_do_not_add_up(source: TensorDict, path: str, name: str, value: Any) -> None:
    source.to_h5(path).close()
    assert list(problems_of(path)) == []
    with h5py.File(path, "r+") as file:
        file.attrs[name] = value
    with pytest.raises(SaveError, match=r"data\.h5"):
        TensorDict.from_h5(path)
    assert list(problems_of(path))


@pytest.mark.parametrize("noted", ["float8_e4m3fn", "nonsense", 3])
def test_dtypes_that_do_not_add_up(path: str, noted: Any) -> None:
    TensorDict(x=torch.ones(4, dtype=torch.bfloat16)).to_h5(path).close()
    with h5py.File(path, "r+") as file:
        file["x"].attrs["_dtype"] = noted
    with pytest.raises(SaveError, match="'x'"):
        TensorDict.from_h5(path)
    assert len(list(problems_of(path))) == 1


@pytest.mark.parametrize("content", ["{", '{"%tuple": 3}', "[" * 100_000])
def test_values_that_do_not_add_up(path: str, content: str) -> None:
    TensorDict(x={"y": NonTensorData([1])}).to_h5(path).close()
    with h5py.File(path, "r+") as file:
        file["x/y"][()] = content
    with TensorDict.from_h5(path, batch_size=[]) as data, pytest.raises(SaveError, match="x.*y"):
        data["x", "y"]


def test_broken_files(source: TensorDict, path: str, tmp_path: pathlib.Path) -> None:
    source.to_h5(path).close()
    content = pathlib.Path(path).read_bytes()
    for length in (0, 10, 100, 1000, len(content) // 2, len(content) - 1):
        (tmp_path / "broken.h5").write_bytes(content[:length])
        with pytest.raises(SaveError, match="broken.h5"), TensorDict.from_h5(tmp_path / "broken.h5") as data:
            data.to_tensordict()
    with pytest.raises((SaveError, IsADirectoryError)):
        TensorDict.from_h5(tmp_path)


# --- exchange with the reference --------------------------------------------------------------------------------------

READ = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tensordict import TensorDict
td = TensorDict.from_h5(sys.argv[1])
print(json.dumps([
    list(td.batch_size),
    {json.dumps(key): [str(x.dtype), x.tolist()] for key, x in td.items(True, True) if hasattr(x, "dtype")},
]))
"""

WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
td = TensorDict({"a": torch.arange(6).view(2, 3), "b": {"c": torch.ones(2, dtype=torch.float16)}}, [2])
td["b", "mask"] = torch.tensor([True, False])
td["z"] = torch.complex(torch.ones(2, 1), torch.zeros(2, 1))
td.to_h5(sys.argv[1], compression="gzip").close()
data = TensorDict.from_h5(sys.argv[1], mode="r+")
data["text"] = "hello"
data.close()
"""


@pytest.mark.reference
def test_the_reference_reads_what_we_write(reference: Reference, path: str) -> None:
    td = TensorDict(
        {"a": torch.arange(6).view(2, 3), "n": {"x": torch.rand(2, 2), "half": torch.ones(2, dtype=torch.bfloat16)}},
        batch_size=[2],
        names=["t"],
    )
    td["n", "mask"] = torch.tensor([True, False])
    td.to_h5(path).close()
    size, found = json.loads(reference.run(READ, path))
    assert size == [2]
    for key, value in td.items(True, True):
        dtype, content = found[json.dumps(key)]
        if value.dtype is torch.bfloat16:
            value = value.view(torch.uint16)
        assert dtype == str(value.dtype) and content == value.tolist(), key


@pytest.mark.reference
def test_we_read_what_the_reference_writes(reference: Reference, path: str) -> None:
    reference.run(WRITE, path)
    with TensorDict.from_h5(path) as data:
        assert data.batch_size == (2,) and data["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert data["b", "c"].dtype is torch.float16 and data["b", "mask"].tolist() == [True, False]
        assert data["z"].dtype is torch.complex64 and data["text"] == "hello"


@pytest.mark.skipif(not SAMPLE.exists(), reason="the samples of the format lie beside this checkout")
def test_sample() -> None:
    with TensorDict.from_h5(SAMPLE) as data:
        assert (
            data.batch_size == (2,)
            and data["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
            and data["b", "c"].tolist() == [1, 1]
        )
    assert list(problems_of(SAMPLE)) == []


def test_values_follow_the_batch_size(path: str) -> None:
    td = TensorDict({"a": torch.ones(2, 3), "v": "x", "n": {"b": torch.ones(2, 3), "w": "y"}}, [2])
    with td.to_h5(path) as data:
        for size in ((2, 3), (2,), ()):
            data.batch_size = size
            assert data["v"] == "x" and data.get("v").batch_size[: len(size)] == size
    with TensorDict.from_h5(path, batch_size=[2, 3]) as data:
        assert data["n", "w"] == "y" and data.get("v").batch_size == (2, 3)


def test_from_dict(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.h5"
    source = TensorDict(a=torch.arange(6).view(2, 3), b={"c": "text"}, batch_size=[2])
    with PersistentTensorDict.from_dict(source, path) as data:
        assert type(data) is PersistentTensorDict and data.batch_size == (2,) and data.device is None
        assert data["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and data["b", "c"] == "text"
        data["d"] = torch.ones(2)
    mapping = {"a": [[1, 2], [3, 4]], "b": {"c": [1, 2]}}
    # The file is replaced.
    with PersistentTensorDict.from_dict(mapping, path, auto_batch_size=True, device="meta", compression="gzip") as data:
        assert data.batch_size == (2,) and set(data.keys()) == {"a", "b"}
        assert data["a"].device.type == "meta" and data.device == torch.device("meta")
    with PersistentTensorDict.from_dict({"a": torch.zeros(2, 3)}, path, batch_dims=1, compression="gzip") as data:
        assert data.batch_size == (2,) and data.kwargs == {"compression": "gzip"}
        assert data.filename == str(path) and data.mode == "r+" and type(data.file) is h5py.File
    with PersistentTensorDict.from_dict(mapping, path, batch_size=[2]) as data:
        assert data.batch_size == (2,) and data["b"].batch_size == (2,) and data["b", "c"].tolist() == [1, 2]
    with PersistentTensorDict.from_dict(mapping, path) as data:
        assert data.batch_size == (2,)
    for arguments in ({"backend": "zarr"}, {"batch_size": [3]}, {"device": "nothing"}):
        with pytest.raises((ValueError, RuntimeError)):
            PersistentTensorDict.from_dict({"a": [1, 2]}, path, **arguments)
    with PersistentTensorDict(filename=path) as data:
        assert set(data.keys()) == {"a", "b"}


def test_clone_to_a_new_file(tmp_path: pathlib.Path) -> None:
    source = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3)}, "word": "x"}, [3], names=["time"])
    with source.to_h5(tmp_path / "x.h5", compression="gzip") as data:
        with data.clone(newfile=tmp_path / "y.h5") as copy:
            assert type(copy) is PersistentTensorDict and copy["word"] == "x" and copy.names == ["time"]
            assert copy._options == data._options
            copy["a"] = torch.zeros(3, dtype=torch.int64)
            with pytest.raises(ValueError, match=r"y\.h5.*itself"):
                copy.clone(newfile=str(tmp_path / "y.h5"))
        assert data["a"].tolist() == [0, 1, 2]
        with data["b"].clone(False, newfile=tmp_path / "z.h5") as part:
            assert list(part.keys()) == ["c"] and part.batch_size == torch.Size([3])
        assert type(data.clone()) is TensorDict
    with TensorDict.from_h5(tmp_path / "y.h5") as again:
        assert again["a"].tolist() == [0, 0, 0] and again["b", "c"].tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="newfile"):
        source.clone(newfile=tmp_path / "w")


def test_ragged_entries_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(UnsupportedEntryError, match=r"'r': an HDF5 file holds no ragged tensor.*memmap"):
        TensorDict({"r": rows}, [2]).to_h5(tmp_path / "x")
    stack = lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 2)])
    with pytest.raises(UnsupportedEntryError, match=r"\('n', 'x'\) has different shapes .*memmap"):
        TensorDict({"n": stack}).to_h5(tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_a_pickle_says_the_kind_of_store(tmp_path: pathlib.Path) -> None:
    with TensorDict(a=torch.arange(3)).to_h5(tmp_path / "x.h5") as data:
        state = data.__getstate__()
    assert state.pop("backend") == "h5"
    with pytest.raises(ValueError, match="the backend is 'h5' or 'zarr', got 'x'"):
        PersistentTensorDict.__new__(PersistentTensorDict).__setstate__({**state, "backend": "x"})


def test_rows_have_the_names_of_their_dims_at_every_depth(tmp_path: pathlib.Path) -> None:
    inner = TensorDict({"o": TensorDict({"a": torch.zeros(2, 3, 4)}, [2, 3, 4])}, [2, 3])
    stored = TensorDict({"n": inner}, [2], names=["t"]).to_h5(tmp_path / "x.h5")
    rows = stored[:1]
    assert [part.names for part in (rows, rows["n"], rows["n", "o"])] == [["t"], ["t", None], ["t", None, None]]
    assert rows["n", "o"].batch_size == (1, 3, 4)
