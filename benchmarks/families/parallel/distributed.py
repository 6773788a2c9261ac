"""Workloads that send containers to another process over gloo, with the same package at the other end."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from workload import Context, Limit, State, Workload

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))

# An end that is gone must end the run.
_PATIENCE = timedelta(seconds=60)
# Commands to the other process: receive a container, a new container, or a plain tensor; send; reduce.
RECEIVE, MAKE, BARE, SEND, REDUCE, BARE_REDUCE = range(6)


def workloads(context: Context) -> list[Workload]:
    """Return these workloads; with `--quick`, a sixteenth of the bytes of the large ones."""
    large = GIB // 16 if context.quick else GIB
    found = []
    for leaves, nbytes in ((1000, KIB), (1, large), (64, large // 64)):
        found += [_exchange(leaves, nbytes, kind, name) for kind, name in ((RECEIVE, "send to recv"), (MAKE, "init"))]
    return [*found, _exchange(1000, KIB, REDUCE, "all_reduce"), _exchange(16, large // 64, REDUCE, "all_reduce")]


def _exchange(leaves: int, nbytes: int, kind: int, name: str) -> Workload:
    def setup(module: ModuleType) -> State:
        return State(flat=_flat(leaves, nbytes), td=_container(module, leaves, nbytes), pair=Pair.of(module))

    def run(state: State) -> Any:
        state.pair.tell(kind, leaves, nbytes)
        if kind == RECEIVE:
            state.td.send(1)
        elif kind == MAKE:
            state.td.init_remote(1)
        else:
            state.td.all_reduce(op=dist.ReduceOp.MAX)
        return state.pair.wait_for_answer()

    def floor(state: State) -> Any:
        """One call of torch's with the same bytes."""
        state.pair.tell(BARE_REDUCE if kind == REDUCE else BARE, leaves, nbytes)
        if kind == REDUCE:
            dist.all_reduce(state.flat, op=dist.ReduceOp.MAX)
        else:
            dist.send(state.flat, 1)
        return state.pair.wait_for_answer()

    limits = [Limit("reference", at_least=2.0)] if leaves == 1000 and kind != MAKE else []
    if leaves == 1 and kind == RECEIVE:
        limits.append(Limit("floor", at_least=0.9, called="one bare send"))
    size = next(f"{nbytes // unit} {called}" for unit, called in UNITS if nbytes >= unit)
    return Workload(f"{name} {leaves} x {size}", setup, run, floor, limits=tuple(limits), payload_bytes=leaves * nbytes)


class Pair:
    """This process as rank 0, and another one with the same package as rank 1."""

    _made: Pair | None = None

    def __init__(self, module: ModuleType) -> None:
        store = tempfile.mktemp(prefix="bench-store-")
        assert module.__file__ is not None
        paths = [os.path.dirname(os.path.dirname(module.__file__)), *filter(None, sys.path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._peer = subprocess.Popen([sys.executable, __file__, store], env=environment)
        atexit.register(self._peer.kill)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2, timeout=_PATIENCE)

    @classmethod
    def of(cls, module: ModuleType) -> Pair:
        """The one pair of this process."""
        if cls._made is None:
            cls._made = cls(module)
        return cls._made

    def tell(self, *order: int) -> None:
        """Say what comes."""
        dist.send(torch.tensor(order), 1, tag=1)

    def wait_for_answer(self) -> int:
        """Wait until it has come; returns what the other end found in it."""
        found = torch.zeros(1, dtype=torch.int64)
        dist.recv(found, 1, tag=2)
        return int(found)


def _flat(leaves: int, nbytes: int) -> Tensor:
    return torch.arange(leaves * nbytes // 4, dtype=torch.float32)


def _container(module: ModuleType, leaves: int, nbytes: int) -> Any:
    return module.TensorDict({f"k{i}": _flat(1, nbytes) for i in range(leaves)})


def serve(store: str) -> None:
    """Be the other end, until the first one ends."""
    import tensordict

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    # Exclude imported objects from garbage collections.
    gc.freeze()
    containers: dict[tuple[int, int], Any] = {}
    flats: dict[tuple[int, int], Tensor] = {}
    order = torch.zeros(3, dtype=torch.int64)
    while True:
        try:
            dist.recv(order, 0, tag=1)
        except RuntimeError:
            return
        kind, *size = order.tolist()
        key = (size[0], size[1])
        if key not in containers | flats:
            # Of one workload at a time, or four processes hold several GiB each.
            containers.clear()
            flats.clear()
        if kind in (BARE, BARE_REDUCE):
            if key not in flats:
                flats[key] = _flat(*key)
            dist.recv(flats[key], 0) if kind == BARE else dist.all_reduce(flats[key], op=dist.ReduceOp.MAX)
            found = flats[key]
        elif kind == MAKE:
            found = tensordict.TensorDict.from_remote_init(0)["k0"]
        else:
            if key not in containers:
                containers[key] = _container(tensordict, *key)
            td = containers[key]
            td.recv(0) if kind == RECEIVE else td.all_reduce(op=dist.ReduceOp.MAX)
            found = td["k0"]
        dist.send(found[1].long().view(1), 0, tag=2)
        if kind == MAKE and key[0] * key[1] > GIB // 64:
            # The reference leaves cycles behind, which would hold one GiB after the other.
            found = None
            gc.collect()


if __name__ == "__main__":
    serve(sys.argv[1])
