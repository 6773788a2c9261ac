"""Putting the memory of leaves where other processes can see it."""

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
from tensordict.memory.mapped import MemoryMappedTensor, SharedBlock
from tensordict.memory.stored_tensors import StoredTensor


def share(container: Contract, private_maps: bool = True) -> None:
    """Move the storages of all leaves to shared memory; those that are there, or in a file, stay where they are.

    The tensors stay the same objects, and so do all others over these storages.

    Args:
        container: the container.
        private_maps: move what lies in files that are mapped so that writing to it leaves them as they are, too.

    Raises:
        UnsupportedEntryError: a leaf has no storage of its own; nothing has been moved.
        RuntimeError: the system has no more shared memory, or descriptors; the entry is named.
    """
    found = list(container._walk())
    for path, leaf in found:
        if leaf.layout not in (torch.strided, torch.jagged):
            raise UnsupportedEntryError(
                f"entry {joined(path)!r} has the layout {leaf.layout}, which cannot be shared; "
                "to_dense() gives what can"
            )
    maps = Finder()
    for path, leaf in found:
        try:
            for part in parts(leaf):
                if part.is_cpu and not _is_mapped(part, maps, private_maps):
                    part.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise named_error(system.explain_shared_memory(error), path) from error


def is_seen(container: Contract) -> bool:
    """Whether other processes that have the container see all that is written into its tensors."""
    leaves = container._leaves()
    maps = Finder()
    return all(is_seen_by_others(part) or _reaches_file(part, maps) for leaf in leaves for part in parts(leaf))


def reaches(container: Contract) -> bool:
    """Whether all that another process writes into a container, values too, is seen in this one."""
    return is_seen(container) and not holds_values(container)


def parts(leaf: Tensor) -> list[Tensor]:
    """The tensors whose storages hold a leaf."""
    if leaf.layout is torch.jagged:
        return [part for part in ragged.jagged_parts(leaf) if part is not None]
    return [leaf]


def _is_mapped(tensor: Tensor, maps: Finder, only_shared: bool) -> bool:
    """Whether a tensor is over a file or a block, which other processes map themselves."""
    if isinstance(tensor, (MemoryMappedTensor, StoredTensor)):
        return True
    file_map = maps.of(tensor)
    return tensor.untyped_storage().filename is not None or (
        file_map is not None and (file_map.shared or not only_shared)
    )


def is_seen_by_others(tensor: Tensor) -> bool:
    """Whether other processes that have a tensor see what is written into it."""
    if isinstance(tensor, MemoryMappedTensor):
        source = tensor._source
        return isinstance(source, SharedBlock) or (isinstance(source, FileSource) and source.shared)
    return not tensor.is_meta and tensor.is_shared()  # type: ignore[no-untyped-call]


def _reaches_file(tensor: Tensor, maps: Finder) -> bool:
    """Whether what is written into a tensor goes to a mapped file, which torch need not know."""
    file_map = maps.of(tensor) if maps and type(tensor) is Tensor and tensor.is_cpu else None
    return file_map is not None and file_map.shared


def holds_values(node: Contract) -> bool:
    """Whether a container has values that are no tensors, at any depth."""
    if node._is_non_tensor:
        return True
    return any(
        type(value) is not Tensor and isinstance(value, Contract) and holds_values(value)
        for value in node._structure().values()
    )
