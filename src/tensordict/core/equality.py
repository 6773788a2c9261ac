"""Compare two values that need not be tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal. Arrays, tensors and containers are equal if all of their elements are."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    try:
        result = one == other
        return result if type(result) is bool else bool(getattr(result, "all", lambda: result)())
    except (TypeError, ValueError, RuntimeError, KeyError):  # guarded: the values are compared
        # Values that cannot be compared, such as arrays of different shapes, are different.
        return False
