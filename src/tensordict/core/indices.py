"""Apply indices over the batch dims to leaves, and compute the batch size and names of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core.exceptions import BatchIndexError, ShapeError

_FULL = slice(None)
_BASIC = (int, slice, type(None))
_MASKS = (torch.bool, torch.uint8)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def leaf_index(index: Any, batch_size: torch.Size) -> Any:
    """Convert an index on a tensor of shape `batch_size` to the index that selects the same batch elements of a leaf.

    Lists, ranges and NumPy arrays are converted to tensors once, instead of once per leaf. A mask becomes the integer
    index that torch would make of it. An Ellipsis becomes full slices, because a leaf has feature dims after the batch
    dims.

    Raises:
        IndexError: the index addresses more dims than the batch has.
    """
    kind = type(index)
    if kind is int or kind is slice:
        if len(batch_size):
            return index
        if kind is slice:
            raise _too_many_error(1, batch_size)
        raise BatchIndexError(f"a container without batch dims (batch_size=[]) cannot be indexed with {index!r}")
    if kind is tuple or kind is torch.Size:
        return _convert_tuple(index, batch_size)
    if index is None:
        return None
    if index is Ellipsis:
        return ()
    if kind is not Tensor:
        index = _convert_item(index)
    consumed = _count_dims(index)
    if consumed > len(batch_size):
        raise _too_many_error(consumed, batch_size)
    if isinstance(index, Tensor) and index.dtype in _MASKS and index.ndim:
        return _convert_mask(index, batch_size)
    return index


def is_beyond(index: object, batch_size: torch.Size) -> bool:
    """Return whether `index` would reach the feature dims of a leaf, instead of batch dims only."""
    if type(index) is int or type(index) is slice:
        return len(batch_size) == 0
    items = index if isinstance(index, (tuple, torch.Size)) else (index,)
    if any(item is Ellipsis for item in items[:-1]):
        return True
    known = [item if item is None or item is Ellipsis else _convert_item(item) for item in items]
    return sum(map(_count_dims, known)) > len(batch_size)


def result_size(index: Any, batch_size: torch.Size) -> torch.Size:
    """Return the batch size after indexing with `index`, an output of `leaf_index`."""
    kind = type(index)
    if kind is int:
        size = batch_size[0]
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of bounds for dimension 0 with size {size}")
        return batch_size[1:]
    if kind is slice:
        return torch.Size((_slice_length(index, batch_size[0]), *batch_size[1:]))
    if index is None:
        return torch.Size((1, *batch_size))
    if kind is tuple:
        basic = _compute_basic_size(index, batch_size)
        return _ask_torch_size(index, batch_size) if basic is None else basic
    if kind is Tensor and index.dtype not in _MASKS:
        return index.shape + batch_size[1:]  # type: ignore[no-any-return]
    return _ask_torch_size(index, batch_size)


def checked_size(index: object, batch_size: torch.Size) -> torch.Size:
    """Like `result_size`, and check that every element of an index tensor is in bounds.

    Compiled code cannot look at elements. It fails at run time if one is out of bounds.
    """
    if type(index) is Tensor and not torch.compiler.is_compiling():
        if index.ndim != 1 or index.numel() > 64 or not index.is_cpu or index.dtype not in INTEGERS:
            return _ask_torch_size(index, batch_size)
        # For a few elements, comparing in Python takes a third of the time.
        size = batch_size[0]
        for i in index.tolist():
            if not -size <= i < size:
                raise IndexError(f"index {i} is out of bounds for dimension 0 with size {size}")
    return result_size(index, batch_size)


def is_basic(index: object) -> bool:
    """Return whether an output of `leaf_index` gives views: it contains only integers, slices and None."""
    return type(index) in _BASIC or (type(index) is tuple and all(type(item) in _BASIC for item in index))


def _ask_torch_size(index: Any, batch_size: torch.Size) -> torch.Size:
    """Let torch compute the size, by indexing a tensor of this size that owns one byte; about 3 us."""
    if -1 in batch_size:
        raise ShapeError(
            f"the members of this lazy stack have different batch sizes, {list(batch_size)} together: assign to each "
            "member, as in td[0][index] = value"
        )
    return torch.Size(torch.empty((), dtype=torch.uint8).expand(batch_size)[index].shape)


def _compute_basic_size(index: tuple[Any, ...], batch_size: torch.Size) -> torch.Size | None:
    """Like `result_size`, for a tuple of integers, slices and None; `None` if the tuple contains other items."""
    out: list[int] = []
    position = 0
    for item in index:
        kind = type(item)
        if kind is int:
            size = batch_size[position]
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {position} with size {size}")
            position += 1
        elif kind is slice:
            out.append(batch_size[position] if item == _FULL else _slice_length(item, batch_size[position]))
            position += 1
        elif item is None:
            out.append(1)
        else:
            return None
    return torch.Size((*out, *batch_size[position:]))


def _slice_length(item: slice, size: int) -> int:
    if torch.compiler.is_compiling():
        # `slice.indices` would make torch recompile for every batch size.
        step = 1 if item.step is None else item.step
        start = 0 if item.start is None else _clamp(item.start, size)
        stop = size if item.stop is None else _clamp(item.stop, size)
    else:
        start, stop, step = item.indices(size)
    if step <= 0:
        raise ValueError("step must be greater than zero")
    return max(0, (stop - start + step - 1) // step)


def _clamp(bound: int, size: int) -> int:
    """Clamp a bound of a slice to the size, counted from the front."""
    return max(0, bound + size) if bound < 0 else min(bound, size)


def is_mask(index: object) -> bool:
    """Return whether an index is a tensor or an array of booleans."""
    return isinstance(index, (Tensor, np.ndarray)) and index.dtype in (torch.bool, np.bool_)


def index_for_names(index: object, at: Any) -> Any:
    """Choose the index to pass to `rename_dims`: the mask itself, or `at` for any other index.

    Args:
        index: the index as the caller wrote it.
        at: the same index, converted by `leaf_index`. This splits a mask of several dims, and hides that it was a mask.
    """
    return torch.as_tensor(index) if is_mask(index) else at


def rename_dims(names: list[str | None], index: object, count: int) -> list[str | None]:
    """Return the dim names after indexing dims with these names, when the result has `count` dims.

    A dim that is kept keeps its name. Dims that come from index tensors get the name of the first dim that these index.
    Dims that come from `None`, or from a mask of several dims, have no name.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    out: list[str | None] = []
    position = 0
    # The name for dims made by index tensors: the name of the first dim that they index.
    made: str | None = None
    advanced_at: list[int] = []
    for item in items:
        if item is None:
            out.append(None)
        elif isinstance(item, slice):
            out.append(names[position])
            position += 1
        elif isinstance(item, int) and not isinstance(item, bool):
            position += 1
        else:
            consumed = _count_dims(item)
            if not advanced_at and consumed == 1:
                made = names[position]
            advanced_at.append(len(out))
            position += consumed
    rest = names[position:]
    added = count - len(out) - len(rest)
    if advanced_at and added:
        at = advanced_at[0] if advanced_at[0] == advanced_at[-1] else 0
        out[at:at] = [made] * added
    return out + rest


def _convert_tuple(index: tuple[Any, ...], batch_size: torch.Size) -> tuple[Any, ...]:
    items: list[Any] = []
    consumed = 0
    ellipsis_at: int | None = None
    for item in index:
        kind = type(item)
        if kind is int or kind is slice:
            consumed += 1
        elif item is Ellipsis:
            if ellipsis_at is None:
                ellipsis_at = len(items)
        elif item is not None:
            item = _convert_item(item)
            consumed += _count_dims(item)
        items.append(item)
    ndim = len(batch_size)
    if consumed > ndim:
        raise _too_many_error(consumed, batch_size)
    if ellipsis_at is not None:
        items[ellipsis_at : ellipsis_at + 1] = [_FULL] * (ndim - consumed)
        # Torch allows further Ellipses if no dims are left for them.
        while items and items[-1] is Ellipsis:
            items.pop()
        if any(item is Ellipsis for item in items):
            raise IndexError("an index can only have a single ellipsis ('...')")
    return tuple(items)


def _count_dims(item: object) -> int:
    """Return the number of dims that one item of an index addresses."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, Tensor) and item.dtype in _MASKS:
        return item.ndim
    return 1


def _convert_item(item: object) -> Any:
    """Convert a list, range, array or NumPy scalar to the form that torch indexes fastest with."""
    if isinstance(item, (Tensor, bool, int, slice)):
        return item
    if isinstance(item, range):
        if item.step > 0 and item.start >= 0 and len(item):
            return torch.arange(item.start, item.stop, item.step)
        return torch.tensor(list(item), dtype=torch.long)
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item)
    if isinstance(item, (np.integer, np.bool_)):
        return item.item()
    if isinstance(item, Sequence) and not isinstance(item, str):
        if item and isinstance(item[0], str):
            names = ", ".join(map(repr, item))
            raise TypeError(f"a list of strings is no key: write the nested key td[{names}], or td.select({names})")
        tensor = torch.stack([torch.as_tensor(x) for x in item]) if _has_tensors(item) else torch.tensor(item)
        return tensor if tensor.numel() else tensor.long()
    if type(item).__module__.partition(".")[0] == "functorch":
        return item  # torch binds a first-class dim of `functorch.dim` to the dim at its position
    if hasattr(item, "__index__"):
        return item.__index__()
    raise IndexError(
        f"a container is indexed by integers, slices, None, Ellipsis, tensors, arrays, lists, ranges or tuples of "
        f"these, got {item!r} of type {type(item).__name__}"
    )


def _has_tensors(items: Sequence[object]) -> bool:
    return any(isinstance(item, Tensor) for item in items)


def _convert_mask(mask: Tensor, batch_size: torch.Size) -> Tensor | tuple[Tensor, ...]:
    """Convert a boolean mask to the integer index that torch would make of it, once instead of once per leaf."""
    for dim, size in enumerate(mask.shape):
        if size != batch_size[dim]:
            raise IndexError(
                f"the shape of the mask {list(mask.shape)} "
                f"does not match the batch size {list(batch_size)} at dim {dim}"
            )
    found = mask.nonzero(as_tuple=True)
    return found[0] if len(found) == 1 else found


def _too_many_error(count: int, batch_size: torch.Size) -> BatchIndexError:
    return BatchIndexError(
        f"too many indices: {count} for the batch size {list(batch_size)}; further dims are those of an entry, "
        "as in td[key][index]"
    )
