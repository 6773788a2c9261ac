"""Records of JSON in files that may be cut off: each line has a checksum of all lines up to it.

A line is `CRC JSON`: eight hexadecimal digits, a space, and a JSON array. The CRC-32 covers the JSON of all lines of
the file up to this one, so a reader notices a line that is missing, changed or from elsewhere.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any


def to_line(item: list[Any], crc: int) -> tuple[bytes, int]:
    """Encode a record as a line; return the line and the CRC-32 after it.

    Args:
        item: a JSON array.
        crc: the CRC-32 of the previous lines.
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


def read_records(
    content: bytes,
    crc: int,
    take: Callable[[list[Any]], object],
    take_text: Callable[[bytes], bool] = lambda text: False,
) -> tuple[int, int, str]:
    """Decode lines up to the first damaged one.

    Args:
        content: the bytes, which may be anything.
        crc: the CRC-32 of the lines before them.
        take: receives each record, and raises a `ValueError` if it is invalid.
        take_text: receives the JSON of each record before that, and returns True if it has taken the record. Decoding
            JSON takes most of the time.

    Returns:
        the number of bytes of the sound lines, the CRC-32 after them, and a description of the damage, which is empty
        if all lines are sound.
    """
    end = 0
    while end < len(content):
        stop = content.find(b"\n", end)
        if stop < 0:
            return end, crc, "the line is cut off"
        text = content[end + 9 : stop]
        new = zlib.crc32(text, crc)
        if content[end : end + 9] != b"%08x " % new:
            return end, crc, "its checksum is wrong"
        try:
            if not take_text(text):
                item = json.loads(text)
                if type(item) is not list:
                    raise ValueError("it holds no JSON array")
                take(item)
        except (ValueError, RecursionError) as error:
            return end, crc, str(error)
        crc, end = new, stop + 1
    return end, crc, ""
