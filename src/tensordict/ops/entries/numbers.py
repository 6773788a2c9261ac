"""Conversion of written items to entries: numbers, lists and arrays become tensors, other objects become values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.convert.numpy import container_of, is_numeric, shape_of_rows
from tensordict.core import makers, settings
from tensordict.core.contract import Contract
from tensordict.core.devices import place_of
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path, joined

_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


def to_tensor(item: object, path: Path, device: torch.device | None) -> Tensor:
    """Convert a number, list or numpy array to a tensor. It shares the memory of an array where torch can.

    Raises:
        TypeError: `item` is another object; the error names `path`.
    """
    tensor = _numbers_to_tensor(item, path, device)
    if tensor is None:
        raise TypeError(
            f"entry {joined(path)!r} is a tensor and cannot be given a {type(item).__name__}; it takes tensors, "
            "numbers, lists of numbers and numpy arrays"
        )
    return tensor


def _numbers_to_tensor(item: object, path: Path, device: torch.device | None) -> Tensor | None:
    """Convert an item that consists of numbers to a tensor; return `None` for any other item.

    Raises:
        TypeError: `item` is a list of rows of different lengths; the error names `path`.
    """
    if type(item) is np.ndarray and item.dtype.kind in "biufc":
        # The same as `as_tensor`, in a third of the time.
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
            # `as_tensor` would take a container for a sequence, and a container without batch dims for an empty one.
            # For strings it raises an error, which compiled code cannot catch.
            return None
        try:
            if isinstance(first, Tensor) or any(isinstance(x, Tensor) for x in item):
                return _stack_nested_lists(item, device)
            # Tuples, and lists that become no stack, get the dtype that NumPy gives them. Torch is slow with a list of
            # arrays, and warns about it.
            by_numpy = (
                not isinstance(item, list)
                or not settings.list_to_stack()
                or any(isinstance(x, np.ndarray) for x in item)
            )
            tensor = torch.as_tensor(np.asarray(item) if by_numpy else item, device=device)
            if not tensor.numel() and shape_of_rows(item) is None:
                # The first row is empty, and torch would drop the content of the other rows.
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
            # An array of other elements, such as strings.
            return None
    return None


def _stack_nested_lists(item: Any, device: torch.device | None) -> Tensor:
    """Stack nested lists that contain tensors into one tensor."""
    return torch.stack(
        [
            _stack_nested_lists(x, device) if isinstance(x, (list, tuple)) else torch.as_tensor(x, device=device)
            for x in item
        ]
    )


def _stack_containers(item: object) -> Any:
    """Stack the containers in nested lists; return a single container unchanged, and `None` for any other item."""
    if isinstance(item, Contract):
        return None if item._is_non_tensor else item
    if not isinstance(item, list) or not item:
        return None
    parts = [_stack_containers(x) for x in item]
    return None if any(part is None for part in parts) else type(parts[0]).maybe_dense_stack(parts)


def _has_tuples(items: list[Any]) -> bool:
    """Return whether nested lists contain tuples, which are values there, as in a lazy stack."""
    kinds = set(map(type, items))
    return tuple in kinds or (list in kinds and any(type(x) is list and _has_tuples(x) for x in items))


def make_entry(item: object, path: Path, size: torch.Size, device: torch.device | None) -> Any:
    """Convert an item that is not a tensor, container or mapping to an entry of a container of batch size `size`.

    Numbers become a tensor, a list of containers becomes their stack, and a structured array becomes a container over
    its memory. Any other object is put in a holder.
    """
    if isinstance(item, list) and _has_tuples(item) and settings.list_to_stack():
        return makers.held(item, size, device)
    tensor = _numbers_to_tensor(item, path, device if device is None or device.index is None else place_of(device))
    if tensor is not None:
        return tensor
    if isinstance(item, np.ndarray) and item.dtype.names is not None:
        return container_of(item, path)
    stack = _stack_containers(item)
    if stack is not None:
        return stack
    return makers.held(item, size, device)


def make_overwrite(holder: Any, parent: Any, name: str, item: Any, path: Path) -> Callable[[], None]:
    """Return a function that overwrites the values of a holder in place. The kind of the entry does not change.

    Raises:
        ShapeError: `item` would become a tensor, but the holder has another type of value; or it would become several
            values, but the holder has one.
    """
    if type(item) is not str:  # nearly all values are strings, and the check takes 2 of 8 us
        _check_kind(holder, item, path)
    write: Callable[[], None] = holder._replacing(parent, name, item, (), holder._batch_size, path)
    return write


def _check_kind(holder: Any, item: object, path: Path) -> None:
    """Raise if writing `item` over a holder would change the kind of the entry."""
    made = item if isinstance(item, (Tensor, Contract)) else make_entry(item, path, holder._batch_size, None)
    single = hasattr(holder, "_value")
    if isinstance(made, Tensor) and not isinstance(item, (tuple, range)):
        values = [holder._value] if single else holder._flat_values()
        if type(item) not in set(map(type, values)):
            raise ShapeError(
                f"Failed to update {joined(path)!r} in tensordict: it holds a value, and writing a "
                f"{type(item).__name__} in place would make it a tensor. set() and update() replace an entry"
            )
    elif single and isinstance(made, Contract) and made._is_non_tensor and not hasattr(made, "_value"):
        raise ShapeError(
            f"Failed to update {joined(path)!r} in tensordict: Cannot update a NonTensorDataBase with a "
            f"{type(made).__name__} object in place, since it holds one value for all of its batch: put its "
            "maybe_to_stack() there first, or replace the entry with set()"
        )
