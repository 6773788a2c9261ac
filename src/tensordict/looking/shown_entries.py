"""List the entries of a container for display, without reading or building any; used by `repr` and notebook trees."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, EntryStore, is_node, underlying
from tensordict.looking.texts import Preview


@dataclass(slots=True)
class ShownLeaf:
    """A tensor for display: the leaf itself, or one of its parts when reading the leaf would build a new tensor.

    shape: the shape that reading would give, with -1 where the members of a lazy stack differ; `None` if it is the
        shape of `tensor`.
    parts: the tensors from the members of the stack.
    """

    tensor: Any
    shape: torch.Size | None = None
    parts: Sequence[Tensor] = ()

    @property
    def is_stacked(self) -> bool:
        """True when reading this leaf stacks its parts into a new tensor."""
        return self.shape is not None and -1 not in self.shape

    @property
    def kind(self) -> str:
        """The name of the class of the tensor that reading gives."""
        return "Tensor" if self.is_stacked else type(self.tensor).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that reading gives; a stack promotes the dtypes of its parts, as torch does."""
        dtypes = [part.dtype for part in self.parts] if self.is_stacked else []
        return functools.reduce(torch.promote_types, dtypes) if dtypes else self.tensor.dtype

    @property
    def shape_text(self) -> str:
        """The shape as `torch.Size([...])`, with -1 for the ragged dims."""
        return repr(ragged.shape_of(self.tensor) if self.shape is None else self.shape)


def list_entries(container: Contract) -> dict[str, Any]:
    """Return the entries of a container, each a nested container or a :class:`ShownLeaf`. Builds no tensor."""
    structure = container._structure()
    made = structure is not container._entries
    return {
        name: _preview(container, name, value)
        if is_node(value)
        else _make_leaf(container, name, value)
        if made
        else ShownLeaf(value)
        for name, value in structure.items()
    }


def list_entries_by_member(container: Contract) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return the shared entries of a lazy stack, and for each member position the entries that only some members have.

    For any other container, the second dict is empty.
    """
    common = list_entries(container)
    others: dict[int, dict[str, Any]] = {}
    for position, member in enumerate(container._members() or ()):
        if member._structure().keys() - common.keys():
            others[position] = {name: value for name, value in list_entries(member).items() if name not in common}
    return common, others


def _preview(container: Contract, name: str, node: Any) -> Any:
    """Return a nested container unchanged, and a summary of values that the structure leaves out."""
    entries = container._entries
    if node._is_non_tensor and isinstance(entries, EntryStore) and (text := entries.preview(name)):
        return ShownLeaf(Preview(text))
    return node


def _make_leaf(container: Contract, name: str, value: object) -> ShownLeaf:
    if isinstance(value, Contract) or not isinstance(value, Tensor):
        return ShownLeaf(value)
    return ShownLeaf(
        value, container._shape_of(name), _collect_parts(container, name) if container._members() else [value]
    )


def _collect_parts(container: Contract, name: str) -> list[Any]:
    members = container._members()
    if members is None:
        return [container._structure()[name]]
    # A member that holds a container under this name is skipped: the stack cannot read such an entry as a tensor.
    return [part for member in members for part in _collect_parts(member, name) if isinstance(part, Tensor)]


def has_stored_leaves(container: Contract) -> bool:
    """Return whether any leaf stays in a file or on a server until it is read; lazy stacks check their members, too."""
    inner = underlying(container)
    return bool(inner._is_in_file) or any(map(has_stored_leaves, inner._members() or ()))
