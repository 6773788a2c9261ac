"""State dicts of containers, which `StateWriter` writes for `state_dict()` and `parse_state` reads for loading.

A state dict maps names to tensors, as for modules. Its attribute `_metadata` describes every container under the name
that leads to it: batch size and device, and further fields that begin with "_". Other readers ignore the fields of this
package.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError, StackError
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io.specification import (
    DICT,
    LAZY,
    OWN,
    VALUE_STACK,
    Specification,
    find_uneven,
    is_stored_as_class,
    specification_of,
)
from tensordict.memory.mapped import MemoryMappedTensor

# The fields in the metadata of a container.
SIZE, DEVICE, TYPE, VALUES = "batch_size", "device", "_type", "_non_tensor"
# Further fields, which only this package writes: the dim names, the full name of a tensorclass, the stack dim of a lazy
# stack, the values of a stack of values, and the names of the entries that are UnbatchedTensors.
NAMES, CLASS, STACK_DIM, LISTS, UNBATCHED_NAMES = "_names", "_class", "_stack_dim", "_lists", "_unbatched"
SEPARATOR = "."

# Stands for an entry of a member of a lazy stack that does not fit.
UNFIT = object()


class StateWriter:
    """Writes the state of a container.

    Args:
        keep_vars: write the tensors themselves instead of detached ones.
        flatten: write one mapping, whose names join the parts of nested keys by the separator.
        values: also write the holders of non-tensor values under their keys; otherwise the values are in the metadata
            only.
    """

    def __init__(self, keep_vars: bool, flatten: bool, values: bool) -> None:
        self.keep_vars = keep_vars
        self.flatten = flatten
        self.values = values

    def write(self, container: Contract, destination: MutableMapping[str, Any], prefix: str) -> None:
        """Add the state of a container to a mapping. `prefix` begins every name.

        Raises:
            SaveError: two entries would have the same name.
        """
        found: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        self._write_node(container, found, prefix, metadata, ())
        destination.update(found)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(metadata)

    def _write_node(
        self, container: Any, found: dict[str, Any], prefix: str, metadata: dict[str, Any], key: Path
    ) -> None:
        inner = container._wrapped_container()
        meta: dict[str, Any] = {SIZE: inner._batch_size, DEVICE: inner._device}
        metadata[prefix[: -len(SEPARATOR)]] = meta
        if inner._names is not None:
            meta[NAMES] = list(inner._names)
        fields: dict[str, Any] | None = None
        if is_stored_as_class(container):
            cls = type(container)
            meta[TYPE], meta[CLASS] = cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
            fields = meta[VALUES] = {name: None for name in cls.__expected_keys__ if name not in inner._structure()}
        form = _dense_form(inner, key)
        if form.stack_dim is not None:
            meta[STACK_DIM] = form.stack_dim
        if form.is_value:
            self._write_value(form, meta)
            return
        if form.kind == LAZY:
            meta[TYPE] = LAZY
        for name, value in form.entries.items():
            self._write_entry(name, value, found, prefix, metadata, (*key, name), fields)

    def _write_value(self, form: Specification, meta: dict[str, Any]) -> None:
        meta[TYPE] = form.kind
        if form.kind == VALUE_STACK:
            meta[LISTS] = form.value
        else:
            meta[VALUES] = {OWN: form.value, "_is_non_tensor": True, "_metadata": None}

    def _write_entry(
        self,
        name: str,
        value: object,
        found: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        key: Path,
        fields: dict[str, Any] | None,
    ) -> None:
        full = prefix + name
        if not isinstance(value, Contract) or isinstance(value, Tensor):
            if isinstance(value, Contract):
                meta = metadata[prefix[: -len(SEPARATOR)]]
                meta.setdefault(UNBATCHED_NAMES, []).append(name)
                value = value.as_subclass(Tensor)  # type: ignore[attr-defined]
            _add(found, full, value if self.keep_vars else _detach(value), key)
            return
        if value._is_non_tensor:
            form = specification_of(value, key)
            if self.values:
                # Distributed checkpoints take mappings and lists apart, and store only their items. A stack of values
                # is a mapping, so a tuple protects it. A holder is not.
                _add(found, full, (value,) if form.kind == VALUE_STACK else value, key)
            if fields is not None and form.kind != VALUE_STACK:
                fields[name] = form.value
                return
        if self.flatten:
            self._write_node(value, found, full + SEPARATOR, metadata, key)
            return
        inner: OrderedDict[str, Any] = OrderedDict()
        inner_metadata: OrderedDict[str, Any] = OrderedDict()
        self._write_node(value, inner, "", inner_metadata, key)
        inner._metadata = inner_metadata  # type: ignore[attr-defined]
        if full not in found:
            _add(found, full, inner, key)


def _add(found: dict[str, Any], name: str, value: object, key: Path) -> None:
    if name in found:
        raise SaveError(
            f"entry {joined(key)!r} has the name {name!r} in the state dict, and so has another: pass flatten=False, "
            "or rename one of them"
        )
    found[name] = value


def _detach(leaf: Any) -> Any:
    plain = leaf.detach()
    return plain.as_subclass(Tensor) if isinstance(plain, MemoryMappedTensor) else plain


def _dense_form(container: Contract, key: Path) -> Specification:
    """Describe a container. If the members of a lazy stack have equal keys and shapes, describe its stacked entries."""
    form = specification_of(container, key)
    if form.kind != LAZY or find_uneven(container) is not None:
        return form
    try:
        entries = {name: container._entries[name] for name in container._structure()}
    except StackError:
        return form
    return Specification(DICT, form.batch_size, form.device, form.names, entries, form.stack_dim)


# --- reading ----------------------------------------------------------------------------------------------------------


class Level:
    """The part of a state dict for one container: tensors, nested levels and other values by name, and its metadata."""

    __slots__ = ("entries", "meta")

    def __init__(self, meta: Mapping[str, Any] | None = None) -> None:
        self.entries: dict[str, Any] = {}
        self.meta: dict[str, Any] = dict(meta or {})

    @property
    def kind(self) -> Any:
        """The name of the class in the metadata."""
        return VALUE_STACK if LISTS in self.meta else self.meta.get(TYPE)

    @property
    def is_value(self) -> bool:
        """True for a non-tensor value."""
        return LISTS in self.meta or (self.kind in ("NonTensorData", "MetaData") and VALUES in self.meta)

    @property
    def value(self) -> Any:
        """The non-tensor value; nested lists for a stack of values."""
        return self.meta[LISTS] if LISTS in self.meta else self.meta[VALUES].get(OWN)


# Older releases of the reference wrote the batch size and the device of a container as entries of these names.
_OLDER = {"__batch_size": SIZE, "__device": DEVICE}
# They wrote a tensorclass as a mapping of these two names.
_OLDER_TENSORS, _OLDER_VALUES = "_tensordict", "_non_tensordict"


def parse_state(state: Mapping[str, Any], target: object, from_flatten: bool | None) -> Level:
    """Parse a state dict into a tree of levels.

    Args:
        state: the state dict, flat or nested.
        target: the container to load into. Without metadata, its keys tell how a name with separators is divided.
        from_flatten: True for a flat state dict; `None` detects it.
    """
    if from_flatten is None:
        from_flatten = not any(
            isinstance(value, Mapping) and name.split(SEPARATOR)[-1] != _OLDER_VALUES for name, value in state.items()
        )
    metadata = getattr(state, "_metadata", None)
    return _parse_flat(state, metadata, target) if from_flatten else _parse_nested(state, metadata)


def _parse_older(state: Mapping[str, Any]) -> Level:
    """Parse a tensorclass or a value in the layout of older releases: its container, and its values beside it."""
    level = _parse_nested(state[_OLDER_TENSORS], getattr(state[_OLDER_TENSORS], "_metadata", None))
    values = dict(state[_OLDER_VALUES])
    level.meta[VALUES] = values
    if "_is_non_tensor" in values:
        level.meta[TYPE] = "NonTensorData"
    return level


def _convert_older(state: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Convert a flat state dict of older releases, and its metadata, to the present layout.

    Older releases divide a tensorclass into its tensors, with names below `_tensordict`, and its values, with names
    below `_non_tensordict` or in a mapping of that name.
    """
    split = {name: name.split(SEPARATOR) for name in state}
    if not any(_OLDER_VALUES in parts for parts in split.values()):
        return state, given
    found: dict[str, Any] = {}
    metadata = dict(given)
    for name, parts in split.items():
        names = [part for part in parts[:-1] if part != _OLDER_TENSORS] + parts[-1:]
        if _OLDER_VALUES not in parts:
            found[SEPARATOR.join(names)] = state[name]
            continue
        at = names.index(_OLDER_VALUES)
        rest, value = SEPARATOR.join(names[at + 1 :]), state[name]
        meta = metadata.setdefault(SEPARATOR.join(names[:at]), {})
        values = meta.setdefault(VALUES, {})
        values.update({rest: value} if rest or not isinstance(value, Mapping) else value)
        if "_is_non_tensor" in values:
            meta[TYPE] = "NonTensorData"
    return found, metadata


def _parse_nested(state: Mapping[str, Any], metadata: object) -> Level:
    if state.keys() == {_OLDER_TENSORS, _OLDER_VALUES} and all(isinstance(part, Mapping) for part in state.values()):
        return _parse_older(state)
    level = Level(metadata.get("") if isinstance(metadata, Mapping) else None)
    for name, value in state.items():
        if name in _OLDER:
            level.meta[_OLDER[name]] = value
        else:
            level.entries[name] = _parse_entry(value)
    return level


def _parse_entry(value: object) -> Any:
    """Parse one item of a state dict: a mapping becomes a level, and a stack of values leaves its tuple."""
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], Contract):
        return value[0]
    if isinstance(value, Mapping) and not isinstance(value, Contract):
        return _parse_nested(value, getattr(value, "_metadata", None))
    return value


def _parse_flat(state: Mapping[str, Any], metadata: object, target: object) -> Level:
    given = metadata if isinstance(metadata, Mapping) else {}
    # This package and the reference describe all containers in the metadata. The rest of a name is the name of a leaf.
    describes_all = any(isinstance(meta, Mapping) and SIZE in meta for meta in given.values())
    if not describes_all:
        state, given = _convert_older(state, given)
    levels = {place: Level(meta) for place, meta in given.items() if isinstance(meta, Mapping)}
    root = levels.setdefault("", Level())
    for full, value in state.items():
        value = _parse_entry(value)
        place, name = _split_name(full, levels)
        level = _attach(place, levels)
        if not describes_all:
            level, name = _descend(level, name, target, place)
        if name in _OLDER:
            level.meta[_OLDER[name]] = value
        else:
            level.entries[name] = value
    # Containers without tensors come last, because the names of tensors have not led to them.
    for place in given:
        if place in levels:
            _attach(place, levels)
    return root


def _attach(place: str, levels: Mapping[str, Level]) -> Level:
    """Make a level an entry of the level around it, up to the root, and return it."""
    level = levels[place]
    if place:
        outer, name = _split_name(place, levels)
        _attach(outer, levels).entries.setdefault(name, level)
    return level


def _split_name(full: str, levels: Mapping[str, Level]) -> tuple[str, str]:
    """Split a name into the name of the innermost known container and the rest."""
    end = full.rfind(SEPARATOR)
    while end >= 0:
        if full[:end] in levels:
            return full[:end], full[end + len(SEPARATOR) :]
        end = full.rfind(SEPARATOR, 0, end)
    return "", full


def _descend(level: Level, name: str, target: Any, place: str) -> tuple[Level, str]:
    """Follow a name without metadata from a level down, and return the last level and the name in it.

    The name is divided at its separators as the keys of the target are, and else at every separator.
    """
    node = target
    for part in place.split(SEPARATOR) if place else ():
        node = _child(node, part)
    while SEPARATOR in name and not (node is not None and name in node._structure()):
        end = name.find(SEPARATOR)
        while node is not None and end >= 0 and _child(node, name[:end]) is None:
            end = name.find(SEPARATOR, end + 1)
        if node is None or end < 0:
            end = name.find(SEPARATOR)
        first, name = name[:end], name[end + len(SEPARATOR) :]
        below = level.entries.setdefault(first, Level())
        if not isinstance(below, Level):
            return level, f"{first}{SEPARATOR}{name}"
        node, level = (None if node is None else _child(node, first)), below
    return level, name


def _child(node: Any, name: str) -> Any:
    inner = None if node is None else node._node(name)
    return None if inner is None or isinstance(inner, Tensor) or inner._is_non_tensor else inner


def split_members(level: Level, count: int, dim: int, key: Path, misfits: list[str]) -> list[Level]:
    """Split a level into the levels of the members of a lazy stack. A part that cannot be split adds to `misfits`."""
    if level.kind == LAZY:
        return _take_members(level, count, key, misfits)
    meta = dict(level.meta)
    if SIZE in meta:
        size = tuple(meta[SIZE])
        if len(size) <= dim or size[dim] != count:
            misfits.append(
                f"{entry_of(key)}its batch size {list(size)} does not fit a stack of {count} along dim {dim}"
            )
            return []
        meta[SIZE] = torch.Size(size[:dim] + size[dim + 1 :])
    if isinstance(meta.get(NAMES), list):
        meta[NAMES] = meta[NAMES][:dim] + meta[NAMES][dim + 1 :]
    stack_dim = meta.pop(STACK_DIM, None)
    if LISTS in meta:
        return _split_values(level, meta, count, dim, key, misfits)
    if type(stack_dim) is int and stack_dim != dim:
        meta[STACK_DIM] = stack_dim - (stack_dim > dim)
    found = [Level(meta) for _ in range(count)]
    unbatched = meta.get(UNBATCHED_NAMES, ())
    for name, value in level.entries.items():
        if name in unbatched:
            parts: list[Any] = [value] * count
        else:
            parts = _split_entry(value, count, dim, (*key, name), misfits) or [UNFIT] * count
        for member, part in zip(found, parts, strict=True):
            member.entries[name] = part
    return found


def _take_members(level: Level, count: int, key: Path, misfits: list[str]) -> list[Level]:
    members = [level.entries.get(str(position)) for position in range(len(level.entries))]
    found = [member for member in members if isinstance(member, Level)]
    if len(found) != len(members) or len(found) != count:
        misfits.append(f"{entry_of(key)}a stack of {count} members cannot take one of {len(members)}")
        return []
    return found


def _split_values(
    level: Level, meta: dict[str, Any], count: int, dim: int, key: Path, misfits: list[str]
) -> list[Level]:
    try:
        lists = [_take_value(level.value, dim, position) for position in range(count)]
    except (IndexError, TypeError):
        misfits.append(f"{entry_of(key)}its values do not have {count} lists along dim {dim}")
        return []
    found = []
    for part in lists:
        own = dict(meta)
        del own[LISTS]
        if meta.get(SIZE):
            own.update({LISTS: part, STACK_DIM: 0, TYPE: VALUE_STACK})
        else:
            own.update({VALUES: {OWN: part}, TYPE: "NonTensorData"})
        found.append(Level(own))
    return found


def _split_entry(value: Any, count: int, dim: int, key: Path, misfits: list[str]) -> list[Any]:
    if isinstance(value, Level):
        return split_members(value, count, dim, key, misfits)
    if not isinstance(value, Tensor):
        size = value._batch_size if isinstance(value, Contract) else ()
        return list(value.unbind(dim)) if size[dim : dim + 1] == (count,) else [value] * count
    if value.is_nested or value.dim() <= dim or value.shape[dim] != count:
        misfits.append(
            f"{entry_of(key)}a tensor of shape {list(ragged.shape_of(value))} cannot be split along dim {dim} for a "
            f"stack of {count}"
        )
        return []
    return list(value.unbind(dim))


def _take_value(lists: object, dim: int, position: int) -> Any:
    if type(lists) is not list:
        raise TypeError
    return lists[position] if dim == 0 else [_take_value(part, dim - 1, position) for part in lists]
