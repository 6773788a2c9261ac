"""Accounts of one call count the calls, writes and reads below it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module("accounts")  # type: ignore[misc]
    del sys.modules["accounts"]


def test_calls_are_counted(accounts: ModuleType) -> None:
    def below() -> int:
        return len("ab")

    instructions, entered, outside = accounts.count(lambda: [below() for _ in range(3)] and below())
    (name,) = [name for name in entered if name.endswith("below")]
    assert entered[name] == 4 and instructions[name] >= 12 and outside["len"] == 4


def test_a_field_is_written_in_two_calls_and_read_in_one(accounts: ModuleType) -> None:
    calls = accounts.calls(["tensorclass"])
    _, entered, _ = accounts.count(calls["tensorclass", "write a tensor"])
    assert sum(entered.values()) == 2
    _, entered, _ = accounts.count(calls["tensorclass", "read a tensor"])
    assert sum(entered.values()) == 1


def test_the_table_has_workloads_of_each_family_in_memory(accounts: ModuleType) -> None:
    known = accounts.calls(accounts.IN_MEMORY)
    assert set(accounts.OF_EACH_FAMILY) <= set(known)
    near_their_floor = {"casting", "compile", "names", "pointwise", "reductions", "shape"}
    assert {family for family, _ in accounts.OF_EACH_FAMILY} == set(accounts.IN_MEMORY) - near_their_floor
