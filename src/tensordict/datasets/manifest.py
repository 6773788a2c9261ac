"""Manifests: for each writer, the list of its committed shards. Writers add lines, and readers find rows by them.

The folder of a data set:

    schema.json                    describes a row; made once, and replaced only by `add_column`
    writers/ID.jsonl               the manifest of a writer in a folder, which the writer appends to and keeps locked
    writers/ID/FIRST-STOP.jsonl    the manifest of a writer at a URL: one object a flush, with lines FIRST to STOP - 1
    shards/ID/NUMBER...            the shards of a writer, each a save of its own

Only its writer touches a manifest or a folder of shards, and no two writers ever have the same id: writers share
nothing, not even a lock. The manifest exists before the first shard, so a folder of shards without a manifest has lost
it. The writer adds the line of a shard when the shard is complete, and the shard is committed once its line is whole.
A writer that is killed at any moment leaves a shard without a line, or a line that is cut off, and readers skip both.
Lines never change. An object at a URL is never put twice with different contents; `compact` replaces the objects of a
manifest by one object of a wider range. You may copy a data set between a folder and a URL without changes.

The lines are records (`records.py`). The first one of each file is `["tensordict data set", 3, ID, SCHEMA, FIRST]`: the
writer, the schema of its rows as JSON (`schema.py`), and the number of the next line. `schema.json` has the single line
`["tensordict data set", 3, SCHEMA]`. Each other line of a manifest is a shard, `[NAME, ROWS, BYTES, DIGEST]`. BYTES is
the length of all its files (`null` for Zarr, which may pack rows anew), and DIGEST the digest of its description
(`labels.py`). A merged shard has `[NAME, ROWS, BYTES, DIGEST, GENERATION, [[ID, START, [ROWS, ...]], ...]]`: it holds
the rows of the lines START, START + 1, ... of these writers, in this order, with these numbers of rows. So it can be
read whatever happens to the manifests of these writers. If several merged shards have a line, the highest generation
counts.

`add_column` writes all shards again as merged shards of a writer whose schema has the new entry, marked
`"added": true`. Then it replaces `schema.json`. A reader leaves out added entries that `schema.json` lacks.

The rows of all writers form the data set, ordered by id (which begins with the time), then by line. Compaction keeps
this order.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tensordict.core.exceptions import SaveError
from tensordict.datasets.lines import WRITERS, Lines, is_id, parse_line
from tensordict.datasets.location import Location, Log
from tensordict.datasets.records import read_records, to_file
from tensordict.memory import files
from tensordict.memory.names import SCHEMA

_SUFFIX = ".jsonl"
_MAGIC = ["tensordict data set", 3]
_RANGE = re.compile(r"([0-9]{8,16})-([0-9]{8,16})\.jsonl")
# If a writer is appending a line at this moment, it is whole after a pause.
_TRIES, _PAUSE = 4, 0.01


@dataclass(slots=True)
class Manifest:
    """The lines of a writer, as far as its files were read.

    Args:
        writer: the id of the writer.
        schema: the schema of its rows as JSON; `None` before the first line was read.
        lines: the lines, one for each shard.
        end: the number of bytes of `ID.jsonl` that were read.
        crc: the CRC-32 of these bytes.
        problem: describes damage to the rest; empty without damage.
    """

    writer: str
    schema: Any = None
    lines: Lines = field(init=False)
    end: int = 0
    crc: int = 0
    problem: str = ""

    def __post_init__(self) -> None:
        self.lines = Lines(self.writer)


class ManifestFile(NamedTuple):
    """A file of a manifest.

    Args:
        name: its path in the data set.
        first, stop: the lines in it; `stop` is `None` for `ID.jsonl`, which grows.
        size: its length in bytes; `None` if the listing lacks it.
    """

    name: str
    first: int
    stop: int | None
    size: int | None


# --- writing ----------------------------------------------------------------------------------------------------------


def new_manifest(place: Location, writer: str, schema: Any, durable: bool) -> Log:
    """Make the manifest of a writer.

    Args:
        place: the data set.
        writer: the id of the writer.
        schema: the schema of the rows as JSON.
        durable: sync every line to the disk.

    Raises:
        OSError: the file cannot be made; the error names it.
    """
    return place.new_log(f"{WRITERS}/{writer}", lambda first: [*_MAGIC, writer, schema, first], durable)


def pack_manifest(manifest: Manifest) -> tuple[str, bytes]:
    """Return the name and the content of a single file with all lines of a manifest of many files."""
    name = f"{WRITERS}/{manifest.writer}/{0:08}-{len(manifest.lines):08}{_SUFFIX}"
    head = [*_MAGIC, manifest.writer, manifest.schema, 0]
    return name, to_file([head, *(line.to_json() for line in manifest.lines)])


# --- the schema -------------------------------------------------------------------------------------------------------


def put_schema(place: Location, schema: Any, durable: bool) -> None:
    """Make the file with the schema, unless it exists.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    with contextlib.suppress(FileExistsError):
        place.create_file(SCHEMA, to_file([[*_MAGIC, schema]]), durable)


def replace_schema(place: Location, schema: Any, durable: bool) -> None:
    """Replace the file with the schema in one step.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    place.replace_file(SCHEMA, to_file([[*_MAGIC, schema]]), durable)


def read_schema_file(place: Location) -> Any:
    """Return the schema in its file, as JSON.

    Raises:
        FileNotFoundError: the file is missing.
        SaveError: the file is broken; the error names it.
    """
    items: list[list[Any]] = []
    _, _, problem = read_records(place.read(SCHEMA)[0], 0, items.append)
    if problem or [item[:2] for item in items] != [_MAGIC] or len(items[0]) != 3:
        raise SaveError(f"{place.path(SCHEMA)!r} is broken: {problem or 'it describes no rows'}")
    return items[0][2]


# --- reading ----------------------------------------------------------------------------------------------------------


def list_manifests(place: Location) -> dict[str, list[ManifestFile]]:
    """Return the files of all manifests, by writer, in the order of the ids."""
    found: dict[str, list[ManifestFile]] = {}
    for name, size in place.list_logs(WRITERS).items():
        writer, _, segment = name.partition("/")
        known = _RANGE.fullmatch(segment)
        if not segment and name.endswith(_SUFFIX):
            writer, file = name.removesuffix(_SUFFIX), ManifestFile(f"{WRITERS}/{name}", 0, None, size)
        elif known and int(known[1]) <= int(known[2]):
            file = ManifestFile(f"{WRITERS}/{name}", int(known[1]), int(known[2]), size)
        else:
            continue
        if is_id(writer):
            found.setdefault(writer, []).append(file)
    return dict(sorted(found.items()))


def read_manifest(place: Location, manifest: Manifest, listed: list[ManifestFile], num_threads: int = 1) -> None:
    """Read the lines that were added to a manifest since the last call.

    Lines before damage are read; `manifest.problem` describes the damage.

    Args:
        place: the data set.
        manifest: the manifest.
        listed: its files.
        num_threads: the number of files that are read at once.

    Raises:
        OSError: a file cannot be read; the error names it.
    """
    manifest.problem = ""
    ordered = sorted(listed, key=lambda file: (file.first, -(file.stop or 0)))
    contents = _read_segments(place, manifest, ordered, num_threads) if num_threads > 1 else {}
    for file in ordered:
        if file.stop is None:
            for attempt in range(_TRIES):
                if attempt:
                    time.sleep(_PAUSE)
                manifest.problem = _read_lines(place, manifest, file)
                if not manifest.problem:
                    break
        elif file.stop > len(manifest.lines) or manifest.schema is None:
            manifest.problem = _read_segment(place, manifest, file, file.stop, contents.get(file.name))
        if manifest.problem:
            return


def _read_segments(
    place: Location, manifest: Manifest, ordered: list[ManifestFile], num_threads: int
) -> dict[str, tuple[bytes, int]]:
    """Read files that do not grow and have new lines, several at once. A file that cannot be read is left out."""
    contents: dict[str, tuple[bytes, int]] = {}

    def read(file: ManifestFile) -> None:
        with contextlib.suppress(OSError):
            contents[file.name] = place.read(file.name, 0, file.size)

    jobs: list[Callable[[], None]] = []
    have = len(manifest.lines)
    for file in ordered:
        if file.stop is not None and (file.stop > have or (manifest.schema is None and not jobs)):
            jobs.append(partial(read, file))
            have = max(have, file.stop)
    files.run_all(jobs, num_threads)
    return contents


def _read_segment(
    place: Location, manifest: Manifest, file: ManifestFile, stop: int, content: tuple[bytes, int] | None
) -> str:
    """Read a file that does not grow. Return a description of damage; empty without damage."""
    have = len(manifest.lines)
    if file.first > have:
        return f"the manifest of the writer {manifest.writer!r} lacks its lines {have} to {file.first - 1}"
    # Lines that another file had already are read again, but not added.
    own = Manifest(manifest.writer)
    own.lines = manifest.lines if file.first == have else manifest.lines.first(file.first)
    problem = _read_lines(place, own, file, content)
    if not problem and len(own.lines) != stop:
        problem = f"{place.path(file.name)!r} has the lines up to {len(own.lines)}, and its name says {stop}"
    if not problem and manifest.schema not in (None, own.schema):
        problem = f"{place.path(file.name)!r} names another schema than the files before it"
    manifest.schema = manifest.schema or own.schema
    if own.lines is not manifest.lines:
        try:
            for line in own.lines[have:]:
                manifest.lines.add(line)
        except ValueError as error:
            problem = problem or f"{place.path(file.name)!r} contradicts the files before it: {error}"
    return problem


def _read_lines(place: Location, manifest: Manifest, file: ManifestFile, known: tuple[bytes, int] | None = None) -> str:
    """Read the next lines of a file. Return a description of damage; empty without damage.

    Args:
        place: the data set.
        manifest: takes the lines.
        file: the file.
        known: the next bytes of the file and its length, if they were read already.
    """
    path = place.path(file.name)
    content, length = known or place.read(file.name, manifest.end, file.size)
    if length < manifest.end:
        return f"{path!r} was cut short: it had {manifest.end} bytes, and has {length}"
    take = partial(_take_record, manifest, file.first)
    end, manifest.crc, problem = read_records(content, manifest.crc, take, partial(_take_text, manifest))
    manifest.end += end
    if not problem:
        return ""
    done = len(manifest.lines) - file.first
    number = done + 1 + (manifest.schema is not None)
    return f"{path!r} is broken from its line {number} on, after {done:,} shards: {problem}"


def _take_record(manifest: Manifest, first: int, item: list[Any]) -> None:
    """Add a record of a file that begins with line `first`; raise a `ValueError` if the record is invalid."""
    if manifest.schema is None:
        _take_head(manifest, first, item)
        return
    manifest.lines.add(parse_line(manifest.writer, item))


def _take_text(manifest: Manifest, text: bytes) -> bool:
    """Add a record from its JSON, if it is that of an ordinary shard."""
    return manifest.schema is not None and manifest.lines.add_text(text)


def _take_head(manifest: Manifest, first: int, item: list[Any]) -> None:
    if item[:1] != _MAGIC[:1] or len(item) < 2:
        raise ValueError("it does not belong to a writer of a data set")
    if item[1] != _MAGIC[1]:
        raise ValueError(f"it is of version {item[1]!r:.20}, and this program knows {_MAGIC[1]}")
    if len(item) != 5 or type(item[3]) is not dict or not item[3]:
        raise ValueError("it names no schema")
    if item[2] != manifest.writer:
        raise ValueError(f"it belongs to the writer {item[2]!r:.80}")
    if type(item[4]) is not int or item[4] != first:
        raise ValueError(f"it begins with line {item[4]!r:.40}, and its name says {first}")
    manifest.schema = item[3]
