"""Entries of lazy stacks whose leaves are no one tensor: as lists, padded or nested; such stacks made dense."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.exceptions import StackError
from tensordict.core.keys import Path, joined


def check_form(as_list: bool, as_padded_tensor: bool, as_nested_tensor: bool, return_mask: bool) -> None:
    """Raise unless one form is asked for."""
    if return_mask and not as_padded_tensor:
        raise ValueError("get gives a mask with as_padded_tensor=True only: return_mask says where there is no padding")
    if as_list + as_padded_tensor + as_nested_tensor > 1:
        raise ValueError("get takes one of as_list, as_padded_tensor and as_nested_tensor")


def column(stack: Any, name: str) -> list[Any]:
    """The leaves of one name, in lists of lists where members are lazy stacks."""
    with stack._entries.reading(name):
        return _column(stack, name)


def _column(stack: Any, name: str) -> list[Any]:
    found: list[Any] = []
    # A comprehension that assigns and recurses is no code that Dynamo can trace.
    for member in stack._entries.containers:
        entries = member._entries
        if type(entries) is dict or member._members() is None:
            found.append(entries[name])
        else:
            found.append(_column(member, name))
    return found


def as_nested(stack: object, path: Path, layout: torch.layout) -> Tensor:
    """The leaves of the last name of `path` as a nested tensor."""
    return nested_of(stack, _rows(stack, path), layout, path)


def as_padded(stack: Any, path: Path, side: str, value: Any, return_mask: bool) -> Any:
    """The leaves of the last name of `path` as one tensor, filled up with `value`; and the mask of what is there."""
    leaves = stack._leaves_of(path[-1])
    if not leaves:
        return stack._entries.read(path[-1])
    tensor = _restack(stack, iter(padded(leaves, side, value, path)))
    if not return_mask:
        return tensor
    there = [torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]
    return tensor, _restack(stack, iter(padded(there, side, False, path)))


def padded(column: Sequence[Tensor], side: str, value: Any, path: Path) -> list[Tensor]:
    """The leaves filled up with `value`, on one side of every dim, to the largest size.

    Raises:
        ValueError: the side is neither `"left"` nor `"right"`.
        RuntimeError: the leaves have different numbers of dims.
    """
    if side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right', got {side!r}")
    shapes = _shapes(column, path)
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    filled = []
    for leaf, shape in zip(column, shapes, strict=True):
        missing = [most - size for most, size in zip(largest, shape, strict=True)]
        if any(missing):
            # Torch counts from the last dim, with what comes before and behind it.
            amounts = [n for most in reversed(missing) for n in ((most, 0) if side == "left" else (0, most))]
            leaf = functional.pad(leaf, amounts, value=value)
        filled.append(leaf)
    return filled


def nested(column: Sequence[Tensor], layout: torch.layout, path: Path) -> Tensor:
    """The leaves as one nested tensor, through which gradients flow.

    Raises:
        RuntimeError: torch has no nested tensor of that layout for leaves of these shapes.
    """
    shapes = _shapes(column, path)
    if layout is torch.strided:
        return torch.nested.as_nested_tensor(list(column), layout=torch.strided)
    if layout is not torch.jagged:
        raise ValueError(f"the layout of a nested tensor is torch.strided or torch.jagged, got {layout}")
    ragged = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(ragged) > 1 or not shapes[0]:
        raise StackError(
            f"entry {joined(path)!r} has the shapes {_shown(shapes)}: a nested tensor of the jagged layout has leaves "
            "that differ in one dim; use layout=torch.strided, as_padded_tensor=True or as_list=True"
        )
    dim = ragged[0] if ragged else 0
    lengths = torch.tensor([0, *[shape[dim] for shape in shapes]], device=column[0].device)
    values = torch.cat(list(column), dim)
    return torch.nested.nested_tensor_from_jagged(values, lengths.cumsum(0), jagged_dim=dim + 1)


def _shapes(column: Sequence[Tensor], path: Path) -> list[torch.Size]:
    devices = list(dict.fromkeys(str(leaf.device) for leaf in column))
    if len(devices) > 1:
        raise StackError(
            f"entry {joined(path)!r} is on different devices in the members of the lazy stack, {', '.join(devices)}: "
            "move them to one (td.to(device))"
        )
    shapes = [leaf.shape for leaf in column]
    if len({len(shape) for shape in shapes}) > 1:
        raise StackError(
            f"entry {joined(path)!r} has different numbers of dims in the members of the lazy stack, "
            f"{_shown(shapes)}: read it with get({joined(path)!r}, as_list=True)"
        )
    return shapes


def _shown(shapes: list[torch.Size]) -> str:
    distinct = list(dict.fromkeys(str(list(shape)) for shape in shapes))
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")


def _restack(stack: Any, leaves: Iterator[Tensor]) -> Tensor:
    """One tensor of leaves of the same shape, one for each innermost member."""
    store = stack._entries
    parts = [_restack(member, leaves) if member._members() is not None else next(leaves) for member in store.containers]
    return torch.stack(parts, store.dim)


def _rows(stack: Any, path: Path) -> list[Tensor]:
    """The members' leaves of the last name of `path`; those of members that are lazy stacks, stacked."""
    try:
        return [
            member._entries.read(path[-1]) if member._members() is not None else member._entries[path[-1]]
            for member in stack._entries.containers
        ]
    except StackError as error:
        raise StackError(
            f"entry {joined(path)!r} is in a lazy stack of lazy stacks that have leaves of different shapes each, "
            f"which is no nested tensor: read it with get({joined(path)!r}, as_list=True) or as_padded_tensor=True"
        ) from error


def nested_of(stack: Any, column: list[Any], layout: torch.layout, path: Path) -> Tensor:
    if not column:
        raise StackError(f"entry {joined(path)!r} of a lazy stack without members is no nested tensor")
    if stack._entries.dim != 0:
        raise StackError(
            f"entry {joined(path)!r} of a lazy stack along dim {stack._entries.dim} is no nested tensor, whose rows "
            "are along dim 0: use to_lazystack(0) first"
        )
    return nested(column, layout, path)


def densified(stack: Any, layout: torch.layout, path: Path) -> Contract:
    """See :meth:`Stacking.densify`; `path` leads to this stack."""
    store, size, names = stack._entries, stack._batch_size, stack._names
    # A dim along which the members differ is none of the batch any more: no size would be true of it.
    even = size[: size.index(-1)] if -1 in size else size
    entries: dict[str, Any] = {}
    for name in dict.fromkeys(name for member in store.sample for name in member._entries):
        value: Any = None
        if name in store:
            try:
                value = store.read(name)
            except StackError:
                value = None
        if value is None:
            value = _stacked_ornested_of(stack, name, layout, (*path, name))
        if isinstance(value, Contract) and value._members() is not None and not value._is_non_tensor:
            value = value._rewrap(densified(value._wrapped_container(), layout, (*path, name)))
        elif store.dim == 0 and -1 in getattr(value, "_batch_size", ()):
            value = makers.values(value.tolist(), even, 0, stack._device)
        entries[name] = value
    return makers.dense(entries, even, stack._device, names and names[: len(even)])


def _stacked_ornested_of(stack: Any, name: str, layout: torch.layout, path: Path) -> Any:
    """An entry that is no tensor, or that some members lack: nested containers as a lazy stack, or a nested tensor."""
    store = stack._entries
    column = [member._entries.get(name) for member in store.containers]
    known: Any = next(value for value in column if value is not None)
    if isinstance(known, Contract) and isinstance(known, Tensor):
        # An `UnbatchedTensor` is one for all of them.
        unbatched: Any = known
        return unbatched._over(known, stack._batch_size)
    if isinstance(known, Contract):
        absent: Any = known.empty()
        if known._is_non_tensor:
            absent = makers.value(None, known._batch_size)
        return store.nested(name, [absent.copy() if value is None else value for value in column])
    filled = [_absent(known, store, path) if value is None else value for value in column]
    return nested_of(stack, filled, layout, path)


def _absent(known: Tensor, store: Any, path: Path) -> Tensor:
    """A leaf without elements for a member that lacks it."""
    batch_dims = len(store.containers[0]._batch_size)
    if known.ndim == batch_dims:
        raise StackError(
            f"entry {joined(path)!r} is missing in some members of the lazy stack and has no feature dim that could be "
            "empty there: set it in these, or exclude it"
        )
    return known.new_empty((*known.shape[:batch_dims], 0, *known.shape[batch_dims + 1 :]))
