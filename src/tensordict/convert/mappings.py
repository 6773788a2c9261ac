"""Containers from dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tensordict.core import registry
from tensordict.core.contract import Contract
from tensordict.core.errors import KeyMismatchError

if TYPE_CHECKING:
    from tensordict.containers.dense import TensorDict


def from_dict(
    d: object,
    *,
    auto_batch_size: bool = False,
    batch_dims: int | None = None,
    device: object = None,
    batch_size: object = None,
) -> TensorDict:
    """A `TensorDict` made from a (nested) dict; see :meth:`TensorDict.from_dict`.

    Example:
        >>> import torch
        >>> from tensordict import from_dict
        >>> from_dict({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, auto_batch_size=True).batch_size
        torch.Size([3])
    """
    return registry.lookup("TensorDict").from_dict(
        d, auto_batch_size=auto_batch_size, batch_dims=batch_dims, device=device, batch_size=batch_size
    )


def make_tensordict(
    input_dict: Mapping[Any, Any] | None = None,
    batch_size: object = None,
    device: object = None,
    auto_batch_size: bool | None = None,
    **kwargs: object,
) -> TensorDict:
    """A `TensorDict` made from a (nested) dict, from keyword arguments, or from both.

    Args:
        input_dict: a mapping from (nested) keys to values, or a container.
        batch_size: the batch size; none by default.
        device: where the entries are moved.
        auto_batch_size: without a `batch_size`, give every level the longest one that its entries share.
        **kwargs: further entries; these win over entries of the same name in `input_dict`.

    Example:
        >>> import torch
        >>> from tensordict import make_tensordict
        >>> sorted(make_tensordict({"a": torch.zeros(3)}, b=torch.ones(3), batch_size=[3]).keys())
        ['a', 'b']
    """
    entries = kwargs if input_dict is None else ({**dict(input_dict.items()), **kwargs} if kwargs else input_dict)
    return registry.lookup("TensorDict").from_dict(
        entries, auto_batch_size=auto_batch_size, batch_size=batch_size, device=device
    )


def fromkeys(keys: Iterable[object], value: object = 0) -> TensorDict:
    """A `TensorDict` without batch dims that has the same value under every (nested) key.

    Example:
        >>> from tensordict import fromkeys
        >>> fromkeys(["a", "b"], 2).to_dict(convert_tensors=True)
        {'a': 2, 'b': 2}
    """
    return registry.lookup("TensorDict").fromkeys(keys, value)


def refuse_exclusive(container: Contract, method: str) -> None:
    """Raise when a lazy stack has entries that only some of its members have, which a dense form would lose."""
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
