"""Workloads that save containers to disk and load them back."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, State, Workload

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

WARMED = 64 * MIB
"""Saves of at least this many bytes are preceded by an untimed write of the same bytes."""


def workloads(context: Context) -> list[Workload]:
    """Return the workloads of this family; with `--quick`, a sixteenth of the bytes, a tenth of the files."""
    large = GIB // 16 if context.quick else GIB
    medium = MIB if context.quick else 16 * MIB
    many = 500 if context.quick else 5000
    one, sixty_four, small = (1, large), (64, medium), (many, KIB)
    found = [
        _save(context, *one, 0),
        _save(context, *sixty_four, 0),
        _save(context, *sixty_four, 2, target="save"),
        _save(context, *small, 0),
        _save(context, *small, 2),
        _load(context, *one),
        _load(context, *sixty_four),
        _load(context, *small, target="load"),
    ]
    return found


def _save(context: Context, leaves: int, size: int, threads: int, target: str = "") -> Workload:
    def setup(module: ModuleType) -> State:
        state = _tensors(module, leaves, size)
        # A folder of each call's own: an overwrite would be another workload.
        state.saves = 0
        return state

    def fresh(state: State) -> Path:
        state.saves += 1
        state.path = context.folder / f"save{state.saves}"
        return state.path

    def run(state: State) -> Any:
        return state.td.memmap(fresh(state), num_threads=threads)

    def floor(state: State) -> Any:
        _write_files(fresh(state), state.data, threads)
        return state.data

    def before(state: State) -> None:
        # Memory unused for a while is slow to write to (a virtual machine may have to get it from its host
        # first), so every turn starts from memory that has just held the same bytes.
        _write_files(fresh(state), state.data, threads)
        shutil.rmtree(state.path)

    def after(state: State) -> None:
        # Deleting first spares the disk the bytes; syncing leaves it idle for the next turn.
        shutil.rmtree(state.path)
        os.sync()

    name = f"save {leaves} x {_bytes(size)}, num_threads={threads}"
    return Workload(
        name,
        setup,
        run,
        floor,
        before=before if leaves * size >= WARMED else None,
        after=after,
        target=target,
        payload_bytes=leaves * size,
    )


def _load(context: Context, leaves: int, size: int, target: str = "") -> Workload:
    def setup(module: ModuleType) -> State:
        state = _tensors(module, leaves, size)
        state.path = context.folder / f"load{leaves}x{size}"
        shutil.rmtree(state.path, ignore_errors=True)
        state.td.memmap(state.path)
        os.sync()
        state.shape = (size // 4,)
        state.files = {key: str(state.path / f"{key}.memmap") for key in state.data}
        state.bytes_each = size
        # The tensors have done their work, and saving has left the container on disk.
        del state.td, state.data
        return state

    def run(state: State) -> Any:
        return state.module.load_memmap(state.path)

    return Workload(f"load_memmap {leaves} x {_bytes(size)}", setup, run, _map_files, target=target)


def _tensors(module: ModuleType, leaves: int, size: int) -> State:
    data = {f"k{i}": torch.full((size // 4,), float(i + 1)) for i in range(leaves)}
    return State(module=module, data=data, td=module.TensorDict(data, []))


def _write_files(folder: Path, data: dict[str, Tensor], threads: int) -> None:
    """The floor of saving: positioned writes of the same bytes into fresh files, by as many threads."""
    folder.mkdir()
    jobs = [(f"{folder}/{key}.memmap", memoryview(leaf.numpy()).cast("B")) for key, leaf in data.items()]
    if threads < 2:
        for job in jobs:
            _write_file(job)
        return
    with ThreadPoolExecutor(threads) as pool:
        # Consuming the results raises what a write raised.
        for _ in pool.map(_write_all, (jobs[start::threads] for start in range(threads))):
            pass


def _write_all(jobs: list[tuple[str, memoryview]]) -> None:
    for job in jobs:
        _write_file(job)


def _write_file(job: tuple[str, memoryview]) -> None:
    path, view = job
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    try:
        written = 0
        while written < len(view):
            written += os.pwrite(handle, view[written:], written)
    finally:
        os.close(handle)


def _map_files(state: State) -> Any:
    """The floor of loading: each file mapped, and a tensor over the map."""
    shape, size = state.shape, state.bytes_each
    found = {}
    for key, path in state.files.items():
        storage = torch.UntypedStorage.from_file(path, True, size)
        found[key] = torch.empty(0).set_(storage, 0, shape)
    return found


def _bytes(size: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"
