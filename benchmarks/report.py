"""The table of medians and ratios, and the verdict on each target."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

SIDES = ("ours", "reference", "floor")
WIDTH = 48

IN_MEMORY_SPEEDUP = 2.5
TENSORCLASS_SPEEDUP = 3.0
FAMILY_OVER_FLOOR = 1.8
OVER_FLOOR_OF = {"tensorclass": 3.0}
"""Families whose floor is so low (reading an attribute of an object) that another bound holds."""
NEAR_FLOOR = 2.0
PEAK_GROWTH = 64 * 1024 * 1024

# Of a normal distribution with a standard deviation of 1: the error of the median of one value times the root of the
# number of values, and the distance between the quartiles.
_MEDIAN_ERROR, _QUARTILES = 1.2533, 1.349


@dataclass
class Row:
    """A workload and what was measured: seconds per call, one figure per side and round."""

    family: str
    name: str
    in_memory: bool
    target: str
    payload_bytes: int
    rivals: list[str] = field(default_factory=list)
    limits: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for side in (*SIDES, *self.rivals):
            self.seconds.setdefault(side, [])

    def median(self, side: str) -> float | None:
        """Return the median seconds per call of a side, None where it was not measured."""
        return statistics.median(self.seconds[side]) if self.seconds[side] else None

    @property
    def speedup(self) -> float | None:
        """How many times faster this package is than the reference."""
        return _ratio(self.median("reference"), self.median("ours"))

    @property
    def best_speedup(self) -> float:
        """The speedup between the fastest round of each: other processes can only make a round slower."""
        return min(self.seconds["reference"]) / min(self.seconds["ours"])

    @property
    def over_floor(self) -> float | None:
        """How many times slower this package is than the floor."""
        return _ratio(self.median("ours"), self.median("floor"))

    def noise(self, over: str, under: str) -> float | None:
        """How far the ratio of the medians of two sides may be off, as a fraction: 0.02 is 2 %.

        Twice the standard error of the median of the rounds' ratios, estimated by their quartiles, which a few
        disturbed rounds do not move. None for fewer than three rounds.
        """
        logs = [math.log(a / b) for a, b in zip(self.seconds[over], self.seconds[under], strict=False)]
        if len(logs) < 3:
            return None
        low, _, high = statistics.quantiles(logs, n=4, method="inclusive")
        return 2 * _MEDIAN_ERROR * (high - low) / _QUARTILES / math.sqrt(len(logs))

    @property
    def slower(self) -> bool:
        """True if this package is slower than the reference by more than the noise of the rounds."""
        noise = self.noise("reference", "ours")
        return self.speedup is not None and math.log(self.speedup) < -(noise or 0.0)

    def as_json(self) -> dict[str, Any]:
        """Return everything known about the workload, for `--json`."""
        return {
            "family": self.family,
            "name": self.name,
            "median_seconds": {side: self.median(side) for side in self.seconds},
            "reference_over_ours": self.speedup,
            "best_reference_over_ours": self.best_speedup if self.speedup is not None else None,
            "ours_over_floor": self.over_floor,
            "noise": {
                "reference_over_ours": self.noise("reference", "ours"),
                "ours_over_floor": self.noise("ours", "floor"),
            },
            "in_memory": self.in_memory,
            "seconds": self.seconds,
            "payload_bytes": self.payload_bytes,
            "errors": self.errors,
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class Verdict:
    """One target: whether it is met (None: not measured in this run) and the figures."""

    target: str
    met: bool | None
    figures: str

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"[{word}] {self.target}: {self.figures}"


def header() -> str:
    """Return the heading of the table."""
    return _line("", "ours", "reference", "floor", "ref/ours", "ours/floor")


def row_lines(row: Row) -> str:
    """Return the lines of a workload."""
    cells = [_cell(row, side) for side in SIDES]
    lines = [_line(f"  {row.name}", *cells, _times(row.speedup), _times(row.over_floor))]
    if row.payload_bytes:
        rates = [_rate(row.payload_bytes, row.median(side)) for side in SIDES]
        lines.append(_line("", *rates, "", ""))
    if not row.in_memory:
        lines.append(_line("    turns, of the median", *[_spread(row.seconds[side]) for side in SIDES], "", ""))
    for rival in row.rivals:
        times = _times(_ratio(row.median(rival), row.median("ours")))
        spread = "" if row.in_memory else f" (turns: {_spread(row.seconds[rival])})"
        lines.append(f"    {rival}: {_cell(row, rival)}, {times} ours{spread}")
    lines += [f"    ! {side}: {error}" for side, error in row.errors.items()]
    lines += [f"    ! {warning}" for warning in row.warnings]
    return "\n".join(lines)


def family_mean(rows: list[Row]) -> str:
    """Return the line with the geometric means of a family."""
    speedup, over_floor = means(rows)
    return _line("  geometric mean", "", "", "", _times(speedup), _times(over_floor))


def means(rows: list[Row]) -> tuple[float | None, float | None]:
    """Return the geometric means of reference/ours and of ours/floor over the rows that have them."""
    return _mean([row.speedup for row in rows]), _mean([row.over_floor for row in rows])


def verdicts(
    rows: list[Row], memory: dict[str, dict[str, int]], mini_batches: dict[str, Any], quick: bool
) -> list[Verdict]:
    """Return the verdict on each target.

    `memory` is bytes of growth per side and layout, `mini_batches` what `minibatches.py` found.
    """
    return [
        _overall(rows),
        _tensorclass(rows),
        _none_slower(rows),
        _near_floor(rows),
        *_families(rows),
        *[_limit(row, limit) for row in rows for limit in row.limits],
        _peak_memory(memory, quick),
        *_mini_batches(mini_batches, quick),
    ]


def failures(rows: list[Row]) -> list[str]:
    """Return the workloads in which a side failed, or returned another result than the other sides."""
    return [f"{row.family}: {row.name}" for row in rows if row.errors or row.warnings]


def human(seconds: float | None) -> str:
    """Return a duration in three digits and its own unit."""
    if seconds is None:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 1000 * scale else f"{seconds / scale:.0f} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _overall(rows: list[Row]) -> Verdict:
    target = f"in-memory families at least {IN_MEMORY_SPEEDUP} times faster than the reference"
    measured = [row for row in rows if row.in_memory and row.speedup is not None]
    asked = sum(row.in_memory for row in rows)
    mean = _mean([row.speedup for row in measured])
    if mean is None:
        return Verdict(target, None, "no workload")
    return Verdict(target, mean >= IN_MEMORY_SPEEDUP, f"{mean:.2f}x over {len(measured)} of {asked} workloads")


def _none_slower(rows: list[Row]) -> Verdict:
    target = "no workload slower than the reference by more than the noise of its rounds"
    ratios = [(row, row.speedup) for row in rows if row.speedup is not None]
    below = sorted(((ratio, row) for row, ratio in ratios if ratio < 1), key=lambda pair: pair[0])
    if not ratios:
        return Verdict(target, None, "no workload")
    listed = "".join(
        f"\n    {ratio:.3f}x (best rounds: {row.best_speedup:.3f}x)  {row.family}: {row.name}"
        + ("" if row.slower else "  (within the noise)")
        for ratio, row in below
    )
    slower = sum(row.slower for _, row in below)
    return Verdict(target, not slower, f"{slower} of {len(ratios)} slower, {len(below) - slower} within it{listed}")


def _families(rows: list[Row]) -> list[Verdict]:
    """The verdict on each family in memory: what it costs beyond its floor."""
    found = []
    for family in dict.fromkeys(row.family for row in rows if row.in_memory):
        bound = OVER_FLOOR_OF.get(family, FAMILY_OVER_FLOOR)
        mean = _mean([row.over_floor for row in rows if row.family == family])
        target = f"{family}: at most {bound:g} times the floor"
        found.append(
            Verdict(target, None, "no floor")
            if mean is None
            else Verdict(target, mean <= bound, f"{mean:.2f}x in geometric mean")
        )
    return found


def _near_floor(rows: list[Row]) -> Verdict:
    target = f"10 leaves: int and slice index, clone, unbind, stack at most {NEAR_FLOOR} times the floor"
    ratios = [(row.over_floor, row) for row in rows if row.target == "near_floor" and row.over_floor is not None]
    if not ratios:
        return Verdict(target, None, "no workload")
    listed = "".join(f"\n    {ratio:.2f}x  {row.family}: {row.name}" for ratio, row in ratios)
    return Verdict(target, all(ratio <= NEAR_FLOOR for ratio, _ in ratios), f"{len(ratios)} workloads{listed}")


def _tensorclass(rows: list[Row]) -> Verdict:
    target = f"tensorclass at least {TENSORCLASS_SPEEDUP} times faster than the reference"
    mean = _mean([row.speedup for row in rows if row.family == "tensorclass"])
    if mean is None:
        return Verdict(target, None, "no workload")
    return Verdict(target, mean >= TENSORCLASS_SPEEDUP, f"{mean:.2f}x in geometric mean")


def _limit(row: Row, limit: dict[str, Any]) -> Verdict:
    """The verdict on one target of one workload."""
    other = limit["called"] or ("the reference" if limit["side"] == "reference" else limit["side"])
    faster = _ratio(row.median(limit["side"]), row.median("ours"))
    if limit["at_most"]:
        target = f"{row.name}: at most {limit['at_most']:g} times the time of {other}"
        ratio = None if faster is None else 1 / faster
        met = ratio is not None and ratio <= limit["at_most"]
    else:
        target = f"{row.name}: at least {limit['at_least']:g} times as fast as {other}"
        ratio, met = faster, faster is not None and faster >= limit["at_least"]
    return Verdict(target, None, "not measured") if ratio is None else Verdict(target, met, f"{ratio:.2f}x")


def _mini_batches(found: dict[str, Any], quick: bool) -> list[Verdict]:
    """The verdicts on reading random rows of a data set larger than memory, one for each format."""
    if not found:
        return []
    size, limit = (f"{found[name] / 2**30:.2g} GiB" for name in ("payload", "limit"))
    rates = found["rows_per_second"]
    verdicts = []
    for name in [name for name in rates if name != "numpy memmap"]:
        ratio = rates[name] / rates["numpy memmap"]
        target = f"random mini-batches of {size} in {limit} of memory, {name}: at least as fast as numpy memmap"
        figures = f"{ratio:.2f}x ({rates[name]:,.0f} rows/s; {found['peak'][name] / 2**20:.0f} MiB at the peak)"
        verdicts.append(
            Verdict(target, None if quick else ratio >= 1 and found["peak"][name] <= found["limit"], figures)
        )
    return verdicts


def _peak_memory(memory: dict[str, dict[str, int]], quick: bool) -> Verdict:
    target = f"peak memory grows by at most {PEAK_GROWTH >> 20} MiB while saving"
    ours = memory.get("ours", {})
    if not ours:
        return Verdict(target, None, "not measured")
    listed = "".join(
        f"\n    {side}: {layout}: {growth / 2**20:.1f} MiB"
        for side, layouts in memory.items()
        for layout, growth in layouts.items()
    )
    # A quick run saves no more than the bound: staying under it would prove nothing.
    return Verdict(target, None if quick else max(ours.values()) <= PEAK_GROWTH, listed)


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or under is None else over / under


def _mean(ratios: list[float | None]) -> float | None:
    logs = [math.log(ratio) for ratio in ratios if ratio is not None]
    return math.exp(statistics.fmean(logs)) if logs else None


def _cell(row: Row, side: str) -> str:
    return "error" if side in row.errors else human(row.median(side))


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _rate(payload: int, seconds: float | None) -> str:
    return "" if seconds is None else f"{payload / seconds / 2**30:.2f} GiB/s"


def _spread(seconds: list[float]) -> str:
    """Return the fastest and the slowest turn as fractions of the median."""
    if not seconds:
        return ""
    median = statistics.median(seconds)
    return f"{min(seconds) / median:.2f}-{max(seconds) / median:.2f}"


def _line(name: str, *cells: str) -> str:
    return f"{name:{WIDTH}}" + "".join(f"{cell:>12}" for cell in cells)
