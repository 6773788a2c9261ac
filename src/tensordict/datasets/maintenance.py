"""What is done to a data set as a whole: merging small shards, tidying up, checking, describing, converting."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tensordict.core.errors import SaveError, SchemaError
from tensordict.core.keys import Path
from tensordict.datasets.dataset import Shards, open_shard, opened
from tensordict.datasets.manifest import SHARDS, Line, Manifests, ManifestWriter, Stretch, new_id
from tensordict.datasets.schema import Field, Schema
from tensordict.datasets.shards import Buffers, FolderShard, MemoryShard, Shard, row_nbytes
from tensordict.datasets.writer import DatasetWriter, read_schema, shard_options
from tensordict.io import commit
from tensordict.io.detect import detect_format
from tensordict.io.formats import ABOVE, ARCHIVE, DATASET, Above
from tensordict.io.progress import Progress
from tensordict.io.specification import DICT, VALUE_STACK, WRAPPED, LeafSpec, Specification, Unreadable
from tensordict.io.structure import Complain
from tensordict.io.verify import VERIFIERS, Report, verify
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META, SCHEMA, local_path

# The bytes that a shard should have at least, and those that are copied at once.
_ENOUGH, _STEP = 128 << 20, 16 << 20
# Locked by whoever compacts or tidies.
_LOCK = ".compacting"


# --- compaction -------------------------------------------------------------------------------------------------------


def compact(
    path: PathLike, *, rows_per_shard: int | None = None, format: str = "", durable: bool = False, keep: bool = False
) -> tuple[int, int]:
    """Merge small shards into larger ones; the rows stay the same, in the same order.

    Each new shard takes the place of old ones in one step, and these are removed then. Writers may go on writing and
    readers reading meanwhile, those too that had opened the data set before: they find the rows where they are now.
    Rows must not be assigned to at the same time.

    Args:
        path: the folder of the data set.
        rows_per_shard: shards with fewer rows are merged, as long as they have no more together; by default as many as
            have 128 MiB.
        format: of the new shards: "folder", "archive" or "zarr"; by default that of the first shard.
        durable: have the new shards reach the disk before the old ones are removed.
        keep: leave the old shards there, for `tidy` to remove.

    Returns:
        how many shards there were, and how many there are.

    Raises:
        SaveError: somebody else compacts it, or the file system has no locks, which would tell.
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
    root, schema = _of_data_set(path)
    with _alone(root):
        index = Manifests(root)
        index.read()
        index.check(schema.digest)
        parts = index.parts()
        if not parts:
            return 0, 0
        limit = rows_per_shard or max(1, _ENOUGH // max(1, sum(row_nbytes(schema).values())))
        options = shard_options(format or _format_of(f"{root}/{parts[0].path}"), durable, False, None, 0)
        writer = new_id()
        manifest = ManifestWriter(root, writer, schema.digest, durable)
        generation = 1 + max((line.generation for m in index.manifests.values() for line in m.lines), default=0)
        try:
            for number, group in enumerate(_groups(parts, limit)):
                name = f"{SHARDS}/{writer}/{number:08}{options.suffix}"
                count = sum(part.rows for part in group)
                shard: Shard
                if options.suffix:
                    shard = MemoryShard(schema, count, f"{root}/{name}", options, Buffers())
                else:
                    shard = FolderShard(schema, count, f"{root}/{name}", options)
                with contextlib.closing(shard):
                    _copy(Shards(index, group, schema, "r"), shard, schema)
                    shard.save()
                holds = tuple((part.writer, part.first, part.last) for part in group)
                manifest.add(Line(name, count, generation, holds))
        finally:
            manifest.close()
        index.read()
        made = len({part.path for part in index.parts()})
        if not keep:
            _remove_superseded(root)
        return len({part.path for part in parts}), made


def _of_data_set(path: PathLike) -> tuple[str, Schema]:
    root = local_path(path)
    schema = read_schema(root)
    if schema is None:
        raise FileNotFoundError(2, f"there is no data set here: {SCHEMA} is missing", root)
    return root, schema


@contextlib.contextmanager
def _alone(root: str) -> Iterator[None]:
    """Be the only one who removes shards of a data set."""
    with commit.locked(f"{root}/{_LOCK}", root, os.O_RDWR | os.O_CREAT) as sure:
        if not sure:
            raise SaveError(f"the file system of {root!r} has no locks, which would tell that nobody else compacts it")
        try:
            yield
        finally:
            # While it is still locked: whoever opened it meanwhile sees that it is no longer there.
            os.unlink(f"{root}/{_LOCK}")


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


def _copy(shards: Shards, shard: Shard, schema: Schema) -> None:
    step = max(1, _STEP // max(1, sum(row_nbytes(schema).values())))
    for number in range(len(shards)):
        rows = shards[number]
        for start in range(0, len(rows), step):
            batch = schema.taken(rows[start : start + step])
            shard.add(batch, 0, batch.count)


def _format_of(path: str) -> str:
    found = detect_format(path)
    return found if found in (ARCHIVE, "zarr") else "folder"


def _remove_superseded(root: str) -> list[str]:
    """Remove shards that others are in the place of."""
    index = Manifests(root)
    index.read()
    removed = []
    for name in index.superseded():
        path = f"{root}/{name}"
        if os.path.lexists(path):
            _remove(path)
            removed.append(path)
    return removed


def _remove(path: str) -> None:
    """Remove a shard; readers see all of it or nothing."""
    if not os.path.isdir(path):
        os.unlink(path)
        return
    gone = f"{os.path.dirname(path)}/.{os.path.basename(path)}.gone"
    if os.path.lexists(gone):
        shutil.rmtree(gone)
    os.rename(path, gone)
    shutil.rmtree(gone)


# --- tidying ----------------------------------------------------------------------------------------------------------


def tidy(path: PathLike, *, older_than: float = 3600.0, complete: bool = False) -> list[str]:
    """Remove what killed writers and compactions have left: shards that do not count, which nobody reads.

    Shards that count are never touched, nor those of writers whose manifest is damaged, as they may be listed by what
    was lost.

    Args:
        path: the folder of the data set.
        older_than: leave what was changed in the last so many seconds: a writer may be at work on it.
        complete: remove complete shards that no manifest lists, too. A writer that was killed in the moment before it
            would have counted leaves one; so does a manifest that lost its last lines.

    Returns:
        the paths that were removed.

    Raises:
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
    root = local_path(path)
    if not os.path.isdir(root):
        raise FileNotFoundError(2, "there is no data set here", root)
    removed: list[str] = []
    with _alone(root):
        index = Manifests(root)
        index.read()
        removed += _remove_superseded(root)
        limit = time.time() - older_than
        for found, is_complete in _left(index):
            if (complete or not is_complete) and _last_change(found) < limit:
                _remove(found)
                removed.append(found)
        _remove_empty(f"{root}/{SHARDS}", limit, {os.path.dirname(found) for found in removed})
    return removed


def _left(index: Manifests) -> Iterator[tuple[str, bool]]:
    """What no manifest lists, and whether it is a complete shard."""
    folder = f"{index.root}/{SHARDS}"
    for writer in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        manifest = index.manifests.get(writer)
        if manifest is not None and manifest.problem:
            continue
        listed = {os.path.basename(line.path) for line in manifest.lines} if manifest is not None else set()
        for name in sorted(os.listdir(f"{folder}/{writer}")):
            if name in listed:
                continue
            path = f"{folder}/{writer}/{name}"
            hidden = name.startswith(".")
            is_complete = not hidden and (not os.path.isdir(path) or os.path.lexists(f"{path}/{META}"))
            yield path, is_complete


def _last_change(path: str) -> float:
    found = os.lstat(path).st_mtime
    for inner, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = max(found, os.lstat(f"{inner}/{name}").st_mtime)
    return found


def _remove_empty(folder: str, limit: float, emptied: set[str]) -> None:
    """Remove the folders of writers that have nothing in them."""
    for writer in os.listdir(folder) if os.path.isdir(folder) else ():
        path = f"{folder}/{writer}"
        if not os.listdir(path) and (path in emptied or os.lstat(path).st_mtime < limit):
            commit.unless_it_fails(os.rmdir, path)


# --- what other modules ask of a save ---------------------------------------------------------------------------------


def describe(path: PathLike, complain: Complain | None = None) -> Specification:
    """The specification of all rows; no shard is opened."""
    root, schema = _of_data_set(path)
    index = Manifests(root)
    index.read()
    for problem in index.problems:
        if complain is None:
            raise SaveError(problem)
        complain(SaveError(problem))
    count = sum(part.rows for part in index.parts())
    return _described(schema.skeleton, (), schema.fields, count)


def _described(node: Specification, key: Path, fields: dict[Path, Field], count: int) -> Specification:
    size = torch.Size((count, *node.batch_size[1:]))
    if node.is_tensorclass:
        inner = _described(node.entries[WRAPPED], key, fields, count)
        return Specification(node.kind, size, None, node.names, {WRAPPED: inner}, missing=node.missing)
    entries: dict[str, Any] = {}
    for name, entry in node.entries.items():
        path = (*key, name)
        field = fields.get(path)
        if field is None:
            entries[name] = _described(entry, path, fields, count)
        elif field.dtype is None:
            rows = Unreadable("one for each row")
            entries[name] = Specification(VALUE_STACK, torch.Size((count,)), stack_dim=0, value=rows)
        else:
            shape = (count, *field.shape)
            # What ragged rows take is known by their shards only.
            nbytes = torch.Size(shape).numel() * field.dtype.itemsize if field.is_dense else 0
            entries[name] = LeafSpec(field.dtype, shape, nbytes, not field.is_dense, _no_content)
    return Specification(DICT, size, None, node.names, entries)


def _no_content() -> Any:
    raise SaveError("the rows of a data set are in its shards: open_dataset reads them")


def _verify(report: Report, num_threads: int, progress: Progress | None) -> None:
    """Check the manifests, and every shard that counts."""
    root, schema = _of_data_set(report.path)
    index = Manifests(root)
    index.read()
    index.check(schema.digest)
    report.problems += index.problems
    found: dict[str, Report] = {}

    def check(name: str, rows: int) -> None:
        path = f"{root}/{name}"
        one = found[name] = Report(path)
        try:
            one = found[name] = verify(path, raises=False)
            if one.ok:
                rows_there = open_shard(path, "r")
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
    files.run_all([partial(check, name, rows) for name, rows in wholes.items()], num_threads)
    report.leaves = len(schema.fields)
    for name in wholes:
        report.nbytes += found[name].nbytes
        report.problems += [f"the shard {name!r}: {problem}" for problem in found[name].problems]
    sums = {found[name].leaves == found[name].checksummed for name in wholes}
    report.checksummed = len(schema.fields) if sums == {True} else 0


def _write(container: Any, path: PathLike) -> None:
    """Write a container as a data set, a piece at a time."""
    root = local_path(path)
    if os.path.isdir(root) and os.listdir(root):
        raise SaveError(
            f"{root!r} is not empty, and a data set is not replaced: choose a new folder, or add to it by DatasetWriter"
        )
    with DatasetWriter(path) as writer:
        write_rows(writer, container)


def write_rows(writer: DatasetWriter, container: Any) -> None:
    """Add all rows of a container, a piece at a time."""
    row = sum(row_nbytes(Schema(container[:1])).values()) if len(container) else 0
    step = max(1, _STEP // max(1, row))
    for start in range(0, len(container), step):
        writer.extend(container[start : start + step])


ABOVE[DATASET] = Above(opened, describe, _write)
VERIFIERS[DATASET] = _verify
