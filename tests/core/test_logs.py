"""One logger, `tensordict`, silent until a program sets logging up; and what it is told."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensordict import DatasetWriter, TensorDict
from tensordict.datasets import compact, tidy
from tensordict.io.saving import commit
from tensordict.utils import logger, timeit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The logged messages, each behind its level."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"{record.levelname} {record.getMessage()}")

    handler = Keep()
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.setLevel(logging.NOTSET)
    logger.removeHandler(handler)


def test_there_is_one_logger_which_says_nothing_by_itself(tmp_path: Path) -> None:
    program = """
import logging, sys
import tensordict

assert tensordict.utils.logger is logging.getLogger("tensordict")  # a module that `import tensordict` gives, too
assert [name for name in logging.root.manager.loggerDict if name.startswith("tensordict")] == ["tensordict"]
assert [type(handler) for handler in tensordict.utils.logger.handlers] == [logging.NullHandler]
tensordict.utils.logger.error("nobody sees this")
tensordict.TensorDict(a=1).memmap("saved")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.stdout, done.stderr) == ("", "")


def test_saves(tmp_path: Path, lines: list[str]) -> None:
    folder = str(tmp_path / "saved")
    TensorDict(a=1).memmap(folder)
    assert lines == [f"DEBUG saved {folder!r}"]


def test_saves_that_were_cut_off(tmp_path: Path, lines: list[str]) -> None:
    folder = str(tmp_path / "saved")
    TensorDict(a=1).memmap(folder)
    os.rename(folder, commit.path_beside(folder, "old"))
    commit.put_back(folder)
    assert lines[1:] == [f"INFO a save to {folder!r} was cut off: its old content is put back"]
    beside = commit.path_beside(folder)
    os.mkdir(beside)
    commit.clean(folder, beside, has_locks=True)
    assert lines[2:] == [f"INFO removing what a save to {folder!r} that was cut off has left beside it"]


def test_data_sets(tmp_path: Path, lines: list[str]) -> None:
    folder = str(tmp_path / "rows")
    for _ in range(2):
        with DatasetWriter(folder) as writer:
            writer.append(TensorDict(x=torch.tensor(1.0)))
    compact(folder)
    assert f"INFO compacted {folder!r}: 2 shards became 1" in lines
    assert sum(line.startswith("INFO removed ") for line in lines) == 2
    tidy(folder, older_than=0)


def test_processes(lines: list[str]) -> None:
    TensorDict(x=torch.zeros(2), batch_size=[2]).map(torch.clone, num_workers=1, mp_start_method="fork")
    assert sum(line.startswith("DEBUG started the worker process ") for line in lines) == 1


def test_times(lines: list[str]) -> None:
    with timeit("sum"):
        sum(range(10))
    timeit.print("here")
    timeit.erase()
    assert any(line.startswith("INFO here sum took ") for line in lines)


def test_what_is_logged_is_documented() -> None:
    """Every message of the code stands on the page, but for what is put into it."""
    page = " ".join((ROOT / "docs" / "guides" / "logging.md").read_text().split())
    calls = [
        line.partition('("')[2].partition('"')[0]
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line in path.read_text().splitlines()
        if line.strip().startswith("logger.") and '("' in line
    ]
    assert len(calls) >= 8
    assert [call for call in calls if call not in page] == []
