"""The safetensors format, which many programs read: one file with a JSON header and then the bytes of all tensors."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensordict.core.contract import Contract
from tensordict.core.devices import put_on
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of, joined
from tensordict.io import checks
from tensordict.io.formats.detect import refuse_other
from tensordict.io.formats.loading import LoadOptions
from tensordict.io.formats.structure import Description, name_file, restore
from tensordict.io.saving.checksums import RecordedChecksum
from tensordict.io.saving.leaf_writer import SaveOptions, TensorRun
from tensordict.io.saving.progress import NO_BAR, Progress, progress_bar
from tensordict.io.saving.transaction import FileTransaction
from tensordict.io.specification import DICT, MAX_LEVELS, Specification, to_container
from tensordict.memory import file_maps, files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path
from tensordict.memory.storable import check_storable

# The keys of this package in the "__metadata__" of the header, whose values are texts: the structure of the container,
# the dtypes of tensors that are stored as bytes because the format does not know their dtype, and the checksums.
_STRUCTURE, _DTYPES, _CHECKSUMS = "tensordict_structure", "tensordict_dtypes", "tensordict_checksums"
_METADATA = "__metadata__"
_VERSION = 1
_LENGTH = struct.Struct("<Q")
# The longest header that the library of the format reads.
_MAX_HEADER = 100_000_000
# The data begins at a multiple of this. Tensors with larger elements come first, so every tensor is aligned.
_ALIGN = 64

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_TORCH = {name: dtype for dtype, name in _NAMES.items()}
# A byte holds two elements of four bits. The shape in the format counts the elements, and the shape in torch the bytes.
_PACKED = "F4"
# The dtypes that the format does not know, by their names in torch. Such a tensor is stored as bytes ("U8"), with one
# more dim.
_AS_BYTES = {str(dtype): dtype for dtype in (torch.complex32, torch.complex128, torch.float4_e2m1fn_x2)}


# --- writing ----------------------------------------------------------------------------------------------------------


def save(container: Contract, path: PathLike, options: SaveOptions, separator: str = ".") -> None:
    """Write a container to one file in one step: a reader sees the old file or the new one.

    Raises:
        SaveError: two entries would have the same name, an entry has no content, or a file of another program exists.
        UnsupportedEntryError: an entry cannot be stored; nothing has been written.
        OSError: the file cannot be written; the old file stays.
    """
    header, tensors = _build_header(Description(container, separator))
    run = TensorRun(list(tensors.values()), options.checksum)
    # Before the tensors are written, their checksums are not known, but have their final length.
    content = _encode_header(header, list(tensors), run.checksums())
    check = None if options.overwrite else _refuse_other
    with FileTransaction(path, durable=options.durable, check=check) as transaction:
        target = transaction.path
        with transaction.new_file(target) as fd, files.naming("write the file", target):
            run.write(fd, len(content), options.num_threads, options.progress)
            files.write_bytes(fd, _encode_header(header, list(tensors), run.checksums()))
        transaction.commit()


def _build_header(described: Description) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the header, and the tensors in the order of the file."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    entries: dict[str, Any] = {}
    as_bytes: dict[str, str] = {}
    # Larger elements come first, as in the library of the format, so that all tensors are aligned.
    order = sorted(described.tensors.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, tensor in order:
        key = described.keys[name]
        if name == _METADATA:
            raise SaveError(f"entry {joined(key)!r}: the format reserves the name {_METADATA!r}; rename the entry")
        dtype = _stored_dtype(tensor, key)
        shape = list(tensor.shape)
        if dtype is None:
            dtype, as_bytes[name] = "U8", str(tensor.dtype)
            shape.append(tensor.itemsize)
        start, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    structure = {"version": _VERSION, "separator": described.separator, "root": described.spec}
    header[_METADATA][_STRUCTURE] = _to_json(structure)
    if as_bytes:
        header[_METADATA][_DTYPES] = _to_json(as_bytes)
    return {**header, **entries}, dict(order)


def _encode_header(header: dict[str, Any], names: list[str], checksums: list[str]) -> bytes:
    """Return the bytes before the data, with the checksums of the tensors of these names, if there are any."""
    if checksums:
        recorded = _to_json(dict(zip(names, checksums, strict=True)))
        header = {**header, _METADATA: {**header[_METADATA], _CHECKSUMS: recorded}}
    content = _to_json(header).encode()
    content += b" " * (-(len(content) + _LENGTH.size) % _ALIGN)
    if len(content) > _MAX_HEADER:
        raise SaveError(
            f"the header would have {len(content)} bytes, more than the {_MAX_HEADER} that readers of the format take"
        )
    return _LENGTH.pack(len(content)) + content


def _stored_dtype(tensor: Tensor, key: Path) -> str | None:
    """Return the name of the dtype of a tensor in the format; `None` if the tensor is stored as bytes."""
    check_storable(tensor, key)
    if tensor.is_meta:
        raise SaveError(f"{entry_of(key)}it is on the meta device and has no content")
    name = _NAMES.get(tensor.dtype)
    if name is None and str(tensor.dtype) not in _AS_BYTES:
        raise UnsupportedEntryError(f"{entry_of(key)}tensors of {tensor.dtype} cannot be stored")
    return name


def _to_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    """The description of a tensor in the header. The offset counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Header:
    """The header of a file, parsed and checked."""

    path: str
    entries: dict[str, _Entry]
    metadata: dict[str, str]
    # The errors of broken tensors, which `entries` lacks.
    broken: dict[str, SaveError]
    # The errors of the file as a whole.
    problems: list[SaveError]


def load(path: PathLike, options: LoadOptions, separator: str | None = ".") -> Any:
    """Load a file of this package or of another program.

    Args:
        path: the file.
        options: `device`, `shows` and `complain` apply.
        separator: nests the names of a file of another program; `None` keeps them flat.

    Raises:
        OSError: the file cannot be read.
        SaveError: it is not a safetensors file, or is broken.
        UnsupportedEntryError: a dtype is unknown, or a class has not been imported.
    """
    node = read(path, options, separator)
    with name_file(local_path(path)):
        return to_container(node)


def read(path: PathLike, options: LoadOptions, separator: str | None = ".") -> Specification:
    """Read the specification of a file, over its mapped tensors. Its tensorclasses need not be imported.

    It takes the arguments and raises the errors of `load`.
    """
    target = local_path(path)
    with files.closing(files.open_file(target)) as fd:
        header = _read_header(fd, target, options.complain is not None)
        tensors = _MappedTensors(fd, header, options.device)
    with name_file(target):
        if options.complain is not None:
            for problem in header.problems:
                options.complain(problem)
        structure = _read_structure(header)
        with progress_bar(options.shows, "loading", os.path.getsize(target)) as tensors.progress:
            if structure is None:
                return _nest_tensors(tensors, options, separator)
            root = restore(
                structure["root"], tensors, structure["separator"], complain=options.complain, device=options.device
            )
    if unknown := sorted(header.entries.keys() - tensors.used):
        error = SaveError(f"{target!r} has tensors {unknown[:5]} that its description of the structure does not know")
        if options.complain is None:
            raise error
        options.complain(error)
    return root


def _refuse_other(path: str) -> None:
    # The header of a save begins with the metadata of this package, so the rest of a long header need not be parsed.
    begin = f'{{"{_METADATA}":'.encode()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH.size), "little")
        content = file.read(length) if length <= _MAX_HEADER else b""
    try:
        metadata = json.JSONDecoder().raw_decode(content.decode(), len(begin))[0] if content.startswith(begin) else {}
    except (ValueError, RecursionError):
        metadata = {}
    if type(metadata) is not dict or _STRUCTURE not in metadata:
        refuse_other(path, "safetensors", _foreign_names)


def _foreign_names(path: str) -> Collection[str]:
    """Return the names of the tensors in a file of another program; none for a save of this package."""
    with files.closing(files.open_file(path)) as fd:
        header = _read_header(fd, path)
    return () if _STRUCTURE in header.metadata else header.entries or header.metadata or ["no tensors"]


def read_checksums(path: PathLike) -> list[RecordedChecksum]:
    """Return the checksums of the tensors that a file stores; an empty list for a file without checksums.

    Raises:
        OSError: the file cannot be read.
        SaveError: it is not a safetensors file, or its header is broken.
    """
    target = local_path(path)
    with files.closing(files.open_file(target)) as fd:
        header = _read_header(fd, target)
    if _CHECKSUMS not in header.metadata:
        return []
    found = _read_json(header.metadata[_CHECKSUMS], target, _CHECKSUMS)
    if not found.keys() <= header.entries.keys():
        raise SaveError(f"the header of {target!r} is broken: it has checksums for tensors that it lacks")
    entries = ((name, header.entries[name], checksum) for name, checksum in found.items())
    return [
        RecordedChecksum(name, entry.offset, math.prod(entry.shape) * entry.dtype.itemsize, checksum)
        for name, entry, checksum in entries
    ]


class _MappedTensors:
    """A `TensorSource` over one private map of the file: writing to the tensors does not change the file."""

    def __init__(self, fd: int, header: _Header, device: torch.device | None) -> None:
        self.entries = header.entries
        self.broken = header.broken
        # The names of the tensors that were read.
        self.used: set[str] = set()
        self.device = device
        # Counts the bytes of the tensors that were read.
        self.progress: Progress = NO_BAR
        # True on the meta device and in FakeTensorMode, where new tensors are fake.
        self.skips_content = (device is not None and device.type == "meta") or type(
            torch.empty((), device="cpu")
        ) is not Tensor
        if not self.skips_content:
            # Map the descriptor whose header was checked, because another file may have replaced it at its path.
            self.bytes = file_maps.map_bytes(fd, os.fstat(fd).st_size, header.path)
            self.storage = self.bytes.untyped_storage()

    def take(self, name: str, key: Path) -> Tensor:
        entry = self.entries.get(name)
        if entry is None and name in self.broken:
            raise self.broken[name]
        if entry is None:
            raise SaveError(f"entry {joined(key)!r}: there is no tensor {name!r}")
        self.used.add(name)
        try:
            tensor = self._map(entry)
        except RuntimeError as error:
            raise SaveError(
                f"entry {joined(key)!r}: torch cannot create a tensor of shape {list(entry.shape)}: {error}"
            ) from error
        self.progress.add(tensor.numel() * tensor.itemsize)
        device = self.device
        return tensor if device is None or self.skips_content else put_on(tensor, device, non_blocking=True)

    def _map(self, entry: _Entry) -> Tensor:
        dtype, shape = entry.dtype, entry.shape
        if self.skips_content:
            return torch.empty(shape, dtype=dtype, device=self.device or "cpu")
        size = dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device="cpu")
        if 0 in shape:
            return empty.view(shape)
        if entry.offset % size:
            # Other programs may write unaligned elements, which torch cannot map: copy them.
            stop = entry.offset + math.prod(shape) * size
            return self.bytes[entry.offset : stop].clone().view(dtype).view(shape)
        return empty.set_(self.storage, entry.offset // size, shape)  # type: ignore[call-overload, no-any-return]


def _read_header(fd: int, path: str, lenient: bool = False) -> _Header:
    """Read the header of a file, and check everything that can be checked without reading the data.

    With `lenient`, errors of single tensors are collected in `broken`, and other errors in `problems`.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SaveError(f"{path!r} is not a regular file")
    raw = system.pread(fd, _LENGTH.size, 0)
    length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else -1
    data = _LENGTH.size + length
    if length < 2 or length > _MAX_HEADER or data > status.st_size:
        raise SaveError(
            f"{path!r} is no safetensors file: it has {status.st_size} bytes, and claims a header of {max(length, 0)} "
            f"bytes, which may have at most {_MAX_HEADER}"
        )
    content = system.pread(fd, length, _LENGTH.size)
    if len(content) != length or content[:1] != b"{":
        raise SaveError(f"{path!r} is no safetensors file: its header does not begin with '{{'")
    try:
        header = parse_json(content.decode(), constants=False)
    except ValueError as error:
        raise SaveError(f"the header of {path!r} is broken: {error}") from error
    metadata = header.pop(_METADATA, {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise SaveError(f"the header of {path!r} is broken: {_METADATA!r} is not a mapping of strings to strings")
    packed = _read_dtypes(metadata, path)
    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    broken: dict[str, SaveError] = {}
    for name, spec in header.items():
        try:
            entries[name], span = _read_entry(name, spec, packed.pop(name, None), data, path)
        except SaveError as error:
            if not lenient:
                raise
            broken[name] = error
        else:
            spans.append((*span, name))
    if packed:
        raise SaveError(f"the header of {path!r} is broken: it has dtypes for {sorted(packed)[:5]}, which are missing")
    problems: list[SaveError] = []
    for which, text in list(_find_span_problems(spans, status.st_size - data, path, not broken)):
        if not lenient:
            raise SaveError(text)
        if which is None:
            problems.append(SaveError(text))
        elif entries.pop(which, None) is not None:
            broken[which] = SaveError(text)
    return _Header(path, entries, metadata, broken, problems)


def _read_dtypes(metadata: dict[str, str], path: str) -> dict[str, torch.dtype]:
    """Return the dtypes of the tensors that are stored as bytes."""
    if _DTYPES not in metadata:
        return {}
    names = _read_json(metadata[_DTYPES], path, _DTYPES)
    for name, dtype in names.items():
        if type(dtype) is not str or dtype not in _AS_BYTES:
            raise SaveError(f"entry {name!r}: the dtype {dtype!r:.80} in {path!r} is unknown")
    return {name: _AS_BYTES[dtype] for name, dtype in names.items()}


def _read_structure(header: _Header) -> dict[str, Any] | None:
    """Return the description of the structure; `None` for a file of another program."""
    if _STRUCTURE not in header.metadata:
        return None
    structure = _read_json(header.metadata[_STRUCTURE], header.path, _STRUCTURE)
    version = structure.get("version")
    if version != _VERSION:
        raise UnsupportedEntryError(
            f"{header.path!r} has version {version!r:.80} of the description, and this package reads {_VERSION}: "
            "load it with a newer release"
        )
    if type(structure.get("separator")) is not str or "root" not in structure:
        raise SaveError(f"the header of {header.path!r} is broken: {_STRUCTURE!r} has no separator or no root")
    return structure


def _read_json(text: str, path: str, what: str) -> dict[str, Any]:
    try:
        value = parse_json(text, constants=False)
    except ValueError as error:
        raise SaveError(f"the header of {path!r} is broken: {what!r} is not JSON: {error}") from error
    if type(value) is not dict:
        raise SaveError(f"the header of {path!r} is broken: {what!r} is not a JSON object")
    return value


def _read_entry(
    name: str, spec: object, as_bytes: torch.dtype | None, data: int, path: str
) -> tuple[_Entry, tuple[int, int]]:
    """Parse the description of a tensor. Returns it, and the first and the last byte of the tensor in the data."""
    bad = f"entry {name!r} of {path!r} is broken: "
    if type(spec) is not dict or not {"dtype", "shape", "data_offsets"} <= spec.keys():
        raise SaveError(f"{bad}it is described by {spec!r:.80}")
    shape, offsets, dtype_name = spec["shape"], spec["data_offsets"], spec["dtype"]
    try:
        size = checks.shape(shape)
        begin, end = checks.ints(offsets, "its place")
    except ValueError as error:
        raise SaveError(f"{bad}{error}") from None
    dtype = _TORCH.get(dtype_name) if type(dtype_name) is str else None
    if dtype_name == _PACKED:
        if not size or size[-1] % 2:
            raise UnsupportedEntryError(f"{bad}torch has no tensor of {_PACKED} of shape {shape}")
        dtype, size = torch.float4_e2m1fn_x2, torch.Size((*size[:-1], size[-1] // 2))
    if dtype is None:
        raise UnsupportedEntryError(f"entry {name!r} of {path!r}: the dtype {dtype_name!r:.80} is unknown")
    if as_bytes is not None:
        if dtype is not torch.uint8 or size[-1:] != (as_bytes.itemsize,):
            raise SaveError(f"{bad}{dtype_name} of shape {shape} does not hold {as_bytes}")
        dtype, size = as_bytes, size[:-1]
    if math.prod(size) * dtype.itemsize != end - begin:
        raise SaveError(f"{bad}shape {shape} of {dtype_name} does not fit the {end - begin} bytes at {begin} to {end}")
    return _Entry(dtype, size, data + begin), (begin, end)


def _find_span_problems(
    spans: list[tuple[int, int, str]], nbytes: int, path: str, all_known: bool
) -> Iterator[tuple[str | None, str]]:
    """Yield the name of a tensor and a problem wherever a byte of the data does not belong to exactly one tensor.

    all_known: `spans` has all tensors, so that holes are problems too.
    """
    spans.sort()
    end = 0
    for start, stop, name in spans:
        where = f"entry {name!r} of {path!r}"
        if start < end or (all_known and start != end):
            place = f"begins at byte {start} of the data, and the tensor before it ends at byte {end}"
            yield name, f"{where} {place}: its tensors overlap or leave a hole"
        if stop > nbytes:
            place = f"ends at byte {stop} of the data, which has {nbytes} bytes"
            yield name, f"{where} {place}: it was cut off or belongs to another save"
        end = stop
    if all_known and end < nbytes:
        yield None, f"{path!r} has {nbytes} bytes of data, and its tensors {end}: it belongs to another save"


def _nest_tensors(tensors: _MappedTensors, options: LoadOptions, separator: str | None) -> Specification:
    """Build the specification of a file of another program, with its names nested at the separator.

    If a tensor has the name of a container, the rest of longer names is not nested.
    """
    root: dict[str, Any] = {}
    for name in (*tensors.entries, *tensors.broken):
        level = root
        rest = name
        if separator and separator in name:
            count = name.count(separator)
            if count > MAX_LEVELS:
                raise SaveError(
                    f"entry {name[:80]!r}...: its name has {count} levels, and a container at most {MAX_LEVELS}: "
                    "load it with separator=None"
                )
            start = 0
            while (end := name.find(separator, start)) >= 0 and name[:end] not in tensors.entries:
                level = level.setdefault(name[start:end], {})
                start = end + len(separator)
            rest = name[start:]
        level[rest] = name
    return _build_node(root, (), tensors, options)


def _build_node(level: dict[str, Any], key: Path, tensors: _MappedTensors, options: LoadOptions) -> Specification:
    entries: dict[str, Any] = {}
    for name, value in level.items():
        path = (*key, name)
        if type(value) is dict:
            entries[name] = _build_node(value, path, tensors, options)
            continue
        try:
            entries[name] = tensors.take(value, path)
        except SaveError as error:
            if options.complain is None:
                raise
            if (found := options.complain(error)) is not None:
                entries[name] = found
    return Specification(DICT, torch.Size(()), options.device, entries=entries)
