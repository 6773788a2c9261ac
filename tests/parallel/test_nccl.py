"""Containers on GPUs over NCCL: one rank for each GPU of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tensordict import TensorDict

pytestmark = [pytest.mark.gpu, pytest.mark.seconds]


def _made(number: float, device: Any) -> TensorDict:
    """Small and large tensors on a GPU, one on the CPU, and a value."""
    return TensorDict(
        {
            "small": torch.full((3,), float(number), device=device),
            "large": torch.full((100_000,), float(number), device=device),
            "host": torch.full((5,), int(number)),
            "note": "here",
        }
    )


def _rank(rank: int, count: int, folder: str, backend: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=count)
    td = _made(rank + 1, device)
    td.all_reduce()
    total = count * (count + 1) / 2
    assert td["large"].device == device
    assert td["host"].device.type == "cpu"
    assert all((td[key] == total).all() for key in ("small", "large", "host"))
    for other, got in enumerate(_made(rank, device).all_gather()):
        assert all((got[key] == other).all() for key in ("small", "large", "host"))
        assert got["note"] == "here"
    got = (_made(7, device) if rank == 0 else TensorDict()).broadcast(0, device=device)
    assert (got["large"] == 7).all()
    if count > 1 and rank < 2:
        td = _made(rank, device)
        td.send(0) if rank == 1 else td.recv(1)
        assert all((td[key] == 1).all() for key in ("small", "large", "host"))
        sent = td.isend(1 - rank, return_early=True)
        other = _made(0, device)
        received = other.irecv(1 - rank, return_premature=True)
        for transfer in sent + received:
            transfer.wait()
        assert (other["large"] == 1).all()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_over_nccl(tmp_path: Path, backend: str) -> None:
    count = torch.cuda.device_count()
    mp.spawn(_rank, (count, str(tmp_path), backend), nprocs=count)
