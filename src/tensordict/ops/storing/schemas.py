"""Containers of zeros, in memory or on disk, from a description of their entries."""

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
    """`from_schema`."""

    # Where the entries of this class are, for those who say nothing else.
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
        """A container of zeros, of which every entry is described by a shape and a dtype; or the one that is on disk.

        Args:
            schema: maps each (nested) key to a pair `(shape, dtype)`, the shape being that of one element of the batch;
                or to another such mapping.
            batch_size: the batch size, which goes in front of all shapes.
            storage: where the entries are: `None` in memory; `"shared"` in shared memory; `"memmap"` in a folder, given
                as `prefix=`, or in anonymous memory; `"h5"` in an HDF5 file and `"zarr"` in a Zarr group, given as
                `filename=`; `"redis"` on a server, given as `host=`, `port=` or `unix_socket_path=`, which makes the
                zeros itself. On disk nothing is built in memory first. A save, file or group that is there, of the same
                entries, is opened and left as it is, unless `overwrite=True` is given too; a folder gets the entries
                that it lacks.
            device: the device of the entries in memory, or on which those of a file, a group or a server are read.
            **kwargs: further arguments of :meth:`memmap_like`, :meth:`to_h5`, :meth:`to_zarr` or
                :class:`~tensordict.store.TensorDictStore`.

        Returns:
            the container: a `TensorDict`, or a :class:`~tensordict.PersistentTensorDict` for `"h5"` and `"zarr"`, or a
            :class:`~tensordict.store.TensorDictStore` for `"redis"` and of that class.

        Raises:
            TypeError: an entry is no pair of a shape and a dtype; it is named.
            ValueError: `storage` is unknown, or arguments are given that it has not.
            SaveError: what is on disk has another structure; what differs is named.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> schema = {"obs": ([84, 84, 3], torch.uint8), "agent": {"reward": ([], torch.float32)}}
            >>> td = TensorDict.from_schema(schema, batch_size=[1000])
            >>> td["obs"].shape, td["agent", "reward"].dtype
            (torch.Size([1000, 84, 84, 3]), torch.float32)
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
            return server_class()._zeros(flat, size, device=device, **kwargs)  # type: ignore[no-any-return]
        result = makers.dense({}, size, None if storage or device is None else as_device(device), None)
        on_disk = storage in ("memmap", *BACKENDS)
        for path, (shape, dtype) in flat.items():
            full = torch.Size((*size, *shape))
            if on_disk:
                # On its way there one zero stands for all.
                zeros = torch.zeros((), dtype=dtype, device="cpu").expand(full)
            else:
                zeros = torch.zeros(full, dtype=dtype, device=device)
            result.set(path, zeros)
        if storage == "memmap":
            return result.memmap_like(kwargs.pop("prefix", None), **kwargs)  # type: ignore[no-any-return]
        if storage in BACKENDS:
            stored = _in_store(result, storage, kwargs.pop("filename"), **kwargs)
            return stored if device is None else stored.to(device)  # type: ignore[no-any-return]
        return result.share_memory_() if storage == "shared" else result  # type: ignore[return-value]


def _in_store(zeros: Any, backend: str, filename: Any, overwrite: bool = False, **kwargs: Any) -> Any:
    """The container over a store of zeros; over the one that is there, if it has the same entries."""
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
            raise TypeError(f"entry {joined(full)!r}: a schema has pairs (shape, dtype), got {spec!r:.80}")
        flat[full] = (as_size(spec[0]), spec[1])
