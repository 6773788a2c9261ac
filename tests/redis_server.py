"""Redis servers for tests, each on a unix socket in a folder of its own; nothing else can reach them."""

from __future__ import annotations

import atexit
import functools
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import redis


class RedisServer:
    """A server that can be killed and started again; what was written is kept when it is asked to keep it."""

    def __init__(self, folder: pathlib.Path, keeps: bool = False) -> None:
        program = shutil.which("redis-server")
        assert program, "the tests need redis-server on the PATH; `make redis` installs it"
        self.socket = str(folder / "redis.sock")
        # Each write is on the disk before it is answered.
        disk = ["--appendonly", "yes", "--appendfsync", "always"] if keeps else ["--appendonly", "no"]
        self._command = [program, "--port", "0", "--unixsocket", self.socket, "--dir", str(folder), "--save", "", *disk]
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
