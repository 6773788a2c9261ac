"""Removing shards that a data set no longer needs, and nothing else.

Three rules hold whoever asks. Nothing is removed while a manifest is damaged or missing, because it may have listed
anything. A merged-away shard goes only when it is proven that the shards in its place have its rows. An item goes only
when its name and everything in it are what a writer makes. The caller alone decides about a complete shard that no
manifest lists, by naming it: its writer was killed before it counted, or its line was lost.
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
        left: the paths that were left though no row is read from them, each with the reason.
    """

    removed: list[str]
    left: dict[str, str]


class Sweeper:
    """Removes shards of one data set; the caller holds `Location.alone`.

    Args:
        place: the data set.
        index: its manifests, read thoroughly.
        schema: of its rows.
        made: by path of each merged shard that the caller has just written, the paths of those that it was made of.
    """

    def __init__(
        self, place: Location, index: Manifests, schema: Schema, made: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self._place, self._index = place, index
        self.sweep = Sweep([], {})
        self._schema, self._ours = schema, known_files(schema)
        self._made = made or {}
        # By path of merged shards, what is wrong with them.
        self._checked = dict.fromkeys(self._made, "")

    def remove_superseded(self) -> None:
        """Remove the shards whose rows are all read from verified merged ones."""
        items = {item.path: item for writer in self._place.writers() for item in self._place.items(writer)}
        found: list[tuple[ShardItem, Line, list[Move]]] = []
        for line, moves in self._index.list_superseded():
            # Its removal may have been cut off.
            folder, _, name = line.path.rpartition("/")
            found += [(items[path], line, moves) for path in (line.path, f"{folder}/.{name}.gone") if path in items]
        problem = self._first_problem()
        if not problem:
            self._compare_shards(found)
        for item, _, moves in found:
            self._remove(
                item, problem or next(filter(None, (self._check_replacement(move.shard) for move in moves)), "")
            )

    def _compare_shards(self, found: list[tuple[ShardItem, Line, list[Move]]]) -> None:
        """Compare merged shards with the old ones, except those that the caller has just copied.

        A merged shard with a row that differs is no proof of any other row.
        """
        to_compare: dict[Line, list[tuple[Move, Line]]] = {}
        for item, line, moves in found:
            # A removal that was cut off began with a proof, and has left no shard that could be compared.
            if item.path == line.path and (item.complete or not self._place.is_remote):
                for move in moves:
                    if line.path not in self._made.get(move.shard.path, ()):
                        to_compare.setdefault(move.shard, []).append((move, line))
        for merged, pairs in to_compare.items():
            if not self._check_replacement(merged):
                self._checked[merged.path] = compare_rows(self._place, self._schema, merged, pairs)

    def remove_left(self, limit: float, named: Collection[str]) -> None:
        """Remove what gone writers have left.

        Args:
            limit: items that changed later stay, in seconds since 1970.
            named: the paths, in the data set, of items that the caller wants removed.
        """
        listed = {line.path for manifest in self._index.manifests.values() for line in manifest.lines}
        listed |= {part.path for part in self._index.parts()}
        refused = sorted(listed.intersection(named))
        if refused:
            raise ValueError(f"{self._place.path(refused[0])!r} counts: a manifest lists it, and its rows are read")
        for writer in self._place.writers():
            for item in self._place.items(writer):
                if item.path not in listed:
                    self._remove(item, "" if item.path in named else self._reason_to_stay(writer, item, limit))
            self._remove_manifest(writer, limit)

    def _reason_to_stay(self, writer: str, item: ShardItem, limit: float) -> str:
        if problem := self._first_problem():
            return problem
        is_known = item.path in self._index.orphans or (is_id(writer) and writer in self._index.manifests)
        if not is_known or not item.shard:
            return "no writer of this data set makes an item of this name"
        if self._place.is_at_work(writer):
            return "its writer is at work"
        if item.complete:
            return "it is complete, and no manifest lists it: name it in shards= to remove it"
        if item.changed is None:
            return "the store does not say when it was changed"
        return "" if item.changed < limit else "it was changed a short time ago: its writer may be at work"

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
        """Remove the empty folder of a gone writer's shards, and its manifest when that lists nothing."""
        manifest = self._index.manifests.get(writer)
        if manifest is None or manifest.problem or self._place.items(writer) or self._place.is_at_work(writer):
            return
        self._place.remove_empty(writer)
        if not manifest.lines:
            self._place.remove_log(f"{WRITERS}/{writer}", limit)

    def _first_problem(self) -> str:
        problems = self._index.problems
        return f"nothing is removed while a manifest is damaged or missing: {problems[0]}" if problems else ""

    def _check_replacement(self, line: Line) -> str:
        """Say why a merged shard cannot replace others; nothing when it can."""
        if line.path not in self._checked:
            _, found = check_shard(self._place, line)
            self._checked[line.path] = f"{line.path!r} is in its place, and is broken: {found[0]}" if found else ""
        return self._checked[line.path]


def known_files(schema: Schema) -> IsOurs:
    """Return a function that tells whether a shard of this schema, as a folder, can have a file or a folder (which ends
    with a slash) of this path."""
    options = FolderOptions(archive=True, label=[])
    files = {*list_files(plan_files(schema.sample(1), "/shard", options)), ""}
    folders = {name[: at + 1] for name in files for at, letter in enumerate(name) if letter == "/"}

    # A writer that is killed may leave a file of a temporary name.
    return lambda name: name in files or name in folders or bool(TEMPORARY.fullmatch(os.path.basename(name)))


def check_shard(place: Location, line: Line, num_threads: int = 0) -> tuple[Report, list[str]]:
    """Check all that is known of a shard: its label, rows, length, description, and recorded checksums.

    Returns:
        the report on its content, and what is wrong with the shard, one line each.
    """
    report = Report(place.path(line.path))
    problems: list[str] = []
    try:
        check_label(place.label(line.path), line.path, report.path)
        with place.local(line.path) as path:
            report = verify(path, raises=False, num_threads=num_threads, progress=False)
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


def compare_rows(place: Location, schema: Schema, merged: Line, moves: Iterable[tuple[Move, Line]]) -> str:
    """Compare a merged shard with old ones, a block of rows at a time.

    Returns:
        how its first row that differs does; nothing when none does.
    """
    step = rows_per_block(schema)
    what = f"the merged shard {merged.path!r} cannot be read"
    try:
        merged_rows = place.open(merged.path, "r")
        for move, old in sorted(moves, key=lambda pair: pair[0].to):
            what = f"the merged shard {merged.path!r} does not have the rows of {old.path!r}"
            old_rows = place.open(old.path, "r")
            for start in range(0, move.rows, step):
                stop = min(start + step, move.rows)
                one = schema.taken(old_rows[move.start + start : move.start + stop])
                other = schema.taken(merged_rows[move.to + start : move.to + stop])
                if one.count != other.count:
                    return f"{what}: it ends before them"
                if difference := find_difference(one, other):
                    row, key = difference
                    return f"{what}: they differ first in its row {move.to + start + row:,}, entry {joined(key)!r}"
    except (OSError, SchemaError, LookupError, RuntimeError) as error:
        return f"{what}, as far as can be told: {error}"
    return ""


def names_of(place: Location, paths: Iterable[str]) -> set[str]:
    """Return the paths in the data set of shards that a caller names by their full paths or by those.

    Raises:
        ValueError: a path is not that of an item in the folder of a writer's shards.
    """
    found = set()
    for path in paths:
        shown = os.fspath(path)
        name = shown.removeprefix(f"{place.root}/")
        parts = name.split("/")
        if len(parts) != 3 or parts[0] != SHARDS or parts[1] in (".", "..") or parts[2] in (".", ".."):
            raise ValueError(f"{shown!r} is no shard of {place.root!r}: its path is '{SHARDS}/WRITER/NAME'")
        found.add(name)
    return found


def list_unlisted_shards(place: Location, index: Manifests) -> list[str]:
    """Return the complete shards that no line lists and no row is read from, except those being written.

    Damaged, missing and empty manifests name the shards of writers themselves; of these, this lists merged ones only.
    """
    found = {name for name in index.orphans if not place.is_at_work(name.split("/")[1])}
    for writer in place.writers():
        manifest = index.manifests.get(writer)
        if (
            manifest is not None
            and manifest.schema is not None
            and not manifest.problem
            and not place.is_at_work(writer)
        ):
            found.update(name for name in index.list_unlisted(writer) if not index.reads_from(name))
    return sorted(found)
