"""The wire form: a container as one description in JSON and a few messages of plain bytes.

The description has the structure (`io/formats/structure.py`), the values that are no tensors, and the name, dtype,
shape and place of every tensor. Tensors have their place in one imagined storage per device: small ones in the block
that it begins with, which is one message; large ones behind it, each a message of its own that is sent from its own
memory. What is received anew really lies in such a storage, and so is a consolidated container.
"""

from __future__ import annotations

import base64
import ctypes
import itertools
import json
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensordict.core.exceptions import SaveError, TransferError, UnsupportedEntryError
from tensordict.core.json_text import parse_json
from tensordict.core.keys import Path, entry_of
from tensordict.io.formats.structure import SIZES, Description, decode_value, restore
from tensordict.io.specification import Specification, to_container
from tensordict.io.values import EncodedValue, NotJson, encode_without_tensors
from tensordict.memory.files import is_direct
from tensordict.memory.flat_buffers import Block, Layout, is_whole, new_bytes
from tensordict.memory.stored_tensors import StoredTensor, in_memory

# A tensor of up to this many bytes is copied into the block: two copies of 64 KiB take 10 us, a message over gloo 60.
SMALL = 64 << 10
# The first message of every container: magic, the length of the description, and as much of it as fits.
PROLOGUE = 4096
_MAGIC = b"TDwire1\0"
_FIRST = struct.Struct("<8sQ")
# Where large tensors begin in a storage.
_ALIGN = 64
# Stands between the names of a nested key.
_SEPARATOR = "\0"

_DTYPES = {str(dtype)[6:]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_NAMES = {dtype: str(dtype)[6:] for dtype in _DTYPES.values()}


class Sketch(Description):
    """The structure of a container, its tensors, and its values apart from the structure.

    Args:
        container: what is described.
        allow_pickle: pickle the values that JSON cannot hold.

    Raises:
        SaveError: an entry cannot be sent; the key is named.
    """

    def __init__(self, container: Any, allow_pickle: bool = False) -> None:
        self.values: list[dict[str, Any]] = []
        self._allow_pickle = allow_pickle
        super().__init__(container, _SEPARATOR)

    def _encode_value(self, form: Specification, key: Path) -> EncodedValue:
        try:
            value: dict[str, Any] = {"key": key, "json": encode_without_tensors(form.value)}
        except NotJson as error:
            if not self._allow_pickle:
                raise UnsupportedEntryError(
                    f"{entry_of(key)}{error}: pass allow_pickle=True on both sides to send it pickled"
                ) from None
            value = {"key": key, "pickle": base64.b64encode(_pickled(form.value, key)).decode()}
        self.values.append(value)
        return EncodedValue(len(self.values) - 1, [])


class WireTensor(NamedTuple):
    """A tensor on the wire: where it lies in the storage of a device."""

    dtype: torch.dtype
    shape: list[int]
    device: str
    start: int
    stop: int


class Package:
    """A container on its way out: the bytes of its description, and the messages that follow.

    Args:
        container: what is sent.
        device_of: gives the type of the device from which messages with tensors of a type of device are sent.
        allow_pickle: as for :class:`Sketch`.

    Raises:
        SaveError: an entry cannot be sent; the key is named.
    """

    def __init__(self, container: Any, device_of: Callable[[str], str], allow_pickle: bool = False) -> None:
        sketch = Sketch(container, allow_pickle)
        tensors = [_sendable(tensor, sketch.keys[name]) for name, tensor in sketch.tensors.items()]
        devices = [device_of(tensor.device.type) for tensor in tensors]
        self.count = len(tensors)
        self._layouts = {device: Layout() for device in dict.fromkeys(devices)}
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        starts = [
            self._layouts[device].add(tensor) if size <= SMALL else -1
            for tensor, device, size in zip(tensors, devices, sizes, strict=True)
        ]
        ends = {device: layout.nbytes for device, layout in self._layouts.items()}
        large = [at for at, size in enumerate(sizes) if size > SMALL]
        for at in large:
            starts[at] = -(-ends[devices[at]] // _ALIGN) * _ALIGN
            ends[devices[at]] = starts[at] + sizes[at]
        self._large = [tensors[at] for at in large]
        self.head = json.dumps(
            {
                "node": sketch.spec,
                "values": sketch.values,
                "names": list(sketch.tensors),
                "dtypes": [_NAMES[tensor.dtype] for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
                "devices": devices,
                "starts": starts,
                "storages": {device: [layout.nbytes, ends[device]] for device, layout in self._layouts.items()},
            },
            separators=(",", ":"),
        ).encode()

    def messages(self, device_of: Callable[[str], torch.device]) -> list[Tensor]:
        """The messages in their order, as flat tensors of bytes; large tensors are not copied.

        Args:
            device_of: gives the device that messages are sent from, for the type of one.
        """
        found: list[Tensor] = []
        for device, layout in self._layouts.items():
            if layout.nbytes:
                block = new_bytes(layout.nbytes, device_of(device))
                layout.fill(Block(block))
                found.append(block)
        for tensor in self._large:
            found.append(_flat(tensor.to(device_of(tensor.device.type))))
        return found


def prologue(head: bytes, device: torch.device | str = "cpu") -> list[Tensor]:
    """A description as the first message, and as a second one if it is too long for the first."""
    room = PROLOGUE - _FIRST.size
    first = _FIRST.pack(_MAGIC, len(head)) + head[:room]
    parts = [first.ljust(PROLOGUE, b"\0"), head[room:]]
    return [as_message(part, device) for part in parts if part]


def as_message(content: bytes, device: torch.device | str) -> Tensor:
    """Bytes, at least one, as a message that is sent from this device."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def content_of(message: Tensor) -> bytes:
    """The bytes of a message that has arrived."""
    return message.cpu().numpy().tobytes()


def opened(first: Tensor) -> tuple[bytes, int]:
    """What the first message has of a description, and the length of the second.

    Raises:
        TransferError: it is no such message.
    """
    content = content_of(first)
    magic, length = _FIRST.unpack_from(content)
    if magic != _MAGIC:
        raise TransferError(
            "what has been received does not begin a container: another call, such as a plain "
            "torch.distributed.send, uses the same tag"
        )
    start = content[_FIRST.size : _FIRST.size + length]
    return start, length - len(start)


class Header:
    """A description that has been received.

    Raises:
        TransferError: it does not add up, or says why there is no container.
    """

    def __init__(self, content: bytes) -> None:
        self.rows: dict[str, WireTensor] = {}
        self.storages: dict[str, list[int]] = {}
        try:
            fields = parse_json(content)
            if "refusal" in fields:
                raise TransferError(f"nothing was sent: {fields['refusal']}")
            self.node, self.values = fields["node"], fields["values"]
            self.storages = {str(device): [int(cut), int(end)] for device, (cut, end) in fields["storages"].items()}
            columns = [fields[name] for name in ("names", "dtypes", "shapes", "devices", "starts")]
            sizes = list(itertools.chain(columns[4], *columns[2]))
            if not {*map(type, sizes)} <= {int} or min(sizes, default=0) < 0:
                raise ValueError("a shape or a place is negative or no int")
            for name, dtype, shape, device, start in zip(*columns, strict=True):
                kind = _DTYPES[dtype]
                stop = start + prod(shape) * kind.itemsize
                cut, end = self.storages[device]
                if not 0 <= start <= stop <= end or start < cut < stop or cut < 0 or start % kind.itemsize:
                    raise ValueError(f"{name!r} lies at {start} to {stop}")
                self.rows[name] = WireTensor(kind, shape, device, start, stop)
        except TransferError:
            raise
        except Exception as error:  # Anything may come from the network, and nothing else may come out of here.
            raise TransferError(f"the description of what was received is broken: {error!r:.200}") from error

    @property
    def nbytes(self) -> int:
        """The bytes of all messages that follow."""
        return sum(cut for cut, _ in self.storages.values()) + sum(row.stop - row.start for _, row in self.large())

    def large(self) -> Iterator[tuple[str, WireTensor]]:
        """The tensors that have messages of their own."""
        for name, row in self.rows.items():
            if row.stop > self.storages[row.device][0]:
                yield name, row

    def built(self, tensors: Mapping[str, Tensor], allow_pickle: bool) -> Any:
        """The container, over these tensors.

        Raises:
            SaveError: the description is broken, of a tensorclass that is not known here, or has a pickled value.
        """

        def value(index: object, key: Path, _: object) -> Any:
            return unpacked(self.values[index], key, allow_pickle)

        return to_container(restore(self.node, _Given(tensors), _SEPARATOR, value))

    def holder(self, sent: Any, allow_pickle: bool) -> Any:
        """The holder of one of the values.

        Raises:
            SaveError: the description is broken, or the value cannot be loaded.
        """
        key = tuple(sent["key"])
        node = self.node
        for name in key:
            node = node["entries"][name]
        return to_container(restore(node, _Given({}), _SEPARATOR, lambda *_: unpacked(sent, key, allow_pickle)))


class NewBuffers:
    """The memory for a container that is received anew: one storage per device.

    Args:
        header: its description.
        device_of: gives the device to receive on, for the type of one.
    """

    def __init__(self, header: Header, device_of: Callable[[str], torch.device]) -> None:
        self.header = header
        self.storages = {device: new_bytes(end, device_of(device)) for device, (_, end) in header.storages.items()}
        self.buffers = [self.storages[device][:cut] for device, (cut, _) in header.storages.items() if cut]
        self.buffers += [self.storages[row.device][row.start : row.stop] for _, row in header.large()]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        over = {device: Block(storage) for device, storage in self.storages.items()}
        return {
            name: over[row.device].tensor(row.dtype, row.shape, row.start) for name, row in self.header.rows.items()
        }

    def container(self, allow_pickle: bool) -> Any:
        """The container, once its bytes are there."""
        made = self.header.built(self.tensors(), allow_pickle)
        if len(self.storages) == 1:
            (storage,) = self.storages.values()
            if storage.is_cuda:
                made = made.to(storage.device)
            leaves = made._leaves()
            if is_whole(leaves, (storage, len(leaves))):
                made._consolidated = (storage, len(leaves))
        return made


class TargetBuffers:
    """The memory of a container of the very structure that a header describes, as the target of its messages.

    Args:
        header: the description.
        sketch: that of the container.
        device_of: gives the device to receive on, for the type of one.
    """

    def __init__(self, header: Header, sketch: Sketch, device_of: Callable[[str], torch.device]) -> None:
        self.header = header
        self._writable = sketch.tensors
        self._blocks: dict[str, Tensor] = {}
        self._staged: list[tuple[Tensor, Tensor, WireTensor]] = []
        self.buffers: list[Tensor] = []
        for device, (cut, _) in header.storages.items():
            if cut:
                self._blocks[device] = new_bytes(cut, device_of(device))
                self.buffers.append(self._blocks[device])
        for name, row in header.large():
            target = self._writable[name].detach()
            if target.device == device_of(row.device) and target.is_contiguous() and not _is_changed(target):
                self.buffers.append(_flat(target))
            else:
                buffer = new_bytes(row.stop - row.start, device_of(row.device))
                self.buffers.append(buffer)
                self._staged.append((target, buffer, row))

    @staticmethod
    def fits(header: Header, sketch: Sketch) -> bool:
        """Whether a container has the very tensors, all in memory that can be written to, and the same values' keys."""
        targets = sketch.tensors
        if targets.keys() != header.rows.keys():
            return False
        for name, row in header.rows.items():
            target = targets[name]
            if target.dtype is not row.dtype or list(target.shape) != row.shape or name.endswith(SIZES):
                return False
            if type(target) is StoredTensor or 0 in target.stride():
                return False
        return [value["key"] for value in sketch.values] == [tuple(value["key"]) for value in header.values]

    def spread(self) -> None:
        """Copy what did not arrive in its place to its place."""
        for device, block in self._blocks.items():
            cut = self.header.storages[device][0]
            views = Block(block)
            base = block.data_ptr() if block.is_cpu else 0
            for name, row in self.header.rows.items():
                if row.device != device or row.stop > cut or row.start == row.stop:
                    continue
                target = self._writable[name]
                if base and is_direct(target):
                    ctypes.memmove(target.data_ptr(), base + row.start, row.stop - row.start)
                else:
                    target.detach().copy_(views.tensor(row.dtype, row.shape, row.start))
        for target, buffer, row in self._staged:
            target.copy_(Block(buffer).tensor(row.dtype, row.shape, 0))


class _Given:
    """Tensors by name, for `restore`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, key: Path) -> Tensor:
        if name not in self._tensors:
            raise SaveError(f"{entry_of(key)}the description has no tensor for it")
        return self._tensors[name]


def unpacked(value: Any, key: Path, allow_pickle: bool) -> Any:
    """The value that was sent as `value`.

    Raises:
        SaveError: it is pickled, and no pickle may be loaded; the key is named.
    """
    if "json" in value:
        return decode_value(value["json"], key)
    if not allow_pickle:
        raise UnsupportedEntryError(
            f"{entry_of(key)}the value was sent pickled, and loading a pickle may run any code: pass allow_pickle=True "
            "if you trust the sender"
        )
    try:
        return pickle.loads(base64.b64decode(value["pickle"]))
    except Exception as error:  # What a value does when it is unpickled is its own business.
        raise SaveError(f"{entry_of(key)}the value cannot be unpickled: {error}") from error


def _pickled(value: object, key: Path) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # As for unpickling.
        raise UnsupportedEntryError(f"{entry_of(key)}the value cannot be pickled: {error}") from error


def _sendable(tensor: Tensor, key: Path) -> Tensor:
    """A tensor with bytes of its own that can be sent.

    Raises:
        UnsupportedEntryError: it has none.
    """
    kind = type(tensor)
    if kind is Tensor and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized):
        return tensor
    if kind is StoredTensor:
        return in_memory(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else f"of {tensor.layout}"
        raise UnsupportedEntryError(f"{entry_of(key)}a tensor that is {what} cannot be sent")
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnsupportedEntryError(
            f"{entry_of(key)}a {kind.__name__} cannot be sent as it is; where it is a DTensor, full_tensor() of the "
            "container gives what can"
        )
    return tensor


def _flat(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; a view where it is contiguous."""
    plain = tensor.detach()
    plain = plain if type(plain) is Tensor else plain.as_subclass(Tensor)
    return plain.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _is_changed(tensor: Tensor) -> bool:
    """Whether its bytes are not its elements."""
    return tensor.is_conj() or tensor.is_neg()
