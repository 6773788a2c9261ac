"""TensorAttrs: the device, the dtype and the shape of a tensor, in the place of the tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tensordict import registry
from tensordict.contract import Names
from tensordict.devices import as_device
from tensordict.tensordict import TensorDict

if TYPE_CHECKING:
    from typing_extensions import Self


@registry.register
class TensorAttrs(TensorDict):
    """What is known of a tensor, as a container without entries; `td.attrs()` puts one in the place of each leaf.

    Args:
        tgt_device: the device, `None` when it does not matter.
        tgt_dtype: the dtype, `None` when it does not matter.
        tgt_shape: the shape, `None` when it does not matter.
        batch_size: the batch size of the container itself.
        device: the device of the container itself.
        names: the dim names of the container itself.

    Example:
        >>> import torch
        >>> from tensordict import TensorAttrs
        >>> TensorAttrs("cpu", torch.float32).tgt_dtype
        torch.float32
    """

    tgt_device: torch.device | None
    tgt_dtype: torch.dtype | None
    tgt_shape: torch.Size | None

    def __init__(
        self,
        tgt_device: Any = None,
        tgt_dtype: torch.dtype | None = None,
        tgt_shape: Any = None,
        *,
        batch_size: Any = None,
        device: Any = None,
        names: Any = None,
    ) -> None:
        super().__init__(batch_size=batch_size, device=device, names=names)
        self.tgt_device = None if tgt_device is None else as_device(tgt_device)
        self.tgt_dtype = tgt_dtype
        self.tgt_shape = None if tgt_shape is None else torch.Size(tgt_shape)

    def _build(
        self, entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None, names: Names | None
    ) -> Self:
        out = super()._build(entries, batch_size, device, names)
        out.tgt_device, out.tgt_dtype, out.tgt_shape = self.tgt_device, self.tgt_dtype, self.tgt_shape
        return out

    def __repr__(self) -> str:
        return f"TensorAttrs(tgt_device={self.tgt_device}, tgt_dtype={self.tgt_dtype}, tgt_shape={self.tgt_shape})"
