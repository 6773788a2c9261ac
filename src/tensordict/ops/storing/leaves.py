"""Methods about the memory of the leaves: its layout, address and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tensordict.core import makers
from tensordict.core.contract import Contract, is_node
from tensordict.core.exceptions import ShapeError, StackError
from tensordict.core.keys import Path
from tensordict.core.replacing import replacing
from tensordict.ops.entries.locking import Locking

if TYPE_CHECKING:
    from typing_extensions import Self

    SelfT = TypeVar("SelfT", bound="Leaves")

LockingT = TypeVar("LockingT", bound=Locking)


class Leaves(Locking):
    """The methods `contiguous`, `is_contiguous`, `data_ptr`, `bytes`, `param_count`, `is_shared` and others."""

    def _same_lock(self, result: LockingT) -> LockingT:
        """Lock `result` if this container is locked, and return it."""
        if self._locked:
            result._lock_tree()
        return result

    def _map_some(self, fn: Callable[[Any], object]) -> Self | None:
        """Replace every leaf by `fn(leaf)`, and leave out leaves for which `fn` returns `None`.

        Calls `fn` in the order of `_leaves`. Returns `None` if no leaf is left.
        """
        mapping: Mapping[str, Any] = self._entries
        on_leaf = fn
        if not isinstance(mapping, dict):
            if (members := self._members()) is not None:
                found = [member._map_some(fn) for member in members]
                if self._is_non_tensor or all(result is None for result in found):
                    return None
                pairs = zip(members, found, strict=True)
                return self._restack([member.empty() if result is None else result for member, result in pairs])
            mapping, on_leaf = self._writable(), self._on_read(fn)
        entries: dict[str, Any] = {}
        for name, value in mapping.items():
            # An `UnbatchedTensor` has this method too, and stays one.
            map_node = getattr(value, "_map_some", None) if type(value) is not Tensor else None
            result = on_leaf(value) if map_node is None else map_node(fn)
            if result is not None:
                entries[name] = result
        return self._build(entries, self._batch_size, self._device, self._names) if entries else None

    def as_tensor(self) -> Self:
        """Convert memory-mapped tensors and parameters to plain tensors over the same memory.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.nn.Parameter(torch.zeros(2))).as_tensor()
            >>> type(td["a"]) is torch.Tensor
            True

        Returns:
            a new container, locked if this one is. Plain tensors are shared.
        """
        return self._same_lock(self._map(_plain))

    def is_contiguous(self) -> bool:
        """Return whether every leaf is contiguous in memory; `False` for a lazy stack, a stack of values and a file."""
        return (
            self._members() is None
            and not self._is_in_file
            and all(value.is_contiguous() for value in self._entries.values())
        )

    def contiguous(self: SelfT, *, canonical: bool = False, inplace: bool = False) -> SelfT:
        """Copy the leaves that are not contiguous, and share the others. Lazy stacks become dense.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(3, 4).T)
            >>> td.is_contiguous(), td.contiguous().is_contiguous()
            (False, True)

        Args:
            canonical: also copy leaves with a dim of size 1 whose stride differs from the stride in a new tensor of
                this shape. Torch calls such leaves contiguous.
            inplace: replace the leaves in this container instead of making a new one.

        Returns:
            a new container, not locked; with `inplace`, this container.

        Raises:
            RuntimeError: with `inplace`, a leaf must be replaced and the container is locked, or the container is a
                lazy stack; or the members of a lazy stack cannot be stacked.
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

    def data_ptr(self, *, storage: bool = False) -> Any:
        """Return the address of every leaf, in a container of int64 scalars without batch dims.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> td = TensorDict(a=torch.zeros(2), b={"c": torch.zeros(2)})
            >>> bool((td.data_ptr() == td.copy().data_ptr()).all())
            True

        For a lazy stack, the result has a nested container for each member, under `"0"`, `"1"` and so on.

        Args:
            storage: return the address of the leaf's storage, instead of the address of its first element.
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
        """Return how many bytes the elements of the leaves and of their gradients take.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2, 3), b=torch.zeros(4)).bytes()
            40

        Args:
            count_duplicates: `False` counts a tensor object under two keys once. Different views of the same memory
                always count separately.
        """
        leaves = self._leaves()
        tensors = leaves + [gradient for gradient in map(_gradient, leaves) if gradient is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in _drop_duplicates(tensors, count_duplicates))

    def param_count(self, *, count_duplicates: bool = True) -> int:
        """Return how many elements the leaves have; `count_duplicates` as in :meth:`bytes`.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> TensorDict(a=torch.zeros(2, 3), b=torch.zeros(4)).param_count()
            10
        """
        return sum(leaf.numel() for leaf in _drop_duplicates(self._leaves(), count_duplicates))

    def is_shared(self) -> bool:
        """Return whether other processes can see the memory: after `share_memory_()`, and on a CUDA device.

        Shared tensors alone do not make a container shared.
        """
        return self._is_shared or (self._device is not None and self._device.type == "cuda")

    def record_stream(self, stream: torch.cuda.Stream) -> Self:
        """Mark every leaf as used on `stream`, so that its memory is not reused before the stream is done with it."""
        for leaf in self._leaves():
            leaf.record_stream(stream)
        return self

    def _replace_leaves(self, source: Contract) -> Self:
        """Take the leaves and devices of `source`, a container of the same structure. Returns `self`."""
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
    """Iterate over the (path, leaf) pairs of a tree."""
    return node._walk(prefix)


def _walk_entries(node: Contract, prefix: Path = (), skip_uneven: bool = False) -> Iterator[tuple[Path, Any]]:
    """Iterate over the (path, tensor) pairs of a tree. A lazy stack gives the stacks of its members' leaves.

    With `skip_uneven`, skip entries that the members of a lazy stack hold in different shapes, instead of raising.
    """
    for name in node._entries:
        try:
            value = node._entries[name]
        except StackError:
            if not skip_uneven:
                raise
            continue
        if type(value) is not Tensor and is_node(value):
            yield from _walk_entries(value, (*prefix, name), skip_uneven)
        else:
            yield (*prefix, name), value


def _gradient(leaf: Tensor) -> Tensor | None:
    """Return the gradient of a leaf, without torch's warning for a tensor that cannot have one."""
    return leaf.grad if leaf.is_leaf or leaf.retains_grad else None


def _plain(leaf: Tensor) -> Tensor:
    # A jagged tensor always has a class of its own.
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


def _drop_duplicates(tensors: list[Tensor], count_duplicates: bool) -> list[Tensor]:
    return tensors if count_duplicates else list(dict.fromkeys(tensors))


def _plan_replacement(
    node: Contract,
    source: Contract,
    writes: list[tuple[Contract, str, Any]],
    devices: list[tuple[Contract, torch.device | None]],
) -> None:
    """List the leaves and devices in which `source` differs from `node`, a container of the same structure."""
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
