"""Checks that a tensor has its elements in plain memory, for everything that stores or copies the bytes of leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.core.keys import Path, entry_of
from tensordict.memory.stored_tensors import StoredTensor

# Follows the name of the entry in an error.
SHARDED = (
    "a DTensor is one part of a tensor that is spread over ranks. Call memmap, save or consolidate with "
    "full_tensor=True on all ranks to write the whole tensor once, or save the parts with "
    'torch.distributed.checkpoint.save({"data": td}, checkpoint_id=folder), which loads them on any mesh'
)


def is_sharded(leaf: object) -> bool:
    """Return True for a `DTensor`: one part of a tensor that is spread over ranks."""
    # `isinstance` would need torch.distributed.tensor, whose import takes a second.
    return type(leaf) is not Tensor and hasattr(leaf, "full_tensor")


def refuse_sharded(container: Contract) -> None:
    """Refuse sharded leaves before a save begins, so that all ranks raise the same error.

    Raises:
        UnsupportedEntryError: a leaf is sharded; the error names the first one.
    """
    for key, leaf in container._walk():
        if is_sharded(leaf):
            raise UnsupportedEntryError(f"{entry_of(key)}{SHARDED}")


def check_storable(tensor: Tensor, key: Path = ()) -> None:
    """Refuse tensors without elements in plain memory: sparse, nested, quantized, sharded and wrapper tensors.

    Raises:
        UnsupportedEntryError: the tensor is of such a type. The error names the type, and the entry at `key`.
    """
    kind = type(tensor)
    if kind is Tensor and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
        return
    if is_sharded(tensor):
        raise UnsupportedEntryError(f"{entry_of(key)}{SHARDED}")
    if tensor.is_nested:
        what = f"nested (ragged) tensors of layout {tensor.layout}"
    elif tensor.layout is not torch.strided:
        what = f"tensors of layout {tensor.layout}"
    elif tensor.is_quantized:
        what = "quantized tensors"
    elif kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind is not StoredTensor:
        what = f"tensors of class {kind.__name__}"
    else:
        return
    raise UnsupportedEntryError(f"{entry_of(key)}{what} cannot be stored as one block of elements")
