"""What is done to a data set as a whole: merging small shards, tidying up, checking, describing, converting."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tensordict.core.errors import SaveError, SchemaError
from tensordict.core.keys import Path
from tensordict.core.logs import logger
from tensordict.datasets.dataset import Dataset, Shards, opened
from tensordict.datasets.location import SHARDS, Location
from tensordict.datasets.manifest import Line, Manifests, ManifestWriter, Stretch, new_id
from tensordict.datasets.schema import Field, Schema
from tensordict.datasets.shards import Buffers, Shard, new_shard, row_nbytes
from tensordict.datasets.writer import DatasetWriter, schema_there, shard_options
from tensordict.io.formats import ABOVE, DATASET, Above
from tensordict.io.progress import Progress, progress_bar, quiet
from tensordict.io.remote import StorageOptions
from tensordict.io.remote_saves import Access
from tensordict.io.specification import DICT, VALUE_STACK, WRAPPED, LeafSpec, Specification, Unread
from tensordict.io.structure import Complain
from tensordict.io.verify import Report, verify
from tensordict.memory import files
from tensordict.memory.mapped import PathLike

# The bytes that a shard should have at least, and those that are copied at once.
_ENOUGH, _STEP = 128 << 20, 16 << 20


# --- compaction -------------------------------------------------------------------------------------------------------


def compact(
    path: PathLike,
    *,
    rows_per_shard: int | None = None,
    format: str = "",
    durable: bool = False,
    keep: bool = False,
    progress: bool | None = None,
    storage_options: StorageOptions | None = None,
) -> tuple[int, int]:
    """Merge small shards into larger ones; the rows stay the same, in the same order.

    Each new shard takes the place of old ones in one step, and these are removed then. Writers may go on writing and
    readers reading meanwhile, those too that had opened the data set before: they find the rows where they are now.
    Rows must not be assigned to at the same time.

    Args:
        path: the folder of the data set, or its URL.
        rows_per_shard: shards with fewer rows are merged, as long as they have no more together; by default as many as
            have 128 MiB.
        format: of the new shards: "folder", "archive" or "zarr"; by default that of the first shard.
        durable: have the new shards reach the disk before the old ones are removed.
        keep: leave the old shards there, for `tidy` to remove.
        progress: show a bar (needs tqdm); by default on terminals and in notebooks, after a second.
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Returns:
        how many shards there were, and how many there are.

    Raises:
        SaveError: somebody else compacts it, or the file system has no locks, which would tell. Who compacts at a URL
            makes the file `.compacting` there; a process that was killed leaves it, and you delete it.
        OSError: a file cannot be read or written; what was merged before stays merged.

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
        index = Manifests(place)
        index.read()
        index.check(schema.digest)
        parts = index.parts()
        if not parts:
            return 0, 0
        limit = rows_per_shard or max(1, _ENOUGH // max(1, sum(row_nbytes(schema).values())))
        options = shard_options(place, format or place.format_of(parts[0].path), durable, False, None, 0)
        writer = new_id()
        manifest = ManifestWriter(place, writer, schema.digest, durable)
        generation = 1 + max((line.generation for m in index.manifests.values() for line in m.lines), default=0)
        groups = list(_groups(parts, limit))
        rows = sum(part.rows for group in groups for part in group)
        with contextlib.closing(manifest), progress_bar(progress, "compacting", rows, "row") as shown:
            for number, group in enumerate(groups):
                name = f"{SHARDS}/{writer}/{number:08}{options.suffix}"
                count = sum(part.rows for part in group)
                with contextlib.closing(new_shard(schema, count, place.path(name), options, Buffers())) as shard:
                    _copy(Shards(index, group, schema, "r"), shard, schema, shown)
                    shard.save()
                holds = tuple((part.writer, part.first, part.last) for part in group)
                manifest.add(Line(name, count, generation, holds))
        index.read()
        made = len({part.path for part in index.parts()})
        if not keep:
            _remove_superseded(place)
        before = len({part.path for part in parts})
        logger.info("compacted %r: %d shards became %d", place.root, before, made)
        return before, made


def _groups(parts: list[Stretch], limit: int) -> Iterator[list[Stretch]]:
    """Shards that follow one another and have no more rows together than one should have."""
    group: list[Stretch] = []
    rows = 0
    for part in parts:
        if part.rows + rows > limit or part.rows >= limit:
            if len(group) > 1:
                yield group
            group, rows = [], 0
        if part.rows < limit:
            group.append(part)
            rows += part.rows
    if len(group) > 1:
        yield group


def _copy(shards: Shards, shard: Shard, schema: Schema, progress: Progress | None) -> None:
    step = max(1, _STEP // max(1, sum(row_nbytes(schema).values())))
    for number in range(len(shards)):
        rows = shards[number]
        for start in range(0, len(rows), step):
            batch = schema.taken(rows[start : start + step])
            shard.add(batch, 0, batch.count)
            if progress is not None:
                progress.add(batch.count)


def _remove_superseded(place: Location) -> list[str]:
    """Remove shards that others are in the place of; gives their names."""
    index = Manifests(place)
    index.read()
    superseded = set(index.superseded())
    removed = [found.name for found in place.shards(superseded.__contains__)] if superseded else []
    for name in removed:
        logger.info("removing %r, which others are in the place of", place.path(name))
        place.remove(name)
    return removed


# --- tidying ----------------------------------------------------------------------------------------------------------


def tidy(
    path: PathLike,
    *,
    older_than: float = 3600.0,
    complete: bool = False,
    storage_options: StorageOptions | None = None,
) -> list[str]:
    """Remove what killed writers and compactions have left: shards that do not count, which nobody reads.

    Shards that count are never touched, nor those of writers whose manifest is damaged, as they may be listed by what
    was lost.

    Args:
        path: the folder of the data set, or its URL.
        older_than: leave what was changed in the last so many seconds: a writer may be at work on it.
        complete: remove complete shards that no manifest lists, too. A writer that was killed in the moment before it
            would have counted leaves one; so does a manifest that lost its last lines. At a URL an archive is there
            as a whole or not at all, so that all that is left is complete.
        storage_options: of a URL, as in :meth:`TensorDict.save`.

    Returns:
        the paths that were removed.

    Raises:
        FileNotFoundError: there is no data set.
        SaveError: somebody else tidies or compacts it.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import DatasetWriter, TensorDict
        >>> from tensordict.datasets import tidy
        >>> folder = tempfile.TemporaryDirectory()
        >>> with DatasetWriter(folder.name + "/data") as writer:
        ...     writer.append(TensorDict(x=torch.tensor(1.0)))
        >>> tidy(folder.name + "/data")
        []
    """
    place = Location.of(path, Access(storage_options))
    if not place.begun():
        raise FileNotFoundError(errno.ENOENT, "there is no data set here", place.root)
    with place.alone():
        index = Manifests(place)
        index.read()
        removed = _remove_superseded(place)
        limit = time.time() - older_than
        damaged = {writer for writer, manifest in index.manifests.items() if manifest.problem}
        listed = {line.path for manifest in index.manifests.values() for line in manifest.lines}

        def is_left(name: str) -> bool:
            return name not in listed and name.split("/")[1] not in damaged

        for found in list(place.shards(is_left)):
            if (complete or not found.complete) and found.changed is not None and found.changed < limit:
                logger.info("removing %r, which does not count", place.path(found.name))
                place.remove(found.name)
                removed.append(found.name)
        place.remove_empty(limit, {os.path.dirname(name) for name in removed})
    return [place.path(name) for name in removed]


# --- what other modules ask of a save ---------------------------------------------------------------------------------


def describe(path: PathLike, complain: Complain | None, access: Access) -> Specification:
    """The specification of all rows; no shard is opened before its content is asked for."""
    place = Location.of(path, access)
    schema = schema_there(place)
    index = Manifests(place)
    index.read()
    for problem in index.problems:
        if complain is None:
            raise SaveError(problem)
        complain(SaveError(problem))
    count = sum(part.rows for part in index.parts())
    # Whoever compares needs them, and no one else.
    data: list[Any] = []

    def content(key: Path) -> Any:
        if not data:
            data.append(Dataset(path, access=access))
        return data[0]._unread_at(key)

    return _described(schema.skeleton, (), schema.fields, count, content)


def _described(
    node: Specification, key: Path, fields: dict[Path, Field], count: int, content: Callable[[Path], Any]
) -> Specification:
    size = torch.Size((count, *node.batch_size[1:]))
    if node.is_tensorclass:
        inner = _described(node.entries[WRAPPED], key, fields, count, content)
        return Specification(node.kind, size, None, node.names, {WRAPPED: inner}, missing=node.missing)
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        path = (*key, name)
        field = fields.get(path)
        if field is None:
            entries[name] = _described(entry, path, fields, count, content)
        elif field.dtype is None:
            rows = Unread("one for each row", partial(_values, content, path))
            entries[name] = Specification(VALUE_STACK, torch.Size((count,)), stack_dim=0, value=rows)
        else:
            shape = (count, *field.shape)
            # What ragged rows take is known by their shards only.
            nbytes = torch.Size(shape).numel() * field.dtype.itemsize if field.is_dense else 0
            entries[name] = LeafSpec(field.dtype, shape, nbytes, not field.is_dense, partial(content, path))
    return Specification(DICT, size, None, node.names, entries)


def _values(content: Callable[[Path], Any], path: Path, count: int | None) -> Any:
    rows = content(path)
    return (rows if count is None else rows[:count]).tolist()


def _verify(report: Report, num_threads: int, progress: Progress | None, access: Access) -> None:
    """Check the manifests, and every shard that counts."""
    place = Location.of(report.path, access)
    schema = schema_there(place)
    index = Manifests(place)
    index.read()
    index.check(schema.digest)
    report.problems += index.problems
    found: dict[str, Report] = {}
    options = access.storage_options

    def check(name: str, rows: int) -> None:
        path = place.path(name)
        one = found[name] = Report(path)
        try:
            one = found[name] = verify(path, raises=False, storage_options=options, cache_dir=access.cache)
            if one.ok:
                rows_there = place.open(name, "r")
                if len(rows_there) != rows:
                    raise SaveError(f"it has {len(rows_there):,} rows, and the manifest says {rows:,}")
                schema.refuse_other(Schema(rows_there), "this shard")
        except FileNotFoundError:
            one.problems.append("it is missing")
        except (OSError, SchemaError) as error:
            one.problems.append(str(error))
        if progress is not None:
            progress.add(one.nbytes)

    wholes = {part.path: part.whole for part in index.parts()}
    files.run_all([partial(check, name, rows) for name, rows in wholes.items()], num_threads or place.in_flight)
    report.leaves = len(schema.fields)
    for name in wholes:
        report.nbytes += found[name].nbytes
        report.problems += [f"the shard {name!r}: {problem}" for problem in found[name].problems]
    sums = {found[name].leaves == found[name].checksummed for name in wholes}
    report.checksummed = len(schema.fields) if sums == {True} else 0


def _write(container: Any, path: PathLike, access: Access) -> None:
    """Write a container as a data set, a piece at a time."""
    place = Location.of(path, access)
    if place.begun():
        raise SaveError(
            f"{place.root!r} is not empty, and a data set is not replaced: choose a new place, or add to it by "
            "DatasetWriter"
        )
    with DatasetWriter(path, storage_options=access.storage_options) as writer:
        write_rows(writer, container)


def write_rows(writer: DatasetWriter, container: Any) -> None:
    """Add all rows of a container, a piece at a time."""
    row = sum(row_nbytes(Schema(container[:1])).values()) if len(container) else 0
    step = max(1, _STEP // max(1, row))
    for start in range(0, len(container), step):
        writer.extend(container[start : start + step])


ABOVE[DATASET] = Above(opened, describe, _write, _verify)
