"""The formats side by side: opening, describing and writing a save of any of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tensordict.core import registry
from tensordict.core.devices import as_device
from tensordict.core.errors import SaveError
from tensordict.io import consolidated, safetensors
from tensordict.io.archive_reader import Archive
from tensordict.io.describe import Packed, described, left_pickled, outline_of_stored
from tensordict.io.detect import detect_format
from tensordict.io.forms import DICT, Form
from tensordict.io.loading import LoadOptions, load_directory
from tensordict.io.stores.backends import BACKENDS
from tensordict.io.stores.entries import noted_size
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path

DIRECTORY, ARCHIVE, CONSOLIDATED, SAFETENSORS = "directory", "archive", "consolidated", "safetensors"
FORMATS = (DIRECTORY, ARCHIVE, CONSOLIDATED, *BACKENDS, SAFETENSORS)
# The format that the name of a file stands for.
SUFFIXES = {
    "": DIRECTORY,
    ".tdz": ARCHIVE,
    ".consolidated": CONSOLIDATED,
    **{suffix: name for name, kind in BACKENDS.items() for suffix in kind.suffixes},
    ".safetensors": SAFETENSORS,
}


def open_save(path: PathLike, *, allow_pickle: bool = False) -> Any:
    """The container saved at `path`, in whatever format; its tensors are mapped, or read when they are used.

    Args:
        path: a folder or a file.
        allow_pickle: unpickle values, which runs code that is in the save.

    Raises:
        FileNotFoundError: there is nothing.
        SaveError: it is of no format that is known, or broken.
        UnsupportedEntryError: it holds a tensorclass that this program does not know, or a pickled value.
    """
    format = detect_format(path)
    if format in (DIRECTORY, ARCHIVE):
        return registry.lookup(DICT).load_memmap(path, allow_pickle=allow_pickle)
    return open_file(path, format)


def open_file(
    path: PathLike,
    format: str,
    device: Any = None,
    non_blocking: bool = False,
    *,
    mode: str = "r",
    num_threads: int = 0,
    robust_key: bool | None = True,
    allow_pickle: bool | None = None,
    progress: bool = False,
    **others: Any,
) -> Any:
    """The container in a file that is no archive; takes what `TensorDict.load_memmap` takes, as far as it can be had.

    Args:
        path: the file.
        format: its format.
        device: send the tensors there; those of a store when they are read.
        non_blocking: do not wait for the transfer.
        mode: of a store.
        num_threads, robust_key, allow_pickle: without effect: nothing is unpacked, encoded or pickled.
        progress: show a bar while the tensors of a safetensors file are sent to the device.
        others: must be `None`.

    Raises:
        ValueError: `out`, `keys`, `subpath`, or a mode that the format has not.
        OSError: the file cannot be read, or is broken.
    """
    given = sorted(name for name, value in others.items() if value is not None)
    if mode != "r" and format not in BACKENDS:
        given.append(f"mode={mode!r}")
    if given:
        raise ValueError(f"{given} cannot be had of {os.fspath(path)!r}, which is of the format {format!r}")
    target = None if device is None else as_device(device)
    if format in BACKENDS:
        return registry.lookup("PersistentTensorDict")._opened(path, backend=format, mode=mode, device=target)
    if format == SAFETENSORS:
        return safetensors.load(path, safetensors.SafetensorsOptions(device=target, progress=progress))
    container = consolidated.load(path)
    return container if target is None else container.to(target, non_blocking=non_blocking)


def describe_save(path: PathLike, complain: Callable[[OSError], Any] | None = None) -> tuple[str, Form]:
    """The format of the save at `path`, and its outline; no tensor is read.

    Args:
        path: a folder or a file.
        complain: is told what is wrong with an entry, and gives what stands in its place; without it, it is raised.

    Raises:
        FileNotFoundError: there is nothing.
        SaveError: it is of no format that is known, or broken.
    """
    format = detect_format(path)
    if format in BACKENDS:
        return format, outline_of_stored(_opened_store(path, format, complain is not None), complain)
    if format == CONSOLIDATED:
        return format, consolidated.load(path, described, complain)
    if format == SAFETENSORS:
        return format, safetensors.load(path, safetensors.SafetensorsOptions(complain=complain), described)
    options = LoadOptions(build=described, unpickle=left_pickled, complain=complain)
    if format == ARCHIVE:
        options.source = Packed(Archive(local_path(path)))
    return format, load_directory(path, options)


def _opened_store(path: PathLike, backend: str, lenient: bool) -> Any:
    """The container over a store, without the tensorclass that was saved."""
    # Its outline is checked entry by entry.
    data = registry.lookup("PersistentTensorDict")(filename=path, backend=backend, validate_batch_size=False)
    if noted_size(data._group) is None:
        # Of another program: the batch size is what the tensors have in common, as when it is loaded.
        try:
            with data._store.unnoted():
                data.auto_batch_size_()
        except SaveError:
            # What is broken is told entry by entry.
            if not lenient:
                raise
    return data


def write_save(
    container: Any,
    path: PathLike,
    format: str,
    *,
    compression: str | None = None,
    checksum: str | None = None,
    num_threads: int = 0,
    allow_pickle: bool = False,
    overwrite: bool = False,
) -> None:
    """Save a container in a format.

    Args:
        container: what to save.
        path: where.
        format: one of `FORMATS`.
        compression: how to compress, where the format can.
        checksum: the checksum to record of every tensor, where the format can.
        num_threads: how many threads write.
        allow_pickle: pickle values that JSON cannot hold, where the format can.
        overwrite: replace what is no save of the format, too.

    Raises:
        ValueError: the format has no form for something that is asked.
        SaveError, OSError: as the method of the container that writes the format.
    """
    compressible = (ARCHIVE, *BACKENDS)
    if compression is not None and format not in compressible:
        raise ValueError(f"the format {format!r} is not compressed; {' and '.join(map(repr, compressible))} can be")
    if checksum is not None and format in compressible:
        raise ValueError(f"the format {format!r} has no checksums to choose: {ARCHIVE!r} always has CRC-32")
    if format in (DIRECTORY, ARCHIVE):
        container.memmap(
            path,
            copy_existing=True,
            num_threads=num_threads,
            allow_pickle=allow_pickle,
            archive=format == ARCHIVE,
            compression=compression,
            checksum=checksum or False,
            overwrite=overwrite,
        )
    elif format == CONSOLIDATED:
        container.consolidate(path, num_threads=num_threads, checksum=checksum or False, overwrite=overwrite)
    elif format in BACKENDS:
        options = {} if compression is None else {"compression": compression}
        container._to_store(format, path, overwrite=overwrite, **options).close()
    else:
        container.to_safetensors(path, num_threads=num_threads, checksum=checksum or False, overwrite=overwrite)
