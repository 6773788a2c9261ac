"""`Line`: the description of a shard in a manifest and in its label, with the names of shards and writers."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from tensordict.memory.names import DATASET_FOLDERS

WRITERS, SHARDS = DATASET_FOLDERS
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_NAME = re.compile(r"[0-9]{8}(\.[0-9a-z]{1,16})?")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST = 2**53

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
        raise ValueError(f"{item[:1]!r:.80} names no shard")
    path, rows, nbytes, digest = f"{SHARDS}/{writer}/{item[0]}", _parse_count(item[1]), item[2], item[3]
    if nbytes is not None and (type(nbytes) is not int or not 0 <= nbytes < _MOST):
        raise ValueError(f"{nbytes!r:.40} is no number of bytes")
    if type(digest) is not str or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r:.80} is no digest")
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
        raise ValueError(f"{value!r:.40} is no positive number")
    return value
