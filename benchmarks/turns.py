"""Programs that are measured on this package and on the reference in turns, by scripts that hold their own programs.

Each package lives in a process of its own, which runs one turn at a time: a batch of calls of about `TURN` seconds,
torch on one thread, garbage collection off. The results of one call are compared first; figures are medians of rounds.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURN = 0.1
"""Length of a turn in seconds; at least one call."""

Call = Callable[[], float]
"""A call of what is measured; what it returns is the same on both packages."""


def environments(suffix: str = "") -> dict[str, Path]:
    """The interpreters of both sides; `suffix` "-clients" for those with the client libraries."""
    return {
        "ours": ROOT / f".venv{suffix}" / "bin" / "python",
        "reference": ROOT / f".venv{suffix}-reference" / "bin" / "python",
    }


class Worker:
    """A process that holds one package, seen from here."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, request: str) -> float:
        """Send a line and read the number that it is answered with."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{request}: the worker has ended; what it said is above")
        return float(line)


@contextmanager
def workers(script: str, suffix: str = "") -> Iterator[dict[str, Worker]]:
    """A process of `script --worker` for each side. Ours takes the source beside this folder."""
    with ExitStack() as stack:
        found = {}
        for side, python in environments(suffix).items():
            if not python.exists():
                raise SystemExit(f"no interpreter at {python}: `make bench` and `make bench-clients` create them")
            kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            process = subprocess.Popen(
                [python, "-W", "ignore", script, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**kept, "PYTHONPATH": str(ROOT / "src")} if side == "ours" else kept,
            )
            # Ask the worker to end instead of killing it, so that its own child processes end, too.
            stack.callback(process.wait)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            found[side] = Worker(process)
        yield found


def compare(name: str, sides: dict[str, Worker], rounds: int) -> dict[str, float]:
    """Median seconds for a call on each side, and how many times faster ours is."""
    results = {side: worker.ask(name) for side, worker in sides.items()}
    if abs(results["ours"] - results["reference"]) > 1e-4 * abs(results["reference"]):
        raise SystemExit(f"{name}: {results['ours']} here, {results['reference']} on the reference")
    turns: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, worker in sides.items():
            turns[side].append(worker.ask("turn"))
    medians = {side: statistics.median(seconds) for side, seconds in turns.items()}
    return {**medians, "ratio": medians["reference"] / medians["ours"]}


def work(programs: Callable[[str], Call], turn: float = TURN) -> None:
    """Answer requests: the name of a program with the result of one call, "turn" with the seconds for a call of it."""
    import torch

    answers, sys.stdout = sys.stdout, sys.stderr  # TorchRL logs to stdout
    torch.set_num_threads(1)
    call: Call | None = None
    count = 1
    for request in map(str.strip, sys.stdin):
        if request == "turn":
            if call is None:
                raise SystemExit('"turn" before the name of a program')
            answer = _seconds(call, count) / count
        else:
            torch.manual_seed(0)
            call, count = programs(request), 1
            answer = call()
            while (elapsed := _seconds(call, count)) < turn / 4:
                count *= 2
            count = max(1, round(count * turn / elapsed))
        print(answer, file=answers, flush=True)


def _seconds(call: Call, count: int) -> float:
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return time.perf_counter() - start
    finally:
        gc.enable()
