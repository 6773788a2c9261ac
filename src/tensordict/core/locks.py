"""Locks that a forked child process finds free, even if a thread of the parent held them."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """A lock for data that threads share.

    A process may fork while one of its threads holds the lock. The child continues with the data in that state, so
    every single step under the lock must leave the data consistent.

    Attributes:
        held: the reentrant lock, for a `with` statement. After a fork, the child gets a new one.
    """

    def __init__(self) -> None:
        # Not a context manager of ours: an interrupt between acquiring and entering would leave the lock held forever.
        self.held = threading.RLock()
        _all.add(self)


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _all:
        lock.held = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
