"""Saving where the operating system lacks what Linux has, which is hidden from a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

# What macOS lacks, and what Windows does.
MACOS = ["memfd_create", "posix_fallocate", "copy_file_range", "pidfd_open", "sched_getaffinity", "pwritev"]
WINDOWS = [
    *MACOS, "pread", "pwrite", "sendfile", "register_at_fork", "fchmod", "O_CLOEXEC", "O_NONBLOCK", "O_NOFOLLOW",
    "O_DIRECTORY",
]  # fmt: skip

PROGRAM = """
import ctypes, mmap, multiprocessing.reduction, os, sys
import torch  # knows its own ways
windows, names, folder = sys.argv[1] == "windows", sys.argv[2].split(","), sys.argv[3]
for name in names:
    delattr(os, name)
for name in ("MADV_HUGEPAGE", "MADV_WILLNEED"):
    delattr(mmap, name)
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

from tensordict import MemoryMappedTensor, TensorDict, lazy_stack, load, verify

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
again = TensorDict(x=torch.zeros(9 << 10)).expand(1200).memmap_like("store")
assert again[torch.tensor([5, 4])]["x"][:, 0].tolist() == [5, 0]
store = TensorDict(x=torch.zeros(50_000)).expand(200).memmap_like("long")
assert store[torch.arange(60)]["x"].shape == (60, 50_000)
saved = td.memmap_("again")
saved.update_({"word": "y"})
assert load("again")["word"] == "y"
assert sorted(os.listdir()) == sorted(
    ["folder", "x.tdz", "deflated.tdz", "x.bin", "x.safetensors", "copy", "store", "long", "again"]
)
print("done")
"""


@pytest.mark.parametrize(("system", "names"), [("macos", MACOS), ("windows", WINDOWS)])
def test_saving_and_loading(system: str, names: list[str], tmp_path: pathlib.Path) -> None:
    arguments = [sys.executable, "-c", PROGRAM, system, ",".join(names), str(tmp_path)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.stdout == "done\n", result.stderr
