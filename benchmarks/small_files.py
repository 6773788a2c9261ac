"""Saves 5,000 leaves of 1 KiB to folders and loads them, in turns with bare loops of the same system calls.

    .venv/bin/python benchmarks/small_files.py FOLDER

The folder keeps the files: for minutes, ext4 looks at each file just deleted before it makes a new one.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from tensordict import TensorDict, load_memmap

ROUNDS, COUNT, SIZE = 7, 5000, 1024
FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def main() -> None:
    """Print the least, the median and the most milliseconds of each side."""
    torch.set_num_threads(1)
    base = tempfile.mkdtemp(dir=sys.argv[1])
    data = {f"k{i}": torch.full((SIZE // 4,), float(i + 1)) for i in range(COUNT)}
    td = TensorDict(data, [])
    saved = f"{base}/saved"
    td.memmap(saved)
    paths = [f"{saved}/{key}.memmap" for key in data]

    def write(folder: str, maps: bool) -> list[object]:
        os.mkdir(folder)
        found: list[object] = []
        for key, leaf in data.items():
            path = f"{folder}/{key}.memmap"
            fd = os.open(path, FLAGS, 0o666)
            os.pwrite(fd, (ctypes.c_char * SIZE).from_address(leaf.data_ptr()), 0)
            os.close(fd)
            if maps:
                found.append(torch.from_file(path, True, SIZE // 4))
        return found

    def map_files() -> list[torch.Tensor]:
        return [torch.from_file(path, True, SIZE // 4) for path in paths]

    def check_and_map(_: str) -> list[torch.Tensor]:
        with open(f"{saved}/meta.json", "rb") as file:
            json.load(file)
        with os.scandir(saved) as entries:
            assert not any(entry.is_symlink() for entry in entries)
        assert all(os.stat(path).st_size == SIZE for path in paths)
        return map_files()

    sides: dict[str, Callable[[str], object]] = {
        "create and write": lambda folder: write(folder, maps=False),
        "create, write and map": lambda folder: write(folder, maps=True),
        "memmap": td.memmap,
        "map": lambda _: map_files(),
        "read meta.json, list links, check and map": check_and_map,
        "load_memmap": lambda _: load_memmap(saved),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    gc.disable()
    for number in range(ROUNDS):
        for name, call in sides.items():
            os.sync()
            start = time.perf_counter()
            kept = call(f"{base}/{name}{number}")
            times[name].append(1000 * (time.perf_counter() - start))
            del kept
    for name, found in times.items():
        print(f"{name:42} {min(found):6.1f} {statistics.median(found):6.1f} {max(found):6.1f} ms")


if __name__ == "__main__":
    main()
