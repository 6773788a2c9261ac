"""Descriptions of results, which are equal when the results are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tensordict import NonTensorData, NonTensorStack, is_non_tensor, is_tensor_collection

PLAIN = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, slice, type(...))


class Known:
    """The objects and the memory that a call was given, by their paths.

    Objects are kept alive, so that no new one takes an old one's place in memory.
    """

    def __init__(self, given: Any) -> None:
        self.objects: dict[int, str] = {}
        self.memory: dict[int, str] = {}
        self._kept: list[Any] = []
        for number, value in enumerate(given):
            self._add(value, f"given {number}")

    def _add(self, value: Any, path: str) -> None:
        self._kept.append(value)
        self.objects.setdefault(id(value), path)
        if isinstance(value, torch.Tensor):
            self.memory.setdefault(_address(value), path)
        elif isinstance(value, nn.Module) and not is_tensor_collection(value):
            for name, leaf in [*value.named_parameters(), *value.named_buffers()]:
                self._add(leaf, f"{path}.{name}")
        elif is_tensor_collection(value) and not is_non_tensor(value):
            for number, member in enumerate(getattr(value, "tensordicts", ())):
                self._add(member, f"{path}[{number}]")
            for name, entry in () if hasattr(value, "tensordicts") else _items(value):
                self._add(entry, f"{path}.{name}")

    def name_memory(self, tensor: torch.Tensor) -> str:
        address = _address(tensor)
        if address == 0:
            return "none"
        self._kept.append(tensor)
        return self.memory.setdefault(address, f"new {len(self.memory)}")


def describe(value: Any, known: Known) -> Any:
    """Nested tuples and dicts that hold all that a caller can see of a value."""
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value, known)
    if is_non_tensor(value):
        return {**_describe_head(value, known), "data": _describe_data(value, known)}
    if is_tensor_collection(value):
        return _describe_container(value, known)
    if isinstance(value, torch.Size):
        return ("Size", *value)
    if isinstance(value, PLAIN):
        return (type(value).__name__, value)
    if isinstance(value, Mapping):
        return (type(value).__name__, [(key, describe(entry, known)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(describe(item, known) for item in value))
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, *sorted(map(repr, value)))
    if isinstance(value, nn.Module):
        return (type(value).__name__, value.training, [(name, describe(leaf, known)) for name, leaf in _state(value)])
    if isinstance(value, torch.distributions.Distribution):
        return (type(value).__name__, describe(value.batch_shape, known), describe(value.mean, known))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return (type(value).__name__, [(field.name, describe(getattr(value, field.name), known)) for field in fields])
    if callable(value):
        return getattr(value, "__name__", repr(value))
    if type(value).__module__ == "numpy":
        return ("numpy", str(value.dtype), value.tolist())
    if isinstance(value, range) or type(value).__name__.endswith(("keys", "Keys", "KeysView")):
        return list(value)
    raise TypeError(f"a form returned {type(value)}: add it to `describe`, or have the form return something simpler")


def _describe_tensor(tensor: torch.Tensor, known: Known) -> Any:
    head = {
        "class": type(tensor).__name__,
        "is": known.objects.get(id(tensor)),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "memory": known.name_memory(tensor),
    }
    if tensor.is_nested:
        return {**head, "rows": [row.tolist() for row in tensor.detach().unbind()]}
    gradient = tensor.grad if tensor.is_leaf else None
    return {
        **head,
        "shape": tuple(tensor.shape),
        "stride": tensor.stride() if tensor.numel() else None,
        "values": Values(tensor.detach().clone()),
        "grad": None if gradient is None else Values(gradient.clone()),
    }


class Values:
    """The elements of a tensor, equal to others that are close."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values) or self.tensor.shape != other.tensor.shape:
            return False
        if self.tensor.dtype.is_floating_point or self.tensor.dtype.is_complex:
            return torch.allclose(self.tensor, other.tensor, rtol=1e-6, atol=1e-7, equal_nan=True)
        return torch.equal(self.tensor, other.tensor)

    def __repr__(self) -> str:
        return repr(self.tensor.tolist())


def _describe_head(td: Any, known: Known) -> dict[str, Any]:
    return {
        "class": type(td).__name__,
        "is": known.objects.get(id(td)),
        "batch_size": tuple(td.batch_size),
        "device": td.device,
        "names": td.names,
        "locked": td.is_locked,
    }


def _describe_container(td: Any, known: Known) -> Any:
    found = _describe_head(td, known)
    if hasattr(td, "tensordicts"):
        found["stack_dim"] = td.stack_dim
        found["members"] = [describe(member, known) for member in td.tensordicts]
        return found
    found["entries"] = [(name, describe(entry, known)) for name, entry in _items(td)]
    return found


def _describe_data(value: Any, known: Known) -> Any:
    if isinstance(value, NonTensorStack):
        return value.tolist()
    data = value.data if isinstance(value, NonTensorData) else value.tolist()
    return data if isinstance(data, PLAIN) else describe(data, known)


def _items(td: Any) -> list[tuple[str, Any]]:
    """Return the stored entries of one level."""
    return [(name, td.get(name)) for name in td.keys()]


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _address(tensor: torch.Tensor) -> int:
    return (tensor.values() if tensor.is_nested else tensor).untyped_storage().data_ptr()


def difference(expected: Any, found: Any, path: str = "") -> str | None:
    """The first place where two descriptions differ, in words."""
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        pairs = [(f"{path}.{key}", expected[key], found[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and type(expected) is type(found) and len(expected) == len(found):
        pairs = [(f"{path}[{number}]", *pair) for number, pair in enumerate(zip(expected, found))]
    else:
        same = expected == found or (expected != expected and found != found)
        return None if same else f"{path}: eager {expected!r}, compiled {found!r}"[:600]
    return next((text for pair in pairs if (text := difference(pair[1], pair[2], pair[0]))), None)
