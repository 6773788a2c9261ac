"""Data sets that threads share: rows that are read while others refresh and compact, and processes forked then."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import signal
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from dataset_rows import assert_rows, rows
from tensordict import DatasetWriter, LazyConcatenatedTensorDict, TensorDict, lazy_cat, open_dataset
from tensordict.core.exceptions import ShapeError
from tensordict.datasets import DatasetLoader, compact
from tensordict.datasets import writer as writer_module
from tensordict.datasets.index import Manifests
from tensordict.datasets.location import Location
from tensordict.datasets.manifest import Manifest
from tensordict.io.remote.urls import Remote
from turns import at_once


def numbers(first: int, count: int) -> TensorDict:
    x = torch.arange(first, first + count)
    return TensorDict(x=x, y={"z": x.float()[:, None].expand(-1, 7)}, batch_size=[count])


def assert_numbers(td: Any, at: torch.Tensor) -> None:
    assert torch.equal(td["x"], at) and torch.equal(td["y", "z"], at.float()[:, None].expand(-1, 7))


@pytest.mark.parametrize("format", ["folder", "archive"])
def test_rows_are_read_while_others_refresh_and_compact(tmp_path: pathlib.Path, format: str) -> None:
    writer = DatasetWriter(tmp_path, rows_per_shard=5, format=format)
    written = itertools.count(0, 12)

    def write() -> None:
        writer.extend(numbers(next(written), 12))
        writer.flush()

    write()
    data = open_dataset(tmp_path)

    def gather() -> None:
        at = torch.randint(len(data), (16,))
        assert_numbers(data[at], at)

    def last() -> None:
        count = len(data)
        assert_numbers(data[torch.arange(count - 9, count)], torch.arange(count - 9, count))

    def view() -> None:
        rows = data[:]
        assert_numbers(rows.to_tensordict(), torch.arange(len(rows)))

    def again() -> None:
        rows = open_dataset(tmp_path)
        assert_numbers(rows.to_tensordict(), torch.arange(len(rows)))

    def drop() -> None:
        data._shards._recent.clear()
        gc.collect()

    at_once(
        1.5,
        gather,
        last,
        view,
        again,
        drop,
        data.refresh,
        data.refresh,
        write,
        lambda: compact(tmp_path, rows_per_shard=30),
    )
    writer.close()
    data.refresh()
    assert_numbers(data.to_tensordict(), torch.arange(next(written)))


def test_rows_that_are_added_right_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts include all rows, also rows that arrive while they are counted."""
    import numpy as np

    td = lazy_cat([TensorDict(x=torch.arange(2), batch_size=2)])
    real = np.asarray

    def then_more(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        monkeypatch.setattr(np, "asarray", real)
        td.extend([TensorDict(x=torch.arange(at, at + 2), batch_size=2) for at in (2, 4, 6)])
        return found

    monkeypatch.setattr(np, "asarray", then_more)
    assert td[[1, 0]]["x"].tolist() == [1, 0]
    monkeypatch.setattr(np, "asarray", real)
    if len(td) == 2:
        td.extend([TensorDict(x=torch.arange(at, at + 2), batch_size=2) for at in (2, 4, 6)])
    assert td[[7, 5, 3, 1]]["x"].tolist() == [7, 5, 3, 1]


def test_several_add_parts() -> None:
    td = lazy_cat([numbers(0, 3)])
    at_once(0.3, *[lambda: td.extend([numbers(0, 3), numbers(0, 3)])] * 4)
    count = len(td) // 3
    assert count > 8 and td["x"].tolist() == [0, 1, 2] * count
    assert td[list(range(len(td)))]["x"].tolist() == [0, 1, 2] * count


def test_a_refresh_that_is_refused_changes_nothing(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.extend(numbers(0, 2))
        writer.flush()
        data = open_dataset(tmp_path)
        data["more"] = torch.zeros(2)
        before = data.segments
        writer.extend(numbers(2, 2))
    with pytest.raises(ShapeError, match="parts cannot be added after entries"):
        data.refresh()
    assert data.segments == before and len(data) == 2
    del data["more"]
    assert len(data.at(data.segments)) == 2


def test_two_threads_refresh_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.extend(numbers(0, 2))
        writer.flush()
        data = open_dataset(tmp_path)
        writer.extend(numbers(2, 2))
    real = Manifests.read

    def slow(index: Manifests, **how: bool) -> None:
        real(index, **how)
        time.sleep(0.1)

    monkeypatch.setattr(Manifests, "read", slow)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: data.refresh(), range(2))) == [0, 2]
    assert_numbers(data.to_tensordict(), torch.arange(4))


def test_a_loader_counts_the_rows_that_it_notes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DatasetWriter(tmp_path) as writer:
        writer.extend(numbers(0, 2))
        writer.flush()
        data = open_dataset(tmp_path)
        writer.extend(numbers(2, 2))
    real, begun = LazyConcatenatedTensorDict.extend, threading.Event()

    def slow(td: Any, *args: Any) -> None:
        begun.set()
        time.sleep(0.1)
        real(td, *args)

    monkeypatch.setattr(LazyConcatenatedTensorDict, "extend", slow)
    thread = threading.Thread(target=data.refresh)
    thread.start()
    assert begun.wait(60)
    state = DatasetLoader(data, 1).state_dict()
    thread.join()
    assert len(data.at(state["segments"])) == state["rows"]


def test_manifests_are_counted_while_others_are_found(tmp_path: pathlib.Path) -> None:
    for number in range(3):
        with DatasetWriter(tmp_path) as writer:
            writer.extend(numbers(number, 1))

    class Growing(dict[str, Manifest]):
        """Grows by one item while it is iterated."""

        def items(self) -> Any:
            for item in super().items():
                self["new"] = Manifest("new")
                yield item

        def values(self) -> Any:
            return (manifest for _, manifest in self.items())

    index = Manifests(Location.of(tmp_path))
    index.read()
    known = index.manifests
    index.manifests = Growing(known)
    assert index.count_lines() == dict.fromkeys(known, 1) and not index.problems


@pytest.mark.parametrize("format", ["folder", "archive", "zarr"])
def test_a_shard_that_is_moved_twice_while_it_is_opened(
    tmp_path: pathlib.Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, 4, 8):
        with DatasetWriter(tmp_path, format=format, rows_per_shard=2) as writer:
            writer.extend(rows(first, 4))
    data, sizes = open_dataset(tmp_path), [4, 100]
    real = Location.open

    def opened(place: Any, name: str, mode: str, *nbytes: int) -> Any:
        if sizes and threading.current_thread() is threading.main_thread():
            size = sizes.pop(0)
            # In another thread, which opens shards in the usual way.
            thread = threading.Thread(target=compact, args=(tmp_path,), kwargs={"rows_per_shard": size})
            thread.start()
            thread.join()
        return real(place, name, mode, *nbytes)

    monkeypatch.setattr(Location, "open", opened)
    assert_rows(data[torch.arange(12)], list(range(12)))
    assert not sizes


# --- processes that are forked ----------------------------------------------------------------------------------------


def forked(job: Callable[[], object]) -> int:
    """How a forked process ends that does a job: 0 when it is done within 20 seconds."""
    if not (child := os.fork()):
        try:
            signal.alarm(20)
            # As the workers of torch's loaders do: the threads of OpenMP do not survive a fork.
            torch.set_num_threads(1)
            job()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def while_held(lock: Any, job: Callable[[], int]) -> int:
    """Return the result of a job that runs while another thread holds a lock."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held:
            held.set()
            assert done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        return job()
    finally:
        done.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "lock",
    [
        lambda data: data._shards._lock,
        lambda data: data._manifests._lock,
        lambda data: data._joint.growing,
    ],
)
def test_a_process_is_forked_while_a_thread_reads(tmp_path: pathlib.Path, lock: Callable[[Any], Any]) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=2) as writer:
        writer.extend(numbers(0, 6))
    data = open_dataset(tmp_path)

    def use() -> None:
        assert_numbers(data[torch.tensor([5, 0, 3])], torch.tensor([5, 0, 3]))
        assert data.refresh() == 0

    assert while_held(lock(data), lambda: forked(use)) == 0


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_process_is_forked_while_a_thread_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}/data"
    # Rows that are far from each other.
    x = torch.arange(50)[:, None].expand(-1, 20_000)
    with DatasetWriter(url) as writer:
        writer.extend(TensorDict(x=x, batch_size=[50]))
    data = open_dataset(url)
    assert data[[1]]["x"].unique().tolist() == [1]
    real, parent = Remote.read, os.getpid()
    begun, go = threading.Event(), threading.Event()

    def slow(remote: Remote, *args: Any) -> bytes:
        if os.getpid() == parent:
            begun.set()
            assert go.wait(60)
        return real(remote, *args)

    def read() -> None:
        assert torch.equal(data[[40, 7]]["x"], x[[40, 7]])

    monkeypatch.setattr(Remote, "read", slow)
    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert begun.wait(60) and forked(read) == 0
    finally:
        go.set()
        thread.join()
    read()


def test_a_writer_is_refused_in_a_process_that_was_forked_while_it_wrote(tmp_path: pathlib.Path) -> None:
    writer = DatasetWriter(tmp_path)
    writer.extend(numbers(0, 1))

    def write() -> None:
        with pytest.raises(ValueError, match="make another one in this process"):
            writer.extend(numbers(1, 1))

    assert while_held(writer._lock, lambda: forked(write)) == 0
    writer.close()


def test_a_schema_that_another_writer_makes_meanwhile_is_not_missing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = writer_module.read_schema_file

    def read_before_it_is_made(place: Any) -> Any:
        monkeypatch.setattr(writer_module, "read_schema_file", read)
        with DatasetWriter(tmp_path) as other:
            other.extend(numbers(0, 3))
        raise FileNotFoundError

    monkeypatch.setattr(writer_module, "read_schema_file", read_before_it_is_made)
    with DatasetWriter(tmp_path) as writer:
        writer.extend(numbers(3, 2))
    assert len(open_dataset(tmp_path)) == 5
