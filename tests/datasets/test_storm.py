"""The storm: processes that write, read, compact and tidy one data set at once, and are killed at random moments."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "io"))
from remote_server import new_bucket, options_of, s3_server

PROGRAM = pathlib.Path(__file__).with_name("storm.py")


def raise_storm(path: str, seconds: float, seed: int, options: dict[str, Any] | None = None) -> dict[str, int]:
    """The tally of a storm, in a process of its own."""
    command = [sys.executable, str(PROGRAM), path, str(seconds), str(seed), *([json.dumps(options)] if options else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3600, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    tally: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return tally


def test_a_short_storm_on_a_folder(tmp_path: pathlib.Path) -> None:
    assert raise_storm(str(tmp_path / "data"), 4, 1)["rows acknowledged"] > 0


@pytest.mark.slow
def test_a_short_storm_on_a_server() -> None:
    pytest.importorskip("s3fs")
    with s3_server() as proxy:
        assert raise_storm(f"s3://{new_bucket(proxy)}/data", 3, 1, options_of(proxy))["rows acknowledged"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_long_storm_on_a_folder(tmp_path: pathlib.Path, seed: int) -> None:
    tally = raise_storm(str(tmp_path / "data"), 60, seed)
    assert min(tally[f"killed: {role}"] for role in ("write", "read", "compact", "sweep")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_long_storm_on_a_server(seed: int) -> None:
    pytest.importorskip("s3fs")
    with s3_server() as proxy:
        tally = raise_storm(f"s3://{new_bucket(proxy)}/data", 60, seed, options_of(proxy))
    assert min(tally[f"killed: {role}"] for role in ("write", "read", "compact", "sweep")) > 0
