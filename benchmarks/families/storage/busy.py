"""Random rows of a mapped file, alone and while two other processes keep the processor busy."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, Limit, State, Workload

from families.storage.raw import KIB, Sizes, remove

ROWS = 64
# So many reads are one call: what is timed next to busy processes is to last longer than their turns on the processor.
READS = 8
LIMITS = (Limit("reference", at_least=1),)
# Ends with its parent, however that ends.
BURN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"

_burning: list[subprocess.Popen[bytes]] = []
"""The other processes, which are stopped except during a call."""


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads: images of bytes and of floats, whose rows torch copies with all threads, and short rows."""
    images = {
        "uint8 [3, 224, 224]": ((3, 224, 224), torch.uint8),
        "float32 [3, 224, 224]": ((3, 224, 224), torch.float32),
    }
    rows = images | {"float32 [1024]": ((1024,), torch.float32)}
    return [_rows(context, what, *rows[what], busy) for what in rows for busy in (False, True)]


def _rows(context: Context, what: str, shape: tuple[int, ...], dtype: torch.dtype, busy: bool) -> Workload:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    count = (128 if context.quick else 512) * KIB * KIB // nbytes

    def setup(module: ModuleType) -> State:
        path = context.folder / f"rows{count}"
        remove(path)
        data = torch.zeros((), dtype=dtype).expand(count, *shape)
        td = module.TensorDict({"x": data}, [count]).memmap(path)
        td["x"].fill_(1)
        if busy and not _burning:
            _start()
        return State(td=td, plain=td["x"].as_subclass(Tensor), at=torch.randint(count, (READS, ROWS)).unbind())

    def run(state: State) -> Any:
        for at in state.at:
            read = state.td[at]
        return read

    def floor(state: State) -> Any:
        for at in state.at:
            read = state.plain[at]
        return {"x": read}

    def before(state: State) -> None:
        state.at = torch.randint(count, (READS, ROWS)).unbind()
        _signal(signal.SIGCONT)

    def after(state: State) -> None:
        _signal(signal.SIGSTOP)

    name = f"{READS} times {ROWS} random rows of {what}" + (", 2 busy processes" if busy else "")
    around: dict[str, Any] = {"before": before, "after": after} if busy else {}
    return Workload(name, setup, run, floor, limits=LIMITS, payload_bytes=READS * ROWS * nbytes, **around)


def _start() -> None:
    _burning.extend(subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2))
    _signal(signal.SIGSTOP)
    atexit.register(_end)


def _signal(number: signal.Signals) -> None:
    for process in _burning:
        os.kill(process.pid, number)


def _end() -> None:
    for process in _burning:
        process.kill()
        process.wait()
