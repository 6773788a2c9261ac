"""Workloads that put containers into the object store of Ray and get them back."""

from __future__ import annotations

import atexit
import functools
import time
from types import ModuleType
from typing import Any

import numpy
import torch
from workload import Context, Limit, State, Workload

MIB = 1 << 20
GIB = 1 << 30


def workloads(context: Context) -> list[Workload]:
    """Return these workloads; with `--quick`, a sixteenth of the bytes of the large ones."""
    large = GIB // (16 if context.quick else 1)
    return [
        _make_store_workload(large, 64, consolidated=False),
        _make_store_workload(large, 64, consolidated=True),
        _make_store_workload(1000 * 1024, 1000, consolidated=False),
    ]


def _make_store_workload(nbytes: int, leaves: int, consolidated: bool) -> Workload:
    """A container into the object store of Ray and out again: beside an array of as many bytes."""

    def setup(module: ModuleType) -> State:
        ray = _ray()
        rows = nbytes // leaves // 16
        td = module.TensorDict({f"k{i}": torch.ones(rows, 4) for i in range(leaves)}, [rows])
        return State(
            ray=ray, td=td.consolidate() if consolidated else td, array=numpy.ones((leaves * rows, 4), numpy.float32)
        )

    def run(state: State) -> Any:
        return {"k0": state.ray.get(state.ray.put(state.td))["k0"][:1].clone()}

    def floor(state: State) -> Any:
        return {"k0": torch.from_numpy(state.ray.get(state.ray.put(state.array))[:1].copy())}

    limits = (Limit("reference", at_least=3.0),)
    if nbytes >= MIB:
        limits += (Limit("floor", at_least=0.8, called="a numpy array"),)
    leaf = nbytes // leaves
    size = f"{leaf // MIB} MiB" if leaf >= MIB else f"{leaf // 1024} KiB"
    name = f"ray.put and ray.get, {leaves} x {size}{' consolidated' if consolidated else ''}"
    return Workload(name, setup, run, floor, after=_settle, limits=limits, payload_bytes=nbytes)


@functools.cache
def _ray() -> Any:
    """Ray, with an instance of this process whose store has room for two of the large objects."""
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=5 * GIB // 2,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
    atexit.register(ray.shutdown)
    # So that nobody waits for the system to find the memory of the store.
    kept = [ray.put(numpy.ones(GIB // 2, numpy.uint8)) for _ in range(4)]
    del kept
    return ray


def _settle(state: State) -> None:
    """Wait until Ray has dropped what nobody has any more."""
    time.sleep(0.3)
