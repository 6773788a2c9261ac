"""The live views that `keys()`, `values()` and `items()` return, nested or not."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, MappingView, ValuesView
from typing import Any

from torch import Tensor

from tensordict.core.contract import Contract, is_flat
from tensordict.core.keys import Key, Path, path_of

IsLeaf = Callable[[type], bool]
# A key, and the pair of a key and its entry.
FlatKey = str | Path
Pair = tuple[FlatKey, Any]


def is_tensor_collection(datatype: object) -> bool:
    """Return whether an object or a class is a container of this package. An `UnbatchedTensor` is a tensor.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, is_tensor_collection
        >>> is_tensor_collection(TensorDict), is_tensor_collection(TensorDict()), is_tensor_collection(torch.zeros(1))
        (True, True, False)
    """
    cls = datatype if isinstance(datatype, type) else type(datatype)
    return issubclass(cls, Contract) and not issubclass(cls, Tensor)


def default_is_leaf(cls: type) -> bool:
    """Return whether a class counts as a leaf by default: any class that is not a container.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, default_is_leaf
        >>> default_is_leaf(torch.Tensor), default_is_leaf(TensorDict)
        (True, False)
    """
    return not issubclass(cls, Contract) or issubclass(cls, Tensor)


def is_leaf_nontensor(cls: type) -> bool:
    """Return whether a class counts as a leaf if non-tensor values do, too.

    Like :func:`default_is_leaf`, but a container of a single non-tensor value is also a leaf.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, is_leaf_nontensor
        >>> is_leaf_nontensor(torch.Tensor), is_leaf_nontensor(TensorDict)
        (True, False)
    """
    return not issubclass(cls, Contract) or issubclass(cls, Tensor) or cls._is_non_tensor


def is_non_tensor(data: object = None, *, obj: object = None) -> bool:
    """Return whether an object holds a non-tensor value: a `NonTensorData`, a `NonTensorStack` or a `MetaData`.

    Example:
        >>> from tensordict import NonTensorData, is_non_tensor
        >>> is_non_tensor(NonTensorData("a")), is_non_tensor("a")
        (True, False)

    Args:
        data: the object.
        obj: another name of `data`.
    """
    value = data if obj is None else obj
    return isinstance(value, Contract) and value._is_non_tensor


class MembersApart:
    """An `is_leaf` that also makes the values and items of a lazy stack come from its members, under "0", "1", ...

    It is meant for stacks whose members have different keys or shapes. `keys()` still returns the keys that all members
    share. `named_apply` and `flatten_keys` use the names of the items.
    """

    def __init__(self, name: str, is_leaf: IsLeaf) -> None:
        self._name = name
        self._is_leaf = is_leaf

    def __call__(self, cls: type) -> bool:
        return self._is_leaf(cls)

    def __reduce__(self) -> str:
        # Unpickle to the same object, because programs compare it with `is`.
        return self._name


NESTED_TENSORS_AS_LISTS = MembersApart("NESTED_TENSORS_AS_LISTS", default_is_leaf)
NESTED_TENSORS_AS_LISTS_NONTENSOR = MembersApart("NESTED_TENSORS_AS_LISTS_NONTENSOR", is_leaf_nontensor)


class _View(MappingView):
    """The base of the three views: the container, and the choice of its entries."""

    __slots__ = ("_is_leaf", "_leaves_only", "_nested", "_sort", "_source")

    def __init__(self, source: Contract, nested: bool, leaves_only: bool, is_leaf: IsLeaf | None, sort: bool) -> None:
        self._source = source
        self._nested = nested
        self._leaves_only = leaves_only
        self._is_leaf = is_leaf
        self._sort = sort

    def __len__(self) -> int:
        # `list(view)` asks for the length, so it must not collect the entries to count them.
        if self._nested and self._is_leaf is None:
            return _count(self._source, self._leaves_only)
        return self._count_until()

    def _count_until(self) -> int:
        return len(self._pairs() if type(self._is_leaf) is MembersApart else self._keys())

    def _flat(self) -> dict[str, Any] | None:
        """Return the dict of entries if the view shows exactly these, else `None`."""
        mapping = self._source._entries
        if self._is_leaf is None and not self._sort and isinstance(mapping, dict) and is_flat(mapping):
            return mapping
        return None

    def _keys(self) -> list[FlatKey]:
        """Return the keys, without reading an entry."""
        keys: list[FlatKey] = []
        if self._nested and self._is_leaf is None:
            _collect_keys(self._source, (), self._leaves_only, keys)
        else:
            is_leaf = self._is_leaf or default_is_leaf
            _collect_keys_until(self._source, (), self._nested, self._leaves_only, is_leaf, keys)
        if self._sort:
            keys.sort(key=_join_with_dots)
        return keys

    def _pairs(self) -> list[Pair]:
        pairs: list[Pair] = []
        if self._nested and self._is_leaf is None:
            _collect(self._source, (), self._leaves_only, pairs)
        else:
            is_leaf = self._is_leaf or default_is_leaf
            _collect_until(self._source, (), self._nested, self._leaves_only, is_leaf, pairs)
        if self._sort:
            pairs.sort(key=lambda pair: _join_with_dots(pair[0]))
        return pairs

    def __repr__(self) -> str:
        return f"{type(self).__name__.removeprefix('_')}({list(self)!r})"  # type: ignore[call-overload]


class _Keys(_View, KeysView[Any]):
    """The view `td.keys(...)`, with set operations, `in` and `len`."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Key]:
        flat = self._flat()
        return iter(self._keys() if flat is None else list(flat))

    def _count_until(self) -> int:
        return len(self._keys())

    def __contains__(self, key: object) -> bool:
        path = path_of(key)
        if len(path) > 1 and not self._nested:
            raise TypeError(f"to look for the nested key {key!r}, use a view made with keys(include_nested=True)")
        value: Any = self._source
        is_leaf = self._is_leaf
        for i, name in enumerate(path):
            if not isinstance(value, Contract) or (i and is_leaf is not None and is_leaf(type(value))):
                return False
            mapping: Mapping[str, Any] = value._entries
            if not isinstance(mapping, dict):
                mapping = value._structure()
            if name not in mapping:
                return False
            value = mapping[name]
        return not self._leaves_only or (is_leaf or default_is_leaf)(type(value))

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> set[Any]:
        return set(it)


class _Values(_View, ValuesView[Any]):
    """The view `td.values(...)`."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        flat = self._flat()
        if flat is not None:
            return iter(list(flat.values()))
        if not self._nested or self._is_leaf is not None or self._sort:
            return iter([value for _, value in self._pairs()])
        values: list[Any] = []
        _collect_values(self._source, self._leaves_only, values)
        return iter(values)

    def __contains__(self, value: object) -> bool:
        return any(other is value for other in self)


class _Items(_View, ItemsView[Any, Any]):
    """The view `td.items(...)`."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Pair]:
        flat = self._flat()
        return iter(self._pairs() if flat is None else list(flat.items()))

    def __contains__(self, item: object) -> bool:
        if not (isinstance(item, tuple) and len(item) == 2):
            return False
        return any(key == item[0] and value is item[1] for key, value in self)

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> set[Any]:
        return set(it)


def _join_with_dots(key: str | tuple[str, ...]) -> str:
    return key if type(key) is str else ".".join(key)


# Three walks in the same order, children before their parent, which collect different things. The test for a node is
# written out in each: calling `is_node` takes 70 ns, and the rest of the work for an entry 30.


def _collect_keys(node: Contract, prefix: Path, leaves_only: bool, out: list[FlatKey]) -> None:
    mapping: Mapping[str, Any] = node._entries
    if not isinstance(mapping, dict):
        mapping = node._structure()
    for name, value in mapping.items():
        path = prefix + (name,)  # noqa: RUF005 (30 instead of 41 ns)
        if type(value) is not Tensor and isinstance(value, Contract) and not value._is_tensor:
            _collect_keys(value, path, leaves_only, out)
            if leaves_only:
                continue
        out.append(path if prefix else name)


def _collect_values(node: Contract, leaves_only: bool, out: list[Any]) -> None:
    for value in node._entries.values():
        if type(value) is not Tensor and isinstance(value, Contract) and not value._is_tensor:
            _collect_values(value, leaves_only, out)
            if leaves_only:
                continue
        out.append(value)


def _collect(node: Contract, prefix: Path, leaves_only: bool, out: list[Pair]) -> None:
    for name, value in node._entries.items():
        path = prefix + (name,)  # noqa: RUF005 (30 instead of 41 ns)
        if type(value) is not Tensor and isinstance(value, Contract) and not value._is_tensor:
            _collect(value, path, leaves_only, out)
            if leaves_only:
                continue
        out.append((path if prefix else name, value))


def _count(node: Contract, leaves_only: bool) -> int:
    mapping: Mapping[str, Any] = node._entries
    if not isinstance(mapping, dict):
        mapping = node._structure()
    count = len(mapping)
    for value in mapping.values():
        if type(value) is not Tensor and isinstance(value, Contract) and not value._is_tensor:
            count += _count(value, leaves_only) - leaves_only
    return count


def _all_leaves(node: Contract) -> list[Pair]:
    """Return the (key, value) pairs of all leaves, and of all entries that hold non-tensor values."""
    out: list[Pair] = []
    mapping = node._entries
    if is_flat(mapping):
        out.extend(mapping.items())
    else:
        _collect_until(node, (), True, True, is_leaf_nontensor, out)
    return out


def _collect_until(
    node: Contract,
    prefix: tuple[str, ...],
    nested: bool,
    leaves_only: bool,
    is_leaf: IsLeaf,
    out: list[Pair],
) -> None:
    """Like `_collect`, with the caller's `is_leaf`: leaves are not entered."""
    if type(is_leaf) is MembersApart and (members := node._members()) is not None:
        for position, member in enumerate(members):
            _collect_until(member, (*prefix, str(position)), nested, leaves_only, is_leaf, out)
        return
    by_default = is_leaf is is_leaf_nontensor
    for name, value in node._entries.items():
        key = (*prefix, name) if prefix else name
        leaf = (by_default and type(value) is Tensor) or is_leaf(type(value))
        if nested and not leaf and isinstance(value, Contract):
            _collect_until(value, (*prefix, name), nested, leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append((key, value))


def _collect_keys_until(
    node: Contract, prefix: tuple[str, ...], nested: bool, leaves_only: bool, is_leaf: IsLeaf, out: list[FlatKey]
) -> None:
    """Like `_collect_keys`, with the caller's `is_leaf`."""
    for name, value in node._structure().items():
        leaf = is_leaf(type(value))
        if nested and not leaf and isinstance(value, Contract):
            _collect_keys_until(value, (*prefix, name), nested, leaves_only, is_leaf, out)
        if leaf or not leaves_only:
            out.append((*prefix, name) if prefix else name)
