"""Functions on shapes, dims and indices, under names that client programs import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.exceptions import BatchIndexError
from tensordict.core.indices import _count_dims, leaf_index, result_size
from tensordict.core.shapes import as_dim, as_size, infer_shape
from tensordict.ops.collection import TensorCollection


def _getitem_batch_size(batch_size: Sequence[int], index: object) -> torch.Size:
    """Return the shape of the result of indexing a tensor of the shape `batch_size`.

    `tensordict.utils._getitem_batch_size`: TorchRL uses it for the shapes of its specs and of `EnvMetaData`.

    Args:
        batch_size: the shape before indexing.
        index: anything that indexes a tensor.

    Raises:
        IndexError: the index does not fit the shape.

    Example:
        >>> from tensordict.compat.index_shapes import _getitem_batch_size
        >>> _getitem_batch_size([4, 3, 2, 1], (None, ..., 0))
        torch.Size([1, 4, 3, 2])
    """
    size = batch_size if type(batch_size) is torch.Size else torch.Size(batch_size)
    return result_size(leaf_index(index, size), size)


def convert_ellipsis_to_idx(idx: Any, batch_size: Sequence[int]) -> Any:
    """Replace the Ellipsis in an index by full slices.

    Args:
        idx: an index; one without an Ellipsis is returned unchanged.
        batch_size: the shape that is indexed.

    Raises:
        IndexError: the index has two Ellipses, or more dims than the shape.

    Example:
        >>> from tensordict.utils import convert_ellipsis_to_idx
        >>> convert_ellipsis_to_idx((..., 0), [1, 2, 3])
        (slice(None, None, None), slice(None, None, None), 0)
    """
    items = (idx,) if idx is Ellipsis else idx
    places = [place for place, item in enumerate(items) if item is Ellipsis] if isinstance(items, tuple) else []
    if not places:
        return idx
    if len(places) > 1:
        raise BatchIndexError(f"an index has one Ellipsis at most, got {idx}")
    missing = len(batch_size) - sum(map(_count_dims, items))
    if missing < 0:
        raise BatchIndexError(f"too many indices in {idx} for the shape {list(batch_size)}")
    return (*items[: places[0]], *[slice(None)] * missing, *items[places[0] + 1 :])


def _maybe_correct_neg_dim(dim: int, shape: Sequence[int] | None, ndim: int | None = None) -> int:
    """Convert a dim to a non-negative dim. `tensordict.utils._maybe_correct_neg_dim`: TorchRL's `History` uses it.

    Args:
        dim: the dim; a negative one counts from the end.
        shape: the shape that has the dim.
        ndim: the number of dims, instead of a shape.

    Raises:
        IndexError: the dim is out of range.

    Example:
        >>> from tensordict.compat.index_shapes import _maybe_correct_neg_dim
        >>> _maybe_correct_neg_dim(-1, [2, 3]), _maybe_correct_neg_dim(-1, None, 4)
        (1, 3)
    """
    if ndim is None:
        if shape is None:
            raise TypeError("a shape or a number of dims is needed, got neither")
        ndim = len(shape)
    return as_dim(dim, ndim)


def infer_size_impl(shape: Sequence[int], numel: int) -> list[int]:
    """Fill in the `-1` of a shape.

    Args:
        shape: ints; at most one is -1.
        numel: the number of elements.

    Raises:
        RuntimeError: no size for the -1 gives this number of elements.

    Example:
        >>> from tensordict.utils import infer_size_impl
        >>> infer_size_impl([2, -1], 6)
        [2, 3]
    """
    return list(infer_shape(tuple(shape), as_size(numel)))


def _shape(tensor: Tensor | TensorCollection) -> torch.Size:
    """Return the shape of a tensor or container, with -1 for the ragged dims of a strided nested tensor.

    `tensordict.utils._shape`: TorchRL uses it in `Bounded.is_in`.

    Example:
        >>> import torch
        >>> from tensordict.compat.index_shapes import _shape
        >>> _shape(torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)]))
        torch.Size([2, -1, 4])
    """
    return ragged.shape_of(tensor) if isinstance(tensor, Tensor) else tensor.shape
