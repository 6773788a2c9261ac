"""Methods that read entries: `get` and `get_at`, and the views `keys`, `values` and `items`."""

from __future__ import annotations

import enum
from collections.abc import ItemsView, KeysView, Mapping, ValuesView
from typing import Any, Literal, overload

import torch
from torch import Tensor

from tensordict.core import ragged, settings
from tensordict.core.contract import Contract
from tensordict.core.exceptions import MissingKeyError
from tensordict.core.indices import leaf_index
from tensordict.core.key_views import IsLeaf, _Items, _Keys, _Values
from tensordict.core.keys import Path, joined, path_of
from tensordict.memory.stored_tensors import StoredTensor, read_stored
from tensordict.ops.dims import ragged_stacks

No = Literal[False]


class _NoDefault(enum.Enum):
    """Markers for a default that was not given. They are an enumeration, because compiled code accepts its members."""

    NO_DEFAULT = enum.auto()
    AS_SET = enum.auto()
    ABSENT = enum.auto()

    def __repr__(self) -> str:
        return "<no default>"


# A missing entry raises an error. Programs pass this marker to `get`, too.
NO_DEFAULT: Any = _NoDefault.NO_DEFAULT
# `set_get_defaults_to_none` decides whether a missing entry raises an error or reads as `None`.
AS_SET: Any = _NoDefault.AS_SET
# Returned for a missing entry. Unlike `None`, it cannot be a stored value.
_ABSENT: Any = _NoDefault.ABSENT


class Reading(Contract):
    """The methods `get`, `get_at`, `keys`, `values`, `items`, and others that read entries or describe them."""

    @overload
    def keys(
        self, include_nested: No = ..., leaves_only: bool = ..., is_leaf: IsLeaf | None = ..., *, sort: bool = ...
    ) -> KeysView[str]: ...
    @overload
    def keys(
        self, include_nested: bool, leaves_only: bool = ..., is_leaf: IsLeaf | None = ..., *, sort: bool = ...
    ) -> KeysView[str | tuple[str, ...]]: ...
    def keys(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> KeysView[Any]:
        """Return a live view of the keys.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}})
            >>> list(td.keys(include_nested=True))
            ['a', ('b', 'c'), 'b']
            >>> ("b", "c") in td.keys(True)
            True

        Args:
            include_nested: include the keys of nested containers, as tuples. Children come before their parent.
            leaves_only: leave out the nested containers themselves.
            is_leaf: takes a class and returns whether its instances count as leaves. Their entries are then left out.
            sort: sort the keys by their names joined with dots, instead of by insertion.
        """
        if include_nested or leaves_only or sort:
            return _Keys(self, include_nested, leaves_only, is_leaf, sort)
        return self._entries.keys()

    def values(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> ValuesView[Any]:
        """Return a live view of the values. Arguments and order are as in :meth:`keys`.

        Example:
            >>> from tensordict import TensorDict
            >>> list(TensorDict(a=1, b=2).values())
            [tensor(1), tensor(2)]
        """
        if include_nested or leaves_only or sort or is_leaf:
            return _Values(self, include_nested, leaves_only, is_leaf, sort)
        return self._entries.values()

    @overload
    def items(
        self, include_nested: No = ..., leaves_only: bool = ..., is_leaf: IsLeaf | None = ..., *, sort: bool = ...
    ) -> ItemsView[str, Any]: ...
    @overload
    def items(
        self, include_nested: bool, leaves_only: bool = ..., is_leaf: IsLeaf | None = ..., *, sort: bool = ...
    ) -> ItemsView[str | tuple[str, ...], Any]: ...
    def items(
        self,
        include_nested: bool = False,
        leaves_only: bool = False,
        is_leaf: IsLeaf | None = None,
        *,
        sort: bool = False,
    ) -> ItemsView[Any, Any]:
        """Return a live view of the (key, value) pairs. Arguments and order are as in :meth:`keys`.

        Example:
            >>> from tensordict import TensorDict
            >>> list(TensorDict(a=1, b=2).items())
            [('a', tensor(1)), ('b', tensor(2))]
        """
        if include_nested or leaves_only or sort or is_leaf:
            return _Items(self, include_nested, leaves_only, is_leaf, sort)
        return self._entries.items()

    @property
    def sorted_keys(self) -> list[str]:
        """The keys of this level in alphabetical order."""
        return sorted(self._entries)

    @property
    def depth(self) -> int:
        """The number of nested levels below this container; 0 if it has no nested containers."""
        deepest = -1
        for value in self._structure().values():
            if isinstance(value, Reading) and not value._is_non_tensor:
                deepest = max(deepest, value.depth)
        return deepest + 1

    def is_empty(self) -> bool:
        """Return whether the tree has no leaves and no values, at any depth."""
        entries: Mapping[str, Any] = self._entries
        if not isinstance(entries, dict):
            if self._is_non_tensor:
                return False
            if (members := self._members(or_template=True)) is not None:
                return all(member.is_empty() for member in members)
            entries = self._structure()
        for value in entries.values():  # noqa: SIM110 (a generator's frame would halve the depth that can be walked)
            if not (isinstance(value, Reading) and value.is_empty()):
                return False
        return True

    def entry_class(self, key: object) -> type:
        """Return the class of the entry at a nested key.

        Raises:
            KeyError: the container has no such entry.
        """
        node, name = self._find_parent(path_of(key))
        return type(node._structure()[name])

    def get_item_shape(self, key: object) -> torch.Size:
        """Return the shape of the entry at a nested key, with -1 for dims that differ between members of a lazy stack.

        Raises:
            KeyError: the container has no such entry.
        """
        node, name = self._find_parent(path_of(key))
        return node._shape_of(name)  # type: ignore[no-any-return]

    def get(
        self,
        key: object,
        default: object = AS_SET,
        *,
        as_list: bool = False,
        as_padded_tensor: bool = False,
        as_nested_tensor: bool = False,
        padding_side: str = "right",
        layout: torch.layout | None = None,
        padding_value: float | int | bool = 0.0,
        return_mask: bool = False,
    ) -> Any:
        """Return the entry at a nested key.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": {"b": torch.arange(3)}})
            >>> td.get(("a", "b")), td.get("missing", "nothing")
            (tensor([0, 1, 2]), 'nothing')
            >>> from tensordict import lazy_stack
            >>> stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
            >>> stack.get("a", as_padded_tensor=True, padding_side="left", padding_value=-1)
            tensor([[-1.,  1.],
                    [ 1.,  1.]])
            >>> stack.get("a", as_nested_tensor=True).offsets()
            tensor([0, 1, 3])

        Args:
            key: a string or a tuple of strings.
            default: returned if the container has no such entry. With `tensordict.base.NO_DEFAULT`, a missing entry
                raises a `KeyError`. Without a default it gives `None`, or raises a `KeyError` after
                :func:`~tensordict.set_get_defaults_to_none` was called with `False`.
            as_list: for a leaf of a lazy stack, return the list of the members' leaves, without copying them; for a
                stack of stacks, lists of lists. This and the next two arguments have no effect on nested containers,
                nor on entries of other containers.
            as_padded_tensor: for a leaf of a lazy stack, pad the members' leaves to the largest size in every dim and
                return one tensor.
            as_nested_tensor: for a leaf of a lazy stack, return a nested tensor over dim 0.
            padding_side: `"right"` pads behind the elements, `"left"` before them.
            layout: the layout of the nested tensor: `torch.jagged` (the default) or `torch.strided`.
            padding_value: the value of the padding.
            return_mask: with `as_padded_tensor`, return a pair: the tensor, and a bool tensor of the same shape that is
                `False` in the padding.

        Returns:
            the stored tensor or container itself, not a copy; for a value, its holder. For a lazy stack, the stack of
            the members' leaves, or a lazy stack of their nested containers.

        Raises:
            RuntimeError: the leaves of the members of a lazy stack cannot be stacked, padded or nested. The error names
                their key and shapes.
            ValueError: more than one of the three forms is requested of a lazy stack, or a mask without padding.
        """
        if as_list or as_padded_tensor or as_nested_tensor or return_mask:
            path = path_of(key)
            stack = self._find_stack_of(path, as_list or as_padded_tensor)
            if stack is not None or self._members() is not None:
                ragged_stacks.check_form(as_list, as_padded_tensor, as_nested_tensor, return_mask)
            if stack is not None and as_list:
                return ragged_stacks.read_column(stack, path[-1])
            if stack is not None and as_nested_tensor:
                return ragged_stacks.read_nested_tensor(stack, path, layout or torch.jagged)
            if stack is not None:
                return ragged_stacks.read_padded_tensor(stack, path, padding_side, padding_value, return_mask)
        # `dict.get` would add 10 ns to the 90 ns of a successful read.
        try:
            if type(key) is str:
                return self._entries[key]
            return self._find(key)
        except KeyError:  # guarded: the next line looks into a dict again; other entries and `_find` have looked
            if isinstance(self._entries, dict) and key in self._entries:
                raise
            if default is AS_SET and settings._get_defaults_to_none:
                return None
            if default is AS_SET or default is NO_DEFAULT:
                raise self._make_missing_error(key) from None
            return default

    def _find_stack_of(self, path: Path, or_unbatched: bool) -> Any:
        """Return the lazy stack whose members have the leaf at `path`, or `None` if it is not in a lazy stack.

        Args:
            path: the path of the leaf.
            or_unbatched: whether an `UnbatchedTensor` is a leaf.
        """
        node: Any = self
        for name in path[:-1]:
            node = None if node is None else node._node(name)
        if node is None or node._members() is None or path[-1] not in node._entries:
            return None
        child = node._node(path[-1])
        if child is not None and not (or_unbatched and child._is_tensor):
            return None
        return node._wrapped_container()

    def get_at(
        self, key: object, index: object = NO_DEFAULT, default: object = AS_SET, *, idx: object = NO_DEFAULT
    ) -> Any:
        """Return a part of the entry at a nested key: `td.get(key)[index]`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(6).view(3, 2)}, [3]).get_at("a", (..., 0))
            tensor([0, 2, 4])

        The result is a view or a copy, as with torch's indexing. From a file, only this part is read.

        Args:
            key: a string or a tuple of strings.
            index: the index. For a leaf it may reach the feature dims. For a nested container or a value it applies to
                the batch dims.
            default: returned for a missing entry, without indexing it; see :meth:`get`.
            idx: another name of `index`.

        Raises:
            TypeError: no index is given, or both of its names are.
        """
        if index is NO_DEFAULT or idx is not NO_DEFAULT:
            index = choose_given("get_at", index=index, idx=idx)
        if not isinstance(self._entries, dict) and self._wrapped_container()._is_in_file:
            stored = self._peek_unread(path_of(key))
            if type(stored) is StoredTensor:
                return read_stored(stored[leaf_index(index, stored.shape)])
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            return self.get(key, default)
        if isinstance(value, Tensor):
            at = leaf_index(index, ragged.shape_of(value))
            if value.is_nested:
                return ragged.Index(at)(value)
            return value._over(value[at], self._batch_size) if isinstance(value, Contract) else value[at]  # type: ignore[attr-defined]
        return value[index] if isinstance(value, Contract) else value  # type: ignore[index]

    def _peek_unread(self, path: Path) -> Any:
        """Return the entry at `path` without reading a tensor from a file; `None` if it does not exist."""
        if not self._has(path):
            return None
        node, name = self._find_parent(path)
        return node._writable()[name]

    def _find(self, key: object) -> Any:
        """Return the entry at a nested key.

        Raises:
            KeyError: a name is missing, or leads into a tensor.
        """
        node: Any = self
        if type(key) is tuple and key:
            try:
                for name in key:
                    node = node._entries[name]
                return node
            except (KeyError, AttributeError, TypeError):  # guarded: `_find_slowly` looks again
                # The key is nested in itself, or a name is missing or leads into a tensor.
                node = self
        return self._find_slowly(path_of(key))

    def _find_slowly(self, path: Path) -> Any:
        node: Any = self
        for i, name in enumerate(path):
            if not isinstance(node, Contract):
                raise _make_below_tensor_error(path, i)
            node = node._entries.get(name)
            if node is None:
                raise KeyError(name)
        return node

    def _has(self, path: Path) -> bool:
        """Return whether `path` has an entry, without reading it."""
        node: Any = self
        for name in path[:-1]:
            node = node._node(name)
            if node is None:
                return False
        return path[-1] in node._entries

    def _has_anywhere(self, path: Path) -> bool:
        """Return whether `path` has an entry; for a lazy stack, whether at least one of its members has it."""
        if (members := self._members(or_template=True)) is not None:
            return any(member._has_anywhere(path) for member in members)
        return self._has(path)

    def _find_parent(self, path: Path) -> tuple[Any, str]:
        """Return the container that has the entry at `path`, and the name of the entry there.

        Raises:
            KeyError: the entry does not exist.
        """
        if not self._has(path):
            raise self._make_missing_error(joined(path))
        return (self if len(path) == 1 else self._find(path[:-1])), path[-1]

    def _make_missing_error(self, key: object) -> KeyError:
        """Make the error for a missing entry. It names similar keys, or the members of a lazy stack that have it."""
        path = path_of(key)
        having = [position for position, member in enumerate(self._members() or ()) if member._has(path)]
        if having:
            return KeyError(
                f"key {key!r} is not in all members of the lazy stack, only in {having}: read it from these, as in "
                f"stack.tensordicts[{having[0]}][{key!r}]"
            )
        node: Any = self
        for i, name in enumerate(path[:-1]):
            inner = node._node(name)
            if inner is None:
                if name in node._entries:
                    return _make_below_tensor_error(path, i + 1)
                break
            node = inner
        return MissingKeyError(key, type(self).__name__, list(node._structure()), self._find_joined_key(key))

    def _find_joined_key(self, key: object) -> Path | None:
        """Return the nested key of an existing entry for a string such as `"a.b"` or `"a/b"`."""
        if isinstance(key, str):
            for separator in "./":
                path = tuple(key.split(separator))
                if len(path) > 1 and self._has(path):
                    return path
        return None


def _make_below_tensor_error(path: Path, count: int) -> KeyError:
    """Make the error for a nested key whose first `count` names lead to a tensor."""
    return KeyError(f"there is no entry {joined(path)!r}: {joined(path[:count])!r} is a tensor and holds no entries")


def choose_given(call: str, **arguments: object) -> Any:
    """Return the value of an argument that has several names. Exactly one of them must be given.

    Raises:
        TypeError: none of the names, or more than one, is given.
    """
    given = {name: value for name, value in arguments.items() if value is not NO_DEFAULT}
    if len(given) != 1:
        raise TypeError(f"{call}() takes one of the arguments {', '.join(arguments)}, got {', '.join(given) or 'none'}")
    return given.popitem()[1]
