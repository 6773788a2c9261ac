"""Measures by how much saving, loading, converting and `map` raise the peak of resident memory above the data.

    .venv/bin/python benchmarks/peak_memory.py                  # 4 GiB; the table of docs/guides/saving.md
    .venv/bin/python benchmarks/peak_memory.py --leaf-bytes 4194304 --format folder,archive

Each call runs in a process of its own. Saving starts with the data in memory, loading without it; a loaded container is
read to the last byte. Pages of mapped files count. What the result occupies does not count as growth above the data.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tensordict
from tensordict import TensorDict

ALLOWED = 64 << 20
# The rows of a leaf have this many float32 elements.
WIDTH = 256


@dataclass(frozen=True)
class Format:
    """How a container is saved or converted, and loaded again.

    makes: how many times the bytes of the data the result of `save` occupies.
    reason: why a call needs more than the data and `ALLOWED`.
    scale: the data are this many times smaller, for formats that take minutes.
    tree: measure the whole tree of processes.
    tabular: leaves of one dim, which are the columns of a table.
    """

    save: Callable[[Any, str], Any]
    load: Callable[[str], Any] | None = None
    makes: int = 0
    reason: str = ""
    scale: int = 1
    tree: bool = False
    tabular: bool = False


def _memmap(suffix: str, **options: Any) -> Format:
    return Format(
        lambda td, path: td.memmap(path + suffix, **options), lambda path: tensordict.load_memmap(path + suffix)
    )


def _save_checkpoint(td: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"td": td}, checkpoint_id=path)


def _load_checkpoint(path: str) -> Any:
    import torch.distributed.checkpoint as dcp

    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {key.removeprefix("td."): entry.size for key, entry in known.items() if hasattr(entry, "size")}
    td = TensorDict({key: torch.zeros(size) for key, size in sizes.items()}, [])
    dcp.load({"td": td}, checkpoint_id=path)
    return td


def _pickle(td: Any, path: str) -> None:
    import pickle

    with open(path, "wb") as file:
        pickle.dump(td, file, protocol=5)


def _unpickle(path: str) -> Any:
    import pickle

    with open(path, "rb") as file:
        return pickle.load(file)


def add_one(td: Any) -> Any:
    """Return new leaves of the same size, for `map`."""
    return td + 1


def nothing(td: Any) -> None:
    """Return nothing, for a `map` that reads only."""
    for leaf in td.values():
        leaf.sum()


def _map_to_file(td: Any, path: str) -> Any:
    out = td.memmap_like(path)
    td.map(add_one, num_workers=2, chunksize=1024, mp_start_method="fork", out=out)
    return out


def _iterate(td: Any, _: str) -> None:
    for _part in td.map_iter(add_one, num_workers=2, chunksize=1024, mp_start_method="fork"):
        pass


FORMATS: dict[str, Format] = {
    "directory": _memmap(""),
    "directory, 2 threads": _memmap("", num_threads=2),
    "archive": _memmap(".tdz"),
    "archive, 2 threads": _memmap(".tdz", num_threads=2),
    "archive, deflated": Format(
        lambda td, path: td.save(path + ".tdz", compression="deflate"),
        lambda path: tensordict.load_memmap(path + ".tdz"),
        makes=1,
        scale=8,
    ),
    "consolidated file": Format(lambda td, path: td.consolidate(path), lambda path: tensordict.from_consolidated(path)),
    "consolidated, in memory": Format(lambda td, _: td.consolidate(), makes=1),
    "safetensors": Format(
        lambda td, path: tensordict.to_safetensors(td, path), lambda path: tensordict.from_safetensors(path)
    ),
    "HDF5": Format(lambda td, path: td.to_h5(path).close(), lambda path: TensorDict.from_h5(path).to_tensordict()),
    "Zarr": Format(lambda td, path: td.to_zarr(path).close(), lambda path: TensorDict.from_zarr(path).to_tensordict()),
    'Zarr, `chunks="rows"`': Format(
        lambda td, path: td.to_zarr(path, chunks="rows").close(),
        lambda path: TensorDict.from_zarr(path).to_tensordict(),
        scale=8,
    ),
    "checkpoint": Format(
        lambda td, path: tensordict.save_checkpoint(path, step=1, data=td),
        lambda path: tensordict.load_checkpoint(path)["data"],
    ),
    "torch.save": Format(torch.save, lambda path: torch.load(path, weights_only=False)),
    "pickle": Format(_pickle, _unpickle),
    "torch.distributed.checkpoint": Format(_save_checkpoint, _load_checkpoint),
    "Parquet": Format(
        lambda td, path: td.to_parquet(path), lambda path: tensordict.from_parquet(path), tabular=True, scale=4
    ),
    "CSV": Format(
        lambda td, path: td.to_csv(path + ".csv"),
        lambda path: tensordict.from_csv(path + ".csv"),
        tabular=True,
        scale=32,
    ),
    "JSON lines": Format(
        lambda td, path: td.to_json(path + ".jsonl", lines=True),
        lambda path: tensordict.from_json(path + ".jsonl", lines=True),
        tabular=True,
        scale=64,
    ),
    "JSON, an array": Format(
        lambda td, path: td.to_json(path + ".json"),
        lambda path: tensordict.from_json(path + ".json"),
        tabular=True,
        scale=64,
    ),
    "`to_arrow`": Format(lambda td, _: td.to_arrow(), tabular=True),
    "`to_pandas`": Format(lambda td, _: td.to_pandas(), makes=1, tabular=True),
    "`to_polars`": Format(lambda td, _: td.to_polars(), tabular=True),
    "`to_hf`": Format(lambda td, _: td.to_hf(), tabular=True),
    "`to_struct_array`": Format(lambda td, _: td.to_struct_array(), makes=1, tabular=True),
    "`to_tensordict`": Format(lambda td, _: td.to_tensordict(), makes=1),
    "`map`, 2 forked workers": Format(
        lambda td, _: td.map(add_one, num_workers=2, chunksize=1024, mp_start_method="fork"), makes=1, tree=True
    ),
    "`map`, one chunk for each worker": Format(
        lambda td, _: td.map(add_one, num_workers=2, mp_start_method="fork"), makes=1, tree=True, scale=4
    ),
    "`map`, 2 spawned workers": Format(
        lambda td, _: td.map(add_one, num_workers=2, chunksize=1024, mp_start_method="spawn"), makes=1, tree=True
    ),
    "`map` that returns nothing": Format(
        lambda td, _: td.map(nothing, num_workers=2, chunksize=1024, mp_start_method="fork"), tree=True
    ),
    "`map` with `out=` over files": Format(_map_to_file, makes=1, tree=True),
    "`map_iter`": Format(_iterate, tree=True),
}
"""The calls, by the name of the format."""


def main() -> None:
    """Print the table, or with `--step` measure one call and print {"growth": bytes, "payload": bytes}."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the formats whose saves are bounded, and stop")
    parser.add_argument("--format", help="comma-separated names; default: all")
    parser.add_argument("--step", choices=("save", "load"), help="measure one call in this process")
    parser.add_argument("--folder", type=Path, help="where to save; default: the temporary folder")
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--leaf-bytes", type=int, default=2**26)
    options = parser.parse_args()
    if options.list:
        print(json.dumps([name for name, one in FORMATS.items() if one.load and not one.reason and one.scale == 1]))
    elif options.step:
        print(json.dumps(measure(options.format, options.step, options.folder, options.leaves, options.leaf_bytes)))
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Measure every call in a process of its own, and print the table."""
    print("| format | data, MiB | saving, above the data | loading, above the data |\n|---|---|---|---|")
    for name in FORMATS if options.format is None else re.split(r",(?! )", options.format):
        one = FORMATS[name]
        cells = []
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            leaf_bytes = options.leaf_bytes // one.scale
            for step in ("save", "load") if one.load else ("save",):
                command = [sys.executable, __file__, "--step", step, "--format", name, "--folder", folder]
                command += ["--leaves", str(options.leaves), "--leaf-bytes", str(leaf_bytes)]
                ran = subprocess.run(command, capture_output=True, text=True, check=False)
                if ran.returncode:
                    cells.append("error: " + ran.stderr.strip().rpartition("\n")[2][:80])
                    continue
                found = json.loads(ran.stdout.splitlines()[-1])
                cells.append(f"{(found['growth'] - found['result']) / 2**20:.0f} MiB")
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, exist_ok=True)
        cells += ["-"] * (2 - len(cells))
        print(f"| {name} | {options.leaves * leaf_bytes >> 20} | " + " | ".join(cells) + " |", flush=True)


def measure(name: str, step: str, folder: Path | None, leaves: int, leaf_bytes: int) -> dict[str, int]:
    """Measure one call. `load` loads what `save` has left in the folder."""
    one = FORMATS[name]
    payload = leaves * leaf_bytes
    with tempfile.TemporaryDirectory(dir=folder) as own:
        # The first calls load modules, whose memory must not count.
        first = _container(4, WIDTH * 4 * 4, one)
        for number in range(2):
            one.save(first, f"{own}/first{number}")
            if step == "load":
                assert one.load is not None
                _read(one.load(f"{own}/first{number}"))
    path = f"{own if folder is None else folder}/save"
    if step == "load":
        assert one.load is not None
        call, result = lambda: _read(one.load(path)), payload  # type: ignore[misc]
    else:
        td = _container(leaves, leaf_bytes, one)
        call, result = lambda: one.save(td, path), one.makes * payload  # type: ignore[assignment, return-value]
    growth = _tree_growth(call) if one.tree else _own_growth(call)
    return {"growth": growth, "payload": payload, "result": result}


def _container(leaves: int, leaf_bytes: int, one: Format) -> Any:
    count = leaf_bytes // 4
    # Noise, which no format can store in less.
    size = (count,) if one.tabular else (count // WIDTH, WIDTH)
    return TensorDict({f"k{i}": torch.rand(size) for i in range(leaves)}, [size[0]])


def _read(td: Any) -> Any:
    """Read all elements of a container, and return it."""
    for leaf in td.values():
        # A sum of `isnan` would make a tensor of the same length.
        leaf.amax()
    return td


def _own_growth(call: Callable[[], object]) -> int:
    """Return by how much a call raises the peak of this process's resident memory."""
    # Make the kernel's record of the peak start again from here (see proc_pid_clear_refs(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    kept = call()
    growth = _status("VmHWM") - before
    del kept
    return growth


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


def _tree_growth(call: Callable[[], object]) -> int:
    """Return by how much a call raises the peak of what this process and its children occupy together.

    A page that several processes map counts once, by proportional set size, which is sampled.
    """
    before, peak, done = _tree_memory(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, _tree_memory())

    sampler = threading.Thread(target=sample)
    sampler.start()
    kept = call()
    done.set()
    sampler.join()
    peak = max(peak, _tree_memory())
    del kept
    return peak - before


def _tree_memory() -> int:
    """Return the sum of the proportional set sizes of this process and its children, at one moment.

    The children stand still meanwhile. Reading the size of 4 GiB takes 0.1 seconds, and a page that a child maps after
    that of this process was read would count one and a half times: 95 to 600 MiB too much.
    """
    children = _children()
    for process in children:
        _signal(process, signal.SIGSTOP)
    try:
        for process in children:
            while _state(process) not in "TXZ":
                time.sleep(0.001)
        return sum(map(_proportional_size, (os.getpid(), *children)))
    finally:
        for process in children:
            _signal(process, signal.SIGCONT)


def _children() -> list[int]:
    """Return the processes that descend from this one."""
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        own: list[int] = []
        with contextlib.suppress(OSError):  # The process has ended.
            for thread in Path(f"/proc/{waiting.pop()}/task").iterdir():
                own += map(int, (thread / "children").read_text().split())
        found += own
        waiting += own
    return found


def _signal(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _state(process: int) -> str:
    """Return the letter of the state of a process; X after its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _proportional_size(process: int) -> int:
    try:
        content = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        # The process has ended.
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB$", content, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
