"""Conversion between containers and Polars data frames through Arrow tables, which share their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensordict.convert import arrow
from tensordict.convert.columns import Nulls, TableOptions
from tensordict.core.extras import require

if TYPE_CHECKING:
    from polars import DataFrame


# Polars converts these dtypes to Arrow as memory addresses, or not at all.
_WITHOUT_ARROW = ("Object", "Int128", "UInt128")


def container_of_frame(frame: Any, reading: TableOptions) -> Any:
    """Make a container from a data frame.

    Raises:
        TypeError: the object is not a data frame.
        ValueError: Arrow has no type for a column, or `arrow.container_of_table` raises it.
    """
    polars = require("polars", "polars")
    if not isinstance(frame, polars.DataFrame):
        advice = ": collect() makes a frame of it" if isinstance(frame, polars.LazyFrame) else ""
        raise TypeError(f"from_polars reads a data frame of Polars, got {type(frame).__name__}{advice}")
    for name, dtype in frame.schema.items():
        if str(dtype) in _WITHOUT_ARROW:
            raise ValueError(f"column {name!r} is of {dtype}, which Arrow lacks: cast it, or leave it out with drop")
    return arrow.container_of_table(frame.to_arrow(), reading)


def frame_of(container: Any, separator: str | None, nulls: Nulls = None) -> DataFrame:
    """Make a data frame from a container.

    Raises:
        UnsupportedEntryError, ValueError: raised by `arrow.table_of`.
    """
    frame: DataFrame = require("polars", "polars").from_arrow(arrow.table_of(container, separator, nulls=nulls))
    return frame
