"""Reading RLDS and other data sets of TensorFlow Datasets in TFRecord files, without TensorFlow.

A record is an episode whose feature `steps` is a sequence of rows, or it is a row itself. `features.json` describes the
features; see "RLDS dataset format" in https://github.com/google-research/rlds.
"""

from __future__ import annotations

import glob
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tensordict.convert.images import Decode
from tensordict.convert.records import Column, Encoded, Ragged, collect_rows, iterate_containers
from tensordict.convert.tfrecord import Values, iterate_records, parse_example
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io import checks

T = TypeVar("T")

_STEPS = "steps"
_SHARD = re.compile(r"(.*)\.tfrecord-(\d+)-of-(\d+)")
_IMAGE, _TEXT = "image", "text"
_DTYPES = {"bool", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))}
_DTYPES |= {"float16", "float32", "float64"}


@dataclass(frozen=True)
class _Item:
    """The description of an entry of each row.

    Attributes:
        name: its name in the records.
        kind: a dtype of numbers, "text" or "image".
        shape: the shape of one item; -1 for a first dim that differs.
        encoding: "none" for numbers of the message, "bytes" or "zlib" for the bytes of the item.
        is_list: True for any number of items in a row.
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    encoding: str = "none"
    is_list: bool = False

    @property
    def varies(self) -> bool:
        """True if the numbers of items in rows differ."""
        return self.is_list or -1 in self.shape


def read_rlds(source: Any, decode: Decode) -> Iterator[Any]:
    """Yield the steps of the episodes of a data set, or its examples, some at a time.

    Args:
        source: the folder with `features.json` and the files of one split, or a pattern of files in such a folder.
        decode: decode images.
    """
    files = _find_files(os.fspath(source))
    steps, others = _read_features(os.path.join(os.path.dirname(files[0]), "features.json"))
    if not steps:
        yield from collect_rows(_read_records(files, partial(_read_row, features=others)), decode)
        return
    episodes = _read_records(files, partial(_read_episode, steps=steps, others=others))
    for episode, ((columns, count), _) in enumerate(episodes):
        columns["episode_index",] = np.full(count, episode)
        yield from iterate_containers(columns, count, decode)


def _read_records(files: list[str], read: Callable[[dict[str, Values]], T]) -> Iterator[tuple[T, int]]:
    """Yield what a function makes of the features of each record, and the bytes of the record."""
    for file in files:
        for number, record in enumerate(iterate_records(file)):
            try:
                found = read(parse_example(record))
            except (ValueError, zlib.error) as error:
                raise SaveError(f"{file!r}: record {number} is broken: {error}") from error
            yield found, len(record)


def _find_files(source: str) -> list[str]:
    is_folder = os.path.isdir(source)
    files = sorted(glob.glob(os.path.join(glob.escape(source), "*.tfrecord*") if is_folder else source))
    shards = [found for found in (_SHARD.fullmatch(os.path.basename(file)) for file in files) if found]
    splits = sorted({found[1] for found in shards})
    if not files or (is_folder and len(splits) > 1):
        told = f"choose a split, as the pattern '{splits[0]}.tfrecord*'" if splits else "no file matches *.tfrecord*"
        raise SaveError(f"{source!r} is not the folder of one split of a data set: {told}")
    if is_folder and shards and len(shards) != int(shards[0][3]):
        raise SaveError(f"{source!r} has {len(shards)} of {int(shards[0][3])} files of {splits[0]!r}")
    return files


def _read_features(path: str) -> tuple[dict[Path, _Item], dict[Path, _Item]]:
    """Return the features of the steps, and the others, by their keys."""
    steps: dict[Path, _Item] = {}
    with open(path, "rb") as file:
        try:
            features = parse_json(file.read())["featuresDict"]["features"]
            inner = features.get(_STEPS, {}).get("sequence", {}).get("feature", {})
            if "featuresDict" in inner:
                del features[_STEPS]
                steps = {key[1:]: feature for key, feature in _list_features(inner, (_STEPS,), False)}
            others = dict(_list_features({"featuresDict": {"features": features}}, (), False))
        except UnsupportedEntryError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SaveError(f"{path!r} does not describe features: {type(error).__name__}: {error}") from error
    return steps, others


def _list_features(feature: Any, path: Path, is_list: bool) -> Iterator[tuple[Path, _Item]]:
    """Yield the key and the description of each feature in a tree of features."""
    name = "/".join(path)
    if "featuresDict" in feature:
        for part, inner in feature["featuresDict"]["features"].items():
            yield from _list_features(inner, (*path, part), is_list)
    elif "sequence" in feature and not is_list:
        yield from _list_features(feature["sequence"]["feature"], path, True)
    elif "tensor" in feature:
        form = feature["tensor"]
        dims = [int(dim) for dim in form["shape"].get("dimensions", [])]
        shape = tuple(checks.sizes(dims, f"the shape of {name!r}", -1))
        kind = _TEXT if form["dtype"] in ("string", "object") else form["dtype"]
        is_known = kind in _DTYPES and -1 not in shape[1:] and not (is_list and -1 in shape)
        if not is_known and (kind != _TEXT or shape):
            raise UnsupportedEntryError(f"the feature {name!r} has {kind} of shape {list(shape)}, which is not read")
        yield path, _Item(name, kind, shape, form.get("encoding") or "none", is_list)
    elif "classLabel" in feature:
        yield path, _Item(name, "int64", is_list=is_list)
    elif _TEXT in feature or (_IMAGE in feature and not is_list):
        yield path, _Item(name, _TEXT if _TEXT in feature else _IMAGE, is_list=is_list)
    else:
        kind = str(feature.get("pythonClassName")).rpartition(".")[2]
        raise UnsupportedEntryError(
            f"the feature {name!r} is a {kind}{' in a list' if is_list else ''}: it is not read"
        )


def _read_episode(
    example: dict[str, Values], steps: dict[Path, _Item], others: dict[Path, _Item]
) -> tuple[dict[Path, Column], int]:
    """Return the steps of an episode, with its other features in each of them, and the number of steps."""
    # Entries of one number or text for each step tell how many there are.
    known = sorted((item for item in steps.values() if not item.varies), key=lambda item: math.prod(item.shape))
    if not known or 0 in known[-1].shape:
        raise ValueError("no feature of its steps has a fixed size, so the number of steps is unknown")
    found = example.get(known[-1].name)
    count = 0 if found is None else len(found)
    if not isinstance(found, list):
        count //= math.prod(known[-1].shape)
    columns = {
        key: _read_column(_split_steps(example, item, count) if item.varies else example.get(item.name), item, count)
        for key, item in steps.items()
    }
    for key, column in _read_row(example, others).items():
        is_array = isinstance(column, np.ndarray)
        columns[key] = np.repeat(column, count, 0) if is_array else type(column)(column * count)
    return columns, count


def _read_row(example: dict[str, Values], features: dict[Path, _Item]) -> dict[Path, Any]:
    """Return the features of one row as columns."""
    found = {key: (item, example.get(item.name)) for key, item in features.items()}
    return {key: _read_column([value] if item.varies else value, item, 1) for key, (item, value) in found.items()}


def _split_steps(example: dict[str, Values], feature: _Item, count: int) -> list[Any]:
    """Return the values of each step of a feature whose steps differ in length."""
    flat: Any = example.get(f"{feature.name}/ragged_flat_values")
    lengths = example.get(f"{feature.name}/ragged_row_lengths_0")
    if not isinstance(lengths, np.ndarray) or len(lengths) != count or (lengths < 0).any():
        raise ValueError(f"{feature.name!r} does not say how many values each step has")
    flat = [] if flat is None else flat
    size = 1 if isinstance(flat, list) else math.prod(dim for dim in feature.shape if dim != -1)
    ends = (np.cumsum(lengths) * size).tolist()
    if count and ends[-1] != len(flat):
        raise ValueError(f"{feature.name!r} has {len(flat)} values, and its lengths say {ends[-1]}")
    return [flat[end - length * size : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _read_column(values: Any, feature: _Item, count: int) -> Any:
    """Return the rows of a feature: an array, or a list. `values` has one item for each row if rows vary."""
    if not feature.varies:
        return _read_items(values, feature, count)
    rows = [_read_items(part, feature, -1) for part in values]
    return rows if feature.kind == _TEXT else Ragged(rows)


def _read_items(values: Any, feature: _Item, count: int) -> Any:
    """Return `count` items of a feature, or any number if it is -1."""
    shape = tuple(dim for dim in feature.shape if dim != -1)
    if feature.kind in (_TEXT, _IMAGE) or feature.encoding != "none":
        items = [] if values is None else values
        if not isinstance(items, list) or count not in (-1, len(items)):
            raise ValueError(f"{feature.name!r} has {len(items)} values, not {count} texts or blocks of bytes")
        if feature.kind == _TEXT:
            return [item.decode(errors="backslashreplace") for item in items]
        if feature.kind == _IMAGE:
            return [Encoded(item) for item in items]
        nbytes = np.dtype(feature.kind).itemsize * math.prod(shape)
        data = b"".join(_unpack(item, nbytes) if feature.encoding == "zlib" else item for item in items)
        values = np.frombuffer(data, feature.kind)
    if isinstance(values, list) and values:
        raise ValueError(f"{feature.name!r} has bytes instead of numbers")
    found = np.asarray([] if values is None else values)
    size = math.prod(shape) * count if count != -1 else len(found)
    if len(found) != size:
        raise ValueError(f"{feature.name!r} has {len(found)} numbers, not {size}")
    return found.astype(feature.kind).reshape(count, *shape)


def _unpack(item: bytes, nbytes: int) -> bytes:
    """Decompress an item, whose size is known."""
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(item, nbytes + 1)
    if len(found) != nbytes:
        raise ValueError(f"an item has not the {nbytes:,} bytes of its shape")
    return found
