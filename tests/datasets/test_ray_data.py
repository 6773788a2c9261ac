"""Data sets as sources of Ray Data: a real instance, started here."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

# A warning of Ray's about its own future, at the start of workers; before Ray is imported.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch

from tensordict import DatasetWriter, TensorDict, open_dataset
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.datasets import to_ray

# Ray Data warns about versions of its own dependencies.
pytestmark = [pytest.mark.seconds, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    yield
    ray.shutdown()


def test_each_shard_is_a_block(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "data", rows_per_shard=4) as writer:
        rows = TensorDict({"x": torch.arange(10), "in": {"y": torch.ones(10, 2, 3)}}, [10])
        rows["name"] = [f"n{i}" for i in range(10)]
        writer.extend(rows)
    found = to_ray(open_dataset(tmp_path / "data"))
    assert found.count() == 10 and found.materialize().num_blocks() == 3
    rows_there = sorted(found.take_all(), key=lambda row: row["x"])
    assert [row["x"] for row in rows_there] == list(range(10)) and rows_there[7]["name"] == "n7"
    assert rows_there[0]["in.y"].shape == (2, 3)
    doubled = found.map_batches(lambda batch: {"z": batch["x"] * 2}).take_all()
    assert sorted(row["z"] for row in doubled) == list(range(0, 20, 2))
    with pytest.raises(TypeError, match="open_dataset"):
        to_ray(rows)
    with DatasetWriter(tmp_path / "ragged", ragged=["t"]) as writer:
        writer.append(TensorDict(t=torch.zeros(3)))
    with pytest.raises(UnsupportedEntryError, match="'t' is ragged"):
        to_ray(open_dataset(tmp_path / "ragged"))
