"""Measures, in a process of its own, how much a save adds to the peak memory of the process."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tensordict

Save = Callable[[Any, str], Any]
Load = Callable[[str], Any]


def main() -> None:
    """Save contiguous CPU tensors and print {"growth": bytes, "payload": bytes} as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the formats and stop")
    parser.add_argument("--format", choices=FORMATS, default="directory")
    parser.add_argument("--folder", type=Path, help="where to save; default: the temporary folder")
    parser.add_argument("--leaves", type=int, default=64)
    parser.add_argument("--leaf-bytes", type=int, default=2**24)
    options = parser.parse_args()
    if options.list:
        print(json.dumps(list(FORMATS)))
        return
    save, load = FORMATS[options.format]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        # The first save loads modules, whose memory must not count.
        save(tensordict.TensorDict({"a": torch.ones(4)}, []), f"{folder}/first")
        leaves = {f"k{i}": torch.ones(options.leaf_bytes // 4) for i in range(options.leaves)}
        td = tensordict.TensorDict(leaves, [])
        _reset_peak()
        before = _status("VmRSS")
        saved = save(td, f"{folder}/save")
        growth = _status("VmHWM") - before
        del saved
        last = load(f"{folder}/save")[f"k{options.leaves - 1}"]
        if last.shape != (options.leaf_bytes // 4,) or last[-1] != 1:
            raise AssertionError("the save does not hold what was saved")
    print(json.dumps({"growth": growth, "payload": options.leaves * options.leaf_bytes}))


def _memmap(suffix: str, threads: int) -> tuple[Save, Load]:
    def save(td: Any, path: str) -> Any:
        return td.memmap(path + suffix, num_threads=threads)

    return save, lambda path: tensordict.load_memmap(path + suffix)


def _checkpoint(td: Any, path: str) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"td": td}, checkpoint_id=path)


def _from_checkpoint(path: str) -> Any:
    import torch.distributed.checkpoint as dcp

    known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {key.removeprefix("td."): entry.size for key, entry in known.items() if hasattr(entry, "size")}
    td = tensordict.TensorDict({key: torch.zeros(size) for key, size in sizes.items()}, [])
    dcp.load({"td": td}, checkpoint_id=path)
    return td


FORMATS: dict[str, tuple[Save, Load]] = {
    "directory": _memmap("", 0),
    "directory, 2 threads": _memmap("", 2),
    "archive": _memmap(".tdz", 0),
    "archive, 2 threads": _memmap(".tdz", 2),
    "consolidated file": (
        lambda td, path: td.consolidate(path),
        lambda path: tensordict.TensorDict.from_consolidated(path),
    ),
    "HDF5": (
        lambda td, path: td.to_h5(path).close(),
        lambda path: tensordict.TensorDict.from_h5(path),
    ),
    "safetensors": (
        lambda td, path: tensordict.to_safetensors(td, path),
        lambda path: tensordict.from_safetensors(path),
    ),
    "torch.save": (
        lambda td, path: torch.save(td, path),
        lambda path: torch.load(path, weights_only=False),
    ),
    "torch.distributed.checkpoint": (_checkpoint, _from_checkpoint),
}
"""How to save and load, by the name of the format."""


def _reset_peak() -> None:
    """Make the kernel's record of the peak start again from here (see proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
