"""Measures how reads and writes scale with threads, beside a dict of tensors and the reference, in turns.

    .venv/bin/python benchmarks/threads.py
    .venv/bin/python benchmarks/threads.py --python PATH/python3.14t --reference PATH/OTHER/python3.14t --only read

A row has the calls of one thread in a second, and multiples of that number for several threads; the same for the
processor time of a call; and how often in a thousand calls a thread had to wait, with the most threads. The multiple is
at most the number of processors; with a GIL it is one, but for what torch does without it. If the processor time grows
or threads wait, they disturb each other by locks or by shared memory. Other programs hardly move these two figures,
while a busy machine makes the multiples of calls meaningless.

`PYTHON_GIL=0` is set: libraries that do not say that they can do without a GIL (Triton, which the reference imports)
would start it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from turns import ROOT, Worker

THREADS = (1, 2, 4, 8)
# Literals, as the keys of programs are: Python 3.13 compares two equal strings that are not one under a lock.
KEYS = ("k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8", "k9")
SIDES = ("ours", "floor", "reference")

Job = Callable[[], object]
"""What one thread calls over and over."""


def main() -> None:
    """Measure what the command line asks for, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="the best of these counts; default %(default)s")
    parser.add_argument("--seconds", type=float, default=0.1, help="length of a turn; default %(default)s")
    parser.add_argument("--only", default="", help="programs whose name contains this text")
    parser.add_argument("--python", default=sys.executable, help="ours, and the dict's; default: this one")
    parser.add_argument("--reference", help="one that has the reference; without it, the reference is left out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return
    names = [name for name in PROGRAMS if options.only in name]
    if not names:
        parser.error(f"no program contains {options.only!r}; there are: {', '.join(PROGRAMS)}")
    with workers(options.python, options.reference) as sides:
        titles = "".join(f"{threads:>8}" for threads in THREADS[1:])
        print(f"{'':44} calls, 1{titles} seconds, 1 {titles}    waits")
        found = {name: measure(name, sides, options.rounds, options.seconds) for name in names}
    if options.json:
        print(json.dumps(found))


@contextlib.contextmanager
def workers(python: str, reference: str | None) -> Iterator[dict[str, Worker]]:
    """Start a process for each side. The floor runs in the process of this package."""
    with contextlib.ExitStack() as stack:
        found = {}
        for side, path in (("ours", python), ("reference", reference)):
            if path is None:
                continue
            variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            if side == "ours":
                variables["PYTHONPATH"] = str(ROOT / "src")
            ask = "import sysconfig; print(sysconfig.get_config_var('Py_GIL_DISABLED') or 0)"
            free = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=True).stdout.strip() == "1"
            process = subprocess.Popen(
                [path, "-W", "ignore", __file__, "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**variables, "PYTHON_GIL": "0"} if free else variables,
            )
            stack.callback(process.wait)
            assert process.stdin is not None
            stack.callback(process.stdin.close)
            found[side] = Worker(process)
        yield {**found, "floor": found["ours"]}


def measure(name: str, sides: dict[str, Worker], rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Print the rows of a program; gives the calls in a second, and the seconds and waits of a call, by threads."""
    best = {
        side: {"calls": [0.0] * len(THREADS), "cpu": [math.inf] * len(THREADS), "waits": [math.inf] * len(THREADS)}
        for side in SIDES
        if side in sides
    }
    for _ in range(rounds):
        for at, threads in enumerate(THREADS):
            for side, row in best.items():
                row["calls"][at] = max(row["calls"][at], sides[side].ask(f"{name}|{side}|{threads}|{seconds}"))
                for least in ("cpu", "waits"):
                    row[least][at] = min(row[least][at], sides[side].ask(least))
    for side, row in best.items():
        calls, cpu = row["calls"], row["cpu"]
        print(
            f"{name if side == 'ours' else '':33} {side:10} {calls[0]:11,.0f}/s"
            + "".join(f"{count / calls[0]:7.2f}x" for count in calls[1:])
            + f"{cpu[0] * 1e6:9.2f} us"
            + "".join(f"{took / cpu[0]:7.2f}x" for took in cpu[1:])
            + f"{row['waits'][-1] * 1e3:9.3f}",
            flush=True,
        )
    return best


def work() -> None:
    """Answer "program|side|threads|seconds" with the calls in a second, then with processor time and waits per call."""
    import torch

    torch.set_num_threads(1)
    measured: dict[str, float] = {}
    for request in map(str.strip, sys.stdin):
        if request in measured:
            answer = measured[request]
        else:
            name, side, threads, seconds = request.split("|")
            answer, measured["cpu"], measured["waits"] = run(
                PROGRAMS[name](side == "floor", int(threads)), float(seconds)
            )
        print(answer, flush=True)


def run(jobs: list[Job], seconds: float) -> tuple[float, float, float]:
    """Do each job in a thread of its own, over and over; gives the calls in a second, and the cost and waits of one."""
    counts = [0] * len(jobs)
    began: list[tuple[float, float, int]] = []
    start = threading.Barrier(len(jobs), action=lambda: began.append(_now()))

    def loop(number: int, job: Job) -> None:
        job()
        count = 0
        start.wait()
        end = began[0][0] + seconds
        while time.perf_counter() < end:
            for _ in range(20):
                job()
            count += 20
        counts[number] = count

    pool = [threading.Thread(target=loop, args=pair) for pair in enumerate(jobs)]
    gc.collect()
    gc.disable()
    try:
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        elapsed, cpu, waits = (after - before for after, before in zip(_now(), began[0], strict=True))
    finally:
        gc.enable()
    done = sum(counts)
    return done / elapsed, cpu / done, waits / done


def _now() -> tuple[float, float, int]:
    """Seconds that have passed, seconds of processors, and how often a thread of this process has waited."""
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


# --- programs ---------------------------------------------------------------------------------------------------------
# Each gives the jobs of some threads: on a container, or as floor on dicts, as one would write it by hand.


def _leaves() -> dict[str, Any]:
    import torch

    return {key: torch.ones(32, 3) for key in KEYS}


def _container(tree: dict[str, Any]) -> Any:
    from tensordict import TensorDict

    return TensorDict(tree, [32])


def _shared(floor: bool, tree: dict[str, Any]) -> Any:
    return tree if floor else _container(tree)


def _read(floor: bool, threads: int) -> list[Job]:
    shared = _shared(floor, _leaves())
    return [lambda key=key: shared[key] for key in KEYS[:threads]]


def _read_nested(floor: bool, threads: int) -> list[Job]:
    shared = _shared(floor, {"n": _leaves()})
    if floor:
        return [lambda key=key: shared["n"][key] for key in KEYS[:threads]]
    return [lambda key=("n", key): shared[key] for key in KEYS[:threads]]


def _write(floor: bool, threads: int) -> list[Job]:
    shared, values = _shared(floor, _leaves()), _leaves()

    def job(key: str) -> Job:
        value = values[key]

        def write() -> None:
            shared[key] = value

        return write

    return [job(key) for key in KEYS[:threads]]


def _write_in_place(floor: bool, threads: int) -> list[Job]:
    shared, values = _shared(floor, _leaves()), _leaves()
    if floor:
        return [lambda key=key: shared[key].copy_(values[key]) for key in KEYS[:threads]]
    return [lambda key=key: shared.set_(key, values[key]) for key in KEYS[:threads]]


def _row(floor: bool, threads: int) -> list[Job]:
    shared = _shared(floor, _leaves())
    if floor:
        return [lambda at=at: {key: value[at] for key, value in shared.items()} for at in range(threads)]
    return [lambda at=at: shared[at] for at in range(threads)]


def _of_each(ours: Callable[[Any], object], by_hand: Callable[[dict[str, Any]], object]) -> Callable[..., list[Job]]:
    """Return a program in which every thread has a container of its own."""

    def jobs(floor: bool, threads: int) -> list[Job]:
        each = [_shared(floor, _leaves()) for _ in range(threads)]
        return [lambda own=own: (by_hand if floor else ours)(own) for own in each]

    return jobs


def _construct(floor: bool, threads: int) -> list[Job]:
    each = [_leaves() for _ in range(threads)]
    return [lambda own=own: dict(own) if floor else _container(own) for own in each]


def _negate(own: dict[str, Any]) -> dict[str, Any]:
    return {key: value.neg() for key, value in own.items()}


PROGRAMS: dict[str, Callable[[bool, int], list[Job]]] = {
    "shared, own keys: read": _read,
    "shared, own keys: read, two levels": _read_nested,
    "shared, own keys: write": _write,
    "shared, own keys: write in place": _write_in_place,
    "shared: td[i]": _row,
    "own: td[i]": _of_each(lambda td: td[3], lambda own: {key: value[3] for key, value in own.items()}),
    "own: apply(neg)": _of_each(lambda td: td.apply(lambda leaf: leaf.neg()), _negate),
    "own: clone": _of_each(lambda td: td.clone(), lambda own: {key: value.clone() for key, value in own.items()}),
    "own: td + 1": _of_each(lambda td: td + 1, lambda own: {key: value + 1 for key, value in own.items()}),
    "own: lock_().unlock_()": _of_each(lambda td: td.lock_().unlock_(), lambda own: dict(own)),
    "own: construct": _construct,
}


if __name__ == "__main__":
    main()
