"""Saving: containers as memory-mapped folders, and their way back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from tensordict.core.contract import ContainerT, Contract, underlying
from tensordict.core.devices import as_device, place_of
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats import opening as formats
from tensordict.io.formats.archive import plan_archive, wants_archive
from tensordict.io.formats.directory import FolderOptions, plan_save
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.formats.value_files import Unpickle, refuse_pickle, unpickle
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.uploads import save_file, save_folder
from tensordict.io.remote.urls import is_url
from tensordict.io.saving import checksums
from tensordict.io.saving.progress import hide_bars
from tensordict.io.specification import specification_of
from tensordict.io.stores.backends import BACKENDS
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import scheme_of, without_scheme
from tensordict.memory.reserving import Preallocate, check_preallocate
from tensordict.ops.storing.refreshing import check_fit, take_over
from tensordict.parallel.sharded import holds_sharded, save_whole

if TYPE_CHECKING:
    import pathlib

    import torch
    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.io.remote.remote_saves import CacheDir
    from tensordict.io.remote.urls import StorageOptions

    class _Common(TypedDict, total=False):
        share_non_tensor: bool
        robust_key: bool | None
        allow_pickle: bool | None
        durable: bool
        overwrite: bool

    class _Options(_Common, total=False):
        num_threads: int

    class _Like(_Options, total=False):
        existsok: bool
        archive: bool | None
        preallocate: Preallocate

    class _InPlace(_Common, total=False):
        existsok: bool
        checksum: bool | str
        progress: bool | None

    class _Save(_Options, total=False):
        archive: bool | None
        compression: str | int | None
        checksum: bool | str
        progress: bool | None
        storage_options: StorageOptions | None
        full_tensor: bool

    class _Memmap(_Save, total=False):
        existsok: bool

    _To = PathLike | None


class Saving(Contract):
    """`memmap`, `save`, `load_memmap` and what they give."""

    # --- saving ---------------------------------------------------------------------------------------------------

    @overload
    def memmap(
        self,
        prefix: _To = ...,
        copy_existing: bool = ...,
        *,
        return_early: Literal[False] = ...,
        **options: Unpack[_Memmap],
    ) -> Self: ...
    @overload
    def memmap(
        self, prefix: _To = ..., copy_existing: bool = ..., *, return_early: Literal[True], **options: Unpack[_Memmap]
    ) -> Future[Self]: ...
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
        compression: str | int | None = None,
        allow_pickle: bool | None = None,
        durable: bool = False,
        checksum: bool | str = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        full_tensor: bool = False,
    ) -> Self | Future[Self]:
        """Save to a folder, or an archive, and return a memory-mapped copy.

        Every tensor becomes the file `NAME.memmap`, every nested container a sub-folder, and `meta.json` is written
        last. A save that is there already is replaced as a whole: a process killed at any moment, or a disk that
        fills up, leaves the old one or the new one. It is built in a folder beside it, whose name begins with a dot,
        and then the two change places. Tensors that map the old files keep them, and files that are no part of a
        save stay where they are. When saving fails, what it created is removed.

        Args:
            prefix: the folder, created when needed; `None` copies to anonymous memory that other processes can
                share. A name that ends with `.tdz` is that of an archive, see `archive`. A URL (`s3://`, `gs://`,
                `memory://`; needs the extra `remote`) is saved to by way of a temporary folder: readers see all of it
                or nothing. What is there is replaced with `overwrite=True` only; an archive in one step, while a
                folder that is replaced is no save in between. The result is mapped privately, and not locked.
            copy_existing: allow entries that are memory-mapped from other files, and copy these.
            num_threads: the number of threads that write. 0 has those of torch (`torch.get_num_threads()`) write what
                is larger than 64 MiB, and the calling one the rest; 1 has the calling one write all.
            return_early: save in the background and return a `concurrent.futures.Future` of the container. The
                tensors must not change until it is done.
            share_non_tensor: have all processes that get this container, or load the folder, see new values of entries
                that are no tensors (`update_`, `set_`), as they see those of tensors; reading one then looks at its
                file. Otherwise a new value is written to the folder too, and others see it when they load it.
            existsok: allow `prefix` to hold a save already.
            robust_key: percent-encode the names that the file system or the layout cannot hold (`None`: as `True`).
            archive: write one zip file with the same files in it, which any zip tool opens; `None` does so when
                `prefix` ends with `.tdz`. It is written beside the old one, which it replaces in one step. The result
                is what `load_memmap` gives: tensors over one private map of the file, not locked.
            compression: of the tensors in an archive: `"stored"` (the default, which can be mapped), `"deflate"`
                (in `num_threads` threads), `"bzip2"`, `"lzma"`, or the constant of `zipfile`. They are then loaded
                into memory.
            allow_pickle: pickle values that are no tensors and that JSON cannot hold; without it, they are refused.
                Such a save is loaded with `allow_pickle=True` only. In anonymous memory values stay as they are.
            durable: have everything reach the disk, so that the save survives a loss of power too.
            checksum: record a checksum of every tensor, for :func:`tensordict.verify`: `True` for CRC-32, or
                `"sha256"` or `"blake2b"`. Writing into the saved tensors later makes it wrong.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace what is there, whatever `existsok` says: also files that belong to no save, at the path
                of an archive or in the folder under a name that the save has. Without it they are an error.
            storage_options: of a URL: what fsspec's file system for it takes, such as `endpoint_url` and `key`;
                fsspec's own configuration (`FSSPEC_S3_ENDPOINT_URL`) holds too. Two options are of this package:
                `allow_secrets=True` lets pickles have the secrets among them, and `redirect_hosts` names the hosts
                that a server of HTTP may redirect to, beside itself.
            full_tensor: gather each `DTensor` leaf on all ranks of its device mesh, which all have to make this call
                with the same `prefix`. One rank writes the whole tensors, and every rank loads the save. An error on
                one rank is raised on all. The process group must not time out before the write ends. Without
                `full_tensor`, `DTensor` leaves are refused.

        Returns:
            A new container, locked and on the CPU, of `MemoryMappedTensor`s; unlocking it ends `is_memmap()`.
            With `full_tensor` and `DTensor` leaves, the container that :meth:`load_memmap` gives, on every rank.

        Raises:
            RuntimeError: an entry is memory-mapped from elsewhere, cannot be saved, or (with `existsok=False`)
                exists; or a file that belongs to no save is in the way. Nothing has been written then.
            RuntimeError: another process or thread is saving to `prefix`, or what is there cannot be replaced in one
                step (it is where a file system is mounted).
            OSError: the folder cannot be written, or the disk is full; names the path and the key.
            TransferError: with `full_tensor`, another rank failed, or the ranks have different leaves or paths.

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
        options = FolderOptions(
            num_threads, durable, checksums.algorithm(checksum), progress, overwrite, storage_options, copy_existing,
            existsok, robust_key is not False, allow_pickle=bool(allow_pickle), share_values=share_non_tensor,
            archive=archive, compression=compression, full_tensor=full_tensor, return_early=return_early,
        )  # fmt: skip
        return _save(self, prefix, options)

    @overload
    def memmap_(
        self,
        prefix: _To = ...,
        copy_existing: bool = ...,
        num_threads: int = ...,
        *,
        return_early: Literal[False] = ...,
        **options: Unpack[_InPlace],
    ) -> Self: ...
    @overload
    def memmap_(
        self,
        prefix: _To = ...,
        copy_existing: bool = ...,
        num_threads: int = ...,
        *,
        return_early: Literal[True],
        **options: Unpack[_InPlace],
    ) -> Future[Self]: ...
    def memmap_(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        num_threads: int = 0,
        *,
        return_early: bool = False,
        share_non_tensor: bool = False,
        existsok: bool = True,
        robust_key: bool | None = True,
        allow_pickle: bool | None = None,
        durable: bool = False,
        checksum: bool | str = False,
        progress: bool | None = None,
        overwrite: bool = False,
    ) -> Self | Future[Self]:
        """Save to a folder and make this container the memory-mapped one; arguments as in :meth:`memmap`.

        Returns:
            This container, now locked and on the CPU, its entries replaced by `MemoryMappedTensor`s. When saving
            fails it is unchanged.

        Raises:
            UnsupportedEntryError: the entries are in a file, and stay there; `memmap` gives a memory-mapped copy.
            RuntimeError: the entries are parameters, and stay in memory.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.memmap_() is td, td["a"]
            (True, MemoryMappedTensor([0., 0.]))
        """
        if self._holds_parameters:
            raise SaveError("parameters stay in memory, as optimizers hold them: memmap() gives a memory-mapped copy")
        container = underlying(self)
        if container._is_in_file:
            raise UnsupportedEntryError(
                "a container over a file, or over other containers, cannot become a memory-mapped one in place; "
                "memmap() gives such a copy"
            )
        options = FolderOptions(
            num_threads, durable, checksums.algorithm(checksum), progress, overwrite, None, copy_existing, existsok,
            robust_key is not False, inplace=True, allow_pickle=bool(allow_pickle), share_values=share_non_tensor,
            archive=False, return_early=return_early,
        )  # fmt: skip
        is_view = container is not self._wrapped_container()
        saved = _save(container if is_view else self, prefix, options)
        return self if is_view else saved

    @overload
    def memmap_like(
        self,
        prefix: _To = ...,
        copy_existing: bool = ...,
        *,
        return_early: Literal[False] = ...,
        **options: Unpack[_Like],
    ) -> Self: ...
    @overload
    def memmap_like(
        self, prefix: _To = ..., copy_existing: bool = ..., *, return_early: Literal[True], **options: Unpack[_Like]
    ) -> Future[Self]: ...
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
        allow_pickle: bool | None = None,
        durable: bool = False,
        overwrite: bool = False,
        preallocate: Preallocate = "auto",
    ) -> Self | Future[Self]:
        """Open the save at `prefix`, or make one of the same structure as this container whose tensors are zero.

        A job that is started again finds what it has written: the entries of a save that is there are kept, with their
        content, and so are its values that are no tensors. A folder gets the entries that it lacks, as zeros, in one
        step; the other entries stay the same files. All entries of the save must be asked for, with the same batch
        sizes, shapes and dtypes: otherwise an error names the difference, and nothing changes. An archive takes no new
        entries.

        Of a new one nothing is written, so that an expanded container (which takes no memory) can be preallocated and
        then filled piece by piece. The disk keeps room for it where there is enough. Otherwise its files are sparse,
        and take room with each write. What is assigned to them through a container (`data[i] = item`, `update_`,
        `set_`, ...) is an `OSError` on a full disk, with nothing written; other writes (`data["image"].copy_`,
        arithmetic in place, to ragged entries) end the process then. An archive is loaded with `mode="r+"`, and is
        not locked.

        Args:
            prefix, num_threads, return_early, share_non_tensor, robust_key, archive, allow_pickle, durable: as in
                :meth:`memmap`.
            copy_existing: without effect, since no tensors are copied.
            existsok: allow that there is a save, to be opened or overwritten.
            overwrite: replace what is there, whatever `existsok` says: its tensors are zero then.
            preallocate: `True` has the disk keep room for all tensors of a new save, or raises. `False` makes sparse
                files. `"auto"` has it keep room where a tenth of the free space is left then, and else warns and makes
                sparse files; an archive raises instead. File systems that cannot keep room have sparse files.

        Raises:
            SaveError: there is a save with other entries, or a file that belongs to no save; what differs is named.
            SaveError: a new entry is one of the members of a ragged lazy stack, which have no files of their own.
            OSError: the disk has no room for all of it, and it is not to be sparse; nothing is left then.
            ValueError: `preallocate` is something else.

        Warns:
            UserWarning: with `"auto"`, the disk has no room for all of it; names both sizes.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> item = TensorDict(image=torch.ones(8, 8), label=torch.tensor(1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     data = item.expand(1000).memmap_like(folder)
            ...     data[3] = item
            ...     more = item.set("score", torch.tensor(0.5))
            ...     again = more.expand(1000).memmap_like(folder)
            >>> again["label"].sum(), again["score"].sum()
            (tensor(1), tensor(0.))
        """
        options = FolderOptions(
            num_threads, durable, "", False, overwrite, None, copy_existing, existsok, robust_key is not False,
            like=True, preallocate=check_preallocate(preallocate), allow_pickle=bool(allow_pickle),
            share_values=share_non_tensor, archive=archive, return_early=return_early,
        )  # fmt: skip
        return _save(self, prefix, options)

    @overload
    def save(
        self,
        prefix: _To = ...,
        copy_existing: bool = ...,
        *,
        return_early: Literal[False] = ...,
        **options: Unpack[_Save],
    ) -> Self: ...
    @overload
    def save(
        self, prefix: _To = ..., copy_existing: bool = ..., *, return_early: Literal[True], **options: Unpack[_Save]
    ) -> Future[Self]: ...
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
        compression: str | int | None = None,
        allow_pickle: bool | None = None,
        durable: bool = False,
        checksum: bool | str = False,
        progress: bool | None = None,
        overwrite: bool = False,
        storage_options: StorageOptions | None = None,
        full_tensor: bool = False,
    ) -> Self | Future[Self]:
        """Save in the format that the suffix of the path stands for.

        - no suffix, or an unknown one: a folder, and `.tdz`: an archive, both as by :meth:`memmap`;
        - `.consolidated`: a file, as by :meth:`consolidate`;
        - `.safetensors`: a file, as by :meth:`to_safetensors`;
        - `.h5`, `.hdf5`: an HDF5 file, as by :meth:`to_h5`;
        - `.zarr`: a Zarr group, as by :meth:`to_zarr`;
        - `.parquet`, `.csv`, `.json`, `.jsonl`, `.ndjson`: a table, as by :meth:`to_parquet`, :meth:`to_csv` and
          :meth:`to_json`.

        :meth:`load` reads all of them. A path that ends with `/` means a folder, as does any path with `archive=False`
        and any path that is given to :meth:`memmap`.

        Args:
            prefix: the path or URL; `None` copies to anonymous memory, as :meth:`memmap` does.
            copy_existing: as for :meth:`memmap`. Other formats always copy.
            return_early: save in the background and return a `concurrent.futures.Future`. The tensors must not change
                until it is done.
            archive: `True` for an archive and `False` for a folder, whatever the suffix.
            compression: of archives as for :meth:`memmap`; `"gzip"` and `"lzf"` of HDF5; `"gzip"`, `"zstd"` and
                `"blosc"` of Zarr; of Parquet as for :meth:`to_parquet`.
            num_threads, checksum: of folders, archives, consolidated and safetensors files.
            durable: of all but CSV and JSON.
            share_non_tensor, robust_key, allow_pickle: of folders and archives.
            progress, overwrite, storage_options: of every format, as of its method.
            full_tensor: of every format, as for :meth:`memmap`.

        Returns:
            for a folder or an archive the container over it; for `.consolidated`, `.h5` and `.zarr` the result of the
            method (close the last two after use); for other formats this container.
            With `full_tensor` and `DTensor` leaves, what :meth:`load` gives, on every rank.

        Raises:
            UnsupportedEntryError: the format cannot hold this container, or the suffix (`.pt`, `.pth`) stands for
                files of `torch.save`. Nothing has been written.
            ValueError: the format does not have an option that is given.
            SaveError: without `overwrite`, there is something else than a save of the format.
            OSError: it cannot be written.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.arange(3), batch_size=[3])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for name in ("x", "x.tdz", "x.safetensors", "x.csv"):
            ...         _ = td.save(f"{folder}/{name}")
            ...         print(name, TensorDict.load(f"{folder}/{name}")["a"].tolist())
            x [0, 1, 2]
            x.tdz [0, 1, 2]
            x.safetensors [0, 1, 2]
            x.csv [0, 1, 2]
        """
        format = None if prefix is None or archive is not None else formats.format_of_name(prefix)
        options: dict[str, Any] = {
            "num_threads": num_threads, "share_non_tensor": share_non_tensor, "compression": compression,
            "allow_pickle": allow_pickle, "durable": durable, "checksum": checksum, "progress": progress,
            "overwrite": overwrite, "storage_options": storage_options,
        }  # fmt: skip
        if prefix is not None and format not in (None, formats.DIRECTORY, formats.ARCHIVE):
            formats.check_options(prefix, format, {**options, "robust_key": robust_key is False})
            if full_tensor and holds_sharded(self):

                def write_and_close(whole: Self) -> None:
                    written: Any = formats.write_save(whole, without_scheme(prefix), format, **options)
                    if format in BACKENDS:
                        written.close()

                load = partial(self.load, prefix, storage_options=storage_options)
                return save_whole(self, prefix, return_early, write_and_close, load)  # type: ignore[no-any-return]
            write = partial(formats.write_save, self, without_scheme(prefix), format, **options)
            return _run_early(write) if return_early else write()
        options |= {"robust_key": robust_key, "return_early": return_early, "full_tensor": full_tensor}
        archive = True if format == formats.ARCHIVE else archive
        return self.memmap(prefix, copy_existing, archive=archive, **options)  # type: ignore[no-any-return]

    dumps = save

    def is_memmap(self) -> bool:
        """Whether this container has been memory-mapped (and not been unlocked since)."""
        # A lazy view says of itself that no files back it: what is added to it has none.
        return underlying(self)._is_memmap  # type: ignore[no-any-return]

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
        keys: Any = None,
        progress: bool | None = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Load a container that was saved to a folder or an archive.

        The tensors map their files: nothing is read until it is used, and writing to them writes the files. A file
        that we may not write is mapped privately. Every length is checked against the file before it is mapped. Those
        of an archive are plain tensors over one map of it; where it is compressed, they are read into memory.

        Args:
            prefix: the folder, or the archive; or the URL of one (`s3://`, `gs://`, `http://`, `memory://`; needs the
                extra `remote`), of which the descriptions and the bytes of what is loaded are fetched to a local copy,
                which is mapped. What is written to the tensors stays in memory then.
            device: send the tensors there. `"meta"` gives their shapes and dtypes, and no file of theirs is
                opened; the same holds in `FakeTensorMode`.
            non_blocking: do not wait for the transfer to `device`.
            out: a container that is given the loaded entries, and loses those that the save has not; its own nested
                containers are kept.
            robust_key: whether the names of the files are percent-encoded (`None`: as `True`, which finds plain
                names too).
            subpath: load only this nested container: a nested key, or names joined with `/`.
            mode: of an archive: what is written to the tensors stays in memory (`"r"`), or goes to the file (`"r+"`;
                see :func:`refresh_archive_checksums`), which must then not be compressed.
            num_threads: the number of threads that inflate a compressed archive.
            allow_pickle: load values that were pickled, which may run any code: only for saves that you trust. Without
                it, nothing is unpickled, and such a value is an error that names its entry.
            keys: load only the entries at these nested keys (of the container at `subpath`); no other file is opened.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
                Mapping a file takes no time; sending it to a device does.
            storage_options: of a URL, as in :meth:`memmap`.
            cache_dir: of a URL: a folder, or a :class:`~tensordict.RemoteCache`, that keeps what is fetched, so that it
                is not fetched again as long as it is the same behind the URL. Its folder must be closed to other users
                (mode 0700). The environment variable `TENSORDICT_CACHE_DIR` names one for all calls. Without, the copy
                is gone when the tensors are.

        Returns:
            A new container (of the class that was saved), or `out`. It is not locked.

        Raises:
            FileNotFoundError: when the folder or a file in it is missing.
            KeyError: when there is no entry at one of `keys`.
            RuntimeError: when the files do not add up; the path and the key are named.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict(a=torch.zeros(2), b={"c": torch.ones(2)}).memmap(folder)
            ...     inner = TensorDict.load_memmap(folder, subpath="b")
            ...     part = TensorDict.load_memmap(folder, keys=["a"])
            >>> inner["c"], list(part.keys())
            (MemoryMappedTensor([1., 1.]), ['a'])
        """
        options = LoadOptions(
            _target(device, out, keys), non_blocking, robust_key is not False, unpickle=_unpickler(allow_pickle),
            subpath=subpath, keys=keys, mode=mode, num_threads=num_threads, out=out, shows=progress,
        )  # fmt: skip
        access = Access.of(storage_options, cache_dir)
        return _given(out, formats.map_save(without_scheme(prefix), options, access))  # type: ignore[no-any-return]

    @classmethod
    def load(
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
        keys: Any = None,
        progress: bool | None = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Load a container that was saved, in any format.

        A folder and an archive are loaded as :meth:`load_memmap` does. Of a file that :meth:`consolidate`,
        :meth:`to_safetensors` (or another program) or :meth:`to_h5` has written, the tensors are mapped privately, or
        read from the HDF5 file when they are used; close that when it is no longer needed. So are those of a Zarr
        group, a folder or a zip file. The content of a file says what it is, and not its name. Only tables go by
        their suffixes (see :meth:`save`): they are read as by :meth:`from_parquet`, :meth:`from_csv` and
        :meth:`from_json`.

        Args:
            prefix: the folder or the file, or its URL: of a folder or an archive, what is loaded is fetched, of a Zarr
                group the chunks that are used, when they are (and not kept by `cache_dir`), else all of the file. Of
                tables it may be a pattern (`"part-*.parquet"`).
            device, non_blocking, robust_key, num_threads, allow_pickle, progress, storage_options, cache_dir: as in
                :meth:`load_memmap`.
            out, subpath, keys: of a folder or an archive, as in :meth:`load_memmap`.
            mode: of an archive, an HDF5 file or a Zarr group.

        Returns:
            A new container, of the class that was saved; for HDF5 and Zarr a :class:`~tensordict.PersistentTensorDict`;
            for tables a `TensorDict` in memory.

        Raises:
            FileNotFoundError: there is nothing.
            ValueError: the format of the file is unknown, the file is broken, or its format does not take an argument;
                files of `torch.save` are for `torch.load`.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.ones(2))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = td.save(folder + "/1"), td.save(folder + "/2.tdz"), td.consolidate(folder + "/3")
            ...     td.to_safetensors(folder + "/4")
            ...     [bool((TensorDict.load(f"{folder}/{name}") == td).all()) for name in ("1", "2.tdz", "3", "4")]
            [True, True, True, True]
        """
        options = LoadOptions(
            _target(device, out, keys), non_blocking, robust_key is not False, unpickle=_unpickler(allow_pickle),
            subpath=subpath, keys=keys, mode=mode, num_threads=num_threads, out=out, shows=progress,
        )  # fmt: skip
        access = Access.of(storage_options, cache_dir)
        return _given(out, formats.load(as_url(without_scheme(prefix)), options, access))  # type: ignore[no-any-return]

    def load_memmap_(
        self,
        prefix: PathLike,
        robust_key: bool | None = True,
        *,
        allow_pickle: bool | None = None,
        storage_options: StorageOptions | None = None,
        cache_dir: CacheDir | None = None,
    ) -> Self:
        """Give this container the entries of a save, and drop those that the save has not; see :meth:`load_memmap`.

        The entries are replaced and not written into: to keep their memory, use
        `td.update_(TensorDict.load_memmap(prefix))`.

        Raises:
            RuntimeError: when this container is locked, or an entry does not fit its batch size.
        """
        self.load_memmap(
            prefix,
            out=self,
            robust_key=robust_key,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
            cache_dir=cache_dir,
        )
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
        loaded = load_directory(self._memmap_prefix, LoadOptions(unpickle=_unpickler(allow_pickle)))
        # The folder is that of the container behind a tensorclass.
        _given(self._wrapped_container(), loaded)
        return self


def _target(device: Any, out: Any, keys: object) -> torch.device | None:
    """The device to load to, which is that of `out` where it has one.

    Raises:
        ValueError: `out` is on another device, or there are `keys` for it.
        RuntimeError: `out` is locked.
    """
    target = None if device is None else as_device(device)
    if out is None:
        return target
    if target is not None and out._device is not None and place_of(target) != place_of(out._device):
        raise ValueError(f"out is on {out._device}, which is not device={str(device)!r}; pass one of them")
    out._refuse_if_locked("load into it")
    if keys is not None:
        raise ValueError("out loses the entries that are not loaded: pass out or keys, not both")
    return target if out._device is None else out._device


def _unpickler(allow_pickle: bool | None) -> Unpickle:
    return unpickle if allow_pickle else refuse_pickle


def _given(out: Any, loaded: Any) -> Any:
    """What was loaded; without being a new container where `out` is to take it over."""
    if out is None:
        return loaded
    # The folder that a tensorclass names is that of the container behind it.
    into = out if specification_of(loaded).is_tensorclass else out._wrapped_container()
    check_fit(into, loaded, ())
    take_over(into, loaded)
    return out


def _save(
    container: ContainerT,
    prefix: PathLike | None,
    options: FolderOptions,
) -> ContainerT | Future[ContainerT]:
    if options.full_tensor and holds_sharded(container):
        return save_whole(  # type: ignore[no-any-return]
            container,
            prefix,
            options.return_early,
            lambda whole: _save(whole, prefix, replace(options, full_tensor=False, return_early=False)),
            partial(
                formats.map_save,
                without_scheme(prefix or ""),
                LoadOptions(robust=options.robust, unpickle=_unpickler(options.allow_pickle)),
                Access.of(options.storage_options),
            ),
        )
    options.existsok |= options.overwrite
    is_archive = wants_archive(prefix, options.archive, options.compression)
    if prefix is not None and is_url(prefix):
        if options.like or options.inplace:
            raise SaveError(
                f"{as_url(prefix)!r} is a URL ({scheme_of(prefix)}:), and there are no files for a container to be "
                "over: memmap() uploads a save"
            )
        # What is mapped from elsewhere is copied in any case.
        staged = replace(options, copy_existing=True, durable=False)

        def write(path: str) -> Any:
            return (plan_archive if is_archive else plan_save)(container, path, staged)()

        upload = save_file if is_archive else save_folder

        def run() -> Any:
            with hide_bars(options.progress):
                return upload(prefix, options.storage_options, options.overwrite, write)

    elif is_archive:
        run = plan_archive(container, prefix or "", options)
    else:
        run = plan_save(container, prefix, options)
    if not options.return_early:
        saved: ContainerT = run()
        return saved
    return _run_early(run)


def _run_early(run: Callable[[], Any]) -> Future[Any]:
    """Run a save in a thread of its own."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="tensordict-save")
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future
