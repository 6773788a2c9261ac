"""map and map_iter: functions over chunks, by worker processes."""

from __future__ import annotations

import gc
import os
import pathlib
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy
import pytest
import torch
import torch.multiprocessing as mp

from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorClass, TensorDict, lazy_stack
from tensordict.core.exceptions import WorkerError

FORK: dict[str, Any] = {"num_workers": 2, "mp_start_method": "fork"}


class Sample(TensorClass):
    x: torch.Tensor
    label: str


def make(length: int = 10) -> TensorDict:
    return TensorDict(
        x=torch.arange(float(length)), inner={"y": torch.zeros(length, 2)}, label="cat", batch_size=[length]
    )


def plus_one(chunk: Any) -> Any:
    return chunk.set("z", chunk["x"] + 1)


def length(chunk: Any) -> torch.Tensor:
    return torch.tensor([len(chunk)])


def facts(chunk: Any) -> TensorDict:
    """Return the worker of a chunk, and its seeds."""
    entries = {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "torch": torch.initial_seed(),
        "random": random.getrandbits(32),
        "numpy": int(numpy.random.randint(2**31)),
    }
    time.sleep(0.02)
    return TensorDict({key: torch.tensor([value]) for key, value in entries.items()}, batch_size=[1])


def fail(chunk: Any) -> Any:
    if chunk["x"][0] == 4:
        raise ValueError("no")
    return chunk


def kill(chunk: Any) -> Any:
    if chunk["x"][0] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return chunk


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    # OpenMP's threads do not survive a fork, so each process has one.
    with mp.get_context("fork").Pool(2, torch.set_num_threads, (1,)) as found:
        yield found


@pytest.fixture(params=["own", "pool"])
def by(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arguments of the call that start processes, or a pool of processes."""
    return FORK if request.param == "own" else {"pool": request.getfixturevalue("pool")}


def children() -> set[int]:
    """The processes that this one has started and that have not been waited for."""
    found = set()
    for thread in pathlib.Path("/proc/self/task").iterdir():
        found.update(map(int, (thread / "children").read_text().split()))
    return found


def command_of(pid: int) -> str:
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text()


# --- results ----------------------------------------------------------------------------------------------------------


def test_results_are_joined_in_order(by):
    td = make()
    found = td.map(plus_one, chunksize=3, **by)
    assert type(found) is TensorDict and found.batch_size == (10,) and not found.is_locked
    assert found["z"].tolist() == [i + 1 for i in range(10)] and found["label"] == "cat"
    assert "z" not in td.keys()


@pytest.mark.parametrize("with_generator", [False, True])
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, [5, 5]),
        ({"num_chunks": 3}, [4, 4, 2]),
        ({"num_chunks": 20}, [1] * 10),
        ({"chunksize": 4}, [4, 4, 2]),
        ({"chunksize": 100}, [10]),
    ],
)
def test_how_a_container_is_cut(options, lengths, with_generator, by):
    assert make().map(length, index_with_generator=with_generator, **options, **by).tolist() == lengths


def test_an_error_of_joining_counts_results():
    def relabel(chunk):
        """Return another entry for the last of four chunks; the first three are joined as they arrive."""
        return chunk.select("x") if int(chunk["x"].flatten()[0]) < 9 else chunk.select("x").rename_key_("x", "y")

    td = TensorDict(x=torch.arange(12), batch_size=[12])
    with pytest.raises(KeyError, match=r"number 0 of 4 lacks 'y'"):
        td.map(relabel, chunksize=3, **FORK)


def test_single_elements_are_stacked(by):
    td = make(4)
    assert td.map(lambda chunk: chunk, chunksize=0, **FORK).batch_size == (4,)
    assert td.map(plus_one, chunksize=0, **by)["z"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("chunksize", [None, 0, 2])
def test_other_dims(dim, chunksize, by):
    td = TensorDict(x=torch.arange(6).view(2, 3), batch_size=[2, 3])
    assert torch.equal(td.map(plus_one, dim, chunksize=chunksize, **by)["z"], td["x"] + 1)


def test_tensors_and_nothing(by):
    td = make()
    assert td.map(tensor_of, chunksize=4, **by).tolist() == [2.0 * i for i in range(10)]
    assert td.map(nothing, **by) is None
    assert td.map(nothing_at_first, chunksize=5, **by)["x"].tolist() == [5, 6, 7, 8, 9]


def tensor_of(chunk: Any) -> torch.Tensor:
    return chunk["x"] * 2


def nothing(chunk: Any) -> None:
    """No result."""


def nothing_at_first(chunk: Any) -> Any:
    return None if chunk["x"][0] == 0 else chunk


def test_large_results_are_over_memory_of_their_own(by):
    td = TensorDict(x=torch.arange(1 << 20, dtype=torch.float32), batch_size=[1 << 20])
    before = len(os.listdir("/proc/self/fd"))
    for piece in td.map_iter(plus_one, num_chunks=4, **by):
        piece["z"].add_(1)  # Writable, and nobody else's.
        assert torch.equal(piece["z"], piece["x"] + 2)
    assert torch.equal(td.map(plus_one, **by)["z"], td["x"] + 1)
    del piece
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # The storage of x is shared now.


@pytest.mark.parametrize(
    "container",
    [
        lambda: lazy_stack([make(4), make(4)]),
        lambda: Sample(x=torch.arange(8.0), label="cat", batch_size=[8]),
        lambda: lazy_stack([TensorDict(x=torch.ones(n)) for n in (1, 2, 3)]),
    ],
)
def test_other_containers(container):
    source = container()
    found = source.map(lambda chunk: chunk, chunksize=1, **FORK)
    assert found.batch_size == source.batch_size
    assert isinstance(found, (type(source), LazyStackedTensorDict))
    flat = list(zip(source.unbind(0), found.unbind(0), strict=True))
    assert all(
        torch.equal(mine["x"] if isinstance(mine, TensorDict) else mine.x, theirs.get("x")) for mine, theirs in flat
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_ragged_entries(layout, by):
    rows = [torch.arange(float(n)).unsqueeze(-1) for n in (1, 2, 3, 4)]
    td = TensorDict(x=torch.nested.nested_tensor(rows, layout=layout), at=torch.arange(4), batch_size=[4])
    found = list(td.map_iter(row_sums, chunksize=0, **by))
    assert found == [0, 1, 3, 6]


def row_sums(chunk: Any) -> float:
    return float(chunk["x"].sum())


def test_a_container_without_elements():
    assert make(0).map(plus_one, **FORK)["z"].shape == (0,)
    assert make(0).map(nothing, **FORK) is None


def test_results_with_a_graph_are_refused():
    weight = torch.ones(10, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"chunk \d.*detach"):
        make().map(lambda chunk: weight[: len(chunk)] * 2, **FORK)


def test_leaves_without_elements(by):
    td = TensorDict(x=torch.zeros(4, 0), y=torch.arange(4), batch_size=[4])
    found = td.map(as_it_is, chunksize=1, **by)
    assert found["x"].shape == (4, 0) and found["y"].tolist() == [0, 1, 2, 3]


def test_results_without_the_dim_name_their_chunk(by):
    with pytest.raises(IndexError, match=r"chunk 0 .*the shape \[\], .*along dim 0; map_iter"):
        make().map(scalar, num_chunks=1, **by)
    td = TensorDict(x=torch.zeros(2, 3), batch_size=[2, 3])
    with pytest.raises(IndexError, match=r"chunk 0 .*the batch size \[2\], .*along dim 1"):
        td.map(sums, 1, num_chunks=1, **by)


def scalar(chunk: Any) -> torch.Tensor:
    return chunk["x"].sum()


def sums(chunk: Any) -> TensorDict:
    return TensorDict(z=chunk["x"].sum(-1), batch_size=chunk.batch_size[:1])


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_descriptors")
def test_large_results_take_no_descriptors(by):
    assert make(200).map(large, chunksize=1, **by).shape == (200, 1 << 14)


@pytest.mark.seconds
@pytest.mark.usefixtures("few_descriptors")
def test_too_many_shared_results():
    with pytest.raises(WorkerError, match=r"chunk \d+ .*did not arrive.*ulimit -n"):
        make(200).map(shared_tensor, chunksize=1, **FORK)


def large(chunk: Any) -> torch.Tensor:
    return torch.ones(1, 1 << 14, dtype=torch.float64)


def shared_tensor(chunk: Any) -> torch.Tensor:
    return torch.zeros(1).share_memory_()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "shared", "locked", "mapped", "file"])
def test_what_is_written_into_a_chunk_is_written_into_the_container(kind, by, tmp_path):
    td = make().exclude("label")
    td = {
        "plain": lambda: td,
        "shared": td.share_memory_,
        "locked": td.lock_,
        "mapped": td.memmap_,
        "file": lambda: td.memmap_(tmp_path / "saved"),
    }[kind]()
    assert td.map(write, chunksize=3, **by) is None
    assert (td["x"] == -1).all() and td["inner", "y"].sum() == 20


def write(chunk: Any) -> None:
    chunk["new"] = chunk["x"]  # Chunks are not locked.
    chunk["x"].fill_(-1)
    chunk["inner", "y"].add_(1)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((method, kind) for method in ("fork", "pool") for kind in ("plain", "shared", "mapped", "file", "view")),
        # Spawning takes seconds.
        *(("spawn", kind) for kind in ("shared", "mapped")),
    ],
)
def test_parts_of_the_container_come_back_as_parts_of_it(kind, method, pool, tmp_path):
    td = make().exclude("label")
    td = {
        "plain": lambda: td,
        "shared": td.share_memory_,
        "mapped": td.memmap_,
        "file": lambda: td.memmap_(tmp_path / "saved"),
        "view": lambda: TensorDict(whole=td.share_memory_(), batch_size=[10])["whole"][2:],
    }[kind]()
    options = {"pool": pool} if method == "pool" else {"num_workers": 1, "mp_start_method": method}
    for number, piece in enumerate(td.map_iter(as_it_is, chunksize=3, **options)):
        part = td[3 * number : 3 * number + 3]
        for key in ("x", ("inner", "y")):
            assert piece[key].data_ptr() == part[key].data_ptr() and torch.equal(piece[key], part[key])
            assert type(piece[key]) is type(part[key])
        assert piece["again"] is piece["x"]
    joined = td.map(as_it_is, num_chunks=1, **options)
    joined["x"].fill_(-1)
    assert torch.equal(td["x"], make()["x"][10 - len(td) :])  # A joined result is a copy.


def as_it_is(chunk: Any) -> Any:
    return chunk.set("again", chunk["x"])


def test_a_file_that_is_no_part_of_the_container_is_not_copied(by, tmp_path):
    other = TensorDict(x=torch.arange(10.0), batch_size=[10]).memmap_(tmp_path / "other")
    for piece in make().set("path", str(tmp_path / "other")).map_iter(of_file, chunksize=5, **by):
        assert type(piece) is MemoryMappedTensor and piece.filename == other["x"].filename
        piece.neg_()
    assert other["x"].tolist() == [-i for i in range(10)]


def of_file(chunk: Any) -> torch.Tensor:
    start = int(chunk["x"][0])
    return TensorDict.load_memmap(chunk["path"])["x"][start : start + len(chunk)]


@pytest.mark.parametrize("share", ["share_memory_", "memmap_"])
def test_memory_that_a_worker_shares_is_not_copied(share, by):
    before = len(os.listdir("/proc/self/fd"))
    found = list(make().map_iter({"share_memory_": shared_by_worker, "memmap_": mapped_by_worker}[share], **by))
    for number, (piece, view) in enumerate(found):
        assert piece.is_shared() if share == "share_memory_" else piece.is_memmap()
        assert view[0] == 5.0 * number + 1 and view.data_ptr() == piece["x"].data_ptr()
        view.fill_(7)
        assert (piece["x"] == 7).all()
    del found, piece, view
    gc.collect()
    # The storages of x and y are shared now; a pool keeps one more descriptor.
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_memory_outlives_the_worker_that_shared_it():
    found = list(make().map_iter(shared_by_worker, chunksize=5, max_tasks_per_child=1, **FORK))
    assert [piece.is_shared() and piece["x"].tolist() for piece, _ in found] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    with mp.get_context("fork").Pool(1, torch.set_num_threads, (1,), maxtasksperchild=1) as short:
        found = list(make().map_iter(shared_by_worker, chunksize=5, pool=short))
    assert [piece["x"].tolist() for piece, _ in found] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


def test_torch_shares_memory_by_file_names(by):
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        found = list(make().map_iter(shared_by_worker, chunksize=5, **by))
        (whole,) = make().map_iter(as_it_is, num_chunks=1, **FORK)
    finally:
        mp.set_sharing_strategy(before)
    assert [piece["x"].tolist() for piece, _ in found] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert whole["x"].tolist() == list(range(10))


def shared_by_worker(chunk: Any) -> Any:
    found = TensorDict(x=chunk["x"] + 1, batch_size=chunk.batch_size).share_memory_()
    return found, found["x"]


def mapped_by_worker(chunk: Any) -> Any:
    found = TensorDict(x=chunk["x"] + 1, batch_size=chunk.batch_size).memmap_()
    return found, found["x"]


@pytest.mark.parametrize("kind", ["plain", "shared", "mapped", "file"])
@pytest.mark.parametrize("chunksize", [3, 0])
def test_results_go_into_out(kind, chunksize, by, tmp_path):
    out = TensorDict(z=torch.zeros(10), other=torch.ones(10), batch_size=[10])
    if kind == "shared":
        out.share_memory_()
    elif kind != "plain":
        out.memmap_(tmp_path / "saved" if kind == "file" else None)
    address = out["z"].data_ptr()
    assert make().map(plus_one, out=out, chunksize=chunksize, **by) is out
    assert out["z"].tolist() == [i + 1 for i in range(10)] and out["z"].data_ptr() == address
    assert out["other"].tolist() == [1] * 10 and sorted(out.keys()) == ["other", "z"]
    if kind == "file":
        assert TensorDict.load_memmap(tmp_path / "saved")["z"][9] == 10


@pytest.mark.parametrize("shared", [False, True])
def test_out_has_the_batch_size_of_the_results(shared, by):
    td = TensorDict(x=torch.arange(6.0).view(3, 2), batch_size=[3, 2])
    out = TensorDict(z=torch.zeros(3), batch_size=[3])
    if shared:
        out.share_memory_()
    assert td.map(sums, out=out, chunksize=1, **by)["z"].tolist() == [1, 5, 9]


def test_values_reach_an_out_in_shared_memory():
    out = TensorDict(x=torch.zeros(4), label="none", batch_size=[4]).share_memory_()
    make(4).map(lambda chunk: chunk, out=out, chunksize=4, num_workers=1, mp_start_method="fork")
    assert out["label"] == ["cat"] * 4 and out["x"].tolist() == [0, 1, 2, 3]


def test_a_result_that_does_not_fit_out():
    out = TensorDict(z=torch.zeros(10), batch_size=[10]).share_memory_()
    with pytest.raises(ValueError, match=r"chunk \d.*\[1\].*\[5\]"):
        make().map(lambda chunk: chunk[:1], out=out, **FORK)
    with pytest.raises(TypeError, match=r"chunk \d.*containers or None, got Tensor"):
        make().map(tensor_of, out=out, **FORK)
    with pytest.raises(KeyError, match=r"'x'.*'z'"):
        make().map(lambda chunk: chunk.select("x"), out=out, **FORK)


def test_a_result_that_cannot_be_written_here_names_its_chunk(by):
    with pytest.raises(KeyError, match=r"chunk \d .*'x'.*'other'"):
        make().map(plus_one, out=TensorDict(other=torch.zeros(10), batch_size=[10]), **by)


# --- workers ----------------------------------------------------------------------------------------------------------


def test_each_worker_has_a_seed_of_its_own():
    generator = torch.Generator().manual_seed(3)
    base = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    found = make().map(facts, num_chunks=10, generator=generator.manual_seed(3), **FORK)
    assert set(found["torch"].tolist()) == {base, base + 1}
    assert len(set(found["pid"].tolist())) == 2 and os.getpid() not in found["pid"]
    assert set(found["threads"].tolist()) == {1}
    by_worker = {pid: found[found["pid"] == pid] for pid in set(found["pid"].tolist())}
    first, second = (worker[0] for worker in by_worker.values())
    assert first["random"] != second["random"] and first["numpy"] != second["numpy"]
    again = make().map(facts, num_chunks=10, generator=generator.manual_seed(3), **FORK)
    assert set(again["random"].tolist()) & set(found["random"].tolist())


def test_without_a_generator_seeds_are_drawn_from_the_default_one():
    torch.manual_seed(5)
    first = make().map(facts, **FORK)
    second = make().map(facts, **FORK)
    torch.manual_seed(5)
    assert set(make().map(facts, **FORK)["torch"].tolist()) == set(first["torch"].tolist())
    assert set(first["torch"].tolist()) != set(second["torch"].tolist())


def test_the_number_of_threads():
    assert set(make().map(facts, worker_threads=2, **FORK)["threads"].tolist()) == {2}


@pytest.mark.parametrize("limit", [1, 2])
def test_processes_are_replaced(limit):
    found = make().map(facts, chunksize=1, max_tasks_per_child=limit, **FORK)
    pids = found["pid"].tolist()
    assert len(pids) == 10 and max(pids.count(pid) for pid in pids) == limit
    assert len(set(found["torch"].tolist())) == len(set(pids))


def test_no_more_workers_than_chunks():
    assert len(set(make().map(facts, chunksize=10, num_workers=8, mp_start_method="fork")["pid"].tolist())) == 1


def test_workers_end_with_the_call():
    before = children()
    make().map(plus_one, **FORK)
    assert children() == before
    iterator = make().map_iter(plus_one, chunksize=1, **FORK)
    next(iterator)
    assert len(children() - before) == 2
    iterator.close()
    assert children() == before


def test_spawned_workers(tmp_path):
    out = TensorDict(z=torch.zeros(4, 3), batch_size=[4]).memmap_(tmp_path / "out")
    td = TensorDict(x=torch.ones(4, 3), batch_size=[4]).share_memory_()
    assert td.map(plus_one, num_workers=1, mp_start_method="spawn", out=out) is out
    assert isinstance(out["z"], MemoryMappedTensor) and out["z"].sum() == 24


def test_a_container_over_an_hdf5_file(tmp_path):
    pytest.importorskip("h5py")
    td = make().exclude("label").to_h5(tmp_path / "data.h5")
    assert td.map(tensor_of, chunksize=3, **FORK).tolist() == [2.0 * i for i in range(10)]
    out = make().exclude("label").to_h5(tmp_path / "out.h5")
    td.map(lambda chunk: chunk.to_tensordict() + 1, out=out, **FORK)
    assert out["x"].tolist() == [i + 1 for i in range(10)]
    td.close()
    out.close()


def test_threads():
    td = make()
    with ThreadPool(2) as threads:
        assert td.map(lambda chunk: plus_one(chunk), chunksize=3, pool=threads)["z"].tolist() == list(range(1, 11))
        assert not td["x"].is_shared()  # Nothing travels.
        by_position = td.map(length, 0, 2, None, 5, threads, None, None, 1, None)
        assert by_position.tolist() == td.map(length, num_chunks=5, pool=threads).tolist()
        out = TensorDict(z=torch.zeros(10), batch_size=[10]).share_memory_()
        assert td.map(plus_one, pool=threads, out=out)["z"].tolist() == list(range(1, 11))
        weight = torch.ones(10, requires_grad=True)
        td.map(lambda chunk: weight[: len(chunk)] * 2, pool=threads).sum().backward()
        with pytest.raises(ValueError, match=r"chunk 2 .*: no$") as caught:
            td.map(fail, chunksize=2, pool=threads)
        assert "in fail" in str(caught.value.__cause__)
        assert list(td.map_iter(slow_at_first, chunksize=5, ordered=False, pool=threads)) == [5, 0]


def test_a_worker_cannot_start_workers():
    with pytest.raises(WorkerError, match=r"chunk 0 .*this process is itself a worker.*ThreadPool"):
        make().map(map_again, num_chunks=1, **FORK)


def map_again(chunk: Any) -> Any:
    return chunk.map(plus_one)


LEFT_OPEN = """
import sys, torch
from tensordict import TensorDict
td = TensorDict(x=torch.arange(8), batch_size=[8])
iterator = td.map_iter(len, 0, 2, chunksize=1, mp_start_method=sys.argv[1] or None)
next(iterator)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("", id="default")])
def test_an_iterator_may_be_open_when_the_program_ends(method):
    done = subprocess.run([sys.executable, "-c", LEFT_OPEN, method], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


ORPHANED = """
import os, time, torch
from tensordict import TensorDict
def slow(chunk):
    print("started", flush=True)
    time.sleep(1)
TensorDict(x=torch.arange(2), batch_size=[2]).map(slow, 0, 1, mp_start_method="fork")
"""


def test_workers_end_when_their_caller_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.kill()
        # They come to an end with the worker, which has them too.
        assert process.communicate(timeout=30) == ("", "")


def test_an_interrupted_call_ends_its_workers(tmp_path):
    before = children()

    def work(chunk):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(30)

    def interrupt():
        # Python drops an interrupt that comes while it forks, so both workers must have started.
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        make().map(work, **FORK)
    thread.join()
    assert children() == before


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [FORK, {"pool": True}])
def test_an_exception_names_its_chunk(options, pool):
    options = {"pool": pool} if "pool" in options else options
    with pytest.raises(ValueError, match=r"^chunk 2 \(elements 4 to 5 of the dim\): no$") as caught:
        make().map(fail, chunksize=2, **options)
    assert "in fail" in str(caught.value.__cause__) and "chunk 2" in str(caught.value.__cause__)
    assert len(make().map(plus_one, **options)) == 10  # The pool is unchanged.


def test_exceptions_without_a_message_name_their_chunk(by):
    with pytest.raises(ValueError, match=r"^chunk 0 \(elements 0 to 9 of the dim\)$"):
        make().map(bare_error, num_chunks=1, **by)
    # If it were raised unchanged, it would end the generator of the results.
    with pytest.raises(RuntimeError, match=r"^chunk 0 \(.*StopIteration: enough$"):
        make().map(stop, num_chunks=1, **by)


def bare_error(chunk: Any) -> Any:
    raise ValueError


def stop(chunk: Any) -> Any:
    raise StopIteration("enough")


class Odd(Exception):
    """Cannot be made again of its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


def raise_odd(chunk: Any) -> None:
    raise Odd(1, 2)


def test_exceptions_that_cannot_be_pickled(by):
    with pytest.raises(RuntimeError, match=r"chunk 0 \(.*Odd: odd"):
        make().map(raise_odd, num_chunks=1, **by)


def test_results_that_cannot_be_pickled(by):
    with pytest.raises(Exception, match=r"chunk 0 \(.*local object"):
        list(make().map_iter(unpicklable, num_chunks=1, **by))


def unpicklable(chunk: Any) -> Any:
    return lambda: chunk


class Unreadable:
    """Can be pickled, and not made again."""

    def __reduce__(self) -> Any:
        return refuse, ("never",)

    def __call__(self, chunk: Any) -> Any:
        return Unreadable()


def refuse(why: str) -> Any:
    raise ValueError(why)


def test_what_cannot_be_unpickled_names_its_chunk(pool):
    with pytest.raises(ValueError, match=r"chunk 0 .*never"):
        list(make().map_iter(Unreadable(), num_chunks=1, **FORK))
    with pytest.raises(ValueError, match=r"chunk 0 .*never"):
        make().map(Unreadable(), num_chunks=1, pool=pool)
    with pytest.raises(ValueError, match=r"chunk 0 .*never"):
        make().map(Unreadable(), num_workers=1, mp_start_method="forkserver")


def test_what_a_pool_cannot_send_names_its_chunk(pool):
    with pytest.raises(pickle.PicklingError, match=r"chunk 0 .*<lambda>.*top of a module"):
        make().map(lambda chunk: chunk, num_chunks=1, pool=pool)


def test_a_killed_worker_ends_the_call():
    before = children()
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"signal 9 .*chunk 2 \(elements 4 to 5"):
        make().map(kill, chunksize=2, **FORK)
    with pytest.raises(WorkerError, match="signal 9"):
        list(make().map_iter(kill, chunksize=2, **FORK))
    assert time.monotonic() - started < 10 and children() == before


def test_a_worker_that_leaves_ends_the_call():
    with pytest.raises(WorkerError, match=r"exit code 3.*chunk 0"):
        make().map(leave, num_chunks=1, **FORK)


def leave(chunk: Any) -> None:
    os._exit(3)


def test_a_killed_worker_of_a_pool_ends_the_call():
    message = r"signal 9 .*not done are .*chunk 2 \(elements 4 to 5"
    with mp.get_context("fork").Pool(2) as doomed, pytest.raises(WorkerError, match=message):
        make().map(kill, chunksize=2, pool=doomed)


def test_bad_arguments():
    td = make()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "chunksize and num_chunks", {"chunksize": 2, "num_chunks": 2}),
        (ValueError, "num_chunks is at least 1, got 0", {"num_chunks": 0}),
        (ValueError, "chunksize is at least 0, got -1", {"chunksize": -1}),
        (ValueError, "num_workers is at least 1, got 0", {"num_workers": 0}),
        (ValueError, "max_tasks_per_child is at least 1", {"max_tasks_per_child": 0}),
        (TypeError, "chunksize is an int, got 2.5 of type float", {"chunksize": 2.5}),
        (IndexError, "dim 1 is out of range", {"dim": 1}),
        (ValueError, "'bad'", {"mp_start_method": "bad"}),
        (TypeError, "pool is a multiprocessing.Pool, got int", {"pool": 3}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            td.map(plus_one, **options)
    with pytest.raises(TypeError, match="function of a container, got int"):
        td.map(3)  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="no batch dims"):
        TensorDict(x=torch.zeros(3)).map(plus_one)
    with pytest.raises(ValueError, match=r"out has the batch size \[5\].*\[10\]"):
        td.map(plus_one, out=make(5))
    with pytest.raises(TypeError, match="out is a container, got Tensor"):
        td.map(plus_one, out=torch.zeros(10))
    with pytest.raises(TypeError, match=r"chunk 0 .*returned a str; map joins"):
        td.map(lambda chunk: "text", num_chunks=1, **FORK)
    with pytest.raises(ValueError, match="chunksize and num_chunks"):
        td.map_iter(plus_one, chunksize=2, num_chunks=2)


def test_a_spawned_worker_cannot_have_a_local_function():
    before = children()
    with pytest.raises(pickle.PicklingError, match=r"<lambda>.*top of a module.*mp_start_method='fork'"):
        make().map(lambda chunk: chunk, num_workers=1, mp_start_method="spawn")
    # A process has the command of this one until it runs its own.
    end = time.monotonic() + 20
    while not all("resource_tracker" in command_of(pid) for pid in children() - before):
        assert time.monotonic() < end
        time.sleep(0.01)


# --- map_iter ---------------------------------------------------------------------------------------------------------


def test_results_one_by_one(by):
    found = make().map_iter(tensor_of, chunksize=4, **by)
    assert [piece.tolist() for piece in found] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert list(make().map_iter(nothing, chunksize=5, **by)) == [None, None]
    assert [piece.shape for piece in make(3).map_iter(tensor_of, chunksize=0, **by)] == [()] * 3


def slow_at_first(chunk: Any) -> int:
    first = int(chunk["x"][0])
    time.sleep(1.5 if first == 0 else 0)  # longer than the other worker takes to start on a busy machine
    return first


def test_in_order_or_as_they_come(by):
    assert list(make(4).map_iter(slow_at_first, chunksize=1, **by)) == [0, 1, 2, 3]
    found = list(make(4).map_iter(slow_at_first, chunksize=1, ordered=False, **by))
    assert sorted(found) == [0, 1, 2, 3] and found[0] != 0 and found[-1] == 0


def test_shuffled_chunks(by):
    td = make(40)
    options: dict[str, Any] = {"chunksize": 8, "shuffle": True, **by}
    first = torch.cat(list(td.map_iter(tensor_of, generator=torch.Generator().manual_seed(1), **options)))
    again = torch.cat(list(td.map_iter(tensor_of, generator=torch.Generator().manual_seed(1), **options)))
    other = torch.cat(list(td.map_iter(tensor_of, generator=torch.Generator().manual_seed(2), **options)))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.tolist() != sorted(first.tolist()) == [2.0 * i for i in range(40)]
    with pytest.raises(RuntimeError, match="index_with_generator"):
        td.map_iter(tensor_of, index_with_generator=False, **options)


def test_workers_are_not_far_ahead_of_the_caller():
    started = torch.zeros(40).share_memory_()

    def note(chunk: Any) -> int:
        started[int(chunk["x"][0])] = 1
        return int(chunk["x"][0])

    iterator = make(40).map_iter(note, chunksize=1, **FORK)
    assert next(iterator) == 0
    time.sleep(0.1)
    assert started.sum() <= 5
    assert list(iterator) == list(range(1, 40))


@pytest.mark.parametrize("option", ["pbar", "progress"])
def test_a_progress_bar(option, capsys):
    pytest.importorskip("tqdm")
    make().map(plus_one, chunksize=2, **{option: True}, **FORK)
    assert "5/5" in capsys.readouterr().err


def test_nothing_warns():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().map(plus_one, **FORK)
        gc.collect()


def test_map_keeps_no_result_that_is_joined_already():
    results: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def note(chunk: Any) -> Any:
        result = TensorDict(x=chunk["x"] * 2, inner={"y": chunk["inner", "y"] + 1}, batch_size=chunk.batch_size)
        results.append(weakref.ref(result["x"]))
        alive.append(sum(one() is not None for one in results))
        return result

    data = make(40)
    with ThreadPool(1) as pool:
        found = data.map(note, chunksize=1, pool=pool)
    assert max(alive) < 8
    assert found["x"].equal(data["x"] * 2) and found["inner", "y"].equal(data["inner", "y"] + 1)


def _other_dtype(chunk: Any) -> Any:
    return chunk.select("x").to(torch.float64)


def _other_length(chunk: Any) -> Any:
    return torch.cat([chunk.select("x")] * 2)


def _members(chunk: Any) -> Any:
    return lazy_stack(list(chunk.select("x").unbind(0)))


@pytest.mark.parametrize("other", [_other_dtype, _other_length, _members])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_map_joins_results_of_several_forms_like_cat(other, at):
    data = make(10)

    def one_differs(chunk: Any) -> Any:
        return other(chunk) if float(chunk["x"][0]) == 2 * at else chunk.select("x")

    with ThreadPool(2) as pool:
        found = data.map(one_differs, chunksize=2, pool=pool)
    expected = torch.cat([one_differs(data[start : start + 2]) for start in range(0, 10, 2)])
    assert found.batch_size == expected.batch_size and type(found) is type(expected)
    assert found["x"].dtype == expected["x"].dtype and found["x"].equal(expected["x"])
