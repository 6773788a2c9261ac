"""Files of safetensors."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from workload import Context, State, Workload

from families.storage.raw import (
    Sizes,
    called,
    map_in_a_row,
    safetensors_save,
    saving,
    tensors,
    write_in_a_row,
)


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads of this format."""
    shapes = (sizes.sixty_four, sizes.small)
    return [*[_save(context, shape) for shape in shapes], *[_load(context, shape) for shape in shapes]]


def _save(context: Context, sizes: tuple[int, int]) -> Workload:
    def run(state: State, path: Path) -> Any:
        state.module.to_safetensors(state.td, path)
        return state.data

    rivals = {"safetensors.save_file": safetensors_save}
    return saving(context, f"to_safetensors {called(sizes)}", sizes, run, write_in_a_row, rivals, ())


def _load(context: Context, sizes: tuple[int, int]) -> Workload:
    leaves, size = sizes

    def setup(module: ModuleType) -> State:
        state = tensors(module, leaves, size)
        state.path = context.folder / f"load{leaves}x{size}.safetensors"
        state.raw = context.folder / f"load{leaves}x{size}.raw"
        module.to_safetensors(state.td, state.path)
        write_in_a_row(state, state.raw)
        os.sync()
        return state

    def run(state: State) -> Any:
        return state.module.from_safetensors(state.path)

    def floor(state: State) -> Any:
        return map_in_a_row(state.raw, leaves, size)

    def load_file(state: State) -> Any:
        from safetensors.torch import load_file

        return load_file(state.path)

    rivals = {"safetensors.load_file": load_file}
    return Workload(f"from_safetensors {called(sizes)}", setup, run, floor, rivals)
