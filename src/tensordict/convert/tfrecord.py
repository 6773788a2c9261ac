"""Reading TFRecord files of `tf.train.Example` messages, without TensorFlow.

A file is a sequence of records, each with its length, its content and checksums of both; see "TFRecords format details"
in https://www.tensorflow.org/tutorials/load_data/tfrecord. The content is a message of Protocol Buffers; see
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require

_HEADER = struct.Struct("<QI")
# Protocol Buffers cannot hold larger messages.
_LARGEST = 1 << 31
# Kinds of fields in a message.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# The values of a feature: an array of float32 or int64, or a list of bytes; `None` if it has no values.
Values = np.ndarray[Any, np.dtype[Any]] | list[bytes] | None


def iterate_records(path: str) -> Iterator[bytes]:
    """Yield the records of a file, one in memory at a time.

    Raises:
        ModuleNotFoundError: google-crc32c is missing; the error names the extra.
        SaveError: a record is cut short, or its checksum differs; the error names the path and the record.
    """
    crc32c = require("google_crc32c", "rlds").value
    left, number = os.path.getsize(path), 0

    def check(content: bytes, expected: int, what: str) -> bytes:
        crc = crc32c(content)
        if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF != expected:
            raise SaveError(f"{path!r}: the checksum of {what} of record {number} differs: the file is damaged")
        return content

    with open(path, "rb") as file:
        while left:
            header = _read(file, _HEADER.size, path, number)
            length, crc = _HEADER.unpack(header)
            check(header[:8], crc, "the length")
            left -= _HEADER.size + length + 4
            if left < 0 or length > _LARGEST:
                raise SaveError(f"{path!r} ends within record {number}, which has {length:,} bytes")
            content = _read(file, length, path, number)
            yield check(content, int.from_bytes(_read(file, 4, path, number), "little"), "the content")
            number += 1


def _read(file: BinaryIO, size: int, path: str, number: int) -> bytes:
    found = file.read(size)
    if len(found) != size:
        raise SaveError(f"{path!r} ends within record {number}")
    return found


def parse_example(record: bytes) -> dict[str, Values]:
    """Parse a message `tf.train.Example`, and return its features by name.

    Raises:
        ValueError: the message is broken.
    """
    features: dict[str, Values] = {}
    for number, content in _iterate_fields(memoryview(record)):
        if number != 1:
            continue
        for entry_number, entry in _iterate_fields(content):
            if entry_number == 1:
                parts = dict(_iterate_fields(entry))
                features[str(parts.get(1, b""), "utf-8")] = _parse_feature(parts.get(2, memoryview(b"")))
    return features


def _parse_feature(feature: memoryview) -> Values:
    found: Values = None
    for kind, content in _iterate_fields(feature):
        # A list of numbers is one packed field, or one field for each number; their bytes are the same.
        values = [bytes(value) for number, value in _iterate_fields(content) if number == 1]
        if kind == 1:
            found = values
        elif kind == 2:
            found = np.frombuffer(b"".join(values), "<f4")
        elif kind == 3:
            found = _parse_integers(b"".join(values))
    return found


def _iterate_fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field of a message."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        start = at
        if tag & 7 == _VARINT:
            _, at = _read_varint(message, at)
        elif tag & 7 == _BYTES:
            length, start = _read_varint(message, at)
            at = start + length
        elif tag & 7 in (_FIXED32, _FIXED64):
            at = start + (4 if tag & 7 == _FIXED32 else 8)
        else:
            raise ValueError(f"it has a field of the kind {tag & 7}")
        if at > len(message):
            raise ValueError("a field ends behind the message")
        yield tag >> 3, message[start:at]


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Read an integer of 7 bits in each byte. Return it and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer has no end")


def _parse_integers(data: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Parse integers of 7 bits in each byte, all at once."""
    if not data:
        return np.zeros(0, np.int64)
    parts = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(parts < 128)
    starts = np.concatenate(([0], ends + 1))
    lengths = np.diff(starts)
    if starts[-1] != len(parts) or lengths.max() > 10:
        raise ValueError("an integer has no end")
    starts = starts[:-1]
    shifts = 7 * (np.arange(len(parts)) - np.repeat(starts, lengths)).astype(np.uint64)
    numbers = np.bitwise_or.reduceat((parts & 127).astype(np.uint64) << shifts, starts)
    return numbers.view(np.int64)
