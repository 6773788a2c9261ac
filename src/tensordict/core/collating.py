"""Teach `torch.utils.data.DataLoader` to batch containers without a `collate_fn`."""

from __future__ import annotations

from typing import Any

import torch

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract


def collate(batch: Any, *, collate_fn_map: object = None) -> Any:
    """Batch containers: return a container unchanged, or stack samples.

    Args:
        batch: a container, as its `__getitems__` returns it, or a sequence of containers with the same batch size.
        collate_fn_map: torch's functions for other types; ignored, because all entries are tensors.

    Returns:
        The container itself, or the stack of the samples along a new first dim.
    """
    return batch if isinstance(batch, Contract) else torch.stack(list(batch))


# Torch documents this table for user-defined types. It also covers their subclasses.
internals.collate_functions[Contract] = collate
