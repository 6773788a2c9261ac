"""Runs `examples/distributed.py` by `torchrun`, as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "distributed.py"


@pytest.mark.slow
def test_training_and_rollouts_on_three_processes() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(PROGRAM)]
    run = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = [float(found) for found in re.findall(r"^epoch \d+: loss ([\d.]+) over 1536 examples$", run.stdout, re.M)]
    assert len(losses) == 2
    assert losses[1] < 0.1 < losses[0]
    assert "parameters equal on 3 ranks: True" in run.stdout
    rewards = [float(found) for found in re.findall(r"^round \d+: mean reward (-[\d.]+) over 128", run.stdout, re.M)]
    assert len(rewards) == 2
    assert rewards[1] > -0.6 > rewards[0]
    assert "rollouts came from: actor 1, actor 2" in run.stdout
