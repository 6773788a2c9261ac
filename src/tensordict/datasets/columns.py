"""`add_column`: adds an entry to all rows of a data set, a shard at a time.

Each shard is written again with the new entry, as a merged shard of the old one (see `index.py`). Its line in a
manifest commits it, and a call after a crash continues with the other shards. The schema of the data set changes at the
end, in one step. Until then, readers leave out the entry of the shards that have it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Any

import torch

from tensordict.containers.concatenated import LazyConcatenatedTensorDict
from tensordict.containers.dense import TensorDict
from tensordict.core.exceptions import SaveError, SchemaError
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.logs import logger
from tensordict.datasets.dataset import Shards
from tensordict.datasets.index import Manifests, ShardPart, ShardParts
from tensordict.datasets.lines import Line, new_id
from tensordict.datasets.location import Location
from tensordict.datasets.maintenance import choose_similar_options
from tensordict.datasets.manifest import new_manifest, replace_schema
from tensordict.datasets.schema import Schema
from tensordict.datasets.shards import add_shard, rows_per_block
from tensordict.datasets.sweeping import Sweeper
from tensordict.datasets.writer import require_schema


def add_column(place: Location, key: object, fn: Callable[[Any], Any]) -> None:
    """Add an entry to all rows of a data set in a folder; see `Dataset.add_column`."""
    path = path_of(key)
    if place.is_remote:
        raise SaveError(
            f"add_column writes to a folder, and {place.root!r} is a URL, whose objects never change: copy the data "
            "set to a folder, or write a new one with map_into"
        )
    with place.exclusive():
        schema = require_schema(place)
        index = _read_index(place, schema)
        parts = index.parts()
        done = {part.path for part in parts if path in index.schema_of(part.path).fields}
        if path in schema.fields and (not schema.fields[path].added or len(done) == len({part.path for part in parts})):
            raise SchemaError(f"entry {joined(path)!r}: the data set {place.root!r} has an entry of this name already")
        full = next((index.schema_of(name) for name in sorted(done)), None)
        base = schema.without([path])
        groups = [list(group) for _, group in groupby((part for part in parts if part.path not in done), _path_of)]
        options = choose_similar_options(place, index, parts)
        made: dict[str, set[str]] = {}
        writer, generation = new_id(), index.generation() + 1
        with contextlib.ExitStack() as opened:
            manifest = None
            for number, group in enumerate(groups):
                shards = Shards(index, ShardParts.of(group), base, "r")
                rows = LazyConcatenatedTensorDict(shards, lengths=[p.rows for p in group], template=base.template)
                label = Line(
                    options.shard_path(writer, number), len(rows), generation=generation,
                    holds=tuple((part.writer, part.first, index.count_rows(part)) for part in group),
                )  # fmt: skip
                blocks = _extend_rows(base.template._rewrap(rows), path, fn, rows_per_block(schema))
                first = next(blocks)
                if full is None:
                    full = Schema(first)
                    for added in (path, *base.added_keys):
                        full.mark_added_key(added)
                    base.refuse_other(full.without([path]), "the rows with the new entry")
                if manifest is None:
                    manifest = new_manifest(place, writer, full.json, options.durable)
                    opened.callback(manifest.close)
                add_shard(manifest, full, chain([first], blocks), place, label, options)
                made[label.path] = {part.path for part in group}
        assert full is not None
        index = _read_index(place, schema)
        if missing := [part.path for part in index.parts() if path not in index.schema_of(part.path).fields]:
            raise SaveError(
                f"{place.path(missing[0])!r} was added meanwhile, without {joined(path)!r}: call add_column again"
            )
        replace_schema(place, schema.with_field_of(full, path).json, options.durable)
        Sweeper(place, index, full, made).remove_superseded_shards()
        logger.info("added the entry %r to %d shards of %r", joined(path), len(groups), place.root)


def _path_of(part: ShardPart) -> str:
    return part.path


def _read_index(place: Location, schema: Schema) -> Manifests:
    """Read the manifests. Raise if one is damaged, or if a writer is at work."""
    index = Manifests(place)
    index.read(thorough=True)
    index.check(schema)
    if index.problems:
        raise SaveError(f"nothing is added to a damaged data set: {index.problems[0]}")
    for writer in index.manifests:
        if place.is_at_work(writer):
            raise SaveError(
                f"the writer {writer!r} of {place.root!r} is at work, and its rows would lack the new entry: close it"
            )
    return index


def _extend_rows(rows: Any, path: Path, fn: Callable[[Any], Any], step: int) -> Iterator[Any]:
    """Call `fn` with the rows of a shard, and yield them with the new entry, a block at a time.

    Raises:
        SchemaError: `fn` does not return one value for each row.
    """
    held = TensorDict(batch_size=[len(rows)])
    try:
        held["column"] = fn(rows)
    except RuntimeError as error:
        raise SchemaError(
            f"the function for {joined(path)!r} must return a tensor or list with one value for each of {len(rows):,} "
            f"rows: {error}"
        ) from error
    for start in range(0, len(rows), step):
        at = torch.arange(start, min(start + step, len(rows)))
        yield rows[at].set(path, held[at].get("column"))
