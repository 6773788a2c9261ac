"""What `torch.utils.data.DataLoader` makes of containers where it is given no `collate_fn`."""

from __future__ import annotations

from typing import Any

import torch

from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract


def collate(batch: Any, *, collate_fn_map: object = None) -> Any:
    """A batch of containers: a container that was cut out of a data set as a whole, or samples, which are stacked.

    Args:
        batch: a container (what `__getitems__` of a container gives), or a sequence of containers of one batch size.
        collate_fn_map: what torch has for other types; the entries of a container are tensors.

    Returns:
        the container as it is, or the stack of the samples along a new first dim.
    """
    return batch if isinstance(batch, Contract) else torch.stack(list(batch))


# The way that torch documents for types of one's own; subclasses are found by it, too.
internals.collate_functions[Contract] = collate
