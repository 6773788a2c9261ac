"""The mixin of reductions such as `sum`, `mean`, `min` and `all`. `reduction_plans.py` implements them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from tensordict.core import torch_internals as internals
from tensordict.core.exceptions import ShapeError
from tensordict.ops.dims.gathering import check_out
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.entries.write_plans import raise_no_entry
from tensordict.ops.math.reduction_plans import (
    Casts,
    Dims,
    KeyTransform,
    Op,
    Quantiles,
    Reduction,
    ReductionBase,
    Spreads,
    Sums,
    apply_along,
    flatten_features,
    is_feature,
    list_rows,
    plan_along,
    plan_everything,
    plan_same_size,
    reduce_to_bool,
    refuse_keepdim,
    rename_keys,
    stack_rows,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from tensordict.core.annotations import No, Off, On

    SelfT = TypeVar("SelfT", bound="Reducing")


class Reducing(ReductionBase):
    """Reductions. All of them take the same arguments:

    dim: the dims to reduce. A batch dim, by number or by name, or a tuple of batch dims; `"feature"` for all feature
        dims; without it (or with `None`), all elements of each leaf.
    keepdim: keep the reduced dims, with size 1. Not with `"feature"`.
    reduce: also reduce across leaves, to one tensor. Over batch dims, the leaves must have the same shape, and are
        concatenated along the first reduced dim. Otherwise, all their elements are concatenated.

    They return a new, unlocked container with the names of the remaining dims, or a tensor with `reduce=True`. A dim
    out of range, or an unknown name, is an `IndexError`. An error of torch keeps its type, and its message is prefixed
    with the key of the entry.

    A ragged entry can be reduced over all its elements and, row by row, over its feature dims, but not over its rows. A
    lazy stack whose members have an entry in different shapes can be reduced over all elements. Over feature dims, and
    along other dims than the stack dim, each member is reduced, and the result is a lazy stack again.

    Small entries of the same shape may be reduced in one call. Their results then share one block of memory.
    """

    # --- sums and means ---------------------------------------------------------------------------------------------

    @overload
    def sum(self: SelfT, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Sums]) -> SelfT: ...
    @overload
    def sum(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Sums]) -> Tensor: ...
    @overload
    def sum(
        self: SelfT, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Sums]
    ) -> SelfT | Tensor: ...
    def sum(
        self: SelfT,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> SelfT | Tensor:
        """Sum the elements.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3, 4), "b": torch.ones(2, 3)}, [2, 3], names=["env", "time"])
            >>> td.sum("time")["a"].shape, td.sum(0).names
            (torch.Size([2, 4]), ['time'])
            >>> td.sum()["b"], td.sum(dim="feature")["a"][0]
            (tensor(6.), tensor([4., 4., 4.]))
            >>> td.sum(reduce=True)
            tensor(30.)

        Args:
            dim: a batch dim or a tuple of batch dims, by number or by name; or `"feature"`. By default, all elements of
                each leaf.
            keepdim: keep the reduced dims, with size 1.
            dtype: cast leaves to this dtype first. By default, integers and bools are summed as int64.
            reduce: also sum across leaves, and return one tensor.
            key_transform: called with the name of each entry, level by level. Returns the (nested) key in the result.

        Returns:
            a new container with the remaining batch dims and their names; a tensor with `reduce=True`.

        Raises:
            IndexError: a dim is out of range, or a name is unknown.
            RuntimeError: with `reduce=True` and batch dims, the leaves differ in shape. The error names them.
        """
        how = _SUM if dtype is None else Reduction(partial(Tensor.sum, dtype=dtype), combine=Tensor.sum)
        return self._reduce(how, dim, keepdim, reduce, key_transform)

    @overload
    def nansum(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Casts]) -> Self: ...
    @overload
    def nansum(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Casts]) -> Tensor: ...
    @overload
    def nansum(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Casts]
    ) -> Self | Tensor: ...
    def nansum(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
    ) -> Self | Tensor:
        """Sum the elements, ignoring NaN. Arguments as for :meth:`sum`."""
        op = Tensor.nansum if dtype is None else partial(Tensor.nansum, dtype=dtype)
        return self._reduce(Reduction(op, combine=Tensor.sum), dim, keepdim, reduce)

    @overload
    def mean(self: SelfT, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Sums]) -> SelfT: ...
    @overload
    def mean(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Sums]) -> Tensor: ...
    @overload
    def mean(
        self: SelfT, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Sums]
    ) -> SelfT | Tensor: ...
    def mean(
        self: SelfT,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> SelfT | Tensor:
        """Average the elements. With `reduce=True`, the elements of all leaves have the same weight.

        Arguments as for :meth:`sum`. Integers need `dtype`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.tensor([1.0, 2.0]), n={"b": torch.tensor(6.0)})
            >>> td.mean()["a"], td.mean(reduce=True)
            (tensor(1.5000), tensor(3.))
            >>> list(td.mean(key_transform=lambda name: f"mean_{name}").keys(True, True))
            ['mean_a', ('mean_n', 'mean_b')]
        """
        how = _MEAN if dtype is None else Reduction(partial(Tensor.mean, dtype=dtype), stacked=True)
        return self._reduce(how, dim, keepdim, reduce, key_transform)

    @overload
    def nanmean(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Casts]) -> Self: ...
    @overload
    def nanmean(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Casts]) -> Tensor: ...
    @overload
    def nanmean(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Casts]
    ) -> Self | Tensor: ...
    def nanmean(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
    ) -> Self | Tensor:
        """Average the elements, ignoring NaN. Arguments as for :meth:`mean`."""
        op = Tensor.nanmean if dtype is None else partial(Tensor.nanmean, dtype=dtype)
        return self._reduce(Reduction(op, stacked=True), dim, keepdim, reduce)

    @overload
    def std(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Spreads]) -> Self: ...
    @overload
    def std(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Spreads]) -> Tensor: ...
    @overload
    def std(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Spreads]
    ) -> Self | Tensor: ...
    def std(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Self | Tensor:
        """Compute the standard deviation of the elements.

        Args:
            dim, keepdim, reduce, key_transform: as for :meth:`sum`.
            correction: subtracted from the number of elements before dividing by it.
        """
        how = _STD if correction == 1 else Reduction(partial(_call_with_correction, torch.std, correction))
        return self._reduce(how, dim, keepdim, reduce, key_transform)

    @overload
    def var(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Spreads]) -> Self: ...
    @overload
    def var(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Spreads]) -> Tensor: ...
    @overload
    def var(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Spreads]
    ) -> Self | Tensor: ...
    def var(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        correction: int = 1,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Self | Tensor:
        """Compute the variance of the elements. Arguments as for :meth:`std`."""
        how = _VAR if correction == 1 else Reduction(partial(_call_with_correction, torch.var, correction))
        return self._reduce(how, dim, keepdim, reduce, key_transform)

    @overload
    def prod(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Casts]) -> Self: ...
    @overload
    def prod(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Casts]) -> Tensor: ...
    @overload
    def prod(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Casts]
    ) -> Self | Tensor: ...
    def prod(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
    ) -> Self | Tensor:
        """Multiply the elements. Arguments as for :meth:`sum`."""
        op = _prod if dtype is None else partial(_prod, dtype=dtype)
        return self._reduce(Reduction(op, combine=Tensor.prod), dim, keepdim, reduce)

    def logsumexp(self, dim: object = None, keepdim: bool = False, *, out: object = None) -> Self:
        """Compute the logarithm of the sum of the exponentials along batch dims, without overflow.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(4, 2)}, [4]).logsumexp(0)["a"]
            tensor([1.3863, 1.3863])

        Args:
            dim: a batch dim or a tuple of batch dims, by number or by name; all batch dims by default.
            keepdim: keep the reduced dims, with size 1.
            out: a container of the resulting batch size, to write the result into in place.

        Returns:
            a new container with the remaining batch dims and their names, or `out`.
        """
        dims = tuple(range(len(self._batch_size))) if dim is None else self._dims(dim)
        if not dims:
            raise ShapeError("logsumexp reduces batch dims, but the container lacks them (batch_size=[])")
        result = self._run_plan(plan_along(_LOGSUMEXP, keepdim, dims))
        return result if out is None else _update_out(out, result)

    def norm(
        self, *, out: object = None, dtype: torch.dtype | None = None, key_transform: KeyTransform | None = None
    ) -> Self:
        """Compute the Euclidean norm of each leaf.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.tensor([3.0, 4.0])).norm()["a"]
            tensor(5.)

        Args:
            out: a container without batch dims, to write the result into in place.
            dtype: cast leaves to this dtype first.
            key_transform: as for :meth:`sum`.

        Returns:
            a new container of scalars without batch dims, locked if this container is; or `out`.

        Raises:
            RuntimeError: a leaf is neither floating point nor complex.
        """
        how = Reduction(
            partial(torch.linalg.vector_norm, dtype=dtype), many=partial(internals.on_lists["norm"], ord=2, dtype=dtype)
        )
        result = rename_keys(self._run_plan(plan_everything(how)), key_transform)
        return self._same_lock(result) if out is None else _update_out(out, result)

    # --- extremes and quantiles -------------------------------------------------------------------------------------

    @overload
    def amin(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ...) -> Self: ...
    @overload
    def amin(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On) -> Tensor: ...
    @overload
    def amin(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None) -> Self | Tensor: ...
    def amin(self, dim: Dims = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None) -> Self | Tensor:
        """Find the smallest element. Arguments as for :meth:`sum`."""
        return self._reduce(_AMIN, dim, keepdim, reduce)

    @overload
    def amax(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ...) -> Self: ...
    @overload
    def amax(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On) -> Tensor: ...
    @overload
    def amax(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None) -> Self | Tensor: ...
    def amax(self, dim: Dims = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None) -> Self | Tensor:
        """Find the largest element. Arguments as for :meth:`sum`."""
        return self._reduce(_AMAX, dim, keepdim, reduce)

    @overload
    def min(self, dim: None = ..., keepdim: bool = ..., *, reduce: Off = ..., return_indices: bool = ...) -> Self: ...
    @overload
    def min(self, dim: None = ..., keepdim: bool = ..., *, reduce: On, return_indices: bool = ...) -> Tensor: ...
    @overload
    def min(
        self, dim: int | str, keepdim: bool = ..., *, reduce: bool | None = ..., return_indices: On = ...
    ) -> torch.return_types.min: ...
    @overload
    def min(self, dim: Dims, keepdim: bool = ..., *, reduce: Off = ..., return_indices: No) -> Self: ...
    @overload
    def min(self, dim: Dims, keepdim: bool = ..., *, reduce: On, return_indices: No) -> Tensor: ...
    def min(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Find the smallest element and its position.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> values, indices = TensorDict({"a": torch.tensor([[3, 1], [2, 4]])}, [2]).min(dim=0)
            >>> values["a"], indices["a"]
            (tensor([2, 1]), tensor([1, 0]))

        Args:
            dim: one batch dim, by number or by name; or `"feature"`. Without it, the smallest element of each leaf.
            keepdim: keep the reduced dim, with size 1.
            reduce: also reduce across leaves, and return tensors.
            return_indices: with `False`, return the values only, like :meth:`amin`. This allows several dims.

        Returns:
            with `dim`, a `torch.return_types.min` of two containers, `values` and `indices`. The indices are positions
            along the dim. For `"feature"` they count the flattened feature elements; with `reduce=True`, the
            concatenated leaves. Without `dim`, the values alone.
        """
        if not return_indices or dim is NO_DEFAULT or dim is None:
            return self.amin(dim, keepdim, reduce=reduce)
        return self._find_extremes(Tensor.min, torch.return_types.min, dim, keepdim, reduce)

    @overload
    def max(self, dim: None = ..., keepdim: bool = ..., *, reduce: Off = ..., return_indices: bool = ...) -> Self: ...
    @overload
    def max(self, dim: None = ..., keepdim: bool = ..., *, reduce: On, return_indices: bool = ...) -> Tensor: ...
    @overload
    def max(
        self, dim: int | str, keepdim: bool = ..., *, reduce: bool | None = ..., return_indices: On = ...
    ) -> torch.return_types.max: ...
    @overload
    def max(self, dim: Dims, keepdim: bool = ..., *, reduce: Off = ..., return_indices: No) -> Self: ...
    @overload
    def max(self, dim: Dims, keepdim: bool = ..., *, reduce: On, return_indices: No) -> Tensor: ...
    def max(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = False,
        *,
        reduce: bool | None = None,
        return_indices: bool = True,
    ) -> Any:
        """Find the largest element and its position. Arguments and result as for :meth:`min`."""
        if not return_indices or dim is NO_DEFAULT or dim is None:
            return self.amax(dim, keepdim, reduce=reduce)
        return self._find_extremes(Tensor.max, torch.return_types.max, dim, keepdim, reduce)

    @overload
    def cummin(
        self, dim: Dims, *, reduce: bool | None = ..., return_indices: On = ...
    ) -> torch.return_types.cummin: ...
    @overload
    def cummin(self, dim: Dims, *, reduce: Off = ..., return_indices: No) -> Self: ...
    @overload
    def cummin(self, dim: Dims, *, reduce: On, return_indices: No) -> Tensor: ...
    def cummin(self, dim: object, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Find the smallest element up to each position along a batch dim, and its position.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.tensor([3, 1, 2])}, [3]).cummin(0).values["a"]
            tensor([3, 1, 1])

        Args:
            dim: the batch dim, by number or by name.
            reduce: concatenate the leaves along the dim first, and return tensors.
            return_indices: with `False`, return the values only.

        Returns:
            a `torch.return_types.cummin` of two containers of the same shape as this one, `values` and `indices`.
        """
        return self._accumulate(Tensor.cummin, torch.return_types.cummin, dim, reduce, return_indices)

    @overload
    def cummax(
        self, dim: Dims, *, reduce: bool | None = ..., return_indices: On = ...
    ) -> torch.return_types.cummax: ...
    @overload
    def cummax(self, dim: Dims, *, reduce: Off = ..., return_indices: No) -> Self: ...
    @overload
    def cummax(self, dim: Dims, *, reduce: On, return_indices: No) -> Tensor: ...
    def cummax(self, dim: object, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """Find the largest element up to each position along a batch dim. Arguments as for :meth:`cummin`."""
        return self._accumulate(Tensor.cummax, torch.return_types.cummax, dim, reduce, return_indices)

    @overload
    def quantile(
        self, q: float | Tensor, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Quantiles]
    ) -> Self: ...
    @overload
    def quantile(
        self, q: float | Tensor, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Quantiles]
    ) -> Tensor: ...
    @overload
    def quantile(
        self, q: float | Tensor, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Quantiles]
    ) -> Self | Tensor: ...
    def quantile(
        self,
        q: float | Tensor,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        interpolation: str = "linear",
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Self | Tensor:
        """Compute quantiles: the value below which the fraction `q` of the elements lies.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.tensor([0.0, 1.0, 5.0])}, [3])
            >>> td.quantile(0.5, dim=0)["a"], td.quantile(torch.tensor([0.0, 1.0])).batch_size
            (tensor(1.), torch.Size([2]))

        Args:
            q: a number between 0 and 1; or a tensor of one dim, which adds a first dim of quantiles to the result.
            dim, keepdim, reduce, key_transform: as for :meth:`sum`.
            interpolation: the value between two elements: `"linear"`, `"lower"`, `"higher"`, `"midpoint"` or
                `"nearest"`.
        """
        added = len(q) if isinstance(q, Tensor) and q.dim() else None
        how = Reduction(partial(_quantile, q, interpolation), stacked=True, added=added)
        return self._reduce(how, dim, keepdim, reduce, key_transform)

    # --- softmax, all and any ---------------------------------------------------------------------------------------

    def softmax(self, dim: object, dtype: torch.dtype | None = None) -> Self:
        """Compute exponentials that are scaled to sum to 1 along a batch dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(4)}, [4]).softmax(0)["a"]
            tensor([0.2500, 0.2500, 0.2500, 0.2500])

        Args:
            dim: the batch dim, by number or by name.
            dtype: cast leaves to this dtype first.

        Raises:
            IndexError: the dim is out of range, or the name is unknown.
        """
        how = Reduction(partial(_softmax, dtype))
        return self._run_plan(plan_same_size(lambda dims: partial(apply_along, how, dims, False), (self._dim(dim),)))

    @overload
    def all(self, dim: None = ..., keepdim: bool = ...) -> bool: ...
    @overload
    def all(self, dim: int | str | tuple[int | str, ...], keepdim: bool = ...) -> Self: ...
    def all(self, dim: Any = None, keepdim: bool = False) -> Self | bool:
        """Test whether all elements are true (non-zero).

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.tensor([[1, 1], [0, 1]])}, [2])
            >>> td.all(), td.all(dim=0)["a"]
            (False, tensor([False,  True]))

        Args:
            dim: a batch dim or a tuple of batch dims, by number or by name; or `"feature"`. `None` tests the elements
                of all leaves together.
            keepdim: keep the reduced dims, with size 1.

        Returns:
            a `bool` without `dim`; otherwise a container of bools without the reduced dims.

        Raises:
            IndexError: a dim is out of range, or a name is unknown.
        """
        if dim is not None:
            return self._run_plan(self._plan(_ALL, dim, keepdim))
        refuse_keepdim(keepdim, "everything is reduced to one bool")
        return reduce_to_bool(self._leaves(), Tensor.all, False)

    @overload
    def any(self, dim: None = ..., keepdim: bool = ...) -> bool: ...
    @overload
    def any(self, dim: int | str | tuple[int | str, ...], keepdim: bool = ...) -> Self: ...
    def any(self, dim: Any = None, keepdim: bool = False) -> Self | bool:
        """Test whether any element is true (non-zero). Arguments and result as for :meth:`all`."""
        if dim is not None:
            return self._run_plan(self._plan(_ANY, dim, keepdim))
        refuse_keepdim(keepdim, "everything is reduced to one bool")
        return reduce_to_bool(self._leaves(), Tensor.any, True)

    # --- values and indices -----------------------------------------------------------------------------------------

    def _find_extremes(self, op: Op, result_type: Any, dim: Any, keepdim: bool, reduce: bool | None) -> Any:
        """Run `op`, which returns values and indices, along one batch dim or along the feature dims."""
        if is_feature(dim):
            refuse_keepdim(keepdim, "dim='feature' removes the feature dims")
            if reduce:
                return self._call_on_all(op, self._concatenate_features(), -1)
            return result_type(self._run_pair_plan(plan_same_size(lambda _: partial(_reduce_features, op), ())))
        at = self._as_single_dim(dim)
        if reduce:
            return self._call_on_all(op, self._concatenate_leaves(at), at, keepdim)
        return result_type(self._run_pair_plan(plan_along(Reduction(op), keepdim, (at,))))

    def _accumulate(self, op: Op, result_type: Any, dim: object, reduce: bool | None, return_indices: bool) -> Any:
        at = self._as_single_dim(dim)
        if reduce:
            pair = self._call_on_all(op, self._concatenate_leaves(at), at)
        else:
            how = Reduction(op)
            plan = plan_same_size(lambda dims: partial(apply_along, how, dims, False), (at,))
            pair = result_type(self._run_pair_plan(plan))
        return pair if return_indices else pair.values

    def _as_single_dim(self, dim: object) -> int:
        """Return the only dim that is named, non-negative. Raises for several dims."""
        dims = self._dims(dim)
        if len(dims) != 1:
            raise TypeError(f"indices are positions along one dim, got dim={dim}; amin and amax take several dims")
        return dims[0]


def _call_with_correction(fn: Op, correction: int, leaf: Tensor, dims: object = None, keepdim: bool = False) -> Any:
    """Call `fn`, which is `torch.std` or `torch.var`, with a correction."""
    return fn(leaf, dims, correction=correction, keepdim=keepdim)


def _call_with_bessel(method: Op, leaf: Tensor, dims: object = None, keepdim: bool = False) -> Any:
    """Call `Tensor.std` or `Tensor.var` with a correction of 1. Torch parses these arguments 0.6 us faster."""
    return method(leaf) if dims is None else method(leaf, dims, True, keepdim)


_SUM = Reduction(Tensor.sum, combine=Tensor.sum)
_MEAN = Reduction(Tensor.mean, stacked=True)
_STD = Reduction(partial(_call_with_bessel, Tensor.std))
_VAR = Reduction(partial(_call_with_bessel, Tensor.var))
_LOGSUMEXP = Reduction(Tensor.logsumexp, stacked=True)
_AMIN = Reduction(Tensor.amin, combine=Tensor.amin)
_AMAX = Reduction(Tensor.amax, combine=Tensor.amax, many=internals.on_lists["max"])
_ALL = Reduction(Tensor.all, stacked=True)
_ANY = Reduction(Tensor.any, stacked=True)


def _reduce_features(op: Op, leaves: list[Any], batch_dims: int) -> list[Any]:
    """Call `op`, which takes one dim and returns values and indices, on the flattened feature dims of each leaf."""
    return [
        _reduce_rows(op, leaf, batch_dims) if leaf.is_nested else op(flatten_features(leaf, batch_dims), -1)
        for leaf in leaves
    ]


def _reduce_rows(op: Op, leaf: object, batch_dims: int) -> tuple[Tensor, Tensor]:
    """Call `op` on the feature dims of each row of a ragged leaf. On the whole leaf, torch would include padding."""
    pairs = [op(flatten_features(row, batch_dims - 1), -1) for row in list_rows(leaf, batch_dims)]
    return stack_rows([pair[0] for pair in pairs], leaf), stack_rows([pair[1] for pair in pairs], leaf)


def _softmax(dtype: torch.dtype | None, leaf: Tensor, dim: int, keepdim: bool = True) -> Tensor:
    """Call `torch.softmax` with the arguments of a reduction. It always keeps the dim."""
    return leaf.softmax(dim) if dtype is None else leaf.softmax(dim, dtype)


def _prod(leaf: Tensor, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """Call `torch.prod`, also along several dims, which torch does not support."""
    if dims is None:
        return leaf.prod(dtype=dtype)
    if dims == ():
        # Reduce an added dim, so that the dtype changes as it does for other leaves.
        return leaf.unsqueeze(-1).prod(-1, dtype=dtype)
    for dim in sorted(dims, reverse=True) if type(dims) is tuple else (dims,):
        leaf = leaf.prod(dim, keepdim, dtype=dtype)
    return leaf


def _quantile(q: Any, interpolation: str, leaf: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
    """Call `torch.quantile`, also along several dims, which torch does not support."""
    if type(dims) is not tuple:
        return leaf.quantile(q, dims, keepdim, interpolation=interpolation)
    merged = leaf.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)) if dims else leaf.unsqueeze(-1)
    result = merged.quantile(q, -1, interpolation=interpolation)
    if keepdim:
        added = result.dim() - merged.dim() + 1
        for dim in sorted(dims):
            result = result.unsqueeze(dim + added)
    return result


def _update_out(out: Any, result: Reducing) -> Any:
    """Write `result` into `out` in place. Raises if `out` lacks one of its entries."""
    check_out(out, result._batch_size)
    for path, _ in result._walk():
        if not out._has(path):
            raise_no_entry(path, out)
    return out.update_(result)
