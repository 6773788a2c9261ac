"""`from_dataclass`, which makes tensorclasses and their instances from dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from tensordict.core import registry
from tensordict.core.shapes import refuse_two_sizes


def from_dataclass(
    obj: object,
    *,
    dest_cls: Any = None,
    auto_batch_size: bool | None = False,
    batch_dims: int | None = None,
    batch_size: object = None,
    frozen: bool = False,
    autocast: bool = False,
    nocast: bool = False,
    inplace: bool = False,
    shadow: bool = False,
    tensor_only: bool = False,
    device: object = None,
) -> Any:
    """Make a tensorclass from a dataclass, or an instance of a tensorclass from an instance of a dataclass.

    Example:
        >>> from dataclasses import dataclass
        >>> import torch
        >>> from tensordict import from_dataclass
        >>> @dataclass
        ... class Point:
        ...     x: torch.Tensor
        >>> from_dataclass(Point(torch.zeros(3)), auto_batch_size=True).batch_size
        torch.Size([3])

    Args:
        obj: a dataclass, or an instance of one.
        dest_cls: the tensorclass of the instance. By default a new one is made, named after the dataclass.
        auto_batch_size: give the instance the longest batch size that its entries share.
        batch_dims: with `auto_batch_size`, at most this many dims.
        batch_size: the batch size of the instance.
        frozen, autocast, nocast, shadow, tensor_only: the options of a new class, see :class:`TensorClass`.
        inplace: accepted for compatibility. A class cannot be converted in place, so a new class of the same name is
            returned.
        device: move the tensors of the instance to this device.

    Raises:
        TypeError: `obj` is neither a dataclass nor an instance of one; or `batch_size` and `auto_batch_size` are both
            given.
    """
    refuse_two_sizes(bool(auto_batch_size), batch_size)
    if not dataclasses.is_dataclass(obj):
        raise TypeError(f"from_dataclass reads a dataclass or an instance of one, got {type(obj).__name__}")
    source = obj if isinstance(obj, type) else type(obj)
    if dest_cls is None or isinstance(obj, type):
        base = registry.lookup("TensorClass")
        options = {"frozen": frozen, "autocast": autocast, "nocast": nocast, "shadow": shadow}
        options["tensor_only"] = tensor_only
        name = source.__name__ if inplace else f"{source.__name__}_tc"
        specs = dataclasses.fields(source)
        body: dict[str, Any] = {spec.name: copy.copy(spec) for spec in specs}
        body["__annotations__"] = {spec.name: spec.type for spec in specs}
        body["__module__"] = source.__module__
        metaclass: Any = type(base)
        dest_cls = metaclass(name, (base,), body, **{key: True for key, on in options.items() if on})
        if isinstance(obj, type):
            return dest_cls
    values = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj)}
    made = dest_cls(**values, batch_size=batch_size, device=device)
    return made.auto_batch_size_(batch_dims) if auto_batch_size or batch_dims is not None else made
