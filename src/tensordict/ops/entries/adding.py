"""Adding an entry to a memory-mapped container and to the folder that it is saved in."""

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

# How long an entry that is being added waits for another process that adds one, in seconds.
_PATIENCE = 10.0


class Adding(Contract):
    """`make_memmap` and its kin: new entries in a saved folder."""

    def make_memmap(
        self,
        key: Key,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
        preallocate: Preallocate = "auto",
    ) -> MemoryMappedTensor:
        """Add an entry of zeros to a memory-mapped container, in its folder too.

        A file of the entry's name and size that no entry has yet is opened, and its content kept.

        Args:
            key: the nested key; containers on the way are created.
            shape: the shape, which begins with the batch size. An int64 tensor of shape (rows, dims) has the shape of
                each row of a ragged entry: a nested tensor of the strided layout, in two files, `NAME.memmap` and
                `NAME.shape.memmap`.
            dtype: the dtype, torch's default when `None`.
            robust_key: as in :meth:`memmap`.
            preallocate: as in :meth:`memmap_like`, of the file of this entry.

        Returns:
            The new entry; what is written to it is written to its file.

        Raises:
            RuntimeError: the container is not memory-mapped, the entry exists (also when another process has made it
                in the folder), the shape does not fit (also that of a file that is there, which
                :meth:`make_memmap_from_tensor` replaces), or another process is saving to the folder.
            TypeError: the shape is a tensor of another dtype or shape.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td = TensorDict(batch_size=[2]).memmap_(folder)
            ...     x = td.make_memmap("x", (2, 3), dtype=torch.int64)
            ...     x[0] = 1
            ...     again = TensorDict.load_memmap(folder)
            ...     rows = td.make_memmap("rows", torch.tensor([[1, 4], [3, 4]]))
            >>> again["x"]
            MemoryMappedTensor([[1, 1, 1],
                                [0, 0, 0]])
            >>> [row.shape for row in rows.unbind()]
            [torch.Size([1, 4]), torch.Size([3, 4])]
        """
        size, table = _stored_shape(shape, key)
        content = torch.empty((), dtype=dtype, device="cpu").expand(size)
        return _add(self, key, _NewEntry(content, table), False, robust_key is not False, preallocate)

    def make_memmap_from_tensor(
        self,
        key: Key,
        tensor: Tensor,
        *,
        copy_data: bool = True,
        robust_key: bool | None = True,
        preallocate: Preallocate = "auto",
    ) -> MemoryMappedTensor:
        """Add a copy of a tensor to a memory-mapped container, in its folder too.

        Args:
            key: the nested key; containers on the way are created.
            tensor: the tensor, whose shape begins with the batch size; it may be nested (ragged), of either layout.
            copy_data: `False` takes only shape and dtype, and leaves the entry zero, as :meth:`make_memmap` does; with
                `True`, a file of the entry's name that no entry has yet is replaced.
            robust_key: as in :meth:`memmap`.
            preallocate: with `copy_data=False`, as in :meth:`make_memmap`.

        Returns:
            The new entry.

        Raises:
            RuntimeError: as :meth:`make_memmap`.
        """
        return _add(self, key, _NewEntry.of(tensor), copy_data, robust_key is not False, preallocate)

    def make_memmap_from_storage(
        self,
        key: Key,
        storage: Any,
        shape: Any,
        *,
        dtype: torch.dtype | None = None,
        robust_key: bool | None = True,
    ) -> MemoryMappedTensor:
        """Add an entry over an existing storage to a memory-mapped container.

        Args:
            key: the nested key; containers on the way are created.
            storage: an `UntypedStorage` or `TypedStorage`. One that maps the entry's own file is used as it is; the
                content of one without a file, or whose file was removed, is copied to it.
            shape: the shape, which begins with the batch size; a tensor as in :meth:`make_memmap`, where the rows lie
                one behind the other in the storage.
            dtype: the dtype of the elements, torch's default when `None`.
            robust_key: as in :meth:`memmap`.

        Returns:
            The new entry.

        Raises:
            RuntimeError: as :meth:`make_memmap`, and when the storage maps another file.
        """
        size, table = _stored_shape(shape, key)
        # A file that another save has removed lives on in its maps alone: their content is copied to a new one.
        file = storage.filename if storage.filename and os.path.exists(storage.filename) else None
        content = MemoryMappedTensor.from_storage(storage, shape=size, dtype=dtype, filename=file)
        return _add(self, key, _NewEntry(content, table), True, robust_key is not False)


@dataclass(slots=True)
class _NewEntry:
    """The elements of a new entry.

    Args:
        flat: the tensor, or the elements of a ragged one, row after row.
        sizes: of a ragged one, the int64 table of the shapes of its rows.
        row: of a jagged one, the shape of every row, with -1 for the dim in which they differ.
    """

    flat: Tensor
    sizes: Tensor | None = None
    row: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> _NewEntry:
        """Take a tensor, ragged or not."""
        return cls(*split_ragged(tensor)) if is_ragged_leaf(tensor) else cls(tensor)

    @property
    def shape(self) -> torch.Size:
        """The shape of the entry, with -1 for the dims in which its rows differ."""
        return self.flat.shape if self.sizes is None else Column(self.flat, self.sizes).shape

    def spec(self) -> dict[str, Any]:
        """Describe the entry as `meta.json` does."""
        if self.sizes is None:
            return meta.leaf_spec(self.flat.dtype, tuple(self.flat.shape))
        return meta.ragged_spec(self.flat.dtype, tuple(self.sizes.shape), self.row)

    def over(self, flat: MemoryMappedTensor) -> Any:
        """Make the entry of its elements in a file."""
        if self.sizes is None:
            return flat
        return join_ragged(flat, self.sizes, self.row, False, ragged.SharedOffsets())


def _stored_shape(shape: Any, key: Key) -> tuple[torch.Size, Tensor | None]:
    """Turn the shape of a new entry into that of its elements, and the table of the shapes of its rows, if any.

    Raises:
        TypeError: the shape is a tensor, and no int64 table of shape (rows, dims).
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


def _add(
    container: Contract, key: Key, content: _NewEntry, copy_data: bool, robust: bool, preallocate: Preallocate = "auto"
) -> MemoryMappedTensor:
    """Add a tensor to a memory-mapped container and to its folder."""
    path = path_of(key)
    check_preallocate(preallocate)
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
        spec = content.spec()
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"entry {joined(path)!r}: {error}") from None
    file = file_name(path[-1], robust)
    if not missing:
        _refuse_file_of_other(parent, content, path)
    for index, name in enumerate(missing, len(path) - 1 - len(missing)):
        parent = _new_node(parent, name, path[: index + 1], robust)
    if parent._memmap_prefix is None:
        if _is_row(parent):
            raise SaveError(
                f"entry {joined(path)!r}: the member of a ragged lazy stack has no folder of its own for a new entry: "
                "add it to all members before the stack is saved"
            )
        flat = MemoryMappedTensor.from_tensor(content.flat, copy_data=copy_data)
    else:
        folder = os.path.abspath(parent._memmap_prefix)
        target, table = f"{folder}/{file}{LEAF_SUFFIX}", f"{folder}/{file}{TABLE_SUFFIX}"
        with commit.hold_lock(folder, patience=_PATIENCE), _new_files(target, table):
            meta.refuse_entry(folder, path[-1], path)
            if content.sizes is not None:
                _write_table(table, content.sizes, copy_data, path)
            flat = _leaf_in(target, content.flat, copy_data, path, preallocate)
            meta.add_entry(folder, path[-1], spec, path)
    leaf: MemoryMappedTensor = content.over(flat)
    parent._entries[path[-1]] = leaf
    return leaf


@contextlib.contextmanager
def _new_files(*paths: str) -> Iterator[None]:
    """Remove these files when the block fails, except those that are there at its beginning."""
    missing = [path for path in paths if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        raise


def _refuse_file_of_other(parent: Contract, content: _NewEntry, path: Path) -> None:
    """Refuse an entry that would share a file with another one, as a ragged `x` and a tensor `x.shape` do."""
    name = path[-1]
    suffix = TABLE_SUFFIX.removesuffix(LEAF_SUFFIX)
    other = name + suffix if content.sizes is not None else name.removesuffix(suffix)
    value = parent._entries.get(other)
    if other != name and isinstance(value, Tensor) and (content.sizes is not None or value.is_nested):
        raise SaveError(
            f"entries {joined((*path[:-1], other))!r} and {joined(path)!r} would both have the file "
            f"{min(name, other)}{TABLE_SUFFIX}; give the new one another name"
        )


def _write_table(target: str, sizes: Tensor, replace: bool, path: Path) -> None:
    """Write the file of the shapes of rows; without `replace`, a file that is there must have the same content."""
    content = files.to_bytes(sizes)
    with files.naming("write the file", target, path):
        if not replace and os.path.lexists(target):
            with open(target, "rb") as file:
                there = file.read(len(content) + 1)
            if there and there != content:
                raise SaveError(
                    f"entry {joined(path)!r}: the file {target!r} is there, with the shapes of other rows, and is left "
                    "as it is: remove it, or give the entry another name"
                )
        files.write_file(target, content)


def _is_row(container: Contract) -> bool:
    """Whether a container is one of those that a saved stack has by columns."""
    for leaf in container._entries.values():
        if isinstance(leaf, MemoryMappedTensor) and isinstance(leaf._source, FileSource):
            try:
                return meta.read_node(os.path.dirname(leaf._source.path), ()).columns
            except OSError:
                return False
    return False


def _leaf_in(target: str, content: Tensor, copy_data: bool, path: Path, preallocate: Preallocate) -> MemoryMappedTensor:
    """A new tensor in the file `target`, or the one that is over it already."""
    if isinstance(content, MemoryMappedTensor) and isinstance(content._source, FileSource) and copy_data:
        if content._source.path != target:
            raise SaveError(
                f"entry {joined(path)!r}: its storage maps {content._source.path!r} and not the file of the entry, "
                f"{target!r}; pass a tensor (make_memmap_from_tensor(..., tensor.clone())) to copy it"
            )
        return content
    try:
        return MemoryMappedTensor.from_tensor(
            content.detach(), filename=target, existsok=True, copy_data=copy_data, preallocate=preallocate
        )
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
