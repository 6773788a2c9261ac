"""A check that conversions share: whether a lazy stack has the same entries in all members."""

from __future__ import annotations

from tensordict.core.contract import Contract
from tensordict.core.exceptions import KeyMismatchError


def refuse_exclusive(container: Contract, method: str) -> None:
    """Raise if a lazy stack has entries that only some members have, because `method` would lose them."""
    if type(container._entries) is dict or not (members := container._members()):
        return
    for member in members:
        refuse_exclusive(member, method)
    names = [set(member._structure()) for member in members]
    if odd := sorted(set().union(*names) - set.intersection(*names)):
        raise KeyMismatchError(
            f"the method {method} cannot complete when there are exclusive keys: only some members of the lazy stack "
            f"have {odd}. Call it for each of the members, as in stack.tolist(), or select the common keys first"
        )
