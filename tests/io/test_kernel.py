"""The kernel's information about memory: without it, results are the same."""

from __future__ import annotations

import builtins
import ctypes
import mmap
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from tensordict import MemoryMappedTensor, kernel_memory_info, set_kernel_memory_info
from tensordict.memory import kernel, rows
from tensordict.memory.copy_on_write import as_writable_tensors
from tensordict.memory.file_maps import FileMap, map_file

LARGE = 8 << 20


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "file").write_bytes(bytes(range(256)) * (LARGE // 256))
    return tmp_path / "file"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Queries to the kernel, through /proc and the C library."""
    found: list[str] = []

    def noting(original: Any) -> Any:
        def call(name: Any, *args: Any, **kwargs: Any) -> Any:
            if str(name).startswith("/proc"):
                found.append(str(name))
            return original(name, *args, **kwargs)

        return call

    class Library:
        def __getattr__(self, name: str) -> Any:
            if not hasattr(LIBRARY, name):
                raise AttributeError(name)
            return lambda *args: (found.append(name), getattr(LIBRARY, name)(*args))[1]

    monkeypatch.setattr(builtins, "open", noting(open))
    monkeypatch.setattr(os, "open", noting(os.open))
    monkeypatch.setattr(os, "listdir", noting(os.listdir))
    monkeypatch.setattr(kernel, "_libc", Library())
    return found


LIBRARY = kernel._libc


def read_only(path: pathlib.Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def results(path: pathlib.Path) -> tuple[bytes, list[tuple[int, bytes]], torch.Tensor]:
    """A buffer that can be written to, what of a map is sent to another process, and rows of a file."""
    (again,) = as_writable_tensors([read_only(path)])
    again[0] = 7
    with path.open("rb") as file:
        private = map_file(file.fileno(), LARGE, str(path))
    private[5000] = 9
    file_map: FileMap = private.file_map  # type: ignore[attr-defined]
    source = MemoryMappedTensor.from_filename(str(path), torch.uint8, torch.Size([LARGE >> 12, 1 << 12]))
    return bytes(again.numpy()), file_map.pieces(), rows.rows_of(source, torch.tensor([5, 1, 1]))


def test_turned_off_it_is_not_asked_and_results_are_the_same(path: pathlib.Path, asked: list[str]) -> None:
    buffer, pieces, picked = results(path)
    assert {"/proc/self/maps", "/proc/self/pagemap", "mincore"} <= set(asked)
    assert [(first, len(content)) for first, content in pieces] == [(mmap.PAGESIZE, mmap.PAGESIZE)]
    asked.clear()
    with set_kernel_memory_info(False):
        without = results(path)
    assert asked == []
    assert without[0] == buffer and torch.equal(without[2], picked)
    ((first, content),) = without[1]
    assert first == 0 and len(content) == LARGE and content[5000] == 9
    assert path.read_bytes()[:2] == b"\0\1"


def test_turned_off_no_file_behind_memory_is_opened(path: pathlib.Path, asked: list[str]) -> None:
    source = read_only(path)
    start = ctypes.addressof(ctypes.c_char.from_buffer_copy(source))
    region = next(one for one in kernel.list_shared_maps() if one.path == str(path))
    asked.clear()
    with set_kernel_memory_info(False):
        assert kernel.list_shared_maps() == [] and kernel.open_region(region) is None and kernel.file_spans() is None
        assert kernel.find_written_pages(start - start % mmap.PAGESIZE, mmap.PAGESIZE) is None
        assert kernel.are_in_memory([start])
        kernel.announce_reads(torch.tensor([start]), 1)
        kernel.prefer_large_pages(start, LARGE)
    assert asked == []
    fd = kernel.open_region(region)
    assert fd is not None
    os.close(fd)


def test_what_is_not_allowed_is_done_without(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, _, picked = results(path)

    def forbidden(original: Any) -> Any:
        def call(name: Any, *args: Any, **kwargs: Any) -> Any:
            if str(name).startswith("/proc"):
                raise PermissionError(name)
            return original(name, *args, **kwargs)

        return call

    monkeypatch.setattr(builtins, "open", forbidden(open))
    monkeypatch.setattr(os, "open", forbidden(os.open))
    monkeypatch.setattr(os, "listdir", forbidden(os.listdir))
    monkeypatch.setattr(kernel, "_libc", None)
    without = results(path)
    assert without[0] == buffer and torch.equal(without[2], picked)
    assert [first for first, _ in without[1]] == [0]


@pytest.mark.parametrize(("value", "expected"), [("0", "False"), ("1", "True"), (None, "True")])
def test_the_environment_turns_it_off(value: str | None, expected: str) -> None:
    environment = {key: text for key, text in os.environ.items() if key != "TENSORDICT_KERNEL_MEMORY_INFO"}
    environment |= {} if value is None else {"TENSORDICT_KERNEL_MEMORY_INFO": value}
    code = "from tensordict import kernel_memory_info; print(kernel_memory_info())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_the_switch() -> None:
    before = kernel_memory_info()
    with set_kernel_memory_info(not before):
        assert kernel_memory_info() is not before
    assert kernel_memory_info() is before
    with pytest.raises(TypeError, match="True or False"):
        set_kernel_memory_info(1)  # type: ignore[arg-type]
