"""Comparison and logic: element by element, with another container, a tensor or a scalar."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tensordict import registry
from tensordict.contract import Contract, Names
from tensordict.ops.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

BinaryOp = Callable[[Any, Any], Any]


class Comparison(Leaves):
    """The comparison and logic operators, `all` and `any`.

    The right side is another container with the same keys, a mapping, a tensor that broadcasts to the batch
    size (and from there to the feature dims of every leaf), or a scalar. Any other object is equal to no
    container.
    """

    def __eq__(self, other: object) -> Any:
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

    def __ne__(self, other: object) -> Any:
        """Where the entries differ; as `==`."""
        return self._compared(other, torch.ne)

    def __lt__(self, other: Any) -> Any:
        """Where the entries are less than those of `other`; as `==`."""
        return self._compared(other, torch.lt)

    def __le__(self, other: Any) -> Any:
        """Where the entries are at most those of `other`; as `==`."""
        return self._compared(other, torch.le)

    def __gt__(self, other: Any) -> Any:
        """Where the entries are greater than those of `other`; as `==`."""
        return self._compared(other, torch.gt)

    def __ge__(self, other: Any) -> Any:
        """Where the entries are at least those of `other`; as `==`."""
        return self._compared(other, torch.ge)

    # Equality is element by element, so it cannot back a hash.
    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> Any:
        """The bitwise "and" of the entries, which is the logical one of bools; the right side as for `==`."""
        return self._compared(other, torch.bitwise_and)

    def __or__(self, other: Any) -> Any:
        """The bitwise "or" of the entries, which is the logical one of bools; the right side as for `==`."""
        return self._compared(other, torch.bitwise_or)

    def __xor__(self, other: Any) -> Any:
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
        raise RuntimeError(
            "the truth value of a container is ambiguous: use td.all(), td.any(), td.is_empty() or `td is None`"
        )

    def all(self, dim: int | None = None) -> Any:
        """Whether all elements are true (non-zero).

        Args:
            dim: a batch dim to reduce; `None` reduces everything.

        Returns:
            a `bool` without `dim`, else a container of bools that lacks the dim.

        Raises:
            IndexError: `dim` is not a batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.tensor([[1, 1], [0, 1]])}, [2])
            >>> td.all(), td.all(dim=0)["a"]
            (False, tensor([False,  True]))
        """
        if dim is not None:
            return self._reduced(Tensor.all, dim)
        return not _settled(self._leaves(), Tensor.all, False)

    def any(self, dim: int | None = None) -> Any:
        """Whether any element is true (non-zero); arguments and result as for :meth:`all`."""
        if dim is not None:
            return self._reduced(Tensor.any, dim)
        return _settled(self._leaves(), Tensor.any, True)

    def _reduced(self, method: Callable[..., Any], dim: int) -> Self:
        """The container without batch dim `dim`, every leaf having gone through `method(dim)`."""
        size = self._batch_size
        ndim = len(size)
        if not -ndim <= dim < ndim:
            raise _no_such_dim(f"{method.__name__}(dim={dim})", size)
        dim %= ndim
        return self._map(
            partial(method, dim=dim), size[:dim] + size[dim + 1 :], ndim, lambda names: _without(names, dim)
        )

    def _compared(self, other: Any, op: BinaryOp) -> Any:
        """`op` on every leaf and its counterpart in `other`; `NotImplemented` when `other` cannot have one."""
        if isinstance(other, Tensor):
            pass
        elif isinstance(other, Contract):
            return self._compared_with_container(other, op)
        elif isinstance(other, numbers.Number):
            return self._map(lambda leaf: op(leaf, other))
        elif isinstance(other, Mapping):
            return self._compared_with_container(registry.lookup("TensorDict")(other), op)
        elif isinstance(other, (np.ndarray, np.generic)):
            other = torch.as_tensor(other)
        else:
            return NotImplemented
        if other.ndim == 0:
            return self._map(lambda leaf: op(leaf, other))
        spread = spread_over(other, self._batch_size)
        ndim = spread.ndim
        return self._map(lambda leaf: op(leaf, _widened(spread, leaf.ndim - ndim)))

    def _compared_with_container(self, other: Contract, op: BinaryOp) -> Self:
        size, theirs = self._batch_size, other._batch_size
        if size == theirs:
            # With one batch dim at most, no alignment of leaves can change it: they can be compared as they
            # are.
            fn = partial(_pairwise, op, size) if len(size) > 1 else lambda pair: op(pair[0], pair[1])
            return self._merge((self, other), fn, size, len(size), list)
        if len(size) == len(theirs):
            size = torch.broadcast_shapes(size, theirs)  # type: ignore[no-untyped-call]
        return self._merge((self, other), partial(_pairwise, op, size), size, len(self._batch_size), list)


def spread_over(value: Tensor, size: torch.Size) -> Tensor:
    """A tensor that broadcasts to a batch size, as a view of exactly that shape."""
    try:
        return value.expand(size)
    except RuntimeError:
        raise RuntimeError(
            f"a tensor of shape {list(value.shape)} does not broadcast to the batch size {list(size)}: "
            "tensors meet the batch dims of a container first. Use a container to give each entry its own"
        ) from None


def _widened(value: Tensor, count: int) -> Tensor:
    """A view with `count` dims of size 1 at the end."""
    return value.reshape(*value.shape, *[1] * count) if count else value


def _pairwise(op: BinaryOp, size: torch.Size, pair: list[Any]) -> Any:
    left, right = pair
    result = op(left, right)
    # Leaves of different numbers of dims are aligned at the right, which may lead past the batch dims.
    if left.ndim != right.ndim and result.shape[: len(size)] != size:
        raise RuntimeError(
            f"leaves of shapes {list(left.shape)} and {list(right.shape)} broadcast to {list(result.shape)}, which "
            f"does not begin with the batch size {list(size)}"
        )
    return result


def _settled(leaves: list[Any], method: Callable[..., Any], answer: bool) -> bool:
    """Whether `method` gives `answer` for some leaf: the CPU's asked in turn, others in one transfer."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for leaf in leaves:
        if not leaf.is_cpu:
            by_device.setdefault(leaf.device, []).append(method(leaf).bool())
        elif bool(method(leaf)) is answer:
            return True
    return any(bool(method(torch.stack(flags))) is answer for flags in by_device.values())


def _without(names: Names, dim: int) -> Names:
    return names[:dim] + names[dim + 1 :]


def _no_such_dim(call: str, size: torch.Size) -> IndexError:
    if not size:
        return IndexError(f"{call}: a container without batch dims (batch_size=[]) has no dim to reduce")
    return IndexError(f"{call}: dim must be between {-len(size)} and {len(size) - 1}, for a batch size {list(size)}")
