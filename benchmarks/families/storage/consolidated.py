"""All tensors in one storage, in memory and in a file, and what pickling costs then."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from workload import Context, Limit, State, Workload

from families.storage.raw import (
    WARMED,
    Sizes,
    called,
    map_in_a_row,
    saving,
    tensors,
    write_in_a_row,
)

LIMITS = (Limit("reference", at_least=2),)
LARGE_FILE_LIMITS = (*LIMITS, Limit("floor", at_least=0.8, called="one raw writer"))
PICKLE_LIMITS = (Limit("reference", at_least=3),)


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads of consolidated containers."""
    found = []
    for shape in (sizes.sixty_four, sizes.small):
        found += [_consolidate(shape), _consolidate(shape, 2), _to_file(context, shape), _from_file(context, shape)]
    return [*found, _pickle(sizes.small, consolidated=False), _pickle(sizes.small, consolidated=True)]


def _consolidate(sizes: tuple[int, int], threads: int = 0) -> Workload:
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        return tensors(module, leaves, size)

    def run(state: State) -> Any:
        return state.td.consolidate(num_threads=threads)

    def floor(state: State) -> Any:
        # The bytes copied side by side, and a tensor over each part.
        return dict(zip(state.data, torch.cat(list(state.data.values())).split(size // 4)))

    def touch(_: State) -> None:
        # Each turn finds memory that has just held as many bytes, as before large saves.
        torch.ones(leaves * size, dtype=torch.uint8)

    def rest(_: State) -> None:
        """Have each call timed alone, after `touch`."""

    name = f"consolidate {called(sizes)}" + (f", num_threads={threads}" if threads else "")
    limits = (Limit("reference", at_least=1),) if threads else LIMITS
    around: dict[str, Any] = {"before": touch, "after": rest} if leaves * size >= WARMED else {}
    return Workload(name, setup, run, floor, limits=limits, payload_bytes=leaves * size, **around)


def _to_file(context: Context, sizes: tuple[int, int]) -> Workload:
    leaves, size = sizes

    def run(state: State, path: Path) -> Any:
        return state.td.consolidate(path)

    name = f"consolidate {called(sizes)} to a file"
    limits = LARGE_FILE_LIMITS if leaves * size >= WARMED else LIMITS
    return saving(context, name, sizes, run, write_in_a_row, {}, limits)


def _from_file(context: Context, sizes: tuple[int, int]) -> Workload:
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        state = tensors(module, leaves, size)
        state.path = context.folder / f"load{leaves}x{size}.consolidated"
        state.raw = context.folder / f"load{leaves}x{size}.raw"
        state.td.consolidate(state.path)
        write_in_a_row(state, state.raw)
        os.sync()
        return state

    def run(state: State) -> Any:
        return state.module.TensorDict.from_consolidated(state.path)

    def floor(state: State) -> Any:
        return map_in_a_row(state.raw, leaves, size)

    return Workload(f"from_consolidated {called(sizes)}", setup, run, floor)


def _pickle(sizes: tuple[int, int], consolidated: bool) -> Workload:
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        state = tensors(module, leaves, size)
        if consolidated:
            state.td = state.td.consolidate()
        return state

    def run(state: State) -> Any:
        return pickle.loads(pickle.dumps(state.td))

    def floor(state: State) -> Any:
        # One buffer there and back, and a tensor over each part.
        content = pickle.loads(pickle.dumps(torch.cat(list(state.data.values())).numpy()))
        return dict(zip(state.data, torch.from_numpy(content).split(size // 4)))

    kind = "consolidated " if consolidated else ""
    limits = () if consolidated else PICKLE_LIMITS
    return Workload(f"pickle {kind}{called(sizes)} and back", setup, run, floor, limits=limits)
