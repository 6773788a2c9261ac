"""The translation of the JSON in a consolidated file of the reference to the form of `io/formats/structure.py`.

This module checks only the form of that JSON. The readers of the result check the content (batch sizes, names, spans),
as they do for files of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from tensordict.core import registry
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path, entry_of
from tensordict.io.specification import DICT, LAZY, VALUE_STACK, check_level
from tensordict.io.values import encode_without_tensors

_JAGGED = ("<NJT_VALUES>", "<NJT_OFFSETS>", "<NJT_LENGTHS>")
# The reserved names in the description of a node.
OWN_NAMES = {"cls", "non_tensors", "leaves", "cls_metadata"}


class Jagged(NamedTuple):
    """The names of the parts of a ragged tensor, and its ragged dim."""

    values: str
    offsets: str
    lengths: str
    dim: int


class Translation:
    """The description of a container by the reference, translated to the form of `Description`.

    Args:
        root: the JSON object.
        separator: joins the names of a nested key to the name of its tensor.
        value: converts each value.

    Raises:
        SaveError: the description is broken; names the key.
        UnsupportedEntryError: this package has no counterpart of a class.
    """

    def __init__(
        self, root: dict[str, Any], separator: str, value: Callable[[Any], Any] = encode_without_tensors
    ) -> None:
        self.separator = separator
        self._convert = value
        # The dtype, shape, start and end of each tensor.
        self.spans: dict[str, Any] = {}
        self.jagged: dict[str, Jagged] = {}
        self.spec = self._translate_node(root, ())
        metadata = root["cls_metadata"]
        self.locked = metadata.get("is_locked") is True

    def _translate_node(self, node: Any, key: Path) -> dict[str, Any]:
        check_level(key)
        parts: list[Any] = (
            [node.get(name) for name in ("non_tensors", "leaves", "cls_metadata")] if type(node) is dict else []
        )
        if not parts or not all(type(part) is dict for part in parts):
            _refuse(key, "it lacks the parts of a container")
        kind = node.get("cls")
        values, leaves, metadata = parts
        tensorclass = {}
        if type(kind) is str and registry.declared(kind) is not None:
            tensorclass = {"class": kind}
            kind = LAZY if "stack_dim" in metadata else DICT
        if kind not in (DICT, LAZY, VALUE_STACK):
            raise UnsupportedEntryError(
                f"{entry_of(key)}the class {kind!r:.80} in a consolidated file of the reference is unknown: if it is a "
                "tensorclass, import the module that defines it before loading"
            )
        entries = {name: self._translate_value(value, (*key, name)) for name, value in values.items()}
        for name, leaf in leaves.items():
            self._translate_leaf(name, leaf, entries, leaves, key)
        for name, child in node.items():
            if name not in OWN_NAMES:
                _add_entry(entries, name, self._translate_node(child, (*key, name)), key)
        if kind == DICT:
            return {**_describe_dict(metadata, entries), **tensorclass}
        return {**_describe_stack(kind, metadata, entries, key), **tensorclass}

    def _translate_value(self, value: object, key: Path) -> dict[str, Any]:
        if type(value) is not list or len(value) != 3:
            _refuse(key, f"it is described by {value!r:.80}")
        form = self._convert(value[0])
        return {"kind": "NonTensorData", "batch_size": value[1], "device": value[2], "value": form}

    def _translate_leaf(
        self, name: str, leaf: object, entries: dict[str, Any], leaves: dict[str, Any], key: Path
    ) -> None:
        for prefix in _JAGGED:
            if name.startswith(prefix) and _JAGGED[1] + name[len(prefix) :] in leaves:
                self.spans[self.separator.join((*key, name))] = _translate_span(leaf, (*key, name))
                if prefix == _JAGGED[0]:
                    self._add_jagged(name[len(prefix) :], leaf, entries, leaves, key)
                return
        self.spans[self.separator.join((*key, name))] = _translate_span(leaf, (*key, name))
        _add_entry(entries, name, {}, key)

    def _add_jagged(self, name: str, values: Any, entries: dict[str, Any], leaves: dict[str, Any], key: Path) -> None:
        offsets = leaves[_JAGGED[1] + name]
        dim = offsets[5] if type(offsets) is list and len(offsets) == 6 else None
        shape = values[1]
        if type(dim) is not int or type(shape) is not list or not 1 <= dim <= len(shape):
            _refuse((*key, name), f"its ragged dim is {dim!r:.40}")
        parts = [self.separator.join((*key, prefix + name)) for prefix in _JAGGED]
        self.jagged[self.separator.join((*key, name))] = Jagged(parts[0], parts[1], parts[2], dim)
        row = [-1 if position == dim - 1 else size for position, size in enumerate(shape)]
        _add_entry(entries, name, {"ragged": row}, key)


def _add_entry(entries: dict[str, Any], name: str, spec: dict[str, Any], key: Path) -> None:
    """Add the description of an entry. A value, a tensor or a container of the same name is an error."""
    if name in entries:
        _refuse((*key, name), "two entries have this name")
    entries[name] = spec


def _translate_span(leaf: object, key: Path) -> list[Any]:
    if type(leaf) is not list or len(leaf) not in (5, 6) or type(leaf[3]) is not int or type(leaf[4]) is not int:
        _refuse(key, f"it is described by {leaf!r:.80}")
    dtype, shape, start, stop, padding = leaf[:5]
    return [dtype, shape, start, stop - padding]


def _describe_dict(metadata: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    spec = {"kind": DICT, "batch_size": metadata.get("batch_size"), "device": metadata.get("device")}
    names = metadata.get("names")
    if type(names) is list and any(name is not None for name in names):
        spec["names"] = names
    return {**spec, "entries": entries}


def _describe_stack(kind: str, metadata: dict[str, Any], entries: dict[str, Any], key: Path) -> dict[str, Any]:
    members: list[Any] = [entries.get(str(position)) for position in range(len(entries))]
    dim = metadata.get("stack_dim")
    sizes: list[Any] = [member.get("batch_size") if member else None for member in members]
    first = sizes[0] if sizes else []
    if (
        type(dim) is not int
        or not all(type(size) is list and len(size) == len(first) for size in sizes)
        or not 0 <= dim <= len(first)
    ):
        _refuse(key, f"its members of batch sizes {sizes!r:.80} cannot be stacked along dim {dim!r:.40}")
    size = [column[0] if _are_equal(column) else -1 for column in zip(*sizes, strict=True)]
    size.insert(dim, len(members))
    spec: dict[str, Any] = {"kind": kind, "batch_size": size, "stack_dim": dim}
    names = [member.get("names") for member in members]
    name = metadata.get("stack_dim_name")
    if name is not None or (names and names[0] is not None):
        common = names[0] if names and names[0] is not None and _are_equal(names) else [None] * len(first)
        spec["names"] = [*common[:dim], name, *common[dim:]]
    if kind == LAZY:
        return {**spec, "entries": entries}
    if any("value" not in member for member in members if member is not None):
        _refuse(key, "it is a stack of values and has tensors")
    return {**spec, "value": _stack_lists([_nest_values(member) for member in members], dim)}


def _are_equal(values: Iterable[Any]) -> bool:
    first, *rest = values
    return all(value == first for value in rest)


def _nest_values(member: Any) -> Any:
    """Return the values of a member as nested lists along its batch dims. The values stay encoded."""
    value = member["value"]
    if member["kind"] != VALUE_STACK:
        for size in reversed(member["batch_size"]):
            value = [value] * size
    return value


def _stack_lists(members: list[Any], dim: int) -> list[Any]:
    """Stack nested lists along a dim."""
    if dim == 0:
        return members
    return [_stack_lists(list(column), dim - 1) for column in zip(*members, strict=True)]


def _refuse(key: Path, what: str) -> NoReturn:
    raise SaveError(f"{entry_of(key)}its description is broken: {what}")
