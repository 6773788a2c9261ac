"""Promises of SECURITY.md and of the pages under docs/ that no other test would catch if they were broken.

Each test names the page and the promise. What other tests prove is not repeated here.
"""

from __future__ import annotations

import contextlib
import gc
import json
import lzma
import mmap
import os
import pathlib
import re
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import h5py
import numcodecs
import numpy as np
import pyarrow as pa
import pytest
import torch
import zarr
from remote_server import CUT, Fault, Proxy
from test_archive import four, patched, write_leaf
from zarr.codecs import GzipCodec

from tensordict import (
    DatasetWriter,
    LazyConcatenatedTensorDict,
    TensorDict,
    from_arrow,
    load,
    load_memmap,
    open_dataset,
    set_kernel_memory_info,
    verify,
)
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.datasets import tidy
from tensordict.io.remote import cache
from tensordict.io.remote.cache import RemoteCache
from tensordict.io.remote.urls import Remote
from tensordict.io.saving import commit
from tensordict.memory import kernel
from tensordict.memory.copy_on_write import as_writable_tensors
from tensordict_cli import main

DOCS = pathlib.Path(__file__).parents[2] / "docs"
LARGE = 8 << 20


def make(value: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(3) + value, "b": {"c": torch.full((3, 2), float(value))}}, [3])


def files_in(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- docs/security.md, "The model" ------------------------------------------------------------------------------------


def test_archive_entries_that_overlap_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.tdz"
    TensorDict(a=torch.zeros(64), b=torch.ones(64)).save(path)
    content = path.read_bytes()
    for local, field in ((True, 18), (False, 20)):
        content = patched(content, b"a.memmap", field, four(320) * 2, local)
    path.write_bytes(content)
    with pytest.raises(SaveError, match=r"'b\.memmap'.*lies over the entry 'a\.memmap'"):
        load_memmap(path)


PEAK = """
import sys
from tensordict import load_memmap

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

before = peak()
try:
    load_memmap(sys.argv[1])
except OSError as error:
    print(peak() - before, error)
"""


@pytest.mark.parametrize("method", [12, 14])
def test_a_compressed_entry_takes_memory_as_it_is_filled(method: int, tmp_path: pathlib.Path) -> None:
    """bzip2 and LZMA have no bound on what they unpack to, so the entry may claim 2 GiB."""
    path, claimed = tmp_path / "x.tdz", 2 << 30
    if method == 12:
        packed = numcodecs.BZ2().encode(b"abcd")
    else:
        alone = lzma.compress(b"abcd", lzma.FORMAT_ALONE)
        packed = b"\x09\x04\x05\x00" + alone[:5] + alone[13:]
    write_leaf(path, packed, claimed, method, numel=claimed // 4)
    command = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    taken, message = done.stdout.split(" ", 1)
    assert f"should unpack to {claimed} bytes, and 4 come" in message
    assert int(taken) < 256 << 10, f"{int(taken) >> 10} MiB were taken for 4 bytes"


def test_lzma_may_not_ask_for_a_dictionary_of_any_size(tmp_path: pathlib.Path) -> None:
    alone = lzma.compress(b"abcd", lzma.FORMAT_ALONE)
    dictionary = b"\xff" * 4
    write_leaf(tmp_path / "x.tdz", b"\x09\x04\x05\x00" + alone[:1] + dictionary + alone[13:], 4, 14)
    with pytest.raises(SaveError, match=r"'a\.memmap'.*[Mm]emory"):
        load_memmap(tmp_path / "x.tdz")


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


@pytest.mark.parametrize("place", ["filters", "compressor", "codecs"])
def test_zarr_refuses_a_codec_that_unpickles_wherever_it_is_named(
    place: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "x.zarr"
    (folder / "a" / "c").mkdir(parents=True)
    content = numcodecs.Pickle().encode(np.array([Harmful()], dtype=object))
    if place == "codecs":
        (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
        grid = {"name": "regular", "configuration": {"chunk_shape": [1]}}
        array = {"zarr_format": 3, "node_type": "array", "shape": [1], "data_type": "float64", "chunk_grid": grid}
        array |= {"chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": [{"name": "numcodecs.pickle"}]}
        (folder / "a" / "zarr.json").write_text(json.dumps(array))
        (folder / "a" / "c" / "0").write_bytes(content)
    else:
        (folder / ".zgroup").write_text('{"zarr_format": 2}')
        array = {"shape": [1], "chunks": [1], "dtype": "<f8", "fill_value": None, "order": "C", "zarr_format": 2}
        codec = {"id": "pickle", "protocol": 5}
        array |= {"filters": None, "compressor": None, place: [codec] if place == "filters" else codec}
        (folder / "a" / ".zarray").write_text(json.dumps(array))
        (folder / "a" / "0").write_bytes(content)
    data = TensorDict.from_zarr(folder)
    with pytest.raises(UnsupportedEntryError, match="'a'.*pickled"):
        data["a"]
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_an_entry_that_claims_more_than_any_memory_is_named(kind: str, tmp_path: pathlib.Path) -> None:
    """Chunks that a file leaves out read as zeros, so that its length says nothing about what an entry takes."""
    path, claimed = tmp_path / f"x.{kind}", (1 << 50,)
    if kind == "h5":
        with h5py.File(path, "w") as file:
            file.create_dataset("a", claimed, "f8", chunks=(1024,))
    else:
        zarr.open_group(path, mode="w").create_array("a", shape=claimed, chunks=(1024,), dtype="f8")
    assert main(["inspect", str(path)]) == 0
    with load(path) as data, pytest.raises(SaveError, match=f"entry 'a'.*{path}.*allocate"):
        data["a"]


def chunk_link(group: pathlib.Path, outside: pathlib.Path) -> None:
    (group / "a" / "c" / "0").rename(outside)
    (group / "a" / "c" / "0").symlink_to(outside)


def array_link(group: pathlib.Path, outside: pathlib.Path) -> None:
    (group / "a").rename(outside)
    (group / "a").symlink_to(outside)


def document_link(group: pathlib.Path, outside: pathlib.Path) -> None:
    (group / "a" / "zarr.json").rename(outside)
    (group / "a" / "zarr.json").symlink_to(outside)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("move", [chunk_link, array_link, document_link])
def test_no_link_leads_out_of_a_zarr_group(
    move: Callable[[pathlib.Path, pathlib.Path], None], compressed: bool, tmp_path: pathlib.Path
) -> None:
    group, outside = tmp_path / "x.zarr", tmp_path / "outside"
    TensorDict(a=torch.arange(8), b=torch.ones(3)).to_zarr(
        group, compressors=GzipCodec() if compressed else None
    ).close()
    move(group, outside)
    before = files_in(tmp_path)
    with pytest.raises(SaveError, match="is a link that leads out of the save"):
        load(group)["a"].clone()
    with pytest.raises(SaveError, match="is a link that leads out of the save"):
        TensorDict.from_zarr(group, mode="r+").set_("a", torch.full((8,), 3))
    assert files_in(tmp_path) == before
    report = verify(group, raises=False)
    assert any("leads out of the save" in problem for problem in report.problems) or move is chunk_link


def test_links_within_a_zarr_group_are_followed(tmp_path: pathlib.Path) -> None:
    group = tmp_path / "x.zarr"
    TensorDict(a=torch.arange(8), b=torch.ones(3)).to_zarr(group).close()
    (group / "a" / "c" / "0").rename(group / "kept")
    (group / "a" / "c" / "0").symlink_to("../../kept")
    (tmp_path / "link").symlink_to(group)
    for path in (group, tmp_path / "link"):
        assert load(path)["a"].tolist() == list(range(8))


@pytest.mark.parametrize("format", ["directory", "archive", "safetensors", "consolidated", "h5", "zarr"])
def test_nothing_in_a_save_makes_the_program_fetch_a_url(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:9/x.tdz"
    asked: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        asked.append(args)
        raise ConnectionRefusedError(111, "nothing is fetched in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(Remote, "_connect", refuse)
    with pytest.raises(OSError, match="nothing is fetched"):
        load(url)
    assert len(asked) == 1
    td = TensorDict({url: torch.ones(2), "n": {"s3://bucket/x": url}, "value": url}, [2], names=[url])
    path = tmp_path / "x"
    saves = {"directory": td.memmap, "archive": partial(td.save, archive=True), "safetensors": td.to_safetensors}
    saves |= {"consolidated": td.consolidate, "h5": td.to_h5, "zarr": td.to_zarr}
    saves[format](path)
    with contextlib.ExitStack() as stack:
        data = load(path)
        if format in ("h5", "zarr"):
            stack.enter_context(data)
        loaded = data.to_tensordict()
    assert loaded[url].tolist() == [1, 1] and loaded["value"] == url and loaded.names == [url]
    assert verify(path).ok and main(["inspect", "--stats", str(path)]) == main(["diff", str(path), str(path)]) == 0
    assert len(asked) == 1


# --- docs/security.md, "What is asked of the kernel about memory" -----------------------------------------------------


@pytest.fixture
def region(tmp_path: pathlib.Path) -> Any:
    """A file of 8 MiB that is mapped for reading: the map and what the kernel says of it."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (LARGE // 256))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = next(one for one in kernel.list_shared_maps() if one.path == str(path))
    return mapped, found


@pytest.mark.parametrize("number", ["inode", "device"])
def test_only_the_file_that_is_mapped_is_opened(region: Any, number: str) -> None:
    _, found = region
    other = found._replace(**{number: getattr(found, number) + 1})
    assert kernel.open_region(other) is None
    fd = kernel.open_region(found)
    assert fd is not None
    assert os.fstat(fd).st_ino == found.inode
    os.close(fd)


def test_a_file_that_bears_the_name_of_a_deleted_one_is_not_opened(region: Any) -> None:
    """/proc writes " (deleted)" behind the name of a file that is gone; another file may be called that."""
    mapped, found = region
    os.unlink(found.path)
    pathlib.Path(f"{found.path} (deleted)").write_bytes(bytes(LARGE))
    (tensor,) = as_writable_tensors([mapped])
    assert bytes(tensor[:256].numpy()) == bytes(range(256))


def test_files_behind_memory_are_opened_for_reading_only(region: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, found = region
    flags: list[int] = []
    original = os.open

    def note(path: Any, how: int, *args: Any, **kwargs: Any) -> int:
        if path == found.path or "map_files" in path:
            flags.append(how)
        return original(path, how, *args, **kwargs)

    monkeypatch.setattr(os, "open", note)
    as_writable_tensors([mapped])
    assert flags and all(how & os.O_ACCMODE == os.O_RDONLY for how in flags)


def private_spans(inode: int) -> list[int]:
    """How long the private maps of a file in this process are."""
    found = []
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        span, modes, _, _, number = line.split()[:5]
        if modes[3] == "p" and int(number) == inode:
            start, stop = (int(part, 16) for part in span.split("-"))
            found.append(stop - start)
    return found


def test_a_file_is_mapped_no_further_than_the_buffers_reach(region: Any) -> None:
    mapped, found = region
    reach = 5 << 20
    (tensor,) = as_writable_tensors([memoryview(mapped)[:reach]])
    assert tensor.numel() == reach
    assert private_spans(found.inode) == [reach]


def test_memory_that_others_see_is_never_made_writable(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(LARGE))
    with path.open("r+b") as file:
        seen = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    array = pa.Array.from_buffers(pa.int64(), LARGE // 8, [None, pa.py_buffer(seen)])
    with set_kernel_memory_info(True):
        td = from_arrow(pa.table({"a": array}))
    td["a"].add_(1)
    assert path.read_bytes() == bytes(LARGE)


def test_the_page_names_all_that_the_kernel_is_asked() -> None:
    code = pathlib.Path(kernel.__file__).read_text()
    page = (DOCS / "security.md").read_text().partition("## Questions to the kernel about memory")[2]
    calls = set(re.findall(r'_libc\.(\w+)|getattr\(_libc, "(\w+)"', code))
    asked = {name for pair in calls for name in pair if name} | set(re.findall(r"(/proc/self/\w+)", code))
    assert {"mincore", "/proc/self/maps"} <= asked
    assert [name for name in sorted(asked) if f"`{name}`" not in page] == []


# --- docs/design/commits.md -------------------------------------------------------------------------------------------


def test_files_of_the_caller_go_back_when_one_cannot_be_moved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save takes the place of an old folder, and the third file of the caller cannot be moved over."""
    root = tmp_path / "saved"
    make().memmap(root)
    for name in ("1.txt", "2.txt", "own/3.txt", "b/4.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(name)
    before = files_in(tmp_path)
    rename, carry = os.rename, commit.move_foreign_files
    moves = 0

    def fail_at_the_third(source: Any, target: Any) -> None:
        nonlocal moves
        moves += 1
        if moves == 3:
            raise OSError(5, "Input/output error")
        rename(source, target)

    def carry_and_fail(old: str, new: str) -> None:
        with monkeypatch.context() as patched_os:
            patched_os.setattr(os, "rename", fail_at_the_third)
            carry(old, new)

    monkeypatch.setattr(commit, "move_foreign_files", carry_and_fail)
    with pytest.raises(OSError, match="Input/output"):
        make(5).memmap(root)
    assert moves > 3, "the two that were moved went back"
    assert files_in(tmp_path) == before
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("there", ["a folder", "a file"])
def test_a_folder_of_the_caller_and_a_file_of_the_save_do_not_take_one_name(there: str, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "saved"
    TensorDict(old=torch.ones(3), batch_size=[3]).memmap(root)
    if there == "a folder":
        (root / "a.memmap").mkdir()
        (root / "a.memmap" / "notes.txt").write_text("mine")
    else:
        (root / "b").write_text("mine")
    before = files_in(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(OSError, match=r"'(a\.memmap|b)' in|/(a\.memmap|b)'"):
            make().memmap(root, overwrite=overwrite)
        assert files_in(tmp_path) == before and os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("format", ["directory", "archive", "safetensors", "consolidated", "h5", "zarr"])
def test_nothing_is_flushed_unless_it_is_to_be_durable(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *args: flushed.append(1))
    td = make()
    saves = {"directory": td.memmap, "archive": partial(td.save, archive=True), "safetensors": td.to_safetensors}
    saves |= {"consolidated": td.consolidate, "h5": td.to_h5, "zarr": td.to_zarr}
    for _ in range(2):
        saves[format](tmp_path / "x")
    assert flushed == []
    saves[format](tmp_path / "y", durable=True)
    assert flushed


@pytest.mark.parametrize("what", ["folder", "archive", "safetensors"])
def test_a_save_that_may_not_be_written_is_not_replaced(what: str, tmp_path: pathlib.Path) -> None:
    """The folder around it may be written, so that a rename would succeed."""
    root = tmp_path / "saved"
    save = {"folder": "memmap", "archive": "save", "safetensors": "to_safetensors"}[what]
    options = {"archive": True} if what == "archive" else {}
    getattr(make(), save)(root, **options)
    before = files_in(tmp_path)
    root.chmod(stat.S_IMODE(root.stat().st_mode) & ~0o222)
    for parent in (tmp_path, *tmp_path.parents[:-1]):
        if parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | (0o077 if parent == tmp_path else 0o055))
    if not (child := os.fork()):
        refused = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            getattr(make(5), save)(root, **options)
        except PermissionError as error:
            refused = 0 if str(root) in str(error) else 2
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    root.chmod(0o755)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("over", [False, True])
def test_a_durable_zarr_group_is_on_the_disk_before_the_commit(
    over: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "x.zarr"
    if over:
        make().to_zarr(root).close()
    synced: list[str] = []
    sync, rename, exchange = os.fsync, os.rename, commit._rename_exchange

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}").replace(".x.zarr.tensordict-new", "x.zarr"))
        sync(fd)

    def commits(first: Any, second: Any) -> None:
        synced.append("commit")
        (exchange if over else rename)(first, second)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(*((commit, "_rename_exchange") if over else (os, "rename")), commits)
    make(1).to_zarr(root, durable=True).close()
    before, after = synced[: synced.index("commit")], synced[synced.index("commit") + 1 :]
    assert sum(path.is_file() for path in root.rglob("*")) > 3
    assert {str(path) for path in (root, *root.rglob("*"))} <= set(before)
    assert str(tmp_path) in after


# --- docs/urls.md -----------------------------------------------------------------------------------------------------

Bucket = tuple[str, Proxy, dict[str, Any]]


def wide() -> TensorDict:
    return TensorDict(a=torch.arange(50_000), b={"c": torch.ones(3)}, d={"e": {"f": torch.ones(2)}})


def test_at_most_eight_requests_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    store = Remote(f"memory://{uuid.uuid4().hex}")
    store.put("x", bytes(1 << 20))
    found = store.find("x")
    assert found is not None
    monkeypatch.setattr(cache, "_PIECE", 1 << 14)
    lock, under_way, most = threading.Lock(), 0, 0
    read = Remote.read

    def counted(*args: Any) -> bytes:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        try:
            return read(*args)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(Remote, "read", counted)
    cache.CachedFile(store, found, cache.LocalCopies(None)).ensure()
    assert 1 < most <= 8


def test_ranges_are_joined_and_cut_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Remote(f"memory://{uuid.uuid4().hex}")
    store.put("x", bytes(20 << 20))
    found = store.find("x")
    assert found is not None
    asked: list[tuple[int, int]] = []
    read = Remote.read

    def noted(self: Remote, name: str, start: int, stop: int, *file: Any) -> bytes:
        asked.append((start, stop))
        return read(self, name, start, stop, *file)

    monkeypatch.setattr(Remote, "read", noted)
    gap = 256 << 10
    cache.CachedFile(store, found, cache.LocalCopies(None)).ensure([(0, 10), (10 + gap, 20 + gap)])
    cache.CachedFile(store, found, cache.LocalCopies(None)).ensure([(0, 10), (11 + gap, 20 + gap)])
    assert asked[0] == (0, 20 + gap) and sorted(asked[1:]) == [(0, 10), (11 + gap, 20 + gap)]
    asked.clear()
    cache.CachedFile(store, found, cache.LocalCopies(None)).ensure()
    piece = 8 << 20
    assert sorted(asked) == [(0, piece), (piece, 2 * piece), (2 * piece, 20 << 20)]


@pytest.mark.parametrize("name", ["x", "x.tdz", "x.safetensors", "x.h5"])
def test_the_local_copy_is_removed_and_what_is_mapped_stays(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4().hex}/{name}"
    if name.endswith("h5"):
        make().to_h5(url).close()
    elif name.endswith("safetensors"):
        make().to_safetensors(url)
    else:
        make().save(url)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    td = load(url)
    # A format that is fetched whole may open its file by name.
    assert bool(os.listdir(tmp_path)) == name.endswith(("h5", "safetensors"))
    assert td["a"].tolist() == [0, 1, 2] and td["b", "c"].sum() == 0
    if name.endswith("h5"):
        td.close()
    del td
    gc.collect()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["x", "x.tdz"])
def test_without_a_connection_nothing_is_loaded_from_a_cache(bucket: Bucket, name: str, tmp_path: pathlib.Path) -> None:
    url, proxy, options = bucket
    make().save(f"{url}/{name}", storage_options=options)
    assert load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path)["a"].tolist() == [0, 1, 2]
    proxy.faults = [Fault(CUT, method, times=1000) for method in ("GET", "HEAD")]
    with pytest.raises(SaveError, match=f"'{url}/{name}.*after 3 attempts"):
        load(f"{url}/{name}", storage_options=options, cache_dir=tmp_path)


def test_how_much_a_cache_keeps(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORDICT_CACHE_BYTES", raising=False)
    assert RemoteCache(tmp_path).max_bytes == 16 << 30
    monkeypatch.setenv("TENSORDICT_CACHE_BYTES", "1000")
    assert RemoteCache(tmp_path).max_bytes == 1000
    assert RemoteCache(tmp_path, max_bytes=5).max_bytes == 5


def test_a_folder_is_uploaded_between_its_claim_and_its_meta(bucket: Bucket) -> None:
    url, proxy, options = bucket

    def order() -> list[str]:
        changes = [(method, path) for method, path, _ in proxy.requests if method in ("PUT", "POST", "DELETE")]
        return [f"{method} {unquote(path.partition('?')[0]).partition('/x/')[2]}" for method, path in changes]

    wide().save(f"{url}/x", storage_options=options)
    first = order()
    assert first[0] == "PUT %save" and first[-2:] == ["PUT meta.json", "DELETE %save"]
    proxy.clear()
    wide().select("a").save(f"{url}/x", storage_options=options, overwrite=True)
    again = order()
    assert again[:2] == ["PUT %save", "DELETE meta.json"] and "PUT meta.json" in again
    put = again.index("PUT meta.json")
    assert again[2:put] == ["PUT a.memmap"]
    gone = {"%save", "b/c.memmap", "b/meta.json", "d/meta.json", "d/e/meta.json", "d/e/f.memmap"}
    assert set(again[put + 1 :]) == {f"DELETE {name}" for name in gone}
    assert [file.name for file in Remote(f"{url}/x", options).files()] == ["a.memmap", "meta.json"]


class AnsweredError(Exception):
    """An error of an HTTP library."""

    def __init__(self, status: int) -> None:
        self.status = status


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_answers_that_may_pass_are_tried_six_times(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORDICT_REMOTE_ATTEMPTS", raising=False)
    tries = Remote("memory://bucket").tries("read", "x")
    delays = [tries.delay_after(AnsweredError(status)) for _ in range(5)]
    longest = [0.1, 0.2, 0.4, 0.8, 1.6]
    assert all(most / 2 <= delay <= most for delay, most in zip(delays, longest, strict=True))
    with pytest.raises(SaveError, match="'memory://bucket/x' after 6 attempts"):
        tries.delay_after(AnsweredError(status))


@pytest.mark.parametrize("status", [400, 404, 405, 409, 412, 416, 501])
def test_answers_that_are_final_are_not_tried_again(status: int) -> None:
    with pytest.raises(SaveError, match=r"'memory://bucket/x': AnsweredError"):
        Remote("memory://bucket").tries("read", "x").delay_after(AnsweredError(status))


def test_delays_grow_to_ten_seconds_and_the_environment_says_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORDICT_REMOTE_ATTEMPTS", "20")
    tries = Remote("memory://bucket").tries("read", "x")
    delays = [tries.delay_after(ConnectionResetError()) for _ in range(19)]
    assert all(5 <= delay <= 10 for delay in delays[7:])
    with pytest.raises(SaveError, match="after 20 attempts"):
        tries.delay_after(ConnectionResetError())


def test_a_folder_is_listed_once_and_once_more_to_see_whether_it_was_replaced(bucket: Bucket) -> None:
    url, proxy, options = bucket
    wide().save(f"{url}/x", storage_options=options)
    proxy.clear()
    assert load(f"{url}/x", storage_options=options)["d", "e", "f"].tolist() == [1, 1]
    listings = [path for method, path, _ in proxy.requests if method == "GET" and "list-type" in path]
    # One more asks for a single name, to see whether there is a folder.
    assert len([path for path in listings if "max-keys=1&" not in path]) == 2


def test_the_document_of_a_zarr_node_at_a_url_is_put_after_all_that_is_in_it(bucket: Bucket) -> None:
    url, proxy, options = bucket
    wide().to_zarr(f"{url}/x.zarr", storage_options=options).close()
    puts = [path.partition("?")[0].partition("/x.zarr/")[2] for method, path, _ in proxy.requests if method == "PUT"]
    documents = [name for name in puts if name.endswith("zarr.json")]
    assert set(documents) == {f"{node}zarr.json" for node in ("", "a/", "b/", "b/c/", "d/", "d/e/", "d/e/f/")}
    assert puts[-1] == "zarr.json"
    for array in ("a/", "b/c/", "d/e/f/"):
        chunks = [at for at, name in enumerate(puts) if name.startswith(f"{array}c/")]
        assert chunks and max(chunks) < puts.index(f"{array}zarr.json")


def test_a_zarr_group_at_a_url_is_read_in_its_place_and_not_through_a_cache(tmp_path: pathlib.Path) -> None:
    url = f"memory://{uuid.uuid4().hex}/x.zarr"
    make().to_zarr(url).close()
    with load(url, cache_dir=tmp_path) as data:
        assert data["a"].tolist() == [0, 1, 2]
        # The value is read at each use.
        TensorDict.from_zarr(url, mode="r+").set_("a", torch.full((3,), 7))
        assert data["a"].tolist() == [7, 7, 7]
    assert os.listdir(tmp_path) == []


# --- docs/datasets.md -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["folder", "archive"])
def test_a_durable_flush_has_every_file_of_the_data_set_on_the_disk(
    format: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"
    contents: dict[int, int] = {}
    folders: dict[int, set[str]] = {}
    sync = os.fsync

    def note(fd: int) -> None:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            folders[status.st_ino] = set(os.listdir(fd))
        else:
            contents[status.st_ino] = status.st_size
        sync(fd)

    monkeypatch.setattr(os, "fsync", note)
    with DatasetWriter(root, format=format, durable=True) as writer:
        for number in range(2):
            writer.extend(make(number))
            writer.flush()
            for path in root.rglob("*"):
                status = path.stat()
                if path.is_file():
                    assert contents.get(status.st_ino) == status.st_size, f"{path} or its end is not on the disk"
                assert path.name in folders.get(path.parent.stat().st_ino, set()), f"the name of {path} is not"
    assert "data" in folders[tmp_path.stat().st_ino]


def numbers(first: int, count: int) -> TensorDict:
    return TensorDict(x=torch.arange(first, first + count), batch_size=[count])


def test_a_full_shard_of_a_data_set_is_visible_with_the_next_row(tmp_path: pathlib.Path) -> None:
    writer = DatasetWriter(tmp_path, rows_per_shard=4)
    for first, count, visible in ((0, 6, 4), (6, 2, 4), (8, 1, 8)):
        writer.extend(numbers(first, count))
        assert open_dataset(tmp_path)["x"].tolist() == list(range(visible))
    writer.close()


def test_a_block_that_ends_by_an_exception_has_flushed(tmp_path: pathlib.Path) -> None:
    def extend_and_fail() -> None:
        with DatasetWriter(tmp_path) as writer:
            writer.extend(numbers(0, 3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        extend_and_fail()
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1, 2]


def test_rows_are_ordered_by_writer_and_then_by_time(tmp_path: pathlib.Path) -> None:
    first, second = DatasetWriter(tmp_path), DatasetWriter(tmp_path)
    assert first.writer < second.writer
    for number, writer in enumerate((second, first, second, first)):
        writer.extend(numbers(10 * number, 1))
        writer.flush()
    first.close()
    second.close()
    assert open_dataset(tmp_path)["x"].tolist() == [10, 30, 0, 20]


def test_a_data_set_may_be_copied_to_a_url_and_back(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path / "data", rows_per_shard=2) as writer:
        writer.extend(numbers(0, 5))
    store = Remote(f"memory://{uuid.uuid4().hex}")
    for path in (tmp_path / "data").rglob("*"):
        if path.is_file():
            store.put(str(path.relative_to(tmp_path / "data")), str(path))
    assert open_dataset(store.url)["x"].tolist() == list(range(5))
    with DatasetWriter(store.url) as writer:
        writer.extend(numbers(5, 2))
    for file in store.files():
        target = tmp_path / "back" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.read(file.name))
    assert open_dataset(tmp_path / "back")["x"].tolist() == list(range(7))
    assert verify(tmp_path / "back").ok


def test_rows_that_were_assigned_no_longer_match_their_checksums(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, checksum=True) as writer:
        writer.extend(numbers(0, 4))
    assert verify(tmp_path).ok
    open_dataset(tmp_path, mode="r+")[1] = TensorDict(x=torch.tensor(9))
    (problem,) = verify(tmp_path, raises=False).problems
    assert "'x'" in problem and "checksum" in problem
    assert open_dataset(tmp_path)["x"].tolist() == [0, 9, 2, 3]


def test_there_is_no_data_set_on_an_http_server(bucket: Bucket) -> None:
    url, proxy, options = bucket
    with DatasetWriter(f"{url}/data", storage_options=options) as writer:
        writer.extend(numbers(0, 4))
    for file in (store := Remote(url, options)).files():
        store._fs.chmod(store._path(file.name), acl="public-read")
    with pytest.raises(SaveError, match=f"{proxy.url}/.*/data.*cannot be listed"):
        open_dataset(f"{proxy.url}/{url.removeprefix('s3://')}/data")


def test_an_index_of_a_data_set_reads_from_the_shards_that_hold_its_rows(tmp_path: pathlib.Path) -> None:
    with DatasetWriter(tmp_path, rows_per_shard=2) as writer:
        writer.extend(numbers(0, 6))
    shards = sorted((tmp_path / "shards").glob("*/*"))
    shutil.rmtree(shards[1])
    data = open_dataset(tmp_path)
    assert isinstance(data, LazyConcatenatedTensorDict)
    assert data[torch.tensor([5, 0])]["x"].tolist() == [5, 0]
    with pytest.raises(FileNotFoundError, match=shards[1].name):
        data[2]


def leave_incomplete_shard(folder: pathlib.Path) -> pathlib.Path:
    """Make a data set of two rows, and beside it the shard of a writer that ended before it flushed."""
    with DatasetWriter(folder) as writer:
        writer.extend(numbers(0, 2))
    if not (child := os.fork()):
        killed = DatasetWriter(folder)
        killed.extend(numbers(2, 2))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (shard,) = [path for path in (folder / "shards").glob("*/*") if writer.writer not in str(path)]
    return shard


def test_a_folder_in_which_anything_else_lies_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    shard = leave_incomplete_shard(tmp_path)
    (shard / "notes.txt").write_text("mine")
    before = files_in(tmp_path)
    removed, left = tidy(tmp_path, older_than=0)
    assert removed == [] and "notes.txt" in left[str(shard)]
    assert files_in(tmp_path) == before
    (shard / "notes.txt").unlink()
    assert tidy(tmp_path, older_than=0).removed == [str(shard)] and not shard.exists()
    assert open_dataset(tmp_path)["x"].tolist() == [0, 1]


def test_a_sweep_goes_by_the_clock_that_dates_the_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_incomplete_shard(tmp_path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    removed, left = tidy(tmp_path)
    assert removed == [] and "changed a short time ago" in str(left)
