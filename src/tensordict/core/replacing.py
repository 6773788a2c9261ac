"""A context that lets writes to a file replace a tensor by one with another shape or dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch

_REPLACING = ContextVar("tensordict.replacing", default=False)


def is_replacing() -> bool:
    """Return whether the current context allows tensors to be replaced."""
    return _REPLACING.get()


def replacing() -> AbstractContextManager[None]:
    """Return a block that replaces tensors instead of writing into them. It does nothing in compiled code."""
    return nullcontext() if torch.compiler.is_dynamo_compiling() else _replacing()


@contextlib.contextmanager
def _replacing() -> Iterator[None]:
    token = _REPLACING.set(True)
    try:
        yield
    finally:
        _REPLACING.reset(token)
