"""`TensorDict.from_schema`: make a container of zeros, in memory, on disk or on a server, from shapes and dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.devices import as_device
from tensordict.core.keys import Path, joined, path_of
from tensordict.core.shapes import as_size
from tensordict.io.remote.urls import is_url
from tensordict.io.saving import reopening
from tensordict.io.stores.backends import BACKENDS, backend_of
from tensordict.memory.names import without_scheme
from tensordict.ops.storing.persisting import server_class

if TYPE_CHECKING:
    from typing_extensions import Self

_STORAGES = (None, "memmap", *BACKENDS, "shared", "redis")


class Schemas(Contract):
    """The method `from_schema`."""

    # The default of `storage=`. Classes of containers in a store set it.
    _schema_storage: ClassVar[str | None] = None

    @classmethod
    def from_schema(
        cls,
        schema: Mapping[Any, Any],
        *,
        batch_size: Any = None,
        storage: str | None = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Make a container of zeros from the shape and the dtype of each entry, in memory, on disk or on a server.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> schema = {"obs": ([84, 84, 3], torch.uint8), "agent": {"reward": ([], torch.float32)}}
            >>> td = TensorDict.from_schema(schema, batch_size=[1000])
            >>> td["obs"].shape, td["agent", "reward"].dtype
            (torch.Size([1000, 84, 84, 3]), torch.float32)

        Args:
            schema: maps each (nested) key to a pair `(shape, dtype)`, where the shape has no batch dims; or to another
                such mapping.
            batch_size: the batch size, which is put in front of all shapes.
            storage: the place of the entries:

                - `None`: in memory; `"shared"`: in shared memory;
                - `"memmap"`: in the folder `prefix=`, or in anonymous memory without it;
                - `"h5"`, `"zarr"`: in the HDF5 file or Zarr group `filename=`;
                - `"redis"`: on the server `host=`, `port=` or `unix_socket_path=`.
            device: the device of entries in memory. Entries of a file, a group or a server are moved there when they
                are read.
            **kwargs: further arguments of :meth:`memmap_like`, :meth:`to_h5`, :meth:`to_zarr` or
                :class:`~tensordict.store.TensorDictStore`.

        Returns:
            a `TensorDict`; a :class:`~tensordict.PersistentTensorDict` for `"h5"` and `"zarr"`; a
            :class:`~tensordict.store.TensorDictStore` for `"redis"`.

        Raises:
            TypeError: an entry is not a pair of a shape and a dtype; the error names it.
            ValueError: `storage` is unknown, or does not take an argument.
            SaveError: the save, file or group exists and has another structure; the error names the differences.

        An existing save, file or group with the same entries is opened and keeps its content, unless you pass
        `overwrite=True`. Missing entries are added to a folder. On disk and on a server, no zeros are built in memory
        first.
        """
        storage = cls._schema_storage if storage is None else storage
        if storage not in _STORAGES:
            raise ValueError(f"storage is one of {_STORAGES}, got {storage!r}")
        if kwargs and storage not in ("memmap", *BACKENDS, "redis"):
            raise ValueError(f"storage={storage!r} takes no {sorted(kwargs)}")
        if storage in ("memmap", "shared") and device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"storage={storage!r} is CPU memory and has no device={str(device)!r}")
        if storage in BACKENDS and "filename" not in kwargs:
            raise ValueError(f"storage={storage!r} needs filename=")
        size = as_size(batch_size)
        flat: dict[Path, tuple[torch.Size, torch.dtype]] = {}
        _flatten(schema, (), flat)
        if storage == "redis":
            return server_class()._make_zeros(flat, size, device=device, **kwargs)  # type: ignore[no-any-return]
        result = makers.dense({}, size, None if storage or device is None else as_device(device), None)
        on_disk = storage in ("memmap", *BACKENDS)
        for path, (shape, dtype) in flat.items():
            full = torch.Size((*size, *shape))
            if on_disk:
                # An expanded zero takes no memory. It stands for all elements until they are written.
                zeros = torch.zeros((), dtype=dtype, device="cpu").expand(full)
            else:
                zeros = torch.zeros(full, dtype=dtype, device=device)
            result.set(path, zeros)
        if storage == "memmap":
            return result.memmap_like(kwargs.pop("prefix", None), **kwargs)  # type: ignore[no-any-return]
        if storage in BACKENDS:
            stored = _open_or_write(result, storage, kwargs.pop("filename"), **kwargs)
            return stored if device is None else stored.to(device)  # type: ignore[no-any-return]
        return result.share_memory_() if storage == "shared" else result  # type: ignore[no-any-return]


def _open_or_write(zeros: Any, backend: str, filename: Any, overwrite: bool = False, **kwargs: Any) -> Any:
    """Open the existing store if it has the same entries as `zeros`, or write `zeros` to a new one."""
    path = without_scheme(filename)
    options = {name: option for name, option in kwargs.items() if name != "storage_options"}

    def load() -> Any:
        where = kwargs.get("storage_options")
        return makers.open_store(path, backend=backend, mode="r+", storage_options=where, options=options)

    if not overwrite and (backend_of(backend).opens_urls or not is_url(path)):
        with contextlib.suppress(FileNotFoundError):
            return reopening.open_whole(zeros, str(path), load)
    return getattr(zeros, f"to_{backend}")(path, overwrite=overwrite, **kwargs)


def _flatten(schema: Mapping[Any, Any], path: Path, flat: dict[Path, tuple[torch.Size, torch.dtype]]) -> None:
    for key, spec in schema.items():
        full = (*path, *path_of(key))
        if isinstance(spec, Mapping):
            _flatten(spec, full, flat)
            continue
        if not isinstance(spec, (tuple, list)) or len(spec) != 2 or not isinstance(spec[1], torch.dtype):
            raise TypeError(f"entry {joined(full)!r}: a schema contains pairs (shape, dtype), got {spec!r:.80}")
        flat[full] = (as_size(spec[0]), spec[1])
