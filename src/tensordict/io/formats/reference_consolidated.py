"""The JSON of a consolidated file of the reference, in the terms of `io/formats/structure.py`.

Only its own form is looked after here. What it says (batch sizes, names, where tensors are) is checked by the readers
of the result, as that of our own files is.
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
# The names that the description of a node has for itself.
OWN_NAMES = {"cls", "non_tensors", "leaves", "cls_metadata"}


class Jagged(NamedTuple):
    """The names of the tensors that a ragged one consists of, and its ragged dim."""

    values: str
    offsets: str
    lengths: str
    dim: int


class Translation:
    """The description of a container, in terms of `Described`.

    Args:
        root: the JSON object.
        separator: stands between the names of a nested key in the name of its tensor.
        value: what stands for a value in the result.

    Raises:
        SaveError: it is of another form; the key is named.
        UnsupportedEntryError: it is of a class that has no counterpart here.
    """

    def __init__(
        self, root: dict[str, Any], separator: str, value: Callable[[Any], Any] = encode_without_tensors
    ) -> None:
        self.separator = separator
        self._form_of = value
        # dtype, shape, first byte and last byte of each tensor.
        self.spans: dict[str, Any] = {}
        self.jagged: dict[str, Jagged] = {}
        self.spec = self._node(root, ())
        metadata = root["cls_metadata"]
        self.locked = metadata.get("is_locked") is True

    def _node(self, node: Any, key: Path) -> dict[str, Any]:
        check_level(key)
        parts: list[Any] = (
            [node.get(name) for name in ("non_tensors", "leaves", "cls_metadata")] if type(node) is dict else []
        )
        if not parts or not all(type(part) is dict for part in parts):
            _refuse(key, "it has not the parts of a container")
        kind = node.get("cls")
        values, leaves, metadata = parts
        face = {}
        if type(kind) is str and registry.declared(kind) is not None:
            face = {"class": kind}
            kind = LAZY if "stack_dim" in metadata else DICT
        if kind not in (DICT, LAZY, VALUE_STACK):
            raise UnsupportedEntryError(
                f"{entry_of(key)}a {kind!r:.80} in a consolidated file of the reference is not known here"
            )
        entries = {name: self._value(value, (*key, name)) for name, value in values.items()}
        for name, leaf in leaves.items():
            self._leaf(name, leaf, entries, leaves, key)
        for name, child in node.items():
            if name not in OWN_NAMES:
                _add(entries, name, self._node(child, (*key, name)), key)
        if kind == DICT:
            return {**_dict(metadata, entries), **face}
        return {**_stack(kind, metadata, entries, key), **face}

    def _value(self, value: object, key: Path) -> dict[str, Any]:
        if type(value) is not list or len(value) != 3:
            _refuse(key, f"it is described by {value!r:.80}")
        form = self._form_of(value[0])
        return {"kind": "NonTensorData", "batch_size": value[1], "device": value[2], "value": form}

    def _leaf(self, name: str, leaf: object, entries: dict[str, Any], leaves: dict[str, Any], key: Path) -> None:
        for prefix in _JAGGED:
            if name.startswith(prefix) and _JAGGED[1] + name[len(prefix) :] in leaves:
                self.spans[self.separator.join((*key, name))] = _span(leaf, (*key, name))
                if prefix == _JAGGED[0]:
                    self._ragged(name[len(prefix) :], leaf, entries, leaves, key)
                return
        self.spans[self.separator.join((*key, name))] = _span(leaf, (*key, name))
        _add(entries, name, {}, key)

    def _ragged(self, name: str, values: Any, entries: dict[str, Any], leaves: dict[str, Any], key: Path) -> None:
        offsets = leaves[_JAGGED[1] + name]
        dim = offsets[5] if type(offsets) is list and len(offsets) == 6 else None
        shape = values[1]
        if type(dim) is not int or type(shape) is not list or not 1 <= dim <= len(shape):
            _refuse((*key, name), f"its ragged dim is {dim!r:.40}")
        named = [self.separator.join((*key, prefix + name)) for prefix in _JAGGED]
        self.jagged[self.separator.join((*key, name))] = Jagged(named[0], named[1], named[2], dim)
        row = [-1 if position == dim - 1 else size for position, size in enumerate(shape)]
        _add(entries, name, {"ragged": row}, key)


def _add(entries: dict[str, Any], name: str, spec: dict[str, Any], key: Path) -> None:
    """Add the description of an entry, whose name no value, tensor or container before it has."""
    if name in entries:
        _refuse((*key, name), "two entries have this name")
    entries[name] = spec


def _span(leaf: object, key: Path) -> list[Any]:
    if type(leaf) is not list or len(leaf) not in (5, 6) or type(leaf[3]) is not int or type(leaf[4]) is not int:
        _refuse(key, f"it is described by {leaf!r:.80}")
    dtype, shape, start, stop, padding = leaf[:5]
    return [dtype, shape, start, stop - padding]


def _dict(metadata: dict[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    spec = {"kind": DICT, "batch_size": metadata.get("batch_size"), "device": metadata.get("device")}
    names = metadata.get("names")
    if type(names) is list and any(name is not None for name in names):
        spec["names"] = names
    return {**spec, "entries": entries}


def _stack(kind: str, metadata: dict[str, Any], entries: dict[str, Any], key: Path) -> dict[str, Any]:
    members: list[Any] = [entries.get(str(position)) for position in range(len(entries))]
    dim = metadata.get("stack_dim")
    sizes: list[Any] = [member.get("batch_size") if member else None for member in members]
    first = sizes[0] if sizes else []
    if (
        type(dim) is not int
        or not all(type(size) is list and len(size) == len(first) for size in sizes)
        or not 0 <= dim <= len(first)
    ):
        _refuse(key, f"its members of batch sizes {sizes!r:.80} make no stack along dim {dim!r:.40}")
    size = [column[0] if _are_same(column) else -1 for column in zip(*sizes, strict=True)]
    size.insert(dim, len(members))
    spec: dict[str, Any] = {"kind": kind, "batch_size": size, "stack_dim": dim}
    names = [_names_of(member) for member in members]
    name = metadata.get("stack_dim_name")
    if name is not None or (names and names[0] is not None):
        common = names[0] if names and names[0] is not None and _are_same(names) else [None] * len(first)
        spec["names"] = [*common[:dim], name, *common[dim:]]
    if kind == LAZY:
        return {**spec, "entries": entries}
    if any("value" not in member for member in members if member is not None):
        _refuse(key, "it is a stack of values and has tensors")
    return {**spec, "value": _along([_lists(member) for member in members], dim)}


def _names_of(member: Any) -> Any:
    return member.get("names")


def _are_same(values: Iterable[Any]) -> bool:
    first, *rest = values
    return all(value == first for value in rest)


def _lists(member: Any) -> Any:
    """The (exact form of the) values of a member in nested lists along its batch dims."""
    value = member["value"]
    if member["kind"] != VALUE_STACK:
        for size in reversed(member["batch_size"]):
            value = [value] * size
    return value


def _along(members: list[Any], dim: int) -> list[Any]:
    """The nested lists of which each of `members` is one along `dim`."""
    if dim == 0:
        return members
    return [_along(list(column), dim - 1) for column in zip(*members, strict=True)]


def _refuse(key: Path, what: str) -> NoReturn:
    raise SaveError(f"{entry_of(key)}its description is broken: {what}")
