"""Operands of arithmetic and comparison: conversion, and pairing each leaf with its counterpart."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from tensordict.core import makers, ragged
from tensordict.core.contract import ByNdim, ContainerT, Contract, is_node, named_error, raise_key_mismatch
from tensordict.core.keys import Path, entry_of, joined
from tensordict.core.shapes import broadcasts_to

_NUMBERS = frozenset((int, float, bool, complex))
_PLAIN = {Tensor}
INTERSECTION = "intersection"


def as_operand(value: object) -> Any:
    """Convert `value` to a container, a tensor or a number. Returns `NotImplemented` for anything else."""
    if type(value) in _NUMBERS or isinstance(value, (Contract, Tensor)):
        return value
    if isinstance(value, np.generic):
        return value.item() if isinstance(value, (np.number, np.bool_)) else NotImplemented
    if isinstance(value, np.ndarray):
        return torch.as_tensor(value)
    if isinstance(value, Mapping):
        return make_from_mapping(value)
    return value if isinstance(value, numbers.Number) else NotImplemented


def is_operand(value: object) -> bool:
    """Return whether `as_operand` accepts a value."""
    if type(value) in _NUMBERS or isinstance(value, (Contract, Tensor)):
        return True
    return isinstance(value, (np.ndarray, np.number, np.bool_, Mapping, numbers.Number))


def make_from_mapping(mapping: Mapping[Any, Any]) -> Any:
    """Make a `TensorDict` without batch dims from a mapping."""
    made = makers.dense({}, torch.Size(()), None, None)
    made._fill(mapping)
    return made


def check_default(default: object) -> Any:
    """Return the `default` of a binary operation. Raises unless it is `None`, a tensor, a number or "intersection"."""
    if isinstance(default, str) and default != INTERSECTION:
        raise ValueError(f'default must be a tensor, a number or "{INTERSECTION}", got {default!r}')
    return default


def expand_to_common(container: ContainerT, size: torch.Size) -> ContainerT:
    """Expand a container to the batch size that it and an operand of batch size `size` broadcast to.

    A container that cannot be expanded is returned unchanged, since its leaves may broadcast nevertheless. Torch raises
    an error if they do not.
    """
    own = container._batch_size
    if size == own or len(size) < len(own) or -1 in own or -1 in size:
        return container
    try:
        common = torch.broadcast_shapes(own, size)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return container
    if common == own:
        return container
    wider: ContainerT = container.expand(common)
    return wider


def pair_up(
    node: ContainerT, other: Contract, default: object = None, path: Path = ()
) -> tuple[ContainerT, list[Any], list[Any]]:
    """Pair the leaves of two containers, in the order of `_leaves`.

    Lazy stacks are paired member by member; see `_pair_members`.

    Args:
        node: the left container. The result has its structure.
        other: the right container. The order of its keys does not matter.
        default: `None` if both must have the same keys; "intersection" to drop entries that only one side has; a number
            or a tensor to use for missing entries.
        path: the path of the two containers, for error messages.

    Returns:
        the container whose `_rebuilt` takes the results, the left leaves, and the right leaves.

    Raises:
        KeyError: the keys differ and `default` is `None`. The error names the keys that only one side has.
        TypeError: an entry is a container on one side only.
        RuntimeError: leaves broadcast to a shape that does not begin with the batch size of the left container.
    """
    left: list[Any] = []
    right: list[Any] = []
    if default is None:
        _pair_exactly(node, other, path, left, right)
        return node, left, right
    return _pair_with_default(node, other, default, path, left, right), left, right


def _pair_exactly(node: Any, other: Any, path: Path, left: list[Tensor], right: list[Tensor]) -> None:
    """Append the leaves of two containers with the same keys."""
    entries, others = node._entries, other._entries
    if not isinstance(entries, dict):
        parts = _pair_parts(node, other, path)
        if parts is not None:
            for mine, theirs in parts:
                _pair_exactly(mine, theirs, path, left, right)
            return
        entries = node._writable()
    names = list(entries)
    if names == list(others):
        values, counterparts = list(entries.values()), list(others.values())
    else:
        if entries.keys() != others.keys():
            entries, others = _drop_values(entries), _drop_values(others)
            if entries.keys() != others.keys():
                raise_key_mismatch([entries, others], path, "pass a default, as in td.add(other, default=0)")
            names = list(entries)
        values, counterparts = list(entries.values()), [others[name] for name in names]
    # With equal batch sizes of at most one dim, broadcasting two leaves cannot change the batch size.
    aligned = node._batch_size == other._batch_size and len(node._batch_size) < 2
    if aligned and set(map(type, values)) == _PLAIN == set(map(type, counterparts)):
        left += values
        right += counterparts
        return
    for name, value, counterpart in zip(names, values, counterparts, strict=True):
        if _are_nodes(value, counterpart, path, name):
            _pair_exactly(value, counterpart, (*path, name), left, right)
        else:
            if not aligned:
                _refuse_uneven(node, other, value, counterpart, (*path, name))
            left.append(value)
            right.append(counterpart)


def _drop_values(entries: Any) -> dict[str, Any]:
    """Return the entries except non-tensor values, which one side may lack."""
    return {
        name: value for name, value in entries.items() if not (isinstance(value, Contract) and value._is_non_tensor)
    }


def _pair_with_default(node: Any, other: Any, default: Any, path: Path, left: list[Any], right: list[Any]) -> Any:
    """Append the leaves of two containers whose keys may differ. Returns a container of the structure of the result."""
    parts = _pair_parts(node, other, path)
    if parts is not None:
        return node._restack([_pair_with_default(one, two, default, path, left, right) for one, two in parts])
    others = other._entries
    entries: dict[str, Any] = {}
    for name, value in node._entries.items():
        if name in others:
            counterpart = others[name]
            if _are_nodes(value, counterpart, path, name):
                value = _pair_with_default(value, counterpart, default, (*path, name), left, right)
            else:
                _refuse_uneven(node, other, value, counterpart, (*path, name))
                left.append(value)
                right.append(counterpart)
        elif _is_intersection(default):
            continue
        else:
            leaves = value._leaves() if is_node(value) else [value]
            left += leaves
            right += [_make_filler(default, leaf) for leaf in leaves]
        entries[name] = value
    if not _is_intersection(default):
        for name, value in others.items():
            if name not in node._entries:
                _refuse_foreign(node, value, (*path, name))
                leaves = value._leaves() if is_node(value) else [value]
                left += [_make_filler(default, leaf) for leaf in leaves]
                right += leaves
                if node._names is not None and is_node(value):
                    value = value.copy()
                    value._name_tree([*node._names, *value.names[len(node._names) :]])
                entries[name] = value
    return node._build(entries, node._batch_size, node._device, node._names)


def list_counterparts(container: Contract, value: object, what: str) -> Any:
    """Return the counterpart of each leaf of `container`: a list, or the number `value` itself.

    Raises:
        KeyError: `value` is a container with other keys.
        RuntimeError: `value` is a tensor that does not broadcast to the batch size.
    """
    if isinstance(value, Contract):
        return pair_up(container, value)[2]
    if isinstance(value, Tensor):
        return align_with_leaves(container, value, what)
    return value


def align_with_leaves(container: Contract, value: Tensor, what: str) -> list[Tensor]:
    """Align the dims of a tensor with the batch dims. Returns a view for each leaf that broadcasts to the leaf."""
    if value.ndim == 0:
        return [value] * len(container._leaves())
    size = container._batch_size
    if value.shape != size:
        value = expand_to_batch(value, size, f"{what}: ")
    found: list[Tensor] = []
    _add_views(container, value, ByNdim(value), found)
    return found


def expand_to_batch(value: Tensor, size: torch.Size, what: str = "") -> Tensor:
    """Expand a tensor to a batch size. Raises if it does not broadcast to it.

    A size of -1 differs between the members of a lazy stack, and takes a dim of size 1 only.
    """
    try:
        if any(length == -1 and n != 1 for n, length in zip(reversed(value.shape), reversed(size), strict=False)):
            raise RuntimeError("the batch size differs between members")
        return value.expand(size)
    except RuntimeError:
        raise RuntimeError(
            f"{what}a tensor of shape {list(value.shape)} does not broadcast to the batch size {list(size)}: a tensor "
            "is aligned with the batch dims of a container. Use a container to give each entry its own tensor"
        ) from None


def refuse_operand(what: str, value: object) -> NoReturn:
    """Raise the error for a value that `as_operand` does not accept."""
    raise TypeError(f"{what} takes a container, a tensor or a number, got {type(value).__name__}")


def _add_views(node: Contract, value: Tensor, views: ByNdim, found: list[Tensor]) -> None:
    """Append the view of `value` for each leaf, like `_map_with`.

    `_map_with` also builds a container, which takes 4 us for 10 leaves, so only lazy stacks use it here.
    """
    if node._members() is not None:
        found += node._map_with(_return_second, value)._leaves()
        return
    for entry in node._writable().values():
        if type(entry) is not Tensor and isinstance(entry, Contract):
            if isinstance(entry, Tensor):
                entry._map_with(_return_second, value)  # raises an error
            _add_views(entry, value, views, found)
        else:
            found.append(views[entry.dim()])


def _return_second(leaf: object, part: Tensor) -> Tensor:
    return part


def _pair_parts(node: Any, other: Contract, path: Path) -> Any:
    """Pair the members of a lazy stack with the parts of `other`, whose batch size is adapted first.

    Returns `None` for a container without members.
    """
    if isinstance(node._entries, dict):
        return None
    size = node._batch_size
    if other._batch_size == size:
        return node._pair_members(other)
    if node._pair_members(node) is None:
        return None
    theirs = other._batch_size
    # Torch aligns leaves at their last dims. These are the same dims if both leaves have as many feature dims.
    if have_as_many_feature_dims(node, other):
        if (pieces := broadcast_pieces(node, other)) is not None:
            return list(zip(node._members(), pieces, strict=True))
    elif all(leaf.shape[: len(size)] == size for leaf in other._leaves()):
        return node._pair_members(other._map(lambda leaf: leaf, size, len(theirs)))
    raise RuntimeError(
        f"{entry_of(path)}a container of batch size {list(theirs)} cannot be split among the members of a lazy stack "
        f"of batch size {list(size)}: expand it to that batch size first"
    )


def broadcast_pieces(node: Any, other: Any) -> Sequence[Any] | None:
    """Return the part of `other` for each member of a lazy stack; `None` if it does not broadcast to its batch size."""
    size, theirs = node._batch_size, other._batch_size
    if not broadcasts_to(theirs, size):
        return None
    count = len(node._members())
    dim = node._wrapped_container().stack_dim - len(size) + len(theirs)
    if dim < 0:
        return [other] * count
    pieces: Sequence[Any] = other._wrapped_container().unbind(dim)
    return pieces if len(pieces) == count else [pieces[0]] * count


def have_as_many_feature_dims(node: Any, other: Any) -> bool:
    """Return whether the tensors that two containers share have equally many dims behind the batch dims."""
    mine, theirs = len(node._batch_size), len(other._batch_size)
    if mine == theirs:
        return True
    nodes = [member._wrapped_container() for member in node._members()]
    ranks = {key: 1 + leaf.ndim for member in nodes for key, leaf in member.items(True, True)}
    return all(
        isinstance(leaf, Contract) or ranks.get(key, leaf.ndim - theirs + mine) - mine == leaf.ndim - theirs
        for key, leaf in other._wrapped_container().items(True, True)
    )


def _is_intersection(default: object) -> bool:
    return isinstance(default, str)


def _make_filler(default: Any, leaf: Tensor) -> Tensor:
    """Return the counterpart of a leaf that the other container lacks."""
    if isinstance(default, Tensor):
        return default
    return torch.tensor(default, dtype=torch.result_type(leaf, default), device=leaf.device)


def _refuse_foreign(node: Contract, value: Contract | Tensor, path: Path) -> None:
    """Raise if an entry that only the right container has does not fit the batch size of the left container."""
    size = node._batch_size
    shape = value._batch_size if isinstance(value, Contract) else ragged.shape_of(value)
    if shape[: len(size)] != size:
        raise RuntimeError(
            f"entry {joined(path)!r}: shape {list(shape)}, which only the right container has, does not begin with "
            f"the batch size {list(size)} of the left one"
        )


def _are_nodes(value: object, counterpart: object, path: Path, name: str) -> bool:
    """Return whether both entries are containers. Raises if only one of them is."""
    nested = type(value) is not Tensor and is_node(value)
    if nested is not (type(counterpart) is not Tensor and is_node(counterpart)):
        kinds = "a container on the left and a tensor" if nested else "a tensor on the left and a container"
        raise TypeError(f"entry {joined((*path, name))!r} is {kinds} on the right")
    return nested


def _refuse_uneven(node: Contract, other: Contract, one: Tensor, two: Tensor, path: Path) -> None:
    """Raise if two leaves broadcast to a shape that does not begin with the batch size of the left container.

    Broadcasting aligns the last dims, and so may mix batch dims and feature dims.
    """
    size = node._batch_size
    if isinstance(one, Contract):
        return
    if size == other._batch_size and (len(size) < 2 or one.dim() == two.dim()):
        return
    try:
        shape = torch.broadcast_shapes(one.shape, two.shape)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise named_error(error, path) from error
    if shape[: len(size)] != size:
        raise RuntimeError(
            f"entry {joined(path)!r}: leaves of shapes {list(one.shape)} and {list(two.shape)} broadcast to "
            f"{list(shape)}, which does not begin with the batch size {list(size)}"
        )
