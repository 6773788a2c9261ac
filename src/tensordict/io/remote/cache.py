"""Sparse local copies of files behind URLs: `RemoteCache`, and the temporary copies of a load without a cache.

The name of a cached file is a hash of its URL, size and tag, so each version of a file has its own copy. A note next to
the copy lists the ranges it holds, each with a checksum that is verified before the range is used. A damaged range is
fetched again. Checksums detect damage but not forgery: a user who can write to the folder can change a range and its
checksum. The folder is therefore closed to other users.

Many processes may share a cache. A process that fetches holds the lock on the file; the others wait and then find the
bytes. Eviction deletes a file, but existing memory maps of it stay valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator
from functools import partial

from tensordict.core.exceptions import SaveError
from tensordict.core.locks import Lock
from tensordict.core.logs import logger
from tensordict.io.remote.urls import IN_FLIGHT, ChangedError, Remote, RemoteFile
from tensordict.io.saving.private_folder import PrivateFolder
from tensordict.io.saving.progress import show_transfer
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike

# Larger ranges are fetched in pieces of this length, several at once.
_PIECE = 8 << 20
# Fetch gaps of at most this length with their neighbours. The first mini-batch from large shards takes 1.13 s. Gaps of
# 64 KiB take 1.26 s, and gaps of 1 MiB take 2.62 s (50 MB/s, answers after 100 ms).
_GAP = 256 << 10
_CHECKED = 4 << 20
# Seconds to wait for another process that fetches the same file.
_PATIENCE = 3600.0
# Default size of a cache.
_MAX_BYTES = 16 << 30
# Names of the files of a cache. Other files in the folder are never removed.
_DATA = re.compile(r"([0-9a-f]{40})\.data")

Range = tuple[int, int]


class RemoteCache:
    """A folder that keeps what was fetched from URLs, for the argument `cache_dir` of `load` and the others.

    Args:
        path: the folder. Any number of processes of one user may use it at once. It must belong to that user and be
            closed to others (mode 0700), and no link to it is followed; a folder that is missing is made so.
        max_bytes: what it keeps at most on the disk, once a load is done: the files that have not been used for longest
            are deleted first. 16 GiB unless the environment variable `TENSORDICT_CACHE_BYTES` says otherwise.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from tensordict import RemoteCache, TensorDict
        >>> _ = TensorDict(a=torch.arange(3)).save("memory://docs/cached.tdz", overwrite=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = RemoteCache(folder, max_bytes=1 << 30)
        ...     td = TensorDict.load("memory://docs/cached.tdz", cache_dir=cache)
        ...     cache.nbytes > 0
        True
        >>> td["a"]
        tensor([0, 1, 2])
    """

    def __init__(self, path: PathLike, max_bytes: int | None = None) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.folder = PrivateFolder(self.path)
        self.max_bytes = int(os.environ.get("TENSORDICT_CACHE_BYTES", _MAX_BYTES)) if max_bytes is None else max_bytes
        if self.max_bytes < 0:
            raise ValueError(f"max_bytes is the size of a cache in bytes, got {self.max_bytes}")

    def __repr__(self) -> str:
        return f"RemoteCache({self.path!r}, max_bytes={self.max_bytes})"

    @property
    def nbytes(self) -> int:
        """The disk space of the cached files, in bytes."""
        return sum(taken for _, taken, _ in self._files())

    def _files(self) -> list[tuple[float, int, str]]:
        """List the files as (time of last use, disk space, key), sorted by the time."""
        found: list[tuple[float, int, str]] = []
        for name in self.folder.names():
            if key := _DATA.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):
                    status = self.folder.status(name)
                    taken = status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_atime_ns / 1e9, taken, key[1]))
        return sorted(found)

    def evict(self) -> None:
        """Delete the files that have not been used for longest, until the others fit; those in use are left.

        Raises:
            SaveError: the folder is open to other users, or is a link.
        """
        found = self._files()
        total = sum(taken for _, taken, _ in found)
        for _, taken, key in found:
            if total <= self.max_bytes:
                return
            # Skip a file that another process has locked to use it, and a file that the folder refuses.
            with contextlib.suppress(SaveError, FileNotFoundError), self.folder.hold_lock(f"{key}.data", 0, 0):
                with contextlib.suppress(FileNotFoundError):
                    self.folder.unlink(f"{key}.json")
                self.folder.unlink(f"{key}.data")
                total -= taken


class LocalCopies:
    """The folder of fetched files: a cache, or a temporary folder that `close` removes."""

    def __init__(self, cache: RemoteCache | None) -> None:
        self.cache = cache
        self.path = tempfile.mkdtemp(prefix="tensordict-remote-") if cache is None else cache.path
        self.folder = PrivateFolder(self.path)
        self._pid = os.getpid()
        self.folder.create()

    def close(self) -> None:
        """Remove the temporary folder, or trim the cache to its size."""
        if self.cache is None:
            # A forked process must not remove the folder of its parent.
            if self._pid == os.getpid():
                shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.cache.evict()


class CachedFile:
    """The local copy of a file behind a URL, which may be empty yet.

    Args:
        remote: the URL of the folder.
        file: the file there.
        place: the folder of the copy.

    Attributes:
        path: the path of the copy, which is as long as the file; only the ranges given to `ensure` have content.
    """

    def __init__(self, remote: Remote, file: RemoteFile, place: LocalCopies) -> None:
        self.remote, self.file, self._place = remote, file, place
        self.url = str(remote.url_of(file.name))
        key = hashlib.sha256(f"{remote.identity_of(file.name)}\n{file.size}\n{file.tag}".encode()).hexdigest()[:40]
        self._data, self._note = f"{key}.data", f"{key}.json"
        self.path = f"{place.path}/{self._data}"
        # Ranges of the copy whose checksums were verified.
        self._have: list[Range] = []
        self.fd = -1
        self._lock = Lock()

    @contextlib.contextmanager
    def hold_open(self) -> Iterator[int]:
        """Keep the copy open during a block; yields its descriptor. Eviction by others does not affect an open copy."""
        with self._lock.held:
            if self.fd >= 0:
                yield self.fd
                return
            self.hold()
            try:
                yield self.fd
            finally:
                self.close()

    def hold(self) -> int:
        """Open the copy until `close`; returns its descriptor."""
        with self._lock.held, self._naming(), self._lock_file():
            self.fd = self._place.folder.open(self._data, os.O_RDWR | os.O_CREAT)
            if os.fstat(self.fd).st_size != self.file.size:
                os.ftruncate(self.fd, self.file.size)
            if self._place.cache is not None:
                # The copy may have been evicted and created again since it was closed.
                self._have = []
            return self.fd

    def close(self) -> None:
        """Close the descriptor. Existing memory maps stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        return files.naming(f"keep what is fetched from {self.url!r} in the file", self.path)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Read a range, by default the whole file."""
        stop = self.file.size if stop is None else stop
        with self.hold_open() as fd:
            self.ensure([(start, stop)])
            return b"".join(_read_pieces(fd, start, stop))

    def ensure(self, ranges: Iterable[Range] | None = None) -> None:
        """Fetch the missing parts of these ranges, by default of the whole file. Neighbours share a request.

        Raises:
            ChangedError: the file behind the URL was replaced.
            OSError: the server fails, or the disk is full.
        """
        wanted = merge_ranges([(0, self.file.size)] if ranges is None else ranges)
        with self.hold_open():
            if not subtract_ranges(wanted, self._have):
                return
            with self._lock_file():
                kept = self._read_ranges(subtract_ranges(wanted, self._have))
                missing = merge_ranges(subtract_ranges(wanted, self._have), _GAP)
                if missing:
                    fetched = self._fetch(missing)
                    self._have = merge_ranges([*self._have, *missing])
                    self._keep([*kept, *fetched])

    def insert(self, start: int, content: bytes) -> None:
        """Put bytes that were read from the file behind the URL into the copy, which is open and in no cache."""
        with self._naming():
            files.write_bytes(self.fd, content, start)
        self._have = merge_ranges([*self._have, (start, start + len(content))])

    @property
    def is_whole(self) -> bool:
        """True if all of the file was fetched."""
        return self._have == [(0, self.file.size)]

    def _lock_file(self) -> contextlib.AbstractContextManager[object]:
        if self._place.cache is None:
            return contextlib.nullcontext()
        return self._place.folder.hold_lock(self._data, os.O_CREAT, _PATIENCE)

    def _fetch(self, missing: Iterable[Range]) -> list[tuple[int, int, int]]:
        pieces = [(at, min(at + _PIECE, stop)) for start, stop in missing for at in range(start, stop, _PIECE)]
        found: list[tuple[int, int, int]] = []

        def fetch(start: int, stop: int) -> None:
            content = self.remote.read(self.file.name, start, stop, self.file)
            with self._naming():
                files.write_bytes(self.fd, content, start)
            if self._place.cache is not None:
                found.append((start, stop, zlib.crc32(content)))
            shown.add(stop - start)

        total = sum(stop - start for start, stop in pieces)
        with show_transfer("fetching", total) as shown:
            files.run_all([partial(fetch, start, stop) for start, stop in pieces], IN_FLIGHT)
        logger.debug("fetched %d bytes of %r in %d requests", total, self.url, len(pieces))
        # Each answer of S3 says which file it is from. Without a cache, `RemoteSave.check` asks once at the end.
        is_checked = self.remote.is_s3 or self._place.cache is None
        if not is_checked and self.remote.find(self.file.name) != self.file:
            raise ChangedError(f"{self.url!r} was replaced while it was read: read it again")
        return found

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _read_ranges(self, wanted: list[Range]) -> list[tuple[int, int, int]]:
        """Read the ranges in the note. Ranges in `wanted` are verified, and left out if their checksum is wrong."""
        if self._place.cache is None or not self._is_there():
            return []
        kept: list[tuple[int, int, int]] = []
        for start, stop, crc in self._read_note():
            if any(start < other_stop and other_start < stop for other_start, other_stop in wanted):
                if self._crc(start, stop) != crc:
                    continue
                self._have = merge_ranges([*self._have, (start, stop)])
            kept.append((start, stop, crc))
        # Eviction sorts files by their access time.
        status = os.fstat(self.fd)
        os.utime(self.fd if os.utime in os.supports_fd else self.path, ns=(time.time_ns(), status.st_mtime_ns))
        return kept

    def _keep(self, ranges: list[tuple[int, int, int]]) -> None:
        if self._place.cache is None or not self._is_there():
            return
        note = {**self._identity(), "ranges": sorted(ranges)}
        with self._naming():
            self._place.folder.write(self._note, json.dumps(note).encode())

    def _identity(self) -> dict[str, object]:
        """Return the part of the note that identifies the file."""
        return {"url": self.url, "size": self.file.size, "tag": self.file.tag}

    def _is_there(self) -> bool:
        """Return False if the open copy was evicted, so that its path leads to another file or nowhere."""
        try:
            return os.path.samestat(self._place.folder.status(self._data), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _read_note(self) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges and checksums in the note. A damaged note, or one of another file, yields nothing."""
        try:
            content = self._place.folder.read(self._note)
        except FileNotFoundError:
            return
        try:
            note = json.loads(content)
        except (ValueError, RecursionError):
            return
        if not isinstance(note, dict) or any(note.get(name) != value for name, value in self._identity().items()):
            return
        ranges = note.get("ranges")
        for noted in ranges if isinstance(ranges, list) else ():
            fits = type(noted) is list and len(noted) == 3 and all(type(number) is int for number in noted)
            if fits and 0 <= noted[0] < noted[1] <= self.file.size:
                yield noted[0], noted[1], noted[2]

    def _crc(self, start: int, stop: int) -> int:
        crc = 0
        for piece in _read_pieces(self.fd, start, stop):
            crc = zlib.crc32(piece, crc)
        return crc


def _read_pieces(fd: int, start: int, stop: int) -> Iterator[bytes]:
    """Read a range of a file in pieces."""
    while start < stop and (piece := system.pread(fd, min(_CHECKED, stop - start), start)):
        yield piece
        start += len(piece)


def merge_ranges(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """Sort ranges and join those at most `gap` apart; empty ranges are left out."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def subtract_ranges(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Subtract `others` from ranges. Both must come from `merge_ranges`."""
    found: list[Range] = []
    taken = list(others)
    for start, stop in ranges:
        for other_start, other_stop in taken:
            if other_stop <= start or stop <= other_start:
                continue
            if start < other_start:
                found.append((start, other_start))
            start = max(start, other_stop)
        if start < stop:
            found.append((start, stop))
    return found
