"""map and map_iter with timeout=: a chunk that takes too long ends the call, and its worker."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import signal
import time
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
import torch

from cases import mark_slow
from tensordict import TensorDict
from tensordict.core.exceptions import OptionError, WorkerError, WorkerTimeoutError
from tensordict.parallel import workers

# Seconds; tests end long before.
LONG = 600
METHODS = ["fork", "forkserver", "spawn"]


def make() -> TensorDict:
    return TensorDict(x=torch.arange(10.0), big=torch.zeros(10, 1 << 15), batch_size=[10])


def is_stuck(chunk: Any) -> bool:
    return bool(chunk["x"].reshape(-1)[0] == 4)


def sleep(chunk: Any) -> Any:
    if is_stuck(chunk):
        time.sleep(LONG)
    return chunk.clone()


def sleep_everywhere(chunk: Any) -> None:
    time.sleep(LONG)


def ignore_signals(chunk: Any) -> Any:
    """Be in C code, which holds the lock of the interpreter, in a process that ignores SIGTERM."""
    if is_stuck(chunk):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(LONG)
    return chunk.clone()


def stop(chunk: Any) -> Any:
    if is_stuck(chunk):
        os.kill(os.getpid(), signal.SIGSTOP)
    return chunk.clone()


def first(chunk: Any) -> int:
    return int(chunk["x"][0])


class SlowToArrive:
    """A function that takes 4 seconds to be made in a worker."""

    def __reduce__(self) -> Any:
        return arrive, ()

    def __call__(self, chunk: Any) -> int:
        return first(chunk)


def arrive() -> SlowToArrive:
    time.sleep(4)
    return SlowToArrive()


def names_of(pids: list[int]) -> set[str]:
    """The names in /dev/shm that torch made in these processes."""
    return {name for name in os.listdir("/dev/shm") for pid in pids if name.startswith(f"torch_{pid}_")}


@pytest.fixture(scope="module")
def fork_server() -> None:
    """Start the server of "forkserver", whose file descriptors stay open in this process."""
    list(make()[:2].map_iter(first, num_workers=1, mp_start_method="forkserver"))


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, fork_server: None) -> Iterator[list[int]]:
    """The worker processes that a test has started.

    None of them is left after it, nor a name in /dev/shm, nor a file descriptor; and the next call works.
    """
    found: list[int] = []
    hire = workers.WorkerPool._start_worker

    def hired(self: Any) -> Any:
        worker = hire(self)
        found.append(worker.process.pid)
        return worker

    gc.collect()
    names, descriptors = names_of([os.getpid()]), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(workers.WorkerPool, "_start_worker", hired)
        yield found
    gc.collect()
    assert not [pid for pid in found if pathlib.Path(f"/proc/{pid}").exists()]
    assert names_of([os.getpid(), *found]) == names
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert list(make().map_iter(first, num_workers=2, chunksize=5, mp_start_method="fork", timeout=LONG)) == [0, 5]


@pytest.mark.parametrize("method", mark_slow(METHODS, keep=["fork", "forkserver"]))
def test_a_chunk_that_takes_too_long_ends_the_call_and_is_named(method: str, started: list[int]) -> None:
    td = make()
    message = r"chunk 2 \(elements 4 to 5 of the dim\) took longer than timeout=2 seconds.*is ended"
    with pytest.raises(TimeoutError, match=message) as caught:
        td.map(sleep, num_workers=2, chunksize=2, mp_start_method=method, timeout=2)
    assert type(caught.value) is WorkerTimeoutError and isinstance(caught.value, WorkerError)
    assert td["x"].tolist() == list(range(10)) and len(started) == 2


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_an_iterator_gives_what_came_before(ordered: bool) -> None:
    found = make().map_iter(
        sleep, num_workers=2, chunksize=2, mp_start_method="fork", timeout=2, ordered=ordered, max_tasks_per_child=1
    )
    assert next(found)["x"].numel() == 2
    with pytest.raises(WorkerTimeoutError, match=r"chunk 2 \(elements 4 to 5"):
        list(found)
    assert not list(found)


def test_a_single_element_is_named() -> None:
    with pytest.raises(WorkerTimeoutError, match=r"chunk 4 \(element 4 of the dim\)"):
        make().map(sleep, num_workers=2, chunksize=0, mp_start_method="fork", timeout=2)


def test_all_workers_may_be_stuck() -> None:
    with pytest.raises(WorkerTimeoutError, match=r"chunk \d "):
        make().map(sleep_everywhere, num_workers=4, mp_start_method="fork", timeout=0.5)


@pytest.mark.parametrize("fn", [ignore_signals, stop], ids=["SIGTERM is ignored", "stopped"])
def test_a_worker_that_does_not_end_by_itself_is_killed(fn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_END_SECONDS", 0.5)
    with pytest.raises(WorkerTimeoutError, match=r"chunk 2 \(elements 4 to 5"):
        make().map(fn, num_workers=2, chunksize=2, mp_start_method="fork", timeout=2)


def test_what_was_written_to_out_stays() -> None:
    out = TensorDict(x=torch.full((10,), -1.0), batch_size=[10]).share_memory_()
    with pytest.raises(WorkerTimeoutError, match=r"chunk 2 "):
        make().map(sleep, num_workers=1, chunksize=2, mp_start_method="fork", timeout=2, out=out)
    assert out["x"].tolist() == [0, 1, 2, 3] + [-1] * 6


# --- what does not count ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", mark_slow(METHODS[1:], keep=["forkserver"]))
def test_the_start_of_a_worker_does_not_count(method: str) -> None:
    found = make().map_iter(SlowToArrive(), num_workers=1, chunksize=5, mp_start_method=method, timeout=2)
    assert list(found) == [0, 5]


@pytest.mark.parametrize("fn", [first, sleep], ids=["small results", "large results"])
def test_the_time_for_which_a_result_waits_does_not_count(fn: Any) -> None:
    td = make()[4:] if fn is first else make()[5:]
    found = td.map_iter(fn, num_workers=2, chunksize=1, mp_start_method="fork", timeout=2)
    results = [next(found)]
    for _ in range(2):
        time.sleep(2.5)
        results.append(next(found))
    results += found
    assert [result if fn is first else int(result["x"]) for result in results] == td["x"].tolist()


def test_a_worker_that_got_stuck_while_nobody_asked_is_noticed() -> None:
    found = make().map_iter(sleep, num_workers=1, chunksize=4, mp_start_method="fork", timeout=1)
    next(found)
    time.sleep(1.5)
    with pytest.raises(WorkerTimeoutError, match=r"chunk 1 \(elements 4 to 7"):
        next(found)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [LONG, 0.5e3, float("inf"), None])
def test_a_long_time_changes_nothing(timeout: Any) -> None:
    assert make().map(sleep, num_workers=2, chunksize=3, mp_start_method="fork", timeout=timeout)["x"].sum() == 45


def test_a_pool_takes_no_time() -> None:
    with ThreadPool(1) as pool, pytest.raises(OptionError, match="timeout=.*num_workers= instead of pool="):
        make().map(first, pool=pool, timeout=1)
    with ThreadPool(1) as pool, pytest.raises(OptionError, match="pool"):
        make().map_iter(first, pool=pool, timeout=1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1", True, torch.tensor(1.0)], ids=str)
def test_what_is_no_time(timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout is a number of seconds"):
        make().map_iter(first, timeout=timeout)
