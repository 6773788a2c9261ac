"""`isin` and `remove_duplicates`, which compare elements of one entry along a batch dim; exported by `utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import path_of
from tensordict.core.shapes import as_dim


def isin(input: Any, reference: Any, key: object, dim: int = 0) -> Tensor:
    """Test which elements of an entry, along a batch dim, also occur in the same entry of another container.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import isin
        >>> td = TensorDict(a=torch.tensor([[1, 2], [3, 4]]), batch_size=[2])
        >>> isin(td, TensorDict(a=torch.tensor([[3, 4]]), batch_size=[1]), "a")
        tensor([False,  True])

    Args:
        input: a container.
        reference: a container whose entry has the same shape in all dims but `dim`.
        key: the nested key of the entry in both.
        dim: the batch dim.

    Returns:
        a bool tensor of length `input.batch_size[dim]`.

    Raises:
        KeyError: one of the containers lacks a tensor at `key`.
        ValueError: `dim` is not a batch dim of both.
        RuntimeError: the entries differ in another dim.
    """
    wanted, known = _get_tensor(input, key, "input"), _get_tensor(reference, key, "reference")
    dim = as_dim(dim, len(input._batch_size))
    as_dim(dim, len(reference._batch_size))
    rest = [shape[:dim] + shape[dim + 1 :] for shape in (wanted.shape, known.shape)]
    if rest[0] != rest[1]:
        raise ShapeError(
            f"entry {key!r} has shapes {list(wanted.shape)} and {list(known.shape)}, different in more than dim {dim}"
        )
    if wanted.ndim == 1 and torch.bool not in (wanted.dtype, known.dtype):  # torch.isin rejects bool tensors
        return torch.isin(wanted, known)
    length = wanted.shape[dim]
    groups = _number_groups(torch.cat([wanted, known], dim), dim)
    found = torch.zeros(len(groups), dtype=torch.bool, device=groups.device)
    found[groups[length:]] = True
    return found[groups[:length]]


def remove_duplicates(input: Any, key: Any, dim: int = 0, *, return_indices: bool = False) -> Any:
    """Keep only the first of equal elements along a batch dim; one entry decides which elements are equal.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.utils import remove_duplicates
        >>> td = TensorDict(a=torch.tensor([5, 5, 7]), b=torch.arange(3), batch_size=[3])
        >>> remove_duplicates(td, "a")["b"]
        tensor([0, 2])

    Args:
        input: a container.
        key: the nested key of the entry to compare.
        dim: the batch dim.
        return_indices: also return the positions in `input` of the elements kept.

    Returns:
        a new container, sorted by the elements of the entry; with `return_indices`, a pair of it and the positions.

    Raises:
        KeyError: `key` does not lead to a tensor.
        ValueError: `dim` is not a batch dim.
    """
    tensor = _get_tensor(input, key, "the container")
    dim = as_dim(dim, len(input._batch_size))
    length = tensor.shape[dim]
    groups = _number_groups(tensor, dim)
    positions = torch.arange(length, device=groups.device)
    count = int(groups.max()) + 1 if length else 0
    # "amin" keeps the smallest, and so the first, position of each group.
    first = positions.new_full((count,), length).scatter_reduce_(0, groups, positions, "amin")
    result = input[(slice(None),) * dim + (first,)]
    return (result, first) if return_indices else result


def _number_groups(tensor: Tensor, dim: int) -> Tensor:
    """Number the distinct elements along `dim` in ascending order. Returns the number of each element."""
    if not tensor.numel():
        # Elements without numbers are all equal.
        return torch.zeros(tensor.shape[dim], dtype=torch.int64, device=tensor.device)
    columns = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    if columns.shape[1] > _MAX_COLUMNS:
        return _rank(columns, dim=0)
    # Sorting whole rows takes 1.2 us a row. Sorting column after column takes 0.1 us for each row and column.
    first, *others = columns.unbind(1)
    groups = _rank(first)
    for column in others:
        numbers = _rank(column)
        groups = _rank(groups * (numbers.max() + 1) + numbers)
    return groups


def _rank(values: Tensor, dim: int | None = None) -> Tensor:
    inverse: Tensor = torch.unique(values, return_inverse=True, dim=dim)[1]
    return inverse


# Elements of at most this many numbers are sorted column by column.
_MAX_COLUMNS = 6


def _get_tensor(container: Any, key: Any, what: str) -> Tensor:
    value = container._peek(path_of(key)) if isinstance(container, Contract) else None
    if not isinstance(value, Tensor):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise KeyError(f"no tensor at {key!r} in {what}, found {found}")
    return value
