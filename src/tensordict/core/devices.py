"""Devices: their canonical form, and waiting for what was queued on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

ValueT = TypeVar("ValueT")

_CPU = torch.device("cpu")
_WITHOUT_INDEX = {"cpu": _CPU, "meta": torch.device("meta")}


def as_device(device: object) -> torch.device:
    """A device as a container reports it: a bare `cuda` gets the index it stands for, the CPU keeps what it was given.

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
    if index is not None or kind in ("cpu", "meta"):
        return found
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device())
    return torch.device(kind, torch.empty((), device=found).device.index)


def place_of(device: torch.device) -> torch.device:
    """Return the device of the tensors in a container on `device`: torch drops the CPU index, and copies to `cpu:1`."""
    # The frequent case first: it takes half the time.
    return device if device.index is None else _WITHOUT_INDEX.get(device.type, device)  # type: ignore[redundant-expr]


def put_on(value: ValueT, device: torch.device, non_blocking: bool = False) -> ValueT:
    """A tensor or a container on `device`; a tensor that is there is not copied, whatever index the CPU has."""
    item: Any = value
    if isinstance(value, Tensor):
        return item.to(place_of(device), non_blocking=non_blocking)  # type: ignore[no-any-return]
    return item.to(device)  # type: ignore[no-any-return]


def wait_for(devices: Iterable[torch.device]) -> None:
    """Wait once per device for the copies that were queued on its current stream."""
    for device in devices:
        if device.type == "cuda":
            # The stream, not the device: work that others queued on other streams is none of our business.
            torch.cuda.current_stream(device).synchronize()
        elif device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
