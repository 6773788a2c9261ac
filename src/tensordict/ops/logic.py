"""Comparison and logic of values that are no tensors: as Python computes them, element by element."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensordict import registry
from tensordict.contract import Contract
from tensordict.errors import ShapeError
from tensordict.holders import same_value
from tensordict.ops.comparison import Comparison
from tensordict.shapes import nested_lists


def or_with_right(left: Any, right: Any) -> Any:
    """`right | left`, which for dicts is not `left | right`."""
    return right | left


# What operators on containers do to values; those that ask for an order leave them as they are.
_ON_VALUES: dict[Any, Callable[[Any, Any], Any]] = {
    torch.eq: same_value,
    torch.ne: lambda one, other: not same_value(one, other),
    torch.bitwise_and: operator.and_,
    torch.bitwise_or: operator.or_,
    torch.bitwise_xor: operator.xor,
    or_with_right: or_with_right,
}


class Operators(Comparison):
    """Comparison and logic of values: as Python computes them, element by element."""

    def _flat_values(self) -> list[Any]:
        """The value of every element of the batch, the last dim changing fastest."""
        raise NotImplementedError

    def _compared_as(self, other: Any, op: Any) -> Any:
        if isinstance(other, (Tensor, Contract)):
            return super()._compared_as(other, op)
        if op in (torch.eq, torch.ne) and not isinstance(other, numbers.Number):
            return NotImplemented  # A container equals no such thing.
        return self._compared_with_value(other, op)

    def _compared_with_value(self, other: Any, op: Any) -> Any:
        return self._compared_with_container(registry.lookup("NonTensorData")._of(other, self._batch_size), op)

    def _compared_with_container(self, other: Any, op: Any) -> Any:
        """A tensor of bools when all results are bools, a holder of the results otherwise.

        Raises:
            TypeError: Python does not know the operator for these values.
            ShapeError: the other side is no holder, or of another batch size.
        """
        fn = _ON_VALUES.get(op)
        if fn is None:
            return self.copy()  # type: ignore[attr-defined]
        size, device = self._batch_size, self._device
        if not other._is_non_tensor or size != other._batch_size:
            raise ShapeError(
                f"values that are no tensors can be compared with such of the same batch size: one side has "
                f"{list(size)}, the other is a {type(other).__name__} of {list(other._batch_size)}"
            )
        if hasattr(self, "_value") and hasattr(other, "_value"):
            result = fn(self._value, other._value)
            if type(result) is bool:
                return torch.full(size, result, device=device)
            return self._of(result, size, device, self._names)  # type: ignore[attr-defined]
        results = [fn(*pair) for pair in zip(self._flat_values(), other._flat_values(), strict=True)]
        if all(type(result) is bool for result in results):
            return torch.tensor(results, dtype=torch.bool, device=device).reshape(size)
        return registry.lookup("NonTensorStack")._of_lists(nested_lists(results, size), size, 0, device)

    def __ror__(self, other: Any) -> Any:
        return self._compared_with_value(other, or_with_right)

    # A value has no memory to write into: the name is bound to the result.
    __iand__ = Comparison.__and__
    __ior__ = Comparison.__or__
    __ixor__ = Comparison.__xor__
