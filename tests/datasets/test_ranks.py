"""Epochs that are shared out among the ranks of `torch.distributed`: real processes, over gloo."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import pathlib
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.datasets import DatasetLoader, compact

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo"),
    # Of Python's, from 3.12 on: other tests have threads at work, which these processes do not use.
    pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning"),
]

FORK = multiprocessing.get_context("fork")
ROWS, BATCH = 103, 4


def train(rank: int, ranks: int, folder: pathlib.Path, run: str, dies_after: int) -> None:
    """An epoch of one rank, which goes on from a checkpoint if there is one, and is killed after some batches.

    Every second batch, once all ranks have had it, rank 0 saves the state, and which rows each rank has had is written.
    """
    dist.init_process_group("gloo", init_method=f"file://{folder}/init-{run}", rank=rank, world_size=ranks)
    loader = DatasetLoader(open_dataset(folder / "data"), BATCH, seed=11)
    assert (loader.rank, loader.ranks) == (rank, ranks)
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    seen: list[int] = []
    for number, batch in enumerate(loader, 1):
        seen += batch["x"].tolist()
        if number % 2 == 0:
            (folder / f"{run}-{rank}.json").write_text(json.dumps(seen))
            dist.barrier()
            if rank == 0:
                checkpoint.with_suffix(".new").write_text(json.dumps(loader.state_dict()))
                os.replace(checkpoint.with_suffix(".new"), checkpoint)
            dist.barrier()
        if number == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{run}-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def run_all(ranks: int, folder: pathlib.Path, run: str, dies_after: int = 0) -> list[list[int]]:
    """The rows that each rank has had, up to the last checkpoint where it was killed."""
    processes = [FORK.Process(target=train, args=(rank, ranks, folder, run, dies_after)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == (-signal.SIGKILL if dies_after else 0)
    return [json.loads((folder / f"{run}-{rank}.json").read_text()) for rank in range(ranks)]


def test_ranks_resume_in_mid_epoch_after_a_kill(tmp_path: pathlib.Path) -> None:
    writer = DatasetWriter(tmp_path / "data", rows_per_shard=10)
    writer.extend(TensorDict(x=torch.arange(ROWS), batch_size=[ROWS]))
    writer.flush()
    whole = run_all(2, tmp_path, "whole")
    assert sorted(itertools.chain(*whole)) == list(range(ROWS)) and not set(whole[0]) & set(whole[1])
    (tmp_path / "checkpoint.json").unlink()
    # A kill after batch 5 leaves the checkpoint of batch 4. The next run has more ranks, the last run has one.
    parts = run_all(2, tmp_path, "first", dies_after=5)
    assert [len(part) for part in parts] == [4 * BATCH] * 2
    writer.extend(TensorDict(x=torch.arange(ROWS, ROWS + 9), batch_size=[9]))
    writer.close()
    compact(tmp_path / "data", rows_per_shard=40)
    parts += run_all(3, tmp_path, "second", dies_after=3)
    parts += run_all(1, tmp_path, "third")
    assert sorted(itertools.chain(*parts)) == list(range(ROWS))


def test_ranks_that_are_told(tmp_path: pathlib.Path) -> None:
    data: Any = TensorDict(x=torch.arange(5), batch_size=[5])
    with pytest.raises(ValueError, match="rank 2 is none of 2"):
        DatasetLoader(data, 1, rank=2, ranks=2)
