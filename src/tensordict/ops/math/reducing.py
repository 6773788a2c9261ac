"""Reductions: over batch dims, over feature dims, over all elements of each leaf, or over all leaves at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

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
    along,
    apply_along,
    is_feature,
    of_all,
    one_feature_dim,
    over_everything,
    refuse_keepdim,
    restacked,
    rows_of,
    staying,
    with_keys,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    # A flag that is set, one that is not, and one that need not be given.
    On = Literal[True]
    No = Literal[False]
    Off = Literal[False] | None


class Reducing(ReductionBase):
    """Reductions. All of them take the same arguments:

    dim: what to reduce. A batch dim, by number or by name, or a tuple of them; `"feature"`, all dims that are no batch
        dims; without it (or with `None`), all elements of each leaf.
    keepdim: keep the reduced dims, with size 1. Not with `"feature"`.
    reduce: reduce across leaves too, to one tensor: over batch dims the leaves, which must have the same shape, are
        laid end to end along the first of them; over features and over everything their elements are put in one row.

    They return a new, unlocked container with the names of the dims that stay, or a tensor with `reduce=True`. A dim
    that is out of range or a name that no dim has is an `IndexError`. What torch refuses is refused with torch's
    exception type and the key of the entry in front of the message.

    A ragged entry is reduced over everything and, row by row, over its feature dims; its rows cannot be reduced to one.
    A lazy stack with an entry that its members have in different shapes is reduced over everything too; over feature
    dims, and along other dims than the stack dim, each member is reduced and the result is a lazy stack again.

    Entries that are small and of one form may be reduced in one call; their results lie in one block of memory then.
    """

    # --- sums and means ---------------------------------------------------------------------------------------------

    @overload
    def sum(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Sums]) -> Self: ...
    @overload
    def sum(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Sums]) -> Tensor: ...
    @overload
    def sum(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Sums]
    ) -> Self | Tensor: ...
    def sum(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Self | Tensor:
        """The sum of the elements.

        Args:
            dim: a batch dim or a tuple of them, by number or by name; `"feature"`; all elements of each leaf without.
            keepdim: keep the reduced dims, with size 1.
            dtype: what leaves are cast to first; by default integers and bools are summed as int64.
            reduce: sum across leaves too, and return one tensor.
            key_transform: gives the (nested) key of the result for the name of each entry, level by level.

        Returns:
            a new container with the remaining batch dims and their names, or a tensor with `reduce=True`.

        Raises:
            IndexError: there is no such dim.
            RuntimeError: with `reduce=True` and batch dims, the leaves differ in shape; they are named.

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
        """
        how = _SUM if dtype is None else Reduction(partial(Tensor.sum, dtype=dtype), combine=Tensor.sum)
        return self._reduced(how, dim, keepdim, reduce, key_transform)

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
        """The sum of the elements that are not NaN; arguments as :meth:`sum`."""
        op = Tensor.nansum if dtype is None else partial(Tensor.nansum, dtype=dtype)
        return self._reduced(Reduction(op, combine=Tensor.sum), dim, keepdim, reduce)

    @overload
    def mean(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ..., **how: Unpack[Sums]) -> Self: ...
    @overload
    def mean(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On, **how: Unpack[Sums]) -> Tensor: ...
    @overload
    def mean(
        self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None, **how: Unpack[Sums]
    ) -> Self | Tensor: ...
    def mean(
        self,
        dim: Dims = NO_DEFAULT,
        keepdim: bool = NO_DEFAULT,
        *,
        dtype: torch.dtype | None = None,
        reduce: bool | None = None,
        key_transform: KeyTransform | None = None,
    ) -> Self | Tensor:
        """The mean of the elements; with `reduce=True`, every element counts the same, whichever leaf it is in.

        Arguments as :meth:`sum`. Integers have no mean unless `dtype` is given.

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
        return self._reduced(how, dim, keepdim, reduce, key_transform)

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
        """The mean of the elements that are not NaN; arguments as :meth:`mean`."""
        op = Tensor.nanmean if dtype is None else partial(Tensor.nanmean, dtype=dtype)
        return self._reduced(Reduction(op, stacked=True), dim, keepdim, reduce)

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
        """The standard deviation of the elements; arguments as :meth:`mean`.

        Args:
            dim, keepdim, reduce, key_transform: as for :meth:`sum`.
            correction: what is taken off the number of elements before dividing by it.
        """
        how = _STD if correction == 1 else Reduction(partial(_spread, torch.std, correction))
        return self._reduced(how, dim, keepdim, reduce, key_transform)

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
        """The variance of the elements; arguments as :meth:`std`."""
        how = _VAR if correction == 1 else Reduction(partial(_spread, torch.var, correction))
        return self._reduced(how, dim, keepdim, reduce, key_transform)

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
        """The product of the elements; arguments as :meth:`sum`."""
        op = _prod if dtype is None else partial(_prod, dtype=dtype)
        return self._reduced(Reduction(op, combine=Tensor.prod), dim, keepdim, reduce)

    def logsumexp(self, dim: object = None, keepdim: bool = False, *, out: object = None) -> Self:
        """The logarithm of the sum of the exponentials along batch dims, computed without overflow.

        Args:
            dim: a batch dim or a tuple of them, by number or by name; all batch dims by default.
            keepdim: keep the reduced dims, with size 1.
            out: a container of the resulting batch size that takes the result, in place.

        Returns:
            a new container with the remaining batch dims and their names, or `out`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(4, 2)}, [4]).logsumexp(0)["a"]
            tensor([1.3863, 1.3863])
        """
        dims = tuple(range(len(self._batch_size))) if dim is None else self._dims(dim)
        if not dims:
            raise ShapeError(f"logsumexp reduces batch dims, and there is none (batch_size={list(self._batch_size)})")
        result = self._by_level(along(_LOGSUMEXP, keepdim, dims))
        return result if out is None else _into(out, result)

    def norm(
        self, *, out: object = None, dtype: torch.dtype | None = None, key_transform: KeyTransform | None = None
    ) -> Self:
        """The Euclidean norm of each leaf.

        Args:
            out: a container without batch dims that takes the result, in place.
            dtype: what leaves are cast to first.
            key_transform: as for :meth:`sum`.

        Returns:
            a new container of scalars without batch dims, locked if this one is; or `out`.

        Raises:
            RuntimeError: there are no leaves, or a leaf is neither floating point nor complex.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.tensor([3.0, 4.0])).norm()["a"]
            tensor(5.)
        """
        if not self._leaves():
            raise RuntimeError("norm: the container has no entries to take the norm of")
        how = Reduction(
            partial(torch.linalg.vector_norm, dtype=dtype), many=partial(internals.foreach_norm, ord=2, dtype=dtype)
        )
        result = with_keys(self._by_level(over_everything(how)), key_transform)
        return self._same_lock(result) if out is None else _into(out, result)

    # --- extremes and quantiles -------------------------------------------------------------------------------------

    @overload
    def amin(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ...) -> Self: ...
    @overload
    def amin(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On) -> Tensor: ...
    @overload
    def amin(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None) -> Self | Tensor: ...
    def amin(self, dim: Dims = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None) -> Self | Tensor:
        """The smallest of the elements; arguments as :meth:`sum`."""
        return self._reduced(_AMIN, dim, keepdim, reduce)

    @overload
    def amax(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: Off = ...) -> Self: ...
    @overload
    def amax(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: On) -> Tensor: ...
    @overload
    def amax(self, dim: Dims = ..., keepdim: bool = ..., *, reduce: bool | None) -> Self | Tensor: ...
    def amax(self, dim: Dims = NO_DEFAULT, keepdim: bool = False, *, reduce: bool | None = None) -> Self | Tensor:
        """The largest of the elements; arguments as :meth:`sum`."""
        return self._reduced(_AMAX, dim, keepdim, reduce)

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
        """The smallest of the elements and where it is.

        Args:
            dim: one batch dim, by number or by name; or `"feature"`. Without it, the smallest element of each leaf.
            keepdim: keep the reduced dim, with size 1.
            reduce: go across leaves too, and return tensors.
            return_indices: `False` gives the values only, as :meth:`amin`, and allows several dims.

        Returns:
            with `dim`, a `torch.return_types.min` of two containers, `values` and `indices`: positions along the dim
            (among all feature elements in a row for `"feature"`; in the leaves laid end to end with `reduce=True`).
            Without `dim`, the values alone.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> values, indices = TensorDict({"a": torch.tensor([[3, 1], [2, 4]])}, [2]).min(dim=0)
            >>> values["a"], indices["a"]
            (tensor([2, 1]), tensor([1, 0]))
        """
        if not return_indices or dim is NO_DEFAULT or dim is None:
            return self.amin(dim, keepdim, reduce=reduce)
        return self._extremes(Tensor.min, torch.return_types.min, dim, keepdim, reduce)

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
        """The largest of the elements and where it is; arguments and result as :meth:`min`."""
        if not return_indices or dim is NO_DEFAULT or dim is None:
            return self.amax(dim, keepdim, reduce=reduce)
        return self._extremes(Tensor.max, torch.return_types.max, dim, keepdim, reduce)

    @overload
    def cummin(
        self, dim: Dims, *, reduce: bool | None = ..., return_indices: On = ...
    ) -> torch.return_types.cummin: ...
    @overload
    def cummin(self, dim: Dims, *, reduce: Off = ..., return_indices: No) -> Self: ...
    @overload
    def cummin(self, dim: Dims, *, reduce: On, return_indices: No) -> Tensor: ...
    def cummin(self, dim: object, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """The smallest of the elements so far, along a batch dim, and where it is.

        Args:
            dim: the batch dim, by number or by name.
            reduce: go on from leaf to leaf, laid end to end along the dim, and return tensors.
            return_indices: `False` gives the values only.

        Returns:
            a `torch.return_types.cummin` of two containers of the shape of this one, `values` and `indices`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.tensor([3, 1, 2])}, [3]).cummin(0).values["a"]
            tensor([3, 1, 1])
        """
        return self._cumulated(Tensor.cummin, torch.return_types.cummin, dim, reduce, return_indices)

    @overload
    def cummax(
        self, dim: Dims, *, reduce: bool | None = ..., return_indices: On = ...
    ) -> torch.return_types.cummax: ...
    @overload
    def cummax(self, dim: Dims, *, reduce: Off = ..., return_indices: No) -> Self: ...
    @overload
    def cummax(self, dim: Dims, *, reduce: On, return_indices: No) -> Tensor: ...
    def cummax(self, dim: object, *, reduce: bool | None = None, return_indices: bool = True) -> Any:
        """The largest of the elements so far, along a batch dim, and where it is; arguments as :meth:`cummin`."""
        return self._cumulated(Tensor.cummax, torch.return_types.cummax, dim, reduce, return_indices)

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
        """The value below which the fraction `q` of the elements lies.

        Args:
            q: between 0 and 1; or a tensor of one dim, which gives the result a first dim with one quantile each.
            dim, keepdim, reduce, key_transform: as for :meth:`sum`.
            interpolation: `"linear"`, `"lower"`, `"higher"`, `"midpoint"` or `"nearest"`: what lies between elements.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.tensor([0.0, 1.0, 5.0])}, [3])
            >>> td.quantile(0.5, dim=0)["a"], td.quantile(torch.tensor([0.0, 1.0])).batch_size
            (tensor(1.), torch.Size([2]))
        """
        added = len(q) if isinstance(q, Tensor) and q.dim() else None
        how = Reduction(partial(_quantile, q, interpolation), stacked=True, added=added)
        return self._reduced(how, dim, keepdim, reduce, key_transform)

    # --- all dims stay ----------------------------------------------------------------------------------------------

    def softmax(self, dim: object, dtype: torch.dtype | None = None) -> Self:
        """Exponentials scaled so that they sum to 1 along a batch dim.

        Args:
            dim: the batch dim, by number or by name.
            dtype: what leaves are cast to first.

        Raises:
            IndexError: there is no such dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.zeros(4)}, [4]).softmax(0)["a"]
            tensor([0.2500, 0.2500, 0.2500, 0.2500])
        """
        how = Reduction(partial(_softmax, dtype))
        return self._by_level(staying(lambda dims: partial(apply_along, how, dims, False), (self._dim(dim),)))

    @overload
    def all(self, dim: None = ..., keepdim: bool = ...) -> bool: ...
    @overload
    def all(self, dim: int | str | tuple[int | str, ...], keepdim: bool = ...) -> Self: ...
    def all(self, dim: Any = None, keepdim: bool = False) -> Self | bool:
        """Whether all elements are true (non-zero).

        Args:
            dim: a batch dim or a tuple of them, by number or by name; `"feature"`; `None` reduces everything.
            keepdim: keep the reduced dims, with size 1.

        Returns:
            a `bool` without `dim`, else a container of bools that lacks the dims.

        Raises:
            IndexError: there is no such dim.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.tensor([[1, 1], [0, 1]])}, [2])
            >>> td.all(), td.all(dim=0)["a"]
            (False, tensor([False,  True]))
        """
        if dim is not None:
            return self._by_level(self._plan(_ALL, dim, keepdim))
        refuse_keepdim(keepdim, "everything is reduced to one bool")
        return of_all(self._leaves(), Tensor.all, False)

    @overload
    def any(self, dim: None = ..., keepdim: bool = ...) -> bool: ...
    @overload
    def any(self, dim: int | str | tuple[int | str, ...], keepdim: bool = ...) -> Self: ...
    def any(self, dim: Any = None, keepdim: bool = False) -> Self | bool:
        """Whether any element is true (non-zero); arguments and result as for :meth:`all`."""
        if dim is not None:
            return self._by_level(self._plan(_ANY, dim, keepdim))
        refuse_keepdim(keepdim, "everything is reduced to one bool")
        return of_all(self._leaves(), Tensor.any, True)

    # --- values and indices -----------------------------------------------------------------------------------------

    def _extremes(self, op: Op, returned: Any, dim: Any, keepdim: bool, reduce: bool | None) -> Any:
        """The values and the indices that `op` gives along one batch dim, or along the feature dims."""
        if is_feature(dim):
            refuse_keepdim(keepdim, "dim='feature' removes the feature dims")
            if reduce:
                return self._over_all(op, self._side_by_side(), -1)
            return returned(self._split_by_level(staying(lambda _: partial(_of_features, op), ())))
        at = self._one_dim(dim)
        if reduce:
            return self._over_all(op, self._end_to_end(at), at, keepdim)
        return returned(self._split_by_level(along(Reduction(op), keepdim, (at,))))

    def _cumulated(self, op: Op, returned: Any, dim: object, reduce: bool | None, return_indices: bool) -> Any:
        at = self._one_dim(dim)
        if reduce:
            pair = self._over_all(op, self._end_to_end(at), at)
        else:
            how = Reduction(op)
            plan = staying(lambda dims: partial(apply_along, how, dims, False), (at,))
            pair = returned(self._split_by_level(plan))
        return pair if return_indices else pair.values

    def _one_dim(self, dim: object) -> int:
        dims = self._dims(dim)
        if len(dims) != 1:
            raise TypeError(f"indices are positions along one dim, got dim={dim}; amin and amax take several dims")
        return dims[0]


def _spread(fn: Op, correction: int, leaf: Tensor, dims: object = None, keepdim: bool = False) -> Any:
    """`torch.std` or `torch.var`."""
    return fn(leaf, dims, correction=correction, keepdim=keepdim)


def _unbiased(method: Op, leaf: Tensor, dims: object = None, keepdim: bool = False) -> Any:
    """`_spread` with a correction of 1, as torch parses it 0.6 us faster."""
    return method(leaf) if dims is None else method(leaf, dims, True, keepdim)


_SUM = Reduction(Tensor.sum, combine=Tensor.sum)
_MEAN = Reduction(Tensor.mean, stacked=True)
_STD = Reduction(partial(_unbiased, Tensor.std))
_VAR = Reduction(partial(_unbiased, Tensor.var))
_LOGSUMEXP = Reduction(Tensor.logsumexp, stacked=True)
_AMIN = Reduction(Tensor.amin, combine=Tensor.amin)
_AMAX = Reduction(Tensor.amax, combine=Tensor.amax, many=internals.foreach_max)
_ALL = Reduction(Tensor.all, stacked=True)
_ANY = Reduction(Tensor.any, stacked=True)


def _of_features(op: Op, leaves: list[Any], batch_dims: int) -> list[Any]:
    """`op`, which takes one dim and gives values and indices, along the feature dims as one."""
    return [
        _of_rows(op, leaf, batch_dims) if leaf.is_nested else op(one_feature_dim(leaf, batch_dims), -1)
        for leaf in leaves
    ]


def _of_rows(op: Op, leaf: object, batch_dims: int) -> tuple[Tensor, Tensor]:
    """`op` along the feature dims of each row of a ragged leaf: torch counts padding in."""
    pairs = [op(one_feature_dim(row, batch_dims - 1), -1) for row in rows_of(leaf, batch_dims)]
    return restacked([pair[0] for pair in pairs], leaf), restacked([pair[1] for pair in pairs], leaf)


def _softmax(dtype: torch.dtype | None, leaf: Tensor, dim: int, keepdim: bool = True) -> Tensor:
    """`torch.softmax`, which always keeps the dim."""
    return leaf.softmax(dim) if dtype is None else leaf.softmax(dim, dtype)


def _prod(leaf: Tensor, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.prod`, along several dims too."""
    if dims is None:
        return leaf.prod(dtype=dtype)
    if dims == ():
        # No dim to reduce: cast as the others are.
        return leaf.unsqueeze(-1).prod(-1, dtype=dtype)
    for dim in sorted(dims, reverse=True) if type(dims) is tuple else (dims,):
        leaf = leaf.prod(dim, keepdim, dtype=dtype)
    return leaf


def _quantile(q: Any, interpolation: str, leaf: Tensor, dims: Any = None, keepdim: bool = False) -> Tensor:
    """`torch.quantile`, along several dims too."""
    if type(dims) is not tuple:
        return leaf.quantile(q, dims, keepdim, interpolation=interpolation)
    merged = leaf.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims)) if dims else leaf.unsqueeze(-1)
    result = merged.quantile(q, -1, interpolation=interpolation)
    if keepdim:
        added = result.dim() - merged.dim() + 1
        for dim in sorted(dims):
            result = result.unsqueeze(dim + added)
    return result


def _into(out: Any, result: Reducing) -> Any:
    """Write `result` into `out`, in place, which must have all of its entries."""
    check_out(out, result._batch_size)
    for path, _ in result._walk():
        if not out._has(path):
            raise_no_entry(path, out)
    return out.update_(result)
