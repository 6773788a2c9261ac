"""Sessions with servers of HTTP: answers are read up to the length asked for, and redirects stay on allowed hosts.

A server decides what it answers. An answer without end would fill the memory, and a redirect could make this process
read what only it can reach: its own machine, its network, the addresses at which clouds give out credentials.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import aiohttp
import yarl

from tensordict.core.exceptions import SaveError
from tensordict.core.redaction import redact

# The answer to a request that asks for no range has at most so many bytes.
_LONGEST = 64 << 20
# The text of an error is read up to so many bytes.
_LONGEST_ERROR = 1 << 20
_STEP = 1 << 20
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")


class AnswerError(SaveError):
    """A server has not answered what it was asked."""


@dataclass(frozen=True)
class Client:
    """Makes sessions for the file system of fsspec for HTTP; equal ones share a file system.

    Args:
        redirect_hosts: where redirects may lead, beside the host that was asked: "host" or "host:port".
    """

    redirect_hosts: tuple[str, ...] = ()

    async def __call__(self, **options: Any) -> aiohttp.ClientSession:
        """A new session of aiohttp, with the `client_kwargs` of the caller."""
        traces = [_trace(self.redirect_hosts), *options.pop("trace_configs", ())]
        options.setdefault("response_class", BoundedResponse)
        if "connector" not in options:
            options["connector"] = Connector()
        return aiohttp.ClientSession(trace_configs=traces, **options)


# --- how much is read -------------------------------------------------------------------------------------------------


class BoundedResponse(aiohttp.ClientResponse):
    """An answer that is read up to the length that the request has asked for."""

    longest = _LONGEST

    async def read(self) -> bytes:
        """The content.

        Raises:
            AnswerError: it is longer than what was asked for, or another part of the file.
        """
        if self._body is not None:
            return await super().read()
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        start, stop = (asked[1], asked[2]) if asked is not None else ("", "")
        try:
            if self.status >= 400:
                self._body = await read_at_most(self.content.read, _LONGEST_ERROR)
            elif start and stop:
                self._check_place(int(start))
                self._body = await self._read_with_limit(int(stop) - int(start) + 1)
            elif stop:
                self._body = await self._read_with_limit(int(stop))
            else:
                self._body = await self._read_with_limit(self.longest)
        except BaseException:
            self.close()
            raise
        return self._body

    async def _read_with_limit(self, limit: int) -> bytes:
        content = await read_at_most(self.content.read, limit + 1)
        if len(content) > limit:
            raise AnswerError(f"the server sends more than the {limit} bytes that were asked for")
        return content

    def _check_place(self, start: int) -> None:
        said = _CONTENT_RANGE.match(self.headers.get("Content-Range", ""))
        # A server that knows no ranges sends the file from its first byte on.
        found = int(said[1]) if said is not None else start if self.status == 206 else 0
        if found != start:
            raise AnswerError(f"the server sends what begins at byte {found}, and byte {start} was asked for")


async def read_at_most(read: Callable[[int], Awaitable[bytes]], limit: int) -> bytes:
    """Call `read` until the end, or up to `limit` bytes."""
    content = bytearray()
    while len(content) < limit and (piece := await read(min(_STEP, limit - len(content)))):
        content += piece
    return bytes(content)


# --- redirects --------------------------------------------------------------------------------------------------------


@dataclass
class _Hops:
    """The requests of a chain of redirects: whether the first one went to a public address."""

    public: bool | None = None


_hops: ContextVar[_Hops | None] = ContextVar("tensordict_hops", default=None)


def is_public(address: str) -> bool:
    """Tell whether an IP address is public; loopback, link-local, private and reserved ones are not."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_global


class Connector(aiohttp.TCPConnector):
    """Connects to servers, and refuses a redirect from a public address to one that is not.

    It looks at the address of the connection, as a name may lead to any address, and to another one each time.
    """

    async def connect(self, req: Any, *args: Any, **kwargs: Any) -> Any:
        """A connection for a request.

        Raises:
            AnswerError: a redirect leads to an address that is not public.
        """
        connection = await super().connect(req, *args, **kwargs)
        # Behind a proxy, the address of the server is unknown.
        if (hops := _hops.get()) is not None and not req.proxy:
            transport = connection.transport
            peer = None if transport is None else transport.get_extra_info("peername")
            if peer is not None:
                public = is_public(peer[0])
                if hops.public and not public:
                    connection.close()
                    raise AnswerError(
                        f"a redirect leads to {req.url.host!r} at {peer[0]}, which is no public address, and the first "
                        "server has one: it is not followed"
                    )
                hops.public = public if hops.public is None else hops.public
        return connection


def _trace(redirect_hosts: tuple[str, ...]) -> aiohttp.TraceConfig:
    """Hooks for the start of each request, and for each redirect before aiohttp follows it."""

    async def begin(*_: object) -> None:
        _hops.set(_Hops())

    async def follow(session: object, context: object, redirect: aiohttp.TraceRequestRedirectParams) -> None:
        target = redirect.response.headers.get("Location") or redirect.response.headers.get("URI")
        if target is not None:
            try:
                _check_redirect(redirect.url, _join_url(redirect.url, target), redirect_hosts)
            except BaseException:
                redirect.response.close()
                raise

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    trace.on_request_redirect.append(follow)
    return trace


def _join_url(url: yarl.URL, target: str) -> yarl.URL:
    try:
        return url.join(yarl.URL(target))
    except ValueError as error:
        raise AnswerError(f"the server redirects to {redact(target)!r}, which is no URL") from error


def _check_redirect(url: yarl.URL, target: yarl.URL, redirect_hosts: tuple[str, ...]) -> None:
    """Refuse a redirect to another host, unless the caller names it, and one that gives up encryption."""
    shown = redact(str(target))
    if url.scheme == "https" and target.scheme != "https":
        raise AnswerError(f"the server redirects to {shown!r}, without encryption: it is not followed")
    # The same host, at the same port or at the default port of the scheme.
    is_same = target.host == url.host and (target.port == url.port or target.is_default_port())
    host = (target.host or "").lower()
    if not is_same and host not in redirect_hosts and f"{host}:{target.port}" not in redirect_hosts:
        raise AnswerError(
            f"the server redirects to another host, {shown!r}, which is not followed: if you trust it, pass "
            f"storage_options={{'redirect_hosts': [{host!r}]}}, or name it in TENSORDICT_REDIRECT_HOSTS"
        )
