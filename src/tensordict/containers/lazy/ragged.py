"""The leaves of one entry of a lazy stack, when they are no one tensor: as a list, padded, or nested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tensordict.core.errors import StackError
from tensordict.core.keys import Path, joined


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
