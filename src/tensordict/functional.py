"""Free functions on containers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensordict.ops.stacking import cat_containers, stack_containers


def stack(input: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Stack containers along a new batch dim; plain tensors go to :func:`torch.stack`.

    Args:
        input: containers with the same keys and shapes.
        dim: where the new dim goes.
        out: a container of the resulting batch size to write into, in place.

    Returns:
        a new container, or `out`.

    Raises:
        KeyError: the keys differ; the odd ones are named.
        RuntimeError: the batch sizes or the shapes of an entry differ.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, stack
        >>> stack([TensorDict({"a": torch.zeros(3)}, [3]) for _ in range(2)])["a"].shape
        torch.Size([2, 3])
    """
    if _are_tensors(input):
        return torch.stack(input, dim, out=out)  # type: ignore[arg-type]
    return stack_containers(input, dim, out)


def cat(input: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Concatenate containers along an existing batch dim; plain tensors go to :func:`torch.cat`.

    Arguments and errors as :func:`stack`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, cat
        >>> cat([TensorDict({"a": torch.zeros(n)}, [n]) for n in (1, 2)])["a"].shape
        torch.Size([3])
    """
    if _are_tensors(input):
        return torch.cat(input, dim, out=out)  # type: ignore[arg-type]
    return cat_containers(input, dim, out)


def _are_tensors(input: Any) -> bool:
    return isinstance(input, (list, tuple)) and bool(input) and isinstance(input[0], Tensor)
