"""The rows that importers read from the files of other libraries, as containers of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensordict.convert.columns import insert_entry
from tensordict.convert.images import DECODED_ROWS, ROWS, Decode, decode_files, join_bytes
from tensordict.core import makers, ragged
from tensordict.core.keys import Path

# The bytes of one container in memory.
NBYTES = 16 << 20


class Encoded(bytes):
    """The content of an image file."""


class Ragged(list[Any]):
    """Arrays, one for each row, that may have different lengths in other rows of the same data set."""


# The rows of an entry: an array whose first dim is the rows, or a list with an item for each row.
Column = np.ndarray[Any, np.dtype[Any]] | Sequence[Any]


def iterate_containers(columns: Mapping[Path, Column], count: int, decode: Decode) -> Iterator[Any]:
    """Yield the rows of columns as containers. Images are decoded on request, some of them at a time."""
    has_images = any(isinstance(column, list) and column and type(column[0]) is Encoded for column in columns.values())
    step = DECODED_ROWS if decode and has_images else ROWS
    for start in range(0, count, step):
        stop = min(count, start + step)
        entries: dict[str, Any] = {}
        for path, column in columns.items():
            insert_entry(entries, path, make_entry(path, column[start:stop], decode, type(column) is Ragged))
        yield make_container(entries, stop - start)


def collect_rows(rows: Iterable[tuple[dict[Path, Sequence[Any]], int]], decode: Decode) -> Iterator[Any]:
    """Yield rows as containers of at most 1,024 rows and about 16 MiB.

    Args:
        rows: for each row, its columns, each with one item, and its bytes. All rows have the same columns.
        decode: decode images.
    """
    columns: dict[Path, Any] = {}
    count = nbytes = 0
    for row, size in rows:
        for path, column in row.items():
            if path in columns:
                columns[path].extend(column)
            else:
                columns[path] = column if isinstance(column, Ragged) else list(column)
        count, nbytes = count + 1, nbytes + size
        if count == ROWS or nbytes >= NBYTES:
            yield from iterate_containers(columns, count, decode)
            columns, count, nbytes = {}, 0, 0
    yield from iterate_containers(columns, count, decode)


def make_entry(path: Path, rows: Column, decode: Decode = False, is_ragged: bool = False) -> Any:
    """Make an entry of rows: a leaf of arrays and numbers, a ragged leaf of bytes, or values of other objects."""
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(rows if rows.flags.writeable else rows.copy())
    if all(isinstance(row, bytes) for row in rows):
        return decode_files(rows, decode, path) if decode and type(rows[0]) is Encoded else join_bytes(rows)
    if all(isinstance(row, (np.ndarray, np.generic)) for row in rows):
        if not is_ragged and len({row.shape for row in rows}) == 1:
            return torch.from_numpy(np.stack(rows))
        tensors = [torch.from_numpy(row.copy()) for row in rows]
        if len({tensor.shape[1:] for tensor in tensors}) == 1:
            return torch.nested.nested_tensor(tensors, layout=torch.jagged)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return ragged.from_buffer(flat, torch.tensor([tensor.shape for tensor in tensors]))
    return make_values(rows)


def make_values(rows: Sequence[Any]) -> Any:
    """Make an entry with one value for each row."""
    return makers.values(list(rows), torch.Size((len(rows),)), 0, None)


def make_container(entries: dict[str, Any], count: int) -> Any:
    """Make a container of nested dicts of entries with `count` rows."""
    made = {name: make_container(entry, count) if type(entry) is dict else entry for name, entry in entries.items()}
    return makers.dense(made, torch.Size((count,)), None, None)
