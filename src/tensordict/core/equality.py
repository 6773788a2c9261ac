"""Compare two values that need not be tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TextMask(Tensor):
    """The mask that a list of texts gives when it is compared with one text.

    `bool(mask)` is False, and True for the operator `!=`, because programs compare such a list as a whole: a list never
    equals a text, and `texts in ("a", ["a", "b"])` relies on it. The results of all operations are plain tensors.
    """

    __torch_function__ = torch.nn.Parameter.__torch_function__  # makes plain tensors, at no cost
    _truth = False

    def __bool__(self) -> bool:
        return self._truth

    @classmethod
    def of(cls, mask: Tensor, truth: bool) -> Tensor:
        """Make a mask; `truth` is the result of `bool(mask)`."""
        if torch.compiler.is_compiling():
            return mask
        made = mask.as_subclass(cls)
        made._truth = truth
        return made


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are equal. Arrays, tensors and containers are equal if all of their elements are."""
    if one is other:
        return True
    if isinstance(one, list) is not isinstance(other, list) and isinstance(one, str) is not isinstance(other, str):
        return False  # The list of the texts of a container compares with a text by element.
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    try:
        result = one == other
        return result if type(result) is bool else bool(getattr(result, "all", lambda: result)())
    except (TypeError, ValueError, RuntimeError, KeyError):  # guarded: the values are compared
        # Values that cannot be compared, such as arrays of different shapes, are different.
        return False
