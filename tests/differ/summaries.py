"""Summaries of values as plain data, so that two processes can compare results."""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import tempfile
from typing import Any

import numpy as np
import torch

import tensordict
from differ.sides import Summary
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, is_tensor_collection

LONGEST = 60


class Drained(list):
    """Replaces an iterator or a view by its items, read once."""


def is_view(x: object) -> bool:
    """Return whether `x` is an iterator or a view like `dict.keys()`."""
    if is_tensor_collection(x):
        return False
    return hasattr(x, "__next__") or re.search(r"(?i)view|keys|items|values", type(x).__name__) is not None


def without_chance(text: str) -> str:
    """`text` without what differs from run to run: temporary folders, the symbols of ragged dims."""
    text = re.sub(r"differ-\w+/\d+", "TMP", text).replace(tempfile.gettempdir(), "")
    return re.sub(r"\bj\d+\b", "j", text)


def summarise(x: object, depth: int = 0) -> Summary:
    """Type, shape, state and content of `x`, nested ones inside; "broken" where it cannot be read."""
    if depth > 12:
        return {"k": "deep"}
    try:
        return _summary(x, depth)
    except Exception as error:
        message = without_chance(str(error))[:300]
        return {"k": "broken", "cls": type(x).__name__, "exc": type(error).__name__, "msg": message}


def _summary(x: Any, depth: int) -> Summary:
    name = type(x).__name__
    if isinstance(x, torch.Tensor):
        return _tensor(x, depth)
    if isinstance(x, type):
        return {"k": "class", "value": x.__name__}
    if is_tensor_collection(x):
        return _container(x, depth)
    if isinstance(x, (np.ndarray, np.generic)):
        return _numpy(x, depth)
    if x is None or isinstance(x, (bool, int, float)):
        return {"k": "plain", "cls": name, "value": x}
    if isinstance(x, (str, complex, bytes, torch.dtype, torch.device, torch.layout)):
        return {"k": "plain", "cls": name, "value": without_chance(x) if isinstance(x, str) else str(x)}
    if isinstance(x, collections.abc.Mapping) and not name.startswith("_"):
        return _fields(name, {str(k): v for k, v in x.items()}, depth)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return _fields("namedtuple", x._asdict(), depth)
    if isinstance(x, (list, tuple)):
        name = {"Drained": "view", "LinkedList": "list"}.get(name, name)
        entries = [summarise(v, depth + 1) for v in list(x)[:LONGEST]]
        return {"k": "list", "cls": name, "entries": entries, "len": len(x)}
    if isinstance(x, (set, frozenset)):
        return {"k": "set", "cls": name, "value": sorted(map(str, x))}
    if dataclasses.is_dataclass(x):
        return _fields(name, {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}, depth)
    if is_view(x):
        entries = [summarise(v, depth + 1) for v, _ in zip(x, range(LONGEST))]
        return {"k": "list", "cls": "view", "entries": entries, "len": len(entries)}
    return {"k": "object", "cls": name}


def _fields(name: str, entries: dict[str, Any], depth: int) -> Summary:
    values = [summarise(v, depth + 1) for v in entries.values()]
    return {"k": "dict", "cls": name, "keys": list(entries), "entries": values}


def _tensor(x: torch.Tensor, depth: int) -> Summary:
    name = type(x).__name__
    about = {"dtype": str(x.dtype), "rg": x.requires_grad}
    if x.is_nested:
        rows = [summarise(row, depth + 1) for row in x.detach().unbind()]
        name = name.replace("NestedTensor", "Tensor")
        return {"k": "nested", "cls": name, "layout": str(x.layout), "ndim": x.dim(), **about, "values": rows}
    where = {"shape": list(x.shape), "device": str(x.device)}
    return {"k": "tensor", "cls": name, **where, **about, "values": _numbers(x)}


def _numbers(x: torch.Tensor) -> object:
    x = x.detach()
    if x.device.type == "meta":
        return "meta"
    if x.numel() > 400:
        return ["sum", float(x.double().sum())]
    if x.is_quantized:
        x = x.dequantize()
    if x.dtype.is_complex:
        x = torch.view_as_real(x.resolve_conj().to(torch.complex128))
    elif x.dtype.is_floating_point:
        x = x.double()
    elif x.dtype is not torch.bool:
        x = x.to(torch.int64)
    return x.flatten().tolist()


def _container(x: Any, depth: int) -> Summary:
    name = type(x).__name__.replace("FileView", "_SubTensorDict")  # a part of a container in a file
    out: Summary = {"k": "td", "cls": name, "batch_size": list(x.batch_size)}
    if isinstance(x, (NonTensorData, NonTensorStack)) or tensordict.is_non_tensor(x):
        out["nontensor"] = summarise(x.tolist() if isinstance(x, NonTensorStack) else x.data, depth + 1)
        return out
    out["device"] = str(x.device)
    out["names"] = list(x.names) if x.names is not None else None
    out["locked"] = bool(x.is_locked)
    if isinstance(x, LazyStackedTensorDict):
        out["stack_dim"] = x.stack_dim
        out["members"] = [summarise(member, depth + 1) for member in x.tensordicts]
        return out
    if tensordict.is_tensorclass(x):
        items = [(field.name, getattr(x, field.name)) for field in dataclasses.fields(x)]
        fields = {name for name, _ in items}
        # The reference lets some writes add entries that are no fields.
        if "keys" not in fields and (others := sorted({str(key) for key in x.keys()} - fields)):
            out["no fields"] = others
    else:
        items = list(x.items())
    out["keys"] = [str(key) for key, _ in items]
    out["entries"] = [summarise(value, depth + 1) for _, value in items]
    if name == "TensorDict" and depth == 0:
        flags = [flag for flag in ("is_memmap", "is_shared") if getattr(x, flag)()]
        if flags:
            out["flags"] = flags
    return out


def _numpy(x: np.ndarray | np.generic, depth: int) -> Summary:
    if isinstance(x, np.generic):
        value = x.item()
        return {"k": "plain", "cls": type(x).__name__, "value": _plain(value)}
    out: Summary = {"k": "array", "dtype": str(x.dtype), "shape": list(x.shape)}
    if x.dtype.names:
        out["values"] = str(x.tolist())
    elif x.dtype == object:
        out["values"] = [summarise(v, depth + 1) for v in x.flatten().tolist()]
    else:
        out["values"] = [_plain(v) for v in x.flatten().tolist()]
    return out


def _plain(value: object) -> object:
    return value if isinstance(value, (bool, int, float)) else str(value)
