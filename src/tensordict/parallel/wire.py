"""The wire form: a container as a description in JSON and a few messages of plain bytes.

The description has the structure (`io/formats/structure.py`), the values, and the name, dtype, shape and place of every
tensor. A place is an offset in one storage for each device. Small tensors are at the beginning of the storage, in a
block that is one message. Large tensors follow, each as a message that is sent from its own memory. The sender does not
build this storage. The receiver allocates it for a new container, which is therefore consolidated.
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
from tensordict.io import checks
from tensordict.io.formats.structure import SIZES, Description, decode_value, restore
from tensordict.io.specification import Specification, to_container
from tensordict.io.values import EncodedValue, NotJson, encode_without_tensors
from tensordict.memory.files import is_direct
from tensordict.memory.flat_buffers import Block, Layout, is_whole, new_bytes
from tensordict.memory.stored_tensors import StoredTensor, read_stored

# Tensors of up to this many bytes are copied into the block: two copies of 64 KiB take 10 us, a message over gloo 60.
SMALL = 64 << 10
# The length of the first message: magic bytes, the length of the description, and its beginning.
PROLOGUE = 4096
_MAGIC = b"TDwire1\0"
_FIRST = struct.Struct("<8sQ")
# The alignment of large tensors in a storage, in bytes.
_ALIGN = 64
# Separates the names of a nested key.
_SEPARATOR = "\0"


class Sketch(Description):
    """The structure of a container, its tensors, and a separate list of its values.

    Args:
        container: the container.
        allow_pickle: pickle the values that JSON cannot hold.

    Raises:
        SaveError: an entry cannot be sent; the error names its key.
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
            value = {"key": key, "pickle": base64.b64encode(_pickle(form.value, key)).decode()}
        self.values.append(value)
        return EncodedValue(len(self.values) - 1, [])


class WireTensor(NamedTuple):
    """The description of a tensor. It is at the bytes `start` to `stop` of the storage of its device."""

    dtype: torch.dtype
    shape: list[int]
    device: str
    start: int
    stop: int


class Package:
    """A container to send: the bytes of its description, and the messages that follow.

    Args:
        container: the container.
        device_of: returns the type of device to send from, for tensors on a type of device.
        allow_pickle: as in :class:`Sketch`.

    Raises:
        SaveError: an entry cannot be sent; the error names its key.
    """

    def __init__(self, container: Any, device_of: Callable[[str], str], allow_pickle: bool = False) -> None:
        sketch = Sketch(container, allow_pickle)
        tensors = [_prepare_to_send(tensor, sketch.keys[name]) for name, tensor in sketch.tensors.items()]
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
                "dtypes": [str(tensor.dtype)[6:] for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
                "devices": devices,
                "starts": starts,
                "storages": {device: [layout.nbytes, ends[device]] for device, layout in self._layouts.items()},
            },
            separators=(",", ":"),
        ).encode()

    def messages(self, device_of: Callable[[str], torch.device]) -> list[Tensor]:
        """Return the messages in order, as flat tensors of bytes. Large tensors are not copied.

        Args:
            device_of: returns the device to send from, for tensors on a type of device.
        """
        found: list[Tensor] = []
        for device, layout in self._layouts.items():
            if layout.nbytes:
                block = new_bytes(layout.nbytes, device_of(device))
                layout.fill(Block(block))
                found.append(block)
        for tensor in self._large:
            found.append(_view_bytes(tensor.to(device_of(tensor.device.type))))
        return found


def prologue(head: bytes, device: torch.device | str = "cpu") -> list[Tensor]:
    """Return the messages with a description: one, or two if it is too long for the first."""
    room = PROLOGUE - _FIRST.size
    first = _FIRST.pack(_MAGIC, len(head)) + head[:room]
    parts = [first.ljust(PROLOGUE, b"\0"), head[room:]]
    return [as_message(part, device) for part in parts if part]


def as_message(content: bytes, device: torch.device | str) -> Tensor:
    """Return bytes (at least one) as a message on a device."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def content_of(message: Tensor) -> bytes:
    """Return the bytes of a received message."""
    return message.cpu().numpy().tobytes()


def read_prologue(first: Tensor) -> tuple[bytes, int]:
    """Return the beginning of a description from its first message, and the length of the second message.

    Raises:
        TransferError: the message does not begin a description.
    """
    content = content_of(first)
    magic, length = _FIRST.unpack_from(content)
    if magic != _MAGIC:
        raise TransferError(
            "the received message does not begin a container: another call, such as a plain "
            "torch.distributed.send, uses the same tag"
        )
    start = content[_FIRST.size : _FIRST.size + length]
    return start, length - len(start)


class Header:
    """The parsed description of a container, as it was received.

    Raises:
        TransferError: the description is inconsistent, or is the refusal of a sender.
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
                raise ValueError("a shape or a place is negative or not an int")
            for name, dtype, shape, device, start in zip(*columns, strict=True):
                kind = checks.DTYPES[f"torch.{dtype}"]
                stop = start + prod(shape) * kind.itemsize
                cut, end = self.storages[device]
                if not 0 <= start <= stop <= end or start < cut < stop or cut < 0 or start % kind.itemsize:
                    raise ValueError(f"{name!r} lies at {start} to {stop}")
                self.rows[name] = WireTensor(kind, shape, device, start, stop)
        except TransferError:
            raise
        except Exception as error:  # the network may deliver any bytes, and callers handle only `TransferError`
            raise TransferError(f"the received description is broken: {error!r:.200}") from error

    @property
    def nbytes(self) -> int:
        """The number of bytes of all messages that follow."""
        return sum(cut for cut, _ in self.storages.values()) + sum(row.stop - row.start for _, row in self.large())

    def large(self) -> Iterator[tuple[str, WireTensor]]:
        """Iterate over the large tensors, which have their own messages."""
        for name, row in self.rows.items():
            if row.stop > self.storages[row.device][0]:
                yield name, row

    def make_container(self, tensors: Mapping[str, Tensor], allow_pickle: bool) -> Any:
        """Make the container over these tensors.

        Raises:
            SaveError: the description is broken; or it has a tensorclass that this program has not defined, or a
                pickled value, without `allow_pickle`.
        """

        def value(index: object, key: Path, _: object) -> Any:
            return load_value(self.values[index], key, allow_pickle)

        return to_container(restore(self.node, _TensorSource(tensors), _SEPARATOR, value))

    def make_holder(self, sent: Any, allow_pickle: bool) -> Any:
        """Make the container of one received non-tensor value.

        Raises:
            SaveError: the description is broken, or the value cannot be loaded.
        """
        key = tuple(sent["key"])
        node = self.node
        for name in key:
            node = node["entries"][name]
        source = _TensorSource({})
        return to_container(restore(node, source, _SEPARATOR, lambda *_: load_value(sent, key, allow_pickle)))


class NewBuffers:
    """The memory for a new container: one storage for each device. The buffers for the messages are parts of it.

    Args:
        header: the description of the container.
        device_of: returns the device to receive on, for tensors on a type of device.
    """

    def __init__(self, header: Header, device_of: Callable[[str], torch.device]) -> None:
        self.header = header
        self.storages = {device: new_bytes(end, device_of(device)) for device, (_, end) in header.storages.items()}
        self.buffers = [self.storages[device][:cut] for device, (cut, _) in header.storages.items() if cut]
        self.buffers += [self.storages[row.device][row.start : row.stop] for _, row in header.large()]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        over = {device: Block(storage) for device, storage in self.storages.items()}
        return {
            name: over[row.device].tensor(row.dtype, row.shape, row.start) for name, row in self.header.rows.items()
        }

    def make_container(self, allow_pickle: bool) -> Any:
        """Make the container. All messages must have been received."""
        made = self.header.make_container(self.tensors(), allow_pickle)
        if len(self.storages) == 1:
            (storage,) = self.storages.values()
            if storage.is_cuda:
                made = made.to(storage.device)
            leaves = made._leaves()
            if is_whole(leaves, (storage, len(leaves))):
                made._consolidated = (storage, len(leaves))
        return made


class TargetBuffers:
    """The memory to receive into an existing container of the same structure.

    Large tensors are received in the memory of the leaves, if possible. The others go through buffers.

    Args:
        header: the received description.
        sketch: the structure and the tensors of the container.
        device_of: returns the device to receive on, for tensors on a type of device.
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
            # The memory of a lazy view holds the conjugates or the negatives of its elements.
            is_plain = target.is_contiguous() and not (target.is_conj() or target.is_neg())
            if is_plain and target.device == device_of(row.device):
                self.buffers.append(_view_bytes(target))
            else:
                buffer = new_bytes(row.stop - row.start, device_of(row.device))
                self.buffers.append(buffer)
                self._staged.append((target, buffer, row))

    @staticmethod
    def fits(header: Header, sketch: Sketch) -> bool:
        """Return whether a container has the described tensors, in memory that can be written, and the same values."""
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

    def copy_to_leaves(self) -> None:
        """Copy the tensors that were received in a buffer to their leaves."""
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


class _TensorSource:
    """The received tensors, for `restore`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def take(self, name: str, key: Path) -> Tensor:
        if name not in self._tensors:
            raise SaveError(f"{entry_of(key)}the description does not have this tensor")
        return self._tensors[name]


def load_value(value: Any, key: Path, allow_pickle: bool) -> Any:
    """Load a value from its JSON or its pickle.

    Raises:
        SaveError: the value is pickled and `allow_pickle` is false, or it cannot be unpickled; the error names the key.
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
    except Exception as error:  # the class of the value may raise any error
        raise SaveError(f"{entry_of(key)}the value cannot be unpickled: {error}") from error


def _pickle(value: object, key: Path) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # the class of the value may raise any error
        raise UnsupportedEntryError(f"{entry_of(key)}the value cannot be pickled: {error}") from error


def _prepare_to_send(tensor: Tensor, key: Path) -> Tensor:
    """Return a tensor whose bytes can be sent. A stored tensor is read into memory.

    Raises:
        UnsupportedEntryError: the tensor has no plain bytes in memory.
    """
    if (kind := type(tensor)) is StoredTensor:
        return read_stored(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else "quantized" if tensor.is_quantized else f"of {tensor.layout}"
        raise UnsupportedEntryError(f"{entry_of(key)}a tensor that is {what} cannot be sent")
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UnsupportedEntryError(
            f"{entry_of(key)}a {kind.__name__} cannot be sent; if it is a DTensor, send full_tensor() of the container"
        )
    return tensor


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: a view if it is contiguous, else a copy."""
    plain = tensor.detach()
    plain = plain if type(plain) is Tensor else plain.as_subclass(Tensor)
    return plain.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
