"""Containers between the ranks of a `torch.distributed` process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tensordict import registry
from tensordict.contract import Contract
from tensordict.devices import as_device
from tensordict.keys import Path, joined
from tensordict.ops.leaves import Leaves

if TYPE_CHECKING:
    from typing_extensions import Self

# Where a leaf begins in a message, in bytes: what every dtype can be read at.
_ALIGNMENT = 16


class _Leaf(NamedTuple):
    """Where a leaf lies in a message."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Node(NamedTuple):
    """What a container is without the bytes of its leaves."""

    size: tuple[int, ...]
    device: torch.device | None
    names: list[str | None] | None
    entries: dict[str, Any]


class _Header(NamedTuple):
    """What a rank has to know before it can take part in the scatter: its container, or why there is none."""

    node: _Node | None
    length: int
    device: str
    refusal: Exception | None


class Distributing(Leaves):
    """`scatter`. The engine is torch's own; one message describes the container, one holds its bytes."""

    def scatter(
        self, src: int, tensordicts: Sequence[Any] | None = None, *, group: Any = None, device: Any = None
    ) -> Self:
        """Hand one container to every rank of a process group, from the list that rank `src` has.

        Args:
            src: the global rank that has the containers.
            tensordicts: on that rank, one container per rank of the group, in their order; ignored on the others.
                They may differ in keys, shapes and dtypes. Lazy stacks arrive as dense containers.
            group: the process group; `None` is the default one.
            device: the device that the bytes are received on; `None` takes the type of the source's leaves.

        Returns:
            the container of this rank, a `TensorDict` of its own memory; on `src` the very container of the list.

        Raises:
            ValueError: there is not one container per rank; every rank raises, and none is left waiting.
            TypeError: something else is in the list; every rank raises.

        Example:
            Called by every rank of a group of two:

            >>> def exchange(rank, parts=None):
            ...     from tensordict import TensorDict
            ...     return TensorDict().scatter(0, parts if rank == 0 else None)
        """
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        is_source = dist.get_rank() == src
        headers: list[_Header] = []
        messages: list[Tensor] = []
        if is_source:
            try:
                headers, messages = _messages(tensordicts, count)
            except (TypeError, ValueError, RuntimeError) as error:
                headers = [_Header(None, 0, "cpu", error)] * count
        received: list[Any] = [None]
        dist.scatter_object_list(received, headers if is_source else None, src=src, group=group)
        header: _Header = received[0]
        if header.refusal is not None:
            raise header.refusal
        place = messages[0].device if is_source else as_device(header.device if device is None else device)
        buffer = torch.empty(header.length, dtype=torch.uint8, device=place)
        dist.scatter(buffer, messages if is_source else None, src=src, group=group)
        if is_source:
            assert tensordicts is not None
            return tensordicts[rank]  # type: ignore[no-any-return]
        assert header.node is not None
        return _read(header.node, buffer)  # type: ignore[no-any-return]


def _messages(containers: Any, count: int) -> tuple[list[_Header], list[Tensor]]:
    """The header and the bytes for every rank; all are of one length, as torch's scatter asks for."""
    if containers is None or len(containers) != count:
        given = "none" if containers is None else len(containers)
        raise ValueError(f"scatter needs one container for each of the {count} ranks, got {given}")
    nodes: list[_Node] = []
    columns: list[list[tuple[_Leaf, Tensor]]] = []
    for position, container in enumerate(containers):
        if not isinstance(container, Contract):
            raise TypeError(f"scatter takes containers only, got {type(container).__name__} at position {position}")
        leaves: list[tuple[_Leaf, Tensor]] = []
        nodes.append(_describe(container, (), leaves))
        columns.append(leaves)
    length = max([1, *(_end(leaf) for leaves in columns for leaf, _ in leaves)])
    device = next((value.device for leaves in columns for _, value in leaves), torch.device("cpu"))
    messages = []
    for leaves in columns:
        message = torch.zeros(length, dtype=torch.uint8, device=device)
        for leaf, value in leaves:
            _part(message, leaf).copy_(value.detach())
        messages.append(message)
    return [_Header(node, length, device.type, None) for node in nodes], messages


def _describe(node: Any, path: Path, leaves: list[tuple[_Leaf, Tensor]]) -> _Node:
    entries: dict[str, Any] = {}
    for name, value in node._entries.items():
        if isinstance(value, Contract):
            entries[name] = _describe(value, (*path, name), leaves)
            continue
        if value.is_nested:
            raise TypeError(f"scatter: the ragged entry {joined((*path, name))!r} cannot be sent; pad it first")
        start = -(-_end(leaves[-1][0]) // _ALIGNMENT) * _ALIGNMENT if leaves else 0
        leaf = entries[name] = _Leaf(start, tuple(value.shape), value.dtype)
        leaves.append((leaf, value))
    return _Node(tuple(node._batch_size), node._device, node._names, entries)


def _end(leaf: _Leaf) -> int:
    return leaf.offset + torch.Size(leaf.shape).numel() * leaf.dtype.itemsize


def _part(message: Tensor, leaf: _Leaf) -> Tensor:
    return message[leaf.offset : _end(leaf)].view(leaf.dtype).view(leaf.shape)


def _read(node: _Node, message: Tensor) -> Any:
    """The container that `node` describes, over the bytes of a message."""
    entries: dict[str, Any] = {}
    for name, item in node.entries.items():
        entries[name] = _read(item, message) if isinstance(item, _Node) else _part(message, item)
    device = None if node.device is None else message.device
    return registry.lookup("TensorDict")._make(entries, torch.Size(node.size), device, node.names)
