"""The mixin of `pad` and `to_padded_tensor`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import ragged, ragged_padding
from tensordict.core.contract import Contract, Filler, LeafFn, identity, named_error
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, joined
from tensordict.core.shapes import PerNdim
from tensordict.ops.dims.sizing import Sizing, replace_leaves
from tensordict.ops.refusals import retry_ragged_walk

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Padding")


class Padding(Sizing):
    """`pad` and `to_padded_tensor`."""

    def pad(
        self: SelfT, pad_size: Sequence[int], value: float | None = 0.0, inplace: bool = False, safe: bool = True
    ) -> SelfT:
        """Pad batch dims of every entry with `value`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.ones(2, 3)}, batch_size=[2])
            >>> td.pad([0, 1], value=7)["a"]
            tensor([[1., 1., 1.],
                    [1., 1., 1.],
                    [7., 7., 7.]])

        Args:
            pad_size: two ints for each batch dim, starting with the first dim: the numbers of elements to add before
                and after the present ones. A negative number removes elements. Trailing dims can be omitted.
            value: the value of the new elements, cast to the dtype of each entry.
            inplace: replace the entries of this container one at a time, so that memory never holds two copies of all.
            safe: accepted for compatibility. The sizes are always checked before anything changes.

        Returns:
            a new container with the same dim names; this container with `inplace`.

        Raises:
            RuntimeError: the number of ints is odd or too large, more elements are removed than a dim has, or the
                container is locked (with `inplace`).
            NotImplementedError: a ragged entry can be padded only along its first dim.
        """
        size = self._batch_size
        pads = _as_pads(pad_size, size)
        padder = Padder(pads, 0.0 if value is None else value)
        # A holder that is padded itself keeps its value for all elements.
        fn: LeafFn = padder.__call__ if self._is_non_tensor or not any(pads) else padder
        new = list(size)
        for dim, extra in enumerate(zip(pads[::2], pads[1::2], strict=True)):
            new[dim] += sum(extra)
        if not inplace:
            return retry_ragged_walk(self, self._map, fn, torch.Size(new), len(size), identity)
        for path, leaf in self._walk():
            if leaf.is_nested and any(pads[2:]):
                raise named_error(_ragged_error(leaf, pads), path)
        return replace_leaves(self, fn, torch.Size(new), len(size), identity)

    def to_padded_tensor(self, padding: float = 0.0, mask_key: object = None) -> Self:
        """Make ragged entries dense: pad their rows with `padding` to the length of the longest row.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> x = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)], layout=torch.jagged)
            >>> TensorDict(x=x, batch_size=[2]).to_padded_tensor(padding=-1)["x"]
            tensor([[ 1., -1., -1.],
                    [ 1.,  1.,  1.]])

        Args:
            padding: the value after the end of a row.
            mask_key: write a bool tensor of the resulting batch size under this key, `True` for elements and `False`
                for padding. Requires a ragged batch dim.

        Returns:
            a new container. Its batch size contains the length of the longest row instead of a ragged dim. It shares
            the dense entries.

        Raises:
            RuntimeError: `mask_key` is given, and no batch dim is ragged.
        """
        if not any(map(_has_ragged_dim, self._list_sizes())):
            out = self._map(partial(_pad_rows, padding=padding))
        else:
            out = _pad_ragged_dims(self, padding, ())
        if mask_key is not None:
            size = self._batch_size
            spanning = [leaf for _, leaf in self._walk() if leaf.is_nested and ragged.ragged_dim(leaf) < len(size)]
            if not spanning or not _has_ragged_dim(size):
                raise RuntimeError(
                    f"mask_key={mask_key!r} needs a ragged batch dim, but no dim of the batch size {list(size)} is "
                    "ragged; set a batch size that includes the ragged dim"
                )
            out.set(mask_key, ragged_padding.valid(spanning[0], len(size)))
        return out

    def _list_sizes(self) -> list[torch.Size]:
        """Return the batch sizes of this container and of all nested containers."""
        sizes = [self._batch_size]
        for value in self._structure().values():
            if isinstance(value, Padding):
                sizes += value._list_sizes()
        return sizes


def _as_pads(pad_size: object, size: torch.Size) -> list[int]:
    """Return `pad_size` as a list of ints. Raises unless it fits the batch size."""
    pads = pad_size.tolist() if isinstance(pad_size, Tensor) else pad_size
    if isinstance(pads, str) or not isinstance(pads, Iterable):
        raise TypeError(f"pad_size is a sequence of ints, got {pad_size!r} of type {type(pad_size).__name__}")
    pads = [index(item) for item in pads]
    if len(pads) % 2:
        raise ShapeError(
            f"pad_size has two ints for each dim, one before it and one behind, got the {len(pads)} of {pads}"
        )
    if len(pads) > 2 * len(size):
        raise ShapeError(
            f"pad_size {pads} is for {len(pads) // 2} dims, but the container has {len(size)} batch dims "
            f"(batch_size={list(size)})"
        )
    for dim, (before, after) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        # Neither side can remove more elements than the dim has, even if the other side adds some.
        if min(before, after, before + after) < -size[dim]:
            raise ShapeError(
                f"padding dim {dim}, of size {size[dim]}, by {(before, after)} would remove more elements than it has"
            )
    return pads


class Padder(Filler):
    """Pads a leaf. `pads` holds two ints for each of the first dims."""

    def __init__(self, pads: list[int], value: float) -> None:
        # Torch counts from the last dim of a leaf, so the feature dims, which are not padded, come first.
        pairs = list(zip(pads[::2], pads[1::2], strict=True))
        reverse = tuple([n for pair in reversed(pairs) for n in pair])
        self.pads = pads
        self.value = value
        self.by_ndim = PerNdim(lambda ndim: (0, 0) * (ndim - len(pairs)) + reverse)

    def __call__(self, leaf: Any) -> Any:
        if leaf.is_nested:
            if any(self.pads[2:]):
                raise _ragged_error(leaf, self.pads)
            return _add_empty_rows(leaf, *self.pads[:2]) if self.pads else leaf
        return torch.constant_pad_nd(leaf, self.by_ndim[leaf.dim()], self.value)


def _ragged_error(leaf: Tensor, pads: list[int]) -> Exception:
    return NotImplementedError(
        f"a ragged entry of shape {list(ragged.shape_of(leaf))} can be padded along its first dim only (with empty "
        f"rows), and not by {pads}; to_padded_tensor makes it dense"
    )


def _add_empty_rows(leaf: Tensor, before: int, after: int) -> Tensor:
    """Add empty rows before and after the rows of a ragged leaf. Negative numbers remove rows."""
    first, last = max(0, -before), leaf.size(0) - max(0, -after)
    leaf = ragged.compact(ragged.RaggedRows(slice(first, last))(leaf))
    before, after = max(0, before), max(0, after)
    if leaf.layout is torch.jagged:
        offsets = ragged.offsets_of(leaf)
        padded_offsets = torch.cat([offsets[:1].expand(before), offsets, offsets[-1:].expand(after)])
        return ragged.from_jagged(leaf.values(), padded_offsets, ragged.jagged_dim(leaf))
    empty = [-1 if size < 0 else size for size in ragged.shape_of(leaf)[1:]] if leaf.size(0) else [0]
    row = torch.tensor([[max(0, size) for size in empty]])
    if -1 not in empty:
        row[:, 0] = 0
    return ragged.from_buffer(
        ragged.pack_elements(leaf), torch.cat([row.expand(before, -1), ragged.row_sizes(leaf), row.expand(after, -1)])
    )


def _has_ragged_dim(size: torch.Size) -> bool:
    """Return whether a batch size contains a ragged dim, whose length is negative or symbolic."""
    return any(not isinstance(length, int) or length < 0 for length in size)  # type: ignore[redundant-expr]


def _pad_rows(leaf: Any, padding: float) -> Any:
    return ragged_padding.pad(leaf, padding) if leaf.is_nested else leaf


def _pad_ragged_dims(node: Any, padding: float, path: Path) -> Any:
    """Pad the ragged leaves of a container with ragged batch dims, and put the new lengths into its batch size."""
    entries: dict[str, Any] = {}
    size = list(node._batch_size)
    for name, value in node._entries.items():
        nested = isinstance(value, Contract)
        entries[name] = made = _pad_ragged_dims(value, padding, (*path, name)) if nested else _pad_rows(value, padding)
        for dim, (length, actual) in enumerate(zip(size, made._batch_size if nested else made.shape, strict=False)):
            if not isinstance(length, int) or length < 0:
                size[dim] = actual
            elif length != actual:
                raise ShapeError(
                    f"entry {joined((*path, name))!r}: its longest row has the length {actual} along batch dim {dim}, "
                    f"but another entry has the length {length}"
                )
    return node._build(entries, torch.Size(size), node._device, node._names)
