"""Names of the batch dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tensordict.contract import Contract, Names


class Naming(Contract):
    """The `names` of the batch dims; nested containers share those of their parent."""

    @property
    def names(self) -> Names:
        """One name, or `None`, per batch dim; assigning a sequence (or `None`) names the dims of the whole tree.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2, 3)}, [2, 3], names=["batch", "time"])
            >>> td[0].names
            ['time']
        """
        return [None] * len(self._batch_size) if self._names is None else list(self._names)

    @names.setter
    def names(self, names: Sequence[str | None] | None) -> None:
        if names is None:
            _rename_tree(self, None, len(self._batch_size))
            return
        checked = checked_names(names, len(self._batch_size))
        _rename_tree(self, checked, len(checked))


def checked_names(names: Any, ndim: int) -> Names:
    """Names as a list; raises when there is not one per dim, or when one is used twice."""
    if type(names) not in (list, tuple) and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise TypeError(f"names are a sequence of strings or None, one per batch dim, got {names!r}")
    checked = list(names)
    if len(checked) != ndim:
        raise ValueError(f"{len(checked)} names {checked} do not fit {ndim} batch dims")
    given = [name for name in checked if name is not None]
    if any(not isinstance(name, str) for name in given):
        raise TypeError(f"names are strings or None, got {checked}")
    if len(set(given)) != len(given):
        raise ValueError(f"each name can be used once, got {checked}")
    return checked


def _rename_tree(node: Contract, names: Names | None, lead: int) -> None:
    """Give the first `lead` dims of a tree these names."""
    tail = [] if node._names is None else node._names[lead:]
    merged = [*([None] * lead if names is None else names), *(tail or [None] * (len(node._batch_size) - lead))]
    node._names = merged if any(name is not None for name in merged) else None
    for value in node._entries.values():
        if type(value) is not Tensor and isinstance(value, Contract):
            _rename_tree(value, names, lead)
