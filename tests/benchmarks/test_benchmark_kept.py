"""Runs of the benchmarks that are kept, and what is said to have moved since."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIDES = {"ours": 1e-6, "reference": 2e-6, "floor": 5e-7}
WOBBLE = (0.98, 1.0, 1.01, 0.99, 1.02, 1.0, 1.0)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks, which find each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def kept(load: Any) -> ModuleType:
    return load("kept")  # type: ignore[no-any-return]


def row(report: ModuleType, name: str, family: str = "indexing", **seconds: float) -> Any:
    """A workload measured over seven rounds, at `seconds` a side where the defaults do not fit."""
    made = report.Row(family, name, in_memory=True, target="", payload_bytes=0)
    for side, usual in SIDES.items():
        made.seconds[side] = [seconds.get(side, usual) * factor for factor in WOBBLE]
    return made


def run(report: ModuleType, *rows: Any, quick: bool = False, cpu: str = "Some(R) CPU @ 2.00GHz") -> dict[str, Any]:
    """Build a result file in the form that benchmarks/run.py writes."""
    side = {"version": "1", "torch": "2", "python": "3", "file": "f"}
    families = {row.family: dict(zip(("reference_over_ours", "ours_over_floor"), report.means([row]))) for row in rows}
    about = {"date": "2026-01-01T00:00:00", "cpu": cpu, "cores": 2, "commit": "abc", "quick": quick, "rounds": 7}
    return {
        "about": {**about, "arguments": ["--quick"], "ours": side, "reference": side},
        "families": families,
        "in_memory": families["indexing"],
        "workloads": [row.as_json() for row in rows],
    }


def test_noise_is_that_of_the_rounds(load: Any) -> None:
    report = load("report")
    measured = row(report, "x")
    # Both sides wobble together: turns of both are slow in a slow moment, and their ratio is not.
    assert measured.noise("reference", "ours") == pytest.approx(0, abs=1e-12)
    measured.seconds["ours"] = [1e-6 * factor for factor in (1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0)]
    some = measured.noise("reference", "ours")
    measured.seconds["ours"][1] = 1.0
    # One round that was disturbed does not make it more than a little larger.
    assert 0.01 < some < 0.1 and measured.noise("reference", "ours") < 2 * some
    measured.seconds["ours"] = measured.seconds["ours"][:2]
    assert measured.noise("reference", "ours") is None


def test_slower_is_beyond_the_noise(load: Any) -> None:
    report = load("report")
    noisy, clear = row(report, "noisy", reference=0.99e-6), row(report, "clear", reference=0.8e-6)
    noisy.seconds["ours"] = [1e-6 * factor for factor in (1.2, 1.1, 0.8, 1.0, 1.3, 0.9, 1.0)]
    assert clear.slower and not noisy.slower and not row(report, "faster").slower
    verdicts = {verdict.target: verdict for verdict in report.verdicts([noisy, clear], {}, {}, False)}
    found = verdicts["no workload slower than the reference by more than the noise of its rounds"]
    assert (
        found.met is False and "1 of 2 slower, 1 within it" in found.figures and "(within the noise)" in found.figures
    )


@pytest.mark.parametrize(
    ("family", "ours", "met"), [("views", 1.7, True), ("views", 1.9, False), ("tensorclass", 2.9, True)]
)
def test_families_have_bounds(load: Any, family: str, ours: float, met: bool) -> None:
    report = load("report")
    rows = [row(report, "x", family, ours=ours, floor=1.0)]
    verdict = next(v for v in report.verdicts(rows, {}, {}, False) if v.target.startswith(f"{family}: "))
    assert verdict.met is met


def test_a_run_is_kept_without_its_rounds(load: Any, kept: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    report = load("report")
    monkeypatch.setattr(kept, "KEPT", tmp_path / "kept")
    path = kept.keep(kept.small(run(report, row(report, "a"), row(report, "b"), quick=True)), None)
    assert path.name == "2026-01-01-some-2-cores-quick.json"
    read = json.loads(path.read_text())
    assert [work["name"] for work in read["workloads"]] == ["a", "b"]
    assert read["workloads"][0]["reference_over_ours"] == 2.0 and "seconds" not in read["workloads"][0]
    assert "arguments" not in read["about"] and read["families"]["indexing"]["ours_over_floor"] == 2.0
    with pytest.raises(FileExistsError):
        kept.keep(read, None)
    assert json.loads(path.read_text()) == read


def test_the_latest_of_the_same_machine_is_compared(
    load: Any, kept: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    report = load("report")
    monkeypatch.setattr(kept, "KEPT", tmp_path)
    here, there, quick = (run(report, row(report, "a"), cpu=cpu) for cpu in ("Here", "There", "Here"))
    with pytest.raises(SystemExit, match="make bench-keep"):
        kept.latest(here)
    there["about"]["date"] = "2026-01-03"
    quick["about"].update(quick=True, date="2026-01-04")
    paths = [kept.keep(kept.small(one), None) for one in (there, quick)]
    assert kept.latest(here) == paths[0]
    paths.append(kept.keep(kept.small(here), None))
    assert kept.latest(here) == paths[2] and kept.latest(quick) == paths[1]


def test_moves_are_those_of_this_package_beyond_the_noise(load: Any, kept: ModuleType) -> None:
    report = load("report")
    names = ("same", "slower", "faster", "much slower", "reference moved", "noisy")
    before = run(report, *[row(report, name) for name in names], row(report, "gone"))
    noisy = row(report, "noisy", ours=1.2e-6)
    noisy.seconds["ours"] = [1.2e-6 * factor for factor in (0.5, 1.5, 0.6, 1.4, 1.0, 1.1, 0.9)]
    now = run(
        report,
        row(report, "same", ours=1.03e-6),
        row(report, "slower", ours=1.2e-6),
        row(report, "faster", ours=0.7e-6),
        row(report, "much slower", ours=2e-6),
        row(report, "reference moved", reference=1e-6),
        noisy,
        row(report, "new"),
    )
    found = {move.name: move for move in kept.moves(kept.small(before), kept.small(now))}
    assert {name for name, move in found.items() if move.is_ours} == {"slower", "faster", "much slower"}
    assert math.exp(found["much slower"].size) == pytest.approx(0.5) and found["faster"].size > 0
    assert found["reference moved"].moved == ["reference_over_ours"]
    text = "\n".join(kept.lines(kept.small(before), kept.small(now), list(found.values())))
    assert "indexing: 2 slower, 1 faster, of 6" in text and "1 only in the later run, 1 only in the kept one" in text
    assert text.index("x  much slower:") < text.index("x  faster:") < text.index("x  slower:")


def test_compare_fails_where_something_is_slower(load: Any, kept: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    report = load("report")
    monkeypatch.setattr(kept, "KEPT", tmp_path / "kept")
    result = run(report, row(report, "a"))
    path = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["kept.py", "keep", "--run", str(path)])
    with pytest.raises(SystemExit, match="make bench"):
        kept.main()
    path.write_text(json.dumps(result))
    kept.main()
    monkeypatch.setattr(sys, "argv", ["kept.py", "compare", "--run", str(path)])
    kept.main()
    slower = copy.deepcopy(result)
    slower["workloads"] = [row(report, "a", ours=3e-6).as_json()]
    path.write_text(json.dumps(slower))
    with pytest.raises(SystemExit, match="1 workloads are slower"):
        kept.main()


def test_runs_in_the_repository_can_be_compared(kept: ModuleType) -> None:
    runs = [json.loads(path.read_text()) for path in sorted((BENCHMARKS / "kept").glob("*.json"))]
    workloads = [run for run in runs if "workloads" in run]
    assert workloads
    for one in workloads:
        found = kept.moves(one, one)
        assert len(found) == len(one["workloads"]) and not any(move.moved for move in found)
        assert kept.lines(one, one, found)


def test_the_machine_is_described(load: Any) -> None:
    machine = load("machine")
    about = machine.describe()
    assert about["cpu"] and about["cores"] >= 1 and about["memory_gib"] > 0 and about["cpu"] in about["machine"]
    assert machine.commit(Path("/")) is None
