"""A rank that sends a container and ends; another one that takes it late, or never.

python leaving.py RANK FILE HOW    # HOW is one of WAYS, with "-never" behind it for a receiver that ends at once
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tensordict import TensorDict

LENGTH = 2_000_000
kept: list[object] = []


def main(rank: int, file: str, how: str) -> None:
    dist.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=10))
    dist.barrier()
    td = TensorDict(a=torch.full((LENGTH,), float(rank)), b=torch.arange(3))
    way, _, never = how.partition("-")
    if rank == 0:
        time.sleep(0.5)
        if not never:
            td.recv(1)
            print(td["a"].unique().tolist())
    elif way == "plain":
        print("tag", td.isend(0))
    else:
        handle = td.isend(0, return_early=True)
        if way == "kept":
            kept.append(handle)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
