"""Containers between real processes over gloo: every verb and option, misfits, peers that die or are late."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanged import LARGE, MISFITS, Odd, Rollout, holds, kinds, plain, ragged, same
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh

from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    PersistentTensorDict,
    TensorDict,
    lazy_stack,
    tensorclass,
)
from tensordict.core.exceptions import SaveError, TransferError
from tensordict.llm import IFEvalScoreData

pytestmark = pytest.mark.seconds


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


def _ring(rank: int, route: str) -> None:
    """Every rank sends to the next one and receives from the one before, all at once."""
    count = dist.get_world_size()
    after, before = (rank + 1) % count, (rank - 1) % count
    for name in [*kinds(), "ragged"]:
        made = ragged if name == "ragged" else lambda number, name=name: kinds(number)[name]
        mine, target, expected = made(rank + 1), made(9), made(before + 1)
        if route == "isend":
            works = mine.isend(after, init_tag=3, return_early=True)
            works += target.irecv(before, init_tag=3, return_premature=True)
            for work in works:
                work.wait()
        elif route == "send":
            # The first one sends first, and the rest when they have what is theirs.
            if rank == 0:
                mine.send(after, consolidated=name == "plain")
            target.recv(before)
            if rank > 0:
                mine.send(after, consolidated=name == "plain")
        elif route == "asend":
            asyncio.run(_both(mine.asend(after, init_tag=5), target.arecv(before, init_tag=5)))
        else:
            work = mine.isend(after, pseudo_rand=True, return_early=True)[0]
            target.recv(before, pseudo_rand=True)
            work.wait()
        assert same(target, expected), (name, route)
        if rank == 0:
            mine.init_remote(after)
        got = TensorDict.from_remote_init(before)
        assert same(got, expected), name
        if rank > 0:
            mine.init_remote(after)


async def _both(*calls: Any) -> None:
    await asyncio.gather(*calls)


@pytest.mark.parametrize("route", ["send", "isend", "asend", "pseudo_rand"])
def test_round_the_ring(ranks: Ranks, route: str) -> None:
    ranks.run(_ring, route, patience=40)


def _in_place(rank: int) -> None:
    """The written container keeps its memory, names, lock and autograd state."""
    if rank == 0:
        TensorDict({"a": torch.full((4,), 2.0, requires_grad=True) * 3, "t": "new"}, [4], names=["x"]).send(1)
        TensorDict({"a": torch.full((4,), 7.0)}).send(1)
        return
    parameter = torch.zeros(4, requires_grad=True)
    td = TensorDict({"a": parameter, "t": "old"}, [4], names=["y"]).lock_()
    td.recv(0)
    assert td["a"] is parameter and parameter.requires_grad and parameter.is_leaf
    assert parameter.tolist() == [6, 6, 6, 6]
    assert td["t"] == "new" and td.is_locked and td.names == ["y"]
    column = torch.zeros(4, 2)
    TensorDict({"a": column[:, 1]}).recv(0)
    assert column.tolist() == [[0, 7]] * 4


def test_what_is_written_to_keeps_its_own(two: Ranks) -> None:
    two.run(_in_place)


def _expanded(rank: int) -> None:
    """Memory that cannot be written to is refused before anything is."""
    sent = TensorDict({"b": torch.ones(4), "a": torch.ones(4), "large": torch.ones(LARGE)})
    if rank == 0:
        with pytest.raises(TransferError, match="rank 1 did not take.*'a' is expanded"):
            sent.send(1)
        return
    td = TensorDict({"b": torch.zeros(4), "a": torch.zeros(1).expand(4), "large": torch.zeros(LARGE)})
    with pytest.raises(TransferError, match="'a' is expanded here.*clone"):
        td.recv(0)
    assert (td == 0).all()


def test_expanded_destination(two: Ranks) -> None:
    two.run(_expanded)


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
    """Entries in another order, or in a lazy stack on one side only."""
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


def _subset(rank: int) -> None:
    """Groups of some of the ranks, whose ranks in the group are others than the global ones."""
    group = dist.new_group([1, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    if rank == 3:
        plain(1).send(1, group=group)
        plain(2).send(group=group, group_dst=0)
        plain(3).init_remote(1, group)
        plain(4).isend(1, group=group, return_early=True)[0].wait()
        plain(5).isend(group=group, group_dst=0, init_tag=4, return_early=True)[0].wait()
        asyncio.run(plain(6).asend(1, group=group))
    elif rank == 1:
        target = plain(0)
        target.recv(3, group=group)
        assert holds(target, 1)
        target.recv(group=group, group_src=1)
        assert holds(target, 2)
        assert holds(TensorDict.from_remote_init(3, group), 3)
        target.irecv(group=group, group_src=1)
        assert holds(target, 4)
        assert target.irecv(3, group=group, init_tag=4, return_premature=True)[0].wait() is target
        assert holds(target, 5)
        asyncio.run(target.arecv(3, group=group))
        assert holds(target, 6)
        with pytest.raises(ValueError, match=r"dst is the global rank 2, but the group has the ranks \[1, 3\]"):
            target.send(2, group=group)
        with pytest.raises(ValueError, match="src is rank 2 of a group of 2"):
            target.recv(group=group, group_src=2)
    else:
        for call in (lambda: plain().send(1, group=group), lambda: plain().recv(1, group=group)):
            with pytest.raises(ValueError, match="this rank is not in the group"):
                call()
    # Ranks 0 and 2 are a column, and 2 is rank 1 of it.
    column = mesh["rows"]
    target = plain(rank)
    target.send(rank + 2, group=column) if rank < 2 else target.recv(group=column, group_src=0)
    assert holds(target, rank % 2)


def test_groups_of_some_ranks(four: Ranks) -> None:
    four.run(_subset)


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
        # The tags of both sides need not agree.
        assert plain(9).isend(1, consolidated=True, init_tag=5) == 8
        plain(10).isend(1, consolidated=True, pseudo_rand=True, return_early=True)[0].wait()
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
    assert target.irecv(0, consolidated=True) is None
    assert holds(target, 9)
    assert target.irecv(0, consolidated=True, init_tag=3, return_premature=True)[0].wait() is target
    assert holds(target, 10)


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
        with pytest.raises(TransferError, match="'a'"):
            plain(1).exclude("a").isend(1)
        plain(1).exclude("a").isend(1, return_early=True)
        time.sleep(0.5)
        with pytest.raises(TransferError, match="an isend before this call failed.*'a'"):
            plain(1).send(1)
        plain(1).send(1)
        return
    target = plain(0)
    for _ in range(2):
        with pytest.raises(TransferError, match="'a'"):
            target.recv(0)
    target.recv(0)


def test_isend_that_nobody_waits_for(two: Ranks) -> None:
    two.run(_late_error)


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
        with pytest.raises(TypeError, match="init_tag is an int, got float"):
            call(1 - rank, init_tag=1.0)
        with pytest.raises(TypeError, match="group is a process group, a device mesh or None, got str"):
            call(1 - rank, group="gloo")
        with pytest.raises(TypeError, match="group_.* is a rank of the group and an int, got str"):
            call(group=dist.group.WORLD, **{"group_dst" if call in (td.send, td.isend) else "group_src": "1"})
    with pytest.raises(ValueError, match="pass group too"):
        td.send(group_dst=1 - rank)
    dist.barrier()


def test_arguments(two: Ranks) -> None:
    two.run(_arguments)


def test_without_a_process_group() -> None:
    for call in (lambda: plain().send(1), lambda: plain().all_reduce()):
        with pytest.raises(ValueError, match="init_process_group"):
            call()
