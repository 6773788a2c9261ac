"""Files behind URLs (`s3://`, `gs://`, `http://`, `memory://`), through fsspec: listing, reading of ranges, uploads.

Temporary failures (dropped connections, status 5xx, short answers) are retried after a delay that doubles each time and
is partly random. If the last attempt fails, its error names the URL.
"""

from __future__ import annotations

import base64
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
from tensordict.io.saving.progress import NO_BAR, Progress, show_transfer
from tensordict.memory import files
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import scheme_of

# Default number of attempts; the variable `TENSORDICT_REMOTE_ATTEMPTS` overrides it.
_ATTEMPTS = 6
# Delay after the first attempt in seconds, and the longest delay.
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 10.0
# Number of concurrent requests, and of concurrent requests for small pieces of different files.
IN_FLIGHT, READS_IN_FLIGHT = 8, 64

# HTTP status codes and system errors that may be temporary.
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING_ERRNO = frozenset(
    getattr(errno, name, 0)
    for name in ("EIO", "EREMOTEIO", "EAGAIN", "EBUSY", "ETIMEDOUT", "ECONNRESET", "ECONNABORTED", "EPIPE")
)
# Parts of the class names of connection errors of HTTP clients.
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
# Fields of a file description that change with its content, in various stores.
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
# The extras that install the file systems of schemes.
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")

Content = bytes | str
T = TypeVar("T")


def is_url(path: object) -> bool:
    """Return True if a path is a URL of another machine; `file://` is local."""
    return scheme_of(path) not in ("", "file")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file behind a URL.

    Attributes:
        name: its path below the URL; empty for the file at the URL itself.
        size: its length in bytes.
        tag: changes with the content; a hash of the etag or, if the store has no etags, of the time.
        modified: time of the last change in seconds since 1970; `None` if unknown.
    """

    name: str
    size: int
    tag: str
    modified: float | None = field(default=None, compare=False)


class LengthError(OSError):
    """The server sent fewer bytes than requested, or the file grew while it was read."""


class ChangedError(SaveError):
    """The file behind a URL was replaced while it was read."""


class Remote:
    """The files at a URL and below it, to read and write them as a whole or by ranges.

    All access to other machines passes through this class, including the manifests and shards of data sets::

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
            extra = _EXTRAS.get(scheme_of(self.url))
            told = f": pip install 'tensordict[{extra}]'" if extra else ""
            raise ModuleNotFoundError(f"{self.url!r} cannot be reached: {self.redact(error)}{told}") from error
        except ValueError as error:
            raise SaveError(f"{self.url!r} cannot be reached: {self.redact(error)}") from error
        self._root = _without_slashes(self._root)

    def for_fsspec(self) -> tuple[str, dict[str, Any]]:
        """Return the URL with its secrets, and the options, for the file system of fsspec."""
        url, options = self._full, self.storage_options.for_library()
        if self.is_http:
            options.setdefault("get_client", _web(self.url).Client(self.storage_options.redirect_hosts))
            parts = urlsplit(url)
            if "@" in parts.netloc:
                # aiohttp does not forward this header to the target of a redirect, and its errors omit the password.
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
        elif scheme_of(url) in ("s3", "s3a") and _uses_s3fs(scheme_of(url)):
            bounded = {"http_session_cls": _s3().Session, "max_pool_connections": READS_IN_FLIGHT}
            options["config_kwargs"] = {**bounded, **_nested_option("config_kwargs", options, "s3", "s3a")}
        return url, options

    def redact(self, text: object) -> str:
        """Remove the secrets of the URL and the options from a text, such as an error of a library."""
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
        """Return the URL of a file below this one. Its text has no secrets, but functions that take URLs can use it."""
        if not name:
            return self.url
        return as_url(self._below(self._full, name), isinstance(self.url, Url) and self.url._allowed)

    def identity_of(self, name: str) -> str:
        """Return a text that identifies a file in hashes. It includes the query of the URL, but no password."""
        return self._path(name) if self.is_http else str(self.url_of(name))

    def _path(self, name: str) -> str:
        return self._below(self._root, name) if name else self._root

    def _below(self, root: str, name: str) -> str:
        if not self.is_http:
            return f"{root}/{name}"
        # A URL encodes the percent signs of a name again. The query stays at the end.
        path, mark, query = root.partition("?")
        return f"{_without_slashes(path)}/{quote(name)}{mark}{query}"

    # --- reading ------------------------------------------------------------------------------------------------------

    def find(self, name: str = "") -> RemoteFile | None:
        """Look up a file by name; `None` if it is missing or a folder."""
        return self._try("look for", name, partial(self._look, name))

    def _look(self, name: str) -> RemoteFile | None:
        self._fs.invalidate_cache()
        try:
            info = self._info(self._path(name))
        except FileNotFoundError as error:
            if isinstance(_own_error(error), SaveError):
                raise
            # fsspec turns every error status of an HTTP server into "not found".
            if _status(error.__cause__) in (None, 404, 410) and not _may_pass(error):
                return None
            raise
        if info["type"] == "directory":
            return None
        if info.get("size") is None:
            raise SaveError(f"the server does not say how long {self.url_of(name)!r} is")
        return _file(name, info)

    def _info(self, path: str) -> dict[str, Any]:
        if not self._is_object(path):
            return self._fs.info(path)  # type: ignore[no-any-return]
        found: dict[str, Any] = self._wait_for(_s3().look_up(self._fs, path))
        return found

    def _is_object(self, path: str) -> bool:
        """Return True for a path of S3 that names an object, and not a bucket."""
        return self.is_s3 and bool(self._fs.split_path(path)[1])

    def files(self, name: str = "") -> list[RemoteFile]:
        """List the files below a folder, at any depth, sorted by name; empty if the folder is missing.

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
            # Leave out a file with the name of the folder, and empty objects that represent folders.
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
        return extras.require("fsspec.asyn", "remote").sync(self._fs.loop, lambda: call)  # type: ignore[no-any-return]

    def nbytes(self) -> int | None:
        """Return the total length of the file at the URL, or of all files below; `None` if these cannot be listed."""
        if (file := self.find()) is not None:
            return file.size
        return None if self.is_http else sum(file.size for file in self.files())

    def folders(self, name: str = "") -> list[str]:
        """List the names of the folders in a folder, sorted; empty if the folder is missing.

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

    def read(self, name: str = "", start: int = 0, stop: int | None = None, known: RemoteFile | None = None) -> bytes:
        """Read a file, from `start` (negative: counted from the end) to `stop`.

        An answer longer than the range, or than the size that the server reported, is refused.

        Args:
            name: path below the URL; empty for the URL itself.
            start, stop: the range.
            known: the file that the range belongs to. S3 says with each answer which file it is from, so another one is
                refused; other stores do not say.

        Raises:
            FileNotFoundError: the file is missing.
            ChangedError: the file is not the known one.
            SaveError: the file is too short, or the answer too long.
        """
        if stop is not None and start >= 0:
            ask_range = partial(self._range, name, start, stop, known=known)
            return b"" if start >= stop else self._try("read", name, ask_range)

        def ask() -> bytes:
            file = self._look(name)
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            low, high, _ = slice(start, stop).indices(file.size)
            if low >= high:
                return b""
            if high < file.size:
                return self._range(name, low, high)
            # Request one byte past the end, to notice a file that has grown meanwhile.
            return self._range(name, low, high + 1, at_end=True)

        return self._try("read", name, ask)

    def _range(self, name: str, start: int, stop: int, at_end: bool = False, known: RemoteFile | None = None) -> bytes:
        """Read a range in one request; with `at_end`, the file must end one byte before `stop`."""
        path = self._path(name)
        info: dict[str, Any] = {}
        content: bytes
        if self.is_s3:
            content, info = self._wait_for(_s3().read_range(self._fs, path, f"{start}-{stop - 1}", stop - start))
        else:
            content = self._fs.cat_file(path, start=start, end=stop)
        wanted = stop - start - at_end
        _refuse_more(content, start, stop - start, wanted)
        if known is not None and info and _file(name, {**info, "size": info["size"] or known.size}) != known:
            raise ChangedError(f"{self.url_of(name)!r} was replaced while it was read: read it again")
        _refuse_less(content, start, wanted)
        return content

    def read_ends(self, first: int, last: int) -> tuple[RemoteFile, dict[int, bytes]] | None:
        """Read the first and the last bytes of the file at the URL of S3, in two requests at once.

        Args:
            first, last: how many bytes; all if the file has fewer. If `first` is 0, there is only one request.

        Returns:
            the file, and the bytes by the position of the first one; `None` if the file is missing, empty or a bucket,
            or its length is unknown.
        """

        def ask() -> tuple[RemoteFile, dict[int, bytes]] | None:
            if not self._is_object(self._root):
                return None
            try:
                answers = self._wait_for(_s3().read_ends(self._fs, self._root, first, last))
            except FileNotFoundError as error:
                if isinstance(_own_error(error), SaveError) or _may_pass(error):
                    raise
                return None
            except OSError as error:
                # An empty file has no last bytes.
                if _status(error) == 416 or _status(error.__cause__) == 416:
                    return None
                raise
            if any(info["size"] is None for _, info in answers):
                return None
            file = _file("", answers[-1][1])
            found: dict[int, bytes] = {}
            for count, (content, info) in zip((first, last) if first else (last,), answers, strict=True):
                if _file("", info) != file:
                    raise LengthError("it was replaced between two answers")
                wanted = min(count, file.size)
                start = 0 if info is not answers[-1][1] else file.size - wanted
                _refuse_more(content, start, wanted, wanted)
                _refuse_less(content, start, wanted)
                found[start] = content
            return file, found

        return self._try("read", "", ask)

    # --- writing ------------------------------------------------------------------------------------------------------

    def put(self, name: str, content: Content, *, new: bool = False) -> None:
        """Upload a file. Readers see the old file until the upload is complete.

        Large files are uploaded in several concurrent parts. If one fails, the upload is aborted.

        Args:
            name: path below the URL; empty for the URL itself.
            content: the bytes, or the path of a local file.
            new: fail if the file exists. Of several concurrent uploads, one succeeds. The content must identify its
                writer, such as by a random number: finding the same bytes counts as success, because the answer to the
                first attempt may have been lost.

        Raises:
            FileExistsError: the file exists, with `new`.
            OSError: the upload fails.
        """
        self._refuse_http("upload")
        if isinstance(content, bytes):
            self._upload(name, content, new, NO_BAR)
            return
        with show_transfer("uploading", os.path.getsize(content)) as shown:
            self._upload(name, content, new, shown)

    def _upload(self, name: str, content: Content, new: bool, progress: Progress) -> None:
        path = self._path(name)
        mode = {"mode": "create"} if new else {}
        call: Callable[[], object]
        if self._is_local:
            call = partial(_put_locally, path, content, new)
        elif isinstance(content, bytes):
            call = partial(self._fs.pipe_file, path, content, **mode)
        elif self._is_memory:
            # An upload in pieces would be visible before it is complete.
            with open(content, "rb") as file:
                call = partial(self._fs.pipe_file, path, file.read(), **mode)
        else:
            told = extras.require("fsspec.callbacks", "remote").Callback()
            told.relative_update = progress.add
            call = partial(self._fs.put_file, content, path, callback=told, **mode)
        try:
            self._try("upload", name, call)
        except FileExistsError:
            if not isinstance(content, bytes) or not self._is_there(name, content):
                raise

    def _is_there(self, name: str, content: bytes) -> bool:
        """Return True if a file has these bytes, False if it differs or was deleted meanwhile."""
        try:
            return self.read(name) == content
        except FileNotFoundError:
            return False

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; missing files are ignored."""
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

    # --- retries ------------------------------------------------------------------------------------------------------

    def tries(self, doing: str, name: str) -> Tries:
        """Start counting the attempts at an operation on a file."""
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
        doing: the operation, for errors.
        url: the URL, for errors.
        redact: removes secrets from messages of libraries.
    """

    def __init__(self, doing: str, url: str, redact: Callable[[object], str]) -> None:
        self._doing, self._url, self._redact = doing, url, redact
        self._most = int(os.environ.get("TENSORDICT_REMOTE_ATTEMPTS", _ATTEMPTS))
        if self._most < 1:
            raise SaveError(f"TENSORDICT_REMOTE_ATTEMPTS must be 1 or more, got {self._most}")
        self._done = 0

    def delay_after(self, error: Exception) -> float:
        """Return the seconds to wait before the next attempt. Raises a final error with the URL in it."""
        self._done += 1
        error = _own_error(error)
        if self._done >= self._most or not _may_pass(error):
            raise _name_url(error, self._doing, self._url, self._done, self._redact) from error
        # Random, so that clients which failed together do not retry together.
        longest: float = min(_FIRST_DELAY * 2 ** (self._done - 1), _LONGEST_DELAY)
        return longest * random.uniform(0.5, 1)


def _put_locally(path: str, content: Content, new: bool) -> None:
    """Write a local file atomically, creating its folder."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if isinstance(content, bytes):
        files.write_file(path, content, new=new)
        return
    with files.closing(files.open_file(content)) as source, files.replaced_file(path, new=new) as fd:
        files.copy_file(source, fd, os.fstat(source).st_size)


def _file(name: str, info: dict[str, Any]) -> RemoteFile:
    said = {key: _text(info[key]) for key in _TAGS if info.get(key)}
    # Listings and file descriptions format times differently, so use the etag alone if it exists.
    etag = said.get("ETag") or said.get("etag")
    text = etag if etag else repr(sorted(said.items()))
    return RemoteFile(name, int(info["size"]), hashlib.sha256(text.encode()).hexdigest()[:32], _read_time(info))


def _read_time(info: dict[str, Any]) -> float | None:
    """Return the time of the last change. Stores report a number, an ISO 8601 text or a `datetime`."""
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
    # `memory://` reports times as numbers in listings, and as objects for single files.
    return str(said.timestamp() if hasattr(said, "timestamp") else said)


def _own_error(error: BaseException) -> Any:
    """Return the error of this package that a library has wrapped, or `error` itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, SaveError):
        found = found.__cause__
    return error if found is None else found


def _may_pass(error: BaseException) -> bool:
    """Return True if another attempt may succeed."""
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
    """Return the HTTP status in an error of aiohttp, botocore or gcsfs."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) and status >= 100 else None


def _name_url(error: Exception, doing: str, url: str, attempts: int, redact: Callable[[object], str]) -> Exception:
    """Return an error like this one that names the URL and has no secrets."""
    if isinstance(error, ImportError):
        return error
    if isinstance(error, SaveError):
        return error if url in str(error) else type(error)(f"cannot {doing} {url!r}: {redact(error)}")
    # gcsfs reports the status only in the message.
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
    """Strip slashes at the end of a URL, except from an HTTP query, where they belong to a signature."""
    return url if scheme_of(url) in ("http", "https") and "?" in url else url.rstrip("/")


def _nested_option(name: str, options: dict[str, Any], *schemes: str) -> dict[str, Any]:
    """Return an option that is a mapping, by default from the configuration of fsspec, which the option would hide."""
    configuration = extras.require("fsspec.config", "remote").conf
    given = [options, *(configuration.get(scheme, {}) for scheme in schemes)]
    return dict(next((found[name] for found in given if isinstance(found.get(name), dict)), {}))


def _s3() -> Any:
    """Import the module for S3, which needs aiobotocore."""
    return extras.require("tensordict.io.remote.s3", "remote")


def _refuse_more(content: bytes, start: int, most: int, wanted: int) -> None:
    if len(content) > most:
        raise SaveError(f"{len(content)} bytes came from byte {start} on, where {wanted} were asked for")


def _refuse_less(content: bytes, start: int, wanted: int) -> None:
    if len(content) != wanted:
        raise LengthError(f"it has {len(content)} bytes from byte {start} on, where {wanted} should be")


def _uses_s3fs(scheme: str) -> bool:
    """Return True if fsspec uses s3fs for this scheme. Programs can register other file systems."""
    return hasattr(extras.require("fsspec", "remote").get_filesystem_class(scheme), "_call_s3")


def _web(url: str) -> Any:
    """Import the module for HTTP servers, which needs aiohttp."""
    try:
        return extras.require("tensordict.io.remote.web", "remote")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{url!r} cannot be reached: this needs the package 'aiohttp': pip install 'tensordict[remote]' aiohttp",
            name=error.name,
        ) from error
