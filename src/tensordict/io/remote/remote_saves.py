"""Reading of saves behind URLs: the structure first, then the bytes of the requested entries, several at once.

A whole archive, and a save of another format, is fetched whole and read as a local file. A part of an archive or a
folder is loaded twice: first without its tensors, to learn which files are needed, and again after fetching these.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.io.formats import zipping
from tensordict.io.formats.archive import check_top, load_archive
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.detect import detect_format
from tensordict.io.formats.loading import LoadOptions, load_directory, read_directory
from tensordict.io.formats.value_files import skip_unpickling
from tensordict.io.formats.zipping import Entry
from tensordict.io.remote.cache import CachedFile, LocalCopies, Range, RemoteCache
from tensordict.io.remote.credentials import GuardedOptions, StorageOptions
from tensordict.io.remote.urls import IN_FLIGHT, ChangedError, Remote, RemoteFile, is_url
from tensordict.io.saving.progress import show_transfer
from tensordict.memory import file_maps, files
from tensordict.memory.mapped import PathLike, make_size_error
from tensordict.memory.names import META, SCHEMA, without_scheme

# Length of the first read at the end of an archive: an end record with the longest comment, and zip64 records.
_TAIL = (1 << 16) + 256
# Length of the header of an entry without its name: the fields, zip64 extras and alignment.
_HEADER = 4096
# Length of the first read at the start of an archive, where the descriptions lie.
_START = 4 << 10
# Number of attempts at a save that is replaced while it is read.
_TRIES = 5
# Format of a Zarr group, and the files that identify one.
_ZARR, _GROUPS = "zarr", ("zarr.json", ".zgroup")

CacheDir = PathLike | RemoteCache
# Ranges of the content of files of a save, by name; `None` for a whole file.
Wanted = Mapping[str, Iterable[Range] | None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Access:
    """The storage options of a URL, and the cache for its bytes; `None` for a temporary folder.

    Its repr has no secrets. Pickling refuses secrets unless the options allow them (`GuardedOptions`).
    """

    storage_options: StorageOptions | None = None
    cache: RemoteCache | None = None

    def __post_init__(self) -> None:
        if self.storage_options is not None:
            object.__setattr__(self, "storage_options", GuardedOptions.of(self.storage_options))

    @staticmethod
    def of(storage_options: StorageOptions | None, cache_dir: CacheDir | None = None) -> Access:
        """Build the access from user arguments; `cache_dir` defaults to the variable `TENSORDICT_CACHE_DIR`."""
        given = cache_dir or os.environ.get("TENSORDICT_CACHE_DIR") or None
        return Access(storage_options, given if given is None or isinstance(given, RemoteCache) else RemoteCache(given))


def read_remote(
    url: PathLike, access: Access, use: Callable[[RemoteSave], T], ends: tuple[int, int] = (_START, _TAIL)
) -> T:
    """Open the save at a URL and return `use(save)`. Retries if the save is replaced meanwhile.

    Args:
        url: the URL of the save.
        access: the storage options and the cache.
        use: reads the save.
        ends: how many bytes at the start and the end of a file are needed. S3 sends them with the first answers.

    Raises:
        FileNotFoundError: the URL has no save.
        SaveError: the save cannot be reached or is broken; names the URL.
    """
    for attempt in range(1, _TRIES + 1):
        save = RemoteSave(url, access, ends)
        try:
            with save.naming():
                found = use(save)
                save.check()
                return found
        except (OSError, LookupError) as error:
            # Loaders wrap errors, so look at the save itself, too.
            if attempt == _TRIES or not (isinstance(error, ChangedError) or save.is_stale()):
                raise
        finally:
            save.close()
    raise AssertionError


def read_file(
    path: Any,
    storage_options: StorageOptions | None,
    cache_dir: CacheDir | None,
    use: Callable[[Any], T],
) -> T:
    """Return `use(path)`; for a URL, `use` of a local copy that lives as long as the result."""
    if not is_url(path):
        return use(without_scheme(path))
    return read_remote(path, Access.of(storage_options, cache_dir), lambda save: save.keep_for(use(save.local())))


def is_saved_at(url: PathLike) -> bool:
    """Return True if a URL has a file, a saved folder, a data set or a Zarr group."""
    remote = Remote(url)
    return any(remote.find(name) is not None for name in ("", META, SCHEMA, *_GROUPS))


class RemoteSave:
    """An open save at a URL.

    Attributes:
        url: the URL.
        path: path of the local copy, or a placeholder for it in errors.
        in_place: the remote folder of a Zarr group, which is read directly; else `None`.
    """

    def __init__(self, url: PathLike, access: Access, ends: tuple[int, int] = (_START, _TAIL)) -> None:
        self.remote = Remote(url, access.storage_options)
        # A plain text, because errors that contain it are pickled.
        self.url = str(self.remote.url)
        # A cache may have the content, so only the description is requested.
        read = self.remote.read_ends(*ends) if self.remote.is_s3 and access.cache is None else None
        file = self.remote.find() if read is None else read[0]
        self._top = None if file is not None else self.remote.find(META)
        self._format = "" if file is not None else "directory" if self._top is not None else _ZARR
        if self._format == _ZARR and all(self.remote.find(name) is None for name in _GROUPS):
            what = f"there is no save at this URL: no file, and no folder with {META} or {_GROUPS[0]}"
            raise FileNotFoundError(errno.ENOENT, what, self.url)
        self.in_place = self.remote if self._format == _ZARR else None
        self._place = LocalCopies(access.cache)
        self._leaves_place = False
        self._file = None if file is None else CachedFile(self.remote, file, self._place)
        if self._file is not None and read is not None:
            try:
                self._file.hold()
                for start, content in read[1].items():
                    self._file.insert(start, content)
            except BaseException:
                self._place.close()
                raise
        self.path = f"{self._place.path}/save" if self._file is None else self._file.path
        self._source: RemoteArchive | RemoteFolder | None = None

    @property
    def format(self) -> str:
        """The format, as of `detect_format`. Files other than archives are fetched to detect it."""
        if self._file is not None and not self._format:
            size = self._file.file.size
            self._file.ensure([(0, min(size, _START)), (max(0, size - _TAIL), size)])
            is_zip = self._file.read(0, min(size, 4)) in zipping.SIGNATURES
            # Other formats are zip files, too.
            if is_zip and META in (archive := RemoteArchive(self._file)).entries:
                self._source = archive
            self._format = "archive" if self._source is not None else detect_format(self.local())
        return self._format

    @property
    def is_whole(self) -> bool:
        """True if the save is a file that was fetched as a whole."""
        return self._file is not None and self._file.is_whole

    def local(self) -> str:
        """Fetch the whole file; returns the path of the copy."""
        if self._file is None:
            raise SaveError(f"{self.url!r} is a folder, and this reads a file")
        self._file.ensure()
        return self._file.path

    def mirror(self, folder: str) -> str:
        """Copy the whole save below a local folder; returns its path."""
        if self._file is not None:
            return self.local()
        source = self.source()
        assert isinstance(source, RemoteFolder)
        jobs: list[Callable[[], None]] = []
        root = f"{folder}/save"
        for name in source.names():
            target = f"{root}/{name}"
            os.makedirs(os.path.dirname(target), exist_ok=True)
            jobs.append(partial(source.copy, name, target))
        files.run_all(jobs, IN_FLIGHT)
        return root

    def source(self) -> RemoteArchive | RemoteFolder:
        """Return the source from which loaders read the files of an archive or a folder."""
        if self._source is None:
            if self._file is None:
                self._source = RemoteFolder(self, self.remote, self._place)
            else:
                self._source = RemoteArchive(self._file)
                check_top(self._source)
        return self._source

    def load(self, options: LoadOptions) -> Any:
        """Load the container in an archive or a folder."""
        if options.mode == "r+":
            raise ValueError(
                f"mode={options.mode!r} writes to the file, and {self.url!r} is only read: mode='r' can be had"
            )
        source = self.source()
        meta = options.device if options.device is not None and options.device.type == "meta" else None
        if isinstance(source, RemoteArchive) and (options.keys, options.subpath, meta) == (None, None, None):
            return load_archive(self.local(), options)
        if isinstance(source, RemoteFolder):
            source.ahead = options.keys is None
        plan = FilesToFetch(source)
        planning = LoadOptions(meta, robust=options.robust, source=plan, unpickle=skip_unpickling)
        planning.subpath, planning.keys = options.subpath, options.keys
        read_directory(self.path, planning)
        with source.fetch_and_inflate(plan.names, options.num_threads):
            return load_directory(self.path, replace(options, source=source))

    def keep_for(self, container: T) -> T:
        """Keep the local copy as long as `container`, which reads it when it is used; returns the container."""
        self._leaves_place = True
        weakref.finalize(container, self._place.close)
        return container

    def is_stale(self) -> bool:
        """Return True if a file of the save that was read has changed since."""
        if self._file is not None:
            return self.remote.find() != self._file.file
        if isinstance(self._source, RemoteFolder):
            return self._source.is_stale()
        if self.in_place is not None:
            # A Zarr group is read in place, in its current state.
            return False
        return self.remote.find(META) != self._top

    def check(self) -> None:
        """Check that the save was not replaced while it was read.

        A cache checks each file itself, and a file of S3 is checked with each answer.

        Raises:
            ChangedError: the save was replaced.
        """
        is_checked = self._file is not None and (self.remote.is_s3 or self._place.cache is not None)
        if not is_checked and self.is_stale():
            raise ChangedError(f"{self.url!r} was replaced while it was read: read it again")

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Replace the path of the local copy by the URL in errors of a block."""
        with naming_url(self.path, self.url):
            yield

    def close(self) -> None:
        """Remove temporary copies, unless a container still reads them."""
        if not self._leaves_place:
            self._place.close()


@contextlib.contextmanager
def naming_url(path: str, url: str) -> Iterator[None]:
    """Replace a local path by a URL in errors of a block."""
    try:
        yield
    except (OSError, LookupError, ValueError) as error:
        error.args = tuple(arg.replace(path, url) if isinstance(arg, str) else arg for arg in error.args)
        if isinstance(error, OSError) and isinstance(error.filename, str):
            error.filename = error.filename.replace(path, url)
        raise


class FilesToFetch:
    """A source of loaders that notes the names of the files of tensors, and returns empty tensors for them."""

    def __init__(self, source: RemoteArchive | RemoteFolder) -> None:
        self.read, self.exists, self.is_folder = source.read, source.exists, source.is_folder
        self.map_ragged_file = source.map_ragged_file
        self._source = source
        self.names: list[str] = []

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Note the name of a file, and check its length."""
        self._source.check_size(path, dtype, shape, key)
        self.names.append(path[len(self._source.path) + 1 :])
        return torch.empty(shape, dtype=dtype, device="meta")


class RemoteArchive(Archive):
    """An archive behind a URL. Entries are fetched when they are requested, the descriptions at once."""

    def __init__(self, file: CachedFile) -> None:
        size = file.file.size
        super().__init__(file.path, fd=file.hold(), entries={})
        self._file = file
        file.ensure([(max(0, size - _TAIL), size)])
        self._index = zipping.ZipIndex(self.data, file.path, headers=False)
        start = self._index.find_directory()[1]
        file.ensure([(start, size)])
        self.entries = self._index.read_entries()
        headers = [*sorted(entry.header for entry in self.entries.values()), start]
        self._ends = dict(itertools.pairwise(headers))
        # The names of entries whose header was read, so that the start of their content is known.
        self._located: set[str] = set()
        self._to_inflate: list[Entry] = []
        self.fetch({name: None for name in self.entries if name.rpartition("/")[2] == META})

    def fetch(self, wanted: Wanted) -> None:
        """Fetch entries, or ranges of their content, in requests that run at once. Compressed entries come whole."""
        ranges: list[Range] = []
        for name, parts in wanted.items():
            # Another thread may locate the entry meanwhile, so this comes before its start is read.
            is_located = name in self._located
            entry = self.entries[name]
            header, stop = entry.header, self._ends[entry.header]
            if parts is None or entry.method != zipping.STORED:
                ranges.append((header, stop))
                continue
            start = entry.start
            if not is_located:
                ranges.append((header, min(stop, header + _HEADER + len(name.encode()))))
                # Assume that the content ends where the next entry begins.
                start = stop - entry.stored
            ranges += [(start + low, start + high) for low, high in parts]
        self._file.ensure(ranges)

    def fetch_and_inflate(self, names: Iterable[str], num_threads: int) -> RemoteArchive:
        """Fetch entries. In a block of the result, `num_threads` threads inflate them."""
        self.fetch(dict.fromkeys(names))
        self._to_inflate, self._num_threads = [self._locate(name) for name in names], num_threads
        return self

    def _entries_to_load(self) -> Iterable[Entry]:
        return self._to_inflate

    def _find(self, path: str) -> Entry:
        name = super()._find(path).name
        self.fetch({name: None})
        return self._locate(name)

    def _locate(self, name: str) -> Entry:
        """Return an entry with the start of its content, parsed from its fetched header."""
        if name not in self._located:
            placed = self._index.locate(self.entries[name])
            if placed.start + placed.stored > (stop := self._ends[placed.header]):
                raise self._index.error(f"its content does not end before byte {stop}, where the next one begins", name)
            self.entries[name] = placed
            self._located.add(name)
        return self.entries[name]

    def place(self, path: str, parts: Iterable[Range]) -> tuple[CachedFile, int] | None:
        """Fetch ranges of a file; returns its local copy and an offset in that, or `None` if it is compressed."""
        entry = super()._find(path)
        if entry.method != zipping.STORED:
            return None
        self.fetch({entry.name: parts})
        return self._file, self._locate(entry.name).start

    def check_size(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> None:
        """Raise a `SaveError` if a file is too short for a tensor."""
        _check_size(path, super()._find(path).size, dtype, shape, key)

    def is_compressed(self, path: str) -> bool:
        """Return True if a file is compressed, so that it can only be read whole."""
        return super()._find(path).method != zipping.STORED


class RemoteFolder:
    """The files of a save below a URL, as a `Source` of loaders.

    Attributes:
        ahead: fetch the descriptions of all nested containers of a level together.
    """

    def __init__(self, save: RemoteSave, remote: Remote, place: LocalCopies) -> None:
        self.path = save.path
        self._remote, self._place = remote, place
        # HTTP servers have no listing, so each file is looked up by name.
        self._listed = None if remote.is_http else {file.name: file for file in remote.files()}
        self._folders = zipping.list_folders(self._listed or ())
        self._files: dict[str, CachedFile] = {}
        self.ahead = True

    def names(self) -> list[str]:
        """Return the names of all files of the save.

        Raises:
            SaveError: the server has no listing, or lists a name that leads out of the save.
        """
        if self._listed is None:
            raise SaveError(
                f"what is below {self._remote.url!r} cannot be listed: servers of HTTP do not say. An archive can be "
                "checked there"
            )
        for name in self._listed:
            # Names of objects are untrusted.
            if not zipping.is_safe(name):
                raise SaveError(f"{self._remote.url_of(name)!r} has a name that could lead out of the save")
        return list(self._listed)

    def read(self, path: str) -> bytes:
        """Read a small file."""
        name = self._name(path)
        if self.ahead and name.rpartition("/")[2] == META and name not in self._files:
            folder = name[: -len(META)]
            below = (other for other in self._listed or () if other.endswith(f"/{META}") and other.startswith(folder))
            level = folder.count("/") + 1
            self.fetch(dict.fromkeys([name, *(other for other in below if other.count("/") == level)]))
        return self._open_copy(name).read()

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Fetch a file and map the tensor in it privately."""
        self.check_size(path, dtype, shape, key)
        cached, nbytes = self._open_copy(self._name(path)), math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with cached.hold_open() as fd:
            cached.ensure([(0, nbytes)])
            return file_maps.map_bytes(fd, nbytes, cached.path).view(dtype).view(shape)

    map_ragged_file = map

    def place(self, path: str, parts: Iterable[Range]) -> tuple[CachedFile, int]:
        """See `RemoteArchive.place`."""
        name = self._name(path)
        self.fetch({name: parts})
        return self._files[name], 0

    def check_size(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> None:
        """Raise a `SaveError` if a file is too short for a tensor."""
        _check_size(path, self._open_copy(self._name(path)).file.size, dtype, shape, key)

    def is_compressed(self, path: str) -> bool:
        """Return False: files of a folder are never compressed."""
        return False

    def exists(self, path: str) -> bool:
        """Return True if a path is a file or a folder of a container."""
        name = self._name(path)
        return self._find(name) is not None or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        """Return True if a path is the folder of a container."""
        name = self._name(path)
        return self._find(f"{name}/{META}") is not None if self._listed is None else name in self._folders

    def fetch(self, wanted: Wanted) -> None:
        """Fetch files, or ranges of them, several at once."""
        files.run_all([partial(self._open_copy(name).ensure, parts) for name, parts in wanted.items()], IN_FLIGHT)

    def fetch_and_inflate(self, names: Iterable[str], num_threads: int) -> contextlib.AbstractContextManager[None]:
        """Fetch files, which are never compressed."""
        wanted = list(names)
        with show_transfer("fetching", sum(self._open_copy(name).file.size for name in wanted)):
            self.fetch(dict.fromkeys(wanted))
        return contextlib.nullcontext()

    def copy(self, name: str, target: str) -> None:
        """Copy a file to a local path."""
        cached = self._open_copy(name)
        with cached.hold_open() as source:
            cached.ensure()
            with files.new_file(target) as fd:
                files.copy_file(source, fd, cached.file.size)

    def is_stale(self) -> bool:
        """Return True if a file that was read has changed or is gone.

        Every file is checked, because two saves that differ only in their tensors have the same `meta.json`.
        """
        asked = {name: cached.file for name, cached in self._files.items()}
        if self._listed is not None:
            now = {file.name: file for file in self._remote.files()}
            return any(now.get(name) != file for name, file in asked.items())
        replaced: list[str] = []

        def look(name: str) -> None:
            if self._remote.find(name) != asked[name]:
                replaced.append(name)

        files.run_all([partial(look, name) for name in asked], IN_FLIGHT)
        return bool(replaced)

    def list_requests(self) -> list[str]:
        """Return the names of the files that loaders have requested."""
        return list(self._files)

    def _name(self, path: str) -> str:
        return path[len(self.path) + 1 :]

    def _find(self, name: str) -> RemoteFile | None:
        if self._listed is not None:
            return self._listed.get(name)
        return self._files[name].file if name in self._files else self._remote.find(name)

    def _open_copy(self, name: str) -> CachedFile:
        if name not in self._files:
            found = self._find(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.path}/{name}")
            self._files[name] = CachedFile(self._remote, found, self._place)
        return self._files[name]


def _check_size(path: str, size: int, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> None:
    if size < (nbytes := math.prod(shape) * dtype.itemsize):
        raise make_size_error(path, size, dtype, shape, nbytes, key)
