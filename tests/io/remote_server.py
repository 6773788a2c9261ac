"""Servers of S3 and of GCS on this machine, and a proxy that counts what is fetched and does what networks do."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

DROP, CUT, FAIL, SLOW, SHORT, REFUSE = "drop", "cut", "fail", "slow", "short", "refuse"
LATE, TWICE, ENDLESS = "late", "twice", "endless"
# An answer without end is given up here, so that a test of a client that reads it all ends.
END = 200 << 20


@dataclass
class Fault:
    """A fault of the next `times` requests with this method and this text in the path.

    kind: the connection drops in the middle of the answer, or (`CUT`) before the server has the request; the answer is
        500, it comes late, it is cut short and says so, or it is 403. `LATE` hangs up and keeps the request, which
        `Proxy.deliver` carries out; `TWICE` carries it out, and keeps it, too. `ENDLESS` sends bytes until the client
        hangs up.
    """

    kind: str
    method: str = "GET"
    path: str = ""
    times: int = 1
    after: int = 0
    # True if an endless answer has a Content-Length.
    has_length: bool = False


@dataclass(frozen=True)
class Request:
    """A request as the client has sent it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Proxy:
    """The proxy that clients connect to; `server` is the real server."""

    server: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    # Method and path of every request, and how many bytes of a body went to the client.
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    # Called with method and path before a request is passed on.
    before: Callable[[str, str], None] | None = None
    # How many bytes went out at most in one answer without end.
    sent: int = 0
    # A function of method and path that gives the answer instead of the server.
    forges: Callable[[str, str], bytes | None] | None = None
    # Called with method, path and body by one request at a time, what it answers: whether it may not be carried out.
    refuses: Callable[[str, str, bytes], bool] | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""
    # Requests that are still on their way.
    late: list[Request] = field(default_factory=list)

    def carry_out(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return the server's answer to a request."""
        if self.refuses is None:
            return self._ask(request)
        with self.turn:
            refused = self.refuses(request.method, request.path, request.body)
            return (412, [], b"") if refused else self._ask(request)

    def _ask(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server)
        headers = {key: value for key, value in request.headers.items() if key.lower() != "transfer-encoding"}
        headers["Content-Length"] = str(len(request.body))
        connection.request(request.method, request.path, request.body or None, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, answer.getheaders(), content

    def deliver(self, count: int | None = None, chance: random.Random | None = None) -> int:
        """Carry out requests that are late, the last one first or in a random order; how many there were."""
        with self.lock:
            waiting, self.late = self.late[::-1], []
        if chance is not None:
            chance.shuffle(waiting)
        count = len(waiting) if count is None else min(count, len(waiting))
        for request in waiting[:count]:
            self.carry_out(request)
        with self.lock:
            self.late = waiting[count:][::-1] + self.late
        return count

    def fetched(self, path: str = "") -> int:
        """The bytes of all bodies of GET whose path has this in it."""
        with self.lock:
            return sum(nbytes for method, where, nbytes in self.requests if method == "GET" and path in where)

    def count(self, method: str, path: str = "") -> int:
        with self.lock:
            return sum(method == one and path in where for one, where, _ in self.requests)

    def clear(self) -> None:
        with self.lock:
            self.requests.clear()
            self.faults.clear()
            self.late.clear()
        self.forges, self.sent = None, 0

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.path in path:
                    if fault.after:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Writes are sent at once.
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            body = self._body()
            if body is None:
                self.close_connection = True
                return
            request = Request(self.command, self.path, dict(self.headers.items()), body)
            if proxy.before is not None:
                proxy.before(self.command, self.path)
            fault = proxy.fault(self.command, self.path)
            if fault is not None and fault.kind == SLOW:
                time.sleep(0.3)
            if fault is not None and fault.kind == ENDLESS:
                self._send_without_end(fault.has_length)
                return
            if proxy.forges is not None and (forged := proxy.forges(self.command, self.path)) is not None:
                self._send(200, [("ETag", '"1"')], forged)
                return
            if fault is not None and fault.kind in (FAIL, REFUSE):
                status = 500 if fault.kind == FAIL else 403
                self._send(status, [], b"<Error><Code>AccessDenied</Code></Error>" if status == 403 else b"")
                return
            if fault is not None and fault.kind in (LATE, TWICE):
                with proxy.lock:
                    proxy.late.append(request)
            if fault is not None and fault.kind in (CUT, LATE):
                self._hang_up()
                return
            status, headers, content = proxy.carry_out(request)
            if fault is not None and fault.kind == SHORT:
                content = content[: len(content) // 2]
            if fault is not None and fault.kind == DROP:
                self._note(len(content) // 2)
                if content:
                    self._head(status, headers, len(content))
                    self.wfile.write(content[: len(content) // 2])
                    self.wfile.flush()
                self._hang_up()
                return
            self._send(status, headers, content)

        def _hang_up(self) -> None:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

        def _body(self) -> bytes | None:
            """The content of a request; `None` when the client has gone before it had sent all."""
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                parts = []
                while size := int(self.rfile.readline().split(b";")[0] or b"-1", 16):
                    parts.append(self.rfile.read(max(size, 0)))
                    if len(parts[-1]) != size:
                        return None
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            return body if len(body) == length else None

        def _head(self, status: int, headers: list[tuple[str, str]], length: int) -> None:
            self.send_response_only(status)
            left_out = {"transfer-encoding", "connection", *(() if self.command == "HEAD" else ("content-length",))}
            for key, value in headers:
                if key.lower() not in left_out:
                    self.send_header(key, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(length))
            self.end_headers()

        def _send(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            # Before the client knows the answer, and a test looks.
            self._note(len(content))
            self._head(status, headers, len(content))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(content)

        def _send_without_end(self, has_length: bool) -> None:
            self.send_response_only(200)
            name, value = ("Content-Length", str(END)) if has_length else ("Transfer-Encoding", "chunked")
            self.send_header(name, value)
            self.end_headers()
            self._note(0)
            # What waits in a large buffer of the system would count as sent.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            piece, sent = b"x" * (1 << 20), 0
            self.close_connection = True
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while sent < END:
                    self.wfile.write(piece if has_length else b"%x\r\n%s\r\n" % (len(piece), piece))
                    sent += len(piece)
                    proxy.sent = max(proxy.sent, sent)

        def _note(self, nbytes: int) -> None:
            with proxy.lock:
                proxy.requests.append((self.command, self.path, nbytes))

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that is killed closes its connection.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def proxied(server: tuple[str, int]) -> Iterator[Proxy]:
    """A proxy before a server."""
    proxy = Proxy(server)
    httpd = _Server(("127.0.0.1", 0), _handler(proxy))
    proxy.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


@contextlib.contextmanager
def s3_server() -> Iterator[Proxy]:
    """A server of S3, which moto starts in this process, behind a proxy."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        with proxied(server.get_host_and_port()) as proxy:
            yield proxy
    finally:
        server.stop()


@contextlib.contextmanager
def gcs_server() -> Iterator[Proxy]:
    """A server of GCS, which gcp-storage-emulator starts in this process, behind a proxy.

    The server passes over the condition that there is no object of the name yet (`ifGenerationMatch=0`), which the real
    one has: the proxy sees to it.
    """
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    server = create_server("127.0.0.1", 0, in_memory=True)
    server.start()
    try:
        with proxied(server._api._httpd.server_address) as proxy:

            def is_there(method: str, path: str, body: bytes) -> bool:
                query = parse_qs(urlsplit(path).query)
                if method == "GET" or query.get("ifGenerationMatch") != ["0"]:
                    return False
                name = query["name"][0] if "name" in query else json.loads(re.findall(rb"^{.*}", body, re.M)[0])["name"]
                where = f"{urlsplit(path).path.removeprefix('/upload')}/{quote(name, safe='')}"
                return _ask(proxy, "GET", where)[0] == 200

            proxy.refuses = is_there
            yield proxy
    finally:
        server.stop()


def gcs_options_of(proxy: Proxy) -> dict[str, Any]:
    """The `storage_options` of gcsfs for the server."""
    return {"endpoint_url": proxy.url, "token": "anon", "project": "test"}


def new_gcs_bucket(proxy: Proxy) -> str:
    """The name of a new bucket."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    status, _ = _ask(proxy, "POST", "/storage/v1/b?project=test", json.dumps({"name": name}))
    assert status == 200
    return name


def _ask(proxy: Proxy, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """The status and the content that the server behind a proxy answers."""
    connection = http.client.HTTPConnection(*proxy.server)
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def options_of(proxy: Proxy) -> dict[str, Any]:
    """The `storage_options` of s3fs for the server; nothing is tried again but by us."""
    return {
        "endpoint_url": proxy.url,
        "key": "test",
        "secret": "test",
        "config_kwargs": {"retries": {"total_max_attempts": 1, "mode": "standard"}},
    }


def new_bucket(proxy: Proxy) -> str:
    """The name of a new bucket."""
    name = f"b-{uuid.uuid4().hex[:12]}"
    connection = http.client.HTTPConnection(*proxy.server)
    connection.request(
        "PUT",
        f"/{name}",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"},
    )
    assert connection.getresponse().status == 200
    connection.close()
    return name
