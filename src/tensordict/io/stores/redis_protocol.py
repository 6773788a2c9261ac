"""The protocol of Redis, as far as `redis_wire.py` speaks it: commands packed into few pieces, answers parsed.

The package redis does the rest: connections, their pools, addresses, passwords, encryption, trying again. Its parser in
Python copies an answer five times; `Parser` receives a large one straight into the array that it is given as.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tensordict.core import extras

Word = bytes | str | int | memoryview
# Answers of more bytes are given as arrays.
_LARGE = 4096
_BUFFER = 1 << 16
# Words up to this size are joined before they are sent; a larger word is sent without a copy.
_TOGETHER = 1 << 19


def library() -> Any:
    """The package redis; a clear error when it is not installed."""
    return extras.require("redis", "redis")


def pack_commands(commands: Iterable[Sequence[Word]]) -> list[bytes | memoryview]:
    """Encode commands in the protocol of the server."""
    sent: list[bytes | memoryview] = []
    pieces: list[bytes | memoryview] = []
    size = 0
    for words in commands:
        pieces.append(b"*%d\r\n" % len(words))
        for word in words:
            raw = word.encode() if isinstance(word, str) else b"%d" % word if isinstance(word, int) else word
            pieces.append(b"$%d\r\n" % len(raw))
            size += len(raw)
            if size > _TOGETHER:
                sent += b"".join(pieces), raw
                pieces, size = [b"\r\n"], 0
            else:
                pieces += raw, b"\r\n"
    sent.append(b"".join(pieces))
    return sent


class Parser:
    """The parser of answers for a connection of redis-py. Texts become bytes, large ones arrays of bytes."""

    def __init__(self, socket_read_size: int) -> None:
        self._socket: Any = None
        self._hold(bytearray(_BUFFER), 0)

    def _hold(self, data: bytearray, count: int) -> None:
        """Set the buffer, and how many of its bytes to parse."""
        self._data, self._view = data, memoryview(data)
        self._at, self._end = 0, count

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._at = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float = 0) -> bool:
        if self._at < self._end or self._socket is None:
            return self._at < self._end
        known = self._socket.gettimeout()
        self._socket.settimeout(timeout)
        try:
            self._fill()
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        finally:
            self._socket.settimeout(known)
        return True

    def read_response(self, disable_decoding: bool = False, **options: object) -> Any:
        """The next answer; that a command has failed is an exception which is given, not raised."""
        try:
            return self._value()
        except ValueError as error:
            raise library().exceptions.InvalidResponse(f"the server does not keep to the protocol: {error}") from error

    def _value(self) -> Any:
        line = self._line()
        kind = line[:1]
        if kind == b"$":
            size = int(line[1:])
            return None if size < 0 else self._text(size)
        if kind == b"+":
            return line[1:]
        if kind == b":":
            return int(line[1:])
        if kind == b"*":
            size = int(line[1:])
            return None if size < 0 else [self._value() for _ in range(size)]
        if kind != b"-":
            raise ValueError(f"an answer begins with {line!r:.40}")
        error = library().connection.DefaultParser.parse_error(line[1:].decode("utf-8", "replace"))
        if isinstance(error, library().exceptions.ConnectionError):
            raise error
        return error

    def _line(self) -> bytes:
        while (stop := self._data.find(b"\r\n", self._at, self._end)) < 0:
            self._fill()
        line = bytes(self._view[self._at : stop])
        self._at = stop + 2
        return line

    def _text(self, size: int) -> Any:
        if size <= _LARGE:
            self._need(size + 2)
            text = bytes(self._view[self._at : self._at + size])
            self._at += size + 2
            return text
        array = np.empty(size, np.uint8)
        rest = memoryview(array)  # type: ignore[arg-type]
        have = min(size, self._end - self._at)
        rest[:have] = self._view[self._at : self._at + have]
        self._at += have
        while have < size:
            have += self._receive(rest[have:])
        self._need(2)
        self._at += 2
        return array

    def _need(self, count: int) -> None:
        while self._end - self._at < count:
            self._fill()

    def _fill(self) -> None:
        """Receive more into the buffer."""
        if self._at == self._end:
            self._at = self._end = 0
        elif self._end == len(self._data):
            left = self._data[self._at :]
            self._hold(left + bytearray(max(_BUFFER, len(left))), len(left))
        self._end += self._receive(self._view[self._end :])

    def _receive(self, into: memoryview) -> int:
        count: int = self._socket.recv_into(into)
        if not count:
            raise ConnectionResetError("closed by the server")
        return count
