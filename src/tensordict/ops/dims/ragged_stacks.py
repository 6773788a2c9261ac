"""Reading entries whose shapes differ between the members of a lazy stack: as lists, pad_leaves or nested tensors.

`get` of lazy stacks and `densify` use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tensordict.core import makers
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import StackError
from tensordict.core.keys import Path, joined


def check_form(as_list: bool, as_padded_tensor: bool, as_nested_tensor: bool, return_mask: bool) -> None:
    """Raise if the options of `get` contradict each other."""
    if return_mask and not as_padded_tensor:
        raise ValueError("return_mask works with as_padded_tensor=True only: the mask marks padding as False")
    if as_list + as_padded_tensor + as_nested_tensor > 1:
        raise ValueError("get takes only one of as_list, as_padded_tensor and as_nested_tensor")


def read_column(stack: Any, name: str) -> list[Any]:
    """Return the entries of one name of all members, as nested lists if members are lazy stacks."""
    with stack._entries.reading(name):
        return _collect_column(stack, name)


def _collect_column(stack: Any, name: str) -> list[Any]:
    found: list[Any] = []
    # Dynamo cannot trace a comprehension that assigns and recurses.
    for member in stack._entries.containers:
        entries = member._entries
        if isinstance(entries, dict) or member._members() is None:
            found.append(entries[name])
        else:
            found.append(_collect_column(member, name))
    return found


def read_nested_tensor(stack: object, path: Path, layout: torch.layout) -> Tensor:
    """Read the entry at `path` as a nested tensor. The last name of `path` is an entry of `stack`."""
    return make_nested_tensor(stack, _read_rows(stack, path), layout, path)


def read_padded_tensor(stack: Any, path: Path, side: str, value: Any, return_mask: bool) -> Any:
    """Read the entry at `path` as one tensor padded with `value`; with `return_mask`, also the mask of elements."""
    # Each member has an `UnbatchedTensor` of its own, which the padded tensor has a row of.
    leaves: list[Tensor] = stack._leaves_of(path[-1])
    leaves = [leaf.as_subclass(Tensor) if isinstance(leaf, Contract) else leaf for leaf in leaves]
    if not leaves:
        return stack._entries.read(path[-1])
    tensor = _restack(stack, iter(pad_leaves(leaves, side, value, path)))
    if not return_mask:
        return tensor
    masks = [torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]
    return tensor, _restack(stack, iter(pad_leaves(masks, side, False, path)))


def pad_leaves(column: Sequence[Tensor], side: str, value: Any, path: Path) -> list[Tensor]:
    """Pad leaves with `value`, on one side of every dim, to the largest size.

    Raises:
        ValueError: the side is neither `"left"` nor `"right"`.
        RuntimeError: the leaves have different numbers of dims.
    """
    if side not in ("left", "right"):
        raise ValueError(f"padding_side is 'left' or 'right', got {side!r}")
    shapes = _check_shapes(column, path)
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    filled = []
    for leaf, shape in zip(column, shapes, strict=True):
        missing = [most - size for most, size in zip(largest, shape, strict=True)]
        if any(missing):
            # Torch takes two numbers for each dim, before and after, starting with the last dim.
            amounts = [n for count in reversed(missing) for n in ((count, 0) if side == "left" else (0, count))]
            leaf = functional.pad(leaf, amounts, value=value)
        filled.append(leaf)
    return filled


def nest_leaves(column: Sequence[Tensor], layout: torch.layout, path: Path) -> Tensor:
    """Make a nested tensor of leaves. Gradients flow through it.

    Raises:
        RuntimeError: torch does not support leaves of these shapes in that layout.
    """
    shapes = _check_shapes(column, path)
    if layout is torch.strided:
        return torch.nested.as_nested_tensor(list(column), layout=torch.strided)
    if layout is not torch.jagged:
        raise ValueError(f"the layout of a nested tensor is torch.strided or torch.jagged, got {layout}")
    ragged = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if len(ragged) > 1 or not shapes[0]:
        raise StackError(
            f"entry {joined(path)!r} has the shapes {_describe_shapes(shapes)}: the leaves of a jagged nested tensor "
            "may differ in one dim only; use layout=torch.strided, as_padded_tensor=True or as_list=True"
        )
    dim = ragged[0] if ragged else 0
    lengths = torch.tensor([0, *[shape[dim] for shape in shapes]], device=column[0].device)
    values = torch.cat(list(column), dim)
    return internals.nest_jagged(values, lengths.cumsum(0), jagged_dim=dim + 1)


def _check_shapes(column: Sequence[Tensor], path: Path) -> list[torch.Size]:
    """Return the shapes of leaves. Raises unless they are on one device and have equal numbers of dims."""
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
            f"{_describe_shapes(shapes)}: read it with get({joined(path)!r}, as_list=True)"
        )
    return shapes


def _describe_shapes(shapes: list[torch.Size]) -> str:
    distinct = list(dict.fromkeys(str(list(shape)) for shape in shapes))
    return ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")


def _restack(stack: Any, leaves: Iterator[Tensor]) -> Tensor:
    """Stack leaves of the same shape, one for each innermost member, into one tensor."""
    store = stack._entries
    parts = [_restack(member, leaves) if member._members() is not None else next(leaves) for member in store.containers]
    return torch.stack(parts, store.dim)


def _read_rows(stack: Any, path: Path) -> list[Tensor]:
    """Return the leaf of each member at `path`. Members that are lazy stacks return stacked leaves."""
    try:
        return [
            member._entries.read(path[-1]) if member._members() is not None else member._entries[path[-1]]
            for member in stack._entries.containers
        ]
    except StackError as error:
        raise StackError(
            f"entry {joined(path)!r} has different shapes within the members of a lazy stack of lazy stacks, which a "
            f"nested tensor cannot hold: read it with get({joined(path)!r}, as_list=True) or as_padded_tensor=True"
        ) from error


def make_nested_tensor(stack: Any, column: list[Any], layout: torch.layout, path: Path) -> Tensor:
    """Make a nested tensor of the leaves of a lazy stack. Raises unless it is a stack of members along dim 0."""
    if not column:
        raise StackError(f"entry {joined(path)!r} of a lazy stack without members cannot become a nested tensor")
    if stack._entries.dim != 0:
        raise StackError(
            f"entry {joined(path)!r} of a lazy stack along dim {stack._entries.dim} cannot become a nested tensor, "
            "which stacks its rows along dim 0: use to_lazystack(0) first"
        )
    return nest_leaves(column, layout, path)


def densify_stack(stack: Any, layout: torch.layout, path: Path) -> Contract:
    """Make a lazy stack dense; see :meth:`Stacking.densify`. `path` is the path of this stack."""
    store, size, names = stack._entries, stack._batch_size, stack._names
    # The batch size ends before a dim whose length differs between members.
    even = size[: size.index(-1)] if -1 in size else size
    entries: dict[str, Any] = {}
    all_names = dict.fromkeys(name for member in store.sample for name in member._entries)
    for member in store.sample:
        for name in _names_in_members(member):
            if name not in all_names:
                raise StackError(
                    f"entry {joined((*path, name))!r} is missing in some members of a member of the lazy stack: make "
                    "the members dense first, which makes it empty there, or exclude it"
                )
    for name in all_names:
        value: Any = None
        if name in store:
            try:
                value = store.read(name)
            except StackError:
                value = None
        if value is None:
            value = _stack_or_nest(stack, name, layout, (*path, name))
        if isinstance(value, Contract) and value._members() is not None and not value._is_non_tensor:
            value = value._rewrap(densify_stack(value._wrapped_container(), layout, (*path, name)))
        elif store.dim == 0 and -1 in getattr(value, "_batch_size", ()):
            value = makers.values(value.tolist(), even, 0, stack._device)
        entries[name] = value
    return makers.dense(entries, even, stack._device, names and names[: len(even)])  # type: ignore[no-any-return]


def _names_in_members(container: Contract) -> Iterable[str]:
    """Return the names of a container; of a lazy stack, the names that any of its members has."""
    inner = container._wrapped_container()
    members = inner._members()
    return inner._entries if members is None else (name for member in members for name in _names_in_members(member))


def _stack_or_nest(stack: Any, name: str, layout: torch.layout, path: Path) -> Any:
    """Read an entry that cannot be stacked: as a lazy stack of nested containers or values, or as a nested tensor.

    Members may lack the entry. It is empty there.
    """
    store = stack._entries
    column = [member._entries.get(name) for member in store.containers]
    known: Any = next(value for value in column if value is not None)
    if isinstance(known, Contract) and isinstance(known, Tensor):
        # All members share one `UnbatchedTensor`.
        unbatched: Any = known
        return unbatched._over(known, stack._batch_size)
    if isinstance(known, Contract):
        absent: Any = known.empty()
        if known._is_non_tensor:
            absent = makers.value(None, known._batch_size)
        return store.stack_nested(name, [absent.copy() if value is None else value for value in column])
    filled = [_make_empty_leaf(known, store, path) if value is None else value for value in column]
    return make_nested_tensor(stack, filled, layout, path)


def _make_empty_leaf(known: Tensor, store: Any, path: Path) -> Tensor:
    """Make a leaf without elements for a member that lacks the entry."""
    batch_dims = len(store.containers[0]._batch_size)
    if known.ndim == batch_dims:
        raise StackError(
            f"entry {joined(path)!r} is missing in some members of the lazy stack and cannot be empty there, because "
            "it lacks a feature dim: set it in these members, or exclude it"
        )
    return known.new_empty((*known.shape[:batch_dims], 0, *known.shape[batch_dims + 1 :]))
