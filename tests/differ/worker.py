"""One side: a process that runs lines of programs and tells what became of the variables.

Requests come pickled on standard input, answers go as JSON to standard output, each behind its length in 8 bytes.
The output of programs is discarded.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import shutil
import signal
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from differ import prelude
from differ.summaries import Drained, is_view, summarise, without_chance

SECONDS = 20
KNOWN = {v for v in vars(builtins).values() if isinstance(v, type) and issubclass(v, BaseException)}
KNOWN -= {Exception, BaseException, object}


class Hang(BaseException):
    """A line ran for too long; no `except Exception` of the code under test catches it."""


@contextmanager
def _watched() -> Iterator[None]:
    """Raise `Hang` in a block that computes for too long. The driver ends a worker that waits for ever."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _interrupt(*_: object) -> None:
    raise Hang(f"ran for more than {SECONDS} s")


class Programs:
    """Runs programs one after the other, each with variables and a folder of its own."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.count = 0
        self.folders: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Forget the variables. The folders of the last four programs stay: files may still be mapped."""
        folder = os.path.join(self.root, str(self.count))
        os.mkdir(folder)
        self.count += 1
        self.folders.append(folder)
        while len(self.folders) > 4:
            shutil.rmtree(self.folders.pop(0), ignore_errors=True)
        prelude.enter(folder)
        self.variables = dict(vars(prelude))
        self.names: list[str] = []

    def step(self, code: str, result: str | None) -> dict[str, Any]:
        """Run a line: what it raised, if anything, and what all variables hold."""
        torch.default_generator.manual_seed(0)  # the function of that name seeds every device, which takes long
        error = self._run(code, result)
        if error is None and result:
            self.names.append(result)
        try:
            with _watched():
                state = {n: summarise(self.variables[n]) for n in self.names if n in self.variables}
        except Hang:
            state = {"?": {"k": "broken", "cls": "summary", "exc": "Hang", "msg": ""}}
        return {"exc": error, "state": state}

    def _run(self, code: str, result: str | None) -> dict[str, Any] | None:
        try:
            with _watched():
                exec(f"{result} = {code}" if result else code, self.variables)
                if result:
                    value = self.variables[result]
                    if hasattr(value, "__next__") or (is_view(value) and hasattr(type(value), "__iter__")):
                        self.variables[result] = Drained(value)
        except BaseException as error:
            kinds = [c for c in type(error).__mro__ if c in KNOWN] or [type(error)]
            message = without_chance(str(error))[:400]
            return {"cls": type(error).__name__, "mro": [c.__name__ for c in kinds], "msg": message}
        return None

    def answer(self, request: tuple[Any, ...]) -> object:
        """`("where",)`, `("new",)`, `("step", code, result)`, or `("run", [(code, result), ...])`: a whole program."""
        if request[0] == "where":
            return prelude.tensordict.__file__
        if request[0] == "step":
            return self.step(*request[1:])
        self.begin()
        return [self.step(code, result) for code, result in request[1]] if request[0] == "run" else None


def _channels() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the driver; programs get /dev/null in their place."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    return incoming, outgoing


def main() -> None:
    incoming, outgoing = _channels()
    signal.signal(signal.SIGPROF, _interrupt)
    torch.set_num_threads(1)
    root = tempfile.mkdtemp(prefix="differ-")
    try:
        programs = Programs(root)
        while len(head := incoming.read(8)) == 8:
            request = pickle.loads(incoming.read(struct.unpack("q", head)[0]))
            data = json.dumps(programs.answer(request), default=str).encode()
            outgoing.write(struct.pack("q", len(data)) + data)
            outgoing.flush()
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
