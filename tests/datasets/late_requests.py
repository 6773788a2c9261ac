"""Data sets at a URL whose requests are lost, late, carried out twice, and in another order. See test_adversary.py.

A trial writes with several writers, compacts, tidies and reads, while the proxy before the server does to requests what
networks do. A request that is late is carried out after later ones, and when its client has sent it again or given up.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "io"))
from adversary import make_rows, read_number
from remote_server import CUT, DROP, FAIL, LATE, TWICE, Fault, Proxy

from tensordict import DatasetWriter, open_dataset, verify
from tensordict.datasets import compact, tidy
from tensordict.io.remote.urls import Remote

_WHERE = ("", "writers/", "writers/", "shards/", ".compacting", "schema.json")


@dataclass
class Trial:
    """One data set, and what its writers were told.

    Args:
        url: of the data set.
        proxy: before the server.
        options: the `storage_options`.
        seed: of all that is chosen.

    Attributes:
        acknowledged: the numbers of rows whose flush has succeeded.
        pending: by writer, the numbers of rows that it still has.
        given_up: the numbers of rows of flushes that failed, whose writers are closed: they may be there.
        counts: what was done.
    """

    url: str
    proxy: Proxy
    options: dict[str, Any]
    seed: int
    acknowledged: set[int] = field(default_factory=set)
    pending: dict[DatasetWriter, list[int]] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._next = 0
        self._reader: Any = None
        self._shown: list[int] = []

    def run(self, steps: int = 20) -> None:
        """Do as many things at random, and look at the rows after each."""
        doings = [self._write] * 6 + [self._close, self._compact, self._tidy, self._deliver, self._deliver]
        with warnings.catch_warnings():
            # Shards that no manifest lists are what uploads leave that were given up.
            warnings.simplefilter("ignore")
            for _ in range(steps):
                self._arm()
                self._chance.choice(doings)()
                self.proxy.faults.clear()
                self._check()
            for writer in list(self.pending):
                self._end(writer)
            self._check()
            self.counts["late requests carried out"] += self.proxy.deliver(chance=self._chance)
            self._check()
            for doing in (self._compact, self._tidy):
                doing()
                self._check()
            self._verify()

    def _arm(self) -> None:
        for _ in range(self._chance.randrange(1, 4)):
            kind = self._chance.choice((LATE, LATE, LATE, TWICE, DROP, CUT, FAIL))
            method = self._chance.choice(("PUT", "PUT", "PUT", "DELETE", "GET"))
            if kind in (LATE, TWICE) and method == "GET":
                kind = DROP
            times, after = self._chance.choice((1, 1, 2, 99)), self._chance.choice((0, 0, 0, 1))
            self.proxy.faults.append(Fault(kind, method, self._chance.choice(_WHERE), times, after))

    def _write(self) -> None:
        if len(self.pending) < 3 and self._chance.random() < 0.4:
            try:
                self.pending[DatasetWriter(self.url, storage_options=self.options)] = []
            except OSError as error:
                self._note(error)
        if not self.pending:
            return
        writer = self._chance.choice(list(self.pending))
        count = self._chance.randrange(1, 4)
        before = writer.rows
        try:
            writer.extend(make_rows(self._next, count))
            self.pending[writer] += range(self._next, self._next + count)
            if self._chance.random() < 0.9:
                writer.flush()
                self._acknowledge(writer)
        except OSError as error:
            self._note(error)
            known = self.pending[writer]
            if self._next not in known:
                known += range(self._next, self._next + writer.rows - before)
        self._next += count

    def _note(self, error: OSError) -> None:
        assert self.url in str(error), f"seed {self.seed}: an error names no URL: {error!r}"
        self.counts["calls that failed"] += 1

    def _acknowledge(self, writer: DatasetWriter) -> None:
        self.counts["flushes"] += 1
        self.acknowledged.update(self.pending[writer])
        self.pending[writer] = []

    def _close(self) -> None:
        if self.pending:
            self._end(self._chance.choice(list(self.pending)))

    def _end(self, writer: DatasetWriter) -> None:
        try:
            writer.close()
            self._acknowledge(writer)
        except OSError as error:
            self._note(error)
        self.given_up.update(self.pending.pop(writer))

    def _compact(self) -> None:
        limit = self._chance.choice((4, 10, 1000))
        self._maintain(lambda: compact(self.url, rows_per_shard=limit, storage_options=self.options))

    def _tidy(self) -> None:
        self._maintain(lambda: tidy(self.url, older_than=0, storage_options=self.options))

    def _maintain(self, call: Any) -> None:
        try:
            call()
            self.counts["compactions and sweeps"] += 1
        except OSError as error:
            self._note(error)
        self.proxy.faults.clear()
        # The claim of a compaction whose requests are lost is deleted by people, as the error says.
        Remote(self.url, self.options).delete([".compacting"])

    def _deliver(self) -> None:
        self.counts["late requests carried out"] += self.proxy.deliver(self._chance.randrange(4), self._chance)

    def _read(self, data: Any, start: int = 0) -> list[int]:
        try:
            found = [read_number(data[row]) for row in range(start, len(data))]
        except OSError as error:
            raise AssertionError(f"seed {self.seed}: a row cannot be read: {error}") from error
        assert None not in found, "a row is not whole"
        return [int(n) for n in found if n is not None]

    def _check(self) -> None:
        """A new reader and one that follows have every row that was acknowledged once, and no row twice."""
        try:
            data = open_dataset(self.url, storage_options=self.options)
        except FileNotFoundError:
            assert not self.acknowledged, f"seed {self.seed}: the data set has gone"
            return
        if self._reader is None:
            self._reader = data
        self._reader.refresh()
        self._shown += self._read(self._reader, len(self._shown))
        known = self.acknowledged | self.given_up | {n for numbers in self.pending.values() for n in numbers}
        for numbers in (self._read(data), self._shown):
            assert len(set(numbers)) == len(numbers), f"seed {self.seed}: rows are there twice: {sorted(numbers)}"
            lost = self.acknowledged - set(numbers)
            assert not lost, f"seed {self.seed}: the rows {sorted(lost)} were acknowledged, and are lost"
            assert known >= set(numbers), f"seed {self.seed}: rows that nobody wrote: {sorted(set(numbers) - known)}"
        self.counts["readings"] += 1

    def _verify(self) -> None:
        """Only one fault is possible: no manifest lists a complete shard."""
        if not self.acknowledged:
            return
        assert self._read(self._reader)[: len(self._shown)] == self._shown, "rows have changed for a reader"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = verify(self.url, raises=False, storage_options=self.options)
        wrong = [problem for problem in report.problems if "no manifest lists" not in problem]
        assert not wrong, f"seed {self.seed}: {wrong}"
        self.counts["rows acknowledged"] += len(self.acknowledged)


def run_trials(proxy: Proxy, options: dict[str, Any], urls: list[str], seed: int, steps: int = 20) -> Counter[str]:
    """One trial at each URL; what was done in all of them.

    Raises:
        AssertionError: a promise does not hold; names the seed.
    """
    counts: Counter[str] = Counter()
    for number, url in enumerate(urls):
        proxy.clear()
        trial = Trial(url, proxy, options, seed + number)
        trial.run(steps)
        counts += trial.counts
        counts["trials"] += 1
    proxy.clear()
    return counts
