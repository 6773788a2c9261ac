"""A program that ends after `isend` has sent what it was to send, or says that it has not."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from cases import mark_slow

PROGRAM = pathlib.Path(__file__).with_name("leaving.py")

pytestmark = pytest.mark.seconds


def run(how: str, folder: pathlib.Path) -> list[tuple[int, str, str]]:
    """Return exit code, output and errors of the receiver and of the sender."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(folder / "store"), how],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize("how", mark_slow(["plain", "kept", "dropped"], keep=["plain", "dropped"]))
def test_what_was_sent_arrives(how: str, tmp_path: pathlib.Path) -> None:
    receiver, sender = run(how, tmp_path)
    assert receiver[:2] == (0, "[1.0]\n"), receiver[2]
    assert sender[0] == 0, sender[2]
    assert "abandoned" not in sender[2]
    assert sender[1] == ("tag 1\n" if how == "plain" else "")


@pytest.mark.parametrize("how", ["kept", "dropped"])
def test_what_nobody_takes_is_said_to_be_abandoned(how: str, tmp_path: pathlib.Path) -> None:
    sender = run(f"{how}-never", tmp_path)[1]
    assert "isend to rank 0 was abandoned" in sender[2]
