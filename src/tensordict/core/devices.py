"""Devices: their canonical form, and waiting for what was queued on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

_CPU = torch.device("cpu")


def as_device(device: object) -> torch.device:
    """A device as tensors report it: a bare `cuda` gets the index it stands for, the CPU has none.

    Raises:
        RuntimeError: there is no such device.
        TypeError: this is nothing that names a device.
    """
    if type(device) is str and device == "cpu":
        return _CPU
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"a device is a torch.device, a string or an index, got {device!r}")
    if isinstance(device, str) and isinstance(getattr(torch, device.removeprefix("torch."), None), torch.dtype):
        raise RuntimeError(
            f"Invalid device string: {device!r} names a dtype and no device; use torch.{device.removeprefix('torch.')}"
        )
    if isinstance(device, str) and device.startswith("gpu"):
        raise RuntimeError(f"Invalid device string: {device!r}; GPUs are called 'cuda' by torch, or 'xpu' or 'mps'")
    found: torch.device = device if isinstance(device, torch.device) else torch.device(device)
    # Torch's annotations leave out that a device may have no index.
    kind, index = found.type, cast("int | None", found.index)
    if kind in ("cpu", "meta"):
        return found if index is None else torch.device(kind)
    if index is not None:
        return found
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind, torch.empty((), device=found).device.index)


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait once per device for the copies that were queued on its current stream."""
    for device in devices:
        if device.type == "cuda":
            # The stream, not the device: work that others queued on other streams is none of our business.
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
