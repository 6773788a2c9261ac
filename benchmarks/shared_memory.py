"""Measures how much memory a shared container takes that several processes use: its size, once."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import tensordict

MIB = 1 << 20
LEAVES = 8
# The memory that all processes together may take besides one container: page tables, messages, tensors.
SLACK_MIB = 4

PLACES: dict[str, Callable[[Any, str], Any]] = {
    "shared": lambda td, folder: td.share_memory_(),
    "memory-mapped": lambda td, folder: td.memmap_(),
    "in files": lambda td, folder: td.memmap_(folder),
}
"""How a container comes to where other processes can see it."""


def main() -> None:
    """Print, as JSON, by how many MiB a container raised the proportional set sizes; fail where it is too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the container, default %(default)s")
    parser.add_argument("--processes", type=int, default=4, help="default %(default)s, this one not counted")
    parser.add_argument("--method", choices=mp.get_all_start_methods(), default="fork")
    options = parser.parse_args()
    found = {}
    for name, place in PLACES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = _growth(place, folder, options)
    print(json.dumps({"container_mib": options.mib, "processes": options.processes, "growth_mib": found}, indent=1))
    too_much = [name for name, growth in found.items() if growth["together"] > options.mib + SLACK_MIB]
    if too_much:
        raise SystemExit(f"a container costs more than its size: {', '.join(too_much)}")


def _growth(place: Callable[[Any, str], Any], folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """By how much each process grew, this one first, and all of them together."""
    context = mp.get_context(options.method)
    pipes, processes = [], []
    for _ in range(options.processes):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_use, args=(theirs,), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    # Use a small container first, so that modules and pools of the processes do not count.
    small = _share_container(place, f"{folder}/small", LEAVES, pipes)
    before = _sizes(pipes)
    td = _share_container(place, f"{folder}/large", options.mib * MIB // 4, pipes)
    # Only now has each of them touched every page, so that all pages are divided by the same number.
    after = _sizes(pipes)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    del small, td
    each = [round((now - was) / MIB, 1) for now, was in zip(after, before, strict=True)]
    return {"each": each, "together": round(sum(each), 1)}


def _share_container(place: Callable[[Any, str], Any], folder: str, elements: int, pipes: list[Any]) -> Any:
    """A container of so many elements, which all processes have and have used."""
    size = elements // LEAVES
    td = place(tensordict.TensorDict({f"k{i}": torch.ones(size) for i in range(LEAVES)}, [size]), folder)
    for pipe in pipes:
        pipe.send(td)
    for pipe in pipes:
        if pipe.recv() != LEAVES * size:
            raise AssertionError("a process found something else than what was sent")
    return td


def _sizes(pipes: list[Any]) -> list[int]:
    """How large the processes are while none of them does anything."""
    found = [_proportional()]
    for pipe in pipes:
        pipe.send("size")
        found.append(pipe.recv())
    return found


def _use(pipe: Any) -> None:
    """Serve in a process: read every container that arrives, and write to it without changing its values."""
    torch.set_num_threads(1)
    kept = []
    while (order := pipe.recv()) is not None:
        if isinstance(order, str):
            pipe.send(_proportional())
            continue
        for leaf in order.values():
            leaf.mul_(1)
        pipe.send(sum(int(leaf.sum(dtype=torch.int64)) for leaf in order.values()))
        kept.append(order)


def _proportional() -> int:
    """The memory of this process in bytes, pages that others have too divided by their number (see proc(5))."""
    found = re.search(r"^Pss:\s+(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/smaps_rollup has no Pss")
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
