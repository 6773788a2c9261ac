"""A server of S3 in memory, for measurements: a fixed delay for each request, and a link of limited speed for all.

    python benchmarks/s3_server.py --delay 0.1 --bandwidth 50e6

It prints its address, and ends with its standard input. It serves GET with ranges, HEAD, PUT, DELETE, uploads in parts
and listings, for s3fs, obstore, boto3 and plain HTTP, without checking signatures. `Control` changes the delay and the
speed, and reads the counts. The delay comes before each answer, whether the connection is new or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CHUNK = 64 << 10
# The link may be idle for so many seconds and make up for it: sleeping takes up to a millisecond too long.
CREDIT = 0.005
PAGE = 1000


@dataclass
class Object:
    """The content of an object."""

    content: bytes
    etag: str
    changed: float


@dataclass
class Counts:
    """The work of the server since the last reset: requests by method, and bytes of bodies in each direction."""

    connections: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    received: int = 0


class Server:
    """The state of the server, and its answers."""

    def __init__(self, delay: float, bandwidth: float) -> None:
        self.delay, self.bandwidth = delay, bandwidth
        self.objects: dict[str, dict[str, Object]] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.counts = Counts()
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.counts.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                method, target, _ = line.decode("latin-1").split()
                headers: dict[str, str] = {}
                while (line := (await reader.readline()).strip()) != b"":
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                if headers.get("expect") == "100-continue":
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await self._read_body(reader, headers)
                status, found, content = self._answer(method, target, headers, body)
                if not target.startswith("/_"):
                    await asyncio.sleep(self.delay)
                found.setdefault("Content-Length", str(len(content)))
                head = "".join(f"{name}: {value}\r\n" for name, value in found.items())
                writer.write(f"HTTP/1.1 {status} -\r\n{head}\r\n".encode())
                if method != "HEAD":
                    await self._send(writer, content)
                await writer.drain()
        writer.close()

    async def _read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        body = bytearray()
        if "chunked" in headers.get("transfer-encoding", ""):
            while size := int((await reader.readline()).split(b";")[0], 16):
                await self._use_link(size)
                body += await reader.readexactly(size)
                await reader.readline()
            await reader.readline()
        else:
            left = int(headers.get("content-length", 0))
            while left:
                piece = await reader.readexactly(min(CHUNK, left))
                await self._use_link(len(piece))
                left -= len(piece)
                body += piece
        self.counts.received += len(body)
        return _decode_aws_chunks(bytes(body)) if "aws-chunked" in headers.get("content-encoding", "") else bytes(body)

    async def _send(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        view = memoryview(content)
        self.counts.sent += len(view)
        for at in range(0, len(view), CHUNK):
            piece = view[at : at + CHUNK]
            await self._use_link(len(piece))
            writer.write(bytes(piece))
            await writer.drain()

    async def _use_link(self, nbytes: int) -> None:
        """Wait until the link, which is shared by all connections, has passed these bytes on."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - CREDIT) + nbytes / self.bandwidth
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket == "_":
            return self._control(query)
        self.counts.requests[method] = self.counts.requests.get(method, 0) + 1
        objects = self.objects.setdefault(bucket, {})
        if not key:
            return self._answer_for_bucket(method, objects, bucket, query, body)
        if method == "POST" or "uploadId" in query:
            return self._upload_in_parts(method, objects, bucket, key, query, body)
        if method == "PUT":
            if headers.get("if-none-match") == "*" and key in objects:
                return _fail(412, "PreconditionFailed")
            return 200, {"ETag": _put(objects, key, body)}, b""
        if method == "DELETE":
            objects.pop(key, None)
            return 204, {}, b""
        if key not in objects:
            return _fail(404, "NoSuchKey")
        return _read(objects[key], headers, method == "HEAD")

    def _control(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.delay = float(query.get("delay", self.delay))
        self.bandwidth = float(query.get("bandwidth", self.bandwidth))
        if "reset" in query:
            self.counts = Counts()
        return 200, {}, json.dumps(asdict(self.counts)).encode()

    def _answer_for_bucket(
        self, method: str, objects: dict[str, Object], bucket: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if method == "POST":
            for piece in body.decode().split("<Key>")[1:]:
                objects.pop(piece.split("</Key>")[0], None)
            return 200, {}, _xml("DeleteResult", "")
        if method != "GET":
            return 200, {}, b""
        if "location" in query:
            return 200, {}, _xml("LocationConstraint", "")
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        page, most = [], int(query.get("max-keys", PAGE))
        folders: set[str] = set()
        last, more = "", False
        for key in sorted(key for key in objects if key.startswith(prefix) and key > after):
            if len(page) + len(folders) >= most:
                more = True
                break
            folder, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if mark:
                folders.add(f"{prefix}{folder}{delimiter}")
            else:
                page.append(key)
            last = f"{prefix}{folder}{delimiter}\U0010ffff" if mark else key
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(objects[key].changed)}</LastModified><ETag>"
            f"{escape(objects[key].etag)}</ETag><Size>{len(objects[key].content)}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        )
        items += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        found = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page) + len(folders)}</KeyCount>"
        found += f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}"
        return 200, {"Content-Type": "application/xml"}, _xml("ListBucketResult", found)

    def _upload_in_parts(
        self, method: str, objects: dict[str, Object], bucket: str, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        about = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in query:
            name = f"upload-{len(self.uploads)}"
            self.uploads[name] = {}
            found = f"{about}<UploadId>{name}</UploadId>"
            return 200, {"Content-Type": "application/xml"}, _xml("InitiateMultipartUploadResult", found)
        parts = self.uploads[query["uploadId"]]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": _tag()}, b""
        content = b"".join(part for _, part in sorted(parts.items()))
        parts.clear()
        if method == "DELETE":
            return 204, {}, b""
        etag = _put(objects, key, content)
        found = f"{about}<ETag>{escape(etag)}</ETag>"
        return 200, {"Content-Type": "application/xml"}, _xml("CompleteMultipartUploadResult", found)


_numbers = itertools.count()


def _tag() -> str:
    """Return a new tag. A hash of the content would stop the only thread, and with it the link, for half a second."""
    return f'"{next(_numbers):032x}"'


def _put(objects: dict[str, Object], key: str, content: bytes) -> str:
    objects[key] = Object(content, _tag(), time.time())
    return objects[key].etag


def _read(found: Object, headers: dict[str, str], is_head: bool) -> tuple[int, dict[str, str], bytes]:
    size = len(found.content)
    told = {
        "ETag": found.etag,
        "Last-Modified": formatdate(found.changed, usegmt=True),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    asked = headers.get("range", "").removeprefix("bytes=")
    if is_head or not asked:
        return 200, {**told, "Content-Length": str(size)}, found.content
    first, _, last = asked.partition("-")
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    if start >= stop:
        return _fail(416, "InvalidRange")
    return 206, {**told, "Content-Range": f"bytes {start}-{stop - 1}/{size}"}, found.content[start:stop]


def _fail(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    return status, {"Content-Type": "application/xml"}, _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>")


def _xml(name: str, content: str) -> bytes:
    kind = "" if name == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{kind}>{content}</{name}>'.encode()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _decode_aws_chunks(body: bytes) -> bytes:
    """Return the content of a body that is signed chunk by chunk."""
    found, at = bytearray(), 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            return bytes(found)
        found += body[end + 2 : end + 2 + size]
        at = end + 4 + size


# --- for benchmarks ---------------------------------------------------------------------------------------------------


class Control:
    """The running server, seen from a benchmark.

    Attributes:
        url: the address of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def set(self, **values: float) -> None:
        """Change the delay of a request in seconds, or the bandwidth of the link in bytes a second."""
        self._ask("&".join(f"{name}={value}" for name, value in values.items()))

    def reset(self) -> None:
        """Begin to count from 0."""
        self._ask("reset=1")

    def counts(self) -> Counts:
        """Return the counts since `reset`."""
        return Counts(**self._ask(""))

    def _ask(self, query: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/_/?{query}") as answer:
            return json.load(answer)


@contextlib.contextmanager
def run_server(delay: float = 0.0, bandwidth: float = 1e12) -> Iterator[Control]:
    """Run a server in a process of its own during a block."""
    command = [sys.executable, str(Path(__file__).resolve()), "--delay", str(delay), "--bandwidth", str(bandwidth)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Control(process.stdout.readline().strip())
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


async def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before the answer to a request")
    parser.add_argument("--bandwidth", type=float, default=1e12, help="bytes a second of the link")
    options = parser.parse_args()
    state = Server(options.delay, options.bandwidth)
    server = await asyncio.start_server(state.serve, "127.0.0.1", 0, limit=1 << 20, backlog=1000)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    # Connections may be open still.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
