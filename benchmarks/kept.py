"""Keeps runs of the benchmarks, and says what has moved since one of them.

    make bench-keep                                    # benchmarks/kept/DATE-MACHINE.json, of the last `make bench`
    make bench-compare                                 # the last `make bench` beside the last kept run of this machine
    .venv/bin/python benchmarks/kept.py compare --run OTHER.json --kept benchmarks/kept/ONE.json

A kept run has the machine and, for each workload, two ratios (the reference's time over ours, ours over the floor's)
with the noise of their rounds. It does not have the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT, LAST = HERE / "kept", HERE / "results.json"
RATIOS = ("reference_over_ours", "ours_over_floor")
LEAST = 0.1
"""Moves below this are not reported. A process lies in memory where it lies, for all of its rounds, so that two runs of
one commit differ by more than the noise of the rounds: benchmarks/README.md says by how much."""

Run = dict[str, Any]


@dataclass(frozen=True)
class Move:
    """A workload in two runs, with the factor by which this package became faster (below 1: slower), by both ratios."""

    family: str
    name: str
    ratios: dict[str, tuple[float, float]]
    """Each ratio as (before, now), where both runs have it."""
    limits: dict[str, float]
    """By what fraction each may differ."""

    def factor(self, ratio: str) -> float:
        """By what factor this package became faster, as one of the ratios has it."""
        before, now = self.ratios[ratio]
        return now / before if ratio == "reference_over_ours" else before / now

    @property
    def moved(self) -> list[str]:
        """The ratios that moved by more than the noise of the two runs."""
        return [name for name in self.ratios if abs(math.log(self.factor(name))) > self.limits[name]]

    @property
    def is_ours(self) -> bool:
        """Return True if this package moved and not the other side: all ratios moved in one direction."""
        faster = {self.factor(name) > 1 for name in self.ratios}
        return bool(self.ratios) and len(self.moved) == len(self.ratios) and len(faster) == 1

    @property
    def size(self) -> float:
        """The smallest factor that the ratios agree on, as a logarithm; below 0 for slower."""
        return min((math.log(self.factor(name)) for name in self.ratios), key=abs)

    def __str__(self) -> str:
        cells = []
        for name, title in zip(RATIOS, ("times the reference", "of the floor"), strict=True):
            if name in self.ratios:
                before, now = self.ratios[name]
                cells.append(f"{before:.2f} -> {now:.2f} {title} (noise {self.limits[name]:.0%})")
        return f"  {math.exp(self.size):5.2f}x  {self.name}: {'; '.join(cells)}"


def main() -> None:
    """Do what the command line asks for; comparing fails where a workload has become slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("keep", "compare"))
    parser.add_argument("--run", type=Path, default=LAST, help="default: %(default)s, which `make bench` writes")
    parser.add_argument("--kept", type=Path, help="compare: default the latest of this machine; keep: where to")
    options = parser.parse_args()
    if not options.run.is_file():
        raise SystemExit(f"there is no run at {options.run}: `make bench` makes one")
    run = small(json.loads(options.run.read_text()))
    if options.do == "keep":
        print(f"written: {keep(run, options.kept)}")
        return
    path = options.kept or latest(run)
    before = json.loads(path.read_text())
    found = moves(before, run)
    print(f"since {path.name}, commit {before['about']['commit']}, by commit {run['about']['commit']}")
    print("\n".join(lines(before, run, found)))
    slower = sum(move.is_ours and move.size < 0 for move in found)
    if slower:
        raise SystemExit(f"{slower} workloads are slower than they were")


def small(run: Run) -> Run:
    """Return the part of a run that is kept in the repository."""
    kept = ("family", "name", "in_memory", *RATIOS, "noise")
    about = {name: value for name, value in run["about"].items() if name != "arguments"}
    for side in ("ours", "reference"):
        about[side] = {name: value for name, value in about[side].items() if name != "file"}
    return {
        "about": about,
        "families": rounded(run["families"]),
        "in_memory": rounded(run["in_memory"]),
        "workloads": [{name: rounded(work[name]) for name in kept} for work in run["workloads"]],
    }


def rounded(value: Any) -> Any:
    """The same with four digits to each figure."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def keep(run: Run, path: Path | None) -> Path:
    """Write a run, by default beside the others under its day and machine; never over another."""
    about = run["about"]
    words = re.sub(r"\([^)]*\)|@.*|\bCPU\b|\bProcessor\b", " ", about["cpu"])
    machine = "-".join([*re.findall(r"[a-z0-9.]+", words.lower()), f"{about['cores']}-cores"])
    name = f"{about['date'][:10]}-{machine}{'-quick' if about['quick'] else ''}.json"
    path = path or KEPT / name
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(work) for work in run["workloads"]]
    head = json.dumps({**run, "workloads": []}, indent=1).removesuffix("[]\n}")
    with path.open("x") as file:
        file.write(head + "[\n  " + ",\n  ".join(lines) + "\n ]\n}\n")
    return path


def latest(run: Run) -> Path:
    """The latest kept run of the machine that a run is of, else of any; quick runs only for quick ones."""
    runs = [(path, json.loads(path.read_text())) for path in sorted(KEPT.glob("*.json"))]
    fit = [(path, kept["about"]) for path, kept in runs if "workloads" in kept]
    fit = [(path, about) for path, about in fit if about["quick"] == run["about"]["quick"]]
    if not fit:
        quick = "quick " if run["about"]["quick"] else ""
        raise SystemExit(f"no {quick}run is kept in {KEPT}: `make bench-keep` keeps the last one")
    same = [one for one in fit if all(one[1][name] == run["about"][name] for name in ("cpu", "cores"))]
    return max(same or fit, key=lambda one: str(one[1]["date"]))[0]


def moves(before: Run, now: Run) -> list[Move]:
    """The workloads that both runs have, in the order of the later one."""
    old = {(work["family"], work["name"]): work for work in before["workloads"]}
    found = []
    for work in now["workloads"]:
        other = old.get((work["family"], work["name"]))
        if other is None:
            continue
        both = [name for name in RATIOS if work[name] is not None and other[name] is not None]
        limits = {name: max(LEAST, math.hypot(*(one["noise"][name] or 0.0 for one in (work, other)))) for name in both}
        ratios = {name: (other[name], work[name]) for name in both}
        found.append(Move(work["family"], work["name"], ratios, limits))
    return found


def lines(before: Run, now: Run, found: list[Move]) -> list[str]:
    """Return the lines to print: the families that moved with their workloads, the largest moves first."""
    text = []
    for name in ("cpu", "cores", "quick", "rounds"):
        if before["about"][name] != now["about"][name]:
            text.append(f"! {name}: {before['about'][name]} then, {now['about'][name]} now")
    for side in ("ours", "reference"):
        for name in ("torch", "python") if side == "ours" else ("version", "torch", "python"):
            then, today = before["about"][side][name], now["about"][side][name]
            if then != today:
                text.append(f"! {name} of {side}: {then} then, {today} now")
    ours = [move for move in found if move.is_ours]
    families: dict[str, list[Move]] = {}
    for move in sorted(ours, key=lambda move: abs(move.size), reverse=True):
        families.setdefault(move.family, []).append(move)
    for family, members in families.items():
        among = sum(move.family == family for move in found)
        slower = sum(move.size < 0 for move in members)
        text.append(f"{family}: {slower} slower, {len(members) - slower} faster, of {among}")
        text += [str(move) for move in members]
    others = sum(bool(move.moved) and not move.is_ours for move in found)
    slower = sum(move.size < 0 for move in ours)
    text.append(
        f"{len(found)} workloads in both runs: {slower} slower, {len(ours) - slower} faster by more than the noise"
    )
    text.append(f"{others} moved by one ratio alone: there the reference or the floor did, not this package")
    names = [{(work["family"], work["name"]) for work in run["workloads"]} for run in (before, now)]
    text.append(f"{len(names[1] - names[0])} only in the later run, {len(names[0] - names[1])} only in the kept one")
    return text


if __name__ == "__main__":
    main()
