"""Public free functions that make, save and load containers. Each calls a method of `TensorDict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from tensordict.containers.dense import TensorDict
from tensordict.memory.mapped import PathLike

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import TypedDict, Unpack

    from tensordict.containers.tensor_class import TensorClass
    from tensordict.io.remote.remote_saves import CacheDir
    from tensordict.io.remote.urls import StorageOptions
    from tensordict.ops.collection import TensorCollection
    from tensordict.ops.storing.saving import _Save as _FileOptions

    _Container = TypeVar("_Container", bound=TensorCollection)
    _P = ParamSpec("_P")
    _C = TypeVar("_C")

    class _DataclassOptions(TypedDict, total=False):
        auto_batch_size: bool
        batch_dims: int | None
        batch_size: object
        frozen: bool
        autocast: bool
        nocast: bool
        inplace: bool
        shadow: bool
        tensor_only: bool
        device: object

    @overload
    def from_dataclass(
        obj: type, *, dest_cls: None = ..., **options: Unpack[_DataclassOptions]
    ) -> type[TensorClass]: ...
    @overload
    def from_dataclass(obj: object, *, dest_cls: type[_C], **options: Unpack[_DataclassOptions]) -> _C: ...
    @overload
    def from_dataclass(obj: Any, *, dest_cls: None = ..., **options: Unpack[_DataclassOptions]) -> TensorClass: ...
    def from_dataclass(obj: object, **options: Any) -> Any: ...

else:
    from tensordict.convert.dataclasses import from_dataclass as from_dataclass


from_any = TensorDict.from_any
from_arrow = TensorDict.from_arrow
from_csv = TensorDict.from_csv
from_json = TensorDict.from_json
from_namedtuple = TensorDict.from_namedtuple
from_pandas = TensorDict.from_pandas
from_parquet = TensorDict.from_parquet
from_polars = TensorDict.from_polars
from_pytree = TensorDict.from_pytree
from_struct_array = TensorDict.from_struct_array
from_tuple = TensorDict.from_tuple
fromkeys = TensorDict.fromkeys


def _of_any_class(load: Callable[_P, TensorDict]) -> Callable[_P, TensorCollection]:
    """Return `load` itself. For type checkers the result may be any container, not only a `TensorDict`."""
    return load


load = _of_any_class(TensorDict.load)
load_memmap = _of_any_class(TensorDict.load_memmap)
from_consolidated = _of_any_class(TensorDict.from_consolidated)
from_safetensors = _of_any_class(TensorDict.from_safetensors)


def from_dict(
    d: object,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: object = None,
    batch_size: object = None,
) -> TensorDict:
    """Make a `TensorDict` from a (nested) dict; see :meth:`TensorDict.from_dict`.

    Example:
        >>> import torch
        >>> from tensordict import from_dict
        >>> from_dict({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, auto_batch_size=True).batch_size
        torch.Size([3])
    """
    return TensorDict.from_dict(
        d, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
    )


def make_tensordict(
    input_dict: Mapping[Any, Any] | None = None,
    batch_size: object = None,
    device: object = None,
    auto_batch_size: bool | None = None,
    **kwargs: object,
) -> TensorDict:
    """Make a `TensorDict` from a (nested) dict, from keyword arguments, or from both.

    Example:
        >>> import torch
        >>> from tensordict import make_tensordict
        >>> sorted(make_tensordict({"a": torch.zeros(3)}, b=torch.ones(3), batch_size=[3]).keys())
        ['a', 'b']

    Args:
        input_dict: a mapping from (nested) keys to values, or a container.
        batch_size: the batch size; empty by default.
        device: move the entries to this device.
        auto_batch_size: without a `batch_size`, give every level the longest one that its entries share.
        **kwargs: further entries. They replace entries of the same name in `input_dict`.
    """
    entries = kwargs if input_dict is None else ({**dict(input_dict.items()), **kwargs} if kwargs else input_dict)
    return TensorDict.from_dict(entries, auto_batch_size=auto_batch_size, batch_size=batch_size, device=device)


@overload
def memmap(
    data: _Container,
    prefix: PathLike | None = ...,
    copy_existing: bool = ...,
    *,
    return_early: Literal[False] = ...,
    existsok: bool = ...,
    **options: Unpack[_FileOptions],
) -> _Container: ...
@overload
def memmap(
    data: _Container,
    prefix: PathLike | None = ...,
    copy_existing: bool = ...,
    *,
    return_early: Literal[True],
    existsok: bool = ...,
    **options: Unpack[_FileOptions],
) -> Future[_Container]: ...
def memmap(
    data: Any,
    prefix: PathLike | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    existsok: bool = True,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: object = None,
    atomic: bool = False,
    allow_pickle: bool | None = None,
    durable: bool = False,
    checksum: bool | str = False,
    progress: bool | None = None,
    overwrite: bool = False,
    storage_options: StorageOptions | None = None,
    full_tensor: bool = False,
) -> Any:
    """Save a container and return its memory-mapped version; see :meth:`TensorDict.memmap`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, memmap
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = memmap(TensorDict(a=torch.ones(2)), folder)
        >>> saved["a"]
        MemoryMappedTensor([1., 1.])

    Args:
        data: the container.
        prefix, copy_existing, num_threads, return_early, share_non_tensor, existsok, robust_key, archive, compression,
            atomic, allow_pickle, durable, checksum, progress, overwrite, storage_options, full_tensor: as in
            the method.
    """
    return data.memmap(
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        existsok=existsok,
        robust_key=robust_key,
        archive=archive,
        compression=compression,
        atomic=atomic,
        allow_pickle=allow_pickle,
        durable=durable,
        checksum=checksum,
        progress=progress,
        overwrite=overwrite,
        storage_options=storage_options,
        full_tensor=full_tensor,
    )


@overload
def save(
    data: _Container,
    prefix: PathLike | None = ...,
    copy_existing: bool = ...,
    *,
    return_early: Literal[False] = ...,
    **options: Unpack[_FileOptions],
) -> _Container: ...
@overload
def save(
    data: _Container,
    prefix: PathLike | None = ...,
    copy_existing: bool = ...,
    *,
    return_early: Literal[True],
    **options: Unpack[_FileOptions],
) -> Future[_Container]: ...
def save(
    data: Any,
    prefix: PathLike | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
    archive: bool | None = None,
    compression: object = None,
    atomic: bool = False,
    allow_pickle: bool | None = None,
    durable: bool = False,
    checksum: bool | str = False,
    progress: bool | None = None,
    overwrite: bool = False,
    storage_options: StorageOptions | None = None,
    full_tensor: bool = False,
) -> Any:
    """Save a container in the format given by the suffix of the path; see :meth:`TensorDict.save`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, load, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(TensorDict(a=torch.ones(2)), folder)
        ...     again = load(folder)
        >>> again["a"]
        MemoryMappedTensor([1., 1.])

    Args:
        data: the container.
        prefix, copy_existing, num_threads, return_early, share_non_tensor, robust_key, archive, compression,
            atomic, allow_pickle, durable, checksum, progress, overwrite, storage_options, full_tensor: as in
            the method.

    Returns:
        the result of the method; for a folder, the container over its files.
    """
    return data.save(
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        robust_key=robust_key,
        archive=archive,
        compression=compression,
        atomic=atomic,
        allow_pickle=allow_pickle,
        durable=durable,
        checksum=checksum,
        progress=progress,
        overwrite=overwrite,
        storage_options=storage_options,
        full_tensor=full_tensor,
    )


def to_safetensors(
    data: Any,
    path: PathLike,
    *,
    separator: str = ".",
    num_threads: int = 0,
    durable: bool = False,
    checksum: bool | str = False,
    progress: bool | None = None,
    overwrite: bool = False,
    storage_options: StorageOptions | None = None,
) -> None:
    """Save a container to one file in the safetensors format; see :meth:`TensorDict.to_safetensors`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, from_safetensors, to_safetensors
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     to_safetensors(TensorDict(a=torch.ones(2)), folder + "/td.safetensors")
        ...     again = from_safetensors(folder + "/td.safetensors")
        >>> again["a"]
        tensor([1., 1.])

    Args:
        data: the container.
        path, separator, num_threads, durable, checksum, progress, overwrite, storage_options: as in the method.
    """
    data.to_safetensors(
        path,
        separator=separator,
        num_threads=num_threads,
        durable=durable,
        checksum=checksum,
        progress=progress,
        overwrite=overwrite,
        storage_options=storage_options,
    )


def from_h5(
    h5_file: object,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: object = None,
    batch_size: object = None,
    mode: str = "r",
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> TensorCollection:
    """Open an HDF5 file as a container; see :meth:`TensorDict.from_h5`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, from_h5
        >>> folder = tempfile.TemporaryDirectory()
        >>> TensorDict(a=torch.ones(2)).to_h5(f"{folder.name}/td.h5").close()
        >>> with from_h5(f"{folder.name}/td.h5", batch_size=[2]) as data:
        ...     data[0]["a"]
        tensor(1.)

    Args:
        h5_file: the path of the file or its URL, or an open `h5py.File` or `h5py.Group`.
        auto_batch_size, batch_dims, device, batch_size, mode, storage_options, cache_dir: as in the method.
    """
    return TensorDict.from_h5(
        h5_file,
        mode=mode,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        device=device,
        storage_options=storage_options,
        cache_dir=cache_dir,
    )


def from_zarr(
    zarr_file: object,
    *,
    mode: str = "r",
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    batch_size: object = None,
    device: object = None,
    storage_options: StorageOptions | None = None,
) -> TensorCollection:
    """Open a Zarr group as a container; see :meth:`TensorDict.from_zarr`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, from_zarr
        >>> from zarr.storage import MemoryStore
        >>> store = MemoryStore()
        >>> TensorDict(a=torch.ones(2)).to_zarr(store).close()
        >>> from_zarr(store, batch_size=[2])[0]["a"]
        tensor(1.)

    Args:
        zarr_file: a folder, a zip file, a URL, a `zarr.abc.store.Store`, or an open `zarr.Group`.
        mode, auto_batch_size, batch_dims, batch_size, device, storage_options: as in the method.
    """
    return TensorDict.from_zarr(
        zarr_file,
        mode=mode,
        auto_batch_size=auto_batch_size,
        batch_dims=batch_dims,
        batch_size=batch_size,
        device=device,
        storage_options=storage_options,
    )
