"""The parts of a specification as a file says them, which may be anything: each is checked here, for every format."""

from __future__ import annotations

import math
from typing import Any

import torch

_MAX_DIMS = 64


def ints(value: object, what: str, least: int = 0) -> tuple[int, ...]:
    """The sizes of dims; -1 stands for one that differs, where `least` allows it.

    Raises:
        ValueError: they are none, `what` saying of what.
    """
    if type(value) is not list or len(value) > _MAX_DIMS:
        raise ValueError(f"{what} is {value!r:.80} and no list of ints")
    # A loop, as it runs for each leaf: `all` with a generator takes four times as long.
    for size in value:
        if type(size) is not int or not least <= size < 2**63:
            allowed = "non-negative ints" if least == 0 else f"ints of at least {least}"
            raise ValueError(f"{what} is {value!r:.80} and no list of {allowed}")
    return tuple(value)


def sizes(value: object, what: str, least: int = 0) -> torch.Size:
    """As :func:`ints`, as a batch size."""
    return torch.Size(ints(value, what, least))


def shape(value: object) -> tuple[int, ...]:
    """The shape of a tensor, which torch must be able to count.

    Raises:
        ValueError: it is none.
    """
    found = ints(value, "its shape")
    # Torch counts in 63 bits what a shape takes, and the strides of tensors without elements too.
    if math.prod(filter(None, found)) >= 2**58:
        raise ValueError(f"its shape {value!r:.80} is larger than that of a tensor can be")
    return found


def names(value: Any, ndim: int | None = None) -> list[str | None] | None:
    """The names of that many dims, or none at all; a `ValueError` when they are no names."""
    if value is None:
        return None
    fits = type(value) is list and all(name is None or type(name) is str for name in value)
    if not fits or (ndim is not None and len(value) != ndim):
        raise ValueError(f"its dim names {value!r:.80} do not fit" + ("" if ndim is None else f" {ndim} batch dims"))
    return list(value)


def dim(value: object, ndim: int = _MAX_DIMS) -> int:
    """The number of one of so many dims; a `ValueError` when it is none."""
    if type(value) is not int or not 0 <= value < ndim:
        raise ValueError(f"its 'stack_dim' is {value!r:.80}, which is the number of none of {ndim} dims")
    return value


def device(name: object) -> torch.device | None:
    """The device of a loaded container: its tensors come from a file to the CPU, whatever device they were on.

    Raises:
        ValueError: there is no such device.
    """
    if name is None:
        return None
    try:
        found = torch.device(name if type(name) is str else "")
    except RuntimeError:
        raise ValueError(f"its device is {name!r:.80}, which is unknown") from None
    return found if found.type == "cpu" else torch.device("cpu")
