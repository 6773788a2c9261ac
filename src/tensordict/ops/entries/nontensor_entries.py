"""Methods that write, read and find values: entries that are neither tensors nor containers."""

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
    """The methods `set_non_tensor`, `get_non_tensor`, `is_non_tensor`, `non_tensor_items`, `filter_non_tensor_data`."""

    def set_non_tensor(self, key: object, value: object) -> Self:
        """Store any object as a value, without converting it: a dict stays a dict, and a number a number.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict().set_non_tensor(("info", "limits"), {"low": 0, "high": 1})
            >>> td["info", "limits"]
            {'low': 0, 'high': 1}

        Args:
            key: a string or a tuple of strings; missing containers on the way are created.
            value: any object. `td[key]` returns it, and `td.get(key)` returns its holder.

        Returns:
            the same container.

        Raises:
            RuntimeError: the container is locked.
        """
        if not (isinstance(value, Contract) and value._is_non_tensor):
            value = makers.value(value, self._batch_size)
        self._write(path_of(key), value)
        return self

    def get_non_tensor(self, key: object, default: object = NO_DEFAULT) -> Any:
        """Return the value at a nested key. For a tensor or a container, return what :meth:`get` returns.

        Example:
            >>> from tensordict import TensorDict
            >>> TensorDict(name="walker").get_non_tensor("name")
            'walker'

        Args:
            key: a string or a tuple of strings.
            default: returned if the container has no such entry.

        Raises:
            KeyError: the container has no such entry, and `default` is not given.
        """
        value = self._peek(path_of(key))
        if value is None:
            if default is not NO_DEFAULT:
                return default
            raise self._make_missing_error(key)
        if type(value) is Tensor or not isinstance(value, Contract) or not value._is_non_tensor:
            return value
        return value._unwrap_value()

    def is_non_tensor(self, key: object) -> bool:
        """Return whether the entry at a nested key is a value.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(name="walker", obs=torch.zeros(3))
            >>> td.is_non_tensor("name"), td.is_non_tensor("obs")
            (True, False)

        Raises:
            KeyError: the container has no such entry.
        """
        node, name = self._find_parent(path_of(key))
        value = node._structure()[name]
        return isinstance(value, Contract) and value._is_non_tensor

    def non_tensor_items(self, include_nested: bool = False) -> tuple[tuple[Key, Any], ...]:
        """Return the (key, holder) pairs of all values.

        Example:
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"name": "walker", "a": {"b": "c"}})
            >>> [key for key, _ in td.non_tensor_items(include_nested=True)]
            ['name', ('a', 'b')]

        Args:
            include_nested: include the values in nested containers.
        """
        found: list[tuple[Any, Any]] = []
        _collect_values(self, (), include_nested, found)
        return tuple(found)

    def filter_non_tensor_data(self) -> Self:
        """Return a container of the same structure without the values.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> list(TensorDict(name="walker", obs=torch.zeros(3)).filter_non_tensor_data().keys())
            ['obs']

        Returns:
            a new container over the same tensors, not locked.
        """
        result = self.exclude(*[key for key, _ in self.non_tensor_items(include_nested=True)])
        return result.copy() if self._locked else result  # A nested container without values would stay locked.


def _collect_values(node: Contract, prefix: Path, nested: bool, found: list[tuple[Any, Any]]) -> None:
    for name, value in node._structure().items():
        if type(value) is Tensor or not isinstance(value, Contract):
            continue
        if value._is_non_tensor:
            found.append((joined((*prefix, name)), value))
        elif nested:
            _collect_values(value, (*prefix, name), nested, found)
