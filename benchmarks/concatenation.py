"""Random mini-batches out of many memory-mapped shards, against the same rows out of one folder.

    .venv/bin/python benchmarks/concatenation.py --shards 1000 --rows 256

Both are in the page cache. A turn takes mini-batches of 256 rows of one, then of the other, and the best turns count.
Opening makes a concatenation of 10,000 shards of known lengths, without loading a shard.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tensordict import LazyConcatenatedTensorDict, TensorDict, lazy_cat, load_memmap

BATCH = 256
SHAPES = {"image": ((3, 16, 16), torch.uint8), "state": ((32,), torch.float32), "number": ((), torch.int64)}


def main() -> None:
    """Write the shards and the folder, take turns, print mini-batches per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=256, help="of a shard")
    parser.add_argument("--batches", type=int, default=200, help="in a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tensordict-shards-", dir=options.folder) as folder:
        found = _compare(Path(folder), options)
    if options.json:
        print(json.dumps(found))
        return
    for name, rate in found["batches_per_second"].items():
        print(f"  {name:16} {rate:10,.0f} mini-batches/s {rate / found['batches_per_second']['one folder']:6.2f}x")
    print(f"  opening 10,000 shards: {found['open_seconds'] * 1e3:.1f} ms")


def _compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    total = options.shards * options.rows
    whole = TensorDict(
        {name: torch.randint(100, (total, *shape)).to(dtype) for name, (shape, dtype) in SHAPES.items()},
        batch_size=[total],
    ).memmap(folder / "whole")
    for number, shard in enumerate(whole.split(options.rows)):
        shard.clone().memmap(folder / str(number))
    joined = lazy_cat([load_memmap(folder / str(number)) for number in range(options.shards)])
    sources = {
        "one folder": load_memmap(folder / "whole"),
        "shards": joined,
        "shards, two keys": joined.select("image", "number"),
    }
    index = torch.randint(total, (options.batches, BATCH))
    assert bool((sources["shards"][index[0]] == sources["one folder"][index[0]]).all())
    best = dict.fromkeys(sources, float("inf"))
    for _ in range(options.turns):
        for name, source in sources.items():
            start = time.perf_counter()
            for at in index:
                source[at]
            best[name] = min(best[name], time.perf_counter() - start)
    start = time.perf_counter()
    LazyConcatenatedTensorDict(range(10_000), lengths=[256] * 10_000, template=whole[:1])
    opened = time.perf_counter() - start
    rates = {name: options.batches / seconds for name, seconds in best.items()}
    return {"batches_per_second": rates, "open_seconds": opened, "rows": total, "shards": options.shards}


if __name__ == "__main__":
    main()
