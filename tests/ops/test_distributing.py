"""Scattering containers over the ranks of a process group, in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tensordict import TensorDict, lazy_stack


def _parts() -> list[Any]:
    first = TensorDict(
        {
            "a": torch.arange(3, dtype=torch.int16),
            "b": {"c": torch.rand(3, 2).bfloat16(), "flag": torch.tensor([1, 0, 1]).bool()},
        },
        [3],
        names=["time"],
    )
    second = lazy_stack([TensorDict({"x": torch.full((5,), float(i))}) for i in range(2)])
    return [first, second]


def _rank(rank: int, folder: str, case: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    parts = _parts()
    try:
        if case == "too few":
            with pytest.raises(ValueError, match="one container for each of the 2 ranks, got 1"):
                TensorDict().scatter(1, parts[:1] if rank == 1 else None)
        elif case == "no container":
            with pytest.raises(TypeError, match="got Tensor at position 1"):
                TensorDict().scatter(1, [parts[0], torch.zeros(1)] if rank == 1 else None)
        else:
            got = TensorDict().scatter(1, parts if rank == 1 else None)
            if rank == 1:
                assert got is parts[1]
            else:
                assert type(got) is TensorDict
                assert got.batch_size == (3,)
                assert got.names == ["time"]
                assert got["b", "c"].dtype == torch.bfloat16
                assert (got == parts[0]).all()
            swapped = TensorDict().scatter(1, parts[::-1] if rank == 1 else None)
            assert rank == 1 or torch.equal(swapped["x"], parts[1]["x"])
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["parts", "too few", "no container"])
def test_scatter(case: str, tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path), case), nprocs=2)
