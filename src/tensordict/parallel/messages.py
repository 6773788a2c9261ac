"""Messages between processes of one machine: a pickle, and separate memory with the bytes of its tensors.

The sender writes the tensors to a block of anonymous memory, and the receiver maps this block. Small tensors are part
of the message. Tensors in memory that both processes can see are not copied: the memory of a container that both have,
or other shared memory, whose descriptor is sent along. Such tensors are pickled as references: their memory, and their
place in it.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_storage_fd

from tensordict.core import makers
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.memory import pickling, system
from tensordict.memory.file_maps import Finder
from tensordict.memory.files import write_bytes
from tensordict.memory.mapped import MemoryMappedTensor, map_block, wrap_like
from tensordict.memory.shared_block import SharedBlock, receive_block
from tensordict.parallel import shared_memory

# Up to this many bytes of tensors are part of the message.
_INLINE = 64 << 10
# The alignment of tensors in a block, in bytes. It fits every dtype.
_ALIGN = 64
_PROTOCOL = 5

# The place of a tensor in shared memory: the number of the memory (a tensor of `CommonMemory`, or a handle as -1, -2,
# ...); the first byte there; dtype, shape and strides; whether it is a `MemoryMappedTensor`; and the number of the
# tensor in the message.
Reference = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]


class CommonMemory:
    """The leaves of a container that have the same memory in both processes.

    Args:
        container: the container of this process; the other process has it too. `None` for no common memory.
    """

    def __init__(self, container: object = None) -> None:
        leaves = container._leaves() if isinstance(container, Contract) else []
        parts = [part for leaf in leaves for part in shared_memory.list_parts(leaf)]
        self.tensors = [part for part in parts if type(part) in (Tensor, MemoryMappedTensor)]
        self._numbers = {_base_address(part): number for number, part in enumerate(self.tensors) if _is_common(part)}

    def find_number(self, tensor: Tensor) -> int | None:
        """Return the index in `tensors` of the tensor with the same memory; `None` if there is none."""
        return self._numbers.get(_base_address(tensor))


class OwnDescriptor(NamedTuple):
    """A file descriptor of this process, with the interface of descriptors that another process sent."""

    fd: int

    def detach(self) -> int:
        return self.fd


class Handle(NamedTuple):
    """Shared memory to send: its size, whether it is a `SharedBlock` or a storage of torch, and its descriptor."""

    nbytes: int
    is_block: bool
    descriptor: system.Descriptor

    def map_memory(self) -> Tensor:
        """Map the memory as a tensor of bytes, which then owns the descriptor."""
        if self.is_block:
            return map_block(receive_block(self.descriptor, self.nbytes), torch.uint8, (self.nbytes,))
        storage = rebuild_storage_fd(torch.UntypedStorage, self.descriptor, self.nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


class Message:
    """A pickled value.

    Args:
        head: the pickle, without its buffers.
        parts: the buffers; or their lengths, if they are in a block.
        nbytes: the length of the block; 0 without a block.
        descriptor: the descriptor of the block, which the message then owns; `None` in the process of the sender.
        handles: the shared memory of tensors that are pickled as references.
    """

    def __init__(
        self,
        head: bytes,
        parts: list[Any],
        nbytes: int,
        descriptor: system.Descriptor | None = None,
        handles: Sequence[Handle] = (),
    ) -> None:
        self.head = head
        self.parts = parts
        self.nbytes = nbytes
        self.handles = list(handles)
        self._descriptor = descriptor
        self._block: SharedBlock | None = None
        # The pickled value. It keeps the descriptors of its memory open.
        self._value: object = None

    @classmethod
    def of(cls, value: object, common: CommonMemory, inline: bool = False) -> Message:
        """Pickle a value.

        Args:
            value: the value. The message keeps it alive.
            common: the memory that the receiver has too.
            inline: put all other tensors into the message itself.

        Raises:
            RuntimeError: a tensor in the value has a history in autograd.
            Exception: the value cannot be pickled.
        """
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = _Pickler(stream, common, not inline, buffers.append)
        pickler.dump(value)
        views = [buffer.raw() for buffer in buffers]
        head = stream.getvalue()
        if inline or sum(len(view) for view in views) <= _INLINE:
            # Bytearrays, because the receiver must be able to write to the tensors over them.
            message = cls(head, [bytearray(view) for view in views], 0, None, pickler.handles)
        else:
            lengths = [len(view) for view in views]
            starts = _compute_starts(lengths)
            message = cls(head, lengths, starts[-1] + lengths[-1], None, pickler.handles)
            message._block = SharedBlock(message.nbytes)
            for start, view in zip(starts, views, strict=True):
                write_bytes(message._block.fd, view, start)
        message._value = value
        return message

    @property
    def fd(self) -> int:
        """The descriptor of the block, in the process of the sender."""
        assert self._block is not None
        return self._block.fd

    def value(self, common: CommonMemory) -> Any:
        """Unpickle the value. Its tensors are over the memory of the message, or over common memory."""
        views = self.parts
        if self.nbytes:
            if self._block is None:
                assert self._descriptor is not None
                memory = _map_memory(self._descriptor.detach(), self.nbytes)
            else:
                memory = memoryview(self._block.buffer)
            starts = _compute_starts(self.parts)
            views = [memory[start : start + size] for start, size in zip(starts, self.parts, strict=True)]
        return _Unpickler(self.head, views, common, self.handles).load()

    def __reduce__(self) -> Any:
        # Pools pickle messages. The receiver asks this process for the descriptors when it reads the message.
        descriptor = system.send_descriptor(self.fd) if self.nbytes else None
        handles = [
            handle._replace(descriptor=system.send_descriptor(handle.descriptor.detach())) for handle in self.handles
        ]
        return Message, (self.head, self.parts, self.nbytes, descriptor, handles)


def _map_memory(fd: int, nbytes: int) -> memoryview:
    """Map memory and close its descriptor. The map lives as long as a view of it.

    A process may have a thousand descriptors. Python's `mmap` keeps one for each map, torch's maps do not.
    """
    try:
        return torch.from_file(f"/dev/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy().data
    finally:
        os.close(fd)


def _compute_starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(-(-length // _ALIGN) * _ALIGN for length in lengths)][: len(lengths)]


class _Pickler(pickle.Pickler):
    """Pickles tensors as references, or with their bytes in separate buffers, instead of through `torch.save`.

    Args:
        stream: the stream to write the pickle to.
        common: the memory that the other process has too.
        sends_handles: true if descriptors of other shared memory can be sent; see `handles`.
        keep: called with each separate buffer.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        common: CommonMemory,
        sends_handles: bool,
        keep: Callable[[pickle.PickleBuffer], object],
    ) -> None:
        super().__init__(stream, protocol=_PROTOCOL, buffer_callback=keep)
        self.handles: list[Handle] = []
        self._common, self._sends_handles = common, sends_handles
        # The numbers of the handles, by the address of the memory.
        self._handle_numbers: dict[int, int] = {}
        # The references, by the id of the tensor.
        self._references: dict[int, Reference] = {}

    def persistent_id(self, value: object) -> Reference | None:
        return self._make_reference(value) if isinstance(value, Tensor) else None

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, Contract) and pickling.is_ours(type(value)):
                return pickling.reduce(value, _PROTOCOL, lambda tensor: self._make_reference(tensor) is not None)
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError(
                "a tensor with a history in autograd cannot be sent to another process: return detach() of it"
            )
        if type(value) is Tensor and pickling.is_plain(value):
            holder = makers.dense({"": value}, torch.Size(()), None, None)
            return _only_entry, (holder,)
        return NotImplemented

    def _make_reference(self, tensor: Tensor) -> Reference | None:
        """Return the reference to a tensor, or `None` if the tensor must be copied. The tensor must stay alive."""
        reference = self._references.get(id(tensor))
        if reference is None and (found := self._locate(tensor)) is not None:
            number, address = found
            layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            is_mapped = type(tensor) is MemoryMappedTensor
            reference = (number, tensor.data_ptr() - address, *layout, is_mapped, len(self._references))
            self._references[id(tensor)] = reference
        return reference

    def _locate(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return the number of the memory of a tensor, as in a `Reference`, and the start address of this memory.

        Returns `None` if the tensor must be copied.
        """
        if not _is_over_memory(tensor):
            return None
        number = self._common.find_number(tensor)
        if number is not None:
            return number, _start_address(self._common.tensors[number])
        if not self._sends_handles:
            return None
        if isinstance(tensor, MemoryMappedTensor):
            block = tensor._handler
            return None if block is None else self._add_handle(block.address, lambda: (block.fd, block.nbytes), True)
        storage = tensor.untyped_storage()
        if not storage.is_shared() or storage.filename is not None:
            return None
        # With another sharing strategy, torch would return the descriptor of a copy, unless the storage maps a file.
        if mp.get_sharing_strategy() != "file_descriptor" and Finder().of(tensor) is None:  # type: ignore[no-untyped-call]
            return None
        return self._add_handle(storage.data_ptr(), lambda: internals.share_descriptor(storage), False)

    def _add_handle(self, address: int, share: Callable[[], tuple[int, int]], is_block: bool) -> tuple[int, int]:
        """Add a handle for the memory at an address, unless it has one. Returns the number and the address."""
        if address not in self._handle_numbers:
            fd, nbytes = share()
            self.handles.append(Handle(nbytes, is_block, OwnDescriptor(fd)))
            self._handle_numbers[address] = -len(self.handles)
        return self._handle_numbers[address], address


class _Unpickler(pickle.Unpickler):
    """Makes tensors from references; see `Message.value`."""

    def __init__(self, head: bytes, buffers: list[Any], common: CommonMemory, handles: list[Handle]) -> None:
        super().__init__(io.BytesIO(head), buffers=buffers)
        self._common, self._sent_memory = common, [handle.map_memory() for handle in handles]
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, reference: Reference) -> Tensor:
        number, start, dtype, shape, strides, is_mapped, which = reference
        found = self._tensors.get(which)
        if found is None:
            home = self._common.tensors[number] if number >= 0 else self._sent_memory[-1 - number]
            block = _block(home)
            # The storage of `home` may begin anywhere in its block. Use a storage over the whole block.
            storage = (home if block is None else block.view(torch.uint8, (block.nbytes,))).untyped_storage()
            at, rest = divmod(_start_address(home) - storage.data_ptr() + start, dtype.itemsize)
            assert not rest, "memory is mapped at whole pages, so a tensor has the same alignment as in the sender"
            found = torch.empty(0, dtype=dtype, device="cpu").set_(storage, at, shape, strides)
            if is_mapped:
                assert isinstance(home, MemoryMappedTensor)
                found = wrap_like(home, found)
            self._tensors[which] = found
        return found


def _only_entry(holder: Contract) -> Tensor:
    only: Tensor = holder._entries[""]
    return only


def _block(tensor: Tensor) -> SharedBlock | None:
    return tensor._handler if isinstance(tensor, MemoryMappedTensor) else None


def _base_address(tensor: Tensor) -> int:
    """Return the start address of the storage or block of a tensor. It identifies the memory in this process."""
    block = _block(tensor)
    return tensor.untyped_storage().data_ptr() if block is None else block.address


def _start_address(tensor: Tensor) -> int:
    """Return the address in this process from which references to the memory of a tensor count.

    This is the start of the block, or the first element of the tensor. Both processes know it.
    """
    block = _block(tensor)
    return tensor.data_ptr() if block is None else block.address


def _is_over_memory(tensor: Tensor) -> bool:
    """Return whether a dtype, a shape and strides over memory describe a tensor completely."""
    if not tensor.numel():
        return False
    if type(tensor) is MemoryMappedTensor:
        return tensor.layout is torch.strided and not (tensor.is_nested or tensor.requires_grad)
    return type(tensor) is Tensor and pickling.is_plain(tensor)


def _is_common(tensor: Tensor) -> bool:
    """Return whether both processes have the memory of a tensor and see writes to it."""
    if not _is_over_memory(tensor) or not shared_memory.shares_writes(tensor):
        return False
    # Torch reports all of its maps of files as shared, also private ones, so these do not count.
    return isinstance(tensor, MemoryMappedTensor) or tensor.untyped_storage().filename is None
