"""Data sets of Hugging Face (`datasets`), which are tables of Arrow."""

from __future__ import annotations

from typing import Any

from tensordict.convert.arrow import METADATA
from tensordict.convert.columns import TableStructure
from tensordict.core.extras import require
from tensordict.core.keys import Path


def table_of_dataset(dataset: Any) -> Any:
    """The table of a data set, over its memory where its rows are all of those in the order in which they are kept.

    Raises:
        TypeError: it is none.
    """
    features = getattr(dataset, "features", None)
    if not hasattr(dataset, "with_format") or not hasattr(dataset, "__len__") or features is None:
        raise TypeError(
            f"from_hf reads a datasets.Dataset or a DatasetDict, got {type(dataset).__name__}: of one that is streamed "
            "Dataset.from_list(list(dataset.take(1000))) makes one of the first rows"
        )
    pa, compute = require("pyarrow", "hf"), require("pyarrow.compute", "hf")
    table = dataset.with_format("arrow")[:]
    notes: dict[Path, dict[str, Any]] = {}
    for position, name in enumerate(table.column_names):
        column = table.column(name)
        names = getattr(features[name], "names", None)
        if isinstance(column.type, pa.BaseExtensionType):
            shape = getattr(features[name], "shape", None)
            column = _fixed(pa, column, shape) if shape and None not in shape else _storage(pa, column)
        elif names and pa.types.is_integer(column.type):
            if compute.any(compute.less(column, 0)).as_py():
                # -1 is no label.
                column = compute.if_else(compute.less(column, 0), None, column)
                notes[(name,)] = {"missing": True}
            chunks = [
                pa.DictionaryArray.from_arrays(chunk.cast(pa.int64()), pa.array(names)) for chunk in column.chunks
            ]
            column = pa.chunked_array(chunks, pa.dictionary(pa.int64(), pa.string()))
        else:
            continue
        table = table.set_column(position, name, column)
    return table.replace_schema_metadata({METADATA: TableStructure(notes=notes).text()})


def _storage(pa: Any, column: Any) -> Any:
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


def _fixed(pa: Any, column: Any, shape: tuple[int, ...]) -> Any:
    """A column of arrays of one shape, which are kept as lists of any lengths, as lists of these lengths."""
    kind = _storage(pa, column).type
    while pa.types.is_nested(kind):
        kind = kind.value_type
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    chunks = []
    for chunk in column.chunks:
        flat = chunk.storage
        if flat.null_count:
            return _storage(pa, column)
        while pa.types.is_nested(flat.type):
            flat = flat.flatten()
        for size in reversed(shape):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        chunks.append(flat)
    return pa.chunked_array(chunks, kind)


def dataset_of_table(table: Any) -> Any:
    """A data set over the memory of a table."""
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
