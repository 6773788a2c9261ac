"""Random programs give the same here as on the reference, except where `judged.txt` says why not."""

from __future__ import annotations

import pytest

from differ import judging
from differ.fuzzing import Fuzzing
from differ.sides import PYTHON, REFERENCE, Sides

SEED, PROGRAMS = 15_000, 250


@pytest.mark.reference
def test_programs_do_not_differ() -> None:
    if not (PYTHON.exists() and REFERENCE.exists()):
        pytest.skip("the reference is not installed here (make .venv-reference/installed)")
    with Sides() as sides:
        fuzzing = Fuzzing(sides)
        for seed in range(SEED, SEED + PROGRAMS):
            fuzzing.run(seed)
    text, letters = judging.report(fuzzing.groups, judging.BAD)
    assert fuzzing.counts["programs"] == PROGRAMS
    assert fuzzing.counts["lines that run on the reference"] > PROGRAMS
    assert not any(letters[letter] for letter in judging.BAD), text
