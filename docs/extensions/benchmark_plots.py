"""Draws the kept runs of the benchmarks, `benchmarks/kept/*.json`, for the page on benchmarks.

A run has the form of `benchmarks/run.py` (families, workloads) or of `benchmarks/formats.py` (formats).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent.parent
NONE = "No run is kept yet: the tables above name their runs."


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the page before Sphinx reads its sources."""
    app.connect(
        "builder-inited", lambda app: write(ROOT / "benchmarks" / "kept", Path(app.srcdir) / "design" / "generated")
    )
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def write(kept: Path, folder: Path) -> None:
    """Write `benchmarks.md`, and the pictures that it shows, of all runs in a folder.

    Args:
        kept: the folder of the JSON files.
        folder: the folder for the page; created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [section(path, folder) for path in sorted(kept.glob("*.json"))]
    page = folder / "benchmarks.md"
    text = "\n\n".join(parts) or NONE
    # Keep an unchanged file, so that Sphinx need not read the page again.
    if not page.is_file() or page.read_text() != text + "\n":
        page.write_text(text + "\n")


def section(path: Path, folder: Path) -> str:
    """Return the part of the page about one run."""
    run = json.loads(path.read_text())
    if "workloads" in run:
        return of_workloads(path.stem, run, folder)
    if "formats" in run:
        return of_formats(path.stem, run)
    raise ValueError(f"{path} has neither 'workloads' (benchmarks/run.py) nor 'formats' (benchmarks/formats.py)")


def of_workloads(name: str, run: dict[str, Any], folder: Path) -> str:
    """Describe a run of `benchmarks/run.py`: its families as bars, its workloads as points."""
    about = run.get("about", {})
    told = ", ".join(str(about[key]) for key in ("machine", "date") if key in about)
    families = {
        family: (means["reference_over_ours"], means["ours_over_floor"])
        for family, means in run.get("families", {}).items()
        if means["reference_over_ours"] is not None and means["ours_over_floor"] is not None
    }
    lines = [f"### {name}", told and f"On {told}."]
    if families:
        picture = f"{name}-families.svg"
        draw_families(families, folder / picture)
        lines.append(f"![Times faster than the reference, and time as a multiple of the raw calls]({picture})")
    spread = [work["reference_over_ours"] for work in run["workloads"] if work.get("reference_over_ours") is not None]
    if spread:
        picture = f"{name}-workloads.svg"
        draw_workloads(spread, folder / picture)
        slower = sum(ratio < 1 for ratio in spread)
        lines.append(f"![The workloads one by one]({picture})")
        lines.append(f"{len(spread)} workloads beside the reference; {slower} slower.")
    return "\n\n".join(line for line in lines if line)


def of_formats(name: str, run: dict[str, Any]) -> str:
    """Describe a run of `benchmarks/formats.py` as tables."""
    lines = [f"### {name}", f"On {run['machine']}, {run['processors']} processors, torch {run['torch']}."]
    for title, found in run["formats"].items():
        lines.append(f"{title}: times and sizes relative to the folder.")
        rows = [
            f"| {one} | " + " | ".join(f"{by[one] / by['folder']:.2g}" for by in found.values()) + " |"
            for one in found["save"]
        ]
        lines.append("\n".join(["| format | " + " | ".join(found) + " |", "|---|" + "---|" * len(found), *rows]))
    return "\n\n".join(lines)


def draw_families(families: dict[str, tuple[float, float]], path: Path) -> None:
    """Draw two bars for each family."""
    figure, axes = figure_of(0.3 * len(families) + 1)
    places = range(len(families))
    axes.barh(
        [place - 0.2 for place in places],
        [a for a, _ in families.values()],
        0.38,
        label="times faster than the reference",
    )
    axes.barh(
        [place + 0.2 for place in places], [b for _, b in families.values()], 0.38, label="time, raw calls being 1"
    )
    axes.set_yticks(list(places), list(families))
    axes.invert_yaxis()
    axes.axvline(1, color="gray", linewidth=0.8)
    axes.legend(loc="lower right")
    save(figure, path)


def draw_workloads(ratios: list[float], path: Path) -> None:
    """Draw all workloads, from the slowest to the fastest compared with the reference."""
    figure, axes = figure_of(3)
    axes.plot(sorted(ratios), ".", markersize=3)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_xlabel("workloads, in order")
    axes.set_ylabel("times faster than the reference")
    save(figure, path)


def figure_of(height: float) -> tuple[Any, Any]:
    """Make a figure of the width of the page, and its axes; matplotlib draws without a screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots()


def save(figure: Any, path: Path) -> None:
    """Write a figure; the same figures give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tensordict"}):
        figure.savefig(path, metadata={"Date": None})
