"""The formats side by side: opening, describing and writing a save of any of them."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tensordict.core import makers, registry
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.keys import Path
from tensordict.io.formats import consolidated, safetensors
from tensordict.io.formats.archive import load_archive
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.detect import PICKLED, detect_format, is_known
from tensordict.io.formats.loading import LoadOptions, load_directory, read_directory
from tensordict.io.formats.structure import Complain
from tensordict.io.formats.value_files import left_pickled, refuse_pickle, unpickle
from tensordict.io.formats.zipping import STORED
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_rows import describe_rows
from tensordict.io.remote.remote_saves import Access, CacheDir, RemoteSave, read_remote
from tensordict.io.remote.urls import Remote, StorageOptions, is_url
from tensordict.io.saving.progress import bytes_on_disk, progress_bar, quiet
from tensordict.io.specification import DICT, LeafSpec, Specification
from tensordict.io.stores.backends import BACKENDS, backend_at, backend_of
from tensordict.io.stores.entries import specification_in
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import LEAF_SUFFIX, META, SCHEMA, TABLE_SUFFIX, local_path, without_scheme

if TYPE_CHECKING:
    from tensordict.io.saving.progress import Progress
    from tensordict.io.saving.verification import Report

T = TypeVar("T")

DIRECTORY, ARCHIVE, CONSOLIDATED, SAFETENSORS = "directory", "archive", "consolidated", "safetensors"
# What is not one save, but made of many.
DATASET = "dataset"
FORMATS = (DIRECTORY, ARCHIVE, CONSOLIDATED, *BACKENDS, SAFETENSORS)
PARQUET, CSV, JSON, JSON_LINES = "parquet", "csv", "json", "json lines"
# The tables that suffixes stand for.
TABLES = {".parquet": PARQUET, ".csv": CSV, ".json": JSON, ".jsonl": JSON_LINES, ".ndjson": JSON_LINES}
# The formats that suffixes stand for, for `save`, `load` and the command `tensordict convert`.
SUFFIXES = {
    "": DIRECTORY,
    ".tdz": ARCHIVE,
    ".consolidated": CONSOLIDATED,
    **{suffix: name for name, kind in BACKENDS.items() for suffix in kind.suffixes},
    ".safetensors": SAFETENSORS,
    **TABLES,
}
# The methods that read and write a table, and what they are given.
_TABLE_METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    PARQUET: ("from_parquet", "to_parquet", {}),
    CSV: ("from_csv", "to_csv", {}),
    JSON: ("from_json", "to_json", {}),
    JSON_LINES: ("from_json", "to_json", {"lines": True}),
}
# The options of `write_save` that every format takes, and the further ones of each.
_COMMON_OPTIONS = frozenset({"overwrite", "progress", "storage_options"})
_FILE_OPTIONS = frozenset({"num_threads", "checksum", "durable"})
_FOLDER_OPTIONS = _FILE_OPTIONS | {"share_non_tensor", "robust_key", "allow_pickle"}
_OPTIONS: dict[str, frozenset[str]] = {
    DIRECTORY: _FOLDER_OPTIONS,
    ARCHIVE: (_FOLDER_OPTIONS | {"compression"}) - {"checksum"},
    CONSOLIDATED: _FILE_OPTIONS,
    SAFETENSORS: _FILE_OPTIONS,
    **dict.fromkeys(BACKENDS, frozenset({"compression", "durable"})),
    PARQUET: frozenset({"compression", "durable"}),
    CSV: frozenset(),
    JSON: frozenset(),
    JSON_LINES: frozenset(),
    DATASET: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Above:
    """A format of a room above this one: how a save is opened (with its mode), described, written and verified."""

    open: Callable[[PathLike, str, Access], Any]
    describe: Callable[[PathLike, Complain | None, Access], Specification]
    write: Callable[[Any, PathLike, Access], None]
    verify: Callable[[Report, int, Progress | None, Access], None]


# By format; the modules that have one add it.
ABOVE: dict[str, Above] = {}


def format_of_name(path: PathLike) -> str | None:
    """The format that the suffix of a path or URL stands for; `None` for an unknown suffix.

    Raises:
        UnsupportedEntryError: the suffix stands for files of `torch.save`.
    """
    shown = os.fsdecode(path)
    suffix = "" if shown.endswith("/") else os.path.splitext(shown)[1].lower()
    if suffix in PICKLED:
        raise UnsupportedEntryError(
            f"{shown!r}: {suffix!r} is the suffix of files that torch.save writes and torch.load reads; call these, or "
            "choose a name without a suffix (a folder) or with '.tdz' (an archive)"
        )
    return SUFFIXES.get(suffix)


def read_at(url: PathLike, access: Access, use: Callable[[RemoteSave], T], above: Callable[[str, Above], T]) -> T:
    """What `use` makes of the save at a URL, as `read_remote` has it; or `above` of what is of a format above.

    Raises:
        FileNotFoundError: there is neither.
        SaveError: as `read_remote`.
    """
    try:
        return read_remote(url, access, use)
    except FileNotFoundError:
        # Asked last, as it is a request of its own.
        if DATASET not in ABOVE or Remote(url, access.storage_options).find(SCHEMA) is None:
            raise
        return above(DATASET, ABOVE[DATASET])


def format_to_load(path: PathLike) -> str:
    """The format of what is to be loaded; that of a folder with nothing known is `DIRECTORY`, whose loader says so."""
    shown = os.fspath(path)
    table = TABLES.get(os.path.splitext(shown)[1].lower())
    # Readers of tables take patterns, too.
    if table and not os.path.isdir(shown) and not (os.path.isfile(shown) and is_known(shown)):
        return table
    is_other = os.path.lexists(f"{shown}/{SCHEMA}") or bool(backend_at(shown))
    known = os.path.isfile(shown) or (is_other and not os.path.lexists(f"{shown}/{META}"))
    return detect_format(path) if known else DIRECTORY


def table_at(url: PathLike, access: Access) -> str | None:
    """The kind of table at a URL, which may be a pattern; `None` for anything else."""
    shown = os.fspath(url)
    table = TABLES.get(os.path.splitext(shown)[1].lower())
    if table is None or glob.has_magic(shown):
        return table
    # A folder may have such a name, too.
    return None if Remote(url, access.storage_options).find() is None else table


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
    path = as_url(without_scheme(path))
    options = LoadOptions(unpickle=unpickle if allow_pickle else refuse_pickle)
    if is_url(path):
        return load(path, options, Access.of(None))
    return load(path, options, Access(), detect_format(path))


def load(path: PathLike, options: LoadOptions, access: Access, format: str | None = None) -> Any:
    """The container saved at a path or URL, in any format; see `TensorDict.load`.

    Args:
        path: where.
        options: how to load it.
        access: how a URL is reached.
        format: the format of what is at a path; found out by default.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: the format is unknown, the file is broken, or the format does not take an option.
    """
    if not is_url(path):
        format = format or format_to_load(path)
        return (load_mapped if format in (DIRECTORY, ARCHIVE) else open_file)(path, options, access, format)
    if (table := table_at(path, access)) is not None:
        return open_file(path, options, access, table)

    def use(save: RemoteSave) -> Any:
        if save.format in (DIRECTORY, ARCHIVE):
            return load_mapped(save, options, access)
        return save.keep_for(open_file(save.in_place or save.local(), options, access, save.format))

    with quiet(options.shows):
        return read_at(path, access, use, lambda format, _: open_file(path, options, access, format))


def load_mapped(path: PathLike | RemoteSave, options: LoadOptions, access: Access, format: str = "") -> Any:
    """The container in a folder or an archive, at a path or URL; see `TensorDict.load_memmap`."""
    if options.mode not in ("r", "r+"):
        raise ValueError(f"mode must be 'r' or 'r+', got {options.mode!r}")
    nbytes = None if isinstance(path, RemoteSave) or is_url(path) else partial(bytes_on_disk, path)
    with progress_bar(options.shows, "loading", nbytes) as options.progress:
        if isinstance(path, RemoteSave):
            return path.load(options)
        if nbytes is None:
            return read_remote(path, access, lambda save: save.load(options))
        return (load_archive if os.path.isfile(path) else load_directory)(path, options)


def open_file(path: PathLike | Remote, options: LoadOptions, access: Access, format: str) -> Any:
    """The container in a file that is no archive; its tensors are sent to the device, those of a store later.

    Args:
        path: the file; of a Zarr group where it is, too.
        options: how to load; threads, names of files and pickles play no part.
        access: how a URL is reached, of a table or a format above.
        format: its format.

    Raises:
        ValueError: `out`, `keys`, `subpath`, or a mode that the format has not.
        OSError: the file cannot be read, or is broken.
    """
    given = [name for name in ("keys", "out", "subpath") if getattr(options, name) is not None]
    if options.mode != "r" and format not in (*BACKENDS, *ABOVE):
        given.append(f"mode={options.mode!r}")
    if given:
        shown = path.url if isinstance(path, Remote) else os.fspath(path)
        raise ValueError(f"{given} cannot be had of {shown!r}, which is of the format {format!r}")
    if format in BACKENDS:
        return makers.open_store(path, backend=format, mode=options.mode, device=options.device)
    assert not isinstance(path, Remote)
    if format in _TABLE_METHODS:
        name, _, how = _TABLE_METHODS[format]
        how = {**how, "storage_options": access.storage_options, "cache_dir": access.cache}
        return getattr(registry.lookup(DICT), name)(path, device=options.device, **how)
    if format == SAFETENSORS:
        return safetensors.load(path, options)
    container = ABOVE[format].open(path, options.mode, access) if format in ABOVE else consolidated.load(path)
    return container if options.device is None else container.to(options.device, non_blocking=options.non_blocking)


def describe_save(
    path: PathLike,
    complain: Complain | None = None,
    *,
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> tuple[str, Specification]:
    """The format of the save at `path`, and its specification; no tensor is read.

    Args:
        path: a folder or a file, or a URL: then only the descriptions of a folder or an archive are fetched.
        complain: is told what is wrong with an entry, and gives what stands in its place; without it, it is raised.
        storage_options, cache_dir: of a URL, as in `TensorDict.load_memmap`.

    Raises:
        FileNotFoundError: there is nothing.
        SaveError: it is of no format that is known, or broken.
    """
    path = as_url(without_scheme(path))
    if is_url(path):
        access = Access.of(storage_options, cache_dir)
        return read_at(
            path,
            access,
            partial(_described, complain),
            lambda format, above: (format, above.describe(path, complain, access)),
        )
    format = detect_format(path)
    if format in ABOVE:
        return format, ABOVE[format].describe(path, complain, Access())
    if format in BACKENDS:
        return format, specification_in(backend_of(format).open(path, "r").root, complain)
    if format == CONSOLIDATED:
        return format, consolidated.read(path, complain)
    if format == SAFETENSORS:
        return format, safetensors.read(path, LoadOptions(complain=complain))
    options = LoadOptions(unpickle=left_pickled, complain=complain)
    if format == ARCHIVE:
        options.source = _PackedSource(Archive(local_path(path)))
    return format, read_directory(path, options)


def _described(complain: Complain | None, save: RemoteSave) -> tuple[str, Specification]:
    if save.format in (DIRECTORY, ARCHIVE):
        return save.format, describe_rows(save, complain)
    if save.in_place is not None:
        return save.format, specification_in(backend_of(save.format).open(save.in_place, "r").root, complain)
    return describe_save(save.local(), complain)


class _PackedSource:
    """An archive as a source whose compressed tensors are not unpacked, except the ragged ones."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self.read, self.exists, self.is_folder = archive.read, archive.exists, archive.is_folder

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Any:
        """The tensor, or what reads it."""
        entry = self._archive.entries.get(path[len(self._archive.path) + 1 :])
        is_ragged = path.endswith(TABLE_SUFFIX) or self.exists(path.removesuffix(LEAF_SUFFIX) + TABLE_SUFFIX)
        nbytes = math.prod(shape) * dtype.itemsize
        if entry is None or entry.method == STORED or entry.size < nbytes or is_ragged:
            return self._archive.map(path, dtype, shape, key)
        return LeafSpec(dtype, shape, nbytes, False, partial(self._archive.map, path, dtype, shape, key))


def write_save(container: Any, path: PathLike, format: str, *, overwrite: bool = False, **options: Any) -> Any:
    """Save a container in a format.

    Args:
        container: what to save.
        path: where.
        format: one of `FORMATS`, of the values of `TABLES`, or of `ABOVE`.
        overwrite: replace what is no save of the format, too.
        **options: `num_threads`, `compression`, `checksum`, `allow_pickle`, `durable`, `progress`, `share_non_tensor`
            and `storage_options`, as of the method `memmap`; `None`, `False` and 0 ask for nothing.

    Returns:
        what the method for the format gives (see `TensorDict.save`), or the container itself.

    Raises:
        ValueError: the format does not have one of the options.
        UnsupportedEntryError: the format cannot hold the container. Nothing has been written.
        SaveError, OSError: as the method of the container that writes the format.
    """
    check_options(path, format, options)
    progress, storage_options = options.pop("progress", None), options.pop("storage_options", None)
    asked = {name: value for name, value in options.items() if value}
    if storage_options is not None:
        asked["storage_options"] = storage_options
    if format not in TABLES.values() and format != DATASET:
        asked["progress"] = progress
    try:
        with quiet(progress):
            return _write(container, path, format, {"overwrite": overwrite, **asked})
    except (ValueError, TypeError) as error:
        # Writers of tables raise errors of Python for entries that have no form there.
        is_of_entry = isinstance(error, UnsupportedEntryError) or (
            format in _TABLE_METHODS and not isinstance(error, SaveError)
        )
        if format in (DIRECTORY, ARCHIVE) or not is_of_entry:
            raise
        raise UnsupportedEntryError(
            f"{os.fspath(path)!r}: the format {format!r} cannot hold this container ({error}); a folder (a name "
            "without a suffix) or an archive ('.tdz') can"
        ) from error


def check_options(path: PathLike, format: str, options: Mapping[str, Any]) -> None:
    """Check that a format has the options that are asked for, as `write_save` takes them.

    Raises:
        ValueError: it does not have one; the formats that have it are named.
    """
    asked = {name for name, value in options.items() if value}
    odd = sorted(asked - _OPTIONS[format] - _COMMON_OPTIONS)
    if odd:
        having = {name: ", ".join(repr(other) for other in _OPTIONS if name in _OPTIONS[other]) for name in odd}
        why = " (it always has CRC-32 checksums)" if format == ARCHIVE and "checksum" in odd else ""
        raise ValueError(
            f"{os.fspath(path)!r}: saves of the format {format!r} do not take "
            f"{', '.join(f'{name}= (which {formats} take)' for name, formats in having.items())}{why}"
        )


def _write(container: Any, path: PathLike, format: str, options: dict[str, Any]) -> Any:
    if format == DATASET:
        ABOVE[format].write(container, path, Access())
    elif format in (DIRECTORY, ARCHIVE):
        return container.memmap(path, copy_existing=True, archive=format == ARCHIVE, **options)
    elif format == CONSOLIDATED:
        return container.consolidate(path, **options)
    elif format in BACKENDS:
        compression = options.pop("compression", None)
        compressed = {} if compression is None else backend_of(format).choose_compression(compression)
        return getattr(container, f"to_{format}")(path, **options, **compressed)
    elif format in _TABLE_METHODS:
        _, name, how = _TABLE_METHODS[format]
        getattr(container, name)(path, **options, **how)
    else:
        container.to_safetensors(path, **options)
    return container
