"""Several threads with one container: reads and writes of different keys do not disturb each other."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, assert_matches

# Names that the tensorclasses among the kinds declare.
NAMES = ("new0", "new1", "new2", "one", "only", "fresh", "other", "third")


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("quick_turns")
def test_each_thread_has_keys_of_its_own(writable: Any, plain: Plain, kind: Kind) -> None:
    """Each adds entries, at the root and in a nested container, writes them in place and anew, and deletes them."""
    rounds = 12 if kind.in_memory else 4
    plain["n"] = {"m": torch.ones(kind.batch_size)}
    writable.update({"n": plain["n"]})
    start = threading.Barrier(len(NAMES))

    def work(number: int) -> None:
        keys = [NAMES[number], ("n", NAMES[number])]
        start.wait()
        for key in keys * rounds:
            first, second, third = (torch.full(kind.batch_size, number + shift) for shift in (0.0, 10.0, 20.0))
            writable.set(key, first.clone())
            assert torch.equal(writable.get(key), first)
            writable.set_(key, second)
            assert torch.equal(writable[key], second)
            writable[key] = third
            assert torch.equal(writable[key], third)
            assert torch.equal(writable["a"], plain["a"]) and torch.equal(writable["n", "m"], plain["n"]["m"])
            del writable[key]
            assert writable.get(key, None) is None
        for key in keys:
            writable[key] = first

    with ThreadPoolExecutor(len(NAMES)) as pool:
        list(pool.map(work, range(len(NAMES))))
    found = {name: torch.full(kind.batch_size, float(number)) for number, name in enumerate(NAMES)}
    plain.update(found)
    plain["n"].update(found)
    assert_matches(writable, plain, kind.batch_size, kind.extra)
