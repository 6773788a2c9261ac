"""Operations on a whole data set: `compact`, `tidy`, and the functions behind `verify`, `describe` and `convert`."""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.core.keys import Path
from tensordict.core.logs import logger
from tensordict.datasets.dataset import Dataset, Shards, open_with_row_class
from tensordict.datasets.index import Manifests, ShardPart, ShardParts
from tensordict.datasets.lines import Line, new_id
from tensordict.datasets.location import Location, RemoteLocation, format_of
from tensordict.datasets.manifest import list_manifests, new_manifest, pack_manifest
from tensordict.datasets.schema import Schema
from tensordict.datasets.shards import ShardOptions, add_shard, rows_per_block
from tensordict.datasets.sweeping import Sweep, Sweeper, check_shard, list_unlisted_shards, parse_shard_paths
from tensordict.datasets.writer import DatasetWriter, choose_shard_options, find_schema, require_schema
from tensordict.io.formats.opening import DATASET, DIRECTORY, REGISTERED_FORMATS, RegisteredFormat
from tensordict.io.formats.structure import Complain
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import IN_FLIGHT, StorageOptions
from tensordict.io.saving.progress import Progress, hide_bars, progress_bar
from tensordict.io.saving.verification import Report
from tensordict.io.specification import DeferredValue, LeafSpec, Specification
from tensordict.memory import files
from tensordict.memory.mapped import PathLike

# The least bytes of a shard after compaction, and the bytes that are copied at once.
_MIN_SHARD, _STEP = 128 << 20, 16 << 20
# The seconds that a writer may take between completing a shard and adding its line.
_MOMENT = 1.0


# --- compaction -------------------------------------------------------------------------------------------------------


def compact(
    path: PathLike,
    *,
    rows_per_shard: int | None = None,
    format: str = "",
    durable: bool | None = None,
    keep: bool = False,
    progress: bool | None = None,
    storage_options: StorageOptions | None = None,
) -> tuple[int, int]:
    """Merge small shards into larger ones. The rows and their order stay the same.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import DatasetWriter, TensorDict, open_dataset
        >>> from tensordict.datasets import compact
        >>> folder = tempfile.TemporaryDirectory()
        >>> with DatasetWriter(folder.name + "/data", rows_per_shard=2) as writer:
        ...     writer.extend(TensorDict({"x": torch.arange(10)}, [10]))
        >>> compact(folder.name + "/data")
        (5, 1)
        >>> open_dataset(folder.name + "/data")["x"]
        tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])

    Args:
        path: the folder of the data set, or its URL.
        rows_per_shard: merge neighbouring shards with fewer rows, up to this number together; by default as many as
            have 128 MiB.
        format: the format of the new shards: "folder", "archive" or "zarr"; by default the format of the first shard.
        durable: sync the new shards to the disk before removing the old ones; by default yes, for folders and
            archives on a disk.
        keep: leave the old shards for `tidy` to remove.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Returns:
        the number of shards before, and the number after.

    Raises:
        SaveError: another process compacts the data set, or the file system has no locks to exclude that. A process
            that compacts at a URL makes the object `.compacting` there. If it is killed, you must delete the object.
        OSError: a file cannot be read or written; shards that were merged before stay merged.

    Warns:
        UserWarning: a shard is damaged, or a manifest is damaged or missing; the warning names it.

    A new shard replaces old ones in one step. Writers and readers may go on meanwhile, but do not assign to rows.
    Readers that opened the data set before find the rows in their new places. Each shard is verified before it is
    merged, and damaged shards stay unchanged. While a manifest is damaged or missing, old shards are not removed.
    """
    place = Location.of(path, Access(storage_options))
    with hide_bars(progress):
        schema = require_schema(place)
    with place.exclusive(), hide_bars(progress):
        index = _read_index(place, schema)
        _warn(index.problems)
        parts = index.parts()
        if not parts:
            return 0, 0
        limit = rows_per_shard or max(1, _MIN_SHARD // max(1, schema.nbytes))
        options = choose_similar_options(place, index, parts, format, durable)
        groups = list(_group_shards(place, index, parts, limit))
        made: dict[str, set[str]] = {}
        if groups:
            writer = new_id()
            generation = index.generation() + 1
            rows = sum(part.rows for group in groups for part in group)
            manifest = new_manifest(place, writer, schema.json, options.durable)
            with contextlib.closing(manifest), progress_bar(progress, "compacting", rows, "row") as shown:
                for number, group in enumerate(groups):
                    holds = tuple((part.writer, part.first, index.count_rows(part)) for part in group)
                    count = sum(part.rows for part in group)
                    label = Line(options.shard_path(writer, number), count, generation=generation, holds=holds)
                    blocks = _read_blocks(Shards(index, ShardParts.of(group), schema, "r"), schema, shown)
                    add_shard(manifest, schema, blocks, place, label, options)
                    made[label.path] = {part.path for part in group}
        index = _read_index(place, schema)
        if not keep:
            Sweeper(place, index, schema, made).remove_superseded_shards()
        if isinstance(place, RemoteLocation) and not index.problems:
            _merge_manifests(place, index)
        before, after = parts.count_shards(), index.parts().count_shards()
        logger.info("compacted %r: %d shards became %d", place.root, before, after)
        return before, after


def _read_index(place: Location, schema: Schema) -> Manifests:
    index = Manifests(place)
    index.read(thorough=True)
    index.find_orphans()
    index.check(schema)
    return index


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=3)


def _group_shards(place: Location, index: Manifests, parts: ShardParts, limit: int) -> Iterator[list[ShardPart]]:
    """Yield groups of sound neighbouring shards that fit into one shard of at most `limit` rows."""
    group: list[ShardPart] = []
    rows = 0
    for number, count in enumerate([*parts.list_rows(), limit]):
        if count + rows > limit or count >= limit:
            yield from _split_at_damage(place, index, group)
            group, rows = [], 0
        if count < limit:
            group.append(parts[number])
            rows += count


def _split_at_damage(place: Location, index: Manifests, group: list[ShardPart]) -> Iterator[list[ShardPart]]:
    """Split a group at damaged shards, and yield the runs of two or more sound ones."""
    run: list[ShardPart] = []
    for part in [*group, None] if len(group) > 1 else []:
        problems = [] if part is None else check_shard(place, index.find_shard(part))[1]
        if part is not None and not problems:
            run.append(part)
            continue
        if part is not None:
            _warn([f"the shard {place.path(part.path)!r} is damaged and is not merged: {problems[0]}"])
        if len(run) > 1:
            yield run
        run = []


def choose_similar_options(
    place: Location, index: Manifests, parts: ShardParts, format: str = "", durable: bool | None = None
) -> ShardOptions:
    """Return options for shards that replace others: their format, and checksums if they have any."""
    format = format or (format_of(parts[0].path).replace(DIRECTORY, "folder") if parts else "folder")
    is_durable = format != "zarr" and not place.is_remote if durable is None else durable
    checks_old = format == "folder" and bool(parts)
    has_checksums = checks_old and check_shard(place, index.find_shard(parts[0]))[0].checksummed > 0
    return choose_shard_options(place, format, is_durable, has_checksums, None, 0)


def _read_blocks(shards: Shards, schema: Schema, progress: Progress) -> Iterator[Any]:
    """Yield the rows of shards, a block at a time."""
    step = rows_per_block(schema)
    for number in range(len(shards)):
        rows = shards[number]
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            yield block
            progress.add(len(block))


def _merge_manifests(place: RemoteLocation, index: Manifests) -> None:
    """Merge the objects of each manifest into one object, and delete the old ones."""
    for writer, found in list_manifests(place).items():
        manifest = index.manifests.get(writer)
        if manifest is None or manifest.problem or len(found) < 2:
            continue
        name, content = pack_manifest(manifest)
        place.put_new(name, content)
        stop = len(manifest.lines)
        if place.read(name, 0, len(content))[0] == content:
            place.delete(
                file.name for file in found if file.name != name and file.stop is not None and file.stop <= stop
            )


# --- tidying ----------------------------------------------------------------------------------------------------------


def tidy(
    path: PathLike,
    *,
    older_than: float = 3600.0,
    shards: Iterable[str] = (),
    storage_options: StorageOptions | None = None,
) -> Sweep:
    """Remove unused shards: merged-away ones, and incomplete ones of writers that are gone.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import DatasetWriter, TensorDict
        >>> from tensordict.datasets import tidy
        >>> folder = tempfile.TemporaryDirectory()
        >>> with DatasetWriter(folder.name + "/data") as writer:
        ...     writer.append(TensorDict(x=torch.tensor(1.0)))
        >>> tidy(folder.name + "/data")
        Sweep(removed=[], left={})

    Args:
        path: the folder of the data set, or its URL.
        older_than: leave files that changed in the last so many seconds, by the clock of the file system or the store.
        shards: paths of complete shards that no manifest lists, as `Sweep.left` names them, to remove them, too.
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Returns:
        `removed`, a list of paths; and `left`, a dict with the reason for each path that was left.

    Raises:
        FileNotFoundError: the data set does not exist.
        SaveError: another process tidies or compacts it.
        ValueError: a named shard is in use, or is not a shard of this data set.

    A writer that is at work keeps its files, however long it was idle. Nothing is removed while a manifest is damaged
    or missing. A complete shard that no manifest lists is removed only if you name it: its writer was killed just
    before the commit, or its line was lost. Only files that this package made are removed, and no link is followed.
    """
    place = Location.of(path, Access(storage_options))
    if not place.list_names():
        raise FileNotFoundError(errno.ENOENT, "there is no data set here", str(place.root))
    named = parse_shard_paths(place, shards)
    schema = require_schema(place)
    with place.exclusive() as now:
        sweeper = Sweeper(place, _read_index(place, schema), schema)
        sweeper.remove_superseded_shards()
        sweeper.remove_leftovers(now - older_than, named)
    return sweeper.sweep


# --- for the functions that take any save -----------------------------------------------------------------------------


def describe(path: PathLike, complain: Complain | None, access: Access) -> Specification:
    """Return the specification of all rows, which opens shards only when their content is needed."""
    place = Location.of(path, access)
    schema = require_schema(place)
    index = Manifests(place)
    index.read(thorough=True)
    for problem in index.problems:
        if complain is None:
            raise SaveError(problem)
        complain(SaveError(problem))
    # Only comparisons read rows, so the data set is opened when the first row is needed.
    data: list[Any] = []

    def content(key: Path) -> Any:
        if not data:
            data.append(Dataset(path, access=access))
        return data[0]._peek_unread(key)

    def values(key: Path, count: int | None) -> Any:
        rows = content(key)
        return (rows if count is None else rows[:count]).tolist()

    rows = sum(index.parts().list_rows())
    leaves: dict[Path, Any] = {}
    for key, field in schema.fields.items():
        if field.dtype is None:
            leaves[key] = DeferredValue("one for each row", partial(values, key))
        else:
            shape = (rows, *field.shape)
            # Only the shards know the size of ragged rows.
            nbytes = torch.Size(shape).numel() * field.dtype.itemsize if key in schema.dense else 0
            leaves[key] = LeafSpec(field.dtype, shape, nbytes, key not in schema.dense, partial(content, key))
    return schema.specification(leaves, rows)


def _verify(report: Report, num_threads: int, progress: Progress, access: Access) -> None:
    """Check the manifests and all committed shards."""
    place = Location.of(report.path, access)
    schema, problem = find_schema(place)
    assert schema is not None
    report.problems += [problem] if problem else []
    index = _read_index(place, schema)
    if list_unlisted_shards(place, index):
        # A writer at a URL may add the line in a moment.
        time.sleep(_MOMENT)
        index = _read_index(place, schema)
    report.problems += index.problems
    for name in list_unlisted_shards(place, index):
        what, who = ("merged shard", "compaction") if name in index.orphans else ("shard", "writer")
        report.problems.append(
            f"the {what} {name!r} is complete, and no manifest lists it: its {who} was killed before it counted, or "
            "its line was lost"
        )
    found: dict[str, tuple[Report, list[str]]] = {}

    def check(line: Line) -> None:
        one, problems = found[line.path] = check_shard(place, line)
        if not problems:
            try:
                rows = index.hide_added_keys(place.open(line.path, "r"), line.path, schema)
                schema.refuse_other(Schema(rows), "this shard")
            except (OSError, SchemaError) as error:
                problems.append(str(error))
        progress.add(one.nbytes)

    lines = {line.path: line for line in map(index.find_shard, index.parts())}
    files.run_all([partial(check, line) for line in lines.values()], num_threads or min(place.in_flight, IN_FLIGHT))
    report.leaves = len(schema.fields)
    for name in lines:
        one, problems = found[name]
        report.nbytes += one.nbytes
        report.problems += [f"the shard {name!r}: {problem}" for problem in problems]
    sums = {found[name][0].leaves == found[name][0].checksummed for name in lines}
    report.checksummed = len(schema.fields) if sums == {True} else 0


def _write(container: Any, path: PathLike, access: Access) -> None:
    """Write a container as a data set, a piece at a time."""
    place = Location.of(path, access)
    if place.list_names():
        raise SaveError(
            f"{place.root!r} is not empty, and a data set is not replaced: choose a new place, or add to it by "
            "DatasetWriter"
        )
    with DatasetWriter(path, storage_options=access.storage_options) as writer:
        write_rows(writer, container)


def write_rows(writer: DatasetWriter, container: Any) -> None:
    """Add all rows of a container, a piece at a time."""
    row = Schema(container[:1]).nbytes if len(container) else 0
    step = max(1, _STEP // max(1, row))
    for start in range(0, len(container), step):
        writer.extend(container[start : start + step])


REGISTERED_FORMATS[DATASET] = RegisteredFormat(open_with_row_class, describe, _write, _verify)
