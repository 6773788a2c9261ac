"""The consolidated format: one file with all tensors of a container, one after the other, and their description.

The layout of the file:

- the tensors, each aligned to the size of its elements and to at least 8 bytes;
- JSON of this package: the structure as in `io/formats/structure.py`, and the place of each tensor;
- the length of this JSON as a little-endian int64, and `MAGIC`;
- JSON of the reference, without the entries that the reference cannot describe;
- the length of that JSON as a little-endian int64.

The reference reads the end of the file and the tensors, and skips the part of this package between them. A file without
this part was written by the reference.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensordict.core import ragged
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.formats.detect import refuse_other
from tensordict.io.formats.meta import DTYPES, leaf_spec
from tensordict.io.formats.reference_consolidated import OWN_NAMES, Jagged, Translation
from tensordict.io.formats.stack_columns import Column, is_ragged_leaf
from tensordict.io.formats.structure import SIZES, Complain, Description, name_file, restore
from tensordict.io.saving.checksums import RecordedChecksum
from tensordict.io.saving.leaf_writer import SaveOptions, TensorRun
from tensordict.io.saving.transaction import FileTransaction
from tensordict.io.specification import (
    DICT,
    LAZY,
    UNBATCHED,
    VALUE_STACK,
    WRAPPED,
    Specification,
    specification_of,
    to_container,
)
from tensordict.io.values import NotJson, encode_plainly
from tensordict.memory import file_maps, files, system
from tensordict.memory.flat_buffers import ALIGN, Block, Layout, new_bytes
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path
from tensordict.memory.storable import check_storable

MAGIC = b"tensdict"
_LENGTH = struct.Struct("<q")
# The field in the JSON of this package for the checksums of the tensors, by name.
CHECKSUMS = "checksums"
# Joins the names of a nested key. Names that a person types do not contain it.
SEPARATOR = "\x1f"
# The most JSON that is accepted, because a broken file may claim any length. A million tensors need about 200 MiB.
_MOST_JSON = 1 << 30
# The dtype in the JSON of the reference for dtypes that it does not know.
_AS_BYTES = "torch.uint8"


# --- writing ----------------------------------------------------------------------------------------------------------


class BlockPlan:
    """The content of a file before it is written: the layout of the tensors, and the descriptions.

    Args:
        container: the container to save.

    Raises:
        SaveError: an entry has no content, or its name cannot be encoded as UTF-8.
        UnsupportedEntryError: an entry cannot be stored.
    """

    def __init__(self, container: Any) -> None:
        described = Description(container, SEPARATOR)
        self.spec, self.tensors, self._in_values = described.spec, described.tensors, described.in_values
        self.layout = Layout()
        # The names of the dtypes in the JSON of the reference.
        self.dtypes: dict[torch.dtype, str] = {}
        for name, tensor in self.tensors.items():
            if tensor.is_meta:
                raise SaveError(f"entry {joined(described.keys[name])!r} is on the meta device and has no content")
            check_storable(tensor, described.keys[name])
            if tensor.dtype not in self.dtypes:
                self.dtypes[tensor.dtype] = leaf_spec(tensor.dtype, (), described.keys[name])["dtype"]
            self.layout.add(tensor)
        foreign = _ReferenceDescription(self)
        try:
            root = foreign.describe_node(container, ())
        except NotJson:
            root = _describe_values([], 1, container._locked)
        # `describe_node` has added the offsets of ragged tensors to the layout, which only the reference needs.
        self.payload = _align(self.layout.nbytes)
        self._own = {
            "structure": self.spec,
            "separator": SEPARATOR,
            "locked": container._locked,
            "tensors": {
                name: self._span_of(tensor) for name, tensor in self.tensors.items() if name not in foreign.complete
            },
        }
        self._foreign = _encode_json(root)

    def _span_of(self, tensor: Tensor) -> list[Any]:
        start = self.layout.add(tensor)
        return [str(tensor.dtype), list(tensor.shape), start, start + tensor.numel() * tensor.itemsize]

    def write(self, filename: PathLike, options: SaveOptions, buffer: bool = False) -> Tensor:
        """Write the file in one step: a reader sees the old file or the new one.

        Returns:
            the storage of the tensors: the mapped file, or with `buffer` the memory that the file was written from.

        Raises:
            SaveError: another process or thread is saving there, or a file of another format exists.
            OSError: the file cannot be written; the old file stays.
        """
        storage = new_bytes(self.layout.nbytes) if buffer else None
        if storage is not None:
            self.layout.fill(Block(storage), options.num_threads)
        tensors, positions = self._fill_gaps(storage)
        run = TensorRun(tensors, options.checksum)
        check = None if options.overwrite else _refuse_other
        with FileTransaction(filename, durable=options.durable, check=check) as save:
            with save.new_file(save.path) as fd, files.naming("write the file", save.path):
                run.write(fd, 0, options.num_threads, options.progress)
                checksums = run.checksums()
                end = self._encode_end([checksums[at] for at in positions if checksums])
                files.write_bytes(fd, end, self.payload)
                if storage is None:
                    storage = file_maps.map_shared_bytes(fd, self.layout.nbytes, save.path)
            save.commit()
        return storage

    def _encode_end(self, checksums: list[str]) -> bytes:
        """Return the bytes after the tensors. `checksums` is empty, or has the checksum of each tensor."""
        own = self._own
        if checksums:
            by_tensor = dict(zip(map(id, self.layout.tensors), checksums, strict=True))
            own = {**own, CHECKSUMS: {name: by_tensor[id(tensor)] for name, tensor in self.tensors.items()}}
        return _encode_json(own) + MAGIC + self._foreign

    def _fill_gaps(self, storage: Tensor | None) -> tuple[list[Tensor], list[int]]:
        """Return the tensors with zeros for the gaps between them, and the positions of the tensors in this list.

        With `storage`, return its slices instead of the tensors.
        """
        zeros = torch.zeros(16, dtype=torch.uint8, device="cpu")
        gaps = [zeros[:size] for size in range(16)]
        pieces: list[Tensor] = []
        positions: list[int] = []
        end = 0
        for tensor, start in zip(self.layout.tensors, self.layout.starts, strict=True):
            if start != end:
                pieces.append(gaps[start - end])
            positions.append(len(pieces))
            end = start + tensor.numel() * tensor.itemsize
            pieces.append(tensor if storage is None else storage[start:end])
        return pieces, positions

    def leaves(self, storage: Tensor) -> list[Any]:
        """Return the leaves of the container, in its order, as views of a storage that `write` returned."""
        block = Block(storage)
        add = self.layout.add
        if not any(name.endswith(SIZES) for name in self.tensors):
            leaves = [tensor for name, tensor in self.tensors.items() if name not in self._in_values]
            return [block.tensor(tensor.dtype, tensor.shape, add(tensor)) for tensor in leaves]
        spans = {name: self._span_of(tensor) for name, tensor in self.tensors.items()}
        found: list[Any] = []
        to_container(restore(self.spec, _BlockTensors(block, spans), SEPARATOR))._gather(found)
        return found


def _encode_json(value: object) -> bytes:
    """Return a value as JSON, followed by the length of the JSON."""
    content = json.dumps(value, separators=(",", ":")).encode()
    return content + _LENGTH.pack(len(content))


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class _ReferenceDescription:
    """Describes a container in the JSON format that the reference writes, the tensordict package of PyTorch.

    It leaves out entries that this format cannot describe.
    """

    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self.share = ragged.SharedOffsets()
        # The names of the tensors that this description describes completely.
        self.complete: set[str] = set()

    def describe_node(self, container: Any, key: Path) -> dict[str, Any]:
        form = specification_of(container, key, unread=True, ragged_columns=True)
        if form.is_tensorclass:
            return self.describe_node(form.entries[WRAPPED], key)
        locked = isinstance(container, Contract) and container._locked
        if form.kind == VALUE_STACK:
            return _describe_values(form.value, len(form.batch_size), locked)
        # The reference reads a stack of columns as a container of ragged leaves.
        lazy = form.kind == LAZY and not form.columns
        node: dict[str, Any] = {"cls": LAZY if lazy else DICT, "non_tensors": {}, "leaves": {}}
        if lazy:
            node["cls_metadata"] = _stack_metadata(form.stack_dim, container.stack_dim_name, locked)
        else:
            names, size = form.names, form.batch_size
            if form.columns:
                names, size = None, torch.Size((form.batch_size[form.stack_dim or 0],))
            node["cls_metadata"] = {
                "device": None if form.device is None else str(form.device if form.device.type == "cpu" else "cpu"),
                "names": names or [None] * len(size),
                "batch_size": list(size),
                "is_locked": locked,
            }
        for name, value in form.entries.items():
            self.add_entry(node, name, value, (*key, name))
        return node

    def add_entry(self, node: dict[str, Any], name: str, value: Any, key: Path) -> None:
        if not isinstance(value, (Contract, Specification)):
            self.add_leaf(node["leaves"], name, value, key)
            return
        form = specification_of(value, key)
        if form.kind == UNBATCHED:
            self.add_leaf(node["leaves"], name, value, key)
            return
        # The reference stores only plain JSON values.
        with contextlib.suppress(NotJson):
            if form.is_value and form.kind != VALUE_STACK:
                node["non_tensors"][name] = [encode_plainly(form.value), list(form.batch_size), None]
            elif name not in OWN_NAMES:
                node[name] = self.describe_node(value, key)

    def add_leaf(self, leaves: dict[str, Any], name: str, value: Any, key: Path) -> None:
        full = SEPARATOR.join(key)
        tensor = self.plan.tensors[full]
        if name.startswith("<NJT_"):
            # The reference would read this entry as a part of a ragged tensor.
            return
        if not is_ragged_leaf(value):
            leaves[name] = self.span_of(tensor, tensor.shape)
            if self.plan.dtypes[tensor.dtype] != _AS_BYTES or tensor.dtype is torch.uint8:
                self.complete.add(full)
            return
        row = value.jagged_form() if isinstance(value, Column) else ragged.row_form(value)
        if row is None or row[0] != -1:
            # The reference cannot describe ragged tensors of the strided layout, or jagged in a later dim.
            return
        offsets = self.share(self.plan.tensors[full + SIZES][:, 0].contiguous())
        leaves[f"<NJT_VALUES>{name}"] = self.span_of(tensor, (int(offsets[-1]), *row[1:]))
        leaves[f"<NJT_OFFSETS>{name}"] = [*self.span_of(offsets, offsets.shape), 1]

    def span_of(self, tensor: Tensor, shape: Iterable[int]) -> list[Any]:
        start = self.plan.layout.add(tensor)
        nbytes = tensor.numel() * tensor.itemsize
        padded = _align(nbytes)
        dtype = self.plan.dtypes.get(tensor.dtype) or str(tensor.dtype)
        return [dtype, list(shape), start, start + padded, padded - nbytes]


def _stack_metadata(dim: int | None, name: str | None, locked: bool) -> dict[str, Any]:
    return {"stack_dim": dim, "stack_dim_name": name, "is_locked": locked}


def _describe_values(values: Any, ndim: int, locked: bool) -> dict[str, Any]:
    """Describe a stack of values, given as nested lists of `ndim` levels, as nested stacks along their first dims."""
    node: dict[str, Any] = {
        "cls": VALUE_STACK, "non_tensors": {}, "leaves": {}, "cls_metadata": _stack_metadata(0, None, locked)
    }  # fmt: skip
    for position, value in enumerate(values):
        if ndim == 1:
            node["non_tensors"][str(position)] = [encode_plainly(value), [], None]
        else:
            node[str(position)] = _describe_values(value, ndim - 1, locked)
    return node


# --- reading ----------------------------------------------------------------------------------------------------------


def load(filename: PathLike) -> Any:
    """Load a file of this package or of the reference.

    Raises:
        OSError: the file cannot be read.
        SaveError: the file has another format, or is broken.
        UnsupportedEntryError: a class has not been imported.
    """
    node, content, storage = _open(filename)
    with name_file(local_path(filename)):
        return _finish(to_container(node), content, storage)


def read(filename: PathLike, complain: Complain | None = None) -> Specification:
    """Read the specification of a file, over its mapped tensors. Its tensorclasses need not be imported.

    Args:
        filename: the file.
        complain: is called with the error of a broken entry, as in `restore`.

    Raises:
        OSError: the file cannot be read.
        SaveError: the file has another format, or is broken.
    """
    return _open(filename, complain)[0]


def _open(filename: PathLike, complain: Complain | None = None) -> tuple[Specification, _FileContent, Tensor]:
    """Return the specification of a file, the content of its end, and its mapped bytes."""
    target = local_path(filename)
    fd = files.open_file(target)
    try:
        with name_file(target):
            content = _read_end(fd, complain is not None)
            storage = file_maps.map_bytes(fd, content.nbytes, target)
            tensors = _BlockTensors(Block(storage), content.spans, content.jagged, content.broken)
            return restore(content.spec, tensors, content.separator, complain=complain), content, storage
    except SaveError:
        raise
    except OSError as error:
        raise files.named_os_error(error, "read the file", target) from error
    finally:
        os.close(fd)


def _finish(container: Any, content: _FileContent, storage: Tensor) -> Any:
    """Record the storage in a loaded container, and lock it if the saved one was locked."""
    container._consolidated = (storage, len(container._leaves()))
    if content.locked:
        container.lock_()
    return container


def from_parts(description: Any, storage: object) -> Any:
    """Build a container from a description and a storage, as pickles of the reference contain them.

    Args:
        description: like the JSON of a file of the reference, but with the values themselves.
        storage: the bytes of all tensors, on any device. The tensors of the container are views of them.

    Raises:
        SaveError: the description is broken, or does not fit the storage.
        UnsupportedEntryError: a class has not been imported.
    """
    if not (isinstance(storage, Tensor) and storage.dtype is torch.uint8 and storage.dim() == 1):
        raise SaveError("the storage of the pickled consolidated container is not a uint8 tensor of one dim")
    storage = storage.as_subclass(Tensor).contiguous()
    translation = Translation(description, SEPARATOR, lambda value: value)
    content = _FileContent(translation.spec, translation.spans, SEPARATOR, translation.locked, translation.jagged)
    for name, span in content.spans.items():
        _check_span(span, name, SEPARATOR, storage.numel())
    for _, _, overlap in _find_overlaps(content):
        raise overlap
    tensors = _BlockTensors(Block(storage), content.spans, content.jagged)
    node = restore(content.spec, tensors, SEPARATOR, value=lambda value, *_: value)
    return _finish(to_container(node), content, storage)


def read_checksums(filename: PathLike) -> list[RecordedChecksum]:
    """Return the checksums of the tensors that a file stores; an empty list for a file without checksums.

    Raises:
        OSError: the file cannot be read.
        SaveError: the file has another format, or is broken.
    """
    target = local_path(filename)
    with files.closing(files.open_file(target)) as fd:
        content = _read_end(fd)
    found = {} if content.checksums is None else content.checksums
    if type(found) is not dict or not found.keys() <= content.spans.keys():
        raise SaveError(f"{target!r} is broken: it has checksums for tensors that it lacks")
    spans = ((name, content.spans[name], checksum) for name, checksum in found.items())
    return [
        RecordedChecksum(name.replace(content.separator, "."), start, stop - start, checksum)
        for name, (_, _, start, stop), checksum in spans
    ]


@dataclass(slots=True)
class _FileContent:
    """The content of the end of a file: `spec` as in `Description`, and the span of each tensor."""

    spec: Any
    spans: dict[str, list[Any]]
    separator: str = SEPARATOR
    locked: bool = False
    jagged: dict[str, Jagged] = field(default_factory=dict)
    # The end of the last tensor, in bytes.
    nbytes: int = 0
    checksums: Any = None
    # The errors of broken tensors, which `spans` lacks.
    broken: dict[str, SaveError] = field(default_factory=dict)


class _BlockTensors:
    """A `TensorSource` over the mapped bytes of a file."""

    def __init__(
        self,
        block: Block,
        spans: dict[str, list[Any]],
        jagged: dict[str, Jagged] | None = None,
        broken: dict[str, SaveError] | None = None,
    ) -> None:
        self.block = block
        self.spans = spans
        self.jagged = jagged or {}
        self.broken = broken or {}

    def take(self, name: str, key: Path) -> Tensor:
        span = self.spans.get(name)
        if name in self.broken:
            raise self.broken[name]
        if span is not None:
            dtype, shape, start, _ = span
            return self.block.tensor(DTYPES[dtype], shape, start)
        if name in self.jagged:
            return ragged.flatten_in_row_order(self.take_ragged(self.jagged[name], key))
        if name.removesuffix(SIZES) in self.jagged:
            return ragged.row_sizes(self.take_ragged(self.jagged[name.removesuffix(SIZES)], key))
        raise SaveError(f"entry {joined(key)!r}: the file has no tensor for it")

    def take_ragged(self, parts: Jagged, key: Path) -> Tensor:
        """Build a ragged tensor from its parts in a file of the reference."""
        values, offsets = self.take(parts.values, key), self.take(parts.offsets, key)
        lengths = self.take(parts.lengths, key) if parts.lengths in self.spans else None
        most = values.shape[parts.dim - 1]
        fits = offsets.dtype is torch.int64 and offsets.dim() == 1 and len(offsets) > 0 and _is_within(offsets, most)
        fits = fits and bool((offsets.diff() >= 0).all())
        if fits and lengths is not None:
            fits = lengths.dtype is torch.int64 and lengths.shape == (len(offsets) - 1,) and _is_within(lengths, most)
            fits = fits and _is_within(offsets[:-1] + lengths, most)
        if not fits:
            raise SaveError(f"entry {joined(key)!r}: the offsets of its rows do not fit its elements")
        return ragged.from_jagged(values, offsets, parts.dim, lengths)


def _is_within(positions: Tensor, most: int) -> bool:
    return bool(((positions >= 0) & (positions <= most)).all())


def _read_end(fd: int, lenient: bool = False) -> _FileContent:
    """Read the end of a file. With `lenient`, errors of single tensors are collected in `broken`."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SaveError("it is not a regular file")
    foreign, start = _read_json_before(fd, status.st_size, "at the end of the file")
    has_own = start >= len(MAGIC) and system.pread(fd, len(MAGIC), start - len(MAGIC)) == MAGIC
    own: dict[str, Any] = {}
    if has_own:
        own, start = _read_json_before(fd, start - len(MAGIC), "of the description by tensordict")
        separator = own.get("separator")
        if type(separator) is not str or type(own.get("tensors")) is not dict:
            raise SaveError("it is broken: it does not describe its tensors")
        spans = {**Translation(foreign, separator).spans, **own["tensors"]}
        content = _FileContent(own.get("structure"), spans, separator, own.get("locked") is True)
        content.checksums = own.get(CHECKSUMS)
    else:
        translation = Translation(foreign, SEPARATOR)
        content = _FileContent(translation.spec, translation.spans, SEPARATOR, translation.locked, translation.jagged)
    for name, span in list(content.spans.items()):
        try:
            content.nbytes = max(content.nbytes, _check_span(span, name, content.separator, start))
        except SaveError as error:
            if not lenient:
                raise
            content.broken[name] = error
            del content.spans[name]
    for one, other, overlap in _find_overlaps(content):
        if not lenient:
            raise overlap
        content.broken[one] = content.broken[other] = overlap
    return content


def _read_json_before(fd: int, end: int, what: str) -> tuple[dict[str, Any], int]:
    """Read the JSON object whose length ends at byte `end`. Returns the object and its first byte."""
    size = _LENGTH.size
    length = _LENGTH.unpack(system.pread(fd, size, end - size))[0] if end >= size else -1
    if not 2 <= length <= min(end - size, _MOST_JSON):
        raise SaveError(
            f"it is no consolidated container, or was cut off: the length {what} is {length}, and "
            f"{max(end - size, 0)} bytes are before it"
        )
    start = end - size - length
    try:
        found = parse_json(system.pread(fd, length, start).decode())
    except ValueError as error:
        raise SaveError(f"it is no consolidated container: the text {what} is not JSON ({error})") from error
    if type(found) is not dict:
        raise SaveError(f"it is no consolidated container: the JSON {what} is not an object")
    return found, start


def _refuse_other(path: str) -> None:
    with files.closing(files.open_file(path)) as fd:
        end = os.fstat(fd).st_size - _LENGTH.size
        start = end - _LENGTH.unpack(system.pread(fd, _LENGTH.size, end))[0] - len(MAGIC) if end >= 0 else -1
        if start >= 0 and system.pread(fd, len(MAGIC), start) == MAGIC:
            return
    refuse_other(path, "consolidated", _foreign_names)


def _foreign_names(path: str) -> Collection[str]:
    """Return the names in the JSON at the end of a file of another program; none for a file of the reference."""
    with files.closing(files.open_file(path)) as fd:
        found, _ = _read_json_before(fd, os.fstat(fd).st_size, "at the end of the file")
    return () if {"cls", "leaves"} <= found.keys() else found


def _check_span(span: object, name: str, separator: str, end: int) -> int:
    """Check the dtype, shape and span of a tensor in a file, and return the end of the span."""
    try:
        if type(span) is not list or len(span) != 4:
            raise ValueError(f"it is described by {span!r:.80}")
        dtype, shape, start, stop = span
        if type(dtype) is not str or dtype not in DTYPES:
            raise ValueError(f"its dtype {dtype!r:.80} is unknown")
        checks.shape(shape)
        if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= end:
            raise ValueError(f"it is said to be at {start!r:.30} to {stop!r:.30} of {end} bytes")
        itemsize = DTYPES[dtype].itemsize
        nbytes = math.prod(shape) * itemsize
        if nbytes != stop - start:
            raise ValueError(f"shape {shape!r:.80} of {dtype} needs {nbytes} bytes, not {stop - start}")
        if start % itemsize:
            raise ValueError(f"it begins at byte {start}, which is not a multiple of {itemsize}")
    except ValueError as error:
        raise SaveError(f"entry {name.replace(separator, '.')!r}: {error}") from None
    return stop


def _find_overlaps(content: _FileContent) -> Iterator[tuple[str, str, SaveError]]:
    """Yield the pairs of tensors that overlap, with an error for each. Tensors with equal spans are allowed."""
    end = 0
    for _, _, start, stop in content.spans.values():
        if start < end:
            break
        end = stop
    else:
        return
    spans = sorted((start, stop, name) for name, (_, _, start, stop) in content.spans.items() if start < stop)
    for (start, stop, name), (next_start, next_stop, other) in itertools.pairwise(spans):
        if next_start < stop and (start, stop) != (next_start, next_stop):
            one, two = (repr(which.replace(content.separator, ".")) for which in (name, other))
            yield name, other, SaveError(f"entries {one} and {two} overlap")
