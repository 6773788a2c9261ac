"""Anonymous memory that processes share: one map for each block, whichever process sent it."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.memory import system


class SharedBlock:
    """Anonymous memory that other processes can map too, through its file descriptor.

    Args:
        nbytes: the size, at least 1.
        fd: a descriptor of existing memory, which the block takes over; by default new memory, filled with zeros.
    """

    __slots__ = ("__weakref__", "buffer", "fd", "nbytes", "shape")

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = nbytes
        self.shape: tuple[int, ...] | None = None  # of the tensor that it was made for, if that is known
        if fd is None:
            fd = system.new_memory(nbytes)
        self.fd = fd
        weakref.finalize(self, os.close, fd)
        status = os.fstat(fd)
        if status.st_size < nbytes:
            raise SaveError(f"the shared memory behind descriptor {fd} is shorter than {nbytes} bytes")
        # `mmap` leaves the descriptor to this block, so that it can be sent to other processes. Torch would keep it.
        self.buffer = mmap.mmap(fd, nbytes)
        _blocks[status.st_dev, status.st_ino] = self

    @property
    def address(self) -> int:
        """The address of the memory in this process."""
        return torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr()

    def view(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """Return a plain tensor over the elements that begin at byte `offset`."""
        flat = torch.frombuffer(self.buffer, dtype=dtype, count=math.prod(shape), offset=offset)
        return flat.view(tuple(shape))


# The blocks of this process. Tensors of one block share one map, whichever process sent them.
_blocks: weakref.WeakValueDictionary[tuple[int, int], SharedBlock] = weakref.WeakValueDictionary()


def receive_block(descriptor: system.Descriptor, nbytes: int) -> SharedBlock:
    """Return the block of a descriptor that another process sent, and take the descriptor over."""
    fd = descriptor.detach()
    status = os.fstat(fd)
    block = _blocks.get((status.st_dev, status.st_ino))
    if block is None:
        return SharedBlock(nbytes, fd)
    os.close(fd)
    return block


def _reduce_block(block: SharedBlock) -> tuple[Callable[..., SharedBlock], tuple[object, ...]]:
    """Describe a block for `multiprocessing`, once for all tensors of a message."""
    return receive_block, (system.send_descriptor(block.fd), block.nbytes)


ForkingPickler.register(SharedBlock, _reduce_block)
