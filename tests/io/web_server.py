"""A server of HTTP on this machine: it asks for passwords or signatures, redirects, and answers without end."""

from __future__ import annotations

import base64
import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Web:
    """The files of a server, and the requests that it got."""

    files: dict[str, bytes] = field(default_factory=dict)
    # The target of a redirect.
    redirects: dict[str, str] = field(default_factory=dict)
    # "user:password" that is asked for, and a text that must be in each query.
    login: str = ""
    query: str = ""
    # "length" sends more than is asked for and says how much, "chunks" does not say; "other" sends another part.
    lie: str = ""
    # How many bytes went out at most in one answer, and what was asked: the method, the path and the headers.
    sent: int = 0
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


# An answer without end is given up here, so that a test of a client that reads it all ends.
ENDLESS = 200 << 20


def _handler(web: Web) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            web.asked.append((self.command, self.path, dict(self.headers)))
            wanted = base64.b64encode(web.login.encode()).decode()
            if web.login and self.headers.get("Authorization") != f"Basic {wanted}":
                self._send(401, {}, b"")
            elif web.query and web.query not in parts.query:
                self._send(403, {}, b"wrong signature")
            elif path in web.redirects:
                self._send(302, {"Location": web.redirects[path]}, b"")
            elif path not in web.files:
                self._send(404, {}, b"")
            else:
                self._send_file(web.files[path])

        do_GET = do_HEAD = _answer

        def _send_file(self, content: bytes) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), int(asked[2] or len(content) - 1) + 1) if asked else (0, len(content))
            headers = {"ETag": '"1"', "Accept-Ranges": "bytes"}
            if asked:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            if self.command == "HEAD" or not web.lie:
                self._send(206 if asked else 200, headers, content[start:stop])
            elif web.lie == "ignore":
                headers.pop("Content-Range", None)
                self._send(200, headers, content)
            elif web.lie == "other":
                headers["Content-Range"] = f"bytes 0-{stop - start - 1}/{len(content)}"
                self._send(206, headers, content[: stop - start])
            else:
                self._send_without_end(206 if asked else 200, headers)

        def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _send_without_end(self, status: int, headers: dict[str, str]) -> None:
            chunked = web.lie == "chunks"
            more = {"Transfer-Encoding": "chunked"} if chunked else {"Content-Length": str(ENDLESS)}
            self.send_response_only(status)
            for name, value in {**headers, **more}.items():
                self.send_header(name, value)
            self.end_headers()
            piece, sent = b"x" * (1 << 20), 0
            self.close_connection = True
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while sent < ENDLESS:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                    sent += len(piece)
                    web.sent = max(web.sent, sent)

    return Handler


@contextlib.contextmanager
def web_server(host: str = "127.0.0.1") -> Iterator[Web]:
    """A server on an address of this machine."""
    web = Web(host=host)
    httpd = ThreadingHTTPServer((host, 0), _handler(web))
    httpd.daemon_threads = True
    web.port = httpd.server_address[1]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield web
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()
