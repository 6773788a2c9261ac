"""Conversion of Python structures to nested dicts of entries: the rules of `from_any` and `from_dict`.

Conversions in both directions share the check that all members of a lazy stack have the same entries.
"""

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
from tensordict.core.exceptions import DuplicateKeyError, KeyMismatchError
from tensordict.core.keys import Path, joined, path_in, path_of

# Objects of these classes are returned at once, in 0.1 us. The checks for all others take 1 us.
_AS_IS = frozenset({Tensor, int, float, bool, str, bytes, type(None)})


def open_structure(obj: Any, path: Path = ()) -> Any:
    """Convert a structure to a nested dict with names as keys. Returns other objects, and such a dict, unchanged.

    Structures are mappings, dataclasses, named tuples and tuples (with the names `"0"`, `"1"`, ...), at every level.
    Other conversions are: structured arrays to containers over the same memory, HDF5 and Zarr groups to containers over
    the file, data frames to containers of their columns, writable buffers to tensors, and lists of rows of numbers with
    different lengths to stacks of values.

    Args:
        obj: the structure. It is not changed.
        path: its path, for errors.

    Raises:
        TypeError: a key is neither a name nor a tuple of names.
        DuplicateKeyError: two keys lead to the same entry.
    """
    kind = type(obj)
    if kind is list:
        return _stack_rows(obj)
    if kind in _AS_IS or (kind is not dict and isinstance(obj, (Tensor, Contract))):
        return obj
    if kind is dict:
        # Checking the dict takes half the time of making an equal one.
        return obj if not path and _needs_no_change(obj) else _open_mapping(obj, path)
    if is_zarr(obj):
        return makers.open_store(obj, backend="zarr", mode="r")
    if isinstance(obj, Mapping):
        return makers.open_store(obj, mode="r") if is_h5(obj) else _open_mapping(obj, path)
    if isinstance(obj, tuple):
        names = getattr(obj, "_fields", None) or map(str, range(len(obj)))
        return {name: open_structure(value, (*path, name)) for name, value in zip(names, obj, strict=True)}
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        specs = dataclasses.fields(obj)
        return {spec.name: open_structure(getattr(obj, spec.name), (*path, spec.name)) for spec in specs}
    if isinstance(obj, (np.ndarray, np.void)) and obj.dtype.names is not None:
        return container_of(obj, path)
    if isinstance(obj, (memoryview, array.array)):
        return _share_buffer(obj)
    if (columns := columns_of(obj)) is not None:
        container = makers.dense({}, torch.Size((len(obj),)), None, None)
        container._fill(columns)
        return container
    return values_of(obj) if path else obj


def is_h5(obj: object) -> bool:
    """Return whether an object is an open HDF5 file or group. Does not import h5py, which need not be installed."""
    return type(obj).__module__.partition(".")[0] == "h5py" and isinstance(obj, Mapping)


def is_zarr(obj: object) -> bool:
    """Return whether an object is an open Zarr group. Does not import zarr, which need not be installed."""
    return type(obj).__module__.partition(".")[0] == "zarr" and type(obj).__name__ == "Group"


def _needs_no_change(source: dict[Any, Any]) -> bool:
    """Return whether a dict needs no conversion: all keys are names, and no value is a structure."""
    for key, value in source.items():
        kind = type(value)
        if type(key) is not str or (kind not in _AS_IS and not (kind is dict and _needs_no_change(value))):
            return False
    return True


def _open_mapping(source: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in source.items():
        if type(key) is str and key not in tree:
            tree[key] = value if type(value) in _AS_IS else open_structure(value, (*path, key))
        else:
            names = path_in(key, path)
            _insert(tree, names, open_structure(value, (*path, *names)), path)
    return tree


def _stack_rows(rows: list[Any]) -> Any:
    """Convert a list of rows of numbers with different lengths to a stack of values. Returns other lists unchanged."""
    if rows and isinstance(rows[0], (list, Tensor)) and is_numeric(rows) and shape_of_rows(rows) is None:
        return makers.value_list(rows)
    return rows


def _insert(tree: dict[str, Any], path: Path, value: object, prefix: Path) -> None:
    """Insert a value at a nested key. The dicts in `tree` were made by this module, so they may be changed."""
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
                raise _duplicate_error(here if not rest else (*here, *rest))
            tree[name] = held.copy().update(dict(items))  # type: ignore[attr-defined]
            return
        if type(held) is not dict:
            raise _duplicate_error(here)
        if not rest:
            if type(value) is not dict:
                raise _duplicate_error(here)
            for inner, item in value.items():
                _insert(held, (inner,), item, here)
            return
        tree = held


def _duplicate_error(path: Path) -> DuplicateKeyError:
    return DuplicateKeyError(
        f"the key {joined(path)!r} is there twice, once as a name in a nested mapping and once in a tuple: keep one"
    )


def _share_buffer(buffer: object) -> Any:
    """Make a tensor over the memory of a buffer. Copies read-only memory, which torch does not support."""
    values = np.asarray(buffer)
    if values.dtype.kind not in "biufc":
        return buffer
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def refuse_exclusive_keys(container: Contract, method: str) -> None:
    """Raise if a lazy stack has entries that only some members have, because `method` would lose them."""
    if type(container._entries) is dict or not (members := container._members()):
        return
    for member in members:
        refuse_exclusive_keys(member, method)
    names = [set(member._structure()) for member in members]
    if odd := sorted(set().union(*names) - set.intersection(*names)):
        raise KeyMismatchError(
            f"the method {method} cannot complete when there are exclusive keys: only some members of the lazy stack "
            f"have {odd}. Call it for each of the members, as in stack.tolist(), or select the common keys first"
        )
