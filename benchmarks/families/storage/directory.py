"""The directory format: a file for each tensor."""

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
    remove,
    safetensors_save,
    saving,
    tensors,
    torch_save,
    write_files,
)

LARGE_LIMITS = (
    Limit("reference", at_least=4),
    Limit("safetensors.save_file", at_least=1),
    Limit("torch.save", at_least=2),
    Limit("floor", at_least=0.8, called="raw positioned writes"),
)
MAPPED = "a bare loop that creates, writes and maps the files"
SMALL_LIMITS = (
    Limit("floor", at_most=1.2, called="a bare loop that creates and writes the files"),
    Limit(MAPPED, at_least=0.8),
)
LOAD_LIMITS = (
    Limit("reference", at_least=2),
    Limit("floor", at_most=2, called="a bare loop that maps the files"),
)


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads of this format."""
    return [
        _save(context, sizes.one, 0),
        _save(context, sizes.sixty_four, 0, LARGE_LIMITS),
        _save(context, sizes.sixty_four, 2, LARGE_LIMITS),
        _save(context, sizes.small, 0, SMALL_LIMITS),
        _save(context, sizes.small, 2),
        _load(context, sizes.one),
        _load(context, sizes.sixty_four),
        _load(context, sizes.small, LOAD_LIMITS),
    ]


def _save(context: Context, sizes: tuple[int, int], threads: int, limits: tuple[Limit, ...] = ()) -> Workload:
    def run(state: State, path: Path) -> Any:
        return state.td.memmap(path, num_threads=threads)

    def floor(state: State, path: Path) -> Any:
        write_files(path, state.data, threads)
        return state.data

    name = f"save {called(sizes)}, num_threads={threads}"

    def mapped(state: State, path: Path) -> Any:
        write_files(path, state.data, threads)
        return {key: torch.from_file(f"{path}/{key}.memmap", True, sizes[1] // 4) for key in state.data}

    rivals: dict[str, Any] = {}
    if limits is LARGE_LIMITS:
        rivals = {"torch.save": torch_save, "safetensors.save_file": safetensors_save}
    elif limits is SMALL_LIMITS:
        rivals = {MAPPED: mapped}
    return saving(context, name, sizes, run, floor, rivals, limits)


def _load(context: Context, sizes: tuple[int, int], limits: tuple[Limit, ...] = ()) -> Workload:
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        state = tensors(module, leaves, size)
        state.path = context.folder / f"load{leaves}x{size}"
        state.pt = context.folder / f"load{leaves}x{size}.pt"
        remove(state.path)
        state.td.memmap(state.path)
        torch.save(state.data, state.pt)
        os.sync()
        state.files = {key: str(state.path / f"{key}.memmap") for key in state.data}
        # The tensors have done their work, and saving has left the container on disk.
        del state.td, state.data
        return state

    def run(state: State) -> Any:
        return state.module.load_memmap(state.path)

    def floor(state: State) -> Any:
        # Each file mapped, and a tensor over the map.
        found = {}
        for key, path in state.files.items():
            storage = torch.UntypedStorage.from_file(path, True, size)
            found[key] = torch.empty(0).set_(storage, 0, (size // 4,))
        return found

    rivals = {"torch.load(mmap=True)": lambda state: torch.load(state.pt, mmap=True)}
    return Workload(f"load_memmap {called(sizes)}", setup, run, floor, rivals, limits=limits)
