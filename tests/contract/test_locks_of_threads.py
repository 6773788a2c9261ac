"""Several threads lock and unlock: a container, parents of one container, and while others read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from contract.kinds import Kind
from contract.model import Plain, nodes
from contract.test_keys_of_threads import quick_turns  # noqa: F401
from tensordict import TensorDict

THREADS, ROUNDS = 4, 30

pytestmark = pytest.mark.usefixtures("quick_turns")


def in_threads(work: Any) -> None:
    """Call `work` in several threads that begin together."""
    start = threading.Barrier(THREADS)

    def begin(number: int) -> None:
        start.wait()
        for _ in range(ROUNDS):
            work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(begin, range(THREADS)))


def test_parents_of_one_container(writable: Any, plain: Plain, kind: Kind) -> None:
    """As long as one that is locked holds it, it is locked, and all in it."""

    def work(number: int) -> None:
        parent = TensorDict({"deep": {"child": writable}}, kind.batch_size).lock_()
        assert writable.is_locked and all(writable[path].is_locked for path in nodes(plain))
        parent.unlock_()
        assert not parent.is_locked and not parent["deep"].is_locked

    in_threads(work)
    assert not writable.is_locked and not any(writable[path].is_locked for path in nodes(plain))
    assert not writable.unlock_().is_locked


def test_one_container(writable: Any, plain: Plain, kind: Kind) -> None:
    """Threads that lock and unlock the same container get no error; at the end all nodes agree."""

    def work(number: int) -> None:
        if number % 2:
            writable.lock_()
            writable.unlock_()
        else:
            assert torch.equal(writable["a"], plain["a"])
            assert len(list(writable.keys())) == len(plain)
            assert not writable.clone().is_locked

    in_threads(work)
    writable.lock_()
    assert all(writable[path].is_locked for path in nodes(plain))
    writable.unlock_()
    assert not any(writable[path].is_locked for path in nodes(plain))


def test_a_clone_while_entries_come_and_go() -> None:
    """Each entry belongs to its key."""
    values = {"a": 1.0, ("n", "b"): 2.0, "z": 3.0}
    data = TensorDict({key: torch.full((3,), value) for key, value in values.items()}, [3])

    def work(number: int) -> None:
        if number % 2:
            for key in (f"k{number}", ("n", f"k{number}")):
                data[key] = torch.zeros(3)
                del data[key]
        else:
            found = data.clone()
            assert all((found[key] == value).all() for key, value in values.items())

    for _ in range(400):
        in_threads(work)
