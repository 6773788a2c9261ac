"""Reading WebDataset: tar files whose members with one name and different endings are the entries of a sample.

The endings tell how members are encoded; see "The WebDataset Format" in https://webdataset.github.io/webdataset/.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tensordict.convert.images import Decode
from tensordict.convert.input_files import SourceFile, files_of
from tensordict.convert.records import Encoded, collect_rows
from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path
from tensordict.io.remote.remote_saves import Access

_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "pbm", "bmp", "gif", "tif", "tiff")
_TEXTS = ("txt", "text", "transcript")
_NUMBERS = ("cls", "cls2", "index", "inx", "id", "count")
_PICKLED = ("pyd", "pickle", "pkl", "pth", "pt")
# The key of a sample is an entry of this name, as in the samples of WebDataset.
_KEY = "__key__"
# The most bytes of a member.
_LARGEST = 1 << 30


def read_webdataset(source: Any, decode: Decode, access: Access) -> Iterator[Any]:
    """Yield the samples of tar files, some at a time.

    Args:
        source: a tar file, a folder of them, a pattern, or the URL of one of these.
        decode: decode images.
        access: the options of a URL.
    """
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        source = os.path.join(os.fspath(source), "*.tar")
    return collect_rows(_iterate_rows(files_of(source, access)), decode)


def _iterate_rows(files: Iterable[SourceFile]) -> Iterator[tuple[dict[Path, Sequence[Any]], int]]:
    """Yield the samples of tar files as columns of one row, with their bytes."""
    known: dict[Path, Any] = {}
    for file in files:
        for sample, size in _iterate_samples(file):
            if known and known.keys() != sample.keys():
                names = [sorted(path[0] for path in found) for found in (known, sample)]
                raise SaveError(
                    f"{file.path!r}: the sample {sample[_KEY,]!r} has the members {names[1]}, and the samples before "
                    f"it have {names[0]}: the rows of a data set have the same entries"
                )
            known = sample
            yield {path: [value] for path, value in sample.items()}, size


def _iterate_samples(file: SourceFile) -> Iterator[tuple[dict[Path, Any], int]]:
    """Yield the samples of a tar file, with their bytes. Members are only read, never written to a disk."""
    sample: dict[Path, Any] = {}
    nbytes = 0
    with file.local() as local, _name_file(file), tarfile.open(local, "r|*") as archive:
        for member in archive:
            if member.isdir() or member.name.startswith("__"):
                continue
            folder, slash, name = member.name.rpartition("/")
            base, dot, ending = name.partition(".")
            if not member.isreg() or not base or not dot:
                raise SaveError(f"the member {member.name!r} is no file with an ending, such as '0001.jpg'")
            if member.size > _LARGEST:
                raise SaveError(f"the member {member.name!r} has {member.size:,} bytes; {_LARGEST:,} are the most")
            key = folder + slash + base
            if sample and sample[_KEY,] != key:
                yield sample, nbytes
                sample, nbytes = {}, 0
            sample[_KEY,] = key
            if (ending,) in sample:
                raise SaveError(f"there are two members {member.name!r}")
            content = archive.extractfile(member)
            data = content.read() if content is not None else b""
            if len(data) != member.size:
                raise SaveError(f"the member {member.name!r} ends after {len(data):,} of {member.size:,} bytes")
            sample[ending,] = _decode_member(member.name, ending.lower().rpartition(".")[2], data)
            nbytes += len(data)
    if sample:
        yield sample, nbytes


@contextlib.contextmanager
def _name_file(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, SaveError) as error:
        raise SaveError(f"{file.path!r}: {error}") from error


def _decode_member(name: str, kind: str, data: bytes) -> Any:
    """Decode the content of a member. Members of other kinds stay bytes."""
    if kind in _PICKLED:
        raise SaveError(
            f"the member {name!r} is pickled, and unpickling runs code: write these members anew as .npy, .json or .txt"
        )
    try:
        if kind in _IMAGES:
            return Encoded(data)
        if kind in _TEXTS:
            return data.decode()
        if kind in _NUMBERS:
            return np.int64(int(data))
        if kind in ("json", "jsn"):
            return parse_json(data)
        if kind == "npy":
            return _read_array(data)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise SaveError(f"the member {name!r} is broken: {error}") from error
    return data


def _read_array(data: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """Read the content of an .npy file. The array is as large as the content, whatever its header says."""
    file, library = io.BytesIO(data), np.lib.format
    version = library.read_magic(file)
    read_header = library.read_array_header_1_0 if version == (1, 0) else library.read_array_header_2_0
    shape, is_fortran, dtype = read_header(file)
    if dtype.kind not in "biufc":
        raise ValueError(f"it is an array of {dtype}")
    array = np.frombuffer(data, dtype, offset=file.tell()).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C")
