"""Checkpoints of modules: the reference's load here, and ours load there."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from cases import mark_slow

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "nn" / "checkpointed.py"
# Written by `checkpointed.py save` on the reference 0.14.3.
SAMPLE = ROOT / "tests" / "data" / "modules" / "reference.pt"


def run(python: str | pathlib.Path, *args: object) -> None:
    command = [str(python), str(PROGRAM), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_reference_s_loads_here() -> None:
    run(sys.executable, "load", SAMPLE)


@pytest.mark.reference
@pytest.mark.parametrize(
    "environment", mark_slow([".venv-reference", ".venv-clients-reference"], keep=[".venv-reference"])
)
def test_ours_loads_there_and_the_other_way_round(environment: str, tmp_path: pathlib.Path) -> None:
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{environment} is not installed here (make {environment}/installed)")
    run(sys.executable, "save", tmp_path / "ours.pt")
    run(python, "load", tmp_path / "ours.pt")
    run(python, "save", tmp_path / "theirs.pt")
    run(sys.executable, "load", tmp_path / "theirs.pt")
