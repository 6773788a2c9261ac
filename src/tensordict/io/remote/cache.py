"""Local copies of files behind URLs, as long as the originals, with the bytes that were asked for.

The name of a file in a cache is a hash of its URL, its size and its tag, so that another content is another file. A
note beside the file lists the ranges that are there, each with a checksum, which is compared before the range is used:
a damaged range is fetched again. Checksums find damage, not forgery: the folder is closed to other users, as whoever
can write to it can change a range together with its checksum.

Many processes may use one cache. A process that fetches holds the lock on the file, and the others wait and find the
bytes there. Evicting a file deletes it, and what was mapped of it stays mapped.
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
from tensordict.io.remote.urls import IN_FLIGHT, Remote, RemoteFile
from tensordict.io.saving.private_folder import PrivateFolder
from tensordict.io.saving.progress import show_transfer
from tensordict.memory import files, system
from tensordict.memory.mapped import PathLike

# Larger ranges are fetched in pieces of this, several at once.
_PIECE = 8 << 20
# A gap between two ranges is fetched too when it has at most so many bytes: less than a request costs.
_GAP = 64 << 10
_CHECKED = 4 << 20
# How long to wait for another process that fetches the same file, in seconds.
_PATIENCE = 3600.0
# How much a cache keeps unless it is told otherwise.
_MAX_BYTES = 16 << 30
# The names of the files of a cache; a cache removes no others.
_DATA = re.compile(r"([0-9a-f]{40})\.data")

Range = tuple[int, int]


class ChangedError(SaveError):
    """The file behind a URL was replaced while it was read."""


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
        """The space that its files take on the disk, in bytes."""
        return sum(taken for _, taken, _ in self._files())

    def _files(self) -> list[tuple[float, int, str]]:
        """When each file was last used, how much it takes, and its key."""
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
            # A process that holds the lock is about to use the file, and a file that is refused is left to the user.
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

    def file(self, remote: Remote, file: RemoteFile, check: bool = True) -> CachedFile:
        """The local copy of a file, which may have no content yet; arguments as for `CachedFile`."""
        return CachedFile(remote, file, self, check)

    def close(self) -> None:
        """Give up what is not to be kept."""
        if self.cache is None:
            # A process that was forked has them too, and is not the one to remove them.
            if self._pid == os.getpid():
                shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.cache.evict()


class CachedFile:
    """The local copy of a file behind a URL.

    Args:
        remote: where the file is.
        file: which one it is.
        place: where the copy goes.
        check: look whether it was replaced while it was read.

    Attributes:
        path: the path of the copy, which is as long as the file; only the ranges given to `ensure` have content.
    """

    def __init__(self, remote: Remote, file: RemoteFile, place: LocalCopies, check: bool = True) -> None:
        self._check = check
        self.remote, self.file, self._place = remote, file, place
        self.url = str(remote.url_of(file.name))
        key = hashlib.sha256(f"{remote.identity_of(file.name)}\n{file.size}\n{file.tag}".encode()).hexdigest()[:40]
        self._data, self._note = f"{key}.data", f"{key}.json"
        self.path = f"{place.path}/{self._data}"
        # These ranges are here, and their checksums are right.
        self._have: list[Range] = []
        self.fd = -1
        self._lock = Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """The descriptor of the copy, for a block: what is there then stays, whatever others evict."""
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
        """The descriptor of the copy, from now on until `close`."""
        with self._lock.held, self._naming(), self._locked():
            self.fd = self._place.folder.open(self._data, os.O_RDWR | os.O_CREAT)
            if os.fstat(self.fd).st_size != self.file.size:
                os.ftruncate(self.fd, self.file.size)
            if self._place.cache is not None:
                # It may have been evicted and made again since it was closed.
                self._have = []
            return self.fd

    def close(self) -> None:
        """Close the descriptor; what was mapped through it stays."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        return files.naming(f"keep what is fetched from {self.url!r} in the file", self.path)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a range."""
        stop = self.file.size if stop is None else stop
        with self.held() as fd:
            self.ensure([(start, stop)])
            return b"".join(_pieces(fd, start, stop))

    def ensure(self, ranges: Iterable[Range] | None = None) -> None:
        """Have these ranges (all of it by default) here, fetching what is missing; neighbours go in one request.

        Raises:
            ChangedError: the file behind the URL was replaced.
            OSError: it cannot be fetched, or has no room on the disk.
        """
        wanted = merged([(0, self.file.size)] if ranges is None else ranges)
        with self.held():
            if not without(wanted, self._have):
                return
            with self._locked():
                kept = self._kept(without(wanted, self._have))
                missing = merged(without(wanted, self._have), _GAP)
                if missing:
                    fetched = self._fetch(missing)
                    self._have = merged([*self._have, *missing])
                    self._keep([*kept, *fetched])

    def _locked(self) -> contextlib.AbstractContextManager[object]:
        if self._place.cache is None:
            return contextlib.nullcontext()
        return self._place.folder.hold_lock(self._data, os.O_CREAT, _PATIENCE)

    def _fetch(self, missing: Iterable[Range]) -> list[tuple[int, int, int]]:
        pieces = [(at, min(at + _PIECE, stop)) for start, stop in missing for at in range(start, stop, _PIECE)]
        found: list[tuple[int, int, int]] = []

        def fetch(start: int, stop: int) -> None:
            content = self.remote.read(self.file.name, start, stop)
            with self._naming():
                files.write_bytes(self.fd, content, start)
            found.append((start, stop, zlib.crc32(content)))
            shown.add(stop - start)

        total = sum(stop - start for start, stop in pieces)
        with show_transfer("fetching", total) as shown:
            files.run_all([partial(fetch, start, stop) for start, stop in pieces], IN_FLIGHT)
        logger.debug("fetched %d bytes of %r in %d requests", total, self.url, len(pieces))
        if self._check and self.remote.find(self.file.name) != self.file:
            raise ChangedError(f"{self.url!r} was replaced while it was read: read it again")
        return found

    # --- what is kept -------------------------------------------------------------------------------------------------

    def _kept(self, wanted: list[Range]) -> list[tuple[int, int, int]]:
        """The ranges in the note; a range that is wanted is checked, and left out where its checksum is wrong."""
        if self._place.cache is None or not self._is_there():
            return []
        kept: list[tuple[int, int, int]] = []
        for start, stop, crc in self._noted():
            if any(start < other_stop and other_start < stop for other_start, other_stop in wanted):
                if self._crc(start, stop) != crc:
                    continue
                self._have = merged([*self._have, (start, stop)])
            kept.append((start, stop, crc))
        # Eviction goes by the time of the last use.
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
        """The part of a note that names its file."""
        return {"url": self.url, "size": self.file.size, "tag": self.file.tag}

    def _is_there(self) -> bool:
        """Tell whether the path still leads to the open file, which may have been evicted and made again."""
        try:
            return os.path.samestat(self._place.folder.status(self._data), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _noted(self) -> Iterator[tuple[int, int, int]]:
        """The ranges and checksums in the note beside the file; none of a note that is damaged or of another file."""
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
        for piece in _pieces(self.fd, start, stop):
            crc = zlib.crc32(piece, crc)
        return crc


def _pieces(fd: int, start: int, stop: int) -> Iterator[bytes]:
    """Read a range of a file in pieces."""
    while start < stop and (piece := system.pread(fd, min(_CHECKED, stop - start), start)):
        yield piece
        start += len(piece)


def merged(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
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


def without(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Cut `others` out of ranges; `merged` has made both."""
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
