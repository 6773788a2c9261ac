"""Reading entries: by key, by key and index, and as views of keys, values and items."""

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
from tensordict.memory.stored_tensors import StoredTensor, in_memory
from tensordict.ops.dims import ragged_stacks

No = Literal[False]


class _NoDefault(enum.Enum):
    """The type of the markers for 'no default was given'; an enumeration, which compiled code can pass on."""

    NO_DEFAULT = enum.auto()
    AS_SET = enum.auto()
    ABSENT = enum.auto()

    def __repr__(self) -> str:
        return "<no default>"


# What is missing is an error. Programs pass it to `get`, too.
NO_DEFAULT: Any = _NoDefault.NO_DEFAULT
# What is missing is what `set_get_defaults_to_none` says.
AS_SET: Any = _NoDefault.AS_SET
# What is missing is to be told apart from what is there.
_ABSENT: Any = _NoDefault.ABSENT


class Reading(Contract):
    """`get` and its kin, and the live views."""

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
        """A live view of the keys.

        Args:
            include_nested: show the entries of nested containers too, as tuples; children come before their parent.
            leaves_only: leave out nested containers themselves.
            is_leaf: takes a class and says whether its instances count as leaves (and are not entered).
            sort: order the keys by their dotted form instead of by insertion.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": torch.zeros(2), "b": {"c": torch.zeros(2)}})
            >>> list(td.keys(include_nested=True))
            ['a', ('b', 'c'), 'b']
            >>> ("b", "c") in td.keys(True)
            True
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
        """A live view of the values; arguments and order as in :meth:`keys`."""
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
        """A live view of the (key, value) pairs; arguments and order as in :meth:`keys`."""
        if include_nested or leaves_only or sort or is_leaf:
            return _Items(self, include_nested, leaves_only, is_leaf, sort)
        return self._entries.items()

    @property
    def sorted_keys(self) -> list[str]:
        """The keys of this level in alphabetical order."""
        return sorted(self._entries)

    @property
    def depth(self) -> int:
        """How many containers are nested in one another below this one; 0 when all entries are tensors."""
        deepest = -1
        for value in self._structure().values():
            if isinstance(value, Reading) and not value._is_non_tensor:
                deepest = max(deepest, value.depth)
        return deepest + 1

    def is_empty(self) -> bool:
        """Whether no leaf is found anywhere in the tree."""
        entries: Mapping[str, Any] = self._entries
        if type(entries) is not dict:
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
        """The class of the entry at a nested key; raises `KeyError` when there is none."""
        node, name = self._holder(path_of(key))
        return type(node._structure()[name])

    def get_item_shape(self, key: object) -> torch.Size:
        """The shape of the entry at a nested key; raises `KeyError` when there is none."""
        node, name = self._holder(path_of(key))
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
        """The entry at a nested key.

        Args:
            key: a string or a tuple of strings.
            default: returned when there is no such entry; `tensordict.base.NO_DEFAULT` makes that a `KeyError`. Without
                a default, a missing entry gives `None`, or a `KeyError` after
                :func:`~tensordict.set_get_defaults_to_none` was called with `False`.
            as_list: of a lazy stack, give the list of the members' leaves, which are not copied; lists of lists for
                stacks of stacks. Nested containers are given as lazy stacks whatever the form; entries of other
                containers are given as they are.
            as_padded_tensor: of a lazy stack, give one tensor, the leaves being filled up to the largest size in every
                dim.
            as_nested_tensor: of a lazy stack, give a nested tensor, over dim 0.
            padding_side: `"right"` to fill up behind the elements, `"left"` before them.
            layout: that of the nested tensor: `torch.jagged` (the default) or `torch.strided`.
            padding_value: what to fill up with.
            return_mask: with `as_padded_tensor`, give a pair: the tensor, and a bool tensor of its shape that is `True`
                where it holds elements of the members.

        Returns:
            the stored tensor or container itself, not a copy; for a value that is no tensor its holder. Of a lazy
            stack, the stack of the members' leaves, or a lazy stack of their nested containers.

        Raises:
            RuntimeError: the leaves of a lazy stack cannot be put in this form; their key and shapes are named.
            ValueError: more than one form is asked for of a lazy stack, or a mask without padding.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": {"b": torch.arange(3)}})
            >>> td.get(("a", "b"))
            tensor([0, 1, 2])
            >>> td.get("missing", "nothing")
            'nothing'
            >>> from tensordict import lazy_stack
            >>> stack = lazy_stack([TensorDict(a=torch.ones(n)) for n in (1, 2)])
            >>> stack.get("a", as_list=True)
            [tensor([1.]), tensor([1., 1.])]
            >>> stack.get("a", as_padded_tensor=True, padding_side="left", padding_value=-1)
            tensor([[-1.,  1.],
                    [ 1.,  1.]])
            >>> stack.get("a", as_nested_tensor=True).offsets()
            tensor([0, 1, 3])
        """
        if as_list or as_padded_tensor or as_nested_tensor or return_mask:
            path = path_of(key)
            holder = self._uneven_holder(path)
            if holder is not None or self._members() is not None:
                ragged_stacks.check_form(as_list, as_padded_tensor, as_nested_tensor, return_mask)
            if holder is not None and as_list:
                return ragged_stacks.read_column(holder, path[-1])
            if holder is not None and as_nested_tensor:
                return ragged_stacks.read_nested_tensor(holder, path, layout or torch.jagged)
            if holder is not None:
                return ragged_stacks.read_padded_tensor(holder, path, padding_side, padding_value, return_mask)
        # `dict.get` would cost every read that finds something 10 of 90 ns.
        try:
            if type(key) is str:
                return self._entries[key]
            return self._find(key)
        except KeyError:  # guarded: a dict is asked here, other entries and `_find` have asked
            if type(self._entries) is dict and key in self._entries:
                raise
            if default is AS_SET and settings._get_defaults_to_none:
                return None
            if default is AS_SET or default is NO_DEFAULT:
                raise self._missing(key) from None
            return default

    def _uneven_holder(self, path: Path) -> Any:
        """The lazy stack that has the leaf at `path`, whose members may have it in different shapes; `None` without."""
        node: Any = self
        for name in path[:-1]:
            node = None if node is None else node._node(name)
        if node is None or node._members() is None or path[-1] not in node._entries or node._node(path[-1]) is not None:
            return None
        return node._wrapped_container()

    def get_at(self, key: object, index: object, default: object = AS_SET) -> Any:
        """A part of the entry at a nested key: `td.get(key)[index]`.

        A view or a copy, as torch's indexing gives it. A missing key is treated as in :meth:`get`; the default is not
        indexed.

        Args:
            key: a string or a tuple of strings.
            index: applied to a tensor, whose dims behind the batch it may reach; to the batch of a nested container and
                of a value that is no tensor.
            default: as in :meth:`get`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict({"a": torch.arange(6).view(3, 2)}, [3]).get_at("a", (..., 0))
            tensor([0, 2, 4])
        """
        if type(self._entries) is not dict and self._wrapped_container()._is_in_file:
            stored = self._unread_at(path_of(key))
            if type(stored) is StoredTensor:
                # Only that part is read.
                return in_memory(stored[leaf_index(index, stored.shape)])
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            return self.get(key, default)
        if isinstance(value, Tensor):
            at = leaf_index(index, ragged.shape_of(value))
            if value.is_nested:
                return ragged.Index(at)(value)
            return value._over(value[at], self._batch_size) if isinstance(value, Contract) else value[at]  # type: ignore[attr-defined]
        return value[index] if isinstance(value, Contract) else value  # type: ignore[index]

    def _unread_at(self, path: Path) -> Any:
        """The entry at `path`, a tensor in a file not being read; `None` when there is none."""
        if not self._has(path):
            return None
        node, name = self._holder(path)
        return node._writable()[name]

    def _find(self, key: object) -> Any:
        """The entry at a nested key; raises `KeyError` when a name on the way is missing or is a tensor."""
        node: Any = self
        if type(key) is tuple and key:
            try:
                for name in key:
                    node = node._entries[name]
                return node
            except (KeyError, AttributeError, TypeError):  # guarded: `_find_slowly` asks again
                # Not a flat key whose entries all exist: find out what it is, and what is missing.
                node = self
        return self._find_slowly(path_of(key))

    def _find_slowly(self, path: Path) -> Any:
        node: Any = self
        for i, name in enumerate(path):
            if not isinstance(node, Contract):
                raise _below_a_tensor(path, i)
            node = node._entries.get(name)
            if node is None:
                raise KeyError(name)
        return node

    def _has(self, path: Path) -> bool:
        """Whether there is an entry at `path`, which is not read."""
        node: Any = self
        for name in path[:-1]:
            node = node._node(name)
            if node is None:
                return False
        return path[-1] in node._entries

    def _has_anywhere(self, path: Path) -> bool:
        """Whether there is an entry at `path`: of a lazy stack, in any of its members."""
        if (members := self._members(or_template=True)) is not None:
            return any(member._has_anywhere(path) for member in members)
        return self._has(path)

    def _holder(self, path: Path) -> tuple[Any, str]:
        """The container that holds the entry at `path`, and its name there."""
        if not self._has(path):
            raise self._missing(joined(path))
        return (self if len(path) == 1 else self._find(path[:-1])), path[-1]

    def _missing(self, key: object) -> KeyError:
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
                    return _below_a_tensor(path, i + 1)
                break
            node = inner
        return MissingKeyError(key, type(self).__name__, list(node._structure()), self._spelt_out(key))

    def _spelt_out(self, key: object) -> Path | None:
        """The nested key that is there, for a string in which its names are joined."""
        if isinstance(key, str):
            for separator in "./":
                path = tuple(key.split(separator))
                if len(path) > 1 and self._has(path):
                    return path
        return None


def _below_a_tensor(path: Path, count: int) -> KeyError:
    """The error of a nested key whose first `count` names lead to a tensor."""
    return KeyError(f"there is no entry {joined(path)!r}: {joined(path[:count])!r} is a tensor and holds no entries")
