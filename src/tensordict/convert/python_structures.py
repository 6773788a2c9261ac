"""Any structure of Python's as nested dicts of what a container stores: the rules of `from_any` and `from_dict`."""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.convert.frames import columns_of, values_of
from tensordict.convert.numpy import container_of, is_numeric, shape_of_rows
from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.exceptions import DuplicateKeyError
from tensordict.core.keys import Path, joined, path_of

# What is given back at once: 0.1 us an entry, where the questions for everything else take 1 us.
_AS_IS = frozenset({Tensor, int, float, bool, str, bytes, type(None)})


def opened(obj: Any, path: Path = ()) -> Any:
    """A structure as a nested dict, whose keys are names; a dict that is one already, and anything else, as it is.

    Mappings, dataclasses, named tuples and tuples (with `"0"`, `"1"`, ... for names) are structures, at every level.
    Structured arrays become containers over the same memory, HDF5 and Zarr groups containers over the file, data frames
    containers of their columns, writable buffers tensors, and rows of numbers of unequal lengths stacks of values.

    Args:
        obj: what to open; it is not changed.
        path: where it lies, for errors.

    Raises:
        TypeError: a key is no name and no tuple of names.
        DuplicateKeyError: two keys lead to the same place.
    """
    kind = type(obj)
    if kind is list:
        return _of_rows(obj)
    if kind in _AS_IS or (kind is not dict and isinstance(obj, (Tensor, Contract))):
        return obj
    if kind is dict:
        # Half the time of making the same dict again.
        return obj if not path and _is_open(obj) else _opened_mapping(obj, path)
    if is_zarr(obj):
        return makers.open_store(obj, backend="zarr", mode="r")
    if isinstance(obj, Mapping):
        return makers.open_store(obj, mode="r") if is_h5(obj) else _opened_mapping(obj, path)
    if isinstance(obj, tuple):
        names = getattr(obj, "_fields", None) or map(str, range(len(obj)))
        return {name: opened(value, (*path, name)) for name, value in zip(names, obj, strict=True)}
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        specs = dataclasses.fields(obj)
        return {spec.name: opened(getattr(obj, spec.name), (*path, spec.name)) for spec in specs}
    if isinstance(obj, (np.ndarray, np.void)) and obj.dtype.names is not None:
        return container_of(obj, path)
    if isinstance(obj, (memoryview, array.array)):
        return _tensor_over(obj)
    if (columns := columns_of(obj)) is not None:
        container = makers.dense({}, torch.Size((len(obj),)), None, None)
        container._fill(columns)
        return container
    return values_of(obj) if path else obj


def is_h5(obj: object) -> bool:
    """Whether this is an open HDF5 file or a group of one, told without h5py, which need not be installed."""
    return type(obj).__module__.partition(".")[0] == "h5py" and isinstance(obj, Mapping)


def is_zarr(obj: object) -> bool:
    """Whether this is a Zarr group that is open, told without zarr, which need not be installed."""
    return type(obj).__module__.partition(".")[0] == "zarr" and type(obj).__name__ == "Group"


def _is_open(source: dict[Any, Any]) -> bool:
    """Whether the keys of a dict, and of those in it, are names, and nothing in it is to be opened."""
    for key, value in source.items():
        kind = type(value)
        if type(key) is not str or (kind not in _AS_IS and not (kind is dict and _is_open(value))):
            return False
    return True


def _opened_mapping(source: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in source.items():
        if type(key) is str and key not in tree:
            tree[key] = value if type(value) in _AS_IS else opened(value, (*path, key))
        else:
            names = _names(key, path)
            _place(tree, names, opened(value, (*path, *names)), path)
    return tree


def _of_rows(rows: list[Any]) -> Any:
    """The stack of the values in lists of numbers, or in tensors, of unequal lengths; any other list as it is."""
    if rows and isinstance(rows[0], (list, Tensor)) and is_numeric(rows) and shape_of_rows(rows) is None:
        return makers.value_list(rows)
    return rows


def _names(key: object, path: Path) -> Path:
    try:
        return path_of(key)
    except TypeError as error:
        where = f" under {joined(path)!r}" if path else ""
        raise TypeError(f"{error}{where}; from_pytree takes a dict with any keys") from None


def _place(tree: dict[str, Any], path: Path, value: object, prefix: Path) -> None:
    """Put a value at a nested key of dicts that this module made."""
    for depth, name in enumerate(path):
        here = (*prefix, *path[: depth + 1])
        rest = path[depth + 1 :]
        if name not in tree:
            if not rest:
                tree[name] = value
                return
            tree[name] = {}
        held = tree[name]
        if isinstance(held, Contract) and not held._is_non_tensor and not isinstance(held, Tensor):
            items = [(rest, value)] if rest else (value.items() if isinstance(value, dict) else None)
            if items is None or any(held._has(path_of(key)) for key, _ in items):
                raise _twice(here if not rest else (*here, *rest))
            tree[name] = held.copy().update(dict(items))  # type: ignore[attr-defined]
            return
        if type(held) is not dict:
            raise _twice(here)
        if not rest:
            if type(value) is not dict:
                raise _twice(here)
            for inner, item in value.items():
                _place(held, (inner,), item, here)
            return
        tree = held


def _twice(path: Path) -> DuplicateKeyError:
    return DuplicateKeyError(
        f"the key {joined(path)!r} is there twice, once as a name in a nested mapping and once in a tuple: keep one"
    )


def _tensor_over(buffer: object) -> Any:
    """The memory of a buffer as a tensor; memory that may not be written, which torch cannot have, is copied."""
    values = np.asarray(buffer)
    if values.dtype.kind not in "biufc":
        return buffer
    return torch.from_numpy(values if values.flags.writeable else values.copy())
