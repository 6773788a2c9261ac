"""Public free functions that make, save and load containers. Each calls a method of `TensorDict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from tensordict.containers.dense import TensorDict
from tensordict.convert.columns import Nulls
from tensordict.core.keys import Key
from tensordict.core.signatures import as_function, spells
from tensordict.io.formats.appending import append_rows
from tensordict.memory.mapped import PathLike

if TYPE_CHECKING:
    from pyarrow import Table  # type: ignore[import-untyped]
    from typing_extensions import TypedDict, Unpack

    from tensordict.containers.tensor_class import TensorClass
    from tensordict.ops.collection import TensorCollection
    from tensordict.ops.converting import FromDict
    from tensordict.ops.storing.persisting import OpenH5, OpenZarr

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

memmap = as_function(TensorDict.memmap, "data")
save = as_function(TensorDict.save, "data")
to_safetensors = as_function(TensorDict.to_safetensors, "data")


@spells(TensorDict.from_dict)
def from_dict(d: object, **options: Unpack[FromDict]) -> TensorDict:
    """Make a `TensorDict` from a (nested) dict; see :meth:`TensorDict.from_dict`.

    Example:
        >>> import torch
        >>> from tensordict import from_dict
        >>> from_dict({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, auto_batch_size=True).batch_size
        torch.Size([3])
    """
    return TensorDict.from_dict(d, **options)


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


def append_memmap(
    prefix: PathLike, rows: TensorCollection, *, allow_pickle: bool | None = None, durable: bool = False
) -> None:
    """Append rows to a save in a folder, along its first batch dim.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, append_memmap, load_memmap
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = TensorDict(a=torch.zeros(3), batch_size=[3]).memmap(folder)
        ...     append_memmap(folder, TensorDict(a=torch.ones(2), batch_size=[2]))
        ...     load_memmap(folder)["a"], saved["a"]
        (MemoryMappedTensor([0., 0., 0., 1., 1.]), MemoryMappedTensor([0., 0., 0.]))

    The new rows are written behind the old ones, in the same files, and become visible in one step. If the call fails,
    or its process is killed, the folder has the old save. Containers that were loaded before keep their rows, and share
    them with the save. A file with further hard links, such as a backup, is copied first.

    For rows that come in over time, use :class:`~tensordict.DatasetWriter`: each call of this function reads the
    description of the whole save.

    Args:
        prefix: the folder, which :func:`memmap` or :func:`save` wrote, here or in the reference.
        rows: a container with the keys, classes, dtypes and trailing shapes of the save. Its batch size may differ in
            the first dim. A value that all rows of the save share must be equal in `rows`. A `NonTensorStack` along the
            first dim grows.
        allow_pickle: load pickled values, to compare them. A pickle may run any code, so use this only for saves that
            you trust. Without it, a pickled value raises an error.
        durable: return when everything has reached the disk.

    Raises:
        SaveError: `prefix` is not a folder with a save; the save has no batch dims; an entry of `rows` does not fit;
            the save has a lazy stack or a ragged tensor, which cannot grow; or another process is saving there. Nothing
            has changed.
        OSError: a file cannot be written, or the disk is full. The save is unchanged.
    """
    append_rows(prefix, rows, allow_pickle=bool(allow_pickle), durable=durable)


def from_arrow(
    table: Any,
    *,
    copy: bool | None = None,
    nulls: Nulls = "raise",
    mask_key: Key | None = None,
    device: object = None,
    **options: Any,
) -> TensorDict:
    """Convert an Arrow table to a `TensorDict`; see :meth:`TensorDict.from_arrow`, which has further options.

    Example:
        >>> import pyarrow
        >>> from tensordict import from_arrow
        >>> td = from_arrow(pyarrow.table({"x": [1.0, None]}), nulls="mask")
        >>> td["x"], td["_mask", "x"]
        (tensor([1., nan], dtype=torch.float64), tensor([ True, False]))

    Args:
        table, copy, nulls, device, **options: as in the method.
        mask_key: the key of the container of the masks; `"_mask"` by default. The method puts each mask beside its
            column instead, as `<name>_mask`.
    """
    if nulls == "mask" and mask_key is None:
        mask_key = "_mask"
    return TensorDict.from_arrow(table, copy=copy, nulls=nulls, mask_key=mask_key, device=device, **options)


def to_arrow(td: TensorCollection) -> Table:
    """Convert a container to a `pyarrow.Table` with one row for each element of the first batch dim.

    See :meth:`TensorDict.to_arrow`, which takes options.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, to_arrow
        >>> to_arrow(TensorDict(a=torch.arange(2), batch_size=[2])).to_pydict()
        {'a': [0, 1]}
    """
    return td.to_arrow()


@spells(TensorDict.from_h5)
def from_h5(h5_file: object, **options: Unpack[OpenH5]) -> TensorCollection:
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
        auto_batch_size, batch_dims, device, batch_size, mode, non_tensor_as_stack, storage_options, cache_dir: as in
            the method.
    """
    return TensorDict.from_h5(h5_file, **options)


@spells(TensorDict.from_zarr)
def from_zarr(zarr_file: object, *, allow_pickle: bool | None = None, **options: Unpack[OpenZarr]) -> TensorCollection:
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
    return TensorDict.from_zarr(zarr_file, allow_pickle=allow_pickle, **options)
