"""Open-or-create: what the calls that make tensors without content do where there are some."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import zipfile
from typing import Any

import pytest
import torch

from reference import Reference
from tensordict import (
    MemoryMappedTensor,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    diff,
    lazy_stack,
    tensorclass,
    verify,
)
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import path_of
from tensordict.io.formats import archive, directory

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
    """Return the result of the call in memory."""
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
    with pytest.raises(SaveError, match=what + r".*save elsewhere") as raised:
        opened(place, td, tmp_path)
    assert "overwrite" not in str(raised.value)
    assert (written_by_us(place, tmp_path) == 7).all()
    assert len(os.listdir(tmp_path)) == 1
    assert opened(place, td, tmp_path, overwrite=True).keys(True, True) == td.keys(True, True)


@pytest.mark.parametrize("suffix", ["", ".tdz"])
def test_every_kind_of_entry(suffix: str, tmp_path: pathlib.Path) -> None:
    """Values come from the save, and ragged rows must have the same lengths."""

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
    with pytest.raises(SaveError, match=r"'rows' has shape .*save elsewhere"):
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
    real, calls = room._open_existing, []

    def late(*args: Any) -> Any:
        calls.append(args)
        found = real(*args)
        if len(calls) == 1:
            assert found is None
            make(7.0).memmap(path)
        return found

    monkeypatch.setattr(room, "_open_existing", late)
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


# --- entries that a save lacks ----------------------------------------------------------------------------------------


def more() -> TensorDict:
    return make().update({"b": {"more": torch.ones(3, 4)}, "z": torch.ones(3, dtype=torch.int64)})


@pytest.mark.parametrize("place", PLACES)
def test_entries_that_are_not_there(place: str, tmp_path: pathlib.Path) -> None:
    """A folder takes them; the other formats name them."""
    opened(place, make(), tmp_path)
    fill(place, tmp_path, 7.0)
    if place not in ("folder", "schema, folder"):
        with pytest.raises(SaveError, match=r"\('b', 'more'\) is not in the save; .*'z' is not .*save elsewhere"):
            opened(place, more(), tmp_path)
        assert (written_by_us(place, tmp_path) == make(7.0)).all()
        return
    before = {name: (tmp_path / "save" / name).stat().st_ino for name in ("a.memmap", "b/c.memmap")}
    (tmp_path / "save/notes").write_text("mine")
    expected = make(7.0).update({"b": {"more": torch.zeros(3, 4)}, "z": torch.zeros(3, dtype=torch.int64)})
    assert (opened(place, more(), tmp_path) == expected).all()
    assert (written_by_us(place, tmp_path) == expected).all()
    assert {name: (tmp_path / "save" / name).stat().st_ino for name in before} == before
    assert os.listdir(tmp_path) == ["save"] and (tmp_path / "save/notes").read_text() == "mine"
    with pytest.raises(SaveError, match=r"'more'\) is in the save only; entry 'z' is in the save only.*select\(\)"):
        opened(place, make(), tmp_path)


def test_entries_are_shared_with_those_who_have_the_save_open(tmp_path: pathlib.Path) -> None:
    first = make().memmap_like(tmp_path / "save")
    handle = pickle.dumps(first["a"])
    added = more().memmap_like(tmp_path / "save", durable=True)
    assert type(added) is TensorDict and added.is_memmap() and added.is_locked
    assert list(added.keys()) == ["a", "b", "z"]
    assert added.saved_path == first.saved_path and added["b"].saved_path == first["b"].saved_path
    first["b", "c"].fill_(5)
    added["a"].fill_(6)
    added["b", "more"].fill_(8)
    assert added["b", "c"].eq(5).all() and first["a"].eq(6).all() and pickle.loads(handle).eq(6).all()
    assert TensorDict.load_memmap(tmp_path / "save")["b", "more"].eq(8).all()
    assert first.make_memmap("q", (3,)).tolist() == [0, 0, 0] and "q" in TensorDict.load_memmap(tmp_path / "save")


@tensorclass
class Sample:
    obs: torch.Tensor
    name: str
    extra: torch.Tensor | None = None


def all_kinds(word: str) -> dict[str, Any]:
    return {
        "rows": torch.nested.nested_tensor([torch.ones(n) for n in (1, 2)], layout=torch.jagged),
        "strided": torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(3, 1)]),
        "sample": Sample(obs=torch.ones(2, 2), name=word, batch_size=[2]),
        "lazy": lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 3)]),
        "word": word,
        "words": NonTensorStack(word, word),
        "own": UnbatchedTensor(torch.ones(4)),
        "_names": torch.ones(2),
    }


def columns() -> Any:
    return lazy_stack([TensorDict(x=torch.ones(n), same=torch.ones(2), word=str(n)) for n in (1, 3, 2, 5)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_kind_of_entry_is_kept_and_added(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "save"

    def spec(word: str) -> TensorDict:
        td = TensorDict(all_kinds(word), [2], names=["time"])
        return TensorDict({"td": td, "columns": columns()})

    spec("old").memmap(path, checksum=True)
    shutil.copytree(path, tmp_path / "before")
    inodes = {file.relative_to(path): file.stat().st_ino for file in path.rglob("*.memmap") if "shape" not in file.name}
    wanted = spec("new")
    wanted["td", "new"] = TensorDict(all_kinds("new"), [2])
    wanted["td", "_type"] = torch.ones(2)
    wanted["td", "sample"].extra = torch.ones(2, 3)
    for member in wanted["td", "lazy"].unbind(0):
        member["y"] = torch.ones(3)
    added = wanted.memmap_like(path)
    new = [("lazy", "0", "y"), ("lazy", "1", "y"), "_type", "new", ("sample", "extra")]
    found = diff(tmp_path / "before", path)
    assert {(item.what, item.key) for item in found} == {("additional", ("td", *path_of(key))) for key in new}
    assert {name: (path / name).stat().st_ino for name in inodes} == inodes
    assert verify(path).checksummed == verify(tmp_path / "before").checksummed == 9
    for td in (added, TensorDict.load_memmap(path)):
        assert td["td"].names == ["time"] and type(td["td", "sample"]) is Sample
        assert all(td["td"][key].eq(0).all() for key in ("_type", ("lazy", "y"), ("sample", "extra")))
        inner, kept = td["td", "new"], td["td"]
        for name, word, value in ((inner, "new", 0), (kept, "old", 1)):
            assert (name["word"], name["words"], name["sample"].name) == (word, [word, word], word)
            assert all(name[key].eq(value).all() for key in ("own", "_names", ("sample", "obs")))
            assert name["lazy"][1]["x"].eq(value).all()
            assert name["rows"].values().eq(value).all() and name["strided"].unbind()[1].eq(value).all()
        assert td["columns"][3]["x"].eq(1).all() and td["columns"][1]["word"] == "3"


def test_ragged_stacks_take_no_entries(tmp_path: pathlib.Path) -> None:
    columns().memmap(tmp_path)
    wanted = columns()
    for member in wanted.unbind(0):
        member["y"] = torch.ones(3)
    with pytest.raises(SaveError, match=r"\('0', 'y'\): the members of a ragged lazy stack"):
        wanted.memmap_like(tmp_path)
    assert list(TensorDict.load_memmap(tmp_path)[3].keys()) == ["x", "same", "word"]


@pytest.mark.parametrize("name", ["z.memmap", "n/meta.json", "n/x.memmap"])
def test_files_in_the_way_of_new_entries(name: str, tmp_path: pathlib.Path) -> None:
    make(7.0).memmap(tmp_path / "save")
    path = tmp_path / "save" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    wanted = make().update({"z": torch.zeros(3), "n": {"x": torch.zeros(3)}})
    with pytest.raises(SaveError, match=rf"{name}' is there and is no part of the save.*another name"):
        wanted.memmap_like(tmp_path / "save")
    assert path.read_text() == "mine" and (TensorDict.load_memmap(tmp_path / "save") == make(7.0)).all()
    path.write_text("")
    assert wanted.memmap_like(tmp_path / "save")["z"].tolist() == [0, 0, 0]


def test_names_that_an_older_save_did_not_encode(tmp_path: pathlib.Path) -> None:
    td = TensorDict({"a b": {"c d": torch.full((2,), 7.0), "word": "x"}})
    td.memmap(tmp_path, robust_key=False)
    td["a b", "e f"] = torch.ones(2)
    assert td.memmap_like(tmp_path)["a b", "c d"].eq(7).all()
    again = TensorDict.load_memmap(tmp_path)["a b"]
    assert again["c d"].eq(7).all() and again["e f"].eq(0).all() and again["word"] == "x"


def test_entries_that_are_added_while_the_save_is_looked_at(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(7.0).memmap(tmp_path)
    real, calls = directory._open_existing, []

    def late(*args: Any) -> Any:
        calls.append(args)
        found = real(*args)
        if len(calls) == 1:
            first.make_memmap("z", (3,), dtype=torch.int64).fill_(5)
        return found

    monkeypatch.setattr(directory, "_open_existing", late)
    added = more().memmap_like(tmp_path)
    assert added["z"].eq(5).all() and added["a"].eq(7).all() and added["b", "more"].eq(0).all() and len(calls) == 2


LIKE = """
import json, sys, torch
from tensordict import TensorDict
def make(**more):
    return TensorDict(x=torch.ones(3), n=TensorDict(y=torch.ones(3, 2), batch_size=[3], **more), batch_size=[3])
def shown(td):
    return {str(key): leaf.tolist() for key, leaf in td.items(True, True)}
first = make().memmap_like(sys.argv[1])
first["x"].fill_(7)
first["n", "y"].fill_(8)
wanted = make(w=torch.ones(3))
wanted["z"] = torch.ones(3)
added = wanted.memmap_like(sys.argv[1])
added["x"][0] = 5
first["n", "y"][1] = 6
print(json.dumps([sorted(shown(td).items()) for td in (first, added, TensorDict.load_memmap(sys.argv[1]))]))
"""


def test_entries_are_added_as_the_reference_adds_them(
    behaviour: Reference, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "ours")])
    exec(compile(LIKE, "<ours>", "exec"), {})
    assert json.loads(capsys.readouterr().out) == json.loads(behaviour.run(LIKE, tmp_path / "theirs"))


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
