"""Writes and reads data sets of shards, against what users do today.

    .venv/bin/python benchmarks/shards.py                  # 1,000,000 rows of 1 KiB, 1,000 shards to read from
    .venv/bin/python benchmarks/shards.py --rows 50000 --quick

- write: rows of 1 KiB in batches of 256, against one raw sequential writer of the same bytes;
- read: random mini-batches of 256 rows out of 1,000 shards in a later epoch (their pages are mapped), against one
  folder, a table of Hugging Face's `datasets` in torch's format and a Zarr array with row chunks, of the same rows;
- open: a data set of 10,000 shards, on a warm cache;
- loader: what a `DatasetLoader` with two workers delivers.

Each figure is the median of the rounds, which take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.datasets import DatasetLoader

ROW, BATCH = 1024, 256
FORMATS = ("folder", "archive", "zarr")


def main() -> None:
    """Measure, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--parts", nargs="+", default=["write", "read", "open", "loader"])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="does it run? One round, fewer shards")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tensordict-datasets-", dir=options.folder) as folder:
        for part in options.parts:
            found[part] = PARTS[part](Path(folder), options)
            gc.collect()
    print(json.dumps(found, indent=None if options.json else 2))


def turns(rounds: int, calls: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Run the calls in turns and return the median result of each."""
    figures: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            figures[name].append(call())
    return {name: statistics.median(found) for name, found in figures.items()}


def write(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds; ratios to the raw writer."""
    batch = TensorDict({"row": torch.randint(0, 255, (BATCH, ROW), dtype=torch.uint8)}, [BATCH])
    content = bytes(batch["row"].numpy())
    count = options.rows // BATCH

    def raw() -> float:
        start = time.perf_counter()
        with open(folder / "raw", "wb", buffering=0) as file:
            for _ in range(count):
                file.write(content)
        seconds = time.perf_counter() - start
        os.unlink(folder / "raw")
        return seconds

    def ours(format: str) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            with DatasetWriter(folder / format, format=format) as writer:
                for _ in range(count):
                    writer.extend(batch)
            seconds = time.perf_counter() - start
            shutil.rmtree(folder / format)
            return seconds

        return run

    seconds = turns(options.rounds, {"raw": raw, **{name: ours(name) for name in FORMATS}})
    ratios = {f"{name} of raw": seconds["raw"] / seconds[name] for name in FORMATS}
    return {"seconds": seconds, **ratios}


def read(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a mini-batch of 256 rows."""
    import pyarrow
    import zarr

    import datasets

    rows, shards = options.rows, 100 if options.quick else 1_000
    data = TensorDict({"row": torch.randint(0, 255, (rows, ROW), dtype=torch.uint8)}, [rows])
    one = data.memmap(folder / "one")
    for format in FORMATS:
        with DatasetWriter(folder / f"shards-{format}", rows_per_shard=max(1, rows // shards), format=format) as writer:
            for start in range(0, rows, 65_536):
                writer.extend(data[start : start + 65_536])
    group = zarr.create_array(
        folder / "rows.zarr", shape=(rows, ROW), chunks=(64, ROW), dtype="uint8", compressors=None
    )
    group[:] = data["row"].numpy()
    flat = pyarrow.array(data["row"].numpy().reshape(-1))
    written = datasets.Dataset(pyarrow.table({"row": pyarrow.FixedSizeListArray.from_arrays(flat, ROW)}))
    written.save_to_disk(str(folder / "hf"))
    table = datasets.load_from_disk(str(folder / "hf")).with_format("torch")
    del data, flat, written
    generator = torch.Generator().manual_seed(0)
    readers: dict[str, Callable[[torch.Tensor], Any]] = {
        "one folder": lambda at: one[at]["row"],
        **{f"shards, {format}": _rows_of(folder / f"shards-{format}") for format in FORMATS},
        "Hugging Face": lambda at: table[at.tolist()]["row"],
        "Zarr": lambda at: group.oindex[np.sort(at.numpy())],
    }

    # An epoch before: all shards are open, and their pages mapped.
    for call in list(readers.values())[:3]:
        for start in range(0, rows, 20_000):
            call(torch.arange(start, min(start + 20_000, rows), 4096 // ROW))

    def measure_time(call: Callable[[torch.Tensor], Any]) -> Callable[[], float]:
        def run() -> float:
            batches = [torch.randint(rows, (BATCH,), generator=generator) for _ in range(20)]
            call(batches[0])
            start = time.perf_counter()
            for at in batches:
                call(at)
            return (time.perf_counter() - start) / len(batches) * 1e6

        return run

    found = turns(options.rounds, {name: measure_time(call) for name, call in readers.items()})
    ours = found["shards, folder"]
    ratios = {f"times {name}": found[name] / ours for name in ("one folder", "Hugging Face", "Zarr")}
    return {"microseconds": found, **ratios}


def _rows_of(path: Path) -> Callable[[torch.Tensor], Any]:
    data = open_dataset(path)
    return lambda at: data[at]["row"]


def open_many(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a data set of 10,000 shards is open."""
    shards = 500 if options.quick else 10_000
    with DatasetWriter(folder / "many", rows_per_shard=1) as writer:
        writer.extend(TensorDict({"x": torch.zeros(shards, 4)}, [shards]))

    def run() -> float:
        start = time.perf_counter()
        if len(open_dataset(folder / "many")) != shards:
            raise AssertionError("rows are missing")
        return time.perf_counter() - start

    return {"shards": shards, **turns(options.rounds, {"seconds": run})}


def loader(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes a second of a loader with two workers, of batches of 4,096 rows."""
    rows = min(options.rows, 500_000)
    with DatasetWriter(folder / "loaded") as writer:
        for _ in range(rows // 4_096):
            writer.extend(TensorDict({"row": torch.zeros(4_096, ROW, dtype=torch.uint8)}, [4_096]))
    data = open_dataset(folder / "loaded")

    def run() -> float:
        batches = iter(DatasetLoader(data, 4_096, num_workers=2, prefetch=4))
        next(batches)
        start = time.perf_counter()
        nbytes = sum(batch["row"].nbytes for batch in batches)
        return nbytes / (time.perf_counter() - start)

    return turns(options.rounds, {"bytes per second": run})


PARTS = {"write": write, "read": read, "open": open_many, "loader": loader}


if __name__ == "__main__":
    main()
