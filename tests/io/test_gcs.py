"""Saves at `gs://`: byte ranges and networks that fail. Other files test the rest."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from remote_server import DROP, FAIL, REFUSE, SHORT, Fault, Proxy

from tensordict import DatasetWriter, TensorDict, load, open_dataset
from tensordict.core.exceptions import SaveError
from tensordict.io.remote.urls import Remote

# aiohttp says so of what gcsfs does, of more than a mebibyte.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
Bucket = tuple[str, Proxy, dict[str, Any]]
COUNT = 50_000


def make() -> TensorDict:
    numbers = torch.arange(COUNT)
    return TensorDict(a=numbers, b={"c": numbers * 2.0, "word": "w"}, last=numbers[:, None].expand(-1, 4))


def same(one: Any, other: Any) -> bool:
    return bool((one == other).all())


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_only_what_is_asked_for_is_fetched(gcs_bucket: Bucket, name: str, tmp_path: pathlib.Path) -> None:
    url, proxy, options = gcs_bucket
    make().save(f"{url}/{name}", storage_options=options)
    proxy.clear()
    part = load(f"{url}/{name}", keys=["a"], storage_options=options, cache_dir=tmp_path)
    assert same(part, make().select("a")) and 8 * COUNT <= proxy.fetched("/download/") <= 8 * COUNT + 80_000
    proxy.clear()
    again = load(f"{url}/{name}", keys=["a"], storage_options=options, cache_dir=tmp_path)
    assert same(again, part) and proxy.fetched("/download/") == 0


def test_rows_of_a_data_set(gcs_bucket: Bucket) -> None:
    url, proxy, options = gcs_bucket
    with DatasetWriter(url, rows_per_shard=500, storage_options=options) as writer:
        writer.extend(TensorDict(x=torch.arange(1000)[:, None].expand(-1, 2048), batch_size=[1000]))
    data = open_dataset(url, storage_options=options)
    proxy.clear()
    assert data[[3, 999, 500]]["x"][:, 7].tolist() == [3, 999, 500]
    assert proxy.fetched("/download/") < 600_000


@pytest.mark.parametrize(("name", "kind"), [("x", FAIL), ("x.tdz", DROP), ("x.tdz", FAIL), ("x.tdz", SHORT)])
def test_a_network_that_fails(gcs_bucket: Bucket, name: str, kind: str) -> None:
    url, proxy, options = gcs_bucket
    proxy.faults = [Fault(DROP, "POST")]
    make().save(f"{url}/{name}", storage_options=options)
    assert not proxy.faults[0].times
    proxy.clear()
    proxy.faults = [Fault(kind, path="/download/", after=1)]
    assert same(load(f"{url}/{name}", storage_options=options), make())
    assert not proxy.faults[0].times


def test_what_is_final_is_named(gcs_bucket: Bucket) -> None:
    url, proxy, options = gcs_bucket
    make().save(f"{url}/x.tdz", storage_options=options)
    proxy.faults = [Fault(REFUSE, path="/download/", times=1000)]
    with pytest.raises(PermissionError, match=f"(?s)the server refuses it.*{url}/x.tdz"):
        load(f"{url}/x.tdz", storage_options=options)
    proxy.clear()
    with pytest.raises(FileNotFoundError, match=f"{url}/nothing"):
        load(f"{url}/nothing", storage_options=options)
    proxy.faults = [Fault(SHORT, path="/download/", times=1000)]
    with pytest.raises(SaveError, match=f"cannot read '{url}/x.tdz.*' after 3 attempts"):
        load(f"{url}/x.tdz", storage_options=options)


def test_large_files_go_in_parts(gcs_bucket: Bucket, tmp_path: pathlib.Path) -> None:
    url, proxy, options = gcs_bucket
    content = bytes(range(256)) * 40_000
    (tmp_path / "local").write_bytes(content)
    store = Remote(url, options)
    store.put("large", str(tmp_path / "local"), new=True)
    with pytest.raises(FileExistsError, match="large"):
        store.put("large", str(tmp_path / "local"), new=True)
    assert store.read("large") == content and store.read("large", -256) == content[:256]
    assert proxy.count("POST", "uploadType=resumable") >= 2
