"""The settings of modules: choices that hold for a `with` block, in all threads or in one."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from tensordict.core import torch_internals as internals

T = TypeVar("T")


class _OwnValue(threading.local):
    """The value that one thread has chosen for itself: a list of one, or an empty list without one."""

    def __init__(self) -> None:
        self.chosen: list[Any] = []


class Choice(Generic[T]):
    """The value of one setting.

    shared: the value of all threads that have not chosen one for themselves.
    in_threads: whether any thread ever chose a value for itself. While it is `False`, read `shared` directly: looking
        for the value of a thread takes 80 ns.
    own: the value of the current thread.
    """

    def __init__(self, shared: T) -> None:
        self.shared = shared
        self.in_threads = False
        self.own = _OwnValue()

    def get(self) -> T:
        """Return the value for the current thread."""
        if self.in_threads and (chosen := self.own.chosen):
            return chosen[0]  # type: ignore[no-any-return]
        return self.shared


class Setting(internals.Decorator):
    """The base of settings for a `with` block or a decorated function.

    A block with `thread_local=True` concerns the calling thread only, and so do all blocks inside it in this thread.
    """

    _choice: Choice[Any]

    def __init__(self, value: Any, thread_local: bool) -> None:
        super().__init__()
        self._value = value
        self._thread_local = thread_local
        # What each `_choose` replaced: the value of the thread (a list) or the shared one.
        self._replaced: list[tuple[bool, Any]] = []

    def _choose(self) -> None:
        choice = self._choice
        if self._thread_local or (choice.in_threads and choice.own.chosen):
            self._replaced.append((True, list(choice.own.chosen)))
            choice.own.chosen[:] = [self._value]
            choice.in_threads = True
        else:
            self._replaced.append((False, choice.shared))
            choice.shared = self._value

    def _undo(self) -> None:
        own, before = self._replaced.pop()
        if own:
            self._choice.own.chosen[:] = before
        else:
            self._choice.shared = before

    def __enter__(self) -> None:
        self._choose()

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        self._undo()
