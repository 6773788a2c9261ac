"""Describes the machine of a run of the benchmarks."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """The processor, its cores, the memory in GiB and the system; `machine` has them in a line."""
    facts = {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
    line = f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']:g} GiB, {facts['system']}"
    return {"machine": line, **facts}


def processor() -> str:
    """The name of the processor: Linux has it in a file, elsewhere Python knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit(folder: Path) -> str | None:
    """The commit of the source in a folder, with "+" where it was changed since; None where it is in no repository."""
    asked = ["git", "-C", str(folder), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
