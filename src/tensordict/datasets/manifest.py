"""Which shards of a data set count, and in which order: one file for each writer, which only grows.

The folder of a data set:

    schema.tdz            an archive of one row without content: what every row is; made once, never changed
    writers/ID.jsonl      the manifest of a writer: which of its shards count
    shards/ID/NUMBER...   the shards of a writer, each a save of its own

Nobody but its writer touches a manifest or a folder of shards, and no two writers ever have the same id: writers share
nothing, not even a lock. A shard counts once its line in a manifest is whole. A line is appended when the shard is
complete, so that a writer that is killed at any moment leaves what no line names, or a line that is cut off, and
neither is read. What was appended before is never written again. Behind a URL, where nothing can be appended to, the
manifest is put again with each line, in one step. A data set may be copied from one to the other as it is.

A line is `CRC JSON`: eight hexadecimal digits and an array. The CRC-32 is that of all lines up to this one, so that a
line that is missing or from elsewhere is noticed. The first line is `["tensordict data set", 1, ID, DIGEST]`, the
digest being that of the schema. Then, for each shard, `[NAME, ROWS]`, or `[NAME, ROWS, GENERATION, [[ID, START, STOP],
...]]` for one that stands in the place of others (compaction): it holds the rows of the shards START to STOP, by their
lines, of these writers, in that order. Where a shard has several such places, that of the highest generation counts.

The rows of a data set are those of all writers, ordered by id (which begin with the time), then by line. Compaction
leaves this order as it is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict.core.errors import SaveError
from tensordict.core.locks import Lock
from tensordict.datasets.location import SHARDS, WRITERS, Location
from tensordict.memory import files
from tensordict.memory.names import SCHEMA

_SUFFIX = ".jsonl"
_MAGIC, _VERSION = "tensordict data set", 1
_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")
_NAME = re.compile(r"[0-9]{8}(\.[0-9a-z]{1,16})?")
# A line that is being appended while we read is whole after a moment.
_TRIES, _PAUSE = 4, 0.01


@dataclass(frozen=True, slots=True)
class Line:
    """A shard in a manifest.

    Args:
        path: of the shard, in the folder of the data set.
        generation: how many times its rows were moved.
        holds: the shards whose rows it has, as (writer, first line, last line + 1), when it is in their place.
    """

    path: str
    rows: int
    generation: int = 0
    holds: tuple[tuple[str, int, int], ...] = ()


@dataclass(slots=True)
class Manifest:
    """What a writer has added, as far as its file was read.

    Args:
        writer: its id.
        digest: of its schema; empty before the first line is there.
        lines: one for each shard.
        end: the bytes of the lines that are whole.
        crc: of these.
        problem: what is wrong with the rest; empty when nothing is.
    """

    writer: str
    digest: str = ""
    lines: list[Line] = field(default_factory=list)
    end: int = 0
    crc: int = 0
    problem: str = ""


def new_id() -> str:
    """An id that no other writer has; they sort by the time at which they were made."""
    now = time.time_ns()
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now // 10**9))
    host = re.sub(r"[^0-9A-Za-z-]", "-", socket.gethostname())[:32]
    return f"{stamp}.{now % 10**9 // 1000:06}-{host}-{os.getpid()}-{secrets.token_hex(4)}"


def _name_of(writer: str) -> str:
    """The manifest of a writer, in the data set."""
    return f"{WRITERS}/{writer}{_SUFFIX}"


# --- writing ----------------------------------------------------------------------------------------------------------


class ManifestWriter:
    """The manifest of one writer, which is made with the first line.

    Args:
        place: the data set.
        writer: the id.
        digest: of the schema.
        durable: have every line reach the disk.
    """

    def __init__(self, place: Location, writer: str, digest: str, durable: bool) -> None:
        self._file = place.appender(_name_of(writer), durable)
        self._crc = 0
        self._head: bytes | None = _form([_MAGIC, _VERSION, writer, digest])

    def add(self, line: Line) -> None:
        """Make a shard count; when that fails, it does not, and may be added again.

        Raises:
            OSError: the file cannot be written; names it.
        """
        item: list[Any] = [os.path.basename(line.path), line.rows]
        if line.holds:
            item += [line.generation, [list(part) for part in line.holds]]
        crc, content = self._crc, b""
        for piece in filter(None, (self._head, _form(item))):
            crc = zlib.crc32(piece, crc)
            content += b"%08x %s\n" % (crc, piece)
        self._file.add(content)
        self._crc, self._head = crc, None

    def close(self) -> None:
        """Close the file; an empty one is taken away."""
        self._file.close()


def _form(item: list[Any]) -> bytes:
    return json.dumps(item, separators=(",", ":")).encode()


# --- reading ----------------------------------------------------------------------------------------------------------


def writer_ids(place: Location) -> dict[str, int | None]:
    """The ids of all writers that have a manifest, in their order, and how long it is where that is known."""
    found = {name.removesuffix(_SUFFIX): size for name, size in place.manifests().items() if name.endswith(_SUFFIX)}
    return {name: found[name] for name in sorted(found) if _ID.fullmatch(name)}


def read_on(place: Location, manifest: Manifest, size: int | None = None) -> None:
    """Read what was added to a manifest since; `size` is what a listing has said of its length.

    What is wrong with the rest of the file is its `problem`: lines before stay good.

    Raises:
        OSError: the file cannot be read; names it.
    """
    name = _name_of(manifest.writer)
    path = place.path(name)
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE)
        content, length = place.read(name, manifest.end, size)
        if length < manifest.end:
            manifest.problem = f"{path!r} was cut short: it had {manifest.end} bytes, and has {length}"
            break
        _parse(manifest, content, path)
        if not manifest.problem or place.is_remote:
            break


def _parse(manifest: Manifest, content: bytes, path: str) -> None:
    manifest.problem = ""
    start = 0
    while start < len(content):
        stop = content.find(b"\n", start)
        number = len(manifest.lines) + 1 + bool(manifest.digest)
        where = f"{path!r} is broken from its line {number} on, after {len(manifest.lines):,} shards"
        if stop < 0:
            manifest.problem = f"{where}: the line is cut off"
            return
        text = content[start + 9 : stop]
        crc = zlib.crc32(text, manifest.crc)
        if content[start : start + 9] != b"%08x " % crc:
            manifest.problem = f"{where}: its checksum is wrong"
            return
        try:
            _take(manifest, json.loads(text))
        except (ValueError, RecursionError) as error:
            manifest.problem = f"{where}: {error}"
            return
        manifest.crc = crc
        manifest.end += stop + 1 - start
        start = stop + 1


def _take(manifest: Manifest, item: Any) -> None:
    """Add what stands in a line, which may be anything; a `ValueError` when it is no line."""
    if type(item) is not list:
        raise ValueError("it is no list")
    if not manifest.digest:
        if item[:1] != [_MAGIC] or len(item) != 4 or type(item[3]) is not str or not item[3]:
            raise ValueError("it is not that of a writer of a data set")
        if item[1] != _VERSION:
            raise ValueError(f"it is of version {item[1]!r:.20}, and this program knows {_VERSION}")
        if item[2] != manifest.writer:
            raise ValueError(f"it is that of the writer {item[2]!r:.80}")
        manifest.digest = item[3]
        return
    if len(item) not in (2, 4) or type(item[0]) is not str or not _NAME.fullmatch(item[0]):
        raise ValueError(f"{item[:1]!r:.80} is no name of a shard")
    path = f"{SHARDS}/{manifest.writer}/{item[0]}"
    rows = _count(item[1])
    if len(item) == 2:
        manifest.lines.append(Line(path, rows))
        return
    if type(item[3]) is not list:
        raise ValueError("it does not say what it is in the place of")
    manifest.lines.append(Line(path, rows, _count(item[2]), tuple(map(_range, item[3]))))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**53:
        raise ValueError(f"{value!r:.40} is no number of rows")
    return value


def _range(value: Any) -> tuple[str, int, int]:
    if type(value) is not list or len(value) != 3 or type(value[0]) is not str or not _ID.fullmatch(value[0]):
        raise ValueError(f"{value!r:.80} are no shards of a writer")
    writer, start, stop = value
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop < 2**53:
        raise ValueError(f"{value!r:.80} are no shards of a writer")
    return writer, start, stop


# --- all writers together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows that lie one behind the other in one shard.

    Args:
        path: of the shard, in the folder of the data set.
        start: of the rows in it.
        rows: how many there are.
        whole: how many the shard has.
        writer, first, last: whose they are, and the lines that added them.
    """

    path: str
    start: int
    rows: int
    whole: int
    writer: str
    first: int
    last: int


class Manifests:
    """All manifests of a data set.

    Args:
        place: where it is.

    Attributes:
        manifests: by writer.
    """

    def __init__(self, place: Location) -> None:
        self.place = place
        self.manifests: dict[str, Manifest] = {}
        # Where a shard is now that was compacted: the place of the highest generation.
        self._moved: dict[tuple[str, int], tuple[Line, int]] = {}
        # How many lines of each writer have been looked at for that.
        self._seen: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        # Threads that read rows read this, too, where a shard was moved.
        self._lock = Lock()

    def __reduce__(self) -> Any:
        # Read again on the other side, when it is needed.
        return type(self), (self.place,)

    def read(self) -> None:
        """Read what was added since.

        Raises:
            OSError: a manifest cannot be read; names it.
        """
        with self._lock.held:
            jobs = [
                partial(read_on, self.place, self.manifests.setdefault(writer, Manifest(writer)), size)
                for writer, size in writer_ids(self.place).items()
            ]
            files.run_all(jobs, self.place.in_flight)
            for writer, manifest in self.manifests.items():
                for line in manifest.lines[self._seen.get(writer, 0) :]:
                    if line.holds:
                        self._move(line)
                self._seen[writer] = len(manifest.lines)

    @property
    def problems(self) -> list[str]:
        """What is wrong with manifests, one line each."""
        return [m.problem for m in self.manifests.copy().values() if m.problem] + list(self._problems.values())

    def _move(self, line: Line) -> None:
        """Note that a shard is in the place of others."""
        try:
            held = [(key, rows) for key, rows in self._shards_of(line.holds)]
        except LookupError as error:
            self._problems[line.path] = f"{line.path!r} is in the place of shards that no manifest has: {error}"
            return
        if sum(rows for _, rows in held) != line.rows:
            self._problems[line.path] = (
                f"{line.path!r} has {line.rows} rows, and those that it is in the place of others"
            )
            return
        offset = 0
        for key, rows in held:
            known = self._moved.get(key)
            if known is None or known[0].generation < line.generation:
                self._moved[key] = line, offset
            offset += rows

    def _shards_of(self, holds: Iterable[tuple[str, int, int]]) -> Iterator[tuple[tuple[str, int], int]]:
        for writer, start, stop in holds:
            lines = self.manifests[writer].lines if writer in self.manifests else []
            if stop > len(lines):
                raise LookupError(f"lines {start} to {stop} of {writer!r}, which has {len(lines)}")
            for number in range(start, stop):
                yield (writer, number), lines[number].rows

    def counts(self) -> dict[str, int]:
        """How many lines each writer has."""
        return {writer: len(manifest.lines) for writer, manifest in self.manifests.copy().items()}

    def superseded(self) -> Iterator[str]:
        """The paths of shards of which nothing is read any more, as others are in their place."""
        in_use = {part.path for part in self.parts()}
        for manifest in self.manifests.values():
            for line in manifest.lines:
                if line.path not in in_use:
                    yield line.path

    def parts(self, start: dict[str, int] | None = None, stop: dict[str, int] | None = None) -> list[Stretch]:
        """The rows that count, in their order, in as few pieces as there can be.

        Args:
            start: by writer, the lines to leave out.
            stop: by writer, the lines after the last one; those of a writer that is not there are left out.
        """
        found: list[Stretch] = []
        for writer in sorted(self.manifests):
            lines = self.manifests[writer].lines
            end = len(lines) if stop is None else min(stop.get(writer, 0), len(lines))
            self.add_parts(found, writer, (start or {}).get(writer, 0), end)
        return found

    def add_parts(self, found: list[Stretch], writer: str, start: int, stop: int) -> None:
        """Add the parts of some lines of a writer behind others."""
        for number in range(start, stop):
            line = self.manifests[writer].lines[number]
            if line.holds:
                continue
            place, offset = self._moved.get((writer, number), (line, 0))
            last = found[-1] if found else None
            follows = last is not None and last.path == place.path and last.start + last.rows == offset
            if last is not None and follows and last.writer == writer and last.last == number:
                found[-1] = Stretch(
                    last.path, last.start, last.rows + line.rows, place.rows, writer, last.first, number + 1
                )
            else:
                found.append(Stretch(place.path, offset, line.rows, place.rows, writer, number, number + 1))

    def check(self, digest: str) -> None:
        """Raise a `SaveError` for manifests of writers with another schema."""
        for manifest in self.manifests.values():
            if manifest.digest not in ("", digest):
                raise SaveError(
                    f"{self.place.path(_name_of(manifest.writer))!r} is of a writer with another schema than that of "
                    f"{self.place.path(SCHEMA)!r}: it belongs to another data set"
                )
