"""Where a data set is: a folder on this machine, or a URL. What the two do differently is here, and nowhere else.

A file of a folder is appended to, and locked by the system. What is behind a URL is put as a whole: so a manifest is
put again with each line, all of it, which takes the place of the one before in one step. What must be made only once is
put under the condition that there is none (`If-None-Match` and its like): the schema, and the claim of whoever
compacts. A store without such conditions takes the last one of those that are made in the same moment: the schema is
read again after it was put, and a writer whose manifest is of another one is refused when the data set is opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tensordict.core import registry
from tensordict.core.errors import SaveError
from tensordict.io import commit
from tensordict.io.detect import detect_format
from tensordict.io.formats import ARCHIVE, DIRECTORY, SUFFIXES, open_file, open_save
from tensordict.io.loading import LoadOptions, load_directory
from tensordict.io.remote import IN_FLIGHT, Remote, is_url
from tensordict.io.remote_rows import open_rows
from tensordict.io.remote_saves import Access
from tensordict.io.source import PrivateSave
from tensordict.io.specification import DICT
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META, SCHEMA, local_path

WRITERS, SHARDS = "writers", "shards"
# Locked by whoever compacts or tidies.
_LOCK = ".compacting"
# What makes a folder a Zarr group.
_GROUP = "zarr.json"
# How long a writer waits for another one that fixes the schema at the same time, in seconds.
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Found:
    """A shard, or what was to be one.

    Args:
        name: its path in the data set.
        complete: whether it is a save.
        changed: when something of it was changed last, in seconds since 1970; `None` where nobody says.
    """

    name: str
    complete: bool
    changed: float | None


@contextlib.contextmanager
def writing(what: str, path: str) -> Iterator[None]:
    """A block whose errors say what could not be written, and where: some name an entry only."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise SaveError(f"cannot write {what} {path!r}: {error}") from error
        raise OSError(error.errno, f"cannot write {what} ({error})", path) from error


class Appender(ABC):
    """A file that grows by pieces, each of which is there as a whole or not at all."""

    @abstractmethod
    def add(self, content: bytes) -> None:
        """Add a piece; when that fails, it may be added again."""

    @abstractmethod
    def close(self) -> None:
        """No more is added; a file without content is taken away."""


class Location(ABC):
    """Where a data set is; `name`s are paths in it, with slashes.

    Attributes:
        root: the absolute path of the folder, or the URL.
        access: how a URL is reached.
        in_flight: how many small files are best read at once.
    """

    root: str
    access: Access
    in_flight: int

    @staticmethod
    def of(path: PathLike, access: Access | None = None) -> Location:
        """That of a path or a URL.

        Raises:
            SaveError: it is a URL that cannot be reached, or no data set can be at.
        """
        access = access or Access()
        return RemoteLocation(path, access) if is_url(path) else LocalLocation(local_path(path), access)

    def path(self, name: str) -> str:
        """The path or URL of a name."""
        return f"{self.root}/{name}"

    @property
    def is_remote(self) -> bool:
        """Whether it is a URL."""
        return isinstance(self, RemoteLocation)

    # --- small files --------------------------------------------------------------------------------------------------

    @abstractmethod
    def manifests(self) -> dict[str, int | None]:
        """The names of the files of writers, and how long they are where a listing says that."""

    @abstractmethod
    def read(self, name: str, start: int, size: int | None) -> tuple[bytes, int]:
        """What a file has from a byte on, and how long it is; `size` is what a listing has said of that.

        Raises:
            OSError: it cannot be read; names it.
        """

    @abstractmethod
    def appender(self, name: str, durable: bool) -> Appender:
        """A new file that grows."""

    # --- the schema ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""

    @abstractmethod
    def begun(self) -> bool:
        """Whether there is anything."""

    @abstractmethod
    def strangers(self) -> list[str]:
        """The names of what is no part of a data set."""

    @abstractmethod
    def rows_of_schema(self) -> Any:
        """The container in the file of the schema."""

    @abstractmethod
    def make_schema(self, sample: Any, durable: bool) -> None:
        """Put a container as the schema, unless there is one, or another writer makes it now: who looks again finds it.

        Raises:
            OSError: it cannot be written.
        """

    # --- shards -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, name: str, mode: str) -> Any:
        """The container in a shard; with "r", what is written to its tensors does not reach the files."""

    @abstractmethod
    def has_shard(self, name: str) -> bool:
        """Whether a shard that is no map could be read until now."""

    @abstractmethod
    def format_of(self, name: str) -> str:
        """What shards like this one are called by `DatasetWriter(format=...)`."""

    @abstractmethod
    def shards(self, look: Callable[[str], bool] = lambda name: True) -> Iterator[Found]:
        """All that is in the folders of shards, or what `look` wants of it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a shard; readers see all of it or nothing."""

    @abstractmethod
    def remove_empty(self, limit: float, emptied: set[str]) -> None:
        """Remove the folders of writers that have nothing in them: those in `emptied`, and those older than `limit`."""

    @abstractmethod
    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Be the only one who removes shards, for a block.

        Raises:
            SaveError: somebody else does.
        """


# --- a folder ---------------------------------------------------------------------------------------------------------


class LocalLocation(Location):
    """A folder."""

    in_flight = 1

    def __init__(self, root: str, access: Access) -> None:
        self.root, self.access = root, access

    def manifests(self) -> dict[str, int | None]:
        return dict.fromkeys(_names_in(f"{self.root}/{WRITERS}"))

    def read(self, name: str, start: int, size: int | None) -> tuple[bytes, int]:
        path = self.path(name)
        with files.naming("read the manifest", path), files.closing(files.open_file(path)) as fd:
            size = os.fstat(fd).st_size
            return system.pread(fd, max(0, size - start), start), size

    def appender(self, name: str, durable: bool) -> Appender:
        return _File(self.path(name), durable)

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path(name))

    def begun(self) -> bool:
        return bool(_names_in(self.root))

    def strangers(self) -> list[str]:
        # What writers that fix the schema have beside it is hidden.
        return [name for name in _names_in(self.root) if name not in (SCHEMA, SHARDS, WRITERS) and name[0] not in ".%"]

    def rows_of_schema(self) -> Any:
        return open_save(self.path(SCHEMA))

    def make_schema(self, sample: Any, durable: bool) -> None:
        os.makedirs(self.root, exist_ok=True)
        limit = time.monotonic() + _PATIENCE
        while True:
            try:
                with writing("the schema", self.path(SCHEMA)):
                    sample.memmap(self.path(SCHEMA), archive=True, existsok=False, durable=durable)
                return
            except SaveError:
                # Another writer makes it, or has just made it.
                if self.has(SCHEMA):
                    return
                if time.monotonic() > limit:
                    raise
                time.sleep(0.001)

    def open(self, name: str, mode: str) -> Any:
        path = self.path(name)
        format = detect_format(path)
        if format == DIRECTORY and mode == "r":
            return load_directory(path, LoadOptions(source=PrivateSave(path)))
        if format in (DIRECTORY, ARCHIVE):
            return registry.lookup(DICT).load_memmap(path, mode=mode)
        return open_file(path, format, mode=mode)

    def has_shard(self, name: str) -> bool:
        return os.path.lexists(self.path(name))

    def format_of(self, name: str) -> str:
        found = detect_format(self.path(name))
        return found if found in (ARCHIVE, "zarr") else "folder"

    def shards(self, look: Callable[[str], bool] = lambda name: True) -> Iterator[Found]:
        for writer in _names_in(f"{self.root}/{SHARDS}"):
            for item in _names_in(f"{self.root}/{SHARDS}/{writer}"):
                name = f"{SHARDS}/{writer}/{item}"
                if look(name):
                    path = self.path(name)
                    complete = item[0] != "." and (not os.path.isdir(path) or _is_save(path))
                    yield Found(name, complete, _last_change(path))

    def remove(self, name: str) -> None:
        path = self.path(name)
        if not os.path.isdir(path):
            os.unlink(path)
            return
        gone = f"{os.path.dirname(path)}/.{os.path.basename(path)}.gone"
        if os.path.lexists(gone):
            shutil.rmtree(gone)
        os.rename(path, gone)
        shutil.rmtree(gone)

    def remove_empty(self, limit: float, emptied: set[str]) -> None:
        folder = f"{self.root}/{SHARDS}"
        for writer in _names_in(folder):
            path = f"{folder}/{writer}"
            if not os.listdir(path) and (f"{SHARDS}/{writer}" in emptied or os.lstat(path).st_mtime < limit):
                commit.unless_it_fails(os.rmdir, path)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        root, lock = self.root, self.path(_LOCK)
        with commit.locked(lock, root, os.O_RDWR | os.O_CREAT) as sure:
            if not sure:
                raise SaveError(
                    f"the file system of {root!r} has no locks, which would tell that nobody else compacts it"
                )
            try:
                yield
            finally:
                # While it is still locked: whoever opened it meanwhile sees that it is no longer there.
                os.unlink(lock)


class _File(Appender):
    """A local file."""

    def __init__(self, path: str, durable: bool) -> None:
        self._path, self._durable = path, durable
        self._fd: int | None = None
        self._end = 0

    def add(self, content: bytes) -> None:
        with files.naming("write the manifest", self._path):
            fd = self._opened()
            if os.fstat(fd).st_size != self._end:
                # Nothing may follow a line that is cut off.
                os.ftruncate(fd, self._end)
            try:
                if os.write(fd, content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
                if self._durable:
                    os.fsync(fd)
            except OSError:
                commit.unless_it_fails(os.ftruncate, fd, self._end)
                raise
        self._end += len(content)

    def _opened(self) -> int:
        if self._fd is None:
            folder = os.path.dirname(self._path)
            os.makedirs(folder, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | system.CLOEXEC
            self._fd = os.open(self._path, flags, 0o666)
            if self._durable:
                files.sync_folder(folder)
                files.sync_folder(os.path.dirname(folder))
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            if not self._end:
                os.unlink(self._path)


def _names_in(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _is_save(folder: str) -> bool:
    try:
        return bool(detect_format(folder))
    except OSError:
        return False


def _last_change(path: str) -> float:
    found = os.lstat(path).st_mtime
    for inner, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = max(found, os.lstat(f"{inner}/{name}").st_mtime)
    return found


# --- a URL ------------------------------------------------------------------------------------------------------------


class RemoteLocation(Location):
    """What is below a URL."""

    in_flight = IN_FLIGHT

    def __init__(self, url: PathLike, access: Access) -> None:
        self.access = access
        self._remote = Remote(url, access.storage_options)
        self.root = self._remote.url

    def path(self, name: str) -> str:
        return self._remote.url_of(name)

    def manifests(self) -> dict[str, int | None]:
        return {file.name.removeprefix(f"{WRITERS}/"): file.size for file in self._remote.files(WRITERS)}

    def read(self, name: str, start: int, size: int | None) -> tuple[bytes, int]:
        assert size is not None
        return (self._remote.read(name, start, size) if start < size else b""), size

    def appender(self, name: str, durable: bool) -> Appender:
        return _PutAgain(self._remote, name)

    def has(self, name: str) -> bool:
        return self._remote.find(name) is not None

    def begun(self) -> bool:
        return self.has(SCHEMA) or self._remote.find() is not None or bool(self._remote.files())

    def strangers(self) -> list[str]:
        if self._remote.find() is not None:
            return [self.root]
        names = {file.name.partition("/")[0] for file in self._remote.files()}
        return sorted(name for name in names if name not in (SCHEMA, SHARDS, WRITERS, _LOCK))

    def rows_of_schema(self) -> Any:
        return registry.lookup(DICT).load(
            self.path(SCHEMA), storage_options=self.access.storage_options, cache_dir=self.access.cache
        )

    def make_schema(self, sample: Any, durable: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="tensordict-upload-") as folder:
            sample.memmap(f"{folder}/{SCHEMA}", archive=True)
            with open(f"{folder}/{SCHEMA}", "rb") as file:
                content = file.read()
        with contextlib.suppress(FileExistsError):
            self._remote.put(SCHEMA, content, new=True)

    def open(self, name: str, mode: str) -> Any:
        path = self.path(name)
        if _is_zarr(name):
            return open_file(Remote(path, self.access.storage_options), "zarr")
        return open_rows(path, self.access)

    def has_shard(self, name: str) -> bool:
        # An object that is gone is noticed when it is asked for, but for a chunk of Zarr, which would be zeros.
        return not _is_zarr(name) or self.has(f"{name}/{_GROUP}")

    def format_of(self, name: str) -> str:
        return "zarr" if _is_zarr(name) else ARCHIVE if self.has(name) else "folder"

    def shards(self, look: Callable[[str], bool] = lambda name: True) -> Iterator[Found]:
        found: dict[str, Found] = {}
        for file in self._remote.files(SHARDS):
            parts = file.name.split("/")
            name = "/".join(parts[:3])
            if len(parts) < 3 or not look(name):
                continue
            known = found.get(name, Found(name, len(parts) == 3, 0.0))
            times = (known.changed, file.modified)
            changed = None if None in times else max(times)  # type: ignore[type-var]
            top = [_GROUP if _is_zarr(name) else META]
            found[name] = Found(name, known.complete or parts[3:] == top, changed)
        yield from found.values()

    def remove(self, name: str) -> None:
        # What makes a folder a save goes first: readers look for it once they have read.
        self._remote.delete([f"{name}/{META}", f"{name}/{_GROUP}"])
        self._remote.delete([name, *(file.name for file in self._remote.files(name))])

    def remove_empty(self, limit: float, emptied: set[str]) -> None:
        """There are no folders in a store of objects."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        claim = f"{socket.gethostname()}, process {os.getpid()}, {time.ctime()}, {secrets.token_hex(8)}".encode()
        try:
            self._remote.put(_LOCK, claim, new=True)
        except FileExistsError:
            who = self._remote.read(_LOCK).decode(errors="replace")
            raise SaveError(
                f"{self.root!r} is compacted or tidied by another process ({who}); if that was killed, delete "
                f"{self.path(_LOCK)!r}"
            ) from None
        try:
            yield
        finally:
            self._remote.delete([_LOCK])


def _is_zarr(name: str) -> bool:
    """Whether a shard is a Zarr group, as its name says."""
    return SUFFIXES.get(os.path.splitext(name)[1]) == "zarr"


class _PutAgain(Appender):
    """A file behind a URL, which is put again as a whole with each piece."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name = remote, name
        self._content = b""

    def add(self, content: bytes) -> None:
        self._remote.put(self._name, self._content + content)
        self._content += content

    def close(self) -> None:
        """Nothing is open."""
