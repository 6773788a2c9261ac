"""The mixin of operators on holders of non-tensor values, which apply Python's operators to each value."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract, named_error
from tensordict.core.equality import TextMask, same_value
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import path_of
from tensordict.core.shapes import nested_lists
from tensordict.ops.entries.write_plans import Copy, WritePlan
from tensordict.ops.math.comparison import Comparison


def or_with_right(left: Any, right: Any) -> Any:
    """Return `right | left`. For dicts it differs from `left | right`."""
    return right | left


# The operators that apply to non-tensor values. All others, such as `<`, leave values unchanged.
_ON_VALUES: dict[Any, Callable[[Any, Any], Any]] = {
    torch.eq: same_value,
    torch.ne: lambda one, other: not same_value(one, other),
    torch.bitwise_and: operator.and_,
    torch.bitwise_or: operator.or_,
    torch.bitwise_xor: operator.xor,
    or_with_right: or_with_right,
}


def plan_operator(container: Any, other: Contract, op: object) -> WritePlan:
    """Plan to replace the values of a container by the results of an operator with the values in `other`.

    Values that `other` lacks do not change.

    Raises:
        TypeError: the values do not support the operator.
        ShapeError: the batch sizes of two holders differ.
    """
    fresh: dict[Any, Any] = {}
    for key, holder in container.non_tensor_items(include_nested=True):
        theirs: Any = other._peek(path_of(key))
        if isinstance(theirs, Contract) and theirs._is_non_tensor:
            try:
                if not (hasattr(holder, "_value") and hasattr(theirs, "_value")):
                    _check_sizes(holder, theirs)
                fresh[key] = holder._combine(theirs, _ON_VALUES[op])
            except (TypeError, ShapeError) as error:
                raise named_error(error, path_of(key)) from None
    write = Copy()
    container._plan_write(write, fresh)
    return write.plan


def _check_sizes(one: Any, other: Contract) -> None:
    if not other._is_non_tensor or one._batch_size != other._batch_size:
        raise ShapeError(
            "a non-tensor value can be compared only with non-tensor values of the same batch size: one side has "
            f"{list(one._batch_size)}, the other is a {type(other).__name__} of {list(other._batch_size)}"
        )


def _make_bools(values: list[Any], size: torch.Size, device: torch.device | None) -> Tensor:
    return torch.tensor(values, dtype=torch.bool, device=device).reshape(size)


class ValueOperators(Comparison):
    """Comparison and logic of non-tensor values, by Python's operators on each value."""

    def _flat_values(self) -> list[Any]:
        """Return the value of every element of the batch, in row-major order."""
        raise NotImplementedError

    def _compare_as(self, other: Any, op: Any) -> Any:
        if isinstance(other, (Tensor, Contract)):
            return super()._compare_as(other, op)
        if op in (torch.eq, torch.ne) and not isinstance(other, numbers.Number):
            if isinstance(other, str) and not hasattr(self, "_value"):
                return TextMask.of(self._compare_with_value(other, op), op is torch.ne)
            return NotImplemented  # Python then compares identities.
        return self._compare_with_value(other, op)

    def _compare_with_value(self, other: object, op: object) -> Any:
        return self._compare_with_container(makers.value(other, self._batch_size), op)

    def _compare_with_container(self, other: Any, op: object) -> Any:
        """Apply an operator to the values of two holders.

        Returns:
            a tensor if all results are bools, and a holder of the results otherwise.

        Raises:
            TypeError: the values do not support the operator.
            ShapeError: the other side is not a holder of the same batch size.
        """
        fn = _ON_VALUES.get(op)
        if fn is None:
            return self.copy()
        size, device = self._batch_size, self._device
        if size and hasattr(other, "_value") and not other._batch_size:
            other = makers.value(other._value, size)  # One value, for example of a dict, stands for the whole batch.
        _check_sizes(self, other)
        result = self._combine(other, fn)
        one = hasattr(result, "_value")
        results = [result._value] if one else result._flat_values()
        if not all(type(value) is bool for value in results):
            return result
        return torch.full(size, *results, device=device) if one else _make_bools(results, size, device)

    def _combine(self, other: Any, fn: Callable[[Any, Any], Any]) -> Any:
        """Call `fn` on the values of two holders of equal batch size. Returns a holder of the results."""
        size, device = self._batch_size, self._device
        if hasattr(self, "_value") and hasattr(other, "_value"):
            return self._of(fn(self._value, other._value), size, device, self._names)  # type: ignore[attr-defined]
        results = [fn(*pair) for pair in zip(self._flat_values(), other._flat_values(), strict=True)]
        return makers.values(nested_lists(results, size), size, 0, device)

    def __ror__(self, other: object) -> Any:
        return self._compare_with_value(other, or_with_right)

    # Values cannot be written in place, so `a &= b` binds a new holder to `a`.
    __iand__ = Comparison.__and__
    __ior__ = Comparison.__or__
    __ixor__ = Comparison.__xor__
