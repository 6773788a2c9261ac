"""Reading and writing MDS, the format of MosaicML's streaming data sets, through its library mosaicml-streaming.

A row is a sample with named columns. The index (`index.json`) names the encoding of each column; see "MDS encodings" in
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/basic_dataset_conversion.html.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.convert.columns import insert_entry
from tensordict.convert.records import make_entry, make_values
from tensordict.core import ragged
from tensordict.core.contract import is_node
from tensordict.core.exceptions import DuplicateKeyError, SaveError, StackError, UnsupportedEntryError
from tensordict.core.extras import require
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io.remote.urls import is_url
from tensordict.io.saving.progress import progress_bar
from tensordict.memory.names import without_scheme

_INDEX = "index.json"
# The encodings of numbers.
_WIDTHS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
_NUMBERS = {"int": np.dtype(np.int64)} | {
    f"{kind}{width}": np.dtype(f"{kind}{width}") for kind, widths in _WIDTHS.items() for width in widths
}
_PICKLED = "pkl"
# The dtypes that replace dtypes without an MDS encoding.
_STAND_INS = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}

Rows = np.ndarray[Any, np.dtype[Any]] | list[Any]


# --- writing ----------------------------------------------------------------------------------------------------------


def write_mds(
    container: Any, columns: Mapping[str, str] | None, out: Any, writer: Any, finishes: bool, options: dict[str, Any]
) -> None:
    """Write the rows of a container, which has batch dims; see `TensorDict.to_mds`.

    `finishes` finishes a `writer` that the caller has opened.
    """
    if out is None and writer is None:
        raise TypeError("to_mds writes to out=, a folder or a URL, or to writer=, an MDSWriter: give one of them")
    rows: dict[str, Rows] = {}
    for path, values in _iterate_columns(container, ()):
        name = ".".join(path)
        if name in rows:
            raise ValueError(f"two entries would be the column {name!r}: rename one of them")
        rows[name] = values
    encodings = (
        {name: _choose_encoding(name, values) for name, values in rows.items()} if columns is None else dict(columns)
    )
    if missing := [name for name in encodings if name not in rows]:
        raise KeyError(f"columns= names {missing}, which are not entries; the entries are {list(rows)}")
    if not encodings:
        raise ValueError("the container has no entries to write")
    samples = _make_samples({name: rows[name] for name in encodings}, encodings, container.batch_size[0])
    if writer is not None:
        for sample in samples:
            writer.write(sample)
        if finishes:
            writer.finish()
        return
    made = None if isinstance(out, str) and is_url(out) else without_scheme(out if isinstance(out, str) else out[0])
    is_new = made is not None and not os.path.lexists(made)
    opened = require("streaming", "mds").MDSWriter(columns=encodings, out=out, **options)
    try:
        for sample in samples:
            opened.write(sample)
        opened.finish()
    except BaseException:
        opened.cancel_future_jobs()
        if is_new and made is not None:
            shutil.rmtree(made, ignore_errors=True)
        raise


def _iterate_columns(node: Any, path: Path) -> Iterator[tuple[Path, Rows]]:
    """Yield the path of each entry of a tree, with its rows."""
    for name, value in node._structure().items():
        inside = (*path, name)
        if is_node(value) and not value._is_non_tensor:
            yield from _iterate_columns(node._node(name), inside)
            continue
        try:
            leaf = node._entries[name]
        except StackError:
            # The rows have different shapes.
            leaf = [row._entries[name] for row in node.unbind(0)]
        if is_node(leaf):
            yield inside, leaf.tolist()
        elif isinstance(leaf, list) or leaf.is_nested:
            rows = leaf if isinstance(leaf, list) else ragged.unbind(leaf, 0)
            yield inside, [_to_array(row, inside) for row in rows]
        else:
            yield inside, _to_array(leaf, inside)


def _to_array(leaf: Tensor, path: Path) -> Any:
    try:
        return leaf.detach().to(_STAND_INS.get(leaf.dtype, leaf.dtype)).numpy(force=True)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedEntryError(f"entry {joined(path)!r}: {error}") from error


def _choose_encoding(name: str, values: Rows) -> str:
    """Choose the encoding of a column."""
    if isinstance(values, np.ndarray) or (values and isinstance(values[0], np.ndarray)):
        dtype = values.dtype if isinstance(values, np.ndarray) else values[0].dtype
        if dtype.name not in _NUMBERS:
            raise UnsupportedEntryError(f"entry {name!r}: MDS has no encoding for {dtype}; there are {list(_NUMBERS)}")
        if not isinstance(values, np.ndarray):
            return f"ndarray:{dtype.name}"
        shape = ",".join(map(str, values.shape[1:]))
        return f"ndarray:{dtype.name}:{shape}" if shape else "int" if dtype == np.int64 else dtype.name
    kinds = set(map(type, values))
    for kind, encoding in ((str, "str"), (bytes, "bytes"), (int, "int"), (float, "float64")):
        if kinds == {kind}:
            return encoding
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise UnsupportedEntryError(
            f"entry {name!r} holds values of {sorted(kind.__name__ for kind in kinds)}, which JSON cannot hold "
            f"({error}): leave the entry out with td.exclude"
        ) from None
    return "json"


def _make_samples(rows: dict[str, Rows], encodings: Mapping[str, str], count: int) -> Iterator[dict[str, Any]]:
    """Yield the rows as dicts for the writer. Encoding "int" needs Python ints; other numbers need NumPy scalars."""
    whole = [name for name, values in rows.items() if encodings[name] == "int" and isinstance(values, np.ndarray)]
    with progress_bar(None, "writing", count, "row") as shown:
        for row in range(count):
            sample = {name: values[row] for name, values in rows.items()}
            for name in whole:
                sample[name] = int(sample[name])
            yield sample
            shown.add(1)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_mds(path: Any, split: str | None, separator: str | None) -> tuple[dict[str, Any], int]:
    """Return the entries of a data set as nested dicts, and the number of rows.

    Raises:
        SaveError: the index is broken, or a column is pickled.
    """
    streaming = require("streaming", "mds")
    place = os.fspath(path)
    if not is_url(place):
        place = without_scheme(place)
        folder = os.path.join(place, split or "")
        index = _read_index(folder)
        if all(os.path.lexists(os.path.join(folder, shard["raw_data"]["basename"])) for shard in index["shards"]):
            return _read_entries(streaming.LocalDataset(local=place, split=split), index, separator, place)
    with tempfile.TemporaryDirectory(prefix="tensordict-mds-") as copy:
        # This fetches the index at once, and each shard when its rows are read.
        data = streaming.StreamingDataset(remote=place, local=copy, split=split, batch_size=1, shuffle=False)
        return _read_entries(data, _read_index(os.path.join(copy, split or "")), separator, place)


def _read_index(folder: str) -> dict[str, Any]:
    """Read the index of a data set. Raises if a column is pickled, or a file is outside of the folder."""
    path = os.path.join(folder, _INDEX)
    with open(path, "rb") as file:
        content = file.read()
    try:
        index: dict[str, Any] = parse_json(content)
        for shard in index["shards"]:
            if shard["format"] != "mds":
                raise SaveError(f"{path!r}: a shard has the format {shard['format']!r}, but only 'mds' can be read")
            columns = dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
            pickled = [name for name, encoding in columns.items() if str(encoding).partition(":")[0] == _PICKLED]
            if pickled:
                raise SaveError(f"{path!r}: the columns {pickled} are pickled, and are not read: unpickling runs code")
            for name in (file["basename"] for file in (shard["raw_data"], shard["zip_data"]) if file):
                if not isinstance(name, str) or any(part in ("", ".", "..") for part in name.split("/")):
                    raise SaveError(f"{path!r} names the file {name!r}, which is not in the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SaveError(f"{path!r} is not an MDS index, or is broken: {type(error).__name__}: {error}") from error
    return index


def _read_entries(
    data: Sequence[dict[str, Any]], index: dict[str, Any], separator: str | None, place: str
) -> tuple[dict[str, Any], int]:
    found: dict[str, list[Any]] = {}
    encodings: dict[str, str] = {}
    for shard in index["shards"]:
        known = dict(zip(shard["column_names"], shard["column_encodings"]))
        if encodings and known != encodings:
            raise SaveError(f"{place!r}: the shards have different columns: {encodings} and {known}")
        encodings = known
    count = len(data)
    with progress_bar(None, "reading", count, "row") as shown:
        for row in range(count):
            for name, value in data[row].items():
                found.setdefault(name, []).append(value)
            shown.add(1)
    entries: dict[str, Any] = {}
    for name, values in found.items():
        path: Path = tuple(name.split(separator)) if separator else (name,)
        try:
            insert_entry(entries, path, _make_leaf(path, values, encodings[name]))
        except DuplicateKeyError as error:
            raise ValueError(f"{place!r}: column {name!r}: {error}, or pass separator=None") from error
    return entries, count


def _make_leaf(path: Path, values: list[Any], encoding: str) -> Any:
    """Make an entry from the rows of a column: a tensor, a ragged tensor for different shapes, or values."""
    kind = encoding.partition(":")[0]
    if kind in _NUMBERS:
        return torch.from_numpy(np.array(values, dtype=_NUMBERS[kind]))
    return make_entry(path, values) if kind == "ndarray" else make_values(values)
