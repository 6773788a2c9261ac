"""Devices: their canonical form, and waiting for what was queued on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def as_device(device: Any) -> torch.device:
    """A device as tensors report it: a bare `cuda` gets the index it stands for, the CPU has none.

    Raises:
        RuntimeError: there is no such device.
    """
    device = torch.device(device)
    kind: str = device.type
    if kind in ("cpu", "meta"):
        return torch.device(kind)
    if device.index is not None:
        return torch.device(kind, device.index)
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind, torch.empty((), device=device).device.index)


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait once per device for the copies that were queued on its current stream."""
    for device in devices:
        if device.type == "cuda":
            # The stream, not the device: work that others queued on other streams is none of our business.
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
