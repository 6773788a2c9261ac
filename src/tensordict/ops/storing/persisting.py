"""Array stores, such as HDF5 files and Zarr groups: containers over them, and containers written as them."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from tensordict.core import makers, registry
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError
from tensordict.io.formats.detect import refuse_other
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_saves import read_file
from tensordict.io.remote.uploads import save_file
from tensordict.io.remote.urls import Remote, is_url
from tensordict.io.saving.progress import quiet
from tensordict.io.saving.transaction import FileTransaction, TreeTransaction
from tensordict.io.specification import check_levels
from tensordict.io.stores.backends import backend_of
from tensordict.io.stores.entries import check_container, write_store
from tensordict.memory import files
from tensordict.memory.names import without_scheme
from tensordict.memory.storable import refuse_sharded

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.containers.tensordict_store import TensorDictStore
    from tensordict.io.remote.remote_saves import CacheDir
    from tensordict.io.remote.urls import StorageOptions


class Persisting(Contract):
    """`from_h5`, `to_h5`, `from_zarr` and `to_zarr`."""

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
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Open an HDF5 file as a container; its tensors are read when they are used.

        Args:
            filename: the file, or its URL, from which all of it is fetched (HDF5 reads local files), to be read only.
            mode: `"r"` to read only, `"r+"` to write too; see :class:`~tensordict.PersistentTensorDict`.
            auto_batch_size: find the longest batch size that fits, also when one was saved. A file of another program,
                in which none was, has that batch size anyway.
            batch_dims: the most dims that a batch size that is found so has, here and in nested containers.
            batch_size: that of the container.
            device: tensors are moved there when they are read.
            storage_options, cache_dir: of a URL, as in :meth:`load_memmap`.

        Returns:
            a :class:`~tensordict.PersistentTensorDict`, or the tensorclass over one that was saved. Close it when it is
            no longer needed.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no HDF5 file, or a shape in it does not begin with the batch size.
            ModuleNotFoundError: h5py is not installed.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> TensorDict(a=torch.arange(6).view(3, 2), batch_size=[3]).to_h5(f"{folder.name}/data.h5").close()
            >>> with TensorDict.from_h5(f"{folder.name}/data.h5") as data:
            ...     data.batch_size, data[1]["a"]
            (torch.Size([3]), tensor([2, 3]))
        """
        if is_url(filename) and mode != "r":
            raise SaveError(
                f"mode={mode!r} writes to the file, and {as_url(str(filename))!r} is only read: mode='r' can be had"
            )
        opened = partial(
            makers.open_store,
            mode=mode,
            auto_batch_size=auto_batch_size,
            batch_dims=batch_dims,
            batch_size=batch_size,
            device=device,
        )
        return read_file(filename, storage_options, cache_dir, opened)  # type: ignore[no-any-return]

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
        """Write this container as an HDF5 file.

        Tensors are written in pieces, so that no second copy of them is made. A container saved there is replaced once
        the new one is whole; when writing fails it stays as it was.

        Args:
            filename: the file. To a URL a temporary file is uploaded, over which the result is, to be read only; what
                is there is replaced with `overwrite=True` only.
            durable: have the file survive a loss of power once this returns.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace a file of another program, too: one that is no HDF5 file, or one with other names in it
                and no note of this package.
            storage_options: of a URL, as in :meth:`memmap`.
            **kwargs: passed to `h5py.Group.create_dataset` for every tensor: `compression="gzip"`, `chunks=...` (an int
                is the number of rows of a chunk; chunks are cut to the shapes of smaller tensors).

        Returns:
            a :class:`~tensordict.PersistentTensorDict` over the new file, open for writing; a tensorclass over it for
            a tensorclass.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; it is named.
            SaveError: there is a file of another program.
            OSError: the file cannot be written, or another process or thread is saving to it.
            TypeError: an argument is none of `create_dataset`.
            ModuleNotFoundError: h5py is not installed.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> td = TensorDict(a=torch.zeros(1000, 3), b={"c": torch.ones(1000)}, batch_size=[1000])
            >>> with td.to_h5(f"{folder.name}/data.h5", compression="gzip") as data:
            ...     data["b", "c"][:3]
            tensor([1., 1., 1.])
        """
        to_store: Any = self._to_store
        save = partial(to_store, "h5", durable=durable, progress=progress, overwrite=overwrite, **kwargs)
        if not is_url(filename):
            return save(without_scheme(filename))  # type: ignore[no-any-return]

        def write(path: str) -> Any:
            save(path).close()
            return makers.open_store(path, backend="h5", mode="r")

        with quiet(progress):
            return save_file(filename, storage_options, overwrite, write)  # type: ignore[arg-type, no-any-return]

    def to_store(
        self,
        *,
        backend: str = "redis",
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        unix_socket_path: str | None = None,
        prefix: str = "tensordict",
        device: Any = None,
        **kwargs: Any,
    ) -> TensorDictStore:
        """Write this container to a Redis server, or another one of its protocol.

        Args:
            backend, host, port, db, unix_socket_path, prefix: the server, and what the names of keys there begin with;
                as of :class:`~tensordict.store.TensorDictStore`.
            device: tensors are moved there when they are fetched; `None` for the device of this container.
            **kwargs: further arguments of :class:`~tensordict.store.TensorDictStore`, such as `ttl=` and `password=`.

        Returns:
            a :class:`~tensordict.store.TensorDictStore` over what was written, whose `td_id` other processes open it
            by. Of a lazy stack it is a :class:`~tensordict.store.LazyStackedTensorDictStore`, of a tensorclass the
            tensorclass over one. Lazy stacks nested in it are stored as the dense containers that they stand for, so
            their members must have the same entries and shapes.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; it is named, and nothing was written.
            ConnectionError: the server does not answer.
            ModuleNotFoundError: the package redis is not installed.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from tensordict.store import TensorDictStore
            >>> store = TensorDict(a=torch.zeros(3)).to_store(host="localhost")  # doctest: +SKIP
            >>> TensorDictStore.from_store(td_id=store.td_id)["a"]  # doctest: +SKIP
            tensor([0., 0., 0.])
        """
        server: dict[str, Any] = {
            "backend": backend, "host": host, "port": port, "db": db, "unix_socket_path": unix_socket_path,
            "prefix": prefix, "device": device, **kwargs,
        }  # fmt: skip
        return server_class().from_tensordict(self, **server)  # type: ignore[no-any-return]

    @classmethod
    def from_zarr(
        cls,
        filename: object,
        *,
        mode: str = "r",
        auto_batch_size: bool = False,
        batch_dims: int | None = None,
        batch_size: object = None,
        device: object = None,
        storage_options: StorageOptions | None = None,
    ) -> Self:
        """Open a Zarr group as a container; its tensors are read when they are used, chunk by chunk.

        Groups of any program open: those of xarray or anndata too, of Zarr v3 and (to read only) v2. A group in a group
        is a nested container. What has no form as a tensor is listed, and is an error when it is read; strings, one or
        a row of them, are values.

        Args:
            filename: a folder, a zip file, a URL of a folder, a `zarr.abc.store.Store`, or a `zarr.Group` that is open.
            mode: `"r"` to read only, `"r+"` to write too; see :class:`~tensordict.PersistentTensorDict`. A zip file is
                only read.
            auto_batch_size: find the longest batch size that fits, also when one was saved. A group of another program,
                in which none was, has that batch size anyway.
            batch_dims: the most dims that a batch size that is found so has, here and in nested containers.
            batch_size: that of the container.
            device: tensors are moved there when they are read.
            storage_options: of a URL, as in :meth:`load_memmap`.

        Returns:
            a :class:`~tensordict.PersistentTensorDict`, or the tensorclass over one that was saved.

        Raises:
            FileNotFoundError: there is nothing.
            ValueError: it is no Zarr group, or a shape in it does not begin with the batch size.
            ModuleNotFoundError: zarr is not installed.

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
        """
        return makers.open_store(  # type: ignore[no-any-return]
            filename,
            backend="zarr",
            mode=mode,
            auto_batch_size=auto_batch_size,
            batch_dims=batch_dims,
            batch_size=batch_size,
            device=device,
            storage_options=storage_options,
        )

    def to_zarr(
        self,
        filename: object,
        *,
        durable: bool = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        **kwargs: object,
    ) -> Self:
        """Write this container as a Zarr group (v3): a group per container, an array per leaf; many programs read it.

        Without options an array is one chunk that is not compressed: quick to write and to read as a whole. To read
        rows out of more than fits into memory, `chunks="rows"` cuts along the first dim, into about a MiB each; with
        very many chunks, `shards=` puts several into a file.

        A container saved at a path is replaced once the new one is whole; when writing fails it stays as it was.
        Processes that write to different chunks of a group at once lose nothing; of one chunk, the last one wins.

        Args:
            filename: the path of a folder; of a zip file, if it ends with `.zip`; a URL; or a `zarr.abc.store.Store`.
            durable: have the files survive a loss of power once this returns; of a store or a URL, without effect.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace what another program has written, too: a file or folder that is no group of this
                package, or has more in it. Of a store or a URL, delete all that is in it.
            storage_options: of a URL, as in :meth:`memmap`.
            **kwargs: passed to `zarr.create_array` for every tensor: `chunks` and `shards` (a row of sizes for the
                leading dims, an int for rows; `chunks="rows"`), `compressors`, `filters`, `serializer`, `fill_value`,
                `order`. A dict gives them by key: `chunks={"image": 16, ("next", "image"): 16}`; that of a container
                holds for all in it.

        Returns:
            a :class:`~tensordict.PersistentTensorDict` over the new group, open for writing (for reading over a zip
            file); a tensorclass over it for a tensorclass.

        Raises:
            UnsupportedEntryError: an entry cannot be stored; it is named.
            SaveError: there is something of another program.
            OSError: it cannot be written, or another process or thread is saving to it.
            TypeError: an argument is no option of arrays.
            ModuleNotFoundError: zarr is not installed.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> folder = tempfile.TemporaryDirectory()
            >>> td = TensorDict(a=torch.zeros(1000, 3), b={"c": torch.ones(1000)}, batch_size=[1000])
            >>> with td.to_zarr(f"{folder.name}/data.zarr", chunks={"a": 100}) as data:
            ...     data["b", "c"][:3]
            tensor([1., 1., 1.])
        """
        options: dict[str, Any] = {"durable": durable, "progress": progress, "overwrite": overwrite, **kwargs}
        with quiet(progress):
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
        **kwargs: object,
    ) -> Any:
        """Write this container as a store of a kind, at a path or in one that is given; see `to_h5` and `to_zarr`."""
        check_levels(self)
        refuse_sharded(self)
        kind = backend_of(backend)
        options = kind.check_options(kwargs)
        reopen = partial(makers.open_store, backend=backend, options=kwargs, is_new=True)
        if kind.opens_urls and is_url(filename):
            filename = Remote(filename, storage_options)
        if not isinstance(filename, (str, bytes, os.PathLike)):
            check_container(kind, filename, self)
            write_store(kind.create(filename, overwrite), self, options, progress)
            return reopen(filename, mode="r+")

        def check(path: str) -> None:
            refuse_other(path, backend, lambda path: kind.strangers(path, self))

        path = os.fsdecode(filename)
        transaction = TreeTransaction if kind.is_folder(path) else FileTransaction
        with transaction(path, durable=durable, check=None if overwrite else check) as save:
            with save.new_file(save.path):
                try:
                    write_store(kind.create(save.staged), self, options, progress)
                except OSError as error:
                    if error.filename != save.staged:
                        raise
                    raise files.named_os_error(error, "write the file", save.path) from error
            save.commit()
            # While nobody else saves there: HDF5 refuses to open what another process has open for writing.
            return reopen(save.path, mode=kind.choose_mode(path))


def server_class() -> Any:
    """The class of containers on a Redis server."""
    return registry.lookup("TensorDictStore")
