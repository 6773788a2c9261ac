"""Data sets at URLs: `memory://`, and a real server of S3 behind a proxy that does what networks do."""

from __future__ import annotations

import itertools
import json
import pathlib
import pickle
import threading
import time
import uuid
from typing import Any

import pytest
import torch
from remote_server import CUT, DROP, FAIL, Fault, Proxy

from cases import mark_slow
from dataset_rows import assert_rows, rows
from tensordict import DatasetWriter, TensorDict, load, open_dataset, verify
from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.datasets import DatasetLoader, compact, tidy
from tensordict.datasets.location import Location, RemoteLocation
from tensordict.datasets.order import Order
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import Remote
from tensordict_cli.main import main

Bucket = tuple[str, Proxy, dict[str, Any]]


def flat(first: int, count: int) -> TensorDict:
    return TensorDict(x=torch.arange(first, first + count), batch_size=[count])


QUICK_PLACES = [("memory", "folder"), ("memory", "zarr"), ("s3", "archive"), ("gs", "archive")]


@pytest.mark.parametrize(
    ("where", "format"),
    mark_slow(
        [
            ("memory", "folder"),
            ("memory", "zarr"),
            ("s3", "archive"),
            ("gs", "archive"),
            ("gs", "folder"),
            ("gs", "zarr"),
        ],
        keep=[("memory", "folder"), ("memory", "zarr"), ("s3", "archive"), ("gs", "archive")],
    ),
)
def test_rows_go_in_and_come_out(request: pytest.FixtureRequest, where: str, format: str) -> None:
    url, options = f"memory://{uuid.uuid4().hex}/data", None
    if where != "memory":
        bucket, _, options = request.getfixturevalue("bucket" if where == "s3" else "gcs_bucket")
        url, options = f"{bucket}/some where", {**options, "allow_secrets": True}
    with pytest.raises(FileNotFoundError, match=f"nobody has flushed.*'{url}'"):
        open_dataset(url, storage_options=options)
    writer = DatasetWriter(url, rows_per_shard=4, format=format, storage_options=options)
    writer.extend(rows(0, 3))
    writer.extend(rows(3, 6))
    data = open_dataset(url, storage_options=options)
    assert len(data) == 8 and data.refresh() == 0
    view = data[6:]
    writer.append(rows(9, 1)[0])
    writer.close()
    assert data.refresh() == 2 and [count for _, count in data.shards()] == [4, 4, 2]
    assert_rows(data, list(range(10)))
    assert_rows(data[2:9:3], [2, 5, 8])
    assert_rows(data[torch.tensor([-1, 3, 0, 3])], [9, 3, 0, 3])
    assert_rows(data[data["number"] % 5 == 1], [1, 6])
    assert (
        view["number"].tolist() == [6, 7] and data[7]["name"] == "row 7" and data[7]["step"].obs.tolist() == [7.0] * 3
    )
    assert data.select(("in", "half"))[3:5].to_tensordict()["in", "half"].tolist() == [3, 4]
    assert_rows(pickle.loads(pickle.dumps(data)), list(range(10)))
    assert_rows(load(url, storage_options=options), list(range(10)))
    report = verify(url, storage_options=options)
    assert report.format == "dataset" and report.path == url and report.leaves == 6
    # Small shards are merged under readers that have opened them, or have not yet.
    late = open_dataset(url, storage_options=options)
    assert compact(url, rows_per_shard=6, storage_options=options) == (3, 2)
    assert compact(url, storage_options=options) == (2, 1)
    for reader in (data, late):
        assert_rows(reader, list(range(10)))
    assert tidy(url, older_than=0, storage_options=options) == ([], {})
    left = {file.name.split("/")[0] for file in Remote(url, options).files()}
    assert left == {"schema.json", "shards", "writers"} and len(list(late.shards())) == 1
    with pytest.raises(ValueError, match="mode"):
        open_dataset(url, mode="r+", storage_options=options)
    with pytest.raises(SaveError, match="reading only"):
        data[0:1] = data[0:1].to_tensordict()


def test_only_what_is_asked_for_is_fetched(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    big = TensorDict(x=torch.arange(4000).view(1000, 4), y=torch.rand(1000, 2048), batch_size=[1000])
    with DatasetWriter(url, rows_per_shard=500, storage_options=options) as writer:
        writer.extend(big)
    proxy.clear()
    data = open_dataset(url, storage_options=options)
    # The names of the folders of shards.
    assert proxy.fetched("shards") < 1000
    assert data[[7, 600]]["y"].tolist() == big["y"][[7, 600]].tolist()
    # Two rows of 8 KiB, and the index and the descriptions of two shards; not 8 MB.
    assert proxy.fetched("shards") < 1_000_000
    proxy.clear()
    assert data.select("x")[:]["x"].equal(big["x"]) and proxy.fetched("shards") < 300_000
    cached = open_dataset(url, storage_options=options, cache_dir=tmp_path)
    assert cached[40:60]["y"].equal(big["y"][40:60])
    proxy.clear()
    again = open_dataset(url, storage_options=options, cache_dir=tmp_path)
    assert again[45:60]["y"].equal(big["y"][45:60]) and proxy.fetched("shards") < 1000
    data.refresh()
    proxy.clear()
    assert data.refresh() == 0 and proxy.fetched() < 2000 and proxy.count("GET") == 1


@pytest.mark.parametrize("format", ["archive", "folder", "zarr"])
def test_shards_are_read_at_once(bucket: Bucket, format: str) -> None:
    url, proxy, options = bucket
    # The shards are too large to be fetched as a whole.
    big = TensorDict(x=torch.arange(120).view(120, 1), y=torch.rand(120, 16384), batch_size=[120])
    with DatasetWriter(url, rows_per_shard=30, format=format, storage_options=options) as writer:
        writer.extend(big)
    data = open_dataset(url, storage_options=options)
    lock, enough = threading.Lock(), threading.Event()
    waiting = most = 0

    def wait(method: str, path: str) -> None:
        nonlocal waiting, most
        with lock:
            waiting += 1
            most = max(most, waiting)
            if waiting == 4:
                enough.set()
        enough.wait(0.3)
        with lock:
            waiting -= 1

    proxy.before = wait
    # The first time shards are opened; then rows are read that did not come with that, in any order or one by one.
    for index in (torch.arange(1, 120, 30), torch.tensor([100, 14, 45, 75, 14]), slice(12, 120, 30)):
        enough.clear()
        most = 0
        assert data[index].to_tensordict()["y"].equal(big["y"][index]) and most >= 4


def test_rows_of_all_entries_of_a_large_shard_are_asked_for_at_once(bucket: Bucket) -> None:
    url, proxy, options = bucket
    big = TensorDict(y=torch.rand(90, 16384), z=torch.rand(90, 16384), batch_size=[90])
    with DatasetWriter(url, rows_per_shard=90, storage_options=options) as writer:
        writer.extend(big)
    data = open_dataset(url, storage_options=options)
    assert data[torch.tensor([50])]["y"].equal(big["y"][50:51])
    # Two rows that lie apart of each entry.
    proxy.clear()
    all_four = threading.Barrier(4)
    proxy.before = lambda method, path: all_four.wait(120)  # type: ignore[assignment]
    at = torch.tensor([80, 20])
    batch = data[at]
    assert batch["y"].equal(big["y"][at]) and batch["z"].equal(big["z"][at])
    assert [request[0] for request in proxy.requests] == ["GET"] * 4 and not all_four.broken


def test_loader_reads_large_shards_ahead(bucket: Bucket) -> None:
    url, proxy, options = bucket
    big = TensorDict(x=torch.arange(64), y=torch.rand(64, 16384), batch_size=[64])
    with DatasetWriter(url, rows_per_shard=32, storage_options=options) as writer:
        writer.extend(big)
    data = open_dataset(url, storage_options=options)
    proxy.clear()
    batches = iter(DatasetLoader(data, 16, shuffle=False, prefetch=0))
    rows = next(batches)["x"].tolist()
    until = time.monotonic() + 60
    while proxy.fetched("shards") < big["y"].nbytes and time.monotonic() < until:
        time.sleep(0.01)
    assert proxy.fetched("shards") >= big["y"].nbytes
    for batch in batches:
        assert batch["y"].equal(big["y"][batch["x"]])
        rows += batch["x"].tolist()
    # No row was fetched twice: the rest is the start and the end of each shard.
    assert rows == list(range(64)) and proxy.fetched("shards") < big["y"].nbytes + 300_000


def test_a_batch_of_shards_that_are_here_starts_no_threads(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _, options = bucket
    with DatasetWriter(url, rows_per_shard=10, storage_options=options) as writer:
        writer.extend(flat(0, 40))
    data = open_dataset(url, storage_options=options)
    at = torch.tensor([35, 2, 11, 20])
    assert data[at]["x"].equal(at)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread is started"))
    assert data[at]["x"].equal(at)


def test_a_small_shard_takes_one_request(bucket: Bucket) -> None:
    url, proxy, options = bucket
    big = TensorDict(
        x=torch.arange(300), y=torch.rand(300, 256), text=[str(row) for row in range(300)], batch_size=[300]
    )
    with DatasetWriter(url, rows_per_shard=30, storage_options=options) as writer:
        writer.extend(big)
    data = open_dataset(url, storage_options=options)
    proxy.clear()
    at = torch.tensor([299, 0, 31, 62, 35, 1])
    batch = data[at]
    assert batch["y"].equal(big["y"][at]) and batch["text"] == [str(row) for row in at.tolist()]
    # Four shards.
    assert [request[0] for request in proxy.requests] == ["GET"] * 4
    assert data[30:60]["y"].equal(big["y"][30:60]) and len(proxy.requests) == 4
    assert data[150]["x"] == 150 and len(proxy.requests) == 5
    # Writes to rows stay in memory, and a shard that does not belong here is refused.
    first, second = [shard.partition(url)[2].lstrip("/") for shard, _ in data.shards()][6:8]
    store = Remote(url, options)
    store.put(first, store.read(second))
    with pytest.raises(SaveError, match=f"{url}/{first}' says that it is the shard"):
        data[190]


@pytest.mark.parametrize("shuffle", [False, 3])
def test_loader_reads_shards_ahead(bucket: Bucket, shuffle: int) -> None:
    url, proxy, options = bucket
    big = TensorDict(x=torch.arange(240), y=torch.rand(240, 1024), batch_size=[240])
    with DatasetWriter(url, rows_per_shard=10, storage_options=options) as writer:
        writer.extend(big)
    data = open_dataset(url, storage_options=options)
    shard = 10 * (8 + 4096)

    def fetched() -> int:
        return proxy.count("GET", "shards/")

    # Three shards are mixed, and the next batches need at most these; then so many are read ahead.
    for read_ahead, most in ((1, 2 + shuffle), (4 * shard, 8 + 2 * shuffle), (100 * shard, 24)):
        data = open_dataset(url, storage_options=options)
        proxy.clear()
        batches = iter(DatasetLoader(data, 5, shuffle=shuffle, read_ahead=read_ahead, prefetch=0))
        rows = next(batches)["x"].tolist()
        until = time.monotonic() + (60 if most == 24 else 0.5)
        while fetched() < (24 if most == 24 else 99) and time.monotonic() < until:
            time.sleep(0.01)
        assert min(most, read_ahead // shard) <= fetched() <= most
        for batch in batches:
            assert batch["y"].equal(big["y"][batch["x"]])
            rows += batch["x"].tolist()
        # Each shard was fetched once.
        assert sorted(rows) == list(range(240)) and fetched() == 24
    # A failure reaches the batch that needs the shard.
    proxy.faults.append(Fault(FAIL, "GET", list(data.shards())[-1][0].rpartition("/")[2], times=99))
    with pytest.raises(SaveError, match=url):
        for _ in DatasetLoader(open_dataset(url, storage_options=options), 5, shuffle=shuffle):
            pass


def test_shards_of_zarr_are_read_ahead(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr_remote = pytest.importorskip("tensordict.io.stores.zarr_remote")
    url = f"memory://{tmp_path}/data"
    rows = TensorDict({"x": torch.arange(24), "y": torch.rand(24, 3)}, [24])
    with DatasetWriter(url, rows_per_shard=4, format="zarr") as writer:
        writer.extend(rows)
    read: list[str] = []
    get = zarr_remote.RemoteStore.get

    def note(self: Any, key: str, *arguments: Any) -> Any:
        if "/c/" in f"/{key}":
            read.append(f"{self._remote.url}/{key}")
        return get(self, key, *arguments)

    monkeypatch.setattr(zarr_remote.RemoteStore, "get", note)
    computed: list[int] = []
    compute = Order.batch
    monkeypatch.setattr(Order, "batch", lambda self, number: (computed.append(number), compute(self, number))[1])
    batches = iter(DatasetLoader(open_dataset(url), 3, shuffle=2, prefetch=0))
    first = next(batches)
    until = time.monotonic() + 60
    while len({key.rpartition("/c/")[0] for key in read}) < 12 and time.monotonic() < until:
        time.sleep(0.01)
    batches = [first, *batches]
    assert len({key.rpartition("/c/")[0] for key in read}) == 12 and len(read) == len(set(read))
    # The rows of each batch are computed once.
    assert computed == list(range(8))
    found = torch.cat([batch["x"] for batch in batches])
    assert found.sort().values.equal(rows["x"]) and torch.cat([batch["y"] for batch in batches]).equal(rows["y"][found])


def test_large_shards_are_read_ahead_in_pieces(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url, proxy, options = bucket
    monkeypatch.setattr("tensordict.io.remote.cache._PIECE", 400_000)
    big = TensorDict(x=torch.arange(60), y=torch.rand(60, 16384), z=torch.rand(60, 4096), batch_size=[60])
    with DatasetWriter(url, rows_per_shard=30, storage_options=options) as writer:
        writer.extend(big)
    data = open_dataset(url, storage_options=options).select("x", "y")
    proxy.clear()
    rows = list(DatasetLoader(data, 7, shuffle=False))
    assert torch.cat([batch["y"] for batch in rows]).equal(big["y"])
    # Five pieces of `y` of each shard, the ends and the starts; nothing of `z` but what lies at the end.
    assert proxy.count("GET", "shards/") <= 2 * 12 and proxy.fetched("shards/") < 60 * 4 * 16384 + 300_000


def test_manifests_are_read_at_once(bucket: Bucket) -> None:
    url, proxy, options = bucket
    with DatasetWriter(url, rows_per_shard=1, storage_options=options) as writer:
        writer.extend(flat(0, 12))
    lock, enough = threading.Lock(), threading.Event()
    waiting: list[str] = []

    def wait(method: str, path: str) -> None:
        if "jsonl" in path:
            with lock:
                waiting.append(path)
                if len(waiting) == 6:
                    enough.set()
            assert enough.wait(60)

    proxy.before = wait
    assert len(open_dataset(url, storage_options=options)) == 12 and len(waiting) == len(set(waiting)) == 12


def test_many_writers(bucket: Bucket) -> None:
    url, _, options = bucket

    def write(first: int) -> None:
        with DatasetWriter(url, rows_per_shard=2, storage_options=options) as writer:
            writer.extend(flat(first, 5))

    threads = [threading.Thread(target=write, args=(10 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    data = open_dataset(url, storage_options=options)
    assert sorted(data["x"].tolist()) == sorted(10 * n + i for n in range(4) for i in range(5))
    # Both began before there was a schema; the first one to flush makes it.
    first, second = (DatasetWriter(f"{url}/b", storage_options=options) for _ in range(2))
    first.extend(TensorDict(x=torch.zeros(1, 3), batch_size=[1]))
    second.extend(TensorDict(x=torch.zeros(1, 4), batch_size=[1]))
    first.close()
    with pytest.raises(SchemaError, match=r"'x'.*\[3\].*\[4\]"):
        second.close()
    assert len(open_dataset(f"{url}/b", storage_options=options)) == 1


@pytest.mark.parametrize("where", ["shards/", "writers/"])
@pytest.mark.parametrize("fault", [DROP, CUT, FAIL])
def test_faults_while_writing(bucket: Bucket, fault: str, where: str) -> None:
    """A fault that passes is not seen; one that does not leaves what was flushed, and the rest invisible."""
    url, proxy, options = bucket
    writer = DatasetWriter(url, rows_per_shard=100, storage_options=options)
    writer.extend(flat(0, 3))
    proxy.faults.append(Fault(fault, "PUT", where))
    writer.flush()
    data = open_dataset(url, storage_options=options)
    assert data["x"].tolist() == [0, 1, 2]
    writer.extend(flat(3, 4))
    proxy.faults.append(Fault(fault, "PUT", where, times=99))
    with pytest.raises(OSError, match=f"{url}/{where}"):
        writer.flush()
    # The server has done what it was asked for when its answer is lost: the rows are there, and only once.
    landed = fault == DROP and where == "writers/"
    assert open_dataset(url, storage_options=options)["x"].tolist() == list(range(7 if landed else 3))
    proxy.clear()
    writer.extend(flat(7, 1))
    writer.close()
    assert data.refresh() == 5 and data["x"].tolist() == list(range(8))


def test_faults_while_reading(bucket: Bucket) -> None:
    url, proxy, options = bucket
    with DatasetWriter(url, rows_per_shard=2, storage_options=options) as writer:
        writer.extend(flat(0, 6))
    data = open_dataset(url, storage_options=options)
    proxy.faults += [Fault(DROP, path="shards/"), Fault(FAIL, path="shards/")]
    assert data["x"].tolist() == list(range(6))
    proxy.faults.append(Fault(FAIL, path="00000001.tdz", times=99))
    other = open_dataset(url, storage_options=options)
    assert other[[0, 5]]["x"].tolist() == [0, 5]
    with pytest.raises(SaveError, match=rf"{url}/shards/.*00000001\.tdz"):
        other[[0, 2]]
    proxy.clear()
    # A shard that is gone, one that is damaged, a manifest that is cut short: each is named, the rest is there.
    store = Remote(url, options)
    names = [file.name for file in store.files("shards")]
    store.delete(names[:1])
    content = store.read(names[1])
    store.put(names[1], content[:-200] + bytes(200))
    other = open_dataset(url, storage_options=options)
    assert other[4:]["x"].tolist() == [4, 5]
    for row, error in ((0, FileNotFoundError), (2, SaveError)):
        with pytest.raises(error, match=names[row // 2]):
            other[row]
    report = verify(url, raises=False, storage_options=options)
    assert len(report.problems) == 2 and all(name in line for name, line in zip(names, report.problems))
    # A flush whose object is cut off, or gone: the lines before it stay, and nothing is removed.
    segments = [file.name for file in store.files("writers")]
    assert [name.rpartition("/")[2] for name in segments] == [
        f"{n:08}-{m:08}.jsonl" for n, m in ((0, 0), (0, 1), (1, 2), (2, 3))
    ]
    content = store.read(segments[3])
    store.put(segments[3], content[:-7])
    with pytest.warns(UserWarning, match=f"{url}/{segments[3]}.*cut off"):
        assert len(open_dataset(url, storage_options=options)) == 4
    store.put(segments[3], content)
    store.delete([segments[2]])
    with pytest.warns(UserWarning, match="lacks its lines 1 to 1"):
        assert len(open_dataset(url, storage_options=options)) == 2
    swept = tidy(url, older_than=-60, storage_options=options)
    assert swept.removed == [] and len(swept.left) == 2


def test_what_was_left_is_tidied(bucket: Bucket) -> None:
    url, _, options = bucket
    with DatasetWriter(url, storage_options=options) as writer:
        writer.extend(flat(0, 2))
    store = Remote(url, options)
    name = store.files("shards")[0].name
    # A writer that is killed leaves a whole shard, or a part of a folder; a stranger leaves anything.
    folder = f"shards/{writer.writer}"
    store.put(f"{folder}/00000001.tdz", store.read(name))
    store.put(f"{folder}/00000002/x.memmap", b"12345678")
    store.put(f"{folder}/00000003/notes.txt", b"12345678")
    store.put("shards/of somebody/00000000.tdz", store.read(name))
    assert len(open_dataset(url, storage_options=options)) == 2
    assert tidy(url, storage_options=options).removed == []
    time.sleep(1.1)  # S3 tells whole seconds.
    swept = tidy(url, older_than=0, storage_options=options)
    assert swept.removed == [f"{url}/{folder}/00000002"] and len(swept.left) == 3
    store.put(".compacting", b"somebody")
    with pytest.raises(SaveError, match=rf"somebody.*{url}/\.compacting"):
        compact(url, storage_options=options)
    store.delete([".compacting"])
    named = f"{folder}/00000001.tdz"
    assert tidy(url, shards=[named], storage_options=options).removed == [f"{url}/{named}"]
    assert len(store.files("shards")) == 3


def test_no_object_is_put_twice_with_another_content(bucket: Bucket) -> None:
    """A request that arrives late brings what is there already: flushes that failed, and ones that came after them."""
    url, proxy, options = bucket
    store = Remote(url, options)
    seen: dict[str, bytes] = {}

    def look() -> None:
        for file in store.files():
            if not file.name.startswith(".compacting"):
                assert seen.setdefault(file.name, content := store.read(file.name)) == content

    writer = DatasetWriter(url, rows_per_shard=100, storage_options=options)
    number = 0
    for where in ("shards/", "writers/", "", "shards/", "writers/"):
        writer.extend(flat(number, 3))
        if where:
            proxy.faults.append(Fault(DROP, "PUT", where, times=99))
            with pytest.raises(OSError, match=url):
                writer.flush()
            proxy.clear()
            look()
            # Rows that come after it go to another shard.
            writer.extend(flat(number + 3, 2))
            number += 2
        number += 3
        writer.flush()
        look()
    writer.close()
    before = dict(seen)
    data = open_dataset(url, storage_options=options)
    assert data["x"].tolist() == list(range(number))
    compact(url, storage_options=options)
    look()
    # The manifest is one object by now; an old request that arrives changes nothing.
    assert len(store.files(f"writers/{writer.writer}")) == 1
    for name, content in before.items():
        if store.find(name) is None:
            store.put(name, content)
    for late in (data, open_dataset(url, storage_options=options)):
        assert late["x"].tolist() == list(range(number)) and late.problems == []
    assert verify(url, storage_options=options).ok
    compact(url, storage_options=options)
    assert len(store.files(f"writers/{writer.writer}")) == 1


def test_compaction_that_fails_changes_nothing(bucket: Bucket) -> None:
    url, proxy, options = bucket
    for first in (0, 2):
        with DatasetWriter(url, storage_options=options) as writer:
            writer.extend(flat(first, 2))
    for fault in (Fault(CUT, "PUT", "shards/", 99), Fault(FAIL, "PUT", "writers/", 99)):
        proxy.faults.append(fault)
        with pytest.raises(OSError, match=url):
            compact(url, storage_options=options)
        proxy.clear()
        assert open_dataset(url, storage_options=options)["x"].tolist() == [0, 1, 2, 3]
    assert compact(url, storage_options=options) == (2, 1)


def test_a_data_set_is_copied_from_a_url_to_a_folder(tmp_path: pathlib.Path) -> None:
    url, folder = f"memory://{uuid.uuid4().hex}/data", tmp_path / "data"
    for first in (0, 6):
        with DatasetWriter(url, rows_per_shard=2) as writer:
            writer.extend(flat(first, 6))
    store = Remote(url)
    for file in store.files():
        (folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.name).write_bytes(store.read(file.name))
    assert open_dataset(folder)["x"].tolist() == list(range(12)) and verify(folder).ok
    with DatasetWriter(folder, rows_per_shard=2) as writer:
        writer.extend(flat(12, 2))
    assert compact(folder) == (7, 1) and tidy(folder, older_than=0) == ([], {})
    assert open_dataset(folder)["x"].tolist() == list(range(14)) and verify(folder).ok


def test_a_file_in_the_place_of_the_folder_of_a_writer_holds_no_shards() -> None:
    place = RemoteLocation(f"memory://{uuid.uuid4().hex}/data", Access())
    Remote(place.root).put("shards/writer", b"odd")
    assert place.list_items("writer") == []


def test_training(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    url, _, options = bucket
    with DatasetWriter(url, rows_per_shard=7, storage_options=options) as writer:
        writer.extend(flat(0, 30))
    data = open_dataset(url, storage_options=options, cache_dir=tmp_path)
    assert data[:3]["x"].tolist() == [0, 1, 2]
    # Workers are forked while fsspec has threads at work.
    loader = DatasetLoader(data, 4, seed=3, num_workers=2)
    batches = iter(loader)
    seen = [next(batches)["x"].tolist() for _ in range(3)]
    again = DatasetLoader(open_dataset(url, storage_options=options), 4)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    rest = [batch["x"].tolist() for batch in again]
    assert sorted(itertools.chain(*seen, *rest)) == list(range(30))
    made = data.map_into(f"{url}/twice", lambda batch: batch * 2, batch_size=8, storage_options=options)
    assert made["x"].tolist() == list(range(0, 60, 2))


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/data"
    with DatasetWriter(url, rows_per_shard=2) as writer:
        writer.extend(rows(0, 5))
    assert main(["inspect", url, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dataset" and report["root"]["batch_size"] == [5] and report["bytes_on_disk"] > 1000
    assert main(["verify", url]) == 0 and "sound" in capsys.readouterr().out
    assert main(["compact", url]) == 0 and "3 shards, now 1" in capsys.readouterr().out
    assert main(["tidy", url]) == 0 and capsys.readouterr().out == ""
    assert main(["convert", url, f"{tmp_path}/x.tdz"]) == 0
    assert_rows(load(f"{tmp_path}/x.tdz"), list(range(5)))
    assert main(["convert", f"{tmp_path}/x.tdz", f"{url}-2", "--to", "dataset"]) == 0
    assert main(["diff", url, f"{url}-2"]) == 0
    assert main(["convert", f"{tmp_path}/x.tdz", url, "--to", "dataset"]) == 2
    assert "exists already" in capsys.readouterr().err
    with pytest.raises(ValueError, match="archive"):
        DatasetWriter(url, format="archive", checksum=True)
    TensorDict(x=torch.zeros(2)).save(f"{url}-3")
    with pytest.raises(SaveError, match=f"'{url}-3'.*something else"):
        DatasetWriter(f"{url}-3")


def test_what_was_fetched_of_the_shards_that_were_used_last_is_kept(bucket: Bucket) -> None:
    url, proxy, options = bucket
    with DatasetWriter(url, rows_per_shard=1, storage_options=options) as writer:
        writer.extend(TensorDict(x=torch.arange(6), batch_size=[6]))
    data = open_dataset(url, storage_options=options)
    for number in range(6):
        assert data[number]["x"] == number
    proxy.clear()
    assert data[0]["x"] == 0 and proxy.count("GET") == 0


def test_a_line_of_a_manifest_replaces_no_other_object() -> None:
    place = Location.of(f"memory://{uuid.uuid4().hex}")
    assert isinstance(place, RemoteLocation)
    place.put_new("writers/id/00000000-00000001.jsonl", b"one")
    place.put_new("writers/id/00000000-00000001.jsonl", b"one")
    with pytest.raises(SaveError, match="there is another object at .*00000000-00000001"):
        place.put_new("writers/id/00000000-00000001.jsonl", b"another")
    assert Remote(place.root).read("writers/id/00000000-00000001.jsonl") == b"one"
