"""The mixin of `gather`, `where` and the masked operations, which select elements by an index or a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import foreach, ragged
from tensordict.core.contract import ByNdim, Contract, LeafFn, Names, identity, named_error
from tensordict.core.exceptions import KeyMismatchError, ShapeError
from tensordict.core.indices import checked_size, index_for_names, leaf_index, rename_dims
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import as_dim, broadcasts_to, expand_size
from tensordict.ops.dims.sizing import replace_leaves

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Gathering")


class Gathering(Contract):
    """`gather`, `where` and the masked operations."""

    def gather(self: SelfT, dim: int, index: Tensor, out: object = None, *, inplace: bool = False) -> SelfT:
        """Gather elements along a batch dim, together with all their features (like :func:`torch.gather`).

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(6).view(2, 3)}, batch_size=[2, 3])
            >>> td.gather(1, torch.tensor([[0], [2]]))["a"].tolist()
            [[0], [5]]

        Args:
            dim: the dim to gather along.
            index: an integer tensor with as many dims as the batch, and no larger than the batch in the other dims. An
                index with fewer dims applies to all elements of the trailing batch dims.
            out: a container with the shape of the result, to write into in place.
            inplace: replace the entries of this container, leaf by leaf, instead of making a new one.

        Raises:
            IndexError: the dim is out of range.
            RuntimeError: the index does not fit the batch, or points outside it.
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
            # In compiled code, do not look up the dict: comparing its keys would make all sizes constants of the graph.
            return v.gather(dim, indices.make(v.shape) if torch.compiler.is_compiling() else indices[v.shape])

        if inplace:
            return replace_leaves(self, fn, index.shape, batch_dims, identity)
        # A stack is called with itself, or with the numbers of its elements.
        rearrange = lambda part: fn(part) if isinstance(part, Tensor) else part.gather(dim, index)  # noqa: E731
        result = self._map(fn, index.shape, batch_dims, identity, lambda stack: stack._rearrange(rearrange))
        return result if out is None else write_into(out, result)

    # --- masks ------------------------------------------------------------------------------------------------------

    def masked_select(self, mask: Tensor, *, inplace: bool = False) -> Self:
        """Copy the elements where the mask is true. The same as `td[mask]`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.arange(3)}, batch_size=[3])
            >>> td.masked_select(torch.tensor([True, False, True]))["a"]
            tensor([0, 2])

        Args:
            mask: a boolean tensor of the shape of the batch, or of its first dims.
            inplace: replace the entries of this container, leaf by leaf, instead of making a new one.

        Raises:
            IndexError: the mask does not fit the batch.
            RuntimeError: with `inplace`, the container is locked, or is or holds a lazy stack (NotImplementedError).
        """
        if not inplace:
            return self._index(_as_mask(mask))
        size = self._batch_size
        at = leaf_index(_as_mask(mask), size)
        new_size, named = checked_size(at, size), index_for_names(mask, at)

        def rename(names: Names) -> Names:
            return rename_dims(names, named, len(new_size))

        return replace_leaves(self, ragged.Index(at), new_size, len(size), rename)

    def masked_fill(self: SelfT, mask: Tensor, value: float | int | bool | Tensor) -> SelfT:
        """Copy this container with `value` where the mask is true.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, batch_size=[3])
            >>> td.masked_fill(torch.tensor([True, False, True]), 1.0)["a"]
            tensor([1., 0., 1.])

        Args:
            mask: a boolean tensor that broadcasts to the batch size. A mask with fewer dims applies to the first ones.
            value: a number or a tensor without dims.
        """
        return self._map_with(lambda v, part: _fill(v, part, value), self._check_batch_mask(mask))

    def masked_fill_(self, mask: Tensor, value: float | int | bool | Tensor) -> Self:
        """Write `value` into the entries where the mask is true. Arguments as for :meth:`masked_fill`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(3)}, batch_size=[3])
            >>> td.masked_fill_(torch.tensor([True, False, True]), 1.0)["a"]
            tensor([1., 0., 1.])

        Returns:
            this container, which may be locked.
        """
        checked = self._check_batch_mask(mask)
        leaves = self._leaves()
        foreach.refuse_graph_leaves(leaves, self)
        if any(leaf.is_nested or isinstance(leaf, Contract) for leaf in leaves):
            # A ragged leaf or an UnbatchedTensor may reject the mask, so test all of them before the first write.
            self._map_with(_check_mask, checked)
        with self._at_once(identity):
            self._map_with(lambda v, part: _fill_in_place(v, part, value), checked)
        return self

    def _check_batch_mask(self, mask: Tensor) -> Tensor:
        """Return `mask`. Raises unless it is a boolean tensor that broadcasts to the batch."""
        _as_mask(mask)
        self._check_broadcast(mask, "mask")
        return mask

    def _check_broadcast(self, tensor: Tensor, what: str) -> None:
        """Raise if a tensor does not broadcast to the batch size, or to as many first dims of it as the tensor has."""
        part = self._batch_size[: tensor.ndim]
        try:
            fits = tensor.ndim == len(part) and expand_size(tuple(part), tensor.shape) == part
        except RuntimeError:
            fits = False
        if not fits:
            raise ShapeError(
                f"the {what} has shape {list(tensor.shape)}, which does not fit the batch size "
                f"{list(self._batch_size)}: it must broadcast to the first {tensor.ndim} batch dims"
            )

    def where(
        self: SelfT,
        condition: Tensor,
        other: Any,
        *,
        out: Any = None,
        pad: int | bool | float | None = None,
        update_batch_size: bool = False,
    ) -> SelfT:
        """Select elements of this container where the condition is true, and elements of `other` elsewhere.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.ones(3)}, batch_size=[3])
            >>> td.where(torch.tensor([True, False, True]), 0.0)["a"]
            tensor([1., 0., 1.])

        Args:
            condition: a boolean tensor that broadcasts to the batch size. With fewer dims it applies to the first ones.
            other: a number, a tensor that broadcasts like the condition, or a container with the same keys, whose batch
                size must broadcast to the batch size of `self`. In a container without batch dims, each entry must
                broadcast to the entry of `self`.
            out: a container whose entries are replaced by the results, as in :meth:`update`. Its old tensors do not
                change.
            pad: the value for elements of entries that one of the containers lacks.
            update_batch_size: set the batch size of `out`, too.

        Raises:
            KeyError: one of the containers lacks an entry, and `pad` is not given.
            RuntimeError: shapes do not fit, or `out` is locked.
        """
        self._check_broadcast(condition, "condition")
        if isinstance(other, Contract) and other._batch_size != self._batch_size:
            theirs, own = other._batch_size, self._batch_size
            if not broadcasts_to(theirs, own):
                raise ShapeError(
                    f"where needs a container whose batch size broadcasts to {list(own)}, got one of {list(theirs)}"
                )
            other = other.expand(own) if theirs else _expand_over(other, self, own, ())
        if isinstance(other, Tensor) and other.ndim:
            self._check_broadcast(other, "tensor to take elements from")
        result: Any = self._choose(ByNdim(condition), other, pad, ())
        if out is None:
            if self._locked and not isinstance(other, Contract):
                result._lock_tree()
            return result  # type: ignore[no-any-return]
        check_out(out, None if update_batch_size else result._batch_size)
        same = out._batch_size == result._batch_size
        return out.update(result) if same else out._update_with_batch_size(result, False)  # type: ignore[no-any-return]

    def _choose(self, masks: ByNdim, other: object, pad: object, path: Path) -> Self:
        """Run `where` with checked arguments."""
        if self._is_non_tensor:
            is_held = isinstance(other, Contract) and other._is_non_tensor
            return _choose_values(self, other, masks) if is_held else self.copy()
        if (members := self._members()) is not None:
            if not members:
                return self._dense()._choose(masks, other, pad, path)
            if isinstance(other, Contract):
                pieces = self._pieces_of(other)
            else:
                pieces = self._parts(other) if isinstance(other, Tensor) and other.ndim else [other] * len(members)
            columns = zip(members, map(ByNdim, self._parts(masks.tensor)), pieces, strict=True)
            return self._restack([member._choose(part, piece, pad, path) for member, part, piece in columns])
        if isinstance(other, Contract):
            return _choose_entries(self, other, masks, pad, path)  # type: ignore[no-any-return]

        def choose_in_stack(node: Any) -> Any:
            return node._choose(masks, other, pad, path)

        if isinstance(other, Tensor) and other.ndim:
            others = ByNdim(other)
            return self._map(lambda v: ragged.where(masks[v.dim()], v, others[v.dim()]), on_node=choose_in_stack)
        return self._map(lambda v: ragged.where(masks[v.dim()], v, other), on_node=choose_in_stack)


class _ByShape(dict[torch.Size, Tensor]):
    """Caches an index over the batch dims, expanded over the feature dims, for each shape of leaves."""

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


def _as_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"a mask is a boolean tensor, got {kind}")
    return mask


def _fill(leaf: Tensor, mask: Tensor, value: Any) -> Tensor:
    return (
        ragged.elementwise(Tensor.masked_fill, leaf, mask, value) if leaf.is_nested else leaf.masked_fill(mask, value)
    )


def write_into(out: Any, result: Any) -> Any:
    """Write `result` into `out`, into its existing tensors where it has them. Raises if the batch sizes differ."""
    check_out(out, result._batch_size)
    return out.update(result, inplace=True)


def check_out(out: object, size: torch.Size | None) -> None:
    """Raise unless `out` is a container of the batch size `size`."""
    if not isinstance(out, Contract):
        raise TypeError(f"out must be a container, got {type(out).__name__}")
    if size is not None and out._batch_size != size:
        raise ShapeError(f"out must have the resulting batch size {list(size)}, got {list(out._batch_size)}")


def _choose_entries(node: Any, other: Any, masks: ByNdim, pad: Any, path: Path) -> Any:
    """Select elements of `node` where the mask is true, and of `other` elsewhere; `pad` replaces missing entries."""
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
        elif isinstance(a, Contract):
            entries[name] = a._choose(masks, b, pad, (*path, name))  # type: ignore[attr-defined]
        else:
            try:
                entries[name] = ragged.where(masks[a.dim()], a, b)
            except RuntimeError as error:
                raise named_error(error, (*path, name)) from error
    return node._build(entries, node._batch_size, node._device, node._names)


def _expand_over(other: Any, node: Any, size: torch.Size, path: Path) -> Any:
    """Expand a container without batch dims to the batch size of `node`, and its leaves to the leaves of `node`."""
    entries: dict[str, Any] = {}
    for name, value in other._entries.items():
        below = None if node is None else node._node(name)
        if isinstance(value, Tensor):
            shape = node._shape_of(name) if node is not None and below is None and name in node._structure() else None
            entries[name] = _expand_leaf(value, shape, size, (*path, name))
        elif value._batch_size or value._is_non_tensor:
            entries[name] = value.expand(size + value._batch_size)
        else:
            entries[name] = _expand_over(value, below, size, (*path, name))
    return other._build(entries, size, other._device, None)


def _expand_leaf(value: Tensor, shape: torch.Size | None, size: torch.Size, path: Path) -> Tensor:
    """Expand a leaf without batch dims to `shape`, or over the batch size if `node` lacks the entry."""
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


def _choose_values(a: Any, b: Any, masks: ByNdim) -> Any:
    """Select values of the holder `a` where the mask is true, and of the holder `b` elsewhere."""
    size = a._batch_size
    mask = masks[len(size)].expand(size)
    return b.copy()._assign_values(mask if size else (), a[mask] if size else a) if mask.any() else b.copy()


def _map_any(value: object, fn: LeafFn) -> Any:
    return value._map(fn) if isinstance(value, Contract) else fn(value)


def _check_mask(leaf: Tensor, mask: Tensor) -> Tensor:
    if leaf.is_nested:
        ragged.in_place(leaf, mask)
    return leaf


def _fill_in_place(leaf: Tensor, mask: Tensor, value: Any) -> Tensor:
    """Fill a leaf in place. Torch's `masked_fill_` does not support ragged leaves."""
    if not leaf.is_nested:
        return leaf.masked_fill_(mask, value)
    (places, where), back = ragged.in_place(leaf, mask)
    places.masked_fill_(where, value)
    if back is not None:
        back()
    return leaf
