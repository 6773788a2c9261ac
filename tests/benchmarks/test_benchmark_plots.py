"""The benchmark page describes the kept runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def plots() -> ModuleType:
    """The extension of Sphinx that draws them."""
    spec = importlib.util.spec_from_file_location("benchmark_plots", ROOT / "docs/extensions/benchmark_plots.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*ratios: float) -> dict[str, Any]:
    """Build the part of a result file of benchmarks/run.py that the page reads."""
    work = [{"family": "indexing", "name": f"{at}", "reference_over_ours": ratio} for at, ratio in enumerate(ratios)]
    return {
        "about": {"machine": "a machine, 2 cores", "date": "2026-01-01"},
        "families": {"indexing": {"reference_over_ours": 1.5, "ours_over_floor": 1.25}},
        "workloads": [*work, {"family": "indexing", "name": "not measured there", "reference_over_ours": None}],
    }


def test_no_run_is_said_to_be_none(plots: ModuleType, tmp_path: Path) -> None:
    plots.write(tmp_path / "kept", tmp_path / "page")
    assert (tmp_path / "page" / "benchmarks.md").read_text().strip() == plots.NONE


def test_runs_are_drawn(plots: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept, page = tmp_path / "kept", tmp_path / "page"
    kept.mkdir()
    (kept / "one.json").write_text(json.dumps(run(0.5, 2.0, 3.0)))
    found = {"save": {"folder": 2.0, "archive": 1.0}, "size": {"folder": 10.0, "archive": 11.0}}
    machine = {"machine": "another", "processors": 4, "torch": "2"}
    (kept / "two.json").write_text(json.dumps({**machine, "formats": {"1 MiB in 2 leaves": found}}))
    plots.write(kept, page)
    text = (page / "benchmarks.md").read_text()
    assert "### one" in text and "a machine, 2 cores" in text and "3 workloads beside the reference; 1 slower." in text
    assert "| archive | 0.5 | 1.1 |" in text and "1 MiB in 2 leaves" in text
    pictures = {path.name: path.read_bytes() for path in page.glob("*.svg")}
    assert set(pictures) == {"one-families.svg", "one-workloads.svg"}
    assert all(f"]({name})" in text for name in pictures)
    before = (page / "benchmarks.md").stat().st_mtime_ns
    plots.write(kept, page)
    # The same again: the same pictures, and the page is not written anew.
    assert {path.name: path.read_bytes() for path in page.glob("*.svg")} == pictures
    assert (page / "benchmarks.md").stat().st_mtime_ns == before
    (kept / "three.json").write_text("{}")
    with pytest.raises(ValueError, match=r"three\.json has neither"):
        plots.write(kept, page)
