"""The public place of `MemoryMappedTensor`."""

from tensordict.memory.mapped import MemmapTensor, MemoryMappedTensor
from tensordict.memory.mapped import set_transfer_ownership as set_transfer_ownership

__all__ = ["MemmapTensor", "MemoryMappedTensor"]
