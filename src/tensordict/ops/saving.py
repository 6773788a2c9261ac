"""Saving: containers as memory-mapped folders, and their way back."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict import ragged, registry
from tensordict.contract import Contract
from tensordict.errors import SaveError, UnsupportedEntryError
from tensordict.io import meta
from tensordict.io.directory import SaveOptions, check_container, plan_save
from tensordict.io.loading import LoadOptions, load_directory
from tensordict.io.names import LEAF_SUFFIX, file_name, folder_name
from tensordict.keys import Key, Path, joined, path_of
from tensordict.memmap import FileSource, MemoryMappedTensor, PathLike

if TYPE_CHECKING:
    import pathlib

    from typing_extensions import Self


class Saving(Contract):
    """`memmap`, `save`, `load_memmap` and what they give."""

    # --- saving ---------------------------------------------------------------------------------------------------

    def memmap(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: Any = None,
    ) -> Any:
        """Save to a folder and return a memory-mapped copy.

        Every tensor becomes the file `NAME.memmap`, every nested container a sub-folder, and `meta.json` is written
        last. A file that exists is replaced: tensors that map the old one keep it. When saving fails, what it
        created is removed.

        Args:
            prefix: the folder, created when needed; `None` copies to anonymous memory that other processes can
                share.
            copy_existing: allow entries that are memory-mapped from other files, and copy these.
            num_threads: the number of threads that write; 0 for none but the calling one.
            return_early: save in the background and return a `concurrent.futures.Future` of the container. The
                tensors must not change until it is done.
            share_non_tensor: accepted for compatibility; has no effect on tensors.
            existsok: allow `prefix` to hold a save already.
            robust_key: percent-encode the names that the file system or the layout cannot hold (`None`: as `True`).
            archive: `True` would write a single-file archive; not available yet.
            compression: of an archive.

        Returns:
            A new container, locked and on the CPU, of `MemoryMappedTensor`s; unlocking it ends `is_memmap()`.

        Raises:
            RuntimeError: an entry is memory-mapped from elsewhere, cannot be saved, or (with `existsok=False`)
                exists; nothing has been written then.
            OSError: the folder cannot be written, or the disk is full; names the path and the key.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     saved = TensorDict(a=torch.zeros(2)).memmap(folder)
            ...     saved["a"].fill_(3)
            ...     again = TensorDict.load_memmap(folder)
            MemoryMappedTensor([3., 3.])
            >>> again["a"], saved.is_locked, saved.is_memmap()
            (MemoryMappedTensor([3., 3.]), True, True)
        """
        _refuse_archive(prefix, archive, compression)
        options = SaveOptions(copy_existing, existsok, num_threads, robust_key is not False)
        return _save(self, prefix, options, return_early)

    def memmap_(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
    ) -> Any:
        """Save to a folder and make this container the memory-mapped one; arguments as in :meth:`memmap`.

        Returns:
            This container, now locked and on the CPU, its entries replaced by `MemoryMappedTensor`s. When saving
            fails it is unchanged.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.memmap_() is td, td["a"]
            (True, MemoryMappedTensor([0., 0.]))
        """
        _refuse_archive(prefix, None, None)
        options = SaveOptions(copy_existing, existsok, num_threads, robust_key is not False, inplace=True)
        return _save(self, prefix, options, return_early)

    def memmap_like(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        existsok: bool = True,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
    ) -> Any:
        """A memory-mapped container of the same structure whose tensors are zero; arguments as in :meth:`memmap`.

        Disk space is reserved but nothing is written, so that an expanded container (which takes no memory) can be
        preallocated and then filled piece by piece.

        Raises:
            OSError: the disk has no room for all of it.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> item = TensorDict(image=torch.ones(8, 8), label=torch.tensor(1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     data = item.expand(1000).memmap_like(folder)
            ...     data[3] = item
            >>> data["label"].sum()
            tensor(1)
        """
        _refuse_archive(prefix, archive, None)
        options = SaveOptions(copy_existing, existsok, num_threads, robust_key is not False, like=True)
        return _save(self, prefix, options, return_early)

    def save(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: Any = None,
    ) -> Any:
        """Save to a folder; the same as :meth:`memmap`."""
        return self.memmap(
            prefix,
            copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            robust_key=robust_key,
            archive=archive,
            compression=compression,
        )

    def dumps(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        num_threads: int = 0,
        return_early: bool = False,
        share_non_tensor: bool = False,
        robust_key: bool | None = True,
        archive: bool | None = None,
        compression: Any = None,
    ) -> Any:
        """Save to a folder; the same as :meth:`memmap`."""
        return self.memmap(
            prefix,
            copy_existing,
            num_threads=num_threads,
            return_early=return_early,
            share_non_tensor=share_non_tensor,
            robust_key=robust_key,
            archive=archive,
            compression=compression,
        )

    def is_memmap(self) -> bool:
        """Whether this container has been memory-mapped (and not been unlocked since)."""
        return self._is_memmap

    @property
    def saved_path(self) -> pathlib.Path | None:
        """The folder that this container was saved to or loaded from; `None` over anonymous memory.

        Raises:
            AttributeError: when it was neither, or has been unlocked since.
        """
        if self._is_memmap or self._memmap_prefix is not None:
            return self._memmap_prefix
        raise AttributeError("this container has no saved path: it is not memory-mapped; see memmap()")

    # --- loading --------------------------------------------------------------------------------------------------

    @classmethod
    def load_memmap(
        cls,
        prefix: PathLike,
        device: Any = None,
        non_blocking: bool = False,
        *,
        out: Any = None,
        robust_key: bool | None = True,
        subpath: Any = None,
        mode: str = "r",
        num_threads: int = 0,
        allow_pickle: bool | None = None,
    ) -> Any:
        """Load a container that was saved to a folder.

        The tensors map their files: nothing is read until it is used, and writing to them writes the files. A file
        that we may not write is mapped privately. Every length is checked against the file before it is mapped.

        Args:
            prefix: the folder.
            device: send the tensors there. `"meta"` gives their shapes and dtypes, and no file of theirs is
                opened; the same holds in `FakeTensorMode`.
            non_blocking: do not wait for the transfer to `device`.
            out: a container that is given the loaded entries, and loses those that the save has not; its own nested
                containers are kept.
            robust_key: whether the names of the files are percent-encoded (`None`: as `True`, which finds plain
                names too).
            subpath: load only this nested container: a nested key, or names joined with `/`.
            mode: `"r"` or `"r+"`; concerns archives only.
            num_threads: concerns archives only.
            allow_pickle: concerns pickled non-tensor data only, which cannot be loaded yet.

        Returns:
            A new container (of the class that was saved), or `out`. It is not locked.

        Raises:
            FileNotFoundError: when the folder or a file in it is missing.
            RuntimeError: when the files do not add up; the path and the key are named.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict(a=torch.zeros(2), b={"c": torch.ones(2)}).memmap(folder)
            ...     inner = TensorDict.load_memmap(folder, subpath="b")
            >>> inner["c"]
            MemoryMappedTensor([1., 1.])
        """
        if mode not in ("r", "r+"):
            raise ValueError(f"mode must be 'r' or 'r+', got {mode!r}")
        _refuse_archive(prefix, None, None)
        target = None if device is None else torch.device(device)
        if out is not None and out._device is not None:
            if target is not None and target != out._device:
                raise ValueError(f"out is on {out._device}, which is not device={str(device)!r}; pass one of them")
            target = out._device
        if out is not None:
            out._refuse_if_locked("load into it")
        loaded = load_directory(prefix, LoadOptions(target, non_blocking, robust_key is not False), subpath)
        if out is None:
            return loaded
        _check_fit(out, loaded, ())
        _take_over(out, loaded)
        return out

    @classmethod
    def load(cls, prefix: PathLike, *args: Any, **kwargs: Any) -> Any:
        """Load a container that was saved to a folder; the same as :meth:`load_memmap`."""
        return cls.load_memmap(prefix, *args, **kwargs)

    def load_memmap_(
        self, prefix: PathLike, robust_key: bool | None = True, *, allow_pickle: bool | None = None
    ) -> Self:
        """Give this container the entries of a save, and drop those that the save has not; see :meth:`load_memmap`.

        The entries are replaced and not written into: to keep their memory, use
        `td.update_(TensorDict.load_memmap(prefix))`.

        Raises:
            RuntimeError: when this container is locked, or an entry does not fit its batch size.
        """
        self.load_memmap(prefix, out=self, robust_key=robust_key, allow_pickle=allow_pickle)
        return self

    def load_(self, prefix: PathLike, *args: Any, **kwargs: Any) -> Self:
        """Give this container the entries of a save; the same as :meth:`load_memmap_`."""
        return self.load_memmap_(prefix, *args, **kwargs)

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Take over what has changed in the saved folder: new, replaced and removed entries.

        Tensors whose files are still the same are kept. Works on locked containers.

        Raises:
            RuntimeError: when this container was not saved to or loaded from a folder.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     writer = TensorDict(a=torch.zeros(2), batch_size=[2]).memmap_(folder)
            ...     reader = TensorDict.load_memmap(folder)
            ...     _ = writer.make_memmap("b", (2,))
            ...     sorted(reader.memmap_refresh_().keys())
            ['a', 'b']
        """
        if self._memmap_prefix is None:
            raise SaveError("only a container that was saved to or loaded from a folder can be refreshed; see memmap()")
        loaded = load_directory(self._memmap_prefix, LoadOptions())
        _check_fit(self, loaded, ())
        _take_over(self, loaded)
        return self

    # --- new entries in a saved folder ----------------------------------------------------------------------------

    def make_memmap(
        self, key: Key, shape: Any, *, dtype: torch.dtype | None = None, robust_key: bool | None = True
    ) -> MemoryMappedTensor:
        """Add an entry of zeros to a memory-mapped container, in its folder too.

        Args:
            key: the nested key; containers on the way are created.
            shape: the shape, which begins with the batch size.
            dtype: the dtype, torch's default when `None`.
            robust_key: as in :meth:`memmap`.

        Returns:
            The new entry; what is written to it is written to its file.

        Raises:
            RuntimeError: the container is not memory-mapped, the entry exists, or the shape does not fit.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     td = TensorDict(batch_size=[2]).memmap_(folder)
            ...     x = td.make_memmap("x", (2, 3), dtype=torch.int64)
            ...     x[0] = 1
            ...     again = TensorDict.load_memmap(folder)
            >>> again["x"]
            MemoryMappedTensor([[1, 1, 1],
                                [0, 0, 0]])
        """
        _refuse_nested_shape(shape, key)
        content = torch.empty((), dtype=dtype, device="cpu").expand(torch.Size(shape))
        return _add(self, key, content, False, robust_key is not False)

    def make_memmap_from_tensor(
        self, key: Key, tensor: Tensor, *, copy_data: bool = True, robust_key: bool | None = True
    ) -> MemoryMappedTensor:
        """Add a copy of a tensor to a memory-mapped container, in its folder too.

        Args:
            key: the nested key; containers on the way are created.
            tensor: the tensor, whose shape begins with the batch size.
            copy_data: `False` takes only shape and dtype, and leaves the entry zero.
            robust_key: as in :meth:`memmap`.

        Returns:
            The new entry.

        Raises:
            RuntimeError: as :meth:`make_memmap`.
        """
        return _add(self, key, tensor, copy_data, robust_key is not False)

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
                content of one without a file is copied to it.
            shape: the shape, which begins with the batch size.
            dtype: the dtype of the elements, torch's default when `None`.
            robust_key: as in :meth:`memmap`.

        Returns:
            The new entry.

        Raises:
            RuntimeError: as :meth:`make_memmap`, and when the storage maps another file.
        """
        _refuse_nested_shape(shape, key)
        content = MemoryMappedTensor.from_storage(storage, shape=shape, dtype=dtype)
        mapped = storage.filename
        if mapped is not None:
            path = os.path.abspath(mapped)
            content = MemoryMappedTensor.from_storage(storage, shape=shape, dtype=dtype, filename=path)
        return _add(self, key, content, True, robust_key is not False)


def _save(container: Any, prefix: PathLike | None, options: SaveOptions, return_early: bool) -> Any:
    run = plan_save(container, prefix, options)
    if not return_early:
        return run()
    pool = ThreadPoolExecutor(1, thread_name_prefix="tensordict-save")
    future: Future[Any] = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def _refuse_archive(prefix: PathLike | None, archive: bool | None, compression: Any) -> None:
    named = prefix is not None and os.fspath(prefix).endswith(".tdz") and not os.path.isdir(prefix)
    if archive or compression is not None or (named and archive is None):
        raise UnsupportedEntryError(
            "single-file archives (.tdz, archive=True, compression=) are not available yet; use a folder"
        )


def _refuse_nested_shape(shape: Any, key: Key) -> None:
    if isinstance(shape, Tensor):
        raise UnsupportedEntryError(
            f"entry {key!r}: a ragged entry cannot be made in a saved container; set it before saving with memmap()"
        )


# --- taking over loaded entries ---------------------------------------------------------------------------------------


def _check_fit(target: Contract, loaded: Contract, path: Path) -> None:
    """Refuse to load entries that do not begin with the batch size of the container they go into."""
    size = target._batch_size
    mapping = target._entries
    for name, value in loaded._entries.items():
        old = mapping.get(name)
        if isinstance(value, Contract) and isinstance(old, Contract):
            _check_fit(old, value, (*path, name))
            continue
        shape = value._batch_size if isinstance(value, Contract) else ragged.shape_of(value)
        if shape[: len(size)] != size:
            raise SaveError(
                f"entry {joined((*path, name))!r}: its saved shape {list(shape)} does not begin with the batch size "
                f"{list(size)} of the container it is loaded into"
            )


def _take_over(target: Contract, loaded: Contract) -> None:
    """Give `target` the entries of `loaded`, keeping its nested containers and the tensors that have not changed."""
    for name in [name for name in target._entries if name not in loaded._entries]:
        del target._entries[name]
    for name, value in loaded._entries.items():
        old = target._entries.get(name)
        if isinstance(value, Contract):
            if isinstance(old, Contract):
                _take_over(old, value)
            else:
                _adopt(target, name, value)
        elif not _same_memory(old, value):
            target._entries[name] = value


def _same_memory(old: Any, new: Any) -> bool:
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


def _adopt(parent: Any, name: str, child: Any) -> None:
    """Put a new nested container in a parent that may be locked and memory-mapped, which it then is too."""
    parent._entries[name] = child
    if parent._is_memmap:
        _mark_memmap(child)
    if parent._locked:
        child._lock_owners = [weakref.ref(parent)]
        child._lock_tree()


def _mark_memmap(node: Contract) -> None:
    node._is_memmap = True
    for _, value in node._entries.items():
        if isinstance(value, Contract):
            _mark_memmap(value)


# --- adding an entry --------------------------------------------------------------------------------------------------


def _add(container: Any, key: Key, content: Tensor, copy_data: bool, robust: bool) -> MemoryMappedTensor:
    """Add a tensor to a memory-mapped container and to its folder."""
    path = path_of(key)
    if content.is_nested:
        _refuse_nested_shape(content, key)
    if not container._is_memmap:
        raise SaveError(f"entry {joined(path)!r} can only be made in a memory-mapped container; see memmap_()")
    parent, missing = _parent_of(container, path)
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
        leaf = MemoryMappedTensor.from_tensor(content, copy_data=copy_data)
    else:
        folder = os.path.abspath(parent._memmap_prefix)
        target = f"{folder}/{file}"
        if isinstance(content, MemoryMappedTensor) and isinstance(content._source, FileSource) and copy_data:
            if content._source.path != target:
                raise SaveError(
                    f"entry {joined(path)!r}: its storage maps {content._source.path!r} and not the file of the entry, "
                    f"{target!r}; pass a tensor (make_memmap_from_tensor(..., tensor.clone())) to copy it"
                )
            leaf = content
        else:
            plain = content.detach()
            leaf = MemoryMappedTensor.from_tensor(plain, filename=target, existsok=True, copy_data=copy_data)
        meta.add_entry(folder, path[-1], spec, path)
    parent._entries[path[-1]] = leaf
    return leaf


def _parent_of(container: Any, path: Path) -> tuple[Any, Path]:
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
        raise SaveError(f"entry {joined(path)!r} exists already; delete it first or write into it")
    return node, ()


def _new_node(parent: Any, name: str, path: Path, robust: bool) -> Any:
    """A new, empty, memory-mapped container in `parent` and in its folder."""
    class_name = check_container(parent, path[:-1])
    child = registry.lookup(class_name)()._build({}, parent._batch_size, parent._device, parent._names)
    if parent._memmap_prefix is not None:
        leaf_files = {
            file_name(leaf, robust) + LEAF_SUFFIX
            for leaf, value in parent._entries.items()
            if not isinstance(value, Contract)
        }
        inner = folder_name(name, robust, leaf_files)
        child._memmap_prefix = parent._memmap_prefix / inner
        folder = os.path.abspath(child._memmap_prefix)
        os.makedirs(folder, exist_ok=True)
        meta.write_meta(folder, meta.node_meta(class_name, tuple(child._batch_size), child._names, {}))
        meta.add_entry(os.path.dirname(folder), name, meta.node_spec(class_name), path)
    _adopt(parent, name, child)
    return child
