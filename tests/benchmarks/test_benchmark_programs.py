"""Which call of the package a sample of `benchmarks/programs.py` counts for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

_PROGRAM = ["call (programs.py:160)", "forward (torchrl/objectives/dqn.py:308)"]
_ENTRY = "Locking.lock_ (tensordict/ops/entries/locking.py:59)"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    names = ("programs", "clients", "turns")
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # the tests have a `turns`, too
    yield importlib.import_module("programs")  # type: ignore[misc]
    for name in names:
        del sys.modules[name]
    sys.modules.update(before)


def test_rank_calls_skips_library_frames_above_the_package(programs: ModuleType) -> None:
    samples = [
        [*_PROGRAM, _ENTRY, "_lock_tree (tensordict/ops/entries/locking.py:110)", "__enter__ (contextlib.py:137)"],
        [*_PROGRAM, _ENTRY],
        _PROGRAM,
        [*_PROGRAM, _ENTRY, "at::native::copy_ (libtorch_cpu.so)"],
    ]
    assert programs._rank_calls(samples) == {"Locking.lock_ (tensordict/ops/entries/locking.py)": 0.5}
    assert programs._count_shares(samples) == {"torch": 0.25, "package": 0.5, "program": 0.25}
