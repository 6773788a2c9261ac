"""The mixin of the comparison and logic operators, which work element by element."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.devices import place_of
from tensordict.core.ragged import REFUSALS
from tensordict.ops.math.pairing import (
    broadcast_pieces,
    expand_to_batch,
    expand_to_common,
    have_as_many_feature_dims,
    make_from_mapping,
)
from tensordict.ops.refusals import has_ragged_leaves
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

BinaryOp = Callable[[Any, Any], Any]


class Comparison(Leaves):
    """The comparison and logic operators.

    The right side is another container with the same keys, a mapping, a tensor that broadcasts to the batch size (and
    from there to the feature dims of every leaf), or a scalar. A container never equals any other object.
    """

    def __eq__(self, other: object) -> Self:  # type: ignore[override]
        """Test where the elements are equal. Returns a container of bools.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3)}}, [3])
            >>> (td == 1)["a"], (td == td).all()
            (tensor([False,  True, False]), True)

        Raises:
            KeyError: the keys of the containers differ. The error names the keys that only one of them has.
            RuntimeError: the shapes of an entry do not broadcast. The error names the entry.
        """
        return self._compare(other, torch.eq)

    def __ne__(self, other: object) -> Self:  # type: ignore[override]
        """Test where the elements differ; see `==`."""
        return self._compare(other, torch.ne)

    def __lt__(self, other: object) -> Self:
        """Test where the elements are less than the elements of `other`; see `==`."""
        return self._compare(other, torch.lt)

    def __le__(self, other: object) -> Self:
        """Test where the elements are less than or equal to the elements of `other`; see `==`."""
        return self._compare(other, torch.le)

    def __gt__(self, other: object) -> Self:
        """Test where the elements are greater than the elements of `other`; see `==`."""
        return self._compare(other, torch.gt)

    def __ge__(self, other: object) -> Self:
        """Test where the elements are greater than or equal to the elements of `other`; see `==`."""
        return self._compare(other, torch.ge)

    # Containers are not hashable, because `==` returns a container.
    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: object) -> Self:
        """Compute the bitwise "and"; for bools this is the logical "and". The right side is as for `==`."""
        return self._compare(other, torch.bitwise_and)

    def __or__(self, other: object) -> Self:
        """Compute the bitwise "or"; for bools this is the logical "or". The right side is as for `==`."""
        return self._compare(other, torch.bitwise_or)

    def __xor__(self, other: object) -> Self:
        """Compute the bitwise "exclusive or". The right side is as for `==`."""
        return self._compare(other, torch.bitwise_xor)

    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    def __invert__(self) -> Self:
        """Compute the bitwise "not"; for bools this is the logical "not".

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

    def _compare(self, other: object, op: BinaryOp) -> Self:
        """Call `op` on every leaf and its counterpart in `other`; `NotImplemented` if `other` is not an operand."""
        try:
            return self._compare_as(other, op)
        except REFUSALS:
            if not has_ragged_leaves(self, other):
                raise
        return self._compare_as(other, partial(ragged.elementwise, op))

    def _compare_as(self, other: object, op: BinaryOp) -> Self:
        if isinstance(other, Tensor):
            pass
        elif isinstance(other, Contract):
            return self._compare_with_container(other, op)
        elif isinstance(other, numbers.Number):
            return self._map(lambda leaf: op(leaf, other))
        elif isinstance(other, Mapping):
            made = make_from_mapping(other)
            size = self._batch_size
            if self._members() is not None and all(leaf.shape[: len(size)] == size for leaf in made._leaves()):
                made.batch_size = size  # The result is then a lazy stack, too.
            return self._compare_with_container(made, op)
        elif isinstance(other, (np.ndarray, np.generic)):
            other = torch.as_tensor(other)
        else:
            return NotImplemented  # type: ignore[no-any-return]
        if other.ndim == 0:
            return self._map(lambda leaf: op(leaf, other))
        return self._map_with(op, expand_to_batch(other, self._batch_size))

    def _compare_with_container(self, other: Contract, op: BinaryOp) -> Self:
        result = self._compare_by_leaf(other, op)
        own, theirs = self._device, other._device
        if own is not None and result._device is None and (theirs is None or place_of(theirs) == place_of(own)):
            # The left side decides: torch has compared the tensors, so they are on its device.
            return result._place_on(lambda leaf: leaf, own)
        return result

    def _compare_by_leaf(self, other: Contract, op: BinaryOp) -> Self:
        size, theirs = self._batch_size, other._batch_size
        on_node = partial(_compare_pair, op)
        if size != theirs and self._members():
            # The dense form of a lazy stack would lack the entries that only some members have.
            if len(size) == len(theirs) and (wider := expand_to_common(self, theirs)) is not self:
                return wider._compare_by_leaf(other, op)
            if have_as_many_feature_dims(self, other) and (pieces := broadcast_pieces(self, other)) is not None:
                return self._compare_parts(zip(self._members() or (), pieces, strict=True), op)
        if size == theirs:
            if (pairs := self._pair_members(other)) is not None:
                return self._compare_parts(pairs, op)
            # With at most one batch dim, broadcasting two leaves cannot change the batch size, so skip the check.
            fn = partial(_compare_leaves, op, size) if len(size) > 1 else lambda pair: op(pair[0], pair[1])
            return self._merge((self, other), fn, size, len(size), list, on_node=on_node)
        if len(size) == len(theirs):
            size = torch.broadcast_shapes(size, theirs)  # type: ignore[no-untyped-call]
        fn = partial(_compare_leaves, op, size)
        return self._merge((self, other), fn, size, len(self._batch_size), list, (), on_node)

    def _compare_parts(self, pairs: Iterable[tuple[Any, Any]], op: BinaryOp) -> Self:
        return self._restack([left._compare_with_container(right, op) for left, right in pairs])


def _compare_pair(op: BinaryOp, pair: Sequence[Any]) -> Any:
    return pair[0]._compare_with_container(pair[1], op)


def _compare_leaves(op: BinaryOp, size: torch.Size, pair: list[Tensor]) -> Any:
    left, right = pair
    result = op(left, right)
    # Broadcasting aligns leaves of different ndim at the last dim, which may mix batch dims and feature dims.
    if left.ndim != right.ndim and result.shape[: len(size)] != size:
        raise RuntimeError(
            f"leaves of shapes {list(left.shape)} and {list(right.shape)} broadcast to {list(result.shape)}, which "
            f"does not begin with the batch size {list(size)}"
        )
    return result
