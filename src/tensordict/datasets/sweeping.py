"""Removes shards that a data set no longer needs, for `compact` and `tidy`, and nothing else.

Three rules always hold. First, nothing is removed while a manifest is damaged or missing, because it may have listed
anything. Second, a merged-away shard is removed only after proof that the merged shards have its rows. Third, an item
is removed only if a writer could have made it, judged by its name and everything in it. A complete shard that no
manifest lists is removed only if the caller names it: its writer was killed before the commit, or its line was lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tensordict.core.exceptions import SchemaError
from tensordict.core.keys import joined
from tensordict.core.logs import logger
from tensordict.datasets.folders import IsOurs
from tensordict.datasets.index import Manifests, Move
from tensordict.datasets.labels import GROUP, check_label, describe_shard
from tensordict.datasets.lines import SHARDS, WRITERS, Line, is_id
from tensordict.datasets.location import Location, ShardItem, is_zarr
from tensordict.datasets.manifest import list_manifests
from tensordict.datasets.schema import Schema, find_difference
from tensordict.datasets.shards import rows_per_block
from tensordict.io.formats.directory import FolderOptions, list_files, plan_files
from tensordict.io.saving.commit import TEMPORARY
from tensordict.io.saving.verification import Report, verify

# The files of a Zarr group that this package writes: documents and chunks.
_OF_ZARR = re.compile(rf"([^/]+/)*({re.escape(GROUP)}|c|c/([0-9]+/)*[0-9]*)|([^/]+/)+")


class Sweep(NamedTuple):
    """The result of a sweep.

    Args:
        removed: the paths that were removed.
        left: the unused paths that were left, each with the reason.
    """

    removed: list[str]
    left: dict[str, str]


class Sweeper:
    """Removes shards of one data set; the caller holds `Location.exclusive`.

    Args:
        place: the data set.
        index: its manifests, read thoroughly.
        schema: the schema of its rows.
        made: for each merged shard that the caller has just written, the paths of the original shards.
    """

    def __init__(
        self, place: Location, index: Manifests, schema: Schema, made: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self._place, self._index = place, index
        self.sweep = Sweep([], {})
        # A killed `add_column` leaves shards with an entry that the schema lacks.
        widest = max([schema, *index.list_schemas()], key=lambda item: len(item.fields))
        self._schema, self._ours = schema, make_file_test(widest)
        self._made = made or {}
        # Damage to merged shards, by path; an empty text for undamaged ones.
        self._checked = dict.fromkeys(self._made, "")

    def remove_superseded_shards(self) -> None:
        """Remove shards whose rows are all in verified merged shards."""
        items: dict[str, dict[str, ShardItem]] = {}
        found: list[tuple[ShardItem, Line, list[Move]]] = []
        for line, moves in self._index.list_superseded_lines():
            owner = line.writer
            if owner not in items:
                items[owner] = {item.path: item for item in self._place.list_items(owner)}
            # An earlier removal may have been interrupted after the rename.
            folder, _, name = line.path.rpartition("/")
            paths = line.path, f"{folder}/.{name}.gone"
            found += [(items[owner][path], line, moves) for path in paths if path in items[owner]]
        problem = self._describe_damage()
        if not problem:
            self._compare_shards(found)
        for item, _, moves in found:
            self._remove(
                item, problem or next(filter(None, (self._check_replacement(move.shard) for move in moves)), "")
            )

    def _compare_shards(self, found: list[tuple[ShardItem, Line, list[Move]]]) -> None:
        """Compare merged shards with their original shards, unless the caller has just copied them.

        If one row differs, the merged shard does not count as proof for any row.
        """
        to_compare: dict[Line, list[tuple[Move, Line]]] = {}
        for item, line, moves in found:
            # Skip interrupted removals: the comparison succeeded before they began, and now the shard is incomplete.
            if item.path == line.path and (item.complete or not self._place.is_remote):
                for move in moves:
                    if line.path not in self._made.get(move.shard.path, ()):
                        to_compare.setdefault(move.shard, []).append((move, line))
        for merged, pairs in to_compare.items():
            if not self._check_replacement(merged):
                self._checked[merged.path] = compare_rows(self._place, self._index, self._schema, merged, pairs)

    def remove_leftovers(self, limit: float, named: Collection[str]) -> None:
        """Remove the unlisted items and staged schemas of writers that are gone.

        Args:
            limit: items that changed after this time stay, in seconds since 1970.
            named: the paths, in the data set, of items that the caller wants to remove.
        """
        listed = {line.path for manifest in self._index.manifests.values() for line in manifest.lines}
        listed |= {part.path for part in self._index.parts()}
        refused = sorted(listed.intersection(named))
        if refused:
            raise ValueError(f"{self._place.path(refused[0])!r} counts: a manifest lists it, and its rows are read")
        for writer in self._place.list_writers():
            for item in self._place.list_items(writer):
                if item.path not in listed:
                    self._remove(item, "" if item.path in named else self._reason_to_stay(writer, item, limit))
            self._remove_manifest(writer, limit)
        staged = self._place.list_staged_schemas()
        # A writer makes its manifest before it stages a schema. So a living writer of a staged schema has one.
        busy = bool(staged) and any(map(self._place.is_at_work, list_manifests(self._place)))
        for item in staged:
            reason = "a writer is at work, which may be making it" if busy else _describe_change(item, limit)
            self._remove(item, self._describe_damage() or reason)

    def _reason_to_stay(self, writer: str, item: ShardItem, limit: float) -> str:
        if problem := self._describe_damage():
            return problem
        is_known = item.path in self._index.orphans or (is_id(writer) and writer in self._index.manifests)
        if not is_known or not item.shard:
            return "no writer of this data set makes an item of this name"
        if self._place.is_at_work(writer):
            return "its writer is at work"
        if item.complete:
            return "it is complete, and no manifest lists it: name it in shards= to remove it"
        return _describe_change(item, limit)

    def _remove(self, item: ShardItem, reason: str) -> None:
        path = self._place.path(item.path)
        if not reason and not item.shard:
            reason = "no writer of this data set makes an item of this name"
        if not reason:
            reason = self._place.remove(item, self._is_ours(item))
        if reason:
            self.sweep.left[path] = reason
            logger.info("leaving %r: %s", path, reason)
        else:
            self.sweep.removed.append(path)
            logger.info("removed %r, from which no row is read", path)

    def _is_ours(self, item: ShardItem) -> IsOurs:
        if is_zarr(item.shard):
            return lambda name: not name or _OF_ZARR.fullmatch(name) is not None
        return self._ours

    def _remove_manifest(self, writer: str, limit: float) -> None:
        """Remove the empty folder of shards of a writer that is gone, and its manifest if that has no lines."""
        manifest = self._index.manifests.get(writer)
        if manifest is None or manifest.problem or self._place.list_items(writer) or self._place.is_at_work(writer):
            return
        self._place.remove_empty(writer)
        if not manifest.lines:
            self._place.remove_log(f"{WRITERS}/{writer}", limit)

    def _describe_damage(self) -> str:
        problems = self._index.problems
        return f"nothing is removed while a manifest is damaged or missing: {problems[0]}" if problems else ""

    def _check_replacement(self, line: Line) -> str:
        """Return the reason why a merged shard cannot replace others; empty if it can."""
        if line.path not in self._checked:
            _, found = check_shard(self._place, line)
            self._checked[line.path] = f"{line.path!r} is in its place, and is broken: {found[0]}" if found else ""
        return self._checked[line.path]


def _describe_change(item: ShardItem, limit: float) -> str:
    """Return the reason why an item stays because of its age; empty if it is old enough."""
    if item.changed is None:
        return "the store does not say when it was changed"
    return "" if item.changed < limit else "it was changed a short time ago: its writer may be at work"


def make_file_test(schema: Schema) -> IsOurs:
    """Return a function that returns True for paths that a folder of a shard can have; folders end with a slash."""
    options = FolderOptions(archive=True, label=[])
    files = {*list_files(plan_files(schema.describe_sample(1), "/shard", options)), ""}
    folders = {name[: at + 1] for name in files for at, letter in enumerate(name) if letter == "/"}

    # A killed writer may leave a temporary file.
    return lambda name: name in files or name in folders or bool(TEMPORARY.fullmatch(os.path.basename(name)))


def check_shard(place: Location, line: Line) -> tuple[Report, list[str]]:
    """Check the label, rows, length, description and recorded checksums of a shard.

    Returns:
        the report on its content, and the problems with the shard, one line each.
    """
    report = Report(place.path(line.path))
    problems: list[str] = []
    try:
        check_label(place.read_label(line.path), line.path, report.path)
        with place.local_files(line.path) as path:
            report = verify(path, raises=False, progress=False)
            problems += [problem.replace(path, place.path(line.path)) for problem in report.problems]
            nbytes, digest = describe_shard(path) if not problems else (None, "")
        if line.nbytes is not None and nbytes is not None and nbytes != line.nbytes:
            problems.append(f"it has {nbytes:,} bytes, and the manifest says {line.nbytes:,}")
        if line.digest and digest not in ("", line.digest):
            problems.append("its description is not the one that the manifest names")
        if not problems and (rows := len(place.open(line.path, "r"))) != line.rows:
            problems.append(f"it has {rows:,} rows, and the manifest says {line.rows:,}")
    except FileNotFoundError:
        problems.append("it is missing")
    except (OSError, SchemaError) as error:
        problems.append(str(error))
    return report, problems


def compare_rows(
    place: Location, index: Manifests, schema: Schema, merged: Line, moves: Iterable[tuple[Move, Line]]
) -> str:
    """Compare a merged shard with its original shards, a block of rows at a time. Added entries do not count.

    Returns:
        a description of the first difference; empty if all rows are equal.
    """
    added = schema.added_keys.union(*(item.added_keys for item in index.list_schemas()))
    schema = schema.without(added)
    step = rows_per_block(schema)
    what = f"the merged shard {merged.path!r} cannot be read"
    try:
        merged_rows = place.open(merged.path, "r").exclude(*added)
        for move, old in sorted(moves, key=lambda pair: pair[0].to):
            what = f"the merged shard {merged.path!r} does not have the rows of {old.path!r}"
            old_rows = place.open(old.path, "r").exclude(*added)
            for start in range(0, move.rows, step):
                stop = min(start + step, move.rows)
                one = schema.take_rows(old_rows[move.start + start : move.start + stop])
                other = schema.take_rows(merged_rows[move.to + start : move.to + stop])
                if one.count != other.count:
                    return f"{what}: it ends before them"
                if difference := find_difference(one, other):
                    row, key = difference
                    return f"{what}: they differ first in its row {move.to + start + row:,}, entry {joined(key)!r}"
    except (OSError, SchemaError, LookupError, RuntimeError) as error:
        return f"{what}, as far as can be told: {error}"
    return ""


def parse_shard_paths(place: Location, paths: Iterable[str]) -> set[str]:
    """Parse the paths of shards that a caller names, either full paths or paths in the data set.

    Returns:
        the paths in the data set.

    Raises:
        ValueError: a path does not lie among the shards of a writer.
    """
    found = set()
    for path in paths:
        shown = os.fspath(path)
        name = shown.removeprefix(f"{place.root}/")
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != SHARDS or parts[1] in (".", "..") or parts[2] in (".", ".."):
            raise ValueError(f"{shown!r} is not a shard of {place.root!r}: such a path is '{SHARDS}/WRITER/NAME'")
        found.add(name)
    return found


def list_unlisted_shards(place: Location, index: Manifests) -> list[str]:
    """Return unused, complete shards that no line lists, except shards that are being written.

    `Manifests.problems` names the unlisted shards of writers with damaged, missing or empty manifests. For these
    writers, this returns merged shards only.
    """
    found = {name for name in index.orphans if not place.is_at_work(name.split("/")[1])}
    for writer in place.list_writers():
        manifest = index.manifests.get(writer)
        if (
            manifest is not None
            and manifest.schema is not None
            and not manifest.problem
            and not place.is_at_work(writer)
        ):
            found.update(name for name in index.find_unlisted_paths(writer) if not index.reads_from(name))
    return sorted(found)
