"""Locking: a locked tree refuses structural writes, and allows in-place writes."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core.context import remember_state
from tensordict.core.contract import NOT_BACKED, Backing, Contract, is_flat, underlying
from tensordict.core.exceptions import LockedError
from tensordict.core.locks import Lock

if TYPE_CHECKING:
    SelfT = TypeVar("SelfT", bound="Locking")


class Locking(Contract):
    """The methods `lock_`, `unlock_` and `is_locked`.

    A node stays locked as long as one of its parents is locked. So every node keeps weak references to its locked
    parents; a parent that was garbage-collected does not count.
    """

    @property
    def is_locked(self) -> bool:
        """True if structural writes are refused. Assigning `True` or `False` locks or unlocks the tree."""
        return self._locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self: SelfT) -> SelfT:
        """Lock this container and all nested ones; returns the same container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3)).lock_()
            >>> td.set_("a", torch.ones(3))["a"]
            tensor([1., 1., 1.])
            >>> with td.unlock_():
            ...     td["b"] = torch.zeros(1)
            >>> td.is_locked
            True

        A locked container refuses to add, replace, rename or delete entries. In-place writes (`set_`, `update_`,
        `td[index] = ...`) are allowed. As a context manager, the lock lasts for the block.
        """
        was_locked = self._locked
        if not was_locked:
            self._lock_tree()
        return remember_state(self, do_nothing if was_locked else _unlock)

    def unlock_(self: SelfT) -> SelfT:
        """Unlock this container and all nested ones; returns the same container.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3)).lock_()
            >>> td.unlock_().is_locked
            False

        A nested container that is also an entry of another locked container stays locked until that one is unlocked.
        After unlocking, `is_memmap()` and `is_shared()` are false, because the entries may be replaced.

        Raises:
            RuntimeError: this container, or a member of this lazy stack, is an entry of a locked container. Unlock that
                one instead.
        """
        if not isinstance(self._entries, dict):
            with _hold_lock_state():
                held = not self._wrapped_container()._sealed and _has_held_members(self)
            if held:
                raise LockedError(
                    "a member of this lazy stack is an entry of a locked container and cannot be unlocked alone; "
                    "call unlock_() on the outermost container"
                )
        was_locked = self._locked
        if was_locked:
            if _find_locked_owners(underlying(self) if self._is_over_another else self):
                raise LockedError(
                    "Cannot unlock a tensordict that is part of a locked graph: this container is nested in a locked "
                    "one. Call unlock_() on the outermost container"
                )
            self._unlock_tree()
            if self._backing is not NOT_BACKED and self._consolidated is not None:
                self._consolidated = None
        return remember_state(self, _lock if was_locked else do_nothing)

    def _lock_tree(self, owner: weakref.ref[Any] | None = None) -> None:
        """Lock this container and all nested ones. `owner` is the locked container that has it as an entry."""
        # Lock the container that holds the entries: a wrapper or a view of it may be garbage-collected before it.
        node = underlying(self) if self._is_over_another else self
        entries = node._entries
        if owner is None and isinstance(entries, dict) and is_flat(entries):
            node._locked = True
            return
        with _hold_lock_state():
            _lock_node(node, owner)

    def _unlock_tree(self) -> None:
        node = underlying(self) if self._is_over_another else self
        backing = node._backing
        if backing is not NOT_BACKED and (backing.is_memmap or backing.is_shared or backing.memmap_prefix is not None):
            node._backing = Backing(consolidated=backing.consolidated)
        entries = node._entries
        if isinstance(entries, dict) and is_flat(entries):
            node._locked = False
            return
        with _hold_lock_state():
            node._locked = False
            for value in entries.values() if isinstance(entries, dict) else node._children():
                if type(value) is not Tensor and isinstance(value, Locking):
                    child: Any = underlying(value) if value._is_over_another else value
                    if owners := child._lock_owners:
                        # In nearly all cases this container is the only locked parent.
                        only = len(owners) == 1 and owners[0]() is node
                        child._lock_owners = owners = None if only else _find_locked_owners(child, node) or None
                    if not owners and child._locked:
                        value._unlock_tree()

    def _refuse_if_locked(self, what: str) -> None:
        if self._locked:
            raise_locked(what)


# Held while the lock state of a tree changes. Two threads may lock and unlock two parents of the same container.
_lock_state = Lock()


def _hold_lock_state() -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else _lock_state.held


def _lock_node(node: Contract, owner: weakref.ref[Any] | None) -> None:
    if owner is not None:
        # Drop references to dead parents, which would pile up in a child that outlives many parents.
        node._lock_owners = [*_find_locked_owners(node), owner] if node._lock_owners else [owner]
        if node._locked:
            return
    node._locked = True
    own = None
    entries = node._entries
    for value in entries.values() if isinstance(entries, dict) else node._children():
        if type(value) is not Tensor and isinstance(value, Locking):
            if own is None:
                own = weakref.ref(node)
            _lock_node(underlying(value) if value._is_over_another else value, own)


def lock_like(parent: Contract, child: Any) -> None:
    """Lock a new entry of `parent` if `parent` is locked: an in-place write may replace the holder of a value."""
    if parent._locked:
        child._lock_tree(weakref.ref(underlying(parent)))


def raise_locked(what: str) -> None:
    """Raise the error for a structural write to a locked container."""
    raise LockedError(
        f"Cannot modify locked TensorDict: cannot {what}. Write in place (set_, update_, td[index] = ...) "
        "or unlock it first (with td.unlock_(): ...)"
    )


def _find_locked_owners(node: Contract, but: object = None) -> list[weakref.ref[Any]]:
    """Return the locked parents of a node that still exist, except `but`."""
    owners = []
    for ref in node._lock_owners or ():
        owner = ref()
        if owner is not None and owner is not but and owner._locked:
            owners.append(ref)
    return owners


def _has_held_members(container: Contract) -> bool:
    """Return whether a member of this lazy stack, at any depth, has a locked parent."""
    members = container._members(or_template=True) or ()
    return any(_find_locked_owners(underlying(member)) or _has_held_members(member) for member in members)


def _lock(container: Any) -> None:
    container.lock_()


def _unlock(container: Any) -> None:
    container.unlock_()


def do_nothing(container: Contract) -> None:
    """Undo an operation that changed nothing."""
