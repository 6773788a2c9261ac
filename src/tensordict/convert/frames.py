"""Data frames of pandas as columns; pandas itself is not imported, and need not be installed."""

from __future__ import annotations

import sys
from typing import Any


def columns_of(obj: object) -> dict[str, Any] | None:
    """The columns of a data frame by their names, as :func:`values_of` gives each; `None` for anything else.

    Raises:
        TypeError: a column has no text for a name.
        ValueError: two columns have one name.
    """
    # Whoever has a frame has imported pandas.
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(obj, getattr(pandas, "DataFrame", ())):
        return None
    frame: Any = obj
    columns: dict[str, Any] = {}
    for position, name in enumerate(frame.columns):
        if not isinstance(name, str):
            raise TypeError(
                f"column {position} of the data frame is called {name!r}, and keys are strings: rename the columns "
                "first, as in frame.rename(columns=str)"
            )
        if name in columns:
            raise ValueError(f"the data frame has two columns called {name!r}: rename one of them first")
        columns[name] = values_of(frame.iloc[:, position])
    return columns


def values_of(obj: object) -> Any:
    """The values of a series: an array of numbers, over its memory where that may be written, or a list of anything
    else; any other object as it is."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(obj, getattr(pandas, "Series", ())):
        return obj
    series: Any = obj
    values = series.to_numpy()
    if values.dtype.kind not in "biufc":
        return series.tolist()
    # What the frame shares with others it does not let be written.
    return values if values.flags.writeable else values.copy()
