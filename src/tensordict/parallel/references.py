"""References: tensors on their way to a process that can see their memory, told by where they lie in it.

Such memory is that of a container which both processes have, or other shared memory, whose descriptor goes along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_storage_fd

from tensordict.core.contract import Contract
from tensordict.memory import pickling
from tensordict.memory.file_maps import Finder
from tensordict.memory.mapped import MemoryMappedTensor, SharedBlock, over_same, received
from tensordict.parallel import sharing


class Common:
    """The memory of the leaves of a container, as far as it is the same memory in both processes.

    Args:
        container: the container, or the same one in the other process; `None` for no such memory.
    """

    def __init__(self, container: Any = None) -> None:
        leaves: list[Any] = []
        if isinstance(container, Contract):
            container._gather(leaves)
        self.parts = [part for leaf in leaves for part in _dense(leaf)]
        self._numbers = {_base(part): number for number, part in enumerate(self.parts) if _is_common(part)}

    def number(self, tensor: Tensor) -> int | None:
        """Which part is over the same memory as a tensor."""
        return self._numbers.get(_base(tensor))


class Handle(NamedTuple):
    """Shared memory: its size, whether it is a `SharedBlock` or a storage of torch's, and its descriptor.

    The descriptor is one of this process, or a `DupFd` that gives one, or `None` while it is under way.
    """

    nbytes: int
    is_block: bool
    descriptor: Any

    def opened(self) -> Tensor:
        """The memory, as bytes; takes the descriptor over."""
        if self.is_block:
            fd = self.descriptor if isinstance(self.descriptor, int) else self.descriptor.detach()
            return received(fd, self.nbytes).tensor(torch.uint8, (self.nbytes,))
        given = _Given(self.descriptor) if isinstance(self.descriptor, int) else self.descriptor
        storage = rebuild_storage_fd(torch.UntypedStorage, given, self.nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


class _Given:
    """A descriptor in the form in which torch asks for one."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def detach(self) -> int:
        return self._fd


# Where a tensor lies: the number of a part of what is common or, from -1 down, of a handle; the byte at which it begins
# there; dtype, shape and strides; whether it is a `MemoryMappedTensor`; and a number of its own.
Reference = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]


class Referring:
    """Makes references.

    Args:
        common: what the other process has too.
        hands_over: whether descriptors can go along.
    """

    def __init__(self, common: Common, hands_over: bool) -> None:
        self.handles: list[Handle] = []
        self._common, self._hands_over = common, hands_over
        # The numbers of handles by the addresses of their memory.
        self._handed: dict[int, int] = {}
        self._made: dict[int, Reference] = {}

    def can(self, tensor: Tensor) -> bool:
        """Whether there is a reference to a tensor."""
        return self.to(tensor) is not None

    def to(self, tensor: Tensor) -> Reference | None:
        """The reference to a tensor, which has to stay alive; `None` if it has to be copied."""
        reference = self._made.get(id(tensor))
        if reference is None:
            home = self._home(tensor)
            if home is not None:
                start = tensor.data_ptr() - home[1]
                layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
                reference = (home[0], start, *layout, type(tensor) is MemoryMappedTensor, len(self._made))
                self._made[id(tensor)] = reference
        return reference

    def _home(self, tensor: Tensor) -> tuple[int, int] | None:
        if not _is_over_memory(tensor):
            return None
        number = self._common.number(tensor)
        if number is not None:
            return number, _first(self._common.parts[number])
        if not self._hands_over:
            return None
        if isinstance(tensor, MemoryMappedTensor):
            block = _block(tensor)
            return None if block is None else self._handed_over(block.address, lambda: (block.fd, block.nbytes), True)
        storage = tensor.untyped_storage()
        if not storage.is_shared() or storage.filename is not None:
            return None
        # With the other strategy torch would give a descriptor of a copy, unless it has a file mapped.
        if mp.get_sharing_strategy() != "file_descriptor" and Finder().of(tensor) is None:  # type: ignore[no-untyped-call]
            return None
        return self._handed_over(storage.data_ptr(), storage._share_fd_cpu_, False)

    def _handed_over(self, address: int, share: Callable[[], tuple[int, int]], is_block: bool) -> tuple[int, int]:
        if address not in self._handed:
            fd, nbytes = share()
            self.handles.append(Handle(nbytes, is_block, fd))
            self._handed[address] = -len(self.handles)
        return self._handed[address], address


class Referred:
    """Makes tensors of references.

    Args:
        common: what both processes have.
        handles: those that came along.
    """

    def __init__(self, common: Common, handles: list[Handle]) -> None:
        self._common, self._opened = common, [handle.opened() for handle in handles]
        self._made: dict[int, Tensor] = {}

    def by(self, reference: Reference) -> Tensor:
        """The tensor that a reference is to."""
        number, start, dtype, shape, strides, is_mapped, which = reference
        found = self._made.get(which)
        if found is None:
            home = self._common.parts[number] if number >= 0 else self._opened[-1 - number]
            storage = _whole(home).untyped_storage()
            at, rest = divmod(_first(home) - storage.data_ptr() + start, dtype.itemsize)
            assert not rest, "memory is mapped at whole pages, and parts of it begin where they do at the sender"
            found = torch.empty(0, dtype=dtype, device="cpu").set_(storage, at, shape, strides)
            if is_mapped:
                assert isinstance(home, MemoryMappedTensor)
                found = over_same(home, found)
            self._made[which] = found
        return found


def _dense(leaf: Any) -> list[Any]:
    return [part for part in sharing.parts(leaf) if type(part) in (Tensor, MemoryMappedTensor)]


def _block(tensor: Tensor) -> SharedBlock | None:
    return tensor._handler if isinstance(tensor, MemoryMappedTensor) else None


def _base(tensor: Tensor) -> int:
    """What all tensors over one memory have in common: where it begins in this process."""
    block = _block(tensor)
    return tensor.untyped_storage().data_ptr() if block is None else block.address


def _first(tensor: Tensor) -> int:
    """Where what a tensor is over begins: at a place that is the same one in all processes."""
    block = _block(tensor)
    return tensor.data_ptr() if block is None else block.address


def _whole(tensor: Tensor) -> Tensor:
    """A tensor whose storage is all that there is: storages over a block may begin anywhere in it."""
    block = _block(tensor)
    return tensor if block is None else block.tensor(torch.uint8, (block.nbytes,))


def _is_over_memory(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but dtype, shape and strides over memory."""
    if not tensor.numel():
        return False
    if type(tensor) is MemoryMappedTensor:
        return tensor.layout is torch.strided and not (tensor.is_nested or tensor.requires_grad)
    return type(tensor) is Tensor and pickling.is_plain(tensor)


def _is_common(tensor: Tensor) -> bool:
    if not _is_over_memory(tensor) or not sharing.is_seen_by_others(tensor):
        return False
    # What torch maps says that it is shared whether it is or not.
    return isinstance(tensor, MemoryMappedTensor) or tensor.untyped_storage().filename is None
