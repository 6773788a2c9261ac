"""What the accounts of one call count."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def accounts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    yield importlib.import_module("accounts")  # type: ignore[misc]
    del sys.modules["accounts"]


def test_calls_are_counted(accounts: ModuleType) -> None:
    def below() -> int:
        return len("ab")

    instructions, entered, outside = accounts.count(lambda: [below() for _ in range(3)] and below())
    (name,) = [name for name in entered if name.endswith("below")]
    assert entered[name] == 4 and instructions[name] >= 12 and outside["len"] == 4


def test_a_field_is_written_in_two_calls_and_read_in_one(accounts: ModuleType) -> None:
    calls = accounts.calls()
    calls["point.x = leaf"]()
    _, entered, _ = accounts.count(calls["point.x = leaf"])
    assert sum(entered.values()) == 2
    calls["point.x"]()
    _, entered, _ = accounts.count(calls["point.x"])
    assert sum(entered.values()) == 1
