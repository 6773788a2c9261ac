"""Functions of one operand, element by element: `abs` ... `trunc`, in place and not, and tests of each element."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tensordict.core import foreach
from tensordict.core import torch_internals as internals
from tensordict.core.foreach import Many, One
from tensordict.ops.storing.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self


class Pointwise(Leaves):
    """Functions of each element.

    Those without an underscore at the end give a new container over new leaves, with the batch size, device and names
    of this one, locked if this one is; the dtype of each leaf is what torch makes of it. Those with one write into the
    leaves, which a locked container allows.
    """

    def abs(self) -> Self:
        """The absolute value of each element.

        Raises:
            RuntimeError: torch does not define it for the dtype of an entry; the entry is named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.tensor([-1.0, 2.0]), "b": {"c": torch.tensor([-3, 0])}}, [2]).abs()["b", "c"]
            tensor([3, 0])
        """
        return self._pointwise(torch.abs, internals.foreach_abs)

    def abs_(self) -> Self:
        """As :meth:`abs`, in place; returns the same container.

        Raises:
            RuntimeError: the result does not fit the dtype of an entry, or the entry is a leaf of the autograd graph
                that requires grad; the entry is named and nothing has changed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.tensor([-1.0, 2.0])).lock_()
            >>> td.abs_() is td, td["a"]
            (True, tensor([1., 2.]))
        """
        return self._pointwise_(Tensor.abs_, internals.foreach_abs_)

    def acos(self) -> Self:
        """The arc cosine of each element, in radians."""
        return self._pointwise(torch.acos, internals.foreach_acos)

    def acos_(self) -> Self:
        """As :meth:`acos`, in place; returns the same container."""
        return self._pointwise_(Tensor.acos_, internals.foreach_acos_)

    def asin(self) -> Self:
        """The arc sine of each element, in radians."""
        return self._pointwise(torch.asin, internals.foreach_asin)

    def asin_(self) -> Self:
        """As :meth:`asin`, in place; returns the same container."""
        return self._pointwise_(Tensor.asin_, internals.foreach_asin_)

    def atan(self) -> Self:
        """The arc tangent of each element, in radians."""
        return self._pointwise(torch.atan, internals.foreach_atan)

    def atan_(self) -> Self:
        """As :meth:`atan`, in place; returns the same container."""
        return self._pointwise_(Tensor.atan_, internals.foreach_atan_)

    def ceil(self) -> Self:
        """Each element rounded up to an integer."""
        return self._pointwise(torch.ceil, internals.foreach_ceil)

    def ceil_(self) -> Self:
        """As :meth:`ceil`, in place; returns the same container."""
        return self._pointwise_(Tensor.ceil_, internals.foreach_ceil_)

    def cos(self) -> Self:
        """The cosine of each element, which is in radians."""
        return self._pointwise(torch.cos, internals.foreach_cos)

    def cos_(self) -> Self:
        """As :meth:`cos`, in place; returns the same container."""
        return self._pointwise_(Tensor.cos_, internals.foreach_cos_)

    def cosh(self) -> Self:
        """The hyperbolic cosine of each element."""
        return self._pointwise(torch.cosh, internals.foreach_cosh)

    def cosh_(self) -> Self:
        """As :meth:`cosh`, in place; returns the same container."""
        return self._pointwise_(Tensor.cosh_, internals.foreach_cosh_)

    def erf(self) -> Self:
        """The error function of each element."""
        return self._pointwise(torch.erf, internals.foreach_erf)

    def erf_(self) -> Self:
        """As :meth:`erf`, in place; returns the same container."""
        return self._pointwise_(Tensor.erf_, internals.foreach_erf_)

    def erfc(self) -> Self:
        """The complement of the error function, `1 - erf(x)`, of each element."""
        return self._pointwise(torch.erfc, internals.foreach_erfc)

    def erfc_(self) -> Self:
        """As :meth:`erfc`, in place; returns the same container."""
        return self._pointwise_(Tensor.erfc_, internals.foreach_erfc_)

    def exp(self) -> Self:
        """The exponential of each element."""
        return self._pointwise(torch.exp, internals.foreach_exp)

    def exp_(self) -> Self:
        """As :meth:`exp`, in place; returns the same container."""
        return self._pointwise_(Tensor.exp_, internals.foreach_exp_)

    def expm1(self) -> Self:
        """`exp(x) - 1` of each element, exact near zero."""
        return self._pointwise(torch.expm1, internals.foreach_expm1)

    def expm1_(self) -> Self:
        """As :meth:`expm1`, in place; returns the same container."""
        return self._pointwise_(Tensor.expm1_, internals.foreach_expm1_)

    def floor(self) -> Self:
        """Each element rounded down to an integer."""
        return self._pointwise(torch.floor, internals.foreach_floor)

    def floor_(self) -> Self:
        """As :meth:`floor`, in place; returns the same container."""
        return self._pointwise_(Tensor.floor_, internals.foreach_floor_)

    def frac(self) -> Self:
        """The fractional part of each element, with its sign."""
        return self._pointwise(torch.frac, internals.foreach_frac)

    def frac_(self) -> Self:
        """As :meth:`frac`, in place; returns the same container."""
        return self._pointwise_(Tensor.frac_, internals.foreach_frac_)

    def lgamma(self) -> Self:
        """The logarithm of the absolute value of the gamma function of each element."""
        return self._pointwise(torch.lgamma, internals.foreach_lgamma)

    def lgamma_(self) -> Self:
        """As :meth:`lgamma`, in place; returns the same container."""
        return self._pointwise_(Tensor.lgamma_, internals.foreach_lgamma_)

    def log(self) -> Self:
        """The natural logarithm of each element."""
        return self._pointwise(torch.log, internals.foreach_log)

    def log_(self) -> Self:
        """As :meth:`log`, in place; returns the same container."""
        return self._pointwise_(Tensor.log_, internals.foreach_log_)

    def log10(self) -> Self:
        """The logarithm to the base 10 of each element."""
        return self._pointwise(torch.log10, internals.foreach_log10)

    def log10_(self) -> Self:
        """As :meth:`log10`, in place; returns the same container."""
        return self._pointwise_(Tensor.log10_, internals.foreach_log10_)

    def log1p(self) -> Self:
        """`log(1 + x)` of each element, exact near zero."""
        return self._pointwise(torch.log1p, internals.foreach_log1p)

    def log1p_(self) -> Self:
        """As :meth:`log1p`, in place; returns the same container."""
        return self._pointwise_(Tensor.log1p_, internals.foreach_log1p_)

    def log2(self) -> Self:
        """The logarithm to the base 2 of each element."""
        return self._pointwise(torch.log2, internals.foreach_log2)

    def log2_(self) -> Self:
        """As :meth:`log2`, in place; returns the same container."""
        return self._pointwise_(Tensor.log2_, internals.foreach_log2_)

    def neg(self) -> Self:
        """Each element with the other sign."""
        return self._pointwise(torch.neg, internals.foreach_neg)

    def neg_(self) -> Self:
        """As :meth:`neg`, in place; returns the same container."""
        return self._pointwise_(Tensor.neg_, internals.foreach_neg_)

    def reciprocal(self) -> Self:
        """`1 / x` of each element."""
        return self._pointwise(torch.reciprocal, internals.foreach_reciprocal)

    def reciprocal_(self) -> Self:
        """As :meth:`reciprocal`, in place; returns the same container."""
        return self._pointwise_(Tensor.reciprocal_, internals.foreach_reciprocal_)

    def round(self) -> Self:
        """Each element rounded to the nearest integer, halves to the even one."""
        return self._pointwise(torch.round, internals.foreach_round)

    def round_(self) -> Self:
        """As :meth:`round`, in place; returns the same container."""
        return self._pointwise_(Tensor.round_, internals.foreach_round_)

    def sigmoid(self) -> Self:
        """The logistic function, `1 / (1 + exp(-x))`, of each element."""
        return self._pointwise(torch.sigmoid, internals.foreach_sigmoid)

    def sigmoid_(self) -> Self:
        """As :meth:`sigmoid`, in place; returns the same container."""
        return self._pointwise_(Tensor.sigmoid_, internals.foreach_sigmoid_)

    def sign(self) -> Self:
        """The sign of each element: -1, 0 or 1."""
        return self._pointwise(torch.sign, internals.foreach_sign)

    def sign_(self) -> Self:
        """As :meth:`sign`, in place; returns the same container."""
        return self._pointwise_(Tensor.sign_, internals.foreach_sign_)

    def sin(self) -> Self:
        """The sine of each element, which is in radians."""
        return self._pointwise(torch.sin, internals.foreach_sin)

    def sin_(self) -> Self:
        """As :meth:`sin`, in place; returns the same container."""
        return self._pointwise_(Tensor.sin_, internals.foreach_sin_)

    def sinh(self) -> Self:
        """The hyperbolic sine of each element."""
        return self._pointwise(torch.sinh, internals.foreach_sinh)

    def sinh_(self) -> Self:
        """As :meth:`sinh`, in place; returns the same container."""
        return self._pointwise_(Tensor.sinh_, internals.foreach_sinh_)

    def sqrt(self) -> Self:
        """The square root of each element."""
        return self._pointwise(torch.sqrt, internals.foreach_sqrt)

    def sqrt_(self) -> Self:
        """As :meth:`sqrt`, in place; returns the same container."""
        return self._pointwise_(Tensor.sqrt_, internals.foreach_sqrt_)

    def tan(self) -> Self:
        """The tangent of each element, which is in radians."""
        return self._pointwise(torch.tan, internals.foreach_tan)

    def tan_(self) -> Self:
        """As :meth:`tan`, in place; returns the same container."""
        return self._pointwise_(Tensor.tan_, internals.foreach_tan_)

    def tanh(self) -> Self:
        """The hyperbolic tangent of each element."""
        return self._pointwise(torch.tanh, internals.foreach_tanh)

    def tanh_(self) -> Self:
        """As :meth:`tanh`, in place; returns the same container."""
        return self._pointwise_(Tensor.tanh_, internals.foreach_tanh_)

    def trunc(self) -> Self:
        """Each element rounded towards zero to an integer."""
        return self._pointwise(torch.trunc, internals.foreach_trunc)

    def trunc_(self) -> Self:
        """As :meth:`trunc`, in place; returns the same container."""
        return self._pointwise_(Tensor.trunc_, internals.foreach_trunc_)

    def isfinite(self) -> Self:
        """Whether each element is neither infinite nor NaN, as a container of bools.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.tensor([1.0, float("inf"), float("nan")])).isfinite()["a"]
            tensor([ True, False, False])
        """
        return self._pointwise(_isfinite, None)

    def isnan(self) -> Self:
        """Whether each element is NaN, as a container of bools."""
        return self._pointwise(torch.isnan, None)

    def isneginf(self) -> Self:
        """Whether each element is negative infinity, as a container of bools."""
        return self._pointwise(torch.isneginf, None)

    def isposinf(self) -> Self:
        """Whether each element is positive infinity, as a container of bools."""
        return self._pointwise(torch.isposinf, None)

    def isreal(self) -> Self:
        """Whether each element has no imaginary part, as a container of bools."""
        return self._pointwise(torch.isreal, None)

    def __neg__(self) -> Self:
        return self.neg()

    def __pos__(self) -> Self:
        """The same entries in a new container, as `+tensor` is the same tensor."""
        return self._pointwise(torch.positive, None)

    def __abs__(self) -> Self:
        return self.abs()

    def _pointwise(self, one: One, many: Many) -> Self:
        """A container of this structure over `one(leaf)` for each leaf, which `many(leaves)` gives in one call."""
        leaves = self._leaves()
        return self._same_lock(self._rebuilt(iter(foreach.results(self, one, many, leaves))))

    def _pointwise_(self, one: One, many: Many) -> Self:
        """As :meth:`_pointwise`, for functions that write into the leaves."""
        foreach.write(self, one, many, self._leaves())
        return self


def _isfinite(leaf: Tensor) -> Tensor:
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return torch.isfinite(leaf)
    # Only a finite number less itself is zero. Torch takes four passes over the leaf and 5.0 us, this two and 2.1 us.
    return torch.logical_not(leaf - leaf)
