"""Data frames of Polars, by way of Arrow, whose memory they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensordict.convert import arrow
from tensordict.convert.columns import Fill, Nulls, TableOptions
from tensordict.core import registry
from tensordict.core.extras import require

if TYPE_CHECKING:
    from polars import DataFrame

    from tensordict.containers.dense import TensorDict


def from_polars(
    dataframe: object,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: object = None,
    batch_size: object = None,
    separator: str | None = None,
    dtype: torch.dtype | None = None,
    nulls: Nulls = None,
    fill: Fill = None,
    metadata: bool = True,
) -> TensorDict:
    """A `TensorDict` of the columns of a data frame of Polars; see :meth:`TensorDict.from_polars`.

    Example:
        >>> import polars
        >>> from tensordict import from_polars
        >>> from_polars(polars.DataFrame({"a": [1, 2]}))["a"]
        tensor([1, 2])
    """
    return registry.lookup("TensorDict").from_polars(
        dataframe,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        device=device,
        batch_size=batch_size,
        separator=separator,
        dtype=dtype,
        nulls=nulls,
        fill=fill,
        metadata=metadata,
    )


def container_of_frame(frame: Any, reading: TableOptions) -> Any:
    """The container of a data frame.

    Raises:
        TypeError: it is none.
        ValueError: as `arrow.container_of_table` raises it.
    """
    polars = require("polars", "polars")
    if not isinstance(frame, polars.DataFrame):
        advice = ": collect() makes a frame of it" if isinstance(frame, polars.LazyFrame) else ""
        raise TypeError(f"from_polars reads a data frame of Polars, got {type(frame).__name__}{advice}")
    return arrow.container_of_table(frame.to_arrow(), reading)


def frame_of(container: Any, separator: str | None) -> DataFrame:
    """The data frame of a container.

    Raises:
        UnsupportedEntryError, ValueError: as `arrow.table_of` raises them.
    """
    frame: DataFrame = require("polars", "polars").from_arrow(arrow.table_of(container, separator))
    return frame
