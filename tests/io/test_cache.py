"""Caches of remote files, in folders that other users or programs have changed."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import signal
import stat
import time
import uuid
import zlib
from typing import Any

import pytest
import torch

from tensordict import RemoteCache, TensorDict, load
from tensordict.core.exceptions import SaveError
from tensordict.io.remote.cache import CachedFile, LocalCopies
from tensordict.io.remote.urls import Remote

pytest.importorskip("fsspec")
SPAWN = multiprocessing.get_context("spawn")
CONTENT = bytes(range(256)) * 40

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files belong to users")


@pytest.fixture
def url() -> str:
    """The URL of a saved archive."""
    found = f"memory://{uuid.uuid4().hex}/x.tdz"
    TensorDict(a=torch.arange(1000)).save(found)
    return found


@pytest.fixture
def store() -> Remote:
    """A store with the file `a`."""
    found = Remote(f"memory://{uuid.uuid4().hex}")
    found.put("a", CONTENT)
    return found


def cached(store: Remote, folder: pathlib.Path) -> CachedFile:
    file = store.find("a")
    assert file is not None
    return CachedFile(store, file, LocalCopies(RemoteCache(folder)))


def mode_of(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_a_folder_that_is_made_is_closed_to_others(url: str, tmp_path: pathlib.Path, mask: int) -> None:
    folder = tmp_path / "outer" / "cache"
    folder.parent.mkdir()
    before = os.umask(mask & 0o077)
    try:
        load(url, cache_dir=folder)
    finally:
        os.umask(before)
    assert mode_of(folder) == 0o700
    found = list(folder.iterdir())
    assert {path.suffix for path in found} == {".data", ".json"} and {mode_of(path) for path in found} == {0o600}


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777, 0o1777])
def test_a_folder_that_others_may_use_is_refused(url: str, tmp_path: pathlib.Path, mode: int) -> None:
    folder = tmp_path / "the cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(SaveError, match=f"mode {mode:04o}.*close it with: chmod 700 '{folder}'"):
        load(url, cache_dir=folder)
    assert list(folder.iterdir()) == []
    for look in (lambda cache: cache.nbytes, RemoteCache.evict):
        with pytest.raises(SaveError, match="chmod 700"):
            look(RemoteCache(folder))
    folder.chmod(0o700)
    assert load(url, cache_dir=folder)["a"].sum() == 499500


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files to another user")
def test_a_folder_or_a_file_of_another_user_is_refused(url: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    load(url, cache_dir=folder)
    (data,) = folder.glob("*.data")
    os.chown(data, 12345, -1)
    with pytest.raises(SaveError, match=f"{data.name}' in '{folder}' belongs to the user 12345.*cd {folder} && rm"):
        load(url, cache_dir=folder)
    os.chown(folder, 12345, -1)
    with pytest.raises(SaveError, match=f"'{folder}' belongs to the user 12345.*name a folder of your own"):
        load(url, cache_dir=folder)
    assert data.exists()


def test_a_link_to_a_folder_is_not_followed(url: str, tmp_path: pathlib.Path) -> None:
    real, folder = tmp_path / "real", tmp_path / "cache"
    real.mkdir(0o700)
    folder.symlink_to(real)
    with pytest.raises(SaveError, match=f"'{folder}' is a link.*name '{real}'"):
        load(url, cache_dir=folder)
    assert list(real.iterdir()) == []


@pytest.mark.parametrize("suffix", ["data", "json"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_under_the_name_of_a_file_is_not_followed(
    store: Remote, tmp_path: pathlib.Path, suffix: str, there: bool
) -> None:
    folder, target = tmp_path / "cache", tmp_path / "target"
    path = pathlib.Path(cached(store, folder).path).with_suffix(f".{suffix}")
    if there:
        target.write_text("precious")
        target.chmod(0o600)
    path.symlink_to(target)
    file = cached(store, folder)
    with pytest.raises(SaveError, match=f"{path.name}' in '{folder}' is a link.*&& rm {path.name}"):
        file.read()
    assert target.read_text() == "precious" if there else not target.exists()
    assert path.is_symlink()
    path.unlink()
    assert cached(store, folder).read() == CONTENT


@pytest.mark.parametrize("kind", ["hard link", "folder", "pipe", "open to others"])
def test_what_is_no_file_of_the_cache_is_refused(store: Remote, tmp_path: pathlib.Path, kind: str) -> None:
    folder, target = tmp_path / "cache", tmp_path / "target"
    target.write_text("precious")
    target.chmod(0o600)
    path = pathlib.Path(cached(store, folder).path)
    if kind == "hard link":
        os.link(target, path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.write_text("other")
        path.chmod(0o640)
    with pytest.raises(OSError, match=path.name):
        cached(store, folder).read()
    assert target.read_text() == "precious" and os.path.lexists(path)


def test_only_files_of_the_cache_are_evicted(url: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    load(url, cache_dir=folder)
    (target := tmp_path / "target").write_text("precious")
    (folder / "mine.data").write_text("precious")
    (folder / f"{'0' * 40}.data").symlink_to(target)
    (folder / f"{'1' * 40}.data").mkdir()
    os.link(target, folder / f"{'2' * 40}.data")
    cache = RemoteCache(folder, max_bytes=0)
    cache.evict()
    left = {path.name for path in folder.iterdir()}
    assert left == {"mine.data", f"{'0' * 40}.data", f"{'1' * 40}.data", f"{'2' * 40}.data"}
    assert target.read_text() == "precious" == (folder / "mine.data").read_text()


@pytest.mark.parametrize("change", [{"url": "memory://other"}, {"size": 7}, {"tag": "other"}, {"ranges": 5}])
def test_a_note_on_another_file_is_not_believed(store: Remote, tmp_path: pathlib.Path, change: dict[str, Any]) -> None:
    cached(store, tmp_path / "cache").read()
    file = cached(store, tmp_path / "cache")
    data, note = pathlib.Path(file.path), pathlib.Path(file.path).with_suffix(".json")
    said = json.loads(note.read_text())
    assert said["ranges"] == [[0, len(CONTENT), said["ranges"][0][2]]]
    forged = b"x" * len(CONTENT)
    data.write_bytes(forged)
    note.write_text(json.dumps({**said, "ranges": [[0, len(forged), zlib.crc32(forged)]], **change}))
    assert file.read() == CONTENT


def _hold_the_lock(folder: str, name: str, pipe: Any) -> None:
    with LocalCopies(RemoteCache(folder)).folder.hold_lock(name, os.O_CREAT, 0):
        pipe.send("held")
        time.sleep(600)


@pytest.mark.seconds
def test_the_lock_ends_with_its_process_and_is_on_one_file(store: Remote, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "cache"
    file = cached(store, folder)
    receiving, sending = SPAWN.Pipe(False)
    process = SPAWN.Process(target=_hold_the_lock, args=(str(folder), os.path.basename(file.path), sending))
    process.start()
    assert receiving.recv() == "held"
    folder_of = file._place.folder
    with pytest.raises(SaveError, match="another process"), folder_of.hold_lock(file._data, os.O_CREAT, 0):
        pass
    # Another file, whose name begins with the same letters, is free meanwhile.
    with folder_of.hold_lock(f"{file._data[:2]}{'0' * 38}.data", os.O_CREAT, 0):
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert file.read() == CONTENT


def _read_often(url: str, folder: str, max_bytes: int, queue: Any) -> None:
    store, wrong = Remote(url), 0
    for turn in range(60):
        copies = LocalCopies(RemoteCache(folder, max_bytes))
        found = store.find(str(turn % 3))
        assert found is not None
        wrong += CachedFile(store, found, copies).read() != bytes([turn % 3]) * 100_000
        copies.close()
    queue.put(wrong)


@pytest.mark.seconds
def test_processes_read_and_evict_at_once(tmp_path: pathlib.Path) -> None:
    url, folder = f"file://{tmp_path}/store", str(tmp_path / "cache")
    for number in range(3):
        Remote(url).put(str(number), bytes([number]) * 100_000)
    queue = SPAWN.Queue()
    processes = [SPAWN.Process(target=_read_often, args=(url, folder, 150_000, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=60) for _ in processes] == [0, 0]
    for process in processes:
        process.join()
