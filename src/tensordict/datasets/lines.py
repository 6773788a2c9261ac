"""`Line`: the description of a shard in a manifest and in its label, with the names of shards and writers."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from tensordict.memory.names import DATASET_FOLDERS

WRITERS, SHARDS = DATASET_FOLDERS
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_NAME = re.compile(r"[0-9]{8}(\.[0-9a-z]{1,16})?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST = 2**53
# The record of a shard that is not merged, as writers write it: number, suffix, rows, bytes and digest.
_PLAIN = re.compile(
    rb'\["([0-9]{8})((?:\.[0-9a-z]{1,16})?)",([1-9][0-9]{0,14}),(null|0|[1-9][0-9]{0,14}),"([0-9a-f]{64})"\]'
)

# Lines of a writer that a merged shard replaces: the writer, the number of the first line, and the rows of each line.
Run = tuple[str, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Line:
    """A shard as described by a manifest or by its label.

    Args:
        path: the path of the shard in the data set.
        rows: the number of rows; 0 in the label of a shard that is not merged.
        nbytes: the length of all its files; `None` if unknown.
        digest: the digest of its description; empty if unknown.
        generation: how often its rows were merged.
        holds: for a merged shard, the lines whose rows it has.
    """

    path: str
    rows: int = 0
    nbytes: int | None = None
    digest: str = ""
    generation: int = 0
    holds: tuple[Run, ...] = ()

    @property
    def writer(self) -> str:
        """The writer of the shard."""
        return self.path.split("/")[1]

    @property
    def order(self) -> tuple[int, str]:
        """Sort key for merged shards. Rows are read from the last shard that has them."""
        return self.generation, self.path

    @property
    def label(self) -> list[Any]:
        """The label in the shard, as JSON."""
        name = os.path.basename(self.path)
        return [self.writer, name, self.generation, self.holds] if self.holds else [self.writer, name]

    def lines(self) -> list[tuple[str, int]]:
        """Return the lines that a merged shard replaces, as (writer, number)."""
        return [(writer, start + at) for writer, start, rows in self.holds for at in range(len(rows))]

    def to_json(self) -> list[Any]:
        """Return the record for a manifest."""
        item: list[Any] = [os.path.basename(self.path), self.rows, self.nbytes, self.digest]
        return [*item, self.generation, self.holds] if self.holds else item


class Lines(Sequence[Line]):
    """The lines of a manifest, packed into 64 bytes each, because a data set may have 100,000 of them.

    Args:
        writer: the id of the writer.

    Attributes:
        merged: the lines of merged shards by number, which are not packed.
    """

    def __init__(self, writer: str) -> None:
        self._writer = writer
        # For each line the number in the name, the suffix as a position in `_suffixes`, the rows, and the bytes or -1.
        self._numbers = array("q")
        self._digests = bytearray()
        self._suffixes: dict[str, int] = {}
        self._highest = -1
        self.merged: dict[int, Line] = {}

    def __len__(self) -> int:
        return len(self._numbers) // 4

    @overload
    def __getitem__(self, number: int) -> Line: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Line]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        number = range(len(self))[number]
        if (found := self.merged.get(number)) is not None:
            return found
        name, suffix, rows, nbytes = self._numbers[4 * number : 4 * number + 4]
        path = f"{SHARDS}/{self._writer}/{name:08}{list(self._suffixes)[suffix]}"
        return Line(path, rows, None if nbytes < 0 else nbytes, self._digests[32 * number : 32 * number + 32].hex())

    def __iter__(self) -> Iterator[Line]:
        return map(self.__getitem__, range(len(self)))

    def add(self, line: Line) -> None:
        """Append a line.

        Raises:
            ValueError: another line has the same path.
        """
        number, suffix = split_name(line.path)
        if line.holds:
            self.merged[len(self)] = line
        try:
            self._add(number, suffix, line.rows, -1 if line.nbytes is None else line.nbytes, line.digest)
        except ValueError:
            self.merged.pop(len(self), None)
            raise

    def add_text(self, text: bytes) -> bool:
        """Append a line from its JSON, if that has the usual form of a line that is not merged.

        Returns:
            False if the text has another form; nothing was added then.

        Raises:
            ValueError: another line has the same path.
        """
        found = _PLAIN.fullmatch(text)
        if found is None:
            return False
        name, suffix, rows, nbytes, digest = found.groups()
        self._add(int(name), suffix.decode(), int(rows), -1 if nbytes == b"null" else int(nbytes), digest.decode())
        return True

    def _add(self, number: int, suffix: str, rows: int, nbytes: int, digest: str) -> None:
        # The names of most writers rise, so that the search is rare.
        if number <= self._highest and self._find(number, suffix):
            raise ValueError(f"the shard '{number:08}{suffix}' is listed twice")
        self._highest = max(self._highest, number)
        # Another thread may read meanwhile: the length changes last.
        self._digests += bytes.fromhex(digest)
        self._numbers.extend((number, self._suffixes.setdefault(suffix, len(self._suffixes)), rows, nbytes))

    def _find(self, number: int, suffix: str) -> bool:
        return bool((self.table()[:, :2] == (number, self._suffixes.get(suffix, -1))).all(1).any())

    def has(self, path: str) -> bool:
        """Return True if a line has this path."""
        return path.split("/")[1] == self._writer and self._find(*split_name(path))

    def paths(self) -> set[str]:
        """Return the paths of all shards."""
        return {line.path for line in self}

    def first(self, count: int) -> Lines:
        """Return a copy of the first lines."""
        made = Lines(self._writer)
        made._numbers, made._digests = self._numbers[: 4 * count], self._digests[: 32 * count]
        made._suffixes, made._highest = self._suffixes.copy(), self._highest
        made.merged = {number: line for number, line in self.merged.items() if number < count}
        return made

    def table(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return a copy of the number in the name, the position in `suffixes`, the rows and the bytes of each line."""
        # NumPy itself would let other threads run while it copies, and none could add a line meanwhile.
        return np.frombuffer(self._numbers[: len(self._numbers) // 4 * 4], dtype=np.int64).reshape(-1, 4)

    @property
    def suffixes(self) -> list[str]:
        """The suffixes of the names."""
        return list(self._suffixes)


def split_name(path: str) -> tuple[int, str]:
    """Return the number and the suffix in the path of a shard."""
    name = path.rpartition("/")[2]
    return int(name[:8]), name[8:]


def new_id() -> str:
    """Return a unique id for a writer. Ids sort by the time of their creation."""
    now = time.time_ns()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9))
    host = re.sub(r"[^0-9A-Za-z-]", "-", socket.gethostname())[:32]
    return f"{stamp}.{now % 10**9 // 1000:06}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


def is_id(name: object) -> bool:
    """Return True for valid ids of writers."""
    return type(name) is str and bool(_ID.fullmatch(name))


def is_shard_name(name: object) -> bool:
    """Return True for valid names of shards in the folder of a writer."""
    return type(name) is str and bool(_NAME.fullmatch(name))


# --- from JSON --------------------------------------------------------------------------------------------------------


def parse_line(writer: str, item: list[Any]) -> Line:
    """Parse a record of a manifest, a JSON array.

    Raises:
        ValueError: the record is invalid.
    """
    if len(item) not in (4, 6) or not is_shard_name(item[0]):
        raise ValueError(f"{item[:1]!r:.80} is not the name of a shard")
    path, rows, nbytes, digest = f"{SHARDS}/{writer}/{item[0]}", _parse_count(item[1]), item[2], item[3]
    if nbytes is not None and (type(nbytes) is not int or not 0 <= nbytes < _MOST):
        raise ValueError(f"{nbytes!r:.40} is not a number of bytes")
    if type(digest) is not str or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r:.80} is not a digest")
    if len(item) == 4:
        return Line(path, rows, nbytes, digest)
    found = Line(path, rows, nbytes, digest, _parse_count(item[4]), _parse_holds(item[5]))
    if sum(sum(run[2]) for run in found.holds) != rows:
        raise ValueError(f"the lines it stands for do not have {rows} rows together")
    return found


def parse_label(value: Any) -> Line | None:
    """Parse a label. Return `None` if it is invalid."""
    if type(value) is not list or len(value) not in (2, 4) or not is_id(value[0]) or not is_shard_name(value[1]):
        return None
    path = f"{SHARDS}/{value[0]}/{value[1]}"
    if len(value) == 2:
        return Line(path)
    try:
        holds = _parse_holds(value[3])
        return Line(path, sum(sum(run[2]) for run in holds), None, "", _parse_count(value[2]), holds)
    except ValueError:
        return None


def _parse_holds(value: Any) -> tuple[Run, ...]:
    """Parse the lines that a merged shard replaces. Raise a `ValueError` without lines, or if a line occurs twice."""
    if type(value) is not list or not value:
        raise ValueError("it does not say which lines it stands for")
    runs = tuple(map(_parse_run, value))
    if len({(run[0], run[1] + at) for run in runs for at in range(len(run[2]))}) != sum(len(run[2]) for run in runs):
        raise ValueError("it stands for one line twice")
    return runs


def _parse_run(value: Any) -> Run:
    if type(value) is not list or len(value) != 3 or not is_id(value[0]):
        raise ValueError(f"{value!r:.80} names no lines of a writer")
    writer, start, rows = value
    if type(start) is not int or not 0 <= start < _MOST or type(rows) is not list or not rows:
        raise ValueError(f"{value!r:.80} names no lines of a writer")
    return writer, start, tuple(map(_parse_count, rows))


def _parse_count(value: Any) -> int:
    if type(value) is not int or not 0 < value < _MOST:
        raise ValueError(f"{value!r:.40} is not a positive number")
    return value
