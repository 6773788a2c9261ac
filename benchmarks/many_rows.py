"""Opens, indexes, shuffles, extends and compacts a data set of 10^9 rows in 10^5 shards, beside one of 10^3 shards.

    .venv/bin/python benchmarks/many_rows.py                    # writes 1.2 GB in 10^5 files, some minutes
    .venv/bin/python benchmarks/many_rows.py --shards 2000 --quick

A shard is an archive of 10,000 rows of one byte, and a writer has 1,000 shards. Every figure is measured in a fresh
process on files in the page cache; so are the figures of memory, in MB:

- `import`: the resident memory of a process that has imported torch and this package, and has opened nothing;
- `added`: how much the step adds to memory that belongs to the process alone (`RssAnon`; pages of mapped files are not
  counted, because the system shares and drops them);
- `whole`: the resident memory after the step.

`--folder` keeps the data sets, and takes those that it kept before.

Each figure is shown for both sizes: the median of the rounds, and in brackets the least and the most; for later
batches, those of 20 turns in each round. `raw` is a loop of `os.open`, `os.pread` and `os.close` over random rows, in
turns with the mini-batches of the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROWS, SHARDS_PER_WRITER, BATCH = 10_000, 1_000, 256


def main() -> None:
    """Write the data sets, measure each in processes of its own, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--few", type=int, default=1_000, help="shards of the data set beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write and keep the data sets")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--quick", action="store_true", help="does it run? One round, few shards")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(STEPS[options.step](options.folder)))
        return
    if options.quick:
        options.rounds, options.shards, options.few = 1, min(options.shards, 2_000), 200
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tensordict-many-rows-"))
        )
        for shards in (options.few, options.shards):
            path = folder / f"{shards}"
            if not path.exists():
                write(path, shards)
        for step in options.steps:
            runs: dict[int, list[dict[str, Any]]] = {options.few: [], options.shards: []}
            for _ in range(options.rounds):
                for shards, figures in runs.items():
                    command = [sys.executable, __file__, "--step", step, "--folder", str(folder / f"{shards}")]
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    figures.append(json.loads(done.stdout))
            print(f"{step:44}", *(f"{shards:14,} shards" + 22 * " " for shards in runs))
            for name in runs[options.few][0]:
                shown = (_show([each[name] for each in figures]) for figures in runs.values())
                print(f"  {name:42}", *shown, flush=True)


def _show(rounds: list[Any]) -> str:
    """Show the median, the least and the most of the figures of some rounds, each a number or a list of them."""
    values = [value for figure in rounds for value in (figure if isinstance(figure, list) else [figure])]
    return f"{statistics.median(values):14,.1f} ({min(values):,.1f} to {max(values):,.1f})".ljust(43)


def write(path: Path, shards: int) -> None:
    """Write a data set in which the content of a row follows from its number.

    A `DatasetWriter` makes the first shard. All others are copies with their own label, content and checksums, each
    with its line in a manifest, in a tenth of the time.
    """
    import numpy as np
    import torch

    from tensordict import DatasetWriter, TensorDict
    from tensordict.datasets.records import to_file
    from tensordict.io.formats.archive_reader import Archive
    from tensordict.io.formats.zipping import set_crc

    made = path.with_name(f".{path.name}")
    shutil.rmtree(made, ignore_errors=True)
    with DatasetWriter(made, rows_per_shard=ROWS, format="archive") as writer:
        writer.extend(TensorDict({"x": content(torch.arange(ROWS))}, [ROWS]))
    first, (manifest,) = made / "shards" / writer.writer / "00000000.tdz", (made / "writers").iterdir()
    head = json.loads(manifest.read_text().splitlines()[0][9:])
    archive, entries = bytearray(first.read_bytes()), Archive(str(first)).entries
    meta, rows = entries["meta.json"], entries["x.memmap"]
    description = slice(meta.start, meta.start + meta.size)
    shutil.rmtree(first.parent)
    manifest.unlink()
    # Ids are equally long, so that a label can be replaced.
    template, old = bytes(archive[description]), f'"{writer.writer}"'.encode()
    for start in range(0, shards, SHARDS_PER_WRITER):
        name = f"{start:08}{writer.writer[8:]}"
        (made / "shards" / name).mkdir(parents=True)
        lines: list[list[Any]] = [[*head[:2], name, *head[3:]]]
        for number in range(min(SHARDS_PER_WRITER, shards - start)):
            label = template.replace(old, f'"{name}"'.encode()).replace(b"00000000.tdz", b"%08d.tdz" % number)
            shard = (start + number) * ROWS
            filled = np.asarray(content(np.arange(shard, shard + ROWS))).tobytes()
            archive[description], archive[rows.start : rows.start + ROWS] = label, filled
            set_crc(archive, meta, zlib.crc32(label))
            set_crc(archive, rows, zlib.crc32(filled))
            digest = hashlib.sha256(f"9 {len(label)} meta.json".encode() + label).hexdigest()
            lines.append([f"{number:08}.tdz", ROWS, len(archive), digest])
            (made / "shards" / name / f"{number:08}.tdz").write_bytes(archive)
        (made / "writers" / f"{name}.jsonl").write_bytes(to_file(lines))
    made.rename(path)


def content(rows: Any) -> Any:
    """Return the entry of rows of these numbers, in 0 to 250, so that a row from another place is noticed."""
    numbers = rows * 40_503 // 4_096 % 251
    return numbers.byte() if hasattr(numbers, "byte") else numbers.astype("uint8")


# --- what a step takes ------------------------------------------------------------------------------------------------


class Memory:
    """The memory of this process, from the moment when only the modules are imported."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.torch_alone = _read_memory("VmRSS")
        import tensordict.datasets  # noqa: F401

        self._imported, self._own = _read_memory("VmRSS"), _read_memory("RssAnon")

    def figures(self) -> dict[str, float]:
        """Return megabytes."""
        return {
            "MB import torch": self.torch_alone,
            "MB import": self._imported,
            "MB added": _read_memory("RssAnon") - self._own,
            "MB whole": _read_memory("VmRSS"),
            "MB peak": _read_memory("VmHWM"),
        }


def _read_memory(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(name)


@contextlib.contextmanager
def timed(figures: dict[str, float], name: str, count: int = 1) -> Iterator[None]:
    """Add the microseconds of one of `count` calls to figures."""
    start = time.perf_counter()
    yield
    figures[name] = (time.perf_counter() - start) / count * 1e6


def measure_opening(path: Path) -> dict[str, float]:
    """Open the data set, and read a row."""
    memory, found = Memory(), dict[str, float]()
    from tensordict import open_dataset

    with timed(found, "us open"):
        data = open_dataset(path)
    found |= memory.figures()
    with timed(found, "us first row"):
        data[len(data) // 2]
    generator = memory.torch.Generator().manual_seed(0)
    at = memory.torch.randint(len(data), (1_000,), generator=generator)
    with timed(found, "us row", 1_000):
        for row in at.tolist():
            data[row]
    with timed(found, "us pickle"):
        sent = pickle.dumps(data)
    found["bytes pickled"] = len(sent)
    with timed(found, "us unpickle"):
        pickle.loads(sent)
    return found


def touch(data: Any) -> None:
    """Read a row of every shard, in mini-batches."""
    import torch

    for number in range(0, len(data) // ROWS, BATCH):
        data[torch.arange(number, min(number + BATCH, len(data) // ROWS)) * ROWS]


def measure_batches(path: Path) -> dict[str, Any]:
    """Read mini-batches of random rows: the first ones, and those after all shards were used, beside the raw loop."""
    memory, found = Memory(), dict[str, float]()
    from tensordict import open_dataset
    from tensordict.io.formats.archive_reader import Archive

    data = open_dataset(path)
    shards = [shard for shard, _ in data.shards()]
    start = Archive(shards[0]).entries["x.memmap"].start
    generator = memory.torch.Generator().manual_seed(0)

    def time_batches(count: int, read: Callable[[Any], Any]) -> float:
        batches = [memory.torch.randint(len(data) // ROWS * ROWS, (BATCH,), generator=generator) for _ in range(count)]
        took: dict[str, float] = {}
        with timed(took, "us", count):
            read_rows = [read(at) for at in batches]
        if not all(memory.torch.equal(rows, content(at)) for rows, at in zip(read_rows, batches, strict=True)):
            raise AssertionError("these are other rows")
        return took["us"]

    def read_raw(at: Any) -> Any:
        rows = bytearray()
        for row in at.tolist():
            fd = os.open(shards[row // ROWS], os.O_RDONLY | os.O_CLOEXEC)
            rows += os.pread(fd, 1, start + row % ROWS)
            os.close(fd)
        return memory.torch.frombuffer(rows, dtype=memory.torch.uint8)

    def read_ours(at: Any) -> Any:
        return data[at]["x"]

    found["us batch, first 20"] = time_batches(20, read_ours)
    with timed(found, "us first row of each shard", len(shards)):
        touch(data)
    turns = [(time_batches(20, read_ours), time_batches(20, read_raw)) for _ in range(20)]
    return (
        found
        | {"us batch, later": [ours for ours, _ in turns], "us batch, raw": [raw for _, raw in turns]}
        | memory.figures()
    )


def measure_loader(path: Path) -> dict[str, float]:
    """Shuffle, save the state, and go on from it, in this process and with two workers."""
    memory, found = Memory(), dict[str, float]()
    from tensordict import open_dataset
    from tensordict.datasets import DatasetLoader

    data = open_dataset(path)
    touch(data)
    for name, shuffle in (("all rows", True), ("32 shards", 32)):
        loader = DatasetLoader(data, BATCH, shuffle=shuffle, seed=1, rank=1, ranks=4)
        batches: Any = iter(loader)
        with timed(found, f"us first batch, {name} mixed"):
            next(batches)
        with timed(found, f"us batch, {name} mixed", 200):
            for _ in range(200):
                next(batches)
        order = loader._order(len(data), 0)
        with timed(found, f"us order of a batch, {name} mixed", 200):
            for number in range(0, len(order), len(order) // 200):
                order.batch(number)
        state = loader.state_dict()
        found[f"bytes of the state, {name} mixed"] = len(json.dumps(state))
        other = DatasetLoader(data, BATCH, shuffle=shuffle, seed=5, rank=1, ranks=4)
        with timed(found, f"us load the state, {name} mixed, and read"):
            other.load_state_dict(state)
            if not memory.torch.equal(next(iter(other))["x"], next(batches)["x"]):
                raise AssertionError("the loader goes on elsewhere")
        batches.close()
    found |= memory.figures()
    with timed(found, "us first batch of two workers"):
        batches = iter(DatasetLoader(data, BATCH, num_workers=2))
        next(batches)
    with timed(found, "us batch of two workers", 200):
        for _ in range(200):
            next(batches)
    workers = multiprocessing.active_children()
    found["MB of a worker alone"] = max(_read_private(worker.pid) for worker in workers)
    return found


def _read_private(process: int | None) -> float:
    """Return the memory that a process shares with no other one, in MB."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def measure_appending(path: Path) -> dict[str, float]:
    """Add 100 small shards, see them, and merge them, which leaves the rest of the data set alone."""
    memory, found = Memory(), dict[str, float]()
    from tensordict import DatasetWriter, TensorDict, open_dataset
    from tensordict.datasets import compact

    data = open_dataset(path)
    before = len(data)
    batch = TensorDict({"x": content(memory.torch.arange(before, before + 100))}, [100])
    with DatasetWriter(path, format="archive") as writer:
        with timed(found, "us first flush"):
            writer.extend(batch[:1])
            writer.flush()
        with timed(found, "us flush", 99):
            for row in range(1, 100):
                writer.extend(batch[row : row + 1])
                writer.flush()
    with timed(found, "us refresh"):
        data.refresh()
    if not memory.torch.equal(data[before:]["x"], batch["x"]):
        raise AssertionError("these are other rows")
    del data
    found |= memory.figures()
    with timed(found, "us compact"):
        old, new = compact(path, rows_per_shard=ROWS)
    found |= {"shards merged": old - new, "MB peak of compact": _read_memory("VmHWM")}
    return found


STEPS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "opening": measure_opening,
    "batches": measure_batches,
    "loader": measure_loader,
    "appending": measure_appending,
}


if __name__ == "__main__":
    main()
