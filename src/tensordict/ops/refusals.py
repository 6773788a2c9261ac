"""When torch refuses to do something with the leaves of a container: whether ragged leaves may be why, and once more.

Operations call torch first, so that plain leaves pay nothing for the ragged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tensordict.core import ragged
from tensordict.core.contract import Contract, LeafFn, named_error
from tensordict.core.keys import Path
from tensordict.core.ragged import REFUSALS

__all__ = ["REFUSALS", "has_ragged_leaves", "name_entry", "retry_with_ragged"]

Result = TypeVar("Result")


def has_ragged_leaves(*values: object) -> bool:
    """Whether there are ragged leaves in any of these containers; other values have none."""
    return any(ragged.is_ragged(leaf) for value in values if isinstance(value, Contract) for _, leaf in value._walk())


def retry_with_ragged(node: Contract, walk: Callable[..., Result], fn: LeafFn, *args: object) -> Result:
    """`walk(fn, *args)`, a structural walk of `node`, for an `fn` that knows ragged leaves; errors name the entry."""
    try:
        return walk(fn, *args)
    except REFUSALS as error:
        raise name_entry(error, node._walk(), fn) from None


def name_entry(error: Exception, pairs: Iterable[tuple[Path, Any]], fn: LeafFn) -> Exception:
    """`error`, raised by `fn` on one of these leaves, with the key of that leaf in front."""
    for path, leaf in pairs:
        try:
            if not isinstance(leaf, Contract):
                fn(leaf)
        except Exception as again:
            return named_error(again, path)
    return error
