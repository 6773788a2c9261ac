"""Compares this package with the reference and the raw floor, in turns, and says which targets are met."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import machine
import report
from report import Row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OURS, REFERENCE = ROOT / ".venv/bin/python", ROOT / ".venv-reference/bin/python"
ROUNDS, QUICK_ROUNDS, STORAGE_ROUNDS = 11, 3, 5
TURN_SECONDS, QUICK_TURN_SECONDS = 0.02, 0.005


class Failed(Exception):
    """A worker answered a request with an error."""


class Worker:
    """A process that holds one package, seen from here: requests go in as JSON lines, replies come out."""

    def __init__(self, role: str, process: subprocess.Popen[str]) -> None:
        self.role = role
        self.process = process

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Have the worker call `do` and return its reply."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise SystemExit(
                f"the worker {self.role!r} died with exit code {code} in {do!r} {arguments}; try --verbose"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Failed(reply["error"])
        return reply


@contextmanager
def start(role: str, python: Path, folder: Path, options: argparse.Namespace) -> Iterator[Worker]:
    """Start a worker with the interpreter `python`; it ends with the block."""
    if not python.exists():
        raise SystemExit(f"no interpreter for {role!r} at {python}; pass --{role} PYTHON")
    folder.mkdir()
    command = [str(python), str(HERE / "worker.py"), "--folder", str(folder)]
    command += ["--quick"] * options.quick + ["--verbose"] * options.verbose
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(python)
    ) as process:
        try:
            yield Worker(role, process)
        finally:
            process.kill()


def main() -> None:
    """Run what the command line asks for."""
    options = _options()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensordict-bench-", dir=options.folder)))
        ours = stack.enter_context(start("ours", options.ours, folder / "ours", options))
        chosen = _choose(ours, options)
        if options.list:
            print("\n".join(f"{spec['family']}: {spec['name']}" for spec in chosen))
            return
        reference = stack.enter_context(start("reference", options.reference, folder / "reference", options))
        reference.ask("list", families=sorted({spec["family"] for spec in chosen}))
        about = _load(ours, reference)
        print(report.header())
        rows: list[Row] = []
        for family in dict.fromkeys(spec["family"] for spec in chosen):
            print(family)
            found = []
            for spec in [spec for spec in chosen if spec["family"] == family]:
                found.append(_measure(spec, ours, reference, options))
                print(report.row_lines(found[-1]), flush=True)
            print(report.family_mean(found), flush=True)
            rows += found
        memory: dict[str, dict[str, int]] = {}
        mini_batches: dict[str, Any] = {}
        if any(row.family == "storage" for row in rows) and not options.only:
            memory = _peak_memory(folder, options)
            mini_batches = _mini_batches(folder, options)
    _conclude(rows, memory, mini_batches, about, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", help="comma-separated; default: all")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="workloads whose FAMILY: NAME contains this")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}; not in memory alone: {STORAGE_ROUNDS} at most")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter turns, small files: a smoke test")
    parser.add_argument("--json", type=Path, default=HERE / "results.json", help="default: %(default)s")
    parser.add_argument("--ours", type=Path, default=OURS, metavar="PYTHON")
    parser.add_argument("--reference", type=Path, default=REFERENCE, metavar="PYTHON")
    parser.add_argument("--folder", type=Path, help="where the storage family writes; default: the temporary folder")
    parser.add_argument("--list", action="store_true", help="print the workloads and stop")
    parser.add_argument("--verbose", action="store_true", help="let the workers' warnings and tracebacks through")
    options = parser.parse_args()
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def _environment(python: Path) -> dict[str, str]:
    """The environment of a worker: the source beside this folder for our own interpreter, equal string hashes for all.

    Any other interpreter has a package of its own, which a PYTHONPATH must not hide.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    source = {"PYTHONPATH": str(ROOT / "src")} if python == OURS else {}
    return {**kept, **source, "PYTHONHASHSEED": "0"}


def _choose(worker: Worker, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the descriptions of the workloads that the command line asks for."""
    known = worker.ask("list", families=[])["families"]
    families = options.families.split(",") if options.families else known
    unknown = sorted(set(families) - set(known))
    if unknown:
        raise SystemExit(f"no family {', '.join(unknown)}; there are: {', '.join(known)}")
    specs = worker.ask("list", families=families)["workloads"]
    chosen = [spec for spec in specs if options.only in f"{spec['family']}: {spec['name']}"]
    if not chosen:
        raise SystemExit(f"no workload contains {options.only!r}; --list prints them")
    return chosen


def _load(ours: Worker, reference: Worker) -> dict[str, Any]:
    """Have both workers import their package; return and print what they are."""
    about: dict[str, Any] = {}
    for worker in (ours, reference):
        try:
            about[worker.role] = worker.ask("load")
        except Failed as error:
            raise SystemExit(f"the package {worker.role!r} cannot be imported: {error}") from None
        facts = about[worker.role]
        print(f"{worker.role}: {facts['version']} at {facts['file']}, torch {facts['torch']}, {facts['python']}")
    if about["ours"]["file"] == about["reference"]["file"]:
        print("WARNING: both roles are played by the same package")
    if about["ours"]["torch"] != about["reference"]["torch"]:
        print("WARNING: the packages run on different versions of torch")
    return about


def _measure(spec: dict[str, Any], ours: Worker, reference: Worker, options: argparse.Namespace) -> Row:
    """Check that the sides do the same work, then time them in turns."""
    row = Row(**{name: value for name, value in spec.items() if name not in ("has_floor", "has_reference")})
    _progress(f"{row.family}: {row.name}")
    sides = _prepare(row, spec, ours, reference, options)
    rounds = options.rounds if row.in_memory else min(options.rounds, STORAGE_ROUNDS)
    for _ in range(rounds):
        for side, (worker, of_worker) in list(sides.items()):
            try:
                row.seconds[side].append(worker.ask("turn", side=of_worker)["seconds"])
            except Failed as error:
                row.errors[side] = str(error)
                row.seconds[side].clear()
                del sides[side]
    for worker in (ours, reference):
        worker.ask("close")
    _progress("")
    return row


def _prepare(
    row: Row, spec: dict[str, Any], ours: Worker, reference: Worker, options: argparse.Namespace
) -> dict[str, tuple[Worker, str]]:
    """Open the workload in both workers and compare what they did; return the sides that work."""
    target_s = QUICK_TURN_SECONDS if options.quick else TURN_SECONDS
    sides: dict[str, tuple[Worker, str]] = {}
    digests: dict[str, dict[str, list[str]]] = {}
    packages = [("ours", ours, "package"), *[("reference", reference, "package")] * spec["has_reference"]]
    beside = [(side, ours, side) for side in [*["floor"] * spec["has_floor"], *row.rivals]]
    for side, worker, of_worker in [*packages, *beside]:
        if of_worker != "package" and "ours" not in sides:
            continue
        try:
            if of_worker == "package":
                digests[side] = worker.ask("open", family=row.family, name=row.name)["digest"]
            calibrated = worker.ask("calibrate", side=of_worker, target_s=target_s)
            if of_worker != "package":
                digests[side] = calibrated["digest"]
            sides[side] = (worker, of_worker)
        except Failed as error:
            row.errors[side] = str(error).splitlines()[0][:200]
    row.warnings += _disagreements(digests)
    return sides


def _disagreements(digests: dict[str, dict[str, list[str]]]) -> list[str]:
    """Say where two sides did not give the same leaves, or two packages not the same batch sizes."""
    found = []
    compared = [("reference", "batches"), *[(side, "leaves") for side in digests if side != "ours"]]
    for side, part in compared:
        if "ours" in digests and side in digests:
            different = _difference(digests["ours"][part], digests[side][part])
            if different:
                found.append(f"DIFFERENT WORK, ours against {side}, {part}: {different}")
    return found


def _difference(left: list[str], right: list[str]) -> str:
    """Return the first lines that only one of two digests has, or "" where they are equal."""
    if left == right:
        return ""
    only_left, only_right = sorted(set(left) - set(right)), sorted(set(right) - set(left))
    return f"{only_left[:1]} against {only_right[:1]} ({len(left)} and {len(right)} lines)"


def _peak_memory(folder: Path, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Return, per side and layout, by how many bytes saving raised the peak of a fresh process's memory."""
    unit = 2**20 if options.quick else 2**24
    layouts = {f"1 x {64 * unit >> 20} MiB": (1, 64 * unit), f"64 x {unit >> 20} MiB": (64, unit)}
    found: dict[str, dict[str, int]] = {}
    for side, python in (("ours", options.ours), ("reference", options.reference)):
        formats = _ask(python, "peak_memory.py", "--list")
        for name in formats:
            for layout, (leaves, leaf_bytes) in layouts.items():
                label = f"{name}, {layout}"
                _progress(f"peak memory: {side}, {label}")
                sizes = ["--leaves", str(leaves), "--leaf-bytes", str(leaf_bytes)]
                step = ["--step", "save", "--format", name]
                try:
                    with tempfile.TemporaryDirectory(dir=folder) as own:
                        reply = _ask(python, "peak_memory.py", *step, "--folder", own, *sizes)
                except Failed as error:
                    print(f"! peak memory of {side}, {label}: {error}")
                    continue
                found.setdefault(side, {})[label] = reply["growth"]
    _progress("")
    return found


def _mini_batches(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `minibatches.py` found, nothing where it cannot run."""
    _progress("random mini-batches")
    try:
        found: dict[str, Any] = _ask(
            options.ours, "minibatches.py", "--json", "--folder", str(folder), *["--quick"] * options.quick
        )
    except Failed as error:
        print(f"! random mini-batches: {error}")
        return {}
    _progress("")
    return found


def _ask(python: Path, script: str, *arguments: str) -> Any:
    """Return the JSON that one of the scripts beside this one prints."""
    command = [str(python), str(HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(python))
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
    return json.loads(done.stdout)


def _conclude(
    rows: list[Row],
    memory: dict[str, dict[str, int]],
    mini_batches: dict[str, Any],
    about: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Print the means and the verdicts, write the JSON, and fail where a workload could not be compared."""
    in_memory = [row for row in rows if row.in_memory]
    speedup, over_floor = report.means(in_memory)
    if speedup is not None and over_floor is not None:
        print(f"\nin-memory families together: {speedup:.2f}x the reference, {over_floor:.2f}x the floor")
    verdicts = report.verdicts(rows, memory, mini_batches, options.quick)
    subset = " (a subset of the workloads)" if options.only or options.families else ""
    print(f"\ntargets{subset}{' (quick: small sizes, noisy)' if options.quick else ''}")
    for verdict in verdicts:
        print(verdict)
    families = {row.family: report.means([r for r in rows if r.family == row.family]) for row in rows}
    result = {
        "about": {
            **about,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **machine.describe(),
            "commit": machine.commit(Path(about["ours"]["file"]).parent),
            "quick": options.quick,
            "rounds": options.rounds,
            "arguments": sys.argv[1:],
        },
        "families": {name: {"reference_over_ours": a, "ours_over_floor": b} for name, (a, b) in families.items()},
        "in_memory": {"reference_over_ours": speedup, "ours_over_floor": over_floor},
        "peak_memory_growth_bytes": memory,
        "mini_batches": mini_batches,
        "targets": [{"target": v.target, "met": v.met, "figures": v.figures} for v in verdicts],
        "workloads": [row.as_json() for row in rows],
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten: {options.json}")
    broken = report.failures(rows)
    if broken:
        raise SystemExit(f"{len(broken)} workloads could not be compared:\n  " + "\n  ".join(broken))


def _progress(text: str) -> None:
    """Show what is being measured, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{text:100}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
