"""Methods that open stores as containers and write containers to stores: HDF5 files, Zarr groups and Redis servers."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict.core import makers, registry
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError
from tensordict.core.signatures import refuse_unknown, spells
from tensordict.io.formats.detect import refuse_other
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_saves import read_file
from tensordict.io.remote.uploads import save_file
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.saving.progress import hide_bars
from tensordict.io.saving.transaction import FileTransaction, TreeTransaction
from tensordict.io.specification import check_levels
from tensordict.io.stores.backends import backend_of
from tensordict.io.stores.entries import check_container, write_store
from tensordict.io.stores.redis_wire import Address
from tensordict.memory import files
from tensordict.memory.names import without_scheme
from tensordict.memory.storable import refuse_sharded

if TYPE_CHECKING:
    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.io.remote.remote_saves import CacheDir
    from tensordict.io.remote.urls import StorageOptions

    class _Open(TypedDict, total=False):
        mode: str
        auto_batch_size: bool
        batch_dims: int | None
        batch_size: object
        device: object
        non_tensor_as_stack: bool

    class OpenH5(_Open, total=False):
        storage_options: StorageOptions | None
        cache_dir: CacheDir | None

    class OpenZarr(_Open, total=False):
        storage_options: StorageOptions | None


class Persisting(Contract):
    """The methods `from_h5`, `to_h5`, `from_zarr`, `to_zarr` and `to_store`."""

    @classmethod
    def from_h5(
        cls,
        filename: object,
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: object = None,
        device: object = None,
        non_tensor_as_stack: bool = False,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Open an HDF5 file as a container. Its tensors are read when they are used.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> TensorDict(a=torch.arange(6).view(3, 2), batch_size=[3]).to_h5(f"{folder.name}/data.h5").close()
            >>> with TensorDict.from_h5(f"{folder.name}/data.h5") as data:
            ...     data.batch_size, data[1]["a"]
            (torch.Size([3]), tensor([2, 3]))

        Args:
            filename: the file or its URL. From a URL, the whole file is fetched, and is read-only.
            mode: `"r"` to read, `"r+"` to read and write; see :class:`~tensordict.PersistentTensorDict`.
            auto_batch_size: use the longest batch size that all entries share, even if the file has a batch size. A
                file of another program has no batch size, and always uses this one.
            batch_dims: the maximum number of batch dims to use in this case, also in nested containers.
            batch_size: the batch size of the container.
            device: move tensors to this device when they are read.
            non_tensor_as_stack: read arrays that torch has no dtype for, such as texts of another program, as one value
                for each element of the batch, if their leading dims are the batch dims. Without it, such an array is
                one value, a NumPy array, for the whole batch.
            storage_options, cache_dir: for a URL, as in :meth:`load_memmap`.

        Returns:
            a :class:`~tensordict.PersistentTensorDict`; if a tensorclass was saved, this tensorclass over one. Close it
            after use.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: the file is not an HDF5 file, or a shape does not begin with the batch size.
            TypeError: `batch_size` and `auto_batch_size` are both given.
            ModuleNotFoundError: h5py is not installed.
        """
        if is_url(filename) and mode != "r":
            raise SaveError(
                f"mode={mode!r} writes to the file, but {as_url(str(filename))!r} is read-only: pass mode='r'"
            )
        open_file = partial(
            makers.open_store,
            mode=mode,
            auto_batch_size=auto_batch_size,
            batch_dims=batch_dims,
            batch_size=batch_size,
            device=device,
            non_tensor_as_stack=non_tensor_as_stack,
        )
        return read_file(filename, storage_options, cache_dir, open_file)  # type: ignore[no-any-return]

    def to_h5(
        self,
        filename: object,
        *,
        durable: bool = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        **kwargs: object,
    ) -> Self:
        """Write this container to an HDF5 file, and return a container over this file.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> td = TensorDict(a=torch.zeros(1000, 3), b={"c": torch.ones(1000)}, batch_size=[1000])
            >>> with td.to_h5(f"{folder.name}/data.h5", compression="gzip") as data:
            ...     data["b", "c"][:3]
            tensor([1., 1., 1.])

        An older save is replaced in one step when the new file is complete. If writing fails, it is unchanged. Tensors
        are written in pieces, without a second copy in memory.

        Args:
            filename: the file, or a URL to upload it to. At a URL, an existing file is replaced only with
                `overwrite=True`, and the result is a read-only container over the temporary file that was uploaded.
            durable: wait until the file has reached the disk, so that it survives a loss of power.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace any file, also one of another program. A file counts as such if it is not an HDF5 file,
                or if this package did not write it and it has names that this container does not have.
            storage_options: for a URL, as in :meth:`memmap`.
            **kwargs: passed to `h5py.Group.create_dataset` for every tensor: `compression="gzip"`, `chunks=...` (an int
                is the number of rows in a chunk; chunks are cut to the shapes of smaller tensors).

        Returns:
            a :class:`~tensordict.PersistentTensorDict` over the new file, open for writing; for a tensorclass, the same
            tensorclass over one.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; the error names it.
            SaveError: a file of another program exists, without `overwrite`.
            OSError: the file cannot be written, or another process or thread is saving to it.
            TypeError: `create_dataset` does not take an argument.
            ModuleNotFoundError: h5py is not installed.
        """
        to_store: Any = self._to_store
        save = partial(to_store, "h5", durable=durable, progress=progress, overwrite=overwrite, **kwargs)
        if not is_url(filename):
            return save(without_scheme(filename))  # type: ignore[no-any-return]

        def write(path: str) -> Any:
            save(path).close()
            return makers.open_store(path, backend="h5", mode="r")

        with hide_bars(progress):
            return save_file(filename, storage_options, overwrite, write)  # type: ignore[arg-type, no-any-return]

    @spells(Address.of)
    def to_store(self, *, device: Any = None, **server: Any) -> Any:
        """Write this container to a Redis server, or another server of its protocol.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from tensordict.store import TensorDictStore
            >>> store = TensorDict(a=torch.zeros(3)).to_store(host="localhost")  # doctest: +SKIP
            >>> TensorDictStore.from_store(td_id=store.td_id)["a"]  # doctest: +SKIP
            tensor([0., 0., 0.])

        Args:
            backend, host, port, db, unix_socket_path, prefix: the server, and the prefix of all keys there; as in
                :class:`~tensordict.store.TensorDictStore`.
            device: move tensors to this device when they are fetched; `None` for the device of this container.
            **server: further arguments of :class:`~tensordict.store.TensorDictStore`, such as `ttl=` and `password=`.

        Returns:
            a :class:`~tensordict.store.TensorDictStore` over the stored entries. Other processes open it by its
            `td_id`. For a lazy stack, a :class:`~tensordict.store.LazyStackedTensorDictStore`; for a tensorclass, the
            same tensorclass over a store. Nested lazy stacks are stored as dense containers, so their members must have
            the same entries and shapes.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; the error names it, and nothing was written.
            ConnectionError: the server does not answer.
            ModuleNotFoundError: the package redis is not installed.
        """
        return server_class().from_tensordict(self, device=device, **server)

    @classmethod
    @spells(from_h5, without="cache_dir")
    def from_zarr(cls, filename: object, *, allow_pickle: bool | None = None, **options: Unpack[OpenZarr]) -> Self:
        """Open a Zarr group as a container. Its tensors are read when they are used, chunk by chunk.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> td = TensorDict(a=torch.arange(6).view(3, 2), batch_size=[3], names=["time"])
            >>> td.to_zarr(f"{folder.name}/data.zarr").close()
            >>> data = TensorDict.from_zarr(f"{folder.name}/data.zarr")
            >>> data.batch_size, data.names, data[1]["a"]
            (torch.Size([3]), ['time'], tensor([2, 3]))

        Opens groups of any program, such as xarray or anndata, of Zarr v3 and (read-only) v2.

        Args:
            filename: a folder, a zip file, the URL of a folder, a `zarr.abc.store.Store`, or an open `zarr.Group`.
            mode: `"r"` to read, `"r+"` to read and write; see :class:`~tensordict.PersistentTensorDict`. Zip files are
                read-only.
            auto_batch_size: use the longest batch size that all entries share, even if the group has a batch size. A
                group of another program has no batch size, and always uses this one.
            batch_dims: the maximum number of batch dims to use in this case, also in nested containers.
            batch_size: the batch size of the container.
            device: move tensors to this device when they are read.
            non_tensor_as_stack: as in :meth:`from_h5`. One-dim arrays of texts are always read as one value for each
                text.
            allow_pickle: load pickled values, and pickle new ones that JSON cannot hold. A pickle may run any code, so
                use this only for groups that you trust. Without it, reading a pickled value raises an error.
            storage_options: for a URL, as in :meth:`load_memmap`.

        Returns:
            a :class:`~tensordict.PersistentTensorDict`; if a tensorclass was saved, this tensorclass over one. Nested
            groups are nested containers. Texts, and arrays that torch has no dtype for, are values.

        Raises:
            FileNotFoundError: the group does not exist.
            ValueError: it is not a Zarr group, or a shape does not begin with the batch size.
            TypeError: `batch_size` and `auto_batch_size` are both given.
            ModuleNotFoundError: zarr is not installed.
        """
        refuse_unknown(Persisting.from_zarr, options)
        return makers.open_store(filename, backend="zarr", allow_pickle=bool(allow_pickle), **options)  # type: ignore[no-any-return]

    def to_zarr(
        self,
        filename: object,
        *,
        allow_pickle: bool | None = None,
        durable: bool = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        **kwargs: object,
    ) -> Self:
        """Write this container to a Zarr group (v3), and return a container over this group.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> td = TensorDict(a=torch.zeros(1000, 3), b={"c": torch.ones(1000)}, batch_size=[1000])
            >>> with td.to_zarr(f"{folder.name}/data.zarr", chunks={"a": 100}) as data:
            ...     data["b", "c"][:3]
            tensor([1., 1., 1.])

        Every container becomes a group, and every leaf an array. Many programs read this format. An older save at a
        path is replaced in one step when the new one is complete. If writing fails, it is unchanged.

        Args:
            filename: the path of a folder, or of a zip file, if it ends with `.zip`; a URL; or a
                `zarr.abc.store.Store`.
            allow_pickle: pickle values that JSON cannot hold, in the form of the reference. Without it they raise an
                error. Loading such a group needs `allow_pickle=True` too.
            durable: wait until the files have reached the disk, so that they survive a loss of power; without effect
                for stores and URLs.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace any file or folder, also one that is not a group of this package or contains other
                files. For a store or a URL, delete its content first.
            storage_options: for a URL, as in :meth:`memmap`.
            **kwargs: passed to `zarr.create_array` for every tensor: `chunks` and `shards` (sizes of the leading dims,
                or an int for the number of rows; `chunks="rows"`), `compressors`, `filters`, `serializer`,
                `fill_value`, `order`. A dict gives different ones by key, as `chunks={"image": 16, "next": 32}`. The
                key of a container stands for all of its entries.

        Returns:
            a :class:`~tensordict.PersistentTensorDict` over the new group, open for writing (read-only for a zip file);
            for a tensorclass, the same tensorclass over one.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; the error names it.
            SaveError: files of another program exist, without `overwrite`.
            OSError: the group cannot be written, or another process or thread is saving to it.
            TypeError: `zarr.create_array` does not take an argument.
            ModuleNotFoundError: zarr is not installed.

        Without options, an array is one uncompressed chunk, which is fast to write and to read as a whole. To read rows
        of arrays that do not fit into memory, use `chunks="rows"`: chunks of about 1 MiB along the first dim. With very
        many chunks, `shards=` puts several into one file. Processes may write to different chunks of a group at the
        same time. If two processes write to the same chunk, the last write wins.
        """
        options: dict[str, Any] = {"durable": durable, "progress": progress, "overwrite": overwrite, **kwargs}
        options["allow_pickle"] = bool(allow_pickle)
        with hide_bars(progress):
            saved: Self = self._to_store("zarr", without_scheme(filename), storage_options=storage_options, **options)
        return saved

    def _to_store(
        self,
        backend: str,
        filename: Any,
        *,
        durable: bool = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        allow_pickle: bool = False,
        **kwargs: object,
    ) -> Any:
        """Write this container to a store of the given backend, by path or as an object; see `to_h5` and `to_zarr`."""
        check_levels(self)
        refuse_sharded(self)
        kind = backend_of(backend)
        options = kind.check_options(kwargs)
        reopen = partial(makers.open_store, backend=backend, options=kwargs, is_new=True, allow_pickle=allow_pickle)
        if kind.opens_urls and is_url(filename):
            filename = Remote(filename, storage_options)
        if not isinstance(filename, (str, bytes, os.PathLike)):
            check_container(kind, filename, self, allow_pickle=allow_pickle)
            write_store(kind.create(filename, overwrite), self, options, progress, allow_pickle)
            return reopen(filename, mode="r+")

        def check(path: str) -> None:
            refuse_other(path, backend, lambda path: kind.strangers(path, self))

        path = os.fsdecode(filename)
        transaction = TreeTransaction if kind.is_folder(path) else FileTransaction
        with transaction(path, durable=durable, check=None if overwrite else check) as save:
            with save.new_file(save.path):
                try:
                    write_store(kind.create(save.staged), self, options, progress, allow_pickle)
                except OSError as error:
                    if error.filename != save.staged:
                        raise
                    raise files.named_os_error(error, "write the file", save.path) from error
            save.commit()
            # Open it inside the transaction, while no other process can save there: HDF5 refuses to open a file that
            # another process has open for writing.
            return reopen(save.path, mode=kind.choose_mode(path))


def server_class() -> Any:
    """Return the class of containers on a Redis server."""
    return registry.lookup("TensorDictStore")
