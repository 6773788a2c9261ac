"""Conversion between pytrees and containers with marks of the original types, and to named tuples."""

from __future__ import annotations

import keyword
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.convert.python_structures import refuse_exclusive_keys
from tensordict.core import makers, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import FieldError
from tensordict.core.keys import Path, joined

# The entry that names the original type, and the prefix of entries for keys that cannot be names.
MARK = "_pytree_type"
_UNUSUAL = "<NON_NESTED>"
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


@dataclass(frozen=True)
class Registered:
    """Marks a level of the tree that was a node of a type registered with torch's pytrees.

    type: the registered type.
    context: the context that torch returned for the node when it flattened it.
    """

    type: type[Any]
    context: Any


def tree_of(pytree: Any) -> Any:
    """Convert a pytree to nested dicts with a mark at every level, and a leaf to an entry."""
    kind = type(pytree)
    if isinstance(pytree, (Tensor, Contract)):
        return pytree
    if kind is dict or kind is OrderedDict:
        return _tree_of_mapping(pytree)
    if kind is list or kind is tuple:
        return _mark_tree(zip(map(str, range(len(pytree))), pytree, strict=True), kind)
    if isinstance(pytree, tuple) and hasattr(kind, "_fields"):
        return _mark_tree(zip(kind._fields, pytree, strict=True), kind)
    if kind in internals.pytree_nodes:
        children, context = internals.pytree_nodes[kind].flatten_fn(pytree)
        return _mark_tree(zip(map(str, range(len(children))), children, strict=True), Registered(kind, context))
    if isinstance(pytree, _NUMBERS) or (isinstance(pytree, np.ndarray) and pytree.dtype.kind in "biufc"):
        return torch.as_tensor(pytree)
    return makers.value(pytree, torch.Size(()))


def _entry_of(value: Any) -> Any:
    """Convert a value in a pytree to an entry. Settings stay one value, so that their numbers keep their types.

    The parameter groups of an optimizer are settings. As tensors, their numbers would lose digits, and its
    `load_state_dict` would not find the states of the parameters that they number.
    """
    return makers.value(value, torch.Size(())) if _find_settings(value) else tree_of(value)


def _find_settings(value: Any) -> bool | None:
    """Return True for a list, tuple or dict that holds texts or `None`, with or without numbers.

    Returns `None` for a value that has something else in it, such as a tensor, and False for numbers alone.
    """
    kind = type(value)
    if kind is dict or kind is OrderedDict or kind is list or kind is tuple:
        is_found = False
        for item in value.values() if isinstance(value, dict) else value:
            inner = True if item is None or type(item) is str else _find_settings(item)
            if inner is None:
                return None
            is_found |= inner
        return is_found
    return False if kind in (bool, int, float) else None


def _mark_tree(items: Iterable[tuple[str, object]], what: object) -> dict[str, Any]:
    tree = {name: _entry_of(value) for name, value in items}
    tree[MARK] = _make_mark(what)
    return tree


def _make_mark(what: object) -> Any:
    """Wrap an object in `MetaData`, so that stacking two pytrees of the same form keeps it."""
    return registry.lookup("MetaData")(what)


def _tree_of_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for position, (key, value) in enumerate(mapping.items()):
        if type(key) is str and key != MARK and not key.startswith(_UNUSUAL):
            tree[key] = _entry_of(value)
        else:
            tree[f"{_UNUSUAL}{position}"] = {"key": _make_mark(key), "value": _entry_of(value)}
    tree[MARK] = _make_mark(type(mapping))
    return tree


def pytree_of(node: Any, path: Path = ()) -> Any:
    """Convert a container back to a pytree. Returns a container without mark unchanged.

    Raises:
        ValueError: entries of a marked container are missing or were renamed. The error names the key.
    """
    entries = node._entries
    if MARK not in entries or not isinstance(entries[MARK], Contract) or not entries[MARK]._is_non_tensor:
        return node
    what = entries[MARK]._unwrap_value()
    values = {name: value for name, value in entries.items() if name != MARK}
    if isinstance(what, type) and issubclass(what, dict):
        return what(_iterate_pairs(values, path))
    if what in (list, tuple):
        return what(_list_children(values, map(str, range(len(values))), path))
    if isinstance(what, type) and hasattr(what, "_fields"):
        return what(*_list_children(values, what._fields, path))
    if isinstance(what, Registered):
        children = _list_children(values, map(str, range(len(values))), path)
        return internals.pytree_nodes[what.type].unflatten_fn(children, what.context)
    raise FieldError(
        f"{joined((*path, MARK))!r} should contain the type of a pytree, but is {what!r}: delete the entry to keep the "
        "container as it is"
    )


def _iterate_pairs(values: Mapping[str, Any], path: Path) -> Iterator[tuple[Any, Any]]:
    for name, value in values.items():
        if name.startswith(_UNUSUAL):
            pair = value._entries
            yield pair["key"]._unwrap_value(), _value_of(pair["value"], (*path, name, "value"))
        else:
            yield name, _value_of(value, (*path, name))


def _list_children(values: dict[str, Any], names: Iterable[str], path: Path) -> list[Any]:
    wanted = list(names)
    if values.keys() != set(wanted):
        where = f" under {joined(path)!r}" if path else ""
        raise FieldError(f"a pytree with the entries {wanted}{where} was expected, got {sorted(values)}")
    return [_value_of(values[name], (*path, name)) for name in wanted]


def _value_of(value: Any, path: Path) -> Any:
    if not is_node(value):
        return value
    return value._unwrap_value() if value._is_non_tensor else pytree_of(value, path)


# --- named tuples -----------------------------------------------------------------------------------------------------


def namedtuple_of(node: Any, dest_cls: Any = None, path: Path = ()) -> Any:
    """Convert a container to a named tuple, and nested containers to nested ones. Fields that are `None` are included.

    Raises:
        ValueError: the name of an entry cannot be a field.
        TypeError: the entries are not the fields of `dest_cls`.
    """
    refuse_exclusive_keys(node, "to_namedtuple")
    # Adds the fields of a tensorclass that are `None`, which have no entry.
    layout = getattr(node, "_layout", None)
    fields: dict[str, Any] = dict.fromkeys(layout.names) if layout is not None else {}
    fields.update(node._entries)
    for name, value in fields.items():
        if type(value) is not Tensor and is_node(value):
            fields[name] = value._unwrap_value() if value._is_non_tensor else namedtuple_of(value, None, (*path, name))
    if dest_cls is None:
        return _make_generic(tuple(fields), path)._make(fields.values())
    wanted = getattr(dest_cls, "_fields", None)
    if wanted is None:
        raise TypeError(f"to_namedtuple needs a named tuple class as dest_cls, got {dest_cls!r}")
    missing = [name for name in wanted if name not in fields and name not in dest_cls._field_defaults]
    unknown = [name for name in fields if name not in wanted]
    if missing or unknown:
        raise TypeError(
            f"the entries are not the fields of {dest_cls.__name__}: {missing} are missing, {unknown} are not declared"
        )
    return dest_cls(**fields)


def _make_generic(names: tuple[str, ...], path: Path) -> Any:
    try:
        return _generic_class(names)
    except ValueError:
        odd = next(name for name in names if not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_")
        raise ValueError(
            f"the entry {joined((*path, odd))!r} cannot be the field of a named tuple: rename it with "
            "rename_key_, or use to_dict"
        ) from None


@lru_cache(maxsize=256)
def _generic_class(names: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """Return one class for all named tuples of the same fields, because pytrees are compared by class."""
    return namedtuple("GenericDict", names)
