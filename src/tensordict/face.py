"""Face: another form of a container, which holds nothing itself and has everything done by the container behind it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.collection import TensorCollection
from tensordict.contract import Contract, LeafFn, Names, Rename
from tensordict.io import pickled
from tensordict.lazy import LazyStackedTensorDict
from tensordict.legacy import LazyView
from tensordict.persistent import PersistentTensorDict
from tensordict.tensordict import TensorDict

if TYPE_CHECKING:
    from typing_extensions import Self


def _state(name: str, read: Callable[[Any], Any]) -> Any:
    """An attribute of the contract that is that of the wrapped container.

    `read` is written out for each: `operator.attrgetter` would take 50 ns instead of 63, but `torch.compile` cannot
    trace it.
    """

    def write(self: Any, value: Any) -> None:
        setattr(self._tensordict, name, value)

    def delete(self: Any) -> None:
        delattr(self._tensordict, name)

    return property(read, write, delete)


class Face(TensorCollection):
    """A container over another one, `_tensordict`, that gives its results its own class.

    The state of the contract is that of the wrapped container, its walks are done by it, and what they give gets this
    face again. All operations come from :class:`~tensordict.collection.TensorCollection` and go through these; those
    that a kind of container does in its own way are handed to it, see `_hand_on`.
    """

    _tensordict: Any

    if not TYPE_CHECKING:
        _entries = _state("_entries", lambda self: self._tensordict._entries)
        _batch_size = _state("_batch_size", lambda self: self._tensordict._batch_size)
        _device = _state("_device", lambda self: self._tensordict._device)
        _names = _state("_names", lambda self: self._tensordict._names)
        _locked = _state("_locked", lambda self: self._tensordict._locked)
        _lock_owners = _state("_lock_owners", lambda self: self._tensordict._lock_owners)
        _is_memmap = _state("_is_memmap", lambda self: self._tensordict._is_memmap)
        _is_shared = _state("_is_shared", lambda self: self._tensordict._is_shared)
        _consolidated = _state("_consolidated", lambda self: self._tensordict._consolidated)
        _memmap_prefix = _state("_memmap_prefix", lambda self: self._tensordict._memmap_prefix)
        _undo = _state("_undo", lambda self: self._tensordict._undo)
        _blocks = _state("_blocks", lambda self: self._tensordict._blocks)

    # --- containers with this face ----------------------------------------------------------------------------------

    @classmethod
    def _over(cls, container: Any) -> Self:
        """The trusted constructor: this face over `container`, which is not checked."""
        self = object.__new__(cls)
        object.__setattr__(self, "_tensordict", container)
        return self

    def _bare(self) -> Any:
        return self._tensordict

    def _faced(self, result: Any) -> Any:
        if result is self._tensordict:
            return self
        if isinstance(result, Contract):
            return self._over(result)
        if type(result) in (list, tuple) and result and isinstance(result[0], Contract):
            return type(result)(map(self._faced, result))
        return result

    @classmethod
    def _make(
        cls, entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None, names: Names | None
    ) -> Self:
        return cls._over(TensorDict._make(entries, batch_size, device, names))

    def _build(
        self, entries: dict[str, Any], batch_size: torch.Size, device: torch.device | None, names: Names | None
    ) -> Self:
        return self._over(self._tensordict._build(entries, batch_size, device, names))

    def _given_out(self, stack: Any) -> Any:
        members = stack._entries
        if any(type(member) is not type(self) for member in members.sample):
            return stack
        members.containers = [member._tensordict for member in members.containers]
        if members.template is not None:
            members.template = members.template._tensordict
        return self._over(stack)

    def _dense(self) -> Any:
        return self._faced(self._tensordict._dense())

    def _lazy(self, size: torch.Size, forward: tuple[Any, ...], backward: tuple[Any, ...]) -> Self:
        return self._over(self._tensordict._lazy(size, forward, backward))

    # --- what there is ----------------------------------------------------------------------------------------------

    def _outline(self) -> Mapping[str, Any]:
        return self._tensordict._outline()  # type: ignore[no-any-return]

    def _shape_of(self, name: str) -> torch.Size:
        return self._tensordict._shape_of(name)  # type: ignore[no-any-return]

    def _node(self, name: str) -> Any:
        return self._tensordict._node(name)

    def _members(self) -> Sequence[Any] | None:
        return self._tensordict._members()  # type: ignore[no-any-return]

    def _gather(self, found: list[Any]) -> None:
        self._tensordict._gather(found)

    def _walk(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
        return self._tensordict._walk(prefix)  # type: ignore[no-any-return]

    def _leaves_of(self, name: str) -> list[Any]:
        return self._tensordict._leaves_of(name)  # type: ignore[no-any-return]

    # --- the walks --------------------------------------------------------------------------------------------------

    def _map(
        self,
        fn: LeafFn,
        size: torch.Size | None = None,
        lead: int = 0,
        rename: Rename | None = None,
        whole: LeafFn | None = None,
    ) -> Self:
        return self._over(self._tensordict._map(fn, size, lead, rename, whole))

    def _rebuilt(self, leaves: Iterator[Any]) -> Self:
        return self._over(self._tensordict._rebuilt(leaves))

    def _map_many(
        self,
        fn: Callable[[Any], Sequence[Any]],
        sizes: Sequence[torch.Size],
        lead: int,
        rename: Rename | None,
        whole: Callable[[Any], Sequence[Any]] | None = None,
    ) -> list[Self]:
        return list(map(self._over, self._tensordict._map_many(fn, sizes, lead, rename, whole)))

    def _map_with(self, fn: Callable[[Any, Tensor], Any], tensor: Tensor) -> Self:
        return self._over(self._tensordict._map_with(fn, tensor))

    def _merge(
        self,
        others: Sequence[Contract],
        fn: Callable[[list[Any]], Any],
        size: torch.Size,
        lead: int,
        rename: Rename | None,
        path: tuple[str, ...] = (),
        whole: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Self:
        if path and whole is not None and any(type(other) is not type(self) for other in others):
            # As one by one: joining looks at which classes belong together.
            return whole(others)  # type: ignore[no-any-return]
        return self._over(self._tensordict._merge(list(map(bare, others)), fn, size, lead, rename, path, whole))

    def _paired(self, other: Contract) -> Sequence[tuple[Any, Any]] | None:
        return self._tensordict._paired(bare(other))  # type: ignore[no-any-return]

    def _rejoined(self, parts: Sequence[Any]) -> Self:
        return self._over(self._tensordict._rejoined(list(map(bare, parts))))

    def _stacked_with(self, items: Sequence[Any], dim: int) -> Any:
        return self._faced(self._tensordict._stacked_with(list(map(bare, items)), dim))

    def _concatenated_with(self, items: Sequence[Any], dim: int) -> Any:
        return self._faced(self._tensordict._concatenated_with(list(map(bare, items)), dim))

    def _index(self, index: Any) -> Any:
        return self._faced(self._tensordict._index(index))

    # --- the lock is that of the wrapped container, which outlives its faces ------------------------------------------

    def _lock_tree(self) -> None:
        self._tensordict._lock_tree()

    def _unlock_tree(self) -> None:
        self._tensordict._unlock_tree()

    # --- copies -----------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(pickled.as_ours(type(self), state))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = memo[id(self)] = self._over(copy.deepcopy(self._tensordict, memo))
        return result


def bare(value: Any) -> Any:
    """The container behind the face of a tensorclass; any other value itself."""
    return value._bare() if isinstance(value, Contract) else value


def _hand_on(storage: type[Any]) -> None:
    """Have faces hand what a kind of container does in its own way to that container."""
    for parent in storage.__mro__:
        if issubclass(Face, parent):
            continue
        for name, function in vars(parent).items():
            shared = getattr(TensorCollection, name, None)
            if isinstance(function, FunctionType) and isinstance(shared, FunctionType) and name not in vars(Face):
                setattr(Face, name, _handed_on(name, shared))


def _handed_on(name: str, shared: FunctionType) -> Any:
    """The method `name`: that of the wrapped container when it has one of its own, else `shared`, which all share."""

    @wraps(shared)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        container = self._tensordict
        if getattr(type(container), name) is shared:
            return shared(self, *args, **kwargs)
        return self._faced(getattr(container, name)(*map(bare, args), **kwargs))

    return method


for _storage in (LazyStackedTensorDict, LazyView, PersistentTensorDict):
    _hand_on(_storage)
