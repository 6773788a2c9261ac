"""Records of JSON in files that may be cut off: each line carries a checksum of all lines up to it.

A line is `CRC JSON`: eight hexadecimal digits, a space, and a JSON array. The CRC-32 covers the JSON of all lines of
the file up to this one, so a reader notices a line that is missing, changed or from elsewhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Sound:
    """The sound lines at the beginning of some bytes.

    Args:
        end: the number of their bytes.
        crc: the CRC-32 after them.
        problem: why reading stopped before the end; empty when all lines are sound.
    """

    end: int = 0
    crc: int = 0
    problem: str = ""


def to_line(item: list[Any], crc: int) -> tuple[bytes, int]:
    """Encode a record as a line; return the line and the CRC-32 after it.

    Args:
        item: a JSON array.
        crc: the CRC-32 of the lines before.
    """
    text = json.dumps(item, separators=(",", ":")).encode()
    crc = zlib.crc32(text, crc)
    return b"%08x %s\n" % (crc, text), crc


def to_file(items: list[list[Any]]) -> bytes:
    """Encode records as the content of a whole file."""
    crc, content = 0, bytearray()
    for item in items:
        line, crc = to_line(item, crc)
        content += line
    return bytes(content)


def read_records(content: bytes, crc: int, take: Callable[[list[Any]], None]) -> Sound:
    """Decode lines up to the first one that is not sound.

    Args:
        content: the bytes, which may be anything.
        crc: the CRC-32 of the lines before them.
        take: is called with each record; a `ValueError` says that the record is wrong.
    """
    found = Sound(0, crc)
    while found.end < len(content):
        stop = content.find(b"\n", found.end)
        if stop < 0:
            found.problem = "the line is cut off"
            break
        text = content[found.end + 9 : stop]
        crc = zlib.crc32(text, found.crc)
        if content[found.end : found.end + 9] != b"%08x " % crc:
            found.problem = "its checksum is wrong"
            break
        try:
            item = json.loads(text)
            if type(item) is not list:
                raise ValueError("it holds no JSON array")
            take(item)
        except (ValueError, RecursionError) as error:
            found.problem = str(error)
            break
        found.crc, found.end = crc, stop + 1
    return found
