"""Peers that die, are late, have no memory or send nonsense; and threads and tasks that send and receive at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanged import kinds, plain, ragged
from ranks import Ranks, die

from cases import mark_slow
from tensordict import TensorDict
from tensordict.core.exceptions import TransferError
from tensordict.parallel import channels, wire

pytestmark = pytest.mark.seconds


# --- peers that die or are late ---------------------------------------------------------------------------------------


def _no_room(rank: int) -> None:
    """A receiver without memory for what is sent."""
    if rank == 0:
        td = TensorDict(a=torch.ones(3))
        with pytest.raises(TransferError, match="rank 1 did not take"):
            td.init_remote(1)
        return
    fresh, wire.new_bytes = wire.new_bytes, lambda nbytes, device: fresh(1 << 60, device)
    try:
        with pytest.raises(TransferError, match="receiving from rank 0"):
            TensorDict.from_remote_init(0)
    finally:
        wire.new_bytes = fresh


def test_receiver_without_memory(tmp_path: Any) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        ranks.run(_no_room)
    finally:
        ranks.close()


def _td() -> TensorDict:
    """Too large to be on its way before somebody receives it."""
    return TensorDict({"x": torch.zeros(5_000_000), "small": torch.zeros(3)})


def _awaited(coroutine: Any) -> Any:
    async def main() -> Any:
        return await coroutine

    return asyncio.run(main())


# Calls of rank 0 while rank 1 stays away.
BETWEEN_TWO: dict[str, Callable[[], Any]] = {
    "send": lambda: _td().send(1),
    "recv": lambda: _td().recv(1),
    "isend": lambda: _td().isend(1, return_early=True)[0].wait(),
    "irecv": lambda: _td().irecv(1, return_premature=True)[0].wait(),
    "asend": lambda: _awaited(_td().asend(1)),
    "arecv": lambda: _awaited(_td().arecv(1)),
    "init_remote": lambda: _td().init_remote(1),
    "from_remote_init": lambda: TensorDict.from_remote_init(1),
}


def _over_all(verb: str, rank: int, count: int) -> Any:
    """Calls of all ranks but rank 1."""
    rows = torch.stack([_td()] * (count - 1)) if rank == 0 else _td()
    parts = [_td()] * count if rank == 0 else None
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: _td().broadcast(0),
        "broadcast from it": lambda: _td().broadcast(1),
        "init_remote": lambda: _td().init_remote(use_broadcast=True) if rank == 0 else _from_remote_init(),
        "all_gather": lambda: _td().all_gather(),
        "all_reduce": lambda: _td().all_reduce(),
        "async all_reduce": lambda: [work.wait() for work in _td().all_reduce(async_op=True)],
        "reduce": lambda: _td().reduce(0),
        "reduce to it": lambda: _td().reduce(1),
        "gather_and_stack": lambda: rows.gather_and_stack(0),
        "gather_and_stack to it": lambda: _td().gather_and_stack(1),
        "scatter": lambda: _td().scatter(0, parts),
        "scatter from it": lambda: _td().scatter(1),
    }
    return calls[verb]()


def _from_remote_init() -> Any:
    return TensorDict.from_remote_init(0, use_broadcast=True)


OVER_ALL = [
    "broadcast",
    "broadcast from it",
    "init_remote",
    "all_gather",
    "all_reduce",
    "async all_reduce",
    "reduce",
    "reduce to it",
    "gather_and_stack",
    "gather_and_stack to it",
    "scatter",
    "scatter from it",
]
# A transfer from or to one rank concerns only rank 1 and that rank.
BY_PAIRS = ("gather_and_stack", "scatter")


def _alone(rank: int, verb: str, killed: bool) -> float:
    """The seconds after which this rank has an error; rank 1 dies, or sleeps until the others have given up."""
    count = dist.get_world_size()
    if rank == 1:
        time.sleep(0.3 if killed else 2.5)
        if killed:
            die()
        return 0
    start = time.monotonic()
    if verb in BETWEEN_TWO:
        if rank == 0:
            with pytest.raises(TransferError, match="(to|from|answering) rank 1"):
                BETWEEN_TWO[verb]()
    elif verb in BY_PAIRS and rank > 0:
        _over_all(verb, rank, count)
    else:
        said = "broadcast|reduce|gather|rank 1" if killed else "(?i)time|closed"
        with pytest.raises(TransferError, match=said):
            _over_all(verb, rank, count)
    return time.monotonic() - start


@pytest.mark.parametrize("verb", [*BETWEEN_TWO, *OVER_ALL])
def test_killed_peer(tmp_path: Any, verb: str) -> None:
    ranks = Ranks(2, tmp_path, timeout=30)
    try:
        assert ranks.run(_alone, verb, True, dies=1)[0] < 15
    finally:
        ranks.close()


@pytest.mark.parametrize("verb", mark_slow(OVER_ALL, keep=["all_reduce", "broadcast from it"]))
def test_one_of_four_is_killed(tmp_path: Any, verb: str) -> None:
    ranks = Ranks(4, tmp_path, timeout=3)
    try:
        times = ranks.run(_alone, verb, True, dies=1)
        # Those who wait for survivors hear of it when these have given up.
        assert max(times[0], *times[2:]) < 8
    finally:
        ranks.close()


QUICK_VERBS = ["recv", "isend", "all_reduce", "broadcast from it", "gather_and_stack"]


@pytest.mark.parametrize("verb", mark_slow([*BETWEEN_TWO, *OVER_ALL], keep=QUICK_VERBS))
def test_peer_that_does_not_come(tmp_path: Any, verb: str) -> None:
    ranks = Ranks(2, tmp_path, timeout=1)
    try:
        assert 0.8 < ranks.run(_alone, verb, False)[0] < 2.4
    finally:
        ranks.close()


@pytest.mark.parametrize("verb", mark_slow(OVER_ALL, keep=QUICK_VERBS[2:]))
def test_one_of_four_does_not_come(tmp_path: Any, verb: str) -> None:
    ranks = Ranks(4, tmp_path, timeout=1)
    try:
        times = ranks.run(_alone, verb, False)
        assert times[0] > 0.8 and max(times) < 5
    finally:
        ranks.close()


def _killed_on_the_way(rank: int, receives: bool) -> None:
    """Rank 1 dies after the description, and before all of the tensors."""
    if rank == 1:
        if receives:
            wire.read_prologue = lambda first: die()
            _td().recv(0)
        else:
            channels.Channel.send = _dying(channels.Channel.send)
            _td().send(0)
    with pytest.raises(TransferError, match="(to|from) rank 1"):
        _td().send(1) if receives else _td().recv(1)


def _dying(send: Callable[..., Any]) -> Callable[..., Any]:
    sent = []

    def instead(channel: Any, message: torch.Tensor) -> Any:
        sent.append(send(channel, message))
        if len(sent) == 2:
            sent[0].wait()
            die()
        return sent[-1]

    return instead


@pytest.mark.parametrize("receives", [False, True])
def test_killed_on_the_way(tmp_path: Any, receives: bool) -> None:
    ranks = Ranks(2, tmp_path, timeout=30)
    try:
        ranks.run(_killed_on_the_way, receives, dies=1)
    finally:
        ranks.close()


# --- threads and tasks ------------------------------------------------------------------------------------------------


def _numbered(number: int) -> TensorDict:
    """A long description, small tensors and large ones, all of one number."""
    content = {f"x{i}": torch.full((2,), float(number)) for i in range(100)}
    return TensorDict({**content, "large": torch.full((30_000,), float(number))})


def _in_threads(*calls: Callable[[], None]) -> None:
    """Run calls at the same time; what one of them raises is raised."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def _threads_of_one_tag(rank: int) -> None:
    """Messages of threads under one tag may come in any order, but whole."""
    found: list[int] = []

    def send(number: int) -> None:
        for step in range(30):
            _numbered(number * 100 + step).isend(1, return_early=True)[0].wait()

    def receive() -> None:
        for _ in range(30):
            td = _numbered(-1)
            td.recv(0)
            numbers = {int(number) for value in td.values() for number in value[:2]}
            assert len(numbers) == 1
            found.extend(numbers)

    if rank == 0:
        _in_threads(*(partial(send, number) for number in range(3)))
    else:
        _in_threads(receive, receive, receive)
        assert sorted(found) == [number * 100 + step for number in range(3) for step in range(30)]


def test_threads_of_one_tag(two: Ranks) -> None:
    two.run(_threads_of_one_tag, patience=30)


def _threads_of_their_own_tags(rank: int) -> None:
    def exchange(tag: int) -> None:
        for step in range(30):
            td = _numbered(tag * 100 + step if rank == 0 else -1)
            td.send(1, init_tag=tag) if rank == 0 else td.recv(0, init_tag=tag)
            assert (td == tag * 100 + step).all()

    _in_threads(*(partial(exchange, tag) for tag in (0, 1, 5)))


def test_threads_of_their_own_tags(two: Ranks) -> None:
    two.run(_threads_of_their_own_tags, patience=30)


def _many_tasks(rank: int) -> None:
    """More tasks than an event loop has threads, and what they wait for comes last."""
    tags = range(50)
    if rank == 0:
        for tag in reversed(tags):
            TensorDict({"a": torch.full((2,), float(tag))}).send(1, init_tag=tag)
        return
    targets = [TensorDict({"a": torch.zeros(2)}) for _ in tags]

    async def main() -> None:
        await asyncio.gather(*(target.arecv(0, init_tag=tag) for tag, target in enumerate(targets)))

    asyncio.run(main())
    assert [int(target["a"][0]) for target in targets] == list(tags)


def test_more_tasks_than_threads(two: Ranks) -> None:
    two.run(_many_tasks)


def _cancelled(rank: int) -> float:
    """A cancelled arecv takes what comes next, a cancelled asend arrives; the loop does not wait for either."""
    if rank == 0:
        time.sleep(1)
        for number in (1, 2):
            TensorDict({"a": torch.full((2,), float(number))}).send(1)
        target = TensorDict({"a": torch.zeros(2)})
        target.recv(1)
        assert target["a"].tolist() == [3, 3]
        return 0
    first, second = TensorDict({"a": torch.zeros(2)}), TensorDict({"a": torch.zeros(2)})

    async def cancel(coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    start = time.monotonic()
    asyncio.run(cancel(first.arecv(0)))
    asyncio.run(cancel(TensorDict({"a": torch.full((2,), 3.0)}).asend(0)))
    took = time.monotonic() - start
    second.recv(0)
    assert first["a"].tolist() == [1, 1]
    assert second["a"].tolist() == [2, 2]
    return took


def test_cancelled_tasks(two: Ranks) -> None:
    assert two.run(_cancelled)[1] < 0.7


def _dropped(rank: int) -> None:
    """The result of isend may be dropped: the tensors stay until they are sent."""
    if rank == 0:
        for number in range(1, 5):
            TensorDict({"a": torch.full((2_000_000,), float(number))}).isend(1, return_early=True)
            torch.full((2_000_000,), -1.0)
        TensorDict({"a": torch.full((2_000_000,), 5.0)}).send(1)
        return
    time.sleep(0.3)
    td = TensorDict({"a": torch.zeros(2_000_000)})
    for number in range(1, 6):
        td.recv(0)
        assert (td == number).all()


def test_isend_that_is_dropped(two: Ranks) -> None:
    two.run(_dropped)


def _no_thread(rank: int) -> None:
    """An irecv that cannot begin is none: the next one does not wait for it."""
    td = TensorDict({"a": torch.full((2,), float(rank))})
    if rank == 1:
        td.send(0)
        return
    start, threading.Thread.start = threading.Thread.start, _refusing
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            td.irecv(1, return_premature=True)
    finally:
        threading.Thread.start = start
    td.recv(1)
    assert (td == 1).all()


def _refusing(thread: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread_for_irecv(two: Ranks) -> None:
    two.run(_no_thread)


# --- what comes from the network -------------------------------------------------------------------------------------


def _foreign(rank: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(wire.PROLOGUE, dtype=torch.uint8), 1)
        return
    with pytest.raises(TransferError, match="does not begin a container"):
        plain(0).recv(0)


def test_message_of_something_else(two: Ranks) -> None:
    two.run(_foreign)


def _hostile(rank: int, head: bytes) -> None:
    if rank == 0:
        first, *_ = wire.prologue(head)
        dist.send(first, 1)
        answer = torch.zeros(2048, dtype=torch.uint8)
        dist.recv(answer, 1, tag=1 << 30)
        assert answer[0] == 3
        return
    with pytest.raises(TransferError, match="description"):
        TensorDict.from_remote_init(0)


@pytest.mark.parametrize(
    "head",
    [
        b"nothing",
        b"[]",
        b"{}",
        b'{"node":{},"values":[],"storages":{},"names":["a"],"dtypes":["float32"],"shapes":[[2]],"devices":["cpu"],'
        b'"starts":[0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[4,4]},"names":["a"],"dtypes":["float32"],"shapes":[[2]],'
        b'"devices":["cpu"],"starts":[0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[8,8]},"names":["a"],"dtypes":["save"],"shapes":[[2]],'
        b'"devices":["cpu"],"starts":[0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[8,8]},"names":["a"],"dtypes":["float32"],"shapes":[[-1,-2]],'
        b'"devices":["cpu"],"starts":[0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[8,8]},"names":["a"],"dtypes":["float32"],"shapes":[[2.0]],'
        b'"devices":["cpu"],"starts":[0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[8,8]},"names":["a"],"dtypes":["float32"],"shapes":[[2]],'
        b'"devices":["cpu"],"starts":[0.0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[-8,8]},"names":["a"],"dtypes":["float32"],"shapes":[[2]],'
        b'"devices":["cpu"],"starts":[0]}',
        b'{"node":{},"values":[],"storages":{"cpu":[1e999,1e999]},"names":[],"dtypes":[],"shapes":[],"devices":[],'
        b'"starts":[]}',
    ],
)
def test_broken_descriptions(two: Ranks, head: bytes) -> None:
    two.run(_hostile, head)


def _endless(rank: int, length: int) -> None:
    """A description longer than any memory."""
    if rank == 0:
        first, *_ = wire.prologue(b"{" * 5000)
        wire._FIRST.pack_into(first.numpy(), 0, wire._MAGIC, length)
        dist.send(first, 1)
        answer = torch.zeros(2048, dtype=torch.uint8)
        dist.recv(answer, 1, tag=1 << 30)
        assert answer[0] == 3
        return
    with pytest.raises(TransferError, match=f"no memory for a description of {length - 4080} bytes"):
        TensorDict.from_remote_init(0)


@pytest.mark.parametrize("length", [1 << 60, (1 << 64) - 1])
def test_endless_description(two: Ranks, length: int) -> None:
    two.run(_endless, length)


def _mutated(value: Any, random: Random) -> Any:
    """Replace a part of a JSON value."""
    if type(value) is dict and value and random.random() < 0.9:
        name = random.choice(list(value))
        other = dict(value)
        if random.random() < 0.1:
            other["_"] = other.pop(name)
        else:
            other[name] = _mutated(value[name], random)
        return other
    if type(value) is list and value and random.random() < 0.9:
        position = random.randrange(len(value))
        return [*value[:position], _mutated(value[position], random), *value[position + 1 :]]
    junk = [
        None,
        True,
        -1,
        0,
        1,
        7,
        1 << 20,
        1 << 62,
        1 << 80,
        0.5,
        "",
        "cpu",
        "a",
        "int64",
        [],
        {},
        [[]],
        {"kind": "x"},
    ]
    return random.choice(junk)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["plain", "unequal", "values", "class", "odd", "ragged"])
def test_descriptions_that_somebody_has_changed(name: str) -> None:
    """Any message gives an error or a sound container: all tensors lie within the received memory."""
    random = Random(name)
    told = json.loads(wire.Package(ragged() if name == "ragged" else kinds()[name], lambda device: "cpu").head)
    sound = 0
    for _ in range(300):
        content = json.dumps(_mutated(told, random)).encode()
        try:
            header = wire.Header(content)
        except TransferError:
            continue
        if header.nbytes > 1 << 24:
            continue
        try:
            anew = wire.NewBuffers(header, lambda device: torch.device("cpu"))
            for storage in anew.storages.values():
                storage[: 1 << 24] = 0
            made = anew.make_container(False)
        except (RuntimeError, ValueError, TypeError, LookupError):
            continue
        for leaf in made._leaves():
            leaf.clone()
        sound += 1
    assert sound > 3 or name == "ragged"
