"""When torch refuses to do something with the leaves of a container: whether ragged leaves may be why, and once more.

Operations call torch first, so that plain leaves pay nothing for the ragged ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tensordict.core import ragged
from tensordict.core.contract import Contract, LeafFn, named_error
from tensordict.core.ragged import REFUSALS

__all__ = ["REFUSALS", "has_ragged", "retried"]

Result = TypeVar("Result")


def has_ragged(*values: object) -> bool:
    """Whether there are ragged leaves in any of these containers; other values have none."""
    return any(ragged.is_ragged(leaf) for value in values if isinstance(value, Contract) for _, leaf in value._walk())


def retried(node: Contract, walk: Callable[..., Result], fn: LeafFn, *args: object) -> Result:
    """`walk(fn, *args)`, a structural walk of `node`, for an `fn` that knows ragged leaves; errors name the entry."""
    try:
        return walk(fn, *args)
    except REFUSALS as error:
        for path, leaf in node._walk():
            try:
                fn(leaf)
            except REFUSALS as again:
                raise named_error(again, path) from None
        raise error
