"""Measures, in a process of its own, how much a save adds to the peak memory of the process."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from pathlib import Path

import torch

import tensordict


def main() -> None:
    """Save contiguous CPU tensors and print {"growth": bytes, "payload": bytes} as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where to save")
    parser.add_argument("--leaves", type=int, required=True)
    parser.add_argument("--leaf-bytes", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        # What is loaded or set up by the first save ever is no part of what a save of 1 GiB needs.
        tensordict.TensorDict({"a": torch.ones(4)}, []).memmap(f"{folder}/first", num_threads=options.threads)
        leaves = {f"k{i}": torch.ones(options.leaf_bytes // 4) for i in range(options.leaves)}
        td = tensordict.TensorDict(leaves, [])
        _reset_peak()
        before = _status("VmRSS")
        saved = td.memmap(f"{folder}/save", num_threads=options.threads)
        growth = _status("VmHWM") - before
        if saved["k0"][0] != 1:
            raise AssertionError("the save does not hold what was saved")
    print(json.dumps({"growth": growth, "payload": options.leaves * options.leaf_bytes}))


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
