"""The index of a data set: the manifests of all writers together tell in which shard each row is.

A line that was merged into another shard is read from there. A merged shard says itself which lines it stands for, and
how many rows each of them has, so damage to one manifest leaves the rows of all others readable. Where the manifest of
a merged shard is damaged or missing, the label in the shard says the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tensordict.core.errors import SaveError
from tensordict.core.locks import Lock
from tensordict.datasets.labels import Label
from tensordict.datasets.lines import SHARDS, Line, is_id
from tensordict.datasets.location import Location
from tensordict.datasets.manifest import Manifest, ManifestFile, list_manifests, read_manifest
from tensordict.memory import files
from tensordict.memory.names import SCHEMA

# So many shards are named when a manifest has lost them.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Stretch:
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


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of the rows of a line.

    Args:
        shard: the shard that has them.
        start: their first row there.
        rows: how many they are.
    """

    shard: Line
    start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of an old shard that are read from a merged one.

    Args:
        start: the first of them in the old shard.
        rows: how many they are.
        shard: the merged shard.
        to: the first of them in the merged shard.
        is_source: whether the merged shard was made of the old one, and not of another merged shard between the two.
    """

    start: int
    rows: int
    shard: Line
    to: int
    is_source: bool


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
        # The merged shards by path, the paths that were given up, and the place of each line that was merged.
        self._merged: dict[str, Line] = {}
        self._given_up: set[str] = set()
        self._moved: dict[tuple[str, int], RowPlace] = {}
        # By writer, the numbers of merged lines that its own manifest does not have.
        self._lost: dict[str, list[int]] = {}
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
            if thorough:
                for writer in sorted({*folders, *(name for name, known in self.manifests.items() if known.problem)}):
                    # A writer writes the first record before it makes its first shard.
                    lack = "missing" if writer not in found else "empty" if not self.manifests[writer].digest else ""
                    if is_id(writer) and (lack or self.manifests[writer].problem):
                        self._search(writer, lack)

    def _read_lines(self) -> dict[str, list[ManifestFile]]:
        """Read all files of manifests, and take in their merged shards; returns the files, by writer."""
        found = self._read_files()
        for writer, manifest in self.manifests.items():
            for line in manifest.lines[self._seen.get(writer, 0) :]:
                if line.holds:
                    self._move(line)
            self._seen[writer] = len(manifest.lines)
            self._lost[writer] = [number for number in self._lost.get(writer, ()) if number >= len(manifest.lines)]
        return found

    def _read_files(self) -> dict[str, list[ManifestFile]]:
        """Read all files of manifests; returns those that there are, by writer.

        While we read, a sweep may remove a manifest that lists nothing, and a compaction may merge objects. Then this
        lists again.
        """
        while True:
            found = list_manifests(self.place)
            jobs = [
                partial(self._read_one, self.manifests.setdefault(writer, Manifest(writer)), found[writer])
                for writer in found
            ]
            try:
                files.run_all(jobs, self.place.in_flight)
            except FileNotFoundError:
                if list_manifests(self.place) == found:
                    raise
                continue
            for writer in [name for name, manifest in self.manifests.items() if not manifest.lines]:
                if writer not in found:
                    del self.manifests[writer]
            return found

    def _read_one(self, manifest: Manifest, found: list[Any]) -> None:
        try:
            read_manifest(self.place, manifest, found)
        except SaveError as error:
            # A link, or no file at all: damage like any other.
            manifest.problem = str(error)

    def _search(self, writer: str, lack: str) -> None:
        """Find the shards of a writer that no line lists.

        Args:
            writer: whose manifest is damaged, missing or empty.
            lack: "missing" or "empty"; nothing where lines may be there.
        """
        labels = self._read_labels(writer)
        self._unlisted[writer] = [name for name, label in labels.items() if not label.holds]
        merged = [_line_of(name, label) for name, label in labels.items() if label.holds]
        if lack:
            self._adopt(merged)
        for shard in () if lack else merged:
            self._move(shard)
        if lack and (self._unlisted[writer] or any(path.startswith(f"{SHARDS}/{writer}/") for path in self._merged)):
            self._missing[writer] = lack

    def _read_labels(self, writer: str) -> dict[str, Label]:
        """Return the labels of the complete shards of a writer that no line lists, by their paths."""
        found = {}
        for name in self.list_unlisted(writer):
            try:
                label = self.place.label(name)
            except OSError:
                continue
            if label is not None and f"{SHARDS}/{label.writer}/{label.name}" == name:
                found[name] = label
        return found

    def find_orphans(self) -> list[str]:
        """Search sound manifests for merged shards whose lines were lost, and read rows from them that are missing.

        A manifest that is cut behind a line looks like one that was never longer.

        Returns:
            the problems that this has found, one for each merged shard that rows are read from.
        """
        with self._lock.held:
            known = set(self._problems)
            found: list[Line] = []
            for writer in self.place.writers():
                manifest = self.manifests.get(writer)
                if manifest is None or manifest.problem or not manifest.digest:
                    continue
                # Only compactions make merged shards, and they make no others.
                if not manifest.lines or manifest.lines[0].holds:
                    labels = self._read_labels(writer)
                    found += [_line_of(name, label) for name, label in labels.items() if label.holds]
            self._adopt(found)
            return [problem for path, problem in self._problems.items() if path not in known]

    def _adopt(self, shards: list[Line]) -> None:
        """Take in the merged shards, which no manifest lists, that stand for a missing one; keep the others apart."""
        known: dict[str, set[str]] = {}
        if any(self._find_gap(shard, known) for shard in shards):
            # A compaction may have added the lines of merged shards since, and removed the old ones.
            self._read_lines()
            known = {}
        for shard in sorted(shards, key=_order, reverse=True):
            manifest = self.manifests.get(shard.path.split("/")[1])
            if shard.path in self._merged or (manifest is not None and shard.path in manifest.paths):
                continue
            if not (gone := self._find_gap(shard, known)):
                self.orphans.add(shard.path)
                continue
            self._move(shard)
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
        for writer, number in _lines_of(shard):
            place = self._place_of(writer, number)
            if place is None:
                return f"line {number} of the manifest of the writer {writer!r}"
            owner = place.path.split("/")[1]
            if owner not in known:
                known[owner] = {item.path for item in self.place.items(owner) if item.complete}
            if place.path not in known[owner]:
                return repr(self.place.path(place.path))
        return ""

    def list_unlisted(self, writer: str) -> list[str]:
        """Return the complete shards in the folder of a writer that its manifest does not list."""
        manifest = self.manifests.get(writer)
        listed = manifest.paths if manifest is not None else set()
        return [item.path for item in self.place.items(writer) if item.complete and item.path not in listed]

    @property
    def problems(self) -> list[str]:
        """The damage to manifests, one line each."""
        damaged = {writer: m.problem for writer, m in self.manifests.copy().items() if m.problem}
        missing = {writer: f"the manifest of the writer {writer!r} is {lack}" for writer, lack in self._missing.items()}
        found = [problem + self._tell_unlisted(writer) for writer, problem in sorted((missing | damaged).items())]
        return found + list(self._problems.values())

    def _tell_unlisted(self, writer: str) -> str:
        unlisted = self._unlisted.get(writer)
        if not unlisted:
            return ""
        told = ", ".join(repr(self.place.path(name)) for name in unlisted[:_SHOWN])
        more = f" and {len(unlisted) - _SHOWN:,} more" if len(unlisted) > _SHOWN else ""
        return f"; no line lists its shards {told}{more}, whose rows are not read"

    def check(self, digest: str) -> None:
        """Raise a `SaveError` for manifests of writers with another schema."""
        for manifest in self.manifests.values():
            if manifest.lines and manifest.digest != digest:
                raise SaveError(
                    f"the manifest of the writer {manifest.writer!r} in {self.place.root!r} has another schema than "
                    f"{self.place.path(SCHEMA)!r}: it belongs to another data set"
                )

    # --- merged shards ------------------------------------------------------------------------------------------------

    def _move(self, shard: Line) -> None:
        """Take in a merged shard."""
        if problem := self._contradiction(shard):
            self._problems[shard.path] = problem
            return
        self._merged[shard.path] = shard
        self._problems.pop(shard.path, None)
        self.orphans.discard(shard.path)
        if shard.path not in self._given_up:
            self._put(shard)

    def _contradiction(self, shard: Line) -> str:
        """Say how a merged shard contradicts the manifests of its lines; nothing when it does not."""
        for writer, start, rows in shard.holds:
            manifest = self.manifests.get(writer)
            own = manifest.lines[start : start + len(rows)] if manifest is not None else []
            for at, line in enumerate(own):
                if line.rows != rows[at] or line.holds:
                    return (
                        f"{shard.path!r} says that line {start + at} of the writer {writer!r} has {rows[at]} rows, and "
                        f"its manifest says {line.rows}"
                    )
        return ""

    def _put(self, shard: Line) -> None:
        offset = 0
        for writer, start, each in shard.holds:
            manifest = self.manifests.get(writer)
            have = len(manifest.lines) if manifest is not None else 0
            lost = self._lost.setdefault(writer, [])
            for number, rows in enumerate(each, start):
                known = self._moved.get((writer, number))
                # Two shards of one generation are put in the same order by everybody.
                if known is None or _order(known.shard) < _order(shard):
                    self._moved[writer, number] = RowPlace(shard, offset, rows)
                if number >= have and known is None:
                    insort(lost, number)
                offset += rows

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
            before = self._moved.copy(), {writer: lost.copy() for writer, lost in self._lost.items()}
            self._given_up.add(path)
            self._moved, self._lost = {}, {}
            for other in self._merged.values():
                if other.path not in self._given_up:
                    self._put(other)
            places = {place.path for place in (self._place_of(w, n) for w, n in _lines_of(shard)) if place is not None}
            if None not in [self._place_of(w, n) for w, n in _lines_of(shard)] and all(
                self.place.has_shard(other) for other in places
            ):
                return True
            self._given_up.discard(path)
            self._moved, self._lost = before
            return False

    def _place_of(self, writer: str, number: int) -> Line | None:
        """The shard that has a line; `None` when nothing is known of the line."""
        found = self._moved.get((writer, number))
        if found is not None:
            return found.shard
        manifest = self.manifests.get(writer)
        return manifest.lines[number] if manifest is not None and number < len(manifest.lines) else None

    def list_superseded(self) -> Iterator[tuple[Line, list[Move]]]:
        """Yield each shard whose rows are all read from merged ones, with the places of its rows there."""
        holders: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for shard in self._merged.values():
            for key in _lines_of(shard):
                holders.setdefault(key, []).append(_order(shard))
        for manifest in self.manifests.values():
            for number, line in enumerate(manifest.lines):
                runs = line.holds or ((manifest.writer, number, (line.rows,)),)
                found = [
                    (self._moved.get((writer, first + at)), rows, holders.get((writer, first + at), []))
                    for writer, first, each in runs
                    for at, rows in enumerate(each)
                ]
                if all(place is not None and place.shard != line for place, _, _ in found):
                    yield line, _join_moves(line, found)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def shard_at(self, part: Stretch) -> Line:
        """Return the line of the shard that has the rows of a part."""
        found = self._place_of(part.writer, part.first)
        assert found is not None
        return found

    def rows_of(self, part: Stretch) -> tuple[int, ...]:
        """Return the rows of each line that a part consists of."""
        moved, manifest = self._moved, self.manifests.get(part.writer)
        lines = manifest.lines if manifest is not None else []
        numbers = range(part.first, part.last)
        return tuple(
            moved[part.writer, number].rows if (part.writer, number) in moved else lines[number].rows
            for number in numbers
        )

    def counts(self) -> dict[str, int]:
        """How many lines each writer has, lines without a manifest included."""
        found = {writer: len(manifest.lines) for writer, manifest in self.manifests.copy().items()}
        for writer, lost in self._lost.copy().items():
            if lost:
                found[writer] = lost[-1] + 1
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
        lost = self._lost.get(writer, [])
        known = range(start, min(stop, len(lines)))
        beyond = lost[bisect_left(lost, max(start, len(lines))) : bisect_left(lost, stop)]
        for number in (*known, *beyond):
            if number < len(lines) and lines[number].holds:
                continue
            place = self._moved.get((writer, number)) or RowPlace(lines[number], 0, lines[number].rows)
            path, offset, rows = place.shard.path, place.start, place.rows
            last = found[-1] if found else None
            follows = last is not None and last.path == path and last.start + last.rows == offset
            if last is not None and follows and last.writer == writer and last.last == number:
                found[-1] = Stretch(path, last.start, last.rows + rows, last.whole, writer, last.first, number + 1)
            else:
                found.append(Stretch(path, offset, rows, place.shard.rows, writer, number, number + 1))


def _line_of(path: str, label: Label) -> Line:
    """Return the line of a merged shard, from its label."""
    return label.to_line(path, sum(sum(run[2]) for run in label.holds))


def _order(shard: Line) -> tuple[int, str]:
    return shard.generation, shard.path


def _join_moves(line: Line, found: list[tuple[RowPlace | None, int, list[tuple[int, str]]]]) -> list[Move]:
    """Return the moves of a shard, in as few pieces as there can be.

    Args:
        line: the shard.
        found: for each line that it stands for, where its rows are read, how many the shard has, and the merged shards
            that have them, as `_order` sorts them.
    """
    moves: list[Move] = []
    start = 0
    for place, rows, holders in found:
        assert place is not None
        is_source = not any(_order(line) < order < _order(place.shard) for order in holders)
        last = moves[-1] if moves else None
        follows = last is not None and (last.shard, last.to + last.rows) == (place.shard, place.start)
        if last is not None and follows and last.is_source == is_source and rows == place.rows:
            moves[-1] = replace(last, rows=last.rows + rows)
        else:
            moves.append(Move(start, rows, place.shard, place.start, is_source))
        start += rows
    return moves


def _lines_of(shard: Line) -> list[tuple[str, int]]:
    """The lines that a merged shard stands for, as (writer, number)."""
    return [(writer, start + at) for writer, start, rows in shard.holds for at in range(len(rows))]
