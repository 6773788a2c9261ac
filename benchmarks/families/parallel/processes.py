"""Workloads that spread a container over processes of one machine: `map`, and queues."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor
from workload import Context, Limit, State, Workload

MIB = 1 << 20
WORKERS = 2


def workloads(context: Context) -> list[Workload]:
    """Return these workloads; with `--quick`, a sixteenth of the bytes of the large ones."""
    large = 64 * MIB // (16 if context.quick else 1)
    small = 1000 * 4 * 4
    return [
        _make_map_workload(small, 2, shared=False),
        _make_map_workload(small, 64, shared=False),
        _make_map_workload(large, 2, shared=True),
        _make_map_workload(large, 16, shared=True),
        _trip("shared", large, lambda td: td.share_memory_()),
        _trip("memory-mapped", large, lambda td: td.memmap_()),
        _trip("in files", large, lambda td: td.memmap_(str(context.folder / "parallel"))),
    ]


def _make_map_workload(nbytes: int, chunks: int, shared: bool) -> Workload:
    """A function over chunks, by two new processes: beside a bare pool of as many, which is given tensors."""

    def setup(module: ModuleType) -> State:
        flat = _rows(nbytes)
        td = module.TensorDict({"x": _rows(nbytes)}, [len(flat)])
        if shared:
            flat.share_memory_()
            td.share_memory_()
        return State(flat=flat, td=td)

    def run(state: State) -> Any:
        return state.td.map(plus_one, num_workers=WORKERS, num_chunks=chunks, mp_start_method="fork")

    def floor(state: State) -> Any:
        with mp.get_context("fork").Pool(WORKERS, torch.set_num_threads, (1,)) as pool:
            return {"x": torch.cat(list(pool.imap(plus_one, state.flat.chunk(chunks))))}

    name = f"map, {_size(nbytes)}{' shared' if shared else ''}, {chunks} chunks"
    limits = (Limit("reference", at_least=1.0), Limit("floor", at_least=1.0, called="a bare pool"))
    return Workload(name, setup, run, floor, limits=limits, payload_bytes=nbytes if shared else 0)


def _trip(name: str, nbytes: int, place: Callable[[Any], Any]) -> Workload:
    """A container to another process, which writes into it, and back; beside a dict of shared tensors."""

    def setup(module: ModuleType) -> State:
        data = {f"k{i}": _rows(nbytes // 8) for i in range(8)}
        td = place(module.TensorDict({name: leaf.clone() for name, leaf in data.items()}, []))
        return State(td=td, data={name: leaf.share_memory_() for name, leaf in data.items()}, echo=Echo.of())

    def run(state: State) -> Any:
        return state.echo.ask(state.td)["k0"][0, 0].clone()

    def floor(state: State) -> Any:
        return state.echo.ask(state.data)["k0"][0, 0].clone()

    # Descriptors of shared memory are torch's business on every side; nobody can be faster.
    limits = () if name == "shared" else (Limit("reference", at_least=1.0),)
    return Workload(f"queue and back, {_size(nbytes)} {name}", setup, run, floor, limits=limits)


class Echo:
    """A forked process that sends back what it gets, after it wrote 1 into the first element."""

    _made: Echo | None = None

    def __init__(self) -> None:
        context = mp.get_context("fork")
        self._there, self._back = context.SimpleQueue(), context.SimpleQueue()
        context.Process(target=self._serve, daemon=True).start()

    @classmethod
    def of(cls) -> Echo:
        """The one such process."""
        if cls._made is None:
            cls._made = cls()
        return cls._made

    def ask(self, value: Any) -> Any:
        """Send something, and return what comes back."""
        self._there.put(value)
        return self._back.get()

    def _serve(self) -> None:
        # OpenMP's threads do not survive a fork.
        torch.set_num_threads(1)
        while True:
            value = self._there.get()
            value["k0"][0, 0] = 1
            self._back.put(value)


def plus_one(chunk: Any) -> Any:
    """The mapped function, for containers and for tensors."""
    return chunk + 1


def _rows(nbytes: int) -> Tensor:
    return torch.arange(nbytes // 4, dtype=torch.float32).view(-1, 4)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // 1000} kB"
