"""The worker processes: one imports this package, two the reference, at each of its levels."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import select
import struct
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
TESTS = pathlib.Path(__file__).parents[1]
# All run with the same interpreter, and so on the same torch.
PYTHON = ROOT / ".venv-reference" / "bin" / "python"
REFERENCE = ROOT / ".venv-reference" / "tensordict-0.14.3"
NEWEST = next((ROOT / ".venv-reference" / "lib").glob("python*/site-packages"), ROOT / ".venv-reference" / "lib")
OURS = ROOT / "src"

# The seconds that a worker may take for one request.
LIMIT = 300.0

# The answer of a worker about one value (summaries.py), and about one line: its exception and variables.
Summary = dict[str, Any]
Reply = dict[str, Any]
Lines = list[tuple[str, str | None]]


class Replies(NamedTuple):
    """The replies of all sides to a program: one reply a line, or `{"dead": why}`.

    `newest` covers the lines up to the last one that the reference refuses; the others are not asked for.
    """

    reference: Any
    ours: Any
    newest: list[Reply]


def limit_of(lines: Lines) -> float:
    """Return the seconds after which a program counts as hanging; more than a busy machine stands still."""
    return LIMIT + 25 * len(lines)


class Side:
    """A worker that runs programs on one package. When it dies it says so, and the next request starts it again."""

    def __init__(self, name: str, package: pathlib.Path, python: pathlib.Path = PYTHON) -> None:
        self.name, self.package, self.python = name, package.absolute(), python.absolute()
        self.process: subprocess.Popen[bytes] | None = None
        # The output of the worker until it runs programs; they print to nowhere.
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115

    def _environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # The folder of temporary files may hold modules of any name.
        same = {"PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
        same |= {"PYTHONPATH": f"{self.package}:{TESTS}"}
        return {**os.environ, **threads, **same}

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self.python, "-m", "differ.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=self._environment(),
            cwd=tempfile.gettempdir(),
        )

    def ask(self, *request: Any, limit: float = LIMIT) -> Any:
        """The worker's answer, or `{"dead": why}` where it ended or took more than `limit` seconds."""
        self.send(*request)
        return self.receive(limit)

    def send(self, *request: Any) -> None:
        """Hand over a request; `receive` gets the answer."""
        if self.process is not None and self.process.poll() is not None:
            self._ended(self.process)
            self.process = None
        if self.process is None:
            self.process = self._start()
        assert self.process.stdin is not None
        data = pickle.dumps(request)
        try:
            self.process.stdin.write(struct.pack("q", len(data)) + data)
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # `receive` says that the process ended

    def receive(self, limit: float = LIMIT) -> Any:
        """Return the answer to the last message."""
        assert self.process is not None
        try:
            answer = json.loads(self._read(struct.unpack("q", self._read(8, limit))[0], limit))
            if _hangs(answer):
                self._restart()
            return answer
        except (EOFError, TimeoutError) as error:
            self.process.kill()
            status = self._ended(self.process)
            self.process = None
            self.errors.seek(0)
            said = self.errors.read().decode()[-300:]
            return {"dead": f"{type(error).__name__} {error} (exit status {status}) {said}".strip()}

    def run(self, lines: Lines) -> list[Reply] | Reply:
        """One reply per line of a program, or `{"dead": why}`."""
        return self.ask("run", lines, limit=limit_of(lines))

    def _read(self, count: int, limit: float) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        out = b""
        end = time.monotonic() + limit
        while len(out) < count:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("no answer")
            part = os.read(self.process.stdout.fileno(), count - len(out))
            if not part:
                raise EOFError("process ended")
            out += part
        return out

    def _restart(self) -> None:
        """End the worker, so that the next request starts it again: the import of a module may be interrupted."""
        if self.process is not None:
            self._ended(self.process)
        self.process = None

    def stop(self) -> None:
        """End the worker, for good."""
        self._restart()
        self.errors.close()

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status of a worker whose pipes are closed: it ends by itself, or is killed after 10 seconds."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stdout.close()


def _hangs(answer: Any) -> bool:
    """Return whether a line of the answer was interrupted."""
    replies = answer if isinstance(answer, list) else [answer]
    return any(isinstance(reply, dict) and (reply.get("exc") or {}).get("cls") == "Hang" for reply in replies)


class Sides:
    """The workers, as a block that ends them: level 0.14.3 of the reference, the newest level, and ours."""

    def __init__(self) -> None:
        self.reference, self.ours = Side("reference", REFERENCE), Side("ours", OURS)
        self.newest = Side("newest", NEWEST)

    def __enter__(self) -> Sides:
        sides = (self.reference, self.ours, self.newest)
        for side in sides:
            side.send("where")
        for side in sides:
            file = side.receive(limit=600)  # imports take long where every core is busy
            if not str(file).startswith(str(side.package)):
                raise ImportError(f"{side.name}: {side.python} does not import tensordict from {side.package}: {file}")
        return self

    def __exit__(self, *_: object) -> None:
        for side in (self.reference, self.ours, self.newest):
            side.stop()

    def run(self, lines: Lines, reference: Any = None, newest: Any = None, ask_newest: bool = True) -> Replies:
        """Run all sides at the same time, except those whose replies are given."""
        limit = limit_of(lines)
        self.ours.send("run", lines)
        if reference is None:
            self.reference.send("run", lines)
            reference = self.reference.receive(limit)
        refused = [i for i, reply in enumerate(reference) if reply["exc"]] if isinstance(reference, list) else []
        ask_newest = ask_newest and newest is None and refused != []
        if ask_newest:
            self.newest.send("run", lines[: refused[-1] + 1])
        ours = self.ours.receive(limit)
        newest = self.newest.receive(limit) if ask_newest else newest
        return Replies(reference, ours, newest if isinstance(newest, list) else [])
