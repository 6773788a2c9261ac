"""Functions of several operands, element by element: arithmetic, its operators, bounds and logic, in place and not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import foreach
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.foreach import Many, One
from tensordict.core.keys import joined
from tensordict.ops.dims.gathering import write_into
from tensordict.ops.math.logic import combining
from tensordict.ops.math.pairing import beside, checked_default, grown, operand, pair_up, refuse_operand, spread
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

    Operand = Tensor | float


if TYPE_CHECKING:
    from torch.utils.data import Dataset

    # To type checkers a container is one: `DataLoader` asks for this class, and takes what acts alike.
    _DataSet = Dataset[Any]
else:
    _DataSet = object


class Arithmetic(Leaves, _DataSet):
    """Arithmetic with another container, a mapping, a tensor or a number.

    The other operand: a container must have the same keys, in any order; leaves meet leaves as torch's broadcasting has
    it. A tensor broadcasts to the batch size, and from there to the feature dims of every leaf. A number meets every
    leaf. Dtypes are promoted as torch promotes them, leaf by leaf.

    default: what to do with keys that only one of two containers has. `None`: that is an error. `"intersection"`: the
        result lacks them. A number or a tensor: it stands for the missing entries, on both sides.

    Ragged entries meet ragged ones with the same rows, whichever object holds their offsets, and anything that
    broadcasts to each row.

    Methods without an underscore at the end give a new container over new leaves. It has the structure, device and
    names of this one and is locked if this one is; its batch size is larger if that of the other operand asks for it.
    Methods with an underscore write into the leaves and return the same container; a locked one allows that. What can
    be checked (keys, shapes, dtypes, leaves that require grad) is checked before the first leaf changes.

    All of them raise a `KeyError` that names the odd keys, and torch's `RuntimeError` or `TypeError` with the key of
    the entry in front of its message.
    """

    # Has numpy's arrays and numbers leave an operation with a container on the right to the container.
    __array_ufunc__ = None

    # --- sums and products ------------------------------------------------------------------------------------------

    def add(self, other: object, *, alpha: float | None = None, default: object = None) -> Self:
        """`self + alpha * other`.

        Args:
            other: a container, a mapping, a tensor or a number.
            alpha: a number to multiply `other` by.
            default: what to do with keys that only one side has: `None`, `"intersection"`, a number or a tensor.

        Raises:
            KeyError: the keys differ and there is no default.
            RuntimeError: the shapes of an entry do not broadcast, or a tensor not to the batch size.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3), "b": {"c": torch.ones(2)}}, [2])
            >>> td.add(torch.tensor([1.0, 2.0]))["b", "c"]
            tensor([2., 3.])
            >>> td.add(TensorDict({"b": {"c": torch.ones(2)}}, [2]), alpha=10, default="intersection")["b", "c"]
            tensor([11., 11.])
        """
        one, many = _scaled(torch.add, internals.foreach_add, alpha)
        return self._with(one, many, "add", other, default)

    def add_(self, other: object, *, alpha: float | None = None) -> Self:
        """As :meth:`add`, in place.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.add_(1) is td, td["a"]
            (True, tensor([1., 1.]))
        """
        one, many = _scaled(Tensor.add_, internals.foreach_add_, alpha)
        return self._with_(one, many, "add_", other)

    def sub(self, other: object, *, alpha: float | None = None, default: object = None) -> Self:
        """`self - alpha * other`; the arguments as for :meth:`add`."""
        one, many = _scaled(torch.sub, internals.foreach_sub, alpha)
        return self._with(one, many, "sub", other, default)

    def sub_(self, other: object, alpha: float | None = None) -> Self:
        """As :meth:`sub`, in place."""
        one, many = _scaled(Tensor.sub_, internals.foreach_sub_, alpha)
        return self._with_(one, many, "sub_", other)

    def rsub(self, other: object, *, alpha: float | None = None, default: object = None) -> Self:
        """`other - alpha * self`; the arguments as for :meth:`add`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.ones(2)).rsub(3)["a"]
            tensor([2., 2.])
        """
        one, many = _scaled(torch.rsub, _foreach_rsub, alpha)
        return self._with(one, many, "rsub", other, default)

    def mul(self, other: object, *, default: object = None) -> Self:
        """`self * other`; the arguments as for :meth:`add`."""
        return self._with(torch.mul, internals.foreach_mul, "mul", other, default)

    def mul_(self, other: object) -> Self:
        """As :meth:`mul`, in place."""
        return self._with_(Tensor.mul_, internals.foreach_mul_, "mul_", other)

    def div(self, other: object, *, default: object = None) -> Self:
        """`self / other`, of floating point even for integers; the arguments as for :meth:`add`."""
        return self._with(torch.div, internals.foreach_div, "div", other, default)

    def div_(self, other: object) -> Self:
        """As :meth:`div`, in place; not for integers, which the result does not fit."""
        return self._with_(Tensor.div_, internals.foreach_div_, "div_", other)

    def mod(self, other: object) -> Self:
        """`self % other`, the remainder of the division rounded down (`torch.remainder`)."""
        return self._with(torch.remainder, None, "mod", other)

    def pow(self, other: object, *, default: object = None) -> Self:
        """`self ** other`; the arguments as for :meth:`add`."""
        return self._with(torch.pow, internals.foreach_pow, "pow", other, default, plain_number=True)

    def pow_(self, other: object) -> Self:
        """As :meth:`pow`, in place."""
        return self._with_(Tensor.pow_, internals.foreach_pow_, "pow_", other, plain_number=True)

    # --- three operands ---------------------------------------------------------------------------------------------

    def lerp(self, end: object, weight: object) -> Self:
        """`self + weight * (end - self)`: linear interpolation.

        Args:
            end: a container or a tensor.
            weight: a container, a tensor or a number.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2)).lerp(TensorDict(a=torch.ones(2)), 0.25)["a"]
            tensor([0.2500, 0.2500])
        """
        return self._with_two(torch.lerp, internals.foreach_lerp, "lerp", end, weight)

    def lerp_(self, end: object, weight: object) -> Self:
        """As :meth:`lerp`, in place."""
        return self._with_two_(Tensor.lerp_, internals.foreach_lerp_, "lerp_", end, weight)

    def addcmul(self, other1: object, other2: object, *, value: float = 1) -> Self:
        """`self + value * other1 * other2`, the others being containers or tensors."""
        one, many = partial(torch.addcmul, value=value), partial(internals.foreach_addcmul, value=value)
        return self._with_two(one, many, "addcmul", other1, other2)

    def addcmul_(self, other1: object, other2: object, *, value: float = 1) -> Self:
        """As :meth:`addcmul`, in place."""
        one, many = partial(Tensor.addcmul_, value=value), partial(internals.foreach_addcmul_, value=value)
        return self._with_two_(one, many, "addcmul_", other1, other2)

    def addcdiv(self, other1: object, other2: object, value: float = 1) -> Self:
        """`self + value * other1 / other2`, the others being containers or tensors."""
        one, many = partial(torch.addcdiv, value=value), partial(internals.foreach_addcdiv, value=value)
        return self._with_two(one, many, "addcdiv", other1, other2)

    def addcdiv_(self, other1: object, other2: object, *, value: float = 1) -> Self:
        """As :meth:`addcdiv`, in place."""
        one, many = partial(Tensor.addcdiv_, value=value), partial(internals.foreach_addcdiv_, value=value)
        return self._with_two_(one, many, "addcdiv_", other1, other2)

    # --- bounds -----------------------------------------------------------------------------------------------------

    def clamp(self, min: object = None, max: object = None, *, out: object = None) -> Self:
        """Each element, or the bound that it exceeds; the upper bound where the two contradict each other.

        Args:
            min: the lower bound, a container, a tensor or a number; `None` for none.
            max: the upper bound.
            out: a container to write into, in place, of the batch size of the result.

        Returns:
            a new container, or `out`.

        Raises:
            RuntimeError: neither bound is given.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.arange(4)).clamp(1, 2)["a"]
            tensor([1, 1, 2, 2])
        """
        if min is None:
            if max is None:
                raise RuntimeError("clamp needs a lower bound, an upper bound, or both")
            result = self.clamp_max(max)
        elif max is None:
            result = self.clamp_min(min)
        else:
            result = self._with_two(_clamp, _foreach_clamp, "clamp", min, max)
        return result if out is None else write_into(out, result)

    def clamp_min(self, other: object, default: object = None) -> Self:
        """Each element, or the lower bound that it is below; the arguments as for :meth:`add`."""
        return self._with(torch.clamp_min, internals.foreach_clamp_min, "clamp_min", other, default, plain_number=True)

    def clamp_min_(self, other: object) -> Self:
        """As :meth:`clamp_min`, in place."""
        return self._with_(Tensor.clamp_min_, internals.foreach_clamp_min_, "clamp_min_", other, plain_number=True)

    def clamp_max(self, other: object, *, default: object = None) -> Self:
        """Each element, or the upper bound that it is above; the arguments as for :meth:`add`."""
        return self._with(torch.clamp_max, internals.foreach_clamp_max, "clamp_max", other, default, plain_number=True)

    def clamp_max_(self, other: object) -> Self:
        """As :meth:`clamp_max`, in place."""
        return self._with_(Tensor.clamp_max_, internals.foreach_clamp_max_, "clamp_max_", other, plain_number=True)

    def maximum(self, other: object, *, default: object = None) -> Self:
        """The larger of two elements, NaN if either is; the arguments as for :meth:`add`."""
        return self._with(_maximum, internals.foreach_maximum, "maximum", other, default, plain_number=True)

    def maximum_(self, other: object) -> Self:
        """As :meth:`maximum`, in place."""
        return self._with_(Tensor.clamp_min_, internals.foreach_maximum_, "maximum_", other, plain_number=True)

    def minimum(self, other: object, *, default: object = None) -> Self:
        """The smaller of two elements, NaN if either is; the arguments as for :meth:`add`."""
        return self._with(_minimum, internals.foreach_minimum, "minimum", other, default, plain_number=True)

    def minimum_(self, other: object) -> Self:
        """As :meth:`minimum`, in place."""
        return self._with_(Tensor.clamp_max_, internals.foreach_minimum_, "minimum_", other, plain_number=True)

    # --- logic ------------------------------------------------------------------------------------------------------

    def bitwise_and(self, other: object, *, default: object = None) -> Self:
        """The bitwise "and", which is the logical one of bools; the arguments as for :meth:`add`."""
        return self._with(torch.bitwise_and, None, "bitwise_and", other, default, plain_number=True)

    def logical_and(self, other: object, *, default: object = None) -> Self:
        """Whether both elements are true (non-zero), as a container of bools; the arguments as for :meth:`add`."""
        return self._with(_logical_and, None, "logical_and", other, default, plain_number=True)

    # --- operators --------------------------------------------------------------------------------------------------
    # A right side that is no operand is for that object to handle, and then for Python to refuse.

    def __add__(self, other: object) -> Self:  # type: ignore[override]  # that of `Dataset` joins two of them
        return NotImplemented if operand(other) is NotImplemented else self.add(other)

    __radd__ = __add__

    def __iadd__(self, other: object) -> Self:  # type: ignore[override]
        return NotImplemented if operand(other) is NotImplemented else self.add_(other)

    def __sub__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.sub(other)

    def __rsub__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.rsub(other)

    def __isub__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.sub_(other)

    def __mul__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.mul(other)

    __rmul__ = __mul__

    def __imul__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.mul_(other)

    def __truediv__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.div(other)

    def __rtruediv__(self, other: object) -> Self:
        if operand(other) is NotImplemented:
            return NotImplemented
        return self._with(_rdiv, _foreach_rdiv, "/", other, plain_number=True)

    def __itruediv__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.div_(other)

    def __floordiv__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self._with(torch.floor_divide, None, "//", other)

    def __rfloordiv__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self._with(_rfloordiv, None, "//", other)

    def __ifloordiv__(self, other: object) -> Self:
        if operand(other) is NotImplemented:
            return NotImplemented
        return self._with_(Tensor.floor_divide_, None, "//=", other)

    def __mod__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.mod(other)

    def __rmod__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self._with(_rmod, None, "%", other)

    def __imod__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self._with_(Tensor.remainder_, None, "%=", other)

    def __pow__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.pow(other)

    def __rpow__(self, other: object) -> Self:
        if operand(other) is NotImplemented:
            return NotImplemented
        return self._with(_rpow, _foreach_rpow, "**", other, plain_number=True)

    def __ipow__(self, other: object) -> Self:
        return NotImplemented if operand(other) is NotImplemented else self.pow_(other)

    def __iand__(self, other: object) -> Self:
        return self._logic_(Tensor.bitwise_and_, torch.bitwise_and, "&=", other)

    def __ior__(self, other: object) -> Self:
        return self._logic_(Tensor.bitwise_or_, torch.bitwise_or, "|=", other)

    def __ixor__(self, other: object) -> Self:
        return self._logic_(Tensor.bitwise_xor_, torch.bitwise_xor, "^=", other)

    def _logic_(self, one: One, op: object, what: str, other: object) -> Self:
        value = operand(other)
        if value is NotImplemented:
            return NotImplemented  # type: ignore[no-any-return]
        plan = combining(self, value, op) if isinstance(value, Contract) else None
        self._with_(one, None, what, value, plain_number=True)
        if plan is not None:
            plan.run(self)
        return self

    # --- the mechanism ----------------------------------------------------------------------------------------------

    def _with(
        self, one: One, many: Many, what: str, other: object, default: object = None, plain_number: bool = False
    ) -> Self:
        """A container over `one(leaf, what stands beside it)`, which `many` gives for lists in one call.

        Args:
            what: the operation, for error messages.
            plain_number: hand a number to torch as it is, because torch is quick with it, or treats it in its own way.
        """
        default = checked_default(default)
        value = operand(other)
        structure = self
        right: Any = value
        if isinstance(value, Contract):
            structure, left, right = pair_up(grown(self, value._batch_size), value, default)
        elif isinstance(value, Tensor):
            structure = grown(self, value.shape)
            left, right = structure._leaves(), spread(structure, value, what)
        elif value is NotImplemented:
            refuse_operand(what, other)
        else:
            left = self._leaves()
            if not plain_number:
                right = foreach.number(left, value)
        results = foreach.results(structure, one, many, left, right)
        return self._same_lock(structure._rebuilt(iter(results)))

    def _with_(self, one: One, many: Many, what: str, other: object, plain_number: bool = False) -> Self:
        """As :meth:`_with`, for functions that write into the leaves."""
        left, right = self._fitting(other, what)
        if not plain_number:
            right = foreach.number(left, right)
        foreach.write(self, one, many, left, right)
        return self

    def _with_two(self, one: One, many: Many, what: str, first: object, second: object) -> Self:
        """As :meth:`_with`, for functions of three operands."""
        values = operand(first), operand(second)
        structure = self
        for value, given in zip(values, (first, second), strict=True):
            if value is NotImplemented:
                refuse_operand(what, given)
            if isinstance(value, (Contract, Tensor)):
                structure = grown(structure, value._batch_size if isinstance(value, Contract) else value.shape)
        sides = [beside(structure, value, what) for value in values]
        results = foreach.results(structure, one, many, structure._leaves(), *sides)
        return self._same_lock(structure._rebuilt(iter(results)))

    def _with_two_(self, one: One, many: Many, what: str, first: object, second: object) -> Self:
        """As :meth:`_with_two`, for functions that write into the leaves."""
        left, one_side = self._fitting(first, what)
        foreach.write(self, one, many, left, one_side, self._fitting(second, what)[1])
        return self

    def _fitting(self, other: object, what: str) -> tuple[list[Any], Any]:
        """The leaves and what stands beside them, checked to leave the shape of each leaf as it is."""
        value = operand(other)
        if isinstance(value, Contract):
            # What is broadcast may be a part of what changes: its values are those from before.
            size, theirs = self._batch_size, value._batch_size
            if size != theirs and len(size) == len(theirs):
                value = value.clone()
            _, left, right = pair_up(self, value)
            if _shapes(left) != _shapes(right):
                self._refuse_larger(left, right, what)
                right = [
                    two if two.is_nested or two.shape == one.shape else two.clone() for one, two in zip(left, right)
                ]
            return left, right
        if isinstance(value, Tensor):
            # A copy: the tensor may be one of the leaves, which change one after the other.
            value = spread(self, value.clone(), what)
        elif value is NotImplemented:
            refuse_operand(what, other)
        return self._leaves(), value

    def _refuse_larger(self, left: list[Any], right: list[Any], what: str) -> None:
        for (path, _), mine, other in zip(self._walk(), left, right, strict=True):
            if mine.is_nested:
                # Its rows are compared right before it is written to.
                continue
            if other.is_nested:
                raise RuntimeError(f"entry {joined(path)!r}: {what} cannot write a ragged result into a dense leaf")
            pairs = zip(reversed(mine.shape), reversed(other.shape), strict=False)
            fits = other.dim() <= mine.dim() and all(theirs in (1, size) for size, theirs in pairs)
            if not fits:
                raise RuntimeError(
                    f"entry {joined(path)!r}: {what} writes into a leaf of shape {list(mine.shape)}, to which one of "
                    f"shape {list(other.shape)} does not broadcast"
                )


def _shapes(leaves: list[Any]) -> list[Any]:
    """The shapes of leaves; `None` for ragged ones that have none."""
    try:
        return list(map(Tensor.size, leaves))
    except RuntimeError:
        return [None if leaf.is_nested else leaf.shape for leaf in leaves]


def _scaled(one: One, many: Callable[..., Any], alpha: float | None) -> tuple[One, Many]:
    """The functions with `alpha` times the other operand, if there is one."""
    return (one, many) if alpha is None else (partial(one, alpha=alpha), partial(_of_lists, many, alpha=alpha))


def _of_lists(many: Callable[..., Any], left: list[Tensor], right: object, **options: Any) -> Any:
    """Call what takes two lists; a `TypeError` for a number, which torch raises too late in compiled code."""
    if type(right) is not list:
        raise TypeError(f"torch has no such call for a list of tensors and {right!r}")
    return many(left, right, **options)


def _foreach_rsub(left: list[Tensor], right: Any, **alpha: Any) -> Any:
    return _of_lists(lambda left, right: internals.foreach_sub(right, left, **alpha), left, right)


def _rdiv(leaf: Tensor, other: Operand) -> Tensor:
    return other / leaf


def _foreach_rdiv(left: list[Tensor], right: object) -> Any:
    if type(right) is list:
        return internals.foreach_div(right, left)
    # As torch divides a number by a tensor: the results are the same to the last bit.
    return internals.foreach_mul(internals.foreach_reciprocal(left), foreach.number(left, right))


def _rfloordiv(leaf: Tensor, other: Operand) -> Tensor:
    return other // leaf


def _rmod(leaf: Tensor, other: Operand) -> Tensor:
    return other % leaf


def _rpow(leaf: Tensor, other: Operand) -> Tensor:
    return torch.pow(other, leaf)


def _foreach_rpow(left: list[Tensor], right: Any) -> Any:
    return internals.foreach_pow(right, left)


def _clamp(leaf: Tensor, low: Any, high: Any) -> Tensor:
    return torch.clamp_max(torch.clamp_min(leaf, low), high)


def _foreach_clamp(left: list[Tensor], low: Any, high: Any) -> Any:
    clamped = internals.foreach_clamp_min(left, low)
    if type(low) is type(high) is not list:
        # The first call has promoted the dtypes as the second would.
        internals.foreach_clamp_max_(clamped, high)
        return clamped
    return internals.foreach_clamp_max(clamped, high)


def _maximum(leaf: Tensor, other: Operand) -> Tensor:
    return torch.maximum(leaf, other) if isinstance(other, Tensor) else torch.clamp_min(leaf, other)


def _minimum(leaf: Tensor, other: Operand) -> Tensor:
    return torch.minimum(leaf, other) if isinstance(other, Tensor) else torch.clamp_max(leaf, other)


def _logical_and(leaf: Tensor, other: object) -> Tensor:
    return torch.logical_and(leaf, other if isinstance(other, Tensor) else torch.tensor(other))
