"""Loading a save into an existing container, which keeps its nested containers and its unchanged tensors.

`load_memmap(out=...)`, `load_memmap_` and `memmap_refresh_` use this.
"""

from __future__ import annotations

from typing import Any

import torch

from tensordict.core import ragged
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, joined
from tensordict.io.specification import DICT, LAZY, specification_of
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.ops.entries.adding import add_node, put_entry


def check_fit(target: Contract, loaded: Contract, path: Path) -> None:
    """Raise if a loaded container does not fit the container `target`: another kind, or another batch size."""
    if not path and not _can_merge(target, loaded):
        raise SaveError(
            f"a {type(loaded).__name__} of batch size {list(loaded._batch_size)} was saved, and cannot be loaded into "
            f"a {type(target).__name__} of batch size {list(target._batch_size)}"
        )
    size = target._batch_size
    own = specification_of(target, path)
    outer = size if own.kind == DICT else torch.Size(())
    for name, value in specification_of(loaded, path).entries.items():
        old = own.entries.get(name)
        if isinstance(old, Contract) and is_node(value) and _can_merge(old, value):
            check_fit(old, value, (*path, name))
            continue
        shape = value._batch_size if isinstance(value, Contract) else ragged.shape_of(value)
        if shape[: len(outer)] != outer:
            raise SaveError(
                f"entry {joined((*path, name))!r}: its saved shape {list(shape)} does not begin with the batch size "
                f"{list(size)} of the container it is loaded into"
            )


def _can_merge(target: Contract, loaded: Contract) -> bool:
    """Return whether a container can take the entries of the loaded one, instead of being replaced by it."""
    mine, new = specification_of(target), specification_of(loaded)
    if mine.kind != new.kind:
        return False
    if mine.kind == DICT:
        return True
    if mine.kind == LAZY and (mine.stack_dim, len(mine.entries)) != (new.stack_dim, len(new.entries)):
        return False
    if mine.is_tensorclass or mine.kind == LAZY:
        return all(_can_merge(mine.entries[name], new.entries[name]) for name in mine.entries)
    return mine.batch_size == new.batch_size


def take_over(target: Any, loaded: Any) -> None:
    """Give `target` the entries of `loaded`. It keeps its nested containers, and tensors whose files are the same."""
    own, new = specification_of(target), specification_of(loaded)
    if new.is_value:
        target._take_value(loaded)
        return
    if new.kind != DICT:
        for name, value in new.entries.items():
            take_over(own.entries[name], value)
        return
    for name in [name for name in target._entries if name not in loaded._entries]:
        del target._entries[name]
    for name, value in loaded._entries.items():
        old = target._entries.get(name)
        if isinstance(value, Contract):
            if is_node(value) and is_node(old) and _can_merge(old, value):
                take_over(old, value)
            else:
                add_node(target, name, value)
        elif not _same_memory(old, value):
            put_entry(target, name, value)


def _same_memory(old: object, new: object) -> bool:
    """Return whether two memory-mapped tensors map the same part of the same file."""
    if not (isinstance(old, MemoryMappedTensor) and isinstance(new, MemoryMappedTensor)):
        return False
    if old.is_nested or new.is_nested:
        return False
    mine, other = old._source, new._source
    return (
        isinstance(mine, FileSource)
        and isinstance(other, FileSource)
        and (mine.path, mine.device, mine.inode) == (other.path, other.device, other.inode)
        and mine.shared == other.shared
        and old.dtype == new.dtype
        and old.shape == new.shape
        and old.stride() == new.stride()
        and old.storage_offset() == 0
    )
