"""Containers between real processes over gloo: every verb and option, misfits, peers that die or are late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, die
from torch.distributed.device_mesh import init_device_mesh

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    PersistentTensorDict,
    TensorDict,
    lazy_stack,
    tensorclass,
)
from tensordict.errors import SaveError, TransferError
from tensordict.llm import IFEvalScoreData
from tensordict.parallel import wire

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(2, tmp_path_factory.mktemp("two"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(4, tmp_path_factory.mktemp("four"))
    yield ranks
    ranks.close()


@tensorclass
class Rollout:
    obs: torch.Tensor
    note: str
    inner: TensorDict | None = None


class Odd:
    """A value that JSON cannot hold."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


LARGE = wire.SMALL // 4 + 100


def plain(number: float = 1) -> TensorDict:
    """Small and large tensors of several dtypes, nested, contiguous and not."""
    fill = float(number)
    return TensorDict(
        {
            "a": torch.full((3,), fill, dtype=torch.float32),
            "flag": torch.full((3, 1), bool(fill)),
            "b": {
                "c": torch.full((3, 2), int(fill), dtype=torch.int64),
                "half": torch.full((3, 5), fill, dtype=torch.bfloat16),
                "deep": {"z": torch.full((3,), complex(fill, fill)), "nothing": torch.zeros(3, 0)},
            },
            "large": torch.full((3, LARGE), fill),
            "turned": torch.full((LARGE, 3), fill, dtype=torch.float64).T,
            "columns": torch.full((2, 3), int(fill), dtype=torch.int16).T,
        },
        [3],
        names=["time"],
    )


def kinds(number: int = 1) -> dict[str, Any]:
    """One container of each kind."""
    fill = float(number)
    dense = TensorDict({"x": torch.full((2, 4), fill), "note": f"v{number}"}, [2])
    return {
        "plain": plain(fill),
        "empty": TensorDict({}, [2]),
        "lazy": lazy_stack([plain(fill), plain(fill + 1)], 1),
        "unequal": lazy_stack([TensorDict({"x": torch.full((i + 1,), fill)}) for i in range(3)]),
        "values": TensorDict(
            {
                "text": f"v{number}",
                "json": NonTensorData({"k": [number, 2.5, None, ("t",)]}, [2]),
                "each": NonTensorStack(NonTensorData(f"p{number}"), NonTensorData("q")),
                "x": torch.full((2,), fill),
            },
            [2],
        ),
        "class": Rollout(obs=torch.full((2, LARGE), fill), note=f"v{number}", inner=dense, batch_size=[2]),
        "lazy class": lazy_stack(
            [Rollout(obs=torch.full((4,), fill), note=f"v{number}", batch_size=[]) for _ in range(2)]
        ),
        "params": TensorDict.from_module(torch.nn.Linear(3, 3)).data.apply(lambda x: x.fill_(fill)).to_tensordict(),
    }


def ragged(number: float = 1) -> TensorDict:
    fill = float(number)
    rows = [torch.full((length, 2), fill) for length in (1, 4, 2)]
    return TensorDict(
        {
            "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "strided": torch.nested.nested_tensor([row.double() for row in rows]),
            "dense": torch.full((3,), fill),
        },
        [3],
    )


def same(left: Any, right: Any) -> bool:
    """Whether two containers are of one class and have the same content."""
    if type(left) is not type(right) or left.batch_size != right.batch_size or left.names != right.names:
        return False
    if isinstance(left, LazyStackedTensorDict):
        pairs = zip(left.unbind(left.stack_dim), right.unbind(right.stack_dim), strict=True)
        return left.stack_dim == right.stack_dim and all(same(mine, theirs) for mine, theirs in pairs)
    if set(left.keys(True, True)) != set(right.keys(True, True)):
        return False
    for key in left.keys(True, True):
        mine, theirs = left.get(key), right.get(key)
        if isinstance(mine, torch.Tensor):
            if mine.is_nested:
                alike = all(torch.equal(a, b) for a, b in zip(mine.unbind(), theirs.unbind(), strict=True))
            else:
                alike = mine.dtype == theirs.dtype and torch.equal(mine, theirs)
            if not alike:
                return False
        elif left[key] != right[key]:
            return False
    return True


def holds(td: Any, number: float) -> bool:
    """Whether the content is that of `plain(number)`."""
    expected = plain(number)
    return all(torch.equal(td[key], expected[key]) for key in expected.keys(True, True))


# --- send and recv ----------------------------------------------------------------------------------------------------


def _send(rank: int, name: str) -> Any:
    sent = kinds(3)[name]
    if rank == 0:
        assert sent.send(1) is None
        return None
    target = kinds(0)[name]
    where = target.data_ptr() if name == "plain" else None
    before = type(target)
    tag = target.recv(0)
    assert same(target, sent)
    assert type(target) is before
    assert where is None or (target.data_ptr() == where).all()
    return tag


@pytest.mark.parametrize("name", list(kinds()))
def test_send_in_place(two: Ranks, name: str) -> None:
    tag = two.run(_send, name)[1]
    assert tag == max(0, len(kinds()[name]._leaves()) - 1)


def _send_ragged(rank: int) -> None:
    if rank == 0:
        ragged(2).send(1)
        return
    target = ragged(0)
    target.recv(0)
    assert same(target, ragged(2))


def test_send_ragged(two: Ranks) -> None:
    two.run(_send_ragged)


def _send_other_form(rank: int) -> None:
    """What lies in another order, or is a lazy stack on one side only."""
    pair = [plain(1), plain(2)]
    if rank == 0:
        lazy_stack(pair).send(1)
        torch.stack(pair).send(1)
        TensorDict({"a": torch.ones(2), "b": torch.zeros(2)}).send(1)
        Rollout(obs=torch.ones(2), note="x", batch_size=[2]).send(1)
        return
    dense = torch.stack([plain(0), plain(0)])
    dense.recv(0)
    assert (dense == torch.stack(pair)).all()
    stack = lazy_stack([plain(0), plain(0)])
    stack.recv(0)
    assert type(stack) is LazyStackedTensorDict
    assert (stack == torch.stack(pair)).all()
    order = TensorDict({"b": torch.full((2,), 5.0), "a": torch.full((2,), 5.0)})
    order.recv(0)
    assert order["a"].tolist() == [1, 1]
    assert order["b"].tolist() == [0, 0]
    bare = TensorDict({"obs": torch.zeros(2), "note": "y"}, [2])
    bare.recv(0)
    assert bare["obs"].tolist() == [1, 1]
    assert bare["note"] == "x"


def test_send_into_another_form(two: Ranks) -> None:
    two.run(_send_other_form)


def _memmap(rank: int, folder: str) -> None:
    if rank == 0:
        plain(4).memmap(folder + "/sent").send(1)
        return
    target = plain(0).memmap_(folder + "/got")
    assert isinstance(target["large"], MemoryMappedTensor)
    target.recv(0)
    assert same(TensorDict.load_memmap(folder + "/got"), TensorDict.load_memmap(folder + "/sent"))
    assert holds(target, 4)


def test_memory_mapped_destination(two: Ranks, tmp_path: Any) -> None:
    two.run(_memmap, str(tmp_path))


def _hdf5(rank: int, folder: str) -> None:
    def made(number: float) -> TensorDict:
        return TensorDict({"a": torch.full((3,), number), "b": {"c": torch.full((3, LARGE), number)}}, [3])

    path = f"{folder}/rank{rank}.h5"
    td = made(float(rank)).to_h5(path)
    td.send(0) if rank == 1 else td.recv(1)
    assert same(PersistentTensorDict(filename=path).to_tensordict(), made(1.0))
    with pytest.raises(TransferError, match="'a'.*missing"):
        td.exclude("a").send(0) if rank == 1 else td.recv(1)


def test_hdf5_on_both_sides(two: Ranks, tmp_path: Any) -> None:
    pytest.importorskip("h5py")
    two.run(_hdf5, str(tmp_path))


def _no_room(rank: int) -> None:
    """A receiver without memory for what is sent."""
    if rank == 0:
        td = TensorDict(a=torch.ones(3))
        with pytest.raises(TransferError, match="rank 1 did not take"):
            td.init_remote(1)
        return
    fresh, wire._fresh = wire._fresh, lambda nbytes, device: fresh(1 << 60, device)
    try:
        with pytest.raises(TransferError, match="receiving from rank 0"):
            TensorDict.from_remote_init(0)
    finally:
        wire._fresh = fresh


def _class_by_its_own_method(rank: int) -> None:
    sent = Rollout(obs=torch.ones(2), note="x", batch_size=[2])
    if rank == 0:
        sent.init_remote(1)
        return
    assert same(Rollout.from_remote_init(0), sent)


def test_tensorclass_by_its_own_method(two: Ranks) -> None:
    two.run(_class_by_its_own_method)


def _scores(rank: int) -> None:
    sent = IFEvalScoreData(torch.ones(2, 1), torch.ones(2, 3), None, torch.zeros(2, 3), batch_size=[2])
    if rank == 0:
        sent.init_remote(1)
        return
    got = IFEvalScoreData.from_remote_init(0)
    assert type(got) is IFEvalScoreData and got.batch_size == (2,) and (got == sent).all()


def test_scores_of_instruction_following(two: Ranks) -> None:
    two.run(_scores)


def _locked(rank: int) -> None:
    td = plain(rank).lock_()
    td.send(0) if rank == 1 else td.recv(1)
    assert holds(td, 1)
    assert td.is_locked
    net = torch.nn.Linear(3, 300, bias=False)
    params = TensorDict.from_module(net, as_module=True)
    with torch.no_grad():
        net.weight.fill_(rank)
    params.send(0) if rank == 1 else params.recv(1)
    assert (net.weight == 1).all()
    assert net.weight.requires_grad


def test_locked_containers_and_parameters_are_written_in_place(two: Ranks) -> None:
    two.run(_locked)


def _tags(rank: int) -> None:
    """Two streams, received in the other order; a peer of a group; a mesh."""
    first, second = plain(1), plain(2)
    group = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    if rank == 0:
        works = [*first.isend(1, init_tag=0, return_early=True), *second.isend(1, init_tag=1, return_early=True)]
        for work in works:
            assert work.wait() is True
            assert work.is_completed()
        first.send(1, pseudo_rand=True)
        second.send(1, init_tag=7, group=group)
        first.send(group=group, group_dst=1)
        second.send(1, group=mesh)
        return
    target = plain(0)
    assert target.recv(0, init_tag=1) == 1 + 8
    assert holds(target, 2)
    assert target.recv(0) == 8
    assert holds(target, 1)
    target.zero_()
    assert target.recv(0, pseudo_rand=True) > 1 << 29
    assert holds(target, 1)
    target.recv(0, init_tag=7, group=group)
    assert holds(target, 2)
    target.recv(group=group, group_src=0)
    assert holds(target, 1)
    target.recv(0, group=mesh)
    assert holds(target, 2)


def test_tags_groups_and_meshes(two: Ranks) -> None:
    two.run(_tags)


def _standalone(rank: int, folder: str) -> None:
    """A group that torch has not registered."""
    store = dist.FileStore(folder + "/own", 2)
    group = dist.ProcessGroupGloo(store, rank, 2)
    td = plain(rank)
    td.recv(group=group, group_src=1) if rank == 0 else td.send(group=group, group_dst=0)
    assert holds(td, 1)


def test_group_of_its_own(two: Ranks, tmp_path: Any) -> None:
    two.run(_standalone, str(tmp_path))


def _consolidated(rank: int) -> None:
    if rank == 0:
        plain(5).send(1, consolidated=True)
        plain(6).consolidate().send(1, consolidated=True)
        plain(7).send(1, consolidated=True)
        ragged(8).send(1, consolidated=True)
        return
    target = plain(0).consolidate()
    storage = target._consolidated[0].data_ptr()
    target.recv(0, consolidated=True)
    assert holds(target, 5)
    assert target.is_consolidated()
    assert target._consolidated[0].data_ptr() == storage
    target.recv(0)
    assert holds(target, 6)
    loose = plain(0)
    loose.recv(0, consolidated=True)
    assert holds(loose, 7)
    rows = ragged(0)
    rows.recv(0, consolidated=True)
    assert same(rows, ragged(8))


def test_consolidated_is_one_message(two: Ranks) -> None:
    two.run(_consolidated)


def _both_at_once(rank: int) -> None:
    """Both send first and receive then, and wait in either order."""
    for receives_first in (True, False):
        mine, target = plain(rank + 1), plain(0)
        sent = mine.isend(1 - rank, return_early=True)
        received = target.irecv(1 - rank, return_premature=True)
        for future in received + sent if receives_first else sent + received:
            future.wait()
        assert holds(target, 2 - rank)
        assert received[0].value() is target


def test_isend_and_irecv_cross(two: Ranks) -> None:
    two.run(_both_at_once)


def _many(rank: int) -> None:
    """Many of one tag stay in order, whoever of the threads comes first; also with a recv behind them."""
    if rank == 0:
        for number in range(1, 9):
            assert plain(number).isend(1) == 8
        plain(9).send(1)
        return
    targets = [plain(0) for _ in range(8)]
    futures = [target.irecv(0, return_premature=True)[0] for target in targets]
    last = plain(0)
    assert last.irecv(0) is None
    for future in futures:
        future.wait()
    assert [int(target["a"][0]) for target in targets] == list(range(1, 9))
    assert holds(last, 9)


def test_order_of_many(two: Ranks) -> None:
    two.run(_many)


def _coroutines(rank: int) -> int:
    async def ticking() -> int:
        ticks = 0
        while not done.is_set():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    async def main() -> int:
        nonlocal done
        done = asyncio.Event()
        ticker = asyncio.create_task(ticking())
        if rank == 0:
            await asyncio.sleep(0.3)
            await plain(3).asend(1)
            await plain(4).asend(1, init_tag=2)
        else:
            target = plain(0)
            assert await target.arecv(0) is target
            assert holds(target, 3)
            made = await TensorDict().arecv(0, init_tag=2, device="cpu")
            assert made.device == torch.device("cpu")
            assert holds(made, 4)
        done.set()
        return await ticker

    done: asyncio.Event
    return asyncio.run(main())


def test_coroutines_leave_the_loop_free(two: Ranks) -> None:
    assert two.run(_coroutines)[1] > 5


# --- init_remote ------------------------------------------------------------------------------------------------------


def _init(rank: int, name: str, use_broadcast: bool) -> None:
    sent = ragged(3) if name == "ragged" else kinds(3)[name]
    if rank == 0:
        sent.init_remote(1, use_broadcast=use_broadcast)
        return
    got = TensorDict.from_remote_init(0, use_broadcast=use_broadcast)
    assert same(got, sent)
    if name in ("plain", "lazy", "class"):
        assert got.is_consolidated()


@pytest.mark.parametrize("use_broadcast", [False, True])
@pytest.mark.parametrize("name", [*kinds(), "ragged"])
def test_init_remote(two: Ranks, name: str, use_broadcast: bool) -> None:
    two.run(_init, name, use_broadcast)


def _init_device(rank: int) -> None:
    if rank == 0:
        plain(2).init_remote(1, device="cpu")
        plain(2).send(1)
        return
    got = TensorDict.from_remote_init(0, device="cpu")
    assert got.device == torch.device("cpu")
    assert holds(TensorDict.from_remote_init(0), 2)


def test_init_remote_with_a_device(two: Ranks) -> None:
    two.run(_init_device)


def _pickled(rank: int) -> None:
    td = TensorDict({"odd": NonTensorData(Odd(4)), "x": torch.ones(2)})
    if rank == 0:
        with pytest.raises(SaveError, match="'odd'.*allow_pickle=True on both sides"):
            td.init_remote(1)
        with pytest.raises(TransferError, match="rank 1 did not take.*'odd'.*sent pickled"):
            td.init_remote(1, allow_pickle=True)
        td.init_remote(1, allow_pickle=True)
        td.send(1, allow_pickle=True)
        return
    with pytest.raises(TransferError, match="nothing was sent: entry 'odd'"):
        TensorDict.from_remote_init(0)
    with pytest.raises(TransferError, match="'odd'.*may run any code"):
        TensorDict.from_remote_init(0)
    got = TensorDict.from_remote_init(0, allow_pickle=True)
    assert got["odd"] == Odd(4)
    target = TensorDict({"odd": NonTensorData(Odd(1)), "x": torch.zeros(2)})
    target.recv(0, allow_pickle=True)
    assert target["odd"] == Odd(4)
    assert target["x"].tolist() == [1, 1]


def test_pickle_only_if_both_sides_agree(two: Ranks) -> None:
    two.run(_pickled)


def _unknown_class(rank: int) -> None:
    if rank == 0:

        @tensorclass
        class Hidden:
            x: torch.Tensor

        with pytest.raises(TransferError, match="did not take.*Hidden.*not known"):
            Hidden(x=torch.ones(2), batch_size=[2]).init_remote(1)
        return
    with pytest.raises(TransferError, match="Hidden.*not known to this program"):
        TensorDict.from_remote_init(0)


def test_class_that_only_one_side_knows(two: Ranks) -> None:
    two.run(_unknown_class)


# --- sides that do not fit --------------------------------------------------------------------------------------------

MISFITS = {
    "missing": (lambda td: td.exclude(("b", "c")), r"\('b', 'c'\).*missing"),
    "more": (lambda td: td.set("new", torch.zeros(3)), r"'new'.*missing"),
    "shape": (
        lambda td: td.set(("b", "c"), torch.zeros(3, 4, dtype=torch.int64)),
        r"\('b', 'c'\).*\[3, 4\].*\[3, 2\]|\('b', 'c'\).*\[3, 2\].*\[3, 4\]",
    ),
    "dtype": (
        lambda td: td.set("large", torch.zeros(3, LARGE, dtype=torch.int32)),
        r"'large'.*(int32.*float32|float32.*int32)",
    ),
    "kind": (lambda td: td.set("a", TensorDict({"x": torch.zeros(3)}, [3])), r"'a'.*missing"),
    "value": (lambda td: td.set_non_tensor("a", "text"), r"'a'.*a value"),
}


def _misfit(rank: int, name: str) -> None:
    change, message = MISFITS[name]
    if rank == 0:
        sent = change(plain(1))
        with pytest.raises(TransferError, match="rank 1 did not take what was sent: .*(" + message + ")"):
            sent.send(1)
        early = sent.isend(1, return_early=True)
        with pytest.raises(TransferError, match=message):
            early[0].wait()
        with pytest.raises(TransferError, match=message):
            early[0].wait()
        plain(2).send(1)
        return
    target = plain(0)
    with pytest.raises(TransferError, match=message):
        target.recv(0)
    assert same(target, plain(0))
    future = target.irecv(0, return_premature=True)[0]
    with pytest.raises(TransferError, match=message):
        future.wait()
    assert same(target, plain(0))
    target.recv(0)
    assert holds(target, 2)


@pytest.mark.parametrize("name", list(MISFITS))
def test_misfit_is_an_error_on_both_sides(two: Ranks, name: str) -> None:
    two.run(_misfit, name)


def _ragged_misfit(rank: int) -> None:
    other = ragged(1)
    other["jagged"] = torch.nested.nested_tensor([torch.ones(n, 2) for n in (2, 3, 2)], layout=torch.jagged)
    td = ragged(1) if rank == 0 else other
    with pytest.raises(TransferError, match="'jagged'"):
        td.send(1) if rank == 0 else td.recv(0)


def test_rows_that_differ(two: Ranks) -> None:
    two.run(_ragged_misfit)


def _late_error(rank: int) -> None:
    if rank == 0:
        plain(1).exclude("a").isend(1)
        time.sleep(0.5)
        with pytest.raises(TransferError, match="an isend before this call failed.*'a'"):
            plain(1).send(1)
        plain(1).send(1)
        return
    target = plain(0)
    with pytest.raises(TransferError, match="'a'"):
        target.recv(0)
    target.recv(0)


def test_isend_that_nobody_waits_for(two: Ranks) -> None:
    two.run(_late_error)


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
        first, _ = wire.prologue(head)
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
    ],
)
def test_broken_descriptions(two: Ranks, head: bytes) -> None:
    two.run(_hostile, head)


def _unsendable(rank: int) -> None:
    for bad in (torch.zeros(2, device="meta"), torch.eye(2).to_sparse()):
        td = TensorDict({"n": {"bad": bad}})
        if rank == 0:
            with pytest.raises(SaveError, match=r"\('n', 'bad'\).*cannot be sent"):
                td.send(1)
        else:
            with pytest.raises(TransferError, match=r"nothing was sent.*\('n', 'bad'\)"):
                plain(0).recv(0)
        with pytest.raises((SaveError, TransferError), match=r"\('n', 'bad'\)"):
            (td if rank == 0 else TensorDict()).broadcast(0)
        with pytest.raises((SaveError, TransferError), match=r"\('n', 'bad'\)"):
            (td if rank == 0 else plain()).all_gather()
        with pytest.raises(TransferError, match=r"\('n', 'bad'\)"):
            (td if rank == 0 else TensorDict(x=torch.zeros(2))).all_reduce()


def test_what_cannot_be_sent(two: Ranks) -> None:
    two.run(_unsendable)


def _arguments(rank: int) -> None:
    td = plain()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    for call in (td.send, td.recv, td.isend, td.irecv):
        with pytest.raises(ValueError, match="either"):
            call()
        with pytest.raises(ValueError, match="either"):
            call(0, group_dst=1) if call in (td.send, td.isend) else call(0, group_src=1)
        with pytest.raises(ValueError, match=f"rank {rank} of a group of 2"):
            call(rank)
        with pytest.raises(TypeError, match="pipes of UCXX"):
            call(object())
        with pytest.raises(ValueError, match="pass mesh"):
            call(1 - rank, group=mesh)
        with pytest.raises(ValueError, match="init_tag"):
            call(1 - rank, init_tag=-1)
    with pytest.raises(ValueError, match="pass group too"):
        td.send(group_dst=1 - rank)
    dist.barrier()


def test_arguments(two: Ranks) -> None:
    two.run(_arguments)


def test_without_a_process_group() -> None:
    for call in (lambda: plain().send(1), lambda: plain().all_reduce()):
        with pytest.raises(ValueError, match="init_process_group"):
            call()


# --- over all ranks ---------------------------------------------------------------------------------------------------


def _broadcast(rank: int) -> None:
    for src in (0, 3):
        sent = plain(src + 1)
        got = (sent if rank == src else TensorDict()).broadcast(src)
        assert same(got, sent)
        assert (got is sent) == (rank == src)
        assert rank == src or got.is_consolidated()
    for name, td in kinds(5).items():
        got = (td if rank == 1 else TensorDict()).broadcast(1, device="cpu" if name == "plain" else None)
        assert (got.device == torch.device("cpu")) == (name == "plain" and rank != 1)
        assert same(got, td)
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        got = (ragged(2) if rank == 3 else TensorDict()).broadcast(3, group=pair)
        assert same(got, ragged(2))
    many = TensorDict({f"k{i}": torch.full((2,), i) for i in range(500)})
    assert same((many if rank == 2 else TensorDict()).broadcast(2), many)


def test_broadcast(four: Ranks) -> None:
    four.run(_broadcast)


def _all_gather(rank: int) -> None:
    names = list(kinds())
    for shift in range(len(names)):
        mine = kinds(rank)[names[(rank + shift) % len(names)]]
        found = mine.all_gather()
        assert len(found) == 4
        for other, td in enumerate(found):
            assert same(td, kinds(other)[names[(other + shift) % len(names)]])
        assert found[rank] is not mine
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        found = plain(rank).all_gather(group=pair)
        assert [int(td["a"][0]) for td in found] == [0, 2]


def test_all_gather(four: Ranks) -> None:
    four.run(_all_gather)


def _all_reduce(rank: int) -> None:
    big = torch.full((300_000,), float(rank))
    td = TensorDict({"big": big, "s": {"x": torch.full((3, 2), rank + 1), "y": torch.ones(2, 3).T * rank}, "note": "n"})
    td["lazy"] = lazy_stack([TensorDict({"q": torch.full((2,), float(rank))}) for _ in range(2)])
    assert td.all_reduce() is None
    assert td["big"].data_ptr() == big.data_ptr()
    assert (big == 6).all()
    assert (td["s", "x"] == 10).all()
    assert (td["s", "y"] == 6).all()
    assert (td["lazy", "q"] == 6).all()
    td = plain(rank).exclude(("b", "deep"), "flag", "columns")
    works = td.all_reduce(dist.ReduceOp.MAX, async_op=True)
    assert isinstance(works, list)
    assert all(work.wait() for work in works)
    assert (td == 3).all()
    pair = dist.new_group([0, 3])
    if rank in (0, 3):
        td = TensorDict(a=torch.full((2,), float(rank)))
        td.all_reduce(op=dist.ReduceOp.SUM, group=pair)
        assert (td == 3).all()
    rows = ragged(rank + 1)
    rows.all_reduce()
    assert same(rows, ragged(10))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    td = TensorDict(a=torch.full((2,), float(rank)))
    td.all_reduce(group=mesh["columns"])
    assert (td == (1 if rank < 2 else 5)).all()


def test_all_reduce(four: Ranks) -> None:
    four.run(_all_reduce)


def _reduce(rank: int) -> None:
    def made() -> TensorDict:
        return TensorDict({"big": torch.full((300_000,), float(rank)), "s": torch.full((3,), rank)})

    for options in ({}, {"async_op": True}, {"async_op": True, "return_premature": True}):
        td = made()
        found = td.reduce(2, **options)
        if options.get("return_premature"):
            for work in found:
                work.wait()
                assert work.is_completed()
        else:
            assert found is None
        assert (td == (6 if rank == 2 else rank)).all()
    td = made()
    td.reduce(0, dist.ReduceOp.PRODUCT)
    assert (td == 0).all() if rank == 0 else (td == rank).all()


def test_reduce(four: Ranks) -> None:
    four.run(_reduce)


def _reduce_misfit(rank: int) -> None:
    for change, message in MISFITS.values():
        td = plain(1).exclude("flag", "columns")
        td = td if rank else change(td)
        before = td.clone()
        for call in (td.all_reduce, lambda td=td: td.reduce(1)):
            with pytest.raises(TransferError, match=message.replace("a value", "missing")):
                call()
        assert same(td, before)
    rows = ragged(1)
    if rank == 3:
        rows["jagged"] = torch.nested.nested_tensor([torch.ones(n, 2) for n in (2, 3, 2)], layout=torch.jagged)
    with pytest.raises(TransferError, match="'jagged'.*3 rows of the sizes"):
        rows.all_reduce()
    expanded = TensorDict(a=torch.zeros(1).expand(3))
    with pytest.raises(TransferError, match="'a'.*no plain memory"):
        expanded.all_reduce()
    for name, dtype in (("flag", torch.bool), ("short", torch.int16)):
        refused = TensorDict({"x": torch.ones(2), name: torch.ones(2, dtype=dtype)})
        with pytest.raises(TransferError, match=f"'{name}'.*does not reduce"):
            refused.all_reduce()
        assert refused["x"].tolist() == [1, 1]
    number = TensorDict({"z": torch.full((2,), 1j)})
    number.all_reduce()
    assert number["z"].tolist() == [4j, 4j]
    with pytest.raises(TransferError, match="'z'.*does not reduce"):
        number.all_reduce(dist.ReduceOp.MAX)
    number.all_reduce(dist.ReduceOp.AVG)
    assert number["z"].tolist() == [4j, 4j]
    different_order = TensorDict({name: torch.ones(1) for name in ("xy" if rank % 2 else "yx")})
    different_order.all_reduce()
    assert (different_order == 4).all()


def test_reductions_that_do_not_fit(four: Ranks) -> None:
    four.run(_reduce_misfit)


def _gather_and_stack(rank: int) -> None:
    for dst in (0, 2):
        td = torch.stack([plain(0)] * 3) if rank == dst else plain(rank)
        found = td.gather_and_stack(dst)
        if rank != dst:
            assert found is None
            continue
        assert found is td
        others = [other for other in range(4) if other != dst]
        for row, other in enumerate(others):
            assert holds(td[row], other)
    for name in ("lazy", "values", "class", "lazy class"):
        td = lazy_stack([kinds(9)[name]] * 3).clone() if rank == 1 else kinds(rank)[name]
        td.gather_and_stack(1)
        if rank == 1:
            for row, other in enumerate((0, 2, 3)):
                assert same(td[row], kinds(other)[name])
    td = torch.stack([TensorDict({"x": torch.zeros(2), "note": "?"}) for _ in range(3)])
    if rank:
        td = TensorDict({"x": torch.full((2,), float(rank)), "note": f"r{rank}"})
    td.gather_and_stack(0)
    if rank == 0:
        assert td["x"][:, 0].tolist() == [1, 2, 3]
        assert [td[row]["note"] for row in range(3)] == ["r1", "r2", "r3"]


def test_gather_and_stack(four: Ranks) -> None:
    four.run(_gather_and_stack)


def _stack_misfit(rank: int) -> None:
    td = torch.stack([plain(0)] * 3) if rank == 0 else plain(rank)
    if rank == 2:
        td = td.exclude("a")
    if rank in (0, 2):
        with pytest.raises(TransferError, match="'a'.*missing"):
            td.gather_and_stack(0)
    else:
        td.gather_and_stack(0)
    if rank == 0:
        assert [int(row["b", "c"][0, 0]) for row in td] == [1, 0, 3]
    td = torch.stack([plain(0)] * 2) if rank == 0 else plain(rank)
    with pytest.raises(TransferError, match=r"\[2, 3\].*begin with 3"):
        td.gather_and_stack(0)


def test_gather_and_stack_that_does_not_fit(four: Ranks) -> None:
    four.run(_stack_misfit)


# --- peers that die or are late ---------------------------------------------------------------------------------------


def test_receiver_without_memory(tmp_path: Any) -> None:
    ranks = Ranks(2, tmp_path)
    try:
        ranks.run(_no_room)
    finally:
        ranks.close()


def _killed(rank: int, call: str) -> float:
    start = time.monotonic()
    if rank == 1:
        if call != "recv":
            time.sleep(0.3)
        die()
    td = TensorDict({"x": torch.zeros(5_000_000)})
    calls = {
        "recv": lambda: td.recv(1),
        "send": lambda: td.send(1),
        "all_reduce": td.all_reduce,
        "irecv": lambda: td.irecv(1, return_premature=True)[0].wait(),
        "broadcast": lambda: td.broadcast(1),
    }
    with pytest.raises(TransferError, match="rank 1|all_reduce|broadcast"):
        calls[call]()
    return time.monotonic() - start


@pytest.mark.parametrize("call", ["recv", "send", "irecv", "all_reduce", "broadcast"])
def test_killed_peer(tmp_path: Any, call: str) -> None:
    ranks = Ranks(2, tmp_path, timeout=30)
    try:
        assert ranks.run(_killed, call, dies=1)[0] < 15
    finally:
        ranks.close()


def _too_late(rank: int, call: str) -> float:
    if rank == 1:
        time.sleep(2.5)
        return 0
    start = time.monotonic()
    td = plain(0)
    with pytest.raises(TransferError, match="(?i)rank 1.*time|all_reduce.*time"):
        td.recv(1) if call == "recv" else td.send(1) if call == "send" else td.all_reduce()
    return time.monotonic() - start


@pytest.mark.parametrize("call", ["recv", "send", "all_reduce"])
def test_peer_that_does_not_come(tmp_path: Any, call: str) -> None:
    ranks = Ranks(2, tmp_path, timeout=1)
    try:
        assert 0.8 < ranks.run(_too_late, call)[0] < 2.4
    finally:
        ranks.close()
