"""The part of the zip format that archives use: checked reading of the index, writing of records, and checksums."""

from __future__ import annotations

import functools
import operator
import re
import stat
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from mmap import mmap
from typing import Any, NamedTuple

from torch import Tensor

from tensordict.core.exceptions import SaveError
from tensordict.core.keys import Path
from tensordict.io.saving.checksums import Crc32

STORED, DEFLATE, BZIP2, LZMA = 0, 8, 12, 14
METHODS = {STORED: "stored", DEFLATE: "deflate", BZIP2: "bzip2", LZMA: "lzma"}

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_LOCAL_SIGN, _CENTRAL_SIGN, _END_SIGN = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_END64_SIGN, _LOCATOR_SIGN = b"PK\6\6", b"PK\6\7"
# The first four bytes of an archive.
SIGNATURES = (_LOCAL_SIGN, _END_SIGN)
# These values of a 16 or 32 bit field mean that the number is in a zip64 record.
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ZIP64, _PADDING = 0x0001, 0x6474  # "td"
_UNIX, _PLAIN_FILE = 3, (stat.S_IFREG | 0o644) << 16
# The allowed types of a file, in the highest bits of its attributes: unknown, regular, a folder.
_FILE_TYPES = (0, stat.S_IFREG >> 12, stat.S_IFDIR >> 12)
# Flags: encrypted or patched; the sizes follow the data; the name is UTF-8; LZMA has an end mark.
_UNREADABLE, _STREAMED, _UTF8, _LZMA_END = 0x2061, 0x0008, 0x0800, 0x0002
_VERSION, _VERSION64 = {STORED: 20, DEFLATE: 20, BZIP2: 46, LZMA: 63}, 45

# An empty component, `.` or `..`; a drive; a separator of another system; the end of a C string.
_UNSAFE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|^[A-Za-z]:|[\\\0]")

ALIGN = 64
"""The alignment of uncompressed tensors in an archive, in bytes."""


# --- checksums --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def crc_of_zeros(nbytes: int) -> int:
    """Return the CRC-32 of this many zero bytes."""
    total, block = Crc32(), Crc32()
    block.update(b"\0")
    while nbytes:
        if nbytes & 1:
            total.extend(block)
        block.extend(block)
        nbytes >>= 1
    return total.value


# --- names ------------------------------------------------------------------------------------------------------------


def is_safe(name: str) -> bool:
    """Return True if the name of an entry stays below the root on every system."""
    return _UNSAFE.search(name) is None


# --- reading ----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A file in an archive.

    stored, size: the number of its bytes in the archive, and of its content.
    start: the first byte of its content in the archive.
    header, record: the first bytes of its two descriptions, before the content and in the directory.
    """

    name: str
    method: int
    crc: int
    stored: int
    size: int
    start: int
    header: int
    record: int


class ZipIndex:
    """The reader of the index of one archive.

    Args:
        data: the mapped file.
        path: the path of the file, for errors.
        headers: also read the header before each entry. Without them, for a remote file whose other bytes have not been
            fetched, `start` is a lower bound until `locate` has read the header.
    """

    def __init__(self, data: mmap, path: str, headers: bool = True) -> None:
        self.data = data
        self.path = path
        self._headers = headers
        self._central, self._start = b"", 0

    def error(self, what: str, name: str | None = None) -> SaveError:
        """Return the error for a broken archive or entry."""
        entry = f"entry {name!r}: " if name is not None else ""
        return SaveError(f"{entry}the archive {self.path!r} is broken: {what}")

    def find_directory(self) -> tuple[int, int, int]:
        """Find the directory. Returns the number of its records, and its first and last byte."""
        size = len(self.data)
        first = max(0, size - _END.size - _MAX16)
        tail = self.data[first:]
        at = tail.rfind(_END_SIGN)
        while at >= 0:
            if at + _END.size <= len(tail):
                found = _END.unpack_from(tail, at)
                if at + _END.size + found[7] == len(tail):
                    return self._read_end(first + at, found)
            at = tail.rfind(_END_SIGN, 0, at)
        raise SaveError(f"{self.path!r} is a file but no archive: it has no zip directory at its end, or was cut off")

    def _read_end(self, at: int, found: tuple[Any, ...]) -> tuple[int, int, int]:
        _, disk, first_disk, here, count, nbytes, start, _ = found
        stop = at
        locator = at - _LOCATOR.size
        if locator >= 0 and self.data[locator : locator + 4] == _LOCATOR_SIGN:
            _, _, stop, disks = _LOCATOR.unpack_from(self.data, locator)
            if stop + _END64.size > locator or disks > 1 or self.data[stop : stop + 4] != _END64_SIGN:
                raise self.error("its zip64 directory is not at the recorded place")
            _, length, _, _, disk64, first64, here64, count64, nbytes64, start64 = _END64.unpack_from(self.data, stop)
            if stop + 12 + length != locator:
                raise self.error("its zip64 directory does not have the recorded length")
            small = (disk, first_disk, here, count, nbytes, start)
            large = (disk64, first64, here64, count64, nbytes64, start64)
            limits = (_MAX16, _MAX16, _MAX16, _MAX16, _MAX32, _MAX32)
            if any(a not in (b, limit) for a, b, limit in zip(small, large, limits, strict=True)):
                raise self.error("its two directories disagree")
            disk, first_disk, here, count, nbytes, start = large
        if disk or first_disk or here != count:
            raise self.error("it has several parts")
        if start + nbytes != stop or count * _CENTRAL.size > nbytes:
            raise self.error(f"a directory of {count} entries does not fit at bytes {start} to {stop}")
        return count, start, stop

    def read_entries(self) -> dict[str, Entry]:
        """Read and check all entries, by name."""
        count, start, stop = self.find_directory()
        central = self.data[start:stop]
        self._central, self._start = central, start
        found: dict[str, Entry] = {}
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > len(central):
                raise self.error(f"its directory has fewer than the recorded {count} entries")
            entry, length = self._read_record(central, at, start)
            if entry.name in found:
                raise self.error("several entries have this name", entry.name)
            found[entry.name] = entry
            at += length
        if at != len(central):
            raise self.error(f"its directory has more than the recorded {count} entries")
        self._check_extents(found)
        return found

    def locate(self, entry: Entry) -> Entry:
        """Read the header of an entry now, and return the entry with the `start` of its content.

        Raises:
            SaveError: the header does not fit the entry.
        """
        self._headers = True
        return self._read_record(self._central, entry.record - self._start, self._start)[0]

    def _read_record(self, central: bytes, at: int, start: int) -> tuple[Entry, int]:
        """Read one record of the central directory. Return the entry, and the length of the record."""
        fields = _CENTRAL.unpack_from(central, at)
        sign, made_by, _, flags, method, _, _, crc, stored, size, names, extras, comments, disk, _, mode, header = (
            fields
        )
        if sign != _CENTRAL_SIGN:
            raise self.error("its directory has fewer entries than recorded")
        begin = at + _CENTRAL.size
        length = _CENTRAL.size + names + extras + comments
        raw = central[begin : begin + names]
        if at + length > len(central):
            raise self.error("its directory is cut off within an entry")
        try:
            name = raw.decode() if flags & _UTF8 or raw.isascii() else raw.decode("cp437")
        except UnicodeDecodeError:
            raise self.error(f"the name {raw!r} is not UTF-8, although its flag says so") from None
        if _UNSAFE.search(name[:-1] if name.endswith("/") and not size else name):
            raise self.error("this name could lead out of the archive", name)
        if stored == _MAX32 or size == _MAX32 or header == _MAX32:
            extra = central[begin + names : begin + names + extras]
            size, stored, header = self._read_zip64(extra, (size, stored, header), name)
        if disk or flags & _UNREADABLE:
            raise self.error("it is encrypted, patched or in another file", name)
        if made_by >> 8 == _UNIX and mode >> 28 not in _FILE_TYPES:
            raise self.error("it is a link or a device, and not a file", name)
        if method == STORED and stored != size:
            raise self.error(f"it is not compressed, but has {stored} and {size} bytes", name)
        if header + _LOCAL.size > start:
            raise self.error(f"it begins at byte {header}, outside of the entries", name)
        content = header + _LOCAL.size + names
        if self._headers:
            content = self._read_header(header, raw, flags, method, stored, size, name)
        if content + stored > start:
            raise self.error(f"its {stored} bytes from {content} on do not end before the directory at {start}", name)
        return Entry(name, method, crc, stored, size, content, header, start + at), length

    def _read_header(self, header: int, raw: bytes, flags: int, method: int, stored: int, size: int, name: str) -> int:
        """Check that the header before an entry agrees with the directory. Returns the first byte of the content."""
        fields = _LOCAL.unpack_from(self.data, header)
        sign, _, own_flags, own_method, _, _, _, own_stored, own_size, names, extras = fields
        begin = header + _LOCAL.size
        if sign != _LOCAL_SIGN or own_method != method or self.data[begin : begin + names] != raw:
            raise self.error(f"the header at byte {header} is not its", name)
        if (own_flags ^ flags) & (_UNREADABLE | _UTF8):
            raise self.error("the flags in its header differ from the directory", name)
        if own_stored == _MAX32 or own_size == _MAX32:
            extra = self.data[begin + names : begin + names + extras]
            own_size, own_stored, _ = self._read_zip64(extra, (own_size, own_stored, 0), name)
        if (own_stored, own_size) != (stored, size) and not (own_flags & _STREAMED and own_stored == own_size == 0):
            raise self.error("the sizes in its header differ from the directory", name)
        content: int = begin + names + extras
        return content

    def _read_zip64(self, extra: bytes, numbers: tuple[int, int, int], name: str) -> tuple[int, ...]:
        """Return the size, stored size and offset. Numbers of more than 32 bits are read from the zip64 record."""
        at = 0
        while at + 4 <= len(extra):
            kind, length = struct.unpack_from("<2H", extra, at)
            at += 4
            if kind == _ZIP64:
                missing = numbers.count(_MAX32)
                if length < 8 * missing or at + length > len(extra):
                    break
                large = iter(struct.unpack_from(f"<{missing}Q", extra, at))
                return tuple(next(large) if number == _MAX32 else number for number in numbers)
            at += length
        raise self.error("its zip64 record is missing or too short", name)

    def _check_extents(self, found: dict[str, Entry]) -> None:
        for name in list_folders(found) & found.keys():
            raise self.error("it is a file and a folder", name)
        last: Entry | None = None
        for entry in sorted(found.values(), key=operator.attrgetter("header")):
            if last is not None and last.start + last.stored > entry.header:
                raise self.error(f"it lies over the entry {last.name!r}", entry.name)
            last = entry


def list_folders(names: Iterable[str]) -> set[str]:
    """Return the folders of entries with these names, and their parents."""
    found: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def read_index(data: mmap, path: str) -> dict[str, Entry]:
    """Read the entries of a mapped archive by name. The names of folders end with a slash.

    Every number is checked against the length of the file, and no two entries overlap.

    Raises:
        SaveError: the file is not a zip file, or is broken; names `path` and the entry.
    """
    return ZipIndex(data, path).read_entries()


# --- writing ----------------------------------------------------------------------------------------------------------


class Stamp:
    """The current local time, in the form of zip entries."""

    def __init__(self) -> None:
        year, month, day, hour, minute, second = time.localtime()[:6]
        self.date = max(year - 1980, 0) << 9 | month << 5 | day
        self.time = hour << 11 | minute << 5 | second // 2


@dataclass(slots=True)
class Part:
    """A file that will be written to an archive.

    size: the number of bytes of its content.
    source: a tensor, the content itself, or the path of a file to copy.
    zero: reserve room without writing; it reads as zeros.
    """

    name: bytes
    key: Path
    size: int
    source: Tensor | bytes | str
    zero: bool = False
    align: bool = True
    # True if zip64 records describe it.
    large: bool = False
    # The first byte of its header, and the padding of the header, which `_lay_out` sets.
    header: int = 0
    padding: int = 0
    # The compression method, the stored size and the checksum, which writing sets.
    method: int = STORED
    stored: int = 0
    crc: int = 0

    @property
    def start(self) -> int:
        """The first byte of its content."""
        return self.header + header_size(self.name, self.large) + self.padding


def header_size(name: bytes, large: bool) -> int:
    """Return the length of a local header without padding; `large` for contents of 4 GiB and more."""
    return _LOCAL.size + len(name) + (20 if large else 0)


def padding_to(position: int) -> int:
    """Return the length of the padding that moves the end of a header from `position` to a multiple of `ALIGN`."""
    missing: int = -position % ALIGN
    # The padding is a field of the header, which takes at least four bytes.
    return missing if missing == 0 or missing >= 4 else missing + ALIGN


def local_header(entry: Part, stamp: Stamp, padding: int = 0) -> bytes:
    """Return the header before the content of an entry."""
    name, method, size, stored = entry.name, entry.method, entry.size, entry.stored
    version, extra = _VERSION[method], b""
    if entry.large:
        version, extra = max(version, _VERSION64), struct.pack("<2H2Q", _ZIP64, 16, size, stored)
        size = stored = _MAX32
    if padding:
        extra += _paddings[padding]
    flags = _flags(name, method)
    when, day = stamp.time, stamp.date
    fields = (version, flags, method, when, day, entry.crc, stored, size, len(name), len(extra))
    return _LOCAL.pack(_LOCAL_SIGN, *fields) + name + extra


# The padding fields of a header by their length; see `padding_to`.
_paddings = [b"" if size < 4 else struct.pack("<2H", _PADDING, size - 4) + bytes(size - 4) for size in range(ALIGN + 4)]


def _flags(name: bytes, method: int) -> int:
    return (0 if name.isascii() else _UTF8) | (_LZMA_END if method == LZMA else 0)


def directory(entries: Iterable[Part], stamp: Stamp, position: int) -> bytes:
    """Return the directory for the end of an archive, at byte `position`."""
    records: list[bytes] = []
    when, day = stamp.time, stamp.date
    for entry in entries:
        name, method, size, stored, header = entry.name, entry.method, entry.size, entry.stored, entry.header
        version, extra = _VERSION[method], b""
        if entry.large or header >= _MAX32:
            large = [number for number in (size, stored, header) if number >= _MAX32]
            extra = struct.pack(f"<2H{len(large)}Q", _ZIP64, 8 * len(large), *large) if large else b""
            version = max(version, _VERSION64)
            size, stored, header = min(size, _MAX32), min(stored, _MAX32), min(header, _MAX32)
        fields = (_UNIX << 8 | version, version, _flags(name, method), method, when, day, entry.crc, stored, size)
        lengths = (len(name), len(extra), 0, 0, 0)
        records.append(_CENTRAL.pack(_CENTRAL_SIGN, *fields, *lengths, _PLAIN_FILE, header) + name + extra)
    count, central = len(records), b"".join(records)
    end = b""
    if count >= _MAX16 or len(central) >= _MAX32 or position >= _MAX32:
        fields64 = (_VERSION64, _VERSION64, 0, 0, count, count, len(central), position)
        end = _END64.pack(_END64_SIGN, _END64.size - 12, *fields64)
        end += _LOCATOR.pack(_LOCATOR_SIGN, 0, position + len(central), 1)
    few = min(count, _MAX16)
    end += _END.pack(_END_SIGN, 0, 0, few, few, min(len(central), _MAX32), min(position, _MAX32), 0)
    return central + end


def set_crc(data: mmap, entry: Entry, crc: int) -> None:
    """Write a new checksum into the two descriptions of an entry in a writable map."""
    content = struct.pack("<I", crc)
    flags = struct.unpack_from("<H", data, entry.header + 6)[0]
    if not flags & _STREAMED:
        data[entry.header + 14 : entry.header + 18] = content
    data[entry.record + 16 : entry.record + 20] = content
