"""Parameters of tests: `make test` runs a few cases and `make test-slow` the others; all rooms use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow(cases: Iterable[Any], *, keep: Iterable[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, with the mark `slow` on all but those in `keep`."""
    quick, cases = list(keep), list(cases)
    assert all(case in cases for case in quick), "a quick case is no longer one of the cases"
    return [case if case in quick else mark_case_slow(case) for case in cases]


def mark_case_slow(case: Any) -> Any:
    """Return one case with the mark `slow`; a tuple gives the values of several arguments."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
