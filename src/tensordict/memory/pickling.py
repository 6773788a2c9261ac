"""Pickles containers: the bytes of all their tensors in a few buffers, beside a description of the tree.

Torch pickles each tensor with `torch.save`, which takes some 80 us. So this module collects the plain CPU tensors of a
tree and pickles them together: small storages in one common buffer, each larger storage in a buffer of its own, which
protocol 5 moves out of band without a copy. After unpickling, every storage is separate again.

- A tensor, storage or nested container under two keys stays one object; torch would pickle the storage of two views
  twice. Only the part of a storage that the tree uses is kept. Sharing with objects outside the tree is lost.
- Torch pickles tensors that require grad, subclasses other than parameters, and tensors that are not on the CPU. It
  pickles all tensors in `torch.save`, which uses protocol 2 and stores storages in its own way, and in
  `multiprocessing`, whose pickler shares memory.
- The storage of a consolidated container is one buffer, or one tensor if torch pickles the tensors.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from tensordict.core import ragged, registry
from tensordict.core import torch_internals as internals
from tensordict.core.contract import Contract
from tensordict.core.exceptions import SaveError
from tensordict.memory import copy_on_write
from tensordict.memory.file_maps import FileMap, Finder
from tensordict.memory.flat_buffers import Block, is_whole, new_bytes

# Storages of at least this many bytes get a buffer of their own.
_LARGE = 64 << 10
# Storages begin at multiples of this in a buffer: the size of the largest element.
_ALIGN = 16
# The oldest protocol that can pickle bytes. `torch.save` uses an older one.
_FIRST_PROTOCOL = 3
# The first protocol with out-of-band buffers.
_BUFFERS = 5
# Kinds of leaves that are built from other tensors.
_UNBATCHED, _JAGGED, _STRIDED, _PARAMETER = "UnbatchedTensor", "jagged", "strided", "Parameter"

# The result of `__reduce_ex__`: a function and its arguments, or a name.
Reduced = str | tuple[Any, ...]
# An entry in a packed node; see `_Packer`.
_Slot = object


def reduce(
    container: Contract,
    protocol: int,
    apart: Callable[[Tensor], bool] | None = None,
    maps: Finder | None = None,
) -> Reduced:
    """Return the result of `__reduce_ex__` for a container.

    Args:
        container: the container.
        protocol: the protocol of the pickler.
        apart: returns True for plain tensors that the pickler reduces by itself.
        maps: the mapped files that the pickler reduces by itself.
    """
    plain = protocol >= _FIRST_PROTOCOL
    if not _is_tree(container) or not (plain or _is_consolidated(container) or (maps and _lies_in(container, maps))):
        return object.__reduce_ex__(container, protocol)
    packed = _Packer(container, plain, apart, maps)
    return unpack, (packed.nodes, packed.layouts, packed.columns, *packed.memory(protocol))


def reduce_for_process(container: Contract) -> Reduced:
    """Return the reduction of a container for `multiprocessing`, which pickles tensors by itself.

    The leaves of a consolidated container go as one tensor. Leaves in mapped files go as the descriptor of the file.
    """
    return reduce(container, _FIRST_PROTOCOL - 1, maps=Finder())


def reduce_for_torch(container: Any) -> Reduced | None:
    """Return the reduction of a consolidated container for `torch.save`; `None` for any other container.

    Torch refuses to save tensors of several dtypes over one storage. So this saves the storage, and the container with
    leaves on the meta device.
    """
    if not _is_consolidated(container):
        return None
    leaves = container._leaves()
    if not all(leaf.is_contiguous() and not leaf.is_nested for leaf in leaves):
        # Other layouts cannot be rebuilt from their start alone: save a copy that is not consolidated.
        return container.clone().__reduce_ex__(_FIRST_PROTOCOL - 1)  # type: ignore[no-any-return]
    template = container._rebuilt(
        _wrap_like(leaf, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")) for leaf in leaves
    )
    starts = [leaf.storage_offset() * leaf.itemsize for leaf in leaves]
    return over_storage, (template, container._consolidated[0], starts, bool(container._locked))


def over_storage(template: Any, storage: object, starts: object, locked: object) -> Any:
    """Rebuild a container from the arguments that `reduce_for_torch` returned. A file may contain anything.

    Raises:
        SaveError: the arguments do not fit together.
    """
    leaves = template._leaves() if isinstance(template, Contract) else None
    if (
        leaves is None
        or not (type(storage) is Tensor and storage.dtype is torch.uint8 and storage.dim() == 1)
        or not (storage.is_contiguous() and storage.storage_offset() == 0)
        or not (type(starts) is list and len(starts) == len(leaves))
    ):
        raise SaveError("the consolidated container that was saved does not add up: its parts are of other types")
    block = Block(storage)
    made: list[Tensor] = []
    for leaf, start in zip(leaves, starts, strict=True):
        nbytes = leaf.numel() * leaf.itemsize
        if type(start) is not int or start < 0 or start % leaf.itemsize or start + nbytes > storage.numel():
            raise SaveError(f"a tensor that was saved is said to be at byte {start!r:.30} of {storage.numel()}")
        made.append(_wrap_like(leaf, block.tensor(leaf.dtype, leaf.shape, start)))
    container: Any = template._rebuilt(iter(made))
    container._consolidated = (storage, len(made))
    if locked is True:
        container._lock_tree()
    return container


def _wrap_like(leaf: object, content: Tensor) -> Tensor:
    """Return a parameter over `content` if the leaf is a parameter; else `content`."""
    return torch.nn.Parameter(content, leaf.requires_grad) if type(leaf) is torch.nn.Parameter else content


# `torch.load(weights_only=True)` may call this function, which is harmless with any arguments.
torch.serialization.add_safe_globals([over_storage])


def is_ours(kind: Any) -> bool:
    """Return True if a class of containers uses the pickling of this package and not its own."""
    return kind.__reduce_ex__ is _own_reduce_ex() and kind.__reduce__ is object.__reduce__


@functools.cache
def _own_reduce_ex() -> Any:
    return registry.lookup("TensorDict").__reduce_ex__


def _is_unbatched(value: object) -> bool:
    return type(value) is _unbatched_class()


def _unbatched_class() -> Any:
    return registry.lookup(_UNBATCHED)


def _is_tree(value: Contract) -> bool:
    """Return True if it is enough to pickle the entries, the members or the wrapped container of a container."""
    if isinstance(value, Tensor):
        return False
    if value._wrapped_container() is not value:
        return True
    entries = value._entries
    return isinstance(entries, dict) or (hasattr(entries, "containers") and not value._is_in_file)


def _is_consolidated(container: Contract) -> bool:
    if container._consolidated is None:
        return False
    leaves = container._leaves()
    return is_whole(leaves, container._consolidated)


def _lies_in(container: Contract, maps: Finder) -> bool:
    """Return True if a leaf lies in one of the maps."""
    leaves = container._leaves()
    for leaf in leaves:
        if leaf.layout is torch.jagged:
            leaf = leaf.values()
        elif _is_unbatched(leaf):
            leaf = leaf.as_subclass(Tensor)
        if type(leaf) is Tensor and is_plain(leaf) and maps.of(leaf) is not None:
            return True
    return False


def is_plain(tensor: Tensor) -> bool:
    """Return True if dtype, shape, strides and a CPU storage describe a `torch.Tensor` completely."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    )


class _Packer:
    """Takes a tree of containers apart.

    nodes: class, state, names and slots of every container, nested ones first. A slot that is an int is the number of
        a leaf if it is not negative, and else of a container (the first one is -1). A tuple holds the parts of a leaf.
        Any other object stands for itself.
    layouts: dtype, shape and strides (`None` if contiguous) of leaves.
    columns: for every leaf, the number of its layout, the number of its storage, and its first byte in the storage.
    """

    def __init__(
        self, root: Contract, plain: bool, apart: Callable[[Tensor], bool] | None, maps: Finder | None
    ) -> None:
        self.nodes: list[tuple[Any, ...]] = []
        self.layouts: list[tuple[Any, ...]] = []
        self.columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._plain, self._apart, self._maps = plain, apart, maps
        self._known: dict[int, int] = {}
        self._slot_of: dict[int, _Slot] = {}
        # Temporary tensors, kept alive so that their ids stay unique.
        self._kept: list[Any] = []
        self._layout_of: dict[tuple[Any, ...], int] = {}
        self._home_of: dict[int, int] = {}
        # The used range of bytes in each storage; maps are always kept whole.
        self._spans: list[tuple[Any, int, int]] = []
        # The storages of consolidated containers, on any device.
        self._wholes: dict[int, Tensor] = {}
        self._add_node(root)

    def _add_node(self, container: Any) -> int:
        number = self._known.get(id(container))
        if number is not None:
            return number
        state = dict(container.__getstate__())
        held = state.pop("_consolidated", None)
        if held is not None and _is_consolidated(container):
            self._wholes[internals.storage_id(held[0].untyped_storage())] = held[0]
            state["_consolidated"] = (self._add(held[0]), held[1])
        inner = container._wrapped_container()
        names: Any = None
        if inner is not container:
            names = "_tensordict"
            children = [state.pop(names)]
        elif isinstance(state["_entries"], dict):
            entries = state.pop("_entries")
            names, children = list(entries), list(entries.values())
        else:
            state["_entries"] = copy.copy(state["_entries"])
            children, state["_entries"].containers = state["_entries"].containers, []
        slots = list(map(self._add, children))
        self.nodes.append((type(container), state, names, slots))
        number = self._known[id(container)] = -len(self.nodes)
        return number

    def _add(self, value: object) -> _Slot:
        if type(value) is not Tensor and isinstance(value, Contract):
            if not isinstance(value, Tensor):
                return self._add_node(value) if is_ours(type(value)) and _is_tree(value) else value
            if not _is_unbatched(value) or value.requires_grad:
                return value
            return self._add_parts(value, _UNBATCHED, [value.as_subclass(Tensor)], value._batch_size)
        if type(value) is Tensor and not value.is_nested:
            return self._add_leaf(value) if self._can_pack(value) else value
        if type(value) is torch.nn.Parameter and not value.__dict__ and self._can_pack(value.data):
            return self._add_parts(value, _PARAMETER, [value.data], value.requires_grad)
        return self._add_ragged_leaf(value) if ragged.is_ragged(value) and not value.requires_grad else value

    def _add_ragged_leaf(self, value: Tensor) -> _Slot:
        if value.layout is torch.jagged:
            return self._add_parts(value, _JAGGED, list(ragged.jagged_parts(value)), ragged.jagged_dim(value))
        return self._add_parts(value, _STRIDED, [ragged.flatten_in_row_order(value), ragged.row_sizes(value)], None)

    def _add_parts(self, value: object, kind: str, parts: Sequence[Tensor | None], rest: object) -> _Slot:
        """Return the slot of a leaf that is built from other tensors."""
        slot = self._slot_of.get(id(value))
        if slot is None:
            self._kept += parts
            slot = self._slot_of[id(value)] = (
                kind,
                [None if part is None else self._add(part) for part in parts],
                rest,
            )
        return slot

    def _can_pack(self, tensor: Tensor) -> bool:
        if self._apart is not None and self._apart(tensor):
            return False
        if self._wholes and internals.storage_id(tensor.untyped_storage()) in self._wholes:
            return True
        return is_plain(tensor) and (self._plain or self._map_of(tensor) is not None)

    def _map_of(self, tensor: Tensor) -> FileMap | None:
        return self._maps.of(tensor) if self._maps else None

    def _add_leaf(self, tensor: Tensor) -> int:
        number = self._known.get(id(tensor))
        if number is not None:
            return number
        which, homes, starts = self.columns
        number = self._known[id(tensor)] = len(starts)
        itemsize, shape = tensor.itemsize, tuple(tensor.shape)
        # The offset of a tensor without elements may be beyond the end of its storage.
        start = stop = int(tensor.storage_offset()) * itemsize if tensor.numel() else 0
        strides = None if tensor.is_contiguous() else tensor.stride()
        if strides is None:
            stop += tensor.numel() * itemsize
        elif tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            stop += (last + 1) * itemsize
        layout = (tensor.dtype, shape, strides)
        found = self._layout_of.get(layout)
        if found is None:
            found = self._layout_of[layout] = len(self.layouts)
            self.layouts.append(layout)
        which.append(found)
        file_map = self._map_of(tensor)
        if file_map is None:
            starts.append(start)
            homes.append(self._number_storage(tensor.untyped_storage(), start, stop))
        else:
            starts.append(start + tensor.untyped_storage().data_ptr() - file_map.start)
            homes.append(self._number_map(file_map))
        return number

    def _number_map(self, file_map: FileMap) -> int:
        """Return the number of a map."""
        home = self._home_of.get(-file_map.start)
        if home is None:
            home = self._home_of[-file_map.start] = len(self._spans)
            self._spans.append((file_map, 0, 0))
        return home

    def _number_storage(self, storage: torch.UntypedStorage, start: int, stop: int) -> int:
        """Return the number of a storage, after extending its used range to these bytes."""
        home = self._home_of.get(internals.storage_id(storage))
        start -= start % _ALIGN
        if home is None:
            home = self._home_of[internals.storage_id(storage)] = len(self._spans)
            self._spans.append((storage, start, stop))
        else:
            _, first, last = self._spans[home]
            if start < first or stop > last:
                self._spans[home] = (storage, min(start, first), max(stop, last))
        return home

    def memory(self, protocol: int) -> tuple[pickle.PickleBuffer | bytes | None, list[Any]]:
        """Return the common buffer of the small storages, and a list with an item for every storage.

        An item is the size of the storage in the common buffer, a buffer of its own, a tensor, or a map. This call also
        changes `columns`, whose bytes count from the first kept byte of each storage afterwards.
        """
        _, homes, starts = self.columns
        kept: list[Any] = []
        total = 0
        for storage, first, stop in self._spans:
            if isinstance(storage, FileMap):
                kept.append(storage)
                continue
            whole = self._wholes.get(internals.storage_id(storage))
            if whole is not None and not (self._plain and whole.is_cpu):
                kept.append(whole)
            elif stop - first < _LARGE:
                kept.append(stop - first)
                total += -(-(stop - first) // _ALIGN) * _ALIGN
            else:
                # A NumPy array keeps the memory alive as long as the buffer.
                empty = torch.empty(0, dtype=torch.uint8, device="cpu")
                content = empty.set_(storage, first, (stop - first,)).numpy()  # type: ignore[call-overload]
                kept.append(pickle.PickleBuffer(content) if protocol >= _BUFFERS else content.tobytes())
        small = bytearray(total)
        base = (ctypes.c_char * total).from_buffer(small) if total else None
        position = 0 if base is None else ctypes.addressof(base)
        for (storage, first, _), content in zip(self._spans, kept, strict=True):
            if type(content) is int:
                ctypes.memmove(position, storage.data_ptr() + first, content)
                position += -(-content // _ALIGN) * _ALIGN
        for number, home in enumerate(homes):
            if not isinstance(kept[home], Tensor):
                # The first byte of a map is 0.
                starts[number] -= self._spans[home][1]
        if not total:
            return None, kept
        return pickle.PickleBuffer(small) if protocol >= _BUFFERS else bytes(small), kept


def unpack(
    nodes: Sequence[tuple[Any, ...]],
    layouts: Sequence[tuple[Any, ...]],
    columns: tuple[Sequence[int], Sequence[int], Sequence[int]],
    small: object,
    kept: Sequence[Any],
) -> Any:
    """Rebuild the container that `reduce` took apart; see `_Packer` for the arguments."""
    blocks = _build_blocks(small, kept)
    leaves: list[Tensor] = []
    for which, home, start in zip(*columns, strict=True):
        dtype, shape, strides = layouts[which]
        leaves.append(blocks[home].tensor(dtype, shape, start, strides))
    made: list[Any] = []
    composed: dict[int, Any] = {}

    def value(slot: _Slot) -> Any:
        if type(slot) is int:
            return leaves[slot] if slot >= 0 else made[-1 - slot]
        if type(slot) is not tuple:
            return slot
        if id(slot) not in composed:
            composed[id(slot)] = _build_leaf(slot, leaves)
        return composed[id(slot)]

    for cls, state, names, slots in nodes:
        values = list(map(value, slots))
        if names is None:
            state["_entries"].containers = values
        elif type(names) is str:
            state[names] = values[0]
        else:
            state["_entries"] = dict(zip(names, values, strict=True))
        if "_consolidated" in state:
            storage, count = state["_consolidated"]
            state["_consolidated"] = (value(storage), count)
        node = object.__new__(cls)
        node.__setstate__(state)
        made.append(node)
    return made[-1]


def _build_leaf(slot: tuple[str, list[Any], Any], leaves: list[Tensor]) -> Any:
    kind, numbers, rest = slot
    parts: list[Any] = [leaves[number] if type(number) is int else number for number in numbers]
    if kind == _JAGGED:
        return ragged.from_jagged(parts[0], parts[1], rest, parts[2])
    if kind == _STRIDED:
        return ragged.from_buffer(*parts)
    if kind == _PARAMETER:
        return torch.nn.Parameter(parts[0], rest)
    return _unbatched_class()._over(parts[0], rest)


def _build_blocks(small: Any, kept: Sequence[Any]) -> list[Block]:
    """Return the storages as blocks."""
    found: list[Block] = []
    empty: dict[torch.dtype, Tensor] = {}
    source = None if small is None else numpy.frombuffer(small, dtype=numpy.uint8)
    own = iter(copy_on_write.as_writable_tensors([content for content in kept if _is_buffer(content)]))
    position = 0
    for content in kept:
        if isinstance(content, Tensor):
            found.append(Block(content))
        elif _is_buffer(content):
            found.append(Block(next(own), empty))
        else:
            storage = new_bytes(content)
            if content:
                if source is None or position + content > len(source):
                    raise pickle.UnpicklingError("the buffer of a container is shorter than its tensors")
                ctypes.memmove(storage.data_ptr(), source.ctypes.data + position, content)
            position += -(-content // _ALIGN) * _ALIGN
            found.append(Block(storage, empty))
    return found


def _is_buffer(content: object) -> bool:
    return type(content) is not int and not isinstance(content, Tensor)
