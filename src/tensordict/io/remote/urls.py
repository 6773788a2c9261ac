"""Files behind URLs (`s3://`, `gs://`, `http://`, `memory://`), through fsspec: what is there, ranges of it, uploads.

Whatever fails in a way that may pass (connections that drop, answers 5xx, too few bytes) is tried again, after a delay
that doubles each time and is partly random; what then still fails is an error that names the URL.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from tensordict.core import extras
from tensordict.core.exceptions import SaveError
from tensordict.core.redaction import HIDDEN, redact, secrets_of_url
from tensordict.io.remote.credentials import GuardedOptions, Url, as_url, full_url
from tensordict.io.remote.credentials import StorageOptions as StorageOptions
from tensordict.io.remote.listing import Listing, is_listed_by_pages, list_below
from tensordict.io.saving.progress import Progress, show_transfer
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import scheme_of

# How often one thing is tried: `TENSORDICT_REMOTE_ATTEMPTS` says otherwise.
_ATTEMPTS = 6
# The first delay in seconds, which doubles up to the longest.
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0
# So many requests are under way at once.
IN_FLIGHT = 8

# Answers of HTTP and errors of the system that may pass.
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_ERRNO = frozenset(
    getattr(errno, name, 0)
    for name in ("EIO", "EREMOTEIO", "EAGAIN", "EBUSY", "ETIMEDOUT", "ECONNRESET", "ECONNABORTED", "EPIPE")
)
# Parts of the names that clients of HTTP give to errors of a connection.
_PASSING_NAMES = (
    "Timeout",
    "Disconnected",
    "Payload",
    "Incomplete",
    "HTTPClientError",
    "ConnectionError",
    "ChecksumError",
)
_FINAL = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
# The fields by which various stores tell one content of a file from another.
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "version_id",
    "LastModified",
    "Last-Modified",
    "mtime",
    "updated",
    "last_modified",
    "created",
)
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")

Content = bytes | str
T = TypeVar("T")


def is_url(path: object) -> bool:
    """Tell whether a path is a URL that leads elsewhere; `file://` is local."""
    return scheme_of(path) not in ("", "file")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind a URL.

    Attributes:
        name: its path below the URL; empty for the file at the URL itself.
        size: in bytes.
        tag: a text that is another one when the content is: of the etag or, where there is none, the time.
        modified: when it was made, in seconds since 1970; `None` where the store does not say.
    """

    name: str
    size: int
    tag: str
    modified: float | None = field(default=None, compare=False)


class LengthError(OSError):
    """Fewer bytes came than were asked for, or the file became longer while it was read."""


class Remote:
    """The files at a URL and below it, to read and write them as a whole or by ranges.

    It is the one door to other machines. Data sets, too, read manifests and write shards through it::

        store = Remote("s3://bucket/data", storage_options)
        store.put("shards/0.tdz", "/local/staged.tdz")      # a local file; readers see all of it or nothing
        store.put("claim", b"who", new=True)                # an error when there is one already
        [file.name for file in store.files("shards")]       # all below, at any depth
        store.read("manifest.json"); store.read("shards/0.tdz", -100); store.read("shards/0.tdz", 10, 20)
        store.delete(["claim"])

    Containers in it are saved and loaded under `store.url_of(name)` by `save` and `load` as under paths. All methods
    may be called from several threads. It pickles as its URL and options, and not where these hold secrets, see
    `io.credentials`.

    Args:
        url: where; `file://` too.
        storage_options: what the file system of fsspec for the scheme takes (`endpoint_url`, `key`, `token`, ...);
            fsspec's own configuration (`FSSPEC_S3_ENDPOINT_URL=...`, `~/.config/fsspec/`) holds as well. Two options
            are of this package: `allow_secrets=True` lets pickles have the secrets in the options and the URL, and
            `redirect_hosts` names the hosts that a server of HTTP may redirect to, beside itself.

    Attributes:
        url: where, without the secrets in the URL.

    Raises:
        ModuleNotFoundError: fsspec is missing, or what it needs for the scheme.
        SaveError: the scheme is unknown, or the secrets of the URL were left out by a message.

    Example:
        >>> from tensordict.io.remote.urls import Remote
        >>> store = Remote("memory://docs/remote")
        >>> store.put("a/b", b"0123456789")
        >>> store.read("a/b", 2, 5), [(file.name, file.size) for file in store.files()]
        (b'234', [('a/b', 10)])
    """

    def __init__(self, url: PathLike, storage_options: StorageOptions | None = None) -> None:
        self.storage_options = GuardedOptions.of(storage_options)
        given = as_url(url, self.storage_options.allow_secrets)
        self._full = _without_slashes(full_url(given))
        self.url = as_url(self._full, isinstance(given, Url) and given._allowed)
        if f"{HIDDEN}@" in self._full or f"={HIDDEN}" in self._full:
            raise SaveError(
                f"the secrets of {redact(self._full)!r} were left out, as they are in messages: give the whole URL"
            )
        self._secrets = [*self.storage_options.secrets(), *secrets_of_url(self._full)]
        self.is_http = scheme_of(self.url) in ("http", "https")
        self._connect()
        protocols = self._known_fs.protocol
        protocols = (protocols,) if isinstance(protocols, str) else protocols
        self._is_local, self._is_memory = "file" in protocols, "memory" in protocols
        self.is_s3 = "s3" in protocols and hasattr(self._known_fs, "_call_s3")

    def _connect(self) -> None:
        core = extras.require("fsspec.core", "remote")
        self._pid = os.getpid()
        try:
            url, options = self.for_fsspec()
            self._known_fs, self._root = core.url_to_fs(url, **options)
        except ImportError as error:
            # fsspec says what to install.
            raise ModuleNotFoundError(f"{self.url!r} cannot be reached: {self.redact(error)}") from error
        except ValueError as error:
            raise SaveError(f"{self.url!r} cannot be reached: {self.redact(error)}") from error
        self._root = _without_slashes(self._root)

    def for_fsspec(self) -> tuple[str, dict[str, Any]]:
        """The URL with its secrets and the options, from which fsspec makes the file system."""
        url, options = self._full, self.storage_options.for_library()
        if self.is_http:
            options.setdefault("get_client", _web(self.url).Client(self.storage_options.redirect_hosts))
            parts = urlsplit(url)
            if "@" in parts.netloc:
                # aiohttp does not send this to the target of a redirect, and no error of it has the password.
                user, _, host = parts.netloc.rpartition("@")
                login = base64.b64encode(unquote(user if ":" in user else f"{user}:").encode()).decode()
                options["headers"] = {
                    "Authorization": f"Basic {login}",
                    **_nested_option("headers", options, parts.scheme),
                }
                url = parts._replace(netloc=host).geturl()
        elif scheme_of(url) in ("gs", "gcs"):
            bounded = {"response_class": _web(self.url).BoundedResponse}
            options["session_kwargs"] = {**bounded, **_nested_option("session_kwargs", options, "gcs", "gs")}
        elif scheme_of(url) in ("s3", "s3a") and _is_reached_by_s3fs(scheme_of(url)):
            bounded = {"http_session_cls": extras.require("tensordict.io.remote.s3", "remote").Session}
            options["config_kwargs"] = {**bounded, **_nested_option("config_kwargs", options, "s3", "s3a")}
        return url, options

    def redact(self, text: object) -> str:
        """A text of a library without the secrets of the URL and of the options."""
        return redact(str(text), self._secrets)

    @property
    def _fs(self) -> Any:
        # The threads and connections of fsspec do not survive a fork.
        if self._pid != os.getpid():
            self._connect()
        return self._known_fs

    def __reduce__(self) -> tuple[Any, ...]:
        return Remote, (self.url, self.storage_options)

    def url_of(self, name: str) -> str:
        """The URL of a file below, without secrets; `Remote` and all that takes a URL reaches the file by it."""
        if not name:
            return self.url
        return as_url(self._below(self._full, name), isinstance(self.url, Url) and self.url._allowed)

    def identity_of(self, name: str) -> str:
        """A text for hashes, another one for each file below; it has the query of a URL, and no password."""
        return self._path(name) if self.is_http else str(self.url_of(name))

    def _path(self, name: str) -> str:
        return self._below(self._root, name) if name else self._root

    def _below(self, root: str, name: str) -> str:
        if not self.is_http:
            return f"{root}/{name}"
        # A name with percent signs is encoded once more in a URL. A query stays at the end.
        path, mark, query = root.partition("?")
        return f"{_without_slashes(path)}/{quote(name)}{mark}{query}"

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, name: str = "") -> RemoteFile | None:
        """The file of this name; `None` when there is none, or a folder."""
        return self._try("look for", name, partial(self._look, name))

    def _look(self, name: str) -> RemoteFile | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError as error:
            if isinstance(_own_error(error), SaveError):
                raise
            # fsspec takes whatever an HTTP server answers for "not found".
            if _status(error.__cause__) in (None, 404, 410) and not _may_pass(error):
                return None
            raise
        if info["type"] == "directory":
            return None
        if info.get("size") is None:
            raise SaveError(f"the server does not say how long {self.url_of(name)!r} is")
        return _file(name, info)

    def files(self, name: str = "") -> list[RemoteFile]:
        """All files below a folder, at any depth, by name; none when there is no such folder.

        Raises:
            SaveError: the store has no listing (`http://`), or cannot be reached.
        """
        if self.is_http:
            raise SaveError(f"what is below {self.url_of(name)!r} cannot be listed: servers of HTTP do not say")

        def ask() -> list[RemoteFile]:
            if is_listed_by_pages(self._fs):
                return list(self._list_pages(name, deep=True).files.values())
            self._fs.invalidate_cache()
            start = len(self._root.lstrip("/")) + 1
            found = self._fs.find(self._path(name), detail=True).items()
            # Without the file of the very name, and the empty ones that stand for folders.
            listed = ((path.lstrip("/")[start:], info) for path, info in found if not path.endswith("/"))
            return [_file(path, info) for path, info in listed if path]

        return sorted(self._try("list", name, ask), key=lambda file: file.name)

    def _list_pages(self, name: str, *, deep: bool) -> Listing[RemoteFile]:
        above = f"{name}/" if name else ""
        listed = list_below(self._fs, self._path(name), lambda below, info: _file(f"{above}{below}", info), deep=deep)
        found: Listing[RemoteFile] = self._wait_for(listed)
        return found

    def _wait_for(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread of fsspec."""

        async def run() -> T:
            return await call

        found: T = extras.require("fsspec.asyn", "remote").sync(self._fs.loop, run)
        return found

    def folders(self, name: str = "") -> list[str]:
        """Return the names of the folders in a folder, sorted; none when there is no such folder.

        Raises:
            SaveError: the store has no listing (`http://`), or cannot be reached.
        """
        if self.is_http:
            raise SaveError(f"the folders in {self.url_of(name)!r} cannot be listed: servers of HTTP do not say")

        def ask() -> list[str]:
            if is_listed_by_pages(self._fs):
                return sorted(self._list_pages(name, deep=False).folders)
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(name), detail=True)
            except FileNotFoundError:
                return []
            return sorted(info["name"].rstrip("/").rpartition("/")[2] for info in found if info["type"] == "directory")

        return self._try("list", name, ask)

    def read(self, name: str = "", start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file, from `start` (negative: counted from the end) to `stop`.

        No more is read than that, or than the size that the server has told: what sends more is refused.

        Raises:
            FileNotFoundError: there is none.
            SaveError: it is shorter than that, or the server sends more than was asked for.
        """
        if stop is not None and start >= 0:
            return b"" if start >= stop else self._try("read", name, partial(self._range, name, start, stop))

        def ask() -> bytes:
            file = self._look(name)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            low, high, _ = slice(start, stop).indices(file.size)
            if low >= high:
                return b""
            if high < file.size:
                return self._range(name, low, high)
            # One byte more than there should be tells that the file has become longer meanwhile.
            return self._range(name, low, high + 1, at_end=True)

        return self._try("read", name, ask)

    def _range(self, name: str, start: int, stop: int, at_end: bool = False) -> bytes:
        """The bytes of a range, in one request; `at_end` has one byte less in the file."""
        path = self._path(name)
        if self.is_s3:
            read = extras.require("tensordict.io.remote.s3", "remote").read_from_s3
            content: bytes = self._wait_for(read(self._fs, path, f"{start}-{stop - 1}", stop - start))
        else:
            content = self._fs.cat_file(path, start=start, end=stop)
        wanted = stop - start - at_end
        if len(content) > stop - start:
            raise SaveError(f"{len(content)} bytes came from byte {start} on, where {wanted} were asked for")
        if len(content) != wanted:
            raise LengthError(f"it has {len(content)} bytes from byte {start} on, where {wanted} should be")
        return content

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, name: str, content: Content, *, new: bool = False) -> None:
        """Upload a file; readers see what was there before until all of it has arrived.

        Large files go in several parts at once; when that fails, the parts are given up.

        Args:
            name: where, below the URL; empty for the URL itself.
            content: the bytes, or the path of a local file.
            new: only when there is none of that name, even if others upload it at the same time: one of them succeeds.
                It must tell its writers apart (a random number in it), as finding one's own bytes is success, too: the
                answer to the upload may have been lost.

        Raises:
            FileExistsError: there is one, with `new`.
            OSError: it cannot be written.
        """
        self._refuse_http("upload")
        if isinstance(content, bytes):
            self._put(name, content, new, None)
            return
        with show_transfer("uploading", os.path.getsize(content)) as shown:
            self._put(name, content, new, shown)

    def _put(self, name: str, content: Content, new: bool, progress: Progress | None) -> None:
        path = self._path(name)
        mode = {"mode": "create"} if new else {}
        call: Callable[[], object]
        if self._is_local:
            call = partial(_put_locally, path, content, new)
        elif isinstance(content, bytes):
            call = partial(self._fs.pipe_file, path, content, **mode)
        elif self._is_memory:
            # In pieces, it would be seen before it is whole.
            with open(content, "rb") as file:
                call = partial(self._fs.pipe_file, path, file.read(), **mode)
        else:
            told = extras.require("fsspec.callbacks", "remote").Callback()
            if progress is not None:
                told.relative_update = progress.add
            call = partial(self._fs.put_file, content, path, callback=told, **mode)
        try:
            self._try("upload", name, call)
        except FileExistsError:
            if not isinstance(content, bytes) or not self._is_there(name, content):
                raise

    def _is_there(self, name: str, content: bytes) -> bool:
        """Whether a file has these bytes; its owner may have deleted it meanwhile."""
        try:
            return self.read(name) == content
        except FileNotFoundError:
            return False

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing ones do not matter."""
        self._refuse_http("delete")
        jobs = [partial(self._delete, name) for name in names]
        files.run_all(jobs, IN_FLIGHT)

    def _delete(self, name: str) -> None:
        try:
            self._try("delete", name, partial(self._fs.rm_file, self._path(name)))
        except FileNotFoundError:
            return

    def _refuse_http(self, doing: str) -> None:
        if self.is_http:
            raise SaveError(f"cannot {doing} {self.url!r}: servers of HTTP are read, and not written to")

    # --- again --------------------------------------------------------------------------------------------------------

    def tries(self, doing: str, name: str) -> Tries:
        """How often something is tried with a file below."""
        return Tries(doing, str(self.url_of(name)), self.redact)

    def _try(self, doing: str, name: str, call: Callable[[], T]) -> T:
        tries = self.tries(doing, name)
        while True:
            try:
                return call()
            except Exception as error:
                time.sleep(tries.delay_after(error))


class Tries:
    """Counts the attempts at one operation on a URL.

    Args:
        doing: what is tried, for errors.
        url: where.
        redact: takes secrets out of messages of libraries.
    """

    def __init__(self, doing: str, url: str, redact: Callable[[object], str]) -> None:
        self._doing, self._url, self._redact = doing, url, redact
        self._most = int(os.environ.get("TENSORDICT_REMOTE_ATTEMPTS", _ATTEMPTS))
        if self._most < 1:
            raise SaveError(f"TENSORDICT_REMOTE_ATTEMPTS must be 1 or more, got {self._most}")
        self._done = 0

    def delay_after(self, error: Exception) -> float:
        """How many seconds to wait before it is tried again; raises the error, naming the URL, when it is final."""
        self._done += 1
        error = _own_error(error)
        if self._done >= self._most or not _may_pass(error):
            raise _named(error, self._doing, self._url, self._done, self._redact) from error
        # Partly random, so that many who failed together do not come back together.
        longest: float = min(_FIRST_DELAY * 2 ** (self._done - 1), _LONGEST_DELAY)
        return longest * random.uniform(0.5, 1)


def _put_locally(path: str, content: Content, new: bool) -> None:
    """Put a local file in its place in one step; without a folder for it, that is made."""
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    staged = files.temporary_name(folder)
    try:
        with files.closing(files.create(staged)) as fd:
            if isinstance(content, bytes):
                files.write_bytes(fd, content)
            else:
                with files.closing(files.open_file(content)) as source:
                    files.copy_file(source, fd, os.fstat(source).st_size)
        if new:
            os.link(staged, path)
        else:
            os.replace(staged, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staged)


def _file(name: str, info: dict[str, Any]) -> RemoteFile:
    said = {key: _text(info[key]) for key in _TAGS if info.get(key)}
    # The time of a listing is not written as that of a file: an etag is enough.
    etag = said.get("ETag") or said.get("etag")
    text = etag if etag else repr(sorted(said.items()))
    return RemoteFile(name, int(info["size"]), hashlib.sha256(text.encode()).hexdigest()[:32], _modified(info))


def _modified(info: dict[str, Any]) -> float | None:
    """When a file was made, in the terms of various stores: a number, a text of ISO 8601, or an object."""
    said = next((info[key] for key in _TIMES if info.get(key)), None)
    if isinstance(said, str):
        try:
            said = datetime.fromisoformat(said.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(said, datetime):
        return said.timestamp()
    return float(said) if isinstance(said, (int, float)) else None


def _text(said: Any) -> str:
    # The time in a listing of `memory://` is a number, and that of a file an object.
    return str(said.timestamp() if hasattr(said, "timestamp") else said)


def _own_error(error: BaseException) -> Any:
    """The error of this package that a library has made another one of, or `error` itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, SaveError):
        found = found.__cause__
    return error if found is None else found


def _may_pass(error: BaseException) -> bool:
    """Tell whether another attempt may succeed."""
    if isinstance(error, (TimeoutError, ConnectionError, EOFError, LengthError)):
        return True
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUS
    if isinstance(error, tuple(_FINAL)):
        return isinstance(error, FileNotFoundError) and error.__cause__ is not None and _may_pass(error.__cause__)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING_ERRNO
    return any(known in cls.__name__ for cls in type(error).__mro__ for known in _PASSING_NAMES)


def _status(error: BaseException | None) -> int | None:
    """The status that an HTTP server answered, as aiohttp, botocore and gcsfs tell it."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) and status >= 100 else None


def _named(error: Exception, doing: str, url: str, attempts: int, redact: Callable[[object], str]) -> Exception:
    """The error again, naming the URL, and without secrets."""
    if isinstance(error, ImportError):
        return error
    if isinstance(error, SaveError):
        return error if url in str(error) else type(error)(f"cannot {doing} {url!r}: {redact(error)}")
    # gcsfs says so in its words alone.
    is_refused = isinstance(error, OSError) and str(error).startswith("Forbidden")
    if is_refused or 401 in (statuses := (_status(error), _status(error.__cause__))) or 403 in statuses:
        why = redact(error.__cause__ or error)
        return PermissionError(errno.EACCES, f"cannot {doing}: the server refuses it ({why})", url)
    for kind, code in _FINAL.items():
        if isinstance(error, kind):
            return kind(code, f"cannot {doing} ({redact(error.args[-1]) if error.args else os.strerror(code)})", url)
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    return SaveError(f"cannot {doing} {url!r}{tries}: {type(error).__name__}: {redact(error)}")


def _without_slashes(url: str) -> str:
    """A URL without slashes at its end; those in the query of HTTP are of a signature."""
    return url if scheme_of(url) in ("http", "https") and "?" in url else url.rstrip("/")


def _nested_option(name: str, options: dict[str, Any], *schemes: str) -> dict[str, Any]:
    """An option that is a mapping, or else the one in the configuration of fsspec, which a given one would replace."""
    configuration = extras.require("fsspec.config", "remote").conf
    given = [options, *(configuration.get(scheme, {}) for scheme in schemes)]
    return dict(next((found[name] for found in given if isinstance(found.get(name), dict)), {}))


def _is_reached_by_s3fs(scheme: str) -> bool:
    """Whether fsspec reaches S3 by s3fs: programs can register other file systems for a scheme."""
    return hasattr(extras.require("fsspec", "remote").get_filesystem_class(scheme), "_call_s3")


def _web(url: str) -> Any:
    """The module for servers of HTTP, which needs aiohttp."""
    try:
        return extras.require("tensordict.io.remote.web", "remote")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{url!r} cannot be reached: this needs the package 'aiohttp': pip install 'tensordict[remote]' aiohttp",
            name=error.name,
        ) from error
