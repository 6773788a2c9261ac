"""The Zarr store at a URL, for `zarr.py`: the fsspec store of zarr, which retries failures that may be temporary."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.core.common import concurrent_map
from zarr.storage import FsspecStore, WrapperStore

from tensordict.core import extras
from tensordict.core.exceptions import SaveError
from tensordict.io.remote.listing import is_listed_by_pages, list_below
from tensordict.io.remote.urls import IN_FLIGHT, LengthError
from tensordict.io.remote.web import AnswerError
from tensordict.io.saving.commit import JOURNAL

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from tensordict.io.remote.urls import Remote

T = TypeVar("T")

# Number of concurrent deletions.
_AT_ONCE = 32
# Length of one read request in bytes.
_PART = 16 << 20
# Names of the documents of nodes, and the longest length accepted. The root may hold the documents of all nodes.
_DOCUMENTS = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_LONGEST_DOCUMENT = 128 << 20


class RemoteStore(WrapperStore[Any]):
    """The store at a URL.

    Args:
        remote: the URL.
        read_only: refuse writes.

    Raises:
        SaveError: `read_only` is False and the URL is of HTTP.
    """

    def __init__(self, remote: Remote, read_only: bool) -> None:
        if remote.is_http and not read_only:
            raise SaveError(f"{remote.url!r} cannot be written to: servers of HTTP are read only, by mode='r'")
        super().__init__(FsspecStore.from_url(*remote.for_fsspec(), read_only))
        self._remote = remote

    @property
    def supports_listing(self) -> bool:
        """False for HTTP, whose servers have no listing."""
        return not self._remote.is_http

    async def _retry(self, doing: str, key: str, call: Callable[[str], Awaitable[T]]) -> T:
        tries = self._remote.tries(doing, key)
        # A URL encodes the percent signs of a name again.
        path = quote(key) if self._remote.is_http else key
        while True:
            try:
                return await call(path)
            except Exception as error:
                await asyncio.sleep(tries.delay_after(error))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if byte_range is None and key.rpartition("/")[2] in _DOCUMENTS:
            byte_range = RangeByteRequest(0, _LONGEST_DOCUMENT)
        content = await self._retry("read", key, lambda path: self._read(path, byte_range))
        return None if content is None else prototype.buffer.from_bytes(content)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return await concurrent_map([(key, prototype, part) for key, part in key_ranges], self.get, IN_FLIGHT)

    async def _read(self, path: str, byte_range: ByteRequest | None) -> bytes | None:
        """Read a file or a part of it; `None` if it is missing."""
        try:
            if isinstance(byte_range, SuffixByteRequest):
                return await self._read_end(path, byte_range.suffix)
            if isinstance(byte_range, RangeByteRequest):
                return await self._read_range(path, byte_range.start, byte_range.end)
            start = 0 if byte_range is None else byte_range.offset
            return await self._read_range(path, start, await self._store.getsize(path))
        except self._store.allowed_exceptions:
            return None
        except OSError as error:
            # S3 answers so for an empty object.
            if "not satisfiable" in str(error):
                return b""
            raise

    async def _read_range(self, path: str, start: int, stop: int) -> bytes:
        """Read a range of a file that may end earlier, in one request or, if it is long, in several."""
        if self._remote.is_http:
            # Some HTTP servers ignore ranges and send the whole file.
            return await self._fetch(path, start, stop)
        first = await self._fetch(path, start, min(stop, start + _PART))
        if len(first) < _PART or start + _PART >= stop:
            return first
        stop = min(stop, await self._store.getsize(path))
        parts = [(path, at, min(at + _PART, stop)) for at in range(start + _PART, stop, _PART)]
        content = b"".join([first, *await concurrent_map(parts, self._fetch, IN_FLIGHT)])
        if len(content) != stop - start:
            raise LengthError(f"{len(content)} bytes came from byte {start} on, where {stop - start} were asked for")
        return content

    async def _fetch(self, path: str, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        where = f"{self._store.path}/{path}".lstrip("/")
        content: bytes
        if self._remote.is_s3:
            content, _ = await _s3().read_range(self._store.fs, where, f"{start}-{stop - 1}", stop - start)
        else:
            content = await self._store.fs._cat_file(where, start=start, end=stop)
        return _check_length(content, stop - start)

    async def _read_end(self, path: str, count: int) -> bytes:
        where = f"{self._store.path}/{path}".lstrip("/")
        if self._remote.is_s3:
            found, _ = await _s3().read_range(self._store.fs, where, f"-{count}", count)
            return _check_length(found, count)
        try:
            content: bytes = await self._store.fs._cat_file(where, start=-count, end=None)
        except AnswerError:
            # Some servers ignore a range that is counted from the end and send the whole file.
            size = await self._store.getsize(path)
            return await self._read_range(path, max(0, size - count), size)
        return content[-count:]

    async def getsize(self, key: str) -> int:
        return await self._retry("look for", key, self._store.getsize)

    async def exists(self, key: str) -> bool:
        return await self._retry("look for", key, self._store.exists)

    async def set(self, key: str, value: Buffer) -> None:
        await self._retry("upload", key, lambda path: self._store.set(path, value))

    async def delete(self, key: str) -> None:
        async def delete(path: str) -> None:
            # The other delete functions of fsspec treat `*` and `[` in a name as a pattern.
            with contextlib.suppress(FileNotFoundError):
                await self._store.fs._rm_file(f"{self._store.path}/{path}")

        await self._retry("delete", key, delete)

    async def delete_dir(self, prefix: str) -> None:
        # Keep the claim: the caller is about to save.
        keys = [(key,) async for key in self.list_prefix(f"{prefix}/" if prefix else "") if key != JOURNAL]
        await concurrent_map(keys, self.delete, _AT_ONCE)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await self._list(prefix, False, self._store.list_dir):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for name in await self._list(prefix, True, self._store.list_prefix):
            yield name

    async def _list(self, prefix: str, deep: bool, list_names: Callable[[str], AsyncIterator[str]]) -> list[str]:
        async def list_once(path: str) -> list[str]:
            files = self._store.fs
            if is_listed_by_pages(files):
                where = f"{self._store.path}/{path}".rstrip("/")
                found = await list_below(files, where, lambda *_: None, deep=deep)
                return [f"{path}{name}" for name in found.files] if deep else [*found.files, *found.folders]
            # Other processes may have written to the URL.
            getattr(files, "sync_fs", files).invalidate_cache()
            return [name async for name in list_names(path)]

        return await self._retry("list", prefix, list_once)


def _check_length(content: bytes, limit: int) -> bytes:
    if len(content) > limit:
        raise AnswerError(f"the server sends more than the {limit} bytes that were asked for")
    return content


def _s3() -> Any:
    return extras.require("tensordict.io.remote.s3", "remote")
