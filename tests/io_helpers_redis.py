"""What the tests of containers on Redis servers share."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import redis

ROOT = pathlib.Path(__file__).parents[1]


def base(store: Any) -> str:
    return f"tensordict:{{{store.td_id}}}:"


def requests(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """How many times a call sends something to a server."""
    sent = []
    real = redis.connection.AbstractConnection.send_packed_command

    def counting(self: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        sent.append(command)
        real(self, command, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(redis.connection.AbstractConnection, "send_packed_command", counting)
        call()
    return len(sent)


def reference(program: str, *args: str) -> str:
    python = ROOT / ".venv-behaviour" / "bin" / "python"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [python, "-W", "ignore", "-c", program, *args], capture_output=True, text=True, env=env, cwd="/"
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
