"""Methods that save containers to memory-mapped folders, archives and files of other formats, and load them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from tensordict.core.contract import ContainerT, Contract, underlying
from tensordict.core.devices import as_device, place_of
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.signatures import refuse_unknown, spells
from tensordict.io.formats import opening as formats
from tensordict.io.formats.archive import plan_archive, wants_archive
from tensordict.io.formats.directory import FolderOptions, plan_save
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.formats.value_files import choose_unpickle
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.uploads import save_file, save_folder
from tensordict.io.remote.urls import is_url
from tensordict.io.saving import checksums
from tensordict.io.saving.progress import hide_bars
from tensordict.io.specification import specification_of
from tensordict.io.stores.backends import BACKENDS
from tensordict.memory.mapped import Mode, PathLike
from tensordict.memory.names import META, scheme_of, without_scheme
from tensordict.memory.reserving import Preallocate, check_preallocate
from tensordict.ops.entries.saved_entries import watch_entries
from tensordict.ops.storing.refreshing import check_fit, take_over
from tensordict.parallel.sharded import has_sharded_leaves, save_whole

if TYPE_CHECKING:
    import pathlib

    from typing_extensions import Self, TypedDict, Unpack

    from tensordict.core.annotations import No, On
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

    class _Preallocated(_Like, total=False):
        preallocate: Preallocate

    class _InPlace(_Common, total=False):
        existsok: bool
        atomic: bool
        checksum: bool | str
        progress: bool | None

    class _Save(_Options, total=False):
        archive: bool | None
        compression: str | int | None
        atomic: bool
        checksum: bool | str
        progress: bool | None
        storage_options: StorageOptions | None
        full_tensor: bool

    class _Memmap(_Save, total=False):
        existsok: bool

    class LoadInto(TypedDict, total=False):
        allow_pickle: bool | None
        mode: Mode
        storage_options: StorageOptions | None
        cache_dir: CacheDir | None

    class _Loading(LoadInto, total=False):
        out: Any
        robust_key: bool | None
        subpath: Any
        num_threads: int
        keys: Any
        progress: bool | None

    _To = PathLike | None

    SelfT = TypeVar("SelfT", bound="Saving")


def _choose_options(
    container: Contract,
    prefix: PathLike | None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: str | int | None = None,
    atomic: bool = False,
    allow_pickle: bool | None = None,
    durable: bool = False,
    checksum: bool | str = False,
    progress: bool | None = None,
    overwrite: bool = False,
    storage_options: StorageOptions | None = None,
    full_tensor: bool = False,
) -> FolderOptions:
    """Return the options of a save, from the arguments of the public methods.

    Raises:
        ValueError: `atomic`, with neither a prefix nor a folder that the container is mapped from.
    """
    if atomic and prefix is None and not (container._is_memmap and container._memmap_prefix is not None):
        raise ValueError("atomic=True needs a path: pass prefix")
    return FolderOptions(
        num_threads, durable, checksums.algorithm(checksum), progress, overwrite, storage_options, copy_existing,
        existsok, robust_key is not False, allow_pickle=bool(allow_pickle), share_values=share_non_tensor,
        archive=archive, compression=compression, full_tensor=full_tensor, return_early=return_early,
    )  # fmt: skip


def _plan_load(
    device: Any = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    subpath: Any = None,
    mode: Mode = None,
    num_threads: int = 0,
    allow_pickle: bool | None = None,
    keys: Any = None,
    progress: bool | None = None,
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> tuple[LoadOptions, Access]:
    """Return the options of a load, from the arguments of the public methods.

    Raises:
        ValueError: `out` is on another device, or `keys` is given too.
        RuntimeError: `out` is locked.
    """
    target = None if device is None else as_device(device)
    if out is not None:
        if target is not None and out._device is not None and place_of(target) != place_of(out._device):
            raise ValueError(f"out is on {out._device}, which is not device={str(device)!r}; pass one of them")
        out._refuse_if_locked("load into it")
        if keys is not None:
            raise ValueError("out would lose the entries that are not loaded: pass out or keys, not both")
        target = target if out._device is None else out._device
    options = LoadOptions(
        target, non_blocking, robust_key is not False, unpickle=choose_unpickle(allow_pickle), subpath=subpath,
        keys=keys, mode=mode, num_threads=num_threads, out=out, shows=progress,
    )  # fmt: skip
    return options, Access.of(storage_options, cache_dir)


class Saving(Contract):
    """The methods `memmap`, `memmap_`, `memmap_like`, `save`, `load_memmap`, `load` and others."""

    # --- saving ---------------------------------------------------------------------------------------------------

    @overload
    def memmap(
        self: SelfT, prefix: _To = ..., copy_existing: bool = ..., *, return_early: No = ..., **options: Unpack[_Memmap]
    ) -> SelfT: ...
    @overload
    def memmap(
        self: SelfT, prefix: _To = ..., copy_existing: bool = ..., *, return_early: On, **options: Unpack[_Memmap]
    ) -> Future[SelfT]: ...
    @spells(_choose_options)
    def memmap(
        self: SelfT,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        return_early: bool = False,
        **options: Unpack[_Memmap],
    ) -> SelfT | Future[SelfT]:
        """Save to a folder, or an archive, and return a memory-mapped copy.

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

        In the folder, every tensor is a file `NAME.memmap` and every nested container a sub-folder. An older save is
        replaced as a whole: if the process is killed or the disk fills up, the folder has the old save or the new one.

        Args:
            prefix: the folder, created when needed; an archive, if the name ends with `.tdz` (see `archive`); or a URL
                (see below). `None` copies to anonymous memory that other processes can share.
            copy_existing: copy entries that are memory-mapped from other files. Without it they raise an error.
            num_threads: the number of threads that write. With 0, torch's threads (`torch.get_num_threads()`) write
                tensors larger than 64 MiB, and the calling thread writes the rest. With 1, the calling thread writes
                everything.
            return_early: save in the background and return a `concurrent.futures.Future` of the container. The
                tensors must not change until it is done.
            share_non_tensor: share new values (`update_`, `set_`) with all processes that receive this container or
                load the folder, as tensors are shared. Reading a value then looks into its file. Without it, a new
                value is written to the folder too, but other processes see it only when they load the folder.
            existsok: allow an older save at `prefix`.
            robust_key: percent-encode names that the file system or the layout cannot hold; `None` means `True`.
            archive: write one zip file that contains these files, instead of a folder; any zip tool opens it. `None`
                does so if `prefix` ends with `.tdz`. The file replaces an older one in one step. The tensors of the
                result lie over one private map of the file, and the result is not locked.
            compression: how to compress the tensors in an archive: `"stored"` (the default) does not, so that they can
                be mapped. `"deflate"` (in `num_threads` threads), `"bzip2"`, `"lzma"` and the constants of `zipfile`
                do, and the tensors are then loaded into memory.
            atomic: without effect, because every save to a path is atomic: after an error or a crash, the path has the
                content that it had before. `True` raises an error if there is no path.
            allow_pickle: pickle values that JSON cannot hold. Without it they raise an error. Loading such a save needs
                `allow_pickle=True` too. Values in anonymous memory are not pickled.
            durable: wait until all files have reached the disk, so that the save survives a loss of power.
            checksum: record a checksum of every tensor, for :func:`tensordict.verify`: `True` for CRC-32, or
                `"sha256"` or `"blake2b"`. Later writes to the saved tensors make it wrong.
            progress: show a progress bar (needs tqdm); by default on terminals and in notebooks, after a second.
            overwrite: replace an older save, whatever `existsok` says, and other files in the way of the new one.
            storage_options: for a URL, the options of fsspec's file system, such as `endpoint_url` and `key`. See
                below.
            full_tensor: gather each `DTensor` leaf. All ranks of its device mesh must make this call, with the same
                `prefix`. One rank writes the whole tensors, and every rank loads the save. An error on one rank is
                raised on all. The process group must not time out before the write ends. Without `full_tensor`,
                `DTensor` leaves raise an error.

        Returns:
            A new container of `MemoryMappedTensor`s, locked and on the CPU. After unlocking, `is_memmap()` is false.
            With `full_tensor` and `DTensor` leaves, every rank returns the container that :meth:`load_memmap` loads.

        Raises:
            RuntimeError: an entry is memory-mapped from other files, or cannot be saved; the save exists, with
                `existsok=False`; or a file that belongs to no save is in the way, without `overwrite`. Nothing has been
                written.
            RuntimeError: another process or thread is saving to `prefix`, or the folder cannot be replaced in one step
                because a file system is mounted there.
            OSError: the folder cannot be written, or the disk is full; the error names the path and the key.
            TransferError: with `full_tensor`, another rank failed, or the ranks have different leaves or paths.
            ValueError: `atomic` without a path.

        The new save is built in a hidden folder beside the old one, and then the two change places. Tensors that map
        the old files keep their data. Files that belong to no save are kept. A save that fails removes its files.

        A URL (`s3://`, `gs://`, `memory://`; needs the extra `remote`) is written by way of a temporary folder.
        Readers see a complete save or none. An existing save is replaced only with `overwrite=True`: an archive in one
        step, while a folder cannot be loaded during the replacement. The result is mapped privately, and is not locked.
        The configuration of fsspec (`FSSPEC_S3_ENDPOINT_URL`) applies too. Two entries of `storage_options` are for
        this package: `allow_secrets=True` allows secrets in pickles, and `redirect_hosts` lists other hosts that an
        HTTP server may redirect to.
        """
        if options:
            refuse_unknown(Saving.memmap, options)
        return _save(self, prefix, _choose_options(self, prefix, copy_existing, return_early=return_early, **options))

    @overload
    def memmap_(
        self: SelfT,
        prefix: _To = ...,
        copy_existing: bool = ...,
        num_threads: int = ...,
        *,
        return_early: No = ...,
        **options: Unpack[_InPlace],
    ) -> SelfT: ...
    @overload
    def memmap_(
        self: SelfT,
        prefix: _To = ...,
        copy_existing: bool = ...,
        num_threads: int = ...,
        *,
        return_early: On,
        **options: Unpack[_InPlace],
    ) -> Future[SelfT]: ...
    @spells(_choose_options, without="archive compression storage_options full_tensor")
    def memmap_(
        self: SelfT,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        num_threads: int = 0,
        *,
        return_early: bool = False,
        **options: Unpack[_InPlace],
    ) -> SelfT | Future[SelfT]:
        """Save to a folder and replace the entries of this container by memory-mapped ones.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2))
            >>> td.memmap_() is td, td["a"]
            (True, MemoryMappedTensor([0., 0.]))

        Takes the arguments of :meth:`memmap`, except `archive`, `compression`, `storage_options` and `full_tensor`.

        Returns:
            This container, locked and on the CPU, with `MemoryMappedTensor`s as entries. If saving fails, it is
            unchanged.

        Raises:
            UnsupportedEntryError: the entries are in a file; use :meth:`memmap`, which returns a copy.
            RuntimeError: the entries are parameters; use :meth:`memmap`, which returns a copy.
        """
        refuse_unknown(Saving.memmap_, options)
        how = _choose_options(
            self, prefix, copy_existing, num_threads=num_threads, return_early=return_early, archive=False, **options
        )
        how.inplace = True
        if self._holds_parameters:
            raise SaveError("parameters stay in memory, as optimizers hold them: memmap() returns a memory-mapped copy")
        container = underlying(self)
        if container._is_in_file:
            raise UnsupportedEntryError(
                "a container over a file, or over other containers, cannot be memory-mapped in place; "
                "memmap() returns a memory-mapped copy"
            )
        is_view = container is not self._wrapped_container()
        saved = _save(container if is_view else self, prefix, how)
        return self if is_view else saved

    @overload
    def memmap_like(
        self, prefix: _To = ..., copy_existing: bool = ..., *, return_early: No = ..., **options: Unpack[_Preallocated]
    ) -> Self: ...
    @overload
    def memmap_like(
        self, prefix: _To = ..., copy_existing: bool = ..., *, return_early: On, **options: Unpack[_Preallocated]
    ) -> Future[Self]: ...
    @spells(_choose_options, without="compression atomic checksum progress storage_options full_tensor")
    def memmap_like(
        self,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        return_early: bool = False,
        preallocate: Preallocate = "auto",
        **options: Unpack[_Like],
    ) -> Self | Future[Self]:
        """Open the save at `prefix`, or make a new save with the structure of this container and zeros.

        Example:
            >>> import tempfile
            >>> import torch
            >>> from tensordict import TensorDict
            >>> item = TensorDict(image=torch.ones(8, 8), label=torch.tensor(1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     item.expand(1000).memmap_like(folder)[3] = item
            ...     again = item.expand(1000).memmap_like(folder)
            >>> again["label"].sum()
            tensor(1)

        Use it to preallocate a large data set and fill it piece by piece: an expanded container takes no memory, and no
        zeros are written. A job that is restarted finds its data again.

        Args:
            prefix, num_threads, return_early, share_non_tensor, robust_key, archive, allow_pickle, durable: as in
                :meth:`memmap`.
            copy_existing: without effect, because no tensors are copied.
            existsok: allow an older save, which is opened.
            overwrite: replace an older save by a new one with zeros, whatever `existsok` says.
            preallocate: `True` reserves disk space for all tensors of a new save, or raises an error. `False` makes
                sparse files, which take space when they are written. `"auto"` reserves space if a tenth of the free
                space remains; otherwise it warns and makes sparse files, or raises an error for an archive. File
                systems that cannot reserve space get sparse files.

        Returns:
            a memory-mapped container, locked; not locked for an archive, which is loaded with `mode="r+"`.

        Raises:
            SaveError: the older save has other entries, batch sizes, shapes or dtypes, or `prefix` has a file that
                belongs to no save. The error names the differences, and nothing has changed.
            SaveError: an entry is new in the members of a ragged lazy stack, which have no files of their own.
            OSError: the disk has no space for all tensors, and sparse files are not allowed. No files are left.
            ValueError: `preallocate` has another value.

        Warns:
            UserWarning: with `"auto"`, the disk has no space for all tensors; the warning names both sizes.

        An older save keeps its tensors and values, and must have no entries that this container does not have. A folder
        gets its missing entries as zeros, in one step. An archive takes no new entries.

        If the disk is full, writes to sparse files through a container (`data[i] = item`, `update_`, `set_`, ...) raise
        an `OSError` and write nothing. Other writes (`data["image"].copy_`, in-place arithmetic, writes to ragged
        entries) end the process.
        """
        refuse_unknown(Saving.memmap_like, options)
        how = _choose_options(self, prefix, copy_existing, return_early=return_early, progress=False, **options)
        how.like, how.preallocate = True, check_preallocate(preallocate)
        return _save(self, prefix, how)

    @overload
    def save(
        self: SelfT, prefix: _To = ..., copy_existing: bool = ..., *, return_early: No = ..., **options: Unpack[_Save]
    ) -> SelfT: ...
    @overload
    def save(
        self: SelfT, prefix: _To = ..., copy_existing: bool = ..., *, return_early: On, **options: Unpack[_Save]
    ) -> Future[SelfT]: ...
    @spells(_choose_options, without="existsok")
    def save(
        self: SelfT,
        prefix: PathLike | None = None,
        copy_existing: bool = False,
        *,
        return_early: bool = False,
        **options: Unpack[_Save],
    ) -> SelfT | Future[SelfT]:
        """Save to a folder or a file. The suffix of the path decides the format, and :meth:`load` reads all of them.

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

        - no suffix, or an unknown one: a memory-mapped folder, as :meth:`memmap` writes it;
        - `.tdz`: an archive: the same files in one zip file, which can be mapped too and is easier to copy;
        - `.consolidated`: one file that is loaded with one map, as :meth:`consolidate` writes it;
        - `.safetensors`: a file that programs in many languages read, as :meth:`to_safetensors` writes it;
        - `.h5`, `.hdf5`: an HDF5 file, as :meth:`to_h5` writes it;
        - `.zarr`: a Zarr group, as :meth:`to_zarr` writes it;
        - `.parquet`, `.csv`, `.json`, `.jsonl`, `.ndjson`: a table, as :meth:`to_parquet`, :meth:`to_csv` and
          :meth:`to_json` write it.

        A path that ends with `/` is a folder, and so is any path with `archive=False`.

        Args:
            prefix: the path or URL; `None` copies to anonymous memory, as :meth:`memmap` does.
            copy_existing: as for :meth:`memmap`. Other formats always copy.
            return_early: save in the background and return a `concurrent.futures.Future`. The tensors must not change
                until it is done.
            archive: `True` for an archive and `False` for a folder, whatever the suffix.
            atomic: without effect, as in :meth:`memmap`: saves of every format are atomic.
            compression: for archives as in :meth:`memmap`; for HDF5 `"gzip"` or `"lzf"`; for Zarr `"gzip"`, `"zstd"` or
                `"blosc"`; for Parquet as in :meth:`to_parquet`.
            num_threads, checksum: for folders, archives, consolidated and safetensors files; as in :meth:`memmap`.
            durable: for all formats except CSV and JSON; as in :meth:`memmap`.
            share_non_tensor, robust_key: for folders and archives; as in :meth:`memmap`.
            allow_pickle: for folders, archives and Zarr; as in :meth:`memmap`.
            progress, overwrite, storage_options: for every format, as in its method.
            full_tensor: for every format, as in :meth:`memmap`.

        Returns:
            for a folder or an archive, the container over it; for `.consolidated`, `.h5` and `.zarr`, the result of the
            method (close the last two after use); for other formats, this container. With `full_tensor` and `DTensor`
            leaves, every rank returns the container that :meth:`load` loads.

        Raises:
            UnsupportedEntryError: the format cannot hold this container; or the suffix (`.pt`, `.pth`) stands for files
                of `torch.save`. Nothing has been written.
            ValueError: the format does not have one of the options; or `atomic` without a path.
            SaveError: the path exists and is not a save of this format, without `overwrite`.
            OSError: the file or folder cannot be written.
        """
        refuse_unknown(Saving.save, options)
        archive = options.get("archive")
        format = None if prefix is None or archive is not None else formats.format_of_name(prefix)
        if prefix is None or format in (None, formats.DIRECTORY, formats.ARCHIVE):
            options["archive"] = True if format == formats.ARCHIVE else archive
            return self.memmap(prefix, copy_existing, return_early=return_early, **options)  # type: ignore[call-overload, no-any-return]
        given: dict[str, Any] = {name: value for name, value in options.items() if name not in ("archive", "atomic")}
        gathers, robust_key = given.pop("full_tensor", False), given.pop("robust_key", True)
        formats.check_options(prefix, format, {**given, "robust_key": robust_key is False})
        if gathers and has_sharded_leaves(self):

            def write_and_close(whole: Self) -> None:
                written: Any = formats.write_save(whole, without_scheme(prefix), format, **given)
                if format in BACKENDS:
                    written.close()

            load = partial(self.load, prefix, storage_options=given.get("storage_options"))
            return save_whole(self, prefix, return_early, write_and_close, load)  # type: ignore[no-any-return]
        write = partial(formats.write_save, self, without_scheme(prefix), format, **given)
        return _run_early(write) if return_early else write()

    dumps = save

    def is_memmap(self) -> bool:
        """Return whether this container is memory-mapped. Unlocking ends this.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=0)
            >>> td.is_memmap(), td.memmap().is_memmap()
            (False, True)
        """
        # Ask the container behind a lazy view. The view itself is never memory-mapped, as it can get entries in memory.
        return underlying(self)._is_memmap  # type: ignore[no-any-return]

    @property
    def saved_path(self) -> pathlib.Path | None:
        """The folder that this container was saved to or loaded from; `None` for anonymous memory.

        Raises:
            AttributeError: the container was neither saved nor loaded, or has been unlocked since.
        """
        if self._is_memmap or self._memmap_prefix is not None:
            return self._memmap_prefix
        raise AttributeError("this container has no saved path: it is not memory-mapped; see memmap()")

    # --- loading --------------------------------------------------------------------------------------------------

    @classmethod
    @spells(_plan_load)
    def load_memmap(
        cls: type[SelfT], prefix: PathLike, device: Any = None, non_blocking: bool = False, **options: Unpack[_Loading]
    ) -> SelfT:
        """Load a container that was saved to a folder or an archive.

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

        The tensors map their files: a file is read when it is used, and writing to a tensor changes its file. The
        length of every file is checked before it is mapped.

        Args:
            prefix: the folder or the archive, or the URL of one (`s3://`, `gs://`, `http://`, `memory://`; needs the
                extra `remote`). From a URL, only the descriptions and the requested tensors are fetched, to a local
                copy that is mapped. Writes to the tensors then stay in memory.
            device: send the tensors there. `"meta"` gives their shapes and dtypes without opening their files; the same
                holds in `FakeTensorMode`.
            non_blocking: do not wait for the transfer to `device`.
            out: a container to load into. It keeps its nested containers, and loses entries that the save does not
                have.
            robust_key: `True` or `None` if file names may be percent-encoded, `False` if they are plain names.
            subpath: load only this nested container: a nested key, or names joined with `/`.
            mode: with `"r"`, writes to the tensors stay in memory. With `"r+"` they change the files, which must be
                writable; an archive must not be compressed (see :func:`refresh_archive_checksums`). `None` stands for
                `"r"` for an archive. For a folder, writes to the tensors change writable files, and new entries stay
                in memory. See below for new entries.
            num_threads: the number of threads that decompress an archive.
            allow_pickle: load pickled values. A pickle may run any code, so use this only for saves that you trust.
                Without it, a pickled value raises an error that names its entry.
            keys: load only the entries at these nested keys (in the container at `subpath`). Other files are not
                opened.
            progress: show a progress bar (needs tqdm) while tensors are sent to a device; by default on terminals and
                in notebooks, after a second.
            storage_options: for a URL, as in :meth:`memmap`.
            cache_dir: for a URL, a folder or a :class:`~tensordict.RemoteCache` that keeps the fetched files. They are
                fetched again only when they change behind the URL. Other users must have no access to the folder (mode
                0700). The environment variable `TENSORDICT_CACHE_DIR` sets a default. Without a cache, the local copy
                is deleted together with the tensors.

        Returns:
            a new container of the class that was saved, not locked; or `out`.

        Raises:
            FileNotFoundError: the folder or a file in it is missing.
            KeyError: the save has no entry at one of `keys`.
            RuntimeError: the files are inconsistent; the error names the path and the key.
            PermissionError: a file is read-only, with `mode="r+"`.

        **New entries.** With `mode="r+"`, `loaded["new"] = value` writes a new entry to the folder, beside the others:
        readers see the save without it or with it, whole, also after a crash. The container then has the entry over
        its file. A value for an existing entry is copied into it. Deleting or renaming an entry leaves its file. With
        any other mode, and for archives, new entries stay in memory, and the first one warns with a `UserWarning`.
        :meth:`memmap_` saves a container with all its entries.

        The tensors of an archive are plain tensors over one map of it. A compressed archive is read into memory.
        After `mode="r"`, the container has no `saved_path`, and new values (`update_`) stay in memory too.
        """
        if options:
            refuse_unknown(Saving.load_memmap, options)
        how, access = _plan_load(device, non_blocking, **options)
        if is_url(prefix):
            loaded = formats.fetch_save(prefix, how, access)
        else:
            loaded = formats.map_save(without_scheme(prefix), how)
            if how.mapped:
                watch_entries(loaded, how.mode)
        return loaded if how.out is None else _load_into(how.out, loaded)  # type: ignore[no-any-return]

    @classmethod
    @spells(_plan_load)
    def load(
        cls: type[SelfT], prefix: PathLike, device: Any = None, non_blocking: bool = False, **options: Unpack[_Loading]
    ) -> SelfT:
        """Load a save of any format.

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

        The format is recognized by the content of the file or folder, whatever its name. Only tables are recognized by
        their suffixes, as listed in :meth:`save`.

        Args:
            prefix: the folder or the file, or its URL; for tables also a pattern (`"part-*.parquet"`). From the URL of
                a folder or an archive, only the requested tensors are fetched; from a Zarr group, chunks are fetched
                when they are used, and `cache_dir` does not keep them; other files are fetched as a whole.
            device, non_blocking, robust_key, num_threads, allow_pickle, progress, storage_options, cache_dir: as in
                :meth:`load_memmap`.
            out, subpath, keys: for a folder or an archive, as in :meth:`load_memmap`.
            mode: for a folder or an archive, as in :meth:`load_memmap`; for an HDF5 file or a Zarr group, `"r"` (the
                default) or `"r+"`.

        Returns:
            a new container:

            - from a folder or an archive, as :meth:`load_memmap` returns it;
            - from a file of :meth:`consolidate` or in the safetensors format, with privately mapped tensors;
            - from HDF5 and Zarr, a :class:`~tensordict.PersistentTensorDict`, whose tensors are read when they are
              used. Close it after use;
            - from a table, a `TensorDict` in memory, as :meth:`from_parquet`, :meth:`from_csv` and :meth:`from_json`
              return it.

        Raises:
            FileNotFoundError: the path does not exist.
            ValueError: the format of the file is unknown, the file is broken, or its format does not take an argument.
                Load files of `torch.save` with `torch.load`.
        """
        refuse_unknown(Saving.load, options)
        how, access = _plan_load(device, non_blocking, **options)
        loaded = formats.load(as_url(without_scheme(prefix)), how, access)
        if how.mapped and (os.path.exists(f"{prefix}/{META}") or str(prefix).endswith(".tdz")):
            watch_entries(loaded, how.mode)
        return loaded if how.out is None else _load_into(how.out, loaded)  # type: ignore[no-any-return]

    @spells(_plan_load, without="device non_blocking out subpath num_threads keys progress")
    def load_memmap_(self, prefix: PathLike, robust_key: bool | None = True, **options: Unpack[LoadInto]) -> Self:
        """Load a save into this container: replace its entries by the entries of the save; see :meth:`load_memmap`.

        Example:
            >>> import tempfile
            >>> from tensordict import TensorDict
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = TensorDict(a=1).memmap(folder)
            ...     list(TensorDict(b=2).load_memmap_(folder).keys())
            ['a']

        To keep the entries and copy into their memory, use `td.update_(TensorDict.load_memmap(prefix))`.

        Args:
            prefix, robust_key, allow_pickle, mode, storage_options, cache_dir: as in :meth:`load_memmap`.

        Returns:
            the same container.

        Raises:
            RuntimeError: this container is locked, or an entry does not fit its batch size.
        """
        refuse_unknown(Saving.load_memmap_, options)
        self.load_memmap(prefix, out=self, robust_key=robust_key, **options)
        return self

    def load_(self, prefix: PathLike, *args: Any, **kwargs: Any) -> Self:
        """Load a save into this container; the same as :meth:`load_memmap_`."""
        return self.load_memmap_(prefix, *args, **kwargs)

    def memmap_refresh_(self, *, allow_pickle: bool | None = None) -> Self:
        """Load the changes in the saved folder: new, replaced and removed entries. Works on locked containers.

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

        Tensors whose files have not been replaced are kept.

        Returns:
            the same container.

        Raises:
            RuntimeError: this container was not saved to or loaded from a folder.
        """
        if self._memmap_prefix is None:
            raise SaveError("only a container that was saved to or loaded from a folder can be refreshed; see memmap()")
        loaded = load_directory(self._memmap_prefix, LoadOptions(unpickle=choose_unpickle(allow_pickle)))
        # For a tensorclass, the folder has the save of the container inside.
        _load_into(self._wrapped_container(), loaded)
        return self


def _load_into(out: Any, loaded: Any) -> Any:
    """Replace the entries of `out` by the loaded ones, and return `out`."""
    # If `out` is a tensorclass and the save is not, load into the container inside.
    target = out if specification_of(loaded).is_tensorclass else out._wrapped_container()
    check_fit(target, loaded, ())
    take_over(target, loaded)
    return out


def _save(
    container: ContainerT,
    prefix: PathLike | None,
    options: FolderOptions,
) -> ContainerT | Future[ContainerT]:
    if options.full_tensor and has_sharded_leaves(container):
        return save_whole(  # type: ignore[no-any-return]
            container,
            prefix,
            options.return_early,
            lambda whole: _save(whole, prefix, replace(options, full_tensor=False, return_early=False)),
            partial(_load_whole, prefix or "", options),
        )
    options.existsok |= options.overwrite
    is_archive = wants_archive(prefix, options.archive, options.compression)
    if prefix is not None and is_url(prefix):
        if options.like or options.inplace:
            raise SaveError(
                f"{as_url(prefix)!r} is a URL ({scheme_of(prefix)}:), whose files cannot be mapped: "
                "memmap() uploads a save"
            )
        # The upload always copies entries that are mapped from other files.
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


def _load_whole(prefix: PathLike, options: FolderOptions) -> Any:
    """Load the save that another rank has written."""
    how = LoadOptions(robust=options.robust, unpickle=choose_unpickle(options.allow_pickle))
    if is_url(prefix):
        return formats.fetch_save(prefix, how, Access.of(options.storage_options))
    return formats.map_save(without_scheme(prefix), how)


def _run_early(run: Callable[[], Any]) -> Future[Any]:
    """Run a save in a new thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="tensordict-save")
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future
