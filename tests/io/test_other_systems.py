"""Saving where the operating system lacks what Linux has, which is hidden from a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

# Modules and functions that macOS and Windows lack.
MACOS = [
    "memfd_create", "posix_fadvise", "copy_file_range", "pidfd_open", "sched_getaffinity",
    "sched_setaffinity", "preadv", "pwritev",
]  # fmt: skip
WINDOWS = [
    *MACOS, "pread", "pwrite", "readv", "writev", "sendfile", "register_at_fork", "fork", "forkpty", "fchmod", "chown",
    "fchown", "lchown", "statvfs", "getuid", "geteuid", "getpgid", "killpg", "sync", "mkfifo", "O_CLOEXEC",
    "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY",
]  # fmt: skip

PROGRAM = """
import builtins, ctypes, importlib, io, mmap, multiprocessing.reduction, os, shutil, sys
import h5py, torch  # know their own ways
windows, names, folder = sys.argv[1] == "windows", sys.argv[2].split(","), sys.argv[3]
if windows:
    os.supports_dir_fd.clear()
    importlib.reload(shutil)  # goes by it

def without_proc(call):
    def opened(path=".", *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return call(path, *args, **kwargs)
    return opened

builtins.open = io.open = without_proc(open)
for name in ("open", "stat", "listdir", "readlink", "scandir"):
    setattr(os, name, without_proc(getattr(os, name)))
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
for name in names:
    delattr(os, name)
for name in ("MADV_HUGEPAGE", "MADV_WILLNEED"):
    delattr(mmap, name)
hidden = ("fallocate", "fallocate64")
hide = ctypes.CDLL.__getattr__

def without_fallocate(library, name):
    if name in hidden:
        raise AttributeError(name)
    return hide(library, name)

ctypes.CDLL.__getattr__ = without_fallocate
if windows:
    sys.modules["fcntl"] = sys.modules["resource"] = None
    for name in ("MAP_PRIVATE", "MAP_SHARED", "PROT_READ", "PROT_WRITE"):
        delattr(mmap, name)
    del multiprocessing.reduction.DupFd
    real = ctypes.CDLL

    class CDLL(real):
        def __init__(self, name, *args, **kwargs):
            if name is None:
                raise TypeError("no library without a name")
            super().__init__(name, *args, **kwargs)

    ctypes.CDLL = CDLL

from tensordict import (
    MemoryMappedTensor, PersistentTensorDict, TensorDict, lazy_stack, load, pack_memmap, unpack_memmap, verify
)
from tensordict_cli.runners import main

os.chdir(folder)
td = TensorDict({"a": torch.arange(6).view(3, 2), "b": {"c": torch.ones(3)}, "word": "x"}, [3])
td["lazy"] = lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 2, 3)])
for _ in range(2):
    td.memmap("folder", num_threads=2, checksum=True, durable=True)
    td.save("x.tdz")
    td.save("deflated.tdz", compression="deflate")
td.consolidate("x.bin")
td.to_safetensors("x.safetensors")
for name in ("folder", "x.tdz", "deflated.tdz", "x.bin", "x.safetensors"):
    found = load(name)
    assert found["a"].tolist() == td["a"].tolist() and found["b", "c"].tolist() == [1, 1, 1], name
    assert found["word"] == "x" and found["lazy"][2]["x"].shape == (3,), name
    assert verify(name).ok, name
for _ in range(2):
    with td.exclude("lazy").to_h5("x.h5", compression="gzip") as stored:
        stored["b", "c"] = torch.full((3,), 2.0)
        with stored.clone(newfile="y.h5") as copied:
            assert copied["b", "c"].tolist() == [2, 2, 2]
with load("x.h5") as stored:
    assert stored["a"][1:].tolist() == [[2, 3], [4, 5]] and stored["word"] == "x"
assert verify("x.h5").ok
pack_memmap("folder", "packed.tdz", num_threads=2)
unpack_memmap("packed.tdz", "unpacked", durable=True)
assert (load("unpacked").exclude("lazy") == td.exclude("lazy")).all()
for target in ("converted.tdz", "converted.safetensors"):
    assert main(["convert", "folder", target]) == main(["diff", "folder", target]) == main(["inspect", target]) == 0
private = load("x.tdz")
private["a"].zero_()
assert load("x.tdz")["a"].tolist() == td["a"].tolist()
load("x.tdz", mode="r+")["a"][0] = 7
assert load("x.tdz")["a"].tolist() == [[7, 7], [2, 3], [4, 5]]
shared = td.memmap()
shared["a"].zero_()
assert td["a"].sum() == 15 and shared.is_memmap()
copy = load("folder").memmap("copy", copy_existing=True)
assert (copy["a"] == td["a"]).all()
store = TensorDict(x=torch.zeros(9 << 10)).expand(1200).memmap_like("store")
store["x"][5] = 5
store[6] = store[5].clone()
again = TensorDict(x=torch.zeros(9 << 10)).expand(1200).memmap_like("store")
assert again[torch.tensor([5, 6, 4])]["x"][:, 0].tolist() == [5, 5, 0]
store = TensorDict(x=torch.zeros(50_000)).expand(200).memmap_like("long")
assert store[torch.arange(60)]["x"].shape == (60, 50_000)
saved = td.memmap_("again")
saved.update_({"word": "y"})
assert load("again")["word"] == "y"
assert sorted(os.listdir()) == sorted(
    ["folder", "x.tdz", "deflated.tdz", "x.bin", "x.safetensors", "copy", "store", "long", "again", "x.h5", "y.h5"]
    + ["packed.tdz", "unpacked", "converted.tdz", "converted.safetensors"]
)
print("done")
"""


@pytest.mark.parametrize(("system", "names"), [("macos", MACOS), ("windows", WINDOWS)])
def test_saving_and_loading(system: str, names: list[str], tmp_path: pathlib.Path) -> None:
    arguments = [sys.executable, "-c", PROGRAM, system, ",".join(names), str(tmp_path)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.stdout.endswith("done\n"), result.stderr
