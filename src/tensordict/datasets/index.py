"""The index of a data set: finds the shard of every row from the manifests of all writers.

The rows of a merged line are read from the merged shard. Each merged shard lists the lines that it replaces and their
numbers of rows, so damage to one manifest leaves the rows of all others readable. If the manifest of a merged shard is
damaged or missing, the label in the shard has the same list.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import numpy as np

from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.core.locks import Lock
from tensordict.datasets.lines import SHARDS, Line, Lines, is_id, split_name
from tensordict.datasets.location import Location
from tensordict.datasets.manifest import Manifest, ManifestFile, list_manifests, read_manifest
from tensordict.datasets.schema import Schema
from tensordict.memory import files
from tensordict.memory.names import SCHEMA

# The most lost shards that a message names.
_MAX_NAMED = 5


class ShardPart(NamedTuple):
    """Consecutive rows of one shard.

    Args:
        path: the path of the shard in the data set.
        start: the first row.
        rows: the number of rows.
        whole: the number of rows of the whole shard.
        writer: the writer that added the rows.
        first, last: the lines of the writer with these rows: from `first` up to, but without, `last`.
    """

    path: str
    start: int
    rows: int
    whole: int
    writer: str
    first: int
    last: int


class ShardParts(Sequence[ShardPart]):
    """The parts of a data set in the order of its rows, packed into 72 bytes each."""

    _WIDTH = 9

    def __init__(self) -> None:
        # For each part the shard's writer, the number in its name and its suffix; then the other fields of `ShardPart`.
        # Texts are positions in `_names`.
        self._numbers = array("q")
        self._texts: dict[str, int] = {}
        self._names: list[str] = []

    @classmethod
    def of(cls, parts: Iterable[ShardPart]) -> ShardParts:
        """Pack parts."""
        made = cls()
        for part in parts:
            made.append(part)
        return made

    def __len__(self) -> int:
        return len(self._numbers) // self._WIDTH

    @overload
    def __getitem__(self, number: int) -> ShardPart: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[ShardPart]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(len(self))[number]]
        number = range(len(self))[number]
        at = number * self._WIDTH
        start, rows, whole, writer, first, last = self._numbers[at + 3 : at + self._WIDTH]
        return ShardPart(self.path_of(number), start, rows, whole, self._names[writer], first, last)

    def path_of(self, number: int) -> str:
        """Return the path of the shard of a part."""
        owner, name, suffix = self._numbers[number * self._WIDTH : number * self._WIDTH + 3]
        return f"{SHARDS}/{self._names[owner]}/{name:08}{self._names[suffix]}"

    def count_shards(self) -> int:
        """Return the number of shards that the parts lie in."""
        return len(set(map(self.path_of, range(len(self)))))

    def __iter__(self) -> Iterator[ShardPart]:
        return map(self.__getitem__, range(len(self)))

    def __setitem__(self, number: int, part: ShardPart) -> None:
        at = range(len(self))[number] * self._WIDTH
        self._numbers[at : at + self._WIDTH] = array("q", self._pack(part))

    def append(self, part: ShardPart) -> None:
        """Append a part."""
        self._numbers.extend(self._pack(part))

    def _pack(self, part: ShardPart) -> tuple[int, ...]:
        name, suffix = split_name(part.path)
        owner, ending, writer = map(self._position, (part.path.split("/")[1], suffix, part.writer))
        return (owner, name, ending, part.start, part.rows, part.whole, writer, part.first, part.last)

    def _position(self, text: str) -> int:
        if text not in self._texts:
            self._texts[text] = len(self._names)
            self._names.append(text)
        return self._texts[text]

    def add_lines(self, writer: str, lines: Lines, start: int, stop: int) -> None:
        """Append a part for each line from `start` to `stop`. None of them has a place in a merged shard."""
        table = lines.table()[start:stop]
        added = np.zeros((len(table), self._WIDTH), dtype=np.int64)
        added[:, 0] = added[:, 6] = self._position(writer)
        added[:, 1] = table[:, 0]
        added[:, 2] = np.array([self._position(suffix) for suffix in lines.suffixes], dtype=np.int64)[table[:, 1]]
        added[:, 4] = added[:, 5] = table[:, 2]
        added[:, 7] = np.arange(start, start + len(table))
        added[:, 8] = added[:, 7] + 1
        self._numbers.frombytes(added.tobytes())

    def list_rows(self) -> array[int]:
        """Return the number of rows of each part."""
        return self._numbers[4 :: self._WIDTH]


class RowPlace(NamedTuple):
    """The shard that stores the rows of a line, and their position in it.

    Args:
        shard: the shard that has them.
        start: the position of their first row in the shard.
        rows: the number of rows.
    """

    shard: Line
    start: int
    rows: int


class Move(NamedTuple):
    """Rows of an old shard that are read from a merged shard.

    Args:
        start: the position of the first row in the old shard.
        rows: the number of rows.
        shard: the merged shard.
        to: the position of the first row in the merged shard.
    """

    start: int
    rows: int
    shard: Line
    to: int


class Manifests:
    """All manifests of a data set.

    Args:
        place: the data set.

    Attributes:
        manifests: the manifests by writer.
    """

    def __init__(self, place: Location) -> None:
        self.place = place
        self.manifests: dict[str, Manifest] = {}
        # The schemas by writer, as `schema_of` read them.
        self._schemas: dict[str, Schema] = {}
        # The merged shards by path, and the paths of missing merged shards.
        self._merged: dict[str, Line] = {}
        self._gone_merged: set[str] = set()
        # The places in merged shards by writer and line. Rows are read from the last place.
        self._merged_places: dict[str, dict[int, list[RowPlace]]] = {}
        # By writer, the number of merged shards of its manifest that were registered.
        self._searched: dict[str, int] = {}
        # Problems with merged shards by path: the shard contradicts a manifest, or no manifest lists it. Then, by
        # writer: "missing" or "empty" for manifests of writers with shards; and shards without a line, of writers whose
        # manifest is damaged, missing or empty.
        self._problems: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._unlisted: dict[str, list[str]] = {}
        # Merged shards that no manifest lists and that no row is read from.
        self.orphans: set[str] = set()
        # Several threads that read rows may call `read` at once, after a shard has moved.
        self._lock = Lock()

    def __reduce__(self) -> Any:
        # The process that unpickles this reads the manifests when it needs them.
        return type(self), (self.place,)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, *, thorough: bool = False) -> None:
        """Read the lines that were added since the last call.

        Args:
            thorough: also find folders of shards whose manifest is missing or empty. Search their shards, and those of
                damaged manifests, for merged shards.

        Raises:
            OSError: a manifest cannot be read; the error names it.
        """
        with self._lock.held:
            # List folders first. A writer makes its manifest before its folder, so each folder should have a manifest.
            folders = self.place.list_writers() if thorough else []
            found = self._read_lines()
            if not thorough:
                return
            damaged = {name for name, known in self.manifests.items() if known.problem}
            for writer in sorted(damaged.union(folders)):
                # A writer writes the first record before it makes its first shard.
                lack = "missing" if writer not in found else "empty" if self.manifests[writer].schema is None else ""
                if (lack or writer in damaged) and is_id(writer):
                    shards = self._read_unlisted_labels([writer])
                    self._adopt(shards)
                    self._unlisted[writer] = [shard.path for shard in shards if not shard.holds]
                    if lack and (
                        self._unlisted[writer] or any(line.writer == writer for line in self._merged.values())
                    ):
                        self._missing[writer] = lack

    def _read_lines(self) -> dict[str, list[ManifestFile]]:
        """Read all files of manifests and register their merged shards. Return the files by writer."""
        found = self._read_files()
        for writer, manifest in self.manifests.items():
            merged = list(manifest.lines.merged.values())
            for line in merged[self._searched.get(writer, 0) :]:
                self._add_merged_shard(line)
            self._searched[writer] = len(merged)
        return found

    def _read_files(self) -> dict[str, list[ManifestFile]]:
        """Read all files of manifests. Return the files by writer.

        Meanwhile, a sweep may remove a manifest without lines, and a compaction may merge objects. This starts again if
        a file is gone.
        """
        while True:
            found = list_manifests(self.place)
            known = [self.manifests.setdefault(writer, Manifest(writer)) for writer in found]
            try:
                in_flight = self.place.in_flight
                each = max(1, in_flight // max(1, len(known)))
                files.run_all([partial(self._read_one, item, found[item.writer], each) for item in known], in_flight)
            except FileNotFoundError:
                if list_manifests(self.place) == found:
                    raise
                continue
            for writer in [name for name in self.manifests if name not in found]:
                if not self.manifests[writer].lines:
                    del self.manifests[writer]
            return found

    def _read_one(self, manifest: Manifest, found: list[ManifestFile], num_threads: int) -> None:
        try:
            read_manifest(self.place, manifest, found, num_threads)
        except SaveError as error:
            # Treat a link, or something that is not a file, like damage.
            manifest.problem = str(error)

    # --- shards that no manifest lists --------------------------------------------------------------------------------

    def find_unlisted_paths(self, writer: str) -> list[str]:
        """Return the complete shards in the folder of a writer that its manifest does not list."""
        manifest = self.manifests.get(writer)
        listed = manifest.lines.paths() if manifest is not None else set()
        return [item.path for item in self.place.list_items(writer) if item.complete and item.path not in listed]

    def _read_unlisted_labels(self, writers: Iterable[str]) -> list[Line]:
        """Return the labels of the complete shards that no line lists."""
        found = []
        for path in (path for writer in writers for path in self.find_unlisted_paths(writer)):
            try:
                label = self.place.read_label(path)
            except OSError:
                continue
            if label is not None and label.path == path:
                found.append(label)
        return found

    def find_orphans(self) -> list[str]:
        """Search writers with sound manifests for merged shards whose lines were lost, and use them for missing rows.

        A manifest that was cut off behind a line looks sound.

        Returns:
            a message for each merged shard that rows are read from.
        """
        with self._lock.held:
            known = set(self._problems)
            # A writer of a compaction makes only merged shards; other writers make none.
            sound = {
                writer
                for writer, manifest in self.manifests.items()
                if not manifest.problem
                and manifest.schema is not None
                and (not manifest.lines or manifest.lines[0].holds)
            }
            self._adopt(self._read_unlisted_labels(writer for writer in self.place.list_writers() if writer in sound))
            return [problem for path, problem in self._problems.items() if path not in known]

    def _adopt(self, shards: Iterable[Line]) -> None:
        """Register unlisted merged shards that replace a missing shard or line. The others become `orphans`."""
        merged = sorted((shard for shard in shards if shard.holds), key=lambda shard: shard.order, reverse=True)
        known: dict[str, set[str]] = {}
        if any(self._find_gap(shard, known) for shard in merged):
            # A compaction may have added lines since the manifests were read, and removed old shards.
            self._read_lines()
            known = {}
        for shard in merged:
            manifest = self.manifests.get(shard.writer)
            if shard.path in self._merged or (manifest is not None and manifest.lines.has(shard.path)):
                continue
            if not (gone := self._find_gap(shard, known)):
                self.orphans.add(shard.path)
                continue
            self._add_merged_shard(shard)
            self._problems.setdefault(
                shard.path,
                f"no manifest lists the merged shard {self.place.path(shard.path)!r}, which is read because {gone} is "
                "missing",
            )

    def _find_gap(self, shard: Line, known: dict[str, set[str]]) -> str:
        """Describe a missing shard or line that a merged shard replaces. Return an empty string if none is missing.

        Args:
            shard: the merged shard.
            known: a cache: the paths of the complete shards, by writer.
        """
        for writer, number in shard.lines():
            place = self._find(writer, number)
            if place is None:
                return f"line {number} of the manifest of the writer {writer!r}"
            owner = place.shard.writer
            if owner not in known:
                known[owner] = {item.path for item in self.place.list_items(owner) if item.complete}
            if place.shard.path not in known[owner]:
                return repr(self.place.path(place.shard.path))
        return ""

    # --- problems -----------------------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[str]:
        """The damage to manifests, one line each."""
        found = {writer: f"the manifest of the writer {writer!r} is {lack}" for writer, lack in self._missing.items()}
        found |= {writer: manifest.problem for writer, manifest in self.manifests.copy().items() if manifest.problem}
        told = [problem + self._describe_lost_shards(writer) for writer, problem in sorted(found.items())]
        return told + list(self._problems.values())

    def _describe_lost_shards(self, writer: str) -> str:
        unlisted = self._unlisted.get(writer)
        if not unlisted:
            return ""
        told = ", ".join(repr(self.place.path(name)) for name in unlisted[:_MAX_NAMED])
        more = f" and {len(unlisted) - _MAX_NAMED:,} more" if len(unlisted) > _MAX_NAMED else ""
        return f"; no line lists its shards {told}{more}, whose rows are not read"

    def check(self, schema: Schema) -> None:
        """Raise a `SaveError` if a manifest has another schema."""
        known = schema.json
        for manifest in self.manifests.values():
            if manifest.schema != known and manifest.lines:
                try:
                    found = Schema.from_json(manifest.schema)
                    schema.refuse_other(found, f"the writer {manifest.writer!r}", ignores_added=True)
                except (SaveError, SchemaError) as error:
                    raise SaveError(
                        f"the manifest of the writer {manifest.writer!r} has another schema than "
                        f"{self.place.path(SCHEMA)!r}, so it belongs to another data set: {error}"
                    ) from None

    def schema_of(self, path: str) -> Schema:
        """Return the schema of a shard, from the manifest of its writer.

        Raises:
            LookupError: the manifest is missing or damaged.
        """
        writer = path.split("/")[1]
        if writer not in self._schemas:
            self._schemas[writer] = Schema.from_json(self.manifests[writer].schema)
        return self._schemas[writer]

    def list_schemas(self) -> list[Schema]:
        """Return the schemas of all manifests that have shards and can be read."""
        return [self.schema_of(line.path) for item in self.manifests.values() if item.schema for line in item.lines[:1]]

    def hide_added_keys(self, rows: Any, path: str, schema: Schema) -> Any:
        """Return the rows of a shard without added entries that the schema lacks."""
        manifest = self.manifests.get(path.split("/")[1])
        if manifest is None or manifest.schema is None or manifest.schema == schema.json:
            return rows
        extra = self.schema_of(path).added_keys - schema.fields.keys()
        return rows.exclude(*extra) if extra else rows

    # --- merged shards ------------------------------------------------------------------------------------------------

    def _add_merged_shard(self, shard: Line) -> None:
        """Register a merged shard, unless it contradicts the manifests of its lines."""
        for (writer, number), rows in zip(shard.lines(), (rows for run in shard.holds for rows in run[2]), strict=True):
            manifest = self.manifests.get(writer)
            line = manifest.lines[number] if manifest is not None and number < len(manifest.lines) else None
            if line is not None and (line.rows != rows or line.holds):
                self._problems[shard.path] = (
                    f"{shard.path!r} says that line {number} of the writer {writer!r} has {rows} rows, and its "
                    f"manifest says {line.rows}"
                )
                return
        self._merged[shard.path] = shard
        self._problems.pop(shard.path, None)
        self.orphans.discard(shard.path)
        offset = 0
        for writer, start, each in shard.holds:
            held = self._merged_places.setdefault(writer, {})
            for number, rows in enumerate(each, start):
                # All readers sort two shards of one generation the same way.
                insort(held.setdefault(number, []), RowPlace(shard, offset, rows), key=lambda place: place.shard.order)
                offset += rows

    def _find(self, writer: str, number: int) -> RowPlace | None:
        """Return the place of the rows of a line; `None` if the line is unknown."""
        for place in reversed(self._merged_places.get(writer, {}).get(number, ())):
            if place.shard.path not in self._gone_merged:
                return place
        manifest = self.manifests.get(writer)
        if manifest is None or number >= len(manifest.lines):
            return None
        return RowPlace(manifest.lines[number], 0, manifest.lines[number].rows)

    def reads_from(self, path: str) -> bool:
        """Return True for a merged shard that rows may be read from."""
        return path in self._merged

    def give_up(self, path: str) -> bool:
        """Stop reading lines from a missing merged shard, if all of them have other places.

        Returns:
            True if they have; otherwise nothing has changed.
        """
        with self._lock.held:
            shard = self._merged.get(path)
            if shard is None or path in self._gone_merged:
                return False
            self._gone_merged.add(path)
            places = {place and place.shard.path for place in (self._find(*key) for key in shard.lines())}
            if all(place is not None and self.place.has_shard(place) for place in places):
                return True
            self._gone_merged.discard(path)
            return False

    def list_superseded_lines(self) -> Iterator[tuple[Line, list[Move]]]:
        """Yield each shard whose rows are all read from merged ones, with the places of its rows there."""
        for writer, manifest in self.manifests.items():
            # The rows of all other lines are read from their own shards.
            known = range(len(manifest.lines))
            for number in sorted({*self._merged_places.get(writer, ()), *manifest.lines.merged}.intersection(known)):
                line = manifest.lines[number]
                moves: list[Move] = []
                start = 0
                for key in line.lines() or [(manifest.writer, number)]:
                    place = self._find(*key)
                    if place is None or place.shard.path == line.path:
                        break
                    last = moves[-1] if moves else None
                    if last is not None and (last.shard, last.to + last.rows) == (place.shard, place.start):
                        moves[-1] = last._replace(rows=last.rows + place.rows)
                    else:
                        moves.append(Move(start, place.rows, place.shard, place.start))
                    start += place.rows
                else:
                    yield line, moves

    # --- rows ---------------------------------------------------------------------------------------------------------

    def find_shard(self, part: ShardPart) -> Line:
        """Return the line of the shard that has the rows of a part."""
        found = self._find(part.writer, part.first)
        assert found is not None
        return found.shard

    def count_rows(self, part: ShardPart) -> tuple[int, ...]:
        """Return the number of rows of each line in a part."""
        places = [self._find(part.writer, number) for number in range(part.first, part.last)]
        return tuple(place.rows for place in places if place is not None)

    def count_lines(self) -> dict[str, int]:
        """Return the number of lines of each writer, including lines that only merged shards know."""
        found = {writer: len(manifest.lines) for writer, manifest in self.manifests.copy().items()}
        for writer, held in self._merged_places.copy().items():
            found[writer] = max(found.get(writer, 0), max(held.copy()) + 1)
        return found

    def generation(self) -> int:
        """Return the highest generation of a merged shard; 0 without merged shards."""
        return max((line.generation for line in self._merged.values()), default=0)

    def parts(self) -> ShardParts:
        """Return all committed rows in their order, in as few parts as possible."""
        found = ShardParts()
        for writer, count in sorted(self.count_lines().items()):
            self.add_parts(found, writer, 0, count)
        return found

    def add_parts(self, found: ShardParts, writer: str, start: int, stop: int) -> None:
        """Append the parts for the lines `start` to `stop` of a writer to `found`.

        Lines are skipped if no manifest and no merged shard has them.
        """
        manifest = self.manifests.get(writer)
        lines = manifest.lines if manifest is not None else Lines(writer)
        if stop <= len(lines) and not lines.merged and writer not in self._merged_places:
            found.add_lines(writer, lines, start, stop)
            return
        known = range(start, min(stop, len(lines)))
        held = self._merged_places.get(writer, {}).copy() if stop > len(lines) else {}
        for number in (*known, *sorted(number for number in held if max(start, len(lines)) <= number < stop)):
            if number in lines.merged:
                continue
            place = self._find(writer, number)
            if place is None:
                continue
            last = found[-1] if found else None
            end = None if last is None else (last.path, last.start + last.rows, last.writer, last.last)
            if last is not None and end == (place.shard.path, place.start, writer, number):
                found[-1] = last._replace(rows=last.rows + place.rows, last=number + 1)
            else:
                shard = place.shard
                found.append(ShardPart(shard.path, place.start, place.rows, shard.rows, writer, number, number + 1))
