"""The place of a data set, a local folder or a URL, with all operations that differ between the two.

In a folder, a writer appends to a file and keeps it locked. A URL takes only whole objects, so each record of a
manifest is an object of its own, put on condition that the name is free (`If-None-Match` or similar). The same is true
for the schema and for the claim of a process that compacts. Stores without such conditions keep the last of several
objects that are put at the same moment. So a writer reads the schema again after putting it, and readers refuse a
manifest with another schema.
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
    open_item,
    refuse_links,
    remove_item,
)
from tensordict.datasets.labels import DOCUMENTS, GROUP, GROUPS, check_label, find_label
from tensordict.datasets.lines import SHARDS, WRITERS, Line, is_shard_name
from tensordict.datasets.records import to_file, to_line
from tensordict.io.formats.archive import check_top
from tensordict.io.formats.archive_reader import Archive
from tensordict.io.formats.detect import detect_format
from tensordict.io.formats.loading import LoadOptions, load_directory
from tensordict.io.formats.opening import ARCHIVE, DIRECTORY, SUFFIXES, open_file
from tensordict.io.remote.remote_rows import open_rows
from tensordict.io.remote.remote_saves import Access, RemoteSave
from tensordict.io.remote.urls import IN_FLIGHT, READS_IN_FLIGHT, Remote, is_url
from tensordict.io.saving import commit
from tensordict.io.saving.source import SaveFolder
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import META, SCHEMA, local_path

# The file that a process locks while it compacts or tidies.
_LOCK = ".compacting"
# Names of shards that are being saved, and of shards that are being removed.
_STAGED = re.compile(r"\.(?P<shard>.+?)\.(tensordict-(new|old|lock)|gone)")
_READ = os.O_RDONLY | system.NONBLOCK
# The seconds that a new writer waits for the lock of its manifest.
_PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class ShardItem:
    """A file or folder among the shards of a writer, or a staged schema.

    Args:
        path: its path in the data set.
        shard: the path of the shard (or schema) that it is or was to become; empty if no writer gives such a name.
        complete: True for a whole save under the name of a shard.
        changed: the time of the last change inside, in seconds since 1970; `None` if unknown.
    """

    path: str
    shard: str
    complete: bool
    changed: float | None


# A function that returns the first record of a file, given the number of the next record.
Head = Callable[[int], list[Any]]


class Location:
    """A data set in a local folder; `RemoteLocation` is one at a URL. A `name` is a path in it, with slashes.

    Attributes:
        root: the absolute path of the folder, or the URL.
        access: the options of a URL.
        in_flight: the number of small files that are best read at once.
    """

    in_flight = 1
    is_remote = False

    def __init__(self, root: str, access: Access) -> None:
        self.root, self.access = root, access

    @staticmethod
    def of(path: PathLike, access: Access | None = None) -> Location:
        """Return the location for a path or a URL.

        Raises:
            SaveError: the URL cannot be reached, or its kind cannot hold data sets.
        """
        access = access or Access()
        return RemoteLocation(path, access) if is_url(path) else Location(local_path(path), access)

    def path(self, name: str) -> str:
        """Return the full path or URL of a name."""
        return f"{self.root}/{name}"

    # --- small files --------------------------------------------------------------------------------------------------

    def list_names(self) -> list[str]:
        """Return the names of all files and folders in the data set."""
        try:
            return sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []

    def list_foreign_names(self) -> list[str]:
        """Return the names of files and folders that do not belong to a data set."""
        # Temporary files of a writer begin with "%". Hidden files of the system do not matter.
        known = (SCHEMA, SHARDS, WRITERS, _LOCK)
        return [name for name in self.list_names() if name not in known and name[0] not in ".%"]

    def list_logs(self, folder: str) -> dict[str, int | None]:
        """Return the files in a folder of logs, with their lengths in bytes; `None` if the listing lacks them."""
        found: dict[str, int | None] = {}
        for name, kind in list_folder(self.root, folder).items():
            if kind == "folder":
                found |= {f"{name}/{inner}": None for inner in list_folder(self.root, f"{folder}/{name}")}
            else:
                found[name] = None
        return found

    def read(self, name: str, start: int = 0, size: int | None = None) -> tuple[bytes, int]:
        """Read a file from byte `start` on. Return the content and the length of the file.

        Args:
            name: the file.
            start: the first byte.
            size: its length in a listing, which saves a request at a URL.

        Raises:
            OSError: the file cannot be read; the error names it.
        """
        with files.naming("read the file", self.path(name)), files.closing(open_item(self.root, name, _READ)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise SaveError(f"{self.path(name)!r} is not a regular file")
            return system.pread(fd, max(0, status.st_size - start), start), status.st_size

    def create_file(self, name: str, content: bytes, durable: bool = False) -> None:
        """Make a file in one step.

        Raises:
            FileExistsError: the file exists.
            OSError: the file cannot be written.
        """
        os.makedirs(self.root, exist_ok=True)
        files.write_file(self.path(name), content, durable=durable, new=True)

    def replace_file(self, name: str, content: bytes, durable: bool) -> None:
        """Replace a file in one step. Folders only: an object at a URL never changes.

        Raises:
            OSError: the file cannot be written.
        """
        files.write_file(self.path(name), content, durable=durable)

    def new_log(self, name: str, head: Head, durable: bool) -> Log:
        """Make a log: a file of records that grows. Readers see a record whole or not at all."""
        return _GrowingLog(self.root, name, head, durable)

    def is_at_work(self, writer: str) -> bool:
        """Return True while a writer has its manifest open."""
        with (
            contextlib.suppress(FileNotFoundError),
            files.closing(open_item(self.root, f"{WRITERS}/{writer}.jsonl", _READ)) as fd,
        ):
            try:
                system.lock(fd)
            except BlockingIOError:
                return True
            system.unlock(fd)
        return False

    def remove_log(self, name: str, limit: float) -> None:
        """Remove a log without records, unless it changed after `limit` or its writer is at work."""
        folder, _, log = f"{name}.jsonl".rpartition("/")
        with contextlib.suppress(FileNotFoundError), files.closing(open_item(self.root, folder)) as parent:
            fd = os.open(log, _READ | system.NOFOLLOW | system.CLOEXEC, dir_fd=parent)
            with files.closing(fd), contextlib.suppress(BlockingIOError):
                # A writer that has just made the file waits for the lock and then makes another file.
                system.lock(fd)
                if os.fstat(fd).st_mtime < limit:
                    os.unlink(log, dir_fd=parent)

    # --- shards -------------------------------------------------------------------------------------------------------

    def open(self, name: str, mode: str, nbytes: int | None = None) -> Any:
        """Open a shard as a container. With "r", writing to its tensors does not change the files.

        Args:
            name: the path of the shard in the data set.
            mode: "r" or "r+".
            nbytes: the estimated bytes of its tensors, which saves requests at a URL.

        Raises:
            SaveError: the shard cannot be read, its label names another shard, or its path contains a link.
        """
        path = self.path(name)
        if format_of(name) == ARCHIVE:
            refuse_links(self.root, name)
            archive = Archive(path, mode)
            check_label(_find_archive_label(archive), name, path)
            check_top(archive)
            return load_directory(path, LoadOptions(mode=mode, source=archive))
        check_label(self.read_label(name), name, path)
        format = detect_format(path)
        if format == DIRECTORY:
            return load_directory(path, LoadOptions(mode=mode, source=SaveFolder(path, mode)))
        return open_file(path, LoadOptions(mode=mode), Access(), format)

    def read_label(self, name: str) -> Line | None:
        """Read the label of a shard. Return `None` if it has no label.

        Raises:
            OSError: the shard is missing or cannot be read.
        """
        if format_of(name) == ARCHIVE:
            refuse_links(self.root, name)
            return _find_archive_label(Archive(self.path(name)))
        return find_label(lambda inner: self.read(f"{name}/{inner}")[0], GROUPS if is_zarr(name) else DOCUMENTS)

    def has_shard(self, name: str) -> bool:
        """Return True while this unmapped shard exists."""
        return os.path.lexists(self.path(name))

    def list_writers(self) -> list[str]:
        """Return the names of the folders of shards, which are the ids of writers."""
        return [name for name, kind in list_folder(self.root, SHARDS).items() if kind == "folder"]

    def list_items(self, writer: str) -> list[ShardItem]:
        """Return all files and folders among the shards of a writer."""
        found = []
        for name, kind in list_folder(self.root, f"{SHARDS}/{writer}").items():
            path = f"{SHARDS}/{writer}/{name}"
            shard = _parse_item_name(name) if kind != "link" else ""
            tops = [os.path.lexists(f"{self.path(path)}/{top}") for top in (META, GROUP)]
            whole = shard == name and (kind == "file" or any(tops))
            changed = _find_last_change(self.path(path))
            found.append(ShardItem(path, shard and f"{SHARDS}/{writer}/{shard}", whole, changed))
        return found

    @contextlib.contextmanager
    def local_files(self, name: str) -> Iterator[str]:
        """Give a local path with the files of a shard in a `with` block, downloading them if necessary."""
        refuse_links(self.root, name)
        yield self.path(name)

    def remove(self, item: ShardItem, is_ours: IsOurs) -> str:
        """Remove an item if all its files are ours; readers see all of it or nothing.

        Returns:
            the reason why the item stays; empty if it was removed.

        Raises:
            OSError: the item cannot be removed.
        """
        folder, _, name = item.path.rpartition("/")
        with files.naming("remove", self.path(item.path)):
            return remove_item(self.root, folder or ".", name, is_ours)

    def list_staged_schemas(self) -> list[ShardItem]:
        """Return the temporary files of writers that were killed in `create_file`.

        Other saves name their temporary files in the same way, so the content decides: the schema, or a part from its
        first byte on.
        """
        items = list_folder(self.root, ".")
        names = [name for name, kind in items.items() if kind == "file" and commit.TEMPORARY.fullmatch(name)]
        if not names or items.get(SCHEMA) != "file":
            return []
        schema = self.read(SCHEMA)[0]
        return [
            ShardItem(name, SCHEMA, False, _find_last_change(self.path(name)))
            for name in names
            if (start := self._read_start(name, len(schema) + 1)) and schema.startswith(start)
        ]

    def _read_start(self, name: str, count: int) -> bytes:
        """Return the first `count` bytes of a file, or all if there are fewer; nothing for a file that is gone."""
        with contextlib.suppress(FileNotFoundError), files.closing(open_item(self.root, name, _READ)) as fd:
            return system.pread(fd, count, 0)
        return b""

    def remove_empty(self, writer: str) -> None:
        """Remove the folder of a writer's shards if it is empty."""
        with contextlib.suppress(OSError), files.closing(open_item(self.root, SHARDS)) as fd:
            os.rmdir(writer, dir_fd=fd)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[float]:
        """Exclude other processes from removing shards in a `with` block. Give the time, in seconds since 1970.

        The time comes from the clock that dates the files, so a fast clock of this machine removes nothing.

        Raises:
            SaveError: another process removes shards.
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
                # Remove the file before its lock ends. A process that opened it meanwhile tries again.
                os.unlink(lock)


class _GrowingLog:
    """A file that grows line by line. It stays locked until `close`, which tells others that its writer is alive."""

    def __init__(self, root: str, name: str, head: Head, durable: bool) -> None:
        self._shards, self._durable = f"{root}/{SHARDS}/{os.path.basename(name)}", durable
        self._path = path = f"{root}/{name}.jsonl"
        self._records, self._end, self._crc = 0, 0, 0
        folder = os.path.dirname(path)
        with files.naming("write the manifest", path):
            os.makedirs(folder, exist_ok=True)
            # A sweep may remove the file before it is locked, as the leftover of a killed writer. `acquire` then makes
            # it again.
            opened = partial(open_item, root, f"{name}.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
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
        """Add a line. If that fails, the line does not count and may be added again."""
        self._append(line.to_json())
        self._records += 1

    def _append(self, item: list[Any]) -> None:
        content, crc = to_line(item, self._crc)
        with files.naming("write the manifest", self._path):
            if os.fstat(self._fd).st_size != self._end:
                # An earlier write was cut off: remove its part of a line.
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
        """Close the file. Remove a manifest without lines, unless its writer has left a shard."""
        try:
            if not self._records:
                commit.try_to(os.rmdir, self._shards)
                if not os.path.lexists(self._shards):
                    os.unlink(self._path)
        finally:
            # Unlock explicitly, because a forked child may have the descriptor, too.
            if system.HAS_LOCKS:
                commit.try_to(system.unlock, self._fd)
            os.close(self._fd)


# --- what lies in a folder --------------------------------------------------------------------------------------------


def _parse_item_name(name: str) -> str:
    """Return the name of the shard that an item is or was to become; empty if no writer gives such a name."""
    if is_shard_name(name):
        return name
    known = _STAGED.fullmatch(name)
    return known["shard"] if known is not None and is_shard_name(known["shard"]) else ""


def _find_archive_label(archive: Archive) -> Line | None:
    return find_label(lambda inner: archive.read(f"{archive.path}/{inner}"), DOCUMENTS)


def _find_last_change(path: str) -> float:
    found = os.lstat(path).st_mtime
    for inner, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = max(found, os.lstat(f"{inner}/{name}").st_mtime)
    return found


# --- a URL ------------------------------------------------------------------------------------------------------------


class RemoteLocation(Location):
    """A data set below a URL."""

    in_flight = READS_IN_FLIGHT
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
        # Nothing of a writer at a URL needs protection: its rows are in its memory until they are committed.
        return False

    def list_names(self) -> list[str]:
        if self._remote.find() is not None:
            return [self.root]
        return sorted({file.name.partition("/")[0] for file in self._remote.files()})

    def create_file(self, name: str, content: bytes, durable: bool = False) -> None:
        self._remote.put(name, content, new=True)

    def open(self, name: str, mode: str, nbytes: int | None = None) -> Any:
        path = self.path(name)
        if is_zarr(name):
            check_label(self.read_label(name), name, path)
            return open_file(Remote(path, self.access.storage_options), LoadOptions(), self.access, "zarr")
        return open_rows(path, self.access, lambda read: check_label(find_label(read, DOCUMENTS), name, path), nbytes)

    def read_label(self, name: str) -> Line | None:
        if is_zarr(name):
            return find_label(lambda inner: self._remote.read(f"{name}/{inner}"), GROUPS)
        found: list[Line | None] = []
        open_rows(self.path(name), self.access, lambda read: found.append(find_label(read, DOCUMENTS)))
        return found[0]

    def has_shard(self, name: str) -> bool:
        # Reading a missing object raises an error, except for chunks of Zarr, which are read as zeros.
        return not is_zarr(name) or self._remote.find(f"{name}/{GROUP}") is not None

    def list_writers(self) -> list[str]:
        return self._remote.folders(SHARDS)

    def list_items(self, writer: str) -> list[ShardItem]:
        found: dict[str, ShardItem] = {}
        for file in self._remote.files(f"{SHARDS}/{writer}"):
            parts = file.name.split("/")
            if len(parts) < 3:
                continue  # a file in the place of the folder
            path = "/".join(parts[:3])
            shard = path if is_shard_name(parts[2]) else ""
            known = found.get(path, ShardItem(path, shard, bool(shard) and len(parts) == 3, 0.0))
            times = (known.changed, file.modified)
            changed = None if None in times else max(times)  # type: ignore[type-var]
            top = [GROUP if is_zarr(path) else META]
            found[path] = ShardItem(path, shard, known.complete or (bool(shard) and parts[3:] == top), changed)
        return list(found.values())

    @contextlib.contextmanager
    def local_files(self, name: str) -> Iterator[str]:
        save = RemoteSave(self.path(name), self.access)
        try:
            with tempfile.TemporaryDirectory(prefix="tensordict-shard-") as folder:
                yield save.mirror(folder)
        finally:
            save.close()

    def upload(self, name: str, path: str) -> None:
        """Upload the files of a shard; the file that completes it goes last. A second try uploads the same files."""
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
        # Delete the file that completes the shard first: readers look for it after reading.
        self._remote.delete([f"{item.path}/{META}", f"{item.path}/{GROUP}"])
        self._remote.delete([item.path, *inside])
        return ""

    def list_staged_schemas(self) -> list[ShardItem]:
        # An object is put in one step.
        return []

    def remove_empty(self, writer: str) -> None:
        """Do nothing, because object stores have no folders."""

    def remove_log(self, name: str, limit: float) -> None:
        # A log without records is a single object, so this deletes no others.
        head = self._remote.find(_head_of(name))
        if head is not None and head.modified is not None and head.modified < limit:
            self._remote.delete([head.name])

    def put_new(self, name: str, content: bytes) -> None:
        """Put an object under a name that is free or has the same content.

        Raises:
            SaveError: the name has another content.
            OSError: the object cannot be written.
        """
        try:
            self._remote.put(name, content, new=True)
        except FileExistsError as error:
            raise SaveError(f"there is another object at {self.path(name)!r}, which only one process writes") from error

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects."""
        self._remote.delete(names)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[float]:
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
    """Return True for names of shards that are Zarr groups."""
    return format_of(name) == "zarr"


def format_of(name: str) -> str:
    """Return the format of a shard by its name."""
    return SUFFIXES.get(os.path.splitext(name)[1], DIRECTORY)


def _head_of(name: str) -> str:
    """Return the path of the first object of a log at a URL, which has the head only."""
    return f"{name}/{0:08}-{0:08}.jsonl"


class _SegmentedLog:
    """A log at a URL. Each record is an object of its own, which is never put again with another content."""

    def __init__(self, place: RemoteLocation, name: str, head: Head) -> None:
        self._place, self._name, self._head = place, name, head
        self._records = 0
        place.put_new(_head_of(name), to_file([head(0)]))

    def add(self, line: Line) -> None:
        """Add a line. If that fails, the line does not count and may be added again."""
        name = f"{self._name}/{self._records:08}-{self._records + 1:08}.jsonl"
        self._place.put_new(name, to_file([self._head(self._records), line.to_json()]))
        self._records += 1

    def close(self) -> None:
        """End the log. Remove a manifest without lines, unless its writer has left a shard."""
        if not self._records and not self._place.list_items(self._name.rpartition("/")[2]):
            self._place.delete([_head_of(self._name)])


Log = _GrowingLog | _SegmentedLog
