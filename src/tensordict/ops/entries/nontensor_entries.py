"""Values that are no tensors, as entries of a container: writing, reading and finding them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract
from tensordict.core.keys import Key, Path, joined, path_of
from tensordict.ops.entries.reading import NO_DEFAULT
from tensordict.ops.entries.writing import Writing

if TYPE_CHECKING:
    from typing_extensions import Self


class Values(Writing):
    """`set_non_tensor`, `get_non_tensor` and their kin."""

    def set_non_tensor(self, key: object, value: object) -> Self:
        """Store a value as it is, whatever it is: a dict is not made a container, nor a number a tensor.

        Args:
            key: a string or a tuple of strings; nested containers on the way are created.
            value: any object. `td[key]` gives it back, `td.get(key)` its holder.

        Returns:
            the same container.

        Raises:
            RuntimeError: the container is locked.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict().set_non_tensor(("info", "limits"), {"low": 0, "high": 1})
            >>> td["info", "limits"]
            {'low': 0, 'high': 1}
        """
        if not (isinstance(value, Contract) and value._is_non_tensor):
            value = makers.value(value, self._batch_size)
        self._write(path_of(key), value)
        return self

    def get_non_tensor(self, key: object, default: object = NO_DEFAULT) -> Any:
        """The value at a nested key; a tensor or a container is given as :meth:`get` gives it.

        Args:
            key: a string or a tuple of strings.
            default: returned when there is no such entry.

        Raises:
            KeyError: there is no such entry, and no default.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(name="walker").get_non_tensor("name")
            'walker'
        """
        value = self._peek(path_of(key))
        if value is None:
            if default is not NO_DEFAULT:
                return default
            raise self._missing(key)
        if type(value) is Tensor or not isinstance(value, Contract) or not value._is_non_tensor:
            return value
        return value._unwrap_value()

    def is_non_tensor(self, key: object) -> bool:
        """Whether the entry at a nested key holds a value that is no tensor; raises `KeyError` when there is none.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(name="walker", obs=torch.zeros(3))
            >>> td.is_non_tensor("name"), td.is_non_tensor("obs")
            (True, False)
        """
        node, name = self._holder(path_of(key))
        value = node._structure()[name]
        return isinstance(value, Contract) and value._is_non_tensor

    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[Key, Any], ...]:
        """The (key, holder) pairs of the entries that hold values which are no tensors.

        Args:
            include_nested: those of nested containers too.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"name": "walker", "a": {"b": "c"}})
            >>> [key for key, _ in td.non_tensor_items(include_nested=True)]
            ['name', ('a', 'b')]
        """
        found: list[tuple[Any, Any]] = []
        _collect(self, (), include_nested, found)
        return tuple(found)

    def filter_non_tensor_data(self) -> Self:
        """The same structure without the entries that hold values which are no tensors.

        Returns:
            a new container, unlocked, over the same tensors.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict(name="walker", obs=torch.zeros(3)).filter_non_tensor_data().keys())
            ['obs']
        """
        return self.exclude(*[key for key, _ in self.non_tensor_items(include_nested=True)])


def _collect(node: Contract, prefix: Path, nested: bool, found: list[tuple[Any, Any]]) -> None:
    for name, value in node._structure().items():
        if type(value) is Tensor or not isinstance(value, Contract):
            continue
        if value._is_non_tensor:
            found.append((joined((*prefix, name)), value))
        elif nested:
            _collect(value, (*prefix, name), nested, found)
