"""The consolidated format: the tensors of a container one behind the other in one file, and their description.

The layout of the file:

- the tensors, each aligned to the size of its elements and to 8 bytes at least;
- JSON of our own: the structure as `io/formats/structure.py` describes it, and where each tensor is;
- its length as a little-endian int64, and `MAGIC`;
- JSON as the reference writes and reads it, which lacks what it has no form for;
- its length as a little-endian int64.

The reference looks at the end of the file and at the tensors, and so passes over what is between them. A file without
our part was written by the reference.
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
from tensordict.core.exceptions import SaveError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, joined
from tensordict.io import checks
from tensordict.io.formats.detect import refuse_other
from tensordict.io.formats.meta import DTYPES, leaf_spec
from tensordict.io.formats.reference_consolidated import OWN_NAMES, Jagged, Translation
from tensordict.io.formats.stack_columns import Column, is_ragged
from tensordict.io.formats.structure import SIZES, Complain, Described, naming_file, restore
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
from tensordict.memory.flat_buffers import ALIGN, Block, Layout, fresh
from tensordict.memory.mapped import PathLike
from tensordict.memory.names import local_path
from tensordict.memory.storable import check_storable

MAGIC = b"tensdict"
_LENGTH = struct.Struct("<q")
# In our JSON: the checksums of the tensors by name, where they were asked for.
CHECKSUMS = "checksums"
# Between the names of a nested key: no name that is typed has it.
SEPARATOR = "\x1f"
# More JSON than this is taken for a sign that the length is made up. A million tensors need about 200 MiB.
_MOST_JSON = 1 << 30
# What the reference is told of a dtype that it does not know.
_AS_BYTES = "torch.uint8"


# --- writing ----------------------------------------------------------------------------------------------------------


class BlockPlan:
    """What a file will hold.

    Args:
        container: what is to be saved.

    Raises:
        SaveError: an entry has no content, or its name is no text.
        UnsupportedEntryError: an entry cannot be stored.
    """

    def __init__(self, container: Any) -> None:
        described = Described(container, SEPARATOR)
        self.spec, self.tensors, self._in_values = described.spec, described.tensors, described.in_values
        self.layout = Layout()
        # The dtypes, and what the reference is told that they are.
        self.dtypes: dict[torch.dtype, str] = {}
        for name, tensor in self.tensors.items():
            if tensor.is_meta:
                raise SaveError(f"entry {joined(described.keys[name])!r} is on the meta device and has no content")
            try:
                check_storable(tensor)
                if tensor.dtype not in self.dtypes:
                    self.dtypes[tensor.dtype] = leaf_spec(tensor.dtype, ())["dtype"]
            except UnsupportedEntryError as error:
                raise UnsupportedEntryError(f"entry {joined(described.keys[name])!r}: {error}") from None
            self.layout.add(tensor)
        foreign = _Foreign(self)
        try:
            root = foreign.node(container, ())
        except NotJson:
            root = _stack_of([], 1, container._locked)
        # The offsets of ragged tensors, which only the reference needs, have been added by now.
        self.payload = _padded(self.layout.nbytes)
        self._own = {
            "structure": self.spec,
            "separator": SEPARATOR,
            "locked": container._locked,
            "tensors": {name: self._span(tensor) for name, tensor in self.tensors.items() if name not in foreign.said},
        }
        self._foreign = _tail(root)

    def _span(self, tensor: Tensor) -> list[Any]:
        start = self.layout.add(tensor)
        return [str(tensor.dtype), list(tensor.shape), start, start + tensor.numel() * tensor.itemsize]

    def write(self, filename: PathLike, options: SaveOptions, buffer: bool = False) -> Tensor:
        """Write the file in one step: a reader sees the old one or the new one.

        Returns:
            the storage of the tensors: the file, mapped; with `buffer`, memory from which it was written.

        Raises:
            SaveError: another process or thread is saving there, or there is a file that is no consolidated container.
            OSError: the file cannot be written; what was there before stays.
        """
        storage = fresh(self.layout.nbytes) if buffer else None
        if storage is not None:
            self.layout.fill(Block(storage), options.num_threads)
        tensors, places = self._row(storage)
        row = TensorRun(tensors, options.checksum)
        check = None if options.overwrite else _refuse_other
        with FileTransaction(filename, durable=options.durable, check=check) as save:
            with save.new_file(save.path) as fd, files.naming("write the file", save.path):
                row.write(fd, 0, options.num_threads, options.progress)
                checksums = row.checksums()
                files.write_bytes(fd, self._end([checksums[at] for at in places if checksums]), self.payload)
                if storage is None:
                    storage = file_maps.shared_bytes_of(fd, self.layout.nbytes, save.path)
            save.commit()
        return storage

    def _end(self, checksums: list[str]) -> bytes:
        """What follows the tensors, given their checksums, if any were asked for."""
        own = self._own
        if checksums:
            by_tensor = dict(zip(map(id, self.layout.tensors), checksums, strict=True))
            own = {**own, CHECKSUMS: {name: by_tensor[id(tensor)] for name, tensor in self.tensors.items()}}
        return _tail(own) + MAGIC + self._foreign

    def _row(self, storage: Tensor | None) -> tuple[list[Tensor], list[int]]:
        """The tensors (those in `storage`, when they have been collected) with zeros for what is between them; and
        which of these are the tensors."""
        zeros = torch.zeros(16, dtype=torch.uint8, device="cpu")
        gaps = [zeros[:size] for size in range(16)]
        row: list[Tensor] = []
        places: list[int] = []
        end = 0
        for tensor, start in zip(self.layout.tensors, self.layout.starts, strict=True):
            if start != end:
                row.append(gaps[start - end])
            places.append(len(row))
            end = start + tensor.numel() * tensor.itemsize
            row.append(tensor if storage is None else storage[start:end])
        return row, places

    def leaves(self, storage: Tensor) -> list[Any]:
        """The leaves over a storage that `write` gave, in the order of those of the container."""
        block = Block(storage)
        add = self.layout.add
        if not any(name.endswith(SIZES) for name in self.tensors):
            leaves = [tensor for name, tensor in self.tensors.items() if name not in self._in_values]
            return [block.tensor(tensor.dtype, tensor.shape, add(tensor)) for tensor in leaves]
        spans = {name: self._span(tensor) for name, tensor in self.tensors.items()}
        found: list[Any] = []
        to_container(restore(self.spec, _Tensors(block, spans), SEPARATOR))._gather(found)
        return found


def _tail(value: object) -> bytes:
    content = json.dumps(value, separators=(",", ":")).encode()
    return content + _LENGTH.pack(len(content))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


class _Foreign:
    """The description of a container as the reference reads it, without what it has no form for."""

    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self.share = ragged.SharedOffsets()
        # The names of the tensors of which it says all there is to say.
        self.said: set[str] = set()

    def node(self, container: Any, key: Path) -> dict[str, Any]:
        form = specification_of(container, key, unread=True, ragged_columns=True)
        if form.is_tensorclass:
            return self.node(form.entries[WRAPPED], key)
        locked = isinstance(container, Contract) and container._locked
        if form.kind == VALUE_STACK:
            return _stack_of(form.value, len(form.batch_size), locked)
        # A stack by columns is a container of ragged leaves to the reference.
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
            self.entry(node, name, value, (*key, name))
        return node

    def entry(self, node: dict[str, Any], name: str, value: Any, key: Path) -> None:
        if not isinstance(value, (Contract, Specification)):
            self.leaf(node["leaves"], name, value, key)
            return
        form = specification_of(value, key)
        if form.kind == UNBATCHED:
            self.leaf(node["leaves"], name, value, key)
            return
        # The reference has no form for a value that is not plain.
        with contextlib.suppress(NotJson):
            if form.is_value and form.kind != VALUE_STACK:
                node["non_tensors"][name] = [encode_plainly(form.value), list(form.batch_size), None]
            elif name not in OWN_NAMES:
                node[name] = self.node(value, key)

    def leaf(self, leaves: dict[str, Any], name: str, value: Any, key: Path) -> None:
        full = SEPARATOR.join(key)
        tensor = self.plan.tensors[full]
        if name.startswith("<NJT_"):
            # What it takes for a part of a ragged tensor.
            return
        if not is_ragged(value):
            leaves[name] = self.span(tensor, tensor.shape)
            if self.plan.dtypes[tensor.dtype] != _AS_BYTES or tensor.dtype is torch.uint8:
                self.said.add(full)
            return
        row = value.jagged_form() if isinstance(value, Column) else ragged.row_form(value)
        if row is None or row[0] != -1:
            # It has none for the strided layout, and of other jagged tensors the rows are not in C order.
            return
        offsets = self.share(self.plan.tensors[full + SIZES][:, 0].contiguous())
        leaves[f"<NJT_VALUES>{name}"] = self.span(tensor, (int(offsets[-1]), *row[1:]))
        leaves[f"<NJT_OFFSETS>{name}"] = [*self.span(offsets, offsets.shape), 1]

    def span(self, tensor: Tensor, shape: Iterable[int]) -> list[Any]:
        start = self.plan.layout.add(tensor)
        nbytes = tensor.numel() * tensor.itemsize
        padded = _padded(nbytes)
        dtype = self.plan.dtypes.get(tensor.dtype) or str(tensor.dtype)
        return [dtype, list(shape), start, start + padded, padded - nbytes]


def _stack_metadata(dim: int | None, name: str | None, locked: bool) -> dict[str, Any]:
    return {"stack_dim": dim, "stack_dim_name": name, "is_locked": locked}


def _stack_of(values: Any, ndim: int, locked: bool) -> dict[str, Any]:
    """Nested lists of values, `ndim` deep, as stacks along the first dim of each other."""
    node: dict[str, Any] = {
        "cls": VALUE_STACK, "non_tensors": {}, "leaves": {}, "cls_metadata": _stack_metadata(0, None, locked)
    }  # fmt: skip
    for position, value in enumerate(values):
        if ndim == 1:
            node["non_tensors"][str(position)] = [encode_plainly(value), [], None]
        else:
            node[str(position)] = _stack_of(value, ndim - 1, locked)
    return node


# --- reading ----------------------------------------------------------------------------------------------------------


def load(filename: PathLike) -> Any:
    """The container in a file, of this package or of the reference.

    Raises:
        OSError: the file cannot be read.
        SaveError: it is of another format, or its content does not add up.
        UnsupportedEntryError: it is of a class that this program does not know.
    """
    node, content, storage = _opened(filename)
    with naming_file(local_path(filename)):
        return _settled(to_container(node), content, storage)


def read(filename: PathLike, complain: Complain | None = None) -> Specification:
    """The specification of the container in a file, over its mapped tensors; fails as `load` does, but for
    tensorclasses that this program does not know.

    Args:
        filename: the file.
        complain: is told of an entry that is broken, as in `restore`.
    """
    return _opened(filename, complain)[0]


def _opened(filename: PathLike, complain: Complain | None = None) -> tuple[Specification, _Content, Tensor]:
    """What a file holds, what its end says, and all of its bytes, mapped."""
    target = local_path(filename)
    fd = files.open_file(target)
    try:
        with naming_file(target):
            content = _read(fd, complain is not None)
            storage = file_maps.bytes_of(fd, content.nbytes, target)
            tensors = _Tensors(Block(storage), content.spans, content.jagged, content.broken)
            return restore(content.spec, tensors, content.separator, complain=complain), content, storage
    except SaveError:
        raise
    except OSError as error:
        raise files.named_os_error(error, "read the file", target) from error
    finally:
        os.close(fd)


def _settled(container: Any, content: _Content, storage: Tensor) -> Any:
    """A container that has been made, knowing of its storage and locked where it was."""
    container._consolidated = (storage, len(container._leaves()))
    if content.locked:
        container.lock_()
    return container


def from_parts(description: Any, storage: object) -> Any:
    """The container that the reference describes beside a tensor with the bytes of its tensors, as in its pickles.

    Args:
        description: as the JSON of a file, with the values themselves.
        storage: the bytes, on any device; the tensors of the container are views of it.

    Raises:
        SaveError: the two do not add up.
        UnsupportedEntryError: it is of a class that this program does not know.
    """
    if not (isinstance(storage, Tensor) and storage.dtype is torch.uint8 and storage.dim() == 1):
        raise SaveError("the tensors of the consolidated container that was pickled are no row of bytes")
    storage = storage.as_subclass(Tensor).contiguous()
    said = Translation(description, SEPARATOR, lambda value: value)
    content = _Content(said.spec, said.spans, SEPARATOR, said.locked, said.jagged)
    for name, span in content.spans.items():
        _checked(span, name, SEPARATOR, storage.numel())
    for _, _, overlap in _overlaps(content):
        raise overlap
    tensors = _Tensors(Block(storage), content.spans, content.jagged)
    node = restore(content.spec, tensors, SEPARATOR, value=lambda value, *_: value)
    return _settled(to_container(node), content, storage)


def recorded(filename: PathLike) -> list[RecordedChecksum]:
    """The checksums that a file keeps of its tensors; none when none were asked for.

    Raises:
        OSError: the file cannot be read.
        SaveError: it is of another format, or its content does not add up.
    """
    target = local_path(filename)
    with files.closing(files.open_file(target)) as fd:
        content = _read(fd)
    found = {} if content.checksums is None else content.checksums
    if type(found) is not dict or not found.keys() <= content.spans.keys():
        raise SaveError(f"{target!r} is broken: its checksums are not those of its tensors")
    spans = ((name, content.spans[name], checksum) for name, checksum in found.items())
    return [
        RecordedChecksum(name.replace(content.separator, "."), start, stop - start, checksum)
        for name, (_, _, start, stop), checksum in spans
    ]


@dataclass(slots=True)
class _Content:
    """What the end of a file says: `spec` as in `Described`, and where each of its tensors is."""

    spec: Any
    spans: dict[str, list[Any]]
    separator: str = SEPARATOR
    locked: bool = False
    jagged: dict[str, Jagged] = field(default_factory=dict)
    # How much of the file the tensors reach into.
    nbytes: int = 0
    checksums: Any = None
    # What is wrong with tensors that `spans` lacks for that.
    broken: dict[str, SaveError] = field(default_factory=dict)


class _Tensors:
    """The tensors over a block by name."""

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
            return ragged.in_row_order(self.ragged(self.jagged[name], key))
        if name.removesuffix(SIZES) in self.jagged:
            return ragged.row_sizes(self.ragged(self.jagged[name.removesuffix(SIZES)], key))
        raise SaveError(f"entry {joined(key)!r}: the file has no tensor for it")

    def ragged(self, parts: Jagged, key: Path) -> Tensor:
        """A ragged tensor of a file of the reference, which has its parts."""
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


def _read(fd: int, lenient: bool = False) -> _Content:
    """What the end of a file says; with `lenient`, tensors that it gives no place are kept apart."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SaveError("it is not a regular file")
    foreign, start = _json_before(fd, status.st_size, "at the end of the file")
    has_own = start >= len(MAGIC) and system.pread(fd, len(MAGIC), start - len(MAGIC)) == MAGIC
    own: dict[str, Any] = {}
    if has_own:
        own, start = _json_before(fd, start - len(MAGIC), "of the description by tensordict")
        separator = own.get("separator")
        if type(separator) is not str or type(own.get("tensors")) is not dict:
            raise SaveError("it is broken: it says nothing of its tensors")
        said = Translation(foreign, separator)
        content = _Content(own.get("structure"), {**said.spans, **own["tensors"]}, separator, own.get("locked") is True)
        content.checksums = own.get(CHECKSUMS)
    else:
        said = Translation(foreign, SEPARATOR)
        content = _Content(said.spec, said.spans, SEPARATOR, said.locked, said.jagged)
    for name, span in list(content.spans.items()):
        try:
            content.nbytes = max(content.nbytes, _checked(span, name, content.separator, start))
        except SaveError as error:
            if not lenient:
                raise
            content.broken[name] = error
            del content.spans[name]
    for one, other, overlap in _overlaps(content):
        if not lenient:
            raise overlap
        content.broken[one] = content.broken[other] = overlap
    return content


def _json_before(fd: int, end: int, what: str) -> tuple[dict[str, Any], int]:
    """The JSON object whose length ends at byte `end`, and where it begins."""
    size = _LENGTH.size
    length = _LENGTH.unpack(system.pread(fd, size, end - size))[0] if end >= size else -1
    if not 2 <= length <= min(end - size, _MOST_JSON):
        raise SaveError(
            f"it is no consolidated container, or was cut off: the length {what} is {length}, where there are "
            f"{max(end - size, 0)} bytes before it"
        )
    start = end - size - length
    try:
        found = parse_json(system.pread(fd, length, start).decode())
    except ValueError as error:
        raise SaveError(f"it is no consolidated container: what is {what} is not JSON ({error})") from error
    if type(found) is not dict:
        raise SaveError(f"it is no consolidated container: what is {what} is no object")
    return found, start


def _refuse_other(path: str) -> None:
    with files.closing(files.open_file(path)) as fd:
        end = os.fstat(fd).st_size - _LENGTH.size
        start = end - _LENGTH.unpack(system.pread(fd, _LENGTH.size, end))[0] - len(MAGIC) if end >= 0 else -1
        if start >= 0 and system.pread(fd, len(MAGIC), start) == MAGIC:
            return
    refuse_other(path, "consolidated", _inside)


def _inside(path: str) -> Collection[str]:
    """The names in the JSON at the end of a file when the reference has not written it."""
    with files.closing(files.open_file(path)) as fd:
        found, _ = _json_before(fd, os.fstat(fd).st_size, "at the end of the file")
    return () if {"cls", "leaves"} <= found.keys() else found


def _entry(name: str, separator: str) -> str:
    return f"entry {name.replace(separator, '.')!r}: "


def _checked(span: object, name: str, separator: str, end: int) -> int:
    """Where a tensor ends in the file, whose description is checked for all that a loader relies on."""
    if type(span) is not list or len(span) != 4:
        raise SaveError(f"{_entry(name, separator)}it is described by {span!r:.80}")
    dtype, shape, start, stop = span
    if type(dtype) is not str or dtype not in DTYPES:
        raise SaveError(f"{_entry(name, separator)}its dtype {dtype!r:.80} is unknown")
    try:
        checks.shape(shape)
    except ValueError as error:
        raise SaveError(f"{_entry(name, separator)}{error}") from None
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= end:
        raise SaveError(f"{_entry(name, separator)}it is said to be at {start!r:.30} to {stop!r:.30} of {end} bytes")
    itemsize = DTYPES[dtype].itemsize
    nbytes = math.prod(shape) * itemsize
    if nbytes != stop - start:
        raise SaveError(
            f"{_entry(name, separator)}shape {shape!r:.80} of {dtype} needs {nbytes} bytes, not {stop - start}"
        )
    if start % itemsize:
        raise SaveError(f"{_entry(name, separator)}it begins at byte {start}, which is no multiple of {itemsize}")
    return stop


def _overlaps(content: _Content) -> Iterator[tuple[str, str, SaveError]]:
    """The pairs of tensors that lie in each other; those that are the same may."""
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
            yield name, other, SaveError(f"entries {one} and {two} lie in each other")
