"""Conversion between Arrow tables and data sets of Hugging Face (`datasets`), for `from_hf` and `to_hf`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tensordict.convert.arrow import METADATA, container_of_table, is_list
from tensordict.convert.columns import TableOptions, TableStructure, paths_of
from tensordict.convert.images import DECODED_ROWS, ROWS, Decode, decode_files
from tensordict.core import ragged
from tensordict.core.extras import require
from tensordict.core.keys import Path
from tensordict.io.remote.urls import is_url


def container_of_dataset(dataset: Any, options: TableOptions, decode: Decode) -> Any:
    """Make a container of a data set. It shares memory unless rows were selected or reordered.

    Raises:
        TypeError: the object is not a data set.
    """
    features = getattr(dataset, "features", None)
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__") or features is None:
        raise TypeError(
            f"from_hf reads a datasets.Dataset or a DatasetDict, got {type(dataset).__name__}: for a streamed data "
            "set, Dataset.from_list(list(dataset.take(1000))) makes a Dataset of the first rows"
        )
    table = dataset.with_format("arrow")[:]
    return container_of_rows(table, features, list_shapes(table, features), options, decode)


def iterate_dataset(dataset: Any, decode: Decode) -> Iterator[Any]:
    """Yield the rows of a data set, which may be streamed, some at a time.

    Raises:
        TypeError: the object is not a data set, or a stream of rows of unknown types.
    """
    features = getattr(dataset, "features", None)
    if not hasattr(dataset, "with_format") or features is None:
        raise TypeError(
            f"a data set of Hugging Face is a datasets.Dataset, or an IterableDataset with features, got "
            f"{type(dataset).__name__}: for a stream without them, dataset.cast(features) declares them"
        )
    # A stream does not tell the lengths of its lists, so they stay ragged.
    shapes = list_shapes(dataset.data.table if hasattr(dataset, "data") else None, features)
    options = TableOptions(metadata=False)
    rows = DECODED_ROWS if decode and any(map(_is_image, features.values())) else ROWS
    for table in dataset.with_format("arrow").iter(rows):
        yield container_of_rows(table, features, shapes, options, decode)


def list_shapes(table: Any, features: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of rows in columns of lists: as declared, or if all rows of a table have the same one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, feature in features.items():
        shape = getattr(feature, "shape", None)
        if shape and None not in shape:
            shapes[name] = tuple(shape)
        elif table is not None and name in table.column_names and (common := _find_shape(table.column(name))):
            shapes[name] = common
    return shapes


def _find_shape(column: Any) -> tuple[int, ...]:
    """Return the shape of rows of lists that all have one length; `()` if there is none."""
    pa, compute = require("pyarrow", "hf"), require("pyarrow.compute", "hf")
    if isinstance(column.type, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    shape: list[int] = []
    while is_list(column.type):
        if column.null_count or not len(column):
            return ()
        lengths = compute.min_max(compute.list_value_length(column))
        shape.append(lengths["min"].as_py())
        if lengths["max"].as_py() != shape[-1] or not shape[-1]:
            return ()
        column = compute.list_flatten(column)
    types, kind = pa.types, column.type
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return tuple(shape) if is_number and not column.null_count else ()


def container_of_rows(
    table: Any, features: Any, shapes: Mapping[str, tuple[int, ...]], options: TableOptions, decode: Decode
) -> Any:
    """Make a container of a table whose columns have features of Hugging Face.

    Args:
        shapes: the shapes of rows in columns of lists; see `list_shapes`.
        decode: decode images. Their files are ragged leaves of uint8 otherwise.
    """
    pa, compute = require("pyarrow", "hf"), require("pyarrow.compute", "hf")
    notes: dict[Path, dict[str, Any]] = {}
    images: list[Path] = []
    for position, (name, path) in enumerate(zip(table.column_names, paths_of(table.column_names, options.separator))):
        column, feature = table.column(name), features[name]
        names = getattr(feature, "names", None)
        if _is_image(feature):
            images.append(path)
            column = _join_files(pa, column, name)
        elif names and pa.types.is_integer(column.type):
            if compute.any(compute.less(column, 0)).as_py():
                # Hugging Face writes -1 for a missing label.
                column = compute.if_else(compute.less(column, 0), None, column)
                notes[(name,)] = {"missing": True}
            codes, texts = column.cast(pa.int64()), pa.array(names)
            chunks = [pa.DictionaryArray.from_arrays(chunk, texts) for chunk in codes.chunks]
            column = pa.chunked_array(chunks, pa.dictionary(pa.int64(), pa.string()))
        else:
            continue
        table = table.set_column(position, name, column)
    table = table.replace_schema_metadata({METADATA: TableStructure(notes=notes).to_json()})
    container = container_of_table(table, replace(options, shapes={(name,): shapes[name] for name in shapes}))
    for path in images if decode else ():
        rows = ragged.unbind(container.get(path), 0)
        container.set(path, decode_files(rows, decode, path).to(container.device))
    return container


def _is_image(feature: Any) -> bool:
    return getattr(feature, "dtype", None) == "PIL.Image.Image"


def _join_files(pa: Any, column: Any, name: str) -> Any:
    """Return the contents of image files as lists of bytes, over the memory of the column if it has them."""
    chunks = []
    for chunk in column.chunks:
        if pa.types.is_struct(chunk.type):
            fields = {field.name: part for field, part in zip(chunk.type, chunk.flatten())}
            chunk = fields["bytes"]
            if chunk.null_count:
                # A row may have the path of a file instead, which the library of Hugging Face would open too.
                rows = zip(chunk.to_pylist(), fields["path"].to_pylist())
                chunk = pa.array([_read_file(path, name) if row is None else row for row, path in rows], pa.binary())
        wide = pa.types.is_large_binary(chunk.type)
        valid, offsets, data = chunk.cast(pa.large_binary() if wide else pa.binary()).buffers()
        values = pa.Array.from_buffers(pa.uint8(), 0 if data is None else data.size, [None, data])
        kind = pa.large_list(pa.uint8()) if wide else pa.list_(pa.uint8())
        chunks.append(pa.Array.from_buffers(kind, len(chunk), [valid, offsets], offset=chunk.offset, children=[values]))
    return pa.chunked_array(chunks, chunks[0].type if chunks else pa.list_(pa.uint8()))


def _read_file(path: str | None, name: str) -> bytes | None:
    if path is None:
        return None
    if is_url(path):
        raise ValueError(f"column {name!r} has the image {path!r} by its URL: download the data set first")
    with open(path, "rb") as file:
        return file.read()


def make_dataset(table: Any) -> Any:
    """Make a data set that shares the memory of a table."""
    datasets, pa = require("datasets", "hf"), require("pyarrow", "hf")
    labels: dict[str, list[str]] = {}
    for position, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type) and pa.types.is_string(field.type.value_type):
            column = table.column(position).unify_dictionaries()
            labels[field.name] = column.chunk(0).dictionary.to_pylist() if column.num_chunks else []
            codes = pa.chunked_array([chunk.indices.cast(pa.int64()) for chunk in column.chunks], pa.int64())
            codes = codes.fill_null(-1)
            table = table.set_column(position, field.name, codes)
    memory = datasets.table.InMemoryTable(table.replace_schema_metadata())
    # Without a fingerprint, `datasets` computes one from a pickle of the table: four more copies of the data.
    made = datasets.Dataset(memory, fingerprint=secrets.token_hex(8))
    for name, names in labels.items():
        made.info.features[name] = datasets.ClassLabel(names=names)
    return made
