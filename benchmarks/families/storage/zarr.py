"""Zarr groups: writing, opening and reading whole, and reading rows of one that is larger than what is read."""

from __future__ import annotations

import shutil
from types import ModuleType
from typing import Any

import torch
from workload import Context, State, Workload

from families.storage.raw import Sizes

ENTRIES = 10
CHUNK = 256


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads of this format, whose sizes are its own; the reference has it too."""
    rows = [_index(context, what) for what in ("an item", "256 rows in a row", "256 random rows")]
    return [_write(context), _open(context), _read(context), *rows]


def _data(count: int, entries: int = ENTRIES) -> dict[str, torch.Tensor]:
    return {f"k{i}": torch.full((count, 64), float(i + 1)) for i in range(entries)}


def _save(context: Context, module: ModuleType, name: str, data: dict[str, torch.Tensor], **options: Any) -> State:
    """A state with the data in a group of its own, and that group open in zarr."""
    import zarr

    count = len(next(iter(data.values())))
    path = context.folder / f"{module.__version__}-{name}.zarr"
    state = State(module=module, keys=list(data), path=path, count=count)
    module.TensorDict(data, [count]).to_zarr(str(path), **options).close()
    group = zarr.open_group(path, mode="r")
    state.arrays = [group[key] for key in data]
    return state


def _write(context: Context) -> Workload:
    """All of it to a new group; the floor is zarr, an array after the other."""
    count = 2_000 if context.quick else 20_000

    def setup(module: ModuleType) -> State:
        data = _data(count)
        path = context.folder / f"{module.__version__}-write.zarr"
        return State(module=module, data=data, td=module.TensorDict(data, [count]), path=path)

    def run(state: State) -> None:
        shutil.rmtree(state.path, ignore_errors=True)
        state.td.to_zarr(str(state.path)).close()

    def floor(state: State) -> None:
        import zarr

        shutil.rmtree(state.path, ignore_errors=True)
        group = zarr.open_group(state.path, mode="w")
        for key, value in state.data.items():
            array = group.create_array(key, shape=value.shape, dtype="f4", chunks=tuple(value.shape), compressors=None)
            array[...] = value.numpy()

    return Workload(f"to_zarr: {ENTRIES} entries", setup, run, floor)


def _open(context: Context) -> Workload:
    """Opening a group of many small leaves and listing them; the floor is zarr with consolidated metadata."""
    entries = 100

    def setup(module: ModuleType) -> State:
        return _save(context, module, "open", {key: value[:8] for key, value in _data(8, entries).items()})

    def run(state: State) -> Any:
        data = state.module.TensorDict.from_zarr(str(state.path))
        return sorted(data.keys())

    def floor(state: State) -> Any:
        import zarr

        return sorted(name for name, _ in zarr.open_group(state.path, mode="r").arrays())

    return Workload(f"from_zarr: open {entries} entries", setup, run, floor)


def _read(context: Context) -> Workload:
    """All of it into memory; the floor is zarr on arrays that are open."""
    count = 2_000 if context.quick else 20_000

    def setup(module: ModuleType) -> State:
        state = _save(context, module, "read", _data(count))
        state.td = module.TensorDict.from_zarr(str(state.path))
        return state

    def run(state: State) -> Any:
        read = state.td.to_tensordict()
        return [read[key] for key in state.keys]

    def floor(state: State) -> Any:
        return [torch.from_numpy(array[...]) for array in state.arrays]

    return Workload(f"from_zarr: read {ENTRIES} entries", setup, run, floor)


def _index(context: Context, what: str) -> Workload:
    """Rows of every entry, in chunks of rows; the floor is zarr on arrays that are open."""
    count = 2_000 if context.quick else 20_000
    random = torch.randint(count, (256,), generator=torch.Generator().manual_seed(0))
    index: Any = {"an item": 7, "256 rows in a row": slice(512, 768), "256 random rows": random}[what]

    def setup(module: ModuleType) -> State:
        state = _save(context, module, what.replace(" ", "-"), _data(count), chunks=(CHUNK,))
        state.td = module.TensorDict.from_zarr(str(state.path))
        return state

    def run(state: State) -> Any:
        part = state.td[index]
        return [part[key] for key in state.keys]

    def floor(state: State) -> Any:
        at = index.numpy() if index is random else index
        return [torch.as_tensor(array.oindex[at]) for array in state.arrays]

    return Workload(f"from_zarr: {what} of {ENTRIES} entries", setup, run, floor)
