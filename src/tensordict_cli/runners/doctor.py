"""`tensordict doctor`: report what works on this machine, its file systems and this installation."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch

from tensordict.core.exceptions import SaveError
from tensordict.core.settings import kernel_memory_info
from tensordict.io.remote.urls import is_url
from tensordict.memory import files, kernel, system
from tensordict.memory.names import without_scheme
from tensordict_cli.runners.terminal import BAD, GOOD, NAME, QUIET, Line, align, count_text, show, size_text
from tensordict_cli.text import printable

# Extras for developers of this package; the report leaves them out.
_OWN = ("dev", "demo", "clients", "docs", "all")
_LIMITS = {"NOFILE": "open files", "NPROC": "processes", "MEMLOCK": "locked memory", "AS": "address space"}
_BYTES = 1 << 16
_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def run(args: argparse.Namespace) -> int:
    """Run the command. Return 0 when everything works that the package promises, else 1."""
    path = without_scheme(args.path)
    if is_url(path):
        raise SaveError(f"{path!r} is a URL, and this looks at a file system: inspect or verify what is there")
    if not os.path.isdir(path):
        raise NotADirectoryError(20, "no such folder", path)
    problems: list[str] = []
    report = {
        "versions": _check_versions(problems),
        "extras": _list_extras(),
        "gpus": _list_gpus(),
        "path": _try_file_system(os.path.abspath(path), problems),
        "environment": _describe_environment(problems),
        "problems": problems,
    }
    if args.json:
        print(json.dumps(report))
    else:
        show(_format_report(report), paged=not args.no_pager)
    return 1 if problems else 0


# --- what is installed ------------------------------------------------------------------------------------------------


def _check_versions(problems: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {"tensordict": _find_version("tensordict"), "python": platform.python_version()}
    for name, at_least, extra in _iter_requirements():
        if extra is None:
            version = found[name] = _find_version(name)
            if version is None or not _reaches(version, at_least):
                problems.append(f"{name} {at_least or ''} or newer is needed, and {version or 'none'} is installed")
    return {**found, "cuda": torch.version.cuda, "platform": platform.platform()}


def _list_extras() -> dict[str, dict[str, Any]]:
    """Return the installed packages of each extra with their versions, and the command to install the missing ones."""
    found: dict[str, dict[str, Any]] = {}
    for name, at_least, extra in _iter_requirements():
        if extra is None or extra in _OWN:
            continue
        about = found.setdefault(extra, {"packages": {}, "install": None})
        version = about["packages"][name] = _find_version(name)
        if version is None or not _reaches(version, at_least):
            about["install"] = f"pip install 'tensordict[{extra}]'"
    return found


def _iter_requirements() -> Iterator[tuple[str, str | None, str | None]]:
    """Yield each requirement of the package for this Python: its name, the oldest version, and its extra."""
    for line in metadata.requires("tensordict") or ():
        needed, _, marker = line.partition(";")
        python = re.search(r"python_version >= ['\"]([\d.]+)", marker)
        if python is not None and not _reaches(platform.python_version(), python[1]):
            continue
        name = re.match(r"[\w.-]+", needed)
        oldest, extra = re.search(r">=\s*([\d.]+)", needed), re.search(r"extra == ['\"]([\w-]+)", marker)
        if name is not None:
            yield name[0], oldest and oldest[1], extra and extra[1]


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _reaches(version: str, oldest: str | None) -> bool:
    return oldest is None or _parse_version(version) >= _parse_version(oldest)


def _parse_version(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def _list_gpus() -> list[dict[str, Any]]:
    found = [
        {"device": f"cuda:{index}", "name": properties.name, "nbytes": properties.total_memory}
        for index in range(torch.cuda.device_count())
        for properties in [torch.cuda.get_device_properties(index)]
    ]
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": platform.processor(), "nbytes": None})
    return found


# --- the file system --------------------------------------------------------------------------------------------------


def _rename_over(folder: str) -> None:
    old, new = f"{folder}/old", f"{folder}/new"
    for path in (old, new):
        files.write_new(path, path.encode())
    os.replace(new, old)
    with open(old, "rb") as file:
        _check(file.read() == new.encode(), "the file has other content than the one that took its place")


def _sync(folder: str) -> None:
    files.write_new(f"{folder}/synced", b"x", durable=True)
    files.sync_folder(folder)


def _link(folder: str) -> None:
    files.write_new(f"{folder}/one", b"x")
    os.link(f"{folder}/one", f"{folder}/other")
    _check(os.path.samefile(f"{folder}/one", f"{folder}/other"), "the two names are of two files")


def _share(folder: str) -> None:
    with open(_write_zeros(folder), "r+b") as file, mmap.mmap(file.fileno(), _BYTES) as shared:
        shared[:4] = b"here"
        shared.flush()
        _check(system.pread(file.fileno(), 4, 0) == b"here", "what is written to the map does not reach the file")


def _map_privately(folder: str) -> None:
    with (
        open(_write_zeros(folder), "r+b") as file,
        system.map_privately(file.fileno(), _BYTES, kind=mmap.mmap) as private,
    ):
        private[:4] = b"here"
        _check(system.pread(file.fileno(), 4, 0) == bytes(4), "what is written to the map reaches the file")


def _lock(folder: str) -> None:
    _check(system.HAS_LOCKS, "this system has no file locks")
    path = _write_zeros(folder)
    with open(path, "rb") as one, open(path, "rb") as other:
        system.lock(one.fileno())
        try:
            system.lock(other.fileno())
        except BlockingIOError:
            return
    raise OSError("two file handles hold the same lock")


def _punch_hole(folder: str) -> None:
    path = f"{folder}/holes"
    with open(path, "wb") as file:
        file.truncate(1 << 24)
        file.write(b"x" * _BYTES)
        file.flush()
        os.fsync(file.fileno())
        _check(os.fstat(file.fileno()).st_blocks * 512 < 1 << 23, "they take room on the disk")
        _check(hasattr(system.libc, "fallocate"), "this system cannot punch holes")
        size = ctypes.c_int64(_BYTES)
        if system.libc.fallocate(file.fileno(), _PUNCH, ctypes.c_int64(0), size):
            raise OSError(ctypes.get_errno(), f"no hole was punched: {os.strerror(ctypes.get_errno())}")


def _write_zeros(folder: str) -> str:
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.truncate(_BYTES)
    return file.name


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise OSError(otherwise)


# For each feature: the function that tries it, its purpose, and whether the package breaks a promise without it.
_FEATURES: dict[str, tuple[Callable[[str], None], str, bool]] = {
    "rename over": (_rename_over, "saves that appear at once", True),
    "shared maps": (_share, "memmap, tensors in files that processes share", True),
    "private maps": (_map_privately, "loading without reading", True),
    "fsync": (_sync, "durable=True", True),
    "hard links": (_link, "existsok=False, saves that share files", True),
    "locks": (_lock, "savers and compactions that keep out of each other's way", False),
    "holes": (_punch_hole, "files that take less room than they are long", False),
}


def _try_file_system(path: str, problems: list[str]) -> dict[str, Any]:
    usage = shutil.disk_usage(path)
    found: dict[str, Any] = {"path": path, "kind": _file_system_kind(path), "nbytes": usage.total, "free": usage.free}
    features: dict[str, str | None] = {}
    try:
        folder = tempfile.mkdtemp(prefix=".tensordict-doctor-", dir=path)
    except OSError as error:
        problems.append(f"{path!r}: nothing can be written: {error.strerror}")
        return {**found, "features": None}
    try:
        for name, (attempt, purpose, needed) in _FEATURES.items():
            try:
                attempt(folder)
                features[name] = None
            except OSError as error:
                features[name] = error.strerror or str(error)
                if needed:
                    problems.append(f"{path!r}: no {name}, which is needed for {purpose}: {features[name]}")
    finally:
        shutil.rmtree(folder)
    return {**found, "features": features}


def _file_system_kind(path: str) -> str | None:
    """Return the kind of file system that a path is on; `None` on systems other than Linux."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return None
    real = os.path.realpath(path)
    above = [(point, kind) for point, kind in mounts if os.path.commonpath((real, point)) == point]
    return max(above, key=lambda mount: len(mount[0]), default=("", None))[1]


# --- the environment --------------------------------------------------------------------------------------------------


def _describe_environment(problems: list[str]) -> dict[str, Any]:
    starts = {method: _try_start(method) for method in multiprocessing.get_all_start_methods()}
    if all(starts.values()):
        problems.append(f"no process can be started, which map needs: {'; '.join(filter(None, starts.values()))}")
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_limit": _read_memory_limit(),
        "dev_shm": None if shared is None else {"nbytes": shared.total, "free": shared.free},
        "limits": _read_limits(),
        "start_methods": starts,
        "kernel_memory_info": {
            "asked": kernel_memory_info(),
            "maps": kernel.file_spans() is not None,
            "written_pages": _knows_pages(),
        },
    }


def _try_start(method: str) -> str | None:
    """Return the reason why processes cannot be started with this method; `None` when they can."""
    try:
        if method == "fork":
            process = multiprocessing.get_context("fork").Process()
            process.start()
            process.join()
            return None if process.exitcode == 0 else f"fork: a process ended with {process.exitcode}"
        # The other methods start a fresh interpreter. An empty one is enough, and does not import torch again.
        subprocess.run([sys.executable, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{method}: {error}"
    return None


def _read_limits() -> dict[str, int | None]:
    """Return the resource limits of this process; `None` stands for no limit."""
    if not hasattr(os, "fork"):
        return {}
    resource = importlib.import_module("resource")
    found: dict[str, int | None] = {}
    for name, text in _LIMITS.items():
        limit = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        found[text] = None if limit == resource.RLIM_INFINITY else limit
    return found


def _read_memory_limit() -> int | None:
    """Return the memory limit of the control group of this process; `None` when it has no limit or Linux names none."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _knows_pages() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as own:
        return kernel.find_written_pages(ctypes.addressof(ctypes.c_char.from_buffer(own)), mmap.PAGESIZE) is not None


# --- for people -------------------------------------------------------------------------------------------------------


def _format_report(report: dict[str, Any]) -> list[Line]:
    path, environment = report["path"], report["environment"]
    lines: list[Line] = align([[(name, NAME), (text or "none", "")] for name, text in report["versions"].items()])
    lines += [[], [("extras", NAME)]]
    rows: list[Line] = []
    for name, extra in report["extras"].items():
        there = [f"{package} {version or '-'}" for package, version in extra["packages"].items()]
        missing = (extra["install"], QUIET) if extra["install"] else ("", "")
        rows.append([(f"  {name}", "" if extra["install"] else GOOD), (", ".join(there), ""), missing])
    lines += [*align(rows), [], [("GPUs", NAME)]]
    gpus = [
        [(f"  {gpu['device']}", GOOD), (gpu["name"], ""), (size_text(gpu["nbytes"]) if gpu["nbytes"] else "", "")]
        for gpu in report["gpus"]
    ]
    lines += align(gpus) or [[("  none that torch finds", "")]]
    room = f": {path['kind'] or 'unknown'}, {size_text(path['free'])} free of {size_text(path['nbytes'])}"
    lines += [[], [(printable(path["path"]), NAME), (room, "")]]
    if path["features"] is not None:
        lines += align(
            [
                [
                    (f"  {name}", ""),
                    ("yes", GOOD) if why is None else ("no", BAD),
                    (_FEATURES[name][1], QUIET),
                    (why or "", ""),
                ]
                for name, why in path["features"].items()
            ]
        )
    lines += [[], [("environment", NAME)], *align(list(_format_environment(environment)))]
    lines += [[], [(count_text(len(report["problems"]), "problem") if report["problems"] else "no problems", NAME)]]
    return [*lines, *([("  " + printable(problem), BAD)] for problem in report["problems"])]


def _format_environment(environment: dict[str, Any]) -> Iterator[Line]:
    threads = count_text(environment["torch_threads"], "thread")
    yield [("  processors", ""), (f"{environment['cpus_allowed']} of {environment['cpus']}, torch has {threads}", "")]
    limit = environment["memory_limit"]
    yield [("  memory", ""), ("all of the machine" if limit is None else f"at most {size_text(limit)}", "")]
    shared = environment["dev_shm"]
    room = "none" if shared is None else f"{size_text(shared['free'])} free of {size_text(shared['nbytes'])}"
    yield [("  /dev/shm", ""), (room, "")]
    for name, most in environment["limits"].items():
        text = "no limit" if most is None else size_text(most) if "memory" in name or "space" in name else f"{most:,}"
        yield [(f"  {name}", ""), (text, "")]
    for method, why in environment["start_methods"].items():
        yield [(f"  {method}", ""), ("yes", GOOD) if why is None else (f"no: {printable(why)}", BAD)]
    asked = environment["kernel_memory_info"]
    told = [name.replace("_", " ") for name in ("maps", "written_pages") if asked[name]]
    text = f"asked, tells {' and '.join(told) or 'nothing'}" if asked["asked"] else "not asked: it is switched off"
    yield [("  kernel", ""), (text, "")]
