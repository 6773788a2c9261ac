"""Reading an archive: one map of the file, over which the tensors lie; what is compressed is read into memory."""

from __future__ import annotations

import bz2
import errno
import lzma
import math
import os
import stat
import threading
import zlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, joined
from tensordict.io.formats import zipping
from tensordict.io.formats.zipping import BZIP2, DEFLATE, LZMA, METHODS, STORED, Entry
from tensordict.memory import file_maps, system
from tensordict.memory.names import TABLE_SUFFIX

# What is inflated at once.
_STEP = 1 << 20
# Deflate makes nothing smaller than by this factor (and zip tools need no bound for the others: see `_allot`).
_DEFLATE_RATIO = 1032
# The most memory that unpacking LZMA may take for itself; its strongest preset needs 65 MiB.
_LZMA_MEMORY = 256 << 20


class Archive:
    """An archive that is open: a `Source` of loaders, under the absolute path of the archive.

    The map lives as long as a tensor over it.

    Args:
        path: the absolute path.
        mode: "r" maps it so that what is written to the tensors stays in memory, "r+" so that it goes to the file.
        num_threads: so many threads inflate ahead when it is more than one.
        fd: a descriptor to read it from, which stays open.
        entries: what the file has in it, when that is known already.
        unread: give tensors without content in the place of compressed ones.

    Raises:
        FileNotFoundError: there is none.
        SaveError: it is no archive, or one that does not add up.
    """

    def __init__(
        self,
        path: str,
        mode: str = "r",
        num_threads: int = 0,
        fd: int | None = None,
        entries: dict[str, Entry] | None = None,
        unread: bool = False,
    ) -> None:
        self.path = path
        self.writable = mode == "r+"
        self.data = _mapped(path, self.writable, fd)
        # The map once more, as torch's, of a file that is written to.
        self._shared: torch.UntypedStorage | None = None
        self.entries = zipping.read_index(self.data, path) if entries is None else entries
        self._lock = threading.Lock()
        # What has been read into memory, against which a file that unpacks to more than fits is refused.
        self._allotted = 0
        self._folders: set[str] | None = None
        self._ahead: dict[str, Future[bytearray]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = num_threads
        self._unread = unread

    # --- as a source ----------------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        """The content of a file; its checksum must be right."""
        entry = self._find(path)
        if entry.method != STORED:
            return bytes(self.inflated(entry))
        content = self.data[entry.start : entry.start + entry.size]
        if zlib.crc32(content) != entry.crc:
            raise self._bad("its checksum is not that of its content", entry)
        return content

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """The tensor over a file: a view of the map where it is stored and aligned."""
        numel = math.prod(shape)
        nbytes = numel * dtype.itemsize
        if not nbytes and path[len(self.path) + 1 :] not in self.entries:
            # The reference writes no file for a tensor without elements.
            return torch.empty(shape, dtype=dtype, device="cpu")
        entry = self._find(path)
        if entry.size < nbytes:
            raise SaveError(
                f"entry {joined(key)!r}: {path!r} has {entry.size} bytes, but shape {list(shape)} of {dtype} needs "
                f"{nbytes}; it was cut off or belongs to another save"
            )
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if entry.method == STORED and entry.start % dtype.itemsize == 0:
            flat = self._over(dtype, numel, entry.start)
        elif self.writable:
            how = METHODS.get(entry.method, "unknown") if entry.method != STORED else "not aligned"
            raise SaveError(
                f"entry {joined(key)!r}: {path!r} is {how}, so that what is written to it could not reach the file: "
                "load it with mode='r', or save it again without compression"
            )
        elif entry.method == STORED:
            # Copied, because other tools do not align.
            flat = torch.frombuffer(bytearray(self.data[entry.start : entry.start + nbytes]), dtype=dtype)
        elif self._unread and not path.endswith(TABLE_SUFFIX):
            self._check_ratio(entry)
            flat = torch.empty(numel, dtype=dtype, device="cpu")
        else:
            flat = torch.frombuffer(self.inflated(entry), dtype=dtype, count=numel)
        return flat if len(shape) == 1 else flat.view(shape)

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder."""
        return path[len(self.path) + 1 :] in self.entries or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder."""
        return path[len(self.path) + 1 :] in self.folders()

    def folders(self) -> set[str]:
        """The names of all folders, those within folders too."""
        if self._folders is None:
            self._folders = zipping.folders_of(self.entries)
        return self._folders

    # --- inside ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Archive:
        names = [entry for entry in self._to_come() if entry.method != STORED]
        if self._num_threads > 1 and names:
            # Started in the order of the file, which is that of loading.
            pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="tensordict-inflate")
            self._pool = pool
            self._ahead = {entry.name: pool.submit(self._inflate, entry) for entry in names}
        return self

    def _to_come(self) -> Iterable[Entry]:
        """What a loader may read."""
        return self.entries.values()

    def __exit__(self, *exc_info: object) -> None:
        self._ahead = {}
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def inflated(self, entry: Entry) -> bytearray:
        """The content of a compressed entry, in memory of its own."""
        ahead = self._ahead.pop(entry.name, None)
        return ahead.result() if ahead is not None else self._inflate(entry)

    def _inflate(self, entry: Entry) -> bytearray:
        self._allot(entry)
        # It grows with what is unpacked: `bytearray(entry.size)` would take all that an entry claims at once.
        content = bytearray()
        for piece in self.pieces(entry):
            content += piece
        return content

    def pieces(self, entry: Entry) -> Iterable[Any]:
        """The content in pieces; after the last one, the length and the checksum are known to be right.

        Raises:
            SaveError: they are not.
        """
        crc, done = 0, 0
        if entry.method != STORED:
            self._check_ratio(entry)
        for piece in self.stored_pieces(entry) if entry.method == STORED else self._unpacked(entry):
            done += len(piece)
            if done > entry.size:
                break
            crc = zlib.crc32(piece, crc)
            yield piece
        if done != entry.size:
            raise self._bad(
                f"it should unpack to {entry.size} bytes, and {'more' if done > entry.size else done} come", entry
            )
        if crc != entry.crc:
            raise self._bad("its checksum is not that of its content", entry)

    def _over(self, dtype: torch.dtype, numel: int, start: int) -> Tensor:
        """The elements from a byte of the file on, over the map."""
        if not self.writable:
            return torch.frombuffer(self.data, dtype=dtype, count=numel, offset=start)
        # Torch hands memory that it knows as shared over to other processes. A tensor over a buffer of Python's would
        # be moved out of the file for that, and what is written to it would not reach the file any more.
        if self._shared is None:
            fd = self.data.file_map.descriptor()
            assert fd is not None
            self._shared = file_maps.map_shared_bytes(fd, len(self.data), self.path).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(self._shared, start // dtype.itemsize, (numel,), (1,))

    def stored_pieces(self, entry: Entry) -> Iterable[memoryview]:
        """What stands in the file, in pieces; nothing is checked."""
        end = entry.start + entry.stored
        view = memoryview(self.data)
        for start in range(entry.start, end, _STEP):
            yield view[start : min(start + _STEP, end)]

    def _unpacked(self, entry: Entry) -> Iterable[bytes]:
        packed = memoryview(self.data)[entry.start : entry.start + entry.stored]
        start = 0
        try:
            unpacker = self._unpacker(entry, packed)
            while not unpacker.eof:
                content = packed[start : start + _STEP] if unpacker.needs_input else b""
                if unpacker.needs_input and not content:
                    raise self._bad("its compressed content is cut off", entry)
                start += len(content)
                piece = unpacker.decompress(content, _STEP)
                if piece:
                    yield piece
        except (zlib.error, OSError, EOFError, lzma.LZMAError, ValueError) as error:
            if isinstance(error, SaveError):
                raise
            raise self._bad(f"its compressed content is broken ({error})", entry) from error
        if unpacker.unused_data or start < len(packed):
            raise self._bad("there is more behind its compressed content", entry)

    def _unpacker(self, entry: Entry, packed: memoryview) -> _Unpacker:
        if entry.method == DEFLATE:
            return _DeflateDecompressor()
        if entry.method == BZIP2:
            return bz2.BZ2Decompressor()
        if entry.method == LZMA:
            # As an .lzma file, whose memory can be limited: its head has the properties and an unknown length.
            if len(packed) < 9 or bytes(packed[2:4]) != b"\x05\x00":
                raise self._bad("its LZMA properties are broken", entry)
            return _LzmaDecompressor(packed)
        raise self._bad(f"it is compressed by the unknown method {entry.method}", entry)

    def _check_ratio(self, entry: Entry) -> None:
        if entry.method == DEFLATE and entry.size > entry.stored * _DEFLATE_RATIO + 1024:
            raise self._bad(f"{entry.stored} bytes do not unpack to {entry.size}, as it says", entry)

    def _allot(self, entry: Entry) -> None:
        self._check_ratio(entry)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with self._lock:
            self._allotted += entry.size
            if self._allotted > total:
                raise self._bad(
                    f"it and those before unpack to {self._allotted} bytes, and the machine has {total}; "
                    "unpack_memmap() unpacks to disk",
                    entry,
                )

    def _find(self, path: str) -> Entry:
        entry = self.entries.get(path[len(self.path) + 1 :])
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return entry

    def _bad(self, what: str, entry: Entry) -> SaveError:
        return SaveError(f"entry {entry.name!r}: the archive {self.path!r} is broken: {what}")


class _Unpacker(Protocol):
    """A decompressor with the interface of `bz2.BZ2Decompressor`, which keeps the input that it has not used yet."""

    @property
    def eof(self) -> bool:
        """True once the end of the stream was reached."""
        ...

    @property
    def needs_input(self) -> bool:
        """True when `decompress` can give nothing more without more input."""
        ...

    @property
    def unused_data(self) -> bytes:
        """The input behind the end of the stream."""
        ...

    def decompress(self, data: Any, max_length: int, /) -> bytes:
        """Take more input, which is empty unless `needs_input`, and give at most `max_length` bytes of output."""
        ...


class _DeflateDecompressor:
    """The decompressor of one deflated entry."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(-zlib.MAX_WBITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, content: Any, max_length: int) -> bytes:
        piece = self._inner.decompress(content or self._inner.unconsumed_tail, max_length)
        # zlib can have taken all of the input and still hold output. Only output that leaves room in `max_length` is
        # the last output of the input so far.
        self.needs_input = len(piece) < max_length
        return piece


class _LzmaDecompressor:
    """The decompressor of one LZMA entry."""

    def __init__(self, packed: memoryview) -> None:
        self._inner = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_LZMA_MEMORY)
        self._skip = 4 + 5
        self._inner.decompress(bytes(packed[4:9]) + b"\xff" * 8)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return self._inner.needs_input

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, content: Any, max_length: int) -> bytes:
        skip = min(self._skip, len(content))
        self._skip -= skip
        return self._inner.decompress(content[skip:], max_length)


def _mapped(path: str, writable: bool, fd: int | None) -> file_maps.Map:
    """All of the file, mapped."""
    opened = fd
    if opened is None:
        # Not blocking, so that a pipe cannot hang the loader.
        opened = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | system.NONBLOCK | system.CLOEXEC)
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode):
            raise SaveError(f"{path!r} is not a regular file")
        if not status.st_size:
            raise SaveError(f"{path!r} is a file but no archive: it is empty")
        return file_maps.map_file(opened, status.st_size, path, writable)
    finally:
        if fd is None:
            os.close(opened)
