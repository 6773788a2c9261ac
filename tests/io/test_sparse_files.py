"""Saves larger than the disk: sparse files, and what is assigned to them through a container."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.reference import Reference

from tensordict import MemoryMappedTensor, TensorDict
from tensordict.memory import system
from tensordict.memory.file_source import FileSource

ROWS, WIDTH = 16384, 1024
ROW = TensorDict(a=torch.ones(WIDTH), n=TensorDict(b=torch.ones(())))
TOO_MANY = 5000


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs the superuser")
    try:
        yield folder
    finally:
        # A remaining map keeps it busy.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def sparse(path: pathlib.Path) -> bool:
    status = os.stat(path)
    return status.st_blocks * 512 < status.st_size


def test_what_is_larger_than_the_disk_is_sparse(disk: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match=r"67,174,400 bytes.*3,\d{3},\d{3} bytes free.*preallocate=False") as warned:
        store = ROW.expand(ROWS).memmap_like(disk / "store")
    assert len(warned) == 1 and str(disk / "store") in str(warned[0].message)
    store[3] = ROW
    store[torch.tensor([9, 5])] = ROW.expand(2)
    store.set_at_("a", 2.0, 7)
    store[10:12].update_(ROW.expand(2))
    assert store["a"][[3, 5, 9, 7, 10], 0].tolist() == [1, 1, 1, 2, 1] and store["n", "b"][3] == 1
    assert sparse(disk / "store" / "a.memmap") and os.stat(disk / "store" / "a.memmap").st_size == ROWS * WIDTH * 4


PROGRAM = """
import sys
from tensordict import TensorDict
from tests.io.test_sparse_files import ROW, ROWS, WRITES
store = ROW.expand(ROWS).memmap_like(sys.argv[1], preallocate=False)
store[0] = ROW
for number, name in enumerate(WRITES):
    try:
        WRITES[name](store if number % 2 else TensorDict.load_memmap(sys.argv[1]))
    except OSError as error:
        print(error.errno, str(error))
print(store["a"][0].tolist() == [1] * 1024)
"""

WRITES: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda store: store.__setitem__(slice(0, TOO_MANY), ROW.expand(TOO_MANY) * 2),
    "an index": lambda store: store.__setitem__(torch.arange(TOO_MANY) * 3, ROW.expand(TOO_MANY) * 2),
    "a mask": lambda store: store.__setitem__(torch.arange(ROWS) < TOO_MANY, ROW.expand(TOO_MANY) * 2),
    "a number": lambda store: store.__setitem__(slice(0, TOO_MANY), 3),
    "update_": lambda store: store.update_(ROW.expand(ROWS) * 2),
    "update": lambda store: store.update(ROW.expand(ROWS) * 2, inplace=True),
    "update_at_": lambda store: store.update_at_(ROW.expand(TOO_MANY) * 2, slice(0, TOO_MANY)),
    "set_": lambda store: store.set_("a", torch.full((ROWS, WIDTH), 2.0)),
    "set_at_": lambda store: store.set_at_("a", 2.0, slice(0, TOO_MANY)),
    "a view": lambda store: store[0:TOO_MANY].update_(ROW.expand(TOO_MANY) * 2),
    "a view of views": lambda store: store[0 : TOO_MANY + 1][:TOO_MANY].set_("a", torch.full((TOO_MANY, WIDTH), 2.0)),
}


def test_a_full_disk_ends_no_process(disk: pathlib.Path) -> None:
    command = [sys.executable, "-c", PROGRAM, disk / "store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr[-500:])
    *told, kept = done.stdout.splitlines()
    assert len(told) == len(WRITES) and kept == "True"
    for line in told:
        assert line.startswith(f"{errno.ENOSPC} ") and "entry 'a'" in line and "a.memmap" in line


@pytest.mark.parametrize("write", WRITES)
def test_a_full_disk_is_an_error_and_nothing_is_written(write: str, disk: pathlib.Path) -> None:
    store = ROW.expand(ROWS).memmap_like(disk / "store", preallocate=False)
    store[0] = ROW
    with pytest.raises(OSError, match=r"entry 'a': .* bytes of it are needed.*bytes free.*No space left") as caught:
        WRITES[write](store)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(disk / "store" / "a.memmap")
    assert store["a"][0].tolist() == [1] * WIDTH and store["n", "b"][0] == 1


def test_a_file_system_that_cannot_reserve(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free space is compared with the written bytes."""
    monkeypatch.setattr(system, "_FALLOCATE", "")
    store = ROW.expand(64).memmap_like(tmp_path / "store", preallocate=True)
    assert sparse(tmp_path / "store" / "a.memmap")
    store[3] = ROW
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(OSError, match="entry 'a'.*4,096 bytes of it are needed.* 100 bytes free"):
        store[4] = ROW
    assert store["a"][:5, 0].tolist() == [0, 0, 0, 1, 0]


def test_a_file_that_was_replaced(disk: pathlib.Path) -> None:
    """Its name is gone, so blocks cannot be requested by it."""
    store = ROW.expand(ROWS).memmap_like(disk / "store", preallocate=False)
    os.replace(disk / "store" / "a.memmap", disk / "elsewhere")
    store[1] = ROW
    with pytest.raises(OSError, match="bytes of it are needed"):
        store[:TOO_MANY] = ROW.expand(TOO_MANY)
    (disk / "store" / "a.memmap").touch()
    with pytest.raises(OSError, match="bytes of it are needed"):
        store[:TOO_MANY] = ROW.expand(TOO_MANY)
    assert store["a"][1, 0] == 1 and os.stat(disk / "store" / "a.memmap").st_blocks == 0


def test_room_that_must_be_there(disk: pathlib.Path) -> None:
    with pytest.raises(OSError, match=r"67,174,400 bytes.* bytes free.*preallocate=False") as caught:
        ROW.expand(ROWS).memmap_like(disk / "store", preallocate=True)
    assert caught.value.errno == errno.ENOSPC and not os.listdir(disk)
    with pytest.raises(OSError, match=r"4,194,304 bytes"):
        MemoryMappedTensor.empty(1 << 20, filename=disk / "x", preallocate=True)
    assert not os.listdir(disk)
    with pytest.raises(OSError, match="No space left"):
        ROW.expand(ROWS).memmap_like(disk / "store.tdz")
    assert not os.listdir(disk)


def test_what_fits_is_reserved_unless_it_is_not_to_be(tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stores = {choice: ROW.expand(64) for choice in ("auto", True, False)}
        for choice, rows in stores.items():
            made = rows.memmap_like(tmp_path / str(choice), preallocate=choice)
            assert made.make_memmap("new", (64, WIDTH), preallocate=choice).shape == (64, WIDTH)
            like = {"preallocate": choice, "filename": tmp_path / f"{choice}.memmap"}
            MemoryMappedTensor.zeros_like(made["a"], **like)
            found = {sparse(tmp_path / str(choice) / name) for name in ("a.memmap", "new.memmap")}
            found.add(sparse(tmp_path / f"{choice}.memmap"))
            rows.memmap_like(tmp_path / f"{choice}.tdz", preallocate=choice)
            assert found | {sparse(tmp_path / f"{choice}.tdz")} == {choice is False}
            assert isinstance(made["a"]._source, FileSource) and made["a"]._source.sparse is (choice is False)


def test_a_file_that_is_full_by_now_is_asked_no_more(tmp_path: pathlib.Path) -> None:
    store = ROW.expand(64).memmap_like(tmp_path / "store", preallocate=False)
    store.update_(ROW.expand(64))
    store[0] = ROW
    assert not store["a"]._source.sparse


@pytest.mark.parametrize("choice", ["always", None, 2])
def test_other_choices(choice: Any, tmp_path: pathlib.Path) -> None:
    for call in (
        lambda: ROW.expand(64).memmap_like(tmp_path / "store", preallocate=choice),
        lambda: MemoryMappedTensor.empty(3, filename=tmp_path / "x", preallocate=choice),
    ):
        with pytest.raises(ValueError, match='preallocate is "auto", True or False'):
            call()
    assert not os.listdir(tmp_path)


LINES = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from tensordict import TensorDict
row = TensorDict({"a": torch.ones(1024), "n": {"b": torch.ones(())}}, [])
store = row.expand(16384).memmap_like(sys.argv[1])
store[3] = row
store[torch.tensor([5, 9])] = row.expand(2)
store[10:12].update_(row.expand(2))
print([store["a"][i, 0].item() for i in (3, 5, 9, 10, 11)], store["n", "b"][3].item(), list(store.shape))
"""


@pytest.mark.reference
def test_a_store_beyond_the_disk_goes_on_as_with_the_reference(
    behaviour: Reference, disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["-c", str(disk / "ours")])
    with warnings.catch_warnings():
        exec(compile(LINES, "<program>", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == behaviour.run(LINES, disk / "theirs") == "[1.0, 1.0, 1.0, 1.0, 1.0] 1.0 [16384]\n"
