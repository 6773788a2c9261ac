"""Copying: of the data, of the structure, and by pickling."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from typing import TYPE_CHECKING, Any, SupportsIndex

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

_REQUIRES_GRAD = attrgetter("requires_grad")
# Who holds the container and which block it is in: true of one object in one process only.
TRANSIENT = ("_lock_owners", "_undo", "_blocks")


class Copying(Leaves):
    """`clone`, `copy`, and the protocols of the `copy` and `pickle` modules."""

    def clone(self, recurse: bool = True, **kwargs: object) -> Self:
        """A copy: new containers over new leaves.

        Args:
            recurse: `False` copies the containers only and shares the leaves, as :meth:`copy` does.
            **kwargs: passed to `torch.Tensor.clone` (`memory_format`).

        Returns:
            a new container with the batch size, device and names of this one. It is not locked, and its
            leaves are not memory-mapped, whatever this one is. Gradients flow back through the copy.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(1))
            >>> td.clone()["a"] is td["a"], td.clone(recurse=False)["a"] is td["a"]
            (False, True)
        """
        if not recurse:
            return self.copy()
        stored = self._entries
        if type(stored) is not dict and isinstance(stored, EntryStore) and (block := stored.together(Tensor.clone)):
            with block:
                return self.clone(recurse, **kwargs)
        if torch.compiler.is_compiling():
            # It does not trace `Clones`, which have values copied and parameters stay parameters.
            return self._map(lambda leaf: leaf.clone(**kwargs))
        # Leaves are taken out and put back, and other threads may add and delete entries in between: not in a copy.
        entries = stored.copy() if type(stored) is dict and self._wrapped_container() is self else None
        if entries is not None and is_flat(entries):
            leaves = list(entries.values())
            return self._build(dict(zip(entries, _clones(leaves, kwargs))), self._batch_size, self._device, self._names)
        source = self.copy() if type(stored) is dict else self
        return source._rebuilt(Clones(_clones(source._leaves(), kwargs)))

    def copy(self) -> Self:
        """A copy of the structure that shares the leaves (as `dict.copy`, but nested containers are copied too)."""
        mapping: Any = self._entries
        if type(mapping) is not dict:
            if (members := self._members(or_template=True)) is not None:
                with self._at_once():
                    return self._restack([member.copy() for member in members])
            # What is in a file stays there.
            kept = self._share_entries().items()
            entries = {k: value.copy() if isinstance(value, Contract) else value for k, value in kept}
            return self._subset(entries, self._device)
        # Not `mapping.copy()`: compiled code guards the order of the entries here, and does not there.
        entries = dict(mapping)
        for name, value in entries.items():
            if type(value) is not Tensor and isinstance(value, Contract):
                entries[name] = value.copy()
        return self._build(entries, self._batch_size, self._device, self._names)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An unlocked copy of everything; what was one tensor or container under two keys stays one."""
        entries = {name: _deep_copy(value, memo) for name, value in self._entries.items()}
        result = self._build(entries, self._batch_size, self._device, self._names)
        memo[id(self)] = result
        return result

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        # Its pickler goes by the class alone, before it asks for `__reduce_ex__`.
        ForkingPickler.register(cls, pickling.reduce_for_process)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if type(self).__reduce__ is not object.__reduce__:
            # A class of the program that has a way of its own.
            return self.__reduce__()
        packed = None
        if protocol == torch_files.PROTOCOL:
            if self._wrapped_container() is not self and not is_stored_as_class(self):
                # A wrapper with a state of its own, such as a container of parameters.
                return object.__reduce_ex__(self, protocol)
            packed = pickling.reduce_for_torch(self) or torch_files.reduce(self)
        return pickling.reduce(self, int(protocol)) if packed is None else packed

    def __getstate__(self) -> dict[str, Any]:
        slots = {name: getattr(self, name) for name in self._slots}
        state = {name: value for name, value in slots.items() if value is not getattr(Contract, name, ...)}
        state.update(self.__dict__)
        for name in TRANSIENT:
            state.pop(name, None)
        # Under the names that earlier versions have for them.
        backing = state.pop("_own_backing", state.pop("_backing", NOT_BACKED))
        state.update({f"_{name}": value for name, value in zip(backing._fields, backing, strict=True) if value})
        if "_consolidated" in state and not is_whole(self._leaves(), self._consolidated):
            del state["_consolidated"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        # Nested containers have been restored by now: each level tells its own children who holds them.
        state = pickled_containers.convert_state(type(self), state)
        locked = state.get("_locked", False)
        for name in self._slots:
            setattr(self, name, state[name] if name in state else getattr(Contract, name))
        self.__dict__.update({name: value for name, value in state.items() if name not in self._slots})
        if locked:
            self._lock_tree()
        if self._is_shared:
            # Plain pickling copies; only multiprocessing's own pickler hands over the shared memory itself.
            self._is_shared = shared_memory.is_seen(self)


def _clones(leaves: list[Tensor], options: dict[str, Any]) -> Sequence[Tensor]:
    # Torch's call on lists has all clones require gradients when one does: buffers beside parameters, too.
    if not options and foreach.usable(leaves) and len(set(map(_REQUIRES_GRAD, leaves))) == 1:
        return foreach.clone(leaves)
    # With empty keywords, a call takes 0.1 us more.
    return [leaf.clone(**options) for leaf in leaves] if options else [leaf.clone() for leaf in leaves]


def _deep_copy(value: object, memo: dict[int, Any]) -> Any:
    if isinstance(value, Tensor) and (
        torch.compiler.is_dynamo_compiling() if not value.requires_grad else not value.is_leaf
    ):
        # Torch deep-copies no tensor in the middle of a graph, and none in compiled code. The clone of the first is in
        # the same graph.
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
