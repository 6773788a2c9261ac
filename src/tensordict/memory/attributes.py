"""Attributes of HDF5 objects: texts and numbers that lie in the header of the object itself.

HDF5 keeps strings of variable length in a heap of the file, which it reads without any check: a byte that is changed
there can have it loop or crash. So texts are written with a fixed length, and no attribute of another kind is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensordict.core import extras


def text(holder: object, name: str) -> str | None:
    """The text in an attribute of a group or a dataset; `None` when there is no such attribute.

    Raises:
        ValueError: it is no text of fixed length.
    """
    found = _found(holder, name)
    if found is None:
        return None
    if not isinstance(found, bytes):
        raise ValueError(f"the attribute {name!r} is no text")
    return found.decode()


def numbers(holder: object, name: str) -> list[int] | None:
    """The integers in an attribute, one or more; `None` when there is no such attribute.

    Raises:
        ValueError: they are no integers in a row.
    """
    found = _found(holder, name)
    if found is None:
        return None
    if isinstance(found, bytes) or np.ndim(found) > 1:
        raise ValueError(f"the attribute {name!r} is no row of integers")
    return [int(number) for number in np.atleast_1d(found)]


def put_text(holder: Any, name: str, content: str) -> None:
    """Set an attribute to a text, which has no NUL at its end."""
    raw = content.encode()
    dtype = extras.require("h5py", "h5").string_dtype("utf-8", max(len(raw), 1))
    holder.attrs.create(name, np.array(raw, dtype=dtype), dtype=dtype)


def put_numbers(holder: Any, name: str, content: int | list[int]) -> None:
    """Set an attribute to integers."""
    holder.attrs[name] = np.asarray(content, dtype=np.int64)


def _found(holder: Any, name: str) -> Any:
    library = extras.require("h5py", "h5")
    if name not in holder.attrs:
        return None
    kind = library.h5a.open(holder.id, name.encode()).get_type()
    is_text = isinstance(kind, library.h5t.TypeStringID) and not kind.is_variable_str()
    if not is_text and not isinstance(kind, library.h5t.TypeIntegerID):
        raise ValueError(f"the attribute {name!r} is neither integers nor a text of fixed length")
    return holder.attrs[name]
