"""`Archive`, the source for loaders of archives: it maps the file, and decompresses entries into memory."""

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
from typing import Any

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path, joined
from tensordict.io.formats import zipping
from tensordict.io.formats.zipping import BZIP2, DEFLATE, LZMA, METHODS, STORED, Entry
from tensordict.io.saving.checksums import crc32
from tensordict.memory import file_maps, system
from tensordict.memory.mapped import make_size_error

# The bytes that are decompressed in one step.
_STEP = 1 << 20
# The largest compression ratio that deflate can reach. A larger one in a file is an error. `_allot` limits the other
# methods.
_DEFLATE_RATIO = 1032
# The most memory that the LZMA decompressor may take. The strongest preset of LZMA needs 65 MiB.
_LZMA_MEMORY = 256 << 20


class Archive:
    """An open archive as a `Source`, whose paths begin with the absolute path of the archive.

    The map lives as long as a tensor over it.

    Args:
        path: the absolute path.
        mode: "r" maps the file copy-on-write; "r+" maps it so that writing to the tensors changes the file.
        num_threads: the number of threads that decompress ahead, if it is more than one.
        fd: a descriptor of the file, which stays open.
        entries: the index of the file, if it is known already.

    Raises:
        FileNotFoundError: the file is missing.
        SaveError: it is not an archive, or is broken.
    """

    def __init__(
        self,
        path: str,
        mode: str = "r",
        num_threads: int = 0,
        fd: int | None = None,
        entries: dict[str, Entry] | None = None,
    ) -> None:
        self.path = path
        self.writable = mode == "r+"
        self.data = _map_file(path, self.writable, fd)
        # A second map of a writable file, as a shared storage of torch.
        self._shared: torch.UntypedStorage | None = None
        self.entries = zipping.read_index(self.data, path) if entries is None else entries
        self._lock = threading.Lock()
        # The number of bytes that were decompressed into memory, which `_allot` limits to the memory of the machine.
        self._allotted = 0
        self._folders: set[str] | None = None
        self._ahead: dict[str, Future[bytearray]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads = num_threads

    # --- as a source ----------------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        """Return the content of a file after checking its checksum."""
        entry = self._find(path)
        if entry.method != STORED:
            return bytes(self.inflate(entry))
        content = self.data[entry.start : entry.start + entry.size]
        if crc32(content) != entry.crc:
            raise self._error("its content does not have the recorded checksum", entry)
        return content

    def map(self, path: str, dtype: torch.dtype, shape: tuple[int, ...], key: Path) -> Tensor:
        """Return the tensor over a file: a view of the map, if the entry is uncompressed and aligned."""
        numel = math.prod(shape)
        nbytes = numel * dtype.itemsize
        if not nbytes and path[len(self.path) + 1 :] not in self.entries:
            # The reference does not write files for tensors without elements.
            return torch.empty(shape, dtype=dtype, device="cpu")
        entry = self._find(path)
        if entry.size < nbytes:
            raise make_size_error(path, entry.size, dtype, shape, nbytes, key)
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if entry.method == STORED and entry.start % dtype.itemsize == 0:
            flat = self._map_elements(dtype, numel, entry.start)
        elif self.writable:
            how = METHODS.get(entry.method, "unknown") if entry.method != STORED else "not aligned"
            raise SaveError(
                f"entry {joined(key)!r}: {path!r} is {how}, so writing to the tensor cannot change the file: load it "
                "with mode='r', or save it again without compression"
            )
        elif entry.method == STORED:
            # Other zip tools do not align entries, so the content is copied.
            flat = torch.frombuffer(bytearray(self.data[entry.start : entry.start + nbytes]), dtype=dtype)
        else:
            flat = torch.frombuffer(self.inflate(entry), dtype=dtype, count=numel)
        return flat if len(shape) == 1 else flat.view(shape)

    map_ragged_file = map

    def exists(self, path: str) -> bool:
        """Return True if a file or a folder exists at this path."""
        return path[len(self.path) + 1 :] in self.entries or self.is_folder(path)

    def is_folder(self, path: str) -> bool:
        """Return True if a folder exists at this path."""
        return path[len(self.path) + 1 :] in self.folders()

    def folders(self) -> set[str]:
        """Return the names of all folders, nested ones too."""
        if self._folders is None:
            self._folders = zipping.list_folders(self.entries)
        return self._folders

    # --- inside ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Archive:
        compressed = [entry for entry in self._entries_to_load() if entry.method != STORED]
        if self._num_threads > 1 and compressed:
            # Loaders read the entries in the order of the file, so they are submitted in this order.
            pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="tensordict-inflate")
            self._pool = pool
            self._ahead = {entry.name: pool.submit(self._inflate, entry) for entry in compressed}
        return self

    def _entries_to_load(self) -> Iterable[Entry]:
        """Return the entries that a loader may read."""
        return self.entries.values()

    def __exit__(self, *exc_info: object) -> None:
        self._ahead = {}
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def inflate(self, entry: Entry) -> bytearray:
        """Return the content of a compressed entry in new memory."""
        ahead = self._ahead.pop(entry.name, None)
        return ahead.result() if ahead is not None else self._inflate(entry)

    def _inflate(self, entry: Entry) -> bytearray:
        self._allot(entry)
        # The bytearray grows with the content, because a broken entry may claim any size.
        content = bytearray()
        for piece in self.pieces(entry):
            content += piece
        return content

    def pieces(self, entry: Entry) -> Iterable[Any]:
        """Yield the content of an entry in pieces, and check its length and checksum after the last one.

        Raises:
            SaveError: the length or the checksum is wrong.
        """
        crc, done = 0, 0
        if entry.method != STORED:
            self._check_ratio(entry)
        for piece in self.stored_pieces(entry) if entry.method == STORED else self._decompress(entry):
            done += len(piece)
            if done > entry.size:
                break
            crc = crc32(piece, crc)
            yield piece
        if done != entry.size:
            raise self._error(
                f"it should unpack to {entry.size} bytes, and {'more' if done > entry.size else done} come", entry
            )
        if crc != entry.crc:
            raise self._error("its content does not have the recorded checksum", entry)

    def _map_elements(self, dtype: torch.dtype, numel: int, start: int) -> Tensor:
        """Return a tensor over the map, which begins at a byte of the file."""
        if not self.writable:
            return torch.frombuffer(self.data, dtype=dtype, count=numel, offset=start)
        # To send a tensor to another process, torch moves it to shared memory, unless its storage is shared already.
        # Moved out of the file, it would no longer write to the file. A tensor over a Python buffer is not shared.
        if self._shared is None:
            fd = self.data.file_map.descriptor()
            assert fd is not None
            self._shared = file_maps.map_shared_bytes(fd, len(self.data), self.path).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(self._shared, start // dtype.itemsize, (numel,), (1,))

    def stored_pieces(self, entry: Entry) -> Iterable[memoryview]:
        """Yield the bytes of an entry in the file in pieces, without checking or decompressing them."""
        end = entry.start + entry.stored
        view = memoryview(self.data)
        for start in range(entry.start, end, _STEP):
            yield view[start : min(start + _STEP, end)]

    def _decompress(self, entry: Entry) -> Iterable[bytes]:
        packed = memoryview(self.data)[entry.start : entry.start + entry.stored]
        try:
            decompressor, start = self._make_decompressor(entry, packed)
            while not decompressor.eof:
                content = packed[start : start + _STEP] if decompressor.needs_input else b""
                if decompressor.needs_input and not content:
                    raise self._error("its compressed content is cut off", entry)
                start += len(content)
                piece = decompressor.decompress(content, _STEP)
                system.drop_pages(self.data, entry.start + max(0, start - 2 * _STEP), entry.start + start)
                if piece:
                    yield piece
        except (zlib.error, OSError, EOFError, lzma.LZMAError, ValueError) as error:
            if isinstance(error, SaveError):
                raise
            raise self._error(f"its compressed content is broken ({error})", entry) from error
        if decompressor.unused_data or start < len(packed):
            raise self._error("there is more behind its compressed content", entry)

    def _make_decompressor(self, entry: Entry, packed: memoryview) -> tuple[Any, int]:
        """Return the decompressor of an entry, and the place in its bytes from which on it reads."""
        if entry.method == DEFLATE:
            return _DeflateDecompressor(), 0
        if entry.method == BZIP2:
            return bz2.BZ2Decompressor(), 0
        if entry.method == LZMA:
            if len(packed) < 9 or bytes(packed[2:4]) != b"\x05\x00":
                raise self._error("its LZMA properties are broken", entry)
            # `lzma` can limit the memory for the .lzma format only, whose head has the properties and the length, here
            # unknown.
            decompressor = lzma.LZMADecompressor(lzma.FORMAT_ALONE, memlimit=_LZMA_MEMORY)
            decompressor.decompress(bytes(packed[4:9]) + b"\xff" * 8)
            return decompressor, 9
        raise self._error(f"it is compressed by the unknown method {entry.method}", entry)

    def _check_ratio(self, entry: Entry) -> None:
        if entry.method == DEFLATE and entry.size > entry.stored * _DEFLATE_RATIO + 1024:
            raise self._error(f"{entry.stored} bytes do not unpack to {entry.size}, as it claims", entry)

    def _allot(self, entry: Entry) -> None:
        """Raise an error if the decompressed entries would not fit into the memory of the machine."""
        self._check_ratio(entry)
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with self._lock:
            self._allotted += entry.size
            if self._allotted > total:
                raise self._error(
                    f"it and the entries before it unpack to {self._allotted} bytes, and the machine has {total}; "
                    "unpack_memmap() unpacks to disk",
                    entry,
                )

    def _find(self, path: str) -> Entry:
        entry = self.entries.get(path[len(self.path) + 1 :])
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return entry

    def _error(self, what: str, entry: Entry) -> SaveError:
        return SaveError(f"entry {entry.name!r}: the archive {self.path!r} is broken: {what}")


class _DeflateDecompressor:
    """The decompressor of one deflated entry, with the interface of `bz2.BZ2Decompressor`, which keeps unused input."""

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
        # zlib may hold more output of the input that it has read. It has returned all output only if `piece` is
        # shorter than `max_length`.
        self.needs_input = len(piece) < max_length
        return piece


def _map_file(path: str, writable: bool, fd: int | None) -> file_maps.Map:
    """Map the whole file."""
    opened = fd
    if opened is None:
        # Open without blocking, so that a pipe cannot hang the loader.
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
