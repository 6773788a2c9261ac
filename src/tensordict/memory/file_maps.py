"""Maps of whole files, and their way to other processes: as a descriptor of the file, without copying.

A shared map is the same memory on both sides. A private map arrives as a fork would leave it: the receiver maps the
file privately and finds the content that the sender had, and later writes stay in the process that makes them. So the
sender adds the pages that it has written to, which the kernel knows.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from tensordict.core import torch_internals as internals
from tensordict.core.exceptions import SaveError
from tensordict.memory import kernel, rows, system
from tensordict.memory.file_source import FileSource

# Bytes of a map: the position of the first one, and the content.
Piece = tuple[int, bytes]


# All maps of this process, by their addresses.
_known: dict[int, FileMap] = {}


class FileMap:
    """A map of the first bytes of a file in this process. This object does not keep the map alive.

    Args:
        start: the address at which the map begins.
        nbytes: its size.
        path: the absolute path of the file.
        status: the status of the file.
        storage: the torch storage over the map; `None` for an `mmap` of Python's.
        fd: a descriptor of the file, which this object takes over. Without one, the file is opened when needed.

    Attributes:
        file: the device and the inode.
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
        self.file = (status.st_dev, status.st_ino)
        # The address alone does not suffice: torch may unmap the memory of a storage before it drops the storage.
        self._storage_id = None if storage is None else internals.storage_id(storage)
        self._storage = None if storage is None else weakref.ref(storage)
        self._fd: int | None = None
        if fd is not None:
            self._keep(fd)
        _known[start] = self

    def _keep(self, fd: int) -> None:
        # Keep the descriptor until the map is gone, because a spawned process inherits it late.
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The torch storage over the map; `None` for an `mmap` of Python's."""
        return None if self._storage is None else self._storage()

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Return True if a storage that begins within the map is part of it."""
        return self._storage_id is None or self._storage_id == internals.storage_id(storage)

    def forget(self, known: dict[int, FileMap] = _known) -> None:
        """Remove this map from the known ones; called before it is unmapped."""
        # `known` is bound at definition: when Python exits, the globals of this module may be gone before the map.
        if known.get(self.start) is self:
            del known[self.start]

    def descriptor(self) -> int | None:
        """Return a descriptor of the file, which this object keeps; `None` if the file is gone.

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
            # The file was deleted, or this process lost the right to read it. The map still works.
            return
        status = os.fstat(fd)
        # No other file can get this inode number while the file is mapped.
        if (status.st_dev, status.st_ino) == self.file:
            self._keep(fd)
        else:
            os.close(fd)

    def pieces(self) -> list[Piece]:
        """Return the pages that were written to; everything, as one piece, if that is unknown."""
        written = kernel.find_written_pages(self.start, self.nbytes)
        if written is None:
            return self.whole()
        return [(first, self._content(first, stop)) for first, stop in written]

    def whole(self) -> list[Piece]:
        """Return the whole content as one piece."""
        return [(0, self._content(0, self.nbytes))]

    def _content(self, first: int, stop: int) -> bytes:
        return ctypes.string_at(self.start + first, min(stop, self.nbytes) - first)


class Finder:
    """Finds the map that a tensor lies in, among the maps of this moment. Falsy without maps."""

    def __init__(self) -> None:
        found = sorted(_known.copy().items())
        self._starts = [start for start, _ in found]
        self._maps = [file_map for _, file_map in found]

    def __bool__(self) -> bool:
        return bool(self._maps)

    def of(self, tensor: Tensor) -> FileMap | None:
        """Return the map that a strided CPU tensor lies in; `None` if it lies in none."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        at = bisect.bisect_right(self._starts, start) - 1
        if at < 0 or start >= self._starts[at] + self._maps[at].nbytes or not self._maps[at].has(storage):
            return None
        return self._maps[at]


class Map(mmap.mmap):
    """An `mmap` of Python's with its `FileMap`."""

    __slots__ = ("file_map",)
    file_map: FileMap

    def __del__(self) -> None:
        # This runs before the memory is unmapped; the callback of a weak reference would run after.
        if hasattr(self, "file_map"):
            self.file_map.forget()


def map_file(fd: int, nbytes: int, path: str, writable: bool = False) -> Map:
    """Map the first bytes of a file, which must be that long.

    Args:
        fd: a descriptor of the file, which stays open.
        nbytes: the number of bytes, at least 1.
        path: the absolute path of the file.
        writable: writes to the map reach the file; otherwise they stay in this process.
    """
    content = Map(fd, nbytes) if writable else system.map_privately(fd, nbytes, kind=Map)
    start = ctypes.addressof(ctypes.c_char.from_buffer(content))
    content.file_map = FileMap(start, nbytes, path, os.fstat(fd), fd=os.dup(fd) if writable else None)
    rows.register_map(content, start, nbytes)
    return content


def map_bytes(fd: int, nbytes: int, path: str) -> Tensor:
    """Return the first bytes of a file as a tensor over a private map. Arguments as for `map_file`."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(map_file(fd, nbytes, path), dtype=torch.uint8)


def map_shared_bytes(fd: int, nbytes: int, path: str) -> Tensor:
    """Return the first bytes of a file as a tensor over a shared map. Arguments as for `map_file`.

    Torch treats the result as shared memory and sends it to other processes by itself.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        # The storage duplicates the descriptor.
        storage = internals.new_shared_storage_over(fd, nbytes)
    except RuntimeError as error:
        raise SaveError(f"cannot map the file {path!r}: {error}") from error
    return _view_storage(storage, path, os.fstat(fd))


def _view_storage(storage: torch.UntypedStorage, path: str, status: os.stat_result) -> Tensor:
    start, nbytes = storage.data_ptr(), storage.nbytes()
    known = _known.get(start)
    if known is None or not known.has(storage):
        file_map = FileMap(start, nbytes, path, status, storage)
        weakref.finalize(storage, file_map.forget)
        rows.register_map(storage, start, nbytes)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


# --- mapping again ----------------------------------------------------------------------------------------------------


class FilePlace(NamedTuple):
    """The place of a tensor in a file: the path, the first byte, and what tells the file from others."""

    path: str
    offset: int
    identity: tuple[int, ...]


def find_place(tensor: Tensor, maps: Finder) -> FilePlace | None:
    """Return the place of a contiguous tensor in the file that it maps; `None` if the file is unknown or replaced."""
    source = getattr(tensor, "_source", None)
    if isinstance(source, FileSource):
        path, file, offset = source.path, (source.device, source.inode), int(tensor.storage_offset()) * tensor.itemsize
    elif (found := maps.of(tensor)) is not None:
        path, file, offset = found.path, found.file, tensor.data_ptr() - found.start
    else:
        return None
    identity = identify_file(path)
    return FilePlace(path, offset, identity) if identity[:2] == file else None


def identify_file(file: str | int) -> tuple[int, ...]:
    """Return the device, inode, size and time of the last change of a path or an open file; zeros if it is missing."""
    try:
        status = os.stat(file)
    except OSError:
        return (0, 0, 0, 0)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


# --- to another process -----------------------------------------------------------------------------------------------


def _reduce(file_map: FileMap) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
    """Describe a map for `multiprocessing`. The receiver gets its bytes as a tensor."""
    fd = file_map.descriptor()
    if fd is None:
        return _copy_pieces, (file_map.whole(),)
    if not file_map.shared:
        return _receive_private, (system.send_descriptor(fd), file_map.nbytes, file_map.path, file_map.pieces())
    if file_map.storage is not None:
        # Torch does this, too, so that it recognizes the storage if it comes back. It does so only with its
        # "file_descriptor" strategy; the other strategy would move the bytes out of the file.
        known = reductions.StorageWeakRef(file_map.storage)  # type: ignore[no-untyped-call]
        reductions.shared_cache[reductions.fd_id(fd)] = known  # type: ignore[no-untyped-call]
    return _receive_shared_map, (system.send_descriptor(fd), file_map.nbytes, file_map.path)


def _copy_pieces(pieces: list[Piece]) -> Tensor:
    return torch.frombuffer(bytearray(pieces[0][1]), dtype=torch.uint8)


def _receive_private(descriptor: system.Descriptor, nbytes: int, path: str, pieces: list[Piece]) -> Tensor:
    fd = descriptor.detach()
    try:
        storage = map_bytes(fd, nbytes, path)
    finally:
        os.close(fd)
    for start, content in pieces:
        ctypes.memmove(storage.data_ptr() + start, content, len(content))
    return storage


def _receive_shared_map(descriptor: object, nbytes: int, path: str) -> Tensor:
    storage = reductions.rebuild_storage_fd(torch.UntypedStorage, descriptor, nbytes)  # type: ignore[no-untyped-call]
    return _view_storage(storage, path, os.fstat(internals.share_descriptor(storage)[0]))


ForkingPickler.register(FileMap, _reduce)
