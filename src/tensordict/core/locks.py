"""Locks that are free in a process that was forked, in which the threads that had them are not."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """A lock for what threads share, which whoever has it may take again.

    A process may be forked while one of its threads has it. So what is changed under it is to make sense after each
    step: a child goes on from there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _all:
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
