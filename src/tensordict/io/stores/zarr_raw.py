"""Chunk files that hold raw elements: read and written here without zarr, which always reads whole chunks.

Uncompressed arrays that are split along the first dim only have such chunks. Rows are read through a memory map of each
file, and the chunk of a new array is written from its buffer. This reads 256 random rows of 79 chunks 3 times as fast
as zarr, and one row 7 times as fast; writing takes half the time.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tensordict.io.saving.source import SaveFolder
from tensordict.memory.stored_tensors import Selection


@dataclass(frozen=True)
class RawChunks:
    """The chunks of an array in a folder.

    Attributes:
        folder: the folder of the array.
        shape, dtype: the shape and dtype of the array.
        rows: the number of rows of a chunk.
        fill: the value of all elements of a chunk without a file.
        links: refuses links that lead out of the folder of the store.
    """

    folder: str
    shape: tuple[int, ...]
    dtype: Any
    rows: int
    fill: Any
    links: SaveFolder

    @staticmethod
    def of(folder: str, document: Mapping[str, Any], array: Any, links: SaveFolder) -> RawChunks | None:
        """Describe the chunks of a zarr array with this document; `None` if they do not hold raw elements."""
        shape, chunks = array.shape, array.chunks
        if not all(shape) or not shape or array.shards is not None or chunks[1:] != shape[1:]:
            return None
        if not is_plain(document) or array.dtype.kind not in "biufc" or array.dtype.byteorder == ">":
            return None
        return RawChunks(folder, shape, array.dtype, chunks[0], array.fill_value, links)

    @property
    def nbytes(self) -> int:
        """The length of a chunk."""
        return self.rows * math.prod(self.shape[1:]) * int(self.dtype.itemsize)

    def _path(self, chunk: int) -> str:
        return f"{self.folder}/c/{chunk}" + "/0" * (len(self.shape) - 1)

    def read(self, selection: Selection) -> Any:
        """Return a copy of the selection; `None` if a chunk has the wrong size, for which zarr raises the error."""
        first, *rest = (slice(None),) if selection[0] is ... else selection
        rows = first if isinstance(first, np.ndarray) else _positions(first, self.shape[0])
        # Rows are sorted, so the rows of one chunk are adjacent.
        chunks = rows // self.rows
        bounds = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(rows)] if len(rows) else [0]
        parts = []
        for start, stop in itertools.pairwise(bounds):
            chunk = int(chunks[start])
            part = self._read_chunk(chunk, rows[start:stop] - chunk * self.rows, rest)
            if part is None:
                return None
            parts.append(part)
        if not parts:
            return None
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # An integer removes its dim.
        return found[tuple([0 if type(pick) is int else slice(None) for pick in (first, *rest)])]

    def _read_chunk(self, chunk: int, rows: Any, rest: list[Any]) -> Any:
        shape, path = (self.rows, *self.shape[1:]), self._path(chunk)
        self.links.check(path, ())
        try:
            with open(path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != self.nbytes:
                    return None
                if len(rows) == self.rows and all(_is_all(pick, size) for pick, size in zip(rest, shape[1:])):
                    return np.fromfile(file, self.dtype).reshape(shape)
                content = np.ndarray(shape, self.dtype, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            content = np.broadcast_to(np.asarray(self.fill, self.dtype), shape)
        # Selections have positions along one dim at most.
        others = [slice(pick, pick + 1) if type(pick) is int else pick for pick in rest]
        found = content[_as_slice(rows)]
        if others:
            index: Any = (slice(None), *others)
            found = found[index]
        # Copy: a view of the map would change with the file.
        return found if found.base is None else found.copy()

    def write_new(self, values: Any) -> bool:
        """Write all elements of a new array. Returns False, and writes nothing, if it has several chunks."""
        if self.rows != self.shape[0]:
            return False
        path = self._path(0)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        content = np.ascontiguousarray(values, self.dtype)
        with open(path, "wb") as file:
            file.write(content.reshape(-1).view(np.uint8).data)
        return True


def _positions(pick: Any, size: int) -> Any:
    """Return the positions that an int or a slice picks along a dim of this size."""
    picked = range(size)[pick]
    return np.array([picked]) if isinstance(picked, int) else np.arange(picked.start, picked.stop, picked.step)


def _is_all(pick: Any, size: int) -> bool:
    return type(pick) is slice and pick.indices(size) == (0, size, 1)


def _as_slice(rows: Any) -> Any:
    """Convert sorted positions to a slice if they are evenly spaced."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    is_even = len(rows) < 3 or (rows[-1] - rows[0] == step * (len(rows) - 1) and (np.diff(rows) == step).all())
    return slice(int(rows[0]), int(rows[-1]) + 1, step) if is_even else rows


def is_plain(document: Mapping[str, Any]) -> bool:
    """Return True if the document declares chunks of raw little-endian bytes with the default names of Zarr."""
    codecs, keys = document.get("codecs"), document.get("chunk_key_encoding") or {}
    if sys.byteorder != "little" or not isinstance(codecs, list) or len(codecs) != 1:
        return False
    (codec,) = codecs
    if not isinstance(codec, dict) or codec.get("name") != "bytes" or document.get("storage_transformers"):
        return False
    is_default = keys.get("name") == "default" and (keys.get("configuration") or {}).get("separator", "/") == "/"
    return is_default and (codec.get("configuration") or {}).get("endian", "little") == "little"
