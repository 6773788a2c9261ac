"""Saves behind URLs: what is fetched, what a cache keeps, uploads as commits, and networks that fail."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from remote_server import DROP, FAIL, SHORT, SLOW, Fault, Proxy

import tensordict
from tensordict import DatasetWriter, RemoteCache, TensorDict, TensorDictParams, lazy_stack, load, load_memmap, verify
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.opening import describe_save
from tensordict.io.remote.cache import CachedFile, LocalCopies, merge_ranges, subtract_ranges
from tensordict.io.remote.remote_saves import Access, RemoteArchive, RemoteSave
from tensordict.io.remote.urls import Remote
from tensordict.io.saving.comparing import open_source, read_piece
from tensordict.io.specification import LeafSpec, walk
from tensordict_cli.runners import main

pytest.importorskip("h5py")
Bucket = tuple[str, Proxy, dict[str, Any]]
LARGE = 100_000
# Not forked: threads of the clients and of torch are at work here.
SPAWN = multiprocessing.get_context("spawn")


def make(value: int = 0) -> TensorDict:
    """A container of all that the formats have; its two large leaves are 400 kB each."""
    return TensorDict(
        {
            "first": torch.arange(LARGE).float() + value,
            "b": {
                "c": torch.full((3,), value),
                "text": f"value {value}",
                "rest": {"d": torch.ones(2, dtype=torch.int8)},
            },
            "last": torch.arange(LARGE, dtype=torch.int32) * 3 + value,
            "name a/b.memmap": torch.zeros(()),
        }
    )


def rich() -> TensorDict:
    rows = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(5.0)], layout=torch.jagged)
    stack = lazy_stack([TensorDict(x=torch.zeros(2 + number), y={"z": torch.ones(1)}) for number in range(2)])
    return TensorDict({"rows": rows, "stack": stack, "word": ["a", "b"], "none": torch.zeros(2, 0)}, [2])


def small(value: int) -> TensorDict:
    return TensorDict(a=torch.full((100,), value), b={"c": torch.full((3,), value)}, last=torch.full((1,), value))


def same(one: Any, other: Any) -> bool:
    return bool((one == other).all()) and one.batch_size == other.batch_size


# --- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_what_is_saved_is_loaded(base: str, name: str) -> None:
    for number, td in enumerate((make(), rich())):
        url = f"{base}/{number}/{name}"
        saved = td.save(url)
        assert type(saved) is TensorDict
        for back in (saved, load(url), load_memmap(url), TensorDict.load(url)):
            if number:
                assert [row.tolist() for row in back["rows"].unbind()] == [[0, 1], [0, 1, 2, 3, 4]]
                assert same(back["stack"], td["stack"]) and back["word"] == ["a", "b"] and back["none"].shape == (2, 0)
            else:
                assert same(back, td) and back["b", "text"] == "value 0"
    assert load_memmap(f"{base}/0/{name}", subpath="b/rest")["d"].tolist() == [1, 1]
    assert list(load(f"{base}/0/{name}", keys=[("b", "c")]).keys(True, True)) == [("b", "c")]
    assert load(f"{base}/0/{name}", device="meta")["first"].is_meta
    out = TensorDict()
    assert load_memmap(f"{base}/0/{name}", out=out) is out and same(out, make())
    assert same(TensorDict().load_memmap_(f"{base}/0/{name}"), make())
    params = TensorDictParams(TensorDict(d=torch.zeros(2)))
    TensorDict(d=torch.ones(2)).save(f"{base}/2/{name}")
    assert params.load_memmap_(f"{base}/2/{name}")["d"].tolist() == [1, 1]
    with pytest.raises(KeyError, match=f"no entry 'nothing' in '{base}/0/{name}"):
        load(f"{base}/0/{name}", keys=["nothing"])
    with pytest.raises(ValueError, match=f"r\\+.*{base}"):
        load_memmap(f"{base}/0/{name}", mode="r+")


def test_other_formats(base: str) -> None:
    td = make()
    td.to_safetensors(f"{base}/x.safetensors")
    td.consolidate(f"{base}/x.consolidated")
    with td.to_h5(f"{base}/x.h5") as written:
        assert written["b", "c"].tolist() == [0, 0, 0]
    for name in ("x.safetensors", "x.consolidated", "x.h5"):
        assert same(load(f"{base}/{name}").to_tensordict(), td)
        assert verify(f"{base}/{name}").ok
        assert describe_save(f"{base}/{name}")[0] in ("safetensors", "consolidated", "h5")
    assert same(tensordict.from_safetensors(f"{base}/x.safetensors"), td)
    assert same(tensordict.from_consolidated(f"{base}/x.consolidated"), td)
    with tensordict.from_h5(f"{base}/x.h5") as opened:
        assert same(opened.to_tensordict(), td)
    with pytest.raises(SaveError, match="is read-only"):
        tensordict.from_h5(f"{base}/x.h5", mode="r+")
    saves: list[Callable[..., object]] = [td.to_safetensors, td.consolidate, td.to_h5]
    for name, save in zip(("x.safetensors", "x.consolidated", "x.h5"), saves):
        with pytest.raises(SaveError, match=f"there is a file at '{base}/{name}' already: pass overwrite=True"):
            save(f"{base}/{name}")
        save(f"{base}/{name}", overwrite=True)


def test_nothing_is_named(base: str) -> None:
    for call in (load, load_memmap, verify, describe_save, tensordict.from_safetensors, tensordict.from_consolidated):
        with pytest.raises(FileNotFoundError, match=f"no save at this URL.*{base}/nothing"):
            call(f"{base}/nothing")
    Remote(base).put("other", b"some other file")
    with pytest.raises(SaveError, match=f"'{base}/other' is of no format"):
        load(f"{base}/other")


def test_mapped_tensors_are_private(base: str, tmp_path: pathlib.Path) -> None:
    for name in ("x", "x.tdz"):
        saved = make().save(f"{base}/{name}")
        saved["first"].fill_(7)
        first = load(f"{base}/{name}", cache_dir=tmp_path)
        first["first"].fill_(7)
        first["b", "c"].fill_(7)
        assert same(load(f"{base}/{name}", cache_dir=tmp_path), make())
        assert same(load(f"{base}/{name}"), make())


def _total(given: Any, queue: Any) -> None:
    queue.put(float(given.get()["last"].sum()))


def test_loaded_containers_go_to_other_processes() -> None:
    url = f"memory://{uuid.uuid4().hex}/x"
    make().save(url)
    given, queue = SPAWN.Queue(), SPAWN.Queue()
    process = SPAWN.Process(target=_total, args=(given, queue))
    process.start()
    td = load(url)
    given.put(td)
    assert queue.get(timeout=60) == float(make()["last"].sum())
    process.join()


# --- what is fetched --------------------------------------------------------------------------------------------------


def test_an_entry_that_another_thread_locates_meanwhile_is_fetched_from_its_start() -> None:
    url = f"memory://{uuid.uuid4().hex}/x.tdz"
    TensorDict(a=torch.rand(100_000), b=torch.rand(100_000)).save(url)
    source = RemoteSave(url, Access()).source()
    assert isinstance(source, RemoteArchive)
    name, file = "a.memmap", source._file

    class Located(set[str]):
        def __contains__(self, name: object) -> bool:
            file.ensure([(0, 1000)])
            source.entries["a.memmap"] = source._index.locate(source.entries["a.memmap"])
            return name == "a.memmap"

    source._located = Located()
    source.fetch({name: [(0, 10_000)]})
    start = source.entries[name].start
    assert any(low <= start and start + 10_000 <= high for low, high in file._have)


def test_only_what_is_asked_for_is_fetched_of_an_archive(bucket: Bucket) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/x.tdz", storage_options=options)
    size = Remote(url, options).find("x.tdz").size  # type: ignore[union-attr]
    index = 70_000
    for keys, nbytes in (([("b", "c")], 0), (["last"], 4 * LARGE), (["first", "last"], 8 * LARGE)):
        proxy.clear()
        part = load(f"{url}/x.tdz", storage_options=options, keys=keys)
        assert nbytes <= proxy.fetched() <= nbytes + index
        assert part["b", "c"].tolist() == [0, 0, 0] if ("b", "c") in keys else same(part, make().select(*keys))
    proxy.clear()
    load(f"{url}/x.tdz", storage_options=options, device="meta")
    assert proxy.fetched() <= index
    proxy.clear()
    assert same(load(f"{url}/x.tdz", storage_options=options), make())
    # Its end, how it begins with the descriptions, and all the tensors in one request.
    assert proxy.count("GET") == 3 and proxy.count("HEAD") == 0 and size <= proxy.fetched() <= size + 2 * index


def test_both_ends_of_an_archive_are_asked_for_at_once(bucket: Bucket) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/x.tdz", storage_options=options)
    both = threading.Barrier(2)
    first = itertools.count()

    def wait(method: str, path: str) -> None:
        if next(first) < 2:
            both.wait(120)

    proxy.before = wait
    assert same(load(f"{url}/x.tdz", storage_options=options), make()) and not both.broken


def test_only_what_is_asked_for_is_fetched_of_a_folder(bucket: Bucket) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/x", storage_options=options)
    proxy.clear()
    part = load(f"{url}/x", storage_options=options, keys=["first"])
    assert same(part, make().select("first"))
    assert proxy.count("GET", ".memmap") == 1 and proxy.fetched("last") == 0 and proxy.fetched("/b/") == 0
    proxy.clear()
    assert load(f"{url}/x", storage_options=options, keys=[("b", "c")])["b", "c"].tolist() == [0, 0, 0]
    assert proxy.count("GET", ".memmap") == 1 and proxy.fetched("memmap") == 24 and proxy.fetched("/text/") == 0
    proxy.clear()
    load(f"{url}/x", storage_options=options, device="meta")
    assert proxy.count("GET", ".memmap") == 0
    proxy.clear()
    load_memmap(f"{url}/x", storage_options=options, subpath="b")
    assert proxy.count("GET", ".memmap") == 2 and proxy.fetched("first") == 0


def test_inspecting_fetches_no_tensor(bucket: Bucket) -> None:
    url, proxy, options = bucket
    for name in ("x", "x.tdz"):
        make().save(f"{url}/{name}", storage_options=options)
        proxy.clear()
        format, root = describe_save(f"{url}/{name}", storage_options=options)
        assert format == ("archive" if name.endswith("z") else "directory") and proxy.fetched() < 80_000
        leaves = {key[-1]: node for key, node in walk(root) if isinstance(node, LeafSpec)}
        assert torch.equal(read_piece(open_source(leaves["last"]), ()), make()["last"])
        assert 4 * LARGE <= proxy.fetched() < 4 * LARGE + 80_000


def test_large_entries_come_in_pieces_at_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    url, proxy, options = bucket
    monkeypatch.setattr("tensordict.io.remote.cache._PIECE", 100_000)
    make().save(f"{url}/x.tdz", storage_options=options)
    busy: list[float] = []

    def slowly(method: str, path: str) -> None:
        if method == "GET":
            busy.append(time.monotonic())
            time.sleep(0.1)

    proxy.clear()
    proxy.before = slowly
    assert same(load(f"{url}/x.tdz", storage_options=options, keys=["first"]), make().select("first"))
    assert proxy.count("GET") == 1 + 5 or proxy.count("GET") == 2 + 5
    assert max(busy[-4:]) - min(busy[-4:]) < 0.1


@pytest.mark.parametrize("num_threads", [0, 3])
def test_compressed_archives(bucket: Bucket, num_threads: int) -> None:
    url, proxy, options = bucket
    td = TensorDict({str(number): torch.full((LARGE,), number) for number in range(4)})
    td.save(f"{url}/x.tdz", storage_options=options, compression="deflate")
    proxy.clear()
    assert same(load(f"{url}/x.tdz", storage_options=options, num_threads=num_threads), td)
    part = load(f"{url}/x.tdz", storage_options=options, keys=["2"], num_threads=num_threads)
    assert same(part, td.select("2")) and proxy.fetched() < 50_000


def test_many_small_neighbours_are_one_request(bucket: Bucket) -> None:
    url, proxy, options = bucket
    td = TensorDict({str(number): torch.full((1000,), number) for number in range(300)})
    td.save(f"{url}/x.tdz", storage_options=options)
    proxy.clear()
    part = load(f"{url}/x.tdz", storage_options=options, keys=[str(number) for number in range(100, 130)])
    assert part["117"].eq(117).all() and proxy.count("GET") <= 4
    assert proxy.fetched() < 120_000 + 30 * 8200 + 70_000


def test_ranges() -> None:
    assert merge_ranges([(5, 9), (0, 2), (2, 4), (3, 3)]) == [(0, 4), (5, 9)]
    assert merge_ranges([(0, 2), (4, 6), (9, 10)], gap=2) == [(0, 6), (9, 10)]
    assert subtract_ranges([(0, 10)], [(2, 4), (6, 7)]) == [(0, 2), (4, 6), (7, 10)]
    assert subtract_ranges([(0, 3), (5, 8)], [(0, 8)]) == [] and subtract_ranges([(0, 3)], []) == [(0, 3)]


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "x.tdz", "x.safetensors"])
def test_a_cache_keeps_what_was_fetched(bucket: Bucket, name: str, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket

    def save(value: int) -> None:
        method = "to_safetensors" if name.endswith("s") else "save"
        getattr(make(value), method)(f"{url}/{name}", storage_options=options, overwrite=True)

    # Another content is another file.
    for value in range(2):
        save(value)
        for _ in range(2):
            proxy.clear()
            assert same(load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path), make(value))
        assert proxy.count("GET", f"/{name}") == 0


def test_a_part_of_an_archive_is_kept(bucket: Bucket, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/x.tdz", storage_options=options)
    monkeypatch.setenv("TENSORDICT_CACHE_DIR", str(tmp_path))
    load(f"{url}/x.tdz", storage_options=options, keys=["first"])
    assert RemoteCache(tmp_path).nbytes < 5 * LARGE
    proxy.clear()
    assert same(load(f"{url}/x.tdz", storage_options=options), make())
    assert proxy.fetched() < 5 * LARGE


def damage(folder: pathlib.Path) -> None:
    for path in folder.glob("*.data"):
        content = path.read_bytes()
        path.write_bytes(bytes(byte ^ 0xFF for byte in content))


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_what_is_damaged_in_a_cache_is_fetched_again(bucket: Bucket, name: str, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/{name}", storage_options=options)
    load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path)
    damage(tmp_path)
    proxy.clear()
    assert same(load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path), make())
    assert proxy.fetched() > 8 * LARGE
    for path in tmp_path.glob("*.json"):
        path.write_text('[{"ranges": [[0, 99999999999, 1]]}]' if path.name < "8" else '{"ranges": [[0, "x"], 5]}')
    assert same(load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path), make())
    for path in tmp_path.glob("*.data"):
        os.truncate(path, 10)
    assert same(load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path), make())


def test_a_cache_evicts_what_was_not_used_for_longest(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    for number in range(3):
        TensorDict(a=torch.full((LARGE,), number)).save(f"{url}/{number}.tdz", storage_options=options)
    cache = RemoteCache(tmp_path, max_bytes=18 * LARGE)
    loaded = [load(f"{url}/{number}.tdz", storage_options=options, cache_dir=cache) for number in (0, 1, 0, 2)]
    assert 0 < cache.nbytes <= 18 * LARGE
    # Mapped files stay.
    assert [int(td["a"][5]) for td in loaded] == [0, 1, 0, 2]
    for number, fetched in ((0, False), (2, False), (1, True)):
        proxy.clear()
        load(f"{url}/{number}.tdz", storage_options=options, cache_dir=cache)
        assert (proxy.fetched() > 0) == fetched
    small = RemoteCache(tmp_path, max_bytes=0)
    assert int(load(f"{url}/1.tdz", storage_options=options, cache_dir=small)["a"][7]) == 1
    assert small.nbytes == 0 and list(tmp_path.glob("*.json")) == []
    with pytest.raises(ValueError, match="max_bytes"):
        RemoteCache(tmp_path, max_bytes=-1)


def _load_many(url: str, options: dict[str, Any], folder: str, queue: Any) -> None:
    td = load(url, storage_options=options, cache_dir=folder)
    queue.put(float(td["last"].sum()))


def test_processes_share_a_cache(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/x.tdz", storage_options=options)
    size = Remote(url, options).find("x.tdz").size  # type: ignore[union-attr]
    proxy.clear()
    queue = SPAWN.Queue()
    arguments = (f"{url}/x.tdz", options, str(tmp_path), queue)
    processes = [SPAWN.Process(target=_load_many, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    totals = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert totals == [float(make()["last"].sum())] * 3
    # Once, by whoever came first; the end and the descriptions are within it.
    assert proxy.fetched() < size + 150_000


def test_a_copy_that_was_evicted_while_it_is_held(tmp_path: pathlib.Path) -> None:
    store = Remote(f"memory://{uuid.uuid4().hex}")
    store.put("a", b"0123456789" * 1000)
    found = store.find("a")
    assert found is not None
    cache = RemoteCache(tmp_path, max_bytes=0)
    file = CachedFile(store, found, LocalCopies(cache))
    with file.hold_open():
        assert file.read(0, 10) == b"0123456789"
        cache.evict()
        assert list(tmp_path.glob("*.data")) == []
        assert file.read(20, 30) == b"0123456789"
    assert file.read(0, 10) == b"0123456789"


# --- uploads ----------------------------------------------------------------------------------------------------------


def seen(url: str, options: Any) -> Any:
    """Return the value that a reader sees in a container of `make`, or `None`."""
    try:
        td = load(url, storage_options=options)
    except FileNotFoundError:
        return None
    value = int(td["b", "c"][0])
    assert same(td, small(value) if "a" in td else make(value))
    return value


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_a_reader_never_sees_half_a_save(bucket: Bucket, name: str) -> None:
    url, proxy, options = bucket
    target = f"{url}/{name}"
    states: list[Any] = []
    inside = False

    def look(method: str, path: str) -> None:
        nonlocal inside
        if method in ("PUT", "DELETE", "POST") and not inside:
            inside = True
            states.append(seen(target, options))
            inside = False

    proxy.before = look
    small(1).save(target, storage_options=options)
    assert states[0] is None and set(states) <= {None, 1} and seen(target, options) == 1
    states.clear()
    small(2).save(target, storage_options=options, overwrite=True)
    assert set(states) <= ({1} if name == "x.tdz" else {1, None, 2}) and seen(target, options) == 2
    # The `meta.json` at the top goes last of all that is put.
    puts = [path for method, path, _ in proxy.requests if method == "PUT"]
    assert puts[-1].partition("?")[0].endswith("/x/meta.json" if name == "x" else "/x.tdz")


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_a_save_that_is_replaced_while_it_is_read(bucket: Bucket, name: str, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    target = f"{url}/{name}"
    small(1).save(target, storage_options=options)
    for after, cache in ((1, None), (2, tmp_path), (3, None), (6, tmp_path)):
        left = after

        def replace(method: str, path: str) -> None:
            nonlocal left
            if method == "GET" and "list-type" not in path:
                left -= 1
                if left == 0:
                    proxy.before = None
                    small(2).save(target, storage_options=options, overwrite=True)

        small(1).save(target, storage_options=options, overwrite=True)
        proxy.before = replace
        td = load(target, storage_options=options, cache_dir=cache)
        proxy.before = None
        assert same(td, small(int(td["b", "c"][0])))
        assert same(load(target, storage_options=options, cache_dir=cache), small(2 if left <= 0 else 1))


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_an_upload_that_fails_leaves_what_was_there(bucket: Bucket, name: str) -> None:
    url, proxy, options = bucket
    proxy.faults = [Fault(FAIL, "PUT", "last" if name == "x" else "x.tdz", times=100)]
    with pytest.raises(SaveError, match=f"cannot upload '{url}/{name}"):
        make().save(f"{url}/{name}", storage_options=options)
    proxy.clear()
    assert Remote(url, options).files() == [] and seen(f"{url}/{name}", options) is None
    make(1).save(f"{url}/{name}", storage_options=options)
    assert seen(f"{url}/{name}", options) == 1
    if name == "x.tdz":
        proxy.faults = [Fault(FAIL, "PUT", times=100)]
        with pytest.raises(SaveError, match="cannot upload"):
            make(2).save(f"{url}/{name}", storage_options=options, overwrite=True)
        proxy.clear()
        assert seen(f"{url}/{name}", options) == 1


def test_replacing_needs_to_be_asked_for(base: str) -> None:
    make(1).save(f"{base}/x")
    make(1).save(f"{base}/x.tdz")
    for name, what in (("x", "a saved folder"), ("x.tdz", "a file")):
        with pytest.raises(SaveError, match=f"there is {what} at '{base}/{name}' already: pass overwrite=True"):
            make(2).save(f"{base}/{name}")
        with pytest.raises(SaveError, match="already"):
            make(2).memmap(f"{base}/{name}", existsok=True)
        assert seen(f"{base}/{name}", None) == 1
    store = Remote(base)
    store.put("x/own.txt", b"mine")
    store.put("x/foreign.memmap", b"mine")
    TensorDict(first=torch.ones(3)).save(f"{base}/x", overwrite=True)
    assert [file.name for file in store.files("x")] == [
        "x/first.memmap",
        "x/foreign.memmap",
        "x/meta.json",
        "x/own.txt",
    ]
    # Only a save of the same kind is replaced.
    for overwrite in (False, True):
        with pytest.raises(SaveError, match="a file at .* which this cannot replace"):
            make().save(f"{base}/x.tdz", archive=False, overwrite=overwrite)
        with pytest.raises(SaveError, match="a saved folder at .* which this cannot replace"):
            make().to_safetensors(f"{base}/x", overwrite=overwrite)
    store.put("y/first.memmap", b"somebody's")
    with pytest.raises(SaveError, match=f"'{base}/y/first.memmap' is there"):
        make().save(f"{base}/y")
    assert [file.name for file in store.files("y")] == ["y/first.memmap"]
    make(3).save(f"{base}/y", overwrite=True)
    assert seen(f"{base}/y", None) == 3


def test_files_of_empty_tensors_go_with_the_old_save() -> None:
    url = f"memory://{uuid.uuid4().hex}/x"
    TensorDict(a=torch.ones(3), empty=torch.zeros(3, 0), inner={"empty": torch.zeros(3, 0)}, batch_size=[3]).save(url)
    TensorDict(a=torch.ones(3), batch_size=[3]).save(url, overwrite=True)
    assert [file.name for file in Remote(url).files()] == ["a.memmap", "meta.json"]


def test_names_that_lead_out_of_a_save(tmp_path: pathlib.Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/x"
    make().save(url)
    store = Remote(url)
    store._fs.store[f"{store._root}/../../../../../{tmp_path}/evil"] = store._fs.store[f"{store._root}/meta.json"]
    with pytest.raises(SaveError, match="lead out of the save"):
        verify(url)
    assert same(load(url), make()) and list(tmp_path.iterdir()) == []


def test_two_savers_do_not_mix(bucket: Bucket) -> None:
    url, proxy, options = bucket
    failed: list[Exception] = []

    def interfere(method: str, path: str) -> None:
        if method == "PUT" and "last" in path:
            proxy.before = None
            try:
                make(2).save(f"{url}/x", storage_options=options)
            except SaveError as error:
                failed.append(error)

    proxy.before = interfere
    make(1).save(f"{url}/x", storage_options=options)
    assert "another process or thread is saving" in str(failed[0]) and seen(f"{url}/x", options) == 1

    def replace(method: str, path: str) -> None:
        if method == "PUT" and "last" in path:
            proxy.before = None
            with pytest.raises(SaveError, match=f"is saving to '{url}/x'") as error:
                make(4).save(f"{url}/x", storage_options=options, overwrite=True)
            failed.append(error.value)

    proxy.before = replace
    make(3).save(f"{url}/x", storage_options=options, overwrite=True)
    assert len(failed) == 2 and seen(f"{url}/x", options) == 3


def _save_many(url: str, options: dict[str, Any]) -> None:
    TensorDict({str(number): torch.full((1000,), number) for number in range(40)}).save(url, storage_options=options)


def test_a_saver_that_is_killed_leaves_no_save(bucket: Bucket) -> None:
    url, proxy, options = bucket
    process = SPAWN.Process(target=_save_many, args=(f"{url}/x", options))

    def kill(method: str, path: str) -> None:
        if method == "PUT" and "/17.memmap" in path:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    proxy.before = kill
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    proxy.before = None
    assert seen(f"{url}/x", options) is None and Remote(f"{url}/x", options).files()
    for overwrite in (False, True):
        with pytest.raises(SaveError, match=f"was killed while it did so.*delete '{url}/x/%save'"):
            make(1).save(f"{url}/x", storage_options=options, overwrite=overwrite)
    Remote(f"{url}/x", options).delete(["%save"])
    make(1).save(f"{url}/x", storage_options=options, overwrite=True)
    assert seen(f"{url}/x", options) == 1


def test_what_has_no_files_at_a_url(base: str) -> None:
    for call in (make().memmap_, make().memmap_like):
        with pytest.raises(SaveError, match="memmap\\(\\) uploads"):
            call(f"{base}/x")
    with pytest.raises(SaveError, match="local file or folder"):
        tensordict.pack_memmap("x", f"{base}/x.tdz")
    future = make(5).save(f"{base}/x", return_early=True)
    assert same(future.result(), make(5)) and seen(f"{base}/x", None) == 5
    # Tensors that are mapped from another file are copied.
    again = load(f"{base}/x")
    again.save(f"{base}/y.tdz")
    make(6).memmap().save(f"{base}/z")
    assert seen(f"{base}/y.tdz", None) == 5 and seen(f"{base}/z", None) == 6


def test_values_that_need_pickle(base: str) -> None:
    td = TensorDict({"a": torch.ones(2), "odd": {1, 2}})
    with pytest.raises(SaveError, match="allow_pickle"):
        td.save(f"{base}/x")
    for name in ("x", "x.tdz"):
        td.save(f"{base}/{name}", allow_pickle=True)
        assert load(f"{base}/{name}", allow_pickle=True)["odd"] == {1, 2}
        with pytest.raises(SaveError, match="pickle"):
            load(f"{base}/{name}")
        td.save(f"{base}/{name}", allow_pickle=True, overwrite=True)
    make(1).save(f"{base}/x", overwrite=True)
    assert not [file.name for file in Remote(base).files("x") if "pickle" in file.name]


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, kind) for name in ("x", "x.tdz") for kind in (DROP, FAIL, SLOW, SHORT)), ("x.h5", DROP)]
)
def test_loading_over_a_bad_network(bucket: Bucket, name: str, kind: str) -> None:
    url, proxy, options = bucket
    if name == "x.h5":
        make().to_h5(f"{url}/{name}", storage_options=options).close()
    else:
        make().save(f"{url}/{name}", storage_options=options)
    proxy.clear()
    faults = [Fault(kind, path="first" if name == "x" else name), Fault(kind, "HEAD"), Fault(kind, path="list-type")]
    proxy.faults = [*faults, Fault(kind, path=name, after=1)]
    assert same(load(f"{url}/{name}", storage_options=options).to_tensordict(), make())
    assert sum(fault.times == 0 for fault in proxy.faults) >= 2


@pytest.mark.parametrize("kind", [DROP, FAIL, SHORT])
@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_a_network_that_stays_bad_is_an_error(bucket: Bucket, name: str, kind: str, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/{name}", storage_options=options)
    proxy.faults = [Fault(kind, path="first" if name == "x" else name, times=1000)]
    with pytest.raises(SaveError, match=f"cannot read '{url}/{name}.*' after 3 attempts"):
        load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path)
    proxy.clear()
    assert same(load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path), make())


def test_objects_that_were_cut_off_are_named(bucket: Bucket) -> None:
    url, _, options = bucket
    store = Remote(url, options)
    make().save(f"{url}/x.tdz", storage_options=options)
    make().save(f"{url}/x", storage_options=options)
    content = store.read("x.tdz")
    for length in (0, 3, 1000, len(content) // 2, len(content) - 1):
        store.put("cut.tdz", content[:length])
        with pytest.raises(SaveError, match=f"{url}/cut.tdz"):
            load(f"{url}/cut.tdz", storage_options=options)
        with pytest.raises(SaveError, match=f"{url}/cut.tdz"):
            load_memmap(f"{url}/cut.tdz", storage_options=options)
    store.put("x/last.memmap", b"1234567")
    with pytest.raises(SaveError, match=f"entry 'last'.*'{url}/x/last.memmap' has 7 bytes"):
        load(f"{url}/x", storage_options=options)
    assert same(load(f"{url}/x", storage_options=options, keys=["first"]), make().select("first"))
    store.delete(["x/b/meta.json"])
    with pytest.raises(FileNotFoundError, match=f"{url}/x/b/meta.json"):
        load(f"{url}/x", storage_options=options)
    report = verify(f"{url}/x", raises=False, storage_options=options)
    assert report.path == f"{url}/x" and any(f"{url}/x/b/meta.json" in problem for problem in report.problems)


def test_archives_that_lie(bucket: Bucket, tmp_path: pathlib.Path) -> None:
    """The headers before the entries are looked at only when these are fetched, and then as with a local file."""
    url, _, options = bucket
    store = Remote(url, options)
    td = TensorDict(a=torch.zeros(50_000), b=torch.ones(50_000))
    td.save(f"{url}/x.tdz", storage_options=options)
    content = bytearray(store.read("x.tdz"))
    at = content.index(b"a.memmap") - 30
    # The extra field is said to be longer than it is, so that the content would reach into the next entry.
    for where, value in ((at + 28, (60_000).to_bytes(2, "little")), (at + 30, b"x"), (at, b"QQ")):
        broken = content.copy()
        broken[where : where + len(value)] = value
        store.put("bad.tdz", bytes(broken))
        with pytest.raises(SaveError, match=f"'a.memmap': the archive '{url}/bad.tdz' is broken"):
            load(f"{url}/bad.tdz", storage_options=options, keys=["a"])
        (tmp_path / "bad.tdz").write_bytes(broken)
        with pytest.raises(SaveError) as local:
            load(tmp_path / "bad.tdz")
        with pytest.raises(SaveError, match=f"the archive '{url}/bad.tdz' is broken") as whole:
            load(f"{url}/bad.tdz", storage_options=options)
        assert str(whole.value) == str(local.value).replace(str(tmp_path), url)
        assert load(f"{url}/bad.tdz", storage_options=options, keys=["b"])["b"].sum() == 50_000
        assert not verify(f"{url}/bad.tdz", raises=False, storage_options=options).ok
    other = content.replace(b"meta.json", b"meta.jsan")
    store.put("zip.tdz", bytes(other))
    with pytest.raises(SaveError, match=f"'{url}/zip.tdz' is a zip file but no archive of tensors"):
        load(f"{url}/zip.tdz", storage_options=options)


@pytest.fixture
def http(bucket: Bucket) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The URL of a folder in a bucket that anybody may read, the same as one of S3, and its options."""
    url, proxy, options = bucket
    return f"{proxy.url}/{url.removeprefix('s3://')}", url, options


def test_http(http: tuple[str, str, dict[str, Any]], tmp_path: pathlib.Path) -> None:
    url, s3, options = http
    make().save(f"{s3}/x", storage_options=options)
    make().save(f"{s3}/x.tdz", storage_options=options)
    make().to_safetensors(f"{s3}/x.safetensors", storage_options=options)
    store = Remote(s3, options)
    for file in store.files():
        store._fs.chmod(store._path(file.name), acl="public-read")
    store._fs.chmod(store._root, acl="public-read")
    for name in ("x", "x.tdz", "x.safetensors"):
        for _ in range(2):
            assert same(load(f"{url}/{name}", cache_dir=tmp_path), make())
    assert same(load(f"{url}/x", keys=["first"]), make().select("first"))
    assert verify(f"{url}/x.tdz").ok
    with pytest.raises(SaveError, match="cannot be listed.*An archive can be"):
        verify(f"{url}/x")
    with pytest.raises(SaveError, match="servers of HTTP are read"):
        make().save(f"{url}/y")


# --- the command line -------------------------------------------------------------------------------------------------


def test_commands(base: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    make().save(str(tmp_path / "local"), checksum=True)
    assert main(["convert", str(tmp_path / "local"), f"{base}/x.tdz"]) == 0
    assert main(["convert", f"{base}/x.tdz", f"{base}/y"]) == 0
    assert main(["convert", f"{base}/y", str(tmp_path / "back.h5")]) == 0
    assert main(["diff", f"{base}/x.tdz", f"{base}/y"]) == 0
    assert main(["diff", f"{base}/y", str(tmp_path / "back.h5")]) == 0
    assert main(["verify", f"{base}/x.tdz"]) == main(["verify", f"{base}/y"]) == 0
    assert "archive, 5 tensors" in capsys.readouterr().out
    assert main(["inspect", f"{base}/y"]) == 0
    assert "last" in capsys.readouterr().out
    assert main(["inspect", "--json", f"{base}/x.tdz"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == f"{base}/x.tdz" and found["bytes_on_disk"] > 8 * LARGE and found["bytes_allocated"] is None
    assert main(["convert", str(tmp_path / "local"), f"{base}/x.tdz"]) == 2
    assert "exists already; use --force" in capsys.readouterr().err
    assert main(["convert", "--force", str(tmp_path / "local"), f"{base}/x.tdz"]) == 0
    assert main(["inspect", f"{base}/nothing"]) == 2
    assert f"{base}/nothing" in capsys.readouterr().err
    assert main(["verify", f"file://{tmp_path}/back.h5"]) == 0


def test_reports(base: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    td = TensorDict(x=torch.arange(40.0).view(20, 2), image=torch.full((20, 16, 16, 3), 200, dtype=torch.uint8))
    td["x"][3, 1], td.batch_size = float("nan"), [20]
    td.save(f"{base}/x")
    td.save(f"{base}/x.tdz")
    td.to_safetensors(f"{base}/x.safetensors")
    with DatasetWriter(f"{base}/rows", rows_per_shard=8) as writer:
        writer.extend(td)
    page = tmp_path / "page.html"
    for name in ("x", "x.tdz", "x.safetensors", "rows"):
        assert main(["report", f"{base}/{name}", "-o", str(page)]) == 0, name
        html = page.read_text()
        text = re.sub("<[^>]+>", "", html)
        assert f"{base}/{name}" in text and "x: 1 of 40 elements (2.50%) are NaN" in text and "data:image/png" in html
    assert main(["report", f"{base}/x", f"{base}/x.tdz", "-o", str(page)]) == 0
    assert f"{base}/x.tdz" in page.read_text()
    assert main(["report", f"{base}/nothing", "-o", str(page)]) == 2
    assert f"{base}/nothing" in capsys.readouterr().err
    # The page lists broken entries.
    with Remote(f"{base}/x")._fs.open(Remote(f"{base}/x")._path("x.memmap"), "wb") as file:
        file.write(b"short")
    assert main(["report", f"{base}/x", "-o", str(page)]) == 1
    assert "entry 'x'" in capsys.readouterr().err and "entry 'x'" in page.read_text().replace("&#x27;", "'")


def test_rows_and_statistics_of_what_is_at_a_url(
    bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 MB, the first rows alone are fetched; statistics fetch all of one tensor."""
    import fsspec.config

    url, proxy, options = bucket
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    td = TensorDict(x=torch.arange(1 << 20).view(1024, 1024), y=torch.ones(4), batch_size=[])
    for name in ("x", "x.tdz"):
        td.save(f"{url}/{name}")
        proxy.clear()
        assert main(["inspect", "--json", "--head", "2", f"{url}/{name}"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["root"]["entries"]["x"]["head"] == td["x"][:2].tolist()
        assert proxy.fetched() < 1 << 18
        assert main(["inspect", "--json", "--stats", "--key", "x", f"{url}/{name}"]) == 0
        assert json.loads(capsys.readouterr().out)["root"]["stats"]["max"] == (1 << 20) - 1
        assert proxy.fetched() > 1 << 23


def test_a_full_disk_leaves_no_copy(bucket: Bucket, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _, options = bucket
    make().save(f"{url}/x.tdz", storage_options=options)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tensordict.io.remote.cache.files.write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        load(f"{url}/x.tdz", storage_options=options)
    assert not list(tmp_path.iterdir())
