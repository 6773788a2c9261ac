"""When two values that may be no tensors are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal; arrays, tensors and containers are when all of their elements are."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    try:
        result = one == other
        return result if type(result) is bool else bool(getattr(result, "all", lambda: result)())
    except (TypeError, ValueError, RuntimeError, KeyError):  # guarded: the values are compared
        # What cannot be compared, such as arrays of different shapes, is not the same.
        return False
