"""Locking: a locked tree refuses structural writes and allows in-place ones."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensordict.core.context import remember_state
from tensordict.core.contract import NOT_BACKED, Backing, Contract, is_flat, underlying
from tensordict.core.exceptions import LockedError
from tensordict.core.locks import Lock

if TYPE_CHECKING:
    from typing_extensions import Self


class Locking(Contract):
    """`lock_`, `unlock_` and what they promise about shared children.

    Every node knows its locked parents by weak reference, so a parent that is garbage-collected no longer keeps its
    children from being unlocked.
    """

    @property
    def is_locked(self) -> bool:
        """Whether structural writes are refused; assigning `True` or `False` locks or unlocks the tree."""
        return self._locked

    @is_locked.setter
    def is_locked(self, value: bool) -> None:
        if value:
            self.lock_()
        else:
            self.unlock_()

    def lock_(self) -> Self:
        """Lock this container and all nested ones; returns the same container.

        Entries can then no longer be added, replaced, renamed or deleted; in-place writes (`set_`, `update_`,
        `td[index] = ...`) stay possible. As a context manager, the lock lasts for the block.

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
        """
        was_locked = self._locked
        if not was_locked:
            self._lock_tree()
        return remember_state(self, _keep if was_locked else _unlock)

    def unlock_(self) -> Self:
        """Unlock this container and all nested ones; returns the same container.

        A nested container that another locked container holds too stays locked until that one lets go. Unlocking
        ends the memory-mapped or shared state of the container, since its entries may then be replaced.

        Raises:
            RuntimeError: when a locked parent holds this container, or a member of this lazy stack: unlock the parent
                instead.
        """
        if type(self._entries) is not dict:
            with _exclusive():
                held = not self._wrapped_container()._sealed and _has_held_members(self)
            if held:
                raise LockedError(
                    "the members of this lazy stack are held by a locked container and cannot be unlocked alone; "
                    "call unlock_() on the outermost container"
                )
        was_locked = self._locked
        if was_locked:
            if _locked_owners(underlying(self) if self._is_over_another else self):
                raise LockedError(
                    "Cannot unlock a tensordict that is part of a locked graph: this container is nested in a locked "
                    "one. Call unlock_() on the outermost container"
                )
            self._unlock_tree()
            if self._backing is not NOT_BACKED and self._consolidated is not None:
                self._consolidated = None
        return remember_state(self, _lock if was_locked else _keep)

    def _lock_tree(self, owner: weakref.ref[Any] | None = None) -> None:
        """Lock this container and all nested ones; `owner` is the locked one that it is an entry of."""
        # A wrapper or a view may be gone before the container that it is over.
        node = underlying(self) if self._is_over_another else self
        entries = node._entries
        if owner is None and type(entries) is dict and is_flat(entries):
            node._locked = True
            return
        with _exclusive():
            _lock_node(node, owner)

    def _unlock_tree(self) -> None:
        node = underlying(self) if self._is_over_another else self
        backing = node._backing
        if backing is not NOT_BACKED and (backing.is_memmap or backing.is_shared or backing.memmap_prefix is not None):
            node._backing = Backing(consolidated=backing.consolidated)
        entries = node._entries
        if type(entries) is dict and is_flat(entries):
            node._locked = False
            return
        with _exclusive():
            node._locked = False
            for value in entries.values() if type(entries) is dict else node._children():
                if type(value) is not Tensor and isinstance(value, Locking):
                    child: Any = underlying(value) if value._is_over_another else value
                    if owners := child._lock_owners:
                        # Nearly always this container alone.
                        alone = len(owners) == 1 and owners[0]() is node
                        child._lock_owners = owners = None if alone else _locked_owners(child, node) or None
                    if not owners and child._locked:
                        value._unlock_tree()

    def _refuse_if_locked(self, what: str) -> None:
        if self._locked:
            raise_locked(what)


# Threads may lock and unlock containers that hold the same one: whether it is locked, who holds it and what is in it
# change together.
_changing = Lock()


def _exclusive() -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if torch.compiler.is_dynamo_compiling() else _changing.held


def _lock_node(node: Contract, owner: weakref.ref[Any] | None) -> None:
    if owner is not None:
        # The dead are left out, or a child that outlives many parents would remember them all.
        node._lock_owners = [*_locked_owners(node), owner] if node._lock_owners else [owner]
        if node._locked:
            return
    node._locked = True
    own = None
    entries = node._entries
    for value in entries.values() if type(entries) is dict else node._children():
        if type(value) is not Tensor and isinstance(value, Locking):
            if own is None:
                own = weakref.ref(node)
            _lock_node(underlying(value) if value._is_over_another else value, own)


def adopt(parent: Contract, child: Any) -> None:
    """Lock what takes the place of an entry of a locked container, as its in-place writes may have to."""
    if parent._locked:
        child._lock_tree(weakref.ref(underlying(parent)))


def raise_locked(what: str) -> None:
    """Raise the error of a structural write to a locked container."""
    raise LockedError(
        f"Cannot modify locked TensorDict: cannot {what}. Write in place (set_, update_, td[index] = ...) "
        "or unlock it first (with td.unlock_(): ...)"
    )


def _locked_owners(node: Contract, but: object = None) -> list[weakref.ref[Any]]:
    """The parents that are alive and locked, `but` left out."""
    owners = []
    for ref in node._lock_owners or ():
        owner = ref()
        if owner is not None and owner is not but and owner._locked:
            owners.append(ref)
    return owners


def _has_held_members(container: Contract) -> bool:
    """Whether a locked container holds a member of this lazy stack, or of one of its members."""
    members = container._members(or_template=True) or ()
    return any(_locked_owners(underlying(member)) or _has_held_members(member) for member in members)


def _lock(container: Any) -> None:
    container.lock_()


def _unlock(container: Any) -> None:
    container.unlock_()


def _keep(container: Contract) -> None:
    """The undoing of an operation that changed nothing."""
