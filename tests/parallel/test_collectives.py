"""Collective calls between real processes over gloo: every verb, option and mismatch."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exchanged import MISFITS, Odd, holds, kinds, plain, ragged, same
from ranks import Ranks
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass
from tensordict.core.exceptions import SaveError, TransferError
from tensordict.parallel import wire

pytestmark = pytest.mark.seconds


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


def _broadcast_and_fill(rank: int) -> None:
    td = plain(rank)
    before, leaf = td.clone(), td["a"]
    got = td.broadcast(1)
    assert same(td, before) and same(got, plain(1)) and td["a"] is leaf
    td.update_(got)
    assert same(td, plain(1)) and td["a"] is leaf


def test_broadcast_returns_what_it_got_and_fills_nothing(two: Ranks) -> None:
    two.run(_broadcast_and_fill)


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


def _in_buckets(rank: int) -> None:
    """Count the reductions, and check their results; a leaf that is not contiguous, and one of no elements."""

    def make_leaves() -> TensorDict:
        leaves = {f"k{i}": torch.full((10,), rank + 1.0) for i in range(6)}
        more = {"i": torch.full((4,), rank + 1), "big": torch.full((1000,), rank + 1.0), "none": torch.zeros(0)}
        return TensorDict({**leaves, **more, "t": torch.full((3, 2), rank + 1.0).T})

    for size, count in ((1, 9), (80, 6), (104, 5), (4000, 3), (1e9, 2), (None, 2)):
        td = make_leaves()
        works = td.all_reduce(async_op=True, bucket_bytes=size)
        assert len(works) == count, (size, len(works))
        assert all(work.wait() for work in works)
        assert (td == 3).all()
        td = make_leaves()
        assert td.reduce(1, bucket_bytes=size) is None
        assert (td == (3 if rank else 1)).all()
    with pytest.raises(ValueError, match="bucket_bytes is a positive number of bytes, got 0"):
        td.all_reduce(bucket_bytes=0)
    with pytest.raises(TransferError, match=r"called all_reduce\(op=SUM, bucket_bytes=[89]\), and rank"):
        td.all_reduce(bucket_bytes=8 + rank)


def test_reductions_in_buckets(two: Ranks) -> None:
    two.run(_in_buckets)


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


def _reduce_expanded(rank: int) -> None:
    """The elements of a leaf share memory on all ranks, and that memory does not change."""
    for call, writes in ((TensorDict.all_reduce, True), (lambda td: td.reduce(1), rank == 1)):
        memory = torch.full((5,), rank + 1.0)
        columns = torch.arange(2.0).add(rank)
        td = TensorDict(
            {
                "a": memory[:1].expand(3),
                "b": columns[:, None].expand(2, 3),
                "c": torch.tensor(rank + 1.0).expand(1),
                "stack": lazy_stack(
                    [TensorDict(a=torch.full((1,), rank + 1.0).expand(3)), TensorDict(a=torch.ones(3))]
                ),
            }
        )
        call(td)
        assert td["a"].tolist() == [10.0 if writes else rank + 1.0] * 3 and td["a"].stride() == (0,)
        assert memory[1:].tolist() == [rank + 1.0] * 4
        assert td["b"].tolist() == ([[6.0] * 3, [10.0] * 3] if writes else [[0.0 + rank] * 3, [1.0 + rank] * 3])
        assert td["c"].tolist() == [10.0 if writes else rank + 1.0]
        assert td["stack", "a"].tolist() == ([[10.0] * 3, [4.0] * 3] if writes else [[rank + 1.0] * 3, [1.0] * 3])


def test_reduce_expanded_leaves(four: Ranks) -> None:
    four.run(_reduce_expanded)


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
    expanded = TensorDict(a=torch.zeros(1).expand(3) if rank == 2 else torch.zeros(3))
    with pytest.raises(TransferError, match=r"'a'.*\[3\] expanded along \[0\] on rank 2"):
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


# --- with two and with four -------------------------------------------------------------------------------------------


def _every_kind(rank: int) -> None:
    """Every verb on containers of every kind."""
    count = dist.get_world_size()
    for name in [*kinds(), "ragged"]:

        def made(number: int, name: str = name) -> Any:
            return ragged(number) if name == "ragged" else kinds(number)[name]

        last = count - 1
        got = (made(5) if rank == last else TensorDict()).broadcast(last)
        assert same(got, made(5)), name
        assert all(same(td, made(other)) for other, td in enumerate(made(rank).all_gather())), name
        parts = [made(other) for other in range(count)]
        got = TensorDict().scatter(0, parts if rank == 0 else None)
        assert same(got, made(rank)) and (got is parts[0]) == (rank == 0), name
        rows = lazy_stack([made(9)] * (count - 1)).clone()
        found = (rows if rank == 0 else made(rank)).gather_and_stack(0)
        assert found is (rows if rank == 0 else None)
        if rank == 0:
            assert all(same(row, made(other + 1)) for other, row in enumerate(rows.unbind(0))), name


def test_every_kind(ranks: Ranks) -> None:
    ranks.run(_every_kind, patience=40)


def _without_pickle(rank: int) -> None:
    """Every verb, in processes that cannot load a pickle."""
    loads, unpickler = pickle.loads, distributed_c10d._unpickler
    pickle.loads = distributed_c10d._unpickler = _no_pickle
    try:
        _every_kind(rank)
        td = plain(rank).exclude("flag", "columns")
        td.all_reduce()
        td.reduce(0)
        if rank == 0:
            td.send(1)
        elif rank == 1:
            td.recv(0)
        with pytest.raises(TransferError, match="'zz'"):
            (td if rank else td.exclude("a")).set("zz", torch.ones(3, dtype=torch.bool)).all_reduce()
    finally:
        pickle.loads, distributed_c10d._unpickler = loads, unpickler


def _no_pickle(*args: Any) -> Any:
    raise AssertionError("what came from the network was about to be unpickled")


def test_nothing_is_unpickled(ranks: Ranks) -> None:
    ranks.run(_without_pickle, patience=40)


_REDUCTIONS = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.sum(0) / len(x),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "BAND": lambda x: _bitwise(torch.bitwise_and, x),
    "BOR": lambda x: _bitwise(torch.bitwise_or, x),
    "BXOR": lambda x: _bitwise(torch.bitwise_xor, x),
}
_INTS = [torch.int8, torch.uint8, torch.int32, torch.int64]
_FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _bitwise(call: Any, column: torch.Tensor) -> torch.Tensor:
    result = column[0]
    for other in column[1:]:
        result = call(result, other)
    return result


def _operations(rank: int) -> None:
    """Every operation on every dtype that it takes; what it does not take changes nothing."""
    count = dist.get_world_size()

    def made(rank: int, dtypes: list[torch.dtype]) -> TensorDict:
        numbers = torch.arange(6) % 3 + rank + 1
        return TensorDict(
            {f"{str(dtype)[6:]}{size}": numbers.repeat(size).to(dtype) for dtype in dtypes for size in (1, 50_000)}
        )

    for name, expected in _REDUCTIONS.items():
        op = getattr(dist.ReduceOp, name)
        takes = _INTS if name.startswith("B") else _FLOATS if name == "AVG" else _INTS + _FLOATS
        takes = takes + ([torch.complex64, torch.complex128] if name in ("SUM", "AVG") else [])
        everything = [made(other, takes) for other in range(count)]
        for dst in (None, count - 1):
            td = made(rank, takes)
            td.all_reduce(op) if dst is None else td.reduce(dst, op)
            for key, value in td.items():
                column = torch.stack([other[key] for other in everything])
                wanted = expected(column).to(value.dtype) if dst in (None, rank) else everything[rank][key]
                torch.testing.assert_close(value, wanted, msg=f"{name} of {key}")
        for dtype in {torch.int64, torch.float32, torch.complex64, torch.bool} - {*takes}:
            # The key comes last, so that a call that does not look first has changed the rest.
            td = made(rank, takes).set("zz", torch.ones(2, dtype=dtype))
            before = td.clone()
            with pytest.raises(TransferError, match=rf"'zz' is {str(dtype)[6:]} .*does not reduce so \({name}\)"):
                td.all_reduce(op)
            assert same(td, before)


def test_every_operation(ranks: Ranks) -> None:
    ranks.run(_operations, patience=40)


def _odd_operations(rank: int) -> None:
    td = TensorDict({"a": torch.full((2,), rank + 1.0), "z": torch.full((2,), 1j)})
    td.all_reduce(dist.ReduceOp(dist.ReduceOp.SUM))
    assert td["a"].tolist() == [3, 3] and td["z"].tolist() == [2j, 2j]
    before = td.clone()
    with pytest.raises(TypeError, match="ReduceOp.SUM, got 'sum'"):
        td.all_reduce("sum")
    with pytest.raises(TypeError, match="got <RedOpType.PREMUL_SUM"):
        td.all_reduce(dist.ReduceOp.PREMUL_SUM)
    td = td.exclude("z")
    with pytest.raises(TransferError, match="all_reduce: .*PREMUL_SUM"):
        td.all_reduce(dist._make_nccl_premul_sum(2.0))
    # One that only one rank gets wrong, and calls that differ.
    with pytest.raises((TypeError, TransferError), match="got 'sum'"):
        td.all_reduce("sum" if rank == 0 else None)
    with pytest.raises(TransferError, match=r"called all_reduce\(op=M(AX\), and rank 1 .*MIN|IN\), and rank 0 .*MAX)"):
        td.all_reduce(dist.ReduceOp.MIN if rank else dist.ReduceOp.MAX)
    with pytest.raises(
        TransferError, match=r"called reduce\(op=SUM, dst=(0\), and rank 1 .*1\)|1\), and rank 0 .*0\))"
    ):
        td.reduce(rank)
    assert (td == before.exclude("z")).all()


def test_operations_that_ranks_do_not_agree_on(two: Ranks) -> None:
    two.run(_odd_operations)


def _waited_for(rank: int) -> None:
    """A reduction that nobody waits for in time is there when it is asked for."""
    td = TensorDict({"small": torch.ones(3), "large": torch.ones(300_000)})
    works = td.all_reduce(async_op=True)
    end = time.monotonic() + 5
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < end
    assert (td == dist.get_world_size()).all()
    assert all(work.wait() and work.is_completed() for work in works)


def test_reductions_can_be_polled(ranks: Ranks) -> None:
    ranks.run(_waited_for)


def _memory_mapped(rank: int, folder: str) -> None:
    """In place means in the file."""
    count = dist.get_world_size()
    td = plain(rank + 1).exclude("flag", "columns", ("b", "deep")).memmap_(f"{folder}/reduced{count}{rank}")
    td.all_reduce()
    assert (TensorDict.load_memmap(f"{folder}/reduced{count}{rank}") == count * (count + 1) / 2).all()
    if rank == 0:
        rows = torch.stack([plain(0)] * (count - 1)).memmap_(f"{folder}/rows{count}")
        rows.gather_and_stack(0)
        for row, loaded in enumerate(TensorDict.load_memmap(f"{folder}/rows{count}")):
            assert holds(loaded, row + 1)
    else:
        plain(rank).gather_and_stack(0)


def test_memory_mapped_destinations(ranks: Ranks, tmp_path: Any) -> None:
    ranks.run(_memory_mapped, str(tmp_path))


# --- groups and arguments ---------------------------------------------------------------------------------------------


def _subset(rank: int) -> None:
    """A group with its own numbers of ranks, and ranks outside the group."""
    group = dist.new_group([1, 3])
    td = plain(rank).exclude("flag", "columns", ("b", "deep"))
    calls = {
        "broadcast": lambda rank=3: td.broadcast(rank, group=group),
        "all_gather": lambda: td.all_gather(group=group),
        "all_reduce": lambda: td.all_reduce(group=group),
        "reduce": lambda rank=3: td.reduce(rank, group=group),
        "gather_and_stack": lambda rank=3: td.unsqueeze(0).gather_and_stack(rank, group),
        "scatter": lambda rank=3: td.scatter(rank, group=group),
        "init_remote": lambda: td.init_remote(3, group),
        "from_remote_init": lambda: TensorDict.from_remote_init(3, group, use_broadcast=True),
    }
    if rank in (0, 2):
        for call in calls.values():
            with pytest.raises(ValueError, match="this rank is not in the group"):
                call()
        return
    for name in ("broadcast", "reduce", "gather_and_stack", "scatter"):
        for wrong in (0, 7, -1):
            with pytest.raises(ValueError, match=rf"the global rank {wrong}, but the group has the ranks \[1, 3\]"):
                calls[name](wrong)
        for wrong in (None, "1", True):
            with pytest.raises(TypeError, match="is the rank of a process and an int, got"):
                calls[name](wrong)
    assert (td.broadcast(3, group=group) == 3).all()
    assert (td.scatter(3, [td * 2, td] if rank == 3 else None, group=group) == (6 if rank == 1 else 3)).all()
    if rank == 3:
        td.clone().init_remote(group=group, use_broadcast=True)
        rows = td.clone().unsqueeze(0)
        assert (rows.gather_and_stack(3, group) == 1).all()
    else:
        assert (TensorDict.from_remote_init(3, group, use_broadcast=True) == 3).all()
        assert td.gather_and_stack(3, group) is None
    td.reduce(3, group=group)
    assert (td == (4 if rank == 3 else 1)).all()


def test_groups_of_some_ranks(four: Ranks) -> None:
    four.run(_subset)


def _meshes(rank: int) -> None:
    flat = init_device_mesh("cpu", (4,))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    td = TensorDict({"a": torch.full((2,), float(rank))})
    assert [int(got["a"][0]) for got in td.all_gather(group=flat)] == [0, 1, 2, 3]
    assert [int(got["a"][0]) for got in td.all_gather(group=mesh["rows"])] == [rank % 2, rank % 2 + 2]
    assert int(td.broadcast(rank // 2 * 2, group=mesh["columns"])["a"][0]) == rank // 2 * 2
    last = rank % 2 + 2
    rows = torch.stack([td]) if rank == last else td
    rows.gather_and_stack(last, mesh["rows"])
    assert rank != last or int(rows["a"][0, 0]) == rank - 2
    for call in (td.all_reduce, td.all_gather):
        with pytest.raises(ValueError, match=r"2 dims is not a process group: pass mesh\[name\]"):
            call(group=mesh)
    half = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        td.all_reduce(group=half)
        assert (td == 1).all()
    else:
        with pytest.raises(ValueError, match="this rank is not in the device mesh"):
            td.all_reduce(group=half)


def test_device_meshes(four: Ranks) -> None:
    four.run(_meshes)


# --- what cannot be taken ---------------------------------------------------------------------------------------------


def _not_taken(rank: int) -> None:
    """An error of one rank is raised on all."""
    count = dist.get_world_size()
    last = count - 1

    def calls(td: Any, **options: Any) -> list[Any]:
        return [
            lambda: (td if rank == 0 else TensorDict()).broadcast(0, **options),
            lambda: td.all_gather(**options),
            lambda: TensorDict().scatter(0, [td] * count if rank == 0 else None, **options),
        ]

    if rank == 0:
        hidden = tensorclass(type("Hidden", (), {"__annotations__": {"x": torch.Tensor}}))
        td = hidden(x=torch.ones(2), batch_size=[2])
    else:
        td = TensorDict({"x": torch.ones(2)})
    for number, call in enumerate(calls(td)):
        with pytest.raises(TransferError, match="Hidden.*not known to this program") as caught:
            call()
        if rank == 0:
            expected = "rank 1 of the group did not take" if number < 2 else "rank 1 of the group did not take what was"
            assert expected in str(caught.value)
    for call in calls(TensorDict({"odd": NonTensorData(Odd(4))}), allow_pickle=True):
        call()
    td = TensorDict({"odd": NonTensorData(Odd(4))})
    for call in calls(td, allow_pickle=rank != last)[:2]:
        with pytest.raises((TransferError, SaveError), match="'odd'"):
            call()
    # Everything is in step after all of that.
    assert (TensorDict({"x": torch.ones(2) * rank}).broadcast(last) == last).all()


def test_what_one_rank_cannot_take(ranks: Ranks) -> None:
    ranks.run(_not_taken)


def _no_memory(rank: int) -> None:
    """The last rank has no memory for what the others take."""
    last = dist.get_world_size() - 1
    td = TensorDict({"x": torch.full((300_000,), float(rank))})
    fresh = wire.new_bytes

    def short(nbytes: int, device: torch.device) -> torch.Tensor:
        return fresh(1 << 60 if nbytes == 1_200_000 else nbytes, device)

    for call in (lambda: td.broadcast(0), td.all_gather):
        if rank == last:
            wire.new_bytes = short
        try:
            with pytest.raises(TransferError, match="from rank 0" if rank == last else f"rank {last} of the group"):
                call()
        finally:
            wire.new_bytes = fresh
    assert (td.broadcast(0) == 0).all()


def test_one_rank_without_memory(ranks: Ranks) -> None:
    ranks.run(_no_memory)


def _scatter_misfit(rank: int) -> None:
    count = dist.get_world_size()
    parts = [plain(other) for other in range(count)]
    for bad, kind, message in (
        (parts[:1], ValueError, f"one container for each of the {count} ranks, got 1"),
        (None, ValueError, "got none"),
        ([parts[0]] * (count - 1) + [torch.zeros(1)], TypeError, f"got Tensor at position {count - 1}"),
    ):
        with pytest.raises(TransferError if rank else kind, match=message):
            TensorDict().scatter(0, bad if rank == 0 else None)
    parts[1] = TensorDict({"bad": torch.eye(2).to_sparse()})
    if rank < 2:
        with pytest.raises(TransferError if rank else SaveError, match="'bad'.*cannot be sent"):
            TensorDict().scatter(0, parts if rank == 0 else None)
    else:
        assert holds(TensorDict().scatter(0), rank)
    got = TensorDict().scatter(0, [plain(7)] * count if rank == 0 else None, device="cpu")
    assert holds(got, 7) and (got.device is None) == (rank == 0)


def test_scatter_that_does_not_fit(ranks: Ranks) -> None:
    ranks.run(_scatter_misfit)
