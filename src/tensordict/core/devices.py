"""Normalize devices, move tensors to them, and wait for queued copies; used wherever a device is an argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

ValueT = TypeVar("ValueT")

CPU = torch.device("cpu")
_WITHOUT_INDEX = {"cpu": CPU, "meta": torch.device("meta")}


def as_device(device: object) -> torch.device:
    """Return a device as containers report it: `cuda` gets its current index; a CPU device stays unchanged.

    Raises:
        RuntimeError: the device does not exist.
        TypeError: the argument does not name a device.
    """
    if type(device) is str and device == "cpu":
        return CPU
    if not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"a device is a torch.device, a string or an index, got {device!r}")
    if isinstance(device, str) and isinstance(getattr(torch, device.removeprefix("torch."), None), torch.dtype):
        raise RuntimeError(
            f"Invalid device string: {device!r} names a dtype, not a device; use torch.{device.removeprefix('torch.')}"
        )
    if isinstance(device, str) and device.startswith("gpu"):
        raise RuntimeError(f"Invalid device string: {device!r}; GPUs are called 'cuda' by torch, or 'xpu' or 'mps'")
    found: torch.device = device if isinstance(device, torch.device) else torch.device(device)
    # Torch's annotations do not say that the index may be missing.
    kind, index = found.type, cast("int | None", found.index)
    if index is not None or kind in ("cpu", "meta"):
        return found
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind, torch.empty((), device=found).device.index)


def place_of(device: torch.device) -> torch.device:
    """Return the device of the tensors in a container on `device`: torch drops the CPU index, and copies to `cpu:1`."""
    # Test the frequent case first: it takes half the time.
    return device if device.index is None else _WITHOUT_INDEX.get(device.type, device)  # type: ignore[redundant-expr]


def put_on(value: ValueT, device: torch.device, non_blocking: bool = False) -> ValueT:
    """Return a tensor or container on `device`. CPU tensors are not copied, whatever the index of the CPU device."""
    item: Any = value
    if isinstance(value, Tensor):
        return item.to(place_of(device), non_blocking=non_blocking)  # type: ignore[no-any-return]
    return item.to(device)  # type: ignore[no-any-return]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait once per device for the copies that were queued on its current stream."""
    for device in devices:
        if device.type == "cuda":
            # Wait for the stream and not for the device: other streams may hold unrelated work.
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
