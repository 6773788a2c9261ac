"""Helpers of tests of containers on Redis servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis


def base(store: Any) -> str:
    return f"tensordict:{{{store.td_id}}}:"


def requests(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """Count how many times a call sends something to a server, without the greeting of a new connection."""
    sent = []
    real = redis.connection.AbstractConnection.send_packed_command

    def counting(self: Any, command: Any, *args: Any, **kwargs: Any) -> None:
        if b"SETINFO" not in b"".join(map(bytes, command)):
            sent.append(command)
        real(self, command, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(redis.connection.AbstractConnection, "send_packed_command", counting)
        call()
    return len(sent)
