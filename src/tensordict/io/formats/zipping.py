"""The zip format, as far as archives need it: an index read with suspicion, the records that are written, checksums."""

from __future__ import annotations

import functools
import re
import stat
import struct
import time
from collections.abc import Iterable
from mmap import mmap
from typing import Any, NamedTuple, Protocol

from tensordict.core.exceptions import SaveError
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
# How an archive begins.
SIGNATURES = (_LOCAL_SIGN, _END_SIGN)
# In a 16 or 32 bit field, these say that the number stands in a zip64 record.
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_ZIP64, _PADDING = 0x0001, 0x6474  # "td"
_UNIX, _PLAIN_FILE = 3, (stat.S_IFREG | 0o644) << 16
# The type of a file as the highest bits of its attributes tell it: unknown, regular, a folder.
_FILE_TYPES = (0, stat.S_IFREG >> 12, stat.S_IFDIR >> 12)
# Flags: encrypted or patched; the sizes stand behind the data; the name is UTF-8; LZMA has an end mark.
_UNREADABLE, _STREAMED, _UTF8, _LZMA_END = 0x2061, 0x0008, 0x0800, 0x0002
_VERSION, _VERSION64 = {STORED: 20, DEFLATE: 20, BZIP2: 46, LZMA: 63}, 45

# An empty component, `.` or `..`; a drive; what other systems take for a separator or the end of a name.
_UNSAFE = re.compile(r"(?:^|/)\.{0,2}(?:/|$)|^[A-Za-z]:|[\\\0]")

ALIGN = 64
"""Stored tensors begin at multiples of this."""


# --- checksums --------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def crc_of_zeros(nbytes: int) -> int:
    """The CRC-32 of this many zero bytes."""
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
    """Whether a name of an entry stays below the root, on any system."""
    return _UNSAFE.search(name) is None


# --- reading ----------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A file in an archive; `start` is where its `stored` bytes begin, which hold `size` bytes of content.

    `header` and `record` are where its two descriptions begin.
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
    """Reads the index of one archive, and makes the errors about it.

    Args:
        data: the file.
        path: of the file, for errors.
        headers: look at the header before each entry, too. Without, as of a file whose other bytes are not there yet,
            the entries begin where their headers do, until `placed` has looked.
    """

    def __init__(self, data: mmap, path: str, headers: bool = True) -> None:
        self.data = data
        self.path = path
        self._headers = headers
        self._central, self._start = b"", 0

    def bad(self, what: str, name: str | None = None) -> SaveError:
        entry = f"entry {name!r}: " if name is not None else ""
        return SaveError(f"{entry}the archive {self.path!r} is broken: {what}")

    def end(self) -> tuple[int, int, int]:
        """The number of the central records, and where they begin and end."""
        size = len(self.data)
        first = max(0, size - _END.size - _MAX16)
        tail = self.data[first:]
        at = tail.rfind(_END_SIGN)
        while at >= 0:
            if at + _END.size <= len(tail):
                found = _END.unpack_from(tail, at)
                if at + _END.size + found[7] == len(tail):
                    return self._end_at(first + at, found)
            at = tail.rfind(_END_SIGN, 0, at)
        raise SaveError(f"{self.path!r} is a file but no archive: it has no zip directory at its end, or was cut off")

    def _end_at(self, at: int, found: tuple[Any, ...]) -> tuple[int, int, int]:
        _, disk, first_disk, here, count, nbytes, start, _ = found
        stop = at
        locator = at - _LOCATOR.size
        if locator >= 0 and self.data[locator : locator + 4] == _LOCATOR_SIGN:
            _, _, stop, disks = _LOCATOR.unpack_from(self.data, locator)
            if stop + _END64.size > locator or disks > 1 or self.data[stop : stop + 4] != _END64_SIGN:
                raise self.bad("its zip64 directory is not where it says")
            _, length, _, _, disk64, first64, here64, count64, nbytes64, start64 = _END64.unpack_from(self.data, stop)
            if stop + 12 + length != locator:
                raise self.bad("its zip64 directory is not as long as it says")
            small = (disk, first_disk, here, count, nbytes, start)
            large = (disk64, first64, here64, count64, nbytes64, start64)
            limits = (_MAX16, _MAX16, _MAX16, _MAX16, _MAX32, _MAX32)
            if any(a not in (b, limit) for a, b, limit in zip(small, large, limits, strict=True)):
                raise self.bad("its two directories disagree")
            disk, first_disk, here, count, nbytes, start = large
        if disk or first_disk or here != count:
            raise self.bad("it has several parts")
        if start + nbytes != stop or count * _CENTRAL.size > nbytes:
            raise self.bad(f"a directory of {count} entries does not fit at bytes {start} to {stop}")
        return count, start, stop

    def entries(self) -> dict[str, Entry]:
        count, start, stop = self.end()
        central = self.data[start:stop]
        self._central, self._start = central, start
        found: dict[str, Entry] = {}
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > len(central):
                raise self.bad(f"its directory has fewer than the {count} entries that it says")
            entry, length = self._entry(central, at, start)
            if entry.name in found:
                raise self.bad("there are several of this name", entry.name)
            found[entry.name] = entry
            at += length
        if at != len(central):
            raise self.bad(f"its directory has more than the {count} entries that it says")
        self._check_extents(found)
        return found

    def placed(self, entry: Entry) -> Entry:
        """An entry of `entries`, knowing where its content begins: its header is looked at now.

        Raises:
            SaveError: the header is not that of the entry.
        """
        self._headers = True
        return self._entry(self._central, entry.record - self._start, self._start)[0]

    def _entry(self, central: bytes, at: int, start: int) -> tuple[Entry, int]:
        fields = _CENTRAL.unpack_from(central, at)
        sign, made_by, _, flags, method, _, _, crc, stored, size, names, extras, comments, disk, _, mode, header = (
            fields
        )
        if sign != _CENTRAL_SIGN:
            raise self.bad("its directory has fewer entries than it says")
        begin = at + _CENTRAL.size
        length = _CENTRAL.size + names + extras + comments
        raw = central[begin : begin + names]
        if at + length > len(central):
            raise self.bad("its directory is cut off within an entry")
        try:
            name = raw.decode() if flags & _UTF8 or raw.isascii() else raw.decode("cp437")
        except UnicodeDecodeError:
            raise self.bad(f"the name {raw!r} is not UTF-8, which it should be") from None
        if _UNSAFE.search(name[:-1] if name.endswith("/") and not size else name):
            raise self.bad("this name could lead out of the archive", name)
        if stored == _MAX32 or size == _MAX32 or header == _MAX32:
            extra = central[begin + names : begin + names + extras]
            size, stored, header = self._large(extra, (size, stored, header), name)
        if disk or flags & _UNREADABLE:
            raise self.bad("it is encrypted, patched or in another file", name)
        if made_by >> 8 == _UNIX and mode >> 28 not in _FILE_TYPES:
            raise self.bad("it is a link or a device, and no file", name)
        if method == STORED and stored != size:
            raise self.bad(f"it is not compressed, but has {stored} and {size} bytes", name)
        if header + _LOCAL.size > start:
            raise self.bad(f"it begins at byte {header}, outside of the entries", name)
        content = header + _LOCAL.size + names
        if self._headers:
            content = self._content(header, raw, flags, method, stored, size, name)
        if content + stored > start:
            raise self.bad(f"its {stored} bytes from {content} on do not end before the directory at {start}", name)
        return Entry(name, method, crc, stored, size, content, header, start + at), length

    def _content(self, header: int, raw: bytes, flags: int, method: int, stored: int, size: int, name: str) -> int:
        """Where the content begins, by the header before it, which must agree with the directory."""
        fields = _LOCAL.unpack_from(self.data, header)
        sign, _, own_flags, own_method, _, _, _, own_stored, own_size, names, extras = fields
        begin = header + _LOCAL.size
        if sign != _LOCAL_SIGN or own_method != method or self.data[begin : begin + names] != raw:
            raise self.bad(f"the header at byte {header} is not its", name)
        if (own_flags ^ flags) & (_UNREADABLE | _UTF8):
            raise self.bad("the flags in its header are not those in the directory", name)
        if own_stored == _MAX32 or own_size == _MAX32:
            extra = self.data[begin + names : begin + names + extras]
            own_size, own_stored, _ = self._large(extra, (own_size, own_stored, 0), name)
        if (own_stored, own_size) != (stored, size) and not (own_flags & _STREAMED and own_stored == own_size == 0):
            raise self.bad("the sizes in its header are not those in the directory", name)
        content: int = begin + names + extras
        return content

    def _large(self, extra: bytes, numbers: tuple[int, int, int], name: str) -> tuple[int, ...]:
        """The size, the stored size and the offset, where those that do not fit are taken from the zip64 record."""
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
        raise self.bad("its zip64 record is missing or too short", name)

    def _check_extents(self, found: dict[str, Entry]) -> None:
        for name in folders_of(found) & found.keys():
            raise self.bad("it is a file and a folder", name)
        last: Entry | None = None
        for entry in sorted(found.values(), key=_header_of):
            if last is not None and last.start + last.stored > entry.header:
                raise self.bad(f"it lies over the entry {last.name!r}", entry.name)
            last = entry


def folders_of(names: Iterable[str]) -> set[str]:
    """The folders that entries of these names lie in, and those around them."""
    found: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _header_of(entry: Entry) -> int:
    return entry.header


def read_index(data: mmap, path: str) -> dict[str, Entry]:
    """The entries of the archive that is mapped in `data`, by name; those of folders end with a slash.

    Every number is checked against the length of the file, and no two entries overlap.

    Raises:
        SaveError: it is no zip file, or one that does not add up; names `path` and the entry.
    """
    return ZipIndex(data, path).entries()


# --- writing ----------------------------------------------------------------------------------------------------------


class Stamp:
    """The time that entries carry."""

    def __init__(self) -> None:
        year, month, day, hour, minute, second = time.localtime()[:6]
        self.date = max(year - 1980, 0) << 9 | month << 5 | day
        self.time = hour << 11 | minute << 5 | second // 2


class EntryHeader(Protocol):
    """An entry that is written, as its two descriptions tell it; `large` for contents of 4 GiB and more."""

    name: bytes
    method: int
    size: int
    stored: int
    crc: int
    header: int
    large: bool


def header_size(name: bytes, large: bool) -> int:
    """The length of a local header without padding; `large` for contents of 4 GiB and more."""
    return _LOCAL.size + len(name) + (20 if large else 0)


def padding_to(position: int) -> int:
    """The length of the padding in a header that would end at `position`, so that it ends at a multiple of `ALIGN`."""
    missing: int = -position % ALIGN
    # The padding is a field of the header, with four bytes to say so.
    return missing if missing == 0 or missing >= 4 else missing + ALIGN


def local_header(entry: EntryHeader, stamp: Stamp, padding: int = 0) -> bytes:
    """What stands before the content of an entry."""
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


# The fields that fill up a header, by their length; see `padding_to`.
_paddings = [b"" if size < 4 else struct.pack("<2H", _PADDING, size - 4) + bytes(size - 4) for size in range(ALIGN + 4)]


def _flags(name: bytes, method: int) -> int:
    return (0 if name.isascii() else _UTF8) | (_LZMA_END if method == LZMA else 0)


def directory(entries: Iterable[EntryHeader], stamp: Stamp, position: int) -> bytes:
    """What stands at the end of an archive, at byte `position`."""
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
    """Have the descriptions of an entry in a writable map give another checksum."""
    content = struct.pack("<I", crc)
    flags = struct.unpack_from("<H", data, entry.header + 6)[0]
    if not flags & _STREAMED:
        data[entry.header + 14 : entry.header + 18] = content
    data[entry.record + 16 : entry.record + 20] = content
