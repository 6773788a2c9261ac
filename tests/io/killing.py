"""Kills saving processes at every system call that changes a file, and looks at what they leave (test_transaction.py).

Run as a program, `killing.py` reads lines `SCENARIO:FOLDER`, and prints for each how many kills there were, or fails.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h5py
import torch

from tensordict import TensorDict, append_memmap, load_checkpoint, save_checkpoint, verify
from tensordict.io.saving import commit
from tensordict.memory import system

# Calls that change the disk. Each one may be the last, and a write may be cut in half.
CHANGES = ("mkdir", "write", "pwrite", "link", "rename", "replace", "unlink", "rmdir", "chmod", "open", "close")
CHANGES += ("pwritev", "fchmod")
MINE = {"notes.txt": "mine", "b/own/deep.txt": "deep", "runs/log": "log"}


def old() -> TensorDict:
    return TensorDict(
        {"a": torch.arange(5), "b": {"c": torch.zeros(5, 3), "gone": torch.ones(5)}, "k": torch.ones(5)}, [5]
    )


def new() -> TensorDict:
    return TensorDict({"a": torch.arange(5) + 9, "b": {"c": torch.full((5, 3), 7.0)}, "n": {"x": torch.ones(5)}}, [5])


def last() -> TensorDict:
    return TensorDict({"a": torch.arange(5) - 3, "b": {"z": torch.ones(5)}}, [5])


def same(loaded: Any, expected: TensorDict) -> bool:
    mine = dict(loaded.items(True, True))
    return mine.keys() == dict(expected.items(True, True)).keys() and all(
        torch.equal(leaf, expected[key]) for key, leaf in mine.items()
    )


def kill_at(count: int) -> None:
    """Have this process killed at its `count`th change."""
    left = count

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name in ("write", "pwrite") and len(args[1]) > 1:
                    call(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return change

    for name in CHANGES:
        setattr(os, name, watched(name, getattr(os, name)))
    commit._rename_by_flags = watched("renameat2", commit._rename_by_flags)
    system.reserve = watched("fallocate", system.reserve)
    # HDF5 writes by itself, at these calls.
    for owner, name in ((h5py.Group, "create_dataset"), (h5py.Dataset, "__setitem__"), (h5py.File, "close")):
        setattr(owner, name, watched(name, getattr(owner, name)))


def in_child(work: Callable[[], Any], count: int) -> bool:
    """Run in a child that is killed at its `count`th change; whether it was."""
    child = os.fork()
    if not child:
        code = 1
        try:
            kill_at(count)
            work()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the child failed"
    return False


def no_exchange(first: str, second: str) -> None:
    raise OSError(22, "Invalid argument")


def put_mine(root: pathlib.Path) -> None:
    for name, text in MINE.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)


def check_mine(folder: pathlib.Path) -> None:
    """The caller's files still exist: in the save, or where the next save looks for them."""
    for name, text in MINE.items():
        places = [found for found in folder.iterdir() if (found / name).exists()]
        assert places, f"{name} is lost"
        assert all((place / name).read_text() == text for place in places)


def fill_before_rename(root: pathlib.Path) -> None:
    """Have another program put a file into the folder of a save, just before the save would replace the folder."""
    rename = os.rename

    def fill_and_rename(first: str, second: str) -> None:
        if second == str(root):
            (root / "notes.txt").write_text("mine")
        rename(first, second)

    os.rename = fill_and_rename  # type: ignore[assignment]


def once(folder: pathlib.Path, scenario: str, count: int, again: int | None) -> bool:
    """Kill one save at its `count`th change (and the next one at its `again`th), and look after each."""
    root = folder / "saved"
    over = not scenario.startswith("new path")
    if over:
        stay = old().memmap(root)
        put_mine(root)
        content = new()
        content["k"] = stay["k"]
    else:
        content = new()
    expected = content.clone()

    def save() -> None:
        if scenario == "new path, filled":
            fill_before_rename(root)
        content.memmap(root, num_threads=0, durable=scenario == "durable")

    killed = in_child(save, count)
    if over:
        loaded = TensorDict.load_memmap(root) if root.is_dir() or scenario != "no exchange" else None
        if loaded is None:
            # The first reader puts the old one back.
            loaded = TensorDict.load_memmap(root)
        assert same(loaded, expected) or (killed and same(loaded, old())), f"a mix after {count} changes"
        check_mine(folder)
    else:
        try:
            assert same(TensorDict.load_memmap(root), expected)
        except FileNotFoundError:
            assert killed
    filled = (root / "notes.txt").exists()
    if again is not None:
        in_child(lambda: last().memmap(root), again)
        if over:
            loaded = TensorDict.load_memmap(root)
            assert any(same(loaded, state) for state in (old(), expected, last())), f"a mix after {count}, {again}"
            check_mine(folder)
    last().memmap(root)
    assert same(TensorDict.load_memmap(root), last())
    assert os.listdir(folder) == ["saved"], f"leftovers after {count}, {again}: {os.listdir(folder)}"
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    mine = MINE if over else ["notes.txt"] if filled else []
    assert found == {"meta.json", "a.memmap", "b/meta.json", "b/z.memmap", *mine}, found
    shutil.rmtree(root)
    return killed


# --- entries that are added to a save --------------------------------------------------------------------------------


def longer() -> TensorDict:
    return old().update({"b": {"more": torch.zeros(5)}, "n": {"x": torch.zeros(5, 2)}, "z": torch.zeros(5)})


def adding_once(folder: pathlib.Path, count: int) -> bool:
    """As `once`, for `memmap_like` over a save that lacks entries."""
    root = folder / "saved"
    old().memmap(root)
    put_mine(root)
    killed = in_child(lambda: longer().memmap_like(root), count)
    loaded = TensorDict.load_memmap(root)
    assert same(loaded, longer()) or (killed and same(loaded, old())), f"a mix after {count} changes"
    check_mine(folder)
    assert same(longer().memmap_like(root), longer())
    # The next save takes away what a killed one has left beside the folder.
    last().memmap(root)
    assert os.listdir(folder) == ["saved"], f"leftovers after {count} changes: {os.listdir(folder)}"
    check_mine(folder)
    shutil.rmtree(root)
    return killed


def adding_kills(folder: pathlib.Path) -> int:
    """Kill at every seventh change. `once` runs the same transaction and kills at each change."""
    return sum(itertools.takewhile(bool, (adding_once(folder, count) for count in itertools.count(1, 7))))


# --- rows that are added to a save ----------------------------------------------------------------------------------


def appending_once(folder: pathlib.Path, count: int) -> bool:
    """As `once`, for `append_memmap`: the rows that are there stay what they are, also for who has mapped them."""
    root = folder / "saved"
    mapped, rows = old().memmap(root), new().exclude("n").update({"b": {"gone": torch.zeros(5)}, "k": torch.zeros(5)})
    put_mine(root)
    both = torch.cat([old(), rows])
    killed = in_child(lambda: append_memmap(root, rows), count)
    loaded = TensorDict.load_memmap(root)
    assert same(loaded, both) or (killed and same(loaded, old())), f"a mix after {count} changes"
    assert same(mapped, old())
    check_mine(folder)
    expected = torch.cat([loaded.clone(), rows])
    append_memmap(root, rows)
    assert same(TensorDict.load_memmap(root), expected) and same(mapped, old()) and verify(root).ok
    assert os.listdir(folder) == ["saved"], f"leftovers after {count} changes: {os.listdir(folder)}"
    check_mine(folder)
    shutil.rmtree(root)
    return killed


# --- checkpoints of training runs ------------------------------------------------------------------------------------


def run_of(value: float) -> dict[str, Any]:
    net = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(net.weight, value)
    torch.nn.init.constant_(net.bias, value)
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=value or 1.0), "step": int(value)}


def check_run(path: pathlib.Path, steps: set[int]) -> int:
    """Load a checkpoint, all of which is of one step."""
    run = run_of(0)
    step = load_checkpoint(path, model=run["model"], optimizer=run["optimizer"])["step"]
    assert step in steps and (run["model"].weight == step).all() and (run["model"].bias == step).all()
    assert run["optimizer"].param_groups[0]["lr"] == step
    assert isinstance(step, int)
    return step


def checkpoint_once(folder: pathlib.Path, keep: int | None, count: int) -> bool:
    """Kill one save of step 3: the checkpoint of step 2 or of step 3 is there, and the next save works."""
    path = folder / "saved"
    for step in (1, 2):
        save_checkpoint(path, keep=keep, overwrite=True, **run_of(step))
    killed = in_child(lambda: save_checkpoint(path, keep=keep, overwrite=True, **run_of(3)), count)
    assert check_run(path, {2, 3} if killed else {3})
    save_checkpoint(path, keep=keep, overwrite=True, **run_of(4))
    assert check_run(path, {4}) and os.listdir(folder) == ["saved"]
    if keep is not None:
        # What the killed save has left has the name of the checkpoint of step 3, whose next save removes it.
        save_checkpoint(path, keep=keep, overwrite=True, **run_of(3))
        assert check_run(path, {3}) and sorted(os.listdir(path)) == ["step-00000003.tdz", "step-00000004.tdz"]
        shutil.rmtree(path)
    return killed


def checkpoint_kills(folder: pathlib.Path) -> int:
    kills = 0
    for keep in (None, 2):
        kills += sum(itertools.takewhile(bool, (checkpoint_once(folder, keep, count) for count in itertools.count(1))))
        (folder / "saved").unlink(missing_ok=True)
    return kills


# --- saves that are one file -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A format of one file: how to save and to load."""

    save: Callable[[TensorDict, pathlib.Path], Any]
    load: Callable[[pathlib.Path], Any]


def read_h5(path: pathlib.Path) -> Any:
    with TensorDict.from_h5(path) as data:
        return data.to_tensordict()


FILES = {
    "archive": File(lambda td, path: td.memmap(path, archive=True), TensorDict.load_memmap),
    "archive, new only": File(lambda td, path: td.memmap(path, archive=True, existsok=False), TensorDict.load_memmap),
    "consolidated": File(lambda td, path: td.consolidate(path, checksum=True), TensorDict.from_consolidated),
    "safetensors": File(lambda td, path: td.to_safetensors(path, checksum=True), TensorDict.from_safetensors),
    "h5": File(lambda td, path: td.to_h5(path).close(), read_h5),
    "durable h5": File(lambda td, path: td.to_h5(path, durable=True).close(), read_h5),
}


def file_once(folder: pathlib.Path, file: File, over: bool, count: int, again: int | None) -> bool:
    """As `once`, for a file, which is there before or not."""
    path = folder / "saved"
    if over:
        file.save(old(), path)
    killed = in_child(lambda: file.save(new(), path), count)
    if path.exists():
        assert verify(path).ok
        loaded = file.load(path)
        assert same(loaded, new()) or (over and killed and same(loaded, old())), f"a mix after {count} changes"
    else:
        assert killed and not over
    if again is not None and over:
        in_child(lambda: file.save(last(), path), again)
        loaded = file.load(path)
        assert any(same(loaded, state) for state in (old(), new(), last())), f"a mix after {count}, {again}"
    if not over:
        path.unlink(missing_ok=True)
    file.save(last(), path)
    assert same(file.load(path), last())
    assert os.listdir(folder) == ["saved"], f"leftovers after {count}, {again}: {os.listdir(folder)}"
    path.unlink()
    return killed


def file_kills(folder: pathlib.Path, name: str) -> int:
    kills = 0
    for over in (False, True) if name != "archive, new only" else (False,):
        count = 1
        while file_once(folder, FILES[name], over, count, None):
            count += 1
        rng = random.Random(0)
        for _ in range(10):
            file_once(folder, FILES[name], over, rng.randint(1, count), rng.randint(1, count))
        kills += count - 1
    return kills


def kills(folder: pathlib.Path, scenario: str) -> int:
    """Run a scenario in an empty folder; how many kills there were."""
    if scenario in FILES:
        return file_kills(folder, scenario)
    if scenario == "checkpoints":
        return checkpoint_kills(folder)
    if scenario == "adding":
        return adding_kills(folder)
    if scenario == "appending":
        return sum(itertools.takewhile(bool, (appending_once(folder, count) for count in itertools.count(1))))
    exchange = commit._rename_exchange
    if scenario == "no exchange":
        commit._rename_exchange = no_exchange
    count = 1
    while once(folder, scenario, count, None):
        count += 1
    rng = random.Random(0)
    for _ in range(30):
        once(folder, scenario, rng.randint(1, count), rng.randint(1, count))
    commit._rename_exchange = exchange
    return count - 1


if __name__ == "__main__":
    for line in sys.stdin:
        wanted, _, where = line.rstrip("\n").partition(":")
        print(kills(pathlib.Path(where), wanted), flush=True)
