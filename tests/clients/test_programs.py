"""Seeded programs of client libraries give the same tensors on this package as on the reference."""

import ast
import functools
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.clients

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
ENVIRONMENTS = {"ours": ROOT / ".venv-clients", "reference": ROOT / ".venv-clients-reference"}
# The decorators of cases; what each lets a program take in all.
SECONDS = {"case": 240, "slow_case": 900}


def _names(program: str, decorator: str) -> list[str]:
    """The functions of `program` that are decorated with `decorator`."""
    body = ast.parse((PROGRAMS / f"{program}.py").read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if [ast.unparse(name) for name in node.decorator_list] == [decorator]]


def _cases() -> list[Any]:
    """Every case of every program; the decorator `slow_case` marks it `slow`."""
    found = []
    for program in sorted(path.stem for path in PROGRAMS.glob("*.py")):
        for decorator, marks in (("case", ()), ("slow_case", (pytest.mark.slow,))):
            for name in _names(program, decorator):
                found.append(pytest.param(program, name, decorator, id=f"{program}-{name}", marks=marks))
    return found


def _start(environment: Path, program: str, decorator: str, folder: str) -> subprocess.Popen[str]:
    python = environment / "bin" / "python"
    assert python.exists(), f"{environment.name} is not there: run `make test-clients`"
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "RL_WARNINGS": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    return subprocess.Popen(
        [python, PROGRAMS / f"{program}.py", f"{folder}/{environment.name}.pt", *_names(program, decorator)],
        env={**os.environ, **settings},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@functools.cache
def _outcomes(program: str, decorator: str) -> dict[str, dict[str, Any]] | str:
    """Run `program` in both environments at once; return each case's result, or why the program ended."""
    seconds = SECONDS[decorator]
    with tempfile.TemporaryDirectory() as folder:
        processes = {name: _start(python, program, decorator, folder) for name, python in ENVIRONMENTS.items()}
        try:
            printed = {name: process.communicate(timeout=seconds)[0] for name, process in processes.items()}
        except subprocess.TimeoutExpired as error:
            return f"{program}.py runs for more than {seconds} seconds: {(error.stdout or b'').decode()}"
        finally:
            for process in processes.values():
                process.kill()
        for name, process in processes.items():
            if process.returncode:
                return f"{program}.py failed on {name}:\n{printed[name]}"
        return {name: torch.load(f"{folder}/{path.name}.pt") for name, path in ENVIRONMENTS.items()}


def _difference(ours: Any, reference: Any) -> str:
    """How two recorded values differ; empty where they are equal, floating tensors up to rounding."""
    if type(ours) is not type(reference):
        return f"{ours!r} here, {reference!r} on the reference"
    if isinstance(ours, torch.Tensor):
        try:
            torch.testing.assert_close(ours, reference, equal_nan=True)
        except AssertionError as error:
            return str(error)
        return ""
    return "" if ours == reference else f"{ours!r} here, {reference!r} on the reference"


@pytest.mark.parametrize(("program", "case", "decorator"), _cases())
def test_a_program_does_what_it_does_on_the_reference(program: str, case: str, decorator: str) -> None:
    outcomes = _outcomes(program, decorator)
    assert not isinstance(outcomes, str), outcomes
    ours, reference = (outcomes[name][case] for name in ("ours", "reference"))
    assert not reference["error"], f"the program is wrong, the reference raises:\n{reference['error']}"
    assert not ours["error"], f"raises here and not on the reference:\n{ours['error']}"
    here, there = ours["values"], reference["values"]
    assert any(isinstance(value, torch.Tensor) for value in there.values()), "the case records no tensor"
    assert sorted(here) == sorted(there)
    differences = {name: _difference(here[name], there[name]) for name in there}
    differences |= {name: _difference(ours[name], reference[name]) for name in ("printed", "files")}
    if any(differences.values()):
        pytest.fail("\n".join(f"{name}: {text}" for name, text in differences.items() if text))


def test_every_program_runs_on_the_package_of_this_checkout() -> None:
    for name, package in (("ours", ROOT / "src"), ("reference", ENVIRONMENTS["reference"])):
        command = [ENVIRONMENTS[name] / "bin" / "python", "-c", "import tensordict; print(tensordict.__file__)"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROGRAMS).stdout
        assert Path(printed.strip()).is_relative_to(package)
