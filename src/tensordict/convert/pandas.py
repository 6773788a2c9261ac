"""Conversion between containers and pandas data frames, for `from_pandas` and `to_pandas`. Columns are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.convert import arrow
from tensordict.convert.columns import (
    TENSOR,
    Nulls,
    TableColumn,
    TableOptions,
    columns_of,
    container_of,
    paths_of,
    places_of,
)
from tensordict.core.extras import require
from tensordict.core.keys import joined

# The dtypes that pandas supports and Arrow does not.
_COMPLEX = (torch.complex64, torch.complex128)


def container_of_frame(frame: Any, reading: TableOptions) -> Any:
    """Make a container from a data frame.

    Raises:
        TypeError: the object is not a data frame.
        ValueError: a column has missing values and the options do not allow them.
    """
    pandas = require("pandas", "pandas")
    if not isinstance(frame, pandas.DataFrame):
        raise TypeError(f"from_pandas reads a data frame of pandas, got {type(frame).__name__}")
    names = list(frame.columns)
    reader = arrow.ColumnReader(reading, {}, len(frame))
    for position, (name, path) in enumerate(zip(names, paths_of(names, reading.separator))):
        series = frame.iloc[:, position]
        kind = getattr(series.dtype, "kind", "O")
        if kind in "biufc" and not pandas.api.types.is_extension_array_dtype(series.dtype):
            values = series.to_numpy()
            if values.dtype.itemsize > (16 if kind == "c" else 8):
                raise ValueError(
                    f"column {name!r} is of {values.dtype}, which torch lacks: frame.astype({{{name!r}: 'float64'}})"
                )
            dtype = torch.from_numpy(np.empty(0, values.dtype.newbyteorder("="))).dtype
            # Copies into memory of torch. New memory of NumPy takes up to four times as long, due to page faults.
            leaf = torch.empty(len(values), dtype=dtype, device="cpu")
            leaf.numpy()[:] = values
            reader.found.append(TableColumn(path, leaf))
        elif series.dtype == object:
            reader.found.append(TableColumn(path, series.tolist()))
        else:
            reader.read_column(path, (name,), _to_arrow(series, name))
    return container_of(reader.found, len(frame), None, reading)


def _to_arrow(series: Any, name: str) -> Any:
    pa = arrow.pyarrow()
    try:
        array = pa.array(series, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ValueError(
            f"column {name!r} of {series.dtype} cannot become an entry: convert it with frame.astype, or leave it out "
            f"({error})"
        ) from None
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def frame_of(container: Any, separator: str | None, nulls: Nulls = None) -> Any:
    """Make a data frame from a container.

    Raises:
        UnsupportedEntryError: an entry has no form as a column.
        ValueError: the container has nested containers and no separator is given, or two entries would be one column.
    """
    pandas = require("pandas", "pandas")
    columns, rows, _ = columns_of(container, nulls=nulls)
    for column in columns:
        if separator is None and len(column.path) > 1:
            raise ValueError(
                f"entry {joined(column.path)!r} is nested, and a data frame has no nested columns: pass a separator, "
                "as in to_pandas(separator='.'), to join its names"
            )
    places = places_of(columns, separator)
    content = {place[0]: _make_series(pandas, column) for place, column in zip(places, columns)}
    return pandas.DataFrame(content, index=pandas.RangeIndex(rows))


def _make_series(pandas: Any, column: TableColumn) -> Any:
    """Convert a column to an array of numbers or a series for a data frame."""
    leaf = column.values
    if column.type == TENSOR:
        column.type = None  # Nested lists show the shape; Arrow's tensor type would become flat lists.
    is_plain = isinstance(leaf, Tensor) and column.type is None and column.categories is None
    if is_plain and column.valid is None and not leaf.is_nested:
        leaf = leaf.detach()
        if leaf.dim() == 1 and (leaf.dtype not in arrow.WIDER or leaf.dtype in _COMPLEX):
            return leaf.numpy(force=True)
    elif not isinstance(leaf, Tensor) and set(map(type, leaf)) - {str, type(None)}:
        values = pandas.Series([None] * len(leaf), dtype=object)
        values[:] = leaf
        return values
    array = arrow.array_of(column)[0]
    types = arrow.pyarrow().types
    kind = array.type
    # pandas itself has only untyped objects for dates, times, lists and decimals, and makes floats of integers with
    # missing values. So keep the Arrow array for these.
    is_clock = types.is_date(kind) or types.is_time(kind)
    if (is_plain and column.valid is not None) or is_clock or types.is_nested(kind) or types.is_decimal(kind):
        return pandas.Series(pandas.arrays.ArrowExtensionArray(array))
    return array.to_pandas()
