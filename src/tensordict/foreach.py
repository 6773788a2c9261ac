"""Torch's `_foreach_*` calls: one call for a list of leaves instead of one per leaf, where that is possible."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_PLAIN = {Tensor}
_requires_grad = attrgetter("requires_grad")


def usable(leaves: Sequence[Any]) -> bool:
    """Whether a `_foreach_*` call does to these leaves what one call per leaf does.

    They must be plain tensors: subclasses have calls of their own. `torch.func` has no batching rules for lists of
    tensors, and compiled code fuses single calls by itself.
    """
    return set(map(type, leaves)) == _PLAIN and not _transformed()


def clone(leaves: list[Tensor]) -> Sequence[Tensor]:
    """Copies of tensors for which :func:`usable` holds; 0.9 us a leaf instead of 1.2 us, gradients included."""
    return torch._foreach_clone(leaves)


def copy_(targets: list[Tensor], values: list[Tensor], non_blocking: bool = False) -> None:
    """Copy each value into its target, which have the same shape, whatever they are."""
    if (
        len(targets) < 3
        or _transformed()
        or (torch.is_grad_enabled() and (True in map(_requires_grad, targets) or True in map(_requires_grad, values)))
    ):
        # The call on lists can be differentiated no more than it can be batched, and pays off from three leaves on.
        for target, value in zip(targets, values, strict=True):
            target.copy_(value, non_blocking)
    else:
        torch._foreach_copy_(targets, values, non_blocking=non_blocking)


def _transformed() -> bool:
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
