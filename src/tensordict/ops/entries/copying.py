"""`clone` and `copy` of containers, and their support for `copy.deepcopy`, `pickle` and `multiprocessing`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar

import torch
from torch import Tensor

from tensordict.core import foreach, ragged
from tensordict.core.contract import NOT_BACKED, Clones, Contract, EntryStore, is_flat
from tensordict.io.formats import pickled_containers, torch_files
from tensordict.io.specification import is_stored_as_class
from tensordict.memory import pickling
from tensordict.memory.flat_buffers import is_whole
from tensordict.ops.storing.leaves import Leaves
from tensordict.parallel import shared_memory

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Copying")

_REQUIRES_GRAD = attrgetter("requires_grad")
# Attributes that belong to one object in one process, and are not copied: the locked parents and the open blocks.
TRANSIENT = ("_lock_owners", "_undo", "_blocks")


class Copying(Leaves):
    """The methods `clone` and `copy`, and the protocols of the modules `copy` and `pickle`."""

    def clone(self: SelfT, recurse: bool = True, **kwargs: object) -> SelfT:
        """Copy the containers and the leaves.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(1))
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)

        Args:
            recurse: `False` copies only the containers and shares the leaves, as :meth:`copy` does.
            **kwargs: passed to `torch.Tensor.clone` (`memory_format`).

        Returns:
            a new container with the same batch size, device and names. It is not locked and not memory-mapped, even if
            this one is. Gradients flow back through the copy.
        """
        if not recurse:
            return self.copy()
        stored = self._entries
        if type(stored) is not dict and isinstance(stored, EntryStore) and (block := stored.together(Tensor.clone)):
            with block:
                return self.clone(recurse, **kwargs)
        if torch.compiler.is_compiling():
            # Dynamo does not trace `Clones`, which copies values and keeps parameters as parameters.
            return self._map(lambda leaf: leaf.clone(**kwargs))
        # Other threads may add and delete entries between taking the leaves out and putting the clones in. So work on a
        # copy of the dict.
        entries = stored.copy() if isinstance(stored, dict) and self._wrapped_container() is self else None
        if entries is not None and is_flat(entries):
            leaves = list(entries.values())
            return self._build(
                dict(zip(entries, _clone_leaves(leaves, kwargs))), self._batch_size, self._device, self._names
            )
        source = self.copy() if isinstance(stored, dict) else self
        return source._rebuilt(Clones(_clone_leaves(source._leaves(), kwargs)))

    def copy(self: SelfT) -> SelfT:
        """Copy the containers, nested ones too, and share the leaves. `dict.copy` copies one level only.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict({"a": {"b": torch.zeros(1)}})
            >>> copied = td.copy()
            >>> copied["a"] is td["a"], copied["a", "b"] is td["a", "b"]
            (False, True)

        Returns:
            a new container, not locked.
        """
        mapping: Any = self._entries
        if not isinstance(mapping, dict):
            if (members := self._members(or_template=True)) is not None:
                with self._at_once():
                    return self._restack([member.copy() for member in members])
            # Tensors in a file are not read.
            shared = self._share_entries().items()
            entries = {k: value.copy() if isinstance(value, Contract) else value for k, value in shared}
            return self._subset(entries, self._device)
        # Dynamo guards the order of the entries for `dict(mapping)`, but not for `mapping.copy()`.
        entries = dict(mapping)
        for name, value in entries.items():
            if type(value) is not Tensor and isinstance(value, Contract):
                entries[name] = value.copy()
        return self._build(entries, self._batch_size, self._device, self._names)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy everything, into an unlocked container. A tensor or container under two keys is copied once."""
        entries = {name: _deep_copy(value, memo) for name, value in self._entries.items()}
        result = self._build(entries, self._batch_size, self._device, self._names)
        memo[id(self)] = result
        return result

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        # `ForkingPickler` looks up the exact class before it calls `__reduce_ex__`, so each class is registered.
        ForkingPickler.register(cls, pickling.reduce_for_process)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if type(self).__reduce__ is not object.__reduce__:
            # A class of the program that defines its own pickling.
            return self.__reduce__()
        packed = None
        if protocol == torch_files.PROTOCOL:
            if self._wrapped_container() is not self and not is_stored_as_class(self):
                # A wrapper with additional state, such as a container of parameters.
                return object.__reduce_ex__(self, protocol)
            packed = pickling.reduce_for_torch(self) or torch_files.reduce(self)
        return pickling.reduce(self, int(protocol)) if packed is None else packed

    def __getstate__(self) -> dict[str, Any]:
        slots = {name: getattr(self, name) for name in self._slots}
        state = {name: value for name, value in slots.items() if value is not getattr(Contract, name, ...)}
        state.update(self.__dict__)
        for name in TRANSIENT:
            state.pop(name, None)
        # Pickles store the fields of `Backing` as attributes of these names.
        backing = state.pop("_own_backing", state.pop("_backing", NOT_BACKED))
        state.update({f"_{name}": value for name, value in zip(backing._fields, backing, strict=True) if value})
        if "_consolidated" in state and not is_whole(self._leaves(), self._consolidated):
            del state["_consolidated"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        # The nested containers are restored already. Each level registers itself with its children as a locked parent.
        state = pickled_containers.convert_state(type(self), state)
        locked = state.get("_locked", False)
        for name in self._slots:
            setattr(self, name, state[name] if name in state else getattr(Contract, name))
        self.__dict__.update({name: value for name, value in state.items() if name not in self._slots})
        if locked:
            self._lock_tree()
        if self._is_shared:
            # A plain pickle copies the tensors. Only the pickler of `multiprocessing` passes the shared memory on.
            self._is_shared = shared_memory.shares_tensors(self)


def _clone_leaves(leaves: list[Tensor], options: dict[str, Any]) -> Sequence[Tensor]:
    # In torch's call on lists, one leaf that requires gradients makes all clones require them, even clones of buffers.
    if not options and foreach.usable(leaves) and len(set(map(_REQUIRES_GRAD, leaves))) == 1:
        return foreach.clone(leaves)
    # Passing empty keywords would take 0.1 us a call.
    return [leaf.clone(**options) for leaf in leaves] if options else [leaf.clone() for leaf in leaves]


def _deep_copy(value: object, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor) and (
        torch.compiler.is_dynamo_compiling() if not value.requires_grad else not value.is_leaf
    ):
        # `copy.deepcopy` fails for tensors inside an autograd graph, and in compiled code. A clone stays in the graph.
        if id(value) not in memo:
            memo[id(value)] = value.clone()
        return memo[id(value)]
    try:
        return copy.deepcopy(value, memo)
    except NotImplementedError:
        if not ragged.is_ragged(value):
            raise
        memo[id(value)] = copied = ragged.deep_copy(value)
        return copied
