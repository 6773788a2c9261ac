"""Saving over existing files: each call, over everything that may lie at its path.

A save of the same kind is replaced, by this package or the reference. Nothing else is without `overwrite=True`, and a
call that is refused or fails leaves everything as it was.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import h5py
import pytest
import torch

import tensordict
from reference import Reference
from tensordict import PersistentTensorDict, TensorDict, pack_memmap, unpack_memmap
from tensordict.core.exceptions import SaveError
from tensordict.io.saving.transaction import Transaction
from tensordict.io.stores import entries
from tensordict.memory import files

Path = pathlib.Path
WRITE = """
import sys
import torch
from tensordict import TensorDict
td = TensorDict({"a": torch.zeros(3), "n": {"b": torch.zeros(3, 2)}, "t": "text"}, [3])
td.memmap(sys.argv[1] + "/directory"), td.memmap(sys.argv[1] + "/archive", archive=True)
td.consolidate(sys.argv[1] + "/consolidated"), td.to_h5(sys.argv[1] + "/h5")
"""
# Saves of `make(1)`, by their formats.
SOURCES: dict[str, Path] = {}


def make(value: float = 0) -> TensorDict:
    return TensorDict({"a": torch.full((3,), value), "n": {"b": torch.full((3, 2), value)}, "t": "text"}, [3])


# --- what may be there ------------------------------------------------------------------------------------------------


def script(path: Path) -> None:
    path.write_text("print('mine')\n")


def zip_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "mine")


def zip_file_with_a_meta(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("meta.json", '{"author": "me", "shape": [3]}')


def other_h5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"], file["n/other"] = [1.0], [2.0]


def h5_with_attributes(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"] = [1.0]
        file["a"].attrs["unit"] = "m"


def cut_h5(path: Path) -> None:
    make().to_h5(path).close()
    path.write_bytes(path.read_bytes()[:600])


def model(path: Path) -> None:
    header = {"__metadata__": {"epoch": "3"}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + b"mine")


def torch_file(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path)


def json_tail(path: Path) -> None:
    """The end of a consolidated file, and nothing else of one."""
    content = json.dumps({"author": "me"}).encode()
    path.write_bytes(b"mine" + content + len(content).to_bytes(8, "little"))


def folder_with_a_leaf(path: Path) -> None:
    path.mkdir()
    (path / "a.memmap").write_bytes(b"mine")


def folder_with_a_meta(path: Path) -> None:
    path.mkdir()
    (path / "meta.json").write_text('{"author": "me", "a": {"shape": [3]}}')


def folder_with_a_nested_leaf(path: Path) -> None:
    (path / "n").mkdir(parents=True)
    (path / "n" / "b.memmap").write_bytes(b"mine")


def save_with_a_file_beside(path: Path) -> None:
    make().exclude("a").memmap(path)
    (path / "a.memmap").write_bytes(b"mine")


FILES = [script, zip_file, zip_file_with_a_meta, other_h5, h5_with_attributes, cut_h5, model, torch_file, json_tail]
FOLDERS = [folder_with_a_leaf, folder_with_a_meta, folder_with_a_nested_leaf, save_with_a_file_beside]


def in_folder(path: Path, **options: Any) -> None:
    make(1).memmap(path, archive=False, **options)


def in_place(path: Path, **options: Any) -> None:
    make(1).memmap_(path, **options)


def as_zeros(path: Path, **options: Any) -> None:
    make(1).memmap_like(path, archive=False, **options)


def unpacked(path: Path, **options: Any) -> None:
    unpack_memmap(SOURCES["archive"], path, **options)


def archive(path: Path, **options: Any) -> None:
    make(1).save(path, archive=True, **options)


def packed(path: Path, **options: Any) -> None:
    pack_memmap(SOURCES["directory"], path, **options)


def consolidated(path: Path, **options: Any) -> None:
    make(1).consolidate(path, **options)


def safetensors(path: Path, **options: Any) -> None:
    tensordict.to_safetensors(make(1), path, **options)


def in_h5(path: Path, **options: Any) -> None:
    make(1).to_h5(path, **options).close()


def h5_of_a_dict(path: Path, **options: Any) -> None:
    PersistentTensorDict.from_dict(make(1), path, **options).close()


def h5_clone(path: Path, **options: Any) -> None:
    with TensorDict.from_h5(SOURCES["h5"]) as stored:
        stored.clone(newfile=path, **options).close()


INTO_FOLDERS = {"directory": [in_folder, in_place, as_zeros, unpacked]}
INTO_FILES = {
    "archive": [archive, packed],
    "consolidated": [consolidated],
    "safetensors": [safetensors],
    "h5": [in_h5, h5_of_a_dict, h5_clone],
}
ALL = [(call, format) for format, calls in {**INTO_FOLDERS, **INTO_FILES}.items() for call in calls]
ONE_EACH = {"directory": in_folder, "archive": archive, "consolidated": consolidated, "safetensors": safetensors}
ONE_EACH["h5"] = in_h5


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory) -> None:
    for format, call in ONE_EACH.items():
        SOURCES[format] = tmp_path_factory.mktemp("sources") / format
        call(SOURCES[format])


def content(path: Path) -> dict[str, bytes]:
    """All files at and below the folder of `path`."""
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in path.parent.rglob("*") if file.is_file()}


def assert_saved(path: Path, value: float) -> None:
    saved = TensorDict.load(path)
    assert (saved["a"] == value).all() and (saved["n", "b"] == value).all() and saved["t"] == "text"
    if isinstance(saved, PersistentTensorDict):
        saved.close()


# --- another thing is there -------------------------------------------------------------------------------------------


def check_refused(call: Callable[..., None], there: Callable[[Path], None], path: Path) -> None:
    there(path)
    before = content(path)
    with pytest.raises(SaveError, match="overwrite=True") as raised:
        call(path)
    assert str(path) in str(raised.value)
    assert content(path) == before, "a call that is refused changes nothing"
    call(path, overwrite=True)
    assert_saved(path, 0 if call is as_zeros else 1)


@pytest.mark.parametrize("there", FILES, ids=lambda there: there.__name__)
@pytest.mark.parametrize("call", [call for calls in INTO_FILES.values() for call in calls], ids=lambda c: c.__name__)
def test_another_file(call: Callable[..., None], there: Callable[[Path], None], tmp_path: Path) -> None:
    check_refused(call, there, tmp_path / "x")


@pytest.mark.parametrize("there", FOLDERS, ids=lambda there: there.__name__)
@pytest.mark.parametrize("call", INTO_FOLDERS["directory"], ids=lambda call: call.__name__)
def test_a_file_in_the_folder(call: Callable[..., None], there: Callable[[Path], None], tmp_path: Path) -> None:
    check_refused(call, there, tmp_path / "x")


@pytest.mark.parametrize("there", [name for name in ONE_EACH if name != "directory"])
@pytest.mark.parametrize(("call", "format"), ALL[4:], ids=[call.__name__ for call, _ in ALL[4:]])
def test_a_save_of_another_format(call: Callable[..., None], format: str, there: str, tmp_path: Path) -> None:
    if there == format:
        ONE_EACH[there](tmp_path / "x")
        call(tmp_path / "x")
        assert_saved(tmp_path / "x", 1)
    else:
        check_refused(call, ONE_EACH[there], tmp_path / "x")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("there", [*FILES, *FOLDERS], ids=lambda there: there.__name__)
@pytest.mark.parametrize("format", ONE_EACH)
def test_no_file_in_the_place_of_a_folder(
    format: str, there: Callable[[Path], None], overwrite: bool, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    there(path)
    if path.is_dir() == (format == "directory"):
        return
    before = content(path)
    with pytest.raises(OSError, match="folder"):
        ONE_EACH[format](path, overwrite=overwrite)
    assert content(path) == before


@pytest.mark.parametrize(
    ("there", "call", "named"),
    [
        (zip_file, archive, "a zip file of another program, with 'notes.txt'"),
        (other_h5, in_h5, "an HDF5 file of another program, with 'n.other'"),
        (h5_with_attributes, in_h5, "an HDF5 file of another program, with 'a.unit'"),
        (cut_h5, in_h5, "an HDF5 file that cannot be read"),
        (model, safetensors, "a safetensors file of another program, with 'a'"),
        (torch_file, archive, "a file of torch.save"),
        (script, consolidated, "a file of no format that is known"),
        (save_with_a_file_beside, in_folder, "a.memmap' is a file that belongs to no save"),
    ],
)
def test_what_is_there_is_named(
    there: Callable[[Path], None], call: Callable[..., None], named: str, tmp_path: Path
) -> None:
    there(tmp_path / "x")
    with pytest.raises(SaveError, match=named):
        call(tmp_path / "x")


# --- what is replaced -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "format"), ALL, ids=[call.__name__ for call, _ in ALL])
def test_the_same_kind_of_save(call: Callable[..., None], format: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    ONE_EACH[format](path)
    call(path)
    assert_saved(path, 1)


@pytest.mark.parametrize("format", ONE_EACH)
def test_a_save_with_other_keys(format: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    writers = {
        "directory": lambda td: td.memmap(path),
        "archive": lambda td: td.memmap(path, archive=True),
        "consolidated": lambda td: td.consolidate(path),
        "safetensors": lambda td: td.to_safetensors(path),
        "h5": lambda td: td.to_h5(path).close(),
    }
    writers[format](TensorDict(old=torch.ones(2), n={"older": torch.ones(3)}))
    ONE_EACH[format](path)
    assert_saved(path, 1)


@pytest.mark.parametrize("call", [call for calls in INTO_FILES.values() for call in calls], ids=lambda c: c.__name__)
def test_an_empty_file(call: Callable[..., None], tmp_path: Path) -> None:
    """As `tempfile` leaves one."""
    (tmp_path / "x").touch()
    call(tmp_path / "x")
    assert_saved(tmp_path / "x", 1)


def test_an_h5_file_that_is_open(tmp_path: Path) -> None:
    first = make().to_h5(tmp_path / "x")
    with TensorDict.from_h5(tmp_path / "x", mode="r+") as again, make(1).to_h5(tmp_path / "x") as second:
        assert (first["a"] == 0).all() and (again["a"] == 0).all() and (second["a"] == 1).all()
    first.close()
    assert_saved(tmp_path / "x", 1)


def test_own_files_mapped_before_the_save(tmp_path: Path) -> None:
    """The leaf maps the very file: nothing is lost."""
    leaf = tensordict.MemoryMappedTensor.from_tensor(torch.ones(3), filename=tmp_path / "a.memmap")
    saved = TensorDict({"a": leaf}, [3]).memmap_(tmp_path)
    saved["a"].fill_(2)
    assert (TensorDict.load_memmap(tmp_path)["a"] == 2).all()


@pytest.mark.reference
def test_saves_of_the_reference(behaviour: Reference, tmp_path: Path) -> None:
    behaviour.run(WRITE, tmp_path)
    for format, call in ONE_EACH.items():
        if format != "safetensors":
            assert (tmp_path / format).exists()
            call(tmp_path / format)
            assert_saved(tmp_path / format, 1)


# --- half-way ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(("call", "format"), ALL, ids=[call.__name__ for call, _ in ALL])
def test_what_fails_half_way_leaves_what_is_there(
    call: Callable[..., None], format: str, overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write in turn fails; kills and full disks are in test_commit.py and test_target.py."""
    path = tmp_path / "x"
    ONE_EACH[format](path)
    before = content(path)
    left = 0

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EIO, "half-way")
            return write(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(entries, "fill", failing(entries.fill))
    monkeypatch.setattr(Transaction, "create", failing(Transaction.create))
    writes = ("write_tensor", "write_row", "allocate", "write_bytes", "write_new", "write_file")
    for name in ("new_file", "replaced_file", *writes):
        monkeypatch.setattr(files, name, failing(getattr(files, name)))
    failures = 0
    while True:
        left = failures
        try:
            call(path, overwrite=overwrite)
            break
        except OSError as error:
            failed = error
        assert failed.errno == errno.EIO
        assert content(path) == before
        assert os.listdir(tmp_path) == ["x"]
        failures += 1
    # `memmap_like` opens files without writing to them.
    assert failures >= (0 if call is as_zeros and not overwrite else 1)
