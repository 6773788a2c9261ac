"""The manifest of a writer: which of its shards count, and what each of them is.

The folder of a data set:

    schema.tdz                     an archive of one row without content: what every row is; made once, never changed
    writers/ID.jsonl               the manifest of a writer in a folder, which the writer appends to and keeps locked
    writers/ID/FIRST-STOP.jsonl    the manifest of a writer at a URL: one object a flush, with lines FIRST to STOP - 1
    shards/ID/NUMBER...            the shards of a writer, each a save of its own

Only its writer touches a manifest or a folder of shards, and no two writers ever have the same id: writers share
nothing, not even a lock. The manifest exists before the first shard, so a folder of shards without a manifest has lost
it. A shard counts once its line is whole. The writer adds the line when the shard is complete, so a writer that is
killed at any moment leaves a shard that no line names, or a line that is cut off, and readers skip both. No line is
ever changed. No object at a URL is ever put twice with different contents; `compact` merges the objects of one
manifest into one of a wider range. A data set may be copied between a folder and a URL as it is.

The lines are records (`records.py`). The first one of each file is `["tensordict data set", 2, ID, DIGEST, FIRST]`: the
writer, the digest of the schema, and the number of the line that follows. Each other line is a shard,
`[NAME, ROWS, BYTES, DIGEST]`, where BYTES is the length of all its files (`null` for Zarr, which may pack rows
anew) and DIGEST that of its description (`labels.py`). A merged shard has `[NAME, ROWS, BYTES, DIGEST, GENERATION,
[[ID, START, [ROWS, ...]], ...]]`: it holds the rows of the lines START, START + 1, ... of these writers, in this
order, so many of each. A merged shard can therefore be read whatever happens to the manifests of these writers. Where
a line has several merged shards, the one of the highest generation counts.

The rows of a data set are those of all writers, ordered by id (which begins with the time), then by line. Compaction
keeps this order.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tensordict.datasets.lines import WRITERS, Line, is_id, line_to_json, parse_line
from tensordict.datasets.location import Location
from tensordict.datasets.records import Sound, read_records

_SUFFIX = ".jsonl"
_MAGIC, _VERSION = "tensordict data set", 2
_RANGE = re.compile(r"([0-9]{8,16})-([0-9]{8,16})\.jsonl")
# A line that is being appended while we read is whole after a moment.
_TRIES, _PAUSE = 4, 0.01


@dataclass(slots=True)
class Manifest:
    """The lines that a writer has added, as far as its files were read.

    Args:
        writer: its id.
        digest: of its schema; empty before the first line was read.
        lines: one for each shard.
        paths: of these shards.
        end: how many bytes of `ID.jsonl` were read.
        crc: of these bytes.
        problem: what is wrong with the rest; empty when nothing is.
    """

    writer: str
    digest: str = ""
    lines: list[Line] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    end: int = 0
    crc: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file of a manifest.

    Args:
        name: its path in the data set.
        first, stop: the lines in it; `stop` is `None` for `ID.jsonl`, which grows.
        size: its length in bytes, where a listing tells.
    """

    name: str
    first: int
    stop: int | None
    size: int | None


# --- writing ----------------------------------------------------------------------------------------------------------


class ManifestWriter:
    """The manifest of one writer, which exists from now on.

    Args:
        place: the data set.
        writer: the id.
        digest: of the schema.
        durable: have every line reach the disk.

    Raises:
        OSError: it cannot be made; names the file.
    """

    def __init__(self, place: Location, writer: str, digest: str, durable: bool) -> None:
        self._writer, self._digest = writer, digest
        self._log = place.new_log(f"{WRITERS}/{writer}", self._head, durable)

    def _head(self, first: int) -> list[Any]:
        return [_MAGIC, _VERSION, self._writer, self._digest, first]

    def add(self, line: Line) -> None:
        """Make a shard count; when that fails, it does not, and may be added again.

        Raises:
            OSError: the file cannot be written; names it.
        """
        self._log.add(line_to_json(line))

    def close(self) -> None:
        """Close the file. A manifest that lists nothing is removed, unless its writer has left a shard."""
        self._log.close()


def merged_manifest(manifest: Manifest) -> tuple[str, list[list[Any]]]:
    """Return the name and the records of one file with all lines of a manifest that consists of many."""
    items: list[list[Any]] = [[_MAGIC, _VERSION, manifest.writer, manifest.digest, 0]]
    items += map(line_to_json, manifest.lines)
    return segment_name(manifest.writer, 0, len(manifest.lines)), items


def segment_name(writer: str, first: int, stop: int) -> str:
    """Return the path of the file that has these lines of a manifest at a URL."""
    return f"{WRITERS}/{writer}/{first:08}-{stop:08}{_SUFFIX}"


# --- reading ----------------------------------------------------------------------------------------------------------


def list_manifests(place: Location) -> dict[str, list[ManifestFile]]:
    """Return the files of all manifests, by writer, in the order of the ids."""
    found: dict[str, list[ManifestFile]] = {}
    for name, size in place.list_logs(WRITERS).items():
        writer, _, segment = name.partition("/")
        if not segment and name.endswith(_SUFFIX):
            writer = name.removesuffix(_SUFFIX)
            file = ManifestFile(f"{WRITERS}/{name}", 0, None, size)
        elif (known := _RANGE.fullmatch(segment)) and int(known[1]) <= int(known[2]):
            file = ManifestFile(f"{WRITERS}/{name}", int(known[1]), int(known[2]), size)
        else:
            continue
        if is_id(writer):
            found.setdefault(writer, []).append(file)
    return {writer: found[writer] for writer in sorted(found)}


def read_manifest(place: Location, manifest: Manifest, files: list[ManifestFile]) -> None:
    """Read the lines that were added to a manifest since.

    Lines before damage stay good; `manifest.problem` describes the damage.

    Raises:
        OSError: a file cannot be read; names it.
    """
    manifest.problem = ""
    for file in sorted(files, key=lambda file: (file.first, -(file.stop or 0))):
        if file.stop is None:
            _read_growing(place, manifest, file)
        elif file.stop > len(manifest.lines) or not manifest.digest:
            _read_segment(place, manifest, file, file.stop)
        if manifest.problem:
            return


def _read_growing(place: Location, manifest: Manifest, file: ManifestFile) -> None:
    path = place.path(file.name)
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_PAUSE)
        content, length = place.read(file.name, manifest.end, file.size)
        if length < manifest.end:
            manifest.problem = f"{path!r} was cut short: it had {manifest.end} bytes, and has {length}"
            return
        found = read_records(content, manifest.crc, partial(_take_record, manifest, 0))
        manifest.end, manifest.crc = manifest.end + found.end, found.crc
        manifest.problem = _describe_damage(manifest, found, path, 0)
        if not manifest.problem:
            return


def _read_segment(place: Location, manifest: Manifest, file: ManifestFile, stop: int) -> None:
    path = place.path(file.name)
    have = len(manifest.lines)
    if file.first > have:
        manifest.problem = f"the manifest of the writer {manifest.writer!r} lacks its lines {have} to {file.first - 1}"
        return
    content, _ = place.read(file.name, 0, file.size)
    # Lines that another file had already are read again, and not taken over.
    own = Manifest(manifest.writer, lines=manifest.lines[: file.first])
    own.paths |= {line.path for line in own.lines}
    found = read_records(content, 0, partial(_take_record, own, file.first))
    own.problem = _describe_damage(own, found, path, file.first)
    if not own.problem and len(own.lines) != stop:
        own.problem = f"{path!r} has the lines up to {len(own.lines)}, and its name says {stop}"
    if not own.problem and manifest.digest not in ("", own.digest):
        own.problem = f"{path!r} names another schema than the files before it"
    manifest.problem = own.problem
    manifest.digest = manifest.digest or own.digest
    if len(own.lines) > have:
        manifest.lines += own.lines[have:]
        manifest.paths |= own.paths


def _take_record(manifest: Manifest, first: int, item: list[Any]) -> None:
    """Add a record of a file that begins with line `first`; a `ValueError` when it is wrong."""
    if not manifest.digest:
        _take_head(manifest, item, first)
        return
    line = parse_line(manifest.writer, item)
    if line.path in manifest.paths:
        raise ValueError(f"the shard {item[0]!r} is listed twice")
    manifest.paths.add(line.path)
    manifest.lines.append(line)


def _describe_damage(manifest: Manifest, found: Sound, path: str, first: int) -> str:
    if not found.problem:
        return ""
    done = len(manifest.lines) - first
    number = done + 1 + bool(manifest.digest)
    return f"{path!r} is broken from its line {number} on, after {done:,} shards: {found.problem}"


def _take_head(manifest: Manifest, item: list[Any], first: int) -> None:
    if item[:1] != [_MAGIC] or len(item) < 2:
        raise ValueError("it does not belong to a writer of a data set")
    if item[1] != _VERSION:
        raise ValueError(f"it is of version {item[1]!r:.20}, and this program knows {_VERSION}")
    if len(item) != 5 or type(item[3]) is not str or not item[3]:
        raise ValueError("it names no schema")
    if item[2] != manifest.writer:
        raise ValueError(f"it belongs to the writer {item[2]!r:.80}")
    if type(item[4]) is not int or item[4] != first:
        raise ValueError(f"it begins with line {item[4]!r:.40}, and its name says {first}")
    manifest.digest = item[3]
