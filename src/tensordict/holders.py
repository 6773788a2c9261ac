"""Values that are no tensors: when two are the same, and the pytree form of the containers that hold them."""

from __future__ import annotations

from dataclasses import dataclass
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
    except (TypeError, ValueError, RuntimeError, KeyError):
        # What cannot be compared, such as arrays of different shapes, is not the same.
        return False


@dataclass(frozen=True, eq=False)
class HolderContext:
    """What a holder is: all of it, since it has no leaves."""

    cls: type[Any]
    value: Any
    batch_size: tuple[int, ...]
    names: tuple[str | None, ...] | None
    device: torch.device | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HolderContext) or not same_value(self.value, other.value):
            return False
        mine, theirs = [(c.cls, c.batch_size, c.names, c.device) for c in (self, other)]
        return mine == theirs

    def __hash__(self) -> int:
        return hash((self.cls, self.batch_size, self.names))


def flatten_holder(holder: Any) -> tuple[list[Any], HolderContext]:
    names = None if holder._names is None else tuple(holder._names)
    return [], HolderContext(type(holder), holder._value, tuple(holder._batch_size), names, holder._device)


def flatten_holder_with_keys(holder: Any) -> tuple[list[tuple[Any, Any]], HolderContext]:
    return [], flatten_holder(holder)[1]


def unflatten_holder(values: Any, context: HolderContext) -> Any:
    return context.cls._of(context.value, torch.Size(context.batch_size), context.device, context.names)
