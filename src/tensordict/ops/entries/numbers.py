"""What a container takes besides tensors and containers: numbers, lists and arrays of them, and any other value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.convert.numpy import container_of, is_numeric, shape_of_rows
from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.devices import place_of
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, joined

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def to_tensor(item: object, path: Path, device: torch.device | None) -> Tensor:
    """A number, list or numpy array as a tensor; numpy memory is shared where torch can.

    Raises:
        TypeError: it is none of these; names `path`.
    """
    tensor = _as_numbers(item, path, device)
    if tensor is None:
        raise TypeError(
            f"entry {joined(path)!r} is a tensor and cannot be given a {type(item).__name__}; it takes tensors, "
            "numbers, lists of numbers and numpy arrays"
        )
    return tensor


def _as_numbers(item: object, path: Path, device: torch.device | None) -> Tensor | None:
    """What consists of numbers as a tensor, `None` for any other value; raises naming `path` for ragged lists."""
    if type(item) is np.ndarray and item.dtype.kind in "biufc":
        # A third of the time of `as_tensor`, which does the same.
        return torch.from_numpy(item) if device is None else torch.as_tensor(item, device=device)
    if isinstance(item, _NUMBERS):
        return torch.as_tensor(item, device=device)
    if item is None or isinstance(item, (str, bytes, type)):
        return None
    if isinstance(item, (list, tuple, range)):
        first = item[0] if item else None
        while isinstance(first, (list, tuple)) and first:
            first = first[0]
        if isinstance(first, (Contract, str, bytes)):
            # To torch, a container is a sequence, and one without batch dims an empty one. Texts end here because
            # compiled code cannot catch torch's error.
            return None
        try:
            if isinstance(first, Tensor) or any(isinstance(x, Tensor) for x in item):
                return _stacked(item, device)
            # torch is slow with a list of arrays, and warns.
            by_numpy = isinstance(item, range) or any(isinstance(x, np.ndarray) for x in item)
            tensor = torch.as_tensor(np.asarray(item) if by_numpy else item, device=device)
            if not tensor.numel() and shape_of_rows(item) is None:
                # Torch takes the first row for all: what the others have would be lost.
                raise ValueError(f"expected rows of length {tensor.shape[-1]}")
            return tensor
        except (TypeError, ValueError, RuntimeError) as error:
            if not is_numeric(item):
                return None
            raise TypeError(
                f"entry {joined(path)!r}: a {type(item).__name__} that is not a regular array of numbers ({error}): "
                "use a nested tensor for rows of different lengths, or set_non_tensor to keep it as it is"
            ) from error
    if hasattr(item, "__array__") or hasattr(item, "__dlpack__"):
        try:
            return torch.as_tensor(item, device=device)
        except (TypeError, ValueError, RuntimeError):
            # An array of something else than numbers, such as strings.
            return None
    return None


def _stacked(item: Any, device: torch.device | None) -> Tensor:
    """Nested lists with tensors in them as one tensor."""
    return torch.stack(
        [_stacked(x, device) if isinstance(x, (list, tuple)) else torch.as_tensor(x, device=device) for x in item]
    )


def _containers_stacked(item: object) -> Any:
    """A container, or the stack of those in nested lists; `None` for anything else."""
    if isinstance(item, Contract):
        return None if item._is_non_tensor else item
    if not isinstance(item, list) or not item:
        return None
    parts = [_containers_stacked(x) for x in item]
    return None if any(part is None for part in parts) else type(parts[0]).maybe_dense_stack(parts)


def stored(item: object, path: Path, size: torch.Size, device: torch.device | None) -> Any:
    """What is stored for a value that is no tensor, container or mapping, in a container of this batch size.

    Numbers become a tensor, a list of containers their stack, a structured array a container over its memory, anything
    else gets a holder.
    """
    tensor = _as_numbers(item, path, device if device is None or device.index is None else place_of(device))
    if tensor is not None:
        return tensor
    if isinstance(item, np.ndarray) and item.dtype.names is not None:
        return container_of(item, path)
    stack = _containers_stacked(item)
    if stack is not None:
        return stack
    return makers.held(item, size, device)


def overwriting(holder: Any, parent: Any, name: str, item: Any, path: Path) -> Callable[[], None]:
    """What writes a value over all of a holder in place, as its `_replacing`; the entry stays one of its kind.

    Raises:
        ShapeError: a tensor, or a number that would be one, is written over a value; or a list over a single one.
    """
    if type(item) is not str:  # which nearly all values are: the check takes 2 of 8 us
        _check_kind(holder, item, path)
    write: Callable[[], None] = holder._replacing(parent, name, item, (), holder._batch_size, path)
    return write


def _check_kind(holder: Any, item: object, path: Path) -> None:
    """Raise for a value that would make another kind of entry of a holder."""
    made = item if isinstance(item, (Tensor, Contract)) else stored(item, path, holder._batch_size, None)
    single = hasattr(holder, "_value")
    if isinstance(made, Tensor) and not isinstance(item, (tuple, range)):
        values = [holder._value] if single else holder._flat_values()
        if type(item) not in set(map(type, values)):
            raise ShapeError(
                f"Failed to update {joined(path)!r} in tensordict: it holds a value that is no tensor, and a "
                f"{type(item).__name__} written in place would change that. set() and update() replace an entry"
            )
    elif single and isinstance(made, Contract) and made._is_non_tensor and not hasattr(made, "_value"):
        raise ShapeError(
            f"Failed to update {joined(path)!r} in tensordict: Cannot update a NonTensorDataBase with a "
            f"{type(made).__name__} object in place, since it holds one value for all of its batch: put its "
            "maybe_to_stack() there first, or replace the entry with set()"
        )
