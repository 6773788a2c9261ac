"""State dicts: containers as mappings of names to tensors, in the form that modules and checkpoints share.

Beside the tensors, the attribute `_metadata` of the mapping says what every container is, under the name of its place:
its batch size and device, and under names that begin with "_" all else. What only this package keeps is passed over by
other readers.
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
from tensordict.io.specification import DICT, LAZY, OWN, VALUE_STACK, Specification, is_typed, specification_of
from tensordict.memory.mapped import MemoryMappedTensor

# What the metadata of a container may say.
SIZE, DEVICE, TYPE, VALUES = "batch_size", "device", "_type", "_non_tensor"
# As above, kept by this package only: the dim names, the full name of a tensorclass, the dim of a lazy stack, the
# values of a stack of values, and the names of the entries that are UnbatchedTensors.
NAMES, CLASS, STACK_DIM, LISTS, UNBATCHED_NAMES = "_names", "_class", "_stack_dim", "_lists", "_unbatched"
SEPARATOR = "."

# Stands for an entry of a member of a lazy stack that has been found not to fit.
UNFIT = object()


class StateWriter:
    """Writes the state of a container.

    Args:
        keep_vars: give the tensors themselves, not detached from autograd.
        flatten: one mapping, whose names have the separator between the parts of nested keys.
        values: give the holders of values that are no tensors too, under their keys; otherwise the values are in the
            metadata only.
    """

    def __init__(self, keep_vars: bool, flatten: bool, values: bool) -> None:
        self.keep_vars = keep_vars
        self.flatten = flatten
        self.values = values

    def write(self, container: Contract, destination: MutableMapping[str, Any], prefix: str) -> None:
        """Add the state of a container to a mapping, with this in front of its names.

        Raises:
            SaveError: two entries would have the same name.
        """
        found: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        self._node(container, found, prefix, metadata, ())
        destination.update(found)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(metadata)

    def _node(self, container: Any, found: dict[str, Any], prefix: str, metadata: dict[str, Any], key: Path) -> None:
        inner = container._wrapped_container()
        meta: dict[str, Any] = {SIZE: inner._batch_size, DEVICE: inner._device}
        metadata[prefix[: -len(SEPARATOR)]] = meta
        if inner._names is not None:
            meta[NAMES] = list(inner._names)
        fields: dict[str, Any] | None = None
        if is_typed(container):
            cls = type(container)
            meta[TYPE], meta[CLASS] = cls.__name__, f"{cls.__module__}.{cls.__qualname__}"
            fields = meta[VALUES] = {name: None for name in cls.__expected_keys__ if name not in inner._structure()}
        form = _dense_form(inner, key)
        if form.stack_dim is not None:
            meta[STACK_DIM] = form.stack_dim
        if form.is_value:
            self._value(form, meta)
            return
        if form.kind == LAZY:
            meta[TYPE] = LAZY
        for name, value in form.entries.items():
            self._entry(name, value, found, prefix, metadata, (*key, name), fields)

    def _value(self, form: Specification, meta: dict[str, Any]) -> None:
        meta[TYPE] = form.kind
        if form.kind == VALUE_STACK:
            meta[LISTS] = form.value
        else:
            meta[VALUES] = {OWN: form.value, "_is_non_tensor": True, "_metadata": None}

    def _entry(
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
            _add(found, full, value if self.keep_vars else _detached(value), key)
            return
        if value._is_non_tensor:
            form = specification_of(value, key)
            if self.values:
                # Checkpoints take mappings and lists apart, by keys that other values would not have. A holder is none,
                # a stack of values is a mapping and goes in a tuple.
                _add(found, full, (value,) if form.kind == VALUE_STACK else value, key)
            if fields is not None and form.kind != VALUE_STACK:
                fields[name] = form.value
                return
        if self.flatten:
            self._node(value, found, full + SEPARATOR, metadata, key)
            return
        inner: OrderedDict[str, Any] = OrderedDict()
        described: OrderedDict[str, Any] = OrderedDict()
        self._node(value, inner, "", described, key)
        inner._metadata = described  # type: ignore[attr-defined]
        if full not in found:
            _add(found, full, inner, key)


def _add(found: dict[str, Any], name: str, value: object, key: Path) -> None:
    if name in found:
        raise SaveError(
            f"entry {joined(key)!r} has the name {name!r} in the state dict, and so has another: pass flatten=False, "
            "or rename one of them"
        )
    found[name] = value


def _detached(leaf: Any) -> Any:
    plain = leaf.detach()
    return plain.as_subclass(Tensor) if isinstance(plain, MemoryMappedTensor) else plain


def _dense_form(container: Contract, key: Path) -> Specification:
    """The form of a container; that of a lazy stack has stacked entries where all members have the same ones."""
    form = specification_of(container, key)
    if form.kind != LAZY or not _is_even(container):
        return form
    try:
        entries = {name: container._entries[name] for name in container._structure()}
    except StackError:
        return form
    return Specification(DICT, form.batch_size, form.device, form.names, entries, form.stack_dim)


def _is_even(stack: Any) -> bool:
    """Whether the members of a stack have the same keys, with dense tensors of the same shapes."""
    names = stack._structure()
    if any(member._structure().keys() != names.keys() for member in stack._members()):
        return False
    for name in names:
        node = stack._node(name)
        if node is None:
            if -1 in stack._shape_of(name) or any(map(ragged.is_ragged, stack._leaves_of(name))):
                return False
        elif _is_lazy(node) and not _is_even(node._wrapped_container()):
            return False
    return True


def _is_lazy(node: Contract) -> bool:
    return hasattr(node._wrapped_container(), "stack_dim") and not node._is_non_tensor


# --- reading ----------------------------------------------------------------------------------------------------------


class Level:
    """What a state dict says about one container: tensors, further levels and other values by name, and metadata."""

    __slots__ = ("entries", "meta")

    def __init__(self, meta: Mapping[str, Any] | None = None) -> None:
        self.entries: dict[str, Any] = {}
        self.meta: dict[str, Any] = dict(meta or {})

    @property
    def kind(self) -> Any:
        """The class that the metadata names."""
        return VALUE_STACK if LISTS in self.meta else self.meta.get(TYPE)

    @property
    def is_value(self) -> bool:
        """Whether this is a value that is no tensor."""
        return LISTS in self.meta or (self.kind in ("NonTensorData", "MetaData") and VALUES in self.meta)

    @property
    def value(self) -> Any:
        """The value; that of a stack of values is nested lists."""
        return self.meta[LISTS] if LISTS in self.meta else self.meta[VALUES].get(OWN)


# The names under which older releases have the batch size and the device of a container among its entries.
_OLDER = {"__batch_size": SIZE, "__device": DEVICE}
# What the state of a tensorclass consists of there.
_OLDER_TENSORS, _OLDER_VALUES = "_tensordict", "_non_tensordict"


def levels_of(state: Mapping[str, Any], target: object, from_flatten: bool | None) -> Level:
    """The tree of levels in a state dict.

    Args:
        state: the state dict, flat or nested.
        target: the container that it is for: its keys tell where a name ends, where no metadata does.
        from_flatten: whether it is flat; `None` to see for oneself.
    """
    if from_flatten is None:
        from_flatten = not any(
            isinstance(value, Mapping) and name.split(SEPARATOR)[-1] != _OLDER_VALUES for name, value in state.items()
        )
    metadata = getattr(state, "_metadata", None)
    return _unflattened(state, metadata, target) if from_flatten else _nested(state, metadata)


def _of_older(state: Mapping[str, Any]) -> Level:
    """The level of a tensorclass or a value in the layout of older releases: its container, and the values beside."""
    level = _nested(state[_OLDER_TENSORS], getattr(state[_OLDER_TENSORS], "_metadata", None))
    values = dict(state[_OLDER_VALUES])
    level.meta[VALUES] = values
    if "_is_non_tensor" in values:
        level.meta[TYPE] = "NonTensorData"
    return level


def _of_older_flat(state: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A flat state and its metadata, once the parts that older releases make of a tensorclass are one container again.

    They are the names of its tensors below `_tensordict`, and its values below `_non_tensordict` or as a mapping there.
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


def _nested(state: Mapping[str, Any], metadata: object) -> Level:
    if state.keys() == {_OLDER_TENSORS, _OLDER_VALUES} and all(isinstance(part, Mapping) for part in state.values()):
        return _of_older(state)
    level = Level(metadata.get("") if isinstance(metadata, Mapping) else None)
    for name, value in state.items():
        if name in _OLDER:
            level.meta[_OLDER[name]] = value
        else:
            level.entries[name] = _entry(value)
    return level


def _entry(value: object) -> Any:
    """What a level has for a value of a state dict."""
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], Contract):
        return value[0]
    if isinstance(value, Mapping) and not isinstance(value, Contract):
        return _nested(value, getattr(value, "_metadata", None))
    return value


def _unflattened(state: Mapping[str, Any], metadata: object, target: object) -> Level:
    given = metadata if isinstance(metadata, Mapping) else {}
    # The metadata of this package and of the reference has all containers: what is left of a name is that of a leaf.
    known = any(isinstance(meta, Mapping) and SIZE in meta for meta in given.values())
    if not known:
        state, given = _of_older_flat(state, given)
    levels = {place: Level(meta) for place, meta in given.items() if isinstance(meta, Mapping)}
    root = levels.setdefault("", Level())
    for full, value in state.items():
        value = _entry(value)
        place, name = _place(full, levels)
        level = _attached(place, levels)
        if not known:
            level, name = _descended(level, name, target, place)
        if name in _OLDER:
            level.meta[_OLDER[name]] = value
        else:
            level.entries[name] = value
    # Last those without tensors, which no name has led to.
    for place in given:
        if place in levels:
            _attached(place, levels)
    return root


def _attached(place: str, levels: Mapping[str, Level]) -> Level:
    """The level of a place, once it is an entry of the one that it is in."""
    level = levels[place]
    if place:
        outer, name = _place(place, levels)
        _attached(outer, levels).entries.setdefault(name, level)
    return level


def _place(full: str, levels: Mapping[str, Level]) -> tuple[str, str]:
    """The place of the innermost container that a name is in, and the rest of the name."""
    end = full.rfind(SEPARATOR)
    while end >= 0:
        if full[:end] in levels:
            return full[:end], full[end + len(SEPARATOR) :]
        end = full.rfind(SEPARATOR, 0, end)
    return "", full


def _descended(level: Level, name: str, target: Any, place: str) -> tuple[Level, str]:
    """The level that a name without metadata leads to, and the name there: the keys of the target have precedence."""
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


def member_levels(level: Level, count: int, dim: int, key: Path, misfits: list[str]) -> list[Level]:
    """The levels of the members of a lazy stack; what cannot be split is added to `misfits`."""
    if level.kind == LAZY:
        return _listed_members(level, count, key, misfits)
    meta = dict(level.meta)
    if SIZE in meta:
        size = tuple(meta[SIZE])
        if len(size) <= dim or size[dim] != count:
            misfits.append(
                f"{entry_of(key)}its batch size {list(size)} is not that of a stack of {count} along dim {dim}"
            )
            return []
        meta[SIZE] = torch.Size(size[:dim] + size[dim + 1 :])
    if isinstance(meta.get(NAMES), list):
        meta[NAMES] = meta[NAMES][:dim] + meta[NAMES][dim + 1 :]
    stacked = meta.pop(STACK_DIM, None)
    if LISTS in meta:
        return _listed_values(level, meta, count, dim, key, misfits)
    if type(stacked) is int and stacked != dim:
        meta[STACK_DIM] = stacked - (stacked > dim)
    found = [Level(meta) for _ in range(count)]
    unbatched = meta.get(UNBATCHED_NAMES, ())
    for name, value in level.entries.items():
        if name in unbatched:
            parts: list[Any] = [value] * count
        else:
            parts = _parts(value, count, dim, (*key, name), misfits) or [UNFIT] * count
        for member, part in zip(found, parts, strict=True):
            member.entries[name] = part
    return found


def _listed_members(level: Level, count: int, key: Path, misfits: list[str]) -> list[Level]:
    members = [level.entries.get(str(position)) for position in range(len(level.entries))]
    found = [member for member in members if isinstance(member, Level)]
    if len(found) != len(members) or len(found) != count:
        misfits.append(f"{entry_of(key)}a stack of {count} members cannot take one of {len(members)}")
        return []
    return found


def _listed_values(
    level: Level, meta: dict[str, Any], count: int, dim: int, key: Path, misfits: list[str]
) -> list[Level]:
    try:
        lists = [_taken(level.value, dim, position) for position in range(count)]
    except (IndexError, TypeError):
        misfits.append(f"{entry_of(key)}its values do not lie in lists along dim {dim} of {count}")
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


def _parts(value: Any, count: int, dim: int, key: Path, misfits: list[str]) -> list[Any]:
    if isinstance(value, Level):
        return member_levels(value, count, dim, key, misfits)
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


def _taken(lists: object, dim: int, position: int) -> Any:
    if type(lists) is not list:
        raise TypeError
    return lists[position] if dim == 0 else [_taken(part, dim - 1, position) for part in lists]
