"""The table of `compile_table/`: each row gives in compiled code what it gives in eager code, in one graph."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch

from compile_table.coverage import LEFT_OUT
from compile_table.expected import GRAPHS, TORCH, Expected, read_expected
from compile_table.families import FORMS, ROWS
from compile_table.forms import Form
from compile_table.running import Outcome, run_row
from tensordict import TensorDictBase

EXPECTED = read_expected()
OF_THIS_TORCH = torch.__version__.startswith(TORCH)

pytestmark = pytest.mark.seconds


@pytest.mark.parametrize(
    "name", [name if row.quick else pytest.param(name, marks=pytest.mark.slow) for name, row in ROWS.items()]
)
def test_row(name: str) -> None:
    outcome = run_row(ROWS[name])
    if not OF_THIS_TORCH and name in EXPECTED.refused and not outcome.wrong:
        pytest.skip(f"torch {TORCH} refuses the row; this is {torch.__version__}")
    assert EXPECTED.find_fault(name, outcome) is None


def test_the_file_names_rows_that_exist() -> None:
    assert not (EXPECTED.refused.keys() | EXPECTED.graphs.keys() | EXPECTED.wrong.keys()) - ROWS.keys()
    assert not EXPECTED.refused.keys() & EXPECTED.graphs.keys()


def test_every_public_method_has_a_row() -> None:
    public = {name for name in dir(TensorDictBase) if not name.startswith("_")}
    called = {form.method for form in FORMS}
    left_out = {name for names in LEFT_OUT.values() for name in names}
    assert public - called - left_out == set()
    assert left_out & called == set(), "these have rows"
    assert left_out - public == set(), "these are no methods"


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names that code looks up, in functions inside of it, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def names_of(form: Form) -> set[str]:
    """The names that a form looks up, in the functions that its call is made of, too."""
    code = form.call.__code__
    found = {*names_in(code), *(value for value in code.co_consts if isinstance(value, str))}
    for cell in form.call.__closure__ or ():
        value = cell.cell_contents
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, types.FunctionType):
            found.update(names_in(value.__code__))
    for name in [*found]:
        value = form.call.__globals__.get(name)
        if isinstance(value, types.FunctionType) and value.__module__ == form.call.__module__:
            found.update(names_in(value.__code__))
    return found


def test_forms_call_the_methods_that_they_are_named_after() -> None:
    methods = [form for form in FORMS if hasattr(TensorDictBase, form.method) and not form.method.startswith("__")]
    assert [form.name for form in methods if form.method not in names_of(form)] == []


def test_a_row_that_changes_fails() -> None:
    expected = Expected({"refused": "words"}, {"many": 3}, {"wrong": "numbers"})
    assert expected.find_fault("refused", Outcome(refused="words")) is None
    assert "compiles" in expected.find_fault("refused", Outcome(graphs=1))
    assert "in place of 'words'" in expected.find_fault("refused", Outcome(refused="others"))
    assert "refuses the row" in expected.find_fault("compiled", Outcome(refused="words"))
    assert expected.find_fault("compiled", Outcome(graphs=GRAPHS)) is None
    assert expected.find_fault("compiled", Outcome(graphs=GRAPHS + 1))
    assert expected.find_fault("many", Outcome(graphs=3)) is None
    assert expected.find_fault("many", Outcome(graphs=2)) and expected.find_fault("many", Outcome(graphs=4))
    assert expected.find_fault("compiled", Outcome(wrong="other numbers")) == "other numbers"
    assert expected.find_fault("wrong", Outcome(wrong="other numbers")) == "other numbers"
    assert expected.find_fault("wrong", Outcome(wrong="numbers")) is None
    assert "agree" in expected.find_fault("wrong", Outcome(graphs=1))
