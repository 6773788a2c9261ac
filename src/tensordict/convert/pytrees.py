"""Pytrees as containers that remember what they were, and back."""

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

from tensordict.convert.mappings import refuse_exclusive
from tensordict.core import makers, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import FieldError
from tensordict.core.keys import Path, joined

# The entry that says what a container was, and the beginning of the names of those that hold a key and its value.
MARK = "_pytree_type"
_UNUSUAL = "<NON_NESTED>"
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


@dataclass(frozen=True)
class Registered:
    """A node of a type that torch was told of: what it gave for the type, apart from the children."""

    type: type[Any]
    context: Any


def tree_of(pytree: Any) -> Any:
    """A pytree as nested dicts with a mark at every level; a leaf as a container stores it."""
    kind = type(pytree)
    if isinstance(pytree, (Tensor, Contract)):
        return pytree
    if kind is dict or kind is OrderedDict:
        return _tree_of_mapping(pytree)
    if kind is list or kind is tuple:
        return _marked(zip(map(str, range(len(pytree))), pytree, strict=True), kind)
    if isinstance(pytree, tuple) and hasattr(kind, "_fields"):
        return _marked(zip(kind._fields, pytree, strict=True), kind)
    if kind in internals.pytree_nodes:
        children, context = internals.pytree_nodes[kind].flatten_fn(pytree)
        return _marked(zip(map(str, range(len(children))), children, strict=True), Registered(kind, context))
    if isinstance(pytree, _NUMBERS) or (isinstance(pytree, np.ndarray) and pytree.dtype.kind in "biufc"):
        return torch.as_tensor(pytree)
    return makers.value(pytree, torch.Size(()))


def _marked(items: Iterable[tuple[str, object]], what: object) -> dict[str, Any]:
    tree = {name: tree_of(value) for name, value in items}
    tree[MARK] = _mark(what)
    return tree


def _mark(what: object) -> Any:
    """`what` in a `MetaData`, so that the stack of two pytrees of the same form is one too."""
    return registry.lookup("MetaData")(what)


def _tree_of_mapping(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for position, (key, value) in enumerate(mapping.items()):
        if type(key) is str and key != MARK and not key.startswith(_UNUSUAL):
            tree[key] = tree_of(value)
        else:
            tree[f"{_UNUSUAL}{position}"] = {"key": _mark(key), "value": tree_of(value)}
    tree[MARK] = _mark(type(mapping))
    return tree


def pytree_of(node: Any, path: Path = ()) -> Any:
    """The pytree that a container stands for; the container itself when it has no mark.

    Raises:
        ValueError: entries of a marked container are missing or have other names; the key is named.
    """
    entries = node._entries
    if MARK not in entries or not isinstance(entries[MARK], Contract) or not entries[MARK]._is_non_tensor:
        return node
    what = entries[MARK]._unwrap_value()
    values = {name: value for name, value in entries.items() if name != MARK}
    if isinstance(what, type) and issubclass(what, dict):
        return what(_pairs(values, path))
    if what in (list, tuple):
        return what(_children(values, map(str, range(len(values))), path))
    if isinstance(what, type) and hasattr(what, "_fields"):
        return what(*_children(values, what._fields, path))
    if isinstance(what, Registered):
        children = _children(values, map(str, range(len(values))), path)
        return internals.pytree_nodes[what.type].unflatten_fn(children, what.context)
    raise FieldError(
        f"{joined((*path, MARK))!r} should say what kind of pytree this was, and is {what!r}: delete the entry to keep "
        "the container as it is"
    )


def _pairs(values: Mapping[str, Any], path: Path) -> Iterator[tuple[Any, Any]]:
    for name, value in values.items():
        if name.startswith(_UNUSUAL):
            pair = value._entries
            yield pair["key"]._unwrap_value(), _value_of(pair["value"], (*path, name, "value"))
        else:
            yield name, _value_of(value, (*path, name))


def _children(values: dict[str, Any], names: Iterable[str], path: Path) -> list[Any]:
    wanted = list(names)
    if values.keys() != set(wanted):
        where = f" under {joined(path)!r}" if path else ""
        raise FieldError(f"this was a pytree with the entries {wanted}{where}, and now has {sorted(values)}")
    return [_value_of(values[name], (*path, name)) for name in wanted]


def _value_of(value: Any, path: Path) -> Any:
    if not is_node(value):
        return value
    return value._unwrap_value() if value._is_non_tensor else pytree_of(value, path)


# --- named tuples -----------------------------------------------------------------------------------------------------


def namedtuple_of(node: Any, dest_cls: Any = None, path: Path = ()) -> Any:
    """The entries of a container as a named tuple, nested ones in nested ones; fields that are `None` included.

    Raises:
        ValueError: the name of an entry can be no field.
        TypeError: the entries are not the fields of `dest_cls`.
    """
    refuse_exclusive(node, "to_namedtuple")
    # A tensorclass has no entry for a field that is `None`.
    layout = getattr(node, "_layout", None)
    fields: dict[str, Any] = dict.fromkeys(layout.names) if layout is not None else {}
    fields.update(node._entries)
    for name, value in fields.items():
        if type(value) is not Tensor and is_node(value):
            fields[name] = value._unwrap_value() if value._is_non_tensor else namedtuple_of(value, None, (*path, name))
    if dest_cls is None:
        return _generic(tuple(fields), path)._make(fields.values())
    wanted = getattr(dest_cls, "_fields", None)
    if wanted is None:
        raise TypeError(f"to_namedtuple makes a named tuple, and {dest_cls!r} is none")
    missing = [name for name in wanted if name not in fields and name not in dest_cls._field_defaults]
    unknown = [name for name in fields if name not in wanted]
    if missing or unknown:
        raise TypeError(
            f"the entries are not the fields of {dest_cls.__name__}: {missing} are missing, {unknown} are not declared"
        )
    return dest_cls(**fields)


def _generic(names: tuple[str, ...], path: Path) -> Any:
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
    """One class for all named tuples of the same fields, as comparing two pytrees needs."""
    return namedtuple("GenericDict", names)
