"""Kills processes that write and compact a data set, and looks at what they leave. See test_faults.py.

Run as a program:

- `killing_writers.py random FOLDER ROUNDS SEED`: four writers at once, killed at random moments, round after round;
- `killing_writers.py steps FOLDER FORMAT`: one writer, and one compaction, killed at each change of a file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import random
import shutil
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "io"))
from killing import in_child

from tensordict import DatasetWriter, TensorDict, open_dataset, verify
from tensordict.datasets import compact, tidy

WRITERS = 4


def rows(writer: int, first: int, count: int) -> TensorDict:
    """Rows that say whose they are, and which; the sums show whether a row is whole."""
    number = torch.arange(first, first + count)
    content = number.unsqueeze(1) + writer * torch.arange(64)
    return TensorDict(
        {
            "writer": torch.full((count,), writer),
            "number": number,
            "content": content,
            "name": [f"{n}" for n in number],
        },
        [count],
    )


def check(folder: pathlib.Path) -> dict[int, int]:
    """How many rows of each writer are in the data set, all of them whole and in their order."""
    try:
        data = open_dataset(folder)
    except FileNotFoundError:
        return {}
    return check_rows(data, 0, {})


def check_rows(data: Any, start: int, known: dict[int, int]) -> dict[int, int]:
    """How many rows there are of each writer, as `known` for those before `start`; the others are looked at."""
    if start == len(data):
        return known
    td = data[torch.arange(start, len(data))]
    expected = td["number"].unsqueeze(1) + td["writer"].unsqueeze(1) * torch.arange(64)
    assert torch.equal(td["content"], expected), "a row is not whole"
    found = dict(known)
    for writer in td["writer"].unique().tolist():
        number = td["number"][td["writer"] == writer]
        first = known.get(writer, 0)
        found[writer] = first + len(number)
        assert torch.equal(number.sort().values, torch.arange(first, found[writer])), (
            f"rows of {writer} are lost or twice"
        )
    assert td["name"] == [f"{n}" for n in td["number"].tolist()]
    return found


class Follower:
    """A reader that is there all the time, and looks at the rows that are new; so a round costs no more than these."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._data: Any = None
        self.found: dict[int, int] = {}

    def follow(self) -> dict[int, int]:
        start = 0
        if self._data is not None:
            start = len(self._data)
            self._data.refresh()
        else:
            with contextlib.suppress(FileNotFoundError):
                self._data = open_dataset(self._folder)
        if self._data is not None:
            self.found = check_rows(self._data, start, self.found)
        return self.found


# --- random moments ---------------------------------------------------------------------------------------------------


def write_on(folder: pathlib.Path, writer: int, first: int, flushed: Callable[[int], None], seed: int) -> None:
    """Write until somebody kills us; tell how far flushed rows go."""
    chance = random.Random(seed)
    formats = ("folder", "archive")
    number = first
    with DatasetWriter(folder, rows_per_shard=chance.choice((3, 17, 1000)), format=formats[writer % 2]) as out:
        while True:
            count = chance.choice((1, 2, 5, 40))
            out.extend(rows(writer, number, count))
            number += count
            if chance.random() < 0.3:
                out.flush()
                flushed(number)


def random_rounds(folder: pathlib.Path, rounds: int, seed: int) -> None:
    """Kill four writers at random moments; what was flushed is there, nothing is there twice, and others go on."""
    chance = random.Random(seed)
    shared = mmap.mmap(-1, 8 * WRITERS)
    known: dict[int, int] = {}
    reader = Follower(folder)
    killed_at_work = 0
    for number in range(rounds):
        for writer in range(WRITERS):
            struct.pack_into("q", shared, 8 * writer, known.get(writer, 0))
        children = []
        for writer in range(WRITERS):
            child = os.fork()
            if not child:

                def flushed(count: int, writer: int = writer) -> None:
                    struct.pack_into("q", shared, 8 * writer, count)

                try:
                    write_on(folder, writer, known.get(writer, 0), flushed, chance.randrange(1 << 30) + writer)
                finally:
                    os._exit(1)
            children.append(child)
            chance.random()
        time.sleep(chance.random() * 0.15)
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            status = os.waitpid(child, 0)[1]
            assert os.WIFSIGNALED(status), "a writer failed by itself"
        found = reader.follow()
        for writer in range(WRITERS):
            told = struct.unpack_from("q", shared, 8 * writer)[0]
            assert found.get(writer, 0) >= told, (
                f"round {number}: {told} rows of {writer} were flushed, {found} are there"
            )
            killed_at_work += told > known.get(writer, 0)
        if number % 10 == 4:
            compact(folder, rows_per_shard=chance.choice((60, 2000)))
            assert check(folder) == found
        if number % 10 == 9:
            tidy(folder, older_than=0)
            assert check(folder) == found
        known = found
    assert killed_at_work, "no writer got as far as to flush"
    if sweep_up(folder):
        verify(folder)
        listed = {path for path, _ in open_dataset(folder).shards()}
        assert {str(path) for path in (folder / "shards").glob("*/*")} == listed, "something is left"
    print(rounds, "rounds,", sum(known.values()), "rows")


def sweep_up(folder: pathlib.Path) -> bool:
    """Tidy, and remove what is left by name; whether that is allowed: no line of a manifest is cut off."""
    damaged = bool(open_dataset(folder).problems)
    swept = tidy(folder, older_than=0)
    if damaged:
        assert swept.removed == [], "something was removed though a manifest is damaged"
        return False
    assert all("no manifest lists it" in reason for reason in swept.left.values()), swept.left
    assert tidy(folder, older_than=0, shards=swept.left).left == {}
    return True


# --- every change -----------------------------------------------------------------------------------------------------


def steps(folder: pathlib.Path, format: str) -> None:
    """Kill a writer and a compaction at each change that they make to a file."""
    shared = mmap.mmap(-1, 8)

    def write() -> None:
        with DatasetWriter(folder / "data", rows_per_shard=4, format=format) as out:
            out.extend(rows(1, 0, 6))
            out.flush()
            struct.pack_into("q", shared, 0, 6)
            out.append(rows(1, 6, 1)[0])

    def merge() -> None:
        compact(folder / "data", rows_per_shard=100)

    print(format, "writer", each_change(folder, write, shared), "changes")
    shutil.rmtree(folder / "data", ignore_errors=True)
    write()
    data = folder / "data"
    kept = folder / "kept"
    shutil.copytree(data, kept, symlinks=True)
    count = 0
    while True:
        count += 1
        reader = open_dataset(data)
        killed = in_child(merge, count)
        # A reader that has opened nothing yet finds the rows, and so does one that comes later.
        assert reader["number"].tolist() == list(range(7)) and check(data) == {1: 7}
        merge()
        if sweep_up(data):
            assert len(list((data / "shards").glob("*/*"))) == 1, "something is left"
        assert check(data) == {1: 7}
        if not killed:
            break
        shutil.rmtree(data)
        shutil.copytree(kept, data, symlinks=True)
    print(format, "compaction", count, "changes")


def each_change(folder: pathlib.Path, write: Callable[[], Any], shared: mmap.mmap) -> int:
    """Kill a writer at each of its changes, on a new data set; another one goes on behind it."""
    count = 0
    while True:
        count += 1
        shutil.rmtree(folder / "data", ignore_errors=True)
        struct.pack_into("q", shared, 0, 0)
        killed = in_child(write, count)
        told = struct.unpack_from("q", shared, 0)[0]
        found = check(folder / "data").get(1, 0)
        assert told <= found <= 7, f"{told} rows were flushed, and {found} are there after {count} changes"
        with DatasetWriter(folder / "data") as out:
            out.extend(rows(2, 0, 3))
        assert check(folder / "data") == ({1: found, 2: 3} if found else {2: 3})
        sweep_up(folder / "data")
        assert check(folder / "data").get(1, 0) == found
        if not killed:
            return count


def main() -> None:
    # A manifest whose last line was cut in half is what these kills leave.
    warnings.filterwarnings("ignore", message=".*the line is cut off.*")
    what, folder, *others = sys.argv[1:]
    if what == "random":
        random_rounds(pathlib.Path(folder), int(others[0]), int(others[1]))
    else:
        steps(pathlib.Path(folder), others[0])


if __name__ == "__main__":
    main()
