"""The writer of archives: it plans the layout first, and then writes with few large positioned writes."""

from __future__ import annotations

import bz2
import ctypes
import itertools
import lzma
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.io.formats import zipping
from tensordict.io.formats.zipping import BZIP2, DEFLATE, STORED, Part, Stamp
from tensordict.io.saving.checksums import Crc32, crc32
from tensordict.io.saving.leaf_writer import make_watch
from tensordict.io.saving.progress import NO_BAR, Progress
from tensordict.memory import files, system

# Parts below this size are written together, in system calls of at most `_VECTORS` buffers.
_LARGE = 64 << 10
_VECTORS = 1024
# Larger parts are written in pieces of this size, by at most so many threads.
_PIECE = 8 << 20
_MOST_THREADS = 4
# The window of deflate: it refers back by at most this many bytes.
_WINDOW = 32 << 10
# Parts of at least this size get zip64 records. It is below 4 GiB, because compression can make a part longer.
_ZIP64 = (1 << 32) - (64 << 20)
_MAX_NAME = 0xFFFF
_BATCH = 1 << 20


def make_part(
    name: str, key: Path, size: int, source: Tensor | bytes | str, zero: bool = False, align: bool = True
) -> Part:
    """Make a part, and check its name.

    Raises:
        SaveError: this cannot be the name of a file in an archive.
    """
    raw = name.encode()
    if len(raw) > _MAX_NAME or not zipping.is_safe(name):
        raise SaveError(
            f"entry {'.'.join(key)!r}: {name[:200]!r} cannot be the name of a file in an archive; rename the entry, or "
            "use robust_key=True, which encodes such names"
        )
    return Part(raw, key, size, source, zero, align, size >= _ZIP64)


# --- uncompressed -----------------------------------------------------------------------------------------------------


def write_plain_archive(
    fd: int, parts: Sequence[Part], num_threads: int, progress: Progress = NO_BAR, reserve: bool = True
) -> None:
    """Write an archive without compression to the empty file `fd`.

    Raises:
        OSError: the file cannot be written, for example to a full disk; names the entry.
    """
    stamp = Stamp()
    position = _lay_out(parts)
    jobs: list[Callable[[], None]] = []
    large: list[tuple[Part, list[Crc32]]] = []
    for is_small, group in itertools.groupby(parts, lambda item: item.size < _LARGE and not item.zero):
        run = list(group)
        if is_small:
            starts = range(0, len(run), _VECTORS // 2)
            jobs += [partial(_write_run, fd, run[at : at + _VECTORS // 2], stamp, progress) for at in starts]
            continue
        for item in run:
            is_whole = isinstance(item.source, Tensor) and not files.is_direct(item.source)
            starts = range(0, 0 if item.zero else item.size, sys.maxsize if is_whole else _PIECE)
            sums = [Crc32() for _ in starts]
            large.append((item, sums))
            jobs += [partial(_write_piece, fd, item, at, crc, progress) for at, crc in zip(starts, sums, strict=True)]
    if any(item.zero for item, _ in large):
        files.allocate(fd, position, reserve)
    # The file system allows one write to a file at a time, and a thread that waits keeps its processor busy. A write
    # takes about as long as the checksum of the same bytes, so more threads would only wait.
    files.run_all(jobs, min(files.choose_threads(num_threads, position), _MOST_THREADS))
    for item, sums in large:
        item.crc = _combine_sums(item, sums)
        files.write_bytes(fd, zipping.local_header(item, stamp, item.padding), item.header)
    files.write_bytes(fd, zipping.directory(parts, stamp, position), position)


def _lay_out(parts: Sequence[Part]) -> int:
    """Set the position of every part, and return the end of the last one."""
    position = 0
    for item in parts:
        item.header = position
        end = position + zipping.header_size(item.name, item.large)
        if item.align:
            item.padding = zipping.padding_to(end)
            end += item.padding
        item.stored = item.size
        position = end + item.size
    return position


def _write_run(fd: int, parts: Sequence[Part], stamp: Stamp, progress: Progress) -> None:
    """Write small consecutive parts."""
    buffers: list[Any] = []
    for item in parts:
        content = _read_content(item)
        item.crc = crc32(content)
        buffers += (zipping.local_header(item, stamp, item.padding), content)
    start = parts[0].header
    total = parts[-1].start + parts[-1].size - start
    try:
        done = system.pwritev(fd, buffers, start)
        if done < total:
            files.write_bytes(fd, b"".join(buffers)[done:], start + done)
    except OSError as error:
        raise _name_entry(error, parts[0]) from error
    progress.add(sum(item.size for item in parts))


def _read_content(item: Part) -> bytes:
    """Return a copy of the content of a small part."""
    source = item.source
    if isinstance(source, Tensor):
        if files.is_direct(source):
            return ctypes.string_at(source.data_ptr(), item.size) if item.size else b""
        return files.to_bytes(source)
    if isinstance(source, bytes):
        return source
    with open(source, "rb") as file:
        content = file.read(item.size + 1)
    if len(content) != item.size:
        raise SaveError(f"the file {source!r} had {item.size} bytes, and changes while it is packed")
    return content


def _write_piece(fd: int, item: Part, start: int, crc: Crc32, progress: Progress) -> None:
    """Write a piece of a large part, from byte `start` of it on, and compute its checksum."""
    source, stop = item.source, min(start + _PIECE, item.size)
    watch = make_watch(crc, progress)
    try:
        if not isinstance(source, Tensor):
            content = source[start:stop] if isinstance(source, bytes) else _read_range(source, start, stop)
            crc.update(content)
            files.write_bytes(fd, content, item.start + start)
            progress.add(len(content))
        else:
            files.write_tensor(fd, source, item.start + start, watch, start, stop)
    except OSError as error:
        raise _name_entry(error, item) from error


def _read_range(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        content = file.read(stop - start)
    if len(content) < stop - start:
        raise SaveError(f"the file {path!r} becomes shorter while it is packed")
    return content


def _combine_sums(item: Part, sums: Sequence[Crc32]) -> int:
    if item.zero:
        return zipping.crc_of_zeros(item.size)
    total, *rest = sums
    for crc in rest:
        total.extend(crc)
    return total.value


def _name_entry(error: OSError, item: Part) -> OSError:
    return files.named_os_error(error, "write the archive entry", item.name.decode(), item.key)


# --- compressed -------------------------------------------------------------------------------------------------------


def write_compressed_archive(
    fd: int, parts: Sequence[Part], method: int, level: int | None, num_threads: int, progress: Progress = NO_BAR
) -> None:
    """Write an archive to the empty file `fd`, whose tensors (the parts with `align`) are compressed.

    Raises:
        OSError: the file cannot be written, for example to a full disk; names the entry.
    """
    stamp = Stamp()
    position = 0
    threads = num_threads if method == DEFLATE else 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tensordict-deflate") if threads > 1 else None
    try:
        for item in parts:
            item.header = position
            item.method = method if item.align else STORED
            try:
                _write_compressed_part(fd, item, level, pool, progress)
                header = zipping.local_header(item, stamp)
                files.write_bytes(fd, header, item.header)
            except OSError as error:
                raise _name_entry(error, item) from error
            position = item.start + item.stored
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    files.write_bytes(fd, zipping.directory(parts, stamp, position), position)


def _write_compressed_part(
    fd: int, item: Part, level: int | None, pool: ThreadPoolExecutor | None, progress: Progress
) -> None:
    if item.method == STORED:
        content = _read_content(item)
        files.write_bytes(fd, content, item.start)
        item.crc, item.stored = crc32(content), item.size
        progress.add(item.size)
        return
    stream, head = _make_compressor(item.method, level, pool)

    def add(view: bytes | memoryview) -> None:
        # Another thread may change the tensor.
        content = bytes(view)
        item.crc = crc32(content, item.crc)
        append(stream.compress(content))
        progress.add(len(content))

    def append(content: bytes) -> None:
        files.write_bytes(fd, content, item.start + item.stored)
        item.stored += len(content)

    append(head)
    source = item.source
    if isinstance(source, Tensor):
        files.show_content(source, add)
    elif isinstance(source, bytes):
        add(source)
    else:
        for start in range(0, item.size, _BATCH):
            add(_read_range(source, start, min(start + _BATCH, item.size)))
    append(stream.flush())


def _make_compressor(method: int, level: int | None, pool: ThreadPoolExecutor | None) -> tuple[Any, bytes]:
    """Return a compressor, and the bytes before its output."""
    if method == DEFLATE:
        return _DeflateCompressor(level, pool), b""
    if method == BZIP2:
        return bz2.BZ2Compressor(9 if level is None else level), b""
    properties = lzma.compress(b"", lzma.FORMAT_ALONE, preset=level)[:5]
    filters = [{"id": lzma.FILTER_LZMA1, "preset": lzma.PRESET_DEFAULT if level is None else level}]
    # The head of a zip entry has the version, the length of the properties, and the properties.
    return lzma.LZMACompressor(lzma.FORMAT_RAW, filters=filters), b"\x09\x04\x05\x00" + properties


class _DeflateCompressor:
    """A compressor of one raw deflate stream, whose pieces several threads compress."""

    def __init__(self, level: int | None, pool: ThreadPoolExecutor | None) -> None:
        self._level = zlib.Z_DEFAULT_COMPRESSION if level is None else level
        self._pool = pool
        self._window = b""
        self._pending: bytes | None = None
        self._futures: deque[Future[bytes]] = deque()

    def compress(self, content: bytes) -> bytes:
        """Add the next piece, and return the compressed bytes that are ready."""
        ready = b"" if self._pending is None else self._next(False)
        self._pending = content
        return ready

    def flush(self) -> bytes:
        """Return the rest of the stream."""
        return self._next(True) + b"".join(future.result() for future in self._futures)

    def _next(self, last: bool) -> bytes:
        content = self._pending or b""
        window, self._window = self._window, content[-_WINDOW:]
        if self._pool is None:
            return _deflate(content, window, self._level, last)
        self._futures.append(self._pool.submit(_deflate, content, window, self._level, last))
        # Eight waiting pieces keep the threads busy.
        return self._futures.popleft().result() if len(self._futures) > 8 else b""


def _deflate(content: bytes, window: bytes, level: int, last: bool) -> bytes:
    """Compress one piece of a stream. `window` is the end of the previous piece, which deflate may refer back to."""
    if window:
        deflater = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, zdict=window)
    else:  # zlib refuses an empty dictionary.
        deflater = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflater.compress(content) + deflater.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
