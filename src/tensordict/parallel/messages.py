"""Messages between processes of one machine: values pickled, the bytes of their tensors apart from the rest.

The sender writes the tensors to a piece of anonymous memory, and the receiver has them over this memory. Little content
travels in the message itself. Tensors in memory that the receiver can see anyway are not copied: that is the memory of
a container that both processes have, or other shared memory, whose descriptor goes along. Such tensors are pickled as
references, which say where in this memory they lie.
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
from tensordict.memory.mapped import MemoryMappedTensor, SharedBlock, receive_block, wrap_like
from tensordict.parallel import shared_memory

# Up to this many bytes of tensors are part of the message.
_INLINE = 64 << 10
# Where the bytes of a tensor begin: what every dtype can be read at.
_ALIGN = 64
_PROTOCOL = 5

# Where a tensor lies: the number of a tensor of the common memory or, from -1 down, of a handle; the byte at which it
# begins there; dtype, shape and strides; whether it is a `MemoryMappedTensor`; and a number of its own.
Reference = tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], bool, int]


class CommonMemory:
    """The memory of the leaves of a container, as far as it is the same memory in both processes.

    Args:
        container: the container, or the same one in the other process; `None` for no such memory.
    """

    def __init__(self, container: object = None) -> None:
        leaves = container._leaves() if isinstance(container, Contract) else []
        parts = [part for leaf in leaves for part in shared_memory.parts(leaf)]
        self.tensors = [part for part in parts if type(part) in (Tensor, MemoryMappedTensor)]
        self._numbers = {_base(part): number for number, part in enumerate(self.tensors) if _is_common(part)}

    def number(self, tensor: Tensor) -> int | None:
        """Which of `tensors` is over the same memory as a tensor."""
        return self._numbers.get(_base(tensor))


class OwnDescriptor(NamedTuple):
    """A descriptor that this process has already."""

    fd: int

    def detach(self) -> int:
        return self.fd


class Handle(NamedTuple):
    """Shared memory: its size, whether it is a `SharedBlock` or a storage of torch's, and its descriptor."""

    nbytes: int
    is_block: bool
    descriptor: system.Descriptor

    def opened(self) -> Tensor:
        """The memory, as bytes; takes the descriptor over."""
        if self.is_block:
            return receive_block(self.descriptor, self.nbytes).tensor(torch.uint8, (self.nbytes,))
        storage = rebuild_storage_fd(torch.UntypedStorage, self.descriptor, self.nbytes)  # type: ignore[no-untyped-call]
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


class Message:
    """A pickled value.

    Args:
        head: what pickle made of it.
        parts: its buffers, or their lengths where they are in a memory of their own.
        nbytes: the length of this memory; 0 if there is none.
        descriptor: of this memory, taken over; `None` for a message that was made here.
        handles: the shared memory that tensors lie in.
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
        # What was pickled: while it is alive, so are the descriptors of its memory.
        self._kept: object = None

    @classmethod
    def of(cls, value: object, common: CommonMemory, inline: bool = False) -> Message:
        """Pickle a value.

        Args:
            value: the value; it stays alive until the message has arrived.
            common: the memory that the receiver has too.
            inline: have all the rest in the message.

        Raises:
            RuntimeError: a tensor in it is the result of operations that autograd recorded.
            Exception: what pickle raises for values that it cannot pickle.
        """
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        pickler = _Pickler(stream, common, not inline, buffers.append)
        pickler.dump(value)
        views = [buffer.raw() for buffer in buffers]
        head = stream.getvalue()
        if inline or sum(len(view) for view in views) <= _INLINE:
            # As arrays of bytes, so that the tensors over them can be written to.
            message = cls(head, [bytearray(view) for view in views], 0, None, pickler.handles)
        else:
            lengths = [len(view) for view in views]
            starts = _starts(lengths)
            message = cls(head, lengths, starts[-1] + lengths[-1], None, pickler.handles)
            message._block = SharedBlock(message.nbytes)
            for start, view in zip(starts, views, strict=True):
                write_bytes(message._block.fd, view, start)
        message._kept = value
        return message

    @property
    def fd(self) -> int:
        """The descriptor of the memory of a message that was made here."""
        assert self._block is not None
        return self._block.fd

    def value(self, common: CommonMemory) -> Any:
        """The value; its tensors are over the memory of the message, or what both processes have in common."""
        views = self.parts
        if self.nbytes:
            if self._block is None:
                assert self._descriptor is not None
                memory = _mapped(self._descriptor.detach(), self.nbytes)
            else:
                memory = memoryview(self._block.buffer)
            views = [memory[start : start + size] for start, size in zip(_starts(self.parts), self.parts, strict=True)]
        return _Unpickler(self.head, views, common, self.handles).load()

    def __reduce__(self) -> Any:
        # How a pool sends it: the receiver asks this process for the descriptor, when it opens the message.
        descriptor = system.send_descriptor(self.fd) if self.nbytes else None
        handles = [
            handle._replace(descriptor=system.send_descriptor(handle.descriptor.detach())) for handle in self.handles
        ]
        return Message, (self.head, self.parts, self.nbytes, descriptor, handles)


def _mapped(fd: int, nbytes: int) -> memoryview:
    """Memory, mapped for as long as somebody has a view of it; takes its descriptor over.

    Torch's maps of files keep no descriptor, of which a process may have a thousand; maps of Python's keep one each.
    """
    try:
        return torch.from_file(f"/dev/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy().data
    finally:
        os.close(fd)


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(-(-length // _ALIGN) * _ALIGN for length in lengths)][: len(lengths)]


class _Pickler(pickle.Pickler):
    """Plain tensors go as those in containers do, out of band, and not through `torch.save`; or as references.

    Args:
        stream: where the pickle goes.
        common: the memory that the other process has too.
        hands_over: whether descriptors of other shared memory can go along; see `handles`.
        keep: takes what goes out of band.
    """

    def __init__(
        self, stream: io.BytesIO, common: CommonMemory, hands_over: bool, keep: Callable[[pickle.PickleBuffer], object]
    ) -> None:
        super().__init__(stream, protocol=_PROTOCOL, buffer_callback=keep)
        self.handles: list[Handle] = []
        self._common, self._hands_over = common, hands_over
        # The numbers of handles by the addresses of their memory.
        self._handed: dict[int, int] = {}
        self._made: dict[int, Reference] = {}

    def persistent_id(self, value: object) -> Reference | None:
        return self._reference(value) if isinstance(value, Tensor) else None

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, Contract) and pickling.is_ours(type(value)):
                return pickling.reduce(value, _PROTOCOL, lambda tensor: self._reference(tensor) is not None)
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError(
                "a tensor that autograd recorded the history of cannot go to another process: return detach() of it"
            )
        if type(value) is Tensor and pickling.is_plain(value):
            holder = makers.dense({"": value}, torch.Size(()), None, None)
            return _only_entry, (holder,)
        return NotImplemented

    def _reference(self, tensor: Tensor) -> Reference | None:
        """The reference to a tensor, which has to stay alive; `None` if it has to be copied."""
        reference = self._made.get(id(tensor))
        if reference is None and (found := self._located(tensor)) is not None:
            number, address = found
            layout = (tensor.dtype, tuple(tensor.shape), tensor.stride())
            is_mapped = type(tensor) is MemoryMappedTensor
            reference = (number, tensor.data_ptr() - address, *layout, is_mapped, len(self._made))
            self._made[id(tensor)] = reference
        return reference

    def _located(self, tensor: Tensor) -> tuple[int, int] | None:
        """The number of the memory that a tensor lies in, as in a `Reference`, and where this memory begins."""
        if not _is_over_memory(tensor):
            return None
        number = self._common.number(tensor)
        if number is not None:
            return number, _first(self._common.tensors[number])
        if not self._hands_over:
            return None
        if isinstance(tensor, MemoryMappedTensor):
            block = tensor._handler
            return None if block is None else self._handed_over(block.address, lambda: (block.fd, block.nbytes), True)
        storage = tensor.untyped_storage()
        if not storage.is_shared() or storage.filename is not None:
            return None
        # With the other strategy torch would give a descriptor of a copy, unless it has a file mapped.
        if mp.get_sharing_strategy() != "file_descriptor" and Finder().of(tensor) is None:  # type: ignore[no-untyped-call]
            return None
        return self._handed_over(storage.data_ptr(), lambda: internals.share_descriptor(storage), False)

    def _handed_over(self, address: int, share: Callable[[], tuple[int, int]], is_block: bool) -> tuple[int, int]:
        if address not in self._handed:
            fd, nbytes = share()
            self.handles.append(Handle(nbytes, is_block, OwnDescriptor(fd)))
            self._handed[address] = -len(self.handles)
        return self._handed[address], address


class _Unpickler(pickle.Unpickler):
    """Makes tensors of references; arguments as for `Message.value`."""

    def __init__(self, head: bytes, buffers: list[Any], common: CommonMemory, handles: list[Handle]) -> None:
        super().__init__(io.BytesIO(head), buffers=buffers)
        self._common, self._opened = common, [handle.opened() for handle in handles]
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, reference: Reference) -> Tensor:
        number, start, dtype, shape, strides, is_mapped, which = reference
        found = self._made.get(which)
        if found is None:
            home = self._common.tensors[number] if number >= 0 else self._opened[-1 - number]
            block = _block(home)
            # Storages over a block may begin anywhere in it: that of the whole block is used.
            storage = (home if block is None else block.tensor(torch.uint8, (block.nbytes,))).untyped_storage()
            at, rest = divmod(_first(home) - storage.data_ptr() + start, dtype.itemsize)
            assert not rest, "memory is mapped at whole pages, and parts of it begin where they do at the sender"
            found = torch.empty(0, dtype=dtype, device="cpu").set_(storage, at, shape, strides)
            if is_mapped:
                assert isinstance(home, MemoryMappedTensor)
                found = wrap_like(home, found)
            self._made[which] = found
        return found


def _only_entry(holder: Contract) -> Tensor:
    only: Tensor = holder._entries[""]
    return only


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


def _is_over_memory(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but dtype, shape and strides over memory."""
    if not tensor.numel():
        return False
    if type(tensor) is MemoryMappedTensor:
        return tensor.layout is torch.strided and not (tensor.is_nested or tensor.requires_grad)
    return type(tensor) is Tensor and pickling.is_plain(tensor)


def _is_common(tensor: Tensor) -> bool:
    if not _is_over_memory(tensor) or not shared_memory.is_seen_by_others(tensor):
        return False
    # What torch maps says that it is shared whether it is or not.
    return isinstance(tensor, MemoryMappedTensor) or tensor.untyped_storage().filename is None
