"""Work on a data set as a whole: merging small shards, tidying up, checking, describing, converting."""

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
from tensordict.datasets.dataset import Dataset, Shards, opened
from tensordict.datasets.index import Manifests, Stretch
from tensordict.datasets.lines import SHARDS, Line, new_id
from tensordict.datasets.location import Location, RemoteLocation, format_of
from tensordict.datasets.manifest import list_manifests, merged_manifest, new_manifest
from tensordict.datasets.schema import Schema
from tensordict.datasets.shards import Shard, new_shard, rows_per_block
from tensordict.datasets.sweeping import Sweep, Sweeper, check_shard, list_unlisted_shards, names_of
from tensordict.datasets.writer import DatasetWriter, find_schema, schema_there, shard_options
from tensordict.io.formats.opening import ABOVE, DATASET, DIRECTORY, Above
from tensordict.io.formats.structure import Complain
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import StorageOptions
from tensordict.io.saving.progress import Progress, progress_bar, quiet
from tensordict.io.saving.verification import Report
from tensordict.io.specification import LeafSpec, Specification, Unread
from tensordict.memory import files
from tensordict.memory.mapped import PathLike

# A shard should have at least so many bytes; so many are copied at once.
_ENOUGH, _STEP = 128 << 20, 16 << 20
# How long a writer may take between a shard and its line, in seconds.
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
    """Merge small shards into larger ones; the rows stay the same, in the same order.

    Each new shard takes the place of old ones in one step, and the old ones are removed then. Writers may go on writing
    and readers reading meanwhile. Readers that opened the data set before find the rows in their new places. Do not
    assign to rows at the same time.

    Each shard is verified before it is merged. A damaged one stays as it is. While a manifest is damaged or missing,
    the old shards stay, too.

    Args:
        path: the folder of the data set, or its URL.
        rows_per_shard: merge shards with fewer rows, as long as they have no more together; by default as many as
            have 128 MiB.
        format: of the new shards: "folder", "archive" or "zarr"; by default that of the first shard.
        durable: have the new shards reach the disk before the old ones are removed; by default yes, for folders and
            archives on a disk.
        keep: leave the old shards there, for `tidy` to remove.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Returns:
        the number of shards before, and the number after.

    Raises:
        SaveError: another process compacts it, or the file system has no locks, which would tell. A process that
            compacts at a URL makes the object `.compacting` there; a process that was killed leaves it, and you delete
            it.
        OSError: a file cannot be read or written; the shards that were merged before stay merged.

    Warns:
        UserWarning: a shard is damaged, or a manifest is damaged or missing; each is named.

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
    """
    place = Location.of(path, Access(storage_options))
    with quiet(progress):
        schema = schema_there(place)
    with place.alone(), quiet(progress):
        index = _read_index(place, schema)
        _warn(index.problems)
        parts = index.parts()
        if not parts:
            return 0, 0
        limit = rows_per_shard or max(1, _ENOUGH // max(1, schema.nbytes))
        format = format or format_of(parts[0].path).replace(DIRECTORY, "folder")
        is_durable = format != "zarr" and not place.is_remote if durable is None else durable
        # Damage to a merged shard must be found like damage to the shards that it was made of.
        has_checksums = format == "folder" and check_shard(place, index.shard_at(parts[0]))[0].checksummed > 0
        options = shard_options(place, format, is_durable, has_checksums, None, 0)
        groups = list(_groups(place, index, parts, limit))
        made: dict[str, set[str]] = {}
        if groups:
            writer = new_id()
            generation = index.generation() + 1
            rows = sum(part.rows for group in groups for part in group)
            manifest = new_manifest(place, writer, schema.json, is_durable)
            with contextlib.closing(manifest), progress_bar(progress, "compacting", rows, "row") as shown:
                for number, group in enumerate(groups):
                    holds = tuple((part.writer, part.first, index.rows_of(part)) for part in group)
                    count = sum(part.rows for part in group)
                    path = f"{SHARDS}/{writer}/{number:08}{options.suffix}"
                    label = Line(path, count, generation=generation, holds=holds)
                    with contextlib.closing(new_shard(schema, count, place, label, options, {})) as shard:
                        _copy(Shards(index, group, schema, "r"), shard, schema, shown)
                        line = shard.save()
                        manifest.add(line)
                    made[line.path] = {part.path for part in group}
        index = _read_index(place, schema)
        if not keep:
            Sweeper(place, index, schema, made).remove_superseded()
        if isinstance(place, RemoteLocation) and not index.problems:
            _merge_manifests(place, index)
        before, after = len({part.path for part in parts}), len({part.path for part in index.parts()})
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


def _groups(place: Location, index: Manifests, parts: list[Stretch], limit: int) -> Iterator[list[Stretch]]:
    """Yield sound shards that follow one another and have no more rows together than one should have."""
    group: list[Stretch] = []
    rows = 0
    for part in [*parts, None]:
        if part is None or part.rows + rows > limit or part.rows >= limit:
            yield from _sound_runs(place, index, group)
            group, rows = [], 0
        if part is not None and part.rows < limit:
            group.append(part)
            rows += part.rows


def _sound_runs(place: Location, index: Manifests, group: list[Stretch]) -> Iterator[list[Stretch]]:
    """Yield what is left of a group when damaged shards are left out; a single shard is not merged."""
    run: list[Stretch] = []
    for part in [*group, None] if len(group) > 1 else []:
        problems = [] if part is None else check_shard(place, index.shard_at(part))[1]
        if part is not None and not problems:
            run.append(part)
            continue
        if part is not None:
            _warn([f"the shard {place.path(part.path)!r} is damaged and is not merged: {problems[0]}"])
        if len(run) > 1:
            yield run
        run = []


def _copy(shards: Shards, shard: Shard, schema: Schema, progress: Progress | None) -> None:
    step = rows_per_block(schema)
    for number in range(len(shards)):
        rows = shards[number]
        for start in range(0, len(rows), step):
            batch = schema.taken(rows[start : start + step])
            shard.add(batch, 0, batch.count)
            if progress is not None:
                progress.add(batch.count)


def _merge_manifests(place: RemoteLocation, index: Manifests) -> None:
    """Put all lines of each manifest into one object, and delete the objects that had them."""
    for writer, found in list_manifests(place).items():
        manifest = index.manifests.get(writer)
        if manifest is None or manifest.problem or len(found) < 2:
            continue
        name, content = merged_manifest(manifest)
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
    """Remove shards from which no row is read: merged-away ones, and incomplete ones of writers that are gone.

    A writer that is at work keeps its files, however long it was idle. Nothing is removed while a manifest is damaged
    or missing. A complete shard that no manifest lists is removed only when you name it: its writer was killed in the
    moment before it counted, or its line was lost. Only files that this package made are removed, and no link is
    followed.

    Args:
        path: the folder of the data set, or its URL.
        older_than: leave what was changed in the last so many seconds, by the clock of the file system or the store.
        shards: paths of shards that no manifest lists, as `Sweep.left` names them, to be removed in any case.
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Returns:
        `removed`, a list of paths; and `left`, a dict from each path that was left to the reason.

    Raises:
        FileNotFoundError: there is no data set.
        SaveError: another process tidies or compacts it.
        ValueError: a named shard counts, or is no shard of this data set.

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
    """
    place = Location.of(path, Access(storage_options))
    if not place.names():
        raise FileNotFoundError(errno.ENOENT, "there is no data set here", str(place.root))
    named = names_of(place, shards)
    schema = schema_there(place)
    with place.alone() as now:
        sweeper = Sweeper(place, _read_index(place, schema), schema)
        sweeper.remove_superseded()
        sweeper.remove_left(now - older_than, named)
    return sweeper.sweep


# --- what other modules ask of a save ---------------------------------------------------------------------------------


def describe(path: PathLike, complain: Complain | None, access: Access) -> Specification:
    """The specification of all rows; no shard is opened before its content is asked for."""
    place = Location.of(path, access)
    schema = schema_there(place)
    index = Manifests(place)
    index.read(thorough=True)
    for problem in index.problems:
        if complain is None:
            raise SaveError(problem)
        complain(SaveError(problem))
    # Whoever compares needs them, and no one else.
    data: list[Any] = []

    def content(key: Path) -> Any:
        if not data:
            data.append(Dataset(path, access=access))
        return data[0]._peek_unread(key)

    def values(key: Path, count: int | None) -> Any:
        rows = content(key)
        return (rows if count is None else rows[:count]).tolist()

    rows = sum(part.rows for part in index.parts())
    leaves: dict[Path, Any] = {}
    for key, field in schema.fields.items():
        if field.dtype is None:
            leaves[key] = Unread("one for each row", partial(values, key))
        else:
            shape = (rows, *field.shape)
            # What ragged rows take is known by their shards only.
            nbytes = torch.Size(shape).numel() * field.dtype.itemsize if key in schema.dense else 0
            leaves[key] = LeafSpec(field.dtype, shape, nbytes, key not in schema.dense, partial(content, key))
    return schema.specification(leaves, rows)


def _verify(report: Report, num_threads: int, progress: Progress | None, access: Access) -> None:
    """Check the manifests, and every shard that counts."""
    place = Location.of(report.path, access)
    schema, problem = find_schema(place)
    assert schema is not None
    report.problems += [problem] if problem else []
    index = _read_index(place, schema)
    if list_unlisted_shards(place, index):
        # A writer at a URL may be about to add the line.
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
                schema.refuse_other(Schema(place.open(line.path, "r")), "this shard")
            except (OSError, SchemaError) as error:
                problems.append(str(error))
        if progress is not None:
            progress.add(one.nbytes)

    lines = {line.path: line for line in map(index.shard_at, index.parts())}
    files.run_all([partial(check, line) for line in lines.values()], num_threads or place.in_flight)
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
    if place.names():
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


ABOVE[DATASET] = Above(opened, describe, _write, _verify)
