"""Adding an entry to a memory-mapped container and to the folder that it is saved in."""

from __future__ import annotations

import os
import weakref
from typing import Any

from torch import Tensor

from tensordict.core import registry
from tensordict.core.contract import Contract, is_node
from tensordict.core.errors import SaveError, UnsupportedEntryError
from tensordict.core.keys import Key, Path, joined, path_of
from tensordict.io import commit, meta
from tensordict.io.specification import DICT, Specification, specification_of
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.memory.names import LEAF_SUFFIX, file_name, folder_name

# How long an entry that is being added waits for another process that adds one, in seconds.
_PATIENCE = 10.0


def add(container: Contract, key: Key, content: Tensor, copy_data: bool, robust: bool) -> MemoryMappedTensor:
    """Add a tensor to a memory-mapped container and to its folder."""
    path = path_of(key)
    if content.is_nested:
        refuse_nested_shape(content, key)
    if not container._is_memmap:
        raise SaveError(f"entry {joined(path)!r} can only be made in a memory-mapped container; see memmap_()")
    parent, missing = _parent_of(container, path)
    parent = parent._wrapped_container()
    if (kind := specification_of(parent, path[:-1]).kind) != DICT:
        raise UnsupportedEntryError(
            f"entry {joined(path)!r} would be in a {kind}, which has no files of its own: make it in each member"
        )
    if tuple(content.shape[: len(parent._batch_size)]) != tuple(parent._batch_size):
        raise SaveError(
            f"entry {joined(path)!r}: its shape {list(content.shape)} does not begin with the batch size "
            f"{list(parent._batch_size)}"
        )
    try:
        spec = meta.leaf_spec(content.dtype, tuple(content.shape))
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(path)!r}: {error}") from None
    file = file_name(path[-1], robust) + LEAF_SUFFIX
    for index, name in enumerate(missing, len(path) - 1 - len(missing)):
        parent = _new_node(parent, name, path[: index + 1], robust)
    if parent._memmap_prefix is None:
        if _is_row(parent):
            raise SaveError(
                f"entry {joined(path)!r}: the member of a ragged lazy stack has no folder of its own for a new entry: "
                "add it to all members before the stack is saved"
            )
        leaf = MemoryMappedTensor.from_tensor(content, copy_data=copy_data)
    else:
        folder = os.path.abspath(parent._memmap_prefix)
        with commit.locked(folder, patience=_PATIENCE):
            meta.refuse_entry(folder, path[-1], path)
            leaf = _leaf_in(f"{folder}/{file}", content, copy_data, path)
            meta.add_entry(folder, path[-1], spec, path)
    parent._entries[path[-1]] = leaf
    return leaf


def _is_row(container: Contract) -> bool:
    """Whether a container is one of those that a saved stack has by columns."""
    for leaf in container._entries.values():
        if isinstance(leaf, MemoryMappedTensor) and isinstance(leaf._source, FileSource):
            try:
                return meta.read_node(os.path.dirname(leaf._source.path), ()).columns
            except OSError:
                return False
    return False


def _leaf_in(target: str, content: Tensor, copy_data: bool, path: Path) -> MemoryMappedTensor:
    """A new tensor in the file `target`, or the one that is over it already."""
    if isinstance(content, MemoryMappedTensor) and isinstance(content._source, FileSource) and copy_data:
        if content._source.path != target:
            raise SaveError(
                f"entry {joined(path)!r}: its storage maps {content._source.path!r} and not the file of the entry, "
                f"{target!r}; pass a tensor (make_memmap_from_tensor(..., tensor.clone())) to copy it"
            )
        return content
    try:
        return MemoryMappedTensor.from_tensor(content.detach(), filename=target, existsok=True, copy_data=copy_data)
    except SaveError as error:
        raise SaveError(
            f"entry {joined(path)!r}: {error}; make_memmap_from_tensor(key, torch.zeros(...)) replaces it"
        ) from error


def _parent_of(container: Contract, path: Path) -> tuple[Any, Path]:
    """The deepest container on the way to `path`, and the names of those that are missing."""
    node = container
    for index, name in enumerate(path[:-1]):
        inner = node._entries.get(name)
        if inner is None:
            return node, path[index:-1]
        if not isinstance(inner, Contract):
            raise SaveError(f"entry {joined(path[: index + 1])!r} is a tensor and holds no entries")
        node = inner
    if path[-1] in node._entries:
        raise SaveError(f"entry {joined(path)!r} already exists; delete it first or write into it")
    return node, ()


def _new_node(parent: Contract, name: str, path: Path, robust: bool) -> Any:
    """A new, empty, memory-mapped container in `parent` and in its folder."""
    child = registry.lookup(DICT)._make({}, parent._batch_size, parent._device, parent._names)
    if parent._memmap_prefix is not None:
        leaf_files = {
            file_name(leaf, robust) + LEAF_SUFFIX
            for leaf, value in parent._entries.items()
            if not isinstance(value, Contract)
        }
        inner = folder_name(name, robust, leaf_files)
        child._memmap_prefix = parent._memmap_prefix / inner
        folder = os.path.abspath(child._memmap_prefix)
        above = os.path.dirname(folder)
        with commit.locked(above, patience=_PATIENCE):
            meta.refuse_entry(above, name, path)
            os.makedirs(folder, exist_ok=True)
            meta.write_meta(folder, meta.node_meta(Specification(DICT, child._batch_size, names=child._names), {}))
            meta.add_entry(above, name, meta.node_spec(DICT), path)
    adopt(parent, name, child)
    return child


def adopt(parent: Any, name: str, child: Any) -> None:
    """Put a new nested container in a parent that may be locked and memory-mapped, which it then is too."""
    parent._entries[name] = child
    if parent._is_memmap:
        child._mark(memmap=True)
    if parent._locked and is_node(child):
        child._lock_tree(weakref.ref(parent))


def refuse_nested_shape(shape: object, key: Key) -> None:
    if isinstance(shape, Tensor):
        raise UnsupportedEntryError(
            f"entry {key!r}: a ragged entry cannot be made in a saved container; set it before saving with memmap()"
        )
