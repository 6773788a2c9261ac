"""`to_ray`: a data set as a source of Ray Data, whose workers read the shards as blocks."""

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

# The rows of one block: the first one, and the one behind the last.
Span = tuple[int, int]


def to_ray(data: Any, *, separator: str = ".", override_num_blocks: int | None = None) -> ray.data.Dataset:
    """Make a `ray.data.Dataset` of the rows of a data set (needs the extra `ray`).

    Ray's workers read the shards when they need them, one block for each shard, so all of them need access to the path.
    Each entry becomes a column. Names of nested entries are joined, and strings stay strings.

    Args:
        data: the result of :func:`open_dataset`. Rows that are added to the data set later are not included.
        separator: joins the names of nested keys.
        override_num_blocks: the number of blocks; by default one for each shard.

    Returns:
        the data set of Ray.

    Raises:
        ModuleNotFoundError: Ray is not installed; the error says how to install it.
        TypeError: `data` is not a data set.
        UnsupportedEntryError: an entry is ragged, or two entries would have the same name.
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
    # Without a number of blocks, Ray would split the blocks if there are fewer shards than tasks.
    blocks = override_num_blocks or max(1, sum(1 for _ in found.shards()))
    result: ray.data.Dataset = module.read_datasource(_make_source(found, separator), override_num_blocks=blocks)
    return result


def _make_source(data: Dataset, separator: str) -> Any:
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
                    partial(_read_blocks, path, segments, access, span, separator),
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


def _read_blocks(path: str, segments: list[Segment], access: Access, span: Span, separator: str) -> Iterator[Any]:
    """Read the block of one shard, in a worker of Ray's."""
    block = extras.require("ray.data.block", "ray")
    data = Dataset(path, "r", segments, access)
    rows = data[span[0] : span[1]]
    columns: dict[str, Any] = {}
    for key, field in data.schema.fields.items():
        value = rows.get(key)
        columns[separator.join(key)] = value.tolist() if field.dtype is None else value.numpy()
    yield block.BlockAccessor.batch_to_block(columns)
