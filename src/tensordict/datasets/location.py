"""The place of a data set: a folder on this machine, or a URL. This module has all that differs between the two.

A writer appends to a file in a folder, and the system locks it. A URL takes whole objects only, so each record of a
manifest is an object of its own, put under the condition that there is none of its name (`If-None-Match` and its
like). So are the schema, and the claim of the process that compacts. A store without such conditions keeps the last of
several objects that are put at the same moment: the schema is read again after it was put, and opening refuses a
manifest of another schema.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict.containers.dense import TensorDict
from tensordict.core.errors import SaveError
from tensordict.datasets.folders import (
    IsOurs,
    list_folder,
    open_below,
    open_item,
    refuse_links,
    remove_empty_folder,
    remove_item,
)
from tensordict.datasets.labels import DOCUMENTS, GROUP, GROUPS, Label, check_label, find_label
from tensordict.datasets.lines import SHARDS, WRITERS, is_shard_name
from tensordict.datasets.records import to_file, to_line
from tensordict.io import commit
from tensordict.io.archive_reader import Archive
from tensordict.io.detect import detect_format
from tensordict.io.formats import ARCHIVE, DIRECTORY, SUFFIXES, load_mapped, open_file, open_save
from tensordict.io.loading import LoadOptions, load_directory
from tensordict.io.remote import IN_FLIGHT, Remote, is_url
from tensordict.io.remote_rows import open_rows
from tensordict.io.remote_saves import Access
from tensordict.io.source import PrivateSave
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META, SCHEMA, local_path

# Locked by whoever compacts or tidies.
_LOCK = ".compacting"
# Names under which saves of shards are staged, and under which a shard waits to be removed.
_STAGED = re.compile(r"\.(?P<shard>.+?)\.(tensordict-(new|old|lock)|gone)")
_READ = os.O_RDONLY | system.NONBLOCK
# How long a writer waits for another one that fixes the schema at the same time, in seconds.
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class ShardItem:
    """Something that lies in the folder of a writer's shards.

    Args:
        path: in the data set.
        shard: the path of the shard that it is or was to become; empty when its name is not one that a writer gives.
        complete: whether it is a whole save under the name of a shard.
        changed: when something in it was last changed, in seconds since 1970; `None` when unknown.
    """

    path: str
    shard: str
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
        raise OSError(error.errno, f"cannot write {what} ({error})", str(path)) from error


# Returns the first record of a file whose next record is the one of this number.
Head = Callable[[int], list[Any]]


class Log(ABC):
    """Records that are added one by one; each is there as a whole or not at all. It exists from the beginning."""

    @abstractmethod
    def add(self, item: list[Any]) -> None:
        """Add a record; when that fails, it may be added again."""

    @abstractmethod
    def close(self) -> None:
        """End the log. A log without records is removed, unless its writer has left a shard."""


class Location(ABC):
    """The place of a data set. A `name` is a path in it, with slashes.

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
        """True for a URL."""
        return isinstance(self, RemoteLocation)

    # --- small files --------------------------------------------------------------------------------------------------

    @abstractmethod
    def list_logs(self, folder: str) -> dict[str, int | None]:
        """The paths of all files in a folder of logs, below it, and their lengths in bytes where a listing tells."""

    @abstractmethod
    def read(self, name: str, start: int, size: int | None) -> tuple[bytes, int]:
        """The content of a file from a byte on, and its length; `size` is the length in a listing.

        Raises:
            OSError: it cannot be read; names it.
        """

    @abstractmethod
    def new_log(self, name: str, head: Head, durable: bool) -> Log:
        """Make a log."""

    @abstractmethod
    def is_at_work(self, writer: str) -> bool:
        """Return True while a writer has its manifest open."""

    # --- the schema ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return True when a file of this name exists."""

    @abstractmethod
    def begun(self) -> bool:
        """Return True when anything is there."""

    @abstractmethod
    def strangers(self) -> list[str]:
        """Return the names of files and folders that no data set has."""

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
        """The container in a shard; with "r", writing to its tensors does not change the files.

        Raises:
            SaveError: it cannot be read, its label names another shard, or a link is on the way.
        """

    @abstractmethod
    def label(self, name: str) -> Label | None:
        """The label that stands in a shard; `None` when there is none.

        Raises:
            OSError: the shard is missing or cannot be read.
        """

    @abstractmethod
    def has_shard(self, name: str) -> bool:
        """Return True while this unmapped shard exists."""

    @abstractmethod
    def format_of(self, name: str) -> str:
        """The argument of `DatasetWriter(format=...)` that makes shards like this one."""

    @abstractmethod
    def writers(self) -> list[str]:
        """The names of the folders of shards."""

    @abstractmethod
    def items(self, writer: str) -> list[ShardItem]:
        """All that lies in the folder of a writer's shards."""

    @abstractmethod
    def local(self, name: str) -> contextlib.AbstractContextManager[str]:
        """A path on this machine with the files of a shard, for a block."""

    @abstractmethod
    def remove(self, item: ShardItem, is_ours: IsOurs) -> str:
        """Remove an item when all its files are ours; readers see all of it or nothing. Returns why it stays.

        Raises:
            OSError: it cannot be removed.
        """

    @abstractmethod
    def remove_empty(self, writer: str) -> None:
        """Remove the folder of a writer's shards when nothing is in it."""

    @abstractmethod
    def remove_log(self, name: str, limit: float) -> None:
        """Remove a log without records that did not change after `limit`, unless its writer is at work."""

    @abstractmethod
    def alone(self) -> contextlib.AbstractContextManager[float]:
        """Be the only process that removes shards, for a block; gives the time there, in seconds since 1970.

        The time comes from the clock that also dates the files, so that a clock that is ahead removes nothing.

        Raises:
            SaveError: another process does.
        """


# --- a folder ---------------------------------------------------------------------------------------------------------


class LocalLocation(Location):
    """A folder."""

    in_flight = 1

    def __init__(self, root: str, access: Access) -> None:
        self.root, self.access = root, access

    def list_logs(self, folder: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for name, kind in list_folder(self.root, folder).items():
            if kind == "folder":
                found |= {f"{name}/{inner}": None for inner in list_folder(self.root, f"{folder}/{name}")}
            else:
                found[name] = None
        return found

    def read(self, name: str, start: int, size: int | None) -> tuple[bytes, int]:
        with files.naming("read the manifest", self.path(name)), open_item(self.root, name, _READ) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SaveError(f"{self.path(name)!r} is not a regular file")
            return system.pread(fd, max(0, status.st_size - start), start), status.st_size

    def new_log(self, name: str, head: Head, durable: bool) -> Log:
        return _GrowingLog(self.root, name, head, durable)

    def is_at_work(self, writer: str) -> bool:
        with (
            contextlib.suppress(FileNotFoundError),
            open_item(self.root, _log_name(f"{WRITERS}/{writer}"), _READ) as fd,
        ):
            try:
                system.lock(fd)
            except BlockingIOError:
                return True
            system.unlock(fd)
        return False

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path(name))

    def begun(self) -> bool:
        return bool(_names_in(self.root))

    def strangers(self) -> list[str]:
        # Writers that fix the schema stage it under hidden names.
        return [name for name in _names_in(self.root) if name not in (SCHEMA, SHARDS, WRITERS) and name[0] not in ".%"]

    def rows_of_schema(self) -> Any:
        refuse_links(self.root, SCHEMA)
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
        check_label(self.label(name), name, path)
        format = detect_format(path)
        if format == DIRECTORY and mode == "r":
            return load_directory(path, LoadOptions(source=PrivateSave(path)))
        if format in (DIRECTORY, ARCHIVE):
            return load_mapped(path, LoadOptions(mode=mode), Access())
        return open_file(path, LoadOptions(mode=mode), Access(), format)

    def label(self, name: str) -> Label | None:
        path = self.path(name)
        refuse_links(self.root, name)
        if _format_of(name) == ARCHIVE:
            archive = Archive(path)
            return find_label(lambda inner: archive.read(f"{path}/{inner}"), DOCUMENTS)
        return find_label(lambda inner: _read_file(f"{path}/{inner}"), GROUPS if is_zarr(name) else DOCUMENTS)

    def has_shard(self, name: str) -> bool:
        return os.path.lexists(self.path(name))

    def format_of(self, name: str) -> str:
        found = detect_format(self.path(name))
        return found if found in (ARCHIVE, "zarr") else "folder"

    def writers(self) -> list[str]:
        return [name for name, kind in list_folder(self.root, SHARDS).items() if kind == "folder"]

    def items(self, writer: str) -> list[ShardItem]:
        found = []
        for name, kind in list_folder(self.root, f"{SHARDS}/{writer}").items():
            path = f"{SHARDS}/{writer}/{name}"
            shard = _shard_of(name) if kind != "link" else ""
            whole = shard == name and (kind == "file" or _is_save(self.path(path)))
            changed = _last_change(self.path(path))
            found.append(ShardItem(path, shard and f"{SHARDS}/{writer}/{shard}", whole, changed))
        return found

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[str]:
        refuse_links(self.root, name)
        yield self.path(name)

    def remove(self, item: ShardItem, is_ours: IsOurs) -> str:
        folder, _, name = item.path.rpartition("/")
        with files.naming("remove", self.path(item.path)):
            return remove_item(self.root, folder, name, is_ours)

    def remove_empty(self, writer: str) -> None:
        with contextlib.suppress(FileNotFoundError), open_item(self.root, SHARDS) as fd:
            remove_empty_folder(fd, writer)

    def remove_log(self, name: str, limit: float) -> None:
        folder, _, log = _log_name(name).rpartition("/")
        with contextlib.suppress(FileNotFoundError), open_item(self.root, folder) as parent:
            fd = os.open(log, _READ | system.NOFOLLOW | system.CLOEXEC, dir_fd=parent)
            with files.closing(fd), contextlib.suppress(BlockingIOError):
                # A writer that has just made the file waits for the lock, and makes another one.
                system.lock(fd)
                if os.fstat(fd).st_mtime < limit:
                    os.unlink(log, dir_fd=parent)

    @contextlib.contextmanager
    def alone(self) -> Iterator[float]:
        root, lock = self.root, self.path(_LOCK)
        with commit.locked(lock, root, os.O_RDWR | os.O_CREAT) as sure:
            if not sure:
                raise SaveError(
                    f"the file system of {root!r} has no locks, which would tell that nobody else compacts it"
                )
            try:
                os.utime(lock)
                yield os.stat(lock).st_mtime
            finally:
                # Remove the file before its lock ends: a process that opened it meanwhile looks for it again.
                os.unlink(lock)


class _GrowingLog(Log):
    """A file that is appended to, and stays locked until it is closed, so that others know that its writer lives."""

    def __init__(self, root: str, name: str, head: Head, durable: bool) -> None:
        self._root, self._name, self._durable = root, name, durable
        self._path = f"{root}/{_log_name(name)}"
        self._records, self._end, self._crc = 0, 0, 0
        folder = os.path.dirname(self._path)
        with files.naming("write the manifest", self._path):
            os.makedirs(folder, exist_ok=True)
            self._fd = self._create()
            if durable:
                files.sync_folder(folder)
                files.sync_folder(os.path.dirname(folder))
        try:
            self._append(head(0))
        except OSError:
            self.close()
            raise

    def _create(self) -> int:
        """Create the file and lock it; once more when a sweep took it for one that a killed writer left."""
        while True:
            fd = open_below(self._root, _log_name(self._name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
            try:
                _wait_for_lock(fd)
                if os.path.lexists(self._path) and os.path.samestat(os.lstat(self._path), os.fstat(fd)):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def add(self, item: list[Any]) -> None:
        self._append(item)
        self._records += 1

    def _append(self, item: list[Any]) -> None:
        content, crc = to_line(item, self._crc)
        with files.naming("write the manifest", self._path):
            if os.fstat(self._fd).st_size != self._end:
                # Nothing may follow a line that is cut off.
                os.ftruncate(self._fd, self._end)
            try:
                if os.write(self._fd, content) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
                if self._durable:
                    os.fsync(self._fd)
            except OSError:
                commit.unless_it_fails(os.ftruncate, self._fd, self._end)
                raise
        self._end += len(content)
        self._crc = crc

    def close(self) -> None:
        try:
            if not self._records and _is_empty(f"{self._root}/{SHARDS}/{os.path.basename(self._name)}"):
                os.unlink(self._path)
        finally:
            # Explicitly, because a forked child may have the descriptor, too.
            if system.HAS_LOCKS:
                commit.unless_it_fails(system.unlock, self._fd)
            os.close(self._fd)


def _wait_for_lock(fd: int) -> None:
    """Lock a file that others lock for a moment only; go on without a lock on a file system that has none."""
    limit = time.monotonic() + _PATIENCE
    while system.HAS_LOCKS:
        try:
            system.lock(fd)
            return
        except BlockingIOError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.001)
        except OSError:
            # Whoever tidies refuses to work there.
            return


def _log_name(name: str) -> str:
    return f"{name}.jsonl"


def _is_empty(folder: str) -> bool:
    """Remove an empty folder; return True when there is no folder then."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
    return not os.path.lexists(folder)


def _shard_of(name: str) -> str:
    """The name of the shard that an item is or was to become; empty when no writer makes an item of this name."""
    if is_shard_name(name):
        return name
    known = _STAGED.fullmatch(name)
    return known["shard"] if known is not None and is_shard_name(known["shard"]) else ""


def _read_file(path: str) -> bytes:
    with files.closing(os.open(path, _READ | system.NOFOLLOW | system.CLOEXEC)) as fd:
        status = os.fstat(fd)
        return system.pread(fd, status.st_size, 0) if stat.S_ISREG(status.st_mode) else b""


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
    """A data set below a URL."""

    in_flight = IN_FLIGHT

    def __init__(self, url: PathLike, access: Access) -> None:
        self.access = access
        self._remote = Remote(url, access.storage_options)
        self.root = self._remote.url

    def path(self, name: str) -> str:
        return self._remote.url_of(name)

    def list_logs(self, folder: str) -> dict[str, int | None]:
        return {file.name.removeprefix(f"{folder}/"): file.size for file in self._remote.files(folder)}

    def read(self, name: str, start: int, size: int | None) -> tuple[bytes, int]:
        assert size is not None
        return (self._remote.read(name, start, size) if start < size else b""), size

    def new_log(self, name: str, head: Head, durable: bool) -> Log:
        return _SegmentedLog(self._remote, name, head)

    def is_at_work(self, writer: str) -> bool:
        # Rows of a writer at a URL are in its memory until they count, so nothing of it can be taken away.
        return False

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
        return TensorDict.load(
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
        if is_zarr(name):
            check_label(self.label(name), name, path)
            return open_file(Remote(path, self.access.storage_options), LoadOptions(), self.access, "zarr")
        return open_rows(path, self.access, lambda read: check_label(find_label(read, DOCUMENTS), name, path))

    def label(self, name: str) -> Label | None:
        if is_zarr(name):
            return find_label(lambda inner: self._remote.read(f"{name}/{inner}"), GROUPS)
        found: list[Label | None] = []
        open_rows(self.path(name), self.access, lambda read: found.append(find_label(read, DOCUMENTS)))
        return found[0]

    def has_shard(self, name: str) -> bool:
        # An object that is gone is noticed when it is asked for, but for a chunk of Zarr, which would be zeros.
        return not is_zarr(name) or self.has(f"{name}/{GROUP}")

    def format_of(self, name: str) -> str:
        return "zarr" if is_zarr(name) else ARCHIVE if self.has(name) else "folder"

    def writers(self) -> list[str]:
        return self._remote.folders(SHARDS)

    def items(self, writer: str) -> list[ShardItem]:
        found: dict[str, ShardItem] = {}
        for file in self._remote.files(f"{SHARDS}/{writer}"):
            parts = file.name.split("/")
            path = "/".join(parts[:3])
            shard = path if is_shard_name(parts[2]) else ""
            known = found.get(path, ShardItem(path, shard, bool(shard) and len(parts) == 3, 0.0))
            times = (known.changed, file.modified)
            changed = None if None in times else max(times)  # type: ignore[type-var]
            top = [GROUP if is_zarr(path) else META]
            found[path] = ShardItem(path, shard, known.complete or (bool(shard) and parts[3:] == top), changed)
        return list(found.values())

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tensordict-shard-") as folder:
            path = f"{folder}/{os.path.basename(name)}"
            found = [file for file in self._remote.files(name) if file.name != name]
            if not found:
                _write_file(path, self._remote.read(name))
            for file in found:
                inner = file.name[len(name) + 1 :]
                if not {"", ".", ".."}.isdisjoint(inner.split("/")):
                    raise SaveError(f"{self.path(file.name)!r} is no file of a shard: its name leads out of it")
                _write_file(f"{path}/{inner}", self._remote.read(file.name))
            yield path

    def upload(self, name: str, path: str) -> None:
        """Upload the files of a shard, and last the one that completes it. A second try uploads the same files."""
        if not os.path.isdir(path):
            self._remote.put(name, path)
            return
        inside = [os.path.relpath(f"{at}/{file}", path) for at, _, names in os.walk(path) for file in names]
        last = GROUP if is_zarr(name) else META
        jobs = [partial(self._remote.put, f"{name}/{file}", f"{path}/{file}") for file in inside if file != last]
        files.run_all(jobs, IN_FLIGHT)
        self._remote.put(f"{name}/{last}", f"{path}/{last}")

    def remove(self, item: ShardItem, is_ours: IsOurs) -> str:
        inside = [file.name for file in self._remote.files(item.path)]
        foreign = [name for name in inside if not is_ours(name[len(item.path) + 1 :])]
        if foreign:
            return f"it holds {foreign[0]!r}, which no shard has"
        # The file that makes a folder a save goes first: readers look for it once they have read.
        self._remote.delete([f"{item.path}/{META}", f"{item.path}/{GROUP}"])
        self._remote.delete([item.path, *inside])
        return ""

    def remove_empty(self, writer: str) -> None:
        """A store of objects has no folders."""

    def remove_log(self, name: str, limit: float) -> None:
        # A log without records is one object. Whoever has put others beside it keeps them.
        head = self._remote.find(_head_of(name))
        if head is not None and head.modified is not None and head.modified < limit:
            self._remote.delete([head.name])

    def put_new(self, name: str, content: bytes) -> None:
        """Put an object under a name that is free, or has the same content.

        Raises:
            SaveError: there is another one.
            OSError: it cannot be written.
        """
        _put_new(self._remote, name, content)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        self._remote.delete(names)

    @contextlib.contextmanager
    def alone(self) -> Iterator[float]:
        claim = f"{socket.gethostname()}, process {os.getpid()}, {time.ctime()}, {secrets.token_hex(8)}".encode()
        try:
            self._remote.put(_LOCK, claim, new=True)
        except FileExistsError:
            who = "which has ended meanwhile"
            with contextlib.suppress(FileNotFoundError):
                who = self._remote.read(_LOCK).decode(errors="replace")
            raise SaveError(
                f"{self.root!r} is compacted or tidied by another process ({who}); if that was killed, delete "
                f"{self.path(_LOCK)!r}"
            ) from None
        try:
            made = self._remote.find(_LOCK)
            yield time.time() if made is None or made.modified is None else made.modified
        finally:
            self._remote.delete([_LOCK])


def is_zarr(name: str) -> bool:
    """Return True when the name of a shard says that it is a Zarr group."""
    return _format_of(name) == "zarr"


def _format_of(name: str) -> str:
    return SUFFIXES.get(os.path.splitext(name)[1], "")


def _write_file(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def _put_new(remote: Remote, name: str, content: bytes) -> None:
    try:
        remote.put(name, content, new=True)
    except FileExistsError as error:
        raise SaveError(f"there is another object at {remote.url_of(name)!r}, which only one process writes") from error


def _head_of(name: str) -> str:
    """Return the path of the first object of a log at a URL, which has no record."""
    return f"{name}/{0:08}-{0:08}.jsonl"


class _SegmentedLog(Log):
    """Records behind a URL, each in an object of its own that is never put again with another content."""

    def __init__(self, remote: Remote, name: str, head: Head) -> None:
        self._remote, self._name, self._head = remote, name, head
        self._records = 0
        _put_new(remote, _head_of(name), to_file([head(0)]))

    def add(self, item: list[Any]) -> None:
        name = f"{self._name}/{self._records:08}-{self._records + 1:08}.jsonl"
        _put_new(self._remote, name, to_file([self._head(self._records), item]))
        self._records += 1

    def close(self) -> None:
        if not self._records and not self._remote.files(f"{SHARDS}/{self._name.rpartition('/')[2]}"):
            self._remote.delete([_head_of(self._name)])
