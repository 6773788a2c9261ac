"""How long each format takes to save, load and read rows of the same container, and how large it is, beside a folder.

    .venv/bin/python benchmarks/formats.py            # 62 MiB in 4 leaves , and 5,000 leaves of 1 KiB
    .venv/bin/python benchmarks/formats.py --quick    # does it all run? The figures are noisy

In turns, in one process, medians over the rounds, files in the page cache and nothing synced. As many bytes are written
and deleted before each save, untimed. The figures are multiples of the time of the folder in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensordict import TensorDict, from_consolidated, from_parquet, from_safetensors, from_zarr, load_memmap


@dataclass(frozen=True)
class Format:
    """A format: how a container is saved to a path, and how it is opened again."""

    name: str
    suffix: str
    save: Callable[[Any, str], object]
    load: Callable[[str], Any]


FORMATS = [
    Format("folder", "", lambda td, path: td.memmap(path), load_memmap),
    Format("archive", ".tdz", lambda td, path: td.save(path), load_memmap),
    Format("archive, deflated", ".tdz", lambda td, path: td.save(path, compression="deflate"), load_memmap),
    Format("consolidated", ".bin", lambda td, path: td.consolidate(path), from_consolidated),
    Format("safetensors", ".safetensors", lambda td, path: td.to_safetensors(path), from_safetensors),
    Format("HDF5", ".h5", lambda td, path: td.to_h5(path).close(), lambda path: TensorDict.from_h5(path)),
    Format("Zarr, rows", ".zarr", lambda td, path: td.to_zarr(path, chunks="rows").close(), from_zarr),
    Format(
        "Parquet",
        ".parquet",
        lambda td, path: td.to_parquet(path, separator="."),
        lambda path: from_parquet(path, separator="."),
    ),
    Format("torch.save", ".pt", torch.save, lambda path: torch.load(path, weights_only=True)),
]
# A table has a column for each leaf, and a Zarr group a folder.
FOR_MANY = [one for one in FORMATS if one.name not in ("Zarr, rows", "Parquet", "archive, deflated")]


def few_large(quick: bool) -> TensorDict:
    """Four leaves, of half bytes that repeat and half noise."""
    rows = 1 << (10 if quick else 14)
    torch.manual_seed(0)
    return TensorDict(
        {
            "image": torch.randint(0, 8, (rows, 3 * 32 * 32), dtype=torch.uint8),
            "embedding": torch.randn(rows, 200),
            "meta": {"index": torch.arange(rows), "noise": torch.randn(rows, 32)},
        },
        batch_size=[rows],
    )


def many_small(quick: bool) -> TensorDict:
    """Leaves of 1 KiB each, nested by hundreds."""
    count = 500 if quick else 5_000
    torch.manual_seed(0)
    return TensorDict(
        {f"part{part}": {f"leaf{leaf}": torch.randn(64, 4) for leaf in range(100)} for part in range(count // 100)},
        batch_size=[64],
    )


def measure_time(call: Callable[[], object]) -> float:
    """Seconds that a call takes; freeing what it gives does not count."""
    start = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def prime(path: str, nbytes: int) -> None:
    """Write as many bytes and delete them, so that each save finds memory that is ready to be written to."""
    with open(path, "wb") as file:
        file.write(bytes(nbytes))
    os.unlink(path)


def size_of(path: str) -> int:
    """Bytes of a file, or of all files below a folder."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(path) for name in names)


def close(container: Any) -> None:
    """Close what is over an open file."""
    if hasattr(container, "close"):
        container.close()


def measure(td: TensorDict, formats: list[Format], rounds: int, folder: str) -> dict[str, dict[str, float]]:
    """Return the medians of seconds, and the bytes on disk, by measurement and format."""
    seconds: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}, "256 rows": {}, "size": {}}
    rows = torch.randint(0, len(td), (256,), generator=torch.Generator().manual_seed(1))
    for _ in range(rounds):
        for one in formats:
            path = f"{folder}/saved{one.suffix}"
            prime(f"{folder}/primed", td.bytes())
            found = {"save": measure_time(lambda one=one, path=path: one.save(td, path))}  # type: ignore[misc]
            found["size"] = float(size_of(path))
            start = time.perf_counter()
            loaded = one.load(path)
            found["load"] = time.perf_counter() - start
            found["256 rows"] = measure_time(lambda loaded=loaded: loaded[rows])  # type: ignore[misc]
            close(loaded)
            del loaded
            for what, figure in found.items():
                seconds[what].setdefault(one.name, []).append(figure)
            (shutil.rmtree if os.path.isdir(path) else os.unlink)(path)
    return {what: {name: statistics.median(taken) for name, taken in by.items()} for what, by in seconds.items()}


def report(title: str, found: dict[str, dict[str, float]]) -> None:
    """Print each figure as a multiple of the folder's figure."""
    print(f"\n{title}; times and sizes as multiples of those of the folder\n")
    print("| format | " + " | ".join(found) + " |")
    print("|---|" + "---|" * len(found))
    for name in found["save"]:
        print(f"| {name} | " + " | ".join(f"{by[name] / by['folder']:.2g}" for by in found.values()) + " |")


def main() -> None:
    """Measure both containers and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small containers, one round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=("large", "small"), help="one of the two containers only")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="where to write the medians")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    tables: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for part, make, formats in (("large", few_large, FORMATS), ("small", many_small, FOR_MANY)):
            if options.part not in (None, part):
                continue
            td = make(options.quick)
            leaves = len(list(td.keys(include_nested=True, leaves_only=True)))
            title = f"{td.bytes() / 2**20:.3g} MiB in {leaves:,} leaves"
            tables[title] = measure(td, formats, rounds, folder)
            report(title, tables[title])
    if options.json is not None:
        machine = {"machine": platform.platform(), "processors": os.cpu_count(), "torch": torch.__version__}
        options.json.write_text(json.dumps({**machine, "formats": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
