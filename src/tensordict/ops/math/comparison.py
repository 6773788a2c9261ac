"""Comparison and logic: element by element, with another container, a tensor or a scalar."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.devices import place_of
from tensordict.core.ragged import REFUSALS
from tensordict.ops.math.pairing import dense_of, spread_over
from tensordict.ops.refusals import has_ragged
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

BinaryOp = Callable[[Any, Any], Any]


class Comparison(Leaves):
    """The comparison and logic operators.

    The right side is another container with the same keys, a mapping, a tensor that broadcasts to the batch
    size (and from there to the feature dims of every leaf), or a scalar. Any other object is equal to no
    container.
    """

    def __eq__(self, other: object) -> Self:  # type: ignore[override]
        """Where the entries are equal, as a container of bools.

        Raises:
            KeyError: the containers do not have the same keys; the odd ones are named.
            RuntimeError: the shapes of an entry do not broadcast; the entry is named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3)}}, [3])
            >>> (td == 1)["a"], (td == td).all()
            (tensor([False,  True, False]), True)
        """
        return self._compared(other, torch.eq)

    def __ne__(self, other: object) -> Self:  # type: ignore[override]
        """Where the entries differ; as `==`."""
        return self._compared(other, torch.ne)

    def __lt__(self, other: object) -> Self:
        """Where the entries are less than those of `other`; as `==`."""
        return self._compared(other, torch.lt)

    def __le__(self, other: object) -> Self:
        """Where the entries are at most those of `other`; as `==`."""
        return self._compared(other, torch.le)

    def __gt__(self, other: object) -> Self:
        """Where the entries are greater than those of `other`; as `==`."""
        return self._compared(other, torch.gt)

    def __ge__(self, other: object) -> Self:
        """Where the entries are at least those of `other`; as `==`."""
        return self._compared(other, torch.ge)

    # Equality is element by element, so it cannot back a hash.
    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: object) -> Self:
        """The bitwise "and" of the entries, which is the logical one of bools; the right side as for `==`."""
        return self._compared(other, torch.bitwise_and)

    def __or__(self, other: object) -> Self:
        """The bitwise "or" of the entries, which is the logical one of bools; the right side as for `==`."""
        return self._compared(other, torch.bitwise_or)

    def __xor__(self, other: object) -> Self:
        """The bitwise "exclusive or" of the entries; the right side as for `==`."""
        return self._compared(other, torch.bitwise_xor)

    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    def __invert__(self) -> Self:
        """The bitwise "not" of the entries, which is the logical one of bools.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> (~TensorDict(a=torch.tensor([True, False])))["a"]
            tensor([False,  True])
        """
        return self._map(operator.invert)

    def __bool__(self) -> bool:
        kind = "tensorclass" if getattr(self, "_is_tensorclass", False) else "tensordict"
        raise RuntimeError(
            f"Converting a {kind} to boolean value is not permitted, since its entries may differ: use td.all(), "
            "td.any(), td.is_empty() or `td is None`"
        )

    def _compared(self, other: object, op: BinaryOp) -> Self:
        """`op` on every leaf and its counterpart in `other`; `NotImplemented` when `other` cannot have one."""
        try:
            return self._compared_as(other, op)
        except REFUSALS:
            if not has_ragged(self, other):
                raise
        return self._compared_as(other, partial(ragged.elementwise, op))

    def _compared_as(self, other: object, op: BinaryOp) -> Self:
        if isinstance(other, Tensor):
            pass
        elif isinstance(other, Contract):
            return self._compared_with_container(other, op)
        elif isinstance(other, numbers.Number):
            return self._map(lambda leaf: op(leaf, other))
        elif isinstance(other, Mapping):
            return self._compared_with_container(dense_of(other), op)
        elif isinstance(other, (np.ndarray, np.generic)):
            other = torch.as_tensor(other)
        else:
            return NotImplemented  # type: ignore[no-any-return]
        if other.ndim == 0:
            return self._map(lambda leaf: op(leaf, other))
        return self._map_with(op, spread_over(other, self._batch_size))

    def _compared_with_container(self, other: Contract, op: BinaryOp) -> Self:
        result = self._compared_by_leaf(other, op)
        own, theirs = self._device, other._device
        if own is not None and result._device is None and (theirs is None or place_of(theirs) == place_of(own)):
            # What is on the left decides: tensors that met one another are on its device.
            return result._place_on(lambda leaf: leaf, own)
        return result

    def _compared_by_leaf(self, other: Contract, op: BinaryOp) -> Self:
        size, theirs = self._batch_size, other._batch_size
        on_node = partial(_compared_pair, op)
        if size == theirs:
            if (pairs := self._pair_members(other)) is not None:
                return self._restack([left._compared_with_container(right, op) for left, right in pairs])
            # With one batch dim at most, no alignment of leaves can change it: they can be compared as they
            # are.
            fn = partial(_pairwise, op, size) if len(size) > 1 else lambda pair: op(pair[0], pair[1])
            return self._merge((self, other), fn, size, len(size), list, on_node=on_node)
        if len(size) == len(theirs):
            size = torch.broadcast_shapes(size, theirs)  # type: ignore[no-untyped-call]
        fn = partial(_pairwise, op, size)
        return self._merge((self, other), fn, size, len(self._batch_size), list, (), on_node)


def _compared_pair(op: BinaryOp, pair: Sequence[Any]) -> Any:
    return pair[0]._compared_with_container(pair[1], op)


def _pairwise(op: BinaryOp, size: torch.Size, pair: list[Tensor]) -> Any:
    left, right = pair
    result = op(left, right)
    # Leaves of different numbers of dims are aligned at the right, which may lead past the batch dims.
    if left.ndim != right.ndim and result.shape[: len(size)] != size:
        raise RuntimeError(
            f"leaves of shapes {list(left.shape)} and {list(right.shape)} broadcast to {list(result.shape)}, which "
            f"does not begin with the batch size {list(size)}"
        )
    return result
