"""Measures the time to compile a function over containers, and how often it is compiled again, beside the reference.

    .venv/bin/python benchmarks/compiling.py
    .venv/bin/python benchmarks/compiling.py --only vmap --rounds 7

Each first compile runs in a new process that has compiled a function of one tensor before, so the compiler's own
imports do not count. The sides go in turns. A function is then called again with the same structure, with locked
containers, with a second and a third batch size; "compiled" is how often in all, by the calls of its backend, or that
torch refused the call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

from turns import ROOT, environments

CALLS = ("first", "same", "locked", "batch of 16", "batch of 8")


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="functions whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(_count_compiles(options.worker)))
        return
    found = {}
    if not options.json:
        print(
            f"{'':24}{'ours':>10}{'reference':>12}{'ref/ours':>10}   compiled, ours and reference: {', '.join(CALLS)}"
        )
    for name in [name for name in FUNCTIONS if options.only in name]:
        found[name] = row = _compare(name, options.rounds)
        if not options.json:
            ours, reference = row["ours"]["seconds"], row["reference"]["seconds"]
            counts = " and ".join("/".join(map(str, side["compiled"])) for side in row.values())
            print(f"{name:24}{ours:8.2f} s{reference:10.2f} s{reference / ours:9.2f}x   {counts}", flush=True)
    if options.json:
        print(json.dumps(found))


def _compare(name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Per side the median seconds of the first call, and how often the function was compiled after each call."""
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in environments()}
    for _ in range(rounds):
        for side, python in environments().items():
            kept = {variable: value for variable, value in os.environ.items() if variable != "PYTHONPATH"}
            done = subprocess.run(
                [python, "-W", "ignore", __file__, "--worker", name],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                env={**kept, "PYTHONPATH": str(ROOT / "src")} if side == "ours" else kept,
            )
            runs[side].append(json.loads(done.stdout))
    return {
        side: {"seconds": statistics.median(one["seconds"] for one in made), "compiled": made[-1]["compiled"]}
        for side, made in runs.items()
    }


def _count_compiles(name: str) -> dict[str, Any]:
    """The seconds of the first call, and how often the function was compiled by the end of each."""
    import torch
    from torch._dynamo.backends.debugging import aot_eager

    count = 0

    def backend(graph: Any, examples: Any) -> Any:
        nonlocal count
        count += 1
        return aot_eager(graph, examples)

    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(3))
    prepare, leaves = FUNCTIONS[name]
    run = torch.compile(prepare(), backend=backend, fullgraph=True)
    seconds, compiled = 0.0, list[int | str]()
    for call in CALLS:
        td = _container(int(call.split()[-1]) if call.startswith("batch") else 32, leaves)
        if call == "locked":
            td = td.lock_()
        start = time.perf_counter()
        try:
            run(td)
        except torch._dynamo.exc.TorchDynamoException:
            compiled.append("refused")
            continue
        seconds = seconds or time.perf_counter() - start
        compiled.append(count)
    return {"seconds": seconds, "compiled": compiled}


def _container(batch: int, leaves: int) -> Any:
    import torch

    from tensordict import TensorDict

    inner = {f"k{i}": torch.ones(batch, 4) for i in range(leaves)}
    return TensorDict({"in": TensorDict(inner, [batch])}, [batch])


def _arithmetic() -> Callable[[Any], Any]:
    return lambda td: td["in"] * 2 + 1


def _nested_keys() -> Callable[[Any], Any]:
    def run(td: Any) -> Any:
        td = td.copy()
        td["out", "deep", "x"] = td["in", "k0"] + td["in", "k1"]
        return td["out"]

    return run


def _adds_keys() -> Callable[[Any], Any]:
    def run(td: Any) -> Any:
        td = td.clone(False)
        td["new"] = td["in", "k0"] * 2
        return td

    return run


def _vmap() -> Callable[[Any], Any]:
    import torch

    return lambda td: torch.vmap(lambda row: row * 2)(td["in"])


def _stack() -> Callable[[Any], Any]:
    import torch

    return lambda td: torch.stack([td["in"][:4], td["in"][4:8]])


def _region() -> Callable[[Any], Any]:
    import torch

    region = torch.compiler.nested_compile_region(lambda td: td * 2)
    return lambda td: region(region(td["in"]))


def _gradients() -> Callable[[Any], Any]:
    import torch

    weight = torch.ones(4, requires_grad=True)
    return lambda td: sum((leaf * weight).sum() for leaf in td.values(True, True))


FUNCTIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], int]] = {
    **{f"arithmetic, {count} leaves": (_arithmetic, count) for count in (4, 20, 100)},
    "nested keys": (_nested_keys, 4),
    "adds a key": (_adds_keys, 4),
    "vmap": (_vmap, 4),
    "index and stack": (_stack, 4),
    "regions": (_region, 4),
    "gradients": (_gradients, 4),
}


if __name__ == "__main__":
    main()
