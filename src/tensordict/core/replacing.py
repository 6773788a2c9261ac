"""Whether what is written to a file may replace a tensor that it has by one of another shape or dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch

_REPLACING = ContextVar("tensordict.replacing", default=False)


def is_replacing() -> bool:
    """Whether the caller asked for tensors to be replaced."""
    return _REPLACING.get()


def replacing() -> AbstractContextManager[None]:
    """A block in which tensors are replaced, and not written into; compiled code writes to no file and needs none."""
    return nullcontext() if torch.compiler.is_dynamo_compiling() else _replacing()


@contextlib.contextmanager
def _replacing() -> Iterator[None]:
    token = _REPLACING.set(True)
    try:
        yield
    finally:
        _REPLACING.reset(token)
