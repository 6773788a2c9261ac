"""Fills a small file system while a data set is written to it. See test_faults.py.

Run as a program in a namespace of its own: `full_disk.py FOLDER` mounts a tmpfs there, and prints what it has done.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset, verify
from tensordict.datasets import compact, tidy

SIZE = 3 << 20


def rows(first: int, count: int) -> TensorDict:
    number = torch.arange(first, first + count)
    return TensorDict(
        {"x": number, "y": number.unsqueeze(1).expand(-1, 4096).float(), "name": [f"n{n}" for n in number.tolist()]},
        [count],
    )


def check(data: pathlib.Path, count: int) -> None:
    found = open_dataset(data)[:].to_tensordict()
    assert found["x"].tolist() == list(range(count)), found["x"]
    assert bool((found["y"] == found["x"].unsqueeze(1)).all()) and found["name"] == [f"n{n}" for n in range(count)]
    assert verify(data).ok


@contextlib.contextmanager
def full(folder: pathlib.Path, left: int) -> Iterator[None]:
    """Within the block, the disk has exactly this many bytes left."""
    # Deleted files that readers have mapped take room until the maps are collected.
    gc.collect()
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        free = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - left)
    try:
        yield
    finally:
        ballast.unlink()


def refused(call: Callable[..., object], *arguments: object) -> None:
    """A call fails for want of room, at once, and says where."""
    start = time.monotonic()
    with pytest.raises(OSError, match="data") as caught:
        call(*arguments)
    assert caught.value.errno == errno.ENOSPC, repr(caught.value)
    assert time.monotonic() - start < 20, "it has waited for nobody"


def first_rows(folder: pathlib.Path, format: str) -> None:
    """The schema cannot be written."""
    data = folder / f"data-{format}-first"
    writer = DatasetWriter(data, rows_per_shard=8, format=format)
    with full(folder, 0):
        refused(lambda: (writer.extend(rows(0, 3)), writer.flush()))
        assert not (data / "schema.json").exists()
    writer.extend(rows(writer.rows, 4 - writer.rows))
    writer.close()
    check(data, 4)


def further_rows(folder: pathlib.Path, format: str, left: int) -> None:
    """A shard, its description or its line cannot be written; the writer goes on when there is room."""
    data = folder / f"data-{format}-{left}"
    writer = DatasetWriter(data, rows_per_shard=8, format=format)
    writer.extend(rows(0, 3))
    writer.flush()
    with full(folder, left):
        refused(lambda: (writer.extend(rows(3, 8)), writer.flush()))
        check(data, 3)
        refused(writer.flush if writer.rows > 3 else writer.extend, *([] if writer.rows > 3 else [rows(3, 8)]))
        check(data, 3)
    writer.extend(rows(writer.rows, 12 - writer.rows))
    writer.close()
    check(data, 12)
    assert tidy(data, older_than=0) == ([], {})


def compaction(folder: pathlib.Path, format: str) -> None:
    """The new shard cannot be written; the old ones stay."""
    data = folder / f"data-{format}-compact"
    for first in (0, 8):
        with DatasetWriter(data, format=format) as writer:
            writer.extend(rows(first, 8))
    with full(folder, 64 << 10):
        refused(compact, data)
        check(data, 16)
    assert compact(data) == (2, 1)
    check(data, 16)
    assert tidy(data, older_than=0) == ([], {})


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], check=True)
    for format in ("folder", "archive", "zarr"):
        first_rows(folder, format)
        # A page is all that a description or a line needs.
        for left in (0, 4 << 10, 96 << 10):
            further_rows(folder, format, left)
        compaction(folder, format)
        for data in folder.iterdir():
            shutil.rmtree(data)
        print(format, end=" ")
    print("done")


if __name__ == "__main__":
    main()
