"""Checks of sizes, shapes, names and devices that readers of all formats take from untrusted files."""

from __future__ import annotations

import math
from typing import Any

import torch

_MAX_DIMS = 64
# All dtypes by their names, such as "torch.float32".
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def ints(value: object, what: str, least: int = 0) -> tuple[int, ...]:
    """Return the sizes of dims as a tuple; -1 stands for a size that differs, if `least` is -1.

    Raises:
        ValueError: `value` is not a list of sizes. `what` is the subject of the message.
    """
    if type(value) is not list or len(value) > _MAX_DIMS:
        raise ValueError(f"{what} is {value!r:.80} and no list of ints")
    # This runs for each leaf: `all` with a generator would take four times as long.
    for size in value:
        if type(size) is not int or not least <= size < 2**63:
            allowed = "non-negative ints" if least == 0 else f"ints of at least {least}"
            raise ValueError(f"{what} is {value!r:.80} and no list of {allowed}")
    return tuple(value)


def sizes(value: object, what: str, least: int = 0) -> torch.Size:
    """Return a batch size; see :func:`ints`."""
    return torch.Size(ints(value, what, least))


def shape(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        ValueError: `value` is not a shape, or torch cannot create such a large tensor.
    """
    found = ints(value, "its shape")
    # Torch counts bytes and strides in 63 bits, also for tensors without elements.
    if math.prod(filter(None, found)) >= 2**58:
        raise ValueError(f"its shape {value!r:.80} is larger than that of a tensor can be")
    return found


def names(value: Any, ndim: int | None = None) -> list[str | None] | None:
    """Return the names of `ndim` dims, or `None`.

    Raises:
        ValueError: `value` is not a list of that many names.
    """
    if value is None:
        return None
    fits = type(value) is list and all(name is None or type(name) is str for name in value)
    if not fits or (ndim is not None and len(value) != ndim):
        raise ValueError(f"its dim names {value!r:.80} do not fit" + ("" if ndim is None else f" {ndim} batch dims"))
    return list(value)


def dim(value: object, ndim: int = _MAX_DIMS) -> int:
    """Return the number of one of `ndim` dims.

    Raises:
        ValueError: `value` is not such a number.
    """
    if type(value) is not int or not 0 <= value < ndim:
        raise ValueError(f"its 'stack_dim' is {value!r:.80}, and not the number of one of {ndim} dims")
    return value


def device(name: object) -> torch.device | None:
    """Return the device of a loaded container. Files are loaded to the CPU, so any other known device becomes "cpu".

    Raises:
        ValueError: torch does not know the device.
    """
    if name is None:
        return None
    try:
        found = torch.device(name if type(name) is str else "")
    except RuntimeError:
        raise ValueError(f"its device is {name!r:.80}, which is unknown") from None
    return found if found.type == "cpu" else torch.device("cpu")
