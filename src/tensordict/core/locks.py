"""Locks that are free in a process that was forked, in which the threads that had them are not."""

from __future__ import annotations

import os
import threading
import weakref


class Lock:
    """A lock for what threads share.

    A process may be forked while one of its threads has it. So what is changed under it is to make sense after each
    step: a child goes on from there.

    Attributes:
        held: to be held in a `with` block, which whoever is in one may enter again; a new one after a fork.
    """

    def __init__(self) -> None:
        # Not a block of our own: an interrupt could come between the lock and the block, and it would never be free.
        self.held = threading.RLock()
        _all.add(self)


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _all:
        lock.held = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
