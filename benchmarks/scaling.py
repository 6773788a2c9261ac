"""Measures what a leaf costs in trees of 10 to 10,000 leaves and of 1 to 20 levels, beside the reference, in turns.

    .venv/bin/python benchmarks/scaling.py
    .venv/bin/python benchmarks/scaling.py --only clone --rounds 21

A row has the nanoseconds per leaf at each size, and the slope: the time grows with this power of the number of leaves,
fitted over the sizes above 10. 1 is linear, 2 quadratic; the processor's caches, which 10,000 tensors do not fit in,
make up to 0.2 of it. A nested key is as long as its entry is deep, so that what is asked for one key at a time grows
with the depth. `tests/test_scaling.py` counts instructions, where this measures time.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turns import Call, compare, work, workers

COUNTS = (10, 100, 1_000, 10_000)
DEPTHS = (1, 2, 5, 10, 20)
LEAVES_A_LEVEL = 5


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="operations whose name contains this text")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="numbers of leaves; default %(default)s")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="numbers of levels; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(program, turn=0.02)
        return
    names = [name for name in OPERATIONS if options.only in name]
    if not names:
        parser.error(f"no operation contains {options.only!r}; there are: {', '.join(OPERATIONS)}")
    found = {}
    for shape in ("leaves", "levels"):
        sizes = [int(size) for size in (options.counts if shape == "leaves" else options.depths).split(",")]
        if not options.json:
            titles = "".join(f"{size:>11,}" for size in sizes)
            print(f"\nns per leaf, by {shape:12}{titles}      slope")
        with workers(__file__) as sides:
            for name in names:
                rows = [compare(f"{name}|{shape}|{size}", sides, options.rounds) for size in sizes]
                found[f"{name}, {shape}"] = row = _row(shape, sizes, rows)
                if not options.json:
                    print(_lines(name, row), flush=True)
    if options.json:
        print(json.dumps(found))


def _row(shape: str, sizes: list[int], rows: list[dict[str, float]]) -> dict[str, Any]:
    """Per side the nanoseconds per leaf and the slope, and the ratio at each size."""
    leaves = [size if shape == "leaves" else size * LEAVES_A_LEVEL for size in sizes]
    per_leaf = {
        side: [row[side] * 1e9 / count for row, count in zip(rows, leaves, strict=True)]
        for side in ("ours", "reference")
    }
    slopes = {side: _slope(leaves, [row[side] for row in rows]) for side in per_leaf}
    return {"leaves": leaves, "ns_per_leaf": per_leaf, "slope": slopes, "ratio": [row["ratio"] for row in rows]}


def _slope(leaves: list[int], seconds: list[float]) -> float | None:
    """Fit the power of the number of leaves by which the seconds grow; None without two sizes above 10."""
    points = [(math.log(count), math.log(took)) for count, took in zip(leaves, seconds, strict=True) if count > 10]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _lines(name: str, row: dict[str, Any]) -> str:
    text = []
    for side, figures in row["ns_per_leaf"].items():
        slope = "-" if row["slope"][side] is None else f"{row['slope'][side]:.2f}"
        text.append(
            f"{name if side == 'ours' else '':16} {side:11}"
            + "".join(f"{ns:11,.0f}" for ns in figures)
            + f"{slope:>11}"
        )
    text.append(f"{'':28}" + "".join(f"{ratio:10.2f}x" for ratio in row["ratio"]))
    return "\n".join(text)


def program(request: str) -> Call:
    """The call that a request "operation|leaves or levels|size" names, on the package of this process."""
    name, shape, size = request.split("|")
    return OPERATIONS[name](_flat(int(size)) if shape == "leaves" else _deep(int(size)))


def _flat(count: int) -> dict[str, Any]:
    import torch

    return {f"k{i}": torch.ones(4) for i in range(count)}


def _deep(levels: int) -> dict[str, Any]:
    tree = _flat(LEAVES_A_LEVEL)
    for _ in range(levels - 1):
        tree = {**_flat(LEAVES_A_LEVEL), "n": tree}
    return tree


def _make_program(prepare: Callable[[Any], Callable[[], Any]]) -> Callable[[dict[str, Any]], Call]:
    """Makes a program of an operation; it returns how many leaves the operation gave, which is counted once."""

    def build(tree: dict[str, Any]) -> Call:
        run = prepare(_container(tree))
        result = run()
        leaves = float(len(list(result.keys(True, True)) if hasattr(result, "batch_size") else result))

        def call() -> float:
            run()
            return leaves

        return call

    return build


def _container(tree: dict[str, Any]) -> Any:
    from tensordict import TensorDict

    return TensorDict(tree, [4])


def _each(visit: Callable[[Any, Any], Any]) -> Callable[[Any], Callable[[], Any]]:
    """An operation on each leaf, by its key."""

    def prepare(td: Any) -> Callable[[], Any]:
        keys = list(td.keys(True, True))
        return lambda: [visit(td, key) for key in keys]

    return prepare


def _construct(td: Any) -> Callable[[], Any]:
    tree = td.to_dict()
    return lambda: _container(tree)


def _stack(td: Any) -> Callable[[], Any]:
    import torch

    return lambda: torch.stack([td, td])


def _apply(td: Any) -> Callable[[], Any]:
    import torch

    return lambda: td.apply(torch.neg)


def _update(td: Any) -> Callable[[], Any]:
    other = td.clone()
    return lambda: td.update(other)


def _save(td: Any) -> Callable[[], Any]:
    def run() -> Any:
        folder = tempfile.mkdtemp(prefix="tensordict-scaling-")
        try:
            return td.memmap(folder)
        finally:
            shutil.rmtree(folder)

    return run


def _load(td: Any) -> Callable[[], Any]:
    # The folder goes with the process.
    kept = tempfile.TemporaryDirectory(prefix="tensordict-scaling-")
    td.memmap(Path(kept.name) / "saved")
    return lambda: type(td).load_memmap(Path(kept.name) / "saved")


OPERATIONS: dict[str, Callable[[dict[str, Any]], Call]] = {
    name: _make_program(prepare)
    for name, prepare in {
        "construct": _construct,
        "td[key]": _each(lambda td, key: td[key]),
        "set": _each(lambda td, key: td.set(key, td.get(key))),
        "td[0]": lambda td: lambda: td[0],
        "stack": _stack,
        "apply": _apply,
        "td + 1": lambda td: lambda: td + 1,
        "clone": lambda td: lambda: td.clone(),
        "flatten_keys": lambda td: lambda: td.flatten_keys("."),
        "keys": lambda td: lambda: list(td.keys(True, True)),
        "update": _update,
        "memmap, delete": _save,
        "load_memmap": _load,
    }.items()
}


if __name__ == "__main__":
    main()
