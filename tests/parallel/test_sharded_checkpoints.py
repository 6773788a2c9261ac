"""Checkpoints of FSDP2 modules: all ranks write one folder, and any number of ranks loads it."""

from __future__ import annotations

import json
import os
import pathlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, die
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tensordict import load, load_checkpoint, save_checkpoint
from tensordict.core.exceptions import SaveError, StateError, TransferError, UnsupportedEntryError

pytestmark = pytest.mark.seconds

FILES = ["checkpoint.json", "rank-00000.tdz", "rank-00001.tdz", "shards-00000.tdz", "shards-00001.tdz"]


def make(sharded: bool = True, width: int = 5) -> dict[str, Any]:
    torch.manual_seed(1)
    # Five rows on two ranks: the parts have unequal sizes.
    net = nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 1))
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return {"model": net, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(run: dict[str, Any], steps: int = 2) -> list[float]:
    """Train on data that is equal on all ranks, so that their number makes no difference."""
    losses = []
    for step in range(steps):
        loss = (run["model"](torch.arange(12.0).view(4, 3) / 10) - step).pow(2).mean()
        loss.backward()
        run["optimizer"].step()
        run["scheduler"].step()
        run["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


def save(rank: int, path: str, early: bool = False, steps: int = 3, keep: int | None = None) -> list[float]:
    """Save after some steps; the losses of the next steps, which do not reach the checkpoint."""
    run = make()
    train(run, steps)
    random.seed(rank)
    saved: Any = save_checkpoint(path, **run, step=steps, rank=rank, return_early=early, keep=keep)
    losses = train(run)
    return losses if not early or isinstance(saved.result(30), pathlib.Path) else []


def resume(rank: int, path: str, sharded: bool = True) -> tuple[list[float], Any, float]:
    """Load into a new run; the losses of the next steps, the values and a random number."""
    run = make(sharded)
    random.seed(7)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        values = load_checkpoint(path, **run)
    values["warned"] = any("random number" in str(warning.message) for warning in found)
    return train(run), values, random.random()


def drawn(seed: int) -> float:
    return random.Random(seed).random()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(1, tmp_path_factory.mktemp("one"))
    yield ranks
    ranks.close()


@pytest.mark.parametrize("early", [False, True])
def test_any_number_of_ranks_resumes(two: Ranks, one: Ranks, early: bool, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "saved")
    losses = two.run(save, path, early)[0]
    assert sorted(os.listdir(path)) == FILES and os.listdir(tmp_path) == ["saved"]
    for rank, found in enumerate(two.run(resume, path)):
        assert found == (pytest.approx(losses), {"step": 3, "rank": rank, "warned": False}, drawn(rank))
    for found in (*one.run(resume, path), resume(0, path, sharded=False)):
        assert found == (pytest.approx(losses), {"step": 3, "rank": 0, "warned": True}, drawn(7))


def save_plainly(rank: int, path: str) -> list[float]:
    run = make(sharded=False)
    train(run, 3)
    if rank == 0:
        save_checkpoint(path, **run, step=3)
    dist.barrier()
    return train(run)


def test_ranks_load_a_checkpoint_of_one_process(two: Ranks, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "saved")
    losses = two.run(save_plainly, path)[0]
    assert all(found[0] == pytest.approx(losses) for found in two.run(resume, path))


def save_often(rank: int, path: str) -> None:
    run = make()
    for step in range(4):
        train(run, 1)
        save_checkpoint(path, **run, step=step, keep=2)


def test_old_ones_are_removed(two: Ranks, tmp_path: pathlib.Path) -> None:
    two.run(save_often, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]
    assert two.run(resume, str(tmp_path))[1][1]["step"] == 3
    # The files of others stay.
    notes = tmp_path / "step-00000003" / "notes.txt"
    notes.write_text("mine")
    two.run(save, str(tmp_path), False, 7, 1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000007"]
    assert notes.read_text() == "mine" and os.listdir(notes.parent) == ["notes.txt"]
    assert load_checkpoint(tmp_path, rng=False)["step"] == 7


def die_while_saving(rank: int, path: str) -> str:
    run = make()
    train(run, 1)
    if rank == 1:
        from tensordict.parallel import sharded_checkpoints

        sharded_checkpoints.RankParts.__init__ = lambda self: die()  # type: ignore[method-assign, misc]
    try:
        save_checkpoint(path, **run, step=9)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_dies_leaves_the_old_checkpoint(tmp_path: pathlib.Path) -> None:
    ranks = Ranks(2, tmp_path, timeout=5)
    path = str(tmp_path / "saved")
    losses = ranks.run(save, path)[0]
    assert "Error" in ranks.run(die_while_saving, path, dies=1)[0]
    ranks.close()
    assert sorted(os.listdir(path)) == FILES
    assert resume(0, path, sharded=False)[:2] == (pytest.approx(losses), {"step": 3, "rank": 0, "warned": True})


def load_what_does_not_fit(rank: int, path: str) -> tuple[str, bool]:
    run = make(width=6 if rank == 1 else 5)
    before = [value.to_local().clone() for value in run["model"].state_dict().values()]
    try:
        load_checkpoint(path, **run)
    except TransferError as error:
        after = [value.to_local() for value in run["model"].state_dict().values()]
        return str(error), all(map(torch.equal, before, after))
    return "", False


def test_what_does_not_fit_one_rank_is_loaded_by_none(two: Ranks, tmp_path: pathlib.Path) -> None:
    two.run(save, str(tmp_path / "saved"))
    for message, is_unchanged in two.run(load_what_does_not_fit, str(tmp_path / "saved")):
        assert "rank 1" in message and "'model' does not fit" in message and "0.weight" in message
        assert is_unchanged
    with pytest.raises(StateError, match="'optimizer' does not fit.*parameter 0 of group 0 has shape"):
        load_checkpoint(tmp_path / "saved", optimizer=make(False, width=6)["optimizer"])


def break_header(path: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = json.loads((path / "checkpoint.json").read_text())
    change(header)
    (path / "checkpoint.json").write_text(json.dumps(header))


WEIGHT = "('model', '0.weight')"
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "another file": lambda header: header["tensors"][WEIGHT]["chunks"][0].__setitem__(2, "../../x.tdz"),
    "outside": lambda header: header["tensors"][WEIGHT]["chunks"][0][0].__setitem__(0, -1),
    "beyond": lambda header: header["tensors"][WEIGHT]["chunks"][1][0].__setitem__(0, 4),
    "too few": lambda header: header["tensors"][WEIGHT]["chunks"].pop(),
    "twice": lambda header: header["tensors"][WEIGHT]["chunks"].append(header["tensors"][WEIGHT]["chunks"][0]),
    "too large": lambda header: header["tensors"][WEIGHT].__setitem__("size", [10**9, 10**9]),
    "no size": lambda header: header["tensors"][WEIGHT].__setitem__("size", "x"),
    "no dtype": lambda header: header["tensors"][WEIGHT].__setitem__("dtype", "torch.nn"),
    "no tensor": lambda header: header["tensors"].pop(WEIGHT),
    "no tensors": lambda header: header.pop("tensors"),
    "no ranks": lambda header: header.pop("ranks"),
    "many ranks": lambda header: header.__setitem__("ranks", "x"),
    "no kinds": lambda header: header.__setitem__("kinds", [1]),
    "another version": lambda header: header.__setitem__("version", 2),
}


@pytest.fixture(scope="module")
def saved(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("saved") / "x"
    two.run(save, str(path))
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_descriptions_that_nobody_wrote(name: str, saved: pathlib.Path) -> None:
    good = (saved / "checkpoint.json").read_text()
    run = make(False)
    before = [value.clone() for value in run["model"].state_dict().values()]
    try:
        break_header(saved, HOSTILE[name])
        with pytest.raises((SaveError, StateError), match=r"checkpoint|'model'"):
            load_checkpoint(saved, **run, rng=False)
    finally:
        (saved / "checkpoint.json").write_text(good)
    assert all(map(torch.equal, before, run["model"].state_dict().values()))


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_cut_off(name: str, saved: pathlib.Path) -> None:
    good = (saved / name).read_bytes()
    run = make(False)
    try:
        (saved / name).write_bytes(good[: len(good) // 2])
        if name == "rank-00001.tdz":
            load_checkpoint(saved, **run, rng=False)
            return
        with pytest.raises(SaveError, match=name):
            load_checkpoint(saved, **run, rng=False)
    finally:
        (saved / name).write_bytes(good)


def test_nothing_in_the_folder_is_a_pickle(saved: pathlib.Path) -> None:
    assert load(saved / "rank-00001.tdz")["rank"] == 1
    for path in saved.iterdir():
        assert path.read_bytes()[:2] in (b"PK", b'{"')


def save_refused(rank: int, path: str) -> str:
    run = make()
    try:
        save_checkpoint(path, **run, bad=object())
    except UnsupportedEntryError as error:
        return str(error)
    return ""


def test_a_value_that_cannot_be_saved(two: Ranks, tmp_path: pathlib.Path) -> None:
    assert all("'bad' cannot be saved: a object" in found for found in two.run(save_refused, str(tmp_path / "saved")))
    assert not list(tmp_path.iterdir())
