"""Saves of containers of `DTensor` leaves: whole, written once, and in parts by `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tensordict import TensorDict, lazy_stack, tensorclass
from tensordict.core.exceptions import SaveError, TransferError, UnsupportedEntryError

pytestmark = pytest.mark.seconds

WEIGHT = torch.arange(30.0).reshape(10, 3)
SUFFIXES = ["", ".tdz", ".consolidated", ".safetensors", ".h5"]


@tensorclass
class Layer:
    weight: Tensor
    label: str


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(1, tmp_path_factory.mktemp("one"))
    yield ranks
    ranks.close()


def mesh_of_all(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def sharded(factor: float = 1.0, dim: int = 0) -> TensorDict:
    """A container of each kind of leaf, with parts of unequal sizes."""
    mesh = mesh_of_all()

    def part(value: Tensor) -> DTensor:
        return distribute_tensor(value * factor, mesh, [Shard(dim)])

    return TensorDict(
        {
            "nested": {"w": part(WEIGHT), "all": distribute_tensor(WEIGHT[0] * factor, mesh, [Replicate()])},
            "layer": Layer(weight=part(WEIGHT + 1), label="first", batch_size=[]),
            "stack": lazy_stack([TensorDict({"w": part(WEIGHT + 2)}), TensorDict({"w": part(WEIGHT + 3)})]),
            "plain": torch.ones(2) * factor,
            "note": "step 7",
        }
    )


def whole() -> TensorDict:
    return TensorDict(
        {
            "nested": {"w": WEIGHT, "all": WEIGHT[0]},
            "layer": Layer(weight=WEIGHT + 1, label="first", batch_size=[]),
            "stack": lazy_stack([TensorDict({"w": WEIGHT + 2}), TensorDict({"w": WEIGHT + 3})]),
            "plain": torch.ones(2),
            "note": "step 7",
        }
    )


def holds(td: Any, expected: TensorDict) -> bool:
    assert set(td.keys(True, True)) == set(expected.keys(True, True))
    assert not any(isinstance(leaf, DTensor) for leaf in td._leaves())
    same = all(torch.equal(td.get(key)[...], expected.get(key)) for key in expected.exclude("note").keys(True, True))
    return same and td["note"] == expected["note"]


def resharded(td: Any, dim: int) -> TensorDict:
    """Load a container over the current ranks. Each rank reads its own part."""
    mesh = mesh_of_all()
    return td.apply(
        lambda leaf: distribute_tensor(leaf, mesh, [Shard(dim if leaf.ndim > dim else 0)], src_data_rank=None)
    )


# --- whole tensors, written once --------------------------------------------------------------------------------------


def _save_whole(rank: int, folder: str, suffix: str) -> None:
    path = f"{folder}/saved{suffix}"
    td = sharded()
    td["writer"] = torch.tensor(rank)
    saved = td.save(path, full_tensor=True)
    assert saved["writer"] == 0
    assert holds(saved.exclude("writer"), whole())
    assert all(isinstance(leaf, DTensor) for leaf in td.select("nested")._leaves())
    if hasattr(saved, "close"):
        saved.close()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_rank_saves_whole_tensors(two: Ranks, suffix: str, tmp_path: pathlib.Path) -> None:
    if suffix == ".h5":
        pytest.importorskip("h5py")
    two.run(_save_whole, str(tmp_path), suffix)
    assert holds(TensorDict.load(tmp_path / f"saved{suffix}").exclude("writer").to_tensordict(), whole())
    assert len(list(tmp_path.iterdir())) == 1


def _methods(rank: int, folder: str) -> None:
    td = sharded()
    saved = td.memmap(f"{folder}/folder", full_tensor=True, checksum=True, num_threads=2)
    assert holds(saved, whole()) and saved.saved_path == pathlib.Path(folder, "folder")
    block = td.consolidate(f"{folder}/block", full_tensor=True)
    assert holds(block, whole()) and block.is_consolidated()
    # Without a path each rank has a copy of its own.
    anonymous = td.memmap(full_tensor=True)
    assert holds(anonymous, whole()) and anonymous.is_memmap()
    block = td.consolidate(full_tensor=True)
    assert holds(block, whole()) and block.is_consolidated()
    # Containers without DTensors are saved by the rank that makes the call.
    plain = whole().memmap(f"{folder}/plain{rank}", full_tensor=True)
    assert holds(plain, whole()) and plain.is_locked


def test_memmap_and_consolidate(two: Ranks, tmp_path: pathlib.Path) -> None:
    two.run(_methods, str(tmp_path))


def _parameters(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    expected = TensorDict.from_module(net).data.clone()
    fully_shard(net, mesh=mesh_of_all())
    for name, as_module in (("plain", False), ("module", True)):
        params = TensorDict.from_module(net, as_module=as_module)
        saved = params.save(f"{folder}/{name}", full_tensor=True)
        assert (saved == expected).all()
        assert all(leaf.requires_grad for leaf in params._leaves())


def test_parameters_of_sharded_modules(two: Ranks, tmp_path: pathlib.Path) -> None:
    two.run(_parameters, str(tmp_path))


def _several_meshes(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    local = DTensor.from_local(WEIGHT / 2, mesh["copies"], [Partial()])
    td = TensorDict(
        {
            "row": distribute_tensor(WEIGHT, mesh["parts"], [Shard(1)]),
            "both": distribute_tensor(WEIGHT, mesh, [Replicate(), Shard(0)]),
            "sum": local,
        }
    )
    saved = td.save(f"{folder}/saved", full_tensor=True)
    assert all(torch.equal(leaf, WEIGHT) for leaf in saved._leaves())
    with pytest.raises(OSError if rank == 0 else TransferError, match="no folder"):
        td.save(f"{folder}/saved/row.memmap/no folder", full_tensor=True)


def test_meshes_of_two_dims_and_parts_of_them(four: Ranks, tmp_path: pathlib.Path) -> None:
    four.run(_several_meshes, str(tmp_path))


def _load_whole(rank: int, folder: str, dim: int) -> None:
    for suffix in ("", ".tdz", ".consolidated"):
        td = resharded(TensorDict.load(f"{folder}/saved{suffix}").exclude("writer"), dim)
        part = td["nested", "w"]
        assert (isinstance(part, DTensor) and part.to_local().numel() < WEIGHT.numel()) or dist.get_world_size() == 1
        assert holds(td.full_tensor(), whole())


@pytest.mark.parametrize(("before", "after"), [("two", "four"), ("four", "two"), ("two", "one")])
def test_whole_tensors_load_on_another_mesh(
    before: str, after: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    for suffix in ("", ".tdz", ".consolidated"):
        request.getfixturevalue(before).run(_save_whole, str(tmp_path), suffix)
    request.getfixturevalue(after).run(_load_whole, str(tmp_path), 1)


# --- parts, by torch.distributed.checkpoint ---------------------------------------------------------------------------


def _save_parts(rank: int, folder: str) -> None:
    td = sharded()
    dcp.save({"data": td.state_dict(values=True)}, checkpoint_id=f"{folder}/values")
    dcp.save({"data": td}, checkpoint_id=f"{folder}/parts")


def _load_parts(rank: int, folder: str) -> None:
    td = sharded(0.0, dim=1)
    part = td["nested", "w"]
    dcp.load({"data": td}, checkpoint_id=f"{folder}/parts")
    assert td["nested", "w"] is part and isinstance(part, DTensor)
    assert holds(td.full_tensor(), whole())
    td = sharded(0.0)
    td["note"] = "none"
    state = td.state_dict(values=True)
    dcp.load({"data": state}, checkpoint_id=f"{folder}/values")
    td.load_state_dict(state)
    assert holds(td.full_tensor(), whole())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("before", "after"), [("two", "four"), ("four", "two"), ("two", "one")])
def test_parts_load_on_another_mesh(
    before: str, after: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    request.getfixturevalue(before).run(_save_parts, str(tmp_path))
    request.getfixturevalue(after).run(_load_parts, str(tmp_path))


# --- what is refused, and what fails ----------------------------------------------------------------------------------


def _refused(rank: int, folder: str) -> None:
    td = sharded()
    calls: list[Callable[[], Any]] = [lambda suffix=suffix: td.save(f"{folder}/saved{suffix}") for suffix in SUFFIXES]
    calls += [td.memmap, td.memmap_, td.consolidate, lambda: td.memmap_like(f"{folder}/like")]
    calls += [lambda: td.consolidate(f"{folder}/block"), lambda: td.save(f"{folder}/table.parquet")]
    for call in calls:
        with pytest.raises(UnsupportedEntryError, match=r"nested.*full_tensor=True.*torch.distributed.checkpoint"):
            call()
    with pytest.raises(ValueError, match="return_early"):
        td.save(f"{folder}/early", return_early=True, full_tensor=True)
    with pytest.raises(ValueError, match="inplace"):
        td.consolidate(inplace=True, full_tensor=True)


def test_every_rank_refuses_sharded_leaves_alike(two: Ranks, tmp_path: pathlib.Path) -> None:
    two.run(_refused, str(tmp_path))
    assert not list(tmp_path.iterdir())


def _full_disk(rank: int, folder: str) -> None:
    td = sharded()
    td.save(f"{folder}/saved", full_tensor=True)
    td["large"] = distribute_tensor(torch.ones(1 << 16), mesh_of_all(), [Shard(0)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        for call in (
            lambda: td.save(f"{folder}/saved", full_tensor=True),
            lambda: td.save(f"{folder}/saved.tdz", full_tensor=True),
            lambda: td.consolidate(f"{folder}/block", full_tensor=True),
        ):
            with pytest.raises(OSError if rank == 0 else TransferError, match="File too large"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert holds(TensorDict.load(f"{folder}/saved"), whole())
    td.save(f"{folder}/again", full_tensor=True)


def test_a_full_disk_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    ranks.run(_full_disk, str(tmp_path), patience=30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "saved"]


def _elsewhere(rank: int, folder: str) -> None:
    """A rank that does not see the file system of the others."""
    td = sharded()
    os.makedirs(f"{folder}/{rank}")
    there = os.getcwd()
    os.chdir(f"{folder}/{rank}")
    try:
        with pytest.raises(TransferError if rank != 1 else FileNotFoundError, match="saved"):
            td.save("saved", full_tensor=True)
    finally:
        os.chdir(there)


def test_a_rank_that_cannot_load_is_an_error_on_all_ranks(two: Ranks, tmp_path: pathlib.Path) -> None:
    two.run(_elsewhere, str(tmp_path), patience=30)
    assert holds(TensorDict.load(tmp_path / "0" / "saved"), whole())


def _unlike(rank: int, folder: str) -> None:
    td = sharded()
    with pytest.raises(TransferError, match="saved0.*saved1|saved1.*saved0"):
        td.save(f"{folder}/saved{min(rank, 1)}", full_tensor=True)
    other = td.exclude("layer") if rank == 1 else td
    with pytest.raises(TransferError, match="4 DTensors.*5 DTensors|5 DTensors.*4 DTensors"):
        other.save(f"{folder}/saved", full_tensor=True)
    mesh = mesh_of_all()
    with pytest.raises(TransferError, match="other names, shapes, dtypes or placements"):
        TensorDict(a=distribute_tensor(WEIGHT, mesh, [Shard(int(rank == 1))])).save(f"{folder}/saved", full_tensor=True)
    long = TensorDict({"n" * 2000: distribute_tensor(WEIGHT, mesh, [Shard(0)])})
    assert long.consolidate(f"{folder}/long", full_tensor=True).is_consolidated()


def test_ranks_that_save_different_things(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    ranks.run(_unlike, str(tmp_path), patience=30)
    assert [path.name for path in tmp_path.iterdir()] == ["long"]


def test_sparse_leaves_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SaveError, match="entry 'a'.*sparse"):
        TensorDict(a=torch.eye(2).to_sparse()).consolidate(tmp_path / "block")
    assert not list(tmp_path.iterdir())
