"""The index of a data set: the manifests of all writers together tell in which shard each row is.

A line that was merged into another shard is read from there. A merged shard says itself which lines it stands for, and
how many rows each of them has, so damage to one manifest leaves the rows of all others readable. Where the manifest of
a merged shard is damaged or missing, the label in the shard says the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.core.locks import Lock
from tensordict.datasets.lines import Line, is_id
from tensordict.datasets.location import Location
from tensordict.datasets.manifest import Manifest, ManifestFile, list_manifests, read_manifest
from tensordict.datasets.schema import Schema
from tensordict.memory import files
from tensordict.memory.names import SCHEMA

# So many shards are named when a manifest has lost them.
_SHOWN = 5


class Stretch(NamedTuple):
    """Rows that lie one behind the other in one shard.

    Args:
        path: of the shard, in the folder of the data set.
        start: of the rows in it.
        rows: how many there are.
        whole: how many the shard has.
        writer: who added them.
        first, last: the lines of the writer that have them, from `first` up to, but without, `last`.
    """

    path: str
    start: int
    rows: int
    whole: int
    writer: str
    first: int
    last: int


class RowPlace(NamedTuple):
    """The place of the rows of a line.

    Args:
        shard: the shard that has them.
        start: their first row there.
        rows: how many they are.
    """

    shard: Line
    start: int
    rows: int


class Move(NamedTuple):
    """Rows of an old shard that are read from a merged one.

    Args:
        start: the first of them in the old shard.
        rows: how many they are.
        shard: the merged shard.
        to: the first of them in the merged shard.
    """

    start: int
    rows: int
    shard: Line
    to: int


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
        # The merged shards by path, and the paths of those that are missing.
        self._merged: dict[str, Line] = {}
        self._given_up: set[str] = set()
        # By writer and line, the places in merged shards; rows are read from the last one.
        self._held: dict[str, dict[int, list[RowPlace]]] = {}
        # How many lines of each writer were searched for merged shards.
        self._seen: dict[str, int] = {}
        # Merged shards that contradict manifests, or that none lists, by path; what manifests of writers with shards
        # lack; and the shards that no line lists, by their writers, whose manifests are damaged, missing or empty.
        self._problems: dict[str, str] = {}
        self._missing: dict[str, str] = {}
        self._unlisted: dict[str, list[str]] = {}
        # The paths of merged shards that no manifest lists and that no row is read from.
        self.orphans: set[str] = set()
        # Threads that read rows read this, too, when a shard was moved.
        self._lock = Lock()

    def __reduce__(self) -> Any:
        # The other side reads the manifests when it needs them.
        return type(self), (self.place,)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, *, thorough: bool = False) -> None:
        """Read the lines that were added since.

        Args:
            thorough: also look for folders of shards whose manifest is missing or empty, and search the shards of such
                manifests, and of damaged ones, for merged ones.

        Raises:
            OSError: a manifest cannot be read; names it.
        """
        with self._lock.held:
            # Folders first: a writer makes its manifest before its folder.
            folders = self.place.writers() if thorough else []
            found = self._read_lines()
            if not thorough:
                return
            for writer in sorted({*folders, *(name for name, known in self.manifests.items() if known.problem)}):
                # A writer writes the first record before it makes its first shard.
                lack = "missing" if writer not in found else "empty" if self.manifests[writer].schema is None else ""
                if is_id(writer) and (lack or self.manifests[writer].problem):
                    shards = self._list_unlisted_labels([writer])
                    self._adopt(shards)
                    self._unlisted[writer] = [shard.path for shard in shards if not shard.holds]
                    if lack and (
                        self._unlisted[writer] or any(line.writer == writer for line in self._merged.values())
                    ):
                        self._missing[writer] = lack

    def _read_lines(self) -> dict[str, list[ManifestFile]]:
        """Read all files of manifests, and take in their merged shards; returns the files, by writer."""
        found = self._read_files()
        for writer, manifest in self.manifests.items():
            for line in manifest.lines[self._seen.get(writer, 0) :]:
                if line.holds:
                    self._take(line)
            self._seen[writer] = len(manifest.lines)
        return found

    def _read_files(self) -> dict[str, list[ManifestFile]]:
        """Read all files of manifests; returns those that there are, by writer.

        While we read, a sweep may remove a manifest that lists nothing, and a compaction may merge objects. Then this
        lists again.
        """
        while True:
            found = list_manifests(self.place)
            known = [self.manifests.setdefault(writer, Manifest(writer)) for writer in found]
            try:
                files.run_all(
                    [partial(self._read_one, item, found[item.writer]) for item in known], self.place.in_flight
                )
            except FileNotFoundError:
                if list_manifests(self.place) == found:
                    raise
                continue
            for writer in [name for name, manifest in self.manifests.items() if not manifest.lines]:
                if writer not in found:
                    del self.manifests[writer]
            return found

    def _read_one(self, manifest: Manifest, found: list[ManifestFile]) -> None:
        try:
            read_manifest(self.place, manifest, found)
        except SaveError as error:
            # A link, or no file at all: damage like any other.
            manifest.problem = str(error)

    # --- shards that no manifest lists --------------------------------------------------------------------------------

    def list_unlisted(self, writer: str) -> list[str]:
        """Return the complete shards in the folder of a writer that its manifest does not list."""
        manifest = self.manifests.get(writer)
        listed = manifest.paths if manifest is not None else set()
        return [item.path for item in self.place.items(writer) if item.complete and item.path not in listed]

    def _list_unlisted_labels(self, writers: Iterable[str]) -> list[Line]:
        """Return what the labels of the complete shards say that no line lists."""
        found = []
        for path in (path for writer in writers for path in self.list_unlisted(writer)):
            try:
                label = self.place.label(path)
            except OSError:
                continue
            if label is not None and label.path == path:
                found.append(label)
        return found

    def find_orphans(self) -> list[str]:
        """Search sound manifests for merged shards whose lines were lost, and read rows from them that are missing.

        A manifest that is cut behind a line looks like one that was never longer.

        Returns:
            the problems that this has found, one for each merged shard that rows are read from.
        """
        with self._lock.held:
            known = set(self._problems)
            # Only compactions make merged shards, and they make no others.
            sound = {
                writer
                for writer, manifest in self.manifests.items()
                if not manifest.problem
                and manifest.schema is not None
                and (not manifest.lines or manifest.lines[0].holds)
            }
            self._adopt(self._list_unlisted_labels(writer for writer in self.place.writers() if writer in sound))
            return [problem for path, problem in self._problems.items() if path not in known]

    def _adopt(self, shards: Iterable[Line]) -> None:
        """Take in the merged shards, which no manifest lists, that stand for a missing one; keep the others apart."""
        merged = sorted((shard for shard in shards if shard.holds), key=lambda shard: shard.order, reverse=True)
        known: dict[str, set[str]] = {}
        if any(self._find_gap(shard, known) for shard in merged):
            # A compaction may have added the lines of merged shards since, and removed the old ones.
            self._read_lines()
            known = {}
        for shard in merged:
            manifest = self.manifests.get(shard.writer)
            if shard.path in self._merged or (manifest is not None and shard.path in manifest.paths):
                continue
            if not (gone := self._find_gap(shard, known)):
                self.orphans.add(shard.path)
                continue
            self._take(shard)
            self._problems.setdefault(
                shard.path,
                f"no manifest lists the merged shard {self.place.path(shard.path)!r}, which is read because {gone} is "
                "missing",
            )

    def _find_gap(self, shard: Line, known: dict[str, set[str]]) -> str:
        """Name a shard or a line that is missing and that a merged shard stands for; nothing when there is none.

        Args:
            shard: the merged one.
            known: the paths of the complete shards by writer, for the writers that were listed; this adds others.
        """
        for writer, number in shard.lines():
            place = self._find(writer, number)
            if place is None:
                return f"line {number} of the manifest of the writer {writer!r}"
            owner = place.shard.writer
            if owner not in known:
                known[owner] = {item.path for item in self.place.items(owner) if item.complete}
            if place.shard.path not in known[owner]:
                return repr(self.place.path(place.shard.path))
        return ""

    # --- problems -----------------------------------------------------------------------------------------------------

    @property
    def problems(self) -> list[str]:
        """The damage to manifests, one line each."""
        found = {writer: f"the manifest of the writer {writer!r} is {lack}" for writer, lack in self._missing.items()}
        found |= {writer: manifest.problem for writer, manifest in self.manifests.copy().items() if manifest.problem}
        told = [problem + self._tell_unlisted(writer) for writer, problem in sorted(found.items())]
        return told + list(self._problems.values())

    def _tell_unlisted(self, writer: str) -> str:
        unlisted = self._unlisted.get(writer)
        if not unlisted:
            return ""
        told = ", ".join(repr(self.place.path(name)) for name in unlisted[:_SHOWN])
        more = f" and {len(unlisted) - _SHOWN:,} more" if len(unlisted) > _SHOWN else ""
        return f"; no line lists its shards {told}{more}, whose rows are not read"

    def check(self, schema: Schema) -> None:
        """Raise a `SaveError` for manifests of writers with another schema."""
        known = schema.json
        for manifest in self.manifests.values():
            if manifest.lines and manifest.schema != known:
                try:
                    schema.refuse_other(Schema.from_json(manifest.schema), f"the writer {manifest.writer!r}")
                except (SaveError, SchemaError) as error:
                    raise SaveError(
                        f"the manifest of the writer {manifest.writer!r} has another schema than "
                        f"{self.place.path(SCHEMA)!r}, so it belongs to another data set: {error}"
                    ) from None

    # --- merged shards ------------------------------------------------------------------------------------------------

    def _take(self, shard: Line) -> None:
        """Take in a merged shard, unless it contradicts the manifests of its lines."""
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
            held = self._held.setdefault(writer, {})
            for number, rows in enumerate(each, start):
                # Two shards of one generation are put in the same order by everybody.
                insort(held.setdefault(number, []), RowPlace(shard, offset, rows), key=lambda place: place.shard.order)
                offset += rows

    def _find(self, writer: str, number: int) -> RowPlace | None:
        """Return the place of the rows of a line; `None` when nothing is known of the line."""
        for place in reversed(self._held.get(writer, {}).get(number, ())):
            if place.shard.path not in self._given_up:
                return place
        manifest = self.manifests.get(writer)
        if manifest is None or number >= len(manifest.lines):
            return None
        return RowPlace(manifest.lines[number], 0, manifest.lines[number].rows)

    def reads_from(self, path: str) -> bool:
        """Return True for a merged shard that rows may be read from."""
        return path in self._merged

    def give_up(self, path: str) -> bool:
        """Read the lines of a missing merged shard from elsewhere.

        Returns:
            whether all of them are elsewhere; when not, nothing has changed.
        """
        with self._lock.held:
            shard = self._merged.get(path)
            if shard is None or path in self._given_up:
                return False
            self._given_up.add(path)
            places = {place and place.shard.path for place in (self._find(*key) for key in shard.lines())}
            if all(place is not None and self.place.has_shard(place) for place in places):
                return True
            self._given_up.discard(path)
            return False

    def list_superseded(self) -> Iterator[tuple[Line, list[Move]]]:
        """Yield each shard whose rows are all read from merged ones, with the places of its rows there."""
        for manifest in self.manifests.values():
            for number, line in enumerate(manifest.lines):
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

    def shard_at(self, part: Stretch) -> Line:
        """Return the line of the shard that has the rows of a part."""
        found = self._find(part.writer, part.first)
        assert found is not None
        return found.shard

    def rows_of(self, part: Stretch) -> tuple[int, ...]:
        """Return the rows of each line that a part consists of."""
        places = [self._find(part.writer, number) for number in range(part.first, part.last)]
        return tuple(place.rows for place in places if place is not None)

    def counts(self) -> dict[str, int]:
        """How many lines each writer has, lines without a manifest included."""
        found = {writer: len(manifest.lines) for writer, manifest in self.manifests.copy().items()}
        for writer, held in self._held.copy().items():
            found[writer] = max(found.get(writer, 0), max(held.copy()) + 1)
        return found

    def generation(self) -> int:
        """The highest generation of a merged shard; 0 when there is none."""
        return max((line.generation for line in self._merged.values()), default=0)

    def parts(self) -> list[Stretch]:
        """The rows that count, in their order, in as few pieces as there can be."""
        found: list[Stretch] = []
        for writer, count in sorted(self.counts().items()):
            self.add_parts(found, writer, 0, count)
        return found

    def add_parts(self, found: list[Stretch], writer: str, start: int, stop: int) -> None:
        """Append the parts of some lines of a writer to a list; lost lines have no parts."""
        manifest = self.manifests.get(writer)
        lines = manifest.lines if manifest is not None else []
        known = range(start, min(stop, len(lines)))
        held = self._held.get(writer, {}).copy() if stop > len(lines) else {}
        for number in (*known, *sorted(number for number in held if max(start, len(lines)) <= number < stop)):
            if number < len(lines) and lines[number].holds:
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
                found.append(Stretch(shard.path, place.start, place.rows, shard.rows, writer, number, number + 1))
