"""Files mapped in one piece, and how a container over such a map goes to another process: as a descriptor of the file.

A shared map is the same memory on both sides. A private map is sent as a fork would leave it: the receiver maps the
file privately too and finds what the sender had, and what either of them writes from then on stays with them. So the
pages that the sender has written to go along; the kernel knows which these are.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tensordict.core import torch_internals as internals
from tensordict.core.exceptions import SaveError
from tensordict.memory import kernel, rows, system

# Bytes of a map: the first one, and their content.
Piece = tuple[int, bytes]


# All maps of this process, by their addresses.
_known: dict[int, FileMap] = {}


class FileMap:
    """The first bytes of a file, mapped in this process. It does not keep the map alive.

    Args:
        start: the address at which the map begins.
        nbytes: its size.
        path: the absolute path of the file.
        status: that of the file.
        storage: the storage of torch's that the map is; `None` for one of Python's.
        fd: a descriptor of the file, which is taken over. A map without one asks for the path when it needs one.
    """

    def __init__(
        self,
        start: int,
        nbytes: int,
        path: str,
        status: os.stat_result,
        storage: torch.UntypedStorage | None = None,
        fd: int | None = None,
    ) -> None:
        self.start, self.nbytes, self.path = start, nbytes, path
        self.shared = storage is not None or fd is not None
        self._file = (status.st_dev, status.st_ino)
        # An address alone would not do: torch may unmap the memory of a storage before it drops the storage.
        self._storage_id = None if storage is None else internals.storage_id(storage)
        self._storage = None if storage is None else weakref.ref(storage)
        self._fd: int | None = None
        if fd is not None:
            self._keep(fd)
        _known[start] = self

    def _keep(self, fd: int) -> None:
        # Until the map is gone: a process that is spawned inherits it later than it is asked for.
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage of torch's; `None` for a map of Python's."""
        return None if self._storage is None else self._storage()

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage, which begins within the map, is over it."""
        return self._storage_id is None or self._storage_id == internals.storage_id(storage)

    def forget(self, known: dict[int, FileMap] = _known) -> None:
        """The map is about to end."""
        # Bound when it was defined: a map that outlives this module, as Python exits, finds no names in it any more.
        if known.get(self.start) is self:
            del known[self.start]

    def descriptor(self) -> int | None:
        """A descriptor of the file, which stays ours; `None` if the file is not to be had any more.

        Raises:
            SaveError: the file has become shorter than the map.
        """
        storage = self.storage
        if self._fd is None and storage is None:
            self._open()
        fd: int | None = self._fd if storage is None else internals.share_descriptor(storage)[0]
        if fd is None:
            return None
        length = os.fstat(fd).st_size
        if length < self.nbytes:
            raise SaveError(f"the file {self.path!r} was cut off: {self.nbytes} bytes are mapped, and it has {length}")
        return fd

    def _open(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY | system.NONBLOCK | system.CLOEXEC)
        except OSError:
            # Deleted, or not ours any more: what is mapped is still there.
            return
        status = os.fstat(fd)
        # While it is mapped, no other file can have its number.
        if (status.st_dev, status.st_ino) == self._file:
            self._keep(fd)
        else:
            os.close(fd)

    def pieces(self) -> list[Piece]:
        """The pages that were written to; all in one where the kernel does not tell."""
        written = kernel.written_pages(self.start, self.nbytes)
        if written is None:
            return self.whole()
        return [(first, self._content(first, stop)) for first, stop in written]

    def whole(self) -> list[Piece]:
        """All of it, as one piece."""
        return [(0, self._content(0, self.nbytes))]

    def _content(self, first: int, stop: int) -> bytes:
        return ctypes.string_at(self.start + first, min(stop, self.nbytes) - first)


class Finder:
    """The maps that there are at the moment, to look tensors up in. It is falsy when there are none."""

    def __init__(self) -> None:
        found = sorted(_known.copy().items())
        self._starts = [start for start, _ in found]
        self._maps = [file_map for _, file_map in found]

    def __bool__(self) -> bool:
        return bool(self._maps)

    def of(self, tensor: Tensor) -> FileMap | None:
        """The map that a strided CPU tensor lies in."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        at = bisect.bisect_right(self._starts, start) - 1
        if at < 0 or start >= self._starts[at] + self._maps[at].nbytes or not self._maps[at].has(storage):
            return None
        return self._maps[at]


class Map(mmap.mmap):
    """A map of Python's that is a `FileMap`."""

    __slots__ = ("file_map",)
    file_map: FileMap

    def __del__(self) -> None:
        # Before it is unmapped, and not after, as the callback of a weak reference would be.
        if hasattr(self, "file_map"):
            self.file_map.forget()


def mapped(fd: int, nbytes: int, path: str, writable: bool = False) -> Map:
    """Map the first bytes of a file, which must be that long.

    Args:
        fd: a descriptor of the file, which stays open.
        nbytes: how many; at least 1.
        path: the absolute path of the file.
        writable: have what is written to the map be written to the file; otherwise it stays in this process.
    """
    content = Map(fd, nbytes) if writable else system.map_privately(fd, nbytes, kind=Map)
    start = ctypes.addressof(ctypes.c_char.from_buffer(content))
    content.file_map = FileMap(start, nbytes, path, os.fstat(fd), fd=os.dup(fd) if writable else None)
    rows.remember(content, start, nbytes)
    return content


def bytes_of(fd: int, nbytes: int, path: str) -> Tensor:
    """The first bytes of a file as a tensor over a private map; arguments as for `mapped`."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(mapped(fd, nbytes, path), dtype=torch.uint8)


def shared_bytes_of(fd: int, nbytes: int, path: str) -> Tensor:
    """The first bytes of a file as a tensor over a shared map; arguments as for `mapped`.

    Torch takes it for shared memory, and hands it over to other processes by itself.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        # It has a descriptor of its own.
        storage = internals.new_shared_storage_over(fd, nbytes)
    except RuntimeError as error:
        raise SaveError(f"cannot map the file {path!r}: {error}") from error
    return _over(storage, path, os.fstat(fd))


def _over(storage: torch.UntypedStorage, path: str, status: os.stat_result) -> Tensor:
    start, nbytes = storage.data_ptr(), storage.nbytes()
    known = _known.get(start)
    if known is None or not known.has(storage):
        file_map = FileMap(start, nbytes, path, status, storage)
        weakref.finalize(storage, file_map.forget)
        rows.remember(storage, start, nbytes)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


# --- to another process -----------------------------------------------------------------------------------------------


def _reduce(file_map: FileMap) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    """How `multiprocessing` sends a map; what arrives are its bytes, as a tensor."""
    fd = file_map.descriptor()
    if fd is None:
        return _copied, (file_map.whole(),)
    if not file_map.shared:
        return _received, (system.sent(fd), file_map.nbytes, file_map.path, file_map.pieces())
    if file_map.storage is not None:
        # As torch does, so that what comes back from there is known. It does so with its "file_descriptor" strategy
        # only; with the other one it would move the bytes out of the file.
        known = reductions.StorageWeakRef(file_map.storage)  # type: ignore[no-untyped-call]
        reductions.shared_cache[reductions.fd_id(fd)] = known  # type: ignore[no-untyped-call]
    return _received_shared, (system.sent(fd), file_map.nbytes, file_map.path)


def _copied(pieces: list[Piece]) -> Tensor:
    return torch.frombuffer(bytearray(pieces[0][1]), dtype=torch.uint8)


def _received(descriptor: system.Descriptor, nbytes: int, path: str, pieces: list[Piece]) -> Tensor:
    fd = descriptor.detach()
    try:
        storage = bytes_of(fd, nbytes, path)
    finally:
        os.close(fd)
    for start, content in pieces:
        ctypes.memmove(storage.data_ptr() + start, content, len(content))
    return storage


def _received_shared(descriptor: object, nbytes: int, path: str) -> Tensor:
    storage = reductions.rebuild_storage_fd(torch.UntypedStorage, descriptor, nbytes)  # type: ignore[no-untyped-call]
    return _over(storage, path, os.fstat(internals.share_descriptor(storage)[0]))


ForkingPickler.register(FileMap, _reduce)
