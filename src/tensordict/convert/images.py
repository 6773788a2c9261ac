"""Decoding images, which containers hold as encoded bytes until a program needs their pixels (`decode_images`)."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.exceptions import SaveError
from tensordict.core.extras import require
from tensordict.core.keys import Key, Path, entry_of, path_of

# Importers hold so many rows in memory at a time. Decoded images take about ten times their bytes.
ROWS, DECODED_ROWS = 1024, 32
# `True` keeps the channels of the files; a text is a mode of Pillow to convert to, such as "RGB" or "L".
Decode = bool | str
# Other formats of Pillow are rare in data sets, and some of them start other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")
# Pillow raises these for broken files.
_BROKEN = (OSError, ValueError, SyntaxError, EOFError, LookupError, ArithmeticError, struct.error)
# These modes are kept, and each other mode of 8 bits is converted to one of them.
_KEPT = ("L", "LA", "RGB", "RGBA")
_MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB", "RGBX": "RGB"}


def decode_images(rows: Any, *keys: Key, mode: str | None = None) -> Any:
    """Decode the images at some keys to pixels.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from tensordict import TensorDict
        >>> from tensordict.datasets import decode_images
        >>> row = TensorDict(image=torch.tensor([*b"P5 2 1 255 ", 7, 9], dtype=torch.uint8))  # a file of 2 x 1 pixels
        >>> decode_images(row, "image")["image"]
        tensor([[[7, 9]]], dtype=torch.uint8)

    Images of data sets are stored as in their files, which takes a tenth of the space of their pixels. Call this on a
    batch that was read, or pass it to a loader, whose workers call it:
    `DatasetLoader(data, 256, transform=functools.partial(decode_images, keys...))`.

    Args:
        rows: a container whose entries at `keys` are the bytes of image files: uint8 leaves, ragged or not, with the
            bytes of an image along their last dim. It has no batch dims (one row), or one.
        keys: the (nested) keys.
        mode: a mode of Pillow to convert to, such as "RGB" or "L"; by default the channels of the files are kept.

    Returns:
        a shallow copy whose entries at `keys` have shape (rows, channels, height, width). If the images have different
        sizes, they are strided nested tensors. All are uint8 and copies.

    Raises:
        ModuleNotFoundError: Pillow is missing; the error names the extra.
        SaveError: some bytes are not an image, or have more than 8 bits for each channel; the error names key and row.
        TypeError: an entry is not of uint8.
    """
    found = rows.copy()
    for key in keys:
        path = path_of(key)
        leaf = rows.get(path)
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.uint8 or (not leaf.is_nested and leaf.dim() > 2):
            what = f"{leaf.dtype} of shape {list(ragged.shape_of(leaf))}" if isinstance(leaf, Tensor) else type(leaf)
            raise TypeError(
                f"{entry_of(path)}images are decoded from the bytes of their files, in rows of uint8, got {what}"
            )
        if leaf.dim() == 1 and not leaf.is_nested:
            found.set(path, decode_files([leaf], mode or True, path)[0])
        else:
            found.set(path, decode_files(ragged.unbind(leaf, 0) if leaf.is_nested else leaf, mode or True, path))
    return found


def decode_files(contents: Iterable[Tensor | bytes], decode: Decode, path: Path) -> Tensor:
    """Decode the contents of image files to one tensor; a strided nested one if their sizes differ."""
    library = require("PIL.Image", "images")
    transpose = require("PIL.ImageOps", "images").exif_transpose
    images: list[Any] = []
    for row, content in enumerate(contents):
        data = content if isinstance(content, bytes) else content.numpy(force=True).tobytes()
        try:
            with library.open(io.BytesIO(data), formats=_FORMATS) as image:
                wanted = decode if isinstance(decode, str) else _MODES.get(image.mode, image.mode)
                if image.mode not in (*_KEPT, *_MODES):
                    raise ValueError(f"its mode is {image.mode!r}, which uint8 cannot hold: keep it encoded")
                turned = transpose(image)
                pixels = np.array(turned if turned.mode == wanted else turned.convert(wanted))
        except (*_BROKEN, library.DecompressionBombError) as error:
            raise SaveError(f"{entry_of(path)}the image of row {row} cannot be decoded: {error}") from error
        images.append((pixels if pixels.ndim == 3 else pixels[..., None]).transpose(2, 0, 1))
    # NumPy copies in this thread. The threads of torch, of which loaders run many, would wait for each other.
    if not images:
        return torch.zeros(0, 0, 0, 0, dtype=torch.uint8)
    if len({image.shape for image in images}) == 1:
        return torch.from_numpy(np.stack(images, out=np.empty((len(images), *images[0].shape), np.uint8)))
    flat = torch.from_numpy(np.concatenate([image.ravel() for image in images]))
    return ragged.from_buffer(flat, torch.tensor([image.shape for image in images]))


def join_bytes(contents: Sequence[bytes]) -> Tensor:
    """Return bytes of different lengths as a jagged leaf of uint8 with a row for each."""
    offsets = torch.tensor([0, *map(len, contents)]).cumsum(0)
    # `bytearray` because torch warns of memory that cannot be written.
    joined = bytearray().join(contents)
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.zeros(0, dtype=torch.uint8)
    return ragged.from_jagged(values, offsets)
