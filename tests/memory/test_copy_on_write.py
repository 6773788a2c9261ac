"""Read-only buffers as tensors that may be written to, without a copy where the memory can be mapped again."""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import pickle
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest
import torch

from tensordict import TensorDict, lazy_stack
from tensordict.memory import system
from tensordict.memory.copy_on_write import as_writable_tensors

LARGE = 4 << 20


def address_of(value: Any) -> int:
    return (
        value.data_ptr() if isinstance(value, torch.Tensor) else torch.frombuffer(value, dtype=torch.uint8).data_ptr()
    )


def modes(tensor: torch.Tensor) -> tuple[str, int]:
    """The modes and the inode of the map that a tensor lies in."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, found, _, _, inode = line.split()[:5]
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return found, int(inode)
    raise AssertionError("the tensor lies nowhere")


def content(nbytes: int = LARGE) -> bytes:
    return bytes(range(256)) * (nbytes // 256)


def is_mapped_again(tensor: torch.Tensor, inode: int) -> bool:
    return modes(tensor) == ("rw-p", inode)


def allows_map_files() -> bool:
    """Return whether this process may open its own mapped files."""
    names = sorted(os.listdir("/proc/self/map_files"))
    try:
        os.close(os.open(f"/proc/self/map_files/{names[0]}", os.O_RDONLY))
    except PermissionError:
        return False
    return True


needs_map_files = pytest.mark.skipif(not allows_map_files(), reason="needs CAP_CHECKPOINT_RESTORE")


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "file").write_bytes(content())
    return tmp_path / "file"


def read_only(path: pathlib.Path | str) -> tuple[mmap.mmap, int]:
    """A file as a read-only map, and its inode; no descriptor of ours is left."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), status.st_ino


def drop_descriptors(inode: int) -> None:
    """Close the file descriptors of maps."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.stat(f"/proc/self/fd/{name}").st_ino == inode:
                os.close(int(name))
        except FileNotFoundError:
            continue


def test_a_file_is_mapped_again(path: pathlib.Path) -> None:
    original, inode = read_only(path)
    (tensor,) = as_writable_tensors([original])
    assert is_mapped_again(tensor, inode)
    assert bytes(tensor.numpy()) == content()
    tensor[:3] = 7
    assert tensor[:4].tolist() == [7, 7, 7, 3]
    assert original[:4] == path.read_bytes()[:4] == bytes(range(4))
    (other,) = as_writable_tensors([original])
    assert other[:4].tolist() == [0, 1, 2, 3]


@needs_map_files
def test_a_file_without_a_name(path: pathlib.Path) -> None:
    original, inode = read_only(path)
    path.unlink()
    (tensor,) = as_writable_tensors([original])
    assert is_mapped_again(tensor, inode) and bytes(tensor.numpy()) == content()


@needs_map_files
def test_another_file_under_the_name(path: pathlib.Path) -> None:
    original, inode = read_only(path)
    path.unlink()
    path.write_bytes(bytes(LARGE))
    (tensor,) = as_writable_tensors([original])
    assert is_mapped_again(tensor, inode) and bytes(tensor.numpy()) == content()


HOLDER = """
import os, sys
fd = os.memfd_create("store")
os.write(fd, bytes(range(256)) * (int(sys.argv[1]) // 256))
print(fd, flush=True)
sys.stdin.read()
"""


@needs_map_files
def test_a_file_that_only_another_process_has_open() -> None:
    """As the raylet of Ray has the file of its store."""
    command = [sys.executable, "-c", HOLDER, str(LARGE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        original, inode = read_only(f"/proc/{process.pid}/fd/{process.stdout.readline().strip()}")
        drop_descriptors(inode)
        (tensor,) = as_writable_tensors([original])
        assert is_mapped_again(tensor, inode) and bytes(tensor.numpy()) == content()
        (again,) = as_writable_tensors([original])
        assert is_mapped_again(again, inode)
        del again
        drop_descriptors(inode)
        process.communicate("")
    # Nobody has it open any more; it is mapped in this process.
    (again,) = as_writable_tensors([original])
    assert is_mapped_again(again, inode) and bytes(again.numpy()) == content()
    again[0] = 9
    assert original[0] == 0


def test_other_processes_are_not_looked_at(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the capability, a file without a name is copied, wherever it may be open."""
    original, _ = read_only(path)
    path.unlink()
    tried: list[str] = []
    real = os.open

    def refuse(name: Any, *arguments: Any, **options: Any) -> int:
        tried.append(str(name))
        if "map_files" in tried[-1]:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("looked at other processes"))
    (copied,) = as_writable_tensors([original])
    assert modes(copied)[1] == 0 and bytes(copied.numpy()) == content()
    assert all(name.startswith(("/proc/self/", str(path))) for name in tried)


def test_several_buffers_of_one_map(path: pathlib.Path) -> None:
    original, inode = read_only(path)
    view = memoryview(original)
    parts = [view[:1000], view[1008:LARGE], view[16:32], view[3:5], view[:0], bytes(8)]
    found = as_writable_tensors(parts)
    assert [bytes(tensor.numpy()) for tensor in found] == [bytes(part) for part in parts]
    assert [modes(tensor) == ("rw-p", inode) for tensor in found if tensor.numel()] == [True, True, True, False, False]
    # One map for all of them.
    assert found[1].data_ptr() - found[0].data_ptr() == 1008
    # Those that overlap are not the same memory twice for nothing: they are so in the original.
    found[0][16] = 99
    assert found[2][0] == 99


def test_buffers_far_apart(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        file.truncate(1 << 40)
        file.seek((1 << 40) - LARGE)
        file.write(content())
    original, inode = read_only(tmp_path / "file")
    view = memoryview(original)
    first, last = as_writable_tensors([view[:LARGE], view[-LARGE:]])
    assert is_mapped_again(first, inode) and is_mapped_again(last, inode)
    assert not first.any() and bytes(last.numpy()) == content()


def test_what_is_written_to_is_not_copied(path: pathlib.Path) -> None:
    own = bytearray(content())
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    found = as_writable_tensors([own, shared])
    assert [tensor.data_ptr() for tensor in found] == [address_of(own), address_of(shared)]


@pytest.mark.parametrize("nbytes", [0, 100, LARGE])
def test_memory_that_is_in_no_file_is_copied(nbytes: int) -> None:
    original = content(nbytes)
    (tensor,) = as_writable_tensors([original])
    tensor += 1
    assert original == content(nbytes)


def test_what_is_private_already_is_copied(path: pathlib.Path) -> None:
    """It may have been written to."""
    with open(path, "rb") as file:
        private = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    private[:2] = b"zz"
    (tensor,) = as_writable_tensors([memoryview(private).toreadonly()])
    assert modes(tensor)[1] == 0 and bytes(tensor[:3].numpy()) == b"zz\x02"


def test_what_is_small_is_copied(path: pathlib.Path) -> None:
    original, _ = read_only(path)
    (tensor,) = as_writable_tensors([memoryview(original)[: LARGE - 16]])
    assert modes(tensor)[1] == 0 and bytes(tensor.numpy()) == content()[:-16]


def test_what_the_system_does_not_map_again_is_copied(path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the large pages of hugetlbfs, or too many maps."""

    def refuse(*arguments: Any, kind: Any) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(system, "map_privately", refuse)
    original, _ = read_only(path)
    before = len(os.listdir("/proc/self/fd"))
    (tensor,) = as_writable_tensors([original])
    assert modes(tensor)[1] == 0 and bytes(tensor.numpy()) == content()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_original_lives_as_long_as_its_tensor(path: pathlib.Path) -> None:
    original, _ = read_only(path)
    (tensor,) = as_writable_tensors([original])
    part = tensor[100:]
    del tensor
    with pytest.raises(BufferError):
        original.close()
    assert part[0] == 100
    del part
    original.close()


def rollouts() -> Any:
    rows = torch.nested.nested_tensor([torch.ones(n, 1 << 18) for n in (3, 4)], layout=torch.jagged)
    steps = [TensorDict(obs=torch.ones(n, 1 << 18), text=f"episode {n}") for n in (1, 2)]
    return TensorDict(rows=rows, steps=lazy_stack(steps), reward=torch.zeros(2), label="run", batch_size=[2])


def test_shared_memory_as_a_store() -> None:
    """A tensor over `multiprocessing.shared_memory` shares it, or is private if the block is read-only."""
    td = rollouts()
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(td, 5, buffer_callback=buffers.append)
    assert len(head) < 5000
    lengths = [buffer.raw().nbytes for buffer in buffers]
    store = SharedMemory(create=True, size=sum(-(-length // 64) * 64 for length in lengths))
    views, start = [], 0
    for buffer, length in zip(buffers, lengths, strict=True):
        store.buf[start : start + length] = buffer.raw()
        views.append(store.buf[start : start + length])
        start += -(-length // 64) * 64
    try:
        private = pickle.loads(head, buffers=[view.toreadonly() for view in views])
        shared = pickle.loads(head, buffers=views)
        shared["rows"].values()[0, 0] = 5
        assert private["rows"].values()[0, 0] == 5  # of a page that nobody has written to yet
        private["rows"].values()[0, 1] = 6
        private["steps"][1]["obs"][0, 0] = 7
        assert shared["rows"].values()[0, :3].tolist() == [5, 1, 1] and shared["steps"][1]["obs"][0, 0] == 1
        assert private["rows"].values()[0, :3].tolist() == [5, 6, 1] and private["steps"][1]["obs"][0, 0] == 7
        assert private["label"] == "run" and private["steps"][0]["text"] == "episode 1"
    finally:
        store.unlink()
        del private, shared
        views.clear()
        store.close()
