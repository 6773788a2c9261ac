"""Tensors that the workloads of all formats share, and the raw system calls that they are compared with."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from workload import Context, Limit, State, Workload

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

WARMED = 64 * MIB
"""Saves of at least this many bytes are preceded by an untimed write of the same bytes."""

VECTORS = 1024
"""As many buffers as one system call takes."""

_NUMBERS = itertools.count()
"""Of the saves of this process, which has one folder for all of them."""


@dataclass(frozen=True)
class Sizes:
    """The numbers of leaves and their bytes: one large leaf, many small ones, and what lies between."""

    one: tuple[int, int]
    sixty_four: tuple[int, int]
    small: tuple[int, int]

    @classmethod
    def of(cls, context: Context) -> Sizes:
        """Return the sizes of a run."""
        if context.quick:
            return cls((1, GIB // 16), (64, MIB), (500, KIB))
        return cls((1, GIB), (64, 16 * MIB), (5000, KIB))


def tensors(module: ModuleType, leaves: int, size: int) -> State:
    """Return a state with `leaves` tensors of `size` bytes, and a container of them."""
    data = {f"k{i}": torch.full((size // 4,), float(i + 1)) for i in range(leaves)}
    return State(module=module, data=data, td=module.TensorDict(data, []), size=size)


def saving(
    context: Context,
    name: str,
    sizes: tuple[int, int],
    run: Callable[[State, Path], Any],
    floor: Callable[[State, Path], Any],
    rivals: dict[str, Callable[[State, Path], Any]],
    limits: tuple[Limit, ...],
) -> Workload:
    """Return a workload that saves tensors to a new path: an overwrite would be another one."""
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        return tensors(module, leaves, size)

    def to_new_path(save: Callable[[State, Path], Any]) -> Callable[[State], Any]:
        def call(state: State) -> Any:
            state.path = context.folder / f"save{next(_NUMBERS):04}"
            return save(state, state.path)

        return call

    def before(state: State) -> None:
        # Memory unused for a while is slow to write to (a virtual machine may have to get it from its host
        # first), so every turn starts from memory that has just held the same bytes.
        folder = context.folder / "before"
        write_files(folder, state.data, 0)
        shutil.rmtree(folder)

    def after(state: State) -> None:
        # Deleting first spares the disk the bytes; syncing leaves it idle for the next turn. Many small files stay
        # until the end of the run: for minutes, ext4 looks at each file just deleted before it makes a new one, and
        # that takes up to forty times as long as making it.
        if leaves * size >= WARMED:
            for path in context.folder.glob(f"{state.path.name}*"):
                remove(path)
        os.sync()

    return Workload(
        name,
        setup,
        to_new_path(run),
        to_new_path(floor),
        {rival: to_new_path(call) for rival, call in rivals.items()},
        before=before if leaves * size >= WARMED else None,
        after=after,
        limits=limits,
        payload_bytes=leaves * size,
    )


def torch_save(state: State, path: Path) -> Any:
    """Save the tensors with torch."""
    torch.save(state.data, path)
    return state.data


def safetensors_save(state: State, path: Path) -> Any:
    """Save the tensors with safetensors."""
    from safetensors.torch import save_file

    save_file(state.data, path)
    return state.data


def write_in_a_row(state: State, path: Path) -> Any:
    """The floor of saving to one file: the bytes of all tensors, by positioned writes of as many as one call takes."""
    views = [memoryview(leaf.numpy()).cast("B") for leaf in state.data.values()]
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    try:
        for start in range(0, len(views), VECTORS):
            part = views[start : start + VECTORS]
            written, end = 0, sum(map(len, part))
            while written < end:
                # A call moves 2 GiB at most, and these workloads less.
                written += os.pwritev(handle, part, start * state.size)
    finally:
        os.close(handle)
    return state.data


def map_in_a_row(path: Path, leaves: int, size: int) -> dict[str, Tensor]:
    """The floor of loading from one file: a map of it, and a tensor over each part."""
    storage = torch.UntypedStorage.from_file(str(path), True, leaves * size)
    flat = torch.empty(0).set_(storage, 0, (leaves * size // 4,))
    return dict(zip([f"k{i}" for i in range(leaves)], flat.split(size // 4)))


def write_files(folder: Path, data: dict[str, Tensor], threads: int) -> None:
    """The floor of saving to a folder: positioned writes of the same bytes into new files, by as many threads."""
    folder.mkdir()
    jobs = [(f"{folder}/{key}.memmap", memoryview(leaf.numpy()).cast("B")) for key, leaf in data.items()]
    if threads < 2:
        _write_all(jobs)
        return
    with ThreadPoolExecutor(threads) as pool:
        # Consuming the results raises what a write raised.
        for _ in pool.map(_write_all, (jobs[start::threads] for start in range(threads))):
            pass


def _write_all(jobs: list[tuple[str, memoryview]]) -> None:
    for path, view in jobs:
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
        try:
            written = 0
            while written < len(view):
                written += os.pwrite(handle, view[written:], written)
        finally:
            os.close(handle)


def remove(path: Path) -> None:
    """Delete a file or a folder, where there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def called(sizes: tuple[int, int]) -> str:
    """Return how a table calls a number of leaves and their bytes."""
    leaves, size = sizes
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{leaves} x {size // unit} {name}"
    return f"{leaves} x {size} B"
