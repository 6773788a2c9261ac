"""The process that holds one package and times workloads with it when told to, one JSON line at a time."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from digest import digest
from families import FAMILIES, IN_MEMORY
from workload import Context, State, Workload

WARM_UP_CALLS = 3


class Bench:
    """The workloads, the package under test, and the workload that is set up at the moment."""

    def __init__(self, context: Context) -> None:
        self.default_threads = torch.get_num_threads()
        self.processors = os.sched_getaffinity(0)
        self.module: ModuleType | None = None
        self.workloads: dict[tuple[str, str], Workload] = {}
        self.context = context
        self.current: Workload | None = None
        self.state: State | None = None
        self.calls: dict[str, int] = {}

    def list(self, families: list[str]) -> dict[str, Any]:
        """Build the workloads of `families` and describe them."""
        rows = []
        for family in families:
            # The workers draw the same data, whichever families they are asked for.
            torch.manual_seed(0)
            for workload in importlib.import_module(f"families.{family}").workloads(self.context):
                if (family, workload.name) in self.workloads:
                    raise ValueError(f"family {family!r} has two workloads named {workload.name!r}")
                self.workloads[family, workload.name] = workload
                rows.append(
                    {
                        "family": family,
                        "name": workload.name,
                        "in_memory": family in IN_MEMORY,
                        "has_floor": workload.floor is not None,
                        "rivals": list(workload.rivals),
                        "has_reference": not workload.reference_refuses,
                        "target": workload.target,
                        "limits": [asdict(limit) for limit in workload.limits],
                        "payload_bytes": workload.payload_bytes,
                    }
                )
        return {"workloads": rows, "families": list(FAMILIES)}

    def load(self) -> dict[str, Any]:
        """Import the package under test and say what it is."""
        self.module = importlib.import_module("tensordict")
        # Imported objects live for ever: exclude them from the garbage collections between turns.
        gc.collect()
        gc.freeze()
        return {
            "version": getattr(self.module, "__version__", "unknown"),
            "file": self.module.__file__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        }

    def open(self, family: str, name: str) -> dict[str, Any]:
        """Set a workload up, do it once, and return the digest of its result."""
        self.close()
        self.settle(family in IN_MEMORY)
        torch.manual_seed(0)
        self.current = self.workloads[family, name]
        self.state = self.current.setup(self.module)
        return {"digest": self.checked("package")}

    def calibrate(self, side: str, target_s: float) -> dict[str, Any]:
        """Find how many calls take about `target_s` seconds; for floor and rivals, also return the digest."""
        found = self.checked(side) if side != "package" else None
        if self.workload.after is not None:
            self.calls[side] = 1
            return {"calls": 1, "digest": found}
        for _ in range(WARM_UP_CALLS):
            self.batch(side, 1)
        calls = 1
        while (elapsed := self.batch(side, calls)) < target_s / 4:
            calls *= 2
        self.calls[side] = max(1, round(calls * target_s / elapsed))
        return {"calls": self.calls[side], "digest": found}

    def turn(self, side: str) -> dict[str, Any]:
        """Return the seconds per call of one batch."""
        gc.collect()
        if self.workload.after is not None:
            return {"seconds": self.single(side)}
        calls = self.calls[side]
        if calls > 1:
            # The processor's caches belonged to another process a moment ago.
            self.batch(side, 1)
        return {"seconds": self.batch(side, calls) / calls}

    def close(self) -> dict[str, Any]:
        """Let go of the current workload's state."""
        self.current = None
        self.state = None
        self.calls = {}
        gc.collect()
        return {}

    def settle(self, in_memory: bool) -> None:
        """Give in-memory workloads one thread on one processor, the same one in all workers.

        Left to the scheduler, a package stays for seconds beside a busy neighbour that the other does not have.
        """
        torch.set_num_threads(1 if in_memory else self.default_threads)
        os.sched_setaffinity(0, {max(self.processors)} if in_memory else self.processors)

    @property
    def workload(self) -> Workload:
        """The workload that is open."""
        if self.current is None:
            raise RuntimeError("no workload is open")
        return self.current

    def side(self, side: str) -> Callable[[State | None], Any]:
        """Return the function that the side "package", "floor" or a rival runs."""
        named = {"package": self.workload.run, "floor": self.workload.floor, **self.workload.rivals}
        fn = named.get(side)
        if fn is None:
            raise RuntimeError(f"workload {self.workload.name!r} has no side {side!r}")
        return fn

    def checked(self, side: str) -> dict[str, list[str]]:
        """Do one call, untimed, and return the digest of its result."""
        found = digest(self.side(side)(self.state))
        self.clean_up()
        return found

    def batch(self, side: str, calls: int) -> float:
        """Return the seconds that `calls` calls took: freeing results included, garbage collection not."""
        fn, state = self.side(side), self.state
        gc.disable()
        try:
            start = time.perf_counter()
            for _ in range(calls):
                fn(state)
            return time.perf_counter() - start
        finally:
            gc.enable()

    def single(self, side: str) -> float:
        """Return the seconds of one call that needs a clean-up; its result outlives the measurement."""
        fn, state = self.side(side), self.state
        if self.workload.before is not None:
            self.workload.before(state)
        gc.disable()
        try:
            start = time.perf_counter()
            result = fn(state)
            elapsed = time.perf_counter() - start
        finally:
            gc.enable()
        del result
        self.clean_up()
        return elapsed

    def clean_up(self) -> None:
        """Undo what a call of the open workload left behind, where it leaves anything."""
        if self.workload.after is not None and self.state is not None:
            self.workload.after(self.state)


def serve(bench: Bench, requests: Any, replies: Any) -> None:
    """Answer each request line {"do": method, **arguments} with a line that has the result or "error"."""
    for line in requests:
        request = json.loads(line)
        method = request.pop("do")
        try:
            reply = getattr(bench, method)(**request)
        except Exception as error:  # The report belongs in the table, whatever a package raises.
            print(_trace(error), file=sys.stderr)
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _trace(error: BaseException) -> str:
    """Return the places of a traceback without source lines, because nobody here may read the reference's source."""
    frames = [
        f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)
    ]
    return "\n".join([f"{type(error).__name__}: {error}", *frames])


def main() -> None:
    """Serve requests on standard input; standard output is kept for replies alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where this worker may write files")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show warnings and tracebacks")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not options.verbose:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)
        warnings.simplefilter("ignore")
    serve(Bench(Context(options.quick, options.folder)), sys.stdin, replies)


if __name__ == "__main__":
    main()
