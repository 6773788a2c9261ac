"""A Zarr store at a URL: that of zarr over fsspec, in which what fails in a way that may pass is tried again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.common import concurrent_map
from zarr.storage import FsspecStore, WrapperStore

from tensordict.core.errors import SaveError
from tensordict.io.commit import JOURNAL
from tensordict.io.web import AnswerError

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

    from tensordict.io.remote import Remote

T = TypeVar("T")

# So many keys are deleted at once.
_AT_ONCE = 32


class RemoteStore(WrapperStore[Any]):
    """The store at a URL.

    Args:
        remote: where.
        read_only: whether nothing is written to it.

    Raises:
        SaveError: it is to be written to, and is on a server of HTTP.
    """

    def __init__(self, remote: Remote, read_only: bool) -> None:
        if remote.is_http and not read_only:
            raise SaveError(f"{remote.url!r} cannot be written to: servers of HTTP are read only, by mode='r'")
        super().__init__(FsspecStore.from_url(*remote.for_fsspec(), read_only))
        self._remote = remote

    @property
    def supports_listing(self) -> bool:
        """Whether the server says what it has."""
        return not self._remote.is_http

    async def _tried(self, doing: str, key: str, call: Callable[[str], Awaitable[T]]) -> T:
        tries = self._remote.tries(doing, key)
        # What is percent-encoded in a name is so once more in a URL.
        path = quote(key) if self._remote.is_http else key
        while True:
            try:
                return await call(path)
            except Exception as error:
                await asyncio.sleep(tries.delay_after(error))

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if byte_range is None and key.endswith(".json"):
            # s3fs asks how long a whole object is before it reads it.
            byte_range = OffsetByteRequest(0)

        async def read(path: str) -> Buffer | None:
            found: Buffer | None
            try:
                found = await self._store.get(path, prototype, byte_range)
            except AnswerError:
                if not isinstance(byte_range, SuffixByteRequest):
                    raise
                # Some servers pass over a range that is counted from the end, and send all.
                size = await self._store.getsize(path)
                whole = RangeByteRequest(max(0, size - byte_range.suffix), size)
                found = await self._store.get(path, prototype, whole)
            return found

        found: Buffer | None = await self._tried("read", key, read)
        # Of HTTP, such servers are read to the end where they say how long the file is.
        return found[-byte_range.suffix :] if found is not None and isinstance(byte_range, SuffixByteRequest) else found

    async def getsize(self, key: str) -> int:
        return await self._tried("look for", key, self._store.getsize)

    async def exists(self, key: str) -> bool:
        return await self._tried("look for", key, self._store.exists)

    async def set(self, key: str, value: Buffer) -> None:
        await self._tried("upload", key, lambda path: self._store.set(path, value))

    async def delete(self, key: str) -> None:
        async def delete(path: str) -> None:
            # Of what else deletes, fsspec takes a name with `*` or `[` for a pattern, and deletes all that matches.
            with contextlib.suppress(FileNotFoundError):
                await self._store.fs._rm_file(f"{self._store.path}/{path}")

        await self._tried("delete", key, delete)

    async def delete_dir(self, prefix: str) -> None:
        # The claim stays: whoever deletes all is about to save.
        keys = [(key,) async for key in self.list_prefix(f"{prefix}/" if prefix else "") if key != JOURNAL]
        await concurrent_map(keys, self.delete, _AT_ONCE)

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await self._listed(prefix, self._store.list_dir):
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        for name in await self._listed(prefix, self._store.list_prefix):
            yield name

    async def _listed(self, prefix: str, list_names: Callable[[str], AsyncIterator[str]]) -> list[str]:
        async def listed(path: str) -> list[str]:
            # Other processes write there, too.
            files = self._store.fs
            getattr(files, "sync_fs", files).invalidate_cache()
            return [name async for name in list_names(path)]

        return await self._tried("list", prefix, listed)
