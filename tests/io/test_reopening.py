"""Open-or-create: what the calls that make tensors without content do where there are some."""

from __future__ import annotations

import os
import pathlib
import re
import zipfile
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, NonTensorStack, TensorDict, UnbatchedTensor, lazy_stack, tensorclass
from tensordict.core.errors import SaveError
from tensordict.io import archive, directory

pytest.importorskip("h5py")


@tensorclass
class Item:
    obs: torch.Tensor
    name: str


def make(value: float = 1.0, length: int = 3) -> TensorDict:
    return TensorDict({"a": torch.full((length,), value), "b": {"c": torch.full((length, 2), value)}}, [length])


# How to open or make a container like this one at a path, and how to read what is there.
PLACES: dict[str, Any] = {
    "folder": ("save", lambda td, path, **options: td.memmap_like(path, **options), TensorDict.load_memmap),
    "archive": ("save.tdz", lambda td, path, **options: td.memmap_like(path, **options), TensorDict.load_memmap),
    "schema, folder": (
        "save",
        lambda td, path, **options: TensorDict.from_schema(
            schema_of(td), batch_size=td.batch_size, storage="memmap", prefix=path, **options
        ),
        TensorDict.load_memmap,
    ),
    "schema, HDF5": (
        "save.h5",
        lambda td, path, **options: TensorDict.from_schema(
            schema_of(td), batch_size=td.batch_size, storage="h5", filename=path, **options
        ),
        TensorDict.from_h5,
    ),
    "schema, Zarr": (
        "save.zarr",
        lambda td, path, **options: TensorDict.from_schema(
            schema_of(td), batch_size=td.batch_size, storage="zarr", filename=path, **options
        ),
        TensorDict.from_zarr,
    ),
}


def schema_of(td: TensorDict) -> dict[Any, Any]:
    return {key: (value.shape[1:], value.dtype) for key, value in td.items(True, True)}


def opened(place: str, td: TensorDict, folder: pathlib.Path, **options: Any) -> TensorDict:
    """What the call gives, as it is in memory."""
    name, call, _ = PLACES[place]
    made = call(td, folder / name, **options)
    result = made.to_tensordict()
    if place.endswith("HDF5"):
        made.close()
    return result


def fill(place: str, folder: pathlib.Path, value: float) -> None:
    name, call, _ = PLACES[place]
    made = call(make(), folder / name)
    for key in ("a", ("b", "c")):
        made.set_(key, torch.full_like(made.get(key), value))
    if place.endswith("HDF5"):
        made.close()


def written_by_us(place: str, folder: pathlib.Path) -> TensorDict:
    name, _, load = PLACES[place]
    loaded = load(folder / name)
    result = loaded.to_tensordict()
    if place.endswith("HDF5"):
        loaded.close()
    return result


OTHERS = {
    "longer": (make(length=4), r"batch size \[3\] in the save, and \[4\] is asked for"),
    "shorter": (make(length=2), r"'a' has shape \[3\] in the save, and \[2\] is asked for"),
    "dtype": (make().double(), r"'a' has dtype torch.float32 in the save, and torch.float64 is asked for"),
    "more": (make().set(("b", "more"), torch.ones(3)), r"\('b', 'more'\) is not in the save"),
    "fewer": (make().exclude(("b", "c")).set(("b", "d"), torch.ones(3, 2)), r"\('b', 'c'\) is in the save only"),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_there_is_kept(place: str, tmp_path: pathlib.Path) -> None:
    assert (opened(place, make(), tmp_path) == 0).all()
    fill(place, tmp_path, 7.0)
    assert (opened(place, make(), tmp_path) == 7).all()
    assert (opened(place, make(), tmp_path, overwrite=True) == 0).all()
    assert (written_by_us(place, tmp_path) == 0).all()


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("place", PLACES)
def test_another_structure_is_refused(place: str, other: str, tmp_path: pathlib.Path) -> None:
    opened(place, make(), tmp_path)
    fill(place, tmp_path, 7.0)
    td, what = OTHERS[other]
    with pytest.raises(SaveError, match=what + r".*overwrite=True"):
        opened(place, td, tmp_path)
    assert (written_by_us(place, tmp_path) == 7).all()
    assert len(os.listdir(tmp_path)) == 1
    assert opened(place, td, tmp_path, overwrite=True).keys(True, True) == td.keys(True, True)


@pytest.mark.parametrize("suffix", ["", ".tdz"])
def test_every_kind_of_entry(suffix: str, tmp_path: pathlib.Path) -> None:
    """Values are those of the save, ragged rows must have its lengths."""

    def spec(word: str, *lengths: int) -> TensorDict:
        rows = torch.nested.nested_tensor([torch.ones(n) for n in lengths], layout=torch.jagged)
        item = Item(obs=torch.zeros(2, 2), name=word, batch_size=[2])
        lazy = lazy_stack([TensorDict(x=torch.zeros(n)) for n in (1, 3)])
        return TensorDict(
            {
                "a": torch.zeros(2),
                "rows": rows,
                "item": item,
                "lazy": lazy,
                "word": word,
                "words": NonTensorStack(word, word),
                "own": UnbatchedTensor(torch.zeros(4)),
            },
            [2],
            names=["time"],
        )

    path = tmp_path / f"save{suffix}"
    first = spec("old", 1, 2).memmap_like(path)
    for key in ("a", ("item", "obs")):
        first[key].fill_(7)
    first["rows"].values().fill_(7)
    first["lazy"][1]["x"].fill_(7)
    first["own"].fill_(7)
    again = spec("new", 1, 2).memmap_like(path)
    assert type(again["item"]) is Item and again["item"].obs.eq(7).all() and again["a"].eq(7).all()
    assert again["rows"].values().eq(7).all() and [len(row) for row in again["rows"].unbind()] == [1, 2]
    assert again["lazy"][1]["x"].eq(7).all() and again["own"].eq(7).all()
    assert (again["word"], again["words"], again["item"].name) == ("old", ["old", "old"], "old")
    assert again.names == ["time"]
    with pytest.raises(SaveError, match=r"'rows' has shape .*overwrite=True"):
        spec("new", 2, 2).memmap_like(path)
    assert spec("new", 2, 2).memmap_like(path, overwrite=True)["word"] == "new"


def test_typed_results_and_values_that_are_written(tmp_path: pathlib.Path) -> None:
    item = Item(obs=torch.zeros(2), name="x")
    item.expand(3).memmap_like(tmp_path)[1] = Item(obs=torch.ones(2), name="y")
    again = item.expand(3).memmap_like(tmp_path, return_early=True).result()
    assert type(again) is Item and again.is_memmap() and again.is_locked
    assert again.obs.sum() == 2 and again.name == ["x", "y", "x"]
    again[0] = Item(obs=torch.ones(2), name="z")
    assert TensorDict.load_memmap(tmp_path).name == ["z", "y", "x"]


def test_saves_made_without_encoded_names(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a b": {"c d": torch.zeros(2), "word": "x"}})
    td.memmap_like(tmp_path, robust_key=False)["a b", "c d"].fill_(7)
    again = td.memmap_like(tmp_path)
    assert again["a b", "c d"].eq(7).all() and again["a b"].saved_path == tmp_path / "a b"


def test_a_broken_save_is_left(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path)
    os.truncate(tmp_path / "a.memmap", 4)
    with pytest.raises(SaveError, match=r"'a'.*overwrite=True"):
        make().memmap_like(tmp_path)
    assert (tmp_path / "a.memmap").stat().st_size == 4
    assert make().memmap_like(tmp_path, overwrite=True)["a"].tolist() == [0, 0, 0]


def test_files_of_no_save_are_left(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.memmap").write_bytes(b"mine")
    with pytest.raises(SaveError, match=r"a\.memmap'.*overwrite=True"):
        make().memmap_like(tmp_path)
    assert (tmp_path / "a.memmap").read_bytes() == b"mine" and os.listdir(tmp_path) == ["a.memmap"]
    assert make().memmap_like(tmp_path, overwrite=True)["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("content", [b"mine", b"PK\x03\x04 and more of mine"])
def test_a_file_that_is_no_archive_is_left(content: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "save.tdz"
    path.write_bytes(content)
    with pytest.raises(SaveError, match=r"save\.tdz'.*overwrite=True"):
        make().memmap_like(path)
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["save.tdz"]
    assert make().memmap_like(path, overwrite=True)["a"].tolist() == [0, 0, 0]
    assert TensorDict.load_memmap(path)["a"].tolist() == [0, 0, 0]


def test_a_zip_file_of_something_else_is_left(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "save.tdz"
    with zipfile.ZipFile(path, "w") as other:
        other.writestr("notes.txt", "mine")
    before = path.read_bytes()
    with pytest.raises(SaveError, match=r"save\.tdz'.*overwrite=True"):
        make().memmap_like(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("suffix", ["", ".tdz"])
def test_a_save_that_another_process_makes_meanwhile(
    suffix: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"save{suffix}"
    room: Any = archive if suffix else directory
    real, calls = room._reopened, []

    def late(*args: Any) -> Any:
        calls.append(args)
        found = real(*args)
        if len(calls) == 1:
            assert found is None
            make(7.0).memmap(path)
        return found

    monkeypatch.setattr(room, "_reopened", late)
    assert make().memmap_like(path)["a"].tolist() == [7, 7, 7]
    assert TensorDict.load_memmap(path)["a"].tolist() == [7, 7, 7]
    assert os.listdir(tmp_path) == [path.name]


def test_files_that_may_not_be_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped privately they would look as if they took what is written."""
    make().memmap(tmp_path / "save")
    MemoryMappedTensor.from_tensor(torch.ones(2), filename=tmp_path / "x")
    real = torch.from_file

    def refuse(path: str, shared: bool, *args: Any, **kwargs: Any) -> torch.Tensor:
        if shared:
            raise RuntimeError("no")
        return real(path, shared, *args, **kwargs)

    monkeypatch.setattr(torch, "from_file", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)
    with pytest.raises(PermissionError, match=re.escape(str(tmp_path / "save"))):
        make().memmap_like(tmp_path / "save")
    with pytest.raises(PermissionError, match=re.escape(str(tmp_path / "x"))):
        MemoryMappedTensor.empty(2, filename=tmp_path / "x", existsok=True)


# --- single tensors ---------------------------------------------------------------------------------------------------

OPENING: dict[str, Any] = {
    "empty": MemoryMappedTensor.empty,
    "zeros": MemoryMappedTensor.zeros,
    "empty_nested": lambda size, **options: MemoryMappedTensor.empty_nested(torch.tensor([[1], [size - 1]]), **options),
    "from_tensor": lambda size, **options: MemoryMappedTensor.from_tensor(torch.ones(size), copy_data=False, **options),
}


@pytest.mark.parametrize("name", OPENING)
def test_a_file_that_is_there_is_opened(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    old = MemoryMappedTensor.full((3,), fill_value=7.0, filename=path)
    with pytest.raises(RuntimeError, match="already exists.*existsok=True"):
        OPENING[name](3, filename=path)
    opened = OPENING[name](3, filename=path, existsok=True)
    flat = torch.cat(opened.unbind()) if opened.is_nested else opened
    assert opened.filename == str(path) and flat.tolist() == [7, 7, 7]
    (opened.unbind()[0] if opened.is_nested else opened).fill_(5)
    assert old[0] == 5
    for size in (2, 4):
        with pytest.raises(SaveError, match=rf"12 bytes.*needs {4 * size}.*overwrite=True"):
            OPENING[name](size, filename=path, existsok=True)
    assert path.stat().st_size == 12
    if name != "from_tensor":
        new = OPENING[name](4, filename=path, overwrite=True)
        assert path.stat().st_size == 16 and old[0] == 5
        assert not any(item.any() for item in new.unbind())


def test_content_that_is_given_replaces_a_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    for made, expected in (
        (lambda: MemoryMappedTensor.ones(3, filename=path, existsok=True), 1),
        (lambda: MemoryMappedTensor.full((3,), 4.0, filename=path, existsok=True), 4),
        (lambda: MemoryMappedTensor.from_tensor(torch.full((3,), 5.0), filename=path, existsok=True), 5),
    ):
        assert made().tolist() == [expected] * 3
        assert MemoryMappedTensor.from_filename(path, torch.float32, (3,)).tolist() == [expected] * 3


def test_make_memmap_over_a_file(tmp_path: pathlib.Path) -> None:
    td = make().memmap_(tmp_path)
    MemoryMappedTensor.full((3,), fill_value=7.0, filename=tmp_path / "x.memmap")
    assert td.make_memmap("x", (3,)).tolist() == [7, 7, 7]
    assert TensorDict.load_memmap(tmp_path)["x"].tolist() == [7, 7, 7]
    MemoryMappedTensor.full((2,), fill_value=7.0, filename=tmp_path / "y.memmap")
    with pytest.raises(SaveError, match=r"'y'.*8 bytes.*make_memmap_from_tensor"):
        td.make_memmap("y", (3,))
    assert "y" not in td and "y" not in TensorDict.load_memmap(tmp_path)
    assert td.make_memmap_from_tensor("y", torch.zeros(3)).tolist() == [0, 0, 0]
