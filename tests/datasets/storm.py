"""Writers, readers, a compactor and a sweeper work on one data set at once, in processes that are killed at random.

Run as a program (test_storm.py does):

    storm.py PATH SECONDS SEED [STORAGE_OPTIONS]        the options of a URL, as JSON

Every row says who wrote it (a writer that is started again is another one) and which it is. Before a writer adds rows
it notes how many it will have begun, and after each flush how many were acknowledged. At the end, and in every reader
all the while, each writer's rows are there from the first one on, once, whole and in their order: all those that were
acknowledged, and none that was not begun. The last line that is printed is the tally, as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import pathlib
import random
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from killing_writers import check_rows, rows

from tensordict import DatasetWriter, open_dataset, verify
from tensordict.core.exceptions import SaveError
from tensordict.datasets import compact, tidy
from tensordict.io.remote.urls import Remote, is_url

# The processes that run at once.
ROLES = ("write", "write", "write", "read", "read", "compact", "sweep")
# So many writers can be started in one storm.
_MOST = 4096
# A storm goes on until so many rows were acknowledged.
_ENOUGH = 100


class Notes:
    """The shared memory where each writer counts the rows that it began and the rows that it finished."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16 * _MOST)

    def begin(self, writer: int, count: int) -> None:
        """So many rows are about to be given to the writer, in all."""
        struct.pack_into("q", self._memory, 16 * writer, count)

    def acknowledge(self, writer: int, count: int) -> None:
        """So many rows were flushed."""
        struct.pack_into("q", self._memory, 16 * writer + 8, count)

    def read(self, writers: int) -> list[tuple[int, int]]:
        """By writer, how many rows were begun, and how many acknowledged."""
        return [struct.unpack_from("qq", self._memory, 16 * writer) for writer in range(writers)]


@dataclass
class Storm:
    """One data set, and the processes at work on it.

    Args:
        path: the folder or the URL.
        options: the `storage_options` of a URL.
        seed: of all that is chosen.
    """

    path: str
    options: dict[str, Any] | None
    seed: int
    notes: Notes = field(default_factory=Notes)
    writers: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._children: dict[int, str] = {}
        self._all_options = {"storage_options": self.options}

    def run(self, seconds: float) -> None:
        """Let them work, kill one after the other, and look at what there is in the end."""
        end = time.monotonic() + seconds
        try:
            for role in ROLES:
                self._start(role)
            # On a machine with much else to do, processes need some time until they do anything.
            while time.monotonic() < end or self._count_acknowledged() < _ENOUGH:
                time.sleep(self._chance.random() * 0.2)
                child = self._chance.choice(list(self._children))
                self._start(self._kill(child))
            for child in list(self._children):
                self._kill(child)
        finally:
            # Nothing goes on after a storm that has failed.
            for child in self._children:
                os.kill(child, signal.SIGKILL)
        # A process of its own also reads the results, because the threads of fsspec do not survive a fork.
        for doing in (self._check, self._merge, self._check):
            self._wait(self._fork(doing))
        self.counts["rows acknowledged"] = self._count_acknowledged()
        self.counts["writers"] = self.writers

    def _count_acknowledged(self) -> int:
        return sum(acknowledged for _, acknowledged in self.notes.read(self.writers))

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, role: str) -> None:
        seed, writer = self._chance.randrange(1 << 30), self.writers
        work: Callable[[], None]
        if role == "write":
            assert writer < _MOST, "the storm has more writers than there is memory for"
            self.writers += 1
            work = lambda: self._write(writer, random.Random(seed))  # noqa: E731
        else:
            doing = {"read": self._read, "compact": self._compact, "sweep": self._sweep}[role]
            work = lambda: doing(random.Random(seed))  # noqa: E731
        self._children[self._fork(work)] = role

    def _fork(self, work: Callable[[], None]) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            self._end_with_parent()
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _end_with_parent(self) -> None:
        """Ask the kernel to kill this process when its parent ends."""
        signal_of_death = 1
        if prctl := getattr(ctypes.CDLL(None), "prctl", None):
            prctl(signal_of_death, signal.SIGKILL)

    def _wait(self, child: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"the check has failed, with {code}"

    def _kill(self, child: int) -> str:
        """Kill a process, which must not have ended by itself; what it did."""
        role = self._children.pop(child)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), f"a process that should {role} has failed by itself, with {status}"
        self.counts[f"killed: {role}"] += 1
        if role in ("compact", "sweep") and is_url(self.path):
            self._wait(self._fork(lambda: self._release(child)))
        return role

    def _release(self, child: int) -> None:
        """Delete the claim of a process that was killed, as people do."""
        store = Remote(self.path, self.options)
        with contextlib.suppress(FileNotFoundError):
            if f"process {child}," in store.read(".compacting").decode():
                store.delete([".compacting"])

    # --- what they do -------------------------------------------------------------------------------------------------

    def _write(self, writer: int, chance: random.Random) -> None:
        formats = ("archive",) if is_url(self.path) else ("folder", "folder", "archive", "archive", "zarr")
        format = chance.choice(formats)
        how: dict[str, Any] = {"checksum": chance.choice((True, False))} if format == "folder" else {}
        number = 0
        with DatasetWriter(
            self.path, rows_per_shard=chance.choice((3, 17, 1000)), format=format, **how, **self._all_options
        ) as out:
            while True:
                count = chance.choice((1, 2, 5, 40))
                self.notes.begin(writer, number + count)
                out.extend(rows(writer, number, count))
                number += count
                if chance.random() < 0.4:
                    out.flush()
                    self.notes.acknowledge(writer, number)
                time.sleep(chance.random() * 0.02)

    def _read(self, chance: random.Random) -> None:
        data: Any = None
        found: dict[int, int] = {}
        while True:
            told = self.notes.read(_MOST)
            start = 0 if data is None else len(data)
            try:
                if data is None:
                    data = open_dataset(self.path, **self._all_options)
                else:
                    data.refresh()
            except FileNotFoundError:
                assert not any(acknowledged for _, acknowledged in told), "the data set is not there"
                continue
            found = check_rows(data, start, found)
            self._compare(found, told)
            # Rows that were read before are read again: they may have been moved meanwhile.
            if len(data):
                again = data[torch.tensor([chance.randrange(len(data)) for _ in range(20)])]
                for row in again:
                    single = rows(int(row["writer"]), int(row["number"]), 1)[0]
                    assert torch.equal(row["content"], single["content"]) and row["name"] == single["name"], (
                        "a row is not whole"
                    )
            time.sleep(chance.random() * 0.02)

    def _compare(self, found: dict[int, int], told: list[tuple[int, int]]) -> None:
        """All rows that were acknowledged are there: of those that were begun since, as many as there are."""
        for writer, (_, acknowledged) in enumerate(told):
            assert found.get(writer, 0) >= acknowledged, (
                f"{acknowledged} rows of writer {writer} were acknowledged, and {found.get(writer, 0)} are there"
            )

    def _compact(self, chance: random.Random) -> None:
        formats = ("", "archive") if is_url(self.path) else ("", "folder", "archive")
        while True:
            time.sleep(chance.random() * 0.2)
            how = {"rows_per_shard": chance.choice((60, 500, 5000)), "format": chance.choice(formats)}
            with self._other_at_work():
                compact(self.path, keep=chance.random() < 0.3, **how, **self._all_options)

    def _sweep(self, chance: random.Random) -> None:
        while True:
            time.sleep(chance.random() * 0.2)
            with self._other_at_work():
                tidy(self.path, older_than=0, **self._all_options)

    @contextlib.contextmanager
    def _other_at_work(self) -> Iterator[None]:
        """A block that may find no data set yet, or another process that compacts or tidies."""
        try:
            yield
        except FileNotFoundError:
            if any(acknowledged for _, acknowledged in self.notes.read(_MOST)):
                raise
        except SaveError as error:
            if ".compacting" not in str(error) and "another process" not in str(error):
                raise

    # --- the end ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        data = open_dataset(self.path, **self._all_options)
        found = check_rows(data, 0, {})
        told = self.notes.read(_MOST)
        self._compare(found, told)
        for writer, count in found.items():
            begun = told[writer][0]
            assert count <= begun, f"{begun} rows of writer {writer} were begun, and {count} are there"

    def _merge(self) -> None:
        compact(self.path, **self._all_options)
        tidy(self.path, older_than=0, **self._all_options)
        report = verify(self.path, raises=False, **self._all_options)
        # Kills leave a truncated line and complete shards that no manifest lists.
        left = ("cut off", "no manifest lists")
        wrong = [problem for problem in report.problems if not any(what in problem for what in left)]
        assert not wrong, wrong


def main() -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    path, seconds, seed, *others = sys.argv[1:]
    if is_url(path):
        # Each process would import it anew.
        importlib.import_module("s3fs")
    else:
        pathlib.Path(path).parent.mkdir(exist_ok=True)
    storm = Storm(path, json.loads(others[0]) if others else None, int(seed))
    storm.run(float(seconds))
    print(json.dumps(storm.counts))


if __name__ == "__main__":
    main()
