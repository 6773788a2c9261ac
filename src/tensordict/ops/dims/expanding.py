"""`expand_right` and `expand_as_right`, which add trailing dims to tensors and containers; exported by `utils`."""

from __future__ import annotations

from typing import Any

from tensordict.core.exceptions import ShapeError


def expand_right(tensor: Any, shape: Any) -> Any:
    """Expand a tensor or container to a shape by adding trailing dims.

    Example:
        >>> import torch
        >>> from tensordict.utils import expand_right
        >>> expand_right(torch.arange(2), (2, 3))
        tensor([[0, 0, 0],
                [1, 1, 1]])

    Args:
        tensor: its shape must match the first dims of `shape`, or be 1 there.
        shape: a sequence of ints.

    Returns:
        a view.

    Raises:
        RuntimeError: `shape` has fewer dims than the tensor, or its sizes do not match.
    """
    shape = tuple(shape)
    missing = len(shape) - tensor.ndim
    if missing < 0:
        raise ShapeError(f"a tensor of shape {list(tensor.shape)} cannot be expanded to the dims of {list(shape)}")
    return tensor.reshape((*tensor.shape, *[1] * missing)).expand(shape)


def expand_as_right(tensor: Any, dest: Any) -> Any:
    """Expand a tensor or container to the shape of another one by adding trailing dims; see :func:`expand_right`.

    Example:
        >>> import torch
        >>> from tensordict.utils import expand_as_right
        >>> expand_as_right(torch.zeros(2), torch.zeros(2, 3)).shape
        torch.Size([2, 3])
    """
    if dest.ndim < tensor.ndim or any(a not in (1, b) for a, b in zip(tensor.shape, dest.shape, strict=False)):
        raise ShapeError(
            f"a tensor of shape {list(tensor.shape)} cannot be expanded to the right as {list(dest.shape)}, which does "
            "not begin with it"
        )
    return expand_right(tensor, dest.shape)
