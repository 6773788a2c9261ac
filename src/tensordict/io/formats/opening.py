"""Functions over all formats, for `TensorDict.save` and `load` and the commands: open, describe and write a save."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tensordict.core import makers, registry
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.io.formats import consolidated, safetensors
from tensordict.io.formats.archive import CompressedSource, load_archive
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.detect import TORCH_SUFFIXES, detect_format, is_known
from tensordict.io.formats.loading import LoadOptions, load_directory, read_directory
from tensordict.io.formats.structure import Complain
from tensordict.io.formats.value_files import choose_unpickle, skip_unpickling, unpickle
from tensordict.io.remote.credentials import as_url
from tensordict.io.remote.remote_rows import describe_rows
from tensordict.io.remote.remote_saves import Access, CacheDir, RemoteSave, read_remote
from tensordict.io.remote.urls import Remote, StorageOptions, is_url
from tensordict.io.saving.progress import count_bytes, hide_bars, progress_bar
from tensordict.io.specification import DICT, Specification
from tensordict.io.stores.backends import BACKENDS, backend_at, backend_of
from tensordict.io.stores.entries import specification_in
from tensordict.memory.mapped import PathLike, check_mode
from tensordict.memory.names import META, SCHEMA, local_path, without_scheme

if TYPE_CHECKING:
    from tensordict.io.saving.progress import Progress
    from tensordict.io.saving.verification import Report

T = TypeVar("T")

DIRECTORY, ARCHIVE, CONSOLIDATED, SAFETENSORS = "directory", "archive", "consolidated", "safetensors"
# A data set, which consists of many saves.
DATASET = "dataset"
FORMATS = (DIRECTORY, ARCHIVE, CONSOLIDATED, *BACKENDS, SAFETENSORS)
PARQUET, CSV, JSON, JSON_LINES = "parquet", "csv", "json", "json lines"
# The tables, by suffix.
TABLES = {".parquet": PARQUET, ".csv": CSV, ".json": JSON, ".jsonl": JSON_LINES, ".ndjson": JSON_LINES}
# The formats by suffix, for `save`, `load` and the command `tensordict convert`.
SUFFIXES = {
    "": DIRECTORY,
    ".tdz": ARCHIVE,
    ".consolidated": CONSOLIDATED,
    **{suffix: name for name, kind in BACKENDS.items() for suffix in kind.suffixes},
    ".safetensors": SAFETENSORS,
    **TABLES,
}
# The methods that read and write a table, and their further arguments.
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
    **{
        name: frozenset({"compression", "durable", *(("allow_pickle",) if kind.holds_pickles else ())})
        for name, kind in BACKENDS.items()
    },
    PARQUET: frozenset({"compression", "durable"}),
    CSV: frozenset(),
    JSON: frozenset(),
    JSON_LINES: frozenset(),
    DATASET: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RegisteredFormat:
    """A format that a higher room registers: functions that open a save (with a mode), describe, write and verify."""

    open: Callable[[PathLike, str, Access], Any]
    describe: Callable[[PathLike, Complain | None, Access], Specification]
    write: Callable[[Any, PathLike, Access], None]
    verify: Callable[[Report, int, Progress, Access], None]


# The registered formats by name. Their modules add them.
REGISTERED_FORMATS: dict[str, RegisteredFormat] = {}


def format_of_name(path: PathLike) -> str | None:
    """Return the format for the suffix of a path or URL; `None` for an unknown suffix.

    Raises:
        UnsupportedEntryError: it is a suffix of files of `torch.save`.
    """
    shown = os.fsdecode(path)
    suffix = "" if shown.endswith("/") else os.path.splitext(shown)[1].lower()
    if suffix in TORCH_SUFFIXES:
        raise UnsupportedEntryError(
            f"{shown!r}: {suffix!r} is a suffix of files of torch.save: call torch.save or torch.load, or choose a "
            "name without a suffix (a folder) or with '.tdz' (an archive)"
        )
    return SUFFIXES.get(suffix)


def read_at(
    url: PathLike,
    access: Access,
    use: Callable[[RemoteSave], T],
    use_registered: Callable[[str, RegisteredFormat], T],
) -> T:
    """Call `use` with the save at a URL, as `read_remote` does, or `use_registered` with the format of a data set.

    Raises:
        FileNotFoundError: the URL has neither.
        SaveError: as `read_remote`.
    """
    try:
        return read_remote(url, access, use)
    except FileNotFoundError:
        # The search for a data set comes last, because it takes another request.
        if DATASET not in REGISTERED_FORMATS or Remote(url, access.storage_options).find(SCHEMA) is None:
            raise
        return use_registered(DATASET, REGISTERED_FORMATS[DATASET])


def format_to_load(path: PathLike) -> str:
    """Return the format to load a path with. For a folder without a save it is `DIRECTORY`, whose loader raises."""
    shown = os.fspath(path)
    table = TABLES.get(os.path.splitext(shown)[1].lower())
    # Readers of tables accept patterns, which are not files.
    if table and not os.path.isdir(shown) and not (os.path.isfile(shown) and is_known(shown)):
        return table
    is_other = os.path.lexists(f"{shown}/{SCHEMA}") or bool(backend_at(shown))
    known = os.path.isfile(shown) or (is_other and not os.path.lexists(f"{shown}/{META}"))
    return detect_format(path) if known else DIRECTORY


def table_at(url: PathLike, access: Access) -> str | None:
    """Return the kind of the table at a URL, which may be a pattern; `None` for anything else."""
    shown = os.fspath(url)
    table = TABLES.get(os.path.splitext(shown)[1].lower())
    if table is None or glob.has_magic(shown):
        return table
    # A folder may have the suffix of a table.
    return None if Remote(url, access.storage_options).find() is None else table


def open_save(path: PathLike, *, allow_pickle: bool = False) -> Any:
    """Open a save of any format. Its tensors are mapped, or read on use.

    Args:
        path: a folder or a file.
        allow_pickle: unpickle values, which runs code from the save.

    Raises:
        FileNotFoundError: the path does not exist.
        SaveError: the format is unknown, or the save is broken.
        UnsupportedEntryError: a tensorclass has not been imported, or a value is pickled.
    """
    path = as_url(without_scheme(path))
    options = LoadOptions(unpickle=choose_unpickle(allow_pickle))
    if is_url(path):
        return load(path, options, Access.of(None))
    return load(path, options, Access(), detect_format(path))


def load(path: PathLike, options: LoadOptions, access: Access, format: str | None = None) -> Any:
    """Load a save of any format from a path or URL; see `TensorDict.load`.

    Args:
        path: the path or URL.
        options: how to load it.
        access: how to reach a URL.
        format: the format of a path; detected by default.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: the format is unknown or does not support an option, or the save is broken.
    """
    if not is_url(path):
        format = format or format_to_load(path)
        if format in (DIRECTORY, ARCHIVE):
            return map_save(path, options)
        return open_file(path, options, access, format)
    if (table := table_at(path, access)) is not None:
        return open_file(path, options, access, table)

    def use(save: RemoteSave) -> Any:
        if save.format in (DIRECTORY, ARCHIVE):
            return fetch_save(save, options, access)
        return save.keep_for(open_file(save.in_place or save.local(), options, access, save.format))

    with hide_bars(options.shows):
        return read_at(path, access, use, lambda format, _: open_file(path, options, access, format))


def map_save(path: PathLike, options: LoadOptions) -> Any:
    """Load a folder or an archive from a path; see `TensorDict.load_memmap`."""
    if options.mode is not None:
        check_mode(options.mode)
    with progress_bar(options.shows, "loading", partial(count_bytes, path)) as options.progress:
        return (load_archive if os.path.isfile(path) else load_directory)(path, options)


def fetch_save(url: PathLike | RemoteSave, options: LoadOptions, access: Access) -> Any:
    """Load a folder or an archive from a URL; see `TensorDict.load_memmap`."""
    if options.mode is not None:
        check_mode(options.mode)
    with progress_bar(options.shows, "loading", None) as options.progress:
        if isinstance(url, RemoteSave):
            return url.load(options)
        return read_remote(url, access, lambda save: save.load(options))


def open_file(path: PathLike | Remote, options: LoadOptions, access: Access, format: str) -> Any:
    """Open a save of a format other than a folder or an archive.

    Its tensors are sent to the device at once; the tensors of a store on use.

    Args:
        path: the file, or the `Remote` of a Zarr group at a URL.
        options: how to load; `num_threads` and `robust` do not apply, and `unpickle` only to Zarr groups.
        access: how to reach a URL, for a table or a registered format.
        format: the format.

    Raises:
        ValueError: `out`, `keys` or `subpath` is given, or a mode that the format does not support.
        OSError: the file cannot be read, or is broken.
    """
    given = [name for name in ("keys", "out", "subpath") if getattr(options, name) is not None]
    if options.mode not in (None, "r") and format not in (*BACKENDS, *REGISTERED_FORMATS):
        given.append(f"mode={options.mode!r}")
    if given:
        shown = path.url if isinstance(path, Remote) else os.fspath(path)
        raise ValueError(f"{shown!r} has the format {format!r}, which does not support {given}: load it without them")
    if format in BACKENDS:
        how: dict[str, Any] = {"device": options.device, "allow_pickle": options.unpickle is unpickle}
        return makers.open_store(path, backend=format, mode=options.mode or "r", **how)
    assert not isinstance(path, Remote)
    if format in _TABLE_METHODS:
        name, _, how = _TABLE_METHODS[format]
        how = {**how, "storage_options": access.storage_options, "cache_dir": access.cache}
        return getattr(registry.lookup(DICT), name)(path, device=options.device, **how)
    if format == SAFETENSORS:
        return safetensors.load(path, options)
    registered = REGISTERED_FORMATS.get(format)
    container = consolidated.load(path) if registered is None else registered.open(path, options.mode or "r", access)
    return container if options.device is None else container.to(options.device, non_blocking=options.non_blocking)


def describe_save(
    path: PathLike,
    complain: Complain | None = None,
    *,
    storage_options: StorageOptions | None = None,
    cache_dir: CacheDir | None = None,
) -> tuple[str, Specification]:
    """Return the format and the specification of a save without reading tensors.

    Args:
        path: a folder, a file, or a URL. For a folder or an archive at a URL, only the descriptions are fetched.
        complain: takes the error of a broken entry, and returns the entry that stands for it; by default it is raised.
        storage_options, cache_dir: for a URL, as in `TensorDict.load_memmap`.

    Raises:
        FileNotFoundError: the path does not exist.
        SaveError: the format is unknown, or the save is broken.
    """
    path = as_url(without_scheme(path))
    if is_url(path):
        access = Access.of(storage_options, cache_dir)
        return read_at(
            path,
            access,
            partial(_describe_remote, complain),
            lambda format, registered: (format, registered.describe(path, complain, access)),
        )
    format = detect_format(path)
    if format in REGISTERED_FORMATS:
        return format, REGISTERED_FORMATS[format].describe(path, complain, Access())
    if format in BACKENDS:
        return format, specification_in(backend_of(format).open(path, "r").root, complain)
    if format == CONSOLIDATED:
        return format, consolidated.read(path, complain)
    if format == SAFETENSORS:
        return format, safetensors.read(path, LoadOptions(complain=complain))
    options = LoadOptions(unpickle=skip_unpickling, complain=complain)
    if format == ARCHIVE:
        options.source = CompressedSource(Archive(local_path(path)))
    return format, read_directory(path, options)


def _describe_remote(complain: Complain | None, save: RemoteSave) -> tuple[str, Specification]:
    if save.format in (DIRECTORY, ARCHIVE):
        return save.format, describe_rows(save, complain)
    if save.in_place is not None:
        return save.format, specification_in(backend_of(save.format).open(save.in_place, "r").root, complain)
    return describe_save(save.local(), complain)


def write_save(container: Any, path: PathLike, format: str, *, overwrite: bool = False, **options: Any) -> Any:
    """Save a container in a format.

    Args:
        container: the container.
        path: the path or URL.
        format: one of `FORMATS`, of the values of `TABLES`, or of `REGISTERED_FORMATS`.
        overwrite: also replace a file of another format.
        **options: `num_threads`, `compression`, `checksum`, `allow_pickle`, `durable`, `progress`, `share_non_tensor`
            and `storage_options`, as in the method `memmap`; `None`, `False` and 0 mean the default.

    Returns:
        the result of the method for the format (see `TensorDict.save`), or the container itself.

    Raises:
        ValueError: the format does not support an option.
        UnsupportedEntryError: the format cannot store the container; nothing has been written.
        SaveError, OSError: the method of the container for the format raised it.
    """
    check_options(path, format, options)
    progress, storage_options = options.pop("progress", None), options.pop("storage_options", None)
    asked = {name: value for name, value in options.items() if value}
    if storage_options is not None:
        asked["storage_options"] = storage_options
    if format not in TABLES.values() and format != DATASET:
        asked["progress"] = progress
    try:
        with hide_bars(progress):
            return _write(container, path, format, {"overwrite": overwrite, **asked})
    except (ValueError, TypeError) as error:
        # Writers of tables raise plain `ValueError` and `TypeError` for entries that a table cannot store.
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
    """Check that a format supports the given options of `write_save`.

    Raises:
        ValueError: it does not support one; names the formats that do.
    """
    asked = {name for name, value in options.items() if value}
    unsupported = sorted(asked - _OPTIONS[format] - _COMMON_OPTIONS)
    if unsupported:
        supporting = {
            name: ", ".join(repr(other) for other in _OPTIONS if name in _OPTIONS[other]) for name in unsupported
        }
        why = " (it always has CRC-32 checksums)" if format == ARCHIVE and "checksum" in unsupported else ""
        raise ValueError(
            f"{os.fspath(path)!r}: saves of the format {format!r} do not take "
            f"{', '.join(f'{name}= (which {formats} take)' for name, formats in supporting.items())}{why}"
        )


def _write(container: Any, path: PathLike, format: str, options: dict[str, Any]) -> Any:
    if format == DATASET:
        REGISTERED_FORMATS[format].write(container, path, Access())
    elif format in (DIRECTORY, ARCHIVE):
        return container.memmap(path, copy_existing=True, archive=format == ARCHIVE, **options)
    elif format == CONSOLIDATED:
        return container.consolidate(path, **options)
    elif format in BACKENDS:
        compression = options.pop("compression", None)
        how = {} if compression is None else backend_of(format).choose_compression(compression)
        return getattr(container, f"to_{format}")(path, **options, **how)
    elif format in _TABLE_METHODS:
        _, name, how = _TABLE_METHODS[format]
        getattr(container, name)(path, **options, **how)
    else:
        container.to_safetensors(path, **options)
    return container
