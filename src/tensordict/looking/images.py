"""Leaves that look like images, and small pictures of their first elements as PNG."""

from __future__ import annotations

import base64
import itertools
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# Where the channels are: nowhere, before or behind the height and the width.
GREY, CHANNELS_FIRST, CHANNELS_LAST = "HW", "CHW", "HWC"
# The most pixels on a side that are taken of an image.
_SIDE = 96
# What is smaller, larger or much longer than wide is a table rather than an image.
_LEAST, _MOST, _RATIO = 8, 8192, 6
# The types of colour of PNG, by the number of channels.
_COLOURS = {1: 0, 3: 2, 4: 6}


def image_form(rest: Sequence[int], dtype: torch.dtype) -> str:
    """How a leaf of uint8 holds images, by its dims behind those of the batch; empty when it looks like none."""
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
    """The first images of leaves of this form as data URLs, each made smaller by leaving out pixels.

    Args:
        leaves: tensors whose last dims are those of an image; no element of any other image is read.
        form: what :func:`image_form` gave.
        most: how many images.
    """
    found = itertools.chain.from_iterable(_images(leaf, len(form)) for leaf in leaves)
    return [data_url(_smaller(image, form)) for image in itertools.islice(found, most)]


def _images(leaf: Tensor, dims: int) -> Iterator[Tensor]:
    for index in itertools.product(*map(range, leaf.shape[: leaf.ndim - dims])):
        yield leaf[index]


def _smaller(image: Tensor, form: str) -> Tensor:
    """An image as height, width and channels, of at most 96 pixels on a side."""
    if form == GREY:
        image = image.unsqueeze(-1)
    elif form == CHANNELS_FIRST:
        image = image.movedim(0, -1)
    step = max(1, math.ceil(max(image.shape[:2]) / _SIDE))
    return image[::step, ::step].detach().as_subclass(Tensor).cpu()


def data_url(pixels: Tensor) -> str:
    """An image, uint8 of height, width and 1, 3 or 4 channels, as a PNG that stands in the page itself."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode("ascii")


def png(pixels: Tensor) -> bytes:
    """An image, uint8 of height, width and 1, 3 or 4 channels, as a PNG: https://www.w3.org/TR/png-3/."""
    height, width, channels = pixels.shape
    # Each line begins with a zero: it is not filtered.
    lines = torch.cat((pixels.new_zeros(height, 1), pixels.reshape(height, -1)), dim=1).contiguous().numpy().tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = _chunk(b"IHDR", header), _chunk(b"IDAT", zlib.compress(lines)), _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
