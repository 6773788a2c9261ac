"""HDF5 files: reading rows of one that is larger than what is read."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from workload import Context, State, Workload

from families.storage.raw import Sizes

ENTRIES = 10


def workloads(context: Context, sizes: Sizes) -> list[Workload]:
    """Return the workloads of this format, whose sizes are its own."""
    return [_index(context, what) for what in ("an item", "256 rows in a row", "256 random rows")]


def _index(context: Context, what: str) -> Workload:
    """Rows of every entry; the floor is h5py on datasets that are open."""
    count = 2_000 if context.quick else 20_000
    random = torch.randint(count, (256,), generator=torch.Generator().manual_seed(0))
    index: Any = {"an item": 7, "256 rows in a row": slice(512, 768), "256 random rows": random}[what]

    def setup(module: ModuleType) -> State:
        import h5py

        data = {f"k{i}": torch.full((count, 64), float(i)) for i in range(ENTRIES)}
        state = State(module=module, keys=list(data), path=context.folder / f"{module.__version__}-{what}.h5")
        module.TensorDict(data, [count]).to_h5(state.path).close()
        state.td = module.TensorDict.from_h5(state.path, batch_size=[count])
        state.file = h5py.File(state.path)
        state.datasets = [state.file[key] for key in data]
        return state

    def run(state: State) -> Any:
        part = state.td[index]
        return [part[key] for key in state.keys]

    def floor(state: State) -> Any:
        if index is not random:
            return [torch.from_numpy(dataset[index]) for dataset in state.datasets]
        # It takes sorted positions only, each once.
        rows, where = torch.unique(random, return_inverse=True)
        return [torch.from_numpy(dataset[rows.numpy()])[where] for dataset in state.datasets]

    return Workload(f"from_h5: {what} of {ENTRIES} entries", setup, run, floor)
