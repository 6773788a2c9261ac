"""Shared memory: move leaves there, and find out whether other processes see writes to a tensor or container."""

from __future__ import annotations

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract, named_error
from tensordict.core.exceptions import UnsupportedEntryError
from tensordict.core.keys import joined
from tensordict.memory import system
from tensordict.memory.file_maps import Finder
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.memory.shared_block import SharedBlock
from tensordict.memory.stored_tensors import StoredTensor


def share(container: Contract, private_maps: bool = True) -> None:
    """Move the storages of all leaves to shared memory, except storages in shared memory or in a file.

    All tensors over these storages stay the same objects.

    Args:
        container: the container.
        private_maps: move the storages in privately mapped files, too.

    Raises:
        UnsupportedEntryError: the layout of a leaf has no storage of its own; nothing has been moved.
        RuntimeError: the system has no shared memory or descriptors left; the error names the entry.
    """
    found = list(container._walk())
    for path, leaf in found:
        if leaf.layout not in (torch.strided, torch.jagged):
            raise UnsupportedEntryError(
                f"entry {joined(path)!r} has the layout {leaf.layout}, which cannot be shared; "
                "to_dense() returns a tensor that can"
            )
    maps = Finder()
    for path, leaf in found:
        try:
            for part in list_parts(leaf):
                if part.is_cpu and not _maps_file_or_block(part, maps, private_maps):
                    part.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise named_error(system.explain_shared_memory(error), path) from error


def shares_tensors(container: Contract) -> bool:
    """Return whether other processes that have the container see all writes to its tensors."""
    leaves = container._leaves()
    maps = Finder()
    return all(shares_writes(part) or _maps_shared_file(part, maps) for leaf in leaves for part in list_parts(leaf))


def shares_all(container: Contract) -> bool:
    """Return whether other processes that have the container see all writes to it. Values are not shared."""
    return shares_tensors(container) and not has_values(container)


def list_parts(leaf: Tensor) -> list[Tensor]:
    """Return the tensors whose storages hold a leaf: several for a jagged one."""
    if leaf.layout is torch.jagged:
        return [part for part in ragged.jagged_parts(leaf) if part is not None]
    return [leaf]


def _maps_file_or_block(tensor: Tensor, maps: Finder, only_shared: bool) -> bool:
    """Return whether a tensor is over a file or a shared block, which other processes map themselves.

    With `only_shared`, private maps of files do not count.
    """
    if isinstance(tensor, (MemoryMappedTensor, StoredTensor)):
        return True
    file_map = maps.of(tensor)
    return tensor.untyped_storage().filename is not None or (
        file_map is not None and (file_map.shared or not only_shared)
    )


def shares_writes(tensor: Tensor) -> bool:
    """Return whether other processes that have a tensor see writes to it."""
    if isinstance(tensor, MemoryMappedTensor):
        source = tensor._source
        return isinstance(source, SharedBlock) or (isinstance(source, FileSource) and source.shared)
    return not tensor.is_meta and tensor.is_shared()  # type: ignore[no-untyped-call]


def _maps_shared_file(tensor: Tensor, maps: Finder) -> bool:
    """Return whether writes to a plain tensor change a mapped file. Torch does not know maps of other libraries."""
    file_map = maps.of(tensor) if maps and type(tensor) is Tensor and tensor.is_cpu else None
    return file_map is not None and file_map.shared


def has_values(node: Contract) -> bool:
    """Return whether a container has values (entries that are not tensors), at any depth."""
    if node._is_non_tensor:
        return True
    return any(
        type(value) is not Tensor and isinstance(value, Contract) and has_values(value)
        for value in node._structure().values()
    )
