"""A data set as a source of Ray Data: each shard is a block, which the worker that needs it reads from the path."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict.core import extras
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.core.keys import joined
from tensordict.datasets.dataset import Dataset, Segment
from tensordict.io.remote.remote_saves import Access

if TYPE_CHECKING:
    import ray.data

# The rows of one block: those from one position up to another.
Span = tuple[int, int]


def to_ray(data: Any, *, separator: str = ".", override_num_blocks: int | None = None) -> ray.data.Dataset:
    """A `ray.data.Dataset` of the rows of a data set (needs the extra `ray`).

    Nothing is read before Ray asks for it; then each shard is one block, read where it is used. All workers need the
    path of the data set. The columns are the entries, nested ones under their joined names; strings are strings.

    Args:
        data: what :func:`open_dataset` gave. The rows are those that it has now, also when the data set grows.
        separator: joins the names of nested keys.
        override_num_blocks: into how many blocks Ray cuts them; by default one for each shard.

    Returns:
        the data set of Ray.

    Raises:
        ModuleNotFoundError: Ray is not installed; says what to run.
        TypeError: `data` is no data set.
        UnsupportedEntryError: an entry is ragged, or two would have one name.
    """
    found = data._wrapped_container()
    if not isinstance(found, Dataset):
        raise TypeError(f"to_ray takes what open_dataset gave, got a {type(data).__name__}")
    names: set[str] = set()
    for key, field in found.schema.fields.items():
        if -1 in field.shape:
            raise UnsupportedEntryError(
                f"entry {joined(key)!r} is ragged: select the other entries by map_into() first"
            )
        if (name := separator.join(key)) in names:
            raise UnsupportedEntryError(f"two entries would be the column {name!r}: choose another separator")
        names.add(name)
    module = extras.require("ray.data", "ray")
    # Ray would cut the blocks of fewer shards than it has tasks.
    blocks = override_num_blocks or max(1, sum(1 for _ in found.shards()))
    result: ray.data.Dataset = module.read_datasource(_source_of(found, separator), override_num_blocks=blocks)
    return result


def _source_of(data: Dataset, separator: str) -> Any:
    datasource = extras.require("ray.data.datasource", "ray")
    block = extras.require("ray.data.block", "ray")
    row = data.schema.nbytes
    spans: list[Span] = []
    for _, count in data.shards():
        start = spans[-1][1] if spans else 0
        spans.append((start, start + count))
    path, segments, access = data.path, data.segments, data._access

    class RaySource(datasource.Datasource):  # type: ignore[misc, name-defined]
        """The shards of a data set."""

        def get_name(self) -> str:
            return "TensorDict"

        def estimate_inmemory_data_size(self) -> int:
            return row * len(data)

        def get_read_tasks(self, parallelism: int, *others: Any, **options: Any) -> list[Any]:
            return [
                datasource.ReadTask(
                    partial(_blocks, path, segments, access, span, separator),
                    block.BlockMetadata(
                        num_rows=span[1] - span[0],
                        size_bytes=row * (span[1] - span[0]),
                        input_files=None,
                        exec_stats=None,
                    ),
                )
                for span in spans
            ]

    return RaySource()


def _blocks(path: str, segments: list[Segment], access: Access, span: Span, separator: str) -> Iterator[Any]:
    """The block of one shard; runs in a worker of Ray's."""
    block = extras.require("ray.data.block", "ray")
    data = Dataset(path, "r", segments, access)
    rows = data[span[0] : span[1]]
    columns: dict[str, Any] = {}
    for key, field in data.schema.fields.items():
        value = rows.get(key)
        columns[separator.join(key)] = value.tolist() if field.dtype is None else value.numpy()
    yield block.BlockAccessor.batch_to_block(columns)
