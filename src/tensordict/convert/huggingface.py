"""Conversion between Arrow tables and data sets of Hugging Face (`datasets`), for `from_hf` and `to_hf`."""

from __future__ import annotations

from typing import Any

from tensordict.convert.arrow import METADATA
from tensordict.convert.columns import TableStructure
from tensordict.core.extras import require
from tensordict.core.keys import Path


def table_of_dataset(dataset: Any) -> Any:
    """Return the Arrow table of a data set. It shares memory unless rows were selected or reordered.

    Raises:
        TypeError: the object is not a data set.
    """
    features = getattr(dataset, "features", None)
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__") or features is None:
        raise TypeError(
            f"from_hf reads a datasets.Dataset or a DatasetDict, got {type(dataset).__name__}: for a streamed data "
            "set, Dataset.from_list(list(dataset.take(1000))) makes a Dataset of the first rows"
        )
    pa, compute = require("pyarrow", "hf"), require("pyarrow.compute", "hf")
    table = dataset.with_format("arrow")[:]
    notes: dict[Path, dict[str, Any]] = {}
    for position, name in enumerate(table.column_names):
        column = table.column(name)
        names = getattr(features[name], "names", None)
        if isinstance(column.type, pa.BaseExtensionType):
            shape = getattr(features[name], "shape", None)
            column = (
                _to_fixed_lists(pa, column, shape) if shape and None not in shape else _unwrap_extension(pa, column)
            )
        elif names and pa.types.is_integer(column.type):
            if compute.any(compute.less(column, 0)).as_py():
                # Hugging Face writes -1 for a missing label.
                column = compute.if_else(compute.less(column, 0), None, column)
                notes[(name,)] = {"missing": True}
            chunks = [
                pa.DictionaryArray.from_arrays(chunk.cast(pa.int64()), pa.array(names)) for chunk in column.chunks
            ]
            column = pa.chunked_array(chunks, pa.dictionary(pa.int64(), pa.string()))
        else:
            continue
        table = table.set_column(position, name, column)
    return table.replace_schema_metadata({METADATA: TableStructure(notes=notes).to_json()})


def _unwrap_extension(pa: Any, column: Any) -> Any:
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


def _to_fixed_lists(pa: Any, column: Any, shape: tuple[int, ...]) -> Any:
    """Convert a column of arrays of one shape from variable-length lists to lists of fixed sizes."""
    kind = _unwrap_extension(pa, column).type
    while pa.types.is_nested(kind):
        kind = kind.value_type
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    chunks = []
    for chunk in column.chunks:
        flat = chunk.storage
        if flat.null_count:
            return _unwrap_extension(pa, column)
        while pa.types.is_nested(flat.type):
            flat = flat.flatten()
        for size in reversed(shape):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        chunks.append(flat)
    return pa.chunked_array(chunks, kind)


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
    made = datasets.Dataset(datasets.table.InMemoryTable(table.replace_schema_metadata()))
    for name, names in labels.items():
        made.info.features[name] = datasets.ClassLabel(names=names)
    return made
