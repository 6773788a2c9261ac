"""Parcels: values on their way from one process to another, the bytes of their tensors apart from the rest.

The sender writes the tensors to a piece of anonymous memory, and the receiver has them over this memory. Little content
travels in the message itself. Tensors in memory that the receiver can see anyway are not copied; see `references`.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tensordict.core import registry
from tensordict.core.contract import Contract
from tensordict.memory import pickling, system
from tensordict.memory.files import write_bytes
from tensordict.memory.mapped import SharedBlock
from tensordict.parallel.references import Common, Handle, Referred, Referring

# Up to this many bytes of tensors are part of the message.
_INLINE = 64 << 10
# Where the bytes of a tensor begin: what every dtype can be read at.
_ALIGN = 64
_PROTOCOL = 5

_libc = system.libc
if _libc is not None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class Parcel:
    """A packed value.

    Args:
        head: what pickle made of it.
        parts: its buffers, or their lengths where they are in a memory of their own.
        nbytes: the length of this memory; 0 if there is none.
        descriptor: of this memory, taken over: a descriptor of this process, or a `DupFd` that gives one.
        handles: the shared memory that tensors lie in.
    """

    def __init__(
        self, head: bytes, parts: list[Any], nbytes: int, descriptor: Any = None, handles: Sequence[Handle] = ()
    ) -> None:
        self.head = head
        self.parts = parts
        self.nbytes = nbytes
        self.handles = list(handles)
        self._descriptor = descriptor
        self._block: SharedBlock | None = None
        # What was packed: while it is alive, so are the descriptors of its memory.
        self._kept: Any = None

    @classmethod
    def of(cls, value: Any, common: Common, inline: bool = False) -> Parcel:
        """Pack a value.

        Args:
            value: the value; it stays alive until the parcel has arrived.
            common: the memory that the receiver has too.
            inline: have all the rest in the message.

        Raises:
            RuntimeError: a tensor in it is the result of operations that autograd recorded.
            Exception: what pickle raises for values that it cannot pickle.
        """
        stream = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        referring = Referring(common, hands_over=not inline)
        _Pickler(stream, referring, buffers.append).dump(value)
        views = [buffer.raw() for buffer in buffers]
        head = stream.getvalue()
        if inline or sum(len(view) for view in views) <= _INLINE:
            # As arrays of bytes, so that the tensors over them can be written to.
            parcel = cls(head, [bytearray(view) for view in views], 0, None, referring.handles)
        else:
            lengths = [len(view) for view in views]
            parcel = cls(head, lengths, _end(lengths), None, referring.handles)
            parcel._block = SharedBlock(parcel.nbytes)
            for start, view in zip(_starts(lengths), views, strict=True):
                write_bytes(parcel._block.fd, view, start)
        parcel._kept = value
        return parcel

    @property
    def fd(self) -> int:
        """The descriptor of the memory of a parcel that was packed here."""
        assert self._block is not None
        return self._block.fd

    def value(self, common: Common) -> Any:
        """What was packed; its tensors are over the memory of the parcel, or what both processes have in common."""
        referred = Referred(common, self.handles)
        if not self.nbytes:
            return _Unpickler(self.head, self.parts, referred).load()
        if self._block is None:
            given = self._descriptor
            memory = _mapped(given if isinstance(given, int) else given.detach(), self.nbytes)
        else:
            memory = memoryview(self._block.buffer)
        views = [memory[start : start + length] for start, length in zip(_starts(self.parts), self.parts, strict=True)]
        return _Unpickler(self.head, views, referred).load()

    def __reduce__(self) -> Any:
        # How a pool sends it: the receiver asks this process for the descriptor, when it opens the parcel.
        descriptor = system.sent(self.fd) if self.nbytes else None
        handles = [handle._replace(descriptor=system.sent(handle.descriptor)) for handle in self.handles]
        return Parcel, (self.head, self.parts, self.nbytes, descriptor, handles)


def _mapped(fd: int, nbytes: int) -> memoryview:
    """Memory, mapped for as long as somebody has a view of it; takes its descriptor over.

    By the system's own call: maps of Python's keep a descriptor each, of which a process may have a thousand.
    """
    try:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"{os.strerror(code)}, to map {nbytes} bytes that a worker sent")
    finally:
        os.close(fd)
    content = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not when the program ends: there may be tensors over it.
    weakref.finalize(content, _libc.munmap, address, nbytes).atexit = False
    return memoryview(content).cast("B")


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(-(-length // _ALIGN) * _ALIGN for length in lengths)][: len(lengths)]


def _end(lengths: list[int]) -> int:
    return _starts(lengths)[-1] + lengths[-1]


class _Pickler(pickle.Pickler):
    """Plain tensors go as those in containers do: out of band, and not through `torch.save`."""

    def __init__(self, stream: io.BytesIO, referring: Referring, keep: Callable[[pickle.PickleBuffer], Any]) -> None:
        super().__init__(stream, protocol=_PROTOCOL, buffer_callback=keep)
        self._referring = referring

    def persistent_id(self, value: Any) -> Any:
        return self._referring.to(value) if isinstance(value, Tensor) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            if isinstance(value, Contract) and pickling.is_ours(type(value)):
                return pickling.by_itself(value, _PROTOCOL, self._referring.can)
            return NotImplemented
        if value.requires_grad and not value.is_leaf:
            raise RuntimeError(
                "a tensor that autograd recorded the history of cannot go to another process: return detach() of it"
            )
        if type(value) is Tensor and pickling.is_plain(value):
            holder = registry.lookup("TensorDict")._make({"": value}, torch.Size(()), None, None)
            return _only_entry, (holder,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Gives the tensors that references are to."""

    def __init__(self, head: bytes, buffers: list[Any], referred: Referred) -> None:
        super().__init__(io.BytesIO(head), buffers=buffers)
        self._referred = referred

    def persistent_load(self, reference: Any) -> Tensor:
        return self._referred.by(reference)


def _only_entry(holder: Any) -> Tensor:
    return holder._entries[""]  # type: ignore[no-any-return]
