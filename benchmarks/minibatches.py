"""Reads random mini-batches out of saved data sets that are larger than the memory that the reader is given.

    .venv/bin/python benchmarks/minibatches.py --gib 20 --limit-mib 2048

Each format is written once, from parts, and read by processes that live in a memory cgroup, which counts the cached
pages of the files too. Before each turn the kernel drops what it has cached of the data set. `numpy memmap` reads the
files of the directory format with numpy alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS = 256
SHAPES = {"image": ((3, 64, 64), torch.uint8), "state": ((32,), torch.float32), "number": ((), torch.int64)}
ROW_BYTES = 3 * 64 * 64 + 32 * 4 + 8
PART = 4096
"""Rows written at once."""

Read = Callable[[torch.Tensor], dict[str, Any]]


def main() -> None:
    """Write the data sets, read them in turns, print rows per second and the peaks of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0, help="size of the data set, of which there are three copies")
    parser.add_argument("--limit-mib", type=int, default=1024, help="memory of a reader, its cached pages included")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="does it run? A small data set, short turns")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.gib, options.seconds, options.rounds = 0.125, 0.2, 1
    count = int(options.gib * 2**30) // ROW_BYTES
    if options.part:
        found = _write(options.folder, count) if options.part == "write" else _turn(options.part, options, count)
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory(prefix="tensordict-rows-", dir=options.folder) as folder:
        found = _compare(Path(folder), options, count)
    if options.json:
        print(json.dumps(found))
        return
    print(
        f"{found['payload'] / 2**30:.2f} GiB of rows of {ROW_BYTES:,} bytes; {found['limit'] / 2**20:.0f} MiB of memory"
    )
    print(f"  writing all formats: peak {found['peak']['write'] / 2**20:.0f} MiB")
    floor = found["rows_per_second"]["numpy memmap"]
    for name, rate in found["rows_per_second"].items():
        peak, own = (found[kind][name] / 2**20 for kind in ("peak", "own"))
        figures = f"{rate:10,.0f} rows/s {rate / floor:6.2f}x numpy; peak {peak:.0f} MiB, {own:.0f} of them its own"
        print(f"  {name:12} {figures}")


def _compare(folder: Path, options: argparse.Namespace, count: int) -> dict[str, Any]:
    limit = options.limit_mib * 2**20
    peaks: dict[str, int] = {}
    own: dict[str, int] = {}
    rates: dict[str, list[float]] = {name: [] for name in READERS}

    def run(part: str) -> dict[str, Any]:
        _forget(folder)
        with _limit_memory(limit) as group:
            arguments = ["--part", part, "--folder", str(folder), "--gib", str(options.gib)]
            arguments += ["--seconds", str(options.seconds)]
            # The process must be in the group before it takes any memory.
            command = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), sys.executable, __file__]
            done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{part!r} ended with {done.returncode} within {limit >> 20} MiB")
            peaks[part] = max(peaks.get(part, 0), _peak_of(group))
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    run("write")
    os.sync()
    for _ in range(options.rounds):
        for name in READERS:
            found = run(name)
            rates[name].append(found["rate"])
            own[name] = max(own.get(name, 0), found["own"])
    return {
        "payload": count * ROW_BYTES,
        "limit": limit,
        "rows_per_second": {name: statistics.median(found) for name, found in rates.items()},
        "turns": rates,
        "peak": peaks,
        "own": own,
    }


# --- the parts, each a process of its own -----------------------------------------------------------------------------


def _write(folder: Path, count: int) -> dict[str, Any]:
    """Write the data set in every format, a part at a time."""
    from tensordict import TensorDict

    # An expanded tensor has the shape of all rows and the memory of one element.
    form = {key: torch.zeros((), dtype=dtype).expand(count, *shape) for key, (shape, dtype) in SHAPES.items()}
    td = TensorDict(form, [count]).memmap_like(folder / "directory")
    for start in range(0, count, PART):
        numbers = torch.arange(start, min(start + PART, count))
        for key, (shape, _) in SHAPES.items():
            values = numbers.view(-1, *[1] * len(shape)).expand(-1, *shape)
            td[key][start : start + PART].copy_(values)
    td.memmap(folder / "archive.tdz")
    td.to_h5(folder / "rows.h5").close()
    return {}


def _turn(name: str, options: argparse.Namespace, count: int) -> dict[str, Any]:
    """Read mini-batches for a while. Return the rate, and the memory without cached pages of files."""
    read = READERS[name](options.folder, count)
    generator = torch.Generator().manual_seed(0)
    # The first call sets things up and is not measured.
    read(torch.randint(count, (ROWS,), generator=generator))
    batches, own = 0, 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < options.seconds:
        rows = torch.randint(count, (ROWS,), generator=generator)
        batch = read(rows)
        if not torch.equal(torch.as_tensor(batch["number"]), rows) or batch["image"].shape != (ROWS, 3, 64, 64):
            raise AssertionError(f"{name}: these are other rows")
        batches += 1
        own = max(own, _own_memory())
    return {"rate": batches * ROWS / elapsed, "own": own}


def _numpy(folder: Path, count: int) -> Read:
    kinds = {torch.uint8: np.uint8, torch.float32: np.float32, torch.int64: np.int64}
    maps = {
        key: np.memmap(folder / "directory" / f"{key}.memmap", kinds[dtype], "r", shape=(count, *shape))
        for key, (shape, dtype) in SHAPES.items()
    }
    return lambda rows: {key: content[rows.numpy()] for key, content in maps.items()}


def _directory(folder: Path, count: int) -> Read:
    from tensordict import TensorDict

    td = TensorDict.load_memmap(folder / "directory")
    return lambda rows: td[rows]


def _archive(folder: Path, count: int) -> Read:
    from tensordict import TensorDict

    td = TensorDict.load_memmap(folder / "archive.tdz")
    return lambda rows: td[rows]


def _h5(folder: Path, count: int) -> Read:
    from tensordict import TensorDict

    td = TensorDict.from_h5(folder / "rows.h5", batch_size=[count])
    return lambda rows: td[rows]


READERS: dict[str, Callable[[Path, int], Read]] = {
    "numpy memmap": _numpy,
    "directory": _directory,
    "archive": _archive,
    "HDF5": _h5,
}
"""What opens a data set and returns the call that reads rows of it."""


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def _limit_memory(limit: int) -> Iterator[Path]:
    """A cgroup, below our own, of at most `limit` bytes; of version 1 or 2, whichever controls memory here."""
    name = f"tensordict-rows-{os.getpid()}"
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {controllers: path for _, controllers, path in lines}
    if "memory" in own:
        group, file = Path(f"/sys/fs/cgroup/memory{own['memory']}/{name}"), "memory.limit_in_bytes"
    else:
        group, file = Path(f"/sys/fs/cgroup{own.get('', '/')}/{name}"), "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"no memory limit can be set: the cgroup {group} cannot be made ({error.strerror})") from None
    try:
        try:
            (group / file).write_text(str(limit))
        except OSError as error:
            raise SystemExit(f"no memory limit can be set: {group / file}: {error.strerror}") from None
        yield group
    finally:
        group.rmdir()


def _peak_of(group: Path) -> int:
    """The most bytes that a cgroup has had."""
    for file in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / file).exists():
            return int((group / file).read_text())
    raise SystemExit(f"the kernel does not record the peak of {group}")


def _own_memory() -> int:
    """Return the bytes of memory of this process, without pages of files."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def _forget(folder: Path) -> None:
    """Have the kernel drop the pages of all files below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


if __name__ == "__main__":
    main()
