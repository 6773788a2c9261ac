"""Redis servers for tests, each on a unix socket in a folder of its own; nothing else can reach them."""

from __future__ import annotations

import atexit
import functools
import itertools
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import redis


class RedisServer:
    """A server that can be killed and started again.

    Args:
        folder: where its socket and its files are.
        keeps: have what was written outlive the server.
        memory: how many bytes it may hold; 0 for any number. It evicts nothing.
    """

    def __init__(self, folder: pathlib.Path, keeps: bool = False, memory: int = 0) -> None:
        program = shutil.which("redis-server")
        assert program, "the tests need redis-server on the PATH; `make redis` installs it"
        self.socket = str(folder / "redis.sock")
        # Each write is on the disk before it is answered.
        disk = ["--appendonly", "yes", "--appendfsync", "always"] if keeps else ["--appendonly", "no"]
        self._command = [program, "--port", "0", "--unixsocket", self.socket, "--dir", str(folder), "--save", "", *disk]
        self._command += ["--maxmemory", str(memory), "--maxmemory-policy", "noeviction"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=self.socket)
        end = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert self.process.poll() is None, "redis-server has ended"
                assert time.monotonic() < end, "redis-server does not answer"
                time.sleep(0.01)
        client.close()

    def fill(self) -> None:
        """Write until the server refuses, with a last value so large that a few small deletions do not matter."""
        with redis.Redis(unix_socket_path=self.socket) as client:
            try:
                for number in itertools.count():
                    client.set(f"filler {number}", bytes(1 << 16))
            except redis.exceptions.OutOfMemoryError:
                client.delete(*[f"filler {earlier}" for earlier in range(max(0, number - 4), number)])
            # The value is made by the server: one that is sent takes memory before it is there.
            client.setrange("last filler", (1 << 20) - 1, b"x")

    def empty(self) -> None:
        """Take away what `fill` has written."""
        with redis.Redis(unix_socket_path=self.socket) as client:
            client.delete("last filler", *client.scan_iter("filler *"))

    def dump(self) -> dict[bytes, bytes]:
        """All keys and what they hold, but for what `fill` has written."""
        with redis.Redis(unix_socket_path=self.socket) as client:
            return {key: client.dump(key) for key in client.scan_iter() if b"filler" not in key}

    def kill(self) -> None:
        """As a crash: SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@functools.cache
def shared_socket() -> str:
    """The socket of a server that all tests of this process share, each with identifiers of its own."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="redis-"))
    server = RedisServer(folder)

    def end() -> None:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return server.socket
