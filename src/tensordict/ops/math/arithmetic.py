"""The mixin of elementwise functions of several operands: arithmetic, operators, bounds and logic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from tensordict.core import foreach
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.foreach import Many, One
from tensordict.core.keys import joined
from tensordict.ops.dims.gathering import write_into
from tensordict.ops.math.logic import plan_operator
from tensordict.ops.math.pairing import (
    align_with_leaves,
    as_operand,
    check_default,
    expand_to_common,
    is_operand,
    list_counterparts,
    pair_up,
    refuse_operand,
)
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

    Operand = Tensor | float

    SelfT = TypeVar("SelfT", bound="Arithmetic")


if TYPE_CHECKING:
    from torch.utils.data import Dataset

    # For type checkers, containers are datasets: `DataLoader` is annotated with this class, but accepts any sequence.
    _DataSet = Dataset[Any]

    class Operator:
        """An operator that returns a container of the same class."""

        @overload
        def __get__(self, instance: SelfT, owner: Any = None) -> Callable[[object], SelfT]: ...
        @overload
        def __get__(self, instance: None, owner: type[SelfT]) -> Callable[..., SelfT]: ...
        def __get__(self, instance: object, owner: object = None) -> Any: ...

else:
    _DataSet = object


def _make_operator(name: str, operate: Callable[[Any, object], Any]) -> Operator:
    """Make the operator `name`, which returns `NotImplemented` for other objects than operands.

    Python then tries the operator of the other object, and raises a TypeError if there is none.
    """

    def operator(self: Any, other: object) -> Any:
        return operate(self, other) if is_operand(other) else NotImplemented

    # Pickle looks up a bound method by its name.
    operator.__name__, operator.__qualname__ = name, f"Arithmetic.{name}"
    return operator  # type: ignore[return-value]


class Arithmetic(Leaves, _DataSet):
    """Arithmetic with another container, a mapping, a tensor or a number.

    The other operand: a container must have the same keys, in any order; each pair of leaves broadcasts like two
    tensors. A tensor broadcasts to the batch size, and from there to the feature dims of every leaf. A number applies
    to every leaf. Each pair of leaves promotes its dtypes like two tensors.

    default: how to treat keys that only one of two containers has. `None`: raise an error. `"intersection"`: drop them.
        A number or a tensor: use it for the missing entries, on both sides.

    A ragged entry combines with ragged entries that have the same rows, and with anything that broadcasts to each row.

    Methods without a trailing underscore return a new container with new leaves. It has the structure, device and names
    of `self`, is locked if `self` is, and has a larger batch size if the batch sizes broadcast to one. Methods with a
    trailing underscore write into the leaves and return `self`, which may be locked. They check keys, shapes, dtypes
    and leaves that require grad before they change the first leaf.

    All of them raise a `KeyError` that names the keys that only one side has. Torch's `RuntimeError` or `TypeError` is
    prefixed with the key of the entry.
    """

    # NumPy arrays and numbers on the left then leave the operation to the container on the right.
    __array_ufunc__ = None

    # --- sums and products ------------------------------------------------------------------------------------------

    def add(self, other: object, *, alpha: float | None = None, default: object = None) -> Self:
        """Add `alpha * other` to each element.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3), "b": {"c": torch.ones(2)}}, [2])
            >>> td.add(torch.tensor([1.0, 2.0]))["b", "c"]
            tensor([2., 3.])
            >>> td.add(TensorDict({"b": {"c": torch.ones(2)}}, [2]), alpha=10, default="intersection")["b", "c"]
            tensor([11., 11.])

        Args:
            other: a container, a mapping, a tensor or a number. A tensor broadcasts to the batch size.
            alpha: a number to multiply `other` by.
            default: how to treat keys that only one side has. `None` raises an error, `"intersection"` drops them, and
                a number or a tensor is used for the missing entries.

        Raises:
            KeyError: the keys differ and `default` is not given.
            RuntimeError: the shapes of an entry do not broadcast, or a tensor does not broadcast to the batch size.
        """
        return self._apply_binary(torch.add, "add", other, default, alpha=alpha)

    def add_(self, other: object, *, alpha: float | None = None) -> Self:
        """Add `alpha * other` to each element, in place. Returns this container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.add_(1) is td, td["a"]
            (True, tensor([1., 1.]))
        """
        return self._apply_binary_(Tensor.add_, "add_", other, alpha=alpha)

    def sub(self, other: object, *, alpha: float | None = None, default: object = None) -> Self:
        """Subtract `alpha * other` from each element. Arguments as for :meth:`add`."""
        return self._apply_binary(torch.sub, "sub", other, default, alpha=alpha)

    def sub_(self, other: object, alpha: float | None = None) -> Self:
        """Subtract `alpha * other` from each element, in place. Returns this container."""
        return self._apply_binary_(Tensor.sub_, "sub_", other, alpha=alpha)

    def rsub(self, other: object, *, alpha: float | None = None, default: object = None) -> Self:
        """Subtract `alpha` times each element from `other`. Arguments as for :meth:`add`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.ones(2)).rsub(3)["a"]
            tensor([2., 2.])
        """
        return self._apply_binary(torch.rsub, "rsub", other, default, many=_foreach_rsub, alpha=alpha)

    def mul(self, other: object, *, default: object = None) -> Self:
        """Multiply each element by `other`. Arguments as for :meth:`add`."""
        return self._apply_binary(torch.mul, "mul", other, default)

    def mul_(self, other: object) -> Self:
        """Multiply each element by `other`, in place. Returns this container."""
        return self._apply_binary_(Tensor.mul_, "mul_", other)

    def div(self, other: object, *, default: object = None) -> Self:
        """Divide each element by `other`. Integers give floating point results. Arguments as for :meth:`add`."""
        return self._apply_binary(torch.div, "div", other, default)

    def div_(self, other: object) -> Self:
        """Divide each element by `other`, in place. Raises for integer entries. Returns this container."""
        return self._apply_binary_(Tensor.div_, "div_", other)

    def mod(self, other: object) -> Self:
        """Compute `self % other`, the remainder of the division rounded down (`torch.remainder`)."""
        return self._apply_binary(torch.remainder, "mod", other)

    def pow(self, other: object, *, default: object = None) -> Self:
        """Raise each element to the power `other`. Arguments as for :meth:`add`."""
        return self._apply_binary(torch.pow, "pow", other, default, plain_number=True)

    def pow_(self, other: object) -> Self:
        """Raise each element to the power `other`, in place. Returns this container."""
        return self._apply_binary_(Tensor.pow_, "pow_", other, plain_number=True)

    # --- three operands ---------------------------------------------------------------------------------------------

    def lerp(self, end: object, weight: object) -> Self:
        """Interpolate linearly: compute `self + weight * (end - self)`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2)).lerp(TensorDict(a=torch.ones(2)), 0.25)["a"]
            tensor([0.2500, 0.2500])

        Args:
            end: a container or a tensor.
            weight: a container, a tensor or a number.
        """
        return self._apply_ternary(torch.lerp, "lerp", end, weight)

    def lerp_(self, end: object, weight: object) -> Self:
        """Interpolate linearly towards `end`, in place; see :meth:`lerp`. Returns this container."""
        return self._apply_ternary_(Tensor.lerp_, "lerp_", end, weight)

    def addcmul(self, other1: object, other2: object, *, value: float = 1) -> Self:
        """Compute `self + value * other1 * other2`, for two containers or tensors."""
        return self._apply_ternary(torch.addcmul, "addcmul", other1, other2, value=value)

    def addcmul_(self, other1: object, other2: object, *, value: float = 1) -> Self:
        """Add `value * other1 * other2` to each element, in place. Returns this container."""
        return self._apply_ternary_(Tensor.addcmul_, "addcmul_", other1, other2, value=value)

    def addcdiv(self, other1: object, other2: object, value: float = 1) -> Self:
        """Compute `self + value * other1 / other2`, for two containers or tensors."""
        return self._apply_ternary(torch.addcdiv, "addcdiv", other1, other2, value=value)

    def addcdiv_(self, other1: object, other2: object, *, value: float = 1) -> Self:
        """Add `value * other1 / other2` to each element, in place. Returns this container."""
        return self._apply_ternary_(Tensor.addcdiv_, "addcdiv_", other1, other2, value=value)

    # --- bounds -----------------------------------------------------------------------------------------------------

    def clamp(self, min: object = None, max: object = None, *, out: object = None) -> Self:
        """Limit each element to the range from `min` to `max`. Where `min` exceeds `max`, the result is `max`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.arange(4)).clamp(1, 2)["a"]
            tensor([1, 1, 2, 2])

        Args:
            min: the lower bound: a container, a tensor, a number or `None`.
            max: the upper bound, likewise.
            out: a container with the batch size of the result, to write into in place.

        Returns:
            a new container, or `out`.

        Raises:
            RuntimeError: both bounds are `None`.
        """
        if min is None:
            if max is None:
                raise RuntimeError("clamp needs a lower bound, an upper bound, or both")
            result = self.clamp_max(max)
        elif max is None:
            result = self.clamp_min(min)
        else:
            result = self._apply_ternary(_clamp, "clamp", min, max, many=_foreach_clamp)
        return result if out is None else write_into(out, result)

    def clamp_min(self, other: object, default: object = None) -> Self:
        """Replace each element below the bound `other` by that bound. Arguments as for :meth:`add`."""
        return self._apply_binary(torch.clamp_min, "clamp_min", other, default, plain_number=True)

    def clamp_min_(self, other: object) -> Self:
        """Replace each element below the bound `other` by that bound, in place. Returns this container."""
        return self._apply_binary_(Tensor.clamp_min_, "clamp_min_", other, plain_number=True)

    def clamp_max(self, other: object, *, default: object = None) -> Self:
        """Replace each element above the bound `other` by that bound. Arguments as for :meth:`add`."""
        return self._apply_binary(torch.clamp_max, "clamp_max", other, default, plain_number=True)

    def clamp_max_(self, other: object) -> Self:
        """Replace each element above the bound `other` by that bound, in place. Returns this container."""
        return self._apply_binary_(Tensor.clamp_max_, "clamp_max_", other, plain_number=True)

    def maximum(self, other: object, *, default: object = None) -> Self:
        """Compute the larger of each pair of elements; NaN if one is NaN. Arguments as for :meth:`add`."""
        return self._apply_binary(_maximum, "maximum", other, default, plain_number=True)

    def maximum_(self, other: object) -> Self:
        """Compute the larger of each pair of elements, in place. Returns this container."""
        return self._apply_binary_(Tensor.clamp_min_, "maximum_", other, plain_number=True)

    def minimum(self, other: object, *, default: object = None) -> Self:
        """Compute the smaller of each pair of elements; NaN if one is NaN. Arguments as for :meth:`add`."""
        return self._apply_binary(_minimum, "minimum", other, default, plain_number=True)

    def minimum_(self, other: object) -> Self:
        """Compute the smaller of each pair of elements, in place. Returns this container."""
        return self._apply_binary_(Tensor.clamp_max_, "minimum_", other, plain_number=True)

    # --- logic ------------------------------------------------------------------------------------------------------

    def bitwise_and(self, other: object, *, default: object = None) -> Self:
        """Compute the bitwise "and"; for bools this is the logical "and". Arguments as for :meth:`add`."""
        return self._apply_binary(torch.bitwise_and, "bitwise_and", other, default, plain_number=True)

    def logical_and(self, other: object, *, default: object = None) -> Self:
        """Test whether both elements are true (non-zero). Returns bools. Arguments as for :meth:`add`."""
        return self._apply_binary(_logical_and, "logical_and", other, default, plain_number=True)

    # --- operators --------------------------------------------------------------------------------------------------

    # Not from the table: pyright would give it the type of `Dataset.__add__`, which joins two datasets.
    def __add__(self: SelfT, other: object) -> SelfT:  # type: ignore[override]
        return self.add(other) if is_operand(other) else NotImplemented

    __radd__ = __add__
    __iadd__ = _make_operator("__iadd__", lambda td, other: td.add_(other))
    __sub__ = _make_operator("__sub__", lambda td, other: td.sub(other))
    __rsub__ = _make_operator("__rsub__", lambda td, other: td.rsub(other))
    __isub__ = _make_operator("__isub__", lambda td, other: td.sub_(other))
    __mul__ = __rmul__ = _make_operator("__mul__", lambda td, other: td.mul(other))
    __imul__ = _make_operator("__imul__", lambda td, other: td.mul_(other))
    __truediv__ = _make_operator("__truediv__", lambda td, other: td.div(other))
    __rtruediv__ = _make_operator(
        "__rtruediv__", lambda td, other: td._apply_binary(_rdiv, "/", other, plain_number=True, many=_foreach_rdiv)
    )
    __itruediv__ = _make_operator("__itruediv__", lambda td, other: td.div_(other))
    __floordiv__ = _make_operator("__floordiv__", lambda td, other: td._apply_binary(torch.floor_divide, "//", other))
    __rfloordiv__ = _make_operator("__rfloordiv__", lambda td, other: td._apply_binary(_rfloordiv, "//", other))
    __ifloordiv__ = _make_operator(
        "__ifloordiv__", lambda td, other: td._apply_binary_(Tensor.floor_divide_, "//=", other)
    )
    __mod__ = _make_operator("__mod__", lambda td, other: td.mod(other))
    __rmod__ = _make_operator("__rmod__", lambda td, other: td._apply_binary(_rmod, "%", other))
    __imod__ = _make_operator("__imod__", lambda td, other: td._apply_binary_(Tensor.remainder_, "%=", other))
    __pow__ = _make_operator("__pow__", lambda td, other: td.pow(other))
    __rpow__ = _make_operator(
        "__rpow__", lambda td, other: td._apply_binary(_rpow, "**", other, plain_number=True, many=_foreach_rpow)
    )
    __ipow__ = _make_operator("__ipow__", lambda td, other: td.pow_(other))

    def __iand__(self, other: object) -> Self:
        return self._apply_logic_(Tensor.bitwise_and_, torch.bitwise_and, "&=", other)

    def __ior__(self, other: object) -> Self:
        return self._apply_logic_(Tensor.bitwise_or_, torch.bitwise_or, "|=", other)

    def __ixor__(self, other: object) -> Self:
        return self._apply_logic_(Tensor.bitwise_xor_, torch.bitwise_xor, "^=", other)

    def _apply_logic_(self, one: One, op: object, what: str, other: object) -> Self:
        value = as_operand(other)
        if value is NotImplemented:
            return NotImplemented  # type: ignore[no-any-return]
        plan = plan_operator(self, value, op) if isinstance(value, Contract) else None
        self._apply_binary_(one, what, value, plain_number=True)
        if plan is not None:
            plan.run(self)
        return self

    # --- implementation ---------------------------------------------------------------------------------------------

    def _apply_binary(
        self, one: One, what: str, other: object, default: object = None, plain_number: bool = False, **bound: Any
    ) -> Self:
        """Apply a function of two operands to every leaf.

        Args:
            one: the function of a leaf and its counterpart.
            what: the name of the operation, for error messages.
            other: the right operand.
            default: see the class docstring.
            plain_number: pass a Python number to torch unchanged, because torch is fast with it or gives it a special
                meaning.
            **bound: for `_bind`.
        """
        one, many = _bind(one, what, **bound)
        default = check_default(default)
        value = as_operand(other)
        structure = self
        right: Any = value
        if isinstance(value, Contract):
            structure, left, right = pair_up(expand_to_common(self, value._batch_size), value, default)
        elif isinstance(value, Tensor):
            structure = expand_to_common(self, value.shape)
            left, right = structure._leaves(), align_with_leaves(structure, value, what)
        elif value is NotImplemented:
            refuse_operand(what, other)
        else:
            left = self._leaves()
            if not plain_number:
                right = foreach.convert_number(left, value)
        results = foreach.results(structure, one, many, left, right)
        return self._same_lock(structure._rebuilt(iter(results)))

    def _apply_binary_(
        self, one: One, what: str, other: object, plain_number: bool = False, alpha: float | None = None
    ) -> Self:
        """Apply a function of two operands that writes into the leaves; see :meth:`_apply_binary`."""
        one, many = _bind(one, what, alpha=alpha)
        left, right = self._pair_in_place(other, what)
        if not plain_number:
            right = foreach.convert_number(left, right)
        foreach.write(self, one, many, left, right)
        return self

    def _apply_ternary(self, one: One, what: str, first: object, second: object, **bound: Any) -> Self:
        """Apply a function of three operands to every leaf; see :meth:`_apply_binary`."""
        one, many = _bind(one, what, **bound)
        values = as_operand(first), as_operand(second)
        structure = self
        for value, given in zip(values, (first, second), strict=True):
            if value is NotImplemented:
                refuse_operand(what, given)
            if isinstance(value, (Contract, Tensor)):
                structure = expand_to_common(
                    structure, value._batch_size if isinstance(value, Contract) else value.shape
                )
        sides = [list_counterparts(structure, value, what) for value in values]
        results = foreach.results(structure, one, many, structure._leaves(), *sides)
        return self._same_lock(structure._rebuilt(iter(results)))

    def _apply_ternary_(self, one: One, what: str, first: object, second: object, **bound: Any) -> Self:
        """Apply a function of three operands that writes into the leaves; see :meth:`_apply_binary`."""
        one, many = _bind(one, what, **bound)
        left, one_side = self._pair_in_place(first, what)
        foreach.write(self, one, many, left, one_side, self._pair_in_place(second, what)[1])
        return self

    def _pair_in_place(self, other: object, what: str) -> tuple[list[Any], Any]:
        """Return the leaves and their counterparts. Raises if a result would not have the shape of its leaf."""
        value = as_operand(other)
        if isinstance(value, Contract):
            # Copy an operand that broadcasts: it may be a view of these leaves, which change during the operation.
            size, theirs = self._batch_size, value._batch_size
            if size != theirs and len(size) == len(theirs):
                value = value.clone()
            _, left, right = pair_up(self, value)
            if _list_shapes(left) != _list_shapes(right):
                self._refuse_larger(left, right, what)
                right = [
                    two if two.is_nested or two.shape == one.shape else two.clone() for one, two in zip(left, right)
                ]
            return left, right
        if isinstance(value, Tensor):
            # Copy the tensor: it may be one of the leaves, which change one after the other.
            value = align_with_leaves(self, value.clone(), what)
        elif value is NotImplemented:
            refuse_operand(what, other)
        return self._leaves(), value

    def _refuse_larger(self, left: list[Any], right: list[Any], what: str) -> None:
        for (path, _), mine, other in zip(self._walk(), left, right, strict=True):
            if mine.is_nested:
                # The write itself compares the rows.
                continue
            if other.is_nested:
                raise RuntimeError(f"entry {joined(path)!r}: {what} cannot write a ragged result into a dense leaf")
            pairs = zip(reversed(mine.shape), reversed(other.shape), strict=False)
            fits = other.dim() <= mine.dim() and all(theirs in (1, size) for size, theirs in pairs)
            if not fits:
                raise RuntimeError(
                    f"entry {joined(path)!r}: {what} writes into a leaf of shape {list(mine.shape)}, but the other "
                    f"operand has shape {list(other.shape)}, which does not broadcast to it"
                )


def _list_shapes(leaves: list[Any]) -> list[Any]:
    """Return the shapes of leaves; `None` for a ragged leaf if one of them is a strided nested tensor."""
    try:
        return list(map(Tensor.size, leaves))
    except RuntimeError:
        return [None if leaf.is_nested else leaf.shape for leaf in leaves]


def _bind(
    one: One, what: str, many: Many = None, alpha: float | None = None, value: float | None = None
) -> tuple[One, Many]:
    """Return a function of a leaf, and the function of lists, by default torch's of the name `what`.

    `alpha`, the factor of the other operand, and `value`, the factor of a product, are bound to both functions.
    """
    many = many or internals.on_lists.get(what)
    if value is not None:
        return partial(one, value=value), None if many is None else partial(many, value=value)
    return (one, many) if alpha is None else (partial(one, alpha=alpha), partial(_call_on_lists, many, alpha=alpha))


def _call_on_lists(many: Any, left: list[Tensor], right: object, **options: Any) -> Any:
    """Call a function of two lists. Raises a `TypeError` for a number, which compiled code would raise too late."""
    if type(right) is not list:
        raise TypeError(f"torch cannot do this for a list of tensors and {right!r} in one call")
    return many(left, right, **options)


def _foreach_rsub(left: list[Tensor], right: Any, **alpha: Any) -> Any:
    return _call_on_lists(lambda left, right: internals.on_lists["sub"](right, left, **alpha), left, right)


def _rdiv(leaf: Tensor, other: Operand) -> Tensor:
    return other / leaf


def _foreach_rdiv(left: list[Tensor], right: object) -> Any:
    if type(right) is list:
        return internals.on_lists["div"](right, left)
    # Torch divides a number by a tensor in the same two steps, so the results are equal to the last bit.
    return internals.on_lists["mul"](internals.on_lists["reciprocal"](left), foreach.convert_number(left, right))


def _rfloordiv(leaf: Tensor, other: Operand) -> Tensor:
    return other // leaf


def _rmod(leaf: Tensor, other: Operand) -> Tensor:
    return other % leaf


def _rpow(leaf: Tensor, other: Operand) -> Tensor:
    return torch.pow(other, leaf)


def _foreach_rpow(left: list[Tensor], right: Any) -> Any:
    return internals.on_lists["pow"](right, left)


def _clamp(leaf: Tensor, low: Any, high: Any) -> Tensor:
    # Both bounds decide the dtype in one call: -1 is 255 in uint8. It takes two tensors or two numbers.
    if isinstance(low, Tensor) != isinstance(high, Tensor):
        # A number as a tensor would be float32 and lose digits. Compiled code drops the sum, which tells the dtype.
        dtype = (leaf + high).dtype if torch.compiler.is_compiling() else torch.result_type(leaf, high)
        return torch.clamp_max(torch.clamp_min(leaf.to(dtype), low), high)
    return torch.clamp(leaf, low, high)


def _foreach_clamp(left: list[Tensor], low: Any, high: Any) -> Any:
    if type(low) is list or type(high) is list:
        lows, highs = [bound if type(bound) is list else [bound] * len(left) for bound in (low, high)]
        rows = list(zip(left, lows, highs, strict=True))
        if any(leaf.dtype is not getattr(bound, "dtype", None) for leaf, *bounds in rows for bound in bounds):
            return [_clamp(*row) for row in rows]
    elif type(high) is float and type(low) is int:
        low = float(low)
    clamped = internals.on_lists["clamp_min"](left, low)
    if type(low) is type(high) is not list:
        # The first call has promoted the dtypes already.
        internals.on_lists["clamp_max_"](clamped, high)
        return clamped
    return internals.on_lists["clamp_max"](clamped, high)


def _maximum(leaf: Tensor, other: Operand) -> Tensor:
    return torch.maximum(leaf, other) if isinstance(other, Tensor) else torch.clamp_min(leaf, other)


def _minimum(leaf: Tensor, other: Operand) -> Tensor:
    return torch.minimum(leaf, other) if isinstance(other, Tensor) else torch.clamp_max(leaf, other)


def _logical_and(leaf: Tensor, other: object) -> Tensor:
    return torch.logical_and(leaf, other if isinstance(other, Tensor) else torch.tensor(other))
