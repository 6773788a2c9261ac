"""The columns of pandas data frames and the values of series, for `from_any` and constructors.

This module does not import pandas, which need not be installed.
"""

from __future__ import annotations

import sys
from typing import Any

from tensordict.convert.columns import paths_of


def columns_of(obj: object) -> dict[str, Any] | None:
    """Return the columns of a data frame by name, converted by :func:`values_of`; `None` for any other object.

    Raises:
        TypeError: the name of a column is not a string.
        ValueError: two columns have the same name.
    """
    # If there is a data frame, pandas has been imported.
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(obj, getattr(pandas, "DataFrame", ())):
        return None
    frame: Any = obj
    names = list(frame.columns)
    paths_of(names, None)
    return {name: values_of(frame.iloc[:, position]) for position, name in enumerate(names)}


def values_of(obj: object) -> Any:
    """Return the values of a series: numbers as an array, which shares writable memory, and others as a list.

    Any other object is returned unchanged.
    """
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(obj, getattr(pandas, "Series", ())):
        return obj
    series: Any = obj
    values = series.to_numpy()
    if values.dtype.kind not in "biufc":
        return series.tolist()
    # pandas marks memory that several frames share as read-only.
    return values if values.flags.writeable else values.copy()
