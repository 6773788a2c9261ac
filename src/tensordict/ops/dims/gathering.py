"""Choosing elements by an index or a mask that has the shape of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core import foreach, ragged
from tensordict.core.contract import ByNdim, Contract, LeafFn, identity, named_error
from tensordict.core.exceptions import KeyMismatchError, ShapeError
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import as_dim, broadcasts_to, expand_size
from tensordict.ops.dims.sizing import replace_leaves

if TYPE_CHECKING:
    from typing_extensions import Self


class Gathering(Contract):
    """`gather`, `where` and the masked operations."""

    def gather(self, dim: int, index: Tensor, out: object = None, *, inplace: bool = False) -> Self:
        """Gather elements along a batch dim (as :func:`torch.gather`), feature dims going along.

        Args:
            dim: the dim to gather along.
            index: an integer tensor with the batch's number of dims, no larger than it in the other dims. With fewer
                dims than the batch, it counts for all elements of the dims that it lacks.
            out: a container to write into, in place, with the shape of the result.
            inplace: replace the entries of this container, leaf by leaf, instead of making a new one.

        Raises:
            IndexError: the dim is out of range.
            RuntimeError: the index does not fit the batch, or points outside of it.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(6).view(2, 3)}, batch_size=[2, 3])
            >>> td.gather(1, torch.tensor([[0], [2]]))["a"].tolist()
            [[0], [5]]
        """
        size = self._batch_size
        batch_dims = len(size)
        dim = as_dim(dim, batch_dims)
        if not isinstance(index, Tensor):
            raise TypeError(f"gather needs an index tensor, got {type(index).__name__}")
        if out is not None and inplace:
            raise TypeError("gather writes in place or into out, not both")
        if not dim < index.ndim <= batch_dims:
            raise ShapeError(
                f"gather along dim {dim} needs an index of {dim + 1} to {batch_dims} dims for the batch size "
                f"{list(size)}, got the shape {list(index.shape)}"
            )
        if index.ndim < batch_dims:
            rest = size[index.ndim :]
            index = index.reshape(*index.shape, *[1] * len(rest)).expand(*index.shape, *rest)
        for d, (count, extent) in enumerate(zip(index.shape, size, strict=True)):
            if d != dim and count > extent:
                raise ShapeError(f"the index has size {count} in dim {d}, where the batch has {extent} elements")
        indices = _ByShape(index)

        def fn(v: Tensor) -> Tensor:
            # A dict keyed by shapes fixes all sizes of a graph.
            return v.gather(dim, indices.make(v.shape) if torch.compiler.is_compiling() else indices[v.shape])

        if inplace:
            return replace_leaves(self, fn, index.shape, batch_dims, identity)
        result = self._map(fn, index.shape, batch_dims, identity)
        return result if out is None else written(out, result)

    # --- masks ------------------------------------------------------------------------------------------------------

    def masked_select(self, mask: Tensor) -> Self:
        """Copies of the elements where the mask holds: `td[mask]`.

        Args:
            mask: a boolean tensor whose shape is that of the batch, or of its first dims.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(3)}, batch_size=[3])
            >>> td.masked_select(torch.tensor([True, False, True]))["a"]
            tensor([0, 2])
        """
        return self._index(_checked_mask(mask))

    def masked_fill(self, mask: Tensor, value: float | int | bool | Tensor) -> Self:
        """Copies with `value` written where the mask holds.

        Args:
            mask: a boolean tensor that broadcasts to the batch size, or to its first dims when it has fewer.
            value: a number or a tensor without dims.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, batch_size=[3])
            >>> td.masked_fill(torch.tensor([True, False, True]), 1.0)["a"]
            tensor([1., 0., 1.])
        """
        return self._map_with(lambda v, part: _filled(v, part, value), self._mask(mask))

    def masked_fill_(self, mask: Tensor, value: float | int | bool | Tensor) -> Self:
        """Write `value` into the entries where the mask holds; arguments as :meth:`masked_fill`.

        Returns:
            the same container, which may be locked.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, batch_size=[3])
            >>> td.masked_fill_(torch.tensor([True, False, True]), 1.0)["a"]
            tensor([1., 0., 1.])
        """
        checked = self._mask(mask)
        leaves = self._leaves()
        foreach.refuse_graph_leaves(leaves, self)
        if any(leaf.is_nested or isinstance(leaf, Contract) for leaf in leaves):
            # A ragged leaf or an UnbatchedTensor may refuse the mask: before anything is written.
            self._map_with(_check_mask, checked)
        with self._at_once(identity):
            self._map_with(lambda v, part: _fill_masked(v, part, value), checked)
        return self

    def _mask(self, mask: Tensor) -> Tensor:
        """`mask`, known to be one that broadcasts to the batch."""
        _checked_mask(mask)
        self._check_broadcast(mask, "mask")
        return mask

    def _check_broadcast(self, tensor: Tensor, what: str) -> None:
        """Refuse a tensor that does not broadcast to the batch size (its first dims, when it has fewer)."""
        part = self._batch_size[: tensor.ndim]
        try:
            fits = tensor.ndim == len(part) and expand_size(tuple(part), tensor.shape) == part
        except RuntimeError:
            fits = False
        if not fits:
            raise ShapeError(
                f"the {what} has shape {list(tensor.shape)}, which does not fit the batch size "
                f"{list(self._batch_size)}: it has to broadcast to its first {tensor.ndim} dims"
            )

    def where(
        self,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,
        pad: int | bool | float | None = None,
        update_batch_size: bool = False,
    ) -> Self:
        """The elements of this container where the condition holds, those of `other` elsewhere.

        Args:
            condition: a boolean tensor that broadcasts to the batch size, or to its first dims when it has fewer.
            other: a container of the same keys, a number, or a tensor that broadcasts as the condition does. The batch
                size of a container has to broadcast to that of this one; the entries of one without batch dims, to the
                entries here.
            out: a container whose entries are replaced by the results, as :meth:`update` does; no memory is written.
            pad: stands for the entries that only one of the containers has; without it, they are an error.
            update_batch_size: give `out` the batch size of the result, too.

        Raises:
            KeyError: an entry is missing in one of the containers and there is no `pad`.
            RuntimeError: shapes do not fit, or `out` is locked.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.ones(3)}, batch_size=[3])
            >>> td.where(torch.tensor([True, False, True]), 0.0)["a"]
            tensor([1., 0., 1.])
        """
        self._check_broadcast(condition, "condition")
        if isinstance(other, Contract) and other._batch_size != self._batch_size:
            theirs, own = other._batch_size, self._batch_size
            if not broadcasts_to(theirs, own):
                raise ShapeError(
                    f"where needs a container whose batch size broadcasts to {list(own)}, got one of {list(theirs)}"
                )
            other = other.expand(own) if theirs else _spread(other, self, own, ())
        if isinstance(other, Tensor) and other.ndim:
            self._check_broadcast(other, "tensor to take elements from")
        result: Any = self._chosen(ByNdim(condition), other, pad, ())
        if out is None:
            if self._locked:
                result._lock_tree()
            return result  # type: ignore[no-any-return]
        check_out(out, None if update_batch_size else result._batch_size)
        same = out._batch_size == result._batch_size
        return out.update(result) if same else out._update_with_batch_size(result, False)  # type: ignore[no-any-return]

    def _chosen(self, masks: ByNdim, other: object, pad: object, path: Path) -> Self:
        """`where`, once the arguments have been checked."""
        if (members := self._members()) is not None:
            if not members:
                return self._dense()._chosen(masks, other, pad, path)
            if isinstance(other, Contract):
                pieces = self._pieces_of(other)
            else:
                pieces = self._parts(other) if isinstance(other, Tensor) and other.ndim else [other] * len(members)
            columns = zip(members, map(ByNdim, self._parts(masks.tensor)), pieces, strict=True)
            return self._restack([member._chosen(part, piece, pad, path) for member, part, piece in columns])
        if isinstance(other, Contract):
            return _chosen(self, other, masks, pad, path)  # type: ignore[no-any-return]
        if isinstance(other, Tensor) and other.ndim:
            others = ByNdim(other)
            return self._map(lambda v: ragged.where(masks[v.dim()], v, others[v.dim()]))
        return self._map(lambda v: ragged.where(masks[v.dim()], v, other))


class _ByShape(dict[torch.Size, Tensor]):
    """An index over the batch dims expanded over the feature dims, made once per shape that the leaves have."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self._index = index

    def __missing__(self, shape: torch.Size) -> Tensor:
        made = self[shape] = self.make(shape)
        return made

    def make(self, shape: torch.Size) -> Tensor:
        index = self._index
        features = shape[index.ndim :]
        return index.reshape(*index.shape, *[1] * len(features)).expand(*index.shape, *features)


def _checked_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"a mask is a boolean tensor, got {kind}")
    return mask


def _filled(leaf: Tensor, mask: Tensor, value: Any) -> Tensor:
    return (
        ragged.elementwise(Tensor.masked_fill, leaf, mask, value) if leaf.is_nested else leaf.masked_fill(mask, value)
    )


def written(out: Any, result: Any) -> Any:
    """Write `result` into `out`, in place where the entries exist; the batch size of `out` has to fit."""
    check_out(out, result._batch_size)
    return out.update(result, inplace=True)


def check_out(out: object, size: torch.Size | None) -> None:
    """Refuse an `out` that is no container, or that has another batch size than `size`."""
    if not isinstance(out, Contract):
        raise TypeError(f"out must be a container, got {type(out).__name__}")
    if size is not None and out._batch_size != size:
        raise ShapeError(f"out must have the resulting batch size {list(size)}, got {list(out._batch_size)}")


def _chosen(node: Any, other: Any, masks: ByNdim, pad: Any, path: Path) -> Any:
    """Elements of `node` where the mask holds, of `other` elsewhere, `pad` for entries that one of them lacks."""
    ours, theirs = node._entries, other._entries
    if pad is None and ours.keys() != theirs.keys():
        odd = sorted(joined((*path, name)) for name in ours.keys() ^ theirs.keys())
        raise KeyMismatchError(f"where: only one of the containers has the entries {odd}; give a pad value for them")
    entries: dict[str, Any] = {}
    for name in [*ours, *[name for name in theirs if name not in ours]]:
        a, b = ours.get(name), theirs.get(name)
        if a is None:
            entries[name] = _map_any(b, lambda v: ragged.where(masks[v.dim()], pad, v))
        elif b is None:
            entries[name] = _map_any(a, lambda v: ragged.where(masks[v.dim()], v, pad))
        elif isinstance(a, Contract) != isinstance(b, Contract):
            raise TypeError(
                f"where: entry {joined((*path, name))!r} is a container in one place and a tensor in another"
            )
        elif isinstance(a, Tensor) and isinstance(a, Contract):
            entries[name] = a
        elif isinstance(a, Contract) and a._is_non_tensor and b._is_non_tensor:
            entries[name] = _chosen_values(a, b, masks)
        elif isinstance(a, Contract):
            entries[name] = a._chosen(masks, b, pad, (*path, name))  # type: ignore[attr-defined]
        else:
            try:
                entries[name] = ragged.where(masks[a.dim()], a, b)
            except RuntimeError as error:
                raise named_error(error, (*path, name)) from error
    return node._build(entries, node._batch_size, node._device, node._names)


def _spread(other: Any, node: Any, size: torch.Size, path: Path) -> Any:
    """`other`, which has no batch dims, over the batch `size` of `node`: its leaves broadcast to those of `node`."""
    entries: dict[str, Any] = {}
    for name, value in other._entries.items():
        below = None if node is None else node._node(name)
        if isinstance(value, Tensor):
            shape = node._shape_of(name) if node is not None and below is None and name in node._structure() else None
            entries[name] = _over(value, shape, size, (*path, name))
        elif value._batch_size or value._is_non_tensor:
            entries[name] = value.expand(size + value._batch_size)
        else:
            entries[name] = _spread(value, below, size, (*path, name))
    return other._build(entries, size, other._device, None)


def _over(value: Tensor, shape: torch.Size | None, size: torch.Size, path: Path) -> Tensor:
    """A leaf without batch dims over the batch `size`, for an entry of this shape, if there is one."""
    if value.is_nested or isinstance(value, Contract):
        return value
    try:
        if shape is not None and all(type(n) is int and n >= 0 for n in shape):
            return value.expand(shape)
        if value.shape[: len(size)] == size:
            return value
        ones = [1] * (0 if shape is None else len(shape) - len(size) - value.ndim)
        return value.expand(*size, *ones, *value.shape)
    except RuntimeError:
        raise ShapeError(
            f"where: entry {joined(path)!r} of a container without batch dims has shape {list(value.shape)}, which "
            f"does not broadcast to that of the entry here, {list(shape or ())}"
        ) from None


def _chosen_values(a: Any, b: Any, masks: ByNdim) -> Any:
    """The values of `a` where the mask holds, of `b` elsewhere."""
    size = a._batch_size
    mask = masks[len(size)].expand(size)
    return b.copy()._assign_values(mask if size else (), a[mask] if size else a) if mask.any() else b.copy()


def _map_any(value: object, fn: LeafFn) -> Any:
    return value._map(fn) if isinstance(value, Contract) else fn(value)


def _check_mask(leaf: Tensor, mask: Tensor) -> Tensor:
    if leaf.is_nested:
        ragged.in_place(leaf, mask)
    return leaf


def _fill_masked(leaf: Tensor, mask: Tensor, value: Any) -> Tensor:
    """`leaf.masked_fill_(mask, value)`, ragged leaves included, of which torch fills none in place."""
    if not leaf.is_nested:
        return leaf.masked_fill_(mask, value)
    (places, where), back = ragged.in_place(leaf, mask)
    places.masked_fill_(where, value)
    if back is not None:
        back()
    return leaf
