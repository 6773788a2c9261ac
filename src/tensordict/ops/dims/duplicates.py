"""Elements along a batch dim that two containers share, or that one has twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import path_of
from tensordict.core.shapes import as_dim


def isin(input: Any, reference: Any, key: object, dim: int = 0) -> Tensor:
    """Which elements of an entry along a batch dim are found in the same entry of another container too.

    Args:
        input: a container.
        reference: a container whose entry has the same shape in all dims but `dim`.
        key: the nested key of the entry in both.
        dim: the batch dim.

    Returns:
        a bool tensor of length `input.batch_size[dim]`.

    Raises:
        KeyError: one of them has no tensor at `key`.
        ValueError: `dim` is not a batch dim of both.
        RuntimeError: the entries differ in another dim.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import isin
        >>> td = TensorDict(a=torch.tensor([[1, 2], [3, 4]]), batch_size=[2])
        >>> isin(td, TensorDict(a=torch.tensor([[3, 4]]), batch_size=[1]), "a")
        tensor([False,  True])
    """
    wanted, known = _tensor_at(input, key, "input"), _tensor_at(reference, key, "reference")
    dim = as_dim(dim, len(input._batch_size))
    as_dim(dim, len(reference._batch_size))
    rest = [shape[:dim] + shape[dim + 1 :] for shape in (wanted.shape, known.shape)]
    if rest[0] != rest[1]:
        raise ShapeError(
            f"entry {key!r} has shapes {list(wanted.shape)} and {list(known.shape)}, different in more than dim {dim}"
        )
    if wanted.ndim == 1 and torch.bool not in (wanted.dtype, known.dtype):  # of which torch.isin takes none
        return torch.isin(wanted, known)
    length = wanted.shape[dim]
    groups = _groups(torch.cat([wanted, known], dim), dim)
    found = torch.zeros(len(groups), dtype=torch.bool, device=groups.device)
    found[groups[length:]] = True
    return found[groups[:length]]


def remove_duplicates(input: Any, key: Any, dim: int = 0, *, return_indices: bool = False) -> Any:
    """The part of a container, along a batch dim, in which every element of one entry is found once.

    Args:
        input: a container.
        key: the nested key of the entry that is looked at.
        dim: the batch dim.
        return_indices: return the indices too.

    Returns:
        a new container, ordered by the elements of the entry; with `return_indices`, also the positions that its
        elements have in `input`, where each is found first.

    Raises:
        KeyError: there is no tensor at `key`.
        ValueError: `dim` is not a batch dim.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import remove_duplicates
        >>> td = TensorDict(a=torch.tensor([5, 5, 7]), b=torch.arange(3), batch_size=[3])
        >>> remove_duplicates(td, "a")["b"]
        tensor([0, 2])
    """
    tensor = _tensor_at(input, key, "the container")
    dim = as_dim(dim, len(input._batch_size))
    length = tensor.shape[dim]
    groups = _groups(tensor, dim)
    # The first place of each group: the smallest of those written there.
    places = torch.arange(length, device=groups.device)
    count = int(groups.max()) + 1 if length else 0
    first = places.new_full((count,), length).scatter_reduce_(0, groups, places, "amin")
    result = input[(slice(None),) * dim + (first,)]
    return (result, first) if return_indices else result


def _groups(tensor: Tensor, dim: int) -> Tensor:
    """For each element along `dim` the number of the distinct one it equals, in ascending order of these."""
    if not tensor.numel():
        # Without numbers to tell them apart, all are the same one.
        return torch.zeros(tensor.shape[dim], dtype=torch.int64, device=tensor.device)
    columns = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    if columns.shape[1] > _FEW:
        return _ranks(columns, dim=0)
    # Sorting whole rows takes 1.2 us a row; one column after the other, 0.1 us a row and column.
    first, *others = columns.unbind(1)
    groups = _ranks(first)
    for column in others:
        numbers = _ranks(column)
        groups = _ranks(groups * (numbers.max() + 1) + numbers)
    return groups


def _ranks(values: Tensor, dim: int | None = None) -> Tensor:
    inverse: Tensor = torch.unique(values, return_inverse=True, dim=dim)[1]
    return inverse


# Up to so many numbers, an element is compared number by number.
_FEW = 6


def _tensor_at(container: Any, key: Any, what: str) -> Tensor:
    value = container._peek(path_of(key)) if isinstance(container, Contract) else None
    if not isinstance(value, Tensor):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise KeyError(f"there is no tensor at {key!r} in {what}, found {found}")
    return value
