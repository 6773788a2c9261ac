"""The archive format: one zip file."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from workload import Context, Limit, State, Workload

from families.storage.raw import (
    Sizes,
    called,
    map_in_a_row,
    safetensors_save,
    saving,
    tensors,
    torch_save,
    write_in_a_row,
)

DIRECTORY = "the same as a directory"
LARGE_LIMITS = (Limit(DIRECTORY, at_least=0.8), Limit("floor", at_least=0.8, called="one raw writer"))
SMALL_LIMITS = (Limit("reference", at_least=10), Limit("torch.save", at_least=1))
LOAD_LIMITS = (Limit("safetensors.load_file", at_least=1),)


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads of this format."""
    return [
        _save(context, sizes.sixty_four, 0, LARGE_LIMITS),
        _save(context, sizes.sixty_four, 2, LARGE_LIMITS),
        _save(context, sizes.small, 0, SMALL_LIMITS),
        _load(context, sizes.sixty_four),
        _load(context, sizes.small, LOAD_LIMITS),
    ]


def _save(context: Context, sizes: tuple[int, int], threads: int, limits: tuple[Limit, ...]) -> Workload:
    def run(state: State, path: Path) -> Any:
        return state.td.memmap(path.with_suffix(".tdz"), num_threads=threads)

    def directory(state: State, path: Path) -> Any:
        return state.td.memmap(path, num_threads=threads)

    name = f"save an archive of {called(sizes)}, num_threads={threads}"
    rivals = {DIRECTORY: directory} if limits is LARGE_LIMITS else {"torch.save": torch_save}
    return saving(context, name, sizes, run, write_in_a_row, rivals, limits)


def _load(context: Context, sizes: tuple[int, int], limits: tuple[Limit, ...] = ()) -> Workload:
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        state = tensors(module, leaves, size)
        state.path = context.folder / f"load{leaves}x{size}.tdz"
        state.td.memmap(state.path)
        state.others = {kind: context.folder / f"beside{leaves}x{size}.{kind}" for kind in ("raw", "safetensors", "pt")}
        write_in_a_row(state, state.others["raw"])
        safetensors_save(state, state.others["safetensors"])
        torch_save(state, state.others["pt"])
        os.sync()
        del state.td, state.data
        return state

    def run(state: State) -> Any:
        return state.module.load_memmap(state.path)

    def floor(state: State) -> Any:
        return map_in_a_row(state.others["raw"], leaves, size)

    def load_file(state: State) -> Any:
        from safetensors.torch import load_file

        return load_file(state.others["safetensors"])

    rivals = {
        "safetensors.load_file": load_file,
        "torch.load(mmap=True)": lambda state: torch.load(state.others["pt"], mmap=True),
    }
    return Workload(f"load_memmap of an archive of {called(sizes)}", setup, run, floor, rivals, limits=limits)
