"""A check that conversions share: all members of a lazy stack must have the same entries."""

from __future__ import annotations

from tensordict.core.contract import Contract
from tensordict.core.exceptions import KeyMismatchError


def refuse_exclusive_keys(container: Contract, method: str) -> None:
    """Raise if a lazy stack has entries that only some members have, because `method` would lose them."""
    if type(container._entries) is dict or not (members := container._members()):
        return
    for member in members:
        refuse_exclusive_keys(member, method)
    names = [set(member._structure()) for member in members]
    if odd := sorted(set().union(*names) - set.intersection(*names)):
        raise KeyMismatchError(
            f"the method {method} cannot complete when there are exclusive keys: only some members of the lazy stack "
            f"have {odd}. Call it for each of the members, as in stack.tolist(), or select the common keys first"
        )
