"""Checksums of leaves: one as it is written, and one of a file that is there."""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tensordict.core.exceptions import SaveError
from tensordict.memory import files, system

# As zlib measures a polynomial: bit 31 is the constant term.
_POLYNOMIAL = 0xEDB88320
_PIECE = 4 << 20

Buffer = bytes | memoryview


class Checksum(Protocol):
    """What takes bytes in order and gives their checksum."""

    def update(self, data: Buffer, /) -> None:
        """Take the bytes that follow."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in hexadecimal."""
        ...


class Crc32:
    """CRC-32 as in zip files: the fastest in the standard library (4.2 GB/s where SHA-256 has 1.8), against accidents.

    Unlike others, that of two pieces follows from those of the pieces, which threads compute at the same time.
    """

    def __init__(self) -> None:
        self.value = 0
        self.length = 0

    def update(self, data: Buffer, /) -> None:
        """Take the bytes that follow."""
        self.value = zlib.crc32(data, self.value)
        self.length += len(data)

    def extend(self, other: Crc32) -> None:
        """Take the bytes that `other` has taken."""
        self.value = _product(_power(8 * other.length), self.value) ^ other.value
        self.length += other.length

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in hexadecimal."""
        return f"{self.value:08x}"


def algorithm(checksum: bool | str) -> str:
    """The name of the algorithm that `checksum=` asks for; empty for none.

    Raises:
        ValueError: there is no such algorithm.
    """
    if checksum is True:
        return "crc32"
    if checksum is False:
        return ""
    if checksum not in ("crc32", "sha256", "blake2b"):
        raise ValueError(f"checksum must be True, False, 'crc32', 'sha256' or 'blake2b', got {checksum!r}")
    return checksum


def new(name: str) -> Checksum:
    """A checksum of no bytes yet."""
    return Crc32() if name == "crc32" else hashlib.new(name)


def text(name: str, checksum: Checksum) -> str:
    """The form that a file keeps."""
    return f"{name}:{checksum.hexdigest()}"


@dataclass(slots=True)
class Recorded:
    """A checksum that a file keeps of a part of it.

    entry: what errors name.
    start, nbytes: the part.
    checksum: as it was read: anything.
    """

    entry: str
    start: int
    nbytes: int
    checksum: object


def differs(
    path: str,
    recorded: object,
    add: Callable[[int], None] | None = None,
    start: int = 0,
    nbytes: int | None = None,
) -> str:
    """What is wrong with the content of a file, given the checksum recorded for it; empty for nothing.

    Args:
        path: the file.
        recorded: as it was read: anything.
        add: is told of every byte that is read.
        start: where the part of the file begins that has the checksum.
        nbytes: its length; `None` for all that there is.

    Raises:
        OSError: the file cannot be read.
    """
    name, _, expected = recorded.partition(":") if isinstance(recorded, str) else ("", "", "")
    try:
        checksum = new(algorithm(name))
    except ValueError:
        return f"its recorded checksum is {recorded!r:.80}, of no known algorithm"
    with files.closing(os.open(path, os.O_RDONLY | system.CLOEXEC)) as fd:
        stop = sys.maxsize if nbytes is None else start + nbytes
        while piece := system.pread(fd, min(_PIECE, stop - start), start):
            checksum.update(piece)
            start += len(piece)
            if add is not None:
                add(len(piece))
    found = checksum.hexdigest()
    return "" if found == expected else f"its {name} checksum is {found}, and {expected:.128} was recorded"


def of_pieces(pieces: list[Checksum]) -> Checksum:
    """The checksum of bytes whose pieces were taken one by one, in order.

    Raises:
        SaveError: the algorithm cannot do that.
    """
    first, *rest = pieces
    for piece in rest:
        if not isinstance(first, Crc32) or not isinstance(piece, Crc32):
            raise SaveError("only crc32 checksums of pieces give that of the whole")
        first.extend(piece)
    return first


def _product(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo that of CRC-32."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


def _power(exponent: int) -> int:
    """x to the power of `exponent`, modulo the polynomial of CRC-32."""
    result, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _product(square, result)
        square = _product(square, square)
        exponent >>= 1
    return result
