"""Handling of errors that torch raises for the leaves of a container: the retry for ragged leaves, and the key.

Operations call torch without looking for ragged leaves, so that dense leaves cost no extra time. If torch raises one of
`REFUSALS`, they look for ragged leaves and retry with a function that supports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tensordict.core import ragged
from tensordict.core.contract import Contract, LeafFn, named_error
from tensordict.core.keys import Path
from tensordict.core.ragged import REFUSALS

__all__ = ["REFUSALS", "has_ragged_leaves", "name_entry", "retry_ragged_walk"]

Result = TypeVar("Result")


def has_ragged_leaves(*values: object) -> bool:
    """Return whether any of the containers among these values has ragged leaves."""
    return any(ragged.is_ragged(leaf) for value in values if isinstance(value, Contract) for _, leaf in value._walk())


def retry_ragged_walk(node: Contract, walk: Callable[..., Result], fn: LeafFn, *args: object) -> Result:
    """Call `walk(fn, *args)`, a structural walk of `node`, with a function that supports ragged leaves.

    Errors name the entry.
    """
    try:
        return walk(fn, *args)
    except REFUSALS as error:
        raise name_entry(error, node._walk(), fn) from None


def name_entry(error: Exception, pairs: Iterable[tuple[Path, Any]], fn: LeafFn) -> Exception:
    """Find the leaf on which `fn` raised `error`. Returns the error prefixed with its key, or `error` if none is found.

    Args:
        error: the error.
        pairs: the paths and leaves.
        fn: called again on each leaf.
    """
    for path, leaf in pairs:
        try:
            if not isinstance(leaf, Contract):
                fn(leaf)
        except Exception as again:
            return named_error(again, path)
    return error
