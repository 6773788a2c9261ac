"""LazyCore: the primitives and walks of the contract for lazy stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tensordict.containers.lazy.members import Members, common_size
from tensordict.containers.tensordict_base import TensorDictBase
from tensordict.core import makers
from tensordict.core.contract import NOT_BACKED, Backing, Contract, Device, Names
from tensordict.core.exceptions import ShapeError
from tensordict.io.formats import pickled_containers

if TYPE_CHECKING:
    from typing_extensions import Self


class LazyCore(TensorDictBase):
    """The primitives and walks of a lazy stack.

    A walk that keeps the batch dims runs in every member, and the results form a lazy stack again. Other walks run on
    the dense stack and return a `TensorDict`.
    """

    _entries: Members
    # The cached batch size; `None` if the members have changed. A class attribute as default would slow down reading it
    # by a quarter.
    _size: torch.Size | None
    # True if `lock_` was called on the stack itself; see `_locked`.
    _sealed: bool = False
    # The backing that was set on the stack itself; see `_backing`.
    _own_backing: Backing = NOT_BACKED

    @classmethod
    def _over(cls, members: Members) -> Self:
        """Make a stack without checks. It keeps `members` itself, not a copy."""
        self = object.__new__(cls)
        self._entries = members
        self._size = None
        return self

    def _like(self, containers: list[Any], dim: int | None = None, template: object = None) -> Self:
        """Make a stack of other members, along `dim` or the same dim. Without members, `template` describes them."""
        store = self._entries
        dim = store.dim if dim is None else dim
        return self._over(Members(containers, dim, store.hook_in, store.hook_out, template, store.name))

    def _each(self, fn: Callable[[Any], Any], dim: int | None = None) -> Self:
        """Apply `fn` to every member, and stack the results."""
        return self._restack([fn(member) for member in self._entries.sample], dim)

    def _dense(self, hooked: bool = False) -> Any:
        """Return the stack as a `TensorDict` of stacked leaves. With `hooked`, call `hook_out` on each leaf."""
        store = self._entries
        read = store.__getitem__ if hooked else store.read
        entries: dict[str, Any] = {}
        for name in store.names():
            value = read(name)
            if isinstance(value, Contract) and not value._is_non_tensor:
                value = value._dense(hooked)
            entries[name] = value
        return makers.dense(entries, self._batch_size, self._device, self._names)

    def _build(self, entries: dict[str, Any], batch_size: torch.Size, device: Device, names: Names | None) -> Self:
        return makers.dense(entries, batch_size, device, names)  # type: ignore[no-any-return]

    # --- the state --------------------------------------------------------------------------------------------------

    @property
    def _batch_size(self) -> torch.Size:
        return self._size or self._read_size()

    @_batch_size.setter
    def _batch_size(self, size: torch.Size) -> None:
        inner = self._inner_size(size)
        with self._at_once():
            for member in self._entries.sample:
                member._batch_size = inner
        self._size = None

    def _read_size(self) -> torch.Size:
        """Read the batch size from the members. Dims with different sizes are -1."""
        store = self._entries
        size = list(common_size(store.sample))
        size.insert(store.dim, len(store.containers))
        self._size = torch.Size(size)
        return self._size

    def _inner_size(self, size: torch.Size) -> torch.Size:
        """Return the batch size of the members of a stack of batch size `size` with the same stack dim."""
        store = self._entries
        if len(size) <= store.dim or size[store.dim] != len(store.containers):
            raise ShapeError(
                f"a lazy stack of {len(store.containers)} members along dim {store.dim} cannot have the batch size "
                f"{list(size)}: make it dense first, with to_tensordict()"
            )
        return size[: store.dim] + size[store.dim + 1 :]

    @property
    def _device(self) -> torch.device | None:
        first, *rest = self._entries.sample
        device: torch.device | None = first._device
        if device is not None:
            for other in rest:
                if other._device != device:
                    return None
        return device

    @_device.setter
    def _device(self, device: torch.device | None) -> None:
        for member in self._entries.sample:
            member._device = device

    @property
    def _names(self) -> Names | None:
        first, *rest = self._entries.sample
        names: Names | None = first._names
        for other in rest:
            if other._names != names:
                names = _common_names([member.names for member in self._entries.sample])
                break
        if names is None:
            if self._entries.name is None:
                return None
            names = [None] * (len(self._batch_size) - 1)
        dim = self._entries.dim
        return [*names[:dim], self._entries.name, *names[dim:]]

    @_names.setter
    def _names(self, names: Names | None) -> None:
        dim = self._entries.dim
        inner = None if names is None else names[:dim] + names[dim + 1 :]
        self._entries.name = None if names is None else names[dim]
        for member in self._entries.sample:
            found = None if inner is None else [*inner, *member.names[len(inner) : len(member._batch_size)]]
            member._names = found if found is not None and any(found) else None

    # --- the lock ---------------------------------------------------------------------------------------------------
    # Locking a stack locks its members, as locking a container locks its nodes. A stack whose members are all locked
    # counts as locked, too. An example is `td["nested"]` of a locked stack, which is made when it is read.

    @property
    def _locked(self) -> bool:
        members = self._entries.containers
        for member in members:
            if not member._locked:
                return False
        return self._sealed or bool(members)

    @_locked.setter
    def _locked(self, locked: bool) -> None:
        self._sealed = locked

    # Likewise, a stack is memory-mapped or shared if all members are. A stack without members uses its own backing.

    @property
    def _backing(self) -> Backing:
        own = self._own_backing
        members = self._entries.containers
        if not members or (own is NOT_BACKED and members[0]._backing is NOT_BACKED):
            return own
        memmap, shared = (all(member._backing[at] for member in members) for at in range(2))
        return own._replace(is_memmap=memmap, is_shared=shared)

    @_backing.setter
    def _backing(self, backing: Backing) -> None:
        self._own_backing = backing

    # --- stacking ---------------------------------------------------------------------------------------------------

    def _restack(self, members: Sequence[Any], dim: int | None = None) -> Self:
        return self._like(list(members), dim) if self._entries.containers else self._like([], dim, members[0])

    # --- copies -----------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        result = self._restack([member.__deepcopy__(memo) for member in self._entries.sample])
        memo[id(self)] = result
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(pickled_containers.convert_state(type(self), state))
        self._own_backing = state.pop("_backing", NOT_BACKED)
        self.__dict__.update(state)
        if self._sealed:
            self._lock_tree()


def _common_names(columns: list[Names]) -> Names | None:
    """Return the names of the dims that have the same name in all members; `None` if there are none."""
    names = [column[0] if len(set(column)) == 1 else None for column in zip(*columns)]
    return names if any(name is not None for name in names) else None
