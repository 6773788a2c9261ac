"""What there is to show of a container: its entries, none of which is made or read for that."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, is_node, underlying


@dataclass(slots=True)
class ShownLeaf:
    """A tensor as it is shown: `tensor` itself, unless `shape` says that it stands for one that is made on reading.

    shape: of what is read, with -1 for the dims in which the members of a lazy stack differ.
    parts: the tensors that it is made of.
    """

    tensor: Any
    shape: torch.Size | None = None
    parts: Sequence[Tensor] = ()

    @property
    def is_stacked(self) -> bool:
        """Whether reading it gives a new tensor."""
        return self.shape is not None and -1 not in self.shape

    @property
    def kind(self) -> str:
        """The name of the class."""
        return "Tensor" if self.is_stacked else type(self.tensor).__name__

    @property
    def dtype(self) -> torch.dtype:
        """That of what is read: of a stack, what torch makes of those of its parts."""
        dtypes = [part.dtype for part in self.parts] if self.is_stacked else []
        return functools.reduce(torch.promote_types, dtypes) if dtypes else self.tensor.dtype

    @property
    def shape_text(self) -> str:
        """The shape as `torch.Size([...])`, with -1 for the ragged dims."""
        return repr(ragged.shape_of(self.tensor) if self.shape is None else self.shape)


def shown(container: Contract) -> dict[str, Any]:
    """The entries of a container as they are shown, a nested container or a :class:`ShownLeaf` each; it makes none."""
    structure = container._structure()
    made = structure is not container._entries
    return {
        name: value if is_node(value) else _leaf_of(container, name, value) if made else ShownLeaf(value)
        for name, value in structure.items()
    }


def shown_by_member(container: Contract) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """What :func:`shown` gives, and what it gives of what only some members of a lazy stack have, by their position."""
    common = shown(container)
    others: dict[int, dict[str, Any]] = {}
    for position, member in enumerate(container._members() or ()):
        if member._structure().keys() - common.keys():
            others[position] = {name: value for name, value in shown(member).items() if name not in common}
    return common, others


def _leaf_of(container: Contract, name: str, value: object) -> ShownLeaf:
    if isinstance(value, Contract) or not isinstance(value, Tensor):
        return ShownLeaf(value)
    return ShownLeaf(value, container._shape_of(name), _parts_of(container, name) if container._members() else [value])


def _parts_of(container: Contract, name: str) -> list[Any]:
    members = container._members()
    if members is None:
        return [container._structure()[name]]
    # Where a container is in the place of a tensor, the stack has no such entry that could be read.
    return [part for member in members for part in _parts_of(member, name) if isinstance(part, Tensor)]


def is_stored(container: Contract) -> bool:
    """Whether leaves of a container, or of members of a stack, stay in a file or on a server until they are read."""
    inner = underlying(container)
    return bool(inner._is_in_file) or any(map(is_stored, inner._members() or ()))
