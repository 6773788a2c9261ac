"""Parameters of tests in all rooms: names of methods, and cases that `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# Methods of numbers without operand; each exists with `_` behind its name, too.
OF_ONE = [
    "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
    "log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "sigmoid", "sign", "sin", "sinh", "sqrt", "tan",
    "tanh", "trunc",
]  # fmt: skip
# Methods that test each number.
TESTS = ["isfinite", "isnan", "isneginf", "isposinf", "isreal"]


def mark_slow(cases: Iterable[Any], *, keep: Iterable[Any]) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, with the mark `slow` on all but those in `keep`."""
    quick, cases = list(keep), list(cases)
    assert all(case in cases for case in quick), "a quick case is no longer one of the cases"
    return [case if case in quick else mark_case_slow(case) for case in cases]


def mark_case_slow(case: Any) -> Any:
    """Return one case with the mark `slow`; a tuple gives the values of several arguments."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
