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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict.core.exceptions import SaveError
from tensordict.datasets.folders import (
    IsOurs,
    list_folder,
    open_below,
    open_item,
    refuse_links,
    remove_item,
)
from tensordict.datasets.labels import DOCUMENTS, GROUP, GROUPS, check_label, find_label
from tensordict.datasets.lines import SHARDS, WRITERS, Line, is_shard_name
from tensordict.datasets.records import to_file, to_line
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.detect import detect_format
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.formats.opening import ARCHIVE, DIRECTORY, SUFFIXES, map_save, open_file
from tensordict.io.remote.remote_rows import open_rows
from tensordict.io.remote.remote_saves import Access
from tensordict.io.remote.urls import IN_FLIGHT, Remote, is_url
from tensordict.io.saving import commit
from tensordict.io.saving.source import PrivateSaveFolder
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


# Returns the first record of a file whose next record is the one of this number.
Head = Callable[[int], list[Any]]


class Location:
    """The place of a data set: a folder; `RemoteLocation` is a URL. A `name` is a path in it, with slashes.

    Attributes:
        root: the absolute path of the folder, or the URL.
        access: how a URL is reached.
        in_flight: how many small files are best read at once.
    """

    in_flight = 1
    is_remote = False

    def __init__(self, root: str, access: Access) -> None:
        self.root, self.access = root, access

    @staticmethod
    def of(path: PathLike, access: Access | None = None) -> Location:
        """That of a path or a URL.

        Raises:
            SaveError: it is a URL that cannot be reached, or no data set can be at.
        """
        access = access or Access()
        return RemoteLocation(path, access) if is_url(path) else Location(local_path(path), access)

    def path(self, name: str) -> str:
        """The path or URL of a name."""
        return f"{self.root}/{name}"

    # --- small files --------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of all that is in it."""
        try:
            return sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []

    def strangers(self) -> list[str]:
        """Return the names of files and folders that no data set has."""
        # Writers that fix the schema stage it under hidden names.
        return [name for name in self.names() if name not in (SCHEMA, SHARDS, WRITERS, _LOCK) and name[0] not in ".%"]

    def list_logs(self, folder: str) -> dict[str, int | None]:
        """The paths of all files in a folder of logs, below it, and their lengths in bytes where a listing tells."""
        found: dict[str, int | None] = {}
        for name, kind in list_folder(self.root, folder).items():
            if kind == "folder":
                found |= {f"{name}/{inner}": None for inner in list_folder(self.root, f"{folder}/{name}")}
            else:
                found[name] = None
        return found

    def read(self, name: str, start: int = 0, size: int | None = None) -> tuple[bytes, int]:
        """The content of a file from a byte on, and its length; `size` is the length in a listing.

        Raises:
            OSError: it cannot be read; names it.
        """
        with files.naming("read the file", self.path(name)), open_item(self.root, name, _READ) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SaveError(f"{self.path(name)!r} is not a regular file")
            return system.pread(fd, max(0, status.st_size - start), start), status.st_size

    def put(self, name: str, content: bytes, durable: bool = False) -> None:
        """Make a file in one step.

        Raises:
            FileExistsError: there is one of this name.
            OSError: it cannot be written.
        """
        os.makedirs(self.root, exist_ok=True)
        staged = files.temporary_name(self.root)
        with files.naming("write the file", self.path(name)):
            try:
                files.write_new(staged, content, durable)
                os.link(staged, self.path(name))
            finally:
                commit.try_to(os.unlink, staged)
            if durable:
                files.sync_folder(self.root)

    def new_log(self, name: str, head: Head, durable: bool) -> Log:
        """Make a file of records that grows; each record is there as a whole or not at all."""
        return _GrowingLog(self.root, name, head, durable)

    def is_at_work(self, writer: str) -> bool:
        """Return True while a writer has its manifest open."""
        with (
            contextlib.suppress(FileNotFoundError),
            open_item(self.root, f"{WRITERS}/{writer}.jsonl", _READ) as fd,
        ):
            try:
                system.lock(fd)
            except BlockingIOError:
                return True
            system.unlock(fd)
        return False

    def remove_log(self, name: str, limit: float) -> None:
        """Remove a log without records that did not change after `limit`, unless its writer is at work."""
        folder, _, log = f"{name}.jsonl".rpartition("/")
        with contextlib.suppress(FileNotFoundError), open_item(self.root, folder) as parent:
            fd = os.open(log, _READ | system.NOFOLLOW | system.CLOEXEC, dir_fd=parent)
            with files.closing(fd), contextlib.suppress(BlockingIOError):
                # A writer that has just made the file waits for the lock, and makes another one.
                system.lock(fd)
                if os.fstat(fd).st_mtime < limit:
                    os.unlink(log, dir_fd=parent)

    # --- shards -------------------------------------------------------------------------------------------------------

    def open(self, name: str, mode: str) -> Any:
        """The container in a shard; with "r", writing to its tensors does not change the files.

        Raises:
            SaveError: it cannot be read, its label names another shard, or a link is on the way.
        """
        path = self.path(name)
        check_label(self.label(name), name, path)
        format = detect_format(path)
        if format == DIRECTORY and mode == "r":
            return load_directory(path, LoadOptions(source=PrivateSaveFolder(path)))
        if format in (DIRECTORY, ARCHIVE):
            return map_save(path, LoadOptions(mode=mode), Access())
        return open_file(path, LoadOptions(mode=mode), Access(), format)

    def label(self, name: str) -> Line | None:
        """Return the shard that the label in a shard names; `None` when there is no label.

        Raises:
            OSError: the shard is missing or cannot be read.
        """
        if format_of(name) == ARCHIVE:
            refuse_links(self.root, name)
            path = self.path(name)
            archive = Archive(path)
            return find_label(lambda inner: archive.read(f"{path}/{inner}"), DOCUMENTS)
        return find_label(lambda inner: self.read(f"{name}/{inner}")[0], GROUPS if is_zarr(name) else DOCUMENTS)

    def has_shard(self, name: str) -> bool:
        """Return True while this unmapped shard exists."""
        return os.path.lexists(self.path(name))

    def writers(self) -> list[str]:
        """The names of the folders of shards."""
        return [name for name, kind in list_folder(self.root, SHARDS).items() if kind == "folder"]

    def items(self, writer: str) -> list[ShardItem]:
        """All that lies in the folder of a writer's shards."""
        found = []
        for name, kind in list_folder(self.root, f"{SHARDS}/{writer}").items():
            path = f"{SHARDS}/{writer}/{name}"
            shard = _shard_of(name) if kind != "link" else ""
            tops = [os.path.lexists(f"{self.path(path)}/{top}") for top in (META, GROUP)]
            whole = shard == name and (kind == "file" or any(tops))
            changed = _last_change(self.path(path))
            found.append(ShardItem(path, shard and f"{SHARDS}/{writer}/{shard}", whole, changed))
        return found

    @contextlib.contextmanager
    def local(self, name: str) -> Iterator[str]:
        """A path on this machine with the files of a shard, for a block."""
        refuse_links(self.root, name)
        yield self.path(name)

    def remove(self, item: ShardItem, is_ours: IsOurs) -> str:
        """Remove an item when all its files are ours; readers see all of it or nothing. Returns why it stays.

        Raises:
            OSError: it cannot be removed.
        """
        folder, _, name = item.path.rpartition("/")
        with files.naming("remove", self.path(item.path)):
            return remove_item(self.root, folder, name, is_ours)

    def remove_empty(self, writer: str) -> None:
        """Remove the folder of a writer's shards when nothing is in it."""
        with contextlib.suppress(OSError), open_item(self.root, SHARDS) as fd:
            os.rmdir(writer, dir_fd=fd)

    @contextlib.contextmanager
    def alone(self) -> Iterator[float]:
        """Be the only process that removes shards, for a block; gives the time there, in seconds since 1970.

        The time comes from the clock that also dates the files, so that a clock that is ahead removes nothing.

        Raises:
            SaveError: another process does.
        """
        root, lock = self.root, self.path(_LOCK)
        with commit.hold_lock(lock, root, os.O_RDWR | os.O_CREAT) as sure:
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


class _GrowingLog:
    """A file that is appended to, and stays locked until it is closed, so that others know that its writer lives."""

    def __init__(self, root: str, name: str, head: Head, durable: bool) -> None:
        self._shards, self._durable = f"{root}/{SHARDS}/{os.path.basename(name)}", durable
        self._path = path = f"{root}/{name}.jsonl"
        self._records, self._end, self._crc = 0, 0, 0
        folder = os.path.dirname(path)
        with files.naming("write the manifest", path):
            os.makedirs(folder, exist_ok=True)
            # A sweep that took the file for one that a killed writer left may have removed it: then it is made again.
            opened = partial(open_below, root, f"{name}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._fd, _ = commit.acquire(opened, path, path, _PATIENCE)
            if durable:
                files.sync_folder(folder)
                files.sync_folder(os.path.dirname(folder))
        try:
            self._append(head(0))
        except OSError:
            self.close()
            raise

    def add(self, line: Line) -> None:
        """Add a line; when that fails, it does not count, and may be added again."""
        self._append(line.to_json())
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
                commit.try_to(os.ftruncate, self._fd, self._end)
                raise
        self._end += len(content)
        self._crc = crc

    def close(self) -> None:
        """Close the file. A manifest that lists nothing is removed, unless its writer has left a shard."""
        try:
            if not self._records:
                commit.try_to(os.rmdir, self._shards)
                if not os.path.lexists(self._shards):
                    os.unlink(self._path)
        finally:
            # Explicitly, because a forked child may have the descriptor, too.
            if system.HAS_LOCKS:
                commit.try_to(system.unlock, self._fd)
            os.close(self._fd)


# --- what lies in a folder --------------------------------------------------------------------------------------------


def _shard_of(name: str) -> str:
    """The name of the shard that an item is or was to become; empty when no writer makes an item of this name."""
    if is_shard_name(name):
        return name
    known = _STAGED.fullmatch(name)
    return known["shard"] if known is not None and is_shard_name(known["shard"]) else ""


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
    is_remote = True

    def __init__(self, url: PathLike, access: Access) -> None:
        self.access = access
        self._remote = Remote(url, access.storage_options)
        self.root = self._remote.url

    def path(self, name: str) -> str:
        return self._remote.url_of(name)

    def list_logs(self, folder: str) -> dict[str, int | None]:
        return {file.name.removeprefix(f"{folder}/"): file.size for file in self._remote.files(folder)}

    def read(self, name: str, start: int = 0, size: int | None = None) -> tuple[bytes, int]:
        content = self._remote.read(name, start, size) if size is None or start < size else b""
        return content, start + len(content) if size is None else size

    def new_log(self, name: str, head: Head, durable: bool) -> Log:
        return _SegmentedLog(self, name, head)

    def is_at_work(self, writer: str) -> bool:
        # Rows of a writer at a URL are in its memory until they count, so nothing of it can be taken away.
        return False

    def names(self) -> list[str]:
        if self._remote.find() is not None:
            return [self.root]
        return sorted({file.name.partition("/")[0] for file in self._remote.files()})

    def put(self, name: str, content: bytes, durable: bool = False) -> None:
        self._remote.put(name, content, new=True)

    def open(self, name: str, mode: str) -> Any:
        path = self.path(name)
        if is_zarr(name):
            check_label(self.label(name), name, path)
            return open_file(Remote(path, self.access.storage_options), LoadOptions(), self.access, "zarr")
        return open_rows(path, self.access, lambda read: check_label(find_label(read, DOCUMENTS), name, path))

    def label(self, name: str) -> Line | None:
        if is_zarr(name):
            return find_label(lambda inner: self._remote.read(f"{name}/{inner}"), GROUPS)
        found: list[Line | None] = []
        open_rows(self.path(name), self.access, lambda read: found.append(find_label(read, DOCUMENTS)))
        return found[0]

    def has_shard(self, name: str) -> bool:
        # An object that is gone is noticed when it is asked for, but for a chunk of Zarr, which would be zeros.
        return not is_zarr(name) or self._remote.find(f"{name}/{GROUP}") is not None

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
        try:
            self._remote.put(name, content, new=True)
        except FileExistsError as error:
            raise SaveError(f"there is another object at {self.path(name)!r}, which only one process writes") from error

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
    return format_of(name) == "zarr"


def format_of(name: str) -> str:
    """Return the format of a shard, which its name tells."""
    return SUFFIXES.get(os.path.splitext(name)[1], DIRECTORY)


def _write_file(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def _head_of(name: str) -> str:
    """Return the path of the first object of a log at a URL, which has no record."""
    return f"{name}/{0:08}-{0:08}.jsonl"


class _SegmentedLog:
    """Records behind a URL, each in an object of its own that is never put again with another content."""

    def __init__(self, place: RemoteLocation, name: str, head: Head) -> None:
        self._place, self._name, self._head = place, name, head
        self._records = 0
        place.put_new(_head_of(name), to_file([head(0)]))

    def add(self, line: Line) -> None:
        """Add a line; when that fails, it does not count, and may be added again."""
        name = f"{self._name}/{self._records:08}-{self._records + 1:08}.jsonl"
        self._place.put_new(name, to_file([self._head(self._records), line.to_json()]))
        self._records += 1

    def close(self) -> None:
        """End the log. A manifest that lists nothing is removed, unless its writer has left a shard."""
        if not self._records and not self._place.items(self._name.rpartition("/")[2]):
            self._place.delete([_head_of(self._name)])


Log = _GrowingLog | _SegmentedLog
