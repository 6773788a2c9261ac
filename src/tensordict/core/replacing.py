"""Whether what is written to a file may replace a tensor that it has by one of another shape or dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_REPLACING = ContextVar("tensordict.replacing", default=False)


def is_replacing() -> bool:
    """Whether the caller asked for tensors to be replaced."""
    return _REPLACING.get()


@contextlib.contextmanager
def replacing() -> Iterator[None]:
    """A block in which tensors are replaced, and not written into."""
    token = _REPLACING.set(True)
    try:
        yield
    finally:
        _REPLACING.reset(token)
