"""Saves of one file: what is killed, refused or simultaneous leaves the old one or the new one, whole, in every format.

killing.py defines the formats, and kills processes that save.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from killing import FILES, File, same

from cases import mark_slow
from tensordict import TensorDict
from tensordict.core.exceptions import SaveError
from tensordict.io.saving.transaction import FileTransaction

FORMATS = ["archive", "consolidated", "safetensors", "h5"]
EACH = pytest.mark.parametrize("name", FORMATS)


def make(value: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(3) + value, "b": {"c": torch.full((3, 2), float(value))}}, [3])


def assert_saved(file: File, path: pathlib.Path, value: int) -> None:
    assert same(file.load(path), make(value))
    assert os.listdir(path.parent) == [path.name]


# The least number of changes. With fewer, the children would not be killed where it matters.
KILLED = {
    "new path": 25,
    "new path, filled": 35,
    **dict.fromkeys(("over", "no exchange", "durable"), 40),
    "adding": 6,
    "appending": 30,
    "checkpoints": 25,
    **dict.fromkeys(FILES, 18),
    "archive, new only": 10,
}


@pytest.fixture(scope="module")
def killing() -> Iterator[subprocess.Popen[str]]:
    """The program, which has imported what it needs: that takes longer than a scenario."""
    program = str(pathlib.Path(__file__).with_name("killing.py"))
    with subprocess.Popen([sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        yield found
        found.kill()


# The others walk the same path with one system call replaced.
QUICK_TO_KILL = [name for name in KILLED if name not in ("no exchange", "durable", "durable h5")]


@pytest.mark.parametrize("name", mark_slow(KILLED, keep=QUICK_TO_KILL))
def test_killed_at_every_change(name: str, tmp_path: pathlib.Path, killing: subprocess.Popen[str]) -> None:
    assert killing.stdin is not None and killing.stdout is not None
    print(f"{name}:{tmp_path}", file=killing.stdin, flush=True)
    answer = killing.stdout.readline()
    assert answer, "the program has failed, and told why"
    assert int(answer) >= KILLED[name]


@EACH
def test_what_a_killed_saver_left_is_cleaned(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / ".x.tensordict-new").write_bytes(b"left" * 100_000)
    (tmp_path / ".x.tensordict-lock").write_bytes(b"")
    FILES[name].save(make(1), tmp_path / "x")
    assert_saved(FILES[name], tmp_path / "x", 1)


@pytest.mark.parametrize("name", mark_slow(FORMATS, keep=["archive", "h5"]))
def test_another_process_is_saving(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    FILES[name].save(make(), path)
    script = (
        "import sys\nfrom tensordict.io.saving.transaction import FileTransaction\n"
        "with FileTransaction(sys.argv[1]):\n    print()\n    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=0
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        with pytest.raises(SaveError, match=f"another process or thread is saving to '{path}'"):
            FILES[name].save(make(1), path)
        assert same(FILES[name].load(path), make())
        other.stdin.write("\n")
    assert other.returncode == 0
    assert_saved(FILES[name], path, 0)
    FILES[name].save(make(1), path)
    assert_saved(FILES[name], path, 1)


@EACH
def test_several_threads_save_to_one_path(name: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    saves, failures = [], []

    def write(value: int) -> None:
        for step in range(10):
            try:
                FILES[name].save(make(100 * value + step), path)
                saves.append(value)
            except SaveError as error:
                if "another process or thread" not in str(error):
                    failures.append(error)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert saves
    loaded = FILES[name].load(path)
    assert (loaded["a"] - torch.arange(3) == loaded["b", "c"][:, 0]).all(), "a mix"
    assert os.listdir(tmp_path) == ["x"]


@EACH
def test_through_a_link_with_its_mode(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = tmp_path / "elsewhere" / "real"
    FILES[name].save(make(), real)
    real.chmod(0o640)
    (tmp_path / "link").symlink_to("elsewhere/real")
    FILES[name].save(make(4), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_saved(FILES[name], real, 4)
    assert real.stat().st_mode & 0o777 == 0o640


@EACH
def test_a_folder_is_not_replaced(name: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(SaveError, match="which is a folder"):
        FILES[name].save(make(), tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SaveError, match="no regular file"):
        FILES[name].save(make(), tmp_path / "pipe")
    assert sorted(os.listdir(tmp_path)) == ["pipe", "x"]


@EACH
def test_a_file_system_without_locks(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / "x"
    FILES[name].save(make(), path)
    with FileTransaction(path) as going_on, going_on.new_file(going_on.path) as fd:
        os.write(fd, b"half")
        FILES[name].save(make(1), path)
    assert_saved(FILES[name], path, 1)


@EACH
def test_a_commit_that_fails_leaves_the_old_file(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    FILES[name].save(make(), path)
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=f"Input/output.*{path}"):
        FILES[name].save(make(1), path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert_saved(FILES[name], path, 0)


def test_a_name_that_is_long(tmp_path: pathlib.Path) -> None:
    path = tmp_path / ("é" * 120)
    make().to_safetensors(path)
    make(1).to_safetensors(path)
    assert_saved(FILES["safetensors"], path, 1)


@pytest.mark.parametrize(
    "save",
    [
        lambda td, path: td.memmap(path, archive=True, durable=True),
        lambda td, path: td.consolidate(path, durable=True),
        lambda td, path: td.to_safetensors(path, durable=True),
        lambda td, path: td.to_h5(path, durable=True).close(),
    ],
)
def test_durable_syncs_before_and_after_the_commit(
    save: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def note(fd: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{fd}"))
        assert os.fstat(fd).st_size
        sync(fd)

    def commits(source: Any, target: Any) -> None:
        done.append("commit")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", commits)
    save(make(), tmp_path / "x")
    assert done == [f"{tmp_path}/.x.tensordict-new", "commit", str(tmp_path)]
