"""The safetensors format: a JSON header and the bytes of all tensors behind it, in one file that many programs read."""

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
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.formats.detect import refuse_other
from tensordict.io.formats.loading import LoadOptions
from tensordict.io.formats.structure import Described, naming_file, restore
from tensordict.io.saving.checksums import RecordedChecksum
from tensordict.io.saving.leaf_writer import SaveOptions, TensorRun
from tensordict.io.saving.progress import Progress, progress_bar
from tensordict.io.saving.transaction import FileTransaction
from tensordict.io.specification import DICT, MAX_LEVELS, Specification, to_container
from tensordict.memory import file_maps, files, system
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path
from tensordict.memory.storable import check_storable

# The keys of ours in the "__metadata__" of the header, whose values are strings: the structure of the container, the
# dtypes of tensors that stand as bytes because the format has no name for them, and checksums that were asked for.
_STRUCTURE, _DTYPES, _CHECKSUMS = "tensordict_structure", "tensordict_dtypes", "tensordict_checksums"
_METADATA = "__metadata__"
_VERSION = 1
_LENGTH = struct.Struct("<Q")
# What the reader of the format's own library takes.
_MAX_HEADER = 100_000_000
# The data begins at a multiple of this, and so, larger elements first, every tensor at one of its element size.
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
# Two elements of four bits to a byte; the format counts the elements, torch the bytes.
_PACKED = "F4"
# What has no name in the format stands as bytes ("U8"), in one more dim; these are known by the names that torch has.
_AS_BYTES = {str(dtype): dtype for dtype in (torch.complex32, torch.complex128, torch.float4_e2m1fn_x2)}


# --- writing ----------------------------------------------------------------------------------------------------------


def save(container: Contract, path: PathLike, options: SaveOptions, separator: str = ".") -> None:
    """Write a container to one file, in one step: a reader sees the old file or the new one.

    Raises:
        SaveError: two entries would have the same name, an entry has no content, or there is a file that no container
            was saved to.
        UnsupportedEntryError: an entry cannot be stored; nothing has been written.
        OSError: the file cannot be written; what was there before stays.
    """
    header, tensors = _header(Described(container, separator))
    row = TensorRun(list(tensors.values()), options.checksum)
    # The checksums of nothing take as much room as those that will be known.
    content = _packed(header, list(tensors), row.checksums())
    check = None if options.overwrite else _refuse_other
    with FileTransaction(path, durable=options.durable, check=check) as transaction:
        target = transaction.path
        with transaction.new_file(target) as fd, files.naming("write the file", target):
            row.write(fd, len(content), options.num_threads, options.progress)
            files.write_bytes(fd, _packed(header, list(tensors), row.checksums()))
        transaction.commit()


def _header(described: Described) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header, and the tensors in the order in which they are written."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    entries: dict[str, Any] = {}
    as_bytes: dict[str, str] = {}
    # The order of the format's own library: larger elements first, so that all are aligned.
    order = sorted(described.tensors.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, tensor in order:
        key = described.keys[name]
        if name == _METADATA:
            raise SaveError(f"entry {joined(key)!r}: the format keeps the name {_METADATA!r} for itself; rename it")
        dtype = _stored_dtype(tensor, key)
        shape = list(tensor.shape)
        if dtype is None:
            dtype, as_bytes[name] = "U8", str(tensor.dtype)
            shape.append(tensor.itemsize)
        start, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    structure = {"version": _VERSION, "separator": described.separator, "root": described.spec}
    header[_METADATA][_STRUCTURE] = _text(structure)
    if as_bytes:
        header[_METADATA][_DTYPES] = _text(as_bytes)
    return {**header, **entries}, dict(order)


def _packed(header: dict[str, Any], names: list[str], checksums: list[str]) -> bytes:
    """The bytes in front of the data; with the checksums of the tensors of these names, if there are any."""
    if checksums:
        recorded = _text(dict(zip(names, checksums, strict=True)))
        header = {**header, _METADATA: {**header[_METADATA], _CHECKSUMS: recorded}}
    content = _text(header).encode()
    content += b" " * (-(len(content) + _LENGTH.size) % _ALIGN)
    if len(content) > _MAX_HEADER:
        raise SaveError(
            f"the header would have {len(content)} bytes, more than the {_MAX_HEADER} that readers of the format take"
        )
    return _LENGTH.pack(len(content)) + content


def _stored_dtype(tensor: Tensor, key: Path) -> str | None:
    """What the format calls the dtype of a tensor; `None` when it has to stand as bytes."""
    entry = f"entry {joined(key)!r}: "
    try:
        check_storable(tensor)
    except UnsupportedEntryError as error:
        raise UnsupportedEntryError(f"{entry}{error}") from None
    if tensor.is_meta:
        raise SaveError(f"{entry}it is on the meta device and has no content")
    name = _NAMES.get(tensor.dtype)
    if name is None and str(tensor.dtype) not in _AS_BYTES:
        raise UnsupportedEntryError(f"{entry}tensors of {tensor.dtype} cannot be stored")
    return name


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    """A tensor as the header describes it; the offset is from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Header:
    """What is in front of the data."""

    path: str
    entries: dict[str, _Entry]
    metadata: dict[str, str]
    # What is wrong with the tensors that `entries` lacks for that.
    broken: dict[str, SaveError]
    # What is wrong with the whole.
    problems: list[SaveError]


def load(path: PathLike, options: LoadOptions, separator: str | None = ".") -> Any:
    """The container in a file, of this package or of another program.

    Args:
        path: the file.
        options: how to load; the device, what is shown, and who is told of broken entries count.
        separator: where the names of another program are nested; `None` for nowhere.

    Raises:
        OSError: the file cannot be read.
        SaveError: it is no safetensors file, or its content does not add up.
        UnsupportedEntryError: it is of a dtype or a class that this program does not know.
    """
    node = read(path, options, separator)
    with naming_file(local_path(path)):
        return to_container(node)


def read(path: PathLike, options: LoadOptions, separator: str | None = ".") -> Specification:
    """The specification of the container in a file, over its mapped tensors; fails as `load` does, but for
    tensorclasses that this program does not know."""
    target = local_path(path)
    with files.closing(files.open_file(target)) as fd:
        header = _read_header(fd, target, options.complain is not None)
        tensors = _Mapped(fd, header, options.device)
    with naming_file(target):
        if options.complain is not None:
            for problem in header.problems:
                options.complain(problem)
        structure = _read_structure(header)
        with progress_bar(options.shows, "loading", os.path.getsize(target)) as tensors.progress:
            if structure is None:
                return _nested(tensors, options, separator)
            root = restore(
                structure["root"], tensors, structure["separator"], complain=options.complain, device=options.device
            )
    if unknown := sorted(header.entries.keys() - tensors.taken):
        left = SaveError(f"{target!r} has tensors {unknown[:5]} that its description of the structure does not know")
        if options.complain is None:
            raise left
        options.complain(left)
    return root


def _refuse_other(path: str) -> None:
    # What we write begins with our metadata, and the rest of a long header need not be read.
    begin = f'{{"{_METADATA}":'.encode()
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH.size), "little")
        content = file.read(length) if length <= _MAX_HEADER else b""
    try:
        metadata = json.JSONDecoder().raw_decode(content.decode(), len(begin))[0] if content.startswith(begin) else {}
    except (ValueError, RecursionError):
        metadata = {}
    if type(metadata) is not dict or _STRUCTURE not in metadata:
        refuse_other(path, "safetensors", _inside)


def _inside(path: str) -> Collection[str]:
    """The names of the tensors in a file when no container was saved to it."""
    with files.closing(files.open_file(path)) as fd:
        header = _read_header(fd, path)
    return () if _STRUCTURE in header.metadata else header.entries or header.metadata or ["no tensors"]


def recorded(path: PathLike) -> list[RecordedChecksum]:
    """The checksums that a file keeps of its tensors; none when none were asked for.

    Raises:
        OSError: the file cannot be read.
        SaveError: it is no safetensors file, or its header is broken.
    """
    target = local_path(path)
    with files.closing(files.open_file(target)) as fd:
        header = _read_header(fd, target)
    if _CHECKSUMS not in header.metadata:
        return []
    found = _read_json(header.metadata[_CHECKSUMS], target, _CHECKSUMS)
    if not found.keys() <= header.entries.keys():
        raise SaveError(f"the header of {target!r} is broken: its checksums are not those of its tensors")
    entries = ((name, header.entries[name], checksum) for name, checksum in found.items())
    return [
        RecordedChecksum(name, entry.offset, math.prod(entry.shape) * entry.dtype.itemsize, checksum)
        for name, entry, checksum in entries
    ]


class _Mapped:
    """The tensors of a file by name: over one private map of all of it, so that writing to them leaves it as it is."""

    def __init__(self, fd: int, header: _Header, device: torch.device | None) -> None:
        self.entries = header.entries
        self.broken = header.broken
        self.taken: set[str] = set()
        self.device = device
        # Is told of the bytes of every tensor.
        self.progress: Progress | None = None
        # In FakeTensorMode a new tensor is a fake one.
        self.unread = (device is not None and device.type == "meta") or type(
            torch.empty((), device="cpu")
        ) is not Tensor
        if not self.unread:
            # Through the descriptor whose header was checked: another file may have the path by now.
            self.bytes = file_maps.bytes_of(fd, os.fstat(fd).st_size, header.path)
            self.storage = self.bytes.untyped_storage()

    def take(self, name: str, key: Path) -> Tensor:
        entry = self.entries.get(name)
        if entry is None and name in self.broken:
            raise self.broken[name]
        if entry is None:
            raise SaveError(f"entry {joined(key)!r}: there is no tensor {name!r}")
        self.taken.add(name)
        try:
            tensor = self._tensor(entry)
        except RuntimeError as error:
            raise SaveError(
                f"entry {joined(key)!r}: a tensor of shape {list(entry.shape)} cannot be: {error}"
            ) from error
        if self.progress is not None:
            self.progress.add(tensor.numel() * tensor.itemsize)
        device = self.device
        return tensor if device is None or self.unread else put_on(tensor, device, non_blocking=True)

    def _tensor(self, entry: _Entry) -> Tensor:
        dtype, shape = entry.dtype, entry.shape
        if self.unread:
            return torch.empty(shape, dtype=dtype, device=self.device or "cpu")
        size = dtype.itemsize
        empty = torch.empty(0, dtype=dtype, device="cpu")
        if 0 in shape:
            return empty.view(shape)
        if entry.offset % size:
            # Other programs may leave elements where no tensor can have them: those are copied.
            stop = entry.offset + math.prod(shape) * size
            return self.bytes[entry.offset : stop].clone().view(dtype).view(shape)
        return empty.set_(self.storage, entry.offset // size, shape)  # type: ignore[call-overload, no-any-return]


def _read_header(fd: int, path: str, lenient: bool = False) -> _Header:
    """The header of the file, of which everything has been checked that can be without reading the data.

    With `lenient`, tensors that it gives no place are kept apart.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SaveError(f"{path!r} is not a regular file")
    raw = system.pread(fd, _LENGTH.size, 0)
    length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else -1
    data = _LENGTH.size + length
    if length < 2 or length > _MAX_HEADER or data > status.st_size:
        raise SaveError(
            f"{path!r} is no safetensors file: it has {status.st_size} bytes and says that {max(length, 0)} of them "
            f"are its header, which has at most {_MAX_HEADER}"
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
        raise SaveError(f"the header of {path!r} is broken: {_METADATA!r} is no mapping of strings to strings")
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
        raise SaveError(
            f"the header of {path!r} is broken: it has dtypes for {sorted(packed)[:5]}, which are not there"
        )
    problems: list[SaveError] = []
    for which, text in list(_span_problems(spans, status.st_size - data, path, not broken)):
        if not lenient:
            raise SaveError(text)
        if which is None:
            problems.append(SaveError(text))
        elif entries.pop(which, None) is not None:
            broken[which] = SaveError(text)
    return _Header(path, entries, metadata, broken, problems)


def _read_dtypes(metadata: dict[str, str], path: str) -> dict[str, torch.dtype]:
    """The dtypes of the tensors that stand as bytes."""
    if _DTYPES not in metadata:
        return {}
    names = _read_json(metadata[_DTYPES], path, _DTYPES)
    for name, dtype in names.items():
        if type(dtype) is not str or dtype not in _AS_BYTES:
            raise SaveError(f"entry {name!r}: the dtype {dtype!r:.80} in {path!r} is unknown")
    return {name: _AS_BYTES[dtype] for name, dtype in names.items()}


def _read_structure(header: _Header) -> dict[str, Any] | None:
    """The description that this package has left in the header, if any."""
    if _STRUCTURE not in header.metadata:
        return None
    structure = _read_json(header.metadata[_STRUCTURE], header.path, _STRUCTURE)
    version = structure.get("version")
    if version != _VERSION:
        raise UnsupportedEntryError(f"{header.path!r} is of version {version!r:.80}; this program knows {_VERSION}")
    if type(structure.get("separator")) is not str or "root" not in structure:
        raise SaveError(f"the header of {header.path!r} is broken: {_STRUCTURE!r} has no separator or no root")
    return structure


def _read_json(text: str, path: str, what: str) -> dict[str, Any]:
    try:
        value = parse_json(text, constants=False)
    except ValueError as error:
        raise SaveError(f"the header of {path!r} is broken: {what!r} is no JSON: {error}") from error
    if type(value) is not dict:
        raise SaveError(f"the header of {path!r} is broken: {what!r} is no JSON object")
    return value


def _read_entry(
    name: str, spec: object, as_bytes: torch.dtype | None, data: int, path: str
) -> tuple[_Entry, tuple[int, int]]:
    """A tensor of the header, and where its bytes begin and end in the data."""
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
        raise UnsupportedEntryError(f"entry {name!r} of {path!r}: the dtype {dtype_name!r:.80} is not known here")
    if as_bytes is not None:
        if dtype is not torch.uint8 or size[-1:] != (as_bytes.itemsize,):
            raise SaveError(f"{bad}{dtype_name} of shape {shape} does not hold {as_bytes}")
        dtype, size = as_bytes, size[:-1]
    if math.prod(size) * dtype.itemsize != end - begin:
        raise SaveError(f"{bad}shape {shape} of {dtype_name} needs another number of bytes than {begin} to {end} are")
    return _Entry(dtype, size, data + begin), (begin, end)


def _span_problems(
    spans: list[tuple[int, int, str]], nbytes: int, path: str, all_known: bool
) -> Iterator[tuple[str | None, str]]:
    """What is wrong with where the tensors are, each with the name of one: every byte belongs to exactly one of them.

    all_known: whether `spans` has all of them, so that there are no holes.
    """
    spans.sort()
    end = 0
    for start, stop, name in spans:
        where = f"entry {name!r} of {path!r}"
        if start < end or (all_known and start != end):
            place = f"begins at byte {start} of the data, where byte {end} comes next"
            yield name, f"{where} {place}: its tensors overlap or leave a hole"
        if stop > nbytes:
            place = f"ends at byte {stop} of the data, which has {nbytes} bytes"
            yield name, f"{where} {place}: it was cut off or belongs to another save"
        end = stop
    if all_known and end < nbytes:
        yield None, f"{path!r} has {nbytes} bytes of data, and its tensors {end}: it belongs to another save"


def _nested(tensors: _Mapped, options: LoadOptions, separator: str | None) -> Specification:
    """That of a file without a description of ours: names are nested at the separator.

    A name stays whole from where a tensor has the name of the container that it would be in.
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
    return _nested_in(root, (), tensors, options)


def _nested_in(level: dict[str, Any], key: Path, tensors: _Mapped, options: LoadOptions) -> Specification:
    entries: dict[str, Any] = {}
    for name, value in level.items():
        path = (*key, name)
        if type(value) is dict:
            entries[name] = _nested_in(value, path, tensors, options)
            continue
        try:
            entries[name] = tensors.take(value, path)
        except SaveError as error:
            if options.complain is None:
                raise
            if (found := options.complain(error)) is not None:
                entries[name] = found
    return Specification(DICT, torch.Size(()), options.device, entries=entries)
