"""Recognize leaves that hold images, and encode small PNGs of the first ones; used by notebook trees and reports."""

from __future__ import annotations

import base64
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# The position of the channels: absent, before, or after height and width.
GREY, CHANNELS_FIRST, CHANNELS_LAST = "HW", "CHW", "HWC"
# The largest side of a reduced image, in pixels.
_SIDE = 96
# Smaller, larger or much longer arrays are treated as tables, not as images.
_LEAST, _MOST, _RATIO = 8, 8192, 6
# The PNG color type for each number of channels.
_COLOURS = {1: 0, 3: 2, 4: 6}


def find_image_form(rest: Sequence[int], dtype: torch.dtype) -> str:
    """Return the image layout of a uint8 leaf from the dims after its batch dims; "" when it looks like no image."""
    if dtype is not torch.uint8:
        return ""
    if len(rest) >= 3 and rest[-1] in _COLOURS and _is_image(rest[-3], rest[-2]):
        return CHANNELS_LAST
    if len(rest) >= 3 and rest[-3] in _COLOURS and _is_image(rest[-2], rest[-1]):
        return CHANNELS_FIRST
    return GREY if len(rest) >= 2 and _is_image(rest[-2], rest[-1]) else ""


def _is_image(height: int, width: int) -> bool:
    short, long = sorted((height, width))
    return short >= _LEAST and long <= _MOST and long <= _RATIO * short


def first_images(leaves: Iterable[Tensor], form: str, most: int) -> list[str]:
    """Return the first images as data URLs, reduced in size by skipping pixels. Only these images are read.

    Args:
        leaves: tensors whose last dims are the dims of one image.
        form: the layout from :func:`find_image_form`.
        most: the largest number of images.
    """
    found = itertools.chain.from_iterable(_iter_images(leaf, len(form)) for leaf in leaves)
    return [data_url(_shrink(image, form)) for image in itertools.islice(found, most)]


def _iter_images(leaf: Tensor, dims: int) -> Iterator[Tensor]:
    for index in itertools.product(*map(range, leaf.shape[: leaf.ndim - dims])):
        yield leaf[index]


def _shrink(image: Tensor, form: str) -> Tensor:
    """Return an image as height, width and channels, with at most 96 pixels on a side."""
    if form == GREY:
        image = image.unsqueeze(-1)
    elif form == CHANNELS_FIRST:
        image = image.movedim(0, -1)
    step = max(1, math.ceil(max(image.shape[:2]) / _SIDE))
    return image[::step, ::step].detach().as_subclass(Tensor).cpu()


def data_url(pixels: Tensor) -> str:
    """Encode an image (uint8; height, width and 1, 3 or 4 channels) as a PNG in a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(encode_png(pixels)).decode("ascii")


def encode_png(pixels: Tensor) -> bytes:
    """Encode an image (uint8; height, width and 1, 3 or 4 channels) as PNG: https://www.w3.org/TR/png-3/."""
    height, width, channels = pixels.shape
    # Each line begins with its filter type; 0 means no filter.
    lines = torch.cat((pixels.new_zeros(height, 1), pixels.reshape(height, -1)), dim=1).contiguous().numpy().tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = _make_chunk(b"IHDR", header), _make_chunk(b"IDAT", zlib.compress(lines)), _make_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _make_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
