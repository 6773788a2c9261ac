"""`TensorDict.make_memmap` and its variants: add an entry to a memory-mapped container, and a file to its folder."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.core import makers, ragged
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Key, Path, joined, path_of
from tensordict.io.formats import meta
from tensordict.io.formats.stack_columns import Column, count_elements, is_ragged_leaf, join_ragged, split_ragged
from tensordict.io.saving import commit
from tensordict.io.specification import DICT, Specification, specification_of
from tensordict.memory import files
from tensordict.memory.file_source import FileSource
from tensordict.memory.mapped import MemoryMappedTensor
from tensordict.memory.names import LEAF_SUFFIX, TABLE_SUFFIX, file_name, folder_name
from tensordict.memory.reserving import Preallocate, check_preallocate

# How many seconds to wait for another process that adds an entry to the same folder.
_PATIENCE = 10.0


class Adding(Contract):
    """The methods `make_memmap`, `make_memmap_from_tensor` and `make_memmap_from_storage`."""

    def make_memmap(
        self,
        key: Key,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
        preallocate: Preallocate = "auto",
    ) -> MemoryMappedTensor:
        """Add an entry of zeros to a memory-mapped container and to its folder.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td = TensorDict(batch_size=[2]).memmap_(folder)
            ...     td.make_memmap("x", (2, 3), dtype=torch.int64)[0] = 1
            ...     again = TensorDict.load_memmap(folder)
            >>> again["x"]
            MemoryMappedTensor([[1, 1, 1],
                                [0, 0, 0]])

        If the folder already has a file of this name and size that belongs to no entry, the new entry maps this file
        and keeps its content.

        Args:
            key: the nested key; missing containers on the way are created.
            shape: the shape, which must begin with the batch size. For a ragged entry, pass an int64 tensor of shape
                (rows, dims) with the shape of each row. The entry is then a nested tensor of the strided layout in two
                files, `NAME.memmap` and `NAME.shape.memmap`.
            dtype: the dtype; `None` stands for torch's default.
            robust_key: as in :meth:`memmap`.
            preallocate: as in :meth:`memmap_like`, for the file of this entry.

        Returns:
            The new entry. Writing to it changes its file.

        Raises:
            RuntimeError: the container is not memory-mapped; the entry exists, in the container or in the folder; the
                shape does not begin with the batch size; the folder has a file of another size for this entry (use
                :meth:`make_memmap_from_tensor` to replace it); or another process is saving to the folder.
            TypeError: the shape is a tensor of another dtype or shape.
        """
        size, table = _split_shape(shape, key)
        content = torch.empty((), dtype=dtype, device="cpu").expand(size)
        entry = NewEntry(content, table, copy_data=False, robust=robust_key is not False, preallocate=preallocate)
        return _add(self, key, entry)

    def make_memmap_from_tensor(
        self,
        key: Key,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        existsok: bool = True,
        robust_key: bool | None = True,
        preallocate: Preallocate = "auto",
    ) -> MemoryMappedTensor:
        """Add a copy of a tensor to a memory-mapped container and to its folder.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td = TensorDict(batch_size=[2]).memmap_(folder)
            ...     _ = td.make_memmap_from_tensor("x", torch.tensor([1, 2]))
            ...     again = TensorDict.load_memmap(folder)
            >>> again["x"]
            MemoryMappedTensor([1, 2])

        Args:
            key: the nested key; missing containers on the way are created.
            tensor: the tensor, whose shape must begin with the batch size. Nested (ragged) tensors of either layout are
                allowed.
            copy_data: `True` copies the elements, and replaces a file of this name that belongs to no entry. `False`
                takes only the shape and the dtype and fills the entry with zeros, as :meth:`make_memmap` does.
            existsok: `False` refuses a file of this name, also one that belongs to no entry.
            robust_key: as in :meth:`memmap`.
            preallocate: as in :meth:`make_memmap`; only with `copy_data=False`.

        Returns:
            The new entry. Writing to it changes its file.

        Raises:
            RuntimeError: for the same reasons as :meth:`make_memmap`.
        """
        how = {"copy_data": copy_data, "robust": robust_key is not False}
        return _add(self, key, NewEntry.of(tensor, preallocate=preallocate, existsok=existsok, **how))

    def make_memmap_from_storage(
        self,
        key: Key,
        storage: Any,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> MemoryMappedTensor:
        """Add an entry over an existing storage to a memory-mapped container and to its folder.

        Args:
            key: the nested key; missing containers on the way are created.
            storage: an `UntypedStorage` or `TypedStorage`. If it maps the file of this entry, the entry uses it
                directly. If it has no file, or its file was removed, its content is copied to the file of the entry.
            shape: the shape, which must begin with the batch size; or a tensor for a ragged entry, as in
                :meth:`make_memmap`. The storage then holds one row after the other.
            dtype: the dtype of the elements; `None` stands for torch's default.
            robust_key: as in :meth:`memmap`.

        Returns:
            The new entry. Writing to it changes its file.

        Raises:
            RuntimeError: for the same reasons as :meth:`make_memmap`, and if the storage maps another file.
        """
        size, table = _split_shape(shape, key)
        # Another save may have removed the file. The map of the storage then holds the only copy of the content.
        file = storage.filename if storage.filename and os.path.exists(storage.filename) else None
        content = MemoryMappedTensor.from_storage(storage, shape=size, dtype=dtype, filename=file)
        return _add(self, key, NewEntry(content, table, robust=robust_key is not False))


@dataclass(slots=True)
class NewEntry:
    """The elements of a new entry, and how to write them.

    Args:
        flat: the tensor; for a ragged tensor, its elements, one row after the other.
        sizes: for a ragged tensor, the int64 table with the shape of each row.
        row: for a jagged tensor, the shape that all rows have, with -1 for the ragged dim.
        copy_data, robust, preallocate, existsok: as for `make_memmap_from_tensor`.
    """

    flat: Tensor
    sizes: Tensor | None = None
    row: tuple[int, ...] | None = None
    copy_data: bool = True
    robust: bool = True
    preallocate: Preallocate = "auto"
    existsok: bool = True

    @classmethod
    def of(cls, tensor: Tensor, **how: Any) -> NewEntry:
        """Make an entry from a tensor, which may be ragged."""
        return cls(*split_ragged(tensor), **how) if is_ragged_leaf(tensor) else cls(tensor, **how)

    @property
    def shape(self) -> torch.Size:
        """The shape of the entry, with -1 for ragged dims."""
        return self.flat.shape if self.sizes is None else Column(self.flat, self.sizes).shape

    def spec(self) -> dict[str, Any]:
        """Describe the entry for `meta.json`: its dtype, its shape and, if it is ragged, the form of its rows."""
        if self.sizes is None:
            return meta.leaf_spec(self.flat.dtype, tuple(self.flat.shape))
        return meta.ragged_spec(self.flat.dtype, tuple(self.sizes.shape), self.row)

    def make_leaf(self, flat: MemoryMappedTensor) -> Any:
        """Make the leaf over its elements in a file."""
        if self.sizes is None:
            return flat
        return join_ragged(flat, self.sizes, self.row, False, ragged.SharedOffsets())


def _split_shape(shape: Any, key: Key) -> tuple[torch.Size, Tensor | None]:
    """Return the shape of the elements in the file, and for a ragged entry the table of row shapes.

    Raises:
        TypeError: the shape is a tensor, but not an int64 table of shape (rows, dims).
    """
    if not isinstance(shape, Tensor):
        return torch.Size(shape), None
    table = shape.detach().cpu().clone()
    try:
        return torch.Size([count_elements(table, None)]), table
    except ValueError:
        raise TypeError(
            f"entry {joined(path_of(key))!r}: the shape of a ragged entry is an int64 tensor of shape (rows, dims), "
            f"the shape of each row, and not {shape.dtype} of shape {list(shape.shape)}: {shape.tolist()!r:.80}"
        ) from None


def _add(container: Contract, key: Key, content: NewEntry) -> MemoryMappedTensor:
    """Write a new entry to the folder of a memory-mapped container, and add it to the container."""
    path = path_of(key)
    check_preallocate(content.preallocate)
    if not container._is_memmap:
        raise SaveError(f"entry {joined(path)!r} can only be made in a memory-mapped container; see memmap_()")
    return write_tensor(container, path, content)


def write_tensor(container: Contract, path: Path, content: NewEntry) -> MemoryMappedTensor:
    """Write a new entry to the folder that a container was saved to or loaded from, and add it to the container."""
    parent, missing = _find_deepest(container, path)
    parent = parent._wrapped_container()
    if (kind := specification_of(parent, path[:-1]).kind) != DICT:
        raise UnsupportedEntryError(
            f"entry {joined(path)!r} cannot be made in a {kind}, which has no files of its own: make it in each member"
        )
    if tuple(content.shape[: len(parent._batch_size)]) != tuple(parent._batch_size):
        raise SaveError(
            f"entry {joined(path)!r}: its shape {list(content.shape)} does not begin with the batch size "
            f"{list(parent._batch_size)}"
        )
    try:
        spec = content.spec()
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(path)!r}: {error}") from None
    file = file_name(path[-1], content.robust)
    if not missing:
        _refuse_file_of_other(parent, content, path)
    for index, name in enumerate(missing, len(path) - 1 - len(missing)):
        parent = _make_node(parent, name, path[: index + 1], content.robust)
    if parent._memmap_prefix is None:
        if _is_column_member(parent):
            raise SaveError(
                f"entry {joined(path)!r}: the member of a ragged lazy stack has no folder of its own for a new entry: "
                "add it to all members before the stack is saved"
            )
        flat = MemoryMappedTensor.from_tensor(content.flat, copy_data=content.copy_data)
    else:
        folder = os.path.abspath(parent._memmap_prefix)
        target, table = f"{folder}/{file}{LEAF_SUFFIX}", f"{folder}/{file}{TABLE_SUFFIX}"
        with commit.hold_lock(folder, patience=_PATIENCE), _remove_new_files_on_error(target, table):
            meta.check_no_entry(folder, path[-1], path)
            if not content.existsok and (found := next(filter(os.path.lexists, (target, table)), None)) is not None:
                raise SaveError(f"entry {joined(path)!r}: the file {found!r} already exists; pass existsok=True")
            if content.sizes is not None:
                _write_table(table, content.sizes, content.copy_data, path)
            flat = _make_leaf(target, content, path)
            meta.add_entry(folder, path[-1], spec, path)
    leaf: MemoryMappedTensor = content.make_leaf(flat)
    put_entry(parent, path[-1], leaf)
    return leaf


@contextlib.contextmanager
def _remove_new_files_on_error(*paths: str) -> Iterator[None]:
    """When the block fails, remove these files, except files that existed before."""
    missing = [path for path in paths if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        raise


def _refuse_file_of_other(parent: Contract, content: NewEntry, path: Path) -> None:
    """Raise if a new entry would share a file with another one, as a ragged `x` and a tensor `x.shape` do."""
    name = path[-1]
    suffix = TABLE_SUFFIX.removesuffix(LEAF_SUFFIX)
    other = name + suffix if content.sizes is not None else name.removesuffix(suffix)
    value = parent._entries.get(other)
    if other != name and isinstance(value, Tensor) and (content.sizes is not None or value.is_nested):
        raise SaveError(
            f"entries {joined((*path[:-1], other))!r} and {joined(path)!r} would both use the file "
            f"{min(name, other)}{TABLE_SUFFIX}; give the new entry another name"
        )


def _write_table(target: str, sizes: Tensor, replace: bool, path: Path) -> None:
    """Write the file with the row shapes. Without `replace`, an existing file must have the same content."""
    content = files.to_bytes(sizes)
    with files.naming("write the file", target, path):
        if not replace and os.path.lexists(target):
            with open(target, "rb") as file:
                there = file.read(len(content) + 1)
            if there and there != content:
                raise SaveError(
                    f"entry {joined(path)!r}: the file {target!r} exists and has the shapes of other rows: remove it, "
                    "or give the entry another name"
                )
        files.write_file(target, content)


def _is_column_member(container: Contract) -> bool:
    """Return whether a container is a member of a ragged lazy stack whose members share the files of a saved stack."""
    for leaf in container._entries.values():
        if isinstance(leaf, MemoryMappedTensor) and isinstance(leaf._source, FileSource):
            try:
                return meta.read_node(os.path.dirname(leaf._source.path), ()).columns
            except OSError:
                return False
    return False


def _make_leaf(target: str, content: NewEntry, path: Path) -> MemoryMappedTensor:
    """Write the elements to the file `target` and map it. A tensor that maps this file already stays as it is."""
    flat, copy_data = content.flat, content.copy_data
    if isinstance(flat, MemoryMappedTensor) and isinstance(flat._source, FileSource) and copy_data:
        if flat._source.path != target:
            raise SaveError(
                f"entry {joined(path)!r}: its storage maps {flat._source.path!r} and not the file of the entry, "
                f"{target!r}; pass a tensor (make_memmap_from_tensor(..., tensor.clone())) to copy it"
            )
        return flat
    try:
        return MemoryMappedTensor.from_tensor(
            flat.detach(), filename=target, existsok=True, copy_data=copy_data, preallocate=content.preallocate
        )
    except SaveError as error:
        raise SaveError(
            f"entry {joined(path)!r}: {error}; make_memmap_from_tensor(key, torch.zeros(...)) replaces it"
        ) from error


def _find_deepest(container: Contract, path: Path) -> tuple[Any, Path]:
    """Return the deepest existing container on the way to `path`, and the names of the missing ones below it."""
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


def _make_node(parent: Contract, name: str, path: Path, robust: bool) -> Any:
    """Add an empty memory-mapped container to `parent`, and a folder for it to the folder of `parent`."""
    child = makers.dense({}, parent._batch_size, parent._device, parent._names)
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
        with commit.hold_lock(above, patience=_PATIENCE):
            meta.check_no_entry(above, name, path)
            os.makedirs(folder, exist_ok=True)
            meta.write_meta(folder, meta.node_meta(Specification(DICT, child._batch_size, names=child._names), {}))
            meta.add_entry(above, name, meta.node_spec(DICT), path)
    add_node(parent, name, child)
    return child


def put_entry(container: Any, name: str, value: Any) -> None:
    """Store an entry that is in the save of the container already, so that `SavedEntries` need not write it."""
    entries = container._entries
    if isinstance(entries, dict):
        dict.__setitem__(entries, name, value)
    else:
        entries[name] = value


def add_node(parent: Any, name: str, child: Any) -> None:
    """Put a new nested container in a parent. It becomes locked and memory-mapped if the parent is."""
    put_entry(parent, name, child)
    if parent._is_memmap:
        child._mark(memmap=True)
    if parent._locked and is_node(child):
        child._lock_tree(weakref.ref(parent))
