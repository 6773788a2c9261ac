"""`memmap`, `save`, `load` and `load_memmap` as functions."""

from __future__ import annotations

from typing import Any

from tensordict import registry
from tensordict.memmap import PathLike


def memmap(
    data: Any,
    prefix: PathLike | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
) -> Any:
    """Save a container and return its memory-mapped version; see :meth:`TensorDict.memmap`.

    Args:
        data: the container.
        prefix, copy_existing, num_threads, return_early, share_non_tensor, robust_key: as in the method.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, memmap
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = memmap(TensorDict(a=torch.ones(2)), folder)
        >>> saved["a"]
        MemoryMappedTensor([1., 1.])
    """
    return data.memmap(
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        robust_key=robust_key,
    )


def save(
    data: Any,
    prefix: PathLike | None = None,
    copy_existing: bool = False,
    *,
    num_threads: int = 0,
    return_early: bool = False,
    share_non_tensor: bool = False,
    robust_key: bool | None = True,
) -> Any:
    """Save a container to a folder; the same as :func:`memmap`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, load, save
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save(TensorDict(a=torch.ones(2)), folder)
        ...     again = load(folder)
        >>> again["a"]
        MemoryMappedTensor([1., 1.])
    """
    return memmap(
        data,
        prefix,
        copy_existing,
        num_threads=num_threads,
        return_early=return_early,
        share_non_tensor=share_non_tensor,
        robust_key=robust_key,
    )


def load_memmap(
    prefix: PathLike,
    device: Any = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    allow_pickle: bool | None = None,
) -> Any:
    """Load the container that was saved in a folder; see :meth:`TensorDict.load_memmap`.

    Args:
        prefix: the folder.
        device, non_blocking, out, robust_key, allow_pickle: as in the method.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import TensorDict, load_memmap
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = TensorDict(a=torch.ones(2)).save(folder)
        ...     meta = load_memmap(folder, device="meta")
        >>> meta["a"].device
        device(type='meta')
    """
    return registry.lookup("TensorDict").load_memmap(
        prefix, device, non_blocking, out=out, robust_key=robust_key, allow_pickle=allow_pickle
    )


def load(
    prefix: PathLike,
    device: Any = None,
    non_blocking: bool = False,
    *,
    out: Any = None,
    robust_key: bool | None = True,
    allow_pickle: bool | None = None,
) -> Any:
    """Load the container that was saved in a folder; the same as :func:`load_memmap`."""
    return load_memmap(prefix, device, non_blocking, out=out, robust_key=robust_key, allow_pickle=allow_pickle)
