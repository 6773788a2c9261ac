"""The memory behind every leaf: its layout, its address, its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import ShapeError
from tensordict.core.keys import Path
from tensordict.core.replacing import replacing
from tensordict.ops.entries.locking import Locking

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensordict.containers.tensordict_base import TensorDictBase

LockingT = TypeVar("LockingT", bound=Locking)


class Leaves(Locking):
    """The state of the leaves' memory."""

    def _same_lock(self, result: LockingT) -> LockingT:
        """`result`, locked if this container is."""
        if self._locked:
            result._lock_tree()
        return result

    def _map_some(self, fn: Callable[[Any], object]) -> Self | None:
        """`_map` without the leaves for which `fn` gives `None`; `None` when it does so for all of them.

        `fn` is called in the order of `_leaves`.
        """
        mapping: Mapping[str, Any] = self._entries
        on_leaf = fn
        if type(mapping) is not dict:
            if (members := self._members()) is not None:
                found = [member._map_some(fn) for member in members]
                if self._is_non_tensor or all(result is None for result in found):
                    return None
                pairs = zip(members, found, strict=True)
                return self._restack([member.empty() if result is None else result for member, result in pairs])
            mapping, on_leaf = self._writable(), self._on_read(fn)
        entries: dict[str, Any] = {}
        for name, value in mapping.items():
            # An `UnbatchedTensor` stays one.
            of = getattr(value, "_map_some", None) if type(value) is not Tensor else None
            result = on_leaf(value) if of is None else of(fn)
            if result is not None:
                entries[name] = result
        return self._build(entries, self._batch_size, self._device, self._names) if entries else None

    def as_tensor(self) -> Self:
        """A container whose leaves are plain tensors on the same memory, in place of memory-mapped ones and parameters.

        Returns:
            a new container, locked if this one is; leaves that are plain tensors already are shared.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.nn.Parameter(torch.zeros(2))).as_tensor()
            >>> type(td["a"]) is torch.Tensor
            True
        """
        return self._same_lock(self._map(_plain))

    def is_contiguous(self) -> bool:
        """Whether every leaf is contiguous; lazy stacks, and stacks of values, are not."""
        return self._members() is None and all(value.is_contiguous() for value in self._entries.values())

    def contiguous(self, *, canonical: bool = False, inplace: bool = False) -> Self:
        """A container whose leaves are contiguous; leaves that already are, are shared, others are copied.

        Lazy stacks become dense.

        Args:
            canonical: also copy leaves that torch calls contiguous although their strides are not those of a
                fresh tensor of that shape, as happens in dims of size 1.
            inplace: replace the leaves in this container instead of making a new one.

        Returns:
            a new, unlocked container; the same one with `inplace`.

        Raises:
            RuntimeError: with `inplace`, the container is locked and a leaf has to be replaced, or it is a lazy stack,
                which has no memory of its own; or the members of a lazy stack cannot be stacked.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3, 4).T)
            >>> td.is_contiguous(), td.contiguous().is_contiguous()
            (False, True)
        """
        if self._members() is not None:
            if self._is_non_tensor:
                return self
            if inplace:
                raise ShapeError("a lazy stack cannot be made contiguous in place: use contiguous()")
            return self._dense(hooked=True)
        fn = _canonical if canonical else Tensor.contiguous
        if inplace:
            return self._replace_leaves(self._map(fn))
        entries = {
            name: value.contiguous(canonical=canonical) if is_node(value) else fn(value)
            for name, value in self._entries.items()
        }
        return self._build(entries, self._batch_size, self._device, self._names)

    def data_ptr(self, *, storage: bool = False) -> TensorDictBase:
        """The address of every leaf, as a container of int64 scalars without batch dims.

        Those of a lazy stack are under the numbers of its members.

        Args:
            storage: give the address of the leaf's storage instead of that of its first element.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2), b={"c": torch.zeros(2)})
            >>> bool((td.data_ptr() == td.copy().data_ptr()).all())
            True
        """
        members = self._members()
        numbered = self._entries if members is None else {str(i): member for i, member in enumerate(members)}
        entries = {
            name: value.data_ptr(storage=storage)
            if isinstance(value, Leaves)
            else torch.tensor(value.untyped_storage().data_ptr() if storage else value.data_ptr())
            for name, value in numbered.items()
            if type(value) is Tensor or not (isinstance(value, Contract) and value._is_non_tensor)
        }
        return makers.dense(entries, torch.Size(()), torch.device("cpu"), None)

    def bytes(self, *, count_duplicates: bool = True) -> int:
        """How many bytes the elements of the leaves, and of their gradients, take.

        Args:
            count_duplicates: `False` counts a tensor object that is found under two keys once. Different
                views of the same memory are always counted each.
        """
        leaves = self._leaves()
        tensors = leaves + [gradient for gradient in map(_gradient, leaves) if gradient is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in _counted(tensors, count_duplicates))

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """How many elements the leaves have; `count_duplicates` as in :meth:`bytes`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2, 3), b=torch.zeros(4)).param_count()
            10
        """
        return sum(leaf.numel() for leaf in _counted(self._leaves(), count_duplicates))

    def is_shared(self) -> bool:
        """Whether other processes can see this memory: after `share_memory_()`, and on a CUDA device.

        A container is not called shared for happening to hold tensors that are.
        """
        return self._is_shared or (self._device is not None and self._device.type == "cuda")

    def record_stream(self, stream: torch.cuda.Stream) -> Self:
        """Mark every leaf as used on `stream`, so that its memory is not reused before the stream is done with it."""
        for leaf in self._leaves():
            leaf.record_stream(stream)
        return self

    def _replace_leaves(self, source: Contract) -> Self:
        """Take over the leaves, and the devices, of a container of the same structure; returns `self`."""
        writes: list[tuple[Contract, str, Any]] = []
        devices: list[tuple[Contract, torch.device | None]] = []
        _plan_replacement(self, source, writes, devices)
        for node, _, _ in writes:
            if node._locked:
                self._refuse_if_locked("replace its leaves")
        with self._at_once(), replacing():
            for node, name, value in writes:
                node._entries[name] = value
        for node, device in devices:
            node._device = device
        return self


def _walk(node: Contract, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The (path, leaf) pairs of a tree."""
    return node._walk(prefix)


def _entries_of(node: Contract, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The (path, tensor) pairs of a tree as they are read: a lazy stack gives the stacks of its members' leaves."""
    for name, value in node._entries.items():
        if type(value) is not Tensor and is_node(value):
            yield from _entries_of(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def _gradient(leaf: Tensor) -> Tensor | None:
    """The gradient of a leaf, without the warning that torch gives for one that cannot have any."""
    return leaf.grad if leaf.is_leaf or leaf.retains_grad else None


def _plain(leaf: Tensor) -> Tensor:
    # A jagged tensor is of a class of its own, mapped or not.
    return leaf if type(leaf) is Tensor or leaf.layout is torch.jagged else leaf.as_subclass(Tensor)


def _canonical(leaf: Tensor) -> Tensor:
    if leaf.layout != torch.strided or leaf.is_nested:
        return leaf.contiguous()
    stride = 1
    for size, actual in zip(reversed(leaf.shape), reversed(leaf.stride()), strict=True):
        if actual != stride:
            return leaf.clone(memory_format=torch.contiguous_format)
        stride *= max(size, 1)
    return leaf


def _counted(tensors: list[Tensor], count_duplicates: bool) -> list[Tensor]:
    return tensors if count_duplicates else list(dict.fromkeys(tensors))


def _plan_replacement(
    node: Contract,
    source: Contract,
    writes: list[tuple[Contract, str, Any]],
    devices: list[tuple[Contract, torch.device | None]],
) -> None:
    """List what differs between a container and one of the same structure."""
    if (pairs := node._pair_members(source)) is not None:
        for own, piece in pairs:
            _plan_replacement(own, piece, writes, devices)
        return
    if node._device != source._device:
        devices.append((node, source._device))
    mapping = node._entries
    for name, value in source._entries.items():
        current = mapping[name]
        if type(value) is not Tensor and is_node(value):
            _plan_replacement(current, value, writes, devices)
        elif value is not current:
            writes.append((node, name, value))
