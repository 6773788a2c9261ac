"""Saving where something is already: what is killed, refused or simultaneous leaves the old save or the new, whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from tensordict import TensorDict
from tensordict.core.exceptions import SaveError
from tensordict.io.saving import commit
from tensordict.memory import files


def make(value: int = 0) -> TensorDict:
    return TensorDict({"a": torch.arange(3) + value, "b": {"c": torch.full((3, 2), float(value))}}, [3])


def assert_same(td: Any, expected: TensorDict) -> None:
    mine, other = dict(td.items(True, True)), dict(expected.items(True, True))
    assert mine.keys() == other.keys()
    for key, value in other.items():
        assert torch.equal(mine[key], value), key


def tree(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- killed and refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_disk_that_fills_up_leaves_the_old_save(
    num_threads: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "saved"
    make().memmap(root)
    (root / "mine.txt").write_text("mine")
    before = tree(tmp_path)
    write = os.pwrite
    calls: list[int] = []

    def full(fd: int, *args: Any) -> int:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, *args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        make(5).memmap(root, num_threads=num_threads)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["saved"]
    assert_same(make(5).memmap(root), make(5))


def test_a_small_disk(tmp_path: pathlib.Path) -> None:
    """A real full disk, where we may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting needs the superuser")
    try:
        td = TensorDict(a=torch.ones(250_000), b=torch.ones(250_000))
        td.memmap(disk / "saved")
        with pytest.raises(OSError, match="No space left"):
            (td + 1).memmap(disk / "saved")
        assert_same(TensorDict.load_memmap(disk / "saved"), td)
        assert os.listdir(disk) == ["saved"]
        # And the root of a disk cannot change places with a folder beside it.
        TensorDict(x=torch.ones(1)).memmap(disk)
        with pytest.raises(SaveError, match="mounted"):
            TensorDict(x=torch.zeros(1)).memmap(disk)
        assert TensorDict.load_memmap(disk)["x"] == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("step", ["_rename_exchange", "move_foreign_files"])
def test_a_commit_that_fails_is_undone(step: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "saved"
    make().memmap(root)
    (root / "mine.txt").write_text("mine")
    before = tree(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(commit, step, fail)
    with pytest.raises(OSError, match="Input/output"):
        make(5).memmap(root)
    assert tree(tmp_path) == before
    assert os.listdir(tmp_path) == ["saved"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_no_part_of_a_save_stays(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "saved"
    TensorDict({"a": torch.ones(3), "b": {"c": torch.ones(3)}, "old": {"x": torch.ones(3)}}, [3]).memmap(root)
    for name in ("notes.txt", "b/notes.txt", "old/notes.txt", "runs/1/log", "mine.memmap"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "link").symlink_to("notes.txt")
    other = make(7)
    other.memmap(root / "another save")
    make(1).memmap(root)
    assert_same(TensorDict.load_memmap(root), make(1))
    assert_same(TensorDict.load_memmap(root / "another save"), other)
    files = {name for name in tree(root) if "another save" not in name}
    saved = {"a.memmap", "meta.json", "b/c.memmap", "b/meta.json"}
    assert files == saved | {"notes.txt", "b/notes.txt", "old/notes.txt", "runs/1/log", "mine.memmap", "link"}
    assert (root / "link").readlink() == pathlib.Path("notes.txt")
    assert (root / "runs" / "1" / "log").read_text() == "runs/1/log"


def test_leaves_that_stay_share_their_file(tmp_path: pathlib.Path) -> None:
    td = make().memmap(tmp_path / "saved")
    inode = (tmp_path / "saved" / "a.memmap").stat().st_ino
    changed = td.clone(False)
    changed["new"] = torch.ones(3)
    again = changed.memmap(tmp_path / "saved")
    assert (tmp_path / "saved" / "a.memmap").stat().st_ino == inode
    td["a"][0] = 77
    assert again["a"][0] == 77
    assert TensorDict.load_memmap(tmp_path / "saved")["a"][0] == 77


def test_leaves_are_copied_where_there_are_no_hard_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    td = make().memmap(tmp_path / "saved")
    changed = td.clone(False)
    changed["new"] = torch.ones(3)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    again = changed.memmap(tmp_path / "saved", checksum=True)
    assert_same(again, changed)
    assert_same(TensorDict.load_memmap(tmp_path / "saved"), changed)


def test_saving_again_what_is_saved_changes_nothing(tmp_path: pathlib.Path) -> None:
    td = make().memmap(tmp_path / "saved")
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    td.memmap_(tmp_path / "saved")
    TensorDict.load_memmap(tmp_path / "saved").memmap(tmp_path / "saved")
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_a_container_can_be_saved_over_itself(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "saved")
    td = TensorDict.load_memmap(tmp_path / "saved")
    more = (td + 1).memmap(tmp_path / "saved")
    assert_same(td, make())
    expected = make() + 1
    assert_same(more, expected)
    assert_same(TensorDict.load_memmap(tmp_path / "saved"), expected)
    assert more["a"].filename == str(tmp_path / "saved" / "a.memmap")
    assert more["b"].saved_path == tmp_path / "saved" / "b"
    more["b", "c"].zero_()
    assert TensorDict.load_memmap(tmp_path / "saved")["b", "c"].sum() == 0


def test_the_mode_of_the_folder_stays(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path / "saved")
    (tmp_path / "saved").chmod(0o2750)
    make(1).memmap(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_mode & 0o7777 == 0o2750


def test_through_a_link(tmp_path: pathlib.Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    make().memmap(tmp_path / "elsewhere" / "real")
    (tmp_path / "link").symlink_to("elsewhere/real")
    td = make(4).memmap(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(TensorDict.load_memmap(tmp_path / "elsewhere" / "real"), make(4))
    assert td["a"].filename == str(tmp_path / "link" / "a.memmap")
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "link"]
    assert os.listdir(tmp_path / "elsewhere") == ["real"]


def test_the_current_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "saved"
    make().memmap(root)
    monkeypatch.chdir(root)
    make(1).memmap(".")
    assert os.getcwd() == str(root)
    assert_same(TensorDict.load_memmap("."), make(1))
    os.chdir("b")
    make(2).memmap(root)
    assert os.getcwd() == str(root / "b")
    with pytest.raises(SaveError, match="current folder"):
        TensorDict(x=torch.ones(1)).memmap(root)
    assert_same(TensorDict.load_memmap(root), make(2))


def test_a_long_name(tmp_path: pathlib.Path) -> None:
    root = tmp_path / ("é" * 120)
    make().memmap(root)
    make(1).memmap(root)
    assert_same(TensorDict.load_memmap(root), make(1))
    assert os.listdir(tmp_path) == [root.name]


def kill_while_moving(root: pathlib.Path, count: int) -> None:
    """Kill a save to the folder `root`, which is no new one, when it has moved `count` of its two entries there."""
    root.mkdir(exist_ok=True)
    child = os.fork()
    if not child:
        try:
            move = commit.move
            left = count

            def killing(first: str, second: str) -> None:
                nonlocal left
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                move(first, second)

            def kill(path: str, *args: object, **kwargs: object) -> None:
                if path == f"{root}/meta.json":
                    os.kill(os.getpid(), signal.SIGKILL)

            commit.move, commit.files.write_file = killing, kill
            make().memmap(root)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_what_a_killed_save_moved_is_removed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.memmap").write_text("mine")
    for count in range(3):
        kill_while_moving(tmp_path, count)
        assert len({"a.memmap", "b"} & set(os.listdir(tmp_path))) == count
        TensorDict(x=torch.ones(1)).memmap(tmp_path)
        assert set(tree(tmp_path)) == {"mine.memmap", "x.memmap", "meta.json"}
        assert sorted(os.listdir(tmp_path)) == ["meta.json", "mine.memmap", "x.memmap"]
        for name in ("x.memmap", "meta.json"):
            (tmp_path / name).unlink()


def journal_of(folder: pathlib.Path, **changes: Any) -> dict[str, Any]:
    """Give a folder the journal of a save that was killed, with these changes; gives its content."""
    kill_while_moving(folder, 1)
    content = {**json.loads((folder / "%save").read_bytes()), **changes}
    # Written in place, so that the inode stays.
    (folder / "%save").write_text(json.dumps(content))
    return content


def test_what_took_the_place_of_a_leftover_stays(tmp_path: pathlib.Path) -> None:
    kill_while_moving(tmp_path, 2)
    for left in ("a.memmap", "b/c.memmap", "b/meta.json"):
        (tmp_path / left).unlink()
    (tmp_path / "b").rmdir()
    (tmp_path / "a.memmap").write_text("mine")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    TensorDict(x=torch.ones(1)).memmap(tmp_path)
    assert sorted(tree(tmp_path)) == ["a.memmap", "b/thesis.txt", "meta.json", "x.memmap"]
    assert (tmp_path / "a.memmap").read_text() == "mine"


def test_a_leftover_that_was_written_to_stays(tmp_path: pathlib.Path) -> None:
    kill_while_moving(tmp_path, 2)
    with open(tmp_path / "a.memmap", "r+b") as file:
        file.write(b"mine")
    os.utime(tmp_path / "a.memmap", ns=(1, 1))
    (tmp_path / "b" / "mine.txt").write_text("mine")
    TensorDict(x=torch.ones(1)).memmap(tmp_path)
    assert (tmp_path / "a.memmap").read_bytes()[:4] == b"mine" and (tmp_path / "b" / "mine.txt").exists()


FORGED = {
    "names alone": '["thesis.txt", "photos"]',
    "nothing": "",
    "half of it": '{"inode": ',
    "no object": "[]",
    "another inode": '{"inode": 1, "stage": "", "entries": {"thesis.txt": [1, 1]}}',
    "a name twice": '{"inode": 1, "inode": 2, "stage": "", "entries": {}}',
    "nested without end": "[" * 100_000,
}


@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("saved", [False, True])
def test_a_journal_that_no_save_wrote_here_removes_nothing(content: str, saved: bool, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "home"
    if saved:
        make().memmap(root)
    (root / "photos").mkdir(parents=True)
    (root / "photos" / "1.jpg").write_text("mine")
    (root / "thesis.txt").write_text("mine")
    (root / "%save").write_text(content)
    before = tree(tmp_path)
    with pytest.raises(SaveError, match=r"home/%save' is not the journal of a save .*remove it"):
        make(1).memmap(root)
    assert tree(tmp_path) == before and os.listdir(tmp_path) == ["home"]
    (root / "%save").unlink()
    assert_same(make(1).memmap(root), make(1))
    assert (root / "photos" / "1.jpg").read_text() == (root / "thesis.txt").read_text() == "mine"


def test_a_copy_of_a_journal_removes_nothing(tmp_path: pathlib.Path) -> None:
    kill_while_moving(tmp_path / "killed", 2)
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    before = tree(tmp_path / "copy")
    with pytest.raises(SaveError, match="it is a copy"):
        make().memmap(tmp_path / "copy")
    assert tree(tmp_path / "copy") == before


ELSEWHERE = ["../outside", "/outside", "sub/file", "..", ".", "a\0b"]


@pytest.mark.parametrize(
    ("part", "name"), [*(("stage", name) for name in ELSEWHERE), *(("entries", name) for name in (*ELSEWHERE, ""))]
)
def test_a_journal_that_leads_elsewhere_removes_nothing(part: str, name: str, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "saved"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "file").write_text("mine")
    (tmp_path / "outside").write_text("mine")
    status = os.stat(tmp_path / "outside" if name == "../outside" else root)
    identity = [status.st_ino, status.st_mtime_ns]
    journal_of(root, **{part: name if part == "stage" else {name: identity}}, stage_inode=status.st_ino)
    before = tree(tmp_path)
    with pytest.raises(SaveError, match="names files elsewhere"):
        TensorDict(x=torch.ones(1)).memmap(root)
    assert tree(tmp_path) == before


def test_a_link_in_the_place_of_a_leftover_is_not_followed(tmp_path: pathlib.Path) -> None:
    root, home = tmp_path / "saved", tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("mine")
    kill_while_moving(root, 2)
    shutil.rmtree(root / "b")
    (root / "b").symlink_to(home)
    stage = next(root.glob("%tmp-*"))
    stage.rmdir()
    stage.symlink_to(home)
    TensorDict(x=torch.ones(1)).memmap(root)
    assert os.listdir(home) == ["thesis.txt"] and (root / "b").is_symlink()
    journal_of(root / "other")
    (root / "other" / "%save").rename(home / "%save")
    (root / "other" / "%save").symlink_to(home / "%save")
    with pytest.raises(SaveError, match="not the journal"):
        make().memmap(root / "other")
    assert sorted(os.listdir(home)) == ["%save", "thesis.txt"]


def test_a_journal_of_another_user_removes_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_while_moving(tmp_path, 2)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SaveError, match="belongs to another user"):
        make().memmap(tmp_path)
    assert (tmp_path / "a.memmap").exists()


def test_a_folder_with_the_name_of_a_stage_stays(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "%tmp-0123456789abcdef"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(SaveError, match="%tmp-0123456789abcdef.*no journal"):
        make().memmap(tmp_path)
    (folder / "thesis.txt").unlink()
    make().memmap(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.memmap", "b", "meta.json"]


def test_what_appears_while_a_save_moves_its_files_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = commit.write_journal

    def write_and_intrude(folder: str, stage: str = "", durable: bool = False) -> None:
        write(folder, stage, durable)
        if os.listdir(f"{folder}/{stage}"):
            (tmp_path / "b").mkdir()
            (tmp_path / "b" / "thesis.txt").write_text("mine")
            (tmp_path / "a.memmap").write_text("mine")

    monkeypatch.setattr(commit, "write_journal", write_and_intrude)
    for exchange in (True, False):
        if not exchange:
            monkeypatch.setattr(commit, "_rename_by_flags", no_flags)
        with pytest.raises(FileExistsError, match="write the files into the folder"):
            make().memmap(tmp_path)
        assert tree(tmp_path) == {"b/thesis.txt": b"mine", "a.memmap": b"mine"}
        assert sorted(os.listdir(tmp_path)) == ["a.memmap", "b"]
        shutil.rmtree(tmp_path / "b")
        (tmp_path / "a.memmap").unlink()


def test_a_new_folder_appears_by_one_rename(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(commit, "move_all")
    tmp_path.chmod(0o2750)
    umask = os.umask(0o027)
    try:
        (tmp_path / "other").mkdir()
        td = make().memmap(tmp_path / "saved")
    finally:
        os.umask(umask)
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert td["a"].filename == str(tmp_path / "saved" / "a.memmap")
    td["a"].fill_(7)
    assert (TensorDict.load_memmap(tmp_path / "saved")["a"] == 7).all()
    assert sorted(os.listdir(tmp_path)) == ["other", "saved"]
    assert sorted(os.listdir(tmp_path / "saved")) == ["a.memmap", "b", "meta.json"]


@pytest.mark.parametrize("name", ["thesis.txt", "a.memmap"])
def test_what_appears_in_a_new_folder_stays(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, rename = tmp_path / "saved", os.rename

    def intrude_and_rename(first: str, second: str) -> None:
        if second == str(root):
            (root / name).write_text("mine")
        rename(first, second)

    monkeypatch.setattr(os, "rename", intrude_and_rename)
    if name == "a.memmap":
        with pytest.raises(FileExistsError, match="write the files into the folder"):
            make().memmap(root)
        assert os.listdir(root) == [name]
    else:
        td = make().memmap(root)
        assert td["a"].filename == str(root / "a.memmap")
        assert_same(TensorDict.load_memmap(root), make())
        assert sorted(os.listdir(root)) == ["a.memmap", "b", "meta.json", name]
    assert (root / name).read_text() == "mine" and os.listdir(tmp_path) == ["saved"]


def no_flags(first: str, second: str, flags: int) -> None:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_what_is_thrown_away_says_so_till_the_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that is killed while it removes what it has replaced leaves nothing that is taken for the caller's."""
    replaced = tmp_path / "replaced"
    nested = {f"n{number}": {"x": torch.ones(1)} for number in range(20)}
    TensorDict({**nested, "a": torch.ones(1)}).memmap(replaced)
    left = []

    def watched(call: Any) -> Any:
        def remove(*args: Any, **kwargs: Any) -> None:
            call(*args, **kwargs)
            left.append(set(os.listdir(replaced)) if replaced.exists() else set())

        return remove

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    commit.discard(str(replaced))
    assert len(left) > 60 and left[-1] == set() and all("%save" in names for names in left if names)


# --- several at once --------------------------------------------------------------------------------------------------


def test_another_process_is_saving(tmp_path: pathlib.Path) -> None:
    for root in (tmp_path / "saved", tmp_path / "empty"):
        root.mkdir()
    make().memmap(tmp_path / "saved")
    before = tree(tmp_path)
    for root in (tmp_path / "saved", tmp_path / "empty"):
        fd = os.open(root, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(SaveError, match=f"another process or thread is saving to '{root}'"):
            make(1).memmap(root)
        os.close(fd)
        assert tree(tmp_path) == before
        assert_same(make(1).memmap(root), make(1))
        before = tree(tmp_path)


def test_many_threads_save_to_one_path(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "saved"
    saves, refusals, failures, loads = [], [], [], []
    stop = threading.Event()

    def write(value: int) -> None:
        for step in range(15):
            try:
                make(100 * value + step).memmap(root)
                saves.append(value)
            except SaveError as error:
                (refusals if "another process or thread" in str(error) else failures).append(error)
            except Exception as error:
                failures.append(error)

    def read() -> None:
        while not stop.is_set():
            try:
                td = TensorDict.load_memmap(root)
            except FileNotFoundError:
                continue
            except Exception as error:
                failures.append(error)
                return
            loads.append(td)
            if (td["a"][0] != td["b", "c"]).any():
                failures.append(AssertionError("a mix"))

    writers = [threading.Thread(target=write, args=(value,)) for value in range(4)]
    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert not failures, failures
    assert saves and loads
    assert os.listdir(tmp_path) == ["saved"]


ADDING = """
import sys, torch
from tensordict import TensorDict
data = TensorDict.load_memmap(sys.argv[1]).memmap_(sys.argv[1])
print(flush=True)
input()
for i in range(200):
    data.make_memmap((f"{sys.argv[2]}n{i % 3}", f"x{i}") if i % 2 else f"{sys.argv[2]}{i}", (3,)).fill_(i)
"""


def test_processes_that_add_entries_at_once(tmp_path: pathlib.Path) -> None:
    make().memmap(tmp_path)
    with contextlib.ExitStack() as stack:
        adding = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ADDING, str(tmp_path), name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for name in "pq"
        ]
        for process in adding:
            assert process.stdout is not None
            process.stdout.readline()
        for process in adding:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
    assert [process.returncode for process in adding] == [0, 0]
    loaded = TensorDict.load_memmap(tmp_path)
    assert len(list(loaded.keys(True, True))) == 2 + 2 * 200
    assert all((loaded[f"qn{i % 3}", f"x{i}"] == i).all() for i in range(1, 200, 2))


def test_an_entry_that_another_container_made(tmp_path: pathlib.Path) -> None:
    first = make().memmap(tmp_path)
    second = TensorDict.load_memmap(tmp_path).memmap_(tmp_path)
    first.make_memmap("x", (3,)).fill_(1)
    first.make_memmap(("n", "shape"), (3,)).fill_(2)
    for key in ("x", ("n", "y"), ("n", "shape")):
        with pytest.raises(SaveError, match=r"is in .* already.*memmap_refresh_"):
            second.make_memmap(key, (3,))
    assert (second.memmap_refresh_()["x"] == 1).all()
    second.make_memmap(("n", "y"), (3,)).fill_(3)
    assert {key: float(value[0]) for key, value in TensorDict.load_memmap(tmp_path)["n"].items()} == {
        "shape": 2.0,
        "y": 3.0,
    }
    with commit.hold_lock(str(tmp_path)), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensordict.ops.entries.adding._PATIENCE", 0.01)
        with pytest.raises(SaveError, match="another process or thread"):
            first.make_memmap("z", (3,))
    assert "z" not in first.keys()
    first.make_memmap("z", (3,))


def test_a_file_system_without_locks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    root = tmp_path / "saved"
    make().memmap(root)
    make(1).memmap(root)
    (tmp_path / ".saved.tensordict-new").mkdir()
    with pytest.raises(SaveError, match="has no locks"):
        make(2).memmap(root)
    assert_same(TensorDict.load_memmap(root), make(1))


def test_a_save_that_is_replaced_in_every_read(tmp_path: pathlib.Path) -> None:
    reads: list[int] = []

    def read() -> None:
        reads.append(1)
        os.utime(tmp_path, ns=(0, len(reads)))
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(SaveError, match="replaced faster than it can be read"):
        commit.read_consistently(str(tmp_path), read)
    assert len(reads) > 1


def test_a_reader_waits_for_a_folder_that_is_away(tmp_path: pathlib.Path) -> None:
    """Without an atomic exchange, the old folder is moved aside for a moment."""
    root, aside = tmp_path / "saved", tmp_path / ".saved.tensordict-old"
    make().memmap(root)
    root.rename(aside)
    fd = os.open(aside, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def back() -> None:
        aside.rename(root)
        os.close(fd)

    timer = threading.Timer(0.05, back)
    timer.start()
    assert_same(TensorDict.load_memmap(root), make())
    timer.join()
    # The process that held it was killed.
    root.rename(aside)
    assert_same(TensorDict.load_memmap(root), make())
    assert os.listdir(tmp_path) == ["saved"]


# --- durable ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["new", "empty", "over"])
def test_durable_syncs_before_the_commit(what: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "saved"
    td = make()
    if what == "empty":
        root.mkdir()
    if what == "over":
        td = td.memmap(root)
        td = TensorDict({"a": td["a"], "b": {"c": torch.ones(3, 2)}}, [3])
    synced: list[str] = []
    sync = os.fsync
    owner, name = {"new": (os, "rename"), "empty": (os, "replace"), "over": (commit, "_rename_exchange")}[what]
    call = getattr(owner, name)

    def note(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        synced.append(re.sub(r"/%tmp-[0-9a-f]{16}(?=/)", "", path.replace(".saved.tensordict-new", "saved")))
        sync(fd)

    def commits(first: Any, second: Any) -> None:
        if what != "empty" or second.endswith("meta.json"):
            synced.append("commit")
        call(first, second)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(owner, name, commits)
    td.memmap(root, durable=True)
    before, after = synced[: synced.index("commit")], synced[synced.index("commit") + 1 :]
    for name in ("a.memmap", "b/c.memmap", "b/meta.json", "b", ""):
        assert str(root / name) in before, name
    # In an existing folder, the description is renamed from a temporary name.
    assert any(
        "meta.json" in name or "%tmp" in name for name in before if name.startswith(f"{root}/") and "/b/" not in name
    )
    assert str(root if what == "empty" else tmp_path) in after


def test_a_file_that_has_the_temporary_name_stays(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, target = tmp_path / "theirs", tmp_path / "x"
    theirs.write_bytes(b"theirs")
    target.write_bytes(b"old")
    monkeypatch.setattr(files, "temporary_name", lambda folder: str(theirs))
    with pytest.raises(FileExistsError):
        files.write_file(str(target), b"new")
    assert (theirs.read_bytes(), target.read_bytes()) == (b"theirs", b"old")
